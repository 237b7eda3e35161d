"""`smp.init` and `smp.shutdown` in one process: once, again, with another configuration, and in which order it ends."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import tensorflow as tf

import smp_tf as smp
from smp_tf import announce
from smp_tf.errors import AlreadyInitializedError, ConfigError, NotInitializedError
from smp_tf.job import runtime
from smp_tf.job.at_shutdown import on_shutdown


@pytest.fixture(autouse=True)
def _shut_down(keras_defaults: None) -> Iterator[None]:
    yield
    smp.shutdown()


class TestInit:
    def test_before_it_nothing_is_known_and_after_it_everything(self) -> None:
        assert not smp.is_initialized()
        assert runtime.current_or_none() is None
        smp.init({"microbatches": 4})
        assert smp.is_initialized()
        running = runtime.current()
        assert (running.config.partitions, running.config.microbatches, running.config.horovod) == (1, 4, False)
        assert running.transport is None

    def test_again_with_the_same_configuration_does_nothing(self) -> None:
        smp.init({"microbatches": 4})
        running = runtime.current()
        smp.init({"microbatches": 4, "pipeline": "interleaved"})
        assert runtime.current() is running

    def test_again_with_another_configuration_is_an_error_that_names_the_keys(self) -> None:
        smp.init({"microbatches": 4})
        with pytest.raises(AlreadyInitializedError) as raised:
            smp.init({"microbatches": 2, "optimize": "speed"})
        assert str(raised.value) == (
            "smp_tf is already initialised with another configuration: microbatches (4 now, 2 asked), optimize "
            "('memory' now, 'speed' asked). Call smp.shutdown() before smp.init() with new values."
        )
        assert runtime.current().config.microbatches == 4

    def test_a_wrong_configuration_starts_nothing(self) -> None:
        with pytest.raises(ConfigError, match="Did you mean 'microbatches'"):
            smp.init({"microbatch": 4})
        assert not smp.is_initialized()

    def test_more_partitions_than_processes_become_one_and_it_is_said(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(announce, "_said", set())
        smp.init({"partitions": 4, "microbatches": 8})
        assert (smp.mp_size(), runtime.current().config.microbatches) == (1, 8)
        said = capsys.readouterr().err
        assert said.count("partitions is 1 instead of 4") == 1
        smp.shutdown()
        smp.init({"partitions": 4, "microbatches": 8})
        assert capsys.readouterr().err == ""


class TestSeeds:
    def draws(self) -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(tf.random.uniform([]))

    def test_python_numpy_and_tensorflow_are_seeded_alike_every_time(self) -> None:
        smp.init({"seed": 7})
        first = self.draws()
        smp.shutdown()
        smp.init({"seed": 7})
        assert self.draws() == first
        smp.shutdown()
        smp.init({"seed": 8})
        assert all(a != b for a, b in zip(self.draws(), first, strict=True))

    def test_without_a_seed_one_is_drawn(self) -> None:
        smp.init()
        first = runtime.current().seed
        smp.shutdown()
        smp.init()
        assert runtime.current().seed != first
        assert 0 <= first < 1 << 32

    def test_the_seed_that_the_script_set_before_is_taken(self) -> None:
        """It was once overridden by a drawn one."""
        tf.random.set_seed(7)
        smp.init()
        assert runtime.current().seed == 7
        drawn = self.draws()
        smp.shutdown()
        smp.init({"seed": 7})
        assert self.draws() == drawn

    def test_initial_weights_follow_a_seed_that_the_script_sets_afterwards(self) -> None:
        """As until TensorFlow 2.6, and as Keras's own `set_random_seed` does; smp.init once kept them to its seed."""
        smp.init({"seed": 3})
        weights = []
        for seed in (7, 8, 7, 7):
            tf.random.set_seed(seed)
            weights.append(tf.keras.initializers.GlorotUniform()((2, 2)).numpy().tolist())
        tf.keras.utils.set_random_seed(7)
        weights.append(tf.keras.initializers.GlorotUniform()((2, 2)).numpy().tolist())
        assert [weights.index(w) for w in weights] == [0, 1, 0, 0, 0]


class TestShutdown:
    def test_it_may_come_without_init_and_twice(self) -> None:
        smp.shutdown()
        smp.init()
        smp.shutdown()
        smp.shutdown()
        assert not smp.is_initialized()

    def test_afterwards_another_configuration_is_fine(self) -> None:
        smp.init({"microbatches": 4})
        smp.shutdown()
        smp.init({"microbatches": 2})
        assert runtime.current().config.microbatches == 2

    def test_callbacks_run_once_the_last_registered_first_while_smp_still_runs(self) -> None:
        seen: list[tuple[str, bool]] = []
        smp.init()
        on_shutdown(lambda: seen.append(("first", smp.is_initialized())))
        on_shutdown(lambda: seen.append(("second", smp.is_initialized())))
        smp.shutdown()
        assert seen == [("second", True), ("first", True)]
        smp.init()
        smp.shutdown()
        assert len(seen) == 2


RANKS: list[tuple[Callable[[], object], object]] = [
    (smp.rank, 0), (smp.size, 1), (smp.local_rank, 0), (smp.local_size, 1), (smp.mp_rank, 0), (smp.mp_size, 1),
    (smp.dp_rank, 0), (smp.dp_size, 1), (smp.pp_rank, 0), (smp.pp_size, 1), (smp.tp_rank, 0), (smp.tp_size, 1),
    (smp.rdp_rank, 0), (smp.rdp_size, 1), (smp.get_mp_group, [0]), (smp.get_dp_group, [0]),
]  # fmt: skip


@pytest.mark.parametrize(("call", "value"), RANKS, ids=lambda value: getattr(value, "__name__", ""))
def test_ranks_of_one_process(call: Callable[[], object], value: object) -> None:
    with pytest.raises(NotInitializedError, match=r'smp\.init\(\{"partitions": 2, "microbatches": 4\}\)'):
        call()
    smp.init()
    assert call() == value
