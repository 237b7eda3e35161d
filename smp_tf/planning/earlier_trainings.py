"""Keeps what the ranks of a training held in its first steps, for the next plan of the same step and settings.

    ~/.cache/smp_tf/profiles/training-1-3f9c…-a07e….json    moved or turned off by SMP_TF_PROFILES
                                      │ │     └ placement
                                      │ └ graph, samples, machine, settings
                                      └ version of the fields

A file that cannot be read, or was changed, counts as none, and a message says so.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smp_tf.config.config import Config
from smp_tf.partition.errors import PlacementError
from smp_tf.partition.plan.held_memory import HeldMemory
from smp_tf.partition.plan.json_record import record_from
from smp_tf.planning.kept_measurements import MeasuredHardware, Subject, folder_of_measurements, keep_measurement

#: Version of the fields of a file.
FORMAT = 1
_BEGIN = f"training-{FORMAT}-"
#: Keys of the configuration that decide what ranks hold where a placement is given.
_KEYS = (
    *("partitions", "microbatches", "pipeline", "chunks_per_rank", "contiguous", "recompute", "xla", "check_inputs"),
    *("gradient_compression", "shard_optimizer_state", "gradient_offload", "optimizer_offload"),
)


@dataclass(frozen=True)
class Setting:
    """What decides, besides the placement, what the ranks of a training hold.

    Args:
        subject: the step.
        hardware: what it runs on.
        settings: other settings, by name.
    """

    subject: Subject
    hardware: MeasuredHardware
    settings: dict[str, str]


@dataclass(frozen=True)
class TrainingRecord:
    """What the ranks of a training held.

    Args:
        format: version of these fields.
        step: name of the step, for people.
        setting: what decides it besides the placement.
        placement: hash of the placement.
        stages: what the rank of each stage held; empty while that is not known.
    """

    format: int
    step: str
    setting: Setting
    placement: str
    stages: tuple[HeldMemory, ...] = ()


def settings_of(config: Config, replicas: int, optimizers: Iterable[Any]) -> dict[str, str]:
    """Returns the settings that decide what ranks hold.

    Args:
        config: the configuration.
        replicas: number of replicas.
        optimizers: the optimizers that models were compiled with.
    """
    names = sorted({type(optimizer).__name__ for optimizer in optimizers})
    found = {key: json.dumps(getattr(config, key)) for key in _KEYS}
    return {**found, "replicas": str(replicas), "optimizers": ", ".join(names)}


class EarlierTrainings:
    """The folder of what earlier trainings held.

    Args:
        folder: the folder; None for the one that the environment names, or `smp_tf/profiles` in the user's cache.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder if folder is not None else folder_of_measurements()
        #: What went wrong with the files that were last read or written; "" where nothing did.
        self.trouble = ""

    @property
    def is_empty(self) -> bool:
        """Returns whether nothing is kept."""
        return self.folder is None or next(self.folder.glob(f"{_BEGIN}*.json"), None) is None

    def path(self, record: TrainingRecord) -> Path | None:
        """Returns the file of a record; None where nothing is kept."""
        if self.folder is None:
            return None
        return self.folder / f"{_begin(record.setting)}{record.placement[:16]}.json"

    def find(self, setting: Setting) -> Mapping[str, tuple[HeldMemory, ...]]:
        """Returns what the ranks of earlier trainings held, by the hash of their placement.

        Args:
            setting: what decides it besides the placement. If a file of it cannot be used, `trouble` says why.
        """
        self.trouble = ""
        found = {}
        for path in sorted(self.folder.glob(f"{_begin(setting)}*.json")) if self.folder is not None else ():
            try:
                record: TrainingRecord = record_from(
                    TrainingRecord, json.loads(path.read_text(encoding="utf-8")), "the memory of a training"
                )
                _require_whole(record, setting)
            except (OSError, ValueError, PlacementError) as error:
                self.trouble = f"The memory of an earlier training in {path} is damaged and not used. {error}"
                continue
            found[record.placement] = record.stages
        return found

    def keep(self, record: TrainingRecord) -> Path | None:
        """Writes what ranks held. A reader finds it whole or not at all.

        Args:
            record: what to keep.

        Returns:
            The file; None where nothing is kept, or where it cannot be written. Then `trouble` says why.
        """
        self.trouble = ""
        path = self.path(record)
        if path is None:
            return None
        self.trouble = keep_measurement(path, record, "The memory of this training")
        return None if self.trouble else path


def _require_whole(record: TrainingRecord, setting: Setting) -> None:
    """Raises an error unless a record is of this version and setting, and says what every stage held."""
    if record.format != FORMAT or record.setting != setting:
        raise PlacementError("It is of another version, step or machine.")
    sizes = [size for held in record.stages for size in (held.bytes, held.slots, held.uncounted, held.forecast)]
    if min(sizes, default=-1) < 0:
        raise PlacementError("It must have the bytes of every stage, none of them negative.")


def _begin(setting: Setting) -> str:
    """Returns the begin of the names of files with a setting."""
    text = json.dumps(dataclasses.asdict(setting), sort_keys=True)
    return f"{_BEGIN}{hashlib.sha256(text.encode()).hexdigest()[:32]}-"
