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

This file knows folders and names. `tensors.py` writes and reads what is in the parts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import re
from collections.abc import Iterable, Iterator

from smp_tf.checkpoint.manifest import Manifest, damaged, decoded, encoded, require_own_files
from smp_tf.config.text_file import UnreadableError, read_text
from smp_tf.errors import CheckpointError
from smp_tf.files import contained_path
from smp_tf.files.durable_files import sync, write_file

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
        for problem in _problems_of_sizes(directory, manifest):
            raise CheckpointError(problem)
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
    folder = place_of(directory, parent)
    with contextlib.suppress(FileNotFoundError):
        for file in os.listdir(folder):
            if file.startswith(f"{base}."):
                os.remove(os.path.join(folder, file))


def place_of(directory: str, name: str) -> str:
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
    for problem in problems_of_files(directory, manifest):
        raise CheckpointError(problem)


def problems_of_files(directory: str, manifest: Manifest) -> Iterator[str]:
    """Yields words for each file of a checkpoint that is missing, truncated or damaged. Reads no tensor.

    Args:
        directory: of the checkpoints.
        manifest: of the checkpoint.
    """
    yield from _problems_of_sizes(directory, manifest)
    for part in manifest.parts:
        index = os.path.join(directory, *f"{part.prefix}.index".split("/"))
        try:
            found = hash_of(index)
        except FileNotFoundError:
            continue  # its size has told of it
        except OSError as error:
            yield f"The file {index} of checkpoint {manifest.name} cannot be read: {error.strerror}."
            continue
        if found != part.index_hash:
            yield f"The file {index} of checkpoint {manifest.name} is damaged: its hash is another."


def _problems_of_sizes(directory: str, manifest: Manifest) -> Iterator[str]:
    for name, size in [item for part in manifest.parts for item in part.sizes.items()]:
        path = os.path.join(directory, *name.split("/"))
        try:
            found = os.path.getsize(path)
        except OSError as error:
            yield f"Checkpoint {manifest.name} lacks its file {path}: {error.strerror}."
            continue
        if found != size:
            yield f"The file {path} of checkpoint {manifest.name} has {found} bytes, but was written with {size}."


def hash_of(path: str) -> str:
    """Returns the SHA-256 of a file, as text."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
