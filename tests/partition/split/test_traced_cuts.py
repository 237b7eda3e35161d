"""What is sent between the stages of real Keras models, message by message."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf
import tf_keras
from tf_keras import layers

from smp_tf.partition.graph.op_graph import OpGraph
from smp_tf.partition.split.split import Split
from smp_tf.partition.split.step_outputs import Delivery
from smp_tf.pipeline.planner.units import units_of
from tests.partition.traced_step import FLOATS, cut, step_graph, transfer_table

TOKENS = tf.TensorSpec([4, 6], tf.int32)


def chain(count: int) -> tf_keras.Model:
    model = tf_keras.Sequential([layers.Dense(8, "relu", name=f"dense_{i}") for i in range(count)], name="net")
    model.build((4, 8))
    return model


def squared_error(wanted: tf.Tensor, got: tf.Tensor) -> tf.Tensor:
    return tf.reduce_mean(tf.square(wanted - got))


def cross_entropy(wanted: tf.Tensor, got: tf.Tensor) -> tf.Tensor:
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(wanted, got))


def training(
    model: tf_keras.Model, spec: tf.TensorSpec = FLOATS, loss_of: Callable[..., Any] = squared_error
) -> OpGraph:
    """A step that returns the loss and the gradients."""

    def step(x: tf.Tensor, y: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            loss = loss_of(y, model(x, training=True))
        return loss, tape.gradient(loss, model.trainable_variables)

    return step_graph(step, spec, spec, models=[model])


def loss_to_all(stages: int) -> set[str]:
    """How the loss reaches everyone."""
    return {f"{stages - 1}.0 -> {to}.- Mean:0 []" for to in range(stages - 1)}


def without_loss(split: Split) -> list[str]:
    """The transfers besides those of the loss, which must be there."""
    table = transfer_table(split)
    loss = loss_to_all(split.stages)
    assert loss <= set(table)
    return [line for line in table if line not in loss]


# --- a chain: one activation forward, one gradient back -------------------------------------------------------------


@pytest.mark.parametrize(
    ("stages", "expected"),
    [
        ([0, 0, 0, 0], []),
        (
            [0, 0, 1, 1],
            [
                "0.0 -> 1.0 net/dense_1/Relu:0 [4, 8]",
                "1.1 -> 0.1 gradient_tape/net/dense_2/MatMul/MatMul:0 [4, 8]",
            ],
        ),
        (
            [0, 1, 1, 2],
            [
                "0.0 -> 1.0 net/dense_0/Relu:0 [4, 8]",
                "1.0 -> 2.0 net/dense_2/Relu:0 [4, 8]",
                "2.1 -> 1.1 gradient_tape/net/dense_3/MatMul/MatMul:0 [4, 8]",
                "1.1 -> 0.1 gradient_tape/net/dense_1/MatMul/MatMul:0 [4, 8]",
            ],
        ),
        (
            [0, 1, 2, 3],
            [
                "0.0 -> 1.0 net/dense_0/Relu:0 [4, 8]",
                "1.0 -> 2.0 net/dense_1/Relu:0 [4, 8]",
                "2.0 -> 3.0 net/dense_2/Relu:0 [4, 8]",
                "3.1 -> 2.1 gradient_tape/net/dense_3/MatMul/MatMul:0 [4, 8]",
                "2.1 -> 1.1 gradient_tape/net/dense_2/MatMul/MatMul:0 [4, 8]",
                "1.1 -> 0.1 gradient_tape/net/dense_1/MatMul/MatMul:0 [4, 8]",
            ],
        ),
    ],
)
def test_between_neighbours_one_activation_goes_up_and_one_gradient_comes_back(
    stages: list[int], expected: list[str]
) -> None:
    split = cut(training(chain(4)), {f"net/dense_{i}": stage for i, stage in enumerate(stages)})
    assert without_loss(split) == expected
    assert [o.chunk for o in split.outputs] == [stages[-1]] + [s for s in stages for _ in ("kernel", "bias")]
    assert [o.delivery for o in split.outputs] == [Delivery.SENT_TO_ALL] + [Delivery.LOCAL] * 8


def test_with_an_unknown_batch_size_shapes_are_taken_from_what_is_there_and_not_sent() -> None:
    """The loss divides by a size that is known only while it runs; reshapes ask for the shape of their input."""
    a, r = layers.Dense(8, "relu", name="a"), layers.Reshape((2, 4), name="r")
    model = tf_keras.Sequential([a, r, layers.Flatten(name="f"), layers.Dense(8, name="b")], name="net")
    model.build((None, 8))
    split = cut(training(model, tf.TensorSpec([None, 8], tf.float32)), {"net/a": 0, "net/r": 0, "net/f": 1, "net/b": 1})
    assert without_loss(split) == [
        "0.0 -> 1.0 net/r/Reshape:0 [None, 2, 4]",
        "1.1 -> 0.1 gradient_tape/net/f/Reshape:0 [None, 2, 4]",
    ]


# --- skips over stages ----------------------------------------------------------------------------------------------


def u_net() -> tf_keras.Model:
    """Layer a is read by b, added to what c gives, and concatenated to what d gives."""
    x = tf_keras.Input([8])
    a = layers.Dense(8, name="a")(x)
    c = layers.Dense(8, name="c")(layers.Dense(8, name="b")(a))
    d = layers.Dense(8, name="d")(layers.Add(name="add")([c, a]))
    return tf_keras.Model(x, layers.Dense(8, name="e")(layers.Concatenate(name="cat")([d, a])), name="net")


def test_a_tensor_that_several_later_stages_read_goes_to_each_once() -> None:
    stage_of = {"net/a": 0, "net/b": 1, "net/c": 1, "net/add": 2, "net/d": 2, "net/cat": 3, "net/e": 3}
    assert without_loss(cut(training(u_net()), stage_of)) == [
        "0.0 -> 1.0 net/a/BiasAdd:0 [4, 8]",
        "0.0 -> 2.0 net/a/BiasAdd:0 [4, 8]",
        "0.0 -> 3.0 net/a/BiasAdd:0 [4, 8]",
        "1.0 -> 2.0 net/c/BiasAdd:0 [4, 8]",
        "2.0 -> 3.0 net/d/BiasAdd:0 [4, 8]",
        "3.1 -> 2.1 gradient_tape/net/cat/Slice:0 [4, 8]",
        "3.1 -> 1.1 gradient_tape/net/cat/Slice_1:0 [4, 8]",
        # The gradient of the sum: one message, for what c gave and for what a gave.
        "2.1 -> 1.1 gradient_tape/net/d/MatMul/MatMul:0 [4, 8]",
        # The three contributions to a are summed on the way: one message comes back.
        "1.1 -> 0.1 AddN:0 [4, 8]",
    ]


def test_two_gradients_of_one_tensor_are_summed_before_they_are_sent() -> None:
    """Both readers of a on the last stage: their gradients are added there, also where stage 1 adds a third."""
    x = tf_keras.Input([8])
    a = layers.Dense(8, name="a")(x)
    b = layers.Dense(8, name="b")(a)
    both = layers.Add(name="add")([b, layers.Dense(8, name="c")(a), layers.Dense(8, name="d")(a)])
    graph = training(tf_keras.Model(x, both, name="net"))
    last = {"net/c": 1, "net/d": 1, "net/add": 1}
    assert without_loss(cut(graph, {"net/a": 0, "net/b": 1, **last})) == [
        "0.0 -> 1.0 net/a/BiasAdd:0 [4, 8]",
        "1.1 -> 0.1 AddN:0 [4, 8]",
    ]
    split = cut(graph, {"net/a": 0, "net/b": 0, **last})
    assert without_loss(split)[:2] == ["0.0 -> 1.0 net/a/BiasAdd:0 [4, 8]", "0.0 -> 1.0 net/b/BiasAdd:0 [4, 8]"]
    assert sorted(without_loss(split)[2:]) == [
        "1.1 -> 0.1 AddN/sum_of_chunk_1:0 [4, 8]",
        "1.1 -> 0.1 gradient_tape/sub/Neg:0 [4, 8]",
    ]
    assert split.graph is not graph


# --- a weight used at both ends -------------------------------------------------------------------------------------


class Tied(tf_keras.Model):
    """The embedding is the output layer's weight, too."""

    def __init__(self) -> None:
        super().__init__(name="net")
        self.table = layers.Embedding(20, 8, name="table")
        self.hidden = layers.Dense(8, name="hidden")

    def call(self, ids: tf.Tensor, training: Any = None) -> tf.Tensor:
        return tf.matmul(self.hidden(self.table(ids)), self.table.embeddings, transpose_b=True)


@pytest.fixture(scope="module")
def tied() -> OpGraph:
    model = Tied()
    model(tf.zeros([4, 6], tf.int32))
    return training(model, TOKENS, cross_entropy)


ON_THREE = {"net/table": 0, "net/hidden": 1, "net": 2}
CHAIN_OF_THREE = [
    "0.0 -> 1.0 net/table/embedding_lookup/Identity:0 [4, 6, 8]",
    "1.0 -> 2.0 net/hidden/BiasAdd:0 [4, 6, 8]",
    "2.1 -> 1.1 gradient_tape/net/MatMul/Reshape:0 [4, 6, 8]",
    "1.1 -> 0.1 gradient_tape/net/hidden/Tensordot/Reshape_1:0 [4, 6, 8]",
]


@pytest.mark.parametrize(
    ("owner", "once_per_step"),
    [
        (
            0,
            [
                "2.1 -> 0.- sum of gradient_tape/net/MatMul/Reshape_1:0 [20, 8]",
                "0.- -> 2.0 value of net/table/embeddings [20, 8]",
            ],
        ),
        (
            2,
            [
                "0.1 -> 2.- sum of AddN/inputs_1:0 [20, 8]",
                "2.- -> 0.0 value of net/table/embeddings [20, 8]",
            ],
        ),
    ],
)
def test_a_tied_weight_has_one_owner_and_its_value_and_gradient_cross_once_per_step(
    tied: OpGraph, owner: int, once_per_step: list[str]
) -> None:
    split = cut(tied, ON_THREE, owners={"net/table/embeddings": owner})
    assert split.assignment.owners == (owner, 1, 1)
    assert without_loss(split) == CHAIN_OF_THREE + once_per_step
    assert [t.once_per_step for t in split.transfers if t.tensor is None or t.is_sum] == [True, True]
    remote = {key: segment.remote_values for key, segment in split.segments.items() if segment.remote_values}
    assert remote == ({(2, 0, 0): (0,), (2, 1, 0): (0,)} if owner == 0 else {(0, 0, 0): (0,)})
    # The sum of both contributions is never made: each is added up where it is made, and both at the owner.
    assert not any(n for s in split.segments.values() for n in s.nodes if tied.nodes[n].op == "AddN")
    (gradient,) = [o for o in split.outputs if o.summands]
    assert gradient.chunk == owner
    assert [tied.nodes[t.node].name for t in gradient.summands] == [
        "gradient_tape/net/MatMul/Reshape_1",
        "AddN/inputs_1",
    ]


def test_nobody_waits_for_the_gradient_of_a_tied_weight_that_is_summed_at_its_owner(tied: OpGraph) -> None:
    """Bug: the largest product of the last stage was made before the gradient that the stage before waits for."""
    split = cut(tied, ON_THREE, owners={"net/table/embeddings": 0}, schedule="zb_h1")
    (gradient,) = [o for o in split.outputs if o.summands]
    parts = {key: {split.graph.nodes[n].name for n in s.nodes} for key, s in split.segments.items() if key[1] == 1}
    of_output = split.graph.nodes[gradient.summands[0].node].name
    assert [key for key, names in parts.items() if of_output in names] == [(2, 1, 1)]
    assert sorted(parts) == [(0, 1, 1), (1, 1, 0), (1, 1, 1), (2, 1, 0), (2, 1, 1)]
    assert without_loss(split) == without_loss(cut(tied, ON_THREE, owners={"net/table/embeddings": 0}))


def test_a_tied_weight_with_all_uses_on_one_stage_is_not_sent(tied: OpGraph) -> None:
    split = cut(tied, {"net/table": 0, "net/hidden": 0, "net": 0})
    assert transfer_table(split) == []
    assert not any(o.summands for o in split.outputs)


def test_sparse_slices_stay_together_on_the_stage_of_their_embedding() -> None:
    model = tf_keras.Sequential(
        [
            layers.Embedding(20, 8, input_length=6, name="table"),
            layers.Flatten(name="flat"),
            layers.Dense(6, name="out"),
        ],
        name="net",
    )
    model(tf.zeros([4, 6], tf.int32))

    def step(ids: tf.Tensor, y: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            loss = squared_error(tf.cast(y, tf.float32), model(ids))
        return loss, tape.gradient(loss, model.trainable_variables)

    graph = step_graph(step, TOKENS, TOKENS, models=[model])
    (sparse,) = [g for g in graph.gradients if len(g.tensors) == 3]
    positions = tuple(graph.outputs.index(t) for t in sparse.tensors)
    assert positions == (1, 2, 3)
    on_two = {"net/table": 0, "net/flat": 1, "net/out": 1}
    split = cut(graph, on_two, composites=[positions])
    assert without_loss(split) == [
        "0.0 -> 1.0 net/table/embedding_lookup/Identity:0 [4, 6, 8]",
        "1.1 -> 0.1 gradient_tape/net/flat/Reshape:0 [4, 6, 8]",
    ]
    parts = [split.outputs[i] for i in positions]
    assert {(o.chunk, o.delivery, o.is_gradient, o.is_part, o.is_summed) for o in parts} == {
        (0, Delivery.LOCAL, True, True, False)
    }


def test_a_gradient_that_needs_nothing_of_the_model_is_that_of_its_weights_stage_all_the_same() -> None:
    """Of a linear loss; every stage made it, and replicas did not average it."""
    model = tf_keras.Sequential([layers.Embedding(20, 8, name="table"), layers.Dense(6, name="out")], name="net")
    model(tf.zeros([4, 6], tf.int32))

    def step(ids: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(ids))
        [bias] = tape.gradient(loss, [model.layers[1].bias])
        return bias, 2.0 * bias, tf.shape(ids)

    graph = step_graph(step, TOKENS, models=[model])
    split = cut(graph, {"net/table": 0, "net/out": 1})
    assert [(o.chunk, o.delivery, o.is_gradient) for o in split.outputs] == [
        (1, Delivery.LOCAL, True),
        (1, Delivery.LOCAL, True),
        (None, Delivery.MADE_BY_ALL, False),
    ]


# --- metrics and norms ----------------------------------------------------------------------------------------------


def test_of_a_metric_only_the_operand_of_its_assignment_crosses() -> None:
    """An accuracy sends one scalar per microbatch, not the predictions; the count is made by every rank."""
    model, metric = chain(2), tf_keras.metrics.SparseCategoricalAccuracy()

    def step(x: tf.Tensor, y: tf.Tensor) -> Any:
        metric.update_state(y, model(x))
        return metric.result()

    graph = step_graph(step, FLOATS, tf.TensorSpec([4], tf.int32), models=[model])
    split = cut(graph, {"net/dense_0": 0, "net/dense_1": 1})
    assert transfer_table(split) == ["0.0 -> 1.0 net/dense_0/Relu:0 [4, 8]", "1.0 -> 0.2 Sum:0 []"]
    assert [(o.delivery, o.chunk) for o in split.outputs] == [(Delivery.MADE_BY_ALL, None)]
    for stage in (0, 1):
        segment = split.segments[stage, 2, 0]
        effects = [graph.nodes[n].op for n in segment.nodes if graph.nodes[n].stateful]
        assert effects == ["AssignAddVariableOp", "AssignAddVariableOp"]


#: The norm of the gradients of three layers: scalars go to the stage that makes it, and it goes to all.
OF_THE_NORM = [
    "1.1 -> 0.1 global_norm/L2Loss_2:0 []",
    "1.1 -> 0.1 global_norm/L2Loss_3:0 []",
    "2.1 -> 0.1 global_norm/L2Loss_4:0 []",
    "2.1 -> 0.1 global_norm/L2Loss_5:0 []",
    "0.1 -> 1.- global_norm/global_norm:0 []",
    "0.1 -> 2.- global_norm/global_norm:0 []",
]


def test_of_a_norm_over_all_gradients_only_scalars_cross() -> None:
    model = chain(3)

    def step(x: tf.Tensor, y: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            loss = squared_error(y, model(x))
        gradients = tape.gradient(loss, model.trainable_variables)
        return loss, tf.linalg.global_norm(gradients), gradients

    split = cut(step_graph(step, FLOATS, FLOATS, models=[model]), {f"net/dense_{i}": i for i in range(3)})
    per_layer = [line for line in without_loss(split) if "Relu:0" in line or "MatMul:0" in line]
    assert len(per_layer) == 4
    assert [line for line in without_loss(split) if line not in per_layer] == OF_THE_NORM
    assert [o.delivery for o in split.outputs] == [Delivery.SENT_TO_ALL] * 2 + [Delivery.LOCAL] * 6


def test_of_gradients_clipped_by_their_norm_only_scalars_cross_and_each_stays_with_its_owner() -> None:
    """Bug: they went to the stage that made the norm, and from there to all."""
    model = chain(3)

    def step(x: tf.Tensor, y: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            loss = squared_error(y, model(x))
        clipped, norm = tf.clip_by_global_norm(tape.gradient(loss, model.trainable_variables), 1.0)
        return loss, clipped, norm

    split = cut(step_graph(step, FLOATS, FLOATS, models=[model]), {f"net/dense_{i}": i for i in range(3)})
    of_the_chain = [line for line in without_loss(split) if "Relu:0" in line or "MatMul:0" in line]
    assert len(of_the_chain) == 4
    assert [line for line in without_loss(split) if line not in of_the_chain] == [
        *OF_THE_NORM,
        "0.1 -> 1.2 clip_by_global_norm/add:0 []",
        "0.1 -> 2.2 clip_by_global_norm/add:0 []",
    ]
    assert [(o.delivery, o.chunk, o.is_summed) for o in split.outputs[1:7]] == [
        (Delivery.LOCAL, stage, True) for stage in (0, 0, 1, 1, 2, 2)
    ]
    assert split.outputs[7].delivery is Delivery.SENT_TO_ALL


def test_a_clipped_gradient_of_a_tied_weight_goes_to_its_owner_once_per_step() -> None:
    model = Tied()
    model(tf.zeros([4, 6], tf.int32))

    def step(x: tf.Tensor, y: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            loss = cross_entropy(y, model(x))
        return loss, tf.clip_by_global_norm(tape.gradient(loss, model.trainable_variables), 1.0)[0]

    graph = step_graph(step, TOKENS, TOKENS, models=[model])
    split = cut(graph, ON_THREE, owners={"net/table/embeddings": 2})
    assert [o.chunk for o in split.outputs] == [2, 2, 1, 1]
    sums = [line for line in transfer_table(split) if "sum of" in line]
    assert sums == ["0.1 -> 2.- sum of clip_by_global_norm/clip_by_global_norm/_0:0 [20, 8]"]


def test_arguments_masks_and_constants_are_made_where_they_are_read() -> None:
    """The last stage makes the mask of the tokens itself."""

    class Masked(tf_keras.Model):
        def __init__(self) -> None:
            super().__init__(name="net")
            self.table = layers.Embedding(20, 8, name="table")
            self.out = layers.Dense(8, name="out")

        def call(self, ids: tf.Tensor, training: Any = None) -> tf.Tensor:
            mask = tf.cast(ids > 0, tf.float32)[:, :, tf.newaxis] * tf.range(8.0)
            return self.out(self.table(ids)) * mask

    model = Masked()
    model(tf.zeros([4, 6], tf.int32))
    graph = training(model, TOKENS, cross_entropy)
    assert [u.name for u in units_of(graph)] == ["net/table", "net/out"]
    assert without_loss(cut(graph, {"net/table": 0, "net/out": 1})) == [
        "0.0 -> 1.0 net/table/embedding_lookup/Identity:0 [4, 6, 8]",
        "1.1 -> 0.1 gradient_tape/net/out/Tensordot/Reshape_1:0 [4, 6, 8]",
    ]
