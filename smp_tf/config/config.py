"""Reads a configuration, checks it, and completes it for a number of processes."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from smp_tf.config.files import nearest, parse_json, read_mapping
from smp_tf.config.keys import ALIASES, FOREIGN, IGNORED, KEYS, ONE_BIT, Keys
from smp_tf.config.values import RefusedError, kind_of
from smp_tf.errors import ConfigError
from smp_tf.pipeline.errors import ScheduleError
from smp_tf.pipeline.schedules.schedule import SCHEDULES, is_named
from smp_tf.pipeline.schedules.schedule_file import load_schedule

ENVIRONMENT_VARIABLE = "SM_HP_MP_PARAMETERS"


@dataclasses.dataclass(frozen=True)
class Config(Keys):
    """A checked configuration: a value for every key.

    `partitions` and `horovod` are None until `for_world` sets them.

    Args:
        notes: sentences for the user about keys that are not used as they were given.
    """

    notes: tuple[str, ...] = dataclasses.field(default=(), compare=False)

    def as_json(self) -> dict[str, Any]:
        """Returns all keys and values, for comparison with another rank's."""
        return {name: getattr(self, name) for name in KEYS}

    def for_world(self, world_size: int, *, launched: bool = True) -> Config:
        """Sets what depends on the number of processes.

        Args:
            world_size: The number of processes.
            launched: Whether a launcher started this process. Without one there is a single
                process, and `partitions` becomes 1.

        Returns:
            A configuration whose `partitions` and `horovod` are set.

        Raises:
            ConfigError: Partitions and processes do not fit each other.
        """
        decided = _with_partitions(self, world_size, launched=launched)
        decided = _with_schedule(decided)
        decided = _with_compression(decided, world_size)
        decided = _with_offload(decided, world_size, self)
        return _with_replicas(decided, world_size)

    def refuse_beside_one_bit(self) -> None:
        """Refuses keys that 1-bit optimizers exclude, since they need all momenta of a stage where the gradients are.

        Raises:
            ConfigError: such a key is set.
        """
        for name in ("shard_optimizer_state", "gradient_offload", "optimizer_offload"):
            if getattr(self, name):
                raise ConfigError(
                    f'gradient_compression is "{ONE_BIT}", and {name} is true: the optimizer of each replica averages '
                    f"the momenta of all of its stage's weights, on the device. Leave out one of the two keys."
                )


def load_config(config: Mapping[str, Any] | str | os.PathLike[str] | None = None) -> Config:
    """Reads and checks a configuration.

    Args:
        config: A mapping; the path of a JSON or YAML file; or None for the JSON in the environment variable
            SM_HP_MP_PARAMETERS, and for the defaults when that is not set.

    Returns:
        The checked configuration.

    Raises:
        ConfigError: A key is unknown or given twice, or a value is not allowed.
    """
    if isinstance(config, Mapping):
        return check_config(config, "smp.init")
    if isinstance(config, (str, os.PathLike)):
        return check_config(read_mapping(Path(config)), f"the file {os.fspath(config)}")
    if config is not None:
        raise ConfigError(
            "smp.init takes a mapping, the path of a JSON or YAML file, or None; this is "
            f"{kind_of(config)}: {config!r}."
        )
    text = os.environ.get(ENVIRONMENT_VARIABLE)
    if text is None:
        return Config()
    source = f"the environment variable {ENVIRONMENT_VARIABLE}"
    return check_config(parse_json(text, source), source)


def check_config(values: Mapping[str, Any], source: str) -> Config:
    """Checks keys and values.

    Args:
        values: The keys as given.
        source: Words for where they were found, for error messages.

    Returns:
        The checked configuration.

    Raises:
        ConfigError: A key is unknown or given twice, or a value is not allowed.
    """
    checked: dict[str, Any] = {}
    given_as: dict[str, str] = {}
    notes = []
    for name, value in values.items():
        if name in IGNORED:
            notes.append(f"The key {name!r} in {source} is ignored: {IGNORED[name]}.")
            continue
        key_name = ALIASES.get(name, name)
        key = KEYS.get(key_name) if isinstance(key_name, str) else None
        if key is None:
            raise ConfigError(_unknown(name, source))
        try:
            checked_value = key.check(value)
        except RefusedError:
            received = "None" if value is None else f"{type(value).__name__} {value!r}"
            raise ConfigError(
                f"{name!r} in {source} must be {key.allowed}; this is {received}. It sets: {key.meaning}."
            ) from None
        if key_name in checked and checked[key_name] != checked_value:
            raise ConfigError(
                f"{given_as[key_name]!r} and {name!r} in {source} mean the same, but say "
                f"{checked[key_name]!r} and {checked_value!r}. Keep one of them."
            )
        checked[key_name] = checked_value
        given_as[key_name] = name
    _refuse_two_placements(checked, source)
    return Config(**checked, notes=tuple(notes))


def _noted(config: Config, note: str, **changes: Any) -> Config:
    """Returns a configuration with a note, and with other values for some keys."""
    return dataclasses.replace(config, notes=(*config.notes, note), **changes)


def _with_partitions(config: Config, world_size: int, *, launched: bool) -> Config:
    """Decides the number of partitions."""
    partitions = config.partitions
    if partitions is None:
        config = dataclasses.replace(config, partitions=(partitions := world_size))
    elif world_size == 1 and not launched and partitions > 1:
        note = (
            f"One process and no launcher: partitions is 1 instead of {partitions}. To split "
            f"the model, start the script with: horovodrun -np {partitions} python <script>"
        )
        partitions = 1
        config = _noted(config, note, partitions=1, default_partition=0)
    if world_size % partitions:
        legal = ", ".join(str(n) for n in range(1, world_size + 1) if world_size % n == 0)
        raise ConfigError(
            f"partitions must divide the number of processes: {partitions} does not divide "
            f"{world_size}. With {world_size} processes it can be {legal}; with {partitions} "
            f"partitions, start {partitions} processes or a multiple of that."
        )
    if config.default_partition >= partitions:
        raise ConfigError(
            f"default_partition is {config.default_partition}, but with {partitions} partitions "
            f"it must be below {partitions}."
        )
    if partitions == 1 and config.partition_file is not None:
        return _noted(
            config,
            f"With one partition there is nothing to place: the file {config.partition_file} is neither read nor "
            f"written.",
        )
    return config


def _with_schedule(config: Config) -> Config:
    """Decides the schedule. One partition has none to choose; several need one that is defined for their number."""
    if config.partitions == 1 and not is_named(config.pipeline):
        config = _noted(
            config,
            "With one partition there is nothing to schedule: the file that pipeline names is not used.",
            pipeline="interleaved",
        )
    pipeline = config.pipeline
    if config.partitions == 1 and pipeline in SCHEDULES and SCHEDULES[pipeline].chunks_per_rank > 1:
        config = _noted(
            config,
            f"With one partition there is nothing to schedule: pipeline {pipeline!r} is not used.",
            pipeline="interleaved",
            chunks_per_rank=None,
        )
    _require_schedule(config)
    return config


def _with_compression(config: Config, world_size: int) -> Config:
    """Turns 1-bit compression off where nothing is sent, and refuses it where it is impossible."""
    if config.gradient_compression != ONE_BIT:
        return config
    if world_size == config.partitions:
        return _noted(
            config,
            'With one replica nothing is sent to others: "gradient_compression": "1bit" is not used.',
            gradient_compression=None,
        )
    config.refuse_beside_one_bit()
    return config


def _with_offload(config: Config, world_size: int, given: Config) -> Config:
    """Decides what is kept on the host, and whether replicas share slots.

    Args:
        config: the configuration decided so far.
        world_size: the number of processes.
        given: the keys and values that the user wrote.
    """
    has_replicas = world_size != config.partitions
    if config.optimizer_offload and not config.gradient_offload:
        note = "Weights are updated on the host (optimizer_offload), so gradient_offload is used too."
        config = _noted(config, note, gradient_offload=True)
    if config.optimizer_offload and not config.shard_optimizer_state and has_replicas:
        note = "Weights are updated on the host (optimizer_offload): shard_optimizer_state is used too."
        config = _noted(config, note, shard_optimizer_state=True)
    if config.gradient_offload and world_size == config.microbatches == 1:
        note = "With one process and one microbatch no gradients are added up: gradient_offload is not used."
        config = _noted(config, note, gradient_offload=False)
    if config.gradient_offload and config.xla:
        raise ConfigError(
            f"xla is true, and so is {'gradient' if given.gradient_offload else 'optimizer'}_offload: XLA compiles "
            f"a function for one device, and it would add gradients up on another. Leave out one of the two keys."
        )
    if config.shard_optimizer_state and not has_replicas:
        note = "With one replica there is nobody to share slots with: shard_optimizer_state is not used."
        config = _noted(config, note, shard_optimizer_state=False)
    return config


def _with_replicas(config: Config, world_size: int) -> Config:
    """Decides whether gradients are averaged over replicas."""
    replicas = world_size // (config.partitions or 1)
    if config.horovod is False and replicas > 1:
        raise ConfigError(
            f"horovod is false, but {world_size} processes and {config.partitions} partitions make "
            f"{replicas} replicas, whose gradients would never be averaged. Remove the key, or "
            f"use {world_size} partitions or {config.partitions} processes."
        )
    return dataclasses.replace(config, horovod=replicas > 1)


def _require_schedule(config: Config) -> None:
    """Refuses a schedule that is not defined for the numbers of chunks per rank, ranks and microbatches."""
    pipeline, chunks_per_rank = config.pipeline, config.chunks_per_rank
    partitions, microbatches = config.partitions or 1, config.microbatches
    if pipeline in SCHEDULES:
        try:
            SCHEDULES[pipeline].chunks_for(chunks_per_rank)
        except ScheduleError as error:
            raise ConfigError(f"pipeline and chunks_per_rank do not go together. {error}.") from None
    if is_named(pipeline):
        return
    if chunks_per_rank is not None:
        raise ConfigError(
            f"The file that pipeline names says itself which chunks each rank has. Received: chunks_per_rank = "
            f"{chunks_per_rank}. Leave chunks_per_rank out."
        )
    try:
        load_schedule(pipeline, partitions, microbatches)
    except ScheduleError as error:
        raise ConfigError(
            f"The schedule in the file that pipeline names is not for {partitions} partitions and {microbatches} "
            f"microbatches. {error}"
        ) from None


def _refuse_two_placements(checked: Mapping[str, Any], source: str) -> None:
    """Refuses a plan that comes from a file and from elsewhere as well."""
    if not checked.get("load_partition"):
        return
    if checked.get("partition_file") is None:
        raise ConfigError(
            f"load_partition in {source} is true, but there is no partition_file, which names the plan to load. Give "
            f"both, or neither."
        )
    if checked.get("auto_partition") is False:
        raise ConfigError(
            f"In {source}, load_partition = true takes the partitions from a file, and auto_partition = false takes "
            f"them from smp.partition in the script. Leave one of the two out."
        )


def _unknown(name: Any, source: str) -> str:
    if name in FOREIGN:
        return f"{name!r} in {source} is not a key of smp_tf: {FOREIGN[name]}."
    known = sorted([*KEYS, *ALIASES])
    return f"{name!r} in {source} is not a key.{nearest(name, known)} The keys are: {', '.join(known)}."
