"""What docs/starting.md says of hosts, on one that goes by two names; two that are apart are in test_two_hosts.py."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from tests.distributed.harness import ONE_THREAD, launch_script
from tests.docs.pages import page

SCRIPT = "tests/distributed/scripts/two_hosts.py"
#: Of one host each.
NAMES = ["localhost", "127.0.0.1"]


def command_for_slurm() -> str:
    """That of docs/starting.md, of the only row that asks Slurm."""
    (command,) = re.findall(r"^\| `(horovodrun .*scontrol.*?)` \|", page("docs/starting.md"), re.MULTILINE)
    return command.replace(r"\|", "|")


@pytest.fixture
def slurm(tmp_path: Path) -> dict[str, str]:
    """The variables of a batch script that was given two hosts, for a task on each."""
    scontrol = tmp_path / "scontrol"
    names = r"\n".join(NAMES)
    scontrol.write_text(f"#!/bin/sh\n[ \"$*\" = 'show hostnames' ] && printf '{names}\\n'\n")
    scontrol.chmod(0o755)
    return {"SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "1", "PATH": f"{tmp_path}:/usr/bin:/bin"}


def test_the_command_for_slurm_starts_one_job_on_the_hosts_that_it_was_given(slurm: dict[str, str]) -> None:
    # What the shell makes of it, a word in each line.
    asked = f"horovodrun() {{ printf '%s\\n' \"$@\"; }}; {command_for_slurm()}"
    told = subprocess.run(["bash", "-c", asked], env=slurm, capture_output=True, text=True, check=True)
    words = told.stdout.splitlines()
    assert words == ["-np", "2", "-H", "localhost:1,127.0.0.1:1", "python", "train.py"], shlex.join(words)
    assert told.stderr == ""

    variables = {name: value for name, value in slurm.items() if name != "PATH"}
    outcome = launch_script(2, SCRIPT, environment={**ONE_THREAD, **variables}, hosts=words[3]).expect_clean()
    for rank in (0, 1):
        line = outcome.line_with("training ", rank)
        assert line is not None, outcome.report()
        ours = json.loads(line.text.removeprefix("training "))
        assert (ours["rank"], ours["replica"]) == (rank, 0), outcome.report()
        # Two hosts for Horovod, one for the transport.
        assert set(ours["lanes"][str(1 - rank)]) <= {"posix", "sysv"}
        assert ours["reads"] == [True, True]


def test_tensors_are_left_to_ucx_where_the_user_says_so() -> None:
    outcome = launch_script(2, SCRIPT, environment={**ONE_THREAD, "SMP_TF_READ_MEMORY": "off"}).expect_clean()
    for rank in (0, 1):
        line = outcome.line_with("training ", rank)
        assert line is not None, outcome.report()
        assert json.loads(line.text.removeprefix("training "))["reads"] == [False, False]
        # Nor is anybody told of what was chosen.
        assert "each other's memory" not in outcome.output(rank)
