"""The engine against generate(): whatever else runs, each sequence must get what it gets alone.

Most models here are tiny, random and in float64, where the order of a sum cannot flip a draw. Every
sequence also reports its log-probabilities: a key read from the wrong place changes those even
where the token stays the same. The slow twins are generate() with a cache of its own for whole
sequences, and a loop over single positions for paged_attention.
"""

import random
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from conftest import SHAKESPEARE
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import quantize
import scheduler
import speculative
from generate import generate
from kv_cache import PagedCache, Row, StaticCache
from model import Config, Transformer, attention
from sampling import SamplingParams, Sequence
from scheduler import LLM, Engine, free_memory, memory_size

WORDS = random.Random(7).choices(range(1, 32), k=64)  # a text to cut prompts from


def random_model(**changes) -> Transformer:
    """A model whose next token depends strongly on all that it sees."""
    sizes = {
        "vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "eos_ids": (0,),
        "max_position_embeddings": 64,
    }  # fmt: skip
    generator = torch.Generator().manual_seed(1)
    model = Transformer(Config(**sizes | changes)).double().eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.6, generator=generator)
    return model


MODEL = random_model()
SLIDING = random_model(
    num_hidden_layers=3, num_attention_heads=4, windows=(5, None, 3), qkv_bias=True, qk_norm=True
)


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def bundled():
    """The trained model, with a pool too small for all that the tests ask of it at once."""
    small = {"num_blocks": 12, "max_num_seqs": 6, "max_num_batched_tokens": 24}
    return LLM(SHAKESPEARE, "cpu", "float32", max_seq_len=190, **small)


@pytest.fixture
def llm(bundled):
    yield bundled
    assert_empty(bundled.engine)


def engine(model: Transformer = MODEL, **options) -> Engine:
    small = {"num_blocks": 16, "block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 8}
    return Engine(model, **small | options)


def params(max_tokens=6, **given) -> SamplingParams:
    return SamplingParams(**{"seed": 1, "logprobs": 1, "max_tokens": max_tokens} | given)


TWINS: dict[tuple, list[Sequence]] = {}


def alone(at: Engine, ids, wish: SamplingParams) -> list[Sequence]:
    """The slow twin: each of the n sequences by itself, with a cache of its own."""
    key = (at.runner.model, tuple(ids), repr(wish), at.tokenizer, at.max_seq_len)
    if key not in TWINS:
        splits = wish.split()
        TWINS[key] = [Sequence(ids, p, at.config, at.tokenizer, at.max_seq_len) for p in splits]
        for sequence in TWINS[key]:
            slabs = StaticCache(
                at.config, 1, sequence.max_len, at.runner.model.embed_tokens.weight.dtype
            )
            for _ in generate(at.runner.model, sequence, slabs):
                pass
    return TWINS[key]


def assert_same(request, expected: list[Sequence]):
    """Same tokens, log-probabilities, prompt log-probabilities, text and end."""
    assert len(request.outputs) == len(expected)
    for got, want in zip(request.outputs, expected, strict=True):
        assert got.output_ids == want.output_ids
        assert (got.finish_reason, got.text) == (want.finish_reason, want.text)
        assert_same_logprobs(got.tokens, want.tokens)
        assert_same_logprobs(got.prompt_tokens, want.prompt_tokens)


def assert_same_logprobs(got, want):
    assert [token.id for token in got] == [token.id for token in want]
    for a, b in zip(got, want, strict=True):
        assert a.logprob == (None if b.logprob is None else pytest.approx(b.logprob, abs=1e-4))
        assert [p for _, p in a.top] == pytest.approx([p for _, p in b.top], abs=1e-4)


def assert_empty(at: Engine):
    at.check()
    assert not at.has_work and not at.running and not at.waiting
    assert at.pool.num_available == at.pool.num_blocks


def step(at: Engine):
    """One step, which must keep to its budget and get something done."""
    before, work = replace(at.stats), at.has_work
    requests = at.step()
    at.check()
    computed = at.stats.computed_tokens - before.computed_tokens
    assert computed <= at.max_num_batched_tokens
    assert computed > 0 or not work, "a step that does nothing will do so for ever"
    return requests


def drain(at: Engine) -> int:
    """Step until all is done; a bound on the steps holds off starvation."""
    tasks, steps = at.running + at.waiting, 0
    most = sum(sum(s.max_len for s in r.outputs) for r in {task.request for task in tasks})
    while at.has_work:
        step(at)
        steps += 1
        assert steps <= most, "somebody waits for ever"
    assert_empty(at)
    return steps


def sequences(queue) -> list[Sequence]:
    return [task.sequence for task in queue]


def in_use(at: Engine) -> int:
    return at.pool.num_blocks - at.pool.num_available


# --- Which tokens run -----------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [4, 5, 7, 30])
def test_the_last_prompt_is_not_lost_when_it_is_chunked(budget):
    """The last prompt of a full batch was cut, and its rest never run: no token ever came."""
    at = engine(max_num_batched_tokens=budget, num_blocks=40)
    prompts = [WORDS[i : i + n] for i, n in ((0, 9), (20, 3), (30, 12))]
    requests = [at.add_request(ids, params()) for ids in prompts]
    drain(at)
    for request, ids in zip(requests, prompts, strict=True):
        assert_same(request, alone(at, ids, params()))
    # Each token once, and the last of each never: nothing would be sampled from it.
    assert at.stats.computed_tokens == sum(len(r.outputs[0].ids) - 1 for r in requests)
    assert at.stats.output_tokens == sum(len(r.outputs[0].tokens) for r in requests)


def test_chunks_fill_the_budget():
    """The picture at the head of scheduler.py: what decoding leaves of the budget, prompts take."""
    at = engine(num_blocks=40, max_num_batched_tokens=8)
    wish = params(6, ignore_eos=True)
    a = at.add_request(WORDS[:1], wish)
    step(at)
    b, c = at.add_request(WORDS[1:17], wish), at.add_request(WORDS[20:31], wish)
    computed, lengths = at.stats.computed_tokens, []
    for _ in range(4):
        step(at)
        lengths.append((at.stats.computed_tokens - computed, *_produced(a, b, c)))
        computed = at.stats.computed_tokens
    assert lengths == [(8, 2, 0, 0), (8, 3, 0, 0), (8, 4, 1, 0), (8, 5, 2, 1)]
    drain(at)


def _produced(*requests):
    return [len(request.outputs[0].tokens) for request in requests]


@pytest.mark.parametrize("priority", [0, -1, 1])
@pytest.mark.parametrize("budget", [4, 6])
def test_a_long_prompt_stalls_nobody(priority, budget):
    """While a prompt was computed, running sequences made no token, as seen in any chat."""
    at = engine(num_blocks=40, max_num_batched_tokens=budget)
    wish = params(40, ignore_eos=True)
    running = [at.add_request(WORDS[i : i + 2], wish) for i in range(3)]
    while not all(_produced(*running)):
        step(at)
    long = at.add_request(WORDS[:24], wish, priority=priority)
    steps = 0
    while not long.outputs[0].tokens:
        before = _produced(*running)
        step(at)
        steps += 1
        assert _produced(*running) == [n + 1 for n in before]
    assert steps == -(-24 // (budget - 3))  # and the prompt gets all that is left
    for request in (*running, long):
        at.abort(request)
    assert_empty(at)


def test_equally_long_rows_stand_side_by_side(monkeypatch):
    """A chunk between the running sequences: each of them was attended on its own, and slowly."""
    at, lengths = engine(num_blocks=40), []
    plan = at.runner.cache.step
    monkeypatch.setattr(
        at.runner.cache,
        "step",
        lambda rows: lengths.append([r.end - r.start for r in rows]) or plan(rows),
    )
    for i, (prompt, priority) in enumerate(((2, 0), (20, -1), (3, 0))):
        at.add_request(WORDS[20 * i :][:prompt], params(9, ignore_eos=True), priority=priority)
        step(at)
    drain(at)
    assert all(row == sorted(row) for row in lengths)
    assert [1, 7] in lengths and [1, 1, 1] in lengths


def test_first_come_first_served():
    """A waiting sequence overtaken by a later one."""
    at = engine(max_num_seqs=2, max_num_batched_tokens=3)
    requests = [at.add_request(WORDS[i : i + n], params()) for i, n in enumerate((9, 1, 8, 1, 5))]
    first = first_steps(at, requests)
    assert first == sorted(first) and len({*first}) > 3


def first_steps(at: Engine, requests) -> list[int]:
    """Run all, and return the step in which each request got its first token."""
    first = {}
    while at.has_work:
        for request in step(at):
            first.setdefault(request, at.stats.steps)
    assert_empty(at)
    return [first[request] for request in requests]


def test_a_small_request_does_not_overtake_for_memory():
    """Small prompts that slip past a large one keep it waiting for as long as they come."""
    at = engine(num_blocks=4, max_num_batched_tokens=16)
    wish = params(4, ignore_eos=True)
    first = at.add_request(WORDS[:10], wish)
    step(at)
    large, small = at.add_request(WORDS[20:30], wish), at.add_request(WORDS[40:42], wish)
    step(at)
    assert sequences(at.running) == first.outputs
    assert sequences(at.waiting) == [*large.outputs, *small.outputs]
    first = first_steps(at, [large, small])
    assert first == sorted(first)


def test_the_lowest_number_runs_first():
    """Priorities the wrong way round, or equal ones not in the order of arrival."""
    at = engine(max_num_seqs=1)
    wish = params(2, ignore_eos=True)
    order = [at.add_request(WORDS[:3], wish, priority=p) for p in (2, -1, 0, 2, 0, -1)]
    ended = []
    while at.has_work:
        ended += [request for request in step(at) if request.finished]
    assert [order.index(request) for request in ended] == [1, 5, 2, 4, 0, 3]


# --- Memory ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("prompt", "tokens"), [(14, 4), (1, 17), (17, 1), (60, 1)])
def test_what_can_never_fit_is_refused_at_once(prompt, tokens):
    """A prompt larger than the pool ended nano-vllm, and let mini-sglang wait for ever."""
    at = engine(num_blocks=4)
    need = -(-(prompt + tokens - 1) // 4)
    with pytest.raises(ValueError, match=rf"need {need} blocks .* cache has 4.*--kv-memory"):
        at.add_request(WORDS[:prompt], params(tokens, n=2))
    assert_empty(at)


@pytest.mark.parametrize(("prompt", "tokens"), [(13, 4), (1, 16), (16, 1)])
def test_what_just_fits_is_run(prompt, tokens):
    """A request refused for the slot of its last token, which is never run; or a pool that is one
    block short when all of it is needed."""
    at, wish = engine(num_blocks=4, max_num_batched_tokens=5), params(tokens, ignore_eos=True, n=3)
    request = at.add_request(WORDS[:prompt], wish)
    drain(at)
    assert_same(request, alone(at, WORDS[:prompt], wish))


@pytest.mark.parametrize("prompt", [[], [32], [-1], [1] * 64])
def test_a_bad_prompt_is_refused_and_not_queued(prompt):
    """An empty prompt killed a server (CVE-2024-8768)."""
    at = engine()
    with pytest.raises(ValueError):
        at.add_request(prompt, params())
    assert_empty(at)


def test_max_seq_len_bounds_prompt_and_output():
    """A sequence ran past its context, into blocks that nobody had counted."""
    at = engine(max_seq_len=12)
    request = at.add_request(WORDS[:5], params(50, ignore_eos=True))
    drain(at)
    assert len(request.outputs[0].ids) == 12
    assert request.outputs[0].finish_reason == "length"
    with pytest.raises(ValueError, match="12 tokens, context is 12"):
        at.add_request(WORDS[:12], params())


def crowd(at: Engine, *priorities: int, tokens: int = 12, **given):
    """Requests that start together and together need more than the pool holds."""
    wish = params(tokens, ignore_eos=True, **given)
    prompts = [WORDS[8 * i : 8 * i + 5] for i in range(len(priorities))]
    pairs = zip(prompts, priorities, strict=True)
    return [(at.add_request(ids, wish, priority=p), ids, wish) for ids, p in pairs]


def test_preempted_and_resumed_is_the_same_text():
    """A resumed sequence drew again from the start of its random numbers, or lost its output."""
    at = engine(num_blocks=7, max_num_batched_tokens=20)
    requests = crowd(at, 0, 0, 0)
    drain(at)
    assert at.stats.preemptions > 0
    for request, ids, wish in requests:
        assert_same(request, alone(at, ids, wish))


def test_the_last_in_line_is_preempted():
    """The oldest was preempted, so that nobody came to an end; or the most important one."""
    at = engine(num_blocks=7, max_num_batched_tokens=20)
    requests = [request for request, *_ in crowd(at, 1, 0, 1)]
    gone = []
    while at.has_work:
        step(at)
        gone += [task.request for task in at.waiting if task.sequence.tokens]
    assert list(dict.fromkeys(gone)) == [requests[2], requests[0]]
    last = [request.outputs[0].times[-1] for request in requests]
    assert last[1] < last[0] < last[2]


def test_a_preempted_sequence_goes_before_later_ones():
    """Put at the end of the line, it would be overtaken by all that came meanwhile."""
    at = engine(num_blocks=7, max_num_batched_tokens=20)
    requests = [request for request, *_ in crowd(at, 0, 0, 0)]
    while not at.stats.preemptions:
        step(at)
    late = at.add_request(WORDS[40:42], params(2))
    assert sequences(at.waiting) == requests[2].outputs + late.outputs
    drain(at)


def test_a_resumed_sequence_is_computed_in_chunks():
    """A token at a time, as if it were decoding: as slow as to make the output once more."""
    at, chunks = engine(num_blocks=10, max_num_seqs=2, max_num_batched_tokens=6), 0
    at.add_request(WORDS[:20], params(18, ignore_eos=True))
    at.add_request(WORDS[20:24], params(30, ignore_eos=True))
    while at.has_work:
        rest = [len(t.sequence.ids) - t.table.length for t in at.running if t.sequence.tokens]
        before = at.stats.computed_tokens
        step(at)
        if rest and max(rest) > 6:
            chunks += 1
            assert at.stats.computed_tokens - before == 6
    assert at.stats.preemptions > 0 and chunks > 0


def test_nobody_is_let_in_while_memory_is_taken_away():
    """What had just been preempted came back in the same step, and was preempted in the next."""
    at = engine(num_blocks=8, block_size=2, max_num_seqs=2, max_num_batched_tokens=3)
    at.add_request(WORDS[30:32], params(14, ignore_eos=True))
    at.add_request(WORDS[:14], params(2, prompt_logprobs=0))  # starts anew, where a chunk has room
    while at.has_work:
        before, waiting = at.stats.preemptions, len(at.waiting)
        step(at)
        if preempted := at.stats.preemptions - before:
            assert len(at.waiting) == waiting + preempted
    assert at.stats.preemptions > 0


def test_preempted_with_a_prefix_still_cached():
    """nano-vllm#211, #233: IndexError where a preempted sequence found its own blocks again."""
    at = engine(num_blocks=8, max_num_batched_tokens=20, block_size=2, max_num_seqs=3)
    ids, wish = WORDS[:5], params(9, ignore_eos=True)
    requests = [at.add_request([*ids, i], replace(wish, seed=i)) for i in range(1, 4)]
    resumed = 0
    while at.has_work:
        before = at.stats.cached_tokens
        waiting = [task.sequence for task in at.waiting if task.sequence.tokens]
        step(at)
        if at.stats.cached_tokens > before and any(s in sequences(at.running) for s in waiting):
            resumed += 1
    assert at.stats.preemptions > 0 and resumed > 0
    for i, request in enumerate(requests, 1):
        assert_same(request, alone(at, [*ids, i], replace(wish, seed=i)))


def test_equal_prompts_in_one_step_and_after():
    """Two that compute the same blocks in one step, and a third that finds them: same texts."""
    at = engine(num_blocks=40, max_num_batched_tokens=30)
    ids, wish = WORDS[:9], params(ignore_eos=True)
    requests = [at.add_request(ids, wish), at.add_request(ids, wish)]
    step(at)
    assert at.stats.cached_tokens == 0 and len(at.running) == 2
    requests.append(at.add_request(ids, wish))
    step(at)
    assert at.stats.cached_tokens == 8
    drain(at)
    for request in requests:
        assert_same(request, alone(at, ids, wish))


@pytest.mark.parametrize("length", [4, 8])
def test_a_fully_cached_prompt_still_answers(length):
    """nano-vllm#144: the same prompt again left no token to sample from."""
    at = engine()
    for _ in range(2):
        request = at.add_request(WORDS[:length], params())
        drain(at)
        assert_same(request, alone(at, WORDS[:length], params()))
    assert at.stats.cached_tokens == length - 4


def test_a_salt_keeps_prefixes_apart():
    """A request timed the prefixes of another user."""
    at = engine(num_blocks=40)
    hits = []
    for salt in (None, "a", "b", "a", None):
        before = at.stats.cached_tokens
        at.add_request(WORDS[:9], params(), cache_salt=salt)
        drain(at)
        hits.append(at.stats.cached_tokens - before)
    assert hits == [0, 0, 0, 8, 8]


@pytest.mark.parametrize("bytes_wanted", [10, 10.9, 1000])
def test_kv_memory_in_bytes(bytes_wanted):
    """A factor forgotten: keys and values, layers, heads, the item's size; or a pool larger than
    all sequences together can use."""
    block = 2 * 2 * 4 * 1 * 8 * 8  # k and v, layers, tokens, heads, head dim, float64
    at = engine(num_blocks=None, kv_memory=bytes_wanted * block, max_seq_len=22)
    assert at.pool.num_blocks == min(int(bytes_wanted), 4 * 6)
    assert at.runner.cache.num_blocks == at.pool.num_blocks
    held = sum(t.nbytes for pools in at.runner.cache.pools for t in pools)
    assert held == at.pool.num_blocks * block


def test_kv_memory_as_a_share(monkeypatch):
    """Half of the free memory taken for half a byte."""
    monkeypatch.setattr(scheduler, "free_memory", lambda device: 40 * 1024)
    assert engine(num_blocks=None, kv_memory=0.5).pool.num_blocks == 20
    assert engine(num_blocks=None, kv_memory=0.25).pool.num_blocks == 10
    for too_little in (0.001, 1):  # 1 is a byte
        with pytest.raises(ValueError, match="0 blocks"):
            engine(num_blocks=None, kv_memory=too_little)


def test_free_memory(monkeypatch):
    """kB read as bytes; a system without /proc."""
    cpu = torch.device("cpu")
    assert 2**20 < free_memory(cpu) < 2**50
    lines = "MemTotal:  9 kB\nMemFree:  1 kB\nMemAvailable:    5 kB\nSwapFree:  7 kB\n"
    monkeypatch.setattr(Path, "is_file", lambda self: True)
    monkeypatch.setattr(Path, "read_text", lambda self: lines)
    assert free_memory(cpu) == 5 * 1024
    monkeypatch.setattr(Path, "is_file", lambda self: False)
    assert 2**20 < free_memory(cpu) < 2**50


@pytest.mark.parametrize(
    ("text", "size"),
    [("0.5", 0.5), ("1000", 1000), ("2GiB", 2**31), ("3 mb", 3 * 2**20), ("1.5k", 1536)],
)
def test_memory_size(text, size):
    """A share read as bytes, or a letter that counts for a thousand times too little."""
    assert memory_size(text) == size


@pytest.mark.parametrize("text", ["", "-1", "half", "5%", "2Gib/s", "GiB", "1e9", "1.2.3"])
def test_memory_size_refuses(text):
    """A typing error that gives a cache of another size."""
    with pytest.raises(ValueError):
        memory_size(text)


def test_a_budget_below_the_number_of_sequences_is_refused():
    """With fewer tokens than sequences somebody waits at each step."""
    with pytest.raises(ValueError, match=r"max_num_batched_tokens 3 .* max_num_seqs 4"):
        engine(max_num_batched_tokens=3, max_num_seqs=4)
    with pytest.raises(ValueError, match="max_num_seqs 0"):
        engine(max_num_batched_tokens=3, max_num_seqs=0)
    at = engine(max_num_batched_tokens=4, max_num_seqs=4)
    requests = crowd(at, 0, 0, 0, 0, tokens=3)
    drain(at)
    for request, ids, wish in requests:
        assert_same(request, alone(at, ids, wish))


# --- n > 1 ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("length", "blocks"), [(6, (2, 4)), (8, (2, 5)), (9, (3, 5)), (1, (1, 3))])
def test_n_share_the_prompts_blocks(length, blocks):
    """The prompt held n times; a block that all write to not copied, or copied once too often, at
    a prompt that ends on a block's border (8) or within a block."""
    at, wish = engine(num_blocks=40, max_num_batched_tokens=16), params(n=3, ignore_eos=True)
    request = at.add_request(WORDS[:length], wish)
    step(at)
    assert [len(sequence.tokens) for sequence in request.outputs] == [1, 1, 1]
    assert in_use(at) == blocks[0]
    step(at)
    assert in_use(at) == blocks[1]
    drain(at)
    assert at.stats.computed_tokens == length + 3 * (6 - 1)
    assert_same(request, alone(at, WORDS[:length], wish))


def test_n_equals_n_requests():
    """Continuations that are all alike, or that depend on being forked."""
    at, wish = engine(num_blocks=40), params(8, temperature=1.5)
    together = at.add_request(WORDS[:6], replace(wish, n=3, seed=4))
    apart = [at.add_request(WORDS[:6], replace(wish, seed=4 + i)) for i in range(3)]
    drain(at)
    assert_same(together, [request.outputs[0] for request in apart])
    assert len({tuple(sequence.output_ids) for sequence in together.outputs}) > 1


def test_n_without_a_seed_differ():
    """One random seed for all n."""
    at = engine(num_blocks=40)
    request = at.add_request(WORDS[:6], params(12, seed=None, n=3, temperature=2.0))
    drain(at)
    assert len({tuple(sequence.output_ids) for sequence in request.outputs}) == 3


@pytest.mark.parametrize("length", [7, 8])
@pytest.mark.parametrize("seqs", [1, 2])
def test_n_above_max_num_seqs(seqs, length):
    """More continuations than may run at once: they were never begun, or ran all the same."""
    at = engine(num_blocks=7, max_num_seqs=seqs, max_num_batched_tokens=3)
    wish = params(n=5, ignore_eos=True, prompt_logprobs=1)
    other = at.add_request(WORDS[30:34], params())
    request = at.add_request(WORDS[:length], wish)
    drain(at)
    assert_same(request, alone(at, WORDS[:length], wish))
    assert_same(other, alone(at, WORDS[30:34], params()))


def test_n_that_end_with_the_first_token():
    """A fork that ends at once is retired at once, and its sibling goes on."""
    at = engine(num_blocks=40)
    free = params(5, n=3, temperature=2.0, ignore_eos=True)
    firsts = [sequence.output_ids[0] for sequence in alone(at, WORDS[:6], free)]
    assert len({*firsts}) > 1
    wish = replace(free, stop_token_ids=(firsts[0],))
    request = at.add_request(WORDS[:6], wish)
    assert step(at) == [request]
    assert request.outputs[0].finish_reason == "stop" and not request.finished
    assert len(at.running) == 3 - firsts.count(firsts[0])
    drain(at)
    assert_same(request, alone(at, WORDS[:6], wish))


# --- Aborts and errors ----------------------------------------------------------------------------


@pytest.mark.parametrize("steps", range(7))
@pytest.mark.parametrize("n", [1, 3])
def test_abort_at_any_time(steps, n):
    """Blocks kept by what was aborted while it waited, half-way through its prompt, or running;
    or a neighbour that lost a token to it."""
    at = engine(num_blocks=20, max_num_seqs=3, max_num_batched_tokens=5)
    wish = params(4, ignore_eos=True)
    before = at.add_request(WORDS[:6], wish)
    gone = at.add_request(WORDS[:14], replace(wish, n=n))
    after = at.add_request(WORDS[:9], wish)
    for _ in range(steps):
        step(at)
    at.abort(gone)
    at.abort(gone)
    at.check()
    assert gone.finished and not any(task.request is gone for task in at.running + at.waiting)
    drain(at)
    assert {sequence.finish_reason for sequence in gone.outputs} == {"abort"}
    for request, length in ((before, 6), (after, 9)):
        assert_same(request, alone(at, WORDS[:length], wish))


def test_abort_of_what_has_ended_changes_nothing():
    """A client that hangs up after the last word turned "length" into "abort"."""
    at = engine()
    request = at.add_request(WORDS[:6], params(2, ignore_eos=True))
    drain(at)
    at.abort(request)
    assert request.outputs[0].finish_reason == "length"
    assert at.step() == []


def test_abort_keeps_what_a_sibling_has_finished():
    """Aborted with one of its sequences at its end."""
    at = engine(num_blocks=40)
    free = params(9, n=3, temperature=2.0, ignore_eos=True)
    firsts = [sequence.output_ids[0] for sequence in alone(at, WORDS[:6], free)]
    request = at.add_request(WORDS[:6], replace(free, stop_token_ids=(firsts[0],)))
    step(at)
    at.abort(request)
    ends = ["stop" if token == firsts[0] else "abort" for token in firsts]
    assert [sequence.finish_reason for sequence in request.outputs] == ends
    assert len({*ends}) == 2
    assert_empty(at)


# --- Log-probabilities ----------------------------------------------------------------------------


@cache
def scores(ids):
    """The (T, V) log-probabilities of a plain forward without a cache."""
    positions = torch.arange(len(ids))[None]
    return MODEL(torch.tensor([ids]), positions)[0].float().log_softmax(-1)


def assert_scores(tokens, ids, first):
    """Each token and its top 3 against a forward over the whole text."""
    for p, token in enumerate(tokens, first):
        assert token.id == ids[p]
        if p == 0:
            assert (token.logprob, token.top) == (None, ())
            continue
        line = scores(tuple(ids))[p - 1]
        assert token.logprob == pytest.approx(line[ids[p]].item(), abs=1e-4)
        best = line.topk(3)
        assert [i for i, _ in token.top] == best.indices.tolist()
        assert [x for _, x in token.top] == pytest.approx(best.values.tolist(), abs=1e-4)


@pytest.mark.parametrize("budget", [4, 5, 8, 40])
@pytest.mark.parametrize("length", [1, 2, 8, 13])
def test_logprobs_are_those_of_a_plain_forward(length, budget):
    """Off by one, of the wrong row, only of the last chunk, or lost where the prefix was cached."""
    at, ids = engine(num_blocks=40, max_num_batched_tokens=budget), WORDS[:length]
    wish = params(5, logprobs=3, prompt_logprobs=3, n=2, ignore_eos=True)
    others = [at.add_request(WORDS[i : i + 3], params(20, ignore_eos=True)) for i in (0, 30)]
    step(at)
    for _ in range(2):  # the second time all of the prompt's blocks could be found
        request = at.add_request(ids, wish)
        while not request.finished:
            step(at)
        assert_same(request, alone(at, ids, wish))
        for sequence in request.outputs:
            assert len(sequence.prompt_tokens) == length
            assert_scores(sequence.prompt_tokens, sequence.ids, 0)
            assert_scores(sequence.tokens, sequence.ids, length)
    for other in others:
        at.abort(other)
    assert_empty(at)


def test_prompt_logprobs_of_a_prompt_preempted_half_way():
    """Scored twice, or not at all, where the prompt is computed again from its start."""
    at = engine(num_blocks=8, block_size=2, max_num_seqs=2, max_num_batched_tokens=3)
    wish = params(2, prompt_logprobs=3, logprobs=3, ignore_eos=True)
    first = at.add_request(WORDS[30:32], params(14, ignore_eos=True))
    request = at.add_request(WORDS[:14], wish)
    seen = set()
    while at.has_work:
        step(at)
        if sequences(at.waiting) == request.outputs:
            seen.add(len(request.outputs[0].prompt_tokens))
    assert any(1 < n < 14 for n in seen)
    assert_same(request, alone(at, WORDS[:14], wish))
    assert_scores(request.outputs[0].prompt_tokens, request.outputs[0].ids, 0)
    assert_same(first, alone(at, WORDS[30:32], params(14, ignore_eos=True)))


def test_prompt_logprobs_of_a_sequence_preempted_while_decoding():
    """Its prompt is run again together with its output: nothing may be scored a second time."""
    at = engine(num_blocks=7, max_num_batched_tokens=20)
    requests = crowd(at, 0, 0, 0, prompt_logprobs=1, n=2, tokens=9)
    drain(at)
    assert at.stats.preemptions > 0 and at.stats.cached_tokens > 0
    for request, ids, wish in requests:
        assert_same(request, alone(at, ids, wish))


# --- Neighbours -----------------------------------------------------------------------------------


@pytest.mark.parametrize("neighbours", range(4))
@pytest.mark.parametrize("settings", [{"temperature": 0}, {"top_p": 0.9, "presence_penalty": 1.0}])
def test_neighbours_change_nothing(settings, neighbours):
    """One generator for the whole batch: a seed gave another text in other company."""
    at, wish = (
        engine(num_blocks=60, max_num_seqs=8, max_num_batched_tokens=9),
        params(9, **settings),
    )
    others = [params(12, seed=i, temperature=i / 2, top_k=5 * i) for i in range(neighbours)]
    for i, other in enumerate(others):
        at.add_request(WORDS[i : 2 * i + 3], other)
        step(at)
    request = at.add_request(WORDS[:7], wish)
    drain(at)
    assert_same(request, alone(at, WORDS[:7], wish))


@pytest.mark.parametrize("size", [1, 4, 16])
@pytest.mark.parametrize("budget", [3, 11, 64])
def test_sliding_windows(budget, size):
    """A window counted from the chunk's start, or keys of another block inside the window."""
    at = engine(SLIDING, block_size=size, num_blocks=200 // size, max_num_seqs=3,
                max_num_batched_tokens=budget)  # fmt: skip
    wish = params(10, ignore_eos=True, prompt_logprobs=0, n=2)
    requests = [(at.add_request(ids, wish), ids) for ids in (WORDS[:1], WORDS[:40], WORDS[9:14])]
    drain(at)
    for request, ids in requests:
        assert_same(request, alone(at, ids, wish))


def test_times_are_in_order():
    """A time to first token that is negative, or that is missing for the forked ones."""
    at = engine(max_num_seqs=2)
    requests = [at.add_request(WORDS[i : i + 9], params(n=2)) for i in range(3)]
    drain(at)
    for sequence in (s for request in requests for s in request.outputs):
        assert len(sequence.times) == 1 + len(sequence.tokens)
        assert sequence.times == sorted(sequence.times)


def test_request_ids():
    """Two requests of one name; or a given name not kept."""
    at = engine()
    ids = [at.add_request(WORDS[:2], params(), name).id for name in (None, "mine", None)]
    assert ids[1] == "mine" and len({*ids}) == 3
    drain(at)


# --- The bundled model ----------------------------------------------------------------------------

TEXTS = ["ROMEO:\nWhat", "JULIET:\n", "To be, or not to be, that is the question:\n", "ROMEO:\nBut"]
SAMPLED = SamplingParams(temperature=0.9, top_p=0.95, seed=3, max_tokens=24, ignore_eos=True)


def assert_alone(llm, requests, texts, wishes):
    for request, text, wish in zip(requests, texts, wishes, strict=True):
        ids = llm.engine.tokenizer.encode(text) if isinstance(text, str) else text
        assert request.outputs[0].prompt_ids == ids
        assert_same(request, alone(llm.engine, ids, wish))


def test_generate_many_texts(llm):
    """Out of order, or mixed up with each other, in a pool that does not hold all of them."""
    before = llm.engine.stats.preemptions
    texts = TEXTS * 2
    requests = llm.generate(texts, SAMPLED)
    assert_alone(llm, requests, texts, [SAMPLED] * 8)
    assert llm.engine.stats.preemptions > before


def test_generate_takes_text_and_ids(llm):
    """A single text taken for a list of letters."""
    (request,) = llm.generate(TEXTS[0], SAMPLED)
    assert_alone(llm, [request], TEXTS[:1], [SAMPLED])
    ids = [llm.engine.tokenizer.encode(text) for text in TEXTS]
    assert_alone(llm, llm.generate(ids, SAMPLED), ids, [SAMPLED] * 4)


def test_generate_takes_parameters_for_each(llm):
    """Parameters of the wrong prompt."""
    wishes = [replace(SAMPLED, seed=i, max_tokens=3 + i, logprobs=2) for i in range(4)]
    wishes[2] = replace(wishes[2], n=3, prompt_logprobs=0)
    assert_alone(llm, llm.generate(TEXTS, wishes), TEXTS, wishes)


def test_generate_without_parameters_asks_the_checkpoint(llm):
    """The model's own settings, which generation_config.json holds, were ignored."""
    (request,) = llm.generate(TEXTS[:1])
    got = request.outputs[0].params
    assert (got.temperature, got.top_p) == (0.8, 0.95)
    assert request.finished


@pytest.mark.parametrize("count", [0, 1, 3])
def test_generate_refuses_a_wrong_number_of_parameters(llm, count):
    """zip() dropped the prompts that had no parameters."""
    with pytest.raises(ValueError, match=f"2 prompts, but {count} sampling parameters"):
        llm.generate(TEXTS[:2], [SAMPLED] * count)


def test_generate_of_nothing_is_nothing(llm):
    """An empty list of prompts, as a filter may leave it."""
    assert llm.generate([], SAMPLED) == []
    assert llm.generate([]) == []


@pytest.mark.parametrize("bad", [[5000], [], [1] * 500])
def test_a_bad_prompt_in_the_middle_runs_none(llm, bad):
    """Half of the prompts stayed in the queue, and came out of the next call."""
    before = llm.engine.stats.steps
    with pytest.raises(ValueError):
        llm.generate([[5, 6], bad, [7]], SAMPLED)
    assert_empty(llm.engine)
    assert llm.engine.stats.steps == before


@pytest.mark.parametrize("stop_at", [1, 2, 6])
def test_ctrl_c_leaves_nothing_behind(llm, monkeypatch, stop_at):
    """Sequences left in the queue or blocks still mapped; or what a broken forward had not written
    was found as a prefix afterwards."""
    forward, calls = llm.engine.runner.model.forward, []

    def interrupted(*args):
        calls.append(args)
        if len(calls) == stop_at:
            raise KeyboardInterrupt
        return forward(*args)

    texts = [*TEXTS, "Now is the winter of our discontent"]
    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.runner.model, "forward", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(texts, replace(SAMPLED, n=2))
    assert_empty(llm.engine)
    assert_alone(llm, llm.generate(texts, SAMPLED), texts, [SAMPLED] * 5)


def test_ctrl_c_between_any_two_lines():
    """A signal comes between any two lines: a block taken and not yet in a table is lost for good,
    and a request queued but not yet returned runs in the next call."""
    for stop_at in range(1, 1600, 13):
        llm = LLM.__new__(LLM)
        llm.engine = engine(num_blocks=7, max_num_seqs=3)
        before, left = sys.gettrace(), [stop_at]

        def line(frame, event, arg, left=left):
            left[0] -= event == "line"
            if not left[0]:
                sys.settrace(None)
                raise KeyboardInterrupt
            return line

        def call(frame, event, arg, line=line):
            ours = Path(frame.f_code.co_filename).name in ("scheduler.py", "paged.py")
            return line if ours else None

        try:
            sys.settrace(call)
            llm.generate([WORDS[:5], WORDS[8:14], WORDS[16:21]], params(n=2, ignore_eos=True))
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)
        assert_empty(llm.engine)


@pytest.mark.parametrize("name", ["sample", "model", "copy_blocks", "commit"])
def test_an_error_in_any_part_of_a_step_leaves_nothing_behind(llm, monkeypatch, name):
    """Out of memory in the sampler: the next call inherited the sequences of this one."""
    engine = llm.engine
    owners = {"sample": speculative, "copy_blocks": engine.runner, "commit": engine.pool}

    def failing(*args):
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        owner = owners.get(name, llm.engine.runner.model)
        patch.setattr(owner, "forward" if name == "model" else name, failing)
        with pytest.raises(RuntimeError, match="out of memory"):
            llm.generate(TEXTS, replace(SAMPLED, n=2))
    assert_empty(llm.engine)
    assert_alone(llm, llm.generate(TEXTS[:2], SAMPLED), TEXTS[:2], [SAMPLED] * 2)


def test_stop_strings(llm):
    """A stop string that the batch overlooks, shows in part, or takes for a neighbour's."""
    text = alone(llm.engine, llm.engine.tokenizer.encode(TEXTS[0]), SAMPLED)[0].text
    stop = text[8:12]
    wishes = [replace(SAMPLED, stop=stop), SAMPLED, replace(SAMPLED, stop="\n")]
    texts = [TEXTS[0]] * 3
    requests = llm.generate(texts, wishes)
    assert_alone(llm, requests, texts, wishes)
    assert requests[0].outputs[0].text == text[: text.index(stop)]
    assert requests[0].outputs[0].finish_reason == "stop"
    assert requests[1].outputs[0].text == text


def test_bundled_logprobs(llm):
    """The same as from the command line, also where the prompt is long, chunked and cached."""
    wish = replace(SAMPLED, logprobs=5, prompt_logprobs=5, max_tokens=4)
    ids = llm.engine.tokenizer.encode(TEXTS[2] * 4)
    assert len(ids) > llm.engine.max_num_batched_tokens
    for _ in range(2):
        assert_alone(llm, llm.generate([ids, ids[:20]], wish), [ids, ids[:20]], [wish] * 2)


# --- Attention over blocks ------------------------------------------------------------------------


def slow_paged_attention(q, k, v, k_pool, v_pool, rows, window):
    """Row after row, position after position: what paged_attention does for all at once.

    Takes PagedCache's rows, writes to the pools, and returns (1, N, T, H).
    """
    size, at, out = k_pool.shape[1], 0, []
    for blocks, start, end in rows:
        for t, p in enumerate(range(start, end), at):
            k_pool[blocks[p // size], p % size] = k[0, :, t]
            v_pool[blocks[p // size], p % size] = v[0, :, t]
        here, at = slice(at, at + end - start), at + end - start
        keys = [k_pool[blocks[p // size], p % size] for p in range(end)]  # (K, H) each
        values = [v_pool[blocks[p // size], p % size] for p in range(end)]
        keys, values = (torch.stack(x, dim=1)[None] for x in (keys, values))  # (1, K, S, H)
        positions = torch.arange(start, end)[None], torch.arange(end)[None]
        out.append(attention(q[:, :, here], keys, values, *positions, window))
    return torch.cat(out, dim=2)


def random_rows(draw, blocks, size):
    """Rows over blocks of their own, behind a prefix that some of them share."""
    free = draw.sample(range(blocks), blocks)
    prefix = [free.pop() for _ in range(2)]
    rows = []
    for _ in range(draw.randint(1, 6)):
        shared = prefix[: draw.randint(0, 2)]
        table = shared + [free.pop() for _ in range(draw.randint(1, 3))]
        end = draw.randint(len(shared) * size + 1, len(table) * size)
        rows.append(Row(table, draw.randint(len(shared) * size, end - 1), end))
    rows = [row._replace(start=row.end - 1) if draw.random() < 0.5 else row for row in rows]
    return sorted(rows, key=lambda row: row.end - row.start)


@pytest.mark.parametrize("window", [None, 1, 3, 50])
@pytest.mark.parametrize(("heads", "size"), [((4, 2), 4), ((3, 3), 1), ((4, 1), 16)])
def test_paged_attention_equals_its_slow_twin(heads, size, window):
    """A key of another's block, a row attended with its neighbour's table, a slot written that is
    nobody's: the pools must be equal in every slot afterwards."""
    (N, K), H, blocks = heads, 8, 24
    config = Config(32, 16, 16, 1, N, K, H)
    pool = PagedCache(config, blocks, size, torch.float64)
    for seed in range(12):
        rows = random_rows(random.Random(seed), blocks, size)
        T = sum(row.end - row.start for row in rows)
        q, k, v = (torch.randn(1, heads, T, H).double() for heads in (N, K, K))
        for tensor in pool.pools[0]:
            tensor.normal_()  # whatever has been left behind
        twins = [tensor.clone() for tensor in pool.pools[0]]
        expected = slow_paged_attention(q, k, v, *twins, rows, window)
        view, positions = pool.step(rows)
        assert positions.tolist() == [[p for row in rows for p in range(row.start, row.end)]]
        got = view.layers[0].attend(q, k, v, positions, window)
        torch.testing.assert_close(got, expected)
        assert all(torch.equal(*pair) for pair in zip(pool.pools[0], twins, strict=True))


def test_the_example_of_step():
    """Positions and slots of the docstring, and of BlockTable's: blocks [7, 2], positions 3..5."""
    pool = PagedCache(MODEL.config, 8, 4, torch.float64)
    rows = [Row([7, 2], 5, 6), Row([3], 2, 3), Row([0, 1], 4, 7)]
    view, positions = pool.step(rows)
    slots, tables, groups = view.layers[1].plan
    assert positions.tolist() == [[5, 2, 4, 5, 6]]
    assert slots.tolist() == [9, 14, 4, 5, 6]
    assert groups.tolist() == [[2, 1, 6], [1, 3, 7]]
    assert [tables[i, : len(row.blocks)].tolist() for i, row in enumerate(rows)] == [
        row.blocks for row in rows
    ]
    view, _ = pool.step([Row([7, 2], 3, 6)])
    assert view.layers[0].plan[0].tolist() == [31, 8, 9]


def test_copies_of_one_step_are_made_at_once():
    """A block copied from after it had been copied to; or a layer, or the values, left out."""
    pool = PagedCache(MODEL.config, 5, 2, torch.float64)
    for tensors in pool.pools:
        for tensor in tensors:
            tensor.normal_()
    before = [[tensor.clone() for tensor in tensors] for tensors in pool.pools]
    pool.copy_blocks([(0, 1), (1, 2), (0, 4)])
    for tensors, olds in zip(pool.pools, before, strict=True):
        for tensor, old in zip(tensors, olds, strict=True):
            assert torch.equal(tensor, old[[0, 0, 1, 3, 0]])
    pool.copy_blocks([])


# --- Any order of events --------------------------------------------------------------------------


def some_params(draw) -> SamplingParams:
    """Parameters from few values, so that the twin's results are often known already."""
    return SamplingParams(
        temperature=draw.choice([0.0, 1.0]), seed=draw.choice([1, 2]), n=draw.choice([1, 1, 2, 3]),
        max_tokens=draw.choice([1, 2, 5, 9]), logprobs=1, ignore_eos=draw.choice([False, True]),
        prompt_logprobs=draw.choice([None, None, 1]),
    )  # fmt: skip


def some_prompt(draw) -> list[int]:
    """The start of one of two texts, and often a token of its own."""
    start = draw.choice([0, 32])
    tail = [draw.randrange(1, 4)] if draw.random() < 0.5 else []
    return WORDS[start : start + draw.choice([1, 2, 3, 5, 8, 12, 17])] + tail


class Traffic(RuleBasedStateMachine):
    """Requests come, are aborted and run, over pools of a few blocks."""

    @initialize(
        blocks=st.integers(2, 12), size=st.integers(1, 5), seqs=st.integers(1, 4),
        spare=st.integers(0, 9), sliding=st.booleans(),
    )  # fmt: skip
    def start(self, blocks, size, seqs, spare, sliding):
        options = {"max_num_seqs": seqs, "max_num_batched_tokens": seqs + spare}
        model = SLIDING if sliding else MODEL
        self.engine = engine(model, num_blocks=blocks, block_size=size, **options)
        self.requests, self.aborted, self.steps = [], [], 0

    @rule(
        draw=st.randoms(use_true_random=False),
        priority=st.integers(-1, 1),
        salt=st.sampled_from([None, None, "s"]),
    )
    def add(self, draw, priority, salt):
        ids, wish = some_prompt(draw), some_params(draw)
        fits = (
            len(ids) + wish.max_tokens - 1
            <= self.engine.pool.num_blocks * self.engine.pool.block_size
        )
        queued = len(self.engine.waiting)
        try:
            request = self.engine.add_request(ids, wish, None, priority, salt)
        except ValueError:
            assert not fits and len(self.engine.waiting) == queued
        else:
            assert fits
            self.requests.append((request, ids, wish))

    @precondition(lambda self: self.engine.has_work)
    @rule(count=st.integers(1, 6))
    def run(self, count):
        for _ in range(count):
            made = {id(s): len(s.tokens) for r, *_ in self.requests for s in r.outputs}
            moved = step(self.engine)
            grew = [
                r for r, *_ in self.requests if any(len(s.tokens) > made[id(s)] for s in r.outputs)
            ]
            assert {*moved} == {*grew} and len(moved) == len(grew)
            self.steps += 1

    @precondition(lambda self: self.requests)
    @rule(at=st.integers(0, 99))
    def abort(self, at):
        request = self.requests[at % len(self.requests)][0]
        ended = request.finished
        self.engine.abort(request)
        assert request.finished
        if not ended:
            self.aborted.append(request)

    @invariant()
    def every_block_is_accounted_for(self):
        self.engine.check()

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        drain(self.engine)
        for request, ids, wish in self.requests:
            expected = alone(self.engine, ids, wish)
            if request not in self.aborted:
                assert_same(request, expected)
            for got, want in zip(request.outputs, expected, strict=True):
                assert got.finish_reason in (want.finish_reason, "abort")
                assert got.output_ids == want.output_ids[: len(got.output_ids)]


TestTraffic = Traffic.TestCase
TestTraffic.settings = settings(
    max_examples=100, stateful_step_count=20, deadline=None, derandomize=True, database=None
)


@pytest.mark.parametrize("seed", range(6))
def test_random_traffic(seed):
    """Nobody is lost, starved or given another's tokens, in a long run over a crowded pool."""
    draw = random.Random(seed)
    at = engine(num_blocks=draw.randint(13, 20), block_size=2, max_num_batched_tokens=4 + 3 * seed)
    pending = []
    for _ in range(40):
        ids, wish = some_prompt(draw), some_params(draw)
        salt = draw.choice([None, None, "s"])
        request = at.add_request(ids, wish, None, draw.randint(-1, 1), salt)
        pending.append((request, ids, wish))
        for _ in range(draw.randrange(8)):
            step(at)
        if draw.random() < 0.2:
            at.abort(pending.pop(draw.randrange(len(pending)))[0])
    drain(at)
    assert at.stats.preemptions > 0 and at.stats.cached_tokens > 0
    for request, ids, wish in pending:
        assert_same(request, alone(at, ids, wish))


def test_a_quantised_folder_loads(tmp_path):
    """LLM loaded plain folders only, and told its user to call another function."""
    argv = ["--checkpoint", str(SHAKESPEARE), "--mode", "int4", "--group-size", "64"]
    assert quantize.main([*argv, "--out", str(tmp_path / "int4")]) == 0
    (request,) = LLM(tmp_path / "int4", num_blocks=8).generate("ROMEO:", params(max_tokens=4))
    assert len(request.outputs[0].output_ids) == 4
