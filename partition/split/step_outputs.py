"""Plans how the outputs of a step reach the caller: who makes each, who gets it, and where gradients are summed.

loss        made by the last stage, sent to all
gradient    stays with the stage that owns its variable; contributions of other stages are summed there first
shape       made by all: nothing of the model is needed for it
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from smp_tf.partition.errors import PlacementError
from smp_tf.partition.graph.op_graph import UNSENDABLE_DTYPES, Tensor
from smp_tf.partition.split.assign import Assignment, Role


class Delivery(enum.Enum):
    """Who gets an output of the step: every rank, sent or made there; its stage alone; or all ranks its sum."""

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
        chunk: the chunk that makes it; None where all stages do.
        is_gradient: whether it was computed from gradients.
        is_part: whether it is a part of a composite tensor (sparse slices). Such parts are kept for each microbatch.
        follows_state: whether it was computed from a variable that the step writes, such as the result of a metric.
            Then its value after the last microbatch is that of the whole batch.
        summands: the contributions to a gradient that are made on other chunks than its variable's owner, `chunk`. Each
            is summed over the microbatches where it is made, and sent to the owner's stage once per step. The output is
            the sum of all. Where `tensor` is not among them, it is never computed. With SUM_TO_ALL they go to every
            stage, and each adds them up. This is for the gradient of a variable of the script, which lives on every
            rank.
    """

    tensor: Tensor
    delivery: Delivery
    chunk: int | None
    is_gradient: bool
    is_part: bool = False
    summands: tuple[Tensor, ...] = ()
    follows_state: bool = False

    @property
    def is_summed(self) -> bool:
        """Returns whether the stage that makes it adds it up over the microbatches instead of keeping each."""
        return self.is_gradient and self.delivery in (Delivery.LOCAL, Delivery.SUM_TO_ALL) and not self.is_part

    def gets_sum(self, stage: int, placement: Sequence[int]) -> bool:
        """Returns whether a stage has the sum over the microbatches, by the stages of all chunks."""
        here = self.chunk is not None and placement[self.chunk] == stage
        return self.is_summed and (here or self.delivery is Delivery.SUM_TO_ALL)


def plan_outputs(
    assignment: Assignment, local_outputs: frozenset[int], composites: Sequence[tuple[int, ...]]
) -> tuple[StepOutputPlan, ...]:
    """Returns how each output of a placed graph reaches the caller.

    Args:
        assignment: the placement of every op.
        local_outputs: positions of outputs that stay with the stage that makes them.
        composites: positions of outputs that are parts of one composite tensor, and stay together.

    Raises:
        PlacementError: an output cannot leave its process, or a sparse gradient is not where it belongs.
    """
    return _Planner(assignment, local_outputs, composites).run()


class _Planner:
    def __init__(
        self, assignment: Assignment, local_outputs: frozenset[int], composites: Sequence[tuple[int, ...]]
    ) -> None:
        self.assignment = assignment
        self.graph = assignment.graph
        self.places = assignment.places
        self.placement = assignment.placement
        self.local_outputs = local_outputs
        self.composites = composites
        self.variable_of_gradient = {t: g.variable for g in self.graph.gradients for t in g.tensors}

    def run(self) -> tuple[StepOutputPlan, ...]:
        planned = [self._plan_output(i, t) for i, t in enumerate(self.graph.outputs)]
        for parts in self.composites:
            # Indices of sparse slices may be free to be made anywhere. They go where the values are.
            leader = next((planned[i] for i in parts if planned[i].chunk is not None), planned[parts[0]])
            for i in parts:
                # A part that every stage makes (a shape) is never sent. It only stays at home where the values do.
                made_by_all = planned[i].chunk is None and leader.delivery is not Delivery.LOCAL
                planned[i] = replace(
                    planned[i],
                    delivery=planned[i].delivery if made_by_all else leader.delivery,
                    chunk=planned[i].chunk if made_by_all or planned[i].chunk is not None else leader.chunk,
                    is_gradient=leader.is_gradient,
                    is_part=True,
                )
        return tuple(self._with_summands(output) for output in planned)

    def _with_summands(self, output: StepOutputPlan) -> StepOutputPlan:
        """Brings the gradient of a variable to the chunk that owns it.

        A sum of contributions from several chunks that the step only returns is taken apart. Each chunk sums its own
        contribution over the microbatches, and the owner adds them up.
        """
        variable = self._variable_of_gradient(output)
        owner = None if variable is None else self.assignment.owners[variable]
        chunk = output.chunk if owner is None else owner
        of_script = variable is not None and owner is None and self.assignment.stages > 1
        if variable is not None and of_script and output.is_part:
            raise PlacementError(
                f"The step returns the sparse gradient {self.graph.nodes[output.tensor.node].name!r} of "
                f"{self.graph.variables[variable].name!r}, a variable of the script that every rank has. Return "
                f"tf.convert_to_tensor(gradient) from the step instead."
            )
        made, owned = self.assignment.stage_of(output.chunk), self.assignment.stage_of(chunk)
        if output.is_part and output.is_gradient and owned != made:
            raise PlacementError(
                f"The sparse gradient {self.graph.nodes[output.tensor.node].name!r} is made on stage {made}, "
                f"but stage {owned} owns its variable. Return tf.convert_to_tensor(gradient) from the step instead."
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
            and len({p.chunk for p in places}) > 1
            and sum(t == output.tensor for t in self.graph.outputs) == 1
        ):
            return replace(output, summands=node.inputs, chunk=chunk)
        return output if owned == made else replace(output, summands=(output.tensor,), chunk=chunk)

    def _variable_of_gradient(self, output: StepOutputPlan) -> int | None:
        """Returns the variable of a returned gradient, also where the gradient was changed after it was taken.

        It is None where the value was computed from no gradient of a variable, or from those of several.
        """
        found = self._variables_behind(output.tensor)
        if len(found) != 1 and self._is_changed_gradient(output.tensor):
            found = self._variables_behind(output.tensor, of_one_type=True)
        return min(found) if len(found) == 1 else None

    def _is_changed_gradient(self, tensor: Tensor) -> bool:
        """Returns whether a value is one variable's gradient times, or plus, numbers, such as after clipping by a norm.

        The numbers may come from gradients of other stages. Even so, only one stage needs the value.
        """
        return bool(self.graph.type_of(tensor).shape) and len(self._variables_behind(tensor, of_one_type=True)) == 1

    def _variables_behind(self, tensor: Tensor, of_one_type: bool = False) -> set[int]:
        """Returns the variables from whose gradients a value was computed.

        Args:
            tensor: the value.
            of_one_type: whether to go only through tensors of its own type and shape.
        """
        kind = self.graph.type_of(tensor)

        def before(current: Tensor) -> Iterable[Tensor]:
            node = self.graph.nodes[current.node]
            made = () if node.backward else (t for t in node.inputs if self.places[t.node].sweep > 0)
            return (t for t in made if not of_one_type or self.graph.type_of(t) == kind)

        return self._variables_of(tensor, before)

    def _variables_of(self, tensor: Tensor, before: Callable[[Tensor], Iterable[Tensor]]) -> set[int]:
        """Returns the variables whose gradients are the first that are met on all ways back from a value."""
        variables = self.variable_of_gradient
        met = _reached(tensor, lambda current: () if current in variables else before(current))
        return {variables[current] for current in met if current in variables}

    def _plan_output(self, index: int, tensor: Tensor) -> StepOutputPlan:
        place = self.places[tensor.node]
        node = self.graph.nodes[tensor.node]
        if place.role in (Role.FREE, Role.REPLICATED):
            owner = self._owner_of_free_gradient(tensor)
            if owner is not None:
                return StepOutputPlan(tensor, Delivery.LOCAL, owner, True)
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
                f"The step returns {node.name!r}, a tensor of type {kind.dtype}, which stage "
                f"{self.assignment.stage_of(place.chunk)} makes; such a tensor cannot leave its process. "
                f"Name it in local_outputs, or return the numbers it is made of."
            )
        return StepOutputPlan(tensor, delivery, place.chunk, is_gradient)

    def _owner_of_free_gradient(self, tensor: Tensor) -> int | None:
        """Returns the chunk of a gradient's variable, for a value made from the gradient without the model.

        There is such a value where the loss is linear. Every stage could make it, and each replica has its own, of its
        batch.
        """
        found = self._variables_of(tensor, lambda current: self.graph.nodes[current.node].inputs)
        return self.assignment.owners[found.pop()] if len(found) == 1 else None

    def _needs_model(self, number: int) -> bool:
        """Returns whether a value needs gradients and outputs of a model, as a loss with a gradient penalty does."""

        def is_after(current: int) -> bool:
            return not self.graph.nodes[current].backward and self.places[current].role is Role.HOME

        met = filter(is_after, _reached(number, lambda current: self._inputs_of(current) if is_after(current) else ()))
        return any(self.graph.nodes[current].call or self.places[current].sweep == 0 for current in met)

    def _gradient_stages(self, number: int) -> set[int]:
        """Returns the stages whose backward ops a value was computed from, also through ops made after backward."""

        def before(current: int) -> Iterable[int]:
            node, place = self.graph.nodes[current], self.places[current]
            looks_on = not node.backward and place.role is Role.HOME and place.sweep >= 1
            return self._inputs_of(current) if looks_on else ()

        made = [self.places[current] for current in _reached(number, before) if self.graph.nodes[current].backward]
        return {
            self.placement[place.chunk]
            for place in made
            if place.role in (Role.HOME, Role.WEIGHT) and place.chunk is not None
        }

    def _inputs_of(self, number: int) -> list[int]:
        return [tensor.node for tensor in self.graph.nodes[number].inputs]


_T = TypeVar("_T", Tensor, int)


def _reached(start: _T, before: Callable[[_T], Iterable[_T]]) -> Iterator[_T]:
    """Yields all that is reached from a start by going to what comes before each, the start first, and each once."""
    seen, stack = {start}, [start]
    while stack:
        current = stack.pop()
        yield current
        for each in before(current):
            if each not in seen:
                seen.add(each)
                stack.append(each)
