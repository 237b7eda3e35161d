"""Checks of the values of configuration keys. There is one for each kind of value. It returns the value in its type."""

from __future__ import annotations

import math
import operator
import os
import re
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

from smp_tf.errors import ConfigError
from smp_tf.pipeline.errors import ScheduleError
from smp_tf.pipeline.schedules.schedule_file import load_schedule

_NUMBER_OF_BYTES = re.compile(r"(\d+(?:\.\d+)?) ?([KMGT]I?B|B)?", re.IGNORECASE)
_UNITS = {"": 1, "B": 1, **{f"{letter}B": 10 ** (3 * n) for n, letter in enumerate("KMGT", start=1)}}
_UNITS |= {f"{letter}IB": 2 ** (10 * n) for n, letter in enumerate("KMGT", start=1)}


class RefusedError(Exception):
    """A check's verdict on one value; the caller adds the key's name and the allowed values."""


def kind_of(value: Any) -> str:
    """Returns words for the type of a value.

    Example:
        >>> kind_of(7), kind_of("seven"), kind_of(None)
        ('an int', 'a str', 'None')
    """
    name = type(value).__name__
    is_spoken_with_a_vowel = name[:1].lower() in "aeio" or name == "ndarray"
    return "None" if value is None else f"{'an' if is_spoken_with_a_vowel else 'a'} {name}"


def integer(least: int, most: int | None = None) -> Callable[[Any], int]:
    """Returns the check of a whole number, NumPy's too, that lies within bounds."""

    def check(value: Any) -> int:
        if isinstance(value, bool):
            raise RefusedError
        try:
            number = operator.index(value)
        except TypeError:
            raise RefusedError from None
        if number < least or (most is not None and number > most):
            raise RefusedError
        return number

    return check


def optional(check: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Returns a check that takes None, or what another check takes."""
    return lambda value: None if value is None else check(value)


def boolean(value: Any) -> bool:
    """Takes True or False, and nothing that only counts as one of them."""
    if not isinstance(value, bool):
        raise RefusedError
    return value


def boolean_or(*words: str) -> Callable[[Any], bool | str]:
    """Returns the check of True, False, or one of some words."""
    return lambda value: one_of(*words)(value) if isinstance(value, str) else boolean(value)


def one_of(*choices: str) -> Callable[[Any], str]:
    """Returns the check of one of some words."""

    def check(value: Any) -> str:
        if not isinstance(value, str) or value not in choices:
            raise RefusedError
        return value

    return check


def schedule(*names: str) -> Callable[[Any], str]:
    """Returns the check of a schedule: its name, or the path of a .txt file, which is replaced by the file's tasks."""

    def check(value: Any) -> str:
        if not isinstance(value, str) or not value.endswith(".txt"):
            return one_of(*names)(value)
        try:
            # Its ranks and microbatches are compared with the job's when these are known.
            program = load_schedule(Path(value))
        except ScheduleError as error:
            raise ConfigError(f"The schedule of pipeline cannot be run. {error}") from None
        return program.text()

    return check


def seconds(value: Any) -> float:
    """Takes a number of seconds that is above zero and finite."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise RefusedError
    if not (math.isfinite(value) and value > 0):
        raise RefusedError
    return float(value)


def share(value: Any) -> float:
    """Takes a number from 0 to 1."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise RefusedError
    if not 0 <= value <= 1:
        raise RefusedError
    return float(value)


def path(value: Any) -> str:
    """Takes the name of a file."""
    if not isinstance(value, (str, os.PathLike)):
        raise RefusedError
    name = os.fspath(value)
    if not isinstance(name, str) or not name:
        raise RefusedError
    return name


def byte_count(value: Any) -> int:
    """Takes a number of bytes, at least 1: an int, or words such as "16GiB", "1.5 GB" and "1000000".

    Example:
        >>> byte_count("1.5 KiB")
        1536
    """
    if isinstance(value, str):
        match = _NUMBER_OF_BYTES.fullmatch(value.strip())
        if match is None:
            raise RefusedError
        value = int(Fraction(match[1]) * _UNITS[(match[2] or "").upper()])
    return integer(1)(value)
