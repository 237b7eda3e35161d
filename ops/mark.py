"""Notes in a step's graph of when a task begins and ends, as TensorFlow ops.

    began = mark("0F3", step, program=p, ends=False)        after all that the task needs
    with tf.control_dependencies([began]): ...              the task
    mark("0F3", step, program=p, ends=True)                 after the task

A mark costs a look at a flag; only while a timeline is recorded does it look at the clock (`ops/recorder.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from smp_tf.ops.graph_op import add_op, run_independently
from smp_tf.ops.library import tf_ops_library

__all__ = ["mark"]

#: In place of a step's number: of the step that began last.
LAST_STEP = -1


def mark(task: str, step: Any, *, program: int, ends: bool, handles: Sequence[Any] = ()) -> tf.Operation | None:
    """Notes that a task begins or ends where the op stands among its control dependencies.

    Without handles the op is exempt from automatic control dependencies, as `send_recv.send` is; order it by control
    dependencies. It runs once per execution of its function.

    Args:
        task: Text of the task, such as "0F3"; under 28 bytes.
        step: int64 scalar, of `send_recv.begin_step`; `LAST_STEP` for the step that began last.
        program: Number of the step function's program.
        ends: Whether the task ends here, or begins.
        handles: Resource tensors of variables: automatic control dependencies then put the op after their earlier and
            in front of their later uses.

    Returns:
        The op, or None in eager mode.
    """
    library = tf_ops_library()
    step = tf.convert_to_tensor(step, tf.int64)
    if tf.executing_eagerly() or handles:
        operation = library.smp_mark(step=step, handles=list(handles), program=program, task=task, ends=ends)
        return None if tf.executing_eagerly() else operation
    graph = tf.compat.v1.get_default_graph()
    # There are four for each microbatch: the wrapper of the library, which checks its arguments, takes several times
    # as long as this.
    operation = add_op(graph, "SmpMark", [step], [], _attributes(program, task, ends))
    run_independently(operation)
    return operation


def _attributes(program: int, task: str, ends: bool) -> dict[str, Any]:
    value = tf.compat.v1.AttrValue
    return {"N": value(i=0), "program": value(i=program), "task": value(s=task.encode()), "ends": value(b=ends)}
