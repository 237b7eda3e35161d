"""`smp.CheckpointManager`: checkpoints of a training whose state is spread over ranks.

save       all ranks come, say what they have ──▶ owners write parts ──▶ all are done ──▶ rank 0 commits, then rotates
restore    all ranks agree on the checkpoint  ──▶ each reads what it stores; the rest waits for its objects

`writing.py` is one save, and `background.py` one that goes on while the training does. `files.py` says what is written
where, `manifest.py` how that is noted, `survey.py` under which keys, `rotation.py` what stays, and `restore.py` how it
is restored.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from smp_tf.announce import announce, tell
from smp_tf.checkpoint import background, folder_lock, pending
from smp_tf.checkpoint import files as checkpoint_files
from smp_tf.checkpoint.manifest import Manifest
from smp_tf.checkpoint.newest_whole import newest_whole
from smp_tf.checkpoint.restore import Restore
from smp_tf.checkpoint.rotation import Rotation
from smp_tf.checkpoint.survey import Survey, survey
from smp_tf.checkpoint.writing import Writing
from smp_tf.errors import CheckpointError
from smp_tf.job import exchange, runtime
from smp_tf.job.agreement import require_agreement


class CheckpointManager(tf.train.CheckpointManager):
    """Saves and restores a training whose state is spread over the ranks, and keeps the latest checkpoints.

    It is used like `tf.train.CheckpointManager`, on every rank. The rank that stores a variable writes it, into
    `<directory>/mp_rank_<stage>/`, and only ranks that store it read it. What every rank has (variables of the script,
    metrics, step counters) is written once. A checkpoint can be restored on another number of partitions or replicas,
    with another placement, and in one plain process.

    A checkpoint exists when its manifest `<directory>/ckpt-N.json` exists. The manifest is written when all else is on
    disk, so a job that is killed while it saves leaves the checkpoint before. One job at a time saves into a folder.
    Its first save takes the folder, until `smp.shutdown`. The seed and the step counters that dropout masks depend on
    are part of a checkpoint. Python's and NumPy's generators are the script's own.

    Args:
        checkpoint: a `tf.train.Checkpoint` of what is to be saved, such as
            `tf.train.Checkpoint(optimizer=optimizer, model=model, best=tf.Variable(0.0))`; the same on all ranks.
        directory: a folder that all ranks see.
        max_to_keep: how many checkpoints are kept; the oldest are deleted first. None keeps all.
        checkpoint_name: the name of checkpoints, before their number.
        keep_checkpoint_every_n_hours: hours after which one of the surplus checkpoints is kept for good. It is not
            listed in `checkpoints` any more, but can be restored by its name.
        step_counter: a `tf.Variable` that counts steps, for `checkpoint_interval`.
        checkpoint_interval: the fewest steps between two checkpoints. Before that, `save` does nothing.
        init_fn: a function that `restore_or_initialize` calls where there is no checkpoint.
        last_checkpoint_step: the step of the last checkpoint, for `checkpoint_interval`.
        asynchronous: whether the training goes on while a checkpoint is written. `save` copies what this rank writes,
            which takes as much of the host's memory, and returns. A thread writes it. The next save or restore of the
            job, `wait` and `smp.shutdown` wait for its end, and raise its error.

    Raises:
        TypeError: `checkpoint` is not a `tf.train.Checkpoint`.
        ValueError: `max_to_keep` or the number of hours is not positive, there is an interval without a step counter,
            or `checkpoint_name` is a path.
        NotInitializedError: `smp.init` was not called.

    Example:
        >>> checkpoint = tf.train.Checkpoint(optimizer=optimizer, model=model)
        >>> manager = smp.CheckpointManager(checkpoint, "checkpoints", max_to_keep=3)
        >>> manager.restore()  # the latest; does nothing in an empty folder
        >>> train(images, labels)
        >>> manager.save()
        'checkpoints/ckpt-1'
    """

    def __init__(
        self,
        checkpoint: tf.train.Checkpoint,
        directory: str | os.PathLike[str],
        max_to_keep: int | None = None,
        checkpoint_name: str = "ckpt",
        *,
        keep_checkpoint_every_n_hours: float | None = None,
        step_counter: tf.Variable | None = None,
        checkpoint_interval: int | None = None,
        init_fn: Callable[[], Any] | None = None,
        last_checkpoint_step: int | None = None,
        asynchronous: bool = False,
    ) -> None:
        runtime.current()
        if not isinstance(checkpoint, tf.train.Checkpoint):
            raise TypeError(
                f"smp.CheckpointManager takes a tf.train.Checkpoint, such as tf.train.Checkpoint(optimizer=optimizer, "
                f"model=model). Received: {checkpoint!r} (of type {type(checkpoint).__name__})."
            )
        if keep_checkpoint_every_n_hours is not None and not keep_checkpoint_every_n_hours > 0:
            raise ValueError(
                f"keep_checkpoint_every_n_hours is a number of hours, or None to keep none for good. Received: "
                f"{keep_checkpoint_every_n_hours!r}"
            )
        if (
            os.path.basename(checkpoint_name) != checkpoint_name
            or checkpoint_name in ("", ".", "..")
            or "\0" in checkpoint_name
        ):
            raise ValueError(
                f"checkpoint_name is what files in the folder are called before their number, and no path. "
                f"Received: {checkpoint_name!r}"
            )
        super().__init__(
            checkpoint,
            os.fspath(directory),
            max_to_keep,
            keep_checkpoint_every_n_hours=keep_checkpoint_every_n_hours,
            checkpoint_name=checkpoint_name,
            step_counter=step_counter,
            checkpoint_interval=checkpoint_interval,
            init_fn=init_fn,
        )
        # The constructor of TensorFlow 2.16 does not take it.
        self._last_checkpoint_step = last_checkpoint_step
        self._name, self._asynchronous = checkpoint_name, asynchronous
        self._rotation = Rotation(max_to_keep, keep_checkpoint_every_n_hours, time.time())

    @property
    def checkpoints(self) -> list[str]:
        """Returns the checkpoints that are rotated, from oldest to newest, as `<directory>/ckpt-N`."""
        found = checkpoint_files.listing(self.directory, self._name).manifests
        return [os.path.join(self.directory, manifest.name) for manifest in found if not manifest.is_kept]

    @property
    def latest_checkpoint(self) -> str | None:
        """Returns the checkpoint that was saved last, as `<directory>/ckpt-N`; None where there is none."""
        names = checkpoint_files.listing(self.directory, self._name).names
        return os.path.join(self.directory, names[-1]) if names else None

    @property
    def _has_any(self) -> bool:
        """Returns whether there is any checkpoint, be it damaged."""
        found = checkpoint_files.listing(self.directory, self._name)
        return bool(found.manifests or found.damaged)

    def save(self, checkpoint_number: Any = None, check_interval: bool = True, options: Any = None) -> str | None:
        """Saves a checkpoint, and deletes surplus ones.

        Every rank calls it, outside any `tf.function`.

        Args:
            checkpoint_number: an int, or a variable or tensor of one; by default the checkpoint's own `save_counter`.
                A checkpoint of the same number is replaced once the new one is complete.
            check_interval: whether to do nothing before `checkpoint_interval` is over.
            options: not supported.

        Returns:
            `<directory>/ckpt-N`, or None where the interval is not over. With `asynchronous` the checkpoint exists
            later, when all ranks have written.

        Raises:
            CheckpointError: on all ranks, when any of them cannot write, or could not in the background, when another
                live job saves into the folder, when a model has not run a step, or when state of an earlier checkpoint
                is still to be restored. Earlier checkpoints are unchanged, and nothing is left of this one.
            RankMismatchError: not every rank calls it, or not with the same objects.
            ValueError: options were given.

        Example:
            >>> manager = smp.CheckpointManager(tf.train.Checkpoint(model=model), "checkpoints")
            >>> manager.save()
            'checkpoints/ckpt-1'
            >>> manager.save(checkpoint_number=7)
            'checkpoints/ckpt-7'
        """
        if options is not None:
            raise ValueError(f"smp.CheckpointManager.save takes no options. Received: options={options!r}")
        if not tf.executing_eagerly():
            raise CheckpointError(
                "manager.save() was called while a tf.function is traced. Call it outside: it writes files, together "
                "with all other ranks."
            )
        if self._is_too_early(check_interval):
            return None
        background.finish(doing="manager.save()")
        counter = self.checkpoint.save_counter
        counter.assign_add(1)
        number = int(counter if checkpoint_number is None else checkpoint_number)
        name = f"{self._name}-{number}"
        found = survey(self.checkpoint)
        self._check_complete(name, found)
        if not self._asynchronous:
            writing = Writing(self.directory, self._name, name, found)
            writing.write_parts()
            writing.commit(self._rotation)
            return os.path.join(self.directory, name)
        writing = Writing(self.directory, self._name, name, found, background.channel())
        writing.copy_values()

        def write() -> None:
            writing.write_parts()
            writing.commit(self._rotation)

        background.begin(name, write)
        return os.path.join(self.directory, name)

    def wait(self) -> None:
        """Returns when the checkpoint that is written in the background, if there is one, is whole.

        Raises:
            CheckpointError: on all ranks, when it could not be written.

        Example:
            >>> manager = smp.CheckpointManager(tf.train.Checkpoint(model=model), "checkpoints", asynchronous=True)
            >>> manager.save()
            'checkpoints/ckpt-1'
            >>> manager.wait()  # now it is there
        """
        background.finish()

    def restore(
        self,
        restore_prefix: str | os.PathLike[str] | None = None,
        *,
        expect_partial: bool = False,
        fall_back: bool = False,
    ) -> str | None:
        """Restores a checkpoint.

        Every rank calls it.

        What exists is restored at once. What does not exist yet is restored when it is made: the model's variables at
        the first step, and the optimizer's slots when it first applies gradients. After the first step, it restores all
        or, when a file is damaged, nothing. Weights that `model.load_weights` or `set_weights` gives after this call
        and before the first step stay, since the last call wins.

        Args:
            restore_prefix: the checkpoint: "ckpt-2" or a path that ends so; by default the latest.
            expect_partial: whether the checkpoint is meant to hold more, or less, than there is here.
            fall_back: whether to restore the newest checkpoint that is whole, where the latest is damaged. All of it is
                read for that, once, each rank a share. Rank 0 names both.

        Returns:
            `<directory>/ckpt-N`, or None where there is no such checkpoint. Then nothing is done, and rank 0 says so.

        Raises:
            CheckpointError: on all ranks, when a file is missing, damaged or truncated on any of them, or with
                `fall_back` in every checkpoint; when shapes or dtypes differ; when the checkpoint lacks something that
                is here, or holds something that is not. State of objects that are made later is checked then. What the
                first step has not taken is an error.
            RankMismatchError: not every rank calls it, or the ranks see different files.
            ValueError: `fall_back` is given with a checkpoint, and is for the latest.

        Example:
            >>> manager = smp.CheckpointManager(tf.train.Checkpoint(model=model), "checkpoints")
            >>> manager.restore(restore_prefix="ckpt-2")  # there is none
        """
        if fall_back and restore_prefix is not None:
            raise ValueError(
                f"fall_back=True takes the newest whole checkpoint in place of the latest, so no other can be asked "
                f"for. Received: restore_prefix={os.fspath(restore_prefix)!r}"
            )
        running = runtime.current()
        if not tf.executing_eagerly():
            raise CheckpointError("manager.restore() was called while a tf.function is traced. Call it outside.")
        background.finish(doing="manager.restore()")
        directory, name = self._asked(restore_prefix)
        manifest = self._newest_whole() if fall_back else self._agreed(directory, name)
        if running.topology.rank == 0:
            self._tell_of_another_job()
        if manifest is None:
            what = f"checkpoint {name!r}" if name else "checkpoint"
            announce(f"there is no {what} in {directory!r}; nothing is restored.", running.topology.rank)
            return None
        # It is made now, so that its value is restored, and later checkpoints go on counting.
        _ = self.checkpoint.save_counter
        restoring = Restore(self.checkpoint, directory, manifest, expect_partial)
        restoring.begin()
        pending.install(restoring)
        if self.checkpoint_interval is not None:
            self._last_checkpoint_step = int(self._step_counter)
        return os.path.join(directory, manifest.name)

    def restore_or_initialize(self) -> str | None:
        """Restores the latest checkpoint, or calls `init_fn` where there is none.

        Every rank calls it.

        Returns:
            `<directory>/ckpt-N`, or None where there is no checkpoint.

        Raises:
            CheckpointError: for the reasons of `restore`.
            RankMismatchError: for the reasons of `restore`.

        Example:
            >>> checkpoint = tf.train.Checkpoint(model=model)
            >>> manager = smp.CheckpointManager(checkpoint, "checkpoints", init_fn=lambda: print("from the start"))
            >>> manager.restore_or_initialize()
            from the start
        """
        restored = self.restore()
        if restored is None and self._init_fn is not None:
            self._init_fn()
        return restored

    def _is_too_early(self, check_interval: bool) -> bool:
        if self.checkpoint_interval is None:
            return False
        step, last = int(self._step_counter), self._last_checkpoint_step
        if last is not None and (step == last or (check_interval and step < last + self.checkpoint_interval)):
            return True
        self._last_checkpoint_step = step
        return False

    def _tell_of_another_job(self) -> None:
        """Says at the start that another job holds the folder, which would end this job at its first save."""
        try:
            folder_lock.require_unused(self.directory, self._name)
        except CheckpointError as error:
            announce(f"manager.save() will fail while this is so: {error}", rank=0)

    def _asked(self, restore_prefix: str | os.PathLike[str] | None) -> tuple[str, str]:
        """Returns the folder and the name of the checkpoint to restore; an empty name for the latest."""
        if restore_prefix is None:
            return self.directory, ""
        folder, name = os.path.split(os.fspath(restore_prefix))
        return folder or self.directory, name

    def _agreed(self, directory: str, name: str) -> Manifest | None:
        """Returns the checkpoint that is asked for, the same on all ranks; None where there is none."""
        manifest, problem = None, ""
        try:
            manifest = self._find(directory, name)
        except CheckpointError as error:
            problem = str(error)
        seen = {
            "checkpoint": manifest.name if manifest else None,
            "hash of its manifest": manifest.digest if manifest else None,
            "problem": problem,
        }
        said = exchange.allgather_json(seen, name=f"restoring {name or 'the latest checkpoint'}")
        require_agreement(
            "the checkpoint to restore",
            dict(enumerate(said)),
            runtime.current().topology.describe,
            f"All ranks must see the same folder {directory!r} and ask for the same checkpoint.",
        )
        if problem:
            raise CheckpointError(problem)
        return manifest

    def _newest_whole(self) -> Manifest | None:
        """Returns the newest whole checkpoint, the same on all ranks, and says on rank 0 which ones were left out."""
        chosen = newest_whole(self.directory, self._name)
        words = [f"{name!r} is left out: {problem}" for name, problem in chosen.damaged]
        if words and chosen.manifest is None:
            raise CheckpointError("\n".join([f"No checkpoint in {self.directory!r} is whole.", *words]))
        if words and runtime.current().topology.rank == 0:
            assert chosen.manifest is not None, "there is one"
            tell(
                f"smp_tf: {chosen.manifest.name!r}, the newest whole checkpoint in {self.directory!r}, is restored. "
                f"{' '.join(words)}"
            )
        return chosen.manifest

    def _find(self, directory: str, name: str) -> Manifest | None:
        if not name:
            found = checkpoint_files.listing(directory, self._name)
            if found.damaged:
                # It may be the latest one. Reading it again says what is wrong with it, and what to do.
                name = os.path.basename(found.damaged[-1]).removesuffix(".json")
            elif found.names:
                name = found.names[-1]
            else:
                return None
        try:
            return checkpoint_files.read_manifest(directory, name)
        except FileNotFoundError:
            return None

    def _check_complete(self, name: str, found: Survey) -> None:
        """Raises an error where a checkpoint saved now would lack something."""
        if found.unfinished:
            raise CheckpointError(
                f"Checkpoint {name!r} would lack variables: the model at {found.unfinished[0]!r} has not run a step "
                f"yet. Save after the first step."
            )
        if found.orphans:
            path, count = found.orphans[0]
            raise CheckpointError(
                f"The optimizer at {path!r} has slots of {count} variables that cannot be reached from the checkpoint, "
                f"so they have no name in it. Give tf.train.Checkpoint the model too: "
                f"tf.train.Checkpoint(optimizer=optimizer, model=model)."
            )
        if found.other_shares:
            raise CheckpointError(
                f"Checkpoint {name!r} would lack slots of the optimizer at {found.other_shares[0]!r}: before "
                f"smp.shutdown it was used with another shard_optimizer_state, or another number of replicas that "
                f"shared them. Save before smp.shutdown."
            )
        restoring = pending.current()
        if isinstance(restoring, Restore):
            waiting = restoring.check(found)
            if waiting:
                raise CheckpointError(
                    f"Checkpoint {name!r} would lose state of checkpoint {restoring.name!r} that nothing has taken up "
                    f"yet: {', '.join(waiting[:10])}. Run a training step before, or restore with expect_partial=True."
                )
