"""Check on a GPU that the engine is right and fast: one command, ten minutes.

    python tools/gpu_check.py                       all parts, on CUDA; nothing is downloaded
    python tools/gpu_check.py --only packed ranks   only these parts
    python tools/gpu_check.py --device cpu --tiny   a rehearsal, without a GPU

Each part runs in a process of its own, because an error of CUDA poisons the process that has it.
tests/on_device.py checks that the engine is right, and says what right means; bench.py measures how
fast it is. A measurement is called slow if it reaches less than half of the read limit, of the GEMM
peak, or of another engine's speed. Every part leaves a record, benchmarks/DEVICE/PART.json: to put
a measurement into the tables, move it up into benchmarks/, and run `tools/bench.py report`. Read:
main, parts, run.
"""

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

if __name__ == "__main__":  # a script uses its own checkout, whichever is installed
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from around.folder.weights import build
from around.machine import pick_device
from model import Config
from tools import bench, report

ROOT, RECORDS = report.ROOT, report.RECORDS
DRAFT = ROOT / "checkpoints" / "shakespeare-draft"  # the smaller bundled model, for a rehearsal
Row = dict[str, Any]  # "row": its name; "fault": what is wrong, or ""; and figures


PROMPT, NEW = 128, 32  # tokens in the parts called latency
# For each command of bench.py: its options in a rehearsal, its options otherwise, and how many
# seconds it may take. The lengths of throughput are those of nano-vllm's benchmark.
OPTIONS = {
    "latency": ("--prompt-tokens 16 --new-tokens 4 --repeat 1 --batch 1 2",
                f"--compile --prompt-tokens {PROMPT} --new-tokens {NEW} --repeat 3", 200),
    "throughput": ("--requests 4 --prompt-tokens 8 32 --new-tokens 4 8 --baseline-requests 1",
                   "--compile --requests 256 --prompt-tokens 100 1024 --new-tokens 100 1024 "
                   "--max-num-seqs 256 --max-num-batched-tokens 2304 --baseline-requests 1", 200),
    "versus": ("--eager --prompt-tokens 16 --new-tokens 4 --sequences 2 --repeat 1",
               "--repeat 3 --timeout 120", 240),
}  # fmt: skip
# What is measured, the most important first: name -> bench.py's command, a shape, more options.
MEASURED = {
    "latency-1b-bfloat16": ("latency", "1b", ""),
    "throughput": ("throughput", "qwen3-0.6b", "--sampling greedy qwen"),
    "throughput-flex": ("throughput", "qwen3-0.6b", "--attention flex --block-size 128"),
    "throughput-graphs":
        ("throughput", "qwen3-0.6b", "--attention flex --block-size 128 --cuda-graphs"),
    "versus": ("versus", "1b", "--peers transformers vllm"),
    "latency-7b-bfloat16": ("latency", "7b", ""),
    "latency-1b-int8": ("latency", "1b", "--quantize int8"),
    "latency-1b-int4": ("latency", "1b", "--quantize int4"),
    "latency-7b-int8": ("latency", "7b", "--quantize int8"),
    "latency-7b-int4": ("latency", "7b", "--quantize int4"),
}  # fmt: skip
# A check of tests/on_device.py -> how many seconds it may take.
CHECKS = {
    "machine": 90, "packed": 90, "tokens-trained": 90, "tokens-sliding": 90, "tokens-experts": 90,
    "tokens-sandwich": 90, "compiled": 240, "ranks": 90,
}  # fmt: skip


class Part(NamedTuple):
    """What to run, and for how many seconds at most; or why it cannot be run here."""

    words: list[str]  # what Python runs, and its arguments
    limit: int
    absent: str = ""


def parts(args: argparse.Namespace, found: Row) -> dict[str, Part]:
    """Return all parts by name, in order: checks of correctness come before measurements of speed.

    Args:
        found: what the part `machine` says; {}: nothing yet.
    """
    common, made = ["--device", args.device], {}
    for name, limit in CHECKS.items():
        words = ["tests/on_device.py", name, *common, *["--tiny"] * args.tiny]
        absent = ""
        if name == "ranks" and args.device == "cuda" and found.get("gpus", 2) < 2:
            absent = "there is one GPU"
        made[name] = Part(words, limit, absent)
    for name, (command, shape, more) in MEASURED.items():
        if args.tiny and shape == "7b":
            continue
        tiny, full, limit = OPTIONS[command]
        words = [
            "-m",
            "tools.bench",
            command,
            *(tiny if args.tiny else full).split(),
            *more.split(),
        ]
        words += ["--checkpoint", str(DRAFT)] if args.tiny else ["--shape", shape]
        batches = that_fit(bench.SHAPES[shape], found.get("free_gb"))
        if command == "latency" and not args.tiny:
            words += ["--batch", *map(str, batches)]
        if command == "versus" and args.vllm_python:
            words += ["--vllm-python", str(args.vllm_python.absolute())]
        absent = "" if batches or args.tiny else "its weights do not fit into the free memory"
        if "--cuda-graphs" in words and args.device != "cuda":
            absent = "it needs CUDA"
        words += ["--dtype", "bfloat16", "--json", *common]
        made[name] = Part(words, limit, absent)
    return made


def that_fit(config: Config, free_gb: float | None) -> list[int]:
    """Choose the batch sizes, out of 1, 8, 32 and 256, that fit into 70 % of the free memory
    together with the model's weights."""
    with torch.device("meta"):
        used = 2 * sum(parameter.numel() for parameter in build(config).parameters())
    token = 4 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    batches = []
    for batch in (1, 8, 32, 256):  # bench.py keeps all their caches at once, so they add up
        used += batch * (PROMPT + NEW + 64) * token
        if free_gb is None or used < 0.7e9 * free_gb:
            batches.append(batch)
    return batches


# --- Running them ---------------------------------------------------------------------------------


def main(argv: list[str] | None = None) -> int:
    """Run the command line; return the exit status: 0 where nothing failed, 1 where something did,
    2 for an error of use, 130 for Ctrl-C."""
    args = parse_args(argv)
    known, why = parts(args, {}), ""
    try:
        pick_device(args.device)
    except ValueError:
        why = f"there is no {args.device} device here; --device cpu --tiny rehearses without one"
    unknown = [name for name in args.only if name not in known]
    if unknown:
        why = f"--only {' '.join(unknown)}: there is no such part among {', '.join(known)}"
    if why:
        print(f"gpu_check.py: error: {why}", file=sys.stderr)
        return 2
    return check(args)


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="gpu_check.py", description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--device", choices=("cuda", "cpu", "mps"), default="cuda")
    add("--tiny", action="store_true", help="a rehearsal: fewer checks, and tiny models")
    add("--only", nargs="+", default=[], metavar="NAME", help="these parts")
    add("--minutes", type=float, default=10.0, help="how long the whole check may take")
    add("--out", type=Path, help="folder of the records (default: benchmarks/DEVICE)")
    add("--vllm-python", type=Path, metavar="PATH", help="Python that has vLLM")
    return parser.parse_args(argv)


TOO_SHORT = 10  # seconds: if fewer are left, no other part begins


class Outcome(NamedTuple):
    """What came of a part."""

    status: str  # "passed", "failed" or "skipped"
    text: str  # in a line
    rows: list[Row]  # what it printed
    lines: tuple[str, ...] = ()  # faults; then, if it did not end as it should, its last stderr


def check(args: argparse.Namespace) -> int:
    """Run the parts, print what comes of them, and return the exit status."""
    end, found, folder = time.monotonic() + 60 * args.minutes, {}, args.out
    outcomes: dict[str, Outcome] = {}
    slow: list[str] = []
    status = 0
    chosen = [name for name in parts(args, {}) if name in ("machine", *args.only) or not args.only]
    try:
        for name in chosen:
            part = parts(args, found)[name]
            print(f"{name:20} ", end="", flush=True)
            start = time.monotonic()
            outcomes[name] = outcome = run(part, end - start)
            seconds = time.monotonic() - start
            if name == "machine":
                found = outcome.rows[0] if outcome.rows else {"row": "unknown"}
                folder = folder or RECORDS / re.sub(r"\W+", "-", found["row"].lower())
                folder.mkdir(parents=True, exist_ok=True)
            print(f"{outcome.status}, {seconds:.0f} s: {outcome.text}")
            for line in (*outcome.lines, *figures(part, outcome)):
                print(f"    {line}")
            slow += [f"\n    {name}: {line}" for line in slow_rows(outcome)]
            record = outcome._asdict() | {"part": name, "hardware": found["row"]}
            runs = record.pop("rows")
            record |= runs[0] if is_measured(outcome) else {"runs": runs}
            (folder / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")
    except KeyboardInterrupt:
        print("interrupted")
        status = 130
    print()
    for kind in ("passed", "failed", "skipped"):
        names = [name for name, outcome in outcomes.items() if outcome.status == kind]
        print(f"{kind}: {', '.join(names) or 'nothing'}")
    print("slow:", "".join(slow) or "nothing")
    print(f"records: {folder}")
    return status or any(outcome.status == "failed" for outcome in outcomes.values())


def run(part: Part, left: float) -> Outcome:
    """Run a part in a process of its own, for at most its limit or the time that is left."""
    if part.absent:
        return Outcome("skipped", part.absent, [])
    if left < TOO_SHORT:
        return Outcome("skipped", "no time is left; --minutes gives more", [])
    limit, status = min(part.limit, left), None
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            [sys.executable, *part.words],
            cwd=ROOT,
            env=os.environ | {"HF_HUB_OFFLINE": "1"},
            stdout=out,
            stderr=log,
            start_new_session=True,
        )
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = process.wait(limit)
        finally:
            close(process)
        out.seek(0)
        log.seek(0)
        rows = [json.loads(line) for line in out if line.startswith("{") and line.endswith("}\n")]
        last = [line.rstrip()[:300] for line in log if line.strip()][-5:]
    return verdict(rows, last, status, f"within {limit:.0f} s", limit < part.limit)


def verdict(
    rows: list[Row], last: list[str], status: int | None, time_given: str, is_short: bool
) -> Outcome:
    """Say what came of a part.

    Args:
        last: the last lines of its stderr.
        status: its exit status; None: it did not end in time.
        is_short: whether it had less time than it may have, as others had taken the rest.
    """
    faults = [f"{row['row']}: {row['fault']}" for row in rows if row.get("fault")]
    late = sum("late" in row for row in rows)
    text = f"{len(rows) - len(faults) - late} of {len(rows)} as they should be"
    text += f", {late} had no time" if late else ""
    for near in sorted({row["near"] for row in rows if "off" in row}):
        most = max(row["off"] for row in rows if row.get("near") == near and "off" in row)
        text += f"; off by {most:.1e} at most, {near:g} is allowed"
    if rows and "runs" in rows[0]:
        text = "; ".join(rows[0].get("notes", [])) or "measured"
    if status is None and is_short and not faults:
        return Outcome("skipped", f"the time was up, after {len(rows)} ways", rows)
    if status != 0 or not rows:
        how = f"did not end {time_given}" if status is None else f"exit status {status}"
        return Outcome("failed", f"{how}; {text}", rows, (*faults, *last))
    return Outcome("failed" if faults else "passed", text, rows, (*faults,))


def close(process: subprocess.Popen) -> None:
    """End a part and all that it has started: gently at first, as it may have files to remove, or
    ranks to end."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):  # nobody is left
            os.killpg(process.pid, number)
            for _ in range(100):
                process.poll()
                os.killpg(process.pid, 0)
                time.sleep(0.1)
    process.wait()


def measured(outcome: Outcome) -> dict[str, dict[str, float]]:
    """Return the medians of a measurement, by row. For a check, return {}."""
    return report.medians(outcome.rows[0]) if is_measured(outcome) else {}


def is_measured(outcome: Outcome) -> bool:
    """Say whether its only row is a record of bench.py's."""
    return bool(outcome.rows) and "runs" in outcome.rows[0]


LIMITS = {"read_limit_gb_s": "read limit, GB/s", "gemm_peak_tflop_s": "GEMM peak, TFLOP/s"}


def figures(part: Part, outcome: Outcome) -> Iterator[str]:
    """Write the figures of a measurement, with the titles of benchmarks/README.md."""
    for label, row in measured(outcome).items():
        titles = report.COLUMNS[part.words[2]] | LIMITS
        shown = [name for name in titles if name in row]
        yield f"{label}: " + ", ".join(
            f"{titles[name]} {report.number(row[name])}" for name in shown
        )


def slow_rows(outcome: Outcome) -> Iterator[str]:
    """Name rows that reach less than half of the memory's or the GEMM's limit, or less than half of
    another engine's speed. A short prompt is limited by memory, so its GEMM share is not named."""
    for label, row in measured(outcome).items():
        is_short = row.get("prefill_tok_s", 0) * row.get("first_token_s", 0) < 1000
        for name in ("of_read_limit", *["of_gemm_peak"] * (not is_short)):
            if row.get(name, 1) < 0.5:
                yield f"{label}: {row[name]:.2f} {name.replace('_', ' ')}"
        for name, value in row.items():
            if name.endswith("_times") and value > 2:
                yield f"{label}: {name.removesuffix('_times')} is {value:.1f} times as fast"


if __name__ == "__main__":
    sys.exit(main())
