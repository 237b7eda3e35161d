"""Cases on ranks, groups, messages and agreements; they use TensorFlow only through Horovod."""

import random
from typing import Any

import numpy as np

import smp_tf as smp
from smp_tf.errors import AlreadyInitializedError, MessageError, RankMismatchError
from smp_tf.job import exchange, runtime


def numbers() -> dict[str, Any]:
    return {
        "world": [smp.rank(), smp.size(), smp.local_rank(), smp.local_size()],
        "mp": [smp.mp_rank(), smp.mp_size(), smp.get_mp_group()],
        "dp": [smp.dp_rank(), smp.dp_size(), smp.get_dp_group()],
        "rest": [smp.pp_rank(), smp.pp_size(), smp.tp_rank(), smp.tp_size(), smp.rdp_rank()],
    }


def reduce_over_groups() -> dict[str, Any]:
    import horovod.tensorflow as hvd
    import tensorflow as tf

    sums: dict[str, Any] = {}
    sets = runtime.current().process_sets
    for name, group in (("mp", sets.mp), ("dp", sets.dp)):
        sums[name] = None
        if group is not None:
            mine = tf.constant([10 ** smp.rank()], tf.int64)
            sums[name] = hvd.allreduce(mine, op=hvd.Sum, name=f"test.{name}", process_set=group)[0]
    return sums


def draw() -> dict[str, Any]:
    import tensorflow as tf

    return {
        "python": random.random(),
        "numpy": np.random.uniform(),
        "tensorflow": float(tf.random.uniform([])),
    }


def exchange_objects() -> dict[str, Any]:
    gathered = {kind.name: smp.allgather({"rank": smp.rank(), "kind": kind.name}, kind) for kind in smp.CommGroup}
    received = None
    if smp.rank() == 0:
        smp.broadcast(("to all", np.arange(3)))
        for other in range(1, smp.size()):
            smp.send(f"first to {other}", other)
            smp.send(b"\x00" * 5_000_000, other)
    else:
        words, array = smp.recv_from(0)
        received = [words, array, smp.recv_from(0), len(smp.recv_from(0))]
    answer = None
    if smp.mp_size() > 1:
        if smp.mp_rank() == 0:
            smp.send(f"replica {smp.dp_rank()}", 1, smp.RankType.MP_RANK)
        elif smp.mp_rank() == 1:
            answer = smp.recv_from(0, smp.RankType.MP_RANK)
    smp.barrier()
    smp.mp_barrier()
    smp.dp_barrier()
    return {"gathered": gathered, "received": received, "answer": answer}


def refused_messages() -> dict[str, Any]:
    wrong: Any = "MP_RANK"

    def refusal(call: Any) -> str:
        try:
            call()
        except (MessageError, TypeError, ValueError) as error:
            return f"{type(error).__name__}: {error}"
        return "nothing was refused"

    return {
        "unpicklable": refusal(lambda: smp.send(lambda: 0, (smp.rank() + 1) % smp.size())),
        "itself": refusal(lambda: smp.send(1, smp.rank())),
        "nobody": refusal(lambda: smp.recv_from(99)),
        "group": refusal(lambda: smp.barrier(wrong)),
        "rank type": refusal(lambda: smp.send(1, 0, wrong)),
    }


def agreements() -> dict[str, Any]:
    def verdict(call: Any) -> str:
        try:
            return str(call())
        except RankMismatchError as error:
            return str(error)

    odd = smp.rank() == smp.size() - 1
    return {
        "gathered": exchange.allgather_json([smp.rank()], name="numbers"),
        "told": exchange.broadcast_json({"from": smp.rank()}, 1, name="one speaks"),
        "some": exchange.allgather_json(smp.rank(), smp.get_mp_group(), name="a few"),
        "equal": verdict(lambda: exchange.agree("the shape", {"x": [2, 3]})),
        "differ": verdict(lambda: exchange.agree("the shape", {"x": [2, 4 if odd else 3]})),
        "astray": verdict(lambda: exchange.barrier(name="here" if not odd else "there")),
        "after": exchange.allgather_json(1, name="all is well again"),
    }


def too_late() -> dict[str, Any]:
    """The last rank comes only after the others have given it up."""
    words = "in time"
    if smp.rank() == smp.size() - 1:
        # Comes when the others say so, and by then is known to be too late.
        smp.recv_from(0)
        return {"words": "late"}
    try:
        exchange.barrier(name="a meeting", timeout=0.5)
    except RankMismatchError as error:
        words = str(error)
    if smp.rank() == 0:
        smp.send("they gave you up", smp.size() - 1)
    return {"words": words}


def initialise_again() -> dict[str, Any]:
    config = {"partitions": smp.mp_size(), "microbatches": 2}
    smp.init(config)
    try:
        smp.init({**config, "microbatches": 4})
        refused = "no"
    except AlreadyInitializedError as error:
        refused = str(error)
    smp.shutdown()
    seen: list[Any] = [smp.is_initialized()]
    smp.init({"partitions": 1, "seed": 5})
    seen += [smp.is_initialized(), smp.dp_size(), smp.allgather(smp.rank()), draw()]
    smp.shutdown()
    smp.init(config)
    return {"refused": refused, "seen": seen, "mp_size": smp.mp_size()}
