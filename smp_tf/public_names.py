"""The public names of smp_tf, with where each comes from. They are only listed here.

Type checkers read these statements. `import smp_tf` must load no TensorFlow, so nothing imports this file at run time.
smp_tf/__init__.py reads its statements, and runs one when its name is first used.
"""

from __future__ import annotations

from smp_tf import callbacks as callbacks
from smp_tf.batch.output import StepOutput as StepOutput
from smp_tf.checkpoint.manager import CheckpointManager as CheckpointManager
from smp_tf.gradients.average import average_gradients as average_gradients
from smp_tf.gradients.norms import clip_by_global_norm as clip_by_global_norm
from smp_tf.gradients.norms import global_norm as global_norm
from smp_tf.job.objects import allgather as allgather
from smp_tf.job.objects import barrier as barrier
from smp_tf.job.objects import broadcast as broadcast
from smp_tf.job.objects import dp_barrier as dp_barrier
from smp_tf.job.objects import mp_barrier as mp_barrier
from smp_tf.job.objects import recv_from as recv_from
from smp_tf.job.objects import send as send
from smp_tf.job.ranks import dp_rank as dp_rank
from smp_tf.job.ranks import dp_size as dp_size
from smp_tf.job.ranks import get_dp_group as get_dp_group
from smp_tf.job.ranks import get_mp_group as get_mp_group
from smp_tf.job.ranks import local_rank as local_rank
from smp_tf.job.ranks import local_size as local_size
from smp_tf.job.ranks import mp_rank as mp_rank
from smp_tf.job.ranks import mp_size as mp_size
from smp_tf.job.ranks import pp_rank as pp_rank
from smp_tf.job.ranks import pp_size as pp_size
from smp_tf.job.ranks import rank as rank
from smp_tf.job.ranks import rdp_rank as rdp_rank
from smp_tf.job.ranks import rdp_size as rdp_size
from smp_tf.job.ranks import size as size
from smp_tf.job.ranks import tp_rank as tp_rank
from smp_tf.job.ranks import tp_size as tp_size
from smp_tf.model.manual_placement import partition as partition
from smp_tf.model.model import DistributedModel as DistributedModel
from smp_tf.optimizer.distributed_optimizer import DistributedOptimizer as DistributedOptimizer
from smp_tf.optimizer.one_bit_adam import OneBitAdam as OneBitAdam
from smp_tf.optimizer.one_bit_lamb import OneBitLAMB as OneBitLAMB
from smp_tf.partition.mesh import CommGroup as CommGroup
from smp_tf.partition.mesh import RankType as RankType
from smp_tf.recording.record import timeline as timeline
from smp_tf.start.lifecycle import init as init
from smp_tf.start.lifecycle import is_initialized as is_initialized
from smp_tf.start.lifecycle import shutdown as shutdown
from smp_tf.steps.post_partition_hooks import register_post_partition_hook as register_post_partition_hook
from smp_tf.training.dataset_shards import shard_dataset as shard_dataset
from smp_tf.whole_batch.decorator import step as step

WORLD = CommGroup.WORLD
MP_GROUP = CommGroup.MP_GROUP
DP_GROUP = CommGroup.DP_GROUP
PP_GROUP = CommGroup.PP_GROUP
TP_GROUP = CommGroup.TP_GROUP
RDP_GROUP = CommGroup.RDP_GROUP
