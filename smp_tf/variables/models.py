"""The existing distributed models, for code that must not know their class."""

from __future__ import annotations

import weakref
from typing import Any, Protocol, TypeGuard

from smp_tf.keras import adapter
from smp_tf.partition.layout import Layout
from smp_tf.variables.fed_types import FedTypes
from smp_tf.variables.store import VariableStore


class SplitModel(Protocol):
    """What lower rooms know of a distributed model, such as `smp.DistributedModel`."""

    name: str
    built: bool
    _smp_store: VariableStore
    _smp_fed: FedTypes

    @property
    def variables(self) -> list[Any]:
        """Returns all variables of the model, on every rank."""

    @property
    def weights(self) -> list[Any]:
        """Returns the weights of the model, on every rank."""

    @property
    def trainable_variables(self) -> list[Any]:
        """Returns the variables that are trained, on every rank."""

    @property
    def layers(self) -> list[Any]:
        """Returns the layers of the model."""

    @property
    def _smp_keras_model(self) -> Any: ...

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the model, within a step."""

    def build(self, input_shape: Any) -> None:
        """Makes the variables, without storage."""

    def _layout_of(self, variable: Any) -> Layout: ...


#: The models, in the order in which they were made, each as long as it lives.
_models: list[weakref.ref[Any]] = []


def register(model: SplitModel) -> None:
    """Notes a model that was made."""
    _models.append(weakref.ref(model, _models.remove))


def is_built(model: SplitModel) -> bool:
    """Returns whether a model, or the one that it wraps, has made its variables, with or without storage."""
    return bool(model.built or model._smp_keras_model.built)


def take_variables(model: SplitModel) -> None:
    """Takes the variables of a model that is built into its store, those included that were built with their values.

    Args:
        model: the model. It counts as built from now on, also where the script has called its layers or methods only,
            or, of a wrapped model, the model inside.
    """
    # Metrics that a model holds are updated on every rank, like any other of the script's.
    model._smp_store.leave_to_script(adapter.layers().variables_of_script(model))
    model.built = True
    for variable in adapter.layers().variables_of(model):
        model._smp_store.adopt(variable)


def is_distributed(value: Any) -> TypeGuard[SplitModel]:
    """Returns whether an object is a distributed model, that is whether it has a store of variables."""
    return isinstance(getattr(value, "_smp_store", None), VariableStore)


def model_with(layer: Any) -> SplitModel | None:
    """Returns the distributed model that a layer is part of, the first if there are several; None if there is none."""
    for reference in list(_models):
        model = reference()
        if model is not None and any(module is layer for module in model.submodules):
            found: SplitModel = model
            return found
    return None
