"""`smp-tf checkpoint`: looks at the checkpoints in a folder, without a job.

    smp-tf checkpoint list checkpoints
    smp-tf checkpoint verify checkpoints --step 300
    smp-tf checkpoint export checkpoints trained.keras --model train.py:build

It writes nothing into the folder, and takes no lock, so that a job may save there meanwhile.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from pathlib import Path

from smp_tf.checkpoint.inspection import Found, found_in, series_in
from smp_tf.command import checkpoint_export
from smp_tf.command.arguments import Commands, Parser, number
from smp_tf.command.output import UsageError, say, show
from smp_tf.offline.numbers import counted

#: The exit code where a checkpoint is damaged, or where there is none.
_FAILED = 1

DESCRIPTION = """\
Looks at the checkpoints that smp.CheckpointManager and smp.callbacks.Checkpoint have written into a folder:
which there are, and whether they are whole; and makes a file of a model from one. Nothing in the folder is changed."""

EXAMPLES = """examples:
  smp-tf checkpoint list checkpoints
  smp-tf checkpoint verify checkpoints              all of them
  smp-tf checkpoint verify checkpoints --step 300   checkpoints/ckpt-300
  smp-tf checkpoint export checkpoints trained.keras --model train.py:build
"""
LIST = """\
Lists the checkpoints of a folder, from oldest to newest: step, time, how many partitions and replicas wrote it,
size, and whether its files are whole. Sizes of files and hashes of indices are looked at; verify also reads the values.
"""
VERIFY = """\
Verifies checkpoints: every file's size, every hash, and the checksum of every value, read one at a time. The exit
code is 1 where anything is missing or damaged, and the output names the file."""


def add_to(commands: Commands) -> None:
    """Adds the sub-command and its own sub-commands.

    Args:
        commands: the sub-commands of `smp-tf`.
    """
    checkpoint = commands.add_parser(
        "checkpoint",
        help="list and verify the checkpoints of a folder, and make a file of a model from one",
        description=DESCRIPTION,
        epilog=EXAMPLES,
    )
    actions = checkpoint.add_subparsers(dest="action", required=True, metavar="ACTION")
    listed = actions.add_parser("list", help="list the checkpoints of a folder", description=LIST)
    _add_folder(listed)
    listed.set_defaults(run=run_list)
    verified = actions.add_parser("verify", help="read all of a checkpoint, and say what is wrong", description=VERIFY)
    _add_folder(verified)
    _add_step(verified, "all")
    verified.set_defaults(run=run_verify)
    exported = actions.add_parser(
        "export",
        help="make a file of a model from a checkpoint",
        description=checkpoint_export.DESCRIPTION,
        epilog=checkpoint_export.EXAMPLES,
    )
    _add_folder(exported)
    _add_step(exported, "the latest")
    checkpoint_export.add_arguments(exported)


def _add_folder(parser: Parser) -> None:
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="folder of the checkpoints")
    parser.add_argument(
        "--name", default="ckpt", help="checkpoint_name of the manager that wrote them (default: %(default)s)"
    )


def _add_step(parser: Parser, default: str) -> None:
    parser.add_argument("--step", type=number, metavar="N", help=f"number of the checkpoint (default: {default})")


def run_list(given: argparse.Namespace) -> None:
    """Shows the checkpoints of a folder.

    Args:
        given: its arguments.

    Raises:
        UsageError: there is no such folder.
    """
    found = _found(given)
    if not found:
        show(_none(given))
        return
    show(_table(found))
    problems = [f"{of.name}: {problem}" for of in found for problem in of.problems]
    if problems:
        show("\n".join(["", *problems]))
    whole = [of for of in found if of.is_whole]
    if problems and whole:
        show(f"The newest whole one is {whole[-1].name}.")


def run_verify(given: argparse.Namespace) -> int:
    """Reads all of some checkpoints, and says what is wrong.

    Args:
        given: its arguments.

    Returns:
        The exit code.

    Raises:
        UsageError: there is no such folder.
    """
    found = [of for of in _found(given) if given.step is None or of.step == given.step]
    checkpoints = [of for of in found if not of.is_interrupted]
    if not checkpoints:
        say(" ".join([_none(given), *(f"{of.name}: {problem}" for of in found for problem in of.problems)]))
        return _FAILED
    is_whole = True
    for of in checkpoints:
        problems = [*of.problems, *_problems_of_values(given.folder, of)]
        is_whole = is_whole and not problems
        show("\n".join([f"{of.name}: damaged", *(f"  {p}" for p in problems)]) if problems else _whole(of))
    return 0 if is_whole else _FAILED


def _found(given: argparse.Namespace) -> list[Found]:
    if not os.path.isdir(given.folder):
        what = "is a file, and no folder" if os.path.exists(given.folder) else "is not there"
        raise UsageError(f"The folder of checkpoints {str(given.folder)!r} {what}.")
    try:
        return found_in(str(given.folder), given.name)
    except OSError as error:
        raise UsageError(f"{error.filename or given.folder} cannot be read: {error.strerror}.") from error


def _none(given: argparse.Namespace) -> str:
    """Returns words for a folder without the checkpoint that is asked for."""
    step = getattr(given, "step", None)
    what = f"checkpoint {given.name}-{step}" if step is not None else f"checkpoint {given.name}-<step>"
    others = [name for name in series_in(str(given.folder)) if name != given.name]
    hint = f" There are others: --name {' or --name '.join(others)}." if others else ""
    return f"There is no {what} in {str(given.folder)!r}.{hint}"


def _table(found: Sequence[Found]) -> str:
    rows: list[tuple[str, ...]] = [("checkpoint", "step", "saved", "partitions", "replicas", "size", "whole")]
    rows += [_row(of) for of in found]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    to_right = (1, 3, 4, 5)
    return "\n".join(
        "  ".join(
            text.rjust(width) if column in to_right else text.ljust(width)
            for column, (text, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def _row(of: Found) -> tuple[str, ...]:
    from smp_tf.partition.plan.plan import as_bytes

    manifest = of.manifest
    whole = "yes" if of.is_whole else "interrupted" if of.is_interrupted else "no"
    if manifest is None:
        return of.name, str(of.step), "", "", "", as_bytes(of.nbytes) if of.nbytes else "", whole
    saved = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(manifest.saved_at))
    layout = str(manifest.partitions), str(manifest.replicas)
    return of.name, str(of.step), saved, *layout, as_bytes(of.nbytes), whole


def _problems_of_values(folder: Path, of: Found) -> list[str]:
    """Reads every value of a checkpoint whose files are there, one at a time, and returns words for damaged ones."""
    from smp_tf.checkpoint.tensors import damaged_tensors

    if of.manifest is None or not of.is_whole:
        # What is wrong with the files is told. Values in them cannot be trusted, or read.
        return []
    return list(damaged_tensors(str(folder), of.manifest, of.manifest.tensors))


def _whole(of: Found) -> str:
    from smp_tf.partition.plan.plan import as_bytes

    assert of.manifest is not None, "it was read"
    tensors, parts = counted(len(of.manifest.tensors), "value"), counted(len(of.manifest.parts), "part")
    return f"{of.name}: whole. {tensors} in {parts}, {as_bytes(of.nbytes)}: all sizes, hashes and checksums are right."
