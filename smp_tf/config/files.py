"""Reads files of keys and values that a user writes, as YAML or JSON, and words the errors of wrong ones."""

from __future__ import annotations

import difflib
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from smp_tf.config.text_file import UnreadableError, read_text
from smp_tf.config.values import kind_of
from smp_tf.errors import ConfigError

#: The most bytes of a file of keys.
_MOST_BYTES = 2**20
#: The most digits of a number. Python itself refuses longer ones.
_TOO_LARGE = "holds a whole number of thousands of digits, which no value is"


def nearest(name: Any, known: Iterable[str]) -> str:
    """Returns a question whether one of the known names was meant, with a blank before it; "" where none is similar."""
    near = difflib.get_close_matches(str(name).lower(), list(known), n=1, cutoff=0.5)
    return f" Did you mean {near[0]!r}?" if near else ""


def read_mapping(path: Path) -> Mapping[str, Any]:
    """Returns the keys and values that a file holds.

    Args:
        path: a file whose name ends in .json, .yaml or .yml.

    Raises:
        ConfigError: the file cannot be read, holds something else, or holds a key twice.
    """
    source = f"the file {path}"
    try:
        text = read_text(path, _MOST_BYTES)
    except FileNotFoundError:
        raise ConfigError(f"{source} does not exist (looked in {Path.cwd()}).") from None
    except UnreadableError as error:
        raise ConfigError(f"{source} {error}.") from error
    if path.suffix == ".json":
        return parse_json(text, source)
    if path.suffix in (".yaml", ".yml"):
        return _parse_yaml(text, source)
    raise ConfigError(f"{source} must end in .json, .yaml or .yml, so that smp_tf can read it.")


def parse_json(text: str, source: str) -> Mapping[str, Any]:
    """Returns the keys and values that a text holds.

    Args:
        text: JSON.
        source: words for where it was found, for error messages.

    Raises:
        ConfigError: the text is not JSON, holds something else, or holds a key twice.
    """

    def refuse_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        _refuse_twins([name for name, _ in pairs], source)
        return dict(pairs)

    try:
        parsed = json.loads(text, object_pairs_hook=refuse_twins)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{source} is not JSON: {error.msg} at line {error.lineno}, column {error.colno}.") from None
    except ConfigError:
        raise
    except ValueError:
        raise ConfigError(f"{source} {_TOO_LARGE}.") from None
    except RecursionError:
        raise ConfigError(f"{source} is nested too deeply.") from None
    return _require_mapping(parsed, source)


def _parse_yaml(text: str, source: str) -> Mapping[str, Any]:
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        parsed = yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f" at line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""
        raise ConfigError(f"{source} is not YAML: {error.problem}{where}.") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{source} is not YAML: {' '.join(str(error).split())}.") from None
    except ValueError as error:
        # For example, a date that does not exist.
        what = _TOO_LARGE if "integer string conversion" in str(error) else f"is not YAML: {error}"
        raise ConfigError(f"{source} {what}.") from None
    except RecursionError:
        raise ConfigError(f"{source} is nested too deeply.") from None
    try:
        _refuse_twins_in(node, source, set())
    except RecursionError:
        raise ConfigError(f"{source} is nested too deeply.") from None
    return _require_mapping({} if parsed is None else parsed, source)


def _require_mapping(parsed: Any, source: str) -> Mapping[str, Any]:
    if not isinstance(parsed, Mapping):
        raise ConfigError(f"{source} must hold a mapping of keys to values; it holds {kind_of(parsed)}.")
    return parsed


def _refuse_twins_in(node: yaml.Node | None, source: str, seen: set[int]) -> None:
    """Refuses a key that is given twice, at any depth.

    Args:
        node: a node of YAML.
        source: words for where it was found.
        seen: nodes that were looked at, by `id`. An alias is the node that it stands for.
    """
    if node is None or id(node) in seen:
        return
    seen.add(id(node))
    inner: list[yaml.Node] = []
    if isinstance(node, yaml.MappingNode):
        _refuse_twins([key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)], source)
        inner = [value for _, value in node.value]
    elif isinstance(node, yaml.SequenceNode):
        inner = list(node.value)
    for one in inner:
        _refuse_twins_in(one, source, seen)


def _refuse_twins(names: list[str], source: str) -> None:
    for name, count in Counter(names).items():
        if count > 1:
            raise ConfigError(f"{name!r} is given {count} times in {source}.")
