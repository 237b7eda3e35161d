"""Which checkpoints stay when there are too many.

The oldest go first. With `keep_hours`, one in so many hours stays for good, counted from when the first manager of the
directory was made:

    saved at      0:30   1:10   1:40   2:20   2:50   3:00
    keep_hours=1         for good      for good      (the two latest stay anyway, with max_to_keep=2)
"""

from __future__ import annotations

import dataclasses

from smp_tf.checkpoint_files import clean, commit, delete, listing

_HOUR = 3600.0


@dataclasses.dataclass(frozen=True)
class Rotation:
    """Which checkpoints stay.

    Args:
        max_to_keep: how many, besides those that stay for good; None for all.
        keep_hours: hours between checkpoints that stay for good; None where none does.
        begun: when the manager was made, in seconds since 1970.
    """

    max_to_keep: int | None
    keep_hours: float | None
    begun: float

    def apply(self, directory: str, series: str) -> None:
        """Delete what is too many, and what saves that were not completed have left.

        Args:
            directory: of the checkpoints.
            series: common name of the checkpoints, such as "ckpt".
        """
        if self.max_to_keep is not None:
            manifests = listing(directory, series).manifests
            last = max((m.saved_at if m.is_kept else m.begun for m in manifests), default=self.begun)
            for manifest in [m for m in manifests if not m.is_kept][: -self.max_to_keep]:
                if self.keep_hours is not None and manifest.saved_at >= last + self.keep_hours * _HOUR:
                    commit(directory, dataclasses.replace(manifest, is_kept=True))
                    last = manifest.saved_at
                else:
                    delete(directory, manifest.name)
        clean(directory, series)
