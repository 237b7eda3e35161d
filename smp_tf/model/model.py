"""`smp.DistributedModel`: a Keras model whose layers and weights are spread over the partitions."""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from smp_tf import tf_internals
from smp_tf.errors import StepError
from smp_tf.job import runtime
from smp_tf.keras import adapter
from smp_tf.keras.bases import Model, not_an_override
from smp_tf.keras.strategy_scope import refuse_strategy
from smp_tf.model import loading, profiling, saving, sharded_weights, summary
from smp_tf.optimizer.install import patch_keras
from smp_tf.partition.layout import Layout
from smp_tf.steps import early_places
from smp_tf.training.logs import average_now, summed_states
from smp_tf.training.loops import predict_function, run_loop, test_function, train_function
from smp_tf.variables.fed_types import FedTypes
from smp_tf.variables.guarded import building_model, tracing_step
from smp_tf.variables.model_context import in_keras_loop, is_saving, is_writing, step_being_traced
from smp_tf.variables.models import is_built, register
from smp_tf.variables.store import VariableStore


class _Wrapping:
    """What `smp.DistributedModel(model)` does; `wrapped.py`, which is built upon this file, says it."""

    wrap: Callable[..., Any]


def wrap_with(wrap: Callable[..., Any]) -> None:
    """Sets the function that makes a distributed model around one of Keras's."""
    _Wrapping.wrap = staticmethod(wrap)


class _DeferredConstruction(type(Model)):  # type: ignore[misc]
    """Metaclass that gives variables no storage yet while a distributed model is constructed."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        runtime.current()  # an error that says so where smp.init was forgotten
        patch_keras()
        refuse_strategy(f"A {cls.__name__} was made")
        if cls is DistributedModel:
            return _Wrapping.wrap(*args, **kwargs)
        store = VariableStore(cls.__name__)
        # Keras calls the layers of a functional model in a graph of its own while the model is constructed. The rank
        # that will store a value reads it from the constructor's files.
        with tf.variable_creator_scope(store.creator), building_model(), adapter.archives().values_read_late():
            model = super().__call__(*args, **kwargs)
        model._smp_store.extend(store)
        register(model)
        return model


class DistributedModel(Model, metaclass=_DeferredConstruction):
    """A Keras model that is split over the partitions of a replica.

    Subclass it as you would subclass `tf_keras.Model`, with layers made in `__init__` and used in `call`. Or wrap a
    model: `smp.DistributedModel(model)` for one that exists, `smp.DistributedModel(lambda: build())` for one that is to
    be built without ever holding its weights in one place. Call it inside a function decorated with `@smp.step`.

    Args:
        model: a Keras model, or a function without arguments that returns one; for wrapping only.

    Raises:
        NotInitializedError: `smp.init` was not called.
        StepError: the model was called outside a step.

    Example:
        >>> class Net(smp.DistributedModel):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.hidden = tf_keras.layers.Dense(64, activation="relu")
        ...         self.head = tf_keras.layers.Dense(10)
        ...
        ...     def call(self, x):
        ...         return self.head(self.hidden(x))
        >>> model = Net()
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Makes the model and the store of its variables, which must exist before `__init__` runs."""
        model = super().__new__(cls, *args, **kwargs)
        object.__setattr__(model, "_smp_store", VariableStore(cls.__name__))
        object.__setattr__(model, "_smp_fed", FedTypes())
        # The logs of its last batch that were results of metrics.
        object.__setattr__(model, "_smp_logs_of_metrics", frozenset())
        object.__setattr__(model, "_smp_states_of_all", frozenset())
        return model

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the model, inside a step, or on symbolic Keras inputs to build it."""
        trace = step_being_traced()
        if trace is None:
            if not self.built and in_keras_loop():
                self._build_for(args, kwargs)
                return None
            if not _is_symbolic(args, kwargs) and not is_saving():
                raise StepError(
                    f"Model {self.name!r} was called outside a step. Its layers live on different ranks, so it can be "
                    f"called only inside a function decorated with @smp.step, which smp_tf cuts."
                )
            with self._without_storage():
                return super().__call__(*args, **kwargs)
        with trace.model_call(self):
            return super().__call__(*args, **kwargs)

    def _build_for(self, args: Any, kwargs: Any) -> None:
        """Makes the variables for inputs like these, without storage, and computes nothing."""
        with tf_internals.scratch_graph("build").as_default(), self._without_storage():
            like = tf.nest.map_structure(
                lambda value: tf.zeros(tf.shape(value), value.dtype) if tf.is_tensor(value) else value, (args, kwargs)
            )
            super().__call__(*like[0], **like[1])

    @not_an_override
    def build(self, input_shape: Any) -> None:
        """Makes the variables for inputs of a shape, without storage, as `tf_keras.Model.build` does.

        Args:
            input_shape: shape of a batch, with None for the number of samples; or a structure of shapes.

        Example:
            >>> net = smp.DistributedModel(lambda: tf_keras.Sequential([tf_keras.layers.Dense(2)]))
            >>> net.build([None, 3])
            >>> [variable.shape.as_list() for variable in net.variables]
            [[3, 2], [2]]
        """
        with self._without_storage():
            self._build(input_shape)

    def _build(self, input_shape: Any) -> None:
        super().build(input_shape)

    @contextlib.contextmanager
    def _without_storage(self) -> Iterator[None]:
        """Makes ops, within its context, that only say which variables there are. The plan gives these storage."""
        with tf.variable_creator_scope(self._smp_store.creator), tracing_step():
            yield

    @property
    def local_variables(self) -> list[Any]:
        """Returns the variables that this rank stores, in the order of `variables`.

        Raises:
            StepError: no step has run yet, so it is not decided who stores what.
        """
        return [v for v in adapter.layers().variables_of(self) if self._is_local(v)]

    @property
    def local_trainable_variables(self) -> list[Any]:
        """Returns the trainable variables that this rank stores, in the order of `trainable_variables`.

        Raises:
            StepError: no step has run yet, so it is not decided who stores what.
        """
        return [v for v in self.trainable_variables if self._is_local(v)]

    @not_an_override
    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Chooses optimizer, losses and metrics, as `tf_keras.Model.compile` does."""
        refuse_strategy(f"Model {self.name!r} was compiled")
        super().compile(*args, **kwargs)

    def fit(self, *args: Any, **kwargs: Any) -> Any:
        """Trains the model, as `tf_keras.Model.fit` does.

        Every rank calls it with the same arguments.

        All ranks of a replica are given the same batches, and the batch size is that of a replica. The history is the
        same on every rank, and callbacks take the same decisions. Rank 0 writes files and shows progress.

        Args:
            *args: arguments of `tf_keras.Model.fit`.
            **kwargs: further arguments, by keyword.

        Returns:
            Keras's `History`: losses and metrics over the batches of all replicas.

        Raises:
            StepError: the model was compiled with run_eagerly, or its `train_step` cannot be run in microbatches.

        Example:
            >>> model.compile(optimizer="adam", loss="mse")
            >>> history = model.fit(inputs, targets, batch_size=32, epochs=3)
        """
        return run_loop(self, super().fit, args, kwargs)

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the losses and metrics, as `tf_keras.Model.evaluate` gives them, over the batches of all replicas.

        Args:
            *args: arguments of `tf_keras.Model.evaluate`. All ranks of a replica are given the same.
            **kwargs: further arguments, by keyword.

        Returns:
            A number, a list of numbers or, with `return_dict=True`, a dictionary. It is the same on every rank.

        Example:
            >>> loss = model.evaluate(inputs, targets)
        """
        return run_loop(self, super().evaluate, args, kwargs)

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the predictions for this replica's inputs, as `tf_keras.Model.predict` does.

        Args:
            *args: arguments of `tf_keras.Model.predict`. All ranks of a replica are given the same.
            **kwargs: further arguments, by keyword.

        Returns:
            Arrays, on every rank of the replica.

        Example:
            >>> classes = model.predict(inputs).argmax(-1)
        """
        return run_loop(self, super().predict, args, kwargs)

    @not_an_override
    def get_metrics_result(self) -> dict[str, Any]:
        """Returns the results of the metrics by name; between batches, over all replicas, so every rank calls it."""
        if not tf.executing_eagerly():
            traced: dict[str, Any] = super().get_metrics_result()
            return traced
        with summed_states(self.metrics, self._smp_states_of_all):
            summed: dict[str, Any] = super().get_metrics_result()
        return summed

    def _validate_and_get_metrics_result(self, logs: Any) -> Any:
        """Returns Keras's final logs from those of the last batch, at the end of an epoch and of an evaluation.

        Keras replaces logs by the results of metrics with the same names, which are those of all replicas then. If a
        `train_step` or `test_step` returns anything else, this is averaged here, even a batch's value under a metric's
        name. The method is private to Keras, and is in tf_keras 2.16 to 2.21.
        """
        found = super()._validate_and_get_metrics_result(logs)
        if found is not logs or not isinstance(logs, dict) or runtime.current().topology.replicas == 1:
            return found
        summed = self.get_metrics_result()
        return average_now(logs, 1, "the logs of an epoch or evaluation") | {
            name: value for name, value in summed.items() if name in logs and name in self._smp_logs_of_metrics
        }

    def make_train_function(self, force: bool = False) -> Callable[[Any], Any]:
        """Returns the function that `fit` calls for every batch: `train_step` for one microbatch, cut and pipelined.

        Args:
            force: whether to make a new one where there is one.

        Returns:
            A function of an iterator over batches that returns the logs.
        """
        made: Callable[[Any], Any] | None = self.train_function  # type: ignore[has-type]
        if made is None or force:
            made = self.train_function = train_function(self)
        return made

    def make_test_function(self, force: bool = False) -> Callable[[Any], Any]:
        """Returns the function that `evaluate` calls for every batch: `test_step`, cut and pipelined."""
        made: Callable[[Any], Any] | None = self.test_function  # type: ignore[has-type]
        if made is None or force:
            made = self.test_function = test_function(self)
        return made

    def make_predict_function(self, force: bool = False) -> Callable[[Any], Any]:
        """Returns the function that `predict` calls for every batch: `predict_step`, cut and pipelined."""
        made: Callable[[Any], Any] | None = self.predict_function  # type: ignore[has-type]
        if made is None or force:
            made = self.predict_function = predict_function(self)
        return made

    def save(
        self,
        filepath: str | os.PathLike[str],
        overwrite: bool = True,
        save_format: str | None = None,
        **options: Any,
    ) -> None:
        """Writes the whole model, as `tf_keras.Model.save` does.

        Every rank calls it.

        See `save_model`.

        Args:
            filepath: a folder for a SavedModel, or a file that ends in `.keras` or `.h5`.
            overwrite: whether what is there may be replaced.
            save_format: "tf", "keras" or "h5". It must fit the path, which decides.
            **options: not supported. Anything but Keras's defaults is an error.

        Raises:
            StepError: something is there already, the format does not fit the path, or options were given.

        Example:
            >>> model.save("trained")
        """
        saving.save(self, filepath, overwrite, save_format, options)

    def export(self, filepath: str | os.PathLike[str]) -> None:
        """Raises an error, since `save_model` writes the model.

        Args:
            filepath: a folder.

        Raises:
            StepError: always.
        """
        saving.refuse_writer(self, "model.export")

    def _trackable_children(self, save_type: str = "checkpoint", **kwargs: Any) -> Any:
        if save_type == "savedmodel" and not is_saving():
            saving.refuse_writer(self, "tf.saved_model.save, or tf.keras.models.save_model,")
        return super()._trackable_children(save_type, **kwargs)

    def save_own_variables(self, store: Any) -> None:
        """Writes the variables that belong to no layer of the model, where `save_weights` has Keras write a file."""
        if not is_writing():
            saving.refuse_writer(self, "tf.keras.models.save_model, or what copies or pickles a model,")
        super().save_own_variables(store)

    def save_model(self, path: str | os.PathLike[str]) -> None:
        """Writes the whole, unsplit model.

        Every rank must call it. Rank 0 writes, and never holds more than one weight of another rank. It may be called
        before the first step, such as after `manager.restore()`.

        Args:
            path: a folder for a SavedModel, which `tf_keras.models.load_model` reads without smp_tf; a file that ends
                in `.keras` or `.h5` for a wrapped model, which is read in the same way; or a file that ends in
                `.weights.h5` for the weights alone. An earlier model is replaced once the new one is complete. Other
                files in a folder stay.

        Raises:
            StepError: the model is not built yet, a model of this kind cannot be written to such a file, or what is
                there is no model to be replaced.
            RankMismatchError: not every rank calls it.

        Example:
            >>> model.save_model("trained")
            >>> loaded = tf_keras.models.load_model("trained")  # elsewhere, without smp_tf
        """
        saving.save_model(self, path)

    def save_weights(
        self,
        filepath: str | os.PathLike[str],
        overwrite: bool = True,
        save_format: str | None = None,
        options: Any = None,
    ) -> None:
        """Writes the weights of the whole model, as `tf_keras.Model.save_weights` does.

        Every rank must call it.

        Rank 0 writes, and never holds more than one weight of another rank. The file loads into the same class with
        `tf_keras.Model` as its base, or into the model that was wrapped.

        Args:
            filepath: a file that ends in `.h5` or `.weights.h5`, or the prefix of checkpoint files.
            overwrite: whether what is there may be replaced.
            save_format: "tf" or "h5"; by default by the end of the path.
            options: not supported; None.

        Raises:
            StepError: the model is not built yet, something is there already, or options were given.
            RankMismatchError: not every rank calls it.

        Example:
            >>> model.save_weights("trained.weights.h5")
        """
        _refuse_options("save_weights", options)
        saving.save_weights(self, filepath, overwrite, save_format)

    def load_weights(
        self,
        filepath: str | os.PathLike[str],
        skip_mismatch: bool = False,
        by_name: bool = False,
        options: Any = None,
    ) -> Any:
        """Reads weights as `tf_keras.Model.load_weights` does.

        Every rank must call it.

        Each rank reads only what it stores. Before the first step, the values replace the initial ones.

        Args:
            filepath: a file of `save_weights` of a plain or a distributed model, a `.keras` file, or a SavedModel.
            skip_mismatch: whether to leave out layers whose weights do not fit; HDF5 only.
            by_name: whether to match layers by their names instead of their order; HDF5 only.
            options: not supported; None.

        Returns:
            For a checkpoint that was read now, an object that says what was found, with methods such as
            `expect_partial`; else None.

        Raises:
            FileNotFoundError: there are no weights at the path.
            ValueError: the weights do not fit the model.
            StepError: options were given.

        Example:
            >>> model.save_weights("trained.h5")
            >>> model.load_weights("trained.h5")
        """
        _refuse_options("load_weights", options)
        return loading.load_weights(self, filepath, skip_mismatch, by_name)

    def get_weights(self) -> Sequence[Any]:
        """Returns the present weights, in the order of `weights`.

        Returns:
            With one partition a list of arrays. With several a `ShardedWeights`: each rank holds its part.
            Making it and giving it to `set_weights` sends nothing. Asking for an element is collective.
            Before the first step every rank calls it: then the ranks agree who keeps which weight until a plan decides.

        Raises:
            StepError: there are several partitions and the model is not built yet.

        Example:
            >>> best = model.get_weights()
            >>> model.set_weights(best)
        """
        if is_built(self):
            early_places.place_now(self)
        if runtime.current().topology.stages == 1:
            weights: list[Any] = super().get_weights()
            return weights
        return sharded_weights.get_weights(self)

    def set_weights(self, weights: Sequence[Any]) -> None:
        """Gives the model other weights.

        Every rank must call it with the same ones, and takes what it stores.

        Before the first step, the values replace the initial ones.

        Args:
            weights: the result of `get_weights`, or arrays in the order of `weights`.

        Raises:
            ValueError: the number of weights, or the shape of one, is not that of the model.
            StepError: the argument is a result of `get_weights`, and this model has not run a step yet.

        Example:
            >>> best = model.get_weights()
            >>> model.set_weights(best)
        """
        sharded_weights.set_weights(self, weights)

    def summary(self, *args: Any, **kwargs: Any) -> None:
        """Prints a summary of the model as `tf_keras.Model.summary`, with the ranks that store each layer's weights.

        Rank 0 prints it. With `print_fn`, every rank that calls it gets the lines.

        Args:
            *args: arguments of `tf_keras.Model.summary`.
            **kwargs: further arguments, by keyword.

        Raises:
            ValueError: the model is not built yet.

        Example:
            >>> model.summary()
            Model: ...
        """
        options = inspect.signature(super().summary).bind(*args, **kwargs).arguments
        summary.print_summary(self, options.pop("print_fn", None), dict(options))

    def profile(self, *example_inputs: Any, **kwargs: Any) -> None:
        """Measures the time and memory that the layers take here, so that the first step's plan uses them.

        It is optional. Without it the plan uses estimates from the sizes of the operations. Every rank must call it
        before the first step. The ranks share the layers out and measure them at the same time, forward and backward.
        Each holds the weights of one layer at a time. What is measured is kept. The next run on such a machine, with as
        many samples, finds it (`SMP_TF_PROFILES` names the folder, or is "off").

        Args:
            *example_inputs: arguments of the model, for any number of samples.
            **kwargs: further arguments, by keyword. `training` is true unless it is given, where the model takes it.

        Raises:
            StepError: the model has run a step already, or returns nothing that has a gradient.
            RankMismatchError: the ranks do not profile the same model.

        Example:
            >>> net = smp.DistributedModel(lambda: tf_keras.Sequential([tf_keras.layers.Dense(2)]))
            >>> net.profile(tf.zeros([32, 3]))
        """
        profiling.profile(self, example_inputs, kwargs)

    @property
    def _smp_keras_model(self) -> Any:
        """Returns the model whose files Keras writes and reads: this one, or the one that it wraps."""
        return self

    def _is_local(self, variable: Any) -> bool:
        return self._layout_of(variable).is_here(runtime.current().topology.place)

    def _layout_of(self, variable: Any) -> Layout:
        """Returns where a variable is. The layout has no stage where every rank stores it."""
        if self._smp_store.leaves_to_script(variable):
            return Layout()
        state = self._smp_store.state(variable)
        if state is None or state.owner is None:
            raise StepError(
                f"Which rank stores variable {variable.name!r} of model {self.name!r} is decided at the first call of "
                f"a step that uses the model. Ask after it, or in a hook registered with "
                f"smp.register_post_partition_hook."
            )
        return state.storage.layout


def _refuse_options(method: str, options: Any) -> None:
    if options is not None and not adapter.archives().is_default_options(options):
        raise StepError(f"{method} of a distributed model takes no options of TensorFlow's. Received: {options!r}")


def _is_symbolic(args: Any, kwargs: Any) -> bool:
    return any(adapter.layers().is_symbolic(t) for t in tf.nest.flatten((args, kwargs)) if tf.is_tensor(t))
