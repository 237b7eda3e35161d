"""What one stage is forecast to hold, to do and to send."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from dataclasses import dataclass


class Use(enum.StrEnum):
    """What a stage's memory is used for."""

    #: The stage's variables, and its copies of other stages' variables.
    WEIGHTS = "weights"
    #: Memory in which gradients are accumulated.
    GRADIENTS = "gradients"
    #: The optimizer's slots; where replicas share them, those of the replica that has most.
    SLOTS = "slots"
    #: What forward keeps for backward, of all microbatches that are under way.
    STASH = "stash"
    #: Messages received but not yet read, messages not yet sent, and buffers for averaging gradients; 0 before the cut.
    TRANSPORT = "transport"
    #: The batch, and tensors that live within one task only; 0 before the cut.
    WORK = "work"


class Source(enum.StrEnum):
    """What a forecast of memory goes by."""

    #: The ops of the stage.
    ESTIMATE = "estimated"
    #: The ops of the stage, and what all its units were seen to need while they run.
    PROFILE = "by profile"
    #: What the stage's rank held at most in an earlier training by the same plan.
    TRAINING = "as measured"


@dataclass(frozen=True)
class Memory:
    """Bytes by what they are used for.

    Args:
        bytes: bytes by use. A use that is not given has none.
        on_host: the uses that are in the host's memory instead of the device's.
    """

    bytes: dict[str, int]
    on_host: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "bytes", {use: self.bytes.get(use, 0) for use in Use})

    def __getitem__(self, use: Use) -> int:
        return self.bytes[use]

    def __add__(self, other: Mapping[Use, int]) -> Memory:
        """Returns the memory with more bytes of some uses."""
        return dataclasses.replace(self, bytes={use: count + other.get(use, 0) for use, count in self.uses.items()})

    def __or__(self, other: Mapping[Use, int]) -> Memory:
        """Returns the memory with other bytes of some uses."""
        return dataclasses.replace(self, bytes={use: other.get(use, count) for use, count in self.uses.items()})

    @property
    def uses(self) -> Mapping[Use, int]:
        """The bytes by use."""
        return {use: self.bytes[use] for use in Use}

    @property
    def total(self) -> int:
        """Returns all bytes."""
        return sum(self.bytes.values())

    @property
    def host(self) -> int:
        """Returns the bytes in the host's memory."""
        return sum(self.bytes[use] for use in self.on_host)


@dataclass(frozen=True)
class Traffic:
    """What a stage sends, per microbatch.

    Args:
        sent_forward, sent_backward: bytes to later and to earlier chunks.
        messages_forward, messages_backward: tensors to later and to earlier chunks.
    """

    sent_forward: int = 0
    sent_backward: int = 0
    messages_forward: int = 0
    messages_backward: int = 0


@dataclass(frozen=True)
class StageForecast:
    """What one stage is forecast to hold, to do and to send.

    Args:
        units: number of units.
        parameters: numbers in the trainable and other variables it owns.
        memory: the bytes it holds.
        in_flight: for each of its chunks, the microbatches whose stash it holds at once.
        time_share: its share of the compute time of all stages, 0 to 1.
        traffic: what it sends.
        largest: the unit that has most of what is balanced, among those of the stage.
        largest_share: the share of that unit, 0 to 1.
        source: what the forecast of memory goes by, one of `Source`.
    """

    units: int
    parameters: int
    memory: Memory
    in_flight: int
    time_share: float
    traffic: Traffic
    largest: str = ""
    largest_share: float = 0.0
    source: str = Source.ESTIMATE

    def with_memory(self, memory: Mapping[Use, int]) -> StageForecast:
        """Returns the forecast with other bytes of some uses.

        Args:
            memory: the other bytes, by use.
        """
        return dataclasses.replace(self, memory=self.memory | memory)

    @property
    def weight_bytes(self) -> int:
        """Returns the bytes of variables."""
        return self.memory[Use.WEIGHTS]

    @property
    def gradient_bytes(self) -> int:
        """Returns the bytes in which gradients are accumulated."""
        return self.memory[Use.GRADIENTS]

    @property
    def slot_bytes(self) -> int:
        """Returns the bytes of optimizer slots."""
        return self.memory[Use.SLOTS]

    @property
    def stash_bytes(self) -> int:
        """Returns the bytes of the stash of all microbatches under way."""
        return self.memory[Use.STASH]

    @property
    def transport_bytes(self) -> int:
        """Returns the bytes on their way between ranks."""
        return self.memory[Use.TRANSPORT]

    @property
    def working_bytes(self) -> int:
        """Returns the bytes of the batch and of tensors that live within one task only."""
        return self.memory[Use.WORK]

    @property
    def gradients_on_host(self) -> bool:
        """Returns whether gradients are in the host's memory instead of the device's."""
        return Use.GRADIENTS in self.memory.on_host

    @property
    def slots_on_host(self) -> bool:
        """Returns whether slots are in the host's memory instead of the device's."""
        return Use.SLOTS in self.memory.on_host

    @property
    def stored_bytes(self) -> int:
        """Returns all bytes that it holds at its fullest."""
        return self.memory.total

    @property
    def host_bytes(self) -> int:
        """Returns how many of its bytes are in the host's memory instead of the device's."""
        return self.memory.host

    @property
    def device_bytes(self) -> int:
        """Returns how many of its bytes are in the device's memory."""
        return self.stored_bytes - self.host_bytes
