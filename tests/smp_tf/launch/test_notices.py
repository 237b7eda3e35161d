"""Which lines of TensorFlow's are notices, and that no others are taken for some."""

from __future__ import annotations

import pytest

from smp_tf.launch.notices import is_notice, may_become_notice

NOTICES = [
    "WARNING: All log messages before absl::InitializeLog() is called are written to STDERR",
    "I0000 00:00:1796039724.317064   14315 port.cc:153] oneDNN custom operations are on. You may see slightly "
    "different numerical results due to floating-point round-off errors from different computation orders.",
    "I0000 00:00:1796039724.423368   14315 cpu_feature_guard.cc:227] This TensorFlow binary is optimized to use "
    "available CPU instructions in performance-critical operations.",
    "To enable the following instructions: AVX2 FMA, in other operations, rebuild TensorFlow with the appropriate "
    "compiler flags.",
    "E0000 00:00:1733000000.123456    4242 cuda_fft.cc:477] Unable to register cuFFT factory: Attempting to register "
    "factory for plugin cuFFT when one has already been registered",
    "E0000 00:00:1733000000.123456    4242 cuda_dnn.cc:8310] Unable to register cuDNN factory: Attempting to register",
    "W0000 00:00:1733000000.123456    4242 computation_placer.cc:177] computation placer already registered.",
]
OTHERS = [
    "",
    "E0000 00:00:1733000000.123456    4242 gpu_timer.cc:82] CUDA_ERROR_OUT_OF_MEMORY",
    "I0000 00:00:1796039724.317064   14315 port.cc:153] something else",
    "WARNING: All is lost",
    "my script: WARNING: All log messages before absl::InitializeLog() is called are written to STDERR",
    "To enable the following instructions, press a key",
    "E1130 12:00:00.123456    4242 cuda_dnn.cc:8310] Unable to register cuDNN factory: Attempting to register",
]


@pytest.mark.parametrize("line", NOTICES)
def test_notices_are_known(line: str) -> None:
    assert is_notice(line)
    assert may_become_notice(line[:20])


@pytest.mark.parametrize("line", OTHERS)
def test_no_other_line_is_a_notice(line: str) -> None:
    assert not is_notice(line)
