"""A rank that is ended between `import smp_tf` and `smp.init` says whose process had ended."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from smp_tf import arrivals
from tests.smp_tf.rendezvous import Rendezvous, ended_process, running

HOST = socket.gethostname()
ENDED = f"smp_tf: rank 0 (host {HOST}) was ended by SIGTERM before smp.init"


@pytest.fixture
def launcher() -> Iterator[Rendezvous]:
    with running() as started:
        yield started


def come(environment: dict[str, str], **process: object) -> arrivals.Arrivals:
    """A rank that imports smp_tf: as this process, but for what is said of it."""
    said = {**arrivals.this_process(), **process}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(arrivals, "this_process", lambda: said)
        imported = arrivals.Arrivals(environment, imported=True)
        assert imported.enter_first()
    return imported


def run(environment: dict[str, str], *lines: str) -> tuple[int, str, str]:
    """How a process with a rank's variables ends, and what it says."""
    script = "\n".join(["import os, signal", *lines])
    ended = subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, **environment}, capture_output=True, text=True, timeout=60.0
    )
    return ended.returncode, ended.stdout, ended.stderr


# What the launcher does, in the midst of an import of the rank's.
END = "os.kill(os.getpid(), signal.SIGTERM); signal.pause()"


def test_whose_process_has_ended_is_said(launcher: Rendezvous) -> None:
    """It was the launcher alone that named the rank, without its host."""
    pid = ended_process()
    come(launcher.environment(1, 2, 1, 2), pid=pid)
    words = f"{ENDED}: rank 1 (host {HOST}, pid {pid}) had ended.\n"
    assert run(launcher.environment(0, 2, 0, 2), "import smp_tf", END) == (-signal.SIGTERM, "", words)


def test_who_has_not_imported_is_named(launcher: Rendezvous) -> None:
    """It ended in an import that stands above, or starts."""
    words = f"{ENDED}: it had not heard of rank 1 (host {HOST}), which has not imported smp_tf.\n"
    assert run(launcher.environment(0, 2, 0, 2), "import smp_tf", END) == (-signal.SIGTERM, "", words)


def test_who_ended_for_another_is_not_the_cause(launcher: Rendezvous) -> None:
    """Rank 1 was ended in its start, for rank 2, which had imported smp_tf on another host."""
    come(launcher.environment(2, 3, 0, 1), host="b", machine="b", pid=7)
    pid = ended_process()
    come(launcher.environment(1, 3, 1, 2), pid=pid)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(arrivals, "this_process", lambda: {"host": HOST, "machine": "", "pid": pid})
        arrivals.Arrivals(launcher.environment(1, 3, 1, 2)).whose_end()
    words = f"{ENDED}: rank 2 (host b, pid 7) had ended, or did not know yet of the end.\n"
    assert run(launcher.environment(0, 3, 0, 2), "import smp_tf", END) == (-signal.SIGTERM, "", words)


def test_a_start_names_the_host_of_who_has_only_imported(launcher: Rendezvous) -> None:
    """The host of which no rank had come to smp.init was not known."""
    come(launcher.environment(1, 2, 0, 1), host="b", machine="b", pid=7)
    start = arrivals.Arrivals(launcher.environment(0, 2, 0, 1))
    assert start.missing_in_words() == "rank 1 (host b, pid 7), which has not come to it"


def test_a_program_that_a_rank_starts_is_no_rank(launcher: Rendezvous) -> None:
    environment = launcher.environment(0, 2, 0, 2)
    come(environment)
    kept = dict(launcher.kept)
    assert run(environment, "import smp_tf", END) == (-signal.SIGTERM, "", "")
    assert launcher.kept == kept


def test_a_child_that_the_script_forks_ends_alone(launcher: Rendezvous) -> None:
    lines = [
        "import smp_tf",
        "child = os.fork()",
        "child or signal.pause()",
        "os.kill(child, signal.SIGTERM)",
        "print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))",
    ]
    assert run(launcher.environment(0, 2, 0, 2), *lines) == (0, f"{-signal.SIGTERM}\n", "")


def test_who_cannot_say_it_ends(launcher: Rendezvous) -> None:
    assert run(launcher.environment(0, 2, 0, 2), "import smp_tf", "os.close(2)", END) == (-signal.SIGTERM, "", "")


@pytest.mark.parametrize("order", ["before", "after"])
def test_a_handler_of_the_script_s_stays(order: str, launcher: Rendezvous) -> None:
    lines = ["import smp_tf", "signal.signal(signal.SIGTERM, lambda *_: os._exit(3))"]
    start = "from smp_tf.start_watch import StartWatch\nwith StartWatch(1800.0):\n    " + END
    ordered = lines if order == "after" else lines[::-1]
    assert run(launcher.environment(0, 2, 0, 2), *ordered, END) == (3, "", "")
    assert run(launcher.environment(0, 2, 0, 2), *ordered, start) == (3, "", "")


def test_smp_init_takes_over(launcher: Rendezvous) -> None:
    start = "from smp_tf.start_watch import StartWatch\nwith StartWatch(1800.0):\n    " + END
    returned, _, said = run(launcher.environment(0, 2, 0, 2), "import smp_tf", start)
    words = f"in smp.init: it waited for rank 1 (host {HOST}), which has not come to it.\n"
    assert (returned, said) == (-signal.SIGTERM, ENDED.removesuffix("before smp.init") + words)


def test_without_such_a_launcher_nothing_is_done() -> None:
    lines = ["import smp_tf, sys", "print(signal.getsignal(signal.SIGTERM).name, 'smp_tf.import_watch' in sys.modules)"]
    assert run({}, *lines) == (0, "SIG_DFL False\n", "")
    assert run({"OMPI_COMM_WORLD_SIZE": "2"}, *lines) == (0, "SIG_DFL False\n", "")
    gone = {"HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1", "HOROVOD_GLOO_RENDEZVOUS_PORT": "1", "HOROVOD_SIZE": "2"}
    assert run(gone, *lines) == (0, "SIG_DFL True\n", "")
