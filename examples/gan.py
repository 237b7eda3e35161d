"""Trains a generator against a critic whose slope is held near one (WGAN-GP), in a loop of one's own.

    horovodrun -np 2 python examples/gan.py     # generator and critic on two processes
    python examples/gan.py                      # in one process, the same losses

The data are scikit-learn's handwritten digits. The two players train in turns: each has a step and an optimizer of its
own. The penalty is of gradients by the inputs, which a second tape takes within the step.
"""

import argparse

import smp_tf as smp  # before TensorFlow: it says that tf.keras is to be tf_keras

# isort: split
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits
from tensorflow.keras import layers

CODE = 16


def network(inputs, widths, last, name):
    """Returns dense layers of some widths and a last one."""
    hidden = [layers.Dense(width, activation="swish") for width in widths]
    return tf.keras.Sequential([layers.Input((inputs,)), *hidden, last], name=name)


class Players(smp.DistributedModel):
    """A generator and a critic, cut as one model: what the first makes, the second judges."""

    def __init__(self):
        super().__init__(name="players")
        self.generator = network(CODE, [96, 96], layers.Dense(64, "sigmoid"), name="generator")
        self.critic = network(64, [96, 96], layers.Dense(1), name="critic")

    def call(self, noise):
        """Returns what the critic says of images made from noise."""
        return self.critic(self.generator(noise))


def main():
    """Trains, and prints the losses."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--partitions", type=int, default=2, help="stages the players are cut into")
    parser.add_argument("--microbatches", type=int, default=4, help="parts a batch is cut into")
    args = parser.parse_args()

    smp.init({"partitions": args.partitions, "microbatches": args.microbatches, "seed": 1, "intra_op_threads": 1})
    images = (load_digits(return_X_y=True)[0] / 16).astype("float32")
    players = Players()
    of_generator, of_critic = (tf.keras.optimizers.Adam(1e-3, beta_1=0.5) for _ in range(2))

    @smp.step
    def generator_step(noise):
        with tf.GradientTape() as tape:
            loss = -tf.reduce_mean(players(noise))
        return tape.gradient(loss, players.generator.trainable_variables), loss

    @smp.step
    def critic_step(real, noise, share):
        made = tf.stop_gradient(players.generator(noise))
        with tf.GradientTape() as tape:
            between = share * real + (1 - share) * made
            with tf.GradientTape() as inner:
                inner.watch(between)
                scores = players.critic(between)
            slopes = tf.sqrt(tf.reduce_sum(tf.square(inner.gradient(scores, between)), -1) + 1e-12)
            loss = tf.reduce_mean(players.critic(made)) - tf.reduce_mean(players.critic(real))
            loss += 10 * tf.reduce_mean(tf.square(slopes - 1))
        return tape.gradient(loss, players.critic.trainable_variables), loss

    def train(step, arguments, optimizer, weights):
        """Lets one player learn from a batch, and returns its loss."""
        gradients, loss = step(*map(tf.constant, arguments))
        optimizer.apply_gradients(zip([g.accumulate() for g in gradients], weights, strict=True))
        return float(loss.reduce_mean())

    random = np.random.default_rng(1)  # the same on every rank: all draw the same noise

    def noise(size):
        return random.standard_normal((size, CODE)).astype("float32")

    # The first step decides where layers are: the generator's uses all of them.
    for epoch in range(1, args.epochs + 1):
        losses = []
        for number, real in enumerate(np.array_split(images[random.permutation(1792)], 28)):
            if number % 4 == 0:
                generated = train(generator_step, [noise(64)], of_generator, players.generator.trainable_variables)
            share = random.random((64, 1)).astype("float32")
            arguments = [real, noise(64), share]
            losses.append(train(critic_step, arguments, of_critic, players.critic.trainable_variables))
        if smp.rank() == 0:
            print(f"epoch {epoch:2d}: mean loss {np.mean(losses):.4f} of the critic, the generator's {generated:.4f}")


if __name__ == "__main__":
    main()
