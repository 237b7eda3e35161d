"""Where nothing fits, every setting that is said to fit does: each is tried, by the command that gave it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from smp_tf.command import main as command_line

pytestmark = pytest.mark.large

SCRIPT = """
import tf_keras
from tf_keras import layers

def dense():
    return tf_keras.Sequential([tf_keras.Input((256,)), *(layers.Dense(256) for _ in range(9))], name="dense")

def tanhs():
    pairs = ((layers.Dense(32, name=f"d{n}"), layers.Activation("tanh", name=f"a{n}")) for n in range(6))
    made = [layer for pair in pairs for layer in pair]
    return tf_keras.Sequential([tf_keras.Input((64, 32)), *made], name="tanhs")
"""
#: Rank 0 has more memory than the others.
UNLIKE = "[{count: 1, ranks: 1, memory: 6MiB, RATES}, {count: 2, ranks: 2, memory: 3MiB, RATES}]"
ALIKE = "[{count: 5, ranks: 1, memory: 3MiB, RATES}]"

#: A setting in words, and the options that it stands for.
OPTIONS = (
    (r"(\d+) partitions", "--partitions"),
    (r"(\d+) replicas?", "--replicas"),
    (r"on (\d+) ranks", "--ranks"),
    (r"(?<!about )(\d+) microbatches", "--microbatches"),
    (r'pipeline "(\w+)"', "--pipeline"),
    (r"a memory_limit of ([\d.]+ \w+)", "--memory-limit"),
)


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, keras_defaults: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("m.py").write_text(SCRIPT)
    rates, links = "flops: 1e12, memory_bandwidth: 1e12", "within_host: 1e11\nbetween_hosts: 1e10\n"
    for name, hosts in (("unlike", UNLIKE), ("alike", ALIKE)):
        Path(f"{name}.yaml").write_text(f"hosts: {hosts.replace('RATES', rates)}\n{links}")


def fits(words: str, options: dict[str, str]) -> bool:
    """Whether there is a plan with some options, of which a setting takes the place."""
    changed = dict(options)
    for pattern, option in OPTIONS:
        if found := re.search(pattern, words):
            changed[option] = found[1]
            if option == "--partitions" and options.get("--partitions") == "auto":
                # What is told are the settings that come nearest.
                changed["--microbatches"], changed["--pipeline"] = NEAREST.search(options["told"]).group(3, 1)
    changed.pop("told", None)
    if "recompute true" in words:
        changed["--recompute"] = ""
    if changed.get("--partitions") not in (None, "auto") and "--replicas" not in changed and "--ranks" in changed:
        changed.pop("--ranks")
    given = [word for pair in changed.items() for word in pair if word]
    return command_line.main(["plan", *given]) == 0


NEAREST = re.compile(r"Nearest comes (\w+) with (\d+) partitions? and (\d+) microbatch")


@pytest.mark.parametrize(
    ("target", "options", "expected"),
    [
        ("dense", "--partitions 2 --microbatches 4 --memory-limit 4MiB", ["partitions", "memory_limit"]),
        # A limit above what the ranks have, and ranks that have enough but for the limit, were said to fit.
        ("dense", "--partitions 2 --microbatches 4 --cluster alike.yaml --memory-limit 2.9MiB", ["partitions"]),
        (
            "dense",
            "--partitions 2 --replicas 1 --microbatches 4 --cluster unlike.yaml --ranks 2",
            ["4 partitions, on 4 ranks"],
        ),
        ("dense", "--partitions 2 --microbatches 4 --replicas 1 --cluster unlike.yaml --memory-limit 3.5MiB", []),
        # More partitions than there are ranks were said to fit, without a word of more ranks.
        ("dense", "--partitions 2 --microbatches 4 --ranks 2 --memory-limit 4MiB", ["3 partitions, on 3 ranks"]),
        ("dense", "--partitions auto --ranks 2 --microbatches 4 --memory-limit 4MiB", ["3 partitions, on 3 ranks"]),
        # What Horovod averages in is more than all else, and one replica does not average.
        ("dense", "--partitions 2 --replicas 2 --microbatches 4 --memory-limit 8MiB", ["1 replica"]),
        ("tanhs", "--partitions 2 --microbatches 2 --memory-limit 1MiB", ["partitions", "microbatches"]),
    ],
)
def test_what_is_said_to_fit_does(
    target: str, options: str, expected: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    words = [f"m.py:{target}", *options.split(), "--batch-size", "32", "--proof", "0"]
    assert command_line.main(["plan", *words]) == 1
    told = capsys.readouterr().err
    [line] = [line for line in told.splitlines() if line.startswith("What would fit: ")]
    settings = line.removeprefix("What would fit: ").rstrip(".").split("; or ")
    assert all(any(part in setting for setting in settings) for part in expected), settings
    given = {words[0]: "", **dict(zip(words[1::2], words[2::2], strict=True)), "told": told}
    for setting in settings:
        if "ranks with" not in setting:
            assert fits(setting, given), setting


def test_a_plan_of_a_file_is_looked_at_with_more_microbatches_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    """The number of microbatches was that of another placement, and more partitions were advised for a file of two."""
    made = ["m.py:tanhs", "--partitions", "2", "--batch-size", "32", "--microbatches", "2", "--json", "plan.json"]
    assert command_line.main(["plan", *made]) == 0
    file = Path("plan.json")
    units = [line.strip() for line in file.read_text().splitlines() if re.match(r' +"tanhs/.*": 0,$', line)]
    text = file.read_text()
    for line in units[1:]:
        text = text.replace(line, line.replace(": 0", ": 1"))
    file.write_text(text)
    looked = ["m.py:tanhs", "--partition-file", "plan.json", "--batch-size", "32", "--memory-limit", "1.2MiB"]
    capsys.readouterr()
    assert command_line.main(["plan", *looked]) == 1
    told = capsys.readouterr().err
    assert "more partitions" not in told
    [found] = re.findall(r"What would fit: .*?(\d+) microbatches", told)
    assert command_line.main(["plan", *looked, "--microbatches", found]) == 0


def test_ranks_may_be_idle_where_nothing_else_fits(capsys: pytest.CaptureFixture[str]) -> None:
    """Of 11 ranks only 1 and 11 partitions were tried, with replicas that average."""
    words = ["m.py:dense", "--partitions", "auto", "--ranks", "11", "--batch-size", "32", "--microbatches", "4"]
    assert command_line.main(["plan", *words, "--memory-limit", "3MiB", "--pipeline", "interleaved"]) == 0
    said = capsys.readouterr()
    [taken] = [line for line in said.out.splitlines() if line.rstrip("│ ").endswith("taken")]
    partitions, replicas = (int(cell) for cell in taken.split("│")[1:3])
    assert (1 < partitions <= 9, replicas) == (True, 1)
    assert f"{11 - partitions} of the 11 ranks" in said.err


def test_replicas_that_are_asked_for_are_not_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["m.py:dense", "--partitions", "2", "--replicas", "2", "--microbatches", "auto", "--batch-size", "32"]
    assert command_line.main(["plan", *words, "--pipeline", "simple", "--memory-limit", "8MiB"]) == 1
    told = capsys.readouterr().err
    assert "; or 1 replica; or " in told


def test_a_model_that_cannot_be_traced_in_every_size_is_searched_in_the_others(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One size that a model refuses ended the search."""
    Path("half.py").write_text(
        "import tensorflow as tf, tf_keras\nfrom tf_keras import layers\n"
        "class Half(layers.Layer):\n    def call(self, x):\n        return tf.concat(tf.split(x, 2), axis=0)\n"
        "def build():\n    made = [layers.Dense(8), Half(), layers.Dense(8)]\n"
        "    return tf_keras.Sequential([tf_keras.Input((8,)), *made])\n"
    )
    words = ["plan", "half.py:build", "--partitions", "auto", "--ranks", "2", "--batch-size", "8"]
    assert command_line.main(words) == 0
    assert "settings tried" in capsys.readouterr().out
    assert command_line.main([*words, "--chunks-per-rank", "2", "--microbatches", "2"]) == 0
    assert command_line.main([*words, "--microbatches", "8"]) == 2
    assert "could not be traced" in capsys.readouterr().err
