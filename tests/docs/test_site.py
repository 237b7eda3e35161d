"""The documentation builds without a warning, its reference lacks no public name, and what it shows is so."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

import smp_tf
from smp_tf import errors
from smp_tf.pipeline.programs.chunk_times import ChunkTimes
from smp_tf.pipeline.programs.draw import draw
from smp_tf.pipeline.programs.simulate import simulate
from smp_tf.pipeline.schedules.schedule import SCHEDULES, build
from smp_tf.pipeline.schedules.schedule_file import load_schedule
from tests.docs.pages import DOCS, ROOT, blocks, page

needs_sphinx = pytest.mark.skipif(
    importlib.util.find_spec("sphinx") is None, reason="Sphinx is installed beside the current TensorFlow only"
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-d", str(folder / "doctrees"), "docs"]
    told = subprocess.run([*command, str(folder / "html")], cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert told.returncode == 0, told.stderr
    return folder / "html"


@pytest.mark.large
@needs_sphinx
def test_the_reference_has_every_public_name(site: Path) -> None:
    reference = (site / "api.html").read_text(encoding="utf-8")
    told = set(re.findall(r'id="smp_tf\.([\w.]+)"', reference))
    methods = {"DistributedModel.fit", "StepOutput.accumulate", "CheckpointManager.restore", "callbacks.Checkpoint"}
    wanted = {*smp_tf.__all__, *methods, *(f"errors.{name}" for name in errors.__all__)} - {"callbacks"}
    assert wanted - told == set()


@pytest.mark.large
@needs_sphinx
def test_every_page_is_there(site: Path) -> None:
    assert {path.stem for path in site.glob("*.html")} >= {Path(name).stem for name in DOCS}


@pytest.mark.parametrize("name", DOCS)
def test_every_block_of_python_compiles(name: str) -> None:
    for number, code in enumerate(blocks("python", page(name))):
        compile(code, f"{name}, block {number}", "exec")


@pytest.mark.parametrize("name", DOCS)
def test_it_names_only_what_is_public(name: str) -> None:
    if name == "docs/changelog.md":
        return
    known = {*smp_tf.__all__, "core", "utils", "errors"}
    assert set(re.findall(r"\bsmp\.(\w+)", page(name))) - known == set()


def test_schedules_are_drawn_as_they_are() -> None:
    shown = re.findall(
        r"<!-- schedule: (\w+) (\d+) (\d+) -->\n```text\n(.*?)\n```", page("docs/how_it_works.md"), re.DOTALL
    )
    assert [kind for kind, *_ in shown] == ["simple", "interleaved"]
    times = ChunkTimes(forward=1, input_gradient=2, weight_gradient=0)
    for kind, stages, microbatches, drawn in shown:
        timeline = simulate(build(kind, stages=int(stages), microbatches=int(microbatches)), times)
        assert drawn == "\n".join(line.rstrip() for line in draw(timeline).splitlines())


def test_the_page_of_schedules_draws_them_all() -> None:
    pattern = r"<!-- schedule: (\w+) (\d+) (\d+) -->\n```text\n(.*?)\n```"
    shown = re.findall(pattern, page("docs/schedules.md"), re.DOTALL)
    assert [kind for kind, *_ in shown] == list(SCHEDULES)
    for kind, stages, microbatches, drawn in shown:
        timeline = simulate(build(kind, stages=int(stages), microbatches=int(microbatches)))
        assert drawn == "\n".join(line.rstrip() for line in draw(timeline).splitlines())


def test_the_page_of_schedules_has_their_numbers() -> None:
    table = page("docs/schedules.md").split("<!-- numbers -->\n")[1].split("\n\n")[0].splitlines()
    told = set()
    for line in table[2:]:
        name, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        kind = name.split("`")[1]
        told.add(kind)
        chunks = int(name.split("v = ")[1]) if "v = " in name else SCHEDULES[kind].chunks_per_rank
        expected = []
        for stages, microbatches in ((4, 8), (8, 32)):
            program = build(kind, stages, microbatches, chunks)
            timeline = simulate(program, ChunkTimes(1 / chunks, 1 / chunks, 1 / chunks))
            share = f"{100 * timeline.bubble_ratio:.1f} %"
            expected += [f"{timeline.step_time:g}", share, f"{max(timeline.peak_activations()):g}"]
        assert cells == expected
    assert told == set(SCHEDULES)


def test_the_schedule_shown_can_be_loaded() -> None:
    [shown] = [text for text in blocks("text", page("docs/schedules.md")) if "# rank 0" in text]
    assert load_schedule(shown, 2, 3) == build("interleaved", 2, 3)


def test_the_table_of_bubbles() -> None:
    table = page("docs/partitions.md").split("<!-- bubble -->\n")[1].split("\n\n")[0].splitlines()
    microbatches = [int(word) for word in re.findall(r"\d+", table[0])]
    assert microbatches == [1, 2, 4, 8, 16, 32]
    for line in table[2:]:
        stages, *shares = (int(word) for word in re.findall(r"\d+", line))
        assert shares == [round(100 * (stages - 1) / (m + stages - 1)) for m in microbatches]
        # What the formula says of stages of equal length is what the schedule loses.
        program = build("interleaved", stages=stages, microbatches=8)
        timeline = simulate(program, ChunkTimes(forward=1, input_gradient=2, weight_gradient=0))
        assert round(100 * (1 - 8 * 3 / timeline.step_time)) == shares[3]


def test_every_example_is_in_the_table() -> None:
    table = page("docs/getting_started.md").split("| example | shows |")[1]
    assert re.findall(r"^\| \[(\w+)\.py\]\(\.\./examples/\1\.py\)", table, re.MULTILINE) == [
        "digits", "whole_batch", "fit", "wrapped", "language_model", "replicas", "resume", "pretrained_pair",
        "finetune", "transformer", "masked_words", "detection", "contrastive", "distillation", "gan",
        "sharpness_aware", "load_digits",
    ]  # fmt: skip
    assert len(list((ROOT / "examples").glob("*.py"))) == 17


def test_the_plan_shown_is_that_of_the_readme() -> None:
    [shown] = [text for text in blocks("text", page("docs/partitions.md")) if "2 partitions" in text]
    assert shown in next(text for text in blocks("text", page()) if "2 partitions" in text)


# By default README's script, whose loop is of its own, is run.
@pytest.mark.full
@pytest.mark.distributed
def test_getting_started_runs(tmp_path: Path) -> None:
    """Its blocks are one script, which prints the same losses in one process."""
    from tests.distributed.harness import ONE_THREAD, launch_script

    script = tmp_path / "train.py"
    script.write_text(
        "\n".join(blocks("python", page("docs/getting_started.md"))) + '\nprint(f"last loss {loss:.4f}")\n'
    )
    outcomes = [launch_script(n, script, environment=ONE_THREAD, launched=n > 1).expect_clean() for n in (2, 1)]
    losses = [re.findall(r"last loss ([\d.]+)", outcome.output(0)) for outcome in outcomes]
    assert losses[0] == losses[1] != []
