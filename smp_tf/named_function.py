r"""The function that a command is given by name, as in `train.py:build`, and what is said of it in a line.

ValueError("no data\nat all")  ─ Keras, AutoGraph ─▶  ValueError("in user code: ... Call arguments received ...")
            │                                                                       │
            └───────── "in load at line 7 of data.py: ValueError: no data" ◀────────┘
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import re
import stat
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

from smp_tf.config_file import nearest
from smp_tf.errors import ConfigError, PlacementError, StepError

#: What ends a line, and what a terminal would not show as it is.
_NOT_SHOWN = re.compile(r"\s*[\x00-\x1f\x7f-\x9f\u2028\u2029]+\s*")
#: How the message of an error begins that Keras, or AutoGraph, has made of another one.
_MADE_ANEW = ("Exception encountered when calling", "in user code:")
#: Of the message of somebody else's error.
_LONGEST = 500
#: Whose folders hold no code of the user's.
_PACKAGES = ("smp_tf", "smp_tf.partition", "smp_tf.pipeline", "smp_tf.ops")


class UsageError(Exception):
    """Something given on the command line is wrong."""


def say(text: str) -> None:
    """Tells the user of a command something that is not its result.

    Args:
        text: without the name of the command.
    """
    put(f"smp-tf: {in_a_line(text)}", sys.stderr)


def show(text: str, end: str = "\n") -> None:
    """Prints the result of a command.

    Args:
        text: of any number of lines.
        end: what is to stand behind it.

    Raises:
        UsageError: it cannot be written, as on a full disk.
    """
    try:
        put(text, sys.stdout, end)
    except OSError as error:
        raise UsageError(f"The output cannot be written: {error.strerror}.") from error


def put(text: str, to: TextIO | None, end: str = "\n") -> None:
    """Prints a text; what is read no further, as by `head -1`, goes nowhere.

    Args:
        text: of any number of lines.
        to: this process's output; None where it has none.
        end: what is to stand behind it.

    Raises:
        OSError: it cannot be written.
    """
    if to is None:
        return
    try:
        try:
            print(text, file=to, end=end, flush=True)
        except UnicodeEncodeError:
            print(text.encode(to.encoding, "replace").decode(to.encoding), file=to, end=end, flush=True)
    except OSError as error:
        # So does what is still held, which Python writes when it ends.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, to.fileno())
        os.close(nowhere)
        if not isinstance(error, BrokenPipeError):
            raise


def in_a_line(text: str) -> str:
    r"""A text of whatever lines as one.

    Example:
        >>> in_a_line("no data\n  at all")
        'no data at all'
    """
    return _NOT_SHOWN.sub(" ", text).strip()


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
    try:
        found = getattr(module, name, None)
    except Exception as error:
        raise UsageError(f"{where} could not give {name!r}{told(error, getattr(module, '__file__', None))}") from error
    if found is None:
        functions = [other for other, value in vars(module).items() if callable(value) and not other.startswith("_")]
        # So Python imports a folder that is no package.
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
    """What a function is that gives its result only to who asks again; "" for any other."""
    for called in (function, getattr(function, "__call__", None)):  # noqa: B004
        if inspect.iscoroutinefunction(called):
            return "coroutine function (async def)"
        if inspect.isgeneratorfunction(called) or inspect.isasyncgenfunction(called):
            return "generator function (it yields)"
    return ""


def _imported(where: str) -> Any:
    """A script or module; smp_tf, if that has started it, is ended, since it is started here for a plan alone."""
    from smp_tf import lifecycle, runtime

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
    # Others may need the module of that name, as of a script types.py.
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
    """Say what a script is that is none."""
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
        # A path, or a mistyped one.
        kind = "folder" if os.path.isdir(name) else "file" if os.path.exists(name) else ""
        what = f"{name!r} is a {kind}, not a module." if kind else f"There is no module {name!r}."
        raise UsageError(f"{what} A script is named with its ending, .py.{_one_colon(name)}")
    sys.path.insert(0, str(Path.cwd()))
    return importlib.import_module(name)


def told(error: BaseException, file: str | None = None, function: str | None = None) -> str:
    r"""An error in a line, to be put after the words of what failed: where in the user's code, its type and words.

    Args:
        error: perhaps one that Keras or AutoGraph has made of the user's.
        file: what needs not be named where the error is in it.
        function: nor this function of it.

    Example:
        >>> told(ValueError("no data\nat all"))
        ': ValueError: no data'
    """
    place = ""
    for frame in _frames(error):
        if not _is_the_users(frame.filename, file):
            continue
        is_there = file is not None and Path(frame.filename) == Path(file).absolute()
        is_known = frame.name == "<module>" or (is_there and frame.name == function)
        within, of = "" if is_known else f" in {frame.name}", "" if is_there else f" of {frame.filename}"
        place = f"{within} at line {frame.lineno}{of}"
        break
    return f"{place}: {words_of(error)}"


def words_of(error: BaseException) -> str:
    """The type of an error and the first line of its message that says something.

    Args:
        error: perhaps one that Keras or AutoGraph has made of the user's.
    """
    error = first_of(error)
    lines = (in_a_line(line) for line in text_of(error).splitlines())
    said = next((line for line in lines if line and not line.startswith(_MADE_ANEW)), "")
    said = said if len(said) <= _LONGEST else f"{said[:_LONGEST]}..."
    return f"{type(error).__name__}{': ' if said else ''}{said}"


def text_of(value: Any) -> str:
    """The text of a value, such as an error; "" for one of a user's class that has none."""
    try:
        return str(value)
    except Exception:
        return ""


def first_of(error: BaseException) -> BaseException:
    """The error that was raised, where Keras and AutoGraph have made others of it, with their words around its own."""
    return _chain_of(error)[-1]


def _chain_of(error: BaseException) -> list[BaseException]:
    chain = [error]
    while chain[-1].__context__ is not None and text_of(chain[-1]).startswith(_MADE_ANEW):
        chain.append(chain[-1].__context__)
    return chain


def _frames(error: BaseException) -> Iterator[traceback.FrameSummary]:
    """Where an error came from, the innermost first."""
    for seen in reversed(_chain_of(error)):
        # What AutoGraph has converted ran in a file of its own, which it knows the origin of.
        for frame in getattr(getattr(seen, "ag_error_metadata", None), "translated_stack", ()):
            name = frame.function_name or "<lambda>"
            yield traceback.FrameSummary(frame.filename, frame.lineno, name, lookup_line=False)
        yield from reversed(traceback.extract_tb(seen.__traceback__))


def _is_the_users(filename: str, file: str | None) -> bool:
    """Whether code is the user's: of no library that is installed, and not of smp_tf."""
    path = Path(filename)
    if file is not None and path == Path(file).absolute():
        return True
    if filename.startswith("<") or path.name.startswith("__autograph_generated_file"):
        return False
    own = [sys.modules[name].__file__ for name in _PACKAGES if name in sys.modules]
    libraries = [Path(sysconfig.get_path("stdlib")), *(Path(found).parent for found in own if found)]
    return not {"site-packages", "dist-packages"} & {*path.parts} and not any(path.is_relative_to(p) for p in libraries)
