"""Saves twice; while it saves the second time, one rank kills itself at its n-th call of a kind.

killed_save.py FOLDER RANK CALL N [asynchronous]
"""

import os
import signal
import sys

import smp_tf as smp

# isort: split
import numpy as np
import tensorflow as tf
from tf_keras import layers


def main() -> None:
    folder, rank, call, left = sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
    smp.init({"partitions": 2, "microbatches": 2, "seed": 1})
    model = smp.DistributedModel(lambda: __import__("tf_keras").Sequential([layers.Dense(4), layers.Dense(3)]))
    number = tf.Variable(0)

    @smp.step
    def step(x):
        return model(x)

    step(np.ones((4, 3), np.float32))
    checkpoint = tf.train.Checkpoint(model=model, number=number)
    asynchronous = sys.argv[5:] == ["asynchronous"]
    manager = smp.CheckpointManager(checkpoint, folder, max_to_keep=1, asynchronous=asynchronous)
    number.assign(1)
    manager.save()
    manager.wait()
    number.assign(2)
    original = getattr(os, call)

    def deadly(*args, **kwargs):
        nonlocal left
        left -= 1
        if left == 0:
            print("@@ killed", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **kwargs)

    if smp.rank() == rank:
        setattr(os, call, deadly)
    manager.save()
    if asynchronous:
        number.assign(3)
        step(np.ones((4, 3), np.float32))
    smp.shutdown()


main()
