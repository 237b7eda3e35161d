"""The restore that is under way, with what a checkpoint holds for objects that do not exist yet.

Code that makes such objects reports here: steps when it is decided who stores what, and optimizers when they make their
slots. `restore.Restore` does the work. This file only says which restore it is, so that all rooms may import it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import tensorflow as tf

from smp_tf.job import runtime
from smp_tf.job.at_shutdown import on_shutdown
from smp_tf.keras import optimizer_reports
from smp_tf.variables.decision import Decision


class Pending(Protocol):
    """What a restore does while objects are made."""

    due: tf.Variable
    """Whether something is still to be restored that a step should have taken up; a bool scalar."""

    def values_for(self, decided: Sequence[Decision]) -> Callable[[Any], tf.Tensor | None]:
        """Does what `values_for` below says."""

    def stages_there(self, variables: Sequence[Any]) -> Sequence[int | None]:
        """Does what `stages_there` below says."""

    def take_what_exists(self) -> None:
        """Restores what has been made since, before the first step runs."""

    def optimizer_ready(self, optimizer: Any) -> None:
        """Gives slots their values, once an optimizer has made them on this rank or has none to make here."""

    def count_step(self) -> None:
        """Notes that a step begins. Raises an error when an earlier step has left state over."""

    def end(self) -> None:
        """Ends the restore with smp_tf. Raises an error when steps have left state over."""


_pending: Pending | None = None


def install(pending: Pending) -> None:
    """Puts a restore in force, in place of an earlier one, until `smp.shutdown`."""
    global _pending
    if _pending is None:
        on_shutdown(_end)
    _pending = pending


def current() -> Pending | None:
    """Returns the latest restore, if there was one."""
    return _pending


def _end() -> None:
    global _pending
    ended, _pending = _pending, None
    if ended is not None:
        ended.end()


def values_for(decided: Sequence[Decision]) -> Callable[[Any], tf.Tensor | None]:
    """Returns the values that models' variables get in place of their initial ones.

    Args:
        decided: the variables whose places are decided now, the same on all ranks.

    Returns:
        A function that returns the value of a variable of this rank, read at that moment, or None where nothing is
        restored.

    Raises:
        CheckpointError: a value does not fit, is missing or damaged, on any rank.
    """
    if _pending is None or not decided:
        return lambda variable: None
    return _pending.values_for(decided)


def stages_there(variables: Sequence[Any]) -> Sequence[int | None]:
    """Returns the stage that stored each variable in the job that wrote the checkpoint, if it had as many stages.

    Args:
        variables: of distributed models.

    Returns:
        For each variable its stage, or None where that is not known.
    """
    return [None] * len(variables) if _pending is None else _pending.stages_there(variables)


def take_what_exists() -> None:
    """Restores what has been made since, before the first step runs."""
    if _pending is not None:
        _pending.take_what_exists()


def optimizer_ready(optimizer: Any, built: bool = True) -> None:
    """Gives slots their values, once an optimizer has made them on this rank or has none to make here.

    Args:
        optimizer: any Keras optimizer.
        built: whether it was built for variables of this rank.
    """
    if optimizer_reports.report(optimizer, built) and _pending is not None:
        _pending.optimizer_ready(optimizer)


def count_step() -> None:
    """Notes that a step begins. Raises an error when an earlier step has left state over."""
    if _pending is not None:
        _pending.count_step()


def add_check() -> None:
    """Adds a check to the current graph, while something is to be restored, that its later runs find it restored.

    Once all is restored, the check costs reading one bool.
    """
    pending = _pending
    if pending is None or runtime.current_or_none() is None or not bool(_eager_value(pending.due)):
        return

    def check() -> tf.Tensor:
        pending.count_step()
        return tf.constant(True)

    tf.cond(pending.due.read_value(), lambda: tf.py_function(check, [], tf.bool), lambda: tf.constant(True))


def _eager_value(variable: tf.Variable) -> Any:
    with tf.init_scope():
        return variable.numpy()
