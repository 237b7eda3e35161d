"""Restores a checkpoint into objects that exist, and into those that are made later.

restore()          files checked; what exists here and belongs here: compared, read once and thrown away
                   ── all ranks agree that all is well ──▶ read again and assigned
first step         owners decided: the same for the model's variables, whose values replace their initial ones
apply_gradients    slots made: assigned, in place of zeros
second step        what nobody has taken up is an error

One survey says what there is. It is handed on from each of these moments to the next. Only a step that makes variables
of a model, as the first one does, replaces it by a new one.

A rank reads only the tensors, or rows of them, that it stores, from the parts that hold them, a few at a time. It reads
them twice. The first time it only checks whether they are whole, and tells all ranks. The second time it assigns. So
nothing is assigned anywhere before every rank has seen its own tensors whole, and a damaged file leaves all ranks
unchanged. Keeping what was read the first time would take memory for a second set of weights and slots.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from smp_tf import tf_internals
from smp_tf.announce import announce
from smp_tf.checkpoint.files import problems_of_files
from smp_tf.checkpoint.manifest import Manifest, StoredTensor
from smp_tf.checkpoint.newest_whole import HINT
from smp_tf.checkpoint.survey import Item, StateKind, Survey, survey, variable_of_slot
from smp_tf.checkpoint.tensors import read_rows, read_tensors
from smp_tf.errors import CheckpointError
from smp_tf.job import exchange, runtime
from smp_tf.keras import adapter
from smp_tf.partition.spread import EVERYWHERE
from smp_tf.sharding import layouts
from smp_tf.variables import assigned_values, precedence, step_seeds, store
from smp_tf.variables.decision import Decision

_MOST_KEYS = 10


class Restore:
    """One restore, from the call until all its state is taken.

    Args:
        checkpoint: the `tf.train.Checkpoint` to restore into.
        directory: of the checkpoint's files.
        manifest: of the checkpoint, the same on all ranks.
        expect_partial: whether left-over or missing state is no error.
    """

    def __init__(self, checkpoint: Any, directory: str, manifest: Manifest, expect_partial: bool) -> None:
        self._checkpoint = checkpoint
        self._directory = directory
        self._manifest = manifest
        self._partial = expect_partial
        self._done: set[str] = set()
        self._steps = 0
        self._found = Survey()
        #: Whether the survey was made for the step that is being prepared.
        self._is_of_step = False
        self._moment = precedence.now()
        self.due = store.make_script_variable(initial_value=True, trainable=False, name="smp_due")

    @property
    def name(self) -> str:
        """Returns the checkpoint's name, such as "ckpt-3"."""
        return self._manifest.name

    def begin(self) -> None:
        """Checks the files, and restores what exists.

        Raises:
            CheckpointError: on all ranks, when something is damaged, missing, or does not fit on any of them.
        """
        found = self._found = survey(self._checkpoint)
        items = self._to_take(found)
        damage = list(problems_of_files(self._directory, self._manifest))[:1]
        problems = self._misfits(items)
        if found.has_models and not found.unfinished and not found.waiting:
            problems += self._left_over(found)
        damage += [] if problems or damage else self._damage({item.key: item.rows for item in items})
        self._agree(problems, damage, f"restoring checkpoint {self.name!r}")
        self._assign(items)
        step_seeds.restore(self._manifest.random)

    def values_for(self, decided: Sequence[Decision]) -> Callable[[Any], tf.Tensor | None]:
        """Does what `pending.values_for` says."""
        found = self._found = survey(self._checkpoint)
        key_of = found.key_of()
        place = runtime.current().topology.place
        known = {key_of[key]: d for d in decided if (key := id(d.variable.handle)) in key_of}
        if not known:
            self._is_of_step = True
            return lambda variable: None
        here = {key: decision for key, decision in known.items() if decision.layout.is_here(place)}
        own = {key: Item(key, StateKind.MODEL, decision.variable, decision.layout) for key, decision in here.items()}
        problems = self._misfits(own.values())
        wanted = dict.fromkeys(own) | self._slots_to_look_at({key: item.target for key, item in own.items()}, found)
        with tf.init_scope():
            damage = [] if problems else self._damage(wanted)
        self._agree(problems, damage, f"restoring the model's variables from checkpoint {self.name!r}")
        self._is_of_step = True

        def value(variable: Any) -> tf.Tensor | None:
            key = key_of.get(id(variable.handle))
            if key not in own or key not in self._manifest.tensors:
                return None
            self._done.add(key)
            if precedence.is_given_after(variable, self._moment):
                return None
            with tf.init_scope():
                [(_, tensor)] = read_tensors(self._directory, self._manifest, [key])
            return tensor

        return value

    def stages_there(self, variables: Sequence[Any]) -> Sequence[int | None]:
        """Does what `pending.stages_there` says."""
        if self._manifest.partitions != runtime.current().topology.stages:
            return [None] * len(variables)
        key_of, tensors = survey(self._checkpoint).key_of(), self._manifest.tensors
        stored = [tensors.get(key_of.get(id(variable.handle), "")) for variable in variables]
        return [None if tensor is None else tensor.stage for tensor in stored]

    def take_what_exists(self) -> None:
        """Does what `pending.take_what_exists` says."""
        is_surveyed, self._is_of_step = self._is_of_step, False
        # Later, the script may have changed the objects that it has made.
        if self._steps == 0:
            self._found = self._found.again() if is_surveyed else survey(self._checkpoint)
            self._take(self._to_take(self._found))

    def optimizer_ready(self, optimizer: Any) -> None:
        """Gives values to the slots and other variables that an optimizer has made."""
        known = {id(adapter.slots().innermost(one)) for one in self._found.found_at.values()}
        is_known = id(adapter.slots().innermost(optimizer)) in known
        # The script may have added it to the checkpoint after the call.
        found = self._found = self._found.again() if is_known else survey(self._checkpoint)
        ready = set(found.optimizers) - set(found.waiting)
        self._take([item for item in self._to_take(found) if item.optimizer in ready])

    def count_step(self) -> None:
        """Notes that a step begins.

        Raises:
            CheckpointError: earlier steps have left state over.
        """
        self._steps += 1
        if self._steps > 1 and self.due:
            waiting = self.check(self._found.again())
            if not waiting:
                self.due.assign(False)

    def check(self, found: Survey) -> list[str]:
        """Returns the keys of state whose objects do not exist yet: those of an unused model, or of an optimizer.

        Args:
            found: the survey of what there is now.

        Raises:
            CheckpointError: there is state that nothing will ever take.
        """
        problems = self._left_over(found)
        if problems:
            raise CheckpointError(problems[0])
        if self._partial:
            return []
        return [key for key, stored in self._left() if self._waits(key, stored, found)]

    def end(self) -> None:
        """Checks once more when smp_tf ends.

        Raises:
            CheckpointError: steps have left state over.
        """
        if self._steps == 0 or not self.due:
            return
        waiting = self.check(self._found.again())
        if waiting:
            announce(
                f"of checkpoint {self.name!r} nothing took up {_listed(waiting)}.", runtime.current().topology.rank
            )

    def _to_take(self, found: Survey) -> list[Item]:
        """Returns the items that are here now and were not restored yet."""
        return [item for item in found.items.values() if item.is_here and item.key not in self._done]

    def _take(self, items: Sequence[Item]) -> None:
        problems = self._misfits(items)
        if problems:
            raise CheckpointError("\n".join(problems))
        with tf.init_scope():
            self._assign(items)

    def _assign(self, items: Sequence[Item]) -> None:
        """Reads and assigns values. Objects get all parts of their state at once."""
        by_key = {item.key: item for item in items if item.key in self._manifest.tensors}
        objects: dict[int, tuple[Any, dict[str, tf.Tensor]]] = {}
        with assigned_values.unnoted():
            for key, value in self._read({key: item.rows for key, item in by_key.items()}):
                item = by_key[key]
                if item.kind is StateKind.STATE:
                    objects.setdefault(id(item.target), (item.target, {}))[1][item.part] = value
                else:
                    item.target.assign(value, read_value=False)
        for target, state in objects.values():
            tf_internals.set_object_state(target, state)
        self._done.update(item.key for item in items)

    def _read(self, wanted: Mapping[str, tuple[int, int] | None]) -> Iterator[tuple[str, tf.Tensor]]:
        """Yields key and value of tensors, or of some of their rows. What the checkpoint lacks is left out."""
        there = {key: rows for key, rows in wanted.items() if key in self._manifest.tensors}
        yield from read_tensors(self._directory, self._manifest, [key for key, rows in there.items() if rows is None])
        cut = {key: rows for key, rows in there.items() if rows is not None}
        yield from read_rows(self._directory, self._manifest, cut)

    def _slots_to_look_at(self, own: Mapping[str, Any], found: Survey) -> dict[str, tuple[int, int] | None]:
        """Returns the slots that this rank reads before they exist, to see whether anything is damaged.

        Args:
            own: variables that this rank stores, by key.
            found: the survey of what there is.
        """
        wanted: dict[str, tuple[int, int] | None] = {}
        for key, stored in self._manifest.tensors.items():
            variable, optimizer = own.get(variable_of_slot(key)), found.found_at.get(stored.optimizer)
            if stored.kind == StateKind.SLOT and variable is not None:
                if not _are_slots_here(variable, optimizer):
                    continue
                rows = _rows_to_look_at(variable, optimizer, stored)
                if rows is None or rows[0] < rows[1]:
                    wanted[key] = rows
        return wanted

    def _damage(self, wanted: Mapping[str, tuple[int, int] | None]) -> list[str]:
        """Reads tensors, or some of their rows, drops them, and returns words for what is damaged."""
        try:
            for _ in self._read(wanted):
                pass
        except CheckpointError as error:
            return [str(error)]
        return []

    def _misfits(self, items: Iterable[Item]) -> list[str]:
        """Returns words for what the checkpoint lacks, or has with another shape or dtype."""
        lacking, other = [], []
        for item in items:
            stored = self._manifest.tensors.get(item.key)
            if stored is None:
                if not self._may_lack(item):
                    lacking.append(item.key)
                continue
            if item.kind is StateKind.STATE:
                continue
            shape, dtype = item.whole(item.target.shape), item.target.dtype.base_dtype.name
            if dtype != stored.dtype or not shape.is_compatible_with(stored.shape):
                here = f"{dtype}{_dimensions(shape)} here"
                other.append(f"{item.key!r} is {here} and {stored.dtype}{list(stored.shape)} there")
        problems = []
        if other:
            problems.append(
                f"Checkpoint {self.name!r} in {self._directory} holds other shapes or dtypes: {_listed(other)}. "
                f"Restore it into the objects it was saved from, or leave these out of tf.train.Checkpoint."
            )
        if lacking:
            problems.append(
                f"Checkpoint {self.name!r} in {self._directory} lacks {_listed(lacking)}, which tf.train.Checkpoint "
                f"was given here. To restore what it has, and leave the rest as it is: "
                f"restore(..., expect_partial=True)."
            )
        return problems

    def _may_lack(self, item: Item) -> bool:
        if self._partial:
            return True
        if item.kind not in (StateKind.SLOT, StateKind.OPTIMIZER) or item.optimizer not in self._manifest.optimizers:
            return False
        if not self._manifest.optimizers[item.optimizer]:
            return True  # it was not used before the checkpoint was written
        # A stage that got no gradients had no slots.
        variable = self._manifest.tensors.get(variable_of_slot(item.key))
        with_slots = {
            stored.stage
            for stored in self._manifest.tensors.values()
            if stored.kind == StateKind.SLOT and stored.optimizer == item.optimizer
        }
        return item.kind is StateKind.SLOT and variable is not None and variable.stage not in with_slots

    def _left(self) -> list[tuple[str, StoredTensor]]:
        return [(key, stored) for key, stored in self._manifest.tensors.items() if key not in self._done]

    def _left_over(self, found: Survey) -> list[str]:
        """Returns words for what nothing here will take."""
        if self._partial:
            return []
        here = {item.key for item in self._to_take(found)} if self._steps == 0 else set()
        keys = [
            key
            for key, stored in self._left()
            if key not in here and not self._is_elsewhere(key, stored, found) and not self._waits(key, stored, found)
        ]
        if not keys:
            return []
        return [
            f"Checkpoint {self.name!r} in {self._directory} holds state that nothing here has taken up: "
            f"{_listed(keys)}. Give tf.train.Checkpoint the same objects under the same names as when it was saved, "
            f"before the first step; to restore a part of it on purpose: restore(..., expect_partial=True)."
        ]

    def _is_elsewhere(self, key: str, stored: StoredTensor, found: Survey) -> bool:
        """Returns whether another rank has the object of a key."""
        item = found.items.get(variable_of_slot(key))
        if item is not None and not item.is_here:
            return True
        optimizer = found.found_at.get(stored.optimizer)
        if item is not None and stored.kind == StateKind.SLOT and not _are_slots_here(item.target, optimizer):
            return True
        # An optimizer that has nothing to do on this rank makes nothing.
        return stored.optimizer in found.optimizers and not found.optimizers[stored.optimizer]

    def _waits(self, key: str, stored: StoredTensor, found: Survey) -> bool:
        """Returns whether the object of a key may still be made."""
        if stored.optimizer and stored.optimizer in found.waiting:
            return True
        return any(key == path or key.startswith(f"{path}/") for path in found.unfinished)

    def _agree(self, problems: Sequence[str], damage: Sequence[str], doing: str) -> None:
        """Raises, on all ranks, the errors that any rank has found, in damaged files among others."""
        running = runtime.current()
        said = exchange.allgather_json([list(damage), list(problems)], name=doing)
        found: dict[str, list[int]] = {}
        for rank, theirs in enumerate(said):
            for problem in (problem for some in theirs for problem in some):
                found.setdefault(problem, []).append(rank)
        if not found:
            return
        hint = [HINT] if any(theirs[0] for theirs in said) else []
        if running.topology.size == 1:
            raise CheckpointError("\n".join([*found, *hint]))
        lines = [f"{running.topology.describe(ranks[0])}: {problem}" for problem, ranks in found.items()]
        raise CheckpointError("\n".join([f"Checkpoint {self.name!r} cannot be restored:", *lines, *hint]))


def _are_slots_here(variable: Any, optimizer: Any) -> bool:
    """Returns whether this rank has slots, or some rows of slots, of a variable that its stage stores."""
    return layouts.layout_of(variable).is_updated_at(layouts.slots_of(variable, optimizer), layouts.here())


def _rows_to_look_at(variable: Any, optimizer: Any, stored: StoredTensor) -> tuple[int, int] | None:
    """Returns the rows of a future slot that this replica reads to find damage; None for all.

    Only the optimizer decides whether, and where, the slots of a weight are cut. Until then each replica of the stage
    reads equally many rows. It tells all ranks of damage, and together the replicas see all rows.
    """
    if not stored.shape or variable.shape != stored.shape or not layouts.are_shared():
        return None
    slots = layouts.slots_of(variable, optimizer)
    if slots != EVERYWHERE:
        return slots.rows_at(layouts.here())
    topology, extent = runtime.current().topology, stored.shape[0]
    first, last = (extent * replica // topology.replicas for replica in (topology.replica, topology.replica + 1))
    return first, last


def _listed(keys: Sequence[str]) -> str:
    more = f" and {len(keys) - _MOST_KEYS} more" if len(keys) > _MOST_KEYS else ""
    return ", ".join(keys[:_MOST_KEYS]) + more


def _dimensions(shape: tf.TensorShape) -> str:
    return str(shape.as_list()) if shape.rank is not None else " of any shape"
