"""The private TensorFlow and Keras that the user-facing room needs, each piece in one small function.

Seen to work on TensorFlow and tf_keras 2.21. Each has a test in tests/smp_tf/test_tf_internals.py that fails when they
change it.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import h5py
import numpy as np
import tensorflow as tf
import tf_keras
from tensorflow.python import pywrap_tfe
from tensorflow.python.eager import context as eager_context
from tensorflow.python.framework import random_seed
from tensorflow.python.ops import control_flow_util, resource_variable_ops
from tensorflow.python.trackable.base import VARIABLE_VALUE_KEY
from tensorflow.python.training.saving import saveable_object_util
from tensorflow.tsl.profiler.protobuf import xplane_pb2
from tf_keras.src import backend
from tf_keras.src.engine import base_layer_utils, compile_utils
from tf_keras.src.metrics import base_metric
from tf_keras.src.mixed_precision import loss_scale_optimizer
from tf_keras.src.optimizers import utils as optimizer_utils
from tf_keras.src.saving import saving_lib
from tf_keras.src.saving.legacy import hdf5_format
from tf_keras.src.utils import data_utils, losses_utils, metrics_utils

from smp_tf.ops.graph_op import run_independently
from smp_tf.partition import tf_internals as partition_internals

UninitializedVariable: type[Any] = resource_variable_ops.UninitializedVariable
ResourceVariable: type[Any] = resource_variable_ops.ResourceVariable

#: What the profile plugin of TensorBoard reads.
XSpace: type[Any] = xplane_pb2.XSpace


make_plain_variable = partition_internals.make_plain_variable


def scratch_graph(name: str) -> Any:
    """Returns a graph for ops that are looked at and thrown away."""
    return tf.__internal__.FuncGraph(name)


def is_compiled_by_xla() -> bool:
    """Returns whether the graph being traced is of a function that XLA compiles as a whole."""
    if tf.executing_eagerly():
        return False
    return bool(control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()))


#: What a random op is made with: TensorFlow's global seed and the op's own; both None where there is no global seed.
OpSeeds = tuple[int | None, int | None]

_get_seed = random_seed.get_seed


def draw_op_seeds(op_seed: int | None) -> OpSeeds:
    """Returns the seeds that a random op gets which is executed eagerly now, whatever graph is being written."""
    with tf.init_scope():
        seeds: OpSeeds = _get_seed(op_seed)
    return seeds


def global_seed() -> int | None:
    """Returns the seed given to `tf.random.set_seed`; None where it was not called."""
    seed: int | None = eager_context.global_seed()
    return seed


def global_seed_generator() -> Any:
    """Returns an object that is another one after every `tf.random.set_seed`; None before the first."""
    return eager_context.context()._rng


def set_keras_seed_generator(generator: Any) -> None:
    """Lets Keras draw the seeds of initializers in this thread from a `random.Random`."""
    backend._SEED_GENERATOR.generator = generator


def peak_memory() -> int | None:
    """Returns the bytes that TensorFlow's allocator has given out at most: on the GPU, where there is one.

    Returns:
        Bytes; None where it has counted none: on a CPU without oneDNN. With oneDNN it counts what has 256 KiB or
        more.
    """
    gpus = tf.config.list_logical_devices("GPU")
    try:
        return int(tf.config.experimental.get_memory_info(gpus[0].name if gpus else "CPU:0")["peak"]) or None
    except (ValueError, tf.errors.OpError):
        return None


@contextlib.contextmanager
def op_seeds_from(source: Callable[[int | None], OpSeeds]) -> Iterator[None]:
    """Makes stateful random ops, within its context, with the seeds that a function gives them.

    Args:
        source: given the seed that the op was asked to have, or None, returns its seeds.
    """
    random_seed.get_seed = source
    try:
        yield
    finally:
        random_seed.get_seed = _get_seed


def backend_modules() -> list[types.ModuleType]:
    """Returns the modules through which scripts, and Keras itself, come to the functions of `tf_keras.backend`."""
    named = [module for name, module in list(sys.modules.items()) if name.startswith("tf_keras.")]
    return [module for module in named if getattr(module, "batch_get_value", None) is backend.batch_get_value]


def is_in_layer_call() -> bool:
    """Returns whether a Keras layer or model is being called in this thread."""
    return bool(base_layer_utils.call_context().in_call)


def destroy_storage(variable: tf.Variable) -> None:
    """Frees the memory of a variable; its handle stays and holds an empty tensor."""
    with tf.init_scope():
        tf.raw_ops.AssignVariableOp(resource=variable.handle, value=tf.zeros([0], variable.dtype))


def make_storage(variable: tf.Variable, value: tf.Tensor) -> None:
    """Gives a value to a variable whose memory was freed; an assignment would compare shapes."""
    with tf.init_scope():
        tf.raw_ops.AssignVariableOp(resource=variable.handle, value=value)


def not_an_override(method: Any) -> Any:
    """Marks a model's method as one of Keras's own, so that Keras does not act as if the user had written it.

    Keras calls an overridden `build` before the first call of the model, which then has to run on placeholders too.
    """
    method._is_default = True
    return method


def is_default_options(options: Any) -> bool:
    """Returns whether options for saving are those that Keras's callbacks make up when they are given none.

    Seen with tf.train.CheckpointOptions and tf.saved_model.SaveOptions of TensorFlow 2.16 to 2.21, whose fields are
    their slots.
    """
    fresh = type(options)()
    return all(getattr(options, name) == getattr(fresh, name) for name in type(options).__slots__)


#: What `tf_keras.Model.compile` sets of a model, but for the functions of its loops. Seen in tf_keras 2.16 to 2.21.
SET_BY_COMPILE = (
    "_compile_config",
    "_compiled_trainable_state",
    "_is_compiled",
    "_jit_compile",
    "_pss_evaluation_shards",
    "_run_eagerly",
    "_steps_per_execution",
    "compiled_loss",
    "compiled_metrics",
    "loss",
    "optimizer",
)


def is_compiled(model: tf_keras.Model) -> bool:
    """Returns whether `compile` was called on a model."""
    return bool(model._is_compiled)


@contextlib.contextmanager
def workers_shuffle_with(shuffle: Callable[[list[Any]], None]) -> Iterator[None]:
    """Makes Keras shuffle with a function of ours, within its context, the order in which workers fetch a `Sequence`.

    It does so with `random.shuffle`, and uses nothing else of `random` in that module. Seen in tf_keras 2.16 to 2.21.

    Args:
        shuffle: called in a thread per enqueuer, once for every time around.
    """
    with _replaced((data_utils, "random", types.SimpleNamespace(shuffle=shuffle))):
        yield


def ask_for_batch_hooks(callbacks: tf_keras.callbacks.CallbackList) -> None:
    """Lets a list of callbacks find out again which of them are to be called for every batch, as when it was made."""
    for kind in ("train", "test", "predict"):
        wanted = any(getattr(callback, f"_implements_{kind}_batch_hooks")() for callback in callbacks.callbacks)
        setattr(callbacks, f"_should_call_{kind}_batch_hooks", wanted)


def compiled_losses() -> tuple[type, Any]:
    """Returns the class of a compiled model's losses, and the module of the functions that reduce losses.

    Losses call `apply_valid_mask(losses, weights, mask, reduction)` and `compute_weighted_loss(losses, weights,
    reduction)` of that module. Seen in tf_keras 2.16 to 2.21.
    """
    return compile_utils.LossesContainer, losses_utils


def reducing_metric() -> tuple[type, frozenset[str]]:
    """Returns the class of metrics that add up numbers, and its reductions that divide by how many there were.

    Its `update_state(values, sample_weight)` counts a scalar once where there is no weight, and as often as the weight
    says where there is one. Seen in tf_keras 2.16 to 2.21.
    """
    averages = {metrics_utils.Reduction.WEIGHTED_MEAN, metrics_utils.Reduction.SUM_OVER_BATCH_SIZE}
    return base_metric.Reduce, frozenset(averages)


def checked_in_checkpoints(check: Callable[[Any], None], take: Callable[[Any, Any], bool]) -> type[Any]:
    """Returns a base class whose variables are checked before a checkpoint takes or gives their value.

    TensorFlow's checkpoints read and write a variable's memory past `numpy` and `assign`, and leave out, without a
    word, a variable that has none. To take a value and to give one, they first ask where it is, by this method.

    Args:
        check: given the variable; raises where its value can be neither taken nor given.
        take: given the variable and the value that a checkpoint has for it; says whether that is done with this.
    """

    class Checked:
        def _serialize_to_tensors(self) -> Any:
            check(self)
            return super()._serialize_to_tensors()  # type: ignore[misc]

        def _restore_from_tensors(self, restored: Mapping[str, tf.Tensor]) -> Any:
            if take(self, restored[VARIABLE_VALUE_KEY]):
                return tf.no_op() if not tf.executing_eagerly() else None
            return super()._restore_from_tensors(restored)  # type: ignore[misc]

    return Checked


class _ReadLater:
    """Stands for the value of a variable in lists that Keras makes of all values of a file."""

    def __init__(self, variable: Any) -> None:
        self._variable = variable
        self.shape = tuple(variable.shape)
        self.dtype = variable.dtype.base_dtype.as_numpy_dtype

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        return np.asarray(self._variable.numpy(), *args, **kwargs)


#: The zip file of every HDF5 file that Keras reads from within one just now, by HDF5's number for an open file.
_archives: dict[int, str] = {}


def archive_of(dataset: h5py.Dataset) -> str | None:
    """Returns the `.keras` file that holds the HDF5 file of a dataset, while `values_read_late` has Keras read it."""
    return _archives.get(_number_of_file(dataset))


def _number_of_file(part: h5py.HLObject) -> int:
    number: int = h5py.h5o.get_info(part.id).fileno
    return number


class _OnDisk(saving_lib.H5IOStore):
    """Keras's store of weights in a `.keras` file, which it makes up in memory; this one lies next to the file.

    One that is read is known to `archive_of` until it is closed.
    """

    def __init__(self, root_path: Any, archive: Any = None, mode: str = "r") -> None:
        self._inner, self._number = None, None
        if archive is None or mode != "w":
            super().__init__(root_path, archive=archive, mode=mode)
            if archive is not None and archive.filename is not None:
                self._number = _number_of_file(self.h5_file)
                _archives[self._number] = os.path.abspath(archive.filename)
            return
        self._inner, self._into = str(root_path), archive
        # Kept open until close().
        self._file = tempfile.NamedTemporaryFile(dir=os.path.dirname(archive.filename), suffix=".h5")  # noqa: SIM115
        super().__init__(self._file.name, mode="w")

    def close(self) -> None:
        if self._number is not None:
            _archives.pop(self._number, None)
        super().close()
        if self._inner is not None:
            self._into.write(self._file.name, self._inner)
            self._file.close()


@contextlib.contextmanager
def values_read_late() -> Iterator[None]:
    """Makes Keras, within its context, give variables datasets of the HDF5 files it reads, not what they hold.

    By itself it reads all weights of an HDF5 file before it assigns the first, and the file of a model through
    TensorFlow's file system, where HDF5 does not know its path.
    """
    load_model = hdf5_format.load_model_from_hdf5

    def read(group: Any) -> list[Any]:
        return [group[name] for name in hdf5_format.load_attributes_from_hdf5_group(group, "weight_names")]

    def give(pairs: Iterable[tuple[Any, Any]]) -> None:
        for variable, value in pairs:
            variable.assign(np.asarray(value) if type(variable) is ResourceVariable else value)

    def load(file: Any, *args: Any, **kwargs: Any) -> Any:
        is_here = isinstance(file, tf.io.gfile.GFile) and os.path.isfile(file.name)
        return load_model(file.name if is_here else file, *args, **kwargs)

    with _replaced(
        (backend, "batch_set_value", give),
        (hdf5_format, "load_subset_weights_from_hdf5_group", read),
        (hdf5_format, "load_model_from_hdf5", load),
        (saving_lib, "H5IOStore", _OnDisk),
    ):
        yield


@contextlib.contextmanager
def values_one_by_one() -> Iterator[None]:
    """Makes Keras, within its context, write and read weights one value at a time, and assign what it read as is.

    By itself it reads all weights of an HDF5 file before it assigns the first, and makes a `.keras` file in memory.
    """

    def get(tensors: Iterable[Any]) -> list[Any]:
        return [_ReadLater(tensor) for tensor in tensors]

    with values_read_late(), _replaced((backend, "batch_get_value", get)):
        yield


@contextlib.contextmanager
def _replaced(*attributes: tuple[Any, str, Any]) -> Iterator[None]:
    """Replaces attributes of modules within its context: each a module, a name and what it is to be."""
    with contextlib.ExitStack() as stack:
        for owner, name, ours in attributes:
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, ours)
        yield


def object_state(trackable: Any) -> dict[str, tf.Tensor]:
    """Returns the state that a checkpoint holds of an object itself, apart from the variables it tracks, by name.

    Lookup tables, iterators of data sets and `tf.train.experimental.PythonState` have such state; most objects have
    none.
    """
    saver = _saver(trackable)
    return {} if saver is None else dict(saver._serialize_to_tensors())


def set_object_state(trackable: Any, state: Mapping[str, tf.Tensor]) -> None:
    """Gives an object the state that `object_state` took."""
    _saver(trackable)._restore_from_tensors(dict(state))


def _saver(trackable: Any) -> Any:
    """Returns what takes and gives an object's state: itself, or a converter for an older protocol."""
    if saveable_object_util.trackable_has_serialize_to_tensor(trackable):
        return trackable
    factories = saveable_object_util.saveable_objects_from_trackable(trackable)
    if not factories:
        return None
    saveables = [
        made
        for name, factory in factories.items()
        for made in [factory(name=name) if callable(factory) else factory]
        if made is not None
    ]
    return saveable_object_util.SaveableCompatibilityConverter(trackable, saveables) if saveables else None


def replace_global_norm(ours: Callable[..., Any]) -> Callable[..., Any]:
    """Puts a function in the place of `tf.linalg.global_norm`, whatever it is called; returns the one before.

    `tf.clip_by_global_norm` calls it too. What is public are wrappers around it; the innermost, TensorFlow's
    dispatcher, keeps the function that it calls in its closure.
    """
    wrapper: Any = tf.linalg.global_norm
    while "dispatch_target" not in wrapper.__code__.co_freevars:
        wrapper = wrapper.__closure__[wrapper.__code__.co_freevars.index("fn")].cell_contents
    cell = wrapper.__closure__[wrapper.__code__.co_freevars.index("dispatch_target")]
    before, cell.cell_contents = cell.cell_contents, ours
    replaced: Callable[..., Any] = before
    return replaced


def loss_scaling() -> Any:
    """Returns the module of Keras's loss scaling, whose `_is_all_finite` decides whether to skip a step."""
    return loss_scale_optimizer


def update_loss_scale(optimizer: Any) -> Any:
    """Changes the loss scale of a `LossScaleOptimizer` as if it were given no gradient at all.

    Returns:
        Whether the gradients of the step are to be applied: a bool, or a bool tensor.
    """
    return optimizer._loss_scale.update([])[1] if optimizer.dynamic else True


def usual_gradient_aggregator() -> Any:
    """Returns what an older optimizer does with all gradients unless it is given a `gradient_aggregator`."""
    return optimizer_utils.all_reduce_sum_gradients


def follow_schedule(optimizer: Any) -> None:
    """Brings the learning rate that a new optimizer with a schedule shows to what its step counter says."""
    if isinstance(optimizer, tf_keras.optimizers.Optimizer):
        optimizer._compute_current_learning_rate()


@contextlib.contextmanager
def kept_trace() -> Iterator[None]:
    """Lets a `tf.function` keep the trace in which variables are made, outside it, within this context.

    TensorFlow traces a function anew that made variables, so as to lift their initialization out of it. What has made
    them outside already is counted all the same, and the second trace, which takes about as long as the first, would be
    the same once more.
    """

    def creator(next_creator: Callable[..., Any], **kwargs: Any) -> Any:
        if tf.executing_eagerly():
            kwargs["experimental_enable_variable_lifting"] = False
        return next_creator(**kwargs)

    with tf.variable_creator_scope(creator):
        yield


def let_optimizers_take(variable: tf.Variable, other: tf.Variable) -> None:
    """Lets Keras's optimizers take a variable for another one, whose slots and exceptions from decay are its own then.

    They know variables by this number and by their names, which have the scope that is open where they are made. Seen
    to work with TensorFlow and tf_keras 2.16 to 2.21.
    """
    variable._unique_id = other._unique_id
    variable._handle_name = other.name


#: Returns whether no gradient tape is active in this thread.
no_tape_is_recording: Callable[[], bool] = pywrap_tfe.TFE_Py_TapeSetIsEmpty


def cond_independently(due: tf.Tensor, then: Callable[[], tf.Tensor], otherwise: Callable[[], tf.Tensor]) -> tf.Tensor:
    """Returns a `tf.cond` that is exempt from automatic control dependencies.

    Args:
        due: a scalar truth value.
        then: makes the result where it is true.
        otherwise: makes the result where it is not.

    Returns:
        The result.
    """
    result = tf.cond(due, then, otherwise)
    run_independently(result.op if result.op.type != "Identity" else result.op.inputs[0].op)
    return result


def is_function(graph: Any) -> bool:
    """Returns whether a graph is that of a function, where TensorFlow orders uses of a variable and runs all."""
    return isinstance(graph, tf.__internal__.FuncGraph)


def wait_for(operation: tf.Operation, earlier: Iterable[tf.Operation]) -> None:
    """Lets an op of the graph that is being traced wait for others that were made before it."""
    operation._add_control_inputs(list(earlier))
