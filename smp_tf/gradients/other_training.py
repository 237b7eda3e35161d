"""Says that a training is not what a single process would do, as an error or a warning, as `check_losses` says."""

from __future__ import annotations

from collections.abc import Sequence

from smp_tf.announce import announce
from smp_tf.errors import StepError
from smp_tf.job import runtime


def report(what: str, found: Sequence[str], way_out: str) -> None:
    """Raises, or says once, that a training differs from that of one process. Does nothing where nothing was found.

    Args:
        what: the step or the optimizer, with a verb: "train_step of model 'net' is another training".
        found: sentences about what differs, and what to do about each.
        way_out: words for another way to train, which end a sentence.

    Raises:
        StepError: something differs, and check_losses is true.
    """
    running = runtime.current()
    if not found or not running.config.check_losses:
        return
    text = (
        f"{what}. {' '.join(found)} Otherwise {way_out}; where this training is what you want, set check_losses=False "
        f'in smp.init (check_losses="warn" says this once and goes on).'
    )
    if running.config.check_losses != "warn":
        raise StepError(text)
    announce(text, running.topology.rank)
