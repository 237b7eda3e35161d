"""Each private piece of TensorFlow does what smp_tf needs of it; a test here fails when TensorFlow changes it."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf
import tf_keras
from tensorflow.python.training.saving import saveable_object

from smp_tf import tf_internals
from smp_tf.errors import EnvironmentSetupError

pytestmark = pytest.mark.usefixtures("keras_defaults")


def test_an_uninitialized_variable_has_shape_and_type_and_no_storage() -> None:
    made = tf_internals.UninitializedVariable(shape=[2, 3], dtype=tf.float64, name="empty")
    assert isinstance(made, tf.Variable)
    assert (made.shape, made.dtype, made.name) == ((2, 3), tf.float64, "empty:0")
    assert not tf.raw_ops.VarIsInitializedOp(resource=made.handle)
    made.assign(tf.ones([2, 3], tf.float64))
    assert made.numpy().tolist() == [[1.0, 1.0, 1.0], [1.0, 1.0, 1.0]]


def test_an_uninitialized_variable_takes_what_variables_take() -> None:
    made = tf_internals.UninitializedVariable(
        shape=[2],
        dtype=tf.float32,
        trainable=False,
        constraint=tf_keras.constraints.NonNeg(),
        synchronization=tf.VariableSynchronization.ON_READ,
        aggregation=tf.VariableAggregation.SUM,
        caching_device=None,
    )
    assert made.trainable is False
    assert isinstance(made.constraint, tf_keras.constraints.NonNeg)


def test_every_variable_of_keras_is_a_resource_variable_whose_reads_go_through_one_method() -> None:
    variable = tf_keras.layers.Dense(1).add_weight("w", (2,))
    assert type(variable) is tf_internals.ResourceVariable
    reads = []

    class Counting(tf_internals.ResourceVariable):  # type: ignore[misc, valid-type]
        def _read_variable_op(self, *args: Any, **kwargs: Any) -> Any:
            reads.append(1)
            return super()._read_variable_op(*args, **kwargs)

    variable.__class__ = Counting
    for read in (variable.numpy, variable.value, variable.read_value, lambda: variable + 1.0, lambda: variable[0]):
        before = len(reads)
        read()
        assert len(reads) > before, read


def test_a_plain_variable_is_made_at_once_past_creators_and_graphs() -> None:
    def creator(next_creator: Any, **kwargs: Any) -> Any:
        raise AssertionError("a creator scope was asked")

    made = []

    @tf.function
    def traced() -> tf.Tensor:
        made.append(tf_internals.make_plain_variable(initial_value=lambda: 2.0, name="plain", trainable=False))
        return tf.constant(1.0)

    with tf.variable_creator_scope(creator):
        traced()
    assert type(made[0]) is tf_internals.ResourceVariable
    assert (made[0].numpy(), made[0].name, made[0].trainable) == (2.0, "plain:0", False)


def test_a_scratch_graph_executes_nothing_and_is_a_function_graph() -> None:
    with tf_internals.scratch_graph("scratch").as_default() as graph:
        assert not tf.executing_eagerly()
        value = tf.zeros([1 << 20, 1 << 20])
        with tf.init_scope():  # leads out of it, unlike out of a tf.Graph
            assert tf.executing_eagerly()
    assert value.shape == (1 << 20, 1 << 20)
    assert value.graph is graph


class TestOpSeeds:
    def test_drawn_seeds_are_those_of_the_next_op_executed_eagerly(self) -> None:
        tf.random.set_seed(3)
        expected = [tf.random.normal([2]).numpy().tolist(), tf.random.uniform([2]).numpy().tolist()]
        tf.random.set_seed(3)
        with tf_internals.scratch_graph("scratch").as_default():
            drawn = [tf_internals.draw_op_seeds(None), tf_internals.draw_op_seeds(None)]
        assert all(global_seed == 3 for global_seed, _ in drawn)

        @tf.function
        def again() -> list[tf.Tensor]:
            left = iter(drawn)
            with tf_internals.op_seeds_from(lambda op_seed: next(left)):
                return [tf.random.normal([2]), tf.random.uniform([2])]

        assert [value.numpy().tolist() for value in again()] == expected

    def test_a_seed_of_the_op_s_own_draws_none(self) -> None:
        tf.random.set_seed(3)
        first = tf_internals.draw_op_seeds(None)
        tf.random.set_seed(3)
        assert tf_internals.draw_op_seeds(7) == (3, 7)
        assert tf_internals.draw_op_seeds(None) == first

    def test_without_a_global_seed_there_are_none(self) -> None:
        tf.random.set_seed(None)
        try:
            assert tf_internals.draw_op_seeds(None) == (None, None)
        finally:
            tf.random.set_seed(3)

    def test_every_stateful_random_op_asks_for_its_seeds(self) -> None:
        asked: list[int | None] = []

        def source(op_seed: int | None) -> tf_internals.OpSeeds:
            asked.append(op_seed)
            return 1, 2

        ops = (
            lambda: tf.random.normal([2]),
            lambda: tf.random.uniform([2], seed=5),
            lambda: tf.random.truncated_normal([2]),
            lambda: tf.random.uniform([2], maxval=3, dtype=tf.int32),
            lambda: tf.random.shuffle([1, 2]),
            lambda: tf.random.categorical([[0.5, 0.5]], 1),
            lambda: tf.random.gamma([2], 1.0),
            lambda: tf.random.poisson([2], 1.0),
        )
        with tf_internals.op_seeds_from(source):
            for op in ops:
                op()
        tf.random.normal([2])  # outside: asks no more
        assert asked == [None, 5, None, None, None, None, None, None]

    def test_an_error_within_gives_the_seeds_back(self) -> None:
        def source(op_seed: int | None) -> tf_internals.OpSeeds:
            raise AssertionError("still asked")

        with pytest.raises(KeyError), tf_internals.op_seeds_from(source):
            raise KeyError
        tf.random.normal([2])


def test_destroyed_storage_is_gone_and_the_handle_stays() -> None:
    variable = tf.Variable(tf.ones([1000, 1000]))
    tf_internals.destroy_storage(variable)
    assert tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=tf.float32).shape == (0,)
    assert variable.shape == (1000, 1000)


def test_storage_can_be_destroyed_while_a_graph_is_being_written() -> None:
    variable = tf.Variable([1.0, 2.0])

    @tf.function
    def traced() -> None:
        tf_internals.destroy_storage(variable)

    traced.get_concrete_function()
    assert tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=tf.float32).shape == (0,)


def test_every_checkpoint_asks_before_it_takes_or_gives_a_value(tmp_path: Path) -> None:
    asked: list[str] = []
    taken: list[list[float]] = []

    def take(variable: Any, value: tf.Tensor) -> bool:
        taken.append(value.numpy().tolist())
        return len(taken) > 1

    checked = tf_internals.checked_in_checkpoints(lambda variable: asked.append(variable.name), take)

    class Checked(checked, tf_internals.UninitializedVariable):  # type: ignore[misc, valid-type]
        pass

    variable = Checked(shape=[2], dtype=tf.float32, name="v")
    tf.train.Checkpoint(v=variable).write(str(tmp_path / "empty"))
    assert asked == ["v:0"]
    variable.assign([1.0, 2.0])
    written = tf.train.Checkpoint(v=variable).write(str(tmp_path / "full"))
    assert asked == ["v:0"] * 2
    variable.assign([0.0, 0.0])
    tf.train.Checkpoint(v=variable).read(written)
    assert asked == ["v:0"] * 3
    assert variable.numpy().tolist() == [1.0, 2.0]
    variable.assign([0.0, 0.0])
    tf.train.Checkpoint(v=variable).read(written)
    assert taken == [[1.0, 2.0], [1.0, 2.0]]
    assert variable.numpy().tolist() == [0.0, 0.0]


def test_whether_a_tape_is_recording() -> None:
    assert tf_internals.no_tape_is_recording()
    with tf.GradientTape():
        assert not tf_internals.no_tape_is_recording()
        seen_elsewhere = []
        thread = threading.Thread(target=lambda: seen_elsewhere.append(tf_internals.no_tape_is_recording()))
        thread.start()
        thread.join()
        assert seen_elsewhere == [True]
    assert tf_internals.no_tape_is_recording()


def test_a_tape_inside_a_traced_function_is_seen_only_there() -> None:
    seen = []

    @tf.function
    def traced(x: tf.Tensor) -> tf.Tensor:
        seen.append(tf_internals.no_tape_is_recording())
        with tf.GradientTape() as tape:
            tape.watch(x)
            seen.append(tf_internals.no_tape_is_recording())
            y = x * x
        return tape.gradient(y, x)

    traced(tf.constant(3.0))
    assert seen == [True, False]


def test_a_global_seed_is_seen_and_every_setting_of_it() -> None:
    tf.random.set_seed(7)
    first = tf_internals.global_seed_generator()
    assert (tf_internals.global_seed(), tf_internals.global_seed_generator() is first) == (7, True)
    tf.random.uniform([])
    assert tf_internals.global_seed_generator() is first
    tf.random.set_seed(7)
    assert tf_internals.global_seed_generator() is not first


def test_objects_have_state_of_their_own_or_none() -> None:
    table = tf.lookup.experimental.MutableHashTable(tf.string, tf.int64, -1)
    table.insert(["a"], [3])
    state = tf_internals.object_state(table)
    assert {name: value.numpy().tolist() for name, value in state.items()} == {"-keys": [b"a"], "-values": [3]}
    other = tf.lookup.experimental.MutableHashTable(tf.string, tf.int64, -1)
    tf_internals.set_object_state(other, state)
    assert other.lookup(tf.constant("a")).numpy() == 3
    assert tf_internals.object_state(tf.Module()) == {}
    assert tf_internals.object_state(tf_keras.layers.Dense(2)) == {}


def test_objects_of_the_older_protocol_have_state_too() -> None:
    class _Saveable(saveable_object.SaveableObject):
        def __init__(self, owner: Any, name: str) -> None:
            super().__init__(owner, [saveable_object.SaveSpec(tf.constant(owner.count), "", name)], name)

        def restore(self, restored_tensors: Any, restored_shapes: Any) -> None:
            self.op.count = int(restored_tensors[0])

    class Counter(tf.Module):
        count = 4

        def _gather_saveables_for_checkpoint(self) -> dict[str, Any]:
            return {"count": lambda name: _Saveable(self, name)}

    counter = Counter()
    state = tf_internals.object_state(counter)
    assert [value.numpy() for value in state.values()] == [4]
    counter.count = 9
    tf_internals.set_object_state(counter, state)
    assert counter.count == 4


def test_the_function_behind_global_norm_can_be_replaced_for_all_who_hold_it() -> None:
    held, clip = tf.linalg.global_norm, tf.clip_by_global_norm
    original = tf_internals.replace_global_norm(lambda t_list, name=None: tf.constant(8.0))
    try:
        assert float(held([tf.constant([3.0, 4.0])])) == 8.0
        clipped, norm = clip([tf.constant([3.0, 4.0]), None], 4.0)
        assert (float(norm), clipped[0].numpy().tolist(), clipped[1]) == (8.0, [1.5, 2.0], None)
    finally:
        tf_internals.replace_global_norm(original)
    assert float(tf.linalg.global_norm([tf.constant([3.0, 4.0])])) == 5.0


def test_another_dispatcher_of_global_norm_is_told_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tf.linalg, "global_norm", lambda t_list, name=None: tf.constant(0.0))
    with pytest.raises(EnvironmentSetupError, match=r"Up to TensorFlow 2\.21 its dispatcher keeps that function"):
        tf_internals.replace_global_norm(lambda t_list, name=None: tf.constant(8.0))


def test_a_variable_becomes_one_of_a_class_with_more_methods() -> None:
    class More(tf_internals.ResourceVariable):  # type: ignore[misc, valid-type]
        def twice(self) -> tf.Tensor:
            return 2.0 * self

    class OfAnotherMake(tf_internals.ResourceVariable):  # type: ignore[misc, valid-type]
        __slots__ = ("more",)

    variable = tf.Variable(3.0)
    tf_internals.turn_into(variable, More)
    assert float(variable.twice()) == 6.0
    with pytest.raises(EnvironmentSetupError, match=r"Up to TensorFlow 2\.21 a variable's class can"):
        tf_internals.turn_into(tf.Variable(3.0), OfAnotherMake)


def test_named_functions_are_traced_under_their_names_and_counted_by_themselves() -> None:
    told: list[str] = []

    class Noting(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            told.append(record.getMessage())

    def body(x: tf.Tensor) -> tf.Tensor:
        return x + 1.0

    noting, signature = Noting(), [tf.TensorSpec([], tf.float32)]
    logging.getLogger("tensorflow").addHandler(noting)
    try:
        for number in range(8):
            named = tf_internals.named(body, f"step_{number}")
            function = tf.function(named, autograph=False, input_signature=signature)
            assert float(function(1.0)) == 2.0
            assert function.get_concrete_function().graph.name == f"step_{number}"
        assert not any("retracing" in line for line in told)
        for _ in range(8):
            tf.function(body, autograph=False, input_signature=signature)(1.0)
        assert any("retracing" in line for line in told), "TensorFlow counts traces in another way than by their code"
    finally:
        logging.getLogger("tensorflow").removeHandler(noting)


def test_a_graph_knows_whether_xla_compiles_it() -> None:
    told: list[bool] = []

    def body(x: tf.Tensor) -> tf.Tensor:
        told.append(tf_internals.is_compiled_by_xla())
        tf.function(lambda: told.append(tf_internals.is_compiled_by_xla()))()
        return x + 1.0

    for jit_compile in (True, False):
        tf.function(body, jit_compile=jit_compile)(1.0)
    assert told == [True, True, False, False]
    assert not tf_internals.is_compiled_by_xla()


def test_a_condition_that_is_independent_waits_for_nothing_and_runs() -> None:
    stored = tf.Variable(1.0)

    @tf.function
    def run(due: tf.Tensor) -> tf.Tensor:
        stored.assign_add(1.0)
        result = tf_internals.cond_independently(due, lambda: stored.read_value() * 0.0, lambda: tf.constant(5.0))
        stored.assign_add(1.0)
        return result

    function = run.get_concrete_function(tf.TensorSpec([], tf.bool))
    [condition] = [op for op in function.graph.get_operations() if op.type in ("If", "StatelessIf")]
    assert condition.control_inputs == []
    assert [float(function(tf.constant(due))) for due in (True, False)] == [0.0, 5.0]


def test_an_op_can_be_made_to_wait_for_earlier_ones_when_it_is_there() -> None:
    with tf.Graph().as_default():
        first, second, last = tf.constant(1.0, name="first"), tf.constant(2.0, name="second"), tf.constant(3.0) + 1.0
        tf_internals.wait_for(last.op, [first.op, second.op])
        tf_internals.wait_for(last.op, [first.op])
        assert sorted(op.name for op in last.op.control_inputs) == ["first", "second"]
        assert list(last.op.node_def.input)[2:] == ["^first", "^second"]


def flags(graph: tf.Graph) -> dict[str, bool]:
    return {
        op.name: "_XlaCompile" in op.node_def.attr and not op.node_def.attr["_XlaCompile"].b
        for op in graph.get_operations()
    }


def test_ops_of_a_function_are_kept_out_until_the_context_ends() -> None:
    @tf.function
    def traced(x: tf.Tensor) -> tf.Tensor:
        with tf_internals.op_by_op():
            x = tf.add(x, 1.0, name="within")
        return tf.multiply(x, 2.0, name="behind")

    found = flags(traced.get_concrete_function(tf.TensorSpec([], tf.float32)).graph)
    assert found["within"]
    assert not found["behind"]


def test_eager_ops_run_in_it_as_ever() -> None:
    with tf_internals.op_by_op():
        assert float(tf.add(1.0, 1.0)) == 2.0


def test_variables_of_functions_are_checked_before_these_run() -> None:
    variable, seen, ran = tf.Variable(1.0), [], []

    @tf.function
    def function() -> tf.Tensor:
        tf.py_function(lambda: ran.append("body"), [], [])
        return variable + 1.0

    def check(variables: Any) -> None:
        seen.extend(variables)
        if len(seen) > 1:
            raise KeyError

    with tf_internals.functions_checked(check):
        assert float(function()) == 2.0
        assert [v is variable for v in seen] == [True]
        with pytest.raises(KeyError):
            function()
    assert ran == ["body"]
    assert float(function()) == 2.0
    assert len(seen) == 2
