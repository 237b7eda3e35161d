"""Runs examples/resume.py, and kills rank 1 in the first try, when the first checkpoint is there."""

import os
import runpy
import signal
import sys
from pathlib import Path

import smp_tf as smp

folder = Path(sys.argv[1])
sys.argv = ["resume.py", "--checkpoints", str(folder), *sys.argv[2:]]
save = smp.CheckpointManager.save


def save_and_die(manager):
    """Saves, and ends rank 1 if the job has not failed yet."""
    saved = save(manager)
    smp.barrier()
    if os.environ["SMP_TF_TRY"] == "1" and smp.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return saved


smp.CheckpointManager.save = save_and_die
runpy.run_path(str(Path(__file__).resolve().parents[3] / "examples/resume.py"), run_name="__main__")
