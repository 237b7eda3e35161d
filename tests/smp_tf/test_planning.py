"""Where units go: solved at first, then where an earlier step put their variables."""

from __future__ import annotations

import pytest

from smp_tf.partition.errors import PlacementError
from smp_tf.planning import PlacementRequest, cut, propose
from tests.partition.op_graph_builder import chain_of_dense

TWO = PlacementRequest(stages=2, microbatches=2, schedule="simple", objective="memory", slots=0.0)


def test_the_first_step_leaves_no_stage_empty() -> None:
    plan = propose(chain_of_dense(4), TWO, {})
    assert list(plan.units.values()) == [0, 0, 1, 1]


@pytest.mark.parametrize("stage", [0, 1])
def test_a_step_whose_variables_are_all_on_one_stage_stays_there(stage: int) -> None:
    graph = chain_of_dense(3)
    plan = propose(graph, TWO, dict.fromkeys(range(3), stage))
    assert set(plan.units.values()) == {stage}
    assert set(plan.owners.values()) == {stage}
    assert {of for of, _ in cut(graph, plan).segments} == {stage}


def test_units_follow_the_owners_of_an_earlier_step() -> None:
    plan = propose(chain_of_dense(4), TWO, {0: 0, 1: 1, 2: 1, 3: 1})
    assert list(plan.units.values()) == [0, 1, 1, 1]


def test_new_units_fill_the_stages_that_the_decided_ones_leave() -> None:
    plan = propose(chain_of_dense(4), TWO, {0: 0, 1: 0})
    assert list(plan.units.values()) == [0, 0, 1, 1]


def test_new_units_follow_their_neighbours_where_no_other_cut_is_left() -> None:
    plan = propose(chain_of_dense(3), TWO, {0: 1, 1: 1})
    assert list(plan.units.values()) == [1, 1, 1]


def test_owners_against_the_flow_of_data_are_an_error_that_names_the_earlier_step() -> None:
    words = (
        r"An earlier step put the variables of 'net/dense_0' on stage 1 and those of 'net/dense_1' on stage 0.*"
        r"Run the step that uses all of these layers first"
    )
    with pytest.raises(PlacementError, match=words):
        propose(chain_of_dense(2), TWO, {0: 1, 1: 0})
