"""Losses and metrics that are drawn from a grammar: what scripts compute of labels, weights and a model's outputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tensorflow as tf
from hypothesis import strategies as st

#: What is computed of each output, given labels and outputs.
TERMS: dict[str, Callable[[Any, Any], Any]] = {
    "square": lambda y, p: tf.square(y - p),
    "absolute": lambda y, p: tf.abs(y - p),
    "log cosh": lambda y, p: tf.math.log(tf.cosh(y - p)),
    "cross entropy": lambda y, p: tf.nn.sigmoid_cross_entropy_with_logits(tf.sigmoid(y), p),
    "poisson": lambda y, p: tf.exp(0.3 * p) - y * p,
    "of classes": lambda y, p: tf.nn.sparse_softmax_cross_entropy_with_logits(tf.argmax(y, -1), p)[:, None],
    "hinge": lambda y, p: tf.nn.relu(1.0 - tf.sign(y) * p),
    "focal": lambda y, p: tf.square(tf.sigmoid(y) - tf.sigmoid(p)) * tf.nn.softplus(p),
}
#: What counts, given labels and weights of samples.
MASKS: dict[str, Callable[[Any, Any], Any]] = {
    "all": lambda y, w: tf.ones_like(y),
    "positives": lambda y, w: tf.cast(y > 0.3, y.dtype),
    "few samples": lambda y, w: tf.cast(y[:, :1] > 0.6, y.dtype),
    "weights": lambda y, w: w[:, None],
    "weighted positives": lambda y, w: w[:, None] * tf.cast(y > 0.0, y.dtype),
    "soft": lambda y, w: tf.nn.softmax(y, -1),
    "rare classes": lambda y, w: tf.reduce_sum(
        tf.one_hot(tf.argmax(y, -1), 3, dtype=y.dtype)
        / (1.0 + tf.reduce_sum(tf.one_hot(tf.argmax(y, -1), 3, dtype=y.dtype), 0)),
        -1,
        keepdims=True,
    ),
}
#: How what counts is put together, given the terms and the mask.
TOTALS: dict[str, Callable[[Any, Any], Any]] = {
    "sum": lambda each, mask: tf.reduce_sum(each * mask),
    "mean": lambda each, mask: tf.reduce_mean(each * mask),
    "over sixteen": lambda each, mask: tf.reduce_sum(each * mask) / 16.0,
    "over samples": lambda each, mask: tf.reduce_sum(each * mask) / tf.cast(tf.shape(each)[0], each.dtype),
    "over mask": lambda each, mask: tf.reduce_sum(each * mask) / (tf.reduce_sum(mask) + 1e-3),
    "over mask or one": lambda each, mask: tf.reduce_sum(each * mask) / tf.maximum(tf.reduce_sum(mask), 1.0),
    "mean over mask": lambda each, mask: tf.math.divide_no_nan(tf.reduce_sum(each * mask), tf.reduce_sum(mask)),
    "mean of samples' means": lambda each, mask: tf.reduce_mean(tf.reduce_mean(each * mask, -1)),
    "sum of shares": lambda each, mask: tf.reduce_sum(each * mask / (tf.reduce_sum(mask) + 1.0)),
    "boolean mask": lambda each, mask: tf.reduce_sum(tf.boolean_mask(each * mask, tf.reduce_max(mask, -1) > 0.0)),
}
#: What is made of that which is no longer linear in the terms.
FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "root": lambda total: tf.sqrt(tf.square(total) + 0.1),
    "logarithm": lambda total: tf.math.log1p(tf.square(total)),
    "perplexity": lambda total: tf.exp(0.1 * tf.minimum(total, 20.0)),
    "square": lambda total: 0.1 * tf.square(total),
}


@dataclass(frozen=True)
class Number:
    """A number that is computed of a batch. Its names say how.

    Args:
        term: of TERMS.
        mask: of MASKS.
        total: of TOTALS.
        factor: by which it is multiplied.
        functions: of FUNCTIONS, one after the other; none where the number is linear in the terms.
    """

    term: str
    mask: str
    total: str
    factor: float = 1.0
    functions: tuple[str, ...] = ()

    def __call__(self, y: Any, w: Any, p: Any) -> Any:
        """Returns the number for labels, weights of samples and outputs."""
        total = self.factor * TOTALS[self.total](TERMS[self.term](y, p), MASKS[self.mask](y, w))
        for name in self.functions:
            total = FUNCTIONS[name](total)
        return total


@dataclass(frozen=True)
class Sum:
    """Two numbers, added up."""

    one: Number
    other: Number

    def __call__(self, y: Any, w: Any, p: Any) -> Any:
        return self.one(y, w, p) + self.other(y, w, p)


@dataclass(frozen=True)
class Quotient:
    """A number divided by another one, as F1 scores and explained variances are."""

    one: Number
    other: Number

    def __call__(self, y: Any, w: Any, p: Any) -> Any:
        return self.one(y, w, p) / (tf.abs(self.other(y, w, p)) + 1.0)


#: Numbers that are linear in what is computed of each sample.
linear = st.builds(
    Number,
    term=st.sampled_from(sorted(TERMS)),
    mask=st.sampled_from(sorted(MASKS)),
    total=st.sampled_from(sorted(TOTALS)),
    factor=st.sampled_from([1.0, 0.05, -0.5]),
)
#: Numbers that are not.
nonlinear = st.builds(
    lambda number, functions: Number(number.term, number.mask, number.total, number.factor, tuple(functions)),
    linear,
    st.lists(st.sampled_from(sorted(FUNCTIONS)), min_size=1, max_size=2),
)
#: Losses for which what a sample counts does not depend on the model.
losses = st.one_of(linear, st.builds(Sum, linear, linear))
#: Anything that may be logged.
logs = st.one_of(linear, nonlinear, st.builds(Quotient, st.one_of(linear, nonlinear), linear))
