"""The files of checkpoints: parts that ranks write, and a manifest that makes them a checkpoint.

    directory/
      ckpt-3.json                                  the manifest: without it there is no checkpoint 3
      mp_rank_0/ckpt-3-5f0c9a1e.index              a tensor bundle of TensorFlow, a crc32c per tensor
      mp_rank_0/ckpt-3-5f0c9a1e.data-00000-of-00001
      mp_rank_1/ckpt-3-5f0c9a1e.index ...
      mp_rank_0/ckpt-3-5f0c9a1e-1.index ...        of replica 1, where replicas share the optimizer's slots

A tensor is whole in one part. Or, where each replica has some rows of it, it is in several parts: each holds its rows
under the tensor's key, as a slice in TensorFlow's sense.

    parts written, fsynced ──▶ all ranks have come ──▶ manifest written next to its place, fsynced, renamed ──▶ fsync

Every save draws its own names for parts. So it never touches a file that an earlier manifest names, even when it saves
the same number again. A deletion removes the manifest first. Whenever a process is killed, each existing manifest names
files that are whole. Files that no manifest names are left-overs (`leftovers.py`).

A manifest may come from elsewhere. So `manifest.py` refuses names that no save writes, and nothing is written or
deleted through a link.

This file knows folders, names and tensors. It does not know models, other ranks, or TensorFlow's objects.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

import tensorflow as tf

from smp_tf.checkpoint.manifest import Manifest, Part, damaged, decoded, encoded, require_own_files
from smp_tf.config.text_file import UnreadableError, read_text
from smp_tf.errors import CheckpointError
from smp_tf.files import contained_path
from smp_tf.files.durable_files import make_folder, sync, write_file

#: The most bytes of a group of tensors that is read at once, so that small tensors do not each cost a look at the
#: index.
_GROUP = 16 << 20
#: TensorFlow's text for a tensor that is no slice.
_WHOLE = ""
#: The most bytes of a manifest. A tensor takes some 200 bytes.
_MOST_MANIFEST = 1 << 30


@dataclasses.dataclass(frozen=True)
class Listing:
    """The manifests of a directory.

    Args:
        manifests: manifests of the checkpoints, from oldest to newest.
        damaged: paths of manifests that cannot be read.
    """

    manifests: tuple[Manifest, ...]
    damaged: tuple[str, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Returns the names of the checkpoints, from oldest to newest."""
        return tuple(manifest.name for manifest in self.manifests)

    @property
    def last_sequence(self) -> int:
        """Returns the largest sequence number in use; -1 where there is none."""
        return max((manifest.sequence for manifest in self.manifests), default=-1)

    @property
    def parts(self) -> frozenset[str]:
        """Returns the prefixes that a manifest names."""
        return frozenset(part.prefix for manifest in self.manifests for part in manifest.parts)


def manifest_path(directory: str, name: str) -> str:
    """Returns the path of a checkpoint's manifest."""
    return os.path.join(directory, f"{name}.json")


def write_part(
    directory: str,
    prefix: str,
    tensors: Mapping[str, tf.Tensor],
    rows: Mapping[str, tuple[int, int, int]] | None = None,
) -> Part:
    """Writes tensors as a part, and waits until the disk has it.

    Args:
        directory: of the checkpoints.
        prefix: prefix of the part's files, relative to the directory. Nothing has this name yet.
        tensors: tensors by key. Their memory is written directly, without a copy.
        rows: for tensors that are some rows of a whole, by key: the first row, the row after the last, and the number
            of rows of the whole.

    Returns:
        The part.

    Raises:
        OSError: a folder or file cannot be made, written or synced.
        CheckpointError: the folder is a link.
        tf.errors.OpError: TensorFlow cannot write the tensors.
    """
    full = _place(directory, prefix)
    folder = os.path.dirname(full)
    make_folder(folder)
    slices = dict.fromkeys(tensors, _WHOLE)
    for key, (start, stop, extent) in (rows or {}).items():
        slices[key] = _slice((extent, *tensors[key].shape.as_list()[1:]), start, stop)
    tf.raw_ops.SaveV2(
        prefix=full,
        tensor_names=list(tensors),
        shape_and_slices=[slices[key] for key in tensors],
        tensors=list(tensors.values()),
    )
    base = os.path.basename(full)
    files = sorted(name for name in os.listdir(folder) if name.startswith(f"{base}."))
    for name in files:
        sync(os.path.join(folder, name))
    sync(folder)
    parent = prefix.rpartition("/")[0]
    sizes = {f"{parent}/{name}": os.path.getsize(os.path.join(folder, name)) for name in files}
    return Part(prefix, sizes, _hash_of(f"{full}.index"))


def commit(directory: str, manifest: Manifest) -> tuple[str, ...]:
    """Makes parts a checkpoint by putting its manifest in place, at once and for good.

    Args:
        directory: of the checkpoints.
        manifest: the manifest, which names parts that are on disk.

    Returns:
        The prefixes of parts that an earlier checkpoint of the same name had, and that no manifest names any more.

    Raises:
        OSError: the manifest cannot be written, renamed or synced.
        CheckpointError: the manifest names files that are not its own, or files that another job has deleted. An
            earlier checkpoint of the same name is unchanged.
    """
    require_own_files(manifest)
    place = manifest_path(directory, manifest.name)
    earlier, new = _content(place), encoded(manifest)
    replaced: frozenset[str] = frozenset()
    with contextlib.suppress(FileNotFoundError, CheckpointError):
        replaced = frozenset(part.prefix for part in read_manifest(directory, manifest.name).parts)
    try:
        write_file(place, new)
        # The files are checked once the manifest is in place. From then on no job takes the parts for left-overs.
        _require_sizes(directory, manifest)
    except BaseException:
        if _content(place) == new != earlier:
            if earlier is None:
                os.remove(place)
                sync(directory)
            else:
                write_file(place, earlier)
        raise
    return tuple(sorted(replaced - {part.prefix for part in manifest.parts}))


def is_committed(directory: str, name: str, prefixes: Iterable[str]) -> bool:
    """Returns whether parts belong to a checkpoint, or may belong to it, since its manifest cannot be read.

    Args:
        directory: of the checkpoints.
        name: of the checkpoint.
        prefixes: prefixes of the parts.
    """
    try:
        return not {part.prefix for part in read_manifest(directory, name).parts}.isdisjoint(prefixes)
    except FileNotFoundError:
        return False
    except (OSError, CheckpointError):
        return True


def _content(path: str) -> bytes | None:
    with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
        return file.read()
    return None


def delete(directory: str, name: str) -> None:
    """Deletes a checkpoint: first its manifest, for good, and then its parts.

    Args:
        directory: of the checkpoints.
        name: the checkpoint, which exists.

    Raises:
        CheckpointError: the manifest is damaged, or a part's folder is a link.
        OSError: a file cannot be deleted.
    """
    manifest = read_manifest(directory, name)
    os.remove(manifest_path(directory, name))
    sync(directory)
    for part in manifest.parts:
        delete_part(directory, part.prefix)


def delete_part(directory: str, prefix: str) -> None:
    """Deletes the files of a part, also those of an interrupted write.

    Args:
        directory: of the checkpoints.
        prefix: of the part's files, relative to the directory.

    Raises:
        CheckpointError: the part's folder is a link.
        OSError: a file cannot be deleted.
    """
    parent, _, base = prefix.rpartition("/")
    folder = _place(directory, parent)
    with contextlib.suppress(FileNotFoundError):
        for file in os.listdir(folder):
            if file.startswith(f"{base}."):
                os.remove(os.path.join(folder, file))


def _place(directory: str, name: str) -> str:
    """Returns the path of a checkpoint's file that is about to be written or deleted."""
    try:
        return contained_path.within(directory, name)
    except contained_path.PathError as error:
        raise CheckpointError(f"The path of a checkpoint's files {error}") from None


def listing(directory: str, name: str) -> Listing:
    """Returns the checkpoints in a directory.

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
        if not re.fullmatch(rf"{re.escape(name)}-[0-9]+\.json", file):
            continue
        try:
            found.append(read_manifest(directory, file.removesuffix(".json")))
        except FileNotFoundError:
            # The rotation of another job has deleted it since the folder was listed.
            continue
        except CheckpointError:
            damaged.append(os.path.join(directory, file))
    found.sort(key=lambda manifest: manifest.sequence)
    return Listing(tuple(found), tuple(damaged))


def read_manifest(directory: str, name: str) -> Manifest:
    """Returns the manifest of a checkpoint.

    Args:
        directory: of the checkpoints.
        name: name of the checkpoint, such as "ckpt-3".

    Raises:
        FileNotFoundError: there is no such checkpoint.
        CheckpointError: the manifest is damaged, or of a later version of smp_tf.
    """
    path = manifest_path(directory, name)
    try:
        text = read_text(path, _MOST_MANIFEST)
    except UnreadableError as error:
        raise damaged(path, str(error)) from None
    return decoded(text, path)


def check_files(directory: str, manifest: Manifest) -> None:
    """Raises an error unless a checkpoint's files have their sizes, and its indices their hashes. Reads no tensor.

    Args:
        directory: of the checkpoints.
        manifest: of the checkpoint.

    Raises:
        CheckpointError: a file is missing, truncated or damaged. The message names it.
    """
    _require_sizes(directory, manifest)
    for part in manifest.parts:
        index = os.path.join(directory, *f"{part.prefix}.index".split("/"))
        if _hash_of(index) != part.index_hash:
            raise CheckpointError(f"The file {index} of checkpoint {manifest.name} is damaged: its hash is another.")


def _require_sizes(directory: str, manifest: Manifest) -> None:
    for name, size in [item for part in manifest.parts for item in part.sizes.items()]:
        path = os.path.join(directory, *name.split("/"))
        try:
            found = os.path.getsize(path)
        except OSError as error:
            raise CheckpointError(f"Checkpoint {manifest.name} lacks its file {path}: {error.strerror}.") from None
        if found != size:
            raise CheckpointError(
                f"The file {path} of checkpoint {manifest.name} has {found} bytes, but was written with {size}."
            )


def read_tensors(directory: str, manifest: Manifest, keys: Iterable[str]) -> Iterator[tuple[str, tf.Tensor]]:
    """Reads tensors and checks them against their checksums, holding a few at a time.

    Args:
        directory: of the checkpoints.
        manifest: of the checkpoint.
        keys: the tensors to read. No other is read. A tensor in slices is put together.

    Yields:
        Key and value.

    Raises:
        CheckpointError: a tensor is damaged. The message names it and its file.
    """
    wanted = list(keys)
    for part, group in _groups(manifest, [key for key in wanted if not manifest.tensors[key].slices]):
        yield from zip(group, _read(directory, manifest, part, dict.fromkeys(group, _WHOLE)), strict=True)
    cut = {key: (0, stored.shape[0]) for key in wanted if (stored := manifest.tensors[key]).slices}
    yield from read_rows(directory, manifest, cut)


def read_rows(
    directory: str, manifest: Manifest, rows: Mapping[str, tuple[int, int]]
) -> Iterator[tuple[str, tf.Tensor]]:
    """Reads some rows of tensors, one tensor at a time, and checks their slices by their checksums.

    Args:
        directory: of the checkpoints.
        manifest: of the checkpoint.
        rows: the first row to read and the row after the last, by key; at least one row. The tensor may be whole in a
            part, or in slices of any rows.

    Yields:
        Key and value.

    Raises:
        CheckpointError: what is read is damaged. The message names the tensor and the file.
    """
    for key, (first, last) in rows.items():
        yield key, _rows(directory, manifest, key, first, last)


def _rows(directory: str, manifest: Manifest, key: str, first: int, last: int) -> tf.Tensor:
    stored = manifest.tensors[key]
    with tf.device("CPU:0"):
        found = [
            _rows_of_slice(directory, manifest, key, (part, start, stop), max(first, start), min(last, stop))
            for part, start, stop in stored.slices or ((stored.part, 0, stored.shape[0]),)
            if max(first, start) < min(last, stop)
        ]
        return tf.concat(found, axis=0) if len(found) > 1 else found[0]


def _rows_of_slice(
    directory: str, manifest: Manifest, key: str, of: tuple[int, int, int], first: int, last: int
) -> tf.Tensor:
    part, start, stop = of
    # All of it is read, since a slice has one checksum. If asked for less, TensorFlow also reads all, and refuses some
    # dtypes (float16).
    [value] = _read(directory, manifest, part, {key: _slice(manifest.tensors[key].shape, start, stop)})
    if (first, last) == (start, stop):
        return value
    # It is copied, since a part of a tensor would keep the memory of all of it.
    return tf.raw_ops.DeepCopy(x=value[first - start : last - start])


def _read(directory: str, manifest: Manifest, part: int, slices: Mapping[str, str]) -> list[tf.Tensor]:
    """Reads from one part what it has under some keys, each as it was written, by TensorFlow's text for it."""
    prefix = os.path.join(directory, *manifest.parts[part].prefix.split("/"))
    dtypes = [tf.as_dtype(manifest.tensors[key].dtype) for key in slices]
    try:
        with tf.device("CPU:0"):
            tensors: list[tf.Tensor] = tf.raw_ops.RestoreV2(
                prefix=prefix, tensor_names=list(slices), shape_and_slices=list(slices.values()), dtypes=dtypes
            )
        return tensors
    except tf.errors.OpError as error:
        if len(slices) > 1:  # find the damaged one
            return [tensor for key in slices for tensor in _read(directory, manifest, part, {key: slices[key]})]
        [key] = slices
        raise CheckpointError(
            f"{key!r} of checkpoint {manifest.name} cannot be read from {prefix}.data-00000-of-00001; the file is "
            f"damaged. TensorFlow says: {error.message.splitlines()[0]}"
        ) from None


def _slice(shape: Sequence[int], start: int, stop: int) -> str:
    """Returns TensorFlow's text for some rows of a tensor. For the shape [10, 3], rows 2 to 5 are "10 3 2,4:-"."""
    return f"{' '.join(map(str, shape))} {start},{stop - start}{':-' * (len(shape) - 1)}"


def _groups(manifest: Manifest, keys: Iterable[str]) -> Iterator[tuple[int, list[str]]]:
    """Yields the keys of tensors that are whole in a part, by part, in groups of at most `_GROUP` bytes."""
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


def _hash_of(path: str) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
