"""The keys of the configuration, each with its type, its default, its legal values and its meaning.

A key stands only here. `KEYS`, the fields of a configuration and the table in the docs are made from it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from smp_tf.config.values import (
    boolean,
    boolean_or,
    byte_count,
    integer,
    one_of,
    optional,
    path,
    schedule,
    seconds,
    share,
)
from smp_tf.pipeline.schedules.schedule import IN_ORDER

#: The kind of compression in which an optimizer sends what it computes from gradients.
ONE_BIT = "1bit"

STRATEGIES = ("cluster", "spread", "DPT", "DTP", "PDT", "PTD", "TDP", "TPD")


@dataclasses.dataclass(frozen=True)
class Key:
    """One configuration key.

    Args:
        default: its value when it is not given.
        check: returns the value in its own type or refuses it.
        allowed: words for the legal values.
        meaning: words for what it sets.
    """

    default: Any
    check: Callable[[Any], Any]
    allowed: str
    meaning: str


def _key(default: Any, check: Callable[[Any], Any], allowed: str, meaning: str) -> Any:
    """Returns a field of `Keys`. The arguments are those of `Key`."""
    return dataclasses.field(default=default, metadata={"key": Key(default, check, allowed, meaning)})


@dataclasses.dataclass(frozen=True)
class Keys:
    """Holds a value for every key."""

    partitions: int | None = _key(
        None,
        optional(integer(1)),
        "an int of at least 1 that divides the number of processes",
        "stages a model replica is cut into (default: all processes)",
    )
    microbatches: int = _key(1, integer(1), "an int of at least 1", "parts a batch is cut into")
    pipeline: str = _key(
        "interleaved",
        schedule(*IN_ORDER, "auto"),
        '"interleaved" (backward has priority), "simple" (all forwards, then all backwards), "zb_h1" (gradients of '
        'weights wait until there is nothing else to do), "interleaved_1f1b", "zb_v", "v_half" or "v_min" (several '
        'chunks per rank), "auto" (the fastest that fits) or the path of a .txt file that lists a schedule',
        "the order of forward and backward passes",
    )
    optimize: str = _key(
        "memory",
        one_of("memory", "speed"),
        '"memory" or "speed"',
        "what the stages are balanced by: stored bytes or time per microbatch",
    )
    balance_tolerance: float = _key(
        0.05,
        share,
        "a number from 0 to 1",
        "the share by which stages may be less balanced than the best so that they send fewer bytes; 0 for the best "
        "balance",
    )
    placement_strategy: str = _key(
        "cluster",
        one_of(*STRATEGIES),
        '"cluster", "spread", or a permutation of the letters D, P and T such as "DPT"',
        "how stages and replicas are laid out over the processes",
    )
    auto_partition: bool = _key(
        True,
        boolean,
        "true or false",
        "whether smp_tf chooses the stages, or the script does with smp.partition",
    )
    default_partition: int = _key(
        0,
        integer(0),
        "an int of at least 0 and below partitions",
        "where what is outside any smp.partition goes when auto_partition is false",
    )
    contiguous: bool = _key(
        True,
        boolean,
        "true or false",
        "whether a rank with one chunk has one run of the graph in topological order; false allows several",
    )
    horovod: bool | None = _key(
        None,
        optional(boolean),
        "true or false",
        "data parallelism over replicas (default: true if there are several)",
    )
    partition_file: str | None = _key(
        None,
        optional(path),
        "a path",
        "where the plan is written, or read from with load_partition",
    )
    load_partition: bool = _key(
        False,
        boolean,
        "true or false",
        "run with the plan in partition_file",
    )
    chunks_per_rank: int | None = _key(
        None,
        optional(integer(1)),
        "an int of at least 1",
        "chunks of the model that each rank has (default: as few as pipeline takes, 1 or 2)",
    )
    memory_limit: int | None = _key(
        None,
        optional(byte_count),
        'a number of bytes of at least 1, such as 17179869184, "16GiB" or "16 GB"',
        "the most bytes that a rank may need for tensors, as the plan forecasts them",
    )
    seed: int | None = _key(
        None,
        optional(integer(0, 2**32 - 1)),
        "an int from 0 to 4294967295",
        "the seed of Python, NumPy and TensorFlow (default: drawn)",
    )
    stall_timeout: float = _key(
        1800.0,
        seconds,
        "a number of seconds above 0",
        "how long a rank that is alive may keep the others waiting",
    )
    check_inputs: bool = _key(
        True,
        boolean,
        "true or false",
        "compare the step's inputs between the ranks of a replica, and name replicas that are given equal ones",
    )
    check_replicas: bool = _key(
        True,
        boolean,
        "true or false",
        "compare the trainable weights of the replicas before the second step and every 100th (with "
        "shard_optimizer_state before the first, too), and optimizers when they are first used",
    )
    check_losses: bool | str = _key(
        True,
        boolean_or("warn"),
        'true, false or "warn"',
        "hold the losses and metrics of fit, on the first batch of every structure, against those of the whole batch, "
        'and look for nonlinear uses of gradients: a difference is an error, or said with "warn"',
    )
    gradient_compression: str | None = _key(
        None,
        optional(one_of("bf16", "fp16", ONE_BIT)),
        '"bf16", "fp16" or "1bit"',
        "send dense gradients to other replicas in two bytes an element, and add them up in float32; or leave it to "
        "smp.OneBitAdam or smp.OneBitLAMB to send one bit an element after a warm-up (default: whole)",
    )
    shard_optimizer_state: bool = _key(
        False,
        boolean,
        "true or false",
        "each replica keeps the optimizer's slots of a share of its stage's weights, updates these, and hands them out",
    )
    gradient_offload: bool = _key(
        False,
        boolean,
        "true or false",
        "add gradients up in the host's memory, and let its processors average them, in equal parts per replica",
    )
    optimizer_offload: bool = _key(
        False,
        boolean,
        "true or false",
        "keep the optimizer's slots in the host's memory and update weights there (with gradient_offload and, over "
        "replicas, shard_optimizer_state, which it turns on)",
    )
    recompute: bool = _key(
        False,
        boolean,
        "true or false",
        "make again in backward what layers made in forward, in place of keeping it: less memory for more to compute",
    )
    intra_op_threads: int | None = _key(
        None,
        optional(integer(1)),
        "an int of at least 1",
        "TensorFlow's threads per op (default: the host's cores shared out among its processes)",
    )
    inter_op_threads: int | None = _key(
        None,
        optional(integer(1)),
        "an int of at least 1",
        "how many ops TensorFlow runs at once (default: its own choice, as many as the host has cores)",
    )
    xla: bool = _key(
        False,
        boolean,
        "true or false",
        "compile the stage functions with XLA, where XLA can",
    )


#: The keys by their names.
KEYS: dict[str, Key] = {field.name: field.metadata["key"] for field in dataclasses.fields(Keys)}

#: Other names of keys.
ALIASES = {"pipeline_parallel_degree": "partitions"}

#: Names that change nothing, and why.
IGNORED = {"fork": "smp_tf never forks"}

#: Keys of other libraries, with what to write instead.
FOREIGN = {
    "ddp": "it belongs to PyTorch; data parallelism is the key 'horovod' here",
    "tensor_parallel_degree": "tensor parallelism is not supported",
}
