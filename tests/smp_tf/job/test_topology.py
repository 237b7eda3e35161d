"""Where a rank is, as tables written out by hand."""

import pytest

from smp_tf.config.keys import STRATEGIES
from smp_tf.job.topology import Topology
from smp_tf.partition.mesh import CommGroup, Mesh, RankType

# N = 8, P = 2: (stage, replica) of world ranks 0 to 7.
CLUSTER = [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (1, 2), (0, 3), (1, 3)]
SPREAD = [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1), (1, 2), (1, 3)]


def topology(rank, size=8, partitions=2, strategy="cluster"):
    return Topology(
        mesh=Mesh(size, partitions, strategy),
        rank=rank,
        local_rank=rank % 4,
        local_size=4,
        hosts=tuple(f"host{r // 4}" for r in range(size)),
        pids=tuple(100 + r for r in range(size)),
    )


@pytest.mark.parametrize(
    ("strategy", "table"),
    [
        ("cluster", CLUSTER),
        ("DPT", CLUSTER),
        ("DTP", CLUSTER),
        ("TDP", CLUSTER),
        ("spread", SPREAD),
        ("TPD", SPREAD),
        ("PTD", SPREAD),
        ("PDT", SPREAD),
    ],
)
def test_eight_processes_two_partitions(strategy, table):
    places = [topology(rank, strategy=strategy) for rank in range(8)]
    assert [(place.stage, place.replica) for place in places] == table
    assert {(place.stages, place.replicas) for place in places} == {(2, 4)}


def test_six_processes_three_partitions():
    cluster = [topology(rank, 6, 3) for rank in range(6)]
    spread = [topology(rank, 6, 3, "spread") for rank in range(6)]
    assert [place.stage for place in cluster] == [0, 1, 2, 0, 1, 2]
    assert [place.replica for place in cluster] == [0, 0, 0, 1, 1, 1]
    assert [place.stage for place in spread] == [0, 0, 1, 1, 2, 2]
    assert [place.replica for place in spread] == [0, 1, 0, 1, 0, 1]


def test_world_rank_of_a_number_in_a_group():
    place = topology(5)
    assert place.world_rank(0, RankType.MP_RANK) == 4
    assert place.world_rank(3, RankType.DP_RANK) == 7
    assert place.world_rank(3, RankType.WORLD_RANK) == 3
    assert place.world_rank(0, RankType.TP_RANK) == 5


def test_a_number_that_no_member_has():
    with pytest.raises(ValueError, match=r"no MP_RANK 2: this rank's MP_GROUP has 2 members, .* 1"):
        topology(5).world_rank(2, RankType.MP_RANK)
    with pytest.raises(TypeError, match="A rank is an int, not str '1'"):
        topology(5).world_rank("1", RankType.MP_RANK)


def test_the_hosts_of_stages_are_those_of_the_first_replica_on_every_rank():
    assert {topology(rank, partitions=8).hosts_of_stages() for rank in range(8)} == {(0, 0, 0, 0, 1, 1, 1, 1)}
    assert {topology(rank, partitions=2).hosts_of_stages() for rank in range(8)} == {(0, 0)}
    assert topology(0, partitions=2, strategy="spread").hosts_of_stages() == (0, 1)


def test_a_rank_in_words():
    assert topology(0).describe(5) == "rank 5 (host host1, pid 105, stage 1 of replica 2)"


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("partitions", "replicas"), [(1, 1), (2, 1), (1, 2), (2, 2), (3, 1), (3, 2)])
def test_every_stage_of_every_replica_is_one_rank(partitions, replicas, strategy):
    places = [topology(rank, partitions * replicas, partitions, strategy) for rank in range(partitions * replicas)]
    assert sorted((p.stage, p.replica) for p in places) == [
        (stage, replica) for stage in range(partitions) for replica in range(replicas)
    ]
    for place in places:
        assert (place.stages, place.replicas) == (partitions, replicas)
        # Number i of a group is the rank whose number there is i, in all groups that it belongs to.
        for kind in RankType:
            members = place.members(kind.group)
            assert place.world_rank(members.index(place.rank), kind) == place.rank
            assert [places[other].group_rank(kind.group) for other in members] == list(range(len(members)))
            assert all(places[other].members(kind.group) == members for other in members)
        assert [places[r].replica for r in place.members(CommGroup.MP_GROUP)] == [place.replica] * partitions
        assert [places[r].stage for r in place.members(CommGroup.DP_GROUP)] == [place.stage] * replicas


def test_with_two_shards_a_stage_is_no_mp_rank():
    hosts = tuple(f"host{r // 2}" for r in range(8))
    places = [Topology(Mesh(8, 2, shards=2), rank, rank % 2, 2, hosts, (1,) * 8) for rank in range(8)]
    assert [place.stage for place in places] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert [place.group_rank(CommGroup.MP_GROUP) for place in places] == [0, 1, 2, 3, 0, 1, 2, 3]
    assert [place.replica for place in places] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [place.group_rank(CommGroup.DP_GROUP) for place in places] == [0, 1, 0, 1, 2, 3, 2, 3]
    assert {(place.stages, place.replicas) for place in places} == {(2, 2)}
    assert {place.hosts_of_stages() for place in places} == {(0, 1)}
    assert places[0].describe(7) == "rank 7 (host host3, pid 1, shard 1 of stage 1 of replica 1)"
    assert [place.world_rank(1, RankType.PP_RANK) for place in places] == [2, 3, 2, 3, 6, 7, 6, 7]
