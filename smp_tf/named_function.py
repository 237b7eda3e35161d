"""The function that a command is given by name, as in `train.py:build`."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from smp_tf.errors import ConfigError, PlacementError, StepError


class UsageError(Exception):
    """Something given on the command line is wrong."""


def say(text: str) -> None:
    """Tells the user of a command something that is not its result.

    Args:
        text: without the name of the command.
    """
    print(f"smp-tf: {text}", file=sys.stderr)


def named_function(target: str) -> Callable[[], Any]:
    """The function that a target names.

    Args:
        target: "train.py:build" or "package.module:build".

    Returns:
        It; what it raises, but for smp_tf's own errors, becomes a UsageError of one line.

    Raises:
        UsageError: there is no such script, module or function.
    """
    where, colon, name = target.rpartition(":")
    if not colon or not where or not name:
        raise UsageError(f'The model is named as "train.py:build" or "package.module:build". Received: {target!r}.')
    module = _imported(where)
    found = getattr(module, name, None)
    if found is None:
        raise UsageError(f"{where} has no function {name!r}.")
    if not callable(found):
        raise UsageError(f"{name!r} in {where} must be a function. It is of type {type(found).__name__}.")
    function: Callable[[], Any] = found

    def call() -> Any:
        try:
            return function()
        except (ConfigError, PlacementError, StepError):
            raise
        except SystemExit as error:
            raise UsageError(f"{target} ends the process (sys.exit) in place of returning a model.") from error
        except Exception as error:
            raise UsageError(f"{target} failed{_in_a_line(error, getattr(module, '__file__', None))}") from error

    return call


def _imported(where: str) -> Any:
    """A script or module; smp_tf, if that has started it, is ended, since it is started here for a plan alone."""
    from smp_tf import lifecycle, runtime

    was_running = runtime.current_or_none() is not None
    try:
        module = _script(where) if where.endswith(".py") else _module(where)
    except UsageError:
        raise
    except ModuleNotFoundError as error:
        if not where.endswith(".py"):
            raise UsageError(f"There is no module {error.name!r}. A script is named with its ending, .py.") from error
        raise UsageError(f"{where} cannot be imported{_in_a_line(error, where)}") from error
    except SystemExit as error:
        raise UsageError(
            f"{where} ends the process when it is imported (sys.exit). What is to run only as a script belongs under "
            f"if __name__ == '__main__'."
        ) from error
    except Exception as error:
        raise UsageError(f"{where} cannot be imported{_in_a_line(error, where)}") from error
    if runtime.current_or_none() is not None and not was_running:
        lifecycle.shutdown()
        say(f"{where} calls smp.init when it is imported; its configuration is not used here, options say what is")
    return module


def _script(path: str) -> Any:
    file = Path(path)
    if not file.is_file():
        raise UsageError(f"There is no script {path!r}.")
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    sys.path.insert(0, str(file.absolute().parent))
    spec.loader.exec_module(module)
    return module


def _module(name: str) -> Any:
    sys.path.insert(0, str(Path.cwd()))
    return importlib.import_module(name)


def _in_a_line(error: Exception, file: str | None) -> str:
    """An error after the words of what failed: the last line of the file that it went through, and its first line."""
    passed = [
        frame for frame in traceback.extract_tb(error.__traceback__) if file and Path(frame.filename) == Path(file)
    ]
    where = f" at line {passed[-1].lineno}" if passed else ""
    said = str(error).strip().partition("\n")[0]
    return f"{where}: {type(error).__name__}{': ' if said else ''}{said}"
