"""Keeps measured times and bytes for the next run, in a file for each model, size of microbatch and machine.

    ~/.cache/smp_tf/profiles/6-a07e…-3f9c….json    moved or turned off by SMP_TF_PROFILES
                             │ │     └ graph, samples, machine
                             │ └ form: some of what is the same for microbatches of all sizes; models may share it
                             └ version of the fields

A file that cannot be read, or was changed, counts as none, and a message says so.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from dataclasses import dataclass, field
from pathlib import Path

from smp_tf.partition.errors import PlacementError
from smp_tf.partition.plan.json_record import record_from
from smp_tf.pipeline.planner.unit_peaks import UnitPeaks
from smp_tf.planning.kept_measurements import MeasuredHardware, Subject, folder_of_measurements, keep_measurement

#: Version of the fields of a file.
FORMAT = 6


@dataclass(frozen=True)
class Profile:
    """The times and bytes of a model's units.

    Args:
        format: version of these fields.
        model: name of the model, for people.
        subject: what was measured.
        hardware: where.
        units: seconds forward and backward of each unit, by name.
        alone: the share of these times that units take, forward and backward, while the other processes of the host
            wait; above 0, at most 1.
        message: seconds that a message between two of these processes takes of a processor at each of its ends, and
            those for every byte; empty where no two processes measured.
        peaks: the most bytes of tensors that units have; those of none where the allocator does not count.
    """

    format: int
    model: str
    subject: Subject
    hardware: MeasuredHardware
    units: dict[str, tuple[float, ...]]
    alone: tuple[float, ...]
    message: tuple[float, ...] = ()
    peaks: UnitPeaks = field(default_factory=UnitPeaks)

    @property
    def times(self) -> dict[str, tuple[float, float]]:
        """Returns the seconds forward and backward of a microbatch, by unit."""
        return {name: (forward, backward) for name, (forward, backward) in self.units.items()}

    @property
    def shares_alone(self) -> tuple[float, float]:
        """Returns the share of their times that units take alone, forward and backward."""
        forward, backward = self.alone
        return forward, backward

    @property
    def message_seconds(self) -> tuple[float, float] | None:
        """Returns the seconds of a message at each of its ends, and those for every byte; None where none are known."""
        if not self.message:
            return None
        message, byte = self.message
        return message, byte


class ProfileCache:
    """The folder of profiles.

    Args:
        folder: the folder; None for the one that the environment names, or `smp_tf/profiles` in the user's cache.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder if folder is not None else folder_of_measurements()
        #: What went wrong with the file that was last read or written; "" where nothing did.
        self.trouble = ""

    def path(self, subject: Subject, hardware: MeasuredHardware) -> Path | None:
        """Returns the file of a profile; None where profiles are not kept."""
        if self.folder is None:
            return None
        key = json.dumps([FORMAT, dataclasses.asdict(subject), dataclasses.asdict(hardware)], sort_keys=True)
        return self.folder / f"{_begin(subject.form)}{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"

    def find(self, subject: Subject, hardware: MeasuredHardware) -> Profile | None:
        """Returns the profile of a model; None where there is none. If one cannot be used, `trouble` says why.

        Args:
            subject: the model.
            hardware: the hardware that it was measured on.
        """
        self.trouble = ""
        path = self.path(subject, hardware)
        if path is None or not path.exists():
            return None
        found = self._read(path)
        if found is not None and (found.subject, found.hardware) != (subject, hardware):
            self._damaged(path, "It is of another model or machine.")
            return None
        return found

    def of_form(self, form: str) -> list[Profile]:
        """Returns the profiles of all subjects of a form, on any machine. `trouble` says which cannot be used.

        Args:
            form: the form of subjects. Subjects with the same form may be of different models.
        """
        self.trouble = ""
        found = []
        for path in sorted(self.folder.glob(f"{_begin(form)}*.json")) if self.folder is not None else ():
            profile = self._read(path)
            if profile is None:
                continue
            if self.path(profile.subject, profile.hardware) != path:
                self._damaged(path, "It is of another model or machine.")
            elif profile.subject.form == form:
                found.append(profile)
        return found

    def _read(self, path: Path) -> Profile | None:
        try:
            found: Profile = record_from(Profile, json.loads(path.read_text(encoding="utf-8")), "a profile")
            if found.format != FORMAT:
                raise PlacementError("It is of another version of smp_tf.")
            if not all(
                len(times) == 2 and all(0.0 <= seconds < math.inf for seconds in times)
                for times in found.units.values()
            ):
                raise PlacementError("A unit must have two times, neither of them negative.")
            if len(found.alone) != 2 or not all(0.0 < share <= 1.0 for share in found.alone):
                raise PlacementError("What units take alone must be two shares, above 0 and at most 1.")
            if found.message and not (
                len(found.message) == 2 and found.message[0] >= 0.0 < found.message[1] < math.inf
            ):
                raise PlacementError("What a message takes must be two times, neither negative, the second above 0.")
            sizes = [count for pair in found.peaks.bytes.values() for count in pair]
            if min([*sizes, found.peaks.counted_from]) < 0:
                raise PlacementError("The bytes of a unit must be two numbers, and none may be negative.")
            if found.peaks.bytes and found.peaks.bytes.keys() != found.units.keys():
                raise PlacementError("Where bytes of units are known, they must be known of all.")
        except (OSError, ValueError, PlacementError) as error:
            self._damaged(path, str(error))
            return None
        return found

    def _damaged(self, path: Path, why: str) -> None:
        self.trouble = f"The profile in {path} is damaged and not used. {why}"

    def keep(self, profile: Profile) -> Path | None:
        """Writes a profile. A reader finds it whole or not at all.

        Args:
            profile: the profile to keep.

        Returns:
            The file; None where profiles are not kept, or where it cannot be written. Then `trouble` says why.
        """
        self.trouble = ""
        path = self.path(profile.subject, profile.hardware)
        if path is None:
            return None
        self.trouble = keep_measurement(path, profile, "The profile")
        return None if self.trouble else path


def _begin(form: str) -> str:
    """Returns the begin of the names of files whose subjects have a form."""
    return f"{FORMAT}-{form[:16]}-"
