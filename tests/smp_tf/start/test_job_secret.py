"""The job's secret cannot be worked out from what ranks tell each other, where they are given a part of it."""

from __future__ import annotations

import hashlib
import hmac
import os
import threading
from pathlib import Path

import pytest

from smp_tf.errors import EnvironmentSetupError, RankMismatchError
from smp_tf.start import job_secret

GIVEN = b"given by the launcher: " + bytes(range(32, 64))


class Wire:
    """Gives every rank what every rank says, and remembers it, as who listens does."""

    def __init__(self, size: int) -> None:
        self.heard: list[bytes] = [b""] * size
        self._all = threading.Barrier(size)

    def exchange(self, rank: int, payload: bytes) -> list[bytes]:
        self.heard[rank] = payload
        self._all.wait(20.0)
        return list(self.heard)


def agreed(*given: bytes) -> tuple[list[tuple[bytes, list[bytes]] | Exception], list[bytes]]:
    """What ranks that were given these make of it, and what went over the network."""
    wire = Wire(len(given))
    found: list[tuple[bytes, list[bytes]] | Exception] = [RuntimeError()] * len(given)

    def run(rank: int) -> None:
        try:
            found[rank] = job_secret.agree(
                given[rank], b"address %d" % rank, lambda payload, name: wire.exchange(rank, payload), "rank {}".format
            )
        except RankMismatchError as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(given))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found, wire.heard


@pytest.mark.parametrize("given", [GIVEN, b""], ids=["given", "none"])
def test_all_ranks_have_one_secret_and_all_addresses(given: bytes) -> None:
    found, _ = agreed(given, given, given)
    assert all(isinstance(one, tuple) for one in found)
    [(secret, addresses)] = {(one[0], tuple(one[1])) for one in found if isinstance(one, tuple)}
    assert addresses == (b"address 0", b"address 1", b"address 2")
    assert len(secret) == 32


def test_who_listens_cannot_make_the_key() -> None:
    """Rank 0 once told the secret itself, in the clear."""
    found, heard = agreed(GIVEN, GIVEN)
    assert isinstance(found[0], tuple)
    secret = found[0][0]
    together = b"".join(heard)
    assert secret not in together
    assert GIVEN not in together
    # All that a listener can put in is what was said, whole or in pieces: the secret needs what was given.
    parts = [text[:32] for text in heard]
    assert job_secret.made_of(GIVEN, parts) == secret
    guesses = [b"", *parts, *heard, *(text[32:64] for text in heard), together, b"".join(parts)]
    assert secret not in {job_secret.made_of(guess, parts) for guess in guesses}
    assert secret not in {hashlib.sha256(guess).digest() for guess in guesses}
    assert secret not in {hmac.digest(b"", guess, hashlib.sha256) for guess in guesses}
    # With other given parts and the same words on the network it is another secret.
    assert job_secret.made_of(GIVEN + b"x", parts) != secret


def test_every_job_has_another_secret() -> None:
    first, second = agreed(GIVEN, GIVEN)[0][0], agreed(GIVEN, GIVEN)[0][0]
    assert isinstance(first, tuple)
    assert isinstance(second, tuple)
    assert first[0] != second[0]


@pytest.mark.parametrize("other", [b"", GIVEN[::-1]], ids=["none", "another"])
def test_ranks_that_were_given_others_are_told_so(other: bytes) -> None:
    """They would wait for each other's proofs until stall_timeout."""
    found, _ = agreed(GIVEN, other, GIVEN)
    assert [type(error) for error in found] == [RankMismatchError] * 3
    assert "This one was given one, and not so rank 1. Let the launcher hand SMP_TF_SECRET to all" in str(found[0])
    assert f"This one was given {'one' if other else 'none'}, and not so rank 0 and rank 2." in str(found[1])


def test_it_comes_from_the_environment() -> None:
    assert job_secret.given({}) == b""
    assert job_secret.given({"SMP_TF_SECRET": "0123456789abcdef"}) == b"0123456789abcdef"
    # As os.environ gives bytes that are no UTF-8; and without spaces around, as from a file.
    assert job_secret.given({"SMP_TF_SECRET": " 0123456789abcde\udcff\n"}) == b"0123456789abcde\xff"
    with pytest.raises(EnvironmentSetupError, match=r"SMP_TF_SECRET holds .* 16 bytes or more\. Received: 5 bytes\."):
        job_secret.given({"SMP_TF_SECRET": "short"})
    with pytest.raises(EnvironmentSetupError, match="are both set"):
        job_secret.given({"SMP_TF_SECRET": "0123456789abcdef", "SMP_TF_SECRET_FILE": "f"})


def test_it_comes_from_a_file_that_only_its_owner_reads(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text("0123456789abcdef\n")
    environment = {"SMP_TF_SECRET_FILE": str(path)}
    for mode in (0o600, 0o400):
        path.chmod(mode)
        assert job_secret.given(environment) == b"0123456789abcdef"
    for mode in (0o640, 0o604, 0o620):
        path.chmod(mode)
        with pytest.raises(EnvironmentSetupError, match=rf"nobody else may read or change.*mode {mode:o}.*chmod 600"):
            job_secret.given(environment)
    path.chmod(0o600)
    path.write_bytes(b"x" * 5000)
    with pytest.raises(EnvironmentSetupError, match="holds 4096 bytes at most"):
        job_secret.given(environment)
    path.write_bytes(b"\n")
    with pytest.raises(EnvironmentSetupError, match=r"SMP_TF_SECRET_FILE holds .* Received: 0 bytes"):
        job_secret.given(environment)
    path.unlink()
    with pytest.raises(EnvironmentSetupError, match="cannot be read: No such file"):
        job_secret.given(environment)
    os.mkfifo(path, 0o600)
    with pytest.raises(EnvironmentSetupError, match="names a file that this user owns"):
        job_secret.given(environment)
