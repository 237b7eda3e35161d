"""The code of docs/whole_batch.md runs, and gives the numbers that it gives where no batch is cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tf_keras

import smp_tf as smp
from tests.docs.pages import blocks, page


def run(source: str, file: Path) -> dict[str, Any]:
    """From a file, where AutoGraph finds the source of functions."""
    file.write_text(source, encoding="utf-8")
    names: dict[str, Any] = {}
    smp.shutdown()
    try:
        exec(compile(source, str(file), "exec"), names)
    finally:
        smp.shutdown()
        tf_keras.backend.clear_session()
    return names


@pytest.mark.large
def test_the_page_is_true(tmp_path: Path) -> None:
    source = "\n".join(blocks("python", page("docs/whole_batch.md")))
    assert source.count('"microbatches": 4') == 1
    cut = run(source, tmp_path / "cut.py")
    whole = run(source.replace('"microbatches": 4', '"microbatches": 1'), tmp_path / "whole.py")
    assert sorted(cut["history"]) == ["f1", "loss"]
    for name, values in cut["history"].items():
        np.testing.assert_allclose(values, whole["history"][name], rtol=1e-5, err_msg=name)
    np.testing.assert_allclose(cut["norms"], whole["norms"], rtol=1e-5)
