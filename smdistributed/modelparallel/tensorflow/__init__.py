"""smp_tf under the name by which scripts for SageMaker's model parallel library import it.

    import smdistributed.modelparallel.tensorflow as smp

All public names are those of `smp_tf`, looked up when they are first used. On top of them `smp.init` makes three things
work that such scripts rely on: what Keras optimizers of their time had (see `older_keras`), `save_model` as they call
it (see `older_models`), and `hvd.allreduce` and its kin meaning this rank's group of replicas (see
`smp_tf.horovod_scope`). All end with `smp.shutdown`.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping
from typing import Any

import smp_tf
from smp_tf.start.environment import require_tf_keras_for

__all__ = sorted({*smp_tf.__all__, "core", "utils"})

_SUBMODULES = ("core", "utils")

require_tf_keras_for(__name__)


def init(config: Mapping[str, Any] | str | os.PathLike[str] | None = None) -> None:
    """Starts smp_tf, as `smp_tf.init`, for a script written for SageMaker's library.

    Args:
        config: A mapping, the path of a JSON or YAML file, or None for the JSON in the environment variable
            SM_HP_MP_PARAMETERS, or the defaults when that is not set.

    Raises:
        ConfigError: A key or value is not allowed, or partitions and processes do not fit.
        AlreadyInitializedError: smp_tf runs with another configuration.

    Example:
        >>> import smdistributed.modelparallel.tensorflow as smp
        >>> smp.init()
    """
    smp_tf.init(config)
    from smdistributed.modelparallel.tensorflow.older_keras import older_optimizer_patch
    from smdistributed.modelparallel.tensorflow.older_models import older_model_patch
    from smp_tf.horovod_scope import mean_replicas
    from smp_tf.job.at_shutdown import on_shutdown

    for patch in (older_optimizer_patch, older_model_patch):
        if patch.install():
            on_shutdown(patch.remove)
    mean_replicas()


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name.startswith("_") or name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(smp_tf, name)
    # Bypasses __getattr__ next time.
    setattr(sys.modules[__name__], name, value)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
