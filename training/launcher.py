"""What a worker of torchrun owes to its launcher: it ends with it, and for good where starting it again cannot help.

ddp_train.py imports this before anything else, as a launcher may be killed while its workers still import PyTorch.
torchrun.py is the other side: it starts torchrun.
"""

import os
import signal
import sys
import threading
import time
from pathlib import Path

LAUNCHER = os.getppid()


def end_at_once_on_signals() -> None:
    """Lets Ctrl-C end this process as SIGTERM does, without a traceback, while there is nothing to save.

    A worker must not ignore what its launcher was told to ignore, by nohup or a script: torchrun handles SIGINT and
    SIGHUP all the same, and waits for its workers to end.
    """
    if "RANK" in os.environ:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    elif signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def leave_with_launcher() -> None:
    """Ends this process, without saving, within a second of torchrun's end.

    torchrun's workers outlive a killed launcher and would go on training on their own.
    """

    def watch() -> None:
        while os.getppid() == LAUNCHER:
            time.sleep(0.2)
        os._exit(1)

    threading.Thread(target=watch, name="launcher-watch", daemon=True).start()


def leave_where_a_mistake_was_told() -> None:
    """Ends this process, with 2, if one before it has: --max-restarts starts it again, and the user's mistake stays.

    Nothing can tell torchrun not to; so it goes through its restarts within seconds, and nothing is said again.
    """
    folder = _launch_folder()
    if folder is not None and (folder / "mistake").exists():
        sys.exit(2)


def note_mistake() -> None:
    """Makes `leave_where_a_mistake_was_told` end what torchrun starts again, on this machine.

    Not where it has trained already: with the same arguments, what is in the way then may pass, as a full disk does.
    """
    folder = _launch_folder()
    if folder is not None and not (folder / "begun").exists():
        (folder / "mistake").touch()


def note_begun() -> None:
    """Records that this torchrun has come to train, on this machine."""
    folder = _launch_folder()
    if folder is not None:
        (folder / "begun").touch()


def is_news(text: str) -> bool:
    """Whether no worker that this torchrun has started before has said this, as a restart can meet the same again."""
    folder = _launch_folder()
    if folder is None:
        return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    said = folder / "said"
    if said.exists() and text in said.read_text(encoding="utf-8", errors="surrogateescape").split("\0"):
        return False
    with said.open("a", encoding="utf-8", errors="surrogateescape") as file:
        file.write(text + "\0")
    return True


def _launch_folder() -> Path | None:
    """torchrun's own folder for what it starts on this machine, the same for all restarts and private to the user.

    None without torchrun, or where it has none. It holds attempt_<restart>/<local rank>/error.json, which is the path
    that workers are given.
    """
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not error_file:
        return None
    folder = Path(error_file).parents[2]
    return folder if folder.is_dir() else None


leave_where_a_mistake_was_told()
