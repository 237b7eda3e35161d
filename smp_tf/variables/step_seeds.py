"""The seeds of random ops in steps, which depend on one seed and on a counter for each step function.

    masks of a microbatch = f(seed, step function, steps done by it, microbatch, replica, op)

A step function is known by its name, and by how many of that name were called before it. So the compiled signatures of
one function (other batch shapes) share a counter, and it makes no difference which shape came first. Seed and counters
are variables that graphs read, so a checkpoint can restore them after a step was traced. Nothing here depends on ranks
or on the number of partitions. Only steps that draw random numbers count.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from smp_tf.job import runtime
from smp_tf.job_state import JobState
from smp_tf.variables import store

_SPREAD = 0x9E3779B97F4A7C15 - (1 << 64)
_MICROBATCHES = 1 << 20


class _State:
    def __init__(self) -> None:
        seed = np.int64(runtime.current().seed)
        self.seed = store.make_script_variable(initial_value=seed, trainable=False, name="smp_seed")
        # Whether a step or a restore has decided the seed.
        self.is_decided = False
        self.names: Counter[str] = Counter()
        self.counters: dict[str, tf.Variable] = {}
        # Counters of a checkpoint whose step functions have not been called yet.
        self.restored: dict[str, int] = {}


_current = JobState(_State)


def name_step(name: str) -> str:
    """Notes a step function when it is first called, and returns what it is known by, such as "train/0".

    Args:
        name: the function's name.
    """
    state = _current()
    known = f"{name}/{state.names[name]}"
    state.names[name] += 1
    return known


def decide_seed(given: int | None) -> None:
    """Takes the script's seed when the first step is prepared, if the script has set one and none was restored.

    Args:
        given: the script's seed, the same on all ranks; None where the seed of `smp.init` stays.
    """
    state = _current()
    if given is not None and not state.is_decided:
        state.seed.assign(given)
    state.is_decided = True


def next_seeds(known: str, replica: int) -> StepSeeds:
    """Counts one more step of a function, in the current graph.

    Args:
        known: what the function is known by, from `name_step`.
        replica: the replica of this rank.

    Returns:
        The seeds of that step's microbatches.
    """
    return _seeds(known, replica, _counter(known).assign_add(1, read_value=True) - 1)


def coming_seeds(known: str, replica: int) -> StepSeeds:
    """Returns the seeds of the next step of a function, in the current graph, without counting a step.

    Args:
        known: what the function is known by, from `name_step`.
        replica: the replica of this rank.
    """
    return _seeds(known, replica, _counter(known).read_value())


def _counter(known: str) -> tf.Variable:
    """Returns the counter of the steps of a function."""
    state = _current()
    if known not in state.counters:
        done = np.int64(state.restored.pop(known, 0))
        state.counters[known] = store.make_script_variable(
            initial_value=done, trainable=False, name=f"{known}_steps".replace("/", "_")
        )
    return state.counters[known]


def _seeds(known: str, replica: int, done_before: tf.Tensor) -> StepSeeds:
    state = _current()
    digest = hashlib.blake2b(f"{known} {replica}".encode(), digest_size=8).digest()
    offset = tf.constant(int.from_bytes(digest, "little", signed=True), tf.int64)
    # Sums and products of int64 wrap around.
    return StepSeeds(state.seed.read_value() * tf.constant(_SPREAD, tf.int64) + offset, done_before)


class StepSeeds:
    """The seeds of one step's microbatches.

    Args:
        base: depends on the seed, the step function and the replica; an int64 scalar.
        done_before: steps of the function before this one; an int64 scalar.
    """

    def __init__(self, base: tf.Tensor, done_before: tf.Tensor) -> None:
        self._base = base
        self._done_before = done_before

    def __call__(self, microbatch: int) -> tf.Tensor:
        """Returns the seed of a microbatch: int64[2]."""
        return tf.stack([self._base, self._done_before * _MICROBATCHES + microbatch])


def state() -> dict[str, Any]:
    """Returns the seed and all counters, as JSON values, for a checkpoint."""
    current = _current()
    counters = {known: int(counter.numpy()) for known, counter in current.counters.items()}
    return {"seed": int(current.seed.numpy()), "steps": {**current.restored, **counters}}


def restore(stored: Mapping[str, Any]) -> None:
    """Restores the seed and counters of a checkpoint, for traced steps and for those to come.

    Args:
        stored: the result of `state`.
    """
    current = _current()
    current.seed.assign(stored["seed"])
    current.is_decided = True
    steps = dict(stored["steps"])
    for known, counter in current.counters.items():
        counter.assign(steps.pop(known, 0))
    current.restored = steps
