"""Long prompts: attention in pieces against its slow twin, what an idle server gives them, and
memory that is taken when it is used."""

from itertools import pairwise

import pytest
import torch
from test_scheduler import MODEL, SLIDING, WORDS, check, engine, params
from tiny import random_model
from ways import changed

from around.fast import attending
from around.fast.attending import attend_fast, attend_to_prompt, products
from kv_cache import StaticCache
from model import Config, Masks, Transformer, attention
from paged import Row, Runner
from scheduler import Engine

pytestmark = pytest.mark.usefixtures("one_thread")
LONG = 1024
T = LONG + 200


def static(model, ids, cuts, kv_dtype):
    cache = StaticCache(model, 1, T, kv_dtype)
    for start, end in pairwise((0, *cuts, T)):
        positions, layers = cache.plan(start, end)
        yield model(torch.tensor([ids[start:end]]), positions, layers)[0]


def in_blocks(model, ids, cuts, kv_dtype, order=lambda blocks: blocks):
    num_blocks = -(-T // 16)
    runner = Runner(model, num_blocks, 16, kv_dtype)
    table = order([*range(num_blocks)])
    for start, end in pairwise((0, *cuts, T)):
        yield runner.forward([Row(table, start, ids[start:end], end - start)])


def shuffled(*args):
    return in_blocks(*args, order=lambda blocks: blocks[::-2] + blocks[-2::-2])


@pytest.mark.parametrize("window", [None, 700])
@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_long_prompts_equal_their_slow_twin(kv_dtype, window, monkeypatch):
    """A key of the future, a past key left out or counted twice at the border of two chunks, blocks
    in another order than the text's, an int8 key that is not rounded."""
    config = Config(64, 32, 48, 2, 4, 2, 8, 4 * LONG, windows=(None, window))
    slow, calls = Transformer(config).double().requires_grad_(False), []
    fast, ids = changed(slow, attend_fast), torch.randint(64, (T,)).tolist()
    spy = lambda *args: calls.append(1) or attend_to_prompt(*args)  # noqa: E731
    monkeypatch.setattr(attending, "attend_to_prompt", spy)
    for way in (static, in_blocks, shuffled):
        for cuts in ((), (LONG + 7,), (512, 1003, LONG + 100)):
            want = torch.cat([*way(slow, ids, cuts, kv_dtype)])
            assert not calls
            found = torch.cat([*way(fast, ids, cuts, kv_dtype)])
            assert len(calls) == 2 * (1 + len(cuts))  # layers, chunks
            calls.clear()
            torch.testing.assert_close(found, want, atol=1e-9, rtol=0)
        if kv_dtype == "auto":
            oracle = slow(torch.tensor([ids]), torch.arange(T)[None])[0]
            torch.testing.assert_close(found, oracle, atol=1e-9, rtol=0)


@pytest.mark.parametrize("T", [1, 16, 512, 1100])
def test_pieces_equal_one_mask(T, monkeypatch):
    """A mask that grows with the text; a key that is just within the window, or just outside; two
    products in place of the fused kernel that show a key which not all of a piece's queries see."""
    S = LONG + 100
    for window in (None, 1, 3, 700):
        q, k, v = (torch.randn(2, n, t, 8).bfloat16() for n, t in ((4, T), (2, S), (2, S)))
        positions = torch.arange(S)[None]
        config = Config(64, 32, 48, 1, 4, 2, 8, windows=(window,))
        mask = Masks(config, positions[:, -T:], positions)[window]
        expected = attention(q.double(), k.double(), v.double(), mask)
        k[:, :, : max(0, S - T - (window or S) + 1)] = torch.nan
        for dtype, near in ((torch.float64, 1e-9), (torch.bfloat16, 0.05)):
            for kernel in (attending.kernel_for, lambda q: products):
                with monkeypatch.context() as patch:
                    patch.setattr(attending, "kernel_for", kernel)
                    found = attend_to_prompt(q.to(dtype), k.to(dtype), v.to(dtype), window)
                torch.testing.assert_close(found.double(), expected, atol=near, rtol=0)


def test_pieces_of_a_few_queries(monkeypatch):
    """A piece that gets the mask of another, or of the layer before it; tokens in another order."""
    monkeypatch.setattr(attending, "MAX_PAIRS", 40)
    jobs = [(WORDS[i : i + n], params(3)) for i, n in ((0, 25), (9, 24), (30, 24), (50, 3))]
    for model in (MODEL, SLIDING):
        for budget in (80, 20):
            at = engine(changed(model, attend_fast), num_blocks=40, max_num_batched_tokens=budget)
            check(at, *jobs, model=model)


def test_prompts_get_small_steps_only_beside_streams():
    """A prompt of 4,096 tokens took an idle server 128 steps; or it holds up the streams that run;
    or a budget that the user has set is not kept."""
    model = random_model(max_position_embeddings=2048)
    prompt, long = [1 + i % 30 for i in range(1200)], params(4, temperature=0, ignore_eos=True)
    for limits, idle, beside in (
        ({"small_chunk": 32}, 4 + 512, 4 + 32), ({}, 4 + 512, 4 + 512),
        ({"small_chunk": 32, "max_num_batched_tokens": 100}, 100, 100),
    ):  # fmt: skip
        at = Engine(model, num_blocks=400, max_num_seqs=4, **limits)
        at.add_request(prompt, long)
        at.step()
        assert sum(at.ran.values()) == idle
        while not at.running[0].tokens:
            at.step()
        second = at.add_request([3, *prompt], long)
        at.step()
        assert sum(at.ran.values()) == beside
        at.abort(second)
        at._preempt_last()  # it decodes again only when its prompt has run once more
        at.pool.reuse = lambda table, ids: None
        for _ in range(2):
            at.step()
            assert sum(at.ran.values()) == idle


def test_memory_is_taken_when_it_is_used(monkeypatch):
    """A cache for 64 sequences was wiped at the start: 11 GB for a model of 0.3 GB."""
    monkeypatch.undo()  # conftest.py fills caches

    def resident():
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096

    model = random_model(max_position_embeddings=2**20)
    before = resident()
    runner = Runner(model, 2**18, 16)
    assert sum(kv.nbytes for kv in runner.kv) > 2**29
    runner.forward([Row([0], 0, [1, 2, 3])])
    assert resident() - before < 2**27
