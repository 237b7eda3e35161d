"""One of two processes that hand tensors to each other inside TensorFlow functions, when they are told to.

    python hand_over_rank.py GROUP SOCKET

`hand_over.py` starts them: as GROUP "smp_tf" and "horovod" with horovodrun, and as "mpi4py" with an MPI launcher. It
tells them over a socket what to do. An exchange is one execution of a function on each rank:

    rank 0:  make the tensor ─ mark "ready" ─ give            take ─ mark "started"
    rank 1:                           take ─ mark "started" ─ mark "ready" ─ give

"started" is an op that needs the tensor and nothing else. "ready" is an op between the one that makes the tensor and
the one that gives it. Both only read the clock, which processes of one host share (`ops/mark.py`).
"""

from __future__ import annotations

import functools
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np
from harness.answers import answer

#: Number of the program. smp_tf runs no steps of its own here.
PROGRAM = 1
LABEL = "hand_over"
FORTH, BACK = 0, 1


class Way(ABC):
    """How a tensor gets from one rank to the other.

    Args:
        rank: this process, 0 or 1.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank

    @abstractmethod
    def give(self, tensor: Any, step: Any, edge: int) -> Any:
        """Does what `Way.give` says."""

    @abstractmethod
    def take(self, like: Any, step: Any, edge: int) -> Any:
        """Does what `Way.take` says."""


class SmpTf(Way):
    """The way by the ops that carry tensors between the stages of a pipeline."""

    def give(self, tensor: Any, step: Any, edge: int) -> Any:
        """Does what `Way.give` says."""
        from smp_tf.ops import send_recv

        return send_recv.send(tensor, step, dest=1 - self.rank, program=PROGRAM, edge=edge, microbatch=0, label=LABEL)

    def take(self, like: Any, step: Any, edge: int) -> Any:
        """Does what `Way.take` says."""
        from smp_tf.ops import send_recv

        source = 1 - self.rank
        return send_recv.recv(
            step, like.dtype, like.shape, src=source, program=PROGRAM, edge=edge, microbatch=0, label=LABEL
        )


class Broadcast(Way):
    """The way by `hvd.broadcast` over the process set of the two ranks."""

    def give(self, tensor: Any, step: Any, edge: int) -> Any:
        """Does what `Way.give` says."""
        return self._broadcast(tensor, self.rank, edge)

    def take(self, like: Any, step: Any, edge: int) -> Any:
        """Does what `Way.take` says."""
        return self._broadcast(like, 1 - self.rank, edge)

    def _broadcast(self, tensor: Any, root: int, edge: int) -> Any:
        import horovod.tensorflow as hvd

        from smp_tf.job import runtime

        name = f"hand_over_{tensor.shape[0]}_{edge}"
        return hvd.broadcast(tensor, root, name=name, process_set=runtime.current().process_sets.mp)


class Mpi(Way):
    """The way by `Send` and `Recv` of mpi4py in Python functions that TensorFlow calls."""

    def give(self, tensor: Any, step: Any, edge: int) -> Any:
        """Does what `Way.give` says."""
        import tensorflow as tf
        from mpi4py import MPI

        def send(value: Any) -> Any:
            MPI.COMM_WORLD.Send(value, 1 - self.rank, edge)
            return np.int32(0)

        return tf.numpy_function(send, [tensor], tf.int32).op

    def take(self, like: Any, step: Any, edge: int) -> Any:
        """Does what `Way.take` says."""
        import tensorflow as tf
        from mpi4py import MPI

        def receive(_: Any) -> Any:
            value = np.empty(like.shape, like.dtype.as_numpy_dtype)
            MPI.COMM_WORLD.Recv(value, 1 - self.rank, edge)
            return value

        taken = tf.numpy_function(receive, [step], like.dtype)
        taken.set_shape(like.shape)
        return taken


WAYS: dict[str, type[Way]] = {"smp_tf": SmpTf, "horovod": Broadcast, "mpi4py": Mpi}


class Hands:
    """What this rank does when it is told to.

    Args:
        rank: this process, 0 or 1.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank

    @functools.cache  # noqa: B019 - it lives as long as the process
    def _exchange(self, way: str, elements: int) -> Callable[[Any], Any]:
        """Returns this rank's function. It takes zeros and the step's number, and returns an element of what came."""
        import tensorflow as tf

        from smp_tf.ops.mark import mark
        from smp_tf.ops.send_recv import begin_step, end_step

        by = WAYS[way](self.rank)

        def noted(task: str, step: Any, after: Any) -> Any:
            with tf.control_dependencies([after]):
                return mark(task, step, program=PROGRAM, ends=False)

        @tf.function(input_signature=[tf.TensorSpec([elements], tf.float32)])
        def exchange(zeros: Any) -> Any:
            step = begin_step([], PROGRAM)
            if self.rank == 0:
                made = zeros + tf.cast(step, tf.float32)
                with tf.control_dependencies([noted("ready", step, made.op)]):
                    given = by.give(made, step, FORTH)
                # mpi4py's waits hold a thread and Python. So there the order of both is given.
                with tf.control_dependencies([given] if way == "mpi4py" else []):
                    came = by.take(zeros, step, BACK)
                started = noted("started", step, came.op)
            else:
                came = by.take(zeros, step, FORTH)
                started = noted("started", step, came.op)
                with tf.control_dependencies([noted("ready", step, started)]):
                    given = by.give(came, step, BACK)
            with tf.control_dependencies([given, started]):
                end_step(PROGRAM)
                # Nothing but "started" needs what came as soon as it comes.
                last = came[-1]
            return (last, given) if tf.is_tensor(given) else (last,)

        return exchange

    def turn(self, way: str, size: int, count: int, gap: float) -> dict[str, list[int]]:
        """Exchanges tensors.

        Args:
            way: one of `WAYS`.
            size: bytes of a tensor.
            count: number of exchanges.
            gap: seconds of rest before each exchange, in which the other rank reaches its receive.

        Returns:
            Times of each exchange, in nanoseconds of the host's clock. "ready" is when this rank's tensor was ready,
            and "started" when the op that needs the other's tensor started. smp_tf also has "given", when the transport
            was given the tensor, and "there", when the other's tensor was in its place.
        """
        import tensorflow as tf

        from smp_tf.ops import recorder

        exchange, zeros = self._exchange(way, size // 4), tf.zeros([size // 4])
        recorder.start()
        recorder.count_program(PROGRAM)
        for _ in range(count):
            if self.rank == 0:
                time.sleep(gap)
            last = float(exchange(zeros)[0])
        points, dropped = recorder.stop()
        if dropped or not points:
            raise RuntimeError(f"the recording has {len(points)} points and lacks {dropped}")
        if self.rank == 0 and last != float(points[-1].step):
            raise RuntimeError(f"step {points[-1].step} brought back {last}")
        return moments(points)


def moments(points: Any) -> dict[str, list[int]]:
    """Returns the times of a recording by what happened."""
    from smp_tf.ops.recorder import Event

    found: dict[str, list[int]] = {"ready": [], "started": [], "given": [], "there": []}
    for point in points:
        if point.event == Event.TASK:
            found[point.task].append(point.time_ns)
        elif point.event == Event.SEND and not point.is_end:
            found["given"].append(point.time_ns)
        elif point.event == Event.RECV and point.is_end:
            found["there"].append(point.time_ns)
    return {what: times for what, times in found.items() if times}


def main() -> None:
    group, path = sys.argv[1:]
    if group == "mpi4py":
        from mpi4py import MPI

        rank = MPI.COMM_WORLD.Get_rank()
    else:
        import smp_tf as smp

        smp.init({"partitions": 2})
        rank = smp.rank()
    answer(Hands(rank), rank, path)


if __name__ == "__main__":
    main()
