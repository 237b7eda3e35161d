"""Runs steps that are each done once, under a lock. It can be stopped at any moment and repeated.

stamp of the step holds its key?  ── yes ──▶ next step
          │ no
          ▼
forget its stamp ──▶ work ──▶ write its stamp ──▶ next step
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from setup_progress import Progress, duration
from setup_state import ChildRecord, Lock, Stamps


@dataclass(frozen=True)
class Step:
    """One step.

    Attributes:
        name: the file name of its stamp.
        title: what a person reads.
        key: a digest of all that the step depends on.
        work: does the step, from nothing or over a half-done try.
        done: returns whether its outputs still exist.
    """

    name: str
    title: str
    key: str
    work: Callable[[Progress], None]
    done: Callable[[], bool] = lambda: True


class Engine:
    """Runs the steps of one environment."""

    def __init__(self, name: str, state: Path, stamps: Path) -> None:
        """Prepares the engine.

        Args:
            name: the environment's name. The lock and the log are named after it.
            state: the folder of locks and logs, made here.
            stamps: the folder of the stamps.
        """
        state.mkdir(exist_ok=True)
        self.log = state / f"{name}.log"
        self.trash = state / f"{name}.trash"
        self._stamps = Stamps(stamps)
        self._lock = Lock(state / f"{name}.lock")
        self._child = ChildRecord(state / f"{name}.child")

    def _holds(self, step: Step) -> bool:
        return self._stamps.holds(step.name, step.key) and step.done()

    def run(self, steps: list[Step]) -> None:
        """Does the steps that are not done. Prints nothing when all are done.

        Args:
            steps: the steps, in order. A step's key contains the keys of the steps that it builds upon.

        Raises:
            SetupFailure: a step failed. The message is the cause in one line.
        """
        if all(self._holds(step) for step in steps):
            return
        began = time.monotonic()
        progress = Progress(self.log, self._child)
        if not self._lock.try_acquire():
            with progress.step("wait for the other set-up of this folder"):
                self._lock.acquire(lambda holder: progress.move(f"process {holder}"))
        self._child.end_leftover()
        shutil.rmtree(self.trash, ignore_errors=True)
        progress.say(f"setting up smp_tf; the log is {os.path.relpath(self.log)}")
        for index, step in enumerate(steps):
            if self._holds(step):
                continue
            self._stamps.clear(step.name)
            with progress.step(f"[{index + 1}/{len(steps)}] {step.title}"):
                step.work(progress)
                self._stamps.write(step.name, step.key)
        progress.say(f"set-up finished in {duration(time.monotonic() - began)}")
