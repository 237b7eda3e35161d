"""Takes this replica's share of a data set that is written for all of them.

batches of the data set     0 1 2 3 4 | 5 6 7 8 9 | ...        3 replicas
replica 0                   0 1       | 5 6       | ...        together they have, step by step, the batches of the
replica 1                       2 3   |     7 8   | ...        data set: what one process would be given
replica 2                           4 |         9 | ...
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from smp_tf.batch.microbatches import count_samples, cut_out, sizes_of
from smp_tf.job import runtime

#: Older versions of TensorFlow have no public name for this type.
_NONE = type(tf.type_spec_from_value(None))
_SPECS = (tf.TensorSpec, tf.RaggedTensorSpec, tf.SparseTensorSpec)


def shard_dataset(dataset: tf.data.Dataset, *, batched: bool = True) -> tf.data.Dataset:
    """Returns this replica's share of a data set that holds the batches of all replicas.

    Every batch is cut along axis 0 into one part per replica, in the replicas' order. Their sizes differ by at most
    one. So the replicas' batches together are the batches of the data set, and the training is that of one process on
    it. All ranks call this on the same data set, shuffled with the common seed. The ranks of a replica get equal
    shares.

    Args:
        dataset: the data set of all replicas. Its elements are batches: tensors, ragged or sparse tensors, in any
            structure, with the samples along axis 0.
        batched: False where elements are single samples. Then replica r of D gets samples r, r + D, r + 2 D and so on,
            to be batched afterwards. All replicas get the same number. The last samples, fewer than D, are left out.

    Returns:
        The share. With one replica it is the data set itself.

    Raises:
        TypeError: the argument is no tf.data.Dataset, or holds something that cannot be cut.
        ValueError: its elements cannot be batches, or have fewer samples than there are replicas. Where the size of a
            batch is known only when it comes, it is an InvalidArgumentError instead.

    Example:
        >>> dataset = tf.data.Dataset.from_tensor_slices((images, labels)).shuffle(10_000).batch(128)
        >>> for x, y in smp.shard_dataset(dataset):  # of 64 samples, with two replicas
        ...     train(x, y)
    """
    topology = runtime.current().topology
    if not isinstance(dataset, tf.data.Dataset):
        raise TypeError(f"smp.shard_dataset takes a tf.data.Dataset. Received: {type(dataset).__name__}.")
    replicas, replica = topology.replicas, topology.replica
    if replicas == 1:
        return dataset
    if not batched:
        return _samples(dataset, replicas, replica)
    batch = _batch_size(dataset.element_spec, replicas)

    def part(*element: Any) -> Any:
        # A tuple is passed as several arguments, anything else as one.
        given = element if isinstance(dataset.element_spec, tuple) else element[0]
        start, size = _static_part(batch, replicas, replica) if batch else _part(given, replicas, replica)
        return tf.nest.map_structure(lambda value: None if value is None else cut_out(value, 0, start, size), given)

    return dataset.map(part)


def _samples(dataset: tf.data.Dataset, replicas: int, replica: int) -> tf.data.Dataset:
    """Returns every D-th sample, the same number of them for all replicas."""
    count = int(dataset.cardinality())
    if count == tf.data.INFINITE_CARDINALITY:
        return dataset.shard(replicas, replica)
    if count != tf.data.UNKNOWN_CARDINALITY:
        return dataset.take(count - count % replicas).shard(replicas, replica)

    def own(*windows: Any) -> tf.data.Dataset:
        samples = windows[0] if len(windows) == 1 else windows
        together = samples if isinstance(samples, tf.data.Dataset) else tf.data.Dataset.zip(samples)
        return together.skip(replica).take(1)

    # Samples may have any shapes, so they could not be batched.
    return dataset.window(replicas, drop_remainder=True).flat_map(own)


def _batch_size(element: Any, replicas: int) -> int | None:
    """Returns the number of samples in every batch; None where it is unknown.

    Raises:
        TypeError: an element holds something that cannot be cut.
        ValueError: an element cannot be a batch, or is too small for the replicas.
    """
    sizes: dict[str, int] = {}
    specs = tf.nest.flatten(element)
    for number, spec in enumerate(specs, start=1):
        name = "its element" if len(specs) == 1 else f"tensor {number} of {len(specs)}"
        if isinstance(spec, _NONE):
            continue
        if not isinstance(spec, _SPECS):
            raise TypeError(
                f"smp.shard_dataset cuts tensors, ragged and sparse tensors. In this data set, {name} is a "
                f"{type(spec).__name__.removesuffix('Spec')}."
            )
        if spec.shape.rank == 0:
            raise ValueError(
                f"smp.shard_dataset takes a data set of batches. In this one, {name} is a scalar, so its elements are "
                f"samples: call dataset.batch(...) first, with the batch of all replicas, or "
                f"smp.shard_dataset(dataset, batched=False)."
            )
        if spec.shape.rank is not None and spec.shape[0] is not None:
            sizes[name] = spec.shape[0]
    if len(set(sizes.values())) > 1:
        listed = ", ".join(f"{name} has {size}" for name, size in sizes.items())
        raise ValueError(
            f"smp.shard_dataset takes a data set of batches, whose tensors have the same number of samples along axis "
            f"0. In this one, {listed}. If its elements are samples, call dataset.batch(...) first, or "
            f"smp.shard_dataset(dataset, batched=False)."
        )
    batch = next(iter(sizes.values()), None)
    if batch is not None and batch < replicas:
        raise ValueError(
            f"The batches of this data set have {batch} samples, too few for {replicas} replicas. Use batches of at "
            f"least {replicas} samples: the batch that is cut is that of all replicas."
        )
    return batch


def _static_part(batch: int, replicas: int, replica: int) -> tuple[int, int]:
    sizes = sizes_of(batch, replicas)
    return sum(sizes[:replica]), sizes[replica]


def _part(element: Any, replicas: int, replica: int) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the start and the size of a replica's part of a batch whose size is known only when it comes."""
    counts = [count_samples(value, 0) for value in tf.nest.flatten(element) if value is not None]
    checks = [
        tf.debugging.assert_equal(
            count, counts[0], message="smp.shard_dataset: the tensors of a batch need the same number of samples."
        )
        for count in counts[1:]
    ]
    checks.append(
        tf.debugging.assert_greater_equal(
            counts[0],
            tf.constant(replicas, tf.int64),
            message=f"smp.shard_dataset: a batch has fewer samples than there are replicas, {replicas}, so one would "
            f"have none. It is the last one, perhaps: leave it out with dataset.batch(n, drop_remainder=True), or "
            f"choose another batch size.",
        )
    )
    with tf.control_dependencies([check for check in checks if check is not None]):
        quotient, remainder = counts[0] // replicas, counts[0] % replicas
    number = tf.constant(replica, tf.int64)
    return number * quotient + tf.minimum(number, remainder), quotient + tf.cast(number < remainder, tf.int64)
