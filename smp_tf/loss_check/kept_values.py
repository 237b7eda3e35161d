"""Brings the tensors of a step that ranks have kept to one of the ranks.

replica 0   stage 0 ── its tensors ──▶ stage 1, the collector
replica 1   stage 0 ── its tensors ──────────────▲
            stage 1 ── its tensors ──────────────┘
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from smp_tf.job import runtime
from smp_tf.job.channel import tag_of
from smp_tf.partition.mesh import CommGroup
from smp_tf.variables.fetch import transport

_TAG = tag_of("tensors of a step that were kept")


@dataclass(frozen=True)
class ReplicaValues:
    """What the ranks of one replica have kept of a step.

    Args:
        kept: for every tensor, its value in each microbatch.
        changes: by how much variables of the script have changed.
        arguments: arguments of the step, by number.
    """

    kept: list[list[np.ndarray]]
    changes: list[np.ndarray]
    arguments: dict[int, np.ndarray]


def bring_together(
    own: Mapping[int, Sequence[np.ndarray]],
    changes: Sequence[np.ndarray],
    arguments: Mapping[int, np.ndarray],
    *,
    stages: Sequence[int],
    collector: int,
    microbatches: int,
    of_all_replicas: bool,
) -> list[ReplicaValues] | None:
    """Brings everything to one rank, of the first replica or of this one. All of these ranks call it.

    Args:
        own: the tensors that this rank has: by number, the values in each microbatch.
        changes: changes of the script's variables, which all stages of a replica share.
        arguments: arguments of this replica's step.
        stages: the stage that a tensor is taken from, by its number.
        collector: the stage whose rank gets everything.
        microbatches: number of microbatches.
        of_all_replicas: whether to bring together the values of all replicas.

    Returns:
        What each replica has kept; None on the ranks that do not get it.
    """
    topology = runtime.current().topology
    firsts = topology.members(CommGroup.RDP_GROUP) if of_all_replicas else (topology.rank,)
    replicas = [topology.mesh.members(CommGroup.PP_GROUP, rank) for rank in firsts]
    to = replicas[0][collector]
    own_stage = topology.stage
    mine = [number for number, stage in enumerate(stages) if stage == own_stage]
    sent = [value for number in mine for value in own[number]]
    if own_stage == collector:
        sent += [*changes, *arguments.values()]
    if topology.rank != to:
        _send(to, sent)
        return None
    found = []
    for ranks in replicas:
        kept: dict[int, list[np.ndarray]] = {}
        rest: list[np.ndarray] = []
        for stage, rank in enumerate(ranks):
            there = [number for number, of in enumerate(stages) if of == stage]
            values = sent if rank == to else _receive(rank)
            for place, number in enumerate(there):
                kept[number] = values[place * microbatches : (place + 1) * microbatches]
            if stage == collector:
                rest = values[len(there) * microbatches :]
        given = dict(zip(arguments, rest[len(changes) :], strict=True))
        found.append(ReplicaValues([kept[number] for number in range(len(stages))], rest[: len(changes)], given))
    return found


def _send(to: int, values: Sequence[np.ndarray]) -> None:
    described = [[value.dtype.name, list(value.shape)] for value in values]
    transport().send_bytes(to, _TAG, json.dumps(described).encode())
    for value in values:
        transport().send_bytes(to, _TAG, np.ascontiguousarray(value).reshape(-1).view(np.uint8))


def _receive(source: int) -> list[np.ndarray]:
    described = json.loads(bytes(transport().recv_bytes(source, _TAG)))
    found = []
    for name, shape in described:
        data = transport().recv_bytes(source, _TAG)
        found.append(np.frombuffer(data, np.dtype(name)).reshape(shape))
    return found
