"""Coordinates and groups of a mesh, as tables written out by hand."""

import itertools
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smp_tf.partition.mesh import STRATEGY_LETTERS, CommGroup, Factor, Mesh, RankType

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


#: P = 2, D = 4 = 2 x 2, T = 4 = 2 x 2. World rank: 8 times the replica, 4 times the stage, the shard.
WITH_FACTORS = Mesh(32, 2, "cluster", shards=4, inner=2, columns=2)
GROUPS_OF_FACTORS = {
    Factor.OUTER: (
        *((0, 16), (1, 17), (2, 18), (3, 19), (4, 20), (5, 21), (6, 22), (7, 23)),
        *((8, 24), (9, 25), (10, 26), (11, 27), (12, 28), (13, 29), (14, 30), (15, 31)),
    ),
    Factor.INNER: (
        *((0, 8), (1, 9), (2, 10), (3, 11), (4, 12), (5, 13), (6, 14), (7, 15)),
        *((16, 24), (17, 25), (18, 26), (19, 27), (20, 28), (21, 29), (22, 30), (23, 31)),
    ),
    Factor.ROW: (
        *((0, 2), (1, 3), (4, 6), (5, 7), (8, 10), (9, 11), (12, 14), (13, 15)),
        *((16, 18), (17, 19), (20, 22), (21, 23), (24, 26), (25, 27), (28, 30), (29, 31)),
    ),
    Factor.COLUMN: (
        *((0, 1), (2, 3), (4, 5), (6, 7), (8, 9), (10, 11), (12, 13), (14, 15)),
        *((16, 17), (18, 19), (20, 21), (22, 23), (24, 25), (26, 27), (28, 29), (30, 31)),
    ),
}


@pytest.mark.parametrize("factor", GROUPS_OF_FACTORS)
def test_groups_along_factors(factor):
    assert WITH_FACTORS.groups(factor) == GROUPS_OF_FACTORS[factor]


def test_coordinates_on_factors():
    assert WITH_FACTORS.extents == {"D": 4, "P": 2, "T": 4}
    assert list(WITH_FACTORS.factor_extents.values()) == [2, 2, 2, 2]
    # Outer, inner, row, column: replica 2 and shard 3, replica 3 and shard 1.
    assert WITH_FACTORS.coordinates(19) == {"P": 0, "D": 2, "T": 3}
    assert list(WITH_FACTORS.factors(19).values()) == [1, 0, 1, 1]
    assert WITH_FACTORS.coordinates(29) == {"P": 1, "D": 3, "T": 1}
    assert list(WITH_FACTORS.factors(29).values()) == [1, 1, 0, 1]


def test_groups_of_axes_with_factors():
    assert WITH_FACTORS.members(CommGroup.TP_GROUP, 5) == (4, 5, 6, 7)
    assert WITH_FACTORS.members(CommGroup.RDP_GROUP, 5) == (5, 13, 21, 29)
    assert WITH_FACTORS.members(CommGroup.PP_GROUP, 5) == (1, 5)
    spread = Mesh(32, 2, "spread", shards=4, inner=2, columns=2)
    # World rank: 8 times the shard, 4 times the stage, the replica.
    assert spread.members(Factor.INNER, 0) == (0, 1)
    assert spread.members(Factor.OUTER, 0) == (0, 2)
    assert spread.members(Factor.COLUMN, 0) == (0, 8)
    assert spread.members(Factor.ROW, 0) == (0, 16)


def test_unequal_factors():
    mesh = Mesh(6, 1, inner=3)
    assert mesh.groups(Factor.INNER) == ((0, 1, 2), (3, 4, 5))
    assert mesh.groups(Factor.OUTER) == ((0, 3), (1, 4), (2, 5))
    # Whoever gives no factors has one group of all replicas along the outer one.
    plain = Mesh(6, 1)
    assert (plain.groups(Factor.OUTER), len(plain.groups(Factor.INNER))) == (((0, 1, 2, 3, 4, 5),), 6)


def test_factors_that_do_not_divide():
    with pytest.raises(ValueError, match="3 inner replicas do not divide 4 replicas"):
        Mesh(4, 1, inner=3)
    with pytest.raises(ValueError, match="4 columns of shards do not divide 2 tensor shards"):
        Mesh(4, 2, shards=2, columns=4)


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
