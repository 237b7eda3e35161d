"""The passes run in the order of their list, each once, and it is known which of them have changed the graph."""

from __future__ import annotations

import dataclasses

import tensorflow as tf

from smp_tf.partition.graph.op_graph import OpGraph
from smp_tf.partition.rewrite.passes import PASSES, RANDOM, Pass, Say, rewrite
from tests.partition.linear_layers import linear_layers
from tests.partition.op_graph_builder import GraphBuilder


def no_one(said: str) -> None:
    raise AssertionError(said)


def test_each_pass_has_a_name_of_its_own_and_a_reason() -> None:
    assert [one.name for one in PASSES] == ["random", "unneeded", "measurements"]
    assert all(one.why.endswith(".") for one in PASSES)


def test_what_is_rewritten_already_stays_as_it_is() -> None:
    once = rewrite(linear_layers(loss=True), no_one)
    again = rewrite(once.graph, no_one)
    assert again.graph.text() == once.graph.text()
    assert RANDOM not in again.changed_by


def test_a_random_op_that_nothing_needs_counts_as_one_that_was_changed() -> None:
    """A step is random, and counts as such, before what it does not need is left out."""
    b = GraphBuilder()
    x = b.argument()
    definition = tf.compat.v1.NodeDef(name="noise", op="RandomUniform")
    definition.attr["dtype"].type, definition.attr["T"].type = tf.float32.as_datatype_enum, tf.int32.as_datatype_enum
    b.add("RandomUniform", x, stateful=True, definition=definition.SerializeToString())
    found = rewrite(b.graph(b.add("Relu", x)), no_one)
    assert RANDOM in found.changed_by
    assert [node.op for node in found.graph.nodes] == ["SmpArgument", "Relu"]


def test_a_new_pass_is_an_entry_of_the_list() -> None:
    def rename(graph: OpGraph, say: Say) -> OpGraph:
        say("layers have other names")
        calls = tuple(dataclasses.replace(call, path=f"other/{call.path}") for call in graph.calls)
        return dataclasses.replace(graph, calls=calls)

    said: list[str] = []
    found = rewrite(linear_layers(), said.append, [*PASSES, Pass("renamed", "A test adds it.", rename)])
    assert said == ["layers have other names"]
    assert {call.path.partition("/")[0] for call in found.graph.calls} == {"other"}
    assert "renamed" in found.changed_by
