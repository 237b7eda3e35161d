"""A kind of task that there is not, with a row, for as long as a test runs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

from smp_tf.pipeline.programs.kinds import KINDS, Row
from smp_tf.pipeline.task import Index, Kind


@contextlib.contextmanager
def made_up_kind(word: str, row: Row, index: Index = Index.BUCKET) -> Iterator[Kind]:
    """Within this context the table has a row more, and nothing else is different."""
    kind = Kind(word, index)
    with mock.patch.dict(KINDS, {kind: row}):
        yield kind
