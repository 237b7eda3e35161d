"""Reads a data class from JSON. Every field must be there with its type, and no other. Errors use JSON's words.

{"partitions": "2"}    'partitions' of the plan file must be a whole number. Received: the text "2".
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import UnionType
from typing import Any, get_type_hints

from smp_tf.partition.errors import PlacementError

#: How many characters of a received text are shown.
_MOST_SHOWN = 60
#: The most digits of a number. No number of bytes has more.
_MOST_DIGITS = 18
#: How many missing or unknown names a message lists.
_MOST_NAMED = 20


@dataclass(frozen=True, slots=True)
class Unreadable:
    """Something in a JSON text that is no value.

    Args:
        why: what is wrong with it, as the end of a sentence.
    """

    why: str


def parse(text: str) -> Any:
    """Returns the value of a JSON text, with `Unreadable` in place of what is no value. It may begin with a BOM.

    Args:
        text: content of a file, perhaps written by hand.

    Raises:
        PlacementError: the text is not JSON.
    """
    try:
        return json.loads(
            text.removeprefix("\ufeff"),
            object_pairs_hook=_object,
            parse_int=_whole,
            parse_float=_number,
            parse_constant=lambda name: Unreadable(f"is {name}, which is no number in JSON"),
        )
    except json.JSONDecodeError as error:
        raise PlacementError(f"It is not JSON, or not all of it is there: {error}.") from None
    except RecursionError:
        raise PlacementError("It is not JSON that can be read: it is nested too deeply.") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any] | Unreadable:
    for name, count in Counter(name for name, _ in pairs).items():
        if count > 1:
            return Unreadable(f"has {name!r} {count} times, and a name may be there once")
    return dict(pairs)


def _whole(digits: str) -> int | Unreadable:
    return int(digits) if len(digits) <= _MOST_DIGITS else _too_large(digits)


def _number(digits: str) -> float | Unreadable:
    return float(digits) if math.isfinite(float(digits)) else _too_large(digits)


def _too_large(digits: str) -> Unreadable:
    return Unreadable(f"is a number that is too large: {_short(digits)}")


def in_words(value: Any) -> str:
    """Returns words for a JSON value, such as "a list", "the number 2" and "nothing".

    Args:
        value: what `parse` or `json.loads` gave.
    """
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, dict)):
        return "a list" if isinstance(value, list) else "an object"
    if isinstance(value, str):
        return f"the text {_short(json.dumps(value, ensure_ascii=not value.isprintable()))}"
    return f"the number {_short(str(value))}"


def _short(text: str) -> str:
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


def record_from(kind: type, fields: Any, what: str) -> Any:
    """Returns an instance of a data class from JSON fields, after it has checked all of them.

    Args:
        kind: the data class. Its fields are ints, floats, strings, data classes, tuples and mappings of these, None, or
            `Any`, which is taken as it is.
        fields: what `parse` or `json.loads` gave.
        what: what the fields are of, for messages.

    Returns:
        The instance.

    Raises:
        PlacementError: a field is missing, unknown or mistyped.
    """
    if not isinstance(fields, dict):
        raise _refused("an object", fields, what)
    hints = _hints(kind)
    expected = hints.keys()
    if fields.keys() != expected:
        wrong = {"Missing": expected - fields.keys(), "Unknown": fields.keys() - expected}
        said = " ".join(f"{word}: {_listed(names)}." for word, names in wrong.items() if names)
        raise PlacementError(f"{_begun(what)} must have the fields {_listed(expected)}. {said}")
    # A value of the right plain type is taken at once, since a checkpoint has many thousands of records.
    return kind(
        **{
            name: value if type(value := fields[name]) is hint else _value(hint, value, f"{name!r} of {what}")
            for name, hint in hints.items()
        }
    )


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    known = get_type_hints(kind)
    return {field.name: known[field.name] for field in dataclasses.fields(kind)}


def _value(hint: Any, value: Any, what: str) -> Any:
    if hint is Any:
        return value
    kind: Any = getattr(hint, "__origin__", hint)
    parts: Sequence[Any] = getattr(hint, "__args__", ())
    if isinstance(hint, UnionType):
        some, *_ = (part for part in parts if part is not type(None))
        return None if value is None and type(None) in parts else _value(some, value, what)
    if kind is tuple and isinstance(value, list):
        kinds = [parts[0]] * len(value) if parts[-1] is Ellipsis else parts
        if len(kinds) != len(value):
            raise _refused(f"a list of {len(kinds)}", value, what)
        numbered = enumerate(zip(kinds, value, strict=True), start=1)
        return tuple(v if type(v) is of else _value(of, v, f"entry {number} of {what}") for number, (of, v) in numbered)
    if kind in (dict, Mapping) and isinstance(value, dict):
        return {k: _value(parts[1], v, f"{k!r} in {what}") for k, v in value.items()}
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return record_from(kind, value, what)
    if kind is float and type(value) is int:
        try:
            return float(value)
        except OverflowError:
            raise _refused("a number", Unreadable("is a number that is too large"), what) from None
    if type(value) is not kind:
        raise _refused(_KINDS[kind], value, what)
    return value


#: The words for a value of each type in JSON.
_KINDS = {
    int: "a whole number",
    float: "a number",
    str: "a text",
    bool: "true or false",
    tuple: "a list",
    dict: "an object",
    Mapping: "an object",
}


def _refused(expected: str, value: Any, what: str) -> PlacementError:
    if isinstance(value, Unreadable):
        return PlacementError(f"{_begun(what)} {value.why}.")
    return PlacementError(f"{_begun(what)} must be {expected}. Received: {in_words(value)}.")


def _begun(what: str) -> str:
    return what[:1].upper() + what[1:]


def _listed(names: Collection[str]) -> str:
    shown = sorted(names)[:_MOST_NAMED]
    more = f" and {len(names) - len(shown)} more" if len(names) > len(shown) else ""
    return f"{', '.join(map(repr, shown))}{more}"
