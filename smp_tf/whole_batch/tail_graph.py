"""Writes the tail of a step for a whole batch (`partition/samples/batch_tail.py`) into the graph being traced."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import tensorflow as tf

from smp_tf.partition.graph.op_graph import ARGUMENT, CAPTURE, SOURCES, VARIABLE, Tensor
from smp_tf.partition.samples.batch_tail import Cut, Tail
from smp_tf.partition.samples.tail_places import TailPlaces
from smp_tf.partition.tf_internals import KeptFunctions
from smp_tf.steps.trace import StepTrace
from smp_tf.tf_internals import op_by_op

#: Takes tensors of this stage, or None for those of another stage, and returns the tensors for all stages.
Tell = Callable[[Sequence[tuple[Any, Any]]], Sequence[tf.Tensor]]


def joined_cut(cut: Cut, parts: Sequence[Any]) -> Any:
    """Returns a tensor of a whole batch where a tail begins.

    Args:
        cut: the tensor.
        parts: the same tensor of each microbatch.
    """
    if cut.axis is None:
        # A variable of the model that microbatches write, such as a moving average, is what the last one leaves.
        return parts[-1]
    if cut.blocks == 1:
        return tf.concat(parts, cut.axis)
    return in_a_row(tf.concat([by_block(part, cut.blocks) for part in parts], 1))


def by_block(value: Any, blocks: int) -> tf.Tensor:
    """Returns rows with one more dimension in front, that of their blocks.

    Args:
        value: the rows, one block after the other.
        blocks: number of blocks.
    """
    return tf.reshape(value, tf.concat([[blocks, -1], tf.shape(value)[1:]], 0))


def in_a_row(value: tf.Tensor) -> tf.Tensor:
    """Returns rows without the dimension in front, one block after the other.

    Args:
        value: the rows, by block.
    """
    return tf.reshape(value, tf.concat([[-1], tf.shape(value)[2:]], 0))


def blocks_swapped(value: tf.Tensor) -> tf.Tensor:
    """Returns rows with their first two dimensions swapped: those of blocks and of samples.

    Args:
        value: the rows, with both as first dimensions.
    """
    return tf.transpose(value, tf.concat([[1, 0], tf.range(2, tf.rank(value))], 0))


class TailGraph:
    """The tail of a step, ready to be written into other graphs.

    Args:
        whole: the step, traced for the whole batch. Its nodes are copied, so that nothing needs the trace afterwards.
        tail: the tail of the step.
    """

    def __init__(self, whole: StepTrace, tail: Tail) -> None:
        self._tail = tail
        self._graph = whole.lowered.graph
        self._outside: dict[str, Any] = {}
        self._definition = tf.compat.v1.GraphDef()
        if not tail.nodes:
            return
        names = {self._graph.nodes[number].name for number in tail.nodes}
        self._outside = {inside.op.name: out for out, inside in whole.trace.graph.captures if inside.op.name in names}
        definition = whole.trace.definition
        self._definition.versions.CopyFrom(definition.versions)
        self._definition.library.CopyFrom(definition.library)
        self._definition.node.extend(node for node in definition.node if node.name in names)
        self._calls = KeptFunctions(definition.library.function)

    def write(
        self,
        cuts: Sequence[Any],
        arguments: Mapping[int, Any],
        variables: Mapping[int, tf.Variable] | None = None,
    ) -> dict[str, list[tf.Tensor]]:
        """Writes the tail once. All that it changes is changed before any of its results is there.

        Args:
            cuts: the values of the tail's cuts, and then those of its shapes.
            arguments: the step's tensor arguments for the whole batch that the tail reads, by number.
            variables: what stands for a variable of the step, by index. All others stand for themselves.

        Returns:
            The tensors of each result, by name; none for a result that only writes.
        """
        begins = (*(cut.whole for cut in self._tail.cuts), *self._tail.shapes)
        values = dict(zip(begins, cuts, strict=True))
        values.update(self._sources(arguments, variables or {}))
        with op_by_op():
            return self._results(values, self._import(self._tail.nodes, values))

    def write_spread(
        self,
        cuts: Sequence[Any],
        arguments: Mapping[int, Any],
        gradients: Mapping[Tensor, Any],
        places: TailPlaces,
        stage: int,
        tell: Tell,
    ) -> dict[str, list[tf.Tensor | None]]:
        """Writes a stage's part of the tail, from its own gradients and from what other stages tell.

        Args:
            cuts: the values of the tail's cuts.
            arguments: the step's tensor arguments for the whole batch that the tail reads, by number.
            gradients: the gradients that are here.
            places: which stage computes what.
            stage: this rank's.
            tell: tells all stages what one of them has. Every stage calls it alike.

        Returns:
            The tensors of each result, by name; None in place of one that another stage has.
        """
        values = dict(zip((cut.whole for cut in self._tail.cuts), cuts, strict=True))
        values.update(self._sources(arguments, {}))
        values.update(gradients)
        writers: list[tf.Operation] = []
        last = max((place.round for place in places.nodes.values()), default=0)
        with op_by_op():
            for number in range(last + 1):
                here = [
                    node
                    for node in self._tail.nodes
                    if places.nodes[node].round == number and places.nodes[node].stage in (None, stage)
                ]
                writers += self._import(here, values)
                if number < len(places.told):
                    asked = places.told[number]
                    kinds = [self._graph.type_of(tensor) for tensor in asked]
                    heard = tell([(values.get(tensor), kind) for tensor, kind in zip(asked, kinds, strict=True)])
                    values.update(zip(asked, heard, strict=True))
            return self._results(values, writers)

    def _results(self, values: Mapping[Tensor, Any], writers: Sequence[tf.Operation]) -> dict[str, list[Any]]:
        with tf.control_dependencies(writers):
            return {
                name: [None if t not in values else tf.identity(values[t]) for t in wanted if isinstance(t, Tensor)]
                for name, wanted in self._tail.results.items()
            }

    def _sources(self, arguments: Mapping[int, Any], variables: Mapping[int, tf.Variable]) -> dict[Tensor, Any]:
        """Returns what stands for the arguments, captures and variables that the tail reads."""
        found: dict[Tensor, Any] = {}
        for number in self._tail.nodes:
            node = self._graph.nodes[number]
            if node.op not in SOURCES:
                continue
            assert node.source is not None, "what stands for an argument, a capture or a variable says for which"
            if node.op == ARGUMENT:
                found[Tensor(number, 0)] = arguments[node.source]
            elif node.op == CAPTURE:
                found[Tensor(number, 0)] = self._outside[node.name]
            elif node.op == VARIABLE:
                variable = variables.get(node.source)
                found[Tensor(number, 0)] = self._outside[node.name] if variable is None else variable.handle
        return found

    @cached_property
    def _of_name(self) -> dict[str, Any]:
        """The nodes that are written, as TensorFlow stores them, by name."""
        return {node.name: node for node in self._definition.node}

    def _import(self, numbers: Iterable[int], values: dict[Tensor, Any]) -> list[tf.Operation]:
        """Writes some nodes, adds their outputs to the existing values, and returns the nodes that write."""
        numbers = [number for number in numbers if self._graph.nodes[number].op not in SOURCES]
        if not numbers:
            return []
        inside = {number: self._graph.nodes[number].name for number in numbers}
        part = tf.compat.v1.GraphDef(library=self._definition.library, versions=self._definition.versions)
        given: dict[str, Any] = {}

        def name_of(tensor: Tensor) -> str:
            if tensor.node in inside and tensor not in values:
                return f"{inside[tensor.node]}:{tensor.index}"
            name = f"smp_given_{tensor.node}_{tensor.index}"
            if f"{name}:0" not in given:
                given[f"{name}:0"] = tf.identity(values[tensor])
                placeholder = part.node.add(name=name, op="Placeholder")
                placeholder.attr["dtype"].type = given[f"{name}:0"].dtype.as_datatype_enum
            return f"{name}:0"

        for number, name in inside.items():
            node = self._graph.nodes[number]
            inputs = [name_of(tensor) for tensor in node.inputs]
            copied = part.node.add()
            if name in self._of_name:
                copied.CopyFrom(self._of_name[name])
            else:
                copied.MergeFromString(node.definition)  # A pass has added it.
            copied.device = ""
            copied.attr.pop("_class", None)
            del copied.input[:]
            copied.input.extend(inputs + [f"^{inside[before]}" for before in node.control if before in inside])
        fetched = [
            Tensor(number, index) for number in numbers for index in range(len(self._graph.nodes[number].outputs))
        ]
        fetched = [tensor for tensor in fetched if tensor not in values]
        writers = [inside[number] for number in numbers if self._graph.nodes[number].writes]
        found = tf.import_graph_def(
            part,
            input_map=given,
            return_elements=[*(f"{inside[t.node]}:{t.index}" for t in fetched), *writers],
            name="smp_whole_batch",
        )
        values.update(zip(fetched, found, strict=False))
        return list(found[len(fetched) :])
