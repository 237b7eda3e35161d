"""Variables without storage: what they hold before and after it is decided who owns them, and their initial values."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from tf_keras import layers

from smp_tf import tf_internals
from smp_tf.errors import OwnershipError
from smp_tf.partition.layout import Layout
from smp_tf.variables.decision import Decision
from smp_tf.variables.guarded import BuiltVariable, DeferredVariable, made_at_once, tracing_step
from smp_tf.variables.store import VariableStore, is_remote, keep_for_good, make_script_variable, store_of

pytestmark = pytest.mark.usefixtures("keras_defaults")

SEED = 11


def deferred(build: Callable[[], Iterable[tf.Variable]], name: str = "net") -> tuple[VariableStore, list[tf.Variable]]:
    """The variables that a function makes, without storage, and their store."""
    store = VariableStore(name)
    with tf.variable_creator_scope(store.creator), tracing_step():
        made = list(build())
    return store, made


def two_weights() -> list[tf.Variable]:
    return [
        tf.Variable(lambda: tf.constant([1.0, 2.0]), name="first"),
        tf.Variable(lambda: tf.constant([3.0, 4.0, 5.0]), name="second"),
    ]


def settle(
    store: VariableStore, owners: dict[int, int], stage: int = 0, seed: int = SEED, chunks: Any = None, **given: Any
) -> None:
    """Decides where the variables of a store are, as a step does, on a rank of a stage."""
    store.settle(store.decisions(owners, chunks), {"P": stage, "D": 0, "T": 0}, seed, chunks=chunks, **given)


def has_storage(variable: tf.Variable) -> bool:
    return bool(tf.raw_ops.VarIsInitializedOp(resource=variable.handle))


def stored_bytes(variable: tf.Variable) -> int:
    """Bytes of what is stored, past all checks; 0 where nothing is."""
    if not has_storage(variable):
        return 0
    value = tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=variable.dtype)
    return value.dtype.size * int(tf.size(value))


class TestStorage:
    def test_a_variable_holds_none_until_it_is_settled(self) -> None:
        _, (first, second) = deferred(two_weights)
        assert isinstance(first, DeferredVariable)
        assert not has_storage(first)
        assert not has_storage(second)
        assert (first.shape, first.dtype) == ((2,), tf.float32)

    def test_only_the_owner_fills_it(self) -> None:
        store, (first, second) = deferred(two_weights)
        settle(store, {0: 0, 1: 1}, stage=1, seed=SEED)
        assert not has_storage(first)
        assert second.numpy().tolist() == [3.0, 4.0, 5.0]
        assert (is_remote(first), is_remote(second)) == (True, False)
        assert [store.state(v).owner for v in store] == [0, 1]

    def test_a_second_decision_changes_nothing(self) -> None:
        store, (first, _) = deferred(two_weights)
        settle(store, {0: 0, 1: 0}, stage=0, seed=SEED)
        first.assign([7.0, 8.0])
        assert not store.is_new
        settle(store, {0: 1, 1: 1}, stage=0, seed=SEED)
        assert first.numpy().tolist() == [7.0, 8.0]

    def test_a_weight_built_with_its_value_is_freed_where_another_rank_owns_it(self) -> None:
        kept, freed = tf.Variable([1.0] * 1000, name="kept"), tf.Variable([2.0] * 1000, name="freed")
        store = VariableStore("net")
        store.adopt(kept)
        store.adopt(freed)
        assert stored_bytes(freed) == 4000
        settle(store, {0: 0, 1: 1}, stage=0, seed=SEED)
        assert kept.numpy().tolist() == [1.0] * 1000
        assert stored_bytes(freed) == 0
        assert isinstance(freed, BuiltVariable)
        assert not isinstance(kept, BuiltVariable)
        with pytest.raises(OwnershipError, match="variable 'freed' here: partition 1 owns it"):
            freed.numpy()

    def test_taking_in_a_weight_twice_is_taking_it_in_once(self) -> None:
        store, weight = VariableStore("net"), tf.Variable([1.0])
        store.adopt(weight)
        store.adopt(weight)
        assert len(store) == 1


class TestUnused:
    """Bug: what the first step did not use was on stage 0 for good, and later steps were refused for it."""

    def test_a_variable_that_no_op_uses_is_kept_where_the_one_before_it_is(self) -> None:
        store, (first, second) = deferred(two_weights)
        settle(store, {0: 1}, stage=1, seed=SEED)
        assert [store.state(v).owner for v in (first, second)] == [1, 1]
        assert [store.state(v).is_decided for v in (first, second)] == [True, False]
        assert second.numpy().tolist() == [3.0, 4.0, 5.0]
        assert not store.is_new

    def test_one_that_comes_before_all_others_is_kept_by_the_first_stage(self) -> None:
        store, (first, second) = deferred(two_weights)
        settle(store, {1: 1}, stage=0, seed=SEED)
        assert [store.state(v).owner for v in (first, second)] == [0, 1]
        assert first.numpy().tolist() == [1.0, 2.0]

    @pytest.mark.parametrize("is_built", [False, True])
    def test_the_step_that_uses_it_decides_who_stores_it(self, is_built: bool) -> None:
        sent: dict[int, tf.Tensor] = {}

        def on(stage: int) -> tuple[VariableStore, tf.Variable]:
            if is_built:
                store, made = VariableStore("net"), [tf.Variable([1.0, 2.0]), tf.Variable([3.0, 4.0, 5.0])]
                for variable in made:
                    store.adopt(variable)
            else:
                store, made = deferred(two_weights)

            def move(decision: Decision) -> tf.Tensor | None:
                assert decision.variable is made[1]
                assert (decision.moves, decision.is_first) == (True, False)
                place, to = {"P": stage, "D": 0, "T": 0}, decision.layout.stage
                assert to is not None
                if decision.before.is_here(place):
                    sent[to] = decision.variable.read_value()
                return sent[to] if decision.layout.is_here(place) else None

            settle(store, {0: 1}, stage=stage, seed=SEED)
            if stage == 1:
                made[1].assign([7.0, 8.0, 9.0])
            assert [decision.variable for decision in store.decisions({0: 1, 1: 0})] == [made[1]]
            settle(store, {0: 1, 1: 0}, stage=stage, seed=SEED, move=move)
            assert store.decisions({0: 0, 1: 1}) == []
            return store, made[1]

        store, left = on(1)
        assert (store.state(left).owner, store.state(left).is_decided) == (0, True)
        assert is_remote(left)
        assert stored_bytes(left) == 0
        store, taken = on(0)
        assert taken.numpy().tolist() == [7.0, 8.0, 9.0]
        taken.assign_add([1.0, 1.0, 1.0])
        assert taken.numpy().tolist() == [8.0, 9.0, 10.0]

    def test_it_stays_where_it_is_if_that_is_decided(self) -> None:
        store, (first, second) = deferred(two_weights)
        settle(store, {0: 1}, stage=1, seed=SEED)
        keep_for_good([second])
        assert store.decisions({0: 0, 1: 0}) == []
        assert store.state(second).is_decided
        assert not store.state(first).storage.is_kept

    def test_two_models_keep_what_they_share_in_one_place(self) -> None:
        one, (_first, second) = deferred(two_weights)
        other = VariableStore("other")
        other.adopt(second)
        settle(one, {0: 1}, stage=0, seed=SEED)
        settle(other, {}, stage=0, seed=SEED)
        assert [one.state(second).owner, other.state(second).owner] == [1, 1]
        assert [(d.variable, d.before.stage, d.layout.stage) for d in other.decisions({0: 0})] == [(second, 1, 0)]


# What a script may do with a variable, and in which words it is refused.
USES: list[tuple[str, str, Callable[[Any], Any]]] = [
    ("numpy", "read", lambda v: v.numpy()),
    ("value", "read", lambda v: v.value()),
    ("read_value", "read", lambda v: v.read_value()),
    ("arithmetic", "read", lambda v: v + 1.0),
    ("convert", "read", lambda v: tf.convert_to_tensor(v)),
    ("slice", "read", lambda v: v[0]),
    ("gather", "read", lambda v: tf.gather(v, [0])),
    ("gather_nd", "read", lambda v: tf.gather_nd(v, [[0]])),
    ("lookup", "read", lambda v: tf.nn.embedding_lookup(v, [0])),
    ("get_value", "read", lambda v: tf_keras.backend.get_value(v)),
    ("in a function", "read", lambda v: tf.function(lambda: v + 1.0)()),
    ("assign", "assign to", lambda v: v.assign([1.0, 1.0])),
    ("assign_add", "assign to", lambda v: v.assign_add([1.0, 1.0])),
    ("assign_sub", "assign to", lambda v: v.assign_sub([1.0, 1.0])),
    ("slice assign", "read", lambda v: v[:1].assign([1.0])),
    ("scatter_update", "assign to", lambda v: v.scatter_update(tf.IndexedSlices([1.0], [0]))),
    ("scatter_sub", "assign to", lambda v: v.scatter_sub(tf.IndexedSlices([1.0], [0]))),
    ("scatter_nd_add", "assign to", lambda v: v.scatter_nd_add([[0]], [1.0])),
    ("batch_scatter", "assign to", lambda v: v.batch_scatter_update(tf.IndexedSlices([1.0], [0]))),
]

ASSIGN = next((doing, use) for name, doing, use in USES if name == "assign")


@pytest.mark.parametrize(("doing", "use"), [pytest.param(*rest, id=name) for name, *rest in USES])
class TestUse:
    def test_before_the_plan_is_an_error_that_names_the_variable(self, doing: str, use: Callable[[Any], Any]) -> None:
        store, (first, _) = deferred(two_weights)
        if (doing, use) == ASSIGN:
            use(first)
            settle(store, {}, stage=0, seed=SEED)
            assert first.numpy().tolist() == [1.0, 1.0], "what was assigned takes the place of the initial value"
            return
        with pytest.raises(
            OwnershipError, match=f"Cannot {doing} variable 'first' yet: .* first call of a step"
        ) as raised:
            use(first)
        assert "smp.register_post_partition_hook" in str(raised.value)

    def test_where_it_is_not_stored_reading_is_an_error_that_names_the_owner_and_assigning_is_left_out(
        self, doing: str, use: Callable[[Any], Any]
    ) -> None:
        store, (first, _) = deferred(two_weights)
        settle(store, {0: 3, 1: 0}, stage=0, seed=SEED)
        if doing == "assign to":
            assert use(first) is first
            assert not has_storage(first)
            return
        with pytest.raises(OwnershipError, match="Cannot read variable 'first' here: partition 3 owns it") as raised:
            use(first)
        assert "model.local_variables" in str(raised.value)

    def test_on_its_owner_is_as_with_any_variable(self, doing: str, use: Callable[[Any], Any]) -> None:
        store, (first, _) = deferred(two_weights)
        settle(store, {}, stage=0, seed=SEED)
        plain = tf.Variable([1.0, 2.0])
        assert np.array_equal(_as_array(use(first)), _as_array(use(plain)))
        assert first.numpy().tolist() == plain.numpy().tolist()


def _as_array(value: Any) -> Any:
    return value.numpy() if hasattr(value, "numpy") else value


def test_in_a_function_assigning_is_an_error_where_it_is_not_stored() -> None:
    store, (first, _) = deferred(two_weights)
    settle(store, {0: 3, 1: 0}, stage=0, seed=SEED)
    for use in (use for _, doing, use in USES if doing == "assign to"):
        with pytest.raises(OwnershipError, match=r"assign to variable 'first' in a tf\.function here: partition 3"):
            tf.function(lambda use=use: use(first))()


def test_a_value_of_another_shape_is_refused_where_it_would_be_left_out() -> None:
    store, (first, _) = deferred(two_weights)
    settle(store, {0: 3, 1: 0}, stage=0, seed=SEED)
    for assign in (first.assign, first.assign_add, first.assign_sub):
        with pytest.raises(ValueError, match=r"shape \(3,\) to variable 'first' of shape \(2,\)"):
            assign([1.0, 2.0, 3.0])


def test_a_plain_layer_called_over_a_weight_of_another_rank_is_told_to_be_wrapped() -> None:
    layer = layers.Dense(2)
    store, _ = deferred(lambda: (layer.build([None, 3]), layer.weights)[1])
    settle(store, {0: 3, 1: 0}, stage=0, seed=SEED)
    with pytest.raises(OwnershipError, match=r"wrap it in smp\.DistributedModel and use its predict"):
        layer(np.ones([1, 3], np.float32))


def test_a_graph_of_a_step_may_read_what_has_no_storage() -> None:
    _, (first, _) = deferred(two_weights)
    with tracing_step(), tf_internals.scratch_graph("step").as_default():
        assert tf.convert_to_tensor(first).shape == (2,)
    with tf_internals.scratch_graph("step").as_default(), pytest.raises(OwnershipError):
        tf.convert_to_tensor(first)


def test_a_trace_does_not_make_eager_reads_right() -> None:
    _, (first, _) = deferred(two_weights)
    with tracing_step(), pytest.raises(OwnershipError):
        first.numpy()


class TestSharedByTwoModels:
    def shared(self) -> tuple[VariableStore, VariableStore, list[tf.Variable]]:
        """A model with two weights, and one that has made a weight of its own before it takes in those two."""
        one, made = deferred(two_weights)
        other, own = deferred(lambda: [tf.Variable(lambda: tf.constant([9.0]), name="own")], "other")
        for variable in (*made, *own):
            other.adopt(variable)
        return one, other, [*made, *own]

    def test_the_model_that_runs_first_decides_for_both(self) -> None:
        one, other, (first, second, own) = self.shared()
        settle(one, {0: 0, 1: 1}, stage=1, seed=SEED)
        assert [other.state(v).owner for v in (first, second, own)] == [0, 1, None]
        assert other.is_new
        second.assign([6.0, 6.0, 6.0])
        settle(other, {0: 1, 1: 1, 2: 0}, stage=1, seed=SEED)
        assert [other.state(v).owner for v in (first, second, own)] == [0, 1, 1]
        assert second.numpy().tolist() == [6.0, 6.0, 6.0]
        assert own.numpy().tolist() == [9.0]
        assert not has_storage(first)
        assert not one.is_new

    def test_where_the_chunks_are_is_known_by_both(self) -> None:
        """Bug: a model that shares another one's weights had their chunks, and did not know where these are."""
        one, other, (first, second, own) = self.shared()
        settle(one, {0: 0, 1: 2}, stage=0, seed=SEED, chunks=(0, 1, 0))
        stored = [other.state(v).storage for v in (first, second, own)]
        assert [s.layout for s in stored] == [Layout(0, 0), Layout(0, 2), Layout()]
        assert [s.chunks for s in stored] == [(0, 1, 0), (0, 1, 0), None]

    def test_the_model_that_came_second_may_run_first(self) -> None:
        one, other, (first, second, own) = self.shared()
        settle(other, {0: 0, 1: 1, 2: 0}, stage=0, seed=SEED)
        assert not one.is_new
        settle(one, {0: 0, 1: 1}, stage=0, seed=SEED)
        assert [v.numpy().tolist() for v in (second, own)] == [[3.0, 4.0, 5.0], [9.0]]
        assert is_remote(first)

    def test_each_model_counts_it_in_its_own_order(self) -> None:
        one, other, (first, second, own) = self.shared()
        assert [one.state(v).position for v in (first, second)] == [0, 1]
        assert [other.state(v).position for v in (own, first, second)] == [0, 1, 2]
        assert store_of(first) is one

    def test_a_weight_built_with_its_value_is_shared_too(self) -> None:
        one, other, weight = VariableStore("one"), VariableStore("other"), tf.Variable([1.0])
        one.adopt(weight)
        settle(one, {0: 1}, stage=0, seed=SEED)
        other.adopt(weight)
        settle(other, {0: 0}, stage=0, seed=SEED)
        assert is_remote(weight)
        with pytest.raises(OwnershipError, match="partition 1 owns it"):
            weight.numpy()

    def test_it_stays_a_model_s_after_the_first_model_is_gone(self) -> None:
        one, other, (first, second, _) = self.shared()
        settle(one, {0: 0, 1: 1}, stage=0, seed=SEED)
        del one
        gc.collect()
        assert store_of(second) is other
        assert is_remote(second)
        assert not is_remote(first)


class TestMadeAtOnce:
    def test_a_variable_has_its_value_and_belongs_to_no_model(self) -> None:
        store = VariableStore("net")
        with tf.variable_creator_scope(store.creator), tracing_step():
            with made_at_once():
                now = tf.Variable(lambda: tf.constant([1.0, 2.0]))
            later = tf.Variable(lambda: tf.constant([3.0]))
        assert now.numpy().tolist() == [1.0, 2.0]
        assert [v.name for v in store] == [later.name]
        assert not has_storage(later)

    def test_what_is_left_to_the_script_is_stored_on_every_rank(self) -> None:
        store, total = VariableStore("net"), tf.Variable(3.0)
        store.leave_to_script([total])
        store.adopt(total)
        settle(store, {0: 1}, stage=0, seed=SEED)
        assert (len(store), store.leaves_to_script(total), store_of(total)) == (0, True, None)
        assert total.numpy() == 3.0

    @pytest.mark.parametrize("owner", [0, 1])
    def test_what_is_filled_before_the_plan_is_freed_where_another_rank_owns_it(self, owner: int) -> None:
        store, (first, second) = deferred(two_weights)
        store.fill(first, seed=SEED)
        store.fill(first, seed=SEED)
        first.assign([7.0, 8.0])
        assert not has_storage(second)
        settle(store, {0: owner, 1: 0}, stage=0, seed=SEED)
        assert stored_bytes(first) == (0 if owner else 8)
        if owner:
            with pytest.raises(OwnershipError, match="partition 1 owns it"):
                first.numpy()
        else:
            assert first.numpy().tolist() == [7.0, 8.0]


class TestCheckpoints:
    def test_one_that_would_lack_a_weight_of_another_rank_is_not_written_silently(self, tmp_path: Path) -> None:
        store, (first, second) = deferred(two_weights)
        settle(store, {0: 0, 1: 1}, stage=0, seed=SEED)
        with pytest.raises(OwnershipError, match="Cannot save or restore variable 'second' here: partition 1") as e:
            tf.train.Checkpoint(first=first, second=second).write(str(tmp_path / "c"))
        assert "smp.CheckpointManager(checkpoint, directory), used on every rank" in str(e.value)
        assert list(tmp_path.glob("c*")) == []

    def test_one_is_not_restored_into_a_weight_of_another_rank(self, tmp_path: Path) -> None:
        written = tf.train.Checkpoint(v=tf.Variable([1.0, 2.0])).write(str(tmp_path / "c"))
        store, (first, _) = deferred(two_weights)
        settle(store, {0: 1, 1: 0}, stage=0, seed=SEED)
        with pytest.raises(OwnershipError, match="Cannot save or restore variable 'first' here"):
            tf.train.Checkpoint(v=first).read(written)
        assert not has_storage(first)

    def test_one_before_the_plan_would_be_empty_and_is_an_error(self, tmp_path: Path) -> None:
        _, (first, _) = deferred(two_weights)
        with pytest.raises(OwnershipError, match="Cannot save or restore variable 'first' yet"):
            tf.train.Checkpoint(v=first).write(str(tmp_path / "c"))

    def test_a_weight_that_was_freed_is_not_saved_silently_either(self, tmp_path: Path) -> None:
        freed, store = tf.Variable([1.0], name="freed"), VariableStore("net")
        store.adopt(freed)
        settle(store, {0: 1}, stage=0, seed=SEED)
        with pytest.raises(OwnershipError, match="variable 'freed' here"):
            tf.train.Checkpoint(v=freed).write(str(tmp_path / "c"))

    def test_a_rank_s_own_weights_are_saved_and_restored(self, tmp_path: Path) -> None:
        store, (first, second) = deferred(two_weights)
        settle(store, {}, stage=0, seed=SEED)
        checkpoint = tf.train.Checkpoint(first=first, second=second)
        written = checkpoint.write(str(tmp_path / "c"))
        first.assign([0.0, 0.0])
        checkpoint.read(written).assert_consumed()
        assert first.numpy().tolist() == [1.0, 2.0]


class _SeveralWeights(layers.Layer):
    """Initialisers that know nothing of Keras, among them ones that draw from TensorFlow's random ops."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = seed

    def build(self, input_shape: Any) -> None:
        self.normal = self.add_weight("normal", (3,), initializer=lambda s, dtype: tf.random.normal(s, dtype=dtype))
        self.fixed = self.add_weight("fixed", (2, 2), initializer=lambda s, dtype: tf.fill(s, tf.constant(2.5, dtype)))
        self.both = self.add_weight(
            "both", (3,), initializer=lambda s, dtype: tf.random.uniform(s, dtype=dtype) * tf.random.normal(s)
        )
        self.shuffled = self.add_weight("shuffled", (6,), initializer=lambda s, dtype: tf.random.shuffle(tf.range(6.0)))
        self.seeded = self.add_weight("seeded", (3,), initializer=lambda s, dtype: tf.random.normal(s, seed=self.seed))
        self.numpys = self.add_weight("numpys", (2,), initializer=tf_keras.initializers.Constant(np.array([1.5, -1.0])))


def many_weights() -> list[tf.Variable]:
    made: list[tuple[layers.Layer, Any]] = [
        (layers.Dense(4), (None, 5)),
        (layers.Dense(3, kernel_initializer="he_normal", bias_initializer="ones"), (None, 4)),
        (layers.Dense(3, kernel_initializer=tf_keras.initializers.RandomNormal(stddev=0.1)), (None, 3)),
        (layers.Dense(3, kernel_initializer=tf_keras.initializers.RandomNormal(seed=3)), (None, 3)),
        (layers.Dense(6, kernel_initializer="orthogonal", bias_initializer="zeros"), (None, 3)),
        (_SeveralWeights(4), (None, 3)),
        (layers.Dense(4, kernel_initializer="truncated_normal"), (None, 3)),
        (layers.LSTM(3), (None, 4, 2)),
        (layers.GRU(2), (None, 4, 2)),
        (layers.Embedding(5, 3), (None,)),
        (layers.BatchNormalization(), (None, 3)),
        (layers.Conv2D(2, 3), (None, 4, 4, 2)),
        (_SeveralWeights(9), (None, 3)),
    ]
    for layer, shape in made:
        layer.build(shape)
    return [variable for layer, _ in made for variable in layer.weights]


def plain_values() -> list[np.ndarray]:
    tf_keras.utils.set_random_seed(SEED)
    return [variable.numpy() for variable in many_weights()]


def test_initial_values_are_those_of_plain_keras_with_the_same_seed() -> None:
    expected = plain_values()
    tf_keras.utils.set_random_seed(SEED)
    store, made = deferred(many_weights)
    settle(store, {}, stage=0, seed=SEED)
    different = [v.name for v, value in zip(made, expected, strict=True) if not np.array_equal(v.numpy(), value)]
    assert different == []


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_initial_values_do_not_depend_on_which_others_a_rank_fills(stage: int) -> None:
    expected = plain_values()
    tf_keras.utils.set_random_seed(SEED)
    store, made = deferred(many_weights)
    tf.random.normal([2])  # what the script draws meanwhile changes nothing
    settle(store, {position: position % 3 for position in range(len(made))}, stage=stage, seed=SEED)
    filled = [number for number, variable in enumerate(made) if not is_remote(variable)]
    assert filled == list(range(stage, len(made), 3))
    different = [made[n].name for n in filled if not np.array_equal(made[n].numpy(), expected[n])]
    assert different == []


def test_what_a_script_draws_after_the_model_is_as_with_plain_keras() -> None:
    plain_values()
    expected = tf.random.normal([3]).numpy()
    tf_keras.utils.set_random_seed(SEED)
    store, _ = deferred(many_weights)
    settle(store, {}, stage=0, seed=SEED)
    assert tf.random.normal([3]).numpy().tolist() == expected.tolist()


def test_without_a_global_seed_replicas_agree_on_random_initial_values() -> None:
    def replica() -> list[float]:
        store, (drawn,) = deferred(lambda: [tf.Variable(lambda: tf.random.normal([3]))])
        settle(store, {}, stage=0, seed=SEED)
        return drawn.numpy().tolist()

    tf.random.set_seed(None)
    try:
        first, second = replica(), replica()
    finally:
        tf.random.set_seed(SEED)
    assert first == second


def test_an_initial_value_may_need_many_bytes_only_where_it_is_owned() -> None:
    made = []

    def huge() -> tf.Tensor:
        made.append(tf.executing_eagerly())
        return tf.zeros([1 << 20, 1 << 20])  # 4 TiB

    store, _ = deferred(lambda: [tf.Variable(huge)])
    settle(store, {0: 1}, stage=0, seed=SEED)
    assert made == [False]


class TestArguments:
    def test_what_a_variable_was_made_with_is_kept(self) -> None:
        constraint = tf_keras.constraints.NonNeg()

        def build() -> list[tf.Variable]:
            return [
                tf.Variable(
                    lambda: tf.constant([1.0, -2.0]),
                    trainable=False,
                    name="kept",
                    constraint=constraint,
                    synchronization=tf.VariableSynchronization.ON_READ,
                    aggregation=tf.VariableAggregation.MEAN,
                )
            ]

        store, (made,) = deferred(build)
        settle(store, {}, stage=0, seed=SEED)
        assert made.name == "kept:0"
        assert made.trainable is False
        assert made.constraint is constraint
        assert made.synchronization == tf.VariableSynchronization.ON_READ
        assert made.aggregation == tf.VariableAggregation.MEAN

    def test_constraint_and_trainable_of_a_layer(self) -> None:
        class Layer(layers.Layer):
            def build(self, input_shape: Any) -> None:
                self.held = self.add_weight("held", (2,), constraint="non_neg", initializer="ones")
                self.still = self.add_weight("still", (2,), trainable=False, initializer="ones")

        layer = Layer()

        def build() -> list[tf.Variable]:
            layer.build(None)
            return layer.weights

        deferred(build)
        assert isinstance(layer.held.constraint, tf_keras.constraints.NonNeg)
        assert layer.trainable_weights == [layer.held]
        assert layer.non_trainable_weights == [layer.still]

    def test_type_and_shape_given_beside_the_initial_value(self) -> None:
        def build() -> list[tf.Variable]:
            return [
                tf.Variable(lambda: [1, 2], dtype=tf.float64, shape=tf.TensorShape([None]), name="open"),
                tf.Variable(lambda: np.array([1, 2], np.int64), name="whole"),
            ]

        store, (open_, whole) = deferred(build)
        settle(store, {}, stage=0, seed=SEED)
        assert (open_.dtype, open_.shape.as_list()) == (tf.float64, [None])
        assert open_.numpy().tolist() == [1.0, 2.0]
        assert (whole.dtype, whole.numpy().tolist()) == (tf.int64, [1, 2])

    def test_equal_names_are_told_apart_in_messages(self) -> None:
        store, made = deferred(lambda: [tf.Variable(lambda: 1.0, name="w") for _ in range(3)])
        assert [store.state(v).name for v in made] == ["w", "w_1", "w_2"]


def test_a_variable_given_a_value_is_made_with_it_and_belongs_to_no_model() -> None:
    store, (counter,) = deferred(lambda: [tf.Variable(5, dtype=tf.int64, trainable=False)])
    assert counter.numpy() == 5
    assert len(store) == 0
    assert store_of(counter) is None
    assert not is_remote(counter)


def test_a_script_variable_is_made_at_once_whatever_scopes_are_open() -> None:
    store = VariableStore("net")
    with tf.variable_creator_scope(store.creator), tf_internals.scratch_graph("step").as_default():
        made = make_script_variable(initial_value=lambda: 3.0, trainable=False, name="steps", shape=None)
    assert (made.numpy(), made.name, made.trainable) == (3.0, "steps:0", False)
    assert len(store) == 0


def test_a_store_takes_over_the_variables_of_another_behind_its_own() -> None:
    outer, (own,) = deferred(lambda: [tf.Variable(lambda: 1.0, name="own")])
    inner, (first, second) = deferred(two_weights)
    outer.extend(inner)
    assert [outer.state(v).position for v in (own, first, second)] == [0, 1, 2]
    assert store_of(first) is outer
    settle(outer, {0: 1, 1: 1, 2: 0}, stage=0, seed=SEED)
    assert [v.name for v in outer if not is_remote(v)] == ["second:0"]
    assert second.numpy().tolist() == [3.0, 4.0, 5.0]
