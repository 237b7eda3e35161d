"""Memory that ops take for themselves: literal bytes, of the sizes seen of TensorFlow's kernels."""

from __future__ import annotations

import pytest
import tensorflow as tf

from smp_tf.partition import tf_internals
from smp_tf.partition.graph.op_graph import Tensor
from smp_tf.partition.op_cost.workspace import workspace
from tests.partition.op_graph_builder import GraphBuilder


def equation(text: str) -> bytes:
    definition = tf.compat.v1.NodeDef(op="Einsum")
    definition.attr["equation"].s = text.encode()
    return definition.SerializeToString()


@pytest.mark.parametrize(
    ("text", "left", "right", "result", "copied"),
    [
        # A dense layer over the last axis: nothing is copied.
        ("abc,cde->abde", (2, 3, 4), (4, 5, 6), (2, 3, 5, 6), 0),
        # Attention scores: both operands and the product are.
        ("aecd,abcd->acbe", (2, 3, 4, 5), (2, 7, 4, 5), (2, 4, 7, 3), 4 * (120 + 280 + 168)),
        # A batched product as it is.
        ("abc,acd->abd", (2, 3, 4), (2, 4, 5), (2, 3, 5), 0),
    ],
)
def test_an_einsum_copies_what_does_not_lie_as_a_product(
    text: str, left: tuple[int, ...], right: tuple[int, ...], result: tuple[int, ...], copied: int
) -> None:
    b = GraphBuilder()
    made = b.add("Einsum", b.argument(left), b.argument(right), shape=result, definition=equation(text))
    graph = b.graph(made)
    assert workspace(graph, graph.nodes[made.node]) == copied


def test_an_op_that_no_table_knows_may_take_as_much_as_it_reads_and_gives() -> None:
    b = GraphBuilder()
    x, y = b.argument((2, 8)), b.argument((None, 4))
    made = b.add("Frobnicate", x, y, shape=(16,))
    graph = b.graph(made)
    assert workspace(graph, graph.nodes[made.node], unknown=3) == 4 * (16 + 12 + 16)
    assert workspace(graph, graph.nodes[x.node]) == 0


def test_the_gradient_of_a_maximum_finds_the_maxima_again() -> None:
    b = GraphBuilder()
    x, y = b.argument((2, 8, 8, 4)), b.argument((2, 4, 4, 4))
    made = b.add("MaxPoolGrad", x, y, y, shape=(2, 8, 8, 4))
    graph = b.graph(made)
    assert workspace(graph, graph.nodes[made.node]) == 128 * 4 + 128 * 8


@pytest.mark.parametrize(
    ("dtype", "has_onednn", "images"),
    [
        ("float32", True, {"Filter": 0, "Input": 0}),
        ("float32", False, {"Filter": 6, "Input": 1}),
        ("float64", True, {"Filter": 3, "Input": 1}),
        ("float64", False, {"Filter": 3, "Input": 1}),
    ],
)
def test_a_convolution_that_onednn_does_not_compute_writes_patches(
    monkeypatch: pytest.MonkeyPatch, dtype: str, has_onednn: bool, images: dict[str, int]
) -> None:
    monkeypatch.setattr(tf_internals, "has_onednn", lambda: has_onednn)
    b = GraphBuilder()
    x, kernel = b.argument((32, 64, 64, 32), dtype), b.argument((3, 3, 32, 64), dtype)
    dy, sizes = b.argument((32, 64, 64, 64), dtype), b.argument((4,), "int32")
    of: dict[str, Tensor] = {
        "Filter": b.add("Conv2DBackpropFilter", x, sizes, dy, shape=(3, 3, 32, 64), dtype=dtype),
        "Input": b.add("Conv2DBackpropInput", sizes, kernel, dy, shape=(32, 64, 64, 32), dtype=dtype),
    }
    graph = b.graph(*of.values())
    # Those of an image: 9 numbers per position and channel.
    one = 64 * 64 * 9 * 32 * (8 if dtype == "float64" else 4)
    assert {name: workspace(graph, graph.nodes[t.node]) // one for name, t in of.items()} == images


@pytest.mark.parametrize(
    ("taken", "given", "own"),
    [
        # Seen: 220.5 MiB for 768 groups. A kernel for all channels, and a copy of it.
        (1, 768, 2 * 49 * 768 * 768 * 4),
        # Two numbers of each group: what is read and what is given, in another order.
        (1, 1536, 4 * (4 * 4 * 768 + 4 * 4 * 1536 + 49 * 1536)),
        (24, 888, 4 * (4 * 4 * 768 + 4 * 4 * 888 + 49 * 24 * 888)),
        # One group.
        (768, 768, 0),
    ],
)
def test_the_gradient_of_a_grouped_kernel_is_made_in_another_form_first(taken: int, given: int, own: int) -> None:
    b = GraphBuilder()
    x, sizes, dy = b.argument((4, 2, 2, 768)), b.argument((4,), "int32"), b.argument((4, 2, 2, given))
    made = b.add("Conv2DBackpropFilter", x, sizes, dy, shape=(7, 7, taken, given))
    graph = b.graph(made)
    assert workspace(graph, graph.nodes[made.node]) == own
