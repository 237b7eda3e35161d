"""Parts that ranks play with TensorFlow: cases run one after the other on a command."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.framework import ops as tf_ops

from smp_tf.ops.call import call
from smp_tf.ops.collective import come_through, come_to, within
from smp_tf.ops.graph_op import run_independently
from smp_tf.ops.send_recv import UNSENDABLE, begin_step, end_step, recv, send
from smp_tf.partition.tf_internals import call_options
from tests.ops.rank_process import PROGRAM, Rank

Case = Callable[[Rank], Any]


def exchange(rank: Rank, tensor: tf.Tensor, shape: Any = None, **names: int) -> tf.Tensor:
    """Sends a tensor to the other rank and receives its counterpart."""
    peer = 1 - rank.rank
    key = {"program": 2, "edge": 0, "microbatch": 0, "step": 0, **names}
    step = key.pop("step")

    # A function of its own: the transport must overlap both, whatever their size.
    @tf.function
    def both() -> tf.Tensor:
        send(tensor, step, dest=peer, label="there", **key)
        return recv(step, tensor.dtype, shape, src=peer, label="back", **key)

    return both()


def every_dtype() -> set[tf.DType]:
    """The types that this TensorFlow has."""
    rooms = (tf.dtypes, tf.dtypes.experimental)
    return {found for room in rooms for name in dir(room) if isinstance(found := getattr(room, name), tf.DType)}


def all_bits(dtype: tf.DType) -> np.ndarray:
    """Elements with every pattern of bits in their bytes; of those narrower than a byte, where the first bit is 0."""
    digits = re.search(r"\d+", dtype.name)
    bits = int(digits[0]) if digits else 2
    patterns = 256 if bits >= 8 else 1 << (bits - 1)
    return (np.arange(4096) % patterns).astype(np.uint8).view(dtype.as_numpy_dtype)


def dtypes(rank: Rank) -> Any:
    sent, wrong = [], []
    for i, dtype in enumerate(sorted(every_dtype() - UNSENDABLE, key=lambda d: d.name)):
        values = all_bits(dtype)
        # Of another length on each rank, so that each has the other's.
        got = exchange(rank, tf.constant(values[rank.rank :]), [None], edge=i)
        sent.append(dtype.name)
        if got.dtype != dtype or got.numpy().tobytes() != values[1 - rank.rank :].tobytes():
            wrong.append(dtype.name)
    return {"sent": sent, "wrong": wrong}


def shapes(rank: Rank) -> Any:
    result = []
    for i, shape in enumerate([[], [0], [3, 0, 2], [1], [7, 5], [1] * 12, [300, 1000]]):
        value = tf.fill(shape, float(rank.rank + 1))
        got = exchange(rank, value, [None] * len(shape), program=3, edge=i)
        same = got.shape == shape and bool(tf.reduce_all(got == 2.0 - rank.rank))
        result.append([shape, same])
    return result


def dynamic_shape(rank: Rank) -> Any:
    """One function, another batch size every time; the static shape is the one asked for."""
    peer = 1 - rank.rank
    static: list[str] = []

    @tf.function(input_signature=[tf.TensorSpec([None, 4])])
    def step_fn(x: tf.Tensor) -> tf.Tensor:
        step = begin_step([], 4)
        names = {"program": 4, "edge": 0, "microbatch": 0}
        send(x, step, dest=peer, label="x", **names)
        y = recv(step, tf.float32, [None, 4], src=peer, label="x", **names)
        static.append(str(y.shape))
        end_step(4)
        return tf.concat([step[None], tf.shape(y, tf.int64)], 0)

    got = [step_fn(tf.zeros([n, 4])).numpy().tolist() for n in (1, 5, 2)]
    return {"got": got, "static": static}


def many(rank: Rank) -> Any:
    """Hundreds each way in one function, in an order of each rank's own."""
    peer = 1 - rank.rank
    count = 150

    @tf.function
    def step_fn() -> tf.Tensor:
        received: dict[int, tf.Tensor] = {}
        order = [(kind, i) for kind in "sr" for i in range(count)]
        random.Random(rank.rank).shuffle(order)
        for kind, i in order:
            names = {"program": 5, "edge": i // 10, "microbatch": i % 10, "label": f"number {i}"}
            if kind == "s":
                value = tf.fill([1 + (i % 3) * 2000], i + 10000 * rank.rank)
                send(value, 0, dest=peer, **names)
            else:
                received[i] = recv(0, tf.int32, [None], src=peer, **names)
        return tf.stack([received[i][-1] for i in range(count)])

    got = step_fn().numpy()
    return bool(np.array_equal(got, np.arange(count) + 10000 * peer))


def thousands(rank: Rank) -> Any:
    """Thousands each way at once, in an order of each rank's own: rank 1 begins when rank 0 waits for all of them."""
    peer, edges, steps = 1 - rank.rank, 100, 20
    shuffled = random.Random(rank.rank).sample
    at_edge = [(kind, edge) for kind in "sr" for edge in range(edges)]
    go = {"program": 13, "edge": 0, "microbatch": 0, "label": "go"}

    # Made once for all steps, which takes most of the time.
    @tf.function(autograph=False, experimental_attributes={"_noinline": True})
    def of_a_step(step: tf.Tensor) -> list[tf.Tensor]:
        received: dict[int, tf.Tensor] = {}
        for kind, edge in shuffled(at_edge, len(at_edge)):
            names = {"program": 5, "edge": edge, "microbatch": edge % 3, "label": f"number {edge}"}
            if kind == "s":
                value = tf.cast(step, tf.int32) * edges + edge + 10000 * rank.rank
                send(tf.fill([1 + (edge % 3) * 2000], value), step, dest=peer, **names)
            else:
                received[edge] = recv(step, tf.int32, [None], src=peer, **names)[-1]
        return [received[edge] for edge in range(edges)]

    @tf.function(autograph=False)
    def all_at_once() -> tf.Tensor:
        begin = [recv(0, tf.bool, [], src=0, **go)] if rank.rank == 1 else []
        received: dict[int, tf.Tensor] = {}
        with tf.control_dependencies(begin):
            for step in shuffled(range(steps), steps):
                received[step] = tf.stack(of_a_step(tf.constant(step, tf.int64)))
        # Not one step after the other.
        for op in tf_ops.get_default_graph().get_operations():
            if "PartitionedCall" in op.type:
                run_independently(op)
        return tf.concat([received[step] for step in range(steps)], 0)

    with ThreadPoolExecutor(1) as thread:
        got = thread.submit(lambda: all_at_once().numpy())
        if rank.rank == 0:
            while _pending(rank) < edges * steps and not got.done():
                time.sleep(0.02)  # nothing tells when
            send(tf.constant(True), 0, dest=1, **go)
        return bool(np.array_equal(got.result(), np.arange(edges * steps) + 10000 * peer))


def mismatch(rank: Rank) -> Any:
    """The receiver's error names both sides; the sender's rank goes on."""
    messages = []
    cases = [("dtype", tf.float64, [2]), ("shape", tf.float32, [3]), ("rank", tf.float32, [2, 1])]
    for i, (_, dtype, shape) in enumerate(cases):
        names = {"program": 6, "edge": i, "microbatch": 4}
        if rank.rank == 0:
            send(tf.ones([2]), 8, dest=1, label="activation", **names)
            continue
        try:
            recv(8, dtype, shape, src=0, label="expected", **names)
        except tf.errors.InvalidArgumentError as error:
            messages.append(error.message)
    return messages


def cancelled(rank: Rank) -> Any:
    """An op that fails takes the receive beside it along instead of leaving it waiting."""
    peer = 1 - rank.rank

    @tf.function
    def step_fn(x: tf.Tensor) -> tf.Tensor:
        y = recv(0, tf.float32, [], src=peer, program=7, edge=0, microbatch=0, label="never sent")
        return y + tf.debugging.check_numerics(x, "not a number")

    try:
        step_fn(tf.constant(float("nan")))
    except tf.errors.OpError as error:
        return {"error": type(error).__name__, "pending": _pending(rank)}
    return None


def failing_call(rank: Rank) -> Any:
    """A function that fails is what a step reports, not the receive beside its call that was cancelled by it."""
    peer = 1 - rank.rank

    def body(x: tf.Tensor) -> list[tf.Tensor]:
        return [tf.debugging.check_numerics(x, "not a number")]

    function = tf.function(body, experimental_attributes={"_noinline": True})
    concrete = function.get_concrete_function(tf.TensorSpec([300]))

    @tf.function
    def step_fn(step: tf.Tensor, x: tf.Tensor) -> list[tf.Tensor]:
        y = recv(step, tf.float32, [], src=peer, program=17, edge=0, microbatch=0, label="never sent")
        return [y, call(concrete, [x], call_options(), is_first=True).outputs[0]]

    found = []
    for step in range(200):
        try:
            step_fn(tf.constant(step, tf.int64), tf.fill([300], float("nan")))
        except tf.errors.OpError as error:
            found.append(type(error).__name__)
    return {"errors": sorted(set(found)), "count": len(found), "pending": _pending(rank)}


def _pending(rank: Rank) -> int:
    return int(rank.transport.stats()["pending_operations"])


def left_send(rank: Rank) -> Any:
    """A large send that nobody takes ends with its cancelled step."""
    if rank.rank == 1:
        return None

    @tf.function
    def step_fn(x: tf.Tensor) -> tf.Tensor:
        send(tf.zeros([1 << 20]), 0, dest=1, program=8, edge=0, microbatch=0, label="large")
        return tf.debugging.check_numerics(x, "not a number")

    try:
        step_fn(tf.constant(float("nan")))
    except tf.errors.OpError as error:
        return type(error).__name__
    return None


def twice(rank: Rank) -> Any:
    """Two receives under one key: the second is refused."""
    peer = 1 - rank.rank

    @tf.function
    def step_fn() -> tf.Tensor:
        names = {"program": 9, "edge": 0, "microbatch": 0, "label": "doubled"}
        return recv(0, tf.int32, [], src=peer, **names) + recv(0, tf.int32, [], src=peer, **names)

    try:
        step_fn()
    except tf.errors.InvalidArgumentError as error:
        return error.message
    return None


def fences(rank: Rank) -> Any:
    """Steps count per program, and come in order behind the variables they are given."""
    variable = tf.Variable(0, dtype=tf.int64)

    @tf.function
    def step_fn() -> tf.Tensor:
        step = begin_step([variable.handle], 10)
        with tf.control_dependencies([step]):
            variable.assign_add(step)
        end_step(10)
        return step

    steps = [int(step_fn()) for _ in range(4)]
    return {"steps": steps, "sum": int(variable), "other": int(begin_step([], 11))}


def collectives(rank: Rank) -> Any:
    """What this rank says that it is in: before, within and behind collectives, in a function and eagerly."""
    said: list[list[Any]] = []

    def look(where: str) -> None:
        status = rank.transport.ask(rank.rank)
        assert status is not None
        assert 0.0 <= status["collective_seconds"] < (60.0 if status["collectives"] else 1e-9)
        said.append([where, status["collective"], len(status["collectives"]), status["more_collectives"]])

    def looked(where: str, after: list[Any]) -> tf.Tensor:
        with tf.control_dependencies(after):
            return tf.numpy_function(lambda: (look(where), np.int32(1))[1], [], tf.int32)

    @tf.function
    def step_fn() -> None:
        first = come_to("first", [looked("before", [])])
        second = come_to("second", [looked("in the first", [first])])
        both = looked("in both", [second])
        come_through("first", first, [both])
        come_through("second", second, [both])

    step_fn()
    look("behind")
    with contextlib.suppress(ZeroDivisionError), within("eager"):
        look("eagerly")
        raise ZeroDivisionError
    look("behind an error")
    with contextlib.ExitStack() as stack:
        for number in range(40):
            stack.enter_context(within(f"number {number} of them, and {'a name as long as they come ' * 9}"))
        look("many")

    @tf.function
    def of_the_script(divisor: tf.Tensor) -> None:
        come = come_to("of the script", [])
        with tf.control_dependencies([come]):
            result = tf.constant(6) // divisor
        come_through("of the script", come, [result])

    with contextlib.suppress(tf.errors.InvalidArgumentError):
        of_the_script(tf.constant(0))
    look("behind a function that failed")
    of_the_script(tf.constant(2))
    look("behind the same, which did not fail")
    never_left = within("of a step that failed")
    never_left.__enter__()
    begin_step([], 13)
    end_step(13)
    look("in the next step")
    return said


def large(rank: Rank) -> Any:
    """More than 2 GiB in one tensor."""
    count = (1 << 31) + 4097
    names = {"program": 12, "edge": 0, "microbatch": 0, "label": "large"}
    if rank.rank == 0:
        send(tf.ones([count], tf.uint8), 0, dest=1, **names)
        return None
    got = recv(0, tf.uint8, [None], src=0, **names)
    return {"size": int(tf.size(got, tf.int64)), "ones": int(np.count_nonzero(got.numpy()))}


def kept_tensor(rank: Rank) -> Any:
    """A large tensor that lies where it was, and whether some of its memory is in huge pages now."""
    names = {"program": 18, "edge": 0, "microbatch": 0, "label": "kept"}
    tensor = _kept.setdefault("tensor", tf.fill([2 << 20], float(rank.rank + 1)))
    alike = True
    for step in itertools.islice(_steps, 20):
        with ThreadPoolExecutor(1) as sender:
            sent = sender.submit(send, tensor, step, dest=1 - rank.rank, **names)
            alike &= bool(tf.reduce_all(recv(step, tf.float32, [None], src=1 - rank.rank, **names) == 2.0 - rank.rank))
            sent.result()
    alike &= bool(tf.reduce_all(tensor == rank.rank + 1.0))
    return {"alike": alike, "huge": rank.transport.stats()["huge_pages"] > 0}


#: Of `kept_tensor`, from one call to the next.
_kept: dict[str, tf.Tensor] = {}
_steps = itertools.count()


CASES: dict[str, Case] = {
    case.__name__: case
    for case in (
        cancelled,
        failing_call,
        collectives,
        dtypes,
        dynamic_shape,
        fences,
        kept_tensor,
        large,
        left_send,
        many,
        mismatch,
        shapes,
        thousands,
        twice,
    )
}


def tf_cases(rank: Rank) -> None:
    """Runs the cases it is told to, until there are no more."""
    rank.tell("ready")
    while (name := rank.ask()) is not None:
        rank.tell("done", case=name, result=CASES[name](rank))
    rank.transport.goodbye()
    rank.transport.close()


def tf_wait_in_op(rank: Rank) -> None:
    """The main thread sits in a function that waits for rank 1."""

    @tf.function
    def step_fn() -> tf.Tensor:
        step = begin_step([], PROGRAM)
        names = {"program": PROGRAM, "edge": 3, "microbatch": 2, "label": "activation"}
        with tf.control_dependencies([tf.py_function(lambda: rank.tell("ready"), [], [])]):
            step = tf.identity(step)
        return recv(step, tf.float32, [], src=1, **names)

    try:
        step_fn()
    except tf.errors.OpError as error:
        rank.tell("error", type=type(error).__name__, message=error.message)
        os._exit(9) if rank.ask() == "exit" else None
    rank.ask()


PARTS = {"tf_cases": tf_cases, "tf_wait_in_op": tf_wait_in_op}
