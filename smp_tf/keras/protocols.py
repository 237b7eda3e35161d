"""What smp_tf asks of Keras, as a protocol for each subject, which a module can implement."""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

import tensorflow as tf

from smp_tf.partition.trace.trace import Recorder

#: A method of Keras's that smp_tf replaces: the class, or module, that defines it, and its name.
Place = tuple[Any, str]


class Layers(Protocol):
    """Layers and models: what they are, which variables they have, and when they are called."""

    def is_model(self, value: Any) -> bool:
        """Returns whether something is a model."""

    def is_metric(self, value: Any) -> bool:
        """Returns whether something is a metric."""

    def is_symbolic(self, tensor: Any) -> bool:
        """Returns whether a tensor stands for the input or output of a layer, and has no value."""

    def floatx(self) -> str:
        """Returns the name of the type that numbers have by default."""

    def is_variable(self, weight: Any) -> bool:
        """Returns whether one of a layer's weights is a variable."""

    def variables_of(self, layer: Any) -> list[tf.Variable]:
        """Returns the variables of a layer or model, in Keras's order."""

    def variables_of_script(self, model: Any) -> Iterator[tf.Variable]:
        """Yields the variables of a model that every rank stores, such as those of its metrics."""

    def values_in_list(self, weight: Any) -> int:
        """Returns how many values one of a layer's weights has in the list that Keras's `get_weights` gives."""

    def layer_in_call(self) -> str | None:
        """Returns the name of the layer or model that is being called in this thread; None where none is."""

    def tag_calls(
        self,
        recorder: Recorder,
        is_distributed: Callable[[Any], bool],
        around: Callable[[Any], AbstractContextManager[Any]] = contextlib.nullcontext,
        note: Callable[[Any, tuple[Any, ...], dict[str, Any]], None] | None = None,
    ) -> AbstractContextManager[None]:
        """Announces to a recorder, within its context, the call of every layer that a distributed model calls.

        Args:
            recorder: the recorder to announce calls to, with the layer's name and that of its class.
            is_distributed: returns whether a layer is a distributed model. Calls outside any such model are not
                announced.
            around: takes a layer that is called outside any such model, and returns the context to call it in. The
                context may announce the call of the model that the layer is part of.
            note: takes each layer that is called so, with the arguments of the call.
        """

    def seed_initializers(self, generator: random.Random) -> None:
        """Lets Keras draw the seeds of initializers in this thread from a generator."""

    def constructors(self) -> list[Place]:
        """Returns the methods that construct every layer."""

    def makers_of_read_variables(self) -> list[Place]:
        """Returns methods that make variables which belong to the script, or which they read at once."""

    def adapting_methods(self) -> list[Place]:
        """Returns methods by which layers adapt to data, with functions of their own over their variables."""

    def methods_of_synchronized_moments(self) -> list[Place]:
        """Returns the methods by which layers take mean and variance of what all processes have."""

    def readers_of_values(self) -> tuple[list[Place], list[Place]]:
        """Returns the functions that give the value of a variable, and those that give values of several."""


class Slots(Protocol):
    """What an optimizer keeps: its slots, each of one variable, and the rest."""

    def is_optimizer(self, value: Any) -> bool:
        """Returns whether something is an optimizer."""

    def innermost(self, optimizer: Any) -> Any:
        """Returns the optimizer that has the slots. Where one wraps another, it is the one inside."""

    def make_slots(self, optimizer: Any, variables: list[tf.Variable]) -> None:
        """Makes the slots of an optimizer that has none yet."""

    def slots(self, optimizer: Any, variables: Iterable[tf.Variable]) -> Iterator[tuple[tf.Variable, str, tf.Variable]]:
        """Yields the slots of variables: a variable, the name of the slot, and the slot."""

    def variables_of(self, optimizer: Any) -> list[tf.Variable]:
        """Returns all variables that an optimizer keeps."""

    def children(self, optimizer: Any) -> dict[str, Any]:
        """Returns what an optimizer tracks, by name, without its slots."""

    def has_slots(self, optimizer: Any) -> bool | None:
        """Returns whether an optimizer has been built for variables on this rank; None where it does not say."""

    def has_slot_lists(self, optimizer: Any) -> bool:
        """Returns whether an optimizer that counts its variables keeps any slots."""

    def count_of_variables(self, optimizer: Any) -> int | None:
        """Returns for how many variables an optimizer has slots; None where it does not say."""

    def can_move_slots(self, optimizer: Any) -> bool:
        """Returns whether slots of one variable can be added to an optimizer, and dropped."""

    def add_slots(self, optimizer: Any, variable: Any) -> bool:
        """Makes slots for one more variable, and returns whether the optimizer has some for it now."""

    def drop_slots(self, optimizer: Any, variable: Any) -> None:
        """Forgets the slots of one variable."""

    def let_take(self, variable: tf.Variable, other: tf.Variable) -> None:
        """Lets optimizers take a variable for another one, so that it has the other's slots."""


class Optimizers(Protocol):
    """What an optimizer does with gradients, and where smp_tf changes it."""

    def is_own_module(self, name: str) -> bool:
        """Returns whether a module is part of Keras."""

    def classes_defining(self, method: str) -> list[type]:
        """Returns every class of optimizers, Keras's and the script's, that itself defines a method."""

    def base(self) -> type:
        """Returns the class that all optimizers without their own `__getattribute__` derive from."""

    def scales_losses(self, optimizer: Any) -> bool:
        """Returns whether an optimizer wraps another one and scales losses for it."""

    def finiteness_check(self) -> Place:
        """Returns the function that says whether all gradients are finite, for optimizers that scale losses."""

    def update_loss_scale(self, optimizer: Any) -> Any:
        """Changes the scale as if there were no gradient, and returns whether to apply those of the step."""

    def clips_by_all(self, optimizer: Any) -> bool:
        """Returns whether an optimizer scales gradients by the norm of all of them."""

    def begin_step(self, optimizer: Any) -> None:
        """Notes that an optimizer is about to apply gradients, once."""

    def follow_schedule(self, optimizer: Any) -> None:
        """Brings the learning rate that an optimizer shows to what its step counter says."""

    def usual_aggregator(self) -> Any:
        """Returns what an older optimizer does with all gradients, where the script has not chosen it."""

    def kinds(self) -> dict[str, type]:
        """Returns Keras's classes of optimizers by their names in lower case."""

    def made(self, name: str) -> Any:
        """Returns the optimizer that Keras makes from a name, or from a script's class registered under it.

        Raises:
            UnknownNameError: Keras knows no such name.
        """


class UnknownNameError(Exception):
    """Keras does not know a name."""


class Losses(Protocol):
    """Compiled models: their losses and metrics."""

    def is_compiled(self, model: Any) -> bool:
        """Returns whether `compile` was called on a model."""

    def set_by_compile(self) -> tuple[str, ...]:
        """Returns the attributes that `compile` sets of a model."""

    def compiled_losses(self) -> tuple[type, Any]:
        """Returns the class of a compiled model's losses, and the module of the functions that reduce losses."""

    def is_mean(self, reduction: Any) -> bool:
        """Returns whether a loss is a mean over samples."""

    def is_sum(self, reduction: Any) -> bool:
        """Returns whether a loss is a sum over samples."""

    def no_reduction(self) -> Any:
        """Returns the reduction of a loss that its caller reduces."""

    def reducing_metric(self) -> tuple[type, frozenset[str]]:
        """Returns the class of metrics that add up numbers, and its reductions that divide by how many there were."""


class Loops(Protocol):
    """Keras's loops: the data they take, and their callbacks."""

    def is_sequence(self, data: Any) -> bool:
        """Returns whether data is given as a sequence of batches, which has a length."""

    def workers_shuffle_with(self, shuffle: Callable[[list[Any]], None]) -> AbstractContextManager[None]:
        """Makes Keras shuffle with a function of ours, within its context, the order in which workers fetch batches."""

    def is_callback_list(self, callbacks: Any) -> bool:
        """Returns whether callbacks are given as Keras's own list of them."""

    def ask_for_batch_hooks(self, callbacks: Any) -> None:
        """Lets Keras's list of callbacks find out again which of them are to be called for every batch."""

    def wants_train_batches(self, callback: Any) -> bool:
        """Returns whether a callback is to be called after every batch of a training."""

    def is_of_keras(self, kind: type) -> bool:
        """Returns whether a class of callbacks is one of Keras's, except the one that all derive from."""

    def is_tensorboard(self, callback: Any) -> bool:
        """Returns whether a callback writes for TensorBoard."""

    def is_backup(self, callback: Any) -> bool:
        """Returns whether a callback backs up the training, and restores it."""

    def writes_logs(self, callback: Any) -> bool:
        """Returns whether a callback only shows or writes the logs."""

    def progress_in_lines(self, callbacks: list[Any]) -> list[Any]:
        """Returns callbacks that show the progress in lines, where a bar cannot be written over and none is there."""

    def acts_alone(self, callback: Any) -> bool:
        """Returns whether a callback of Keras's only writes, shows or runs functions of the script's."""

    def runs_functions(self, callback: Any) -> bool:
        """Returns whether a callback of Keras's runs functions of the script's."""


class Archives(Protocol):
    """What Keras writes and reads of models: weights, whole models and summaries."""

    def values_read_late(self) -> AbstractContextManager[None]:
        """Makes Keras, within its context, give variables the data sets that it reads, and not their contents."""

    def values_one_by_one(self) -> AbstractContextManager[None]:
        """Makes Keras, within its context, write and read weights one value at a time."""

    def archive_of(self, dataset: Any) -> str | None:
        """Returns the file that holds the HDF5 file of a data set within it, while `values_read_late` has it read."""

    def is_default_options(self, options: Any) -> bool:
        """Returns whether options for saving are those that Keras's callbacks make when they are given none."""

    def write_weights(self, model: Any, path: str) -> None:
        """Writes a model's weights into an HDF5 file."""

    def read_weights(self, model: Any, path: str, skip_mismatch: bool, by_name: bool) -> None:
        """Reads a model's weights from an HDF5 file or a model file."""

    def knows_inputs(self, model: Any) -> bool:
        """Returns whether a model knows what it is called with, as a SavedModel of it must."""

    def write_model(
        self,
        model: Any,
        path: str,
        form: str,
        fed: tuple[tuple[Any, ...], dict[str, Any]] | None = None,
        *,
        with_optimizer: bool = False,
    ) -> None:
        """Writes a model.

        Args:
            model: the model.
            path: file or folder.
            form: "keras" (which has the optimizer's settings), "h5", or "tf" for a SavedModel.
            fed: types of the arguments that the model was called with, positional ones and those by keyword. The
                signature of a SavedModel takes them. None lets Keras choose.
            with_optimizer: whether the state of its optimizer is written as well.
        """

    def summary(self, model: Any, options: Mapping[str, Any]) -> list[str]:
        """Returns the lines of a model's summary."""


@dataclasses.dataclass(frozen=True)
class Adapter:
    """A Keras, by subject.

    Args:
        layers: models, layers and their variables.
        slots: what optimizers keep.
        optimizers: what optimizers do.
        losses: compiled losses and metrics.
        loops: `fit`, `evaluate`, `predict`, and callbacks.
        archives: files of models.
    """

    layers: Layers
    slots: Slots
    optimizers: Optimizers
    losses: Losses
    loops: Loops
    archives: Archives
