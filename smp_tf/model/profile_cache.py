"""Keeps measured times for the next run, in a file for each model, size of microbatch and machine.

    ~/.cache/smp_tf/profiles/5-a07e…-3f9c….json    moved or turned off by SMP_TF_PROFILES
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
import os
import platform
from dataclasses import dataclass
from pathlib import Path

import tensorflow as tf

from smp_tf.files.durable_files import write_file
from smp_tf.partition.errors import PlacementError
from smp_tf.partition.graph.fingerprint import fingerprint, form
from smp_tf.partition.graph.op_graph import OpGraph
from smp_tf.partition.plan.json_record import record_from

#: The environment variable that names another folder, or says "off".
FOLDER_VARIABLE = "SMP_TF_PROFILES"
#: Version of the fields of a file.
FORMAT = 5


@dataclass(frozen=True)
class MeasuredHardware:
    """What, besides the unit, decides how long a unit takes.

    Args:
        device: model of the GPU, or of the processor where there is none.
        cores: processors that this process may use.
        threads: threads of an operation; 0 for TensorFlow's choice.
        ops_at_once: operations that run at once; 0 for TensorFlow's choice.
        onednn: whether oneDNN's kernels are used where there are any.
        processes: processes that measured at the same time on this host.
        tensorflow: version of TensorFlow.
    """

    device: str
    cores: int
    threads: int
    ops_at_once: int
    onednn: bool
    processes: int
    tensorflow: str


@dataclass(frozen=True)
class Subject:
    """What is measured: a model, with microbatches of one size.

    Args:
        fingerprint: hash of the graph of a microbatch.
        form: a hash of some of what is the same for microbatches of all sizes: variables, layers and results. Other
            models may have the same one.
        samples: samples of a microbatch.
    """

    fingerprint: str
    form: str
    samples: int


def subject_of(graph: OpGraph, samples: int) -> Subject:
    """Returns the subject that a graph stands for.

    Args:
        graph: of a microbatch.
        samples: of a microbatch.
    """
    lines = "\n".join(form(graph))
    return Subject(fingerprint(graph), hashlib.sha256(lines.encode()).hexdigest(), samples)


@dataclass(frozen=True)
class Profile:
    """The times of a model's units.

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
    """

    format: int
    model: str
    subject: Subject
    hardware: MeasuredHardware
    units: dict[str, tuple[float, ...]]
    alone: tuple[float, ...]
    message: tuple[float, ...] = ()

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


def this_hardware(processes: int = 1) -> MeasuredHardware:
    """Returns the hardware that this process runs on.

    Args:
        processes: processes that measure at the same time on this host.
    """
    cores = len(os.sched_getaffinity(0))
    threading, asked = tf.config.threading, os.environ.get
    threads = threading.get_intra_op_parallelism_threads() or int(asked("TF_NUM_INTRAOP_THREADS") or 0)
    ops_at_once = threading.get_inter_op_parallelism_threads() or int(asked("TF_NUM_INTEROP_THREADS") or 0)
    onednn = os.environ.get("TF_ENABLE_ONEDNN_OPTS", "1").lower() not in ("0", "false")
    return MeasuredHardware(_device(), cores, threads, ops_at_once, onednn, processes, tf.__version__)


def _device() -> str:
    gpus = tf.config.get_visible_devices("GPU")
    if gpus:
        return str(tf.config.experimental.get_device_details(gpus[0]).get("device_name", "GPU"))
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.machine()


class ProfileCache:
    """The folder of profiles.

    Args:
        folder: the folder; None for the one that the environment names, or `smp_tf/profiles` in the user's cache.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder if folder is not None else _folder()
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
        try:
            write_file(path, json.dumps(dataclasses.asdict(profile), indent=1))
        except OSError as error:
            self.trouble = f"The profile cannot be kept in {path.parent}: {error.strerror}."
            return None
        return path


def _begin(form: str) -> str:
    """Returns the begin of the names of files whose subjects have a form."""
    return f"{FORMAT}-{form[:16]}-"


def _folder() -> Path | None:
    asked = os.environ.get(FOLDER_VARIABLE)
    if asked == "off":
        return None
    if asked:
        return Path(asked)
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(cache) / "smp_tf" / "profiles"
