"""Where units go: solved at first, then where an earlier step put their variables."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import pytest

from smp_tf.partition.errors import MemoryLimitError, PlacementError
from smp_tf.partition.graph.op_graph import OpGraph
from smp_tf.partition.place.placement import Ranks
from smp_tf.partition.plan.plan import Plan
from smp_tf.partition.plan.plan_file import PlanFile, to_store
from smp_tf.partition.rewrite.prune import prune
from smp_tf.pipeline.planner import request as requests
from smp_tf.pipeline.planner.cut import cut, cut_into_units
from smp_tf.pipeline.planner.plan import planned
from smp_tf.pipeline.planner.proposal import propose
from smp_tf.pipeline.planner.request import Aim, Course, PlacementRequest, Storage
from smp_tf.pipeline.planner.times_by_size import UnitTimes
from tests.partition.linear_layers import linear_layers
from tests.partition.op_graph_builder import GraphBuilder, chain_of_dense

TWO = PlacementRequest(Course("simple", 2, 2), Storage(slots=0.0), Aim("memory"))


def test_the_first_step_leaves_no_stage_empty() -> None:
    plan = propose(chain_of_dense(4), TWO, {})
    assert list(plan.units.values()) == [0, 0, 1, 1]


@pytest.mark.parametrize("stage", [0, 1])
def test_a_step_whose_variables_are_all_on_one_stage_stays_there(stage: int) -> None:
    graph = chain_of_dense(3)
    plan = propose(graph, TWO, dict.fromkeys(range(3), stage))
    assert set(plan.units.values()) == {stage}
    assert set(plan.owners.values()) == {stage}
    assert {of for of, _, _ in cut(graph, plan).segments} == {stage}


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
        r"Let a step that uses all of these layers run first: it then decides for the others\. One call of predict"
    )
    with pytest.raises(PlacementError, match=words):
        propose(chain_of_dense(2), TWO, {0: 1, 1: 0})


def test_layers_that_need_nothing_of_each_other_follow_their_owners_in_whatever_order_they_are_called() -> None:
    """The attention bias of a T5, which depends on no activations, was said to feed a layer of an earlier stage."""
    b = GraphBuilder()
    x = b.argument()
    net = b.call("net", class_name="Model")
    first, bias, norm, last = (
        b.dense(given, b.variable(f"net/{name}/kernel"), b.call(f"net/{name}", net))
        for name, given in (("first", x), ("bias", x), ("norm", x), ("last", x))
    )
    joined = b.add("AddN", first, bias, norm, last, call=net)
    graph = b.graph(b.add("Mean", joined, shape=()))
    plan = propose(graph, TWO, {0: 0, 1: 1, 2: 0, 3: 1})
    assert {name: plan.units[f"net/{name}"] for name in ("first", "bias", "norm", "last")} == {
        "first": 0, "bias": 1, "norm": 0, "last": 1,
    }  # fmt: skip
    assert {of for of, _, _ in cut(graph, plan).segments} == {0, 1}


def towers(*sizes: int) -> OpGraph:
    """Dense layers of so many outputs, each of the same input, whose outputs are joined."""
    builder = GraphBuilder()
    model = builder.call("net", class_name="Model")
    x = builder.argument((4, 64))
    ends = []
    for number, size in enumerate(sizes):
        layer = builder.call(f"net/dense_{number}", model, class_name="Dense")
        kernel = builder.read(builder.variable(f"net/dense_{number}/kernel", (64, size)), layer)
        ends.append(builder.add("MatMul", x, kernel, call=layer, shape=(4, size)))
    join = builder.call("net/join", model, class_name="Concatenate")
    return builder.graph(builder.add("ConcatV2", *ends, call=join, shape=(4, sum(sizes))))


def test_branches_are_placed_beside_each_other_and_cut() -> None:
    graph = towers(400, 200, 400, 200)
    three = TWO.changed(stages=3, proof_seconds=1.0, thorough=True)
    plan = propose(graph, three, {})
    assert sorted(row.weight_bytes // 256 for row in plan.forecast) == [400, 400, 400]
    assert plan.gap == pytest.approx(0.0, abs=1e-6)
    # The list in a plan file is in the order of the stages, and is read again as it is.
    assert list(plan.units.values()) == sorted(plan.units.values())
    given = PlanFile.from_json(PlanFile(3, (to_store("train", plan, graph),)).to_json()).plans[0]
    assert propose(graph, three.changed(given=given), {}).units == plan.units
    transfers = cut(graph, plan, frozenset({0})).transfers
    assert {(t.src_chunk, t.dst_chunk) for t in transfers if t.tensor is not None} == {(0, 2), (1, 2)}
    # A later step finds its units where the first one put them.
    owners = {v.index: plan.owners[v.name] for v in graph.variables}
    assert propose(graph, three, owners).units == plan.units


def test_measured_times_move_the_cut_and_are_said() -> None:
    graph = chain_of_dense(4)
    estimated = propose(graph, TWO.changed(objective="speed"), {})
    assert list(estimated.units.values()) == [0, 0, 1, 1]
    measured = {"net/dense_0": (0.9, 0.9), **{f"net/dense_{n}": (0.1, 0.1) for n in (1, 2, 3)}}
    plan = propose(graph, TWO.changed(objective="speed", times=UnitTimes(measured)), {})
    assert list(plan.units.values()) == [0, 1, 1, 1]
    assert plan.reasons[-1] == "the times are measured ones, of 4 of the 4 units"
    assert not any("measured" in reason for reason in estimated.reasons)


def test_cut_into_units_every_unit_is_a_stage() -> None:
    units, done = cut_into_units(chain_of_dense(3))
    assert [unit.name for unit in units] == ["net/dense_0", "net/dense_1", "net/dense_2"]
    assert sorted(done.segments) == [(stage, sweep, 0) for stage in range(3) for sweep in (0, 1)]


def by_hand(default: int = 0) -> PlacementRequest:
    return TWO.changed(default=default)


def test_by_hand_what_the_script_has_not_placed_is_on_the_default_partition() -> None:
    assert list(propose(chain_of_dense(4, stages=[None, 0, 1, 1]), by_hand(), {}).units.values()) == [0, 0, 1, 1]
    assert list(propose(chain_of_dense(4, stages=[0, None, None, None]), by_hand(1), {}).units.values()) == [0, 1, 1, 1]


def test_by_hand_a_partition_is_visited_once() -> None:
    words = (
        r"auto_partition is false, and 'net/dense_2' is outside any smp\.partition, and so on default_partition 0, "
        r"while what comes before it, 'net/dense_1', is on partition 1\..*cannot come back"
    )
    with pytest.raises(PlacementError, match=words):
        propose(chain_of_dense(3, stages=[0, 1, None]), by_hand(), {})


def test_by_hand_every_partition_has_a_layer() -> None:
    with pytest.raises(PlacementError, match=r"no layer is on partition 1 of 2\. Place one there with smp\.partition"):
        propose(chain_of_dense(3), by_hand(), {})


def test_with_one_partition_nothing_is_placed_by_hand() -> None:
    one = by_hand().changed(stages=1)
    assert set(propose(chain_of_dense(3, stages=[0, 1, None]), one, {}).units.values()) == {0}


# Four dense layers of which the first takes the longest: the fastest cut needs at most 3738 bytes, of which 2560 are
# known before the cut; the smallest 2952.
SLOW_FIRST = {"net/dense_0": (0.9, 0.9), **{f"net/dense_{n}": (0.1, 0.1) for n in (1, 2, 3)}}
FASTEST, SMALLEST = [0, 1, 1, 1], [0, 0, 1, 1]


def limited(request: PlacementRequest, limit: int | None) -> PlacementRequest:
    """The request, with a limit for every rank."""
    return request.changed(ranks=Ranks.alike(request.course.stages, limit))


class TestMemoryLimit:
    def plan(self, limit: int | None, objective: str = "speed", **changes: Any) -> Plan:
        request = TWO.changed(objective=objective, times=UnitTimes(SLOW_FIRST), **changes)
        return propose(chain_of_dense(4), limited(request, limit), {})

    @pytest.mark.parametrize(
        ("limit", "stages"), [(None, FASTEST), (3738, FASTEST), (3737, SMALLEST), (2952, SMALLEST)]
    )
    def test_the_fastest_cut_that_keeps_within_it_is_taken(self, limit: int | None, stages: list[int]) -> None:
        """Also where the solver's bytes keep within it, and those of the cut do not."""
        plan = self.plan(limit)
        assert list(plan.units.values()) == stages
        assert plan.objective == "speed"
        priced = any("rules out the cut that would be best" in reason for reason in plan.reasons)
        assert priced == (stages != FASTEST)
        unknown = "nothing is proved of it: what stages receive and work with is known only when a model is cut"
        assert (unknown in plan.reasons) == priced

    @pytest.mark.parametrize("objective", ["speed", "memory"])
    def test_where_no_cut_keeps_within_it_the_error_says_what_each_stage_needs(self, objective: str) -> None:
        with pytest.raises(MemoryLimitError) as raised:
            self.plan(2951, objective)
        assert "memory_limit is 2.9 KiB (2,951 bytes) a rank" in str(raised.value)
        alone = "; net/dense_1 alone keeps 57%" if objective == "memory" else ""
        assert str(raised.value).splitlines()[1:3] == [
            "  stage 0: 2.9 KiB, 1 B too much (weights 512 B, gradients 512 B, stash 512 B, transport 264 B, "
            f"work 1.1 KiB) for dense_0, dense_1{alone}",
            "  stage 1: 2.9 KiB, 1 B too much (weights 512 B, gradients 512 B, stash 768 B, transport 8 B, "
            "work 1.1 KiB) for dense_2, dense_3",
        ]

    def test_one_partition_has_a_limit_too(self) -> None:
        with pytest.raises(MemoryLimitError, match=r"with 1 partition the ranks need\n  stage 0: .* dense_0 … dense_3"):
            self.plan(3000, stages=1)

    def test_a_later_step_that_may_choose_nothing_is_refused_too(self) -> None:
        with pytest.raises(MemoryLimitError):
            propose(chain_of_dense(4), limited(TWO, 2000), {0: 0, 1: 0, 2: 1, 3: 1})

    def test_what_would_fit_is_said(self) -> None:
        with pytest.raises(MemoryLimitError) as raised:
            self.plan(2030)
        assert str(raised.value).splitlines()[-1] == "What would fit: 4 partitions; or a memory_limit of 2.9 KiB."
        assert max(row.stored_bytes for row in self.plan(None, objective="memory").forecast) <= 2.9 * 1024
        for stages, fits in ((3, False), (4, True)):
            with contextlib.nullcontext() if fits else pytest.raises(MemoryLimitError):
                propose(chain_of_dense(4), limited(TWO.changed(stages=stages), 2030), {})

    def test_another_schedule_may_fit(self) -> None:
        many = TWO.changed(microbatches=16)
        fits = 'What would fit: pipeline "interleaved"; or a memory_limit of 10.5 KiB'
        with pytest.raises(MemoryLimitError, match=fits):
            propose(chain_of_dense(4), limited(many, 5000), {})
        propose(chain_of_dense(4), limited(many.changed(schedule="interleaved"), 5000), {})

    def test_what_is_proved_within_the_limit_is_said(self) -> None:
        """Where a limit ruled out the best cut nothing was said of what is proved."""
        times = {f"net/dense_{n}": (0.1, 0.1) if n else (0.9, 0.9) for n in range(6)}
        request = TWO.changed(objective="speed", times=UnitTimes(times), slots=4.0)
        plan = propose(chain_of_dense(6, width=64, batch=1), limited(request, 352_000), {})
        assert (list(plan.units.values()), plan.gap) == ([0, 0, 0, 1, 1, 1], None)
        assert (
            plan.reasons[-1] == "within memory_limit no other placement makes the step shorter, by the times of layers"
        )

    @pytest.mark.parametrize("limit", [1900, 2200, 2400, 2600])
    def test_a_cut_that_fits_is_found_although_the_first_one_seems_to(self, limit: int) -> None:
        """With 2400 bytes the same cut came again, with 1900 too much was taken off: the model was said not to fit."""
        ranks = Ranks((1.0, 1.0), (1.0, 1.0), (None, float(limit)))
        plan = propose(chain_of_dense(4), TWO.changed(ranks=ranks), {})
        assert list(plan.units.values()) == [0, 0, 0, 1]

    def test_each_rank_has_a_limit_of_its_own(self) -> None:
        ranks = Ranks((1.0, 1.0), (1.0, 1.0), (None, 2000.0))
        plan = propose(chain_of_dense(4), TWO.changed(ranks=ranks), {})
        assert list(plan.units.values()) == [0, 0, 0, 1]
        with pytest.raises(
            MemoryLimitError, match=r"ranks may need as listed(.|\n)*stage 1: [0-9.]+ KiB of 100 B \(memory_limit\), "
        ):
            propose(chain_of_dense(4), TWO.changed(ranks=Ranks((1.0,) * 2, (1.0,) * 2, (None, 100.0))), {})


class TestGivenPlan:
    def given(self, stages: list[int], layers: int = 4, **changes: Any) -> PlacementRequest:
        graph = chain_of_dense(layers)
        stored = to_store("train", propose(graph, TWO, {}), graph)
        units = dict(zip(stored.units, stages, strict=True))
        return TWO.changed(given=dataclasses.replace(stored, units=units, **changes))

    def test_it_is_the_plan(self) -> None:
        plan = propose(chain_of_dense(4), self.given([0, 1, 1, 1]), {})
        assert list(plan.units.values()) == [0, 1, 1, 1]
        said = "the placement is that of the plan that was loaded; moved by hand: net/dense_1 from partition 0 to 1"
        assert said in plan.reasons
        assert said.partition(";")[0] in propose(chain_of_dense(4), self.given([0, 0, 1, 1]), {}).reasons
        assert plan.owners == {"net/dense_0/kernel": 0, **{f"net/dense_{n}/kernel": 1 for n in (1, 2, 3)}}
        assert [row.units for row in plan.forecast] == [1, 3]

    def test_what_was_written_is_the_same_plan_again_with_its_forecast(self) -> None:
        graph = chain_of_dense(4)
        plan = propose(graph, TWO, {})
        again = propose(graph, self.given([0, 0, 1, 1]), {})
        assert again.reasons == (*plan.reasons, "the placement is that of the plan that was loaded")
        assert dataclasses.replace(again, reasons=plan.reasons, gap=plan.gap) == plan
        assert (plan.gap, again.gap) == (0.0, None)

    def test_the_owner_of_a_shared_variable_is_that_of_the_file(self) -> None:
        graph = tied_chain()
        plan = propose(graph, TWO, {})
        [shared] = [s for s in plan.shared if s.copies]
        stored = to_store("train", plan, graph)
        for owner in (0, 1):
            given = dataclasses.replace(stored, shared={shared.name: owner})
            again = propose(graph, TWO.changed(given=given), {})
            assert again.owners[shared.name] == owner
            assert again.shared[0].copies == (1 - owner,)

    def test_an_owner_without_use_is_refused(self) -> None:
        graph = tied_chain()
        three = TWO.changed(stages=3)
        stored = to_store("train", propose(graph, three, {}), graph)
        units = dict(zip(stored.units, (0, 1, 1, 2), strict=True))
        given = dataclasses.replace(stored, units=units, shared={"net/table": 1})
        with pytest.raises(PlacementError, match=r"'net/table' to partition 1, .* Those of partitions 0 and 2 do"):
            propose(graph, three.changed(given=given), {})

    def test_a_partition_without_a_layer_is_refused(self) -> None:
        with pytest.raises(PlacementError, match=r"puts no layer on partition 1 of 2"):
            propose(chain_of_dense(4), self.given([0, 0, 0, 0]), {})

    def test_what_an_earlier_step_decided_is_kept(self) -> None:
        with pytest.raises(PlacementError, match=r"'net/dense_1' on partition 1\. An earlier step put its var"):
            propose(chain_of_dense(4), self.given([0, 1, 1, 1]), {1: 0})

    def test_it_does_not_override_the_script(self) -> None:
        graph = chain_of_dense(4, stages=[None, 0, None, None])
        with pytest.raises(PlacementError, match=r"'net/dense_1' on partition 1, and smp\.partition in the "):
            propose(graph, self.given([0, 1, 1, 1]), {})

    def test_the_memory_limit_holds_for_it(self) -> None:
        request = limited(self.given([0, 1, 1, 1]), 3000)
        with pytest.raises(MemoryLimitError, match=r"stage 1: 3\.7 KiB, 738 B too much"):
            propose(chain_of_dense(4), request, {})


def tied_chain() -> OpGraph:
    """Four dense layers; the last one multiplies with the weight of the first."""
    b = GraphBuilder()
    net = b.call("net", class_name="Model")
    table = b.variable("net/table")
    handles = [table, b.variable("net/b"), b.variable("net/c"), table]
    x = b.argument((4, 8))
    for number, handle in enumerate(handles):
        x = b.dense(x, handle, b.call(f"net/layer_{number}", net))
    return b.graph(b.add("Mean", x, shape=()))


def test_a_weight_that_only_its_gradient_speaks_of_is_placed_where_the_layer_is() -> None:
    """Bug: the forward pass of a linear layer was pruned, and its weight given to stage 0, without a gradient there."""
    graph = prune(linear_layers())
    assert [graph.calls[node.call].path for node in graph.nodes if node.op == "MatMul" and not node.backward] == [
        "net/dense_0",
        "net/dense_1",
    ]
    plan = propose(graph, TWO, {})
    assert plan.owners == {"net/dense_0/kernel": 0, "net/dense_1/kernel": 1}
    assert [output.chunk for output in cut(graph, plan).outputs] == [1]


def test_more_stages_than_units_are_refused_before_there_is_a_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tasks of 100,000 stages were made, of a model with a dozen layers."""

    def made(*_: object) -> None:
        raise AssertionError("no schedule is to be made")

    monkeypatch.setattr(requests, "placement_of", made)
    with pytest.raises(PlacementError, match=r"The model has 4 units .* Received: partitions=100000;"):
        planned(chain_of_dense(4), TWO.changed(stages=100_000), {})
