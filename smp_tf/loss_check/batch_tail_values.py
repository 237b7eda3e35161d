"""Computes the tail of a step for a whole batch (`partition/samples/batch_tail.py`) from tensors of microbatches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from smp_tf.partition.graph.op_graph import VARIABLE, OpGraph
from smp_tf.partition.samples.batch_tail import Tail
from smp_tf.steps.trace import StepTrace
from smp_tf.whole_batch.tail_graph import TailGraph


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
        self._graph = TailGraph(whole, tail)
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
        copies = {index: tf.Variable(value) for index, value in self._read.items()}
        given = [tf.constant(value) for value in cuts]

        @tf.function(autograph=False)
        def computed() -> dict[str, list[tf.Tensor]]:
            return self._graph.write(given, arguments, copies)

        with tf.device("CPU:0"):
            values = computed()
        return BatchValues(
            {name: [value.numpy() for value in found] for name, found in values.items()},
            {index: copies[index].numpy() for index in self.before},
        )


def _script_variables(graph: OpGraph, nodes: Sequence[int]) -> set[int]:
    """Returns the script's variables among nodes, since a step may change them before the tail is computed."""
    found = (graph.nodes[number] for number in nodes)
    sources = {node.source for node in found if node.op == VARIABLE and node.source is not None}
    return {index for index in sources if not graph.variables[index].in_model}
