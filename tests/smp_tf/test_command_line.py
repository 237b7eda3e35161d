"""`smp-tf plan`: what it prints and writes, and what it says of what is wrong."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

import smp_tf as smp
from smp_tf import command_line
from smp_tf.named_function import named_function
from smp_tf.partition.fingerprint import fingerprint
from smp_tf.partition.plan_file import PlanFile
from smp_tf.planning import units_of

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


def test_fresh_processes_that_hash_otherwise_make_the_same_plan(tmp_path: Path) -> None:
    """As the ranks of a training must: each makes its own plan, and sets of names have another order in each."""
    (tmp_path / "tree.py").write_text(BRANCHING)
    sizes = ["--partitions", "3", "--microbatches", "4", "--batch-size", "8", "--optimize", "speed", "--static"]
    running = [
        subprocess.Popen(
            [
                sys.executable,
                "-m",
                "smp_tf.command_line",
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
        ([], ('"version": 4', '"version": 99'), "It is of version 99"),
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
    assert "No such file or directory" in capsys.readouterr().err


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
    assert run(f"{script}:build", *sizes, "--partitions", "2", "--microbatches", "2") == 0
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
    assert "for a batch of 8 on each of 2 replicas: " in capsys.readouterr().out
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


def test_help_comes_without_tensorflow() -> None:
    look = (
        "import sys; from smp_tf import command_line\ntry: command_line.main(['plan', '--help'])\n"
        "except SystemExit as end: assert end.code == 0\nassert 'tensorflow' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "SCRIPT_OR_MODULE:FUNCTION" in done.stdout
