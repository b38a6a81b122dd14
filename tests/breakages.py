"""Sixty one-line breakages of the engine, and how many of them the fast tests catch. That number
must not fall when tests are merged or cut. pytest does not collect this file. To run it:

    python tests/breakages.py TREE RESULTS.json [--named]

TREE is a checkout. It is copied, and the copy is broken, one line at a time. First those of the
test files named below run that exist in TREE. What they miss then meets all other fast tests, on
two workers (not with --named). A test that fails without a breakage does not count. RESULTS.json
is written as results come, and a run that is cut off goes on from there.

Each run is forked from this process, which has imported what takes long, so most take seconds.
"""

import importlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

# A file, the tests that are to catch its breakages, then the breakages: old text ~> new text. The
# old text must occur in a single place of the engine, which need not be in this file: the files had
# other names once.
BREAKAGES = r"""
# model.py: model words
    embedding_multiplier, dtype=x.dtype) ~> embedding_multiplier)
    partial(F.gelu, approximate="tanh") if ~> F.gelu if
# kv_cache.py: quantize paged
    stored[..., -4:].clone(memory_format=torch.contiguous_format) ~> stored[..., -4:].clone()
# kv_cache.py: generate quantize equivalence
    if end > self.max_seq_len: ~> if end > self.max_seq_len + 1:
# sampling.py: sampling structured speculative
    (mass - ranked) < (top_p * total) ~> (mass - ranked) <= (top_p * total)
    output = ids[sequence.prompt_len :] ~> output = ids
    other.matcher = self.matcher.deep_copy() ~> other.matcher = self.matcher
# generate.py: generate sampling
    yield sequence.tokens[-1] ~> yield token
# paged.py: paged scheduler
    for block in reversed(table.blocks): ~> for block in table.blocks:
    table.length, [*table.chain]) ~> table.length, table.chain)
# scheduler.py: scheduler sampling
    job.seed += i ~> job.seed += 1
    min(longest, num_blocks * size + 1) ~> min(longest, num_blocks * size)
    prompt[:] = [Token(job.ids[0])] ~> prompt += [Token(job.ids[0])]
# quantize.py: quantize gptq
    scales.where(scales > 0, 1) ~> scales.where(scales >= 0, 1)
# speculative.py: speculative
    rest[x] = 0 ~> rest[x] = rest[x]
    start = max(job.table.length - 1, 0) ~> start = job.table.length
# tp.py: tp
    lambda bias: bias * (rank == 0) ~> lambda bias: bias
# experts.py: experts model
    (i + 1) % config.decoder_sparse_step == 0 ~> i % config.decoder_sparse_step == 0
# llm.py: generate words
    params = params.with_stop(tokenizer.chat_stop) ~> params = params.with_stop(())
# server.py: server
    if finished or connection.stream: ~> if finished:
# around/folder/families.py: model folders
    first = math.floor(first) ~> first = math.ceil(first)
    if rope.get("mscale") and rope.get("mscale_all_dim"): ~> if rope.get("mscale"):
    if module in ("o_proj", "down_proj"): ~> if module == "o_proj":
    if not config.ropes or config.ropes[layer] == 0: ~> if not config.ropes or config.ropes[0] == 0:
    merged | FIXED.get(name, {}) ~> FIXED.get(name, {}) | merged
# around/folder/config.py: model folders checkpoint_errors gptq
    raw.setdefault("eos_token_id", []) ~> raw["eos_token_id"] = []
    found, list, int, -1)) if i >= 0 ~> found, list, int, -1))
    config.num_experts_per_tok, int, 1, config.num_experts) ~> config.num_experts_per_tok, int, 1)
# around/folder/weights.py: folders model checkpoint_errors gptq
    while path[0] in ("model", "language_model"): ~> if path[0] in ("model", "language_model"):
    torch.equal(head.read().to(embedding.empty.dtype), ~> torch.equal(head.read(),
    if places.get(name, whole) == shard: ~> if places.get(name, shard) == shard:
    if path == "lm_head" and has_8_bits and ~> if path == "lm_head" and
# around/folder/formats.py: gptq
    values = (values + 1) & mask ~> values = values + 1
    elif name not in wanted and not stored.read().any(): ~> elif name not in wanted:
# around/folder/tokenizer.py: tokenizer words folders
    for text in sorted(id_of, reverse=True)] ~> for text in sorted(id_of)]
    config.get("legacy", not is_llama) ~> config.get("legacy", is_llama)
    (*config.eos_ids, self.eos_id) if i is not None} ~> (*config.eos_ids, self.eos_id) if i}
    backend.no_truncation() ~> backend.no_truncation
# around/folder/text.py: tokenizer sampling words
    for length in (8, 7, 6, 5, 128): ~> for length in (8, 128):
    len(self._held) if can_stop else len(pending) ~> 0 if can_stop else len(pending)
# around/folder/chat.py: tokenizer folders
    turn.get("refusal", Null()) ~> turn.get("refusal", "")
    partial(json.dumps, ensure_ascii=False) ~> json.dumps
# around/fast/packed.py: quantize gptq
    if scales.shape[1] > 1 or (linear.zeros != 128).any(): ~> if scales.shape[1] > 1:
# around/fast/compiling.py: quantize paged compile
    if q.shape[2] > 1 or self.kv.dtype != q.dtype: ~> if q.shape[2] > 1:
# around/fast/threads.py: threads
    fields[:3] + fields[5:8] ~> fields[:3] + fields[4:8]
# around/settings.py: sampling generate server
    kind is bool or type(value) is not bool ~> True
    seed=None if self.seed == -1 else self.seed ~> seed=self.seed
# around/machine.py: generate program scheduler tp
    lambda signum, frame: pressed.append(signum)) ~> signal.SIG_IGN)
# around/structured.py: structured words server
    tokenizer.eos_ids(config) & {*range(config.vocab_size)} ~> tokenizer.eos_ids(config)
    value if key in ("const", "enum") else tidy(value, closes) ~> tidy(value, closes)
# around/api/requests.py: server
    if alias in given: ~> if alias:
    fields.get("max_tokens", 1) ~> fields.get("max_tokens", 0)
# around/api/answers.py: server function_calls
    self.offset = offsets[-1] ~> self.offset = offsets[0]
    if before.strip(): ~> if before:
# around/api/function_calls.py: function_calls
    allow_nan=False, ~> allow_nan=True,
# around/api/metrics.py: server page
    1 - len(engine.pool.available) / engine ~> len(engine.pool.available) / engine
# around/start/begin.py: generate speculative
    4 if args.speculate is None else args.speculate ~> args.speculate or 4
# around/start/command.py: generate
    start = len(messages) ~> start = 0
# around/start/memory.py: scheduler server long
    sum(map(int, cached[-2:])) ~> sum(map(int, cached[:2]))
# around/start/ranks.py: tp nodes
    zlib.crc32(file.open("rb").read(2**26)) ~> zlib.crc32(file.open("rb").read(2**6))
"""
IMPORTED = "torch transformers sentencepiece tokenizers hypothesis openai llguidance jsonschema"
LIMIT = 600  # seconds: a breakage that makes a test hang is caught, too


def breakages(tree: Path) -> list[tuple[Path, str, str, list[str]]]:
    """Return the table, each time with the file of `tree` that has the old text."""
    engine = {file: file.read_text() for file in (*tree.glob("*.py"), *tree.glob("around/**/*.py"))}
    table = []
    for line in BREAKAGES.strip().splitlines():
        if line.startswith("#"):
            tests = line.partition(":")[2].split()
            continue
        old, _, new = line.strip().partition(" ~> ")
        places = [file for file, text in engine.items() for _ in range(text.count(old))]
        if len(places) != 1:
            raise SystemExit(f"this stands in {len(places)} places, not in one: {old}")
        table.append((places[0], old, new, tests))
    return table


def failures(tree: Path, *args: str) -> list[str]:
    """Run fast tests in a child, by pytest's arguments, and return the names of those that fail."""
    log = tree.with_name("log")
    child = os.fork()
    if not child:
        try:
            os.setsid()
            os.chdir(tree)
            sys.path[:0] = [str(tree), str(tree / "tests")]
            output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(output, 1)
            os.dup2(output, 2)
            pytest = importlib.import_module("pytest")
            usual = ["-x", "-q", "--tb=no", "-rfE", "-pno:cacheprovider", "--hypothesis-seed=0"]
            code = pytest.main([*usual, "-mnot slow and not nightly", *args])
            os._exit(code)
        finally:
            os._exit(3)
    ends = time.time() + LIMIT
    done = status = 0
    while not done and time.time() < ends:
        time.sleep(0.05)
        done, status = os.waitpid(child, os.WNOHANG)
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # also what a test has left running
    if not done:
        os.waitpid(child, 0)
        return ["no end"]
    code = os.waitstatus_to_exitcode(status)
    if code in (0, 5):  # 5: there are no fast tests
        return []
    lines = [line.split(" - ")[0].split(maxsplit=1) for line in log.read_text().splitlines()]
    failed = [line[1] for line in lines if line[:1] in (["FAILED"], ["ERROR"])]
    return failed or [f"pytest ends with {code}"]


def judge(tree: Path, file: Path, broken: str, tests: list[str], row: dict, known: list) -> None:
    """Run test files on a broken file until one fails. `known`: what fails without a breakage."""
    whole = file.read_text()

    def run(text: str, *args: str) -> list[str]:
        file.write_text(text)
        # Python compares a file's second and size with those of its compiled form, no more.
        shutil.rmtree(file.parent / "__pycache__", ignore_errors=True)
        return failures(tree, *args)

    paths = [f"tests/test_{test}.py" for test in tests]
    paths = [path for path in paths if (tree / path).exists() and path not in row["met"]]
    size, workers = (1, "-n0") if len(paths) < 9 else (8, "-n2")
    start = time.time()
    while paths and not row["caught"]:
        few = [path for path in paths[:size] if path not in known]
        left_out = [f"--deselect={each}" for each in known]
        failed = run(broken, workers, *few, *left_out)[:1] if few else []
        if failed and failed[0].startswith("tests/"):
            is_file = "::" not in failed[0]  # it cannot be imported
            if run(whole, "-n0", failed[0], *["--collect-only"] * is_file):
                known += failed
                continue
        row["caught"] = "".join(failed)
        row["met"] += paths[:size]
        del paths[:size]
    row["seconds"] += round(time.time() - start, 1)
    file.write_text(whole)


def main(source: str, results: str, *options: str) -> None:
    for name in IMPORTED.split():
        importlib.import_module(name)
    sys.modules["torch"].set_num_threads(1)
    store = Path(results)
    found = json.loads(store.read_text()) if store.exists() else {"rows": {}, "known": []}
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        shutil.copytree(source, tree, ignore=shutil.ignore_patterns(".git", "__pycache__"))
        everything = [path.stem[len("test_") :] for path in sorted(tree.glob("tests/test_*.py"))]
        for in_names in (True,) if "--named" in options else (True, False):
            for file, old, new, tests in breakages(tree):
                name = f"{file.relative_to(tree)}: {old} ~> {new}"
                row = found["rows"].setdefault(name, {"caught": "", "seconds": 0.0, "met": []})
                if row["caught"] and not in_names:
                    continue
                broken = file.read_text().replace(old, new)
                judge(tree, file, broken, tests if in_names else everything, row, found["known"])
                store.write_text(json.dumps(found, indent=1))
                verdict = f"caught by {row['caught']}" if row["caught"] else "SURVIVED"
                print(f"{name}\n    {verdict}, {row['seconds']:.0f} s", flush=True)
    rows = found["rows"].values()
    print(f"{sum(bool(row['caught']) for row in rows)} of {len(rows)} are caught")


if __name__ == "__main__":
    os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    main(*sys.argv[1:])
