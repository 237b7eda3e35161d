"""smp_tf: train a Keras model that is split over several processes.

    import smp_tf as smp

    smp.init({"partitions": 2, "microbatches": 4})

Importing this package imports neither TensorFlow nor Horovod. Public names are looked up when they are first used. But
the import sets two environment variables, which TensorFlow and Horovod read only while they start, and tells
`horovodrun` that this rank has come so far. So `import smp_tf` belongs before `import tensorflow`.
"""

from __future__ import annotations

import ast
import importlib
import os
import pkgutil
import sys
import types
from typing import TYPE_CHECKING, Any

from smp_tf.version import __version__ as __version__

if TYPE_CHECKING:
    from smp_tf.public_names import *  # noqa: F403


def _public_names() -> dict[str, str]:
    """Reads where every public name comes from, without importing it.

    Returns:
        For a name its "module:path", such as "smp_tf.partition.mesh:CommGroup.WORLD". For a module of smp_tf itself it
        is "smp_tf:" and the module's name.
    """
    text = pkgutil.get_data(__name__, "public_names.py")
    assert text is not None
    where: dict[str, str] = {}
    for statement in ast.parse(text).body:
        if isinstance(statement, ast.ImportFrom) and statement.module != "__future__":
            where.update({alias.name: f"{statement.module}:{alias.name}" for alias in statement.names})
        elif isinstance(statement, ast.Assign):
            [target] = statement.targets
            first, _, path = ast.unparse(statement.value).partition(".")
            where[ast.unparse(target)] = f"{where[first]}.{path}"
    return where


# Public name -> "module:path" of what it stands for.
_WHERE = _public_names()

# This is no statement, since type checkers would have to run it to know what is public.
globals()["__all__"] = sorted(_WHERE)

# Modules that a user can use only where tf.keras is tf_keras.
_NEED_TF_KERAS = (
    "smp_tf",
    "smp_tf.checkpoint.manager",
    "smp_tf.gradients.norms",
    "smp_tf.model.model",
    "smp_tf.optimizer.distributed_optimizer",
    "smp_tf.optimizer.one_bit_adam",
    "smp_tf.optimizer.one_bit_lamb",
    "smp_tf.whole_batch.decorator",
)

# Public names that a room has, too. `smp.partition` is what a script calls.
_NAMED_LIKE_ROOMS = ("partition",)


class _PublicModule(types.ModuleType):
    """This module, in which importing a submodule does not hide the public name it shares."""


def _public_property(name: str) -> property:
    # Importing smp_tf.partition makes Python set the attribute `partition` to that package. This is not kept.
    return property(lambda module: __getattr__(name), lambda module, submodule: None)


for _name in _NAMED_LIKE_ROOMS:
    setattr(_PublicModule, _name, _public_property(_name))
sys.modules[__name__].__class__ = _PublicModule


def _find_rooms_beside_this_folder() -> None:
    """Makes `smp_tf.ops` and its neighbours importable from a checkout.

    The folders ops/, partition/ and pipeline/ are installed as `smp_tf.ops` and so on. In a checkout's root, ./smp_tf
    shadows the installed package. So its parent is searched, too.
    """
    here = os.path.dirname(os.path.abspath(__file__))
    parent = os.path.dirname(here)
    is_checkout = os.path.isfile(os.path.join(parent, "setup.py")) and os.path.isfile(
        os.path.join(parent, "partition", "__init__.py")
    )
    if is_checkout and parent not in __path__:  # noqa: F405
        __path__.append(parent)  # noqa: F405


def _set_environment() -> None:
    """Sets what TensorFlow and Horovod read while they start. The user's own values stay."""
    from smp_tf.start.environment import prepare

    prepare()


def __getattr__(name: str) -> Any:
    where = _WHERE.get(name)
    if where is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module_name, _, path = where.partition(":")
    if module_name in _NEED_TF_KERAS:
        from smp_tf.start.environment import require_tf_keras

        require_tf_keras()
    if module_name == __name__:
        value: Any = importlib.import_module(f"{__name__}.{path}")
    else:
        value = importlib.import_module(module_name)
        for part in path.split("."):
            value = getattr(value, part)
    # This bypasses __getattr__ next time.
    setattr(sys.modules[__name__], name, value)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_WHERE})


def _watch_horovod() -> None:
    """Makes Horovod's functions know of smp_tf when the script imports them."""
    from smp_tf.horovod_scope import watch

    watch()


def _watch_import() -> None:
    """Lets a rank that its launcher ends before `smp.init` say why."""
    # The code that asks the launcher is imported only where there is one.
    if "HOROVOD_GLOO_RENDEZVOUS_ADDR" in os.environ:
        from smp_tf.start import import_watch

        import_watch.start()


def _keep_standard_descriptors() -> None:
    """Opens missing standard descriptors before libraries open their files."""
    from smp_tf.start.standard_descriptors import open_those_missing

    open_those_missing()


_find_rooms_beside_this_folder()
_keep_standard_descriptors()
_set_environment()
_watch_import()
_watch_horovod()
