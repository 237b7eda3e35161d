"""Tells how good the placements of well-known models are proved to be, what they send, and how long planning takes.

    python benchmarks/placement.py --partitions 2,4 --json placement.json

plans every model of tf_keras.applications in one process, without storage for weights. Where the package transformers
is installed, its models are planned too, at their usual sizes. "gap" is by how much any other placement of the same
units can be better at most, by the costs that are known before the model is cut. 0 % is proved to be the best. For
"speed" it is the gap of a step: all stages work on the first microbatch one after the other, and the slowest one's time
counts for every further microbatch. "largest load" is by how much the slowest stage (or the fullest) can have less at
most, in any placement whose stages together take no longer. Both are of the plan with the best balance. "sent" is what
the plan with `balance_tolerance` sends per microbatch, "of the least" that over the least that any cut in the order of
the layers sends within the tolerance, and "of any" over the least that is proved of any placement. "balance" and "step"
are what it has more than the best balanced plan. Seconds are those of a processor, with the solver's process, for a
plan without and with the tolerance, as medians over the repetitions, which take turns; "times" is how many times as
long the second one takes. Tracing has its own column, by the clock, since it is done once for a model. "before" is what
the best balanced plan sends. With schedules that have several chunks per rank, the least is a number of bytes below
which no cut sends; it may be much less than any cut needs.
"""

from __future__ import annotations

import argparse
import functools
import gc
import importlib.util
import inspect
import itertools
import json
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import smp_tf as smp  # isort: split

import tensorflow as tf
import tf_keras
from harness.machine import circumstances
from harness.options import new_file
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from smp_tf.config.config import check_config
from smp_tf.errors import PlacementError
from smp_tf.offline.plan import OfflineModel, OfflinePlan, offline
from smp_tf.partition.place.placement import Chain, Chunks, costed, step_time
from smp_tf.partition.plan.plan import as_bytes

BATCH, MICROBATCHES = 8, 4
#: Tokens of a text.
LENGTH = 128
#: Models of transformers by their printed names: the model, its configuration and how it is loaded.
TRANSFORMERS = {
    "BERT": ("TFBertForMaskedLM", "BertConfig", {}),
    "DistilBERT": ("TFDistilBertForMaskedLM", "DistilBertConfig", {}),
    "Electra": ("TFElectraForPreTraining", "ElectraConfig", {}),
    "GPT-2": ("TFGPT2LMHeadModel", "GPT2Config", {}),
    "GPT-2 medium": ("TFGPT2LMHeadModel", "GPT2Config", {"n_layer": 24, "n_embd": 1024, "n_head": 16}),
    "RoBERTa": ("TFRobertaForMaskedLM", "RobertaConfig", {}),
    "SegFormer": ("TFSegformerForImageClassification", "SegformerConfig", {}),
    "T5": ("TFT5ForConditionalGeneration", "T5Config", {"decoder_start_token_id": 0}),
    "ViT": ("TFViTForImageClassification", "ViTConfig", {}),
}


@dataclass(frozen=True)
class Row:
    """A model on a number of partitions.

    Args:
        model: name of the model.
        units: number of units that are placed.
        partitions: number of partitions.
        objective: "memory" or "speed".
        pipeline: the schedule.
        gap, load_gap: the two gaps described above, or None where nothing is proved.
        before, sent: bytes that the best balanced plan and the one with a tolerance send per microbatch.
        of_cuts, of_any: the second of them over the least that is known of cuts and of any placement, or None.
        balance, step: what the second plan has more than the first, as shares.
        trace_seconds: seconds to trace the model.
        balanced_seconds, plan_seconds: a processor's seconds for each of the two plans.
    """

    model: str
    units: int
    partitions: int
    objective: str
    pipeline: str
    gap: float | None
    load_gap: float | None
    before: float
    sent: float
    of_cuts: float | None
    of_any: float | None
    balance: float
    step: float
    trace_seconds: float
    balanced_seconds: float
    plan_seconds: float

    @property
    def times(self) -> float:
        """Returns how many times as long the second plan takes as the first."""
        return self.plan_seconds / (self.balanced_seconds or 1.0)


def models() -> dict[str, Callable[[], Any]]:
    """Returns the functions that make the models, by name."""
    made: dict[str, Callable[[], Any]] = {
        name: functools.partial(_of_applications, make)
        for name, make in inspect.getmembers(tf_keras.applications, inspect.isfunction)
        if name[0].isupper()
    }
    made |= {"GPT of 24 blocks": _gpt, "U-Net": _u_net}
    if importlib.util.find_spec("transformers") is not None:
        made |= {name: functools.partial(_of_transformers, *how) for name, how in TRANSFORMERS.items()}
    return made


def _gpt() -> Any:
    """Returns a GPT of 24 blocks, fed with 32 sequences of 256 tokens."""
    from models import gpt

    size = gpt.Size(depth=24, width=1024, heads=16, length=256, vocabulary=4096, batch=BATCH, tied=0)
    return gpt.build(tf_keras.Model, size), tf.TensorSpec([BATCH, size.length], tf.int32)


def _u_net() -> Any:
    """Returns a U-Net for images of 128 x 128, with four levels and two convolutions on each way of a level."""
    layers = tf_keras.layers
    image = tf_keras.Input((128, 128, 3))
    x, skipped = image, []

    def convolved(x: Any, channels: int) -> Any:
        for _ in range(2):
            x = layers.Conv2D(channels, 3, padding="same", activation="relu")(x)
        return x

    for channels in (64, 128, 256, 512):
        x = convolved(x, channels)
        skipped.append(x)
        x = layers.MaxPool2D()(x)
    x = convolved(x, 1024)
    for channels in (512, 256, 128, 64):
        x = layers.Conv2DTranspose(channels, 2, strides=2)(x)
        x = convolved(layers.Concatenate()([skipped.pop(), x]), channels)
    return tf_keras.Model(image, layers.Conv2D(2, 1)(x), name="u_net")


def _of_applications(make: Callable[..., Any]) -> Any:
    made = make(weights=None)
    # Some take images of any size.
    return make(weights=None, input_shape=(224, 224, 3)) if None in made.input_shape[1:] else made


def _of_transformers(model: str, config: str, more: Mapping[str, Any]) -> Any:
    import transformers

    made = getattr(transformers, model)(getattr(transformers, config)(**more))
    if made.main_input_name == "pixel_values":
        inputs = {"pixel_values": tf.TensorSpec([BATCH, 3, 224, 224], tf.float32)}
    else:
        inputs = {"input_ids": tf.TensorSpec([BATCH, LENGTH], tf.int32)}
    if model.startswith("TFT5"):
        inputs["decoder_input_ids"] = inputs["input_ids"]
    return made, inputs, lambda outputs: tf.reduce_mean(outputs.logits)


def rows_of(
    name: str,
    make: Callable[[], Any],
    partitions: list[int],
    proof: float,
    pipelines: Sequence[str] = ("interleaved",),
    repetitions: int = 1,
) -> Iterator[Row]:
    """Plans a model for every number of partitions and both objectives.

    Args:
        name: name of the model.
        make: makes the model.
        partitions: numbers of partitions.
        proof: seconds for a proof.
        pipelines: schedules.
        repetitions: how often each plan is made, both in turn.
    """
    gc.unfreeze()
    tf_keras.backend.clear_session()
    began = time.monotonic()
    model = OfflineModel(make, batch_size=BATCH)
    model.trace(MICROBATCHES)
    traced = time.monotonic() - began
    # Python would look through all that was traced for circles, now in one plan and now in another one.
    gc.collect()
    gc.freeze()
    for count, objective, pipeline in itertools.product(partitions, ("memory", "speed"), pipelines):
        wanted = {"partitions": count, "microbatches": MICROBATCHES, "optimize": objective, "pipeline": pipeline}
        made: list[OfflinePlan] = []
        took: list[float] = []
        try:
            for more in ({"balance_tolerance": 0.0}, {}) * repetitions:
                began = processor_seconds()
                made.append(model.plan(check_config(wanted | more, "this benchmark"), proof_seconds=proof))
                took.append(processor_seconds() - began)
        except PlacementError as error:
            print(f"{name} on {count} partitions, {pipeline}: {error}", file=sys.stderr)
            continue
        balanced, lighter = made[:2]
        trade = lighter.plan.trade
        assert trade is not None
        yield Row(
            *(name, len(balanced.units), count, objective, pipeline),
            *(balanced.plan.gap, load_gap(balanced) if balanced.plan.has_one_chunk_each else None),
            *(trade.balanced.sent, trade.taken.sent),
            *(_over(trade.taken.sent, trade.bound_of_cuts), _over(trade.taken.sent, trade.bound)),
            trade.taken.balance / (trade.balanced.balance or 1.0) - 1,
            trade.taken.step / (trade.balanced.step or 1.0) - 1,
            traced,
            *(statistics.median(took[which::2]) for which in (0, 1)),
        )


def processor_seconds() -> float:
    """Returns the seconds of a processor that this process and those that it has waited for have taken."""
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(of.ru_utime + of.ru_stime for of in used)


def _over(sent: float, least: float | None) -> float | None:
    """Returns one number of bytes over another; None where the other is unknown or zero, and 1 where both are."""
    return (sent / least if least else None) if sent else 1.0


def load_gap(made: OfflinePlan) -> float | None:
    """Returns by how much the largest load of a stage can be smaller at most.

    Args:
        made: a plan on equal ranks, with a chunk on each.

    Returns:
        A share of the largest load, or None where nothing is proved.
    """
    plan = made.plan
    if plan.gap is None or plan.objective == "memory":
        return plan.gap
    chain = Chain.of([unit.name for unit in made.units], made.costs)
    chunks = Chunks.one_each([1] * plan.stages)
    placed = costed(chain, plan.stages_of(made.units), {}, plan.microbatches, chunks)
    return largest_load_gap(plan.gap, placed.times, plan.microbatches, chain.times)


def largest_load_gap(gap: float, times: Sequence[float], microbatches: int, unit_times: Sequence[float]) -> float:
    """Returns by how much less the slowest stage can take at most, where a step can take less by `gap`.

    A step takes the sum of all stages' times once, and the slowest stage's time for each microbatch but one. What a
    step gains with no larger sum, the slowest stage gains in these microbatches. And in any placement the slowest stage
    has at least an equal share of all units, and at least the longest unit.

    Args:
        gap: proved gap of the step, as a share of it.
        times: seconds of each stage per microbatch, messages included.
        microbatches: microbatches per step.
        unit_times: seconds of each unit.
    """
    slowest = max(times)
    if not slowest:
        return 0.0
    least = max(sum(unit_times) / len(times), *unit_times)
    alone = 1.0 - least / slowest
    if microbatches == 1:
        return alone
    return min(alone, gap * step_time(times, microbatches) / ((microbatches - 1) * slowest))


def table(rows: list[Row]) -> Table:
    """Returns all rows, the largest gap first."""
    shown = Table(
        *("model", "units", "P", "by", "pipeline", "gap", "largest\nload", "before", "sent", "of the\nleast", "of any"),
        *("balance", "step", "trace,\ns", "plans, s", "times"),
    )
    for row in sorted(rows, key=lambda row: (-(row.gap or 0.0), row.model)):
        gaps = ["-" if gap is None else f"{gap:.2%}" for gap in (row.gap, row.load_gap)]
        ratios = ["-" if ratio is None else f"{ratio:.2f}" for ratio in (row.of_cuts, row.of_any)]
        cells = row.model, row.units, row.partitions, row.objective, row.pipeline, *gaps
        sizes = as_bytes(row.before), as_bytes(row.sent), *ratios, f"{row.balance:+.1%}", f"{row.step:+.1%}"
        seconds = f"{row.trace_seconds:.1f}", f"{row.balanced_seconds:.2f} {row.plan_seconds:.2f}", f"{row.times:.2f}"
        shown.add_row(*map(str, cells), *sizes, *seconds)
    return shown


def main() -> None:
    """Plans the models that the command line names, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", help="names, with commas between them (default: all)")
    parser.add_argument("--partitions", default="2,4", help="numbers, with commas between them (default: 2,4)")
    parser.add_argument(
        "--pipelines", default="interleaved", help="schedules, with commas between them (default: interleaved)"
    )
    parser.add_argument("--repetitions", type=int, default=1, help="of each plan (default: 1)")
    parser.add_argument("--proof", type=float, default=5.0, help="seconds for a proof (default: 5)")
    parser.add_argument("--json", type=new_file, help="write the rows")
    given = parser.parse_args()
    known = models()
    names = given.models.split(",") if given.models else list(known)
    if unknown := sorted(set(names) - set(known)):
        parser.error(f"there are no models {', '.join(unknown)}. There are: {', '.join(known)}")
    rows: list[Row] = []
    before = circumstances(given)
    with offline(), Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("planning", total=len(names))
        for name in names:
            progress.update(task, description=name)
            counts = [int(count) for count in given.partitions.split(",")]
            rows += rows_of(name, known[name], counts, given.proof, given.pipelines.split(","), given.repetitions)
            progress.advance(task)
            if given.json is not None:
                told = {**before, "rows": [asdict(row) for row in rows]}
                given.json.write_text(json.dumps(told, indent=1) + "\n")
    Console(width=160).print(table(rows))
    scores, loads = (
        sum(gap is not None and gap <= 0.01 for gap in gaps)
        for gaps in ([row.gap for row in rows], [row.load_gap for row in rows])
    )
    print(
        f"of {len(rows)} placements {scores} are proved to be within 1 % of the best by what is balanced, and {loads} "
        f"by the largest load of a stage; smp_tf {smp.__version__}"
    )
    ratios = [ratio for row in rows if (ratio := row.of_any or row.of_cuts) is not None]
    before, after = (
        sum(seconds) for seconds in zip(*((r.balanced_seconds, r.plan_seconds) for r in rows), strict=True)
    )
    print(
        f"{sum(ratio <= 1.1 for ratio in ratios)} of {len(ratios)} send at most 1.1 times the least that is known; "
        f"{sum(row.times <= 1.5 for row in rows)} plans take at most 1.5 times as long with a tolerance, and all took "
        f"{before:.0f} s of a processor without it and {after:.0f} s with it"
    )


if __name__ == "__main__":
    main()
