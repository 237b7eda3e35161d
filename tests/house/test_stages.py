"""A rank's stage is its coordinate on the mesh: no file counts ranks of a replica in its place."""

from __future__ import annotations

import ast

from tests.house.imports import ROOT, sources

#: How SageMaker counts ranks. Where T is larger than 1 these are neither stages nor replicas.
COUNTED = {"mp_rank", "mp_size", "dp_rank", "dp_size"}


def test_no_file_takes_a_rank_for_a_stage_or_a_replica() -> None:
    told = [
        f"{path.relative_to(ROOT)}:{node.lineno}: .{node.attr} counts ranks. Ask the topology for its stage, stages, "
        f"replica or replicas."
        for path in sources().values()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and node.attr in COUNTED
    ]
    assert told == []
