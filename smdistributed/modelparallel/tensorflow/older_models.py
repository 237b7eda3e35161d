"""What scripts of SageMaker's library give `save_model`: its argument by another name, or nothing.

called                            without this     with it
model.save_model(save_path="m")   TypeError        model.save_model("m")
model.save_model()                TypeError        model.save_model("/opt/ml/model"), where SageMaker looks for models
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from smp_tf.keras.patch import Patch
from smp_tf.model.model import DistributedModel

_SAGEMAKERS_FOLDER = "/opt/ml/model"


class OlderModelPatch(Patch):
    """Lets distributed models be saved as SageMaker's library documents it."""

    def _replace(self) -> None:
        self._wrap(DistributedModel, "save_model", _with_older_argument)


#: In force from `smp.init` of this package until `smp.shutdown`.
older_model_patch = OlderModelPatch()


def _with_older_argument(original: Callable[..., None]) -> Callable[..., None]:
    def save_model(
        model: Any, path: str | os.PathLike[str] | None = None, save_path: str | os.PathLike[str] | None = None
    ) -> None:
        if path is not None and save_path is not None:
            raise TypeError("save_model was given path and save_path, its name in SageMaker's library. Keep one.")
        chosen = path if path is not None else save_path
        original(model, chosen if chosen is not None else _SAGEMAKERS_FOLDER)

    return save_model
