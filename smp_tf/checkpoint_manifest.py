"""The manifest of a checkpoint: which part holds which tensor, or which rows of one, and the text that says so.

    a kernel                whole        part 0
    its slot of 100 rows    in slices    part 0 has rows 0 to 48, part 1 has rows 49 to 99

The text is JSON, with a hash of itself; `checkpoint_files` tells where it is, and when it is put there.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import Any

from smp_tf.errors import CheckpointError

#: The latest version of the format that is read. The first one knows no slices, and a manifest without them is still
#: written in it, so that an earlier smp_tf reads what it can.
VERSION = 2
_WITHOUT_SLICES = 1


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
        part: number of the part that holds it; of one in slices, of the part that holds its first rows.
        dtype: name of its dtype, such as "float32".
        shape: its shape; of one in slices, that of the whole.
        kind: what it is the state of; see `checkpoint_keys.Kind`.
        stage: the stage that owned it; None for what every rank has.
        optimizer: path of the optimizer it belongs to, or "".
        slices: (number of the part, its first row, the row after its last) of one whose rows lie in several parts, from
            its first row to its last; empty for one that lies whole in one part.
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


def encoded(manifest: Manifest) -> bytes:
    """The content of a manifest's file."""
    content = {f.name: getattr(manifest, f.name) for f in dataclasses.fields(Manifest) if f.name != "digest"}
    content["parts"] = [dataclasses.asdict(part) for part in manifest.parts]
    content["tensors"] = {key: _described(stored) for key, stored in manifest.tensors.items()}
    has_slices = any(stored.slices for stored in manifest.tensors.values())
    version = VERSION if has_slices else _WITHOUT_SLICES
    written = {"version": version, "sha256": _content_hash(content), "checkpoint": content}
    return json.dumps(written, indent=1).encode()


def decoded(data: bytes, path: str) -> Manifest:
    """The manifest that a file holds.

    Args:
        data: the file's content.
        path: of the file, for messages.

    Raises:
        CheckpointError: it is damaged, or of a later version of smp_tf.
    """
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


def _described(stored: StoredTensor) -> dict[str, Any]:
    described = dataclasses.asdict(stored)
    if not stored.slices:
        del described["slices"]
    return described


def _manifest_from(content: dict[str, Any], digest: str) -> Manifest:
    return Manifest(
        **{
            **content,
            "parts": tuple(Part(**part) for part in content["parts"]),
            "tensors": {key: _stored_from(stored) for key, stored in content["tensors"].items()},
            "digest": digest,
        }
    )


def _stored_from(described: dict[str, Any]) -> StoredTensor:
    slices = tuple((part, start, stop) for part, start, stop in described.get("slices", ()))
    return StoredTensor(**{**described, "shape": tuple(described["shape"]), "slices": slices})


def _content_hash(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
