"""The table from a kind of task to the emitter that writes its operations into the graph.

A new kind that ranks run needs an emitter here, besides its row in `programs/kinds.py`.
"""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf

from smp_tf.ops import send_recv
from smp_tf.pipeline.programs.kinds import APPLY, CHECK, JOIN, LOG, REDUCE, SUM, TELL, WEIGH
from smp_tf.pipeline.run.emission import Emission
from smp_tf.pipeline.run.marks import begin_reduce, begin_task, end_reduce, end_task
from smp_tf.pipeline.task import Kind, Task

Emitter = Callable[[Emission, Task], None]


def emit_compute(emission: Emission, task: Task) -> None:
    """Calls the function of a task's segment, if it has one, after the compute task before it."""
    assert task.microbatch is not None
    function = emission.program.function_of(task)
    if function is None:
        return
    microbatch = task.microbatch
    inputs = [emission.value_of(t, microbatch) for t in function.takes.arguments]
    inputs += [emission.remote[v] for v in function.takes.remote_values]
    nodes = emission.program.split.graph.nodes
    inputs += [emission.whole_value(nodes[number].reads[0]) for number in function.takes.uses]
    if function.takes.has_replica_sums:
        inputs += emission.for_replica_sums(microbatch)
    if function.takes.is_weighted:
        inputs.append(tf.cast(emission.weights[microbatch], tf.float64))
    if function.early is not None:
        inputs.append(emission.step)
    number = emission.program.number
    with tf.name_scope(str(task)):
        begun = begin_task(task, emission.step, number, [*emission.after(), *emission.not_computed(inputs)])
        with tf.control_dependencies([begun]):
            call = emission.calls.add(function, inputs)
        emission.last_compute = end_task(task, emission.step, number, [call])
    emission.called.add(call.name)
    emission.all_ops.append(emission.last_compute)
    for tensor, result in zip(function.outputs, call.outputs, strict=False):
        emission.set_shape(result, tensor)
        emission.values[tensor, microbatch] = result
        if tensor in emission.program.sums.tensors - emission.program.sums.accumulators.keys():
            emission.accumulate(tensor, microbatch, result)
    if function.early is not None:
        # It comes after the task's begin. Otherwise a pass that puts ops together would see nothing between what the
        # task waits for and what waits for this. It would make one op of both, and that would wait for itself.
        with tf.control_dependencies([begun]):
            emission.accumulated.update(function.early.take(emission.program.split.graph, emission.step))


def emit_send(emission: Emission, task: Task) -> None:
    """Sends a tensor when its maker has ended."""
    assert task.edge is not None
    transfer = emission.transfers[task.edge]
    # Its maker must have ended, also by the clock.
    after = emission.after()
    if transfer.is_sum:
        assert transfer.tensor is not None
        value = emission.sum_of(transfer.tensor)
    elif transfer.tensor is not None:
        value = emission.values[transfer.tensor, task.microbatch]
    else:
        assert transfer.variable is not None
        if transfer.variable in emission.program.split.gathered:
            value = emission.whole_value(transfer.variable)
        else:
            with tf.control_dependencies([emission.step.op]):
                value = emission.program.variables[transfer.variable].read_value()
        after = [emission.step.op]
    with tf.control_dependencies(after):
        op = send_recv.send(
            value,
            emission.step,
            dest=emission.rank_of(transfer.dst_chunk),
            program=emission.program.number,
            edge=transfer.index,
            microbatch=task.microbatch or 0,
            label=emission.label_of(transfer),
        )
    emission.all_ops.append(op)


def emit_receive(emission: Emission, task: Task) -> None:
    """Receives a tensor. The receive is posted when the compute task before it has ended."""
    assert task.edge is not None
    transfer = emission.transfers[task.edge]
    graph = emission.program.split.graph
    if transfer.tensor is not None:
        kind = graph.type_of(transfer.tensor)
    else:
        assert transfer.variable is not None
        kind = graph.variables[transfer.variable].type
    with tf.control_dependencies(emission.after()):
        value = send_recv.recv(
            emission.step,
            tf.dtypes.as_dtype(kind.dtype),
            tf.TensorShape(kind.shape),
            src=emission.rank_of(transfer.src_chunk),
            program=emission.program.number,
            edge=transfer.index,
            microbatch=task.microbatch or 0,
            label=emission.label_of(transfer),
        )
    emission.all_ops.append(value.op)
    if transfer.is_sum:
        assert transfer.tensor is not None
        emission.accumulated[transfer.tensor] = value
    elif transfer.tensor is not None:
        emission.values[transfer.tensor, task.microbatch] = value
    else:
        assert transfer.variable is not None
        emission.remote[transfer.variable] = value


def emit_weigh(emission: Emission, task: Task) -> None:
    """Writes the sum of the replicas' weights. The caller provides it, since it knows what counts."""
    assert emission.callers.weigh is not None
    number = emission.program.number
    with tf.name_scope(str(task)):
        begun = begin_task(task, emission.step, number, [emission.step.op])
        with tf.control_dependencies([begun]):
            ops = emission.callers.weigh(emission.step)
        emission.all_ops.append(end_task(task, emission.step, number, ops))


def emit_reduce(emission: Emission, task: Task) -> None:
    """Averages a bucket whose gradients are all complete now. It waits for nothing else."""
    program = emission.program
    assert program.reduction is not None
    assert task.bucket is not None
    bucket = program.buckets[task.bucket]
    if bucket.is_sparse:
        assert emission.callers.sum_sparse is not None
        tensors = [program.split.outputs[position].tensor for position in bucket.positions]
        parts = [[emission.values[tensor, m] for m in range(program.microbatches)] for tensor in tensors]
        with tf.name_scope(str(task)):
            emission.callers.sum_sparse(bucket, parts, emission.step)
        return
    sums = [emission.own_total(program.split.outputs[position]) for position in bucket.positions]
    where = emission.step, program.number, program.stage
    with tf.name_scope(str(task)):
        begun = begin_reduce(*where, sums, bucket.number)
        found = program.reduction.reduce(sums, bucket)
        there = end_reduce(begun, *where, [*found.tensors, *found.there], bucket.number)
    emission.reduced.update(zip(program.reduction.positions_here(bucket), found.tensors, strict=True))
    emission.averages.append(there)


def emit_check(emission: Emission, task: Task) -> None:
    """Writes the check of the batch. The caller provides it, since it knows what it was given."""
    assert emission.callers.check is not None
    emission.callers.check(emission.step)


def emit_update(emission: Emission, task: Task) -> None:
    """Lets the optimizer write its update: all of these tasks at the first of them, since it is called once for all.

    Marks in the graph tell the buckets apart: the optimizer changes the weights of each when its average is there.
    """
    update, emission.update = emission.update, None
    if update is not None:
        update()


def emit_join(emission: Emission, task: Task) -> None:
    """Writes what brings together the samples of all replicas, which comes after the step and before its update."""
    assert emission.join is not None
    with tf.name_scope(str(task)):
        emission.joined = emission.join()


def emit_log(emission: Emission, task: Task) -> None:
    """Writes the average over the replicas of what is logged, which comes after the step."""
    assert emission.log is not None
    with tf.name_scope(str(task)):
        emission.logged = emission.log()


EMITTERS: dict[Kind, Emitter] = {
    Kind.F: emit_compute,
    Kind.B: emit_compute,
    Kind.I: emit_compute,
    Kind.W: emit_compute,
    Kind.T: emit_compute,
    Kind.SEND: emit_send,
    Kind.RECV: emit_receive,
    WEIGH: emit_weigh,
    REDUCE: emit_reduce,
    CHECK: emit_check,
    TELL: emit_update,
    SUM: emit_update,
    APPLY: emit_update,
    JOIN: emit_join,
    LOG: emit_log,
}
