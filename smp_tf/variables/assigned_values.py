"""Values that a script assigns to models' variables outside its steps: one rank takes them, and all compare.

    every rank       model.kl_weight.assign(0.5)
    its owner        takes it, and notes it            ┐ compared where all ranks meet anyway: when the callbacks of
    other ranks      leave it out, and note that       ┘ fit have run, and when weights or a checkpoint are saved

A rank may assign without the others to what it stores. So only a variable that some rank has left out is compared.
Notes are hashes. Nothing is noted before the first step, nor of what optimizers, `load_weights` and `set_weights`
assign.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from smp_tf.errors import RankMismatchError
from smp_tf.job import exchange, runtime
from smp_tf.job.content_hash import content_hash
from smp_tf.job_state import JobState
from smp_tf.partition.layout import Layout
from smp_tf.variables.state import VariableState

#: How many variables are named that ranks differ in.
_MOST_NAMES = 5

#: A rank's notes, by the place and name of a variable, such as "3 net/dense/kernel", since two models may have
#: variables with the same name. A note is how many values were assigned since ranks compared them, a hash of these, and
#: the stage that stores the variable.
Notes = dict[str, tuple[int, str, int]]


class _InForce(threading.local):
    is_quiet = False


_in_force = _InForce()


@contextlib.contextmanager
def unnoted() -> Iterator[None]:
    """Notes nothing within its context, since smp_tf or an optimizer assigns there."""
    before, _in_force.is_quiet = _in_force.is_quiet, True
    try:
        yield
    finally:
        _in_force.is_quiet = before


class _Noted:
    def __init__(self) -> None:
        self.taken: Notes = {}
        self.left_out: Notes = {}


_noted = JobState(_Noted)


def note(state: VariableState, method: str, given: Any, dtype: tf.DType, *, is_left_out: bool) -> None:
    """Notes that the script assigns to a variable of a model, outside any graph.

    Args:
        state: state of the variable, whose owner is known.
        method: the method of `tf.Variable` that was called.
        given: the arguments of the call.
        dtype: type of the variable.
        is_left_out: whether the variable is another rank's, so that nothing is assigned here.
    """
    running = runtime.current_or_none()
    if _in_force.is_quiet or running is None or running.topology.stages == 1:
        return
    notes = _noted().left_out if is_left_out else _noted().taken
    assert state.owner is not None
    key = f"{state.storage.number} {state.name}"
    count, before, _ = notes.get(key, (0, "", state.owner))
    parts = [_hash(value, dtype) for value in tf.nest.flatten(given, expand_composites=True)]
    told = hashlib.blake2b(repr((before, method, parts)).encode(), digest_size=8).hexdigest()
    notes[key] = count + 1, told, state.owner


def left_out() -> Notes:
    """Returns what this rank has left out since the last comparison."""
    return _noted().left_out


def compare(left: Sequence[Mapping[str, Sequence[Any]]]) -> None:
    """Raises an error where ranks were not given the same values. All ranks of the world call it.

    Args:
        left: what each rank has left out, in rank order.

    Raises:
        RankMismatchError: a variable's owner was not given what another rank has left out. The message names both.
    """
    keys = sorted({key for notes in left for key in notes}, key=lambda key: int(key.partition(" ")[0]))
    noted = _noted()
    mine = {key: noted.taken[key] for key in keys if key in noted.taken}
    noted.taken.clear()
    noted.left_out.clear()
    if not keys:
        return
    taken = exchange.allgather_json(mine, name="what the script has assigned to variables of models")
    differences = [words for key in keys if (words := _difference(key, left, taken))]
    if differences:
        raise RankMismatchError(_in_words(differences))


def _difference(
    key: str, left: Sequence[Mapping[str, Sequence[Any]]], taken: Sequence[Mapping[str, Sequence[Any]]]
) -> str:
    """Returns words for a rank that left out something else than an owner was given; "" where none did."""
    topology = runtime.current().topology
    for rank, notes in enumerate(left):
        if key not in notes:
            continue
        count, told, stage = notes[key]
        for owner, owned in enumerate(taken):
            if not Layout(stage).is_here(topology.mesh.coordinates(owner)):
                continue
            there, said = owned.get(key, (0, "", stage))[:2]
            if (count, told) != (there, said):
                what = "others" if count == there else _times(there)
                name = key.partition(" ")[2]
                return f"{name!r}: {_times(count)} on rank {rank}, {what} on rank {owner}, which stores it"
    return ""


def _times(count: int) -> str:
    return {0: "nothing", 1: "1 value"}.get(count, f"{count} values")


def _in_words(differences: Sequence[str]) -> str:
    more = f"; and {len(differences) - _MOST_NAMES} more" if len(differences) > _MOST_NAMES else ""
    return (
        f"The ranks do not assign the same to variables of models: {'; '.join(differences[:_MOST_NAMES])}{more}. Call "
        f"assign, K.set_value or layer.set_weights on every rank with the same value: the rank that stores the "
        f"variable takes it, and the others leave it out. Let nothing in the value depend on the rank."
    )


def _hash(value: Any, dtype: tf.DType) -> int:
    # Besides texts there may be numbers, which say where the texts go.
    is_text = dtype == tf.string
    tensor = tf.convert_to_tensor(value) if is_text or tf.is_tensor(value) else tf.convert_to_tensor(value, dtype)
    return int(content_hash(tensor)[0])
