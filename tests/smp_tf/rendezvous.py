"""The store of a launcher, and ranks that come to a start, which are none."""

from __future__ import annotations

import http.server
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from smp_tf.start import arrivals


class Rendezvous:
    """What `horovodrun` keeps for its ranks."""

    def __init__(self) -> None:
        kept = self.kept = {}  # type: dict[str, bytes]

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(200 if self.path in kept else 404)
                self.end_headers()
                self.wfile.write(kept.get(self.path, b""))

            def do_PUT(self) -> None:
                kept[self.path] = self.rfile.read(int(self.headers["Content-Length"]))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    def environment(self, rank: int, size: int, local_rank: int, local_size: int) -> dict[str, str]:
        """The variables of a rank."""
        return {
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
            "HOROVOD_GLOO_RENDEZVOUS_PORT": str(self._server.server_port),
            "HOROVOD_RANK": str(rank),
            "HOROVOD_SIZE": str(size),
            "HOROVOD_LOCAL_RANK": str(local_rank),
            "HOROVOD_LOCAL_SIZE": str(local_size),
        }

    def close(self) -> None:
        """Ends it."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@contextmanager
def running() -> Iterator[Rendezvous]:
    """A store that answers within `with`."""
    launcher = Rendezvous()
    try:
        yield launcher
    finally:
        launcher.close()


def arrive(environment: dict[str, str], **process: object) -> arrivals.Arrivals:
    """A rank that comes to its start: as this process, but for what is said of it."""
    said = {**arrivals.this_process(), **process}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(arrivals, "this_process", lambda: said)
        arrived = arrivals.Arrivals(environment)
        arrived.enter()
    return arrived


def ended_process() -> int:
    """The number of a process that has ended."""
    ended = subprocess.Popen([sys.executable, "-c", "pass"])
    ended.wait()
    return ended.pid
