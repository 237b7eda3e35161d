"""The files of checkpoints: parts that ranks write, and a manifest that makes them a checkpoint.

    directory/
      ckpt-3.json                                  the manifest: without it there is no checkpoint 3
      mp_rank_0/ckpt-3-5f0c9a1e.index              a tensor bundle of TensorFlow, a crc32c per tensor
      mp_rank_0/ckpt-3-5f0c9a1e.data-00000-of-00001
      mp_rank_1/ckpt-3-5f0c9a1e.index ...
      mp_rank_0/ckpt-3-5f0c9a1e-1.index ...        of replica 1, where replicas share the optimizer's slots

    parts written, fsynced ──▶ all ranks have come ──▶ manifest written beside its place, fsynced, renamed ──▶ fsync

Every save draws part names of its own, so it never touches a file that an earlier manifest names, also when it saves
the same number again. A deletion takes the manifest first. Whatever instant a process is killed at, each manifest that
is there names files that are whole; files that no manifest names are left-overs, which a later save deletes.

This file knows folders, names and tensors; it knows nothing of models, ranks that talk, or TensorFlow's objects.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from smp_tf.errors import CheckpointError

VERSION = 1
#: Tensors are read in groups of up to this many bytes, so that small ones do not cost a look at the index each.
_GROUP = 16 << 20
_PART_FOLDER = re.compile(r"mp_rank_\d+\Z")


@dataclasses.dataclass(frozen=True)
class Part:
    """What one rank wrote.

    Args:
        prefix: of its files, relative to the directory, with "/", such as "mp_rank_0/ckpt-3-5f0c9a1e".
        sizes: bytes of each file, by its path relative to the directory.
        index_hash: SHA-256 of its index file, which holds the checksum of every tensor.
    """

    prefix: str
    sizes: Mapping[str, int]
    index_hash: str


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """One tensor of a checkpoint.

    Args:
        part: number of the part that holds it.
        dtype: name of its dtype, such as "float32".
        shape: its shape.
        kind: what it is the state of; see `checkpoint_keys.Kind`.
        stage: the stage that owned it; None for what every rank has.
        optimizer: path of the optimizer it belongs to, or "".
    """

    part: int
    dtype: str
    shape: tuple[int, ...]
    kind: str
    stage: int | None = None
    optimizer: str = ""


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What a checkpoint consists of.

    Args:
        name: such as "ckpt-3".
        sequence: how many checkpoints were committed in the directory before; the largest is the latest.
        partitions: stages of the job that wrote it.
        replicas: replicas of that job.
        parts: what the ranks wrote.
        tensors: every tensor, by key.
        optimizers: path of every optimizer, and whether it had been used when the checkpoint was written.
        random: what random ops inside steps depend on.
        saved_at: when it was committed, in seconds since 1970.
        begun: when the first checkpoint's manager of the directory was made, in the same seconds.
        is_kept: whether it stays for good, and does not count among those that are rotated.
        digest: SHA-256 of the manifest's file; "" until it is read.
    """

    name: str
    sequence: int
    partitions: int
    replicas: int
    parts: tuple[Part, ...]
    tensors: Mapping[str, StoredTensor]
    optimizers: Mapping[str, bool] = dataclasses.field(default_factory=dict)
    random: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    saved_at: float = 0.0
    begun: float = 0.0
    is_kept: bool = False
    digest: str = ""


@dataclasses.dataclass(frozen=True)
class Listing:
    """The manifests of a directory.

    Args:
        manifests: of the checkpoints, from oldest to newest.
        damaged: paths of manifests that cannot be read.
    """

    manifests: tuple[Manifest, ...]
    damaged: tuple[str, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Of the checkpoints, from oldest to newest."""
        return tuple(manifest.name for manifest in self.manifests)

    @property
    def last_sequence(self) -> int:
        """The largest sequence number in use; -1 where there is none."""
        return max((manifest.sequence for manifest in self.manifests), default=-1)

    @property
    def parts(self) -> frozenset[str]:
        """Prefixes that a manifest names."""
        return frozenset(part.prefix for manifest in self.manifests for part in manifest.parts)


def manifest_path(directory: str, name: str) -> str:
    """Where the manifest of a checkpoint is."""
    return os.path.join(directory, f"{name}.json")


def write_part(directory: str, prefix: str, tensors: Mapping[str, tf.Tensor]) -> Part:
    """Write tensors as a part and wait until the disk has it.

    Args:
        directory: of the checkpoints.
        prefix: of the part's files, relative to the directory; nothing has this name yet.
        tensors: by key. Their memory is written as it is; there is no copy of it.

    Returns:
        The part.

    Raises:
        OSError: a folder or file cannot be made, written or synced.
        tf.errors.OpError: TensorFlow cannot write the tensors.
    """
    full = os.path.join(directory, *prefix.split("/"))
    folder = os.path.dirname(full)
    os.makedirs(folder, exist_ok=True)
    tf.raw_ops.SaveV2(
        prefix=full, tensor_names=list(tensors), shape_and_slices=[""] * len(tensors), tensors=list(tensors.values())
    )
    base = os.path.basename(full)
    files = sorted(name for name in os.listdir(folder) if name.startswith(f"{base}."))
    for name in files:
        _sync(os.path.join(folder, name))
    _sync(folder)
    _sync(directory)
    parent = prefix.rpartition("/")[0]
    sizes = {f"{parent}/{name}": os.path.getsize(os.path.join(folder, name)) for name in files}
    return Part(prefix, sizes, _hash_of(f"{full}.index"))


def commit(directory: str, manifest: Manifest) -> None:
    """Make parts a checkpoint: put its manifest in place, at once and for good.

    Args:
        directory: of the checkpoints.
        manifest: names parts that are on disk.

    Raises:
        OSError: the manifest cannot be written, renamed or synced.
    """
    place = manifest_path(directory, manifest.name)
    building = f"{place}.writing"
    with open(building, "wb") as file:
        file.write(_encoded(manifest))
        file.flush()
        os.fsync(file.fileno())
    os.replace(building, place)
    _sync(directory)


def delete(directory: str, name: str) -> None:
    """Delete a checkpoint: its manifest, for good, and then its parts.

    Args:
        directory: of the checkpoints.
        name: the checkpoint, which exists.
    """
    manifest = read_manifest(directory, name)
    os.remove(manifest_path(directory, name))
    _sync(directory)
    for part in manifest.parts:
        delete_part(directory, part.prefix)


def delete_part(directory: str, prefix: str) -> None:
    """Delete the files of a part, those of an interrupted write too.

    Args:
        directory: of the checkpoints.
        prefix: of the part's files, relative to the directory.
    """
    parent, _, base = prefix.rpartition("/")
    folder = os.path.join(directory, parent)
    with contextlib.suppress(FileNotFoundError):
        for file in os.listdir(folder):
            if file.startswith(f"{base}."):
                os.remove(os.path.join(folder, file))


def clean(directory: str, name: str) -> None:
    """Delete what saves that were not completed have left.

    Nothing is deleted while a manifest cannot be read: its parts would look like left-overs.

    Args:
        directory: of the checkpoints.
        name: common name of the checkpoints, such as "ckpt"; those of other names are left alone.
    """
    found = listing(directory, name)
    if found.damaged:
        return
    ours = re.compile(rf"({re.escape(name)}-\d+-[0-9a-f]{{8}}(?:-\d+)?)\.(index|data-)")
    for folder in sorted(filter(_PART_FOLDER.match, os.listdir(directory))):
        for file in sorted(os.listdir(os.path.join(directory, folder))):
            match = ours.match(file)
            if match and f"{folder}/{match[1]}" not in found.parts:
                os.remove(os.path.join(directory, folder, file))
    for file in os.listdir(directory):
        if re.fullmatch(rf"{re.escape(name)}-\d+\.json\.writing", file):
            os.remove(os.path.join(directory, file))


def listing(directory: str, name: str) -> Listing:
    """The checkpoints in a directory.

    Args:
        directory: it need not exist.
        name: common name of the checkpoints, such as "ckpt".
    """
    try:
        files = sorted(os.listdir(directory))
    except FileNotFoundError:
        files = []
    found, damaged = [], []
    for file in files:
        if not re.fullmatch(rf"{re.escape(name)}-\d+\.json", file):
            continue
        try:
            found.append(read_manifest(directory, file.removesuffix(".json")))
        except CheckpointError:
            damaged.append(os.path.join(directory, file))
    found.sort(key=lambda manifest: manifest.sequence)
    return Listing(tuple(found), tuple(damaged))


def read_manifest(directory: str, name: str) -> Manifest:
    """The manifest of a checkpoint.

    Args:
        directory: of the checkpoints.
        name: such as "ckpt-3".

    Raises:
        FileNotFoundError: there is no such checkpoint.
        CheckpointError: the manifest is damaged, or of a later version of smp_tf.
    """
    path = manifest_path(directory, name)
    with open(path, "rb") as file:
        data = file.read()
    try:
        written = json.loads(data)
        version, content = written["version"], written["checkpoint"]
        whole = isinstance(version, int) and (version > VERSION or written["sha256"] == _content_hash(content))
        if whole and version <= VERSION:
            return _manifest_from(content, hashlib.sha256(data).hexdigest())
    except (ValueError, KeyError, TypeError, AttributeError):
        whole = False
    if whole:
        raise CheckpointError(
            f"{path} was written by a later smp_tf, in version {version} of the format; this one reads up to {VERSION}."
        )
    raise CheckpointError(
        f"The checkpoint's manifest {path} is damaged or truncated. Restore another checkpoint by its name, such as "
        f'manager.restore("ckpt-1"), or delete this file.'
    )


def check_files(directory: str, manifest: Manifest) -> None:
    """Raise unless the files of a checkpoint have their sizes, and its indices their hashes. Reads no tensor.

    Args:
        directory: of the checkpoints.
        manifest: of the checkpoint.

    Raises:
        CheckpointError: a file is missing, truncated or damaged; the message names it.
    """
    for part in manifest.parts:
        for name, size in part.sizes.items():
            path = os.path.join(directory, *name.split("/"))
            try:
                found = os.path.getsize(path)
            except OSError as error:
                raise CheckpointError(f"Checkpoint {manifest.name} lacks its file {path}: {error.strerror}.") from None
            if found != size:
                raise CheckpointError(
                    f"The file {path} of checkpoint {manifest.name} has {found} bytes, but was written with {size}."
                )
        index = os.path.join(directory, *f"{part.prefix}.index".split("/"))
        if _hash_of(index) != part.index_hash:
            raise CheckpointError(f"The file {index} of checkpoint {manifest.name} is damaged: its hash is another.")


def read_tensors(directory: str, manifest: Manifest, keys: Iterable[str]) -> Iterator[tuple[str, tf.Tensor]]:
    """Read tensors and check them against their checksums, holding a few at a time.

    Args:
        directory: of the checkpoints.
        manifest: of the checkpoint.
        keys: the tensors to read; no other is read.

    Yields:
        Key and value.

    Raises:
        CheckpointError: a tensor is damaged; the message names it and its file.
    """
    for part, group in _groups(manifest, keys):
        prefix = os.path.join(directory, *manifest.parts[part].prefix.split("/"))
        yield from zip(group, _read(prefix, manifest, group), strict=True)


def _read(prefix: str, manifest: Manifest, keys: Sequence[str]) -> list[tf.Tensor]:
    dtypes = [tf.as_dtype(manifest.tensors[key].dtype) for key in keys]
    try:
        with tf.device("CPU:0"):
            tensors: list[tf.Tensor] = tf.raw_ops.RestoreV2(
                prefix=prefix, tensor_names=list(keys), shape_and_slices=[""] * len(keys), dtypes=dtypes
            )
        return tensors
    except tf.errors.OpError as error:
        if len(keys) > 1:  # find the damaged one
            return [tensor for key in keys for tensor in _read(prefix, manifest, [key])]
        raise CheckpointError(
            f"{keys[0]!r} of checkpoint {manifest.name} cannot be read from {prefix}.data-00000-of-00001; the file is "
            f"damaged. TensorFlow says: {error.message.splitlines()[0]}"
        ) from None


def _groups(manifest: Manifest, keys: Iterable[str]) -> Iterator[tuple[int, list[str]]]:
    """Keys by part, in groups of at most `_GROUP` bytes."""
    by_part: dict[int, list[str]] = {}
    for key in keys:
        by_part.setdefault(manifest.tensors[key].part, []).append(key)
    for part, mine in sorted(by_part.items()):
        group: list[str] = []
        size = 0
        for key in mine:
            stored = manifest.tensors[key]
            bytes_here = tf.as_dtype(stored.dtype).size or 1
            for extent in stored.shape:
                bytes_here *= extent
            if group and size + bytes_here > _GROUP:
                yield part, group
                group, size = [], 0
            group.append(key)
            size += bytes_here
        if group:
            yield part, group


def _encoded(manifest: Manifest) -> bytes:
    content = {f.name: getattr(manifest, f.name) for f in dataclasses.fields(Manifest) if f.name != "digest"}
    content["parts"] = [dataclasses.asdict(part) for part in manifest.parts]
    content["tensors"] = {key: dataclasses.asdict(stored) for key, stored in manifest.tensors.items()}
    written = {"version": VERSION, "sha256": _content_hash(content), "checkpoint": content}
    return json.dumps(written, indent=1).encode()


def _manifest_from(content: dict[str, Any], digest: str) -> Manifest:
    return Manifest(
        **{
            **content,
            "parts": tuple(Part(**part) for part in content["parts"]),
            "tensors": {
                key: StoredTensor(**{**stored, "shape": tuple(stored["shape"])})
                for key, stored in content["tensors"].items()
            },
            "digest": digest,
        }
    )


def _content_hash(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _hash_of(path: str) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _sync(path: str) -> None:
    """Wait until the disk has a file's content, or a folder's entries."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
