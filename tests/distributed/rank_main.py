"""Runs a script as one rank of a test job: `python rank_main.py script.py arguments...`.

Before the script starts, standard output and error go to this rank's own pipe (so that the ranks'
words do not mix, and arrive even when the launcher is dead), and SIGUSR1 is made to print the
Python stacks of all threads (so that a job that hangs can say where).
"""

import faulthandler
import os
import runpy
import signal
import sys
from pathlib import Path

from tests import quick_import

HELLO = "@@rank started, pid "


def main() -> None:
    pipe = Path(os.environ["SMP_TF_TEST_FOLDER"]) / f"rank-{os.environ.get('HOROVOD_RANK', '0')}.pipe"
    descriptor = os.open(pipe, os.O_WRONLY)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    print(f"{HELLO}{os.getpid()}", flush=True)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    quick_import.install()
    script = sys.argv[1]
    sys.argv = sys.argv[1:]
    sys.path[0] = str(Path(script).resolve().parent)
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
