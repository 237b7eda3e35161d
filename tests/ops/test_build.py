"""What the compiler is given, and when it is asked again."""

from __future__ import annotations

import ctypes
import shutil
from pathlib import Path

import pytest

from smp_tf.ops import build


def test_cxxflags_of_the_environment_win_and_make_the_library_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "answer.cc"
    source.write_text('extern "C" int answer() { return ANSWER; }\n')

    def answer(name: str) -> int:
        target = build.Target(name, (source,), ("-fPIC", "-DANSWER=1"), ("-shared",))
        return ctypes.CDLL(str(build.build_target(target, tmp_path, verbose=False))).answer()

    def fingerprint() -> str:
        return build._fingerprint(build.transport_target(), "2.21.0")

    monkeypatch.delenv("CXXFLAGS", raising=False)
    plain = fingerprint()
    assert answer("plain.so") == 1
    monkeypatch.setenv("CXXFLAGS", "-UANSWER '-DANSWER=2'")
    assert answer("flags.so") == 2
    assert fingerprint() != plain


def test_a_copy_of_the_sources_needs_no_new_libraries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = build._fingerprint(build.transport_target(), "2.21.0")
    copied = Path(shutil.copytree(build.HERE, tmp_path / "ops", ignore=shutil.ignore_patterns("__pycache__")))
    monkeypatch.setattr(build, "HERE", copied)
    assert build._fingerprint(build.transport_target(), "2.21.0") == here
    (copied / "cc/transport/smp_transport.h").write_text("// another\n")
    assert build._fingerprint(build.transport_target(), "2.21.0") != here
