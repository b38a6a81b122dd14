"""What the chapters share: arguments, models, a stopwatch, other processes, and pictures.

Each picture (bars, curves, rows) goes to the terminal as text and, with --svg FILE, into one SVG.
The chapters hold what they are about, and this file holds the rest. Read: run, Lesson, and then
what a chapter calls.
"""

import argparse
import contextlib
import copy
import functools
import io
import itertools
import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # this checkout comes first

import torch
import torch.distributed as dist
from torch import Tensor, nn

import tp
from around.fast.packed import pack_linears
from around.folder import Tokenizer, build, load_model
from around.machine import Ranks, free_memory
from around.settings import BUNDLED
from around.start.ranks import join
from kv_cache import StaticCache
from model import Config, Transformer
from sampling import uniform
from scheduler import Engine, EngineSequence
from tools import pictures
from tools.bench import SHAPES, try_to_write
from tools.measure import read_bandwidth
from tools.pictures import Bars, Curves

WIDTH = 56  # columns of a bar or a curve

LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


def run(
    chapter: Callable[["Lesson"], dict[str, Any]],
    argv: list[str] | None = None,
    each_rank: Callable[["Lesson", Ranks], dict[str, Any]] | None = None,
) -> Any:
    """Parse the command line, run a chapter, and write its pictures. Returns the chapter's counts.

    Args:
        argv: the command line, without the program; by default this process's own.
        each_rank: what to do in a process that the chapter has started by `Lesson.ranks`.
    """
    if each_rank and "RANK" in os.environ:
        return be_rank(each_rank)
    parser = argparse.ArgumentParser(description=chapter.__globals__["__doc__"].split("\n")[0])
    parser.add_argument("--small", action="store_true", help="a tiny model: all is counted, fast")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="write the pictures there, too")
    args = parser.parse_args(argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal without bars gets question marks
    torch.manual_seed(0)
    lesson, threads = Lesson(args.small), torch.get_num_threads()
    # One thread, as for the pages: the number of threads changes the last digit of sums, and on a
    # busy machine threads wait for each other.
    torch.set_num_threads(1)
    try:
        if args.svg:
            pictures.matplotlib()
            try_to_write("--svg", args.svg)
        with torch.no_grad(), clock():
            counts = chapter(lesson)
        if args.svg:
            args.svg.write_text(lesson.svg(), encoding="utf-8")
        return counts
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except (OSError, ImportError) as error:  # no such folder, no room, no matplotlib
        sys.stdout = None  # nothing is left to be flushed at the end
        if isinstance(error, BrokenPipeError):  # `| head` has read enough
            raise SystemExit(0) from None
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    finally:
        torch.set_num_threads(threads)


class Lesson:
    """One run of a chapter.

    Attributes:
        small: whether to run the tiny model, for the counts alone.
        panels: the pictures so far; see tools/pictures.py.
        tiny: the shape that --small uses, with which nothing is slow.
    """

    tiny = Config(256, 64, 128, 2, 4, 2, 16, 1024, eos_ids=())

    def __init__(self, small: bool) -> None:
        self.small = small
        self.panels: list[pictures.Panel] = []

    def pick(self, real: Any, small: Any) -> Any:
        """Return a size: `small` with --small, else `real`."""
        return small if self.small else real

    @functools.cached_property
    def bandwidth(self) -> float:
        """Bytes per second that this machine reads from memory, measured at the first use. It is
        the best of several runs, like the times compared with it: disturbances only slow it."""
        return 1e9 * max(read_bandwidth(torch.device("cpu")) for _ in range(8))

    def random_model(self, tiny: bool = False, packed: bool = True) -> Transformer:
        """Build a model of the bench's shape 110m with random weights, in float32. A token reads
        its 440 MB, more than a processor's caches hold. Speed does not depend on the values.

        Args:
            tiny: build a tiny model, as --small does.
            packed: pack the weights as --compile does (chapter 6). Then a forward of a few rows
                takes as long as reading the weights. A library's plain product can take twice as
                long for three rows as for one.
        """
        config = self.tiny if tiny else self.pick(SHAPES["110m"], self.tiny)
        if config != self.tiny and free_memory(torch.device("cpu")) < 2**31:
            self.say("Less than 2 GiB are free: the model is tiny, and the effects may be absent.")
            config = self.tiny
        model = build(config)
        if packed:
            pack_linears(model)
        return model

    def bundled(self, name: str = "shakespeare") -> tuple[Transformer, Tokenizer]:
        """Load a trained model from checkpoints/, in float32, and its tokenizer."""
        folder = BUNDLED.with_name(name)
        return load_model(folder, dtype=torch.float32), Tokenizer(folder)

    def ranks(self, count: int, script: str) -> dict[str, Any]:
        """Start a script as `count` processes, which `run` makes into ranks. Returns the result of
        `each_rank` on rank 0."""
        words = [os.path.abspath(script), *["--small"] * self.small]
        return json.loads(start_ranks(count, words)[0])

    def say(self, text: str = "") -> None:
        on_terminal(" " * len(CLOCK.format(0)))
        print(text, flush=True)

    def watch(self, engine: Engine, most: int = 40) -> list[str]:
        """Step an engine until it is empty, and print for each step which sequences ran how many
        tokens, who owns each block, and what else happened. Returns these events by name.

        Args:
            most: steps to run at most.
        """
        names: dict[EngineSequence, str] = {}
        events: list[str] = []
        hits = preemptions = 0
        self.say(f"\n  step  {'ran':26}{'blocks':{engine.pool.num_blocks + 2}}")
        copies: list[tuple[int, int]] = []  # blocks that this step has copied
        copy_blocks = engine.runner.copy_blocks

        def watched(pairs: list[tuple[int, int]]) -> None:
            copies.extend(pairs)
            copy_blocks(pairs)

        engine.runner.copy_blocks = watched
        for _ in range(most):
            if not engine.queue:
                break
            before = engine.queue
            engine.step()
            for seq in before + engine.queue:
                index = seq.request.outputs.index(seq)
                names[seq] = LETTERS[26:][seq.request.arrival - 1] + "'" * index
            new: list[str] = []  # events of this step
            if engine.stats["prefix_cache_hits"] > hits:
                new.append(f"found {engine.stats['prefix_cache_hits'] - hits} tokens")
            new += ["copied a block"] * len(copies)
            new += ["preempted"] * (engine.stats["num_preemptions"] - preemptions)
            new += [f"forked {names[seq]}" for seq in engine.queue if seq not in before]
            new += [f"ended {names[seq]}" for seq in before if seq.finish_reason]
            step, ran = engine.stats["engine_steps"], []
            for seq, count in engine.last_step.items():
                ran.append(f"{names[seq]}+{count}")
            self.say(f"  {step:4}  {' '.join(ran):26}{owners(engine)}  {', '.join(new)}")
            events += new
            hits = engine.stats["prefix_cache_hits"]
            preemptions = engine.stats["num_preemptions"]
            copies.clear()
        return events

    # --- Pictures ---------------------------------------------------------------------------------

    def bars(self, title: str, rows: dict[str, float], ideal: Any = None, digits: int = 3) -> None:
        """Draw a bar for each row; `ideal`, a number for all or one by row, is drawn as a line."""
        ideal = ideal if isinstance(ideal, dict) else dict.fromkeys(rows, ideal)
        ideal = {name: aim for name, aim in ideal.items() if aim is not None}
        most = max([*rows.values(), *ideal.values()], default=0) or 1
        names = max(map(len, rows))
        self.say(f"\n{title}{'   (│ ideal)' if ideal else ''}")
        for name, value in rows.items():
            full = "█" * round(WIDTH * value / most)
            line = [*(full or "▏").ljust(WIDTH + 1)]
            if name in ideal:
                line[min(WIDTH, round(WIDTH * ideal[name] / most))] = "│"
            self.say(f"  {name:{names}} {''.join(line)} {number(value, digits)}")
        self.panels.append(
            Bars(title, rows, "The line marks the ideal." * bool(ideal), ideal=ideal)
        )

    def curves(
        self,
        title: str,
        xs: list[float],
        lines: dict[str, list[float]],
        x_name: str,
        log: bool = False,
    ) -> None:
        """Draw lines over xs, which may be shorter than xs; one named "ideal" is dotted."""
        rows, scale = 12, math.log10 if log else float
        title += ", on a logarithmic scale" * log
        lines = dict(sorted(lines.items(), key=lambda line: line[0] != "ideal"))  # under the others
        points = {name: [*zip(xs, line)] for name, line in lines.items()}
        self.panels.append(Curves(title, points, x_name, log="y" * log))
        values = [v for line in lines.values() for v in line if v > 0 or not log]
        low, high = scale(min(values)) if log else 0.0, scale(max(values))
        high += (high == low) * 1.0
        grid = [[" "] * (WIDTH + 1) for _ in range(rows)]
        marks = [name[0] if name != "ideal" else "·" for name in lines]
        marks = marks if len({*marks}) == len(marks) else [*"abcdefgh"][: len(marks)]

        def up(value: float) -> float:
            value = max(value, 1e-9) if log else value
            return min(1.0, max(0.0, (scale(value) - low) / (high - low)))

        for mark, line in zip(marks, lines.values()):
            for column in range(WIDTH + 1):  # between two points, a straight line
                at = xs[0] + (xs[-1] - xs[0]) * column / WIDTH
                i = max([k for k in range(len(line)) if xs[k] <= at + 1e-9], default=0)
                j = min(i + 1, len(line) - 1)
                if at > xs[len(line) - 1] + 1e-9:
                    break
                part = 0 if i == j else (at - xs[i]) / (xs[j] - xs[i])
                height = up(line[i]) * (1 - part) + up(line[j]) * part
                grid[round((rows - 1) * (1 - height))][column] = mark
        self.say(f"\n{title}")
        for i, line in enumerate(grid):
            value = low + (high - low) * (1 - i / (rows - 1))
            at = number(10**value if log else value, 2) if i % 3 == 0 or i == rows - 1 else ""
            self.say(f"  {at:>8} ┤{''.join(line).rstrip()}")
        feet = f"{number(xs[0], 3)}{x_name:^{WIDTH - 6}}{number(xs[-1], 3)}"
        self.say(f"           └{'─' * WIDTH}\n            {feet}")
        self.say("            " + "   ".join(f"{m} {name}" for m, name in zip(marks, lines)))

    def rows(self, title: str, rows: dict[str, str], legend: dict[str, str]) -> None:
        """Draw strings under each other, one character a cell, whose meanings the legend gives: a
        letter or # in a colour, * in grey, - and . ever fainter."""
        names = max(map(len, rows))
        self.say(f"\n{title}")
        for name, line in rows.items():
            self.say(f"  {name:{names}}  {line}")
        self.say(f"  {'':{names}}  " + "   ".join(f"{m} {what}" for m, what in legend.items()))
        self.panels.append(Strips(title, rows, legend))

    def timeline(self, title: str, rows: dict[str, list[float]], end: float) -> None:
        """For each row the times at which its tokens have come, in seconds from the start: a strip
        that is dots until the first and # until the last. 70 cells are `end` seconds."""
        strips = {}
        for name, times in rows.items():
            first, last = round(70 * times[0] / end), round(70 * times[-1] / end)
            strips[name] = ("." * first + "#" * max(1, last - first)).ljust(70)
        self.rows(title, strips, {".": "waits", "#": "gets"})

    def svg(self) -> str:
        """Return all pictures, one under the other."""
        return pictures.draw([[panel] for panel in self.panels])


class Strips(NamedTuple):
    """A panel of what `Lesson.rows` draws."""

    title: str
    rows: dict[str, str]
    legend: dict[str, str]
    note: str = ""

    @property
    def height(self) -> float:
        return 0.24 * len(self.rows)

    @property
    def margins(self) -> tuple[float, float, float, float]:
        return 0.078 * max(map(len, self.rows)) + 0.15, 0.1, 0.28, 0.2

    def draw(self, axes: Any) -> None:
        def look(mark: str) -> dict[str, Any]:
            colour = pictures.GREY
            if mark in LETTERS or mark == "#":
                colour = pictures.COLOURS[ord(mark) % len(pictures.COLOURS)]
            return {"color": colour, "alpha": {"-": 0.5, ".": 0.25, " ": 0}.get(mark, 1)}

        for name, line in self.rows.items():
            at = 0
            for mark, same in itertools.groupby(line):
                width = len([*same])
                axes.barh(name, width - 0.1, 0.8, at, **look(mark))
                at += width
        for mark, meaning in self.legend.items():
            axes.barh(0, 0, label=meaning, **look(mark))
        axes.set(xlim=(0, max(map(len, self.rows.values()))), ylim=(len(self.rows) - 0.5, -0.5))
        axes.tick_params(left=False, bottom=False, labelbottom=False)
        axes.spines[:].set_visible(False)
        pictures.legend(axes)


def number(value: float, digits: int) -> str:
    """Example: 12345.6 -> 12,346; 0.01234 to 3 digits -> 0.0123"""
    if abs(value) >= 10 ** (digits - 1) or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.{digits}g}"


def owners(engine: Engine) -> str:
    """Show an engine's blocks as one character each: the letter of the request that owns it; * if
    several tables share it; - if it is only in the prefix cache; . if it is free."""
    marks = []
    for block in range(engine.pool.num_blocks):
        marks.append("-" if block in engine.pool.cached else ".")
    for seq in engine.running:
        letter = LETTERS[26:][(seq.request.arrival - 1) % 26]
        for block in seq.table.blocks:
            marks[block] = letter if engine.pool.refs[block] == 1 else "*"
    return "".join(marks)


def memory_strip(tables: list[list[int]], size: int, used: int, slots: int, cell: int = 16) -> str:
    """Show a memory of `slots` tokens as a strip, with a character for each `cell` tokens: the
    letter of its sequence, from A on; * shared; - reserved and empty; . free.

    Args:
        tables: for each sequence, the numbers of its blocks, in order.
        size: tokens in a block, a multiple of `cell`.
        used: tokens that each sequence has; the rest of its blocks is empty.
    """
    cells = ["."] * (slots // cell)
    for letter, table in zip(LETTERS[26:], tables):
        for position in range(0, len(table) * size, cell):
            slot = table[position // size] * size + position % size
            mark = letter if position < used else "-"
            cells[slot // cell] = mark if cells[slot // cell] == "." else "*"
    return "".join(cells)


def parts_strip(parts: list[float], width: int) -> str:
    """Show parts of 1 as a strip of `width` characters: a for the first part, b for the second, and
    so on; . for the rest.

    Example: parts 0.5 and 0.2, width 10 -> aaaaabb...
    """
    ends = [round(width * end) for end in itertools.accumulate(parts)]
    letters = zip(LETTERS, [0, *ends], ends)
    return "".join(a * (end - start) for a, start, end in letters).ljust(width, ".")


# --- Stopwatch and counter ------------------------------------------------------------------------


def seconds(act: Callable[[], Any], repeat: int = 5) -> float:
    """Time a call: the minimum of `repeat` calls, because disturbances only add. The first call is
    not counted."""
    times = []
    for _ in range(repeat + 1):
        start = time.perf_counter()
        act()
        times.append(time.perf_counter() - start)
    return min(times[1:])


def durations(steps: Iterable) -> list[float]:
    """Return how many seconds each step of an iterator took."""
    marks = [time.perf_counter()]
    marks += [time.perf_counter() for _ in steps]
    return [b - a for a, b in itertools.pairwise(marks)]


def timed(act: Callable[..., Any], *args: Any) -> tuple[Any, float]:
    """Return the result of a call, and how many seconds it took."""
    start = time.perf_counter()
    return act(*args), time.perf_counter() - start


def forward_ms(model: Transformer, tokens: int = 1, past: int = 0, repeat: int = 5) -> float:
    """Time a forward of `tokens` tokens after `past` tokens in a cache. Returns the minimum of
    `repeat` forwards, in milliseconds."""
    positions, caches = StaticCache(model, 1, past + tokens).plan(past, past + tokens)
    ids = torch.zeros_like(positions)  # (1, T)
    return 1e3 * seconds(lambda: model(ids, positions, caches), repeat)


def random_ids(model: Transformer, count: int) -> list[int]:
    """Return `count` random token ids."""
    return torch.randint(model.config.vocab_size, (count,)).tolist()


def oracle(text: list[int], share: float, count: int) -> Callable[[list[int]], list[int]]:
    """Make a proposer that knows the text to be written, and errs on purpose.

    Args:
        text: the whole text, with its prompt.
        share: the share of the guesses that are right. Which ones depends on their positions alone.
        count: guesses at a time.
    """

    def guess(ids: list[int]) -> list[int]:
        positions = range(len(ids), min(len(ids) + count, len(text)))
        return [text[i] if uniform(1, i) < share else text[i] ^ 1 for i in positions]

    return guess


def drain(engine: Engine) -> tuple[int, float]:
    """Step an engine until it is empty. Returns the most sequences that ran at once, and the time
    in seconds."""
    start, most = time.perf_counter(), 0
    while engine.queue:
        engine.step()
        most = max(most, len(engine.running))
    return most, time.perf_counter() - start


CLOCK = "working, {:3.0f} s "


def on_terminal(text: str) -> None:
    """If stderr is a terminal, overwrite its current line, and return to the line's start."""
    if sys.stderr.isatty():
        print(f"\r{text}\r", end="", file=sys.stderr, flush=True)


@contextlib.contextmanager
def clock() -> Iterator[None]:
    """Show every second how long the chapter has been running, so that silence worries nobody."""
    start, over = time.monotonic(), threading.Event()

    def tick() -> None:
        while not over.wait(1):
            on_terminal(CLOCK.format(time.monotonic() - start))

    thread = threading.Thread(target=tick, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        on_terminal(" " * len(CLOCK.format(0)))


class Count:
    """Count the forwards that a model runs, and the tokens in them."""

    def __init__(self, model: Transformer) -> None:
        self.forwards = self.tokens = 0
        model.register_forward_pre_hook(self.see)

    def see(self, _: Transformer, args: tuple) -> None:
        self.forwards += 1
        self.tokens += args[0].numel()

    def take(self) -> "Count":
        """Return the counts so far, and reset them."""
        now = copy.copy(self)
        self.forwards = self.tokens = 0
        return now


# --- Other processes ------------------------------------------------------------------------------


def start_ranks(count: int, words: list[str]) -> list[str]:
    """Start a script as `count` processes, and return what they print. As torchrun does on many
    machines, give each an address to meet at, and a number."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # any free port
    env = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    env |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(count))
    env["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # the store exists: no rank should make one
    each = [env | dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank)) for rank in range(count)]
    words = [sys.executable, *words]
    children = [subprocess.Popen(words, env=e, stdout=subprocess.PIPE, text=True) for e in each]
    try:
        printed = [child.communicate()[0] for child in children]
    finally:
        for child in children:  # they still run only after Ctrl-C
            child.kill()
            child.wait()
    if any(child.returncode for child in children):
        raise SystemExit("a process failed: see above")
    return printed


def be_rank(work: Callable[[Lesson, Ranks], dict[str, Any]]) -> None:
    """Be one of these processes: meet the others, run `work` on one thread, and print its result,
    which `Lesson.ranks` reads."""
    torch.set_num_threads(1)
    with join(torch.device("cpu")) as place, torch.no_grad():
        print(json.dumps(work(Lesson("--small" in sys.argv), place)))
        dist.barrier()  # a rank that has finished waits for the others


@contextlib.contextmanager
def watch_sums() -> Iterator[list[int]]:
    """Watch the sums over all ranks. Models that are sharded inside this context add the size of
    each sum, in bytes, to the list that it yields."""
    sizes: list[int] = []
    add_up = tp.add_up  # tp.shard makes it a hook of the model

    def see(module: nn.Module, args: tuple, y: Tensor) -> Tensor:
        sizes.append(y.nbytes)
        return add_up(module, args, y)

    tp.add_up = see
    try:
        yield sizes
    finally:
        tp.add_up = add_up


@contextlib.contextmanager
def servers(*options: list[str]) -> Iterator[list[str]]:
    """Start a server of the bundled model for each list of options, on free ports, and end them
    afterwards. Yields their addresses."""
    words = [sys.executable, str(BUNDLED.parents[1] / "server.py"), "--port", "0"]
    words += ["--dtype", "float32"]
    # One thread each: more do not help so small a model, and the load needs a processor too.
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    children = []
    for each in options:
        child = subprocess.Popen(words + each, stderr=subprocess.PIPE, text=True, env=env)
        children.append(child)
    try:
        addresses = []
        for child in children:
            for line in child.stderr:
                if found := re.search(r"serving .* on (\S+)", line):
                    addresses.append(found[1])
                    break
            else:
                raise SystemExit("a server did not start: run `python server.py` to see why")
            # The pipe must be read on, or it fills up and the server waits for it.
            threading.Thread(target=child.stderr.read, daemon=True).start()
        yield addresses
    finally:
        for child in children:
            child.send_signal(signal.SIGINT)
        for child in children:
            child.wait()
