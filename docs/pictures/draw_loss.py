"""Draws the losses of a training, split and in one process, from what Keras's CSVLogger wrote: `make pictures`.

python docs/pictures/draw_loss.py split.csv one.csv docs/pictures/loss.svg
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path

from drawing import new_picture, save


def column(file: Path, name: str) -> list[float]:
    """Returns a column of a file of CSVLogger's, a value per epoch."""
    with file.open(encoding="utf-8") as lines:
        return [float(row[name]) for row in csv.DictReader(lines)]


def main(split: Path, one: Path, picture: Path) -> None:
    """Draws both trainings into one picture."""
    figure, axes = new_picture(6.4, 3.2)
    for name, colour, words in (("loss", "#1f6feb", "training"), ("val_loss", "#d1661f", "validation")):
        losses, alone = column(split, name), column(one, name)
        epochs = range(1, len(losses) + 1)
        axes.plot(epochs, losses, color=colour, linewidth=5, alpha=0.35, label=f"{words}, split")
        axes.plot(range(1, len(alone) + 1), alone, color=colour, linewidth=1, label=f"{words}, one process")
    axes.set_xlabel("epoch")
    axes.set_ylabel("mean loss")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)
    save(figure, picture)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:4]))
