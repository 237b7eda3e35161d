"""The configuration's `partition_file`: plans are written to it when they are made, or read from it to run with them.

smp.init     rank 0 reads the file ─▶ every rank has its plans, or the same error
first step   of each model: its plan is looked up by the step's fingerprint, then by its layers and variables
else         rank 0 writes all plans made so far, to a file beside it that then takes its place
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

from smp_tf import planning, proposal, runtime
from smp_tf.announce import announce
from smp_tf.config import Config
from smp_tf.errors import ConfigError, PlacementError
from smp_tf.lifecycle import on_shutdown
from smp_tf.partition.fingerprint import fingerprint
from smp_tf.partition.op_graph import OpGraph
from smp_tf.partition.plan import Plan
from smp_tf.partition.plan_file import PlanFile, StoredPlan, to_store
from smp_tf.pipeline.schedule import runs_on

#: No plan file is larger: a model of a thousand layers takes about 0.3 MiB.
MAX_BYTES = 16 * 2**20

#: The plans that this script has made since `smp.init`.
_made: list[StoredPlan] = []


def load(config: Config, rank: int, exchange: Callable[[bytes, str, int], list[bytes]]) -> PlanFile | None:
    """The plans that the configuration asks to run with, on every rank what rank 0 has read.

    Args:
        config: the configuration, its number of partitions decided; the same on all ranks.
        rank: this rank.
        exchange: gives every rank what every rank says: bytes, a name, and the most bytes.

    Returns:
        The plans; None where none are asked for, or where one partition needs none.

    Raises:
        ConfigError: the file is missing or damaged, or is for another number of partitions.
    """
    if not config.load_partition or config.partitions == 1:
        return None
    assert config.partition_file is not None
    mine = json.dumps(_read(config.partition_file)).encode() if rank == 0 else b""
    said = json.loads(exchange(mine, "smp_tf.partition_file", 2 * MAX_BYTES)[0])
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
    """The file's text, or why there is none."""
    file = Path(path)
    if not file.exists():
        return {
            "error": f"load_partition is true, but partition_file {path} does not exist on the host of rank 0 (looked "
            f"in {Path.cwd()}). Run once without load_partition, which writes it."
        }
    try:
        if file.stat().st_size > MAX_BYTES:
            return {"error": f"partition_file {path} is larger than {MAX_BYTES} bytes, which no plan file is."}
        return {"text": file.read_text(encoding="utf-8")}
    except OSError as error:
        return {"error": f"partition_file {path} cannot be read: {error.strerror}."}
    except UnicodeDecodeError as error:
        return {"error": f"partition_file {path} is damaged: it is not UTF-8 text ({error})."}


def given_for(step: str, graph: OpGraph) -> StoredPlan | None:
    """The plan that was loaded for a step; None where plans are made and not loaded.

    Args:
        step: name of the step function, one that decides about variables.
        graph: its pruned op graph.

    Raises:
        PlacementError: the plans were made for other models.
    """
    running = runtime.current()
    if running.plan_file is None:
        return None
    path, own = running.config.partition_file, fingerprint(graph)
    try:
        found = running.plan_file.plan_for(step, graph, planning.units_of(graph), own)
    except PlacementError as error:
        raise PlacementError(
            f"partition_file {path} cannot be used. {error} Make it anew: run once without load_partition."
        ) from None
    if found.fingerprint != own:
        announce(
            f"The plan in {path} was made for step {found.step!r} with the layers and variables of {step!r}, but with "
            f"other batches or constants. Its placement is kept; the forecast is that of this step.",
            running.topology.rank,
        )
    return found


def schedule_for(given: StoredPlan, schedule: str, decided: tuple[int, ...] | None) -> str:
    """The schedule of a step whose plan was loaded: what the configuration asks for, if the plan's chunks go with it.

    Args:
        given: the plan.
        schedule: what the configuration asks for; with "auto" it is that of the plan.
        decided: where an earlier step has put the chunks; None before it.

    Raises:
        PlacementError: they do not go with it.
    """
    running = runtime.current()
    path = running.config.partition_file
    if decided not in (None, given.placement):
        raise PlacementError(
            f"The plan for {given.step!r} in {path} has chunks on partitions {list(given.placement)}, and what an "
            f"earlier step placed is in chunks on partitions {list(decided or ())}: change one of the two plans."
        )
    if schedule == proposal.AUTO:
        return given.pipeline
    if not runs_on(schedule, given.placement):
        raise PlacementError(
            f"The plan in {path} was made for pipeline {given.pipeline!r} and has chunks on partitions "
            f"{list(given.placement)}, on which {schedule!r} does not run. Set pipeline to {given.pipeline!r}, or make "
            f"the plan anew: run once without load_partition."
        )
    if schedule != given.pipeline:
        announce(
            f"The plan in {path} was made for pipeline {given.pipeline!r}; its layers stay where they are, and the "
            f"step runs as {schedule!r}.",
            running.topology.rank,
        )
    return schedule


def keep(step: str, plan: Plan, graph: OpGraph) -> None:
    """Write the plan of a step that has decided about variables, behind those of earlier steps; on rank 0.

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
    if not _made:
        on_shutdown(_made.clear)
    _made.append(to_store(step, plan, graph))
    try:
        _replace(Path(path), PlanFile(plan.stages, tuple(_made)).to_json())
    except OSError as error:
        raise ConfigError(f"partition_file {path} cannot be written: {error.strerror}.") from error


def _replace(file: Path, text: str) -> None:
    """Put a file in place, at once: whoever reads it finds the old one or the new one, whole."""
    building = file.with_name(f"{file.name}.writing")
    file.parent.mkdir(parents=True, exist_ok=True)
    with open(building, "w", encoding="utf-8") as open_file:
        open_file.write(text)
        open_file.flush()
        os.fsync(open_file.fileno())
    os.replace(building, file)


def recompute_for(given: StoredPlan, asked: bool) -> bool:
    """Whether backward makes again what forward made: as the configuration asks, or the plan that was loaded.

    Args:
        given: the plan.
        asked: what the configuration asks for.
    """
    running = runtime.current()
    if given.recompute and not asked:
        announce(
            f"The plan in {running.config.partition_file} was made with recompute, which is used.",
            running.topology.rank,
        )
    return asked or given.recompute
