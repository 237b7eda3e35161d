"""Measures a unit of a step, which runs as a stage of its own, forward and backward, as for many microbatches.

    made-up inputs ─▶ F 1.2 ─ stash ─▶ B 2.0 ◀─ made-up gradients      milliseconds
                      3         ┆      5                               MiB at most, besides what it is given

Units are measured independently, in any order and by any process, since what flows between them is made up (`made_up`).
At any time only the weights of one unit are in memory, with the sums of their gradients.
"""

from __future__ import annotations

import contextlib
import functools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from smp_tf.partition.graph.op_graph import Tensor
from smp_tf.partition.split.split import Segment, Split
from smp_tf.pipeline import allocator
from smp_tf.pipeline.measure.made_up import Surroundings, values_for
from smp_tf.pipeline.run.accumulator import Accumulator, fits
from smp_tf.pipeline.run.host import has_device
from smp_tf.pipeline.run.segment_function import Summing, build_segment_function

#: How many seconds a segment is called for its median, and how often at least and at most.
_ENOUGH = 0.1
_FEWEST_CALLS, _MOST_CALLS = 3, 20
#: How many calls of a segment come for each call of a function that does nothing.
_FOR_EACH_EMPTY = 4
#: Bytes of a processor's share of the last-level cache, where the system does not say.
_CACHE_SHARE = 16 << 20


class Taken(NamedTuple):
    """What a segment took.

    Attributes:
        seconds: of a call.
        peak: the most bytes of tensors that a call had at once, its results included, besides what it was given; None
            where the allocator does not count.
    """

    seconds: float
    peak: int | None


@dataclass(frozen=True)
class ReadyUnit:
    """A unit whose functions are built and have run once.

    Args:
        calls: by sweep, the function of the segment and its arguments.
        empty: by sweep, a function that takes the same arguments and does nothing.
    """

    calls: dict[int, tuple[Callable[..., Any], Sequence[tf.Tensor]]]
    empty: dict[int, Callable[..., Any]]

    def measure(self) -> dict[int, Taken]:
        """Runs every segment for a while. No more processes may measure than there are processors.

        Returns:
            What each sweep took. The seconds are the median over the calls, without the time of calling a function that
            does nothing. The bytes are those of the call that had most.
        """
        counts = allocator.counts()
        return {
            sweep: _measured(function, self.empty[sweep], given, counts=counts)
            for sweep, (function, given) in self.calls.items()
        }


def make_ready(split: Split, unit: int, around: Surroundings) -> ReadyUnit:
    """Builds the functions of a unit and runs each once, so that TensorFlow optimises it.

    Args:
        split: the step, cut into as many stages as there are units.
        unit: which of them.
        around: what the step is given from outside.

    Returns:
        The unit, ready to be measured. It holds the unit's weights and no others.
    """
    graph = split.graph
    last = split.assignment.replicated_sweep
    # Measurements that every rank takes belong to no unit. They would measure made-up values.
    segments = [s for (stage, sweep, _), s in sorted(split.segments.items()) if stage == unit and sweep < last]
    made = {t for segment in segments for t in segment.outputs}
    foreign = {t for segment in segments for t in segment.inputs if t not in made}
    values = values_for(split, foreign, around)
    calls: dict[int, tuple[Callable[..., Any], Sequence[tf.Tensor]]] = {}
    empty: dict[int, Callable[..., Any]] = {}
    for segment in segments:
        sums = _sums(split, segment)
        function = build_segment_function(
            graph,
            segment,
            around.variables_of(graph, segment),
            outputs=tuple(t for t in segment.outputs if t not in sums or t in _read(split)),
            summing=Summing(sums),
        )
        given = around.given_to(graph, function, values)
        _begin(list(sums.values()))
        outputs = function.function(*given)
        values.update(zip(function.outputs, outputs, strict=True))
        calls[segment.sweep] = function.function, given
        empty[segment.sweep] = _empty(function.function, given)
        # A first call takes 10 to 30 ms. This would be subtracted from the time of a slow unit.
        empty[segment.sweep](*given)
    return ReadyUnit(calls, empty)


def _sums(split: Split, segment: Segment) -> dict[Tensor, Accumulator]:
    """Makes the sums to which a segment adds gradients, as in a step of several microbatches."""
    summed = {t for o in split.outputs if o.is_summed for t in o.summands or (o.tensor,)}
    kinds = {t: split.graph.type_of(t) for t in segment.outputs if t in summed}
    return {
        t: Accumulator(kind, f"smp_profiled_sum_{number}")
        for number, (t, kind) in enumerate(kinds.items())
        if fits(kind)
    }


def _read(split: Split) -> frozenset[Tensor]:
    return frozenset(t for segment in split.segments.values() for t in segment.inputs)


def _begin(sums: list[Accumulator]) -> None:
    def clear() -> None:
        for accumulator in sums:
            accumulator.clear(tf.no_op())

    if sums:
        tf.function(clear).get_concrete_function()()


def _empty(function: Callable[..., Any], given: Sequence[tf.Tensor]) -> Callable[..., Any]:
    """Returns a function that takes and returns as many tensors as another, does nothing and captures nothing.

    A stage calls one function for all of its units. If the call counted for each unit, a model of a hundred units would
    seem to spend half of its time on calls, for microbatches of one sample.
    """
    results = len(function.outputs)  # type: ignore[attr-defined]
    specs = [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in given]
    nothing = tf.function(lambda *tensors: [tf.constant(0) for _ in range(results)], autograph=False)
    return nothing.get_concrete_function(*specs)


def _cool() -> None:
    """Leaves the cache as the rest of a model would between two calls of a unit. With a warm one it seems faster.

    A process loses no more than its share of the cache. So what the unit before has just made is still there.
    """
    ballast = _ballast()
    np.add(ballast, 1, out=ballast)


@functools.cache
def _ballast() -> np.ndarray:
    """Returns memory as large as a processor's share of the largest cache."""
    shares = [_CACHE_SHARE]
    with contextlib.suppress(OSError, ValueError):
        caches = sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*"))
        shares = [_size(cache) // _sharers(cache) for cache in caches] or shares
    return np.zeros(max(shares), np.uint8)


def _size(cache: Path) -> int:
    """Returns the bytes of a cache from the system's text, such as "32768K"."""
    return int((cache / "size").read_text().strip().rstrip("K")) << 10


def _sharers(cache: Path) -> int:
    """Returns how many processors share a cache, by the bits of the system's text, such as "00000000,00000003"."""
    return int((cache / "shared_cpu_map").read_text().replace(",", ""), 16).bit_count()


def _measured(
    function: Callable[..., Any], empty: Callable[..., Any], given: Sequence[tf.Tensor], *, counts: bool
) -> Taken:
    """Returns the seconds that a function takes beyond one that does nothing, and its bytes where they are counted."""
    taken: list[float] = []
    for_nothing: list[float] = []
    peaks: list[int] = []
    while len(taken) < _FEWEST_CALLS or (sum(taken) < _ENOUGH and len(taken) < _MOST_CALLS):
        # The calls alternate, so that what slows the machine for a while slows both.
        if len(taken) % _FOR_EACH_EMPTY == 0:
            for_nothing.append(_seconds(empty, given))
        if counts:
            allocator.forget_peak()
        before = allocator.in_use()
        taken.append(_seconds(function, given))
        peaks.append(allocator.peak() - before)
    seconds = max(0.0, statistics.median(taken) - statistics.median(for_nothing))
    return Taken(seconds, max(peaks) if counts else None)


def _seconds(function: Callable[..., Any], given: Sequence[tf.Tensor]) -> float:
    """Returns the seconds of a call."""
    _cool()
    began = time.perf_counter()
    function(*given)
    _finish()
    return time.perf_counter() - began


def _finish() -> None:
    """Waits until the devices are done, since on a GPU a function returns earlier."""
    if has_device():
        tf.test.experimental.sync_devices()
