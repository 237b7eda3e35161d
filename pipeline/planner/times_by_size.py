"""Estimates times of microbatches of a size that was not measured, from measured sizes.

    seconds │              ╱ 4 samples
            │        ╱ 2
            │   ╱ 1                    what a unit takes for no sample at all is what every further
            │ ╱                        microbatch of a batch costs
            └──────────────── samples

Between two sizes, the time is on the line through both. Beyond the last, it is on the line through the last two. But
fewer samples never take longer, and half as many never take less than half as long. One size says nothing about
another: by it alone, more microbatches would cost nothing.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from smp_tf.pipeline.planner.unit_peaks import UnitPeaks

#: Seconds forward and backward of a microbatch, by unit.
Times = Mapping[str, tuple[float, float]]


@dataclass(frozen=True)
class UnitTimes:
    """What was measured of units.

    Args:
        seconds: seconds forward and backward of a microbatch, by unit; empty where nothing was measured.
        sizes: the samples of the measured microbatches, where this size was not measured.
        alone: the share of these times that a unit takes, forward and backward, while the other ranks of the host wait.
        message: the processor's seconds at each end of a message between two ranks of a host, and those for every byte;
            None where they were not measured.
        peaks: the most bytes that units have while they run.
    """

    seconds: Times = field(default_factory=dict)
    sizes: tuple[int, ...] = ()
    alone: tuple[float, float] = (1.0, 1.0)
    message: tuple[float, float] | None = None
    peaks: UnitPeaks = field(default_factory=UnitPeaks)


def other_sizes(sizes: Sequence[int]) -> str:
    """Returns words for the sizes that times were estimated from.

    Args:
        sizes: samples of the microbatches that were measured.
    """
    return f"other sizes of a microbatch, {min(sizes)} to {max(sizes)} samples"


def times_for(samples: int, measured: Mapping[int, Times]) -> UnitTimes:
    """Returns the times of every unit for microbatches of a size.

    Args:
        samples: of a microbatch.
        measured: the times that were measured, by samples of a microbatch.

    Returns:
        The times of units that were measured for every size; none where neither this size nor two others were measured.

    Example:
        >>> times_for(8, {2: {"net/dense": (1.0, 2.0)}, 4: {"net/dense": (1.5, 3.0)}}).seconds
        {'net/dense': (2.5, 5.0)}
    """
    if samples in measured:
        return UnitTimes(measured[samples])
    sizes = sorted(measured)
    if len(sizes) < 2:
        return UnitTimes()
    place = min(max(bisect.bisect(sizes, samples), 1), len(sizes) - 1)
    low, high = sizes[place - 1], sizes[place]
    known = [name for name in measured[low] if all(name in times for times in measured.values())]
    lower, upper = measured[low], measured[high]
    seconds = {name: _on_lines(samples, (low, lower[name]), (high, upper[name])) for name in known}
    return UnitTimes(seconds, tuple(sizes) if seconds else ())


def _on_lines(
    samples: int, lower: tuple[int, tuple[float, float]], upper: tuple[int, tuple[float, float]]
) -> tuple[float, float]:
    (low, of_low), (high, of_high) = lower, upper
    ahead, back = (_on_line(samples, (low, a), (high, b)) for a, b in zip(of_low, of_high, strict=True))
    return ahead, back


def _on_line(samples: int, lower: tuple[int, float], upper: tuple[int, float]) -> float:
    """Returns the seconds for a size, by the line through two sizes."""
    (low, of_low), (high, of_high) = lower, upper
    slope = (of_high - of_low) / (high - low)
    if low <= samples <= high:
        return of_low + slope * (samples - low)
    # Far outside, two similar times would give only noise.
    slope = max(0.0, slope)
    if samples > high:
        return of_high + slope * (samples - high)
    return max(of_low - slope * (low - samples), of_low * samples / low)
