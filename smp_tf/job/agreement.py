"""Compares what the ranks said about something they must agree on, and says who differs, and in what."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from smp_tf.errors import RankMismatchError


class _Missing:
    """Stands for the value of a rank that has none."""

    def __repr__(self) -> str:
        return "nothing"


_MISSING = _Missing()
_LONGEST = 200
_MOST_FIELDS = 5


def require_agreement(
    name: str,
    said: Mapping[int, Any],
    describe: Callable[[int], str] = "rank {}".format,
    hint: str = "",
) -> None:
    """Raises an error unless all ranks said the same.

    The value that most ranks share counts as the right one; with a tie, the one of the lowest rank.

    Args:
        name: Words for what the ranks must agree on.
        said: World rank -> its JSON-like value.
        describe: Names a rank for the message.
        hint: A sentence about what to do.

    Raises:
        RankMismatchError: A rank differs. The message says which, and in which fields.
    """
    fields = list(_compare("", dict(said)))
    if not fields:
        return
    lines = []
    for path, values in fields[:_MOST_FIELDS]:
        majority = _majority(values)
        odd = [rank for rank, value in values.items() if not _same(value, majority)]
        agreeing = [rank for rank in values if rank not in odd]
        where = f"{path}: " if path else ""
        for rank in odd:
            lines.append(
                f"  {where}{describe(rank)} has {_short(values[rank])}; "
                f"{_ranks(agreeing)} {'have' if len(agreeing) > 1 else 'has'} {_short(majority)}"
            )
    if len(fields) > _MOST_FIELDS:
        lines.append(f"  and {len(fields) - _MOST_FIELDS} more differences")
    raise RankMismatchError("\n".join([f"The ranks do not agree on {name}:", *lines, *([hint] if hint else [])]))


def _compare(path: str, values: dict[int, Any]) -> Iterator[tuple[str, dict[int, Any]]]:
    everyone = list(values.values())
    if all(isinstance(value, Mapping) for value in everyone):
        for key in dict.fromkeys(key for value in everyone for key in value):
            inner = {rank: value.get(key, _MISSING) for rank, value in values.items()}
            yield from _compare(f"{path}.{key}" if path else str(key), inner)
    elif all(_is_list(value) for value in everyone) and len({len(v) for v in everyone}) == 1:
        for index in range(len(everyone[0])):
            inner = {rank: value[index] for rank, value in values.items()}
            yield from _compare(f"{path}[{index}]", inner)
    elif not all(_same(value, everyone[0]) for value in everyone):
        yield path, values


def _same(a: Any, b: Any) -> bool:
    # 1, 1.0 and True are equal in Python, but they are different settings.
    return type(a) is type(b) and bool(a == b)


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))


def _majority(values: Mapping[int, Any]) -> Any:
    everyone = list(values.values())
    return max(everyone, key=lambda value: sum(_same(value, other) for other in everyone))


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 8:
        return f"{len(ranks)} other ranks"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}... ({len(text)} characters)"
