"""`model.profile`: times every unit of a model on example inputs, for the plan that its first step makes.

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

import collections
import contextlib
import dataclasses
import functools
import hashlib
import inspect
import os
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, TypeAlias, TypeVar

import tensorflow as tf
from rich.console import Console
from rich.progress import Progress

from smp_tf.announce import announce
from smp_tf.errors import PlacementError, StepError
from smp_tf.job import runtime
from smp_tf.job.exchange import agree, allgather_json, barrier, broadcast_json
from smp_tf.job.program_numbers import agree_on_number
from smp_tf.model.measuring_shifts import shifts_of
from smp_tf.model.profile_cache import (
    FORMAT,
    MeasuredHardware,
    Profile,
    ProfileCache,
    Subject,
    subject_of,
    this_hardware,
)
from smp_tf.partition.graph.fingerprint import work_of
from smp_tf.partition.mesh import CommGroup
from smp_tf.partition.split.split import Split
from smp_tf.partition.units.cost import Costs, estimate
from smp_tf.partition.units.units import Unit
from smp_tf.pipeline.measure.made_up import Surroundings
from smp_tf.pipeline.measure.message_time import seconds_of_messages
from smp_tf.pipeline.measure.profile import ReadyUnit, make_ready
from smp_tf.pipeline.planner.cut import cut_into_units
from smp_tf.steps.options import StepOptions
from smp_tf.steps.step import Step
from smp_tf.steps.trace import StepTrace
from smp_tf.variables.models import SplitModel
from smp_tf.watch.failure import type_and_words

#: Seconds forward and backward of a microbatch, by unit.
Times = dict[str, tuple[float, float]]
#: Seconds forward and backward.
Pair: TypeAlias = Sequence[float]
#: A unit, or its times.
Made = TypeVar("Made")
#: How many units that do the same are measured.
_MOST_OF_A_KIND = 7
#: How many units of each rank are also measured alone.
_UNITS_ALONE = 4
#: How many ranks of a host measure alone, one after the other.
_RANKS_ALONE = 3


@dataclasses.dataclass(frozen=True)
class Measurement:
    """What is known about the times of a model's units.

    Args:
        times: times of units while all other ranks of the host run units, too.
        alone: the share of these times that units take, forward and backward, while the other ranks of a host wait.
        message: the processor's seconds that a message between two ranks of a host takes at each of its ends, and those
            for every byte; None where no host has two ranks of a replica.
        failed: why other units have no times.
    """

    times: Times
    alone: tuple[float, float] = (1.0, 1.0)
    message: tuple[float, float] | None = None
    failed: Mapping[str, str] = dataclasses.field(default_factory=dict)


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
    if any(model._smp_store.is_placed(variable) for variable in model._smp_store):
        raise StepError(
            f"Model {model.name!r} has run a step already, by whose plan it stays. Call profile before the first step."
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
    known = broadcast_json(found and [found.times, found.alone, found.message], 0, name=f"profiling model {model!r}")
    if known is None:
        return None, troubles
    times, (forward, backward), message = known
    in_pairs = {name: (ahead, back) for name, (ahead, back) in times.items()}
    return Measurement(in_pairs, (forward, backward), tuple(message) if message else None), troubles


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
    return Profile(FORMAT, model, subject, hardware, dict(found.times), found.alone, found.message or ())


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
    times = medians_of_equals(found.times, dict(zip((unit.name for unit in units), work, strict=True)))
    in_order = {unit.name: times[unit.name] for unit in units if unit.name in times}
    return dataclasses.replace(
        found, times=in_order, message=message, failed={name: why for reasons in said for name, why in reasons.items()}
    )


def medians_of_equals(times: Times, work: Mapping[str, str]) -> Times:
    """Returns the times of units, where units with the same work have the median over all of them.

    Equal layers take equally long. Where they do not seem to, something else disturbed one of them.

    Args:
        times: seconds forward and backward, by unit.
        work: what each unit does, equal where units do the same.

    Example:
        >>> medians_of_equals({"a": (1.0, 2.0), "b": (1.2, 9.0), "c": (9.0, 3.0)}, dict.fromkeys("abc", "Dense"))
        {'a': (1.2, 3.0), 'b': (1.2, 3.0), 'c': (1.2, 3.0)}
    """
    medians = _medians_by((work[name], pair) for name, pair in times.items())
    return {name: medians[work[name]] for name in times}


def _medians_by(named: Iterable[tuple[str, Pair]]) -> Times:
    of: dict[str, list[Pair]] = {}
    for name, pair in named:
        of.setdefault(name, []).append(pair)
    return {name: _medians(pairs) for name, pairs in of.items()}


def _medians(pairs: Sequence[Pair]) -> tuple[float, float]:
    return statistics.median(pair[0] for pair in pairs), statistics.median(pair[1] for pair in pairs)


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
    return _medians(found)


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


def measure_in_rounds(
    what: str,
    names: Sequence[str],
    make: Callable[[int], ReadyUnit],
    rounds: int,
    progress: Callable[[int], None] = lambda done: None,
    failed: dict[str, str] | None = None,
) -> Measurement:
    """Measures units of all ranks at the same time, as far as there are processors, and some of them alone.

    Args:
        what: words for what is done, the same on all ranks.
        names: names of this rank's units, the most expensive first.
        make: returns one of these, by its position, ready to be measured. It is kept only as long as that takes.
        rounds: the largest number of units that a rank has.
        progress: takes the number of rounds that are done.
        failed: takes the units of this rank that TensorFlow cannot run, with the reasons.

    Returns:
        The measurement of all units, as the median over ranks that had the same one. It is the same on all ranks.
    """
    topology = runtime.current().topology
    together = max(collections.Counter(topology.hosts).values())
    usable = allgather_json(sorted(os.sched_getaffinity(0)), name=what)
    shifts = shifts_of(topology.rank, topology.hosts, usable)
    measured: Times = {}
    both: list[tuple[Pair, Pair]] = []
    ready: ReadyUnit | None = None

    def attempt(work: Callable[[], Made]) -> Made | None:
        # A unit that cannot run on made-up numbers, or that runs backward no more often than forward, such as
        # py_function.
        try:
            return work()
        except tf.errors.OpError as error:
            if failed is not None and turn < len(names):
                failed[names[turn]] = next(line for line in type_and_words(error).splitlines() if line.strip())
            return None

    for turn in range(rounds):
        mine = turn < len(names)
        if mine:
            # Not while the one before it is kept, since a rank holds the weights of one unit.
            ready = None
            ready = attempt(functools.partial(make, turn))
        # Ranks that share a host slow each other down, as in training. A rank that has no unit left measures its last
        # one again, so that the others are not alone.
        pair: tuple[float, float] | None = None
        for shift in range(shifts.count):
            barrier(name=what)
            if shift in shifts.mine and ready is not None:
                now = attempt(functools.partial(as_forward_and_backward, ready, shifts.crowd))
                ready = ready if now is not None else None
                pair = pair or now
        if mine and pair is not None:
            measured[names[turn]] = pair
        if turn < _UNITS_ALONE and together > 1:
            for rank in range(min(together, _RANKS_ALONE)):
                barrier(name=what)
                if (
                    pair is not None
                    and ready is not None
                    and (topology.local_rank, topology.local_size) == (rank, together)
                ):
                    both.append((pair, as_forward_and_backward(ready)))
            # Nor does any rank make its next unit meanwhile.
            barrier(name=what)
        progress(turn + 1)
    said = allgather_json([measured, both], name=what)
    medians = _medians_by(chain.from_iterable(of_rank.items() for of_rank, _ in said))
    return Measurement(medians, shares_alone([pair for _, pairs in said for pair in pairs], together))


def shares_alone(both: Sequence[tuple[Pair, Pair]], together: int) -> tuple[float, float]:
    """Returns the share of its time next to others that a task takes alone, forward and backward.

    Args:
        both: seconds forward and backward of units, next to others and alone.
        together: how many run together, with this one.

    Returns:
        Two shares of at most 1, since what took longer alone was disturbed. A share is not below 1 / together, since a
        processor cannot give more to one than it gave to all.

    Example:
        >>> shares_alone([((2.0, 4.0), (2.0, 2.5)), ((2.0, 4.0), (2.5, 1.5))], together=2)
        (1.0, 0.5)
    """

    def share(sweep: int) -> float:
        beside, alone = (sum(pair[which][sweep] for pair in both) for which in (0, 1))
        return min(1.0, max(1.0 / together, alone / beside)) if beside else 1.0

    return share(0), share(1)


def as_forward_and_backward(ready: ReadyUnit, crowd: float = 1.0) -> tuple[float, float]:
    """Returns the seconds forward and backward of a unit: those of its first sweep, and of all others.

    Args:
        ready: the unit.
        crowd: how many ranks share a processor in a training. Each has it for so much less of the time.
    """
    seconds = ready.measure()
    return crowd * seconds.get(0, 0.0), crowd * sum(taken for sweep, taken in seconds.items() if sweep)


def first_of_a_kind(work: Sequence[str]) -> list[int]:
    """Returns the numbers of the units to be measured, of those with the same work the first few.

    Args:
        work: what every unit does, equal where units do the same.
    """
    seen: collections.Counter[str] = collections.Counter()
    chosen = []
    for number, kind in enumerate(work):
        seen[kind] += 1
        if seen[kind] <= _MOST_OF_A_KIND:
            chosen.append(number)
    return chosen


def shares(costs: Costs, units: Sequence[int], ranks: int) -> list[list[int]]:
    """Returns which units each rank measures. By the estimates, all ranks take about equally long.

    Args:
        costs: costs of all units.
        units: the numbers of those to be measured.
        ranks: ranks of a replica.

    Returns:
        The indices of each rank's units, the most expensive first. So units that are measured at the same time are
        alike.
    """
    found: list[list[int]] = [[] for _ in range(ranks)]
    order = sorted(units, key=lambda u: (-_seconds(costs, u), u))
    for place, unit in enumerate(order):
        turn, rank = divmod(place, ranks)
        found[rank if turn % 2 == 0 else ranks - 1 - rank].append(unit)
    return found


def _seconds(costs: Costs, unit: int) -> float:
    return costs.units[unit].seconds.both


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
