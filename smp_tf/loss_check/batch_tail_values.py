"""Computes the tail of a step for a whole batch (`partition/samples/batch_tail.py`) from tensors of microbatches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from smp_tf.partition.graph.op_graph import ARGUMENT, CAPTURE, VARIABLE, OpGraph, Tensor
from smp_tf.partition.samples.batch_tail import Tail
from smp_tf.steps.trace import StepTrace

_CUT = "smp_cut"


@dataclass(frozen=True)
class BatchValues:
    """The results of the tail of a step.

    Args:
        results: the tensors of each result, by name.
        states: what each variable of the script that the tail writes holds afterwards, by the variable's index.
    """

    results: Mapping[str, list[np.ndarray]]
    states: Mapping[int, np.ndarray]


class TailValues:
    """The tail of a step, ready to be computed once.

    Args:
        whole: the step, traced for the whole batch.
        tail: the tail of the step.
    """

    def __init__(self, whole: StepTrace, tail: Tail) -> None:
        self._whole = whole
        self._tail = tail
        graph = whole.lowered.graph
        self._read = {
            index: whole.lowered.variables[index].numpy() for index in sorted(_script_variables(graph, tail.nodes))
        }
        written = {index for number in tail.nodes for index in graph.nodes[number].writes}
        #: What each variable that the tail writes holds before the batch.
        self.before = {index: value for index, value in self._read.items() if index in written}

    def compute(self, cuts: Sequence[Any], arguments: Mapping[int, Any]) -> BatchValues:
        """Returns the results of the tail. The script's variables, such as the states of metrics, stay as they are.

        Args:
            cuts: the values of the tail's cuts.
            arguments: the step's tensor arguments for the whole batch that the tail reads, by number.
        """
        whole, tail = self._whole, self._tail
        graph = whole.lowered.graph
        copies = {index: tf.Variable(value) for index, value in self._read.items()}
        given: dict[str, Any] = {f"{_CUT}_{number}:0": tf.constant(value) for number, value in enumerate(cuts)}
        outside = {inside.op.name: capture for capture, inside in whole.trace.graph.captures}
        for number in tail.nodes:
            node = graph.nodes[number]
            if node.op == ARGUMENT:
                given[f"{node.name}:0"] = arguments[_source(node.source)]
            elif node.op == CAPTURE:
                given[f"{node.name}:0"] = outside[node.name]
            elif node.op == VARIABLE:
                copy = copies.get(_source(node.source))
                given[f"{node.name}:0"] = outside[node.name] if copy is None else copy.handle
        definition = self._definition()
        tensors = {
            name: [self._name(t) for t in given if isinstance(t, Tensor)] for name, given in tail.results.items()
        }
        writers = [graph.nodes[number].name for number in tail.nodes if graph.nodes[number].writes]
        fetched = [*(name for names in tensors.values() for name in names), *writers]

        @tf.function(autograph=False)
        def computed() -> list[tf.Tensor]:
            inside = {name: tf.identity(value) for name, value in given.items()}
            found = tf.import_graph_def(definition, input_map=inside, return_elements=fetched, name="")
            with tf.control_dependencies(found[len(found) - len(writers) :]):
                return [tf.identity(value) for value in found[: len(found) - len(writers)]]

        with tf.device("CPU:0"):
            values = iter(computed())
        return BatchValues(
            {name: [next(values).numpy() for _ in names] for name, names in tensors.items()},
            {index: copies[index].numpy() for index in self.before},
        )

    def _name(self, tensor: Tensor) -> str:
        for number, cut in enumerate(self._tail.cuts):
            if cut.whole == tensor:
                return f"{_CUT}_{number}:0"
        return f"{self._whole.lowered.graph.nodes[tensor.node].name}:{tensor.index}"

    def _definition(self) -> Any:
        """Returns the nodes of the tail, with placeholders where it begins."""
        graph = self._whole.lowered.graph
        definition = self._whole.trace.graph.as_graph_def()
        kept = {graph.nodes[number].name for number in self._tail.nodes}
        cuts = {
            (graph.nodes[cut.whole.node].name, cut.whole.index): f"{_CUT}_{number}"
            for number, cut in enumerate(self._tail.cuts)
        }
        part = type(definition)(library=definition.library, versions=definition.versions)
        for number, cut in enumerate(self._tail.cuts):
            placeholder = part.node.add(name=f"{_CUT}_{number}", op="Placeholder")
            placeholder.attr["dtype"].type = tf.as_dtype(graph.type_of(cut.whole).dtype).as_datatype_enum
        for node in definition.node:
            if node.name not in kept:
                continue
            copied = part.node.add()
            copied.CopyFrom(node)
            copied.device = ""
            copied.attr.pop("_class", None)
            del copied.input[:]
            for text in node.input:
                if text.startswith("^"):
                    if text[1:] in kept:
                        copied.input.append(text)
                    continue
                # The node, in a function's body the output's name, and the output's number.
                name, *rest = text.split(":")
                copied.input.append(cuts.get((name, int(rest[-1]) if rest else 0), text))
        return part


def _script_variables(graph: OpGraph, nodes: Sequence[int]) -> set[int]:
    """Returns the script's variables among nodes, since a step may change them before the tail is computed."""
    found = (graph.nodes[number] for number in nodes)
    sources = {_source(node.source) for node in found if node.op == VARIABLE}
    return {index for index in sources if not graph.variables[index].in_model}


def _source(source: int | None) -> int:
    assert source is not None, "what stands for an argument, a capture or a variable says for which"
    return source
