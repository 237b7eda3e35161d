"""Makes replicas begin to train with equal weights. Where they differ, all take those of one, by default replica 0's.

    all ranks          one hash over what each stores, told to all              ─▶ nothing more where stages are equal
    an unequal stage   a hash of every variable, told to the other replicas     ─▶ one replica sends those that differ

Equal seeds, and checkpoints, make them equal already. This is for weights that a script has loaded on one replica only.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from smp_tf.announce import tell
from smp_tf.errors import StepError
from smp_tf.job import exchange, runtime
from smp_tf.job.content_hash import content_hash
from smp_tf.job.topology import Topology
from smp_tf.job_state import JobState
from smp_tf.partition.mesh import CommGroup
from smp_tf.replicas.sums import broadcast_over_replicas
from smp_tf.variables.decision import Decision

_NAME = "the weights that replicas begin with"


#: The replica whose values all replicas take.
_root: JobState[int] = JobState(lambda: 0)


def take_from(replica: int) -> None:
    """Makes this job's training begin with the weights of one replica. All ranks must name the same one.

    Args:
        replica: number of the replica.
    """
    _root.put(replica)


def take_those_of_one(decided: Iterable[Decision]) -> None:
    """Gives all replicas one replica's values of variables. Every rank calls it before the first step runs.

    Args:
        decided: where variables of models are now, the same in the same order on all ranks.
    """
    topology = runtime.current().topology
    wanted = {id(decision.variable.handle): decision for decision in decided}
    if topology.replicas == 1 or not wanted:
        return
    stored = [decision.variable for decision in wanted.values() if decision.layout.is_here(topology.place)]
    with tf.init_scope():
        # One after the other, since from a GPU all of them would be in the host's memory at once.
        hashes = [int(content_hash(variable.read_value())[0]) for variable in stored]
        of_all = exchange.allgather_json(hashlib.blake2b(repr(hashes).encode()).hexdigest(), name=_NAME)
        unequal = _unequal_stages(of_all, topology)
        if topology.stage in unequal:
            said = exchange.allgather_json(hashes, CommGroup.RDP_GROUP, name=_NAME)
            _take(stored, said, topology, speaks=topology.stage == unequal[0])


def _unequal_stages(said: Sequence[str], topology: Topology) -> list[int]:
    """Returns the stages whose replicas differ, in order."""
    of_stage: dict[int, set[str]] = {}
    for rank, words in enumerate(said):
        of_stage.setdefault(topology.mesh.coordinates(rank)["P"], set()).add(words)
    return sorted(stage for stage, words in of_stage.items() if len(words) > 1)


def _take(stored: Sequence[Any], said: Sequence[Sequence[int]], topology: Topology, *, speaks: bool) -> None:
    """Takes the values of one replica where others differ.

    Args:
        stored: the variables that this rank stores.
        said: hashes of these variables on every replica.
        topology: where the ranks are.
        speaks: whether the replica prints a message for this stage.

    Raises:
        StepError: replicas do not have the same variables.
    """
    root = _root()
    counts = [len(own) for own in said]
    if len(set(counts)) > 1:
        raise StepError(
            f"Replicas begin a step with different numbers of new weights: {', '.join(map(str, counts))}, by replica. "
            f"A layer of a model that was let go is new where Python has freed that model, and not yet elsewhere: call "
            f"gc.collect() on all ranks before a layer of it is used in another model."
        )
    others = [[replica for replica, own in enumerate(said) if own[n] != said[root][n]] for n in range(len(stored))]
    unlike = [number for number, replicas in enumerate(others) if replicas]
    sender = topology.members(CommGroup.RDP_GROUP)[root]
    broadcast_over_replicas([stored[number] for number in unlike], sender, "smp_first_values")
    if speaks and topology.replica == root:
        first = unlike[0]
        whose = ", ".join(map(str, others[first]))
        tell(
            f"smp_tf: replicas begin with equal weights. {stored[first].name!r}, for one, had other values on replica "
            f"{whose} than on replica {root}: all replicas have taken those of replica {root}. Load weights on all "
            f"replicas alike, or on replica {root}."
        )
