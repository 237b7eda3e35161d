"""Docstrings of finished rooms are plain: functions begin with a verb in the third person."""

from __future__ import annotations

import ast
import functools
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.house.imports import ROOT

#: Rooms whose words have been gone over; the list only grows.
FINISHED = [
    "benchmarks/harness",
    "benchmarks/models",
    "benchmarks/processes",
    "benchmarks/versus",
    "docs/pictures",
    "examples",
    "ops",
    "partition",
    "partition/graph",
    "partition/op_cost",
    "partition/place",
    "partition/plan",
    "partition/rewrite",
    "partition/samples",
    "partition/split",
    "partition/trace",
    "partition/units",
    "pipeline",
    "pipeline/measure",
    "pipeline/planner",
    "pipeline/programs",
    "pipeline/run",
    "pipeline/schedules",
    "smp_tf",
    "smp_tf/batch",
    "smp_tf/checkpoint",
    "smp_tf/collectives",
    "smp_tf/command",
    "smp_tf/config",
    "smp_tf/files",
    "smp_tf/gradients",
    "smp_tf/job",
    "smp_tf/keras",
    "smp_tf/launch",
    "smp_tf/loss_check",
    "smp_tf/model",
    "smp_tf/offline",
    "smp_tf/optimizer",
    "smp_tf/planning",
    "smp_tf/recording",
    "smp_tf/replicas",
    "smp_tf/sharding",
    "smp_tf/start",
    "smp_tf/steps",
    "smp_tf/training",
    "smp_tf/variables",
    "smp_tf/watch",
]

#: How a docstring of a function begins. A verb that is not here is added.
WORDS = """
Adapts Adds Advances Agrees Announces Answers Appends Applies Asks Assigns Averages Backs Begins Brings Broadcasts
Builds Calls Changes Checks Chooses Closes Collects Combines Compares Compiles Connects Contracts Converts Copies
Counts Cuts Decides Decorates Deletes Divides Does Draws Drops Ends Estimates Exchanges Exempts Fetches Fills Finds
Follows Forgets Frees Gathers Gives Goes Groups Handles Holds Implements Imports Includes Joins Keeps Kills Learns
Leaves Lets Lists Loads Locks Looks Makes Marks Measures Minimises Moves Names Notes Numbers Opens Passes Places Plans
Prepares Prints Puts Raises Reads Receives Records Reduces Refuses Registers Remembers Removes Renumbers Replaces
Reports Requires Restores Returns Runs Saves Says Scales Seeds Sends Sets Shortens Shows Simulates Solves Sorts Splits
Starts Stops Sums Takes Tells Traces Trains Tries Turns Undoes Updates Waits Walks Watches Wraps Writes Yields
"""
VERBS = frozenset(WORDS.split())

#: Descriptions that lead elsewhere.
ELSEWHERE = re.compile(r"^ +\w+: (as for|as in|likewise|see there)\b|\bsee there\b")
#: "after" is plainer than "behind", "next to" and "besides" than "beside"; an argument may have such a name.
UNPLAIN = re.compile(r"\b(behind|beside)\b(?!:)", re.IGNORECASE)


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str, str]]:
    """Yields line, name and text of each docstring of a function; those of properties say what a value is."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
        text = ast.get_docstring(node)
        if text and not any("property" in name or name.endswith(".setter") for name in decorators):
            yield node.lineno, node.name, text


@functools.cache
def prose(source: str) -> list[tuple[int, str]]:
    """The lines of comments and docstrings."""
    found = [
        (token.start[0], token.string)
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    ]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node, clean=False) or ""
            # The docstring is the first statement.
            first = node.body[0].lineno if text else 0
            found += enumerate(text.splitlines(), start=first)
    return found


def files_of(room: str) -> list[Path]:
    found = sorted((ROOT / room).glob("*.py"))
    assert found, room
    return found


@pytest.mark.parametrize("room", FINISHED)
def test_a_function_says_first_what_it_does(room: str) -> None:
    told = [
        f"{path.relative_to(ROOT)}:{line}: {name} begins with {text.split()[0]!r}"
        for path in files_of(room)
        for line, name, text in docstrings(ast.parse(path.read_text(encoding="utf-8")))
        if text.split()[0].rstrip(",.:") not in VERBS
    ]
    assert told == []


@pytest.mark.parametrize("refused", [UNPLAIN, ELSEWHERE], ids=["behind or beside", "an argument described elsewhere"])
@pytest.mark.parametrize("room", FINISHED)
def test_comments_and_docstrings_are_plain(room: str, refused: re.Pattern[str]) -> None:
    told = [
        f"{path.relative_to(ROOT)}:{line}: {text.strip()}"
        for path in files_of(room)
        for line, text in prose(path.read_text(encoding="utf-8"))
        if refused.search(text)
    ]
    assert told == []


def test_what_is_not_plain_is_found() -> None:
    source = 'def name():\n    """The name.\n\n    It stands behind it.\n    """\n    return 1  # beside it\n'
    assert [text.split()[0] for _, _, text in docstrings(ast.parse(source))] == ["The"]
    assert [line for line, text in prose(source) if UNPLAIN.search(text)] == [6, 4]
