"""What a placement gives up in balance, and what it saves in bytes sent.

                  fullest stage   sent per microbatch   step
best balanced     1.90 GiB        120 MiB               2.31 s
taken             1.96 GiB        24 MiB                2.19 s        within 5 % of the best balance
sends least       3.10 GiB        12 MiB                5.02 s        whatever its balance
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from smp_tf.partition.place.cut_search import Most
from smp_tf.partition.place.placement import Chain, Placement

#: The factor by which rounding errors may make a sum larger.
_ROUNDING = 1 + 1e-9


@dataclass(frozen=True, slots=True)
class Offer:
    """What one placement has to offer.

    Args:
        balance: what is balanced: the bytes of the fullest stage, or the seconds of the slowest one per microbatch.
        sent: bytes that all stages send per microbatch, forward and backward, with what copies of weights send.
        step: seconds of a step.
    """

    balance: float
    sent: float
    step: float

    @classmethod
    def of(cls, chain: Chain, placement: Placement, objective: str, microbatches: int) -> Offer:
        """Returns what a placement has to offer.

        Args:
            chain: the units with their costs.
            placement: their placement.
            objective: "memory" or "speed".
            microbatches: per step.
        """
        return cls(
            max(placement.memory if objective == "memory" else placement.times),
            sent_bytes(chain, placement.stage_of, microbatches),
            placement.score("speed", microbatches),
        )

    def within(self, objective: str, tolerance: float) -> Most:
        """Returns what a placement may have whose balance is nearly this one's. By speed its step is as near.

        Args:
            objective: "memory" or "speed".
            tolerance: the share by which it may have more.
        """
        share = (1 + tolerance) * _ROUNDING
        if objective == "memory":
            return Most(memory=self.balance * share)
        return Most(time=self.balance * share, step=self.step * share)


@dataclass(frozen=True, slots=True)
class Trade:
    """The placements between which one was chosen.

    Args:
        tolerance: the share by which the balance of the one that was taken may be worse.
        balanced: the placement with the best balance that was found.
        taken: the placement that was taken. It sends the fewest bytes, of those that were found within the tolerance.
        least: the placement that sends the fewest bytes of those that were found, whatever its balance.
        bound: the bytes per microbatch below which no placement within the tolerance sends; None where that is known
            only of cuts in the order of the layers.
        bound_of_cuts: the same for these cuts; None where it is not known of them either.
    """

    tolerance: float
    balanced: Offer
    taken: Offer
    least: Offer
    bound: float | None = None
    bound_of_cuts: float | None = None

    @property
    def is_made(self) -> bool:
        """Returns whether another placement was taken than the best balanced one."""
        return self.taken != self.balanced

    def unproved(self) -> Trade:
        """Returns the same without bounds, for costs that turned out to be other ones."""
        return dataclasses.replace(self, bound=None, bound_of_cuts=None)


def sent_bytes(chain: Chain, stage_of: Sequence[int], microbatches: int) -> float:
    """Returns the bytes that all stages send per microbatch.

    A tensor is sent once to each other stage that reads it. A weight of several stages is sent once per step to each
    stage but its owner, and its gradient is sent back.

    Args:
        chain: the units with their costs.
        stage_of: stage of each unit.
        microbatches: over which the copies of a step are spread.
    """
    sent = copied = 0.0
    stage = stage_of.__getitem__
    for flow in chain.flows:
        sent += flow.nbytes * len({*map(stage, flow.consumers)} - {stage(flow.producer)})
    for weight in chain.weights:
        if len(weight.users) > 1:
            copied += weight.crossing * (len({*map(stage, weight.users)}) - 1)
    return sent + copied / microbatches
