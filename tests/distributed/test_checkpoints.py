"""A training that is saved, interrupted and restored gives what it would have given, on whatever ranks."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tf_keras

from smp_tf.checkpoint import files as checkpoint_files
from smp_tf.checkpoint import tensors as checkpoint_tensors
from smp_tf.command import main as command_line
from tests.distributed.harness import Case, CaseResult, launch, launch_script
from tests.distributed.scripts import exported_model
from tests.full_only import params

CASES = "tests.distributed.cases.checkpoints"


def config(partitions: int, seed: int = 1) -> dict[str, object]:
    return {"partitions": partitions, "microbatches": 2, "seed": seed}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


#: A graph for each of two shapes of batches, or steps of one shape, each called eagerly.
THOROUGH: dict[str, Any] = {"eager": False, "shapes": "two"}
QUICK: dict[str, Any] = {"eager": True, "shapes": "one"}


def whole(folders: Path, partitions: int, name: str, how: dict[str, Any], optimizer: str = "adam") -> Case:
    arguments = {"folder": str(folders / name), "optimizer": optimizer, **how}
    return Case(f"whole {name}", "whole", arguments, config(partitions))


def resumed(folders: Path, partitions: int, source: str, how: dict[str, Any], **arguments: Any) -> Case:
    name = " ".join(["resumed", source, *map(str, arguments.values())])
    # Another seed: that of the checkpoint is to be used.
    told = {"folder": str(folders / source), **how, **arguments}
    return Case(name, "resumed", told, config(partitions, seed=99))


@pytest.fixture(scope="module")
def results(folders: Path, request: pytest.FixtureRequest) -> dict[str, CaseResult]:
    """All launches: trainings that are saved first, then those that go on from there, in the same processes."""
    full = request.config.getoption("--full")
    # By default, only a training of two partitions that goes on there has all that takes long.
    how = THOROUGH if full else QUICK
    found = launch(4, CASES, [whole(folders, 2, "2x2", how)])
    found |= launch(1, CASES, [whole(folders, 1, "1", how), whole(folders, 1, "nadam", how, "nadam")])
    if full:
        found |= launch(3, CASES, [whole(folders, 3, "3", how)])
    optimizers = ("adafactor", "averages", "legacy") if full else ("averages",)
    with_full = [
        resumed(folders, 2, "3", how),
        resumed(folders, 2, "1", THOROUGH),
        resumed(folders, 2, "2", THOROUGH, when="after evaluation"),
        resumed(folders, 2, "2", {**THOROUGH, "eager": True}, when="before", optimizer="adam"),
    ]
    cases = [
        whole(folders, 2, "2", THOROUGH),
        *(whole(folders, 2, name, how, name) for name in optimizers),
        *(with_full if full else []),
        resumed(folders, 2, "2", THOROUGH),
        resumed(folders, 2, "2", THOROUGH, when="after"),
        resumed(folders, 1, "2x2", how),
        # Nadam has a product of momenta that no weight has: the same on every number of ranks.
        resumed(folders, 2, "nadam", how, when="before", optimizer="nadam"),
        *(resumed(folders, 2, name, how, when="before", optimizer=name) for name in optimizers),
        Case("rotation", "rotation", {"folder": str(folders / "rotation")}, config(2)),
        Case("measured", "measured", {"folder": str(folders / "measured")}, config(2)),
        Case("nothing", "restored_from_nothing", {"folder": str(folders / "nothing")}, config(2)),
        Case(
            "early",
            "asked_before_a_step",
            {"folder": str(folders / "early"), "is_new": True, "is_thorough": full},
            config(2),
        ),
        Case("background", "saved_in_background", {"folder": str(folders / "background")}, config(2)),
    ]
    if full:
        cases += [
            Case("export", "saved_for_export", {"folder": str(folders / "export")}, config(2)),
            Case("fallen back", "fallen_back", {"folder": str(folders / "fallen back")}, config(2)),
        ]
    found |= launch(2, CASES, cases)
    others = [Case("early on 1", "asked_before_a_step", {"folder": str(folders / "early"), "is_new": False}, config(1))]
    found |= launch(1, CASES, others) if full else {}
    for partitions in (1, 3) if full else (1,):
        [again] = launch(partitions, CASES, [resumed(folders, partitions, "2", THOROUGH)]).values()
        found[f"on {partitions}: resumed 2"] = again
    return found


def union(values: list[Any]) -> dict[str, np.ndarray]:
    """What the ranks of replica 0 store together."""
    together: dict[str, np.ndarray] = {}
    for value in values:
        if value["replica"] == 0:
            together |= value["state"]
    return together


RESUMED = {
    "2 to 2": ("2", "resumed 2"),
    "2 to 2, after steps": ("2", "resumed 2 after"),
    "2 to 2, after evaluation": ("2", "resumed 2 after evaluation"),
    "2 to 2, eagerly": ("2", "resumed 2 before adam"),
    "1 to 2": ("1", "resumed 1"),
    "3 to 2": ("3", "resumed 3"),
    "2 to 3": ("2", "on 3: resumed 2"),
    "2 to 1": ("2", "on 1: resumed 2"),
    "2x2 to 1x2": ("2x2", "resumed 2x2"),
    "adafactor": ("adafactor", "resumed adafactor before adafactor"),
    "averages": ("averages", "resumed averages before averages"),
    "legacy": ("legacy", "resumed legacy before legacy"),
    "1 to 2, nadam": ("nadam", "resumed nadam before nadam"),
}
#: "1 to 2" is also what Nadam does, and by default most go on eagerly.
ONLY_FULL = ("2 to 2, after evaluation", "2 to 2, eagerly", "1 to 2", "3 to 2", "2 to 3", "adafactor", "legacy")
WAYS = params(RESUMED, ONLY_FULL)


@pytest.mark.parametrize("way", WAYS)
def test_a_resumed_training_is_the_uninterrupted_one(way: str, results: dict[str, CaseResult]) -> None:
    source, name = RESUMED[way]
    expected, got = results[f"whole {source}"].values(), results[name].values()
    for rank in got:
        assert Path(rank["path"]).name == "ckpt-1"
        [losses, *_] = [other["losses"] for other in expected if other["replica"] == rank["replica"]]
        np.testing.assert_allclose(rank["losses"], losses, rtol=1e-9)
    # Metrics and moving averages of other replicas go on from those of replica 0.
    there, here = union(expected), union(got)
    assert here.keys() == there.keys()
    for key, value in there.items():
        np.testing.assert_allclose(here[key], value, rtol=1e-9, atol=1e-12, err_msg=f"{way}: {key}")


@pytest.mark.parametrize("way", WAYS)
def test_no_rank_reads_or_holds_what_another_stores(way: str, results: dict[str, CaseResult]) -> None:
    ranks = [rank for rank in results[RESUMED[way][1]].values() if rank["replica"] == 0]
    for rank in ranks:
        assert rank["read of stages"] == rank["held of stages"]
    assert len({key for rank in ranks for key in rank["read of stages"]}) == sum(
        len(r["read of stages"]) for r in ranks
    )


def test_a_rank_reads_what_it_stores_and_holds_a_little_of_it_at_a_time(results: dict[str, CaseResult]) -> None:
    small, large = results["measured"].values()
    assert (small["own"], large["own"]) == (32_000_000, 96_000_000)
    for rank in (small, large):
        for when in ("read at the first step", "read under way"):
            # Once to see that nothing is damaged anywhere, and once to assign it; and the indices.
            assert 1.0 * rank["own"] < rank[when] < 2.0 * rank["own"] + 8e6, (when, rank)
        # Tensors are read in groups of up to 16 MiB, of which the one before may not have been given back; the larger
        # rank restores 96 MB.
        assert rank["memory"] < 80e6, rank


def test_parts_hold_what_their_stage_owns(results: dict[str, CaseResult], folders: Path) -> None:
    results["whole 2x2"].values()
    manifest = checkpoint_files.read_manifest(str(folders / "2x2"), "ckpt-1")
    assert (manifest.partitions, manifest.replicas) == (2, 2)
    assert [part.prefix.partition("/")[0] for part in manifest.parts] == ["mp_rank_0", "mp_rank_1"]
    for key, stored in manifest.tensors.items():
        assert stored.part == (stored.stage or 0), key
    keys = list(manifest.tensors)
    assert "model/hidden/0/kernel" in keys
    assert "model/hidden/0/kernel/.OPTIMIZER_SLOT/optimizer/momentums" in keys
    shared = [key for key, stored in manifest.tensors.items() if stored.stage is None]
    assert sorted(shared) == [
        "metrics/0/count",
        "metrics/0/total",
        "optimizer/_current_learning_rate",
        "optimizer/_iterations",
        "save_counter",
        "seen",
    ]


def test_keys_do_not_depend_on_the_number_of_partitions(results: dict[str, CaseResult], folders: Path) -> None:
    saved = [name for name in ("1", "2", "3", "2x2") if (folders / name).exists()]
    assert len(saved) >= 3
    first, *others = [sorted(checkpoint_files.read_manifest(str(folders / n), "ckpt-1").tensors) for n in saved]
    assert others == [first] * len(others)


def test_rotation_keeps_the_latest_saved(results: dict[str, CaseResult], folders: Path) -> None:
    for rank in results["rotation"].values():
        assert rank["kept"] == [
            ["ckpt-1"],
            ["ckpt-1", "ckpt-2"],
            ["ckpt-2", "ckpt-3"],
            ["ckpt-3", "ckpt-4"],
            ["ckpt-3", "ckpt-4"],
        ]
        assert rank["latest"] == "ckpt-4"
    files = [path.name for path in (folders / "rotation").rglob("*") if path.is_file()]
    assert len(files) == 2 * (1 + 2 * 2) + 1, files
    # Empty, since the job that saved has ended.
    assert (folders / "rotation" / ".ckpt.in-use").read_text() == ""


def test_restoring_from_nothing_does_nothing_and_says_so_once(results: dict[str, CaseResult]) -> None:
    result = results["nothing"]
    for rank in result.values():
        assert rank["paths"] == [None, None, None]
    assert result.output[0].count("smp_tf: there is no checkpoint in '") == 1
    assert result.output[0].count("smp_tf: there is no checkpoint 'ckpt-7' in '") == 1
    assert "there is no" not in result.output[1]


def test_state_that_nothing_takes_up_is_an_error_on_every_rank(results: dict[str, CaseResult], folders: Path) -> None:
    results["whole 2"].values()
    case = Case("left over", "left_over", {"folder": str(folders / "2")}, config(2))
    [result] = launch(2, CASES, [case]).values()
    words = (
        rf"Checkpoint 'ckpt-1' in {folders / '2'} holds state that nothing here has taken up: "
        r"(optimizer/_\w+|metrics/0/\w+|, )+[^,]*momentums"
    )
    for rank in result.values():
        (_, in_the_second_step), (kind, in_save) = rank["told"]
        assert re.search(words, in_the_second_step)
        assert kind == "CheckpointError"
        assert re.match(words, in_save)


@pytest.mark.parametrize("name", ["early", pytest.param("early on 1", marks=pytest.mark.full)])
def test_what_was_restored_is_saved_and_listed_before_a_step(name: str, results: dict[str, CaseResult]) -> None:
    """Bug: a checkpoint became a model only in a job that ran a step."""
    [kept, *_], wanted = ([rank[key] for rank in results["early"].values()] for key in ("kept", "wanted"))
    for rank in results[name].values():
        for way in ("listed", "file"):
            assert all(map(np.array_equal, rank[way], kept)), way
        np.testing.assert_allclose(rank["losses"], wanted[0], rtol=1e-9)
        if name == "early":
            # Where the checkpoint had them, and, without one, half of the bytes each, until there is a plan.
            assert rank["stages"] == [0, 0, 1, 1, 1, 1, 1, 1]
            if "initial" in rank:
                assert rank["stages of fresh"] == [0, 0, 0, 0, 1, 1, 1, 1]
                assert rank["stages by the plan"] == rank["stages"]
                assert rank["initial"]


def test_steps_run_while_a_checkpoint_is_written(results: dict[str, CaseResult], folders: Path) -> None:
    for rank in results["background"].values():
        assert (rank["while it is written"], rank["then"]) == ([], ["ckpt-1"])
        assert "rank 1 (host " in rank["told"]
        assert "OSError: [Errno 28] No space left on device" in rank["told"]
        assert "Checkpoint 'ckpt-2' was being saved in the background" in rank["told"]
        assert rank["at the end"] == ["ckpt-1", "ckpt-4"]
    folder = str(folders / "background")
    sync, background = (checkpoint_files.read_manifest(folder, name) for name in ("sync-1", "ckpt-1"))
    assert sync.tensors == background.tensors
    assert sync.random == background.random
    read = [dict(checkpoint_tensors.read_tensors(folder, one, one.tensors)) for one in (sync, background)]
    # The same bits, but for how often was saved.
    assert [key for key in read[0] if not np.array_equal(read[0][key], read[1][key])] == ["save_counter"]


@pytest.mark.full
def test_an_export_holds_the_bits_of_the_job_s_own_file(results: dict[str, CaseResult], folders: Path) -> None:
    assert [rank["stages"] for rank in results["export"].values()] == [[0, 1]] * 2
    folder, script = folders / "export", Path(exported_model.__file__)
    arguments = [str(folder), str(folder / "out.keras"), "--model", f"{script}:compiled", "--optimizer"]
    assert command_line.main(["checkpoint", "export", *arguments]) == 0
    job, out = (tf_keras.models.load_model(folder / name) for name in ("job.keras", "out.keras"))
    assert all(map(np.array_equal, out.get_weights(), job.get_weights()))
    # Both slots of four weights, which the job's file does not have whole, and the step counter.
    assert len(out.optimizer.variables) == 2 * 4 + 1
    assert out.optimizer.iterations == 2


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)


def test_a_damaged_tensor_is_named_on_all_ranks_and_nothing_is_loaded(
    results: dict[str, CaseResult], folders: Path
) -> None:
    results["whole 2"].values()
    shutil.copytree(folders / "2", folders / "damaged")
    [path] = (folders / "damaged" / "mp_rank_1").glob("*.data-*")
    flip(path, 11)
    cases = [
        Case(name, "damaged", {"folder": str(folders / "damaged"), "after": after}, config(2))
        for name, after in (("after", True), ("before", False))
    ]
    for result in launch(2, CASES, cases).values():
        for rank in result.values():
            assert f"cannot be read from {path}; the file is damaged." in rank["told"], rank
            assert "rank 1 (host " in rank["told"]
            # Before the first step, what is the script's own is restored at once.
            assert [key for key in rank["changed"] if result.case.name == "after" or key.startswith("model")] == []


@pytest.mark.full
def test_the_newest_whole_checkpoint_is_taken_on_all_ranks(results: dict[str, CaseResult], folders: Path) -> None:
    result = results["fallen back"]
    for rank in result.values():
        assert rank["told"].endswith("\nmanager.restore(fall_back=True) takes the newest checkpoint that is whole.")
        assert Path(rank["path"]).name == "ckpt-1"
        assert all(map(np.array_equal, rank["weights"], rank["expected"]))
    said = (
        f"smp_tf: 'ckpt-1', the newest whole checkpoint in '{folders / 'fallen back'}', is restored. 'ckpt-2' is left"
    )
    assert [output.count(said) for output in result.output] == [1, 0]


def test_a_save_of_some_ranks_only_is_an_error_in_time(folders: Path) -> None:
    case = Case("one", "saved_by_one_rank", {"folder": str(folders / "one")}, config(2))
    [result] = launch(2, CASES, [case]).values()
    assert "saving checkpoint 'ckpt-1'" in (result.ranks[0].error or ""), result.report()
    # The stall timeout is half an hour.
    assert max(rank.seconds for rank in result.ranks) < 120
    assert list((folders / "one").glob("*.json")) == []


def save_and_kill(rank: int, call: str, number: int, folder: Path, *options: str) -> str:
    """Let a rank be killed at its n-th call of a kind in a second save; the name of the latest checkpoint, found whole.

    `tests/smp_tf/checkpoint/test_checkpoint_cuts.py` tries all states of the disk without processes.
    """
    script = "tests/distributed/scripts/killed_save.py"
    outcome = launch_script(2, script, [str(folder), str(rank), call, str(number), *options])
    assert outcome.returncode != 0
    assert not outcome.timed_out, outcome.report()
    assert outcome.line_with("@@ killed", rank) is not None, outcome.report()
    found = checkpoint_files.listing(str(folder), "ckpt")
    assert found.damaged == ()
    for manifest in found.manifests:
        checkpoint_files.check_files(str(folder), manifest)
        tensors = checkpoint_tensors.read_tensors(str(folder), manifest, manifest.tensors)
        read = {key: value.numpy() for key, value in tensors}
        assert read["number"] == int(manifest.name[-1])
    return found.names[-1]


@pytest.mark.parametrize(
    ("rank", "call", "expected"),
    [
        (0, "replace", "ckpt-1"),
        *(
            pytest.param(*moment, marks=pytest.mark.full)
            for moment in ((1, "fsync", "ckpt-1"), (0, "fsync", "ckpt-1"), (0, "remove", "ckpt-2"))
        ),
    ],
)
def test_a_rank_that_is_killed_while_it_saves_leaves_a_checkpoint(
    rank: int, call: str, expected: str, tmp_path: Path
) -> None:
    assert save_and_kill(rank, call, 1, tmp_path) == expected


@pytest.mark.parametrize(
    ("rank", "call", "number", "expected"),
    [
        (1, "fsync", 1, "ckpt-1"),
        *(
            pytest.param(*moment, marks=pytest.mark.full)
            for moment in ((0, "fsync", 3, "ckpt-1"), (0, "replace", 1, "ckpt-1"), (0, "fsync", 6, "ckpt-2"))
        ),
    ],
)
def test_a_rank_that_is_killed_while_it_writes_in_the_background_leaves_a_checkpoint(
    rank: int, call: str, number: int, expected: str, tmp_path: Path
) -> None:
    assert save_and_kill(rank, call, number, tmp_path, "asynchronous") == expected


# A part is synced in four calls, then the manifest in two, the deletion of the earlier one in one.
MOMENTS = [
    *((1, "makedirs", 1, "ckpt-1"), *((1, "fsync", n, "ckpt-1") for n in (2, 3, 4))),
    *((0, "makedirs", n, "ckpt-1") for n in (1, 2)),
    *((0, "fsync", n, "ckpt-1") for n in (2, 3, 4, 5)),
    *((0, "fsync", n, "ckpt-2") for n in (6, 7)),
    *((0, "remove", n, "ckpt-2") for n in (2, 3, 4, 5)),
]


@pytest.mark.full
@pytest.mark.parametrize(("rank", "call", "number", "expected"), MOMENTS)
def test_a_rank_that_is_killed_at_any_call_leaves_a_checkpoint(
    rank: int, call: str, number: int, expected: str, tmp_path: Path
) -> None:
    assert save_and_kill(rank, call, number, tmp_path) == expected
