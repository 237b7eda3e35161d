"""A script: calls a function by name on one of two devices, which has a variable on each."""

from __future__ import annotations

import tensorflow as tf

from smp_tf.ops.call import call
from smp_tf.partition.tf_internals import call_options

cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
stored = []
for number in range(2):
    with tf.device(f"CPU:{number}"):
        stored.append(tf.Variable(float(number + 1)))


@tf.function(autograph=False)
def body(x):
    return [x * stored[0] + stored[1]]


function = body.get_concrete_function(tf.TensorSpec([]))


@tf.function(autograph=False)
def run(x):
    return [call(function, [x], call_options(), is_first=first).outputs[0] for first in (True, False)]


with tf.device("CPU:1"):
    print([float(result) for result in run(tf.constant(3.0))])
