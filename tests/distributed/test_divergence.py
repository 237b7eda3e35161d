"""A rank that calls another step than the others, or with another batch, ends all within 30 s."""

from __future__ import annotations

import re

import pytest

from tests.distributed.harness import launch_script

SCRIPT = "tests/distributed/scripts/divergence.py"
SECONDS = 30.0


@pytest.mark.parametrize("odd", [0, 1])
@pytest.mark.parametrize(
    ("mode", "does"),
    [
        ("shape", r"is about to run step 'train' for the first time on x: float32\(12, 8\)"),
        ("step", r"is about to run step 'evaluate' for the first time on x: float32\(16, 8\)"),
    ],
)
def test_a_rank_that_leaves_the_common_path_is_named(mode: str, does: str, odd: int) -> None:
    outcome = launch_script(2, SCRIPT, [mode, "--odd", str(odd)], deadline=90.0)
    assert not outcome.timed_out, outcome.report()
    assert outcome.left_behind == [], outcome.report()
    assert outcome.returncode != 0, outcome.report()
    together = max(line.at for line in outcome.lines if "@@ step 2 done" in line.text)
    for rank in range(2):
        ended = outcome.ended_at[rank]
        assert ended is not None, outcome.report()
        assert ended - together < SECONDS, outcome.report()
        said = [text for text in outcome.output(rank).splitlines() if text.startswith("smp_tf: ")]
        assert said, outcome.report()
        words = rf"Rank {odd} .*{does}, while rank {1 - odd} .*is in step \d+ and waits .*from rank {odd} "
        assert re.search(words, said[-1]), outcome.report()
        assert "with batches of the same shapes" in said[-1], outcome.report()
