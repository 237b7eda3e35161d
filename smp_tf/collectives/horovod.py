"""Implements the collectives with Horovod."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from smp_tf.collectives import wire_types
from smp_tf.collectives.horovod_waits import under_a_name_of_its_own
from smp_tf.ops.at_run_time import at_run_time
from smp_tf.ops.collective import come_through, come_to, within
from smp_tf.ops.graph_op import run_independently

#: Bytes of Horovod's buffer, where its environment variable does not say them.
_FUSION_BUFFER = 128 << 20
#: Milliseconds between two looks of Horovod's thread for work, where its environment variable does not say them.
_CYCLE = 1.0


def averaging_bytes(replicas: int) -> int:
    """Returns the bytes of Horovod's buffer on every rank, through which it sums tensors that travel together.

    Horovod takes the whole buffer from TensorFlow for the first two such tensors.

    Args:
        replicas: The number of replicas.
    """
    if replicas == 1:
        return 0
    given = os.environ.get("HOROVOD_FUSION_THRESHOLD", "")
    return int(given) if given.isdecimal() else _FUSION_BUFFER


def sum_wait() -> float:
    """Returns the seconds until Horovod begins a sum that all replicas have come to: on average half of a cycle."""
    try:
        cycle = float(os.environ.get("HOROVOD_CYCLE_TIME", ""))
    except ValueError:
        cycle = _CYCLE
    return cycle / 2 / 1e3


class Horovod:
    """Implements `interface.Collectives` with Horovod's process sets as groups.

    Replicas may trace a step within different name scopes of the script, so scopes are ignored.
    """

    def all_reduce(
        self, tensors: Sequence[tf.Tensor], group: Any, name: str, *, handles: Sequence[Any] = ()
    ) -> list[tf.Tensor]:
        """Returns the sums. Tensors travel in types that Horovod adds up."""
        import horovod.tensorflow as hvd

        sent = [wire_types.summed(t, f"tensor {number} of {name!r}") for number, t in enumerate(tensors)]
        sums: dict[int, tf.Tensor] = {}
        # Horovod's op takes tensors of one dtype.
        for dtype in sorted({t.dtype for t in sent}, key=lambda dtype: dtype.name):
            of_type = [index for index, t in enumerate(sent) if t.dtype == dtype]
            reduced = _collective(
                hvd.grouped_allreduce,
                [sent[index] for index in of_type],
                handles=handles,
                op=hvd.Sum,
                name=f"{name}_{dtype.name}",
                process_set=group,
                ignore_name_scope=True,
            )
            sums.update(zip(of_type, reduced, strict=True))
        return [wire_types.from_summed(sums[index], t.dtype) for index, t in enumerate(tensors)]

    def all_gather(self, tensor: tf.Tensor, group: Any, name: str, *, handles: Sequence[Any] = ()) -> tf.Tensor:
        """Returns the tensors of all ranks. They travel in types that Horovod moves."""
        import horovod.tensorflow as hvd

        sent = wire_types.moved(tensor, f"what {name!r} gathers")
        options = {"handles": handles, "process_set": group, "ignore_name_scope": True}
        return wire_types.from_moved(_collective(hvd.allgather, sent, name=name, **options), tensor.dtype)

    def all_to_all(
        self,
        tensor: tf.Tensor,
        group: Any,
        name: str,
        *,
        splits: tf.Tensor | None = None,
        handles: Sequence[Any] = (),
    ) -> tf.Tensor:
        """Returns the entries for this rank. They travel in types that Horovod moves."""
        import horovod.tensorflow as hvd

        sent = wire_types.moved(tensor, f"what {name!r} exchanges")
        options: dict[str, Any] = {"handles": handles, "process_set": group, "ignore_name_scope": True}
        if splits is None:
            received = _collective(hvd.alltoall, sent, name=name, **options)
        else:
            received, _ = _collective(hvd.alltoall, sent, name=name, splits=splits, **options)
        return wire_types.from_moved(received, tensor.dtype)

    def broadcast(self, tensor: tf.Tensor, root: int, group: Any, name: str) -> tf.Tensor:
        """Returns the tensor of one rank. It travels in a type that Horovod moves."""
        import horovod.tensorflow as hvd

        sent = wire_types.moved(tensor, name)
        received = _collective(hvd.broadcast, sent, root_rank=root, name=name, process_set=group)
        return wire_types.from_moved(received, tensor.dtype)


def _collective(
    function: Callable[..., Any], given: Any, *, name: str, handles: Sequence[Any] = (), **options: Any
) -> Any:
    """Calls a function of Horovod so that its op runs once in each run of the graph, since other ranks wait for it.

    TensorFlow takes Horovod's ops for pure functions. It leaves out an op whose output nobody reads, and computes an op
    on constants while it prepares the graph. The begin and the end of the op on this rank are noted, so that a rank
    that keeps others waiting is found (watch/replicas.py).

    Args:
        function: A function such as `hvd.allgather`.
        given: A tensor or a list of them.
        name: The name of the call, as in `Collectives`.
        handles: Variables whose uses the call is ordered with, as in `Collectives`.
        options: Further arguments.

    Returns:
        What the function gives.
    """
    # What the script calls by this name means its replicas (horovod_scope.py). Ours says which group it means.
    function = getattr(function, "smp_original", function)
    if tf.executing_eagerly():
        with within(name), under_a_name_of_its_own():
            return function(given, name=name, **options)
    ready = tf.nest.map_structure(lambda tensor: at_run_time(tensor, handles), given)
    come = come_to(name, tf.nest.flatten(ready))
    with under_a_name_of_its_own():
        result = function(ready, name=name, **options)
    come_through(name, come, tf.nest.flatten(result))
    if handles:
        return tf.nest.map_structure(lambda tensor: at_run_time(tensor, handles), result)
    run_independently(tf.nest.flatten(result)[0].op)
    return result
