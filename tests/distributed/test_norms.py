"""Norms over the gradients of all stages are those of one process, wherever a script asks for one."""

from __future__ import annotations

import numpy as np
import pytest

from tests.distributed.harness import Case, CaseResult, launch
from tests.full_only import params, selected

CASES = "tests.distributed.cases.norms"
STAGES = 3
# The norm that one process gives, by the type of the weights.
NORMS = {"eager": 1.656311, "graph": 1.656311, "float64": 1.644314, "float64 graph": 1.644314}
KINDS = ("optimizers", "legacy")
#: By default "float64" is eager, too, and those that scale the loss clip as these do.
ONLY_FULL = ("eager", "float64 graph", *KINDS)


def cases(partitions: int, session: pytest.Config) -> list[Case]:
    config = {"partitions": partitions, "microbatches": 2, "seed": 1}
    listed = [
        Case("eager", "norms", {"eager": True}, config),
        Case("graph", "norms", {"eager": False}, config),
        Case("float64", "norms_in_float64", {"eager": True}, config),
        Case("float64 graph", "norms_in_float64", {"eager": False}, config),
        Case("nothing", "nothing_of_its_own", {}, config),
        *(Case(k, "optimizers", {"kind": k, "optimizer": "SGD"}, config) for k in KINDS),
        *(Case(f"{k} scaled", "optimizers", {"kind": k, "optimizer": "SGD", "scaled": True}, config) for k in KINDS),
    ]
    if partitions > 1:
        listed.append(Case("filtered", "filtered_list", {}, config))
    names = selected([case.name for case in listed], ONLY_FULL, session)
    return [case for case in listed if case.name in names]


@pytest.fixture(scope="module")
def whole(request: pytest.FixtureRequest) -> dict[str, CaseResult]:
    """One process, which has every gradient."""
    return launch(1, CASES, cases(1, request.config))


@pytest.fixture(scope="module")
def split(request: pytest.FixtureRequest) -> dict[str, CaseResult]:
    """Three stages."""
    return launch(STAGES, CASES, cases(STAGES, request.config))


@pytest.mark.parametrize("way", params(NORMS, ONLY_FULL))
def test_every_rank_gets_the_norm_of_one_process(
    whole: dict[str, CaseResult], split: dict[str, CaseResult], way: str
) -> None:
    (alone,) = whole[way].values()
    assert alone["norm"] == pytest.approx(NORMS[way], abs=1e-6)
    ranks = split[way].values()
    for name in ("norm", "tf", "clip", "tf clip", "outputs", "of halves", "tf of halves"):
        said = [float(rank[name]) for rank in ranks]
        assert said == pytest.approx([float(alone[name])] * STAGES, rel=1e-6), name
        assert len(set(said)) == 1, name
    assert [float(rank["given"]) for rank in ranks] == [4.0] * STAGES
    assert [float(rank["others"]) for rank in ranks] == [5.0] * STAGES


@pytest.mark.parametrize("way", params(NORMS, ONLY_FULL))
@pytest.mark.parametrize("clipped", ["clipped", "plainly"])
def test_gradients_are_clipped_by_it_and_stay_sparse(
    whole: dict[str, CaseResult], split: dict[str, CaseResult], way: str, clipped: str
) -> None:
    (alone,) = whole[way].values()
    seen: dict[str, int] = {}
    for rank in split[way].values():
        for position, value in rank[clipped].items():
            seen[position] = seen.get(position, 0) + 1
            np.testing.assert_allclose(value, alone[clipped][position], rtol=1e-5, atol=1e-7, err_msg=position)
    # Each of the model's on one rank, that of the script's own weight on all.
    assert seen == {**dict.fromkeys(map(str, range(9)), 1), "9": STAGES}
    assert split[way].values()[0]["sparse"][0] is True


@pytest.mark.parametrize("name", params([*KINDS, *(f"{kind} scaled" for kind in KINDS)], ONLY_FULL))
def test_optimizers_decide_by_all_gradients(
    whole: dict[str, CaseResult], split: dict[str, CaseResult], name: str
) -> None:
    (alone,) = whole[name].values()
    # The second step's infinite gradient halves the scale, and no weight of any rank moves.
    assert alone["scales"] == ([8.0, 4.0, 4.0] if "scaled" in name else [])
    for rank in split[name].values():
        assert rank["scales"] == alone["scales"]
        assert rank["iterations"] == 3
        for position, value in rank["weights"].items():
            np.testing.assert_allclose(value, alone["weights"][position], rtol=1e-5, atol=1e-7, err_msg=position)


def test_ranks_without_any_gradient_take_part(whole: dict[str, CaseResult], split: dict[str, CaseResult]) -> None:
    (alone,) = whole["nothing"].values()
    for rank in split["nothing"].values():
        for way in ("plain", "scaled"):
            assert rank[way]["norm"] == pytest.approx(alone[way]["norm"], rel=1e-5)
            assert rank[way]["iterations"] == 1


def test_a_list_without_the_nones_is_an_error_in_words(split: dict[str, CaseResult]) -> None:
    first = split["filtered"].ranks[0]
    assert first.error is not None
    assert "needs the same list on every rank of the replica, with None for a gradient that another rank" in first.error
