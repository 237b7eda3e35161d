"""Cuts a placed op graph into segments: who runs which ops, and what comes from elsewhere."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence

from smp_tf.partition.errors import PlacementError
from smp_tf.partition.graph.op_graph import SOURCES, UNSENDABLE_DTYPES, VARIABLE, Tensor
from smp_tf.partition.split.assign import Assignment, Role
from smp_tf.partition.split.recompute_order import waits_of_groups
from smp_tf.partition.split.split import Segment, Split, Transfer, Visit
from smp_tf.partition.split.step_outputs import Delivery, StepOutputPlan, plan_outputs
from smp_tf.partition.units.backward_parts import input_gradient_nodes
from smp_tf.partition.units.recompute import remade_nodes

#: Ops that read a weight and can be given its value instead.
_READERS = frozenset({"ReadVariableOp", "ResourceGather", "ResourceGatherNd", "VariableShape"})


def split(
    assignment: Assignment,
    local_outputs: frozenset[int] = frozenset(),
    composites: Sequence[tuple[int, ...]] = (),
    *,
    cut_backward: Collection[int] = (),
    recompute: Mapping[int, int] | None = None,
    gathered: Collection[int] = (),
) -> Split:
    """Cuts a placed graph.

    Args:
        assignment: the placement of every op.
        local_outputs: positions of outputs that stay with the stage that makes them.
        composites: positions of outputs that are parts of one composite tensor, and stay together.
        cut_backward: chunks whose backward is made in two parts: what other chunks wait for, and all else.
        recompute: the group of each node whose layer's forward is made again in backward, group by group.
        gathered: variables whose parts are on several ranks: their layout's value is not whole.

    Returns:
        The segments, transfers and outputs of all stages.

    Raises:
        PlacementError: the cut goes through a tensor that cannot be sent, or separates an op from a variable it must
            hold the handle of; or an op does more than read a variable whose parts are on several ranks.
    """
    return _Splitter(assignment, local_outputs, composites, cut_backward, recompute or {}, gathered).run()


class _Splitter:
    def __init__(
        self,
        assignment: Assignment,
        local_outputs: frozenset[int],
        composites: Sequence[tuple[int, ...]],
        cut_backward: Collection[int],
        recompute: Mapping[int, int],
        gathered: Collection[int],
    ) -> None:
        self.assignment = assignment
        self.graph = assignment.graph
        self.places = assignment.places
        self.placement = assignment.placement
        self.outputs = plan_outputs(assignment, local_outputs, composites)
        self.replicated_sweep = assignment.replicated_sweep
        self.cut_backward = frozenset(cut_backward)
        self.waited_for: frozenset[int] = frozenset()
        self.group_of = recompute
        self.gathered = frozenset(gathered)
        # What a sweep after backward reads is kept for it.
        late = (n for n, p in enumerate(self.places) if recompute and p.role is Role.HOME and p.sweep > 1)
        kept = {t.node for number in late for t in self.graph.nodes[number].inputs}
        self.remade = remade_nodes(self.graph, recompute, kept)
        # For each segment, the nodes that it runs itself, and the tensors that it takes from elsewhere.
        self.members: dict[Visit, set[int]] = defaultdict(set)
        self.taken: dict[Visit, dict[Tensor, None]] = defaultdict(dict)
        self.remote: dict[Visit, set[int]] = defaultdict(set)
        self.exported: dict[Visit, dict[Tensor, None]] = defaultdict(dict)

    def _visit(self, number: int) -> Visit:
        """Returns the chunk, sweep and part of a node that has a chunk."""
        place = self.places[number]
        assert place.chunk is not None
        late = place.role is Role.HOME and place.sweep == 1 and number not in self.waited_for
        return Visit(place.chunk, place.sweep, self._last_part(place.chunk) if late else 0)

    def _last_part(self, chunk: int) -> int:
        """Returns the part of backward that holds what only weights need."""
        return int(chunk in self.cut_backward)

    def _replicated_keys(self) -> list[Visit]:
        """Returns where the replicated ops of each stage are: on the first of its chunks."""
        stages = range(self.assignment.stages)
        return [Visit(self.assignment.first_chunk(stage), self.assignment.replicated_sweep) for stage in stages]

    def run(self) -> Split:
        outputs = self.outputs
        never_made = {o.tensor.node for o in outputs if o.summands and o.tensor not in o.summands}
        if self.cut_backward:
            # What is summed at the owner of a weight is sent when all microbatches are done. No task waits for it.
            chunk_of = {
                n: p.chunk
                for n, p in enumerate(self.places)
                if p.role is Role.HOME and p.sweep == 1 and p.chunk is not None
            }
            self.waited_for = input_gradient_nodes(self.graph, chunk_of, never_made)
        roots: dict[Visit, dict[int, None]] = defaultdict(dict)
        for number, place in enumerate(self.places):
            if number in never_made:
                continue
            if place.role is Role.HOME:
                roots[self._visit(number)][number] = None
            elif place.role is Role.REPLICATED:
                for key in self._replicated_keys():
                    roots[key][number] = None
        for output in outputs:
            node = output.tensor.node
            if output.delivery is Delivery.MADE_BY_ALL and self.places[node].role is not Role.REPLICATED:
                for key in self._replicated_keys():
                    roots[key][node] = None
            elif self.places[node].role in (Role.WEIGHT, Role.FREE):
                roots[self._made_at(output)][node] = None
            for summand in output.summands:
                self.exported[self._visit(summand.node)][summand] = None
        for key in sorted(roots):
            for number in roots[key]:
                self._include(key, number)
        transfers, handed_on = self._transfers(outputs)
        for output in outputs:
            for key in self._replicated_keys() if output.chunk is None else [self._made_at(output)]:
                if output.tensor.node in self.members.get(key, ()):
                    self.exported[key][output.tensor] = None
        segments = {key: self._segment(key) for key in sorted(self.members) if self.members[key]}
        return Split(self.graph, self.assignment, segments, transfers, handed_on, outputs, self.gathered)

    def _made_at(self, output: StepOutputPlan) -> Visit:
        """Returns the chunk, sweep and part that make an output which not all stages make."""
        if self.places[output.tensor.node].role is Role.HOME:
            return self._visit(output.tensor.node)
        chunk = output.chunk
        assert chunk is not None
        return Visit(chunk, 1, self._last_part(chunk)) if output.is_gradient else Visit(chunk, 0)

    def _include(self, key: Visit, root: int) -> None:
        """Puts a node and the copies that it needs into a segment, and notes what must come from elsewhere."""
        stack = [root]
        members = self.members[key]
        while stack:
            number = stack.pop()
            if number in members:
                continue
            members.add(number)
            node = self.graph.nodes[number]
            if node.op in SOURCES:
                continue
            self._check_handles(key, number)
            if node.op in _READERS and self._is_remote(key, node.reads):
                self.remote[key].update(node.reads)
            for tensor in node.inputs:
                if self._runs_here(key, tensor.node, number):
                    stack.append(tensor.node)
                else:
                    self._take(key, tensor, number)

    def _is_remote(self, key: Visit, variables: tuple[int, ...]) -> bool:
        owners = {self.assignment.stage_of(self.assignment.owners[v]) for v in variables}
        return not owners <= {None, self.placement[key.chunk]}

    def _check_handles(self, key: Visit, number: int) -> None:
        node = self.graph.nodes[number]
        touched = node.reads + node.writes
        if not touched:
            return
        in_parts = next((v for v in touched if v in self.gathered), None)
        if in_parts is not None and not (node.op in _READERS and self._can_copy(touched)):
            raise PlacementError(
                f"Op {node.name!r} ({node.op}) needs the handle of {self.graph.variables[in_parts].name!r}, of which "
                f"each rank has a part. Only a weight that the step does nothing with but read it can be in parts."
            )
        if not self._is_remote(key, touched) or (node.op in _READERS and self._can_copy(touched)):
            return
        variable = next(v for v in touched if self._is_remote(key, (v,)))
        owner = self.assignment.stage_of(self.assignment.owners[variable])
        raise PlacementError(
            f"Op {node.name!r} ({node.op}) on stage {self.assignment.stage_of(key.chunk)} needs the handle of "
            f"{self.graph.variables[variable].name!r}, which stage {owner} owns. Only plain "
            f"reads of a weight that the step does not write may cross stages."
        )

    def _can_copy(self, variables: tuple[int, ...]) -> bool:
        return all(self.graph.variables[v].read_only for v in variables)

    def _runs_here(self, key: Visit, producer: int, reader: int) -> bool:
        place = self.places[producer]
        if place.role in (Role.FREE, Role.WEIGHT):
            return True
        if place.role is Role.REPLICATED:
            return key.sweep == self.replicated_sweep
        if self._is_remade(key, producer, reader):
            return not self._is_in_first_part(key, producer)
        return self._visit(producer) == key

    def _is_remade(self, key: Visit, producer: int, reader: int) -> bool:
        """Returns whether backward makes a forward op's results again, for an op of its group."""
        place = self.places[producer]
        return (
            producer in self.remade
            and place.role is Role.HOME
            and (place.chunk, place.sweep) == (key.chunk, 0)
            and key.sweep == 1
            and self.group_of.get(reader) == self.group_of[producer]
        )

    def _is_in_first_part(self, key: Visit, producer: int) -> bool:
        """Returns whether the first of two parts of backward, which comes earlier, has made an op's results again."""
        return key.part == 1 and producer in self.members[Visit(key.chunk, 1)]

    def _take(self, key: Visit, tensor: Tensor, reader: int) -> None:
        remade = self._is_remade(key, tensor.node, reader)
        if remade:
            self.exported[Visit(key.chunk, 1)][tensor] = None
        if tensor in self.taken[key]:
            return
        self.taken[key][tensor] = None
        place = self.places[tensor.node]
        kind = self.graph.type_of(tensor)
        made, needed = self.assignment.stage_of(place.chunk), self.assignment.stage_of(key.chunk)
        if made != needed and kind.dtype in UNSENDABLE_DTYPES:
            raise PlacementError(
                f"Tensor {self.graph.nodes[tensor.node].name}:{tensor.index} ({kind.dtype}) is made on stage "
                f"{made} and needed on stage {needed}; such a tensor cannot leave its process. Place the ops "
                f"around it together."
            )
        if not remade:
            self.exported[self._visit(tensor.node)][tensor] = None

    def _transfers(self, outputs: tuple[StepOutputPlan, ...]) -> tuple[tuple[Transfer, ...], tuple[Transfer, ...]]:
        """Returns what is sent, and what one chunk of a stage hands on to another.

        A stage gets a tensor once, for the first of its chunks that needs it. The others find it there.
        """
        placement, stages = self.placement, range(self.assignment.stages)
        first_need: dict[tuple[Tensor, int], tuple[int, int | None]] = {}
        within: dict[tuple[Tensor, int], int] = {}
        for visit in sorted(self.taken, key=self._when):
            chunk, sweep, _ = visit
            for tensor in self.taken[visit]:
                source = self.places[tensor.node].chunk
                if self.assignment.stage_of(source) != placement[chunk]:
                    first_need.setdefault((tensor, placement[chunk]), (chunk, sweep))
                elif source != chunk:
                    within.setdefault((tensor, chunk), sweep)
        for output in outputs:
            if output.delivery is Delivery.SENT_TO_ALL:
                for stage in stages:
                    if stage != self.assignment.stage_of(output.chunk):
                        first_need.setdefault((output.tensor, stage), (self.assignment.first_chunk(stage), None))
        found: list[Transfer] = []
        for (tensor, _), (chunk, first) in sorted(first_need.items(), key=lambda item: (item[0][0], item[0][1])):
            sent = next((o for o in outputs if o.tensor == tensor and o.delivery is Delivery.SENT_TO_ALL), None)
            made, src_sweep, _ = self._visit(tensor.node) if sent is None else self._made_at(sent)
            found.append(Transfer(len(found), tensor, None, made, src_sweep, chunk, first))
        # A gradient that the step returns twice is sent once.
        wanted = [(t, s) for o in outputs for t in o.summands for s in stages if o.gets_sum(s, placement)]
        for summand, target in dict.fromkeys(wanted):
            made, sweep_made, _ = self._visit(summand.node)
            if placement[made] != target:
                chunk = self._receiver(outputs, summand, target)
                found.append(Transfer(len(found), summand, None, made, sweep_made, chunk, None, is_sum=True))
        needed: dict[tuple[int, int], tuple[int, int]] = {}
        for visit in sorted(self.remote, key=self._when):
            chunk, sweep, _ = visit
            for variable in sorted(self.remote[visit]):
                if self.assignment.stage_of(self.assignment.owners[variable]) != placement[chunk]:
                    needed.setdefault((variable, placement[chunk]), (chunk, sweep))
        for (variable, _), (chunk, sweep) in sorted(needed.items()):
            owner = self.assignment.owners[variable]
            assert owner is not None
            found.append(Transfer(len(found), None, variable, owner, None, chunk, sweep))
        handed_on: list[Transfer] = []
        for (tensor, chunk), first_sweep in sorted(within.items()):
            made, src_sweep, _ = self._visit(tensor.node)
            index = len(found) + len(handed_on)
            handed_on.append(Transfer(index, tensor, None, made, src_sweep, chunk, first_sweep))
        return tuple(found), tuple(handed_on)

    def _when(self, key: Visit) -> tuple[int, int, int]:
        """Sorts segments in the order in which a microbatch comes to them."""
        chunk, sweep, part = key
        return sweep, -chunk if sweep % 2 else chunk, part

    def _receiver(self, outputs: Sequence[StepOutputPlan], summand: Tensor, stage: int) -> int:
        """Returns the chunk of a stage that a sum is sent to: the one that owns the variable, else the first."""
        owners = (o.chunk for o in outputs if summand in o.summands and o.chunk is not None)
        return next((c for c in owners if self.placement[c] == stage), self.assignment.first_chunk(stage))

    def _segment(self, key: Visit) -> Segment:
        members = sorted(self.members[key])
        op_of = {n: self.graph.nodes[n].op for n in members}
        nodes = tuple([n for n in members if op_of[n] not in SOURCES])
        remote = tuple(sorted(self.remote[key]))
        readers = [n for n in nodes if op_of[n] in _READERS]
        from_others = {n for n in readers if self._is_remote(key, self.graph.nodes[n].reads)}
        # These read a variable of this stage whose parts are on several ranks.
        uses = tuple(
            [n for n in readers if n not in from_others and not self.gathered.isdisjoint(self.graph.nodes[n].reads)]
        )
        # A handle that only reads of values need is not needed: they read what is fed in.
        not_fed = set(nodes) - from_others - set(uses)
        used = set[int]().union(*[self.graph.data_from[n] for n in not_fed])
        sources = tuple([n for n in members if op_of[n] in SOURCES and (op_of[n] != VARIABLE or n in used)])
        return Segment(
            key,
            nodes=nodes,
            sources=sources,
            inputs=tuple(sorted(self.taken[key])),
            remote_values=remote,
            outputs=tuple(sorted(self.exported[key])),
            after=self._waits(key) if key.sweep == 1 and self.group_of else (),
            uses=uses,
        )

    def _waits(self, key: Visit) -> tuple[tuple[int, tuple[int, ...]], ...]:
        own = {n for n in self.members[key] if self.places[n].role is Role.HOME and self._visit(n) == key}
        return waits_of_groups(self.graph, self.places, self.members[key], own, self.taken[key], self.group_of)
