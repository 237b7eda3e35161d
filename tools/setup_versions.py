"""Reads `versions.txt`, the one place that names versions. Runs on any Python 3."""

import os
from typing import Dict, List

VERSIONS_FILE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "versions.txt")


def read_sections(path: str = VERSIONS_FILE) -> Dict[str, List[str]]:
    """Reads the sections of a versions file.

    Args:
        path: the file. It has lines under `[section]` headers; `#` starts a comment line.

    Returns:
        A dict from section name to its list of lines.

    Raises:
        ValueError: a line is before the first header, or a section is there twice.
    """
    sections = {}  # type: Dict[str, List[str]]
    lines = None
    with open(path) as file:
        for number, line in enumerate(file, 1):
            line = line.strip()
            if not line or line.startswith("#"):
                continue
            if line.startswith("["):
                name = line.strip("[]")
                if name in sections:
                    raise ValueError("%s:%d: section [%s] is there twice" % (path, number, name))
                lines = sections.setdefault(name, [])
            elif lines is None:
                raise ValueError("%s:%d: %r stands before any [section]" % (path, number, line))
            else:
                lines.append(line)
    return sections


def supported_pythons(tensorflow: str) -> List[str]:
    """Returns the Python versions, oldest first, that TensorFlow `current` or `oldest` supports."""
    return read_sections()["python " + tensorflow]


def requirements(tensorflow: str) -> List[str]:
    """Returns the pip requirement lines for TensorFlow `current` or `oldest`, without Horovod."""
    sections = read_sections()
    docs = sections["docs"] if tensorflow == "current" else []
    common = sections["common"] + sections["tensorflow " + tensorflow]
    return common + sections["dev"] + sections["models"] + docs


def pinned(section: str, package: str) -> str:
    """Returns the version that a section pins for a package that it names once."""
    for line in read_sections()[section]:
        name, _, version = line.partition("==")
        if name == package:
            return version
    raise ValueError("%s: no %s in [%s]" % (VERSIONS_FILE, package, section))
