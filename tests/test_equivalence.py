"""The equivalence matrix: the same prompts and seeds give the same tokens, whatever the path.

Each path below is one way to run the model. All are compared, in fp32, with the slowest and most
obvious one: no cache, everything recomputed at each step. A new fast path adds one entry to PATHS.
Every path runs every prompt with every setting, where it can all of them at once. Where guesses are
sampled they use other random numbers; there the slow twin guesses too, see plain.
"""

import copy
from dataclasses import replace
from functools import cache, partial

import pytest
import torch
from conftest import DRAFT
from torch.nn import functional as F

import sampling
from checkpoint import build, load_model
from flex import FlexRunner
from generate import generate
from kv_cache import StaticCache
from model import Config
from packed import compile_model
from quantize import QuantLinear, quantize_model
from sampling import SamplingParams, Sequence, distribution, draw
from scheduler import Engine, Guess
from speculative import GUESS, DraftModel, Guesser, NGram, lookup
from tokenizer import Tokenizer
from tools.books import audit

PROMPTS = ("", "ROMEO:\n", "To be, or not to be, that is the question:\n" * 2)
EVERYTHING = SamplingParams(
    temperature=1.2, top_k=40, top_p=0.9, min_p=0.02, repetition_penalty=1.1, presence_penalty=0.3,
    frequency_penalty=0.2, logit_bias={20: 2.0}, seed=-5, max_tokens=13, ignore_eos=True,
)  # fmt: skip
SETTINGS = [
    SamplingParams(temperature=0, max_tokens=13),
    # Below zero, so that the text repeats itself: there n-grams are right now and then.
    SamplingParams(temperature=0.9, top_p=0.95, frequency_penalty=-1.0, seed=7, max_tokens=13),
    EVERYTHING,
    replace(EVERYTHING, temperature=0, frequency_penalty=-2.0),
    # What Qwen suggests: no penalties, so all is up to the filters.
    SamplingParams(temperature=0.6, top_k=20, top_p=0.95, seed=3, max_tokens=13),
]
BLOCK = 4
pytestmark = pytest.mark.usefixtures("one_thread")


# --- The slow twin --------------------------------------------------------------------------------


@torch.no_grad()
def plain(model, sequence, draft=None, speculate=0):
    """No cache, one sequence: guess, run all there is, verify. Without guesses that is forward,
    sample, append. Returns the sequence."""

    def logits_of(model, ids):
        return model(torch.tensor([ids]), torch.arange(len(ids))[None])[0]  # (T, V)

    guesser = Guesser(speculate)
    while not sequence.finish_reason:
        count = guesser.count(sequence)
        text = "".join(map(chr, sequence.ids))
        ids = [] if draft else [*map(ord, lookup(text, count))]
        guess = sequence.guess = Guess(ids, [1.0] * len(ids))
        for _ in range(count if draft else 0):
            ahead = sequence.ahead(guess.ids)
            q = distribution(logits_of(draft, sequence.ids + guess.ids)[-1:], [ahead])
            i = draw(q, torch.tensor([ahead.uniform(GUESS)], dtype=torch.float64)).item()
            guess.ids.append(i)
            guess.q.append(q[0, i].item())
            guess.probs.append(q[0])
        logits = logits_of(model, sequence.ids + guess.ids)[-1 - len(guess.ids) :]
        for token in guesser.verify(logits, [sequence])[0]:
            if not sequence.finish_reason:
                sequence.append(token)
    return sequence


# --- The paths ------------------------------------------------------------------------------------


def run_alone(model, jobs, chunk=512, kv_dtype="auto"):
    results = []
    for ids, wish in jobs:
        sequence = Sequence(ids, wish, model.config)
        slabs = StaticCache(model, 1, sequence.max_len, kv_dtype)
        results.append([token.id for token in generate(model, sequence, slabs, chunk)])
    return results


def run_compiled(model, jobs, kv_dtype="auto"):
    return run_alone(compiled_twin(model, 1, kv_dtype), jobs, kv_dtype=kv_dtype)


@cache
def compiled_twin(model, *kind):
    """A compiled copy: compile_model changes a model in place."""
    model = copy.deepcopy(model)
    compile_model(model, *kind)
    return model


def make(model, draft=None, speculate=0, **limits):
    guesser = NGram(speculate) if speculate else None
    if draft:
        guesser = DraftModel(draft, speculate, model.config.vocab_size)
    return Engine(model, proposer=guesser, **{"block_size": BLOCK, "num_blocks": 640} | limits)


def finish(engine, requests):
    while engine.queue:
        engine.step()
        audit(engine)
    assert len(engine.pool.available) == engine.pool.num_blocks
    assert sum(engine.proposer.offered) or not engine.proposer.k
    return [request.outputs[0].output_ids for request in requests]


def run_engine(model, jobs, **options):
    """All prompts at once through the scheduler."""
    engine = make(model, **options)
    return finish(engine, [engine.add_request(*job) for job in jobs])


def run_compiled_engine(model, jobs, draft=None, kv_dtype="auto", **guess):
    model, draft = (each and compiled_twin(each, None, kv_dtype) for each in (model, draft))
    return run_engine(model, jobs, draft=draft, kv_dtype=kv_dtype, **guess)


def run_small(model, jobs, seqs=3, size=2, speculate=0, **options):
    """A budget that `size` tokens of prompts share. One at a time, these are their chunks."""
    budget = max(seqs * (1 + speculate) + size * (seqs > 1), size)
    options |= {"max_num_seqs": seqs, "max_num_batched_tokens": budget, "speculate": speculate}
    return run_engine(model, jobs, **options)


def run_prefix_cached(model, jobs, **options):
    """The second time, all but the ends of the prompts is found in the cache."""
    engine = make(model, **options)
    for _ in range(2):
        cached = engine.stats["prefix_cache_hits"]
        results = finish(engine, [engine.add_request(*job) for job in jobs])
    whole = sum((len(ids) - 1) // BLOCK for ids, _ in jobs)
    assert engine.stats["prefix_cache_hits"] - cached == whole * BLOCK > 0
    return results


def run_preempted(model, jobs, **options):
    """A pool that holds the longest sequence and little more, with what is cached thrown away."""
    longest = max(len(ids) + wish.max_tokens for ids, wish in jobs)
    engine = make(model, num_blocks=-(-longest // BLOCK) + 1, **options)
    results = finish(engine, [engine.add_request(*job) for job in jobs])
    assert engine.stats["num_preemptions"] > 0
    return results


def run_forked(model, jobs, **options):
    """n > 1: the continuations share the prompt's blocks, the last of them partly filled. The
    continuation i of the seed - i has the seed that was asked for."""
    engine, requests = make(model, **options), []
    for i, (ids, wish) in enumerate(jobs):
        seed = None if wish.seed is None else wish.seed - i % 3
        requests.append(engine.add_request(ids, replace(wish, n=3, seed=seed)))
    finish(engine, requests)
    return [request.outputs[i % 3].output_ids for i, request in enumerate(requests)]


def run_beside_aborted(model, jobs, **options):
    """Neighbours that begin alike, and are aborted at different points."""
    engine = make(model, max_num_seqs=8, max_num_batched_tokens=64, **options)
    doomed = [engine.add_request([*ids, 5], wish) for ids, wish in jobs]
    requests = [engine.add_request(*job) for job in jobs]
    doomed += [engine.add_request(ids[:-1] or [7], wish) for ids, wish in jobs]
    for request in doomed:
        engine.step()
        engine.abort(request)
        audit(engine)
    return finish(engine, requests)


PATHS = {
    "static cache": run_alone,
    "prompt in chunks of 1": partial(run_alone, chunk=1),
    "prompt in chunks of 7": partial(run_alone, chunk=7),
    "compiled": run_compiled,
    **{f"paged, chunks of {n}": partial(run_small, seqs=1, size=n) for n in (1, 3, BLOCK, 7)},
}
ENGINES = {
    "paged, alone": partial(run_small, seqs=1, size=512),
    "paged, batched": run_engine,
    "paged, batched, small budget": run_small,
    "paged, chunks of 5": partial(run_small, seqs=1, size=BLOCK + 1),
    "prefix cached": run_prefix_cached,
    "preempted": run_preempted,
    "n = 3": run_forked,
    "beside aborted neighbours": run_beside_aborted,
    "paged, compiled": run_compiled_engine,
    "paged, followed": partial(run_engine, runner=FlexRunner),
}
PATHS |= ENGINES


# --- What runs on them ----------------------------------------------------------------------------


@cache
def trained():
    """The smaller bundled model: its confident predictions make ties of rounding unlikely."""
    tokenizer = Tokenizer(DRAFT)
    return load_model(DRAFT, dtype=torch.float32), [tokenizer.encode(p) for p in PROMPTS]


@cache
def sliding():
    """Random weights with what the bundled model has not: windows, q/k norm, biases, untied."""
    torch.manual_seed(0)
    config = Config(
        vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=1, head_dim=32, windows=(5, None, 5),
        qkv_bias=True, qk_norm=True,
    )  # fmt: skip
    return build(config), [torch.randint(128, (n,)).tolist() for n in (1, 9, 40)]


@cache
def experts():
    """A layer with one MLP, and two with six of which a token passes through two."""
    torch.manual_seed(1)
    config = Config(
        vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_experts=6,
        num_experts_per_tok=2, moe_intermediate_size=64, mlp_only_layers=[0],
    )  # fmt: skip
    return build(config), [torch.randint(128, (n,)).tolist() for n in (1, 9, 40)]


@cache
def draft_of(model):
    """All layers but the last: right now and then."""
    layers = model.config.num_hidden_layers - 1
    config = replace(model.config, num_hidden_layers=layers, windows=model.config.windows[:layers])
    draft = build(config)
    draft.load_state_dict(model.state_dict(), strict=False)
    return draft


@cache
def quantised(model, mode):
    return quantize_model(copy.deepcopy(model), mode, group_size=32)


@cache
def dequantised(model):
    """The plain twin of a quantised model."""
    twin = copy.deepcopy(model)
    for module in twin.modules():
        if isinstance(module, QuantLinear):
            module.forward = partial(F.linear, weight=module.dequantize(), bias=module.bias)
    return twin


@cache
def kind_of(case, kind):
    """The model, and the options of its paths."""
    model, _ = CASES[case]()
    if kind == "draft":
        return model, {"draft": draft_of(model), "speculate": 4}
    if kind == "itself, quantised":
        return model, {"draft": quantised(model, "int8"), "speculate": 3}
    if "weights" in kind:
        return quantised(model, kind.split()[0]), {}
    more = {"n-gram": {"speculate": 4}, "int8 cache": {"kv_dtype": "int8"}}
    return model, more.get(kind, {})


@cache
def jobs_of(case):
    """Every prompt with every setting."""
    return [(ids, wish) for wish in SETTINGS for ids in CASES[case]()[1]]


@cache
def expected(case, kind, job):
    """What the slow twin makes of a job: of guesses greedily the same as without them."""
    (model, options), (ids, wish) = kind_of(case, kind), jobs_of(case)[job]
    if kind == "int8 cache":
        return run_alone(model, [(ids, wish)], **options)[0]
    model = dequantised(model) if "weights" in kind else model
    options = options if wish.temperature > 0 else {}
    return plain(model, Sequence(ids, wish, model.config), **options).output_ids


CASES = {"trained": trained, "sliding": sliding, "experts": experts}
WAYS = ("static cache", "compiled", "paged, batched", "paged, compiled")
ROWS = [
    *((path, "plain") for path in PATHS),
    *((path, guess) for path in ENGINES for guess in ("draft", "n-gram")),
    *((path, "itself, quantised") for path in ("paged, alone", "paged, batched")),
    *((path, "int8 cache") for path in (*WAYS, "preempted", "n = 3", "paged, followed")),
    *((path, weights) for path in WAYS for weights in ("int8 weights", "int4 weights")),
]
FEW = (0, 4, 8, 11, 12)  # each prompt and each setting: one after another, all of them take long
WHOLE = ("paged, batched", "paged, batched, small budget", "prefix cached", "paged, compiled")
COMPILED = ("compiled", "paged, compiled")


@pytest.mark.parametrize(
    ("case", "path", "kind"),
    [pytest.param(case, *row, marks=[pytest.mark.slow] * (row[0] in COMPILED)) for case in CASES
     for row in ROWS if case == "trained" or row[0] not in COMPILED or row[1] == "plain"],
)  # fmt: skip
def test_same_tokens(case, path, kind):
    """A cache read at the wrong place, a mask off by one, a seed that depends on the path. A guess
    kept that the model does not make; keys and values of a refused one read again; the draft's
    cache out of step. A scale of another token, head or group; nibbles in the wrong order."""
    some = range(15) if kind == "plain" and path in WHOLE else FEW
    model, options = kind_of(case, kind)
    found = PATHS[path](model, [jobs_of(case)[job] for job in some], **options)
    assert found == [expected(case, kind, job) for job in some]


@cache
def wordy():
    """As many words as Qwen has."""
    torch.manual_seed(2)
    config = Config(151936, 32, 48, 2, 4, 2, 8, tie_word_embeddings=True)
    return build(config), [torch.randint(config.vocab_size, (n,)).tolist() for n in (1, 9)]


LARGE = [
    SamplingParams(temperature=0.6, top_k=20, top_p=0.95, seed=3, max_tokens=4),
    SamplingParams(temperature=1.5, min_p=1e-4, seed=4, max_tokens=4),  # keeps more than selected
    SamplingParams(temperature=5.0, top_p=0.9, seed=5, max_tokens=4),
]


@pytest.mark.parametrize("guess", [None, "draft", "n-gram"])
def test_same_tokens_of_a_large_vocabulary(guess, monkeypatch):
    """The few likeliest of 151,936 words are selected, and some rows sorted: alone, in a batch, or
    for guesses, on two threads, it must be what sorting all of them gives."""
    torch.set_num_threads(2)  # the fixture sets it back
    model, prompts = wordy()
    options = {"draft": {"draft": draft_of(model), "speculate": 3}, "n-gram": {"speculate": 3}}
    options = options.get(guess, {})
    jobs = [(ids, wish) for wish in LARGE for ids in prompts]
    paths = ("paged, batched", "paged, batched, small budget", *["static cache"] * (not guess))
    found = [PATHS[path](model, jobs, **options) for path in paths]
    sort = partial(sampling.keep_likeliest, most=model.config.vocab_size)
    monkeypatch.setattr(sampling, "keep_likeliest", sort)
    want = [plain(model, Sequence(*job, model.config), **options).output_ids for job in jobs]
    assert found == [want] * len(paths)
