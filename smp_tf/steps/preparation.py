"""Leads from a traced step to this rank's program, by values that can be looked at.

batch ──▶ cut batch ──▶ trace ──▶ agreed plan ──▶ ownership ──▶ stage program
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import tensorflow as tf

from smp_tf.batch.cut_batch import CutBatch
from smp_tf.batch.results import local_outputs_of
from smp_tf.job import runtime
from smp_tf.job.program_numbers import know_averaging
from smp_tf.partition.mesh import CommGroup
from smp_tf.partition.plan.plan import Plan
from smp_tf.partition.split.split import Split
from smp_tf.partition.trace.lower import Lowered, OutputSlot
from smp_tf.pipeline import allocator
from smp_tf.pipeline.planner import memory_forecast, proposal
from smp_tf.pipeline.planner.counted_memory import exact_and_counted
from smp_tf.pipeline.planner.cut import cut as cut_by_plan
from smp_tf.pipeline.planner.request import PlacementRequest
from smp_tf.pipeline.run.microbatch_sums import WantedSums
from smp_tf.pipeline.run.reduction import Averaging
from smp_tf.pipeline.run.replica_sums import replica_sums
from smp_tf.pipeline.run.stage_program import Endpoint, StageProgram, build_stage_program
from smp_tf.pipeline.run.step_tasks import StageTasks, Updates, check_other_replicas, plan_program
from smp_tf.pipeline.schedules.schedule import is_named
from smp_tf.planning import earlier_steps, first_steps, partition_file
from smp_tf.planning.agreement import agree_on_plan, show_plan
from smp_tf.planning.host_memory import memory_of_host, require_host_memory
from smp_tf.planning.memory_region import take_region
from smp_tf.planning.request import expected_of, known_slots, request_for
from smp_tf.replicas import unaveraged
from smp_tf.replicas.sums import BucketSums
from smp_tf.sharding import layouts
from smp_tf.sharding.receivers import Applied, known_gradients
from smp_tf.steps.ownership import AgreedReceivers, Ownership, decide_owners
from smp_tf.steps.sums_in_steps import ends_of
from smp_tf.steps.trace import Examined, StepTrace
from smp_tf.variables.fetch import WRITER
from smp_tf.variables.host_offload import device_of_gradients


@dataclass(frozen=True, eq=False)
class Unplanned:
    """A step that was traced, with the request for its plan.

    Args:
        name: of the step function.
        known_as: what the step function is known by, on all ranks.
        traced: its trace.
        batch: how its batch is cut.
        request: what its plan depends on, besides the graph.
        knows_slots: whether the optimizer's slots are known.
        decides: whether the plan decides where variables are.
        is_first: whether the step has no program yet.
    """

    name: str
    known_as: str
    traced: StepTrace
    batch: CutBatch
    request: PlacementRequest
    knows_slots: bool
    decides: bool
    is_first: bool

    @property
    def owners(self) -> Mapping[int, int]:
        """Returns the chunks of variables whose owner an earlier step decided, by index."""
        used = self.traced.graph.used_variables
        return earlier_steps.chunks_of(self.traced.lowered, used, decided_only=self.request.fixed.given is not None)

    def propose(self, owners: Mapping[int, int], like: Plan | None = None) -> Plan:
        """Makes a plan.

        Args:
            owners: chunks of variables whose owner is decided, by index.
            like: the plan of another replica, whose chunks and schedule are kept.
        """
        wanted = self.request if like is None else self.request.like(like)
        return proposal.propose(self.traced.graph, wanted, owners)


@dataclass(frozen=True, eq=False)
class AgreedPlan:
    """The plan on which all ranks have agreed.

    Args:
        plan: the plan.
        cut: the step, cut by it.
        number: number of the program, which no rank of this replica has used before.
        expected: how long a step should take by the plan, where this is to be told; else None.
    """

    plan: Plan
    cut: Split
    number: int
    expected: first_steps.Expected | None


def unplanned(name: str, known_as: str, examined: Examined, batch: CutBatch, *, is_first: bool) -> Unplanned:
    """Returns a step with the request for its plan.

    Args:
        name: of the step function.
        known_as: what it is known by, on all ranks.
        examined: the step, traced and looked at.
        batch: how its batch is cut.
        is_first: whether the step has no program yet.
    """
    traced = examined.traced
    decides = not earlier_steps.are_decided(traced.lowered, traced.graph.used_variables)
    slots = known_slots(traced.models)
    outputs = local_outputs_of(traced.lowered.results, tuple(examined.local))
    request = request_for(name, traced, batch.microbatches, batch.samples, slots, outputs, decides=decides)
    once = dataclasses.replace(request.once, stage_sums=request.once.stage_sums + examined.stage_sums)
    request = dataclasses.replace(request, once=once)
    return Unplanned(name, known_as, traced, batch, request, slots is not None, decides, is_first)


def agreed_plan(step: Unplanned) -> AgreedPlan:
    """Agrees on a plan with the other ranks, cuts the step by it, shows and keeps it.

    Args:
        step: the step.
    """
    topology, graph = runtime.current().topology, step.traced.graph
    # Of a processor's memory, large tensors are counted.
    first_steps.note_memory_before(earlier_steps.bytes_there(step.traced.lowered, allocator.counted_from()))
    # Without gradients nothing passes between replicas, so one alone may evaluate.
    everywhere = step.decides or (step.is_first and bool(graph.gradients))
    with tf.init_scope():
        plan, number = agree_on_plan(
            step.name,
            step.batch.arguments,
            graph,
            step.propose,
            step.owners,
            everywhere=everywhere,
            known_as=step.known_as,
        )
    cut = cut_by_plan(graph, plan, step.request.outputs.local, step.request.outputs.composites)
    # A step that takes gradients only for itself, such as for a metric of their norm, averages nothing. Replicas wait
    # for each other in sums within a step, too.
    if topology.replicas > 1 and (any(output.is_gradient for output in cut.outputs) or replica_sums(cut.graph)):
        know_averaging(number, step.known_as, everywhere=everywhere)
    is_told = step.decides and topology.rank == WRITER
    counted: tuple[int, ...] = ()
    if step.decides or any(model._smp_store.is_new for model in step.traced.models):
        plan, counted = forecast_of_cut(plan, cut, step.request, is_told=is_told)
        show_plan(plan)
        require_host_memory(plan, topology, memory_of_host(), knows_slots=step.knows_slots)
        take_region(plan.forecast[topology.stage].device_bytes)
    if step.decides:
        partition_file.keep(step.name, plan, graph)
        earlier_steps.remember(step.name, plan, graph, runtime.current().config)
    expected = expected_of(step.name, step.traced, step.request, plan, cut, counted) if is_told else None
    return AgreedPlan(plan, cut, number, expected)


def forecast_of_cut(
    plan: Plan, cut: Split, request: PlacementRequest, *, is_told: bool
) -> tuple[Plan, tuple[int, ...]]:
    """Returns the plan with the memory that its cut needs, and of how many bytes of each stage the first steps tell.

    Args:
        plan: the plan.
        cut: the step, cut by the plan.
        request: the request that the plan was made for.
        is_told: whether this rank tells of the first steps.
    """
    if is_told and allocator.counted_from():
        return exact_and_counted(plan, cut, request)
    return memory_forecast.with_exact_transfers(plan, cut, request), ()


def sparse_gradients(lowered: Lowered, cut: Split) -> list[tuple[int, ...]]:
    """Finds the sparse gradients that a step returns: the positions of the parts of each among its outputs.

    Args:
        lowered: what was read off the trace.
        cut: the step, cut.
    """
    slots = [slot for slot in tf.nest.flatten(lowered.results) if isinstance(slot, OutputSlot)]
    sparse = [slot.outputs for slot in slots if isinstance(slot.spec, tf.IndexedSlicesSpec)]
    return [positions for positions in sparse if cut.outputs[positions[0]].is_gradient]


def ownership(
    step: Unplanned, agreed: AgreedPlan, receivers: AgreedReceivers, applied: Sequence[Applied] | None
) -> Ownership:
    """Decides which variables this rank has, and who receives their gradients.

    Args:
        step: the step.
        agreed: its plan.
        receivers: who receives the gradients of a step, as the replicas have agreed.
        applied: which gradients the step gives to an optimizer and to nobody else; None where a script does.
    """
    running, traced, cut = runtime.current(), step.traced, agreed.cut
    graph, lowered, place = traced.graph, traced.lowered, running.topology.place
    used, trained = graph.used_variables, {gradient.variable for gradient in graph.gradients}
    of_used = [owner if index in used else None for index, owner in enumerate(cut.assignment.owners)]
    decided = decide_owners(traced.models, lowered, of_used, agreed.plan.placement, running.seed, trained)
    mine = {
        index: variable
        for index, variable in enumerate(lowered.variables)
        if not graph.variables[index].in_model or (index in used and layouts.layout_of(variable).is_here(place))
    }
    return Ownership(decided, mine, receivers.of(cut, lowered, applied), applied or ())


def averaging_of(step: Unplanned, cut: Split, owned: Ownership) -> Averaging | None:
    """Returns how the gradients of a step are averaged over the replicas; None where they are not.

    Args:
        step: the step.
        cut: the step, cut.
        owned: who receives its gradients.
    """
    if runtime.current().topology.replicas == 1 or unaveraged.are_left():
        return None
    known = known_gradients(owned.receivers, owned.applied)
    sums = BucketSums(step.known_as, owned.receivers)
    return Averaging(sums, known, sparse=sparse_gradients(step.traced.lowered, cut))


def stage_program(
    step: Unplanned,
    agreed: AgreedPlan,
    owned: Ownership,
    *,
    keeps_gradients: bool,
    by_script: bool,
    joins: bool,
    logs: bool,
    xla: bool,
) -> StageProgram:
    """Builds what this rank runs.

    Args:
        step: the step.
        agreed: its plan.
        owned: which variables this rank has, and who receives their gradients.
        keeps_gradients: whether gradients are kept for each microbatch besides their sum.
        by_script: whether the script updates weights, after the step.
        joins: whether samples of all replicas are brought together after the step.
        logs: whether what comes after the step averages over the replicas what it logs of a batch.
        xla: whether to compile the functions with XLA, where XLA can.
    """
    topology, cut = runtime.current().topology, agreed.cut
    config, schedule = runtime.current().config, agreed.plan.schedule
    weighs = topology.replicas > 1 and any(output.is_gradient for output in cut.outputs)
    is_trained = bool(cut.graph.gradients)
    tasks = StageTasks(
        averaging_of(step, cut, owned),
        Updates(step.request.once.stage_sums, by_script) if is_trained else None,
        weighs=weighs,
        checks_inputs=config.check_inputs and bool(step.batch.arguments),
        joins=joins,
        logs=logs and topology.replicas > 1,
        gives_early=not xla,
    )
    kept = frozenset(range(len(cut.outputs))) if keeps_gradients else frozenset()
    program = build_stage_program(
        cut,
        plan_program(cut, schedule, step.batch.microbatches),
        Endpoint(
            agreed.number,
            topology.stage,
            tuple(topology.members(CommGroup.PP_GROUP)),
            ends_of(cut.graph, step.known_as),
        ),
        owned.variables,
        tasks=tasks,
        sums=WantedSums(kept, step.batch.size is None or topology.replicas > 1, device_of_gradients()),
        xla=xla,
        samples=step.batch.samples,
    )
    if (weighs or program.end.replicas is not None) and is_named(schedule):
        most, replicas = config.microbatches, topology.replicas
        check_other_replicas(cut, program.planned, schedule, most, tasks, kept, replicas)
    return program.without_definitions()
