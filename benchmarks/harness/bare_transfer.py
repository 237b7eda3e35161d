"""Messages between two processes without TensorFlow: UCX alone, the transport's C interface, UCX's own benchmark."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from pathlib import Path
from types import TracebackType

from harness.fleet import HERE, TrainerError
from smp_tf.ops import build

SOURCE = HERE.parent / "tests" / "ops" / "cc" / "bare_transfer.cc"
#: What it can do: see `bare_transfer.cc`.
WAYS = ("polling", "sleeping", "transport")
#: As the transport opens UCX on one host (`ops/cc/transport/ucx_worker.cc`).
UCX = {
    "UCX_TLS": "posix,cma,self",
    "UCX_POSIX_ERROR_HANDLING": "y",
    "UCX_SYSV_ERROR_HANDLING": "y",
    "UCX_LOG_LEVEL": "error",
}


class BareTransfer:
    """Two processes of `tests/ops/cc/bare_transfer.cc`, compiled here; a context manager that ends them.

    Args:
        folder: folder that takes the compiled program.
    """

    def __init__(self, folder: Path) -> None:
        program = build.build_target(build.program_target(SOURCE, ["ucx_worker.cc"]), folder, verbose=False)
        self._process = subprocess.Popen(
            [str(program)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={"UCX_LOG_LEVEL": "error", **os.environ},
        )

    def __enter__(self) -> BareTransfer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def turn(self, way: str, size: int, count: int, gap: float) -> str:
        """Exchanges messages.

        Args:
            way: one of `WAYS`.
            size: bytes of a message.
            count: number of exchanges.
            gap: seconds of rest before each.

        Returns:
            Nanoseconds of each message to the second process, "forward", and of each answer, "back", as JSON.

        Raises:
            TrainerError: a process ended.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{way} {size} {count} {round(1e6 * gap)}\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise TrainerError(f"bare_transfer ended while it was to exchange {count} messages of {size} bytes ({way})")
        return line


def perftest() -> Path | None:
    """Returns the path of the installed UCX's `ucx_perftest`, or None where it has none."""
    found = build.ucx_folder() / "bin" / "ucx_perftest"
    return found if found.exists() else None


def perftest_latency(program: Path, size: int, count: int) -> float:
    """Returns the median nanoseconds of a message one way: half of a round trip of `ucx_perftest`.

    Both of its processes poll and send messages without a pause. They handle errors of peers as the transport does.

    Args:
        program: path of `ucx_perftest`.
        size: bytes of a message.
        count: number of messages.

    Raises:
        TrainerError: it failed. The message holds what it printed.
    """
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = str(unused.getsockname()[1])
    options = ["-p", port, "-t", "ucp_am_lat", "-e", "-f", "-v", "-n", str(count), "-w", "3", "-s", str(size)]
    environment = {**UCX, "LD_LIBRARY_PATH": str(program.parent.parent / "lib"), **os.environ}
    command = [str(program), *options]
    deadline = time.monotonic() + 30
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment)
    try:
        while True:
            client = subprocess.run(
                [*command, "127.0.0.1"], capture_output=True, text=True, env=environment, timeout=120, check=False
            )
            if client.returncode == 0:
                break
            # The server does not listen yet. It does not say when it does.
            if server.poll() is not None or time.monotonic() > deadline:
                raise TrainerError(f"{program} failed: {client.stdout}{client.stderr}")
    finally:
        server.kill()
        server.wait()
    names, values = client.stdout.strip().splitlines()[-2:]
    told = dict(zip(names.split(","), values.split(","), strict=True))
    return 1e3 * float(told["50.0_percentile_lat"])
