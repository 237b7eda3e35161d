"""`@smp.step` in one process: what it gives back for what it is given, when it traces, and what it refuses."""

from __future__ import annotations

import dataclasses
from collections import namedtuple
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from tf_keras import layers

import smp_tf as smp
from smp_tf.batch.output import StepOutput
from smp_tf.errors import NotInitializedError, StepError

X = np.arange(30, dtype=np.float32).reshape(10, 3) / 10.0
Y = np.arange(10, dtype=np.float32)

Result = namedtuple("Result", "loss sums")


class Sum(smp.DistributedModel):
    """Sums each sample, by two layers of weights that are all one."""

    def __init__(self) -> None:
        super().__init__(name="sum")
        self.first = layers.Dense(1, kernel_initializer="ones")
        self.second = layers.Dense(1, kernel_initializer="ones")

    def call(self, x: tf.Tensor) -> tf.Tensor:
        return self.second(self.first(x))[:, 0]


@pytest.fixture
def model(init: Callable[..., None]) -> Sum:
    """A model in a process of four microbatches."""
    init(microbatches=4)
    return Sum()


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the steps that are made ready, one for each program."""
    from smp_tf.steps.step import Step

    made: list[str] = []
    original = Step._prepare

    def prepare(self: Any, *arguments: Any) -> Any:
        made.append(self.name)
        return original(self, *arguments)

    monkeypatch.setattr(Step, "_prepare", prepare)
    return made


class TestResults:
    def test_every_tensor_comes_back_as_a_step_output_in_the_same_structure(self, model: Sum) -> None:
        @smp.step
        def step(x: tf.Tensor) -> Any:
            sums = model(x)
            return {"pair": (tf.reduce_mean(sums), [sums]), "named": Result(sums, 3), "none": None, "text": "as it is"}

        found = step(X[:8])
        assert isinstance(found["pair"], tuple)
        assert isinstance(found["named"], Result)
        assert (found["none"], found["text"], found["named"].sums) == (None, "as it is", 3)
        assert all(isinstance(o, StepOutput) for o in (found["pair"][0], found["pair"][1][0], found["named"].loss))
        assert found["pair"][1][0].concat().numpy() == pytest.approx(X[:8].sum(1), rel=1e-6)

    def test_the_body_runs_for_each_microbatch(self, model: Sum) -> None:
        @smp.step
        def step(x: tf.Tensor) -> Any:
            return tf.shape(x)[0], tf.reduce_sum(model(x))

        sizes, sums = step(X)
        assert [int(size) for size in sizes.outputs] == [3, 3, 2, 2]
        assert [float(s) for s in sums.outputs] == pytest.approx(
            [X[:3].sum(), X[3:6].sum(), X[6:8].sum(), X[8:].sum()], rel=1e-6
        )

    def test_a_mean_over_unequal_microbatches_is_that_of_the_batch(self, model: Sum) -> None:
        @smp.step
        def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
            return tf.reduce_mean((model(x) - y) ** 2)

        assert float(step(X, Y).reduce_mean()) == pytest.approx(float(np.mean((X.sum(1) - Y) ** 2)), rel=1e-6)

    def test_gradients_are_those_of_the_whole_batch(self, model: Sum) -> None:
        @smp.step
        def step(x: tf.Tensor, y: tf.Tensor) -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((model(x) - y) ** 2)
            return tape.gradient(loss, model.trainable_variables)

        first, *_, last = (gradient.accumulate().numpy() for gradient in step(X, Y))
        error = X.sum(1) - Y
        assert first.ravel() == pytest.approx(2 * np.mean(error[:, None] * X, axis=0), rel=1e-4)
        assert last.tolist() == pytest.approx([2 * np.mean(error)], rel=1e-4)

    def test_gradients_per_microbatch_are_kept_only_when_asked(self, model: Sum) -> None:
        def gradient_of_bias(x: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(model(x) ** 2)
            return tape.gradient(loss, model.second.bias)

        with pytest.raises(StepError, match="keep_microbatch_gradients=True"):
            _ = smp.step(gradient_of_bias)(X[:8]).outputs
        kept = smp.step(keep_microbatch_gradients=True)(gradient_of_bias)(X[:8])
        sums = X[:8].sum(1)
        assert [float(g[0]) for g in kept.outputs] == pytest.approx([2 * sums[n : n + 2].mean() for n in (0, 2, 4, 6)])
        assert float(kept.accumulate()[0]) == pytest.approx(2 * sums.mean())

    def test_only_the_gradient_of_a_linear_model(self, init: Callable[..., None]) -> None:
        """Bug: it needs nothing of the forward pass, so the step was said to call no model."""
        init(microbatches=2)
        linear = smp.DistributedModel(tf_keras.Sequential([layers.Dense(1, use_bias=False)]))

        @smp.step
        def step(x: tf.Tensor) -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(linear(x))
            return tape.gradient(loss, linear.trainable_variables)

        (gradient,) = step(X[:8])
        assert gradient.reduce_sum().numpy().ravel() == pytest.approx(X[:8].sum(0))
        assert gradient.accumulate().numpy().ravel() == pytest.approx(X[:8].sum(0) / 2)

    def test_a_variable_without_a_gradient_gives_none(self, model: Sum) -> None:
        unused = tf.Variable(1.0)

        @smp.step
        def step(x: tf.Tensor) -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(model(x))
            return loss, tape.gradient(loss, [model.second.bias, unused])

        _, (bias, nothing) = step(X[:8])
        assert nothing is None
        assert bias.accumulate().numpy().tolist() == [1.0]

    def test_ragged_results(self, model: Sum) -> None:
        @smp.step
        def step(x: tf.Tensor) -> Any:
            return tf.RaggedTensor.from_row_lengths(model(x), tf.fill([tf.shape(x)[0]], 1))

        found = step(X[:8]).concat()
        assert isinstance(found, tf.RaggedTensor)
        assert found.values.numpy() == pytest.approx(X[:8].sum(1), rel=1e-6)


class TestArguments:
    def test_numpy_tensors_lists_and_python_values(self, model: Sum) -> None:
        @smp.step
        def step(batch: Any, scale: float, double: bool = False) -> tf.Tensor:
            return model(batch["x"][0]) * scale * (2 if double else 1) + batch["y"]

        found = step({"x": [X], "y": tf.constant(Y)}, 0.5, double=True).concat()
        assert found.numpy() == pytest.approx(X.sum(1) + Y, rel=1e-6)

    @pytest.mark.parametrize("in_graph", [False, True], ids=["eager", "graph"])
    def test_a_set_of_references(self, model: Sum, in_graph: bool) -> None:
        @smp.step
        def step(batch: set[Any]) -> Any:
            x, y = (reference.deref() for reference in batch)
            return tf.shape(x)[0], model(x) + tf.cast(y, tf.float32)

        told = []

        def call(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
            sizes, sums = step({y.ref(), x.ref()})
            told.append(len(sizes.outputs))
            return sums.concat()

        found = (tf.function(call) if in_graph else call)(tf.constant(X), tf.constant(Y, tf.int32))
        assert found.numpy() == pytest.approx(X.sum(1) + Y, rel=1e-6)
        assert told == [4]

    def test_what_is_not_split_comes_whole(self, model: Sum) -> None:
        @smp.step(non_split_inputs=["rate", "table"])
        def step(x: tf.Tensor, rate: tf.Tensor, table: tf.Tensor) -> tf.Tensor:
            return model(x) * rate + tf.reduce_sum(table)

        found = step(X, tf.constant(2.0), tf.ones([7])).concat()
        assert found.numpy() == pytest.approx(2 * X.sum(1) + 7, rel=1e-6)

    def test_along_another_axis(self, model: Sum) -> None:
        @smp.step(input_split_axes={"x": 1})
        def step(x: tf.Tensor) -> tf.Tensor:
            return model(tf.transpose(x))

        assert step(X.T).concat().numpy() == pytest.approx(X.sum(1), rel=1e-6)

    def test_a_ragged_batch(self, model: Sum) -> None:
        @smp.step
        def step(rows: tf.RaggedTensor) -> tf.Tensor:
            return model(tf.stack([tf.reduce_sum(rows, 1)] * 3, axis=1))

        rows = tf.ragged.constant([[1.0], [2.0, 3.0], [], [4.0], [5.0]])
        assert step(rows).concat().numpy().tolist() == [3.0, 15.0, 0.0, 12.0, 15.0]

    def test_an_input_signature_casts(self, model: Sum) -> None:
        @smp.step(input_signature=[tf.TensorSpec([None, 3], tf.float32)])
        def step(x: tf.Tensor) -> tf.Tensor:
            return model(x)

        assert step([[1, 2, 3]] * 4).concat().numpy().tolist() == [6.0] * 4

    def test_a_batch_whose_size_is_known_only_when_it_runs(self, model: Sum) -> None:
        @smp.step
        def step(x: tf.Tensor) -> tf.Tensor:
            return tf.reduce_mean(model(x))

        @tf.function(input_signature=[tf.TensorSpec([None, 3])])
        def run(x: tf.Tensor) -> tf.Tensor:
            return step(x).reduce_mean()

        assert float(run(X)) == pytest.approx(X.sum(1).mean(), rel=1e-6)
        assert float(run(X[:7])) == pytest.approx(X[:7].sum(1).mean(), rel=1e-6)


class TestPrograms:
    def test_a_step_without_anything_to_cut_runs_once(self, model: Sum) -> None:
        result = smp.step(lambda: model(tf.ones([6, 3])))()
        assert [value.shape[0] for value in result.outputs] == [6]

    def test_tensorflows_warning_of_retracing_does_not_show_the_program(
        self, model: Sum, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Bug: seven sizes of batches made it print 300 kB, and it came without any retracing."""
        step = smp.step(lambda x: model(x))
        for size in range(4, 11):
            step(X[:size])
        assert "retracing" not in caplog.text
        assert len(repr(next(iter(step._programs.values())))) < 100

    def test_calls_alike_share_one(self, model: Sum, traces: list[str]) -> None:
        @smp.step
        def step(x: tf.Tensor, scale: float) -> tf.Tensor:
            return model(x) * scale

        for batch in (X[:8], X[1:9], tf.constant(X[:8])):
            step(batch, 2.0)
        assert traces == ["step"]

    def test_other_shapes_and_other_python_values_get_another(self, model: Sum, traces: list[str]) -> None:
        @smp.step
        def step(x: tf.Tensor, scale: float) -> tf.Tensor:
            return model(x) * scale

        assert step(X[:8], 2.0).concat().numpy() == pytest.approx(2 * X[:8].sum(1), rel=1e-6)
        assert step(X[:8], 3.0).concat().numpy() == pytest.approx(3 * X[:8].sum(1), rel=1e-6)
        assert step(X[:6], 3.0).concat().numpy() == pytest.approx(3 * X[:6].sum(1), rel=1e-6)
        assert len(traces) == 3

    def test_a_later_batch_smaller_than_the_microbatches_is_cut_into_fewer(self, model: Sum) -> None:
        @smp.step
        def step(x: tf.Tensor) -> tf.Tensor:
            return model(x)

        step(X)
        assert len(step(X[:3]).outputs) == 3
        assert step(X[:3]).concat().numpy() == pytest.approx(X[:3].sum(1), rel=1e-6)

    def test_in_a_function_it_is_the_same(self, model: Sum) -> None:
        @smp.step
        def step(x: tf.Tensor) -> tf.Tensor:
            return tf.reduce_mean(model(x))

        @tf.function
        def run(x: tf.Tensor) -> tf.Tensor:
            return step(x).reduce_mean()

        assert float(run(X)) == pytest.approx(float(step(X).reduce_mean()))

    def test_a_step_may_be_a_method(self, model: Sum) -> None:
        class Trainer:
            def __init__(self, scale: float) -> None:
                self.scale = scale

            @smp.step
            def step(self, x: tf.Tensor) -> tf.Tensor:
                return model(x) * self.scale

        one, two = Trainer(1.0), Trainer(2.0)
        assert one.step is one.step
        assert two.step(X).concat().numpy() == pytest.approx(2 * one.step(X).concat().numpy(), rel=1e-6)

    def test_a_step_can_be_used_again_after_shutdown(self, model: Sum) -> None:
        models = [model]

        @smp.step
        def step(x: tf.Tensor) -> tf.Tensor:
            return models[-1](x)

        step(X)
        smp.shutdown()
        with pytest.raises(NotInitializedError):
            step(X)
        smp.init({"microbatches": 2})
        models.append(Sum())
        assert len(step(X).outputs) == 2

    def test_python_over_tensors_is_converted_unless_switched_off(self, model: Sum) -> None:
        def body(x: tf.Tensor) -> tf.Tensor:
            y = model(x)
            if tf.reduce_sum(x) > 1000.0:
                y = y * 0.0
            return y

        assert smp.step(body)(X).concat().numpy() == pytest.approx(X.sum(1), rel=1e-6)
        with pytest.raises(tf.errors.OperatorNotAllowedInGraphError):
            smp.step(autograph=False)(body)(X)


class TestHooks:
    def test_a_hook_runs_once_after_partitioning_and_eagerly(self, model: Sum) -> None:
        seen = []

        @smp.register_post_partition_hook
        def hook() -> None:
            seen.append((tf.executing_eagerly(), [v.numpy().tolist() for v in model.local_variables]))

        @smp.step
        def step(x: tf.Tensor) -> tf.Tensor:
            return model(x)

        assert seen == []
        step(X)
        step(X[:8])
        assert seen == [(True, [[[1.0], [1.0], [1.0]], [0.0], [[1.0]], [0.0]])]

    def test_a_hook_that_never_ran_ends_with_shutdown(self, init: Callable[..., None]) -> None:
        seen: list[str] = []
        init(microbatches=2)
        smp.register_post_partition_hook(lambda: seen.append("left over"))
        smp.shutdown()
        init(microbatches=2)
        again = Sum()
        smp.step(lambda x: again(x))(X[:8])
        assert seen == []

    def test_it_must_be_a_function(self) -> None:
        with pytest.raises(TypeError, match=r"A post-partition hook is a function without arguments\. Received: 3"):
            smp.register_post_partition_hook(3)


class TestRefused:
    def test_before_init(self, keras_defaults: None) -> None:
        with pytest.raises(NotInitializedError, match="smp_tf is not initialised"):
            smp.step(lambda x: x)(X)

    def test_a_first_batch_smaller_than_the_microbatches(self, model: Sum) -> None:
        @smp.step
        def train(x: tf.Tensor) -> tf.Tensor:
            return model(x)

        with pytest.raises(StepError) as raised:
            train(X[:3])
        assert str(raised.value) == (
            "The first batch of step 'train' has 3 samples, fewer than the 4 microbatches it is to be cut into. Use "
            "batches of at least 4 samples, or fewer microbatches."
        )

    def test_an_empty_batch(self, model: Sum) -> None:
        step = smp.step(lambda x: model(x))
        step(X)
        with pytest.raises(StepError, match=r"was given a batch without samples\. Leave empty batches out"):
            step(X[:0])

    def test_an_object_that_holds_tensors(self, model: Sum) -> None:
        batch = SimpleNamespace(x=tf.constant(X))
        with pytest.raises(StepError, match="argument 'batch' is a SimpleNamespace that holds tensors"):
            smp.step(lambda batch: model(batch.x))(batch)

    def test_running_functions_eagerly(self, model: Sum) -> None:
        step = smp.step(lambda x: model(x))
        tf.config.run_functions_eagerly(True)
        try:
            with pytest.raises(StepError, match=r"cannot run op by op\. Switch tf\.config\.run_functions_eagerly off"):
                step(X)
        finally:
            tf.config.run_functions_eagerly(False)

    def test_a_tape_around_it(self, model: Sum) -> None:
        @smp.step
        def train(x: tf.Tensor) -> tf.Tensor:
            return model(x)

        with tf.GradientTape(), pytest.raises(StepError, match=r"'train' was called under a tf\.GradientTape"):
            train(X)

    def test_no_model_in_it(self, model: Sum) -> None:
        @smp.step
        def body(x: tf.Tensor) -> tf.Tensor:
            return x * 2.0

        with pytest.raises(
            StepError, match="'body' calls no distributed model and no layer of one, so there is nothing to split"
        ):
            body(X)

    def test_returning_references(self, model: Sum) -> None:
        @smp.step
        def body(x: tf.Tensor) -> Any:
            return model(x), {tf.reduce_sum(x).ref()}

        words = "Step 'body' returns a reference to a tensor, or a set of them, which mean"
        with pytest.raises(StepError, match=words):
            body(X)

    def test_a_model_called_in_a_branch_of_the_step(self, model: Sum) -> None:
        @smp.step
        def body(x: tf.Tensor) -> tf.Tensor:
            return tf.cond(tf.reduce_sum(x) > 0, lambda: model(x), lambda: tf.zeros([len(x)]))

        with pytest.raises(StepError, match=r"Model 'sum' was called inside a tf\.cond, a loop or a compiled function"):
            body(X)

    @pytest.mark.parametrize("returned", [lambda x, y: None, lambda x, y: x, lambda x, y: []], ids=["None", "x", "[]"])
    def test_nothing_returned_that_depends_on_the_model(self, model: Sum, returned: Callable[..., Any]) -> None:
        @smp.step
        def body(x: tf.Tensor) -> Any:
            return returned(x, model(x))

        with pytest.raises(StepError, match="Nothing that step 'body' returns or updates depends on the model"):
            body(X)

    def test_nothing_returned_but_a_metric_updated(self, model: Sum) -> None:
        """It was once refused."""
        total = tf_keras.metrics.Sum()

        @smp.step
        def body(x: tf.Tensor) -> None:
            total(model(x))

        @smp.step
        def told(x: tf.Tensor) -> Any:
            return model(x)

        assert body(X) is None
        assert float(total.result()) == pytest.approx(float(tf.reduce_sum(told(X).concat())))

    def test_assigning_a_weight_in_it(self, model: Sum) -> None:
        @smp.step
        def body(x: tf.Tensor) -> tf.Tensor:
            y = model(x)
            model.second.bias.assign_add([1.0])
            return y

        with pytest.raises(StepError, match=r"'body' assigns the trainable weight 'sum/dense_1/bias' .*after the step"):
            body(X)

    def test_a_gradient_of_what_each_microbatch_writes_anew(self, model: Sum) -> None:
        """It was once a KeyError."""
        count = tf.Variable(0.1, trainable=False)

        @smp.step
        def body(x: tf.Tensor) -> Any:
            with tf.GradientTape() as tape:
                loss = count * tf.reduce_mean(model(x))
            count.assign_add(0.1)
            return tape.gradient(loss, model.trainable_variables)

        with pytest.raises(StepError, match=r"depends on 'Variable', .* each of its 4 microbatches"):
            body(X)

    @pytest.mark.parametrize("option", [{"non_split_inputs": ["z"]}, {"input_split_axes": {"z": 1}}], ids=str)
    def test_an_option_for_a_parameter_that_is_not_there(self, option: dict[str, Any]) -> None:
        (name,) = option
        with pytest.raises(StepError) as raised:

            @smp.step(**option)
            def body(x: tf.Tensor, y: tf.Tensor) -> None: ...

        assert str(raised.value) == f"{name} of step 'body' names 'z', but the step's parameters are x, y."

    def test_arguments_that_do_not_fit_the_function(self, model: Sum) -> None:
        @smp.step
        def body(x: tf.Tensor) -> tf.Tensor:
            return model(x)

        with pytest.raises(TypeError, match="Step 'body': too many positional arguments"):
            body(X, X)

    def test_a_local_output_that_is_not_returned(self, model: Sum) -> None:
        @smp.step(local_outputs=["sums"])
        def body(x: tf.Tensor) -> Any:
            return {"loss": model(x)}

        with pytest.raises(StepError, match="local_outputs names 'sums', which is not in what the step returns"):
            body(X)

    def test_errors_keep_their_type_inside_a_function(self, model: Sum) -> None:
        @smp.step
        def body(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
            return model(x) + y

        @tf.function
        def run() -> None:
            body(tf.constant(X), tf.constant(Y[:5]))

        with pytest.raises(StepError, match="need the same number of samples: 'x' has 10, 'y' has 5"):
            run()


def test_the_decorator_keeps_name_and_documentation() -> None:
    @smp.step
    def train(x: tf.Tensor) -> None:
        """Trains."""

    assert (train.name, train.__name__, train.__doc__) == ("train", "train", "Trains.")


def test_metrics_updated_in_a_step_see_every_microbatch(model: Sum) -> None:
    metric = tf_keras.metrics.Mean()

    @smp.step
    def step(x: tf.Tensor) -> tf.Tensor:
        sums = model(x)
        metric.update_state(sums)
        return sums

    step(X)
    assert float(metric.result()) == pytest.approx(X.sum(1).mean(), rel=1e-6)
    assert float(metric.count) == 10.0


@dataclasses.dataclass(frozen=True)
class Report:
    loss: Any
    parts: Any = None
    name: str = "report"


class Opaque:
    def __init__(self, value: Any) -> None:
        self.value = value


class TestRecordsAreReturned:
    @pytest.mark.parametrize("microbatches", [1, 4])
    @pytest.mark.parametrize("in_graph", [False, True], ids=["eager", "graph"])
    def test_a_dataclass_comes_back_with_step_outputs(
        self, init: Callable[..., None], microbatches: int, in_graph: bool
    ) -> None:
        init(microbatches=microbatches)
        model = Sum()

        @smp.step
        def step(x: tf.Tensor) -> Any:
            sums = model(x)
            return {"inner": [Report(tf.reduce_mean(sums), Report(sums, None, "sums"))]}

        seen = []

        def run(x: tf.Tensor) -> tf.Tensor:
            found = step(x)["inner"][0]
            seen.append(found)
            return found.parts.loss.merge()

        run = tf.function(run) if in_graph else run
        assert run(tf.constant(X[:8])).numpy() == pytest.approx(X[:8].sum(1))
        assert isinstance(seen[0], Report)
        assert isinstance(seen[0].loss, StepOutput)
        assert (seen[0].name, seen[0].parts.name, seen[0].parts.parts) == ("report", "sums", None)

    def test_its_fields_can_be_named_as_local(self, model: Sum) -> None:
        @smp.step(local_outputs=["parts"])
        def step(x: tf.Tensor) -> Any:
            return Report(tf.reduce_mean(model(x)), model(x))

        assert step(X[:8]).parts.is_local

    @pytest.mark.parametrize("microbatches", [1, 4])
    def test_objects_that_hide_tensors_are_refused(self, init: Callable[..., None], microbatches: int) -> None:
        init(microbatches=microbatches)
        model = Sum()

        @smp.step
        def step(x: tf.Tensor) -> Any:
            return tf.reduce_mean(model(x)), [Opaque(model(x))]

        with pytest.raises(StepError, match=r"Step 'step' returns a Opaque that holds tensors\. .* or dataclass"):
            step(X[:8])


class Encoding(smp.DistributedModel):
    """A model with other ways into it than a call."""

    def __init__(self) -> None:
        super().__init__(name="encoding")
        self.encoder = layers.Dense(4, kernel_initializer="ones")
        self.decoder = tf_keras.Sequential([layers.Dense(1, kernel_initializer="ones")], name="decoder")

    def encode(self, x: tf.Tensor) -> tf.Tensor:
        return tf.nn.relu(self.encoder(x))

    def call(self, x: tf.Tensor) -> tf.Tensor:
        return self.decoder(self.encode(x))


class TestOtherMethodsOfAModel:
    @pytest.mark.parametrize(
        "use",
        [
            lambda m, x: m.decoder(m.encode(x)),
            lambda m, x: m.decoder(tf.nn.relu(m.encoder(x))),
            lambda m, x: m(x) + 0.0 * tf.reduce_sum(m.encode(x)),
        ],
        ids=["method", "layers", "call and method"],
    )
    def test_its_layers_are_cut_as_in_a_call(self, init: Callable[..., None], use: Callable[..., Any]) -> None:
        init(microbatches=4)
        model = Encoding()

        @smp.step
        def step(x: tf.Tensor) -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(use(model, x))
            return loss, tape.gradient(loss, model.trainable_variables)

        loss, gradients = step(X[:8])
        assert float(loss.reduce_mean()) == pytest.approx(4.0 * X[:8].sum(1).mean())
        assert [g.accumulate().shape.as_list() for g in gradients] == [[3, 4], [4], [4, 1], [1]]
        assert len(model.local_variables) == 4

    def test_layers_of_the_script_are_no_models(self, model: Sum) -> None:
        scripts = layers.Dense(1, kernel_initializer="ones")

        @smp.step
        def step(x: tf.Tensor) -> Any:
            return scripts(x)

        with pytest.raises(StepError, match="calls no distributed model and no layer of one"):
            step(X[:8])
