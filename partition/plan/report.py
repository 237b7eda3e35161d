"""The plan as a table for people."""

from __future__ import annotations

import io
import itertools
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from smp_tf.partition.place.trade import Offer, Trade
from smp_tf.partition.plan.plan import Plan, as_bytes, as_seconds
from smp_tf.partition.plan.stage_forecast import Source, StageForecast
from smp_tf.partition.units.units import AFTER_MODEL

#: A gap that rounds to 0.0 % counts as none.
_NO_GAP = 0.0005


def heading(plan: Plan) -> str:
    """Returns the settings that were asked for, in one line.

    Args:
        plan: the plan.
    """
    balanced = "stored bytes" if plan.objective == "memory" else "time per microbatch"
    partitions = "1 partition" if plan.stages == 1 else f"{plan.stages} partitions"
    microbatches = "1 microbatch" if plan.microbatches == 1 else f"{plan.microbatches} microbatches"
    return f"{partitions}, {microbatches}, {plan.schedule_name}, balanced by {balanced}"


#: Columns below which a table of stages is made narrow.
_NARROW = 96


def render(plan: Plan, width: int = 100, color: bool = False) -> str:
    """Returns the plan as text: a table with a row per stage, then remarks.

    Args:
        plan: the plan, with its forecast.
        width: columns of the terminal.
        color: whether to mark the heading with terminal codes.

    Returns:
        Lines, each at most `width` wide.

    Example:
        >>> print(render(plan, width=100))
    """
    text = io.StringIO()
    console = Console(file=text, width=width, force_terminal=color, color_system="standard" if color else None)
    console.print(stage_table(plan, is_narrow=width < _NARROW))
    if plan.trade is not None and plan.trade.is_made:
        console.print(trade_table(plan.trade, plan.objective))
    if plan.shared:
        console.print(shared_table(plan))
    for line in remarks(plan):
        console.print(line, markup=False, highlight=False, soft_wrap=False)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


def stage_table(plan: Plan, is_narrow: bool) -> Table:
    """Returns a row for each stage: what it holds, how long it takes and what it sends.

    Args:
        plan: the plan, with its forecast.
        is_narrow: whether the numbers of parameters and the space around columns are left out.
    """
    table = Table(title=heading(plan), title_justify="left", expand=False, padding=(0, 0) if is_narrow else (0, 1))
    table.add_column("stage", justify="right")
    table.add_column("layers", overflow="fold", ratio=1)
    heads = ["weights\n+ slots", "stash\nin flight", "memory\nin all", "time", "sent\nper microbatch"]
    for name in heads if is_narrow else ["parameters", *heads]:
        table.add_column(name, justify="right", no_wrap=True)
    names = layer_names(plan)
    for stage, row in enumerate(plan.forecast):
        cells = [
            f"{as_bytes(row.weight_bytes)}\n+ {as_bytes(row.slot_bytes)}",
            f"{as_bytes(row.stash_bytes)}\n{row.in_flight} ×",
            f"{as_bytes(row.device_bytes)}\n{row.source}",
            f"{row.time_share:.0%}",
            sent(row),
        ]
        table.add_row(str(stage), names[stage], *([] if is_narrow else [f"{row.parameters:,}"]), *cells)
    return table


def sent(row: StageForecast) -> str:
    """Returns what a stage sends per microbatch: a line for later stages and one for earlier ones; "-" for nothing.

    Args:
        row: the stage's forecast.
    """
    lines = [f"{as_bytes(row.traffic.sent_forward)} →"] * (row.traffic.sent_forward > 0)
    lines += [f"← {as_bytes(row.traffic.sent_backward)}"] * (row.traffic.sent_backward > 0)
    return "\n".join(lines) or "-"


def trade_table(trade: Trade, objective: str) -> Table:
    """Returns a row for each placement between which one was chosen, with its balance, what it sends and its step.

    Args:
        trade: the placements.
        objective: "memory" or "speed".
    """
    table = Table(title="balance and bytes sent, before the cut", title_justify="left")
    first, *others = trade_heads(objective)
    table.add_column(first)
    for name in others:
        table.add_column(name.replace(" per ", "\nper "), justify="right", no_wrap=True)
    for row in trade_rows(trade, objective):
        table.add_row(*row)
    return table


def trade_heads(objective: str) -> tuple[str, ...]:
    """Returns the heads of the columns of `trade_rows`.

    Args:
        objective: "memory" or "speed".
    """
    balance = "fullest stage" if objective == "memory" else "slowest stage per microbatch"
    return "placement", balance, "sent per microbatch", "step"


def trade_rows(trade: Trade, objective: str) -> list[tuple[str, ...]]:
    """Returns the names of placements, their balance, what they send and their step; equal ones in one row.

    Args:
        trade: the placements.
        objective: "memory" or "speed".
    """
    names: dict[Offer, list[str]] = {}
    for name, offer in (("best balanced", trade.balanced), ("taken", trade.taken), ("sends least", trade.least)):
        names.setdefault(offer, []).append(name)
    balance = as_bytes if objective == "memory" else as_seconds
    return [
        (", ".join(called), balance(offer.balance), as_bytes(offer.sent), as_seconds(offer.step))
        for offer, called in names.items()
    ]


def shared_table(plan: Plan) -> Table:
    """Returns a row for each weight that several layers use, with the stages that store it and have copies of it.

    Args:
        plan: the plan.
    """
    table = Table(title="shared weights", title_justify="left")
    table.add_column("weight", overflow="fold")
    for name in ("size", "stage", "copies on"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, size, stage, copies in shared_rows(plan):
        table.add_row(Text(name), size, stage, copies)
    return table


def shared_rows(plan: Plan) -> list[tuple[str, str, str, str]]:
    """Returns the name, size and stage of every weight that several layers use, and the stages with copies of it.

    Args:
        plan: the plan.
    """
    return [
        (
            shared.name,
            as_bytes(shared.nbytes),
            str(shared.owner),
            ", ".join(map(str, shared.copies)) or "-",
        )
        for shared in plan.shared
    ]


def remarks(plan: Plan) -> list[str]:
    """Returns what the tables have no column for: copies, what is on the host, the reasons, and what is proved.

    Args:
        plan: the plan, with its forecast.

    Returns:
        Sentences, each with a word for its subject.
    """
    lines = []
    if any(shared.copies for shared in plan.shared):
        lines.append("shared: once per step a copy is sent the value, and its gradient is sent back")
    lines.extend(f"on the host: {line}" for line in on_host(plan))
    lines.extend(f"why: {reason}" for reason in reasons(plan))
    lines.extend(f"proved: {line}" for line in proved(plan))
    lines.extend(f"sent: {line}" for line in sent_in_all(plan))
    lines.extend(f"memory: {line}" for line in held_earlier(plan))
    if plan.defaulted:
        lines.append("cost guessed for: " + ", ".join(plan.defaulted))
    # Of others, a number of turns is guessed.
    ops = [name for name in plan.defaulted if " (" not in name]
    if ops and any(row.source == Source.ESTIMATE for row in plan.forecast):
        lines.append(f"workspace not known of: {', '.join(ops)}; it counts as much as all that they read and give")
    return lines


def held_earlier(plan: Plan) -> tuple[str, ...]:
    """Returns what the ranks of stages held in an earlier training by the same plan, and what was forecast before it.

    Args:
        plan: the plan.
    """
    return tuple(
        f"rank {stage} held {as_bytes(held.bytes)} at most in an earlier training"
        f"{', graphs and code included' if held.is_resident else ''}; forecast {as_bytes(held.forecast)}"
        for stage, held in enumerate(plan.earlier)
    )


def reasons(plan: Plan) -> tuple[str, ...]:
    """Returns what decided the placement, one sentence each. The first names the stage that limits it.

    Args:
        plan: the plan, with its forecast.
    """
    if len(plan.forecast) < 2:
        return plan.reasons
    if plan.objective == "speed":
        stage, row = max(enumerate(plan.forecast), key=lambda at: at[1].time_share)
        said, of = f"stage {stage} takes the longest, {row.time_share:.0%} of the compute time", "of that"
    else:
        stage, row = max(enumerate(plan.forecast), key=lambda at: at[1].device_bytes)
        said, of = f"stage {stage} stores the most, {as_bytes(row.device_bytes)}", "of what layers keep there"
    if row.units == 1 and row.largest:
        said += f"; {row.largest} is alone there"
    elif row.largest_share > 0.5:
        said += f"; {row.largest} alone is {row.largest_share:.0%} {of}"
    return (said, *plan.reasons)


def on_host(plan: Plan) -> tuple[str, ...]:
    """Returns a sentence about what is in the hosts' memory instead of the devices'; nothing where nothing is.

    Args:
        plan: the plan, with its forecast.
    """
    if not any(row.host_bytes for row in plan.forecast):
        return ()
    what = "gradients and slots" if plan.forecast[0].slots_on_host else "gradients"
    sizes = ", ".join(f"{as_bytes(row.host_bytes)} of stage {stage}" for stage, row in enumerate(plan.forecast))
    return (f"{what}, {sizes}; memory in all is that of the device without them",)


def proved(plan: Plan) -> tuple[str, ...]:
    """Returns what other placements of the same units could gain, as far as it is known before the cut.

    Args:
        plan: the plan.
    """
    if plan.gap is None or plan.stages == 1:
        return ()
    if plan.objective == "speed":
        none, some, what = "makes the step shorter", "shorter", "makes the step"
        by = "by the times of layers"
    else:
        none, some, what = "has less on its fullest stage", "less on its fullest stage", "has"
        by = "of weights, gradients, slots and stash"
    other, than = "other ", ""
    if plan.trade is not None and plan.trade.is_made:
        other, than = "", " than the best balanced one"
    if plan.gap < _NO_GAP:
        return (f"no {other}placement {none}{than}, {by}",)
    return (f"any {other}placement {what} at most {plan.gap:.1%} {some}{than}, {by}",)


def sent_in_all(plan: Plan) -> tuple[str, ...]:
    """Returns what a placement sends, and how much less another one could that is as nearly balanced.

    Args:
        plan: the plan.
    """
    trade = plan.trade
    if trade is None:
        return ()
    sent, near = trade.taken.sent, f"within {100 * trade.tolerance:g}% of the best balance"
    said = f"{as_bytes(sent)} a microbatch, both ways"
    if trade.bound is not None and sent <= trade.bound * (1 + _NO_GAP):
        return (f"{said}; no placement {near} sends less",)
    if trade.bound_of_cuts is not None:
        less = "less" if sent <= trade.bound_of_cuts * (1 + _NO_GAP) else f"less than {as_bytes(trade.bound_of_cuts)}"
        said += f"; no cut in the order of the layers {near} sends {less}"
    if trade.bound:
        said += f"; no placement {near} sends less than {as_bytes(trade.bound)}"
    if not trade.bound and trade.bound_of_cuts is None:
        said += "; of fewer bytes nothing is proved"
    return (said,)


def layer_names(plan: Plan) -> list[str]:
    """Returns the layers of each stage in a few words ("embedding … block_3/attention (14)"), a run for each chunk.

    A layer that is cut is named by the layers in it.
    """
    chunks: list[list[str]] = [[] for _ in plan.placement]
    for name, chunk in plan.units.items():
        chunks[chunk].append(name)
    around = _around([name for name in plan.units if name != AFTER_MODEL])
    where: dict[str, set[int]] = {}
    for name, chunk in plan.units.items():
        for path in _paths(name, around):
            where.setdefault(path, set()).add(chunk)

    def shown(name: str) -> str:
        paths = _paths(name, around)
        return next((path for path in paths if len(where[path]) == 1), paths[-1])

    stages: list[list[str]] = [[] for _ in range(plan.stages)]
    for stage, names in zip(plan.placement, chunks, strict=True):
        stages[stage].append(_first_and_last([shown(n) for n in names], len(names)))
    return [" │ ".join(shown) for shown in stages]


def _around(names: Sequence[str]) -> int:
    """Returns how many parts of their paths all units have in common, such as the model and one that it wraps."""
    paths = [name.partition(" + ")[0].split("/")[:-1] for name in names]
    same = itertools.takewhile(lambda parts: len(set(parts)) == 1, zip(*paths, strict=False))
    return sum(1 for _ in same)


def _paths(name: str, around: int) -> list[str]:
    """Returns the layers around a unit, outermost first, and the unit itself, without the path that all units share.

    Where there are several models, a path begins with the model's name.
    """
    if name == AFTER_MODEL:
        return [name]
    path = name.partition(" + ")[0].split("/")
    first = around + 1 if around else min(2, len(path))
    return ["/".join(path[around:end]) for end in range(min(first, len(path)), len(path) + 1)]


def _first_and_last(names: Sequence[str], count: int) -> str:
    distinct = list(dict.fromkeys(names))
    if not distinct:
        return "-"
    if len(distinct) == 1:
        return distinct[0] if count == 1 else f"{distinct[0]} ({count})"
    if len(distinct) == 2:
        return f"{distinct[0]}, {distinct[1]}" + (f" ({count})" if count > 2 else "")
    return f"{distinct[0]} … {distinct[-1]} ({count})"
