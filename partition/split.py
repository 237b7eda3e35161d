"""Cut a placed op graph into segments: what each stage runs in each sweep, what flows in, what flows out.

                 sweep 0 on stage 1                      sweep 1 on stage 1
    received ─▶ ┌───────────────────┐ ──── stash ────▶ ┌───────────────────┐ ◀─ received
    arguments ─▶│ nodes, with copies│                  │ nodes, with copies│
                │ of what is free   │ ─▶ sent to 2     │ of what is free   │ ─▶ gradients, sent to 0
                └───────────────────┘                  └───────────────────┘

Backward may be cut once more, for schedules that delay what only weights need (zero bubble):

    part 0, I: what other stages wait for in this sweep    gradient ─▶ ReluGrad ─┬─▶ MatMul(·, kernelᵀ) ─▶ sent to 0
    part 1, W: all else                                                         └─▶ MatMul(xᵀ, ·) ─▶ kernel's gradient

All stages are cut on every rank, from the same graph and plan, so that both ends of a transfer agree without a word.
"""

from __future__ import annotations

import enum
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from smp_tf.partition.assign import Assignment, Role
from smp_tf.partition.backward_parts import input_gradient_nodes
from smp_tf.partition.errors import PlacementError
from smp_tf.partition.op_graph import SOURCES, UNSENDABLE_DTYPES, VARIABLE, OpGraph, Tensor

_READ = "ReadVariableOp"
#: Stage, sweep, and part of the sweep.
_Key = tuple[int, int, int]
#: Ops that read a weight and can as well be given its value.
_READERS = frozenset({_READ, "ResourceGather", "ResourceGatherNd", "VariableShape"})


@dataclass(frozen=True, slots=True)
class Segment:
    """What one stage runs for one microbatch in one sweep.

    Args:
        stage, sweep: where and when.
        part: 1 for what only weights need of a backward that is cut in two; else 0.
        nodes: numbers of the nodes to run, in order, copies of free ones included.
        sources: the ARGUMENT, CAPTURE, SEED and VARIABLE nodes it takes from its surroundings.
        inputs: tensors made elsewhere: by an earlier segment of the stage (stash) or received.
        remote_values: variables of other stages whose value it reads; the value is fed in, once per step.
        outputs: tensors that later segments, other stages or the caller need.
        has_effect: whether it must run even where nobody reads an output.
    """

    stage: int
    sweep: int
    part: int
    nodes: tuple[int, ...]
    sources: tuple[int, ...]
    inputs: tuple[Tensor, ...]
    remote_values: tuple[int, ...]
    outputs: tuple[Tensor, ...]
    has_effect: bool


@dataclass(frozen=True, slots=True)
class Transfer:
    """A tensor that one stage makes and another needs.

    Args:
        index: running number, the same on every rank.
        tensor: what is sent; None for the value of a variable.
        variable: whose value is sent once per step; None for a tensor.
        src_stage, src_sweep: where it is made; sweep None for what is there when the step starts.
        dst_stage, dst_sweep: where it is first needed; sweep None for a result of the step.
        is_sum: whether the tensor's sum over the microbatches is sent, once per step.
    """

    index: int
    tensor: Tensor | None
    variable: int | None
    src_stage: int
    src_sweep: int | None
    dst_stage: int
    dst_sweep: int | None
    is_sum: bool = False

    @property
    def once_per_step(self) -> bool:
        """Whether it is sent once per step rather than for every microbatch."""
        return self.is_sum or self.variable is not None


class Delivery(enum.Enum):
    """Who gets an output of the step: every rank (sent), every rank (made there), its stage alone, or all its sum."""

    SENT_TO_ALL = "sent to all"
    MADE_BY_ALL = "made by all"
    LOCAL = "local"
    SUM_TO_ALL = "sum to all"


@dataclass(frozen=True, slots=True)
class StepOutputPlan:
    """How one output tensor of the step reaches the caller.

    Args:
        tensor: the tensor.
        delivery: who gets it.
        stage: the stage that makes it; None where all make it.
        is_gradient: whether it was computed from gradients.
        is_part: whether it is a part of a composite tensor (sparse slices), whose parts stay per microbatch.
        follows_state: whether it was computed from a variable that the step writes, such as the result of a metric:
            its value after the last microbatch is that of the whole batch.
        summands: for a gradient that is made on other stages than its variable's owner, `stage`: the contributions.
            Each is summed over the microbatches where it is made and sent to `stage` once per step; the output is
            the sum of all. Where `tensor` is not among them it is never computed. With SUM_TO_ALL they go to every
            stage, and each adds them up: the gradient of a variable of the script, which lives on every rank.
    """

    tensor: Tensor
    delivery: Delivery
    stage: int | None
    is_gradient: bool
    is_part: bool = False
    summands: tuple[Tensor, ...] = ()
    follows_state: bool = False

    @property
    def is_summed(self) -> bool:
        """Whether the stage that makes it adds it up over the microbatches instead of keeping each."""
        return self.is_gradient and self.delivery in (Delivery.LOCAL, Delivery.SUM_TO_ALL) and not self.is_part

    def gets_sum(self, stage: int) -> bool:
        """Whether a stage has the sum over the microbatches."""
        return self.is_summed and (self.stage == stage or self.delivery is Delivery.SUM_TO_ALL)


@dataclass(frozen=True)
class Split:
    """A step, cut: the segments of all stages, the transfers between them and the way of each output.

    Args:
        graph: the op graph all numbers refer to.
        assignment: the placement that was cut.
        segments: by (stage, sweep, part); where a stage has nothing to do there is none.
        transfers: in the order of their index.
        outputs: one per `graph.outputs`.
    """

    graph: OpGraph
    assignment: Assignment
    segments: dict[_Key, Segment]
    transfers: tuple[Transfer, ...]
    outputs: tuple[StepOutputPlan, ...]

    @property
    def stages(self) -> int:
        """Number of stages."""
        return self.assignment.stages

    @cached_property
    def sweeps(self) -> int:
        """Number of sweeps, the last one of replicated ops included."""
        return 1 + max((sweep for _, sweep, _ in self.segments), default=0)

    def stash(self, stage: int) -> tuple[Tensor, ...]:
        """Tensors that the stage keeps between forward and backward, and between the parts of backward.

        Of one microbatch; what backward leaves for a later sweep is not among them.
        """
        kept: dict[Tensor, None] = {}
        for (of, sweep, part), segment in sorted(self.segments.items()):
            if of == stage:
                before = [(stage, 0, 0), *([(stage, 1, 0)] if part else [])]
                there = [self.segments[key] for key in before if key in self.segments and key != (of, sweep, part)]
                made = {tensor for other in there for tensor in other.outputs + other.inputs}
                kept.update((tensor, None) for tensor in segment.inputs if tensor in made)
        return tuple(kept)


def split(
    assignment: Assignment,
    local_outputs: frozenset[int] = frozenset(),
    composites: Sequence[tuple[int, ...]] = (),
    *,
    cut_backward: Collection[int] = (),
) -> Split:
    """Cut a placed graph.

    Args:
        assignment: the placement of every op.
        local_outputs: positions of outputs that stay with the stage that makes them.
        composites: positions of outputs that are parts of one composite tensor; they stay together.
        cut_backward: stages whose backward is made in two parts: what other stages wait for, and all else.

    Returns:
        The segments, transfers and outputs of all stages.

    Raises:
        PlacementError: the cut goes through a tensor that cannot be sent, or separates an op from a variable it must
            hold the handle of.
    """
    return _Splitter(assignment, local_outputs, composites, cut_backward).run()


class _Splitter:
    def __init__(
        self,
        assignment: Assignment,
        local_outputs: frozenset[int],
        composites: Sequence[tuple[int, ...]],
        cut_backward: Collection[int],
    ) -> None:
        self.assignment = assignment
        self.graph = assignment.graph
        self.places = assignment.places
        self.local_outputs = local_outputs
        self.composites = composites
        self.replicated_sweep = assignment.replicated_sweep
        self.variable_of_gradient = {t: g.variable for g in self.graph.gradients for t in g.tensors}
        self.cut_backward = frozenset(cut_backward)
        self.waited_for: frozenset[int] = frozenset()
        # Per segment: the nodes it runs itself, and the tensors it takes from elsewhere.
        self.members: dict[_Key, set[int]] = defaultdict(set)
        self.taken: dict[_Key, dict[Tensor, None]] = defaultdict(dict)
        self.remote: dict[_Key, set[int]] = defaultdict(set)
        self.exported: dict[_Key, dict[Tensor, None]] = defaultdict(dict)

    def _visit(self, number: int) -> _Key:
        """Stage, sweep and part of a node that has a stage."""
        place = self.places[number]
        assert place.stage is not None
        late = place.role is Role.HOME and place.sweep == 1 and number not in self.waited_for
        return place.stage, place.sweep, self._last_part(place.stage) if late else 0

    def _last_part(self, stage: int) -> int:
        """The part of backward that what only weights need is in."""
        return int(stage in self.cut_backward)

    def run(self) -> Split:
        outputs = self._plan_outputs()
        never_made = {o.tensor.node for o in outputs if o.summands and o.tensor not in o.summands}
        if self.cut_backward:
            # What is summed at the owner of a weight is sent when all microbatches are done: nobody waits for it.
            stage_of = {
                n: p.stage
                for n, p in enumerate(self.places)
                if p.role is Role.HOME and p.sweep == 1 and p.stage is not None
            }
            self.waited_for = input_gradient_nodes(self.graph, stage_of, never_made)
        roots: dict[_Key, dict[int, None]] = defaultdict(dict)
        for number, place in enumerate(self.places):
            if number in never_made:
                continue
            if place.role is Role.HOME:
                roots[self._visit(number)][number] = None
            elif place.role is Role.REPLICATED:
                for stage in range(self.assignment.stages):
                    roots[stage, self.replicated_sweep, 0][number] = None
        for output in outputs:
            node = output.tensor.node
            if output.delivery is Delivery.MADE_BY_ALL and self.places[node].role is not Role.REPLICATED:
                for stage in range(self.assignment.stages):
                    roots[stage, self.replicated_sweep, 0][node] = None
            elif self.places[node].role in (Role.WEIGHT, Role.FREE):
                roots[self._made_at(output)][node] = None
            for summand in output.summands:
                self.exported[self._visit(summand.node)][summand] = None
        for key in sorted(roots):
            for number in roots[key]:
                self._include(key, number)
        transfers = self._transfers(outputs)
        for output in outputs:
            for stage in range(self.assignment.stages):
                key = self._made_at(output, stage)
                if output.tensor.node in self.members.get(key, ()):
                    self.exported[key][output.tensor] = None
        segments = {key: self._segment(key) for key in sorted(self.members) if self.members[key]}
        return Split(self.graph, self.assignment, segments, transfers, outputs)

    def _made_at(self, output: StepOutputPlan, stage: int = 0) -> _Key:
        """Stage, sweep and part that make an output; `stage` is used where all make it."""
        if self.places[output.tensor.node].role is Role.HOME:
            return self._visit(output.tensor.node)
        if output.stage is not None:
            return (output.stage, 1, self._last_part(output.stage)) if output.is_gradient else (output.stage, 0, 0)
        return stage, self.replicated_sweep, 0

    def _plan_outputs(self) -> tuple[StepOutputPlan, ...]:
        planned = [self._plan_output(i, t) for i, t in enumerate(self.graph.outputs)]
        for parts in self.composites:
            # Indices of sparse slices may be free to make anywhere; they go where the values are.
            leader = next((planned[i] for i in parts if planned[i].stage is not None), planned[parts[0]])
            for i in parts:
                # A part that every stage makes (a shape) is never sent; it only stays at home where the values do.
                made_by_all = planned[i].stage is None and leader.delivery is not Delivery.LOCAL
                planned[i] = replace(
                    planned[i],
                    delivery=planned[i].delivery if made_by_all else leader.delivery,
                    stage=planned[i].stage if made_by_all or planned[i].stage is not None else leader.stage,
                    is_gradient=leader.is_gradient,
                    is_part=True,
                )
        return tuple(self._with_summands(output) for output in planned)

    def _with_summands(self, output: StepOutputPlan) -> StepOutputPlan:
        """Bring the gradient of a variable to the stage that owns it.

        A sum of contributions from several stages that the step only returns is taken apart: each stage sums its own
        over the microbatches, and the owner adds them up.
        """
        variable = self._variable_of_gradient(output)
        owner = None if variable is None else self.assignment.owners[variable]
        stage = output.stage if owner is None else owner
        of_script = variable is not None and owner is None and self.assignment.stages > 1
        if variable is not None and of_script and output.is_part:
            raise PlacementError(
                f"The step returns the sparse gradient {self.graph.nodes[output.tensor.node].name!r} of "
                f"{self.graph.variables[variable].name!r}, a variable of the script that every rank has. Return "
                f"tf.convert_to_tensor(gradient) from the step instead."
            )
        if output.is_part and output.is_gradient and stage != output.stage:
            raise PlacementError(
                f"The sparse gradient {self.graph.nodes[output.tensor.node].name!r} is made on stage {output.stage}, "
                f"but stage {stage} owns its variable. Return tf.convert_to_tensor(gradient) from the step instead."
            )
        if not output.is_summed:
            return output
        if of_script:
            output = replace(output, delivery=Delivery.SUM_TO_ALL, summands=(output.tensor,))
        node = self.graph.nodes[output.tensor.node]
        places = [self.places[t.node] for t in node.inputs]
        if (
            node.op == "AddN"
            and output.tensor not in self.graph.consumers
            and all(p.role is Role.HOME for p in places)
            and len({p.stage for p in places}) > 1
            and sum(t == output.tensor for t in self.graph.outputs) == 1
        ):
            return replace(output, summands=node.inputs, stage=stage)
        return output if stage == output.stage else replace(output, summands=(output.tensor,), stage=stage)

    def _variable_of_gradient(self, output: StepOutputPlan) -> int | None:
        """The variable of a returned gradient, also of one that was changed after it was taken.

        None where it cannot be told: the value was computed from no gradient of a variable, or from those of several.
        """
        found = self._variables_behind(output.tensor)
        if len(found) != 1 and self._is_changed_gradient(output.tensor):
            found = self._variables_behind(output.tensor, of_one_type=True)
        return min(found) if len(found) == 1 else None

    def _is_changed_gradient(self, tensor: Tensor) -> bool:
        """Whether a value is one variable's gradient times, or plus, numbers: as clipping by a norm gives it.

        Those numbers may come from gradients of other stages; the value is nevertheless of use to one stage only.
        """
        return bool(self.graph.type_of(tensor).shape) and len(self._variables_behind(tensor, of_one_type=True)) == 1

    def _variables_behind(self, tensor: Tensor, of_one_type: bool = False) -> set[int]:
        """Variables from whose gradients a value was computed.

        Args:
            tensor: the value.
            of_one_type: only through tensors of its own type and shape.
        """
        kind = self.graph.type_of(tensor)
        found: set[int] = set()
        seen: set[Tensor] = set()
        stack = [tensor]
        while stack:
            tensor = stack.pop()
            if tensor in seen or (of_one_type and self.graph.type_of(tensor) != kind):
                continue
            seen.add(tensor)
            if tensor in self.variable_of_gradient:
                found.add(self.variable_of_gradient[tensor])
            elif not self.graph.nodes[tensor.node].backward:
                stack.extend(t for t in self.graph.nodes[tensor.node].inputs if self.places[t.node].sweep > 0)
        return found

    def _plan_output(self, index: int, tensor: Tensor) -> StepOutputPlan:
        place = self.places[tensor.node]
        node = self.graph.nodes[tensor.node]
        if place.role in (Role.FREE, Role.REPLICATED):
            return StepOutputPlan(
                tensor, Delivery.MADE_BY_ALL, None, False, follows_state=place.role is Role.REPLICATED
            )
        behind = self._variables_behind(tensor)
        of_one_variable = self._is_changed_gradient(tensor)
        is_gradient = bool(behind) and (of_one_variable or not self._needs_model(tensor.node))
        of_one_stage = of_one_variable or len(behind) == 1 or len(self._gradient_stages(tensor.node)) == 1
        local = index in self.local_outputs or (is_gradient and of_one_stage)
        delivery = Delivery.LOCAL if local else Delivery.SENT_TO_ALL
        kind = self.graph.type_of(tensor)
        if delivery is Delivery.SENT_TO_ALL and self.assignment.stages > 1 and kind.dtype in UNSENDABLE_DTYPES:
            raise PlacementError(
                f"The step returns {node.name!r}, a tensor of type {kind.dtype}, which stage {place.stage} makes; such "
                f"a tensor cannot leave its process. Name it in local_outputs, or return the numbers it is made of."
            )
        return StepOutputPlan(tensor, delivery, place.stage, is_gradient)

    def _needs_model(self, number: int) -> bool:
        """Whether a value was computed from gradients and from what a model gives: a loss with a gradient penalty."""
        seen: set[int] = set()
        stack = [number]
        while stack:
            current = stack.pop()
            node, place = self.graph.nodes[current], self.places[current]
            if current in seen or node.backward or place.role is not Role.HOME:
                continue
            seen.add(current)
            if node.call or place.sweep == 0:
                return True
            stack.extend(t.node for t in node.inputs)
        return False

    def _gradient_stages(self, number: int) -> set[int]:
        """Stages whose backward ops a value was computed from, looking through the ops made after backward."""
        found: set[int] = set()
        seen: set[int] = set()
        stack = [number]
        while stack:
            current = stack.pop()
            if current in seen:
                continue
            seen.add(current)
            node, place = self.graph.nodes[current], self.places[current]
            if node.backward:
                if place.role in (Role.HOME, Role.WEIGHT) and place.stage is not None:
                    found.add(place.stage)
                continue
            if place.role is Role.HOME and place.sweep >= 1:
                stack.extend(t.node for t in node.inputs)
        return found

    def _include(self, key: _Key, root: int) -> None:
        """Put a node and the copies it needs into a segment; note what must come from elsewhere."""
        stack = [root]
        members = self.members[key]
        while stack:
            number = stack.pop()
            if number in members:
                continue
            members.add(number)
            node = self.graph.nodes[number]
            if node.op in SOURCES:
                continue
            self._check_handles(key, number)
            if node.op in _READERS and self._is_remote(key, node.reads):
                self.remote[key].update(node.reads)
            for tensor in node.inputs:
                if self._runs_here(key, tensor.node):
                    stack.append(tensor.node)
                else:
                    self._take(key, tensor)

    def _is_remote(self, key: _Key, variables: tuple[int, ...]) -> bool:
        owners = [self.assignment.owners[v] for v in variables]
        return any(owner is not None and owner != key[0] for owner in owners)

    def _check_handles(self, key: _Key, number: int) -> None:
        node = self.graph.nodes[number]
        touched = node.reads + node.writes
        if not self._is_remote(key, touched) or (node.op in _READERS and self._can_copy(touched)):
            return
        variable = next(v for v in touched if self.assignment.owners[v] not in (None, key[0]))
        raise PlacementError(
            f"Op {node.name!r} ({node.op}) on stage {key[0]} needs the handle of "
            f"{self.graph.variables[variable].name!r}, which stage {self.assignment.owners[variable]} owns. Only plain "
            f"reads of a weight that the step does not write may cross stages."
        )

    def _can_copy(self, variables: tuple[int, ...]) -> bool:
        return all(self.graph.variables[v].read_only for v in variables)

    def _runs_here(self, key: _Key, producer: int) -> bool:
        place = self.places[producer]
        if place.role in (Role.FREE, Role.WEIGHT):
            return True
        if place.role is Role.REPLICATED:
            return key[1] == self.replicated_sweep
        return self._visit(producer) == key

    def _take(self, key: _Key, tensor: Tensor) -> None:
        if tensor in self.taken[key]:
            return
        self.taken[key][tensor] = None
        place = self.places[tensor.node]
        kind = self.graph.type_of(tensor)
        assert place.stage is not None
        if place.stage != key[0] and kind.dtype in UNSENDABLE_DTYPES:
            raise PlacementError(
                f"Tensor {self.graph.nodes[tensor.node].name}:{tensor.index} ({kind.dtype}) is made on stage "
                f"{place.stage} and needed on stage {key[0]}; such a tensor cannot leave its process. Place the ops "
                f"around it together."
            )
        self.exported[self._visit(tensor.node)][tensor] = None

    def _transfers(self, outputs: tuple[StepOutputPlan, ...]) -> tuple[Transfer, ...]:
        first_need: dict[tuple[Tensor, int], int | None] = {}
        for key in sorted(self.taken, key=lambda key: (key[1], key[0], key[2])):
            stage, sweep, _ = key
            for tensor in self.taken[key]:
                if self.places[tensor.node].stage != stage:
                    first_need.setdefault((tensor, stage), sweep)
        for output in outputs:
            if output.delivery is Delivery.SENT_TO_ALL:
                for stage in range(self.assignment.stages):
                    if stage != output.stage:
                        first_need.setdefault((output.tensor, stage), None)
        found: list[Transfer] = []
        for (tensor, stage), first in sorted(first_need.items(), key=lambda item: (item[0][0], item[0][1])):
            sent = next((o for o in outputs if o.tensor == tensor and o.delivery is Delivery.SENT_TO_ALL), None)
            source, src_sweep, _ = self._visit(tensor.node) if sent is None else self._made_at(sent)
            found.append(Transfer(len(found), tensor, None, source, src_sweep, stage, first))
        # A gradient that the step returns twice is sent once.
        stages = range(self.assignment.stages)
        wanted = [(t, s) for o in outputs for t in o.summands for s in stages if o.gets_sum(s)]
        for summand, target in dict.fromkeys(wanted):
            source, sweep_made, _ = self._visit(summand.node)
            if source != target:
                found.append(Transfer(len(found), summand, None, source, sweep_made, target, None, is_sum=True))
        needed: dict[tuple[int, int], int] = {}
        for (stage, sweep, _), variables in sorted(self.remote.items(), key=lambda item: (item[0][1], item[0][0])):
            for variable in sorted(variables):
                needed.setdefault((variable, stage), sweep)
        for (variable, stage), sweep in sorted(needed.items()):
            owner = self.assignment.owners[variable]
            assert owner is not None
            found.append(Transfer(len(found), None, variable, owner, None, stage, sweep))
        return tuple(found)

    def _segment(self, key: _Key) -> Segment:
        members = sorted(self.members[key])
        nodes = tuple(n for n in members if self.graph.nodes[n].op not in SOURCES)
        sources = tuple(n for n in members if self.graph.nodes[n].op in SOURCES)
        remote = tuple(sorted(self.remote[key]))
        has_effect = any(self.graph.nodes[n].stateful for n in nodes)
        # A handle only the remote reads need is not needed: they read the value that is fed in.
        used = {t.node for n in nodes for t in self.graph.nodes[n].inputs if not self._reads_remote(key, n)}
        sources = tuple(n for n in sources if self.graph.nodes[n].op != VARIABLE or n in used)
        return Segment(
            stage=key[0],
            sweep=key[1],
            part=key[2],
            nodes=nodes,
            sources=sources,
            inputs=tuple(sorted(self.taken[key])),
            remote_values=remote,
            outputs=tuple(sorted(self.exported[key])),
            has_effect=has_effect,
        )

    def _reads_remote(self, key: _Key, number: int) -> bool:
        node = self.graph.nodes[number]
        return node.op in _READERS and self._is_remote(key, node.reads)
