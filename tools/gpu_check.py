"""Check on a GPU that the engine is right, and measure how fast it is: one command, ten minutes.

    python tools/gpu_check.py                         on CUDA; needs pytest, and downloads nothing
    python tools/gpu_check.py --device cpu --tiny     a rehearsal, without a GPU

tests/test_equivalence.py compares every way to run a model with a slow twin on the CPU: first those
that run eagerly, in float32 and in bfloat16, and at the end those that are compiled, as many as
there is time for. In between, bench.py measures one sequence and batches. Each part has a process
of its own, because an error of CUDA poisons the process that has it. Read: PARTS, run.
"""

import argparse
import os
import shlex
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

if __name__ == "__main__":  # a script uses its own checkout, whichever is installed
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from around.machine import pick_device

ROOT = Path(__file__).resolve().parent.parent
MINUTES = 10
TESTS = "-m pytest -o addopts= --maxfail 20 --tb short -q tests/test_equivalence.py"
BENCH = "tools/bench.py latency --dtype bfloat16"
SIZES = "--shape 1b --batch 1 8 32 --prompt-tokens 128 --new-tokens 32 --repeat 3"
TINY = "--checkpoint checkpoints/shakespeare-draft --prompt-tokens 9 --new-tokens 4 --repeat 1"
# A part -> what Python runs, what a rehearsal runs, and how many seconds it may take.
PARTS = {
    "eager": (f"{TESTS} -m 'not slow'", f"{TESTS} -m 'not slow' -k trained-preempted-plain", 330),
    "speed": (f"{BENCH} {SIZES}", f"{BENCH} {TINY}", 120),
    "compiled": (f"{TESTS} -m slow", f"{TESTS} -m slow -k trained-compiled-plain", 300),
}


def main(argv: list[str] | None = None) -> int:
    """Run all parts, and say what came of each. Returns 0; 1 where a part failed, 2 for an error of
    use, 130 for Ctrl-C."""
    parser = argparse.ArgumentParser(prog="gpu_check.py", description=__doc__.split("\n")[0])
    parser.add_argument("--device", choices=("cuda", "mps", "cpu"), default="cuda")
    parser.add_argument(
        "--tiny", action="store_true", help="a rehearsal: a tiny share of each part"
    )
    parser.add_argument("--record", help="keep the speed in benchmarks/RECORD.json")
    args = parser.parse_args(argv)
    try:
        pick_device(args.device)
    except ValueError:
        why = f"there is no {args.device} device; --device cpu --tiny rehearses without one"
        print(f"gpu_check.py: error: {why}", file=sys.stderr)
        return 2
    end, results = time.monotonic() + 60 * MINUTES, {}
    for name, (full, tiny, limit) in PARTS.items():
        if name == "compiled" and args.device == "mps":
            continue  # nothing is compiled for it
        words = shlex.split(tiny if args.tiny else full)
        if name == "speed":
            words += ["--device", args.device, *["--compile"] * (args.device != "mps")]
            words += ["--record", args.record] if args.record else []
        try:
            results[name] = run(words, args.device, min(limit, max(1, end - time.monotonic())))
        except KeyboardInterrupt:
            return 130
    print("\n" + "\n".join(f"{name}: {result}" for name, result in results.items()))
    return int(any(result.startswith("failed") for result in results.values()))


def run(words: list[str], device: str, limit: float) -> str:
    """Run a part for so many seconds at most. Returns what came of it."""
    env = os.environ | {"KILOLM_DEVICE": device}
    with subprocess.Popen([sys.executable, *words], cwd=ROOT, env=env) as process:
        try:
            status = process.wait(limit)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)  # pytest then says what it has found so far
            with suppress(subprocess.TimeoutExpired):
                process.wait(20)
            process.kill()
            return f"not finished after {limit:.0f} s, see above"
    return f"failed with status {status}" if status else "passed"


if __name__ == "__main__":
    sys.exit(main())
