"""compile_model: what is compiled once must serve every length, and give the eager tokens.

That its tokens equal the eager ones is a row of tests/test_equivalence.py.
"""

import copy
import random
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from conftest import DRAFT, ROOT
from torch._inductor.utils import run_and_get_code

import generate as command_line
from around.fast import compiling
from around.fast.compiling import Opaque, Region, compile_model, run, show_steps
from around.fast.packed import LoopedLinear
from around.folder import build, load_model
from around.settings import SamplingParams
from generate import generate
from kv_cache import StaticCache
from llm import LLM
from model import Config, Transformer
from paged import Row, Runner
from sampling import Sequence
from scheduler import Engine
from speculative import NGram

slow = pytest.mark.slow
WISH = SamplingParams(temperature=0.5, seed=1, max_tokens=20, ignore_eos=True)


@slow
def test_nothing_is_compiled_after_warm_up():
    """Generate with a compiled model for many lengths of prompt and cache, where compiling again is
    an error, and compare with the eager tokens. Catches: a length, a capacity or a chunk baked into
    a graph, which stalls the user for seconds; another way to multiply that gives another text."""
    eager, compiled = (load_model(DRAFT, dtype=torch.float32) for _ in range(2))
    compile_model(compiled)
    assert type(compiled.layers[0].mlp.gate_up_proj) is LoopedLinear
    for length in (1, 2, 31, 32, 33, 65, 100):
        expected = Sequence([5] * length, WISH, eager.config)
        list(generate(eager, expected, StaticCache(eager, 1, 1024)))
        for capacity in (length + 20, 64 * ((length + 20) // 64 + 1), 1024):
            sequence = Sequence([5] * length, WISH, compiled.config)
            cache = StaticCache(compiled, 1, capacity)
            with torch.compiler.set_stance("fail_on_recompile"):
                list(generate(compiled, sequence, cache, chunk=32))
            assert sequence.token_ids == expected.token_ids
    # The guard can fail: a batch of three is compiled anew.
    positions, caches = StaticCache(compiled, 3, 64).plan(0, 1)
    with torch.compiler.set_stance("fail_on_recompile"), pytest.raises(RuntimeError):
        compiled(torch.zeros_like(positions), positions, caches)


@slow
def test_nothing_is_compiled_after_warm_up_by_the_scheduler():
    """Run batches of many sizes through a compiled engine, with a draft, n-grams and no guesses,
    where compiling again is an error. Catches: a number of rows, groups, blocks, tokens or guesses
    baked into a graph."""
    options = {"device": "cpu", "dtype": "float32", "compile": True, "num_blocks": 64}
    llm = LLM(DRAFT, draft_checkpoint=DRAFT, **options)
    model = llm.engine.model
    with torch.compiler.set_stance("fail_on_recompile"):
        for proposer in (llm.engine.proposer, None, NGram(3)):
            llm.engine = Engine(model, proposer=proposer, num_blocks=64)
            for lengths in ([1], [2], [16], [40, 1], [300], [5, 5, 5, 90, 17]):
                llm.generate([[5] * length for length in lengths], WISH)
            assert llm.engine.stats["generation_tokens"] == 20 * 11


LENGTHS = (3, 40, 17, 60, 5)


@slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_whose_heads_share_no_keys_are_gathered(dtype):
    """Run crowds of growing size through a compiled model whose query heads share no keys, where
    compiling again is an error. Catches: attention compiled in the middle of the first crowd, or
    again for each number of rows; other tokens under a window, in forks, behind shared prefixes,
    after a preemption."""
    torch._dynamo.reset()
    config = Config(300, 64, 96, 2, 4, 4, 16, windows=(None, 20))
    model = build(config).to(dtype)
    model.inv_freq = Transformer(config).inv_freq
    twin = copy.deepcopy(model)
    compile_model(model, None)

    def run(each):
        engine, outputs = Engine(each, num_blocks=22, block_size=8), []
        texts = random.Random(0)
        for count in (1, 2, 5, 3, 5):
            prompts = [[7] * 9 + texts.choices(range(300), k=length) for length in LENGTHS[:count]]
            requests = [engine.add_request(ids, replace(WISH, n=1 + (i == 1)))
                        for i, ids in enumerate(prompts)]  # fmt: skip
            list(engine.run())
            outputs += [seq.ids for request in requests for seq in request.outputs]
        assert engine.stats["num_preemptions"] and engine.stats["prefix_cache_hits"]
        return outputs

    with torch.compiler.set_stance("fail_on_recompile"):
        found = run(model)
    if dtype == torch.float32:
        assert found == run(twin)


TINY = Config(8, 8, 8, 1, 2, 2, 4)


@slow
def test_the_caches_are_written_in_place():
    """Compile a layer over each cache; look for buffers of the cache's size, and for the slots that
    changed. Catches: scatter_ compiled to a copy of the whole slab, so that a step cost what the
    capacity costs and not what the length does; views of one memory that were copied, so that
    writes went into the copies."""
    model = Transformer(TINY)
    runner = Runner(model, 192, 4)
    slabs = StaticCache(model, 1, 192).plan(5, 6)
    rows = runner.plan([Row([3, 190], 5, [0]), Row([7, 9], 6, [0])])
    for (positions, caches), size in ((slabs, "256"), (rows[1:3], "192")):
        args = (torch.zeros_like(positions), positions, caches, positions[0])
        (seen,) = show_steps(model, *args)
        x = torch.randn(1, positions.shape[1], 8)
        ((cos, sin),) = model.rope(positions)
        step = torch.compile(run, dynamic=False)
        before = caches[0].kv.normal_().clone()
        with torch.no_grad():
            _, (code,) = run_and_get_code(step, model.layers[0], None, x, cos, sin, *seen.tensors)
        buffers = [line for line in code.splitlines() if "empty_strided" in line]
        assert buffers and not [line for line in buffers if size in line]
        # One slot of each head and row is written.
        changed = (before != caches[0].kv).any(-1).nonzero().tolist()
        assert len(changed) == 4 * positions.shape[1], changed


def test_what_is_compiled_and_what_is_hidden(monkeypatch, capsys):
    """Check for which devices, caches and rows the compiler sees the attention, and what --compile
    compiles. Catches: int8 keys on an H200, which the compiler refused (the meta device stands for
    a GPU); prompts, guesses or several groups compiled at each step; plain decoding hidden; a draft
    forgotten, or a warm-up with another cache."""
    for device, length, kv_dtype, is_hidden in [
        ("cpu", 1, "auto", False), ("cpu", 1, "int8", False), ("cpu", 2, "auto", True),
        ("meta", 2, "auto", False), ("meta", 1, "int8", True),
    ]:  # fmt: skip
        model = Transformer(TINY).to(device)
        positions, caches = StaticCache(model, 1, 4, kv_dtype).plan(0, length)
        (found,) = show_steps(model, torch.zeros_like(positions), positions, caches)
        assert isinstance(found, Opaque) == is_hidden, (device, length, kv_dtype)
    model = Transformer(TINY)
    twin = copy.deepcopy(model)
    twin.layers[0].__class__ = Region
    runner = Runner(model, 4, 4)
    for rows, max_blocks, is_hidden in [
        ([Row([0, 1], 4, [0]), Row([2], 1, [0])], 1, False),
        ([Row([0, 1], 4, [0]), Row([2], 1, [0])], 0, True),  # several groups
        ([Row([0, 1], 4, [0])], 1, False),
        ([Row([0, 1], 4, [0]), Row([2], 1, [0, 0])], 1, True),
        ([Row([0, 1], 4, [0, 0])], 1, True),
    ]:
        monkeypatch.setattr(compiling, "max_blocks", lambda _: max_blocks)  # noqa: B023
        runner.forward([Row([0], 0, [1, 2, 3, 4]), Row([2], 0, [5])])  # what the rows find stored
        expected = runner.forward(rows)
        tokens, positions, caches, select = runner.plan(rows)
        seen = show_steps(model, tokens, positions, caches, select)
        assert isinstance(seen[0], Opaque) == is_hidden, (rows, max_blocks)
        torch.testing.assert_close(twin(tokens, positions, seen, select), expected)
    calls, one = [], ["--compile", "--checkpoint", str(DRAFT), "--max-tokens", "1"]
    monkeypatch.setattr(compiling, "compile_model", lambda model, *more: calls.append(more))
    LLM(DRAFT, compile=True, draft_checkpoint=DRAFT, kv_dtype="int8", num_blocks=4)
    assert command_line.main(one) == command_line.main([*one, "--speculate", "2"]) == 0
    assert calls == [(None, "int8"), (None, "int8"), (1, "auto"), (None, "auto")]


@slow
def test_each_process_gives_the_same_text():
    """Run generate.py with --compile and --quantize int4 in two processes at once, on a prompt long
    enough for products of many rows, and compare the texts. Catches: arithmetic chosen by timing,
    so that a seed means another text each time that the engine starts."""
    command = [sys.executable, "generate.py", "--device", "cpu", "--compile", "--quantize", "int4"]
    command += ["--seed", "1", "--temperature", "1", "--max-new-tokens", "100", "--ignore-eos"]
    command += ["--prompt", "To be, or not to be, that is the question:\n" * 12]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    started = [subprocess.Popen(command, cwd=ROOT, **pipes) for _ in range(2)]
    texts, errors = zip(*(process.communicate(timeout=300) for process in started))
    assert len(texts[0].split()) > 30, errors[0]
    assert texts[0] == texts[1]
