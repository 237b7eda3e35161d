"""What counts as assigned by the script, and how ranks tell apart which variable it was."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tensorflow as tf

import smp_tf
from smp_tf.errors import RankMismatchError
from smp_tf.job_state import JobState
from smp_tf.optimizer import patch
from smp_tf.partition.mesh import Mesh
from smp_tf.variables import assigned_values
from smp_tf.variables.guarded import tracing_step
from smp_tf.variables.store import VariableStore
from tests.smp_tf.variables.test_store import settle

ROOT = Path(smp_tf.__file__).parent
SOURCES = sorted(ROOT.rglob("*.py"))
WRITES = ("assign", "assign_add", "assign_sub", "set_value", "batch_set_value")
#: Within these nothing is noted.
QUIET = ("unnoted", "left_out")

#: What may write without: the file, what is written, and why nothing of it is noted as the script's.
DEFENDED = {
    ("batch/output.py", "var"): "the script gives it, and asks for it",
    ("checkpoint/manager.py", "counter"): "no model has it",
    ("checkpoint/restore.py", "self.due"): "no model has it",
    ("command/run.py", "wire_up"): "it gives ranks their places, and is no variable",
    ("model/tf_checkpoint.py", "variable"): "`load_weights` reads within `left_out`",
    ("optimizer/apply.py", "iterations"): "of an optimizer, on every rank",
    ("optimizer/one_bit_adam.py", "momentum"): "a slot",
    ("optimizer/one_bit_adam.py", "variable"): "`apply_gradients` runs within `unnoted`",
    ("optimizer/one_bit_adam.py", "velocity"): "a slot",
    ("optimizer/one_bit_lamb.py", "average"): "a slot",
    ("optimizer/one_bit_lamb.py", "fresh"): "a slot",
    ("optimizer/one_bit_lamb.py", "last"): "a slot",
    ("optimizer/one_bit_lamb.py", "momentum"): "a slot",
    ("optimizer/one_bit_lamb.py", "variable"): "`apply_gradients` runs within `unnoted`",
    ("optimizer/one_bit_lamb.py", "velocity"): "a slot",
    ("replicas/one_bit_sums.py", "error"): "a slot",
    ("sharding/gather.py", "self.variable"): "`filtered_apply` and `finalize_variable_values` call it within `unnoted`",
    ("sharding/moved_slots.py", "here[name]"): "`settle` calls it within `unnoted`",
    ("steps/replica_check.py", "counters[known]"): "no model has it",
    ("steps/replica_check.py", "_steps().told"): "no model has it",
    ("steps/replica_check.py", "_steps().told_of_batches"): "no model has it",
    ("keras/archives.py", "variable"): "`load_weights` and `load_model` read within `left_out`",
    ("steps/sums_in_steps.py", "counts[known_as]"): "no model has it",
    ("training/callbacks.py", "self._epochs"): "no model has it",
    ("training/keras_callbacks.py", "self._batch"): "no model has it",
    ("training/keras_callbacks.py", "self._epoch"): "no model has it",
    ("training/logs.py", "variable"): "of metrics, which every rank stores",
    ("training/batch_function.py", "self._count"): "no model has it",
    ("training/loss_denominators.py", "ratio"): "no model has it",
    ("training/loss_denominators.py", "self._samples"): "no model has it",
    ("training/replica_states.py", "variable"): "of metrics, which every rank stores",
    ("variables/guarded.py", "super()"): "it is where the script's are noted",
    ("variables/step_seeds.py", "counter"): "no model has it",
    ("variables/step_seeds.py", "current.seed"): "no model has it",
    ("variables/step_seeds.py", "_counter(known)"): "no model has it",
    ("variables/step_seeds.py", "state.seed"): "no model has it",
    ("variables/store.py", "variable"): "`settle` runs within `unnoted`; before, nobody stores the variable",
    ("whole_batch/loss_gradient.py", "self._copies[index]"): "a copy, which no model has",
}


def noted(node: ast.AST, quiet: bool = False) -> Iterator[ast.Call]:
    """The calls in a source that write variables outside of what makes such writes smp_tf's own."""
    if isinstance(node, ast.With):
        calls = [item.context_expr for item in node.items if isinstance(item.context_expr, ast.Call)]
        quiet = quiet or any(isinstance(c.func, ast.Attribute) and c.func.attr in QUIET for c in calls)
    if not quiet and isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in WRITES:
        yield node
    for child in ast.iter_child_nodes(node):
        yield from noted(child, quiet)


def written(source: str) -> set[str]:
    """What such calls write, as it stands in the source."""
    calls = [call.func for call in noted(ast.parse(source))]
    return {ast.unparse(func.value) for func in calls if isinstance(func, ast.Attribute)}


def test_what_smp_tf_assigns_does_not_count_as_the_scripts() -> None:
    """Else ranks differ in what "the script" has assigned, and a correct script ends with a RankMismatchError."""
    found = {(path.relative_to(ROOT).as_posix(), what) for path in SOURCES for what in written(path.read_text())}
    assert found - set(DEFENDED) == set(), "put it within assigned_values.unnoted(), or say here why not"
    assert set(DEFENDED) - found == set(), "no longer there"


def test_writes_within_a_quiet_context_are_told_apart() -> None:
    source = "with assigned_values.unnoted():\n    a.assign(1)\nb.assign(1)\nwith other():\n    c.assign_add(1)\n"
    assert written(source) == {"b", "c"}


def test_averages_that_an_optimizer_puts_in_place_of_weights_are_not_the_scripts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    quiet: dict[str, bool] = {}

    def note(which: str) -> None:
        quiet[which] = assigned_values._in_force.is_quiet

    monkeypatch.setattr(patch.gather, "gather", lambda *_: note("given to other replicas"))
    finalize = patch._filtered_finalize(lambda optimizer, weights: note("assigned"))
    averaging: Any = SimpleNamespace(use_ema=True)
    finalize(averaging, [tf.Variable(1.0)])
    assert quiet == {"assigned": True, "given to other replicas": True}
    assert not assigned_values._in_force.is_quiet


RANKS = 3


def settled(owner: int, stage: int, initial: Any) -> tf.Variable:
    """The variable of a model called "net", which one stage stores, on the rank of a stage."""
    store = VariableStore("net")
    with tf.variable_creator_scope(store.creator), tracing_step():
        variable = tf.Variable(lambda: tf.constant(initial), name="kernel")
    with assigned_values.unnoted():
        settle(store, {0: owner}, stage=stage, seed=0)
    return variable


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Runs on each rank in turn what a script does with the variables that it makes, and lets the ranks compare."""
    running: Any = SimpleNamespace(topology=SimpleNamespace(stages=RANKS, mesh=Mesh(RANKS, RANKS)))
    monkeypatch.setattr(assigned_values.runtime, "current", lambda: running)
    monkeypatch.setattr(assigned_values.runtime, "current_or_none", lambda: running)
    monkeypatch.setattr(assigned_values, "_noted", JobState(assigned_values._Noted))

    def run(make: Callable[[int], Any], doing: Callable[[int, Any], None]) -> None:
        said = []
        for rank in range(RANKS):
            monkeypatch.setattr("smp_tf.variables.store._numbers", iter(range(9)))
            doing(rank, make(rank))
            noted = assigned_values._noted()
            said.append((noted.taken, noted.left_out))
            assigned_values._noted.put(assigned_values._Noted())
        monkeypatch.setattr(assigned_values.exchange, "allgather_json", lambda *_, **__: [taken for taken, _ in said])
        assigned_values.compare([left for _, left in said])

    return run


def test_two_models_may_have_variables_of_one_name(compared: Callable[..., None]) -> None:
    """Seen with two networks of one function, such as a target and one that is trained."""

    def both(stage: int) -> tuple[tf.Variable, tf.Variable]:
        return settled(0, stage, [1.0]), settled(1, stage, [2.0])

    def assign(rank: int, made: Any) -> None:
        trained, target = made
        trained.assign([3.0])
        target.assign([3.0])

    compared(both, assign)
    with pytest.raises(RankMismatchError, match=r"'kernel': 1 value on rank 0, nothing on rank 1, which stores it"):
        compared(both, lambda rank, made: made[1].assign([3.0]) if rank != 1 else None)


@pytest.mark.parametrize(("initial", "updates"), [([1.0, 2.0], [5.0]), (["a", "b"], ["c"])])
def test_of_a_scatter_its_values_and_where_they_go_are_compared(
    compared: Callable[..., None], initial: Any, updates: Any
) -> None:
    """Its name, which has no hash, may be given by its position."""

    def one(stage: int) -> tf.Variable:
        return settled(0, stage, initial)

    compared(one, lambda rank, variable: variable.scatter_nd_update([[0]], updates, "here"))
    compared(one, lambda rank, variable: variable.scatter_nd_update(indices=[[0]], updates=updates, name=f"on {rank}"))
    with pytest.raises(RankMismatchError, match="'kernel': 1 value on rank 1, others on rank 0"):
        compared(one, lambda rank, variable: variable.scatter_nd_update(indices=[[rank % 2]], updates=updates))
