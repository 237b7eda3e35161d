"""What is found in a folder of checkpoints by somebody who has not written them: whole, damaged and interrupted ones.

    ckpt-1.json, its parts                   whole, or damaged: a file lacks, or has another size or hash
    ckpt-2.json that cannot be read          damaged
    mp_rank_0/ckpt-3-5f0c9a1e.index alone    a save that was interrupted, or goes on

Nothing is written, and no TensorFlow is needed. The values in the parts are not read here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re

from smp_tf.checkpoint.files import listing, manifest_path, problems_of_files, read_manifest
from smp_tf.checkpoint.leftovers import left_of
from smp_tf.checkpoint.manifest import Manifest
from smp_tf.errors import CheckpointError

#: A save's name for its parts, such as "ckpt-3-5f0c9a1e".
_SAVE = re.compile(r"(.+-[0-9]+)-[0-9a-f]{8}")


@dataclasses.dataclass(frozen=True)
class Found:
    """A checkpoint, or what an interrupted save has left.

    Args:
        name: such as "ckpt-3".
        manifest: its manifest; None where it cannot be read, or where there is none.
        problems: words for each thing that is wrong with it; none where its files are whole.
        nbytes: bytes of the files of its parts that are there.
        is_interrupted: whether there is no manifest, so that it is no checkpoint.
    """

    name: str
    manifest: Manifest | None
    problems: tuple[str, ...]
    nbytes: int
    is_interrupted: bool = False

    @property
    def is_whole(self) -> bool:
        """Returns whether all its files are there, with their sizes, and its indices with their hashes."""
        return not self.problems

    @property
    def step(self) -> int:
        """Returns the number in its name."""
        return int(self.name.rpartition("-")[2])


def found_in(directory: str, series: str) -> list[Found]:
    """Returns what there is in a folder: readable checkpoints from oldest to newest, then the rest by their numbers.

    Args:
        directory: of the checkpoints; it need not exist.
        series: common name of the checkpoints, such as "ckpt".
    """
    seen = listing(directory, series)
    found = [of for manifest in seen.manifests if (of := _found(directory, manifest)) is not None]
    damaged = []
    for path in seen.damaged:
        name = os.path.basename(path).removesuffix(".json")
        try:
            of = _found(directory, read_manifest(directory, name))
        except FileNotFoundError:
            continue
        except CheckpointError as error:
            of = Found(name, None, (str(error),), 0)
        damaged += [of] if of is not None else []
    unreadable = {of.name for of in damaged}
    left: dict[str, int] = {}
    if os.path.isdir(directory):
        for save, files in left_of(directory, series, seen).items():
            match = _SAVE.fullmatch(save)
            if match and match[1] not in unreadable:
                left[match[1]] = left.get(match[1], 0) + sum(map(_size, files))
    words = "It has no manifest: its save was interrupted, or goes on now. The next save deletes what is left of it."
    interrupted = [Found(name, None, (words,), nbytes, is_interrupted=True) for name, nbytes in left.items()]
    return [*found, *sorted([*damaged, *interrupted], key=lambda of: of.step)]


def series_in(directory: str) -> list[str]:
    """Returns the common names of what may be checkpoints in a folder.

    Args:
        directory: a folder; it need not exist.
    """
    try:
        files = os.listdir(directory)
    except OSError:
        return []
    return sorted({match[1] for file in files if (match := re.fullmatch(r"([^.].*)-[0-9]+\.json", file))})


def _found(directory: str, manifest: Manifest) -> Found | None:
    """Returns one checkpoint; None where another job's rotation has deleted it meanwhile."""
    problems = tuple(problems_of_files(directory, manifest))
    if problems and not os.path.exists(manifest_path(directory, manifest.name)):
        return None
    files = [os.path.join(directory, *file.split("/")) for part in manifest.parts for file in part.sizes]
    return Found(manifest.name, manifest, problems, sum(map(_size, files)))


def _size(path: str) -> int:
    with contextlib.suppress(OSError):
        return os.path.getsize(path)
    return 0
