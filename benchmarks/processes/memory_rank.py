"""One process of the memory benchmark. When asked, it trains a model of the tests and says what that took.

    python memory_rank.py WAY SOCKET

`memory.py` starts these processes, and tells them over a socket what to do.
"""

from __future__ import annotations

import sys
from typing import Any

import smp_tf as smp  # isort: split

from harness.answers import answer

from smp_tf.start.environment import world_rank
from tests.distributed.cases.memory import forecast_and_measured


class Rank:
    """What a process does when it is asked."""

    def train(self, model: str, config: dict[str, Any]) -> dict[str, Any]:
        """Trains a few steps.

        Args:
            model: name of the model.
            config: configuration of smp_tf.

        Returns:
            The forecast of this rank, and the most bytes that TensorFlow's allocator had given out in several steps.
        """
        smp.init(config)
        found = forecast_and_measured(model)
        smp.shutdown()
        return found


def main() -> None:
    answer(Rank(), world_rank(), sys.argv[2])


if __name__ == "__main__":
    main()
