"""Tells the user where a model mixes samples, so that microbatches give something else than the whole batch does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from smp_tf.announce import announce
from smp_tf.job import runtime
from smp_tf.partition.graph.op_graph import OpGraph
from smp_tf.partition.samples.mixtures import Mixture, Mixtures
from smp_tf.partition.samples.rows_of_arguments import RowsOfArguments
from smp_tf.whole_batch.noted_trace import BatchTraces
from smp_tf.whole_batch.own_samples import OwnSamples


def tell_mixtures(traces: BatchTraces, samples: OwnSamples | None) -> None:
    """Tells, once for each layer, where the models of a step mix samples.

    Args:
        traces: the traces of the step.
        samples: of a batch, which is more than one microbatch; None where batches may have any size.
    """
    whole, part = traces.whole.trace.lowered.graph, traces.part.trace.lowered.graph
    _tell(traces.step, Mixtures(whole, part, traces.rows).find(), samples)


def tell_mixtures_of_prediction(step: str, graph: OpGraph, axes: Mapping[int, int | None], samples: OwnSamples) -> None:
    """Tells, once for each layer, where the model of a step mixes samples whose every output holds samples.

    Args:
        step: words for the step.
        graph: the step, traced for a microbatch.
        axes: for each argument, the axis along which it has a row for each sample; None where it has none.
        samples: of a batch, which is more than one microbatch.
    """
    _tell(step, Mixtures(graph, graph, RowsOfArguments(graph, axes, max(samples.parts))).find(), samples)


def _tell(step: str, mixtures: Sequence[Mixture], samples: OwnSamples | None) -> None:
    for mixture in mixtures:
        # The layer is named once, whatever the sizes of batches.
        about = f"{mixture.call.path} mixes samples"
        announce(in_words(step, mixture, samples), runtime.current().topology.rank, about)


def in_words(step: str, mixture: Mixture, samples: OwnSamples | None) -> str:
    """Returns what a user should know of a place where samples are mixed.

    Args:
        step: words for the step.
        mixture: the place.
        samples: of a batch; None where batches may have any size.
    """
    call = mixture.call
    if call.index == 0:
        where = "what it computes before its model mixes samples"
        instead = "compute it before the step, as in the dataset"
    else:
        path = _without_wrapper(call.path)
        where = f"{'layer' if '/' in path else 'model'} {path!r} ({call.class_name}) mixes samples"
        instead = "compute it in the loss, which is that of the whole batch"
    return (
        f"{step}: {where}: op {mixture.op!r} ({mixture.kind}) {mixture.words}. Every microbatch is computed by "
        f"itself{_sizes(samples)}. So results are not those of one process that "
        f'computes the whole batch. For these, train with "microbatches": 1 on one replica, or {instead} '
        f"(docs/sharp_bits.md, 'Layers that mix samples see microbatches')."
    )


def _without_wrapper(path: str) -> str:
    """Returns the path of a layer from the user's own model on, which a wrapper of the same name calls."""
    first, _, inner = path.partition("/")
    return inner if inner.partition("/")[0] == first else path


def _sizes(samples: OwnSamples | None) -> str:
    """Returns words for the sizes of microbatches."""
    if samples is None:
        return ""
    sizes = sorted(set(samples.parts))
    each = str(sizes[0]) if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
    over = f" over {len(samples.sizes)} replicas" if len(samples.sizes) > 1 else ""
    return f", here {each} of {samples.total} samples{over}"
