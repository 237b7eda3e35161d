"""The one file of versions: well formed, fitting together, and what is installed."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import setup_versions
from packaging.requirements import Requirement

PIN = re.compile(r"[\w.-]+==[\w.]+(; python_version (<|>=) \"3\.\d+\")?")


@pytest.mark.parametrize("tensorflow", ["current", "oldest"])
def test_every_line_is_one_exact_version(tensorflow: str) -> None:
    lines = setup_versions.requirements(tensorflow)
    assert [line for line in lines if not PIN.fullmatch(line)] == []
    for python in setup_versions.supported_pythons(tensorflow):
        names = []
        for requirement in map(Requirement, lines):
            marker = requirement.marker
            if marker is None or marker.evaluate({"python_version": python}):
                names.append(requirement.name.lower().replace("_", "-"))
        assert len(names) == len(set(names)), f"a package is pinned twice for Python {python}"


def test_supported_pythons() -> None:
    assert setup_versions.supported_pythons("current") == ["3.10", "3.11", "3.12", "3.13"]
    assert setup_versions.supported_pythons("oldest") == ["3.10", "3.11", "3.12"]


def installed_kind() -> str:
    return "oldest" if version("tensorflow-cpu").startswith("2.16.") else "current"


def test_what_is_installed_is_what_is_pinned() -> None:
    pinned = [Requirement(line) for line in setup_versions.requirements(installed_kind())]
    wrong = {
        requirement.name: version(requirement.name)
        for requirement in pinned
        if requirement.marker is None or requirement.marker.evaluate()
        if not requirement.specifier.contains(version(requirement.name))
    }
    assert wrong == {}


def test_the_pinned_versions_fit_together() -> None:
    check = [sys.executable, "-m", "pip", "check"]
    answer = subprocess.run(check, capture_output=True, text=True, timeout=120)
    complaints = [line for line in answer.stdout.splitlines() if "broken requirements" not in line]
    # tensorflow-cpu is TensorFlow under another name, which tf_keras does not know.
    known = re.compile(r"tf-keras \S+ requires tensorflow, which is not installed\.")
    assert [line for line in complaints if not known.fullmatch(line)] == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("numpy==1\n", r":1: 'numpy==1' stands before any \[section\]"),
        ("[a]\n[a]\n", r":2: section \[a\] is there twice"),
    ],
)
def test_a_malformed_file_is_refused(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "versions.txt"
    file.write_text(text)
    with pytest.raises(ValueError, match=message):
        setup_versions.read_sections(str(file))


def test_comments_and_sections(tmp_path: Path) -> None:
    file = tmp_path / "versions.txt"
    file.write_text('# about\n[a]\nx==1\n\n# why\ny==2; python_version < "3.11"\n[b c]\n')
    sections = setup_versions.read_sections(str(file))
    assert sections == {"a": ["x==1", 'y==2; python_version < "3.11"'], "b c": []}
