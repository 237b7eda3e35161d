"""smp_tf: train a Keras model that is split over several processes.

    import smp_tf as smp

    smp.init({"partitions": 2, "microbatches": 4})

Importing this package imports neither TensorFlow nor Horovod: public names are looked up when they
are first used. What it does do at once is set two environment variables that TensorFlow and
Horovod read only while they start, and tell `horovodrun` that this rank has come so far, so
`import smp_tf` belongs above `import tensorflow`.
"""

from __future__ import annotations

import importlib
import os
import sys
import types
from typing import TYPE_CHECKING, Any

from smp_tf.version import __version__ as __version__

if TYPE_CHECKING:
    from smp_tf import callbacks
    from smp_tf.batch.output import StepOutput
    from smp_tf.checkpoint.manager import CheckpointManager
    from smp_tf.gradients.average import average_gradients
    from smp_tf.gradients.norms import clip_by_global_norm, global_norm
    from smp_tf.job.objects import allgather, barrier, broadcast, dp_barrier, mp_barrier, recv_from, send
    from smp_tf.job.ranks import (
        dp_rank,
        dp_size,
        get_dp_group,
        get_mp_group,
        local_rank,
        local_size,
        mp_rank,
        mp_size,
        pp_rank,
        pp_size,
        rank,
        rdp_rank,
        rdp_size,
        size,
        tp_rank,
        tp_size,
    )
    from smp_tf.model.manual_placement import partition
    from smp_tf.model.model import DistributedModel
    from smp_tf.optimizer.distributed_optimizer import DistributedOptimizer
    from smp_tf.optimizer.one_bit_adam import OneBitAdam
    from smp_tf.optimizer.one_bit_lamb import OneBitLAMB
    from smp_tf.partition.mesh import CommGroup, RankType
    from smp_tf.recording.record import timeline
    from smp_tf.start.lifecycle import init, is_initialized, shutdown
    from smp_tf.steps.post_partition_hooks import register_post_partition_hook
    from smp_tf.steps.step import step
    from smp_tf.training.dataset_shards import shard_dataset

    WORLD = CommGroup.WORLD
    MP_GROUP = CommGroup.MP_GROUP
    DP_GROUP = CommGroup.DP_GROUP
    PP_GROUP = CommGroup.PP_GROUP
    TP_GROUP = CommGroup.TP_GROUP
    RDP_GROUP = CommGroup.RDP_GROUP

# Public name -> "module" or "module:attribute path" (when the attribute is not the name itself).
_WHERE: dict[str, str] = {
    "init": "smp_tf.start.lifecycle",
    "shutdown": "smp_tf.start.lifecycle",
    "is_initialized": "smp_tf.start.lifecycle",
    "DistributedOptimizer": "smp_tf.optimizer.distributed_optimizer",
    "average_gradients": "smp_tf.gradients.average",
    "allgather": "smp_tf.job.objects",
    "barrier": "smp_tf.job.objects",
    "callbacks": "smp_tf:callbacks",
    "broadcast": "smp_tf.job.objects",
    "dp_barrier": "smp_tf.job.objects",
    "mp_barrier": "smp_tf.job.objects",
    "recv_from": "smp_tf.job.objects",
    "send": "smp_tf.job.objects",
    "CheckpointManager": "smp_tf.checkpoint.manager",
    "DistributedModel": "smp_tf.model.model",
    "clip_by_global_norm": "smp_tf.gradients.norms",
    "global_norm": "smp_tf.gradients.norms",
    "OneBitAdam": "smp_tf.optimizer.one_bit_adam",
    "OneBitLAMB": "smp_tf.optimizer.one_bit_lamb",
    "StepOutput": "smp_tf.batch.output",
    "shard_dataset": "smp_tf.training.dataset_shards",
    "partition": "smp_tf.model.manual_placement",
    "register_post_partition_hook": "smp_tf.steps.post_partition_hooks",
    "step": "smp_tf.steps.step",
    "timeline": "smp_tf.recording.record",
    "rank": "smp_tf.job.ranks",
    "size": "smp_tf.job.ranks",
    "local_rank": "smp_tf.job.ranks",
    "local_size": "smp_tf.job.ranks",
    "mp_rank": "smp_tf.job.ranks",
    "mp_size": "smp_tf.job.ranks",
    "dp_rank": "smp_tf.job.ranks",
    "dp_size": "smp_tf.job.ranks",
    "pp_rank": "smp_tf.job.ranks",
    "pp_size": "smp_tf.job.ranks",
    "tp_rank": "smp_tf.job.ranks",
    "tp_size": "smp_tf.job.ranks",
    "rdp_rank": "smp_tf.job.ranks",
    "rdp_size": "smp_tf.job.ranks",
    "get_mp_group": "smp_tf.job.ranks",
    "get_dp_group": "smp_tf.job.ranks",
    "CommGroup": "smp_tf.partition.mesh",
    "RankType": "smp_tf.partition.mesh",
    "WORLD": "smp_tf.job.topology:CommGroup.WORLD",
    "MP_GROUP": "smp_tf.job.topology:CommGroup.MP_GROUP",
    "DP_GROUP": "smp_tf.job.topology:CommGroup.DP_GROUP",
    "PP_GROUP": "smp_tf.job.topology:CommGroup.PP_GROUP",
    "TP_GROUP": "smp_tf.job.topology:CommGroup.TP_GROUP",
    "RDP_GROUP": "smp_tf.job.topology:CommGroup.RDP_GROUP",
}

__all__ = [
    "DP_GROUP",
    "MP_GROUP",
    "PP_GROUP",
    "RDP_GROUP",
    "TP_GROUP",
    "WORLD",
    "CheckpointManager",
    "CommGroup",
    "DistributedModel",
    "DistributedOptimizer",
    "OneBitAdam",
    "OneBitLAMB",
    "RankType",
    "StepOutput",
    "allgather",
    "average_gradients",
    "barrier",
    "broadcast",
    "callbacks",
    "clip_by_global_norm",
    "dp_barrier",
    "dp_rank",
    "dp_size",
    "get_dp_group",
    "get_mp_group",
    "global_norm",
    "init",
    "is_initialized",
    "local_rank",
    "local_size",
    "mp_barrier",
    "mp_rank",
    "mp_size",
    "partition",
    "pp_rank",
    "pp_size",
    "rank",
    "rdp_rank",
    "rdp_size",
    "recv_from",
    "register_post_partition_hook",
    "send",
    "shard_dataset",
    "shutdown",
    "size",
    "step",
    "timeline",
    "tp_rank",
    "tp_size",
]

# Names that a user can only use with tf_keras behind tf.keras.
_NEED_TF_KERAS = frozenset(
    {
        "CheckpointManager", "callbacks", "DistributedModel", "DistributedOptimizer", "clip_by_global_norm",
        "global_norm", "OneBitAdam", "OneBitLAMB", "step",
    }
)  # fmt: skip

# Public names that a room bears too: `smp.partition` is what a script calls.
_NAMED_LIKE_ROOMS = ("partition",)


class _PublicModule(types.ModuleType):
    """This module, in which importing a submodule does not hide the public name it shares."""


def _public_property(name: str) -> property:
    # Importing smp_tf.partition makes Python set the attribute `partition` to that package: it is not kept.
    return property(lambda module: __getattr__(name), lambda module, submodule: None)


for _name in _NAMED_LIKE_ROOMS:
    setattr(_PublicModule, _name, _public_property(_name))
sys.modules[__name__].__class__ = _PublicModule


def _find_rooms_beside_this_folder() -> None:
    """Makes `smp_tf.ops` and its neighbours importable from a checkout.

    The folders ops/, partition/ and pipeline/ are installed as `smp_tf.ops` and so on. In a
    checkout's root ./smp_tf shadows the installed package, so there its parent is searched too.
    """
    here = os.path.dirname(os.path.abspath(__file__))
    parent = os.path.dirname(here)
    is_checkout = os.path.isfile(os.path.join(parent, "setup.py")) and os.path.isfile(
        os.path.join(parent, "partition", "__init__.py")
    )
    if is_checkout and parent not in __path__:
        __path__.append(parent)


def _set_environment() -> None:
    """Sets what TensorFlow and Horovod read while they start; a value of the user's own stays."""
    from smp_tf.start.environment import prepare

    prepare()


def __getattr__(name: str) -> Any:
    where = _WHERE.get(name)
    if where is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in _NEED_TF_KERAS:
        from smp_tf.start.environment import require_tf_keras

        require_tf_keras()
    module_name, _, path = where.partition(":")
    if module_name == __name__:
        value: Any = importlib.import_module(f"{__name__}.{path}")
    else:
        value = importlib.import_module(module_name)
        for part in (path or name).split("."):
            value = getattr(value, part)
    # Bypasses __getattr__ next time.
    setattr(sys.modules[__name__], name, value)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _watch_horovod() -> None:
    """Sees to it that Horovod's functions, when the script imports them, know of smp_tf."""
    from smp_tf.horovod_scope import watch

    watch()


def _watch_import() -> None:
    """Lets a rank that its launcher ends before `smp.init` say why."""
    # What it takes to ask the launcher is imported only where there is one.
    if "HOROVOD_GLOO_RENDEZVOUS_ADDR" in os.environ:
        from smp_tf.start import import_watch

        import_watch.start()


def _keep_standard_descriptors() -> None:
    """Does so before libraries open files of theirs."""
    from smp_tf.start.standard_descriptors import open_those_missing

    open_those_missing()


_find_rooms_beside_this_folder()
_keep_standard_descriptors()
_set_environment()
_watch_import()
_watch_horovod()
