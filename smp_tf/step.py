"""`@smp.step`: trace one microbatch, plan, cut, and run the pipeline in the caller's graph.

Read from top to bottom: `Step.__call__` sorts the arguments, `_prepare` goes the whole way from the function to this
rank's program (trace, lower, place, cut, build), `_emit` writes the program into the graph.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from smp_tf import keras_adapter, planning, runtime, variables
from smp_tf.announce import announce
from smp_tf.data_parallel import sum_over_replicas
from smp_tf.errors import StepError
from smp_tf.input_check import add_input_check
from smp_tf.lifecycle import on_shutdown
from smp_tf.microbatching import (
    Slicer,
    SplitArgument,
    microbatch_spec,
    plan_arguments,
    sizes_of,
    static_batch_size,
)
from smp_tf.model import DistributedModel, set_step_being_traced
from smp_tf.partition.lower import Lowered, OutputSlot, lower
from smp_tf.partition.op_graph import OpGraph
from smp_tf.partition.randomness import make_stateless
from smp_tf.partition.split import Delivery
from smp_tf.partition.tf_internals import autograph_convert, leave_unconverted
from smp_tf.partition.trace import Recorder, Trace, trace
from smp_tf.pipeline.executor import StageProgram, build_stage_program, emit, plan_program
from smp_tf.plan_agreement import agree_on_plan, show_plan
from smp_tf.step_output import StepOutput
from smp_tf.tf_internals import tape_is_recording
from smp_tf.topology import CommGroup
from smp_tf.unsplit import UnsplitProgram

# A user's tf.function calls a step and its outputs; AutoGraph has nothing to convert in them.
leave_unconverted("smp_tf")

_hooks: list[Callable[[], Any]] = []


def register_post_partition_hook(hook: Callable[[], Any]) -> Callable[[], Any]:
    """Run a function after the model is partitioned and before its first forward pass.

    Args:
        hook: takes no argument; it runs eagerly, once, on every rank.

    Returns:
        The function itself, so this serves as a decorator.

    Raises:
        TypeError: it cannot be called.

    Example:
        >>> @smp.register_post_partition_hook
        ... def show():
        ...     print(len(model.local_variables))
    """
    if not callable(hook):
        raise TypeError(f"A post-partition hook is a function without arguments. Received: {hook!r}")
    _hooks.append(hook)
    return hook


@dataclass(frozen=True)
class _Slot:
    """Place of a tensor argument in the structure of a call's arguments."""

    index: int


@dataclass(frozen=True)
class _Arguments:
    """A call's arguments, sorted.

    Args:
        structure: positional and keyword arguments, each tensor replaced by a `_Slot`.
        tensors: the tensors, composite ones whole.
        names: full name of each tensor, for messages.
        roots: name of the parameter each belongs to.
    """

    structure: Any
    tensors: tuple[Any, ...]
    names: tuple[str, ...]
    roots: tuple[str, ...]


@dataclass(frozen=True)
class _Program:
    """A step made ready for one signature: this rank's program and what is needed to call it.

    The trace is kept since TensorFlow forgets the functions it holds (loop bodies, fused layers) along with it.
    """

    name: str
    trace: Trace
    stage_program: StageProgram
    lowered: Lowered
    arguments: tuple[SplitArgument, ...]
    microbatches: int
    ordinal: int
    counter: tf.Variable


class _StepTrace:
    """A trace under way: which models are being called, and where new variables go."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.models: list[DistributedModel] = []
        self._open: list[DistributedModel] = []

    @contextlib.contextmanager
    def model_call(self, model: DistributedModel) -> Iterator[None]:
        """Note that a distributed model is being called."""
        if model not in self.models:
            self.models.append(model)
        self._open.append(model)
        try:
            yield
        finally:
            self._open.pop()

    def creator(self, next_creator: Callable[..., Any], **kwargs: Any) -> Any:
        """Make a variable: without storage inside a model's call, at once elsewhere."""
        if self._open:
            return self._open[-1]._smp_store.creator(next_creator, **kwargs)
        return variables.make_script_variable(**kwargs)


class Step:
    """A function decorated with `@smp.step`.

    Args:
        function: one forward and backward (or one forward) of one microbatch.
        options: see `step`.
    """

    def __init__(self, function: Callable[..., Any], options: _Options) -> None:
        functools.update_wrapper(self, function)
        self._function = function
        self._options = options
        self._signature = inspect.signature(function)
        self._programs: dict[Any, _Program | UnsplitProgram] = {}
        self._runners: dict[Any, Any] = {}
        options.check(self._signature, self.__name__)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None:
            return self
        bound = self.__dict__.setdefault("_bound", {})
        if id(instance) not in bound:
            bound[id(instance)] = Step(functools.partial(self._function, instance), self._options)
        return bound[id(instance)]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step on a batch.

        Args:
            args, kwargs: the arguments of the function, tensors of the whole batch.

        Returns:
            What the function returns, with a `StepOutput` in place of every tensor.
        """
        runtime.current()
        if tape_is_recording():
            raise StepError(
                f"Step {self.__name__!r} was called under a tf.GradientTape. Gradients cannot be taken through a step "
                f"from outside, since its ops are spread over ranks: open the tape inside the step function and "
                f"return the gradients from it."
            )
        arguments = self._sort(args, kwargs)
        key = self._key(arguments)
        if key not in self._programs:
            if not self._programs:
                on_shutdown(self._forget)
            self._programs[key] = self._prepare(arguments)
        program = self._programs[key]
        if isinstance(program, UnsplitProgram):
            return program(arguments.tensors)
        if tf.executing_eagerly():
            if key not in self._runners:
                self._runners[key] = _EagerRunner(program, self._options)
            return self._runners[key](arguments.tensors)
        return _results(program, _emit(program, arguments.tensors, self._options))

    def _forget(self) -> None:
        self._programs.clear()
        self._runners.clear()

    def _sort(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Arguments:
        try:
            bound = self._signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"Step {self.__name__!r}: {error}") from None
        signature = self._options.input_signature
        tensors: list[tf.Tensor] = []
        names: list[str] = []
        roots: list[str] = []

        def keep(root: str, path: str, tensor: Any) -> _Slot:
            tensors.append(tensor)
            names.append(path)
            roots.append(root)
            return _Slot(len(tensors) - 1)

        def place(root: str, path: str, value: Any, spec: Any = None) -> Any:
            if isinstance(value, (tf.Tensor, np.ndarray, np.generic)) or (spec is not None and value is not None):
                tensor = value if isinstance(value, tf.Tensor) else tf.convert_to_tensor(value)
                if spec is not None and tensor.dtype != spec.dtype:
                    tensor = tf.cast(tensor, spec.dtype)
                return keep(root, path, tensor)
            if isinstance(value, tf.__internal__.CompositeTensor) and not isinstance(value, tf.Variable):
                return keep(root, path, value)
            if isinstance(value, Mapping):
                return type(value)({k: place(root, f"{path}[{k!r}]", v) for k, v in value.items()})
            if isinstance(value, tuple) and hasattr(value, "_fields"):
                return type(value)(*(place(root, f"{path}.{f}", v) for f, v in zip(value._fields, value, strict=True)))
            if isinstance(value, (list, tuple)):
                return type(value)(place(root, f"{path}[{i}]", v) for i, v in enumerate(value))
            return value

        specs = list(signature) if signature is not None else []
        structure: dict[str, Any] = {}
        for position, (name, value) in enumerate(bound.arguments.items()):
            spec = specs[position] if position < len(specs) and isinstance(specs[position], tf.TensorSpec) else None
            structure[name] = place(name, name, value, spec)
        return _Arguments(structure, tuple(tensors), tuple(names), tuple(roots))

    def _key(self, arguments: _Arguments) -> Any:
        static = repr(arguments.structure)
        return static, tuple(repr(tf.type_spec_from_value(t)) for t in arguments.tensors)

    def _prepare(self, arguments: _Arguments) -> _Program | UnsplitProgram:
        """The whole way from the function to this rank's program, for one signature."""
        running = runtime.current()
        config = running.config
        stages = config.partitions or 1
        planned = plan_arguments(
            arguments.names, arguments.roots, arguments.tensors, self._options.non_split, self._options.axes
        )
        batch = static_batch_size(planned)
        microbatches = self._microbatches(batch, config.microbatches)
        size = None
        if batch is not None:
            sizes = sizes_of(batch, microbatches)
            size = sizes[0] if len(set(sizes)) == 1 else None

        step_traces: list[_StepTrace] = []

        @contextlib.contextmanager
        def scopes(recorder: Recorder) -> Iterator[None]:
            current = _StepTrace(recorder)
            step_traces.append(current)
            before = set_step_being_traced(current)
            try:
                with (
                    variables.tracing_step(),
                    tf.variable_creator_scope(current.creator),
                    keras_adapter.tag_layer_calls(recorder, lambda layer: isinstance(layer, DistributedModel)),
                ):
                    yield
            finally:
                set_step_being_traced(before)

        traced = trace(
            self._function,
            [microbatch_spec(argument, size) for argument in planned],
            lambda body, tensors: self._call(body, arguments.structure, tensors),
            scopes=scopes,
            autograph=self._options.autograph,
            name=self.__name__,
        )
        models = step_traces[-1].models
        if not models:
            raise StepError(
                f"Step {self.__name__!r} calls no distributed model, so there is nothing to split. Call an instance "
                f"of a subclass of smp.DistributedModel inside it."
            )
        for model in models:
            for variable in model.variables:
                model._smp_store.adopt(variable)
        lowered = lower(traced, _describe)
        graph = make_stateless(lowered.graph, lambda note: announce(note, running.topology.rank))
        is_random = graph is not lowered.graph
        graph = planning.prune(graph)
        self._check(graph)
        if stages == microbatches == running.topology.size == 1 and not is_random:
            _settle(models, lowered, [0] * len(lowered.variables), 0, running.seed)
            self._run_hooks()
            body = autograph_convert(self._function) if self._options.autograph else self._function
            return UnsplitProgram(traced, lowered, lambda given: self._call(body, arguments.structure, given))
        request = planning.PlacementRequest(stages, microbatches, config.pipeline, config.optimize, slots=2.0)
        proposed = planning.propose(graph, request, _owners_decided(lowered))
        with tf.init_scope():
            plan, number = agree_on_plan(self.__name__, _described(planned), proposed, graph)
        cut = planning.cut(
            graph,
            plan,
            _local_outputs(lowered.results, self._options.local_outputs),
            _composites(lowered.results),
        )
        if any(model._smp_store.is_new for model in models):
            show_plan(planning.with_exact_transfers(plan, cut))
        stage = running.topology.mp_rank
        _settle(models, lowered, cut.assignment.owners, stage, running.seed)
        ranks = running.topology.members(CommGroup.PP_GROUP)
        mine = {
            index: variable
            for index, variable in enumerate(lowered.variables)
            if cut.assignment.owners[index] in (None, stage)
        }
        program = build_stage_program(
            cut, stage, ranks, plan_program(cut, config.pipeline, microbatches), number, mine
        )
        self._run_hooks()
        counter = variables.make_script_variable(
            initial_value=np.int64(0), trainable=False, name=f"{self.__name__}_steps"
        )
        return _Program(
            self.__name__, traced, program, lowered, planned, microbatches, _next_ordinal(), counter
        )

    def _run_hooks(self) -> None:
        with tf.init_scope():
            while _hooks:
                _hooks.pop(0)()

    def _check(self, graph: OpGraph) -> None:
        """Raise where the traced step cannot mean anything sensible when it is split."""
        for node in graph.nodes:
            for index in node.writes:
                variable = graph.variables[index]
                if variable.trainable and variable.in_model:
                    raise StepError(
                        f"Step {self.__name__!r} assigns the trainable weight {variable.name!r} (op {node.name!r}). "
                        f"Within a step, later microbatches would see other weights than earlier ones. Return the "
                        f"gradients and apply them after the step."
                    )
        wanted = graph.ancestors(t.node for t in graph.outputs)
        if not any(graph.nodes[number].call for number in wanted):
            raise StepError(
                f"Nothing that step {self.__name__!r} returns depends on the model. Return the loss, the gradients "
                f"or the predictions."
            )

    def _microbatches(self, batch: int | None, wanted: int) -> int:
        if batch is None or batch >= wanted:
            return wanted
        if not self._programs:
            raise StepError(
                f"The first batch of step {self.__name__!r} has {batch} samples, fewer than the {wanted} microbatches "
                f"it is to be cut into. Use batches of at least {wanted} samples, or fewer microbatches."
            )
        return batch

    def _call(self, body: Callable[..., Any], structure: Mapping[str, Any], tensors: Sequence[Any]) -> Any:
        filled = {name: _fill(value, tensors) for name, value in structure.items()}
        bound = self._signature.bind_partial()
        bound.arguments.update(filled)
        return body(*bound.args, **bound.kwargs)


def _fill(value: Any, tensors: Sequence[Any]) -> Any:
    """A structure of arguments with tensors in place of slots."""
    if isinstance(value, _Slot):
        return tensors[value.index]
    if isinstance(value, Mapping):
        return type(value)({k: _fill(v, tensors) for k, v in value.items()})
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_fill(v, tensors) for v in value))
    if isinstance(value, (list, tuple)):
        return type(value)(_fill(v, tensors) for v in value)
    return value


def _describe(variable: tf.Variable) -> tuple[str, bool]:
    store = variables.store_of(variable)
    if store is None:
        return variable.name.partition(":")[0], False
    state = store.state(variable)
    assert state is not None
    return state.name, True


def _owners_decided(lowered: Lowered) -> dict[int, int]:
    """Owners of variables that an earlier step has placed, by index in the graph."""
    decided = {}
    for index, variable in enumerate(lowered.variables):
        store = variables.store_of(variable)
        state = store.state(variable) if store is not None else None
        if state is not None and state.owner is not None:
            decided[index] = state.owner
    return decided


def _settle(
    models: Iterable[DistributedModel], lowered: Lowered, owners: Sequence[int | None], stage: int, seed: int
) -> None:
    """Tell every model who owns its variables; this rank's get their initial values now."""
    by_handle = {id(v.handle): owners[index] for index, v in enumerate(lowered.variables)}
    for model in models:
        store = model._smp_store
        by_position = {}
        for variable in store:
            owner = by_handle.get(id(variable.handle))
            state = store.state(variable)
            if owner is not None and state is not None:
                by_position[state.position] = owner
        store.settle(by_position, stage, seed)


def _described(arguments: Sequence[SplitArgument]) -> dict[str, str]:
    """The tensor arguments for a comparison between ranks."""
    return {a.name: f"{a.spec.dtype.name}{a.spec.shape}" for a in arguments}


def _local_outputs(results: Any, names: Sequence[str]) -> frozenset[int]:
    """Positions of the outputs that are named in `local_outputs`, by key or position in the returned structure."""
    if not names:
        return frozenset()
    found: set[int] = set()
    for name in names:
        part = _part_of(results, name)
        found.update(i for slot in tf.nest.flatten(part) if isinstance(slot, OutputSlot) for i in slot.outputs)
    return frozenset(found)


def _composites(results: Any) -> list[tuple[int, ...]]:
    """Positions of the outputs that are parts of one composite tensor."""
    slots = (slot for slot in tf.nest.flatten(results) if isinstance(slot, OutputSlot))
    return [slot.outputs for slot in slots if slot.spec is not None]


def _part_of(results: Any, name: str) -> Any:
    if isinstance(results, Mapping) and name in results:
        return results[name]
    if isinstance(results, tuple) and hasattr(results, "_fields") and name in results._fields:
        return getattr(results, name)
    if isinstance(results, (list, tuple)) and str(name).isdigit() and int(name) < len(results):
        return results[int(name)]
    raise StepError(
        f"local_outputs names {name!r}, which is not in what the step returns. Use a key of the returned mapping, a "
        f"field of the returned named tuple, or a position in the returned sequence."
    )


_ordinals = itertools.count()


def _next_ordinal() -> int:
    """How many programs were made since `smp.init`: the same on every rank and for any number of partitions."""
    ordinal = next(_ordinals)
    if ordinal == 0:
        on_shutdown(_restart_ordinals)
    return ordinal


def _restart_ordinals() -> None:
    global _ordinals
    _ordinals = itertools.count()


@dataclass(frozen=True)
class _Flat:
    """What a program gave, by output.

    Args:
        values: one tensor per microbatch, or None.
        accumulated: the sum over microbatches (and replicas) of weight x value, or None.
        weights: weight of each microbatch of this replica.
        total_weight: sum of the weights behind `accumulated`.
    """

    values: list[list[tf.Tensor] | None]
    accumulated: list[tf.Tensor | None]
    weights: Sequence[Any]
    total_weight: Any

    def tensors(self) -> list[tf.Tensor]:
        """All tensors, for a function to return."""
        found = [tensor for values in self.values if values is not None for tensor in values]
        found += [tensor for tensor in self.accumulated if tensor is not None]
        return found + [w for w in (*self.weights, self.total_weight) if isinstance(w, tf.Tensor)]

    def filled(self, tensors: Iterable[tf.Tensor]) -> _Flat:
        """The same with other tensors, in the order of `tensors()`."""
        left = iter(tensors)
        values = [None if v is None else [next(left) for _ in v] for v in self.values]
        accumulated = [None if t is None else next(left) for t in self.accumulated]
        weights = [next(left) if isinstance(w, tf.Tensor) else w for w in self.weights]
        total = next(left) if isinstance(self.total_weight, tf.Tensor) else self.total_weight
        return _Flat(values, accumulated, weights, total)


def _emit(program: _Program, tensors: Sequence[tf.Tensor], options: _Options) -> _Flat:
    """Write a program into the current graph."""
    running = runtime.current()
    slicer = Slicer(program.arguments, tensors, program.microbatches)
    replicas = running.topology.dp_size
    sizes = slicer.sizes
    equal = replicas == 1 and all(isinstance(s, int) for s in sizes) and len(set(sizes)) == 1
    weights: Sequence[Any] = [1] * len(sizes) if equal else list(sizes)
    number = program.stage_program.number
    # Masks depend on the replica, the step and the microbatch; never on how many partitions there are.
    base = (running.seed * 0x9E3779B1 + running.topology.dp_rank * 0x85EBCA77 + program.ordinal) % (1 << 61)
    done_before = program.counter.assign_add(1, read_value=True) - 1

    def seed(microbatch: int) -> tf.Tensor:
        return tf.stack([tf.constant(base, tf.int64), done_before * (1 << 20) + microbatch])

    keep = frozenset(range(len(program.stage_program.split.outputs))) if options.keep_gradients else frozenset()
    results = emit(program.stage_program, slicer, program.lowered.captures, seed, None if equal else weights, keep)
    if running.config.check_inputs:
        stage_program = program.stage_program
        add_input_check(
            program.name, program.arguments, tensors, results.step, number, stage_program.ranks, stage_program.stage
        )
    accumulated, total = results.accumulated, _total(weights)
    if replicas > 1:
        accumulated, total = _over_replicas(accumulated, total, f"smp_gradients_{number}")
    return _Flat(results.values, accumulated, weights, total)


def _total(weights: Sequence[Any]) -> Any:
    if all(isinstance(w, int) for w in weights):
        return sum(weights)
    return tf.add_n([tf.cast(w, tf.int64) for w in weights])


def _over_replicas(
    accumulated: Sequence[tf.Tensor | None], total: Any, name: str
) -> tuple[list[tf.Tensor | None], tf.Tensor]:
    """Sums over microbatches and their weight, summed over the replicas."""
    present = [t for t in accumulated if t is not None]
    *sums, total = sum_over_replicas([*present, tf.cast(total, tf.float64)], name)
    left = iter(sums)
    return [None if t is None else next(left) for t in accumulated], total


def _results(program: _Program, flat: _Flat) -> Any:
    """The structure the step function returned, with step outputs in it."""
    plans = program.stage_program.split.outputs
    graph = program.lowered.graph
    replicas = runtime.current().topology.dp_size

    def output(slot: Any) -> Any:
        if not isinstance(slot, OutputSlot):
            return slot
        plan = plans[slot.outputs[0]]
        name = graph.nodes[graph.outputs[slot.outputs[0]].node].name
        if slot.spec is not None and plan.is_gradient and replicas > 1:
            raise StepError(
                f"{name} is a sparse gradient; averaging sparse gradients over replicas is not supported yet. Return "
                f"tf.convert_to_tensor(gradient) from the step, or train with one replica."
            )
        return StepOutput(
            name,
            _packed(slot, [flat.values[i] for i in slot.outputs]),
            flat.weights,
            total=flat.accumulated[slot.outputs[0]] if slot.spec is None else None,
            total_weight=flat.total_weight,
            owner=plan.stage,
            is_local=plan.delivery is not Delivery.LOCAL or plan.stage == program.stage_program.stage,
            is_gradient=plan.is_gradient,
        )

    return tf.nest.map_structure(output, program.lowered.results)


def _packed(slot: OutputSlot, parts: Sequence[list[tf.Tensor] | None]) -> list[Any] | None:
    """Values per microbatch, composite tensors put together."""
    if any(part is None for part in parts):
        return None
    if slot.spec is None:
        return parts[0]
    return [
        tf.nest.pack_sequence_as(slot.spec, list(tensors), expand_composites=True)
        for tensors in zip(*parts, strict=True)  # type: ignore[arg-type]
    ]


class _EagerRunner:
    """Runs a program that was called eagerly: a tf.function of its own, and step outputs from what it returns."""

    def __init__(self, program: _Program, options: _Options) -> None:
        self._program = program
        self._layout: _Flat | None = None

        def run(*tensors: tf.Tensor) -> list[tf.Tensor]:
            self._layout = _emit(program, tensors, options)
            return self._layout.tensors()

        self._function = tf.function(run, autograph=False)

    def __call__(self, tensors: Sequence[tf.Tensor]) -> Any:
        flat = self._function(*tensors)
        assert self._layout is not None
        return _results(self._program, self._layout.filled(flat))


@dataclass(frozen=True)
class _Options:
    """The options of `@smp.step`."""

    non_split: frozenset[str]
    axes: Mapping[str, int]
    local_outputs: tuple[str, ...]
    keep_gradients: bool
    input_signature: Sequence[Any] | None
    autograph: bool

    def check(self, signature: inspect.Signature, name: str) -> None:
        """Raise where an option names a parameter the step does not have."""
        for option, named in (("non_split_inputs", self.non_split), ("input_split_axes", self.axes)):
            for parameter in named:
                if parameter not in signature.parameters:
                    raise StepError(
                        f"{option} of step {name!r} names {parameter!r}, but the step's parameters are "
                        f"{', '.join(signature.parameters) or 'none'}."
                    )


def step(
    function: Callable[..., Any] | None = None,
    *,
    non_split_inputs: Iterable[str] | None = None,
    input_split_axes: Mapping[str, int] | None = None,
    local_outputs: Iterable[str] | None = None,
    keep_microbatch_gradients: bool = False,
    input_signature: Sequence[Any] | None = None,
    autograph: bool = True,
) -> Any:
    """Decorate one forward-backward function so that it is split over the partitions and pipelined.

    The body is traced for one microbatch. Its tensor arguments are cut along axis 0, it runs for every microbatch, and
    each tensor it returns comes back as a `smp.StepOutput`.

    Args:
        function: the function; left out when the decorator is given options.
        non_split_inputs: names of parameters that are passed whole to every microbatch.
        input_split_axes: the axis along which a parameter is cut, where it is not axis 0.
        local_outputs: keys, fields or positions in what the function returns that stay on the rank that makes them.
        keep_microbatch_gradients: keep gradients per microbatch beside their sum.
        input_signature: as for `tf.function`: a list of `tf.TensorSpec` of the whole batch; arguments are cast to it.
        autograph: convert Python control flow over tensors.

    Returns:
        A `Step`, callable eagerly or inside a `tf.function`.

    Raises:
        StepError: an option names a parameter that does not exist.

    Example:
        >>> @smp.step
        ... def train(images, labels):
        ...     with tf.GradientTape() as tape:
        ...         loss = loss_fn(labels, model(images, training=True))
        ...     return tape.gradient(loss, model.trainable_variables), loss
        >>> gradients, loss = train(images, labels)
        >>> average = loss.reduce_mean()
    """
    options = _Options(
        non_split=frozenset(non_split_inputs or ()),
        axes=dict(input_split_axes or {}),
        local_outputs=tuple(local_outputs or ()),
        keep_gradients=keep_microbatch_gradients,
        input_signature=input_signature,
        autograph=autograph,
    )
    if function is None:
        return lambda decorated: Step(decorated, options)
    return Step(function, options)
