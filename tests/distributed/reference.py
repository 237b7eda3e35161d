"""What one process gives: every model trained by plain Keras, microbatch after microbatch.

    python -m tests.distributed.reference tests.distributed.models FOLDER '[["mlp", 1], ["mlp", 4], ...]' [as-written]

For each pair of model and number of microbatches it writes `FOLDER/mlp-4.npz`: losses, the
weights before and after, and predictions on the first batch after training. In place of a number,
"fit" is what Keras's own loop gives, where the zoo says how. With "as-written" TensorFlow leaves the graphs
as they are. smp_tf is never imported. One step
takes the microbatches in order, accumulates sum(d_i * g_i) / sum(d_i) over microbatches of d_i
samples, and applies once.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import tensorflow as tf
import tf_keras

from tests.distributed.comparison import DONE
from tests.distributed.models import STEPS, Batch, ZooModel, forward_backward
from tests.graphs_as_written import graphs_as_written


def microbatches_of(batch: Batch, count: int, replicas: int = 1) -> list[Batch]:
    """Cuts a batch into parts whose sizes differ by at most one; first into those of the replicas, if there are any."""
    if replicas > 1:
        return [part for share in microbatches_of(batch, replicas) for part in microbatches_of(share, count)]
    parts = [np.array_split(array, count) for array in batch]
    return list(zip(*parts, strict=True))


def weighted_mean(values: Sequence[Any], weights: Sequence[int]) -> Any:
    """Returns sum(w * v) / sum(w); IndexedSlices stay sparse, None stays None."""
    if values[0] is None:
        return None
    total = sum(weights)
    if isinstance(values[0], tf.IndexedSlices):
        scaled = [v.values * tf.constant(w / total, v.dtype) for v, w in zip(values, weights, strict=True)]
        indices = tf.concat([v.indices for v in values], 0)
        return tf.IndexedSlices(tf.concat(scaled, 0), indices, values[0].dense_shape)
    if len(set(weights)) == 1:  # so for most batches, and of ResNet50's gradients every pass takes its time
        return tf.add_n(values) / tf.cast(len(values), values[0].dtype) if len(values) > 1 else values[0]
    terms = [v * tf.cast(w, v.dtype) for v, w in zip(values, weights, strict=True)]
    return tf.add_n(terms) / tf.cast(total, values[0].dtype)


def train(
    entry: ZooModel, counts: Sequence[int], replicas: int = 1, steps: int = STEPS
) -> dict[int, dict[str, np.ndarray]]:
    """Trains one model once per number of microbatches, from the same initial weights.

    Args:
        entry: the model.
        counts: numbers of microbatches.
        replicas: how many cut their share of a batch into that many.
        steps: optimizer steps.

    Returns:
        Per number of microbatches: `losses`, `initial_<i>` and `final_<i>` for the i-th of the
        model's variables, `predictions` (`predictions_<i>` for the i-th output).
    """
    entry.prepare()
    model = entry.build(tf_keras.Model)
    batch = entry.batch(0)
    # One trace for all sizes of microbatches.
    signature = [tf.TensorSpec((None, *a.shape[1:]), a.dtype) for a in batch]
    body = tf.function(lambda *microbatch: forward_backward(entry, model, microbatch), input_signature=signature)
    body.get_concrete_function()  # makes the variables
    initial = [v.numpy() for v in model.variables]
    results = {}
    for count in counts:
        for variable, value in zip(model.variables, initial, strict=True):
            variable.assign(value)
        optimizer = entry.optimizer()
        losses = []
        for step in range(steps):
            parts = microbatches_of(entry.batch(step), count, replicas)
            sizes = [len(part[0]) for part in parts]
            told = [body(*map(tf.constant, part)) for part in parts]
            losses.append(weighted_mean([loss for loss, _ in told], sizes).numpy())
            gradients = [weighted_mean(values, sizes) for values in zip(*(g for _, g in told), strict=True)]
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        # By microbatches too: a model may mix the samples of its batch.
        told = []
        for part in microbatches_of(batch[: len(batch) // 2], count):
            told.append(entry.predict(model, list(map(tf.constant, part))))
        outputs = zip(*map(tf.nest.flatten, told), strict=True)
        predictions = [tf.concat(values, axis=0) for values in outputs]
        results[count] = {
            "losses": np.array(losses),
            "names": np.array([v.name for v in model.variables]),
            **{f"initial_{i}": value for i, value in enumerate(initial)},
            **{f"final_{i}": v.numpy() for i, v in enumerate(model.variables)},
            **{f"predictions_{i}": tf.cast(value, tf.float64).numpy() for i, value in enumerate(predictions)},
        }
    return results


def main() -> None:
    zoo, folder, wanted = importlib.import_module(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3])
    with graphs_as_written() if "as-written" in sys.argv[4:] else nullcontext():
        write(zoo, folder, wanted)


def write(zoo: ModuleType, folder: Path, wanted: Sequence[tuple[str, Any]]) -> None:
    """Trains what is wanted, and says of each model when its files are there."""
    for name in dict.fromkeys(name for name, _ in wanted):
        counts = [count for other, count in wanted if other == name]
        if "fit" in counts:
            counts.remove("fit")
            np.savez(folder / f"{name}-fit.npz", **zoo.fitted(name, lambda entry: entry.build(tf_keras.Model)))
        for count, arrays in train(zoo.MODELS[name], counts).items() if counts else ():
            np.savez(folder / f"{name}-{count}.npz", **arrays)
        print(f"{DONE}{name} for M in {counts}", flush=True)


if __name__ == "__main__":
    main()
