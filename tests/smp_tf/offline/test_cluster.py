"""Clusters in files: what they say of the ranks of stages, and what is said of files that cannot be read."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import yaml

from smp_tf.errors import ConfigError
from smp_tf.offline.cluster import Cluster, Host, one_host, read_cluster

SMALL = Host(count=2, ranks=4, flops=1e12, memory_bandwidth=1e11, memory=16 * 2**30)
LARGE = Host(count=1, ranks=4, flops=4e12, memory_bandwidth=2e11, memory=80 * 2**30)
CLUSTER = Cluster((SMALL, LARGE), within_host=1e11, between_hosts=1e10)

GIVEN: dict[str, Any] = {
    "hosts": [
        {"count": 2, "ranks": 4, "memory": "16GiB", "flops": "1e12", "memory_bandwidth": 1e11},
        {"count": 1, "ranks": 4, "memory": "80GiB", "flops": 4e12, "memory_bandwidth": 2e11},
    ],
    "within_host": "1e11",
    "between_hosts": 1e10,
}


def test_a_file_gives_the_cluster(tmp_path: Path) -> None:
    for name, text in (("c.yaml", yaml.safe_dump(GIVEN)), ("c.json", yaml.safe_dump(GIVEN, default_flow_style=True))):
        file = tmp_path / name
        file.write_text(text.replace("'", '"') if name == "c.yaml" else _json())
        hosts = (
            dataclasses.replace(host, entry=f"host {n} of the file {file}") for n, host in enumerate(CLUSTER.hosts)
        )
        assert read_cluster(file) == dataclasses.replace(CLUSTER, hosts=tuple(hosts))


def _json() -> str:
    import json

    return json.dumps(GIVEN)


def test_the_file_of_the_documentation_is_read(tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs" / "planning.md").read_text()
    text = page.split("```yaml\n")[1].split("```")[0]
    (tmp_path / "cluster.yaml").write_text(text)
    assert read_cluster(tmp_path / "cluster.yaml").size == 8192


def test_ranks_are_numbered_host_by_host() -> None:
    assert CLUSTER.size == 12
    # Ranks 0 to 7 are on the two small hosts, 8 to 11 on the large one; the large ones are the machine of the costs.
    ranks = CLUSTER.stages(12, 1)
    assert ranks.speed == (0.25,) * 8 + (1.0,) * 4
    assert ranks.memory == (16 * 2**30,) * 8 + (80 * 2**30,) * 4
    # Between hosts is a tenth, for the ranks on both sides.
    assert ranks.link == (1.0, 1.0, 1.0, 0.1, 0.1, 1.0, 1.0, 0.1, 0.1, 1.0, 1.0, 1.0)
    assert ranks.hosts == (0,) * 4 + (1,) * 4 + (2,) * 4


def test_a_stage_is_as_fast_as_the_slowest_of_its_replicas() -> None:
    ranks = CLUSTER.stages(4, 3)
    assert (ranks.speed, ranks.memory) == ((0.25,) * 4, (16 * 2**30,) * 4)
    assert ranks.link == (1.0,) * 4


def test_gradients_go_around_a_ring_at_the_speed_of_its_slowest_link() -> None:
    # Twice two thirds of the bytes, between hosts for every stage.
    assert CLUSTER.reduce_seconds(4, 3, [3e9, 0.0, 6e9, 3e8]) == pytest.approx((0.4, 0.0, 0.8, 0.04))
    # Within a host: ranks 0 to 3.
    assert CLUSTER.reduce_seconds(2, 2, [1e9, 2e9]) == pytest.approx((0.01, 0.02))
    assert CLUSTER.reduce_seconds(4, 1, [1e9] * 4) == (0.0,) * 4


def test_too_few_ranks_are_an_error() -> None:
    with pytest.raises(ConfigError, match=r"4 partitions and 4 replicas need 16 ranks\. The cluster has 12\."):
        CLUSTER.stages(4, 4)


def test_processes_like_this_one_have_no_limit() -> None:
    assert one_host(3).stages(3, 1).memory == (None,) * 3
    assert one_host(3).stages(3, 1).within(7.0).memory == (7.0,) * 3


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hosts": []}, "'hosts' in .* must be a list with an entry for each kind of host. Received: []"),
        ({"hosts": [7]}, "host 0 of .* must give count, ranks, flops, memory_bandwidth, memory. Received: 7."),
        ({"hosts": [{"count": 0}]}, "'count' in host 0 of .* must be an int of 1 to 100000. Received: 0."),
        ({"hosts": [{"count": 1, "ranks": 1}]}, "'flops' is missing in host 0 of .*: a number of at least 1."),
        ({"within_host": "fast"}, "'within_host' in .* must be a number of at least 1. Received: 'fast'."),
        # Bug: with less than one a plan said that no cut agreed with placements by hand, of which there were none.
        ({"within_host": 1e-320}, "must be a number of at least 1. Received: 1e-320."),
        ({"within_host": -1}, "must be a number of at least 1. Received: -1."),
        ({"within_hosts": 1}, "'within_hosts' in .* is unknown: there are .*. Did you mean 'within_host'?"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(yaml.safe_dump({**GIVEN, **changes}))
    pattern = words.replace("?", r"\?").replace("[]", r"\[\]")
    with pytest.raises(ConfigError, match=pattern):
        read_cluster(file)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        # Bug: a traceback.
        ("within_host: 2021-13-45", r"is not YAML: month must be in 1\.\.12"),
        (
            "hosts: {",
            "cluster.yaml is not YAML: expected the node content, but found '<stream end>' at line 1, column 9.$",
        ),
        ("hosts: \x07", "cluster.yaml is not YAML: unacceptable character #x0007: [^\n]*$"),
        ("[" * 5000, "is nested too deeply"),
        ("- 1", "must hold a mapping of keys to values; it holds a list"),
        ("", "'hosts' is missing"),
    ],
)
def test_a_file_that_is_none_is_told(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=words):
        read_cluster(file)


def test_a_file_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        read_cluster(tmp_path / "none.yaml")


def test_what_limits_a_rank_is_the_host_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(yaml.safe_dump(GIVEN))
    cluster = read_cluster(file)
    # Each stage is also on a rank of a small host.
    alike = cluster.stages(4, 3)
    assert alike.limited_by == (f"memory of host 0 of the file {file}",) * 4
    unlike = cluster.stages(3, 1).limited_by + cluster.stages(12, 1).limited_by[-1:]
    assert unlike == (*(f"memory of host 0 of the file {file}",) * 3, f"memory of host 1 of the file {file}, rank 11")
    assert one_host(2).stages(2, 1).own == (None, None)


def test_ranks_are_looked_at_once_for_all_plans_of_a_search() -> None:
    """A search over 100,000 ranks went through all of them for each of its plans, which took minutes."""
    many = Cluster((dataclasses.replace(SMALL, count=10_000),), 1e11, 1e10)
    first, again = many.stages(8, 5_000), many.stages(8, 5_000)
    assert first is again
    assert len(set(first.speed)) == len(set(first.memory)) == 1
