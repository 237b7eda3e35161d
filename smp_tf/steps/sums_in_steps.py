"""What replicas agree on for sums over them within a step, such as moments of batch normalisation.

Replicas may run programs of other numbers for one step function, since their batches differ in size. So messages bear
a number that is made of what the step function is known by, and the count of its calls. Both are equal on all replicas.
"""

from __future__ import annotations

import hashlib

import numpy as np
import tensorflow as tf

from smp_tf.job import runtime
from smp_tf.job_state import JobState
from smp_tf.ops.graph_op import run_independently
from smp_tf.ops.transport import REPLICA_PROGRAMS
from smp_tf.partition.graph.op_graph import OpGraph
from smp_tf.partition.mesh import CommGroup
from smp_tf.pipeline.run.replica_sums import ReplicaEnds, replica_sums
from smp_tf.variables.store import make_script_variable

#: Counts of calls, by what a step function is known by.
_calls: JobState[dict[str, tf.Variable]] = JobState(dict)


def ends_of(graph: OpGraph, known_as: str) -> ReplicaEnds | None:
    """Returns whom this rank's sums over the replicas are made with; None where the step has none.

    Args:
        graph: the step.
        known_as: what its function is known by on all ranks.
    """
    if not replica_sums(graph):
        return None
    running = runtime.current()
    hashed = int.from_bytes(hashlib.sha256(known_as.encode()).digest()[:8], "big")
    return ReplicaEnds(
        REPLICA_PROGRAMS[hashed % len(REPLICA_PROGRAMS)],
        running.topology.members(CommGroup.RDP_GROUP),
        running.topology.replica,
        running.config.microbatches,
    )


def call_number(known_as: str, step: tf.Tensor) -> tf.Tensor:
    """Returns how often a step function was called before, in the graph that is being traced, and counts this call.

    Args:
        known_as: what the function is known by on all ranks.
        step: the number of the step, which has begun.
    """
    counts = _calls()
    if known_as not in counts:
        name = f"{known_as}_calls".replace("/", "_")
        counts[known_as] = make_script_variable(initial_value=np.int64(0), trainable=False, name=name)
    before = counts[known_as].assign_add(1, read_value=True) - 1
    with tf.control_dependencies([step.op]):
        before = tf.identity(before)
    run_independently(before.op)
    return before
