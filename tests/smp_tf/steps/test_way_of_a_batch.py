"""A batch in steady state passes the files that docs/how_it_works.md lists, and climbs once."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Any

import tensorflow as tf
import tf_keras
from tf_keras import layers

import smp_tf as smp
from tests.docs.pages import page
from tests.house.test_floors import USES, room_in_table
from tests.ways import files_of


def test_the_way_is_as_it_is_written(init: Callable[..., None]) -> None:
    init(microbatches=2)
    model = smp.DistributedModel(tf_keras.Sequential([layers.Dense(1, name="only")], name="net"))

    @smp.step
    def train(x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x))
        return loss, tape.gradient(loss, model.trainable_variables)

    def call() -> None:
        loss, gradients = train(batch)
        loss.reduce_mean()
        for gradient in gradients:
            gradient.accumulate()

    batch = tf.ones([4, 3])
    call()
    passed = files_of(call)
    way = page("docs/how_it_works.md").split("## Be a batch\n")[1].split("\n## ")[0]
    assert passed == re.findall(r"^\d+\. `([\w/]+\.py)`", way, re.MULTILINE)
    floors = [list(USES).index(room_in_table(file)) for file in passed]
    assert sum(below < above for below, above in itertools.pairwise(floors)) == 1
