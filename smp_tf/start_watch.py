"""Says in `smp.init` which ranks are waited for, and ends a start that waits longer than `stall_timeout` for them.

Until the transport is connected ranks meet in Horovod, which does not say whom it waits for, and cannot be interrupted.
Who has come to its start is known where `horovodrun` started the ranks: each leaves its address there.
"""

from __future__ import annotations

import http.client
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType

from smp_tf.announce import tell
from smp_tf.environment import world_rank, world_size

# As long as messages are waited for without a word.
PATIENCE = 30.0
_ADDRESS, _PORT = "HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT"
# The names of a few tell what is wrong, and one launcher answers all ranks.
_MOST_NAMES = 4
_ASKING_TIME = 3.0


def others_in_words(missing: Sequence[int] | None = None) -> str:
    """Whom a start waits for, in words.

    Args:
        missing: as `missing_ranks` gives them; None where that is not known.
    """
    if not missing:
        return "other ranks"
    names = ", ".join(map(str, missing)) + (" and others" if len(missing) == _MOST_NAMES else "")
    return f"rank{'s' * (len(missing) > 1)} {names}, which {'have' if len(missing) > 1 else 'has'} not come to it"


class StartWatch:
    """Watches over a start of several ranks, within `with`.

    Args:
        stall_timeout: seconds that a rank may keep the others waiting.
        environment: where the launcher says how many ranks there are, and where it is.
        patience: seconds until it is said who is waited for.
        end: ends the process, with an exit code.
    """

    def __init__(
        self,
        stall_timeout: float,
        environment: Mapping[str, str] = os.environ,
        patience: float = PATIENCE,
        end: Callable[[int], object] = os._exit,
    ) -> None:
        self._stall_timeout = stall_timeout
        self._environment = environment
        self._patience = min(patience, stall_timeout)
        self._end = end
        self._awaited: Callable[[], str] = others_in_words
        #: When what is waited for now began: another beginning is a sign of life.
        self._begun = time.monotonic()
        self._over = threading.Event()
        self._ending = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="smp_tf start watch", daemon=True)

    def __enter__(self) -> StartWatch:
        if world_size(self._environment) > 1:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # A start that has come to its end is not ended any more.
        with self._ending:
            self._over.set()
        if self._thread.is_alive():
            self._thread.join()

    def await_others(self, awaited: Callable[[], str] = others_in_words) -> None:
        """Say what is waited for from now on.

        Args:
            awaited: Gives the words after "has waited 30 s in smp.init for".
        """
        self._awaited = awaited
        self._begun = time.monotonic()

    def await_those_missing(self) -> None:
        """Say that Horovod starts from now on."""
        self.await_others(lambda: others_in_words(missing_ranks(self._environment)))

    def _run(self) -> None:
        rank, told_of = world_rank(self._environment), -1.0
        while True:
            begun = self._begun
            until = self._stall_timeout if told_of == begun else self._patience
            if self._over.wait(max(0.0, begun + until - time.monotonic())):
                return
            if self._begun != begun:
                continue
            words = self._awaited()
            if told_of != begun:
                told_of = begun
                if not self._over.is_set():
                    tell(
                        f"smp_tf: rank {rank} has waited {time.monotonic() - begun:.0f} s in smp.init for {words}. The "
                        f"job goes on; it ends after stall_timeout = {self._stall_timeout:g} s."
                    )
                continue
            with self._ending:
                if self._over.is_set() or self._begun != begun:
                    continue
                tell(
                    f"smp_tf: rank {rank} gave up in smp.init after stall_timeout = {self._stall_timeout:g} s: it "
                    f"waited for {words}. Every rank must call smp.init; a rank that only needs longer until then gets "
                    f"it with a larger stall_timeout."
                )
                # The main thread is in Horovod, and does not come back from there.
                self._end(1)
                return


def missing_ranks(environment: Mapping[str, str] = os.environ) -> list[int] | None:
    """Ranks that have not begun to start Horovod, up to some; None where that cannot be known.

    Args:
        environment: where the launcher says how many ranks there are, and where it is.
    """
    if not {_ADDRESS, _PORT} <= environment.keys():
        return None
    deadline = time.monotonic() + _ASKING_TIME
    missing: list[int] = []
    for rank in range(world_size(environment)):
        if len(missing) == _MOST_NAMES or time.monotonic() > deadline:
            break
        asking = http.client.HTTPConnection(environment[_ADDRESS], int(environment[_PORT]), timeout=_ASKING_TIME)
        try:
            asking.request("GET", f"/global/{rank}")
            if asking.getresponse().status == http.client.NOT_FOUND:
                missing.append(rank)
        except (OSError, http.client.HTTPException):
            return None
        finally:
            asking.close()
    # When all have come, and are connected, the addresses are forgotten.
    return None if world_rank(environment) in missing else missing
