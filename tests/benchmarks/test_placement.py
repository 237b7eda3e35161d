"""The benchmark of placements: its figures, and rows of small models held to all cuts of them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations

import pytest
import tf_keras
from tf_keras import layers

from smp_tf.config.config import check_config
from smp_tf.offline.plan import OfflineModel, offline
from smp_tf.partition.place.placement import Chain, Chunks, costed


def test_a_gap_of_a_step_is_a_larger_one_of_its_slowest_stage() -> None:
    from placement import largest_load_gap

    # Of a step of 4 + 3 * 1 seconds the slowest stage alone could gain what 3 of them do.
    assert largest_load_gap(0.01, (1.0, 1.0, 1.0, 1.0), 4, (0.1,)) == pytest.approx(0.07 / 3)
    assert largest_load_gap(0.01, (1.0, 1.0), 4, (0.1,)) == pytest.approx(0.05 / 3)


def test_no_stage_has_less_than_an_equal_share_or_the_longest_unit() -> None:
    from placement import largest_load_gap

    assert largest_load_gap(0.3, (1.0, 1.0), 4, (0.9, 0.9)) == pytest.approx(0.1)
    assert largest_load_gap(0.3, (1.0, 0.2), 4, (0.95, 0.25)) == pytest.approx(0.05)
    assert largest_load_gap(0.3, (1.0, 1.0), 1, (0.9, 0.9)) == pytest.approx(0.1)
    assert largest_load_gap(0.0, (0.0, 0.0), 4, (0.0,)) == 0.0


def uneven() -> tf_keras.Model:
    sizes = (512, 64, 1024, 256)
    return tf_keras.Sequential([tf_keras.Input((256,)), *(layers.Dense(size) for size in sizes)])


def residual() -> tf_keras.Model:
    inputs = tf_keras.Input((256,))
    hidden = inputs
    for _ in range(2):
        hidden = layers.Add()([hidden, layers.Dense(256)(hidden)])
    return tf_keras.Model(inputs, layers.Dense(8)(hidden))


def branching() -> tf_keras.Model:
    inputs = tf_keras.Input((256,))
    ways = [layers.Dense(size)(inputs) for size in (128, 512, 256)]
    return tf_keras.Model(inputs, layers.Dense(8)(layers.Concatenate()(ways)))


@pytest.mark.parametrize("build", [uneven, residual, branching])
def test_no_cut_has_a_largest_load_below_what_is_proved(build: Callable[[], tf_keras.Model]) -> None:
    from placement import BATCH, MICROBATCHES, load_gap, rows_of

    with offline():
        rows = list(rows_of("small", build, [2], 1.0))
        model = OfflineModel(build, batch_size=BATCH)
        wanted = {"partitions": 2, "microbatches": MICROBATCHES, "optimize": "speed", "balance_tolerance": 0.0}
        made = model.plan(check_config(wanted, "a test"), proof_seconds=1.0)
    by_bytes, by_time = rows
    assert all(row.sent <= row.before and (row.of_any or 1.0) >= 1.0 - 1e-9 for row in rows)
    assert by_bytes.load_gap == by_bytes.gap
    assert by_time.load_gap == load_gap(made)
    chain = Chain.of([unit.name for unit in made.units], made.costs)

    def times(stage_of: tuple[int, ...]) -> tuple[float, ...]:
        return costed(chain, stage_of, {}, MICROBATCHES, Chunks.one_each([1, 1])).times

    own = times(made.plan.stages_of(made.units))
    count = len(made.units)
    others = [times(tuple(int(unit >= cut) for unit in range(count))) for (cut,) in combinations(range(1, count), 1)]
    assert by_time.load_gap is not None
    least = max(own) * (1 - by_time.load_gap)
    assert min(max(other) for other in others if sum(other) <= sum(own) * (1 + 1e-9)) >= least * (1 - 1e-9)


@pytest.mark.full
@pytest.mark.large
def test_the_hardest_model_is_proved_within_a_hundredth_where_the_proof_has_the_time() -> None:
    """Of the models that this benchmark plans the one that is not in the usual five seconds, on four partitions."""
    from placement import rows_of

    with offline():
        rows = list(rows_of("NASNetMobile", lambda: tf_keras.applications.NASNetMobile(weights=None), [4], 30.0))
    assert [row.objective for row in rows] == ["memory", "speed"]
    assert all(gap is not None and gap < 0.01 for row in rows for gap in (row.gap, row.load_gap)), rows
