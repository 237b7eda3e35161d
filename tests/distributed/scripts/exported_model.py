"""The model of a training whose checkpoints `smp-tf checkpoint export` makes files of."""

import tf_keras
from tf_keras import layers


def compiled():
    inputs = layers.Input((6,))
    hidden = layers.Dense(9, activation="tanh", name="hidden")(inputs)
    model = tf_keras.Model(inputs, layers.Dense(2, name="head")(hidden), name="exported")
    model.compile(tf_keras.optimizers.Adam(0.01), loss="mse")
    return model
