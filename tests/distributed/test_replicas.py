"""Replicas that each train on a part of the batch give the weights of one process on the whole."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from tests.distributed.harness import Case, CaseResult, launch
from tests.docs.pages import page

CASES = "tests.distributed.cases.replicas"
#: Of weights. Adam divides by gradients that are nearly zero, so those of float32 differ by more than losses.
TOLERANCE = {"mlp": 1e-12, "mlp_adam_float32": 1e-4, "sparse_embedding": 1e-9}
#: Of losses, at most.
LOSSES = 1e-5
#: Replicas whose shares differ in size: the model, and whether its step is called eagerly, by partitions and replicas.
SHARES = {(1, 2): ("mlp", True), (2, 2): ("sparse_embedding", False)}
#: What replicas train on equal shares, by partitions and replicas, without --full: on two partitions one lays ranks out
#: by stage, and of sparse gradients there are shares of other sizes, and replicas that share slots.
ALIKE_QUICKLY = {(1, 1): ("mlp", "mlp_adam_float32"), (1, 2): ("mlp_adam_float32",)}


def cases(partitions: int, replicas: int, full: bool, strategy: str = "cluster") -> list[Case]:
    config = {"partitions": partitions, "microbatches": 2, "seed": 1, "placement_strategy": strategy}
    here = (partitions, replicas)
    models = TOLERANCE if full else ALIKE_QUICKLY.get(here, ())
    alike = [Case(model, "train", {"model": model}, config) for model in models]
    wanted = [case for key, case in SHARES.items() if here in (key, (1, 1))]
    shares = [
        Case(f"shares, {model}", "train_on_shares", {"model": model, "eager": eager and replicas > 1}, config)
        for model, eager in wanted
    ]
    return alike + shares


#: Ranks of the stages of replica 0 and of replica 1, on six processes and three partitions. With one tensor shard,
#: what counts is whether D or P comes first.
BY_REPLICA, BY_STAGE = [[0, 1, 2], [3, 4, 5]], [[0, 2, 4], [1, 3, 5]]
LAYOUTS = {
    **dict.fromkeys(("DPT", "DTP", "TDP"), BY_REPLICA),
    **dict.fromkeys(("PDT", "PTD", "TPD"), BY_STAGE),
}


def place_cases() -> list[Case]:
    common = {"partitions": 3, "microbatches": 2, "seed": 1}
    return [Case(layout, "places", {}, {**common, "placement_strategy": layout}) for layout in LAYOUTS]


OWN_GRADIENTS = Case("own gradients", "own_gradients", {}, {"partitions": 1, "microbatches": 2})
TWICE = Case("called twice", "called_twice", {}, {"partitions": 1, "microbatches": 2})
SLICES = Case("slices", "few_and_many_slices", {}, {"partitions": 1, "microbatches": 2})
SLICES_ON_HOST = Case("slices beside a GPU", SLICES.function, {"as_beside_a_gpu": True}, SLICES.config)
RETRACED = [
    Case(f"retraced, {kind}", "traced_once_more", {}, {"partitions": 1, "gradient_compression": kind})
    for kind in (None, "bf16")
]


def compressed(partitions: int, full: bool) -> list[Case]:
    config = {"partitions": partitions, "microbatches": 2, "seed": 1}
    return [
        Case(f"compressed as {kind}", "gradients", {}, {**config, "gradient_compression": kind})
        for kind in (None, "bf16", *(["fp16"] if full else []))
    ]


UNEQUAL = [
    Case(f"unequal shapes, {kind}", "unequal_shapes", {}, {"partitions": 1, "gradient_compression": kind})
    for kind in (None, "bf16")
]
BY_STAGE_FIRST = Case(
    "by stage first",
    "train",
    {"model": "mlp"},
    {"partitions": 2, "microbatches": 2, "seed": 1, "placement_strategy": "PDT"},
)
#: Other schedules than the usual one, by partitions and replicas; every one on every grid runs with --full.
SCHEDULED = {(2, 2): "zb_h1", (1, 4): "simple"}
UNLIKE = [
    Case(f"unlike optimizers{', shared slots' * shared}", "unlike_optimizers", {}, {"partitions": 1, **more})
    for shared, more in ((False, {}), (True, {"shard_optimizer_state": True}))
]
LOADED = [
    Case(f"loaded by one, {root}", "loaded_by_one", {"root": root}, {"partitions": 2, "check_replicas": False})
    for root in (0, 1)
]
ODD_TYPES = [
    Case(f"odd types, {'shared slots' if shared else 'offload'}", "odd_types", {}, {"partitions": 1, **more})
    for shared, more in (
        (False, {"gradient_offload": True, "gradient_compression": "bf16"}),
        (True, {"shard_optimizer_state": True}),
    )
]
WAY = Case("way of a gradient", "way_of_a_gradient", {}, {"partitions": 2, "microbatches": 2})
SHUFFLED = Case("shuffled shares", "shuffled_shares", {}, {"partitions": 2, "microbatches": 2})


class Launches:
    """The launches of this file, each made once, with all cases that its number of ranks is for."""

    def __init__(self, full: bool) -> None:
        self.full = full
        self._made: dict[tuple[int, int], dict[str, CaseResult]] = {}

    def of(self, partitions: int, replicas: int) -> dict[str, CaseResult]:
        """The results on so many partitions and replicas."""
        key = partitions, replicas
        if key not in self._made:
            strategy = "PDT" if key == (3, 2) else "cluster"
            more = {
                (3, 2): place_cases(),
                (2, 2): [WAY, SHUFFLED, BY_STAGE_FIRST, *LOADED, *(compressed(2, True) if self.full else [])],
                (1, 2): [
                    *(OWN_GRADIENTS, TWICE, SLICES, SLICES_ON_HOST),
                    *(*RETRACED, *compressed(1, self.full), *UNEQUAL, *UNLIKE, *ODD_TYPES),
                ],
            }.get(key, [])
            # Four replicas are there for their schedule.
            listed = [] if replicas == 4 else [*cases(partitions, replicas, self.full, strategy), *more]
            if key in SCHEDULED:
                listed.append(scheduled_case(partitions, SCHEDULED[key], "mlp"))
            # Often: otherwise many buckets of a step come in one cycle. As often as users have it (1) takes a third of
            # the time of all.
            cycle = {"HOROVOD_CYCLE_TIME": "5"} if key == (2, 2) else {}
            self._made[key] = launch(partitions * replicas, CASES, listed, environment=cycle)
        return self._made[key]


@pytest.fixture(scope="module")
def launches(request: pytest.FixtureRequest) -> Launches:
    """The launches of this file."""
    return Launches(request.config.getoption("--full"))


@pytest.mark.parametrize(("partitions", "replicas"), [(1, 2), (2, 2), pytest.param(3, 2, marks=pytest.mark.full)])
def test_weights_are_those_of_one_process(launches: Launches, partitions: int, replicas: int) -> None:
    """Horovod once refused float32 gradients: the sum of their weights is a float64; and sparse ones were refused.

    Replicas once had to have batches of the same size.
    """
    for case in cases(partitions, replicas, launches.full):
        [wanted] = launches.of(1, 1)[case.name].values()
        compare(launches.of(partitions, replicas)[case.name], wanted, TOLERANCE[case.arguments["model"]])


def test_ranks_that_are_laid_out_by_stage_give_the_weights_of_one_process(launches: Launches) -> None:
    [wanted] = launches.of(1, 1)["mlp"].values()
    found = launches.of(2, 2)["by stage first"]
    compare(found, wanted, TOLERANCE["mlp"])
    assert [rank["stage"] for rank in found.values()] == [0, 0, 1, 1]


def test_a_gradient_goes_the_way_that_is_written(launches: Launches) -> None:
    *_, way = page("docs/how_it_works.md").split("## Be a gradient\n")[1].split("\n## ")[0].split("<!-- way: ")
    written = re.findall(r"^\d+\. `([\w/]+\.py)`", way, re.MULTILINE)
    found = [rank["way"] for rank in launches.of(2, 2)["way of a gradient"].values()]
    assert found == [written, None, written, None]


def compare(found: CaseResult, wanted: dict[str, Any], tolerance: float) -> None:
    """Every replica has the weights of one process, and their losses, by samples, are those of its batches."""
    ranks = found.values()
    # Bug: one that evaluated alone, and took a gradient for that, counted as one step further on.
    assert len({rank.get("averages") for rank in ranks}) == 1
    replicas = [[rank for rank in ranks if rank["replica"] == number] for number in {rank["replica"] for rank in ranks}]
    for replica in replicas:
        got: dict[str, np.ndarray] = {}
        for rank in replica:
            got |= rank["variables"]
            assert rank["losses"] == replica[0]["losses"]
        assert got.keys() == wanted["variables"].keys()
        for name, value in wanted["variables"].items():
            where = f"{found.case.name}, {name}"
            np.testing.assert_allclose(got[name], value, rtol=tolerance, atol=tolerance, err_msg=where)
    for step, (loss, samples) in enumerate(wanted["losses"]):
        told = [replica[0]["losses"][step] for replica in replicas]
        assert sum(count for _, count in told) == samples
        found_loss = sum(one * count for one, count in told) / samples
        np.testing.assert_allclose(found_loss, loss, rtol=min(LOSSES, max(tolerance, 1e-9)))


@pytest.mark.parametrize(("case", "few"), [(SLICES, [0, 1, 1, 1]), (SLICES_ON_HOST, [0, 1])])
def test_sparse_gradients_are_sent_sparse_while_that_is_less(launches: Launches, case: Case, few: list[int]) -> None:
    """Of a linear loss, whose gradients need nothing of the model; they were not averaged at all."""
    for rank in launches.of(1, 2)[case.name].values():
        # Four samples, a slice of each, and a mean over two columns.
        assert rank["few"] == [few, [0.125, 0.375, 0.0], [0.625, 1.875, 0.0]]
        # Of 24 samples four have the first row, and none has the second.
        assert rank["many"][0] == [0, 2]
        np.testing.assert_allclose(rank["many"][1:], [[2 / 24, 0.0, 10 / 24], [10 / 24, 0.0, 50 / 24]], rtol=1e-6)


#: Partitions and replicas on which every schedule is tried.
GRIDS = [(1, 2), (1, 4), (2, 2), (2, 3), (3, 2), (4, 2)]


def scheduled_case(partitions: int, schedule: str, model: str = "gpt") -> Case:
    # A multiple of the partitions, as interleaved_1f1b wants it.
    config = {"partitions": partitions, "microbatches": max(2, partitions), "pipeline": schedule, "seed": 1}
    return Case(schedule, "train_on_shares", {"model": model, "eager": True}, config)


@pytest.mark.parametrize(("partitions", "replicas"), SCHEDULED)
def test_other_schedules_give_the_weights_of_one_process(launches: Launches, partitions: int, replicas: int) -> None:
    [wanted] = launches.of(1, 1)["shares, mlp"].values()
    compare(launches.of(partitions, replicas)[SCHEDULED[partitions, replicas]], wanted, TOLERANCE["mlp"])


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("partitions", "replicas"), GRIDS)
def test_every_schedule_on_shares_of_any_size(partitions: int, replicas: int) -> None:
    from smp_tf.pipeline.schedules.schedule import SCHEDULES

    alone = launch(1, CASES, [scheduled_case(1, "simple")])
    [wanted] = alone["simple"].values()
    cases = [scheduled_case(partitions, schedule) for schedule in SCHEDULES]
    for result in launch(partitions * replicas, CASES, cases).values():
        compare(result, wanted, 1e-9)


# Six processes. By default the layouts are looked at in one (tests/smp_tf/job/test_topology.py).
@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_puts_stages_and_replicas_where_its_letters_say(launches: Launches, layout: str) -> None:
    stages = LAYOUTS[layout]
    replicas = [list(ranks) for ranks in zip(*stages, strict=True)]
    for rank, told in enumerate(launches.of(3, 2)[layout].values()):
        [(replica, stage)] = [(d, p) for d, p in np.ndindex(2, 3) if stages[d][p] == rank]
        assert told["place"] == [stage, replica]
        assert told["sizes"] == [3, 2, 3, 1, 2]
        assert told["groups"] == told["heard"] == [stages[replica], replicas[stage]]


@pytest.mark.full
def test_partition_i_is_on_mp_rank_i(launches: Launches) -> None:
    """The layers of the model in order, on ranks that are laid out by stage."""
    by_stage = {rank["stage"]: min(map(int, rank["variables"])) for rank in launches.of(3, 2)["mlp"].values()}
    assert by_stage[0] < by_stage[1] < by_stage[2]


def test_a_shuffled_data_set_is_shared_out_alike_in_a_replica_and_wholly_among_them(launches: Launches) -> None:
    ranks = launches.of(2, 2)["shuffled shares"].values()
    of_replica = [[rank["epochs"] for rank in ranks if rank["replica"] == replica] for replica in range(2)]
    for epoch in range(2):
        for first, second in of_replica:
            assert [batch.tolist() for batch in first[epoch]] == [batch.tolist() for batch in second[epoch]]
        batches = [one[0][epoch] for one in of_replica]
        assert [[len(batch) for batch in own] for own in batches] == [[3, 3, 3, 1], [3, 3, 3, 1]]
        assert sorted(np.concatenate([*batches[0], *batches[1]]).tolist()) == list(range(20))


def test_an_optimizer_averages_gradients_that_no_step_has_made(launches: Launches) -> None:
    for rank in launches.of(1, 2)["own gradients"].values():
        np.testing.assert_array_equal(rank["variable"], [-3.0, 4.0])


@pytest.mark.parametrize(
    ("kind", "rounding"), [("bf16", 2.0**-7), pytest.param("fp16", 2.0**-10, marks=pytest.mark.full)]
)
@pytest.mark.parametrize("partitions", [1, pytest.param(2, marks=pytest.mark.full)])
def test_compressed_gradients_are_nearly_the_same_and_equal_on_all_replicas(
    launches: Launches, kind: str, rounding: float, partitions: int
) -> None:
    whole, small = (launches.of(partitions, 2)[f"compressed as {name}"].values() for name in (None, kind))
    # The stages of replica 0, and of replica 1.
    for wanted, first, second in zip(whole[:partitions], small[:partitions], small[partitions:], strict=True):
        assert len(wanted["gradients"]) == 4 // partitions
        for name, value in wanted["gradients"].items():
            np.testing.assert_array_equal(first["gradients"][name], second["gradients"][name])
            assert not np.array_equal(first["gradients"][name], value), "nothing was rounded"
            np.testing.assert_allclose(first["gradients"][name], value, rtol=0, atol=rounding * 2 * abs(value).max())
        np.testing.assert_allclose(first["own"], wanted["own"], rtol=0, atol=rounding * 2 * abs(wanted["own"]).max())


@pytest.mark.parametrize("case", UNEQUAL, ids=lambda case: case.name)
def test_gradients_of_other_shapes_are_told(launches: Launches, case: Case) -> None:
    """Compressed, in parts that are equally long, they were added up shifted; otherwise Horovod compares shapes."""
    compressed = case.config is not None and case.config["gradient_compression"] is not None
    ours, horovods = "gradients that replicas average must have the same shapes on all", "Mismatched ALLREDUCE tensor"
    for rank in launches.of(1, 2)[case.name].values():
        assert (ours if compressed else horovods) in rank["said"]


@pytest.mark.parametrize("case", RETRACED, ids=["whole", "compressed"])
def test_a_replica_may_trace_a_function_once_more(launches: Launches, case: Case) -> None:
    """Averages were named by their number in the graph: a function that was traced before was not counted again."""
    for rank in launches.of(1, 2)[case.name].values():
        assert rank["averages"] == [[4.0, 8.0, 4.5], [3.5, 7.0, 4.5], [4.0, 8.0, 4.5]]


def test_averages_of_one_name_in_a_graph_come_one_after_the_other(launches: Launches) -> None:
    """Two calls of a step under two name scopes had averages of one name, which Horovod takes one at a time."""
    for rank in launches.of(1, 2)["called twice"].values():
        # Inputs are 1 and 2, so a gradient is 1.5 times what a call multiplies them by.
        assert rank["sums"] == [[1.5 * (1 + 3 + 3)] * 2] * 20


@pytest.mark.parametrize("case", UNLIKE, ids=["all slots", "shared slots"])
def test_replicas_with_unlike_optimizers_are_told_in_what(launches: Launches, case: Case) -> None:
    """They trained, each with a rate of its own; where slots are shared nothing ever noticed it."""
    for rank in launches.of(1, 2)[case.name].values():
        said = rank["said"]
        assert "learning_rate: rank 1 (" in said["rate"]
        assert "stage 0 of replica 1) has 0.2; rank 0 has 0.1\n" in said["rate"]
        assert "learning_rate.config.decay_steps: rank 1 (" in said["schedule"]
        assert "inner_optimizer.config.momentum: rank 1 (" in said["scaled"]
        assert "learning_rate: rank 1 (" in said["legacy"]
        assert "class: rank 1 (" in said["class"]
        assert not rank["changed"]
        assert rank["fine"] == ""


@pytest.mark.parametrize("root", [0, 1])
def test_what_one_replica_has_loaded_gives_way_to_what_another_has(launches: Launches, root: int) -> None:
    """By default replica 0's; it was an error in the second step."""
    ranks = launches.of(2, 2)[LOADED[root].name].values()
    begin = {tuple(rank["place"]): rank["before"] for rank in ranks}
    for rank in ranks:
        stage, _ = rank["place"]
        wanted = begin[stage, root]
        assert rank["weights"].keys() == wanted.keys()
        for name, value in rank["weights"].items():
            np.testing.assert_array_equal(value, wanted[name], err_msg=name)
            assert (begin[stage, 1][name] == begin[stage, 0][name] + 1.0).all()
    assert any("moving" in name for rank in ranks for name in rank["weights"])
    # Both stages differ.
    [said] = [text for rank in ranks for text in rank["said"]]
    first = next(iter(begin[0, 0]))
    assert (
        f"{first!r}, for one, had other values on replica {1 - root} than on replica {root}: all replicas have" in said
    )


@pytest.mark.parametrize("case", ODD_TYPES, ids=["offload", "shared slots"])
def test_state_and_gradients_of_types_that_horovod_does_not_send(launches: Launches, case: Case) -> None:
    """Complex, unsigned and text ones were errors of Horovod's, or were not compared."""
    for rank in launches.of(1, 2)[case.name].values():
        begun = {name.rpartition("/")[2]: value for name, value in rank["begun"].items()}
        # Of real(x w) + imag(x w), over x = 1 and x = 2, in TensorFlow's convention the conjugate.
        np.testing.assert_allclose(rank["average"], np.full(2, 0.75 + 0.75j))
        np.testing.assert_allclose(begun["w:0"], [0.25 + 1.25j, 2.25 - 1.75j])
        assert begun["wide:0"].tolist() == [0j, 2 + 0j]
        assert begun["few:0"].tolist() == [2**32 - 1, 3]
        assert begun["many:0"].tolist() == [2**63, 3]
        assert rank["texts"] == [["on replica 0", "alike"], ["longer on replica 1", ""]]
