"""`smp-tf timeline`: what ran when in recorded steps, and where the time went."""

from __future__ import annotations

import argparse
import itertools
import os
from pathlib import Path

from smp_tf import errors
from smp_tf.command.arguments import Commands
from smp_tf.command.output import UsageError, show
from smp_tf.command.output_files import OutputFiles
from smp_tf.offline.user_errors import words_of

DESCRIPTION = """\
Says what was recorded in the steps of a training: whether the tasks ran as planned, and where the time of
every rank went. The files are those that smp.timeline and smp.callbacks.Timeline write, one of each rank."""

EXAMPLES = """examples:
  smp-tf timeline timeline --html out.html
  smp-tf timeline timeline/rank_0.json timeline/rank_1.json --trace merged.json
"""


def add_to(commands: Commands) -> None:
    """Adds the sub-command and its arguments.

    Args:
        commands: the sub-commands of `smp-tf`.
    """
    timeline = commands.add_parser(
        "timeline",
        help="say what ran when in recorded steps, and where the time went",
        description=DESCRIPTION,
        epilog=EXAMPLES,
    )
    timeline.add_argument("files", type=Path, nargs="+", metavar="FILES", help="files of ranks, or the folder of them")
    timeline.add_argument("--html", type=Path, metavar="FILE", help="write a page with a picture of every step")
    timeline.add_argument(
        "--trace", type=Path, metavar="FILE", help="write all ranks to one file for chrome://tracing or Perfetto"
    )
    timeline.set_defaults(run=run)


def run(given: argparse.Namespace) -> None:
    """Shows a timeline, and writes the files that are asked for.

    Args:
        given: its arguments.

    Raises:
        UsageError: an argument is wrong.
        TimelineError: the files are no timeline.
    """
    import json

    from rich.console import Console

    from smp_tf.offline import timeline_text
    from smp_tf.offline.timeline_page import page
    from smp_tf.recording import timeline_file

    inside = [file.glob("rank_*.json") for file in given.files if os.path.isdir(file)]
    read = itertools.chain(given.files, *inside)
    outputs = OutputFiles({"--html": given.html, "--trace": given.trace}, read)
    console = Console()
    texts: dict[str, str] = {}
    try:
        records = timeline_file.read(given.files)
        replicas = timeline_text.replicas_of(records)
        said = timeline_text.text(replicas, max(100, console.width), console.is_terminal)
        if given.html is not None:
            texts["--html"] = page(replicas, ", ".join(map(str, given.files)))
        if given.trace is not None:
            texts["--trace"] = json.dumps(timeline_file.trace(records))
    except errors.TimelineError:
        raise
    except Exception as error:
        # A file that was changed or damaged may lack anything.
        raise UsageError(f"The files do not hold what smp_tf writes of a timeline. {words_of(error)}.") from error
    show(said)
    for option, text in texts.items():
        outputs.write(option, text)
