"""`smp.utils`, by the name that SageMaker's library gives it: files between ranks."""

from smdistributed.modelparallel.tensorflow.checkpoint_files import (
    receive_checkpoint_files,
    send_checkpoint_files,
)

__all__ = ["receive_checkpoint_files", "send_checkpoint_files"]
