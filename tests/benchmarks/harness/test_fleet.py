"""Processes that take turns: what they are started with, that they can be stopped meanwhile, and that they end."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

SCRIPT = """
import os
import sys

from harness.answers import answer


class Hands:
    def variable(self, name: str) -> str | None:
        return os.environ.get(name)


answer(Hands(), 0, sys.argv[-1])
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    from harness import fleet

    monkeypatch.setenv("PYTHONPATH", str(fleet.HERE))
    path = tmp_path / "hands.py"
    path.write_text(SCRIPT)
    return str(path)


def test_a_crew_has_variables_of_its_own(script: str) -> None:
    from harness.fleet import Crew

    with Crew("a", [], 1, 60.0, script=script, variables={"OF_ITS_OWN": "1"}) as crew:
        assert crew.ask("variable", name="OF_ITS_OWN") == ["1"]
    assert "OF_ITS_OWN" not in os.environ


def test_a_crew_that_is_paused_stands_still_and_goes_on_or_ends(script: str) -> None:
    from harness.fleet import Crew

    with Crew("a", [], 1, 60.0, script=script) as crew:
        (member,) = crew.members
        crew.pause()
        # Returns when it has stopped, which it leaves to be waited for.
        stopped = os.waitid(os.P_PID, member.pid, os.WSTOPPED | os.WNOWAIT)
        assert stopped is not None
        assert stopped.si_pid == member.pid
        crew.resume()
        assert crew.ask("variable", name="OF_ITS_OWN") == [None]
        crew.pause()
    assert crew._launcher.returncode == 0
