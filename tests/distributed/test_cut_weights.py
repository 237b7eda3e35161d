"""A weight larger than a share is cut: replicas update rows of it, and train as one process does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.distributed.cases.cut_weights import IN_FIT, OPTIMIZERS, WIDTH, WORDS
from tests.distributed.harness import Case, CaseResult, launch
from tests.full_only import params, selected

CASES = "tests.distributed.cases.cut_weights"
TRAP_CASES = "tests.distributed.cases.cut_weight_traps"
#: Those that look at whole weights, which stay with one replica.
WHOLE = ("adafactor", "clipnorm")
#: What differs most; the others with --full. Averages of weights, of whole slots, are in test_sharded_slots.
QUICKLY = ("adam", "legacy", "adafactor", "adam sparse", "clipped eager", "adam offloaded")
TRAINED = (*OPTIMIZERS, "adam sparse", "legacy sparse", "adam eager", "clipped eager", "adam offloaded")
ONLY_FULL = tuple(name for name in TRAINED if name not in QUICKLY)
#: Partitions and replicas.
GRIDS = ((1, 2), (1, 3), (2, 2))
#: What two partitions and three replicas do otherwise than two replicas.
ON_OTHER_GRIDS = ("adam", "adafactor", "clipped eager")

Trained = dict[tuple[int, int], dict[str, CaseResult]]


def config(partitions: int, shared: bool = True, **more: Any) -> dict[str, Any]:
    return {"partitions": partitions, "microbatches": 2, "seed": 1, "shard_optimizer_state": shared, **more}


def case(name: str, partitions: int, shared: bool = True) -> Case:
    optimizer, _, how = name.partition(" ")
    given = {"optimizer": optimizer, "sparse": how == "sparse", "eager": how == "eager"}
    return Case(name, "trained", given, config(partitions, shared, optimizer_offload=shared and how == "offloaded"))


@pytest.fixture(scope="module")
def names(request: pytest.FixtureRequest) -> list[str]:
    return list(selected(TRAINED, ONLY_FULL, request.config))


@pytest.fixture(scope="module")
def one(names: list[str]) -> dict[str, CaseResult]:
    """One process, which has all slots."""
    return launch(1, CASES, [case(name, 1, False) for name in names])


@pytest.fixture(scope="module")
def several(names: list[str]) -> Trained:
    found = {}
    for p, d in GRIDS:
        of_grid = names if (p, d) == (1, 2) else [name for name in names if name in ON_OTHER_GRIDS]
        found[p, d] = launch(p * d, CASES, [case(name, p) for name in of_grid])
    return found


def compare(ranks: list[dict[str, Any]], wanted: dict[str, np.ndarray]) -> None:
    """Every rank has weights of the one process, together all."""
    seen = set()
    for rank in ranks:
        for name, value in rank["weights"].items():
            np.testing.assert_allclose(value, wanted[name], rtol=1e-9, atol=1e-12, err_msg=name)
            seen.add(name)
    assert seen == set(wanted)


@pytest.mark.parametrize(
    ("grid", "name"),
    params(
        [(grid, name) for grid in GRIDS for name in TRAINED if grid == (1, 2) or name in ON_OTHER_GRIDS],
        [(grid, name) for grid in GRIDS for name in ONLY_FULL],
    ),
)
def test_rows_are_trained_as_one_process_trains_the_whole(
    one: dict[str, CaseResult], several: Trained, grid: tuple[int, int], name: str
) -> None:
    compare(several[grid][name].values(), one[name].values()[0]["weights"])


def test_slots_are_of_the_rows_and_shares_are_equal(several: Trained) -> None:
    for replicas in (2, 3):
        ranks = several[1, replicas]["adam"].values()
        [table] = {name for rank in ranks for name, rows in rank["rows"].items() if rows is not None}
        borders = [rank["rows"][table] for rank in ranks]
        assert [start for start, _ in borders[1:]] == [stop for _, stop in borders[:-1]]
        assert (borders[0][0], borders[-1][1]) == (0, WORDS)
        for rank, (start, stop) in zip(ranks, borders, strict=True):
            assert rank["slots"][table] == [stop - start, WIDTH]
        held = [rank["bytes"] for rank in ranks]
        # Adam's two slots; a row is what they may differ by.
        assert max(held) - min(held) <= 2 * 2 * WIDTH * 8
        assert max(held) <= 1.02 * sum(held) / replicas


@pytest.mark.parametrize("name", ["adam", "adam offloaded"])
def test_every_replica_sends_as_many_bytes_of_new_weights(several: Trained, name: str) -> None:
    """With slots on the host, too, for weights of very different sizes."""
    ranks = several[1, 2][name].values()
    sent = [rank["sent"]["allgather"] for rank in ranks]
    whole = sum(value.nbytes for value in ranks[0]["weights"].values())
    assert sum(sent) == whole
    assert max(sent) <= 1.02 * whole / 2


#: What `fit` is given besides its optimizer.
IN_ROUNDS = "adam in rounds"
CLIPPED = "adam clipped"
FITTED = (*(name for name in IN_FIT if name != "clipnorm"), "adam sparse", IN_ROUNDS)
FITTED_QUICKLY = ("adam", "scaled", "replaced", IN_ROUNDS)
FITTED_FULL = tuple(name for name in FITTED if name not in FITTED_QUICKLY)


def fitted(name: str, partitions: int, shared: bool = True) -> Case:
    optimizer, _, how = name.partition(" ")
    rounds = WORDS * WIDTH * 8 // 5 if how == "in rounds" else 0
    given = {"optimizer": optimizer, "sparse": how == "sparse", "round_bytes": rounds, "clips": how == "clipped"}
    # What it clips is each microbatch's gradient, which is told otherwise.
    more = {"check_losses": False} if how == "clipped" else {}
    return Case(name, "fitted", given, config(partitions, shared) | more)


@pytest.fixture(scope="module")
def fits(request: pytest.FixtureRequest) -> Trained:
    """Of one process and of two replicas, of one stage and two."""
    names = list(selected(FITTED, FITTED_FULL, request.config))
    found = {(1, 1): launch(1, CASES, [fitted(name, 1, False) for name in names])}
    clipped = selected([CLIPPED], [CLIPPED], request.config)
    found[1, 2] = launch(2, CASES, [fitted(name, 1) for name in (*names, *clipped)])
    found[2, 2] = launch(4, CASES, [fitted(name, 2) for name in ("adam", CLIPPED)])
    return found


@pytest.mark.parametrize(
    ("grid", "name"),
    params([*(((1, 2), name) for name in FITTED), ((2, 2), "adam")], [((1, 2), name) for name in FITTED_FULL]),
)
def test_fit_trains_rows_as_one_process_trains_the_whole(fits: Trained, grid: tuple[int, int], name: str) -> None:
    compare(fits[grid][name].values(), fits[1, 1][name].values()[0]["weights"])


@pytest.mark.parametrize(("p", "d"), params([(1, 2), (2, 2)], [(1, 2)]))
def test_what_a_train_step_makes_of_gradients_is_made_of_whole_ones_on_every_replica(
    fits: Trained, p: int, d: int
) -> None:
    whole = launch(p * d, CASES, [fitted(CLIPPED, p, False)])[CLIPPED].values()
    compare(fits[p, d][CLIPPED].values(), {n: v for rank in whole for n, v in rank["weights"].items()})
    assert fits[p, d][CLIPPED].values()[0]["sent"].keys() == {"grouped_allreduce"}


@pytest.mark.parametrize(
    ("grid", "name"),
    params(
        [*(((1, 2), n) for n in ("adam", "legacy", "scaled", "averaging", IN_ROUNDS)), ((2, 2), "adam")],
        [((1, 2), n) for n in ("legacy", "averaging")],
    ),
)
def test_fit_gives_every_gradient_once(fits: Trained, grid: tuple[int, int], name: str) -> None:
    """A reduce-scatter: of each replica's gradients each element goes to one replica, and nothing is all-reduced."""
    for rank in fits[grid][name].values():
        assert rank["sent"] == {"alltoall": sum(value.nbytes for value in rank["weights"].values())}


@pytest.mark.parametrize("name", ["adam", "scaled"])
def test_fit_averages_within_its_last_backward_what_it_knows_the_size_of(fits: Trained, name: str) -> None:
    """What it counts behind backward kept all of it until the end, and a loss scale made one bucket of all."""
    for rank in fits[1, 2][name].values():
        assert rank["in the last backward"]
        assert rank["sizes"] == sorted(value.nbytes for value in rank["weights"].values())


def test_logs_of_a_train_step_are_those_of_one_process_on_every_replica() -> None:
    """A gradient among them was None on all replicas but one; the history had the epoch's loss for the last batch's."""
    [alone] = launch(1, CASES, [Case("logged", "logged", {}, config(1, False))])["logged"].values()
    for rank in launch(2, CASES, [Case("logged", "logged", {}, config(1))])["logged"].values():
        for here, wanted in zip(rank["logs"], alone["logs"], strict=True):
            assert here.keys() == wanted.keys() == {"loss", "of table", "of hidden"}
            for name, value in wanted.items():
                np.testing.assert_allclose(here[name], value, rtol=1e-9, atol=1e-12, err_msg=name)
        assert rank["loss"] == pytest.approx(alone["loss"], rel=1e-9)
        assert rank["loss"] == pytest.approx(float(rank["logs"][-1]["loss"]), rel=1e-9)


def test_what_a_script_has_put_in_an_optimizer_s_way_is_given_whole_gradients(fits: Trained) -> None:
    """Those of weights that are cut: it is given no others that its replica does not update."""
    for rank in fits[1, 2]["replaced"].values():
        sent, sizes = rank["sent"], {name: value.nbytes for name, value in rank["weights"].items()}
        assert sent.keys() == {"alltoall", "grouped_allreduce"}
        assert sum(sent.values()) == sum(sizes.values())
        assert sent["grouped_allreduce"] >= next(size for name, size in sizes.items() if "table" in name)


@pytest.mark.parametrize("name", params(WHOLE, [name for name in WHOLE if name in ONLY_FULL]))
def test_an_optimizer_that_looks_at_whole_weights_has_them_whole_on_one_replica(several: Trained, name: str) -> None:
    ranks = several[1, 2][name].values()
    assert all(rows is None for rank in ranks for rows in rank["rows"].values())
    assert sum("table" in weight for rank in ranks for weight in rank["slots"]) == 1
    said = [output.count("one replica keeps all slots of table:0, and more") for output in several[1, 2][name].output]
    assert said == [1, 0]


def test_a_checkpoint_of_rows_is_restored_on_other_numbers_of_replicas(tmp_path: Path) -> None:
    """Saved by two, three replicas and one process, and restored by two, three and one."""
    wanted = None
    for saving in (2, 3, 1):
        directory = str(tmp_path / str(saving))
        given = {"optimizer": "adam", "directory": directory}
        saved = launch(saving, CASES, [Case("saved", "trained", given, config(1, saving > 1))])["saved"].values()
        wanted = wanted or saved[0]["weights"]
        compare(saved, wanted)
        for restoring in {2, 3, 1} - {saving}:
            given = {"optimizer": "adam", "restore": directory}
            case = Case("restored", "trained", given, config(1, restoring > 1))
            compare(launch(restoring, CASES, [case])["restored"].values(), wanted)


TRAPS = ("constraint", "slots_before", "changed", "in_a_scope", "of_a_model_before", "sending")
ERRORS = {
    "clipped_later": "clipnorm of this Adam was set after its first use",
    "of_no_step": "apply gradients of a model's weights that differ from each other, so they are not averaged",
}


@pytest.fixture(scope="module")
def traps() -> dict[str, CaseResult]:
    """Two replicas, and the rest of what is asked of them."""
    listed = [Case(name, "run", {"trap": name}, config(1)) for name in (*TRAPS, *ERRORS)]
    return launch(2, TRAP_CASES, [*listed, Case("memory", "memory", {}, config(1))])


@pytest.fixture(scope="module")
def untrapped() -> dict[str, CaseResult]:
    """The same trainings in one process."""
    return launch(1, TRAP_CASES, [Case(name, "run", {"trap": name}, config(1, False)) for name in TRAPS])


@pytest.mark.parametrize("name", TRAPS)
def test_what_once_went_wrong_trains_as_one_process(
    traps: dict[str, CaseResult], untrapped: dict[str, CaseResult], name: str
) -> None:
    [alone] = untrapped[name].values()
    assert alone["error"] == ""
    compare(traps[name].values(), alone["weights"])


@pytest.mark.parametrize("name", ERRORS)
def test_what_rows_cannot_have_is_an_error(traps: dict[str, CaseResult], name: str) -> None:
    for rank in traps[name].values():
        assert ERRORS[name] in rank["error"]
        assert "table:0" in rank["error"]


def test_blocks_have_no_memory_between_steps(traps: dict[str, CaseResult]) -> None:
    for rank in traps["memory"].values():
        assert len(rank["seen"]) > 4
        assert set(rank["seen"]) == {0}


def test_an_optimizer_that_sends_is_not_tried_out_on_one_stage_alone(untrapped: dict[str, CaseResult]) -> None:
    found = launch(4, TRAP_CASES, [Case("sending", "run", {"trap": "sending"}, config(2))])["sending"]
    compare(found.values(), untrapped["sending"].values()[0]["weights"])


def test_slots_of_two_optimizers_are_saved_as_they_are(tmp_path: Path) -> None:
    given = {"directory": str(tmp_path)}
    [saved, _] = launch(2, TRAP_CASES, [Case("saved", "two_optimizers", given, config(1))])["saved"].values()
    restored = launch(1, TRAP_CASES, [Case("restored", "two_optimizers", given, config(1, False))])["restored"]
    compare(restored.values(), saved["weights"])
