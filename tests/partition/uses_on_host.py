"""Forecasts of a stage that keeps some of its memory on the host."""

from __future__ import annotations

import dataclasses

from smp_tf.partition.plan.stage_forecast import StageForecast, Use


def with_on_host(row: StageForecast, *uses: Use) -> StageForecast:
    """Returns the forecast with some uses in the host's memory, and no others."""
    return dataclasses.replace(row, memory=dataclasses.replace(row.memory, on_host=uses))
