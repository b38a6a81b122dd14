"""Speculation: what comes out is what the model alone would give, in tokens or in chances.

Greedily the twin is generate() without guesses: same tokens, same log-probabilities. Sampled, the
chances of the first three tokens are counted, against a plain reference; and the tokens of a seed
must be those of generate() with the same guesses, whatever else runs. The paths are those of
tests/test_equivalence.py; here are the borders. The models are tiny, random and in float64.
"""

import copy
import itertools
import json
import math
import random
import re
import string
from collections import Counter
from functools import cache

import pytest
import torch
from conftest import DRAFT, SHAKESPEARE
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_sampling import Chars, chi_square, config, reference
from test_scheduler import (
    MODEL,
    SLIDING,
    WORDS,
    alone,
    assert_empty,
    assert_same,
    drain,
    engine,
    params,
    random_model,
    some_params,
    some_prompt,
    step,
)  # fmt: skip

import generate as command_line
import quantize
import sampling
import speculative
from generate import generate
from kv_cache import StaticCache
from model import load_model
from runner import Runner, compile_model
from sampling import SamplingParams, Sequence, Token, distribution, uniform
from scheduler import LLM, Engine
from speculative import ACCEPT, GUESS, DraftModel, Guess, NGram, Proposer, lookup, verify

INF = math.inf
FALSE_ALARM = 1e-6  # chance of each chi-square to fail a right verifier; seeds are fixed
BELOW_1 = math.nextafter(1, 0)

pytestmark = pytest.mark.usefixtures("one_thread")


def draft_model(draft, k: int, vocab_size: int | None = None, cache=None) -> DraftModel:
    return DraftModel(Runner(draft, cache), k, vocab_size or draft.config.vocab_size)


def noisy(model, amount: float, seed: int = 3):
    """A draft that is right now and then."""
    draft, generator = copy.deepcopy(model), torch.Generator().manual_seed(seed)
    for parameter in draft.parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter += amount * parameter.std() * noise if parameter.numel() > 1 else 0
    return draft


NEAR = noisy(MODEL, 0.1)
DRAFTS = {
    "n-gram": None,
    "itself": MODEL,
    "near": NEAR,
    "small": random_model(num_hidden_layers=1, num_attention_heads=1, head_dim=4),
}


# --- The chances of what verify gives -------------------------------------------------------------

V, K, DRAWS = 4, 2, 1200
PROMPT, FIRST = [0, 1, 2, 1, 0, 2, 0, 1, 1, 2, 2, 0], 0  # FIRST: made without guesses
SETTINGS = {
    "plain": {},
    "filters": {"temperature": 1.5, "top_k": 3, "top_p": 0.9, "min_p": 0.3},
    "penalties": {"repetition_penalty": 2.0, "presence_penalty": 1.0, "frequency_penalty": 2.0},
    "bias": {"logit_bias": {3: 1.5, 0: -1}},
    "all": {
        "temperature": 1.5, "top_k": 3, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.25,
        "presence_penalty": 0.25, "frequency_penalty": 0.25, "logit_bias": {2: 1},
    },
}  # fmt: skip
TABLE, OTHER, NOISE = torch.randn(3, V, V, generator=torch.Generator().manual_seed(2))
CYCLE, ALL_BUT = torch.eye(V).bool(), torch.eye(V).roll(1, 0).bool()
HALF = torch.tensor([True, True, False, False]).expand(V, V)
# What follows each token: logits of the model, and of the draft; None: n-grams.
TABLES = {
    "n-gram": (TABLE, None),
    "n-gram, impossible": (TABLE.masked_fill(ALL_BUT, -INF), None),
    "near": (TABLE, TABLE + NOISE / 2),
    "far": (TABLE, 2 * OTHER),
    "itself": (TABLE, TABLE),
    "wide": (TABLE.masked_fill(ALL_BUT, -INF), OTHER),  # guesses what cannot be
    "narrow": (TABLE, OTHER.masked_fill(CYCLE, -INF)),  # never guesses what can
    "apart": (TABLE.masked_fill(HALF, -INF), OTHER.masked_fill(~HALF, -INF)),  # never right
    "sure": (TABLE, 90 * OTHER),
}


class Table:
    """A runner whose logits are the row of the last token."""

    def __init__(self, logits) -> None:
        self.logits = logits

    def __call__(self, rows, tokens, select):
        return self.logits[[tokens[i] for i in select]]


def play(guess: str, n: int = 3, **wish) -> list[tuple[int, ...]]:
    """Make n tokens for each of DRAWS consecutive seeds; side by side, as the scheduler does."""
    table, draft = TABLES[guess]
    proposer = NGram(K) if draft is None else draft_model(MODEL, K)
    proposer.runner = Table(draft)
    params, small = SamplingParams(max_tokens=32, **wish), config(V)
    sequences = [Sequence(PROMPT, params, small) for _ in range(DRAWS)]
    for seed, sequence in enumerate(sequences):
        sequence.seed = seed
        sequence.append(Token(FIRST))
    while live := [s for s in sequences if len(s.tokens) <= n]:
        ends = [len(s.ids) for s in live]
        rows = [speculative.Row([], end - 1, end) for end in ends]
        guesses = proposer.propose(live, rows, [proposer.count(s) for s in live])
        ids = [i for s, g in zip(live, guesses, strict=True) for i in (s.ids[-1], *g.ids)]
        for s, tokens in zip(live, proposer.verify(table[ids], live, guesses), strict=True):
            for token in tokens:
                s.append(token)
    assert proposer.steps > 0
    return [tuple(s.output_ids[1 : n + 1]) for s in sequences]


@cache
def chances(guess: str, name: str, n: int) -> dict[tuple[int, ...], float]:
    """Of each n tokens that can come, by the reference of test_sampling."""
    if n == 0:
        return {(): 1.0}
    table, wish, found = TABLES[guess][0], SamplingParams(**SETTINGS[name]), {}
    for before, chance in chances(guess, name, n - 1).items():
        output = [FIRST, *before]
        probs, sure, border = reference(table[output[-1]].tolist(), wish, PROMPT, output)
        assert not {i for i in border if probs[i] > 0}, "choose settings that leave no doubt"
        total = sum(probs[i] for i in sure)
        found |= {(*before, i): chance * probs[i] / total for i in sure if probs[i] > 0}
    return found


def fit(drawn: list[tuple[int, ...]], expected: dict[tuple[int, ...], float]) -> float:
    """Chance of counts as far from what is expected; what is rare is counted together."""
    counts, rare = Counter(drawn), [0, 0.0]
    assert counts.keys() <= expected.keys(), "drew an impossible token"
    cells = []
    for key, p in sorted(expected.items(), key=lambda item: -item[1]):
        if p * len(drawn) >= 20:
            cells.append((counts[key], p))
        else:
            rare = [rare[0] + counts[key], rare[1] + p]
    if rare[1] * len(drawn) >= 5:
        cells.append(tuple(rare))
    elif rare[1]:
        cells[-1] = (cells[-1][0] + rare[0], cells[-1][1] + rare[1])
    return chi_square(*zip(*cells, strict=True))


def assert_fit(guess: str, name: str) -> None:
    drawn = play(guess, **SETTINGS[name])
    for n in (1, 2, 3):  # all of what K guesses can make, with each token's dependence on the last
        assert fit([ids[:n] for ids in drawn], chances(guess, name, n)) > FALSE_ALARM, n


@pytest.mark.parametrize(
    ("guess", "name"),
    [
        *((guess, "plain") for guess in TABLES),
        *(
            (guess, name)
            for guess in ("far", "n-gram")
            for name in ("filters", "penalties", "bias")
        ),
        ("far", "all"),
    ],
)
def test_tokens_have_the_right_chances(guess, name):
    """Bug: guesses shift the distribution: of one token, or of one given those before it. False
    alarm: 1e-6 for each of three counts."""
    assert_fit(guess, name)


def pick(p: list[float], u: float) -> int:
    """The first id at which the sums of p pass u, p need not be normalised."""
    sums = list(itertools.accumulate(p))
    return next(i for i, s in enumerate(sums) if s > u * sums[-1])


def slow_verify(
    logits, sequences, guesses,
    accept=lambda p, q, x, u: u * q[x] < p[x],
    rest=lambda p, q, x: [max(0.0, a - b) for a, b in zip(p, q, strict=True)],
    number=lambda seed, i: uniform(seed, ACCEPT + i),
    last=lambda seed, i: uniform(seed, i),
    ahead=lambda s, ids: s.ahead(ids),
    go_on=False,
):  # fmt: skip
    """The definition, guess after guess, each step of which can be replaced by a wrong one."""
    results, at = [], 0
    pairs = [*zip(sequences, guesses, strict=True)]
    rows = [ahead(s, g.ids[:i]) for s, g in pairs for i in range(len(g.ids) + 1)]
    probs = distribution(logits, rows).tolist()
    for s, guess in pairs:
        ids, index = [], len(s.output_ids)
        for i in range(len(guess.ids) + 1):
            p = probs[at + i]
            if i < len(guess.ids):
                x = guess.ids[i]
                q = guess.probs[i].tolist() if guess.probs else [float(j == x) for j in range(V)]
                if accept(p, q, x, number(s.seed, index + i)):
                    ids.append(x)
                    continue
                left = rest(p, q, x)
                p = left if sum(left) > 0 else p
            ids.append(pick(p, last(s.seed, index + i)))
            if not go_on:
                break
        results.append([Token(i) for i in ids])
        at += len(guess.ids) + 1
    return results


FLAWS = {
    "accepts all": ("near", "plain", {"accept": lambda p, q, x, u: True}),
    "accepts what is possible": ("wide", "plain", {"accept": lambda p, q, x, u: p[x] > 0}),
    "accepts a likely one": ("far", "plain", {"accept": lambda p, q, x, u: q[x] <= p[x]}),
    "refuses all": ("far", "plain", {"accept": lambda p, q, x, u: False}),
    "ignores q": ("far", "plain", {"accept": lambda p, q, x, u: u < p[x]}),
    "ignores q of n-grams": ("n-gram", "plain", {"accept": lambda p, q, x, u: u < p[x] ** 0.8}),
    "p and q swapped": ("far", "plain", {"accept": lambda p, q, x, u: u * p[x] < q[x]}),
    "rest is p": ("far", "plain", {"rest": lambda p, q, x: p}),
    "rest of an n-gram is p": ("n-gram", "plain", {"rest": lambda p, q, x: p}),
    "rest is p without x": (
        "far", "plain", {"rest": lambda p, q, x: [a * (i != x) for i, a in enumerate(p)]},
    ),
    "rest is |p - q|": (
        "far", "plain", {"rest": lambda p, q, x: [abs(a - b) for a, b in zip(p, q, strict=True)]},
    ),
    "rest is q": ("far", "plain", {"rest": lambda p, q, x: q}),
    "rest is its likeliest": (
        "far", "plain",
        {"rest": lambda p, q, x: [float(i == p.index(max(p))) for i in range(V)]},
    ),
    "the guess's number again": ("near", "plain", {"number": lambda s, i: uniform(s, GUESS + i)}),
    "one number to accept and draw": ("near", "plain", {"number": uniform}),
    "one number for all guesses": ("near", "plain", {"number": lambda s, i: uniform(s, ACCEPT)}),
    "the draw's number is the next guess's": (
        "near", "plain", {"last": lambda s, i: uniform(s, GUESS + i + 1)},
    ),
    "no seed": ("near", "plain", {"number": lambda s, i: uniform(0, ACCEPT + i)}),
    "blind to the guesses": ("far", "penalties", {"ahead": lambda s, ids: s.ahead([])}),
    "blind to the last guess": (
        "near", "penalties", {"ahead": lambda s, ids: s.ahead(ids[:-1])},
    ),
    "goes on after a refusal": ("far", "plain", {"go_on": True}),
}  # fmt: skip


@pytest.mark.parametrize("flaw", [None, *FLAWS, "the token's number to guess", "greedy guesses"])
def test_chances_catch_a_broken_verifier(flaw, monkeypatch):
    """Bug: a test of chances that could not fail."""
    guess, name, flaws = FLAWS.get(flaw, ("far", "plain", {}))
    if flaw in FLAWS or flaw is None:
        slow = lambda *args: slow_verify(*args, **flaws)  # noqa: E731
        monkeypatch.setattr(speculative, "verify", slow)
    elif flaw == "greedy guesses":  # whose q is not 1
        monkeypatch.setattr(speculative, "draw", lambda p, u: p.argmax(-1))
    else:
        monkeypatch.setattr(speculative, "GUESS", 0)
    if flaw is None:
        assert_fit(guess, name)
    else:
        with pytest.raises(AssertionError, match=r"impossible|> 1e-06"):
            assert_fit(guess, name)


# --- verify by example, and against its slow twin -------------------------------------------------


def started(V: int, seed: int = 0, prompt=(1,), output=(2,), **wish) -> Sequence:
    sequence = Sequence([*prompt], SamplingParams(seed=seed, max_tokens=99, **wish), config(V))
    for i in output:
        sequence.append(Token(i))
    return sequence


def drawn_guess(probs: list[torch.Tensor], ids: list[int]) -> Guess:
    return Guess(ids, [p[i].item() for p, i in zip(probs, ids, strict=True)], probs)


def random_batch(draw: random.Random):
    """Sequences of all kinds with guesses of all kinds, and the logits for them."""
    some = {"greedy": {"temperature": 0}, **SETTINGS}
    sequences, guesses = [], []
    for _ in range(draw.randint(1, 5)):
        output = draw.choices(range(V), k=draw.randint(1, 4))
        wish = some[draw.choice([*some])] | {"logprobs": draw.choice([None, 0, 2])}
        sequences.append(started(V, draw.randrange(2**40), PROMPT, output, **wish))
        ids = draw.choices(range(V), k=draw.choice([0, 1, 2, 4]))
        guesses.append(Guess(ids, [1.0] * len(ids)))
        if draw.random() < 0.7:
            seed = draw.randrange(2**40)
            probs = torch.randn(len(ids), V, generator=torch.Generator().manual_seed(seed))
            guesses[-1] = drawn_guess([*(2 * probs).softmax(-1)], ids)
    return sequences, guesses, torch.randn(sum(len(g.ids) + 1 for g in guesses), V) * 2


def test_verify_equals_its_slow_twin():
    """Bug: a row's guesses, numbers, settings or log-probabilities are those of its neighbour."""
    lengths = Counter()
    for seed in range(300):
        sequences, guesses, logits = random_batch(random.Random(seed))
        state = [str(vars(s)) for s in sequences], str(guesses), logits.clone()
        got = verify(logits, sequences, guesses)
        want = slow_verify(logits, sequences, guesses)
        assert [[t.id for t in line] for line in got] == [[t.id for t in line] for line in want]
        assert state[:2] == ([str(vars(s)) for s in sequences], str(guesses))
        assert torch.equal(logits, state[2])
        at = 0
        for s, guess, line in zip(sequences, guesses, got, strict=True):
            lengths[len(guess.ids), len(line)] += 1
            for token, row in zip(line, logits[at:].log_softmax(-1)):
                n = s.params.logprobs
                assert token.logprob == (None if n is None else pytest.approx(row[token.id].item()))
                assert [i for i, _ in token.top] == row.topk(n or 0)[1].tolist()
            at += len(guess.ids) + 1
    assert {(k, n) for k in (0, 1, 2, 4) for n in range(1, k + 2)} == lengths.keys()


def test_the_example_of_verify():
    """Bug: the docstring lies. p = [0.5, 0.5, 0], q = [0.8, 0, 0.2]. False alarm: 1e-6."""
    p, q = torch.tensor([0.5, 0.5, 0]), torch.tensor([0.8, 0, 0.2])
    logits = p.log().expand(2, -1)
    assert verify(logits, [started(3)], [drawn_guess([q], [2])])[0] == [Token(1)]
    results = Counter()
    for seed in range(2000):
        (tokens,) = verify(logits, [started(3, seed)], [drawn_guess([q], [0])])
        results[tokens[0].id, len(tokens)] += 1
    assert results.keys() == {(0, 2), (1, 1)}
    assert chi_square([results[0, 2], results[1, 1]], [0.625, 0.375]) > FALSE_ALARM


def test_an_equal_distribution_is_always_accepted(monkeypatch):
    """Bug: u <= p / q or a rounded quotient refuses what is exactly as likely; all of a perfect
    draft's guesses are kept."""
    for u in (0.0, 0.5, BELOW_1):
        monkeypatch.setattr(sampling, "uniform", lambda seed, index, u=u: u)
        for seed in range(200):
            logits = torch.randn(3, 7, generator=torch.Generator().manual_seed(seed)) * 3
            s = started(7, temperature=0.8)
            q = distribution(logits[:2], [s.ahead([]), s.ahead([1])])
            ids = [seed % 7, seed // 7 % 7]
            (tokens,) = verify(logits, [s], [drawn_guess([*q], ids)])
            assert [t.id for t in tokens[:2]] == ids


@pytest.mark.parametrize("u", [0.0, 2**-60, 0.5, 1 - 2**-24, BELOW_1])
@pytest.mark.parametrize("V", [2, 7, 5000])
def test_no_impossible_id_comes_out(V, u, monkeypatch):
    """Bug: rounding leaves nothing of p - q, and the id is V (GHSA-8wr5-jm2h-8r4f); a refused
    guess, or one that a filter has removed, comes out all the same."""
    monkeypatch.setattr(sampling, "uniform", lambda seed, index: u)
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        logits = torch.randn(2, V, generator=generator) * 4
        logits[:, seed % V] = -INF
        s = started(V, top_k=(0, 1, V // 2)[seed % 3], temperature=(0.1, 1)[seed % 2])
        p = distribution(logits, [s.ahead([])] * 2)[0]
        for x in {int(p.argmax()), int(p.argmin()), V - 1, 0}:
            up, sure = p.clone(), torch.zeros(V)
            up[x] = torch.nextafter(up[x], torch.tensor(2.0))  # all that p lacks of q, and no more
            sure[x] = 1
            far = torch.rand(V, generator=generator).softmax(-1)
            noise = p * (1 + 1e-7 * torch.randn(V, generator=generator))
            guesses = [drawn_guess([q], [x]) for q in (p, up, sure, far, noise)]
            for guess in (*guesses, Guess([x], [1.0])):
                (tokens,) = verify(logits, [s], [guess])
                assert 0 <= tokens[0].id < V
                assert p[tokens[0].id] > 0


def test_a_guess_of_chance_0_is_refused(monkeypatch):
    """Bug: u = 0 accepts what cannot be: 0 <= 0."""
    monkeypatch.setattr(sampling, "uniform", lambda seed, index: 0.0)
    logits = torch.tensor([[0.0, -INF, 1.0]]).expand(2, -1)
    for guess in (Guess([1], [1.0]), drawn_guess([torch.tensor([0.5, 0.5, 0])], [1])):
        assert [t.id for t in verify(logits, [started(3)], [guess])[0]] == [2 if guess.probs else 0]


# --- The chances end to end -----------------------------------------------------------------------


@pytest.mark.parametrize("guess", ["near", "n-gram"])
def test_chances_through_the_engine(guess):
    """Bug: guesses and logits are brought together at the wrong row or position, which leaves
    greedy tokens as they are. False alarm: 1e-6 for each of three counts."""
    model = random_model(vocab_size=V, max_position_embeddings=32)
    draft = noisy(model, 0.3) if guess == "near" else None
    options = {"max_num_seqs": 128, "max_num_batched_tokens": 512, "speculate": 3}
    at = engine(model, num_blocks=600, draft=draft, **options)
    wish = {"temperature": 2.5, "max_tokens": 5, "ignore_eos": True, "frequency_penalty": 0.5}
    requests = [at.add_request(PROMPT, SamplingParams(n=128, seed=128 * i, **wish))
                for i in range(16)]  # fmt: skip
    drain(at)
    assert 0 < sum(at.proposer.accepted) < sum(at.proposer.offered)
    drawn = [s.output_ids for request in requests for s in request.outputs]
    expected: dict[tuple[int, ...], float] = {(): 1.0}
    one = SamplingParams(**wish)
    for n in (1, 2, 3, 4):
        longer = {}
        for before, chance in expected.items():
            ids = torch.tensor([[*PROMPT, *before]])
            logits = model(ids, torch.arange(ids.shape[1])[None])
            probs, *_ = reference(logits[0, -1].tolist(), one, PROMPT, [*before])
            longer |= {(*before, i): chance * p for i, p in enumerate(probs)}
        expected = longer
        assert fit([tuple(ids[:n]) for ids in drawn], expected) > FALSE_ALARM


# --- The same tokens, whatever else runs ----------------------------------------------------------


def guessed(at: Engine, ids, wish: SamplingParams, draft, k: int, chunk=512) -> list[Sequence]:
    """Each of the n sequences by itself: generate(), with caches of its own."""
    model, results = at.runner.model, []
    for each in wish.split():
        sequence = Sequence(ids, each, at.config, at.tokenizer, at.max_seq_len)
        cache, own = (
            m and StaticCache(m.config, 1, sequence.max_len, torch.float64) for m in (model, draft)
        )
        proposer = draft_model(draft, k, cache=own) if draft else NGram(k)
        list(generate(model, sequence, cache, chunk, proposer))
        results.append(sequence)
    return results


@pytest.mark.parametrize("guess", DRAFTS)
@pytest.mark.parametrize("k", [1, 3, 4])
def test_random_traffic(k, guess):
    """Bug: a seed's tokens depend on neighbours, chunks, preemption or what is cached; a block is
    lost; somebody waits for ever."""
    draw, draft, pending = random.Random(k), DRAFTS[guess], []
    at = engine(
        num_blocks=draw.randint(13, 15), block_size=2, max_num_seqs=3, draft=draft, speculate=k,
        max_num_batched_tokens=3 * (k + 1) + draw.randint(0, 3),
    )  # fmt: skip
    for seed in range(20):
        ids, wish = some_prompt(draw), some_params(draw)
        wish = sampling.replace(wish, seed=10 * seed)
        request = at.add_request(ids, wish, None, draw.randint(-1, 1))
        pending.append((request, ids, wish))
        for _ in range(draw.randrange(5)):
            step(at)
        if draw.random() < 0.15:
            at.abort(pending.pop(draw.randrange(len(pending)))[0])
    drain(at)
    assert at.stats.preemptions > 0 and at.stats.cached_tokens > 0
    assert 0 < sum(at.proposer.accepted) <= sum(at.proposer.offered)
    for request, ids, wish in pending:
        assert_same(request, guessed(at, ids, wish, draft, k))
        if wish.temperature == 0:
            assert_same(request, alone(at, ids, wish))


@pytest.mark.parametrize("chunk", [1, 2, 5, 6, 64])
@pytest.mark.parametrize("guess", DRAFTS)
def test_chunks_of_a_prompt_change_nothing(guess, chunk):
    """Bug: the draft falls behind, or starts in the wrong place, where a prompt comes in chunks."""
    at, draft, ids = engine(), DRAFTS[guess], WORDS[:11]
    for wish in (params(9, temperature=0, prompt_logprobs=1), params(9, seed=3)):
        (want,), (got,) = guessed(at, ids, wish, draft, 4), guessed(at, ids, wish, draft, 4, chunk)
        assert got.output_ids == want.output_ids
        if wish.temperature == 0:
            assert_same(at_request(got), alone(at, ids, wish))


def at_request(sequence: Sequence):
    return type("Request", (), {"outputs": [sequence]})


@pytest.mark.parametrize("wish", [{"temperature": 0}, {"temperature": 1.0}])
@pytest.mark.parametrize("model", [MODEL, SLIDING], ids=["full", "sliding"])
def test_a_perfect_draft_is_never_refused(model, wish):
    """Bug: what the draft has seen is not what the model has: a token skipped where all guesses
    were accepted, a block not copied at a fork, a slot of another. No token shows it."""
    at = engine(model, num_blocks=13, block_size=4, max_num_batched_tokens=20, draft=model,
                speculate=4)  # fmt: skip
    shared = WORDS[:6]
    for n, ids in ((3, shared), (1, [*shared, 3]), (1, WORDS[20:37]), (2, shared), (1, WORDS[:1])):
        at.add_request(ids, params(17, n=n, ignore_eos=True, **wish))
        for _ in range(3):
            step(at)
    drain(at)
    assert at.stats.preemptions > 0 and at.stats.cached_tokens > 0
    assert at.proposer.accepted == at.proposer.offered
    sequence = Sequence(WORDS[:11], params(40, ignore_eos=True, **wish), model.config)
    caches = [StaticCache(model.config, 1, sequence.max_len, torch.float64) for _ in "ab"]
    proposer = draft_model(model, 5, cache=caches[0])
    list(generate(model, sequence, caches[1], 4, proposer))
    assert proposer.accepted == proposer.offered
    # The first alone; five and one more each time; as many as there is room for.
    assert proposer.offered == [7, 7, 6, 6, 6]


def test_a_cached_block_is_whole_for_the_draft_too():
    """Bug: the last token of a run that was accepted whole is not in the draft's cache yet. Where
    a sequence ends there, and that token is the last of a block, the block is found by others; the
    blocks that a second sequence of the same text has put behind it, too: nobody fills the gap, and
    the tokens of a seed depend on what ran before."""
    wish = params(20, seed=5, ignore_eos=True)
    for short in range(2, 12):
        at = engine(num_blocks=60, max_num_batched_tokens=80, draft=MODEL, speculate=4)
        both = [at.add_request(WORDS[:5], params(n, ignore_eos=True)) for n in (short, 30)]
        drain(at)
        ids = both[1].outputs[0].ids[:-1]
        request = at.add_request(ids, wish)
        drain(at)
        assert at.stats.cached_tokens > 20
        assert at.proposer.accepted == at.proposer.offered
        assert_same(request, guessed(at, ids, wish, MODEL, 4))


def test_the_drafts_settings_are_the_sequences():
    """Bug: the draft guesses by other settings than the model draws by, so that a perfect one is
    refused."""
    for wish in SETTINGS.values():
        sequence = started(32, 7, WORDS[:9], WORDS[9:12], **wish)
        caches = [StaticCache(MODEL.config, 1, 99, torch.float64) for _ in "ab"]
        proposer = draft_model(MODEL, 3, cache=caches[0])
        list(itertools.islice(generate(MODEL, sequence, caches[1], proposer=proposer), 20))
        assert proposer.accepted == proposer.offered and proposer.offered[2] > 3


# --- Where it ends --------------------------------------------------------------------------------


def both_ways(model, ids, wish, guess="itself", k=4, tokenizer=None, max_seq_len=None):
    """The result of generate() and of the engine, with guesses; and without."""
    draft = model if guess == "itself" else DRAFTS[guess]
    at = engine(model, num_blocks=40, max_num_batched_tokens=40, tokenizer=tokenizer,
                max_seq_len=max_seq_len, draft=draft, speculate=k)  # fmt: skip
    request = at.add_request(ids, wish)
    drain(at)
    assert at.stats.output_tokens == sum(len(s.output_ids) for s in request.outputs)
    by_itself = guessed(at, ids, wish, draft, k)
    return [request, at_request(*by_itself)], alone(at, ids, wish)


IDS = WORDS[:5]
TEXT, PREFIX = (
    alone(engine(), ids, params(24, temperature=0, ignore_eos=True))[0].output_ids
    for ids in (IDS, IDS[:2])
)


@pytest.mark.parametrize("guess", ["itself", "n-gram", "near"])
@pytest.mark.parametrize("tokens", range(1, 13))
def test_max_tokens(tokens, guess):
    """Bug: a run of accepted guesses goes past max_tokens, into slots that nobody has counted."""
    got, want = both_ways(MODEL, IDS, params(tokens, temperature=0, ignore_eos=True), guess)
    for request in got:
        assert_same(request, want)
        assert request.outputs[0].output_ids == TEXT[:tokens]
        assert request.outputs[0].finish_reason == "length"


@pytest.mark.parametrize("length", range(6, 18))
def test_max_seq_len(length):
    """Bug: a run of accepted guesses goes past the context."""
    wish = params(99, temperature=0, ignore_eos=True)
    got, want = both_ways(MODEL, IDS, wish, max_seq_len=length)
    for request in got:
        assert_same(request, want)
        assert len(request.outputs[0].ids) == length
    wish = params(99, temperature=0, ignore_eos=True)
    need = -(-(length - 1) // 4)  # of blocks: not one for the guesses
    at = engine(num_blocks=need, max_seq_len=length, max_num_seqs=1, draft=MODEL, speculate=4)
    request = at.add_request(IDS, wish)
    drain(at)
    assert_same(request, want)


@pytest.mark.parametrize("at", range(12))
def test_stop_token_inside_a_run(at):
    """Bug: tokens behind a stop token are shown, or a stop token among guesses is not noticed."""
    wish = params(24, temperature=0, ignore_eos=True, stop_token_ids=[TEXT[at]])
    got, want = both_ways(MODEL, IDS, wish)
    for request in got:
        assert_same(request, want)
        assert request.outputs[0].output_ids == TEXT[: TEXT.index(TEXT[at]) + 1]
        assert request.outputs[0].finish_reason == "stop"


@pytest.mark.parametrize("at", range(1, 12, 2))
def test_eos_inside_a_run(at):
    """Bug: EOS among the guesses does not end the sequence."""
    model = random_model(eos_ids=(TEXT[at],))
    got, want = both_ways(model, IDS, params(24, temperature=0))
    for request in got:
        assert_same(request, want)
        assert request.outputs[0].output_ids == TEXT[: TEXT.index(TEXT[at]) + 1]
        assert request.outputs[0].finish_reason == "stop"


LETTERS = Chars(*string.ascii_letters[:32])


@pytest.mark.parametrize("at", range(12))
def test_stop_string_inside_a_run(at):
    """Bug: the text goes on behind a stop string, or shows its beginning."""
    stop = LETTERS.decode(TEXT[at : at + 2])
    wish = params(24, temperature=0, ignore_eos=True, stop=stop)
    got, want = both_ways(MODEL, IDS, wish, tokenizer=LETTERS)
    whole = LETTERS.decode(TEXT)
    for request in got:
        assert_same(request, want)
        assert request.outputs[0].text == whole[: whole.index(stop)]
        assert request.outputs[0].finish_reason == "stop"


def test_no_token_follows_the_end(monkeypatch):
    """Bug: an ended sequence is yielded the rest of a run."""
    wish = params(24, temperature=0, ignore_eos=True, stop_token_ids=[TEXT[3]])
    sequence = Sequence(IDS, wish, MODEL.config)
    cache, own = (StaticCache(MODEL.config, 1, 64, torch.float64) for _ in "ab")
    steps = generate(MODEL, sequence, cache, proposer=draft_model(MODEL, 4, cache=own))
    assert [token.id for token in steps] == TEXT[: TEXT.index(TEXT[3]) + 1]
    # Ctrl-C in the middle of a run.
    sequence = Sequence(IDS, params(24, temperature=0, ignore_eos=True), MODEL.config)
    steps = generate(MODEL, sequence, cache, proposer=draft_model(MODEL, 4, cache=own))
    for n, _ in enumerate(steps, 1):
        assert len(sequence.output_ids) == n
        if n == 3:
            sequence.finish("interrupted")
    assert sequence.output_ids == TEXT[:3]


# --- Log-probabilities ----------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [5, 40])
@pytest.mark.parametrize("guess", DRAFTS)
@pytest.mark.parametrize("length", [1, 3, 9])
def test_logprobs_and_prompt_logprobs(length, guess, budget):
    """Bug: the log-probabilities of a run are those of other positions, or the prompt's are lost
    or made anew where the logits of guesses follow."""
    options = {"max_num_seqs": 1, "max_num_batched_tokens": budget, "speculate": 4}
    at = engine(num_blocks=40, draft=DRAFTS[guess], **options)
    for prompt_logprobs in (None, 2):
        wish = params(14, temperature=0, ignore_eos=True, logprobs=3, n=2,
                      prompt_logprobs=prompt_logprobs)  # fmt: skip
        request = at.add_request(WORDS[:length], wish)
        drain(at)
        assert_same(request, alone(at, WORDS[:length], wish))


def test_prompt_logprobs_only_where_asked():
    """Bug: as many guesses as there are tokens are taken for the logits of a prompt."""
    at = engine(num_blocks=40, max_num_batched_tokens=40, draft=MODEL, speculate=4)
    for length in range(1, 5):
        request = at.add_request(WORDS[:length], params(12, temperature=0, ignore_eos=True))
        drain(at)
        assert request.outputs[0].prompt_tokens == []


# --- The pool -------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", range(0, 9, 2))
@pytest.mark.parametrize("n", [1, 3])
def test_abort_at_any_time(steps, n):
    """Bug: blocks reserved for guesses are lost; those behind are given the wrong tokens."""
    at = engine(num_blocks=12, max_num_batched_tokens=21, draft=NEAR, speculate=4)
    wish = params(12, ignore_eos=True)
    doomed = [at.add_request(WORDS[i : i + 6], params(12, n=n)) for i in (0, 30)]
    kept = at.add_request(WORDS[:7], wish)
    for _ in range(steps):
        step(at)
    at.abort(doomed[0])
    at.check()
    step(at)
    at.abort(doomed[1])
    drain(at)
    assert_same(kept, guessed(at, WORDS[:7], wish, NEAR, 4))


def test_guesses_are_all_or_none():
    """Bug: what a full budget or a chunk leaves decides how many guesses there are, and with them
    which random numbers a sequence uses."""
    at, seen = engine(max_num_batched_tokens=21, draft=NEAR, speculate=4, num_blocks=90), []
    propose = at.proposer.propose

    def listening(sequences, rows, counts):
        for s, row, count in zip(sequences, rows, counts, strict=True):
            assert count in (0, at.proposer.count(s))
            assert row.end == len(s.ids) or not count
            seen.append((count, row.end - row.start))
        return propose(sequences, rows, counts)

    at.proposer.propose = listening
    for i in range(6):
        at.add_request(WORDS[5 * i : 5 * i + 13], params(9 + i, ignore_eos=True))
        step(at)
    drain(at)
    assert {count for count, _ in seen} == {0, 1, 2, 3, 4}
    assert any(count == 0 and size > 1 for count, size in seen)


def test_running_sequences_share_the_budget():
    """Bug: a long prompt takes the tokens that the guesses of later sequences need, and they wait;
    or more tokens run than the budget has."""
    at = engine(num_blocks=60, max_num_batched_tokens=20, draft=MODEL, speculate=4)
    wish = params(16, temperature=0, ignore_eos=True)
    running = [at.add_request(WORDS[i : i + 2], wish) for i in range(3)]
    step(at)
    long = at.add_request(WORDS[:24], wish, priority=-1)
    for _ in range(2):
        before = [len(r.outputs[0].tokens) for r in running]
        step(at)
        assert [len(r.outputs[0].tokens) for r in running] == [n + 5 for n in before]
    assert not long.outputs[0].tokens
    drain(at)
    for request, i in zip(running, range(3), strict=True):
        assert_same(request, alone(at, WORDS[i : i + 2], wish))


def test_a_resumed_sequence_waits_for_a_share_that_holds_its_guesses():
    """Bug: a resumed sequence is given the end of the budget, and runs nothing or guesses less."""
    at = engine(num_blocks=11, max_num_seqs=3, max_num_batched_tokens=15, draft=NEAR, speculate=4)
    wishes = [params(25, seed=i, ignore_eos=True) for i in range(3)]
    requests = [at.add_request(WORDS[9 * i : 9 * i + 5 + i], w) for i, w in enumerate(wishes)]
    drain(at)
    assert at.stats.preemptions > 0
    for i, (request, wish) in enumerate(zip(requests, wishes, strict=True)):
        assert_same(request, guessed(at, WORDS[9 * i : 9 * i + 5 + i], wish, NEAR, 4))


def test_the_draft_runs_no_more_than_it_must():
    """Bug: the draft computes a text anew at each step, which no token shows: only the time."""
    at, runs = engine(num_blocks=14, max_num_batched_tokens=20, draft=NEAR, speculate=4), []
    runner, propose = at.proposer.runner, at.proposer.propose

    def counting(rows, tokens, select):
        runs[-1] -= len(tokens)
        return runner(rows, tokens, select)

    def allowing(sequences, rows, counts):  # each token, the one before, and the guesses
        runs.append(sum(row.end - row.start + 1 for row in rows) + sum(counts))
        return propose(sequences, rows, counts)

    at.proposer.runner, at.proposer.propose = counting, allowing
    counting.copy_blocks = runner.copy_blocks
    for i in range(4):
        at.add_request(WORDS[5 * i : 5 * i + 13], params(16, ignore_eos=True))
    drain(at)
    assert at.stats.preemptions > 0 and min(runs) >= 0


def test_the_memory_is_that_of_both_caches():
    """Bug: the draft's keys and values come on top of --kv-memory."""
    draft = DRAFTS["small"]
    blocks = [2 * layers * 4 * 1 * H * 8 for layers, H in ((2, 8), (1, 4))]  # 4 tokens, 1 head
    for budget in (sum(blocks) * 7, sum(blocks) * 8 - 1):
        at = engine(num_blocks=None, kv_memory=budget, draft=draft, speculate=1)
        assert at.pool.num_blocks == 7
        for runner, size in zip((at.runner, at.proposer.runner), blocks, strict=True):
            assert runner.cache.num_blocks == 7
            assert sum(t.nbytes for pools in runner.cache.pools for t in pools) == 7 * size


def test_a_salt_keeps_guessed_blocks_apart():
    """Bug: a first block that is filled by guesses is found by a request with another salt."""
    at, hits = engine(num_blocks=40, max_num_batched_tokens=40, draft=MODEL, speculate=4), []
    for salt in ("a", None, "b", "a"):
        before = at.stats.cached_tokens
        at.add_request([*IDS[:2], *PREFIX[:8]], params(4, ignore_eos=True), cache_salt=salt)
        at.add_request(IDS[:2], params(12, temperature=0, ignore_eos=True), cache_salt=salt)
        drain(at)
        hits.append(at.stats.cached_tokens - before)
    assert hits == [0, 0, 0, 8]


def test_times_of_a_run_are_in_order():
    """Bug: the tokens of a run have one time, or none."""
    at = engine(num_blocks=40, max_num_batched_tokens=40, draft=MODEL, speculate=4)
    request = at.add_request(IDS, params(12, ignore_eos=True))
    drain(at)
    (sequence,) = request.outputs
    assert len(sequence.times) == 13 and sequence.times == sorted(sequence.times)
    assert at.stats.guess_s > 0 and at.stats.steps == 4  # 1 + 5 + 5 + 1


# --- What is counted ------------------------------------------------------------------------------


class Script(Proposer):
    """Guesses the text, with a mistake at some places."""

    def __init__(self, k, text, wrong) -> None:
        super().__init__(k)
        self.text, self.wrong = text, wrong

    def propose(self, sequences, rows, counts):
        guesses = []
        for s, count in zip(sequences, counts, strict=True):
            at = len(s.output_ids)
            ids = [(i + (j in self.wrong)) % 32 for j, i in enumerate(self.text)][at : at + count]
            guesses.append(Guess(ids, [1.0] * len(ids)))
        return guesses


@pytest.mark.parametrize("way", ["alone", "engine"])
def test_what_became_of_the_guesses(way):
    """Bug: what is offered, accepted or counted is off by one position or one step."""
    proposer = Script(3, TEXT, {3, 4, 9})
    wish = params(11, temperature=0, ignore_eos=True)
    if way == "alone":
        sequence = Sequence(IDS, wish, MODEL.config)
        cache = StaticCache(MODEL.config, 1, sequence.max_len, torch.float64)
        list(generate(MODEL, sequence, cache, proposer=proposer))
    else:
        at = engine(max_num_batched_tokens=16, speculate=3)
        at.proposer = proposer
        (sequence,) = at.add_request(IDS, wish).outputs
        drain(at)
        assert at.stats.output_tokens == 11
        assert at.stats.computed_tokens == 5 + 4 + 4 + 4 + 3
    assert sequence.output_ids == TEXT[:11]
    # 0; 1 2 and 3 refused; 4 refused; 5 6 7 and 8; 9 refused, and 10 is the last
    assert proposer.steps == 4
    assert proposer.offered == [4, 3, 3] and proposer.accepted == [2, 2, 1]
    assert proposer.summary() == "4 times guessed, 1.25 accepted on average (50% 67% 33%)"


def test_nothing_guessed():
    """Bug: a division by zero where there was nothing to guess."""
    assert "nothing" in NGram(4).summary()
    proposer = Proposer()
    sequence = started(32)
    assert proposer.count(sequence) == 0
    assert proposer.propose([sequence], [None], [0]) == [Guess()]
    assert proposer.summary() == "nothing was guessed"


@pytest.mark.parametrize(("k", "room", "count"), [(4, 9, 4), (4, 4, 3), (4, 1, 0), (1, 2, 1)])
def test_how_many_to_guess(k, room, count):
    """Bug: guesses for tokens that will not be needed, or before the first token."""
    sequence = Sequence([1, 2], SamplingParams(max_tokens=room + 1), config(9))
    assert Proposer(k).count(sequence) == 0
    sequence.append(Token(3))
    assert Proposer(k).count(sequence) == count


# --- N-grams --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ids", "count", "found"),
    [
        ([1, 2, 3, 9, 2, 3], 2, [9, 2]),  # the docstring's
        ([1, 2, 3, 4, 5, 1, 2, 3], 2, [4, 5]),
        ([1, 2, 3, 4, 5, 1, 2, 3], 9, [4, 5, 1, 2, 3]),  # no more than there is
        ([1, 2, 3, 4, 5, 1, 2, 3], 1, [4]),
        ([1, 2, 3, 4, 5, 1, 2, 3], 0, []),
        ([1, 2, 3, 7, 9, 3, 8, 1, 2, 3], 1, [7]),  # three that match before one that is nearer
        ([5, 2, 3, 7, 9, 3, 8, 1, 2, 3], 1, [7]),  # two
        ([1, 2, 3, 7, 1, 2, 3, 8, 1, 2, 3], 1, [8]),  # of equals the latest
        ([4, 5, 6, 4], 3, [5, 6, 4]),
        ([0, 1, 2, 3, 9, 8, 1, 2, 3, 7, 0, 1, 2, 3], 1, [7]),  # four are not looked for
        ([1, 1], 4, [1]),
        ([1, 1, 1], 4, [1]),
        ([1, 2, 3], 4, []),
        ([1], 4, []),
        ([1, 2], 4, []),
        ([2, 2, 1], 4, []),  # the last one itself is no earlier occurrence
    ],
)
def test_lookup(ids, count, found):
    """Bug: off by one; the first or a shorter match; the end of the text finds itself."""
    before = [*ids]
    assert lookup(ids, count) == found
    assert ids == before


def test_lookup_window():
    """Bug: the whole text is searched at each step; or the window's first id is not."""
    ids = [1, 2, 3, *[9] * 7, 1, 2, 3]
    assert lookup(ids, 2, window=13) == [9, 9]
    assert lookup(ids, 2, window=12) == [9, 9]  # 2 3
    assert lookup(ids, 2, window=10) == []
    assert lookup([7, 8, *range(10, 4103), 7], 1) == [8]
    assert lookup([7, 8, *range(10, 4104), 7], 1) == []


@settings(max_examples=400, deadline=None)
@given(
    ids=st.lists(st.integers(0, 3), min_size=1, max_size=24),
    count=st.integers(0, 5),
    longest=st.integers(1, 4),
    window=st.integers(1, 24),
)
@example(ids=[1, 1, 1, 1], count=3, longest=3, window=4)
def test_lookup_equals_its_slow_twin(ids, count, longest, window):
    """Bug: some meeting of length, window and repetition that nobody thought of."""
    seen = ids[max(0, len(ids) - window) :]
    best, key = [], (0, 0)
    for end in range(1, len(seen)):  # what follows seen[:end], by how much of its end agrees
        n = 0
        while n < min(end, longest) and seen[end - n - 1] == seen[len(seen) - n - 1]:
            n += 1
        if n and (n, end) >= key and count:
            best, key = seen[end : end + count], (n, end)
    assert lookup(ids, count, longest, window) == best


def test_n_grams_of_each_sequence():
    """Bug: one sequence's text gives the guesses of another."""
    sequences = [started(9, prompt=p, output=o) for p, o in (((5, 6, 7), (5,)), ((1, 2), (1,)))]
    sequences.append(started(9, prompt=(1, 2), output=(3,)))
    guesses = NGram(2).propose(sequences, [None] * 3, [2, 1, 2])
    assert guesses == [Guess([6, 7], [1.0, 1.0]), Guess([2], [1.0]), Guess()]


# --- Errors and the command line ------------------------------------------------------------------


@pytest.mark.parametrize("k", [-1, 65, 10**6])
def test_k_out_of_range(k):
    """Bug: a range of -1, or a step that never fits."""
    for make in (NGram, lambda k: draft_model(MODEL, k)):
        with pytest.raises(ValueError, match=rf"0\.\.64.*{k}"):
            make(k)
    with pytest.raises(ValueError, match=str(k)):
        engine(speculate=k, max_num_batched_tokens=10**8)
    assert NGram(64).k == 64 and NGram(0).k == 0


def test_another_vocabulary_is_refused():
    """Bug: ids of another vocabulary index past the end of p, or mean other words."""
    other = random_model(vocab_size=40)
    with pytest.raises(ValueError, match=r"40.*32"):
        draft_model(other, 4, 32)
    with pytest.raises(ValueError, match=r"40.*32"):
        engine(draft=other, speculate=1)


def test_a_budget_too_small_for_the_guesses_is_refused():
    """Bug: a running sequence never gets the tokens for its guesses, and waits for ever."""
    with pytest.raises(ValueError, match=r"19.*\b4 times 5 tokens"):
        engine(max_num_seqs=4, max_num_batched_tokens=19, speculate=4)
    engine(max_num_seqs=4, max_num_batched_tokens=20, speculate=4)


GREEDY = ("--prompt", "ROMEO:\nWhat", "--max-tokens", "20", "--temperature", "0", "--ignore-eos",
          "--dtype", "float32", "--device", "cpu")  # fmt: skip
DRAFTED = (*GREEDY, "--draft-checkpoint", str(DRAFT))


@pytest.fixture
def cli(capfd, monkeypatch):
    """Run main(); return its status, stdout and stderr."""

    def run(*argv: object) -> tuple[int, str, str]:
        capfd.readouterr()
        code = command_line.main([str(arg) for arg in argv])
        out, err = capfd.readouterr()
        return code, out, re.sub(r"\r[^\r\n]*\n?", "", err)

    monkeypatch.setattr(command_line, "read_bandwidth", lambda device: 30.0)
    return run


@pytest.mark.parametrize(
    ("flags", "most"),
    [
        ([], 4),
        (["--speculate", 2], 2),
        (["--speculate", 0], 0),
        (["--kv-dtype", "int8"], 4),
        (["--num-samples", 2], 4),
    ],
)
def test_draft_on_the_command_line(cli, flags, most):
    """Bug: --speculate is ignored, another text than without, statistics that do not come."""
    plain = cli(*GREEDY, "--json", *(flags if "--speculate" not in flags else ()))
    code, out, err = cli(*DRAFTED, "--json", *flags)
    assert code == 0
    texts = [[json.loads(line)["token_ids"] for line in o.splitlines()] for o in (plain[1], out)]
    assert texts[0] == texts[1]
    found = re.search(r"; (\d+) times guessed, (\d\.\d\d) accepted on average \(([0-9% ]+)\)$", err)
    assert bool(found) == bool(most), err
    if most:
        assert found[3].count("%") == most
        assert "GB/s" not in err
        assert float(found[2]) <= most
        rates = [int(rate) for rate in re.findall(r"\d+", found[3])]
        assert all(0 <= rate <= 100 for rate in rates) and rates[0] > 0


def test_n_grams_on_the_command_line(cli):
    """Bug: --speculate-ngram is ignored, or changes the text."""
    repeated = ("--prompt", "To be, or not to be: that is\n" * 4, *GREEDY[2:])
    code, out, err = cli(*repeated, "--speculate-ngram", 3)
    assert code == 0 and out == cli(*repeated)[1]
    assert re.search(r"\d+ times guessed, .* \(\d+% \d+% \d+%\)$", err)
    code, out, err = cli(*GREEDY[:2], "--max-tokens", 1, "--speculate-ngram", 3)
    assert code == 0  # nothing to say of one token


@pytest.mark.parametrize(
    ("flags", "pattern"),
    [
        (["--speculate", 4], r"--speculate needs --draft-checkpoint.*--speculate-ngram"),
        (["--speculate", 4, "--speculate-ngram", 4], "--speculate needs --draft-checkpoint"),
        (["--speculate-ngram", 4, "--draft-checkpoint", DRAFT], "one of them"),
        (["--speculate-ngram", 65], r"0\.\.64.*65"),
        (["--speculate-ngram", -1], r"0\.\.64.*-1"),
        (["--draft-checkpoint", DRAFT, "--speculate", 65], r"0\.\.64.*65"),
        (["--draft-checkpoint", DRAFT, "--speculate", -1], r"0\.\.64.*-1"),
        (["--draft-checkpoint", "/nowhere"], "/nowhere"),
    ],
)
def test_errors_on_the_command_line(cli, flags, pattern):
    """Bug: a traceback, or text without the guesses that were asked for."""
    code, out, err = cli(*GREEDY, *flags)
    assert (code, out) == (2, "")
    assert re.fullmatch(rf"generate\.py: error: .*{pattern}.*\n", err)


def test_another_vocabulary_on_the_command_line(cli, monkeypatch):
    """Bug: the text is that of a draft which means other words."""
    load, other = command_line.load, random_model(vocab_size=40)
    monkeypatch.setattr(
        command_line, "load", lambda path, *args: other if path == DRAFT else load(path, *args)
    )
    code, out, err = cli(*DRAFTED)
    assert (code, out) == (2, "")
    assert re.search(r"error: .*40.*1024", err)


@pytest.fixture(scope="module")
def quantised_folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("draft") / "int4"
    argv = ["--checkpoint", DRAFT, "--mode", "int4", "--group-size", "32", "--out", out]
    assert quantize.main([str(arg) for arg in argv]) == 0
    return out


def test_a_quantised_draft(cli, quantised_folder):
    """Bug: the draft is loaded as a plain folder."""
    code, out, err = cli(*GREEDY, "--draft-checkpoint", quantised_folder)
    assert code == 0 and out == cli(*GREEDY)[1]
    assert "times guessed" in err


@pytest.mark.parametrize("quantised", [False, True])
def test_llm_with_a_draft(quantised, quantised_folder):
    """Bug: LLM forgets the draft, or its own default of 4 guesses wins over what was asked for."""
    options = {"device": "cpu", "dtype": "float32", "num_blocks": 12, "max_seq_len": 60}
    draft = quantised_folder if quantised else DRAFT
    wish = SamplingParams(temperature=0, max_tokens=20, logprobs=1)
    prompts = ["ROMEO:", "O"]
    texts = [r.outputs[0].text for r in LLM(SHAKESPEARE, **options).generate(prompts, wish)]
    for wanted in ({}, {"speculate": 2}):
        llm = LLM(SHAKESPEARE, draft_checkpoint=draft, **options, **wanted)
        assert llm.engine.proposer.k == wanted.get("speculate", 4)
        assert [r.outputs[0].text for r in llm.generate(prompts, wish)] == texts
        assert sum(llm.engine.proposer.accepted) > 0
        assert_empty(llm.engine)


# --- Compiled -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def compiled():
    """The bundled model and its draft."""
    torch._dynamo.reset()
    models = [load_model(path, dtype=torch.float32) for path in (SHAKESPEARE, DRAFT)]
    return [compile_model(model, chunk=32) for model in models]


@pytest.mark.parametrize("k", [1, 2, 7])
@pytest.mark.parametrize("length", [1, 31, 65])
def test_nothing_is_compiled_after_warm_up(compiled, length, k):
    """Bug: a number of guesses, or of tokens that the draft catches up with, is another graph."""
    model, draft = compiled
    wish = SamplingParams(temperature=0.5, seed=1, max_tokens=20, ignore_eos=True)
    for capacity in (length + 20, 1024):
        sequence = Sequence([5] * length, wish, model.config)
        caches = [StaticCache(m.config, 1, capacity, torch.float32) for m in compiled]
        proposer = draft_model(draft, k, cache=caches[1])
        with torch.compiler.set_stance("fail_on_recompile"):
            list(generate(model, sequence, caches[0], 32, proposer))
        assert len(sequence.output_ids) == 20


def test_nothing_is_compiled_after_warm_up_by_the_scheduler():
    """Bug: rows with guesses, of which there are any number, are another graph; the draft is not
    compiled at all, or for the other's cache."""
    models = [load_model(path, dtype=torch.float32) for path in (SHAKESPEARE, DRAFT)]
    at = Engine(models[0], compile=True, num_blocks=64, draft=models[1], speculate=3)
    for model in models:
        assert model.layers[0]._compiled_call_impl is not None
    wish = SamplingParams(temperature=0.5, max_tokens=12, ignore_eos=True, seed=0)
    with torch.compiler.set_stance("fail_on_recompile"):
        for lengths in ([1], [2], [16], [40, 1], [300], [5, 5, 5, 90, 17]):
            for length in lengths:
                at.add_request([5] * length, wish)
            drain(at)
    assert at.stats.output_tokens == 12 * 11


def test_a_compiled_draft_on_the_command_line(cli, compiled, monkeypatch):
    """Bug: --compile forgets the draft, or warms it up with the large model's cache."""
    models, warmed = dict(zip((SHAKESPEARE, DRAFT), compiled, strict=True)), []
    want = cli(*GREEDY)[1]
    monkeypatch.setattr(command_line, "load", lambda path, *_: models[path])
    monkeypatch.setattr(Runner, "compile", lambda self: warmed.append(self))
    with torch.compiler.set_stance("fail_on_recompile"):
        code, out, err = cli(*DRAFTED, "--compile")
    assert code == 0 and out == want
    assert [runner.model for runner in warmed] == compiled
    for runner in warmed:
        assert len(runner.cache.layers) == runner.model.config.num_hidden_layers
    assert "times guessed" in err
