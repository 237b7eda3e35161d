"""A toy Keras and its adapter, with which the rooms below the loops work in a process that has no tf_keras.

`main` tells what they find, as JSON: the parts of a step by layers, the keys of a checkpoint, slots.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from smp_tf.checkpoint.survey import survey
from smp_tf.keras import adapter, optimizer_reports, optimizer_trials, placed_layers
from smp_tf.keras.layer_patches import ConstructionPatch
from smp_tf.keras.protocols import Adapter
from smp_tf.optimizer.patch import OptimizerPatch
from smp_tf.partition.trace.lower import lower
from smp_tf.partition.trace.trace import trace
from smp_tf.partition.units.units import build_units
from smp_tf.steps import step  # noqa: F401
from smp_tf.variables.fetch import as_array, as_bytes


class Layer(tf.Module):
    """A dense layer of the toy."""

    def __init__(self, rows: int, columns: int, name: str) -> None:
        super().__init__(name=name)
        self.kernel = tf.Variable(tf.ones([rows, columns]), name=f"{name}_kernel")

    def __call__(self, x: tf.Tensor) -> tf.Tensor:
        return tf.matmul(x, self.kernel)


class Net(tf.Module):
    """A model of the toy."""

    def __init__(self) -> None:
        super().__init__(name="net")
        self.first = Layer(4, 8, "first")
        with placed_layers.placed_on(1):
            self.second = Layer(8, 2, "second")

    def __call__(self, x: tf.Tensor) -> tf.Tensor:
        return self.second(tf.nn.relu(self.first(x)))


class Momentum(tf.Module):
    """An optimizer of the toy, which keeps a velocity for every variable."""

    def __init__(self, rate: float = 0.5) -> None:
        super().__init__()
        self.rate = rate
        self.steps = tf.Variable(0, dtype=tf.int64)
        self.velocities: list[tuple[Any, tf.Variable]] = []

    def get_config(self) -> dict[str, Any]:
        return {"rate": self.rate}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Momentum:
        return cls(config["rate"])

    def build(self, variables: list[tf.Variable]) -> None:
        for variable in variables:
            if all(known is not variable for known, _ in self.velocities):
                self.velocities.append((variable, tf.Variable(tf.zeros(variable.shape), name="velocity")))

    def apply_gradients(self, pairs: Any) -> None:
        pairs = list(pairs)
        self.build([variable for _, variable in pairs])
        for gradient, variable in pairs:
            [velocity] = [slot for known, slot in self.velocities if known is variable]
            velocity.assign(0.9 * velocity + gradient)
            variable.assign_sub(self.rate * velocity)
        self.steps.assign_add(1)


class ToyLayers:
    """What the toy says of layers."""

    def is_metric(self, value: Any) -> bool:
        return False

    def variables_of(self, layer: Any) -> list[tf.Variable]:
        return list(layer.variables)

    @contextlib.contextmanager
    def tag_calls(
        self, recorder: Any, is_distributed: Callable[[Any], bool], around: Any = None, note: Any = None
    ) -> Iterator[None]:
        originals = {kind: kind.__call__ for kind in (Layer, Net)}

        def tagged(original: Callable[..., Any]) -> Callable[..., Any]:
            def call(layer: Any, x: tf.Tensor) -> tf.Tensor:
                with recorder.call(layer.name, type(layer).__name__, placed_layers.stage_of(layer)):
                    return original(layer, x)

            return call

        for kind, original in originals.items():
            kind.__call__ = tagged(original)  # type: ignore[method-assign]
        try:
            yield
        finally:
            for kind, original in originals.items():
                kind.__call__ = original  # type: ignore[method-assign]

    def constructors(self) -> list[tuple[type, str]]:
        return [(Layer, "__init__")]


class ToySlots:
    """What the toy says of what optimizers keep."""

    def is_optimizer(self, value: Any) -> bool:
        return isinstance(value, Momentum)

    def innermost(self, optimizer: Any) -> Any:
        return optimizer

    def make_slots(self, optimizer: Any, variables: list[tf.Variable]) -> None:
        optimizer.build(variables)

    def slots(self, optimizer: Any, variables: Any) -> Iterator[tuple[Any, str, Any]]:
        for variable in variables:
            for known, slot in optimizer.velocities:
                if known is variable:
                    yield variable, "velocity", slot

    def variables_of(self, optimizer: Any) -> list[tf.Variable]:
        return [slot for _, slot in optimizer.velocities]

    def children(self, optimizer: Any) -> dict[str, Any]:
        return {"steps": optimizer.steps}

    def has_slots(self, optimizer: Any) -> bool | None:
        return bool(optimizer.velocities)

    def has_slot_lists(self, optimizer: Any) -> bool:
        return bool(optimizer.velocities)

    def count_of_variables(self, optimizer: Any) -> int | None:
        return len(optimizer.velocities)


class ToyOptimizers:
    """What the toy says of what optimizers do."""

    def is_own_module(self, name: str) -> bool:
        return name == __name__

    def classes_defining(self, method: str) -> list[type]:
        return [Momentum] if method in vars(Momentum) else []

    def base(self) -> type:
        return Momentum

    def finiteness_check(self) -> tuple[Any, str]:
        return ToyOptimizers, "are_finite"

    def are_finite(self) -> bool:
        return True

    def begin_step(self, optimizer: Any) -> None:
        return None

    def clips_by_all(self, optimizer: Any) -> bool:
        return False

    def scales_losses(self, optimizer: Any) -> bool:
        return False


NOT_ASKED: Any = None
TOY = Adapter(ToyLayers(), ToySlots(), ToyOptimizers(), NOT_ASKED, NOT_ASKED, NOT_ASKED)  # type: ignore[arg-type]


def parts_of_a_step(net: Net) -> list[Any]:
    """The units of a training step: their names, the partition that the script has asked for, and their variables."""

    def train(x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(net(x) ** 2)
        return tape.gradient(loss, [net.first.kernel, net.second.kernel])

    traced = trace(
        train,
        [tf.TensorSpec([2, 4])],
        lambda body, tensors: body(*tensors),
        scopes=lambda recorder: adapter.layers().tag_calls(recorder, lambda layer: layer is net),
    )
    graph = lower(traced, lambda variable: (variable.name.partition(":")[0], True)).graph
    units = build_units(graph)
    return [[unit.name, unit.stage, [graph.variables[v].name for v in unit.variables]] for unit in units]


def found() -> dict[str, Any]:
    """What the rooms below the loops find of a training with the toy."""
    patches = ConstructionPatch(), OptimizerPatch()
    for patch in patches:
        patch.install()
    net, optimizer = Net(), Momentum()
    for variable in adapter.layers().variables_of(net):
        optimizer.apply_gradients([(tf.ones(variable.shape), variable)])
    keys = survey(tf.train.Checkpoint(model=net, optimizer=optimizer)).items
    told = {
        "units": parts_of_a_step(net),
        "keys": {key: item.kind.value for key, item in keys.items()},
        "slots": optimizer_trials.slots_of(optimizer),
        "rows": optimizer_trials.updates_rows(optimizer),
        "has slots": optimizer_reports.has_slots(optimizer),
        "has more": optimizer_reports.has_slots(Momentum()),
        "kernel": as_array(memoryview(as_bytes(net.second.kernel)), net.second.kernel)[0].tolist(),
        "steps": int(optimizer.steps),
    }
    for patch in patches:
        patch.remove()
    return told


def main() -> None:
    """Prints what was found."""
    with adapter.in_force(TOY):
        print(json.dumps(found()))
