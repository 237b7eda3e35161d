"""Finds ops in a traced step that ask something of other processes by themselves, such as Horovod's.

    in a model of several partitions   the op becomes one of its layer's stage, and only ranks of that stage run it:
                                       those of others never come to it                                 ─▶ an error
    replicas of one partition          every process runs it, once for each microbatch, as without smp_tf  ─▶ nothing
      its gradient is another on       no two processes trace one step                                  ─▶ an error
      every process
    sums over replicas of a microbatch, within segments of the step                                     ─▶ nothing
      in a choice, a loop or a         such a function runs as one op, and is not cut                   ─▶ an error
      function of the step

The functions of the module `horovod.tensorflow` are refused by name (horovod_scope.py). Here the graph is checked, with
the functions and loops that its ops run. So it does not matter how an op came there.
"""

from __future__ import annotations

from collections.abc import Callable

from smp_tf.errors import StepError
from smp_tf.partition.graph.node_def import attributes, function_names, functions
from smp_tf.partition.graph.op_graph import Node, OpGraph
from smp_tf.partition.graph.op_kinds import SUM_OVER_REPLICAS

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
    containing = _functions_with(is_collective, graph.library)
    if not containing and not any(map(is_collective, {node.op for node in graph.nodes})):
        return
    differentiated = {node.forward_of for node in graph.nodes if node.forward_of is not None}
    for number, node in enumerate(graph.nodes):
        op = _collective_of(node, containing)
        if op is None:
            continue
        if partitions > 1:
            raise StepError(
                f"{_place(graph, node, op, step)}. In it a process waits for others, and in a model of {partitions} "
                f"partitions only the ranks of this layer's stage run it: the others never come to it. Leave it out: "
                f"gradients are averaged over the replicas without it, and what the step returns can be reduced after "
                f"the step. With partitions = 1 it works as it is."
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


def refuse_sums_in_functions(graph: OpGraph, step: str) -> None:
    """Raises an error where a layer takes moments over the replicas in a function that the step runs as one op.

    Args:
        graph: the traced step.
        step: name of the step.

    Raises:
        StepError: there is such a layer.
    """
    containing = _functions_with(lambda op: op == SUM_OVER_REPLICAS, graph.library)
    for node in graph.nodes if containing else ():
        names = function_names(attributes(node))
        if any(name in containing for name in names):
            call = graph.calls[node.call]
            where = f"layer {call.path!r} ({call.class_name})" if call.path else "what is outside its models"
            raise StepError(
                f"In step {step!r}, {where} takes moments over the samples of all replicas within the function that "
                f"{node.name!r} ({node.op}) runs: a tf.cond, a loop or a compiled function. Such a function runs as "
                f"one op, in which replicas cannot wait for each other. Call the layer outside of it, or leave out "
                f"synchronized."
            )


def _functions_with(is_wanted: Callable[[str], bool], library: bytes) -> dict[str, str]:
    """Returns the functions of a library that run an op of a wanted type, themselves or in what they call, with it."""
    bodies = functions(library)
    found = {}
    for name, body in bodies.items():
        op = next((node.op for node in body.node_def if is_wanted(node.op)), None)
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
