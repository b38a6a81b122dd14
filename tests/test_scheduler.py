"""The engine against generate(): whatever else runs, each sequence must get what it gets alone.

Most models here are tiny, random and in float64, where the order of a sum cannot flip a draw. Every
sequence also reports its log-probabilities: a key read from the wrong place changes those even
where the token stays the same.
"""

import copy
import itertools
import math
import random
import sys
import timeit
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import DRAFT, SHAKESPEARE
from tiny import random_model
from torch.profiler import profile
from ways import plain, split

import paged
import scheduler
from around.fast import attending
from around.fast.attending import attend_fast
from around.settings import CHUNK, EngineArgs, Limits, SamplingParams, SettingError
from around.start import memory
from around.start.memory import affordable_blocks, free_memory
from generate import generate
from kv_cache import StaticCache
from llm import LLM
from model import Transformer
from sampling import Sequence
from scheduler import Engine, Guess, Proposer
from speculative import DraftModel, Guesser, NGram
from tools.books import audit

WORDS = random.Random(7).choices(range(1, 32), k=64)  # a text to cut prompts from


MODEL = random_model()
SLIDING = random_model(
    num_hidden_layers=3, num_attention_heads=4, windows=(5, None, 3), qkv_bias=True, qk_norm=True
)


def noisy(model, amount: float):
    """A draft that is right now and then."""
    draft, generator = copy.deepcopy(model), torch.Generator().manual_seed(3)
    for parameter in draft.parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter += amount * parameter.std() * noise if parameter.numel() > 1 else 0
    return draft


DRAFTS = {
    "n-gram": None,
    "itself": MODEL,
    "near": noisy(MODEL, 0.1),
    "small": random_model(num_hidden_layers=1, num_attention_heads=1, head_dim=4),
}
pytestmark = pytest.mark.usefixtures("one_thread")


def engine(model: Transformer = MODEL, tokenizer=None, draft=None, speculate=0, **limits) -> Engine:
    small = {"num_blocks": 16, "block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 8}
    proposer = NGram(speculate) if speculate else None
    if draft:
        proposer = DraftModel(draft, speculate, model.config.vocab_size)
    return Engine(model, tokenizer, proposer, **small | limits)


def fitting(proposer=None, model: Transformer = MODEL, **limits) -> int:
    """How many blocks an engine() would get of the memory."""
    small = {"block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 8}
    return affordable_blocks(EngineArgs(**small | limits), model, proposer or Proposer())


def params(max_tokens=6, **given) -> SamplingParams:
    return SamplingParams(**{"seed": 1, "logprobs": 1, "max_tokens": max_tokens} | given)


TWINS: dict[tuple, list[Sequence]] = {}


def alone(at: Engine, ids, wish: SamplingParams) -> list[Sequence]:
    """The slow twin: each of the n sequences by itself, with a cache of its own."""
    key = (at.runner.model, tuple(ids), repr(wish), at.tokenizer, at.max_seq_len)
    if key not in TWINS:
        splits = split(wish)
        TWINS[key] = [Sequence(ids, p, at.config, at.tokenizer, at.max_seq_len) for p in splits]
        for sequence in TWINS[key]:
            slabs = StaticCache(at.runner.model, 1, sequence.max_len)
            list(generate(at.runner.model, sequence, slabs))
    return TWINS[key]


def guessed(model, ids, wish: SamplingParams, draft, speculate: int) -> list[Sequence]:
    """The slow twin with guesses: each of the n sequences by itself, without any cache."""
    sequences = [Sequence(ids, each, model.config) for each in split(wish)]
    return [plain(model, sequence, draft, speculate) for sequence in sequences]


def assert_same(request, expected: list[Sequence]):
    """Same tokens, log-probabilities, text and end."""
    for got, want in zip(request.outputs, expected, strict=True):
        assert got.output_ids == want.output_ids
        assert (got.finish_reason, got.text) == (want.finish_reason, want.text)
        for a, b in zip(got.tokens, want.tokens, strict=True):
            assert a.id == b.id
            assert a.logprob == (None if b.logprob is None else pytest.approx(b.logprob, abs=1e-4))
            assert [p for _, p in a.top] == pytest.approx([p for _, p in b.top], abs=1e-4)


def assert_prompt(request, model, ids):
    """Each prompt token but the first has the log-probability that a plain forward gives it."""
    assert [token.id for token in request.prompt_tokens] == ids
    assert request.prompt_tokens[0].logprob is None
    lines = model(torch.tensor([ids]), torch.arange(len(ids))[None])[0].log_softmax(-1)
    for token, line in zip(request.prompt_tokens[1:], lines[:-1], strict=True):
        assert token.logprob == pytest.approx(line[token.id].item(), abs=1e-4)
        assert [p for _, p in token.top] == pytest.approx(line.topk(1).values.tolist(), abs=1e-4)


def assert_empty(at: Engine):
    audit(at)
    assert not at.queue and not at.running and not at.waiting
    assert len(at.pool.available) == at.pool.num_blocks


def step(at: Engine):
    """One step, which must keep to its budget and get something done."""
    before, work = at.stats.copy(), [*at.queue]
    requests = at.step()
    audit(at)
    computed = at.stats["computed_tokens"] - before["computed_tokens"]
    assert computed <= at.max_num_batched_tokens
    assert computed > 0 or not work, "a step that does nothing will do so for ever"
    return requests


def drain(at: Engine) -> int:
    """Step until all is done; a bound on the steps holds off starvation."""
    steps, most = 0, sum(s.max_len for r in {s.request for s in at.queue} for s in r.outputs)
    while at.queue:
        step(at)
        steps += 1
        assert steps <= most, "somebody waits for ever"
    assert_empty(at)
    return steps


def check(at: Engine, *jobs):
    """Run jobs, pairs of ids and wish, together: each must get what it gets alone."""
    requests = [at.add_request(*job) for job in jobs]
    drain(at)
    for request, job in zip(requests, jobs, strict=True):
        assert_same(request, alone(at, *job))
    return requests


def produced(*requests):
    return [len(request.outputs[0].tokens) for request in requests]


# --- Which tokens run -----------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [4, 5, 7, 30])
def test_the_last_prompt_is_not_lost_when_it_is_chunked(budget):
    """The last prompt of a full batch was cut, and its rest never run: no token ever came."""
    at = engine(max_num_batched_tokens=budget, num_blocks=40)
    prompts = [WORDS[i : i + n] for i, n in ((0, 9), (20, 3), (30, 12))]
    requests = check(at, *((ids, params()) for ids in prompts))
    # Each token once, and the last of each never: nothing would be sampled from it.
    assert at.stats["computed_tokens"] == sum(len(r.outputs[0].ids) - 1 for r in requests)
    assert at.stats["generation_tokens"] == sum(produced(*requests))


def test_chunks_fill_the_budget():
    """The picture at the head of scheduler.py: what decoding leaves of the budget, prompts take."""
    at = engine(num_blocks=40, max_num_batched_tokens=8)
    wish = params(6, ignore_eos=True)
    a = at.add_request(WORDS[:1], wish)
    step(at)
    b, c = at.add_request(WORDS[1:17], wish), at.add_request(WORDS[20:31], wish)
    lengths = []
    for _ in range(4):
        step(at)
        assert sum(at.ran.values()) == 8
        lengths.append(produced(a, b, c))
    assert lengths == [[2, 0, 0], [3, 0, 0], [4, 1, 0], [5, 2, 1]]
    drain(at)


@pytest.mark.parametrize("priority", [0, -1, 1])
@pytest.mark.parametrize("budget", [4, 6])
def test_a_long_prompt_stalls_nobody(priority, budget):
    """While a prompt was computed, running sequences made no token, as seen in any chat."""
    at = engine(num_blocks=40, max_num_batched_tokens=budget)
    wish, steps = params(40, ignore_eos=True), 0
    running = [at.add_request(WORDS[i : i + 2], wish) for i in range(3)]
    while not all(produced(*running)):
        step(at)
    long = at.add_request(WORDS[:24], wish, priority=priority)
    while not long.outputs[0].tokens:
        before = produced(*running)
        step(at)
        steps += 1
        assert produced(*running) == [n + 1 for n in before]
    assert steps == -(-24 // (budget - 3))  # and the prompt gets all that is left
    for request in (*running, long):
        at.abort(request)
    assert_empty(at)


def first_steps(at: Engine, requests) -> list[int]:
    """Run all, and return the step in which each request got its first token."""
    first = {}
    while at.queue:
        for request in step(at):
            first.setdefault(request, at.stats["engine_steps"])
    assert_empty(at)
    return [first[request] for request in requests]


def test_first_come_first_served():
    """A waiting sequence overtaken by a later one."""
    at = engine(max_num_seqs=2, max_num_batched_tokens=3)
    requests = [at.add_request(WORDS[i : i + n], params()) for i, n in enumerate((9, 1, 8, 1, 5))]
    first = first_steps(at, requests)
    assert first == sorted(first) and len({*first}) > 3


def test_a_small_request_does_not_overtake_for_memory():
    """Small prompts that slip past a large one keep it waiting for as long as they come."""
    at = engine(num_blocks=4, max_num_batched_tokens=16)
    wish = params(4, ignore_eos=True)
    first = at.add_request(WORDS[:10], wish)
    step(at)
    large, small = at.add_request(WORDS[20:30], wish), at.add_request(WORDS[40:42], wish)
    step(at)
    assert (at.running, at.waiting) == (first.outputs, [*large.outputs, *small.outputs])
    first = first_steps(at, [large, small])
    assert first == sorted(first)


def test_the_lowest_number_runs_first():
    """Priorities the wrong way round, or equal ones not in the order of arrival."""
    at = engine(max_num_seqs=1)
    wish = params(2, ignore_eos=True)
    order = [at.add_request(WORDS[:3], wish, priority=p) for p in (2, -1, 0, 2, 0, -1)]
    ended = [order.index(request) for request in at.run() if request.finished]
    assert ended == [1, 5, 2, 4, 0, 3]


@pytest.mark.parametrize("priority", [float("nan"), "1", 1.5, True, None, 2**40])
def test_a_priority_that_has_no_place_in_line_is_refused(priority):
    """NaN is neither before nor after another, so the line was in no order any more; a string
    raised out of submit(), in the thread that drives the engine."""
    at = engine()
    with pytest.raises(SettingError, match=r"^priority must be int"):
        at.prepare(WORDS[:3], params(), priority=priority)


# --- Memory ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "tokens", "message"),
    [
        (17, 1, "17 tokens.* 17.*--kv-memory"), (60, 1, "60 tokens.* 17"),
        (0, 1, "0 tokens.*some text"), (64, 1, "64.* 17.*max-seq-len"),
        ([32], 1, "32"), ([-1], 1, "-1"),
    ],
)  # fmt: skip
def test_what_can_never_run_is_refused_at_once(prompt, tokens, message):
    """A prompt larger than the pool ended nano-vllm, and let mini-sglang wait for ever; an empty
    one killed a server (CVE-2024-8768)."""
    at, ids = engine(num_blocks=4), prompt if isinstance(prompt, list) else [1] * prompt
    with pytest.raises(SettingError, match=message):
        at.add_request(ids, params(tokens, n=2))
    assert_empty(at)


@pytest.mark.parametrize(("prompt", "tokens"), [(13, 4), (1, 16), (16, 1)])
def test_what_just_fits_is_run(prompt, tokens):
    """A request refused for the slot of its last token, which is never run; or a pool that is one
    block short when all of it is needed."""
    at = engine(num_blocks=4, max_num_batched_tokens=5)
    check(at, (WORDS[:prompt], params(tokens, ignore_eos=True, n=3)))


@pytest.mark.parametrize(
    "options",
    [{}, {"speculate": 8}, {"max_num_seqs": 1024}, {"max_num_seqs": 300, "speculate": 64},
     {"draft_checkpoint": DRAFT}],
    ids=str,
)  # fmt: skip
def test_a_budget_follows_from_what_is_to_run(options):
    """One default for all: more sequences, or more guesses, and it was refused as too small."""
    llm = LLM(SHAKESPEARE, device="cpu", max_seq_len=40, **options)
    at, seqs = llm.engine, options.get("max_num_seqs", 64)
    k = 4 if "draft_checkpoint" in options else options.get("speculate", 0)
    assert (at.max_num_seqs, at.proposer.k) == (seqs, k)
    assert at.max_num_batched_tokens == seqs * (1 + k) + CHUNK
    requests = llm.generate(["ROMEO:", "JULIET:"] * 2, params(9, ignore_eos=True))
    assert produced(*requests) == [9] * 4
    assert_empty(at)
    with pytest.raises(SettingError, match="max_num_batched_tokens"):
        LLM(SHAKESPEARE, device="cpu", max_num_batched_tokens=seqs * (1 + k) - 1, **options)


def test_requests_of_others():
    """LLM.generate returned unfinished requests where the engine had others; one that was aborted
    before it was submitted ran for ever."""
    llm = LLM(SHAKESPEARE, device="cpu", num_blocks=40)
    other = llm.engine.add_request("JULIET:", params(2, ignore_eos=True))
    (mine,) = llm.generate("ROMEO:", params(9, ignore_eos=True))
    assert produced(other, mine) == [2, 9]
    aborted = llm.engine.prepare("ROMEO:", params(9))
    llm.engine.abort(aborted)
    llm.engine.submit(aborted)
    assert_empty(llm.engine)


def test_choices_are_listed_once():
    """The default stood in the error's list twice."""
    with pytest.raises(
        SettingError, match=r"^kv_dtype 'int4' is not supported; supported: auto, int8$"
    ):
        Limits(kv_dtype="int4")


def test_max_seq_len_bounds_prompt_and_output():
    """A sequence ran past its context, into blocks that nobody had counted."""
    at = engine(max_seq_len=12)
    (request,) = check(at, (WORDS[:5], params(50, ignore_eos=True)))
    assert len(request.outputs[0].ids) == 12
    assert request.outputs[0].finish_reason == "length"
    with pytest.raises(ValueError, match="12 tokens, context is 12"):
        at.add_request(WORDS[:12], params())


def test_the_last_in_line_is_preempted():
    """The oldest was preempted, so that nobody came to an end; or the most important one. Or what
    was preempted was put at the end of the line, where all that came meanwhile overtook it."""
    at, gone = engine(num_blocks=7, max_num_batched_tokens=20), []
    wish = params(12, ignore_eos=True)
    requests = [at.add_request(WORDS[8 * i :][:5], wish, priority=i % 2) for i in (1, 2, 3)]
    while at.queue:
        step(at)
        gone += [sequence.request for sequence in at.waiting if sequence.tokens]
        if len(gone) == 1:
            requests.append(at.add_request(WORDS[40:42], params(2), priority=1))
            assert at.waiting[-1] is requests[-1].outputs[0] and len(at.waiting) == 2
    assert list(dict.fromkeys(gone)) == [requests[2], requests[0]]
    last = [request.outputs[0].times[-1] for request in requests]
    assert last[1] < last[0] < last[2]


def test_a_resumed_sequence_is_computed_in_chunks():
    """A token at a time, as if it were decoding: as slow as to make the output once more."""
    at, chunks = engine(num_blocks=10, max_num_seqs=2, max_num_batched_tokens=6), 0
    at.add_request(WORDS[:20], params(18, ignore_eos=True))
    at.add_request(WORDS[20:24], params(30, ignore_eos=True))
    while at.queue:
        rest = [len(s.ids) - s.table.length for s in at.running if s.tokens]
        step(at)
        if rest and max(rest) > 6:
            chunks += 1
            assert sum(at.ran.values()) == 6
    assert at.stats["num_preemptions"] > 0 and chunks > 0


def test_nobody_is_let_in_while_memory_is_taken_away():
    """What had just been preempted came back in the same step, and was preempted in the next."""
    at = engine(num_blocks=8, block_size=2, max_num_seqs=3, max_num_batched_tokens=4)
    for i in range(3):
        at.add_request(WORDS[9 * i : 9 * i + 3], params(13, ignore_eos=True), priority=1)
    while len(at.running) < 3:
        step(at)
    at.add_request(WORDS[40:41], params(2))  # first in line, and small
    stood = []
    while at.queue:
        before, waiting = at.stats["num_preemptions"], len(at.waiting)
        step(at)
        if preempted := at.stats["num_preemptions"] - before:
            assert len(at.waiting) == waiting + preempted
            stood.append(waiting)
    assert stood[0] == 1


def test_preempted_with_a_prefix_still_cached():
    """nano-vllm#211, #233: IndexError where a preempted sequence found its own blocks again. Or it
    drew again from the start of its random numbers, or lost its output."""
    at = engine(num_blocks=8, max_num_batched_tokens=20, block_size=2, max_num_seqs=3)
    jobs = [([*WORDS[:5], i], params(9, ignore_eos=True, seed=i)) for i in range(1, 4)]
    requests, resumed, cached = [at.add_request(*job) for job in jobs], 0, {}
    while at.queue:
        hits, waiting = at.stats["prefix_cache_hits"], [s for s in at.waiting if s.tokens]
        step(at)
        resumed += at.stats["prefix_cache_hits"] > hits and any(s in at.running for s in waiting)
        cached = {s: s.cached for s in at.running} | cached
    assert at.stats["num_preemptions"] > 0 and resumed > 0
    for request, job in zip(requests, jobs, strict=True):
        assert_same(request, alone(at, *job))
        assert request.outputs[0].cached == cached[request.outputs[0]]  # as when it came


def test_equal_prompts_in_one_step_and_after():
    """Two that compute the same blocks in one step, and a third that finds them: same texts."""
    at = engine(num_blocks=40, max_num_batched_tokens=30)
    ids, wish = WORDS[:9], params(ignore_eos=True)
    requests = [at.add_request(ids, wish), at.add_request(ids, wish)]
    step(at)
    assert at.stats["prefix_cache_hits"] == 0 and len(at.running) == 2
    requests.append(at.add_request(ids, wish))
    step(at)
    assert (at.stats["prefix_cache_hits"], at.stats["prefix_cache_queries"]) == (8, 27)
    drain(at)
    for request in requests:
        assert_same(request, alone(at, ids, wish))


@pytest.mark.parametrize("length", [4, 8])
def test_a_fully_cached_prompt_still_answers(length):
    """nano-vllm#144: the same prompt again left no token to sample from."""
    at = engine()
    for _ in range(2):
        check(at, (WORDS[:length], params()))
    assert at.stats["prefix_cache_hits"] == length - 4


def test_a_salt_keeps_prefixes_apart():
    """A request timed the prefixes of another user."""
    at, hits = engine(num_blocks=40), []
    for salt in (None, "a", "b", "a", None):
        before = at.stats["prefix_cache_hits"]
        at.add_request(WORDS[:9], params(), cache_salt=salt)
        drain(at)
        hits.append(at.stats["prefix_cache_hits"] - before)
    assert hits == [0, 0, 0, 8, 8]
    with pytest.raises(ValueError, match="cache_salt"):
        at.add_request(WORDS[:9], params(), cache_salt=3)


@pytest.mark.parametrize(("blocks", "most"), [(10, 10), (10.9, 10), (1000, 24)])
def test_kv_memory_in_bytes(blocks, most):
    """A factor forgotten: keys and values, layers, heads, the item's size; or a pool larger than
    all sequences together can use; or what attention copies of one layer comes on top."""
    block = 2 * 2 * 4 * 1 * 8 * 8  # k and v, layers, tokens, heads, head dim, float64
    wish = {"max_seq_len": 22}
    at = engine(num_blocks=fitting(kv_memory=blocks * 1.5 * block, **wish), **wish)
    held = sum(pool.nbytes for pool in at.runner.kv)
    assert (at.pool.num_blocks, held) == (most, most * block)


def test_a_step_costs_no_more_where_many_wait():
    """All of them were gone through at each step: 16,000 that wait made it five times as long."""
    seconds = []
    for waiting in (0, 20_000):
        at = engine(num_blocks=200, max_num_seqs=4, max_num_batched_tokens=64)
        for _ in range(4 + waiting):
            at.add_request([1, 2], params(60, temperature=0, ignore_eos=True))
        seconds.append(min(timeit.repeat(at.step, number=5, repeat=9)))
        assert len(at.running) == 4
    assert seconds[1] < 3 * seconds[0]


def peak(act) -> int:
    """The most bytes that were taken at once."""
    with profile(profile_memory=True) as profiler:
        act()
    events = profiler.profiler.kineto_results.events()
    taken = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    return max(itertools.accumulate(count for _, count in taken))


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_attention_stays_within_kv_memory(kv_dtype):
    """int8 keys are copied as they are, and then as floats: that came on top of the memory."""
    wide = {"max_num_seqs": 999, "max_num_batched_tokens": 2000, "kv_dtype": kv_dtype}
    at = engine(num_blocks=fitting(kv_memory=2e5, **wide), **wide)
    places = torch.arange(at.pool.num_blocks).expand(1, 2 * at.config.num_key_value_heads, -1)
    group = SimpleNamespace(flat_table=places, span=None)  # no run: a copy
    kept = []
    most = peak(lambda: kept.append(attending.side_by_side(at.runner.kv[0], group, at.model.dtype)))
    assert most > kept[0].nbytes / 2
    assert sum(pool.nbytes for pool in at.runner.kv) + most <= 1.01 * 2e5  # and its numbers


def step_bytes(at: Engine) -> int:
    logits = at.max_num_seqs * (1 + at.proposer.k) + scheduler.MAX_SCORED
    return memory.step_bytes(at.model, at.max_num_batched_tokens, logits)


def test_no_sequence_outgrows_the_pool():
    """It was preempted by nobody, and waited for a block that never came."""
    at = engine(num_blocks=4)
    request = at.add_request([1] * 14, params(9, ignore_eos=True))
    drain(at)
    (job,) = request.outputs  # 16 slots, and the last token needs none
    assert (job.finish_reason, len(job.ids)) == ("length", 17)


def test_kv_memory_as_a_share(monkeypatch):
    """Half of the free memory taken for half a byte."""
    monkeypatch.setattr(memory, "free_memory", lambda device: 20 * 3 * 1024)
    monkeypatch.setattr(memory, "step_bytes", lambda *step: 0)
    assert fitting(kv_memory=0.5) == 20
    for too_little in (0.001, 1):  # 1 is a byte, and fewer than 0 blocks do not fit
        with pytest.raises(ValueError, match=r"^0 blocks fit into --kv-memory: .*batched"):
            fitting(kv_memory=too_little)
    monkeypatch.setattr(memory, "MAX_BYTES", 9 * 3 * 512)  # other programs want memory too
    assert fitting(kv_memory=0.5) == 9


WIDE = dict(hidden_size=64, intermediate_size=192, vocab_size=3000)
TOP_K = dict(top_k=5, temperature=1.0, frequency_penalty=1.0)


@pytest.mark.parametrize(
    ("changes", "guesses", "prompt", "filters"),
    [(WIDE, 0, 300, TOP_K), (WIDE, 3, 2, TOP_K), (WIDE | dict(vocab_size=40), 0, 300, TOP_K),
     (WIDE | dict(num_experts=4, num_experts_per_tok=3), 0, 300, TOP_K),
     (WIDE | dict(vocab_size=20_000), DraftModel, 2, dict(top_p=0.95, temperature=99.0))],
)  # fmt: skip
def test_a_step_stays_within_what_is_free(monkeypatch, changes, guesses, prompt, filters):
    """All that was free went to the cache: the first long prompt, or the first step of many
    sequences, had none for its activations or its logits; the verification of guesses sorted the
    whole vocabulary for all rows at once."""
    free = 300_000_000
    monkeypatch.setattr(memory, "free_memory", lambda device: free)
    model = random_model(**changes, max_position_embeddings=400)
    limits = dict(max_num_seqs=64, max_num_batched_tokens=1024)
    if guesses is DraftModel:
        proposer = DraftModel(model, 3, model.config.vocab_size)
    else:
        proposer = NGram(guesses)
    blocks = fitting(proposer, model, kv_memory=0.999, block_size=16, **limits)
    at = Engine(model, None, proposer, num_blocks=blocks, **limits)
    for i in range(64):
        wish = params(30, ignore_eos=True, **filters)
        at.add_request([i % 30 + 1, *[7, 8] * (prompt // 2)], wish)
    most = max(peak(at.step) for _ in range(4))
    assert most < step_bytes(at) < 15 * most  # the small model has all of a large one's masks


def test_scored_prompts_stay_within_what_is_free():
    """The logits of all tokens of a chunk, and what was made of them, were in no estimate: of 260
    tokens and a vocabulary of 150,000 these are 380 MB, where 15 were counted."""
    model = random_model(**WIDE | dict(vocab_size=20_000), max_position_embeddings=400)
    at = Engine(model, None, num_blocks=400, block_size=4, max_num_seqs=4)
    for i in range(3):  # which begin together
        at.add_request([i + 1, *[7, 8] * 150], params(2, prompt_logprobs=True))
    most = max(peak(at.step) for _ in range(4))
    assert sum(at.ran.values()) == 66  # the others run too, one token at a time
    assert most < 40e6 < step_bytes(at)
    drain(at)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("windows", [(None, None), (900, None)])
def test_masks_stay_within_what_is_free(windows, dtype):
    """The mask of a chunk's tokens, which PyTorch widens to floats, was in no estimate: 264 MB for
    32 query heads on 4, and 257 tokens that see 32,528."""
    heads = dict(num_attention_heads=32, num_key_value_heads=4, windows=windows)
    model = random_model(**heads, max_position_embeddings=16_385).to(dtype)
    attend_fast(model)
    limits = dict(max_num_seqs=1, max_num_batched_tokens=257)
    at = Engine(model, None, num_blocks=1024, **limits)
    row = paged.Row([*range(1024)], 16_384 - 257, [1] * 257)
    assert peak(lambda: at.runner.forward([row])) < step_bytes(at) < 210e6


def test_a_mask_in_pieces_is_the_whole_mask(monkeypatch):
    """A piece that gets the mask of another, or of the layer before it; tokens in another order."""
    monkeypatch.setattr(attending, "MAX_PAIRS", 40)
    jobs = [(WORDS[i : i + n], params(3)) for i, n in ((0, 25), (9, 14), (30, 14), (50, 3))]
    for model in (MODEL, SLIDING):
        check(engine(model, num_blocks=40, max_num_batched_tokens=80), *jobs)
        check(engine(model, num_blocks=40, max_num_batched_tokens=9), *jobs)


V1, V2 = "sys/fs/cgroup/memory/", "sys/fs/cgroup/"
STAT = "cache 9\ninactive_file 20\nactive_file 30\n"
TOTAL = "total_inactive_file 300\ntotal_active_file 100\n"
MEMINFO = "MemTotal:  9 kB\nMemFree:  1 kB\nMemAvailable:    5 kB\nSwapFree:  7 kB\n"
MACHINE = {"proc/meminfo": MEMINFO}
SYSTEMS = {
    "no groups": (MACHINE, 5120),
    "version 2": (MACHINE | {
        f"{V2}memory.max": "4000\n", f"{V2}memory.current": "1050\n",
        f"{V2}memory.stat": STAT}, 3000),
    "no limit": (MACHINE | {
        f"{V2}memory.max": "max\n", f"{V2}memory.current": "1050\n",
        f"{V2}memory.stat": STAT}, 5120),
    "version 1": (MACHINE | {
        f"{V1}memory.limit_in_bytes": "2000\n", f"{V1}memory.usage_in_bytes": "1400\n",
        f"{V1}memory.stat": STAT + TOTAL}, 1000),
    "nothing left": (MACHINE | {
        f"{V1}memory.limit_in_bytes": "2000\n", f"{V1}memory.usage_in_bytes": "2600\n",
        f"{V1}memory.stat": STAT + TOTAL}, 0),
    "more than the machine": (MACHINE | {
        f"{V1}memory.limit_in_bytes": f"{2**63}\n", f"{V1}memory.usage_in_bytes": "2600\n",
        f"{V1}memory.stat": STAT}, 5120),
}  # fmt: skip


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize("ranks", [None, "2"])
def test_free_memory(monkeypatch, tmp_path, system, ranks):
    """kB read as bytes; a container's limit overlooked, and a cache the size of the machine's
    memory asked for in it; two ranks that take half each, of the same memory; a file that has been
    read taken for memory that is lost."""
    files, free = SYSTEMS[system]
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if ranks:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    cpu = torch.device("cpu")
    assert free_memory(cpu, tmp_path) == free // int(ranks or 1)
    assert 2**20 < free_memory(cpu) < 2**50
    assert 2**20 < free_memory(cpu, tmp_path / "a system without /proc") < 2**50
    old = tmp_path / "old" / "proc" / "meminfo"  # without the line, this was an IndexError
    old.parent.mkdir(parents=True)
    old.write_text("MemFree: 5 kB\n")
    assert 2**20 < free_memory(cpu, tmp_path / "old") < 2**50


@pytest.mark.parametrize(
    ("seqs", "guesses", "budget"), [(4, 0, 3), (0, 0, 3), (4, 4, 19), (1, -1, 8), (1, 65, 10**6)]
)
def test_a_budget_below_the_number_of_sequences_is_refused(seqs, guesses, budget):
    """With fewer tokens than sequences, and guesses after each, somebody waits at each step."""
    with pytest.raises(ValueError, match=r"max_num_|speculate"):
        engine(max_num_seqs=seqs, speculate=guesses, max_num_batched_tokens=budget)
    check(engine(max_num_batched_tokens=4), *((WORDS[9 * i :][:5], params(3)) for i in range(4)))


# --- n > 1 ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("length", "blocks"), [(6, (2, 4)), (8, (2, 5)), (9, (3, 5)), (1, (1, 3))])
def test_n_share_the_prompts_blocks(length, blocks):
    """The prompt held n times; a block that all write to not copied, or copied once too often, at
    a prompt that ends on a block's border (8) or within a block."""
    at, wish = engine(num_blocks=40, max_num_batched_tokens=16), params(n=3, ignore_eos=True)
    request = at.add_request(WORDS[:length], wish)
    for used in blocks:
        step(at)
        assert at.pool.num_blocks - len(at.pool.available) == used
    assert [len(sequence.tokens) for sequence in request.outputs] == [2, 2, 2]
    drain(at)
    assert at.stats["computed_tokens"] == length + 3 * (6 - 1)
    assert_same(request, alone(at, WORDS[:length], wish))


def test_n_without_a_seed_differ():
    """One random seed for all n."""
    at = engine(num_blocks=40)
    wish = params(12, seed=None, n=3, temperature=2.0, ignore_eos=True)
    request = at.add_request(WORDS[:6], wish)
    drain(at)
    assert len({tuple(sequence.output_ids) for sequence in request.outputs}) == 3


@pytest.mark.parametrize("length", [7, 8])
@pytest.mark.parametrize("seqs", [1, 2])
def test_n_above_max_num_seqs(seqs, length):
    """More continuations than may run at once: they were never begun, or ran all the same."""
    at = engine(num_blocks=7, max_num_seqs=seqs, max_num_batched_tokens=3)
    check(at, (WORDS[30:34], params()), (WORDS[:length], params(n=5, ignore_eos=True)))


def test_n_that_end_with_the_first_token():
    """A fork that ends at once is retired at once, and its sibling goes on; aborted, only what has
    not ended is."""
    free = params(5, n=3, temperature=2.0, ignore_eos=True)
    firsts = [sequence.output_ids[0] for sequence in alone(engine(), WORDS[:6], free)]
    wish, ends = replace(free, stop_token_ids=(firsts[0],)), []
    for aborted in (False, True):
        at = engine(num_blocks=40)
        request = at.add_request(WORDS[:6], wish)
        assert step(at) == [request] and not request.finished
        assert len(at.running) == 3 - firsts.count(firsts[0]) > 0
        at.abort(request) if aborted else drain(at)
        assert_empty(at)
        ends.append([sequence.finish_reason for sequence in request.outputs])
        if not aborted:
            assert_same(request, alone(at, WORDS[:6], wish))
    assert ends[1] == ["stop" if token == firsts[0] else "abort" for token in firsts]


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
    for _ in range(2):
        at.abort(gone)
        audit(at)
        assert gone.finished and not any(s.request is gone for s in at.queue)
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


# --- Logits that are no numbers -------------------------------------------------------------------

BAD = 31  # what the models below turn into numbers that are none


def poisoned(model, value):
    """After BAD all is `value`, or NaN if that is finite: in the logits and in the cache."""
    model = copy.deepcopy(model)
    model.embed_tokens.register_forward_hook(
        lambda module, args, y: y.masked_fill((args[0] == BAD)[..., None], value)
    )
    return model


GOOD = [[i for i in WORDS if i != BAD][at:][:length] for at, length in ((0, 9), (20, 3), (9, 14))]
AVOID = {"logit_bias": {BAD: -100}, "ignore_eos": True}


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("guess", [None, "near", "itself"])
@pytest.mark.parametrize(
    ("ids", "wish"),
    [
        ([BAD, *GOOD[0]], {}),  # in the first chunk of a prompt
        ([*GOOD[0][:8], BAD], {"n": 3}),  # in the last, after blocks that another one shares
        (GOOD[0], {"logit_bias": {BAD: 100}}),  # while it runs
        (GOOD[2], {"logit_bias": {BAD: 6}, "temperature": 2.0, "n": 3}),  # in one of three or so
    ],
)
def test_nan_ends_its_own_request_alone(value, guess, ids, wish):
    """It took all others with it, by an id outside the vocabulary; and then those that came after
    it, as its keys and values stayed in the memory, where what is masked is multiplied by 0."""
    model, draft = poisoned(MODEL, value), DRAFTS.get(guess)
    given = {"draft": draft and poisoned(draft, value), "speculate": 2 if guess else 0}
    at = engine(model, max_num_batched_tokens=12, num_blocks=12, max_num_seqs=3, **given)
    bad = at.add_request(ids, params(8, **{**AVOID, **wish}))
    jobs = [(each, params(5, **AVOID)) for each in GOOD]
    requests = [at.add_request(*job) for job in jobs]
    drain(at)
    reasons = [sequence.finish_reason for sequence in bad.outputs]
    assert "error" in reasons and {*reasons} <= {"error", "length"}
    for sequence in bad.outputs:  # what came before it is right
        assert all(math.isfinite(token.logprob) for token in sequence.tokens)
        assert BAD not in sequence.ids[:-1] or sequence.finish_reason == "error"
    requests += [at.add_request(*job) for job in jobs * 3]  # every block is used again
    drain(at)
    for request, job in zip(requests, jobs * 4, strict=True):
        assert_same(request, guessed(MODEL, *job, draft, 2) if guess else alone(engine(), *job))


def test_nan_in_the_block_that_came_first():
    """Tables were filled up with block 0, which here is that of a neighbour whose token is BAD."""
    at = engine(poisoned(MODEL, math.nan), max_num_batched_tokens=20)
    bad = at.add_request(GOOD[1][:2], params(**AVOID | {"logit_bias": {BAD: 100}}))
    jobs = [(ids, params(**AVOID)) for ids in GOOD[:2]]
    requests = [at.add_request(*job) for job in jobs]
    drain(at)
    assert bad.outputs[0].finish_reason == "error"
    for request, job in zip(requests, jobs, strict=True):
        assert_same(request, alone(engine(), *job))


@pytest.mark.parametrize("guess", [None, "near"])
@pytest.mark.parametrize("at_once", [True, False], ids=["prompt", "output"])
def test_what_failed_harms_nobody_who_gets_its_blocks(guess, at_once):
    """NaN that stayed in a block, or in the part of it that was not written again: the next
    sequence that got the block saw it behind its own keys, and ended with an error."""
    draft, k = (poisoned(DRAFTS[guess], math.nan), 2) if guess else (None, 0)
    at = engine(poisoned(MODEL, math.nan), draft=draft, speculate=k, num_blocks=4, max_num_seqs=2)
    tail, bias = ([BAD], {}) if at_once else ([], {"logit_bias": {BAD: 100}})
    bad = at.add_request(GOOD[0] + tail, params(**AVOID | bias))
    drain(at)
    assert bad.outputs[0].finish_reason == "error"
    left = [block for block in range(4) if block not in at.pool.cached]
    for runner in (at.runner, *at.proposer.runners):
        for pool in runner.kv:
            pool[:, left] = math.nan
    for ids in (GOOD[1], GOOD[0], GOOD[2][:12]):
        wish = params(3, **AVOID)
        request = at.add_request(ids, wish)
        drain(at)
        want = guessed(MODEL, ids, wish, DRAFTS[guess], k) if guess else alone(engine(), ids, wish)
        assert_same(request, want)


def test_nan_of_the_draft_alone():
    """The target is sound: nothing is lost, and later guesses are as good as before."""
    draft = poisoned(MODEL, math.nan)
    at = engine(num_blocks=12, draft=draft, speculate=2, max_num_batched_tokens=12)
    jobs = [(ids, params(6, temperature=0, **AVOID)) for ids in ([BAD, *GOOD[0]], *GOOD * 2)]
    check(at, *jobs)
    at.proposer.offered, at.proposer.accepted = [0, 0], [0, 0]
    check(at, *jobs[1:])
    assert at.proposer.accepted == at.proposer.offered != [0, 0]


class Mistaken(Guesser):
    """Guesses what cannot be run, for the texts that begin with 7."""

    def propose(self, jobs):
        for job in jobs:
            ids = [8, BAD, 8][: job.num_guesses if job.ids[0] == 7 else 0]
            job.guess = Guess(ids, [1.0] * len(ids))


def poisoned_logits(model):
    """After BAD the logits are NaN, and those alone."""
    model, bad = copy.deepcopy(model), []
    model.embed_tokens.register_forward_hook(lambda module, args, y: bad.append(args[0] == BAD))
    model.layers[-1].register_forward_hook(
        lambda module, args, y: y.masked_fill(bad[-1][..., None], math.nan)
    )
    return model


@pytest.mark.parametrize(
    "model", [poisoned(MODEL, math.nan), poisoned_logits(MODEL)], ids=["cache", "logits"]
)
@pytest.mark.parametrize("temperature", [0, 1.0])
def test_a_guess_that_is_nan_harms_no_other(model, temperature):
    """It ended the neighbours' requests too; or its keys and values stayed in the block, and spoilt
    what stood before them."""
    at = engine(model, num_blocks=40, speculate=3, max_num_batched_tokens=32)
    at.proposer = Mistaken(3)
    bad = at.add_request([7, 1, 2], params(9, n=2, **AVOID))
    jobs = [(ids, params(9, temperature=temperature, n=2, **AVOID)) for ids in GOOD]
    requests = [at.add_request(*job) for job in jobs]
    drain(at)
    assert [job.finish_reason for job in bad.outputs] == ["error"] * 2
    requests += [at.add_request(*job) for job in jobs * 3]  # every block is used again
    drain(at)
    for request, job in zip(requests, jobs * 4, strict=True):
        assert_same(request, alone(engine(), *job))


@pytest.mark.parametrize("blocks", [6, 7, 8])
@pytest.mark.parametrize(
    "first", [(GOOD[1], params(20, temperature=0, **AVOID)),
              (GOOD[0][:7], params(5, temperature=0, n=3, **AVOID))], ids=["writes", "copies"],
)  # fmt: skip
def test_what_the_draft_spoilt_is_wiped_for_who_takes_it_in_the_same_step(first, blocks):
    """The last in line is preempted, and others take its blocks at once: wiped after that, they
    lost what had been written or copied there."""
    given = {"num_blocks": blocks, "max_num_batched_tokens": 12, "speculate": 2}
    at = engine(draft=poisoned(MODEL, math.nan), **given)
    last = [BAD, *GOOD[1]], params(20, temperature=0, **AVOID)
    requests = [at.add_request(*last, priority=1)]
    for _ in range(4):
        step(at)
    requests.append(at.add_request(*first))
    drain(at)
    assert at.stats["num_preemptions"] > 0
    for request, job in zip(requests, (last, first), strict=True):
        assert_same(request, alone(at, *job))


@pytest.mark.parametrize(("budget", "times"), [(3, 1), (7, 1), (40, 1), (40, 3)])
def test_who_breaks_the_draft_gets_no_more_guesses(budget, times):
    """Wiped while it was used, what a draft had seen before it broke, or what was found in the
    prefix cache, was another each time; and so were its guesses, and a seed's tokens."""
    given = {"num_blocks": 40, "max_num_seqs": 1, "max_num_batched_tokens": budget}
    at = engine(draft=poisoned(MODEL, math.nan), speculate=2, **given)
    for _ in range(times):
        check(at, ([*GOOD[0][:6], BAD, *GOOD[2]], params(16, **AVOID)))
    assert at.proposer.offered[0] == 0


def test_nothing_is_left_after_a_reset():
    """A step that fails may have written anything to the blocks in use; and NaN that was about to
    be wiped stayed."""
    at = engine(poisoned(MODEL, math.nan), num_blocks=12, max_num_batched_tokens=16)
    at.add_request([*GOOD[0][:3], BAD], params())
    at.add_request([*GOOD[0], *GOOD[0]], params())
    step(at)
    used = [block for block, refs in enumerate(at.pool.refs) if refs]
    assert len(at.running) == 1 and 0 < len(used) < 5
    for pool in at.runner.kv:
        pool[:, used] = math.nan
    at.reset()
    assert_empty(at)
    jobs = [(ids, params(6, **AVOID)) for ids in (GOOD[1], *GOOD)]
    requests = [at.add_request(*job) for job in jobs]
    drain(at)
    for request, job in zip(requests, jobs, strict=True):
        assert_same(request, alone(engine(), *job))


# --- What each gets -------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [4, 40])
def test_logprobs_are_those_of_a_plain_forward(budget):
    """Off by one, of the wrong row, or of the wrong text where the prefix was cached."""
    at, ids = engine(num_blocks=40, max_num_batched_tokens=budget), WORDS[:13]
    other = at.add_request(WORDS[30:33], params(40, ignore_eos=True))
    step(at)
    for _ in range(2):  # the second time all of the prompt's blocks could be found
        request = at.add_request(ids, params(5, logprobs=3, n=2, ignore_eos=True))
        while not request.finished:
            step(at)
        for s in request.outputs:
            logits = MODEL(torch.tensor([s.ids]), torch.arange(len(s.ids))[None])[0]
            for token, line in zip(s.tokens, logits.log_softmax(-1)[12:-1], strict=True):
                assert token.logprob == pytest.approx(line[token.id].item(), abs=1e-4)
                best = line.topk(3)
                assert [i for i, _ in token.top] == best.indices.tolist()
                assert [x for _, x in token.top] == pytest.approx(best.values.tolist(), abs=1e-4)
    at.abort(other)
    assert_empty(at)


@pytest.mark.parametrize("speculate", [0, 3])
@pytest.mark.parametrize("budget", [8, 40])
def test_logprobs_of_a_prompt(budget, speculate):
    """Those of a chunk's last token lost, or of all that was found in the prefix cache; those of a
    prompt that was preempted in its middle noted twice; a guess taken for a token of the prompt."""
    at = engine(num_blocks=11, max_num_seqs=2, speculate=speculate, max_num_batched_tokens=budget)
    wish = params(4, n=2, prompt_logprobs=True, ignore_eos=True)
    for length in (13, 13, 1, 2):
        ids = (WORDS[:4] * 4)[:length]
        first = at.add_request(WORDS[:20], params(20, ignore_eos=True), priority=1)
        step(at)
        request = at.add_request(ids, wish)
        drain(at)
        assert first.finished and request.outputs[0].cached == 0
        assert_prompt(request, MODEL, ids)
        if not speculate:
            assert_same(request, alone(at, ids, wish))
    plain = at.add_request(WORDS[:13], params(1))
    drain(at)
    queries = at.stats["prefix_cache_queries"]
    at.add_request(WORDS[:13], wish)
    drain(at)
    assert at.stats["prefix_cache_queries"] == queries  # nothing was looked for
    again = at.add_request(WORDS[:13], params(1, logprobs=None, prompt_logprobs=True))
    drain(at)  # an echo without log-probabilities
    assert again.outputs[0].cached == 12
    assert plain.prompt_tokens == again.prompt_tokens == []


def test_times_and_ids():
    """A time to first token that is negative, or missing for the forked ones; two requests of one
    name, or a given name not kept."""
    at = engine(max_num_seqs=2)
    ids = (None, "mine", None)
    requests = [at.add_request(WORDS[:9], params(n=2), id=name) for name in ids]
    drain(at)
    for sequence in (s for request in requests for s in request.outputs):
        assert len(sequence.times) == 1 + len(sequence.tokens)
        assert sequence.times == sorted(sequence.times)
    assert requests[1].id == "mine" and len({request.id for request in requests}) == 3


# --- LLM, and a trained model ---------------------------------------------------------------------

TEXTS = ["ROMEO:\nWhat", "JULIET:\n", "To be, or not to be, that is the question:\n", "ROMEO:\nBut"]
SAMPLED = SamplingParams(temperature=0.9, top_p=0.95, seed=3, max_tokens=20, ignore_eos=True)


@pytest.fixture(scope="module")
def bundled():
    """With a pool too small for all that the tests ask of it at once."""
    small = {"num_blocks": 12, "max_num_seqs": 6, "max_num_batched_tokens": 24}
    return LLM(DRAFT, device="cpu", dtype="float32", max_seq_len=190, **small)


@pytest.fixture
def llm(bundled):
    yield bundled
    assert_empty(bundled.engine)


def assert_alone(llm, texts, wishes, ask=None):
    """Generate, and compare each with what it gets alone."""
    requests = llm.generate(texts, wishes if ask is None else ask)
    for request, text, wish in zip(requests, texts, wishes, strict=True):
        ids = llm.engine.tokenizer.encode(text) if isinstance(text, str) else text
        assert request.outputs[0].ids[: len(ids)] == ids
        assert_same(request, alone(llm.engine, ids, wish))
    return requests


def test_generate_many_texts(llm):
    """Out of order, or mixed up with each other, in a pool that does not hold all of them."""
    before = llm.engine.stats["num_preemptions"]
    assert_alone(llm, TEXTS * 2, [SAMPLED] * 8, SAMPLED)
    assert llm.engine.stats["num_preemptions"] > before


def test_generate_takes_text_and_ids(llm):
    """A single text taken for a list of letters; parameters of the wrong prompt; or the model's
    own, which generation_config.json holds, ignored."""
    (request,) = llm.generate(TEXTS[0], SAMPLED)
    ids = [llm.engine.tokenizer.encode(text) for text in TEXTS]
    assert_same(request, alone(llm.engine, ids[0], SAMPLED))
    wishes = [replace(SAMPLED, seed=i, max_tokens=3 + i, logprobs=2) for i in range(4)]
    assert_alone(llm, ids, [*wishes[:2], replace(wishes[2], n=3), wishes[3]])
    assert llm.generate([], SAMPLED) == llm.generate([]) == []
    (request,) = llm.generate([[5] * 180])
    got = request.outputs[0].params
    assert request.finished and (got.temperature, got.top_p) == (0.8, 0.95)


@pytest.mark.parametrize(
    ("prompts", "params"),
    [
        ([[5, 6], [5000], [7]], SAMPLED), ([[5, 6], [], [7]], SAMPLED), ([[5], [1] * 500], SAMPLED),
        *((TEXTS[:2], [SAMPLED] * count) for count in (0, 1, 3)),
    ],
)  # fmt: skip
def test_what_cannot_be_run_runs_none(llm, prompts, params):
    """Half of the prompts stayed in the queue, and came out of the next call; or zip() dropped
    those that had no parameters."""
    before = llm.engine.stats["engine_steps"]
    with pytest.raises(ValueError):
        llm.generate(prompts, params)
    with pytest.raises(ValueError, match="max_tokens, not both"):  # it was ignored
        llm.generate("a", SamplingParams(), max_tokens=3)
    assert_empty(llm.engine)
    assert llm.engine.stats["engine_steps"] == before


@pytest.mark.parametrize(
    ("name", "stop_at", "error"),
    [
        *(("forward", at, KeyboardInterrupt) for at in (1, 2, 6)),
        *((name, 1, RuntimeError) for name in ("forward", "sample", "copy_blocks", "commit")),
    ],
)
def test_an_error_in_any_part_of_a_step_leaves_nothing_behind(
    llm, monkeypatch, name, stop_at, error
):
    """Sequences left in the queue or blocks still mapped after Ctrl-C, or out of memory in the
    sampler; or what a broken forward had not written was found as a prefix afterwards."""
    at, calls = llm.engine, []
    owners = {"sample": scheduler, "copy_blocks": at.runner, "commit": at.pool}
    owner = owners.get(name, at.runner.model)
    real = getattr(owner, name)

    def failing(*args):
        calls.append(args)
        if len(calls) == stop_at:
            raise error
        return real(*args)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, failing)
        with pytest.raises(error):
            llm.generate([*TEXTS, "Now is the winter"], replace(SAMPLED, n=2))
    assert_empty(at)
    assert_alone(llm, TEXTS, [SAMPLED] * 4)


@pytest.mark.parametrize(
    "stride", [41, pytest.param(7, marks=pytest.mark.slow)], ids=["fast", "slow"]
)
def test_ctrl_c_between_any_two_lines(stride):
    """A signal comes between any two lines: a block taken and not yet in a table is lost for good,
    and a request queued but not yet returned runs in the next call."""
    for stop_at in range(1, 1600, stride):
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


def test_stop_strings(llm):
    """A stop string that the batch overlooks, shows in part, or takes for a neighbour's."""
    text = alone(llm.engine, llm.engine.tokenizer.encode(TEXTS[0]), SAMPLED)[0].text
    stop = text[8:12]
    wishes = [replace(SAMPLED, stop=stop), SAMPLED, replace(SAMPLED, stop="\n")]
    requests = assert_alone(llm, [TEXTS[0]] * 3, wishes)
    assert requests[0].outputs[0].text == text[: text.index(stop)]
    assert requests[0].outputs[0].finish_reason == "stop"
    assert requests[1].outputs[0].text == text


# --- Any order of events --------------------------------------------------------------------------


def some_job(draw):
    """From few values, so that prefixes meet and the twin's results are often known already."""
    start, length = draw.choice([0, 32]), draw.choice([1, 2, 3, 5, 8, 12, 17])
    tail = [draw.randrange(1, 4)] if draw.random() < 0.5 else []
    return WORDS[start : start + length] + tail, SamplingParams(
        temperature=draw.choice([0.0, 1.0]), seed=draw.choice([1, 2]), n=draw.choice([1, 1, 2, 3]),
        max_tokens=draw.choice([1, 2, 5, 9]), logprobs=1, ignore_eos=draw.choice([False, True]),
        prompt_logprobs=draw.random() < 0.2,
    )  # fmt: skip


def run_some(at: Engine, jobs: dict, count: int):
    """Steps, each of which must return those that it made a token for, once."""
    for _ in range(count):
        made = {s: len(s.tokens) for request in jobs for s in request.outputs}
        moved = step(at)
        assert {*moved} == {s.request for s, n in made.items() if len(s.tokens) > n}
        assert len({*moved}) == len(moved)


def traffic(draw: random.Random, model: Transformer, guess: str | None) -> Engine:
    """Requests come, run and are aborted, over a pool of a few blocks."""
    k, seqs, size = (draw.randint(1, 4) if guess else 0), draw.randint(1, 4), draw.randint(1, 5)
    budget = {"max_num_seqs": seqs, "max_num_batched_tokens": seqs * (1 + k) + draw.randint(0, 9)}
    draft = DRAFTS.get(guess)
    at = engine(model, num_blocks=draw.randint(3, 50 // size), block_size=size, draft=draft,
                speculate=k, **budget)  # fmt: skip
    jobs, aborted = {}, set()
    for _ in range(20):
        ids, wish = some_job(draw)
        more = {"priority": draw.randint(-1, 1), "cache_salt": draw.choice([None, None, "s"])}
        fits, room = len(ids) < at.max_seq_len, at.max_seq_len - len(ids)  # what the pool holds
        try:
            request = at.add_request(ids, wish, **more)
            jobs[request] = ids, replace(wish, max_tokens=max(1, min(wish.max_tokens, room)))
            assert fits
        except ValueError:
            assert not fits
        run_some(at, jobs, draw.randrange(5))
        if jobs and draw.random() < 0.2:
            request = draw.choice([*jobs])
            aborted |= set() if request.finished else {request}
            at.abort(request)
            audit(at)
            assert request.finished
    drain(at)
    for request, (ids, wish) in jobs.items():
        want = guessed(model, ids, wish, draft, k) if guess else alone(at, ids, wish)
        if request not in aborted:
            assert_same(request, want)
            if wish.prompt_logprobs:
                assert_prompt(request, model, ids)
        for a, b in zip(request.outputs, want, strict=True):
            assert a.finish_reason in (b.finish_reason, "abort")
            assert a.output_ids == b.output_ids[: len(a.output_ids)]
    return at


@pytest.mark.parametrize(
    ("guess", "times"),
    [
        (None, 3), ("near", 2), ("n-gram", 2),
        *(pytest.param(*row, marks=pytest.mark.slow) for row in (
            (None, 25), ("near", 5), ("n-gram", 5), ("itself", 4), ("small", 4),
        )),
    ],
)  # fmt: skip
def test_random_traffic(guess, times):
    """Nobody is lost, starved or given another's tokens; every block is accounted for; and guesses,
    with the random numbers they use, depend on nothing but the sequence."""
    total = Counter()
    for seed in range(times):
        at = traffic(random.Random(seed), (MODEL, SLIDING)[seed % 2], guess)
        total.update(at.stats, accepted=sum(at.proposer.accepted))
    assert total["num_preemptions"] > 0 and total["prefix_cache_hits"] > 0
    assert total["accepted"] > 0 or not guess
