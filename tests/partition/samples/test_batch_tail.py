"""The tail of a step begins where rows are still made one by one, as near to its results as that goes."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from smp_tf.partition.graph.op_graph import OpGraph, Tensor
from smp_tf.partition.samples.batch_tail import Cut, find_tail, tail_from
from smp_tf.partition.samples.sample_rows import SampleRows
from tests.partition.op_graph_builder import GraphBuilder

#: Samples of the whole batch, and of a microbatch.
WHOLE, PART = 8, 2

#: Given a builder, the logits and labels of a batch of n samples, makes the loss.
Loss = Callable[[GraphBuilder, Tensor, Tensor, int], Tensor]


def step(loss: Loss, n: int) -> OpGraph:
    """A dense layer and a loss of its output, as traced for n samples."""
    builder = GraphBuilder()
    x, y = builder.argument((n, 4)), builder.argument((n,), "int32")
    kernel = builder.variable("net/kernel", (4, 3))
    call = builder.call("net")
    logits = builder.add("MatMul", x, builder.read(kernel, call), call=call, shape=(n, 3))
    return builder.graph(loss(builder, logits, y, n))


def cuts(loss: Loss) -> tuple[list[tuple[str, int | None]], list[str]]:
    """Where the tail begins, by op and dimension; and the ops that it has."""
    whole, part = step(loss, WHOLE), step(loss, PART)
    tail = find_tail(whole, SampleRows(whole, part, WHOLE), {"loss": whole.outputs})
    assert not tail.left_out
    return (
        [(whole.nodes[cut.whole.node].op, cut.axis) for cut in tail.cuts],
        [whole.nodes[number].op for number in tail.nodes],
    )


def cross_entropy(builder: GraphBuilder, logits: Tensor, y: Tensor, n: int) -> Tensor:
    each = builder.add("SparseSoftmaxCrossEntropyWithLogits", logits, y, shape=(n,))
    return builder.add("Mean", each, builder.add("Const", shape=(1,), dtype="int32"), shape=())


def contrastive(builder: GraphBuilder, logits: Tensor, y: Tensor, n: int) -> Tensor:
    scores = builder.add("MatMul", logits, logits, shape=(n, n))
    return cross_entropy(builder, scores, builder.add("Range", shape=(n,), dtype="int32"), n)


def centred(builder: GraphBuilder, logits: Tensor, y: Tensor, n: int) -> Tensor:
    average = builder.add("Mean", logits, shape=(1, 3))
    return builder.add("Sum", builder.add("Sub", logits, average, shape=(n, 3)), shape=())


def flattened(builder: GraphBuilder, logits: Tensor, y: Tensor, n: int) -> Tensor:
    return builder.add("Max", builder.add("Reshape", logits, shape=(3 * n,)), shape=())


def transposed(builder: GraphBuilder, logits: Tensor, y: Tensor, n: int) -> Tensor:
    return builder.add("Max", builder.add("Transpose", logits, shape=(3, n)), shape=())


@pytest.mark.parametrize(
    ("loss", "begins", "ops"),
    [
        (cross_entropy, [("SparseSoftmaxCrossEntropyWithLogits", 0)], ["Const", "Mean"]),
        (
            contrastive,
            [("MatMul", 0)],
            ["MatMul", "Range", "SparseSoftmaxCrossEntropyWithLogits", "Const", "Mean"],
        ),
        (centred, [("MatMul", 0)], ["Mean", "Sub", "Sum"]),
        (flattened, [("Reshape", 0)], ["Max"]),
        (transposed, [("MatMul", 0)], ["Transpose", "Max"]),
    ],
)
def test_rows_go_as_far_as_every_row_is_of_its_own_sample(
    loss: Loss, begins: list[tuple[str, int | None]], ops: list[str]
) -> None:
    assert cuts(loss) == (begins, ops)


def test_samples_and_their_copies_are_in_another_order_in_microbatches() -> None:
    """A layer is given a batch and its augmented copy, one after the other: its rows are no rows of a batch."""

    def twice(builder: GraphBuilder, logits: Tensor, y: Tensor, n: int) -> Tensor:
        call = builder.call("net/twice")
        both = builder.add("ConcatV2", logits, logits, call=call, shape=(2 * n, 3))
        return builder.add("Max", both, shape=())

    assert cuts(twice) == ([("MatMul", 0)], ["ConcatV2", "Max"])


def test_text_goes_to_no_other_process() -> None:
    """Labels that are text, and are looked up, are taken from the arguments."""

    def graph(n: int) -> OpGraph:
        builder = GraphBuilder()
        words = builder.add("Identity", builder.argument((n,), "string"), shape=(n,), dtype="string")
        return builder.graph(builder.add("LookupTableFindV2", words, shape=(n,), dtype="int64"))

    whole = graph(WHOLE)
    tail = find_tail(whole, SampleRows(whole, graph(PART), WHOLE), {"log": whole.outputs})
    assert (tail.cuts, tail.arguments) == ((), (0,))


def test_what_depends_on_weights_alone_is_taken_as_it_is() -> None:
    def decayed(builder: GraphBuilder, logits: Tensor, y: Tensor, n: int) -> Tensor:
        kernel = Tensor(2, 0)
        decay = builder.add("L2Loss", builder.read(kernel), shape=())
        return builder.add("AddV2", cross_entropy(builder, logits, y, n), decay, shape=())

    begins, ops = cuts(decayed)
    assert begins == [("L2Loss", None), ("SparseSoftmaxCrossEntropyWithLogits", 0)]
    assert ops == ["Const", "Mean", "AddV2"]


def test_a_sum_that_a_layer_makes_is_made_again_of_what_the_layer_has_of_samples() -> None:
    def added(builder: GraphBuilder, logits: Tensor, y: Tensor, n: int) -> Tensor:
        call = builder.call("net/adds")
        squares = builder.add("Square", logits, call=call, shape=(n, 3))
        return builder.add("Sum", squares, call=call, shape=())

    assert cuts(added) == ([("Square", 0)], ["Sum"])


def test_labels_and_lengths_of_the_whole_batch_are_its_own() -> None:
    def over_samples(builder: GraphBuilder, logits: Tensor, y: Tensor, n: int) -> Tensor:
        each = builder.add("SparseSoftmaxCrossEntropyWithLogits", logits, y, shape=(n,))
        samples = builder.add("Shape", y, shape=(1,), dtype="int32")
        return builder.add("RealDiv", builder.add("Sum", each, shape=()), samples, shape=())

    begins, ops = cuts(over_samples)
    assert begins == [("SparseSoftmaxCrossEntropyWithLogits", 0)]
    assert ops == ["SmpArgument", "Shape", "Sum", "RealDiv"]


def test_numbers_that_every_microbatch_draws_are_an_obstacle_unless_each_sample_has_its_own() -> None:
    def drawn(shape: tuple[int, ...]) -> Loss:
        def loss(builder: GraphBuilder, logits: Tensor, y: Tensor, n: int) -> Tensor:
            size = tuple(n if length is WHOLE else length for length in shape)
            noise = builder.add("RandomUniform", shape=size, stateful=True)
            return builder.add("Sum", builder.add("Mul", logits, noise, shape=(n, 3)), shape=())

        return loss

    assert cuts(drawn((WHOLE, 3))) == ([("Mul", 0)], ["Sum"])
    whole, part = step(drawn((1, 3)), WHOLE), step(drawn((1, 3)), PART)
    tail = find_tail(whole, SampleRows(whole, part, WHOLE), {"loss": whole.outputs})
    assert list(tail.results) == []
    assert "random numbers that every microbatch draws anew (op 'RandomUniform_" in tail.left_out["loss"]


def test_a_metric_is_written_before_it_is_read() -> None:
    def graph(n: int) -> OpGraph:
        builder = GraphBuilder()
        x = builder.argument((n, 4))
        kernel, seen = builder.variable("net/kernel", (4, 3)), builder.variable("seen", (), in_model=False)
        call = builder.call("net")
        logits = builder.add("MatMul", x, builder.read(kernel, call), call=call, shape=(n, 3))
        builder.write(seen, builder.add("Sum", logits, shape=()))
        written = len(builder.nodes) - 1
        result = builder.add("ReadVariableOp", seen, shape=(), control=(written,), reads=(1,))
        return builder.graph(result)

    whole = graph(WHOLE)
    tail = find_tail(whole, SampleRows(whole, graph(PART), WHOLE), {"log": whole.outputs})
    assert [whole.nodes[number].op for number in tail.nodes] == [
        "SmpVariable",
        "Sum",
        "AssignVariableOp",
        "ReadVariableOp",
    ]
    assert [whole.nodes[cut.whole.node].op for cut in tail.cuts] == ["MatMul"]


def test_a_tail_from_given_tensors_counts_up_what_it_reads_then() -> None:
    builder = GraphBuilder()
    x, state = builder.argument((8, 4)), builder.variable("weight", (), in_model=False)
    each = builder.add("Square", x, shape=(8, 4))
    one = builder.add("Const", shape=())
    first = builder.add("AssignAddVariableOp", state, one, shape=(), stateful=True, writes=(0,), reads=(0,))
    second = builder.add(
        *("AssignAddVariableOp", state, one), shape=(), stateful=True, control=(first.node,), writes=(0,), reads=(0,)
    )
    weight = builder.add("ReadVariableOp", state, shape=(), control=(second.node,), reads=(0,))
    loss = builder.add("Mul", each, weight, shape=(8, 4))
    graph = builder.graph(loss)
    tail = tail_from(graph, [Cut(each, each, 0)], {"loss": graph.outputs})
    assert [graph.nodes[number].op for number in tail.nodes] == [
        *("SmpVariable", "Const", "AssignAddVariableOp", "AssignAddVariableOp", "ReadVariableOp", "Mul")
    ]


def test_what_is_made_of_gradients_has_no_tail() -> None:
    def graph(n: int) -> OpGraph:
        builder = GraphBuilder()
        builder.argument((n, 4))
        unknown = builder.add("Placeholder", shape=(4, 3))
        return builder.graph(builder.add("L2Loss", unknown, shape=()))

    whole = graph(WHOLE)
    tail = find_tail(
        whole, SampleRows(whole, graph(PART), WHOLE, frozenset({"Placeholder_1"})), {"norm": whole.outputs}
    )
    assert tail.left_out == {"norm": "it depends on gradients"}


def test_where_samples_cannot_be_joined_a_tail_is_made_of_gradients_alone() -> None:
    def graph(n: int) -> OpGraph:
        builder = GraphBuilder()
        x = builder.argument((n, 4))
        unknown = builder.add("Placeholder", shape=(4, 3))
        norm = builder.add("L2Loss", unknown, shape=())
        of_samples = builder.add("Sum", builder.add("Square", x, shape=(n, 4)), shape=())
        return builder.graph(norm, of_samples)

    whole = graph(WHOLE)
    norm, of_samples = whole.outputs
    wanted = {"norm": [norm], "of samples": [of_samples], "both": [norm, of_samples]}
    rows = SampleRows(whole, graph(PART), WHOLE, frozenset({"Placeholder_1"}))
    tail = find_tail(whole, rows, wanted, [Tensor(1, 0)], of_samples=False)
    assert list(tail.results) == ["norm"]
    assert set(tail.left_out.values()) == {"samples go into it, and those of all replicas cannot be joined"}
