"""A job of two ranks that ends in the way its argument names."""

import atexit
import ctypes
import itertools
import os
import secrets
import signal
import sys
import time
from typing import Any

import horovod.tensorflow as hvd

import smp_tf as smp
from smp_tf.start import arrivals

IPC_PRIVATE, IPC_CREAT = 0, 0o1000


def die(*_: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def die_when_awaited(imported: bool = False, **_: Any) -> None:
    """Rank 1 dies when rank 0 has come to smp.init, or imported smp_tf."""
    arrivals._starts = itertools.repeat(1)
    launcher = arrivals.Arrivals(imported=imported)
    while not launcher._has_come(0, deadline=time.monotonic() + 60.0):
        pass
    # As UCX does while it is loaded, which removes it a moment later.
    assert ctypes.CDLL(None).shmget(IPC_PRIVATE, 4096, IPC_CREAT | 0o600) >= 0
    die()


def configuration(way: str) -> dict[str, Any]:
    """What this rank gives to smp.init, in which some ways end."""
    if way == "die_after_import" and os.environ["HOROVOD_RANK"] == "0":
        signal.pause()
    if os.environ["HOROVOD_RANK"] == "1":
        if way == "die_after_import":
            die_when_awaited(imported=True)
        if way == "die_before_init":
            die_when_awaited()
        if way == "die_in_horovod":
            hvd.init = die_when_awaited
        if way == "die_in_greeting":
            start = hvd.init
            hvd.init = lambda **options: die(start(**options))
        if way == "die_in_init":
            # Asked for when Horovod runs, just before ranks tell each other their addresses.
            secrets.token_bytes = die
        if way == "configure_apart":
            return {"partitions": 2, "microbatches": 2}
    return {"partitions": 2, "microbatches": 1}


def wait() -> None:
    """Each rank waits for a message of the other."""
    print("@@ waiting", flush=True)
    smp.recv_from(1 - smp.rank())


def die_in_shutdown() -> None:
    """Rank 1 dies while rank 0 waits for it in smp.shutdown."""
    if smp.rank() == 1:
        smp.recv_from(0)
        die()
    smp.send("about to end", 1)
    smp.shutdown()


def die_at_exit() -> None:
    """Rank 1 dies when its script has ended, before it says goodbye."""
    if smp.rank() == 1:
        atexit.register(die)


def raise_beside_horovod() -> None:
    """Rank 1 fails while rank 0 waits in a collective of Horovod."""
    if smp.rank() == 1:
        raise ValueError("never\ncame to the sum")
    _sum_of_all()


def die_beside_horovod() -> None:
    """Rank 1 dies while rank 0 waits in a collective of Horovod."""
    if smp.rank() == 1:
        smp.recv_from(0)
        die()
    smp.send("about to wait", 1)
    _sum_of_all()


def _sum_of_all() -> None:
    import tensorflow as tf

    hvd.allreduce(tf.constant([1.0]), name="sum", process_set=hvd.global_process_set)


def fit() -> None:
    """Trains until it is stopped."""
    import tensorflow as tf

    layers = tf.keras.layers
    model = smp.DistributedModel(tf.keras.Sequential([layers.Dense(4), layers.Dense(1)]))
    model.compile("sgd", "mse")
    say = tf.keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: epoch or print("@@ waiting", flush=True))
    data = tf.data.Dataset.from_tensors((tf.ones([8, 3]), tf.ones([8, 1])))
    model.fit(data, epochs=1_000_000, verbose=0, callbacks=[say])


def main() -> None:
    way = sys.argv[1]
    smp.init(configuration(way))
    smp.barrier()
    globals()[way]()


main()
