"""The bytes a segment has in flight while it runs."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import tensorflow as tf

from smp_tf.partition.graph.op_graph import SOURCES, OpGraph, Tensor
from smp_tf.partition.split.split import Segment, Visit
from smp_tf.partition.split.working_set import segment_memory
from smp_tf.partition.units.cost import node_seconds
from tests.partition.op_graph_builder import GraphBuilder
from tests.partition.traced_step import step_graph

KIB = 256  # floats


def segment(graph: OpGraph, *nodes: Tensor, outputs: tuple[Tensor, ...], inputs: tuple[Tensor, ...] = ()) -> Segment:
    numbers = tuple(t.node for t in nodes)
    return Segment(Visit(0, 0), numbers, (), inputs, (), outputs)


def most(graph: OpGraph, cut: Segment, summed: Iterable[Tensor] = (), samples: int = 1) -> int:
    return segment_memory(graph, cut, node_seconds(graph, unknown=samples), summed, samples).working.bytes


def test_a_tensor_is_there_until_its_last_reader_has_run() -> None:
    b = GraphBuilder()
    x = b.argument((KIB,))
    first = b.add("Tanh", x, shape=(KIB,))
    second = b.add("Tile", first, shape=(2 * KIB,))
    third = b.add("Sum", first, second, shape=(KIB,))
    last = b.add("Exp", third, shape=(KIB,))
    graph = b.graph(last)
    # first 1, second 2 and third 1 are there together; then only third and last.
    assert most(graph, segment(graph, first, second, third, last, outputs=(last,))) == 4 * 1024


def test_outputs_stay_to_the_end_unless_they_are_added_to_a_sum() -> None:
    b = GraphBuilder()
    x = b.argument((KIB,))
    gradients = [b.add("Square", x, shape=(KIB,)) for _ in range(5)]
    graph = b.graph(*gradients)
    cut = segment(graph, *gradients, outputs=tuple(gradients))
    assert most(graph, cut) == 5 * 1024
    # One is added while the next is made.
    assert most(graph, cut, summed=gradients) == 2 * 1024
    assert most(graph, cut, summed=gradients[:3]) == 2 * 1024


def test_what_lies_in_memory_that_is_there_anyway_counts_nothing() -> None:
    b = GraphBuilder()
    handle = b.variable("w", (KIB, KIB))
    x = b.argument((KIB,))
    weight = b.read(handle)
    constant = b.add("Const", shape=(KIB,))
    view = b.add("Reshape", x, constant, shape=(KIB, 1))
    made = b.add("Exp", view, shape=(KIB, 1))
    other = b.add("Identity", made, shape=(KIB, 1))
    last = b.add("Transpose", other, shape=(KIB, 1))
    graph = b.graph(last)
    # A view of what was given is nobody's; a view of what was made keeps it until the view's last reader.
    assert most(graph, segment(graph, weight, constant, view, outputs=(view,))) == 0
    assert most(graph, segment(graph, weight, constant, view, made, other, last, outputs=(last,))) == 2 * 1024


@pytest.mark.parametrize(("samples", "expected"), [(1, 32), (16, 512)])
def test_open_lengths_are_samples(samples: int, expected: int) -> None:
    b = GraphBuilder()
    made = b.add("Exp", b.argument((None, 8)), shape=(None, 8))
    graph = b.graph(made)
    assert most(graph, segment(graph, made, outputs=(made,)), samples=samples) == expected


def test_an_op_that_can_writes_into_the_memory_of_an_input_that_nobody_else_reads() -> None:
    b = GraphBuilder()
    x = b.argument((KIB,))
    first = b.add("Tile", x, shape=(KIB,))
    second = b.add("Tanh", first, shape=(KIB,))
    third = b.add("Mul", second, second, shape=(KIB,))
    graph = b.graph(third)
    # Tanh takes over the memory of the first; Mul does not, since it reads the second twice.
    assert most(graph, segment(graph, first, second, outputs=(second,))) == 1024
    assert most(graph, segment(graph, first, second, third, outputs=(third,))) == 2 * 1024
    # What was given belongs to the caller.
    given = segment(graph, second, outputs=(second,), inputs=(first,))
    assert most(graph, given) == 1024


def test_a_node_that_was_seen_to_need_more_or_less_counts_as_it_was_seen() -> None:
    b = GraphBuilder()
    x = b.argument((KIB,))
    first = b.add("Tile", x, shape=(2 * KIB,))
    second = b.add("Sum", first, shape=(KIB,))
    last = b.add("Exp", second, shape=(KIB,))
    graph = b.graph(last)
    cut, seconds = segment(graph, first, second, last, outputs=(last,)), node_seconds(graph)
    assert segment_memory(graph, cut, seconds).working == (3 * 1024, 3 * 1024)
    assert segment_memory(graph, cut, seconds, beyond={first.node: 2000}).working == (2048 + 2000, 2048 + 2000)
    assert segment_memory(graph, cut, seconds, least=2000, beyond={first.node: 2000}).working == (
        2048 + 2000,
        2048 + 2000,
    )
    # Then the last op is the fullest, which takes over the memory of the second.
    assert segment_memory(graph, cut, seconds, beyond={first.node: -2048, second.node: -2500}).working == (1024, 1024)


def test_what_is_computed_once_is_not_among_what_comes_and_goes() -> None:
    """Bug: the zeros that gradients of recurrent layers begin with were not counted, a fifth of what a rank held."""

    def zeros_within(x: tf.Tensor, given: tf.Tensor) -> tf.Tensor:
        # The function is prepared for the constant that it is given.
        return tf.concat([x, tf.reverse(given, [0]), tf.zeros([2 * KIB])], 0)

    inner = tf.function(zeros_within, experimental_implements="test.zeros")
    graph = step_graph(lambda x: inner(x, tf.zeros([KIB])), tf.TensorSpec([KIB]))
    numbers = tuple(n for n, node in enumerate(graph.nodes) if node.op not in SOURCES)
    found = segment_memory(
        graph, Segment(Visit(0, 0), numbers, (), (), (), graph.outputs), node_seconds(graph), least=2048
    )
    # The zeros that are handed in, their reverse, the zeros within, and an axis.
    assert found.constants == ((1 + 1 + 2) * 1024 + 4, 2048)
    assert found.working.bytes == 4 * 1024


def test_what_is_computed_twice_is_there_once() -> None:
    """Bug: each branch of a NASNet's cell counted an activation of its own, and forecasts were half too high."""

    def several(x: tf.Tensor) -> tf.Tensor:
        made = [tf.nn.relu(x) for _ in range(3)]
        return tf.stack([tf.reduce_sum(tf.exp(each)) + tf.reduce_max(each) for each in made])

    graph = step_graph(several, tf.TensorSpec([KIB]))
    numbers = tuple(n for n, node in enumerate(graph.nodes) if node.op not in SOURCES)
    # An activation and one exponential; the sum, the maximum, and what is made of them.
    assert most(graph, Segment(Visit(0, 0), numbers, (), (), (), graph.outputs)) == 2 * 1024 + 4


def test_ops_run_two_at_once_in_the_order_in_which_they_become_ready() -> None:
    b = GraphBuilder()
    x = b.argument((KIB,))
    ends = []
    for _ in range(3):
        wide = b.add("Tile", x, shape=(4 * KIB,))
        ends.append(b.add("Sum", wide, shape=()))
    graph = b.graph(*ends)
    every = [Tensor(number, 0) for number in range(1, len(graph.nodes))]
    # All three are made before the first is summed, although it is summed first in the trace.
    assert most(graph, segment(graph, *every, outputs=tuple(ends))) == 3 * 4 * 1024 + 4


def test_what_functions_have_while_they_run_is_counted() -> None:
    """Bug: of a recurrent layer's gradient only the results were, which lost a tenth of what an LSTM takes."""

    def wide(x: tf.Tensor) -> tf.Tensor:
        return tf.reduce_sum(tf.exp(tf.tile(x, [4])), keepdims=True) + x

    def narrow(x: tf.Tensor) -> tf.Tensor:
        return -x

    vector = tf.TensorSpec([KIB])
    whole = {
        "call": lambda x: tf.function(wide, experimental_implements="test.wide")(x),
        "branches": lambda x: tf.cond(x[0] > 0, lambda: wide(x), lambda: narrow(x)),
        "cases": lambda x: tf.switch_case(tf.cast(x[0], tf.int32), [lambda: narrow(x), lambda: wide(x)]),
        "loop": lambda x: tf.while_loop(lambda y: y[0] > 0, lambda y: [wide(y)], [x])[0],
    }
    found = {}
    for name, function in whole.items():
        graph = step_graph(function, vector)
        numbers = tuple(n for n, node in enumerate(graph.nodes) if node.op not in SOURCES)
        cut = Segment(Visit(0, 0), numbers, (), (), (), graph.outputs)
        found[name] = most(graph, cut)
    # What is four times as wide, and its sum; beside it what the branch is chosen by, and a counter of turns.
    assert found == {"call": 4 * 1024 + 4, "branches": 4 * 1024 + 5, "cases": 4 * 1024 + 8, "loop": 4 * 1024 + 24}


def test_what_only_a_sum_waits_for_is_behind_what_other_ops_wait_for() -> None:
    """Bug: what a kernel's gradient is made of was gone before the next layer's forward pass was made again."""
    b = GraphBuilder()
    x = b.argument((KIB,))
    output = b.add("Tile", x, shape=(4 * KIB,))
    of_kernel = b.add("Slice", output, shape=(KIB,))
    of_input = b.add("Slice", output, shape=(KIB,))
    wide = b.add("Tile", of_input, shape=(8 * KIB,))
    last = b.add("Sum", wide, shape=())
    graph = b.graph(of_kernel, last)
    cut = segment(graph, output, of_kernel, of_input, wide, last, outputs=(of_kernel, last))
    assert most(graph, cut, summed=(of_kernel,)) == (4 + 1 + 1 + 8) * 1024
    # Where something else waits for it, too, it is not known which is behind: both take as long.
    assert most(graph, cut) == (1 + 1 + 8) * 1024


def test_a_loop_runs_ahead_of_the_sums_it_makes() -> None:
    """Bug: of each kernel's gradient in an LSTM one was counted, while several turns had made theirs."""

    def summing(x: tf.Tensor) -> tf.Tensor:
        return tf.while_loop(lambda i, _: i < 10, lambda i, y: (i + 1, y + tf.tile(x, [1])), (0, x))[1]

    graph = step_graph(lambda x: tf.sqrt(summing(x)), tf.TensorSpec([KIB]))
    numbers = tuple(n for n, node in enumerate(graph.nodes) if node.op not in SOURCES)
    # The sum, and what two turns more add to it; and so of two counters.
    assert most(graph, Segment(Visit(0, 0), numbers, (), (), (), graph.outputs)) == 3 * (1024 + 4 + 4)
