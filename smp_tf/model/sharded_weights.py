"""The list that `get_weights` returns. Every rank holds its own part. An element is fetched when it is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np
import tensorflow as tf

from smp_tf.errors import StepError
from smp_tf.job import runtime
from smp_tf.job.channel import tag_of
from smp_tf.keras import adapter
from smp_tf.partition.layout import Layout
from smp_tf.partition.mesh import CommGroup
from smp_tf.variables import assigned_values, fetch, foreign_values, precedence
from smp_tf.variables.models import SplitModel


@dataclass(frozen=True)
class Shard:
    """One weight in the list.

    Args:
        name: the variable's name.
        layout: of the variable whose value it is; on no stage where every rank has it.
        shape: of the value.
        dtype: of the value.
        value: the value, where this rank has it.
    """

    name: str
    layout: Layout
    shape: tf.TensorShape
    dtype: tf.DType
    value: np.ndarray | None


class ShardedWeights(Sequence[np.ndarray]):
    """The weights of a split model at one moment. `model.set_weights` takes them back without gathering them.

    Asking for an element, or iterating over all of them, is collective. All ranks of the replica must do it, and each
    gets the element. `local` needs no other rank.

    Args:
        shards: the weights, in the order of `model.weights`.

    Example:
        >>> best = model.get_weights()      # nothing is sent
        >>> model.set_weights(best)         # nothing is sent
        >>> kernel = best[0]                # on all ranks: an array
    """

    def __init__(self, shards: Sequence[Shard]) -> None:
        self.shards = tuple(shards)

    def __len__(self) -> int:
        return len(self.shards)

    def __repr__(self) -> str:
        here = sum(shard.value is not None for shard in self.shards)
        return f"<ShardedWeights of {len(self.shards)} weights, {here} of them on this rank>"

    @property
    def local(self) -> dict[int, np.ndarray]:
        """Returns the values that this rank has, by their position in the list."""
        return {number: shard.value for number, shard in enumerate(self.shards) if shard.value is not None}

    @overload
    def __getitem__(self, index: int) -> np.ndarray: ...

    @overload
    def __getitem__(self, index: slice) -> list[np.ndarray]: ...

    def __getitem__(self, index: int | slice) -> np.ndarray | list[np.ndarray]:
        if isinstance(index, slice):
            return [self._fetch(shard) for shard in self.shards[index]]
        return self._fetch(self.shards[index])

    def _fetch(self, shard: Shard) -> np.ndarray:
        if shard.layout.stage is None:
            assert shard.value is not None, "every rank has it"
            return shard.value
        topology = runtime.current().topology
        ranks = topology.members(CommGroup.PP_GROUP)
        fetch.meet(f"reading weight {shard.name!r} of a list of sharded weights")
        return fetch.told_by(ranks[shard.layout.stage], ranks, shard, lambda: shard.value)


_MOVED = tag_of("moved weight")


def get_weights(model: SplitModel) -> ShardedWeights:
    """Returns the present weights of a model, for `DistributedModel.get_weights`.

    Args:
        model: a distributed model whose variables are placed.

    Raises:
        StepError: the model has not run a step yet, nor was it placed.
    """
    return ShardedWeights([shard for weight in model.weights for shard in _shards(model, weight)])


def _shards(model: SplitModel, weight: Any) -> list[Shard]:
    if adapter.layers().is_variable(weight):
        return [_shard(model, weight)]
    name = type(weight).__name__
    return [Shard(name, Layout(), one.shape, one.dtype, np.array(one.numpy())) for one in weight.get_tensors()]


def _shard(model: SplitModel, variable: Any) -> Shard:
    layout = model._layout_of(variable)
    value = np.array(variable.numpy()) if layout.is_here(runtime.current().topology.place) else None
    return Shard(variable.name, layout, variable.shape, variable.dtype, value)


def set_weights(model: SplitModel, weights: Sequence[Any]) -> None:
    """Gives a model other weights, for `DistributedModel.set_weights`.

    Args:
        model: a distributed model.
        weights: the result of `get_weights`, or one array for each weight.

    Raises:
        ValueError: the number of weights or the shape of one is not that of the model.
        StepError: the model has no weights yet, or it is given sharded ones and has not run a step yet.
    """
    if not model._smp_keras_model.built:
        raise StepError(
            f"Model {model.name!r} makes its weights when it is first called, so it has none to set yet. Call "
            f"model.build(input_shape) before, or set them after the first step."
        )
    count = sum(map(adapter.layers().values_in_list, model.weights))
    if count != len(weights):
        raise ValueError(f"Model {model.name!r} has {count} weights. Received: a list of {len(weights)} weights.")
    shards = weights.shards if isinstance(weights, ShardedWeights) else None
    targets, handlers, number = {}, [], 0
    for weight in model.weights:
        if adapter.layers().is_variable(weight):
            targets[number] = weight
            _require_shape(number, weight, shards[number].shape if shards else np.shape(weights[number]))
        else:
            handlers.append((weight, weights[number : number + adapter.layers().values_in_list(weight)]))
        number += adapter.layers().values_in_list(weight)
    for handler, values in handlers:
        handler.set_weights(values)
    if shards is not None:
        for number, variable in targets.items():
            _take(model, variable, shards[number])
        return
    with foreign_values.left_out(), precedence.noting(targets.values()):
        for number, variable in targets.items():
            variable.assign(weights[number])


def _require_shape(number: int, variable: Any, shape: Any) -> None:
    if not variable.shape.is_compatible_with(shape):
        raise ValueError(
            f"Weight {number}, {variable.name!r}, has shape {tuple(variable.shape)}. Received: a value of shape "
            f"{tuple(shape)}."
        )


def _take(model: SplitModel, variable: Any, shard: Shard) -> None:
    """Assigns one weight. It is sent only where the rank that has it is not the one that stores the variable."""
    there, here = shard.layout, model._layout_of(variable)
    topology = runtime.current().topology
    ranks, place = topology.members(CommGroup.PP_GROUP), topology.place
    if here.stage is None and there.stage is not None:
        raise StepError(
            f"Weight {variable.name!r} is on every rank, and the one it is to get, {shard.name!r}, is on partition "
            f"{there.stage} alone. Give set_weights a list of arrays."
        )
    if there.stage in (None, here.stage):
        if here.is_here(place):
            with assigned_values.unnoted():
                variable.assign(shard.value)
    elif there.is_here(place):
        assert here.stage is not None
        fetch.transport().send_bytes(ranks[here.stage], _MOVED, fetch.as_bytes(shard.value))
    elif here.is_here(place):
        assert there.stage is not None
        value = fetch.as_array(fetch.transport().recv_bytes(ranks[there.stage], _MOVED), shard)
        with assigned_values.unnoted():
            variable.assign(value)
