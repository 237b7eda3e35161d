"""Every stage of a cut step in one process: the task lists of all ranks, interpreted one after the other.

A step is traced, placed, cut and scheduled as on real ranks. Then the lists run side by side, with a dictionary in
place of the network; a task that lacks an input waits, and a list that can never go on is an error:

    stage 0   0F0  0S0.0  0F1  0S0.1  0R1.0  0B0 ...
                     │                  ▲
                  messages {(edge, microbatch): tensor}
                     ▼                  │
    stage 1        1R0.0  1F0  1B0  1S1.0 ...

What comes out is compared with the step as TensorFlow runs it uncut.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf
import tf_keras

from smp_tf.keras import layers as keras_adapter
from smp_tf.partition.graph.op_graph import ARGUMENT, CAPTURE, SEED, SOURCES, OpGraph, Tensor
from smp_tf.partition.layout import Layout
from smp_tf.partition.rewrite.passes import rewrite
from smp_tf.partition.split.split import Split, Transfer
from smp_tf.partition.split.step_outputs import Delivery
from smp_tf.partition.trace.lower import Lowered, OutputSlot, lower
from smp_tf.partition.trace.trace import Recorder, Trace, trace
from smp_tf.pipeline.planner import proposal
from smp_tf.pipeline.planner.cut import cut
from smp_tf.pipeline.planner.request import Aim, Course, PlacementRequest, Storage
from smp_tf.pipeline.run.segment_function import SegmentFunction, build_segment_function
from smp_tf.pipeline.run.step_tasks import plan_program
from smp_tf.pipeline.task import Kind, Program, Task
from tests.graphs_as_written import graphs_as_written

BASE_SEED = 7


@dataclass
class CutStep:
    """A step made ready for all stages.

    Args:
        traced: keeps alive the functions that the graph calls.
        lowered: the op graph as traced, and the TensorFlow objects behind it.
        split: the cut step.
        program: the tasks of all stages.
        variables: for each stage the variables whose handle it may use, by index in the op graph. A variable of the
            script's own has a copy on every stage.
        functions: the segments, by (chunk, sweep, part).
        notes: what the passes had to say to the user.
    """

    traced: Trace
    lowered: Lowered
    split: Split
    program: Program
    variables: list[dict[int, tf.Variable]]
    functions: dict[tuple[int, int, int], SegmentFunction]
    notes: list[str]

    @property
    def graph(self) -> OpGraph:
        return self.split.graph

    @property
    def stages(self) -> int:
        return self.split.stages

    def sent(self, source: int, target: int) -> list[Transfer]:
        """The transfers from one stage to another that a task of a pipeline waits for, not results of the step."""
        ends = [source, target]
        return [t for t in self.split.transfers if self.ends(t) == ends and t.dst_sweep is not None]

    def ends(self, transfer: Transfer) -> list[int]:
        """The stages between which a transfer goes."""
        return [self.split.placement[chunk] for chunk in (transfer.src_chunk, transfer.dst_chunk)]

    def forward(self, source: int, target: int) -> list[str]:
        """Shapes sent for every microbatch from one stage to another in the forward sweep."""
        return self._shapes(source, target, 0)

    def backward(self, source: int, target: int) -> list[str]:
        """Shapes sent for every microbatch from one stage to another in the backward sweep."""
        return self._shapes(source, target, 1)

    def _shapes(self, source: int, target: int, sweep: int) -> list[str]:
        tensors = [t.tensor for t in self.sent(source, target) if t.dst_sweep == sweep and t.tensor is not None]
        return [str(list(self.graph.type_of(t).shape or ())) for t in tensors]

    def text(self) -> str:
        """Transfers and outputs, for messages of failing tests."""
        lines = []
        for t in self.split.transfers:
            what = (
                f"value of {self.graph.variables[t.variable].name}"
                if t.tensor is None and t.variable is not None
                else f"{self.graph.nodes[t.tensor.node].name}:{t.tensor.index}"  # type: ignore[union-attr]
            )
            lines.append(
                f"{t.src_chunk}.{t.src_sweep} -> {t.dst_chunk}.{t.dst_sweep} {what}{' sum' if t.is_sum else ''}"
            )
        return "\n".join(lines)


def cut_step(
    function: Callable[..., Any],
    models: Sequence[Any],
    specs: Sequence[tf.TypeSpec],
    stages: int,
    microbatches: int,
    schedule: str = "interleaved",
    slots: float = 0.0,
    owners: Mapping[str, int] | None = None,
    placement: tuple[int, ...] | None = None,
    recompute: bool = False,
    layouts: Mapping[str, Layout] | None = None,
) -> CutStep:
    """The whole way from a function to segments of all stages.

    Args:
        function: the step function, of tensors.
        models: the distributed models it calls.
        specs: types of its arguments for one microbatch.
        stages, microbatches, schedule: how it is cut.
        slots: optimizer slots per variable that the placement reckons with.
        owners: chunks of variables that an earlier step has placed, by name.
        placement: the stage of every chunk; None for that of the schedule.
        recompute: whether backward makes again what forward made.
        layouts: of variables whose value is not whole, by name.
    """
    notes: list[str] = []
    ours = {id(v.handle) for model in models for v in model.variables}

    def scopes(recorder: Recorder) -> Any:
        return keras_adapter.tag_calls(recorder, lambda layer: any(layer is m for m in models))

    traced = trace(function, specs, lambda body, tensors: body(*tensors), scopes=scopes)
    ours |= {id(v.handle) for model in models for v in model.variables}
    names = _Names()
    lowered = lower(traced, lambda v: (names.of(v), id(v.handle) in ours))
    graph = rewrite(lowered.graph, notes.append).graph
    request = PlacementRequest(
        Course(schedule, stages, microbatches, placement=placement, recompute=recompute),
        Storage(slots),
        Aim("memory"),
    )
    decided = {v.index: owners[v.name] for v in graph.variables if owners and v.name in owners}
    plan = proposal.propose(graph, request, decided)
    returned = [s for s in tf.nest.flatten(lowered.results) if isinstance(s, OutputSlot)]
    split = cut(graph, plan, composites=[s.outputs for s in returned if s.spec is not None], layouts=layouts)
    program = plan_program(split, schedule, microbatches)
    variables: list[dict[int, tf.Variable]] = []
    for stage in range(stages):
        here: dict[int, tf.Variable] = {}
        for index, variable in enumerate(lowered.variables):
            owner = split.stage_of_variable(index)
            if owner == stage or (owner is None and stage == 0):
                here[index] = variable
            elif owner is None:
                here[index] = tf.Variable(variable, trainable=variable.trainable, shape=variable.shape)
        variables.append(here)
    functions = {
        key: build_segment_function(split.graph, segment, variables[split.placement[key[0]]])
        for key, segment in split.segments.items()
    }
    return CutStep(traced, lowered, split, program, variables, functions, notes)


#: Number of a program that is of no step of other tests: all steps of a number are counted together, in one process.
PROGRAM = 1 << 31
#: Of the batch and of every layer of `dense_chain`.
BATCH, WIDTH = 8, 4


def dense_chain(
    layers: int, stages: int, microbatches: int, schedule: str = "interleaved", *, returned: Sequence[int] | None = None
) -> CutStep:
    """A training step of dense layers; its outputs are the loss, and gradients of every kernel and bias, or which."""
    model = tf_keras.Sequential([tf_keras.layers.Dense(WIDTH, activation="tanh") for _ in range(layers)])
    model.build((None, WIDTH))

    def step(x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x) ** 2)
        gradients = tape.gradient(loss, model.trainable_variables)
        return loss, gradients if returned is None else [gradients[number] for number in returned]

    spec = tf.TensorSpec((BATCH // microbatches, WIDTH))
    return cut_step(step, [model], [spec], stages, microbatches, schedule)


class _Names:
    """Unique names for variables, in the order in which they are asked for."""

    def __init__(self) -> None:
        self._seen: dict[str, int] = defaultdict(int)

    def of(self, variable: tf.Variable) -> str:
        base = variable.name.partition(":")[0]
        self._seen[base] += 1
        return base if self._seen[base] == 1 else f"{base}_{self._seen[base] - 1}"


@dataclass
class Ran:
    """What the stages of a step hold after it ran.

    Args:
        values: per stage, tensors by (tensor, microbatch); microbatch None for what is there once per step.
        messages: every message that was sent, by (edge, microbatch).
    """

    values: list[dict[tuple[Tensor, int | None], tf.Tensor]]
    messages: dict[tuple[int, int | None], tf.Tensor]


def run_stages(step: CutStep, arguments: Sequence[Any], step_number: int = 0) -> Ran:
    """Interpret the task lists of all stages.

    Args:
        step: the cut step.
        arguments: whole batches; each is cut into microbatches of one size along axis 0.
        step_number: goes into the random seeds.
    """
    return _Interpreter(step, arguments, step_number).run()


@dataclass
class _Interpreter:
    step: CutStep
    arguments: Sequence[Any]
    step_number: int
    messages: dict[tuple[int, int | None], tf.Tensor] = field(default_factory=dict)

    def run(self) -> Ran:
        step = self.step
        self.transfers = {t.index: t for t in step.split.transfers}
        self.values: list[dict[tuple[Tensor, int | None], tf.Tensor]] = [{} for _ in range(step.stages)]
        self.remote: list[dict[int, tf.Tensor]] = [{} for _ in range(step.stages)]
        self.posted: list[set[tuple[int, int | None]]] = [set() for _ in range(step.stages)]
        self.received: set[tuple[int, int | None]] = set()
        position = [0] * step.stages
        lists = step.program.ranks
        while any(position[s] < len(lists[s]) for s in range(step.stages)):
            before = list(position)
            for stage in range(step.stages):
                while position[stage] < len(lists[stage]) and self._run(stage, lists[stage][position[stage]]):
                    position[stage] += 1
            waiting = [str(tasks[at]) for tasks, at in zip(lists, position, strict=True) if at < len(tasks)]
            assert position != before, f"no stage can go on: {waiting}"
        for stage in range(step.stages):
            self._take_in(stage)
            assert not self.posted[stage], f"stage {stage} waits for messages nobody sends: {self.posted[stage]}"
        assert self.received == set(self.messages), "messages were sent that nobody received"
        return Ran(self.values, self.messages)

    def _run(self, stage: int, task: Task) -> bool:
        """Run a task; False where something it needs has not arrived yet."""
        self._take_in(stage)
        if task.kind is Kind.SEND:
            return self._send(stage, task)
        if task.kind is Kind.RECV:
            assert task.edge is not None
            self.posted[stage].add((task.edge, task.microbatch))
            return True
        return self._compute(stage, task)

    def _take_in(self, stage: int) -> None:
        for key in sorted(self.posted[stage], key=str):
            if key in self.messages:
                assert key not in self.received, f"message {key} received twice"
                self.received.add(key)
                self.posted[stage].remove(key)
                transfer = self.transfers[key[0]]
                if transfer.tensor is not None:
                    self.values[stage][transfer.tensor, key[1]] = self.messages[key]
                else:
                    assert transfer.variable is not None
                    self.remote[stage][transfer.variable] = self.messages[key]

    def _send(self, stage: int, task: Task) -> bool:
        assert task.edge is not None
        transfer = self.transfers[task.edge]
        assert self.step.ends(transfer)[0] == stage
        key = task.edge, task.microbatch
        assert key not in self.messages, f"message {key} sent twice"
        if transfer.tensor is None:
            assert transfer.variable is not None
            self.messages[key] = self.step.variables[stage][transfer.variable].read_value()
        elif transfer.is_sum:
            parts = [self.values[stage][transfer.tensor, m] for m in range(self.step.program.microbatches)]
            self.messages[key] = tf.add_n(parts)
        else:
            self.messages[key] = self.values[stage][transfer.tensor, task.microbatch]
        return True

    def _compute(self, stage: int, task: Task) -> bool:
        assert task.sweep is not None
        assert task.microbatch is not None
        function = self.step.functions.get((task.chunk, task.sweep, task.part))
        if function is None:
            return True
        microbatch = task.microbatch
        inputs = []
        for tensor in function.takes.arguments:
            source = self._source(tensor, microbatch)
            if source is None:
                source = self.values[stage].get((tensor, microbatch))
            if source is None:
                expected = {(t.index, microbatch) for t in self.step.split.transfers if t.tensor == tensor}
                assert expected & self.posted[stage], f"{task} needs {tensor}, which no task before it receives"
                return False
            inputs.append(source)
        for variable in function.takes.remote_values:
            if variable not in self.remote[stage]:
                return False
            inputs.append(self.remote[stage][variable])
        for tensor, result in zip(function.segment.outputs, function.function(*inputs), strict=True):
            self.values[stage][tensor, microbatch] = result
        return True

    def _source(self, tensor: Tensor, microbatch: int) -> tf.Tensor | None:
        node = self.step.graph.nodes[tensor.node]
        if node.op not in SOURCES:
            return None
        if node.op == SEED:
            return tf.constant([BASE_SEED, self.step_number * (1 << 20) + microbatch], tf.int64)
        assert node.source is not None
        if node.op == CAPTURE:
            return self.step.lowered.captures[node.source]
        assert node.op == ARGUMENT
        return microbatch_of(self.arguments[node.source], microbatch, self.step.program.microbatches)


def microbatch_of(batch: Any, microbatch: int, microbatches: int) -> tf.Tensor:
    """One of the equal parts of a batch along axis 0."""
    size = len(batch) // microbatches
    return tf.constant(batch[microbatch * size : (microbatch + 1) * size])


def flat_tensors(results: Any) -> list[tf.Tensor]:
    """The tensors in what a step function returns, composite ones taken apart."""
    return [t for t in tf.nest.flatten(results, expand_composites=True) if tf.is_tensor(t)]


@dataclass
class Delivered:
    """An output of a step on one stage.

    Args:
        stage: the stage.
        per_microbatch: one array a microbatch; None where only the sum over the microbatches exists.
        total: that sum; None elsewhere.
    """

    stage: int
    per_microbatch: list[np.ndarray] | None
    total: np.ndarray | None = None


def _summed(step: CutStep, ran: Ran, stage: int, summands: Sequence[Tensor]) -> Delivered:
    """The sum of what this stage made of some tensors and of what the others sent it, once a step."""
    parts: list[np.ndarray] = []
    for summand in summands:
        chunk = step.split.assignment.places[summand.node].chunk
        made_here = chunk is not None and step.split.placement[chunk] == stage
        keys = [(summand, m) for m in range(step.program.microbatches)] if made_here else [(summand, None)]
        parts += [ran.values[stage][key].numpy() for key in keys]
    return Delivered(stage, None, np.sum(parts, axis=0))


def delivered(step: CutStep, ran: Ran, index: int) -> list[Delivered]:
    """Output number `index` of a step on every stage that gets it."""
    plan = step.split.outputs[index]
    count = range(step.program.microbatches)
    if plan.summands:
        getting = [stage for stage in range(step.stages) if plan.gets_sum(stage, step.split.placement)]
        return [_summed(step, ran, stage, plan.summands) for stage in getting]
    stages = [step.split.stage_of(plan)] if plan.delivery is Delivery.LOCAL else range(step.stages)
    found = []
    for stage in stages:
        assert stage is not None
        found.append(Delivered(stage, [np.asarray(ran.values[stage][plan.tensor, m].numpy()) for m in count]))
    return found


@dataclass
class Uncut:
    """What the step gives in one piece.

    Args:
        outputs: per microbatch the returned tensors, flattened.
        variables: values of all variables afterwards, by index in the op graph.
    """

    outputs: list[list[np.ndarray]]
    variables: list[np.ndarray]


def run_uncut(step: CutStep, function: Callable[..., Any], arguments: Sequence[Any]) -> Uncut:
    """Run the function for one microbatch after the other, and put all variables back afterwards."""
    before = [v.numpy() for v in step.lowered.variables]
    # A tf.function turns every Python value it returns into a tensor; a step leaves them as they are.
    whole = tf.function(lambda *tensors: flat_tensors(function(*tensors)))
    outputs = []
    count = step.program.microbatches
    for m in range(count):
        results = whole(*[microbatch_of(x, m, count) for x in arguments])
        outputs.append([np.asarray(t.numpy()) for t in results])
    after = [v.numpy() for v in step.lowered.variables]
    for variable, value in zip(step.lowered.variables, before, strict=True):
        variable.assign(value)
    return Uncut(outputs, after)


def distance(got: Any, wanted: Any) -> float:
    """Largest difference, relative to the largest value wanted; 0 for equal bits."""
    got, wanted = np.asarray(got), np.asarray(wanted)
    assert got.shape == wanted.shape, f"shape {got.shape} instead of {wanted.shape}"
    if wanted.dtype.kind not in "fcV" and wanted.dtype.name != "bfloat16":
        return 0.0 if np.array_equal(got, wanted) else float("inf")
    if not wanted.size:
        return 0.0
    got, wanted = got.astype("f8"), wanted.astype("f8")
    if np.array_equal(got, wanted, equal_nan=True):
        return 0.0
    return float(np.max(np.abs(got - wanted)) / (np.max(np.abs(wanted)) + 1e-30))


def assert_same(
    function: Callable[..., Any],
    models: Sequence[Any],
    arguments: Sequence[Any],
    stages: int,
    microbatches: int,
    schedule: str = "interleaved",
    *,
    dynamic: bool = False,
    tolerance: float = 0.0,
    sum_tolerance: float = 1e-6,
    owners: Mapping[str, int] | None = None,
    placement: tuple[int, ...] | None = None,
    recompute: bool = False,
) -> CutStep:
    """Cut a step, run all its stages, and compare outputs and variables with the uncut step.

    Args:
        function: the step function, of tensors.
        models: the models it calls, built.
        arguments: whole batches as arrays; their length is a multiple of `microbatches`.
        stages, microbatches, schedule: how it is cut.
        dynamic: trace with an unknown batch size.
        tolerance: relative difference allowed in outputs and variables.
        sum_tolerance: the same for gradients that are added up in another order.
        owners: chunks of variables that an earlier step has placed, by name.
        placement: the stage of every chunk; None for that of the schedule.
        recompute: whether backward makes again what forward made.

    Returns:
        The cut step, for a look at its structure.
    """
    size = None if dynamic else len(arguments[0]) // microbatches
    specs = [tf.TensorSpec((size, *x.shape[1:]), x.dtype) for x in map(np.asarray, arguments)]
    with graphs_as_written():
        step = cut_step(
            function,
            models,
            specs,
            stages,
            microbatches,
            schedule,
            owners=owners,
            placement=placement,
            recompute=recompute,
        )
        wanted = run_uncut(step, function, arguments)
        before = [v.numpy() for v in step.lowered.variables]
        ran = run_stages(step, arguments)
    for index, plan in enumerate(step.split.outputs):
        for result in delivered(step, ran, index):
            name = f"output {index} ({step.graph.nodes[plan.tensor.node].name}) on stage {result.stage}"
            if result.per_microbatch is None:
                total = sum(wanted.outputs[m][index] for m in range(microbatches))
                far = distance(result.total, total)
                assert far <= sum_tolerance, f"{name}: off by {far}\n{step.text()}"
                continue
            for m in range(microbatches):
                far = distance(result.per_microbatch[m], wanted.outputs[m][index])
                summed = _sums_anew(step, plan.tensor)
                assert far <= (sum_tolerance if summed else tolerance), (
                    f"{name}, microbatch {m}: off by {far}\n{step.text()}"
                )
    for stage, variables in enumerate(step.variables):
        for index, variable in variables.items():
            far = distance(variable.numpy(), wanted.variables[index])
            assert far <= tolerance, f"{variable.name} on stage {stage}: off by {far}"
    for index, value in enumerate(before):
        step.lowered.variables[index].assign(value)
    assert_sound(step)
    return step


def _sums_anew(step: CutStep, tensor: Tensor) -> bool:
    """Whether a value depends on a sum whose parts were added in another order than the uncut step's.

    TensorFlow begins a sum of three with one whose memory it may write to, and so not with what another segment made.
    """
    nodes, places = step.graph.nodes, step.split.assignment.places

    def is_added_anew(number: int) -> bool:
        node, chunks = nodes[number], {places[t.node].chunk for t in nodes[number].inputs}
        return "/sum_of_chunk_" in node.name or (node.op == "AddN" and len(node.inputs) > 2 and len(chunks) > 1)

    return any(map(is_added_anew, step.graph.ancestors([tensor.node])))


def assert_sound(step: CutStep) -> None:
    """What holds for every cut step, whatever the model."""
    graph, places = step.graph, step.split.assignment.places
    seen: set[tuple[Any, int]] = set()
    for t in step.split.transfers:
        key = (t.tensor if t.tensor is not None else t.variable, step.ends(t)[1])
        assert key not in seen, f"sent twice to one stage: {t}\n{step.text()}"
        seen.add(key)
        if t.tensor is not None:
            node = graph.nodes[t.tensor.node]
            assert graph.type_of(t.tensor).dtype not in ("resource", "variant", "string"), f"{node.name} is sent"
            assert node.op not in ("Const", "Shape", "ReadVariableOp"), f"{node.op} {node.name} is sent"
            assert node.op not in SOURCES, f"{node.op} {node.name} is sent"
    runs: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
    for key, segment in step.split.segments.items():
        for number in segment.nodes:
            runs[number].append(key)
    for number, node in enumerate(graph.nodes):
        if not node.stateful:
            continue
        script = any(not graph.variables[v].in_model for v in node.writes)
        wanted = step.stages if script else 1
        assert len(runs[number]) == wanted, f"{node.op} {node.name} runs {len(runs[number])} times: {places[number]}"
    for number, segments in runs.items():
        for key in segments:
            for variable in graph.nodes[number].writes:
                assert step.split.stage_of_variable(variable) in (None, step.split.placement[key[0]])
    for key, function in step.functions.items():
        for variable in function.variables:
            assert step.split.stage_of_variable(variable) in (None, step.split.placement[key[0]])
