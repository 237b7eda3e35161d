"""Replicas that share the optimizer's slots train as those that all keep all of them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from smp_tf.checkpoint import files as checkpoint_files
from smp_tf.checkpoint import tensors as checkpoint_tensors
from smp_tf.partition.place.slot_shares import Sized, share_out
from tests.distributed.cases.sharded_slots import OPTIMIZERS
from tests.distributed.harness import Case, CaseResult, launch
from tests.distributed.test_replicas import compare
from tests.full_only import params, selected

CASES = "tests.distributed.cases.sharded_slots"
REPLICAS = "tests.distributed.cases.replicas"
NORMS = "tests.distributed.cases.norms"
GRIDS = [(1, 2), (2, 2)]
#: What an optimizer does over stages too; the others do the same with what each stage has.
OVER_STAGES = ("adam", "clipped", "averages", "legacy")
#: Of weights; see `test_replicas.LOSSES` for losses.
ZOO = {"mlp_adam_float32": 1e-4, "sparse_embedding": 1e-9}
#: What differs most, on one of both grids; every optimizer and model on both runs with --full, and Keras's older
#: optimizers, which test_cut_weights has, too. Norms over shares and stages are in tests of their own, below.
QUICKLY = {
    (1, 2): ("averages", "fit", "sparse_embedding"),
    (2, 2): ("adam",),
}

#: The largest share of two replicas, by partitions: whole variables of one stage come out nearly even (359 elements of
#: 716), of the smaller stages of two the largest weight counts for more.
EVEN = {1: 0.502, 2: 0.6}

Grid = tuple[int, int]


def on_grids(*names: str) -> pytest.MarkDecorator:
    """The parameters `grid` and `name` of a test."""
    trained = [
        (grid, name)
        for grid in GRIDS
        for name in names
        if grid == (1, 2) or name not in OPTIMIZERS or name in (*OVER_STAGES, *QUICKLY[grid])
    ]
    only_full = [(grid, name) for grid, name in trained if name not in QUICKLY[grid]]
    return pytest.mark.parametrize(("grid", "name"), params(trained, only_full))


def config(partitions: int, shared: bool = True, **more: Any) -> dict[str, Any]:
    return {"partitions": partitions, "microbatches": 2, "seed": 1, "shard_optimizer_state": shared, **more}


def cases(names: Iterable[str], partitions: int, shared: bool = True) -> list[Case]:
    made = []
    for name in names:
        given = {"optimizer": "adam", "eager": True} if name == "eager" else {"optimizer": name}
        made.append(Case(name, "trained", given, config(partitions, shared)))
    return made


def zoo(names: Iterable[str], partitions: int, shared: bool = True) -> list[Case]:
    return [Case(name, "train", {"model": name}, config(partitions, shared)) for name in names]


Wanted = dict[Grid, dict[str, None]]


@pytest.fixture(scope="module")
def wanted(request: pytest.FixtureRequest) -> Wanted:
    """What the tests of this session train on each grid, in their order."""
    found: Wanted = {grid: {} for grid in GRIDS}
    for item in request.session.items:
        parameters = getattr(getattr(item, "callspec", None), "params", {})
        if item.path == request.path and parameters.keys() >= {"grid", "name"}:
            found[parameters["grid"]][parameters["name"]] = None
    return found


@pytest.fixture(scope="module")
def whole(wanted: Wanted) -> dict[str, CaseResult]:
    """One process, which has all slots."""
    names = dict.fromkeys(name for grid in GRIDS for name in wanted[grid] if name != "fit")
    trained = launch(1, CASES, cases([name for name in names if name not in ZOO], 1, False))
    return trained | launch(1, REPLICAS, zoo([name for name in names if name in ZOO], 1, False))


@pytest.fixture(scope="module")
def shared(wanted: Wanted) -> dict[Grid, dict[str, CaseResult]]:
    """The same where replicas share them, by partitions and replicas."""

    def more(partitions: int, replicas: int) -> list[Case]:
        listed = []
        if "fit" in wanted[partitions, replicas]:
            listed = [Case(f"fit {on}", "fitted", {}, config(partitions, on)) for on in (True, False)]
        if partitions == 1:
            listed += [Case(f"buckets {on}", "several_buckets", {}, config(1, on)) for on in (True, False)]
            listed.append(Case("one row", "one_row", {}, config(1)))
            listed.append(Case("early", "built_too_early", {}, config(1)))
            listed.append(Case("astray", "not_as_a_step_gives_them", {}, config(1)))
        return listed

    found = {}
    for p, d in GRIDS:
        names = [name for name in wanted[p, d] if name not in (*ZOO, "fit")]
        found[p, d] = launch(p * d, REPLICAS, zoo([name for name in wanted[p, d] if name in ZOO], p))
        found[p, d] |= launch(p * d, CASES, [*cases(names, p), *more(p, d)])
    return found


Shared = dict[Grid, dict[str, CaseResult]]
#: By partitions, on two replicas.
Others = dict[int, dict[str, CaseResult]]


#: Partitions, and whether within a loss scale, of a user's optimizer.
OWN = ((1, False), (1, True), (2, False), (2, True))
OWN_ONLY_FULL = ((1, True), (2, False))


@pytest.fixture(scope="module")
def others(request: pytest.FixtureRequest) -> Others:
    """What needs no optimizer of Keras to be seen."""
    found = {}
    for partitions in (1, 2):
        listed = [
            Case(f"own {scaled}", "own_optimizer", {"scaled": scaled}, config(partitions))
            for of, scaled in selected(OWN, OWN_ONLY_FULL, request.config)
            if of == partitions
        ]
        if partitions == 1:
            listed.append(Case("sum", "one_gradient_of_two", {}, config(1)))
            listed.append(Case("added", "added_up", {"filled": False}, config(1)))
            listed.append(Case("sent", "sent", {}, config(1)))
            listed += [
                Case(f"sent {kind}", "sent", {}, config(1, gradient_compression=kind))
                for kind in selected(("bf16", "fp16"), ("fp16",), request.config)
            ]
            listed.append(Case("filled", "added_up", {"filled": True}, config(1)))
            # These end their processes, so they come last.
            listed.append(Case("by layer", "clips_by_layer", {}, config(1)))
            listed.append(Case("unequal", "unequal", {}, config(1)))
        else:
            listed.append(Case("received", "received", {}, config(2)))
        found[partitions] = launch(2 * partitions, CASES, listed)
    return found


@pytest.fixture(scope="module")
def others_alone() -> dict[str, CaseResult]:
    """Some of that in one process."""
    listed = [
        Case("sum", "one_gradient_of_two", {}, config(1, False)),
        Case("added", "added_up", {"filled": False}, config(1, False)),
    ]
    return launch(1, CASES, listed)


@on_grids(*OPTIMIZERS, "eager")
def test_every_optimizer_gives_the_weights_of_one_process(
    whole: dict[str, CaseResult], shared: Shared, grid: Grid, name: str
) -> None:
    [alone] = whole[name].values()
    ranks = shared[grid][name].values()
    for rank in ranks:
        assert rank["iterations"] == 4
        for weight, value in rank["weights"].items():
            np.testing.assert_allclose(value, alone["weights"][weight], rtol=1e-9, atol=1e-12, err_msg=weight)
    assert {weight for rank in ranks for weight in rank["weights"]} == alone["weights"].keys()


@on_grids("adam")
def test_every_rank_knows_the_layouts_of_the_variables_of_all_stages(shared: Shared, grid: Grid, name: str) -> None:
    ranks = shared[grid][name].values()
    first = ranks[0]["layouts"]
    assert all(rank["layouts"] == first for rank in ranks)
    stages = {weight: rank["place"][0] for rank in ranks for weight in rank["sizes"]}
    assert first.keys() == stages.keys()
    for weight, text in first.items():
        # A gradient goes where the slots are.
        assert re.fullmatch(rf"stage {stages[weight]}, .*; gradient (whole on D [01] of 2); slots \1", text), text


@on_grids("adam", "legacy", "averages")
def test_every_slot_is_on_one_replica_and_shares_are_about_equal(shared: Shared, grid: Grid, name: str) -> None:
    partitions, replicas = grid
    ranks = shared[grid][name].values()
    for stage in range(partitions):
        own = sorted((r for r in ranks if r["place"][0] == stage), key=lambda r: r["place"][1])
        sizes = own[0]["sizes"]
        wanted, _ = share_out([Sized(size) for size in sizes.values()], [0] * replicas)
        for replica, rank in enumerate(own):
            assert rank["sizes"] == sizes
            assert set(rank["slots"]) == {w for w, share in zip(sizes, wanted, strict=True) if share.replica == replica}
        shares = [sum(rank["slots"].values()) for rank in own]
        assert max(shares) <= EVEN[partitions] * sum(shares)


@on_grids(*ZOO)
def test_models_of_the_zoo(whole: dict[str, CaseResult], shared: Shared, grid: Grid, name: str) -> None:
    [alone] = whole[name].values()
    compare(shared[grid][name], alone, ZOO[name])


@on_grids("fit")
def test_fit_with_a_loss_scale_and_a_clipped_norm(shared: Shared, grid: Grid, name: str) -> None:
    # Not beside one process: what is too large for float16 depends on how samples are divided.
    ranks, whole = (shared[grid][f"{name} {on}"].values() for on in (True, False))
    for rank, alone in zip(ranks, whole, strict=True):
        np.testing.assert_allclose(rank["losses"], alone["losses"], rtol=1e-5)
        assert rank["weights"].keys() == alone["weights"].keys()
        for weight, value in rank["weights"].items():
            np.testing.assert_allclose(value, alone["weights"][weight], rtol=1e-5, atol=1e-6, err_msg=weight)
    assert 2 * sum(rank["slots"] for rank in ranks) == sum(alone["slots"] for alone in whole)


def test_weights_that_take_several_buckets_are_those_without_shares(shared: Shared) -> None:
    found, wanted = (shared[1, 2][f"buckets {on}"].values() for on in (True, False))
    assert found == wanted


def test_shares_are_the_same_after_another_start() -> None:
    """Optimizers knew nothing of ranks any more where a model from before smp.shutdown was trained on."""
    ranks = launch(2, CASES, [Case("twice", "started_twice", {}, None)])["twice"].values()
    assert sorted(ranks[0]["first"] + ranks[1]["first"]) == sorted(ranks[0]["weights"])
    for rank in ranks:
        assert rank["first"] == rank["second"]
        for weight, value in rank["weights"].items():
            np.testing.assert_array_equal(value, ranks[0]["weights"][weight], err_msg=weight)
        assert rank["error"].startswith(
            "Before smp.shutdown this SGD was used where 2 replicas share slots; now every replica has all slots. Make "
            "a new optimizer."
        )


def test_replicas_without_a_share_take_part(tmp_path: Path) -> None:
    """Once they waited for each other: the replica that makes slots traces a function twice, the other one once.

    And an optimizer that only replica 1 had been built for could not be saved.
    """
    found, whole = (
        launch(size, CASES, [Case("two", "two_models", {"folder": str(tmp_path / str(size))}, config(1, size > 1))])
        for size in (2, 1)
    )
    ranks, [wanted] = found["two"].values(), whole["two"].values()
    assert sorted(rank["slots of the small"] for rank in ranks) == [0, 2]
    for rank in ranks:
        assert rank["iterations"] == [3, 3]
        for value, expected in zip(rank["weights"], wanted["weights"], strict=True):
            np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-7)
    keys = [checkpoint_files.read_manifest(str(tmp_path / str(size)), "ckpt-1").tensors.keys() for size in (2, 1)]
    assert keys[0] == keys[1]


def test_replicas_of_which_one_has_a_single_row_agree_on_who_receives_what(shared: Shared) -> None:
    """Two gradients are one tensor there, which all replicas get; the others gave each to one, and all waited."""
    rows = np.zeros([2, 3])
    for number, size in enumerate((6, 6, 8)):
        batch = np.random.RandomState(number).standard_normal((size, 3))
        # Of the mean of (x + a + b - 1)^2, by a and by b.
        rows = rows - 0.5 * 2.0 * np.sum(batch + rows.sum(axis=0) - 1.0, axis=0) / (3.0 * size)
    for rank in shared[1, 2]["one row"].values():
        np.testing.assert_allclose(np.concatenate(rank["weights"]), rows, rtol=1e-5)


def test_gradients_that_are_not_as_a_step_gives_them_are_refused_in_words(shared: Shared) -> None:
    """Of a replica's own gradient the weights of all were made; sums of averages were halved, and some waited."""
    ranks = shared[1, 2]["astray"].values()
    for rank in ranks:
        said = rank["said"]
        for name in ("of no step", "of no step, in a function"):
            assert "applies one that no step has given it, so it is not averaged over the replicas." in said[name], said
        for name in ("accumulators", "accumulators, in a function"):
            assert "their average would be too small by a factor of 2." in said[name], said
        assert "lists with unlike things in place 0: " in said["changed"]
        assert all(change > 0.0 for change in rank["changes"])
        assert rank["averaged"] == [[[1.5, 1.5], [1.5, 1.5]]]
    for first, second in zip(ranks[0]["weights"], ranks[1]["weights"], strict=True):
        np.testing.assert_array_equal(first, second)


def test_replicas_that_differ_are_an_error_though_the_gather_makes_them_equal(others: Others) -> None:
    errors = [rank.error or "" for rank in others[1]["unequal"].ranks]
    assert any("replicas begin with equal weights and must keep them." in error for error in errors)


@pytest.mark.parametrize(("partitions", "scaled"), params(OWN, OWN_ONLY_FULL))
def test_a_users_optimizer_clips_by_the_norm_of_the_gradients_of_all_ranks(
    others: Others, partitions: int, scaled: bool
) -> None:
    ranks = others[partitions][f"own {scaled}"].values()
    # Every replica has all changes of its stage, whoever has made them.
    stages = ranks[:partitions]
    assert sum(rank["square"] for rank in stages) ** 0.5 == pytest.approx(0.01, rel=1e-4)


def test_gradients_are_averaged_only_where_the_weight_is_updated(others: Others) -> None:
    ranks = others[2]["received"].values()
    for stage in (ranks[0::2], ranks[1::2]):
        # Each weight's gradient is on one replica, and None on the other.
        counts = np.sum([[gradient is not None for gradient in rank["gradients"]] for rank in stage], axis=0)
        assert set(counts) == {0, 1}
    counts = np.sum([[gradient is not None for gradient in rank["gradients"]] for rank in ranks], axis=0)
    assert counts.tolist() == [1, 1, 1, 1]
    # The norm of what is spread over all of them, and of what one process has.
    for rank in ranks:
        assert rank["norm"] == pytest.approx(rank["clipped from"], rel=1e-6)
    squares = [np.sum(np.square(g)) for rank in ranks for g in rank["gradients"] if g is not None]
    assert ranks[0]["norm"] == pytest.approx(np.sqrt(np.sum(squares)), rel=1e-5)
    assert all(rank["values of the first microbatch"] == rank["stored here"] for rank in ranks)


def test_a_weight_that_is_a_sum_is_trained_in_all_of_its_parts(
    others: Others, others_alone: dict[str, CaseResult]
) -> None:
    """Two weights had one gradient, which only the replica of one of them was given; the other one stayed."""
    [alone] = others_alone["sum"].values()
    for rank in others[1]["sum"].values():
        np.testing.assert_allclose(rank["norms"], alone["norms"], rtol=1e-5)
        for value, wanted in zip(rank["weights"], alone["weights"], strict=True):
            np.testing.assert_allclose(value, wanted, rtol=1e-5, atol=1e-7)


def test_norms_of_what_was_added_up_count_none_and_refuse_zeros_in_its_place(
    others: Others, others_alone: dict[str, CaseResult]
) -> None:
    [alone] = others_alone["added"].values()
    for rank in others[1]["added"].values():
        assert rank["norm"] == pytest.approx(alone["norm"], rel=1e-5)
    assert all("with None left in, not zeros, for" in rank["said"] for rank in others[1]["filled"].values())


def test_a_users_optimizer_that_asks_for_a_norm_of_some_gradients_is_told_so(others: Others) -> None:
    # The other replica has one gradient, of which that is the norm of all.
    errors = [rank.error or "" for rank in others[1]["by layer"].ranks]
    assert any("tf.clip_by_norm clips one by its own" in error for error in errors)


@pytest.mark.parametrize(
    ("name", "bytes_each"), params([("sent", 4), ("sent bf16", 2), ("sent fp16", 2)], only_full=[("sent fp16", 2)])
)
def test_replicas_send_each_gradient_once(others: Others, name: str, bytes_each: int) -> None:
    for rank in others[1][name].values():
        # What it sends itself is among it. Sums do not come back.
        assert rank["sent"].keys() == {"alltoall"}
        wanted = bytes_each * rank["of the stage"]
        assert wanted <= rank["sent"]["alltoall"] <= 1.02 * wanted + 64


def test_models_whose_weights_have_the_same_names_are_told_apart() -> None:
    found, whole = (launch(size, CASES, [Case("members", "members", {}, config(1, size > 1))]) for size in (2, 1))
    [wanted] = whole["members"].values()
    for rank in found["members"].values():
        for value, expected in zip(rank["weights"], wanted["weights"], strict=True):
            np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-7)


def test_slots_that_nobody_updates_are_not_saved(tmp_path: Path) -> None:
    arguments = {"folder": str(tmp_path)}
    launch(2, CASES, [Case("built", "built_before_wrapping", arguments, config(1))])["built"].values()
    manifest = checkpoint_files.read_manifest(str(tmp_path), "ckpt-1")
    momenta = [key for key in manifest.tensors if key.endswith("momentums")]
    assert len(momenta) == 3
    for _, value in checkpoint_tensors.read_tensors(str(tmp_path), manifest, momenta):
        assert np.abs(value.numpy()).max() > 0.0


def test_checkpoints_know_the_shares_before_the_first_step_of_another_start(tmp_path: Path) -> None:
    case = Case("again", "restored_after_another_start", {"folder": str(tmp_path)}, None)
    for rank in launch(2, CASES, [case])["again"].values():
        for found, wanted in zip(rank["found"], rank["wanted"], strict=True):
            np.testing.assert_allclose(found, wanted, rtol=1e-6)
        assert "would lack slots of the optimizer at 'optimizer'" in rank["error"]
    # The first was not written.
    keys = checkpoint_files.read_manifest(str(tmp_path), "ckpt-2").tensors
    assert sum(".OPTIMIZER_SLOT" in key for key in keys) == 6


def test_what_xla_cannot_compile_is_an_error_in_words() -> None:
    for said in launch(2, CASES, [Case("compiled", "compiled", {}, config(1))])["compiled"].values():
        assert "Leave jit_compile out of the function that applies gradients" in said


def test_an_optimizer_built_before_the_first_step_is_an_error_in_words(shared: Shared) -> None:
    for said in shared[1, 2]["early"].values():
        assert "Which of the 2 ranks has slots for the variable is not decided yet" in said


@pytest.mark.parametrize("partitions", [1, pytest.param(2, marks=pytest.mark.full)])
def test_norms_count_every_gradient_once(partitions: int) -> None:
    # Norms over two stages are also what "received" and a user's optimizer are about.
    kinds = [("optimizers", True), ("legacy", False)][:partitions]
    listed = [
        Case(f"{kind}{' scaled' if scaled else ''}", "optimizers", {"kind": kind, "optimizer": "SGD", "scaled": scaled})
        for kind, scaled in kinds
    ]
    listed.append(Case("nothing", "nothing_of_its_own"))

    def on(shared: bool) -> dict[str, CaseResult]:
        # All replicas have the same batch.
        given = config(partitions, shared, check_inputs=False)
        return launch(2 * partitions, NORMS, [Case(c.name, c.function, c.arguments, given) for c in listed])

    # Not beside one process, which has other slices of the sparse gradient: they are squared as they are.
    whole, found = on(False), on(True)
    for case in listed[:-1]:
        for rank, wanted in zip(found[case.name].values(), whole[case.name].values(), strict=True):
            assert rank["scales"] == wanted["scales"]
            assert rank["iterations"] == 3
            assert rank["weights"].keys() == wanted["weights"].keys()
            for position, value in rank["weights"].items():
                np.testing.assert_allclose(value, wanted["weights"][position], rtol=1e-5, atol=1e-7, err_msg=position)
    for rank, wanted in zip(found["nothing"].values(), whole["nothing"].values(), strict=True):
        for way in ("plain", "scaled"):
            assert rank[way]["norm"] == pytest.approx(wanted[way]["norm"], rel=1e-5)
            assert rank[way]["iterations"] == 1
