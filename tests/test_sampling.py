"""The sampler against a plain reference, its chances by chi-square, and the life of a Sequence.

The references are written to be obvious: float64, Python lists, one rule after another. The seeds
are fixed, so a run that passes today passes until the code changes.
"""

import copy
import json
import math
import re
from argparse import Namespace
from dataclasses import FrozenInstanceError, fields, replace
from functools import cache
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch
from conftest import SHAKESPEARE
from hypothesis import example, given, settings
from hypothesis import strategies as st

import sampling
from around.folder import Tokenizer, first_sampling, suggested_sampling
from around.settings import SamplingParams, SettingError, supported
from around.settings import given as given_by_flags
from around.settings import setting as make_setting
from model import Config
from sampling import Sequence, Token, distribution, draw, keep_likeliest, sample, uniform

few = settings(max_examples=40, deadline=None, derandomize=True, database=None)
FALSE_ALARM = 1e-6  # chance of each chi-square test to fail a right sampler
INF, BELOW_1 = math.inf, math.nextafter(1, 0)  # what uniform can give; as float32 it is 1.0


@cache
def config(V=2000, context=4096, eos=()):
    return Config(V, 2, 2, 1, 1, 1, 2, max_position_embeddings=context, eos_ids=eos)


def row(prompt=(0,), output=(), V=2000, p=None, **params):
    """Return a sequence that has already produced `output`."""
    sequence = Sequence(list(prompt), p or SamplingParams(**params), config(V))
    sequence.ids += output
    return sequence


def probs_of(logits, **kw):
    return distribution(torch.tensor([logits]), [row(V=len(logits), **kw)])[0].tolist()


RANGES = {
    "temperature": (0, 1e4), "top_k": (-1, 2**31), "top_p": (1e-6, 1), "min_p": (0, 1),
    "repetition_penalty": (1e-6, 1e4), "presence_penalty": (-2, 2), "frequency_penalty": (-2, 2),
    "seed": (-(2**63), 2**63 - 1), "max_tokens": (1, 2**31), "logprobs": (0, 20), "n": (1, 128),
    "min_tokens": (0, 2**31), "prompt_logprobs": (0, 20),
}  # fmt: skip
INTEGERS = {"top_k", "seed", "max_tokens", "min_tokens", "logprobs", "n", "prompt_logprobs"}
OPTIONAL = {"seed", "logprobs", "prompt_logprobs", "stop", "stop_token_ids", "logit_bias"}
WRONG = {
    "stop": ([""], "", [1], b"ab", ["a", None], ["x"] * 17, "x" * 257, 5, 0, {}),
    "stop_token_ids": ([-1], [True], [1.0], ["1"], "12", 5, 0, ""),
    "logit_bias": ({"1": 1}, {-1: 1}, {True: 1}, {1.0: 1}, {1: math.nan}, {1: INF}, {1: -INF},
                   {1: 100.5}, {1: -101}, {1: True}, {1: "1"}, {1: None}, [1],
                   dict.fromkeys(range(1025), 1.0)),
    "ignore_eos": ("no", 1),
}  # fmt: skip


@pytest.mark.parametrize("name", [*RANGES, *WRONG])
def test_values(name):
    """Give each setting values at its bounds, beyond them and of wrong types. Catches: a bound that
    is off by one; NaN, which passes `not value < low`; True taken for 1, or "no" for true; "1",
    which fails later, inside a kernel; a wrong type that ends in TypeError (a 500, a traceback)."""
    wrong = [*WRONG.get(name, ()), *([] if name in OPTIONAL else [None])]
    if name in RANGES:
        (low, high), one = RANGES[name], name in INTEGERS
        outside = (low - 1, high + 1) if one else map(math.nextafter, (low, high), (-INF, INF))
        more = {"max_tokens": high} if name == "min_tokens" else {}
        for value in (low, high, *([] if one else [(low + high) / 2])):
            assert getattr(SamplingParams(**{name: value}, **more), name) == value
        wrong += [*outside, -(10**30), math.nan, INF, -INF, True, False, "1", b"1", [1], {}, 1j]
        wrong += [torch.tensor([1.0]), *([1.0, 1.5, torch.tensor(1.0)] if one else [])]
        with pytest.raises(ValueError, match=re.escape(f"{low}..{high}")):
            SamplingParams(**{name: 10**30})
    for value in wrong:
        with pytest.raises(SettingError, match=rf"^{name}\b") as caught:
            SamplingParams(**{name: value})
        assert caught.value.field == name


def test_good_values(tmp_path):
    """Build parameters from good values, flags and a generation_config.json. Catches: a field
    without a check; one stop string taken for a list of letters; settings that change after their
    check; a seed out of range for the last of n; generation_config.json ignored, or stronger than
    the user, even than a 0."""
    named = {f.name for f in fields(SamplingParams)} - {"structured_outputs"}  # see its own tests
    assert named == RANGES.keys() | WRONG.keys()
    many = SamplingParams(seed=-1, stop=["ab", "c"] * 8, logit_bias=dict.fromkeys(range(1024), 100))
    assert many.seed is None and many.stop == ("ab", "c") * 8  # -1: as vLLM and llama.cpp take it
    assert many.adjusts and not (many.penalizes or many.filters)
    assert SamplingParams(stop="ab", seed=None, logprobs=None).stop == ("ab",)
    with pytest.raises(SettingError, match=r"^min_tokens 3 is above max_tokens, 2"):
        SamplingParams(max_tokens=2, min_tokens=3)
    with pytest.raises(SettingError, match=r"supported: 0$"):
        supported("the id", 5, 0)
    with pytest.raises(FrozenInstanceError):
        many.temperature = math.nan
    assert uniform(2**63, 5) == uniform(-(2**63), 5)  # outputs' seeds count up
    ours = given_by_flags(SamplingParams, Namespace(temperature=0.0, top_k=0, seed=0, prompt="a"))
    both = {"temperature": 5.0, "presence_penalty": 1.5, "frequency_penalty": 0.5}
    more = {"top_p": None, "do_sample": True, "max_length": 3}  # the penalties as vLLM reads them
    (tmp_path / "generation_config.json").write_text(json.dumps(both | more))
    assert suggested_sampling(tmp_path) == both and suggested_sampling(tmp_path / "none") == {}
    assert (suggested_sampling(tmp_path) | ours)["temperature"] == 0
    path = make_setting(Path("/50%off"), "a folder").metadata["flag"]["help"]
    assert path == "a folder (/50%%off)"  # a single % would end --help in a traceback
    # A chat starts calmly, unless its folder shapes the draws.
    for stored, calm in (({"max_new_tokens": 4}, {"temperature": 0.2, "top_p": 0.9}), (both, {})):
        (tmp_path / "generation_config.json").write_text(json.dumps(stored))
        found = {"max_tokens": 4} if calm else both
        assert first_sampling(tmp_path) == found | calm
        assert suggested_sampling(tmp_path) == found


# --- distribution() against a plain reference -----------------------------------------------------


def reference(logits, p, prompt, output):
    """Apply the definition of each setting, one after another.

    Returns:
        Probabilities after temperature; the ids surely kept; the ids on a border, where float32
        may come out either way.
    """
    scores = list(logits)
    for i, bias in p.logit_bias.items():
        scores[i] += bias
    for i in set(prompt) | set(output):
        r = p.repetition_penalty
        scores[i] = scores[i] / r if scores[i] > 0 else scores[i] * r
    for i in set(output):
        scores[i] -= p.presence_penalty + p.frequency_penalty * output.count(i)
    best = max(scores)
    if p.temperature == 0:
        first = scores.index(best)
        return [float(i == first) for i in range(len(scores))], {first}, set()
    weights = [math.exp((s - best) / p.temperature) for s in scores]
    probs = [w / sum(weights) for w in weights]
    order = sorted(range(len(scores)), key=lambda i: (-scores[i], i))  # of equals the lower id
    if p.top_k > 0:
        order = order[: p.top_k]
    total, before, sure, border = sum(probs[i] for i in order), 0.0, set(), set()
    for i in order:
        margins = [p.top_p - before / total, probs[i] / probs[order[0]] - p.min_p]
        if min(margins) > 1e-5:
            sure.add(i)
        elif min(margins) > -1e-5:
            border.add(i)
        before += probs[i]
    return probs, sure, border


V = 13
# Multiples of 1/4 and powers of two as penalties: float32 computes these scores exactly, so the
# reference has the same ties.
quarters = st.integers(-32, 32).map(lambda n: n / 4)
some_logits = st.lists(
    quarters | st.sampled_from([-INF, 0.0, 1.0, 1.0]), min_size=V, max_size=V
).filter(lambda row: max(row) > -INF)
ids = st.integers(0, V - 1)
seeds = st.integers(-(2**63), 2**63 - 1)
FREE = {
    "temperature": st.sampled_from([0, 1e-6, 0.25, 0.7, 1, 1.0, 3.0, 1e4]),
    "top_k": st.sampled_from([-1, 0, 1]) | st.integers(1, V + 2),
    "top_p": st.sampled_from([1.0, 1e-6]) | st.floats(0.01, 1),
    "min_p": st.sampled_from([0.0, 1.0]) | st.floats(0, 1),
    "repetition_penalty": st.sampled_from([1.0, 0.5, 2, 4.0]),
    "presence_penalty": st.integers(-8, 8).map(lambda n: n / 4),
    "frequency_penalty": st.integers(-8, 8).map(lambda n: n / 4),
    "logit_bias": st.dictionaries(ids, quarters, max_size=4),
}  # fmt: skip
any_params = st.fixed_dictionaries({"seed": seeds}, optional=FREE).map(
    lambda given: SamplingParams(**given)  # one of them alone, some, or all
)
texts = st.tuples(st.lists(ids, min_size=1, max_size=4), st.lists(ids, max_size=6))


@settings(few, max_examples=300)
@given(logits=some_logits, p=any_params, text=texts)
def test_settings_equal_their_reference(logits, p, text):
    """Draw random logits and settings, and compare distribution() with the reference. Catches: a
    filter or a penalty that is wrong, or in the wrong order; a logit of -inf (a mask) that is
    drawn."""
    got = distribution(torch.tensor([logits]), [row(*text, V, p)])
    assert (got.shape, got.dtype) == ((1, V), torch.float32)
    got = got[0].tolist()
    assert all(0 <= x <= 1 for x in got)
    assert sum(got) == pytest.approx(1, abs=1e-5)
    probs, sure, border = reference(logits, p, *text)
    keep = {i for i, p in enumerate(got) if p > 0}
    assert keep <= sure | border
    assert all(i in keep for i in sure if probs[i] > 1e-30)  # else float32 has no such number
    total = sum(probs[i] for i in keep)
    assert got == pytest.approx([probs[i] / total * (i in keep) for i in range(V)], abs=2e-6)
    (token,) = sample(torch.tensor([logits]), [row(*text, V, p)])
    assert token.id in keep  # temperature 0 and top_k 1 take the same one of equals


def some_distributions(V):
    """Return probabilities, (V,) each, by what they are like."""
    normal, ids = torch.randn(V, generator=torch.Generator().manual_seed(5)), torch.arange(V)
    logits = {
        **{f"normal, {width}": width * normal for width in (0.1, 1, 3, 10)},
        "flat": torch.zeros(V), "two peaks": normal + 20 * (ids % 4000 == 77),
        "bfloat16": (3 * normal + 20).bfloat16().float(),  # steps of 1/8: many are equal
        "three values": normal.clamp(-1, 1).round() * 4,
        **{f"masked but {n}": torch.where(ids % (V // n) == 7, normal, -INF) for n in (1, 5, 312)},
    }  # fmt: skip
    return {name: row.softmax(-1) for name, row in logits.items()}


FILTERS = [  # keep_likeliest selects 256 by default
    *({"top_k": k} for k in (1, 20, 255, 256, 257, 300, 2**31)),
    *({"top_p": p} for p in (1e-6, 0.5, 0.9, 0.999)), *({"min_p": p} for p in (1e-9, 0.01, 1.0)),
    {"top_k": 300, "top_p": 0.5}, {"top_k": 50, "top_p": 0.9, "min_p": 0.02},
]  # fmt: skip


def test_selecting_gives_what_sorting_gives(monkeypatch):
    """Filter many distributions by selecting the likeliest, and compare with a sort of all.
    Catches: other tokens kept than by a stable sort, among equals at a border; a token lost that
    was not selected; a mass of the selected tokens alone; one row's sort that changes its
    neighbours."""
    kinds = some_distributions(5000)
    table = [(name, SamplingParams(**each)) for each in FILTERS for name in kinds]
    probs, params = torch.stack([kinds[name] for name, _ in table]), [p for _, p in table]
    slow, sizes = keep_likeliest(probs, params, 5000), []
    count = lambda probs, *rest: sizes.append(len(probs)) or keep_likeliest(probs, *rest)  # noqa: E731
    monkeypatch.setattr(sampling, "keep_likeliest", count)
    fast = keep_likeliest(probs, params)
    assert {*sizes} == {1} and 0.2 * len(table) < len(sizes) < 0.6 * len(table)  # which had to be
    for each, a, b in zip(table, fast, slow, strict=True):
        assert torch.equal(a > 0, b > 0), each
    torch.testing.assert_close(fast, slow, atol=1e-6, rtol=0)
    for u in (0.0, 0.01, 0.5, 0.9, 0.999, BELOW_1):
        u = torch.full((len(table),), u, dtype=torch.float64)
        assert torch.equal(draw(fast, u), draw(slow, u))
    for each, p, together in zip(probs, params, fast, strict=True):
        assert torch.equal(keep_likeliest(each[None], [p])[0], together)  # to the last bit


@pytest.mark.parametrize("temperature", [0, 1])
def test_min_tokens(temperature):
    """Sample before and after min_tokens, where stop tokens are the likeliest. Catches: a greedy
    row that ends too soon; a stop token that no model has, used as an index; a count that includes
    the prompt, or starts at the first guess and not at the place that is asked about."""
    logits, given = torch.tensor([[1.0, 9, 2, 8, 0, 3]]), {"temperature": temperature, "top_k": 3}
    wish = SamplingParams(**given, min_tokens=2, stop_token_ids=[1], seed=5)
    ends = [row(prompt=[0] * 9, output=[0] * n, V=6, p=wish) for n in range(3)]
    for each in ends:
        each.end_ids.add(999)  # some checkpoints name an EOS that their models lack
    ends[0].end_ids |= {3}
    (first,), (second,), (third,) = (sample(logits, [each]) for each in ends)
    assert {first.id, second.id} <= {5, 2, 3} and first.id != 3
    assert third.id in (1, 3, 5) and (temperature or third.id == 1)
    assert distribution(logits, [ends[0].with_guesses([0])])[0, 1] == 0
    assert distribution(logits, [ends[0].with_guesses([0, 0])])[0, 1] > 0
    every = row(V=6, p=replace(wish, stop_token_ids=[*range(6)]))  # then none is left to draw
    assert sample(logits, [every])[0].id in range(6)
    ends[0].matcher = MagicMock()  # a structure ends where it ends, or nothing would be left
    ends[0].matcher.compute_logit_bias.return_value = bytes([0, 200, 0, 0, 0, 0])
    assert sample(logits, [ends[0]])[0].id == 1


def test_logits_at_the_edge():
    """Sample from rows of NaN, infinite, huge and half-precision logits, at temperatures near 0.
    Catches: an id outside the vocabulary; a log-probability that JSON has no word for; logits /
    1e-8 that overflow to NaN, which draws any id; half-precision sums, which bias a draw."""
    for bad in (math.nan, INF, -INF):
        logits = torch.randn(3, 7)
        logits[0, :6] = logits[2, 1:3] = -INF  # these are fine
        tokens = sample(logits, [row(V=7, logprobs=5, temperature=t) for t in (0, 1, 0)])
        assert tokens[0].logprob == 0
        assert all(-9999 <= p <= 0 for t in tokens for p in (t.logprob, *dict(t.top).values()))
        logits[1] = bad
        assert sampling.finite(logits).tolist() == [True, False, True]
    for temperature in (5e-324, 1e-38, 1e-12, 1e-9, 1e-8, 1e-6, 1e-3):
        for logits in ([1.0, 3, 3, 2], [3e38, -3e38, 3e38, 0], [-INF, 5, 5, -INF], [-3e38] * 4):
            tops = [i for i, x in enumerate(logits) if x == max(logits)]
            for filters in ({}, {"top_k": 2}, {"top_p": 0.9}, {"min_p": 0.5}):
                probs = probs_of(logits, temperature=temperature, **filters)
                assert sum(probs[i] for i in tops) == pytest.approx(1), (logits, filters)  # not NaN
    params = [{}, {"temperature": 0}, {"top_p": 0.9, "top_k": 50, "repetition_penalty": 1.3}]
    rows = [row(V=500, seed=3, output=[4], logprobs=5, **p) for p in params]
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        logits = (torch.randn(3, 500) * 4).to(dtype)
        got = distribution(logits, rows)
        assert got.dtype == torch.float32
        assert torch.equal(got, distribution(logits.float(), rows))
        assert sample(logits, rows) == sample(logits.float(), rows)


@settings(few, max_examples=50)
@given(
    batch=st.lists(st.tuples(some_logits, any_params, texts), min_size=1, max_size=6),
    data=st.data(),
)
def test_rows_are_independent(batch, data):
    """Sample random rows in random batches, and compare each with the row alone, to the last bit.
    Catches: one row's setting (greedy, a filter, a penalty) that leaks into its neighbours."""
    rows = [row(*text, V, p) for _, p, text in batch]
    logits = torch.tensor([x for x, _, _ in batch])
    mix = data.draw(st.permutations(range(len(rows))))[: data.draw(st.integers(1, len(rows)))]
    together = distribution(logits[mix], [rows[b] for b in mix])
    tokens = sample(logits[mix], [rows[b] for b in mix])
    for at, b in enumerate(mix):
        alone = logits[b : b + 1], [rows[b]]
        assert torch.equal(together[at], distribution(*alone)[0])  # to the last bit
        assert tokens[at] == sample(*alone)[0]


def test_many_rows_are_sampled_as_one_by_one():
    """Sample 19 rows at once, on two threads, and compare with one by one. Catches: where all rows
    take the likeliest, another one of several that tie; a setting or a random number of another
    row, where rows are sampled eight at a time or on two threads."""
    V = 40_000
    torch.set_num_threads(2)  # the fixture sets it back
    for dtype in (torch.float32, torch.bfloat16):
        logits = torch.randn(19, V).to(dtype)  # in bfloat16 there are ties
        logits[:, 7] = logits[:, 1900] = logits.amax(-1) + 1
        greedy = [row(V=V, temperature=0) for _ in logits]
        mixed = [row(V=V, temperature=b % 3 / 2, top_k=b % 5 * 9, seed=b) for b in range(19)]
        for batch in (greedy, mixed):
            one_by_one = [sample(logits[b : b + 1], [batch[b]])[0] for b in range(19)]
            assert sample(logits, batch) == one_by_one
            assert [t.id for t in one_by_one] == sampling.choose_ids(logits, batch)
        assert [t.id for t in sample(logits, greedy)] == [7] * 19
    torch.set_num_threads(1)


@few
@given(logits=some_logits, p=any_params, text=texts, guesses=st.lists(ids, max_size=4))
def test_what_was_seen_is_kept_up_to_date(logits, p, text, guesses):
    """Append tokens one by one, looking ahead past guesses, and compare with a new sequence of the
    same ids. Catches: a token that comes after the sampler has looked and counts twice or not at
    all; a look ahead that is short of a guess, or whose guesses stay; logits or sequences changed
    by a look."""
    (prompt, output), logits = text, torch.tensor([logits])
    kept, before = row(prompt, V=V, p=replace(p, max_tokens=len(output) + 1)), logits.clone()
    for n, token_id in enumerate([*output, 0]):
        state = copy.deepcopy({**vars(kept), "stream": 0})
        ahead, there = kept.with_guesses(guesses), row(prompt, [*output[:n], *guesses], V, p)
        got, want = (distribution(logits, [each]) for each in (ahead, there))
        assert torch.equal(got, want) and ahead.uniform() == there.uniform()
        assert sample(logits, [ahead]) == sample(logits, [there])
        assert torch.equal(logits, before)
        assert {**vars(kept), "stream": 0} == state and (guesses or ahead is kept)
        kept.append(Token(token_id))
    assert kept.finish_reason == "length"


def test_uniform_is_splitmix64():
    """Compare uniform() with splitmix64 as published, for seeds at the ends of their range.
    Catches: an operator of the mixer that binds otherwise than it reads; a negative seed, or one
    near 2^63, that leaves the 64-bit circle; requests without a seed that all get the same text."""
    mask, known = (1 << 64) - 1, (0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F)
    assert [uniform(0, i) for i in range(3)] == [(z >> 11) / 2**53 for z in known]
    for seed in (0, 1, -1, 2**32, 2**62 + 1, 2**63 - 1, -(2**63)):
        state = seed % (1 << 64)
        for i in range(20):  # Steele, Lea and Flood 2014, as published: the golden gamma is added
            state = (state + 0x9E3779B97F4A7C15) & mask
            z = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
            z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
            assert uniform(seed, i) == ((z ^ (z >> 31)) >> 11) / 2**53 < 1
    seeds = {row().seed for _ in range(50)}
    assert len(seeds) == 50 and all(0 <= s < 2**63 for s in seeds)  # can be given again as --seed


@settings(few, max_examples=100)
@given(
    weights=st.lists(
        st.sampled_from([0.0, 0.0, 1.0, 1e-7, 1e-30, 1e-40]) | st.floats(0, 1, width=32),
        min_size=1, max_size=20,
    ).filter(lambda w: sum(w) > 1e-3),
    u=st.sampled_from([0.0, BELOW_1, 1 - 2**-24, 5e-324]) | st.floats(0, BELOW_1),
)  # fmt: skip
@example(weights=[0.3, 0.3, 0.4, 0.0], u=BELOW_1)
@example(weights=[0.0, 1.0, 0.0], u=0.0)
@example(weights=[0.0, *[1.0] * 50_000, 0.0], u=BELOW_1)  # float32's sum ends below u
def test_draw_never_gives_the_impossible(weights, u):
    """Draw from random weights, many of them 0, at random numbers up to the last below 1. Catches:
    a number that rounds up to 1, so that the id is V or that of a banned token
    (GHSA-8wr5-jm2h-8r4f)."""
    probs = torch.tensor([weights])
    probs /= probs.sum()
    for dtype in (torch.float32, torch.float64):
        (got,) = draw(probs, torch.tensor([u], dtype=dtype)).tolist()
        assert 0 <= got < len(weights)
        assert probs[0, got] > 0
    quarters = torch.tensor([[1, 0, 2, 1]] * 4) / 4  # which float32 sums exactly
    assert draw(quarters, torch.arange(4) / 4).tolist() == [0, 2, 2, 3]


def chi_square(counts, probs):
    """Return the chance that a right sampler gives counts at least as far from probs (Pearson
    1900)."""
    n = sum(counts)
    assert all(c == 0 for c, p in zip(counts, probs) if p == 0), "drew an impossible token"
    cells = [(c, n * p) for c, p in zip(counts, probs) if p > 0]
    assert all(expect >= 5 for _, expect in cells), "too few draws for chi-square"
    x = sum((c - expect) ** 2 / expect for c, expect in cells)
    half = torch.tensor([(len(cells) - 1) / 2, x / 2], dtype=torch.float64)
    return torch.special.gammaincc(half[0], half[1]).item() if len(cells) > 1 else 1.0


LOGITS = [1.0, -0.5, 1.0, 0.25, -INF, 2.0, -2.0, 0.5]
PROMPT, OUTPUT = [0, 3], [5, 5, 1]
SETTINGS = {
    "plain": {}, "along a sequence": {}, "cold": {"temperature": 0.7}, "hot": {"temperature": 3.0},
    "top-k": {"top_k": 3}, "top-p": {"top_p": 0.8}, "min-p": {"min_p": 0.2},
    "repetition": {"repetition_penalty": 2.0}, "bias": {"logit_bias": {6: 3, 5: -1.5}},
    "presence and frequency": {"presence_penalty": 0.5, "frequency_penalty": 0.75},
    "all": {
        "temperature": 1.5, "top_k": 6, "top_p": 0.95, "min_p": 0.05, "repetition_penalty": 1.25,
        "presence_penalty": 0.25, "frequency_penalty": 0.25, "logit_bias": {6: 2},
    },
}  # fmt: skip


@pytest.mark.parametrize("name", SETTINGS)
def test_draws_have_the_right_chances(name):
    """Draw thousands of tokens, for consecutive seeds or along one sequence, and compare the counts
    with the reference by chi-square. Catches: a right distribution with a wrong draw; random
    numbers of one sequence that repeat or lean."""
    # The yardstick itself: in tables, 9 degrees of freedom have 1 % at 21.666, 2 shift^2 / 100.
    shift = math.sqrt(21.666 * 50)
    counts = [100 + shift, 100 - shift] + [100] * 8
    assert chi_square(counts, [0.1] * 10) == pytest.approx(0.01, rel=1e-3)
    params, along, drawn = SETTINGS[name], name == "along a sequence", []
    probs, sure, border = reference(LOGITS, SamplingParams(**params), PROMPT, OUTPUT)
    assert not {i for i in border if probs[i] > 0}, "choose settings that leave no doubt"
    rows = [row(PROMPT, [] if along else OUTPUT, 8, seed=11, **params) for _ in range(2000)]
    logits = torch.tensor([LOGITS]).expand(len(rows), -1)
    slow = {"repetition_penalty", "presence_penalty", "logit_bias"} & params.keys()
    for first in range(0, (2 if slow else 5) * len(rows), len(rows)):
        for i, one in enumerate(rows, first):
            if along:  # the length is the index of the random number
                one.ids = range(one.prompt_len + i)
            else:
                one.seed = i
        drawn += [t.id for t in sample(logits, rows)]
    total = sum(probs[i] for i in sure)
    expected = [p / total * (i in sure) for i, p in enumerate(probs)]
    assert chi_square([drawn.count(i) for i in range(8)], expected) > FALSE_ALARM


def test_logprobs_are_the_models_own(monkeypatch):
    """Sample with log-probabilities asked for in some rows, and compare with a log_softmax in
    float64. Catches: values taken after temperature and filters, so that a perplexity is wrong;
    another draw where they are asked for; an index error for the top 20 of 4 tokens; digits lost in
    half precision."""
    logits, rows = torch.randn(6, 40) * 3, []
    for n, wish in (
        (0, {}), (1, {"temperature": 0}), (5, {"temperature": 0.1, "top_k": 2}),
        (20, {"top_p": 0.3}), (3, {"repetition_penalty": 3.0, "logit_bias": {0: 50.0}}),
        (None, {"top_k": 3}),
    ):  # fmt: skip
        rows.append(row([1], [2], 40, seed=9, logprobs=n, **wish))
    plain = [row([1], [2], 40, p=replace(each.params, logprobs=None)) for each in rows]
    assert [t.id for t in sample(logits, plain)] == [t.id for t in sample(logits, rows)]
    for token, each, line in zip(sample(logits, rows), rows, logits.double().log_softmax(-1)):
        n = each.params.logprobs
        want = None if n is None else pytest.approx(line[token.id].item(), abs=1e-5)
        assert token.logprob == want
        best, best_ids = line.topk(n or 0)
        assert [i for i, _ in token.top] == best_ids.tolist()
        assert [x for _, x in token.top] == pytest.approx(best.tolist(), abs=1e-5)
    # A row that does not ask for them does not pay for them.
    scored, log_softmax = [], torch.Tensor.log_softmax
    monkeypatch.setattr(
        torch.Tensor, "log_softmax", lambda x, dim: scored.append(len(x)) or log_softmax(x, dim)
    )
    for batch in (rows, plain):
        sample(logits, batch)
    assert scored == [5]
    (token,) = sample(torch.tensor([[1.0, 2, 3, 4]]).bfloat16(), [row(V=4, logprobs=20)])
    assert [i for i, _ in token.top] == [3, 2, 1, 0]
    assert token.top[0][1] == pytest.approx(-0.4401897, abs=1e-5)


# --- Sequence: where it ends ----------------------------------------------------------------------


class Chars:
    """As much of a tokenizer as a Sequence asks for. Id i is the i-th of some strings."""

    def __init__(self, *tokens):
        self.tokens, self.special, self.dropped = tokens, {}, ""

    def is_text(self, token_id):
        return True

    def eos_ids(self, config):
        return {*config.eos_ids}

    def bytes_of(self, token_id):
        return self.tokens[token_id].encode()

    def decode(self, ids):
        return b"".join(map(self.bytes_of, ids)).decode(errors="replace")


class Bytes(Chars):
    """Id i is the byte i; half a character decodes to U+FFFD."""

    def bytes_of(self, token_id):
        return bytes([token_id])


ASCII, SENTENCES = Chars(*map(chr, range(128)), "  a", "  a b"), Tokenizer(SHAKESPEARE)
LETTERS = Chars("", "a", "b", "c", "ab", "ba", "aa", "abc", "bab", "ca")


def start(prompt=(1,), tokenizer=None, context=64, eos=(2,), max_seq_len=None, **params):
    params = SamplingParams(**params)
    return Sequence(list(prompt), params, config(2000, context, eos), tokenizer, max_seq_len)


def feed(sequence, ids):
    """Append ids until the sequence ends; check on the way that its text only grows."""
    for i in ids:
        before = sequence.text
        sequence.append(Token(i))
        assert sequence.text.startswith(before)
        if sequence.finish_reason:
            break
    return sequence


def test_ends():
    """Feed tokens to sequences with each kind of limit and stop, and check where they end. Catches:
    one token too many or too few, or the wrong reason; an ending token shown as text."""
    for options, ids, output, reason in (
        ({"max_tokens": 3}, [5] * 9, 3, "length"),
        # The context counts with the prompt, and max_seq_len can lower or raise it.
        ({"prompt": [1] * 3, "context": 7}, [5] * 99, 4, "length"),
        ({"prompt": [1] * 3, "max_seq_len": 5}, [5] * 99, 2, "length"),
        ({"prompt": [1] * 3, "context": 7, "max_seq_len": 9}, [5] * 99, 6, "length"),
        # EOS is honoured (gpt-fast runs on), any of several; and not where a benchmark says so.
        ({"eos": (2, 9)}, [65, 2, 66], 2, "stop"), ({"eos": (2, 9)}, [65, 9, 66], 2, "stop"),
        ({"ignore_eos": True, "max_tokens": 4}, [2, 5, 2, 2, 5], 4, "length"),
        # Stop tokens work beside EOS, and under ignore_eos.
        ({"stop_token_ids": [66, 67]}, [65, 67, 65], 2, "stop"),
        ({"stop_token_ids": [66]}, [2], 1, "stop"),
        ({"stop_token_ids": [2], "ignore_eos": True}, [2], 1, "stop"),
        # What ends by itself at its last token was not cut off.
        ({"max_tokens": 2}, [5, 2], 2, "stop"), ({"max_tokens": 2, "stop": "B"}, b"AB", 2, "stop"),
    ):  # fmt: skip
        for tokenizer in (ASCII, None) if "stop" not in options else (ASCII,):
            sequence = start(tokenizer=tokenizer, **options)
            prompt = list(sequence.ids)
            feed(sequence, ids)
            assert sequence.token_ids == list(ids[:output]), options
            assert sequence.ids == prompt + sequence.token_ids
            assert sequence.finish_reason == reason, options
            assert sequence.times == sorted(sequence.times)
            assert len(sequence.times) == output + 1
            shown = ids[: output - (reason == "stop")]
            assert sequence.text == (ASCII.decode(shown) if tokenizer else "")


def test_stop_strings():
    """Feed texts that end within, at or after a stop string. Catches: a text that could have become
    a stop string, lost when the sequence ends; what the detokenizer held back to the last, shown
    although it completes a stop string; a special token's text, which never matched; a thought, or
    a mark, that ends at a stop string."""
    for end, shown, reason in (
        ([2], "xa", "stop"), ([7], "xa", "stop"), (b"b", "xab", "length"), ([], "xa", "interrupted")
    ):  # fmt: skip
        sequence = feed(start([1], ASCII, stop="abc", max_tokens=3, stop_token_ids=[7]), b"xa")
        assert sequence.text == "x"
        feed(sequence, end)
        sequence.finish("interrupted")  # a second end changes nothing
        assert (sequence.text, sequence.finish_reason) == (shown, reason)
    # "<" begins a thought, and ">" ends it. "b" ends an answer, and no thought; nor does a stop
    # string that begins in a mark. A mark within an answer is text.
    for marks, ids, stop, thought, shown in (
        ("<>", b" <Ab>a<b", "b", "Ab", "a<"), ("<>", b" A<b", "b", "", " A<"),
        ("", b"<b>", "b", "", "<"), (">", b"Ab<b>a<b", "b", "Ab<b", "a<"),
        (">", b"Ab>a>a", ">a", "Ab", "a"), ("<>", b"<>  a b", " ", "", "  a"),
        (">", b">  a b", " ", "", "  a"), (">", [62, 128, 32], " ", "", "  a"),
        (">", [62, 129], " ", "", "  a"), ("<>", [32, 128, 32, 32], "  ", "", "   a"),
        ("<>", b"<Ab>>a", ">a", "Ab", ""),
        ("<>", b"a>b", "b", "", "a>"), ("<>", b">b>", "b", "", ">"),
        ("<>", b"<Ab>a<b", "<", "Ab", "a"), ("<>", b"<b>  a b", " ", "b", "  a"),
        ("<>", b"  a b", " ", "", "  a"), ("", b"  a b", " ", "", ""),
    ):  # fmt: skip
        sequence = start([1], ASCII, stop=stop, max_tokens=12)
        sequence.stream.marks = [*marks.encode(), -1] if marks else []
        feed(sequence, ids)
        assert (sequence.stream.thought, sequence.text) == (thought, shown), (marks, ids)
        assert sequence.finish_reason == "stop"
    for end in ([2], [], [120]):
        sequence = feed(start([65], Bytes(), stop="x\ufffd", max_tokens=4), [*b"ax\xc3", *end])
        sequence.finish("interrupted")
        assert sequence.text == "a"
    # Special tokens have no text, so the stop string <|im_end|> never matched.
    ids, end = SENTENCES.encode("the cat", add_special=False), SENTENCES.special["</s>"]
    for stop, count in (("</s>", len(ids) + 1), ("nothing", len(ids) + 2)):
        sequence = start([1], SENTENCES, eos=(), stop=stop, ignore_eos=True)
        feed(sequence, [*ids, end, ids[0]])
        assert len(sequence.tokens) == count
        assert sequence.text.startswith("the cat") and "s>" not in sequence.text


def check_streaming(tokenizer, prompt, ids, stops, min_tokens=0):
    """Compare with decoding all after each token, cut at the first stop string that ends after the
    first min_tokens, as in vLLM, without a tail that could still become one."""
    prompt, ids = list(prompt), list(ids)
    limits = {"max_tokens": len(ids), "min_tokens": min(min_tokens, len(ids))}
    sequence = start(prompt, tokenizer, 4096, (), stop=stops, **limits)
    starts = [stop[:n] for stop in stops for n in range(1, len(stop))]
    before = len(tokenizer.decode(prompt))
    exempt = len(tokenizer.decode(prompt + ids[: limits["min_tokens"]])) - before
    for n, token_id in enumerate(ids, 1):
        sequence.append(Token(token_id))
        whole = text = tokenizer.decode(prompt + ids[:n])[before:]
        reason = "length" if n == len(ids) else None
        found = [text.find(stop, max(0, exempt - len(stop) + 1)) for stop in stops]
        if found := [at for at in found if at >= 0]:
            text, reason = text[: min(found)], "stop"
        elif not reason:
            keep = max((len(each) for each in starts if text.endswith(each)), default=0)
            text = text[: len(text) - keep]
        assert text.startswith(sequence.text)  # so half a character is held back
        if reason or tokenizer is LETTERS:
            assert (sequence.text, sequence.finish_reason) == (text, reason)
        if reason:
            assert "".join(token.text for token in sequence.tokens) == whole  # a stop string, too
            return


some_bytes = st.text("aé€😀", max_size=3).map(str.encode) | st.binary(max_size=2)


@settings(few, max_examples=200)
@given(
    ids=st.lists(st.integers(0, 9), min_size=1, max_size=12),
    stops=st.lists(st.text("abc", min_size=1, max_size=4), max_size=4),
    parts=st.lists(some_bytes, min_size=1, max_size=6).filter(any),
    others=st.lists(st.text("aé€😀", min_size=1, max_size=3), max_size=3),
    min_tokens=st.integers(0, 4),
)
def test_streamed_text_is_the_plain_one(ids, stops, parts, others, min_tokens):
    """Stream random tokens and stop strings, and compare with plain decoding. Catches: a stop
    string missed, found late, or partly shown ("ab" in "aab"); one across characters split over
    tokens, or begun in the prompt; one within min_tokens, held back as the start of a longer one
    and found later."""
    check_streaming(LETTERS, [2], ids, stops)
    check_streaming(LETTERS, [2], ids, stops, min_tokens)
    check_streaming(Bytes(), b"a", b"".join(parts), others)
    # The space that a sentencepiece decoder drops in front of a window would shift the stop string.
    to_be = SENTENCES.encode("To be"), SENTENCES.encode(", or not to be: that is", False)
    check_streaming(SENTENCES, *to_be, [" to be:"])


def test_wrong_prompts():
    """Start sequences with prompts and ids that cannot run, and check the error. Catches: no token
    at all, which reaches the model (CVE-2024-8768); a prompt without room, cut; an id beyond the
    vocabulary, which crashes the kernel; a prompt's list shared with its sequence."""
    for prompt, options, words in (
        ([], {}, r"^prompt .*\b0 tokens\b.*some text"), ([1] * 70, {}, r"^prompt .*\b70\b.*\b64\b"),
        ([1] * 64, {}, r"^prompt .*\b64\b.*\b64\b.*--max-seq-len"),
        ([1] * 5, {"max_seq_len": 5}, r"^prompt .*\b5\b.*\b5\b"),
        ([5, 2000, -1], {}, r"^prompt .*\b2000: \[2000, -1\]"),
        ([1], {"logit_bias": {2000: 1.0}}, r"^logit_bias .*\b2000\b.*\b2000\b"),
        ([1], {"stop_token_ids": [2000]}, r"^stop_token_ids .*\b2000\b.*\b2000\b"),
    ):  # fmt: skip
        with pytest.raises(SettingError, match=words):
            start(prompt, **options)
    prompt = [0, 1999] + [1] * 61
    feed(start(prompt, logit_bias={1999: 1.0}), [5])
    assert len(prompt) == 63
