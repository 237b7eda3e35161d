"""Estimates times of microbatches of a size that was not measured, from those of the sizes that were.

    seconds │              ╱ 4 samples
            │        ╱ 2
            │   ╱ 1                    what a unit takes for no sample at all is what every further
            │ ╱                        microbatch of a batch costs
            └──────────────── samples

Between two sizes a unit takes what lies on the line through both; beyond the last, on that through the last two. That
holds as far as it can be: fewer samples take no longer, and half as many no less than half as long. One size says
nothing of another: by it alone, more microbatches would cost nothing.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

#: Seconds forward and backward of a microbatch, by unit.
Times = Mapping[str, tuple[float, float]]


@dataclass(frozen=True)
class UnitTimes:
    """What is known of how long units take.

    Args:
        seconds: forward and backward of a microbatch, by unit; none where nothing was measured.
        sizes: where microbatches of this size were not measured, the samples of those that were.
        alone: what share of them a unit takes, forward and backward, while the other ranks of the host wait.
    """

    seconds: Times = field(default_factory=dict)
    sizes: tuple[int, ...] = ()
    alone: tuple[float, float] = (1.0, 1.0)


def other_sizes(sizes: Sequence[int]) -> str:
    """Returns the sizes that times were drawn from, in words.

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
        Those of units that were measured for every size; none where the size was not measured, nor two others.

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
    """Returns the seconds for a size, by those of two sizes."""
    (low, of_low), (high, of_high) = lower, upper
    slope = (of_high - of_low) / (high - low)
    if low <= samples <= high:
        return of_low + slope * (samples - low)
    # Far outside, the noise of two times that are much alike would be all there is.
    slope = max(0.0, slope)
    if samples > high:
        return of_high + slope * (samples - high)
    return max(of_low - slope * (low - samples), of_low * samples / low)
