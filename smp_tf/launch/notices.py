"""Notices that TensorFlow and its libraries print at each start, whatever is trained.

`TF_CPP_MIN_LOG_LEVEL=2` switches off what TensorFlow logs below an error. A few lines come all the same: they are
logged before that setting is read, or as errors though nothing is wrong. No other line is dropped.
"""

from __future__ import annotations

import re

#: The variable, and the value that leaves errors.
LEVEL, ERRORS_ONLY = "TF_CPP_MIN_LOG_LEVEL", "2"

_NOTICES = re.compile(
    r"WARNING: All log messages before absl::InitializeLog\(\) is called are written to STDERR$"
    # [EWI]0000 00:00:1700000000.123456   1234 file.cc:12] ...
    r"|[EWI]0000 00:00:\d+\.\d+ +\d+ (?:"
    r"port\.cc:\d+\] oneDNN custom operations are on\b"
    r"|cpu_feature_guard\.cc:\d+\] This TensorFlow binary is optimized\b"
    r"|cuda_(?:dnn|fft|blas)\.cc:\d+\] Unable to register cu\w+ (?:plugin )?factory\b"
    r"|computation_placer\.cc:\d+\] computation placer already registered\b"
    r"|cudart_stub\.cc:\d+\] Could not find cuda drivers on your machine\b"
    r")"
    r"|To enable the following instructions: .* rebuild TensorFlow with the appropriate compiler flags\.$"
)
#: How such lines begin.
_BEGINS = (
    "WARNING: All log messages before absl::InitializeLog()",
    *(f"{level}0000 00:00:" for level in "EWI"),
    "To enable the following instructions:",
)


def is_notice(line: str) -> bool:
    """Returns whether a line is such a notice."""
    return _NOTICES.match(line) is not None


def may_become_notice(begin: str) -> bool:
    """Returns whether a line that is not complete may be such a notice."""
    return bool(begin) and any(known.startswith(begin) or begin.startswith(known) for known in _BEGINS)
