"""The options of `@smp.step`, as the decorator and `fit` hand them on."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from smp_tf.errors import StepError


@dataclass(frozen=True)
class StepOptions:
    """The options of `@smp.step`."""

    non_split: frozenset[str] = frozenset()
    axes: Mapping[str, int] = field(default_factory=dict)
    local_outputs: tuple[str, ...] = ()
    keep_gradients: bool = False
    input_signature: Sequence[Any] | None = None
    autograph: bool = True
    reduce_retracing: bool = False
    jit_compile: bool | None = None
    #: Whether the first batch may have fewer samples than there are microbatches, as any other may.
    small_first_batch: bool = False
    #: Whether it is a step of Keras's loops, which is given a batch and no options.
    of_keras: bool = False
    #: Whether what comes after the step averages over the replicas what it logs of a batch.
    logs_over_replicas: bool = False
    #: What the step function is known by whose next step's random numbers it draws; None where it draws its own.
    ahead_of: Callable[[], str] | None = None

    def check(self, signature: inspect.Signature, name: str) -> None:
        """Raises an error where an option names a parameter that the step does not have."""
        for option, named in (("non_split_inputs", self.non_split), ("input_split_axes", self.axes)):
            for parameter in named:
                if parameter not in signature.parameters:
                    raise StepError(
                        f"{option} of step {name!r} names {parameter!r}, but the step's parameters are "
                        f"{', '.join(signature.parameters) or 'none'}."
                    )
