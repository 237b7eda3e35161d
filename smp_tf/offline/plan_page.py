"""An offline plan as one self-contained page of HTML, with tables, and pictures in SVG.

layers      a column per stage, each layer a box; what crosses between stages as lines with their bytes
timeline    a row per rank: forward and backward of every microbatch, and when gradients are averaged over replicas
memory      a row per rank: what it holds while the step runs
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from html import escape

from smp_tf.offline.html import LEFT, WIDTH, document, items, legend, mark, svg, table
from smp_tf.offline.numbers import in_flops
from smp_tf.offline.plan import OfflinePlan, memory_over_time
from smp_tf.offline.plan_text import forecast
from smp_tf.partition.place.trade import Trade
from smp_tf.partition.plan.plan import as_bytes, as_seconds
from smp_tf.partition.plan.report import heading, layer_names, remarks, sent, shared_rows, trade_heads, trade_rows
from smp_tf.partition.units.cost import UnitCost
from smp_tf.pipeline.programs.kinds import KINDS, Busy

#: Colours of stages, repeated. People who see colours differently can tell them apart (Okabe and Ito, 2008).
_COLORS = ("#56b4e9", "#e69f00", "#009e73", "#f0e442", "#cc79a7", "#d55e00", "#0072b2", "#999999")
_LARGEST = 20

_STYLE = """
th:nth-child(1), td:nth-child(1), td.name, th.name { text-align: left; }
th, td { padding: .25em .5em; } td { white-space: nowrap; } td:last-child { white-space: normal; }
td.name { overflow-wrap: anywhere; white-space: normal; min-width: 12em; }
"""
#: How many letters of a layer's name are in its box.
_LETTERS = 31


def page(made: OfflinePlan, name: str) -> str:
    """Returns the page's text.

    Args:
        made: the plan.
        name: name of what was planned.

    Returns:
        A complete HTML document.
    """
    plan = made.plan
    body = [
        f"<h1>Plan of {escape(name)}</h1>",
        f"<p>{escape(heading(plan))}.</p>",
        items([*remarks(plan), forecast(made)]),
        "<h2>Stages</h2>",
        f'<div class="wide">{_stages(made)}</div>',
        *([f"<h2>Balance and bytes sent</h2>{_trade(plan.trade, plan.objective)}"] if plan.trade is not None else []),
        *([f"<h2>Shared weights</h2>{_shared(made)}"] if plan.shared else []),
        "<h2>Layers</h2>",
        "<p>A column per stage; lines are what one microbatch sends forward, dashed ones what it sends back.</p>",
        f'<div class="wide">{_layers(made)}</div>',
        "<h2>Timeline of a step</h2>",
        f"<p>{_legend(made)}; the number is the microbatch{_paler(made)}.</p>",
        f'<div class="wide">{_timeline(made)}</div>',
        "<h2>Memory over a step</h2>",
        "<p>All that a rank has on its device. At the ends of a curve: what it stores, and the batch. Between them "
        "also what is in flight, tensors of the task that runs, and after the last task what the optimizer makes. On "
        "the right is the most, by the times of this page.</p>",
        f'<div class="wide">{_memory(made)}</div>',
        f"<h2>The largest layers</h2>{_largest(made)}",
    ]
    return document(f"Plan of {name}", body, _STYLE)


def _color(stage: int) -> str:
    return _COLORS[stage % len(_COLORS)]


def _stages(made: OfflinePlan) -> str:
    heads = (
        "stage",
        "layers",
        "parameters",
        "weights",
        "gradients",
        "slots",
        "stash",
        "transport",
        "working",
        "in all",
        "time",
        "waits",
        "sent per microbatch",
    )
    names = layer_names(made.plan)
    rows = []
    for stage, row in enumerate(made.plan.forecast):
        parts = (row.weight_bytes, row.gradient_bytes, row.slot_bytes, row.stash_bytes, row.transport_bytes)
        sizes = [as_bytes(part) for part in (*parts, row.working_bytes, row.device_bytes)]
        numbered = mark(_color(stage)) + str(stage)
        waits = f"{made.timeline.idle[stage] / made.timeline.step_time:.0%}"
        shares = (f"{row.time_share:.0%}", waits, sent(row).replace(" ", "\u00a0").replace("\n", ", "))
        rows.append((numbered, escape(names[stage]), f"{row.parameters:,}", *sizes, *shares))
    return table(heads, rows, names_at=1)


def _trade(trade: Trade, objective: str) -> str:
    said = (
        "By what is known before the model is cut. The placement that was taken sends the fewest bytes of those whose "
        f"balance is at most {100 * trade.tolerance:g}% worse than the best."
    )
    return f"<p>{said}</p>{table(trade_heads(objective), trade_rows(trade, objective), names_at=0)}"


def _shared(made: OfflinePlan) -> str:
    rows = [(escape(name), *rest) for name, *rest in shared_rows(made.plan)]
    return table(("weight", "size", "stage", "copies on"), rows, names_at=0)


def _layers(made: OfflinePlan) -> str:
    stage_of = made.plan.stages_of(made.units)
    columns: list[list[int]] = [[] for _ in range(made.plan.stages)]
    for unit, stage in enumerate(stage_of):
        columns[stage].append(unit)
    short = _short_names([unit.name for unit in made.units])
    tallest = max(len(column) for column in columns)
    height = max(4.0, min(20.0, 1400.0 / tallest))
    width, gap = 200, 110
    boxes: dict[int, tuple[float, float]] = {}
    shapes = []
    for stage, column in enumerate(columns):
        left = stage * (width + gap)
        for row, unit in enumerate(column):
            top = 20 + row * height
            boxes[unit] = (left, top + height / 2)
            name = made.units[unit].name
            cost = made.costs.units[unit]
            sizes = cost.nbytes
            told = (
                f"{name}: weights {as_bytes(sizes.weights)}, slots {as_bytes(sizes.slots)}; of a microbatch "
                f"{_work(cost)}, read {as_bytes(sizes.read)}, written {as_bytes(sizes.written)}, stash "
                f"{as_bytes(sizes.stash)}, {as_seconds(cost.seconds.both)}"
            )
            shapes.append(
                f'<g><title>{escape(told)}</title><rect x="{left}" y="{top:.1f}" width="{width}" '
                f'height="{max(height - 1, 1):.1f}" fill="{_color(stage)}" fill-opacity=".55"/>'
            )
            if height >= 12:
                # A picture within the picture, so that what is wider than the box is cut off.
                shapes.append(
                    f'<svg x="{left}" y="{top:.1f}" width="{width}" height="{height:.1f}">'
                    f'<text x="4" y="{height / 2 + 3.5:.1f}">{escape(short[unit])}</text></svg>'
                )
            shapes.append("</g>")
        shapes.append(f'<text x="{left}" y="12">stage {stage}</text>')
    lines: list[str] = []
    for flow in made.costs.flows:
        source = stage_of[flow.producer]
        for stage in sorted({stage_of[c] for c in flow.consumers} - {source}):
            target = next(c for c in flow.consumers if stage_of[c] == stage)
            (x, y), (x2, y2) = boxes[flow.producer], boxes[target]
            side = 1 if stage > source else -1
            x, x2 = (x + width, x2) if side > 0 else (x, x2 + width)
            look = ' stroke-dasharray="4 3"' if flow.backward else ""
            # Lines back take another way than lines forward.
            bend, shift = (95, height / 4) if flow.backward else (50, 0.0)
            y, y2 = y + shift, y2 + shift
            told = f"{made.units[flow.producer].name} → {made.units[target].name}: {as_bytes(flow.nbytes)}"
            lines.append(
                f'<g><title>{escape(told)}</title><path d="M{x} {y:.1f} C{x + bend * side} {y:.1f} '
                f'{x2 - bend * side} {y2:.1f} {x2} {y2:.1f}" fill="none" stroke="#444"{look}/>'
                # Next to the layer that sends it, so that no two have the same place.
                f'<text x="{x + 3 * side}" y="{y - 4:.1f}" text-anchor="{"start" if side > 0 else "end"}" '
                f'stroke="white" stroke-width="3" paint-order="stroke">'
                f"{as_bytes(flow.nbytes)}</text></g>"
            )
    # Lines that pass a stage are under its boxes.
    return svg(made.plan.stages * (width + gap) - gap, 24 + tallest * height, [*lines, *shapes])


def _short_names(names: Sequence[str]) -> list[str]:
    """Returns the names without their common path, and without the words with which all long ones begin."""
    paths = [name.split("/") for name in names]
    common = _in_common([path[:-1] for path in paths])
    shorter = ["/".join(path[common:]) for path in paths]
    long = [name for name in shorter if len(name) > _LETTERS]
    words = long[0].rfind("_", 0, _in_common(long)) + 1 if long else 0

    def within(name: str) -> str:
        ended = f"…{name[words:]}" if words and len(name) > _LETTERS else name
        return ended if len(ended) <= _LETTERS else f"{ended[: _LETTERS - 1]}…"

    return [within(name) for name in shorter]


def _in_common(all_of: Sequence[str] | Sequence[list[str]]) -> int:
    """Returns how many items all of some sequences share at their begin."""
    # What the least and the greatest share, those between them share, too.
    pairs = zip(min(all_of), max(all_of), strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def _work(cost: UnitCost) -> str:
    """Returns the floating-point operations of a unit by their purpose."""
    parts = (
        ("forward", cost.flops.forward),
        ("for gradients of inputs", cost.flops.input_gradient),
        ("of weights", cost.flops.weight_gradient),
    )
    return ", ".join(f"{in_flops(flops)} {what}" for what, flops in parts)


def _legend(made: OfflinePlan) -> str:
    return legend(span.task.kind for spans in made.timeline.spans for span in spans if span.end > span.start)


def _paler(made: OfflinePlan) -> str:
    return "" if made.plan.has_one_chunk_each else "; later chunks of a rank are paler"


def _opacity(placement: Sequence[int], chunk: int) -> float:
    """Returns 1 for the first chunk of a rank, and less and less for those that follow."""
    own = [other for other, stage in enumerate(placement) if stage == placement[chunk]]
    return 1 - 0.6 * own.index(chunk) / len(own)


def _timeline(made: OfflinePlan) -> str:
    scale = (WIDTH - LEFT) / made.timeline.step_time
    shapes = []
    # What goes on next to a rank's own tasks, such as averages over replicas, is a strip under them.
    aside = {kind for kind, row in KINDS.items() if row.busy in (Busy.LINE, Busy.NOTHING)}
    tall = 32 if any(span.task.kind in aside for spans in made.timeline.spans for span in spans) else 24
    for rank, spans in enumerate(made.timeline.spans):
        top = rank * tall
        shapes.append(f'<text x="0" y="{top + 14}">rank {rank}</text>')
        for span in spans:
            task, color = span.task, KINDS[span.task.kind].color
            if color is None or span.end <= span.start:
                continue
            x, wide = LEFT + span.start * scale, (span.end - span.start) * scale
            told = f"{task}: {as_seconds(span.start)} to {as_seconds(span.end)}"
            at, height = (top + 21, 7) if task.kind in aside else (top, 20)
            opacity = 1.0 if task.kind.is_of_stage else _opacity(made.plan.placement, task.chunk)
            shapes.append(
                f'<g><title>{escape(told)}</title><rect x="{x:.2f}" y="{at}" width="{wide:.2f}" height="{height}" '
                f'fill="{color}" fill-opacity="{opacity:.2f}" stroke="white" '
                f'stroke-width=".5"/>'
            )
            if wide >= 16 and task.microbatch is not None:
                middle = x + wide / 2
                shapes.append(f'<text x="{middle:.1f}" y="{top + 14}" text-anchor="middle">{task.microbatch}</text>')
            shapes.append("</g>")
    bottom = tall * made.plan.stages
    shapes.append(f'<text x="{LEFT}" y="{bottom + 12}">0</text>')
    shapes.append(f'<text x="{WIDTH}" y="{bottom + 12}" text-anchor="end">{as_seconds(made.timeline.step_time)}</text>')
    return svg(WIDTH, bottom + 16, shapes)


def _memory(made: OfflinePlan) -> str:
    over_time = memory_over_time(made)
    most = max(held for points in over_time for _, held in points) or 1
    scale = (WIDTH - LEFT - 90) / made.timeline.step_time
    tall = 46
    shapes = []
    for rank, points in enumerate(over_time):
        bottom = (rank + 1) * (tall + 6)
        path = [f"M{LEFT} {bottom}"]
        for (at, held), (until, _) in zip(points, [*points[1:], points[-1]], strict=True):
            level = bottom - held / most * tall
            path.append(f"L{LEFT + at * scale:.2f} {level:.1f} L{LEFT + until * scale:.2f} {level:.1f}")
        path.append(f"L{LEFT + made.timeline.step_time * scale:.2f} {bottom} Z")
        peak = max(held for _, held in points)
        shapes.append(
            f'<g><title>rank {rank}: at most {as_bytes(peak)}</title><path d="{" ".join(path)}" fill="{_color(rank)}" '
            f'fill-opacity=".7" stroke="{_color(rank)}" stroke-width=".5"/>'
            f'<text x="0" y="{bottom - 4}">rank {rank}</text>'
            f'<text x="{WIDTH}" y="{bottom - 4}" text-anchor="end">{as_bytes(peak)}</text></g>'
        )
    return svg(WIDTH, len(over_time) * (tall + 6) + 4, shapes)


def _largest(made: OfflinePlan) -> str:
    stage_of = made.plan.stages_of(made.units)
    whole = sum(cost.seconds.both for cost in made.costs.units) or 1.0
    by_time = made.plan.objective == "speed"

    def size(unit: int) -> float:
        cost = made.costs.units[unit]
        if by_time:
            return cost.seconds.both
        return cost.nbytes.weights + cost.nbytes.slots + cost.nbytes.stash

    rows = []
    for unit in sorted(range(len(made.units)), key=lambda at: (-size(at), at))[:_LARGEST]:
        cost = made.costs.units[unit]
        sizes = [as_bytes(part) for part in (cost.nbytes.weights, cost.nbytes.slots, cost.nbytes.stash)]
        sizes += [in_flops(cost.flops.forward), in_flops(cost.flops.input_gradient)]
        sizes += [in_flops(cost.flops.weight_gradient), as_bytes(cost.nbytes.read), as_bytes(cost.nbytes.written)]
        share = cost.seconds.both / whole
        numbered = mark(_color(stage_of[unit])) + str(stage_of[unit])
        rows.append((numbered, escape(made.units[unit].name), *sizes, f"{share:.1%}"))
    heads = (
        *("stage", "layer", "weights", "slots", "stash"),
        *("forward", "gradients of inputs", "gradients of weights", "read", "written", "time"),
    )
    said = "Weights and slots are stored once; all else is of one microbatch, forward and backward."
    return f'<p>{said}</p><div class="wide">{table(heads, rows, names_at=1)}</div>'
