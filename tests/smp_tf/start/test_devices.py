"""A process's share of its host's threads and GPUs, and what is said about it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

from smp_tf.config.config import Config
from smp_tf.start import devices
from tests import quick_import


class Threads:
    """The numbers of threads that were set; a host of 8 cores on which nobody has asked for any number."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.per_op: list[int] = []
        self.at_once: list[int] = []
        monkeypatch.delenv("TF_NUM_INTRAOP_THREADS", raising=False)
        monkeypatch.delenv("TF_NUM_INTEROP_THREADS", raising=False)
        monkeypatch.setattr(devices.os, "sched_getaffinity", lambda pid: set(range(8)))
        threading = tf.config.threading
        monkeypatch.setattr(threading, "get_intra_op_parallelism_threads", lambda: 0)
        monkeypatch.setattr(threading, "get_inter_op_parallelism_threads", lambda: 0)
        monkeypatch.setattr(threading, "set_intra_op_parallelism_threads", self.per_op.append)
        monkeypatch.setattr(threading, "set_inter_op_parallelism_threads", self.at_once.append)


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> Threads:
    return Threads(monkeypatch)


def refuse(number: int) -> None:
    raise RuntimeError("Parallelism cannot be modified after initialization.")


class TestThreads:
    def test_one_process_keeps_tensorflow_s_choice(self, threads: Threads) -> None:
        assert devices.share_threads(Config(), 1) is None
        assert threads.per_op == threads.at_once == []

    @pytest.mark.parametrize(
        ("processes", "each", "words"),
        [
            (2, 4, "4 TensorFlow threads per op each, 8 ops at once"),
            (3, 2, "2 TensorFlow threads per op each, 8 ops at once"),
            (8, 1, "1 TensorFlow thread per op each, 8 ops at once"),
            (20, 1, "1 TensorFlow thread per op each, 8 ops at once"),
        ],
    )
    def test_several_share_the_cores_and_it_is_said(
        self, threads: Threads, processes: int, each: int, words: str
    ) -> None:
        note = devices.share_threads(Config(), processes)
        assert (threads.per_op, threads.at_once) == ([each], [])
        assert note == (
            f"{processes} processes share this host: {words} (set intra_op_threads and inter_op_threads to change it)."
        )

    @pytest.mark.parametrize("processes", [1, 2])
    def test_the_configured_numbers_are_set_without_a_word(self, threads: Threads, processes: int) -> None:
        assert devices.share_threads(Config(intra_op_threads=3, inter_op_threads=5), processes) is None
        assert (threads.per_op, threads.at_once) == ([3], [5])

    def test_ops_at_once_alone_are_set_beside_the_share(self, threads: Threads) -> None:
        note = devices.share_threads(Config(inter_op_threads=1), 2)
        assert (threads.per_op, threads.at_once) == ([4], [1])
        assert note is not None
        assert "4 TensorFlow threads per op each, 1 op at once" in note
        assert devices.share_threads(Config(inter_op_threads=1), 1) is None
        assert (threads.per_op, threads.at_once) == ([4], [1, 1])

    def test_a_number_of_ops_given_to_tensorflow_is_what_is_said(
        self, threads: Threads, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("TF_NUM_INTEROP_THREADS", "7")
        assert "7 ops at once" in (devices.share_threads(Config(), 2) or "")
        monkeypatch.setattr(tf.config.threading, "get_inter_op_parallelism_threads", lambda: 6)
        assert "6 ops at once" in (devices.share_threads(Config(), 2) or "")
        assert threads.at_once == []

    def test_a_number_given_to_tensorflow_stays(self, threads: Threads, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(tf.config.threading, "get_intra_op_parallelism_threads", lambda: 5)
        assert devices.share_threads(Config(), 2) is None
        assert threads.per_op == []

    def test_a_number_in_tensorflow_s_variable_stays(self, threads: Threads, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TF_NUM_INTRAOP_THREADS", "6")
        assert devices.share_threads(Config(), 2) is None
        assert threads.per_op == []

    @pytest.mark.parametrize(
        ("config", "setter", "words"),
        [
            (Config(), "set_intra_op_parallelism_threads", "too late to set its threads per op to 4"),
            (Config(inter_op_threads=3), "set_inter_op_parallelism_threads", "too late to set its ops at once to 3"),
        ],
    )
    def test_too_late_is_said(
        self, threads: Threads, monkeypatch: pytest.MonkeyPatch, config: Config, setter: str, words: str
    ) -> None:
        monkeypatch.setattr(tf.config.threading, setter, refuse)
        note = devices.share_threads(config, 2)
        assert note is not None
        assert f"{words}. Call smp.init() first" in note


def test_a_process_computes_with_the_numbers_it_was_given() -> None:
    code = (
        "import smp_tf as smp\nsmp.init({'intra_op_threads': 3, 'inter_op_threads': 5})\nimport tensorflow as tf\n"
        "of = tf.config.threading\nfloat(tf.reduce_sum(tf.ones([9])))\n"
        "print(of.get_intra_op_parallelism_threads(), of.get_inter_op_parallelism_threads())\n"
    )
    command = [sys.executable, "-c", quick_import.CODE + code]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[3]), "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.splitlines()[-1:] == ["3 5"], done.stderr


class Host:
    """A host with some GPUs; notes what is asked of TensorFlow."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, gpus: int, in_use: bool = False) -> None:
        self.visible: list[Any] = []
        self.growing: list[Any] = []

        def set_visible(device: Any, kind: str) -> None:
            if in_use:
                raise RuntimeError("Visible devices cannot be modified after being initialized")
            self.visible.append((device, kind))

        monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: [f"{kind}:{n}" for n in range(gpus)])
        monkeypatch.setattr(tf.config, "set_visible_devices", set_visible)
        monkeypatch.setattr(
            tf.config.experimental, "set_memory_growth", lambda gpu, grows: self.growing.append((gpu, grows))
        )


class TestGpus:
    def test_none_is_fine(self, monkeypatch: pytest.MonkeyPatch) -> None:
        host = Host(monkeypatch, 0)
        assert devices.pin_gpu(0, 2) is None
        assert host.visible == []

    def test_each_process_gets_one_by_its_local_rank(self, monkeypatch: pytest.MonkeyPatch) -> None:
        host = Host(monkeypatch, 4)
        assert [devices.pin_gpu(rank, 4) for rank in range(4)] == [None] * 4
        assert host.visible == [("GPU:0", "GPU"), ("GPU:1", "GPU"), ("GPU:2", "GPU"), ("GPU:3", "GPU")]
        assert host.growing == []

    @pytest.mark.parametrize(("gpus", "words"), [(2, "share 2 GPUs on"), (1, "share 1 GPU on")])
    def test_more_processes_than_gpus_share_them_and_it_is_said(
        self, monkeypatch: pytest.MonkeyPatch, gpus: int, words: str
    ) -> None:
        host = Host(monkeypatch, gpus)
        note = devices.pin_gpu(3, 4)
        assert note is not None
        assert words in note
        assert host.visible == [(f"GPU:{3 % gpus}", "GPU")]
        assert host.growing == [(f"GPU:{3 % gpus}", True)]

    def test_too_late_is_said(self, monkeypatch: pytest.MonkeyPatch) -> None:
        Host(monkeypatch, 2, in_use=True)
        note = devices.pin_gpu(0, 2)
        assert note is not None
        assert "used a GPU before smp.init()" in note
