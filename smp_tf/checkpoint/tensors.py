"""The tensors of checkpoints: each rank writes a part, and any process reads some of them.

A part is a tensor bundle of TensorFlow, with a crc32c for each tensor, or for each slice of one. `files.py` says which
files there are.

This file does not know models, or other ranks.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence

import tensorflow as tf

from smp_tf.checkpoint.files import hash_of, place_of
from smp_tf.checkpoint.manifest import Manifest, Part
from smp_tf.errors import CheckpointError
from smp_tf.files.durable_files import make_folder, sync

#: The most bytes of a group of tensors that is read at once, so that small tensors do not each cost a look at the
#: index.
_GROUP = 16 << 20
#: TensorFlow's text for a tensor that is no slice.
_WHOLE = ""


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
    full = place_of(directory, prefix)
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
    return Part(prefix, sizes, hash_of(f"{full}.index"))


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


def damaged_tensors(directory: str, manifest: Manifest, keys: Iterable[str]) -> Iterator[str]:
    """Reads tensors of a checkpoint, one at a time, and yields words for each that is damaged.

    Args:
        directory: of the checkpoints.
        manifest: of the checkpoint.
        keys: the tensors to read.
    """
    for key in keys:
        try:
            for _ in read_tensors(directory, manifest, [key]):
                pass
        except CheckpointError as error:
            yield str(error)
