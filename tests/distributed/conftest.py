"""One launch for all cases that a test session wants of the same processes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from tests.distributed.harness import Case, CaseResult, launch
from tests.distributed.job import DEADLINE
from tests.distributed.pool import POOLS
from tests.distributed.two_hosts import NoHostsError, TwoHosts, two_hosts


@pytest.fixture(scope="module")
def hosts() -> Iterator[TwoHosts]:
    """Two hosts, made of this machine."""
    try:
        with two_hosts() as made:
            yield made
    except NoHostsError as error:
        pytest.skip(f"This machine does not let itself be made into two hosts: {error}.")


@dataclass(frozen=True)
class LaunchedCase:
    """A case with the launch it belongs to; tests are parametrised with it, named `launched`."""

    size: int
    module: str
    case: Case
    environment: tuple[tuple[str, str], ...] = ()
    deadline: float = DEADLINE
    fresh: bool = False
    #: Cases of other groups have processes of their own: of many long ones, some end before the others.
    group: int = 0

    @property
    def launch_key(self) -> tuple[object, ...]:
        """Cases with the same key share their processes."""
        return (self.size, self.module, self.environment, self.deadline, self.fresh, self.group)


@dataclass
class LaunchCache:
    """The results of this session's launches."""

    results: dict[tuple[object, ...], dict[str, CaseResult]] = field(default_factory=dict)

    def get(self, wanted: LaunchedCase, items: list[pytest.Item]) -> CaseResult:
        """Returns a case's result, launching it with all other selected cases of its launch."""
        if wanted.launch_key not in self.results:
            selected: dict[str, Case] = {wanted.case.name: wanted.case}
            for item in items:
                spec = getattr(item, "callspec", None)
                other = spec.params.get("launched") if spec else None
                if isinstance(other, LaunchedCase) and other.launch_key == wanted.launch_key:
                    selected[other.case.name] = other.case
            self.results[wanted.launch_key] = launch(
                wanted.size,
                wanted.module,
                list(selected.values()),
                environment=dict(wanted.environment),
                deadline=wanted.deadline,
                fresh=wanted.fresh,
            )
        return self.results[wanted.launch_key][wanted.case.name]


@pytest.fixture(scope="session", autouse=True)
def _pools_end() -> Iterator[None]:
    """Processes that wait for cases end with the session, and cleanly."""
    yield
    POOLS.end()


@pytest.fixture(scope="session")
def launch_cache() -> LaunchCache:
    """The session's launches."""
    return LaunchCache()


@pytest.fixture
def case_result(launched: LaunchedCase, launch_cache: LaunchCache, request: pytest.FixtureRequest) -> CaseResult:
    """The result of the case that the test is parametrised with."""
    return launch_cache.get(launched, request.session.items)
