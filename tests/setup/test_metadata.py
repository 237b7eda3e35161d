"""The requirements that the package declares are what its sources import."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

from packaging.requirements import Requirement

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

DISTRIBUTION_OF = {"yaml": "pyyaml"}
# Not required in the metadata: they come under several names, or are compiled against each other.
CHECKED_AT_IMPORT = {"tensorflow", "tf_keras", "horovod", "libucx"}
# Those of an extra: what does without them says so.
OPTIONAL = {"ortools": "exact"}


def imported(file: Path) -> set[str]:
    """The top-level names that a file imports anywhere."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names.add(str(node.module).split(".")[0])
    return names


def test_declared_is_what_is_imported(root: Path) -> None:
    folders = ("smp_tf", "ops", "partition", "pipeline", "smdistributed")
    files = [file for folder in folders for file in (root / folder).rglob("*.py")]
    names = set().union(*map(imported, files)) - set(sys.stdlib_module_names)
    others = CHECKED_AT_IMPORT | OPTIONAL.keys() | {"smp_tf", "smdistributed"}
    needed = {DISTRIBUTION_OF.get(name, name) for name in names - others}
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    assert {Requirement(line).name for line in project["dependencies"]} == needed
    for name, extra in OPTIONAL.items():
        assert name in names
        assert name in {Requirement(line).name for line in project["optional-dependencies"][extra]}
