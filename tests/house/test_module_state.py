"""Modules keep no state of a job: what changes at module level is in a table, with the reason.

What belongs to a job is a `JobState` (smp_tf/job_state.py), which `smp.shutdown` drops.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.house.imports import ROOT, sources

_WEAK = "it is keyed weakly by objects of the script's, and goes with them"
_OPEN = "it is as it was when the context ends"
_CHECKED = "who fills it empties it at smp.shutdown"
_COUNTS = "it counts on from job to job"
_START = "it is about the process, before there is a job"

#: What may change at module level, and why it is not a job's.
CHANGES = {
    "ops/transport.py _transports": "children that are forked leave all of them to the parent",
    "ops/transport_functions.py _declared": "a library is declared once",
    "partition/graph/graph_caches.py _CACHED": "it is the list of cached functions, which is whole after the imports",
    "pipeline/collection.py _open": _OPEN,
    "smp_tf/announce.py _said": "what was said once is not said again",
    "smp_tf/checkpoint/folder_lock.py _held": _CHECKED,
    "smp_tf/checkpoint/pending.py _pending": _CHECKED,
    "smp_tf/job/at_shutdown.py _at_shutdown": _CHECKED,
    "smp_tf/job/at_shutdown.py _before_leaving": _CHECKED,
    "smp_tf/job/objects.py _streams": "it is keyed weakly by transports, and goes with them",
    "smp_tf/job/program_numbers.py _used": _COUNTS,
    "smp_tf/job/runtime.py _current": "smp.init and smp.shutdown put the runtime there, and take it away",
    "smp_tf/job/runtime.py _starts": _COUNTS,
    "smp_tf/job/seeds.py _ours": "TensorFlow keeps what the last job seeded it with",
    "smp_tf/job_state.py _values": "it is where the state of a job is",
    "smp_tf/keras/adapter.py _replacement": _OPEN,
    "smp_tf/keras/archives.py _archives": _OPEN,
    "smp_tf/keras/optimizer_methods.py _ours": "it is keyed weakly by our functions, and goes with them",
    "smp_tf/keras/optimizer_reports.py _reported": _WEAK,
    "smp_tf/keras/optimizer_trials.py _trials": _WEAK,
    "smp_tf/keras/optimizer_trials.py _updates_rows": _WEAK,
    "smp_tf/keras/placed_layers.py _constructed": _WEAK,
    "smp_tf/optimizer/agreement.py _compared": _WEAK,
    "smp_tf/optimizer/patch.py _being_built": _WEAK,
    "smp_tf/sharding/moved_slots.py _number_of": _WEAK,
    "smp_tf/sharding/moved_slots.py _numbers": _COUNTS,
    "smp_tf/sharding/shares.py _shares_of": _WEAK,
    "smp_tf/start/arrivals.py _starts": _COUNTS,
    "smp_tf/start/environment.py _horovod_started_without_sets": _START,
    "smp_tf/start/environment.py _patience_is_ours": _START,
    "smp_tf/start/import_watch.py _watch": _START,
    "smp_tf/start/lifecycle.py _job": _CHECKED,
    "smp_tf/start/start_watch.py _unprinted": _START,
    "smp_tf/variables/host_offload.py _slots_on_host": _WEAK,
    "smp_tf/variables/models.py _models": _WEAK,
    "smp_tf/variables/precedence.py _moments": _COUNTS,
    "smp_tf/variables/store.py _numbers": _COUNTS,
    "smp_tf/variables/store.py _stores_of": _WEAK,
}

#: What is made to be filled, or to count.
_FILLED = {"dict", "list", "set", "OrderedDict", "defaultdict", "Counter", "deque", "count", "local"}


def changing(tree: ast.Module) -> Iterator[str]:
    """Yields the names at module level, and in classes, that are made to change."""
    yield from {name for node in ast.walk(tree) if isinstance(node, ast.Global) for name in node.names}
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    for body, prefix in [(tree.body, ""), *((made.body, f"{made.name}.") for made in classes)]:
        for node in body:
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None and _is_to_change(node.value):
                target = node.targets[0] if isinstance(node, ast.Assign) else node.target
                yield f"{prefix}{ast.unparse(target)}"


def _is_to_change(value: ast.expr) -> bool:
    if isinstance(value, ast.Dict):
        return not value.keys
    if isinstance(value, ast.List):
        return not value.elts
    if not isinstance(value, ast.Call):
        return False
    name = ast.unparse(value.func).rpartition(".")[2]
    return name.startswith("Weak") or (name in _FILLED and not (name in ("dict", "list", "set") and value.args))


def found_in(path: Path) -> set[str]:
    return set(changing(ast.parse(path.read_text(encoding="utf-8"))))


def test_what_changes_at_module_level_has_a_reason() -> None:
    found = {f"{path.relative_to(ROOT)} {name}" for path in sources().values() for name in found_in(path)}
    new = sorted(found - set(CHANGES))
    assert new == [], "let it be a JobState (smp_tf/job_state.py), or say here why it is not a job's"
    assert sorted(set(CHANGES) - found) == []


def test_what_is_made_to_change_is_found() -> None:
    text = """
known = {}
names: list[str] = []
by_key = weakref.WeakKeyDictionary()
numbers = itertools.count(1)
in_thread = threading.local()
LETTERS = {"a": 1}
KEYS = set("abc")
made = JobState(dict)
class State:
    loads: list[float] = []
    most = 3
def put(value):
    global current
    current = value
"""
    assert sorted(changing(ast.parse(text))) == [
        "State.loads", "by_key", "current", "in_thread", "known", "names", "numbers",
    ]  # fmt: skip
