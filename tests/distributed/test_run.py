"""Trainings that `smp-tf run` starts: a failure, and a start after it from the newest checkpoint."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import uuid
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.distributed import left_behind
from tests.distributed.harness import ONE_THREAD, ROOT
from tests.distributed.job import WARM

SCRIPTS = ROOT / "tests/distributed/scripts"
RUN = [sys.executable, "-m", "smp_tf.command.main", "run"]
DEADLINE = 240.0


def run(words: Sequence[str | Path], folder: Path, warm: bool = True) -> tuple[int, str, str]:
    """Runs `smp-tf run`. Returns its exit code and both outputs.

    Args:
        words: its options, then the script and its arguments.
        folder: where the script may write.
        warm: whether ranks are forked from a process that has imported TensorFlow.
    """
    mark = uuid.uuid4().hex
    environment = {**os.environ, **ONE_THREAD, "PYTHONPATH": str(ROOT), "TMPDIR": str(folder)}
    environment |= {"TF_CPP_MIN_LOG_LEVEL": "2", "TF_ENABLE_ONEDNN_OPTS": "0", "HOROVOD_CYCLE_TIME": "60"}
    if warm:
        environment |= WARM.environment(environment)
    environment[left_behind.MARK] = mark
    job = subprocess.Popen(
        [*RUN, *map(str, words)], env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT
    )
    overdue = threading.Timer(DEADLINE, left_behind.kill_all, [mark])
    overdue.start()
    try:
        out, err = job.communicate()
    finally:
        overdue.cancel()
    living = left_behind.wait_until_gone(mark, 20.0)
    left_behind.kill_all(mark)
    assert living == {}, (out, err)
    return job.returncode, out, err


def epochs(out: str) -> dict[int, str]:
    """What rank 0 says of each epoch."""
    return {int(number): words for number, words in re.findall(r"\[0\] epoch +(\d+): (mean loss [^,]+),", out)}


@pytest.mark.full
def test_a_killed_training_goes_on_from_its_newest_checkpoint(tmp_path: Path) -> None:
    script = [ROOT / "tests/distributed/rank_main.py", SCRIPTS / "failing_resume.py"]
    code, out, err = run(["-np", "2", "--restarts", "1", *script, tmp_path / "one", "--epochs", "2"], tmp_path)
    assert code == 0, (out, err)
    assert re.search(r"smp-tf: the job failed \(try 1 of 2\)\n  who +rank 1 of 2 \(host .*\), killed by SIGKILL", err)
    assert "smp-tf: try 2 of 2 begins." in err
    assert re.search(r"\[0\] .*restored: 1 epochs done", out), out
    assert set(epochs(out)) >= {2}
    assert not re.search("[\b\r\x1b]", out + err)


DIFFER = r"The ranks traced different models for step 'forward_backward'\."
BLOCK = {
    "raise": (1, "rank 1 of 2", r"LookupError: there is no sample number 48", r"training\.py:\d+ in main"),
    "model": (
        1,
        "",
        r"The ranks traced different models for step 'forward_backward'\.",
        r"training\.py:\d+ in train_step",
    ),
    "shape": (1, "rank 1 of 2", r"Rank 1 \(host .*\) is about to run step", r"training\.py:\d+ in "),
}


@pytest.mark.full
@pytest.mark.parametrize("mode", BLOCK)
def test_a_failure_is_told_in_one_block(mode: str, tmp_path: Path) -> None:
    code, who, why, where = BLOCK[mode]
    words = ["-np", "2", "--log-dir", tmp_path / "logs", ROOT / "tests/distributed/rank_main.py"]
    found, out, err = run([*words, SCRIPTS / "training.py", mode], tmp_path)
    block = err[err.index("smp-tf: the job failed") :]
    assert found == code, (out, err)
    assert who in block
    assert re.search(f"  why +{why}", block), err
    assert re.search(f"  where +.*{where}", block), err
    assert block.splitlines()[-1].endswith(".log")
