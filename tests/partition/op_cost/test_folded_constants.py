"""What TensorFlow computes once of traced functions."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import tensorflow as tf

from smp_tf.partition.graph.op_graph import SOURCES
from smp_tf.partition.op_cost.folded_constants import folded_nodes, kept_constants
from tests.partition.traced_step import step_graph

MIB = 1 << 18  # floats


def kept(function: Callable[[tf.Tensor], tf.Tensor], *shape: int | None) -> dict[str, int]:
    """Returns the bytes of constants of 1 KiB or more that stay, by the op that makes them."""
    graph = step_graph(function, tf.TensorSpec(shape))
    nodes = [number for number, node in enumerate(graph.nodes) if node.op not in SOURCES]
    found = kept_constants(graph, nodes, folded_nodes(graph, nodes), graph.outputs)
    return {graph.nodes[t.node].op: size for t in found if (size := graph.type_of(t).nbytes()) >= 1024}


@pytest.mark.parametrize(
    ("function", "shape", "found"),
    [
        (lambda x: x + tf.zeros([MIB]), (MIB,), {"Fill": 4 * MIB}),
        # What only constants read is gone when it was read.
        (lambda x: x + tf.reverse(tf.ones([MIB]) * 2.0, [0]), (MIB,), {"ReverseV2": 4 * MIB}),
        (lambda x: x + tf.raw_ops.ZerosLike(x=x), (MIB,), {"ZerosLike": 4 * MIB}),
        # The shape is not known before.
        (lambda x: x + tf.raw_ops.ZerosLike(x=x), (None,), {}),
        # One number stands for all of these; others are made anew.
        (lambda x: x + tf.zeros([11 * MIB]), (11 * MIB,), {"Fill": 44 * MIB}),
        (lambda x: x + tf.reverse(tf.zeros([11 * MIB]), [0]), (11 * MIB,), {"Fill": 44 * MIB}),
        (lambda x: x + tf.random.uniform([MIB]), (MIB,), {}),
        (lambda x: x * 2.0, (MIB,), {}),
    ],
)
def test_what_is_made_of_constants_stays(
    function: Callable[[tf.Tensor], tf.Tensor], shape: tuple[int | None, ...], found: dict[str, int]
) -> None:
    assert kept(function, *shape) == found
