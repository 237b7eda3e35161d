"""One rank's program, as the ops it becomes and, on one stage, as what it computes."""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from smp_tf.partition.graph.op_graph import TensorType
from smp_tf.pipeline.run.executor import StepResults, emit
from smp_tf.pipeline.run.microbatch_sums import WantedSums
from smp_tf.pipeline.run.stage_program import Endpoint, StageProgram, build_stage_program
from tests.pipeline.all_stages import BATCH, PROGRAM, WIDTH, CutStep, cut_step, dense_chain


def program_of(step: CutStep, stage: int, **options: Any) -> StageProgram:
    end = Endpoint(PROGRAM, stage, tuple(range(step.stages)))
    return build_stage_program(step.split, step.program, end, step.variables[stage], **options)


def emitted(step: CutStep, program: StageProgram, weights: Sequence[Any] | None = None) -> tuple[Any, StepResults]:
    """The program as a function of a whole batch, and what it gives, tensors of that function's graph."""
    count = step.program.microbatches
    told: list[StepResults] = []

    @tf.function
    def run(x: tf.Tensor) -> list[tf.Tensor]:
        parts = tf.split(x, count)
        results = emit(
            program, lambda _, m: parts[m], step.lowered.captures, lambda m: tf.constant([0, m], tf.int64),
            weights or [1] * count,
        )  # fmt: skip
        told.append(results)
        values = [tensor for value in results.values if value is not None for tensor in value]
        return values + [total for total in results.accumulated if total is not None]

    return run.get_concrete_function(tf.TensorSpec((BATCH, WIDTH))), told[0]


def order_of(graph: tf.Graph) -> dict[str, frozenset[str]]:
    """For every op the names of all ops that run before it."""
    direct = {
        op.name: {i.op.name for i in op.inputs} | {c.name for c in op.control_inputs} for op in graph.get_operations()
    }

    @functools.cache
    def before(name: str) -> frozenset[str]:
        return frozenset(direct[name]).union(*(before(other) for other in direct[name]))

    return {name: before(name) for name in direct}


def calls_of(graph: tf.Graph) -> list[str]:
    # Beside a GPU they are TensorFlow's.
    found = [op.name for op in graph.get_operations() if op.type == "SmpCall" or "PartitionedCall" in op.type]
    assert found
    return found


def test_tasks_run_in_the_order_of_the_list() -> None:
    step = dense_chain(2, 2, 4)
    function, _ = emitted(step, program_of(step, 0))
    calls = calls_of(function.graph)
    assert [name.partition("/")[0] for name in calls] == ["0F0", "0F1", "0B0", "0F2", "0B1", "0F3", "0B2", "0B3"]
    before = order_of(function.graph)
    for earlier, later in itertools.pairwise(calls):
        assert earlier in before[later]


def test_sends_and_receives_wait_for_data_and_their_place_only() -> None:
    step = dense_chain(2, 2, 4)
    function, _ = emitted(step, program_of(step, 0))
    before = order_of(function.graph)
    calls = calls_of(function.graph)
    sends = [op for op in function.graph.get_operations() if op.type == "SmpSend"]
    receives = [
        op for op in function.graph.get_operations() if op.type == "SmpRecv" and "gradient" in str(op.get_attr("label"))
    ]
    assert len(sends) == len(receives) == 4
    # Nothing waits for a send, and a send waits for no receive but those its microbatch needs.
    for send in sends:
        assert not any(send.name in before[name] for name in calls)
    # The gradient of microbatch 0 is awaited while F1 runs; B0 is its first reader.
    first = receives[0].name
    assert calls[0] in before[first]
    assert calls[1] not in before[first]
    assert first in before[calls[2]]


def test_marks_stand_around_every_task_and_hold_nothing_up() -> None:
    step = dense_chain(2, 2, 4)
    function, results = emitted(step, program_of(step, 0))
    before = order_of(function.graph)
    operations = function.graph.get_operations()
    marks = [(op.get_attr("task").decode(), op.get_attr("ends"), op.name) for op in operations if op.type == "SmpMark"]
    begun = {task: name for task, ends, name in marks if not ends}
    ended = {task: name for task, ends, name in marks if ends}
    calls = {name.partition("/")[0]: name for name in calls_of(function.graph)}
    assert list(begun) == list(ended) == list(calls)
    assert all(op.inputs[0] is results.step for op in operations if op.type == "SmpMark")
    for (task, call), later in itertools.pairwise([*calls.items(), ("", "")]):
        assert begun[task] in before[call]
        # Whatever the call waits for, the mark of its begin waits for too.
        assert before[call] - before[begun[task]] == {begun[task]}
        assert call in before[ended[task]]
        if later[0]:
            assert ended[task] in before[begun[later[0]]]
    # A message is sent when its maker has ended, before the task behind it ends.
    for send in (op for op in operations if op.type == "SmpSend"):
        maker = f"0F{send.get_attr('microbatch')}"
        assert ended[maker] in before[send.name]
        assert before[send.name] - before[ended[maker]] == {ended[maker]}


def test_everything_lies_between_the_fences() -> None:
    step = dense_chain(2, 2, 2)
    for stage in range(2):
        function, results = emitted(step, program_of(step, stage))
        before = order_of(function.graph)
        (end,) = [op.name for op in function.graph.get_operations() if op.type == "SmpEnd"]
        begin = results.step.op.name
        inside = [op.name for op in function.graph.get_operations() if op.type in ("SmpSend", "SmpRecv")]
        for name in inside + calls_of(function.graph):
            assert begin in before[name]
            assert name in before[end]


@pytest.mark.parametrize("stage", [0, 1])
def test_gradients_are_not_returned_per_microbatch_nor_added_in_this_graph(stage: int) -> None:
    step = dense_chain(2, 2, 4)
    program = program_of(step, stage)
    function, _ = emitted(step, program)
    ops = Counter(op.type for op in function.graph.get_operations())
    assert ops["AddV2"] == ops["AddN"] == 0
    # Kernel and bias: cleared, read and let go of, once a step.
    assert len(program.sums.accumulators) == 2
    assert ops["Empty"] == 4
    assert ops["AssignVariableOp"] == 4
    gradients = {o.tensor for o in step.split.outputs if o.is_gradient}
    assert not gradients & {t for f in program.functions.values() for t in f.outputs}


def test_the_graph_grows_by_the_messages_and_calls_of_a_microbatch() -> None:
    sizes = []
    for count in (2, 4, 8):
        step = dense_chain(2, 2, count)
        function, _ = emitted(step, program_of(step, 0))
        sizes.append(len(function.graph.get_operations()))
    per_microbatch = (sizes[1] - sizes[0]) / 2
    assert (sizes[2] - sizes[1]) / 4 == per_microbatch
    # F, B, where each begins and ends, a send, two receives (gradient and loss), and the constants of a seed.
    assert per_microbatch <= 12


def reference(step: CutStep, x: np.ndarray) -> list[list[np.ndarray]]:
    """What the uncut step gives, by output and microbatch."""
    parts = [step.traced.function(tf.constant(part)) for part in np.split(x, step.program.microbatches)]
    return [[p.numpy() for p in values] for values in zip(*map(tf.nest.flatten, parts), strict=True)]


@pytest.mark.parametrize("weights", [None, [3, 2, 2, 1]])
@pytest.mark.parametrize("microbatches", [1, 4])
def test_one_stage_computes_the_weighted_sum_of_the_microbatches(microbatches: int, weights: list[int] | None) -> None:
    step = dense_chain(1, 1, microbatches)
    weights = weights[:microbatches] if weights else None
    program = program_of(step, 0, sums=WantedSums(is_weighted=weights is not None))
    assert bool(program.sums.accumulators) == (microbatches > 1)
    function, _ = emitted(step, program, weights)
    x = np.random.default_rng(0).normal(size=(BATCH, WIDTH)).astype("float32")
    loss, *gradients = reference(step, x)
    for _ in range(2):
        got = [t.numpy() for t in function(tf.constant(x))]
        np.testing.assert_array_equal(got[:microbatches], loss)
        for total, summands in zip(got[microbatches:], gradients, strict=True):
            scaled = [w * s for w, s in zip(weights or [1] * microbatches, summands, strict=True)]
            np.testing.assert_allclose(total, np.sum(scaled, axis=0), rtol=1e-6, atol=1e-7)


def test_kept_gradients_come_beside_their_sum() -> None:
    step = dense_chain(1, 1, 2)
    program = program_of(step, 0, sums=WantedSums(kept=frozenset(range(3))))
    function, results = emitted(step, program)
    assert [None if v is None else len(v) for v in results.values] == [2, 2, 2]
    x = np.random.default_rng(1).normal(size=(BATCH, WIDTH)).astype("float32")
    got = [t.numpy() for t in function(tf.constant(x))]
    loss, kernel, bias = reference(step, x)
    for value, wanted in zip(got, [*loss, *kernel, *bias, kernel[0] + kernel[1], bias[0] + bias[1]], strict=True):
        np.testing.assert_allclose(value, wanted, rtol=1e-6, atol=1e-8)


def test_a_cut_goes_through_a_float8_tensor() -> None:
    """It was planned, as the cheapest one, and then refused when the ops were made."""
    float8 = tf.dtypes.experimental.float8_e5m2
    narrow = tf_keras.layers.Lambda(lambda x: tf.cast(x, float8), name="narrow")
    wide = tf_keras.layers.Lambda(lambda x: tf.cast(x, tf.float32), name="wide")
    dense = [tf_keras.layers.Dense(WIDTH, name=f"dense_{i}") for i in range(2)]
    model = tf_keras.Sequential([dense[0], narrow, wide, dense[1]], name="net")
    model.build((None, WIDTH))
    step = cut_step(lambda x: tf.reduce_mean(model(x)), [model], [tf.TensorSpec((BATCH // 2, WIDTH))], 2, 2)
    [sent] = step.sent(0, 1)
    assert sent.tensor is not None
    assert step.graph.type_of(sent.tensor) == TensorType("float8_e5m2", (BATCH // 2, WIDTH))
    for stage, op in enumerate(("SmpSend", "SmpRecv")):
        function, _ = emitted(step, program_of(step, stage))
        types = [made.get_attr("T") for made in function.graph.get_operations() if made.type == op]
        assert types.count(float8) == 2, types
