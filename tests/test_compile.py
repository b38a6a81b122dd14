"""compile_model: what is compiled once must serve every length, and give the eager tokens.

That its tokens equal the eager ones is a row of tests/test_equivalence.py.
"""

import pytest
import torch
from conftest import SHAKESPEARE
from torch._inductor.utils import run_and_get_code

from generate import generate
from kv_cache import PagedCache, Row, StaticCache
from model import Config, load_model
from runner import compile_model
from sampling import SamplingParams, Sequence
from scheduler import Engine


@pytest.fixture(scope="module")
def compiled():
    torch._dynamo.reset()
    return compile_model(load_model(SHAKESPEARE, dtype=torch.float32), chunk=32)


@pytest.mark.parametrize("prompt_length", [1, 2, 31, 32, 33, 65, 100])
def test_nothing_is_compiled_after_warm_up(compiled, prompt_length):
    """A length, a capacity or a chunk that is baked into a graph stalls the user for seconds."""
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    sequence = Sequence([5] * prompt_length, params, compiled.config)
    for capacity in (sequence.max_len, 64 * (sequence.max_len // 64 + 1), 1024):
        sequence = Sequence([5] * prompt_length, params, compiled.config)
        cache = StaticCache(compiled.config, 1, capacity, torch.float32)
        with torch.compiler.set_stance("fail_on_recompile"):
            for _ in generate(compiled, sequence, cache, chunk=32):
                pass
        assert len(sequence.output_ids) == 40


def test_fail_on_recompile_can_fail(compiled):
    """The guard used above must notice a real recompilation: here, a batch of three."""
    cache = StaticCache(compiled.config, 3, 64, torch.float32)
    tokens = torch.zeros((3, 1), dtype=torch.int64)
    with torch.compiler.set_stance("fail_on_recompile"), pytest.raises(RuntimeError):
        compiled(tokens, tokens, cache.upto(1))


def test_the_slab_is_written_in_place():
    """scatter_ compiled to a copy of the whole slab at each step, so that a step cost what the
    capacity costs and not what the length does. No buffer may have the slab's 193 slots."""
    cache = StaticCache(Config(8, 8, 8, 1, 2, 2, 4), 1, 192, torch.float32)
    (slab,) = cache.upto(64).layers

    def step(q, k, v, positions):
        return slab.attend(q, k, v, positions, None)

    token = torch.randn(3, 1, 2, 1, 4)
    with torch.no_grad():
        _, (code,) = run_and_get_code(torch.compile(step), *token, torch.tensor([[5]]))
    buffers = [line for line in code.splitlines() if "= empty_strided_cpu(" in line]
    assert buffers and not [line for line in buffers if "193" in line]
    torch.testing.assert_close(slab.k[0, :, 5], token[1, 0, :, 0])


def test_nothing_is_compiled_after_warm_up_by_the_scheduler():
    """Rows, groups, blocks and tokens of a step come in any number: none may be baked in."""
    engine = Engine(load_model(SHAKESPEARE, dtype=torch.float32), compile=True, num_blocks=64)
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    with torch.compiler.set_stance("fail_on_recompile"):
        for lengths in ([1], [2], [16], [40, 1], [300], [5, 5, 5, 90, 17]):
            for length in lengths:
                engine.add_request([5] * length, params)
            while engine.has_work:
                engine.step()
    assert engine.stats.output_tokens == 20 * 11


def test_the_pools_are_written_in_place():
    """Pools that shared a memory were copied at each step, and the writes went into the copies."""
    cache = PagedCache(Config(8, 8, 8, 1, 2, 2, 4), 192, 4, torch.float32)
    (layer,) = cache.step([Row([3, 190], 0, 5)])[0].layers

    def step(q, k, v, positions):
        return layer.attend(q, k, v, positions, None)

    token = torch.randn(3, 1, 2, 5, 4)
    with torch.no_grad():
        _, (code,) = run_and_get_code(torch.compile(step), *token, torch.arange(5)[None])
    assert "paged_attention" in code
    assert not [line for line in code.splitlines() if "empty_strided" in line and "192" in line]
    torch.testing.assert_close(layer.k[190, 0], token[1, 0, :, 4])
