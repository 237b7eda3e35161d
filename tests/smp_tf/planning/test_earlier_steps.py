"""What a later step goes by: where earlier steps have put its variables, or else where they are kept."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import tensorflow as tf

from smp_tf.planning import earlier_steps
from smp_tf.variables.store import VariableStore
from tests.smp_tf.variables.test_store import settle

pytestmark = pytest.mark.usefixtures("keras_defaults")


@pytest.fixture
def lowered() -> Any:
    """Three variables of a model, of which a step has used the first two; the graph has all of them."""
    store, made = VariableStore("net"), [tf.Variable([float(number)]) for number in range(3)]
    for variable in made:
        store.adopt(variable)
    settle(store, {0: 0, 1: 1}, stage=1, seed=0, chunks=(0, 1))
    # The store lives as long as the graph.
    return SimpleNamespace(variables=made, store=store)


def test_a_step_goes_by_what_was_decided(lowered: Any) -> None:
    """Bug: a layer that no step had used counted as placed, and later steps were refused for it."""
    used = {0, 1, 2}
    assert earlier_steps.chunks_of(lowered, used) == {0: 0, 1: 1}
    assert not earlier_steps.are_decided(lowered, used)
    assert earlier_steps.placement(lowered, used) == (0, 1)


def test_a_variable_that_the_step_does_not_use_is_nothing_to_go_by(lowered: Any) -> None:
    assert earlier_steps.chunks_of(lowered, {1}) == {1: 1}
    assert earlier_steps.are_decided(lowered, {0, 1})


def test_a_step_that_uses_only_what_is_kept_goes_by_that_unless_it_has_a_plan(lowered: Any) -> None:
    assert earlier_steps.chunks_of(lowered, {2}) == {2: 1}
    assert earlier_steps.placement(lowered, {2}) == (0, 1)
    assert not earlier_steps.are_decided(lowered, {2})
    assert earlier_steps.chunks_of(lowered, {2}, decided_only=True) == {}
