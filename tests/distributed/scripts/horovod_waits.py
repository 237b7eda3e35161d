"""Rank 1 does not come to what rank 0 waits in, which is an op of Horovod; see the modes.

broadcast   what `smp.callbacks.BroadcastInitialState` sends after the first batch
function    hvd.allgather in a tf.function of the script
raw         Horovod's op below hvd's names, eagerly; the ranks share one replica
"""

import argparse
import signal

import smp_tf as smp

# isort: split
import horovod.tensorflow as hvd
import tensorflow as tf
from horovod.tensorflow import mpi_ops

parser = argparse.ArgumentParser()
parser.add_argument("mode", choices=["broadcast", "function", "raw"])
options = parser.parse_args()


class Late(tf.keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if smp.rank() == 1:
            signal.pause()


@tf.function
def gathered(x):
    return hvd.allgather(x, name="of_the_script")


smp.init({"partitions": 2 if options.mode == "raw" else 1, "microbatches": 2, "stall_timeout": 3})
if options.mode == "broadcast":
    model = smp.DistributedModel(lambda: tf.keras.Sequential([tf.keras.layers.Dense(1)]))
    model.compile("sgd", "mse")
    callbacks = [Late(), smp.callbacks.BroadcastInitialState()]
    model.fit(tf.ones([8, 3]), tf.ones([8, 1]), batch_size=4, verbose=0, callbacks=callbacks)
elif smp.rank() == 1:
    signal.pause()
elif options.mode == "function":
    gathered(tf.ones([2]))
else:
    mpi_ops._allreduce(tf.ones([2]), name="below")
