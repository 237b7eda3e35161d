"""Tells which tensors of a step hold one row per sample, each computed from its own sample alone.

The step is traced twice: for a microbatch (the part) and for all samples of a batch (the whole). A tensor whose shape
differs between the two holds samples along the dimension that differs. Outside the model it holds *rows* if only ops
that treat every row alike have made it:

    model ──▶ logits [n, 10] ──▶ cross entropy [n] ──▶ mean []
              rows               rows                  no rows: it mixes the samples

The rows of all microbatches, one after the other, are the rows of the batch. So what is computed from them, such as a
loss, can be computed for the whole batch at once (`batch_tail.py`).

A tensor that a layer of the model computes counts as rows where a dimension is as long as there are samples. A layer
that mixes samples (batch normalisation) sees microbatches. That does not concern losses.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from tensorflow.core.framework import node_def_pb2

from smp_tf.partition.graph.node_def import constant
from smp_tf.partition.graph.op_graph import ARGUMENT, SOURCES, VARIABLE, Node, OpGraph, Tensor
from smp_tf.partition.graph.op_kinds import RANDOM_OPS, named
from smp_tf.partition.samples.same_place import same_places

#: Ops that compute every element of their output from the elements at the same place of their inputs.
ELEMENTWISE = named(
    """
    Abs Acos Acosh Add AddN AddV2 Asin Asinh Atan Atan2 Atanh Cast Ceil CheckNumerics ClipByValue Cos Cosh Digamma Div
    DivNoNan Elu Equal Erf Erfc Erfinv Exp Expm1 Floor FloorDiv FloorMod Greater GreaterEqual Identity Inv IsFinite
    IsInf IsNan LeakyRelu Less LessEqual Lgamma Log Log1p LogicalAnd LogicalNot LogicalOr Maximum Minimum Mod Mul
    MulNoNan Ndtri Neg NotEqual OnesLike Pow PreventGradient RealDiv Reciprocal Relu Relu6 Rint Round Rsqrt Select
    SelectV2 Selu Sigmoid Sign Sin Sinh Softplus Softsign Sqrt Square SquaredDifference StopGradient Sub Tan Tanh
    TruncateDiv Xdivy Xlog1py Xlogy ZerosLike
    """
)
#: Ops that give a number in the shape of what they are given, and the number.
_FILLED = {"ZerosLike": 0, "OnesLike": 1}
#: Ops that compute row i of their output from row i of their inputs, where the first dimension stays as it is.
_ROW_BY_ROW = named("All Any ArgMax ArgMin BiasAdd ExpandDims Max Mean Min OneHot Prod Squeeze Sum TopKV2")
#: Ops that repeat what they are given.
_REPEATS = frozenset({"BroadcastTo", "Fill", "OnesLike", "Reshape", "Tile", "ZerosLike"})
#: Ops that may join blocks of samples, or take them apart.
_REARRANGING = frozenset({"ConcatV2", "Split", "StridedSlice"})
#: What ops compute of whole numbers, such as where a slice begins.
_OF_NUMBERS: dict[str, Callable[..., int]] = {
    "Add": operator.add, "AddV2": operator.add, "Sub": operator.sub, "Mul": operator.mul, "Neg": operator.neg,
    "FloorDiv": operator.floordiv, "Cast": int, "Identity": int,
}  # fmt: skip
#: Ops on images that treat each image by itself.
_BY_SAMPLE = named("AvgPool AvgPool3D Conv2D Conv3D DepthwiseConv2dNative MaxPool MaxPool3D")


@dataclass(frozen=True, slots=True)
class Content:
    """What a tensor of the whole batch's graph is made of.

    Args:
        rows: the dimension along which it holds rows, each computed from its own sample; None where it holds none.
        samples: whether it depends on samples.
        weights: whether it depends on variables of a model.
        gradients: whether it depends on gradients.
        random: whether it depends on random numbers that are no rows. Then every microbatch has other numbers.
        blocks: how many rows a sample has where they come in blocks of all samples, one block after the other. Two
            views of every sample that are joined, for one call of a model, are two.
        states: whether it depends on variables of the script that the step writes.
    """

    rows: int | None = None
    samples: bool = False
    weights: bool = False
    gradients: bool = False
    random: bool = False
    blocks: int = 1
    states: bool = False


#: The lengths of a tensor's dimensions, each for a batch and for a microbatch.
Lengths = list[tuple[int | None, int | None]]


class Rows(Protocol):
    """What is known of the tensors of a step's graph for a whole batch."""

    def of(self, tensor: Tensor) -> Content:
        """Returns what a tensor is made of."""

    def in_part(self, tensor: Tensor) -> Tensor | None:
        """Returns the tensor of a microbatch's graph that is made at the same place; None where there is none."""

    def differs(self, tensor: Tensor) -> tuple[int, ...] | None:
        """Returns the dimensions of a tensor whose length differs for a microbatch; None where this cannot be told."""

    def has_one_row_each(self, tensor: Tensor) -> bool:
        """Returns whether a tensor that holds rows has one for each sample, as far as its shape is known."""


class SampleRows:
    """What the tensors of a step's whole graph are made of.

    Args:
        whole: the step, traced for all samples of a batch.
        part: the same step, traced for a microbatch.
        samples: number of samples in the whole batch.
        unknown: names of nodes that stand for gradients in `whole`.
    """

    def __init__(self, whole: OpGraph, part: OpGraph, samples: int, unknown: frozenset[str] = frozenset()) -> None:
        #: Number of samples in the whole batch.
        self.samples = samples
        self._whole = whole
        self._part = part
        self._unknown = unknown
        self._compared: dict[Tensor, Lengths | None] = {}

    def is_constant(self, tensor: Tensor) -> bool:
        """Returns whether a tensor is made of constants alone, which may follow the number of samples."""
        return tensor.node in self._constants[0]

    def in_part(self, tensor: Tensor) -> Tensor | None:
        """Returns the tensor of the part's graph that is made at the same place; None where there is none."""
        number = self._same[tensor.node]
        return None if number is None else Tensor(number, tensor.index)

    @cached_property
    def _same(self) -> list[int | None]:
        """For every node, the one of the part's graph that is made at the same place."""
        return same_places(self._whole, self._part, self.samples)

    @cached_property
    def contents(self) -> tuple[tuple[Content, ...], ...]:
        """Returns, for every node of the whole graph, what each of its outputs is made of."""
        found: list[tuple[Content, ...]] = []
        for number, node in enumerate(self._whole.nodes):
            given = [found[t.node][t.index] for t in node.inputs]
            together = _together(given)
            found.append(
                tuple([self._content(tensor, node, given, together) for tensor in self._whole.tensors_of(number)])
            )
        return tuple(found)

    @cached_property
    def _constants(self) -> tuple[frozenset[int], frozenset[int]]:
        """The nodes that are made of constants alone, and those of them that are others for a microbatch.

        The latter follow the number of samples: `tf.shape(x)[0]`, where this is known, is such a constant.
        """
        constant: set[int] = set()
        found: set[int] = set()
        for number, node in enumerate(self._whole.nodes):
            before = self._whole.data_from[number]
            if node.op in SOURCES or node.op in RANDOM_OPS or not constant.issuperset(before):
                continue
            if node.reads or node.writes or node.name in self._unknown:
                continue
            constant.add(number)
            other = self._part.number_of.get(node.name)
            is_same = other is not None and self._part.nodes[other].op == node.op
            if node.op == "Const" and is_same and other is not None:
                is_same = _value(node) == _value(self._part.nodes[other])
            if not is_same or not found.isdisjoint(before):
                found.add(number)
        return frozenset(constant), frozenset(found)

    def of(self, tensor: Tensor) -> Content:
        """Returns what a tensor of the whole graph is made of."""
        return self.contents[tensor.node][tensor.index]

    def has_one_row_each(self, tensor: Tensor) -> bool:
        """Returns whether a tensor that holds rows has one for each sample, as far as its shape is known."""
        shape, content = self._whole.type_of(tensor).shape, self.of(tensor)
        if shape is None or content.rows is None:
            return True
        return shape[content.rows] in (None, content.blocks * self.samples)

    def sample_axis(self, argument: int) -> int | None:
        """Returns the axis along which an argument has one row a sample; None where it has none.

        Args:
            argument: number of the step's tensor argument.
        """
        numbers = (n for n, node in enumerate(self._whole.nodes) if node.op == ARGUMENT and node.source == argument)
        found = (self.of(Tensor(number, 0)).rows for number in numbers)
        return next((axis for axis in found if axis is not None), None)

    def differs(self, tensor: Tensor) -> tuple[int, ...] | None:
        """Returns the dimensions of a tensor whose length differs for a microbatch; None where this cannot be told.

        A dimension whose length is unknown even for the whole batch, such as that of its longest sample, is among them
        only where no other dimension is.
        """
        lengths = self._lengths(tensor)
        if lengths is None:
            return None
        known = tuple(d for d, (whole, part) in enumerate(lengths) if whole is not None and whole != part)
        return known or tuple(d for d, (whole, _) in enumerate(lengths) if whole is None)

    def _lengths(self, tensor: Tensor) -> Lengths | None:
        """Returns each dimension's lengths, for the batch and for a microbatch; None where they cannot be compared."""
        if tensor not in self._compared:
            self._compared[tensor] = self._lengths_of_both(tensor)
        return self._compared[tensor]

    def _lengths_of_both(self, tensor: Tensor) -> Lengths | None:
        other = self.in_part(tensor)
        if other is None:
            return None
        whole, part = self._whole.type_of(tensor).shape, self._part.type_of(other).shape
        if whole is None or part is None or len(whole) != len(part):
            return None
        return list(zip(whole, part, strict=True))

    def axis_of_samples(self, tensor: Tensor) -> int | None:
        """Returns the dimension of a tensor that is as long as there are samples; None where nothing tells which.

        A dimension of another length has them in another order. For example, the augmented copies come after the
        samples in a batch, and do so in each of its microbatches.
        """
        lengths = self._lengths(tensor) or []
        differing = [(d, whole, part) for d, (whole, part) in enumerate(lengths) if part != whole]
        if not differing:
            return None
        found = [d for d, whole, _ in differing if whole == self.samples]
        others = {d for d, *both in differing if None not in both}
        return found[0] if len(found) == 1 and others <= set(found) else None

    def _content(self, tensor: Tensor, node: Node, given: list[Content], together: Content) -> Content:
        found = self._content_without_states(tensor, node, given, together)
        is_of_states = together.states or reads_state(self._whole, node)
        return dataclasses.replace(found, states=True) if is_of_states else found

    def _content_without_states(self, tensor: Tensor, node: Node, given: list[Content], together: Content) -> Content:
        number, only = tensor.node, self.axis_of_samples(tensor)
        if node.op == ARGUMENT:
            return Content(rows=only, samples=self.differs(tensor) != ())
        if node.op == VARIABLE:
            return Content(weights=node.source is not None and self._whole.variables[node.source].in_model)
        if node.op in SOURCES:
            return Content()
        if (node.op == "Const" and self._is_uniform(number)) or (node.op == "Fill" and self._is_filled(node, tensor)):
            return Content(rows=0, samples=True)
        gradients = node.name in self._unknown or together.gradients
        samples = together.samples or number in self._constants[1]
        weights, random = together.weights, together.random
        if node.op in RANDOM_OPS:
            return Content(rows=only, samples=True, random=only is None)
        if node.backward and not gradients:
            return self._of_backward(tensor, given, Content(only, samples, weights, random=random))
        if node.op in _REARRANGING and not gradients:
            blocks = self._rearranged(node, tensor, given)
            if blocks:
                return Content(0, samples, weights, blocks=blocks)
        blocks = together.blocks
        if node.call:
            if blocks > 1 and self._has_blocks(tensor, blocks):
                return Content(0, samples, weights, gradients, blocks=blocks)
            # What a layer gives holds rows where it holds samples. There is one exception: a tensor that only the layer
            # itself uses, made of a number that it has computed of all samples, as for a metric.
            # What follows the number of samples, such as their numbers in a row, starts anew for every microbatch.
            is_rows = only is not None and (samples or weights) and number not in self._constants[0]
            is_rows = is_rows and not self._is_mixed_within(number, tensor, given)
            rows = only if is_rows else None
            return Content(
                rows, samples or is_rows, weights, gradients, random and not is_rows, 1 if is_rows else blocks
            )
        rows = 0 if samples and not gradients and self._keeps_rows(node, tensor, given) else None
        return Content(rows, samples, weights, gradients, random and rows is None, blocks)

    def _rearranged(self, node: Node, tensor: Tensor, given: list[Content]) -> int:
        """Returns the number of blocks where blocks of samples are joined, or taken apart; 0 elsewhere.

        Args:
            node: a node among `_REARRANGING`.
            tensor: its output.
            given: what its inputs are made of.
        """
        if node.op == "ConcatV2":
            values, blocks = given[:-1], sum(c.blocks for c in given[:-1])
            is_along_rows = self._value_of(node.inputs[-1]) == [0]
        elif node.op == "Split":
            values, blocks = given[1:], given[1].blocks // len(node.outputs)
            is_along_rows = self._value_of(node.inputs[0]) == [0]
        else:
            values, blocks = given[:1], self._sliced_blocks(node, given[0].blocks)
            is_along_rows = True
        is_rearranged = is_along_rows and blocks and all(c.rows == 0 for c in values)
        return blocks if is_rearranged and self._has_blocks(tensor, blocks) else 0

    def _sliced_blocks(self, node: Node, blocks: int) -> int:
        """Returns how many whole blocks a slice takes; 0 where it takes other things."""
        masks = node_def_pb2.NodeDef.FromString(node.definition).attr
        begin, end, strides = (self._value_of(tensor) for tensor in node.inputs[1:])
        if (masks["ellipsis_mask"].i | masks["new_axis_mask"].i | masks["shrink_axis_mask"].i) & 1:
            return 0
        if not (begin and end and strides) or strides[0] != 1:
            return 0
        first = 0 if masks["begin_mask"].i & 1 else begin[0]
        last = blocks * self.samples if masks["end_mask"].i & 1 else end[0]
        first, last = (place + blocks * self.samples * (place < 0) for place in (first, last))
        return 0 if first % self.samples or last % self.samples else (last - first) // self.samples

    def _has_blocks(self, tensor: Tensor, blocks: int) -> bool:
        """Returns whether a tensor is as long as so many blocks of samples."""
        lengths = self._lengths(tensor)
        if not lengths or lengths[0][0] != blocks * self.samples:
            return False
        return self._keeps_length(tensor, blocks * self.samples)

    def _value_of(self, tensor: Tensor) -> list[int]:
        """Returns whole numbers that are constants, or are computed of constants; none for anything else."""
        node = self._whole.nodes[tensor.node]
        if node.op == "Const":
            return [int(number) for number in constant(node).reshape(-1)]
        given = [self._value_of(t) for t in node.inputs] if node.op in _OF_NUMBERS or node.op == "Pack" else []
        if not given or any(len(values) != 1 for values in given):
            return []
        if node.op == "Pack":
            return [values[0] for values in given]
        return [] if given[-1] == [0] else [_OF_NUMBERS[node.op](*(values[0] for values in given))]

    def _of_backward(self, tensor: Tensor, given: list[Content], found: Content) -> Content:
        """Returns what a tensor of a backward pass is made of that no gradient of a variable goes into.

        A gradient by a tensor, as a penalty takes it, may have a row a sample. What a backward pass needs besides, such
        as shapes, is none.

        Args:
            tensor: the tensor.
            given: what the inputs of its node are made of.
            found: the same for itself, as if it had rows where a dimension is as long as there are samples.
        """
        node = self._whole.nodes[tensor.node]
        if "float" not in self._whole.type_of(tensor).dtype or not (found.samples or found.weights):
            return dataclasses.replace(found, rows=None)
        kinds = [self._whole.type_of(t).dtype for t in node.inputs]
        numbers = [c for c, kind in zip(given, kinds, strict=True) if "float" in kind and node.op not in _FILLED]
        is_repeated = node.op in _REPEATS and not any(c.samples or c.weights for c in numbers)
        keeps = bool(node.call) or is_repeated or self._keeps_rows(node, tensor, given)
        if found.rows is None or not keeps or any(c.samples and c.rows is None for c in numbers):
            return dataclasses.replace(found, rows=None, gradients=True)
        return dataclasses.replace(found, samples=True, random=False)

    def _is_mixed_within(self, number: int, tensor: Tensor, given: list[Content]) -> bool:
        """Returns whether a layer uses a tensor alone, and has made it of numbers that stand for all samples."""
        node = self._whole.nodes[number]
        kinds = [self._whole.type_of(t).dtype for t in node.inputs]
        if not any(c.samples and c.rows is None and "float" in kind for c, kind in zip(given, kinds, strict=True)):
            return False
        readers = self._whole.consumers.get(tensor, ())
        return bool(readers) and all(self._whole.nodes[reader].call == node.call for reader in readers)

    def _keeps_rows(self, node: Node, tensor: Tensor, given: list[Content]) -> bool:
        """Returns whether every row of an output is made of the same row of all inputs that hold samples."""
        # What a reshape is given besides is a shape, in which the number of samples may be.
        holding = [c for c in (given[:1] if node.op == "Reshape" else given) if c.samples]
        if any(c.rows != 0 or c.blocks != holding[0].blocks for c in holding):
            return False
        shape = self._whole.type_of(tensor).shape
        if not shape or shape[0] is None or self.differs(tensor) in (None, ()):
            return False
        if node.op == "Reshape":
            # In row-major order the elements of a sample stay together, in the same number of rows for each sample.
            return shape[0] % (self.samples * given[0].blocks) == 0 and self._keeps_length(tensor, shape[0])
        shapes = [self._whole.type_of(t).shape for t in node.inputs]
        of_samples = [s for c, s in zip(given, shapes, strict=True) if c.samples]
        if any(not s or s[0] != shape[0] for s in of_samples):
            return False
        if node.op in ELEMENTWISE:
            others = [s for c, s in zip(given, shapes, strict=True) if not c.samples]
            is_aligned = all(s is not None and len(s) == len(shape) for s in of_samples)
            return is_aligned and all(_is_for_every_row(s, len(shape)) for s in others)
        if node.op in ("ConcatV2", "Pack"):
            # The last input of a concatenation is the dimension. It must not be the first, which stays as it is.
            return all(c.samples for c in (given[:-1] if node.op == "ConcatV2" else given))
        if node.op in ("Softmax", "LogSoftmax"):
            return len(shape) > 1
        if node.op in _BY_SAMPLE:
            # Images, with weights that do not differ between samples.
            return given[0].samples and not any(c.samples for c in given[1:])
        if node.op in ("BatchMatMul", "BatchMatMulV2", "BatchMatMulV3"):
            return len(shape) > 2 and all(c.samples for c in given)
        if node.op == "MatMul":
            return given[0].samples and not given[1].samples and not self._attribute(node, "transpose_a")
        if node.op == "GatherV2":
            return not given[0].samples and given[1].samples and not self._attribute(node, "batch_dims")
        if node.op == "StridedSlice":
            return given[0].samples and self._takes_all_rows(node)
        if node.op in ("SoftmaxCrossEntropyWithLogits", "SparseSoftmaxCrossEntropyWithLogits", "InTopKV2"):
            return given[0].samples and given[1].samples
        return node.op in _ROW_BY_ROW

    def _is_uniform(self, number: int) -> bool:
        """Returns whether a constant has a row a sample, and is the same number everywhere, as it is for a microbatch.

        Zeros of the shape of the samples are such a constant. For microbatches of any size they are no constant.
        """
        shape, name = self._whole.type_of(Tensor(number, 0)).shape, self._whole.nodes[number].name
        if not shape or shape[0] != self.samples:
            return False
        if self._whole.nodes[number].backward and _elements(self._whole.nodes[number]) == {1}:
            # A backward pass begins with ones.
            return True
        if name not in self._part.number_of:
            return False
        found, other = _elements(self._whole.nodes[number]), self._part.nodes[self._part.number_of[name]]
        if other.op == "Const":
            # A constant that is as long for a microbatch is as long as there are samples by chance.
            is_longer = other.outputs[0].shape != self._whole.nodes[number].outputs[0].shape
            return is_longer and len(found) == 1 and found == _elements(other)
        return other.op in _FILLED and found == {_FILLED[other.op]}

    def _is_filled(self, node: Node, tensor: Tensor) -> bool:
        """Returns whether a tensor has a row a sample, and is filled with one number, the same as for a microbatch.

        Large zeros of the shape of the samples are so filled. Where a microbatch's are small, they are a constant.
        """
        shape, number = self._whole.type_of(tensor).shape, self._part.number_of.get(node.name)
        value = self._whole.nodes[node.inputs[1].node]
        if not shape or shape[0] != self.samples or number is None or value.op != "Const":
            return False
        other = self._part.nodes[number]
        if other.op == "Fill":
            filled = self._part.nodes[other.inputs[1].node]
            found = _elements(filled) if filled.op == "Const" else None
        else:
            found = _elements(other) if other.op == "Const" else {_FILLED.get(other.op)}
        return other.outputs[0].shape != shape and found == _elements(value)

    def _keeps_length(self, tensor: Tensor, length: int) -> bool:
        """Returns whether the first dimension's length for a microbatch is what its samples say, where it is known."""
        lengths = self._lengths(tensor)
        return lengths is not None and lengths[0][1] != length

    def _takes_all_rows(self, node: Node) -> bool:
        """Returns whether a slice takes everything along the first dimension, in order."""
        masks = node_def_pb2.NodeDef.FromString(node.definition).attr
        strides = self._value_of(node.inputs[3])
        if masks["ellipsis_mask"].i & 1:
            # As in labels[..., :1]: what is left out begins with the first dimension, if there is any left out.
            shape = self._whole.type_of(node.inputs[0]).shape
            others = len(strides) - 1 - int(masks["new_axis_mask"].i).bit_count()
            return bool(strides) and shape is not None and len(shape) > others
        if not (masks["begin_mask"].i & 1 and masks["end_mask"].i & 1):
            return False
        return strides[:1] == [1] and not (masks["new_axis_mask"].i | masks["shrink_axis_mask"].i) & 1

    def _attribute(self, node: Node, name: str) -> int:
        """Returns a number or truth value among the attributes of a node."""
        attribute = node_def_pb2.NodeDef.FromString(node.definition).attr[name]
        return int(attribute.i or attribute.b)


def _together(given: list[Content]) -> Content:
    """Returns what is made of tensors together: all that any of them is made of, and no rows."""
    samples = weights = gradients = random = states = False
    blocks = 1
    for content in given:
        samples |= content.samples
        weights |= content.weights
        gradients |= content.gradients
        random |= content.random
        states |= content.states
        blocks = max(blocks, content.blocks) if content.samples else blocks
    return Content(None, samples, weights, gradients, random, blocks, states)


def reads_state(graph: OpGraph, node: Node) -> bool:
    """Returns whether a node stands for a variable of the script that the step writes.

    Args:
        graph: the step.
        node: a node of it.
    """
    if node.op != VARIABLE or node.source is None:
        return False
    variable = graph.variables[node.source]
    return not (variable.in_model or variable.read_only)


def _elements(node: Node) -> set[object]:
    """Returns the different elements of a constant."""
    return set(constant(node).reshape(-1).tolist())


def _is_for_every_row(shape: tuple[int | None, ...] | None, rank: int) -> bool:
    """Returns whether an input that does not depend on samples is the same for every row it is combined with."""
    return shape is not None and (len(shape) < rank or (len(shape) == rank and shape[0] == 1))


def _value(node: Node) -> bytes:
    """Returns the value of a constant in a form that is equal for equal ones."""
    tensor = node_def_pb2.NodeDef.FromString(node.definition).attr["value"].tensor
    return bytes(tensor.SerializeToString(deterministic=True))
