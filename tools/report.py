"""Write the generated parts of the pages, and the pictures: `python tools/bench.py report`.

The figures come from benchmarks/*.json, and the list of files from the files: no number in these
parts is typed by hand. A part stands between the marks `<!-- NAME -->` and `<!-- /NAME -->`, and
what stands around it is written by hand. Read: main, then what it calls.
"""

import ast
import io
import json
import math
import re
import sys
import tokenize
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tools import pictures
from tools.pictures import Bars, Curves, Panel, number

ROOT = Path(__file__).resolve().parent.parent
RECORDS, COURSE = ROOT / "benchmarks", ROOT / "course"
# In reading order: the engine; the techniques, without which it runs; what is at its edges.
ENGINE = ("model", "kv_cache", "sampling", "generate", "paged", "scheduler")
TECHNIQUES = ("quantize", "speculative", "experts", "structured", "tp", "flex", "server")
EDGES = ("settings", "checkpoint", "tokenizer", "packed", "program")
MODULES = (*ENGINE, *TECHNIQUES, *EDGES)


def main() -> None:
    """Rewrite the generated parts of the pages, the line links of README.md and the course, and the
    pictures. Without matplotlib the pictures stay as they are, and a line says so."""
    for name, write in PAGES.items():
        (ROOT / name).write_text(write())
    for page in COURSE.glob("*.md"):
        page.write_text(line_links(page.read_text(), page))
    try:
        for name, picture in drawings().items():
            (ROOT / name).write_text(pictures.draw(*picture))
    except ImportError as error:
        print(f"the pictures are not drawn again: {error}", file=sys.stderr)


def readme() -> str:
    """Return README.md with its parts filled in."""
    text = line_links((ROOT / "README.md").read_text())
    for mark, write in PARTS.items():
        text = fill(text, mark, write())
    return text


def speed_tables() -> str:
    """Return benchmarks/README.md with the table of each record filled in, in the record's part, or
    at the end where it has none yet."""
    text = (ROOT / "benchmarks" / "README.md").read_text()
    for file in sorted(RECORDS.glob("*.json")):
        if f"<!-- {file.stem} -->" not in text:
            text += f"\n<!-- {file.stem} -->\n<!-- /{file.stem} -->\n"
        text = fill(text, file.stem, speed_table(file))
    return text


def fill(text: str, mark: str, inside: str) -> str:
    """Replace what stands between the marks of a part. Raises ValueError where a mark is absent."""
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


# --- The files ------------------------------------------------------------------------------------


def file_table() -> str:
    """Each module: its lines and nodes, the first line of its header, and the papers that it names;
    with the sums of the engine and of all."""
    text = "\n| file | lines | nodes | idea | papers |\n|---|---|---|---|---|\n"
    sums = [0, 0]
    for name in MODULES:
        source = (ROOT / f"{name}.py").read_text()
        lines, nodes = code_lines(source), code_nodes(source)
        sums = [a + b for a, b in zip(sums, (lines, nodes))]
        doc = ast.get_docstring(ast.parse(source))
        idea = doc.split("\n")[0].rstrip(".")
        papers = dict.fromkeys(PAPER.findall(" ".join(doc.split())))
        links = ", ".join(f"[{who} {year}](https://arxiv.org/abs/{at})" for who, year, at in papers)
        text += f"| [`{name}.py`]({name}.py) | {lines} | {nodes:,} | {idea} | {links} |\n"
        if name in (ENGINE[-1], MODULES[-1]):
            whole = "the engine" if name == ENGINE[-1] else "all"
            text += f"| {whole} | {sums[0]:,} | {sums[1]:,} | | |\n"
    return text + "\n"


def code_lines(source: str) -> int:
    """Count the lines that hold code: not blank, not only a comment, not in a docstring."""
    passive = {
        tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
        tokenize.ENDMARKER,
    }  # fmt: skip
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in passive:
            code.update(range(token.start[0], token.end[0] + 1))
    for doc in docstrings(ast.parse(source)):
        code.difference_update(range(doc.lineno, doc.end_lineno + 1))
    return len(code)


def code_nodes(source: str) -> int:
    """Count the expressions and statements of the syntax tree, less docstrings: what there is to
    understand, however it is folded into lines.

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

COLUMNS = {
    "latency": {
        "decode_tok_s": "decode, tok/s", "of_read_limit": "of the read limit",
        "times_first_row": "times row 1", "prefill_tok_s": "prefill, tok/s",
        "of_gemm_peak": "prefill MFU", "first_token_s": "first token, s",
    },
    "ranks": {
        "decode_tok_s": "decode, tok/s", "times_first_row": "times row 1",
        "of_read_limit": "of a rank's read limit", "prefill_tok_s": "prefill, tok/s",
        "gb_per_rank": "GB read per token and rank", "collectives_ms": "exchanges, ms a token",
    },
    "speculation": {
        "decode_tok_s": "decode, tok/s", "times_plain": "times plain", "theory": "in theory",
        "of_theory": "of theory", "accepted": "guesses accepted", "accepted_1": "of the first",
        "accepted_4": "of the fourth", "draft_cost": "cost of the draft",
    },
    "throughput": {
        "output_tok_s": "output, tok/s", "times_one": "times one at a time",
        "times_static": "times static batches", "times_greedy": "times greedy",
        "total_tok_s": "with prompts, tok/s",
        "mean_batch": "mean batch", "first_token_s": "first token, s",
        "last_first_token_s": "the last first token, s",
        "outside_ms": "outside the forward, ms a step", "kv_waste": "KV memory wasted",
        "usd_per_million_in_and_out": "dollars a million tokens, in and out",
        "usd_per_million_out": "... out, in for free",
    },
    "sample": {"ms": "milliseconds"},
    "growth": {
        "step_ms": "a step, ms", "read_ms": "reading alone, ms",
        "of_read_limit": "of the read limit", "token_ms": "a token, ms",
    },
    "versus": {
        "kilolm": "kilolm, tok/s", "transformers": "transformers, tok/s",
        "transformers_times": "times ours", "transformers_compiled": "transformers compiled, tok/s",
        "transformers_compiled_times": "times ours", "vllm": "vLLM, tok/s",
        "vllm_times": "times ours", "llama_cpp": "llama.cpp (Python), tok/s",
        "llama_cpp_times": "times ours",
    },
    "quality": {
        "weights_mb": "weights, MB", "perplexity": "perplexity", "more": "more than plain",
        "kl_nats": "KL divergence, nats",
    },
    "serve": {
        "output_tok_s": "output, tok/s", "errors": "errors", "within_limits": "within the limits",
        "ttft_p50_ms": "first token p50, ms", "ttft_p99_ms": "p99", "tpot_p50_ms": "each token p50",
        "tpot_p99_ms": "p99", "itl_p50_ms": "between tokens p50", "itl_p99_ms": "p99",
        "e2e_p50_ms": "whole p50", "e2e_p99_ms": "p99",
    },
    "many": {
        "hits": "prompts' tokens found", "times_round_robin": "times round robin",
        "busiest": "the busiest replica's share", "request_s": "requests/s",
        "ttft_p50_ms": "first token p50, ms", "ttft_p90_ms": "p90",
    },
    "prefix": {
        "first_token_s": "first token, s", "of_cold": "of cold", "times_floor": "times the floor",
        "cached_tokens": "tokens cached",
    },
    "fit": {"us": "microseconds", "steps": "steps", "median_error": "median error"},
    "run": {
        "ttft_p50_ms": "first token p50, ms", "ttft_p90_ms": "p90", "ttft_p99_ms": "p99",
        "tpot_p50_ms": "each token p50", "tpot_p90_ms": "p90", "tpot_p99_ms": "p99",
        "goodput_s": "goodput, requests/s", "hits": "found in the cache",
        "preemptions": "preemptions", "utilisation": "utilisation",
    },
    "check": {
        "ttft_p50_ms": "first token p50, ms", "ttft_p50_ms_off": "predicted, off by",
        "ttft_p90_ms": "p90", "ttft_p90_ms_off": "off by",
        "tpot_p50_ms": "each token p50", "tpot_p50_ms_off": "off by",
        "tpot_p90_ms": "p90", "tpot_p90_ms_off": "off by",
        "output_tok_s": "output, tok/s", "output_tok_s_off": "off by",
    },
}  # fmt: skip
# A ratio -> the figure that it compares, and with which row: "" is the first.
RATIOS = {
    "times_first_row": ("decode_tok_s", ""), "times_plain": ("decode_tok_s", ""),
    "times_one": ("output_tok_s", "one at a time"),
    "times_static": ("output_tok_s", "static batches"),
    "times_greedy": ("output_tok_s", "continuous batching"), "of_cold": ("first_token_s", ""),
    "times_floor": ("first_token_s", "floor"),
}  # fmt: skip


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
    text += "\n\n| run | " + " | ".join(columns.values()) + " |\n"
    text += "|---" * (1 + len(columns)) + "|\n"
    for label, row in rows.items():
        shown = [name in row and agrees(rows, row, name) for name in columns]
        cells = [cell(*row[name]) if show else "" for name, show in zip(columns, shown)]
        text += f"| {label} | " + " | ".join(cells) + " |\n"
    return text


def kind_of(command: str) -> str:
    """Say which of COLUMNS the record of a command has."""
    if command.startswith("torchrun"):
        return "ranks"
    if "--speculate" in command:
        return "speculation"
    found = re.search(r"tools/(?:bench|plan)\.py (\w+)", command)
    return found[1] if found else "many"


def agrees(rows: dict[str, dict], row: dict, name: str) -> bool:
    """Whether the median ratio of the rounds is within 3 % of the ratio of the medians beside it;
    of other figures, True. Where it is not, the machine was not the same in all rounds."""
    first = next(iter(rows.values()))
    if name.endswith("_times"):
        other, base = row[name.removesuffix("_times")], row["kilolm"]
    elif name in RATIOS and RATIOS[name][0] in row:
        figure, label = RATIOS[name]
        other, base = row[figure], rows.get(label, first).get(figure, (math.nan,))
    else:
        return True
    return abs(other[0] / base[0] / row[name][0] - 1) <= 0.03


# What, record, row; its own figure, with the unit; and one of what that is a multiple or a part.
SUMMARY = (
    ("one sequence", "latency-1b-prompt512", "batch 1", "decode_tok_s", "tok/s",
     "of_read_limit", "of the speed at which this machine reads memory"),
    ("one sequence", "latency-1b-prompt512", "int8, batch 1", "decode_tok_s", "tok/s",
     "times_first_row", "times bfloat16"),
    ("one sequence", "latency-1b-prompt512", "int4, batch 1", "decode_tok_s", "tok/s",
     "times_first_row", "times bfloat16"),
    ("one sequence, with 4 guesses of a draft that is always right", "speculate-1b", "4 guesses",
     "decode_tok_s", "tok/s", "times_plain", "times without"),
    ("32 requests at once", "throughput-1b-32x64", "continuous batching", "output_tok_s", "tok/s",
     "times_one", "times one after another"),
    ("32 requests at once, sampled as Qwen3 suggests from 151,936 words", "throughput-qwen3-0.6b",
     "continuous batching, qwen", "output_tok_s", "tok/s", "times_greedy", "of greedy's speed"),
    ("a prompt of 1,024 tokens, 1,008 of them cached", "prefix-1b", "cached", "first_token_s",
     "s to the first token", "of_cold", "of what it takes where nothing is cached"),
    ("weights rounded by GPTQ", "quality-shakespeare", "int4 gptq, group 128",
     "perplexity", "perplexity", "more", "more than plain, as a share"),
)  # fmt: skip


def summary() -> str:
    """What each technique brings, in a line each, from the records of its name."""
    text = "\n| model | what | measured | beside it | |\n|---|---|---|---|---|\n"
    for what, name, row, own, unit, figure, of in SUMMARY:
        if found := latest(name):
            values = found["runs"][row]
            beside = agrees(found["runs"], values, figure)
            ratio = f"{cell(*values[figure])} | {of}" if beside else " | "
            model = model_name(found, row)
            text += f"| {model} | {what} | {cell(*values[own])} {unit} | {ratio} |\n"
    return text + "\n"


def model_name(run: dict, row: str) -> str:
    """The model of a record's row, and the form of its weights, such as "1b, bfloat16"."""
    name = "bundled" if run["model"] == "shakespeare" else run["model"]
    rounded = re.match("int[48]", row)
    dtype = re.search(r"--dtype (\w+)", run["command"])
    # bench.py's default is bfloat16.
    form = rounded[0] if rounded else dtype[1] if dtype else "bfloat16"
    return f"{name}, {form}"


def latest(name: str) -> dict | None:
    """The last record of NAME.json or NAME-MACHINE.json, and not NAME-VARIANT-MACHINE.json."""
    files = [*RECORDS.glob(f"{name}.json"), *sorted(RECORDS.glob(f"{name}-*.json"))]
    files = [file for file in files if "-" not in file.stem.removeprefix(name)[1:]]
    return json.loads(files[-1].read_text()) if files else None


def cell(median: float, low: float, high: float) -> str:
    if low == high:
        return number(median)
    return f"{number(median)} ({number(low)}..{number(high)})"


# --- The pictures ---------------------------------------------------------------------------------

# What the engine is for: the title of a panel of bars, its unit, the figure that they show, and for
# each label the record and its row.
PURPOSE = (
    ("32 requests, sampled as Qwen3 suggests (qwen3-0.6b)", "tokens per second", "output_tok_s",
     {"one at a time": ("throughput-qwen3-0.6b", "one at a time"),
      "together, greedy": ("throughput-qwen3-0.6b", "continuous batching"),
      "together, sampled": ("throughput-qwen3-0.6b", "continuous batching, qwen")}),
    ("Fewer bits, one sequence (1b)", "tokens per second", "decode_tok_s",
     {"bfloat16": ("latency-1b-prompt512", "batch 1"),
      "int8": ("latency-1b-prompt512", "int8, batch 1"),
      "int4": ("latency-1b-prompt512", "int4, batch 1")}),
    ("A prompt of 1,024 tokens (1b)", "seconds to the first token, less is better",
     "first_token_s",
     {"nothing cached": ("prefix-1b", "cold"), "1,008 tokens cached": ("prefix-1b", "cached")}),
    ("A long text, one sequence of 8,192 tokens (110m)", "ms a step, less is better", "step_ms",
     {"static cache": ("growth-110m-zen5", "1 x 8,192 tokens, static cache"),
      "paged cache": ("growth-110m-zen5", "1 x 8,192 tokens, paged cache")}),
)  # fmt: skip
NAMES = {
    "kilolm": "kilolm", "vllm": "vLLM", "llama_cpp": "llama.cpp", "transformers": "transformers",
    "transformers_compiled": "... compiled",
}  # fmt: skip
# Records of older code, on a machine that was not available again -> the commit that made them.
OLDER = {"versus-110m-epyc": "e7dd2f3"}
SHAPE_NAMES = ("110m", "1b", "7b")  # bench.py's, whose weights are random
Picture = tuple[list[list[Panel]], list[str]]  # rows of panels, and notes: see pictures.draw


def drawings() -> dict[str, Picture]:
    """Return the pictures of the pages, by file."""
    found = {"docs/purpose.svg": purpose_picture(), "docs/serve.svg": serve_picture()}
    for file in sorted(RECORDS.glob("growth-*.json")):
        found[f"benchmarks/{file.stem}.svg"] = growth_picture(json.loads(file.read_text()))
    return found


def purpose_picture() -> Picture:
    """Show what the engine is for, then each record of `versus` in a row."""
    panels: list[Panel] = []
    for title, unit, figure, rows in PURPOSE:
        records = {label: latest(name) for label, (name, _) in rows.items()}
        values = {label: records[label]["runs"][row][figure] for label, (_, row) in rows.items()}
        medians = {label: median for label, (median, _, _) in values.items()}
        machine = next(iter(records.values()))["hardware"]
        panels.append(Bars(title, medians, f"{unit}; {machine}"))
    beside = []
    for file in sorted(RECORDS.glob("versus-*.json")):
        age = f"; older code, {OLDER[file.stem]}" if file.stem in OLDER else ""
        beside.append(versus_panels(json.loads(file.read_text()), age))
    notes = [
        "Medians. The bars of a group share a scale; the groups were measured at different hours.",
        "An engine without a bar was not measured there. "
        "Commands, versions and spreads: benchmarks/README.md.",
    ]
    return [panels[:2], panels[2:], *beside], notes


def versus_panels(run: dict[str, Any], note: str = "") -> list[Panel]:
    """Return a panel of bars for each row of a record of `versus`; the first has the note."""
    panels: list[Panel] = []
    note = f"tokens per second; {run['hardware']}{note}"
    for label, row in run["runs"].items():
        values = {title: row[name][0] for name, title in NAMES.items() if name in row}
        title = f"{label[0].upper()}{label[1:]} ({run['model']}, {run['dtype']})"
        panels.append(Bars(title, values, note, {*NAMES.values()} - {"kilolm"}))
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
    rows = {label: {name: v[0] for name, v in row.items()} for label, row in run["runs"].items()}
    several = max(row["sequences"] for row in rows.values())
    length = next(row["length"] for row in rows.values() if row["sequences"] == several)

    def lines(x: str, y: str, fixed: str, value: float) -> dict[str, list[tuple[float, float]]]:
        found = {}
        for kind in ("static cache", "paged cache"):
            points = [r for name, r in rows.items() if name.endswith(kind) and r[fixed] == value]
            found[kind] = sorted((row[x], row[y]) for row in points)
        # The bytes are the same in both caches.
        found["reading alone"] = sorted(
            (row[x], row["read_ms"] * row[y] / row["step_ms"]) for row in points
        )
        return found

    one = lines("length", "step_ms", "sequences", 1)
    many = lines("sequences", "token_ms", "length", length)
    title = f"Time of a token: sequences of {length:,.0f} tokens"
    panels: list[Panel] = [
        Curves("Time of a step: one sequence", one, "tokens of text", "ms", "xy"),
        Curves(title, many, "sequences", "ms", "xy"),
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
    figures = [{name: value[0] for name, value in row.items()} for row in run["runs"].values()]
    rates = [float(label.split()[0]) for label in run["runs"]]
    return load_picture(rates, figures, f"The bundled model; {run['hardware']}; {run['versions']}")


def load_picture(rates: list[float], figures: list[dict[str, float]], note: str) -> Picture:
    """Show time to first token and time per token over the rate of requests, with a line at the
    rate that is answered at most, where more were sent.

    Args:
        figures: what load.summary gives for each rate.
    """
    most = max(each["request_s"] for each in figures)
    mark = (most, f"at most {number(most)} answered") if most < 0.9 * max(rates) else None
    panels: list[Panel] = []
    for title, figure in (("Time to first token", "ttft"), ("Time per further token", "tpot")):
        lines = {
            f"p{p}": [(rate, row[f"{figure}_p{p}_ms"]) for rate, row in zip(rates, figures)]
            for p in (50, 99)
        }
        panels.append(Curves(title, lines, "requests per second", "ms", "y", mark=mark))
    return [panels], [note]


PARTS = {"files": file_table, "speed": summary}  # of README.md
PAGES: dict[str, Callable[[], str]] = {"README.md": readme, "benchmarks/README.md": speed_tables}
