"""The command `smp-tf`.

    smp-tf plan train.py:build --partitions 4 --microbatches 8 --batch-size 64

Exit codes: 0, 1 where there is no such plan (the message says what would help), 2 where something given is wrong.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from smp_tf.errors import ConfigError, OfflinePlanError, PlacementError, StepError

PLAN = """Says how a model would be cut over partitions, what each would hold, and what limits the plan, before anything
is trained and without storage for a single variable: in one process, on any machine."""

EXAMPLE = """The function takes no arguments and returns a Keras model, or (model, inputs), or (model, inputs, loss):
inputs are arrays or tf.TensorSpecs of a batch of one replica, a tuple of them where the model takes several arguments;
loss is a function of the model's outputs.

examples:
  smp-tf plan train.py:build --partitions 4 --microbatches 8 --batch-size 64
  smp-tf plan package.models:resnet --partitions 2 --batch-size 32 --json plan.json --html plan.html
"""


class UsageError(Exception):
    """Something given on the command line is wrong."""


def parser() -> argparse.ArgumentParser:
    """The command's arguments."""
    whole = argparse.ArgumentParser(prog="smp-tf", description="Plans training that is split over partitions.")
    commands = whole.add_subparsers(dest="command", required=True, metavar="COMMAND")
    plan = commands.add_parser(
        "plan",
        help="say how a model would be cut, and what each partition would hold",
        description=PLAN,
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    plan.add_argument("target", metavar="SCRIPT_OR_MODULE:FUNCTION", help="what makes the model")
    plan.add_argument("--partitions", type=int, required=True, metavar="P", help="number of partitions")
    plan.add_argument("--microbatches", type=int, default=1, metavar="M", help="per batch (default: 1)")
    plan.add_argument("--batch-size", type=int, metavar="N", help="of one replica (default: that of the inputs)")
    plan.add_argument("--pipeline", default="interleaved", help="schedule: simple or interleaved (default)")
    plan.add_argument("--optimize", default="memory", help="what to balance: memory (default) or speed")
    plan.add_argument("--memory-limit", metavar="SIZE", help='the most bytes a rank may need, such as "16GiB"')
    plan.add_argument("--optimizer", default="adam", help="its slots are stored too (default: adam)")
    plan.add_argument("--json", type=Path, metavar="FILE", help="write the plan, to run with as partition_file")
    plan.add_argument("--html", type=Path, metavar="FILE", help="write a page with pictures of the plan")
    plan.set_defaults(run=run_plan)
    return whole


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command.

    Args:
        arguments: those of the command line, without the program's name; by default this process's.

    Returns:
        The exit code.
    """
    given = parser().parse_args(arguments)
    # TensorFlow tells on every start what it was compiled with, and that results of oneDNN differ: here are none.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")
    try:
        given.run(given)
    except (UsageError, ConfigError, OfflinePlanError, StepError) as error:
        print(f"smp-tf: {error}", file=sys.stderr)
        return 2
    except PlacementError as error:
        print(f"smp-tf: there is no such plan. {error}", file=sys.stderr)
        return 1
    return 0


def run_plan(given: argparse.Namespace) -> None:
    """`smp-tf plan`.

    Args:
        given: its arguments.

    Raises:
        UsageError: an argument is wrong.
        ConfigError: so is one that smp.init takes too.
        PlacementError: there is no such plan.
    """
    from rich.console import Console

    from smp_tf.config import check_config

    wanted = {
        "partitions": given.partitions,
        "microbatches": given.microbatches,
        "pipeline": given.pipeline,
        "optimize": given.optimize,
    }
    if given.memory_limit is not None:
        wanted["memory_limit"] = given.memory_limit
    config = check_config(wanted, "smp-tf plan")
    if given.batch_size is not None and given.batch_size < 1:
        raise UsageError(f"--batch-size must be at least 1. Received: {given.batch_size}.")
    for file in (given.json, given.html):
        if file is not None and not file.absolute().parent.is_dir():
            raise UsageError(f"There is no folder {str(file.absolute().parent)!r} to write {file.name} to.")
    function = load(given.target)
    with Console(stderr=True).status(f"planning {given.target}"):
        from smp_tf.offline_plan import plan_offline
        from smp_tf.plan_page import page
        from smp_tf.plan_text import text

        made = plan_offline(function, config, optimizer=given.optimizer, batch_size=given.batch_size)
    console = Console()
    # The table is of no use narrower.
    print(text(made, width=max(100, console.width), color=console.is_terminal))
    if given.json is not None:
        from smp_tf.partition.plan_file import PlanFile, to_store

        stored = to_store("forward_backward", made.plan, made.graph)
        _write(given.json, PlanFile(made.plan.stages, (stored,)).to_json())
    if given.html is not None:
        _write(given.html, page(made, given.target))


def _write(file: Path, text: str) -> None:
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{file} cannot be written: {error.strerror}.") from error
    print(f"wrote {file}", file=sys.stderr)


def load(target: str) -> Callable[[], Any]:
    """The function that a target names.

    Args:
        target: "train.py:build" or "package.module:build".

    Raises:
        UsageError: there is no such script, module or function.
    """
    where, colon, name = target.rpartition(":")
    if not colon or not where or not name:
        raise UsageError(f'The model is named as "train.py:build" or "package.module:build". Received: {target!r}.')
    module = _script(where) if where.endswith(".py") else _module(where)
    found = getattr(module, name, None)
    if found is None:
        raise UsageError(f"{where} has no function {name!r}.")
    if not callable(found):
        raise UsageError(f"{name!r} in {where} must be a function. It is of type {type(found).__name__}.")
    function: Callable[[], Any] = found

    def call() -> Any:
        try:
            return function()
        except (ConfigError, PlacementError, StepError):
            raise
        except Exception as error:
            raise UsageError(f"{target} failed: {type(error).__name__}: {error}") from error

    return call


def _script(path: str) -> Any:
    file = Path(path)
    if not file.is_file():
        raise UsageError(f"There is no script {path!r}.")
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    sys.path.insert(0, str(file.absolute().parent))
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise UsageError(f"{path} cannot be imported: {type(error).__name__}: {error}") from error
    return module


def _module(name: str) -> Any:
    sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise UsageError(f"There is no module {error.name!r}. A script is named with its ending, .py.") from error
    except Exception as error:
        raise UsageError(f"{name} cannot be imported: {type(error).__name__}: {error}") from error


if __name__ == "__main__":
    sys.exit(main())
