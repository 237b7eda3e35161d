"""Refuses steps that cannot be run as asked, by their traces, before anything is planned."""

from __future__ import annotations

from smp_tf.batch.cut_batch import CutBatch
from smp_tf.errors import StepError
from smp_tf.job import runtime
from smp_tf.partition.graph.op_graph import OpGraph
from smp_tf.partition.rewrite.state_reads import state_of_gradients
from smp_tf.steps import collectives_in_steps
from smp_tf.steps.trace import StepTrace


def refuse(step: str, traced: StepTrace, batch: CutBatch, *, of_keras: bool, xla: bool) -> None:
    """Raises an error where a step cannot be run as asked, and says what else there is to know about it.

    Args:
        step: name of the step.
        traced: trace of the step.
        batch: how its batch is cut.
        of_keras: whether it is a step of Keras's loops.
        xla: whether its functions are compiled with XLA.

    Raises:
        StepError: the step cannot be run as asked.
    """
    running = runtime.current()
    topology, stages = running.topology, running.config.partitions or 1
    graph = traced.graph
    _refuse_assigned_weights(step, graph, of_keras=of_keras)
    _refuse_what_needs_no_model(step, graph)
    _refuse_gradients_of_states(step, graph, batch.microbatches, of_keras=of_keras)
    collectives_in_steps.refuse_what_hangs(graph, step, stages, topology.replicas)
    collectives_in_steps.refuse_sums_in_functions(graph, step)
    if xla and running.config.gradient_offload and graph.gradients:
        raise StepError(
            f"Step {step!r} has jit_compile=True, and gradient_offload adds gradients up on the host: XLA compiles a "
            f"function for one device. Leave out one of the two."
        )
    for model in traced.models:
        model._smp_store.require_cut(stages, topology.stage)


def _refuse_assigned_weights(step: str, graph: OpGraph, *, of_keras: bool) -> None:
    for node in graph.nodes:
        for variable in map(graph.variables.__getitem__, node.writes):
            if variable.trainable and variable.in_model:
                raise StepError(
                    f"Step {step!r} assigns the trainable weight {variable.name!r} (op {node.name!r}). Within a step, "
                    f"later microbatches would see other weights than earlier ones. "
                    + (
                        "Leave it to an optimizer of tf.keras.optimizers (those of tf.compat.v1.train assign at "
                        "once), or assign between batches, in a callback."
                        if of_keras
                        else "Return the gradients and apply them after the step."
                    )
                )


def _refuse_gradients_of_states(step: str, graph: OpGraph, microbatches: int, *, of_keras: bool) -> None:
    state = state_of_gradients(graph)
    if state is not None:
        raise StepError(
            f"Step {step!r} takes gradients of what depends on {state!r}, a variable of the script that the step also "
            f"writes, for each of its {microbatches} microbatches. Each would read what those before it have written. "
            + (
                "Write the variable between batches in a callback, or train with microbatches=1 on one partition."
                if of_keras
                else "Write the variable after the step, or decorate the step with @smp.step(whole_batch=True)."
            )
        )


def _refuse_what_needs_no_model(step: str, graph: OpGraph) -> None:
    effects = [n for n, node in enumerate(graph.nodes) if node.writes or (node.stateful and not node.reads)]
    wanted = graph.ancestors([*(t.node for t in graph.outputs), *effects])
    if not any(graph.nodes[number].call or graph.nodes[number].backward for number in wanted):
        raise StepError(
            f"Nothing that step {step!r} returns or updates depends on the model. Return the loss, the gradients or "
            f"the predictions, or update a metric with them."
        )
