"""Sets up everything smp_tf needs in a virtual environment: `python3 tools/setup_env.py`.

This file only finds a Python that is neither too old nor too new, so it is written for any Python 3. The work is done
in `setup_steps.py`.
"""

import os
import subprocess
import sys
from typing import Dict, List, Optional

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
sys.dont_write_bytecode = True

import setup_versions  # noqa: E402

ASK_VERSION = "import sys; print('%d.%d' % sys.version_info[:2])"
OS_RELEASE = "/etc/os-release"
# The Python 3 of releases of Debian and Ubuntu, where it may be a supported one.
PACKAGED = {
    "bookworm": "3.11",
    "trixie": "3.13",
    "jammy": "3.10",
    "noble": "3.12",
    "plucky": "3.13",
    "questing": "3.13",
}


def version_of(interpreter: str) -> Optional[str]:
    """Returns the `major.minor` of an interpreter, or None if it does not run."""
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


def system() -> Dict[str, str]:
    """Returns what the system says about itself; nothing where it says nothing."""
    try:
        with open(OS_RELEASE) as file:
            pairs = [line.strip().partition("=") for line in file]
    except OSError:
        return {}
    return {name: value.strip("\"'") for name, _, value in pairs}


def way(supported: List[str], found: Dict[str, str]) -> str:
    """Returns a sentence about how to install a supported Python on a system, as `system` describes it."""
    codename = found.get("UBUNTU_CODENAME") or found.get("DEBIAN_CODENAME") or found.get("VERSION_CODENAME", "")
    packaged = PACKAGED.get(codename)
    if packaged in supported:
        return "Install: sudo apt-get install python%s python%s-venv, then run this again" % (packaged, packaged)
    newest = supported[-1]
    if "ubuntu" in [found.get("ID", "")] + found.get("ID_LIKE", "").split():
        return (
            "Install: sudo add-apt-repository ppa:deadsnakes/ppa && sudo apt-get install python%s python%s-venv, "
            "then run this again" % (newest, newest)
        )
    return (
        "%s is not known to have a package of one. Install uv, then: "
        "uv python install %s && make setup PYTHON=$(uv python find %s)"
        % (found.get("PRETTY_NAME", "this system"), newest, newest)
    )


def advice(running: str, supported: List[str], found: Dict[str, str]) -> str:
    """Returns a line about which Python is needed, and how to get it on a system."""
    kind = "old" if tuple(map(int, running.split("."))) < (3, int(supported[0][2:])) else "new"
    return "python3 is Python %s, too %s: Python %s to %s is needed, and none is on PATH. %s" % (
        running,
        kind,
        supported[0],
        supported[-1],
        way(supported, found),
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
    print("set-up failed: " + advice(running, supported, system()), file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
