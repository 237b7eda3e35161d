"""Small op graphs, written by hand."""

from __future__ import annotations

from collections.abc import Sequence

from smp_tf.partition.graph.op_graph import (
    ARGUMENT,
    VARIABLE,
    Call,
    Gradient,
    Node,
    OpGraph,
    Tensor,
    TensorType,
    Variable,
)


class GraphBuilder:
    """Collects nodes; `graph` gives the validated graph.

    `add` returns the first output of the new node. Layer calls are opened with `call`, which
    returns the number to hand to `add`.
    """

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.calls = [Call(0, "", "", None)]
        self.variables: list[Variable] = []
        self.gradients: list[Gradient] = []

    def call(self, path: str, parent: int = 0, stage: int | None = None, class_name: str = "Layer") -> int:
        self.calls.append(Call(len(self.calls), path, class_name, parent, stage))
        return len(self.calls) - 1

    def argument(self, shape: Sequence[int | None] = (4, 8), dtype: str = "float32") -> Tensor:
        source = sum(node.op == ARGUMENT for node in self.nodes)
        return self.add(ARGUMENT, shape=shape, dtype=dtype, source=source)

    def variable(
        self,
        name: str,
        shape: Sequence[int] = (8, 8),
        *,
        in_model: bool = True,
        read_only: bool = True,
    ) -> Tensor:
        kind = TensorType("float32", tuple(shape))
        index = len(self.variables)
        self.variables.append(Variable(index, name, kind, True, in_model, read_only))
        return self.add(VARIABLE, shape=(), dtype="resource", source=index)

    def read(self, handle: Tensor, call: int = 0) -> Tensor:
        index = self.nodes[handle.node].source
        assert index is not None
        shape = self.variables[index].type.shape
        return self.add("ReadVariableOp", handle, call=call, shape=shape, reads=(index,))

    def write(self, handle: Tensor, value: Tensor, call: int = 0) -> None:
        index = self.nodes[handle.node].source
        assert index is not None
        self.add("AssignVariableOp", handle, value, call=call, writes=(index,), stateful=True, outputs=())

    def dense(self, x: Tensor, handle: Tensor, call: int) -> Tensor:
        """Read the weight, multiply, apply Relu."""
        y = self.add("MatMul", x, self.read(handle, call), call=call)
        return self.add("Relu", y, call=call)

    def add(
        self,
        op: str,
        *inputs: Tensor,
        call: int = 0,
        shape: Sequence[int | None] | None = (4, 8),
        dtype: str = "float32",
        outputs: tuple[TensorType, ...] | None = None,
        control: tuple[int, ...] = (),
        backward: bool = False,
        forward_of: Tensor | None = None,
        stateful: bool = False,
        reads: tuple[int, ...] = (),
        writes: tuple[int, ...] = (),
        source: int | None = None,
        definition: bytes = b"",
    ) -> Tensor:
        if outputs is None:
            outputs = (TensorType(dtype, None if shape is None else tuple(shape)),)
        if forward_of is not None:
            backward, call = True, self.nodes[forward_of.node].call
        number = len(self.nodes)
        self.nodes.append(
            Node(
                name=f"{op}_{number}",
                op=op,
                inputs=inputs,
                control=control,
                outputs=outputs,
                definition=definition,
                call=call,
                backward=backward,
                forward_of=None if forward_of is None else forward_of.node,
                stateful=stateful,
                reads=reads,
                writes=writes,
                source=source,
            )
        )
        return Tensor(number, 0)

    def gradient(self, handle: Tensor, *tensors: Tensor) -> None:
        index = self.nodes[handle.node].source
        assert index is not None
        self.gradients.append(Gradient(index, tensors))

    def graph(self, *outputs: Tensor) -> OpGraph:
        graph = OpGraph(
            tuple(self.nodes),
            tuple(self.calls),
            tuple(self.variables),
            outputs,
            tuple(self.gradients),
        )
        graph.validate()
        return graph


def chain_of_dense(
    layers: int,
    width: int = 8,
    batch: int = 4,
    stages: Sequence[int | None] | None = None,
    tied: tuple[int, int] | None = None,
) -> OpGraph:
    """Forward and backward of dense layers `net/dense_i`, with the mean of the output as loss; two may share a kernel.

    forward   x ─▶ MatMul ─▶ Relu ─▶ ... ─▶ Mean
    backward  ◀─ MatMul (input) ◀─ ReluGrad ◀─ ... ◀─ Fill
                 MatMul (weight) ◀─┘
    """
    b = GraphBuilder()
    x = b.argument((batch, width))
    net = b.call("net", class_name="Model")
    inputs, products, relus, handles, weights = [], [], [], [], []
    other = None
    for i in range(layers):
        shares = tied is not None and i == tied[1]
        handles.append(handles[tied[0]] if shares else b.variable(f"net/dense_{i}/kernel", (width, width)))
        call = b.call(f"net/dense_{i}", net, class_name="Dense", stage=stages[i] if stages else None)
        inputs.append(x)
        weights.append(b.read(handles[-1], call))
        products.append(b.add("MatMul", x, weights[-1], call=call, shape=(batch, width)))
        x = b.add("Relu", products[-1], call=call, shape=(batch, width))
        relus.append(x)
    loss = b.add("Mean", x, shape=())
    g = b.add("Fill", shape=(batch, width), forward_of=loss)
    for i in reversed(range(layers)):
        g = b.add("ReluGrad", g, relus[i], shape=(batch, width), forward_of=relus[i])
        dw = b.add("MatMul", inputs[i], g, shape=(width, width), forward_of=products[i])
        if tied is not None and i == tied[1]:
            other = dw
        else:
            is_sum = tied is not None and i == tied[0]
            b.gradient(handles[i], b.add("AddN", other, dw, shape=(width, width)) if is_sum else dw)
        if i:
            g = b.add("MatMul", g, weights[i], shape=(batch, width), forward_of=products[i])
    return b.graph(loss)
