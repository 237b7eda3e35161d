"""`smp-tf profile`: measures how long every layer takes on this machine, and how much memory."""

from __future__ import annotations

import argparse

from smp_tf.command.arguments import Commands, number, numbers, require_batch_size
from smp_tf.command.named_function import named_function
from smp_tf.command.output import UsageError
from smp_tf.errors import PlacementError

#: The most threads of an operation.
_MOST_THREADS = 1024

DESCRIPTION = """\
Measures every layer of a model, forward and backward, one after the other and with the weights of one at a
time. Several processes (horovodrun -np 4 smp-tf profile ...) share the layers out and measure at the same time, as
ranks that share a host compute. Times and memory are kept for smp-tf plan and for model.profile in a training.
Several numbers of microbatches show how much longer a batch takes, the more parts it is cut into, for smp-tf plan
--microbatches auto.
"""

EXAMPLES = """The function is that of smp-tf plan (smp-tf plan --help). They are kept for the model, the samples
of a microbatch and the machine, in ~/.cache/smp_tf/profiles; SMP_TF_PROFILES names another folder, or is "off".

examples:
  smp-tf profile train.py:build --microbatches 8 --batch-size 64
  smp-tf profile train.py:build --microbatches 1,4,16 --batch-size 64
  smp-tf profile train.py:build --microbatches 8 --batch-size 64 --threads 2    as one of several ranks of this host
  horovodrun -np 4 smp-tf profile train.py:build --microbatches 8 --batch-size 64    by four of them, a quarter each
"""


def add_to(commands: Commands) -> None:
    """Adds the sub-command and its arguments.

    Args:
        commands: the sub-commands of `smp-tf`.
    """
    profile = commands.add_parser(
        "profile",
        help="measure how long every layer takes on this machine",
        description=DESCRIPTION,
        epilog=EXAMPLES,
    )
    profile.add_argument("target", metavar="SCRIPT_OR_MODULE:FUNCTION", help="what makes the model")
    profile.add_argument("--batch-size", type=number, metavar="N", help="of one replica (default: that of the inputs)")
    profile.add_argument(
        "--microbatches", type=numbers, default=[1], metavar="M,M,...", help="per batch, one or more (default: 1)"
    )
    profile.add_argument("--threads", type=number, metavar="T", help="per operation (default: TensorFlow's choice)")
    profile.add_argument("--fresh", action="store_true", help="measure again what is known already")
    profile.set_defaults(run=run)


def run(given: argparse.Namespace) -> None:
    """Measures the layers of a model, or shows what is known of them.

    Args:
        given: its arguments.

    Raises:
        UsageError: an argument is wrong.
        ConfigError: an argument that smp.init takes, too, is wrong.
    """
    require_batch_size(given)
    if given.threads is not None and given.threads > _MOST_THREADS:
        raise UsageError(f"--threads is at most {_MOST_THREADS}. Received: {given.threads}.")
    function = named_function(given.target)
    from smp_tf.command.layer_times import measure_layers

    try:
        measure_layers(given, function)
    except PlacementError as error:
        raise UsageError(f"The model cannot be measured layer by layer. {error}") from error
