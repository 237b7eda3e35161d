"""The process that ranks are forked from: it has imported TensorFlow, for which each would need seconds, and smp_tf.

    pytest ── warm process ◀── socket ── rank_main.py, as horovodrun started it
                    └── fork ──▶ the rank: the script, environment, folder and streams of that rank_main.py

The rank's end is that of its `rank_main.py`, which hands on the signals that it is sent and, where it is killed itself,
takes the rank with it. So a rank is as any process, but that horovodrun is not among its ancestors, that it looks for
garbage seldom, and that new memory comes in pages of 2 MB where the system allows it: what looks at any of these (a
rank notices that its launcher was killed), or at how TensorFlow is imported, has to start cold.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Mapping
from typing import Any

import numpy as np

from smp_tf.start import import_watch
from smp_tf.start.environment import prepare
from tests import quick_import
from tests.distributed import rank_main

#: A request is one message; an environment has some kilobytes.
MOST_BYTES = 1 << 17
#: New memory in pages of 2 MB, of glibc 2.35 and later, where the system gives them to who asks ("madvise"): virtual
#: machines take long to find each page, and ResNet50 takes a million small ones.
HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
#: Read after the import, or the same for all.
_READ_LATE = ("TF_NUM_INTRAOP_THREADS", "OMP_NUM_THREADS")


class WarmProcess:
    """The warm process of this test session, started when the first rank is."""

    def __init__(self) -> None:
        self._name = f"smp-tf-tests-{uuid.uuid4().hex}"
        self._process: subprocess.Popen[bytes] | None = None

    def environment(self, of_rank: Mapping[str, str]) -> dict[str, str]:
        """What a rank's environment needs to be forked from it.

        Args:
            of_rank: all that the rank is given.
        """
        if self._process is None:
            # An abstract address is no file; who connects before the import is done waits for it.
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
                listener.bind(f"\0{self._name}")
                listener.listen(64)
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "tests.distributed.warm_process", str(listener.fileno())],
                    env={**HUGE_PAGES, **of_rank, "OMP_NUM_THREADS": "1"},
                    stdin=subprocess.PIPE,
                    pass_fds=[listener.fileno()],
                    start_new_session=True,
                )
        return {rank_main.WARM: self._name}


def may_be_forked(environment: Mapping[str, str]) -> bool:
    """Whether a rank with these variables of its own imports TensorFlow as all others do."""
    return all(name in _READ_LATE or not name.startswith(("TF_", "PYTHON", "GLIBC_")) for name in environment)


class _Server:
    """Forks ranks until its standard input ends, which the test session holds.

    Args:
        listener: where ranks ask to be forked.
    """

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._selector.register(sys.stdin.fileno(), selectors.EVENT_READ)
        # By the process id of the rank.
        self._connections: dict[int, socket.socket] = {}

    def next_rank(self) -> dict[str, Any] | None:
        """In each rank: what it was asked for, with "streams", its descriptors. In the server: None, at its end."""
        while True:
            for key, _ in self._selector.select():
                if key.fd == sys.stdin.fileno():
                    for pid in self._connections:
                        os.kill(pid, signal.SIGKILL)
                    return None
                if key.fileobj is self._listener:
                    asked = self._fork(self._listener.accept()[0])
                    if asked is not None:
                        return asked
                elif key.data in self._connections:
                    self._handle(key)

    def _fork(self, connection: socket.socket) -> dict[str, Any] | None:
        message, streams, _, _ = socket.recv_fds(connection, MOST_BYTES, 3)
        if not message:
            connection.close()
            return None
        pid = os.fork()
        if pid == 0:
            for key in list(self._selector.get_map().values()):
                if isinstance(key.fileobj, socket.socket):
                    key.fileobj.close()
                elif key.data is not None:
                    os.close(key.fd)
            self._selector.close()
            connection.close()
            return {**json.loads(message), "streams": streams}
        for stream in streams:
            os.close(stream)
        # Who asked may have been killed meanwhile; `_handle` then ends the rank.
        with contextlib.suppress(BrokenPipeError):
            connection.send(str(pid).encode())
        self._connections[pid] = connection
        self._selector.register(connection, selectors.EVENT_READ, pid)
        self._selector.register(os.pidfd_open(pid), selectors.EVENT_READ, pid)
        return None

    def _handle(self, key: selectors.SelectorKey) -> None:
        """Takes the end of a rank, or of the `rank_main.py` that it stands for."""
        pid, connection = key.data, self._connections[key.data]
        self._selector.unregister(key.fileobj)
        if key.fileobj is connection:
            os.kill(pid, signal.SIGKILL)
            return
        os.close(key.fd)
        status = os.waitpid(pid, 0)[1]
        if connection in {other.fileobj for other in self._selector.get_map().values()}:
            self._selector.unregister(connection)
            with contextlib.suppress(BrokenPipeError):
                connection.send(str(status).encode())
        connection.close()
        del self._connections[pid]


def _become(asked: Mapping[str, Any]) -> None:
    """Takes the place of the process that asked."""
    for wanted, stream in enumerate(asked["streams"]):
        os.dup2(stream, wanted)
        os.close(stream)
    os.environ.clear()
    os.environ.update(asked["environment"])
    os.chdir(asked["folder"])
    sys.argv = asked["arguments"]
    # What the import of smp_tf does, of whose variables this process has taken its own away.
    prepare()
    import_watch.start()
    tempfile.tempdir = None
    np.random.seed()


def _import_what_ranks_need() -> None:
    quick_import.install()
    import horovod.tensorflow  # noqa: F401
    import networkx  # noqa: F401
    import rich.console
    import rich.progress
    import rich.table  # noqa: F401
    import tensorflow as tf

    import smp_tf.planning.first_steps

    # Keras, and what smp_tf is made of, is imported when it is first asked for.
    tf.keras.layers.Layer  # noqa: B018
    for name in smp_tf.__all__:
        getattr(smp_tf, name)
    # Ranks share the memory of what nobody looks for garbage among; it is not theirs to free.
    gc.freeze()
    quick_import.look_for_garbage_seldom()


def main() -> None:
    """Serves until the test session ends; in each rank, runs its script."""
    _import_what_ranks_need()
    asked = _Server(socket.socket(fileno=int(sys.argv[1]))).next_rank()
    if asked is not None:
        _become(asked)
        rank_main.run()


if __name__ == "__main__":
    main()
