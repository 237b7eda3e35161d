"""Horovod's collectives: what is sent in which type, under which name, and through how much memory."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf

from smp_tf.collectives.horovod import Horovod, averaging_bytes, sum_wait
from smp_tf.errors import StepError


def test_sums_travel_by_type_and_come_back_in_theirs(reduced: list[dict[str, Any]]) -> None:
    given = [tf.constant([1.5]), tf.constant([2], tf.int16), tf.constant([0.5], tf.bfloat16)]
    found = Horovod().all_reduce(given, "a group", "g")
    assert [t.dtype for t in found] == [t.dtype for t in given]
    assert [float(t[0]) for t in found] == [4.5, 6.0, 1.5]
    assert [(asked["types"], asked["name"], asked["process_set"]) for asked in reduced] == [
        ([tf.float32, tf.float32], "g_float32", "a group"),
        ([tf.int32], "g_int32", "a group"),
    ]


def test_what_is_gathered_keeps_its_type(reduced: list[dict[str, Any]]) -> None:
    found = Horovod().all_gather(tf.constant([0.5], tf.bfloat16), "a group", "g")
    assert (found.dtype, found.shape) == (tf.bfloat16, [3])
    assert reduced == [{"gathered": tf.uint16, "name": "g", "process_set": "a group", "ignore_name_scope": True}]


def test_what_cannot_be_sent_is_an_error_that_names_it(reduced: list[dict[str, Any]]) -> None:
    with pytest.raises(StepError, match="what 'g' gathers, of type string"):
        Horovod().all_gather(tf.constant(["text"]), "a group", "g")
    with pytest.raises(StepError, match="tensor 1 of 'g', of type bool"):
        Horovod().all_reduce([tf.constant(1), tf.constant(True)], "a group", "g")
    assert reduced == []


def test_the_buffer_of_horovod_is_what_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOROVOD_FUSION_THRESHOLD", raising=False)
    assert [averaging_bytes(replicas) for replicas in (1, 2, 8)] == [0, 128 << 20, 128 << 20]
    monkeypatch.setenv("HOROVOD_FUSION_THRESHOLD", "1048576")
    assert averaging_bytes(2) == 1 << 20


@pytest.mark.parametrize(("given", "seconds"), [(None, 5e-4), ("", 5e-4), ("20", 1e-2), ("0.5", 2.5e-4)])
def test_a_sum_waits_for_half_a_cycle_of_horovod(
    monkeypatch: pytest.MonkeyPatch, given: str | None, seconds: float
) -> None:
    monkeypatch.delenv("HOROVOD_CYCLE_TIME", raising=False)
    if given is not None:
        monkeypatch.setenv("HOROVOD_CYCLE_TIME", given)
    assert sum_wait() == seconds
