"""Lookups, whose weights are not all variables."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tf_keras
from tf_keras import layers

import smp_tf as smp
from smp_tf.keras.layers import variables_of, variables_of_script
from tests.lookups import VARIANTS, WORDS, check
from tests.own_optimizers import build

pytestmark = pytest.mark.usefixtures("keras_defaults")


def test_a_lookup_of_no_model_learns_as_before(init: Callable[..., None]) -> None:
    """A vocabulary is among the weights of its layer, and was taken for a variable."""
    init()
    model = smp.DistributedModel(build)
    lookup = layers.StringLookup()
    lookup.adapt(np.array(["a", "b"]))
    assert lookup(["a"]).numpy().tolist() == [2]
    assert list(variables_of_script(model)) == []


def test_what_a_lookup_counts_is_the_script_s(init: Callable[..., None]) -> None:
    init()
    model = smp.DistributedModel(lambda: build_with(layers.TextVectorization(output_mode="tf_idf")))
    names = [variable.shape.as_list() for variable in variables_of_script(model)]
    assert names == [[None], []]
    assert [variable.shape.rank for variable in variables_of(model)] == [1, 0, 2, 1]


def build_with(lookup: layers.Layer) -> tf_keras.Model:
    lookup.adapt(WORDS)
    return tf_keras.Sequential([tf_keras.Input((1,), dtype="string"), lookup, layers.Dense(2)])


@pytest.mark.full
@pytest.mark.parametrize("variant", VARIANTS)
def test_one_process_looks_up_as_plain_keras_does(init: Callable[..., None], variant: str, tmp_path: Path) -> None:
    init(microbatches=2)
    check(variant, tmp_path)
