"""Finds ops in a traced step that ask something of other processes by themselves, such as Horovod's.

    in a model of several partitions   the op becomes one of its layer's stage, and only ranks of that stage run it:
                                       those of others never come to it                                 ─▶ an error
    replicas of one partition          every process runs it, once for each microbatch, as without smp_tf  ─▶ nothing
      its gradient is another on       no two processes trace one step                                  ─▶ an error
      every process
    BatchNormalization(synchronized)   Keras asks tf.distribute for other processes, and finds none     ─▶ told once

The functions of the module `horovod.tensorflow` are refused by name (horovod_scope.py). Here the graph is checked, with
the functions and loops that its ops run. So it does not matter how an op came there.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from smp_tf.errors import StepError
from smp_tf.partition.graph.node_def import attributes, function_names, functions
from smp_tf.partition.graph.op_graph import Node, OpGraph

#: The begins of the types of ops in which a process waits for others: TensorFlow's own, and those of libraries.
_PREFIXES = ("Horovod", "Collective", "Nccl", "_Nccl", "Byteps", "DTensor", "XlaAllReduce", "XlaReduceScatter")
_NAMES = frozenset({"AllToAll", "CrossReplicaSum", "Send", "_Send", "_HostSend", "Recv", "_Recv", "_HostRecv"})
#: Ops of Horovod that ask nothing of others.
_LOCAL = frozenset({"HorovodLocalRank", "HorovodLocalSize", "HorovodProcessSetIncluded", "HorovodRank", "HorovodSize"})
#: Ops whose gradient is this process's part, or is nothing on all processes but one.
_UNLIKE_GRADIENTS = ("HorovodAllgather", "HorovodBroadcast", "HorovodGroupedAllgather")


def is_collective(op: str) -> bool:
    """Returns whether a process waits for others in an op.

    Args:
        op: type of the op.
    """
    return (op.startswith(_PREFIXES) and op not in _LOCAL) or op in _NAMES


def refuse_what_hangs(graph: OpGraph, step: str, partitions: int, replicas: int) -> None:
    """Raises an error where ops of a step wait for processes that never come to them, or that have different ops.

    Args:
        graph: the traced step.
        step: name of the step.
        partitions: number of partitions of the model.
        replicas: number of replicas of the model.

    Raises:
        StepError: there is such an op.
    """
    if partitions * replicas == 1:
        return
    containing = _functions_with_collectives(graph.library)
    if not containing and not any(map(is_collective, {node.op for node in graph.nodes})):
        return
    differentiated = {node.forward_of for node in graph.nodes if node.forward_of is not None}
    for number, node in enumerate(graph.nodes):
        op = _collective_of(node, containing)
        if op is None:
            continue
        way_out = _way_out(graph.calls[node.call].class_name)
        if partitions > 1:
            raise StepError(
                f"{_place(graph, node, op, step)}. In it a process waits for others, and in a model of {partitions} "
                f"partitions only the ranks of this layer's stage run it: the others never come to it. {way_out}"
            )
        if op in _UNLIKE_GRADIENTS and number in differentiated:
            raise StepError(
                f"{_place(graph, node, op, step)}, and takes its gradient, which is another on every process. Then no "
                f"two replicas have one step. Gather or broadcast after the step, on what it returns, or stop the "
                f"gradient in front of it: tf.stop_gradient."
            )


def _collective_of(node: Node, containing: dict[str, str]) -> str | None:
    if is_collective(node.op):
        return node.op
    names = function_names(attributes(node)) if containing else []
    return next((containing[name] for name in names if name in containing), None)


def _functions_with_collectives(library: bytes) -> dict[str, str]:
    """Returns the functions of a library that run such an op, themselves or in what they call, with the op's type."""
    bodies = functions(library)
    found = {}
    for name, body in bodies.items():
        op = next((node.op for node in body.node_def if is_collective(node.op)), None)
        if op is not None:
            found[name] = op
    calls = {
        name: {inner for node in body.node_def for inner in function_names(node.attr)} if found else set()
        for name, body in bodies.items()
    }
    grows = bool(found)
    while grows:
        more = {
            name: found[next(iter(inner & found.keys()))]
            for name, inner in calls.items()
            if name not in found and inner & found.keys()
        }
        found |= more
        grows = bool(more)
    return found


def _place(graph: OpGraph, node: Node, op: str, step: str) -> str:
    call = graph.calls[node.call]
    where = f"in layer {call.path!r} ({call.class_name})" if call.path else "outside its models"
    within = "" if op == node.op else f", within the function that {node.name!r} runs"
    return f"Step {step!r} has an op {op} {where}{within}"


def _way_out(class_name: str) -> str:
    if class_name == "SyncBatchNormalization":
        return (
            "Take BatchNormalization in its place, whose statistics are those of each microbatch on each replica, or a "
            "normalization that does not mix samples, such as LayerNormalization or GroupNormalization; with "
            "partitions = 1 it works as it is."
        )
    return (
        "Leave it out: gradients are averaged over the replicas without it, and what the step returns can be reduced "
        "after the step. With partitions = 1 it works as it is."
    )


def words_on_synchronized(graph: OpGraph, models: Iterable[Any], microbatches: int, replicas: int) -> str | None:
    """Returns a message about layers that should share the statistics of their batch with other processes.

    Args:
        graph: a traced step.
        models: Keras models that it calls.
        microbatches: number of microbatches that a batch is cut into.
        replicas: number of processes that have parts of a batch.

    Returns:
        The message; None where there is no such layer, or its statistics are those of the whole batch.
    """
    # Going through all parts of the models takes longer than seeing that none has such statistics.
    if microbatches == replicas == 1 or not any("moving_mean" in variable.name for variable in graph.variables):
        return None
    layers = {
        id(layer): layer.name
        for model in models
        for layer in model.submodules
        if getattr(layer, "synchronized", False) is True and hasattr(layer, "moving_mean")
    }
    if not layers:
        return None
    first, *others = layers.values()
    more = f" (and {len(others)} more)" if others else ""
    return (
        f"Layer {first!r}{more} asks for synchronized statistics, which Keras makes with tf.distribute alone. Here "
        f"they are those of each microbatch on each replica, as of any BatchNormalization. One microbatch, and "
        f"larger batches on each replica, come closer; GroupNormalization and LayerNormalization do not need a batch; "
        f"with partitions = 1, hvd.SyncBatchNormalization takes the statistics over all replicas."
    )
