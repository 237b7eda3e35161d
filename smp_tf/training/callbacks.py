"""The callbacks of `smp_tf.callbacks`."""

from __future__ import annotations

import os
import resource
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf
from rich.console import Console
from rich.table import Table

from smp_tf.checkpoint.manager import CheckpointManager
from smp_tf.job import exchange, runtime
from smp_tf.keras import adapter
from smp_tf.keras.bases import Callback
from smp_tf.partition.mesh import CommGroup
from smp_tf.partition.plan.plan import Plan, as_bytes
from smp_tf.pipeline.programs.chunk_times import ChunkTimes
from smp_tf.pipeline.programs.simulate import simulate
from smp_tf.pipeline.schedules.schedule import program_of
from smp_tf.recording import record as recording
from smp_tf.replicas import equal_start
from smp_tf.replicas.sums import broadcast_over_replicas
from smp_tf.sharding import layouts
from smp_tf.training import logs as replica_logs
from smp_tf.variables.fetch import WRITER


class BroadcastInitialState(Callback):
    """Gives all replicas the weights and optimizer state of one of them, after the first batch.

    Replicas start alike. They have the same seed, and at a model's first step that trains all take the values of
    replica 0, or of the one that is named here. The callback is for what a script changes on one replica later, between
    two calls of `fit`, and for the optimizer's slots. The optimizer's arguments and learning rate have to be equal
    already, which is checked. `fit` adds the callback when there are replicas. Where replicas share the optimizer's
    slots (`shard_optimizer_state`), each slot is on one replica only. Then weights that differ before the first step
    that trains are an error, and the optimizer's state is left as it is.

    Args:
        replica: the number of the replica whose state all take.

    Example:
        >>> model.fit(x, y, callbacks=[smp.callbacks.BroadcastInitialState()])
    """

    def __init__(self, replica: int = 0) -> None:
        super().__init__()
        # It does not look at the logs of a batch, so Keras need not wait for their numbers.
        self._supports_tf_logs = True
        self._replica = replica
        self._done = False

    def on_train_begin(self, logs: Any = None) -> None:
        """Decides whose weights a model begins with, if it has not run a step yet."""
        equal_start.take_from(self._replica)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Broadcasts, once."""
        if self._done:
            return
        self._done = True
        # Variables of metrics count what each replica has seen.
        metrics = {
            id(variable.handle)
            for module in self.model.submodules
            if adapter.layers().is_metric(module)
            for variable in module.variables
        }
        weights = [variable for variable in self.model.local_variables if id(variable.handle) not in metrics]
        variables = self.model.optimizer.variables
        # An optimizer of the script's own does not say which variables only some replicas have.
        of_optimizer = variables() if callable(variables) else variables
        state = [*weights, *([] if layouts.are_shared() else of_optimizer)]
        root = runtime.current().topology.members(CommGroup.RDP_GROUP)[self._replica]
        broadcast_over_replicas(state, root, "smp_initial_state")


class MetricAverage(Callback):
    """Makes the logs of an epoch the same on all replicas, for the callbacks after it.

    Losses and metrics of the model are those of all replicas already. The callback averages what earlier callbacks have
    put into the logs, with equal weights for replicas. `fit` adds it when there are replicas.

    Example:
        >>> model.fit(x, y, callbacks=[Timing(), smp.callbacks.MetricAverage(), CSVLogger("log.csv")])
    """

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Averages the logs in place."""
        if logs:
            logs.update(replica_logs.average_now(logs, 1, f"the logs of epoch {epoch + 1}"))


class Checkpoint(Callback):
    """Saves the training by `smp.CheckpointManager`, and goes on where it was interrupted.

    A checkpoint holds model, optimizer, dropout masks and the number of the epoch. Each rank writes what it stores. A
    checkpoint is whole or does not exist, and can be restored on other numbers of partitions and replicas.

    Args:
        directory: folder of the checkpoints.
        save_freq: "epoch", or a number of batches.
        max_to_keep: how many checkpoints are kept; None for all.
        restore: whether `fit` begins with the latest checkpoint, if there is one. Its epochs are not run again.
        fall_back: whether the newest whole checkpoint is restored where the latest is damaged.
        asynchronous: whether batches go on while a checkpoint is written, as `smp.CheckpointManager` says. `fit` ends
            when the last one is whole.

    Raises:
        ValueError: `save_freq` is neither of these.

    Example:
        >>> model.fit(x, y, epochs=10, callbacks=[smp.callbacks.Checkpoint("checkpoints", max_to_keep=3)])
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        save_freq: str | int = "epoch",
        max_to_keep: int | None = None,
        restore: bool = True,
        *,
        fall_back: bool = False,
        asynchronous: bool = False,
    ) -> None:
        super().__init__()
        is_number = isinstance(save_freq, int) and not isinstance(save_freq, bool) and save_freq > 0
        if save_freq != "epoch" and not is_number:
            raise ValueError(f'save_freq is "epoch" or a positive number of batches. Received: {save_freq!r}')
        self._directory = os.fspath(directory)
        self._every = save_freq
        self._keep = max_to_keep
        self._restore, self._fall_back, self._asynchronous = restore, fall_back, asynchronous
        self._since_save = 0
        self._epochs = tf.Variable(0, dtype=tf.int64, name="epochs_done")

    def _implements_train_batch_hooks(self) -> bool:
        return self._every != "epoch"

    def on_train_begin(self, logs: Any = None) -> None:
        """Restores the latest checkpoint. Keras asks afterwards in which epoch to begin."""
        checkpoint = tf.train.Checkpoint(model=self.model, epochs=self._epochs)
        self._manager = CheckpointManager(checkpoint, self._directory, self._keep, asynchronous=self._asynchronous)
        if self._restore and self._manager._has_any and self._manager.restore(fall_back=self._fall_back) is not None:
            self.model._training_state = self

    def maybe_load_initial_counters_from_ckpt(
        self, steps_per_epoch: int | None, initial_epoch: int, mode: Any = None
    ) -> tuple[int, int]:
        """Returns where `fit` begins, as (epoch, batch). Keras asks `model._training_state` for it."""
        return max(initial_epoch, int(self._epochs)), 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Saves, if it is time after a number of batches."""
        if self._every == "epoch":
            return
        self._since_save += 1
        if self._since_save >= int(self._every):
            self._since_save = 0
            self._manager.save()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Counts the epoch, and saves, if this is done at the end of epochs."""
        self._epochs.assign(epoch + 1)
        if self._every == "epoch":
            self._manager.save()

    def on_train_end(self, logs: Any = None) -> None:
        """Lets the next `fit` begin where its arguments say, once what is written in the background is whole."""
        self._manager.wait()
        if getattr(self.model, "_training_state", None) is self:
            self.model._training_state = None


class Timeline(Callback):
    """Records what ran when in some batches of a training, and writes a file for each rank.

    The files are those of `smp.timeline`. `smp-tf timeline path --html out.html` makes a page of them.

    Args:
        steps: the first and the last batch to record, counted from 0 over all epochs of the `fit`. The first batches
            take longer than others. With `steps_per_execution`, whole executions are recorded.
        path: folder for the files.

    Raises:
        TimelineError: `steps` is no such pair.

    Example:
        >>> model.fit(x, y, callbacks=[smp.callbacks.Timeline(steps=(10, 12), path="timeline")])
    """

    def __init__(self, steps: Sequence[int] = (10, 12), path: str | os.PathLike[str] = "timeline") -> None:
        super().__init__()
        # It does not look at the logs of a batch, so Keras need not wait for their numbers.
        self._supports_tf_logs = True
        self._first, self._last = recording.check_steps(steps)
        self._path = os.fspath(path)
        self._records = False

    def on_train_begin(self, logs: Any = None) -> None:
        """Begins to count."""
        self._before_epoch = self._seen = 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Notes where the epoch begins."""
        self._before_epoch = self._seen

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Begins to record, if the first of these batches is next."""
        several = self.model.steps_per_execution
        next_ones = self._before_epoch + batch, 1 if several is None else int(several.numpy())
        if not self._records and next_ones[0] <= self._last and sum(next_ones) > self._first:
            recording.start()
            self._records = True

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Writes the file, if that was the last one."""
        self._seen = self._before_epoch + batch + 1
        if self._seen > self._last:
            self._write()

    def on_train_end(self, logs: Any = None) -> None:
        """Writes what there is, if the training ends before the last one."""
        self._write()

    def _write(self) -> None:
        if self._records:
            self._records = False
            recording.stop(self._path)


class PipelineSummary(Callback):
    """Prints after every epoch how the pipeline did: samples per second, bubble, bytes sent, and memory of every rank.

    Samples are those of all replicas. The bubble is the plan's: the share of the stages' time in which the schedule
    leaves them idle, by the plan's times. Bytes are what the transport has sent in the epoch. Memory is the most that a
    process has held so far.

    Args:
        log_dir: folder into which rank 0 writes the same numbers for TensorBoard; None for no such files.

    Example:
        >>> model.fit(x, y, callbacks=[smp.callbacks.PipelineSummary("logs")])
    """

    def __init__(self, log_dir: str | os.PathLike[str] | None = None) -> None:
        super().__init__()
        self._log_dir = None if log_dir is None else os.fspath(log_dir)
        self._writer: Any = None

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Notes where the epoch begins."""
        self._began = time.monotonic()
        self._samples_before = self._samples()
        self._sent_before = _sent()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Gathers the numbers of all ranks, and shows them on rank 0."""
        running = runtime.current()
        mine = {
            "seconds": time.monotonic() - self._began,
            "samples": self._samples() - self._samples_before,
            "sent": _sent() - self._sent_before,
            # Linux counts it in KiB.
            "memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        }
        ranks = exchange.allgather_json(mine, name=f"the pipeline summary of epoch {epoch + 1}")
        if running.topology.rank != WRITER:
            return
        partitions = running.topology.stages
        throughput = sum(r["samples"] for r in ranks) / partitions / max(r["seconds"] for r in ranks)
        plan = self.model.train_function.plan
        bubble = None if plan is None else _bubble(plan)
        self._show(epoch, throughput, bubble, ranks)
        self._write(epoch, throughput, bubble, ranks)

    def _samples(self) -> int:
        return int(self.model.train_function.samples)

    def _show(self, epoch: int, throughput: float, bubble: float | None, ranks: list[Mapping[str, Any]]) -> None:
        idle = "" if bubble is None else f", bubble of the plan {bubble:.0%}"
        table = Table()
        for column in ("rank", "sent", "memory at most"):
            table.add_column(column, justify="right")
        for rank, said in enumerate(ranks):
            table.add_row(str(rank), as_bytes(said["sent"]), as_bytes(said["memory"]))
        print(f"epoch {epoch + 1}: {throughput:,.1f} samples/s{idle}")
        Console(file=sys.stdout).print(table)

    def _write(self, epoch: int, throughput: float, bubble: float | None, ranks: list[Mapping[str, Any]]) -> None:
        if self._log_dir is None:
            return
        if self._writer is None:
            self._writer = tf.summary.create_file_writer(self._log_dir)
        with self._writer.as_default(step=epoch):
            tf.summary.scalar("pipeline/samples_per_second", throughput)
            if bubble is not None:
                tf.summary.scalar("pipeline/bubble", bubble)
            for rank, said in enumerate(ranks):
                tf.summary.scalar(f"pipeline/sent_bytes/rank_{rank}", said["sent"])
                tf.summary.scalar(f"pipeline/peak_memory_bytes/rank_{rank}", said["memory"])
        self._writer.flush()


def _bubble(plan: Plan) -> float:
    """Returns the share of the stages' time in which the plan's schedule leaves them idle."""
    # A backward pass takes about twice the time of the forward pass, and all chunks of a stage take equally long.
    shares = [plan.forecast[stage].time_share / plan.placement.count(stage) for stage in plan.placement]
    times = [ChunkTimes(share / 3, share / 3, share / 3) for share in shares]
    return simulate(program_of(plan.schedule, plan.placement, plan.microbatches), times).bubble_ratio


def _sent() -> int:
    transport = runtime.current().transport
    if transport is None:
        return 0
    return sum(int(peer["sent_bytes"]) for peer in transport.stats()["peers"])
