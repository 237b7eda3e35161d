"""The settings that smp_tf and torch.distributed.pipelining are measured with: schedules of both, and one optimizer.

Needs nothing but Python, since PyTorch's processes import it too.
"""

from __future__ import annotations

from dataclasses import dataclass

#: Learning rate of SGD. Without momentum it hides the pipelines least.
LEARNING_RATE = 0.01


@dataclass(frozen=True)
class Pair:
    """One schedule in both libraries.

    Attributes:
        name: name of the schedule.
        smp: the value of `pipeline`.
        torch: class of torch.distributed.pipelining.
        chunks: number of the model's chunks per rank.
        is_v: whether a rank's second chunk is dealt out backwards.
        splits_backward: whether gradients of weights are tasks of their own.
    """

    name: str
    smp: str
    torch: str
    chunks: int = 1
    is_v: bool = False
    splits_backward: bool = False

    def placement(self, partitions: int) -> tuple[int, ...]:
        """Returns the rank of each chunk."""
        forth = tuple(range(partitions))
        return forth + forth[::-1] if self.is_v else forth * self.chunks


#: Pairs by the word that `--schedules` takes.
PAIRS = {
    "gpipe": Pair("GPipe", "simple", "ScheduleGPipe"),
    "1f1b": Pair("1F1B", "interleaved", "Schedule1F1B"),
    "interleaved": Pair("interleaved 1F1B", "interleaved_1f1b", "ScheduleInterleaved1F1B", chunks=2),
    "zb_h1": Pair("ZB-H1", "zb_h1", "ScheduleInterleavedZeroBubble", splits_backward=True),
    "zb_v": Pair("ZB-V", "zb_v", "ScheduleZBVZeroBubble", chunks=2, is_v=True, splits_backward=True),
}
