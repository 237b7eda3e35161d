"""Finds what interrupted saves have left in a folder of checkpoints, and deletes it when that is safe.

    mp_rank_0/ckpt-3-5f0c9a1e.index                a part that no manifest names
    .writing-0123456789abcdef-ckpt-3.json          a manifest that did not come into its place

A save that goes on in another job looks just like one that was interrupted. So a job that holds the folder
(`folder_lock`) deletes only what nobody has written to for long. A job deletes its own left-overs at once.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections import defaultdict
from collections.abc import Mapping

from smp_tf.checkpoint.files import Listing, listing
from smp_tf.files import contained_path, durable_files

_PART_FOLDER = re.compile(r"mp_rank_[0-9]+")


def clean(directory: str, series: str, before: float) -> None:
    """Deletes what incomplete saves have left long ago.

    Nothing is deleted while a manifest cannot be read, since its parts would look like left-overs.

    Args:
        directory: of the checkpoints.
        series: common name of the checkpoints, such as "ckpt". Files of other names are not touched.
        before: seconds since 1970 by the clock of the file system. A file that was written to later is not deleted, nor
            any other file of the same save.

    Raises:
        OSError: a file cannot be deleted.
    """
    found = listing(directory, series)
    if found.damaged:
        return
    for files in left_of(directory, series, found).values():
        if max(map(_written, files)) < before:
            for path in files:
                with contextlib.suppress(FileNotFoundError):
                    os.remove(path)


def left_of(directory: str, series: str, found: Listing) -> Mapping[str, list[str]]:
    """Returns the files of saves that are not complete: interrupted ones, and any that goes on.

    Args:
        directory: of the checkpoints.
        series: common name of the checkpoints, such as "ckpt".
        found: the manifests that there are. Parts of a manifest that cannot be read are returned as well.

    Returns:
        The paths of the files by the save's name for its parts, such as "ckpt-3-5f0c9a1e"; a manifest that did not come
        into its place is alone under its file's name.
    """
    left: defaultdict[str, list[str]] = defaultdict(list)
    ours = re.compile(rf"(({re.escape(series)}-[0-9]+-[0-9a-f]{{8}})(?:-[0-9]+)?)\.(index|data-)")
    for folder in sorted(filter(_PART_FOLDER.fullmatch, os.listdir(directory))):
        with contextlib.suppress(contained_path.PathError):
            place = contained_path.within(directory, folder)
            for file in sorted(os.listdir(place)):
                match = ours.match(file)
                if match and f"{folder}/{match[1]}" not in found.parts:
                    left[match[2]].append(os.path.join(place, file))
    manifest = re.compile(rf"{re.escape(series)}-[0-9]+\.json")
    for file in os.listdir(directory):
        # An earlier smp_tf gave them another name.
        if manifest.fullmatch(durable_files.original_name(file) or file.removesuffix(".writing")) and (
            file.startswith(".") or file.endswith(".writing")
        ):
            left[file].append(os.path.join(directory, file))
    return left


def _written(path: str) -> float:
    """Returns when somebody last wrote to a file."""
    with contextlib.suppress(FileNotFoundError):
        return os.lstat(path).st_mtime
    return 0.0
