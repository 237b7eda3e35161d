"""The arguments of the command `smp-tf`, and what its help says."""

from __future__ import annotations

import argparse
import contextlib
from pathlib import Path
from typing import Any, NoReturn

from smp_tf.offline.user_errors import in_a_line

PLAN = """Says how a model would be cut over partitions, what each would hold, and what limits the plan, before anything
is trained and without storage for a single variable: in one process, on any machine."""

EXAMPLE = """The function takes no arguments and returns a Keras model, or (model, inputs), or (model, inputs, loss):
inputs are arrays or tf.TensorSpecs of a batch of one replica, a tuple of them where the model takes several arguments;
loss is a function of the model's outputs.

examples:
  smp-tf plan train.py:build --partitions 4 --microbatches 8 --batch-size 64
  smp-tf plan package.models:resnet --partitions 2 --batch-size 32 --json plan.json --html plan.html
  smp-tf plan train.py:build --partitions auto --ranks 8 --batch-size 64 --memory-limit 16GiB
  smp-tf plan train.py:build --partition-file plan.json --batch-size 64
  smp-tf plan train.py:build --partitions 64 --replicas 128 --cluster cluster.yaml --batch-size 64 --microbatches 64
"""

PROFILE = """Measures every layer of a model, forward and backward, one after the other and with the weights of one at a
time. Several processes (horovodrun -np 4 smp-tf profile ...) share the layers out and measure at the same time, as
ranks that share a host compute. The times are kept for smp-tf plan and for model.profile in a training. Several numbers
of microbatches show how much longer a batch takes, the more parts it is cut into, for smp-tf plan --microbatches auto.
"""

PROFILE_EXAMPLE = """The function is that of smp-tf plan (smp-tf plan --help). Times are kept for the model, the samples
of a microbatch and the machine, in ~/.cache/smp_tf/profiles; SMP_TF_PROFILES names another folder, or is "off".

examples:
  smp-tf profile train.py:build --microbatches 8 --batch-size 64
  smp-tf profile train.py:build --microbatches 1,4,16 --batch-size 64
  smp-tf profile train.py:build --microbatches 8 --batch-size 64 --threads 2    as one of several ranks of this host
  horovodrun -np 4 smp-tf profile train.py:build --microbatches 8 --batch-size 64    by four of them, a quarter each
"""

TIMELINE = """Says what was recorded in the steps of a training: whether the tasks ran as planned, and where the time of
every rank went. The files are those that smp.timeline and smp.callbacks.Timeline write, one of each rank."""

TIMELINE_EXAMPLE = """examples:
  smp-tf timeline timeline --html out.html
  smp-tf timeline timeline/rank_0.json timeline/rank_1.json --trace merged.json
"""


class _Parser(argparse.ArgumentParser):
    """Says in one line what is wrong; of an option that nobody knows, the command that it was given to."""

    def __init__(self, **options: Any) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, **options)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return found, []

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"smp-tf: {in_a_line(message)} ({self.prog} --help says more)\n")


def parser() -> argparse.ArgumentParser:
    """The command's arguments."""
    whole = _Parser(prog="smp-tf", description="Plans training that is split over partitions.")
    commands = whole.add_subparsers(dest="command", required=True, metavar="COMMAND")
    plan = commands.add_parser(
        "plan",
        help="say how a model would be cut, and what each partition would hold",
        description=PLAN,
        epilog=EXAMPLE,
    )
    plan.add_argument("target", metavar="SCRIPT_OR_MODULE:FUNCTION", help="what makes the model")
    plan.add_argument(
        "--partitions",
        type=_number_or_auto,
        metavar="P",
        help='number of partitions; "auto" tries all that the ranks allow, and recommends (needed, but with '
        "--partition-file)",
    )
    plan.add_argument(
        "--partition-file",
        type=Path,
        metavar="FILE",
        help="say what the plan of this file, perhaps changed by hand, would hold, in place of a plan of its own",
    )
    plan.add_argument(
        "--microbatches",
        type=_number_or_auto,
        metavar="M",
        help='per batch (default: 1, and "auto" with --partitions auto)',
    )
    plan.add_argument(
        "--replicas", type=_number, metavar="D", help="replicas of the model (default: 1, or all the ranks)"
    )
    plan.add_argument("--ranks", type=_number, metavar="N", help="processes there are (default: those of the cluster)")
    plan.add_argument("--cluster", type=Path, metavar="FILE", help="what the ranks are, in YAML or JSON")
    plan.add_argument("--batch-size", type=_number, metavar="N", help="of one replica (default: that of the inputs)")
    plan.add_argument(
        "--pipeline",
        help="schedule: interleaved (default; with --partitions auto all are tried), simple, zb_h1, interleaved_1f1b, "
        "zb_v, v_half, v_min, auto, or a .txt file",
    )
    plan.add_argument(
        "--chunks-per-rank",
        type=_number,
        metavar="V",
        help="chunks of each rank (default: as few as the schedule takes)",
    )
    plan.add_argument(
        "--not-contiguous", action="store_true", help="a partition may be visited more than once (contiguous = false)"
    )
    plan.add_argument(
        "--optimize",
        help="what to balance: memory (default), or speed (default with --partitions auto and with --cluster)",
    )
    plan.add_argument("--memory-limit", metavar="SIZE", help='the most bytes a rank may need, such as "16GiB"')
    plan.add_argument("--optimizer", default="adam", help="its slots are stored too (default: adam)")
    plan.add_argument(
        "--gradient-compression",
        metavar="KIND",
        help="gradient_compression: with 1bit, OneBitAdam and OneBitLAMB keep errors beside their slots",
    )
    plan.add_argument(
        "--shard-optimizer-state", action="store_true", help="replicas share the slots (shard_optimizer_state = true)"
    )
    plan.add_argument(
        "--gradient-offload", action="store_true", help="gradients are on the host (gradient_offload = true)"
    )
    plan.add_argument(
        "--optimizer-offload",
        action="store_true",
        help="so are the slots, of which each replica has a share (optimizer_offload = true)",
    )
    plan.add_argument(
        "--recompute",
        action="store_true",
        help="backward makes again what layers made in forward (recompute = true)",
    )
    plan.add_argument(
        "--proof",
        type=_seconds,
        default=5.0,
        metavar="SECONDS",
        help="how long to look for a proof that no other placement is better (default: 5; 0: not at all)",
    )
    plan.add_argument("--json", type=Path, metavar="FILE", help="write the plan, to run with as partition_file")
    plan.add_argument("--html", type=Path, metavar="FILE", help="write a page with pictures of the plan")
    plan.add_argument(
        "--static", action="store_true", help="estimate all times, also where smp-tf profile has measured"
    )
    profile = commands.add_parser(
        "profile",
        help="measure how long every layer takes on this machine",
        description=PROFILE,
        epilog=PROFILE_EXAMPLE,
    )
    profile.add_argument("target", metavar="SCRIPT_OR_MODULE:FUNCTION", help="what makes the model")
    profile.add_argument("--batch-size", type=_number, metavar="N", help="of one replica (default: that of the inputs)")
    profile.add_argument(
        "--microbatches", type=_numbers, default=[1], metavar="M,M,...", help="per batch, one or more (default: 1)"
    )
    profile.add_argument("--threads", type=_number, metavar="T", help="per operation (default: TensorFlow's choice)")
    profile.add_argument("--fresh", action="store_true", help="measure again what is known already")
    timeline = commands.add_parser(
        "timeline",
        help="say what ran when in recorded steps, and where the time went",
        description=TIMELINE,
        epilog=TIMELINE_EXAMPLE,
    )
    timeline.add_argument("files", type=Path, nargs="+", metavar="FILES", help="files of ranks, or the folder of them")
    timeline.add_argument("--html", type=Path, metavar="FILE", help="write a page with a picture of every step")
    timeline.add_argument(
        "--trace", type=Path, metavar="FILE", help="write all ranks to one file for chrome://tracing or Perfetto"
    )
    return whole


def _number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a number, and received {text!r}") from None


def _seconds(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 <= float(text) < float("inf"):
            return float(text)
    raise argparse.ArgumentTypeError(f"expected a number of seconds, or 0, and received {text!r}")


def _number_or_auto(text: str) -> int | str:
    if text == "auto":
        return text
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f'expected a number or "auto", and received {text!r}') from None


def _numbers(text: str) -> list[int]:
    """Numbers with commas between them, each once."""
    try:
        return list(dict.fromkeys(int(word) for word in text.split(",")))
    except ValueError:
        message = f"expected a number, or several with commas, such as 1,4,16, and received {text!r}"
        raise argparse.ArgumentTypeError(message) from None
