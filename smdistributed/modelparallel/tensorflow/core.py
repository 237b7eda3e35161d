"""`smp.core`: ranks, sizes, groups and barriers, by the name of the module where SageMaker's library keeps them."""

from __future__ import annotations

from typing import Any

import smdistributed.modelparallel.tensorflow as package

__all__ = sorted({*package.__all__} - {"core", "utils"})


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(package, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
