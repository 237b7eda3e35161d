"""In which order microbatches pass the chunks in a sweep."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from smp_tf.pipeline.programs.check import check
from smp_tf.pipeline.programs.simulate import simulate
from smp_tf.pipeline.programs.text import parse_program
from smp_tf.pipeline.schedules import sweeps
from smp_tf.pipeline.schedules.placements import in_a_v, looped
from smp_tf.pipeline.schedules.schedule import build
from smp_tf.pipeline.schedules.sweeps import forward_only, visits, with_sweeps


def test_looped_chunks_take_microbatches_in_groups() -> None:
    assert visits(looped(2, 2), 4)[0] == [(0, 0), (0, 1), (2, 0), (2, 1), (0, 2), (0, 3), (2, 2), (2, 3)]


def test_down_is_up_from_the_other_end() -> None:
    assert visits((0, 1, 1, 0), 2, down=True) == [
        [(3, 0), (3, 1), (0, 0), (0, 1)],
        [(2, 0), (1, 0), (2, 1), (1, 1)],
    ]
    assert visits(looped(2, 1), 2, down=True) == [[(0, 0), (0, 1)], [(1, 0), (1, 1)]]


@settings(deadline=None)
@given(st.integers(1, 8), st.integers(1, 4), st.integers(1, 20), st.booleans())
def test_forward_alone_waits_for_the_first_microbatch_only(stages: int, chunks: int, groups: int, in_v: bool) -> None:
    """Where whole groups of microbatches run."""
    microbatches = groups * stages
    kind, chunks = ("zb_v", 2) if in_v else ("interleaved_1f1b", max(2, chunks))
    program = build(kind, stages, microbatches, chunks, backward=False)
    # In a V the last microbatch comes back to rank 0.
    empty = (stages - 1) * (2 if in_v else 1)
    assert simulate(program).step_time == microbatches * chunks + empty


@settings(deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=8), st.integers(1, 10), st.integers(2, 5))
def test_any_placement_runs(drawn: list[int], microbatches: int, crossings: int) -> None:
    ranks = {rank: position for position, rank in enumerate(dict.fromkeys(drawn))}
    placement = [ranks[rank] for rank in drawn]
    lines: list[list[str]] = [[] for _ in ranks]
    for microbatch in range(microbatches):
        for chunk, rank in enumerate(placement):
            lines[rank].append(f"{chunk}F{microbatch}")
        for chunk in reversed(range(len(placement))):
            lines[placement[chunk]].append(f"{chunk}B{microbatch}")
    program = parse_program("\n".join(" ".join(line) for line in lines))
    check(forward_only(program))
    check(with_sweeps(program, crossings))
    assert with_sweeps(program, crossings).sweeps == crossings


def test_the_drawing_is_so() -> None:
    assert sweeps.__doc__ is not None
    for placement, column in ((looped(2, 2), 0), (in_a_v(2), 1)):
        taken = [" ".join(f"{chunk}.{microbatch}" for chunk, microbatch in own) for own in visits(placement, 3)]
        rows = [line.split("  ", 1)[1] for line in sweeps.__doc__.splitlines() if line.startswith("    rank ")]
        shown = [
            " ".join(word for word in row.strip().removeprefix("rank").split("     ")[column].split()) for row in rows
        ]
        shown = [" ".join(word for word in text.split() if "." in word and word != "...") for text in shown]
        assert shown == taken
