"""`smp-tf run`: its help, and what it says of arguments that are wrong. tests/smp_tf/launch has what it starts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from smp_tf.command import main as command_line
from smp_tf.command.output import UsageError
from smp_tf.command.run import command_of, variables_of


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with a script and a module; no job of Slurm."""
    (tmp_path / "train.py").write_text("")
    (tmp_path / "package").mkdir()
    monkeypatch.chdir(tmp_path)
    for name in ("SLURM_JOB_NODELIST", "SLURM_NODELIST"):
        monkeypatch.delenv(name, raising=False)


def test_its_help_says_how_and_what_comes_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        command_line.main(["run", "--help"])
    assert end.value.code == 0
    said = capsys.readouterr().out
    assert said.startswith("usage: smp-tf run [-np N] [options] SCRIPT [arguments of the script]\n")
    for words in (
        "-H HOST:SLOTS,...",
        "--restarts N",
        "--log-dir FOLDER",
        "exit codes: 0;",
        "smp-tf run -np 4 train.py",
    ):
        assert words in said
    assert max(map(len, said.splitlines())) <= 120


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "Say what the ranks are to run, such as: smp-tf run -np 2 train.py"),
        (["-np", "2"], "Say what the ranks are to run, such as: smp-tf run -np 2 train.py"),
        (["train.py"], "Say how many processes there are to be, such as: smp-tf run -np 2 train.py"),
        (["-np", "2", "none.py"], "There is no script 'none.py' (looked in "),
        (["-np", "2", "python", "train.py"], "`smp-tf run` starts Python by itself, the one that it runs with."),
        (["-np", "2", "--nope", "train.py"], "unrecognized arguments: --nope (smp-tf run --help says more)"),
        (
            ["-np", "2", "-m", "nowhere.train"],
            "There is no module 'nowhere.train': 'nowhere' is neither installed nor in",
        ),
        (["-np", "2", "-m"], "-m needs a module, such as: smp-tf run -np 2 -m package.train"),
        (["-np", "two", "train.py"], "argument -np/-n: expected a number, and received 'two'"),
        (["-np", "9", "-H", "a:2", "train.py"], "9 ranks are to run, and there are 2 slots (-H a:2: a:2)."),
        (["-np", "1", "-x", "=1", "train.py"], "-x takes NAME=VALUE, or a NAME that is set in the environment."),
        (["-np", "1", "-x", "NOT_SET_HERE", "train.py"], "Received: 'NOT_SET_HERE'."),
        (["-np", "1", "--restarts", "-1", "train.py"], "--restarts is 0 or more. Received: -1."),
        (["-np", "1", "--grace", "-1", "train.py"], "argument --grace: expected a number of seconds"),
        (
            ["-H", "no-such-host.invalid:2", "train.py"],
            "Host 'no-such-host.invalid' has no address that this host knows.",
        ),
        (["-np", "1", "--log-dir", "train.py", "train.py"], "--log-dir train.py cannot be written: File exists."),
    ],
)
def test_what_is_wrong_is_told_in_a_line(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = command_line.main(["run", *arguments])
    except SystemExit as end:
        code = int(end.code or 0)
    said = capsys.readouterr()
    assert (code, said.out) == (2, "")
    [line] = said.err.splitlines()
    assert line.startswith("smp-tf: ")
    assert words in line


def test_the_command_is_that_of_this_python() -> None:
    assert command_of(["train.py", "--verbose", "-np"], None) == [sys.executable, "train.py", "--verbose", "-np"]
    assert command_of(["--", "train.py"], None) == [sys.executable, "train.py"]
    assert command_of([], ["package.train", "-x"]) == [sys.executable, "-m", "package.train", "-x"]
    assert command_of([], ["json.tool"]) == [sys.executable, "-m", "json.tool"]
    with pytest.raises(UsageError):
        command_of([], ["-v"])


def test_variables_are_set_and_passed_on() -> None:
    found = variables_of(["A=1=2", "B", "C="], {"B": "3", "SMP_TF_SECRET": "ours"}, is_verbose=False)
    assert found == {"PYTHONUNBUFFERED": "1", "TF_CPP_MIN_LOG_LEVEL": "2", "A": "1=2", "B": "3", "C": ""}
    assert variables_of([], {"TF_CPP_MIN_LOG_LEVEL": "0", "SMP_TF_SECRET_FILE": "f"}, is_verbose=False) == {
        "PYTHONUNBUFFERED": "1"
    }
    assert "SMP_TF_SECRET" not in variables_of(["SMP_TF_SECRET_FILE=f"], {}, is_verbose=False)
    made = [variables_of([], {}, is_verbose=True).pop("SMP_TF_SECRET") for _ in range(2)]
    assert made[0] != made[1]
    assert len(made[0]) == 64
