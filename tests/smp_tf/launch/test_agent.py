"""What an agent says and does, as far as whole jobs do not show it."""

from __future__ import annotations

import os
import socket
import subprocess
from unittest import mock

import pytest

from smp_tf.launch import agent
from smp_tf.launch.agent import ENDED, GREETING, OUT, Agent, Frame, FrameReader, chosen_interface


def test_frames_come_through_in_pieces_and_after_a_greeting() -> None:
    frames = [Frame(OUT, 3, b"a line\n"), Frame(OUT, 0, b""), Frame(ENDED, -1, b"-9")]
    stream = b"Welcome to host a!\n" + GREETING + b"".join(frame.packed() for frame in frames)
    for size in (1, 5, len(stream)):
        reader = FrameReader()
        assert not reader.is_greeted
        pieces = [stream[at : at + size] for at in range(0, len(stream), size)]
        assert [frame for piece in pieces for frame in reader.frames(piece)] == frames
        assert reader.is_greeted


def test_ranks_are_told_to_end_once() -> None:
    """A second SIGTERM may end what the first has made save its state."""
    reading, writing = os.pipe()
    process = mock.Mock(spec=subprocess.Popen)
    tried = Agent(reading, writing)
    tried._ranks[0] = agent._Rank(0, process)
    for _ in range(2):
        tried._obey({"end": True})
    process.terminate.assert_called_once_with()
    os.close(reading)
    os.close(writing)


def test_the_interface_is_the_one_that_leads_there() -> None:
    names = [name for _, name in socket.if_nameindex()]
    assert chosen_interface(names[0], None) == names[0]
    with mock.patch.object(agent, "interface_towards", lambda peer: f"towards {peer}"):
        assert chosen_interface(None, "b") == "towards b"
    assert chosen_interface(None, "127.0.0.1") in names
    with pytest.raises(OSError, match="there is no such network interface"):
        chosen_interface("none9", "b")
    with pytest.raises(OSError, match="no-such-host") as told:
        chosen_interface(None, "no-such-host.invalid")
    assert told.value.filename == "no-such-host.invalid"
