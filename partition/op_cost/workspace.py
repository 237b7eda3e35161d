"""Estimates the memory that an op takes for itself while it runs.

An `Einsum` is computed as a product of matrices. An operand whose axes are in another order is copied first:

    aecd,abcd->acbe     aecd ─ copied to ac,e,d ─┐
                        abcd ─ copied to ac,b,d ─┴▶ ac,e,b ─ copied ─▶ acbe
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from smp_tf.partition.graph.node_def import attributes
from smp_tf.partition.graph.op_graph import Node, OpGraph, TensorType
from smp_tf.partition.op_cost.node_cost import is_known

#: Bytes of an index, such as that of the largest element of a window.
_PLACE_BYTES = 8
#: Types whose convolutions oneDNN computes without copies, where it is switched on.
_ONEDNN_DTYPES = frozenset({"float32", "bfloat16", "half"})
_CONVOLUTION_GRADIENTS = frozenset({"Conv2DBackpropFilter", "Conv2DBackpropInput"})
_KERNEL_GRADIENTS = frozenset({"Conv2DBackpropFilter", "Conv3DBackpropFilterV2"})
_WITH_WORKSPACE = _CONVOLUTION_GRADIENTS | _KERNEL_GRADIENTS | {"Einsum", "MaxPoolGrad"}
#: Bytes of the processor's last-level cache, which TensorFlow fills with patches of images.
_CACHE_BYTES = 32 * 2**20


def workspace(graph: OpGraph, node: Node, unknown: int = 1) -> int:
    """Returns the bytes that an op takes besides its inputs and outputs.

    An op type that no table knows may take as much as all its inputs and outputs, such as copies of them in another
    order.

    Args:
        graph: the op graph.
        node: the op.
        unknown: length assumed for dimensions that are known only when the step runs.
    """
    if node.op not in _WITH_WORKSPACE and is_known(node.op):
        return 0
    inputs = [graph.type_of(t) for t in node.inputs]
    if node.op == "MaxPoolGrad":
        # A second copy of the maxima, and where each was found.
        return inputs[1].nbytes(unknown) + _PLACE_BYTES * inputs[1].elements(unknown)
    if node.op in _KERNEL_GRADIENTS and (own := _grouped(node, inputs, unknown)):
        return own
    if node.op in _CONVOLUTION_GRADIENTS and not (inputs[2].dtype in _ONEDNN_DTYPES and _has_onednn()):
        return _patches(node, inputs, unknown)
    if node.op == "Einsum":
        return _einsum(attributes(node)["equation"].s.decode() if node.definition else "", inputs, node, unknown)
    return 0 if is_known(node.op) else sum(kind.nbytes(unknown) for kind in (*inputs, *node.outputs))


def _has_onednn() -> bool:
    """Returns whether TensorFlow computes with oneDNN, which TF_ENABLE_ONEDNN_OPTS=0 switches off."""
    from smp_tf.partition import tf_internals

    return tf_internals.has_onednn()


def _grouped(node: Node, inputs: Sequence[TensorType], unknown: int) -> int:
    """Returns the bytes that XLA takes for the gradient of the kernel of a grouped convolution; 0 for one group.

    On a processor only XLA computes it. Where each group has one channel and gives one, XLA computes the gradient of a
    kernel that connects all channels, and then a copy of it in which all but the groups' numbers are 0. For wider
    groups it puts what it reads and what it gives into another order.
    """
    channels = _channels(node, inputs[0])
    *window, taken, given = node.outputs[0].shape or ()
    if channels is None or taken is None or given is None or None in window or channels <= taken:
        return 0
    kernel = node.outputs[0].nbytes(unknown)
    if taken == 1 and given == channels:
        return 2 * channels * kernel
    return inputs[0].nbytes(unknown) + inputs[2].nbytes(unknown) + kernel


def _channels(node: Node, images: TensorType) -> int | None:
    """Returns how many channels images have; None where this is not known."""
    order = attributes(node)["data_format"].s.decode() if node.definition else ""
    return images.shape[1 if order.startswith("NC") else -1] if images.shape else None


def _patches(node: Node, inputs: Sequence[TensorType], unknown: int) -> int:
    """Returns the bytes of the patches that a kernel sees. They are written side by side where oneDNN has no kernel."""
    is_filter = node.op == "Conv2DBackpropFilter"
    kernel = node.outputs[0] if is_filter else inputs[1]
    *window, taken, given = (unknown if side is None else side for side in kernel.shape or ())
    made = inputs[2].elements(unknown)
    if not (window and given and made):
        return 0
    images = (inputs[2].shape or (1,))[0] or unknown
    positions = made / given / images
    patch = math.prod(window) * taken
    item = inputs[2].nbytes(unknown) / made
    if not is_filter:
        return int(positions * patch * item)
    one = positions * patch + patch * given + positions * given
    return int(positions * patch * item * math.ceil(_CACHE_BYTES / item / one))


def _einsum(equation: str, inputs: Sequence[TensorType], node: Node, unknown: int) -> int:
    """Returns the bytes of the operands and the product that are copied because their axes are in another order."""
    given, _, result = equation.replace(" ", "").partition("->")
    terms = given.split(",")
    if len(terms) != 2 or "." in equation:
        return 0
    # An axis of both operands and of the result numbers products; an axis of both operands alone is summed over.
    kinds = {
        label: 0 if all(label in term for term in (*terms, result)) else 1 if label in result else 2
        for label in given.replace(",", "")
    }
    numbers = {label: number for number, label in enumerate(dict.fromkeys(given.replace(",", "")))}

    def in_order(term: str, order: Sequence[int]) -> bool:
        ranks = [(order[kinds[label]], numbers[label]) for label in term]
        return ranks == sorted(ranks)

    copied = sum(
        kind.nbytes(unknown)
        for term, kind in zip(terms, inputs, strict=True)
        if not in_order(term, (0, 1, 2)) and not in_order(term, (0, 2, 1))
    )
    product = [
        sorted((label for label in term if kinds[label] < 2), key=lambda x: (kinds[x], numbers[x])) for term in terms
    ]
    made = [label for label in product[0] if kinds[label] == 0] + [x for term in product for x in term if kinds[x] == 1]
    if made != list(result):
        copied += node.outputs[0].nbytes(unknown)
    return copied
