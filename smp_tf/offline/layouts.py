"""Where the weights of an offline plan, their gradients and their slots would be: the layouts that a job decides."""

from __future__ import annotations

import dataclasses
import json

from smp_tf.config.config import Config
from smp_tf.config.keys import ONE_BIT
from smp_tf.offline.plan import OfflinePlan
from smp_tf.partition.layout import Layout
from smp_tf.partition.place.shared_layouts import with_shared_slots
from smp_tf.partition.spread import EVERYWHERE, Partial
from smp_tf.sharding.shares import sized


def layouts_of(made: OfflinePlan, config: Config) -> dict[str, Layout]:
    """Returns the layout of every weight of a model, by name, as the first training step would decide it.

    Args:
        made: the plan.
        config: the configuration that it was made for.
    """
    graph, traced = made.graph, made.trace.traced
    index_of = {id(variable.handle): index for index, variable in enumerate(traced.lowered.variables)}
    # In the order in which a job comes to them, by which equal weights are shared out.
    weights = {
        graph.variables[index_of[id(weight.handle)]].name: weight
        for model in traced.models
        for weight in model._smp_store
        if id(weight.handle) in index_of
    }
    found = {}
    for name in weights:
        chunk = made.plan.owners[name]
        found[name] = Layout(made.plan.placement[chunk], chunk)
    if made.replicas > 1 and config.gradient_compression == ONE_BIT:
        # The optimizer averages gradients, or what it computes from them.
        return {name: dataclasses.replace(layout, gradient=Partial("D")) for name, layout in found.items()}
    if made.replicas > 1 and (config.shard_optimizer_state or config.optimizer_offload):
        trained = {graph.variables[gradient.variable].name for gradient in graph.gradients}
        shared = [n for n, weight in weights.items() if n in trained and weight.shape.is_fully_defined()]
        with_slots = with_shared_slots([(sized(weights[name]), found[name]) for name in shared], made.replicas, {})
        found.update(zip(shared, with_slots, strict=True))
    if config.gradient_offload or config.optimizer_offload:
        # All replicas get all averages: on the host they are summed in equal parts.
        return {name: dataclasses.replace(layout, gradient=EVERYWHERE) for name, layout in found.items()}
    return found


def as_json(made: OfflinePlan, config: Config) -> str:
    """Returns the layouts of a plan as JSON text.

    Args:
        made: the plan.
        config: the configuration that it was made for.
    """
    layouts = {name: layout.to_json() for name, layout in layouts_of(made, config).items()}
    whole = {"partitions": made.plan.stages, "replicas": made.replicas, "layouts": layouts}
    return json.dumps(whole, indent=1, ensure_ascii=False) + "\n"


def as_text(made: OfflinePlan, config: Config) -> str:
    """Returns the layouts of a plan as text, a line for each weight.

    Args:
        made: the plan.
        config: the configuration that it was made for.
    """
    return "".join(f"{name}: {layout}\n" for name, layout in layouts_of(made, config).items())
