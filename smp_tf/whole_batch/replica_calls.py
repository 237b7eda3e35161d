"""Decides which losses of a step need coefficients on any replica, and whether all replicas can have them."""

from __future__ import annotations

from collections.abc import Collection

from smp_tf.job import exchange
from smp_tf.partition.mesh import CommGroup
from smp_tf.whole_batch.loss_coefficients import LossCoefficients


def calls_on_replicas(step: str, found: LossCoefficients | None, composites: Collection[int]) -> tuple[set[int], bool]:
    """Returns the numbers of the calls that need coefficients on any replica, and whether all replicas can have them.

    All replicas call it together.

    Args:
        step: words for the step.
        found: the coefficients that this replica has found; None where it has failed to.
        composites: the arguments, by number, that are parts of ragged or sparse tensors.
    """
    needed, possible = [], []
    if found is not None:
        needed = [call.number for call in found.calls]
        possible = [number for number in found.possible if not found.arguments_of(number) & set(composites)]
    said = exchange.allgather_json(
        [needed, possible], CommGroup.RDP_GROUP, name=f"what samples count in the losses of {step}"
    )
    wanted = {number for theirs, _ in said for number in theirs}
    return wanted, all(wanted <= set(theirs) for _, theirs in said)
