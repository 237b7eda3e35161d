"""Random models, as hypothesis draws them: a graph of layers over vectors of six numbers, and how it is trained.

A model is a list of nodes, each a kind and the earlier nodes it reads, so that it can be written into a test as it is:

    [["dense", 0, 0], ["lstm", 1, 0], ["add", 1, 2], ["tied", 3, 1]]     node 0 is the input
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import tensorflow as tf
import tf_keras
from hypothesis import strategies as st
from tf_keras import layers

from tests.distributed.models import Batch, ZooModel

WIDTH = 6
STEPS = 3


@dataclass(frozen=True)
class RandomModel:
    """A model and how it is trained.

    Args:
        nodes: kind, and the two nodes it may read; node 0 is the input, node i + 1 the i-th of these.
        outputs: the nodes that the model returns.
        form: subclass or builder, as in `ZooModel`.
        optimizer: "sgd" or "adam".
        samples: samples of the whole batch.
        partitions, microbatches, pipeline, optimize, placement_strategy: of the configuration.
        eager: whether the step is called outside a tf.function.
    """

    nodes: tuple[tuple[str, int, int], ...]
    outputs: tuple[int, ...] = (-1,)
    form: str = "subclass"
    optimizer: str = "sgd"
    samples: int = 8
    partitions: int = 2
    microbatches: int = 2
    pipeline: str = "interleaved"
    optimize: str = "memory"
    placement_strategy: str = "cluster"
    eager: bool = False

    @classmethod
    def of(cls, fields: dict[str, Any]) -> RandomModel:
        """The model that `as_json` told."""
        nodes = tuple((kind, first, second) for kind, first, second in fields["nodes"])
        return cls(**{**fields, "nodes": nodes, "outputs": tuple(fields["outputs"])})

    def as_json(self) -> dict[str, Any]:
        """The model in what JSON holds."""
        return asdict(self)

    @property
    def config(self) -> dict[str, Any]:
        """What `smp.init` is given."""
        names = ("partitions", "microbatches", "pipeline", "optimize", "placement_strategy")
        return {"seed": 1, **{name: getattr(self, name) for name in names}}

    @property
    def is_random(self) -> bool:
        """Whether plain Keras would draw other numbers."""
        return any(kind == "dropout" for kind, _, _ in self.nodes)

    def entry(self) -> ZooModel:
        """The model as an entry of the zoo."""
        return ZooModel(
            name="random",
            build=lambda base: self._subclass(base) if self.form == "subclass" else self._functional(),
            batch=self._batch,
            loss=_loss,
            optimizer=_OPTIMIZERS[self.optimizer],
            form="subclass" if self.form == "subclass" else "builder",
        )

    def _batch(self, step: int) -> Batch:
        random = np.random.RandomState(step)
        return random.standard_normal((self.samples, WIDTH)), random.standard_normal((self.samples, WIDTH))

    def _subclass(self, base: type) -> tf_keras.Model:
        spec = self

        class Net(base):
            def __init__(self) -> None:
                super().__init__(name="net")
                self.pieces = _pieces(spec.nodes)

            def call(self, x: tf.Tensor, training: bool = False) -> list[tf.Tensor]:
                return _run(spec, self.pieces, x, training=training)

        return Net()

    def _functional(self) -> tf_keras.Model:
        inputs = layers.Input((WIDTH,))
        return tf_keras.Model(inputs, _run(self, _pieces(self.nodes), inputs), name="net")


_OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "sgd": lambda: tf_keras.optimizers.SGD(0.05, momentum=0.9),
    "adam": lambda: tf_keras.optimizers.Adam(0.01, epsilon=1e-3),
}


def _loss(model: Any, batch: Sequence[tf.Tensor]) -> tf.Tensor:
    x, target = batch
    outputs = tf.nest.flatten(model(x, training=True))
    return tf.add_n([tf.reduce_mean((y - target) ** 2) for y in outputs] + list(model.losses))


def _run(spec: RandomModel, pieces: Sequence[Any], x: Any, **training: Any) -> list[Any]:
    values = [x]
    for (kind, first, second), piece in zip(spec.nodes, pieces, strict=True):
        given = [values[first], values[second]] if kind in ("add", "gate", "concat") else values[first]
        values.append(piece(given, **training) if kind in ("dropout", "batch_norm") else piece(given))
    return [values[number] for number in spec.outputs]


class Gate(layers.Layer):
    """One input, weighed by a function of the other."""

    def __init__(self) -> None:
        super().__init__()
        self.weigh = layers.Dense(WIDTH, activation="sigmoid")

    def call(self, inputs: Sequence[tf.Tensor]) -> tf.Tensor:
        return inputs[0] * self.weigh(inputs[1])


class Concat(layers.Layer):
    """Both inputs, brought back to one's width."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow = layers.Dense(WIDTH)

    def call(self, inputs: Sequence[tf.Tensor]) -> tf.Tensor:
        return self.narrow(tf.concat(inputs, axis=-1))


class Attention(layers.Layer):
    """The six numbers as three pairs that look at each other."""

    def __init__(self) -> None:
        super().__init__()
        self.attend = layers.MultiHeadAttention(2, 2)

    def call(self, x: tf.Tensor) -> tf.Tensor:
        pairs = tf.reshape(x, [-1, 3, 2])
        return x + tf.reshape(self.attend(pairs, pairs), [-1, WIDTH])


class Lookup(layers.Layer):
    """Adds the row of a table that the largest number chooses: a sparse gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.table = layers.Embedding(WIDTH, WIDTH)

    def call(self, x: tf.Tensor) -> tf.Tensor:
        return x + self.table(tf.argmax(x, axis=-1))


class Choice(layers.Layer):
    """One of two matrices, by a tf.cond."""

    def build(self, shape: Any) -> None:
        self.matrices = [self.add_weight(f"matrix{number}", (WIDTH, WIDTH)) for number in range(2)]

    def call(self, x: tf.Tensor) -> tf.Tensor:
        first, second = self.matrices
        return tf.cond(tf.reduce_mean(x) > 0.0, lambda: x @ first, lambda: x @ second)


class Loop(layers.Layer):
    """The same matrix three times, by a tf.while_loop."""

    def build(self, shape: Any) -> None:
        self.matrix = self.add_weight("matrix", (WIDTH, WIDTH))

    def call(self, x: tf.Tensor) -> tf.Tensor:
        return tf.while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, tf.tanh(y @ self.matrix)), (0, x))[1]


class Scaled(layers.Layer):
    """The identity, whose gradient is half of what it should be."""

    def call(self, x: tf.Tensor) -> tf.Tensor:
        @tf.custom_gradient
        def half(value: tf.Tensor) -> Any:
            return tf.identity(value), lambda upstream: 0.5 * upstream

        return half(x)


class Stopped(layers.Layer):
    """A layer beside a way on which no gradient comes back."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = layers.Dense(WIDTH)

    def call(self, x: tf.Tensor) -> tf.Tensor:
        return self.dense(x) + tf.stop_gradient(tf.nn.softmax(x))


class Tied(layers.Layer):
    """The transposed matrix of an earlier layer."""

    def __init__(self, other: layers.Dense) -> None:
        super().__init__()
        self.other = other

    def call(self, x: tf.Tensor) -> tf.Tensor:
        return tf.matmul(x, self.other.kernel, transpose_b=True)


class Shape(layers.Layer):
    """Another layer on the six numbers in another shape, and back."""

    def __init__(self, inner: Any, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.inner, self.shape = inner, shape

    def call(self, x: tf.Tensor) -> tf.Tensor:
        return tf.reshape(self.inner(tf.reshape(x, [-1, *self.shape])), [-1, WIDTH])


KINDS: dict[str, Callable[[], Any]] = {
    "dense": lambda: layers.Dense(WIDTH, activation="tanh"),
    "norm": layers.LayerNormalization,
    "batch_norm": layers.BatchNormalization,
    "dropout": lambda: layers.Dropout(0.3),
    "add": layers.Add,
    "gate": Gate,
    "concat": Concat,
    "lstm": lambda: Shape(layers.LSTM(WIDTH), (3, 2)),
    "conv": lambda: Shape(layers.Conv1D(1, 3, padding="same"), (WIDTH, 1)),
    "attention": Attention,
    "lookup": Lookup,
    "choice": Choice,
    "loop": Loop,
    "frozen": lambda: layers.Dense(WIDTH, trainable=False),
    "penalty": lambda: layers.Dense(WIDTH, kernel_regularizer="l2", activity_regularizer="l2"),
    "scaled": Scaled,
    "stopped": Stopped,
}
#: Kinds that use an earlier dense layer: call it again, or use its matrix.
OF_ANOTHER = ("again", "tied")


def _pieces(nodes: Sequence[tuple[str, int, int]]) -> list[Any]:
    made: list[Any] = []
    for kind, _, second in nodes:
        if kind in OF_ANOTHER:
            dense = [made[number] for number, (other, _, _) in enumerate(nodes[: len(made)]) if other == "dense"]
            made.append(dense[second % len(dense)] if kind == "again" else Tied(dense[second % len(dense)]))
        else:
            made.append(KINDS[kind]())
    return made


@st.composite
def random_models(draw: st.DrawFn, partitions: Sequence[int]) -> RandomModel:
    """Models with enough layers for the largest number of partitions.

    Args:
        draw: hypothesis's.
        partitions: numbers of partitions to choose from, the number of processes last.
    """
    count = draw(st.integers(max(partitions) + 1, 3 * max(partitions)))
    nodes: list[tuple[str, int, int]] = [("dense", 0, 0)]
    for number in range(1, count):
        kind = draw(st.sampled_from([*KINDS, *OF_ANOTHER]))
        # Mostly the node before, so that the model is deep.
        first = draw(st.one_of(st.just(number), st.integers(0, number)))
        nodes.append((kind, first, draw(st.integers(0, number))))
    others = draw(st.lists(st.integers(1, count), max_size=1, unique=True))
    microbatches, chosen = draw(st.sampled_from([1, 2, 3, 4])), draw(st.sampled_from(list(partitions)))
    # Replicas need shares of one size; microbatches need not be of one.
    replicas = max(partitions) // chosen
    share = draw(st.integers(2 * microbatches, 4 * microbatches + 3))
    return RandomModel(
        nodes=tuple(nodes),
        outputs=tuple(dict.fromkeys([count, *others])),
        form=draw(st.sampled_from(["subclass", "builder"])),
        optimizer=draw(st.sampled_from(list(_OPTIMIZERS))),
        samples=share * replicas,
        partitions=chosen,
        microbatches=microbatches,
        pipeline=draw(st.sampled_from(["interleaved", "simple"])),
        optimize=draw(st.sampled_from(["memory", "speed"])),
        placement_strategy=draw(st.sampled_from(["cluster", "spread", "PDT"])),
        eager=draw(st.booleans()),
    )
