"""What a worker of torchrun owes to its launcher: it ends with it. torchrun.py is the other side: it starts torchrun.

ddp_train.py imports this before anything else, as a launcher may be killed while its workers still import PyTorch.
"""

import os
import signal
import threading
import time

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
