"""What optimizers say of themselves, as replicas compare it; over real ranks in tests/distributed/test_replicas.py."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from smp_tf.config.config import Config
from smp_tf.job import exchange, runtime
from smp_tf.optimizer.agreement import plain, require_equal_optimizers


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        (1, 1.0),
        (np.float32(0.1), 0.1),
        (tf.constant(0.1), 0.1),
        (np.int64(3), 3.0),
        (float("nan"), "nan"),
        (True, True),
        (np.bool_(True), True),
        (tf.constant(False), False),
        ("text", "text"),
        (None, None),
        ((1, np.array([2.0, 3.0])), [1.0, [2.0, 3.0]]),
        ({"name": "sgd_1", "jit_compile": True, "rate": 1}, {"rate": 1.0}),
        ({"b", "a"}, ["a", "b"]),
        (tf.nn.relu, "tensorflow.python.ops.gen_nn_ops.relu"),
        (object(), "builtins.object"),
    ],
)
def test_values_are_told_by_what_they_mean(value: Any, wanted: Any) -> None:
    assert plain(value) == wanted
    assert type(plain(value)) is type(wanted)


def test_variables_are_told_by_their_values() -> None:
    assert plain(tf.Variable(0.25)) == 0.25


@pytest.mark.parametrize("kind", ["Adam", "SGD", "Adafactor"])
def test_two_optimizers_with_equal_arguments_tell_the_same(kind: str) -> None:
    rate = tf_keras.optimizers.schedules.PolynomialDecay(0.1, 10)
    first, second = (plain(getattr(tf_keras.optimizers, kind)(rate).get_config()) for _ in range(2))
    assert json.loads(json.dumps(first)) == second


class Mute(tf_keras.optimizers.SGD):
    """Says nothing of its arguments."""

    def get_config(self) -> dict[str, Any]:
        raise NotImplementedError


def running(replicas: int, **config: Any) -> Any:
    return SimpleNamespace(topology=SimpleNamespace(replicas=replicas), config=Config(**config))


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What replicas were asked to agree on."""
    found: list[Any] = []
    monkeypatch.setattr(exchange, "agree", lambda name, value, group, hint: found.append(value))
    return found


def test_an_optimizer_is_compared_once_and_one_that_says_nothing_by_its_class(
    told: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime, "current_or_none", lambda: running(2))
    plain_one, mute = tf_keras.optimizers.SGD(0.5), Mute(0.5)
    for optimizer in (plain_one, mute, plain_one, mute):
        tf.function(require_equal_optimizers)(optimizer)
    assert [one.get("learning_rate") for one in told] == [0.5, None]
    assert [one["class"].rpartition(".")[2] for one in told] == ["SGD", "Mute"]
    assert list(told[1]) == ["class"]


@pytest.mark.parametrize(("replicas", "config"), [(1, {}), (2, {"check_replicas": False})])
def test_nothing_is_compared_where_there_is_no_other_replica_or_no_check(
    told: list[Any], monkeypatch: pytest.MonkeyPatch, replicas: int, config: dict[str, Any]
) -> None:
    monkeypatch.setattr(runtime, "current_or_none", lambda: running(replicas, **config))
    require_equal_optimizers(tf_keras.optimizers.SGD(0.5))
    assert told == []
