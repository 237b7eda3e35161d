"""The private parts of TensorFlow that the rooms of smp_tf need, each in one small function.

They work with TensorFlow 2.21. Each has a test in tests/smp_tf/test_tf_internals.py that fails when TensorFlow changes
it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import tensorflow as tf
from tensorflow.python import pywrap_tfe
from tensorflow.python.eager import context as eager_context
from tensorflow.python.eager.polymorphic_function.concrete_function import ConcreteFunction
from tensorflow.python.framework import random_seed
from tensorflow.python.ops import control_flow_util, resource_variable_ops
from tensorflow.python.trackable.base import VARIABLE_VALUE_KEY
from tensorflow.python.training.saving import saveable_object_util
from tensorflow.tsl.profiler.protobuf import xplane_pb2

from smp_tf.errors import EnvironmentSetupError
from smp_tf.ops.graph_op import run_independently
from smp_tf.partition import tf_internals as partition_internals
from smp_tf.pipeline import allocator

UninitializedVariable: type[Any] = resource_variable_ops.UninitializedVariable
ResourceVariable: type[Any] = resource_variable_ops.ResourceVariable

#: The message that TensorBoard's profile plugin reads.
XSpace: type[Any] = xplane_pb2.XSpace


make_plain_variable = partition_internals.make_plain_variable


def scratch_graph(name: str) -> Any:
    """Returns a graph for ops that are looked at and dropped."""
    return tf.__internal__.FuncGraph(name)


def is_compiled_by_xla() -> bool:
    """Returns whether the graph that is being traced is of a function that XLA compiles as a whole."""
    if tf.executing_eagerly():
        return False
    return bool(control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()))


#: The seeds that a random op is made with: TensorFlow's global seed and the op's own; both None without a global seed.
OpSeeds = tuple[int | None, int | None]

_get_seed = random_seed.get_seed


def draw_op_seeds(op_seed: int | None) -> OpSeeds:
    """Returns the seeds that an eager random op would get now, whatever graph is being written."""
    with tf.init_scope():
        seeds: OpSeeds = _get_seed(op_seed)
    return seeds


def global_seed() -> int | None:
    """Returns the seed given to `tf.random.set_seed`; None where it was not called."""
    seed: int | None = eager_context.global_seed()
    return seed


def global_seed_generator() -> Any:
    """Returns an object that changes with every `tf.random.set_seed`; None before the first."""
    return eager_context.context()._rng


def peak_memory() -> int | None:
    """Returns the most bytes that TensorFlow's allocator has given out, on the GPU where there is one.

    Returns:
        Bytes; None where the allocator counts nothing, as on a CPU without oneDNN. With oneDNN it counts tensors of 256
        KiB or more.
    """
    return allocator.peak() or None


def memory_in_use() -> int:
    """Returns the bytes that TensorFlow's allocator has given out now; 0 where it counts nothing."""
    return allocator.in_use()


@contextlib.contextmanager
def op_seeds_from(source: Callable[[int | None], OpSeeds]) -> Iterator[None]:
    """Makes stateful random ops, within its context, with the seeds that a function gives them.

    Args:
        source: takes the seed that was asked for, or None, and returns the op's seeds.
    """
    random_seed.get_seed = source
    try:
        yield
    finally:
        random_seed.get_seed = _get_seed


def destroy_storage(variable: tf.Variable) -> None:
    """Frees the memory of a variable. Its handle stays and holds an empty tensor."""
    with tf.init_scope():
        tf.raw_ops.AssignVariableOp(resource=variable.handle, value=tf.zeros([0], variable.dtype))


def make_storage(variable: tf.Variable, value: tf.Tensor) -> None:
    """Gives a value to a variable whose memory was freed. An assignment would compare shapes."""
    with tf.init_scope():
        tf.raw_ops.AssignVariableOp(resource=variable.handle, value=value)


def checked_in_checkpoints(check: Callable[[Any], None], take: Callable[[Any, Any], bool]) -> type[Any]:
    """Returns a base class whose variables are checked before a checkpoint takes or gives their value.

    TensorFlow's checkpoints read and write a variable's memory without `numpy` and `assign`, and silently leave out a
    variable without memory. Before they take or give a value, they ask for the variable's device, by this method.

    Args:
        check: takes the variable, and raises an error where its value can be neither taken nor given.
        take: takes the variable and the value that a checkpoint has for it, and returns whether nothing more is to be
            done.
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


def object_state(trackable: Any) -> dict[str, tf.Tensor]:
    """Returns the state that a checkpoint holds of an object itself, without the variables that it tracks, by name.

    Lookup tables, iterators of data sets and `tf.train.experimental.PythonState` have such state. Most objects have
    none.
    """
    saver = _saver(trackable)
    return {} if saver is None else dict(saver._serialize_to_tensors())


def set_object_state(trackable: Any, state: Mapping[str, tf.Tensor]) -> None:
    """Gives an object the state that `object_state` has taken."""
    _saver(trackable)._restore_from_tensors(dict(state))


def _saver(trackable: Any) -> Any:
    """Returns the object that takes and gives another object's state: itself, or a converter for an older protocol."""
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
    """Replaces `tf.linalg.global_norm` by a function, under all its names, and returns the one before.

    `tf.clip_by_global_norm` calls it too. What is public are wrappers around it, which scripts may hold already; the
    innermost, TensorFlow's dispatcher, keeps the function that it calls in its closure. Seen in 2.16 to 2.21.

    Raises:
        EnvironmentSetupError: this TensorFlow keeps the function elsewhere.
    """
    wrapper: Any = tf.linalg.global_norm
    while (cell := _cell_of(wrapper, "dispatch_target")) is None:
        inner = _cell_of(wrapper, "fn")
        if inner is None:
            raise EnvironmentSetupError(
                f"smp_tf replaces what tf.linalg.global_norm calls, so that norms are those of all stages. Up to "
                f"TensorFlow 2.21 its dispatcher keeps that function in its closure, as 'dispatch_target'. Received: "
                f"TensorFlow {tf.__version__}, where it does not. Install an older TensorFlow; what has to change is "
                f"replace_global_norm in smp_tf/tf_internals.py."
            )
        wrapper = inner.cell_contents
    before, cell.cell_contents = cell.cell_contents, ours
    replaced: Callable[..., Any] = before
    return replaced


def _cell_of(function: Any, name: str) -> Any:
    """Returns the cell of a function's closure with a name; None where there is none."""
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    return function.__closure__[names.index(name)] if name in names else None


def turn_into(variable: tf.Variable, kind: type) -> None:
    """Makes a variable, as it is, one of a class with more methods: the script and Keras hold this very object.

    Seen in TensorFlow 2.16 to 2.21, where a variable's attributes are in its dictionary.

    Args:
        variable: of TensorFlow's own class.
        kind: a class that is derived from that.

    Raises:
        EnvironmentSetupError: this TensorFlow makes variables in another way.
    """
    try:
        variable.__class__ = kind
    except TypeError as error:
        raise EnvironmentSetupError(
            f"smp_tf turns a variable of the script's into a {kind.__name__}, which knows who reads it. Up to "
            f"TensorFlow 2.21 a variable's class can be changed. Received: TensorFlow {tf.__version__}, where it "
            f"cannot: {error}. Install an older TensorFlow; what has to change is turn_into in smp_tf/tf_internals.py."
        ) from None


class _Named:
    def __init__(self, function: Callable[..., Any], name: str) -> None:
        self.__name__ = name
        self._smp_function = function

    def __call__(self, *args: Any) -> Any:
        return self._smp_function(*args)


def named(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Returns a function under a name of its own, for `tf.function`, which counts its traces by themselves.

    TensorFlow warns about retracing where the same code is traced often. All programs share their code, so they would
    count as one. A callable object that is no function is counted as that object. This is so in TensorFlow 2.16 to
    2.21.

    Args:
        function: a function of tensors.
        name: for TensorFlow's messages and profiles.
    """
    return _Named(function, name)


@contextlib.contextmanager
def kept_trace() -> Iterator[None]:
    """Lets a `tf.function` keep the trace in which variables are made, outside it, within this context.

    TensorFlow traces a function that made variables a second time, to lift their initialization out of it. Variables
    that were made outside count, too, although the second trace is the same as the first, and takes as long.
    """

    def creator(next_creator: Callable[..., Any], **kwargs: Any) -> Any:
        if tf.executing_eagerly():
            kwargs["experimental_enable_variable_lifting"] = False
        return next_creator(**kwargs)

    with tf.variable_creator_scope(creator):
        yield


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


@contextlib.contextmanager
def op_by_op() -> Iterator[None]:
    """Keeps ops of the graph that is being traced out of XLA's clusters, as a context or a decorator.

    Auto-clustering (`tf.config.optimizer.set_jit(True)`) puts ops together that may run together by the graph of one
    process. Such a cluster begins when all of it can. But a tensor may come only after another rank has received one
    from this rank, and no edge of the graph says so:

        rank 0   norm of its own part ─▶ send ┐        ┌─▶ receive ─▶ scale the gradients
                                              └ rank 1 ┘
                 └─────────── put together, this waits for itself ──────────────────────┘

    The tasks themselves are separate functions, whose ops are put together as usual.

    Example:
        >>> with tf.Graph().as_default(), op_by_op():
        ...     tf.constant(1.0).op.get_attr("_XlaCompile")
        False
    """
    if tf.executing_eagerly():
        yield
        return
    with tf.xla.experimental.jit_scope(compile_ops=False):
        yield


@contextlib.contextmanager
def functions_checked(check: Callable[[Iterable[tf.Variable]], None]) -> Iterator[None]:
    """Gives the variables of each `tf.function` that runs within its context to a function, before it runs."""
    original = ConcreteFunction._call_flat

    def checked(function: Any, *args: Any, **kwargs: Any) -> Any:
        if tf.executing_eagerly():
            check(function.graph.variables)
        return original(function, *args, **kwargs)

    ConcreteFunction._call_flat = checked
    try:
        yield
    finally:
        ConcreteFunction._call_flat = original
