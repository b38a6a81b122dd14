"""Write the generated parts of the pages: `python tools/bench.py report`.

The figures come from benchmarks/*.json, and the list of files from the files: no number in these
parts is typed by hand. A part stands between the marks `<!-- NAME -->` and `<!-- /NAME -->`, and
the text around it is written by hand. Read: main, then the functions that it calls.
"""

import ast
import io
import json
import math
import re
import tomllib
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from tokenize import COMMENT, DEDENT, ENDMARKER, INDENT, NEWLINE, NL, generate_tokens

from tools.pictures import number

ROOT = Path(__file__).resolve().parent.parent
RECORDS, COURSE = ROOT / "benchmarks", ROOT / "course"
ENGINE = ("model", "kv_cache", "sampling", "generate", "paged", "scheduler")
# What the project is known by.
CARD = ("model", "generate", "kv_cache", "paged", "scheduler")
CARD += ("quantize", "tp", "speculative", "server")
# The order in which to read: the root, then around/. Files with other names come last.
ORDER = (*ENGINE, "quantize", "speculative", "tp", "server", "experts", "llm")
ORDER += ("settings", "machine", "structured", "folder", "fast", "api", "start")


def main() -> int:
    """Rewrite the generated parts of the pages, and the line links of the course. Returns 0."""
    for name in PARTS:
        (ROOT / name).write_text(page(name))
    for chapter in COURSE.rglob("*.md"):
        chapter.write_text(line_links(chapter.read_text(), chapter))
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


def rooms() -> dict[str, list[Path]]:
    """Return the files of each row of the table: a file of the root, a file or a folder of
    around/."""
    paths = [*ROOT.glob("*.py"), *(ROOT / "around").glob("[!_]*")]
    paths.sort(key=lambda path: ORDER.index(path.stem) if path.stem in ORDER else len(ORDER))
    return {str(path.relative_to(ROOT)): sorted(path.rglob("*.py")) or [path] for path in paths}


def file_table() -> str:
    """List each file of the root, and each file and folder of around/, with its lines and nodes,
    the first line of its header, and the papers that its headers name; and the sums."""
    rows = [["file", "lines", "nodes", "idea", "papers"]]
    for name, files in rooms().items():
        docs = [ast.get_docstring(ast.parse(file.read_text())) or "" for file in files]
        papers = dict.fromkeys(PAPER.findall(" ".join(" ".join(docs).split())))
        links = [f"[{who} {year}](https://arxiv.org/abs/{at})" for who, year, at in papers]
        idea = docs[0].split("\n")[0].rstrip(".")  # of a folder: its __init__'s
        rows.append([f"[`{name}`](../{name})", *counts(files), idea, ", ".join(links)])
    rows += [[title, *counts(files), "", ""] for title, files in sums().items()]
    return f"\n{markdown(rows)}\n"


def sums() -> dict[str, list[Path]]:
    """Return the files whose sizes are told, and bounded in tests/test_size.py."""
    root = [*ROOT.glob("*.py")]
    return {
        "the six files": [ROOT / f"{name}.py" for name in ENGINE],
        "the root's first ten without sampling": [ROOT / f"{name}.py" for name in CARD],
        "the root": root,
        "everything": [*root, *(ROOT / "around").rglob("*.py")],
    }


def size(language: str) -> str:
    """Say how large the engine is, and all, in hundreds of lines: of code, and with comments."""
    told = {}
    for name, files in zip(("engine", "card", "root", "all"), sums().values()):
        sources = [file.read_text() for file in files]
        code = sum(map(code_lines, sources))
        written = sum(bool(line.strip()) for source in sources for line in source.splitlines())
        told |= {name: f"{round(code, -2):,}", f"{name}_text": f"{round(written, -2):,}"}
    return PAGE["size"][language].format(**told)


def counts(files: Iterable[Path]) -> tuple[str, str]:
    """Return the lines and nodes of some files."""
    sources = [file.read_text() for file in files]
    return f"{sum(map(code_lines, sources)):,}", f"{sum(map(code_nodes, sources)):,}"


def markdown(rows: list[list[str]]) -> str:
    """Write a table, whose first row has the titles."""
    lines = [f"| {' | '.join(row)} |\n" for row in rows]
    lines.insert(1, "|---" * len(rows[0]) + "|\n")
    return "".join(lines)


def code_lines(source: str) -> int:
    """Count the lines that hold code: not blank, not only a comment, not in a docstring."""
    code: set[int] = set()
    for token in generate_tokens(io.StringIO(source).readline):
        if token.type not in (COMMENT, NL, NEWLINE, INDENT, DEDENT, ENDMARKER):
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
NAMES = {"kilolm": "kilolm", "vllm": "vLLM", "llama_cpp": "llama.cpp"}
NAMES["transformers"] = "transformers"


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
    measured = {name for row in rows.values() for name in row}
    columns = {name: title for name, title in COLUMNS[kind].items() if name in measured}
    table = [["run", *columns.values()]]
    for label in PAGE["rows"].get(file.stem, rows):
        shown = [name in rows[label] and agrees(rows, rows[label], name) for name in columns]
        cells = [cell(*rows[label][name]) if show else "" for name, show in zip(columns, shown)]
        table.append([label, *cells])
    return f"{text}\n\n{markdown(table)}"


def kind_of(command: str) -> str:
    """Say which of COLUMNS the record of a command has."""
    if command.startswith("torchrun"):
        return "ranks"
    if "--speculate" in command:
        return "speculation"
    found = re.search(r"tools/bench\.py (\w+)", command)
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


def beside_others() -> str:
    """Show tokens per second beside other engines, from one record of `versus`. The fastest engine
    of a row is bold."""
    run = json.loads((RECORDS / f"{PAGE['beside_others']}.json").read_text())
    rows = [[f"{run['model']}, {run['dtype']}, tokens/s", *NAMES.values()]]
    for label, row in run["runs"].items():
        speeds = [row.get(name, [0.0])[0] for name in NAMES]
        cells = [number(speed) if speed else "–" for speed in speeds]
        best = speeds.index(max(speeds))
        cells[best] = f"**{cells[best]}**"
        rows.append([label, *cells])
    return markdown(rows)


def cell(median: float, low: float, high: float) -> str:
    if low == high:
        return number(median)
    return f"{number(median)} ({number(low)}..{number(high)})"


PARTS: dict[str, dict[str, Callable[[], str]]] = {  # page -> mark -> what writes the part
    "README.md": {"size": partial(size, "en"), "speed": beside_others},
    "docs/README.zh-CN.md": {"size": partial(size, "zh"), "speed": beside_others},
    "docs/files.md": {"files": file_table},
    "benchmarks/README.md": {},
}
