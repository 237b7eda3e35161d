"""Tells, op by op, whether an output's elements of one sample are made of several samples.

Each rule is given where the inputs of an op hold samples, and tells where its output does. An op without a rule is
taken for one that does not mix: what is said of a model has to be true.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from smp_tf.partition.graph.node_def import attributes
from smp_tf.partition.graph.op_graph import Node
from smp_tf.partition.graph.op_kinds import named
from smp_tf.partition.samples.held_samples import Dimensions, Shape, broadcast, none_of, places, reshaped
from smp_tf.partition.samples.sample_rows import ELEMENTWISE

_REDUCES = "computes one number of several samples"
_SUMS = "sums over samples"
_COMPARES = "compares samples with each other"
_NORMALIZES = "normalizes over samples"
_ADDS_UP = "adds up one sample after the other"
_REORDERS = "puts samples in another order"
_SLIDES = "goes over samples as over a dimension of each"


@dataclass(frozen=True)
class Use:
    """An output of an op of a graph, and what is known of its inputs.

    Args:
        node: the op.
        shapes: the shapes of its inputs.
        held: where they hold samples.
        new: the shape of the output.
        values: what is known of the values of inputs, each a NumPy array, or None.
    """

    node: Node
    shapes: tuple[Shape, ...]
    held: tuple[Dimensions, ...]
    new: Shape
    values: Callable[[int], Any]

    def numbers(self, place: int) -> list[int] | None:
        """Returns whole numbers that an input is known to be; None where it is not known.

        Args:
            place: of the input.
        """
        value = self.values(place)
        return None if value is None else [int(number) for number in value.reshape(-1)]

    def axes(self, place: int, rank: int) -> list[int] | None:
        """Returns the dimensions that an input names, counted from the front; None where they are not known.

        Args:
            place: of the input.
            rank: how many dimensions there are.
        """
        numbers = self.numbers(place)
        return None if numbers is None else [number % rank if rank else 0 for number in numbers]

    def attribute(self, name: str) -> Any:
        """Returns an attribute of the op."""
        return attributes(self.node)[name]


@dataclass(frozen=True)
class Found:
    """What a rule tells of an output.

    Args:
        held: where it holds samples; None where that is not known.
        mixes: words for how the op mixes samples. They are "" where it does not mix them.
        picked: which samples it has taken, where these are not all.
    """

    held: Dimensions | None
    mixes: str = ""
    picked: tuple[int, ...] = ()


UNKNOWN = Found(None)


def find(use: Use) -> Found:
    """Returns what an op makes of samples.

    Args:
        use: the op, at least one of whose inputs holds samples.
    """
    rule = _RULES.get(use.node.op)
    if rule is None:
        return UNKNOWN
    try:
        return rule(use)
    except (IndexError, ValueError):
        # The op is used in a way that its rule does not know.
        return UNKNOWN


def _combined(use: Use, held: Sequence[Dimensions]) -> Found:
    """Returns what comes of inputs whose elements are combined place by place, each with as many dimensions."""
    found: Dimensions = ((),) * len(held[0])
    mixes = ""
    for one in held:
        if not places(one):
            continue
        if not places(found):
            found = one
        elif places(found).isdisjoint(places(one)):
            mixes = _COMPARES
            found = tuple(a or b for a, b in zip(found, one, strict=True))
        elif found != one:
            return UNKNOWN
    return Found(found, mixes)


def _elementwise(use: Use) -> Found:
    rank = len(use.new)
    held = list(use.held)
    if use.node.op == "Select" and len(held[0]) == 1 < rank:
        held[0] = (*held[0], *((),) * (rank - 1))
    return _combined(use, [broadcast(one, rank) for one in held])


def _reduction(use: Use) -> Found:
    rank = len(use.shapes[0])
    axes = use.axes(1, rank)
    if axes is None:
        return UNKNOWN
    mixes = _REDUCES if places(use.held[0]) & set(axes) else ""
    if len(use.new) == rank:
        return Found(tuple(() if place in axes else held for place, held in enumerate(use.held[0])), mixes)
    return Found(tuple(held for place, held in enumerate(use.held[0]) if place not in axes), mixes)


def _half_square_sum(use: Use) -> Found:
    return Found((), _REDUCES)


def _product(use: Use) -> Found:
    (one, other), rank = use.held, len(use.new)
    adjoint = use.node.op != "MatMul"
    turn_one = use.attribute("adj_x" if adjoint else "transpose_a").b
    turn_other = use.attribute("adj_y" if adjoint else "transpose_b").b
    one = (*one[:-2], one[-1], one[-2]) if turn_one else one
    other = (*other[:-2], other[-1], other[-2]) if turn_other else other
    left = broadcast((*one[:-1], ()), rank)
    right = broadcast((*other[:-2], (), other[-1]), rank)
    found = _combined(use, [left, right])
    return Found(found.held, _SUMS if one[-1] or other[-2] else found.mixes)


def _einsum(use: Use) -> Found:
    inputs, _, output = use.attribute("equation").s.decode().replace(" ", "").partition("->")
    held: list[Dimensions] = []
    is_summed = False
    for text, one in zip(inputs.split(","), use.held, strict=True):
        labels = _labels(text, len(one))
        wanted = _labels(output, len(use.new))
        by_label = dict(zip(labels, one, strict=True))
        is_summed = is_summed or any(strides and label not in wanted for label, strides in by_label.items())
        held.append(tuple(by_label.get(label, ()) for label in wanted))
    found = _combined(use, held)
    return Found(found.held, _SUMS if is_summed else found.mixes)


def _labels(text: str, rank: int) -> list[str]:
    """Returns the label of each dimension. Those of an ellipsis are numbered from the last."""
    front, dots, back = text.partition("...")
    more = rank - len(front) - len(back) if dots else 0
    return [*front, *(f"...{place}" for place in range(more, 0, -1)), *back]


def _over_last(use: Use) -> Found:
    return Found(use.held[0], _NORMALIZES if use.held[0][-1] else "")


def _sorted(use: Use) -> Found:
    return Found((*use.held[0][:-1], ()), _COMPARES if use.held[0][-1] else "")


def _along(use: Use, words: str) -> Found:
    axes = use.axes(1 if use.node.op != "Roll" else 2, len(use.new))
    if axes is None:
        return UNKNOWN
    return Found(use.held[0], words if places(use.held[0]) & set(axes) else "")


def _reshaped(use: Use) -> Found:
    return Found(reshaped(use.held[0], use.shapes[0], use.new))


def _transposed(use: Use) -> Found:
    order = use.axes(1, len(use.new))
    return UNKNOWN if order is None else Found(tuple(use.held[0][place] for place in order))


def _concatenated(use: Use) -> Found:
    axes = use.axes(len(use.held) - 1, len(use.new))
    if axes is None:
        return UNKNOWN
    values, axis = use.held[:-1], axes[0]
    if not any(held[axis] for held in values):
        return _combined(use, values)
    # Whole batches, one after the other, such as two views of each sample.
    lengths = {shape[axis] for shape in use.shapes[:-1]}
    is_alike = len(set(values)) == 1 and len(lengths) == 1 and _is_whole(values[0][axis], lengths.pop())
    return Found(values[0]) if is_alike else UNKNOWN


def _is_whole(strides: Sequence[tuple[int, int]], length: int | None) -> bool:
    """Returns whether a part of so many places has all samples, once or several times over."""
    return not strides or (length is not None and all(length % high == 0 for _, high in strides))


def _split(use: Use) -> Found:
    value, axes = (1, 0) if use.node.op == "Split" else (0, 2)
    found = use.axes(axes, len(use.new))
    if found is None or not _is_whole(use.held[value][found[0]], use.new[found[0]]):
        return UNKNOWN
    return Found(use.held[value])


def _packed(use: Use) -> Found:
    axis = int(use.attribute("axis").i) % len(use.new)
    return _combined(use, [(*held[:axis], (), *held[axis:]) for held in use.held])


def _unpacked(use: Use) -> Found:
    axis = int(use.attribute("axis").i) % len(use.held[0])
    if use.held[0][axis]:
        return UNKNOWN
    return Found((*use.held[0][:axis], *use.held[0][axis + 1 :]))


def _strided_slice(use: Use) -> Found:
    begin, end, by = (use.numbers(place) for place in (1, 2, 3))
    if begin is None or end is None or by is None:
        return UNKNOWN
    names = ("begin", "end", "ellipsis", "new_axis", "shrink_axis")
    masks = {name: int(use.attribute(f"{name}_mask").i) for name in names}
    added = masks["new_axis"].bit_count()
    left = len(use.shapes[0]) - (len(by) - added - (1 if masks["ellipsis"] else 0))
    found: list[Any] = []
    picked: list[int] = []
    place, mixes = 0, ""
    for number in range(len(by)):
        bit = 1 << number
        if masks["ellipsis"] & bit:
            found += use.held[0][place : place + left]
            place += left
        elif masks["new_axis"] & bit:
            found.append(())
        else:
            strides, length = use.held[0][place], use.shapes[0][place]
            first = 0 if masks["begin"] & bit else begin[number]
            last = length if masks["end"] & bit else end[number]
            is_one = bool(masks["shrink_axis"] & bit)
            if is_one and strides:
                picked += [place, first]
            elif strides and by[number] == -1 and masks["begin"] & masks["end"] & bit:
                mixes = _REORDERS
            elif strides and not _takes_whole(strides, length, first, last, by[number]):
                if length is None:
                    return UNKNOWN
                picked += [place, first, length if last is None else last, by[number]]
                strides = ()
            found += [] if is_one else [strides]
            place += 1
    return Found((*found, *use.held[0][place:]), mixes, tuple(picked))


def _takes_whole(strides: Sequence[tuple[int, int]], length: int | None, first: int, last: int | None, by: int) -> bool:
    """Returns whether a slice takes all samples, in order."""
    if by != 1:
        return False
    if first == 0 and last == length:
        return True
    if length is None or last is None:
        return False
    first, last = (min(place + length * (place < 0), length) for place in (first, last))
    return last > first and all(first % high == 0 and last % high == 0 for _, high in strides)


def _slice(use: Use) -> Found:
    begin, size = use.numbers(1), use.numbers(2)
    if begin is None or size is None:
        return UNKNOWN
    found, picked = [], []
    for place, strides in enumerate(use.held[0]):
        length, first, many = use.shapes[0][place], begin[place], size[place]
        last = length if many == -1 else first + many
        if strides and not _takes_whole(strides, length, first, last, 1):
            if length is None:
                return UNKNOWN
            picked += [place, first, last or 0, 1]
            strides = ()
        found.append(strides)
    return Found(tuple(found), picked=tuple(picked))


def _gathered(use: Use) -> Found:
    """Returns what comes of looking up rows: those of a table by samples, or parts of each sample."""
    values, indices = use.held[:2]
    if use.attribute("batch_dims").i:
        return UNKNOWN
    if use.node.op == "ResourceGather":
        return Found((*indices, *none_of(use.new[len(indices) :])))
    axes = use.axes(2, len(use.shapes[0]))
    if axes is None:
        return UNKNOWN
    axis = axes[0]
    numbers, length = use.numbers(1), use.shapes[0][axis]
    if values[axis] and numbers is not None and len(use.shapes[1]) == 1 and sorted(numbers) == list(range(length or 0)):
        return Found(values, "" if numbers == sorted(numbers) else _REORDERS)
    if values[axis] or (places(values) and places(indices)):
        return UNKNOWN
    return Found((*values[:axis], *indices, *values[axis + 1 :]))


def _repeated(use: Use) -> Found:
    if use.node.op == "BroadcastTo":
        return Found(broadcast(use.held[0], len(use.new)))
    numbers = use.numbers(1)
    if numbers is None:
        return UNKNOWN
    is_whole = all(
        number == 1 or _is_whole(strides, length)
        for number, strides, length in zip(numbers, use.held[0], use.shapes[0], strict=True)
    )
    return Found(use.held[0]) if is_whole else UNKNOWN


def _padded(use: Use) -> Found:
    paddings = use.values(1)
    if paddings is None or any(paddings[place].any() for place in places(use.held[0])):
        return UNKNOWN
    return Found(use.held[0])


def _of_images(use: Use) -> Found:
    """Returns what comes of an op that treats each entry of the first dimension by itself."""
    value = 2 if use.node.op in _TURNED_CONVOLUTIONS else 0
    held = use.held[value]
    if any(places(other) for place, other in enumerate(use.held) if place != value):
        return UNKNOWN
    channels = 1 if use.attribute("data_format").s.startswith(b"NC") else len(held) - 1
    if channels in places(held) or len(use.new) != len(held):
        return UNKNOWN
    found = (held[0], *none_of(use.new[1:]))
    return Found(found, _SLIDES if places(held) - {0} else "")


def _batch_norm(use: Use) -> Found:
    held = use.held[0]
    channels = 1 if use.attribute("data_format").s.startswith(b"NC") else len(held) - 1
    is_mixing = use.attribute("is_training").b and bool(places(held) - {channels})
    return Found(held, _NORMALIZES if is_mixing else "")


def _one_hot(use: Use) -> Found:
    axis = int(use.attribute("axis").i) % len(use.new)
    return Found((*use.held[0][:axis], (), *use.held[0][axis:]))


def _shuffled(use: Use) -> Found:
    return Found(use.held[0], _REORDERS if use.held[0][:1] and use.held[0][0] else "")


def _squares(use: Use) -> Found:
    """Returns what comes of an op on the matrices of the last two dimensions."""
    return Found(None, _SUMS if places(use.held[0][-2:]) else "")


_TURNED_CONVOLUTIONS = named("Conv2DBackpropInput Conv3DBackpropInputV2 DepthwiseConv2dNativeBackpropInput")
_RULES: dict[str, Callable[[Use], Found]] = {
    **dict.fromkeys(ELEMENTWISE | named("BiasAdd LogicalXor BitwiseAnd BitwiseOr ApproximateEqual"), _elementwise),
    **dict.fromkeys(named("Sum Mean Max Min Prod EuclideanNorm ArgMax ArgMin All Any"), _reduction),
    "L2Loss": _half_square_sum,
    **dict.fromkeys(named("MatMul BatchMatMul BatchMatMulV2 BatchMatMulV3"), _product),
    "Einsum": _einsum,
    **dict.fromkeys(named("Softmax LogSoftmax"), _over_last),
    "TopKV2": _sorted,
    **dict.fromkeys(named("Cumsum Cumprod CumulativeLogsumexp"), lambda use: _along(use, _ADDS_UP)),
    **dict.fromkeys(named("ReverseV2 Roll"), lambda use: _along(use, _REORDERS)),
    "RandomShuffle": _shuffled,
    **dict.fromkeys(named("Reshape Squeeze ExpandDims"), _reshaped),
    "Transpose": _transposed,
    "ConcatV2": _concatenated,
    **dict.fromkeys(named("Split SplitV"), _split),
    "Pack": _packed,
    "Unpack": _unpacked,
    "StridedSlice": _strided_slice,
    "Slice": _slice,
    **dict.fromkeys(named("GatherV2 ResourceGather"), _gathered),
    **dict.fromkeys(named("Tile BroadcastTo"), _repeated),
    **dict.fromkeys(named("Pad PadV2 MirrorPad"), _padded),
    **dict.fromkeys(
        named("Conv2D Conv3D DepthwiseConv2dNative AvgPool AvgPool3D MaxPool MaxPool3D") | _TURNED_CONVOLUTIONS,
        _of_images,
    ),
    **dict.fromkeys(named("FusedBatchNorm FusedBatchNormV2 FusedBatchNormV3"), _batch_norm),
    "OneHot": _one_hot,
    **dict.fromkeys(named("Cholesky MatrixInverse MatrixSolve Qr Svd SelfAdjointEigV2"), _squares),
}
