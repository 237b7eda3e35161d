"""Measures smp_tf's pipelines next to those of torch.distributed.pipelining with gloo, in one run.

    python benchmarks/versus_torch.py --torch-python torch-venv/bin/python --json versus.json --picture versus.svg

The same GPT trains in Keras and in PyTorch. Its output layer is one of its own, since torch's pipelines share no weight
between stages. Initial weights, batch, microbatches and threads are the same, and SGD. For every schedule that both
libraries have, four sets of processes take turns of about --turn seconds, the others asleep, in one order and then in
the other:

    Keras alone      one process, the same microbatches accumulated
    smp_tf           --processes ranks
    torch alone      one process, the same microbatches accumulated
    torch            --processes ranks

Each framework is compared with its own process alone, so that neither gains by the other's slower kernels. "of own
bound" is the lower bound on the schedule's step (smp_tf.pipeline.programs.simulate.lower_bound) over the step: 1 wastes
nothing. That bound shares out the time of the process alone among the tasks, as they share the pipeline's time. The
optimizer's time is included as if it were theirs. "of tasks' bound" takes the tasks as long as they were in the
pipeline, where ranks that share memory and cores slow each other. What is missing from 1 there is order, messages, and
the step's beginning and end.

smp_tf places the layers ("optimize": "speed"), by estimates or by a profile (--plan). torch's model is cut between
halves of blocks, as near to these places as possible, or balanced by its own matrix products (--torch-cut). Both have
the same losses, parameters and matrix products, or the run ends.

Only this benchmark needs PyTorch, in an interpreter of its own or in this one.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.util
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from harness.fleet import HERE, Crew, TrainerError, there_and_back
from harness.machine import circumstances
from harness.options import new_file
from rich.console import Console

sys.path.append(str(HERE.parent))
from versus.cut import balanced, pieces_of, work_of
from versus.report import FRAMEWORKS, figures, table_of
from versus.settings import LEARNING_RATE, PAIRS

TORCH = "torch==2.13.0"
INSTALL = f"{sys.executable} -m venv torch-venv && torch-venv/bin/pip install {TORCH}"


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--sizes",
        default="medium+depth=8+batch=8",
        help="of the GPT, between commas, as gpt.size_of takes them (default: %(default)s)",
    )
    parser.add_argument("--processes", default="2,4", help="ranks of the pipelines, between commas (default: 2,4)")
    parser.add_argument("--schedules", default=",".join(PAIRS), help=f"of {', '.join(PAIRS)} (default: all)")
    parser.add_argument("--microbatches", type=int, default=8, help="parts a batch is cut into (default: 8)")
    parser.add_argument("--repetitions", type=int, default=15, help="turns of every set of processes (default: 15)")
    parser.add_argument("--turn", type=float, default=1.0, help="seconds of a turn of a process alone, about")
    parser.add_argument("--threads", type=int, default=1, help="of every process, per operation and of operations")
    parser.add_argument(
        "--torch-cut",
        choices=("plan", "balanced"),
        default="plan",
        help="where torch's model is cut: nearest to smp_tf's plan, or balanced by its own matrix products",
    )
    parser.add_argument(
        "--plan",
        choices=("estimate", "profile"),
        default="estimate",
        help="what smp_tf places layers by: estimates, or times of layers and messages that it measures before",
    )
    parser.add_argument("--torch-python", type=Path, help="an interpreter with PyTorch (default: this one)")
    parser.add_argument("--patience", type=float, default=300.0, help="seconds for one answer")
    parser.add_argument("--json", type=new_file, help="file to write all measurements to")
    parser.add_argument("--picture", type=new_file, help="SVG file to draw the fractions in; needs matplotlib")
    given = parser.parse_args(words)
    if problem := refusal(given):
        parser.error(problem)
    return given


def refusal(given: argparse.Namespace) -> str | None:
    """Reads the lists in the options, and returns what is wrong with one, if anything."""
    given.sizes, given.schedules = given.sizes.split(","), given.schedules.split(",")
    processes = given.processes.split(",")
    if not all(count.isdecimal() and int(count) > 1 for count in processes):
        return f"--processes are whole numbers from 2 on, between commas. Received: {given.processes}"
    given.processes = [int(count) for count in processes]
    if unknown := [name for name in given.schedules if name not in PAIRS]:
        return f"--schedules are of {', '.join(PAIRS)}. Received: {', '.join(unknown)}"
    if given.repetitions < 1 or given.microbatches < 1 or given.threads < 1:
        return "--repetitions, --microbatches and --threads are 1 or more"
    if any(given.microbatches % count for count in given.processes):
        return (
            f"--microbatches is a multiple of all --processes, as interleaved schedules want it. Received: "
            f"{given.microbatches} and {given.processes}"
        )
    from models.gpt import size_of

    given.sizes = [f"{name}+tied=0" for name in given.sizes]
    try:
        sizes = [size_of(name) for name in given.sizes]
    except ValueError as error:
        return str(error)
    chunks = max(given.processes) * max(PAIRS[name].chunks for name in given.schedules)
    for name, size in zip(given.sizes, sizes, strict=True):
        if size.batch % given.microbatches or size.depth < chunks:
            return (
                f"A size has a batch that --microbatches divides and a block for each of {chunks} chunks. Received: "
                f"{name} with {given.microbatches} microbatches: batch={size.batch}, depth={size.depth}"
            )
    if given.picture and importlib.util.find_spec("matplotlib") is None:
        return f"--picture needs matplotlib: {sys.executable} -m pip install matplotlib"
    return torch_refusal(given)


def torch_refusal(given: argparse.Namespace) -> str | None:
    """Finds the interpreter with PyTorch and its versions. Where there is none, returns how to get one."""
    if given.torch_python is None:
        if importlib.util.find_spec("torch") is None:
            return f"PyTorch is not installed here: {INSTALL} && echo give it --torch-python torch-venv/bin/python"
        given.torch_python = Path(sys.executable)
    question = "import json, platform, torch; print(json.dumps([torch.__version__, platform.python_version()]))"
    try:
        asked = subprocess.run([given.torch_python, "-c", question], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        last = (getattr(error, "stderr", "") or str(error)).strip().splitlines()[-1]
        return f"--torch-python {given.torch_python} has no PyTorch ({last}): {INSTALL}"
    given.torch_versions = dict(zip(("torch", "python"), json.loads(asked.stdout.splitlines()[-1]), strict=True))
    return None


@dataclass
class Alone:
    """The processes that train alone with a size of model, while pipelines come and go.

    Attributes:
        crews: crews by framework.
        folder: has the weights and the batch that all begin with.
        losses: losses of the first and of the third step.
        counts: numbers of parameters and of a microbatch's operations, in torch.
        memory: most bytes beyond the start, by framework.
    """

    crews: dict[str, Crew]
    folder: str
    losses: tuple[float, float]
    counts: dict[str, int]
    memory: dict[str, int]


def torch_crew(given: argparse.Namespace, way: str, size: str, cut: Sequence[int], processes: int, at: str) -> Crew:
    """Starts processes of PyTorch."""
    from models.gpt import size_of

    launch = [str(given.torch_python)]
    if processes > 1:
        launch += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    told = [json.dumps(asdict(size_of(size))), str(given.microbatches), str(given.threads), ",".join(map(str, cut)), at]
    return Crew(way, told, processes, given.patience, script="processes/torch_trainer.py", launch=launch)


def smp_crew(given: argparse.Namespace, way: str, size: str, processes: int) -> Crew:
    """Starts processes of Keras."""
    told = [size, str(given.microbatches), str(given.threads), given.plan]
    return Crew(way, told, processes, given.patience, script="processes/keras_trainer.py")


def turn(crew: Crew, steps: int) -> dict[str, Any]:
    """Lets one crew run steps, and returns seconds per step, first beginning to last end, and what its ranks say."""
    ranks = crew.ask("steps", count=steps)
    taken = max(rank["ended"] for rank in ranks) - min(rank["began"] for rank in ranks)
    loss = next(rank["loss"] for rank in ranks if rank["loss"] is not None)
    return {"seconds": taken / steps, "loss": loss, "ranks": ranks}


def warm(crew: Crew) -> tuple[tuple[float, float], dict[str, Any]]:
    """Runs three steps, and returns the losses of the first and third, and what rank 0 says of the first."""
    answers = crew.ask("prepare")
    first = next(answer["loss"] for answer in answers if answer["loss"] is not None)
    return (first, turn(crew, 2)["loss"]), answers[0]


def require_same_losses(found: dict[str, tuple[float, float]]) -> None:
    """Ends the benchmark where losses differ by more than rounding does."""
    for number, step in enumerate(("first", "third")):
        require_same(f"loss of the {step} step", {name: each[number] for name, each in found.items()}, 1e-4)


def require_same(what: str, found: dict[str, Any], tolerance: float) -> None:
    """Ends the benchmark where the two frameworks do not compute the same thing."""
    values = list(found.values())
    if max(values) - min(values) > tolerance * abs(values[0]):
        raise SystemExit(f"versus_torch: both models must have the same {what}, but these differ: {found}")


@contextlib.contextmanager
def alone(given: argparse.Namespace, size: str) -> Iterator[Alone]:
    """Starts the processes that train alone, and compares their models."""
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="versus-torch-"))
        keras = stack.enter_context(smp_crew(given, "serial", size, 1))
        [wrote] = keras.ask("write", folder=folder)
        torch = stack.enter_context(torch_crew(given, "serial", size, [], 1, folder))
        [counts] = torch.ask("counts")
        require_same("parameters", {"smp_tf": wrote["parameters"], "torch": counts["parameters"]}, 0.0)
        losses = {"smp_tf": warm(keras)[0], "torch": warm(torch)[0]}
        require_same_losses(losses)
        yield Alone({"smp_tf": keras, "torch": torch}, folder, losses["smp_tf"], counts, dict.fromkeys(FRAMEWORKS, 0))


def torch_cut(given: argparse.Namespace, size: str, plan: dict[str, Any]) -> list[int]:
    """Returns how many pieces of torch's model each chunk has."""
    from models.gpt import size_of

    numbers = size_of(size)
    if given.torch_cut == "balanced":
        return balanced(work_of(asdict(numbers)), len(plan["placement"]))
    try:
        return pieces_of(plan["layers"], numbers.depth)
    except ValueError as error:
        raise SystemExit(f"versus_torch: {size}: {error}") from None


def measure(
    given: argparse.Namespace, size: str, processes: int, schedule: str, by_one: Alone, say: Callable[[str], None]
) -> dict[str, Any]:
    """Measures one schedule on so many processes, in both frameworks, and returns its figures."""
    about = f"{size}, {processes} processes, {PAIRS[schedule].name}"
    with contextlib.ExitStack() as stack:
        say(f"{about}: starting")
        smp = stack.enter_context(smp_crew(given, schedule, size, processes))
        losses, told = warm(smp)
        plan = told["planned"]
        require_same("matrix products", {"smp_tf": plan["flops"], "torch": by_one.counts["flops"]}, 0.0)
        if tuple(plan["placement"]) != PAIRS[schedule].placement(processes):
            raise SystemExit(f"versus_torch: {about}: smp_tf has its chunks on ranks {plan['placement']}")
        cut = torch_cut(given, size, plan)
        torch = stack.enter_context(torch_crew(given, schedule, size, cut, processes, by_one.folder))
        require_same_losses({"one process": by_one.losses, "smp_tf": losses, "torch": warm(torch)[0]})
        pipelines = {"smp_tf": smp, "torch": torch}
        steps = max(1, round(given.turn / turn(by_one.crews["torch"], 1)["seconds"]))
        turns: dict[str, list[dict[str, Any]]] = {name: [] for name in FRAMEWORKS}
        in_turn = [crews[name] for name in FRAMEWORKS for crews in (by_one.crews, pipelines)]
        for repetition, order in there_and_back(in_turn, given.repetitions):
            say(f"{about}: repetition {repetition + 1} of {given.repetitions}, {steps} steps a turn")
            taken = {crew: turn(crew, steps) for crew in order}
            for name in FRAMEWORKS:
                own, split = taken[by_one.crews[name]], taken[pipelines[name]]
                turns[name].append({"serial": own["seconds"], "step": split["seconds"], "ranks": split["ranks"]})
                [process] = own["ranks"]
                beyond = process["resident_peak"] - process["resident_before_model"]
                by_one.memory[name] = max(by_one.memory[name], beyond)
    measured = {
        "schedule": schedule,
        "microbatches": given.microbatches,
        "processes": processes,
        "cores": len(os.sched_getaffinity(0)),
        "steps": steps,
        "turns": turns,
    }
    return {
        "size": size,
        "processes": processes,
        "schedule": schedule,
        "name": PAIRS[schedule].name,
        "steps_per_turn": steps,
        "torch_halves_of_blocks": cut,
        # The first layer of every chunk.
        "smp_tf_cuts": list({chunk: name for name, chunk in reversed(plan["layers"].items())}.values())[::-1],
        **figures(measured),
    }


def main() -> None:
    given = arguments()
    progress, console = Console(stderr=True), Console(width=max(190, Console().width))
    say = functools.partial(progress.print, soft_wrap=True)
    result: dict[str, Any] = {
        **circumstances(given),
        "settings": {
            "microbatches": given.microbatches,
            "repetitions": given.repetitions,
            "threads": given.threads,
            "optimizer": f"SGD, learning rate {LEARNING_RATE}",
            "dtype": "float32",
            "optimize": "speed",
            "plan": given.plan,
            "torch_cut": given.torch_cut,
        },
        "models": {},
        "results": [],
    }
    result["machine"]["torch"] = given.torch_versions
    for size in given.sizes:
        found: list[dict[str, Any]] = []
        try:
            with alone(given, size) as by_one:
                result["models"][size] = {**by_one.counts, "memory_alone": by_one.memory}
                for processes in given.processes:
                    for schedule in given.schedules:
                        found.append(measure(given, size, processes, schedule, by_one, say))
                        result["results"].append(found[-1])
                        result["machine"]["load_after"] = os.getloadavg()[0]
                        # After every schedule: the next one may fail.
                        if given.json:
                            given.json.write_text(json.dumps(result, indent=1) + "\n")
        except TrainerError as error:
            raise SystemExit(f"versus_torch: {error}") from None
        console.print(about(result, size), highlight=False)
        console.print(table_of(size, found, by_one.memory))
    if given.picture:
        sys.path.append(str(HERE.parent / "docs" / "pictures"))
        from draw_versus_torch import draw

        draw([result], given.picture)


def about(result: dict[str, Any], size: str) -> str:
    """Returns a line that names the machine, the versions and the settings of a measurement."""
    settings, on, model = result["settings"], result["machine"], result["models"][size]
    versions = ", ".join(f"{name} {version}" for name, version in on["packages"].items())
    return (
        f"GPT {size}: {model['parameters']:,} parameters, {model['flops'] / 1e9:,.3g} GFLOP of matrix products a "
        f"microbatch; {settings['microbatches']} microbatches, {settings['optimizer']}, {settings['dtype']}, "
        f"{settings['threads']} thread(s) a process, plan by {settings['plan']}, torch's cut: {settings['torch_cut']}; "
        f"{settings['repetitions']} repetitions\n"
        f"{on['cpu']}, {on['cores']} cores, Python {platform.python_version()}, {versions}; "
        f"torch {on['torch']['torch']} (Python {on['torch']['python']}), gloo"
    )


if __name__ == "__main__":
    main()
