"""The models that are measured, by the names of their sizes."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, TypeVar

SizeT = TypeVar("SizeT")


def changed(name: str, sizes: Mapping[str, SizeT]) -> SizeT:
    """Returns a size by its name, or a size that differs from it.

    Args:
        name: name of one of `sizes`, and its changes, such as "tiny+depth=24+batch=64".
        sizes: dataclasses of whole numbers by name.

    Raises:
        ValueError: there is no such size, or a size has nothing of that name.
    """
    base, *changes = name.split("+")
    known = [field.name for field in fields(next(iter(sizes.values())))]  # type: ignore[arg-type]
    given = [change.partition("=") for change in changes]
    if base not in sizes or any(key not in known or not value.isdecimal() for key, _, value in given):
        raise ValueError(
            f"A size is one of {', '.join(sizes)}, or one with other numbers, of {', '.join(known)}, such as "
            f"{next(iter(sizes))}+depth=24. Received: {name}"
        )
    return replace(sizes[base], **{key: int(value) for key, _, value in given})  # type: ignore[type-var]


def size_of(name: str) -> Any:
    """Returns a size of any of the models, as `changed` takes its name.

    Raises:
        ValueError: there is no such size.
    """
    from models import conv_net, gpt

    base = name.partition("+")[0]
    if base in conv_net.SIZES:
        return changed(name, conv_net.SIZES)
    if base in gpt.SIZES:
        return changed(name, gpt.SIZES)
    raise ValueError(f"Sizes are {', '.join((*gpt.SIZES, *conv_net.SIZES))}. Received: {name}")


def model_of(size: Any) -> Any:
    """Returns the module that makes a model of a size, its batch, and its loss and gradients."""
    return sys.modules[type(size).__module__]
