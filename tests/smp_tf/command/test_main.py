"""`smp-tf plan`: what it prints and writes, and what it says of what is wrong."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

import smp_tf as smp
from smp_tf.command import main as command_line
from smp_tf.command import output as command_output
from smp_tf.command.named_function import named_function
from smp_tf.config.config import check_config
from smp_tf.errors import ConfigError
from smp_tf.partition.graph.fingerprint import fingerprint
from smp_tf.partition.layout import Layout
from smp_tf.partition.plan.plan_file import PlanFile
from smp_tf.partition.spread import Whole
from smp_tf.pipeline.planner.units import units_of
from smp_tf.recording import timeline_file

SCRIPT = """
import tf_keras
from tf_keras import layers

SIZE = 3

def build():
    return tf_keras.Sequential([tf_keras.Input((8,)), *(layers.Dense(8, name=f"d{n}") for n in range(4))], name="chain")

def broken():
    raise OSError("no such data\\nat all")
"""


BRANCHING = """
import tf_keras
from tf_keras import layers

def build():
    inputs = tf_keras.Input((8,))
    shared, hidden, branches = layers.Dense(8, name="shared"), inputs, []
    for n in range(3):
        hidden = layers.Add(name=f"sum{n}")([hidden, layers.Dense(8, name=f"wide{n}")(shared(hidden))])
        branches += [layers.Dense(4 + 4 * way, name=f"branch{n}{way}")(hidden) for way in range(3)]
    joined = layers.Concatenate(name="joined")(branches)
    return tf_keras.Model(inputs, layers.Dense(2, name="head")(joined), name="tree")
"""


@pytest.fixture
def script(tmp_path: Path, keras_defaults: None) -> str:
    path = tmp_path / "planned.py"
    path.write_text(SCRIPT)
    return str(path)


def run(*arguments: str) -> int:
    return command_line.main(["plan", *arguments])


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line in which the command refuses something, without its name."""
    try:
        code = command_line.main(arguments)
    except SystemExit as end:
        code = int(end.code or 0)
    said = capsys.readouterr()
    assert (code, said.out) == (2, "")
    [line] = said.err.splitlines()
    name, _, words = line.partition(": ")
    assert name == "smp-tf"
    return words


def test_it_prints_the_plan_and_writes_it(script: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = ["--json", str(tmp_path / "plan.json"), "--html", str(tmp_path / "plan.html")]
    sizes = ["--partitions", "2", "--microbatches", "4", "--batch-size", "8"]
    assert run(f"{script}:build", *sizes, *files) == 0
    said = capsys.readouterr()
    assert "2 partitions, 4 microbatches, interleaved, balanced by stored bytes" in said.out
    assert "d0, d1" in said.out
    assert "step: " in said.out
    assert f"wrote {tmp_path / 'plan.json'}" in said.err
    stored = PlanFile.from_json((tmp_path / "plan.json").read_text())
    assert (stored.partitions, stored.plans[0].microbatches) == (2, 4)
    assert list(stored.plans[0].units.values()) == [0, 0, 1, 1]
    assert (tmp_path / "plan.html").read_text().startswith("<!DOCTYPE html>")


def test_it_writes_where_every_weight_would_be(script: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--partitions", "2", "--replicas", "2", "--shard-optimizer-state", "--batch-size", "8"]
    made = tmp_path / "layouts.json"
    assert run(f"{script}:build", *sizes, "--layouts", str(made)) == 0
    said = json.loads(made.read_text())
    assert (said["partitions"], said["replicas"]) == (2, 2)
    # Two layers on each stage, and the slots of each layer on one of the replicas.
    wanted = {
        f"d{n}/{part}": Layout(n // 2, n // 2, gradient=Whole("D", n % 2, 2), slots=Whole("D", n % 2, 2))
        for n in range(4)
        for part in ("kernel", "bias")
    }
    assert said["layouts"] == {name: layout.to_json() for name, layout in wanted.items()}
    text = tmp_path / "layouts.txt"
    assert run(f"{script}:build", *sizes, "--layouts", str(text)) == 0
    assert text.read_text().splitlines() == [f"{name}: {layout}" for name, layout in wanted.items()]
    assert f"wrote {text}" in capsys.readouterr().err


def test_a_training_finds_its_plan_in_the_file(
    script: str, tmp_path: Path, init: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.json"
    assert run(f"{script}:build", "--partitions", "2", "--batch-size", "8", "--json", str(path)) == 0
    init()
    model = smp.DistributedModel(named_function(f"{script}:build"))

    @smp.step
    def train(x: tf.Tensor, y: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
        return tape.gradient(loss, model.trainable_variables), loss

    # Another step, of another loss, and for batches of another size.
    graph = train.trace(tf.zeros([5, 8]), tf.zeros([5, 8])).graph
    units = units_of(graph)
    found = PlanFile.from_json(path.read_text()).plan_for("train", graph, units, fingerprint(graph))
    assert [found.units[unit.name] for unit in units] == [0, 0, 1, 1]


def test_the_same_plan_every_time(script: str, tmp_path: Path) -> None:
    texts = []
    for name in ("first.json", "second.json"):
        assert run(f"{script}:build", "--partitions", "3", "--batch-size", "8", "--json", str(tmp_path / name)) == 0
        texts.append((tmp_path / name).read_text())
    assert texts[0] == texts[1]


@pytest.mark.full
def test_fresh_processes_that_hash_otherwise_make_the_same_plan(tmp_path: Path) -> None:
    """As the ranks of a training must: each makes its own plan, and sets of names have another order in each."""
    (tmp_path / "tree.py").write_text(BRANCHING)
    sizes = ["--partitions", "3", "--microbatches", "4", "--batch-size", "8", "--optimize", "speed", "--static"]
    running = [
        subprocess.Popen(
            [
                sys.executable,
                "-m",
                "smp_tf.command.main",
                "plan",
                "tree.py:build",
                *sizes,
                "--json",
                f"{seed}.json",
            ],
            env=os.environ | {"PYTHONHASHSEED": seed, "TF_CPP_MIN_LOG_LEVEL": "3"},
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for seed in ("1", "2")
    ]
    said = [process.communicate(timeout=300) for process in running]
    assert [process.returncode for process in running] == [0, 0], said
    first, second = ((tmp_path / f"{seed}.json").read_bytes() for seed in ("1", "2"))
    assert len(PlanFile.from_json(first.decode()).plans[0].units) == 20
    assert first == second
    assert said[0][0] == said[1][0]


@pytest.mark.parametrize(
    ("target", "options", "words"),
    [
        ("build", [], 'named as "train.py:build" or "package.module:build". Received: \'build\''),
        ("nowhere.py:build", [], "There is no script 'nowhere.py'"),
        ("no.such.module:build", [], "There is no module 'no'"),
        ("{script}:other", [], "has no function 'other'"),
        ("{script}:SIZE", [], "'SIZE' in {script} must be a function. It is of type int"),
        ("{script}:broken", [], "broken failed at line 11: OSError: no such data"),
        ("{script}:build", ["--memory-limit", "much"], "memory_limit"),
        ("{script}:build", ["--pipeline", "fastest"], "pipeline"),
        ("{script}:build", ["--microbatches", "0"], "microbatches"),
        ("{script}:build", ["--batch-size", "0"], "--batch-size must be at least 1. Received: 0"),
        ("{script}:build", ["--json", "/nowhere/plan.json"], "There is no folder '/nowhere'"),
        ("{script}:build", ["--optimizer", "adman"], "no optimizer of the name 'adman'"),
        ("{script}:build", ["--pipeline", ""], "this is str ''."),
        ("{script}:build", ["--optimize", ""], "this is str ''."),
        ("{script}:build", ["--memory-limit", "9" * 400], "--memory-limit is at most 1 EiB. Received: 999"),
    ],
)
def test_wrong_arguments_are_told_in_a_line(
    script: str, target: str, options: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ["--partitions", "2", "--batch-size", "8"]
    assert run(target.format(script=script), *sizes, *options) == 2
    [said] = capsys.readouterr().err.splitlines()
    assert words.format(script=script) in said
    assert said.startswith("smp-tf: ")


def test_a_plan_that_was_changed_by_hand_is_looked_at(
    script: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, made = tmp_path / "plan.json", f"{script}:build"
    sizes = ["--partitions", "2", "--microbatches", "4", "--pipeline", "simple", "--recompute", "--batch-size", "8"]
    assert run(made, *sizes, "--json", str(file)) == 0
    planned = capsys.readouterr().out
    assert run(made, "--partition-file", str(file), "--batch-size", "8") == 0
    again = capsys.readouterr().out
    # The file says all of it: only what is proved of a plan of its own is not.
    assert "2 partitions, 4 microbatches, simple" in again
    assert "the placement is that of the plan that was loaded" in again
    table = [line for line in planned.splitlines() if "d0" in line or "d2" in line]
    assert table
    assert all(line in again for line in table)
    text = file.read_text()
    moved = re.sub(r'("chain/chain/d2": )1', r"\g<1>0", text)
    assert moved != text
    file.write_text(moved)
    assert run(made, "--partition-file", str(file), "--batch-size", "8", "--html", str(tmp_path / "plan.html")) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "moved by hand: chain/chain/d2 from partition 1 to 0" in said
    assert "moved by hand" in (tmp_path / "plan.html").read_text()


@pytest.mark.parametrize(
    ("options", "change", "words"),
    [
        (["--partitions", "3"], None, "is for 2 partitions. Received: 3"),
        (["--partitions", "auto"], None, "--partitions auto makes plans, and --partition-file has one"),
        (["--chunks-per-rank", "2"], None, "--chunks-per-rank is for a plan that is made"),
        (["--json", "other.json"], None, "--json is for a plan that is made"),
        (["--pipeline", "zb_v"], None, "has chunks on partitions [0, 1], on which 'zb_v' does not run"),
        (
            [],
            ("chain/d2", "chain/d9"),
            "It was changed, and no longer fits its model: it does not know the layer 'chain/chain/d2'",
        ),
        ([], ('"version": 5', '"version": 99'), "It is of version 99"),
        ([], ('"shared": {}', '"shared": {"nonsense": 0}'), "names 'nonsense', which is none of its 'variables'"),
        ([], ('"chain/chain/d2": 1', '"chain/chain/d2": 1, "chain/chain/d2": 0'), "has 'chain/chain/d2' 2 times"),
        ([], ('"partitions": 2', '"partitions": 3'), "It puts no layer on partition 2 of 3"),
        ([], ("{", ""), "is no plan that can be read. It is not JSON"),
    ],
)
def test_a_plan_that_cannot_be_looked_at_is_told_in_a_line(
    script: str,
    tmp_path: Path,
    options: list[str],
    change: tuple[str, str] | None,
    words: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "plan.json"
    assert run(f"{script}:build", "--partitions", "2", "--batch-size", "8", "--json", str(file)) == 0
    if change is not None:
        file.write_text(file.read_text().replace(*change))
    capsys.readouterr()
    assert run(f"{script}:build", "--batch-size", "8", "--partition-file", str(file), *options) == 2
    [said] = capsys.readouterr().err.splitlines()
    assert words in said


def test_a_plan_needs_partitions_or_a_file(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(f"{script}:build") == 2
    assert "--partitions P, or --partition-file FILE" in capsys.readouterr().err
    assert run(f"{script}:build", "--partition-file", "/nowhere/plan.json") == 2
    assert "does not exist" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("raise ValueError('not\\nnow')", "cannot be imported at line 12: ValueError: not"),
        ("import no_such_module", "cannot be imported at line 12: ModuleNotFoundError: No module named"),
        ("raise SystemExit(0)", "ends the process when it is imported (sys.exit). What is to run only as a script"),
    ],
)
def test_a_script_that_cannot_be_imported_is_told_in_a_line(
    script: str, lines: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path(script).write_text(f"{SCRIPT}{lines}\n")
    assert run(f"{script}:build", "--partitions", "2") == 2
    [said] = capsys.readouterr().err.splitlines()
    assert said.startswith(f"smp-tf: {script} ")
    assert words in said


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("raise SystemExit(0)", "f ends the process (sys.exit) in place of returning a model."),
        ("raise ValueError", "f failed at line 13: ValueError\n"),
        (
            "return build(), 'abc'",
            "Example inputs are arrays or tf.TensorSpecs of known rank. The function gave str 'abc'.",
        ),
        ("import tensorflow as tf; return build(), tf.TensorSpec(None)", "gave a TensorSpec of unknown rank."),
        ("import tensorflow as tf; return build(), tf.TensorSpec([])", "The function gave a scalar of float32: let"),
    ],
)
def test_a_function_that_gives_no_model_or_no_inputs_is_told_in_a_line(
    script: str, lines: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bugs: an exit in the function ended the command, as if there were a plan, and inputs gave a traceback."""
    Path(script).write_text(f"{SCRIPT}def f():\n    {lines}\n")
    assert run(f"{script}:f", "--partitions", "2", "--batch-size", "8") == 2
    said = capsys.readouterr().err
    assert len(said.splitlines()) == 1
    assert words in said


RAISING = """
import sys

import numpy as np
import tensorflow as tf
import tf_keras
from tf_keras import layers

class Net(tf_keras.Model):
    def __init__(self, forward):
        super().__init__(name="net")
        self.dense, self.forward = layers.Dense(8), forward

    def call(self, x):
        return self.forward(self.dense(x))

class Unspeakable(Exception):
    def __str__(self):
        raise RuntimeError

class Own(Exception):
    def __init__(self, first, second):
        super().__init__(first, second)

def given(forward, *loss, size=8):
    return Net(forward), np.zeros([8, size], np.float32), *loss

def lines(x):
    raise ValueError("\\n  no such\\nlayer")

def key(x):
    return {}[x.shape[1]]

def from_another(x):
    try:
        return {}["key"]
    except KeyError as error:
        raise OSError("in my words") from error

def own(x):
    raise Own("one", 2)

def ends(x):
    sys.exit(3)

@tf.custom_gradient
def without_gradient(x):
    def backward(above):
        raise LookupError("backward")
    return x, backward

def chain():
    return tf_keras.Sequential([tf_keras.Input((8,)), layers.Dense(8)], name="chain"), np.zeros([8, 9], np.float32)
"""
TRACED, LOSS = "Model 'net' could not be traced with its example inputs", "The loss of model 'net' could not be traced"


@pytest.mark.parametrize(
    ("result", "words"),
    [
        ("given(lines)", f"{TRACED}, in lines at line 29 of {{script}}: ValueError: no such"),
        ("given(key)", f"{TRACED}, in key at line 32 of {{script}}: KeyError: 8"),
        ("given(from_another)", f"{TRACED}, in from_another at line 38 of {{script}}: OSError: in my words"),
        ("given(own)", f"{TRACED}, in own at line 41 of {{script}}: Own: ('one', 2)"),
        ("given(ends)", "Model 'net' ends the process (sys.exit) when it is called."),
        ("given(lambda x: tf.matmul(x, x[:3]))", f"{TRACED}, in <lambda> at line 56 of {{script}}: ValueError: Dim"),
        ("chain()", "Model 'chain' could not be traced with its example inputs: ValueError: Input 0 of layer"),
        (
            "given(tf.nn.relu, lines)",
            f"{LOSS} with its outputs, in lines at line 29 of {{script}}: ValueError: no such",
        ),
        ("given(tf.nn.relu, lambda y: None)", "return a tensor of floating-point numbers. It returned None."),
        ("given(tf.nn.relu, lambda y: 7)", "return a tensor of floating-point numbers. It returned an int."),
        ("given(tf.nn.relu, tf.shape)", "return a tensor of floating-point numbers. It returned a tensor of int32."),
        ("given(tf.nn.relu, 7)", "The loss must be a function of the model's outputs. The function gave an int."),
        (
            "given(tf.nn.relu, without_gradient)",
            "The gradients of model 'net' could not be traced, in backward at line 49 of {script}: LookupError: back",
        ),
    ],
)
def test_what_raises_while_it_is_traced_is_told_in_a_line_and_where(
    script: str, result: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Keras's lines came along, with the arguments of the layer, and of the user's code all but the function."""
    Path(script).write_text(f"{RAISING}\ndef f():\n    return {result}\n")
    assert words.format(script=script) in refused(capsys, "plan", f"{script}:f", "--partitions", "1")


def test_an_error_that_has_no_words_is_told_by_its_type(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Bug: its own __str__ gave a traceback."""
    Path(script).write_text(f"{RAISING}\ndef f():\n    raise Unspeakable\n")
    assert refused(capsys, "plan", f"{script}:f", "--partitions", "1") == f"{script}:f failed at line 56: Unspeakable"


def test_where_another_file_fails_it_is_named(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Bug: the line of the script was told, from which it was called, or none."""
    helper = Path(script).with_name("helper_of_planned.py")
    helper.write_text("def g():\n    return int('no\\nnumber')\n\nif 'fails' in globals():\n    raise OSError\n")
    Path(script).write_text("def f():\n    import helper_of_planned\n    return helper_of_planned.g()\n")
    words = f"{script}:f failed in g at line 2 of {helper}: ValueError: invalid literal for int() with base 10: 'no"
    assert refused(capsys, "plan", f"{script}:f", "--partitions", "1").startswith(words)


def test_a_module_in_which_another_is_missing_is_there(
    script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bug: "There is no module 'not_installed'", as if that had been asked for."""
    module = Path(script).with_name("needs_another.py")
    module.write_text("import not_installed\n")
    monkeypatch.chdir(module.parent)
    words = f"needs_another cannot be imported at line 1 of {module}: ModuleNotFoundError: No module named"
    assert refused(capsys, "plan", "needs_another:f", "--partitions", "1").startswith(words)
    monkeypatch.delitem(sys.modules, "needs_another", raising=False)


@pytest.mark.parametrize(
    ("definition", "words"),
    [
        ("async def f(): return build()", "'f' in {script} must be a function that returns a model. It is a coroutine"),
        ("def f(): yield build()", "'f' in {script} must be a function that returns a model. It is a generator"),
        ("async def f(): yield build()", "'f' in {script} must be a function that returns a model. It is a generator"),
        ("async def g(): return build()\ndef f(): return g()", "f must return a model. It returned a coroutine"),
    ],
)
def test_what_gives_its_result_to_who_asks_again_is_refused(
    script: str,
    definition: str,
    words: str,
    capsys: pytest.CaptureFixture[str],
    recwarn: pytest.WarningsRecorder,
) -> None:
    """Bug: "coroutine was never awaited" besides."""
    Path(script).write_text(f"{SCRIPT}\n{definition}\n")
    assert words.format(script=script) in refused(capsys, "plan", f"{script}:f", "--partitions", "1")
    assert not [warning for warning in recwarn if "never awaited" in str(warning.message)]


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("planned.py::build", "There is no module 'planned.py:'. A script is named with its ending, .py. One colon"),
        ("planned.py:a:build", "There is no module 'planned.py:a'. A script is named with its ending, .py. One colon"),
        ("a:planned.py:build", "There is no script 'a:planned.py'. One colon stands before the function"),
        ("..:build", "'..' is a folder, not a module. A script is named with its ending, .py."),
        ("folder:build", "folder has no function 'build'. It is a folder: "),
        ("./folder:build", "'./folder' is a folder, not a module. A script"),
        ("./planned:build", "There is no module './planned'. A script is named with its ending, .py."),
        ("folder.py:build", "A script is a file that ends in .py. 'folder.py' is a folder."),
        ("loop.py:build", "The script 'loop.py' cannot be read: Too many levels of symbolic links."),
        ("link.py:build", "There is no script 'link.py'. It is a link to 'nowhere.py', which is not there."),
        ("planned.py/x.py:build", "The script 'planned.py/x.py' cannot be read: Not a directory."),
        ("pipe.py:build", "A script is a file that ends in .py. 'pipe.py' is none, but a device or a pipe."),
        (f"{'a' * 300}.py:build", "cannot be read: File name too long."),
        ("planned.py:biuld", "planned.py has no function 'biuld'. Did you mean 'build'?"),
    ],
)
def test_what_is_no_script_is_told_by_what_it_is(
    script: str, target: str, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was said that there was no such script, or module, whatever there was."""
    monkeypatch.chdir(Path(script).parent)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for folder in ("folder", "folder.py"):
        Path(folder).mkdir()
    for link, to in (("loop.py", "loop.py"), ("link.py", "nowhere.py")):
        Path(link).symlink_to(to)
    os.mkfifo("pipe.py")
    assert words in refused(capsys, "plan", target, "--partitions", "2")


def test_a_script_may_be_called_as_a_module_of_python(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Bug: it took the place of the module, and whatever came next had a traceback."""
    file = Path(script).with_name("types.py")
    file.write_text(SCRIPT)
    types = sys.modules["types"]
    assert run(f"{file}:build", "--partitions", "2", "--batch-size", "8") == 0
    assert sys.modules["types"] is types


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--partitions", "100001"], "--partitions is at most 100,000. Received: 100,001."),
        (
            ["--partitions", "2", "--replicas", "99999999999"],
            "--replicas is at most 100,000. Received: 99,999,999,999.",
        ),
        (["--partitions", "auto", "--ranks", "1000000"], "--ranks is at most 100,000. Received: 1,000,000."),
        (
            ["--partitions", "2", "--batch-size", "1" + "0" * 20],
            "One input of 100,000,000,000,000,000,000 samples takes",
        ),
        (["--partitions", "2", "--json", "same", "--html", "./same"], "would be written to one file: same."),
    ],
)
def test_what_is_too_large_and_files_that_are_one_are_refused(
    script: str, arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bugs: memory ran out, or the command went on for ever; and of the plan and its page only the page was left."""
    assert run(f"{script}:build", *arguments) == 2
    said = capsys.readouterr().err
    assert len(said.splitlines()) == 1
    assert words in said


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "the following arguments are required: COMMAND (smp-tf --help says more)"),
        (["paln"], "argument COMMAND: invalid choice: 'paln' (choose from "),
        (["plan"], "the following arguments are required: SCRIPT_OR_MODULE:FUNCTION (smp-tf plan --help says more)"),
        (["plan", "a.py:f", "--nonsense", "a\nb"], "unrecognized arguments: --nonsense a b (smp-tf plan --help says"),
        (["timeline", "a", "--nonsense"], "unrecognized arguments: --nonsense (smp-tf timeline --help says more)"),
        (
            ["plan", "a.py:f", "--partition", "2"],
            "ambiguous option: --partition could match --partitions, --partition-f",
        ),
        (
            ["plan", "a.py:f", "--batch-size", "x"],
            "argument --batch-size: expected a number, and received 'x' (smp-tf p",
        ),
        (
            ["plan", "a.py:f", "--proof", "nan"],
            "argument --proof: expected a number of seconds, or 0, and received 'nan'",
        ),
        (["plan", "a.py:f", "--json"], "argument --json: expected one argument (smp-tf plan --help says more)"),
    ],
)
def test_what_the_command_does_not_take_is_told_in_a_line(
    arguments: Sequence[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """There were ten lines of usage before it, and an unknown option was one of `smp-tf`."""
    assert refused(capsys, *arguments).startswith(words)


def test_values_that_are_none_are_called_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It said "NoneType None", and "a int"."""
    with pytest.raises(ConfigError, match=r"must be an int of at least 1; this is None\. It sets: parts a batch"):
        check_config({"microbatches": None}, "a test")
    cluster = tmp_path / "cluster.json"
    for text, kind in (("null", "None"), ("7", "an int"), ("[]", "a list")):
        cluster.write_text(text)
        words = refused(capsys, "plan", "a.py:f", "--partitions", "2", "--cluster", str(cluster))
        assert words.endswith(f"must hold a mapping of keys to values; it holds {kind}.")


@pytest.mark.parametrize(
    ("option", "file", "words"),
    [
        ("--json", "folder", "--json folder cannot be written: it is a folder."),
        ("--html", "", "--html . cannot be written: it is a folder."),
        (
            "--json",
            "planned.py/plan.json",
            "--json planned.py/plan.json cannot be written: '{folder}/planned.py' is a f",
        ),
        ("--html", "loop", "--html loop cannot be written: Too many levels of symbolic links."),
        ("--json", "a" * 300, "cannot be written: File name too long."),
        ("--json", "/proc/plan.json", "--json /proc/plan.json cannot be written: No such file or directory."),
        ("--html", "planned.py", "--html planned.py is a file that is read. Name another one."),
        ("--html", "folder/../planned.py", "--html folder/../planned.py is a file that is read. Name another one."),
    ],
)
def test_a_file_that_cannot_be_written_is_told_before_the_plan_is_made(
    script: str,
    option: str,
    file: str,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It was told a minute later, when all was planned; and the script was written over."""
    monkeypatch.chdir(Path(script).parent)
    Path("folder").mkdir()
    Path("loop").symlink_to("loop")
    # The function would be told otherwise.
    said = refused(capsys, "plan", "planned.py:broken", "--partitions", "2", option, file)
    assert words.format(folder=Path.cwd()) in said
    assert Path("planned.py").read_text() == SCRIPT


def test_a_file_that_may_not_be_written_is_told_before_the_plan_is_made(
    script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As if not by root, who may."""

    def refuse(path: Any, flags: int, *more: Any) -> int:
        raise PermissionError(13, "Permission denied")

    there = Path(script).with_name("there.json")
    there.write_text("as it was")
    monkeypatch.setattr(os, "open", refuse)
    for file in (there, there.with_name("new.json")):
        said = refused(capsys, "plan", f"{script}:broken", "--partitions", "2", "--json", str(file))
        assert said == f"--json {file} cannot be written: Permission denied."


def test_what_is_to_be_written_is_left_alone_until_it_is(
    script: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    there, new, link = (tmp_path / name for name in ("there.json", "new.html", "link.json"))
    there.write_text("as it was")
    link.symlink_to("far.json")
    options = ["--partitions", "2", "--batch-size", "8", "--html", str(new)]
    for file in (there, link):
        assert "broken failed" in refused(capsys, "plan", f"{script}:broken", *options, "--json", str(file))
    assert there.read_text() == "as it was"
    assert {path.name for path in tmp_path.glob("*.*")} == {"planned.py", "there.json", "link.json"}
    assert run(f"{script}:build", *options, "--json", str(link)) == 0
    assert PlanFile.from_json((tmp_path / "far.json").read_text()).partitions == 2


def test_files_are_written_where_the_command_was_given(
    script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bug: they went where the script had gone."""
    folder = Path(script).parent
    monkeypatch.chdir(folder)
    (folder / "elsewhere").mkdir()
    Path(script).write_text(f"import os\nos.chdir('elsewhere')\n{SCRIPT}")
    assert run("planned.py:build", "--partitions", "2", "--batch-size", "8", "--json", "plan.json") == 0
    assert (folder / "plan.json").is_file()
    assert "wrote plan.json" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["plan", "profile", "timeline"])
def test_ctrl_c_is_no_traceback(
    script: str, command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(paths: Any) -> Any:
        raise KeyboardInterrupt

    Path(script).write_text(f"{RAISING}\ndef f():\n    raise KeyboardInterrupt\n")
    monkeypatch.setattr(timeline_file, "read", interrupt)
    options = ["--partitions", "2"] if command == "plan" else []
    assert command_line.main([command, f"{script}:f", *options]) == 130
    assert capsys.readouterr().err == "smp-tf: interrupted.\n"
    assert not smp.is_initialized()


def test_ctrl_c_while_a_model_is_traced_is_no_traceback(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path(script).write_text(
        f"{RAISING}\ndef interrupt(x):\n    raise KeyboardInterrupt\n\ndef f():\n    return given(interrupt)\n"
    )
    assert run(f"{script}:f", "--partitions", "1") == 130
    assert capsys.readouterr().err == "smp-tf: interrupted.\n"


def test_an_output_that_nobody_reads_is_no_error(script: str, tmp_path: Path) -> None:
    """As of `smp-tf plan ... | head -1`: what was asked for besides is written."""
    reads, writes = os.pipe()
    os.close(reads)
    try:
        for arguments in (
            ["--help"],
            [f"{script}:build", "--partitions", "2", "--batch-size", "8", "--json", "a.json"],
        ):
            done = subprocess.run(
                [sys.executable, "-m", "smp_tf.command.main", "plan", *arguments],
                cwd=tmp_path,
                stdout=writes,
                stderr=subprocess.PIPE,
                text=True,
                check=False,
            )
            assert done.returncode == 0, done.stderr
            assert "Traceback" not in done.stderr
            assert "Broken" not in done.stderr
    finally:
        os.close(writes)
    assert PlanFile.from_json((tmp_path / "a.json").read_text()).partitions == 2


def test_an_output_that_cannot_be_written_is_told_in_a_line() -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "smp_tf.command.main", "plan", "--help"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert (done.returncode, done.stderr) == (2, "smp-tf: The output cannot be written: No space left on device.\n")


def test_what_an_output_has_no_letters_for_is_replaced() -> None:
    """Bug: where Python writes ASCII, the table gave a traceback."""
    written = io.BytesIO()
    output = io.TextIOWrapper(written, encoding="ascii")
    command_output.put("┃ 39% ┃", output)
    assert written.getvalue() == b"? 39% ?\n"
    command_output.put("where there is none", None)


def test_threads_are_limited(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Bug: TensorFlow ended the process."""
    assert command_line.main(["profile", f"{script}:build", "--threads", "5000"]) == 2
    assert capsys.readouterr().err == "smp-tf: --threads is at most 1024. Received: 5000.\n"


def test_a_script_that_calls_init_when_it_is_imported_can_be_planned(
    script: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """smp_tf ran already when it was started for the plan: AlreadyInitializedError, with a traceback."""
    Path(script).write_text(f"import smp_tf as smp\nsmp.init({{'partitions': 2, 'microbatches': 4}})\n{SCRIPT}")
    assert run(f"{script}:build", "--partitions", "2", "--batch-size", "8") == 0
    said = capsys.readouterr()
    assert "2 partitions, 1 microbatch" in said.out
    assert f"smp-tf: {script} calls smp.init when it is imported; its configuration is not used here" in said.err


def test_a_schedule_of_ones_own_is_planned_for_as_many_ranks_as_it_has(
    script: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mine.txt"
    file.write_text("0F0 0F1 0B0 0B1\n1F0 1I0 1F1 1I1 1W0 1W1\n")
    sizes = ["--batch-size", "8", "--pipeline", str(file)]
    plan = str(tmp_path / "plan.json")
    assert run(f"{script}:build", *sizes, "--partitions", "2", "--microbatches", "2", "--json", plan) == 0
    assert "2 partitions, 2 microbatches, own schedule, balanced by" in capsys.readouterr().out
    # Its plan has the tasks in place of a name, which it was refused for.
    assert run(f"{script}:build", "--batch-size", "8", "--partition-file", plan) == 0
    assert "2 partitions, 2 microbatches, own schedule, balanced by" in capsys.readouterr().out
    for partitions, microbatches, words in (
        ("3", "2", "A schedule has one line per rank, for 3 ranks 3 lines"),
        ("2", "4", "A schedule runs as many microbatches as a step has, 4"),
        ("auto", "2", "try schedules that have a name"),
    ):
        ranks = ["--ranks", "2"] if partitions == "auto" else []
        asked = ["--partitions", partitions, "--microbatches", microbatches, *ranks]
        assert run(f"{script}:build", *sizes, *asked) == 2
        said = capsys.readouterr().err.splitlines()[-1]
        assert said.startswith("smp-tf: ")
        assert words in said


def test_what_does_not_fit_is_told_with_what_would_help(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--partitions", "2", "--batch-size", "8"]
    assert run(f"{script}:build", *sizes, "--memory-limit", "1KiB") == 1
    said = capsys.readouterr().err
    assert "smp-tf: there is no such plan." in said
    assert "too much" in said
    assert "What would help: more partitions" in said


def test_auto_recommends_and_writes_what_it_takes(
    script: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # With Horovod's usual buffer nothing fits that has replicas.
    monkeypatch.setenv("HOROVOD_FUSION_THRESHOLD", "0")
    # Half a cycle is longer than a step of so small a model.
    monkeypatch.setenv("HOROVOD_CYCLE_TIME", "0")
    path = tmp_path / "plan.json"
    sizes = ["--partitions", "auto", "--ranks", "4", "--batch-size", "8"]
    assert run(f"{script}:build", *sizes, "--memory-limit", "4KiB", "--json", str(path)) == 0
    said = capsys.readouterr().out
    assert "settings tried" in said
    assert "does not fit" in said
    assert "taken" in said
    assert PlanFile.from_json(path.read_text()).partitions == 2


CLUSTER = """
hosts: [{count: 2, ranks: 2, memory: 1GiB, flops: 1e12, memory_bandwidth: 1e11}]
within_host: 1e11
between_hosts: 1e10
"""


def test_a_cluster_is_filled_with_replicas(script: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(CLUSTER)
    sizes = ["--partitions", "2", "--batch-size", "8", "--cluster", str(file)]
    assert run(f"{script}:build", *sizes) == 0
    assert "for a batch of 8 on each of 2 replicas, of which " in capsys.readouterr().out
    assert run(f"{script}:build", *sizes, "--replicas", "1") == 0
    assert "replicas" not in capsys.readouterr().out
    assert run(f"{script}:build", *sizes, "--memory-limit", "1KiB") == 1
    assert "memory_limit is 1.0 KiB" in capsys.readouterr().err


def test_replicas_that_share_slots_have_fewer_each(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    slots = []
    for more in ([], ["--shard-optimizer-state"]):
        assert run(f"{script}:build", "--partitions", "1", "--replicas", "2", "--batch-size", "8", *more) == 0
        [told] = re.findall(r"\+ ([\d.]+) KiB", capsys.readouterr().out)
        slots.append(float(told))
    assert 0.5 * slots[0] <= slots[1] < 0.7 * slots[0]


def test_what_is_on_the_host_is_not_limited(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    def nearest(*more: str) -> str:
        assert run(f"{script}:build", "--partitions", "1", "--batch-size", "8", "--memory-limit", "1KiB", *more) == 1
        [limit] = re.findall(r"a memory_limit of ([\d.]+ KiB)\.", capsys.readouterr().err)
        return str(limit)

    usual, gradients, slots = nearest(), nearest("--gradient-offload"), nearest("--optimizer-offload")
    assert float(usual.split()[0]) > float(gradients.split()[0]) > float(slots.split()[0])
    sizes = ["--partitions", "1", "--batch-size", "8", "--memory-limit", slots]
    assert run(f"{script}:build", *sizes, "--optimizer-offload") == 0
    assert "on the host: gradients and slots, " in capsys.readouterr().out
    assert run(f"{script}:build", *sizes, "--gradient-offload") == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--partitions", "auto"], "must know how many processes there are: --ranks N, or --cluster FILE."),
        (["--partitions", "auto", "--ranks", "0"], "--ranks must be at least 1. Received: 0."),
        (["--partitions", "auto", "--ranks", "2", "--replicas", "2"], "leave out --replicas."),
        (["--partitions", "2", "--ranks", "4", "--replicas", "3"], "3 replicas need 6 ranks. There are 4."),
        (["--partitions", "4", "--ranks", "2"], "4 partitions need as many ranks. There are 2."),
        (["--partitions", "2", "--cluster", "/nowhere.yaml"], "/nowhere.yaml does not exist"),
    ],
)
def test_wrong_numbers_of_ranks_are_told_in_a_line(
    script: str, options: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(f"{script}:build", "--batch-size", "8", *options) == 2
    said = capsys.readouterr().err.splitlines()
    assert said[-1].startswith("smp-tf: ")
    assert words in said[-1]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            ["3", "--ranks", "4"],
            "1 of the 4 ranks would be idle: 3 partitions and 1 replica take 3; with 2 or 4 partitions",
        ),
        (
            ["2", "--ranks", "5"],
            "1 of the 5 ranks would be idle: 2 partitions and 2 replicas take 4; with 1 or 5 partitions",
        ),
        (
            ["2", "--ranks", "6", "--replicas", "1"],
            "4 of the 6 ranks would be idle: 2 partitions and 1 replica take 2; with 3 replicas",
        ),
        (
            ["2", "--ranks", "3", "--microbatches", "auto"],
            "1 of the 3 ranks would be idle: 2 partitions and 1 replica take 2; with 1 or 3 partitions",
        ),
        (["2", "--ranks", "4"], ""),
        (["2", "--replicas", "2", "--ranks", "4"], ""),
        (["auto", "--ranks", "3"], ""),
    ],
)
def test_ranks_that_would_be_idle_are_told(
    script: str, options: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ["--batch-size", "8", "--static", "--proof", "0"]
    assert run(f"{script}:build", *sizes, "--partitions", *options) == 0
    assert capsys.readouterr().err == (f"smp-tf: {words} none would be\n" if words else "")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[" * 100_000, "The files do not hold what smp_tf writes of a timeline. RecursionError"),
        (
            '{"smp_tf": {"version": 1, "ranks": [{"rank": Infinity}]}, "traceEvents": []}',
            "is no timeline that smp_tf has",
        ),
        (None, "File name too long"),
    ],
)
def test_a_damaged_timeline_is_told_in_a_line(
    tmp_path: Path, text: str | None, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / ("a" * 300 if text is None else "rank_0.json")
    if text is not None:
        file.write_text(text)
    assert words in refused(capsys, "timeline", str(file))


def test_a_timeline_is_not_written_over_what_it_was_made_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rank_0.json").write_text("{}")
    asked = ["timeline", str(tmp_path), "--trace", str(tmp_path / "rank_0.json")]
    assert refused(capsys, *asked).endswith("rank_0.json is a file that is read. Name another one.")
    both = ["timeline", str(tmp_path), "--trace", str(tmp_path / "a"), "--html", str(tmp_path / "a")]
    assert "--html and --trace would be written to one file" in refused(capsys, *both)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (('"pipeline": "interleaved"', '"pipeline": "foo"'), "names a pipeline that cannot be had. "),
        (('"microbatches": 1', '"microbatches": 1000000'), "'microbatches' is at most 100,000. Received: 1,000,000."),
        (None, "cannot be read: it is no file, but a device, a pipe or a socket."),
    ],
)
def test_what_is_wrong_in_a_plan_file_names_it(
    script: str, tmp_path: Path, changes: tuple[str, str] | None, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A pipe was waited for, and a schedule that there is not was told as if it were an option."""
    file = tmp_path / "plan.json"
    if changes is None:
        os.mkfifo(file)
    else:
        assert run(f"{script}:build", "--partitions", "2", "--batch-size", "8", "--json", str(file)) == 0
        file.write_text(file.read_text().replace(*changes))
        capsys.readouterr()
    said = refused(capsys, "plan", f"{script}:build", "--batch-size", "8", "--partition-file", str(file))
    assert f"--partition-file {file}" in said
    assert words in said


def test_a_pipe_that_nobody_reads_is_not_written_to(
    script: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command never ended, with its table printed already."""
    os.mkfifo(tmp_path / "pipe")
    words = ["plan", f"{script}:build", "--partitions", "2", "--batch-size", "8", "--json", str(tmp_path / "pipe")]
    assert command_line.main(words) == 2
    assert "pipe cannot be written: No such device or address." in capsys.readouterr().err


def test_help_comes_without_tensorflow() -> None:
    look = (
        "import sys; from smp_tf.command import main\ntry: main.main(['plan', '--help'])\n"
        "except SystemExit as end: assert end.code == 0\nassert 'tensorflow' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "SCRIPT_OR_MODULE:FUNCTION" in done.stdout
