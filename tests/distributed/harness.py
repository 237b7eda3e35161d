"""Starts real processes for tests: many cases in one launch, or one whole script.

    results = launch(2, "tests.distributed.cases.messages", [
        Case("ring", "send_around_the_ring", {"count": 3}, config={"partitions": 2}),
    ])
    per_rank = results["ring"].values()      # or a failure with every rank's traceback and output

    outcome = launch_script(2, "examples/digits.py", ["--epochs", "1"], deadline=60)
    outcome.expect_clean()

Importing TensorFlow costs each process seconds, so `launch` runs many cases in the same processes,
with `smp.init(case.config)` and `smp.shutdown()` around each, and these wait for the next launch
(`pool.py`). A case that ends the processes, or passes its own deadline, fails alone: the cases after
it get fresh processes.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tests.distributed.job import DEADLINE, LAUNCHER, ROOT, Job, Line, Outcome
from tests.distributed.pool import POOLS, Pool

__all__ = ["LAUNCHER", "ROOT", "Case", "CaseResult", "Job", "Line", "Outcome", "RankResult"]
__all__ += ["launch", "launch_script", "on_marker"]

# Two TensorFlow thread settings that change floating-point results are the same everywhere.
ONE_THREAD = {"TF_NUM_INTRAOP_THREADS": "1", "OMP_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Case:
    """One call of a function of the case module on every rank.

    Attributes:
        name: unique within its launch.
        function: the module's function; it returns a dict of JSON values, arrays and tensors.
        arguments: its keyword arguments, JSON values.
        config: given to `smp.init` before the call; None calls the function bare.
    """

    name: str
    function: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] | None = field(default_factory=dict)


@dataclass
class RankResult:
    """What one rank made of a case: a value, or an error (a traceback, or how it was lost)."""

    value: Any
    error: str | None
    seconds: float


@dataclass
class CaseResult:
    """What all ranks made of a case.

    Attributes:
        case: the case.
        ranks: one result per rank.
        output: what was printed between the case's start and end, per rank.
        left_behind: what the processes that ran this case left on the machine, where they ended with
            its launch; otherwise that is looked at when they end.
    """

    case: Case
    ranks: list[RankResult]
    output: list[str]
    left_behind: list[str]

    def values(self) -> list[Any]:
        """Returns each rank's value, or fails with all that is known about the ranks."""
        if any(rank.error for rank in self.ranks):
            raise AssertionError(self.report())
        return [rank.value for rank in self.ranks]

    def report(self) -> str:
        """Returns the case's setting, and per rank its error and its output."""
        out = [f"case {self.case.name}: {json.dumps(asdict(self.case))}"]
        for index, rank in enumerate(self.ranks):
            out.append(f"──── rank {index}: {'failed' if rank.error else 'well'} ────")
            out += [rank.error] if rank.error else []
            if self.output[index].strip() and self.output[index].strip() not in (rank.error or ""):
                out += ["it printed:", self.output[index]]
        return "\n".join(out)


def _unpack(value: Any, arrays: Mapping[str, np.ndarray]) -> Any:
    if isinstance(value, dict):
        if set(value) == {"@array"}:
            return arrays[value["@array"]]
        return {key: _unpack(item, arrays) for key, item in value.items()}
    if isinstance(value, list):
        return [_unpack(item, arrays) for item in value]
    return value


def _read_rank(folder: Path, index: int, rank: int) -> RankResult | None:
    path = folder / f"{index}-{rank}.json"
    if not path.exists():
        return None
    told = json.loads(path.read_text())
    with np.load(path.with_suffix(".npz")) as arrays:
        return RankResult(_unpack(told["value"], arrays), told["error"], told["seconds"])


def _ended_by(case: Case, ranks: Sequence[RankResult]) -> bool:
    return case.config is not None and any(rank.error for rank in ranks)


def _run_list(
    pool: Pool, module: str, cases: Sequence[Case], deadline: float, ends: bool
) -> tuple[list[CaseResult], bool]:
    """Runs cases until one ends the processes; returns the results of those that were started, and whether it did."""
    with tempfile.TemporaryDirectory(prefix="smp-cases-", ignore_cleanup_errors=True) as made:
        folder = Path(made)
        told = {"module": module, "cases": [asdict(case) for case in cases]}
        (folder / "launch.json").write_text(json.dumps(told))
        progress = pool.run(module, folder, len(cases), deadline)
        ended = ends or pool.ended
        outcome = pool.end() if ended else None
        results: list[CaseResult] = []
        # When not even one case was started, all of them failed for the same reason. Otherwise the
        # first case that some rank did not finish ended the processes: a rank that had nothing to
        # wait for may have begun the cases after it.
        for index, case in enumerate(cases):
            ranks = [_read_rank(folder, index, rank) for rank in range(pool.size)]
            output = ["\n".join(lines) for lines in progress.output[index]]
            lost = f"this rank did not finish the case\n{outcome.report()}" if outcome else ""
            known = [rank or RankResult(None, lost, 0.0) for rank in ranks]
            results.append(CaseResult(case, known, output, outcome.left_behind if outcome else []))
            if progress.started and (None in ranks or _ended_by(case, known)):
                break
        if outcome:
            outcome.forget()
        return results, ended


def launch(
    size: int,
    module: str,
    cases: Sequence[Case],
    *,
    environment: Mapping[str, str] | None = None,
    deadline: float = DEADLINE,
    fresh: bool = False,
) -> dict[str, CaseResult]:
    """Runs the cases on `size` processes under horovodrun and returns their results by name.

    Args:
        size: number of processes.
        module: dotted name of the module that holds the cases' functions.
        cases: run in this order, in the same processes where possible.
        environment: variables for every rank.
        deadline: seconds that one case may take.
        fresh: in processes that ran nothing before, and will run nothing else.
    """
    names = [case.name for case in cases]
    if len(set(names)) != len(names):
        raise ValueError(f"two cases of one launch have the same name: {sorted(names)}")
    results: dict[str, CaseResult] = {}
    pending = list(cases)
    variables = {**ONE_THREAD, **(environment or {})}
    if fresh:
        POOLS.end()
    while pending:
        pool = POOLS.take(size, variables)
        done, ended = _run_list(pool, module, pending, deadline, fresh)
        if not ended:
            POOLS.give_back(pool)
        results.update({result.case.name: result for result in done})
        pending = pending[len(done) :]
    return results


def on_marker(
    text: str, act: Callable[[Job, Line], None], ranks: Collection[int] = frozenset()
) -> Callable[[Job, Line], None]:
    """Returns an `on_line` that acts once, when these ranks, or any where none is named, have printed the text."""
    waiting = [set(ranks) or {None}]

    def on_line(job: Job, line: Line) -> None:
        if text not in line.text or not waiting[0]:
            return
        waiting[0] -= {line.rank, None}
        if not waiting[0]:
            act(job, line)

    return on_line


def launch_script(
    size: int,
    path: str | Path,
    arguments: Sequence[str] = (),
    *,
    environment: Mapping[str, str] | None = None,
    deadline: float = DEADLINE,
    on_line: Callable[[Job, Line], None] | None = None,
    launched: bool = True,
    hosts: str = "",
    as_installed: bool = False,
    cold: bool = False,
    patience: float = 20.0,
) -> Outcome:
    """Runs a whole script on `size` processes and returns how it went.

    Args:
        size: number of processes.
        path: the script, relative to the repository's root.
        arguments: its command line.
        environment: variables for every rank.
        deadline: seconds until all ranks must print their stacks and are killed.
        on_line: called for every line any rank prints; it may call `job.kill(rank, signal)`.
        launched: False runs plain `python script` in one process, without horovodrun.
        hosts: of this machine, what `-H` is given; "" leaves it out.
        as_installed: use the installed horovodrun, which looks for seconds what it was built with.
        cold: import TensorFlow in each rank, which are otherwise forked from a process that has (`warm_process.py`).
        patience: seconds that processes have to end after launcher and ranks.
    """
    # A script's time and memory are looked at.
    POOLS.end()
    job = Job(
        size,
        ROOT / path,
        arguments,
        environment or {},
        deadline,
        on_line,
        launched,
        hosts,
        as_installed,
        cold,
        patience,
    )
    return job.watch()
