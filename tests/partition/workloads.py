"""Public layer graphs with measured costs, as chains of units, and what placements of them cost by the data's own rule.

    nodes   a ─▶ b ─▶ c           colour classes {a, a'}, {b, b'}, {c, c'}      units   A ─▶ B ─▶ C
            a'◀─ b'◀─ c'                                                                A ◀┄ B ◀┄ C   backward

Nodes of a class are one unit, and so are units in a circle: stages could not be put in an order. Data of the forward
pass flows to the same or a later stage. That of the backward pass flows the other way; some of the graphs have its
arrows along those of the forward pass, and are read so.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import networkx as nx
import pytest

from smp_tf.partition.place.placement import Chain
from smp_tf.partition.units.cost import Flow, Weight


@dataclass(frozen=True)
class Workload:
    """A graph to place.

    Args:
        chain: its units in topological order, with seconds, tensors, and sizes as weights.
        needs: pairs of units, the second of which is on no earlier stage.
        stages: how many.
        limit: of the sizes on a stage.
        nodes: of each unit, the nodes in it.
        data: what was read.
    """

    chain: Chain
    needs: tuple[tuple[int, int], ...]
    stages: int
    limit: float | None
    nodes: tuple[tuple[int, ...], ...]
    data: Mapping[str, Any]

    def loads(self, stage_of: Sequence[int]) -> list[float]:
        """The load of every stage, straight from the nodes: what they take, and each tensor once that comes or goes."""
        at = {node: stage for nodes, stage in zip(self.nodes, stage_of, strict=True) for node in nodes}
        loads = [0.0] * self.stages
        for node in self.data["nodes"]:
            loads[at[node["id"]]] += node["fpgaLatency"]
        cost = {edge["sourceId"]: edge["cost"] for edge in self.data["edges"]}
        crossing = {(e["sourceId"], at[e["destId"]]) for e in self.data["edges"]}
        crossing = {(source, stage) for source, stage in crossing if stage != at[source]}
        for source, stage in sorted(crossing):
            loads[stage] += cost[source]
        for source in sorted({source for source, _ in crossing}):
            loads[at[source]] += cost[source]
        return loads

    def sizes(self, stage_of: Sequence[int]) -> list[float]:
        """What every stage keeps."""
        at = {node: stage for nodes, stage in zip(self.nodes, stage_of, strict=True) for node in nodes}
        return [sum(n["size"] for n in self.data["nodes"] if at[n["id"]] == stage) for stage in range(self.stages)]


def workload(name: str) -> Workload:
    """A public workload; the test is skipped where it is absent."""
    root = Path(__file__).resolve().parents[2]
    path = Path(os.environ.get("SMP_TF_TEST_DATA", root / ".." / "shared" / "data")) / "partition" / f"{name}.json"
    if not path.is_file():
        pytest.skip(f"workload {path} is not there; set SMP_TF_TEST_DATA to the folder that has it")
    return read(json.loads(path.read_text()))


def read(data: Mapping[str, Any]) -> Workload:
    """A workload of what its file holds."""
    nodes = {node["id"]: node for node in data["nodes"]}
    first: dict[Any, int] = {}
    of_class = {node: first.setdefault(_class(nodes[node]), node) for node in nodes}
    order = nx.DiGraph()
    order.add_nodes_from(first.values())
    order.add_edges_from(_order(data["edges"], nodes, of_class))
    circles = nx.condensation(order)
    position = {
        at: unit for unit, at in enumerate(nx.lexicographical_topological_sort(circles, key=_least_of(circles)))
    }
    unit_of = {node: position[circles.graph["mapping"][of_class[node]]] for node in nodes}
    inside = tuple(tuple(sorted(n for n in nodes if unit_of[n] == unit)) for unit in range(len(position)))
    cost = {edge["sourceId"]: float(edge["cost"]) for edge in data["edges"]}
    readers: dict[int, set[int]] = {}
    for edge in data["edges"]:
        readers.setdefault(edge["sourceId"], set()).add(unit_of[edge["destId"]])
    flows = []
    for node, units in readers.items():
        if others := units - {unit_of[node]}:
            flows.append(Flow(unit_of[node], tuple(sorted(others)), cost[node], _is_backward(nodes[node])))
    sizes = [float(sum(nodes[n].get("size", 0.0) for n in own)) for own in inside]
    chain = Chain(
        tuple("+".join(map(str, own)) for own in inside),
        tuple(float(sum(nodes[n]["fpgaLatency"] for n in own)) for own in inside),
        tuple(flows),
        weights=tuple(Weight(unit, (unit,), size, 0.0, 0.0) for unit, size in enumerate(sizes)),
        seconds_per_byte=1.0,
    )
    needs = tuple(sorted((position[a], position[b]) for a, b in circles.edges))
    return Workload(chain, needs, data["maxFPGAs"], data.get("maxSizePerFPGA"), inside, data)


def branching(seed: int, blocks: int, stages: int) -> Workload:
    """A training graph of blocks one after the other, each of up to four branches of up to four nodes, and some skips.

    Args:
        seed: of what is drawn.
        blocks: how many.
        stages: to place it on.
    """
    dice = random.Random(seed)
    nodes: list[dict[str, Any]] = []
    edges: list[dict[str, Any]] = []
    cost: dict[int, float] = {}

    def node() -> int:
        number = len(nodes) + 1
        seconds = dice.choice([0, 0.1, 1, 3, 8]) * dice.random()
        size = dice.random() * 1e7 * dice.choice([0, 1, 5])
        nodes.append({"id": number, "fpgaLatency": seconds, "size": size, "colorClass": number, "isBackwardNode": 0})
        return number

    def edge(source: int, target: int) -> None:
        cost.setdefault(source, dice.choice([0.01, 0.1, 0.5]) * dice.random() * 2)
        edges.append({"sourceId": source, "destId": target, "cost": cost[source]})

    joins = [node()]
    for _ in range(blocks):
        ends = []
        for _ in range(dice.randint(1, 4)):
            ends.append(joins[-1])
            for _ in range(dice.randint(1, 4)):
                made = node()
                edge(ends[-1], made)
                ends[-1] = made
        join = node()
        for end in ends:
            edge(end, join)
        if dice.random() < 0.2 and (skipped := dice.choice(joins)) not in ends:
            edge(skipped, join)
        joins.append(join)
    forward, count = list(edges), len(nodes)
    for made in nodes[:count]:
        seconds = 2 * made["fpgaLatency"] * dice.uniform(0.5, 1.5)
        nodes.append({**made, "id": made["id"] + count, "fpgaLatency": seconds, "isBackwardNode": True})
    for made in forward:
        edge(made["destId"] + count, made["sourceId"] + count)
    for made in forward:
        # What the backward pass reads of the forward pass.
        if dice.random() < 0.3:
            edge(made["sourceId"], made["destId"] + count)
    return read({"nodes": nodes, "edges": edges, "maxFPGAs": stages})


def _class(node: Mapping[str, Any]) -> tuple[str, Any]:
    """What a node shares with those that stay together with it."""
    return ("alone", node["id"]) if node.get("colorClass") is None else ("class", node["colorClass"])


def _is_backward(node: Mapping[str, Any]) -> bool:
    return bool(node.get("isBackwardNode"))


def _least_of(circles: nx.DiGraph) -> Any:
    return lambda circle: min(circles.nodes[circle]["members"])


def _order(
    edges: Sequence[Mapping[str, Any]], nodes: Mapping[int, Mapping[str, Any]], of_class: Mapping[int, int]
) -> list[tuple[int, int]]:
    """Pairs of classes, the second of which is on no earlier stage.

    What flows from the forward to the backward pass may go to any stage: all of the first comes before.
    """
    passes: dict[tuple[bool, bool], list[tuple[int, int]]] = {}
    for edge in edges:
        source, target = edge["sourceId"], edge["destId"]
        between = of_class[source], of_class[target]
        if between[0] != between[1]:
            passes.setdefault((_is_backward(nodes[source]), _is_backward(nodes[target])), []).append(between)
    forward, backward = passes.get((False, False), []), passes.get((True, True), [])
    known = set(forward)
    along = sum(pair in known for pair in backward)
    against = sum(pair[::-1] in known for pair in backward)
    return forward + [pair if along > against else pair[::-1] for pair in backward]
