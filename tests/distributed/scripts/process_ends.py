"""A job of two ranks to which things happen at moments of its life: `process_ends.py FOLDER WAY@MOMENT ...`.

At `horovod` that is about to start, and at `init` ranks are about to tell each other their addresses; at `step` rank 0
waits in a step for rank 1, at `save` rank 1 is about to put a file of its part on disk, and at `shutdown` rank 0 waits
in smp.shutdown for rank 1. To rank 1 happens what a function here is called after. Then the job goes on, where it can.
"""

import os
import resource
import secrets
import signal
import subprocess
import sys
import threading

import smp_tf as smp

# isort: split
import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from tf_keras import layers

from smp_tf.job.at_shutdown import on_shutdown
from tests.ops.rank_fleet import full_stderr

EVENTS = [event.split("@") for event in sys.argv[2:]]
RANK = int(os.environ["HOROVOD_RANK"])


def say(words):
    print(f"@@ {words}", flush=True)


def fork_and_exit():
    if os.fork() == 0:
        sys.exit(5)
    _, status = os.wait()
    say(f"a child ended with {os.waitstatus_to_exitcode(status)}")


def fork_and_exec():
    if os.fork() == 0:
        os.execv("/bin/sh", ["sh", "-c", "exit 6"])
    _, status = os.wait()
    code = os.waitstatus_to_exitcode(status)
    say(f"a program ended with {code}, another with {subprocess.run(['true'], check=False).returncode}")


def interrupt():
    os.kill(os.getpid(), signal.SIGINT)


def sys_exit():
    sys.exit(3)


def os_exit():
    os._exit(3)


def block_stderr():
    """The test kills rank 0 then."""
    os.dup2(full_stderr("blocking")[1], 2)
    say("nobody reads it")
    wait_for_the_end()


def fail_unread():
    """Nobody reads the traceback either."""
    os.dup2(full_stderr("blocking")[1], 2)
    raise ValueError("not read")


def close_stderr():
    os.close(2)
    say("nobody reads it")
    wait_for_the_end()


def wait_for_the_end():
    """In Python, as a script that catches what it can."""
    threading.Event().wait()


def fill_disk():
    """No file can grow, as on a full disk; the words of a rank go into a pipe."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def make_room():
    most = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))


def happen(moment, *, beside=False):
    """What is to happen on rank 1 at a moment; if beside, in a thread, where it would be in the midst of a call."""
    for way, at in EVENTS:
        if RANK == 1 and at == moment:
            say(f"{way} at {moment}")
            if beside and way.startswith("fork"):
                thread = threading.Thread(target=globals()[way])
                thread.start()
                thread.join()
            else:
                globals()[way]()


def before(owner, name, moment):
    """Lets it happen before the first call of a function."""
    original = getattr(owner, name)

    def call(*args, **kwargs):
        setattr(owner, name, original)
        say(f"has come to {moment}")
        happen(moment, beside=moment == "save")
        return original(*args, **kwargs)

    setattr(owner, name, call)


def save(manager):
    try:
        say(f"saved {os.path.basename(manager.save())}")
    except smp.errors.CheckpointError as error:
        say(f"CheckpointError: {error}")


def main():
    before(secrets, "token_bytes", "init")
    # Where there is no room for shared memory.
    before(hvd, "init", "horovod")
    smp.init({"partitions": 2, "microbatches": 1, "seed": 1})
    make_room()
    model = smp.DistributedModel(lambda: __import__("tf_keras").Sequential([layers.Dense(4), layers.Dense(3)]))

    @smp.step
    def step(x):
        return model(x)

    step(np.ones((4, 3), np.float32))
    happen("step")
    step(np.ones((4, 3), np.float32))
    make_room()
    manager = smp.CheckpointManager(tf.train.Checkpoint(model=model), sys.argv[1])
    before(os, "fsync", "save")
    save(manager)
    make_room()
    save(manager)
    on_shutdown(lambda: happen("shutdown"))
    smp.shutdown()
    make_room()
    say("done")


main()
