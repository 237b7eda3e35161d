"""Plans go by what was measured of the same model, at the same or at other sizes, and of no other model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf
import tf_keras
from tf_keras import layers

from smp_tf.model.profile_cache import FORMAT, Profile, ProfileCache
from smp_tf.offline.measured_times import KnownTimes
from smp_tf.offline.plan import OfflineModel, offline
from smp_tf.pipeline.planner.times_by_size import UnitTimes
from smp_tf.pipeline.planner.units import units_of
from smp_tf.planning.kept_measurements import MeasuredHardware, subject_of, this_hardware


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, keras_defaults: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SMP_TF_PROFILES", str(tmp_path))


def net(
    image: int = 32, activation: str = "relu", stride: int = 1, policy: str = "float32", loss: Any = None
) -> Callable[[], Any]:
    """Makes a small convolutional model."""

    def build() -> Any:
        tf_keras.mixed_precision.set_global_policy(policy)
        parts = [
            tf_keras.Input((image, image, 3)),
            layers.Conv2D(4, 3, stride, "same", activation=activation, name="conv"),
            layers.GlobalAveragePooling2D(name="pool"),
            layers.Dense(5, name="dense"),
        ]
        return tf_keras.Sequential(parts, name="net"), tf.TensorSpec([None, image, image, 3]), loss

    return build


class Words(tf_keras.Model):
    """Makes its layers' variables when it is called, draws random numbers, and looks at the length of its batch."""

    def __init__(self) -> None:
        super().__init__(name="words")
        self.table = layers.Embedding(50, 8, name="table")
        self.drop = layers.Dropout(0.5, name="drop")
        self.norm = layers.BatchNormalization(name="norm")
        self.head = layers.Dense(50, name="head")

    def call(self, words: Any, training: bool = False) -> Any:
        x = self.drop(self.table(words), training=training)
        x = tf.reshape(x, [words.shape[0] * words.shape[1], 8])
        return self.head(self.norm(x, training=training))


def words(length: int = 6) -> Callable[[], Any]:
    return lambda: (Words(), tf.TensorSpec([None, length], tf.int32))


def keep(function: Callable[[], Any], sizes: Sequence[int], seconds: float = 1.0, **hardware: Any) -> dict[str, Any]:
    """Keeps made-up times of a model for microbatches of some sizes; returns those of one sample."""
    with offline():
        model = OfflineModel(function, batch_size=64)
        for samples in sizes:
            graph = model.trace_of(samples).graph
            times = {unit.name: (seconds * samples, 2 * seconds * samples) for unit in units_of(graph)}
            here = dataclasses.replace(this_hardware(), **hardware)
            ProfileCache().keep(
                Profile(FORMAT, "net", subject_of(graph, samples), here, times, (1.0, 1.0 / (1 + samples)))
            )
    return {name: (seconds, 2 * seconds) for name in times}


def found(
    function: Callable[[], Any], *sizes: int, of_all_sizes: bool = False, partitions: int = 1
) -> tuple[list[UnitTimes], list[str]]:
    """What is known for microbatches of some sizes, and what was said."""
    said: list[str] = []
    with offline():
        known = KnownTimes(partitions, said.append, of_all_sizes=of_all_sizes)
        model = OfflineModel(function, batch_size=64)
        return [known(model, samples) for samples in sizes], said


def times_of(one: dict[str, Any], samples: int) -> dict[str, Any]:
    return {name: pytest.approx((samples * ahead, samples * back)) for name, (ahead, back) in one.items()}


@pytest.mark.parametrize("function", [net(), words()], ids=["net", "words"])
def test_a_model_is_found_again_for_sizes_that_were_measured_and_others(function: Callable[[], Any]) -> None:
    one = keep(function, [16, 4])
    # Other sizes are traced before the ones that were measured, and the other way round.
    of, said = found(function, 8, 4, 16, 2, 64)
    assert [dict(times.seconds) for times in of] == [times_of(one, samples) for samples in (8, 4, 16, 2, 64)]
    assert [times.sizes for times in of] == [(4, 16), (), (), (4, 16), (4, 16)]
    # What a layer gains alone is that of the nearest size.
    assert [times.alone for times in of] == [(1.0, 1 / 5), (1.0, 1 / 5), (1.0, 1 / 17), (1.0, 1 / 5), (1.0, 1 / 17)]
    where = said[0].partition(", as measured on ")[2]
    assert said == [
        f"times by those of microbatches of 4, 16 samples, as measured on {where}",
        f"times as measured on {where}",
        "microbatches of 2 samples lie outside of these sizes: their times are less certain",
        "microbatches of 64 samples lie outside of these sizes: their times are less certain",
    ]
    [of_all], _ = found(function, 4, of_all_sizes=True)
    assert (dict(of_all.seconds), of_all.sizes) == (times_of(one, 4), ())


OTHERS = {
    "image": net(image=64),
    "activation": net(activation="gelu"),
    "stride": net(stride=2),
    "policy": net(policy="mixed_bfloat16"),
    "loss": net(loss=lambda outputs: tf.reduce_sum(tf.abs(outputs))),
}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS.keys())
def test_times_of_another_model_are_not_used(other: Callable[[], Any]) -> None:
    one, _ = keep(net(), [4, 16]), keep(other, [2, 8], seconds=100.0)
    tf_keras.mixed_precision.set_global_policy("float32")
    # Their variables and layers are the same, so this is not what tells them apart.
    assert len({path.name.split("-")[1] for path in ProfileCache().folder.iterdir()}) == 1  # type: ignore[union-attr]
    [of_eight], said = found(net(), 8)
    assert dict(of_eight.seconds) == times_of(one, 8)
    assert "of 4, 16 samples" in said[0]


def test_of_two_models_measured_for_one_size_each_has_its_own_times() -> None:
    first, second = keep(words(6), [4, 16]), keep(words(12), [4, 16], seconds=100.0)
    for function, one in ((words(6), first), (words(12), second)):
        of, _ = found(function, 4, 8, of_all_sizes=True)
        assert [dict(times.seconds) for times in of] == [times_of(one, 4), times_of(one, 8)]


def test_the_model_is_traced_for_no_size_without_a_profile() -> None:
    keep(net(), [4, 16])
    keep(words(), [2])
    keep(net(), [32], tensorflow="1.0.0")
    traced = []
    with offline():
        model = OfflineModel(net(), batch_size=64)
        original = model.trace_of
        model.trace_of = lambda samples: traced.append(samples) or original(samples)  # type: ignore[method-assign,func-returns-value]
        KnownTimes(1, lambda text: None)(model, 8)
    assert sorted(traced) == [4, 8, 16]


def test_a_model_that_takes_no_microbatch_of_a_measured_size_is_another() -> None:
    def only_up_to(most: int) -> Callable[[], Any]:
        def build() -> Any:
            class Limited(tf_keras.Model):
                def __init__(self) -> None:
                    super().__init__(name="limited")
                    self.dense = layers.Dense(4, name="dense")

                def call(self, x: Any) -> Any:
                    assert x.shape[0] <= most
                    return self.dense(x)

            return Limited(), tf.TensorSpec([None, 4])

        return build

    keep(only_up_to(64), [16, 64])
    [times], said = found(only_up_to(8), 4)
    assert times == UnitTimes()
    assert said == []


def test_one_size_alone_says_nothing_of_others_and_where_it_was_measured_is_said() -> None:
    keep(net(), [4])
    keep(net(), [16], processes=2)
    [times], said = found(net(), 8, partitions=2)
    assert times == UnitTimes()
    device = this_hardware().device
    assert said == [
        f"only microbatches of 16 samples on {device}, all threads, 2 processes at once; of 4 samples on {device}, "
        f"all threads were measured, which says nothing of other sizes: all times are estimates. Let smp-tf profile "
        f"measure microbatches of two sizes or more: --microbatches 1,4"
    ]


@pytest.mark.parametrize(
    ("partitions", "differs", "words"),
    [
        (2, {"threads": 3}, "threads 3 instead of 4"),
        (1, {"tensorflow": "1.0.0"}, f"tensorflow '1.0.0' instead of {tf.__version__!r}"),
        (1, {"cores": 5, "onednn": False}, "cores 5 instead of 8, onednn False instead of True"),
    ],
)
def test_profiles_that_a_plan_cannot_go_by_are_named(
    partitions: int, differs: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = MeasuredHardware("a processor", 8, 0, 0, True, 1, tf.__version__)
    monkeypatch.setattr("smp_tf.offline.measured_times.this_hardware", lambda: here)
    keep(net(), [4, 16], **dataclasses.asdict(dataclasses.replace(here, **differs)))
    keep(net(image=64), [8], **dataclasses.asdict(dataclasses.replace(here, device="another")))
    for samples in (4, 15):
        [times], said = found(net(), samples, partitions=partitions)
        assert times == UnitTimes()
        assert said == [f"this model was measured, but not as this plan would run, so all times are estimates: {words}"]
