"""Finds the function that a command is given by name, as in `train.py:build`."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from smp_tf.command.output import UsageError, say
from smp_tf.config.files import nearest
from smp_tf.errors import ConfigError, PlacementError, StepError
from smp_tf.offline.user_errors import told


def named_function(target: str) -> Callable[[], Any]:
    """Returns the function that a target names.

    Args:
        target: "train.py:build" or "package.module:build".

    Returns:
        The function. Its errors, except smp_tf's own, become a UsageError of one line.

    Raises:
        UsageError: there is no such script, module or function.
    """
    where, colon, name = target.rpartition(":")
    if not colon or not where or not name:
        raise UsageError(f'The model is named as "train.py:build" or "package.module:build". Received: {target!r}.')
    module = _imported(where)
    try:
        found = getattr(module, name, None)
    except Exception as error:
        raise UsageError(f"{where} could not give {name!r}{told(error, getattr(module, '__file__', None))}") from error
    if found is None:
        functions = [other for other, value in vars(module).items() if callable(value) and not other.startswith("_")]
        # Python also imports a folder that is no package.
        is_folder = getattr(module, "__file__", None) is None and hasattr(module, "__path__")
        what = f" It is a folder: {next(iter(module.__path__))}." if is_folder else nearest(name, functions)
        raise UsageError(f"{where} has no function {name!r}.{what}")
    if not callable(found):
        raise UsageError(f"{name!r} in {where} must be a function. It is of type {type(found).__name__}.")
    kind = _kind_of_function(found)
    if kind:
        raise UsageError(f"{name!r} in {where} must be a function that returns a model. It is a {kind}.")
    function: Callable[[], Any] = found

    def call() -> Any:
        try:
            given = function()
        except (ConfigError, PlacementError, StepError, KeyboardInterrupt):
            raise
        except SystemExit as error:
            raise UsageError(f"{target} ends the process (sys.exit) in place of returning a model.") from error
        except BaseException as error:
            raise UsageError(f"{target} failed{told(error, getattr(module, '__file__', None), name)}") from error
        if inspect.iscoroutine(given):
            given.close()
            raise UsageError(f"{target} must return a model. It returned a coroutine, for which nobody waits.")
        return given

    return call


def _kind_of_function(function: Any) -> str:
    """Returns words for a function whose result needs another call, such as a generator; "" for any other."""
    for called in (function, getattr(function, "__call__", None)):  # noqa: B004
        if inspect.iscoroutinefunction(called):
            return "coroutine function (async def)"
        if inspect.isgeneratorfunction(called) or inspect.isasyncgenfunction(called):
            return "generator function (it yields)"
    return ""


def _imported(where: str) -> Any:
    """Returns a script or module. If it starts smp_tf, that is ended, since smp_tf is started here only for a plan."""
    from smp_tf.job import runtime
    from smp_tf.start import lifecycle

    was_running = runtime.current_or_none() is not None
    is_script = where.endswith(".py")
    try:
        module = _script(where) if is_script else _module(where)
    except (UsageError, KeyboardInterrupt):
        raise
    except SystemExit as error:
        raise UsageError(
            f"{where} ends the process when it is imported (sys.exit). What is to run only as a script belongs under "
            f"if __name__ == '__main__'."
        ) from error
    except BaseException as error:
        if isinstance(error, ModuleNotFoundError) and not is_script and f"{where}.".startswith(f"{error.name}."):
            raise UsageError(f"There is no module {error.name!r}. A script is named with its ending, .py.") from error
        raise UsageError(f"{where} cannot be imported{told(error, where if is_script else None)}") from error
    if runtime.current_or_none() is not None and not was_running:
        lifecycle.shutdown()
        say(f"{where} calls smp.init when it is imported; its configuration is not used here, options say what is")
    return module


def _script(path: str) -> Any:
    file = Path(path)
    _require_file(file)
    # Others may need the module of that name, as with a script types.py.
    name = file.stem if file.stem not in sys.modules else f"script {file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    sys.path.insert(0, str(file.absolute().parent))
    spec.loader.exec_module(module)
    return module


def _require_file(file: Path) -> None:
    """Raises an error for a script that is no file."""
    try:
        mode = os.stat(file).st_mode
    except OSError as error:
        if isinstance(error, FileNotFoundError):
            link = f" It is a link to {os.readlink(file)!r}, which is not there." if file.is_symlink() else ""
            raise UsageError(f"There is no script {str(file)!r}.{link or _one_colon(str(file))}") from None
        raise UsageError(f"The script {str(file)!r} cannot be read: {error.strerror}.") from None
    if stat.S_ISDIR(mode):
        raise UsageError(f"A script is a file that ends in .py. {str(file)!r} is a folder.")
    if not stat.S_ISREG(mode):
        raise UsageError(f"A script is a file that ends in .py. {str(file)!r} is none, but a device or a pipe.")


def _one_colon(where: str) -> str:
    return ' One colon stands before the function, as in "train.py:build".' if ":" in where else ""


def _module(name: str) -> Any:
    if not all(part.isidentifier() for part in name.split(".")):
        # This is a path, or a mistyped one.
        kind = "folder" if os.path.isdir(name) else "file" if os.path.exists(name) else ""
        what = f"{name!r} is a {kind}, not a module." if kind else f"There is no module {name!r}."
        raise UsageError(f"{what} A script is named with its ending, .py.{_one_colon(name)}")
    sys.path.insert(0, str(Path.cwd()))
    return importlib.import_module(name)
