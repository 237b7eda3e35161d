"""The most bytes that units were seen to need while they run, and what this says of microbatches of other sizes."""

from __future__ import annotations

import bisect
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class UnitPeaks:
    """The most bytes of tensors that units were seen to have, besides what they are given.

    Args:
        bytes: bytes forward and backward for a microbatch, by unit; empty where nothing was counted.
        counted_from: bytes from which on a tensor was counted.
    """

    bytes: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    counted_from: int = 0


@dataclass(frozen=True)
class BeyondEstimate:
    """How many more bytes units need than is estimated.

    Args:
        nodes: the bytes, below 0 where a unit needs less, by the names of the nodes of the step.
        units: names of the units that were measured.
    """

    nodes: Mapping[str, int] = field(default_factory=dict)
    units: frozenset[str] = frozenset()


def peaks_for(samples: int, measured: Mapping[int, UnitPeaks]) -> UnitPeaks:
    """Returns the bytes of every unit for microbatches of a size, on the line through the nearest measured sizes.

    Args:
        samples: of a microbatch.
        measured: what was measured, by samples of a microbatch.

    Returns:
        The bytes of units that were measured for both sizes; none where neither this size nor two others were measured,
        or where these were counted differently.
    """
    if samples in measured:
        return measured[samples]
    sizes = sorted(measured)
    if len(sizes) < 2:
        return UnitPeaks()
    place = min(max(bisect.bisect(sizes, samples), 1), len(sizes) - 1)
    low, high = sizes[place - 1], sizes[place]
    lower, upper = measured[low], measured[high]
    if lower.counted_from != upper.counted_from:
        return UnitPeaks()

    def between(few: int, many: int) -> int:
        return max(0, round(few + (many - few) * (samples - low) / (high - low)))

    found = {
        name: (between(ahead, upper.bytes[name][0]), between(back, upper.bytes[name][1]))
        for name, (ahead, back) in lower.bytes.items()
        if name in upper.bytes
    }
    return UnitPeaks(found, lower.counted_from)
