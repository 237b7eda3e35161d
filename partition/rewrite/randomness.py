"""Makes random ops functions of a counter instead of hidden state.

A stateful random op draws from a kernel's own state. This state can neither be saved nor replayed, and differs from
trace to trace. Each such op becomes its stateless counterpart, with a key made of the microbatch's seed and the op's
running number:

    RandomUniform(shape)   ->   StatelessRandomUniform(shape, seed + [position, 0])

The microbatch's seed comes in from outside (`SEED`, int64[2]). It depends on base seed, step, microbatch and replica,
never on rank or stage. So masks are the same for any number of partitions. A function that draws (a loop body, a
branch, a traced layer) gets the seed of its call as one more argument. A loop's body hands on a new seed to the next
turn. Positions add up along nested calls and turns.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import numpy as np
from tensorflow.core.framework import function_pb2, node_def_pb2, op_def_pb2, types_pb2
from tensorflow.python.framework import tensor_util

from smp_tf.partition.graph.graph_editor import GraphEditor
from smp_tf.partition.graph.op_graph import SEED, Node, OpGraph, Tensor, TensorType
from smp_tf.partition.graph.op_kinds import FUNCTION_OPS, LOOP_OPS

_SEED_TYPE = TensorType("int64", (2,))


@dataclasses.dataclass(frozen=True, slots=True)
class _Counterpart:
    """The stateless form of a random op: its type, its attributes by old name, and the seed's place among inputs."""

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

#: Random ops without a drop-in stateless counterpart in TensorFlow. They keep their state.
WITHOUT_COUNTERPART = frozenset(
    {"RandomShuffle", "RandomGamma", "RandomPoisson", "RandomPoissonV2", "ParameterizedTruncatedNormal"}
)


def ops_with_state(graph: OpGraph) -> frozenset[int]:
    """Returns the numbers of the random ops that keep their own state, and of the calls of functions with such ops.

    Args:
        graph: an op graph.
    """
    functions = _Functions(graph.library)
    return frozenset(
        number
        for number, node in enumerate(graph.nodes)
        if node.op in WITHOUT_COUNTERPART or functions.called_keeps_state(node)
    )


def make_stateless(graph: OpGraph, say: Callable[[str], None]) -> OpGraph:
    """Replaces stateful random ops by counter-based ones, in the graph and in the functions it calls.

    Args:
        graph: an op graph.
        say: called with a sentence for every kind of random op that keeps its state.

    Returns:
        The graph with one SEED node, where a random op was replaced; else the same graph.
    """
    functions = _Functions(graph.library)
    kept = {node.op for node in graph.nodes if node.op in WITHOUT_COUNTERPART} | functions.without_counterpart()
    for op in sorted(kept):
        say(
            f"Random op {op} has no counter-based counterpart in TensorFlow and keeps its own state: its numbers are "
            f"not the same from run to run and for other numbers of partitions."
        )
    draws = {
        number
        for number, node in enumerate(graph.nodes)
        if node.op in _COUNTERPARTS or (node.op in FUNCTION_OPS and functions.called_draws(node))
    }
    if not draws:
        return graph
    editor = GraphEditor(graph)
    seed = editor.add(Node("smp_seed", SEED, (), (), (_SEED_TYPE,)))
    drawn = 0
    for number in range(len(graph.nodes)):
        node = editor.moved_node(number)
        if number in draws:
            drawn += 1
            own = _add_own_seed(editor, node, seed, drawn)
            node = _counter_based(node, own) if node.op in _COUNTERPARTS else functions.seeded_call(node, own)
        editor.keep(number, node)
    return editor.finish(functions.serialized())


def _counter_based(node: Node, seed: Tensor) -> Node:
    counterpart = _COUNTERPARTS[node.op]
    at = counterpart.seed_position
    definition = _stateless_definition(node_def_pb2.NodeDef.FromString(node.definition))
    return dataclasses.replace(
        node,
        op=counterpart.op,
        inputs=(*node.inputs[:at], seed, *node.inputs[at:]),
        definition=definition.SerializeToString(deterministic=True),
        stateful=False,
    )


def _stateless_definition(old: node_def_pb2.NodeDef) -> node_def_pb2.NodeDef:
    """Returns a NodeDef of the stateless counterpart, without inputs."""
    counterpart = _COUNTERPARTS[old.op]
    made = node_def_pb2.NodeDef(name=old.name, op=counterpart.op, device=old.device)
    for name, new_name in counterpart.attributes.items():
        made.attr[new_name].CopyFrom(old.attr[name])
    made.attr["Tseed"].type = types_pb2.DT_INT64
    return made


def _position(function: int, number: int) -> int:
    """Returns the position for a running number within a function: the number, scattered over 62 bits by SplitMix64.

    Positions add up along nested calls. If they were the numbers themselves, or multiples of them, the first op of the
    second call would draw what the second op of the first call draws.
    """
    mixed = (((function << 32) + number) * 0x9E3779B97F4A7C15) % (1 << 64)
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) % (1 << 64)
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) % (1 << 64)
    return (mixed ^ (mixed >> 31)) >> 2


def _offset_and_sum(name: str, function: int, number: int) -> tuple[node_def_pb2.NodeDef, node_def_pb2.NodeDef]:
    """Returns the constant `[position, 0]` and the addition of a seed to it. The caller fills in the inputs."""
    offset = np.array([_position(function, number), 0], np.int64)
    constant = node_def_pb2.NodeDef(name=f"{name}/seed_offset", op="Const")
    constant.attr["dtype"].type = types_pb2.DT_INT64
    constant.attr["value"].tensor.CopyFrom(tensor_util.make_tensor_proto(offset))
    add = node_def_pb2.NodeDef(name=f"{name}/seed", op="AddV2")
    add.attr["T"].type = types_pb2.DT_INT64
    return constant, add


def _add_own_seed(editor: GraphEditor, node: Node, seed: Tensor, number: int) -> Tensor:
    """Adds `seed + [position, 0]` for one op that draws, and returns its tensor."""
    constant, add = _offset_and_sum(node.name, 0, number)

    def made(definition: node_def_pb2.NodeDef, inputs: tuple[Tensor, ...]) -> Node:
        return Node(
            definition.name,
            definition.op,
            inputs,
            (),
            (_SEED_TYPE,),
            definition=definition.SerializeToString(deterministic=True),
            call=node.call,
            backward=node.backward,
        )

    offset = editor.add(made(constant, ()))
    return editor.add(made(add, (seed, offset)))


class _Functions:
    """The functions of a graph and, for those that draw, versions that take a seed as their last argument."""

    def __init__(self, library: bytes) -> None:
        self._library = function_pb2.FunctionDefLibrary.FromString(library)
        self._by_name = {f.signature.name: f for f in self._library.function}
        self._draws: dict[str, bool] = {}
        self._seeded: dict[tuple[str, bool], str] = {}

    def serialized(self) -> bytes:
        """Returns the library with the added versions."""
        return bytes(self._library.SerializeToString(deterministic=True))

    def without_counterpart(self) -> set[str]:
        """Returns the kinds of random op in function bodies that keep their state."""
        return {n.op for f in self._by_name.values() for n in f.node_def if n.op in WITHOUT_COUNTERPART}

    def called_draws(self, node: Node) -> bool:
        """Returns whether a node among `FUNCTION_OPS` calls a function that draws."""
        return self._any_draws(node_def_pb2.NodeDef.FromString(node.definition))

    def called_keeps_state(self, node: Node) -> bool:
        """Returns whether a node calls a function with a random op that keeps its own state."""
        if node.op not in FUNCTION_OPS:
            return False
        seen: set[str] = set()
        stack = list(_callees(node_def_pb2.NodeDef.FromString(node.definition)))
        while stack:
            name = stack.pop()
            if name in seen or name not in self._by_name:
                continue
            seen.add(name)
            for inner in self._by_name[name].node_def:
                if inner.op in WITHOUT_COUNTERPART:
                    return True
                stack.extend(_callees(inner))
        return False

    def _any_draws(self, definition: node_def_pb2.NodeDef) -> bool:
        return definition.op in FUNCTION_OPS and any(map(self.draws, _callees(definition)))

    def draws(self, name: str) -> bool:
        """Returns whether a function holds a random op, itself or in what it calls."""
        if name not in self._draws:
            self._draws[name] = False  # a function that calls itself draws only if something else in it does
            function = self._by_name.get(name)
            self._draws[name] = function is not None and any(
                n.op in _COUNTERPARTS or self._any_draws(n) for n in function.node_def
            )
        return self._draws[name]

    def seeded_call(self, node: Node, seed: Tensor) -> Node:
        """Returns the call, of the versions that take a seed, with the seed as one more input."""
        definition = node_def_pb2.NodeDef.FromString(node.definition)
        self._redirect(definition)
        outputs = (*node.outputs, _SEED_TYPE) if node.op in LOOP_OPS else node.outputs
        return dataclasses.replace(
            node,
            inputs=(*node.inputs, seed),
            outputs=outputs,
            definition=definition.SerializeToString(deterministic=True),
        )

    def _redirect(self, definition: node_def_pb2.NodeDef) -> None:
        """Makes a call node call the versions that take a seed. The caller fills in the seed's input."""
        is_loop = definition.op in LOOP_OPS
        definition.attr["T" if is_loop else "Tin"].list.type.append(types_pb2.DT_INT64)
        if is_loop and definition.attr["output_shapes"].list.shape:
            definition.attr["output_shapes"].list.shape.add().dim.add().size = 2
        for key in sorted(definition.attr):
            attribute = definition.attr[key]
            names = [attribute.func] if attribute.HasField("func") else list(attribute.list.func)
            for function in names:
                if function.name in self._by_name:
                    function.name = self._with_seed(function.name, hands_on=is_loop and key == "body")

    def _with_seed(self, name: str, hands_on: bool) -> str:
        """Returns the version of a function that takes a seed last. A loop's body also returns the next turn's seed."""
        if (name, hands_on) in self._seeded:
            return self._seeded[name, hands_on]
        new_name = f"{name}_smp_{'turn' if hands_on else 'seeded'}"
        self._seeded[name, hands_on] = new_name
        index = len(self._seeded)  # not the function's name, which differs from process to process
        function = function_pb2.FunctionDef()
        function.CopyFrom(self._by_name[name])
        function.signature.name = new_name
        function.attr.pop("_input_shapes", None)
        taken = {arg.name for arg in function.signature.input_arg} | {n.name for n in function.node_def}
        argument = next(c for c in _fresh("smp_seed") if c not in taken)
        function.signature.input_arg.append(op_def_pb2.OpDef.ArgDef(name=argument, type=types_pb2.DT_INT64))
        body = list(function.node_def)
        del function.node_def[:]
        number = 0
        for node in body:
            if node.op not in _COUNTERPARTS and not self._any_draws(node):
                function.node_def.append(node)
                continue
            number += 1
            constant, add = _offset_and_sum(node.name, index, number)
            add.input.extend([argument, f"{constant.name}:output:0"])
            function.node_def.extend([constant, add, self._seeded_node(node, f"{add.name}:z:0")])
        if hands_on:
            constant, add = _offset_and_sum(f"{argument}_next", index, 0)
            add.input.extend([argument, f"{constant.name}:output:0"])
            function.node_def.extend([constant, add])
            function.signature.output_arg.append(
                op_def_pb2.OpDef.ArgDef(name=f"{argument}_next", type=types_pb2.DT_INT64)
            )
            function.ret[f"{argument}_next"] = f"{add.name}:z:0"
        self._library.function.append(function)
        return new_name

    def _seeded_node(self, node: node_def_pb2.NodeDef, seed: str) -> node_def_pb2.NodeDef:
        inputs = [i for i in node.input if not i.startswith("^")]
        control = [i for i in node.input if i.startswith("^")]
        if node.op in _COUNTERPARTS:
            made = _stateless_definition(node)
            at = _COUNTERPARTS[node.op].seed_position
        else:
            made = node_def_pb2.NodeDef()
            made.CopyFrom(node)
            del made.input[:]
            self._redirect(made)
            at = len(inputs)
        made.input.extend([*inputs[:at], seed, *inputs[at:], *control])
        return made


def _callees(definition: node_def_pb2.NodeDef) -> Iterator[str]:
    for attribute in definition.attr.values():
        if attribute.HasField("func"):
            yield attribute.func.name
        yield from (function.name for function in attribute.list.func)


def _fresh(stem: str) -> Iterator[str]:
    yield stem
    number = 1
    while True:
        yield f"{stem}_{number}"
        number += 1
