"""Reads and writes the configuration's `partition_file`, which keeps plans, or gives the plans to run with.

smp.init     rank 0 reads the file ─▶ every rank has its plans, or the same error
first step   of each model: its plan is looked up by the step's fingerprint, then by its layers and variables; of
             several by the step's name
else         rank 0 writes all plans made so far, to a file next to it that then takes its place
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from smp_tf.announce import announce
from smp_tf.config.config import Config
from smp_tf.config.text_file import UnreadableError, read_text
from smp_tf.errors import ConfigError, PlacementError
from smp_tf.files.durable_files import write_file
from smp_tf.job import runtime
from smp_tf.job_state import JobState
from smp_tf.partition.graph.fingerprint import fingerprint
from smp_tf.partition.graph.op_graph import OpGraph
from smp_tf.partition.plan.plan import Plan
from smp_tf.partition.plan.plan_file import MAX_BYTES, PlanFile, StoredPlan, to_store
from smp_tf.pipeline.errors import ScheduleError
from smp_tf.pipeline.planner import proposal
from smp_tf.pipeline.planner.units import units_of
from smp_tf.pipeline.schedules.schedule import runs_on

#: The most bytes that a rank says about a file. In JSON a byte of it may take six.
_MOST_SAID = 7 * MAX_BYTES

#: The plans that this script has made since `smp.init`.
_made: JobState[list[StoredPlan]] = JobState(list)


def load(config: Config, rank: int, exchange: Callable[[bytes, str, int], list[bytes]]) -> PlanFile | None:
    """Returns the plans that the configuration asks to run with. All ranks get what rank 0 has read.

    Args:
        config: the configuration, with the number of partitions decided; the same on all ranks.
        rank: this rank.
        exchange: gives every rank what every rank says. It takes bytes, a name, and the most bytes.

    Returns:
        The plans; None where none are asked for, or where one partition needs none.

    Raises:
        ConfigError: the file is missing or damaged, or is for another number of partitions.
    """
    if not config.load_partition or config.partitions == 1:
        return None
    assert config.partition_file is not None
    mine = json.dumps(_read(config.partition_file)).encode() if rank == 0 else b""
    said = json.loads(exchange(mine, "smp_tf.planning.partition_file", _MOST_SAID)[0])
    if "error" in said:
        raise ConfigError(said["error"])
    advice = "Make it anew: run once without load_partition."
    try:
        found = PlanFile.from_json(said["text"])
    except PlacementError as error:
        raise ConfigError(f"partition_file {config.partition_file} cannot be used. {error} {advice}") from None
    if found.partitions != config.partitions:
        raise ConfigError(
            f"partition_file {config.partition_file} is for {found.partitions} partitions, and this job has "
            f"{config.partitions}. Set partitions to {found.partitions}. Or, for a plan of {config.partitions}, run "
            f"once without load_partition, with another partition_file."
        )
    return found


def _read(path: str) -> dict[str, str]:
    """Returns the file's text, or why there is none."""
    try:
        return {"text": read_text(path, MAX_BYTES)}
    except FileNotFoundError:
        return {
            "error": f"load_partition is true, but partition_file {path} does not exist on the host of rank 0 (looked "
            f"in {Path.cwd()}). Run once without load_partition, which writes it."
        }
    except UnreadableError as error:
        return {"error": f"partition_file {path} {error}."}


def given_for(step: str, graph: OpGraph, *, is_first: bool = True) -> StoredPlan | None:
    """Returns the plan that was loaded for a step; None where plans are made and not loaded.

    Args:
        step: name of a step function that decides about variables.
        graph: its pruned op graph.
        is_first: whether no earlier step has placed a layer of its models. A step that only adds layers may not have
            been in the run that wrote the file. Where the file has no plan for it, it follows the earlier steps.

    Raises:
        PlacementError: the plans were made for other models.
    """
    running = runtime.current()
    if running.plan_file is None:
        return None
    try:
        return running.plan_file.plan_for(step, graph, units_of(graph), fingerprint(graph))
    except PlacementError as error:
        if not is_first:
            announce(
                f"partition_file {running.config.partition_file} has no plan for step {step!r}, which uses layers that "
                f"no earlier step has used. They are placed by a plan that is made now, around the others.",
                running.topology.rank,
            )
            return None
        raise PlacementError(
            f"partition_file {running.config.partition_file} cannot be used. {error} Make it anew: run once without "
            f"load_partition."
        ) from None


def schedule_for(given: StoredPlan, schedule: str, decided: tuple[int, ...] | None) -> str:
    """Returns the schedule of a step whose plan was loaded. It is the configuration's, if that fits.

    Args:
        given: the plan.
        schedule: the configuration's schedule. "auto" stands for that of the plan.
        decided: where an earlier step has put the chunks; None before it.

    Raises:
        PlacementError: the schedule does not fit the chunks.
    """
    running = runtime.current()
    path = running.config.partition_file
    if decided not in (None, given.placement):
        raise PlacementError(
            f"The plan for {given.step!r} in {path} has chunks on partitions {list(given.placement)}, and what an "
            f"earlier step placed is in chunks on partitions {list(decided or ())}: change one of the two plans."
        )
    taken = given.pipeline if schedule == proposal.AUTO else schedule
    try:
        # The plan's schedule only has to exist.
        runs_on(given.pipeline, given.placement)
        runs = runs_on(taken, given.placement)
    except ScheduleError as error:
        raise PlacementError(
            f"The plan for {given.step!r} in {path} names a pipeline that cannot be had. {error}"
        ) from None
    if not runs:
        advice = "Change its 'placement' back" if taken == given.pipeline else f"Set pipeline to {given.pipeline!r}"
        raise PlacementError(
            f"The plan in {path} was made for pipeline {given.pipeline!r} and has chunks on partitions "
            f"{list(given.placement)}, on which {taken!r} does not run. {advice}, or make the plan anew: run once "
            f"without load_partition."
        )
    if taken != given.pipeline:
        announce(
            f"The plan in {path} was made for pipeline {given.pipeline!r}; its layers stay where they are, and the "
            f"step runs as {taken!r}.",
            running.topology.rank,
        )
    return taken


def keep(step: str, plan: Plan, graph: OpGraph) -> None:
    """Writes, on rank 0, the plan of a step that has decided about variables, after the plans of earlier steps.

    Args:
        step: name of the step function.
        plan: its plan, with its forecast.
        graph: its pruned op graph.

    Raises:
        ConfigError: the file cannot be written.
    """
    running = runtime.current()
    path = running.config.partition_file
    if running.topology.rank != 0 or path is None or plan.stages == 1 or running.config.load_partition:
        return
    made, new = _made(), to_store(step, plan, graph)
    if any((known.step, known.fingerprint) == (step, new.fingerprint) for known in made):
        # A script may make the same model again. A run that loads the file takes the first plan for each of them.
        return
    made.append(new)
    try:
        write_file(path, PlanFile(plan.stages, tuple(made)).to_json())
    except OSError as error:
        raise ConfigError(f"partition_file {path} cannot be written: {error.strerror}.") from error


def recompute_for(given: StoredPlan, asked: bool) -> bool:
    """Returns whether backward makes again what forward made, as the configuration or the loaded plan says.

    Args:
        given: the plan.
        asked: what the configuration says.
    """
    running = runtime.current()
    if given.recompute and not asked:
        announce(
            f"The plan in {running.config.partition_file} was made with recompute, which is used.",
            running.topology.rank,
        )
    return asked or given.recompute
