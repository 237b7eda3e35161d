"""A script with a fault in a layer, to show how a failure is told: `make pictures`."""

import smp_tf as smp  # before TensorFlow

# isort: split
import numpy as np
import tensorflow as tf


class Scores(tf.keras.layers.Layer):
    """Looks a score up for every number."""

    def build(self, shape: tf.TensorShape) -> None:
        """Makes ten scores."""
        self.scores = self.add_weight("scores", shape=[10])

    def call(self, numbers: tf.Tensor) -> tf.Tensor:
        """Returns the scores of numbers from 0 to 9."""
        return tf.gather(self.scores, tf.cast(numbers, "int32"))


smp.init({"partitions": 2, "microbatches": 4})
model = smp.DistributedModel(
    lambda: tf.keras.Sequential([tf.keras.layers.Dense(64, activation="relu"), Scores(), tf.keras.layers.Dense(1)])
)
model.compile("sgd", "mse")
numbers = np.random.default_rng(0)
# The second layer looks up what the first one gives, and has ten scores only.
model.fit(1000 * numbers.normal(size=[64, 8]), numbers.normal(size=[64, 1]), batch_size=32, verbose=2)
