"""Steps are done once, can be stopped at any moment, and never run twice at a time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.large

SCRIPT = Path(__file__).with_name("steps_under_test.py")
PATIENCE = 90.0


class Run:
    """One folder in which the two steps are run, several times."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes: list[subprocess.Popen[str]] = []
        os.mkfifo(folder / "gate")

    def start(self, key: str = "2") -> subprocess.Popen[str]:
        tools = str(SCRIPT.parents[2] / "tools")
        process = subprocess.Popen(
            [sys.executable, str(SCRIPT), str(self.folder), key],
            env={**os.environ, "PYTHONPATH": tools},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.processes.append(process)
        return process

    def wait_at_gate(self) -> int:
        """Waits until the second step's command reads the gate; returns the writing end."""
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            try:
                return os.open(self.folder / "gate", os.O_WRONLY | os.O_NONBLOCK)
            except OSError:
                time.sleep(0.02)  # opening fails as long as there is no reader
        raise AssertionError("the second step never began")

    def finish(self, process: subprocess.Popen[str]) -> str:
        os.close(self.wait_at_gate())
        return self.output(process)

    def output(self, process: subprocess.Popen[str]) -> str:
        output, _ = process.communicate(timeout=PATIENCE)
        assert process.returncode == 0, output
        return output

    def work(self) -> list[str]:
        return (self.folder / "done_work").read_text().split()

    def gate_reader(self) -> int:
        return int((self.folder / "gate.pid").read_text())


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    run = Run(tmp_path)
    yield run
    for process in run.processes:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def ended(pid: int) -> bool:
    """Whether a process is gone, or only waits for its parent to take note."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_done_once_and_then_silent(run: Run) -> None:
    output = run.finish(run.start())
    assert "[1/2] first" in output
    assert "[2/2] second" in output
    assert run.output(run.start()) == ""
    assert run.work() == ["first", "second"]


def test_a_changed_key_repeats_only_that_step(run: Run) -> None:
    run.finish(run.start())
    run.finish(run.start(key="another"))
    assert run.work() == ["first", "second", "second"]


def test_a_lost_output_repeats_its_step(run: Run) -> None:
    run.finish(run.start())
    (run.folder / "lost").touch()
    run.finish(run.start())
    assert run.work() == ["first", "second", "second"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_the_command_and_keeps_what_is_done(run: Run, number: int) -> None:
    process = run.start()
    gate = run.wait_at_gate()
    process.send_signal(number)
    process.communicate(timeout=PATIENCE)
    os.close(gate)
    assert process.returncode == 130
    assert ended(run.gate_reader())
    run.finish(run.start())
    assert run.work() == ["first", "second"]


def test_after_a_kill_the_next_run_ends_what_was_left_and_goes_on(run: Run) -> None:
    process = run.start()
    gate = run.wait_at_gate()
    left_behind = run.gate_reader()
    process.kill()
    process.wait(timeout=PATIENCE)
    assert not ended(left_behind)
    second = run.start()
    deadline = time.monotonic() + PATIENCE
    while not ended(left_behind) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert ended(left_behind)
    os.close(gate)
    run.finish(second)
    assert run.work() == ["first", "second"]


def test_a_recycled_process_id_is_not_killed(run: Run) -> None:
    run.finish(run.start())
    bystander = subprocess.Popen(["cat"], stdin=subprocess.PIPE, start_new_session=True)
    (run.folder / "state" / "env.child").write_text(f"{bystander.pid} 1")
    run.finish(run.start(key="another"))
    assert bystander.poll() is None
    bystander.communicate(timeout=PATIENCE)


def test_two_at_a_time_do_the_work_once(run: Run) -> None:
    first = run.start()
    gate = run.wait_at_gate()
    second = run.start()
    assert second.stdout is not None
    assert second.stdout.readline() == "wait for the other set-up of this folder ...\n"
    os.close(gate)
    run.output(first)
    run.output(second)
    assert run.work() == ["first", "second"]


def test_the_set_up_of_this_checkout_does_and_prints_nothing_when_it_is_done(root: Path) -> None:
    """Run after `make setup`, as `make test` does; otherwise this is that set-up."""
    venv, state = root / ".venv", root / ".setup"
    if Path(sys.prefix).resolve() != venv.resolve() or not (venv / ".setup").is_dir():
        pytest.skip(f"the Python of this run is not of {venv}, which `make setup` makes")

    def written() -> dict[Path, tuple[int, int]]:
        """When the stamps, the log, and what a set-up leaves beside it were written, and how long they are."""
        files = [*(venv / ".setup").iterdir(), *state.glob(".venv.*")]
        return {file: (file.stat().st_mtime_ns, file.stat().st_size) for file in files}

    before = written()
    done = subprocess.run(
        [sys.executable, str(root / "tools" / "setup_env.py")], capture_output=True, text=True, timeout=PATIENCE
    )
    assert (done.stdout, done.stderr, done.returncode) == ("", "", 0), "the set-up was not done: run make setup before"
    assert written() == before
    assert {file.name for file in (venv / ".setup").iterdir()} >= {"environment", "horovod", "ops", "smp_tf"}
