"""Compares the forecast of a step from measured times with the step: run it on the ranks of one replica.

    horovodrun -np 2 python benchmarks/forecast.py --models gpt,mlp,convolutions,bert

Each repetition measures the units of the model, as `model.profile` does, and then the step. So whatever slows the
machine for a while slows both. The step is forward, backward, the sums over the microbatches and the update of the
weights. With `--optimizer none` the update is left out of both. A ratio above 1 says that the step was forecast too
slow. Where other programs take the processors now and then, look at "least disturbed". It is the forecast from the
shortest time of each unit over the shortest median of steps, of all repetitions.

With `-np 4 --partitions 2` two replicas train, and the step averages gradients. The forecast then includes these
averages. It takes the speed that every plan has for links between processes of one host, in a job and offline.

The forecast is that of `smp-tf plan`, which simulates the schedule. Each task takes the sum of its stage's units, and
less while the other rank waits. "always beside" is the forecast if it did not take less.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import smp_tf as smp  # isort: split

import numpy as np
import tensorflow as tf
import tf_keras
from harness.machine import circumstances
from harness.options import new_file, some_of
from harness.report import paired, spread, with_quartiles
from models import gpt
from rich.console import Console
from rich.table import Table
from tf_keras import layers

from smp_tf.collectives.horovod import sum_wait
from smp_tf.job import runtime
from smp_tf.job.exchange import allgather_json
from smp_tf.keras.optimizer_trials import slots_of
from smp_tf.model import measurement, profiling
from smp_tf.partition.units.cost import estimate
from smp_tf.pipeline.measure.profile import make_ready
from smp_tf.pipeline.planner.cut import cut_into_units
from smp_tf.pipeline.planner.request import Aim, Course, Once, PlacementRequest, Storage
from smp_tf.pipeline.planner.timeline import timeline_of
from smp_tf.pipeline.planner.times_by_size import UnitTimes
from smp_tf.pipeline.planner.units import costs_of
from smp_tf.pipeline.programs.kinds import KINDS, Phase


@dataclass(frozen=True)
class Example:
    """A model to forecast.

    Args:
        build: makes the model.
        batch: makes a batch, which the model is called with.
        loss: takes the loss of what the model returns.
    """

    build: Callable[[], Any]
    batch: Callable[[], list[np.ndarray]]
    loss: Callable[[Any], tf.Tensor]


def mean_of_squares(outputs: Any) -> tf.Tensor:
    return tf.reduce_mean(tf.square(getattr(outputs, "logits", outputs)))


def _words(batch: int, length: int, vocabulary: int) -> Callable[[], list[np.ndarray]]:
    return lambda: [np.random.default_rng(1).integers(0, vocabulary, (batch, length)).astype(np.int32)]


def _numbers(*shape: int) -> Callable[[], list[np.ndarray]]:
    return lambda: [np.random.default_rng(1).normal(size=shape).astype(np.float32)]


def _perceptron() -> Any:
    class Perceptron(smp.DistributedModel):
        def __init__(self) -> None:
            super().__init__()
            self.parts = [layers.Dense(1024, activation="relu") for _ in range(6)]

        def call(self, x: tf.Tensor) -> tf.Tensor:
            for part in self.parts:
                x = part(x)
            return x

    return Perceptron()


def _convolutions() -> Any:
    class Convolutions(smp.DistributedModel):
        def __init__(self) -> None:
            super().__init__()
            self.first = layers.Conv2D(32, 3, padding="same")
            self.parts = [layers.Conv2D(32, 3, padding="same") for _ in range(6)]
            self.norms = [layers.BatchNormalization() for _ in range(6)]
            self.head = layers.Dense(10)

        def call(self, x: tf.Tensor, training: bool = False) -> tf.Tensor:
            x = self.first(x)
            for part, norm in zip(self.parts, self.norms, strict=True):
                x = x + tf.nn.relu(norm(part(x), training=training))
            return self.head(tf.reduce_mean(x, [1, 2]))

    return Convolutions()


def _bert() -> Any:
    import transformers

    config = transformers.BertConfig(
        hidden_size=256, num_hidden_layers=4, num_attention_heads=4, intermediate_size=1024, vocab_size=4000
    )
    return smp.DistributedModel(lambda: transformers.TFBertForMaskedLM(config))


MODELS = {
    "gpt": Example(lambda: gpt.build(smp.DistributedModel, gpt.SIZES["small"]), _words(32, 64, 1000), mean_of_squares),
    "gpt-medium": Example(
        lambda: gpt.build(smp.DistributedModel, gpt.SIZES["medium"]), _words(32, 128, 4000), mean_of_squares
    ),
    "mlp": Example(_perceptron, _numbers(1024, 1024), mean_of_squares),
    "convolutions": Example(_convolutions, _numbers(32, 32, 32, 3), mean_of_squares),
    "bert": Example(_bert, _words(32, 64, 4000), mean_of_squares),
}


class Forecast:
    """One model: its step, and what is needed to forecast it.

    Args:
        example: the model.
        microbatches: parts of a batch.
        optimizer: name of what updates the weights; "none": nothing does.
    """

    def __init__(self, example: Example, microbatches: int, optimizer: str) -> None:
        self.updater = None if optimizer == "none" else tf_keras.optimizers.get(optimizer)
        self.model = example.build()
        self.batch = [tf.constant(part) for part in example.batch()]
        samples = len(self.batch[0]) // microbatches
        self.part = [tensor[:samples] for tensor in self.batch]
        self.samples = samples
        options = {"training": True} if profiling.takes_training(self.model) else {}
        self.traced = profiling.forward_backward(self.model, example.loss).trace(*self.part, **options)
        self.units, cut = cut_into_units(self.traced.graph)
        costs = estimate(self.traced.graph, self.units, unknown=self.samples)
        self.shares = measurement.shares(costs, range(len(costs.units)), smp.size())
        around = profiling.surroundings(self.traced, self.part)
        # All at once, so that a repetition takes as long as measuring does.
        self.ready = [make_ready(cut, unit, around) for unit in self.shares[smp.rank()]]

        @smp.step
        def step(*inputs: tf.Tensor) -> Any:
            with tf.GradientTape() as tape:
                loss = example.loss(self.model(*inputs, **options))
            return tape.gradient(loss, self.model.trainable_variables), loss

        @tf.function
        def train(*inputs: tf.Tensor) -> Any:
            gradients, loss = step(*inputs)
            pairs = zip(gradients, self.model.trainable_variables, strict=True)
            sums, trained = zip(*((g.accumulate(), v) for g, v in pairs if g is not None), strict=True)
            if self.updater is not None:
                self.updater.apply_gradients(zip(sums, trained, strict=True))
            made = [total.values if isinstance(total, tf.IndexedSlices) else total for total in sums]
            # Only the rank that stores a weight has its gradient.
            with tf.control_dependencies([total for total in made if total is not None]):
                return tf.identity(loss.reduce_mean())

        self.step, self.train = step, train

    def measure(self) -> measurement.Measurement:
        """Returns what `model.profile` measures."""
        names = [self.units[index].name for index in self.shares[smp.rank()]]
        return measurement.measure_in_rounds(
            "the benchmark's units", names, self.ready.__getitem__, max(map(len, self.shares))
        )

    def steps(self, seconds: float) -> float:
        """Returns the seconds of a step: the median over many, each timed from its start to the next one's."""
        taken: list[float] = []
        count = 1
        while len(taken) < count:
            began = time.perf_counter()
            self.train(*self.batch).numpy()
            taken.append(time.perf_counter() - began)
            if len(taken) == 1:
                self.train(*self.batch)
                count = max(allgather_json(max(5, round(seconds / taken[0])), name="the number of steps"))
        return max(allgather_json(statistics.median(taken), name="the benchmark's steps"))

    def step_time(self, found: measurement.Measurement, always_beside: bool = False) -> float:
        """Returns the forecast of a step, in seconds."""
        [program] = self.step._programs.values()
        plan, split = program.plan, program.stage_program.split
        config = runtime.current().config
        slots = 0.0 if self.updater is None else slots_of(self.updater) or 0.0
        request = PlacementRequest(
            Course(config.pipeline, plan.stages, plan.microbatches, self.samples),
            Storage(slots, replicas=runtime.current().topology.replicas),
            Aim(config.optimize, config.balance_tolerance),
            UnitTimes(found.times, alone=(1.0, 1.0) if always_beside else found.alone),
            once=Once(config.check_inputs, sum_wait=sum_wait()),
        )
        timeline = timeline_of(plan, *costs_of(self.traced.graph, request), split, request)
        if self.updater is not None:
            return timeline.step_time
        return max(span.end for own in timeline.spans for span in own if KINDS[span.task.kind].phase is Phase.STEP)


def measure(name: str, given: argparse.Namespace) -> dict[str, Any]:
    """Measures one model, and returns its figures."""
    forecast = Forecast(MODELS[name], given.microbatches, given.optimizer)
    # The first step is planned with these.
    first = forecast.measure()
    forecast.model._smp_store.measured = {
        unit: (ahead / forecast.samples, back / forecast.samples) for unit, (ahead, back) in first.times.items()
    }
    rows: dict[str, list[float]] = {"step": [], "forecast": [], "beside": []}
    forecast.steps(0.1)
    all_found: list[measurement.Measurement] = []
    for _ in range(given.repetitions):
        all_found.append(forecast.measure())
        rows["forecast"].append(forecast.step_time(all_found[-1]))
        rows["beside"].append(forecast.step_time(all_found[-1], always_beside=True))
        rows["step"].append(forecast.steps(given.turn))
    shares = [statistics.median(found.alone[sweep] for found in all_found) for sweep in (0, 1)]
    times = [found.times for found in all_found]
    shortest = {name: (min(each[name][0] for each in times), min(each[name][1] for each in times)) for name in times[0]}
    least = measurement.Measurement(shortest, (shares[0], shares[1]))
    return {
        "seconds": {what: spread(values) for what, values in rows.items()},
        "ratio": paired(rows["forecast"], rows["step"]),
        "ratio_beside": paired(rows["beside"], rows["step"]),
        "alone": shares,
        "ratio_least": forecast.step_time(least) / min(rows["step"]),
    }


def print_table(found: dict[str, Any], given: argparse.Namespace) -> None:
    table = Table(title=f"{smp.size()} ranks, {given.microbatches} microbatches: medians (quartiles)")
    for column in ("model", "step, ms", "forecast, ms", "forecast / step", "always beside", "least disturbed", "alone"):
        table.add_column(column, justify="left" if column == "model" else "right", no_wrap=True)
    for name, figures in found.items():
        cells = [f"{1e3 * figures['seconds'][what]['median']:,.1f}" for what in ("step", "forecast")]
        for what in ("ratio", "ratio_beside"):
            cells.append(with_quartiles(figures[what]))
        shares = " ".join(f"{share:.2f}" for share in figures["alone"])
        table.add_row(name, *cells, f"{figures['ratio_least']:.2f}", shares)
    Console(width=110).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--models", type=some_of(MODELS, "models"), default=",".join(MODELS), help=f"from {', '.join(MODELS)}"
    )
    parser.add_argument("--repetitions", type=int, default=5, help="of every model")
    parser.add_argument("--partitions", type=int, help="stages of a replica (default: all processes)")
    parser.add_argument("--microbatches", type=int, default=4, help="parts a batch is cut into")
    parser.add_argument("--optimizer", default="adam", help='of the updates, by its name in Keras, or "none"')
    parser.add_argument("--turn", type=float, default=2.0, help="seconds of steps in a repetition, about")
    parser.add_argument("--json", type=new_file, help="file to write all measurements to")
    given = parser.parse_args()
    partitions = {"partitions": given.partitions} if given.partitions is not None else {}
    smp.init({"microbatches": given.microbatches, "optimize": "speed", "seed": 1, **partitions})
    before = circumstances(given)
    found = {}
    for name in given.models:
        found[name] = measure(name, given)
        if smp.rank() == 0:
            print_table(found, given)
    if smp.rank() == 0 and given.json:
        given.json.write_text(json.dumps({**before, "models": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
