"""The course's pictures as SVG: panels of bars or curves, drawn by matplotlib (the extra `bench`).

A panel is plain data with a method that draws it. `draw` arranges panels on a white ground, which
is readable on a dark page too. The module can be imported without matplotlib. Read: Bars, Curves,
draw.
"""

import io
import logging
import math
from collections.abc import Sequence
from types import ModuleType
from typing import Any, NamedTuple, Protocol

BLUE, RED, GREY, DARK = "#2456c9", "#c0392b", "#9aa0a8", "#1c1c1e"
COLOURS = (BLUE, RED, "#2e8b57", "#9b5fc0", "#c4611a", "#2b8a9e", "#c74a6b", "#8a7a1f")
STYLE = {
    "svg.hashsalt": "kilolm",  # the same picture has the same bytes
    "svg.fonttype": "none",  # text stays text, in whichever of these fonts the reader has
    "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial", "sans-serif"],  # the widest comes first
    "font.size": 9.5,
    "text.color": DARK,
    "axes.labelcolor": DARK,
    "axes.edgecolor": GREY,
}
SMALL = {"size": 8.5, "color": "#5c6370"}  # the style of notes

# Lengths are in inches: the width of a picture, its edge, and the heights of a panel's title and of
# its note.
WIDTH, EDGE, TITLE, LINE = 10.0, 0.15, 0.28, 0.2


def number(value: float) -> str:
    """Write a figure with three significant digits, whole numbers in full, without an exponent.

    Example: 2563.4 -> 2,560; 1008 -> 1,008; 0.0000158812 -> 0.0000159; 1.0 -> 1
    """
    if not math.isfinite(value) or value == int(value):
        return f"{value:,.0f}"
    digits = 2 - math.floor(math.log10(abs(value)))
    text = f"{round(value, digits):,.{max(0, digits)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


class Panel(Protocol):
    """One part of a picture.

    Attributes:
        title: stands above it.
        note: stands under the title in small letters; may be empty.
        height: of the axes.
        margins: room for labels, on the left and the right of the axes, above and below them.
    """

    title: str
    note: str
    height: float
    margins: tuple[float, float, float, float]

    def draw(self, axes: Any) -> None:
        """Draw the data into matplotlib's Axes."""


class Bars(NamedTuple):
    """Horizontal bars, which share a scale."""

    title: str
    rows: dict[str, float]  # label -> value
    note: str = ""
    ideal: dict[str, float] | None = None  # label -> where a line crosses its bar

    @property
    def height(self) -> float:
        return 0.28 * len(self.rows)

    @property
    def margins(self) -> tuple[float, float, float, float]:
        return 0.078 * max(map(len, self.rows)) + 0.15, 0.5, 0, 0.2

    def draw(self, axes: Any) -> None:
        ideal = self.ideal or {}
        most = max([*self.rows.values(), *ideal.values()]) or 1
        for i, (label, value) in enumerate(self.rows.items()):
            axes.barh(label, value, 0.75, color=BLUE, gid=f"bar: {label}")
            if label in ideal:
                axes.vlines(ideal[label], i - 0.48, i + 0.48, RED, linewidth=2)
            aim = ideal.get(label, value)
            end = aim if value < aim < value + most / 10 else value  # not across the line
            axes.annotate(number(value), (end, i), (5, 0), textcoords="offset points", va="center")
        axes.set(xlim=(0, most), ylim=(len(self.rows) - 0.5, -0.5))  # the first row on top
        axes.tick_params(left=False, bottom=False, labelbottom=False)
        axes.spines[:].set_visible(False)


class Curves(NamedTuple):
    """Lines through points. The one named "ideal" is grey and dotted."""

    title: str
    lines: dict[str, list[tuple[float, float]]]  # name -> points (x, y)
    x_name: str
    log: str = ""  # "y" if the y axis is logarithmic
    note: str = ""

    height = 2.3
    margins = (0.75, 0.1, 0.28, 0.6)

    def draw(self, axes: Any) -> None:
        from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

        colours = iter(COLOURS)
        for name, points in self.lines.items():
            colour, style = (GREY, ":") if name == "ideal" else (next(colours), "-")
            (line,) = axes.plot(*zip(*points), style, color=colour, linewidth=2, label=name)
            line.set_gid(f"line: {name}")
        if self.log:
            axes.set_yscale("log", nonpositive="mask")
            axes.margins(y=0.2)  # far enough to reach another tick
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        else:
            axes.set_ylim(0)
        xs = sorted({x for points in self.lines.values() for x, _ in points})
        axes.set_xticks(xs, [*map(number, xs)])
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: number(value)))
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_minor_locator(NullLocator())
        axes.set(xlabel=self.x_name)
        axes.grid(axis="y", color="#dddddd", linewidth=0.8)
        axes.spines[["top", "right"]].set_visible(False)
        legend(axes)


def legend(axes: Any) -> None:
    """Name what is drawn in a line above the axes."""
    axes.legend(
        loc="lower left",
        bbox_to_anchor=(0, 1),
        ncols=10,  # more than there are: one line
        frameon=False,
        borderaxespad=0.2,
        handlelength=1.5,
        handletextpad=0.5,
        columnspacing=1.2,
    )


def matplotlib() -> ModuleType:
    """Import matplotlib. Raises ImportError, which says how to install it."""
    # It warns while it makes its cache of fonts, and where it cannot keep one.
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    try:
        import matplotlib
    except ModuleNotFoundError:
        raise ImportError('pictures need matplotlib: pip install -e ".[bench]"') from None
    return matplotlib


def draw(rows: Sequence[Sequence[Panel]]) -> str:
    """Draw rows of panels. Returns the text of an SVG file.

    Raises:
        ImportError: matplotlib is not installed.
    """
    with matplotlib().rc_context():
        matplotlib().rcdefaults()  # not the user's own
        matplotlib().rcParams.update(STYLE)
        return _draw(rows)


def _draw(rows: Sequence[Sequence[Panel]]) -> str:
    from matplotlib.figure import Figure

    heads = [max(TITLE + LINE * bool(p.note) + p.margins[2] for p in row) for row in rows]
    feet = [max(p.height + p.margins[3] for p in row) for row in rows]
    total = 2 * EDGE + sum(heads) + sum(feet)
    figure = Figure((WIDTH, total))

    def write(x: float, y: float, text: str, **style: Any) -> None:
        figure.text(x / WIDTH, y / total, text, va="top", **style)

    y = total - EDGE  # of the row's upper edge
    for row, head, foot in zip(rows, heads, feet):
        width = WIDTH / len(row)
        for i, panel in enumerate(row):
            left, right, *_ = panel.margins
            write(i * width + EDGE, y, panel.title, weight="bold")
            write(i * width + EDGE, y - TITLE * 0.8, panel.note, **SMALL)
            x, across = i * width + EDGE + left, width - 2 * EDGE - left - right
            bottom = y - head - panel.height
            box = (x / WIDTH, bottom / total, across / WIDTH, panel.height / total)
            panel.draw(figure.add_axes(box))
        y -= head + foot
    file = io.StringIO()
    figure.savefig(file, format="svg", metadata={"Date": None})
    return file.getvalue()
