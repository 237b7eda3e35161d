"""Units are measured by themselves, on numbers that are made up, with the weights of one at a time."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import tensorflow as tf
import tf_keras

from smp_tf.partition.graph.op_graph import TensorType
from smp_tf.partition.rewrite.prune import prune
from smp_tf.pipeline import allocator
from smp_tf.pipeline.measure import made_up, profile
from smp_tf.pipeline.measure.made_up import Surroundings, values_for
from smp_tf.pipeline.measure.profile import make_ready
from smp_tf.pipeline.planner.cut import cut_into_units
from tests.partition.traced_step import FLOATS, lowered


class Slow(tf_keras.layers.Layer):
    """Multiplies with a matrix of its own many times over."""

    def build(self, shape: Any) -> None:
        self.kernel = self.add_weight("kernel", (8, 8))

    def call(self, x: tf.Tensor) -> tf.Tensor:
        return tf.while_loop(lambda i, y: i < 2000, lambda i, y: (i + 1, tf.tanh(y @ self.kernel)), (0, x))[1]


class Net(tf_keras.Model):
    def __init__(self) -> None:
        super().__init__(name="net")
        self.first = tf_keras.layers.Dense(8, name="first")
        self.slow = Slow(name="slow")
        self.drop = tf_keras.layers.Dropout(0.5, name="drop")
        self.last = tf_keras.layers.Dense(3, name="last")

    def call(self, x: tf.Tensor) -> tf.Tensor:
        return self.last(self.drop(self.slow(self.first(x)), training=False))


def cut_net(kind: type[tf_keras.Model] = Net) -> tuple[Any, Any, Any]:
    net = kind()
    net(tf.ones([4, 8]))

    def step(x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(net(x))
        return tape.gradient(loss, net.trainable_variables), loss

    found = lowered(step, FLOATS, models=[net])
    units, done = cut_into_units(prune(found.graph))
    return units, done, found


def around(found: Any, *arguments: tf.Tensor) -> Surroundings:
    return Surroundings(arguments or (tf.ones([4, 8]),), found.captures, {})


def test_a_slow_unit_is_seen_to_be_slow_forward_and_backward() -> None:
    units, done, found = cut_net()
    taken = {unit.name: make_ready(done, unit.index, around(found)).measure() for unit in units}
    by_name = {name: {sweep: each.seconds for sweep, each in sweeps.items()} for name, sweeps in taken.items()}
    assert {(u.index, sweep) for u in units for sweep in by_name[u.name]} == {
        (stage, sweep) for stage, sweep, _ in done.segments if sweep < 2
    }
    for sweep in (0, 1):
        others = [taken.get(sweep, 0.0) for name, taken in by_name.items() if name != "net/slow"]
        assert by_name["net/slow"][sweep] > 5 * max(others), by_name


def test_what_does_nothing_has_run_before_it_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    units, done, found = cut_net()
    original, calls, timed = profile._empty, {}, []

    def noted(function: Any, given: Any) -> Any:
        empty = original(function, given)

        def call(*tensors: tf.Tensor) -> Any:
            calls[call] += 1
            return empty(*tensors)

        calls[call] = 0
        return call

    def seconds(function: Any, given: Any) -> float:
        if function in calls:
            timed.append(calls[function])
        return 1.0

    monkeypatch.setattr(profile, "_empty", noted)
    ready = [make_ready(done, unit.index, around(found)) for unit in units]
    assert len(calls) == sum(len(unit.calls) for unit in ready)
    # From here on nothing is traced: ranks that measure at the same time have waited for each other.
    monkeypatch.setattr(profile, "_empty", None)
    monkeypatch.setattr(profile, "_seconds", seconds)
    for unit in ready:
        unit.measure()
    assert timed == [1] * len(calls), timed


class Wide(tf_keras.layers.Layer):
    """Has 16 MiB for a moment, forward and backward, and keeps next to nothing."""

    def call(self, x: tf.Tensor) -> tf.Tensor:
        return x + tf.reduce_sum(tf.tile(tf.reshape(x, [1, 32]), [1 << 17, 1])) * 0.0


class WithWide(tf_keras.Model):
    def __init__(self) -> None:
        super().__init__(name="net")
        self.first = tf_keras.layers.Dense(8, name="first")
        self.wide = Wide(name="wide")
        self.last = tf_keras.layers.Dense(3, name="last")

    def call(self, x: tf.Tensor) -> tf.Tensor:
        return self.last(self.wide(self.first(x)))


def test_what_a_unit_has_at_most_is_counted_forward_and_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    units, done, found = cut_net(WithWide)
    peaks = {
        unit.name: {sweep: taken.peak for sweep, taken in make_ready(done, unit.index, around(found)).measure().items()}
        for unit in units
    }
    if not allocator.counts():
        # Without oneDNN a processor's allocator counts nothing.
        assert {peak for sweeps in peaks.values() for peak in sweeps.values()} == {None}
        return
    # The allocator may hand out a piece that is nearly twice as large.
    assert all(16 * 2**20 <= peak < 32 * 2**20 for peak in peaks["net/wide"].values()), peaks
    assert set(peaks["net/first"].values()) == {0}
    monkeypatch.setattr(profile.allocator, "counts", lambda: False)
    assert {taken.peak for taken in make_ready(done, 0, around(found)).measure().values()} == {None}


def test_no_weights_of_two_units_are_there_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    units, done, found = cut_net()
    original, made, together = made_up.weight, [], []

    def noted(graph: Any, variable: int) -> tf.Tensor:
        value = original(graph, variable)
        made.append((graph.variables[variable].name.rpartition("/")[0], weakref.ref(value)))
        gc.collect()
        together.append({owner for owner, reference in made if reference() is not None})
        return value

    monkeypatch.setattr(made_up, "weight", noted)
    for unit in units:
        make_ready(done, unit.index, around(found)).measure()
    assert len({owner for owner, _ in made}) == 3, made
    assert all(len(owners) <= 1 for owners in together), together


def test_gradients_are_added_up_as_in_a_step_of_many_microbatches(monkeypatch: pytest.MonkeyPatch) -> None:
    units, done, found = cut_net()
    sums: list[TensorType] = []
    original = profile.Accumulator

    def noted(kind: TensorType, name: str) -> Any:
        sums.append(kind)
        return original(kind, name)

    monkeypatch.setattr(profile, "Accumulator", noted)
    ready = {unit.name: make_ready(done, unit.index, around(found)) for unit in units}
    # That of the last layer's bias needs nothing of the model, and is added up where the bias is, as the others are.
    assert sorted(kind.shape or () for kind in sums) == [(3,), (8,), (8, 3), (8, 8), (8, 8)]
    # The first unit's backward gives nothing but what is added up.
    function, given = ready["net/first"].calls[1]
    assert list(function(*given)) == []


class Router(tf_keras.layers.Layer):
    """Chooses an expert for each sample."""

    def build(self, shape: Any) -> None:
        self.kernel = self.add_weight("kernel", (8, 4))

    def call(self, x: tf.Tensor) -> tf.Tensor:
        return tf.argmax(x @ self.kernel, axis=-1)


class Expert(tf_keras.layers.Layer):
    """Has a row of its own for each choice, and looks at those samples only that chose the first."""

    def build(self, shape: Any) -> None:
        self.table = self.add_weight("table", (4, 8))

    def call(self, x: tf.Tensor, chosen: tf.Tensor) -> tf.Tensor:
        return tf.boolean_mask(x + tf.gather(self.table, chosen), chosen == 0)


class Routed(tf_keras.Model):
    def __init__(self) -> None:
        super().__init__(name="net")
        self.first = tf_keras.layers.Dense(8, name="first")
        self.router = Router(name="router")
        self.expert = Expert(name="expert")
        self.last = tf_keras.layers.Dense(3, name="last")

    def call(self, x: tf.Tensor) -> tf.Tensor:
        x = self.first(x)
        return self.last(self.expert(x, self.router(x)))


def test_indices_and_what_has_no_known_shape_are_computed() -> None:
    units, done, found = cut_net(Routed)
    given = around(found)
    for unit in units:
        assert make_ready(done, unit.index, given).calls
    by_name = {unit.name: unit.index for unit in units}
    wanted = {t for (stage, _, _), s in done.segments.items() for t in s.inputs if stage == by_name["net/last"]}
    foreign = [t for t in wanted if done.assignment.places[t.node].chunk == by_name["net/expert"]]
    [chosen] = [value for value in values_for(done, foreign, given).values() if value.shape.rank == 2]
    # All samples choose alike by weights that are all the same: the first expert.
    assert chosen.shape == [4, 8]
    indices = [t for t in done.segments[by_name["net/expert"], 0, 0].inputs if done.graph.type_of(t).dtype == "int64"]
    [value] = values_for(done, indices, given).values()
    assert value.numpy().tolist() == [0, 0, 0, 0]


def test_a_measurement_that_a_layer_takes_of_itself_counts_nothing_made_up() -> None:
    net = Net()
    net(tf.ones([4, 8]))
    seen = tf.Variable(0.0, trainable=False)

    def step(x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            y = net(x)
            loss = tf.reduce_sum(y)
        seen.assign_add(tf.reduce_mean(y))
        return tape.gradient(loss, net.trainable_variables), loss

    found = lowered(step, FLOATS, models=[net])
    units, done = cut_into_units(prune(found.graph))
    own = {n: v for n, v in enumerate(found.variables) if not found.graph.variables[n].in_model}
    assert len(own) == 1
    for unit in units:
        make_ready(done, unit.index, Surroundings([tf.ones([4, 8])], found.captures, own)).measure()
    assert float(seen) == 0.0
