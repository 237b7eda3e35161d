"""Random ops of a step depend on its seed and its own count, also after a restore, in whatever order shapes come."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from tf_keras import layers

import smp_tf as smp
from smp_tf.variables import step_seeds


@pytest.fixture(autouse=True)
def _initialised(init: Callable[..., None]) -> None:
    init(microbatches=2)


class Net(smp.DistributedModel):
    def __init__(self) -> None:
        super().__init__()
        self.scale = layers.Dense(2, kernel_initializer="identity", use_bias=False)
        self.drop = layers.Dropout(0.5)

    def call(self, x: tf.Tensor, training: bool = True) -> tf.Tensor:
        return self.drop(self.scale(x), training=training)


def drawing_step() -> Any:
    net = Net()

    @smp.step
    def step(x: tf.Tensor, training: bool = True) -> tf.Tensor:
        return net(x, training=training)

    return step


def masks(step: Any, rows: int, **options: Any) -> list[Any]:
    return step(np.ones([rows, 2], np.float32), **options).concat().numpy().tolist()


def test_shapes_of_one_function_share_a_count() -> None:
    step = drawing_step()
    drawn = [masks(step, rows) for rows in (8, 8, 4, 8)]
    assert step_seeds.state() == {"seed": 5, "steps": {"step/0": 4}}
    assert drawn[0] != drawn[1] != drawn[3]


def test_a_seed_that_the_script_sets_after_init_decides_the_masks() -> None:
    """Only the initial weights followed it once, so no two runs of such a script drew the same masks."""
    tf.random.set_seed(9)
    step = drawing_step()
    drawn = masks(step, 8)
    tf.random.set_seed(3)
    drawn_later = masks(step, 8)
    assert step_seeds.state()["seed"] == 9
    smp.shutdown()
    smp.init({"partitions": 1, "microbatches": 2, "seed": 9})
    again = drawing_step()
    assert [masks(again, 8), masks(again, 8)] == [drawn, drawn_later]


def test_a_new_training_that_sees_the_other_shape_first_draws_what_the_old_one_would_have() -> None:
    old = drawing_step()
    masks(old, 8)
    stored = step_seeds.state()
    expected = [masks(old, rows) for rows in (4, 8)]
    smp.shutdown()
    smp.init({"partitions": 1, "microbatches": 2, "seed": 77})
    new = drawing_step()
    step_seeds.restore(stored)
    assert [masks(new, rows) for rows in (4, 8)] == expected
    # And the traced step goes back too.
    step_seeds.restore(stored)
    assert [masks(new, rows) for rows in (4, 8)] == expected


def test_two_functions_of_one_name_draw_apart() -> None:
    first, second = drawing_step(), drawing_step()
    assert masks(first, 16) != masks(second, 16)
    assert step_seeds.state()["steps"] == {"step/0": 1, "step/1": 1}


def test_steps_that_draw_nothing_do_not_count() -> None:
    step = drawing_step()
    masks(step, 8, training=False)
    assert step_seeds.state()["steps"] == {}
    masks(step, 8)
    masks(step, 8, training=False)
    assert step_seeds.state()["steps"] == {"step/0": 1}


def test_a_function_whose_first_call_failed_keeps_its_name() -> None:
    step = drawing_step()
    with pytest.raises(smp.errors.StepError, match="The first batch"):
        masks(step, 1)
    masks(step, 8)
    assert step_seeds.state()["steps"] == {"step/0": 1}


def test_counts_of_functions_that_were_not_called_are_kept() -> None:
    step_seeds.restore({"seed": 3, "steps": {"train/0": 7, "step/0": 2}})
    masks(drawing_step(), 8)
    assert step_seeds.state() == {"seed": 3, "steps": {"train/0": 7, "step/0": 3}}


def test_functions_that_a_checkpoint_does_not_know_begin_anew() -> None:
    step = drawing_step()
    first = masks(step, 8)
    step_seeds.restore({"seed": 5, "steps": {}})
    assert masks(step, 8) == first


def test_replicas_and_microbatches_have_seeds_of_their_own() -> None:
    seeds = {
        tuple(step_seeds.next_seeds(known, replica)(microbatch).numpy().tolist())
        for known in ("train/0", "train/1", "test/0")
        for replica in range(3)
        for microbatch in range(4)
    }
    assert len(seeds) == 36
