"""Imports go down only: what each room may use, and who may know Keras, Horovod and private TensorFlow."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.house.imports import ROOT, Import, circles, imports_of, room_of, sources

#: The rooms from the ground up, and what each may use: rooms that stand above it in this table.
USES = {
    "ops": "",
    "partition": "",
    "pipeline": "",
    "partition.graph": "partition",
    "partition.op_cost": "partition partition.graph",
    "partition.samples": "partition.graph",
    "partition.trace": "partition partition.graph partition.op_cost",
    "partition.units": "partition partition.graph partition.op_cost",
    "partition.rewrite": "partition.graph partition.units",
    "partition.place": "partition partition.units",
    "partition.split": "partition partition.graph partition.op_cost partition.units",
    "partition.plan": "partition partition.graph partition.place partition.units",
    "pipeline.programs": "partition.graph partition.split partition.units pipeline",
    "pipeline.schedules": "pipeline pipeline.programs",
    "pipeline.run": "ops partition partition.graph partition.split partition.units pipeline pipeline.programs "
    "pipeline.schedules",
    "pipeline.measure": "ops partition.graph partition.split pipeline pipeline.programs pipeline.run",
    "pipeline.planner": "partition partition.graph partition.place partition.plan partition.split partition.units "
    "pipeline pipeline.programs pipeline.run pipeline.schedules",
    "ground": "ops partition pipeline",
    "files": "ground",
    "launch": "",
    "watch": "ground ops",
    "keras": "ground partition.trace",
    "config": "ground pipeline pipeline.schedules",
    "job": "ground config keras watch ops partition partition.plan",
    "collectives": "ground job ops partition",
    "recording": "ground files job ops partition partition.plan partition.split pipeline pipeline.measure "
    "pipeline.programs pipeline.run",
    "variables": "ground files keras job ops partition pipeline.run",
    "replicas": "ground config keras job collectives variables ops partition pipeline.run",
    "batch": "ground replicas partition partition.trace",
    "sharding": "ground keras job collectives variables replicas partition partition.graph partition.place "
    "partition.split pipeline.run pipeline pipeline.programs",
    "checkpoint": "ground files config keras job variables sharding partition partition.plan",
    "gradients": "ground keras job collectives variables replicas batch sharding ops partition pipeline "
    "pipeline.programs",
    "planning": "ground files watch config keras job collectives variables batch sharding ops partition "
    "partition.graph partition.place partition.plan partition.split partition.trace pipeline pipeline.planner "
    "pipeline.run pipeline.schedules",
    "optimizer": "ground keras job collectives variables replicas sharding checkpoint gradients partition "
    "pipeline.planner pipeline.run",
    "start": "ground watch config job collectives planning ops partition partition.plan",
    "steps": "ground keras job recording variables replicas batch sharding checkpoint planning optimizer ops "
    "partition partition.graph partition.plan partition.rewrite partition.split partition.trace pipeline "
    "pipeline.planner pipeline.programs pipeline.run pipeline.schedules",
    "whole_batch": "ground job collectives variables replicas batch gradients steps partition partition.graph "
    "partition.rewrite partition.samples partition.trace",
    "loss_check": "ground job variables batch gradients steps whole_batch ops partition partition.graph "
    "partition.samples partition.trace",
    "training": "ground keras job recording variables replicas batch sharding checkpoint optimizer steps loss_check "
    "whole_batch partition partition.plan partition.samples partition.trace pipeline.programs pipeline.schedules",
    "model": "ground files watch keras variables job planning optimizer steps training partition partition.graph "
    "partition.plan partition.split partition.units pipeline pipeline.measure pipeline.planner",
    "offline": "ground config keras collectives variables replicas sharding checkpoint planning optimizer start steps "
    "model partition partition.graph partition.place partition.plan partition.split partition.units pipeline "
    "pipeline.measure pipeline.planner pipeline.programs pipeline.schedules",
    "command": "ground launch config job recording checkpoint planning start model offline partition partition.plan "
    "partition.units pipeline pipeline.planner pipeline.schedules",
    "public": "ground job collectives recording variables replicas batch sharding checkpoint gradients optimizer "
    "start steps whole_batch training model partition",
}
#: The files of the folder smp_tf/ itself that are above all rooms; its others are the ground.
PUBLIC = (
    "smp_tf/__init__.py",
    "smp_tf/callbacks.py",
    "smp_tf/horovod_scope.py",
    "smp_tf/one_bit_adam.py",
    "smp_tf/one_bit_lamb.py",
    "smp_tf/public_names.py",
)

#: Who may import tf_keras.
KERAS = [
    "smp_tf/keras/",
    "smp_tf/start/environment.py",  # whether it is there
]
#: Who may derive classes from those of Keras, or mark them for Keras: the base stands in the class.
BASES = [
    "smp_tf/model/model.py",  # smp.DistributedModel
    "smp_tf/model/wrapped.py",
    "smp_tf/optimizer/one_bit.py",  # smp.OneBitAdam and smp.OneBitLAMB, which Keras finds in files
    "smp_tf/optimizer/one_bit_adam.py",
    "smp_tf/optimizer/one_bit_lamb.py",
    "smp_tf/training/agreement.py",  # callbacks of ours that Keras's loops call
    "smp_tf/training/callbacks.py",  # smp.callbacks
    "smp_tf/training/keras_callbacks.py",
]
#: Who may import the modules that answer for tf_keras; all others ask the adapter.
ANSWERS = [
    "smp_tf/keras/adapter.py",
    "smp_tf/keras/keras_2.py",
    "smp_tf/keras/optimizers.py",
]
#: Who may import Horovod.
HOROVOD = [
    "smp_tf/collectives/",
    "smp_tf/horovod_scope.py",
    "smp_tf/launch/wire_up.py",
]
#: Who may import private modules of TensorFlow or Keras.
PRIVATE = [
    "partition/graph/node_def.py",
    "partition/op_cost/loop_turns.py",
    "partition/rewrite/randomness.py",
    "partition/rewrite/state_reads.py",
    "partition/samples/sample_rows.py",
    "partition/split/segment_graph.py",
    "partition/split/sums.py",
    "partition/tf_internals.py",
    "smp_tf/keras/",
    "smp_tf/model/tf_checkpoint.py",
    "smp_tf/tf_internals.py",
]
KNOWERS = [
    ("tf_keras", r"tf_keras(\.|$)", KERAS),
    ("classes of tf_keras to derive from", r"smp_tf\.keras\.bases$", BASES),
    (
        "what answers for tf_keras",
        r"smp_tf\.keras\.(archives|keras_2|layers|loops|losses|nadam|optimizer_slots|optimizers)$",
        ANSWERS,
    ),
    ("Horovod", r"horovod(\.|$)", HOROVOD),
    ("private TensorFlow", r"(tensorflow\.(python|core|compiler)|tf_keras\.src)(\.|$)", PRIVATE),
]

#: Why some files import modules of smp_tf within functions.
INNER = {
    "partition/op_cost/function_graph.py": "TensorFlow is heavy, and plans that are read need none",
    "partition/op_cost/workspace.py": "the same",
    "smp_tf/__init__.py": "`import smp_tf` loads nothing that is heavy; it looks up public names",
    "smp_tf/collectives/horovod_waits.py": "the compiled ops are loaded when Horovod is first called",
    "smp_tf/command/checkpoint.py": "checkpoints are listed without TensorFlow",
    "smp_tf/command/checkpoint_export.py": "`smp-tf --help` comes without TensorFlow",
    "smp_tf/command/named_function.py": "`smp-tf --help` comes without TensorFlow",
    "smp_tf/command/plan.py": "`smp-tf --help` comes without TensorFlow",
    "smp_tf/command/profile.py": "`smp-tf --help` comes without TensorFlow",
    "smp_tf/command/run.py": "Horovod's parts take a tenth of a second, and other commands need none of them",
    "smp_tf/command/timeline.py": "`smp-tf --help` comes without TensorFlow",
    "smp_tf/keras/adapter.py": "tf_keras is heavy, and another Keras may be in force",
    "smp_tf/horovod_scope.py": "it is imported with smp_tf, before TensorFlow",
    "smp_tf/start/connection.py": "it is imported before TensorFlow is known to be the right one",
    "smp_tf/start/parts.py": "it is imported before TensorFlow and Horovod are known to be the right ones",
}
#: Rooms whose `__init__.py` imports something, and why.
OPENED = {"smp_tf.model": "what `smp.DistributedModel(model)` makes is built upon DistributedModel, which must know it"}

MODULES = sources()


def all_imports() -> Iterator[Import]:
    for path in MODULES.values():
        yield from imports_of(ROOT, path, MODULES)


IMPORTS = list(all_imports())


def room_in_table(file: str) -> str:
    """The name in USES of the room of a file."""
    room = room_of(Path(file)).removeprefix("smp_tf").removeprefix(".")
    if room:
        return room
    return "public" if file in PUBLIC else "ground"


def violations(imports: list[Import]) -> list[str]:
    """What imports break the table, in words."""
    told = []
    for found in imports:
        if found.module not in MODULES:
            continue
        here = room_in_table(found.file)
        there = room_in_table(MODULES[found.module].relative_to(ROOT).as_posix())
        if here != there and there not in USES[here].split():
            told.append(
                f"{found.file}:{found.line}: the room {here!r} may not use the room {there!r} ({found.module}). It may "
                f"use {USES[here] or 'none'}."
            )
    return told


def is_listed(file: str, listed: list[str]) -> bool:
    return any(file == entry or (entry.endswith("/") and file.startswith(entry)) for entry in listed)


def test_rooms_use_what_is_below_them() -> None:
    assert violations(IMPORTS) == []


def test_a_violation_is_told_by_file_line_and_rule() -> None:
    [told] = violations([Import("smp_tf/job/runtime.py", 7, "smp_tf.steps.step", True)])
    assert told == (
        "smp_tf/job/runtime.py:7: the room 'job' may not use the room 'steps' (smp_tf.steps.step). It may use ground "
        "config keras watch ops partition partition.plan."
    )


def test_the_table_goes_from_the_ground_up() -> None:
    seen: list[str] = []
    for room, used in USES.items():
        assert [other for other in used.split() if other not in seen] == [], room
        seen.append(room)


def test_the_table_says_nothing_that_is_not_so() -> None:
    rooms = {room_in_table(path.relative_to(ROOT).as_posix()) for path in MODULES.values()}
    assert set(USES) == rooms
    used = {
        (room_in_table(found.file), room_in_table(MODULES[found.module].relative_to(ROOT).as_posix()))
        for found in IMPORTS
        if found.module in MODULES
    }
    assert [
        (room, other) for room, others in USES.items() for other in others.split() if (room, other) not in used
    ] == []


def test_no_file_uses_itself_by_way_of_others() -> None:
    uses: dict[str, set[str]] = {}
    for found in IMPORTS:
        if found.module in MODULES:
            other = MODULES[found.module].relative_to(ROOT).as_posix()
            uses.setdefault(found.file, set()).update({other} - {found.file})
    assert circles(uses) == []
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [["a", "b", "c"]]


@pytest.mark.parametrize(("what", "pattern", "listed"), KNOWERS, ids=[what for what, *_ in KNOWERS])
def test_few_files_know(what: str, pattern: str, listed: list[str]) -> None:
    knows = {found.file: found.line for found in IMPORTS if re.match(pattern, found.module)}
    told = [f"{file}:{line}: may not import {what}" for file, line in knows.items() if not is_listed(file, listed)]
    assert told == []
    assert [entry for entry in listed if not any(is_listed(file, [entry]) for file in knows)] == []


def test_rooms_below_the_loops_load_no_keras() -> None:
    """What a module imports when it is imported, and what that imports, is followed to its end."""
    imported: dict[str, set[str]] = {}
    for found in IMPORTS:
        if not found.is_inner:
            imported.setdefault(found.file, set()).add(found.module)
    below = list(USES)[: list(USES).index("training")]
    files = {file for file in imported if room_in_table(file) in below}
    files -= {file for file in files if is_listed(file, [*BASES, *ANSWERS]) or file.startswith("smp_tf/keras/")}
    for file in sorted(files):
        seen: set[str] = set()
        stack = [file]
        while stack:
            here = stack.pop()
            modules = imported.get(here, set())
            assert not any(re.match(KNOWERS[0][1], module) for module in modules), f"{file} loads tf_keras by {here}"
            more = {MODULES[module].relative_to(ROOT).as_posix() for module in modules if module in MODULES} - seen
            seen |= more
            stack += more


def test_imports_within_functions_have_a_reason() -> None:
    inner = {found.file: found.line for found in IMPORTS if found.is_inner and found.module in MODULES}
    assert [f"{file}:{line}: an import within a function" for file, line in inner.items() if file not in INNER] == []
    assert set(INNER) == set(inner)


def test_a_room_says_in_a_line_what_it_is() -> None:
    for module, path in MODULES.items():
        if path.name != "__init__.py" or module in ("smp_tf", "smp_tf.ops", "smp_tf.partition", "smp_tf.pipeline"):
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        told = ast.get_docstring(tree) or ""
        assert "\n" not in told, path
        assert told.endswith("."), path
        assert len(tree.body) == 1 or module in OPENED, f"{path} imports or defines something"


def test_tests_mirror_the_rooms() -> None:
    rooms = {room_of(path.relative_to(ROOT)).removeprefix("smp_tf.") for path in MODULES.values()}
    rooms |= {f"benchmarks.{path.parent.name}" for path in (ROOT / "benchmarks").glob("*/__init__.py")}
    folders = {path.parent.relative_to(ROOT / "tests") for path in (ROOT / "tests").glob("*/*/test_*.py")}
    own = {folder.as_posix().replace("/", ".").removeprefix("smp_tf.") for folder in folders}
    assert sorted(own - rooms) == []
