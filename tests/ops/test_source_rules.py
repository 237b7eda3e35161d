"""Rules that the C++ sources keep, as they are read: who prints, and who waits for how long.

A place that has to break a rule says why, on its line or in the comment above it:

    // prints: this thread holds no lock, and nobody waits for it without a deadline.
    // waits without a deadline: it has nothing to do until it is called, and the destructor does.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted(path for path in (ROOT / "ops" / "cc").rglob("*") if path.suffix in (".cc", ".h"))

#: What writes to standard output or standard error, and so waits for whoever reads it.
PRINTS = re.compile(
    r"\bstd::(cout|cerr|clog)\b|\b(printf|vprintf|puts|putchar|perror|fflush(_unlocked)?)\s*\("
    r"|\b(fprintf|vfprintf|fputs|fputc|putc|fwrite)\s*\(.*\b(stdout|stderr)\b"
    r"|\b(write|writev|dprintf|pwrite)\s*\(\s*(STDOUT_FILENO|STDERR_FILENO|1|2)\s*,"
    r"|\b(LOG|VLOG)\s*\("
)
#: What may wait for ever: for a condition, the end of a thread or of a process, an event, a notification.
WAITS = re.compile(
    r"(\.|->)(wait|join|get_future|WaitForNotification|Await)\s*\("
    r"|\b(pthread_join|pthread_cond_wait|sem_wait|sigwait|sigwaitinfo|wait|waitid|wait4|pause|flock)\s*\("
    r"|\bwaitpid\s*\((?!.*\bWNOHANG\b)"
    # The last argument may be -1, unless it is a number or a constant.
    r"|\b(poll|ppoll|epoll_wait)\s*\((?!(?:[^()]|\([^()]*\))*,\s*(?:\d+|k[A-Z]\w*)\s*\))"
)


def without_text(line: str) -> str:
    """A line of code without what stands in its strings and its comment."""
    return re.sub(r'"(\\.|[^"\\])*"', '""', line).partition("//")[0]


def broken(source: str, rule: re.Pattern[str], defence: str) -> list[int]:
    """The numbers of the lines that break a rule and do not say why."""
    blank = re.sub(r"/\*.*?\*/", lambda comment: re.sub(r"[^\n]", " ", comment[0]), source, flags=re.S)
    lines, found = blank.splitlines(), []
    for index, line in enumerate(lines):
        if not rule.search(without_text(line)):
            continue
        above = index
        while above > 0 and lines[above - 1].lstrip().startswith("//"):
            above -= 1
        comments = " ".join(text.partition("//")[2].strip() for text in lines[above : index + 1])
        if not re.search(rf"\b{defence}: \w+( \S+){{2,}}", comments):
            found.append(index + 1)
    return found


def all_broken(rule: re.Pattern[str], defence: str) -> list[str]:
    return [
        f"{path.relative_to(ROOT)}:{number}: {path.read_text().splitlines()[number - 1].strip()}"
        for path in SOURCES
        for number in broken(path.read_text(), rule, defence)
    ]


def test_nobody_prints_but_the_printer() -> None:
    """Whoever prints waits for a reader, and the transport's lock may be held: lines go to `Printer::Say`."""
    assert all_broken(PRINTS, "prints") == []


def test_every_wait_has_a_deadline() -> None:
    assert all_broken(WAITS, "waits without a deadline") == []


@pytest.mark.parametrize(
    ("line", "breaks"),
    [
        ("  changed_.wait(lock, [this] { return copying_ == 0; });", True),
        ("  changed_.wait_until(lock, deadline, [this] { return copying_ == 0; });", False),
        ("  thread_.join();", True),
        ("  // waits without a deadline: the thread ends at once.\n  thread_.join();", False),
        ("  // It goes on for long,\n  // waits without a deadline: what it does is short.\n  thread_.join();", False),
        ("  // waits without a deadline: yes\n  thread_.join();", True),
        ("  if (poll(fds.data(), fds.size(), -1) <= 0) continue;", True),
        ("  if (poll(fds.data(), fds.size(), wait_ms) <= 0) continue;", True),
        ("  if (poll(fds.data(), fds.size(), kLookAgainMs) <= 0) continue;", False),
        ("  /* It may wait(),\n   * and wait() again. */", False),
        ("  const int count = epoll_wait(epoll_, events, 32, -1);", True),
        ("  notification.WaitForNotification();", True),
        ("  if (waitpid(child, &status, 0) < 0) return;", True),
        ("  if (waitpid(child, &status, WNOHANG) < 0) return;", False),
        ('  Say("it would wait(");  // and wait(', False),
    ],
)
def test_a_wait_is_seen(line: str, breaks: bool) -> None:
    assert bool(broken(line, WAITS, "waits without a deadline")) is breaks


@pytest.mark.parametrize(
    ("line", "breaks"),
    [
        ('  std::fprintf(stderr, "late");', True),
        ('  std::cerr << "late";', True),
        ("  write(STDERR_FILENO, line.data(), line.size());", True),
        ("  write(wake_fd_, &one, sizeof(one));", False),
        ('  std::snprintf(text, sizeof(text), "%.1f s", age);', False),
        ('  LOG(WARNING) << "late";', True),
        ("  fflush(nullptr);  // prints: the process ends here anyway.", False),
        ('  guardian_->Say("late");', False),
    ],
)
def test_a_print_is_seen(line: str, breaks: bool) -> None:
    assert bool(broken(line, PRINTS, "prints")) is breaks
