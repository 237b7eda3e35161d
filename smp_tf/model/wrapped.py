"""`smp.DistributedModel(model)`: a distributed model around one that Keras has made."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from smp_tf.keras import adapter
from smp_tf.keras.bases import not_an_override
from smp_tf.keras.strategy_scope import refuse_strategy
from smp_tf.model.model import DistributedModel, wrap_with


class WrappedModel(DistributedModel):
    """A distributed model around an existing Keras model. `smp.DistributedModel(model)` makes it.

    Args:
        model: the Keras model, or a function that builds it.
    """

    def __init__(self, model: Any) -> None:
        # The wrapped model casts its inputs itself, where Keras does so.
        super().__init__(autocast=False)
        if not adapter.layers().is_model(model):
            model = model()
            if not adapter.layers().is_model(model):
                raise TypeError(
                    f"smp.DistributedModel takes a Keras model or a function that returns one. The function returned "
                    f"{model!r} (of type {type(model).__name__})."
                )
        self.wrapped = model
        self._name = model.name
        parameters = inspect.signature(model.call).parameters.values()
        takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
        # Keras gives these to every model that takes `**kwargs`, as `call` below does.
        self._not_taken = set() if takes_all else {"training", "mask"} - {parameter.name for parameter in parameters}
        self._first = next((p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD), None)
        if adapter.losses().is_compiled(model):
            self._take_over({name: getattr(model, name) for name in adapter.losses().set_by_compile()})

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the model as the wrapped one is called, so that its first argument may be given by name."""
        if not args and self._first is not None:
            if self._first not in kwargs:
                raise ValueError(
                    f"Keras needs the first argument of a model's call, which is {self._first!r} for {self.name!r}. "
                    f"Received: {', '.join(map(repr, kwargs)) or 'none'}"
                )
            args = (kwargs.pop(self._first),)
        return super().__call__(*args, **kwargs)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compiles the wrapped model, whose `train_step` `fit` runs, as `tf_keras.Model.compile` does."""
        refuse_strategy(f"Model {self.name!r} was compiled")
        before = dict(vars(self.wrapped))
        self.wrapped.compile(*args, **kwargs)
        changed = {name: value for name, value in vars(self.wrapped).items() if before.get(name, self) is not value}
        self._take_over({name: value for name, value in changed.items() if not name.startswith("_self_")})

    def _take_over(self, compiled: Mapping[str, Any]) -> None:
        """Lets Keras's loops and callbacks, which see this model, find here what `compile` has set."""
        for name, value in compiled.items():
            object.__setattr__(self, name, value)
        if self.wrapped.output_names:
            self.output_names = self.wrapped.output_names
        # What was made for the earlier optimizer, losses and weights.
        for function in ("train_function", "test_function", "predict_function"):
            object.__setattr__(self, function, None)

    @property
    def _smp_keras_model(self) -> Any:
        return self.wrapped

    @property
    def layers(self) -> list[Any]:
        """Returns the layers of the wrapped model."""
        found: list[Any] = self.wrapped.layers
        return found

    @property
    def metrics(self) -> list[Any]:
        """Returns the metrics of the wrapped model."""
        found: list[Any] = self.wrapped.metrics
        return found

    @not_an_override
    def train_step(self, data: Any) -> Any:
        """Returns one step of training, as the wrapped model defines it."""
        return self.wrapped.train_step(data)

    @not_an_override
    def test_step(self, data: Any) -> Any:
        """Returns one step of evaluation, as the wrapped model defines it."""
        return self.wrapped.test_step(data)

    @not_an_override
    def predict_step(self, data: Any) -> Any:
        """Returns one step of prediction, as the wrapped model defines it."""
        return self.wrapped.predict_step(data)

    @not_an_override
    def reset_metrics(self) -> None:
        """Begins anew with the metrics of the wrapped model."""
        self.wrapped.reset_metrics()

    def _build(self, input_shape: Any) -> None:
        # Keras would call `call` on placeholders. It refuses that for a `call` that takes any arguments.
        if not self.wrapped.built:
            self.wrapped.build(input_shape)
        self.built = True

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the wrapped model."""
        return self.wrapped(*args, **{name: value for name, value in kwargs.items() if name not in self._not_taken})


def wrap(*args: Any, **kwargs: Any) -> WrappedModel:
    """Returns the model for `smp.DistributedModel(model)`."""
    if len(args) != 1 or kwargs or not (adapter.layers().is_model(args[0]) or callable(args[0])):
        raise TypeError(
            "smp.DistributedModel is either subclassed or given one Keras model, or one function that returns a Keras "
            f"model. Received: {args!r} {kwargs!r}"
        )
    if isinstance(args[0], DistributedModel):
        raise TypeError(f"{args[0].name!r} is a distributed model already; it cannot be wrapped again.")
    wrapped: WrappedModel = WrappedModel(args[0])
    return wrapped


wrap_with(wrap)
