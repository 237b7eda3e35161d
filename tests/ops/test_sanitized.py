"""The transport's C++ tests report nothing under the compiler's sanitizers; see sanitize.py."""

from __future__ import annotations

import pytest

from tests.ops import sanitize
from tests.ops.sanitize import SANITIZERS, Sanitizer


def sanitizer_that_is_there(name: str) -> Sanitizer:
    """Skips the test where the compiler has none, and says so."""
    try:
        sanitize.check(SANITIZERS[name])
    except sanitize.MissingSanitizerError as error:
        pytest.skip(str(error))
    return SANITIZERS[name]


def test_calls_of_a_storm_are_ended_before_they_are_freed() -> None:
    """Threads send, receive and cancel while a rank fails or is shut down. What the calls hold is looked after here.

    The library is compiled as always, which is cheap; the other test compiles all of it with the sanitizers.
    """
    sanitizer = sanitizer_that_is_there("address")
    program = sanitize.program_over_library("storm_test", sanitizer)
    assert sanitize.report_of(program, sanitizer, ["2"], timeout=200) is None


@pytest.mark.full
@pytest.mark.parametrize("name", sorted(SANITIZERS))
@pytest.mark.parametrize("test", sanitize.all_tests())
def test_nothing_is_reported(test: str, name: str) -> None:
    sanitizer = sanitizer_that_is_there(name)
    program = sanitize.whole_program(test, sanitizer)
    assert sanitize.report_of(program, sanitizer, sanitize.arguments_of(test)) is None


def test_a_compiler_without_sanitizers_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "g++ -fsanitize=nothing-of-that-name")
    with pytest.raises(
        sanitize.MissingSanitizerError, match=r"ThreadSanitizer: not there\. g\+\+ -fsanitize=nothing-of-that-name"
    ):
        sanitize.check(SANITIZERS["thread"])
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(sanitize.MissingSanitizerError, match=r"'no-such-compiler' was not found\. Run: apt install g"):
        sanitize.check(SANITIZERS["address"])
