"""Gives Horovod's functions their meaning while smp_tf is initialised.

    script              hvd.rank(), hvd.size()     hvd.allreduce(x), hvd.broadcast_variables(...) and their kin
    ------------------  -------------------------  --------------------------------------------------------------
    `import smp_tf`     the world                  the world; an error for weights and gradients of a split model,
                                                   which no two ranks of a replica have in common
    the drop-in alias   this rank's group of       that group; None (the gradient of another rank's weight) stays
                        replicas                   None, and weights of other ranks are left out

The functions of the module `horovod.tensorflow` are replaced by others that look, at every call, which of the two is in
force. Without `smp.init` they are Horovod's. A call that names a process set uses that one. smp_tf itself always names
one.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from smp_tf.collectives import horovod_waits
from smp_tf.errors import StepError
from smp_tf.job import runtime
from smp_tf.job_state import JobState

#: Whether the functions mean this rank's group of replicas.
_means_replicas: JobState[bool] = JobState(lambda: False)


def watch() -> None:
    """Replaces Horovod's functions now or, if the script has not imported it yet, when it does."""
    import wrapt

    for module, replace in (
        ("horovod.tensorflow", replace_functions),
        ("horovod.tensorflow.keras", _replace_keras_functions),
        ("horovod.tensorflow.mpi_ops", lambda ops: horovod_waits.note_all(ops.MPI_LIB)),
    ):
        wrapt.register_post_import_hook(replace, module)


def mean_replicas() -> None:
    """Makes Horovod's functions mean this rank's group of replicas, until `smp.shutdown`."""
    _means_replicas.put(True)


def replace_functions(hvd: ModuleType) -> None:
    """Replaces the functions of the module `horovod.tensorflow`. A second call changes nothing."""
    for name, kind in _KINDS.items():
        original = getattr(hvd, name, None)
        if original is not None and not hasattr(original, "smp_original"):
            setattr(hvd, name, _replacement(name, original, kind(name, original)))


def _replace_keras_functions(keras: ModuleType) -> None:
    """Replaces functions of `horovod.tensorflow.keras`, whose collectives call those of `horovod.tensorflow`."""
    import horovod.tensorflow as hvd

    for name in ("init", "shutdown", "rank", "size"):
        setattr(keras, name, getattr(hvd, name))
    name = "DistributedOptimizer"
    setattr(keras, name, _replacement(name, getattr(keras, name), _wrapped_optimizer(name, getattr(keras, name))))


def _replacement(name: str, original: Callable[..., Any], scoped: Callable[..., Any]) -> Callable[..., Any]:
    import tensorflow as tf

    from smp_tf.start import import_watch

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        if runtime.current_or_none() is None:
            if name == "init":
                # It waits in native code, where no handler of Python's is called.
                import_watch.stop()
            return original(*args, **kwargs)
        return scoped(*args, **kwargs)

    # AutoGraph, which converts a user's tf.function, has nothing to convert in Horovod.
    replaced: Any = tf.autograph.experimental.do_not_convert(call)
    replaced.smp_original = original
    return replaced


# --- one kind of function each ------------------------------------------------------------------------------------


def _said(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns smp_tf's `hvd.rank` and `hvd.size`, which are numbers."""
    attribute = {"rank": "replica", "size": "replicas"}[name]

    def number(*args: Any, **kwargs: Any) -> Any:
        if not _means_replicas():
            return original(*args, **kwargs)
        return getattr(runtime.current().topology, attribute)

    return number


def _started(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """Replaces `hvd.init` and `hvd.shutdown`, since `smp.init` has started Horovod, and other ranks need it."""
    return lambda *args, **kwargs: None


def _collective(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function over a process set. Its first parameter is what to reduce, gather or broadcast."""
    signature = inspect.signature(original)
    first = next(iter(signature.parameters))

    def collective(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        given = bound.arguments[first]
        if isinstance(given, (list, tuple)) or inspect.isgenerator(given):
            given = bound.arguments[first] = list(given)
        own = bound.arguments.get("process_set")
        if own is not None and not _is_world(own):
            return original(*bound.args, **bound.kwargs)
        _refuse_in_a_step(name)
        if own is not None or not _means_replicas():
            _refuse_what_is_split(name, given)
            return original(*bound.args, **bound.kwargs)
        bound.apply_defaults()
        return _over_replicas(name, original, bound, first)

    return collective


def _wrapped_tape(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """Replaces `hvd.DistributedGradientTape` within a step by the tape itself, whose gradients smp_tf averages."""

    def tape(gradtape: Any, *args: Any, **kwargs: Any) -> Any:
        if not _means_replicas() or "process_set" in kwargs:
            _refuse_in_a_step(name)
            return original(gradtape, *args, **kwargs)
        group = runtime.current().process_sets.dp
        if _in_a_step() or group is None:
            return gradtape
        return original(gradtape, *args, process_set=group, **kwargs)

    return tape


def _wrapped_optimizer(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """Replaces `hvd.DistributedOptimizer` by the optimizer itself, which averages what is not averaged yet."""

    def optimizer(wrapped: Any, *args: Any, **kwargs: Any) -> Any:
        if not _means_replicas() or "process_set" in kwargs:
            return original(wrapped, *args, **kwargs)
        import horovod.tensorflow as hvd

        bound = inspect.signature(original).bind(wrapped, *args, **kwargs)
        bound.apply_defaults()
        if bound.arguments["op"] != hvd.Average or bound.arguments["backward_passes_per_step"] != 1:
            raise StepError(
                "hvd.DistributedOptimizer with another op than hvd.Average, or with backward_passes_per_step, does not "
                "fit smp_tf, which averages gradients over the replicas and accumulates them over the microbatches. "
                "Leave these options out, and set microbatches instead."
            )
        from smp_tf.optimizer.distributed_optimizer import DistributedOptimizer

        return DistributedOptimizer(wrapped)

    return optimizer


def _unsupported(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that Horovod has only for all processes."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        if not _means_replicas():
            return original(*args, **kwargs)
        raise StepError(
            f"hvd.{name}() works over all processes only, and with smp_tf hvd means the replicas of this rank's "
            f"partition. Give every replica the same number of batches instead, and leave the call out."
        )

    return refuse


_KINDS: dict[str, Callable[[str, Callable[..., Any]], Callable[..., Any]]] = {
    "rank": _said,
    "size": _said,
    "init": _started,
    "shutdown": _started,
    "join": _unsupported,
    "DistributedGradientTape": _wrapped_tape,
    "DistributedOptimizer": _wrapped_optimizer,
    **dict.fromkeys(
        (
            "allgather", "allgather_object", "allreduce", "alltoall", "broadcast", "broadcast_", "broadcast_object",
            "broadcast_variables", "grouped_allgather", "grouped_allreduce", "grouped_reducescatter", "reducescatter",
        ),
        _collective,
    ),
}  # fmt: skip


# --- collectives --------------------------------------------------------------------------------------------------


def _is_world(process_set: Any) -> bool:
    return process_set.process_set_id == 0


def _in_a_step() -> bool:
    from smp_tf.variables.model_context import step_being_traced

    return step_being_traced() is not None


def _refuse_in_a_step(name: str) -> None:
    """Raises an error where a collective would become an op of one stage and run once per microbatch."""
    if _in_a_step():
        raise StepError(
            f"hvd.{name} was called inside a step, whose ops are spread over the ranks and run once per microbatch. "
            f"Call it after the step, on what the step returns: gradients that come out of accumulate() are averaged "
            f"over the replicas already, and smp.average_gradients(gradients) averages others."
        )


def _refuse_what_is_split(name: str, given: Any) -> None:
    """Raises an error where a collective over all processes is given what only some of them have."""
    from smp_tf.batch.output import StepOutput
    from smp_tf.replicas import gradient_marks
    from smp_tf.variables import store

    for value in given if isinstance(given, list) else [given]:
        is_gradient = gradient_marks.mark_of(value).spread is not None
        if value is None or isinstance(value, StepOutput) or is_gradient:
            raise StepError(
                f"hvd.{name} works over all processes, and was given "
                f"{'None' if value is None else 'a gradient'} of a model that is split over them, where each process "
                f"has other gradients. smp_tf averages gradients over the replicas by itself; "
                f"smp.average_gradients(gradients) does so for gradients of any kind. Leave the call out, or name a "
                f"process set."
            )
        if _is_variable(value) and store.store_of(value) is not None:
            raise StepError(
                f"hvd.{name} works over all processes, and was given variable {value.name!r} of a model that is split "
                f"over them, where each process has other variables. Replicas begin with equal values, and "
                f"smp.average_gradients keeps them so. Leave the call out, or name a process set."
            )


def _is_variable(value: Any) -> bool:
    import tensorflow as tf

    return isinstance(value, tf.Variable)


def _over_replicas(name: str, original: Callable[..., Any], bound: inspect.BoundArguments, first: str) -> Any:
    """Calls a collective over this rank's group of replicas."""
    group = runtime.current().process_sets.dp
    given = bound.arguments[first]
    bound.arguments["process_set"] = group
    if "root_rank" in bound.arguments:
        bound.arguments["root_rank"] = _world_rank(name, bound.arguments["root_rank"])
    if name.endswith("_object"):
        if group is not None:
            return original(*bound.args, **bound.kwargs)
        return given if name == "broadcast_object" else [given]

    def call(values: Any) -> Any:
        if group is None:
            return _alone(name, values, bound.arguments)
        bound.arguments[first] = values
        return original(*bound.args, **bound.kwargs)

    if name in ("broadcast_variables", "broadcast_"):
        from smp_tf.sharding import shares

        of_shares = shares.of_shares()
        return call([v for v in given if not _is_elsewhere(v) and id(v.handle) not in of_shares])
    if "allreduce" in name:
        return _allreduce(name, given, bound.arguments, call)
    return _skipping(given, call)


def _skipping(given: Any, call: Callable[[Any], Any]) -> Any:
    """Calls a collective with what this rank has, and returns None in place of the rest."""
    if not isinstance(given, list):
        return None if _is_elsewhere(given) else call(given)
    results: list[Any] = [None] * len(given)
    here = [position for position, value in enumerate(given) if not _is_elsewhere(value)]
    if here:
        for position, result in zip(here, call([given[position] for position in here]), strict=True):
            results[position] = result
    return results


def _allreduce(name: str, given: Any, arguments: dict[str, Any], call: Callable[[Any], Any]) -> Any:
    """Reduces what is not averaged yet. An average is the same on all replicas, so its sum is known."""
    import horovod.tensorflow as hvd

    from smp_tf.replicas import gradient_marks, sums, unaveraged
    from smp_tf.sharding import layouts

    op = hvd.handle_average_backwards_compatibility(arguments["op"], arguments["average"])
    arguments["op"], arguments["average"] = op, None
    factor = arguments["prescale_factor"] * arguments["postscale_factor"]
    # The factor by which the reduction of equal values is larger than each.
    known = {hvd.Average: factor, hvd.Sum: factor * runtime.current().topology.replicas}
    values = given if isinstance(given, list) else [given]
    unaveraged.require_averaged(values, f"hvd.{name}")
    apart = layouts.are_received_apart()
    averaged = [
        op in known
        and (gradient_marks.mark_of(value).is_average or (apart and gradient_marks.comes_from_a_step(value)))
        for value in values
    ]
    rest = [None if done else value for value, done in zip(values, averaged, strict=True)]
    if apart:
        _refuse_what_may_be_averaged(name, rest)
    reduced = _skipping(rest if isinstance(given, list) else rest[0], call)
    results = [
        sums.scaled(value, known[op]) if done else result
        for value, done, result in zip(values, averaged, reduced if isinstance(given, list) else [reduced], strict=True)
    ]
    return results if isinstance(given, list) else results[0]


def _refuse_what_may_be_averaged(name: str, values: Sequence[Any]) -> None:
    """Raises an error where a tensor may be a changed average of a step, for which other replicas have None."""
    import tensorflow as tf

    from smp_tf.sharding import receivers

    for value in values:
        if not isinstance(value, tf.Tensor) or not (owners := receivers.owners_of_shape(value)):
            continue
        raise StepError(
            f"hvd.{name} was given a tensor of shape {tuple(value.shape)}, as weights of this model have that replica "
            f"{min(owners)} alone updates (shard_optimizer_state). It is not known to come from a step, and may be "
            f"made of a gradient all the same, outside a function or in a variable; then it is averaged already, no "
            f"other replica has it, and this one would wait. Leave the call out; what is the script's own, on all "
            f"replicas, smp.average_gradients([value]) averages."
        )


def _is_elsewhere(value: Any) -> bool:
    from smp_tf.variables import store

    return value is None or (_is_variable(value) and store.is_remote(value))


def _world_rank(name: str, root: int) -> int:
    from smp_tf.partition.mesh import CommGroup

    members: Sequence[int] = runtime.current().topology.members(CommGroup.RDP_GROUP)
    if not 0 <= root < len(members):
        raise StepError(
            f"hvd.{name} was given root_rank={root}. With smp_tf hvd means the {len(members)} replicas of this rank's "
            f"partition: use 0 to {len(members) - 1}, as hvd.rank() counts."
        )
    return members[root]


def _alone(name: str, values: Any, arguments: dict[str, Any]) -> Any:
    """Returns the result of a collective in a group of one."""
    import tensorflow as tf

    from smp_tf.replicas import sums

    if name == "broadcast_variables":
        return None
    if name == "alltoall":
        splits = arguments["splits"]
        return tf.convert_to_tensor(values) if splits is None else (tf.convert_to_tensor(values), splits)
    factor = arguments.get("prescale_factor", 1.0) * arguments.get("postscale_factor", 1.0)
    if isinstance(values, list):
        return [sums.scaled(value, factor) for value in values]
    return sums.scaled(values, factor)
