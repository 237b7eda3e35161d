"""Models that were compiled and saved by an earlier smp_tf load."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

STORED = Path(__file__).with_name("stored") / "one_bit_adam.keras"


def test_a_model_compiled_with_an_optimizer_of_smp_tf_is_loaded_by_who_imports_smp_tf_alone() -> None:
    """Its file names the class by the module that it was in, `smp_tf.one_bit_adam`, and nothing has imported that."""
    code = f"""
import smp_tf as smp
import tf_keras
smp.init({{"partitions": 1}})
model = tf_keras.models.load_model({str(STORED)!r})
print(type(model.optimizer).__name__, round(float(model.optimizer.learning_rate), 4), model.count_params())
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.stdout.splitlines()[-1:] == ["OneBitAdam 0.01 8"], ran.stderr


@pytest.mark.parametrize(
    ("name", "module"), [("OneBitAdam", "smp_tf.one_bit_adam"), ("OneBitLAMB", "smp_tf.one_bit_lamb")]
)
def test_files_go_on_naming_the_class_as_they_did(name: str, module: str) -> None:
    import smp_tf as smp

    assert getattr(smp, name).__module__ == module
