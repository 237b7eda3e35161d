"""One process of the benchmark, which trains in one of three ways, in its turns.

    python trainer.py WAY SIZE MICROBATCHES THREADS CONFIG SOCKET

`step_time.py` starts these processes and tells them over a socket, one JSON object a line, what to do. Between its
turns a process waits for the next line and computes nothing. CONFIG is a JSON object with "optimize" and "pipeline"
(interleaved where it is not there) as in smp_tf's configuration; "xla": whether models are compiled, in every way;
"policy": of Keras's mixed precision; "inter_op_threads": how many operations a process runs at once (TensorFlow's
choice where it is not there).
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from harness.answers import answer, resident
from models.sizes import model_of, size_of

SEED = 1


def count_tensor_memory() -> None:
    """Makes tensor memory known: the CPU's allocator counts only with oneDNN, and only tensors of 256 KiB and more."""
    import tensorflow as tf

    library = ctypes.CDLL(str(next(Path(tf.sysconfig.get_lib()).glob("libtensorflow_framework.so*"))))
    library._ZN3tsl23EnableCPUAllocatorStatsEv()


class Stopwatch:
    """Adds up the time that named functions of a module take, and keeps what they return.

    Where one of them calls another, the caller's time includes the other's.
    """

    def __init__(self, module: Any, phases: dict[str, tuple[str, ...]]) -> None:
        self.seconds = dict.fromkeys(phases, 0.0)
        self.returned: dict[str, Any] = {}
        self._runs = False
        for phase, names in phases.items():
            for name in names:
                owner_path, _, attribute = name.rpartition(".")
                owner = functools.reduce(getattr, owner_path.split("."), module) if owner_path else module
                setattr(owner, attribute, self._timed(phase, name, getattr(owner, attribute)))

    def _timed(self, phase: str, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            outermost, self._runs = not self._runs, True
            began = time.monotonic()
            try:
                self.returned[name] = function(*args, **kwargs)
            finally:
                if outermost:
                    self.seconds[phase] += time.monotonic() - began
                    self._runs = False
            return self.returned[name]

        return timed


class Trainer:
    """What all ways of training have in common.

    Args:
        size: size of the model.
        microbatches: number of parts of a batch.

    Attributes:
        train: a `tf.function` that runs one optimizer step on a batch and returns the loss. Each way makes its own.
    """

    train: Any

    def __init__(self, size: Any, microbatches: int) -> None:
        import tf_keras

        self.size = size
        self.source = model_of(size)
        self.microbatches = microbatches
        self.baseline = resident("VmRSS")
        tf_keras.utils.set_random_seed(SEED)
        self.batch = self.source.batch_of(size)
        self.optimizer = tf_keras.optimizers.Adam(1e-3)

    def phases(self) -> dict[str, float]:
        """Returns the seconds of the named parts of tracing."""
        return {}

    def prepare(self) -> dict[str, Any]:
        """Runs the first step, and returns how long its parts took, and its loss."""
        began = time.monotonic()
        self.train.get_concrete_function(*self.batch)
        traced = time.monotonic()
        loss = float(self.train(*self.batch))
        done = time.monotonic()
        phases = self.phases()
        graph = traced - began - sum(phases.values())
        seconds = {**phases, "graph": graph, "first execution": done - traced}
        return {"seconds": seconds, "loss": loss, "items": self.size.items}

    def steps(self, count: int) -> dict[str, Any]:
        """Runs some steps, and returns when they began and ended."""
        began = time.monotonic()
        for _ in range(count):
            loss = self.train(*self.batch)
        loss = float(loss)
        return {"began": began, "ended": time.monotonic(), "loss": loss}

    def memory(self) -> dict[str, Any]:
        """Returns the memory of this process, and what the plan foretold."""
        import tensorflow as tf

        return {
            "resident_peak": resident("VmHWM"),
            "resident_before_model": self.baseline,
            "tensors_peak": tf.config.experimental.get_memory_info("CPU:0")["peak"],
        }


class WholeBatch(Trainer):
    """Way (a): plain Keras in one process, the whole batch at once.

    Args:
        xla: whether forward and backward are compiled.
    """

    def __init__(self, size: Any, microbatches: int, xla: bool = False) -> None:
        super().__init__(size, microbatches)
        import tensorflow as tf
        import tf_keras

        model = self.source.build(tf_keras.Model, size)
        of_batch = functools.partial(self.source.forward_backward, model)
        if xla:
            of_batch = tf.function(of_batch, jit_compile=True)

        @tf.function
        def train(inputs: Any, targets: Any) -> Any:
            gradients, loss = of_batch(inputs, targets)
            self.optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            return loss

        self.train = train


class Accumulating(Trainer):
    """Way (b): plain Keras in one process, microbatch after microbatch, with gradients added up.

    Args:
        xla: whether forward and backward are compiled.
    """

    def __init__(self, size: Any, microbatches: int, xla: bool = False) -> None:
        super().__init__(size, microbatches)
        import tensorflow as tf
        import tf_keras

        self.model = model = self.source.build(tf_keras.Model, size)
        one = tf.function(functools.partial(self.source.forward_backward, model), jit_compile=xla or None)

        @tf.function
        def train(inputs: Any, targets: Any) -> Any:
            totals: list[Any] = []
            losses: list[Any] = []
            for part in range(microbatches):
                of_part = slice(part * size.batch // microbatches, (part + 1) * size.batch // microbatches)
                # One after the other, so that only one microbatch's activations exist at a time.
                with tf.control_dependencies(totals):
                    gradients, loss = one(inputs[of_part], targets[of_part])
                totals = [a + b for a, b in zip(totals, gradients, strict=True)] if totals else gradients
                losses.append(loss)
            mean = [total / microbatches for total in totals]
            self.optimizer.apply_gradients(zip(mean, model.trainable_variables, strict=True))
            return tf.add_n(losses) / microbatches

        self.train = train


class Split(Trainer):
    """Way (c): this process is one rank of a pipeline."""

    def __init__(self, size: Any, microbatches: int) -> None:
        import tensorflow as tf

        import smp_tf as smp

        super().__init__(size, microbatches)
        self.stopwatch = Stopwatch(
            importlib.import_module("smp_tf.steps.step"),
            {
                "trace": ("trace_step",),
                "plan": (
                    "preparation.proposal.propose",
                    "preparation.agree_on_plan",
                    "preparation.cut_by_plan",
                    "preparation.forecast_of_cut",
                ),
                "build": ("preparation.plan_program", "preparation.build_stage_program", "preparation.decide_owners"),
            },
        )
        self.model = model = self.source.build(smp.DistributedModel, size)

        @smp.step
        def step(inputs: Any, targets: Any) -> Any:
            return self.source.forward_backward(model, inputs, targets)

        @tf.function
        def train(inputs: Any, targets: Any) -> Any:
            gradients, loss = step(inputs, targets)
            gradients = [gradient.accumulate() for gradient in gradients]
            self.optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            return loss.reduce_mean()

        self.train = train

    def phases(self) -> dict[str, float]:
        """Returns the seconds of tracing the step, planning and cutting, and building this rank's functions."""
        return self.stopwatch.seconds

    def memory(self) -> dict[str, Any]:
        """Returns the memory of this process, and what the plan foretold."""
        import smp_tf as smp

        plan, _ = self.stopwatch.returned["preparation.forecast_of_cut"]
        stage = plan.forecast[smp.mp_rank()]
        forecast = {
            "weights": stage.weight_bytes,
            "gradients": stage.gradient_bytes,
            "slots": stage.slot_bytes,
            "stash": stage.stash_bytes,
            "transport": stage.transport_bytes,
            "working": stage.working_bytes,
            "all": stage.stored_bytes,
        }
        return {**super().memory(), "forecast": forecast}

    def recorded_steps(self, count: int, folder: str) -> dict[str, Any]:
        """Runs `steps`, and writes into the folder what this rank did meanwhile."""
        from smp_tf.recording import record as recording

        recording.start()
        told = self.steps(count)
        recording.stop(folder)
        return told

    def segments(self, calls: int) -> dict[str, float]:
        """Runs this rank's segments with nothing to wait for, and returns seconds per microbatch."""
        self._clear_sums()
        seconds = {}
        for name, (function, given) in self._calls.items():
            began = time.monotonic()
            for _ in range(calls):
                function(*given)
            seconds[name] = (time.monotonic() - began) / calls
        return seconds

    @functools.cached_property
    def _clear_sums(self) -> Callable[[], None]:
        """Sets the sums that the backward segment adds to back to zero."""
        import tensorflow as tf

        @tf.function
        def clear() -> None:
            for accumulator in self.stopwatch.returned["preparation.build_stage_program"].sums.accumulators.values():
                accumulator.clear(tf.no_op())

        return clear

    @functools.cached_property
    def _calls(self) -> dict[str, tuple[Callable[..., Any], list[Any]]]:
        """The forward and the backward segment as functions, each with what to pass it."""
        import tensorflow as tf

        from smp_tf.partition.graph.op_graph import ARGUMENT

        program = self.stopwatch.returned["preparation.build_stage_program"]
        graph = program.split.graph
        known: dict[Any, Any] = {}
        part = self.size.batch // self.microbatches

        def anything(kind: Any) -> Any:
            dtype = tf.dtypes.as_dtype(kind.dtype)
            if dtype.is_floating:
                return tf.cast(np.random.default_rng(1).normal(0, 0.02, kind.shape), dtype)
            return tf.zeros(kind.shape, dtype)

        def value_of(tensor: Any) -> Any:
            node = graph.nodes[tensor.node]
            if node.op == ARGUMENT:
                return self.batch[node.source][:part]
            # The stash is what the forward segment made. What would come from elsewhere is made up.
            return known[tensor] if tensor in known else anything(graph.type_of(tensor))

        calls = {}
        for sweep, name in enumerate(("forward", "backward")):
            segment = program.functions[program.stage, sweep, 0]
            given = [value_of(tensor) for tensor in segment.takes.arguments]
            given += [anything(graph.variables[v].type) for v in segment.takes.remote_values]
            known.update(zip(segment.outputs, segment.function(*given), strict=True))
            calls[name] = (segment.function, given)
        return calls


ONE_PROCESS: dict[str, type[WholeBatch | Accumulating]] = {"a": WholeBatch, "b": Accumulating}


def main() -> None:
    way, size_name, microbatches, threads, config, path = sys.argv[1:]
    told = json.loads(config)
    if way == "c":
        import smp_tf as smp

        count_tensor_memory()
        smp.init(
            {
                "microbatches": int(microbatches),
                "optimize": told["optimize"],
                "pipeline": told.get("pipeline", "interleaved"),
                "intra_op_threads": int(threads),
                "inter_op_threads": told.get("inter_op_threads"),
                "seed": SEED,
                "xla": told["xla"],
            }
        )
        rank = smp.rank()
    else:
        import tensorflow as tf

        count_tensor_memory()
        tf.config.threading.set_intra_op_parallelism_threads(int(threads))
        tf.config.threading.set_inter_op_parallelism_threads(told.get("inter_op_threads", 0))
        rank = 0
    import tf_keras

    tf_keras.mixed_precision.set_global_policy(told["policy"])
    asked = size_of(size_name), int(microbatches)
    answer(Split(*asked) if way == "c" else ONE_PROCESS[way](*asked, xla=told["xla"]), rank, path)


if __name__ == "__main__":
    main()
