"""The configuration: its keys, where they are read from, and what their values may be.

`KEYS` is the one table of keys.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from smp_tf.config.files import nearest, parse_json, read_mapping
from smp_tf.config.values import (
    RefusedError,
    boolean,
    boolean_or,
    byte_count,
    integer,
    kind_of,
    one_of,
    optional,
    path,
    schedule,
    seconds,
)
from smp_tf.errors import ConfigError
from smp_tf.pipeline.errors import ScheduleError
from smp_tf.pipeline.schedules.schedule import IN_ORDER, SCHEDULES, is_named
from smp_tf.pipeline.schedules.schedule_file import load_schedule

ENVIRONMENT_VARIABLE = "SM_HP_MP_PARAMETERS"

#: The kind of compression in which an optimizer sends what it makes of gradients.
ONE_BIT = "1bit"

STRATEGIES = ("cluster", "spread", "DPT", "DTP", "PDT", "PTD", "TDP", "TPD")


@dataclasses.dataclass(frozen=True)
class Key:
    """One configuration key.

    Args:
        default: Its value when it is not given.
        check: Returns the value in its own type or refuses it.
        allowed: The legal values, in words.
        meaning: What it sets, in words.
    """

    default: Any
    check: Callable[[Any], Any]
    allowed: str
    meaning: str


KEYS: dict[str, Key] = {
    "partitions": Key(
        None,
        optional(integer(1)),
        "an int of at least 1 that divides the number of processes",
        "stages a model replica is cut into (default: all processes)",
    ),
    "microbatches": Key(1, integer(1), "an int of at least 1", "parts a batch is cut into"),
    "pipeline": Key(
        "interleaved",
        schedule(*IN_ORDER, "auto"),
        '"interleaved" (backward has priority), "simple" (all forwards, then all backwards), "zb_h1" (gradients of '
        'weights wait until there is nothing else to do), "interleaved_1f1b", "zb_v", "v_half" or "v_min" (several '
        'chunks per rank), "auto" (the fastest that fits) or the path of a .txt file that lists a schedule',
        "the order of forward and backward passes",
    ),
    "optimize": Key(
        "memory",
        one_of("memory", "speed"),
        '"memory" or "speed"',
        "what the stages are balanced by: stored bytes or time per microbatch",
    ),
    "placement_strategy": Key(
        "cluster",
        one_of(*STRATEGIES),
        '"cluster", "spread", or a permutation of the letters D, P and T such as "DPT"',
        "how stages and replicas are laid out over the processes",
    ),
    "auto_partition": Key(
        True,
        boolean,
        "true or false",
        "whether smp_tf chooses the stages, or the script does with smp.partition",
    ),
    "default_partition": Key(
        0,
        integer(0),
        "an int of at least 0 and below partitions",
        "where what is outside any smp.partition goes when auto_partition is false",
    ),
    "contiguous": Key(
        True,
        boolean,
        "true or false",
        "whether a rank with one chunk has one run of the graph in topological order; false allows several",
    ),
    "horovod": Key(
        None,
        optional(boolean),
        "true or false",
        "data parallelism over replicas (default: true if there are several)",
    ),
    "partition_file": Key(
        None,
        optional(path),
        "a path",
        "where the plan is written, or read from with load_partition",
    ),
    "load_partition": Key(
        False,
        boolean,
        "true or false",
        "run with the plan in partition_file",
    ),
    "chunks_per_rank": Key(
        None,
        optional(integer(1)),
        "an int of at least 1",
        "chunks of the model that each rank has (default: as few as pipeline takes, 1 or 2)",
    ),
    "memory_limit": Key(
        None,
        optional(byte_count),
        'a number of bytes of at least 1, such as 17179869184, "16GiB" or "16 GB"',
        "the most bytes that a rank may need for tensors, as the plan forecasts them",
    ),
    "seed": Key(
        None,
        optional(integer(0, 2**32 - 1)),
        "an int from 0 to 4294967295",
        "the seed of Python, NumPy and TensorFlow (default: drawn)",
    ),
    "stall_timeout": Key(
        1800.0,
        seconds,
        "a number of seconds above 0",
        "how long a rank that is alive may keep the others waiting",
    ),
    "check_inputs": Key(
        True,
        boolean,
        "true or false",
        "compare the step's inputs between the ranks of a replica, and name replicas that are given equal ones",
    ),
    "check_replicas": Key(
        True,
        boolean,
        "true or false",
        "compare the trainable weights of the replicas before the second step and every 100th (with "
        "shard_optimizer_state before the first, too), and optimizers when they are first used",
    ),
    "check_losses": Key(
        True,
        boolean_or("warn"),
        'true, false or "warn"',
        "hold the losses and metrics of fit, on the first batch of every structure, against those of the whole batch, "
        'and look for nonlinear uses of gradients: a difference is an error, or said with "warn"',
    ),
    "gradient_compression": Key(
        None,
        optional(one_of("bf16", "fp16", ONE_BIT)),
        '"bf16", "fp16" or "1bit"',
        "send dense gradients to other replicas in two bytes an element, and add them up in float32; or leave it to "
        "smp.OneBitAdam or smp.OneBitLAMB to send one bit an element after a warm-up (default: whole)",
    ),
    "shard_optimizer_state": Key(
        False,
        boolean,
        "true or false",
        "each replica keeps the optimizer's slots of a share of its stage's weights, updates these, and hands them out",
    ),
    "gradient_offload": Key(
        False,
        boolean,
        "true or false",
        "add gradients up in the host's memory, and let its processors average them, in equal parts per replica",
    ),
    "optimizer_offload": Key(
        False,
        boolean,
        "true or false",
        "keep the optimizer's slots in the host's memory and update weights there (with gradient_offload and, over "
        "replicas, shard_optimizer_state, which it turns on)",
    ),
    "recompute": Key(
        False,
        boolean,
        "true or false",
        "make again in backward what layers made in forward, in place of keeping it: less memory for more to compute",
    ),
    "intra_op_threads": Key(
        None,
        optional(integer(1)),
        "an int of at least 1",
        "TensorFlow's threads per op (default: the host's cores shared out among its processes)",
    ),
    "inter_op_threads": Key(
        None,
        optional(integer(1)),
        "an int of at least 1",
        "how many ops TensorFlow runs at once (default: its own choice, as many as the host has cores)",
    ),
    "xla": Key(
        False,
        boolean,
        "true or false",
        "compile the stage functions with XLA, where XLA can",
    ),
}

ALIASES = {"pipeline_parallel_degree": "partitions"}

IGNORED = {"fork": "smp_tf never forks"}

# Keys of other libraries, with what to write instead.
_FOREIGN = {
    "ddp": "it belongs to PyTorch; data parallelism is the key 'horovod' here",
    "tensor_parallel_degree": "tensor parallelism is not supported",
}


@dataclasses.dataclass(frozen=True)
class Config:
    """A checked configuration; see `KEYS` for what each field means.

    `partitions` and `horovod` are None until `for_world` decides them.
    """

    partitions: int | None = None
    microbatches: int = 1
    pipeline: str = "interleaved"
    optimize: str = "memory"
    placement_strategy: str = "cluster"
    auto_partition: bool = True
    default_partition: int = 0
    contiguous: bool = True
    horovod: bool | None = None
    partition_file: str | None = None
    load_partition: bool = False
    chunks_per_rank: int | None = None
    memory_limit: int | None = None
    seed: int | None = None
    stall_timeout: float = 1800.0
    check_inputs: bool = True
    check_replicas: bool = True
    check_losses: bool | str = True
    gradient_compression: str | None = None
    shard_optimizer_state: bool = False
    gradient_offload: bool = False
    optimizer_offload: bool = False
    recompute: bool = False
    intra_op_threads: int | None = None
    inter_op_threads: int | None = None
    xla: bool = False
    notes: tuple[str, ...] = dataclasses.field(default=(), compare=False)

    def as_json(self) -> dict[str, Any]:
        """All keys and values, for comparison with another rank's."""
        return {name: getattr(self, name) for name in KEYS}

    def for_world(self, world_size: int, *, launched: bool = True) -> Config:
        """Decides what depends on the number of processes.

        Args:
            world_size: The number of processes.
            launched: Whether a launcher started this process. Without one there is a single
                process, and `partitions` becomes 1.

        Returns:
            A configuration whose `partitions` and `horovod` are set.

        Raises:
            ConfigError: Partitions and processes do not fit each other.
        """
        partitions, default_partition, notes = self.partitions, self.default_partition, list(self.notes)
        chunks_per_rank = self.chunks_per_rank
        if partitions is None:
            partitions = world_size
        elif world_size == 1 and not launched and partitions > 1:
            notes.append(
                f"One process and no launcher: partitions is 1 instead of {partitions}. To split "
                f"the model, start the script with: horovodrun -np {partitions} python <script>"
            )
            partitions, default_partition = 1, 0
        if world_size % partitions:
            legal = ", ".join(str(n) for n in range(1, world_size + 1) if world_size % n == 0)
            raise ConfigError(
                f"partitions must divide the number of processes: {partitions} does not divide "
                f"{world_size}. With {world_size} processes it can be {legal}; with {partitions} "
                f"partitions, start {partitions} processes or a multiple of that."
            )
        if default_partition >= partitions:
            raise ConfigError(
                f"default_partition is {default_partition}, but with {partitions} partitions "
                f"it must be below {partitions}."
            )
        if partitions == 1 and self.partition_file is not None:
            notes.append(
                f"With one partition there is nothing to place: the file {self.partition_file} is neither read nor "
                f"written."
            )
        pipeline = self.pipeline
        if partitions == 1 and not is_named(pipeline):
            pipeline = "interleaved"
            notes.append("With one partition there is nothing to schedule: the file that pipeline names is not used.")
        if partitions == 1 and pipeline in SCHEDULES and SCHEDULES[pipeline].chunks_per_rank > 1:
            notes.append(f"With one partition there is nothing to schedule: pipeline {pipeline!r} is not used.")
            pipeline, chunks_per_rank = "interleaved", None
        _require_schedule_for(pipeline, partitions, self.microbatches, chunks_per_rank)
        replicas = world_size // partitions
        shares_slots, offloads_gradients = self.shard_optimizer_state, self.gradient_offload
        compression = self.gradient_compression
        if compression == ONE_BIT and replicas == 1:
            notes.append('With one replica nothing is sent to others: "gradient_compression": "1bit" is not used.')
            compression = None
        if compression == ONE_BIT:
            self.refuse_beside_one_bit()
        if self.optimizer_offload:
            if not offloads_gradients:
                notes.append("Weights are updated on the host (optimizer_offload), so gradient_offload is used too.")
                offloads_gradients = True
            if not shares_slots and replicas > 1:
                notes.append("Weights are updated on the host (optimizer_offload): shard_optimizer_state is used too.")
                shares_slots = True
        if offloads_gradients and world_size == self.microbatches == 1:
            notes.append("With one process and one microbatch no gradients are added up: gradient_offload is not used.")
            offloads_gradients = False
        if offloads_gradients and self.xla:
            raise ConfigError(
                f"xla is true, and so is {'gradient' if self.gradient_offload else 'optimizer'}_offload: XLA compiles "
                f"a function for one device, and it would add gradients up on another. Leave out one of the two keys."
            )
        if shares_slots and replicas == 1:
            notes.append("With one replica there is nobody to share slots with: shard_optimizer_state is not used.")
            shares_slots = False
        if self.horovod is False and replicas > 1:
            raise ConfigError(
                f"horovod is false, but {world_size} processes and {partitions} partitions make "
                f"{replicas} replicas, whose gradients would never be averaged. Remove the key, or "
                f"use {world_size} partitions or {partitions} processes."
            )
        return dataclasses.replace(
            self,
            partitions=partitions,
            default_partition=default_partition,
            pipeline=pipeline,
            chunks_per_rank=chunks_per_rank,
            horovod=replicas > 1,
            gradient_compression=compression,
            shard_optimizer_state=shares_slots,
            gradient_offload=offloads_gradients,
            notes=tuple(notes),
        )

    def refuse_beside_one_bit(self) -> None:
        """Refuses what 1-bit optimizers do not work beside: they need all momenta of a stage where the gradients are.

        Raises:
            ConfigError: it is set.
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
        config: A mapping, the path of a JSON or YAML file, or None for the JSON in the environment
            variable SM_HP_MP_PARAMETERS, or the defaults when that is not set.

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
        source: Where they were found, in words, for error messages.

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


def _require_schedule_for(pipeline: str, partitions: int, microbatches: int, chunks_per_rank: int | None) -> None:
    """A schedule has a number of chunks per rank; one that somebody wrote is for so many ranks and microbatches."""
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
    """A plan that is loaded comes from a file, and from nowhere else."""
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
    if name in _FOREIGN:
        return f"{name!r} in {source} is not a key of smp_tf: {_FOREIGN[name]}."
    known = sorted([*KEYS, *ALIASES])
    return f"{name!r} in {source} is not a key.{nearest(name, known)} The keys are: {', '.join(known)}."
