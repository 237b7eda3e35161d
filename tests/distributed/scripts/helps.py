"""Asks scripts for their help, one after the other in this process, and prints how each ended."""

import runpy
import sys
from pathlib import Path

for path in sys.argv[1:]:
    sys.argv = [path, "--help"]
    sys.path[0] = str(Path(path).resolve().parent)
    try:
        runpy.run_path(path, run_name="__main__")
    except SystemExit as end:
        print(path, "ended with", end.code)
