"""Reads the arguments of `smp-tf`, and says what is wrong with them."""

from __future__ import annotations

import argparse
import contextlib
from typing import Any, NoReturn, TypeAlias

from smp_tf.command.output import UsageError
from smp_tf.offline.user_errors import in_a_line

#: The sub-commands. Each adds itself.
Commands: TypeAlias = "argparse._SubParsersAction[Parser]"


class Parser(argparse.ArgumentParser):
    """Reads arguments and says in one line what is wrong. For an unknown option it names the command."""

    def __init__(self, **options: Any) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, **options)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Reads the arguments, and refuses unknown ones."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return found, []

    def error(self, message: str) -> NoReturn:
        """Says in one line what is wrong, and ends the command."""
        self.exit(2, f"smp-tf: {in_a_line(message)} ({self.prog} --help says more)\n")


def number(text: str) -> int:
    """Reads a whole number."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a number, and received {text!r}") from None


def decimal(text: str) -> float:
    """Reads a number that may have decimals."""
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a number, such as 0.05, and received {text!r}") from None


def seconds(text: str) -> float:
    """Reads a number of seconds, 0 included."""
    with contextlib.suppress(ValueError):
        if 0 <= float(text) < float("inf"):
            return float(text)
    raise argparse.ArgumentTypeError(f"expected a number of seconds, or 0, and received {text!r}")


def number_or_auto(text: str) -> int | str:
    """Reads a whole number or "auto"."""
    if text == "auto":
        return text
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f'expected a number or "auto", and received {text!r}') from None


def numbers(text: str) -> list[int]:
    """Reads whole numbers with commas between them, each once."""
    try:
        return list(dict.fromkeys(int(word) for word in text.split(",")))
    except ValueError:
        message = f"expected a number, or several with commas, such as 1,4,16, and received {text!r}"
        raise argparse.ArgumentTypeError(message) from None


def require_batch_size(given: argparse.Namespace) -> None:
    """Checks the batch size, where one is given.

    Args:
        given: the arguments of a command that takes `--batch-size`.

    Raises:
        UsageError: the batch size is less than 1.
    """
    if given.batch_size is not None and given.batch_size < 1:
        raise UsageError(f"--batch-size must be at least 1. Received: {given.batch_size}.")
