"""Replicas tell each other of the calls of a step, once for each form of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import tensorflow as tf

from smp_tf.errors import StepError
from smp_tf.whole_batch import replica_forms
from smp_tf.whole_batch.replica_forms import ReplicaForms

KINDS = ["TensorSpec(shape=(None, 6), dtype=tf.float32, name=None)"]
FORM = ("x", tf.TensorSpec([None, 6], tf.float32))


@pytest.fixture
def others(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the first replica says; this one is the second."""
    said: list[Any] = []
    here = SimpleNamespace(
        topology=SimpleNamespace(replicas=2, replica=1), config=SimpleNamespace(microbatches=4), control=None
    )
    monkeypatch.setattr(replica_forms, "runtime", SimpleNamespace(current=lambda: here))
    gather = SimpleNamespace(allgather_json=lambda mine, *_, **__: [said.pop(0), mine])
    monkeypatch.setattr(replica_forms, "exchange", gather)
    return said


def test_a_form_is_told_once(others: list[Any]) -> None:
    others.append([8, KINDS])
    forms = ReplicaForms("Step 'train'")
    assert forms.samples(FORM, 6).sizes == (8, 6)
    # A replica comes to another size alone. Nobody is asked.
    assert forms.samples(FORM, 5).sizes == (8, 5)
    assert (forms.samples(FORM, 5).begin, forms.samples(FORM, 5).parts) == (8, (2, 1, 1, 1))


def test_replicas_pad_to_one_length(others: list[Any]) -> None:
    others.append([8, ["TensorSpec(shape=(None, 7), dtype=tf.float32, name=None)"]])
    with pytest.raises(StepError, match=r"\(None, 7\).* and .*\(None, 6\).* Pad the batches of all replicas"):
        ReplicaForms("Step 'train'").samples(FORM, 6)


def test_what_is_joined_is_the_same_on_all_replicas_and_for_all_sizes(others: list[Any]) -> None:
    forms = ReplicaForms("Step 'train'")
    others.append([["loss", 0]])
    forms.require(FORM, "a loss", [("loss", 0)])
    forms.require(FORM, "a loss", [("loss", 0)])
    with pytest.raises(StepError, match="a loss cannot be joined for replicas whose batches differ in size"):
        forms.require(FORM, "a loss", [("loss", 1)])
    others.append(["another"])
    with pytest.raises(StepError, match="Use batches of one size"):
        forms.require(FORM, "metrics", ["one"])
