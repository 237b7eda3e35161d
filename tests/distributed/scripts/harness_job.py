"""A job for the harness's own tests: does what the command line says, without TensorFlow.

harness_job.py exit 3        rank 1 exits with 3
harness_job.py hang          every rank waits forever in a function named wait_for_nothing
harness_job.py marker        prints "ready" and waits for a signal
harness_job.py leave         leaves a process, a shared-memory file and a socket behind
"""

import os
import signal
import socket
import subprocess
import sys
import threading
from multiprocessing import resource_tracker, shared_memory

rank = int(os.environ["HOROVOD_RANK"])


def wait_for_nothing() -> None:
    threading.Event().wait()


def leave_things_behind() -> None:
    block = shared_memory.SharedMemory(create=True, size=16, name=f"smp_harness_{os.getpid()}")
    resource_tracker.unregister(block._name, "shared_memory")
    server = socket.socket(socket.AF_UNIX)
    server.bind(os.environ["TMPDIR"] + "/left.sock")
    nowhere = subprocess.DEVNULL  # else the launcher would wait for the end of what it writes
    subprocess.Popen(["sleep", "1000"], start_new_session=True, stdout=nowhere, stderr=nowhere)


match sys.argv[1]:
    case "exit":
        sys.exit(int(sys.argv[2]) if rank == 1 else 0)
    case "hang":
        print("about to wait")
        wait_for_nothing()
    case "marker":
        print("ready")
        signal.pause()
    case "leave":
        if rank == 0:
            leave_things_behind()
