"""The command `smp-tf`.

    smp-tf plan train.py:build --partitions 4 --microbatches 8 --batch-size 64
    smp-tf profile train.py:build --microbatches 8 --batch-size 64
    smp-tf timeline timeline --html out.html

Exit codes: 0, 1 where there is no such plan (the message says what would help), 2 where something given is wrong, 130
where Ctrl-C ended it. What is wrong is told in one line.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smp_tf import errors
from smp_tf.command.arguments import parser
from smp_tf.command.named_function import named_function
from smp_tf.command.output import UsageError, put, say, show
from smp_tf.command.output_files import OutputFiles
from smp_tf.errors import PlacementError
from smp_tf.offline.numbers import counted
from smp_tf.offline.user_errors import words_of

if TYPE_CHECKING:
    from smp_tf.offline.cluster import Cluster
    from smp_tf.partition.plan.plan_file import PlanFile

#: Partitions, microbatches, replicas and ranks that are looked at one by one; and threads of an operation.
_MOST, _MOST_THREADS = 100_000, 1024
#: 1 EiB, beyond any host there is, and what a plan can still reckon with.
_MOST_BYTES = 2**60
#: What smp_tf raises says in its message all that there is to know.
_TOLD = (UsageError, *(getattr(errors, name) for name in errors.__all__))
#: As a shell says it of a process that SIGINT ended.
_INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command.

    Args:
        arguments: those of the command line, without the program's name; by default this process's.

    Returns:
        The exit code.
    """
    commands = {"plan": run_plan, "profile": run_profile, "timeline": run_timeline}
    try:
        try:
            given = parser().parse_args(arguments)
            # TensorFlow tells on every start what it was compiled with, and that results of oneDNN differ: here are
            # none.
            os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
            commands[given.command](given)
        finally:
            # Such as help: whether it can be written is seen here, and not when Python ends.
            show("", end="")
    except PlacementError as error:
        # Stage by stage, in several lines.
        put(f"smp-tf: there is no such plan. {error}", sys.stderr)
        return 1
    except _TOLD as error:
        say(str(error))
        return 2
    except KeyboardInterrupt:
        say("interrupted.")
        return _INTERRUPTED
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

    from smp_tf.config.config import check_config
    from smp_tf.offline.cluster import read_cluster
    from smp_tf.pipeline.schedules.schedule import is_named

    _check_counts(given)
    stored = _stored(given)
    is_auto = "auto" in (given.partitions, given.microbatches)
    cluster = read_cluster(given.cluster) if given.cluster is not None else None
    replicas = _replicas(given, cluster)
    usual = "speed" if given.partitions == "auto" or cluster is not None else "memory"
    wanted: dict[str, Any] = {"pipeline": "interleaved", "optimize": usual}
    for name, value in (("partitions", given.partitions), ("microbatches", given.microbatches)):
        if value not in (None, "auto"):
            wanted[name] = value
    for name in ("pipeline", "optimize", "memory_limit", "chunks_per_rank", "gradient_compression"):
        if getattr(given, name) is not None:
            wanted[name] = getattr(given, name)
    if given.not_contiguous:
        wanted["contiguous"] = False
    for name in ("shard_optimizer_state", "gradient_offload", "optimizer_offload", "recompute"):
        if getattr(given, name):
            wanted[name] = True
    own = stored.plans[0].pipeline if stored is not None else None
    if own == given.pipeline and own is not None and not is_named(own):
        # The tasks of a schedule of one's own, which a .txt file listed when the plan was made.
        config = dataclasses.replace(check_config(wanted | {"pipeline": "interleaved"}, "smp-tf plan"), pipeline=own)
    else:
        config = check_config(wanted, "smp-tf plan")
    if config.memory_limit is not None and config.memory_limit > _MOST_BYTES:
        raise UsageError(f"--memory-limit is at most 1 EiB. Received: {given.memory_limit}.")
    if is_auto and not is_named(config.pipeline):
        raise UsageError("--partitions auto and --microbatches auto try schedules that have a name. Received: a file.")
    _check_batch_size(given)
    schedule = given.pipeline if given.pipeline is not None and not is_named(config.pipeline) else None
    read = [given.target.rpartition(":")[0], given.cluster, given.partition_file, schedule]
    outputs = OutputFiles({"--json": given.json, "--html": given.html}, read)
    function = named_function(given.target)
    said = Console(stderr=True)
    with said.status(f"planning {given.target}") as status:
        from smp_tf.offline.measured_times import KnownTimes
        from smp_tf.offline.plan import OfflineModel, offline
        from smp_tf.offline.plan_page import page
        from smp_tf.offline.plan_text import comparison, text
        from smp_tf.offline.search import search

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
                made = model.plan(
                    config,
                    replicas=replicas,
                    cluster=cluster,
                    proof_seconds=given.proof,
                    stored=stored,
                    processes=given.ranks,
                )
    _say_idle(given, cluster, made.plan.stages, made.replicas)
    console = Console()
    # The table is of no use narrower.
    width = max(100, console.width)
    if found is not None:
        show(comparison(found, width, console.is_terminal) + "\n")
    show(text(made, width, console.is_terminal))
    if given.json is not None:
        from smp_tf.offline.plan import STEP
        from smp_tf.partition.plan.plan_file import PlanFile, to_store

        outputs.write("--json", PlanFile(made.plan.stages, (to_store(STEP, made.plan, made.graph),)).to_json())
    if given.html is not None:
        outputs.write("--html", page(made, given.target))


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
    from smp_tf.command.profile import run

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

    from smp_tf.offline import timeline_text
    from smp_tf.offline.timeline_page import page
    from smp_tf.recording import timeline_file

    inside = [file.glob("rank_*.json") for file in given.files if os.path.isdir(file)]
    read = itertools.chain(given.files, *inside)
    outputs = OutputFiles({"--html": given.html, "--trace": given.trace}, read)
    console = Console()
    texts: dict[str, str] = {}
    try:
        records = timeline_file.read(given.files)
        replicas = timeline_text.replicas_of(records)
        said = timeline_text.text(replicas, max(100, console.width), console.is_terminal)
        if given.html is not None:
            texts["--html"] = page(replicas, ", ".join(map(str, given.files)))
        if given.trace is not None:
            texts["--trace"] = json.dumps(timeline_file.trace(records))
    except errors.TimelineError:
        raise
    except Exception as error:
        # Of a file that was changed or damaged anything may be missing.
        raise UsageError(f"The files do not hold what smp_tf writes of a timeline. {words_of(error)}.") from error
    show(said)
    for option, text in texts.items():
        outputs.write(option, text)


def _stored(given: argparse.Namespace) -> PlanFile | None:
    """The plans of `--partition-file`, whose settings then are those that are not given.

    Args:
        given: the command's arguments; what the file says of partitions, microbatches, schedule and balance is added.

    Raises:
        UsageError: the file is none of plans, or what is given besides would make another plan.
    """
    from smp_tf.config.text_file import UnreadableError, read_text
    from smp_tf.partition.errors import PlacementError
    from smp_tf.partition.plan.plan_file import MAX_BYTES, PlanFile
    from smp_tf.pipeline.errors import ScheduleError
    from smp_tf.pipeline.schedules.schedule import runs_on

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
        found = PlanFile.from_json(read_text(file, MAX_BYTES))
    except FileNotFoundError:
        raise UsageError(f"--partition-file {file} does not exist (looked in {Path.cwd()}).") from None
    except UnreadableError as error:
        raise UsageError(f"--partition-file {file} {error}.") from error
    except PlacementError as error:
        raise UsageError(f"--partition-file {file} is no plan that can be read. {error}") from error
    if not found.plans:
        raise UsageError(f"--partition-file {file} holds no plan.")
    first = found.plans[0]
    try:
        runs_on(first.pipeline, first.placement)
    except ScheduleError as error:
        raise UsageError(f"--partition-file {file} names a pipeline that cannot be had. {error}") from error
    if first.microbatches > _MOST:
        raise UsageError(
            f"--partition-file {file}: 'microbatches' is at most {_MOST:,}. Received: {first.microbatches:,}."
        )
    if given.partitions not in (None, found.partitions):
        raise UsageError(f"--partition-file {file} is for {found.partitions} partitions. Received: {given.partitions}.")
    given.partitions = found.partitions
    for option in ("microbatches", "pipeline", "optimize"):
        if getattr(given, option) is None:
            setattr(given, option, getattr(first, option))
    return found


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
                f"{counted(given.partitions, 'partition')} and {counted(given.replicas, 'replica')} need "
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


def _say_idle(given: argparse.Namespace, cluster: Cluster | None, partitions: int, replicas: int) -> None:
    """Says how many ranks a plan has nothing to do for."""
    ranks = given.ranks if given.ranks is not None else cluster.size if cluster is not None else None
    if ranks is None:
        return
    idle = ranks - partitions * replicas
    if not idle:
        return
    taken = f"{counted(partitions, 'partition')} and {counted(replicas, 'replica')} take {ranks - idle}"
    if given.partitions == "auto":
        say(f"{idle} of the {ranks} ranks would be idle: {taken}, and nothing that was tried of all of them fits")
        return
    if ranks % partitions == 0:
        others = counted(ranks // partitions, "replica")
    else:
        fewer = max(count for count in range(1, partitions) if ranks % count == 0)
        more = min(count for count in range(partitions + 1, ranks + 1) if ranks % count == 0)
        others = f"{fewer} or {more} partitions"
    say(f"{idle} of the {ranks} ranks would be idle: {taken}; with {others} none would be")


if __name__ == "__main__":
    sys.exit(main())
