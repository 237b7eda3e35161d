"""The page says what the plan says, and stands alone."""

from __future__ import annotations

import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest
import tf_keras
from tf_keras import layers

from smp_tf.config.config import check_config
from smp_tf.offline.cluster import Cluster, Host
from smp_tf.offline.plan import OfflineModel, OfflinePlan, offline
from smp_tf.offline.plan_page import page
from smp_tf.offline.plan_text import forecast
from smp_tf.partition.plan.plan import as_bytes, as_seconds
from smp_tf.partition.plan.report import remarks, sent, trade_rows
from smp_tf.pipeline.programs.kinds import APPLY, REDUCE


def _model(name: str) -> tf_keras.Model:
    inputs = tf_keras.Input((8,))
    hidden = layers.Dense(16, name="wide>8", activation="relu")(inputs)
    hidden = layers.Dense(16, name="second")(hidden)
    return tf_keras.Model(inputs, layers.Dense(4, name="head")(layers.Add()([hidden, hidden])), name=name)


def planned(pipeline: str) -> OfflinePlan:
    tf_keras.backend.clear_session()
    with offline():
        return OfflineModel(lambda: _model("net"), batch_size=9).plan(
            check_config({"partitions": 2, "microbatches": 3, "pipeline": pipeline}, "a test")
        )


@pytest.fixture(scope="module")
def made() -> OfflinePlan:
    return planned("interleaved")


class Reader(HTMLParser):
    """Collects elements, their text, and which of them were not closed."""

    WITHOUT_CONTENT = ("meta", "rect", "path")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.titles: list[str] = []
        self.counts: dict[str, int] = {}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.counts[tag] = self.counts.get(tag, 0) + 1
        if tag not in self.WITHOUT_CONTENT:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.counts[tag] = self.counts.get(tag, 0) + 1

    def handle_endtag(self, tag: str) -> None:
        # A browser closes those too.
        assert tag in self.WITHOUT_CONTENT or self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "title":
            self.titles.append(data)


def read(text: str) -> Reader:
    reader = Reader()
    reader.feed(text)
    assert reader.open == []
    return reader


def test_every_layer_task_and_rank_is_drawn(made: OfflinePlan) -> None:
    found = read(page(made, "train.py:build"))
    boxes = [title.split(":")[0] for title in found.titles if ": weights " in title]
    assert boxes == [unit.name for unit in made.units]
    tasks = [title.split(":")[0] for title in found.titles if " to " in title]
    assert tasks == [
        str(span.task) for spans in made.timeline.spans for span in spans if not span.task.kind.is_transfer
    ]
    # Each rank's six tasks, its check of the batch, and its update.
    assert len(tasks) == 2 * (2 * 3 + 1 + 1)
    assert {"0CHECK", "1CHECK", "0APPLY", "1APPLY"} < set(tasks)
    assert "apply: the optimizer" in page(made, "x")
    peaks = [title for title in found.titles if "at most" in title]
    assert len(peaks) == 2
    crossing = [title for title in found.titles if "→" in title]
    # Three samples of sixteen numbers, and their gradient back.
    assert all(title.endswith("192 B") for title in crossing)
    assert len(crossing) == 2
    assert page(made, "x").count("stroke-dasharray") == 1


def test_the_parts_of_a_backward_that_is_cut_are_told_apart(made: OfflinePlan) -> None:
    words = ("forward", "backward, what the stage before waits for", "backward, gradients of weights")
    whole, cut = page(made, "x"), page(planned("zb_h1"), "x")
    assert [f"</span>{name}" in cut for name in words] == [True, True, True]
    assert [f"</span>{name}" in whole for name in words] == [True, False, False]
    tasks = [title.split(":")[0] for title in read(cut).titles if " to " in title]
    assert {"0W2", "1I0", "1W0"} <= set(tasks)


def test_the_chunks_of_a_rank_are_told_apart(made: OfflinePlan) -> None:
    several = page(planned("interleaved_1f1b"), "x")
    assert "later chunks of a rank are paler" in several
    assert "paler" not in page(made, "x")
    timeline = several[several.index("Timeline of a step") : several.index("Memory over a step")]
    assert set(re.findall(r'fill-opacity="([\d.]+)"', timeline)) == {"1.00", "0.70"}


def test_what_each_layer_computes_and_moves_is_said(made: OfflinePlan) -> None:
    """A microbatch of three samples by a kernel of 16 x 16: two operations for each product."""
    text = page(made, "x")
    [second] = [title for title in read(text).titles if title.startswith("net/net/second: ")]
    cost = next(c for unit, c in zip(made.units, made.costs.units, strict=True) if unit.name == "net/net/second")
    assert cost.flops.forward == 2 * 3 * 16 * 16 + 3 * 16
    assert "of a microbatch 1.58 kFLOP forward, " in second
    assert f"read {as_bytes(cost.nbytes.read)}, written {as_bytes(cost.nbytes.written)}, stash 192 B" in second
    table = text.partition("<h2>The largest layers</h2>")[2]
    [row] = [row for row in table.split("<tr") if "net/net/second" in row]
    cells = re.findall(r"<td[^>]*>([^<]*)</td>", row)
    assert "1.58 kFLOP" in cells
    assert as_bytes(cost.nbytes.read) in cells


def test_long_names_keep_to_their_boxes(keras_defaults: None) -> None:
    """Names that began alike could not be told apart, and ran out of their boxes."""

    def build() -> tf_keras.Model:
        names = [f"encoder_layer_number_{n}_of_a_network_with_long_names" for n in range(4)]
        return tf_keras.Sequential([tf_keras.Input((8,)), *(layers.Dense(8, name=name) for name in names)], name="net")

    with offline():
        made = OfflineModel(build, batch_size=4).plan(check_config({"partitions": 2}, "a test"))
    text = page(made, "x")
    assert "2 partitions, 1 microbatch, " in text
    shown = re.findall(r'<svg x="[^"]*" y="[^"]*" width="200" height="[^"]*"><text [^>]*>([^<]*)</text></svg>', text)
    assert shown == [f"…{n}_of_a_network_with_long_names"[:31] for n in range(4)]


def test_it_needs_nothing_else_and_names_cannot_break_it(made: OfflinePlan) -> None:
    text = page(made, "<train>.py:build")
    assert "Plan of &lt;train&gt;.py:build" in text
    assert "wide>8" not in text
    assert not re.findall(r"<script|<link|<img|url\(|@import", text)
    assert set(re.findall(r"https?://[^\"\s]*", text)) == {"http://www.w3.org/2000/svg"}


def test_what_limits_the_plan_is_said(made: OfflinePlan) -> None:
    text = page(made, "x")
    said = remarks(made.plan)
    assert [line.split(":")[0] for line in said] == ["why", "proved", "sent"]
    assert all(line in text for line in said)


def test_what_was_given_up_for_fewer_bytes_is_a_table(made: OfflinePlan) -> None:
    trade = made.plan.trade
    assert trade is not None
    table = page(made, "x").partition("<h2>Balance and bytes sent</h2>")[2].partition("<h2>")[0]
    assert "at most 5% worse than the best" in table
    for row in trade_rows(trade, "memory"):
        assert all(f">{cell}</td>" in table for cell in row)


def test_the_stages_say_how_long_they_wait_and_what_they_send(made: OfflinePlan) -> None:
    table = page(made, "x").partition("<h2>Stages</h2>")[2].partition("<h2>Balance and bytes sent</h2>")[0]
    # A number stays with its arrow.
    ends = [re.findall(r"<td[^>]*>([^<]*)</td>", row.replace("\u00a0", " "))[-2:] for row in table.split("<tr")[2:]]
    waits = [f"{idle / made.timeline.step_time:.0%}" for idle in made.timeline.idle]
    assert ends == [[share, sent(row)] for share, row in zip(waits, made.plan.forecast, strict=True)]
    assert [end[1] for end in ends] == ["192 B →", "← 196 B"]


def test_averages_over_replicas_are_in_the_step_and_drawn(made: OfflinePlan, monkeypatch: pytest.MonkeyPatch) -> None:
    """They were added to the step as if nothing were computed meanwhile, and no picture had them."""
    # Nothing but what is sent takes time.
    monkeypatch.setenv("HOROVOD_CYCLE_TIME", "0")
    cluster = Cluster((Host(4, 1, 5e10, 8e9),), 1e4, 1e4)
    tf_keras.backend.clear_session()
    with offline():
        model = OfflineModel(lambda: _model("net"), batch_size=9)
        wanted = check_config({"partitions": 2, "microbatches": 3}, "a test")
        alone, both = (model.plan(wanted, replicas=count, cluster=cluster) for count in (1, 2))
    averaged = [span for spans in both.timeline.spans for span in spans if span.task.kind is REDUCE]
    assert [str(span.task) for span in averaged] == ["0REDUCE0", "1REDUCE0"]
    # Two replicas send half of it each, and once more what came of it, over 10 kB a second.
    assert [span.end - span.start for span in averaged] == pytest.approx(both.reduce_seconds)
    assert both.reduce_seconds == tuple(row.gradient_bytes / 1e4 for row in both.plan.forecast)
    assert alone.timeline.computed == both.timeline.computed
    updates = [span for spans in both.timeline.spans for span in spans if span.task.kind is APPLY]
    assert [str(span.task) for span in updates] == ["0APPLY0", "1APPLY0"]
    # Three tensors of the weights' size and two slots each twice, at 8 GB a second: gradients are of that size here.
    taken = [row.gradient_bytes * 7 / 8e9 for row in both.plan.forecast]
    assert [span.end - span.start for span in updates] == pytest.approx(taken)
    assert [span.start for span in updates] == [span.end for span in averaged]
    assert both.step_seconds == max(span.end for span in updates) > alone.step_seconds
    assert both.step_seconds < alone.step_seconds + max(both.reduce_seconds) + 1e-9
    text = page(both, "x")
    assert "reduce: gradients over replicas" in text
    assert "reduce: gradients over replicas" not in page(alone, "x")
    assert all(f"{span.task}: " in text for span in averaged)
    told = forecast(both)
    assert f"gradients are averaged for {as_seconds(max(both.reduce_seconds))}, " in told
    assert told.count("of it after the last task") == 1
    assert "averaged" not in forecast(alone)


@pytest.mark.skipif(shutil.which("chromium") is None, reason="no chromium here: apt install chromium")
def test_a_browser_draws_it_as_it_is(made: OfflinePlan, tmp_path: Path) -> None:
    file = tmp_path / "plan.html"
    file.write_text(page(made, "x"))
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    done = subprocess.run([*command, "--dump-dom", file.as_uri()], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    drawn, written = read(done.stdout).counts, read(file.read_text()).counts
    for shape in ("svg", "rect", "path", "text", "td"):
        assert drawn[shape] == written[shape] > 0, shape
    subprocess.run([*command, f"--screenshot={tmp_path / 'plan.png'}", file.as_uri()], check=True, timeout=120)
    assert (tmp_path / "plan.png").stat().st_size > 10_000
