"""Trains models of the package transformers split over the processes, and says what each rank got."""

from __future__ import annotations

from typing import Any

from tests.distributed.cases.equality import make_model, trained
from tests.distributed.transformers_models import MODELS, fitted


def train(model: str) -> dict[str, Any]:
    """Six optimizer steps in a loop of the script's own, then predictions on the first batch."""
    return trained(MODELS[model])


def fit(model: str) -> dict[str, Any]:
    """Two epochs of `fit`: the history, and what `evaluate` says afterwards."""
    return fitted(model, make_model)
