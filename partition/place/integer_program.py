"""The integer program that places units on stages, solved by OR-tools' CP-SAT in a process of its own.

OR-tools and TensorFlow bring C++ libraries that conflict: with both in one process the solver crashes. So this file
imports nothing of smp_tf, since that would import TensorFlow. It is run as a script. It reads problems as JSON from its
standard input, as `solve_dag` writes them, and writes the placements that it has found.
"""

from __future__ import annotations

import ctypes
import json
import signal
import sys
from collections.abc import Iterable, Sequence
from math import ceil, floor
from typing import Any

from ortools.sat.python import cp_model

#: The solver's costs are integers, rounded down where something is proved. The cost of the whole model is this much.
_WHOLE = 10**9
#: With more microbatches than this only the slowest stage counts. The limit keeps every product small enough.
_MANY = 10**5
#: Sums of fewer bytes fit into the solver's numbers.
_MOST_BYTES = 2**50
_PR_SET_PDEATHSIG = 1


class IntegerProgram:
    """The integer program.

    `upto[u][s]` says that unit u is on stage s or before. So "v needs u" is one line per stage, and whether a unit is
    on a stage is a difference of two variables.

    Args:
        problem: units and weights by number, as `solve_dag._record` writes them.
    """

    def __init__(self, problem: dict[str, Any]) -> None:
        self.model = cp_model.CpModel()
        self._problem = problem
        self._stages = stages = len(problem["in_flight"])
        self._owns: dict[int, list[Any]] = {}
        self._some: dict[tuple[tuple[int, ...], int], Any] = {}
        self._unit, self._less = 1.0, 0.0
        never, true = self.model.new_constant(0), self.model.new_constant(1)
        self._upto: list[list[Any]] = [
            [never] * first + [self.model.new_bool_var("") for _ in range(first, last)] + [true] * (stages - last)
            for first, last in zip(*self._within_stages(), strict=True)
        ]
        for upto in self._upto:
            for s in range(stages - 1):
                self.model.add(upto[s] <= upto[s + 1])
        self._on = [[self._between(upto, s) for s in range(stages)] for upto in self._upto]
        for s in range(stages):
            self.model.add(sum(on[s] for on in self._on) >= 1)
        for unit, stage in enumerate(problem["manual"]):
            if stage is not None:
                self.model.add(self._on[unit][stage] == 1)
        for before, after in problem["needs"]:
            for s in range(stages - 1):
                self.model.add(self._upto[after][s] <= self._upto[before][s])
        self._within(problem["limits"])
        if problem["most"] is not None:
            self._fewest_bytes(problem["most"])
        elif problem["objective"] == "speed":
            self._unit = self._minimise_with(self._timed(), problem["microbatches"] - 1)
        else:
            self._unit = self._minimise_with(self._held(), None)

    def _within_stages(self) -> tuple[list[int], list[int]]:
        """Returns the first and the last stage that every unit may be on."""
        units = len(self._problem["times"])
        return self._problem["within"] or ([0] * units, [self._stages - 1] * units)

    def _between(self, upto: list[Any], stage: int) -> Any:
        """Returns a variable that says that a unit is on a stage."""
        if stage == 0:
            return upto[0]
        on = self.model.new_bool_var("")
        self.model.add(on == upto[stage] - upto[stage - 1])
        return on

    def _any(self, units: Iterable[int], stage: int) -> Any:
        """Returns a variable, to be minimised, that is at least 1 where one of the units is on a stage."""
        listed = tuple(sorted(set(units)))
        if len(listed) == 1:
            return self._on[listed[0]][stage]
        if (listed, stage) not in self._some:
            found = self.model.new_bool_var("")
            for unit in listed:
                self.model.add(found >= self._on[unit][stage])
            self._some[listed, stage] = found
        return self._some[listed, stage]

    def _without(self, some: Any, other: Any) -> Any:
        """Returns a variable, to be minimised, that is at least 1 where the first holds and the second does not."""
        found = self.model.new_bool_var("")
        self.model.add(found >= some - other)
        return found

    def _timed(self) -> list[list[tuple[float, Any]]]:
        """Returns, per stage, seconds that it may take, each with the variable for whether it does."""
        problem = self._problem
        computing = [list(zip(problem["times"], (on[s] for on in self._on), strict=True)) for s in range(self._stages)]
        crossing: dict[tuple[int, tuple[int, ...]], float] = {}
        for producer, readers, _, nbytes in problem["flows"]:
            for ahead in (True, False):
                consumers = tuple(c for c in readers if (c > producer) == ahead)
                if consumers:
                    crossing[producer, consumers] = crossing.get((producer, consumers), 0.0) + nbytes
        moved = [(nbytes, self._crossing(*at)) for at, nbytes in crossing.items()]
        for users, nbytes in self._shared_bytes(with_messages=True).items():
            moved.append((nbytes / problem["microbatches"], self._shared(users)))
        loads = []
        for s in range(self._stages):
            link = problem["seconds_per_byte"] / problem["link"][s]
            loads.append(
                [(seconds / problem["speed"][s], on) for seconds, on in computing[s]]
                + [(nbytes * link, crosses[s]) for nbytes, crosses in moved]
            )
        return loads

    def _fewest_bytes(self, most: dict[str, float | None]) -> None:
        """Minimises the bytes that are sent per microbatch, within what stages and the step may have."""
        problem = self._problem
        if most["memory"] is not None:
            self._within([most["memory"]] * self._stages)
        if most["time"] is not None:
            self._within_seconds(most["time"], most["step"])
        crossing: dict[tuple[int, tuple[int, ...]], float] = {}
        for producer, readers, nbytes, _ in problem["flows"]:
            crossing[producer, tuple(readers)] = crossing.get((producer, tuple(readers)), 0.0) + nbytes
        sent = [
            (nbytes, self._without(self._any(readers, s), self._on[producer][s]))
            for (producer, readers), nbytes in crossing.items()
            for s in range(self._stages)
        ]
        once = 0.0
        for users, nbytes in self._shared_bytes().items():
            # All stages that use the weight but one, its owner, receive it.
            sent += [(nbytes / problem["microbatches"], self._any(users, s)) for s in range(self._stages)]
            once += nbytes / problem["microbatches"]
        self._unit = _unit([sent])
        self._less = once
        self.model.minimize(sum(floor(size / self._unit) * some for size, some in sent))

    def _within_seconds(self, time: float, step: float | None) -> None:
        """Requires that no stage takes longer than a time, and the step no longer than another."""
        loads = self._timed()
        unit = _unit(loads)
        rounded = [sum(floor(size / unit) * some for size, some in load) for load in loads]
        for load in rounded:
            self.model.add(load <= floor(time / unit))
        others = self._problem["microbatches"] - 1
        if step is not None and others <= _MANY:
            largest = self.model.new_int_var(0, 4 * _WHOLE, "slowest")
            for load in rounded:
                self.model.add(largest >= load)
            self.model.add(others * largest + sum(rounded) <= floor(step / unit))

    def _minimise_with(self, loads: list[list[tuple[float, Any]]], times_largest: int | None) -> float:
        """Minimises the largest load, times a number, plus the sum of all loads; with None, the largest load alone.

        Returns:
            What 1 of the objective stands for.
        """
        unit = _unit(loads)
        rounded = [sum(floor(size / unit) * some for size, some in load) for load in loads]
        largest = self.model.new_int_var(0, 4 * _WHOLE, "largest")
        for load in rounded:
            self.model.add(largest >= load)
        if times_largest is None or times_largest > _MANY:
            self.model.minimize(largest)
            return unit * (times_largest or 1)
        self.model.minimize(times_largest * largest + sum(rounded))
        return unit

    def _within(self, limits: Sequence[float | None]) -> None:
        """Requires that no stage needs more than its rank may."""
        if all(limit is None for limit in limits):
            return
        held = self._held()
        # Whole bytes are counted, so that what fits to the last byte fits.
        unit = 1.0 if sum(size for load in held for size, _ in load) < _MOST_BYTES else _unit(held)
        for load, limit in zip(held, limits, strict=True):
            if limit is not None:
                self.model.add(sum(ceil(size / unit) * some for size, some in load) <= floor(limit / unit))

    def _held(self) -> list[list[tuple[float, Any]]]:
        """Returns, per stage, bytes that it may own, copy and stash, each with the variable for whether it has."""
        stashed: dict[tuple[int, ...], float] = {}
        for readers, nbytes in self._problem["stashes"]:
            stashed[tuple(readers)] = stashed.get(tuple(readers), 0.0) + nbytes
        copied: dict[tuple[int, ...], float] = {}
        for users, stored, copy, _, _ in self._problem["weights"]:
            copied[tuple(users)] = copied.get(tuple(users), 0.0) + (stored if len(users) == 1 else copy)
        return [
            [(nbytes * self._problem["in_flight"][s], self._any(readers, s)) for readers, nbytes in stashed.items()]
            + [(nbytes, self._any(users, s)) for users, nbytes in copied.items()]
            + [
                (stored - copy, self._owners(number)[s])
                for number, (users, stored, copy, _, _) in enumerate(self._problem["weights"])
                if len(users) > 1 and stored > copy
            ]
            for s in range(self._stages)
        ]

    def _shared_bytes(self, *, with_messages: bool = False) -> dict[tuple[int, ...], float]:
        """Returns the bytes that cross once per step for weights of several units, by these units.

        Args:
            with_messages: whether bytes count that take as long as the messages themselves.
        """
        found: dict[tuple[int, ...], float] = {}
        for users, _, _, crossing, moved in self._problem["weights"]:
            if len(users) > 1:
                found[tuple(users)] = found.get(tuple(users), 0.0) + (moved if with_messages else crossing)
        return found

    def _crossing(self, producer: int, consumers: Sequence[int]) -> list[Any]:
        """Returns, per stage, how often a tensor crosses its border. It is received once, or sent once."""
        found = []
        for s in range(self._stages):
            received = self._without(self._any(consumers, s), self._on[producer][s])
            sent = self.model.new_bool_var("")
            for consumer in consumers:
                self.model.add(sent >= self._on[producer][s] - self._on[consumer][s])
            found.append(received + sent)
        return found

    def _shared(self, users: Sequence[int]) -> list[Any]:
        """Returns, per stage, whether a weight that it uses is used on another stage as well."""
        found = []
        for s in range(self._stages):
            partly = self.model.new_bool_var("")
            some = self._any(users, s)
            for user in users:
                self.model.add(partly >= some - self._on[user][s])
            found.append(partly)
        return found

    def _owners(self, number: int) -> list[Any]:
        """Returns, per stage, whether it stores a weight of several units. One of the stages that use it does."""
        if number not in self._owns:
            users = self._problem["weights"][number][0]
            owns = [self.model.new_bool_var("") for _ in range(self._stages)]
            self.model.add_exactly_one(owns)
            for s, here in enumerate(owns):
                self.model.add(here <= sum(self._on[user][s] for user in users))
            self._owns[number] = owns
        return self._owns[number]

    def solved(self, seconds: float, clock: float) -> dict[str, Any]:
        """Returns the best placement found.

        Args:
            seconds: about when to stop the search. They are counted in work, not by a clock.
            clock: seconds by the clock after which to stop, should the machine be that busy.

        Returns:
            "found": whether there is a placement; "stage_of": the stage of each unit; "owners": the stage that stores a
            weight of several units, by the weight's number as text; "bound": the bound that is proved.
        """
        self._begin_with_hint(seconds, clock)
        solver = self._solver(seconds, clock)
        status = solver.solve(self.model)
        if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return {"found": False}
        return {
            "found": True,
            "stage_of": [next(s for s in range(self._stages) if solver.boolean_value(upto[s])) for upto in self._upto],
            "owners": {
                number: next(s for s, here in enumerate(owns) if solver.boolean_value(here))
                for number, owns in self._owns.items()
            },
            "bound": solver.best_objective_bound * self._unit - self._less,
        }

    def _begin_with_hint(self, seconds: float, clock: float) -> None:
        """Gives every variable the value that it has in the first placement.

        The stages alone leave thousands of other variables open. The solver may spend all of its time on these.
        """
        if self._problem["hint"] is None:
            return
        for upto, stage, first, last in zip(self._upto, self._problem["hint"], *self._within_stages(), strict=True):
            for s in range(first, last):
                self.model.add_hint(upto[s], stage <= s)
        solver = self._solver(seconds, clock)
        solver.parameters.fix_variables_to_their_hinted_value = True
        if solver.solve(self.model) not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return
        self.model.clear_hints()
        for number, value in enumerate(solver.response_proto.solution):
            self.model.add_hint(self.model.get_int_var_from_proto_index(number), value)

    def _solver(self, seconds: float, clock: float) -> cp_model.CpSolver:
        solver = cp_model.CpSolver()
        # With one worker, and work instead of a clock, every run gives the same placement.
        solver.parameters.num_workers = 1
        solver.parameters.random_seed = 0
        # Bounds come from the linear program. With all constraints NASNetMobile is proved to 0.04 %, else to 5 %.
        solver.parameters.linearization_level = 2
        solver.parameters.max_deterministic_time = seconds
        solver.parameters.max_time_in_seconds = clock
        return solver


def _unit(loads: Sequence[Sequence[tuple[float, Any]]]) -> float:
    """Returns what the integer 1 stands for, so that each kind of cost is at most `_WHOLE` in all."""
    whole = sum(size for load in loads for size, _ in load)
    return whole / _WHOLE if whole else 1.0


def main() -> None:
    """Solves the problems of standard input."""
    # When the process that asked is killed, this one ends, too.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    given = json.load(sys.stdin)
    json.dump(
        [IntegerProgram(problem).solved(given["seconds"], given["clock"]) for problem in given["problems"]], sys.stdout
    )


if __name__ == "__main__":
    main()
