"""A timeline as one self-contained page of HTML, with a table, and a picture of every step in SVG.

A rank has three rows. The first has its tasks; those of the critical path have a frame. Under it a strip says what the
time was spent on. The third row has its reductions and updates, which may go on while tasks run.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from smp_tf.offline.html import LEFT, WIDTH, document, items, legend, mark, svg, table
from smp_tf.offline.timeline_text import WORDS, RecordedReplica, rows
from smp_tf.partition.plan.plan import as_seconds
from smp_tf.pipeline.measure.recorded import TaskRun
from smp_tf.pipeline.measure.step_anatomy import PARTS, StepAnatomy
from smp_tf.pipeline.programs.kinds import KINDS

_PARTS = {
    "compute": "#ffffff",
    "bubble": "#d9d9d9",
    "message": "#d55e00",
    "reduce": "#cc79a7",
    "apply": "#999999",
    "input": "#0072b2",
    "other": "#444444",
}
_ROW = 44
#: How many steps are drawn.
_MOST = 8

_STYLE = """
.mark { margin-left: .8em; }
.frame { border: 2px solid black; box-sizing: border-box; } .compute { border: 1px solid #bbb; }
"""


def page(replicas: Sequence[RecordedReplica], name: str) -> str:
    """Returns the page's text.

    Args:
        replicas: the recorded replicas.
        name: name of the timeline.

    Returns:
        HTML, complete.
    """
    body = [
        f"<h1>Timeline of {escape(name)}</h1>",
        "<h2>Where the time of a step went</h2>",
        "<p>Of a rank, from the begin of a step to that of the next one, on average.</p>",
        _spent(replicas),
        _LEGEND_OF_PARTS,
    ]
    for replica in replicas:
        title = f"Replica {replica.number}" if len(replicas) > 1 else "Steps"
        body += [f"<h2>{title}</h2>", items(replica.said()), f"<p>{_legend(replica)}</p>"]
        for (_, number), step in list(replica.steps.items())[:_MOST]:
            body.append(f"<h3>Step {number} of {escape(step.program.name)}</h3>")
            body.append(f"<p>{escape(_path_in_words(step))}</p>")
            body.append(f'<div class="wide">{_picture(step, replica.ranks)}</div>')
        if len(replica.steps) > _MOST:
            body.append(f"<p>{len(replica.steps) - _MOST} more steps were recorded, and are not drawn.</p>")
    return document(f"Timeline of {name}", body, _STYLE)


_LEGEND_OF_PARTS = f"""<ul>
<li>bubble: nothing to do by the plan until another rank has made something</li>
<li>{WORDS["message"]}: it was sent, and not there yet</li>
<li>reduce: averaging gradients over replicas, and what is put together over stages, such as a norm</li>
<li>input: between two steps, here or on the rank that was waited for: data, callbacks, Python</li>
<li>other: what TensorFlow takes to begin a task, and to end the step</li>
</ul>"""


def _spent(replicas: Sequence[RecordedReplica]) -> str:
    heads = ("rank", "stage", "step", *(f"{mark(_PARTS[part], part)}{WORDS[part]}" for part in PARTS))
    found = list(rows(replicas))
    lines = [[str(rank), str(stage), *_cells(spent)] for rank, stage, spent in found]
    if len(found) > 1:
        mean = {part: sum(spent[part] for *_, spent in found) / len(found) for part in PARTS}
        lines.append(["all", "", *_cells(mean)])
    return table(heads, lines)


def _cells(spent: dict[str, float]) -> list[str]:
    whole = sum(spent.values())
    parts = [f"{as_seconds(spent[part])} ({spent[part] / whole:.0%})" if whole else "" for part in PARTS]
    return [as_seconds(whole), *parts]


def _legend(replica: RecordedReplica) -> str:
    stages = (stage for step in replica.steps.values() for stage in step.stages if stage)
    tasks = legend(run.task.kind for stage in stages for run in stage.tasks)
    return f"{tasks} {mark('white', 'frame')}on the critical path; the number is the microbatch."


def _path_in_words(step: StepAnatomy) -> str:
    path = step.critical_path()
    if not path:
        return "Nothing was computed."
    begin, end = path[0][1].begin, path[-1][1].end
    computed = sum(run.end - run.begin for _, run in path)
    names = " ".join(str(run.task) for _, run in path)
    return (
        f"Critical path: {as_seconds((end - begin) / 1e9)}, of which {as_seconds(computed / 1e9)} in tasks and "
        f"{as_seconds((end - begin - computed) / 1e9)} between them. {names}"
    )


def _picture(step: StepAnatomy, ranks: Sequence[int]) -> str:
    known = [stage for stage in step.stages if stage is not None]
    begin, end = min(stage.begin for stage in known), max(stage.until for stage in known)
    scale = (WIDTH - LEFT) / max(end - begin, 1)
    critical = {run.task for _, run in step.critical_path()}
    shapes = []
    for row, (rank, stage) in enumerate(zip(ranks, step.stages, strict=True)):
        top = row * _ROW
        shapes.append(f'<text x="0" y="{top + 14}">rank {rank}</text>')
        if stage is None:
            continue
        for run in stage.compute:
            shapes.append(_box(run, begin, scale, (top + 1, 18), run.task in critical))
        for run in stage.updates:
            shapes.append(_box(run, begin, scale, (top + 29, 9), False))
        for piece in step.pieces(row):
            if piece.part == "compute":
                continue
            told = f"{WORDS[piece.part]}: {as_seconds((piece.end - piece.begin) / 1e9)}"
            shapes.append(
                f'<g><title>{escape(told)}</title><rect x="{LEFT + (piece.begin - begin) * scale:.2f}" y="{top + 21}" '
                f'width="{(piece.end - piece.begin) * scale:.2f}" height="6" fill="{_PARTS[piece.part]}"/></g>'
            )
    bottom = _ROW * len(ranks)
    shapes.append(f'<text x="{LEFT}" y="{bottom + 12}">0</text>')
    shapes.append(f'<text x="{WIDTH}" y="{bottom + 12}" text-anchor="end">{as_seconds((end - begin) / 1e9)}</text>')
    return svg(WIDTH, bottom + 16, shapes)


def _box(run: TaskRun, origin: int, scale: float, place: tuple[int, int], is_critical: bool) -> str:
    """Returns the box of a task. `place` is where it begins, from the top, and how high it is."""
    top, height = place
    x, wide = LEFT + (run.begin - origin) * scale, (run.end - run.begin) * scale
    told = (
        f"{run.task}: {as_seconds((run.end - run.begin) / 1e9)}, from {as_seconds((run.begin - origin) / 1e9)}"
        f"{', on the critical path' if is_critical else ''}"
    )
    stroke = 'stroke="black" stroke-width="2"' if is_critical else 'stroke="white" stroke-width=".5"'
    shape = (
        f'<g><title>{escape(told)}</title><rect x="{x:.2f}" y="{top}" width="{wide:.2f}" height="{height}" '
        f'fill="{KINDS[run.task.kind].color}" {stroke}/>'
    )
    if wide >= 16 and run.task.microbatch is not None:
        shape += f'<text x="{x + wide / 2:.1f}" y="{top + 13}" text-anchor="middle">{run.task.microbatch}</text>'
    return shape + "</g>"
