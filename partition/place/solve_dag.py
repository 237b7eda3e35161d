"""Places the units of a graph on stages, as well as possible, and proves how good the placement is.

A chain is cut at points of one topological order. Here every unit has a stage of its own, and the only rule is that
data flows to the same or to a later stage:

    order    a  b  c  d            a ─▶ c            stage 0   a  c
    cut      a  b │ c  d           b ─▶ d            stage 1   b  d      nothing crosses, as no cut of the order has it

It is the one with the best balance, or, of those that keep within given limits, the one that sends the fewest bytes.

The costs are those of `solve_chain`: compute and transfers for time, weights and stash for memory. The integer program
(`integer_program`) starts from the best cut. Where its time runs out, it gives the bound that it has proved.

Source:
    Tarnawski et al., "Efficient Algorithms for Device Placement of DNN Graph Operators" (NeurIPS 2020), section 5: the
    integer program for contiguous splits; here with ownership of shared weights and stashes.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import math
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smp_tf.partition.errors import PlacementError
from smp_tf.partition.place.cut_search import Most
from smp_tf.partition.place.placement import Chain, Chunks, Placement, Ranks, costed, in_flight_of
from smp_tf.partition.place.trade import sent_bytes

#: The largest product of units and stages. A larger one takes longer than anybody waits for a plan.
MOST_CHOICES = 20_000
#: Seconds by the clock for each second of the solver's own count, and for its start.
_PATIENCE, _START = 5.0, 60.0
#: Runs a file without its folder on the module path, since a file there has the name of a standard module.
_RUN = "import runpy, sys; sys.path.pop(0); runpy.run_path(sys.argv[1], run_name='__main__')"


@dataclass(frozen=True)
class DagProblem:
    """What is to be placed: units on exactly `stages` stages, none empty, each not before what it needs.

    Args:
        chain: the units with their costs, and the stages that are given.
        needs: pairs of units. The second one needs something of the first.
        stages: number of stages.
        objective: "speed": least sum(c) + (microbatches - 1) max(c) over the stages' times c; "memory": least bytes on
            the fullest stage.
        microbatches: per step.
        in_flight: microbatches whose stash a stage holds at once; None for what 1F1B keeps.
        ranks: how these differ, and what they may need; None where they are alike and may need anything.
        hint: a placement to begin with, such as the best cut of a chain.
        within: the first and the last stage that every unit may be on; None for any.
        most: what stages and the step may have, where the fewest bytes are to be sent; None for the best balance.
    """

    chain: Chain
    needs: tuple[tuple[int, int], ...]
    stages: int
    objective: str = "memory"
    microbatches: int = 1
    in_flight: tuple[int, ...] | None = None
    ranks: Ranks | None = None
    hint: tuple[int, ...] | None = None
    within: tuple[list[int], list[int]] | None = None
    most: Most | None = None


@dataclass(frozen=True)
class DagSolution(Placement):
    """A placement of units, with what is proved about it.

    Args:
        bound: a number that no placement's score is below; of bytes sent per microbatch, where these are to be few.
    """

    bound: float = 0.0


def solve_dag(problem: DagProblem, seconds: float = 10.0) -> DagSolution | None:
    """Returns the best placement of the units of a graph.

    Args:
        problem: what is to be placed.
        seconds: about when to stop the search. They are counted in work, not by a clock, so the same graph gives the
            same result.

    Returns:
        The best placement; None where none was found in this time, or where there is none.

    Raises:
        PlacementError: OR-tools is not installed, the solver failed, or the graph is too large to be searched.

    Example:
        >>> problem = DagProblem(Chain(("a", "b", "c", "d"), (1.0,) * 4), ((0, 2), (1, 3)), 2, "speed")
        >>> solve_dag(problem).times
        (2.0, 2.0)
    """
    return solve_dags([problem], seconds)[0]


def solve_dags(problems: Sequence[DagProblem], seconds: float = 10.0) -> list[DagSolution | None]:
    """Solves several problems as `solve_dag` does one, but starts the solver once.

    Args:
        problems: what is to be placed.
        seconds: the seconds for each problem, as in `solve_dag`.

    Returns:
        The solution of each.

    Raises:
        PlacementError: OR-tools is not installed, the solver failed, or a graph is too large to be searched.
    """
    for problem in problems:
        units = len(problem.chain.names)
        if units * problem.stages > MOST_CHOICES:
            raise PlacementError(
                f"a placement is looked for among at most {MOST_CHOICES} choices, units times partitions, and here are "
                f"{units} units on {problem.stages} partitions"
            )
    if importlib.util.find_spec("ortools") is None:
        raise PlacementError("OR-tools is not installed (pip install ortools)")
    records = [_record(problem) for problem in problems]
    asked = json.dumps({"seconds": seconds, "clock": _PATIENCE * seconds, "problems": records})
    program = [sys.executable, "-c", _RUN, str(Path(__file__).with_name("integer_program.py"))]
    try:
        answer = subprocess.run(
            program, input=asked, capture_output=True, text=True, timeout=_START + _PATIENCE * seconds * len(problems)
        )
    except subprocess.TimeoutExpired as error:
        raise PlacementError(f"the solver did not end within {error.timeout:.0f} s") from None
    except OSError as error:
        raise PlacementError(f"the solver cannot be started: {error}") from None
    if answer.returncode:
        last = (answer.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise PlacementError(f"the solver ended with status {answer.returncode}: {last}")
    try:
        found = json.loads(answer.stdout)
    except json.JSONDecodeError:
        raise PlacementError(f"the solver did not answer in JSON: {answer.stdout[:100]!r}") from None
    return [_solution(problem, one) for problem, one in zip(problems, found, strict=True)]


def _record(problem: DagProblem) -> dict[str, Any]:
    """Returns a problem as the solver reads it: units and weights by number."""
    chain, ranks = problem.chain, problem.ranks or Ranks.alike(problem.stages)
    return {
        "objective": problem.objective,
        "microbatches": problem.microbatches,
        "in_flight": in_flight_of(problem.stages, problem.microbatches, problem.in_flight),
        "times": chain.times,
        "manual": chain.manual,
        "needs": problem.needs,
        "seconds_per_byte": chain.seconds_per_byte,
        "flows": [(flow.producer, flow.consumers, flow.nbytes, chain.bytes_of(flow)) for flow in chain.flows],
        "stashes": [(stash.readers, stash.nbytes) for stash in chain.stashes],
        "weights": [(w.users, w.stored, w.copied, w.crossing, chain.bytes_across(w)) for w in chain.weights],
        "speed": ranks.speed,
        "link": ranks.link,
        "limits": ranks.memory,
        "hint": problem.hint,
        "within": problem.within,
        "most": problem.most
        and {name: None if math.isinf(most) else most for name, most in dataclasses.asdict(problem.most).items()},
    }


def _solution(problem: DagProblem, found: dict[str, Any]) -> DagSolution | None:
    if not found["found"]:
        return None
    chain = problem.chain
    held = in_flight_of(problem.stages, problem.microbatches, problem.in_flight)
    owners = {chain.weights[int(number)].variable: stage for number, stage in found["owners"].items()}
    best = costed(chain, found["stage_of"], owners, problem.microbatches, Chunks.one_each(held), problem.ranks)
    if problem.most is None:
        score = best.score(problem.objective, problem.microbatches)
    else:
        score = sent_bytes(chain, best.stage_of, problem.microbatches)
    bound = min(found["bound"], score)
    return DagSolution(best.chunk_of, best.owners, best.times, best.memory, bound=bound)
