"""`fit` over partitions and replicas: the history of one process, on every rank, with all of Keras's callbacks."""

from __future__ import annotations

import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.distributed.harness import Case, CaseResult, launch
from tests.full_only import params, selected

CASES = "tests.distributed.cases.fit"
KINDS = ("two", "masked", "own", "dropout")
# Partitions x replicas, microbatches of one replica: four in all, so that every one has the same samples.
SETTINGS = {"1x1": (1, 1, 4), "2x1": (2, 1, 4), "2x2": (2, 2, 2)}
# Replicas draw masks of their own, so no single process has the same.
KINDS_OF = {"1x1": KINDS, "2x1": KINDS, "2x2": ("two", "masked", "own")}
# Four processes take longest. By default, one process goes on with the dropout of two partitions, below.
ONLY_FULL = {"1x1": ("dropout",), "2x1": ("dropout",), "2x2": ("masked", "own")}
COMPARED = params(
    [(kind, processes) for processes in ("2x1", "2x2") for kind in KINDS_OF[processes]],
    [(kind, processes) for processes, kinds in ONLY_FULL.items() for kind in kinds],
)


@pytest.fixture(scope="module")
def histories(request: pytest.FixtureRequest) -> dict[str, dict[str, CaseResult]]:
    found = {}
    for name, (partitions, replicas, microbatches) in SETTINGS.items():
        config = {"partitions": partitions, "microbatches": microbatches, "seed": 5}
        kinds = selected(KINDS_OF[name], ONLY_FULL[name], request.config)
        cases = [Case(kind, "history", {"kind": kind}, config) for kind in kinds]
        if name != "2x1":
            cases.append(Case("ragged", "ragged", {"kind": "two"}, config))
        if name == "2x2":
            cases.append(Case("changed on one", "changed_on_one", {}, config))
        found[name] = launch(partitions * replicas, CASES, cases)
    return found


def close(found: Any, wanted: Any, what: str) -> None:
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6, err_msg=what)


@pytest.mark.distributed
@pytest.mark.parametrize(("kind", "processes"), COMPARED)
def test_the_history_is_that_of_one_process(
    histories: dict[str, dict[str, CaseResult]], kind: str, processes: str
) -> None:
    [wanted] = histories["1x1"][kind].values()
    for rank, found in enumerate(histories[processes][kind].values()):
        assert found["history"].keys() == wanted["history"].keys()
        for part in ("history", "evaluated"):
            for name, values in wanted[part].items():
                # Replicas evaluate batches of their own, which are averaged by samples, not by valid words.
                by_samples = kind == "masked" and processes == "2x2" and (part == "evaluated" or "val_" in name)
                if not by_samples:
                    close(found[part][name], values, f"{part} {name} of rank {rank}")
        for ours, theirs in zip(found["predicted"], wanted["predicted"], strict=True):
            close(ours, theirs, f"predictions of rank {rank}")


@pytest.mark.distributed
@pytest.mark.parametrize("setting", [(2, 1, 4), pytest.param((1, 2, 2), marks=pytest.mark.full)])
def test_xlas_auto_clustering_leaves_the_history_as_it_is(
    histories: dict[str, dict[str, CaseResult]], setting: tuple[int, int, int]
) -> None:
    """A sum's storage has a shape within a step and none between: compiled together, that failed the first step."""
    [wanted] = histories["1x1"]["two"].values()
    partitions, _, microbatches = setting
    config = {"partitions": partitions, "microbatches": microbatches, "seed": 5}
    # With what TensorFlow says once in a process when it has compiled a cluster.
    clusters = {"TF_XLA_FLAGS": "--tf_xla_auto_jit=2 --tf_xla_cpu_global_jit", "TF_CPP_MIN_LOG_LEVEL": "0"}
    [result] = launch(2, CASES, [Case("clustered", "trained", {"kind": "two"}, config)], environment=clusters).values()
    assert "".join(result.output).count("Compiled cluster using XLA!") == 2
    for rank, found in enumerate(result.values()):
        for metric, values in wanted["history"].items():
            if not metric.startswith("val_"):
                close(found["history"][metric], values, f"{metric} on rank {rank}")


@pytest.mark.distributed
def test_the_history_of_ragged_ends_is_that_of_one_process(histories: dict[str, dict[str, CaseResult]]) -> None:
    """Batches of replicas were of equal sizes in every test of `fit`; of the last three samples one has two."""
    [wanted] = histories["1x1"]["ragged"].values()
    for rank, found in enumerate(histories["2x2"]["ragged"].values()):
        assert found["history"].keys() == wanted["history"].keys()
        for name, values in wanted["history"].items():
            close(found["history"][name], values, f"{name} of rank {rank}")


@pytest.mark.distributed
def test_what_one_replica_has_changed_before_fit_gives_way_to_what_replica_0_has(
    histories: dict[str, dict[str, CaseResult]],
) -> None:
    by_place = {tuple(rank["place"]): rank for rank in histories["2x2"]["changed on one"].values()}
    for stage in (0, 1):
        first, second = by_place[stage, 0], by_place[stage, 1]
        # Counters, rates and both slots of every weight are among it.
        assert len(first["after"]) > 3 * 2
        for before, changed, one, other in zip(
            first["before"], second["before"], first["after"], second["after"], strict=True
        ):
            np.testing.assert_array_equal(changed, before + 3)
            np.testing.assert_array_equal(one, other)
            assert np.abs(one - before).max() < 1.5


@pytest.mark.distributed
def test_progress_is_shown_by_rank_0(histories: dict[str, dict[str, CaseResult]]) -> None:
    for setting, ranks in (("2x1", 2), ("2x2", 4)):
        output = histories[setting]["two"].output
        assert ["Epoch 3/3" in text for text in output] == [True] + [False] * (ranks - 1)


def interrupted(
    save_freq: Any, kind: str, folder: Path, config: dict[str, Any], parts: Collection[str] = ("first", "second")
) -> list[Case]:
    """A training that is not interrupted, one that is after 7 batches, and one that goes on from its last backup."""
    cases = []
    for part in parts:
        backup = folder / f"{save_freq}{'-whole' if part == 'whole' else ''}"
        stop_after = 7 if part == "first" else None
        told = {"kind": kind, "folder": str(backup), "stop_after": stop_after, "save_freq": save_freq}
        cases.append(Case(f"{save_freq} {part}", "interrupted", told, config))
    return cases


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("size", "kind"), params([(2, "dropout"), (4, "two"), (4, "dropout")], only_full=[(4, "two"), (4, "dropout")])
)
def test_callbacks_decide_alike_and_write_once(size: int, kind: str, tmp_path: Path) -> None:
    config = {"partitions": 2, "microbatches": 2, "seed": 5}
    alone = config | {"partitions": 1}
    # Replicas draw masks of their own, so no single process goes on as they would.
    as_one_process = size == 2 or kind != "dropout"
    cases = [
        Case("callbacks", "callbacks", {"folder": str(tmp_path / "all")}, config),
        # How often it keeps a backup is nothing to a training that nobody interrupts.
        *interrupted(3, kind, tmp_path, config, ["whole"]),
        *interrupted("epoch", kind, tmp_path, config, ["first"]),
    ]
    (tmp_path / "all").mkdir()
    found = launch(size, CASES, cases)
    if as_one_process:
        shutil.copytree(tmp_path / "epoch", tmp_path / "one" / "epoch")
    cases = [*interrupted("epoch", kind, tmp_path, config, ["second"]), *interrupted(3, kind, tmp_path, config)]
    found |= launch(size, CASES, cases)
    ranks = found["callbacks"].values()
    for rank in ranks:
        assert rank["epochs"] == [0, 1, 2]
        for name, values in ranks[0]["history"].items():
            assert rank["history"][name] == values, name
        assert rank["batches"] == ranks[0]["batches"]
        # Of a checkpoint, whose data lie in any number of files, the index alone.
        assert [name for name in rank["files"] if ".data-" not in name] == [
            "best.weights.h5", "board", "checkpoint", "checkpoints", "epoch-1.index", "epoch-2.index", "epoch-3.index",
            "log.csv", "pipeline", "whole", "whole.keras",
        ]  # fmt: skip
    # 0.9 at the begin of every epoch; from the second on, which is no better, 0.5 at its end before the rate is noted.
    assert ranks[0]["history"]["lr"] == pytest.approx([0.009, 0.00405, 0.0018225])
    np.testing.assert_allclose(ranks[0]["rows"], ranks[0]["history"]["loss"], rtol=1e-6)
    assert "samples/s, bubble of the plan" in ranks[0]["printed"]
    assert "Epoch 3/6" in ranks[0]["printed"]
    for rank in ranks[1:]:
        assert rank["printed"] == ""
    wanted_of = {"epoch": found["3 whole"]}
    if as_one_process:
        # One process goes on from the epoch's end that two partitions have kept.
        cases = interrupted(3, kind, tmp_path / "one", alone)
        one_process = launch(1, CASES, [*cases, *interrupted("epoch", kind, tmp_path / "one", alone, ["second"])])
        [rest] = one_process["epoch second"].values()
        assert rest["batches"] == 10
        np.testing.assert_allclose(rest["losses"], found["3 whole"].values()[0]["losses"][1:], rtol=1e-5)
        wanted_of[3] = one_process["3 second"]
    # After the backup of every third batch Keras goes on with the epoch's second batch, but with the data's first.
    for whole in found["3 whole"].values():
        assert (whole["batches"], whole["left"]) == (15, False)
    for save_freq, batches in (("epoch", 10), (3, 9)):
        for first, second in zip(*(found[f"{save_freq} {part}"].values() for part in ("first", "second")), strict=True):
            if save_freq in wanted_of:
                [wanted, *_] = wanted_of[save_freq].values()
                np.testing.assert_allclose(second["losses"][-1], wanted["losses"][-1], rtol=1e-5)
            assert (first["batches"], first["left"]) == (7, True)
            assert (second["batches"], second["left"]) == (batches, False)
    for rank in ranks:
        assert "Which rank stores a layer is decided at the first step." in rank["summary before"]
        assert rank["summary after"] == ranks[0]["summary after"]


@pytest.mark.distributed
def test_replicas_with_different_numbers_of_batches_are_told() -> None:
    config = {"partitions": 1, "microbatches": 2, "seed": 5}
    cases = [Case(name, "unequal", {"known": name == "known"}, config) for name in ("unknown", "known")]
    found = launch(2, CASES, cases)
    for rank in found["unknown"].values():
        assert rank["said"].startswith("The data of replica 0 of 2 ended before batch 3 of the training, and others")
    for rank in found["known"].values():
        assert "The data given to fit has 2 on replica 0, 3 on replica 1." in rank["said"]


@pytest.mark.distributed
def test_ranks_begin_alike_and_stop_together(tmp_path: Path) -> None:
    config = {"partitions": 2, "microbatches": 2, "seed": 5}
    cases = [
        Case("one model", "of_one_model", {}, config),
        Case("best", "best_weights_stay", {}, config),
        Case("summaries", "summaries", {"folder": str(tmp_path)}, config),
        Case("no summaries", "summaries", {"folder": None}, config),
    ]
    found = launch(2, CASES, cases)
    for rank, of_one_model in enumerate(found["one model"].values()):
        assert of_one_model["stopped at an epoch"] == {"epochs": 2, "batches": 10}
        assert of_one_model["stopped at a batch"] == {"epochs": 1, "batches": 3}
        assert of_one_model["with other loggers"] == ""
        said = of_one_model["unlike"].splitlines()
        assert said[0] == "The ranks do not agree on how fit is called:"
        assert said[1].endswith("has 1.0; rank 0 has 3.0")
        assert said[2].endswith("has []; rank 0 has ['EarlyStopping']")
        best = found["best"].values()[rank]
        assert (best["sent"], best["sent_in_all"], best["epochs"]) == (0, True, 3)
        for kept, now in zip(best["best"], best["now"], strict=True):
            np.testing.assert_array_equal(kept, now)
    first, second = found["one model"].values()
    for name in ("sequence", "of workers"):
        assert len(first[name]) == 10, name
        assert first[name] == second[name], name
    told = ["tf.summary writes nothing inside step 'train_step'" in said for said in found["summaries"].output]
    assert told == [True, False]
    assert found["summaries"].values() == found["no summaries"].values()
    first, second = (rank["held"] for rank in found["best"].values())
    assert [a != b for a, b in zip(first, second, strict=True)] == [True] * len(first)
