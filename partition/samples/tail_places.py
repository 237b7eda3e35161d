"""Decides which stage computes what of a tail, where gradients and weights are spread over the stages.

Every stage has what was made of samples, and computes it too. A node that needs gradients, or weights, of one stage
runs there. A node that needs those of several runs on all stages, and what it needs is told to all of them before:

    stage 0    gradients ─▶ squares ─▶ sums ─┐              ┌─▶ norm ─▶ its gradients × limit / norm
                                             ├─ told to all ┤
    stage 1    gradients ─▶ squares ─▶ sums ─┘              └─▶ norm ─▶ its gradients × limit / norm
                           round 0                                round 1
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from smp_tf.partition.graph.op_graph import OpGraph, Tensor
from smp_tf.partition.samples.batch_tail import Tail

#: Types whose values a float64 holds exactly, as far as they are used.
TOLD_DTYPES = frozenset(
    {"float64", "float32", "float16", "bfloat16", "bool", "int8", "int16", "int32", "int64", "uint8", "uint16"}
)


@dataclass(frozen=True, slots=True)
class TailPlace:
    """Where, and when, something is there.

    Args:
        stage: the only stage that has it; None where all have.
        round: after how many rounds of telling.
    """

    stage: int | None
    round: int


@dataclass(frozen=True)
class TailPlaces:
    """Where the nodes of a tail run.

    Args:
        nodes: by number of a node, where it runs.
        told: by round, the tensors that are told to all stages at its end, each by the stage that has it.
    """

    nodes: Mapping[int, TailPlace]
    told: tuple[tuple[Tensor, ...], ...]


class UntoldError(Exception):
    """A tensor cannot be told to other stages: its shape is open, or its type is none of numbers."""


def place_tail(
    graph: OpGraph,
    tail: Tail,
    stage_of: Mapping[Tensor, int | None],
    wanted: Mapping[Tensor, int | None],
) -> TailPlaces:
    """Decides which stage computes what of a tail.

    Args:
        graph: the whole batch's graph.
        tail: the tail.
        stage_of: for what only one stage has (gradients, and handles of weights), which; None where all have it.
        wanted: for each result, the stage that needs it; None where all do.

    Returns:
        The places. Whether all that is told can be told is another question: `require_told` answers it.
    """
    places: dict[Tensor, TailPlace] = {tensor: TailPlace(stage, 0) for tensor, stage in stage_of.items()}
    for cut in tail.cuts:
        places[cut.whole] = TailPlace(None, 0)
    nodes: dict[int, TailPlace] = {}
    told: dict[Tensor, int] = {}

    def tell(tensor: Tensor) -> int:
        told[tensor] = places[tensor].round
        return places[tensor].round + 1

    for number in tail.nodes:
        node = graph.nodes[number]
        here = {tensor: places.get(tensor, TailPlace(None, 0)) for tensor in node.inputs}
        stages = {place.stage for place in here.values()} - {None}
        is_everywhere = len(stages) > 1 or any(not graph.variables[index].in_model for index in node.writes)
        rounds = [
            tell(tensor) if is_everywhere and place.stage is not None else place.round for tensor, place in here.items()
        ]
        # What is read of a state after it was written is read in no earlier round.
        rounds += [nodes[before].round for before in node.control if before in nodes]
        place = TailPlace(None if is_everywhere or not stages else stages.pop(), max(rounds, default=0))
        nodes[number] = place
        for index in range(len(node.outputs)):
            places.setdefault(Tensor(number, index), place)
    for tensor, stage in wanted.items():
        place = places.get(tensor, TailPlace(None, 0))
        if place.stage is not None and place.stage != stage:
            tell(tensor)
    last = max(told.values(), default=-1)
    return TailPlaces(nodes, tuple(tuple(sorted(t for t, when in told.items() if when == r)) for r in range(last + 1)))


def require_told(graph: OpGraph, places: TailPlaces) -> None:
    """Raises an error unless all that one stage tells to others can be told.

    Args:
        graph: the whole batch's graph.
        places: where the nodes of its tail run.

    Raises:
        UntoldError: the type of a tensor is none of numbers, or its shape is open.
    """
    for tensor in (tensor for told in places.told for tensor in told):
        kind = graph.type_of(tensor)
        if kind.dtype not in TOLD_DTYPES or not kind.is_static:
            raise UntoldError(
                f"{graph.nodes[tensor.node].name!r} is needed on several stages, and has another type than numbers, or "
                f"a shape that is open"
            )
