"""What microbatches take gradients of, where their own losses do not average to that of the batch.

See `loss_coefficients.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from smp_tf.announce import announce
from smp_tf.job import runtime
from smp_tf.steps.step import Step
from smp_tf.whole_batch.loss_coefficients import CallCoefficients, LossCoefficients
from smp_tf.whole_batch.own_samples import GatheredSamples, OwnSamples, gathered_samples
from smp_tf.whole_batch.tail_graph import blocks_swapped, in_a_row

#: The name under which a forward pass gives the tensors that coefficients are computed of.
OUTPUTS = "outputs"
#: The keyword under which a step is given coefficients.
COEFFICIENTS = "smp_coefficients"
#: The scope of our ops' names, so that the script's ops keep the names that they have without these.
_OWN_SCOPE = "smp_weighed"


class WeighedError(Exception):
    """A step has a loss that its microbatches do not average to that of the batch, and for which there is a way.

    Args:
        coefficients: what the samples count, for batches of the structure that the step was traced for.
    """

    def __init__(self, coefficients: LossCoefficients) -> None:
        super().__init__()
        self.coefficients = coefficients


class WeighedStep:
    """A step whose microbatches are told what their samples count in losses of the whole batch.

    Args:
        in_words: words for the step.
        step: the step; it takes the coefficients under the keyword `COEFFICIENTS`.
        forward: its forward pass, to be run alone. It gives tensors of `names` under `OUTPUTS`.
        found: returns the coefficients for a batch of another structure, given the arguments of the step, by position
            and by keyword, and the numbers of the calls that need some.
        samples: returns the samples of a batch, and which of them this replica has, given the arguments.
        counts: whether the step is given, after the coefficients, how many samples there are: in a row a sample, all
            alike. Then replicas do not know each other's sizes before the batch is there.
    """

    def __init__(
        self,
        in_words: str,
        step: Step,
        forward: Step,
        found: Callable[[Sequence[Any], Mapping[str, Any], Collection[int]], LossCoefficients],
        samples: Callable[[Sequence[Any], Mapping[str, Any]], OwnSamples],
        *,
        counts: bool = False,
    ) -> None:
        self._in_words = in_words
        self._step = step
        self._forward = forward
        self._found = found
        self._samples = samples
        self._counts = counts
        self._known: dict[Any, LossCoefficients] = {}
        self._of_forms: dict[Any, LossCoefficients] = {}
        #: The calls whose gradients are taken by coefficients, as the batch that came last has them.
        self.calls: Sequence[CallCoefficients] = ()
        #: The names of the tensors in a microbatch's graph that these coefficients are computed of.
        self.names: Sequence[str] = ()

    def program_for(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        first: LossCoefficients | None = None,
        *,
        sizes: Sequence[int] = (),
        also: Hashable = None,
    ) -> tuple[Any, Sequence[Any]]:
        """Returns the program for a batch, and what to call it with.

        Args:
            args: the arguments of the step by position.
            kwargs: those by keyword.
            first: the coefficients for batches of their structure, where they are known.
            sizes: samples of all replicas' batches, where these are one batch.
            also: what the program is for besides.
        """
        tensors = tf.nest.flatten(list(self._forward.tensors_of(*args, **kwargs)), expand_composites=True)
        key = tuple(sizes), self._forward.key_of(*args, **kwargs)
        self._step.also = also
        is_new = key not in self._known
        if is_new:
            self._known[key] = first or self._for_sizes(args, kwargs)
        known = self._known[key]
        self.calls, self.names = known.calls, known.outputs
        if self.names and is_new:
            self._tell()
            # The step decides which stage has which layers. Its forward pass alone would balance them otherwise.
            self._find(args, kwargs, known.samples, known.empty())
        own = self._own(known)
        outputs = known.joined(self._forward(*args, **kwargs)[OUTPUTS]) if self.names else None
        return self._find(args, kwargs, own, known.of(tensors, outputs, own))

    def _for_sizes(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> LossCoefficients:
        """Returns the coefficients for a batch of sizes that have not come before."""
        form = self._forward.form_of(*args, **kwargs)
        found = None
        if form in self._of_forms:
            found = self._of_forms[form].for_samples(self._samples(args, kwargs))
        if found is None:
            found = self._of_forms[form] = self._found(args, kwargs, {call.number for call in self.calls})
        return found

    def _own(self, known: LossCoefficients) -> OwnSamples | GatheredSamples:
        """Returns which samples of the whole batch this replica has."""
        if not self._counts or len(known.samples.sizes) == 1:
            return known.samples
        only = None if known.are_of_any_size else known.samples.total
        return gathered_samples(known.samples.count, only, self._in_words)

    def _find(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        own: OwnSamples | GatheredSamples,
        coefficients: list[tf.Tensor],
    ) -> tuple[Any, Sequence[Any]]:
        counts = [tf.fill([own.count], tf.cast(own.total, tf.float64))] if self._counts else []
        return self._step.find(*args, **kwargs, **{COEFFICIENTS: [*coefficients, *counts]})

    def _tell(self) -> None:
        announce(
            f"{self._in_words} has a loss that compares samples of a batch, or computes something of their average. "
            f"So the model runs forward on the whole batch first. Then the loss is computed once, and the step takes "
            f"gradients by it. Each batch runs forward twice. Activations take no more memory than for other losses.",
            runtime.current().topology.rank,
        )


def replaced_losses(
    calls: Sequence[CallCoefficients], coefficients: Sequence[tf.Tensor], factor: Callable[[tf.DType], tf.Tensor]
) -> dict[int, Callable[[], list[tuple[str, Any]]]]:
    """Returns what calls take gradients of in a microbatch, in place of its loss.

    Args:
        calls: the calls.
        coefficients: what the samples of the microbatch count, in the order of the calls and of their tensors.
        factor: returns, as a number of a type, by how many times the whole batch has more samples than the microbatch.

    Returns:
        By number of a call, what writes down names of tensors, and what each counts.
    """
    given = iter(coefficients)
    of_call = [[next(given) for place in range(len(c.tensors)) if place not in c.constants] for c in calls]

    def parts_of(call: CallCoefficients, rows: Sequence[tf.Tensor]) -> list[tuple[str, Any]]:
        left = iter(rows)
        found: list[tuple[str, Any]] = []
        with tf.name_scope(_OWN_SCOPE):
            for place, name in enumerate(call.tensors):
                value = tf.constant(call.constants[place]) if place in call.constants else next(left)
                if place in call.shared:
                    value = value[0]
                elif place not in call.constants:
                    # Averages weigh a microbatch by its share of the samples.
                    value *= factor(value.dtype)
                if place in call.blocks:
                    value = in_a_row(blocks_swapped(value))
                if value.dtype.is_floating or value.dtype.is_complex:
                    found.append((name, value))
        return found

    return {c.number: functools.partial(parts_of, c, rows) for c, rows in zip(calls, of_call, strict=True)}
