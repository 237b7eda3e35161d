"""Decides which checkpoints are kept when there are too many.

The oldest are deleted first. With `keep_hours`, one in this many hours is kept for good, counted from when the first
manager of the directory was made:

    saved at      0:30   1:10   1:40   2:20   2:50   3:00
    keep_hours=1         for good      for good      (the two latest stay anyway, with max_to_keep=2)
"""

from __future__ import annotations

import contextlib
import dataclasses
import os

from smp_tf.checkpoint import folder_lock
from smp_tf.checkpoint.files import commit, delete, listing
from smp_tf.errors import CheckpointError

_HOUR = 3600.0


@dataclasses.dataclass(frozen=True)
class Rotation:
    """Says which checkpoints are kept.

    Args:
        max_to_keep: how many are kept, besides those that are kept for good; None for all.
        keep_hours: hours between checkpoints that are kept for good; None where none is.
        begun: when the manager was made, in seconds since 1970.
    """

    max_to_keep: int | None
    keep_hours: float | None
    begun: float

    def apply(self, directory: str, series: str) -> None:
        """Deletes surplus checkpoints.

        Args:
            directory: of the checkpoints.
            series: common name of the checkpoints, such as "ckpt".

        Raises:
            OSError: a file cannot be deleted.
            CheckpointError: a part's folder is a link.
        """
        if self.max_to_keep is None:
            return
        manifests = listing(directory, series).manifests
        last = max((m.saved_at if m.is_kept else m.begun for m in manifests), default=self.begun)
        failed: list[OSError | CheckpointError] = []
        for manifest in [m for m in manifests if not m.is_kept][: -self.max_to_keep]:
            try:
                if self.keep_hours is not None and manifest.saved_at >= last + self.keep_hours * _HOUR:
                    commit(directory, dataclasses.replace(manifest, is_kept=True))
                    last = manifest.saved_at
                else:
                    delete(directory, manifest.name)
            except (OSError, CheckpointError) as error:
                # The others are deleted all the same, or they would fill the disk.
                failed.append(error)
        if failed:
            raise failed[0]


def delete_series(directory: str, series: str) -> None:
    """Deletes all checkpoints of a series, and the folders that nothing else is in.

    Args:
        directory: of the checkpoints; it need not exist.
        series: common name of the checkpoints, such as "backup". Checkpoints of other names stay.

    Raises:
        CheckpointError: another live job saves such checkpoints there, or a part's folder is a link.
        OSError: a file cannot be deleted.
    """
    if not os.path.isdir(directory):
        return
    if folder_lock.current(directory, series) is None:
        folder_lock.take(directory, series)
    for name in listing(directory, series).names:
        delete(directory, name)
    folder_lock.give_up(directory, series)
    for folder in (*sorted(os.listdir(directory)), ""):
        if not folder or folder.startswith("mp_rank_"):
            # A folder that is not empty stays.
            with contextlib.suppress(OSError):
                os.rmdir(os.path.join(directory, folder))
