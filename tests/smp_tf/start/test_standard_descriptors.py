"""A process that is started without standard error writes what is meant for it into no other file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def test_a_file_is_not_taken_for_standard_error(tmp_path: Path) -> None:
    code = (
        "import os, sys; import smp_tf; file = open(sys.argv[1], 'w'); os.write(2, b'words'); "
        "print(file.fileno() > 2, os.readlink('/proc/self/fd/2'), os.get_inheritable(2))"
    )
    # As a shell does for `2>&-`.
    program = ["sh", "-c", 'exec "$0" "$@" 2>&-', sys.executable, "-c", code, str(tmp_path / "data")]
    result = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout == "True /dev/null True\n"
    assert (tmp_path / "data").read_text() == ""
