"""What earlier steps of this job have placed. A later step follows it, since a variable stays where it is."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from smp_tf.announce import announce
from smp_tf.config.config import Config
from smp_tf.errors import StepError
from smp_tf.job import runtime
from smp_tf.job_state import JobState
from smp_tf.partition.graph.op_graph import OpGraph
from smp_tf.partition.plan.plan import Plan
from smp_tf.partition.trace.lower import Lowered
from smp_tf.pipeline.planner import proposal
from smp_tf.variables.state import VariableState
from smp_tf.variables.store import store_of

#: The stage of every chunk in the first plan of this job; empty before it.
_first_placement: JobState[tuple[int, ...] | None] = JobState(lambda: None)


def chunks_of(lowered: Lowered, used: Collection[int], *, decided_only: bool = False) -> dict[int, int]:
    """Returns the chunks of the variables that the placement of a step follows, by index in the graph.

    These are the variables that an earlier step has placed. Where there are none, they are the variables that are kept
    until a step uses them, so that these stay next to the rest of their models.

    Args:
        lowered: the graph.
        used: the variables that an op of the step uses, by index.
        decided_only: whether to disregard variables that are only kept, for a step with its own plan.
    """
    placed = [(index, state) for index, state in _placed(lowered, used) if state.is_decided or not decided_only]
    return {index: state.chunk for index, state in placed if state.chunk is not None}


def are_decided(lowered: Lowered, used: Collection[int]) -> bool:
    """Returns whether earlier steps have decided who stores all variables that a step uses.

    Args:
        lowered: the graph.
        used: the variables that an op of the step uses, by index.
    """
    return all(state.is_decided for index, state in _states(lowered) if index in used)


def bytes_there(lowered: Lowered, least: int) -> int:
    """Returns the bytes of the models' variables that have a value on this rank.

    Args:
        lowered: the graph.
        least: smaller variables are left out.
    """
    kinds = lowered.graph.variables
    sizes = (kinds[index].type.nbytes(1, least) for index, state in _states(lowered) if state.has_value)
    return sum(sizes)


def placement(lowered: Lowered, used: Collection[int]) -> tuple[int, ...] | None:
    """Returns the stage of every chunk in the plan of an earlier step that has placed variables of this one.

    Args:
        lowered: the graph.
        used: the variables that an op of the step uses, by index.

    Raises:
        StepError: they were placed by plans with other chunks.
    """
    decided: dict[tuple[int, ...], str] = {}
    for _, state in _placed(lowered, used):
        if state.storage.chunks is not None:
            decided.setdefault(state.storage.chunks, state.name)
    if len(decided) > 1:
        (one, first), (other, second), *_ = decided.items()
        raise StepError(
            f"{first!r} was placed by a plan with chunks on partitions {list(one)}, and {second!r} by one with chunks "
            f"on partitions {list(other)}, so that no step can use both. Let a step that uses both run first, or name "
            f"the schedule in pipeline instead of 'auto'."
        )
    return next(iter(decided), None)


def first_placement(config: Config, stages: int) -> tuple[int, ...] | None:
    """Returns where this job's earlier plans have their chunks, if there is a choice, so that models fit together."""
    first = _first_placement()
    return first if _is_free(config) and first is not None and max(first) + 1 == stages else None


def remember(step: str, plan: Plan, graph: OpGraph, config: Config) -> None:
    """Keeps where the first plan has its chunks. Says so where a step without backward has chosen for others."""
    if _first_placement() is None:
        _first_placement.put(plan.placement)
        if _is_free(config) and plan.stages > 1 and not graph.gradients:
            announce(
                f"Step {step!r}, which takes no gradients, has decided where the layers are, also for training: chunks "
                f"on partitions {list(plan.placement)}. Let the training step run first to have them placed for it.",
                runtime.current().topology.rank,
            )


def _placed(lowered: Lowered, used: Collection[int]) -> list[tuple[int, VariableState]]:
    """Returns what is known of the variables that the placement of a step follows."""
    found = [
        (index, state)
        for index, state in _states(lowered)
        if index in used and state.owner is not None and not state.storage.is_early
    ]
    return [(index, state) for index, state in found if state.is_decided] or found


def _states(lowered: Lowered) -> Iterator[tuple[int, VariableState]]:
    """Yields what is known of the variables of models, with their index in the graph."""
    for index, variable in enumerate(lowered.variables):
        store = store_of(variable)
        state = store.state(variable) if store is not None else None
        if state is not None:
            yield index, state


def _is_free(config: Config) -> bool:
    """Returns whether a plan chooses the partitions of its chunks."""
    return config.pipeline == proposal.AUTO or not config.contiguous
