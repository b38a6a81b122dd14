"""Long prompts: attention without masks against its slow twin, what an idle server gives them, and
memory that is taken when it is used."""

import itertools

import pytest
import torch
from tiny import random_model

from around.fast import attending
from around.fast.attending import attend_fast
from around.settings import SamplingParams
from generate import generate
from kv_cache import StaticCache
from model import Config, Masks, Transformer, attention
from paged import Row, Runner
from sampling import Sequence
from scheduler import Engine

pytestmark = pytest.mark.usefixtures("one_thread")
LONG = 1024
T = LONG + 200


def model_of(window):
    torch.manual_seed(1)
    config = Config(64, 32, 48, 2, 4, 2, 8, 4 * LONG, windows=(None, window))
    return Transformer(config).double().requires_grad_(False).eval()


def static(model, ids, cuts, kv_dtype):
    cache = StaticCache(model, 1, T, kv_dtype)
    for start, end in itertools.pairwise((0, *cuts, T)):
        positions, layers = cache.plan(start, end)
        yield model(torch.tensor([ids[start:end]]), positions, layers)[0]


def in_blocks(model, ids, cuts, kv_dtype, order=lambda blocks: blocks):
    num_blocks = -(-T // 16)
    runner = Runner(model, num_blocks, 16, kv_dtype)
    table = order([*range(num_blocks)])
    for start, end in itertools.pairwise((0, *cuts, T)):
        yield runner.forward([Row(table, start, ids[start:end], end - start)])


def shuffled(*args):
    return in_blocks(*args, order=lambda blocks: blocks[::-2] + blocks[-2::-2])


@pytest.mark.parametrize("window", [None, 700])
@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
@pytest.mark.parametrize("way", [static, in_blocks, shuffled])
def test_long_prompts_equal_their_slow_twin(way, kv_dtype, window, monkeypatch):
    """A key of the future, a past key left out or counted twice at the border of two chunks, blocks
    in another order than the text's, an int8 key that is not rounded."""
    model, calls = model_of(window), []
    ids = torch.randint(64, (T,)).tolist()
    attend = attending.attend_to_prompt
    spy = lambda *args: calls.append(args[0].shape[2]) or attend(*args)  # noqa: E731
    monkeypatch.setattr(attending, "attend_to_prompt", spy)
    quick = model_of(window)
    attend_fast(quick)
    for cuts in ((), (LONG + 7,), (512, 1003, LONG + 100)):
        calls.clear()
        fast = torch.cat([*way(quick, ids, cuts, kv_dtype)])
        assert len(calls) >= 2  # layers
        calls.clear()
        slow = torch.cat([*way(model, ids, cuts, kv_dtype)])
        assert not calls
        torch.testing.assert_close(fast, slow, atol=1e-9, rtol=0)
    if kv_dtype == "auto":
        oracle = model(torch.tensor([ids]), torch.arange(T)[None])[0]
        torch.testing.assert_close(fast, oracle, atol=1e-9, rtol=0)


@pytest.mark.parametrize("window", [1, 3, 700])
@pytest.mark.parametrize("T", [1, 16, 512, 1100])
def test_a_window_reads_no_key_before_it(T, window):
    """A mask that grows with the text; a key that is just within the window, or just outside."""
    config = Config(64, 32, 48, 1, 4, 2, 8, windows=(window,))
    S = LONG + 100
    q, k, v = (torch.randn(2, n, length, 8) for n, length in ((4, T), (2, S), (2, S)))
    positions = torch.arange(S)[None]
    mask = Masks(config, positions[:, -T:], positions)[window]
    expected = attention(q, k, v, mask)
    k[:, :, : max(0, S - T - window + 1)] = torch.nan
    torch.testing.assert_close(attending.attend_to_prompt(q, k, v, window), expected)


def test_prompts_get_small_steps_only_beside_streams():
    """A prompt of 4,096 tokens took an idle server 128 steps; or it holds up the streams that run;
    or a budget that the user has set is not kept."""
    model = random_model(max_position_embeddings=2048, vocab_size=32)
    prompt = [1 + i % 30 for i in range(1200)]
    long = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    for limits, alone, beside in (
        ({"small_chunk": 32}, 4 + 512, 4 + 32), ({}, 4 + 512, 4 + 512),
        ({"small_chunk": 32, "max_num_batched_tokens": 100}, 100, 100),
    ):  # fmt: skip
        at = Engine(model, num_blocks=400, max_num_seqs=4, **limits)
        at.add_request(prompt, long)
        at.step()
        assert sum(at.ran.values()) == alone
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
            assert sum(at.ran.values()) == alone


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


def test_one_sequence_attends_alone_or_with_others():
    """A long prompt beside decoding sequences gives other tokens than alone."""
    model = random_model(max_position_embeddings=4096, vocab_size=32)
    prompt = [1 + i * i % 30 for i in range(LONG + 300)]
    params = SamplingParams(seed=3, max_tokens=6, ignore_eos=True)
    texts = []
    for others in (0, 3):
        at = Engine(model, num_blocks=400, max_num_seqs=4)
        for i in range(others):
            at.add_request([2 + i, 5], SamplingParams(max_tokens=40, seed=i, ignore_eos=True))
        (job,) = at.add_request(prompt, params).outputs
        while not job.finish_reason:
            at.step()
        texts.append(job.output_ids)
    sequence = Sequence(prompt, params, model.config)
    list(generate(model, sequence, StaticCache(model, 1, sequence.max_len), 100))
    assert texts == [sequence.output_ids] * 2
