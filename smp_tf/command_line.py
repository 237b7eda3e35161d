"""The command `smp-tf`.

    smp-tf plan train.py:build --partitions 4 --microbatches 8 --batch-size 64
    smp-tf profile train.py:build --microbatches 8 --batch-size 64
    smp-tf timeline timeline --html out.html

Exit codes: 0, 1 where there is no such plan (the message says what would help), 2 where something given is wrong.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smp_tf.errors import ConfigError, OfflinePlanError, PlacementError, ScheduleError, StepError, TimelineError
from smp_tf.named_function import UsageError, named_function, say

if TYPE_CHECKING:
    from smp_tf.cluster import Cluster
    from smp_tf.partition.plan_file import PlanFile

PLAN = """Says how a model would be cut over partitions, what each would hold, and what limits the plan, before anything
is trained and without storage for a single variable: in one process, on any machine."""

EXAMPLE = """The function takes no arguments and returns a Keras model, or (model, inputs), or (model, inputs, loss):
inputs are arrays or tf.TensorSpecs of a batch of one replica, a tuple of them where the model takes several arguments;
loss is a function of the model's outputs.

examples:
  smp-tf plan train.py:build --partitions 4 --microbatches 8 --batch-size 64
  smp-tf plan package.models:resnet --partitions 2 --batch-size 32 --json plan.json --html plan.html
  smp-tf plan train.py:build --partitions auto --ranks 8 --batch-size 64 --memory-limit 16GiB
  smp-tf plan train.py:build --partition-file plan.json --batch-size 64
  smp-tf plan train.py:build --partitions 64 --replicas 128 --cluster cluster.yaml --batch-size 64 --microbatches 64
"""

PROFILE = """Measures every layer of a model, forward and backward, one after the other and with the weights of one at a
time. Several processes (horovodrun -np 4 smp-tf profile ...) share the layers out and measure at the same time, as
ranks that share a host compute. The times are kept for smp-tf plan and for model.profile in a training. Several numbers
of microbatches show how much longer a batch takes, the more parts it is cut into, for smp-tf plan --microbatches auto.
"""

PROFILE_EXAMPLE = """The function is that of smp-tf plan (smp-tf plan --help). Times are kept for the model, the samples
of a microbatch and the machine, in ~/.cache/smp_tf/profiles; SMP_TF_PROFILES names another folder, or is "off".

examples:
  smp-tf profile train.py:build --microbatches 8 --batch-size 64
  smp-tf profile train.py:build --microbatches 1,4,16 --batch-size 64
  smp-tf profile train.py:build --microbatches 8 --batch-size 64 --threads 2    as one of several ranks of this host
  horovodrun -np 4 smp-tf profile train.py:build --microbatches 8 --batch-size 64    by four of them, a quarter each
"""

TIMELINE = """Says what was recorded in the steps of a training: whether the tasks ran as planned, and where the time of
every rank went. The files are those that smp.timeline and smp.callbacks.Timeline write, one of each rank."""

TIMELINE_EXAMPLE = """examples:
  smp-tf timeline timeline --html out.html
  smp-tf timeline timeline/rank_0.json timeline/rank_1.json --trace merged.json
"""

#: Partitions, microbatches, replicas and ranks that are looked at one by one; and threads of an operation.
_MOST, _MOST_THREADS = 100_000, 1024


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
    plan.add_argument(
        "--partitions",
        type=_number_or_auto,
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
        type=_number_or_auto,
        metavar="M",
        help='per batch (default: 1, and "auto" with --partitions auto)',
    )
    plan.add_argument("--replicas", type=int, metavar="D", help="replicas of the model (default: 1, or all the ranks)")
    plan.add_argument("--ranks", type=int, metavar="N", help="processes there are (default: those of the cluster)")
    plan.add_argument("--cluster", type=Path, metavar="FILE", help="what the ranks are, in YAML or JSON")
    plan.add_argument("--batch-size", type=int, metavar="N", help="of one replica (default: that of the inputs)")
    plan.add_argument(
        "--pipeline",
        help="schedule: interleaved (default; with --partitions auto all are tried), simple, zb_h1, interleaved_1f1b, "
        "zb_v, v_half, v_min, auto, or a .txt file",
    )
    plan.add_argument(
        "--chunks-per-rank", type=int, metavar="V", help="chunks of each rank (default: as few as the schedule takes)"
    )
    plan.add_argument(
        "--not-contiguous", action="store_true", help="a partition may be visited more than once (contiguous = false)"
    )
    plan.add_argument(
        "--optimize",
        help="what to balance: memory (default), or speed (default with --partitions auto and with --cluster)",
    )
    plan.add_argument("--memory-limit", metavar="SIZE", help='the most bytes a rank may need, such as "16GiB"')
    plan.add_argument("--optimizer", default="adam", help="its slots are stored too (default: adam)")
    plan.add_argument(
        "--gradient-compression",
        metavar="KIND",
        help="gradient_compression: with 1bit, OneBitAdam and OneBitLAMB keep errors beside their slots",
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
    plan.add_argument(
        "--proof",
        type=float,
        default=5.0,
        metavar="SECONDS",
        help="how long to look for a proof that no other placement is better (default: 5; 0: not at all)",
    )
    plan.add_argument("--json", type=Path, metavar="FILE", help="write the plan, to run with as partition_file")
    plan.add_argument("--html", type=Path, metavar="FILE", help="write a page with pictures of the plan")
    plan.add_argument(
        "--static", action="store_true", help="estimate all times, also where smp-tf profile has measured"
    )
    plan.set_defaults(run=run_plan)
    profile = commands.add_parser(
        "profile",
        help="measure how long every layer takes on this machine",
        description=PROFILE,
        epilog=PROFILE_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    profile.add_argument("target", metavar="SCRIPT_OR_MODULE:FUNCTION", help="what makes the model")
    profile.add_argument("--batch-size", type=int, metavar="N", help="of one replica (default: that of the inputs)")
    profile.add_argument(
        "--microbatches", type=_numbers, default=[1], metavar="M,M,...", help="per batch, one or more (default: 1)"
    )
    profile.add_argument("--threads", type=int, metavar="T", help="per operation (default: TensorFlow's choice)")
    profile.add_argument("--fresh", action="store_true", help="measure again what is known already")
    profile.set_defaults(run=run_profile)
    timeline = commands.add_parser(
        "timeline",
        help="say what ran when in recorded steps, and where the time went",
        description=TIMELINE,
        epilog=TIMELINE_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    timeline.add_argument("files", type=Path, nargs="+", metavar="FILES", help="files of ranks, or the folder of them")
    timeline.add_argument("--html", type=Path, metavar="FILE", help="write a page with a picture of every step")
    timeline.add_argument(
        "--trace", type=Path, metavar="FILE", help="write all ranks to one file for chrome://tracing or Perfetto"
    )
    timeline.set_defaults(run=run_timeline)
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
    try:
        given.run(given)
    except (UsageError, ConfigError, OfflinePlanError, ScheduleError, StepError, TimelineError) as error:
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

    from smp_tf.cluster import read_cluster
    from smp_tf.config import check_config
    from smp_tf.pipeline.schedule import is_named

    _check_counts(given)
    stored = _stored(given)
    is_auto = "auto" in (given.partitions, given.microbatches)
    cluster = read_cluster(given.cluster) if given.cluster is not None else None
    replicas = _replicas(given, cluster)
    usual = "speed" if given.partitions == "auto" or cluster is not None else "memory"
    if not 0 <= given.proof < float("inf"):
        raise UsageError(f"--proof must be a number of seconds, or 0. Received: {given.proof}.")
    wanted: dict[str, Any] = {"pipeline": given.pipeline or "interleaved", "optimize": given.optimize or usual}
    for name, value in (("partitions", given.partitions), ("microbatches", given.microbatches)):
        if value not in (None, "auto"):
            wanted[name] = value
    for name in ("memory_limit", "chunks_per_rank", "gradient_compression"):
        if getattr(given, name) is not None:
            wanted[name] = getattr(given, name)
    if given.not_contiguous:
        wanted["contiguous"] = False
    for name in ("shard_optimizer_state", "gradient_offload", "optimizer_offload", "recompute"):
        if getattr(given, name):
            wanted[name] = True
    config = check_config(wanted, "smp-tf plan")
    if is_auto and not is_named(config.pipeline):
        raise UsageError("--partitions auto and --microbatches auto try schedules that have a name. Received: a file.")
    _check_batch_size(given)
    _check_folders(given.json, given.html)
    if given.json is not None and given.html is not None and given.json.resolve() == given.html.resolve():
        raise UsageError(f"--json and --html would be written to one file: {given.json}. Give them two.")
    function = named_function(given.target)
    said = Console(stderr=True)
    with said.status(f"planning {given.target}") as status:
        from smp_tf.known_times import KnownTimes
        from smp_tf.offline_plan import OfflineModel, offline
        from smp_tf.plan_page import page
        from smp_tf.plan_search import search
        from smp_tf.plan_text import comparison, text

        # What was measured here says nothing of other machines.
        measured: dict[str, Any] = {}
        if not given.static and cluster is None:
            compares = is_auto and given.microbatches in (None, "auto")
            measured["times"] = KnownTimes(_processes(given), say, of_all_sizes=compares)
        with offline():
            model = OfflineModel(function, optimizer=given.optimizer, batch_size=given.batch_size, **measured)
            found = None
            if is_auto:
                found = search(
                    model,
                    config,
                    _processes(given, cluster),
                    cluster=cluster,
                    partitions=() if given.partitions == "auto" else (given.partitions,),
                    microbatches=() if given.microbatches in (None, "auto") else (given.microbatches,),
                    pipelines=() if given.pipeline in (None, "auto") else (given.pipeline,),
                    progress=lambda done, of, what: status.update(f"planning {given.target} {done + 1}/{of}: {what}"),
                    proof_seconds=given.proof,
                )
                made = found.made
            else:
                made = model.plan(config, replicas=replicas, cluster=cluster, proof_seconds=given.proof, stored=stored)
    console = Console()
    # The table is of no use narrower.
    width = max(100, console.width)
    if found is not None:
        print(comparison(found, width, console.is_terminal))
        print()
    print(text(made, width, console.is_terminal))
    if given.json is not None:
        from smp_tf.offline_plan import STEP
        from smp_tf.partition.plan_file import PlanFile, to_store

        _write(given.json, PlanFile(made.plan.stages, (to_store(STEP, made.plan, made.graph),)).to_json())
    if given.html is not None:
        _write(given.html, page(made, given.target))


def run_profile(given: argparse.Namespace) -> None:
    """`smp-tf profile`.

    Args:
        given: its arguments.

    Raises:
        UsageError: an argument is wrong.
        ConfigError: so is one that smp.init takes too.
    """
    _check_batch_size(given)
    if given.threads is not None and given.threads > _MOST_THREADS:
        raise UsageError(f"--threads is at most {_MOST_THREADS}. Received: {given.threads}.")
    function = named_function(given.target)
    from smp_tf.profile_command import run

    try:
        run(given, function)
    except PlacementError as error:
        raise UsageError(f"The model cannot be measured layer by layer. {error}") from error


def run_timeline(given: argparse.Namespace) -> None:
    """`smp-tf timeline`.

    Args:
        given: its arguments.

    Raises:
        UsageError: an argument is wrong.
        TimelineError: the files are no timeline.
    """
    import json

    from rich.console import Console

    from smp_tf import timeline_file, timeline_report
    from smp_tf.timeline_page import page

    _check_folders(given.html, given.trace)
    records = timeline_file.read(given.files)
    replicas = timeline_report.replicas_of(records)
    console = Console()
    print(timeline_report.text(replicas, max(100, console.width), console.is_terminal))
    if given.html is not None:
        _write(given.html, page(replicas, ", ".join(map(str, given.files))))
    if given.trace is not None:
        _write(given.trace, json.dumps(timeline_file.trace(records)))


def _stored(given: argparse.Namespace) -> PlanFile | None:
    """The plans of `--partition-file`, whose settings then are those that are not given.

    Args:
        given: the command's arguments; what the file says of partitions, microbatches, schedule and balance is added.

    Raises:
        UsageError: the file is none of plans, or what is given besides would make another plan.
    """
    from smp_tf.partition.errors import PlacementError
    from smp_tf.partition.plan_file import PlanFile

    file = given.partition_file
    if file is None:
        if given.partitions is None:
            raise UsageError("Say how many partitions there are to be: --partitions P, or --partition-file FILE.")
        return None
    for option in ("chunks_per_rank", "not_contiguous", "json"):
        if getattr(given, option) not in (None, False):
            raise UsageError(f"--{option.replace('_', '-')} is for a plan that is made, and --partition-file has one.")
    for option in ("partitions", "microbatches", "pipeline"):
        if getattr(given, option) == "auto":
            raise UsageError(f"--{option} auto makes plans, and --partition-file has one: give a number, or nothing.")
    try:
        found = PlanFile.from_json(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, PlacementError) as error:
        raise UsageError(f"--partition-file {file} is no plan that can be read. {_reason(error)}") from error
    if not found.plans:
        raise UsageError(f"--partition-file {file} holds no plan.")
    if given.partitions not in (None, found.partitions):
        raise UsageError(f"--partition-file {file} is for {found.partitions} partitions. Received: {given.partitions}.")
    given.partitions = found.partitions
    given.microbatches = given.microbatches or found.plans[0].microbatches
    given.pipeline = given.pipeline or found.plans[0].pipeline
    given.optimize = given.optimize or found.plans[0].optimize
    return found


def _reason(error: Exception) -> str:
    return f"{error.strerror}." if isinstance(error, OSError) else str(error)


def _check_folders(*files: Path | None) -> None:
    for file in files:
        if file is not None and not file.absolute().parent.is_dir():
            raise UsageError(f"There is no folder {str(file.absolute().parent)!r} to write {file.name} to.")


def _number_or_auto(text: str) -> int | str:
    if text == "auto":
        return text
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f'expected a number or "auto", and received {text!r}') from None


def _numbers(text: str) -> list[int]:
    """Numbers with commas between them, each once."""
    try:
        return list(dict.fromkeys(int(word) for word in text.split(",")))
    except ValueError:
        message = f"expected a number, or several with commas, such as 1,4,16, and received {text!r}"
        raise argparse.ArgumentTypeError(message) from None


def _replicas(given: argparse.Namespace, cluster: Cluster | None) -> int:
    """Replicas of a model whose partitions are given.

    Raises:
        UsageError: there are not so many ranks, or nobody says how many there are.
    """
    for name in ("replicas", "ranks"):
        value = getattr(given, name)
        if value is not None and value < 1:
            raise UsageError(f"--{name} must be at least 1. Received: {value}.")
    ranks = given.ranks if given.ranks is not None else cluster.size if cluster is not None else None
    if cluster is not None and ranks is not None and ranks > cluster.size:
        raise UsageError(f"--ranks {ranks} is more than the cluster has: {cluster.size}.")
    if given.partitions == "auto":
        if given.replicas is not None:
            raise UsageError("--partitions auto takes as many replicas as there are ranks for: leave out --replicas.")
        if ranks is None:
            raise UsageError("--partitions auto must know how many processes there are: --ranks N, or --cluster FILE.")
        return 1
    if given.replicas is not None:
        if ranks is not None and given.partitions * given.replicas > ranks:
            raise UsageError(
                f"{given.partitions} partitions and {given.replicas} replicas need "
                f"{given.partitions * given.replicas} ranks. There are {ranks}."
            )
        return int(given.replicas)
    if ranks is None or given.partitions < 1:
        return 1
    if ranks < given.partitions:
        raise UsageError(f"{given.partitions} partitions need as many ranks. There are {ranks}.")
    return int(ranks // given.partitions)


def _processes(given: argparse.Namespace, cluster: Cluster | None = None) -> int:
    """Processes that take part."""
    if given.partitions == "auto":
        return int(given.ranks or (cluster.size if cluster is not None else 1))
    return int(given.partitions) * _replicas(given, cluster)


def _check_counts(given: argparse.Namespace) -> None:
    for name in ("partitions", "microbatches", "replicas", "ranks", "chunks_per_rank"):
        value = getattr(given, name)
        if isinstance(value, int) and value > _MOST:
            raise UsageError(f"--{name.replace('_', '-')} is at most {_MOST:,}. Received: {value:,}.")


def _check_batch_size(given: argparse.Namespace) -> None:
    if given.batch_size is not None and given.batch_size < 1:
        raise UsageError(f"--batch-size must be at least 1. Received: {given.batch_size}.")


def _write(file: Path, text: str) -> None:
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{file} cannot be written: {error.strerror}.") from error
    print(f"wrote {file}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
