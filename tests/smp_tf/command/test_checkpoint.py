"""`smp-tf checkpoint`: what it says of whole checkpoints, of damaged ones, and of what killed saves have left."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import tensorflow as tf

import smp_tf as smp
from smp_tf.command import main as command_line

STORED = Path(__file__).parents[1] / "checkpoint" / "stored_checkpoints"


@pytest.fixture
def folder(tmp_path: Path, init: Callable[..., None]) -> Path:
    """Three checkpoints, of steps 1, 2 and 30."""
    init()
    checkpoint = tf.train.Checkpoint(small=tf.Variable([1.0, 2.0]), large=tf.Variable(tf.ones([1000])))
    manager = smp.CheckpointManager(checkpoint, tmp_path / "saved")
    for number in (1, 2, 30):
        manager.save(number)
    smp.shutdown()
    return tmp_path / "saved"


def run(*arguments: object) -> int:
    return command_line.main(["checkpoint", *map(str, arguments)])


def only(folder: Path, pattern: str) -> Path:
    [path] = folder.glob(pattern)
    return path


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)


def rows(text: str) -> dict[str, tuple[str, str]]:
    """The step and the state of each checkpoint of a list."""
    lines = text.split("\n\n")[0].splitlines()[1:]
    return {words[0]: (words[1], words[-1]) for line in lines if (words := line.split())}


def test_whole_checkpoints_are_listed_and_verified(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("list", folder) == 0
    said = capsys.readouterr().out
    head, *lines = said.splitlines()
    assert head.split() == ["checkpoint", "step", "saved", "partitions", "replicas", "size", "whole"]
    assert len(lines) == 3
    for line, name, step in zip(lines, ("ckpt-1", "ckpt-2", "ckpt-30"), ("1", "2", "30"), strict=True):
        assert re.fullmatch(rf"{name} +{step}  \d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d +1 +1  [34]\.\d KiB  yes", line), line
    assert run("verify", folder) == 0
    said = capsys.readouterr().out
    words = r"(ckpt-\d+): whole\. 3 values in 1 part, \S+ KiB: all sizes, hashes and checksums are right\."
    assert re.findall(words, said) == ["ckpt-1", "ckpt-2", "ckpt-30"]
    assert run("verify", folder, "--step", "2") == 0
    assert re.findall(words, capsys.readouterr().out) == ["ckpt-2"]


def test_what_is_damaged_is_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    short = only(folder, "mp_rank_0/ckpt-1-*.data-*")
    short.write_bytes(short.read_bytes()[:-1])
    index = only(folder, "mp_rank_0/ckpt-30-*.index")
    flip(index, 9)
    assert run("list", folder) == 0
    said = capsys.readouterr().out
    assert rows(said) == {"ckpt-1": ("1", "no"), "ckpt-2": ("2", "yes"), "ckpt-30": ("30", "no")}
    assert f"ckpt-1: The file {short} of checkpoint ckpt-1 has 4015 bytes, but was written with 4016." in said
    assert f"ckpt-30: The file {index} of checkpoint ckpt-30 is damaged: its hash is another." in said
    assert said.endswith("The newest whole one is ckpt-2.\n")
    assert run("verify", folder) == 1
    said = capsys.readouterr().out
    assert said.startswith(f"ckpt-1: damaged\n  The file {short} of checkpoint ckpt-1 has 4015 bytes")
    assert "\nckpt-2: whole. " in said
    index.unlink()
    assert run("verify", folder, "--step", "30") == 1
    assert f"ckpt-30 lacks its file {index}: No such file or directory." in capsys.readouterr().out


def test_a_damaged_value_is_found_by_reading_it(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = only(folder, "mp_rank_0/ckpt-2-*.data-*")
    flip(path, 500)
    assert run("list", folder) == 0
    assert rows(capsys.readouterr().out)["ckpt-2"] == ("2", "yes")
    assert run("verify", folder, "--step", "2") == 1
    said = capsys.readouterr().out
    assert said.startswith(
        f"ckpt-2: damaged\n  'large' of checkpoint ckpt-2 cannot be read from {path}; the file is dam"
    )
    assert len(said.splitlines()) == 2
    assert run("verify", folder, "--step", "1") == 0


def test_an_interrupted_save_and_a_damaged_manifest_are_told_apart(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "ckpt-30.json").unlink()
    (folder / "ckpt-2.json").write_text("{")
    assert run("list", folder) == 0
    said = capsys.readouterr().out
    assert rows(said) == {"ckpt-1": ("1", "yes"), "ckpt-2": ("2", "no"), "ckpt-30": ("30", "interrupted")}
    assert f"ckpt-2: The checkpoint's manifest {folder / 'ckpt-2.json'} is damaged or truncated." in said
    assert "ckpt-30: It has no manifest: its save was interrupted, or goes on now." in said
    # An interrupted save leaves no checkpoint, so there is nothing that could be damaged.
    assert run("verify", folder) == 1
    said = capsys.readouterr().out
    assert "ckpt-1: whole" in said
    assert "ckpt-2: damaged" in said
    assert "ckpt-30" not in said
    assert run("verify", folder, "--step", "30") == 1
    said = capsys.readouterr().err
    assert said.startswith(f"smp-tf: There is no checkpoint ckpt-30 in '{folder}'. ckpt-30: It has no manifest")


def test_a_folder_without_checkpoints_says_so(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("list", folder, "--name", "best") == 0
    words = f"There is no checkpoint best-<step> in '{folder}'. There are others: --name ckpt.\n"
    assert capsys.readouterr().out == words
    assert run("verify", folder, "--step", "7") == 1
    assert capsys.readouterr().err == f"smp-tf: There is no checkpoint ckpt-7 in '{folder}'.\n"
    assert run("list", folder / "ckpt-1.json") == 2
    assert "is a file, and no folder" in capsys.readouterr().err
    assert run("list", folder / "none") == 2
    assert "none' is not there." in capsys.readouterr().err


def test_checkpoints_are_listed_without_tensorflow(tmp_path: Path) -> None:
    shutil.copytree(STORED, tmp_path / "stored")
    code = (
        "import sys\nfrom smp_tf.command.main import main\n"
        "assert main(['checkpoint', 'list', sys.argv[1], '--name', 'rows']) == 0\n"
        "assert 'tensorflow' not in sys.modules"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "stored")], capture_output=True, text=True, env=os.environ
    )
    assert ended.returncode == 0, ended.stderr
    assert rows(ended.stdout) == {"rows-1": ("1", "yes")}
