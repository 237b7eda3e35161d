"""The save that goes on while the training does: a thread of the job writes what was copied at the step's end.

    main thread     agree, copy ──▶ steps ──▶ steps ──▶ the next save, a restore, wait() or smp.shutdown: looks
    its thread                └───▶ write this rank's part ──▶ all are done ──▶ rank 0 commits and rotates

The threads of the ranks talk among themselves, in exchanges of their own subject, so that these never mix with those of
the training. No thread runs a collective of Horovod, or an op that another rank waits for. So the protocol is that of
any save, and the checkpoint is whole as soon as all ranks have written, not only at the next save.

One save at a time goes on in a job, so that a rank holds one copy of its values at most. A failure is told at once, and
raised by the next of the main thread's calls. The thread is no daemon: Python waits for it at its end.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from smp_tf.announce import announce, tell
from smp_tf.errors import CheckpointError, PeerError
from smp_tf.job import runtime
from smp_tf.job.at_shutdown import on_shutdown
from smp_tf.job.channel import ControlChannel
from smp_tf.job_state import JobState


class _Save:
    """One save that goes on.

    Args:
        name: of the checkpoint.
        write: writes it. All ranks come to the same end of it.
        rank: this rank.
    """

    def __init__(self, name: str, write: Callable[[], None], rank: int) -> None:
        self.name, self._write, self._rank = name, write, rank
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"smp_tf saves {name}")
        try:
            self._thread.start()
        except RuntimeError:
            # The user may have no more threads (ulimit -u). The other ranks count on this one.
            self._run()

    @property
    def goes_on(self) -> bool:
        """Returns whether it is not over yet."""
        return self._thread.is_alive()

    def wait(self) -> None:
        """Returns when it is over."""
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        try:
            self._write()
        except BaseException as error:
            self.failure = error
            # The end of another rank ends this one as well, and the transport says why.
            is_told = isinstance(error, PeerError) or (self._rank != 0 and isinstance(error, CheckpointError))
            if not is_told:
                # Where nobody asks any more, as at the end of a script without smp.shutdown, this is all that is said.
                tell(f"smp_tf: saving checkpoint {self.name!r} in the background has failed. {error}")
        # What it holds is freed.
        self._write = _nothing


_last: JobState[_Save | None] = JobState(lambda: None)
#: Made by the first save of a job.
_ends_with_the_job: JobState[None] = JobState(lambda: on_shutdown(finish))


def channel() -> ControlChannel:
    """Returns the exchanges of the ranks' writing threads."""
    running = runtime.current()
    return ControlChannel(
        running.topology.rank,
        running.transport,
        running.config.stall_timeout,
        running.topology.describe,
        in_background=True,
    )


def begin(name: str, write: Callable[[], None]) -> None:
    """Lets a save go on in a thread. No other one goes on: `finish` was called before.

    Args:
        name: of the checkpoint.
        write: writes it, with `channel` for what the ranks tell each other.
    """
    _ends_with_the_job()
    _last.put(_Save(name, write, runtime.current().topology.rank))


def finish(doing: str = "") -> None:
    """Waits for the save that goes on, if there is one.

    Args:
        doing: words for what waits for it, which are said once; "" where a wait was asked for.

    Raises:
        CheckpointError: it has failed, on all ranks. It is told once.
    """
    save = _last()
    if save is None:
        return
    if doing and save.goes_on:
        announce(
            f"{doing} waits until checkpoint {save.name!r} is written, since one save at a time goes on in the "
            f"background. Where this happens often, saves are closer together than the disk allows.",
            runtime.current().topology.rank,
            about="a save that waits for the one before",
        )
    save.wait()
    _last.put(None)
    if save.failure is not None:
        raise CheckpointError(
            f"{save.failure}\nCheckpoint {save.name!r} was being saved in the background, while the training went on. "
            f"Earlier checkpoints are unchanged."
        ) from save.failure


def _nothing() -> None: ...
