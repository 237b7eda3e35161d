"""The examples, run as a user runs them, on real data."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import quick_import
from tests.distributed.harness import ROOT, Outcome, launch_script
from tests.full_only import params

DIGITS_EPOCHS = "8"
EXAMPLES = sorted(path.stem for path in (ROOT / "examples").glob("*.py"))


def text_of(outcome: Outcome) -> str:
    """What rank 0 printed, without colours and movements of a terminal's cursor; every state of a bar is a line."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", outcome.output(0)).replace("\r", "\n")


def losses_of(outcome: Outcome) -> list[str]:
    return re.findall(r"epoch +\d+: mean loss ([\d.]+)", text_of(outcome))


def table_of(text: str) -> list[list[str]]:
    """The rows of the plan's first table, its head first; what stands below each other in a row is put together."""
    rows: list[list[str]] = []
    for line in text.splitlines():
        bar = line[:1]
        if bar == "└":
            break
        if bar not in ("┃", "│"):  # of the head, and of what is below it
            continue
        cells = [cell.strip() for cell in line.strip(bar).split(bar)]
        if (bar == "│" and cells[0]) or not rows:
            rows.append([""] * len(cells))
        rows[-1] = [f"{before} {cell}".strip() for before, cell in zip(rows[-1], cells, strict=True)]
    return rows


def accuracy_of(outcome: Outcome) -> float:
    found = re.search(r"test accuracy ([\d.]+)", outcome.output(0))
    assert found, outcome.report()
    return float(found[1])


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> tuple[Outcome, Path]:
    """The digits example on two processes, and the folder it saved to."""
    folder = tmp_path_factory.mktemp("digits") / "model"
    arguments = ["--epochs", DIGITS_EPOCHS, "--save", str(folder)]
    # Ranks look for work every millisecond else, which takes a third of the cores and shows nothing. In a terminal the
    # bar of the training moves.
    environment = {"HOROVOD_CYCLE_TIME": "60", "TERM": "xterm"}
    return launch_script(2, "examples/digits.py", arguments, environment=environment, as_installed=True), folder


def test_digits_learns_to_read(digits: tuple[Outcome, Path]) -> None:
    outcome, _ = digits
    outcome.expect_clean()
    assert accuracy_of(outcome) >= 0.97


def test_digits_prints_the_plan_on_rank_0_only(digits: tuple[Outcome, Path]) -> None:
    outcome, _ = digits
    assert "2 partitions, 4 microbatches, interleaved, balanced by stored bytes" in outcome.output(0), outcome.report()
    head, *stages = table_of(text_of(outcome))
    assert head == [
        *("stage", "layers", "parameters", "weights + slots", "stash in flight", "memory in all", "time"),
        "sent per microbatch",
    ]
    size = r"[\d.]+ (B|KiB|MiB)"
    row = [r"\w+ … \w+ \(\d\)", r"[\d,]+", rf"{size} \+ {size}", rf"{size} \d ×", rf"{size} estimated", r"\d+%"]
    assert len(stages) == 2, outcome.report()
    for number, (found, sent) in enumerate(zip(stages, (rf"{size} →", rf"← {size}"), strict=True)):
        assert all(map(re.fullmatch, [str(number), *row, f".*{sent}"], found)), found
    assert sum(int(stage[2].replace(",", "")) for stage in stages) == 151_594
    assert outcome.output(1).strip() == "", outcome.report()


def test_digits_shows_where_its_bar_came_to_and_no_escape_codes_in_a_pipe(digits: tuple[Outcome, Path]) -> None:
    """It took the launcher's pipe for a terminal: a file had codes for colours, and each state of the bar."""
    text = digits[0].output(0)
    assert "\x1b" not in text, digits[0].report()
    # 8 epochs of 22 batches.
    [(done, loss)] = re.findall(r"^training +[━╸╺]+ +(\d+)/176 loss ([\d.]+)", text, re.MULTILINE)
    assert done == "176"
    assert float(loss) < 0.5


def test_the_saved_digits_model_loads_without_smp_tf(digits: tuple[Outcome, Path]) -> None:
    outcome, folder = digits
    script = "'examples/load_digits.py', run_name='__main__'"
    without = f"import runpy, sys; sys.modules['smp_tf'] = None; {quick_import.CODE}runpy.run_path({script})"
    command = [sys.executable, "-c", without, "--model", str(folder)]
    environment = {**os.environ, "TF_ENABLE_ONEDNN_OPTS": "0"}
    told = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT, env=environment)
    assert f"test accuracy {accuracy_of(outcome):.4f}" in told.stdout


def test_digits_in_one_process_prints_the_same_losses(digits: tuple[Outcome, Path], tmp_path: Path) -> None:
    outcome, _ = digits
    arguments = ["--epochs", DIGITS_EPOCHS, "--save", str(tmp_path / "model")]
    alone = launch_script(1, "examples/digits.py", arguments, launched=False)
    alone.expect_clean()
    assert len(losses_of(alone)) == 8
    assert losses_of(alone) == losses_of(outcome)
    assert accuracy_of(alone) == accuracy_of(outcome)


def test_the_language_model_falls_well_below_the_unigram_entropy() -> None:
    small = ["--depth", "2", "--width", "64", "--length", "32", "--batch-size", "16", "--steps", "240"]
    outcome = launch_script(2, "examples/language_model.py", small)
    outcome.expect_clean()
    found = re.search(r"loss ([\d.]+) nats .* entropy of the text ([\d.]+)", outcome.output(0))
    assert found, outcome.report()
    assert float(found[1]) < 0.8 * float(found[2])


@pytest.mark.parametrize("partitions", params(["2", "1"], ["1"]))
def test_losses_scores_and_clipping_of_the_whole_batch_are_those_of_one_process(partitions: str) -> None:
    """On two stages, and on two replicas that have half of every batch each."""
    split = launch_script(2, "examples/whole_batch.py", ["--epochs", "4", "--partitions", partitions]).expect_clean()
    arguments = ["--epochs", "4", "--partitions", "1", "--microbatches", "1"]
    whole = launch_script(1, "examples/whole_batch.py", arguments, launched=False).expect_clean()
    numbers = [re.findall(r"(?:loss|norm|F1) (\d\.\d+)", text_of(outcome)) for outcome in (split, whole)]
    assert len(numbers[0]) == 4 * 3
    assert [float(number) for number in numbers[0]] == pytest.approx([float(number) for number in numbers[1]], abs=2e-3)
    assert float(numbers[0][-1]) > float(numbers[0][2]) + 0.1


#: What examples/replicas.py prints at the end.
LAST_LOSS = r"replicas of . stages: loss ([\d.]+) nats .* text ([\d.]+)"


@pytest.mark.parametrize(
    ("arguments", "learns"),
    [
        (["--epochs", "1", "--steps", "4", "--depth", "1", "--length", "32", "--batch-size", "16"], False),
        pytest.param(["--epochs", "2", "--steps", "12", "--depth", "1"], True, marks=pytest.mark.full),
    ],
    ids=["few steps", "more steps"],
)
def test_replicas_of_two_stages_train_as_one_process(arguments: list[str], learns: bool) -> None:
    four = launch_script(4, "examples/replicas.py", arguments).expect_clean()
    for rank, (replica, stage) in enumerate([(0, 0), (0, 1), (1, 0), (1, 1)]):
        assert f"rank {rank}: stage {stage} of replica {replica}" in four.output(rank)
    told = re.search(LAST_LOSS, four.output(0))
    assert told is not None
    if learns:
        # Of few steps only that they run; `fit` is compared with one process in tests/distributed/test_fit.py.
        one = launch_script(1, "examples/replicas.py", arguments, launched=False).expect_clean()
        alone = re.search(LAST_LOSS, one.output(0))
        assert alone is not None
        assert told.groups() == alone.groups()
        assert float(told[1]) < float(told[2])


@pytest.mark.full
def test_a_resumed_training_prints_what_an_uninterrupted_one_prints(tmp_path: Path) -> None:
    def run(processes: int, epochs: int, folder: str) -> list[str]:
        arguments = ["--epochs", str(epochs), "--partitions", str(processes), "--checkpoints", str(tmp_path / folder)]
        outcome = launch_script(processes, "examples/resume.py", arguments, launched=processes > 1)
        outcome.expect_clean()
        return re.findall(r"(epoch .*|ckpt-\d+ restored: .*), (?:saved|best)", outcome.output(0))

    whole = run(2, 3, "whole")
    resumed = [*run(2, 1, "parts"), *run(3, 2, "parts"), *run(1, 3, "parts")]
    assert len(whole) == 3
    assert [line for line in resumed if "restored" in line] == [
        "ckpt-1 restored: 1 epochs done",
        "ckpt-2 restored: 2 epochs done",
    ]
    assert [line for line in resumed if "restored" not in line] == whole


@pytest.mark.full
def test_a_wrapped_model_is_trained_and_becomes_a_file_of_keras(tmp_path: Path) -> None:
    file = tmp_path / "tumours.keras"
    arguments = ["--save", str(file), "--epochs", "6"]
    split = launch_script(2, "examples/wrapped.py", arguments).expect_clean()
    assert accuracy_of(split) >= 0.95
    alone = launch_script(
        1, "examples/wrapped.py", ["--save", str(tmp_path / "a.keras"), "--epochs", "6"], launched=False
    )
    assert losses_of(alone.expect_clean()) == losses_of(split)
    load = "import tf_keras, sys; print([i.name for i in tf_keras.models.load_model(sys.argv[1]).inputs])"
    told = subprocess.run([sys.executable, "-c", load, str(file)], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "['mean', 'error', 'worst']"


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Outcome, Path]:
    """The example of `fit` on two processes, and the file of its losses."""
    file = tmp_path_factory.mktemp("fit") / "split.csv"
    return launch_script(2, "examples/fit.py", ["--epochs", "3", "--csv", str(file)]), file


def test_fit_with_callbacks_learns_to_read(fitted: tuple[Outcome, Path]) -> None:
    split, file = fitted
    split.expect_clean()
    assert accuracy_of(split) >= 0.95
    assert "bubble of the plan" in split.output(0)
    assert "Epoch" not in split.output(1)
    assert len(logged(file)) == 3


# By default tests/distributed/test_fit.py shows it of smaller models.
@pytest.mark.full
def test_fit_in_one_process_logs_the_same(fitted: tuple[Outcome, Path], tmp_path: Path) -> None:
    file = tmp_path / "alone.csv"
    launch_script(1, "examples/fit.py", ["--epochs", "2", "--csv", str(file)], launched=False).expect_clean()
    alone, split = logged(file), logged(fitted[1])
    assert len(alone) == 2
    for one, other in zip(split[:2], alone, strict=True):
        assert one == pytest.approx(other, rel=1e-4, abs=1e-6)


@pytest.mark.full
def test_two_pretrained_models_learn_on_in_one(tmp_path: Path) -> None:
    arguments = ["--epochs", "4", "--pretrained", str(tmp_path / "halves"), "--save"]
    split = launch_script(2, "examples/pretrained_pair.py", [*arguments, str(tmp_path / "pair")])
    split.expect_clean()
    before = [float(a) for a in re.findall(r"pre-trained .* accuracy ([\d.]+)", split.output(0))]
    assert len(before) == 2
    assert float(re.findall(r"accuracy ([\d.]+) of both", split.output(0))[0]) > max(before)
    assert split.output(1).strip() == ""
    arguments = ["--epochs", "2", *arguments[2:], str(tmp_path / "alone")]
    alone = launch_script(1, "examples/pretrained_pair.py", arguments, launched=False)
    assert "pre-trained" not in alone.expect_clean().output(0)
    assert len(losses_of(alone)) == 2
    assert losses_of(alone) == losses_of(split)[:2]
    load = "import tf_keras, sys; print(tf_keras.models.load_model(sys.argv[1]).count_params())"
    told = subprocess.run([sys.executable, "-c", load, str(tmp_path / "pair")], capture_output=True, text=True)
    assert told.stdout.strip() == "51082", told.stderr


@pytest.mark.full
def test_fine_tuning_leaves_frozen_layers_alone_and_without_slots(tmp_path: Path) -> None:
    arguments = ["--pretrained", str(tmp_path / "model.keras")]
    split = launch_script(2, "examples/finetune.py", arguments).expect_clean()
    head, upper = (float(a) for a in re.findall(r"trained the .* accuracy ([\d.]+)", split.output(0)))
    assert 0.7 < head < upper
    told = {rank: lines_of(split, rank, f"rank {rank}: ") for rank in (0, 1)}
    assert told == {
        0: ["slots for none", "unchanged in this phase: lower_1, lower_2", "slots for upper_1"],
        1: ["slots for new_head", "unchanged in this phase: none", "slots for new_head, upper_2"],
    }
    alone = launch_script(1, "examples/finetune.py", arguments, launched=False).expect_clean()
    assert losses_of(alone) == losses_of(split)
    assert lines_of(alone, 0, "rank 0: ") == [
        "slots for new_head",
        "unchanged in this phase: lower_1, lower_2",
        "slots for new_head, upper_1, upper_2",
    ]


def lines_of(outcome: Outcome, rank: int, start: str) -> list[str]:
    """What a rank printed behind a beginning of lines."""
    return [line.removeprefix(start) for line in outcome.output(rank).splitlines() if line.startswith(start)]


def logged(file: Path) -> list[list[float]]:
    """The numbers that CSVLogger wrote, an epoch a row."""
    return [[float(word) for word in line.split(",")] for line in file.read_text().splitlines()[1:]]


@pytest.mark.full
def test_a_transformer_learns_split_and_is_read_by_transformers(tmp_path: Path) -> None:
    split = launch_script(2, "examples/transformer.py", ["--epochs", "2", "--save", str(tmp_path)])
    split.expect_clean()
    assert accuracy_of(split) >= 0.8
    alone = launch_script(1, "examples/transformer.py", ["--epochs", "1"], launched=False)
    assert losses_of(alone.expect_clean()) == losses_of(split)[:1]
    assert len(losses_of(split)) == 2
    read = (
        "import sys, transformers; "
        "kind = transformers.TFBertForSequenceClassification; "
        "_, told = kind.from_pretrained(sys.argv[1], output_loading_info=True); "
        "print(told['missing_keys'], told['mismatched_keys'])"
    )
    command = [sys.executable, "-c", read, str(tmp_path)]
    environment = {**os.environ, "TF_USE_LEGACY_KERAS": "1"}
    told = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert told.stdout.strip() == "[] []"


@pytest.mark.full
def test_the_transformer_example_says_what_it_needs() -> None:
    without = "import runpy, sys; sys.modules['transformers'] = None; runpy.run_path('examples/transformer.py')"
    told = subprocess.run([sys.executable, "-c", without], capture_output=True, text=True, cwd=ROOT)
    assert told.returncode == 1
    assert "This example needs the package transformers, below version 5" in told.stderr
    assert "pip install 'transformers<5'" in told.stderr


#: By name, arguments for a short run, and what is printed at the end.
OF_THE_WHOLE_BATCH = {
    "masked_words": (["--epochs", "2", "--steps", "10"], r"letters said ([\d.]+)$"),
    "detection": (["--epochs", "3", "--sheets", "256"], r"test: F1 ([\d.]+)"),
    "contrastive": (["--epochs", "2"], r"test accuracy ([\d.]+) by"),
    "distillation": (["--epochs", "3"], r"student: test accuracy ([\d.]+)"),
    "gan": (["--epochs", "2"], r"the generator's (-?[\d.]+)$"),
    "sharpness_aware": (["--epochs", "3"], r"test accuracy ([\d.]+)"),
}


@pytest.mark.full
@pytest.mark.parametrize("name", OF_THE_WHOLE_BATCH)
def test_an_example_of_the_whole_batch_prints_what_one_process_prints(name: str, tmp_path: Path) -> None:
    arguments, last = OF_THE_WHOLE_BATCH[name]
    if name == "distillation":
        arguments = [*arguments, "--teacher", str(tmp_path / "teacher.keras")]
    split = launch_script(2, f"examples/{name}.py", arguments).expect_clean()
    alone = launch_script(1, f"examples/{name}.py", arguments, launched=False).expect_clean()
    numbers = [
        [
            float(n)
            for n in re.findall(r"mean loss (-?[\d.]+)", text_of(one)) + re.findall(last, text_of(one), re.MULTILINE)
        ]
        for one in (split, alone)
    ]
    assert len(numbers[0]) > 2
    # Adam's first steps make much of rounding: fused kernels move the second loss of contrastive.py by 2e-3 of it.
    assert numbers[0] == pytest.approx(numbers[1], rel=5e-3, abs=2e-3)


@pytest.mark.parametrize(
    "names",
    [
        pytest.param([name for name in EXAMPLES if name != "transformer"], id="those of Keras"),
        pytest.param(["transformer"], id="transformer", marks=pytest.mark.full),
    ],
)
def test_help_is_given_in_one_process(names: list[str]) -> None:
    """All in one process, since each would import what it needs anew."""
    paths = [f"examples/{name}.py" for name in names]
    told = launch_script(1, "tests/distributed/scripts/helps.py", paths, launched=False).expect_clean().output(0)
    assert re.findall(r"(\S+) ended with 0", told) == paths
    assert told.count("--help") >= len(paths)
