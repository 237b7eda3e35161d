"""Formats numbers for people."""

from __future__ import annotations


def counted(many: int, what: str, ending: str = "s") -> str:
    """Returns a number with its noun, such as "1 replica" and "2 replicas"."""
    return f"{many} {what}{ending if many != 1 else ''}"


def in_flops(count: float) -> str:
    """Returns floating-point operations for people, such as "1.2 GFLOP"."""
    for factor, unit in ((1e12, "TFLOP"), (1e9, "GFLOP"), (1e6, "MFLOP"), (1e3, "kFLOP")):
        if count >= factor:
            return f"{count / factor:.3g} {unit}"
    return f"{count:.0f} FLOP"
