"""Counts what a start and a step do, and compares these counts with those kept next to this file.

    horovodrun -np 2 python benchmarks/counts.py             # exit code 1 where something takes more than it did
    horovodrun -np 2 python benchmarks/counts.py --few       # two settings only, in a third of the time
    horovodrun -np 2 python benchmarks/counts.py --update    # keep what is counted now: benchmarks/counts.json

Seconds differ from machine to machine and from minute to minute. Counts do not, so a review sees a change that makes
starts or steps dearer. Of a very narrow GPT on two partitions it counts:

    our calls     function calls in smp_tf from the call of the training function to the end of its first step, of the
                  rank that makes most
    all calls     with those in TensorFlow and Keras, over those of plain Keras with the same model and batch
    ops           nodes of the training functions of both ranks, those of their functions included
    executed      nodes that a step runs: those of a function as often as it is called
    functions     of the training functions
    messages      between the ranks in a step, and their bytes

Other numbers of layers and microbatches say how a count grows. None may grow faster than what it grows with, and no
microbatch may add a TensorFlow function. Messages and bytes are always compared. The rest is compared where TensorFlow
and Python have the versions that were counted.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import smp_tf as smp  # isort: split

import tensorflow as tf
import tf_keras
from models import gpt
from models.split_step import split_step
from rich.console import Console
from rich.table import Table

from smp_tf.job import runtime
from smp_tf.job.exchange import allgather_json
from smp_tf.ops.transport import MESSAGE_PROGRAM
from smp_tf.partition.graph.node_def import bodies
from smp_tf.start.environment import world_rank, world_size

KEPT = Path(__file__).with_suffix(".json")
#: Blocks of the GPT and parts of a batch.
SETTINGS = ((1, 4), (2, 4), (4, 4), (2, 8), (2, 16))
#: With --few. Where these are as they are kept, others rarely differ, and growth is that of the kept counts.
FEW = ((2, 4), (2, 8))
CALLS = ("our calls", "all calls")
SENT = ("messages", "bytes")
PROGRAM = ("ops", "executed", "functions", *SENT)
#: By how much a count may be above the one that is kept. A count that is below it by as much must be kept anew.
TOLERANCE = 0.02
#: By how much a count may grow beyond what it grows with.
SLACK = 0.05


class Calls:
    """Counts calls of Python functions within `with`: all of them, and those of smp_tf."""

    def __init__(self) -> None:
        self.all = self.ours = 0

    def __enter__(self) -> Calls:
        def count(frame: Any, event: str, argument: object) -> None:
            if event == "call":
                self.all += 1
                self.ours += frame.f_globals.get("__name__", "").partition(".")[0] == smp.__name__

        sys.setprofile(count)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)


def of_a_start(size: gpt.Size) -> tuple[Calls, Callable[..., tf.Tensor], tuple[tf.Tensor, ...]]:
    """Returns the calls of a first step, its function and its batch."""
    train, batch = split_step(size, tf_keras.optimizers.SGD(0.01)), gpt.batch_of(size)
    with Calls() as calls:
        train(*batch).numpy()
    return calls, train, batch


def of_plain_keras(size: gpt.Size) -> int:
    """Returns the calls of a first step of plain Keras."""
    model, optimizer = gpt.build(tf_keras.Model, size), tf_keras.optimizers.SGD(0.01)

    @tf.function
    def train(tokens: tf.Tensor, following: tf.Tensor) -> tf.Tensor:
        gradients, loss = gpt.forward_backward(model, tokens, following)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    batch = gpt.batch_of(size)
    with Calls() as calls:
        train(*batch).numpy()
    return calls.all


def of_a_program(train: Callable[..., tf.Tensor], batch: tuple[tf.Tensor, ...]) -> dict[str, int]:
    """Returns what a rank's training function is made of, and what a step of it sends."""
    definition = train.get_concrete_function(*batch).graph.as_graph_def()  # type: ignore[attr-defined]
    functions = {function.signature.name: function.node_def for function in definition.library.function}

    def called(node: Any) -> list[str]:
        return [node.attr["function"].s.decode()] if node.op == "SmpCall" else bodies(node.attr)

    def executed(nodes: Any) -> int:
        return sum(1 + sum(executed(functions[name]) for name in called(node)) for node in nodes)

    def sent() -> tuple[int, int]:
        transport = runtime.current().transport
        assert transport is not None, "two ranks have a transport"
        stats = transport.stats()["edges"]
        # Other messages between ranks do not belong to a step.
        edges = [edge for edge in stats if edge["direction"] == "sent" and edge["program"] < MESSAGE_PROGRAM]
        return sum(edge["messages"] for edge in edges), sum(edge["bytes"] for edge in edges)

    before = sent()
    train(*batch).numpy()
    messages, nbytes = (after - then for after, then in zip(sent(), before, strict=True))
    ops = len(definition.node) + sum(map(len, functions.values()))
    return dict(zip(PROGRAM, (ops, executed(definition.node), len(functions), messages, nbytes), strict=True))


def counted(settings: Sequence[tuple[int, int]] = SETTINGS) -> dict[str, dict[str, float]]:
    """Returns all counts by setting."""
    found: dict[str, dict[str, float]] = {}
    # The first start also counts what a process does only once, such as imports. So it is left out.
    for place, (layers, microbatches) in enumerate((SETTINGS[0], *settings)):
        size = gpt.size_of(f"tiny+depth={layers}+batch=16")
        # The names of this model, and the counters in them, are those of a process's first model.
        smp.init({"microbatches": microbatches, "pipeline": "interleaved", "optimize": "memory", "seed": 1})
        calls, train, batch = of_a_start(size)
        mine = (calls.ours, round(calls.all / of_plain_keras(size), 4)), of_a_program(train, batch)
        of_calls, of_programs = zip(*allgather_json(mine, name="the benchmark's counts"), strict=True)
        smp.shutdown()
        if place == 0:
            continue
        found[f"{layers} layer{'s' * (layers > 1)}, {microbatches} microbatches"] = {
            **dict(zip(CALLS, map(max, zip(*of_calls, strict=True)), strict=True)),
            **{name: sum(program[name] for program in of_programs) for name in PROGRAM},
        }
    return found


def versions() -> dict[str, str]:
    """Returns what the calls of Python depend on."""
    return {"Python": ".".join(platform.python_version_tuple()[:2]), "tensorflow": tf.__version__}


def of_growth(counts: Mapping[str, Mapping[str, float]]) -> Iterator[str]:
    """Yields a sentence for each count that grows too fast with layers or microbatches."""
    of = dict(zip(SETTINGS, counts.values(), strict=True))
    axes = {"layers": ((1, 4), (2, 4), (4, 4)), "microbatches": ((2, 4), (2, 8), (2, 16))}
    for axis, points in axes.items():
        # Where a model is cut, and so what is sent, may change with its layers and its microbatches.
        for name in ("our calls", "ops", "executed", "functions"):
            first, second, third = (of[point][name] for point in points)
            added, more = second - first, third - second
            # The second doubling may add twice as much as the first.
            if more > 2 * (1 + SLACK) * added + TOLERANCE * first:
                yield f"{name} by {axis} rise by {added:,} and then by {more:,}, which is more than twice as much."
    for some, twice in ((4, 8), (8, 16)):
        for name in SENT:
            if (now := of[2, twice][name]) > 2 * (1 + SLACK) * (then := of[2, some][name]):
                yield f"{name} are {then:,} with {some} microbatches and {now:,} with {twice}: more than twice as many."
    if (few := of[2, 4]["functions"]) != (many := of[2, 16]["functions"]):
        yield f"functions are {few:,} with 4 microbatches and {many:,} with 16: none is made for a microbatch."


def of_change(counts: Mapping[str, Mapping[str, float]], kept: Mapping[str, Any]) -> Iterator[str]:
    """Yields a sentence for each count that differs from the kept one."""
    same = kept["versions"] == versions()
    for setting, told in counts.items():
        for name, now in told.items():
            then = kept["counts"].get(setting, {}).get(name)
            if then is None:
                yield f"{setting}: nothing is kept of {name}."
            elif (same or name in SENT) and abs(now - then) > TOLERANCE * then:
                yield f"{setting}: {name} are {now:,}, and {then:,} are kept ({now / then - 1:+.1%})."


def table_of(counts: Mapping[str, Mapping[str, float]]) -> Table:
    """Returns one line a setting."""
    table = Table(title="What a start and a step do", title_justify="left")
    for name in ("", *CALLS, *PROGRAM):
        table.add_column(name, justify="right" if name else "left")
    for setting, told in counts.items():
        table.add_row(
            setting,
            *(f"{told[name]:.2f} × plain" if name == "all calls" else f"{told[name]:,}" for name in (*CALLS, *PROGRAM)),
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--few", action="store_true", help="count two of the settings, and compare these only")
    which.add_argument("--update", action="store_true", help=f"keep what is counted, in {KEPT.name}")
    given = parser.parse_args()
    if (size := world_size()) != 2:
        raise SystemExit(f"counts: start it on two ranks: horovodrun -np 2 python {sys.argv[0]}. Received: {size}")
    counts = counted(FEW if given.few else SETTINGS)
    if world_rank():
        return
    Console(width=max(140, Console().width)).print(table_of(counts))
    wrong = [] if given.few else list(of_growth(counts))
    if given.update:
        KEPT.write_text(json.dumps({"versions": versions(), "counts": counts}, indent=1) + "\n")
    else:
        wrong += of_change(counts, json.loads(KEPT.read_text()))
    print("\n".join(wrong) or "Nothing is otherwise than it is kept, or grows faster than it may.")
    if wrong:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
