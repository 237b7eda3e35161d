"""`smp.rank()` and similar calls: this rank's numbers, and the ranks of its groups."""

from __future__ import annotations

from smp_tf.job.runtime import current
from smp_tf.partition.mesh import CommGroup


def rank() -> int:
    """Returns this process's number in the world.

    Returns:
        From 0; an int.

    Raises:
        NotInitializedError: `smp.init` was not called.

    Example:
        >>> if smp.rank() == 0:
        ...     print("said once")
        said once
    """
    return current().topology.rank


def size() -> int:
    """Returns the number of processes.

    Returns:
        An int.

    Raises:
        NotInitializedError: `smp.init` was not called.

    Example:
        >>> smp.size()
        1
    """
    return current().topology.size


def local_rank() -> int:
    """Returns this process's number among those of its host.

    Returns:
        From 0; an int.

    Raises:
        NotInitializedError: `smp.init` was not called.

    Example:
        >>> smp.local_rank()
        0
    """
    return current().topology.local_rank


def local_size() -> int:
    """Returns the number of processes on this host.

    Returns:
        An int.

    Raises:
        NotInitializedError: `smp.init` was not called.

    Example:
        >>> smp.local_size()
        1
    """
    return current().topology.local_size


def mp_rank() -> int:
    """Returns the number of the partition that this rank runs.

    Returns:
        From 0; an int.

    Raises:
        NotInitializedError: `smp.init` was not called.

    Example:
        >>> smp.mp_rank()
        0
    """
    return current().topology.group_rank(CommGroup.MP_GROUP)


def mp_size() -> int:
    """Returns the number of ranks that one replica is split over.

    Returns:
        An int.

    Raises:
        NotInitializedError: `smp.init` was not called.

    Example:
        >>> smp.mp_size()
        1
    """
    return current().topology.group_size(CommGroup.MP_GROUP)


def dp_rank() -> int:
    """Returns the number of the replica that this rank belongs to.

    Returns:
        From 0; an int.

    Raises:
        NotInitializedError: `smp.init` was not called.

    Example:
        >>> x[smp.dp_rank() :: smp.dp_size()]  # this replica's samples
        array(...)
    """
    return current().topology.group_rank(CommGroup.DP_GROUP)


def dp_size() -> int:
    """Returns the number of replicas.

    Returns:
        An int.

    Raises:
        NotInitializedError: `smp.init` was not called.

    Example:
        >>> per_replica = 128 // smp.dp_size()
    """
    return current().topology.group_size(CommGroup.DP_GROUP)


def pp_rank() -> int:
    """Returns this rank's number among the stages of its replica.

    Returns:
        From 0; an int.

    Raises:
        NotInitializedError: `smp.init` was not called.

    Example:
        >>> smp.pp_rank()
        0
    """
    return current().topology.group_rank(CommGroup.PP_GROUP)


def pp_size() -> int:
    """Returns the number of stages.

    Returns:
        An int.

    Raises:
        NotInitializedError: `smp.init` was not called.

    Example:
        >>> smp.pp_size()
        1
    """
    return current().topology.group_size(CommGroup.PP_GROUP)


def tp_rank() -> int:
    """Returns this rank's number among those that share one layer; always 0.

    Returns:
        An int.

    Raises:
        NotInitializedError: `smp.init` was not called.

    Example:
        >>> smp.tp_rank()
        0
    """
    return current().topology.group_rank(CommGroup.TP_GROUP)


def tp_size() -> int:
    """Returns the number of ranks that share one layer; always 1.

    Returns:
        An int.

    Raises:
        NotInitializedError: `smp.init` was not called.

    Example:
        >>> smp.tp_size()
        1
    """
    return current().topology.group_size(CommGroup.TP_GROUP)


def rdp_rank() -> int:
    """Returns this rank's number among those that hold the same weights.

    Returns:
        From 0; an int.

    Raises:
        NotInitializedError: `smp.init` was not called.

    Example:
        >>> smp.rdp_rank()
        0
    """
    return current().topology.group_rank(CommGroup.RDP_GROUP)


def rdp_size() -> int:
    """Returns the number of ranks that hold the same weights.

    Returns:
        An int.

    Raises:
        NotInitializedError: `smp.init` was not called.

    Example:
        >>> smp.rdp_size()
        1
    """
    return current().topology.group_size(CommGroup.RDP_GROUP)


def get_mp_group() -> list[int]:
    """Returns the world ranks of this rank's replica, by mp_rank.

    Returns:
        World ranks, in order.

    Raises:
        NotInitializedError: `smp.init` was not called.

    Example:
        >>> smp.get_mp_group()
        [0]
    """
    return list(current().topology.members(CommGroup.MP_GROUP))


def get_dp_group() -> list[int]:
    """Returns the world ranks that run this rank's partition, by dp_rank.

    Returns:
        World ranks, in order.

    Raises:
        NotInitializedError: `smp.init` was not called.

    Example:
        >>> smp.get_dp_group()
        [0]
    """
    return list(current().topology.members(CommGroup.DP_GROUP))
