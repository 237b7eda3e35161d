"""Finds where a model mixes samples: where what it gives for one sample depends on the others of its batch.

    x  [n, d] ─▶ Mean over samples [d] ─▶ Sub [n, d] ─▶ Dense ─▶ logits [n, 10] ─▶ loss
    rows         mixes ────────────────▶ mixed ──────────────────▶ mixed rows: a microbatch gives others

The model runs on microbatches. So such a model is another one on them than on the whole batch. What a loss computes of
several samples is none of this: it is computed of the whole batch (`batch_tail.py`). A mean that no row of the model
depends on, as for a loss that a layer adds, is none either.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from smp_tf.partition.graph.op_graph import ARGUMENT, SOURCES, Call, Node, OpGraph, Tensor
from smp_tf.partition.graph.op_kinds import RANDOM_OPS, named
from smp_tf.partition.samples.held_samples import Dimensions, along, none_of, places
from smp_tf.partition.samples.known_numbers import KnownNumbers
from smp_tf.partition.samples.mixing_ops import UNKNOWN, Found, Use, find
from smp_tf.partition.samples.sample_rows import ELEMENTWISE, Content

#: Layers that are known to take what they compute over the samples that they are given.
KNOWN_LAYERS = named("BatchNormalization BatchNormalizationBase SyncBatchNormalization")
#: Ops whose output says nothing of what their inputs hold, but for their shapes.
_OF_SHAPES = named("Shape ShapeN Size Rank ZerosLike OnesLike Range BroadcastGradientArgs Assert")
#: Ops that mix samples of whole numbers, too. Others compute lengths and masks of these, which mix nothing.
_OF_ANY_TYPE = named("Cumsum Cumprod ReverseV2 Roll RandomShuffle")


@dataclass(frozen=True)
class Mixture:
    """A place where a step mixes samples.

    Args:
        call: the layer call in which it does so; call 0 stands for the script's function itself.
        op: name of the op.
        kind: type of the op.
        words: what the op does.
    """

    call: Call
    op: str
    kind: str
    words: str


class HeldRows(Protocol):
    """What is known of the tensors of a step that is traced for some samples."""

    @property
    def samples(self) -> int:
        """Returns the number of samples."""

    def of(self, tensor: Tensor) -> Content:
        """Returns what a tensor is made of."""

    def axis_of_samples(self, tensor: Tensor) -> int | None:
        """Returns the dimension of a tensor that is as long as there are samples; None where nothing tells which."""

    def is_constant(self, tensor: Tensor) -> bool:
        """Returns whether a tensor is made of constants alone."""

    def in_part(self, tensor: Tensor) -> Tensor | None:
        """Returns the tensor of a microbatch's trace that is made at the same place; None where there is none."""


@dataclass(frozen=True)
class _Content:
    """What is known of a tensor that depends on samples.

    Args:
        held: where it holds them; None where that is not known.
        mixture: the op by which it is mixed; None where it is not.
        picked: which samples it is made of, where these are not all.
    """

    held: Dimensions | None
    mixture: int | None = None
    picked: tuple[int, ...] = ()


class Mixtures:
    """The places of a step where a model mixes samples.

    Args:
        whole: the step, traced for all samples of a batch, without backward.
        part: the same step, traced for a microbatch; the same graph where there is one trace alone.
        rows: what the tensors of `whole` are made of.
    """

    def __init__(self, whole: OpGraph, part: OpGraph, rows: HeldRows) -> None:
        self._whole = whole
        self._part = part
        self._rows = rows
        self._numbers = KnownNumbers(whole)
        self._part_numbers = KnownNumbers(part)
        self._words: dict[int, str] = {}
        self._is_known = _in_known_layers(whole.calls)

    def find(self) -> list[Mixture]:
        """Returns where the step mixes samples in what its models give, one place a layer call, in order."""
        contents: list[tuple[_Content | None, ...]] = []
        for number, node in enumerate(self._whole.nodes):
            contents.append(self._contents_of(number, node, contents))
        found: dict[int, int] = {}
        for tensor in self._given_by_models():
            content = contents[tensor.node][tensor.index]
            if content is not None and content.mixture is not None:
                call = self._whole.nodes[content.mixture].call
                found[call] = min(found.get(call, content.mixture), content.mixture)
        return [
            Mixture(self._whole.calls[call], node.name, node.op, self._words[number])
            for call, number in sorted(found.items(), key=lambda item: item[1])
            for node in (self._whole.nodes[number],)
        ]

    def _given_by_models(self) -> set[Tensor]:
        """Returns the rows that microbatches compute, and that something outside of models is computed of."""
        graph = self._whole
        left = {tensor for node in graph.nodes if not node.call for tensor in node.inputs} | set(graph.outputs)
        found, seen = set(), set()
        while left:
            tensor = left.pop()
            node = graph.nodes[tensor.node]
            if tensor in seen or not node.call or node.backward:
                continue
            seen.add(tensor)
            if self._rows.of(tensor).rows is not None:
                found.add(tensor)
            else:
                # It is computed of the whole batch, from rows on.
                left.update(node.inputs)
        return found

    def _contents_of(
        self, number: int, node: Node, contents: Sequence[tuple[_Content | None, ...]]
    ) -> tuple[_Content | None, ...]:
        """Returns what is known of each output of an op; None for one that depends on no samples."""
        if node.op == ARGUMENT:
            tensor = Tensor(number, 0)
            content = self._rows.of(tensor)
            return (_Content(self._by_lengths(tensor)) if content.samples else None,)
        given = [contents[tensor.node][tensor.index] for tensor in node.inputs]
        if node.op in ("Reshape", "Tile", "BroadcastTo", "ExpandDims", "Squeeze"):
            # What they are given besides is a shape.
            given = [given[0], *(None for _ in given[1:])]
        is_none = node.op in SOURCES or node.op in _OF_SHAPES or node.backward or not any(given)
        if is_none or (node.op in RANDOM_OPS and node.op != "RandomShuffle"):
            return (None,) * len(node.outputs)
        return tuple(self._content(number, node, index, given) for index in range(len(node.outputs)))

    def _content(self, number: int, node: Node, index: int, given: Sequence[_Content | None]) -> _Content:
        """Returns what is known of an output of an op that is given tensors which depend on samples."""
        tensor, holding = Tensor(number, index), [content for content in given if content is not None]
        mixture = min((c.mixture for c in holding if c.mixture is not None), default=None)
        picks = {content.picked for content in holding if content.picked}
        found = self._found(node, index, given)
        words = found.mixes
        if not words and (node.op in ELEMENTWISE or "MatMul" in node.op):
            is_with_all = any(not c.picked and c.held is not None and places(c.held) for c in holding)
            if len(picks) > 1 or (picks and is_with_all):
                words = "combines samples with others"
            elif self._uses_number(node, given):
                words = "uses the number of samples"
        if mixture is None and words and self._is_told(node, given):
            self._words[number] = words
            mixture = number
        picked = found.picked or (picks.pop() if len(picks) == 1 else ())
        is_unknown = found.held is None or (len(picks) > 1 and not words)
        held = self._by_lengths(tensor) if is_unknown else found.held
        return _Content(held, mixture, picked)

    def _found(self, node: Node, index: int, given: Sequence[_Content | None]) -> Found:
        """Returns what the op's rule tells of an output."""
        shapes = [self._whole.type_of(tensor).shape for tensor in node.inputs]
        new = node.outputs[index].shape
        if new is None or any(shape is None for shape, c in zip(shapes, given, strict=True) if c is not None):
            return UNKNOWN
        held = []
        for shape, content in zip(shapes, given, strict=True):
            if content is not None and content.held is None:
                return UNKNOWN
            held.append(none_of(shape or ()) if content is None or content.held is None else content.held)
        if node.op == "IdentityN":
            return Found(held[index])
        if index and node.op.startswith("FusedBatchNorm"):
            return Found(none_of(new))
        known = tuple(shape or () for shape in shapes)
        found = find(Use(node, known, tuple(held), new, lambda place: self._numbers.of(node.inputs[place])))
        is_fitting = found.held is None or len(found.held) == len(new)
        return found if is_fitting else dataclasses.replace(found, held=None)

    def _is_told(self, node: Node, given: Sequence[_Content | None]) -> bool:
        """Returns whether an op that mixes samples is one to be told of."""
        if self._is_known[node.call]:
            return False
        dtypes = [self._whole.type_of(tensor).dtype for tensor in node.inputs]
        holding = [dtype for dtype, content in zip(dtypes, given, strict=True) if content is not None]
        return node.op in _OF_ANY_TYPE or any("float" in dtype or dtype in _MORE_TYPES for dtype in holding)

    def _uses_number(self, node: Node, given: Sequence[_Content | None]) -> bool:
        """Returns whether an op combines samples with a number that follows how many there are."""
        kind = node.outputs[0]
        if kind.dtype not in _MORE_TYPES and "float" not in kind.dtype:
            return False
        others = [t for t, content in zip(node.inputs, given, strict=True) if content is None]
        return any(self._follows_samples(tensor) for tensor in others)

    def _follows_samples(self, tensor: Tensor) -> bool:
        """Returns whether a tensor made of constants has other values for a microbatch, and not only another length."""
        if not self._rows.is_constant(tensor):
            return False
        other = self._rows.in_part(tensor)
        if other is None:
            return False
        value, of_part = self._numbers.of(tensor), self._part_numbers.of(other)
        if value is None or of_part is None:
            return False
        if value.shape == of_part.shape:
            return not np.array_equal(value, of_part)
        return len(np.unique(value)) > 1

    def _by_lengths(self, tensor: Tensor) -> Dimensions | None:
        """Returns where a tensor holds samples by its length for a microbatch; None where this cannot be told."""
        shape = self._whole.type_of(tensor).shape
        axis = self._rows.axis_of_samples(tensor)
        return None if shape is None or axis is None else along(axis, self._rows.samples, len(shape))


_MORE_TYPES = named("half complex64 complex128")


def _in_known_layers(calls: Sequence[Call]) -> list[bool]:
    """Returns, for each call, whether it is made by a layer that is known to mix samples, or within one."""
    found: list[bool] = []
    for call in calls:
        outer = call.parent is not None and found[call.parent]
        found.append(outer or call.class_name in KNOWN_LAYERS)
    return found
