"""Makes a file of a model from a checkpoint, in one process and without a job.

    script.py:build ─▶ a model without values ─▶ its variables by key  ┐
    ckpt-300.json   ─▶ what it holds of such a model, by key           ┴▶ compared ─▶ read one by one ─▶ Keras writes it

In a checkpoint the model lies below a path, such as "model/wrapped". That path is found by what comes after it.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from smp_tf.checkpoint import pending
from smp_tf.checkpoint.files import problems_of_files
from smp_tf.checkpoint.manifest import Manifest, StoredTensor
from smp_tf.checkpoint.restore import Restore
from smp_tf.checkpoint.survey import Item, StateKind, survey, variable_of_slot
from smp_tf.errors import CheckpointError
from smp_tf.keras import adapter
from smp_tf.model import saving
from smp_tf.offline.plan import made_without_storage, traced_microbatch
from smp_tf.steps import early_places
from smp_tf.variables.models import SplitModel, is_built, take_variables

#: How many keys of a kind an error lists.
_MOST_KEYS = 10
#: The kinds of what is restored besides the optimizer.
_OF_MODEL = (StateKind.MODEL, StateKind.SCRIPT, StateKind.STATE)


@dataclasses.dataclass(frozen=True)
class Export:
    """What is written, and from what.

    Args:
        folder: of the checkpoints.
        manifest: of the checkpoint.
        function: makes the model. `example_of` says what it may return.
        made_by: words for the function, such as "train.py:build".
        path: the file or folder to write.
        at: path of the model in the checkpoint, or the beginning of it; "" where it is to be found.
        with_optimizer: whether the state of the compiled optimizer is written as well.
    """

    folder: str
    manifest: Manifest
    function: Callable[[], Any]
    made_by: str
    path: str
    at: str = ""
    with_optimizer: bool = False

    def write(self) -> int:
        """Writes the file, and returns the number of weights in it. smp_tf runs in this process, as its only rank.

        Raises:
            CheckpointError: the checkpoint is damaged, or holds another model.
            OfflinePlanError: the function gives no model.
            StepError: a model of this kind cannot be written to such a file.
        """
        problems = list(problems_of_files(self.folder, self.manifest))
        if problems:
            raise CheckpointError("\n".join(problems))
        model = _model_of(self.function)
        found = survey(model._smp_keras_model).items
        own = {key: item for key, item in found.items() if item.kind is StateKind.MODEL}
        prefix = self._prefix(own)
        self._require_fit(prefix, own)
        objects, optimizer = {prefix: model._smp_keras_model}, ""
        if self.with_optimizer:
            optimizer = self._optimizer_path(prefix)
            compiled = self._compiled_optimizer(model)
            if not _is_below(optimizer, prefix):
                objects[optimizer] = compiled
        root = _root(objects)
        kept = {
            key: stored for key, stored in self.manifest.tensors.items() if _is_kept(key, stored, prefix, optimizer)
        }
        restoring = Restore(root, self.folder, dataclasses.replace(self.manifest, tensors=kept), expect_partial=True)
        restoring.begin()
        pending.install(restoring)
        early_places.place_now(model)
        if self.with_optimizer:
            adapter.slots().make_slots(compiled, model.trainable_variables)
            pending.optimizer_ready(compiled)
            self._require_slots(root, kept)
        saving.save_model(model, self.path, with_optimizer=self.with_optimizer)
        return len(own)

    def _prefix(self, own: Mapping[str, Item]) -> str:
        """Returns the path below which the checkpoint has most of a model's variables."""
        counts: Counter[str] = Counter()
        for key in self._of_models():
            parts = key.split("/")
            counts.update("/".join(parts[:n]) for n in range(len(parts)) if "/".join(parts[n:]) in own)
        counts = Counter({path: count for path, count in counts.items() if _is_below(path, self.at)})
        most = max(counts.values(), default=0)
        best = sorted(path for path, count in counts.items() if count == most)
        if len(best) > 1:
            raise CheckpointError(
                f"{self.manifest.name} holds several such models: {', '.join(best[:_MOST_KEYS])}. Name one with --at."
            )
        return best[0] if best else self.at

    def _require_fit(self, prefix: str, own: Mapping[str, Item]) -> None:
        """Raises an error that names both sides' weights where the checkpoint is of another model."""
        there = {_relative(key, prefix) for key in self._of_models() if _is_below(key, prefix)}
        other = []
        for key in sorted(there & own.keys()):
            stored, variable = self.manifest.tensors[_joined(prefix, key)], own[key].target
            dtype = variable.dtype.base_dtype.name
            if dtype != stored.dtype or not variable.shape.is_compatible_with(stored.shape):
                shape = list(variable.shape) if variable.shape.rank is not None else "of any shape"
                other.append(f"{key} is {dtype}{shape} in the model and {stored.dtype}{list(stored.shape)} there")
        told = [
            f"{words}: {_listed(keys)}"
            for words, keys in (
                ("only in the checkpoint", sorted(there - own.keys())),
                ("only in the model", sorted(own.keys() - there)),
                ("of other shapes or dtypes", other),
            )
            if keys
        ]
        if told:
            place = f" at {prefix!r}" if prefix else ""
            raise CheckpointError(
                "\n  ".join([f"{self.manifest.name} holds another model{place} than {self.made_by} makes.", *told])
            )

    def _of_models(self) -> list[str]:
        return [key for key, stored in self.manifest.tensors.items() if stored.kind == StateKind.MODEL]

    def _optimizer_path(self, prefix: str) -> str:
        """Returns the path of the optimizer that has slots of the model's variables."""
        found = {
            stored.optimizer
            for key, stored in self.manifest.tensors.items()
            if stored.kind == StateKind.SLOT and _is_below(variable_of_slot(key), prefix)
        }
        if len(found) != 1:
            what = f"slots of several optimizers: {', '.join(sorted(found))}" if found else "no optimizer's slots"
            raise CheckpointError(f"{self.manifest.name} holds {what} for this model. Leave out --optimizer.")
        return found.pop()

    def _compiled_optimizer(self, model: SplitModel) -> Any:
        compiled = getattr(model._smp_keras_model, "optimizer", None)
        if compiled is None:
            raise CheckpointError(
                f"{self.made_by} makes a model without an optimizer, which --optimizer is for. Let it compile the "
                f"model with the optimizer of the training."
            )
        return compiled

    def _require_slots(self, root: Any, kept: Mapping[str, StoredTensor]) -> None:
        """Raises an error where the compiled optimizer has other slots than the checkpoint."""
        there = {key for key, stored in kept.items() if stored.kind == StateKind.SLOT}
        here = {item.key for item in survey(root).items.values() if item.kind is StateKind.SLOT}
        told = [
            f"{words}: {_listed(sorted(keys))}"
            for words, keys in (("only in the checkpoint", there - here), ("only in the model", here - there))
            if keys
        ]
        if told:
            raise CheckpointError(
                "\n  ".join(
                    [
                        f"{self.manifest.name} holds slots of another optimizer than {self.made_by} compiles with.",
                        *told,
                    ]
                )
            )


def _model_of(function: Callable[[], Any]) -> SplitModel:
    """Returns the model that a function makes, with its variables, none of which has storage that it did not have."""
    model, example = made_without_storage(function)
    if not is_built(model):
        traced, _ = traced_microbatch(model, example, 1)
        for called, types in traced.calls:
            called._smp_fed.note(types)
    take_variables(model)
    return model


def _is_kept(key: str, stored: StoredTensor, prefix: str, optimizer: str) -> bool:
    if stored.optimizer:
        return stored.optimizer == optimizer and (
            stored.kind != StateKind.SLOT or _is_below(variable_of_slot(key), prefix)
        )
    return stored.kind in _OF_MODEL and _is_below(key, prefix)


def _root(objects: Mapping[str, Any]) -> tf.train.Checkpoint:
    """Returns a root from which each object has the path that it has in the checkpoint."""
    if "" in objects:
        others = {_named(path): other for path, other in objects.items() if path}
        return tf.train.Checkpoint(objects[""], **others)
    below: dict[str, dict[str, Any]] = {}
    for path, value in objects.items():
        first, _, rest = path.partition("/")
        below.setdefault(first, {})[rest] = value
    children = {name: inner[""] if list(inner) == [""] else _root(inner) for name, inner in below.items()}
    return tf.train.Checkpoint(**{_named(name): child for name, child in children.items()})


def _named(part: str) -> str:
    """Returns the name of an attribute that a part of a key stands for."""
    return re.sub(r"\.(\.|S)", lambda match: "/" if match[1] == "S" else ".", part)


def _is_below(key: str, prefix: str) -> bool:
    return not prefix or key == prefix or key.startswith(f"{prefix}/")


def _relative(key: str, prefix: str) -> str:
    return key[len(prefix) + 1 :] if prefix else key


def _joined(prefix: str, key: str) -> str:
    return f"{prefix}/{key}" if prefix else key


def _listed(found: Sequence[str]) -> str:
    more = f" and {len(found) - _MOST_KEYS} more" if len(found) > _MOST_KEYS else ""
    return ", ".join(found[:_MOST_KEYS]) + more
