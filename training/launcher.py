"""What a worker of torchrun owes to its launcher: it ends with it. torchrun.py is the other side: it starts torchrun.

ddp_train.py imports this before anything else, as a launcher may be killed while its workers still import PyTorch.
"""

import os
import threading
import time

LAUNCHER = os.getppid()


def leave_with_launcher() -> None:
    """Ends this process, without saving, within a second of torchrun's end.

    torchrun's workers outlive a killed launcher and would go on training on their own.
    """

    def watch() -> None:
        while os.getppid() == LAUNCHER:
            time.sleep(0.2)
        os._exit(1)

    threading.Thread(target=watch, name="launcher-watch", daemon=True).start()
