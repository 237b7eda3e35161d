"""Tells whether two processes traced the same step, and if not, where the two steps differ.

Each node is hashed by what it computes: op type, types, attributes and the numbers of the nodes it
    reads. What differs from process to process without meaning anything is left out: names of nodes, seeds and
    placement hints. TensorFlow also numbers the functions that it generates (`__inference_body_1234`). Such a name is
    replaced by the hash of the function's content.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

from smp_tf.partition.graph.graph_caches import graph_cache
from smp_tf.partition.graph.graph_facts import graph_fact
from smp_tf.partition.graph.node_def import attributes, functions, in_order
from smp_tf.partition.graph.op_graph import OpGraph, TensorType

_LEFT_OUT = frozenset({"seed", "seed2", "shared_name", "container", "token", "debug_name"})


@graph_fact
def fingerprint(graph: OpGraph) -> str:
    """Returns a hash of what a step computes, the same in every process that traced the same step.

    Args:
        graph: one microbatch of the step.

    Returns:
        64 hexadecimal digits.
    """
    whole = hashlib.sha256()
    for line in outline(graph):
        whole.update(line.encode() + b"\n")
    return whole.hexdigest()


def form(graph: OpGraph) -> tuple[str, ...]:
    """Returns the lines of a step's outline that do not depend on the sizes of its arguments.

    Replicas whose batches differ in size agree on these lines. Their graphs differ in shapes, in the ops that shapes
    call for, and in the step's outputs.

    Args:
        graph: one microbatch of the step.

    Returns:
        A line per variable, a line per call of a layer, and one for the gradients.
    """
    layers = [f"{call.path} layer {call.class_name}" for call in graph.calls[1:]]
    gradients = [gradient.variable for gradient in graph.gradients]
    digest = hashlib.sha256(repr(gradients).encode()).hexdigest()[:16]
    return (*_variables(graph), *layers, f"- gradients {len(gradients)} {digest}")


def outline(graph: OpGraph) -> tuple[str, ...]:
    """Returns the step line by line, so that two steps can be compared.

    Args:
        graph: one microbatch of the step.

    Returns:
        A line per variable, "variable <name> <type>"; a line per node, "<layer> <op> <types> <hash>"; and a line for
        the results. The layer of an op outside every layer is "-".
    """
    known: dict[str, str] = {}
    library = functions(graph.library)
    lines = _variables(graph)
    for node in graph.nodes:
        content = hashlib.sha256()
        content.update(repr([(t.node, t.index) for t in node.inputs]).encode())
        content.update(repr((node.control, node.backward, node.stateful, node.source)).encode())
        content.update(repr((node.reads, node.writes)).encode())
        _hash_attributes(content, attributes(node), library, known)
        types = ",".join(map(type_in_words, node.outputs)) or "nothing"
        path = graph.calls[node.call].path or "-"
        lines.append(f"{path} {node.op} {types} {content.hexdigest()[:16]}")
    outputs = [(t.node, t.index) for t in graph.outputs]
    gradients = [(g.variable, tuple((t.node, t.index) for t in g.tensors)) for g in graph.gradients]
    lines.append(f"- results {len(outputs)} {hashlib.sha256(repr((outputs, gradients)).encode()).hexdigest()[:16]}")
    return tuple(lines)


def work_of(graph: OpGraph, groups: Iterable[Sequence[int]]) -> list[str]:
    """Returns a hash of the work of each group of nodes, wherever in the graph it is done.

    Two groups have the same hash where their ops are of the same kinds and attributes, in the same order, and read and
    give tensors of the same types. Then they take equally long.

    Args:
        graph: one microbatch of the step.
        groups: numbers of the nodes of each group, in order.
    """
    known: dict[str, str] = {}
    library = functions(graph.library)
    found = []
    for group in groups:
        content = hashlib.sha256()
        for node in map(graph.nodes.__getitem__, group):
            read, given = map(graph.type_of, node.inputs), node.outputs
            content.update(repr((node.op, *map(type_in_words, read), "->", *map(type_in_words, given))).encode())
            _hash_attributes(content, attributes(node), library, known)
        found.append(content.hexdigest())
    return found


def _variables(graph: OpGraph) -> list[str]:
    lines = []
    for variable in graph.variables:
        kind = "trainable" if variable.trainable else "not trainable"
        where = "of the model" if variable.in_model else "of the script"
        lines.append(f"variable {variable.name} {type_in_words(variable.type)} {kind}/{where}")
    return lines


def difference(ours: Sequence[str], theirs: Sequence[str], us: str = "this rank", them: str = "the other") -> str:
    """Says where two steps differ.

    Args:
        ours: outline of one step.
        theirs: outline of the other step.
        us: what to call the process of the first step, such as "rank 2".
        them: what to call the process of the other step.

    Returns:
        One sentence about the first variable or op that differs; "" when none does.
    """
    for number, (mine, other) in enumerate(zip(ours, theirs, strict=False)):
        if mine != other:
            return _said(number, mine, other, us, them)
    if len(ours) == len(theirs):
        return ""
    longer, line = (us, ours[len(theirs)]) if len(ours) > len(theirs) else (them, theirs[len(ours)])
    return f"The steps are alike up to the end of one; {longer} goes on with {_read(line)}."


def _said(number: int, mine: str, other: str, us: str, them: str) -> str:
    is_op = not mine.startswith(("variable ", "- results ", "- gradients ")) and mine.split(" ")[1] != "layer"
    if not is_op or mine.rpartition(" ")[0] != other.rpartition(" ")[0]:
        return f"The first difference: {us} has {_read(mine)}, {them} has {_read(other)}."
    return (
        f"The first difference: {_read(mine)} (entry {number} of the step) is there on both {us} "
        f"and {them}, but with "
        f"other inputs, attributes or constants."
    )


def _read(line: str) -> str:
    """Returns a sentence for a line of an outline."""
    path, what, rest, *more = [*line.split(" "), "", ""]
    if path == "variable":
        return f"variable {what!r} of type {rest}, {' '.join(more).strip().replace('/', ', ')}"
    if what == "layer":
        return f"layer {path!r} of type {rest}"
    if what in ("results", "gradients"):
        return f"{rest} {what}"
    return f"op {what} giving {rest} " + ("outside every layer" if path == "-" else f"in layer {path!r}")


def type_in_words(kind: TensorType) -> str:
    """Returns a type as text, such as "float32[?,8]"."""
    return f"{kind.dtype}[{_shape_in_words(kind.shape)}]"


@graph_cache(4096)
def _shape_in_words(shape: tuple[int | None, ...] | None) -> str:
    return "?" if shape is None else ",".join("?" if d is None else str(d) for d in shape)


def _hash_attributes(content: Any, attrs: Any, library: dict[str, Any], known: dict[str, str]) -> None:
    for name in sorted(attrs):
        if name.startswith("_") or name in _LEFT_OUT:
            continue
        value = attrs[name]
        content.update(name.encode() + b"=")
        called = [value.func] if value.HasField("func") else list(value.list.func)
        if called:
            content.update("|".join(_function(f.name, library, known) for f in called).encode())
        else:
            content.update(value.SerializeToString(deterministic=True))


def _function(name: str, library: dict[str, Any], known: dict[str, str]) -> str:
    """Returns the hash of a function's content, that is of what its results and its effects are computed from."""
    if name in known:
        return known[name]
    known[name] = "recursive"
    function = library.get(name)
    if function is None:
        known[name] = name
        return name
    of_name = {arg.name: f"argument {k} {arg.type}" for k, arg in enumerate(function.signature.input_arg)}

    def read(reference: str) -> str:
        first, colon, rest = reference.lstrip("^").partition(":")
        return ("^" if reference.startswith("^") else "") + of_name.get(first, first) + colon + rest

    for node in in_order(function):
        content = hashlib.sha256(node.op.encode())
        data = [read(i) for i in node.input if not i.startswith("^")]
        waits = sorted(read(i) for i in node.input if i.startswith("^"))
        content.update(repr((data, waits)).encode())
        _hash_attributes(content, node.attr, library, known)
        of_name[node.name] = content.hexdigest()
    whole = hashlib.sha256()
    for result in function.signature.output_arg:
        whole.update(read(function.ret[result.name]).encode() + b";")
    for digest in sorted(of_name[node.name] for node in function.node_def):
        whole.update(digest.encode())
    known[name] = whole.hexdigest()
    return known[name]
