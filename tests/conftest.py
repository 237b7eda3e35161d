"""What all tests share: which of them run by default."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import hypothesis
import pytest

from tests import quick_import

# Containers often set it; every process of every test would then compile smp_tf and the tests anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

#: Folders in which all tests start several processes, and those in which some do: the Makefile looks nowhere else.
ALL_SEVERAL = ("examples", "distributed")
SOME_SEVERAL = ("benchmarks", "docs")
#: Files that take minutes: where several run at a time, the others fill up what is left beside them.
LONGEST = ("test_equality.py", "test_examples.py", "test_errors.py", "test_packaging.py")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="run the tests marked full too (make test-all)")
    parser.addoption("--results", type=Path, help="file for the table of all comparisons with plain Keras")


def pytest_configure(config: pytest.Config) -> None:
    # A shell's background job ignores SIGINT, and so would every process that a test starts and interrupts.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # Under `make test` these would reach the make that a test starts.
    for name in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS"):
        os.environ.pop(name, None)
    # TensorFlow reads it when it is imported, which some test modules do before they import smp_tf.
    os.environ.setdefault("TF_USE_LEGACY_KERAS", "1")
    # What one test measures is nothing to the next, nor to the user.
    os.environ["SMP_TF_PROFILES"] = "off"
    quick_import.install()
    quick_import.look_for_garbage_seldom()
    # A machine may be busy, so an example has no deadline. Properties that say no number have 100 examples with --full.
    hypothesis.settings.register_profile("full run", deadline=None)
    hypothesis.settings.register_profile("default run", deadline=None, max_examples=40)
    hypothesis.settings.load_profile("full run" if config.getoption("--full") else "default run")
    config.addinivalue_line("markers", "distributed: starts several processes with horovodrun")
    config.addinivalue_line("markers", "full: the whole grid of settings; only with --full")
    config.addinivalue_line("markers", "alone: measures time or processors, so that nothing may run beside it")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        folder = item.path.relative_to(Path(__file__).parent).parts[0]
        if folder in ALL_SEVERAL:
            item.add_marker("distributed")
        elif item.get_closest_marker("distributed") and folder not in SOME_SEVERAL:
            raise pytest.UsageError(
                f"{item.nodeid} is marked distributed, and make test looks for such tests in "
                f"{', '.join((*SOME_SEVERAL, *ALL_SEVERAL))} only. Move it, or add its folder to both lists."
            )
    items.sort(key=lambda item: item.path.name not in LONGEST)
    if config.getoption("--full"):
        return
    left_out = [item for item in items if item.get_closest_marker("full")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("full")]


_failed: set[str] = set()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:
        _failed.add(report.nodeid)


def pytest_sessionfinish() -> None:
    """Deletes the folders of the jobs that tests have started, except those of tests that failed."""
    job = sys.modules.get("tests.distributed.job")
    if job is not None:
        job.delete_folders(_failed)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Tells what tests counted: the property `counted` of whatever passed."""
    for report in terminalreporter.getreports("passed"):
        for name, value in report.user_properties:
            if name == "counted":
                terminalreporter.write_line(str(value))
