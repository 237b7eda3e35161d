"""A rank that is ended between `import smp_tf` and `smp.init` says whose process had ended."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from smp_tf.start import arrivals
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
    words = f"{ENDED}: it had not heard of rank 1 (host {HOST}).\n"
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


def test_a_program_that_has_ended_is_the_rank_no_more(launcher: Rendezvous) -> None:
    """A script of the shell's had looked for a version before it started the training."""
    environment = launcher.environment(1, 2, 1, 2)
    come(environment, pid=ended_process())
    assert arrivals.Arrivals(environment, imported=True).enter_first()
    first = arrivals.Arrivals(launcher.environment(0, 2, 0, 2))
    assert (first.lost(), first.missing()) == ([], [1])


def test_a_program_that_takes_the_place_of_the_rank_s_is_the_rank(launcher: Rendezvous) -> None:
    """The process has the same number, and was taken for another program of the rank's."""
    again = "os.execv(sys.executable, [sys.executable, '-c', 'import os, signal, smp_tf; " + END + "'])"
    ended = run(launcher.environment(0, 2, 0, 2), "import sys, smp_tf", again)
    assert ended == (-signal.SIGTERM, "", f"{ENDED}: it had not heard of rank 1 (host {HOST}).\n")


@pytest.mark.parametrize("thread", [True, False])
def test_a_rank_that_does_not_hear_sigterm_has_come(thread: bool, launcher: Rendezvous) -> None:
    """Others named it as the one that had not, and a worker that it started was taken for it."""
    lines = ["signal.signal(signal.SIGTERM, lambda *_: None)", "import smp_tf"]
    if thread:
        lines = ["import threading", "t = threading.Thread(target=__import__, args=['smp_tf'])", "t.start(); t.join()"]
    assert run(launcher.environment(1, 2, 1, 2), *lines) == (0, "", "")
    assert arrivals.Arrivals(launcher.environment(0, 2, 0, 2), imported=True).missing() == []


def test_smp_init_may_be_called_in_another_thread(launcher: Rendezvous) -> None:
    """It failed, since Python takes handlers of signals from the main thread only."""
    lines = [
        "import smp_tf, threading",
        "from smp_tf.start.start_watch import StartWatch",
        "def start():",
        "    with StartWatch(1800.0):",
        "        print('started')",
        "t = threading.Thread(target=start); t.start(); t.join()",
        END,
    ]
    assert run(launcher.environment(0, 2, 0, 2), *lines) == (-signal.SIGTERM, "started\n", "")


def test_a_handler_that_was_kept_says_nothing_after_smp_init(launcher: Rendezvous) -> None:
    lines = [
        "import smp_tf",
        "from smp_tf.start.start_watch import StartWatch",
        "ours = signal.getsignal(signal.SIGTERM)",
        "signal.signal(signal.SIGTERM, lambda *given: ours(*given))",
        "with StartWatch(1800.0):",
        "    pass",
        END,
    ]
    assert run(launcher.environment(0, 2, 0, 2), *lines) == (-signal.SIGTERM, "", "")


def test_a_handler_of_native_code_s_stays(launcher: Rendezvous) -> None:
    """Python says of it that there is none."""
    lines = ["import faulthandler", "faulthandler.register(signal.SIGTERM)", "import smp_tf"]
    lines += ["os.kill(os.getpid(), signal.SIGTERM)", "print('lives', flush=True)"]
    ended, printed, said = run(launcher.environment(0, 2, 0, 2), *lines)
    assert (ended, printed) == (0, "lives\n")
    assert "most recent call first" in said


def test_where_the_script_starts_horovod_signals_end_it_at_once(launcher: Rendezvous) -> None:
    """It waits there in native code, where no handler of Python's is called."""
    lines = [
        "import types, smp_tf",
        "from smp_tf.horovod_scope import replace_functions",
        "hvd = types.ModuleType('hvd')",
        "hvd.init = lambda: print(signal.getsignal(signal.SIGTERM).name)",
        "replace_functions(hvd)",
        "hvd.init()",
    ]
    assert run(launcher.environment(0, 2, 0, 2), *lines)[:2] == (0, "SIG_DFL\n")


@pytest.mark.parametrize(
    "answer", [b"no json", b'["a list"]', b'{"host": "of another program"}'], ids=["text", "list", "fields"]
)
def test_a_program_that_is_no_launcher_is_not_asked(answer: bytes, launcher: Rendezvous) -> None:
    """The variables were left over from a job of before: the import failed."""
    launcher.kept["/smp_tf.0/0"] = answer
    lines = ["import smp_tf", "print(signal.getsignal(signal.SIGTERM).name)"]
    assert run(launcher.environment(0, 2, 0, 2), *lines) == (0, "SIG_DFL\n", "")


@pytest.mark.parametrize(("name", "value"), [("ADDR", "no..host"), ("PORT", "70000")])
def test_addresses_that_are_none_are_no_launcher(name: str, value: str, launcher: Rendezvous) -> None:
    environment = {**launcher.environment(0, 2, 0, 2), f"HOROVOD_GLOO_RENDEZVOUS_{name}": value}
    lines = ["import smp_tf", "print(signal.getsignal(signal.SIGTERM).name)"]
    assert run(environment, *lines) == (0, "SIG_DFL\n", "")


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
    start = "from smp_tf.start.start_watch import StartWatch\nwith StartWatch(1800.0):\n    " + END
    ordered = lines if order == "after" else lines[::-1]
    assert run(launcher.environment(0, 2, 0, 2), *ordered, END) == (3, "", "")
    assert run(launcher.environment(0, 2, 0, 2), *ordered, start) == (3, "", "")


def test_smp_init_takes_over(launcher: Rendezvous) -> None:
    start = "from smp_tf.start.start_watch import StartWatch\nwith StartWatch(1800.0):\n    " + END
    returned, _, said = run(launcher.environment(0, 2, 0, 2), "import smp_tf", start)
    words = f"in smp.init: it waited for rank 1 (host {HOST}), which has not come to it.\n"
    assert (returned, said) == (-signal.SIGTERM, ENDED.removesuffix("before smp.init") + words)


def test_without_such_a_launcher_nothing_is_done() -> None:
    lines = [
        "import smp_tf, sys",
        "print(signal.getsignal(signal.SIGTERM).name, 'smp_tf.start.import_watch' in sys.modules)",
    ]
    assert run({}, *lines) == (0, "SIG_DFL False\n", "")
    assert run({"OMPI_COMM_WORLD_SIZE": "2"}, *lines) == (0, "SIG_DFL False\n", "")
    gone = {"HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1", "HOROVOD_GLOO_RENDEZVOUS_PORT": "1", "HOROVOD_SIZE": "2"}
    assert run(gone, *lines) == (0, "SIG_DFL True\n", "")
