"""Weighs losses of `fit` where microbatches count unequally, such as masked ones by their valid elements.

A step's result is averaged over its microbatches by their samples: the sum of n_i x L_i / N. That is the loss of the
whole batch where L_i is a mean over samples. A compiled loss may be something else. It is scaled so that the result is
right:

    loss                                      L_i, as Keras computes it     scaled by           so that all give
    masked: mean over d_i valid elements      S_i / d_i                     d_i N / (n_i D)     sum of S_i / D
    reduction SUM                             S_i                           N / n_i             sum of S_i

A metric that averages numbers, and is given one number for a batch, such as the loss, counts a batch once. With
microbatches, each number counts by its share n_i / N of the samples. So a batch's numbers together count once.

D is the number of valid elements of the whole batch, over all replicas. It would be known only after the last
microbatch. But a mask depends on the inputs, not on weights. So its part of the traced graph is run ahead, on every
rank, for every microbatch (`Totals`), and the step gets the sum in a variable.
"""

from __future__ import annotations

import contextlib
import threading
import types
from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any

import tensorflow as tf

from smp_tf.announce import announce
from smp_tf.batch.microbatches import Slicer, SplitArgument
from smp_tf.job import runtime
from smp_tf.job.at_shutdown import on_shutdown
from smp_tf.keras import adapter
from smp_tf.keras.patch import Patch
from smp_tf.partition.tf_internals import KeptFunctions, is_stateful
from smp_tf.partition.trace.trace import Trace
from smp_tf.replicas.sums import sum_over_replicas

#: The scope of our ops' names, so that the script's ops keep the names that they have without these.
_OWN_SCOPE = "smp_weighed"


class Denominators:
    """The losses of one trace of a microbatch that are no means over samples.

    Args:
        step: name of the step, for messages.
        samples: a variable for N, the samples of the whole batch.
    """

    def __init__(self, step: str, samples: tf.Variable) -> None:
        self._step = step
        self._samples = samples
        self._in_microbatch: Any = None
        #: For each masked loss, its number of valid elements in the microbatch, and a variable for N / D.
        self.valid: list[tf.Tensor] = []
        self.ratios: list[tf.Variable] = []
        self.uses_samples = False
        #: Whether a loss is scaled, so that microbatches average it rightly.
        self.scales_losses = False
        #: Ops that give the shape of something made from weights. It is taken to be the samples, and all else as
        #: traced.
        self.shapes: dict[tf.Operation, list[int]] = {}

    @contextlib.contextmanager
    def collecting(self, samples_in_microbatch: tf.Tensor, metrics: Sequence[Any] = ()) -> Iterator[None]:
        """Scales compiled losses, and weighs numbers that metrics average, within its context.

        Args:
            samples_in_microbatch: n_i, an integer scalar.
            metrics: the model's metrics, made before or after it.
        """
        if _patch.install():
            on_shutdown(_patch.remove)
        self._in_microbatch = samples_in_microbatch
        before, _scope.denominators = _scope.denominators, self
        try:
            with _weighed(metrics):
                yield
        finally:
            _scope.denominators = before

    def forget_graph(self) -> None:
        """Drops the tensors of the trace, once `Totals` has what it needs of them."""
        self._in_microbatch, self.valid, self.shapes = None, [], {}

    @property
    def is_needed(self) -> bool:
        """Returns whether anything has to be known of a batch before its step runs."""
        return bool(self.ratios) or self.uses_samples

    def mask_factor(self, mask: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
        """Returns the factor of a masked sum: N / (n_i D), or 1 / d_i where D cannot be known ahead.

        Args:
            mask: which elements of the microbatch are valid.
            dtype: type of the factor.
        """
        self.scales_losses = True
        valid = tf.reduce_sum(tf.cast(_before_reshaping(mask), dtype))
        cause, shapes = _depends_on(valid)
        if cause is not None:
            announce(
                f"{self._step}: the mask of a loss depends on {cause}, so the number of valid elements of a batch is "
                f"not known before its last microbatch has run. The loss is averaged over the valid elements of each "
                f"microbatch, and those averages by samples.",
                runtime.current().topology.rank,
            )
            return 1.0 / tf.maximum(valid, 1.0)
        ratio = _variable("smp_samples_over_valid")
        self.shapes.update(shapes)
        agree = [
            tf.debugging.assert_equal(
                shape[0],
                tf.cast(self._in_microbatch, shape.dtype),
                message=f"{self._step}: a loss has a mask, so its predictions need one row a sample.",
            )
            for shape in (operation.outputs[0] for operation in shapes)
        ]
        self.valid.append(valid)
        self.ratios.append(ratio)
        with tf.control_dependencies([check for check in agree if check is not None]):
            return tf.cast(ratio, dtype) / tf.cast(self._in_microbatch, dtype)

    def share(self, dtype: tf.DType) -> tf.Tensor:
        """Returns the microbatch's share of the samples of the whole batch: n_i / N."""
        self.uses_samples = True
        with tf.name_scope(_OWN_SCOPE):
            return tf.cast(self._in_microbatch, dtype) / tf.cast(self._samples, dtype)

    def sum_factor(self, dtype: tf.DType) -> tf.Tensor:
        """Returns the factor of a summed loss, N / n_i."""
        self.uses_samples = True
        with tf.name_scope(_OWN_SCOPE):
            return tf.cast(self._samples, dtype) / tf.cast(self._in_microbatch, dtype)


def _variable(name: str) -> tf.Variable:
    with tf.init_scope():
        return tf.Variable(1.0, trainable=False, dtype=tf.float64, name=name)


def _before_reshaping(mask: tf.Tensor) -> tf.Tensor:
    """Returns a tensor with the same elements that does not need the shape of the predictions."""
    while mask.op.type in ("Reshape", "Squeeze", "ExpandDims", "Identity"):
        mask = mask.op.inputs[0]
    return mask


def _depends_on(tensor: tf.Tensor) -> tuple[str | None, dict[tf.Operation, list[int]]]:
    """Returns what a tensor depends on that is unknown before the step runs: a variable, or random numbers.

    Returns:
        Words for it, or None; and the ops in between which give shapes, where only the number of samples is unknown.
    """
    seen: set[str] = set()
    shapes: dict[tf.Operation, list[int]] = {}
    stack = [tensor.op]
    while stack:
        operation = stack.pop()
        if operation.name in seen:
            continue
        seen.add(operation.name)
        if any(t.dtype in (tf.resource, tf.variant) for t in operation.inputs):
            return f"a variable (op {operation.name!r})", {}
        if is_stateful(operation.type):
            return f"op {operation.name!r}, which has a state", {}
        if operation.type == "Shape" and (rest := _all_but_samples(operation.inputs[0])) is not None:
            shapes[operation] = rest
        else:
            stack.extend(t.op for t in operation.inputs)
    return None, shapes


def _all_but_samples(tensor: tf.Tensor) -> list[int] | None:
    """Returns the shape of a tensor from its second dimension on, if it is known."""
    rest = tensor.shape[1:] if tensor.shape.rank else None
    return rest.as_list() if rest is not None and rest.is_fully_defined() else None


class Totals:
    """Computes what the losses of a step need to know of a whole batch, and gives it to them.

    Args:
        denominators: the losses.
        samples: the variable for N.
        trace: the trace of a microbatch that has the losses.
        cut: how the step's arguments are cut, and into how many microbatches.
        over_replicas: whether the batches of all replicas are one batch.
    """

    def __init__(
        self,
        denominators: Denominators,
        samples: tf.Variable,
        trace: Trace,
        cut: tuple[Sequence[SplitArgument], int],
        over_replicas: bool,
    ) -> None:
        self._ratios = denominators.ratios
        self._samples = samples
        self._over_replicas = over_replicas
        self._arguments, self._microbatches = cut
        self._placeholders = [tensor.op.name for tensor in trace.arguments]
        names = [tensor.op.name for tensor in denominators.valid]
        self._outputs = [tensor.name for tensor in denominators.valid]
        #: By the name of an op that gives a shape: its type, and all dimensions but the samples.
        self._shapes = {op.name: (op.outputs[0].dtype, rest) for op, rest in denominators.shapes.items()}
        self._definition = _sub_graph(trace.definition, names, self._shapes) if names else None
        self._calls = KeptFunctions(self._definition.library.function if self._definition else ())
        kept = {node.name for node in self._definition.node} if self._definition else set()
        self._captures = {inner.op.name: outer for outer, inner in trace.graph.captures if inner.op.name in kept}
        self._kept = kept
        signature = [argument.spec for argument in self._arguments]
        self._count = tf.function(self._counted, autograph=False, input_signature=signature)

    def tell(self, tensors: Sequence[Any]) -> None:
        """Sets the variables for a batch.

        Args:
            tensors: the tensor arguments of the step.
        """
        counted = self._count(*tensors)
        samples, *valid = sum_over_replicas(counted, "smp_loss_denominators") if self._over_replicas else counted
        self._samples.assign(samples)
        for ratio, total in zip(self._ratios, valid, strict=True):
            ratio.assign(samples / tf.maximum(total, tf.constant(1.0, tf.float64)))

    def _counted(self, *tensors: Any) -> list[tf.Tensor]:
        """Returns the batch's samples and, for each masked loss, its valid elements, as float64 scalars."""
        slicer = Slicer(self._arguments, tensors, self._microbatches)
        samples = tf.add_n([tf.cast(size, tf.float64) for size in slicer.sizes])
        if not self._outputs:
            return [samples]
        found = [self._valid_in(slicer, microbatch) for microbatch in range(self._microbatches)]
        return [samples, *(tf.add_n(list(counts)) for counts in zip(*found, strict=True))]

    def _valid_in(self, slicer: Slicer, microbatch: int) -> list[tf.Tensor]:
        given: dict[str, Any] = {
            f"{name}:0": slicer(number, microbatch)
            for number, name in enumerate(self._placeholders)
            if name in self._kept
        }
        given.update({f"{name}:0": value for name, value in self._captures.items()})
        for name, (dtype, rest) in self._shapes.items():
            samples = tf.cast(slicer.sizes[microbatch], dtype)
            given[f"{name}:0"] = tf.concat([samples[None], tf.constant(rest, dtype)], 0)
        counts = tf.import_graph_def(self._definition, input_map=given, return_elements=self._outputs, name="")
        return [tf.cast(count, tf.float64) for count in counts]


def _sub_graph(definition: Any, names: Sequence[str], cut: Container[str]) -> Any:
    """Returns the nodes that some nodes need, with placeholders where the graph is cut."""
    nodes = {node.name: node for node in definition.node}
    needed: set[str] = set()
    stack = list(names)
    while stack:
        name = stack.pop()
        if name not in needed:
            needed.add(name)
            if name not in cut:
                stack.extend(given.removeprefix("^").partition(":")[0] for given in nodes[name].input)
    part = type(definition)(library=definition.library, versions=definition.versions)
    for node in (node for node in definition.node if node.name in needed):
        added = part.node.add()
        if node.name in cut:
            added.name, added.op = node.name, "Placeholder"
            added.attr["dtype"].type = node.attr["out_type"].type
        else:
            added.CopyFrom(node)
    return part


class _Scope(threading.local):
    denominators: Denominators | None = None
    in_compiled: bool = False


_scope = _Scope()


def _collecting() -> Denominators | None:
    return _scope.denominators if _scope.in_compiled else None


class _LossPatch(Patch):
    """Lets compiled losses ask `Denominators` how they count, while a microbatch is traced."""

    def _replace(self) -> None:
        container, functions = adapter.losses().compiled_losses()
        self._wrap(container, "__call__", _within_compiled)
        self._wrap(functions, "apply_valid_mask", _masked)
        self._wrap(functions, "compute_weighted_loss", _reduced)
        self._wrap(adapter.losses().reducing_metric()[0], "update_state", _weighted_by_samples)


_patch = _LossPatch()


def _within_compiled(original: Callable[..., Any]) -> Callable[..., Any]:
    def call(container: Any, *args: Any, **kwargs: Any) -> Any:
        before, _scope.in_compiled = _scope.in_compiled, True
        try:
            return original(container, *args, **kwargs)
        finally:
            _scope.in_compiled = before

    return call


def _masked(original: Callable[..., Any]) -> Callable[..., Any]:
    def apply_valid_mask(losses: Any, weights: Any, mask: Any, reduction: Any) -> Any:
        collecting = _collecting()
        if collecting is None or mask is None or not adapter.losses().is_mean(reduction):
            return original(losses, weights, mask, reduction)
        with tf.name_scope(_OWN_SCOPE):
            kept = tf.cast(mask, losses.dtype)
            # Keras divides by the size again.
            kept *= tf.cast(tf.size(kept), losses.dtype) * collecting.mask_factor(mask, losses.dtype)
        return original(losses, weights, kept, adapter.losses().no_reduction())

    return apply_valid_mask


def _weighted_by_samples(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a metric's `update_state`, or a metric class's function, that weighs a number by the samples."""

    def update_state(metric: Any, values: Any, sample_weight: Any = None) -> Any:
        collecting, (_, averages) = _scope.denominators, adapter.losses().reducing_metric()
        if (
            collecting is None
            or sample_weight is not None
            or metric.reduction not in averages
            or not _is_scalar(values)
        ):
            return original(metric, values, sample_weight)
        return original(metric, values, collecting.share(metric._dtype))

    return update_state


@contextlib.contextmanager
def _weighed(metrics: Sequence[Any]) -> Iterator[None]:
    """Lets metrics that were made before the patch weigh numbers by samples within its context."""
    kind: Any = adapter.losses().reducing_metric()[0]
    made = [metric for metric in metrics if getattr(type(metric), "update_state", None) is kind.update_state]
    own = [metric for metric in made if "update_state" in metric.__dict__]
    originals = [metric.__dict__["update_state"] for metric in own]

    def replaced(original: Any) -> Any:
        return _weighted_by_samples(lambda _, values, weight: original(values, weight))

    for metric, original in zip(own, originals, strict=True):
        metric.__dict__["update_state"] = types.MethodType(replaced(original), metric)
    try:
        yield
    finally:
        for metric, original in zip(own, originals, strict=True):
            metric.__dict__["update_state"] = original


def _is_scalar(values: Any) -> bool:
    return isinstance(values, (int, float)) or (isinstance(values, tf.Tensor) and values.shape.rank == 0)


def _reduced(original: Callable[..., Any]) -> Callable[..., Any]:
    def compute_weighted_loss(losses: Any, *args: Any, **kwargs: Any) -> Any:
        value = original(losses, *args, **kwargs)
        collecting = _collecting()
        reduction = kwargs.get("reduction", args[1] if len(args) > 1 else None)
        if collecting is None or not adapter.losses().is_sum(reduction):
            return value
        collecting.scales_losses = True
        factor = collecting.sum_factor(value.dtype)
        with tf.name_scope(_OWN_SCOPE):
            return value * factor

    return compute_weighted_loss
