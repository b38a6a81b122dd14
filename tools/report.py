"""Write the generated parts of the pages, and the pictures: `python tools/bench.py report`.

The figures come from benchmarks/*.json, and the list of files from the files: no number in these
parts is typed by hand. A part stands between the marks `<!-- NAME -->` and `<!-- /NAME -->`, and
the text around it is written by hand. Read: main, then the functions that it calls.
"""

import ast
import io
import json
import math
import re
import sys
import tokenize
import tomllib
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from tools import pictures
from tools.pictures import Bars, Curves, Panel, number

ROOT = Path(__file__).resolve().parent.parent
RECORDS, COURSE = ROOT / "benchmarks", ROOT / "course"
# In reading order: the engine; the techniques, without which it runs; its edges.
ENGINE = ("model", "kv_cache", "sampling", "generate", "paged", "scheduler")
TECHNIQUES = ("quantize", "formats", "speculative", "experts", "structured", "tp", "flex", "server")
EDGES = ("http1", "openai_api", "function_calls", "metrics", "llm", "settings", "machine")
EDGES += ("checkpoint", "families", "tokenizer", "packed", "compiling", "program")
MODULES = (*ENGINE, *TECHNIQUES, *EDGES)
# What generate.py imports to run one prompt.
NEEDED = (*ENGINE, "llm", "settings", "machine", "checkpoint", "families", "tokenizer")


def main() -> int:
    """Rewrite the generated parts of the pages, the line links of the course, and the pictures.
    Without matplotlib the pictures stay as they are, and a line says so. Returns 0."""
    for name in PARTS:
        (ROOT / name).write_text(page(name))
    for chapter in COURSE.glob("*.md"):
        chapter.write_text(line_links(chapter.read_text(), chapter))
    try:
        for name, picture in drawings().items():
            (ROOT / name).write_text(pictures.draw(*picture))
    except ImportError as error:
        print(f"the pictures are not drawn again: {error}", file=sys.stderr)
    return 0


def page(name: str) -> str:
    """Return a page with its parts filled in."""
    text = speed_tables() if name == "benchmarks/README.md" else (ROOT / name).read_text()
    for mark, write in PARTS[name].items():
        text = fill(text, mark, write())
    return text


def speed_tables() -> str:
    """Return benchmarks/README.md with the table of each record filled in, in the record's part, or
    at the end where it has none yet."""
    text = (ROOT / "benchmarks" / "README.md").read_text()
    for file in sorted(RECORDS.glob("*.json")):
        if f"<!-- {file.stem} -->" not in text:
            text += f"\n## {file.stem}\n\n<!-- {file.stem} -->\n<!-- /{file.stem} -->\n"
        text = fill(text, file.stem, speed_table(file))
    return text


def fill(text: str, mark: str, inside: str) -> str:
    """Replace the text between the marks of a part. Raises ValueError where a mark is absent."""
    before, begin, rest = text.partition(f"<!-- {mark} -->\n")
    _, end, after = rest.partition(f"<!-- /{mark} -->")
    if not end:
        raise ValueError(f"the page has no <!-- {mark} --> ... <!-- /{mark} --> part to fill")
    return before + begin + inside + end + after


# --- The files ------------------------------------------------------------------------------------

# "Su et al. 2021 (rope, arXiv:2104.09864)"
PAPER = re.compile(
    r"([A-Z]\w+)(?: et al\.| (?:&|and) \w+)? (\d{4})(?:, | \()(?:[\w -]+, )?arXiv:(\d{4}\.\d{5})"
)


def file_table() -> str:
    """List each module with its lines and nodes, the first line of its header, and the papers that
    it names; and the sums of the engine and of all."""
    rows = [["file", "lines", "nodes", "idea", "papers"]]
    for name in MODULES:
        doc = ast.get_docstring(ast.parse((ROOT / f"{name}.py").read_text()))
        papers = dict.fromkeys(PAPER.findall(" ".join(doc.split())))
        links = [f"[{who} {year}](https://arxiv.org/abs/{at})" for who, year, at in papers]
        idea = doc.split("\n")[0].rstrip(".")
        rows.append([f"[`{name}.py`](../{name}.py)", *counts([name]), idea, ", ".join(links)])
        if name == ENGINE[-1]:
            rows.append(["the engine", *counts(ENGINE), "", ""])
    rows.append(["all", *counts(MODULES), "", ""])
    return f"\n{markdown(rows)}\n"


def size(language: str) -> str:
    """Say how large the engine is, what it needs to run one prompt, and all."""
    of = {"engine": ENGINE, "needed": NEEDED, "all": MODULES}
    files = {f"{part}_files": len(names) for part, names in of.items()}
    lines = {f"{part}_lines": counts(names)[0] for part, names in of.items()}
    return PAGE["size"][language].format(**files, **lines)


def counts(names: Iterable[str]) -> tuple[str, str]:
    """Return the lines and nodes of some modules."""
    sources = [(ROOT / f"{name}.py").read_text() for name in names]
    return f"{sum(map(code_lines, sources)):,}", f"{sum(map(code_nodes, sources)):,}"


def markdown(rows: list[list[str]]) -> str:
    """Write a table, whose first row has the titles."""
    lines = [f"| {' | '.join(row)} |\n" for row in rows]
    lines.insert(1, "|---" * len(rows[0]) + "|\n")
    return "".join(lines)


def code_lines(source: str) -> int:
    """Count the lines that hold code: not blank, not only a comment, not in a docstring."""
    passive = {
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENDMARKER,
    }
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in passive:
            code.update(range(token.start[0], token.end[0] + 1))
    for doc in docstrings(ast.parse(source)):
        code.difference_update(range(doc.lineno, doc.end_lineno + 1))
    return len(code)


def code_nodes(source: str) -> int:
    """Count the expressions and statements of the syntax tree, without docstrings. Folding code
    into fewer lines does not change the count.

    Example: `x = f(y)` has 5: the assignment, the call, and the names x, f and y
    """
    tree = ast.parse(source)
    counted = [node for node in ast.walk(tree) if isinstance(node, ast.stmt | ast.expr)]
    return len(counted) - 2 * len(docstrings(tree))  # each is a statement of one expression


def docstrings(tree: ast.Module) -> list[ast.stmt]:
    owners = ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef
    blocks = [node for node in ast.walk(tree) if isinstance(node, owners)]
    return [block.body[0] for block in blocks if ast.get_docstring(block) is not None]


def line_links(text: str, page: Path = ROOT / "README.md") -> str:
    """Point each link like [`Engine.step`](scheduler.py#L1) to the line where that is defined.

    Args:
        page: where the text stands; files are named from there, as in ../scheduler.py.

    Raises:
        ValueError: the file defines nothing of that name.
    """

    def link(match: re.Match) -> str:
        name, file = match[1], match[2]
        scope, line = ast.parse((page.parent / file).read_text()).body, 0
        for part in name.split("."):
            found = [node for node in scope if getattr(node, "name", None) == part]
            if not found:
                raise ValueError(f"{page.name} links to {name}, which {file} does not define")
            scope, line = found[0].body, found[0].lineno
        return f"[`{name}`]({file}#L{line})"

    return re.sub(r"\[`([\w.]+)`\]\(([\w./]+\.py)#L\d+\)", link, text)


# --- The figures ----------------------------------------------------------------------------------

# Which figures the pages show, and how.
PAGE = tomllib.loads(Path(__file__).with_name("page.toml").read_text())
COLUMNS: dict[str, dict[str, str]] = PAGE["columns"]
RATIOS: dict[str, tuple[str, str]] = PAGE["ratios"]


def speed_table(file: Path) -> str:
    """Return a record as Markdown: its command, its machine, and a table."""
    run = json.loads(file.read_text())
    rows, kind = run["runs"], kind_of(run["command"])
    text = f"`{run['command']}`  \n{run['hardware']}; {run['versions']}"
    if "model_gb" in run:
        text += f"; weights {run['model_gb']:.2f} GB, peak memory {run['peak_memory_gb']:.2f} GB"
    if "compile_s" in run:
        text += f", compiled in {run['compile_s']:.1f} s"
    text += "".join(f"; {name} {version}" for name, version in run.get("engines", {}).items())
    text += "".join(f"  \n{note}" for note in run.get("notes", []))
    if kind == "growth":
        text += f"\n\n![A step's time over text and sequences]({file.stem}.svg)"
    measured = {name for row in rows.values() for name in row}
    columns = {name: title for name, title in COLUMNS[kind].items() if name in measured}
    table = [["run", *columns.values()]]
    for label, row in rows.items():
        table.append([label])
        for name in columns:
            shown = name in row and agrees(rows, row, name)
            table[-1].append(cell(*row[name]) if shown else "")
    return f"{text}\n\n{markdown(table)}"


def kind_of(command: str) -> str:
    """Say which of COLUMNS the record of a command has."""
    if command.startswith("torchrun"):
        return "ranks"
    if "--speculate" in command:
        return "speculation"
    found = re.search(r"tools/(?:bench|plan)\.py (\w+)", command)
    return found[1] if found else "many"


def agrees(rows: dict[str, dict], row: dict, name: str) -> bool:
    """Say whether a ratio's median is within 3 % of the ratio of the medians beside it. Where it is
    not, the machine changed between rounds. Figures that are no ratios agree."""
    first = next(iter(rows.values()))
    if name.endswith("_times"):
        other, base = row[name.removesuffix("_times")], row["kilolm"]
    elif name in RATIOS and RATIOS[name][0] in row:
        figure, label = RATIOS[name]
        other, base = row[figure], rows.get(label, first).get(figure, (math.nan,))
    else:
        return True
    return abs(other[0] / base[0] / row[name][0] - 1) <= 0.03


def summary() -> str:
    """List what each technique brings, from the records of its name."""
    rows = [["model", "what", "measured", "ratio", "of what"]]
    for line in PAGE["summary"]:
        record = latest(line["record"])
        row, ratio = record["runs"][line["row"]], line["ratio"]
        measured = f"{cell(*row[line['figure']])} {line['unit']}"
        beside = ["", ""]
        if agrees(record["runs"], row, ratio):
            beside = [cell(*row[ratio]), line["meaning"]]
        rows.append([model_name(record, line["row"]), line["what"], measured, *beside])
    return f"\n{markdown(rows)}\n"


def beside_others() -> str:
    """Show tokens per second beside other engines, from one record of `versus`. The fastest engine
    of a row is bold."""
    run = json.loads((RECORDS / f"{PAGE['beside_others']}.json").read_text())
    rows = [[f"{run['model']}, {run['dtype']}, tokens/s", *NAMES.values()]]
    for label, row in medians(run).items():
        speeds = [row.get(name, 0.0) for name in NAMES]
        cells = [number(speed) if speed else "" for speed in speeds]
        best = speeds.index(max(speeds))
        cells[best] = f"**{cells[best]}**"
        rows.append([label, *cells])
    return markdown(rows)


def model_name(run: dict, row: str) -> str:
    """Name the model of a record's row, and the form of its weights, such as "1b, bfloat16"."""
    name = "bundled" if run["model"] == "shakespeare" else run["model"]
    rounded = re.match("int[48]", row)
    dtype = re.search(r"--dtype (\w+)", run["command"])
    # bench.py's default is bfloat16.
    form = rounded[0] if rounded else dtype[1] if dtype else "bfloat16"
    return f"{name}, {form}"


def latest(name: str) -> dict | None:
    """Return the last record of NAME.json or NAME-MACHINE.json, not NAME-VARIANT-MACHINE.json."""
    files = [*RECORDS.glob(f"{name}.json"), *sorted(RECORDS.glob(f"{name}-*.json"))]
    files = [file for file in files if "-" not in file.stem.removeprefix(name)[1:]]
    return json.loads(files[-1].read_text()) if files else None


def medians(run: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Return the median of each figure of a record, by row."""
    return {
        label: {name: median for name, (median, _, _) in row.items()}
        for label, row in run["runs"].items()
    }


def cell(median: float, low: float, high: float) -> str:
    if low == high:
        return number(median)
    return f"{number(median)} ({number(low)}..{number(high)})"


# --- The pictures ---------------------------------------------------------------------------------

NAMES = {
    "kilolm": "kilolm", "vllm": "vLLM", "llama_cpp": "llama.cpp", "transformers": "transformers"
}  # fmt: skip
SHAPE_NAMES = ("110m", "1b", "7b")  # bench.py's, whose weights are random
Picture = tuple[list[list[Panel]], list[str]]  # rows of panels, and notes: see pictures.draw


def drawings() -> dict[str, Picture]:
    """Return the pictures of the pages, by file."""
    found = {"docs/speed.svg": speed_picture(), "docs/serve.svg": serve_picture()}
    for file in sorted(RECORDS.glob("growth-*.json")):
        found[f"benchmarks/{file.stem}.svg"] = growth_picture(json.loads(file.read_text()))
    return found


def speed_picture() -> Picture:
    """Show each record of `versus` of one machine in a row."""
    files = sorted(RECORDS.glob(f"versus-*-{PAGE['machine']}.json"))
    notes = ["Medians. An engine without a bar was not measured there; see benchmarks/README.md."]
    return [versus_panels(json.loads(file.read_text())) for file in files], notes


def versus_panels(run: dict[str, Any]) -> list[Panel]:
    """Return a panel of bars for each row of a record of `versus`; the first has the unit."""
    panels: list[Panel] = []
    note = f"tokens per second; {run['hardware']}"
    others = {*NAMES.values()} - {"kilolm"}
    for label, row in medians(run).items():
        bars = {title: row[name] for name, title in NAMES.items() if name in row}
        title = f"{label.capitalize()} ({run['model']}, {run['dtype']})"
        panels.append(Bars(title, bars, note, others))
        note = ""
    return panels


def versus_picture(run: dict[str, Any]) -> Picture:
    """Show this engine beside the others, from one record of `versus`."""
    notes = [f"{shape_of(run)}; {run['versions']}; medians"]
    notes += [f"{name} {version}" for name, version in run["engines"].items()]
    return [versus_panels(run)], notes


def growth_picture(run: dict[str, Any]) -> Picture:
    """Show a step's time over the length of the text, and a token's over the number of sequences,
    with what reading alone would take."""
    rows = medians(run)
    several = max(row["sequences"] for row in rows.values())
    length = next(row["length"] for row in rows.values() if row["sequences"] == several)

    def curves(title: str, x: str, x_name: str, kept: dict[str, float]) -> Curves:
        """Show milliseconds a token over x, of the rows that have certain values."""
        lines: dict[str, dict[float, float]] = {}
        reading = {}  # the same bytes in both caches
        for label, row in rows.items():
            if kept.items() <= row.items():
                line = lines.setdefault(label.rpartition(", ")[2], {})
                line[row[x]] = row["token_ms"]
                reading[row[x]] = row["read_ms"] / row["sequences"]
        lines["reading alone"] = reading
        points = {name: sorted(line.items()) for name, line in lines.items()}
        return Curves(title, points, x_name, "ms", "xy")

    title = f"Time of a token: sequences of {length:,.0f} tokens"
    panels: list[Panel] = [
        curves("Time of a step: one sequence", "length", "tokens of text", {"sequences": 1}),
        curves(title, "sequences", "sequences", {"length": length}),
    ]
    how = ", compiled" if "compile_s" in run else ""
    note = f"{shape_of(run)}{how}, weights {number(run['weights_gb'])} GB; {run['hardware']}; "
    return [panels], [note + f"{run['versions']}; medians"]


def shape_of(run: dict[str, Any]) -> str:
    """Name a record's model, and say where only its shape is real."""
    return run["model"] + " shape" * (run["model"] in SHAPE_NAMES)


def serve_picture() -> Picture:
    """Show the server's latencies over the rate of requests, from the last record."""
    run = latest("serve-shakespeare")
    rows = {float(label.split()[0]): row for label, row in medians(run).items()}
    return load_picture(rows, f"The bundled model; {run['hardware']}; {run['versions']}")


def load_picture(rows: dict[float, dict[str, float]], note: str) -> Picture:
    """Show time to first token and time per token over the rate of requests, with a line at the
    rate that is answered at most, where more were sent.

    Args:
        rows: rate -> the result of load.summary.
    """
    most = max(row["request_s"] for row in rows.values())
    mark = (most, f"at most {number(most)} answered") if most < 0.9 * max(rows) else None
    panels: list[Panel] = []
    for title, figure in (("Time to first token", "ttft"), ("Time per further token", "tpot")):
        lines = {}
        for name in ("p50", "p99"):
            lines[name] = [(rate, row[f"{figure}_{name}_ms"]) for rate, row in rows.items()]
        panels.append(Curves(title, lines, "requests per second", "ms", "y", mark=mark))
    return [panels], [note]


PARTS: dict[str, dict[str, Callable[[], str]]] = {  # page -> mark -> what writes the part
    "README.md": {"size": partial(size, "en"), "speed": beside_others},
    "README.zh-CN.md": {"size": partial(size, "zh"), "speed": beside_others},
    "docs/files.md": {"files": file_table},
    "benchmarks/README.md": {"summary": summary},
}
