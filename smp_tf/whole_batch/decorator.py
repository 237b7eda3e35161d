"""The decorator `@smp.step`, whose options say whether a step gives results of microbatches or of whole batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from smp_tf.steps.options import StepOptions
from smp_tf.steps.step import Step
from smp_tf.whole_batch.own_step import WholeBatchStep


def step(
    function: Callable[..., Any] | None = None,
    *,
    non_split_inputs: Iterable[str] | None = None,
    input_split_axes: Mapping[str, int] | None = None,
    local_outputs: Iterable[str] | None = None,
    keep_microbatch_gradients: bool = False,
    input_signature: Sequence[Any] | None = None,
    autograph: bool = True,
    reduce_retracing: bool = False,
    jit_compile: bool | None = None,
    whole_batch: bool = False,
    experimental_relax_shapes: bool | None = None,
    experimental_compile: bool | None = None,
) -> Any:
    """Decorates a forward-backward function so that it is split over the partitions and pipelined.

    The body is traced for one microbatch. Its tensor arguments are cut along axis 0, also those in lists, tuples,
    dictionaries, dataclasses and composite tensors. In a set they are `tensor.ref()`, each of a different type. The set
    is iterated in the order of these types, which is the same on all ranks. An object with a method `smp_slice(num_mb,
    mb, axis)` is cut by that method. It must return microbatch `mb` of `num_mb`, always with the same structure. The
    body runs for every microbatch, and each tensor that it returns comes back as a `smp.StepOutput`.

    The sizes of microbatches differ by at most one. Averages weigh each by its number of samples. Where only objects
    with `smp_slice` are cut, all weigh alike. A batch of fewer samples than microbatches runs one microbatch per
    sample, unless it is the first batch. Within a `tf.function` that leaves the batch size open, such a batch is an
    error when it comes.

    With `whole_batch=True` the results are those of one process that is given the whole batch. Each has one value. What
    the body computes of all samples, such as an F1 score, is computed once per batch. Metrics are updated once per
    batch. A loss counts samples as in the whole batch, be it a mean or a sum. What the body makes of its gradients is
    made of those of the whole batch, such as to clip them by a norm. With replicas, the batch is that of all of them,
    and all call the step equally often. What cannot be had is an error.

    Args:
        function: the function. It is left out when the decorator is given options.
        non_split_inputs: names of parameters that are passed whole to every microbatch.
        input_split_axes: the axis along which a parameter is cut, where it is not axis 0.
        local_outputs: keys, fields or positions in the function's result that stay on the rank that makes them.
        keep_microbatch_gradients: whether to keep gradients per microbatch besides their sum.
        input_signature: a list of `tf.TensorSpec` of the whole batch, as for `tf.function`. Arguments are cast to it.
        autograph: whether to convert Python control flow over tensors.
        reduce_retracing: whether to leave the batch size open from the first batch on, so that one program takes all
            sizes. By default this begins with the third size.
        jit_compile: whether to compile the step's functions with XLA; by default what the configuration's `xla` says.
        whole_batch: whether results are those of the whole batch, in place of one for each microbatch.
        experimental_relax_shapes: the old name of `reduce_retracing`.
        experimental_compile: the old name of `jit_compile`.

    Returns:
        A step, callable eagerly or inside a `tf.function`.

    Raises:
        StepError: an option names a parameter that does not exist.

    Example:
        >>> @smp.step
        ... def train(images, labels):
        ...     with tf.GradientTape() as tape:
        ...         logits = model(images, training=True)
        ...         losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
        ...         loss = tf.reduce_mean(losses)
        ...     return tape.gradient(loss, model.trainable_variables), loss
        >>> gradients, loss = train(images, labels)
        >>> average = loss.reduce_mean()
    """
    options = StepOptions(
        non_split=frozenset(non_split_inputs or ()),
        axes=dict(input_split_axes or {}),
        local_outputs=tuple(local_outputs or ()),
        keep_gradients=keep_microbatch_gradients,
        input_signature=input_signature,
        autograph=autograph,
        reduce_retracing=reduce_retracing or bool(experimental_relax_shapes),
        jit_compile=experimental_compile if jit_compile is None else jit_compile,
    )
    kind = WholeBatchStep if whole_batch else Step
    return (lambda decorated: kind(decorated, options)) if function is None else kind(function, options)
