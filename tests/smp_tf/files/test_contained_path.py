"""A path from elsewhere stays within its folder, whatever its text is and whatever lies on its way."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smp_tf.files.contained_path import PathError, relative, within


@pytest.mark.parametrize("text", ["a", "mp_rank_0/ckpt-1-0123abcd.index", "a..b/...", "ä/ b"])
def test_paths_that_stay(text: str, tmp_path: Path) -> None:
    assert str(relative(text, "folder")) == text
    assert within(tmp_path, text) == str(tmp_path / text)


@pytest.mark.parametrize(
    "text",
    ["", ".", "..", "/", "/etc/passwd", "../up", "a/../../up", "a/..", "./a", "a/", "a//b", "a\0b", "\ud800", None, 3],
)
def test_paths_that_do_not(text: object, tmp_path: Path) -> None:
    with pytest.raises(PathError) as raised:
        within(tmp_path, text)
    assert str(raised.value) == f"must stay within {str(tmp_path)!r}. Received: {text!r}"


@given(
    st.lists(st.sampled_from(["a", "..", ".", "", "b c", "/", "\0", "é"]), max_size=6).map("/".join)
    | st.text(max_size=8)
)
def test_no_text_leads_out(text: str) -> None:
    try:
        path = within("/some/folder", text)
    except PathError:
        return
    assert os.path.normpath(path).startswith("/some/folder/")
    assert os.path.relpath(path, "/some/folder") == text


@pytest.mark.parametrize("text", ["link", "link/file", "deep/link", "dangling"])
def test_no_link_leads_out(text: str, tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    for name in ("link", "deep/link", "dangling"):
        (tmp_path / name).symlink_to("/nowhere" if name == "dangling" else "/tmp")
    with pytest.raises(
        PathError, match=r"leads through .*(link|dangling)', a symbolic link, which may leave .*Remove the"
    ):
        within(tmp_path, text)


def test_the_folder_itself_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    assert within(tmp_path / "link", "a") == str(tmp_path / "link" / "a")
