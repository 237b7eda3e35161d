"""The checks of losses that wait for the first run of their programs (`loss_check/check.py`)."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from smp_tf.loss_check.check import LossCheck, tell_unchecked
from smp_tf.steps.trace import StepTrace
from smp_tf.training.replica_union import ReplicaUnion
from smp_tf.whole_batch.noted_trace import BatchTraces, NotedTrace

#: The largest batch in bytes whose losses are compared with those of its microbatches.
_MOST_KEPT = 1 << 30
#: The name under which a step returns the tensors that the check of its losses keeps.
KEPT = "kept"


class LossChecks:
    """The checks of a step's programs that have not run yet, by number of their traces.

    Args:
        step: words for the step.
        model: the model.
        union: the batch of all replicas.
    """

    def __init__(self, step: str, model: Any, union: ReplicaUnion) -> None:
        self._step = step
        self._model = model
        self._union = union
        self._waiting: dict[int, LossCheck] = {}

    def add(self, traced: StepTrace, traces: BatchTraces, sizes: Sequence[int], *, is_first: bool) -> LossCheck | None:
        """Returns the check of a new program's losses; None where nothing can be checked, which is said.

        Args:
            traced: the step as it is traced for a microbatch, without what is computed once per batch.
            traces: the traces of the step.
            sizes: samples of the batches that are held against each other, replica by replica.
            is_first: whether it is the first program of the step.
        """
        number, union = traced.lowered.results["traced"], self._union
        check = LossCheck(
            dataclasses.replace(traces, part=NotedTrace(traced, traces.part.calls)),
            sizes,
            joins_replicas=union.has_several and is_first,
            with_states=is_first or not union.has_several,
            key=f"{id(self)}/{number}",
            metric_of={id(v): metric.name for metric in self._model.metrics for v in metric.variables},
        )
        if union.has_several and is_first and not check.can_be_joined(bool(union.composites)):
            why = "ragged, sparse or text arguments of several replicas, which go into losses, cannot be joined"
            tell_unchecked(self._step, why)
            return None
        for name, why in check.left_out.items():
            tell_unchecked(self._step, f"{name}: {why}")
        if check.nbytes > _MOST_KEPT:
            why = f"{check.nbytes / 2**30:.1f} GiB of a batch would have to be brought to one rank"
            tell_unchecked(self._step, why)
            return None
        if not check.kept:
            return None
        self._waiting[number] = check
        return check

    def watching(self, program: Any, tensors: Sequence[Any]) -> contextlib.AbstractContextManager[None]:
        """Returns the context for a run of a program. In the first one, its losses are checked if they are to be.

        Args:
            program: the program.
            tensors: the step's tensor arguments.
        """
        results = program.structure
        check = self._waiting.get(results["traced"])
        return contextlib.nullcontext() if check is None else check.watching(program, tensors, results[KEPT])

    def hand_out(self, found: Mapping[str, Any]) -> None:
        """Lets the check of a program, where it has one, hand out what it keeps.

        Args:
            found: what the step returns, with `StepOutput`s in place of tensors.
        """
        if found["traced"] in self._waiting:
            self._waiting[found["traced"]].hand_out(found[KEPT])

    def end(self, program: Any) -> None:
        """Notes that a program has run.

        Args:
            program: the program.
        """
        self._waiting.pop(program.structure["traced"], None)
