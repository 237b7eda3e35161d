"""`@smp.step(whole_batch=True)` gives what one process computes of the whole batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import smp_tf as smp
from smp_tf.errors import StepError
from tests.full_only import params
from tests.smp_tf.whole_batch.own_gradients import USES, Uses
from tests.smp_tf.whole_batch.own_loops import (
    batches,
    compare,
    counting,
    f1,
    mean,
    net_of,
    penalised,
    training,
    value_of,
    with_local_outputs,
)
from tests.smp_tf.whole_batch.own_losses import COMPARING, LOSSES

pytestmark = pytest.mark.large


@pytest.mark.parametrize("use", params(list(USES), [use for use in USES if use != "of_all_in_a_row"]))
def test_what_is_made_of_gradients_is_made_of_those_of_the_batch(init: Callable[..., None], use: str) -> None:
    init(microbatches=4)
    assert compare(training(mean, USES[use])) < 1e-12


@pytest.mark.parametrize("eager", params([True, False], [False]))
def test_gradients_that_are_returned_as_they_are(init: Callable[..., None], eager: bool) -> None:
    init(microbatches=4)
    assert compare(training(mean, lambda gradients, *_: (gradients, {})), eager=eager) < 1e-12


@pytest.mark.parametrize("microbatches", params([1, 2, 3, 8], [1, 2, 3, 8]))
def test_that_is_so_for_any_number_of_microbatches(init: Callable[..., None], microbatches: int) -> None:
    init(microbatches=microbatches)
    assert compare(training(mean), sizes=(21, 20, 3, 1)) < 1e-12


@pytest.mark.parametrize(
    ("sizes", "options"),
    params([((10, 9), {"reduce_retracing": True}), ((10, 9, 8, 7, 6), {})], [((10, 9, 8, 7, 6), {})]),
)
def test_one_program_may_take_all_sizes(
    init: Callable[..., None], sizes: tuple[int, ...], options: dict[str, Any]
) -> None:
    init(microbatches=2)
    assert compare(training(mean), sizes=sizes, eager=True, **options) < 1e-12


def test_metrics_are_updated_once_per_batch(init: Callable[..., None]) -> None:
    init(microbatches=4)

    def make(model: Any, state: tf.Variable) -> Callable[..., Any]:
        tracker, auc = tf_keras.metrics.Mean(), tf_keras.metrics.AUC(num_thresholds=20)

        def evaluate(x: Any, y: Any) -> Any:
            p = model(x)
            loss = mean(y, p)
            tracker.update_state(loss)
            auc.update_state(tf.cast(y > 0.3, p.dtype), tf.sigmoid(p))
            state.assign_add(1.0)
            return [], {"loss": tracker.result(), "auc": auc.result(), "batches": state.read_value()}

        return evaluate

    assert compare(make) < 1e-12


@pytest.mark.parametrize("microbatches", params([1, 4], [1]))
def test_a_loss_may_depend_on_what_the_step_counts_up(init: Callable[..., None], microbatches: int) -> None:
    init(microbatches=microbatches)
    assert compare(counting) < 1e-12


@pytest.mark.full
def test_two_losses_may_be_differentiated(init: Callable[..., None]) -> None:
    """As the two phases of a GAN are: each layer is trained by one of them, and both gradients are clipped together."""
    init(microbatches=4)

    def make(model: Any, state: tf.Variable) -> Callable[..., Any]:
        def forward_backward(x: Any, y: Any) -> Any:
            with tf.GradientTape(persistent=True) as tape:
                p = model(x)
                near, far = mean(y, p), mean(-y, p)
            body, head = model.trainable_variables[:4], model.trainable_variables[4:]
            gradients = [*tape.gradient(near, body), *tape.gradient(far, head)]
            gradients, norm = tf.clip_by_global_norm(gradients, 0.1)
            return gradients, {"near": near, "far": far, "norm": norm}

        return forward_backward

    assert compare(make) < 1e-12


def test_a_batch_may_lie_along_another_axis(init: Callable[..., None]) -> None:
    init(microbatches=4)
    model = net_of(smp.DistributedModel)

    @smp.step(whole_batch=True, input_split_axes={"y": 1})
    def score(x: tf.Tensor, y: tf.Tensor) -> Any:
        return f1(tf.transpose(y), model(x))

    x, y = batches()[0]
    np.testing.assert_allclose(score(x, tf.transpose(y)).reduce_mean(), f1(y, model.call(x)), rtol=1e-12)


def test_an_argument_may_be_passed_whole(init: Callable[..., None]) -> None:
    init(microbatches=4)
    model = net_of(smp.DistributedModel)

    @smp.step(non_split_inputs=["limit"], whole_batch=True)
    def forward_backward(x: tf.Tensor, y: tf.Tensor, limit: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            loss = mean(y, model(x))
        gradients, norm = tf.clip_by_global_norm(tape.gradient(loss, model.trainable_variables), limit)
        return gradients, norm, limit

    x, y = batches()[0]
    gradients, norm, limit = forward_backward(x, y, tf.constant(0.2, tf.float64))
    found = tf.linalg.global_norm([gradient.accumulate() for gradient in gradients])
    assert float(norm.reduce_mean()) > 0.2
    assert float(found) == pytest.approx(0.2, rel=1e-12)
    assert float(limit.outputs[0]) == 0.2


def test_results_have_one_value_however_they_are_asked_for(init: Callable[..., None]) -> None:
    init(microbatches=4)
    model = net_of(smp.DistributedModel)

    @smp.step(whole_batch=True)
    def forward_backward(x: tf.Tensor, y: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            p = model(x)
            loss = mean(y, p)
        return tape.gradient(loss, model.trainable_variables), loss, p

    x, y = batches()[0]
    [kernel, *_], loss, outputs = forward_backward(x, y)
    for result in (kernel, loss, outputs):
        [value] = result.outputs
        for other in (result.accumulate(), result.reduce_mean(), result.reduce_sum(), result.stack()[0]):
            np.testing.assert_array_equal(other, value)
    np.testing.assert_array_equal(outputs.concat(), outputs.merge())
    assert outputs.concat().shape == (21, 3)


def test_local_outputs_stay_local(init: Callable[..., None]) -> None:
    init(microbatches=4)
    model = net_of(smp.DistributedModel)
    x, y = batches()[0]
    results = with_local_outputs(model)(x, y)
    np.testing.assert_allclose(results["outputs"].outputs[0], model.call(x), rtol=1e-12)

    @smp.step(whole_batch=True, local_outputs=["f1"])
    def scored(x: tf.Tensor, y: tf.Tensor) -> Any:
        return {"f1": f1(y, model(x))}

    with pytest.raises(StepError, match="local_outputs names a result that is no row for each sample"):
        scored(x, y)


def test_a_method_may_be_a_step(init: Callable[..., None]) -> None:
    init(microbatches=4)

    class Trainer:
        def __init__(self) -> None:
            self.model = net_of(smp.DistributedModel)

        @smp.step(whole_batch=True)
        def score(self, x: tf.Tensor, y: tf.Tensor) -> Any:
            return f1(y, self.model(x))

    trainer = Trainer()
    x, y = batches()[0]
    np.testing.assert_allclose(trainer.score(x, y).reduce_mean(), f1(y, trainer.model.call(x)), rtol=1e-12)


def test_python_control_flow_is_converted(init: Callable[..., None]) -> None:
    init(microbatches=4)
    model = net_of(smp.DistributedModel)

    @smp.step(whole_batch=True)
    def score(x: tf.Tensor, y: tf.Tensor) -> Any:
        found = f1(y, model(x))
        if found > 2.0:
            found = -found
        return found

    x, y = batches()[0]
    np.testing.assert_allclose(score(x, y).reduce_mean(), f1(y, model.call(x)), rtol=1e-12)


def refused(function: Callable[..., Any], *more: Any, **options: Any) -> str:
    """Returns the words with which a step is refused."""
    with pytest.raises(StepError) as error:
        smp.step(function, whole_batch=True, **options)(*batches()[0], *more)
    return str(error.value)


def test_what_cannot_be_had_is_refused_in_words(init: Callable[..., None]) -> None:
    init(microbatches=4)
    model = net_of(smp.DistributedModel)

    def noisy(x: tf.Tensor, y: tf.Tensor) -> Any:
        return {"noisy": mean(y, model(x)) + tf.random.normal([], dtype=tf.float64)}

    words = refused(noisy)
    assert "its result noisy cannot be computed once per batch: it depends on random numbers" in words

    def both(x: tf.Tensor, y: tf.Tensor) -> Any:
        return mean(y, model(x))

    assert "Leave out one of the two" in refused(both, keep_microbatch_gradients=True)

    def sized(x: tf.Tensor, y: tf.Tensor) -> Any:
        assert x.shape[0] != 21, "made for microbatches"
        return mean(y, model(x))

    assert "cannot be traced for all samples of a batch: made for microbatches" in refused(sized)


@pytest.mark.parametrize("loss", params([*LOSSES, *COMPARING], [*LOSSES, *list(COMPARING)[1:]]))
@pytest.mark.parametrize("eager", params([True, False], [False]))
def test_losses_count_samples_as_in_the_whole_batch(init: Callable[..., None], loss: str, eager: bool) -> None:
    init(microbatches=4)
    assert compare(training((LOSSES | COMPARING)[loss]), eager=eager, sizes=(21, 20, 8)) < 1e-12


def test_a_gradient_penalty_is_that_of_the_batch(init: Callable[..., None]) -> None:
    init(microbatches=4)

    assert compare(penalised) < 1e-12


def in_loops(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a `tf.function` that is given a dataset, whose batches are of sizes that it does not know."""

    @tf.function
    def run(data: Any) -> Any:
        total = tf.constant(0.0, tf.float64)
        for x, y in data:
            total += function(x, y)
        return total

    return run


def test_a_graph_may_leave_the_batch_size_open_where_losses_are_averages(init: Callable[..., None]) -> None:
    init(microbatches=4)
    model = net_of(smp.DistributedModel)
    model.build((None, 6))

    def clipped(loss_of: Callable[..., Any]) -> Callable[..., Any]:
        @smp.step(whole_batch=True)
        def forward_backward(x: tf.Tensor, y: tf.Tensor) -> Any:
            with tf.GradientTape() as tape:
                p = model(x)
                loss = loss_of(y, p)
            gradients, norm = tf.clip_by_global_norm(tape.gradient(loss, model.trainable_variables), 0.2)
            return gradients, {"norm": norm, "f1": f1(y, p)}

        return forward_backward

    (x, y), _ = batches((30, 1))
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(12)
    step = clipped(mean)

    def logged(x: tf.Tensor, y: tf.Tensor) -> Any:
        _, logs = step(x, y)
        return logs["norm"].reduce_mean() + logs["f1"].reduce_mean()

    found = in_loops(logged)(data)
    wanted = 0.0
    for part in data:
        with tf.GradientTape() as tape:
            p = model.call(part[0])
            loss = mean(part[1], p)
        wanted += tf.linalg.global_norm(tape.gradient(loss, model.trainable_variables)) + f1(part[1], p)
    np.testing.assert_allclose(found, wanted, rtol=1e-12)

    summed = clipped(lambda y, p: tf.reduce_sum(tf.square(y - p)))
    with pytest.raises(StepError, match="depends on the number of samples, which is left open"):
        in_loops(lambda x, y: summed(x, y)[1]["norm"].reduce_mean())(data)


@pytest.mark.full
def test_two_steps_may_make_one_update(init: Callable[..., None]) -> None:
    """Sharpness-aware minimisation: gradients are taken once more where the normalised gradient leads."""
    init(microbatches=4)

    def trained(base: type) -> list[np.ndarray]:
        model = net_of(base)
        model.build((None, 6))
        model.set_weights(Uses.weights(((6, 8), (8,), (8, 8), (8,), (8, 3), (3,))))
        weights = model.trainable_variables

        def uphill(x: tf.Tensor, y: tf.Tensor) -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(tf.square(y - model(x)))
            gradients = tape.gradient(loss, weights)
            norm = tf.linalg.global_norm(gradients)
            return [0.05 * gradient / norm for gradient in gradients], loss

        def downhill(x: tf.Tensor, y: tf.Tensor) -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(tf.square(y - model(x)))
            return tape.gradient(loss, weights)

        first, second = uphill, downhill
        if base is smp.DistributedModel:
            first, second = (smp.step(function, whole_batch=True) for function in (uphill, downhill))

        @tf.function
        def train(x: tf.Tensor, y: tf.Tensor) -> Any:
            ways, _ = tf.nest.map_structure(value_of, first(x, y))
            for weight, way in zip(weights, ways, strict=True):
                weight.assign_add(way)
            gradients = tf.nest.map_structure(value_of, second(x, y))
            for weight, way, gradient in zip(weights, ways, gradients, strict=True):
                weight.assign_sub(way + 0.01 * gradient)

        for batch in batches():
            train(*batch)
        return model.get_weights()

    for one, other in zip(trained(smp.DistributedModel), trained(tf_keras.Model), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-10, atol=1e-12)


def test_sparse_gradients_are_added_up_and_not_clipped(init: Callable[..., None]) -> None:
    init(microbatches=4)

    class Table(smp.DistributedModel):
        def __init__(self) -> None:
            super().__init__(name="table")
            self.table, self.head = tf_keras.layers.Embedding(5, 4), tf_keras.layers.Dense(3)

        def call(self, numbers: Any) -> Any:
            return self.head(self.table(numbers))

    model = Table()
    numbers, y = tf.constant(np.arange(21) % 5), batches()[0][1]
    optimizer = tf_keras.optimizers.SGD(0.1)

    @smp.step(whole_batch=True)
    def forward_backward(numbers: tf.Tensor, y: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.square(y - model(numbers)))
        return tape.gradient(loss, model.trainable_variables), loss

    gradients, _ = forward_backward(numbers, y)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.square(y - model.call(numbers)))
    wanted = tape.gradient(loss, model.trainable_variables)
    for one, other in zip(gradients, wanted, strict=True):
        np.testing.assert_allclose(tf.convert_to_tensor(one.accumulate()), tf.convert_to_tensor(other), rtol=1e-12)
    clipped, _ = smp.clip_by_global_norm([gradient.accumulate() for gradient in gradients], 1.0)
    optimizer.apply_gradients(zip(clipped, model.trainable_variables, strict=True))

    @smp.step(whole_batch=True)
    def clipping(numbers: tf.Tensor, y: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            loss = mean(y, model(numbers))
        return tf.clip_by_global_norm(tape.gradient(loss, model.trainable_variables), 1.0)

    with pytest.raises(StepError, match=r"a gradient is sparse.* smp\.clip_by_global_norm"):
        clipping(numbers, y)


def test_a_step_that_returns_nothing_may_update_metrics(init: Callable[..., None]) -> None:
    init(microbatches=4)
    model, seen, tracker = net_of(smp.DistributedModel), tf.Variable(0), tf_keras.metrics.Mean()

    @smp.step(whole_batch=True)
    def evaluate(x: tf.Tensor, y: tf.Tensor) -> None:
        tracker.update_state(f1(y, model(x)))
        seen.assign_add(1)

    scores = []
    for x, y in batches():
        assert evaluate(x, y=y) is None
        scores.append(float(f1(y, model.call(x))))
    tf.function(evaluate)(*batches()[0])
    assert int(seen) == 4
    np.testing.assert_allclose(tracker.result(), np.mean([*scores, scores[0]]), rtol=1e-12)


@pytest.mark.full
@pytest.mark.parametrize("options", [{}, {"jit_compile": True}])
def test_layers_may_mix_samples_and_draw_random_numbers(init: Callable[..., None], options: dict[str, Any]) -> None:
    """They see microbatches, as in any step. So the gradients of a mean are those of a step without the option."""

    class Net(smp.DistributedModel):
        def __init__(self) -> None:
            super().__init__(name="net")
            layers = tf_keras.layers
            self.all = [layers.Dense(8), layers.BatchNormalization(), layers.Dropout(0.5), layers.Dense(3)]

        def call(self, x: Any, training: bool = False) -> Any:
            for layer in self.all:
                x = layer(x) if isinstance(layer, tf_keras.layers.Dense) else layer(x, training=training)
            return x

    found = []
    for whole_batch in (False, True):
        init(microbatches=4)
        model = Net()

        @smp.step(whole_batch=whole_batch, **options)
        def forward_backward(x: tf.Tensor, y: tf.Tensor) -> Any:
            with tf.GradientTape() as tape:
                p = model(x, training=True)  # noqa: B023 - the step runs within the loop
                loss = mean(y, p)
            return tape.gradient(loss, model.trainable_variables), loss, p  # noqa: B023

        gradients, loss, p = forward_backward(*batches()[0])
        values = [gradient.accumulate() for gradient in gradients]
        found.append([*values, loss.reduce_mean(), p.concat(), model.all[1].moving_mean.numpy()])
        smp.shutdown()
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-10)


@pytest.mark.full
def test_a_step_goes_on_in_the_next_job_and_without_one_says_so(init: Callable[..., None]) -> None:
    found = []
    model = None

    @smp.step(whole_batch=True)
    def forward_backward(x: tf.Tensor, y: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.square(y - model(x)))
        return tape.gradient(loss, model.trainable_variables), loss

    for _ in range(2):
        init(microbatches=3)
        model = net_of(smp.DistributedModel)
        found.append([float(forward_backward(*batch)[1].reduce_mean()) for batch in batches((9, 8, 7, 6, 5))])
        smp.shutdown()
        with pytest.raises(smp.errors.NotInitializedError):
            forward_backward(*batches()[0])
    assert found[0] == found[1]


@pytest.mark.full
def test_an_optimizer_that_averages_takes_what_a_step_gives(init: Callable[..., None]) -> None:
    init(microbatches=4)
    model = net_of(smp.DistributedModel)
    optimizer = smp.DistributedOptimizer(tf_keras.optimizers.Adam(0.01))

    @smp.step(whole_batch=True)
    def forward_backward(x: tf.Tensor, y: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.square(y - model(x)))
        gradients, norm = tf.clip_by_global_norm(tape.gradient(loss, model.trainable_variables), 1.0)
        return gradients, norm

    @tf.function
    def train(x: tf.Tensor, y: tf.Tensor) -> Any:
        gradients, norm = forward_backward(x, y)
        optimizer.apply_gradients(
            [(g.accumulate(), v) for g, v in zip(gradients, model.trainable_variables, strict=True)]
        )
        return norm.reduce_mean(), smp.global_norm([gradient.accumulate() for gradient in gradients])

    norms = [train(*batch) for batch in batches()]
    assert all(float(norm) > 1.0 for norm, _ in norms)
    np.testing.assert_allclose([clipped for _, clipped in norms], 1.0, rtol=1e-12)


def test_what_else_cannot_be_had_is_refused_in_words(init: Callable[..., None]) -> None:
    init(microbatches=4)
    model = net_of(smp.DistributedModel)

    def ragged(x: tf.Tensor, y: tf.Tensor) -> Any:
        return tf.RaggedTensor.from_tensor(model(x))

    assert "returns a ragged or sparse tensor" in refused(ragged)

    def weighted(x: tf.Tensor, y: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            p = model(x)
        return tape.gradient(p, model.trainable_variables, output_gradients=y)

    assert "cannot be told how the loss counts samples that call 1 of tape.gradient" in refused(weighted)

    def symbolic(x: tf.Tensor, y: tf.Tensor) -> Any:
        loss = mean(y, model(x))
        return loss, tf.gradients(loss, model.trainable_variables)

    assert "its result 1/0 is made of gradients that are taken by something else" in refused(symbolic)

    class Sliced:
        def __init__(self, rows: tf.Tensor) -> None:
            self.rows = rows

        def smp_slice(self, num_mb: int, mb: int, axis: int) -> Any:
            return Sliced(tf.split(self.rows, num_mb)[mb])

    def sliced(x: tf.Tensor, y: tf.Tensor, more: Sliced) -> Any:
        return mean(y, model(x)) + tf.reduce_sum(more.rows)

    assert "cut by a method of their own have no whole batch" in refused(sliced, Sliced(tf.ones([8], tf.float64)))


def test_an_argument_may_choose_the_loss(init: Callable[..., None]) -> None:
    """Batches of the same shapes, of which one is summed, another averaged, and a third only scored."""
    init(microbatches=4)
    model = net_of(smp.DistributedModel)
    model.build((None, 6))

    def way(x: tf.Tensor, y: tf.Tensor, kind: str = "mean") -> Any:
        if kind == "score":
            return [], f1(y, model(x))
        with tf.GradientTape() as tape:
            loss = mean(y, model(x)) if kind == "mean" else tf.reduce_sum(tf.square(y - model(x)))
        return tape.gradient(loss, model.trainable_variables), loss

    step = smp.step(way, whole_batch=True)
    x, y = batches()[0]
    for kind in ("mean", "sum", "score", "mean"):
        gradients, value = step(x, y, kind=kind)
        loss_of = {"mean": mean, "sum": lambda y, p: tf.reduce_sum(tf.square(y - p)), "score": f1}[kind]
        with tf.GradientTape() as tape:
            wanted = loss_of(y, model.call(x))
        np.testing.assert_allclose(value.reduce_mean(), wanted, rtol=1e-12)
        for one, other in zip(gradients, tape.gradient(wanted, model.trainable_variables), strict=False):
            np.testing.assert_allclose(one.accumulate(), other, rtol=1e-10)


@pytest.mark.full
@pytest.mark.parametrize("loss", ["total", "in_batch_softmax"])
def test_a_signature_may_leave_the_batch_size_open(init: Callable[..., None], loss: str) -> None:
    init(microbatches=4)
    signature = [tf.TensorSpec([None, 6], tf.float64), tf.TensorSpec([None, 3], tf.float64)]
    assert compare(training((LOSSES | COMPARING)[loss]), eager=True, input_signature=signature) < 1e-12


@pytest.mark.full
@pytest.mark.parametrize("in_graph", [False, True])
def test_a_forward_pass_ahead_draws_what_the_step_draws(init: Callable[..., None], in_graph: bool) -> None:
    """The loss is no average, so a forward pass runs ahead. The gradient by the last bias shows the masks."""
    init(microbatches=4)

    class Net(smp.DistributedModel):
        def __init__(self) -> None:
            super().__init__(name="net")
            self.first, self.last = tf_keras.layers.Dense(8), tf_keras.layers.Dense(3)
            self.drop = tf_keras.layers.Dropout(0.5)

        def call(self, x: Any, training: bool = False) -> Any:
            return self.last(self.drop(self.first(x), training=training))

    model = Net()

    @smp.step(whole_batch=True)
    def forward_backward(x: tf.Tensor, y: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            p = model(x, training=True)
            loss = tf.sqrt(mean(y, p))
        return tape.gradient(loss, model.trainable_variables)[-1], p

    def run(x: tf.Tensor, y: tf.Tensor) -> Any:
        gradient, p = forward_backward(x, y)
        return gradient.accumulate(), p.concat()

    seen = []
    for _ in range(2):
        for x, y in batches((21, 20)):
            gradient, p = (tf.function(run) if in_graph else run)(x, y)
            with tf.GradientTape() as tape:
                tape.watch(p)
                loss = tf.sqrt(mean(y, p))
            np.testing.assert_allclose(gradient, tf.reduce_sum(tape.gradient(loss, p), 0), rtol=1e-10)
            seen.append(p)
    assert np.abs(seen[0] - seen[2]).max() > 0.1
