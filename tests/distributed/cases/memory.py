"""Trains a model split over the processes, and says what memory each rank was forecast to need and what it took."""

from __future__ import annotations

import gc
import statistics
from typing import Any

import tensorflow as tf

import smp_tf as smp
from smp_tf.collectives.horovod import averaging_bytes
from smp_tf.job import runtime
from smp_tf.job.exchange import broadcast_json
from smp_tf.keras.optimizer_reports import slot_bytes_here
from smp_tf.planning import first_steps
from tests.distributed.cases.equality import make_model
from tests.distributed.memory_models import MODELS
from tests.distributed.models import ZooModel, forward_backward

# Steps before those that are measured: the first makes slots, the second is the first like all others.
WARM_UP = 2
# Which ops run at the same time differs from step to step, and so does what is there at most. It has to fit in each.
MEASURED = 5
# Of a training that keeps what it has held after the tenth.
STEPS = 14
DEVICE = "CPU:0"


def training(entry: ZooModel, net: smp.DistributedModel) -> tuple[Any, Any]:
    """Returns the step of a model, and a function that trains on a batch and returns the loss."""
    optimizer = entry.optimizer()

    @smp.step
    def step(batch: Any) -> Any:
        return forward_backward(entry, net, batch)

    @tf.function
    def train(*batch: tf.Tensor) -> tf.Tensor:
        loss, gradients = step(batch)
        sums = [g if g is None else g.accumulate() for g in gradients]
        optimizer.apply_gradients(zip(sums, net.trainable_variables, strict=True))
        return loss.reduce_mean()

    return step, train


def held_in_a_training(model: str) -> dict[str, Any]:
    """Trains for some steps, as a script does that asks for no memory.

    Args:
        model: its name among the models whose memory is measured.

    Returns:
        What of the forecast of this rank is counted, what the forecast goes by, and what was in use at most.
    """
    entry = MODELS[model]
    entry.prepare()
    step, train = training(entry, make_model(entry))
    gc.collect()
    # Of another case in this process.
    tf.config.experimental.reset_memory_stats(DEVICE)
    before = tf.config.experimental.get_memory_info(DEVICE)["current"]
    batch = [tf.raw_ops.DeepCopy(x=part) for part in entry.batch(0)]
    for _ in range(STEPS):
        float(train(*batch))
    (program,) = step._programs.values()
    counted = broadcast_json(program.expected and program.expected.counted, 0, name="what the allocator counts")
    return {
        "counted": counted[smp.mp_rank()] if counted else program.plan.forecast[smp.mp_rank()].device_bytes,
        "source": program.plan.forecast[smp.mp_rank()].source,
        "peak": tf.config.experimental.get_memory_info(DEVICE)["peak"] - before,
    }


def forecast_and_measured(model: str, profiled: bool = False) -> dict[str, Any]:
    """Trains for a few steps.

    Args:
        model: its name among the models whose memory is measured.
        profiled: whether its layers are measured before.

    Returns:
        The forecast of this rank by name, the part of it that is counted, and bytes in use between steps and at most,
        in the fullest of several steps and in the middle one, as TensorFlow's allocator counts them.
    """
    entry = MODELS[model]
    entry.prepare()
    net = make_model(entry)
    step, train = training(entry, net)
    if profiled:
        part = runtime.current().config.microbatches
        given = [values[: len(values) // part] for values in entry.batch(0)[:-1]]
        net.profile(given if len(given) > 1 else given[0])
    gc.collect()
    before = tf.config.experimental.get_memory_info(DEVICE)["current"]
    # A copy: a constant may lie in the memory of the array, which TensorFlow does not count.
    batch = [tf.raw_ops.DeepCopy(x=part) for part in entry.batch(0)]
    for _ in range(WARM_UP):
        train(*batch)
    gc.collect()
    between = tf.config.experimental.get_memory_info(DEVICE)["current"]
    peaks = []
    # In the fourth step the training says the same.
    for _ in range(MEASURED):
        tf.config.experimental.reset_memory_stats(DEVICE)
        # Its value is asked for, so that the step is done.
        float(train(*batch))
        peaks.append(tf.config.experimental.get_memory_info(DEVICE)["peak"])
    (program,) = step._programs.values()
    planned = program.plan.forecast[smp.mp_rank()]
    row = first_steps.with_slots(planned, slot_bytes_here())
    # The first rank knows it.
    counted = broadcast_json(program.expected and program.expected.counted, 0, name="what the allocator counts")
    large = (
        first_steps.counted_of(program.plan, counted, smp.mp_rank(), row.slot_bytes) if counted else row.device_bytes
    )
    return {
        "counted": large,
        "forecast": {name: getattr(row, name) for name in ("weight_bytes", "slot_bytes", "stored_bytes")},
        "copied": sum(shared.nbytes for shared in program.plan.shared if smp.mp_rank() in shared.copies),
        "source": planned.source,
        "batch": sum(part.dtype.size * part.shape.num_elements() for part in batch),
        "planned slots": planned.slot_bytes,
        "place": [smp.mp_rank(), smp.dp_rank()],
        "averaging": averaging_bytes(smp.dp_size()),
        "between": between - before,
        "peak": max(peaks) - before,
        "middle": statistics.median(peaks) - before,
    }
