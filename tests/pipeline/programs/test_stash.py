"""What programs keep, counted by hand."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from smp_tf.pipeline.programs import stash
from smp_tf.pipeline.programs.stash import peak_stash, stash_profile
from smp_tf.pipeline.programs.text import parse_program
from smp_tf.pipeline.schedules.schedule import SCHEDULES, build
from smp_tf.pipeline.task import Kind


@settings(deadline=None)
@given(st.integers(1, 16), st.integers(1, 64))
def test_stash_of_the_schedules_with_one_chunk(stages: int, microbatches: int) -> None:
    assert peak_stash(build("simple", stages, microbatches)) == (microbatches,) * stages
    assert peak_stash(build("zb_h1", stages, microbatches)) == (min(stages, microbatches),) * stages
    assert peak_stash(build("interleaved", stages, microbatches)) == tuple(
        min(stages - rank, microbatches) for rank in range(stages)
    )


def test_the_stash_of_a_schedule_follows_the_number_of_chunks() -> None:
    assert peak_stash(build("interleaved_1f1b", 4, 8)) == (11, 9, 7, 5)
    assert peak_stash(build("interleaved_1f1b", 4, 8, 4)) == (19, 17, 15, 13)


def test_stash_of_a_backward_in_two_pieces() -> None:
    program = parse_program("0F0 0I0 0F1 0I1 0W0 0F2 0I2 0W1 0W2")
    assert peak_stash(program) == (2,)
    assert peak_stash(program, freed_by=Kind.I) == (1,)


def test_without_backward_nothing_is_stashed() -> None:
    assert peak_stash(build("simple", 2, 4, backward=False)) == (0, 0)
    assert stash_profile(build("v_min", 2, 4, backward=False)) == (({0: 0, 3: 0},), ({1: 0, 2: 0},))


def test_the_profile_of_a_rank_with_two_chunks() -> None:
    # Three of chunk 0 and none of chunk 1, or two of both; one of both is less than the latter.
    program = parse_program("0F0 0F1 0F2 0B0 1F0 1F1 1B0 1B1 0B1 0B2")
    assert stash_profile(program) == (({0: 3, 1: 0}, {0: 2, 1: 2}),)
    assert peak_stash(program) == (4,)


def test_the_profile_of_schedules() -> None:
    assert stash_profile(build("interleaved", 3, 4)) == (({0: 3},), ({1: 2},), ({2: 1},))
    # 0F0 0F1 7F0 7I0 0F2 7W0 7F1 7I1 0I0 7W1 0F3: three and one at first, four and none at last.
    assert stash_profile(build("v_min", 4, 8))[0] == ({0: 3, 7: 1}, {0: 4, 7: 0})
    assert stash_profile(build("v_min", 4, 8))[3] == ({3: 2, 4: 2},)


def test_the_drawing_shows_what_is_kept() -> None:
    tasks = ["0F0", "3F0", "0F1", "3I0", "3W0", "0I0", "0W0"]
    assert stash.__doc__ is not None
    rows = [line.split() for line in stash.__doc__.splitlines() if line.startswith("    ")]
    lines = {" ".join(row[:2]): row[2:] for row in rows}
    assert lines["rank 0"] == tasks
    for chunk in ("0", "3"):
        held, shown = 0, []
        for task in tasks:
            held += {"F": 1, "W": -1}.get(task[1], 0) * (task[0] == chunk)
            shown.append(str(held) if held else ".")
        assert lines[f"chunk {chunk}"] == shown


@settings(deadline=None)
@given(st.sampled_from(sorted(SCHEDULES)), st.integers(1, 6), st.integers(1, 12), st.sampled_from((Kind.I, Kind.W)))
def test_the_profile_and_the_peak_agree(kind: str, stages: int, microbatches: int, freed_by: Kind) -> None:
    program = build(kind, stages, microbatches)
    profile = stash_profile(program, freed_by)
    assert tuple(max(sum(held.values()) for held in rank) for rank in profile) == peak_stash(program, freed_by)
    # No moment of a rank has more of any chunk than another that is listed has of all: by bytes as well.
    for rank, tasks in enumerate(program.ranks):
        for nbytes in ({}, {task.chunk: 1 + 7 * (task.chunk % 2) for task in tasks}):
            live: dict[int, int] = {}
            most = 0
            for task in tasks:
                live[task.chunk] = live.get(task.chunk, 0) + (
                    1 if task.kind is Kind.F else -1 if task.kind in (Kind.B, freed_by) else 0
                )
                most = max(most, sum(count * nbytes.get(chunk, 1) for chunk, count in live.items()))
            forecast = max(sum(count * nbytes.get(chunk, 1) for chunk, count in held.items()) for held in profile[rank])
            assert forecast == most
