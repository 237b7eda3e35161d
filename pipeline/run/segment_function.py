"""A segment as a TensorFlow function, traced once and called once per microbatch.

The function takes what the segment needs from outside as arguments (microbatch slices, received tensors, stash,
captured tensors, the seed, values of other stages' variables); handles of the variables its stage owns are captured.
What is only summed over the microbatches it adds to the sum itself, and does not return.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from smp_tf.partition import tf_internals
from smp_tf.partition.graph.op_graph import VARIABLE, OpGraph, Tensor, TensorType
from smp_tf.partition.split.segment_graph import remote_value_name, segment_graph, tensor_name
from smp_tf.partition.split.split import Segment
from smp_tf.pipeline.run.accumulator import Accumulator
from smp_tf.pipeline.run.early_sums import EarlySums
from smp_tf.pipeline.run.host import on_device


@dataclass(frozen=True)
class SegmentFunction:
    """A segment that can be called.

    Args:
        segment: what it runs.
        arguments: the tensors to pass, in order: those of source nodes, then the segment's inputs.
        remote_values: variables whose value is passed after them.
        variables: indices of the variables whose handle it holds.
        outputs: the tensors it returns, in order.
        weighted: whether it takes, after them, the weight (a float64 scalar) of what it adds to sums.
        early: the sums that it gives before it ends; it takes the number of the step last. None: it gives none.
        function: the traced function.
        compiled: whether XLA compiles it.
        uncompiled: why XLA does not compile it although that was asked for; else None.
    """

    segment: Segment
    arguments: tuple[Tensor, ...]
    remote_values: tuple[int, ...]
    variables: tuple[int, ...]
    outputs: tuple[Tensor, ...]
    weighted: bool
    early: EarlySums | None
    function: Callable[..., Sequence[tf.Tensor]]
    compiled: bool = False
    uncompiled: str | None = None


def _spec(kind: TensorType, name: str) -> tf.TensorSpec:
    return tf.TensorSpec(kind.shape, tf.dtypes.as_dtype(kind.dtype), name=name)


def build_segment_function(
    graph: OpGraph,
    segment: Segment,
    variables: Mapping[int, tf.Variable],
    *,
    outputs: tuple[Tensor, ...] | None = None,
    accumulators: Mapping[Tensor, Accumulator] | None = None,
    weighted: bool = False,
    early: EarlySums | None = None,
    sums_on: str | None = None,
    summed: Collection[Tensor] = (),
    xla: bool = False,
    samples: int = 1,
) -> SegmentFunction:
    """Traces a segment into a function.

    Args:
        graph: the op graph.
        segment: the segment.
        variables: the variables whose handle may be used here, by index in the graph.
        outputs: what to return; everything that others need where not given.
        accumulators: the sums to add to, by the tensor to add.
        weighted: whether to multiply what is added by a weight, passed at every call.
        early: sums to give as soon as they are complete, which this call makes them.
        sums_on: the device on which `summed` are returned; None for where they are made.
        summed: tensors that the caller adds up over the microbatches.
        xla: compile the function with XLA, where XLA can.
        samples: samples of a microbatch, where the graph leaves that length open; only to ask XLA whether it can.

    Returns:
        The function with the list of what to pass it.
    """
    sources = [Tensor(n, 0) for n in segment.sources if graph.nodes[n].op != VARIABLE]
    handles = {n: _variable_of(graph, n) for n in segment.sources if graph.nodes[n].op == VARIABLE}
    arguments = (*sources, *segment.inputs)
    outputs = segment.outputs if outputs is None else outputs
    sums = accumulators or {}
    given_early = early.tensors if early is not None else ()
    weighted = weighted and bool(sums or given_early)
    body = segment_graph(graph, segment, variables)
    for definition in body.library.function:
        tf_internals.register_function(definition)
    specs = [_spec(graph.type_of(t), f"smp_argument_{i}") for i, t in enumerate(arguments)]
    specs += [_spec(graph.variables[v].type, f"smp_value_{v}") for v in segment.remote_values]
    names = [tensor_name(graph, t) for t in arguments] + [remote_value_name(graph, v) for v in segment.remote_values]
    if weighted:
        specs.append(tf.TensorSpec([], tf.float64, name="smp_weight"))
    if early is not None:
        specs.append(tf.TensorSpec([], tf.int64, name="smp_step"))
    wanted_inside = tuple(dict.fromkeys((*outputs, *sums, *given_early)))

    def computed(tensors: Sequence[tf.Tensor], wanted: Sequence[Tensor]) -> list[tf.Tensor]:
        current = tf_internals.current_graph()
        given: dict[str, tf.Tensor] = dict(zip(names, tensors, strict=False))
        for number, variable in handles.items():
            handle = tf_internals.capture(current, variables[variable].handle)
            given[tensor_name(graph, Tensor(number, 0))] = handle
        imported = [name for t in dict.fromkeys(wanted) if (name := tensor_name(graph, t)) not in given]
        used = {name for node in body.node for name in map(_with_port, node.input)}
        made = tf.graph_util.import_graph_def(
            body,
            input_map={name: value for name, value in given.items() if name in used},
            return_elements=imported,
            name="",
        )
        given.update(zip(imported, made or (), strict=True))
        return [given[tensor_name(graph, t)] for t in wanted]

    def run(*tensors: tf.Tensor) -> list[tf.Tensor]:
        weight = tensors[len(names)] if weighted else None
        values = dict(zip(wanted_inside, computed(tensors, wanted_inside), strict=True))

        def counted(tensor: Tensor) -> tf.Tensor:
            value = values[tensor]
            return value if weight is None else value * tf.cast(weight, value.dtype)

        added = {tensor: accumulator.add(counted(tensor)) for tensor, accumulator in sums.items()}

        def sum_of(tensor: Tensor) -> tf.Tensor:
            return sums[tensor].take(added[tensor])[0] if tensor in sums else counted(tensor)

        with on_device(sums_on):
            # Copied as they are made: until the function returns, all of them would be on the device together.
            results = [tf.identity(values[t]) if sums_on and t in summed else values[t] for t in outputs]
        if early is not None:
            early.give(sum_of, tensors[-1])
        return results

    run.__name__ = f"chunk_{segment.chunk}_sweep_{segment.sweep}"

    def traced(body: Callable[..., Any], jit_compile: bool | None) -> Any:
        return tf.function(body, autograph=False, jit_compile=jit_compile, experimental_attributes={"_noinline": True})

    def run_without_sums(*tensors: tf.Tensor) -> list[tf.Tensor]:
        # To ask XLA with: the variables that hold the sums are empty between two steps.
        return computed(tensors, wanted_inside)

    uncompiled = tf_internals.why_xla_cannot(traced(run_without_sums, True), specs, samples) if xla else None
    compiled = xla and uncompiled is None
    return SegmentFunction(
        segment=segment,
        arguments=arguments,
        remote_values=segment.remote_values,
        variables=tuple(handles.values()),
        outputs=outputs,
        weighted=weighted,
        early=early,
        function=traced(run, compiled or None).get_concrete_function(*specs),
        compiled=compiled,
        uncompiled=uncompiled,
    )


def _variable_of(graph: OpGraph, number: int) -> int:
    variable = graph.nodes[number].source
    assert variable is not None
    return variable


def _with_port(name: str) -> str:
    return name if name.startswith("^") or ":" in name else f"{name}:0"
