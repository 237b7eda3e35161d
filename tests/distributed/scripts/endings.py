"""A job of two ranks that ends in the way its argument names; rank 0 waits for rank 1."""

import os
import signal
import sys

import smp_tf as smp


def wait_for(other: int) -> None:
    print("@@ waiting", flush=True)
    smp.recv_from(other)


def raise_an_exception() -> None:
    if smp.rank() == 1:
        raise ValueError("the data are\nnot there")
    wait_for(1)


def die() -> None:
    if smp.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    wait_for(1)


def leave_early() -> None:
    if smp.rank() == 0:
        wait_for(1)


def wait() -> None:
    wait_for(1 - smp.rank())


def wait_in_horovod() -> None:
    """Rank 1 fails while rank 0 waits in a collective of Horovod."""
    import horovod.tensorflow as hvd
    import tensorflow as tf

    if smp.rank() == 1:
        raise ValueError("never came to the sum")
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
    config = {"partitions": 2}
    if sys.argv[1] == "configure_apart":
        config["microbatches"] = 1 + int(os.environ["HOROVOD_RANK"])
    smp.init(config)
    smp.barrier()
    globals()[sys.argv[1]]()


main()
