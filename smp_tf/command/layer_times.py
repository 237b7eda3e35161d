"""Measures time and memory of every layer on this machine, shows and keeps them for plans and trainings.

It runs in one process, or in several that `horovodrun` started. These share the layers out and measure at the same
time.

The more microbatches a batch is cut into, the longer it takes, since each costs something besides its samples. Where
several numbers of microbatches are measured, the growth is shown. `smp-tf plan --microbatches auto` weighs it against
the bubble, which more microbatches make smaller.
"""

from __future__ import annotations

import argparse
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from smp_tf.command.output import UsageError, say, show
from smp_tf.config.config import check_config
from smp_tf.job import runtime
from smp_tf.model.measurement import Measurement
from smp_tf.model.profile_cache import ProfileCache
from smp_tf.model.profiling import already_known, find, measure, new_profile
from smp_tf.offline.plan import OfflineModel, OfflineTrace
from smp_tf.partition.plan.plan import as_bytes
from smp_tf.partition.units.cost import UnitCost, estimate
from smp_tf.pipeline.planner.cut import cut_into_units
from smp_tf.pipeline.planner.units import units_of
from smp_tf.planning.kept_measurements import subject_of, this_hardware
from smp_tf.start import lifecycle
from smp_tf.start.environment import world_rank, world_size


@dataclass(frozen=True)
class MeasuredUnit:
    """The measurement of one unit.

    Args:
        name: of the unit.
        times: seconds forward and backward of a microbatch; None where it could not be run.
        cost: its cost as counted from its ops.
        peaks: the most bytes that it has forward and backward, besides what it is given; None where they were not
            counted.
    """

    name: str
    times: tuple[float, float] | None
    cost: UnitCost
    peaks: tuple[int, int] | None = None


@dataclass(frozen=True)
class Batch:
    """A batch, cut into microbatches. The largest one was measured.

    Args:
        microbatches: number of microbatches.
        samples: samples of the largest.
        units: all units of the model.
    """

    microbatches: int
    samples: int
    units: tuple[MeasuredUnit, ...]

    @property
    def seconds(self) -> tuple[float, float] | None:
        """Returns the seconds of all microbatches, one after the other; None where a unit has no times.

        A microbatch of fewer samples counts as the largest does, as in a plan.
        """
        times = [unit.times for unit in self.units if unit.times is not None]
        if len(times) < len(self.units):
            return None
        return self.microbatches * sum(t[0] for t in times), self.microbatches * sum(t[1] for t in times)


def measure_layers(given: argparse.Namespace, function: Callable[[], Any]) -> None:
    """Measures a model, or looks up what is known of it, and prints the table.

    Args:
        given: the arguments of the command.
        function: the function that makes the model.

    Raises:
        ConfigError: an argument is wrong.
        OfflinePlanError: the function returns no model, or no inputs that the model takes.
        PlacementError: the model cannot be cut into units.
    """
    wanted: dict[str, Any] = {}
    if given.threads is not None:
        wanted["intra_op_threads"] = given.threads
    for count in given.microbatches:
        check_config({**wanted, "microbatches": count}, "smp-tf profile")
    # Only one of several processes prints.
    is_first = world_rank() == 0
    console = Console(quiet=not is_first)
    width = max(100, console.width)
    rows_of: dict[int, tuple[MeasuredUnit, ...]] = {}
    with _started(wanted):
        model = OfflineModel(function, batch_size=given.batch_size)
        # All are checked before one is measured. Measuring takes long, and a batch may be too small for another.
        samples = {count: model.samples_of(count) for count in given.microbatches}
        for size in dict.fromkeys(samples.values()):
            counts = [str(count) for count in samples if samples[count] == size]
            if len(counts) > 1:
                same = f"{', '.join(counts)} microbatches have {size} samples at most: measured once"
                _say(same)
            made = model.trace_of(size)
            found, words = _times(made, fresh=given.fresh)
            for line in words + words_on_sharing(found.alone):
                _say(line)
            units = units_of(made.graph)
            costs = estimate(made.graph, units, unknown=made.samples)
            rows = [
                MeasuredUnit(unit.name, found.times.get(unit.name), cost, found.peaks.bytes.get(unit.name))
                for unit, cost in zip(units, costs.units, strict=True)
            ]
            rows_of[size] = tuple(rows)
            if is_first:
                show(table(rows, size, width, console.is_terminal))
    if is_first and len(samples) > 1:
        batches = [Batch(count, size, rows_of[size]) for count, size in samples.items()]
        show("\n" + growth(batches, model.batch_size, width, console.is_terminal))


@contextmanager
def _started(config: Mapping[str, Any]) -> Iterator[None]:
    # Every process is a rank of one replica and measures its share.
    lifecycle.init({**config, "partitions": world_size(), "microbatches": 1, "seed": 0})
    try:
        yield
    except BaseException as error:
        # Several processes meet to shut down, but the others are elsewhere.
        if world_size() == 1:
            lifecycle.shutdown()
        else:
            # The command catches all errors, so no hook hears of them.
            lifecycle.end_all(error if isinstance(error, Exception) else UsageError("interrupted"))
        raise
    lifecycle.shutdown()


def _say(words: str) -> None:
    if world_rank() == 0:
        say(words)


def _times(made: OfflineTrace, *, fresh: bool) -> tuple[Measurement, list[str]]:
    """Returns the times, and sentences about them."""
    topology = runtime.current().topology
    cache, hardware = ProfileCache(), this_hardware(topology.local_size)
    subject = subject_of(made.graph, made.samples)
    known, words = (None, []) if fresh else find(made.model, cache, subject, [hardware])
    if known is not None:
        return known, [*words, already_known(made.model, hardware)]
    units, cut = cut_into_units(made.graph)
    measured = measure(made.model, made.traced, units, cut, made.tensors, made.samples)
    words += [f"{name} could not be measured. {why}" for name, why in measured.failed.items()]
    if not measured.failed and topology.rank == 0:
        path = cache.keep(new_profile(made.model, subject, hardware, measured))
        words += [f"kept in {path}"] if path is not None else []
        words += [cache.trouble] if cache.trouble else []
    return measured, words


def words_on_sharing(alone: tuple[float, float]) -> list[str]:
    """Returns a sentence about processes that share a host.

    Args:
        alone: the share of its time, forward and backward, that a layer takes while the other processes of its host
            wait.
    """
    if alone == (1.0, 1.0):
        return []
    forward, backward = (f"{100 * share:.0f} %" for share in alone)
    return [
        f"measured while all processes of the host compute; while the others wait, as in a bubble, a layer takes "
        f"{forward} of its time forward, {backward} backward"
    ]


def growth(batches: Sequence[Batch], batch_size: int, width: int = 100, color: bool = False) -> str:
    """Returns a text about how the time of a batch grows with the number of microbatches.

    Args:
        batches: the batch, cut in several ways.
        batch_size: samples of the batch.
        width: columns of the terminal.
        color: whether to mark the heading with terminal codes.
    """
    shown = Table(title=f"a batch of {batch_size}, one microbatch after the other", title_justify="left")
    for name in ("microbatches", "samples at most", "forward ms", "backward ms", "of the shortest"):
        shown.add_column(name, justify="right", no_wrap=True)
    totals = [sum(seconds) for batch in batches if (seconds := batch.seconds) is not None]
    for batch in batches:
        seconds = batch.seconds
        cells = ["-", "-", "-"]
        if seconds is not None:
            ratio = f"{sum(seconds) / min(totals):.2f}" if min(totals) else "-"
            cells = [f"{1e3 * seconds[0]:,.2f}", f"{1e3 * seconds[1]:,.2f}", ratio]
        shown.add_row(str(batch.microbatches), str(batch.samples), *cells)
    text = _printed(shown, width, color)
    if any(batch_size % batch.microbatches for batch in batches):
        text += "\nMicrobatches that have fewer samples than the largest count as it does, in a plan too."
    return text


def table(rows: Sequence[MeasuredUnit], samples: int, width: int = 100, color: bool = False) -> str:
    """Returns the table of the units, with their times and speeds.

    Args:
        rows: the units.
        samples: samples of the microbatch that was measured.
        width: columns of the terminal.
        color: whether to mark the heading with terminal codes.
    """
    shown = Table(title=f"a microbatch of {samples}, forward and backward", title_justify="left")
    shown.add_column("unit", overflow="fold", ratio=1)
    counted = any(row.peaks for row in rows)
    memory = ["memory\nat most"] * counted
    for name in ("forward\nms", "backward\nms", "GFLOP", "GFLOP/s", "read\n+ written", "GB/s", *memory):
        shown.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        taken = "-" if row.peaks is None else f"{as_bytes(row.peaks[0])} →\n← {as_bytes(row.peaks[1])}"
        shown.add_row(row.name, *_cells(row.times, [row.cost]), *[taken] * counted)
    shown.add_section()
    times = [row.times for row in rows if row.times is not None]
    if len(times) == len(rows):
        total = (sum(t[0] for t in times), sum(t[1] for t in times))
        shown.add_row("all", *_cells(total, [row.cost for row in rows]))
    return _printed(shown, width, color)


def _printed(shown: Table, width: int, color: bool) -> str:
    text = io.StringIO()
    console = Console(file=text, width=width, force_terminal=color, color_system="standard" if color else None)
    console.print(shown)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


def _cells(times: tuple[float, float] | None, costs: Sequence[UnitCost]) -> list[str]:
    flops = sum(cost.flops.forward + cost.flops.backward for cost in costs)
    read, written = sum(cost.nbytes.read for cost in costs), sum(cost.nbytes.written for cost in costs)
    moved = f"{as_bytes(int(read))}\n+ {as_bytes(int(written))}"
    if times is None:
        return ["-", "-", f"{flops / 1e9:,.2f}", "-", moved, "-"]
    seconds = sum(times)
    rates = [f"{amount / 1e9 / seconds:,.1f}" if seconds else "-" for amount in (flops, read + written)]
    return [f"{1e3 * times[0]:,.2f}", f"{1e3 * times[1]:,.2f}", f"{flops / 1e9:,.2f}", rates[0], moved, rates[1]]
