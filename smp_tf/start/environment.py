"""Sets and checks what TensorFlow and Horovod must find in the process: variables, versions and Keras 2."""

from __future__ import annotations

import math
import os
import re
import sys
import warnings
from collections.abc import Mapping, MutableMapping, Sequence
from types import ModuleType
from typing import Any

from smp_tf.errors import EnvironmentSetupError

OLDEST_TENSORFLOW = (2, 16)
NEWEST_TENSORFLOW = (2, 21)

_LEGACY_KERAS = "TF_USE_LEGACY_KERAS"
_DYNAMIC_SETS = "HOROVOD_DYNAMIC_PROCESS_SETS"
_CYCLE_TIME = "HOROVOD_CYCLE_TIME"
_GLOO_TIMEOUT = "HOROVOD_GLOO_TIMEOUT_SECONDS"
# Variables with the number of processes, for launchers whose processes Horovod sees.
_WORLD_SIZES = ("HOROVOD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
_WORLD_RANKS = ("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
# Milliseconds between two looks of Horovod's thread for work. They cost about a hundredth of a core, and 0.3 s in init.
_RARELY = "50"
# The default of the configuration, for a Horovod that the script starts before smp.init.
_USUAL_STALL_TIMEOUT = 1800.0
# Seconds by which Horovod gives up later than smp_tf, since smp_tf can say who is waited for.
_LATER = 60
# The most seconds, three years. Horovod reads them as an int.
_LONGEST = 100_000_000
_TRUE = ("1", "true", "True")

# True when Horovod was running before smp_tf could ask it for dynamic process sets. Only the import can tell this,
# since afterwards the variable is set, whatever Horovod saw when it started.
_horovod_started_without_sets = False
# Whether only `make_horovod_wait` has set Horovod's patience.
_patience_is_ours = False


def prepare() -> None:
    """Sets the variables that TensorFlow and Horovod read only while they start."""
    global _horovod_started_without_sets
    if os.environ.get(_DYNAMIC_SETS) != "1" and _horovod_is_running():
        _horovod_started_without_sets = True
    os.environ[_DYNAMIC_SETS] = "1"
    os.environ.setdefault(_LEGACY_KERAS, "1")
    make_horovod_wait(_USUAL_STALL_TIMEOUT)


def rest_horovod(partitions: int | None, environment: MutableMapping[str, str] = os.environ) -> None:
    """Makes Horovod's thread look rarely for work, where one replica gives it none.

    Otherwise it looks every millisecond, which takes up to a fifth of a core from every rank. Horovod reads the
    variable when it starts. A value of the user's stays.

    Args:
        partitions: number of stages of a replica; None for all processes.
        environment: the variables to read and set.
    """
    if partitions in (None, world_size(environment)):
        environment.setdefault(_CYCLE_TIME, _RARELY)


def make_horovod_wait(stall_timeout: float, environment: MutableMapping[str, str] = os.environ) -> None:
    """Makes Horovod wait for a rank as long as the configuration says, where there are several ranks.

    Otherwise Horovod over Gloo waits 30 s for a rank that is stopped or starts late, and then ends on all ranks. Every
    rank reads the variable when Horovod starts there. A value of the user's stays.

    Args:
        stall_timeout: seconds that a living rank may keep the others waiting.
        environment: the variables to read and set.
    """
    global _patience_is_ours
    if world_size(environment) == 1:
        return
    if _patience_is_ours or _GLOO_TIMEOUT not in environment:
        _patience_is_ours = True
        # As much time again may pass from a rank's stop to the step in which others wait for it.
        environment[_GLOO_TIMEOUT] = str(min(_LONGEST, math.ceil(2 * stall_timeout) + _LATER))


def world_size(environment: Mapping[str, str] = os.environ) -> int:
    """Returns the launcher's number of processes, also before Horovod has started; 1 without a launcher."""
    return number(_WORLD_SIZES, environment, 1)


def world_rank(environment: Mapping[str, str] = os.environ) -> int:
    """Returns the launcher's number of this process, also before Horovod has started."""
    return number(_WORLD_RANKS, environment)


def number(names: Sequence[str], environment: Mapping[str, str] = os.environ, otherwise: int = 0) -> int:
    """Returns the number in the first of some variables that holds one; `otherwise` where none does."""
    return next((int(environment[name]) for name in names if environment.get(name, "").isdigit()), otherwise)


def _horovod_is_running() -> bool:
    horovod = sys.modules.get("horovod.tensorflow")
    return horovod is not None and bool(horovod.is_initialized())


def require_dynamic_process_sets() -> None:
    """Refuses a Horovod that cannot form groups any more.

    Raises:
        EnvironmentSetupError: Horovod was started before smp_tf was imported.
    """
    if _horovod_started_without_sets:
        raise EnvironmentSetupError(
            "Horovod was started before smp_tf was imported, so it cannot form groups of ranks. "
            "Put `import smp_tf as smp` above `hvd.init()` (smp.init() starts Horovod itself), or "
            f"run with {_DYNAMIC_SETS}=1 in the environment."
        )


def require_tf_keras() -> None:
    """Refuses to go on when `tf.keras` is Keras 3 in this process.

    Raises:
        EnvironmentSetupError: TensorFlow was imported with Keras 3, or asked to be.
    """
    tensorflow: Any = sys.modules.get("tensorflow")
    asked = os.environ.get(_LEGACY_KERAS)
    if asked not in _TRUE:
        raise EnvironmentSetupError(
            f"smp_tf works with tf_keras (the Keras 2 API), and {_LEGACY_KERAS}={asked} in the "
            f"environment asks TensorFlow for Keras 3. Set {_LEGACY_KERAS}=1, or do not set it."
        )
    # TensorFlow notes at import which Keras it routes to. There is no public way to ask without importing that Keras.
    if tensorflow is not None and getattr(tensorflow, "_tf_uses_legacy_keras", True) is False:
        raise EnvironmentSetupError(
            "tf.keras is Keras 3 in this process, because TensorFlow was imported before smp_tf; "
            "smp_tf works with tf_keras (the Keras 2 API). Put `import smp_tf as smp` above "
            f"`import tensorflow as tf`, or run with {_LEGACY_KERAS}=1 in the environment."
        )


def require_tf_keras_for(module: str) -> None:
    """Refuses to go on in a script that has imported TensorFlow with Keras 3 before a module that stands for smp_tf.

    Args:
        module: the module that the script imports, for the message.

    Raises:
        EnvironmentSetupError: TensorFlow was imported with Keras 3.
    """
    tensorflow: Any = sys.modules.get("tensorflow")
    if tensorflow is not None and getattr(tensorflow, "_tf_uses_legacy_keras", True) is False:
        raise EnvironmentSetupError(
            f"This script imports TensorFlow before {module}, so its tf.keras is Keras 3. Run it with "
            f"{_LEGACY_KERAS}=1 in the environment: {_LEGACY_KERAS}=1 horovodrun -np 2 python <script>"
        )


def require_tensorflow() -> ModuleType:
    """Imports TensorFlow and tf_keras, and checks their versions.

    Returns:
        The module `tensorflow`.

    Raises:
        EnvironmentSetupError: One of them is missing or too old, or Keras 3 is active.
    """
    require_tf_keras()
    try:
        import tensorflow as tf
    except ModuleNotFoundError as error:
        if error.name != "tensorflow":
            raise
        raise EnvironmentSetupError(
            "smp_tf needs TensorFlow, which is not installed in this Python "
            f"({sys.executable}). Install it with: pip install tensorflow-cpu"
        ) from None
    try:
        import tf_keras  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name != "tf_keras":
            raise
        minor = ".".join(tf.__version__.split(".")[:2])
        raise EnvironmentSetupError(
            "smp_tf needs tf_keras (the Keras 2 API), which is not installed. "
            f"Install it with: pip install tf_keras~={minor}.0"
        ) from None
    check_tensorflow_version(tf.__version__)
    return tf


def without_horovod(error: ImportError) -> Exception:
    """Returns what to raise where Horovod cannot be imported.

    Args:
        error: what its import raised.

    Returns:
        An error that says what to do; the same error where it is not about Horovod.
    """
    if "horovod" not in f"{error.name} {error}":
        return error
    return EnvironmentSetupError(
        f"smp_tf needs Horovod, compiled for the TensorFlow of this Python ({sys.executable}). It cannot be imported: "
        f"{str(error).splitlines()[0]}. `make setup` in the sources of smp_tf compiles it; docs/setup.md says what it "
        f"needs elsewhere."
    )


def check_tensorflow_version(version: str) -> None:
    """Refuses a TensorFlow that is too old and warns about one that is newer than tested.

    Args:
        version: What `tensorflow.__version__` says, such as "2.21.0".

    Raises:
        EnvironmentSetupError: The version is older than the oldest supported one.
    """
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is None:
        raise EnvironmentSetupError(f"TensorFlow's version reads {version!r}, not major.minor.")
    found = (int(match[1]), int(match[2]))
    oldest = ".".join(map(str, OLDEST_TENSORFLOW))
    newest = ".".join(map(str, NEWEST_TENSORFLOW))
    if found < OLDEST_TENSORFLOW:
        raise EnvironmentSetupError(
            f"smp_tf needs TensorFlow {oldest} to {newest}; this is {version}. Install it with: "
            f"pip install 'tensorflow-cpu=={newest}.*'"
        )
    if found > NEWEST_TENSORFLOW:
        warnings.warn(
            f"smp_tf is tested with TensorFlow {oldest} to {newest}; this is {version}.",
            stacklevel=2,
        )
