"""One process of Keras, which trains the GPT in its turns, alone or as a rank of smp_tf's pipeline.

    python keras_trainer.py serial SIZE MICROBATCHES THREADS PLAN SOCKET
    horovodrun -np 2 python keras_trainer.py gpipe SIZE MICROBATCHES THREADS PLAN SOCKET

PLAN is "estimate" or "profile": what the plan takes for the times of layers and messages.

It is the counterpart of `torch_trainer.py`. `versus_torch.py` starts both.
"""

from __future__ import annotations

import gc
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from harness.answers import answer, forget_peak, resident
from versus.settings import LEARNING_RATE, PAIRS

from processes import memory_parts
from processes.trainer import SEED, Accumulating, Split, Trainer


def run(trainer: Trainer, count: int) -> dict[str, Any]:
    """Runs some steps, and returns when they began and ended, processor time and memory."""
    forget_peak()
    used, began = time.process_time(), time.monotonic()
    for _ in range(count):
        loss = trainer.train(*trainer.batch)
    last = float(loss)
    return {
        "began": began,
        "ended": time.monotonic(),
        "loss": last,
        "cpu_seconds": time.process_time() - used,
        "resident_peak": resident("VmHWM"),
        "resident_before_model": trainer.baseline,
    }


class Serial(Accumulating):
    """Plain Keras in one process, microbatch after microbatch, with gradients added up."""

    def __init__(self, size: Any, microbatches: int) -> None:
        import tf_keras

        super().__init__(size, microbatches)
        self.optimizer = tf_keras.optimizers.SGD(LEARNING_RATE)

    def write(self, folder: str) -> dict[str, int]:
        """Writes the weights and the batch that all begin with, and returns how many numbers the weights have."""
        self.model(self.batch[0][:1])
        weights = self.model.get_weights()
        with (Path(folder) / "weights").open("wb") as file:
            for weight in weights:
                weight.tofile(file)
        for name, tokens in zip(("tokens", "following"), self.batch, strict=True):
            tokens.numpy().tofile(Path(folder) / name)
        return {"parameters": sum(weight.size for weight in weights)}

    def steps(self, count: int) -> dict[str, Any]:
        """Runs some steps, and returns when they began and ended, and memory."""
        return {**run(self, count), "sent_bytes": 0, "tasks": []}


class Pipeline(Split):
    """This process is one rank of smp_tf's pipeline."""

    def __init__(self, size: Any, microbatches: int, plan: str) -> None:
        import tf_keras

        self._at_start = memory_parts.parts()
        super().__init__(size, microbatches)
        self._plan = plan
        self.optimizer = tf_keras.optimizers.SGD(LEARNING_RATE)

    def prepare(self) -> dict[str, Any]:
        """Runs the first step, and returns what `Split` returns and what was planned."""
        if self._plan == "profile":
            tokens = self.batch[0]
            self.model.profile(tokens[: len(tokens) // self.microbatches])
        prepared = super().prepare()
        planned = self._planned()
        # What was noted on the way is memory that no training takes.
        self.stopwatch.returned.clear()
        gc.collect()
        return {**prepared, "planned": planned}

    def _planned(self) -> dict[str, Any]:
        """Returns the rank and layers of every chunk, and the operations of a microbatch's matrix products."""
        from smp_tf.partition.graph.op_kinds import MATRIX_OPS
        from smp_tf.partition.op_cost.function_cost import node_costs

        plan, _ = self.stopwatch.returned["preparation.forecast_of_cut"]
        graph = self.stopwatch.returned["trace_step"].graph
        costs = zip(graph.nodes, node_costs(graph), strict=True)
        return {
            "placement": list(plan.placement),
            "layers": plan.units,
            "flops": round(sum(cost.flops for node, cost in costs if node.op in MATRIX_OPS)),
        }

    def steps(self, count: int) -> dict[str, Any]:
        """Runs some steps, and returns when they began and ended, memory, bytes sent, and the time of every task."""
        from smp_tf.recording import record as recording
        from smp_tf.recording import timeline_file

        before = self._sent()
        recording.start()
        measured = run(self, count)
        with tempfile.TemporaryDirectory() as folder:
            [record] = timeline_file.read([recording.stop(folder)])
        # Nor does a training read what was recorded: the next steps are not to find this memory in use.
        memory_parts.return_free_memory()
        return {
            **measured,
            "sent_bytes": self._sent() - before,
            "tasks": [
                (task.task.kind.word, task.task.chunk, (task.end - task.begin) / 1e9)
                for step in record.steps
                for task in step.compute
            ],
        }

    def parts(self, count: int) -> dict[str, Any]:
        """Runs some steps, and returns what this rank's memory beyond its start is made of, and the graphs it holds."""
        from smp_tf.keras.optimizer_reports import slot_bytes_here

        memory_parts.forget_tensors_peak()
        ran = run(self, count)
        now = memory_parts.parts()
        beyond = {name: now[name] - self._at_start[name] for name in now}
        beyond["tensors_peak"] = now["tensors_peak"]
        stored = self.model.local_variables
        return {
            **beyond,
            "peak": ran["resident_peak"] - ran["resident_before_model"],
            "weights": sum(v.shape.num_elements() * v.dtype.size for v in stored),
            "slots": slot_bytes_here(),
            **memory_parts.graphs(),
        }

    def _sent(self) -> int:
        """Returns the bytes of tensors that this rank has sent so far."""
        from smp_tf.job import runtime

        transport = runtime.current().transport
        assert transport is not None, "a pipeline has more than one process"
        return sum(edge["bytes"] for edge in transport.stats()["edges"] if edge["direction"] == "sent")


def main() -> None:
    way, size, microbatches, threads, plan, path = sys.argv[1:]
    import tensorflow as tf

    tf.config.threading.set_inter_op_parallelism_threads(int(threads))
    rank = 0
    if way == "serial":
        tf.config.threading.set_intra_op_parallelism_threads(int(threads))
    else:
        import smp_tf as smp

        pair = PAIRS[way]
        smp.init(
            {
                "microbatches": int(microbatches),
                "pipeline": pair.smp,
                "chunks_per_rank": pair.chunks,
                "optimize": "speed",
                "intra_op_threads": int(threads),
                "seed": SEED,
            }
        )
        rank = smp.rank()
    from models import gpt

    shape = gpt.size_of(size), int(microbatches)
    trainer = Serial(*shape) if way == "serial" else Pipeline(*shape, plan)
    answer(trainer, rank, path)


if __name__ == "__main__":
    main()
