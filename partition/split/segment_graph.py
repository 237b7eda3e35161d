"""A segment of an op graph as a TensorFlow GraphDef, ready to be imported into a function.

TensorFlow's constant folding reuses the node of a product for another product, so that constants are multiplied first.
An op that waited for that node then waits for nothing. In a gradient function, ops that do not need the gradient of the
output wait for it all the same. Else their results would be in memory from the begin of backward on:

    dy ─▶ Mul ─▶ Mul(c) ─▶ Mul ─▶ dx            dy ─▶ Mul(y) ─▶ Mul ─▶ dx
          ┊                ▲              is                    ▲             and Exp of all layers are there at once
          └┄┄▶ Square ─▶ Exp            folded    Square ─▶ Exp

So such an op is made to wait for the maker of dy instead.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import numpy as np
from tensorflow.core.framework import function_pb2, graph_pb2, node_def_pb2, types_pb2
from tensorflow.python.framework import dtypes, tensor_util
from tensorflow.python.framework.versions import GRAPH_DEF_VERSION

from smp_tf.partition.graph.node_def import function_names, functions
from smp_tf.partition.graph.op_graph import OpGraph, Tensor
from smp_tf.partition.split.split import Segment

_READ = "ReadVariableOp"
#: The attribute for colocation with ops, which may now be in another segment.
_COLOCATION = "_class"
#: Ops whose node constant folding may use for other operands (`ConstantPushDown` of TensorFlow 2.21).
_REUSED_OPS = frozenset({"Add", "AddV2", "Sub", "Mul", "Div", "RealDiv"})
#: The most makers to wait for. A chain of sums through a whole model has as many as layers, for every node that waits.
_MOST_SEEN = 32


def tensor_name(graph: OpGraph, tensor: Tensor) -> str:
    """Returns the name by which an imported segment knows a tensor."""
    return f"{graph.nodes[tensor.node].name}:{tensor.index}"


def remote_value_name(graph: OpGraph, variable: int) -> str:
    """Returns the name by which an imported segment knows the value of another stage's variable."""
    return f"smp_remote_value_{variable}:0"


def use_name(graph: OpGraph, number: int) -> str:
    """Returns the name by which an imported segment knows the whole value of a variable, for one use of it.

    Args:
        graph: the op graph.
        number: of the node that reads the variable; a plain read is the value.
    """
    if graph.nodes[number].op == _READ:
        return tensor_name(graph, Tensor(number, 0))
    return f"{graph.nodes[number].name}/smp_value:0"


def segment_graph(graph: OpGraph, segment: Segment, owned: Iterable[int]) -> graph_pb2.GraphDef:
    """Writes a segment as a GraphDef. Its inputs are names, to be mapped on import.

    Args:
        graph: the op graph.
        segment: the segment.
        owned: variables whose handle is at hand. Reads of others become reads of the value that is fed in.

    Returns:
        The GraphDef with the functions its nodes call. Tensors from elsewhere appear as names only, by `tensor_name`,
        `remote_value_name` and `use_name`.
    """
    written = graph_pb2.GraphDef()
    own = frozenset(owned)
    after = dict(segment.after)
    # By the nodes that read a variable: the name of the value which they read instead.
    fed = {
        number: remote_value_name(graph, graph.nodes[number].reads[0])
        for number in segment.nodes
        if graph.nodes[number].reads and not own.issuperset(graph.nodes[number].reads)
    }
    fed |= {number: use_name(graph, number) for number in segment.uses}
    written_here = set(segment.nodes).difference(fed)

    def name_of(tensor: Tensor) -> str:
        if tensor.node in fed and graph.nodes[tensor.node].op == _READ:
            return fed[tensor.node]
        return tensor_name(graph, tensor)

    for number in segment.nodes:
        node = graph.nodes[number]
        definition = node_def_pb2.NodeDef.FromString(node.definition)
        definition.name = node.name
        definition.attr.pop(_COLOCATION, None)
        inputs = [name_of(t) for t in node.inputs]
        lasting = _lasting(graph, (*node.control, *after.get(number, ())), written_here)
        control = [f"^{graph.nodes[c].name}" for c in lasting]
        if number in fed:
            if node.op == _READ:
                continue
            inputs[0] = fed[number]
            if node.op == "ResourceGather":
                definition, axis = _gather_from_value(definition)
                written.node.add().CopyFrom(axis)
                inputs.append(f"{axis.name}:0")
            else:
                definition = _READS_VALUE[node.op](definition, graph.variables[node.reads[0]].type.dtype)
        del definition.input[:]
        definition.input.extend(inputs + control)
        written.node.add().CopyFrom(definition)
    written.library.CopyFrom(_called_functions(graph, written.node))
    written.versions.producer = GRAPH_DEF_VERSION
    return written


def _lasting(graph: OpGraph, waited: Iterable[int], inside: Collection[int]) -> list[int]:
    """Returns nodes to wait for in place of given ones, whose waits TensorFlow keeps (see the top of the file).

    Args:
        graph: the op graph.
        waited: the nodes.
        inside: nodes that are written. What other nodes make exists from the begin on.
    """
    lasting: dict[int, None] = {}
    for number in waited:
        if number in inside:
            lasting.update(dict.fromkeys(_makers(graph, number, inside)))
    return list(lasting)


def _makers(graph: OpGraph, number: int, inside: Collection[int]) -> list[int]:
    """Returns the node, or nodes that it needs and that TensorFlow does not use for other ops."""
    seen, stack = {number}, [number]
    makers: list[int] = []
    while stack:
        node = graph.nodes[at := stack.pop()]
        if node.op == "Const":
            continue
        if node.op not in _REUSED_OPS:
            makers.append(at)
            continue
        needed = (*(t.node for t in node.inputs), *node.control)
        before = [n for n in dict.fromkeys(needed) if n in inside and n not in seen]
        seen.update(before)
        stack.extend(reversed(before))
        if len(seen) > _MOST_SEEN:
            return [number]
    # The node itself, where all that it needs exists from the begin on.
    return makers or [number]


def _gather_from_value(gather: node_def_pb2.NodeDef) -> tuple[node_def_pb2.NodeDef, node_def_pb2.NodeDef]:
    """Returns `ResourceGather(handle, indices)` as `GatherV2(value, indices, axis)`: the gather and its axis."""
    batch_dims = gather.attr["batch_dims"].i
    axis = node_def_pb2.NodeDef(name=f"{gather.name}/smp_axis", op="Const")
    axis.attr["dtype"].type = types_pb2.DT_INT32
    axis.attr["value"].tensor.CopyFrom(tensor_util.make_tensor_proto(np.int32(batch_dims)))
    made = node_def_pb2.NodeDef(name=gather.name, op="GatherV2", device=gather.device)
    made.attr["Tparams"].CopyFrom(gather.attr["dtype"])
    made.attr["Tindices"].CopyFrom(gather.attr["Tindices"])
    made.attr["Taxis"].type = types_pb2.DT_INT32
    made.attr["batch_dims"].i = batch_dims
    return made, axis


def _gather_nd_from_value(gather: node_def_pb2.NodeDef, dtype: str) -> node_def_pb2.NodeDef:
    made = node_def_pb2.NodeDef(name=gather.name, op="GatherNd", device=gather.device)
    made.attr["Tparams"].CopyFrom(gather.attr["dtype"])
    made.attr["Tindices"].CopyFrom(gather.attr["Tindices"])
    return made


def _shape_of_value(shape: node_def_pb2.NodeDef, dtype: str) -> node_def_pb2.NodeDef:
    made = node_def_pb2.NodeDef(name=shape.name, op="Shape", device=shape.device)
    made.attr["T"].type = dtypes.as_dtype(dtype).as_datatype_enum
    made.attr["out_type"].CopyFrom(shape.attr["out_type"])
    return made


_READS_VALUE = {"ResourceGatherNd": _gather_nd_from_value, "VariableShape": _shape_of_value}


def _called_functions(graph: OpGraph, nodes: Iterable[node_def_pb2.NodeDef]) -> function_pb2.FunctionDefLibrary:
    """Returns the functions that nodes call, and those they call in turn."""
    library = functions(graph.library)
    if not library:
        return function_pb2.FunctionDefLibrary()
    names: dict[str, None] = {}
    stack = [name for node in nodes for name in function_names(node.attr)]
    while stack:
        name = stack.pop()
        if name in names or name not in library:
            continue
        names[name] = None
        stack.extend(function_names(library[name].attr))
        stack.extend(inner for node in library[name].node_def for inner in function_names(node.attr))
    return function_pb2.FunctionDefLibrary(function=[library[name] for name in sorted(names)])
