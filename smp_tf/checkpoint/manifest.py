"""The manifest of a checkpoint: which part holds which tensor, or which rows of one, and its text.

    a kernel                whole        part 0
    its slot of 100 rows    in slices    part 0 has rows 0 to 48, part 1 has rows 49 to 99

The text is JSON, with a hash of itself. `files.py` says where it is, and when it is put there.

The hash shows damage, but not who wrote the manifest, and a folder may come from elsewhere. So a manifest is accepted
only if each field is of its kind, and if a save of its own name writes such files as it names.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

from smp_tf.errors import CheckpointError, PlacementError
from smp_tf.files import contained_path
from smp_tf.partition.plan.json_record import record_from

#: The latest version of the format that is read. The first version has no slices. A manifest without slices is still
#: written in it, so that an earlier smp_tf can read it.
VERSION = 2
_WITHOUT_SLICES = 1
#: How many characters of what is wrong with a manifest are shown, since names in it may have any length.
_MOST_SAID = 500
#: TensorFlow's names for the dtypes of tensors that can be in a file. So a manifest is read without TensorFlow.
_DTYPES = frozenset({
    "bfloat16", "bool", "complex128", "complex64", "float16", "float32", "float64", "float8_e4m3b11fnuz",
    "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "int16", "int32", "int4", "int64", "int8",
    "qint16", "qint32", "qint8", "quint16", "quint8", "string", "uint16", "uint32", "uint4", "uint64", "uint8",
    "variant",
})  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Part:
    """The files that one rank wrote.

    Args:
        prefix: prefix of its files, relative to the directory, with "/", such as "mp_rank_0/ckpt-3-5f0c9a1e".
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
        part: number of the part that holds it or, for a tensor in slices, its first rows.
        dtype: name of its dtype, such as "float32".
        shape: its shape; for a tensor in slices, the shape of the whole.
        kind: what it is the state of, as in `survey.StateKind`.
        stage: the stage that owned it; None for what every rank has.
        optimizer: path of the optimizer it belongs to, or "".
        slices: (number of the part, its first row, the row after its last) for a tensor whose rows are in several
            parts, from its first row to its last; empty for a tensor that is whole in one part.
    """

    part: int
    dtype: str
    shape: tuple[int, ...]
    kind: str
    stage: int | None = None
    optimizer: str = ""
    slices: tuple[tuple[int, int, int], ...] = ()


@dataclasses.dataclass(frozen=True)
class Manifest:
    """The content of a checkpoint.

    Args:
        name: such as "ckpt-3".
        sequence: how many checkpoints were committed in the directory before. The largest number is the latest.
        partitions: stages of the job that wrote it.
        replicas: replicas of that job.
        parts: the parts that the ranks wrote.
        tensors: every tensor, by key.
        optimizers: path of every optimizer, and whether it was used before the checkpoint was written.
        random: what random ops inside steps depend on.
        saved_at: when it was committed, in seconds since 1970.
        begun: when the manager of the directory's first checkpoint was made, in the same seconds.
        is_kept: whether it is kept for good, and is not rotated.
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


def encoded(manifest: Manifest) -> bytes:
    """Returns the content of a manifest's file."""
    content = {f.name: getattr(manifest, f.name) for f in dataclasses.fields(Manifest) if f.name != "digest"}
    content["parts"] = [dataclasses.asdict(part) for part in manifest.parts]
    content["tensors"] = {key: _described(stored) for key, stored in manifest.tensors.items()}
    has_slices = any(stored.slices for stored in manifest.tensors.values())
    version = VERSION if has_slices else _WITHOUT_SLICES
    written = {"version": version, "sha256": _content_hash(content), "checkpoint": content}
    return json.dumps(written, indent=1).encode()


# A save looks through the folder several times, and checking a large manifest takes long.
@functools.lru_cache(maxsize=4)
def decoded(text: str, path: str) -> Manifest:
    """Returns the manifest that a file holds.

    Args:
        text: what stands in the file.
        path: of the file.

    Raises:
        CheckpointError: the manifest is damaged, names files that are not its own, or is of a later version of smp_tf.
    """
    try:
        written = json.loads(text)
        version, content = written["version"], written["checkpoint"]
        whole = isinstance(version, int) and (version > VERSION or written["sha256"] == _content_hash(content))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        whole = False
    if not whole:
        raise damaged(path, "is damaged or truncated")
    if version > VERSION:
        raise CheckpointError(
            f"{path} was written by a later smp_tf, in version {version} of the format; this one reads up to {VERSION}."
        )
    try:
        manifest = _manifest_from(content, hashlib.sha256(text.encode()).hexdigest())
        name = path.rpartition("/")[2].removesuffix(".json")
        if manifest.name != name:
            raise CheckpointError(f"It is of {manifest.name!r}, and its file's name must be that.")
        require_own_files(manifest)
    except (PlacementError, CheckpointError) as error:
        raise damaged(path, f"is not one that smp_tf has written there. {str(error)[:_MOST_SAID]}") from None
    return manifest


def damaged(path: str, what: str) -> CheckpointError:
    """Returns the error for a manifest that cannot be used.

    Args:
        path: of its file.
        what: words for what is wrong with it, without a full stop.
    """
    return CheckpointError(
        f"The checkpoint's manifest {path} {what.removesuffix('.')}. Restore another checkpoint by its name, such as "
        f'manager.restore("ckpt-1"), or the newest whole one by manager.restore(fall_back=True). Or delete this file.'
    )


def require_own_files(manifest: Manifest) -> None:
    """Raises an error unless a save of a manifest's name writes such files as it names, in the checkpoints' folder.

    Args:
        manifest: a manifest that was read, or made from what other ranks have said.

    Raises:
        CheckpointError: it names another file, or its tensors are not in its parts.
    """
    for part in manifest.parts:
        require_own_part(part, manifest.name)
    for key, stored in manifest.tensors.items():
        _require_in_parts(key, stored, len(manifest.parts))


def require_own_part(part: Part, name: str) -> None:
    """Raises an error unless a save writes such files as a part has.

    Args:
        part: a part that was read, or that another rank has named.
        name: of the checkpoint.

    Raises:
        CheckpointError: the files are others.
    """
    try:
        contained_path.relative(part.prefix, "the checkpoints' folder")
    except contained_path.PathError as error:
        raise CheckpointError(f"The prefix of a part {error}") from None
    if not re.fullmatch(rf"mp_rank_[0-9]+/{re.escape(name)}-[0-9a-f]{{8}}(-[0-9]+)?", part.prefix):
        raise CheckpointError(
            f"The prefix of a part of {name!r} is 'mp_rank_<stage>/{name}-<8 digits>'. Received: {part.prefix!r}"
        )
    files = re.compile(rf"{re.escape(part.prefix)}\.(index|data-[0-9]{{5}}-of-[0-9]{{5}})")
    other = [file for file in part.sizes if not files.fullmatch(file)]
    if other:
        raise CheckpointError(f"The part {part.prefix!r} has files of its own name. Received: {other[0]!r}")
    if f"{part.prefix}.index" not in part.sizes:
        raise CheckpointError(f"The part {part.prefix!r} must have an index. Received: {sorted(part.sizes)}")


def _require_in_parts(key: str, stored: StoredTensor, parts: int) -> None:
    """Raises an error unless a tensor is in existing parts, with each of its rows once."""
    end, is_right = 0, all(extent >= 0 for extent in stored.shape)
    for part, start, stop in stored.slices:
        is_right = is_right and 0 <= part < parts and start == end < stop
        end = stop
    if stored.slices:
        is_right = is_right and bool(stored.shape) and end == stored.shape[0]
    if not is_right or not 0 <= stored.part < parts:
        raise CheckpointError(f"{key!r} must lie in the {parts} parts, each of its rows once. Received: {stored}")
    if stored.dtype not in _DTYPES:
        raise CheckpointError(f"{key!r} is of a dtype that there is not. Received: {stored.dtype!r}")


def _described(stored: StoredTensor) -> dict[str, Any]:
    described = dataclasses.asdict(stored)
    if not stored.slices:
        del described["slices"]
    return described


def _manifest_from(content: Any, digest: str) -> Manifest:
    if isinstance(content, dict) and isinstance(content.get("tensors"), dict):
        tensors = content["tensors"].items()
        with_slices = {key: {"slices": [], **stored} if isinstance(stored, dict) else stored for key, stored in tensors}
        content = {**content, "tensors": with_slices, "digest": digest}
    manifest: Manifest = record_from(Manifest, content, "the manifest")
    if manifest.random:
        record_from(_Random, manifest.random, "'random' of the manifest")
    return manifest


@dataclasses.dataclass(frozen=True)
class _Random:
    """The result of `state` in `variables/step_seeds.py`."""

    seed: int
    steps: Mapping[str, int]


def _content_hash(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
