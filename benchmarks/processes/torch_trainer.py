"""One process of PyTorch, which trains the GPT in its turns, alone or as a rank of a pipeline.

    python torch_trainer.py serial SIZE MICROBATCHES THREADS CUT FOLDER SOCKET
    torchrun --nproc-per-node 2 torch_trainer.py gpipe SIZE MICROBATCHES THREADS CUT FOLDER SOCKET

SIZE is a JSON object with the numbers of `gpt.Size`. CUT is how many pieces of `torch_gpt.py` each chunk has, between
commas. FOLDER has what Keras began with. `versus_torch.py` starts these processes with an interpreter that has PyTorch.
They need nothing else.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from harness.answers import answer, forget_peak, resident
from models import torch_gpt
from torch import distributed
from torch.distributed import pipelining
from versus.settings import LEARNING_RATE, PAIRS


def read(folder: Path, name: str, dtype: torch.dtype) -> torch.Tensor:
    """Returns a tensor over the bytes of a file. The system reads only the pages that are used."""
    file = folder / name
    return torch.from_file(str(file), size=file.stat().st_size // dtype.itemsize, dtype=dtype)


class Trainer:
    """What both ways of training have in common.

    Args:
        size: the numbers of `gpt.Size`.
        microbatches: parts of a batch.
        folder: with what Keras began with.
    """

    def __init__(self, size: Mapping[str, int], microbatches: int, folder: Path) -> None:
        self.size = size
        self.microbatches = microbatches
        # Mapped, so that it is no memory of this process after the model has its copies.
        self.weights: torch.Tensor | None = read(folder, "weights", torch.float32)
        shape = (size["batch"], size["length"])
        self.tokens, self.following = (
            read(folder, name, torch.int32).view(shape).long() for name in ("tokens", "following")
        )
        self.baseline = resident("VmRSS")
        self.durations: list[tuple[str, int, float]] = []
        self.sent_bytes = 0

    def train(self) -> float | None:
        """Runs one optimizer step, and returns the loss where it is known."""
        raise NotImplementedError

    def prepare(self) -> dict[str, Any]:
        """Runs the first step, and returns its loss."""
        return {"loss": self.train()}

    def steps(self, count: int) -> dict[str, Any]:
        """Runs some steps, and returns when they began and ended, memory, bytes sent, and the time of every task."""
        self.durations.clear()
        self.sent_bytes = 0
        forget_peak()
        used, began = time.process_time(), time.monotonic()
        for _ in range(count):
            loss = self.train()
        ended = time.monotonic()
        return {
            "began": began,
            "ended": ended,
            "loss": loss,
            "cpu_seconds": time.process_time() - used,
            "resident_peak": resident("VmHWM"),
            "resident_before_model": self.baseline,
            "sent_bytes": self.sent_bytes,
            "tasks": [list(each) for each in self.durations],
        }


class Serial(Trainer):
    """One process that computes microbatch after microbatch, and adds gradients up."""

    def __init__(self, size: Mapping[str, int], microbatches: int, folder: Path) -> None:
        super().__init__(size, microbatches, folder)
        pieces = range(len(torch_gpt.kinds(size["depth"])))
        self.model = torch_gpt.chunk(size, pieces, self.weights)
        self.weights = None
        self.optimizer = torch.optim.SGD(self.model.parameters(), LEARNING_RATE)

    def train(self) -> float:
        """Runs one optimizer step, and returns the mean loss."""
        losses = []
        parts = zip(self.tokens.chunk(self.microbatches), self.following.chunk(self.microbatches), strict=True)
        for tokens, following in parts:
            loss = torch_gpt.loss_of(self.model(tokens), following) / self.microbatches
            loss.backward()
            losses.append(loss.item())
        self.optimizer.step()
        self.optimizer.zero_grad()
        return sum(losses)

    def counts(self) -> dict[str, int]:
        """Returns the number of the model's parameters, and the operations of a microbatch's matrix products."""
        part = self.size["batch"] // self.microbatches
        return {
            "parameters": sum(parameter.numel() for parameter in self.model.parameters()),
            "flops": torch_gpt.flops_of(self.model, (self.tokens[:part], self.following[:part])),
        }


class Pipeline(Trainer):
    """This process is one rank of a pipeline.

    Args:
        name: name of the schedule, a key of `PAIRS`.
        size: the numbers of `gpt.Size`.
        microbatches: parts of a batch.
        cut: number of pieces of each chunk.
        folder: with what Keras began with.
    """

    def __init__(self, name: str, size: Mapping[str, int], microbatches: int, cut: Sequence[int], folder: Path) -> None:
        super().__init__(size, microbatches, folder)
        pair = PAIRS[name]
        rank, ranks = distributed.get_rank(), distributed.get_world_size()
        ends = list(itertools.accumulate(cut, initial=0))
        own = [chunk for chunk, at in enumerate(pair.placement(ranks)) if at == rank]
        # Shapes are given, since torch needs NumPy to find them out.
        part, length = size["batch"] // microbatches, size["length"]
        between = torch.empty(part, length, size["width"], device="meta", requires_grad=True)
        first, last = self.tokens[:part].to("meta"), torch.empty(part, length, size["vocabulary"], device="meta")
        self.stages = [
            pipelining.PipelineStage(
                torch_gpt.chunk(size, range(ends[chunk], ends[chunk + 1]), self.weights),
                chunk,
                len(cut),
                torch.device("cpu"),
                input_args=first if chunk == 0 else between,
                output_args=last if chunk == len(cut) - 1 else between,
            )
            for chunk in own
        ]
        self.weights = None
        kind = getattr(pipelining.schedules, pair.torch)
        takes_one = issubclass(kind, pipelining.schedules.PipelineScheduleSingle)
        self.schedule = kind(
            self.stages[0] if takes_one else self.stages, microbatches, loss_fn=torch_gpt.loss_of, scale_grads=True
        )
        parameters = [parameter for stage in self.stages for parameter in stage.submod.parameters()]
        self.optimizer = torch.optim.SGD(parameters, LEARNING_RATE)
        self._watch()

    def train(self) -> float | None:
        """Runs one optimizer step, and returns the mean loss on the rank that has the last chunk."""
        losses: list[torch.Tensor] = []
        given = (self.tokens,) if any(stage.is_first for stage in self.stages) else ()
        has_last = any(stage.is_last for stage in self.stages)
        wanted = {"target": self.following, "losses": losses} if has_last else {}
        self.schedule.step(*given, return_outputs=False, **wanted)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return torch.stack(losses).mean().item() if losses else None

    def _watch(self) -> None:
        """Notes how long every task takes, and the bytes that are sent.

        A task's time begins after what it needs has come, since the schedule waits for that before it calls these.
        """
        for stage in self.stages:
            for method in ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk"):
                setattr(stage, method, self._timed(method, stage.stage_index, getattr(stage, method)))
            for method in ("get_fwd_send_ops", "get_bwd_send_ops"):
                setattr(stage, method, self._counted(getattr(stage, method)))
        last = self.stages[-1].num_stages - 1
        self.schedule._maybe_compute_loss = self._timed("loss", last, self.schedule._maybe_compute_loss)

    def _timed(self, method: str, chunk: int, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.monotonic()
            result = function(*args, **kwargs)
            self._note(method, chunk, time.monotonic() - began, kwargs)
            return result

        return timed

    def _note(self, method: str, chunk: int, seconds: float, options: Mapping[str, Any]) -> None:
        if method == "loss":
            # This is part of the last chunk's forward pass. For other chunks it is called too, and does nothing.
            kind, before, forward = self.durations.pop()
            self.durations.append((kind, before, forward + seconds))
        elif method == "backward_one_chunk":
            self.durations.append(("B" if options.get("full_backward", True) else "I", chunk, seconds))
        else:
            self.durations.append(("F" if method == "forward_one_chunk" else "W", chunk, seconds))

    def _counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def counted(*args: Any, **kwargs: Any) -> Any:
            messages = function(*args, **kwargs)
            self.sent_bytes += sum(message.tensor.nbytes for message in messages)
            return messages

        return counted


def main() -> None:
    way, size, microbatches, threads, cut, folder, path = sys.argv[1:]
    torch.set_num_threads(int(threads))
    torch.set_num_interop_threads(int(threads))
    numbers, parts, at = json.loads(size), int(microbatches), Path(folder)
    if way == "serial":
        answer(Serial(numbers, parts, at), 0, path)
        return
    distributed.init_process_group("gloo")
    pieces = [int(count) for count in cut.split(",")]
    answer(Pipeline(way, numbers, parts, pieces, at), int(os.environ["RANK"]), path)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
