"""The request for a placement: ten values."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from smp_tf.partition.errors import PlacementError
from smp_tf.partition.place.placement import Chunks, Ranks
from smp_tf.partition.plan.held_memory import HeldMemory
from smp_tf.partition.plan.plan import Plan
from smp_tf.partition.plan.plan_file import StoredPlan
from smp_tf.partition.units.cost import Machine
from smp_tf.pipeline.errors import ScheduleError
from smp_tf.pipeline.planner.times_by_size import UnitTimes
from smp_tf.pipeline.planner.unit_peaks import BeyondEstimate
from smp_tf.pipeline.programs.stash import stash_profile
from smp_tf.pipeline.schedules.schedule import placement_of, program_of


@dataclass(frozen=True)
class Course:
    """How a step goes through its stages.

    Args:
        schedule: name or text of the schedule.
        stages: number of stages.
        microbatches: number of microbatches.
        samples: samples of a microbatch, where the graph does not say their number.
        chunks_per_rank: how many chunks of the model each rank has; None for the fewest that the schedule takes.
        placement: the stage of every chunk, where it is not the schedule's; else None.
        contiguous: whether every stage is one run of the units, where the schedule has one chunk on each.
        recompute: whether backward makes again what forward made, instead of keeping it.
    """

    schedule: str
    stages: int
    microbatches: int
    samples: int = 1
    chunks_per_rank: int | None = None
    placement: tuple[int, ...] | None = None
    contiguous: bool = True
    recompute: bool = False

    @property
    def chunks(self) -> Chunks:
        """Returns where chunks are, and what stages keep of them.

        Raises:
            PlacementError: the schedule has no order for chunks that are placed as an earlier step or a file says.
            ScheduleError: the schedule is not defined for these numbers of stages and microbatches.
        """
        placement = self.placement or placement_of(self.schedule, self.stages, self.chunks_per_rank)
        try:
            return _chunks_of(self.schedule, placement, self.microbatches)
        except ScheduleError as error:
            if self.placement is None:
                raise
            raise PlacementError(f"pipeline and the places of the chunks do not go together. {error}") from None


@dataclass(frozen=True)
class Storage:
    """What ranks keep besides weights and activations, and where.

    Args:
        slots: optimizer slots per trainable variable, in sizes of the variable.
        slot_shares: number of replicas that share the slots of a stage.
        replicas: number of replicas that train at the same time.
        averaging_bytes: memory through which every rank averages gradients.
        gradients_on_host, slots_on_host: whether gradients, or slots, are in the host's memory instead of the device's.
    """

    slots: float
    slot_shares: int = 1
    replicas: int = 1
    averaging_bytes: int = 0
    gradients_on_host: bool = False
    slots_on_host: bool = False


@dataclass(frozen=True)
class Hardware:
    """What the ranks are.

    Args:
        ranks: how the ranks of the stages differ, and what they may need; None where they are alike and have no limit.
        machine: speeds by which costs are estimated. The ranks' speeds are multiples of these. None stands for a usual
            machine.
    """

    ranks: Ranks | None = None
    machine: Machine | None = None


@dataclass(frozen=True)
class Aim:
    """What makes a placement good, and how long to search for one.

    Args:
        objective: "memory" or "speed".
        balance_tolerance: the share by which the balance may be worse than the best, so that fewer bytes are sent.
        proof_seconds: how many seconds to search for a placement beyond cuts of one order; 0 for no search.
        thorough: whether to search even where there is little to gain.
        advise: whether to search for settings that fit, where these do not.
        others: returns words for numbers of microbatches that are not tried here and with which it fits; None where
            nothing else can be tried.
        more_partitions: returns words for larger numbers of stages with which it fits, where their ranks are known;
            None where these ranks are assumed to be like the others.
    """

    objective: str
    balance_tolerance: float = 0.0
    proof_seconds: float = 0.0
    thorough: bool = False
    advise: bool = True
    others: Callable[[], Iterable[str]] | None = None
    more_partitions: Callable[[Iterable[int]], Iterable[str]] | None = None


@dataclass(frozen=True)
class Outputs:
    """The outputs of a step that are no plain tensors for every stage.

    Args:
        local: positions of outputs that stay with the stage that makes them.
        composites: positions of outputs that are parts of one composite tensor.
    """

    local: frozenset[int] = frozenset()
    composites: Sequence[tuple[int, ...]] = ()


@dataclass(frozen=True)
class Once:
    """What a step does once besides its microbatches, as far as a plan cannot tell it from the graph.

    Args:
        checks_inputs: whether the ranks of a replica compare their batches.
        stage_sums: how often the stages put numbers together before weights change.
        is_compiled: whether XLA compiles the tasks.
        sum_wait: seconds until a sum over the replicas begins, once all of them have come to it.
    """

    checks_inputs: bool = False
    stage_sums: int = 0
    is_compiled: bool = False
    sum_wait: float = 0.0


@dataclass(frozen=True)
class Fixed:
    """What a script or a file has fixed of a placement.

    Args:
        default: the stage of layers that the script has not placed, where it places layers; else None.
        given: the plan of a file, which leaves no choice; else None.
    """

    default: int | None = None
    given: StoredPlan | None = None


@dataclass(frozen=True)
class PlacementRequest:
    """What the placement of a step depends on besides its graph.

    Args:
        course: how the step goes through its stages.
        storage: what ranks keep besides weights and activations.
        aim: what makes a placement good, and how long to search for one.
        times: measured times of units, in seconds of one microbatch.
        hardware: what the ranks are.
        fixed: what a script or a file has fixed.
        outputs: which outputs are no plain tensors for every stage.
        once: what the step does once besides its microbatches.
        beyond: how many more bytes units need than is estimated, as was measured.
        held: what the ranks of stages held in earlier trainings, by the key of the placement.
    """

    course: Course
    storage: Storage
    aim: Aim
    times: UnitTimes = dataclasses.field(default_factory=UnitTimes)
    hardware: Hardware = Hardware()
    fixed: Fixed = Fixed()
    outputs: Outputs = Outputs()
    once: Once = Once()
    beyond: BeyondEstimate = dataclasses.field(default_factory=BeyondEstimate)
    held: Mapping[str, tuple[HeldMemory, ...]] = dataclasses.field(default_factory=dict)

    def changed(self, **changes: Any) -> PlacementRequest:
        """Returns the same request with other values of some fields.

        Args:
            changes: fields of the request or of one of its values, by name. No two of these share a field.

        Raises:
            TypeError: there is no such field.
        """
        parts: dict[str, Any] = {}
        for name, value in changes.items():
            if name in _PART_OF:
                part = parts.get(_PART_OF[name], getattr(self, _PART_OF[name]))
                parts[_PART_OF[name]] = dataclasses.replace(part, **{name: value})
            else:
                parts[name] = value
        return dataclasses.replace(self, **parts)

    def like(self, plan: Plan) -> PlacementRequest:
        """Returns the same request for another step, with the chunks and the schedule of a plan.

        Args:
            plan: the plan of a step of another replica.
        """
        return self.changed(placement=plan.placement, schedule=plan.schedule, contiguous=True)

    @property
    def limits(self) -> tuple[float | None, ...]:
        """Returns the bytes that each stage may need, or None."""
        ranks = self.hardware.ranks
        return ranks.memory if ranks is not None else (None,) * self.course.stages


#: The value of a request that has each field, by the field's name.
_PART_OF = {
    field.name: part
    for part, kind in (
        ("course", Course),
        ("storage", Storage),
        ("aim", Aim),
        ("hardware", Hardware),
        ("fixed", Fixed),
        ("once", Once),
    )
    for field in dataclasses.fields(kind)
}


@functools.lru_cache(maxsize=64)
def _chunks_of(schedule: str, placement: tuple[int, ...], microbatches: int) -> Chunks:
    return Chunks(placement, stash_profile(program_of(schedule, placement, microbatches)))
