"""The rooms below the loops ask one adapter of Keras, and work with another Keras in its place."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from smp_tf.keras import adapter
from smp_tf.keras.keras_2 import ADAPTER
from tests.house.imports import ROOT
from tests.smp_tf.keras import toy_keras

#: What the rooms below the loops find of a training with the toy.
FOUND = {
    "units": [
        ["net/first", None, ["first_kernel"]],
        ["net/second", 1, ["second_kernel"]],
        ["loss and outputs", None, []],
    ],
    "keys": {
        "model/first/kernel": "script",
        "model/second/kernel": "script",
        "optimizer/steps": "optimizer",
        "model/first/kernel/.OPTIMIZER_SLOT/optimizer/velocity": "slot",
        "model/second/kernel/.OPTIMIZER_SLOT/optimizer/velocity": "slot",
    },
    "slots": 1.0,
    "rows": True,
    "has slots": True,
    "has more": False,
    "kernel": [0.5, 0.5],
    "steps": 2,
}


def test_a_toy_keras_is_enough_for_the_rooms_below_the_loops() -> None:
    """`tests/house/test_floors.py` says that these rooms load no tf_keras."""
    with adapter.in_force(toy_keras.TOY):
        assert toy_keras.found() == FOUND


@pytest.mark.full
def test_a_toy_keras_is_enough_where_there_is_no_other() -> None:
    # Importing tf_keras is an error in this process.
    script = "import sys; sys.modules['tf_keras'] = None; from tests.smp_tf.keras import toy_keras; toy_keras.main()"
    command = [sys.executable, "-c", script]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout) == FOUND


def test_the_adapter_in_force_is_that_of_tf_keras_unless_another_one_is() -> None:
    other: Any = object()
    assert adapter.current() is ADAPTER
    with adapter.in_force(other):
        assert adapter.current() is other
    assert adapter.current() is ADAPTER
