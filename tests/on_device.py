"""Checks of the engine on a device, against the slow twins of ways.py on the CPU.

    python tests/on_device.py tokens-trained --device cuda
    python tests/on_device.py compiled --device cpu --tiny      a rehearsal: a few ways

A way runs a model by one path with one set of options (see ways.py). Each check prints a JSON line
after each way, so that a crash does not lose the lines before it. tools/gpu_check.py runs all
checks, each in a process of its own, because an error of CUDA poisons the process that has it.

The slow twin has no cache and runs on the CPU. A way is right if its log-probabilities are as near
to the twin's as ways.NEAR says and, in float32, if its tokens are exactly the twin's. (Compiled
int4 on a GPU is judged as bfloat16. So are the log-probabilities with an int8 cache, but the tokens
must be those of a twin with such a cache.)
"""

import argparse
import json
import math
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # a script uses its own checkout, whichever is installed
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import ways

from around.fast.packed import form_of
from around.settings import DTYPES
from quantize import QuantLinear, quantize_model
from tools import bench

ROOT = Path(__file__).resolve().parent.parent
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
Row = dict[str, Any]  # "row": its name; "fault": what is wrong, or ""; and figures


def machine(device: str, tiny: bool) -> Iterator[Row]:
    """Report the device."""
    about = argparse.Namespace(words=[], checkpoint=None, shape="")
    about = bench.provenance(torch.device(device), about)
    found: Row = {"row": about["hardware"], "versions": about["versions"]}
    if device == "cuda":
        free, _ = torch.cuda.mem_get_info()
        found |= {"gpus": torch.cuda.device_count(), "free_gb": free / 1e9}
    yield found


def attempt(row: Row, measure: Callable[[], tuple[float, list[str]]]) -> Row:
    """Run a measurement, and add the error that it found, and its faults, to a row.

    Args:
        row: has `near`, the largest error that is allowed.
        measure: returns the error, and a list of faults.
    """
    faults = []
    try:
        row["off"], faults = measure()
        if not row["off"] < row["near"]:  # or it is NaN
            faults = [*faults, f"off by {row['off']:.1e}, more than {row['near']:g}"]
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        at = [f"{Path(f.filename).name}:{f.lineno}" for f in frames if str(ROOT) in f.filename]
        text = " ".join(str(error).split())[:300]
        faults = [f"{type(error).__name__} at {at[-1]}: {text}"]
        if "CUDA error" in text:  # all that follows in this process would fail, too
            row["fatal"] = True
    return row | {"fault": "; ".join(faults)}


def try_way(case: str, dtype: str, path: str, kind: str, device: str, tiny: bool) -> Row:
    """Run one way, and compare it with the slow twin."""
    # Job 4 has a short prompt, and job 11 a long one. Both texts repeat, so n-grams find guesses.
    jobs = (4, 11) if tiny else ways.FEW
    # PyTorch's product of int4 weights is in bfloat16 on a GPU.
    rough = "int4" in kind and "compiled" in path and device != "cpu"
    exact = dtype == "float32" and not rough

    def measure() -> tuple[float, list[str]]:
        model, options = ways.placed(case, kind, device, DTYPES[dtype])
        run, known = (ways.PATHS | ways.REPLAYED)[path], ways.jobs_of(case, kind)
        found = run(model, [known[job] for job in jobs], **options)
        return ways.compare(case, kind, jobs, found, exact)

    near = ways.NEAR["float32" if exact and kind != "int8 cache" else "bfloat16"]
    return attempt({"row": f"{case}, {dtype}: {path}, {kind}", "near": near}, measure)


def tokens(case: str, device: str, tiny: bool) -> Iterator[Row]:
    """Try all ways that run eagerly. Those with guesses run in float32 only, because tokens, in
    which a wrong guess would show, are not compared in bfloat16."""
    for dtype in ("float32", "bfloat16"):
        for path, kind in ways.rows_of(case):
            guesses = "speculate" in ways.KINDS.get(kind, {})
            missing = kind == "structure" and not find_spec("llguidance")
            if not (missing or "compiled" in path or (guesses and dtype == "bfloat16")):
                yield try_way(case, dtype, path, kind, device, tiny)


# The ways that `compiled` tries, the most important first. On a GPU, steps with a static cache are
# replayed as CUDA graphs, compiled or not, and so are ways.REPLAYED.
COMPILED = [
    ("trained", "float32", "paged, compiled", "plain"),
    ("trained", "float32", "compiled", "plain"),
    *(("trained", "float32", path, "plain") for path in ways.REPLAYED),
    ("trained", "bfloat16", "compiled", "int8 weights"),
    ("trained", "bfloat16", "compiled", "int4 weights"),
    ("experts", "float32", "paged, compiled", "plain"),
    ("trained", "bfloat16", "paged, compiled", "int8 weights"),
    ("trained", "bfloat16", "paged, compiled", "int4 weights"),
    ("sliding", "float32", "compiled", "plain"),
    ("trained", "float32", "compiled", "int8 cache"),
    ("trained", "float32", "paged, compiled", "draft"),
]


def compiled(device: str, tiny: bool) -> Iterator[Row]:
    """Try the ways of COMPILED in turn. Each takes long to compile, or to record, so none begins
    after 100 s."""
    end = time.monotonic() + 100
    for row in COMPILED[:1] if tiny else COMPILED:
        if row[2] in ways.REPLAYED and device != "cuda":
            continue
        if time.monotonic() < end:
            yield try_way(*row, device, tiny)
        else:
            yield {"row": ", ".join(row), "late": True}


@torch.no_grad()
def packed(device: str, tiny: bool) -> Iterator[Row]:
    """Compare products with float64, for one row of x and for several. They are made by the form
    that a matrix gets for many sequences, or by the plain module where there is no form."""
    torch.manual_seed(0)
    N, K = (256, 128) if tiny else (4096, 2048)
    for dtype in ("float32", "bfloat16"):
        for mode in (None, "int8", "int4"):
            parent = torch.nn.Sequential(torch.nn.Linear(K, N)).to(device, DTYPES[dtype])
            linear = quantize_model(parent, mode)[0] if mode else parent[0]
            form = form_of(linear)
            # PyTorch's product of int4 weights rounds to bfloat16 on a GPU.
            near = 0.001 if dtype == "float32" and mode != "int4" else 0.02
            name = f"{dtype}, {mode or 'plain'}: {form.__name__ if form else 'none, as eager'}"
            yield attempt({"row": name, "near": near}, partial(form_error, linear, form))


@torch.no_grad()
def form_error(linear: torch.nn.Module, form: type | None) -> tuple[float, list[str]]:
    """Return the largest RMS error of a form's products against float64, as a share of the
    standard deviation of the float64 products; and no faults."""
    weight = linear.dequantize() if isinstance(linear, QuantLinear) else linear.weight
    fast, off = form(linear) if form else linear, []
    for rows in (1, 3, 32, 300):
        x = torch.randn(rows, weight.shape[1]).to(linear.bias)
        # On the CPU, as not all devices have float64.
        exact = [each.cpu().double() for each in (x, weight, linear.bias)]
        y = torch.nn.functional.linear(*exact)
        off.append(((fast(x).cpu() - y).square().mean().sqrt() / y.std()).item())
    return max(off, key=lambda each: math.inf if math.isnan(each) else each), []


def ranks(device: str, tiny: bool) -> Iterator[Row]:
    """Compare the text of two processes with that of one."""
    for words in ("--temperature 0", "--seed 1 --num-samples 2")[: 1 if tiny else 2]:
        script = [str(ROOT / "generate.py"), "--device", device, "--dtype", "float32"]
        script += ["--max-new-tokens", "40", *words.split()]
        found = []
        for launcher in ([sys.executable], TORCHRUN):
            done = subprocess.run([*launcher, *script], capture_output=True, text=True)
            sys.stderr.write(done.stderr)
            found.append((done.returncode, done.stdout))
        one, two = found
        same = one == two and one[0] == 0 and len(one[1]) > 20
        yield {"row": words, "fault": "" if same else f"one gives {one}, two give {two}"}


CHECKS: dict[str, Callable[[str, bool], Iterator[Row]]] = {
    "machine": machine,
    "packed": packed,
    **{f"tokens-{case}": partial(tokens, case) for case in ways.CASES},
    "compiled": compiled,
    "ranks": ranks,
}


def main(argv: list[str] | None = None) -> int:
    """Run one check. Return 0; or 1 where an error of CUDA has poisoned this process."""
    parser = argparse.ArgumentParser(prog="on_device.py", description=__doc__.split("\n")[0])
    parser.add_argument("check", choices=CHECKS)
    parser.add_argument("--device", choices=("cuda", "cpu", "mps"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a rehearsal: a few ways")
    args = parser.parse_args(argv)
    torch.set_float32_matmul_precision("highest")  # no TF32
    for row in CHECKS[args.check](args.device, args.tiny):
        print(json.dumps(row), flush=True)
        if "fatal" in row:
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
