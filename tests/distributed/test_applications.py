"""Every model of `tf_keras.applications` builds, is planned and takes a training step on 2 partitions.

`test_equality.py` trains three of them and compares; here is what each of them has that could not be cut.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.distributed.conftest import LaunchedCase
from tests.distributed.harness import Case, CaseResult

CASES = "tests.distributed.cases.applications"
# The largest take long to build and to trace, whatever the size of the images.
DEADLINE = 600.0
#: Models that one launch trains, one after the other.
AT_ONCE = 6

#: Pixels of an image's side, where 32 are too few: what the model asks for.
SIZES = {"InceptionResNetV2": 75, "InceptionV3": 75, "NASNetLarge": 331, "NASNetMobile": 224, "Xception": 71}

MODELS = (
    "MobileNetV3Small",
    *(f"ConvNeXt{size}" for size in ("Tiny", "Small", "Base", "Large", "XLarge")),
    *("DenseNet121", "DenseNet169", "DenseNet201"),
    *(f"EfficientNetB{number}" for number in range(8)),
    *(f"EfficientNetV2{kind}" for kind in ("B0", "B1", "B2", "B3", "L", "M", "S")),
    *("InceptionResNetV2", "InceptionV3", "MobileNet", "MobileNetV2", "MobileNetV3Large", "NASNetLarge"),
    "NASNetMobile",
    *(
        f"RegNet{kind}{size}"
        for kind in "XY"
        for size in ("002", "004", "006", "008", "016", "032", "040", "064", "080", "120", "160", "320")
    ),
    *("ResNet101", "ResNet101V2", "ResNet152", "ResNet152V2", "ResNet50", "ResNet50V2"),
    *(f"ResNetRS{depth}" for depth in (50, 101, 152, 200, 270, 350, 420)),
    *("VGG16", "VGG19", "Xception"),
)


def models() -> Iterator[Any]:
    for number, model in enumerate(MODELS):
        # By turns a built model and a function that builds it.
        arguments = {"model": model, "size": SIZES.get(model, 32), "built": number % 2 == 1}
        config = {"partitions": 2, "microbatches": 2, "seed": 1}
        case = Case(model, "one_step", arguments, config)
        wanted = LaunchedCase(2, CASES, case, deadline=DEADLINE, group=number // AT_ONCE)
        yield pytest.param(wanted, id=model, marks=pytest.mark.full)


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("launched", list(models()))
def test_a_step_on_two_partitions(launched: LaunchedCase, case_result: CaseResult) -> None:
    first, second = case_result.values()
    assert first["loss"] == second["loss"]
    assert 0 < first["loss"] < math.inf
    assert first["probabilities"].shape == (2, 3)
    # RegNet ends without its softmax.
    np.testing.assert_allclose(first["probabilities"].sum(axis=1), [first["sum"]] * 2, rtol=1e-5)
    np.testing.assert_array_equal(first["probabilities"], second["probabilities"])
    assert [one != other for one, other in zip(first["stored"], second["stored"], strict=True)] == [True] * len(
        first["stored"]
    )
    assert any(first["stored"])
    assert any(second["stored"])
    assert first["iterations"] == second["iterations"] == 1


def test_the_table_has_all_models() -> None:
    import tf_keras

    found = {name for name, value in vars(tf_keras.applications).items() if inspect.isfunction(value)}
    assert found == {*MODELS}
