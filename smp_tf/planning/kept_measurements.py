"""Where measurements are kept for later runs, and what they are found by: what was measured, and on what hardware."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tensorflow as tf

from smp_tf.files.durable_files import write_file
from smp_tf.partition.graph.fingerprint import fingerprint, form
from smp_tf.partition.graph.op_graph import OpGraph

#: The environment variable that names another folder, or says "off".
FOLDER_VARIABLE = "SMP_TF_PROFILES"


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


def folder_of_measurements() -> Path | None:
    """Returns the folder where measurements are kept; None where none are, as for a user without a home."""
    asked = os.environ.get(FOLDER_VARIABLE)
    if asked == "off":
        return None
    if asked:
        return Path(asked)
    cache = os.environ.get("XDG_CACHE_HOME")
    if cache:
        return Path(cache) / "smp_tf" / "profiles"
    try:
        return Path.home() / ".cache" / "smp_tf" / "profiles"
    except RuntimeError:
        return None


def keep_measurement(path: Path, measurement: Any, what: str) -> str:
    """Writes what was measured. A reader finds the file whole or not at all.

    Args:
        path: the file.
        measurement: a dataclass.
        what: words for it, as they begin a sentence.

    Returns:
        Why it cannot be kept; "" where it is.
    """
    try:
        write_file(path, json.dumps(dataclasses.asdict(measurement), indent=1))
    except OSError as error:
        return f"{what} cannot be kept in {path.parent}: {error.strerror}."
    return ""


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
