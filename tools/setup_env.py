"""Sets up everything smp_tf needs in a virtual environment: `python3 tools/setup_env.py`.

This file only finds a Python that is neither too old nor too new, so it is written for any
Python 3; the work is in `setup_steps.py`.
"""

import os
import subprocess
import sys
from typing import List, Optional

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
sys.dont_write_bytecode = True

import setup_versions  # noqa: E402

ASK_VERSION = "import sys; print('%d.%d' % sys.version_info[:2])"


def version_of(interpreter: str) -> Optional[str]:
    """The `major.minor` of an interpreter, or None if it does not run."""
    try:
        answer = subprocess.run(
            [interpreter, "-c", ASK_VERSION],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            stdin=subprocess.DEVNULL,
        )
    except OSError:
        return None
    return answer.stdout.decode().strip() if answer.returncode == 0 else None


def advice(running: str, supported: List[str]) -> str:
    """The line that says which Python is wanted and how to get it."""
    newest = supported[-1]
    kind = "old" if tuple(map(int, running.split("."))) < (3, int(supported[0][2:])) else "new"
    return (
        "python3 is Python %s, too %s: Python %s to %s is needed. Install one: "
        "sudo apt-get install python%s python%s-venv "
        "(on Ubuntu first: sudo add-apt-repository ppa:deadsnakes/ppa), then run this again"
        % (running, kind, supported[0], newest, newest, newest)
    )


def main() -> int:
    """Runs the set-up under a supported Python: this one, or one found on PATH."""
    oldest = "--tensorflow=oldest" in sys.argv
    supported = setup_versions.supported_pythons("oldest" if oldest else "current")
    running = "%d.%d" % sys.version_info[:2]
    if running in supported:
        import setup_steps

        return setup_steps.main(sys.argv[1:])
    for version in reversed(supported):
        interpreter = "python" + version
        if version_of(interpreter) == version:
            print("set-up: python3 is Python %s; using %s from PATH" % (running, interpreter))
            sys.stdout.flush()
            os.execvp(interpreter, [interpreter, os.path.abspath(__file__)] + sys.argv[1:])
    print("set-up failed: " + advice(running, supported), file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
