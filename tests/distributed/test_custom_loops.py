"""Loops of a script's own give on two partitions what they give on one."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from tests.distributed.harness import Case, CaseResult, launch
from tests.full_only import params, selected

CASES = "tests.distributed.cases.custom_loops"
PARTITIONS = 2
WAYS = {"eager": True, "graph": False}
#: These run the other way with --full only.
ONLY_FULL = (
    *("script variables, eager", "linear head, graph", "dataclass, graph", "object, eager"),
    *("sizes, shapes, graph", "sizes, signature, eager"),
)
ALONE = ("adversaries", "local_outputs", "sparse_microbatches")


def cases(partitions: int) -> list[Case]:
    config = {"partitions": partitions, "microbatches": 4, "seed": 1}
    listed = [Case(name.replace("_", " "), name, {}, config) for name in ALONE]
    for way, eager in WAYS.items():
        listed.append(Case(f"script variables, {way}", "script_variables", {"eager": eager}, config))
        listed.append(Case(f"linear head, {way}", "linear_head", {"eager": eager}, config))
    for (way, eager), choice in itertools.product(WAYS.items(), (False, True)):
        objects = {"eager": eager, "strided": choice}
        listed.append(Case(f"{'object' if choice else 'dataclass'}, {way}", "records_and_objects", objects, config))
        sizes = {"eager": eager, "signature": choice}
        name = f"sizes, {'signature' if choice else 'shapes'}, {way}"
        listed.append(Case(name, "batches_of_all_sizes", sizes, config))
    return listed


NAMES = [case.name for case in cases(1)]


def tried(request: pytest.FixtureRequest, partitions: int) -> list[Case]:
    """The cases that this session tries."""
    names = selected(NAMES, ONLY_FULL, request.config)
    return [case for case in cases(partitions) if case.name in names]


@pytest.fixture(scope="module")
def whole(request: pytest.FixtureRequest) -> dict[str, CaseResult]:
    """One process."""
    kept = Case("two models", "two_models", {}, {"partitions": 1, "microbatches": 4, "seed": 1})
    return launch(1, CASES, [*tried(request, 1), kept])


@pytest.fixture(scope="module")
def split(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, CaseResult]:
    """Two stages."""
    config = {"partitions": PARTITIONS, "microbatches": 4, "seed": 1}
    path = str(tmp_path_factory.mktemp("plans") / "plan.json")
    kept = Case("plan file", "plan_file", {"config": config, "path": path}, config)
    return launch(PARTITIONS, CASES, [*tried(request, PARTITIONS), kept])


@pytest.mark.parametrize("name", params(NAMES, ONLY_FULL))
def test_it_gives_the_numbers_of_one_process(
    whole: dict[str, CaseResult], split: dict[str, CaseResult], name: str
) -> None:
    (alone,) = whole[name].values()
    stored: dict[str, int] = {}
    for rank in split[name].values():
        np.testing.assert_allclose(rank["numbers"], alone["numbers"], rtol=1e-12, err_msg=name)
        for variable, value in rank["weights"].items():
            stored[variable] = stored.get(variable, 0) + 1
            np.testing.assert_allclose(value, alone["weights"][variable], rtol=1e-11, atol=1e-15, err_msg=variable)
    assert stored == dict.fromkeys(alone["weights"], 1)


SIZES = [name for name in NAMES if name.startswith("sizes, ")]


@pytest.mark.parametrize("name", params(SIZES, ONLY_FULL))
def test_programs_are_as_few_as_the_sizes_ask_for(split: dict[str, CaseResult], name: str) -> None:
    # With a signature one for every size, and one for the batch of three samples; else twelve, eight, three, and any.
    wanted = [0, 1] if "signature" in name else [3, 2, 1, 0]
    for rank in split[name].values():
        assert rank["traced"] == wanted


def test_a_layer_moved_in_the_plan_file_moves_and_the_numbers_stay(
    whole: dict[str, CaseResult], split: dict[str, CaseResult]
) -> None:
    (alone,) = whole["two models"].values()
    first, last = split["plan file"].values()
    assert first["plans"] == last["plans"] == [["train", [0, 0, 1, 1]], ["train", [0, 1, 1]]]
    assert [rank["stored"] for rank in (first, last)] == [{"one": 4, "two": 2}, {"one": 4, "two": 4}]
    assert [rank["changed"]["stored"] for rank in (first, last)] == [{"one": 6, "two": 2}, {"one": 2, "two": 4}]
    said = split["plan file"].output[0]
    assert "plan that was loaded; moved by hand: one/dense_2 from partition 1 to 0" in " ".join(said.split())
    for rank in (first, last):
        np.testing.assert_allclose(rank["numbers"], alone["numbers"], rtol=1e-12)
        np.testing.assert_allclose(rank["changed"]["numbers"], alone["numbers"], rtol=1e-12)


def test_a_plan_file_that_does_not_fit_is_the_same_error_on_every_rank(split: dict[str, CaseResult]) -> None:
    first, last = (rank["refused"] for rank in split["plan file"].values())
    assert {**first, "cut anew": ""} == {**last, "cut anew": ""}
    assert "ConfigError: load_partition is true, but partition_file" in first["missing"]
    assert "plan.json does not exist on the host of rank 0" in first["missing"]
    assert "ConfigError: partition_file" in first["partitions"]
    assert "plan.json is for 7 partitions, and this job has 2" in first["partitions"]
    assert "PlacementError: partition_file" in first["another model"]
    assert "It was made for another model: it does not know the layer 'one/dense_4'" in first["another model"]
    assert first["memory"].startswith("MemoryLimitError: The model does not fit: memory_limit is 2.0 KiB (2,000 bytes)")
    assert "stage 1: " in first["memory"]


def test_a_model_stays_cut_as_it_is_over_a_shutdown(split: dict[str, CaseResult]) -> None:
    for number, rank in enumerate(split["plan file"].values()):
        before, after = rank["kept"]
        np.testing.assert_array_equal(after, before)
        assert rank["refused"]["cut anew"].startswith(
            f"OwnershipError: Model 'Net' was cut into 2 partitions before smp.shutdown, and this rank stores the "
            f"weights of partition {number}. Now there are 1, and it runs partition 0. Make a new model"
        )


def test_local_outputs_stay_where_they_are_made(split: dict[str, CaseResult]) -> None:
    first, last = split["local outputs"].values()
    assert (list(first["weights"]), list(last["weights"])) == (["first"], ["last"])
    assert "stays on partition 1 (it is among local_outputs); this rank does not have it." in first["refused"]["last"]
    assert "stays on partition 0 (it is among local_outputs); this rank does not have it." in last["refused"]["first"]
