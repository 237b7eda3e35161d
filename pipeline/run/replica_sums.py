"""Sums over the replicas within a segment, such as moments of batch normalisation over the samples of all replicas.

    replica 0   F1:  own ──┬─▶ SmpSendInCall to 1 ─ ─ ─ ─┐          ┌─▶ own + other ──▶
                           └┄▶ SmpRecvInCall from 1 ◀─ ─ ┼ ─ ─ ─ ─ ─┤
    replica 1   F1:  own ──┬─▶ SmpSendInCall to 0 ─ ─ ─ ─┼─ ─ ─ ─ ─ ┘
                           └┄▶ SmpRecvInCall from 0 ◀─ ─ ┘ ──▶ other + own ──▶

The ranks that hold the same stage send each other their parts, by the transport. A message is named by the step
function and the number of its call (which all replicas know it by, whatever programs they run for it), by the number of
the sum in the step, and by the microbatch. Every replica adds the parts up in rank order, so that all have the same
bits. A receive begins when the own part is there. So a rank that waits for another one has sent what that waits for.

A replica with fewer microbatches than others gives nothing for those that it does not have:

    replica 0   F0  F1  F2  F3        samples of four microbatches
    replica 1   F0  F1  0   0         of two
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from smp_tf.ops import send_recv
from smp_tf.ops.graph_op import run_independently
from smp_tf.partition.graph.node_def import attributes
from smp_tf.partition.graph.op_graph import OpGraph, TensorType
from smp_tf.partition.graph.op_kinds import SUM_OVER_REPLICAS
from smp_tf.partition.split.split import Segment

#: The names of what is passed to a function that has sums over the replicas: the number by which all replicas know the
#: call of the step, the number of the microbatch, and its weight.
STEP, MICROBATCH, WEIGHT = PASSED = ("smp_sum_step:0", "smp_sum_microbatch:0", "smp_sum_weight:0")
_SENDS, _RECEIVES = "SmpSendInCall", "SmpRecvInCall"


@dataclass(frozen=True)
class ReplicaEnds:
    """Whom a rank's sums over the replicas are made with.

    Args:
        program: first part of the names of their messages, the same on all replicas and for no other step function.
        ranks: world ranks that hold the stage, by replica.
        own: the replica of this rank.
        most: the largest number of microbatches that a replica runs.
    """

    program: int
    ranks: tuple[int, ...]
    own: int
    most: int

    @property
    def others(self) -> tuple[int, ...]:
        """Returns the world ranks of the other replicas."""
        return tuple(rank for replica, rank in enumerate(self.ranks) if replica != self.own)


@dataclass(frozen=True)
class ReplicaSum:
    """A sum over the replicas.

    Args:
        number: among the sums of its step.
        node: the node that stands for it.
        name: of that node.
        kind: its type.
    """

    number: int
    node: int
    name: str
    kind: TensorType


def replica_sums(graph: OpGraph) -> tuple[ReplicaSum, ...]:
    """Returns the sums over the replicas of a step, in an order that is the same on all of them.

    Args:
        graph: the step.
    """
    found = (n for n, node in enumerate(graph.nodes) if node.op == SUM_OVER_REPLICAS)
    return tuple(
        ReplicaSum(number, n, graph.nodes[n].name, graph.nodes[n].outputs[0]) for number, n in enumerate(found)
    )


def sums_in(graph: OpGraph, segment: Segment) -> tuple[ReplicaSum, ...]:
    """Returns the sums over the replicas that a segment makes.

    Args:
        graph: the step.
        segment: the segment.
    """
    if not any(graph.nodes[n].op == SUM_OVER_REPLICAS for n in segment.nodes):
        return ()
    own = set(segment.nodes)
    return tuple(each for each in replica_sums(graph) if each.node in own)


def passed_specs() -> list[tf.TensorSpec]:
    """Returns the types of what is passed to a function that has sums over the replicas, in the order of `PASSED`."""
    dtypes = (tf.int64, tf.int64, tf.float64)
    return [tf.TensorSpec([], dtype, name.removesuffix(":0")) for name, dtype in zip(PASSED, dtypes, strict=True)]


def label_of(graph: OpGraph, each: ReplicaSum) -> str:
    """Returns words for a sum.

    Args:
        graph: the step.
        each: the sum.
    """
    return attributes(graph.nodes[each.node])["label"].s.decode()


def written_out(
    definition: tf.compat.v1.GraphDef, sums: Sequence[ReplicaSum], ends: ReplicaEnds | None
) -> tf.compat.v1.GraphDef:
    """Returns a segment's definition with sends, receives and a sum in place of each node that stands for a sum.

    Args:
        definition: what the segment runs.
        sums: the sums in it.
        ends: whom they are made with; None where the segment is measured alone. Then each is that of one replica.
    """
    by_name = {each.name: each for each in sums}
    written = tf.compat.v1.GraphDef(versions=definition.versions, library=definition.library)
    for node in definition.node:
        each = by_name.get(node.name)
        written.node.extend([node] if each is None else _Written(node, each, ends).nodes())
    return written


def independent(graph: tf.Graph, definition: tf.compat.v1.GraphDef) -> None:
    """Exempts the sends and receives of a definition from the order in which ops of a function were made.

    Args:
        graph: the graph of the function, into which the definition was imported.
        definition: the definition.
    """
    for node in definition.node:
        if node.op in (_SENDS, _RECEIVES):
            run_independently(graph.get_operation_by_name(node.name))


class _Written:
    """The nodes that make a sum.

    Args:
        node: the node that stands for it.
        each: the sum.
        ends: whom it is made with; None for nobody.
    """

    def __init__(self, node: tf.compat.v1.NodeDef, each: ReplicaSum, ends: ReplicaEnds | None) -> None:
        self._node, self._each, self._ends = node, each, ends
        self._weighed = bool(node.attr["weighed"].b) and ends is not None

    def nodes(self) -> Iterator[tf.compat.v1.NodeDef]:
        """Yields the nodes. The last one has the name of the node that stands for the sum."""
        name, data, waits = self._node.name, self._node.input[0], list(self._node.input[1:])
        if self._ends is None:
            yield self._made(name, "Identity", [data, *waits])
            return
        if self._weighed:
            yield self._cast_weight()
            yield self._made(f"{name}/smp_own", "Mul", [data, f"{name}/smp_weight:0", *waits])
        else:
            yield self._made(f"{name}/smp_own", "Identity", [data, *waits])
        parts = []
        for replica, rank in enumerate(self._ends.ranks):
            if replica == self._ends.own:
                parts.append(f"{name}/smp_own:0")
                continue
            yield self._message(f"{name}/smp_to_{replica}", _SENDS, rank, [f"{name}/smp_own:0", STEP, MICROBATCH])
            yield self._message(f"{name}/smp_from_{replica}", _RECEIVES, rank, [STEP, MICROBATCH, f"^{name}/smp_own"])
            parts.append(f"{name}/smp_from_{replica}:0")
        # AddN begins with an input whose memory it may take, which is another one on every rank.
        joined = self._made(f"{name}/smp_parts", "Pack", parts)
        joined.attr["N"].i = len(parts)
        yield joined
        yield self._axis()
        yield self._added(f"{name}/smp_added" if self._weighed else name)
        if self._weighed:
            yield self._made(name, "RealDiv", [f"{name}/smp_added:0", f"{name}/smp_weight:0"])

    def _made(self, name: str, op: str, inputs: Sequence[str]) -> tf.compat.v1.NodeDef:
        made = tf.compat.v1.NodeDef(name=name, op=op, input=inputs, device=self._node.device)
        made.attr["T"].type = self._node.attr["T"].type
        return made

    def _cast_weight(self) -> tf.compat.v1.NodeDef:
        made = tf.compat.v1.NodeDef(name=f"{self._node.name}/smp_weight", op="Cast", input=[WEIGHT])
        made.attr["SrcT"].type = tf.float64.as_datatype_enum
        made.attr["DstT"].type = self._node.attr["T"].type
        made.attr["Truncate"].b = False
        return made

    def _axis(self) -> tf.compat.v1.NodeDef:
        made = tf.compat.v1.NodeDef(name=f"{self._node.name}/smp_axis", op="Const")
        made.attr["dtype"].type = tf.int32.as_datatype_enum
        made.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(0, tf.int32))
        return made

    def _added(self, name: str) -> tf.compat.v1.NodeDef:
        made = self._made(name, "Sum", [f"{self._node.name}/smp_parts:0", f"{self._node.name}/smp_axis:0"])
        made.attr["Tidx"].type = tf.int32.as_datatype_enum
        return made

    def _message(self, name: str, op: str, rank: int, inputs: Sequence[str]) -> tf.compat.v1.NodeDef:
        assert self._ends is not None
        made = self._made(name, op, inputs)
        made.attr["program"].i = self._ends.program
        made.attr["edge"].i = self._each.number
        made.attr["label"].s = self._node.attr["label"].s
        made.attr["dest" if op == _SENDS else "src"].i = rank
        if op == _RECEIVES:
            made.attr["shape"].shape.CopyFrom(tf.TensorShape(self._each.kind.shape).as_proto())
        return made


def give_nothing(
    graph: OpGraph, sums: Sequence[ReplicaSum], ends: ReplicaEnds, microbatches: range, step: tf.Tensor
) -> list[tf.Operation]:
    """Gives zeros to the sums of other replicas for microbatches that this replica does not have, and takes theirs.

    Args:
        graph: the step.
        sums: the sums of this rank's stage.
        ends: whom they are made with.
        microbatches: numbers of these microbatches.
        step: the number by which all replicas know the call of the step.

    Returns:
        The ops, which end before the step does.
    """
    ops: list[Any] = []
    for each in sums:
        dtype = tf.dtypes.as_dtype(each.kind.dtype)
        zeros = tf.zeros(each.kind.shape, dtype)
        for microbatch in microbatches:
            names: dict[str, Any] = {"program": ends.program, "edge": each.number, "microbatch": microbatch}
            names["label"] = label_of(graph, each)
            for rank in ends.others:
                ops.append(send_recv.send(zeros, step, dest=rank, **names))
                ops.append(send_recv.recv(step, dtype, each.kind.shape, src=rank, **names).op)
    return ops
