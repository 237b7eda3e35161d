"""The table of keys in docs/configuration.md is made from the keys."""

from __future__ import annotations

import importlib.util
import re
from types import ModuleType

import pytest

from smp_tf.config.keys import KEYS
from tests.docs.pages import ROOT, page


@pytest.fixture(scope="module")
def configuration_table() -> ModuleType:
    """The script that makes the table; docs/ is no package."""
    specification = importlib.util.spec_from_file_location("configuration_table", ROOT / "docs/configuration_table.py")
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def test_the_table_is_that_of_today(configuration_table: ModuleType) -> None:
    text = page("docs/configuration.md")
    assert configuration_table.written(text) == text, "write it anew: python docs/configuration_table.py"
    assert re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE) == list(KEYS)


def test_a_default_that_depends_is_told_as_one(configuration_table: ModuleType) -> None:
    rows = configuration_table.table().splitlines()
    assert rows[2] == (
        "| `partitions` | all processes | an int of at least 1 that divides the number of processes | stages a model "
        "replica is cut into. Also `pipeline_parallel_degree` |"
    )
    assert '| `optimize` | `"memory"` | `"memory"` or `"speed"` |' in "\n".join(rows)
    assert "| `memory_limit` | none |" in "\n".join(rows)


def test_what_is_told_more_of_are_keys() -> None:
    more = page("docs/configuration.md").split("## More about some of them")[1]
    named = [
        key for keys in re.findall(r"^- \*\*(.*)\*\*:", more, re.MULTILINE) for key in re.findall(r"`(\w+)`", keys)
    ]
    assert len(named) > 10
    assert set(named) <= set(KEYS)
