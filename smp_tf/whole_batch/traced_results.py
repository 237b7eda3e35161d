"""The results of a step, read off its traces: their names, and the tensors that they are in both traces.

returned by the step       {"loss": loss, "logs": {"norm": norm}}
names of its leaves         loss           logs/norm
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from smp_tf.partition.graph.op_graph import OpGraph, Tensor
from smp_tf.partition.trace.lower import OutputSlot
from smp_tf.steps.trace import StepTrace


def logs_of(traced: StepTrace) -> dict[str, OutputSlot]:
    """Returns the tensors among the logs that a step returns, by name.

    Args:
        traced: the step. It returns a dictionary with the logs under "results".
    """
    found: dict[str, OutputSlot] = {}
    for name, slot in named_leaves(traced.lowered.results["results"]):
        if isinstance(slot, OutputSlot) and slot.spec is None and slot not in found.values():
            found[name] = slot
    return found


def named_leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the leaves of what a step returns, each with the keys that lead to it.

    Args:
        value: the structure.
        name: the keys that lead to it.
    """
    if isinstance(value, Mapping):
        for key in value:
            yield from named_leaves(value[key], f"{name}/{key}" if name else str(key))
    elif isinstance(value, (list, tuple)):
        for number, part in enumerate(value):
            yield from named_leaves(part, f"{name}/{number}" if name else str(number))
    else:
        yield name, value


def logs_of_both(part: StepTrace, whole: StepTrace) -> tuple[dict[str, tuple[Tensor, Tensor]], dict[int, int]]:
    """Returns, for two traces of a step, the logs that both return, by name, and the variables that both have.

    Args:
        part: the step as it is traced for a microbatch.
        whole: the same, traced for all samples of a batch.
    """
    ours, theirs = logs_of(part), logs_of(whole)
    logs = {
        name: (whole.lowered.graph.outputs[slot.outputs[0]], part.lowered.graph.outputs[ours[name].outputs[0]])
        for name, slot in theirs.items()
        if name in ours
    }
    index_of = {id(variable): index for index, variable in enumerate(part.lowered.variables)}
    same = {
        index: index_of[id(variable)]
        for index, variable in enumerate(whole.lowered.variables)
        if id(variable) in index_of
    }
    return logs, same


def follows_state(graph: OpGraph, tensor: Tensor) -> bool:
    """Returns whether a tensor depends on a variable that the step writes.

    Args:
        graph: the step.
        tensor: the tensor.
    """
    return any([graph.nodes[number].writes for number in graph.ancestors([tensor.node])])
