"""Speculation: what comes out is what the model alone would give, in tokens or in chances.

Sampled, the chances of the first three tokens are counted, against a plain reference; and the
tokens of a seed must be those of the plain twin with the same guesses, whatever else runs. The
paths are in tests/test_equivalence.py; here are the borders.
"""

import itertools
import math
import re
import shutil
from collections import Counter
from dataclasses import replace
from functools import cache
from time import thread_time
from timeit import repeat
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from conftest import DRAFT
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from test_sampling import chi_square, config, reference
from test_scheduler import alone, assert_same, drain, engine, guessed, params, step
from tiny import DRAFTS, MODEL, SLIDING, WORDS, edit_config

import generate as command_line
import sampling
import speculative
from around.fast import attending
from around.fast.attending import fast_caches
from around.settings import SamplingParams
from paged import BlockTable
from sampling import Token, distribution
from scheduler import EngineSequence, Guess, Proposer, Request
from speculative import DraftModel, NGram, SpeculativeProposer, accept, lookup

INF = math.inf
FALSE_ALARM = 1e-6  # chance of each chi-square to fail a right verifier; seeds are fixed
BELOW_1 = math.nextafter(1, 0)
NEAR = DRAFTS["near"]

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
    "of fewer ids": (TABLE, OTHER[:-1, :-1]),  # another padding
    "of more ids": (TABLE, F.pad(OTHER, (0, 2, 0, 2), value=9.0)),
}


def table_draft(logits) -> DraftModel:
    """Return a draft whose logits are the row of the last token."""
    draft = DraftModel(SimpleNamespace(config=config(len(logits))), K, V)
    forward = lambda rows: logits[[row.ids[-1] for row in rows]]  # noqa: E731
    draft.runners = (SimpleNamespace(forward=forward),)
    return draft


def play(guess: str, n: int = 3, **wish) -> list[tuple[int, ...]]:
    """Make n tokens for each of DRAWS consecutive seeds; side by side, as the scheduler does."""
    table, draft = TABLES[guess]
    proposer = NGram(K) if draft is None else table_draft(draft)
    params, small, guesses = SamplingParams(max_tokens=32, **wish), config(V), 0
    sequences = [EngineSequence(Request(), PROMPT, params, small) for _ in range(DRAWS)]
    for seed, sequence in enumerate(sequences):
        sequence.seed = seed
        sequence.append(Token(FIRST))
    while live := [s for s in sequences if len(s.tokens) <= n]:
        for s in live:
            s.num_scheduled, s.table = 1 + proposer.count(s), BlockTable([], len(s.ids) - 1)
        proposer.propose(live)
        guesses += sum(len(s.guess.ids) for s in live)
        ids = [i for s in live for i in (s.ids[-1], *s.guess.ids)]
        for s, tokens in zip(live, proposer.verify(table[ids], live), strict=True):
            for token in tokens:
                s.append(token)
            s.guess = Guess()
    assert guesses > 0
    return [tuple(s.token_ids[1 : n + 1]) for s in sequences]


@cache
def chances(guess: str, name: str, n: int) -> dict[tuple[int, ...], float]:
    """Return the chance of each n tokens that can come, by the reference of test_sampling."""
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
    """Return the chance of counts as far from what is expected; what is rare is counted
    together."""
    counts, rare, cells = Counter(drawn), [0, 0.0], []
    assert counts.keys() <= expected.keys(), "drew an impossible token"
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


ROWS = {*itertools.product(TABLES, ["plain"]), *itertools.product(["far"], SETTINGS)}
SLOW = {*itertools.product(["n-gram"], SETTINGS)} - ROWS


@pytest.mark.parametrize(
    ("guess", "name"),
    [*sorted(ROWS), *(pytest.param(*row, marks=pytest.mark.slow) for row in sorted(SLOW))],
)
def test_tokens_have_the_right_chances(guess, name):
    """Draw three tokens with guesses for 1,200 seeds, and compare the counts with the reference by
    chi-square. Catches: guesses that shift the distribution of one token, or of one given those
    before it."""
    drawn = play(guess, **SETTINGS[name])
    for n in (1, 2, 3):  # all of what K guesses can make, with each token's dependence on the last
        assert fit([ids[:n] for ids in drawn], chances(guess, name, n)) > FALSE_ALARM, n


def started(V: int, seed: int = 0, prompt=(1,), output=(2,), guess=None, **wish) -> EngineSequence:
    seq = EngineSequence(
        Request(), [*prompt], SamplingParams(seed=seed, max_tokens=99, **wish), config(V)
    )
    for i in output:
        seq.append(Token(i))
    seq.guess = guess or Guess()
    return seq


def drawn_guess(probs: list[torch.Tensor], ids: list[int]) -> Guess:
    return Guess(ids, [p[i].item() for p, i in zip(probs, ids, strict=True)], probs)


def ids_of(logits, sequence, guess) -> list[int]:
    sequence.guess = guess
    return [token.id for token in SpeculativeProposer(4).verify(logits, [sequence])[0]]


def test_what_always_and_never_comes_out(monkeypatch):
    """Verify guesses at the ends of the random numbers, against drafts that are perfect, near and
    far; then the docstring's example. Catches: a guess refused that is exactly as likely; an id of
    V, where rounding leaves nothing of p - q (GHSA-8wr5-jm2h-8r4f); a refused or filtered guess
    that comes out at u = 0; a NaN accepted."""
    for u, seed, V in itertools.product(
        (0.0, 2**-60, 0.5, 1 - 2**-24, BELOW_1), range(9), (2, 7, 300)
    ):
        monkeypatch.setattr(sampling, "uniform", lambda seed, index, u=u: u)
        some = torch.Generator().manual_seed(seed)
        logits, s = torch.randn(3, V, generator=some) * 3, started(V, temperature=0.8)
        q = distribution(logits[:2], [s.with_guesses([]), s.with_guesses([1])])
        ids = [seed % V, seed // V % V]
        assert ids_of(logits, s, drawn_guess([*q], ids))[:2] == ids
        logits = torch.randn(2, V, generator=some) * 4
        logits[:, seed % V] = -INF
        top_k, temperature = (0, 1, V // 2)[seed % 3], (0.1, 1)[seed % 2]
        s = started(V, output=(1,), top_k=top_k, temperature=temperature)
        p = distribution(logits, [s, s])[0]
        for x in {int(p.argmax()), int(p.argmin()), V - 1, 0}:
            up, sure = p.clone(), torch.zeros(V)
            up[x] = torch.nextafter(up[x], torch.tensor(2.0))  # all that p lacks of q
            sure[x] = 1
            far = torch.rand(V, generator=some).softmax(-1)
            noise = p * (1 + 1e-7 * torch.randn(V, generator=some))
            guesses = [drawn_guess([q], [x]) for q in (p, up, sure, far, noise)]
            for guess in (*guesses, Guess([x], [1.0])):
                one = ids_of(logits, s, guess)[0]
                assert 0 <= one < V and p[one] > 0
    half, q = torch.tensor([0.5, 0.5, 0]), torch.tensor([0.8, 0, 0.2])
    for p, x, u, n, rest in (
        (half, 0, 0.62, 1, [0.5, 0.5, 0]), (half, 0, 0.63, 0, [0, 0.5, 0]),
        (half, 2, 0.0, 0, [0, 0.5, 0]), (half * math.nan, 0, 0.5, 0, None),
    ):  # fmt: skip
        chances = torch.tensor([p[x], 0.0])
        got = accept(p.expand(2, -1), chances, drawn_guess([q], [x]), torch.tensor([u, 0.5]))
        assert got[0] == n and rest in (None, got[1].tolist())


@pytest.mark.parametrize(
    ("model", "wish"),
    [(SLIDING, {"temperature": 0}), (SLIDING, {}), *((MODEL, wish) for wish in SETTINGS.values())],
)
def test_a_perfect_draft_is_never_refused(model, wish):
    """Run the model as its own draft, through forks, preemption and shared prefixes: every guess
    must be accepted. Catches: what no token shows: a token that the draft skips where all guesses
    were accepted; a block not copied at a fork; guesses by other settings."""
    at = engine(model, num_blocks=13, max_num_batched_tokens=20, draft=model, speculate=4)
    shared = WORDS[:6]
    for n, ids in ((3, shared), (1, [*shared, 3]), (1, WORDS[20:37]), (2, shared), (1, WORDS[:1])):
        at.add_request(ids, params(17, n=n, ignore_eos=True, **wish))
        for _ in range(3):
            step(at)
    drain(at)
    assert at.stats["num_preemptions"] > 0 and at.stats["prefix_cache_hits"] > 0
    assert at.proposer.accepted == at.proposer.offered


def test_cached_blocks_and_guesses():
    """Find texts in the cache that were written with guesses, and count hits and accepted guesses.
    Catches: a run's last token, missing from the draft's cache, in a block that others find, so
    that a seed's tokens depend on what ran before; a first block filled by guesses, found under
    another salt."""
    wish = params(20, seed=5, ignore_eos=True)
    for short in range(2, 12):
        at = engine(num_blocks=60, max_num_batched_tokens=80, draft=MODEL, speculate=4)
        both = [at.add_request(WORDS[:5], params(n, ignore_eos=True)) for n in (short, 30)]
        drain(at)
        ids = both[1].outputs[0].ids[:-1]
        request = at.add_request(ids, wish)
        drain(at)
        assert at.stats["prefix_cache_hits"] > 20
        assert at.proposer.accepted == at.proposer.offered
        if short == 2:
            assert_same(request, guessed(MODEL, ids, wish, MODEL, 4))
    at, hits = engine(num_blocks=40, max_num_batched_tokens=40, draft=MODEL, speculate=4), []
    for salt in ("a", None, "b", "a"):
        before = at.stats["prefix_cache_hits"]
        at.add_request([*IDS[:2], *PREFIX[:8]], params(4, ignore_eos=True), cache_salt=salt)
        at.add_request(IDS[:2], params(12, temperature=0, ignore_eos=True), cache_salt=salt)
        drain(at)
        hits.append(at.stats["prefix_cache_hits"] - before)
    assert hits == [0, 0, 0, 8]


IDS, GREEDY = WORDS[:5], params(24, temperature=0, ignore_eos=True)
TEXT, PREFIX = (alone(engine(), ids, GREEDY)[0].token_ids for ids in (IDS, IDS[:2]))


@pytest.mark.parametrize(("blocks", "seqs", "budget"), [(20, 4, 21), (11, 3, 15), (9, 2, 10)])
def test_guesses_are_all_or_none_and_cost_no_more_than_they_must(blocks, seqs, budget, monkeypatch):
    """Note each step's guesses and what the draft computes, in tight budgets. Catches: fewer
    guesses in a full budget, a chunk or a resumption, so that a sequence uses other random numbers;
    a draft that computes a text anew at each step, or draws for each chunk of a prompt, which only
    the time shows."""
    limits = {"num_blocks": blocks, "max_num_seqs": seqs, "max_num_batched_tokens": budget}
    at, seen, spent, drawn = engine(draft=NEAR, speculate=4, **limits), [], [], []
    propose, forward = at.proposer.propose, at.proposer.runners[0].forward
    draw = speculative.draw
    monkeypatch.setattr(speculative, "draw", lambda p, u: drawn.append(len(p)) or draw(p, u))

    def listening(seqs):
        drawn.clear()
        spent.append(0)
        for s in seqs:
            count, known = s.num_guesses, s.num_scheduled - s.num_guesses
            assert count == 0 or count == at.proposer.count(s)
            seen.append((count, known))
            spent[-1] -= known + 1 + count  # each token, the one before, and the guesses
        propose(seqs)
        assert sum(drawn) == sum(len(seq.guess.ids) for seq in seqs)

    def counting(rows):
        spent[-1] += sum(len(row.ids) for row in rows)
        return forward(rows)

    at.proposer.propose, at.proposer.runners[0].forward = listening, counting
    jobs = [(WORDS[5 * i : 5 * i + 13], params(9 + i, ignore_eos=True)) for i in range(6)]
    requests = []
    for job in jobs:
        requests.append(at.add_request(*job))
        step(at)
    drain(at)
    for request, job in zip(requests, jobs, strict=True):
        assert_same(request, guessed(MODEL, *job, NEAR, 4))
    assert at.stats["num_preemptions"] > 0 and max(spent) <= 0
    assert {count for count, _ in seen} == {0, 1, 2, 3, 4}
    assert any(count == 0 and size > 1 for count, size in seen)


@pytest.mark.parametrize("guess", ["n-gram", "near"])
def test_rows_stand_together_whatever_is_guessed(guess, monkeypatch):
    """Count into how many groups of rows each step is put. Catches: rows with equally many tokens
    attended alone, where less is guessed than may be."""
    monkeypatch.setattr(attending, "max_blocks", lambda _: 10**6)
    counts, given = [], {"draft": DRAFTS[guess], "speculate": 3, "num_blocks": 99}
    at = engine(max_num_seqs=8, max_num_batched_tokens=70, **given)
    for runner in (at.runner, *at.proposer.runners):

        def planned(rows, plan=runner.plan):
            result = plan(rows)
            lengths = {len(row.ids) for row in rows}
            first, *_ = fast_caches(MODEL, *result)
            counts.append((len(lengths), len(first.rows), len(rows)))
            return result

        runner.plan = planned
    for i in range(8):
        at.add_request((WORDS[i : i + 4] * 4)[: 6 + i], params(14 + i, ignore_eos=True))
        step(at)
    drain(at)
    assert any(1 < lengths < rows for lengths, _, rows in counts)
    assert all(groups == lengths for lengths, groups, _ in counts)


def test_greedy_guesses_need_no_distribution(monkeypatch):
    """Verify greedy guesses without distribution(), and compare with the plain loop. Catches:
    greedy guesses verified by a step of the sampler over the whole vocabulary, as 40 of them once
    were."""
    monkeypatch.setattr(speculative, "distribution", None)
    at = engine(max_num_batched_tokens=16, speculate=3)
    requests = [at.add_request(WORDS[i : i + 9] * 2, replace(GREEDY, max_tokens=9)) for i in (0, 5)]
    drain(at)
    assert at.proposer.accepted.total() > 0
    for request in requests:
        assert_same(request, alone(at, request.prompt_token_ids, replace(GREEDY, max_tokens=9)))


class Script(SpeculativeProposer):
    """Guesses the text, with a mistake at some places."""

    def propose(self, sequences):
        for s in sequences:
            ids = [(i + (j in (3, 4, 9))) % 32 for j, i in enumerate(TEXT)]
            ids = ids[len(s.token_ids) :][: s.num_guesses]
            s.guess = Guess(ids, [1.0] * len(ids))


def test_what_became_of_the_guesses():
    """Guess a known text with mistakes, and check what is offered, accepted and counted. Catches: a
    count that is off by one; guesses for tokens that will not be needed, or before the first
    token."""
    at = engine(max_num_batched_tokens=16, speculate=3)
    at.proposer = proposer = Script(3)
    (sequence,) = at.add_request(IDS, replace(GREEDY, max_tokens=11)).outputs
    drain(at)
    assert (at.stats["generation_tokens"], at.stats["computed_tokens"]) == (11, 5 + 4 + 4 + 4 + 3)
    assert sequence.token_ids == TEXT[:11]
    # 0; 1 2 and 3 refused; 4 refused; 5 6 7 and 8; 9 refused, and 10 is the last
    assert proposer.offered == {0: 4, 1: 3, 2: 3} and proposer.accepted == {0: 2, 1: 2, 2: 1}
    for k, room, count in ((4, 9, 4), (4, 4, 3), (4, 1, 0), (1, 2, 1)):
        seq = EngineSequence(Request(), [1, 2], SamplingParams(max_tokens=room + 1), config(9))
        assert SpeculativeProposer(k).count(seq) == 0
        seq.append(Token(3))
        assert (SpeculativeProposer(k).count(seq), Proposer().count(seq)) == (count, 0)


@settings(max_examples=200, deadline=None)
@given(text=st.text("abcd", min_size=1, max_size=24), count=st.integers(0, 5),
       longest=st.integers(1, 4))  # fmt: skip
@example(text="aaaa", count=3, longest=3)
@example(text="bcdabcedabcfbcd", count=1, longest=3)  # three that match, before two that are nearer
@example(text="aba", count=2, longest=3)  # the end of the text finds itself
def test_lookup_equals_its_slow_twin(text, count, longest):
    """Look up random texts, and compare with a search of every place. Catches: an index that is off
    by one; the first or a shorter match."""
    best, key = "", (0, 0)
    for end in range(1, len(text)):  # what follows text[:end], by how much of its end agrees
        n = 0
        while n < min(end, longest) and text[end - n - 1] == text[len(text) - n - 1]:
            n += 1
        if n and (n, end) >= key and count:
            best, key = text[end : end + count], (n, end)
    assert lookup(text, count, longest) == best


def test_n_grams():
    """Look up the docstring's example, and guess for several sequences, odd ids and a long text.
    Catches: guesses from another sequence's text; ids past the last character of Unicode, and
    halves of characters; a draft that runs and is to guess no token; a text gone through at each
    step."""
    assert lookup("abcxbc", 2) == "xb"
    assert lookup("01239812370123", 1) == "7"  # four are not looked for
    large = (0x10FFFF, 0xD800, 0xDFFF, 9), (0xD800, 0xDFFF)
    marks = (0xFEFF, 7), (0xFEFF,)  # a byte-order mark, for Python
    texts = ((5, 6, 7), (5,)), ((1, 2), (1,)), ((1, 2), (3,)), large, marks
    sequences = [started(2**24, 0, *ids) for ids in texts]
    for s, count in zip(sequences, (2, 1, 2, 2, 1), strict=True):
        s.num_scheduled = len(s.ids) + count
    NGram(2).propose(sequences)
    assert [s.guess.ids for s in sequences] == [[6, 7], [2], [], [9, 0xD800], [7]]
    proposer = DraftModel(NEAR, 0, NEAR.config.vocab_size)
    proposer.runners = (SimpleNamespace(forward=lambda rows: pytest.fail("it ran")),)
    (seq,) = seqs = [started(9)]
    proposer.propose(seqs)
    seq.ids, proposer = [*range(50_000)], NGram(4)

    def step():
        seq.ids.append(-len(seq.ids) % 2**20)
        seq.num_scheduled = len(seq.ids) + 4
        proposer.propose(seqs)

    step()
    assert min(repeat(step, timer=thread_time, number=20, repeat=9)) / 20 < 5e-3  # 0.4 ms


def test_guesses_on_the_command_line(capfd, tmp_path):
    """Run generate.py with a draft, n-grams and drafts of other vocabulary sizes. Catches:
    --speculate ignored; a draft's ids of another vocabulary, which index past the end of p, or mean
    other words; a draft refused that is padded to another size over the same tokens."""
    words = f"--checkpoint {DRAFT} --max-tokens 20 --temperature 0 --ignore-eos --dtype float32"
    words = [*words.split(), "--device", "cpu", "--prompt", "To be, or not to be: that is\n" * 2]
    drafted = f"--draft-checkpoint {DRAFT} "
    for flags, least in (  # the least share of guesses that are right; None: there are no guesses
        (drafted + "--quantize int8", 0), (drafted + "--speculate 2", 0.75),  # it guesses itself
        (drafted + "--speculate 0 --n 2", None), ("--speculate-ngram 3 --kv-dtype int8", 0),
    ):  # fmt: skip
        assert command_line.main([*words, *flags.split()]) == 0
        err = capfd.readouterr().err
        found = re.search(r"(\d+) of (\d+) guesses were accepted$", err)
        assert bool(found) == (least is not None), err
        assert not found or least <= int(found[1]) / int(found[2]) <= 1
    # Of another size over the same tokens, as Qwen2.5's are padded, it was refused.
    command_line.main(words)
    want, tensors = capfd.readouterr().out, load_file(DRAFT / "model.safetensors")
    for size in (1000, 1200):
        folder = shutil.copytree(DRAFT, tmp_path / str(size))
        edit_config(folder, vocab_size=size)
        table = {n: F.pad(t, (0, 0, 0, size - 1024)) for n, t in tensors.items() if len(t) == 1024}
        save_file(tensors | table, folder / "model.safetensors")
        assert command_line.main([*words, "--draft-checkpoint", str(folder)]) == 0
        out, err = capfd.readouterr()
        assert out == want and "guesses were accepted" in err
