"""A kind of task that there is not, with a row, for as long as a test runs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

from smp_tf.pipeline.programs.kinds import KINDS, Row
from smp_tf.pipeline.task import Index, Kind


@contextlib.contextmanager
def made_up_kind(word: str, row: Row, index: Index = Index.BUCKET) -> Iterator[Kind]:
    """Within this context `Kind` has one more word, as if it stood in its source, and the table a row for it."""
    kind = Kind._new_member_(Kind, word, index)
    kind._name_ = word
    Kind.__init__(kind, word, index)
    with (
        mock.patch.dict(Kind._member_map_, {word: kind}),
        mock.patch.dict(Kind._value2member_map_, {word: kind}),
        mock.patch.object(Kind, "_member_names_", [*Kind._member_names_, word]),
        mock.patch.dict(KINDS, {kind: row}),
    ):
        yield kind
