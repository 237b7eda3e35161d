"""The command `smp-tf`.

    smp-tf plan train.py:build --partitions 4 --microbatches 8 --batch-size 64
    smp-tf profile train.py:build --microbatches 8 --batch-size 64
    smp-tf timeline timeline --html out.html
    smp-tf checkpoint list checkpoints
    smp-tf run -np 2 train.py

Exit codes: 0; 1 where there is no such plan (the message says what would help), and where a checkpoint is damaged or
not there; 2 where an argument or a file is wrong; 130 where Ctrl-C ended the command. An error is told in one line.
`smp-tf run` has the exit code of the rank that failed first.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from smp_tf import errors
from smp_tf.command import checkpoint, plan, profile, run, timeline
from smp_tf.command.arguments import Parser
from smp_tf.command.output import UsageError, put, say, show
from smp_tf.errors import PlacementError

#: The sub-commands. Each is a file with its arguments and what it does.
_COMMANDS = (run, plan, profile, timeline, checkpoint)
#: Errors of smp_tf. Their messages say all that there is to know.
_TOLD = (UsageError, *(getattr(errors, name) for name in errors.__all__))
#: A shell's exit code for a process that SIGINT ended.
_INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command.

    Args:
        arguments: the arguments of the command line, without the program's name; by default this process's.

    Returns:
        The exit code.
    """
    try:
        try:
            given = parser().parse_args(arguments)
            if given.command != run.NAME:
                # On every start TensorFlow tells what it was compiled with, and that results of oneDNN differ. There
                # are no results here.
                os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
            code: int | None = given.run(given)
        finally:
            # Output such as help is written here, so that an error shows now and not when Python ends.
            show("", end="")
    except PlacementError as error:
        # It is told stage by stage, in several lines.
        put(f"smp-tf: there is no such plan. {error}", sys.stderr)
        return 1
    except _TOLD as error:
        say(str(error))
        return 2
    except KeyboardInterrupt:
        say("interrupted.")
        return _INTERRUPTED
    return code or 0


def parser() -> argparse.ArgumentParser:
    """Returns the parser for the arguments of all sub-commands."""
    whole = Parser(prog="smp-tf", description="Starts and plans training that is split over partitions.")
    commands = whole.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in _COMMANDS:
        command.add_to(commands)
    return whole


if __name__ == "__main__":
    sys.exit(main())
