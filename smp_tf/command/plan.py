"""`smp-tf plan`: how a model would be cut over partitions, and what each partition would hold."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smp_tf.command.arguments import Commands, decimal, number, number_or_auto, seconds
from smp_tf.command.named_function import named_function
from smp_tf.command.output import say, show
from smp_tf.command.output_files import OutputFiles

if TYPE_CHECKING:
    from smp_tf.command.plan_settings import Settings
    from smp_tf.config.config import Config
    from smp_tf.offline.plan import OfflinePlan
    from smp_tf.offline.search import Search

#: The least width. A narrower table is of no use.
_NARROWEST = 100

DESCRIPTION = """\
Says how a model would be cut over partitions, what each would hold, and what limits the plan, before anything
is trained and without storage for a single variable: in one process, on any machine."""

EXAMPLES = """The function takes no arguments and returns a Keras model, or (model, inputs), or (model, inputs, loss):
inputs are arrays or tf.TensorSpecs of a batch of one replica, a tuple of them where the model takes several arguments;
loss is a function of the model's outputs.

examples:
  smp-tf plan train.py:build --partitions 4 --microbatches 8 --batch-size 64
  smp-tf plan package.models:resnet --partitions 2 --batch-size 32 --json plan.json --html plan.html
  smp-tf plan train.py:build --partitions auto --ranks 8 --batch-size 64 --memory-limit 16GiB
  smp-tf plan train.py:build --partition-file plan.json --batch-size 64
  smp-tf plan train.py:build --partitions 64 --replicas 128 --cluster cluster.yaml --batch-size 64 --microbatches 64
"""


def add_to(commands: Commands) -> None:
    """Adds the sub-command and its arguments.

    Args:
        commands: the sub-commands of `smp-tf`.
    """
    plan = commands.add_parser(
        "plan",
        help="say how a model would be cut, and what each partition would hold",
        description=DESCRIPTION,
        epilog=EXAMPLES,
    )
    plan.add_argument("target", metavar="SCRIPT_OR_MODULE:FUNCTION", help="what makes the model")
    plan.add_argument(
        "--partitions",
        type=number_or_auto,
        metavar="P",
        help='number of partitions; "auto" tries all that the ranks allow, and recommends (needed, but with '
        "--partition-file)",
    )
    plan.add_argument(
        "--partition-file",
        type=Path,
        metavar="FILE",
        help="say what the plan of this file, perhaps changed by hand, would hold, in place of a plan of its own",
    )
    plan.add_argument(
        "--microbatches",
        type=number_or_auto,
        metavar="M",
        help='per batch (default: 1, and "auto" with --partitions auto)',
    )
    plan.add_argument(
        "--replicas", type=number, metavar="D", help="replicas of the model (default: 1, or all the ranks)"
    )
    plan.add_argument("--ranks", type=number, metavar="N", help="processes there are (default: those of the cluster)")
    plan.add_argument("--cluster", type=Path, metavar="FILE", help="what the ranks are, in YAML or JSON")
    plan.add_argument("--batch-size", type=number, metavar="N", help="of one replica (default: that of the inputs)")
    _add_settings(plan)
    _add_outputs(plan)
    plan.set_defaults(run=run)


def _add_settings(plan: argparse.ArgumentParser) -> None:
    """Adds the arguments that smp.init takes, too."""
    plan.add_argument(
        "--pipeline",
        help="schedule: interleaved (default; with --partitions auto all are tried), simple, zb_h1, interleaved_1f1b, "
        "zb_v, v_half, v_min, auto, or a .txt file",
    )
    plan.add_argument(
        "--chunks-per-rank",
        type=number,
        metavar="V",
        help="chunks of each rank (default: as few as the schedule takes)",
    )
    plan.add_argument(
        "--not-contiguous", action="store_true", help="a partition may be visited more than once (contiguous = false)"
    )
    plan.add_argument(
        "--optimize",
        help="what to balance: memory (default), or speed (default with --partitions auto and with --cluster)",
    )
    plan.add_argument(
        "--balance-tolerance",
        type=decimal,
        metavar="SHARE",
        help="how much less balanced than the best stages may be so that they send fewer bytes (default: 0.05)",
    )
    plan.add_argument("--memory-limit", metavar="SIZE", help='the most bytes a rank may need, such as "16GiB"')
    plan.add_argument("--optimizer", default="adam", help="its slots are stored too (default: adam)")
    plan.add_argument(
        "--gradient-compression",
        metavar="KIND",
        help="gradient_compression: with 1bit, OneBitAdam and OneBitLAMB keep errors besides their slots",
    )
    plan.add_argument(
        "--shard-optimizer-state", action="store_true", help="replicas share the slots (shard_optimizer_state = true)"
    )
    plan.add_argument(
        "--gradient-offload", action="store_true", help="gradients are on the host (gradient_offload = true)"
    )
    plan.add_argument(
        "--optimizer-offload",
        action="store_true",
        help="so are the slots, of which each replica has a share (optimizer_offload = true)",
    )
    plan.add_argument(
        "--recompute",
        action="store_true",
        help="backward makes again what layers made in forward (recompute = true)",
    )


def _add_outputs(plan: argparse.ArgumentParser) -> None:
    """Adds the arguments for the search and for the outputs."""
    plan.add_argument(
        "--proof",
        type=seconds,
        default=5.0,
        metavar="SECONDS",
        help="how long to look for a proof that no other placement is better (default: 5; 0: not at all)",
    )
    plan.add_argument("--json", type=Path, metavar="FILE", help="write the plan, to run with as partition_file")
    plan.add_argument("--html", type=Path, metavar="FILE", help="write a page with pictures of the plan")
    plan.add_argument(
        "--layouts",
        type=Path,
        metavar="FILE",
        help="write where every weight, its gradient and its slots would be: as JSON, or as text into a .txt file",
    )
    plan.add_argument(
        "--static", action="store_true", help="estimate all times, also where smp-tf profile has measured"
    )


def run(given: argparse.Namespace) -> None:
    """Makes a plan, shows it, and writes the files that are asked for.

    Args:
        given: its arguments.

    Raises:
        UsageError: an argument is wrong.
        ConfigError: an argument that smp.init takes, too, is wrong.
        PlacementError: there is no such plan.
    """
    from rich.console import Console

    from smp_tf.command.plan_settings import settings_of

    settings = settings_of(given)
    read = [given.target.rpartition(":")[0], given.cluster, given.partition_file, settings.schedule_file]
    outputs = OutputFiles({"--json": given.json, "--html": given.html, "--layouts": given.layouts}, read)
    function = named_function(given.target)
    with Console(stderr=True).status(f"planning {given.target}") as status:
        found, made = _made(given, settings, function, lambda words: status.update(f"planning {given.target} {words}"))
    settings.say_idle(made.plan.stages, made.replicas)
    _show(found, made)
    _write(outputs, given, made, settings.config)


def _made(
    given: argparse.Namespace, settings: Settings, function: Callable[[], Any], tell: Callable[[str], None]
) -> tuple[Search | None, OfflinePlan]:
    """Returns the search, where "auto" is given, and the plan.

    Args:
        given: the arguments of the command.
        settings: the settings that they ask for.
        function: the function that makes the model.
        tell: takes words for what is tried next.
    """
    from smp_tf.offline.measured_times import KnownTimes
    from smp_tf.offline.plan import OfflineModel, offline
    from smp_tf.offline.search import Choices, search

    cluster = settings.cluster
    # Measurements of this machine say nothing about others.
    measured: dict[str, Any] = {}
    if not given.static and cluster is None:
        compares = settings.is_auto and given.microbatches in (None, "auto")
        measured["times"] = KnownTimes(settings.processes, say, of_all_sizes=compares)
    with offline():
        model = OfflineModel(function, optimizer=given.optimizer, batch_size=given.batch_size, **measured)
        if not settings.is_auto:
            made = model.plan(
                settings.config,
                replicas=settings.replicas,
                cluster=cluster,
                proof_seconds=given.proof,
                stored=settings.stored,
                processes=given.ranks,
            )
            return None, made
        choices = Choices(
            partitions=() if given.partitions == "auto" else (given.partitions,),
            microbatches=() if given.microbatches in (None, "auto") else (given.microbatches,),
            pipelines=() if given.pipeline in (None, "auto") else (given.pipeline,),
        )
        found = search(
            model,
            settings.config,
            settings.processes,
            choices,
            cluster=cluster,
            progress=lambda done, of, what: tell(f"{done + 1}/{of}: {what}"),
            proof_seconds=given.proof,
        )
        return found, found.made


def _show(found: Search | None, made: OfflinePlan) -> None:
    from rich.console import Console

    from smp_tf.offline.plan_text import comparison, text

    console = Console()
    width = max(_NARROWEST, console.width)
    if found is not None:
        show(comparison(found, width, console.is_terminal) + "\n")
    show(text(made, width, console.is_terminal))


def _write(outputs: OutputFiles, given: argparse.Namespace, made: OfflinePlan, config: Config) -> None:
    from smp_tf.offline import layouts
    from smp_tf.offline.plan import STEP
    from smp_tf.offline.plan_page import page
    from smp_tf.partition.plan.plan_file import PlanFile, to_store

    if given.json is not None:
        outputs.write("--json", PlanFile(made.plan.stages, (to_store(STEP, made.plan, made.graph),)).to_json())
    if given.html is not None:
        outputs.write("--html", page(made, given.target))
    if given.layouts is not None:
        as_written = layouts.as_text if given.layouts.suffix == ".txt" else layouts.as_json
        outputs.write("--layouts", as_written(made, config))
