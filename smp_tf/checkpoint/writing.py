"""One save of a checkpoint, once all ranks have come: parts, then the manifest, then the rotation.

Rank 0 holds the folder for its job (`folder_lock`) from the first save on. When a save fails, each rank deletes its own
part.
"""

from __future__ import annotations

import dataclasses
import os
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from smp_tf.announce import tell
from smp_tf.checkpoint import files as checkpoint_files
from smp_tf.checkpoint import folder_lock, leftovers, tensors
from smp_tf.checkpoint.manifest import Manifest, Part, StoredTensor, require_own_part
from smp_tf.checkpoint.rotation import Rotation
from smp_tf.checkpoint.survey import Item, StateKind, Survey, state_of
from smp_tf.errors import CheckpointError, PlacementError
from smp_tf.files.durable_files import make_folder
from smp_tf.job import exchange, runtime
from smp_tf.job.agreement import require_agreement
from smp_tf.job.channel import ControlChannel
from smp_tf.partition.mesh import CommGroup
from smp_tf.partition.plan.json_record import record_from
from smp_tf.variables import assigned_values, step_seeds


class Writing:
    """One save, once all ranks have come.

    Args:
        directory: of the checkpoints.
        series: common name of the checkpoints, such as "ckpt".
        name: name of this checkpoint.
        found: the survey of what this rank has.
        channel: how the ranks tell each other what they have written; None for the exchanges of the main thread.

    Raises:
        CheckpointError: on all ranks, when another job holds the folder, or rank 0 cannot take it.
        RankMismatchError: the ranks do not save the same, or have not assigned the same to variables of models.
    """

    def __init__(
        self, directory: str, series: str, name: str, found: Survey, channel: ControlChannel | None = None
    ) -> None:
        self._directory, self._series, self._name, self._found = directory, series, name, found
        self._channel, self._random = channel, step_seeds.state()
        #: Copies of the values that this rank writes, by key; None where the variables' own memory is written.
        self._copies: dict[str, tf.Tensor] | None = None
        self._not_copied = ""
        self._stall_timeout = runtime.current().config.stall_timeout
        topology = self._topology = runtime.current().topology
        #: World ranks of the replica that writes what all replicas have, by stage.
        self._writers = topology.mesh.members(CommGroup.PP_GROUP, 0)
        mine = {
            "must agree": {
                "checkpoint": name,
                "owners of the model's variables": {
                    i.key: i.stage for i in found.items.values() if i.kind is StateKind.MODEL
                },
            },
            "has": [item.key for item in found.items.values() if not _is_owned(item)],
            "built": found.optimizers,
            "left out": assigned_values.left_out(),
            "nonce": secrets.token_hex(4),
            "problem": self._take_folder() if topology.rank == 0 else "",
        }
        said = exchange.allgather_json(mine, name=f"saving checkpoint {name!r}")
        require_agreement(
            "what is to be saved",
            {rank: words["must agree"] for rank, words in enumerate(said)},
            topology.describe,
            "Save the same objects under the same number on every rank.",
        )
        self._raise_errors([words["problem"] for words in said], "be written")
        assigned_values.compare([words["left out"] for words in said])
        self._stem = f"{name}-{said[0]['nonce']}"
        self._built = {
            path: any(words["built"].get(path, False) for words in said) for words in said for path in words["built"]
        }
        #: The ranks in the order in which they are asked. Those of replica 0 come first.
        self._order = (*self._writers, *(rank for rank in range(topology.size) if rank not in self._writers))
        #: The rank that writes what is not a stage's own. It is the first that has it.
        self._writer_of: dict[str, int] = {}
        for rank in reversed(self._order):
            self._writer_of.update(dict.fromkeys(said[rank]["has"], rank))

    def copy_values(self) -> None:
        """Copies what this rank writes, so that the training may go on while it is written.

        Where this fails, `write_parts` tells all ranks.
        """
        try:
            self._copies = {item.key: _copied(_value(item)) for item in self._mine()}
        except Exception as error:
            self._copies, self._not_copied = {}, f"{type(error).__name__}: {error}"

    def _mine(self) -> list[Item]:
        """Returns what this rank writes."""
        return [item for item in self._found.items.values() if item.is_here and self._is_written_here(item)]

    def write_parts(self) -> None:
        """Writes this rank's part, and waits for all others.

        Raises:
            CheckpointError: a rank could not write.
        """
        told: dict[str, Any] = {"error": self._not_copied, "part": None, "tensors": {}}
        prefix = self._prefix(self._topology.rank)
        mine = [] if self._not_copied else self._mine()
        values = {} if self._copies is None else self._copies
        try:
            if mine:
                values = values or {item.key: _value(item) for item in mine}
                rows = {item.key: (*item.rows, item.extent) for item in mine if item.rows is not None}
                part = tensors.write_part(self._directory, prefix, values, rows)
                told["part"] = dataclasses.asdict(part)
                told["tensors"] = {item.key: self._described(item, values[item.key]) for item in mine}
        except Exception as error:
            told["error"] = f"{type(error).__name__}: {error}"
        except BaseException:
            self._delete_own_part()
            raise
        values.clear()
        self._told = self._exchanged(told, f"the parts of checkpoint {self._name!r} being written")
        errors = [words["error"] for words in self._told]
        if any(errors):
            self._delete_own_part()
            self._make_room()
        self._raise_errors(errors, "be written")

    def commit(self, rotation: Rotation) -> None:
        """Makes the parts a checkpoint, on rank 0, and deletes surplus ones.

        Args:
            rotation: says which checkpoints are kept.

        Raises:
            CheckpointError: rank 0 could not do so.
        """
        problem, is_committed = "", False
        if self._topology.rank == 0:
            try:
                replaced = self._commit(rotation.begun)
            except Exception as error:
                problem = f"{type(error).__name__}: {error}"
                own = [self._prefix(rank) for rank in self._order]
                is_committed = checkpoint_files.is_committed(self._directory, self._name, own)
            else:
                self._rotate(rotation, replaced)
        words = [problem, is_committed]
        said = self._exchanged(words, f"the end of saving checkpoint {self._name!r}")
        if any(problem for problem, _ in said) and not any(is_committed for _, is_committed in said):
            self._delete_own_part()
            self._make_room()
        self._raise_errors([problem for problem, _ in said], "be committed")

    def _exchanged(self, value: Any, name: str) -> list[Any]:
        """Gives every rank what every rank says."""
        if self._channel is None:
            return exchange.allgather_json(value, name=name)
        return self._channel.allgather(value, range(self._topology.size), name)

    def _take_folder(self) -> str:
        """Holds the folder for this job, on rank 0, and returns words for what prevents it."""
        try:
            if folder_lock.current(self._directory, self._series) is None:
                make_folder(self._directory)
                folder_lock.take(self._directory, self._series)
                self._make_room()
        except (OSError, CheckpointError) as error:
            return f"{type(error).__name__}: {error}"
        return ""

    def _make_room(self) -> None:
        """Deletes what killed jobs have left, on rank 0. Where this fails, saves go on."""
        if self._topology.rank != 0:
            return
        try:
            self._clean()
        except (OSError, CheckpointError) as error:
            tell(
                f"smp_tf: of what interrupted saves have left in {self._directory} not all could be deleted, which "
                f"later saves try again. {type(error).__name__}: {error}"
            )

    def _rotate(self, rotation: Rotation, replaced: Sequence[str]) -> None:
        """Deletes surplus checkpoints and replaced parts. Where this fails, the checkpoint is saved all the same."""
        try:
            for prefix in replaced:
                checkpoint_files.delete_part(self._directory, prefix)
            rotation.apply(self._directory, self._series)
            self._clean()
        except (OSError, CheckpointError) as error:
            tell(
                f"smp_tf: checkpoint {self._name!r} is saved, but of what it replaces in {self._directory} not all "
                f"could be deleted, which later saves try again. {type(error).__name__}: {error}"
            )

    def _clean(self) -> None:
        hold = folder_lock.current(self._directory, self._series)
        if hold is not None and hold.is_locked:
            # Ranks that wait longer than this for each other end, and then a save goes on nowhere.
            before = hold.now() - self._stall_timeout
            leftovers.clean(self._directory, self._series, before)

    def _prefix(self, rank: int) -> str:
        """Returns the prefix of the files that a rank writes."""
        mesh = self._topology.mesh
        # The ranks of a stage write to one folder, each to its own files.
        number = mesh.members(CommGroup.DP_GROUP, rank).index(rank)
        return f"mp_rank_{mesh.coordinates(rank)['P']}/{self._stem}{f'-{number}' if number else ''}"

    def _delete_own_part(self) -> None:
        """Deletes what this rank has written in a failed save. Where this fails, it becomes a left-over."""
        prefix = self._prefix(self._topology.rank)
        try:
            checkpoint_files.delete_part(self._directory, prefix)
        except (OSError, CheckpointError) as error:
            tell(f"smp_tf: {prefix}.* in {self._directory}, of a save that failed, could not be deleted: {error}")

    def _commit(self, begun: float) -> tuple[str, ...]:
        parts: list[Part] = []
        #: For each key, the parts that have the tensor or rows of it, and what it is.
        written: dict[str, list[tuple[int, list[Any]]]] = {}
        for rank in self._order:
            words = self._told[rank]
            if words["part"] is None:
                continue
            part = self._part_of(rank, words["part"])
            self._require_seen(rank, part.sizes)
            for key, described in words["tensors"].items():
                written.setdefault(key, []).append((len(parts), described))
            parts.append(part)
        stored = {key: _put_together(key, found) for key, found in written.items()}
        before = checkpoint_files.listing(self._directory, self._series)
        manifest = Manifest(
            name=self._name,
            sequence=before.last_sequence + 1,
            partitions=self._topology.stages,
            replicas=self._topology.replicas,
            parts=tuple(parts),
            tensors=stored,
            optimizers=self._built,
            random=self._random,
            saved_at=time.time(),
            begun=before.manifests[-1].begun if before.manifests else begun,
        )
        return checkpoint_files.commit(self._directory, manifest)

    def _part_of(self, rank: int, said: Any) -> Part:
        """Returns the part that a rank says it has written. Its files must be those that it was to write."""
        try:
            part: Part = record_from(Part, said, "its part")
        except PlacementError as error:
            raise CheckpointError(
                f"{self._topology.describe(rank)} wrote something else than a part. {error}"
            ) from None
        if part.prefix != self._prefix(rank):
            raise CheckpointError(
                f"{self._topology.describe(rank)} must write {self._prefix(rank)!r}, and no other files. Received: "
                f"{part.prefix!r}"
            )
        require_own_part(part, self._name)
        return part

    def _require_seen(self, rank: int, sizes: Mapping[str, int]) -> None:
        for file, size in sizes.items():
            path = os.path.join(self._directory, *file.split("/"))
            if not os.path.isfile(path) or os.path.getsize(path) != size:
                raise CheckpointError(
                    f"{self._topology.describe(rank)} wrote {path}, which rank 0 does not see so. The folder of a "
                    f"CheckpointManager must be one that all ranks share. Received: directory={self._directory!r}"
                )

    def _is_written_here(self, item: Item) -> bool:
        if item.stage is None:
            return self._topology.rank == self._writer_of[item.key]
        return item.layout.is_first_at(item.spread, self._topology.place)

    def _described(self, item: Item, value: tf.Tensor) -> list[Any]:
        shape = item.whole(value.shape).as_list()
        return [value.dtype.name, shape, item.kind.value, item.stage, item.optimizer, item.rows]

    def _raise_errors(self, errors: Sequence[str], what: str) -> None:
        failed = [f"{self._topology.describe(rank)}: {error}" for rank, error in enumerate(errors) if error]
        if failed:
            raise CheckpointError("\n".join([f"Checkpoint {self._name!r} could not {what}:", *failed]))


def _is_owned(item: Item) -> bool:
    """Returns whether a stage, and not every rank, stores an item."""
    return item.stage is not None


def _value(item: Item) -> tf.Tensor:
    """Returns the value of an item. For a variable it is the memory itself, not a copy."""
    if item.kind is StateKind.STATE:
        return state_of(item.target, item.part)
    return item.target.read_value()


def _copied(value: tf.Tensor) -> tf.Tensor:
    """Returns a copy of a value in the host's memory."""
    with tf.device("CPU:0"):
        on_host = tf.identity(value)
        if not (value.dtype.is_floating or value.dtype.is_integer or value.dtype.is_complex or value.dtype.is_bool):
            # TensorFlow copies texts and states of iterators when they are changed while somebody holds them.
            return on_host
        return tf.raw_ops.DeepCopy(x=on_host)


def _put_together(key: str, written: Sequence[tuple[int, Sequence[Any]]]) -> StoredTensor:
    """Returns one tensor of the manifest.

    Args:
        key: of the tensor.
        written: the parts that have it, or some rows of it, each with what its rank has said about it.

    Raises:
        CheckpointError: the parts have rows of it, but not each row once.
    """
    part, (dtype, shape, kind, stage, optimizer, _) = written[0]
    stored = StoredTensor(part, dtype, tuple(shape), kind, stage, optimizer)
    if all(rows is None for _, (*_, rows) in written):
        # Several may have it whole. What an optimizer keeps for a cut weight besides slots of rows is the same on all.
        return stored
    extent = stored.shape[0]
    slices = sorted((*(rows or (0, extent)), part) for part, (*_, rows) in written)
    missing, twice, end = [], [], 0
    for start, stop, _ in (*slices, (extent, extent, -1)):
        if start > end:
            missing.append(_rows(end, start))
        if start < min(stop, end):
            twice.append(_rows(start, min(stop, end)))
        end = max(end, stop)
    if missing or twice:
        faults = [f"no replica has written {', '.join(missing)}"] if missing else []
        faults += [f"several have written {', '.join(twice)}"] if twice else []
        raise CheckpointError(
            f"The replicas of a stage must write each of the {extent} rows of {key!r} once, but "
            f"{', and '.join(faults)}. Apply gradients on all replicas alike before you save."
        )
    if len(slices) == 1:
        return stored
    first = slices[0][2]
    return dataclasses.replace(stored, part=first, slices=tuple((part, start, stop) for start, stop, part in slices))


def _rows(start: int, stop: int) -> str:
    return f"row {start}" if stop == start + 1 else f"rows {start} to {stop - 1}"
