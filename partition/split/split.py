"""What a cut step is: what each chunk runs in each sweep, what flows in, what flows out.

                 sweep 0 on chunk 1                      sweep 1 on chunk 1
    received ─▶ ┌───────────────────┐ ──── stash ────▶ ┌───────────────────┐ ◀─ received
    arguments ─▶│ nodes, with copies│                  │ nodes, with copies│
                │ of what is free   │ ─▶ sent to 2     │ of what is free   │ ─▶ gradients, sent to 0
                └───────────────────┘                  └───────────────────┘

Backward may be cut once more, for schedules that delay what only weights need (zero bubble):

    part 0, I: what other chunks wait for in this sweep    gradient ─▶ ReluGrad ─┬─▶ MatMul(·, kernelᵀ) ─▶ sent to 0
    part 1, W: all else                                                         └─▶ MatMul(xᵀ, ·) ─▶ kernel's gradient

Backward may make again what forward made, within groups of layers (see `recompute`). Then it has copies of their nodes,
too. Each group's copies wait for the gradient of the group, so that only one group's tensors are there at once.

A weight whose value no rank has whole is a value, too: it is brought together for each use, and fed in (see `uses`).

A stage is what one rank runs: a chunk, or several, between which nothing is sent. Every rank cuts all stages, from the
same graph and plan. So both ends of a transfer agree without a message.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from smp_tf.partition.graph.op_graph import OpGraph, Tensor
from smp_tf.partition.split.assign import Assignment
from smp_tf.partition.split.step_outputs import StepOutputPlan


class Visit(NamedTuple):
    """When a microbatch is in a chunk.

    Attributes:
        chunk, sweep: the chunk and the sweep.
        part: 1 for what only weights need of a backward that is cut in two; else 0.
    """

    chunk: int
    sweep: int
    part: int = 0


@dataclass(frozen=True, slots=True)
class Segment:
    """What one chunk runs for one microbatch in one sweep.

    Args:
        visit: where and when.
        nodes: numbers of the nodes to run, in order, with copies of free ones and of those made again.
        sources: the ARGUMENT, CAPTURE, SEED and VARIABLE nodes that it takes from its surroundings.
        inputs: tensors made elsewhere, by an earlier segment of the stage or on another stage.
        remote_values: variables of other stages whose value it reads. The value is fed in once per step.
        uses: nodes that read a variable whose parts are on several ranks. Each node is fed the whole value.
        outputs: tensors that later segments, other stages or the caller need.
        after: nodes that wait for others besides their inputs, each with these others.
    """

    visit: Visit
    nodes: tuple[int, ...]
    sources: tuple[int, ...]
    inputs: tuple[Tensor, ...]
    remote_values: tuple[int, ...]
    outputs: tuple[Tensor, ...]
    after: tuple[tuple[int, tuple[int, ...]], ...] = ()
    uses: tuple[int, ...] = ()

    @property
    def chunk(self) -> int:
        """The chunk that runs it."""
        return self.visit.chunk

    @property
    def sweep(self) -> int:
        """The sweep in which it is run."""
        return self.visit.sweep


@dataclass(frozen=True, slots=True)
class Transfer:
    """A tensor that one stage makes and another needs.

    Args:
        index: running number, the same on every rank.
        tensor: the tensor that is sent; None for the value of a variable.
        variable: the variable whose value is sent once per step; None for a tensor.
        src_chunk, src_sweep: where it is made. The sweep is None for what exists when the step starts.
        dst_chunk, dst_sweep: where the other stage first needs it. The sweep is None for a result of the step.
        is_sum: whether the tensor's sum over the microbatches is sent, once per step.
    """

    index: int
    tensor: Tensor | None
    variable: int | None
    src_chunk: int
    src_sweep: int | None
    dst_chunk: int
    dst_sweep: int | None
    is_sum: bool = False

    @property
    def once_per_step(self) -> bool:
        """Returns whether it is sent once per step and not for every microbatch."""
        return self.is_sum or self.variable is not None


@dataclass(frozen=True)
class Split:
    """A step that is cut: the segments of all stages, the transfers between them, and the way of each output.

    Args:
        graph: the op graph that all numbers refer to.
        assignment: the placement that was cut.
        segments: by visit; where a chunk has nothing to do there is none.
        transfers: transfers in the order of their index.
        handed_on: what one chunk makes and another one of its stage needs, numbered after the transfers. It is never
            sent.
        outputs: one for each of `graph.outputs`.
        gathered: variables whose parts are on several ranks. Their value is fed in for each use.
    """

    graph: OpGraph
    assignment: Assignment
    segments: dict[Visit, Segment]
    transfers: tuple[Transfer, ...]
    handed_on: tuple[Transfer, ...]
    outputs: tuple[StepOutputPlan, ...]
    gathered: frozenset[int] = frozenset()

    @property
    def stages(self) -> int:
        """Returns the number of stages."""
        return self.assignment.stages

    @property
    def placement(self) -> tuple[int, ...]:
        """Returns the stage of every chunk."""
        return self.assignment.placement

    def segments_of(self, stage: int) -> dict[Visit, Segment]:
        """Returns the segments of a stage, in order of chunk, sweep and part."""
        return {key: one for key, one in sorted(self.segments.items()) if self.placement[key.chunk] == stage}

    def stage_of_variable(self, index: int) -> int | None:
        """Returns the stage that owns a variable; None for one of the script's own."""
        return self.assignment.stage_of(self.assignment.owners[index])

    def stage_of(self, output: StepOutputPlan) -> int | None:
        """Returns the stage that makes an output; None where all make it."""
        return self.assignment.stage_of(output.chunk)

    @cached_property
    def sweeps(self) -> int:
        """Returns the number of sweeps, with the last one for replicated ops."""
        return 1 + max((sweep for _, sweep, _ in self.segments), default=0)

    def stash(self, stage: int) -> tuple[Tensor, ...]:
        """Returns the tensors that the stage keeps between forward and backward, and between the parts of backward.

        They are those of one microbatch. What backward leaves for a later sweep is not among them.
        """
        kept: dict[Tensor, None] = {}
        own = self.segments_of(stage)
        forward = {t for (_, sweep, _), segment in own.items() if not sweep for t in segment.outputs + segment.inputs}
        for (chunk, sweep, part), segment in own.items():
            first = own.get(Visit(chunk, 1)) if part else None
            before = forward.union(first.outputs, first.inputs) if first else forward
            kept.update((tensor, None) for tensor in segment.inputs if sweep and tensor in before)
        return tuple(kept)
