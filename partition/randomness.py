"""Make random ops functions of a counter instead of hidden state.

A stateful random op draws from a kernel's own state, which can neither be saved nor replayed and differs from trace to
trace. Each becomes its stateless counterpart, keyed by the microbatch's seed and the op's running number:

    RandomUniform(shape)   ->   StatelessRandomUniform(shape, seed + [number, 0])

The microbatch's seed comes in from outside (`SEED`, int64[2]) and depends on base seed, step, microbatch and replica,
never on rank or stage: masks are the same for any number of partitions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
from tensorflow.core.framework import node_def_pb2, types_pb2
from tensorflow.python.framework import tensor_util

from smp_tf.partition.op_graph import SEED, Gradient, Node, OpGraph, Tensor, TensorType

_SEED_TYPE = TensorType("int64", (2,))

#: Multiplier that spreads running numbers over 63 bits (the golden ratio, odd, as in SplitMix64).
_SPREAD = 0x1E3779B97F4A7C15


def _attrs(node: node_def_pb2.NodeDef, names: dict[str, str]) -> node_def_pb2.NodeDef:
    """A NodeDef with only the listed attributes, under their new names, and the type of the seed."""
    made = node_def_pb2.NodeDef(name=node.name, device=node.device)
    for old, new in names.items():
        made.attr[new].CopyFrom(node.attr[old])
    made.attr["Tseed"].type = types_pb2.DT_INT64
    return made


@dataclasses.dataclass(frozen=True, slots=True)
class _Counterpart:
    """The stateless form of a random op: its type, its attributes by old name, and where the seed goes among inputs."""

    op: str
    attributes: dict[str, str]
    seed_position: int


_COUNTERPARTS = {
    "RandomUniform": _Counterpart("StatelessRandomUniform", {"dtype": "dtype", "T": "T"}, 1),
    "RandomStandardNormal": _Counterpart("StatelessRandomNormal", {"dtype": "dtype", "T": "T"}, 1),
    "TruncatedNormal": _Counterpart("StatelessTruncatedNormal", {"dtype": "dtype", "T": "T"}, 1),
    "RandomUniformInt": _Counterpart("StatelessRandomUniformInt", {"Tout": "dtype", "T": "T"}, 1),
    "Multinomial": _Counterpart("StatelessMultinomial", {"T": "T", "output_dtype": "output_dtype"}, 2),
}

#: Random ops that TensorFlow has no drop-in stateless counterpart for; they keep their state.
WITHOUT_COUNTERPART = frozenset(
    {"RandomShuffle", "RandomGamma", "RandomPoisson", "RandomPoissonV2", "ParameterizedTruncatedNormal"}
)


def make_stateless(graph: OpGraph, say: Callable[[str], None]) -> OpGraph:
    """Replace stateful random ops by counter-based ones.

    Args:
        graph: an op graph.
        say: called with a sentence for every kind of random op that keeps its state.

    Returns:
        The graph, with one SEED node where a random op was replaced.
    """
    kept = sorted({node.op for node in graph.nodes if node.op in WITHOUT_COUNTERPART})
    for op in kept:
        say(
            f"Random op {op} has no counter-based counterpart in TensorFlow and keeps its own state: its numbers are "
            f"not the same from run to run and for other numbers of partitions."
        )
    if not any(node.op in _COUNTERPARTS for node in graph.nodes):
        return graph
    nodes: list[Node] = [Node("smp_seed", SEED, (), (), (_SEED_TYPE,))]
    new_number: list[int] = []

    def moved(tensor: Tensor) -> Tensor:
        return Tensor(new_number[tensor.node], tensor.index)

    drawn = 0
    for node in graph.nodes:
        inputs = tuple(moved(t) for t in node.inputs)
        control = tuple(new_number[c] for c in node.control)
        forward_of = None if node.forward_of is None else new_number[node.forward_of]
        counterpart = _COUNTERPARTS.get(node.op)
        if counterpart is not None:
            drawn += 1
            seed = _own_seed(nodes, node, drawn)
            at = counterpart.seed_position
            inputs = (*inputs[:at], seed, *inputs[at:])
            old = node_def_pb2.NodeDef.FromString(node.definition)
            definition = _attrs(old, counterpart.attributes)
            definition.op = counterpart.op
            node = dataclasses.replace(
                node,
                op=counterpart.op,
                definition=definition.SerializeToString(deterministic=True),
                stateful=False,
            )
        new_number.append(len(nodes))
        nodes.append(dataclasses.replace(node, inputs=inputs, control=control, forward_of=forward_of))
    result = dataclasses.replace(
        graph,
        nodes=tuple(nodes),
        outputs=tuple(moved(t) for t in graph.outputs),
        gradients=tuple(Gradient(g.variable, tuple(moved(t) for t in g.tensors)) for g in graph.gradients),
    )
    result.validate()
    return result


def _own_seed(nodes: list[Node], node: Node, number: int) -> Tensor:
    """Append `seed + [number, 0]` for one random op and give its tensor."""
    offset = np.array([(number * _SPREAD) % (1 << 62), 0], np.int64)
    constant = node_def_pb2.NodeDef(name=f"{node.name}/seed_offset", op="Const")
    constant.attr["dtype"].type = types_pb2.DT_INT64
    constant.attr["value"].tensor.CopyFrom(tensor_util.make_tensor_proto(offset))
    add = node_def_pb2.NodeDef(name=f"{node.name}/seed", op="AddV2")
    add.attr["T"].type = types_pb2.DT_INT64
    common = {"control": (), "outputs": (_SEED_TYPE,), "call": node.call, "backward": node.backward}
    nodes.append(
        Node(constant.name, "Const", (), definition=constant.SerializeToString(deterministic=True), **common)
    )
    nodes.append(
        Node(
            add.name,
            "AddV2",
            (Tensor(0, 0), Tensor(len(nodes) - 1, 0)),
            definition=add.SerializeToString(deterministic=True),
            **common,
        )
    )
    return Tensor(len(nodes) - 1, 0)


