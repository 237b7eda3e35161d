"""Cases that the harness's own tests run; none needs TensorFlow."""

import os
import signal
import subprocess
import threading

import numpy as np


def rank() -> int:
    return int(os.environ["HOROVOD_RANK"])


def give_values(factor: float) -> dict[str, object]:
    print(f"words of rank {rank()}")
    return {"rank": rank(), "array": np.arange(3) * factor, "nested": [{"x": np.float64(1.5)}]}


def raise_on(raising_rank: int) -> dict[str, object]:
    if rank() == raising_rank:
        raise ValueError(f"the case failed on rank {raising_rank}")
    return {}


def die_on(dying_rank: int) -> dict[str, object]:
    if rank() == dying_rank:
        os.kill(os.getpid(), signal.SIGKILL)
    return {}


def wait_forever() -> None:
    threading.Event().wait()


def say_pid() -> dict[str, object]:
    return {"pid": os.getpid()}


def leave_a_process() -> dict[str, object]:
    """Starts a process that outlives this one."""
    subprocess.Popen(["sleep", "1000"], start_new_session=True)
    return {}
