"""Threads that wait for steps of a program. So nobody else waits for these steps, and a step runs no Python."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from smp_tf.job.at_shutdown import on_leaving

if TYPE_CHECKING:
    from smp_tf.ops.transport import Transport


def wait_beside_steps(
    name: str, transport: Transport, wait: Callable[[], None], then: Callable[[], None] | None = None
) -> None:
    """Runs a function in a thread that ends before this rank leaves the job.

    Args:
        name: what the thread is for, such as "first steps".
        transport: whose steps the function waits for, by `await_step`.
        wait: the function. What it does after a step has come is finished; it waits for no further one when this rank
            leaves.
        then: runs when the thread has ended, as this rank leaves.
    """
    thread = threading.Thread(target=wait, name=f"smp_tf {name}", daemon=True)

    def end() -> None:
        transport.stop_awaiting()
        thread.join()
        if then is not None:
            then()

    thread.start()
    on_leaving(end)
