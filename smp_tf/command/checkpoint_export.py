"""`smp-tf checkpoint export`: makes a file of a model from a checkpoint, in one process."""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING

from smp_tf.checkpoint.files import listing, read_manifest
from smp_tf.command.named_function import named_function
from smp_tf.command.output import UsageError, put
from smp_tf.errors import CheckpointError
from smp_tf.offline.numbers import counted

if TYPE_CHECKING:
    from smp_tf.checkpoint.manifest import Manifest

DESCRIPTION = """\
Makes a file of a model from a checkpoint, in one process and without a job: a .keras file, a .weights.h5 file, an
.h5 file or, for any other path, the folder of a SavedModel. Values are read and written one at a time, so that no more
than the largest weight is in memory besides the model itself."""

EXAMPLES = """The function is that of smp-tf plan (smp-tf plan --help): it takes no arguments, and returns the model
that was trained, before or after smp.DistributedModel, or (model, inputs) where the model does not know its inputs.

examples:
  smp-tf checkpoint export checkpoints trained.keras --model train.py:build
  smp-tf checkpoint export checkpoints trained --model train.py:build --step 300
  smp-tf checkpoint export checkpoints trained.keras --model train.py:compiled --optimizer
"""
#: The exit code where there is no such checkpoint, where it is damaged, and where it holds another model.
_FAILED = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that only this sub-command has.

    Args:
        parser: its parser, which has the folder, the name and the step.
    """
    parser.add_argument("out", metavar="OUT", help="the file or folder to write")
    parser.add_argument(
        "--model", required=True, metavar="SCRIPT_OR_MODULE:FUNCTION", help="what makes the model (required)"
    )
    parser.add_argument(
        "--optimizer",
        action="store_true",
        help="write the optimizer's state as well; the function compiles the model with the optimizer of the training",
    )
    parser.add_argument(
        "--at",
        default="",
        metavar="PATH",
        help="where the model is in the checkpoint, such as generator, where there are several that fit",
    )
    parser.set_defaults(run=run)


def run(given: argparse.Namespace) -> int:
    """Makes the file.

    Args:
        given: its arguments.

    Returns:
        The exit code.

    Raises:
        UsageError: an argument is wrong.
        OfflinePlanError: the function gives no model.
        StepError: a model of this kind cannot be written to such a file.
    """
    if not os.path.isdir(given.folder):
        raise UsageError(f"The folder of checkpoints {str(given.folder)!r} is not there.")
    if given.optimizer and given.out.endswith(".weights.h5"):
        raise UsageError(f"--optimizer goes with a .keras or .h5 file or a SavedModel. {given.out} has weights alone.")
    parent = os.path.dirname(os.path.abspath(given.out))
    if not os.path.isdir(parent):
        raise UsageError(f"There is no folder {parent!r} to write {os.path.basename(given.out)} to.")
    try:
        manifest = _manifest(given)
        weights = _written(given, manifest)
    except CheckpointError as error:
        put(f"smp-tf: {error}", sys.stderr)
        return _FAILED
    what = " and the optimizer's state" if given.optimizer else ""
    put(f"wrote {given.out}: {counted(weights, 'weight')} of {manifest.name}{what}", sys.stderr)
    return 0


def _manifest(given: argparse.Namespace) -> Manifest:
    folder = str(given.folder)
    if given.step is not None:
        try:
            return read_manifest(folder, f"{given.name}-{given.step}")
        except FileNotFoundError:
            raise CheckpointError(
                f"There is no checkpoint {given.name}-{given.step} in {folder!r}. 'smp-tf checkpoint list {folder}' "
                f"says which there are."
            ) from None
    found = listing(folder, given.name)
    if found.damaged:
        # It may be the latest.
        read_manifest(folder, os.path.basename(found.damaged[-1]).removesuffix(".json"))
    if not found.manifests:
        raise CheckpointError(f"There is no checkpoint of the name {given.name!r} in {folder!r}.")
    return found.manifests[-1]


def _written(given: argparse.Namespace, manifest: Manifest) -> int:
    function = named_function(given.model)
    from smp_tf.offline.export import Export
    from smp_tf.start import lifecycle

    lifecycle.init({"partitions": 1, "microbatches": 1, "seed": 0})
    try:
        export = Export(
            str(given.folder), manifest, function, given.model, given.out, given.at, with_optimizer=given.optimizer
        )
        return export.write()
    finally:
        lifecycle.shutdown()
