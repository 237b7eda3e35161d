"""Draws what a command prints on a terminal, without what TensorFlow prints at every start: `make pictures`.

python docs/pictures/draw_terminal.py docs/pictures/terminal_run.svg smp-tf run -np 2 examples/fit.py --epochs 2
"""

from __future__ import annotations

import io
import os
import pty
import re
import shlex
import struct
import subprocess
import sys
import termios
from fcntl import ioctl
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

from smp_tf.launch.notices import is_notice

#: Columns of the terminal.
WIDTH = 120
#: How the picture names the folder that the command runs in.
FOLDER = "/home/you/smp_tf"
#: A line that is erased by going up to it, such as that of a progress bar at its end.
ERASED = re.compile(r"[^\n]*\n(?:\x1b\[\?25h)?\r?\x1b\[1A\x1b\[2K")
#: rich's own picture, but for the fonts, which it loads from a server.
SVG = """<svg class="rich-terminal" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font-family: monospace; font-size: {char_height}px; line-height: {line_height}px; }}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}" />
</clipPath>
{lines}
</defs>
<rect fill="#292929" x="0" y="0" width="{width}" height="{height}" rx="8"/>
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""


def printed(command: list[str]) -> str:
    """Runs a command on a terminal of its own, and returns what it prints there."""
    ours, its = pty.openpty()
    ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 50, WIDTH, 0, 0))
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": str(WIDTH)}
    running = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=its, stderr=its, env=environment)
    os.close(its)
    content = bytearray()
    while True:
        try:
            read = os.read(ours, 1 << 16)
        except OSError:
            # Linux says so where no process has the terminal any more.
            break
        if not read:
            break
        content += read
    running.wait()
    os.close(ours)
    return content.decode().replace("\r\n", "\n")


def draw(command: list[str], text: str, picture: Path) -> None:
    """Draws a terminal with a command and what it has printed."""
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(Text(f"$ {shlex.join(command)}", style="bold"))
    left = ERASED.sub("", text).replace(str(Path.cwd()), FOLDER)
    lines = [line.rpartition("\r")[2] for line in left.split("\n")]
    shown = [line for line in lines if not is_notice(Text.from_ansi(line).plain)]
    console.print(Text.from_ansi("\n".join(shown)), soft_wrap=True)
    picture.write_text(console.export_svg(theme=MONOKAI, code_format=SVG, unique_id=picture.stem), encoding="utf-8")


def main(picture: Path, command: list[str]) -> None:
    """Runs the command, and draws it."""
    draw(command, printed(command), picture)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
