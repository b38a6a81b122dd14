"""Write the generated pages: `tools/bench.py report` is its command line.

The tables of figures and the picture come from benchmarks/*.json, the list of files from the files.
No number in the README is typed by hand. Read: main, then what it calls.
"""

import ast
import io
import json
import math
import re
import tokenize
from collections.abc import Callable, Set
from functools import partial
from pathlib import Path

from tools import load

ROOT = Path(__file__).resolve().parent.parent
RECORDS, COURSE = ROOT / "benchmarks", ROOT / "course"
# In reading order: the engine; the techniques, which it runs without; what is at its edges.
ENGINE = ("model", "kv_cache", "sampling", "generate", "paged", "scheduler")
TECHNIQUES = ("quantize", "speculative", "experts", "structured", "tp", "flex", "server")
EDGES = ("settings", "checkpoint", "tokenizer", "packed", "program")
MODULES = (*ENGINE, *TECHNIQUES, *EDGES)


def main() -> None:
    """Rewrite what stands between the marks of README.md, the line links there and in the course,
    and all of the other pages."""
    readme = ROOT / "README.md"
    text = line_links(readme.read_text())
    for mark, write in PARTS.items():
        before, begin, rest = text.partition(f"<!-- {mark} -->\n")
        _, end, after = rest.partition(f"<!-- /{mark} -->")
        if not end:
            raise ValueError(f"README.md has no <!-- {mark} --> ... <!-- /{mark} --> part to fill")
        text = before + begin + write() + end + after
    readme.write_text(text)
    for page in COURSE.glob("*.md"):
        page.write_text(line_links(page.read_text(), page))
    for name, write in PAGES.items():
        (ROOT / name).write_text(write())


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
        "last_first_token_s": "the last first token, s", "host_ms": "host, ms a step",
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
        "llama_cpp_times": "times ours", "llama_bench": "llama.cpp (llama-bench), tok/s",
        "llama_bench_times": "times ours", "gpt_fast": "gpt-fast, tok/s",
        "gpt_fast_times": "times ours",
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


ABOUT = """# Figures

Written by `python tools/bench.py report` from the records beside it, each of which names its
command, machine and versions; `--record NAME` makes one.

Machines differ and drift, so each figure stands beside the limit it runs into, measured in the same
process and in turn with it: decoding reads every weight once per token (the read limit is the
faster of a sum and a matrix-vector product over memory), a prompt multiplies matrices (the GEMM
peak is the library's own product). Medians, in parentheses the least and the most. The 1b shape is
Llama-like, of 22 layers, D = 2048 and V = 32,000, with random weights.

- `quality` is of the bundled model, on the last tenth of the tiny-shakespeare corpus, which was
  held out from its training (but chose its best step); the rest calibrates GPTQ.
- Of guesses, "in theory" is theorem 3.8 of [2211.17192](https://arxiv.org/abs/2211.17192) with the
  acceptance and the costs measured in the same run: a random 1b model and a draft of its own first
  layers, the others made to add nothing, so that it always agrees unless `--draft-noise` disturbs
  it.
- `versus` runs each engine in a process of its own, on the same weights and as many threads. "One
  sequence" is what comes after a prompt of 16 tokens, without the time of the first token; "N
  sequences" have prompts of 16 to 64 tokens, which arrive together and whose time counts. In
  `transformers` they are one batch of `generate`, padded on the left.
- "Prefill MFU" is the prompt's model FLOPs, those of the weights' products without attention's own,
  as a share of the GEMM peak. That peak is measured: a share of a data sheet's would be smaller.
- A ratio is the median of the rounds'. Where it is not within 3 % of the ratio of the medians that
  stand beside it, the machine has changed between rounds, and no ratio is shown.
- Of int4 the older `latency` records show an earlier packed form, read by compiled code.
- `growth` fills the caches with noise and times single steps; "reading alone" is what the weights,
  keys and values of such a step take at the read limit. The paged cache's blocks are those that an
  empty pool hands out to one sequence after another, so that they follow each other and are read
  where they are. Where other sequences' blocks lie in between they are copied in each step.
- Of `throughput`, all requests are handed in at the start, from which a first token counts (in the
  older records, that of one at a time counts from its own start). In "static batches" the next
  batch starts when the longest of the one before has ended, and until then its other rows run on.
- `plan.py fit` times a server's steps; `check` sends it other loads, and simulates the very same
  ones with these times. "Off by" compares the medians of the rounds: 0.05 is 5 % too much.
- "Within the limits" is the share of requests with their first token within 1 s, and each further
  one within 0.1 s on average; "the floor" is a prompt as long as what is not cached.
"""


# What to see in each table: its first sentence.
LEADS = {
    "capacity-1b-epyc": "A static cache with room for 4,096 tokens costs what one for 128 does, as "
    "a step reads only what is filled.",
    "growth-110m-epyc": "How far blocks cost more than a slab as a text gets longer.",
    "growth-110m-zen5": "In blocks a long text costs about what it costs in a slab, and many "
    "sequences share the reading of the weights.",
    "latency-1b-bits-zen3": "What fewer bits bring to one sequence and to 8, without AVX-512.",
    "latency-1b-bits-zen5": "What fewer bits bring to one sequence, to 8 and to 32.",
    "latency-1b-eager-epyc": "The same model without `--compile`.",
    "latency-1b-prompt512-epyc": "A prompt of 512 tokens, and one sequence after it, by bits.",
    "latency-1b-zen3": "float32, where a processor has no bfloat16: one sequence and 32.",
    "latency-moe-zen3": "Experts: a step of 32 sequences reads nearly all of them.",
    "many-machines-xeon": "Three replicas behind a proxy: who gets a request decides how much of "
    "its prompt is found.",
    "prefix-1b-epyc": "A cached prefix takes away nearly all of the time to the first token.",
    "quality-shakespeare": "int8 costs nothing that can be seen; GPTQ halves what int4 costs.",
    "ranks-1b-2-epyc": "Two processes on two cores lose: their exchanges cost more than is saved.",
    "sample-epyc": "Any usual setting costs little beside a forward. Only a flat distribution, of "
    "which the whole vocabulary has to be sorted, does not.",
    "serve-64-streams-epyc": "64 streams at once: how soon they begin, and how evenly they go on.",
    "serve-shakespeare-epyc": "Latencies stay low until requests come faster than they are served.",
    "fit-shakespeare-spr": "A server's step, from its start to that of the next one, by what it "
    "has to do; the overhead is a request's way to the engine and back.",
    "plan-shakespeare-spr": "The bundled model under four loads, and what plan.py says of them.",
    "speculate-1b-epyc": "The most that guessing can bring: a draft that is always right.",
    "speculate-1b-noise-epyc": "The same with a draft that errs.",
    "speculate-draft-shakespeare": "A real draft on a small model, which fits into the caches.",
    "speculate-ngram-shakespeare": "Guesses that are looked up in a text that repeats itself.",
    "throughput-110m-20mixed-epyc": "Lengths that differ: a batch that is formed anew at each step "
    "beside one that waits for its longest.",
    "throughput-1b-32x64-epyc": "32 requests together read the weights once for all.",
    "throughput-qwen3-0.6b-epyc": "Sampling from 151,936 words costs little beside greedy.",
    "throughput-shakespeare-64-epyc": "The bundled model, 64 requests at once.",
    "versus-110m-epyc": "Beside other engines in float32, without AVX-512.",
    "versus-1b-zen5": "Beside vLLM, in bfloat16, on a processor that has it.",
    "versus-110m-zen5": "Beside other engines in float32, with AVX-512.",
}
# Records of older code, on machines that were not met again -> the commit that brought them.
OLDER = {
    "growth-110m-epyc": "e7dd2f3", "latency-1b-bits-zen3": "ddada5e", "latency-1b-zen3": "e7dd2f3",
    "latency-moe-zen3": "e7dd2f3", "versus-110m-epyc": "e7dd2f3",
}  # fmt: skip
# A ratio -> the figure that it compares, and with which row: "" is the first.
RATIOS = {
    "times_first_row": ("decode_tok_s", ""), "times_plain": ("decode_tok_s", ""),
    "times_one": ("output_tok_s", "one at a time"),
    "times_static": ("output_tok_s", "static batches"),
    "times_greedy": ("output_tok_s", "continuous batching"), "of_cold": ("first_token_s", ""),
    "times_floor": ("first_token_s", "floor"),
}  # fmt: skip
OLD_CODE = "Of older code"

# In the order of the page: the kind of a record, and what is drawn of it.
HEADINGS = {
    "versus": ("Beside other engines", "../docs/purpose.svg"),
    "latency": ("One sequence, and batches of equal ones", ""),
    "growth": ("How a step grows", ""),
    "speculation": ("Guessing ahead", ""),
    "throughput": ("Many requests", ""),
    "prefix": ("A prefix that is cached", ""),
    "serve": ("Serving", "../docs/serve.svg"),
    "fit": ("What a step takes", ""),
    "check": ("What plan.py predicts", ""),
    "run": ("How many machines", ""),
    "many": ("Many machines", ""),
    "ranks": ("Several processes", ""),
    "sample": ("The sampler alone", ""),
    "quality": ("What fewer bits cost", ""),
    OLD_CODE: (OLD_CODE, ""),
}


def speed_tables() -> str:
    """The recorded runs as Markdown: one table each, with its provenance."""
    text, runs = ABOUT, []
    for file in sorted(RECORDS.glob("*.json")):
        run = json.loads(file.read_text())
        # It has moved since the first records.
        command = re.sub(r" (tools/)?bench\.py ", " tools/bench.py ", run["command"])
        words = command.split()
        found = re.search(r"tools/(?:bench|plan)\.py (\w+)", command)
        kind = found[1] if found else "many"
        kind = "speculation" if "--specul" in command else kind
        kind = "ranks" if words[0] == "torchrun" else kind
        heading = OLD_CODE if file.stem in OLDER else kind
        runs.append((heading, kind, command, file, run))
    before = None
    for heading, kind, command, file, run in sorted(runs, key=lambda r: [*HEADINGS].index(r[0])):
        if heading != before:
            title, drawn = HEADINGS[heading]
            text += f"\n## {title}\n" + f"\n![{title}]({drawn})\n" * bool(drawn)
        columns, before = COLUMNS[kind], heading
        lead = LEADS.get(file.stem, "")
        lead += f" By the code of {OLDER.get(file.stem)} or before." * (file.stem in OLDER)
        text += f"\n{lead.strip()}\n" * bool(lead)
        columns = {  # what was measured once may not be any more
            name: title
            for name, title in columns.items()
            if any(name in row for row in run["runs"].values())
        }
        text += f"\n`{command}`  \n{run['hardware']}; {run['versions']}"
        if "model_gb" in run:
            text += (
                f"; weights {run['model_gb']:.2f} GB, peak memory {run['peak_memory_gb']:.2f} GB"
            )
        text += f", compiled in {run['compile_s']:.1f} s" if "compile_s" in run else ""
        for name, version in run.get("engines", {}).items():
            text += f"; {name} {version}"
        text += "".join(f"  \n{note}" for note in run.get("notes", []))
        if kind == "growth":
            text += f"\n\n![A step's time over text and sequences]({file.stem}.svg)"
        text += "\n\n| run | " + " | ".join(columns.values()) + " |\n"
        text += "|---" * (1 + len(columns)) + "|\n"
        for label, row in run["runs"].items():
            cells = [
                cell(*row[name]) if name in row and agrees(run["runs"], row, name) else ""
                for name in columns
            ]
            text += f"| {label} | " + " | ".join(cells) + " |\n"
    return text


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


def number(value: float) -> str:
    """Three significant digits, but whole numbers in full, and never an exponent.

    Example: 2563.4 -> 2,560; 1008 -> 1,008; 0.0000158812 -> 0.0000159; 1.0 -> 1
    """
    if not math.isfinite(value) or value == int(value):
        return f"{value:,.0f}"
    digits = 2 - math.floor(math.log10(abs(value)))
    text = f"{round(value, digits):,.{max(0, digits)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


# --- The pictures ---------------------------------------------------------------------------------

# What this engine is for: the title of a group of bars, the figure that they show, and for each
# label the record and its row.
PURPOSE = (
    ("32 requests, sampled as Qwen3 suggests: tokens per second (qwen3-0.6b)", "output_tok_s",
     {"one at a time": ("throughput-qwen3-0.6b", "one at a time"),
      "together, greedy": ("throughput-qwen3-0.6b", "continuous batching"),
      "together, sampled": ("throughput-qwen3-0.6b", "continuous batching, qwen")}),
    ("A prompt of 1,024 tokens: seconds to the first, less is better (1b)", "first_token_s",
     {"nothing cached": ("prefix-1b", "cold"), "1,008 tokens cached": ("prefix-1b", "cached")}),
    ("Fewer bits, one sequence: tokens per second (1b)", "decode_tok_s",
     {"bfloat16": ("latency-1b-prompt512", "batch 1"),
      "int8": ("latency-1b-prompt512", "int8, batch 1"),
      "int4": ("latency-1b-prompt512", "int4, batch 1")}),
    ("A long text, one sequence of 8,192 tokens: ms a step, less is better (110m)", "step_ms",
     {"static cache": ("growth-110m-zen5", "1 x 8,192 tokens, static cache"),
      "paged cache": ("growth-110m-zen5", "1 x 8,192 tokens, paged cache")}),
)  # fmt: skip


BLUE, GREY = "#2456c9", "#9aa0a8"
NAMES = {
    "kilolm": "kilolm", "transformers": "transformers", "vllm": "vLLM", "llama_cpp": "llama.cpp",
    "transformers_compiled": "transformers, compiled", "llama_bench": "llama.cpp, llama-bench",
    "gpt_fast": "gpt-fast",
}  # fmt: skip


OTHERS = {*NAMES.values()} - {"kilolm"}


def purpose_picture() -> str:
    """What this engine is for, then each row of each record of `versus`, as bars."""
    groups: dict[str, dict[str, float]] = {}
    machines = {}
    for title, figure, rows in PURPOSE:
        found = {label: (latest(name), row) for label, (name, row) in rows.items()}
        if all(record for record, _ in found.values()):
            values = {label: record["runs"][row] for label, (record, row) in found.items()}
            groups[title] = {label: row[figure][0] for label, row in values.items()}
            machines[title] = next(iter(found.values()))[0]["hardware"]
    for file in sorted(RECORDS.glob("versus-*.json")):
        run = json.loads(file.read_text())
        machine = run["hardware"]
        if file.stem in OLDER:
            machine += f"; older code, {OLDER[file.stem]}"
        found = versus_bars(run)
        groups |= found
        machines |= dict.fromkeys(found, machine)
    notes = [
        "Medians. An engine that has no bar was not measured there: no figure here is a guess.",
        "Compare bars within a group: the groups come from runs at different hours.",
        "Commands, versions and spreads: benchmarks/README.md.",
    ]
    return bars(groups, notes, OTHERS, machines)


def versus_bars(run: dict) -> dict[str, dict[str, float]]:
    """The groups of bars of one record of `versus`."""
    kind = re.search(r"\((\w+)\)", run["hardware"])
    before = f"{kind[1]}, " if kind else ""  # the kind of processor
    what = f"tokens per second ({run['model']}, {run['dtype']})"
    return {
        f"{before}{label}: {what}": {NAMES[name]: v[0] for name, v in row.items() if name in NAMES}
        for label, row in run["runs"].items()
    }


def versus_picture(run: dict) -> str:
    """This engine beside the others, as bars, from one record of `versus`."""
    what = f"{run['model']} {'shape' if run['model'] in SHAPE_NAMES else ''}".strip()
    lines = [f"{what}, {run['dtype']}; {run['hardware']}; medians"]
    engines: dict[str, str] = {}
    for name, version in run["engines"].items():  # both of transformers have one
        engines.setdefault(version, f"{NAMES[name]} {version}")
    lines += [*engines.values()]
    return bars(versus_bars(run), lines, OTHERS)


def bars(
    groups: dict[str, dict[str, float]], footnotes: list[str], others: Set[str] = frozenset(),
    below: dict[str, str] | None = None,
) -> str:  # fmt: skip
    """Groups of horizontal bars, each group on its own scale.

    Args:
        groups: title -> label -> value.
        others: labels whose bars stand back.
        below: title -> what stands under it, in small letters.
    """
    shapes: list[str] = []
    y = 0
    for title, values in groups.items():
        shapes.append(f'<text x="16" y="{y + 28}" font-weight="600">{title}</text>')
        if below:
            small = f'<text x="16" y="{y + 45}" font-size="12" fill="#666">{below[title]}</text>'
            shapes.append(small)
            y += 16
        y += 40
        for label, value in values.items():
            width = 380 * value / max(values.values())
            colour = GREY if label in others else BLUE
            shapes.append(
                f'<text x="190" y="{y + 16}" text-anchor="end">{label}</text>'
                f'<rect x="200" y="{y}" width="{width:.0f}" height="22" rx="3" fill="{colour}"/>'
                f'<text x="{208 + width:.0f}" y="{y + 16}">{number(value)}</text>'
            )
            y += 30
    for line in [*footnotes, *["Each group of bars has its own scale."] * (len(groups) > 1)]:
        shapes.append(f'<text x="16" y="{y + 24}" font-size="12" fill="#666">{line}</text>')
        y += 16
    return svg(shapes, 660, y + 24)


def svg(shapes: list[str], width: int, height: int) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="system-ui, sans-serif" font-size="15" fill="#1c1c1e">'
        f'<rect width="{width}" height="{height}" fill="#fff"/>'
    )
    return "\n".join([head, *shapes, "</svg>"]) + "\n"


def growth_picture(file: Path) -> str:
    """A step's time over the length of the text, and over the number of sequences, with what
    reading alone would take; both axes logarithmic."""
    run = json.loads(file.read_text())
    rows = {name: {key: v[0] for key, v in row.items()} for name, row in run["runs"].items()}
    several = max(row["sequences"] for row in rows.values())
    length = next((r["length"] for r in rows.values() if r["sequences"] == several), 0)
    panels = (
        ("Time of a step: one sequence", "tokens of text", "length", "step_ms",
         lambda row: row["sequences"] == 1),
        (f"Time of a token: sequences of {length:,.0f} tokens", "sequences", "sequences",
         "token_ms", lambda row: row["length"] == length),
    )  # fmt: skip
    shapes: list[str] = []
    for i, (title, axis, x, y, wanted) in enumerate(panels):
        curves: dict[str, list[tuple[float, float]]] = {}
        for name, row in rows.items():
            if wanted(row):
                kind = name.rpartition(", ")[2]
                curves.setdefault(kind, []).append((row[x], row[y]))
                share = row["read_ms"] * row[y] / row["step_ms"]
                if kind == "static cache":
                    curves.setdefault("reading alone", []).append((row[x], share))
        shapes += panel(curves, title, axis, 16 + 400 * i)
    model = run["model"] + " shape" * (run["model"] in SHAPE_NAMES)
    note = f"{model}, {'compiled, ' * ('compile_s' in run)}weights {number(run['weights_gb'])} GB; "
    note += f"{run['hardware']}; {run['versions']}; medians"
    shapes.append(f'<text x="16" y="342" font-size="12" fill="#666">{note}</text>')
    return svg(shapes, 816, 356)


COLOURS = {"static cache": BLUE, "paged cache": "#c0392b", "reading alone": "#888"}


def panel(
    curves: dict[str, list[tuple[float, float]]], title: str, axis: str, left: int
) -> list[str]:
    """Curves of (x, y > 0) over two logarithmic axes, y in ms, in a field 380 wide."""
    points = [point for curve in curves.values() for point in curve]
    xs, ys = sorted({x for x, _ in points}), [y for _, y in points]
    low, high = (round_125(edge, up) for edge, up in ((min(ys), False), (max(ys), True)))
    x0, x1, y0, y1 = left + 52, left + 366, 284, 76

    def at(value: float, least: float, most: float, begin: float, end: float) -> float:
        share = math.log(value / least) / (math.log(most / least) or 1)
        return begin + (end - begin) * share

    shapes = [f'<text x="{left}" y="28" font-weight="600">{title}</text>']
    tick = low
    while tick <= high * 1.001:
        y = at(tick, low, high, y0, y1)
        shapes.append(
            f'<path d="M{x0} {y:.1f}H{x1}" stroke="#ddd"/><text x="{x0 - 6}" y="{y + 4:.1f}" '
            f'text-anchor="end" font-size="12">{number(tick)}</text>'
        )
        tick = round_125(tick * 1.5, True)
    for x in xs:
        shapes.append(
            f'<text x="{at(x, xs[0], xs[-1], x0, x1):.1f}" y="{y0 + 18}" text-anchor="middle" '
            f'font-size="12">{number(x)}</text>'
        )
    shapes.append(
        f'<text x="{x1}" y="{y0 + 36}" text-anchor="end" font-size="12">{axis}</text>'
        f'<text x="{left}" y="64" font-size="12">ms</text>'
    )
    for i, (name, curve) in enumerate(curves.items()):
        line = " ".join(
            f"{at(x, xs[0], xs[-1], x0, x1):.1f},{at(y, low, high, y0, y1):.1f}"
            for x, y in sorted(curve)
        )
        dash = ' stroke-dasharray="5 4"' if name == "reading alone" else ""
        shapes.append(
            f'<polyline points="{line}" fill="none" stroke="{COLOURS[name]}" stroke-width="2"'
            f'{dash}/><text x="{x0 + 110 * i}" y="52" font-size="12" fill="{COLOURS[name]}">{name}'
            "</text>"
        )
    return shapes


def round_125(value: float, up: bool) -> float:
    """The next of ..., 0.5, 1, 2, 5, 10, ... that is at least, or at most, the value.

    Example: 37 -> 50 up, 20 down
    """
    power = 10.0 ** math.floor(math.log10(value))
    steps = [m * power for m in (1, 2, 5, 10)]
    if up:
        return next(step for step in steps if step >= value * 0.9999)
    return next(step for step in reversed(steps) if step <= value * 1.0001)


SHAPE_NAMES = ("110m", "1b", "7b")  # bench.py's, whose weights are random


def serve_picture() -> str:
    """The server's latencies over the rate of requests, from the last record."""
    run = latest("serve-shakespeare")
    figures = [{name: value[0] for name, value in row.items()} for row in run["runs"].values()]
    rates = [float(label.split()[0]) for label in run["runs"]]
    return load.plot(rates, figures, f"The bundled model; {run['hardware']}; {run['versions']}")


PARTS = {"files": file_table, "speed": summary}  # of README.md, between marks
PAGES: dict[str, Callable[[], str]] = {
    "docs/purpose.svg": purpose_picture,
    "docs/serve.svg": serve_picture,
    "benchmarks/README.md": speed_tables,
    **{
        f"benchmarks/{file.stem}.svg": partial(growth_picture, file)
        for file in sorted(RECORDS.glob("growth-*.json"))
    },
}
