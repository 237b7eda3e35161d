"""What whole layers cost, by hand: floating-point operations forward, for inputs and for weights, and bytes."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
import tf_keras
from tf_keras import layers

from smp_tf.partition.units.cost import UnitCost, estimate
from smp_tf.partition.units.units import build_units
from tests.partition.traced_step import step_graph


def costs_of(layer: Any, before: Any, spec: tf.TensorSpec) -> tuple[list[UnitCost], tuple[str, ...]]:
    """Costs of the units of a layer behind another one, and the op types that were not known."""

    class Net(tf_keras.Model):
        def __init__(self) -> None:
            super().__init__(name="net")
            self.before, self.layer = before, layer

        def call(self, x: tf.Tensor) -> tf.Tensor:
            x = self.before(x) if self.before is not None else x
            return self.layer(x, x) if isinstance(self.layer, layers.MultiHeadAttention) else self.layer(x)

    net = Net()
    net(tf.zeros(spec.shape, spec.dtype))

    def step(x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(net(x) ** 2)
        return tape.gradient(loss, net.trainable_variables), loss

    graph = step_graph(step, spec, models=[net])
    units = build_units(graph)
    costs = estimate(graph, units)
    return [c for c, unit in zip(costs.units, units, strict=True) if "layer" in unit.name], costs.defaulted


def test_dense() -> None:
    [cost], unknown = costs_of(layers.Dense(16, name="layer"), layers.Dense(8), tf.TensorSpec([4, 8]))
    product = 2 * 4 * 8 * 16
    assert cost.flops.forward == product + 4 * 16
    assert cost.flops.input_gradient == product
    assert cost.flops.weight_gradient == product + 4 * 16
    x, y, kernel, bias = 4 * 4 * 8, 4 * 4 * 16, 4 * 8 * 16, 4 * 16
    assert cost.nbytes.read == (x + kernel) + (y + bias) + (y + kernel) + (x + y) + y
    assert cost.nbytes.written == y + y + x + kernel + bias
    assert unknown == ()


def test_convolution() -> None:
    convolution = layers.Conv2D(4, 3, use_bias=False, name="layer")
    [cost], unknown = costs_of(convolution, layers.Conv2D(3, 1), tf.TensorSpec([2, 6, 6, 3]))
    product = 2 * (2 * 4 * 4 * 4) * (3 * 3 * 3)
    assert (cost.flops.forward, cost.flops.input_gradient, cost.flops.weight_gradient) == (product, product, product)
    x, y, kernel, sizes = 4 * 2 * 6 * 6 * 3, 4 * 2 * 4 * 4 * 4, 4 * 3 * 3 * 3 * 4, 4 * 4
    assert cost.nbytes.read == (x + kernel) + (sizes + kernel + y) + (x + sizes + y)
    assert cost.nbytes.written == y + x + kernel
    assert unknown == ()


def test_embedding() -> None:
    [cost], unknown = costs_of(layers.Embedding(50, 8, name="layer"), None, tf.TensorSpec([4, 5], tf.int32))
    # Rows are copied, and the gradient is the rows' own.
    assert (cost.flops.forward, cost.flops.input_gradient, cost.flops.weight_gradient) == (0, 0, 0)
    assert (cost.nbytes.read, cost.nbytes.written) == (4 * 5 * 8 * 4, 4 * 5 * 8 * 4)
    assert unknown == ()


def test_attention() -> None:
    found, unknown = costs_of(layers.MultiHeadAttention(2, 4, name="layer"), layers.Dense(8), tf.TensorSpec([2, 5, 8]))
    batch, heads, length, width, depth = 2, 2, 5, 8, 4
    tokens = batch * length
    project = 2 * tokens * width * heads * depth  # to queries, keys and values, and from the heads to the result
    bias = tokens * width
    attend = 2 * batch * heads * length * length * depth  # the scores, and the weighted sum of the values
    scores = batch * heads * length * length
    assert sum(c.flops.forward for c in found) == 4 * (project + bias) + bias + 2 * attend + 10 * scores
    # The softmax multiplies, sums, subtracts and multiplies; queries, keys and values are of one input.
    through = 4 * project + 4 * attend + 4 * scores + bias + 2 * tokens * width
    assert sum(c.flops.input_gradient for c in found) == through
    assert sum(c.flops.weight_gradient for c in found) == 4 * (project + bias)
    assert unknown == ()
