"""Shares the slots of weights out over the replicas of their stages, and says so in the layouts of the weights.

    weights of stage 0     kernel  Layout(0, 0)     Layout(0, 0, gradient=Whole("D", 0, 2), slots=Whole("D", 0, 2))
                           bias    Layout(0, 0)     Layout(0, 0, gradient=Whole("D", 1, 2), slots=Whole("D", 1, 2))
    weights of stage 1     table   Layout(1, 1)     Layout(1, 1, slots=SplitOver("D", 0, (0, 50, 100)))

A job does so when steps give weights to stages, and a plan for a model that is not trained here does the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from smp_tf.partition.layout import Layout
from smp_tf.partition.place.slot_shares import Sized, share_out
from smp_tf.partition.spread import EVERYWHERE


def with_shared_slots(
    weights: Sequence[tuple[Sized, Layout]], replicas: int, loads: dict[int | None, list[float]]
) -> list[Layout]:
    """Returns the layouts of weights whose slots are shared out now, those of each stage by themselves.

    Args:
        weights: the weights, of all stages.
        replicas: number of replicas.
        loads: for each stage, the bytes whose slots each replica keeps already. What is shared out is added.
    """
    found = [layout for _, layout in weights]
    for stage in dict.fromkeys(layout.stage for layout in found):
        places = [place for place, (_, layout) in enumerate(weights) if layout.stage == stage]
        kept = loads.setdefault(stage, [0.0] * replicas)
        shares, kept[:] = share_out([weights[place][0] for place in places], kept)
        for place, share in zip(places, shares, strict=True):
            slots = share.spread(replicas)
            # A step that applies gradients itself gives each replica rows of one. A script gets all of it.
            gradient = EVERYWHERE if slots.only is None else slots
            found[place] = dataclasses.replace(found[place], gradient=gradient, slots=slots)
    return found
