"""Vocabularies that are learned before, in and after the builder, over two partitions."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.harness import Case, launch
from tests.full_only import selected
from tests.lookups import VARIANTS


@pytest.mark.distributed
def test_a_split_model_looks_up_as_plain_keras_does(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    variants = selected(VARIANTS, [variant for variant in VARIANTS if variant != "tf-idf builder"], request.config)
    config = {"partitions": 2, "microbatches": 2}
    cases = [Case(variant, "checked", {"variant": variant, "folder": str(tmp_path)}, config) for variant in variants]
    for name, result in launch(2, "tests.distributed.cases.lookups", cases).items():
        assert result.values() == ["as plain Keras"] * 2, name
