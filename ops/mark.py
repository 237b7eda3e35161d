"""Notes when a task begins and ends, by TensorFlow ops in the step's graph.

    began = mark("0F3", step, program=p, ends=False)        after all that the task needs
    with tf.control_dependencies([began]): ...              the task
    mark("0F3", step, program=p, ends=True)                 after the task

A mark costs a look at a flag. It looks at the clock only while a timeline is recorded (`ops/recorder.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from smp_tf.ops.graph_op import add_op, run_independently
from smp_tf.ops.library import tf_ops_library

__all__ = ["mark"]

#: Stands for the number of the step that began last.
LAST_STEP = -1


def mark(task: str, step: Any, *, program: int, ends: bool, handles: Sequence[Any] = ()) -> tf.Operation | None:
    """Notes that a task begins or ends where the op stands among its control dependencies.

    Without handles the op is exempt from automatic control dependencies, as `send_recv.send` is. Order it by control
    dependencies. It runs once per execution of its function.

    Args:
        task: Text of the task, such as "0F3"; under 28 bytes.
        step: int64 scalar from `send_recv.begin_step`; `LAST_STEP` for the step that began last.
        program: Number of the step function's program.
        ends: Whether the task ends here, or begins.
        handles: Resource tensors of variables. Automatic control dependencies then put the op after their earlier uses
            and before their later ones.

    Returns:
        The op, or None in eager mode.
    """
    library = tf_ops_library()
    step = tf.convert_to_tensor(step, tf.int64)
    if tf.executing_eagerly() or handles:
        operation = library.smp_mark(step=step, handles=list(handles), program=program, task=task, ends=ends)
        return None if tf.executing_eagerly() else operation
    graph = tf.compat.v1.get_default_graph()
    # There are four marks for each microbatch. The library's wrapper checks its arguments and takes several times as
    # long as this.
    operation = add_op(graph, "SmpMark", [step], [], _attributes(program, task, ends))
    run_independently(operation)
    return operation


def _attributes(program: int, task: str, ends: bool) -> dict[str, Any]:
    value = tf.compat.v1.AttrValue
    return {"N": value(i=0), "program": value(i=program), "task": value(s=task.encode()), "ends": value(b=ends)}
