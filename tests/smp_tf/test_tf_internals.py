"""Each private piece of TensorFlow and Keras does what smp_tf needs of it; a test here fails when they change it."""

from __future__ import annotations

import random
import threading
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from tensorflow.python.training.saving import saveable_object
from tf_keras import layers

from smp_tf import tf_internals

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


@pytest.mark.parametrize("marked", [True, False])
def test_keras_calls_an_overridden_build_before_the_first_call_unless_it_is_marked(marked: bool) -> None:
    built = []

    def build(self: Any, input_shape: Any) -> None:
        built.append(input_shape)

    class Model(tf_keras.Model):
        def call(self, x: tf.Tensor) -> tf.Tensor:
            return x

    Model.build = tf_internals.not_an_override(build) if marked else build
    Model()(tf.ones([2, 3]))
    assert built == ([] if marked else [(2, 3)])


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


@pytest.mark.parametrize(("file", "archive"), [("m.keras", "m.keras"), ("m.h5", None)])
def test_values_of_a_model_file_are_given_as_what_can_be_read_again(
    file: str, archive: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tf_keras.Sequential([layers.Input((2,)), layers.Dense(1)]).save(tmp_path / file)
    given: list[tuple[str, str | None]] = []

    def assign(variable: Any, value: Any, *args: Any, **kwargs: Any) -> None:
        assert isinstance(value, h5py.Dataset)
        given.append((str(value.file.filename), tf_internals.archive_of(value)))

    class Noting(tf_internals.UninitializedVariable):  # type: ignore[misc]
        pass

    monkeypatch.setattr(Noting, "assign", assign)

    def make(next_creator: Any, **kwargs: Any) -> Any:
        return Noting(shape=kwargs["shape"], dtype=kwargs["dtype"], name=kwargs["name"])

    with tf.variable_creator_scope(make), tf_internals.values_read_late():
        tf_keras.models.load_model(tmp_path / file, compile=False)
    if archive is not None:
        assert {found for _, found in given} == {str(tmp_path / archive)}
    else:
        assert given == [(str(tmp_path / file), None)] * 2
    assert len(given) == 2


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


def small_model() -> Any:
    return tf_keras.Sequential([tf_keras.layers.Input((2,)), tf_keras.layers.Dense(3), tf_keras.layers.Dense(1)])


@pytest.mark.parametrize("name", ["w.h5", "m.h5", "m.keras"])
def test_keras_writes_values_one_by_one_and_none_in_memory(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, read = small_model(), []
    original = tf_internals.ResourceVariable.numpy

    def noted(variable: Any) -> Any:
        read.append((variable.name, sorted(path.name for path in tmp_path.iterdir())))
        return original(variable)

    def in_memory() -> None:
        raise AssertionError("Keras makes the file in memory")

    with tf_internals.values_one_by_one(), monkeypatch.context() as patched:
        patched.setattr(tf_internals.ResourceVariable, "numpy", noted)
        patched.setattr(tf_internals.saving_lib.io, "BytesIO", in_memory)
        model.save_weights(tmp_path / name) if name == "w.h5" else model.save(tmp_path / name)
    assert [variable for variable, _ in read] == [v.name for v in model.variables]
    assert all(files for _, files in read), "a value was read before there was a file to write it to"
    loaded = small_model()
    loaded.load_weights(tmp_path / name)
    assert [v.numpy().tolist() for v in loaded.variables] == [v.numpy().tolist() for v in model.variables]
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_keras_gives_what_it_reads_to_assign_unread(tmp_path: Path) -> None:
    model, given = small_model(), []
    model.save_weights(tmp_path / "w.h5")

    class Noting(tf_internals.ResourceVariable):  # type: ignore[misc, valid-type]
        def assign(self, value: Any, *args: Any, **kwargs: Any) -> Any:
            given.append(type(value).__name__)

    loaded = small_model()
    for variable in loaded.variables:
        variable.__class__ = Noting
    with tf_internals.values_one_by_one():
        loaded.load_weights(tmp_path / "w.h5")
    assert given == ["Dataset"] * 4


def test_keras_is_as_before_after_that() -> None:
    keras = tf_internals.backend, tf_internals.hdf5_format, tf_internals.saving_lib
    before = [vars(module).copy() for module in keras]

    def fails() -> None:
        with tf_internals.values_one_by_one():
            assert [vars(module) for module in keras] != before
            raise OSError("full")

    with pytest.raises(OSError, match="full"):
        fails()
    assert [vars(module) for module in keras] == before


def test_a_global_seed_is_seen_and_every_setting_of_it() -> None:
    tf.random.set_seed(7)
    first = tf_internals.global_seed_generator()
    assert (tf_internals.global_seed(), tf_internals.global_seed_generator() is first) == (7, True)
    tf.random.uniform([])
    assert tf_internals.global_seed_generator() is first
    tf.random.set_seed(7)
    assert tf_internals.global_seed_generator() is not first


def test_keras_draws_the_seeds_of_initializers_from_the_generator_it_is_given() -> None:
    class Fixed(random.Random):
        def randint(self, a: int, b: int) -> int:
            return 5

    tf_internals.set_keras_seed_generator(Fixed())
    drawn = tf_keras.initializers.GlorotUniform()((2, 2)).numpy()
    tf_keras.utils.set_random_seed(1)
    assert (drawn == tf_keras.initializers.GlorotUniform(seed=5)((2, 2)).numpy()).all()


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


def test_a_scheduled_rate_can_be_brought_up_to_date() -> None:
    halved = tf_keras.optimizers.schedules.ExponentialDecay(1.0, decay_steps=1, decay_rate=0.5)
    for optimizer in (tf_keras.optimizers.SGD(halved), tf_keras.optimizers.SGD(0.25)):
        optimizer.iterations.assign(2)
        tf_internals.follow_schedule(optimizer)
        assert float(optimizer.learning_rate) == 0.25
    tf_internals.follow_schedule(tf_keras.optimizers.legacy.SGD(0.25))


@pytest.mark.parametrize("module", [tf_keras.optimizers, tf_keras.optimizers.legacy])
def test_one_function_decides_for_every_loss_scale_optimizer(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def never(gradients: Any) -> tf.Tensor:
        asked.append(len(gradients))
        return tf.constant(False)

    monkeypatch.setattr(tf_internals.loss_scaling(), "_is_all_finite", never)
    optimizer = tf_keras.mixed_precision.LossScaleOptimizer(module.SGD(1.0), initial_scale=8.0)
    weight = tf.Variable(1.0)
    optimizer.apply_gradients([(tf.constant(1.0), weight)])
    assert (float(weight), float(optimizer.loss_scale), asked) == (1.0, 4.0, [1])
    assert not tf_internals.update_loss_scale(optimizer)
    assert (float(optimizer.loss_scale), asked) == (2.0, [1, 0])
    fixed = tf_keras.mixed_precision.LossScaleOptimizer(module.SGD(1.0), dynamic=False, initial_scale=8.0)
    assert tf_internals.update_loss_scale(fixed) is True


def test_a_compiled_model_reduces_its_losses_by_the_functions_that_are_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    container, functions = tf_internals.compiled_losses()
    called = []

    def noted(name: str, original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            called.append(name)
            return original(*args, **kwargs)

        return call

    watched = ((container, "__call__"), (functions, "apply_valid_mask"), (functions, "compute_weighted_loss"))
    for owner, name in watched:
        monkeypatch.setattr(owner, name, noted(name, getattr(owner, name)))
    model = tf_keras.Sequential([tf_keras.layers.Dense(1, input_shape=(2,))])
    model.compile("sgd", "mse")
    model.test_on_batch(np.ones((2, 2)), np.ones((2, 1)))
    assert called == ["__call__", "apply_valid_mask", "compute_weighted_loss"]


@pytest.mark.parametrize("kind", [tf.train.CheckpointOptions, tf.saved_model.SaveOptions])
def test_default_options_are_told_from_others(kind: type) -> None:
    assert tf_internals.is_default_options(kind())
    assert not tf_internals.is_default_options(kind(experimental_io_device="/job:localhost"))


def test_compiling_sets_the_attributes_that_a_wrapped_model_hands_on() -> None:
    model = tf_keras.Sequential([tf_keras.layers.Dense(1)])
    assert not tf_internals.is_compiled(model)
    before = dict(vars(model))
    model.compile("sgd", "mse", metrics=["mae"], jit_compile=True, run_eagerly=False, steps_per_execution=2)
    changed = {name for name, value in vars(model).items() if before.get(name, model) is not value}
    assert {name for name in changed if not name.startswith("_self_")} == set(tf_internals.SET_BY_COMPILE)
    assert tf_internals.is_compiled(model)


def test_a_list_of_callbacks_finds_out_again_who_wants_each_batch() -> None:
    callbacks = tf_keras.callbacks.CallbackList([])
    called = []
    callbacks.append(tf_keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: called.append(batch)))
    callbacks.on_train_batch_end(0)
    tf_internals.ask_for_batch_hooks(callbacks)
    callbacks.on_train_batch_end(1)
    assert called == [1]


def test_keras_asks_one_method_for_the_logs_of_an_epoch_and_of_an_evaluation() -> None:
    asked = []

    class Net(tf_keras.Sequential):
        def _validate_and_get_metrics_result(self, logs: Any) -> Any:
            asked.append(sorted(logs))
            return super()._validate_and_get_metrics_result(logs) | {"ours": 1.0}

    model = Net([layers.Dense(1)])
    model.compile("sgd", "mse")
    history = model.fit(np.ones([4, 2]), np.ones([4, 1]), epochs=2, verbose=0)
    assert history.history["ours"] == [1.0, 1.0]
    assert model.evaluate(np.ones([4, 2]), np.ones([4, 1]), verbose=0, return_dict=True)["ours"] == 1.0
    assert asked == [["loss"]] * 3


def test_an_older_optimizer_that_is_given_nothing_has_the_usual_aggregator() -> None:
    usual = tf_internals.usual_gradient_aggregator()
    assert tf_keras.optimizers.legacy.SGD(0.1).gradient_aggregator is usual
    assert tf_keras.optimizers.legacy.SGD(0.1, gradient_aggregator=list).gradient_aggregator is list


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
