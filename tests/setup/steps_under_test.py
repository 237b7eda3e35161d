"""A set-up of two steps, run by test_engine.py in processes of its own.

Arguments: the folder of its state, and the key of the second step. Each step adds its name to the
file `done_work`. The second step's command opens the named pipe `gate` for reading, and so waits
for the test.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from setup_engine import Engine, Step
from setup_progress import Progress


def main() -> None:
    folder, key = Path(sys.argv[1]), sys.argv[2]

    def note(progress: Progress, command: str) -> None:
        progress.run(["sh", "-c", command], dict(os.environ), folder)

    engine = Engine("env", folder / "state", folder / "stamps")
    engine.run(
        [
            Step("first", "first", "1", lambda p: note(p, "echo first >> done_work")),
            Step(
                "second",
                "second",
                key,
                # The process that reads, and not its shell: that may end before it.
                lambda p: note(p, "sh -c 'echo $$ > gate.pid; exec cat gate'; echo second >> done_work"),
                lambda: not (folder / "lost").exists(),
            ),
        ]
    )


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
