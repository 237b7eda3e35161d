"""What an exception that ends a rank is told as, and which exceptions only follow from another."""

import json
import os
import re
import sys
import threading

import pytest
import tensorflow as tf

from smp_tf.errors import RankMismatchError
from smp_tf.watch import exception_hooks
from smp_tf.watch.failure import FailureHooks, describe, follows_from_another


class Recorder:
    """Stands for the transport, whose `abort` ends the process that calls it."""

    def __init__(self, cause=None):
        self.cause = cause
        self.is_open = True
        self.aborts = []
        # Seconds for which the line with the cause is held, and what was printed before each change.
        self.holds = []
        self.printed = []

    def hold_words(self, seconds):
        self.holds.append((seconds, len(self.printed)))

    def abort(self, message, **details):
        self.aborts.append((message, details))


def caught(error):
    try:
        raise error
    except type(error) as raised:
        return raised


@pytest.fixture
def hooks(monkeypatch):
    printed = []
    monkeypatch.setattr(sys, "excepthook", lambda *args: printed.append(args[1]))
    monkeypatch.setattr(threading, "excepthook", lambda args: printed.append(args.exc_value))

    def make(cause=None):
        recorder = Recorder(cause)
        recorder.printed = printed
        made = FailureHooks(recorder, "rank 1 (host a)")
        made.install()
        return made, recorder, printed

    return make


def test_an_exception_is_told_after_its_own_traceback(hooks):
    made, recorder, printed = hooks()
    error = caught(ValueError("bad\n  thing"))
    sys.excepthook(ValueError, error, error.__traceback__)
    assert printed == [error]
    assert made.failed
    ((message, details),) = recorder.aborts
    assert message.startswith("rank 1 (host a) failed: ValueError: bad thing (at ")
    assert message.endswith("in caught)")
    assert details["exit_code"] == 1
    assert details["type"] == "ValueError"
    assert len(details["traceback"]) == 1


def test_ctrl_c(hooks):
    _, recorder, _ = hooks()
    error = caught(KeyboardInterrupt())
    sys.excepthook(KeyboardInterrupt, error, error.__traceback__)
    ((message, details),) = recorder.aborts
    assert (message, details["exit_code"]) == ("rank 1 (host a) was ended by Ctrl-C", 130)


def test_a_cause_that_is_known_has_the_last_word_once(hooks, capsys):
    """It was told when it became known, and again behind the traceback."""
    _, recorder, printed = hooks({"message": "rank 0 failed: OSError: disk full"})
    error = caught(RuntimeError("Horovod has been shut down."))
    sys.excepthook(RuntimeError, error, error.__traceback__)
    assert printed == [error]
    assert recorder.aborts == []
    # The transport tells it, behind the traceback.
    assert recorder.holds == [(1.5, 0), (0.0, 1)]
    assert capsys.readouterr().err == ""


def test_an_exception_in_a_thread_is_told(hooks):
    _, recorder, printed = hooks()

    def fail():
        raise OSError("no space")

    thread = threading.Thread(target=fail)
    thread.start()
    thread.join()
    assert [str(error) for error in printed] == ["no space"]
    assert "failed: OSError: no space" in recorder.aborts[0][0]


@pytest.mark.parametrize("in_thread", [False, True])
def test_an_exception_whose_traceback_nobody_reads_is_told(hooks, monkeypatch, in_thread):
    """The other ranks waited for its rank until stall_timeout, and it never ended."""
    monkeypatch.setattr(exception_hooks, "_PRINTING_TIME", 0.05)
    monkeypatch.setattr(exception_hooks, "has_room", lambda stream: False)
    read, told = threading.Event(), threading.Event()

    def print_to_nobody(*_):
        read.wait()

    monkeypatch.setattr(threading if in_thread else sys, "excepthook", print_to_nobody)
    _, recorder, _ = hooks()
    abort = recorder.abort
    recorder.abort = lambda *args, **details: (abort(*args, **details), told.set())
    error = caught(ValueError("bad"))
    given = ValueError, error, error.__traceback__
    if in_thread:
        given = (threading.ExceptHookArgs((*given, None)),)
    raising = threading.Thread(target=threading.excepthook if in_thread else sys.excepthook, args=given)
    raising.start()
    assert told.wait(20)
    read.set()
    raising.join()
    [(message, _)] = recorder.aborts
    assert message.startswith("rank 1 (host a) failed: ValueError: bad (at ")


def test_a_hook_that_takes_long_is_no_traceback_that_nobody_reads(hooks, monkeypatch):
    """Who looked at an exception in a debugger had the job ended after three seconds."""
    monkeypatch.setattr(exception_hooks, "_PRINTING_TIME", 0.01)
    looked = threading.Semaphore(0)
    monkeypatch.setattr(exception_hooks, "has_room", lambda stream: bool(looked.release()) or True)

    def debug(*_):
        for _ in range(6):
            assert looked.acquire(timeout=20)
        assert recorder.aborts == []

    monkeypatch.setattr(sys, "excepthook", debug)
    _, recorder, _ = hooks()
    error = caught(ValueError("bad"))
    sys.excepthook(ValueError, error, error.__traceback__)
    assert len(recorder.aborts) == 1


def test_nothing_is_told_through_a_transport_that_is_closed(hooks):
    """A thread that raised when Python had closed it printed three tracebacks, one in another."""
    made, recorder, printed = hooks()
    recorder.is_open = False
    error = caught(ValueError("late"))
    threading.excepthook(threading.ExceptHookArgs((ValueError, error, error.__traceback__, None)))
    assert printed == [error]
    assert (recorder.aborts, made.failed) == ([], False)


def test_removed_hooks_tell_nothing(hooks):
    made, recorder, _ = hooks()
    made.remove()
    assert recorder.holds[-1] == (0.0, 0)
    error = caught(ValueError("x"))
    sys.excepthook(ValueError, error, error.__traceback__)
    assert recorder.aborts == []


def test_a_disagreement_blames_the_rank_it_names():
    error = caught(RankMismatchError("The ranks do not agree on x:\n  rank 2 has 3"))
    assert describe(error, error.__traceback__, "rank 0") == ("The ranks do not agree on x: rank 2 has 3")


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (RankMismatchError, r"rank 2 has 3"),
        (ValueError, r"rank 0 failed: ValueError: rank 2 has 3 \(at .*\)"),
        # TensorFlow cannot make one of these, and raises an error of its own.
        (json.JSONDecodeError, r"rank 0 failed: JSONDecodeError: rank 2 has 3: line 1 column 1 \(char 0\) \(at .*\)"),
    ],
)
def test_an_error_in_a_tf_function_is_told_without_its_lines_of_code(kind, expected):
    @tf.function
    def step():
        raise kind("rank 2 has\n3", *(["", 0] if kind is json.JSONDecodeError else []))

    with pytest.raises(Exception, match="in user code") as raised:
        step()
    assert re.fullmatch(expected, describe(raised.value, raised.tb, "rank 0"))


def test_an_error_of_an_op_is_told_without_its_lines_of_code():
    @tf.function
    def step(x):
        return tf.strings.to_number(x, name="read")

    with pytest.raises(tf.errors.InvalidArgumentError, match="Graph execution error") as raised:
        step(tf.constant("seven"))
    words = describe(raised.value, raised.tb, "rank 0")
    expected = "StringToNumberOp could not correctly convert string: seven [[{{node read}}]]"
    assert words.startswith(f"rank 0 failed: InvalidArgumentError: {expected}")


def test_a_check_of_this_library_in_a_graph_says_its_words():
    @tf.function
    def step(x):
        with tf.control_dependencies([tf.debugging.Assert(x < 3, ["smp_tf: 'x' differs on rank 1. Step:", x, [7, 8]])]):
            return tf.identity(x)

    with pytest.raises(tf.errors.InvalidArgumentError) as raised:
        step(tf.constant(5))
    assert describe(raised.value, raised.tb, "rank 0") == "rank 0 ends the job: 'x' differs on rank 1. Step: 5 7 8"


def test_a_forked_child_tells_nobody(hooks):
    _, recorder, _ = hooks()
    error = caught(ValueError("in the child"))
    child = os.fork()
    if child == 0:
        sys.excepthook(ValueError, error, error.__traceback__)
        os._exit(len(recorder.aborts))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_long_messages_are_cut():
    assert len(describe(ValueError("x" * 10_000), None, "rank 0")) < 1600


def test_which_exceptions_follow_from_another_rank():
    assert follows_from_another(RuntimeError("Horovod has been shut down. This was caused by ..."))
    assert not follows_from_another(RuntimeError("something else"))
    with pytest.raises(ValueError, match="outer") as raised:
        chain()
    assert follows_from_another(raised.value)


def chain():
    try:
        raise OSError("Horovod has been shut down")
    except OSError as inner:
        raise ValueError("outer") from inner
