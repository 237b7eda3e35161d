"""Gradients are averaged in buckets: which ones, behind which task, and that what comes of it is their sum."""

from __future__ import annotations

import dataclasses
import itertools
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from smp_tf.ops.early import give_early, take_early
from smp_tf.ops.library import tf_ops_library
from smp_tf.partition.graph.op_kinds import CALL_OPS
from smp_tf.pipeline.errors import ProgramError
from smp_tf.pipeline.programs.kinds import REDUCE
from smp_tf.pipeline.run.emission import CallersPart
from smp_tf.pipeline.run.executor import emit
from smp_tf.pipeline.run.microbatch_sums import WantedSums
from smp_tf.pipeline.run.reduction import (
    Averaging,
    Bucket,
    Gradients,
    Reduce,
    Sums,
    group_gradients,
    limit_of_buckets,
    parts_of,
    plan_buckets,
)
from smp_tf.pipeline.run.stage_program import Endpoint, StageProgram, build_stage_program
from smp_tf.pipeline.run.step_tasks import (
    StageTasks,
    add_stage_tasks,
    buckets_of,
    check_other_replicas,
    plan_program,
)
from smp_tf.pipeline.schedules.schedule import SCHEDULES
from tests.pipeline.all_stages import BATCH, PROGRAM, WIDTH, CutStep, cut_step, dense_chain

#: Of a kernel and of a bias.
KERNEL, BIAS = 4 * WIDTH * WIDTH, 4 * WIDTH


class Replicas:
    """Three replicas with equal gradients; what was asked for."""

    def __init__(self) -> None:
        self.buckets: list[tuple[int, int]] = []

    def __call__(self, tensors: Sequence[tf.Tensor], bucket: Bucket) -> Sums:
        self.buckets.append((bucket.number, len(tensors)))
        return Sums([tensor * 3 for tensor in tensors], [])


def program_of(
    step: CutStep,
    stage: int,
    limit: int,
    replicas: Reduce | None = None,
    *,
    gradients: Gradients = Gradients(),  # noqa: B008 - it never changes
    sparse: Sequence[tuple[int, ...]] = (),
    **more: Any,
) -> StageProgram:
    averaging = Averaging(replicas or Replicas(), gradients, limit, sparse)
    end = Endpoint(PROGRAM, stage, tuple(range(step.stages)))
    return build_stage_program(
        step.split, step.program, end, step.variables[stage], tasks=StageTasks(averaging), **more
    )


def tasks_before_reductions(program: StageProgram) -> list[str]:
    """Behind which other task each REDUCE stands."""
    found, before = [], ""
    for task in program.tasks:
        if task.kind is REDUCE:
            assert task.bucket == len(found)
            found.append(before)
        else:
            before = str(task)
    return found


def begun_within(program: StageProgram) -> list[int]:
    """The buckets with gradients that the last task gives before it ends, and none that come behind it."""
    early = program.last[1].early if program.last is not None else None
    given = set(early.tensors if early is not None else ())
    outputs = program.split.outputs
    return [
        bucket.number for bucket in program.buckets
        if given.intersection(t for i in bucket.positions for t in parts_of(outputs[i]))
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("limit", "groups"),
    [
        # Backward makes those of the last layer first: outputs 5 and 6, kernel and bias.
        (1 << 20, [{1, 2, 3, 4, 5, 6}]),
        (KERNEL + BIAS, [{5, 6}, {3, 4}, {1, 2}]),
        (2 * (KERNEL + BIAS), [{3, 4, 5, 6}, {1, 2}]),
        # Kernels are larger than a bucket, and take the biases with them.
        (BIAS + 1, [{5, 6}, {3, 4}, {1, 2}]),
        (1, [{6}, {5}, {4}, {3}, {2}, {1}]),
    ],
)
def test_buckets_begin_with_the_last_gradients_and_have_a_limit(limit: int, groups: list[set[int]]) -> None:
    assert [set(group) for group in group_gradients(dense_chain(3, 1, 2).split, 0, limit)] == groups


@pytest.mark.parametrize(
    ("total", "limit"), [(0, 1 << 20), (5 << 20, 1 << 20), (24 << 20, 3 << 20), (1 << 40, 25 << 20)]
)
def test_a_bucket_is_full_with_an_eighth_of_the_gradients_within_limits(total: int, limit: int) -> None:
    assert limit_of_buckets(total) == limit


def test_buckets_of_few_gradients_are_not_tiny() -> None:
    step = dense_chain(3, 1, 2)
    assert len(group_gradients(step.split, 0)) == 1


@pytest.mark.parametrize(
    ("schedule", "stage", "after", "inside"),
    [
        # Nothing waits for what the first stage's last task makes; the second stage's is sent.
        ("interleaved", 0, ["0B3", "0B3"], [0, 1]),
        ("interleaved", 1, ["1B3", "1B3"], []),
        # Gradients of weights are made last, when everything is sent.
        ("zb_h1", 1, ["1W3", "1W3"], [0, 1]),
        # The chunk that is nearer to the loss is done first.
        ("interleaved_1f1b", 0, ["2B3", "0B3"], [1]),
        ("interleaved_1f1b", 1, ["3B3", "1B3"], []),
    ],
)
def test_a_bucket_is_complete_behind_the_last_task_that_adds_to_it(
    schedule: str, stage: int, after: list[str], inside: list[int]
) -> None:
    step = dense_chain(4, 2, 4, schedule)
    program = program_of(step, stage, KERNEL + BIAS)
    assert tasks_before_reductions(program) == after
    assert begun_within(program) == inside


def tied_chain(microbatches: int, schedule: str, owner: int) -> CutStep:
    """Four dense layers on two stages, of which the last one's outputs are multiplied by the first one's kernel."""
    hidden = [tf_keras.layers.Dense(WIDTH, activation="tanh") for _ in range(4)]

    class Tied(tf_keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.hidden = hidden

        def call(self, x: tf.Tensor) -> tf.Tensor:
            for layer in self.hidden:
                x = layer(x)
            return tf.matmul(x, self.hidden[0].kernel, transpose_b=True)

    model = Tied()
    model(tf.zeros([1, WIDTH]))

    def step(x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x) ** 2)
        return loss, tape.gradient(loss, model.trainable_variables)

    spec = tf.TensorSpec((BATCH // microbatches, WIDTH))
    kernel = hidden[0].kernel.name.partition(":")[0]
    return cut_step(step, [model], [spec], 2, microbatches, schedule, owners={kernel: owner})


@pytest.mark.parametrize(
    ("schedule", "stage", "owner", "after", "inside"),
    [
        # What the other stage adds to the kernel's has come before.
        ("interleaved", 0, 0, ["0B3", "0B3"], [0, 1]),
        ("zb_h1", 0, 0, ["0W3", "0W3", "0W3"], [0, 1, 2]),
        ("zb_h1", 1, 1, ["1W3", "1W3"], [0, 1]),
        # The stage that does not store it sends what it adds when its last task has ended.
        ("zb_h1", 1, 0, ["1W3"], []),
        ("interleaved", 0, 1, ["0B3", "0B3"], []),
    ],
)
def test_a_tied_weight_is_given_early_where_it_is_stored(
    schedule: str, stage: int, owner: int, after: list[str], inside: list[int]
) -> None:
    step = tied_chain(4, schedule, owner)
    program = program_of(step, stage, KERNEL + BIAS)
    assert tasks_before_reductions(program) == after
    assert begun_within(program) == inside


def test_replicas_that_run_fewer_microbatches_have_the_same_buckets() -> None:
    many, few = (dense_chain(4, 2, count, "zb_h1") for count in (4, 1))
    for stage in range(2):
        groups = group_gradients(many.split, stage, KERNEL + BIAS)
        assert group_gradients(few.split, stage, KERNEL + BIAS) == groups
        assert [b.positions for b in plan_buckets(few.split, stage, groups)] == list(groups)


def test_groups_go_by_positions_alone() -> None:
    """Which gradients are one tensor may differ between replicas."""
    step = dense_chain(3, 1, 2, returned=[*range(6)] * 2)
    groups = group_gradients(step.split, 0, KERNEL + BIAS)
    assert [position for group in groups for position in group] == list(range(12, 0, -1))
    assert [len(group) for group in groups] == [2] * 6


#: Gradients of four layers: of stage 0's, the first one's are complete within its last task, the third one's before.
FIRST, FIRST_BIAS, THIRD = 0, 1, 4


@pytest.mark.parametrize(
    ("returned", "limit", "buckets", "inside"),
    [
        ([*range(8), *range(8)], KERNEL + BIAS, [{13, 14}, {9, 10}, {5, 6}, {1, 2}], [1, 3]),
        # The second pair of the first layer is with one of the third, which an earlier task completes.
        ([*range(8), *range(8)], 3 * (KERNEL + BIAS), [{13, 14, 9, 10, 5, 6}, {1, 2}], [0, 1]),
        ([FIRST_BIAS, FIRST, FIRST_BIAS, FIRST, FIRST, THIRD], 2 * KERNEL, [{6, 5}, {4, 3, 2}, {1}], [0, 1, 2]),
    ],
)
def test_a_gradient_in_two_buckets_is_given_once(
    returned: list[int], limit: int, buckets: list[set[int]], inside: list[int]
) -> None:
    program = program_of(dense_chain(4, 2, 4, "interleaved_1f1b", returned=returned), 0, limit)
    assert [set(bucket.positions) for bucket in program.buckets] == buckets
    assert begun_within(program) == inside
    assert program.last is not None
    given = program.last[1].early
    assert given is not None
    # Kernel and bias of the first layer, whichever of them are returned.
    assert len(given.tensors) == 2


def averaged() -> Iterator[object]:
    """Every combination; by default the half in which each two values meet."""
    limits = {"one bucket": 1 << 20, "a bucket per layer": KERNEL + BIAS, "one each": 1}
    ways = {"within the last task": True, "behind it": False}
    axes = [(1, 1), (4, 1), (4, 2)], [None, [3, 2, 2, 1]], list(limits), list(ways)
    for places in itertools.product(*(range(len(axis)) for axis in axes)):
        (microbatches, times), weights, limit, way = (axis[place] for axis, place in zip(axes, places, strict=True))
        kept_for = [] if sum(places) % 2 == 0 else [pytest.mark.full]
        label = f"{microbatches} microbatches, {times} times, {weights}, {limit}, {way}"
        yield pytest.param(microbatches, times, weights, limits[limit], ways[way], id=label, marks=kept_for)


@pytest.mark.parametrize(("microbatches", "times", "weights", "limit", "within"), list(averaged()))
def test_what_comes_of_it_is_the_sum_over_the_replicas(
    microbatches: int, times: int, weights: list[int] | None, limit: int, within: bool
) -> None:
    step = dense_chain(3, 1, microbatches, returned=[*range(6)] * times)
    weights = weights[:microbatches] if weights else None
    # What XLA compiles cannot average within.
    replicas = Replicas()
    program = program_of(step, 0, limit, replicas, sums=WantedSums(is_weighted=weights is not None), xla=not within)
    assert (program.last is not None) == within
    parts: list[tf.Tensor] = []

    @tf.function
    def run(x: tf.Tensor) -> list[tf.Tensor]:
        parts[:] = tf.split(x, microbatches)
        results = emit(
            program, lambda _, m: parts[m], step.lowered.captures, lambda m: tf.constant([0, m], tf.int64),
            weights or [1] * microbatches,
        )  # fmt: skip
        return [total for total in results.accumulated if total is not None]

    x = np.random.default_rng(0).normal(size=(BATCH, WIDTH)).astype("float32")
    own = [step.traced.function(tf.constant(part)) for part in np.split(x, microbatches)]
    summands = zip(*(tf.nest.flatten(values)[1:] for values in own), strict=True)
    wanted = [sum(w * v.numpy() for w, v in zip(weights or [1] * microbatches, each, strict=True)) for each in summands]
    for _ in range(2):
        for got, total in zip(run(tf.constant(x)), wanted, strict=True):
            np.testing.assert_allclose(got, 3 * total, rtol=1e-5, atol=1e-6)
    assert sum(count for _, count in replicas.buckets) >= 6 * times


class Receivers:
    """Three replicas with equal gradients, of which this one gets the sums of some positions."""

    def __init__(self, elsewhere: frozenset[int]) -> None:
        self.elsewhere = elsewhere

    def __call__(self, tensors: Sequence[tf.Tensor], bucket: Bucket) -> Sums:
        here = [t * 3 for p, t in zip(bucket.positions, tensors, strict=True) if p not in self.elsewhere]
        return Sums(here, [tf.identity(tensor) for tensor in tensors])


# The second bucket, of the layer in the middle, goes to others as a whole.
@pytest.mark.parametrize("elsewhere", [{3, 4}, {1, 3, 4, 6}, {1, 2, 3, 4, 5, 6}], ids=str)
@pytest.mark.parametrize("within", [True, False], ids=["within the last task", "behind it"])
@pytest.mark.parametrize("microbatches", [pytest.param(1, marks=pytest.mark.full), 4])
def test_sums_that_another_replica_gets_are_not_here(elsewhere: set[int], within: bool, microbatches: int) -> None:
    step = dense_chain(3, 1, microbatches)
    gone = frozenset(elsewhere)
    program = program_of(step, 0, KERNEL + BIAS, Receivers(gone), gradients=Gradients(gone), xla=not within)
    assert (program.last is not None) == within
    parts: list[tf.Tensor] = []
    found: list[int] = []

    @tf.function
    def run(x: tf.Tensor) -> list[tf.Tensor]:
        parts[:] = tf.split(x, microbatches)
        results = emit(
            program, lambda _, m: parts[m], step.lowered.captures, lambda m: tf.constant([0, m], tf.int64),
            [1] * microbatches,
        )  # fmt: skip
        found[:] = [position for position, total in enumerate(results.accumulated) if total is not None]
        return [total for total in results.accumulated if total is not None]

    x = np.random.default_rng(0).normal(size=(BATCH, WIDTH)).astype("float32")
    own = [tf.nest.flatten(step.traced.function(tf.constant(part)))[1:] for part in np.split(x, microbatches)]
    got = run(tf.constant(x))
    assert found == [position for position in range(1, 7) if position not in elsewhere]
    for position, total in zip(found, got, strict=True):
        wanted = sum(gradients[position - 1].numpy() for gradients in own)
        np.testing.assert_allclose(total, 3 * wanted, rtol=1e-5, atol=1e-6)
    assert len(marks(run.get_concrete_function(tf.constant(x)).graph.get_operations(), ends=True)) == 3


def behind(operation: tf.Operation) -> set[str]:
    """The names of all ops that an op waits for."""
    seen: set[str] = set()
    stack = [operation]
    while stack:
        last = stack.pop()
        for other in [*(tensor.op for tensor in last.inputs), *last.control_inputs]:
            if other.name not in seen:
                seen.add(other.name)
                stack.append(other)
    return seen


def marks(operations: Sequence[tf.Operation], *, ends: bool) -> dict[str, tf.Operation]:
    """Where buckets begin or end to be averaged, by the text of the task."""
    return {
        op.get_attr("task").decode(): op
        for op in operations
        if op.type == "SmpMark" and op.get_attr("ends") == ends and b"REDUCE" in op.get_attr("task")
    }


@pytest.mark.parametrize("within", [True, False], ids=["within the last task", "behind it"])
def test_a_weight_may_change_before_the_gradients_of_other_buckets_are_there(within: bool) -> None:
    """On the first stage it waited for all buckets that were begun within the last task."""
    step = dense_chain(3, 1, 2)
    program = program_of(step, 0, KERNEL + BIAS, xla=not within)
    weights = iter([v for v in step.variables[0].values() if v.shape.rank == 2])

    @tf.function
    def run(x: tf.Tensor) -> None:
        parts = tf.split(x, 2)
        results = emit(
            program, lambda _, m: parts[m], step.lowered.captures, lambda m: tf.constant([0, m], tf.int64), [1, 1]
        )
        for position in (1, 5):
            total = results.accumulated[position]
            assert total is not None
            # All kernels have one shape.
            next(weights).assign_sub(total, read_value=False)

    operations = run.get_concrete_function(tf.zeros([BATCH, WIDTH])).graph.get_operations()
    averages = {op.name for op in marks(operations, ends=True).values()}
    calls = {op.name for op in operations if op.type in {*CALL_OPS, "SmpCall"}}
    assert len(averages) == 3
    assert calls
    for change in (op for op in operations if op.type == "AssignSubVariableOp"):
        assert calls <= behind(change)
        assert not averages & behind(change)
    [end] = [op for op in operations if op.type == "SmpEnd"]
    assert averages <= behind(end)
    # Within the last task they begin while it runs, and wait for no end of it.
    begun = [calls <= behind(op) for op in marks(operations, ends=False).values()]
    assert begun == [not within] * 3


@pytest.mark.parametrize("within", [True, False], ids=["within the last task", "behind it"])
def test_a_bucket_is_applied_while_another_is_still_averaged(within: bool) -> None:
    """The first bucket's weight changes, and only then comes what the others wait for."""
    where: dict[str, Any] = {"program": PROGRAM + 1, "number": 0}
    given_up: list[bool] = []

    def give_up() -> None:
        given_up.append(True)
        tf_ops_library().smp_give_early(tensor=0.0, step=tf.constant(0, tf.int64), **where)

    def reduce(tensors: Sequence[tf.Tensor], bucket: Bucket) -> Sums:
        if bucket.number == 1:
            with tf.control_dependencies([take_early(tf.constant(0, tf.int64), tf.float32, [], **where)]):
                tensors = [tf.identity(t) for t in tensors]
        return Sums([tensor * 3 for tensor in tensors], [])

    step = dense_chain(3, 1, 2)
    program = program_of(step, 0, KERNEL + BIAS, reduce, xla=not within)
    assert (program.last is not None) == within
    weight = tf.Variable(tf.zeros([WIDTH, WIDTH]))

    @tf.function
    def run(x: tf.Tensor) -> None:
        parts = tf.split(x, 2)
        results = emit(
            program, lambda _, m: parts[m], step.lowered.captures, lambda m: tf.constant([0, m], tf.int64), [1, 1]
        )
        total = results.accumulated[5]
        assert total is not None
        with tf.control_dependencies([results.computed]):
            change = weight.assign_sub(total, read_value=False)
        with tf.control_dependencies([change]):
            give_early(tf.constant(1.0), tf.constant(0, tf.int64), **where)

    deadline = threading.Timer(60, give_up)
    deadline.start()
    run(tf.ones([BATCH, WIDTH]))
    deadline.cancel()
    assert not given_up


def test_one_replica_averages_nothing() -> None:
    step = dense_chain(2, 1, 2)
    program = build_stage_program(step.split, step.program, Endpoint(PROGRAM, 0, (0,)), step.variables[0])
    assert (program.reduction, program.buckets, program.last) == (None, (), None)


def test_what_a_task_gives_early_is_taken_behind_its_begin() -> None:
    """A cluster of XLA with what a task waits for and what waits for its gradients would wait for itself."""
    step = dense_chain(3, 1, 2)
    program = program_of(step, 0, KERNEL + BIAS)

    @tf.function
    def run(x: tf.Tensor) -> None:
        parts = tf.split(x, 2)
        emit(program, lambda _, m: parts[m], step.lowered.captures, lambda m: tf.constant([0, m], tf.int64), [1, 1])

    operations = run.get_concrete_function(tf.zeros([BATCH, WIDTH])).graph.get_operations()
    taken = [op for op in operations if op.type == "SmpTakeEarly"]
    [begin] = [
        op.name for op in operations
        if op.type == "SmpMark" and op.get_attr("task") == b"0B1" and not op.get_attr("ends")
    ]  # fmt: skip
    assert len(taken) == 6
    assert all(begin in [other.name for other in op.control_inputs] for op in taken)


def test_a_gradient_is_given_early_as_soon_as_it_is_made() -> None:
    program = program_of(dense_chain(3, 1, 2), 0, KERNEL + BIAS)
    assert program.last is not None
    task, function = program.last
    assert str(task) == "0B1"
    assert function.early is not None
    operations = function.function.graph.get_operations()  # type: ignore[attr-defined]
    products = {op.name for op in operations if op.type == "MatMul"}
    number = {tensor: number for number, tensor in enumerate(function.early.tensors)}
    given = {op.get_attr("number"): op for op in operations if op.type == "SmpGiveEarly"}
    counts = [
        max(len(products & behind(given[number[program.split.outputs[i].tensor]])) for i in bucket.positions)
        for bucket in program.buckets
    ]
    # The kernel's gradient, and before it the gradients of the inputs of the layers above: where the first bucket is
    # given, not one matrix product of a layer below has run.
    assert counts == [1, 2, 3]


def test_what_was_made_of_gradients_has_the_size_that_is_known_of_it() -> None:
    """Its bucket was never full: all that a loss scale was taken out of was averaged at once, at the end."""

    def step(x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x) ** 2)
        return loss, [gradient * 2.0 for gradient in tape.gradient(loss, model.trainable_variables)]

    model = tf_keras.Sequential([tf_keras.layers.Dense(WIDTH, activation="tanh") for _ in range(3)])
    model(tf.zeros([1, WIDTH]))
    cut = cut_step(step, [model], [tf.TensorSpec((BATCH // 2, WIDTH))], 1, 2, "interleaved")
    sizes = {position: KERNEL if position % 2 else BIAS for position in range(1, 7)}
    assert group_gradients(cut.split, 0, KERNEL + BIAS) == ((6, 5, 4, 3, 2, 1),)
    assert group_gradients(cut.split, 0, KERNEL + BIAS, sizes) == ((6, 5), (4, 3), (2, 1))


def test_buckets_begin_within_the_last_task_that_makes_gradients_whatever_is_computed_behind_it() -> None:
    """In `fit` metrics and the number of samples are, and no bucket began before the whole of backward had ended."""

    def step(x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x) ** 2)
        gradients = tape.gradient(loss, model.trainable_variables)
        with tf.control_dependencies([gradients[0]]):
            return loss, gradients, tf.constant(BATCH // 2)

    model = tf_keras.Sequential([tf_keras.layers.Dense(WIDTH, activation="tanh") for _ in range(3)])
    model(tf.zeros([1, WIDTH]))
    cut = cut_step(step, [model], [tf.TensorSpec((BATCH // 2, WIDTH))], 1, 2, "interleaved")
    program = program_of(cut, 0, KERNEL + BIAS)
    assert [str(task) for task in program.tasks][-2:] == ["0T2.0", "0T2.1"]
    assert program.last is not None
    assert str(program.last[0]) == "0B1"
    assert begun_within(program) == [0, 1, 2]


def test_what_is_kept_for_every_microbatch_is_averaged_behind_the_last_one() -> None:
    """As the parts of a sparse gradient are. Here it is the loss, which the last stage makes and sends to the first."""
    step = dense_chain(4, 2, 2)
    # Of the first layer's kernel there is the sum alone.
    sparse = [(0,), (1,)]
    found = buckets_of(step.split, 2, sparse=sparse)
    assert [[bucket.positions for bucket in own if bucket.is_sparse] for own in found] == [[(0,)], [(0,)]]
    programs = [program_of(step, stage, 1 << 20, sparse=sparse) for stage in range(2)]
    assert [[str(task) for task in program.tasks if task.kind is REDUCE] for program in programs] == [
        ["0REDUCE1", "0REDUCE0"],
        ["1REDUCE1", "1REDUCE0"],
    ]
    [edge] = [t.index for t in step.split.transfers if t.tensor == step.split.outputs[0].tensor]
    before = [
        str(task)
        for program in programs
        for task, after in itertools.pairwise(program.tasks)
        if (after.kind, after.bucket) == (REDUCE, 1)
    ]
    assert before == [f"0R{edge}.1", "1F1"]


def test_who_sums_a_sparse_gradient_gets_its_parts_of_every_microbatch() -> None:
    step = dense_chain(2, 1, 2)
    program = program_of(step, 0, 1 << 20, sparse=[(0,)])
    told: list[tuple[int, list[int]]] = []

    def sum_sparse(bucket: Bucket, values: Sequence[list[tf.Tensor]], step: tf.Tensor) -> None:
        told.append((bucket.number, [len(value) for value in values]))

    @tf.function
    def run(x: tf.Tensor) -> None:
        parts = tf.split(x, 2)
        results = emit(
            program, lambda _, m: parts[m], step.lowered.captures, lambda m: tf.constant([0, m], tf.int64), [1, 1],
            CallersPart(sum_sparse=sum_sparse),
        )  # fmt: skip
        assert 0 not in results.buckets

    run.get_concrete_function(tf.zeros([BATCH, WIDTH]))
    assert told == [(1, [2])]


@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
def test_replicas_average_in_one_order_whatever_number_of_microbatches_they_run(schedule: str) -> None:
    step = dense_chain(8, 2, 4, schedule)
    tasks = StageTasks(Averaging(Replicas(), bucket_bytes=KERNEL + BIAS), weighs=True)
    for microbatches in (1, 2, 3, 5):
        fewer, _ = add_stage_tasks(step.split, plan_program(step.split, schedule, microbatches), tasks)
        check_other_replicas(step.split, fewer, schedule, 5, tasks)


def test_a_replica_that_averages_in_another_order_is_told() -> None:
    step = dense_chain(4, 2, 4)
    tasks = StageTasks(Averaging(Replicas(), bucket_bytes=KERNEL + BIAS))
    fewer, _ = add_stage_tasks(step.split, plan_program(step.split, "interleaved", 2), tasks)
    first, second = (
        tuple(sorted(own, key=lambda task: (task.kind is REDUCE, -(task.bucket or 0)))) for own in fewer.ranks
    )
    turned = dataclasses.replace(fewer, ranks=(first, second))
    with pytest.raises(ProgramError, match="replica 0 stands before 0REDUCE1 and waits for replica 1"):
        check_other_replicas(step.split, turned, "interleaved", 4, tasks)


def test_a_bucket_that_is_given_early_says_after_which_share_of_the_last_task() -> None:
    step = dense_chain(4, 1, 2)
    tasks = StageTasks(Averaging(Replicas(), bucket_bytes=KERNEL + BIAS))
    program, _ = add_stage_tasks(step.split, step.program, tasks)
    shares = [bucket.share for bucket in program.buckets]
    # Ten of the task's 21 ops, all of which take as long as an op does to begin, lead to the last layer's gradients.
    assert shares == pytest.approx([10 / 21, 14 / 21, 18 / 21, 1.0], abs=1e-3)
    compiled, _ = add_stage_tasks(step.split, step.program, dataclasses.replace(tasks, gives_early=False))
    assert [bucket.share for bucket in compiled.buckets] == [1.0] * 4
