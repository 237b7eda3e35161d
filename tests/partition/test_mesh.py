"""Coordinates and groups of a mesh, as tables written out by hand."""

import itertools
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smp_tf.partition.mesh import STRATEGY_LETTERS, CommGroup, Mesh, RankType

ORDERS = [*STRATEGY_LETTERS, *map("".join, itertools.permutations("DPT"))]


def test_groups_cluster():
    mesh = Mesh(8, 2, "cluster")
    assert mesh.groups(CommGroup.WORLD) == ((0, 1, 2, 3, 4, 5, 6, 7),)
    assert mesh.groups(CommGroup.MP_GROUP) == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert mesh.groups(CommGroup.PP_GROUP) == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert mesh.groups(CommGroup.DP_GROUP) == ((0, 2, 4, 6), (1, 3, 5, 7))
    assert mesh.groups(CommGroup.RDP_GROUP) == ((0, 2, 4, 6), (1, 3, 5, 7))
    assert mesh.groups(CommGroup.TP_GROUP) == tuple((rank,) for rank in range(8))


def test_groups_spread():
    mesh = Mesh(8, 2, "spread")
    assert mesh.groups(CommGroup.MP_GROUP) == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert mesh.groups(CommGroup.DP_GROUP) == ((0, 1, 2, 3), (4, 5, 6, 7))


# Where T is 2: (stage, replica, shard) of world ranks 0 to 7.
WITH_SHARDS = {
    "cluster": [(0, 0, 0), (0, 0, 1), (1, 0, 0), (1, 0, 1), (0, 1, 0), (0, 1, 1), (1, 1, 0), (1, 1, 1)],
    "spread": [(0, 0, 0), (0, 1, 0), (1, 0, 0), (1, 1, 0), (0, 0, 1), (0, 1, 1), (1, 0, 1), (1, 1, 1)],
    "PTD": [(0, 0, 0), (0, 1, 0), (0, 0, 1), (0, 1, 1), (1, 0, 0), (1, 1, 0), (1, 0, 1), (1, 1, 1)],
}


@pytest.mark.parametrize("order", WITH_SHARDS)
def test_coordinates_with_two_shards(order):
    mesh = Mesh(8, 2, order, shards=2)
    found = [mesh.coordinates(rank) for rank in range(8)]
    assert [(place["P"], place["D"], place["T"]) for place in found] == WITH_SHARDS[order]
    assert [mesh.rank_at(*place) for place in WITH_SHARDS[order]] == list(range(8))


def test_groups_with_two_shards():
    mesh = Mesh(8, 2, "cluster", shards=2)
    assert mesh.groups(CommGroup.TP_GROUP) == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert mesh.groups(CommGroup.PP_GROUP) == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert mesh.groups(CommGroup.RDP_GROUP) == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert mesh.groups(CommGroup.MP_GROUP) == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert mesh.groups(CommGroup.DP_GROUP) == ((0, 1, 4, 5), (2, 3, 6, 7))
    spread = Mesh(8, 2, "spread", shards=2)
    assert spread.groups(CommGroup.TP_GROUP) == ((0, 4), (1, 5), (2, 6), (3, 7))
    # By stage, then by shard.
    assert spread.members(CommGroup.MP_GROUP, 0) == (0, 4, 2, 6)
    assert spread.members(CommGroup.DP_GROUP, 0) == (0, 4, 1, 5)


def test_partitions_that_do_not_divide():
    with pytest.raises(ValueError, match="3 partitions do not divide 8 processes"):
        Mesh(8, 3)
    with pytest.raises(ValueError, match="2 partitions of 2 tensor shards do not divide 6 processes"):
        Mesh(6, 2, shards=2)


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3), st.sampled_from(ORDERS))
def test_every_group_kind_divides_the_world(replicas, stages, shards, order):
    mesh = Mesh(replicas * stages * shards, stages, order, shards)
    for kind in CommGroup:
        members = [rank for group in mesh.groups(kind) for rank in group]
        assert sorted(members) == list(range(mesh.world_size))
    for rank in range(mesh.world_size):
        place = mesh.coordinates(rank)
        assert mesh.rank_at(place["P"], place["D"], place["T"]) == rank
        replica, stage = (set(mesh.members(kind, rank)) for kind in (CommGroup.MP_GROUP, CommGroup.DP_GROUP))
        assert replica & stage == set(mesh.members(CommGroup.TP_GROUP, rank))
        assert (len(replica), len(stage)) == (stages * shards, replicas * shards)
        # Along an axis a rank's number is its coordinate, whatever the order.
        for kind, axis in ((CommGroup.PP_GROUP, "P"), (CommGroup.RDP_GROUP, "D"), (CommGroup.TP_GROUP, "T")):
            assert mesh.members(kind, rank).index(rank) == place[axis]


def test_groups_are_told_and_sent_by_name():
    assert repr(CommGroup.MP_GROUP) == "<CommGroup.MP_GROUP: 'mp'>"
    for kind in RankType:
        assert pickle.loads(pickle.dumps(kind)) is kind
        assert pickle.loads(pickle.dumps(kind.group)) is kind.group
