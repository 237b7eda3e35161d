"""What `model.profile` measures decides where the model is cut, and nothing else."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.distributed.harness import Case, launch, launch_script

CASES = "tests.distributed.cases.profile"


@pytest.mark.distributed
@pytest.mark.alone
def test_layers_that_were_seen_to_take_long_are_on_different_stages(tmp_path: Path) -> None:
    config = {"partitions": 2, "microbatches": 2, "seed": 3, "optimize": "speed"}
    kept = {"profiled": True, "folder": str(tmp_path)}
    asked = {"estimated": {"profiled": False}, "measured": kept, "found": kept, "damaged": {**kept, "damage": True}}
    results = launch(2, CASES, [Case(name, "train", arguments, config) for name, arguments in asked.items()])
    values = {name: result.values() for name, result in results.items()}
    for name in ("measured", "found", "damaged"):
        assert [rank["layers"] for rank in values[name]] == [["slow0"], ["block0", "block1", "block2", "slow1"]], name
    assert [rank["layers"] for rank in values["estimated"]] != [rank["layers"] for rank in values["measured"]]
    for rank in (rank for ranks in values.values() for rank in ranks):
        # Where it is cut, and that it was measured, changes no number: masks and initial weights are the same.
        assert rank["losses"] == pytest.approx(values["measured"][0]["losses"], rel=1e-6)
        assert rank["too_late"].startswith("Model 'net' has run a step already, by whose plan it stays.")
    # Each rank has measured some of the units, and all have the times of all, found or measured.
    shares = [rank["ran"] for rank in values["measured"]]
    assert sorted(shares[0] + shares[1]) == [
        "net/block0",
        "net/block1",
        "net/block2",
        "net/drop",
        "net/slow0",
        "net/slow1",
    ]
    assert sorted(map(len, shares)) == [3, 3]
    assert {"net/slow0", "net/slow1"} & {*shares[0]} != {"net/slow0", "net/slow1"}
    assert values["measured"][0]["times"] == values["measured"][1]["times"]
    # While the other rank waits a layer is no slower, and at most twice as fast.
    alone = values["measured"][0]["alone"]
    assert all(0.5 <= share <= 1.0 for share in alone), alone
    assert [rank["alone"] for name in ("measured", "found") for rank in values[name]] == [alone] * 4
    assert values["estimated"][0]["alone"] == [1.0, 1.0]
    assert [rank["ran"] for rank in values["found"]] == [[], []]
    assert [rank["times"] for rank in values["found"]] == [rank["times"] for rank in values["measured"]]
    assert [len(rank["ran"]) for rank in values["damaged"]] == [3, 3]
    assert "are known from an earlier profile; nothing is measured" in results["found"].output[0]
    assert "is damaged and not used" in results["damaged"].output[0]


SCRIPT = """
import os

import tf_keras
from tf_keras import layers

def build():
    dense = [layers.Dense(8, name=f"dense{n}") for n in range(5)]
    return tf_keras.Sequential([tf_keras.Input((8,)), *dense], name="chain")

def build_on_one():
    if os.environ["HOROVOD_RANK"] == "1":
        raise ValueError("no data here")
    return build()
"""


@pytest.mark.distributed
def test_a_model_that_one_process_cannot_make_is_told_in_its_words(tmp_path: Path) -> None:
    """It went to meet the others, to end, and was told to make the same calls as they; or left, and so it was told."""
    script = tmp_path / "measured.py"
    script.write_text(SCRIPT)
    command = Path(sys.executable).with_name("smp-tf")
    options = ["profile", f"{script}:build_on_one", "--batch-size", "8"]
    ran = launch_script(2, command, options, environment={"SMP_TF_PROFILES": "off"})
    assert ran.returncode != 0
    assert not ran.timed_out, ran.report()
    words = f"{script}:build_on_one failed at line 13: ValueError: no data here"
    # The library's thread and the command tell it, in either order.
    assert f"smp-tf: {words}" in ran.output(1).splitlines(), ran.report()
    assert "Traceback" not in ran.output(1)
    for rank in range(2):
        assert f" ends the job: {words}" in ran.output(rank), ran.report()
        assert "left the loop" not in ran.output(rank), ran.report()


@pytest.mark.distributed
def test_the_command_shares_the_layers_out_over_several_processes(tmp_path: Path) -> None:
    """It was of one process only, which measured all layers, and none as beside another."""
    script, kept = tmp_path / "measured.py", tmp_path / "profiles"
    script.write_text(SCRIPT)
    command = Path(sys.executable).with_name("smp-tf")
    options = ["profile", f"{script}:build", "--microbatches", "2", "--batch-size", "8"]
    ran = launch_script(2, command, options, environment={"SMP_TF_PROFILES": str(kept)})
    ran.expect_clean()
    assert "profiling the 5 units of model 'chain'" in ran.output(0)
    [file] = kept.iterdir()
    assert f"smp-tf: kept in {file}" in ran.output(0)
    profile = json.loads(file.read_text())
    assert sorted(profile["units"]) == [f"chain/chain/dense{n}" for n in range(5)]
    assert profile["hardware"]["processes"] == 2
    # What a message takes of a processor, and each byte: under a second, and under a second for a MiB.
    of_message, of_byte = profile["message"]
    assert 0.0 <= of_message < 1.0
    assert 0.0 < of_byte < 2.0**-20
    assert "a microbatch of 4, forward and backward" in ran.output(0)
    assert "microbatch" not in ran.output(1)
    # A training of two ranks finds it, and so does the command.
    again = launch_script(2, command, options, environment={"SMP_TF_PROFILES": str(kept)}).expect_clean()
    assert "are known from an earlier profile; nothing is measured" in again.output(0)
    wrong = launch_script(2, command, [*options, "--threads", "0"], environment={"SMP_TF_PROFILES": str(kept)})
    assert wrong.returncode != 0
    # The launcher may end the other one before it has said so, too.
    assert any("smp-tf: 'intra_op_threads'" in wrong.output(rank) for rank in range(2))
