"""Plans for partitions that this machine does not have, of models without storage."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from tf_keras import layers

import smp_tf as smp
from smp_tf.config.config import Config, check_config
from smp_tf.errors import ConfigError, MemoryLimitError, OfflinePlanError, PlacementError
from smp_tf.offline.cluster import Cluster, Host
from smp_tf.offline.optimizers import slots_by_name
from smp_tf.offline.plan import OfflineModel, OfflinePlan, memory_over_time, offline
from smp_tf.pipeline.planner.times_by_size import UnitTimes
from smp_tf.pipeline.programs.chunk_times import ChunkTimes
from smp_tf.pipeline.programs.simulate import simulate
from smp_tf.pipeline.run.step_tasks import edges_of, plan_program


def chain() -> tf_keras.Model:
    return tf_keras.Sequential([tf_keras.Input((8,)), *(layers.Dense(8, name=f"d{n}") for n in range(4))], name="chain")


def uneven() -> tf_keras.Model:
    sizes = (8, 64, 8, 128, 16, 8)
    return tf_keras.Sequential([tf_keras.Input((8,)), *(layers.Dense(n, name=f"d{i}") for i, n in enumerate(sizes))])


class Subclass(tf_keras.Model):
    def __init__(self) -> None:
        super().__init__(name="net")
        self.table = layers.Embedding(50, 8, name="table")
        self.head = layers.Dense(50, name="head")

    def call(self, words: Any, mask: Any, training: bool = False) -> Any:
        return {"scores": self.head(self.table(words) * mask[..., tf.newaxis])}


class NotInitialized(tf_keras.Model):
    def __init__(self) -> None:
        pass


def planned(function: Any, batch_size: int | None = None, optimizer: str = "adam", **config: Any) -> OfflinePlan:
    wanted = check_config({"partitions": 2, "microbatches": 4, **config}, "a test")
    with offline():
        return OfflineModel(function, optimizer=optimizer, batch_size=batch_size).plan(wanted)


def test_a_functional_model_is_planned_by_its_own_inputs(keras_defaults: None) -> None:
    made = planned(chain, batch_size=16)
    assert made.plan.units == {"chain/chain/d0": 0, "chain/chain/d1": 0, "chain/chain/d2": 1, "chain/chain/d3": 1}
    assert [row.weight_bytes for row in made.plan.forecast] == [2 * 4 * 72] * 2
    assert [row.slot_bytes for row in made.plan.forecast] == [2 * 2 * 4 * 72] * 2
    # A microbatch of four samples.
    assert made.plan.forecast[0].traffic.sent_forward == 4 * 8 * 4
    # And the loss, which every rank has.
    assert made.plan.forecast[1].traffic.sent_backward == 4 * 8 * 4 + 4
    assert not smp.is_initialized()


def test_a_step_is_shorter_where_ranks_of_a_host_are_faster_while_others_wait(keras_defaults: None) -> None:
    """Two stages of 4 and 8 seconds a microbatch, of which backward takes half of that alone."""
    wanted = check_config({"partitions": 2, "microbatches": 2, "optimize": "speed"}, "a test")
    times = {f"chain/chain/d{n}": (2.0, 4.0) for n in range(4)}

    def step_time(alone: tuple[float, float], hosts: int = 1) -> float:
        model = OfflineModel(chain, batch_size=16, times=lambda model, samples: UnitTimes(times, alone=alone))
        host = Host(hosts, 2 // hosts, 5e10, 8e9)
        return model.plan(wanted, cluster=Cluster((host,), 1e18, 1e18)).timeline.step_time

    with offline():
        # Three rounds of 4 + 8, whatever the link.
        assert step_time((1.0, 1.0)) == pytest.approx(36.0)
        # As in tests/pipeline/programs/test_shared_host.py, where a forward task takes 1 in place of 4.
        assert step_time((1.0, 0.5)) == pytest.approx(4 * 6.5)
        # A rank of a host of its own never waits for the other one's processors: what was measured beside others is
        # what it is taken to take.
        assert step_time((1.0, 0.5), hosts=2) == pytest.approx(36.0)


def test_a_subclass_is_planned_by_the_inputs_that_come_with_it(keras_defaults: None) -> None:
    inputs = (tf.TensorSpec([None, 6], tf.int32), np.zeros([12, 6], np.float32))
    made = planned(lambda: (Subclass(), inputs, lambda outputs: tf.reduce_sum(outputs["scores"])))
    assert made.batch_size == 12
    assert made.plan.units == {"net/net/table": 0, "net/net/head": 1}


def test_a_distributed_model_is_planned_as_it_is(keras_defaults: None) -> None:
    class Net(smp.DistributedModel):
        def __init__(self) -> None:
            super().__init__(name="net")
            self.parts = [layers.Dense(8, name=f"d{n}") for n in range(2)]

        def call(self, x: Any) -> Any:
            return self.parts[1](self.parts[0](x))

    made = planned(lambda: (Net(), np.zeros([8, 8])))
    assert made.plan.units == {"net/d0": 0, "net/d1": 1}


def test_nothing_has_storage(keras_defaults: None) -> None:
    def huge() -> tf_keras.Model:
        return tf_keras.Sequential([tf_keras.Input((2**17,)), *(layers.Dense(2**17) for _ in range(4))])

    # A quarter of a TiB of weights.
    made = planned(huge, batch_size=4, optimizer="sgd", partitions=4)
    assert sum(row.weight_bytes for row in made.plan.forecast) > 2**38
    assert [row.units for row in made.plan.forecast] == [1, 1, 1, 1]


def test_more_partitions_are_advised_on_the_ranks_that_a_cluster_has(keras_defaults: None) -> None:
    """Of 2 x 2 ranks none has memory for two layers and gradients to average, and of 4 each has it for one."""
    wanted = check_config({"partitions": 2}, "a test")
    with offline():
        model = OfflineModel(chain, batch_size=16)
        four = model.plan(dataclasses.replace(wanted, partitions=4)).plan.forecast
        host = Host(1, 4, 1e12, 1e12, memory=max(row.device_bytes for row in four), entry="host 0")
        with pytest.raises(MemoryLimitError) as raised:
            model.plan(wanted, replicas=2, cluster=Cluster((host,), 1e12, 1e12))
    first, *_, fits = str(raised.value).splitlines()
    assert first.startswith("The model does not fit: memory of host 0 is ")
    assert fits.startswith("What would fit: 4 partitions and 1 replica; or ")


@pytest.mark.parametrize(("optimizer", "slots"), [("sgd", 1.0), ("rmsprop", 1.0), ("adam", 2.0), ("Adamax", 2.0)])
def test_slots_are_those_of_the_optimizer(optimizer: str, slots: float) -> None:
    """SGD has them for momenta, also without momentum."""
    assert slots_by_name(optimizer) == slots


@pytest.mark.parametrize(
    ("pipeline", "chunks"),
    [("interleaved", 1), ("simple", 1), ("zb_h1", 1), ("zb_v", 2), ("interleaved_1f1b", 2)],
)
def test_memory_over_a_step_comes_back_to_where_it_began_and_is_as_much_as_forecast(
    keras_defaults: None, pipeline: str, chunks: int
) -> None:
    """It was the forecast's constant with the stash in equal shares: chunks of unequal size looked alike."""
    made = planned(uneven, batch_size=64, pipeline=pipeline, chunks_per_rank=chunks)
    own, constants = memory_over_time(made), []
    for row, points in zip(made.plan.forecast, own, strict=True):
        # 64 samples of 8 numbers, and a fourteenth.
        stored = row.weight_bytes + row.gradient_bytes + row.slot_bytes + 2048 + 146
        # The stage of the loss also keeps constants of its gradient.
        constants.append(points[0][1] - stored)
        assert points[0][0] == 0.0
        assert points[0][1] == points[-1][1] < max(held for _, held in points)
        assert [at for at, _ in points] == sorted(at for at, _ in points)
        assert points[-1][0] == made.timeline.step_time
    assert sorted(constants) == [0, 524]
    # By the times that the forecast goes by, estimated ones and equal ones, it is the forecast's own moment.
    placement = made.plan.placement
    shares = [made.plan.forecast[stage].time_share / placement.count(stage) for stage in placement]
    program, edges = plan_program(made.split, pipeline, made.plan.microbatches), edges_of(made.split)
    peaks = [0] * len(made.plan.forecast)
    for times in ([ChunkTimes(share, share, share) for share in shares], [ChunkTimes() for _ in shares]):
        own = memory_over_time(replace(made, timeline=simulate(program, times, edges)))
        peaks = [max(peak, *(held for _, held in points)) for peak, points in zip(peaks, own, strict=True)]
    assert peaks == [row.device_bytes for row in made.plan.forecast]


@pytest.mark.parametrize(
    ("function", "config", "error", "words"),
    [
        (lambda: 7, {}, OfflinePlanError, "must return a Keras model.*It returned an int"),
        (lambda: (chain(), 1, 2, 3), {}, OfflinePlanError, "It returned a tuple of 4"),
        (lambda: None, {}, OfflinePlanError, r"It returned None\."),
        (lambda: (), {}, OfflinePlanError, r"It returned a tuple of 0\."),
        (lambda: Subclass, {}, OfflinePlanError, r"It returned the class Subclass\."),
        (lambda: np.zeros([8, 8]), {}, OfflinePlanError, r"It returned an ndarray\."),
        (lambda: (np.zeros([8, 8]), chain()), {}, OfflinePlanError, "a tuple of 2, the first of which is an ndarray"),
        (NotInitialized, {}, OfflinePlanError, "of type NotInitialized, is not ready for use: AttributeError"),
        (lambda: (chain(), None), {}, OfflinePlanError, r"The function gave None\."),
        (lambda: (chain(), []), {}, OfflinePlanError, r"The function gave none\."),
        (lambda: (chain(), np.array([object()] * 8)), {}, OfflinePlanError, "an ndarray of object, which TensorFlow"),
        (lambda: (chain(), np.zeros([8, 8], "M8[D]")), {}, OfflinePlanError, r"an ndarray of datetime64\[D\], which"),
        (lambda: (chain(), np.zeros([8, 8]), 7), {}, OfflinePlanError, "loss must be a function .* gave an int"),
        (Subclass, {}, OfflinePlanError, "'net' does not know its inputs before it is called"),
        (chain, {}, OfflinePlanError, "batch of open size. Say how large it is"),
        (lambda: (chain(), tf.zeros([2, 8])), {}, OfflinePlanError, "a batch of 2, and 4 microbatches"),
        (lambda: (chain(), tf.zeros([8, 9])), {}, OfflinePlanError, "could not be traced with its example inputs"),
        (lambda: (chain(), tf.TensorSpec([8, None])), {}, OfflinePlanError, "open in more than its batch"),
        (lambda: (chain(), tf.zeros([8, 8])), {"partitions": 9}, PlacementError, "9"),
        (lambda: (chain(), tf.zeros([8, 8])), {"memory_limit": 100}, MemoryLimitError, "100 B"),
    ],
)  # fmt: skip
def test_what_cannot_be_planned_is_told(
    keras_defaults: None, function: Any, config: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        planned(function, **config)
    assert not smp.is_initialized()


def test_where_nothing_fits_a_number_of_microbatches_that_does_is_told(keras_defaults: None) -> None:
    def tanhs() -> tf_keras.Model:
        made = [layer for _ in range(6) for layer in (layers.Dense(32), layers.Activation("tanh"))]
        return tf_keras.Sequential([tf_keras.Input((64, 32)), *made])

    with offline():
        model = OfflineModel(tanhs, batch_size=32)

        def config(microbatches: int, limit: int | None = None) -> Config:
            return check_config({"partitions": 1, "microbatches": microbatches, "memory_limit": limit}, "a test")

        half, quarter = (model.plan(config(m)).plan.forecast[0].device_bytes for m in (2, 4))
        limit = (half + quarter) // 2
        with pytest.raises(MemoryLimitError, match=r"What would fit: .*4 microbatches; or a memory_limit of "):
            model.plan(config(1, limit))
        with pytest.raises(MemoryLimitError) as raised:
            model.plan(config(1, limit), advise=False)
        assert "would fit" not in str(raised.value)


def test_errors_of_one_bit_are_counted(keras_defaults: None) -> None:
    """As much as the weights, and the part that a replica averages."""
    assert (slots_by_name("OneBitAdam"), slots_by_name("onebitlamb")) == (2.0, 3.0)
    with offline():
        model = OfflineModel(chain, optimizer="onebitadam", batch_size=8)
        config = check_config({"partitions": 1, "gradient_compression": "1bit"}, "a test")
        rows = [model.plan(config, replicas=replicas).plan.forecast[0] for replicas in (1, 2, 4)]
    weights = rows[0].gradient_bytes
    assert [row.slot_bytes / weights for row in rows] == [2.0, 3.5, 3.25]


def test_there_is_no_optimizer_of_that_name(keras_defaults: None) -> None:
    with pytest.raises(OfflinePlanError, match="no optimizer of the name 'adman'"):
        planned(chain, batch_size=8, optimizer="adman")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("LossScaleOptimizer", "Optimizer 'LossScaleOptimizer' cannot be made of its name alone: KeyError: 'inner_opt"),
        ("tests>Fussy", "Optimizer 'tests>Fussy' cannot be made of its name alone: ValueError: I need more than that"),
        ("tests>Other", "Optimizer 'tests>Other' cannot be made of its name alone: TypeError: .* 'rate'"),
        ("tests>Layer", "'tests>Layer' must be an optimizer. It is an Own"),
        ("Optimizer", "tf.keras.optimizers has no optimizer of the name 'Optimizer'"),
        ("adam ", "tf.keras.optimizers has no optimizer of the name 'adam '. Did you mean 'adam'?"),
    ],
)
def test_why_there_is_no_optimizer_is_told(name: str, words: str) -> None:
    """It was said that there was none of that name, whatever was wrong with it; or there was a traceback."""

    class Fussy(tf_keras.optimizers.SGD):
        def __init__(self, **options: Any) -> None:
            raise ValueError("I need more than that\nmuch more")

    class Other(tf_keras.optimizers.SGD):
        def __init__(self, rate: float, **options: Any) -> None:
            super().__init__(rate, **options)

    class Own(layers.Layer):
        pass

    known = {"tests>Fussy": Fussy, "tests>Other": Other, "tests>Layer": Own}
    with tf_keras.saving.custom_object_scope(known), pytest.raises(OfflinePlanError, match=words):
        slots_by_name(name)


def test_optimizers_that_keras_does_not_make_by_name_are_found() -> None:
    """A row, a column and a matrix; Lion has one slot."""
    assert slots_by_name("adafactor") == pytest.approx(1.0, abs=0.1)
    assert slots_by_name("Lion") == 1.0


def test_one_bit_compression_is_refused_beside_what_a_training_refuses_it(keras_defaults: None) -> None:
    """`smp-tf plan` made a plan that `smp.init` would not run."""
    wanted = {"partitions": 2, "gradient_compression": "1bit", "shard_optimizer_state": True}
    config = check_config(wanted, "a test")
    with offline():
        model = OfflineModel(chain, optimizer="onebitadam", batch_size=8)
        with pytest.raises(ConfigError, match="shard_optimizer_state is true"):
            model.plan(config, replicas=2)
        # With one replica nothing is sent, nor are there others to share slots with.
        assert model.plan(config).plan.stages == 2
