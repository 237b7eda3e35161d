"""Finds the newest checkpoint of a folder that is whole, on all ranks alike, for `manager.restore(fall_back=True)`.

    ckpt-3   a rank finds a damaged value    ─▶ all ranks go on to the next one
    ckpt-2   whole                           ─▶ all ranks take it, and rank 0 names both

Each rank reads a share of the values, one at a time, and tells all others what is damaged. So all is read once, also
what a rank would only read at the first step.
"""

from __future__ import annotations

import dataclasses
import os

from smp_tf.checkpoint.files import Listing, listing, problems_of_files, read_manifest
from smp_tf.checkpoint.manifest import Manifest
from smp_tf.checkpoint.tensors import damaged_tensors
from smp_tf.errors import CheckpointError
from smp_tf.job import exchange, runtime
from smp_tf.job.agreement import require_agreement

#: What an error says of a damaged checkpoint.
HINT = "manager.restore(fall_back=True) takes the newest checkpoint that is whole."


@dataclasses.dataclass(frozen=True)
class Chosen:
    """What was found in a folder.

    Args:
        manifest: the newest whole checkpoint; None where there is none.
        damaged: the names of what was left out, each with words for what is wrong.
    """

    manifest: Manifest | None
    damaged: tuple[tuple[str, str], ...]


def newest_whole(directory: str, series: str) -> Chosen:
    """Finds the newest whole checkpoint. All ranks call it, and find the same.

    Args:
        directory: of the checkpoints.
        series: common name of the checkpoints, such as "ckpt".

    Raises:
        RankMismatchError: not every rank calls it, or the ranks see different files.
    """
    seen = listing(directory, series)
    _require_the_same(seen, directory)
    left_out = [(_name(path), _problem(directory, _name(path))) for path in seen.damaged]
    for manifest in reversed(seen.manifests):
        problems = _problems(directory, manifest)
        if not problems:
            return Chosen(manifest, tuple(left_out))
        left_out.append((manifest.name, problems[0]))
    return Chosen(None, tuple(left_out))


def _require_the_same(seen: Listing, directory: str) -> None:
    topology = runtime.current().topology
    mine = {
        "hashes of manifests": {manifest.name: manifest.digest for manifest in seen.manifests},
        "damaged manifests": [_name(path) for path in seen.damaged],
    }
    said = exchange.allgather_json(mine, name="restoring the newest whole checkpoint")
    require_agreement(
        "the checkpoints that can be restored",
        dict(enumerate(said)),
        topology.describe,
        f"All ranks must see the same folder {directory!r}.",
    )


def _problems(directory: str, manifest: Manifest) -> list[str]:
    """Reads a checkpoint, each rank a share, and returns what any of them has found to be wrong."""
    topology = runtime.current().topology
    mine = list(problems_of_files(directory, manifest))
    if not mine:
        mine = list(damaged_tensors(directory, manifest, list(manifest.tensors)[topology.rank :: topology.size]))
    said = exchange.allgather_json(mine, name=f"whether checkpoint {manifest.name!r} is whole")
    return list(dict.fromkeys(problem for problems in said for problem in problems))


def _name(path: str) -> str:
    return os.path.basename(path).removesuffix(".json")


def _problem(directory: str, name: str) -> str:
    """Returns what is wrong with a manifest that cannot be read."""
    try:
        read_manifest(directory, name)
    except (FileNotFoundError, CheckpointError) as error:
        return str(error)
    return "Its manifest was written again meanwhile."
