"""Compares a training that was split over processes with that of one process of plain Keras."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tests.distributed.harness import ONE_THREAD, ROOT
from tests.distributed.result_table import Row
from tests.distributed.warm_process import HUGE_PAGES

if TYPE_CHECKING:
    # Collecting the tests does not import TensorFlow.
    from tests.distributed.models import ZooModel


#: Begins the line that says that the references of a model are written.
DONE = "reference of "


class Setting(NamedTuple):
    """How a model is trained."""

    model: str
    partitions: int
    microbatches: Any
    schedule: str


class References:
    """What plain Keras gives, computed once per session by a process beside the first launches.

    Args:
        zoo: name of the module that holds the models.
        folder: where the process writes to.
        wanted: models and numbers of microbatches, or "fit".
        as_written: whether TensorFlow leaves the graphs as they are.
    """

    def __init__(self, zoo: str, folder: Path, wanted: list[tuple[str, Any]], *, as_written: bool = False) -> None:
        self._folder = folder
        command = [sys.executable, "-m", "tests.distributed.reference", zoo, str(folder), json.dumps(wanted)]
        command += ["as-written"] if as_written else []
        environment = {
            **HUGE_PAGES,
            **os.environ,
            **ONE_THREAD,
            "TF_USE_LEGACY_KERAS": "1",
            "TF_ENABLE_ONEDNN_OPTS": "0",
            "TF_CPP_MIN_LOG_LEVEL": "2",
        }
        self._process = subprocess.Popen(command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        self._there: set[str] = set()

    def of(self, model: str, microbatches: Any) -> dict[str, np.ndarray]:
        """Returns the arrays of one reference run, as soon as they are there."""
        assert self._process.stdout is not None
        while model not in self._there:
            line = self._process.stdout.readline()
            assert line, f"the process that trains {model} with plain Keras ended with status {self._process.wait()}"
            if line.startswith(DONE):
                self._there.add(line.removeprefix(DONE).split()[0])
        with np.load(self._folder / f"{model}-{microbatches}.npz") as arrays:
            return dict(arrays)

    def end(self) -> None:
        """Ends the process, when nobody waits for it any more."""
        self._process.kill()
        self._process.communicate()


def rounding(name: str, size: float, rate: float) -> float:
    """By how much two trainings in float64 may differ in a variable, whatever its change, since numbers have 53 bits.

    Args:
        name: of the variable: moving averages are means of activations, which are about one, and may be zero in truth.
        size: its norm: its elements are rounded in each step.
        rate: the learning rate, by which the rounding of a gradient counts that is zero in truth, as that of a bias
            before batch normalisation or of attention's keys. Adam divides what is left of it by its epsilon, 1e-7.
    """
    return 2e-15 * size + (1e-14 if "/moving_" in name else 1e-11 * rate)


def relative(difference: float, size: float, floor: float) -> float:
    """A difference relative to a size, of which `floor` is taken for rounding."""
    return max(0.0, difference - floor) / size if size else max(0.0, difference - floor)


@dataclass
class Comparison:
    """How the ranks of a run differ from plain Keras.

    Args:
        wrong: what is beyond the tolerances, in words.
        losses, weights: the largest relative deviations; None where they were not compared.
    """

    wrong: list[str] = field(default_factory=list)
    losses: float | None = None
    weights: float | None = None

    @property
    def row(self) -> Row:
        """The same as an entry of the table of results."""
        return Row(self.losses, self.weights, not self.wrong)


def compare(entry: ZooModel, ranks: list[dict], reference: dict[str, np.ndarray]) -> Comparison:
    """Compares losses, predictions, and the weights put together from all ranks."""
    from tests.distributed.models import STEPS

    tolerance = entry.loose or {"float64": 1e-9, "float32": 1e-5}[entry.floatx]
    # Logits of bfloat16 have two digits, and of small ones, differences of larger numbers, hardly those.
    of_predictions = (20 if entry.loose else 10) * tolerance
    found = Comparison(losses=0.0)
    for index, rank in enumerate(ranks):
        losses = np.abs(rank["losses"] - reference["losses"]) / np.abs(reference["losses"])
        found.losses = max(found.losses, float(losses.max()))
        if not losses.max() <= tolerance:
            found.wrong.append(f"losses of rank {index}: {rank['losses']}, plain Keras {reference['losses']}")
        if rank["iterations"] != STEPS:
            found.wrong.append(f"optimizer.iterations of rank {index} is {rank['iterations']}")
        for number, values in enumerate(rank["predictions"]):
            plain = reference[f"predictions_{number}"]
            size = np.linalg.norm(plain)
            if not np.linalg.norm(values - plain) <= of_predictions * size:
                found.wrong.append(f"predictions {number} of rank {index} differ")
    if not found.wrong:
        compare_weights(found, ranks, reference, tolerance, entry)
    return found


def compare_weights(found: Comparison, ranks: list[dict], reference: dict, tolerance: float, entry: ZooModel) -> None:
    """Compares the weights, put together from all ranks, with the reference's."""
    names = [str(name) for name in reference["names"]]
    owners: dict[int, list[int]] = {}
    for index, rank in enumerate(ranks):
        for position in rank["variables"]:
            owners.setdefault(int(position), []).append(index)
    found.wrong += [
        f"rank {i} has {r['count']} variables, not {len(names)}"
        for i, r in enumerate(ranks)
        if r["count"] != len(names)
    ]
    for position, name in enumerate(names):
        if len(owners.get(position, [])) != 1:
            found.wrong.append(f"{name} is stored by ranks {owners.get(position, [])}, not by one")
    if found.wrong:
        return
    found.weights = 0.0
    square_difference = square_size = 0.0
    rate = float(entry.optimizer().learning_rate) if entry.floatx == "float64" else 0.0
    for position, name in enumerate(names):
        value = np.asarray(ranks[owners[position][0]]["variables"][str(position)], np.float64)
        final = reference[f"final_{position}"].astype(np.float64)
        initial = reference[f"initial_{position}"].astype(np.float64)
        difference = np.linalg.norm(value - final)
        square_difference += difference**2
        square_size += np.linalg.norm(final) ** 2
        if entry.floatx == "float64":
            floor = rounding(name, float(np.linalg.norm(final)), rate)
            error = relative(difference, np.linalg.norm(final - initial), floor)
            found.weights = max(found.weights, error)
            if not error <= tolerance:
                found.wrong.append(f"the change of {name} {final.shape} is off by {error:.2e}")
    if entry.floatx == "float32" and entry.weights_compared:
        found.weights = float(np.sqrt(square_difference / square_size))
        if not found.weights <= tolerance:
            found.wrong.append(f"the weights are off by {found.weights:.2e} of the model's norm")
    elif entry.floatx == "float32":
        found.weights = None
