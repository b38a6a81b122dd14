"""The sampler against a plain reference, its chances by chi-square, and the life of a Sequence.

The references are written to be obvious: float64, Python lists, one rule after another. Every
chi-square test states its chance of false alarm; the seeds are fixed, so a run that passes today
passes until the code changes.
"""

import math
import re
from dataclasses import FrozenInstanceError, fields, replace
from itertools import pairwise

import pytest
import torch
from conftest import SHAKESPEARE
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

import sampling
from model import Config
from sampling import SamplingParams, Sequence, Token, distribution, draw, sample, uniform
from tokenizer import Tokenizer

few = settings(max_examples=60, deadline=None)  # deadline: the machine may be busy
FALSE_ALARM = 1e-6  # chance of each chi-square test to fail a right sampler
INF = math.inf


pytestmark = pytest.mark.usefixtures("one_thread")


def config(V: int = 300, context: int = 4096, eos: tuple[int, ...] = ()) -> Config:
    sizes = {
        "hidden_size": 2,
        "intermediate_size": 2,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
    }
    return Config(
        V, **sizes, num_key_value_heads=1, head_dim=2, max_position_embeddings=context, eos_ids=eos
    )


def row(prompt=(0,), output=(), V: int = 300, **params) -> Sequence:
    """A sequence that has already produced `output`."""
    sequence = Sequence(list(prompt), SamplingParams(**params), config(V))
    sequence.ids += output
    return sequence


def probs_of(logits: list[float], **kw) -> list[float]:
    return distribution(torch.tensor([logits]), [row(V=len(logits), **kw)])[0].tolist()


def kept(probs: list[float]) -> list[int]:
    return [i for i, p in enumerate(probs) if p > 0]


# --- SamplingParams -------------------------------------------------------------------------------

RANGES = {
    "temperature": (0, 1e4),
    "top_k": (-1, 2**31),
    "top_p": (1e-6, 1),
    "min_p": (0, 1),
    "repetition_penalty": (1e-6, 1e4),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "seed": (-(2**63), 2**63 - 1),
    "max_tokens": (1, 2**31),
    "logprobs": (0, 20),
    "prompt_logprobs": (0, 20),
    "n": (1, 128),
}
INTEGERS = {"top_k", "seed", "max_tokens", "logprobs", "prompt_logprobs", "n"}
OPTIONAL = {"seed", "logprobs", "prompt_logprobs"}


def refused(name: str, value) -> str:
    with pytest.raises(ValueError, match=rf"\b{name}\b") as caught:
        SamplingParams(**{name: value})
    return str(caught.value)


def test_every_setting_is_range_checked():
    """Bug: a field is added without a range, and NaN reaches the kernels through it."""
    others = {"logit_bias", "stop", "stop_token_ids", "ignore_eos"}
    assert {f.name for f in fields(SamplingParams)} == RANGES.keys() | others


@pytest.mark.parametrize("name", RANGES)
def test_range(name):
    """Bug: a bound that is off by one, or a message without the field and its range."""
    low, high = RANGES[name]
    if name in INTEGERS:
        below, above, inside = low - 1, high + 1, [low, high, low + 1]
    else:
        below, above = math.nextafter(low, -INF), math.nextafter(high, INF)
        inside = [low, high, float(low), float(high), (low + high) / 2]
    for value in inside:
        assert getattr(SamplingParams(**{name: value}), name) == value
    for value in (below, above, -(10**30), 10**30):
        message = refused(name, value)
        stated = re.search(r"(\S+?)\.\.(\S+?)[, ]", message)
        assert stated, message
        assert (float(stated[1]), float(stated[2])) == (float(low), float(high))


@pytest.mark.parametrize("name", RANGES)
def test_wrong_values(name):
    """Bug: NaN passes `not value < low`; True passes as 1; "1" fails later, inside a kernel."""
    wrong = [math.nan, INF, -INF, True, False, "1", b"1", [1], {}, 1j, torch.tensor(1.0)]
    wrong += [] if name in OPTIONAL else [None]
    wrong += [1.0, 1.5] if name in INTEGERS else []
    for value in wrong:
        refused(name, value)


@pytest.mark.parametrize("name", sorted(OPTIONAL))
def test_none_is_the_default(name):
    """Bug: a request that spells out null for an optional setting is refused."""
    assert getattr(SamplingParams(**{name: None}), name) is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("stop", [""]),
        ("stop", ""),
        ("stop", [1]),
        ("stop", b"ab"),
        ("stop", ["a", None]),
        ("stop", ["x"] * 17),
        ("stop", 5),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [True]),
        ("stop_token_ids", [1.0]),
        ("stop_token_ids", ["1"]),
        ("stop_token_ids", "12"),
        ("stop_token_ids", 5),
        ("logit_bias", {"1": 1}),
        ("logit_bias", {-1: 1}),
        ("logit_bias", {True: 1}),
        ("logit_bias", {1.0: 1}),
        ("logit_bias", {1: math.nan}),
        ("logit_bias", {1: INF}),
        ("logit_bias", {1: -INF}),
        ("logit_bias", {1: 100.5}),
        ("logit_bias", {1: -101}),
        ("logit_bias", {1: True}),
        ("logit_bias", {1: "1"}),
        ("logit_bias", {1: None}),
        ("logit_bias", [1]),
        ("ignore_eos", "no"),
        ("ignore_eos", 1),
    ],
)
def test_wrong_lists_and_flags(name, value):
    """Bug: the wrong type in a request ends in TypeError (a 500, a traceback), or "no" is true."""
    refused(name, value)


def test_good_lists():
    """Bug: one stop string is taken for a list of letters; bounds of a bias are off by one."""
    assert SamplingParams(stop="ab").stop == ("ab",)
    assert SamplingParams(stop=["ab", "c"] * 8).stop == ("ab", "c") * 8
    assert SamplingParams(logit_bias={0: -100, 7: 100, 8: 0.5}).logit_bias[7] == 100


def test_params_are_frozen():
    """Bug: settings change after their check."""
    with pytest.raises(FrozenInstanceError):
        SamplingParams().temperature = math.nan
    with pytest.raises(ValueError, match="temperature"):
        replace(SamplingParams(), temperature=math.nan)


# --- distribution() against a plain reference -----------------------------------------------------


def reference(
    logits: list[float], p: SamplingParams, prompt: list[int], output: list[int]
) -> tuple[list[float], set[int], set[int]]:
    """The definition of each setting, one after another.

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
    st.one_of(quarters, st.sampled_from([-INF, 0.0, 1.0, 1.0])), min_size=V, max_size=V
).filter(lambda row: max(row) > -INF)
ids = st.integers(0, V - 1)


def params_strategy(**fixed):
    free = {
        "temperature": st.sampled_from([0, 1e-6, 0.25, 0.7, 1, 1.0, 3.0, 1e4]),
        "top_k": st.one_of(st.sampled_from([-1, 0, 1]), st.integers(1, V + 2)),
        "top_p": st.one_of(st.just(1.0), st.just(1e-6), st.floats(0.01, 1)),
        "min_p": st.one_of(st.just(0.0), st.just(1.0), st.floats(0, 1)),
        "repetition_penalty": st.sampled_from([1.0, 0.5, 2, 4.0]),
        "presence_penalty": st.integers(-8, 8).map(lambda n: n / 4),
        "frequency_penalty": st.integers(-8, 8).map(lambda n: n / 4),
        "logit_bias": st.dictionaries(ids, quarters, max_size=4),
        "seed": st.integers(-(2**63), 2**63 - 1),
    }
    return st.builds(SamplingParams, **(free | {k: st.just(v) for k, v in fixed.items()}))


NEUTRAL = {
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "logit_bias": {},
    "seed": 0,
}


def check_against_reference(logits, p, prompt, output):
    sequence = Sequence(prompt, p, config(V))
    sequence.ids += output
    got = distribution(torch.tensor([logits]), [sequence])
    assert got.shape == (1, V)
    assert got.dtype == torch.float32
    got = got[0].tolist()
    assert all(0 <= x <= 1 for x in got)
    assert sum(got) == pytest.approx(1, abs=1e-5)
    probs, sure, border = reference(logits, p, prompt, output)
    keep = set(kept(got))
    assert keep <= sure | border
    assert all(i in keep for i in sure if probs[i] > 1e-30)  # else float32 has no such number
    total = sum(probs[i] for i in keep)
    assert got == pytest.approx([probs[i] / total * (i in keep) for i in range(V)], abs=2e-6)


@pytest.mark.parametrize("name", [n for n in NEUTRAL if n not in ("seed", "temperature")])
@settings(few, max_examples=40)
@given(
    data=st.data(),
    logits=some_logits,
    prompt=st.lists(ids, min_size=1, max_size=4),
    output=st.lists(ids, max_size=6),
    temperature=st.sampled_from([0, 0.5, 1.0, 2]),
)
def test_one_setting(name, data, logits, prompt, output, temperature):
    """Bug: one filter or penalty is wrong (which one, the parameter says)."""
    fixed = {k: v for k, v in NEUTRAL.items() if k != name} | {"temperature": temperature}
    check_against_reference(logits, data.draw(params_strategy(**fixed)), prompt, output)


@settings(few, max_examples=200)
@given(
    logits=some_logits,
    p=params_strategy(),
    prompt=st.lists(ids, min_size=1, max_size=4),
    output=st.lists(ids, max_size=6),
)
def test_all_settings_together(logits, p, prompt, output):
    """Bug: the settings are right alone but applied in the wrong order."""
    check_against_reference(logits, p, prompt, output)


@pytest.mark.parametrize("seed", range(12))
def test_hugging_face_agrees(seed):
    """Bug: our reference shares a misunderstanding with our code."""
    pick = torch.Generator().manual_seed(seed)
    V = 60
    logits = torch.randn(1, V, generator=pick) * 3  # no ties: Hugging Face keeps them all
    u = torch.rand(5, generator=pick).tolist()
    prompt = torch.randint(V, (5,), generator=pick).tolist()
    output = torch.randint(V, (7,), generator=pick).tolist()
    settings = {
        "temperature": 0.3 + 2 * u[0],
        "top_k": 1 + int(u[1] * V),
        "top_p": 0.2 + 0.8 * u[2],
        "min_p": 0.2 * u[3],
        "repetition_penalty": 0.7 + u[4],
    }
    chain = LogitsProcessorList(
        [
            RepetitionPenaltyLogitsProcessor(settings["repetition_penalty"]),
            TemperatureLogitsWarper(settings["temperature"]),
            TopKLogitsWarper(settings["top_k"]),
            TopPLogitsWarper(settings["top_p"]),
            MinPLogitsWarper(settings["min_p"]),
        ]
    )
    theirs = chain(torch.tensor([prompt + output]), logits.clone()).softmax(-1)
    ours = distribution(logits, [row(prompt, output, V, **settings)])
    assert torch.equal(ours > 0, theirs > 0)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)


# --- Each setting by example ----------------------------------------------------------------------


@pytest.mark.parametrize("V", [4, 7, 16, 33, 1000])
def test_top_k_keeps_exactly_k_of_equals(V):
    """Bug: comparing values with the k-th keeps every tie, so top_k=1 is not greedy."""
    for k in (1, 2, 3, V - 1, V):
        assert kept(probs_of([1.0] * V, top_k=k)) == list(range(k))
    logits = [0.0, 2.0, 1.0, 1.0] + [-1.0] * (V - 4)
    assert kept(probs_of(logits, top_k=2)) == [1, 2]


def test_top_k_off_and_too_large():
    """Bug: top_k beyond the vocabulary is an index error; -1 or 0 keeps nothing."""
    for k in (-1, 0, 4, 5, 2**31):
        assert probs_of([1.0, 0, 3, -2], top_k=k) == pytest.approx(probs_of([1.0, 0, 3, -2]))


@few
@given(logits=some_logits)
def test_top_k_1_is_argmax(logits):
    """Bug: top_k=1 and temperature 0 part ways at a tie."""
    first = logits.index(max(logits))
    assert kept(probs_of(logits, top_k=1)) == [first]
    assert kept(probs_of(logits, temperature=0)) == [first]
    for params in ({"temperature": 0}, {"top_k": 1, "temperature": 2.0}, {"top_p": 1e-6}):
        tokens = sample(torch.tensor([logits]), [row(V=V, seed=1, **params)])
        assert tokens == [Token(first)], params


def test_top_p_by_example():
    """Bug: top-p drops the token that crosses the mass, or keeps one more."""
    logits = [math.log(p) for p in (0.1, 0.5, 0.1, 0.3)]
    for top_p, expect in [
        (0.01, [1]),
        (0.49, [1]),
        (0.51, [1, 3]),
        (0.79, [1, 3]),
        (0.81, [0, 1, 3]),
        (0.91, [0, 1, 2, 3]),
        (1, [0, 1, 2, 3]),
    ]:
        assert kept(probs_of(logits, top_p=top_p)) == expect, top_p
    assert probs_of(logits, top_p=0.7) == pytest.approx([0, 5 / 8, 0, 3 / 8])
    # Of what top-k leaves: 5/8 is enough for 0.6, though 0.5 of the whole would not be.
    assert kept(probs_of(logits, top_k=2, top_p=0.6)) == [1]


def test_min_p_by_example():
    """Bug: min-p compares with 1 in place of the likeliest token."""
    logits = [math.log(p) for p in (0.1, 0.5, 0.1, 0.3)]
    assert kept(probs_of(logits, min_p=0.19)) == [0, 1, 2, 3]
    assert kept(probs_of(logits, min_p=0.21)) == [1, 3]
    assert kept(probs_of(logits, min_p=0.61)) == [1]
    assert kept(probs_of([2.0, 1, 2, 2], min_p=1.0)) == [0, 2, 3]


def test_penalties_by_example():
    """Bug: presence or frequency counts the prompt; repetition forgets it or divides a negative."""
    seen = {"prompt": [0, 0], "output": [1, 1, 1]}
    want = torch.tensor([[3.0, 3 - 0.5 - 3 * 0.25, -3.0]]).softmax(-1)[0].tolist()
    got = probs_of([3.0, 3, -3], **seen, presence_penalty=0.5, frequency_penalty=0.25)
    assert got == pytest.approx(want)
    want = torch.tensor([[1.5, -6.0, 3.0]]).softmax(-1)[0].tolist()
    assert probs_of([3.0, -3, 3], **seen, repetition_penalty=2.0) == pytest.approx(want)


def test_frequency_without_presence():
    """Bug: one of the two penalties works only beside the other, or before there is any output."""
    for name in ("presence_penalty", "frequency_penalty"):
        assert probs_of([1.0, 1], output=[0], **{name: 1.0})[0] == pytest.approx(1 / (1 + math.e))
        assert probs_of([1.0, 1], output=[], **{name: 1.0}) == [0.5, 0.5]


def test_logit_bias_by_example():
    """Bug: a bias is applied after temperature, or as a factor; integers are refused."""
    want = torch.tensor([[1.0, 3.0]]).softmax(-1)[0].tolist()
    assert probs_of([2.0, 2], logit_bias={1: 4}, temperature=2) == pytest.approx(want)
    assert kept(probs_of([2.0, 2], logit_bias={1: -100}, top_k=1)) == [0]
    assert sample(torch.tensor([[9.0, 1]]), [row(V=2, temperature=0, logit_bias={1: 10})])[0].id


def test_greedy_sees_the_penalties():
    """Bug: temperature 0 takes the argmax of the raw logits, whatever the penalties."""
    for params in (
        {"repetition_penalty": 10.0},
        {"presence_penalty": 2.0},
        {"frequency_penalty": 2.0},
        {"logit_bias": {0: -5}},
    ):
        tokens = sample(torch.tensor([[2.0, 1]]), [row([0], [0], 2, temperature=0, **params)])
        assert tokens[0].id == 1, params


# --- Numbers at the edge --------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [5e-324, 1e-38, 1e-12, 1e-9, 1e-8, 1e-6, 1e-3])
def test_tiny_temperature(temperature):
    """Bug: logits / 1e-8 overflows to inf, inf - inf is NaN, and a NaN row draws any id at all."""
    for logits in ([1.0, 3, 3, 2], [3e38, -3e38, 3e38, 0], [-INF, 5, 5, -INF], [-3e38] * 4):
        tops = [i for i, x in enumerate(logits) if x == max(logits)]
        for filters in ({}, {"top_k": 2}, {"top_p": 0.9}, {"min_p": 0.5}):
            probs = probs_of(logits, temperature=temperature, **filters)
            assert sum(probs[i] for i in tops) == pytest.approx(1), (logits, filters)  # NaN is not


@few
@given(logits=some_logits, p=params_strategy(), data=st.data())
def test_banned_tokens_stay_banned(logits, p, data):
    """Bug: a logit of -inf (a mask) becomes NaN, or is drawn."""
    banned = {i for i, x in enumerate(logits) if x == -INF}
    sequence = Sequence([data.draw(ids)], p, config(V))
    sequence.ids += data.draw(st.lists(ids, max_size=3))
    (token,) = sample(torch.tensor([logits]), [sequence])
    assert token.id not in banned


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_any_float_dtype(dtype):
    """Bug: probabilities and their sums are computed in half precision, and a draw is biased."""
    logits = (torch.randn(3, 500) * 4).to(dtype)
    params = [{}, {"temperature": 0}, {"top_p": 0.9, "top_k": 50, "repetition_penalty": 1.3}]
    rows = [row(V=500, seed=3, output=[4], logprobs=5, **p) for p in params]
    got = distribution(logits, rows)
    assert got.dtype == torch.float32
    assert torch.equal(got, distribution(logits.float(), rows))
    assert sample(logits, rows) == sample(logits.float(), rows)
    greedy = [row(V=500, temperature=0)] * 3
    assert [t.id for t in sample(logits, greedy)] == logits.argmax(-1).tolist()


def test_logits_are_not_modified():
    """Bug: float32 logits are changed in place, so a second look at them sees the penalties."""
    logits = torch.randn(2, V)
    before = logits.clone()
    every = {
        "temperature": 0.5,
        "top_k": 3,
        "top_p": 0.9,
        "min_p": 0.1,
        "repetition_penalty": 2.0,
        "presence_penalty": 1.0,
        "frequency_penalty": 1.0,
        "logit_bias": {2: 5.0},
    }
    sample(logits, [row([0], [1, 1], V, logprobs=3, **every), row(V=V, temperature=0)])
    assert torch.equal(logits, before)


def test_rows_are_read_only():
    """Bug: sampling leaves a mark on the sequence, so a preempted one goes on differently."""
    sequence = row([0], [1], V, seed=4, repetition_penalty=2.0)
    state = {k: str(v) for k, v in vars(sequence).items()}
    sample(torch.randn(1, V), [sequence])
    assert {k: str(v) for k, v in vars(sequence).items()} == state


# --- Independence of the rows of a batch ----------------------------------------------------------

some_rows = st.lists(
    st.tuples(some_logits, params_strategy(), st.lists(ids, max_size=4)), min_size=1, max_size=6
)


@settings(few, max_examples=100)
@given(batch=some_rows, data=st.data())
def test_rows_are_independent(batch, data):
    """Bug: one row's setting (greedy, a filter, a penalty) leaks into its neighbours."""
    rows = []
    for _, p, output in batch:
        rows.append(Sequence([0], p, config(V)))
        rows[-1].ids += output
    logits = torch.tensor([x for x, _, _ in batch])
    alone = [
        (distribution(logits[b : b + 1], [r])[0], sample(logits[b : b + 1], [r])[0])
        for b, r in enumerate(rows)
    ]
    mix = data.draw(st.permutations(range(len(rows))))[: data.draw(st.integers(1, len(rows)))]
    together = distribution(logits[mix], [rows[b] for b in mix])
    tokens = sample(logits[mix], [rows[b] for b in mix])
    for at, b in enumerate(mix):
        assert torch.equal(together[at], alone[b][0])  # to the last bit
        assert tokens[at] == alone[b][1]


@pytest.fixture
def two_threads():
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


def test_rows_are_independent_at_a_real_vocabulary(two_threads):
    """Bug: one long row is summed by several threads, a batch is not, and the sums differ by more
    than rounding."""
    V = 70_000
    logits = torch.randn(4, V) * 3
    params = [{"top_k": 40_000}, {"top_p": 0.95}, {}, {"min_p": 1e-4, "temperature": 2.0}]
    rows = [row(V=V, seed=b, **p) for b, p in enumerate(params)]
    together = distribution(logits, rows)
    for b, one in enumerate(rows):
        alone = distribution(logits[b : b + 1], [one])[0]
        torch.testing.assert_close(alone, together[b])  # sums are split otherwise: not bitwise


def tokens_of(seed: int | None, steps: int, neighbours: list[Sequence] | None = None):
    """Sample `steps` tokens of a sequence that sees the same logits at every step."""
    mine, others = row(V=V, seed=seed), neighbours or []
    logits = torch.linspace(-1, 1, V).expand(1 + len(others), V)
    for _ in range(steps):
        tokens = sample(logits, [*others, mine])
        mine.append(tokens[-1])
        for other, token in zip(others, tokens):
            other.append(token)
    return mine.output_ids


@settings(few, max_examples=30)
@given(seed=st.integers(-(2**63), 2**63 - 1), others=st.lists(st.integers(0, 9), max_size=3))
def test_seed_decides(seed, others):
    """Bug: the tokens of a seed depend on a shared generator, so on who else is in the batch."""
    neighbours = [row(V=V, seed=s, top_k=s, temperature=s / 4) for s in others]
    assert tokens_of(seed, 8) == tokens_of(seed, 8, neighbours)


def test_seeds_differ():
    """Bug: the seed is not used, or only its low bits are. 13^-32 per pair to collide by chance."""
    seeds = [*range(-10, 10), 2**62, 2**62 + 1, -(2**63), 2**63 - 1, 2**32, 2**33]
    assert len({tuple(tokens_of(s, 32)) for s in seeds}) == len(seeds)


def test_no_seed_is_a_fresh_one():
    """Bug: without a seed every request gets the same text."""
    assert tokens_of(None, 32) != tokens_of(None, 32)
    seeds = {row().seed for _ in range(50)}
    assert len(seeds) == 50
    assert all(0 <= s < 2**63 for s in seeds)  # can be given again as --seed


def test_seed_resumes_in_the_middle():
    """Bug: a preempted sequence starts its random numbers again, or goes on where it was not."""
    whole = tokens_of(7, 20)
    again = row(V=V, seed=7, output=whole[:11])
    again_tokens = []
    for _ in range(9):
        again.append(sample(torch.linspace(-1, 1, V)[None], [again])[0])
        again_tokens.append(again.output_ids[-1])
    assert again_tokens == whole[11:]


# --- uniform() and draw() -------------------------------------------------------------------------


def splitmix64(seed: int):
    """Steele, Lea and Flood 2014, as published: a state that grows by the golden gamma."""
    mask, state = (1 << 64) - 1, seed % (1 << 64)
    while True:
        state = (state + 0x9E3779B97F4A7C15) & mask
        z = state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        yield z ^ (z >> 31)


def test_uniform_known_answers():
    """Bug: an operator of the mixer binds differently than it reads."""
    known = (0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F)
    assert [uniform(0, i) for i in range(3)] == [(z >> 11) / 2**53 for z in known]


@few
@given(seed=st.integers(-(2**63), 2**63 - 1))
@example(seed=-1)
@example(seed=2**63 - 1)
@example(seed=-(2**63))
def test_uniform_is_splitmix64(seed):
    """Bug: a negative seed, or one near 2^63, leaves the 64-bit circle."""
    stream = splitmix64(seed)
    assert [uniform(seed, i) for i in range(20)] == [
        (next(stream) >> 11) / 2**53 for _ in range(20)
    ]


@settings(few, max_examples=300)
@given(seed=st.integers(-(2**63), 2**63 - 1), index=st.integers(0, 2**31))
def test_uniform_is_below_1(seed, index):
    """Bug: u = 1 draws past the last token."""
    assert 0 <= uniform(seed, index) < 1


def chi_square(counts: list[int], probs: list[float]) -> float:
    """Chance that a right sampler gives counts at least as far from probs (Pearson 1900)."""
    n = sum(counts)
    assert all(c == 0 for c, p in zip(counts, probs) if p == 0), "drew an impossible token"
    cells = [(c, n * p) for c, p in zip(counts, probs) if p > 0]
    assert all(expect >= 5 for _, expect in cells), "too few draws for chi-square"
    x = sum((c - expect) ** 2 / expect for c, expect in cells)
    half = torch.tensor([(len(cells) - 1) / 2, x / 2], dtype=torch.float64)
    return torch.special.gammaincc(half[0], half[1]).item() if len(cells) > 1 else 1.0


def test_chi_square_itself():
    """Bug: the yardstick is wrong. Tables: with 1 degree 3.841 is at 5 %, with 9 21.666 at 1 %."""
    shift = math.sqrt(3.841 * 1000) / 2  # x = (2 shift)^2 / 1000
    assert chi_square([500 + shift, 500 - shift], [0.5, 0.5]) == pytest.approx(0.05, rel=1e-3)
    shift = math.sqrt(21.666 * 50)  # x = 2 shift^2 / 100
    counts = [100 + shift, 100 - shift] + [100] * 8
    assert chi_square(counts, [0.1] * 10) == pytest.approx(0.01, rel=1e-3)


@pytest.mark.parametrize("which", ["indices of a seed", "seeds at an index", "pairs", "strided"])
def test_uniform_is_equidistributed(which):
    """Bug: neighbouring seeds or indices are correlated. False alarm: 1e-6 each."""
    n, bins = 20_000, 64
    if which == "pairs":  # (u_i, u_i+1) over an 8 x 8 grid
        u = [uniform(5, i) for i in range(2 * n)]
        cells = [int(a * 8) * 8 + int(b * 8) for a, b in zip(u[::2], u[1::2])]
    else:
        makers = {
            "indices of a seed": lambda i: uniform(123, i),
            "seeds at an index": lambda i: uniform(i, 3),
            "strided": lambda i: uniform(i << 32, i % 7),
        }
        cells = [int(makers[which](i) * bins) for i in range(n)]
    counts = [cells.count(c) for c in range(bins)]
    assert chi_square(counts, [1 / bins] * bins) > FALSE_ALARM


def test_draw_docstring_example():
    """Bug: u exactly on a border picks the impossible token that ends there."""
    probs = torch.tensor([[0.2, 0.0, 0.8]]).expand(4, 3)
    got = draw(probs, torch.tensor([0.1, 0.2, 0.0, 0.999]))
    assert got.tolist() == [0, 2, 0, 2]
    assert got.dtype == torch.int64


@settings(few, max_examples=200)
@given(
    cuts=st.lists(st.integers(0, 256), min_size=0, max_size=8),
    steps=st.lists(st.integers(0, 1023), min_size=1, max_size=6),
)
def test_draw_inverts_the_cumulative_distribution(cuts, steps):
    """Bug: off by one at a border. Multiples of 1/256 and 1/1024: float32 sums them exactly."""
    edges = [0, *sorted(cuts), 256]
    weights = [b - a for a, b in pairwise(edges)]
    probs = torch.tensor([weights]).expand(len(steps), -1) / 256
    got = draw(probs, torch.tensor([k / 1024 for k in steps])).tolist()
    assert got == [
        next(i for i in range(len(weights)) if sum(weights[: i + 1]) * 4 > k) for k in steps
    ]


BELOW_1 = math.nextafter(1, 0)  # what uniform can give; as float32 it is 1.0


@settings(few, max_examples=300)
@given(
    weights=st.lists(
        st.one_of(st.sampled_from([0.0, 0.0, 1.0, 1e-7, 1e-30, 1e-40]), st.floats(0, 1, width=32)),
        min_size=1,
        max_size=20,
    ).filter(lambda w: sum(w) > 1e-3),
    u=st.one_of(st.sampled_from([0.0, BELOW_1, 1 - 2**-24, 5e-324]), st.floats(0, BELOW_1)),
)
@example(weights=[0.3, 0.3, 0.4, 0.0], u=BELOW_1)
@example(weights=[0.0, 1.0, 0.0], u=0.0)
def test_draw_never_gives_the_impossible(weights, u):
    """Bug: u rounds up to 1, and the id is V or that of a banned token (GHSA-8wr5-jm2h-8r4f)."""
    probs = torch.tensor([weights])
    probs /= probs.sum()
    for dtype in (torch.float32, torch.float64):
        (got,) = draw(probs, torch.tensor([u], dtype=dtype)).tolist()
        assert 0 <= got < len(weights)
        assert probs[0, got] > 0


@pytest.mark.parametrize("u", [0.0, BELOW_1])
def test_extreme_u_at_a_real_vocabulary(u, monkeypatch):
    """Bug: the float32 sum over many tokens ends below u, and the id is V."""
    V = 50_000
    monkeypatch.setattr(sampling, "uniform", lambda seed, index: u)
    logits = torch.randn(3, V) * 4
    logits[:, -7:] = -INF
    logits[:, :5] = -INF
    rows = [row(V=V, top_k=k, top_p=p) for k, p in ((0, 1.0), (100, 1.0), (0, 0.9))]
    probs = distribution(logits, rows)
    for b, token in enumerate(sample(logits, rows)):
        assert probs[b, token.id] > 0


# --- What is drawn, counted -----------------------------------------------------------------------

DRAWS = 20_000
LOGITS = [1.0, -0.5, 1.0, 0.25, -INF, 2.0, -2.0, 0.5]
PROMPT, OUTPUT = [0, 3], [5, 5, 1]
SETTINGS = {
    "plain": {},
    "cold": {"temperature": 0.7},
    "hot": {"temperature": 3.0},
    "top-k": {"top_k": 3},
    "top-p": {"top_p": 0.8},
    "min-p": {"min_p": 0.2},
    "repetition": {"repetition_penalty": 2.0},
    "presence and frequency": {"presence_penalty": 0.5, "frequency_penalty": 0.75},
    "bias": {"logit_bias": {6: 3, 5: -1.5}},
    "all": {
        "temperature": 1.5,
        "top_k": 6,
        "top_p": 0.95,
        "min_p": 0.05,
        "repetition_penalty": 1.25,
        "presence_penalty": 0.25,
        "frequency_penalty": 0.25,
        "logit_bias": {6: 2},
    },
}


def expected_probs(**params) -> list[float]:
    probs, sure, border = reference(LOGITS, SamplingParams(**params), PROMPT, OUTPUT)
    assert not {i for i in border if probs[i] > 0}, "choose settings that leave no doubt"
    total = sum(probs[i] for i in sure)
    return [p / total * (i in sure) for i, p in enumerate(probs)]


def count_draws(dtype=torch.float32, **params) -> list[int]:
    """Draw once for each of DRAWS consecutive seeds, as --num-samples does."""
    rows = [row(PROMPT, OUTPUT, 8, seed=s, **params) for s in range(2000)]
    logits = torch.tensor([LOGITS], dtype=dtype)
    drawn = []
    for first in range(0, DRAWS, len(rows)):
        for s, one in enumerate(rows):
            one.seed = first + s
        drawn += [t.id for t in sample(logits.expand(len(rows), -1), rows)]
    return [drawn.count(i) for i in range(8)]


@pytest.mark.parametrize("name", SETTINGS)
def test_draws_have_the_right_chances(name):
    """Bug: the distribution is right and the draw is not. False alarm: 1e-6 for each setting."""
    p = chi_square(count_draws(**SETTINGS[name]), expected_probs(**SETTINGS[name]))
    assert p > FALSE_ALARM


def test_draws_along_one_sequence():
    """Bug: the random numbers of one sequence repeat or lean. False alarm: 1e-6."""
    one, drawn = row(PROMPT, [], 8, seed=11), []
    for i in range(DRAWS):
        one.ids = [0] * (one.prompt_len + i)  # its length is the index of the random number
        drawn += sample(torch.tensor([LOGITS]), [one])
    counts = [[t.id for t in drawn].count(i) for i in range(8)]
    assert chi_square(counts, expected_probs()) > FALSE_ALARM


@pytest.mark.parametrize(
    ("name", "broken"),
    [
        ("plain", {"uniform": lambda seed, i: uniform(seed, i) ** 1.1}),
        ("plain", {"uniform": lambda seed, i: int(uniform(seed, i) * 16) / 16}),
        ("plain", {"uniform": lambda seed, i: uniform(0, i)}),  # the seed is ignored
        ("cold", {"distribution": lambda x, rows: x.softmax(-1)}),
        ("top-k", {"draw": lambda p, u: (p.cumsum(-1) < u[:, None] * 0.9).sum(-1)}),
        ("plain", {"draw": lambda p, u: (p**1.1).multinomial(1)[:, 0]}),
        ("bias", {"draw": lambda p, u: p.argmax(-1)}),
    ],
)
def test_chi_square_catches_a_broken_sampler(name, broken, monkeypatch):
    """Bug: a test of chances that could not fail."""
    for attribute, replacement in broken.items():
        monkeypatch.setattr(sampling, attribute, replacement)
    try:
        p = chi_square(count_draws(**SETTINGS[name]), expected_probs(**SETTINGS[name]))
    except AssertionError as error:
        assert "impossible" in str(error)
    else:
        assert p < FALSE_ALARM


# --- Log-probabilities ----------------------------------------------------------------------------


def test_logprobs_are_the_models_own():
    """Bug: they are reported after temperature and filters: a perplexity made of them is wrong."""
    logits = torch.randn(5, 40) * 3
    params = [
        {},
        {"temperature": 0},
        {"temperature": 0.1, "top_k": 2},
        {"repetition_penalty": 3.0, "logit_bias": {0: 50.0}},
        {"top_p": 0.3},
    ]
    rows = [row([1], [2], 40, seed=9, logprobs=n, **p) for n, p in zip((0, 1, 5, 20, 3), params)]
    want = logits.double().log_softmax(-1)
    for b, (token, n) in enumerate(zip(sample(logits, rows), (0, 1, 5, 20, 3))):
        assert token.logprob == pytest.approx(want[b, token.id].item(), abs=1e-5)
        assert len(token.top) == n
        best, best_ids = want[b].topk(n)
        assert [i for i, _ in token.top] == best_ids.tolist()
        assert [x for _, x in token.top] == pytest.approx(best.tolist(), abs=1e-5)


def test_logprobs_do_not_change_the_token():
    """Bug: asking for log-probabilities takes another path that draws differently."""
    logits = torch.randn(8, V)
    for params in ({}, {"temperature": 0}, {"top_k": 3}):
        plain = sample(logits, [row(V=V, seed=s, **params) for s in range(8)])
        asked = sample(logits, [row(V=V, seed=s, logprobs=2, **params) for s in range(8)])
        assert [t.id for t in plain] == [t.id for t in asked]
        assert all(t.logprob is None and t.top == () for t in plain)


def test_logprobs_only_where_asked():
    """Bug: a neighbour's wish for log-probabilities shows up in other rows."""
    wishes = [None, 2, 0, None]
    tokens = sample(torch.randn(4, V), [row(V=V, logprobs=n) for n in wishes])
    assert [t.logprob is None for t in tokens] == [True, False, False, True]
    assert [len(t.top) for t in tokens] == [0, 2, 0, 0]


def test_logprobs_of_a_small_vocabulary():
    """Bug: the top 20 of 4 tokens is an index error; half-precision logits lose their digits."""
    logits = torch.tensor([[1.0, 2, 3, 4]], dtype=torch.bfloat16)
    (token,) = sample(logits, [row(V=4, logprobs=20)])
    assert [i for i, _ in token.top] == [3, 2, 1, 0]
    assert token.top[0][1] == pytest.approx(-0.4401897, abs=1e-5)


# --- Sequence: where it ends ----------------------------------------------------------------------


class Fake:
    """As much of a tokenizer as a Sequence asks for."""

    def is_text(self, token_id):
        return True


class Chars(Fake):
    """Id i is the i-th of some strings."""

    def __init__(self, *tokens: str) -> None:
        self.tokens = tokens

    def decode(self, ids):
        return "".join(self.tokens[i] for i in ids)


class Bytes(Fake):
    """Id i is the byte i; half a character decodes to U+FFFD."""

    def decode(self, ids):
        return bytes(ids).decode("utf-8", "replace")


ASCII = Chars(*map(chr, range(128)))


def start(prompt=(1,), tokenizer=None, context=64, eos=(2,), max_seq_len=None, **params):
    return Sequence(
        list(prompt), SamplingParams(**params), config(300, context, eos), tokenizer, max_seq_len
    )


def feed(sequence: Sequence, ids) -> Sequence:
    """Append ids until the sequence ends; check on the way that its text only grows."""
    for i in ids:
        before = sequence.text
        sequence.append(Token(i))
        assert sequence.text.startswith(before)
        if sequence.finish_reason:
            break
    return sequence


def test_max_tokens():
    """Bug: one token too many or too few."""
    sequence = feed(start(max_tokens=3), [5] * 9)
    assert sequence.output_ids == [5, 5, 5]
    assert sequence.finish_reason == "length"
    assert sequence.ids == [1, 5, 5, 5]
    assert len(sequence.times) == 4
    assert sequence.times == sorted(sequence.times)


@pytest.mark.parametrize(
    ("max_seq_len", "context", "new"), [(None, 7, 4), (5, 64, 2), (9, 7, 6), (4, 64, 1)]
)
def test_max_seq_len(max_seq_len, context, new):
    """Bug: the context is not counted with the prompt, or max_seq_len cannot lower or raise it."""
    sequence = feed(start([1, 1, 1], context=context, max_seq_len=max_seq_len), [5] * 99)
    assert len(sequence.output_ids) == new
    assert sequence.finish_reason == "length"


def test_eos_ends():
    """Bug: EOS is not honoured (gpt-fast runs on), or only the first of several EOS ids is."""
    for eos in (2, 9):
        sequence = feed(start(eos=(2, 9), tokenizer=ASCII), [65, eos, 66])
        assert sequence.output_ids == [65, eos]
        assert sequence.finish_reason == "stop"
        assert sequence.text == "A"


def test_ignore_eos():
    """Bug: a benchmark that asks for n tokens gets fewer."""
    sequence = feed(start(ignore_eos=True, max_tokens=4), [2, 5, 2, 2, 5])
    assert sequence.output_ids == [2, 5, 2, 2]
    assert sequence.finish_reason == "length"


def test_stop_token_ids():
    """Bug: a stop token is shown, or it works only in place of EOS, or not under ignore_eos."""
    for params in ({}, {"ignore_eos": True}):
        sequence = feed(start(stop_token_ids=[66, 67], tokenizer=ASCII, **params), [65, 67, 65])
        assert (sequence.text, sequence.finish_reason) == ("A", "stop")
        assert sequence.output_ids == [65, 67]
    assert feed(start(stop_token_ids=[66]), [2]).finish_reason == "stop"
    assert feed(start(stop_token_ids=[2], ignore_eos=True), [2]).finish_reason == "stop"


def test_eos_at_the_last_token_is_stop():
    """Bug: a sequence that ended by itself is reported as cut off."""
    assert feed(start(max_tokens=2), [5, 2]).finish_reason == "stop"
    assert feed(start(max_tokens=2, stop="B", tokenizer=ASCII), b"AB").finish_reason == "stop"


def test_an_ended_sequence_takes_no_token():
    """Bug: the loop runs past the end."""
    sequence = feed(start(max_tokens=1), [5])
    with pytest.raises(AssertionError):
        sequence.append(Token(5))


def test_without_tokenizer():
    """Bug: ids only, as the scheduler's tests use it, needs text."""
    sequence = feed(start(max_tokens=2), [5, 6])
    assert (sequence.text, sequence.output_ids) == ("", [5, 6])


# --- Sequence: stop strings -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stops", "tokens", "text", "shown"),
    [
        ("ab", ["a", "a", "b"], "a", ["", "a", "a"]),  # the classic: the first a is no false start
        ("ab", ["aa", "bb"], "a", ["a", "a"]),
        ("ab", ["xaby"], "x", ["x"]),
        ("ab", ["a", "c", "a", "b"], "ac", ["", "ac", "ac", "ac"]),
        ("aba", ["a", "b", "a", "b", "a"], "", ["", "", ""]),  # overlapping: the first one counts
        ("aba", ["x", "ab", "b", "aba"], "xabb", ["x", "x", "xabb", "xabb"]),
        ("aab", ["a", "a", "a", "b"], "a", ["", "", "a", "a"]),
        ("abab", ["ab", "aab", "ab"], "aba", ["", "aba", "aba"]),  # "aba" turns out to be text
        ("hello", ["hel", "lo", "x"], "", ["", ""]),  # over a token border
        ("STOP", ["x S", "T", "O", "P!"], "x ", ["x ", "x ", "x ", "x "]),
        ("STOP", ["x S", "T", "O", "X"], "x STOX", ["x ", "x ", "x ", "x STOX"]),
        (("ab", "abc"), ["x", "ab", "c"], "x", ["x", "x"]),  # one the prefix of the other
        (("abc", "ab"), ["x", "abc"], "x", ["x", "x"]),
        (("abcd", "bc"), ["ab", "c", "d"], "a", ["", "a"]),  # the shorter one is complete first
        (("abcd", "bc"), ["abcd"], "", [""]),  # both at once: the earlier place
        (("b", "a"), ["xab"], "x", ["x"]),
        (("\n\n", "."), ["a\n", "b.", "c"], "a\nb", ["a", "a\nb"]),
        ("é", ["caf", "é"], "caf", ["caf", "caf"]),
    ],
)
def test_stop_strings(stops, tokens, text, shown):
    """Bug: a stop string is missed, found too late, or part of it is shown before it is whole."""
    tokenizer = Chars(*tokens, "|")
    sequence, seen = start([len(tokens)], tokenizer, eos=(), stop=stops, max_tokens=len(tokens)), []
    for i in range(len(tokens)):
        sequence.append(Token(i))
        seen.append(sequence.text)
        if sequence.finish_reason:
            break
    stopped = any(stop in "".join(tokens) for stop in sequence.params.stop)
    assert sequence.finish_reason == ("stop" if stopped else "length")
    assert sequence.text == text
    assert seen[:-1] == shown[:-1]
    assert len(seen) == len(shown)


def test_stop_string_is_not_looked_for_in_the_prompt():
    """Bug: a stop string that begins in the prompt ends the sequence, or cuts before its start."""
    sequence = feed(start([*b"xa"], ASCII, stop="ab", max_tokens=3), b"bab")
    assert (sequence.text, sequence.finish_reason) == ("b", "stop")


@pytest.mark.parametrize("end", ["eos", "length", "stop token", "interrupted"])
def test_what_was_held_back_is_shown_at_the_end(end):
    """Bug: the text that could have become a stop string is lost when the sequence ends."""
    sequence = start([1], ASCII, stop="abc", max_tokens=3, stop_token_ids=[7])
    feed(sequence, {"eos": b"xab"[:2], "stop token": b"xa", "interrupted": b"xa"}.get(end, b"xab"))
    if end == "interrupted":
        assert sequence.text == "x"
        sequence.finish("interrupted")
    elif end != "length":
        assert sequence.text == "x"
        sequence.append(Token({"eos": 2, "stop token": 7}[end]))
    assert sequence.text == ("xab" if end == "length" else "xa")
    reasons = {"eos": "stop", "stop token": "stop"}
    assert sequence.finish_reason == reasons.get(end, end)


@pytest.mark.parametrize("end", [2, None, "interrupted"])
def test_stop_string_completed_by_the_flush(end):
    """Bug: what the detokenizer held back to the last is shown although it completes a stop."""
    sequence = start([65], Bytes(), stop="x\ufffd", max_tokens=3 if end is None else 9)
    feed(sequence, b"ax\xc3" if end is None else [*b"ax\xc3", end][: 3 + (end == 2)])
    if end == "interrupted":
        sequence.finish(end)
    assert sequence.finish_reason
    assert sequence.text == "a"


def test_half_a_character_is_held_back_and_flushed():
    """Bug: half a character is shown as U+FFFD, or lost at the end."""
    sequence = start([65], Bytes(), max_tokens=8)
    shown = []
    for byte in "é😀".encode():
        sequence.append(Token(byte))
        shown.append(sequence.text)
    assert shown == ["", "é", "é", "é", "é", "é😀"]
    feed(sequence, b"\xf0\x9f")
    assert sequence.finish_reason == "length"
    assert sequence.text.rstrip("\ufffd") == "é😀"
    assert sequence.text != "é😀"


def check_streaming(tokenizer, prompt: list[int], ids: list[int], stops: list[str]) -> None:
    """Compare with: decode all after each token, and cut at the first stop string there is."""
    sequence = start(prompt, tokenizer, 4096, (), stop=stops, max_tokens=max(1, len(ids)))
    feed(sequence, ids)
    skip = len(tokenizer.decode(prompt))
    for n in range(1, len(ids) + 1):
        text = tokenizer.decode(prompt + ids[:n])[skip:]
        if found := [at for stop in stops if (at := text.find(stop)) >= 0]:
            want = (text[: min(found)], "stop", n)
            break
    else:
        want = (text, "length", len(ids))
    assert (sequence.text, sequence.finish_reason, len(sequence.output_ids)) == want


LETTERS = Chars("", "a", "b", "c", "ab", "ba", "aa", "abc", "bab", "ca")
few_letters = st.lists(st.text("abc", min_size=1, max_size=4), max_size=4)


@settings(few, max_examples=300)
@given(ids=st.lists(st.integers(0, 9), min_size=1, max_size=12), stops=few_letters)
def test_streamed_text_is_the_plain_one(ids, stops):
    """Bug: some meeting of token borders and stop strings that nobody thought of."""
    check_streaming(LETTERS, [2], ids, stops)


@settings(few, max_examples=300)
@given(
    parts=st.lists(
        st.one_of(st.text("aé€😀", max_size=3).map(str.encode), st.binary(max_size=2)),
        min_size=1,
        max_size=6,
    ).filter(any),
    stops=st.lists(st.text("aé€😀", min_size=1, max_size=3), max_size=3),
)
def test_streamed_bytes_are_the_plain_text(parts, stops):
    """Bug: a stop string across characters that are themselves split over tokens."""
    check_streaming(Bytes(), [*b"a"], [*b"".join(parts)], stops)


def test_stop_string_with_the_real_tokenizer():
    """Bug: the space a sentencepiece decoder drops in front of a window shifts the stop string."""
    tokenizer = Tokenizer(SHAKESPEARE)
    prompt = tokenizer.encode("To be")
    ids = tokenizer.encode(", or not to be: that is", add_special=False)
    sequence = Sequence(prompt, SamplingParams(stop=" to be:"), config(1024, 64, (2,)), tokenizer)
    feed(sequence, ids)
    assert sequence.finish_reason == "stop"
    whole = tokenizer.decode(prompt + ids)
    assert "To be" + sequence.text == whole[: whole.index(" to be:")]


# --- Sequence: errors -----------------------------------------------------------------------------


def test_empty_prompt():
    """Bug: no token at all reaches the model (CVE-2024-8768)."""
    with pytest.raises(ValueError, match="empty"):
        start([])


@pytest.mark.parametrize(("n", "context", "limit"), [(64, 64, None), (70, 64, None), (5, 64, 5)])
def test_prompt_too_long(n, context, limit):
    """Bug: a prompt that leaves no room is truncated or crashes; the message lacks a number."""
    with pytest.raises(ValueError) as caught:
        start([1] * n, context=context, max_seq_len=limit)
    assert re.findall(r"\d+", str(caught.value))[:2] == [str(n), str(limit or context)]
    start([1] * (n - 1), context=n, max_seq_len=n)


@pytest.mark.parametrize(
    ("prompt", "bias", "bad"),
    [([5, 300], {}, 300), ([-1], {}, -1), ([1], {300: 1.0}, 300), ([1], {10**12: 1.0}, 10**12)],
)
def test_unknown_ids(prompt, bias, bad):
    """Bug: an id beyond the vocabulary crashes the kernel, a negative one counts from the end."""
    with pytest.raises(ValueError, match=rf"{bad}\b.*\b300\b"):
        start(prompt, logit_bias=bias)
    assert start([0, 299], logit_bias={299: 1.0})


def test_prompt_list_is_copied():
    """Bug: two sequences that share a prompt share its list."""
    prompt = [1, 2, 3]
    one: Sequence = start(prompt)
    feed(one, [5])
    assert prompt == [1, 2, 3]
    assert one.prompt_ids is not prompt
