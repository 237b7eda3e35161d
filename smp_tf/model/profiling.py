"""`model.profile`: measures the time and memory of every unit of a model, for the plan that its first step makes.

rank 0                      rank 1
are the times known? ─────▶ all ranks hear of it
unit 0 ready                unit 1 ready
────────── wait for each other ──────────
unit 0 measured             unit 1 measured       at the same time, as they run in training; in shifts where a host has
                                                  fewer processors than ranks
unit 0 measured                                   alone, as they run while the other one waits: the dearest units only
                            unit 1 measured
unit 2 ...                  unit 3 ...
messages to each other      messages to each other    pairs of ranks of a host, at the same time
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import inspect
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf
from rich.console import Console
from rich.progress import Progress

from smp_tf.announce import announce
from smp_tf.errors import PlacementError, StepError
from smp_tf.job import runtime
from smp_tf.job.exchange import agree, allgather_json, barrier, broadcast_json
from smp_tf.job.program_numbers import agree_on_number
from smp_tf.model.measurement import (
    Measurement,
    first_of_a_kind,
    measure_in_rounds,
    medians_of_equals,
    most_of_equals,
    shares,
)
from smp_tf.model.profile_cache import FORMAT, Profile, ProfileCache
from smp_tf.partition.graph.fingerprint import work_of
from smp_tf.partition.mesh import CommGroup
from smp_tf.partition.split.split import Split
from smp_tf.partition.units.cost import Costs, estimate
from smp_tf.partition.units.units import Unit
from smp_tf.pipeline import allocator
from smp_tf.pipeline.measure.made_up import Surroundings
from smp_tf.pipeline.measure.message_time import seconds_of_messages
from smp_tf.pipeline.measure.profile import make_ready
from smp_tf.pipeline.planner.beyond_estimate import beyond_estimate
from smp_tf.pipeline.planner.cut import cut_into_units
from smp_tf.pipeline.planner.unit_peaks import UnitPeaks
from smp_tf.planning.kept_measurements import MeasuredHardware, Subject, subject_of, this_hardware
from smp_tf.planning.memory_region import take_region
from smp_tf.steps.options import StepOptions
from smp_tf.steps.step import Step
from smp_tf.steps.trace import StepTrace
from smp_tf.variables.models import SplitModel
from smp_tf.variables.store import storage_of


def profile(model: SplitModel, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Measures a model, for `DistributedModel.profile`.

    Args:
        model: a distributed model that has run no step.
        inputs: example inputs.
        kwargs: more inputs, by keyword.

    Raises:
        StepError: the model has run a step already, or returns nothing that has a gradient.
        RankMismatchError: the ranks do not profile the same model.
    """
    running = runtime.current()
    if not tf.executing_eagerly():
        raise StepError(f"Model {model.name!r} cannot be profiled inside a tf.function. Call profile before it.")
    placed = [variable for variable in model._smp_store if model._smp_store.is_placed(variable)]
    if any(not storage_of(variable).is_early for variable in placed):
        raise StepError(
            f"Model {model.name!r} has run a step already, by whose plan it stays. Call profile before the first step."
        )
    if placed:
        raise StepError(
            f"The weights of model {model.name!r} were saved or asked for, so they have values on their ranks. Call "
            f"profile before that."
        )
    if running.topology.stages == 1:
        announce("There is one partition, so nothing to plan: profile measures nothing.", running.topology.rank)
        return
    if "training" not in kwargs and takes_training(model):
        kwargs = {**kwargs, "training": True}
    # All ranks trace, since this makes the model's variables, in the same order on all.
    traced = forward_backward(model).trace(*inputs, **kwargs)
    given = tf.nest.flatten((inputs, kwargs), expand_composites=True)
    tensors = [tf.convert_to_tensor(t) for t in given if _is_tensor(t)]
    samples = samples_in(tensors)
    known = _known_or_measured(model.name, traced, tensors, samples)
    per_sample = {name: (ahead / samples, back / samples) for name, (ahead, back) in known.times.items()}
    model._smp_store.measured, model._smp_store.alone = per_sample, known.alone
    model._smp_store.message = known.message
    # By the graph of what was measured. The step may have another loss.
    model._smp_store.beyond = beyond_estimate(traced.graph, known.peaks, samples)
    model._smp_store.beyond_samples = samples


def _known_or_measured(model: str, traced: StepTrace, tensors: Sequence[tf.Tensor], samples: int) -> Measurement:
    """Returns the times of a kept profile, or of one that is measured and kept now. They are the same on all ranks."""
    topology = runtime.current().topology
    hardware, cache, subject = this_hardware(topology.local_size), ProfileCache(), subject_of(traced.graph, samples)
    known, troubles = find(model, cache, subject, hardware_alike(hardware, topology.local_size))
    for trouble in troubles:
        announce(trouble, topology.rank)
    if known is not None:
        announce(already_known(model, hardware), topology.rank)
        return known
    try:
        units, cut = cut_into_units(traced.graph)
    except PlacementError as error:
        announce(f"Model {model!r} could not be profiled; the plan goes by estimates. {error}", topology.rank)
        return Measurement({})
    found = measure(model, traced, units, cut, tensors, samples)
    if allocator.counts():
        # What the first steps take is told as the most since then.
        allocator.forget_peak()
    for name, why in found.failed.items():
        announce(f"Unit {name!r} could not be measured; the plan goes by an estimate for it. {why}", topology.rank)
    if topology.rank == 0 and len(found.times) == len(units):
        cache.keep(new_profile(model, subject, hardware, found))
        if cache.trouble:
            announce(cache.trouble, topology.rank)
    return found


def find(
    model: str, cache: ProfileCache, subject: Subject, kinds: Sequence[MeasuredHardware]
) -> tuple[Measurement | None, list[str]]:
    """Returns the times that rank 0 has kept, on all ranks; and what went wrong, on rank 0.

    Args:
        model: name of the model.
        cache: where profiles are kept.
        subject: the model and the size of its microbatches.
        kinds: hardware that they may have been measured on, the most similar to this machine first.

    Returns:
        The times, or None where none are kept; and words for what went wrong.
    """
    found, troubles = None, []
    for kind in kinds if runtime.current().topology.rank == 0 else ():
        if found is None:
            found = cache.find(subject, kind)
            troubles += [cache.trouble] if cache.trouble else []
    told = found and [found.times, found.alone, found.message, found.peaks.bytes, found.peaks.counted_from]
    known = broadcast_json(told, 0, name=f"profiling model {model!r}")
    if known is None:
        return None, troubles
    times, (forward, backward), message, peaks, counted_from = known
    in_pairs = {name: (ahead, back) for name, (ahead, back) in times.items()}
    in_bytes = UnitPeaks({name: (ahead, back) for name, (ahead, back) in peaks.items()}, counted_from)
    message = tuple(message) if message else None
    return Measurement(in_pairs, (forward, backward), message, peaks=in_bytes), troubles


def hardware_alike(here: MeasuredHardware, processes: int) -> list[MeasuredHardware]:
    """Returns the hardware that a machine may have been measured as, the most similar to a training first.

    Args:
        here: the machine, as this process has it.
        processes: how many processes share it in the training.
    """
    threads = max(1, here.cores // processes)
    shared = dataclasses.replace(here, threads=threads, processes=processes)
    alone = dataclasses.replace(here, processes=1)
    others = [dataclasses.replace(alone, threads=count) for count in (threads, 0)]
    return list(dict.fromkeys([dataclasses.replace(here, processes=processes), shared, *others]))


def already_known(model: str, hardware: MeasuredHardware) -> str:
    """Returns the message for when nothing needs to be measured."""
    return f"The times of model {model!r} on {hardware.device} are known from an earlier profile; nothing is measured."


def new_profile(model: str, subject: Subject, hardware: MeasuredHardware, found: Measurement) -> Profile:
    """Returns a profile to keep.

    Args:
        model: name of the model.
        subject: what was measured.
        hardware: the hardware that it was measured on.
        found: the measurement of all units.
    """
    return Profile(FORMAT, model, subject, hardware, dict(found.times), found.alone, found.message or (), found.peaks)


def measure(
    model: str, traced: StepTrace, units: Sequence[Unit], cut: Split, tensors: Sequence[tf.Tensor], samples: int
) -> Measurement:
    """Measures every unit of a model. In each replica, every rank measures a share, all at the same time.

    Args:
        model: name of the model.
        traced: the model, traced by `forward_backward`.
        units: units of the model.
        cut: the step, cut into the units.
        tensors: the values of its tensor arguments.
        samples: number of samples in them.

    Returns:
        The measurement, the same on all ranks.

    Raises:
        RankMismatchError: the ranks do not measure the same model.
    """
    topology = runtime.current().topology
    what = f"profiling the {len(units)} units of model {model!r}"
    names = hashlib.sha256(repr([unit.name for unit in units]).encode()).hexdigest()[:16]
    agree(what, {"units": len(units), "names": names}, hint="Every rank must profile the same model.")
    costs = estimate(traced.graph, units, unknown=samples)
    # Every rank measures its share of all units, whichever stage it will run.
    work = work_of(traced.graph, ((*unit.nodes, *unit.backward) for unit in units))
    told = broadcast_json(shares(costs, first_of_a_kind(work), topology.group_size(CommGroup.MP_GROUP)), 0, name=what)
    rounds, mine = max(map(len, told)), told[topology.group_rank(CommGroup.MP_GROUP)]
    around = surroundings(traced, tensors)
    # As in a training, where pieces of memory are hardly larger than what is asked for.
    take_region(most_at_a_time(costs))
    failed: dict[str, str] = {}
    with progress_of(what, topology.rank) as progress:
        found = measure_in_rounds(
            what,
            [units[index].name for index in mine],
            lambda turn: make_ready(cut, units[mine[turn]].index, around),
            rounds,
            lambda done: progress(done, rounds),
            failed,
        )
    message = measure_messages(what)
    said = allgather_json(failed, name=what)
    failed = {name: why for reasons in said for name, why in reasons.items()}
    kinds = {unit.name: kind for unit, kind in zip(units, work, strict=True) if unit.name not in failed}
    times, peaks = medians_of_equals(found.times, kinds), most_of_equals(found.peaks, kinds)
    return dataclasses.replace(found, times=times, message=message, failed=failed, peaks=peaks)


def most_at_a_time(costs: Costs) -> int:
    """Returns bytes that are enough for the weights of any unit, and for what it reads and writes.

    Args:
        costs: costs of all units.
    """
    return max((int(cost.nbytes.read + cost.nbytes.written + cost.nbytes.weights) for cost in costs.units), default=0)


def measure_messages(what: str) -> tuple[float, float] | None:
    """Measures messages between ranks of a host, in pairs at the same time. Every rank of the job must call it.

    Args:
        what: words for what is done, the same on all ranks.

    Returns:
        The seconds at each end of a message, and those for every byte: the median over the ranks that measured. None
        where no host has two ranks of a replica.
    """
    topology = runtime.current().topology
    if topology.size == 1:
        return None
    members = topology.members(CommGroup.MP_GROUP)
    own = None
    if len(members) > 1:
        program = agree_on_number(f"{what}: messages")
        barrier(name=what)
        peer = pairs_on_hosts(members, topology.hosts).get(topology.rank)
        own = seconds_of_messages(topology.rank, peer, program) if peer is not None else None
    found = [pair for pair in allgather_json(own, name=what) if pair is not None]
    if not found:
        return None
    return statistics.median(pair[0] for pair in found), statistics.median(pair[1] for pair in found)


def pairs_on_hosts(members: Sequence[int], hosts: Sequence[str]) -> dict[int, int]:
    """Returns for ranks of a replica another one on the same host, in pairs. The last of an odd number has none.

    Args:
        members: world ranks of the replica.
        hosts: the host of every world rank.

    Example:
        >>> pairs_on_hosts([0, 1, 2, 3, 4], ["a", "a", "a", "b", "b"])
        {0: 1, 1: 0, 3: 4, 4: 3}
    """
    found: dict[int, int] = {}
    for host in dict.fromkeys(hosts):
        here = [rank for rank in members if hosts[rank] == host]
        for one, other in zip(here[::2], here[1::2], strict=False):
            found |= {one: other, other: one}
    return found


def surroundings(traced: StepTrace, tensors: Sequence[tf.Tensor]) -> Surroundings:
    """Returns what a traced model is given from outside: tensors, captures, and variables of the script."""
    variables = enumerate(traced.lowered.variables)
    own = {n: variable for n, variable in variables if not traced.graph.variables[n].in_model}
    return Surroundings(tensors, traced.lowered.captures, own)


def samples_in(tensors: Sequence[tf.Tensor]) -> int:
    """Returns the samples in example inputs: the length of the first one that has any."""
    return next((int(tensor.shape[0]) for tensor in tensors if tensor.shape.rank), 1) or 1


def _is_tensor(value: Any) -> bool:
    return tf.is_tensor(value) or hasattr(value, "__array__")


def takes_training(model: SplitModel) -> bool:
    """Returns whether the model's `call` has an argument `training`."""
    parameters = inspect.signature(model._smp_keras_model.call).parameters
    return "training" in parameters


def forward_backward(model: SplitModel, loss: Callable[[Any], tf.Tensor] | None = None) -> Any:
    """Returns a step that takes a model's inputs and returns the gradients of a loss of its outputs.

    Args:
        model: the model.
        loss: the loss of the model's outputs; None for one in which every output counts.
    """

    def of_all(outputs: Any) -> tf.Tensor:
        tensors = [tf.convert_to_tensor(t) for t in tf.nest.flatten(outputs)]
        # A sum of squares, since the gradient of a plain sum needs no forward pass, unlike that of a real loss.
        sums = [tf.reduce_sum(tf.square(tf.cast(t, tf.float32))) for t in tensors if t.dtype.is_floating]
        if not sums:
            raise StepError(f"Model {model.name!r} gives no floating-point numbers, so it has no backward pass.")
        return tf.add_n(sums)

    def forward_and_backward(*inputs: Any, **kwargs: Any) -> Any:
        with tf.GradientTape() as tape:
            found = (loss or of_all)(model(*inputs, **kwargs))
        return tape.gradient(found, model.trainable_variables), found

    return Step(forward_and_backward, StepOptions())


@contextlib.contextmanager
def progress_of(what: str, rank: int) -> Iterator[Callable[[int, int], None]]:
    """Shows progress by a bar on rank 0's terminal, or by a line where there is no terminal.

    Args:
        what: words for what is being done.
        rank: this process's world rank.
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        announce(f"{what} ...", rank)
    with Progress(console=console, transient=True, disable=not console.is_terminal or rank != 0) as bar:
        task = bar.add_task(what)
        yield lambda done, of: bar.update(task, completed=done, total=of)
