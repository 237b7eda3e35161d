"""Runs a script as one rank of a test job: `python rank_main.py script.py arguments...`.

Before the script starts, standard output and error go to this rank's own pipe, where the job has a folder for it
(so that the ranks' words do not mix, and arrive even when the launcher is dead), and SIGUSR1 is made to print the
Python stacks of all threads (so that a job that hangs can say where).

Where the environment names a warm process (`warm_process.py`), the rank is forked from that, and
this process waits for its end.
"""

import contextlib
import faulthandler
import json
import os
import runpy
import signal
import socket
import sys
from pathlib import Path
from types import FrameType

from tests import quick_import

HELLO = "@@rank started, pid "
#: Names the socket of the warm process in a rank's environment.
WARM = "SMP_TF_TEST_WARM"


def main() -> None:
    if (folder := os.environ.get("SMP_TF_TEST_FOLDER")) is not None:
        pipe = Path(folder) / f"rank-{os.environ.get('HOROVOD_RANK', '0')}.pipe"
        descriptor = os.open(pipe, os.O_WRONLY)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        os.close(descriptor)
    warm = os.environ.pop(WARM, None)
    if warm is not None:
        end_as(status_of_forked(warm))
    quick_import.install()
    run()


def run() -> None:
    """Runs the script, in this process."""
    print(f"{HELLO}{os.getpid()}", flush=True)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    script = sys.argv[1]
    sys.argv = sys.argv[1:]
    sys.path[0] = str(Path(script).resolve().parent)
    runpy.run_path(script, run_name="__main__")


def status_of_forked(name: str) -> int:
    """How the rank ended that was forked from the warm process in place of this one, as `waitpid` says it."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.connect(f"\0{name}")
        asked = {"arguments": sys.argv, "environment": dict(os.environ), "folder": str(Path.cwd())}
        socket.send_fds(server, [json.dumps(asked).encode()], [0, 1, 2])
        rank = int(server.recv(64))

        def hand_on(number: int, frame: FrameType | None) -> None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank, number)

        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, hand_on)
        return int(server.recv(64))


def end_as(status: int) -> None:
    """Ends this process as the other has ended."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.WEXITSTATUS(status))


if __name__ == "__main__":
    main()
