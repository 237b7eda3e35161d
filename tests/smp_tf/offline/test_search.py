"""What is tried for a number of ranks, what is recommended, and what is said where nothing fits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import tf_keras
from tf_keras import layers

from smp_tf.config.config import check_config
from smp_tf.errors import MemoryLimitError, PlacementError
from smp_tf.offline.cluster import Cluster, Host
from smp_tf.offline.plan import OfflineModel, offline
from smp_tf.offline.plan_text import comparison
from smp_tf.offline.search import Choices, Search, search
from smp_tf.pipeline.schedules.schedule import IN_ORDER, LEAN

#: Fast links, so that a pipeline is worth it; one rank has room for half of the model.
CLUSTER = Cluster((Host(1, 4, flops=1e12, memory_bandwidth=1e12),), within_host=1e15, between_hosts=1e15)


def chain() -> tf_keras.Model:
    return tf_keras.Sequential([tf_keras.Input((256,)), *(layers.Dense(256) for _ in range(4))], name="chain")


@pytest.fixture
def model(keras_defaults: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[OfflineModel]:
    # Horovod's usual buffer is much larger than these models.
    monkeypatch.setenv("HOROVOD_FUSION_THRESHOLD", "0")
    # And its usual wait longer than their steps.
    monkeypatch.setenv("HOROVOD_CYCLE_TIME", "0")
    with offline():
        yield OfflineModel(chain, batch_size=32)


def found(model: OfflineModel, limit: str | None = None, **options: Any) -> Search:
    wanted = {"optimize": "speed", **({"memory_limit": limit} if limit else {})}
    choices = Choices(
        **{name: options.pop(name) for name in {"partitions", "microbatches", "pipelines"} & options.keys()}
    )
    return search(model, check_config(wanted, "a test"), 4, choices, cluster=CLUSTER, **options)


def test_all_that_the_ranks_allow_is_tried_and_without_a_limit_replicas_are_fastest(model: OfflineModel) -> None:
    tried = found(model)
    sizes = [(c.config.partitions, c.replicas, c.config.microbatches) for c in tried.candidates]
    assert {(p, r) for p, r, _ in sizes} == {(1, 4), (2, 2), (4, 1)}
    assert {m for _, _, m in sizes} == {1, 2, 4, 8, 16, 32}
    assert (tried.best.config.partitions, tried.best.replicas, tried.best.config.microbatches) == (1, 4, 1)
    pipelines = [c.config.pipeline for c in found(model, partitions=[2], microbatches=[4]).candidates]
    assert pipelines == [kind for kind in IN_ORDER if kind not in LEAN]
    lean = found(model, "3MiB", partitions=[2], microbatches=[4]).candidates
    assert [c.config.pipeline for c in lean] == list(IN_ORDER)


def test_the_fastest_that_fits_is_taken_and_of_equals_the_smallest(model: OfflineModel) -> None:
    tried = found(model, limit="3MiB", microbatches=[1, 4, 16])
    assert all(c.refused == "does not fit" and c.needed > 3 * 2**20 for c in tried.candidates if c.size[0] == 1)
    assert tried.best.config.partitions == 2
    fitting = [c for c in tried.candidates if c.fits]
    assert tried.best.speed >= 0.98 * max(c.speed for c in fitting)
    as_fast = [c for c in fitting if c.speed >= 0.98 * max(c.speed for c in fitting)]
    assert tried.best.size == min(c.size for c in as_fast)


def test_the_table_says_what_other_settings_cost(model: OfflineModel) -> None:
    tried = found(model, limit="3MiB", microbatches=[4])
    lines = comparison(tried).splitlines()
    assert lines[0] == "15 settings tried"
    assert any("does not fit" in line for line in lines)
    assert sum("taken" in line for line in lines) == 1
    assert any("-" in line and "%" in line.split("│")[-2] for line in lines[4:])


def test_replicas_take_a_buffer_of_horovod_more(model: OfflineModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def needed() -> list[float]:
        tried = found(model, "100MiB", partitions=[2], microbatches=[4], pipelines=["simple"])
        return [candidate.needed or 0 for candidate in tried.candidates]

    [without] = needed()
    monkeypatch.setenv("HOROVOD_FUSION_THRESHOLD", "1000000")
    assert needed() == [without + 1_000_000]


def test_where_nothing_fits_the_nearest_is_named(model: OfflineModel) -> None:
    with pytest.raises(PlacementError) as raised:
        found(model, limit="100KiB", microbatches=[32])
    said = str(raised.value)
    first, *stages, _, fits = said.splitlines()
    assert first == (
        "None of 62 settings fits. Nearest comes interleaved with 4 partitions and 32 microbatches. The model does not "
        "fit: memory_limit is 100.0 KiB (102,400 bytes) a rank, and with 4 partitions the ranks need"
    )
    assert len(stages) == 4
    assert all(" too much (weights " in line for line in stages)
    # The cluster has no more ranks than four, and the model no more layers.
    assert fits.startswith("What would fit: a memory_limit of ")


def test_the_nearest_is_that_of_which_least_is_too_much(keras_defaults: None) -> None:
    """Of two stages the first one is on a rank with little memory: fewer bytes over than all in one rank of it."""
    small, large = (
        Host(1, 1, 1e12, 1e12, memory=size, entry=f"host {n}") for n, size in enumerate((100 * 2**10, 2**30))
    )
    with offline():
        model, config = OfflineModel(chain, batch_size=32), check_config({}, "a test")
        with pytest.raises(MemoryLimitError) as raised:
            search(model, config, 2, Choices(microbatches=[4]), cluster=Cluster((small, large), 1e15, 1e15))
    said = str(raised.value).splitlines()
    assert "with 2 partitions and 4 microbatches" in said[0]
    assert " of 100.0 KiB (memory of host 0, rank 0), " in said[1]
    assert " of 1.0 GiB (memory of host 1, rank 1) (weights" in said[2]
    assert said[3].endswith("; ranks with more memory.")
    assert said[4].startswith("What would fit: ranks with ")
    assert said[4].endswith(" for stage 0.")


def test_where_nothing_fits_activations_are_made_again(keras_defaults: None) -> None:
    def tanhs() -> tf_keras.Model:
        # Little but activations.
        made = [layer for _ in range(8) for layer in (layers.Dense(32), layers.Activation("tanh"))]
        return tf_keras.Sequential([tf_keras.Input((512, 32)), *made])

    with offline():
        model, only = OfflineModel(tanhs, batch_size=32), Choices([1], [4], ["interleaved"])
        without, again = (
            search(model, check_config({"recompute": recompute}, "a test"), 1, only) for recompute in (False, True)
        )
        limit = ((without.best.needed or 0) + (again.best.needed or 0)) // 2
        assert (again.best.needed or 0) < limit < (without.best.needed or 0)
        config = check_config({"memory_limit": limit}, "a test")
        tried = search(model, config, 1, only)
        assert [(c.config.recompute, c.fits) for c in tried.candidates] == [(False, False), (True, True)]
        lines = comparison(tried).splitlines()
        assert next(line for line in lines if "taken" in line).split("│")[4].strip() == "interleaved,"
        assert next(line for line in lines if "recompute" in line).split("│")[4].strip() == "recompute"
        assert any(reason.startswith("recompute: backward makes again what ") for reason in tried.made.plan.reasons)
        with pytest.raises(PlacementError, match=r"What would fit: .*recompute true, with \d+% more to compute"):
            model.plan(check_config({"memory_limit": limit, "microbatches": 4, "partitions": 1}, "a test"))


def test_more_partitions_than_layers_are_no_setting(model: OfflineModel) -> None:
    with pytest.raises(PlacementError, match=r"None of 5 settings can be placed\. The last: The model has 4 units"):
        search(model, check_config({}, "a test"), 5, Choices([5], [1]))


def test_progress_is_told(model: OfflineModel) -> None:
    told: list[tuple[int, int, str]] = []
    found(model, partitions=[2], microbatches=[4], progress=lambda *at: told.append(at))
    assert told == [
        (done, 5, f"2 partitions, 4 microbatches, {pipeline}")
        for done, pipeline in enumerate(("interleaved", "zb_h1", "simple", "interleaved_1f1b", "zb_v"))
    ]
