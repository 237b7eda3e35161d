"""`smp-tf profile`: what it prints and keeps, and that `smp-tf plan` goes by it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import tensorflow as tf

import smp_tf as smp
from smp_tf.command import layer_times
from smp_tf.command import main as command_line
from smp_tf.command.named_function import named_function
from smp_tf.model.profiling import forward_backward
from smp_tf.partition.graph.fingerprint import fingerprint

pytestmark = pytest.mark.large

SCRIPT = """
import tensorflow as tf
import tf_keras
from tf_keras import layers

class Repeats(layers.Layer):
    def build(self, shape):
        self.kernel = self.add_weight("kernel", (8, 8))

    def call(self, x):
        times = tf.size(x) * 0 + 3000
        return tf.while_loop(lambda i, y: i < times, lambda i, y: (i + 1, tf.tanh(y @ self.kernel)), (0, x))[1]

def build():
    slow = [Repeats(name=f"slow{n}") for n in range(2)]
    dense = [layers.Dense(8, name=f"dense{n}") for n in range(2)]
    return tf_keras.Sequential([tf_keras.Input((8,)), *slow, *dense], name="chain")

class Raises(layers.Layer):
    def call(self, x):
        with tf.control_dependencies([tf.debugging.assert_greater(x, 2.0)]):
            return tf.identity(x)

def refused():
    inputs = [tf_keras.Input((8,)), layers.Dense(8, name="first"), Raises(name="raises"), layers.Dense(8, name="last")]
    return tf_keras.Sequential(inputs, name="chain")

class Python(layers.Layer):
    def call(self, x):
        return tf.ensure_shape(tf.py_function(lambda y: 2 * y, [x], tf.float32), x.shape)

def python():
    inputs = [tf_keras.Input((8,)), layers.Dense(8, name="first"), Python(name="python"), layers.Dense(8, name="last")]
    return tf_keras.Sequential(inputs, name="chain")

def not_a_model():
    return 7

class Fails(layers.Layer):
    def call(self, x):
        raise LookupError("no\\nlayer")

def fails():
    return tf_keras.Sequential([layers.Dense(8), Fails()], name="chain"), tf.zeros([8, 8])
"""


@pytest.fixture
def script(tmp_path: Path, keras_defaults: None, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("SMP_TF_PROFILES", str(tmp_path / "profiles"))
    path = tmp_path / "measured.py"
    path.write_text(SCRIPT)
    return str(path)


def profile(*arguments: str) -> int:
    return command_line.main(["profile", *arguments])


def plan(*arguments: str) -> int:
    return command_line.main(["plan", *arguments, "--partitions", "2", "--optimize", "speed"])


SIZES = ("--microbatches", "2", "--batch-size", "8")


def test_a_model_is_measured_once_and_planned_by_its_times(
    script: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(f"{script}:build", *SIZES) == 0
    assert "estimated from the sizes of operations, not measured" in capsys.readouterr().out
    assert profile(f"{script}:build", *SIZES) == 0
    said = capsys.readouterr()
    assert "a microbatch of 4, forward and backward" in said.out
    [kept] = (tmp_path / "profiles").iterdir()
    assert f"kept in {kept}" in said.err
    times = json.loads(kept.read_text())["units"]
    assert list(times) == [f"chain/chain/{name}" for name in ("slow0", "slow1", "dense0", "dense1")]
    taken = {name: sum(both) for name, both in times.items()}
    slow = min(seconds for name, seconds in taken.items() if "slow" in name)
    assert slow > 3 * max(seconds for name, seconds in taken.items() if "slow" not in name), times
    rows = {row[1]: row[2:8] for line in said.out.splitlines() if len(row := re.split(r"\s*│\s*", line)) > 8}
    assert rows["chain/chain/slow0"][0] == f"{1e3 * times['chain/chain/slow0'][0]:,.2f}"

    # The same once more, without measuring.
    assert profile(f"{script}:build", *SIZES) == 0
    again = capsys.readouterr()
    assert again.out == said.out
    assert "are known from an earlier profile; nothing is measured" in again.err

    # The plan separates what takes long, which its estimate does not know.
    assert plan(f"{script}:build", *SIZES, "--json", str(tmp_path / "plan.json")) == 0
    measured = capsys.readouterr()
    assert "the times are measured ones, of 4 of the 4 units" in " ".join(measured.out.split())
    assert measured.out.splitlines()[-1].endswith("; from measured times")
    assert "times as measured on" in measured.err
    stages = json.loads((tmp_path / "plan.json").read_text())["plans"][0]["units"]
    assert (stages["chain/chain/slow0"], stages["chain/chain/slow1"]) == (0, 1)
    assert plan(f"{script}:build", *SIZES, "--static") == 0
    assert "not measured" in capsys.readouterr().out
    # Of a microbatch of another size nothing is known.
    assert plan(f"{script}:build", "--batch-size", "8") == 0
    said = capsys.readouterr()
    assert "not measured" in said.out
    assert "only microbatches of 4 samples on" in said.err


def test_a_training_finds_what_the_command_has_measured(script: str, tmp_path: Path, init: Callable[..., None]) -> None:
    assert profile(f"{script}:build", *SIZES) == 0
    [kept] = (tmp_path / "profiles").iterdir()
    init()
    model = smp.DistributedModel(named_function(f"{script}:build"))
    traced = forward_backward(model).trace(tf.ones([4, 8]), training=True)
    assert fingerprint(traced.graph) == json.loads(kept.read_text())["subject"]["fingerprint"]


def test_a_damaged_profile_is_measured_again(script: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert profile(f"{script}:build", *SIZES) == 0
    [kept] = (tmp_path / "profiles").iterdir()
    whole = kept.read_text()
    kept.write_text(whole[:-9])
    assert plan(f"{script}:build", *SIZES) == 0
    assert "is damaged and not used" in capsys.readouterr().err
    assert profile(f"{script}:build", *SIZES) == 0
    assert "is damaged and not used" in capsys.readouterr().err
    assert json.loads(kept.read_text()).keys() == json.loads(whole).keys()


def test_a_unit_that_cannot_be_run_is_named_and_nothing_is_kept(
    script: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert profile(f"{script}:refused", *SIZES) == 0
    said = capsys.readouterr()
    assert "chain/chain/raises could not be measured. InvalidArgumentError" in said.err
    assert not (tmp_path / "profiles").exists()


def test_python_of_the_script_that_runs_backward_only_once_is_estimated(
    script: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second backward pass of a `tf.py_function` ended the command with a traceback: KeyError."""
    assert profile(f"{script}:python", *SIZES) == 0
    said = capsys.readouterr()
    assert "chain/chain/python could not be measured. UnknownError: KeyError: b'pyfunc_" in said.err
    assert re.search(r"chain/chain/last +│ +[0-9.]+ ", said.out)


@pytest.mark.parametrize(
    ("target", "options", "words"),
    [
        ("build", [], 'named as "train.py:build"'),
        ("{script}:not_a_model", [], "must return a Keras model"),
        (
            "{script}:fails",
            [],
            "'chain' could not be traced with its example inputs, in call at line 41 of {script}: LookupError: no",
        ),
        ("{script}:build", ["--batch-size", "0"], "--batch-size must be at least 1. Received: 0"),
        ("{script}:build", ["--microbatches", "0"], "microbatches"),
        ("{script}:build", ["--threads", "0"], "intra_op_threads"),
        ("{script}:build", ["--microbatches", "1,9"], "a batch of 8, and 9 microbatches"),
    ],
)
def test_wrong_arguments_are_told_in_a_line(
    script: str, target: str, options: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert profile(target.format(script=script), "--batch-size", "8", *options) == 2
    said = capsys.readouterr()
    assert words.format(script=script) in said.err.splitlines()[-1]
    assert said.err.splitlines()[-1].startswith("smp-tf: ")
    # Nothing was measured before.
    assert said.out == ""


def test_ctrl_c_on_one_of_several_processes_is_told_to_the_others(
    script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command catches it, so that nothing else would tell them."""
    told: list[str] = []

    def interrupt(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(layer_times, "OfflineModel", interrupt)
    monkeypatch.setattr(layer_times, "world_size", lambda: 2)
    monkeypatch.setattr(layer_times.lifecycle, "init", lambda config: None)
    monkeypatch.setattr(layer_times.lifecycle, "end_all", lambda error: told.append(str(error)))
    assert profile(f"{script}:build") == 130
    assert capsys.readouterr().err == "smp-tf: interrupted.\n"
    assert told == ["interrupted"]


@pytest.mark.parametrize(("text", "numbers"), [("8", [8]), ("1,4,16", [1, 4, 16]), ("4,1,4", [4, 1])])
def test_numbers_of_microbatches_may_stand_before_the_model(text: str, numbers: list[int]) -> None:
    given = command_line.parser().parse_args(["profile", "--microbatches", text, "train.py:build"])
    assert (given.microbatches, given.target) == (numbers, "train.py:build")


@pytest.mark.parametrize("text", ["", "1,,4", "some", "1 4"])
def test_what_are_no_numbers_of_microbatches_is_told(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command_line.parser().parse_args(["profile", "--microbatches", text, "train.py:build"])
    assert ended.value.code == 2
    assert f"several with commas, such as 1,4,16, and received '{text}'" in capsys.readouterr().err


def test_numbers_that_give_one_size_are_measured_once(
    script: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert profile(f"{script}:build", "--batch-size", "10", "--microbatches", "6,5,7") == 0
    said = capsys.readouterr()
    assert "6, 5, 7 microbatches have 2 samples at most: measured once" in said.err
    assert said.out.count("a microbatch of 2, forward and backward") == 1
    assert len(list((tmp_path / "profiles").iterdir())) == 1
    _, _, last = said.out.partition("a batch of 10, one microbatch after the other")
    rows = [re.split(r"\s*│\s*", line)[1:-1] for line in last.splitlines() if line.startswith("│")]
    assert [row[:2] for row in rows] == [["6", "2"], ["5", "2"], ["7", "2"]]
    assert rows[1][4] == "1.00"
    assert last.splitlines()[-1] == (
        "Microbatches that have fewer samples than the largest count as it does, in a plan too."
    )


def test_what_every_further_microbatch_costs_decides_how_many_there_are(
    script: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    batch = (f"{script}:build", "--batch-size", "16")
    assert profile(*batch, "--microbatches", "1,4") == 0
    said = capsys.readouterr()
    assert "a microbatch of 16, forward and backward" in said.out
    assert "a microbatch of 4, forward and backward" in said.out
    _, _, last = said.out.partition("a batch of 16, one microbatch after the other")
    rows = [re.split(r"\s*│\s*", line)[1:-1] for line in last.splitlines() if line.startswith("│")]
    assert [row[:2] for row in rows] == [["1", "16"], ["4", "4"]]
    # The loops of the model take hardly longer for 16 samples than for four.
    assert rows[0][4] == "1.00"
    assert float(rows[1][4]) > 1.5
    kept = {json.loads(file.read_text())["subject"]["samples"]: file for file in (tmp_path / "profiles").iterdir()}
    assert kept.keys() == {4, 16}

    def proposed_where_units_take(seconds: Callable[[int], float], source: str = "from measured times") -> int:
        for samples, file in kept.items():
            record = json.loads(file.read_text())
            file.write_text(json.dumps({**record, "units": dict.fromkeys(record["units"], [seconds(samples)] * 2)}))
        assert plan(*batch, "--microbatches", "auto", "--ranks", "2") == 0
        said = capsys.readouterr()
        assert said.err.count("times by those of microbatches of 4, 16 samples, as measured on") == 1
        assert said.out.splitlines()[-1].endswith(f"; {source}")
        assert ("the times of 4 of the 4 units are by measured ones of other sizes" in said.out) == ("other" in source)
        return proposed(said.out)

    assert proposed_where_units_take(lambda samples: 0.01) == 1
    others = "by measured times of other sizes of a microbatch, 4 to 16 samples"
    assert proposed_where_units_take(lambda samples: 0.001 * (8 + samples), others) == 2
    assert proposed_where_units_take(lambda samples: 0.001 * samples, others) == 16

    # By one size alone more microbatches would cost nothing.
    kept[16].unlink()
    assert plan(*batch, "--microbatches", "auto", "--ranks", "2") == 0
    said = capsys.readouterr()
    assert "only microbatches of 4 samples on" in said.err
    assert "not measured" in said.out


def proposed(table: str) -> int:
    """The number of microbatches that a comparison recommends."""
    rows = [re.split(r"\s*│\s*", line)[1:-1] for line in table.splitlines() if line.startswith("│")]
    [taken] = [row for row in rows if row[-1] == "taken"]
    return int(taken[2])
