"""The equivalence matrix: the same prompts and seeds give the same tokens, whatever the path.

Each path below is one way to run the model. All are compared, in fp32, with the slowest and most
obvious one: no cache, everything recomputed at each step. A new fast path adds one entry to PATHS.
Speculation draws other random numbers, so where it samples it is compared with itself: see GUESSES.
"""

import copy
from dataclasses import replace
from functools import cache

import pytest
import torch
from conftest import DRAFT, SHAKESPEARE
from torch import nn

from generate import generate
from kv_cache import StaticCache
from model import Config, Transformer, load_model
from quantize import QuantLinear, quantize_model
from runner import Runner, compile_model
from sampling import SamplingParams, Sequence
from scheduler import Engine
from speculative import DraftModel, NGram
from tokenizer import Tokenizer

PROMPTS = ("", "ROMEO:\n", "To be, or not to be, that is the question:\n" * 3)
SETTINGS = {
    "greedy": SamplingParams(temperature=0, max_tokens=40),
    "sampled": SamplingParams(temperature=0.9, top_p=0.95, seed=7, max_tokens=40),
    "everything": SamplingParams(
        temperature=1.2, top_k=40, top_p=0.9, min_p=0.02, repetition_penalty=1.1,
        presence_penalty=0.3, frequency_penalty=0.2, logit_bias={20: 2.0}, seed=-5,
        max_tokens=40, ignore_eos=True,
    ),
}  # fmt: skip


def run_alone(model, prompts, params, chunk=512, cached=True, draft=None, speculate=0):
    results = []
    for prompt in prompts:
        sequence = Sequence(prompt, params, model.config)
        slabs = StaticCache(model.config, 1, sequence.max_len, torch.float32) if cached else None
        proposer = NGram(speculate)
        if draft:
            own = StaticCache(draft.config, 1, sequence.max_len, torch.float32)
            proposer = DraftModel(Runner(draft, own), speculate, model.config.vocab_size)
        for _ in generate(model, sequence, slabs, chunk, proposer):
            pass
        results.append(sequence.output_ids)
    return results


def run_compiled(model, prompts, params, draft=None, speculate=0):
    draft = draft and compiled_twin(draft)
    return run_alone(compiled_twin(model), prompts, params, draft=draft, speculate=speculate)


@cache
def compiled_twin(model):
    """A compiled copy: compile_model changes a model in place."""
    return compile_model(copy.deepcopy(model), chunk=16)


def run_engine(model, prompts, params, **options):
    """All prompts at once through the scheduler."""
    engine = Engine(model, **{"block_size": BLOCK} | options)
    return finish(engine, [engine.add_request(prompt, params) for prompt in prompts])


def finish(engine, requests):
    while engine.has_work:
        engine.step()
        engine.check()
    assert engine.pool.num_available == engine.pool.num_blocks
    assert engine.proposer.steps or not engine.proposer.k
    return [request.outputs[0].output_ids for request in requests]


def run_one_by_one(model, prompts, params):
    engine = Engine(model, block_size=BLOCK)
    return [finish(engine, [engine.add_request(p, params)])[0] for p in prompts]


def run_compiled_engine(model, prompts, params, draft=None, speculate=0):
    engine = compiled_engine(model)
    if speculate:
        draft = draft and compiled_engine(draft).runner.model
        options = {"block_size": BLOCK, "max_seq_len": 256, "speculate": speculate}
        engine = Engine(engine.runner.model, draft=draft, **options)
    return finish(engine, [engine.add_request(prompt, params) for prompt in prompts])


@cache
def compiled_engine(model):
    return Engine(copy.deepcopy(model), block_size=BLOCK, max_seq_len=256, compile=True)


def run_in_chunks(model, prompts, params, size, **guess):
    """Each prompt alone, so that the budget of a step is the size of its chunks."""
    engine = Engine(model, block_size=BLOCK, max_num_seqs=1, max_num_batched_tokens=size, **guess)
    return finish(engine, [engine.add_request(prompt, params) for prompt in prompts])


def run_prefix_cached(model, prompts, params, **guess):
    """The second time, all but the ends of the prompts is found in the cache."""
    engine = Engine(model, block_size=BLOCK, **guess)
    for _ in range(2):
        cached = engine.stats.cached_tokens
        results = finish(engine, [engine.add_request(prompt, params) for prompt in prompts])
    whole = sum((len(prompt) - 1) // BLOCK for prompt in prompts)
    assert engine.stats.cached_tokens - cached == whole * BLOCK > 0
    return results


def run_preempted(model, prompts, params, **guess):
    """A pool that holds the longest sequence and little more, with what is cached thrown away."""
    need = -(-(max(map(len, prompts)) + params.max_tokens) // BLOCK)
    engine = Engine(model, block_size=BLOCK, num_blocks=need + 1, **guess)
    results = finish(engine, [engine.add_request(prompt, params) for prompt in prompts])
    assert engine.stats.preemptions > 0
    return results


def run_forked(model, prompts, params, **guess):
    """n > 1: the continuations share the prompt's blocks, the last of them partly filled."""
    engine = Engine(model, block_size=BLOCK, **guess)
    params = [replace(params, n=3, seed=None if params.seed is None else params.seed - i)
              for i in range(3)]  # fmt: skip
    requests = [[engine.add_request(prompt, p) for prompt in prompts] for p in params]
    finish(engine, [])
    # The continuation i of the seed - i has the seed that was asked for.
    found = [[r.outputs[i].output_ids for r in row] for i, row in enumerate(requests)]
    assert found[0] == found[1] == found[2]
    return found[0]


def run_beside_aborted(model, prompts, params, **guess):
    """Neighbours that begin alike, and are aborted at different points."""
    options = {"max_num_seqs": 8, "max_num_batched_tokens": 64} | guess
    engine = Engine(model, block_size=BLOCK, **options)
    doomed = [engine.add_request([*prompt, 5], params) for prompt in prompts]
    requests = [engine.add_request(prompt, params) for prompt in prompts]
    doomed += [engine.add_request(prompt[:-1] or [7], params) for prompt in prompts]
    for request in doomed:
        engine.step()
        engine.abort(request)
        engine.check()
    return finish(engine, requests)


def test_int8_keys_and_values_on_every_path(bundled):
    """A scale of another token or head; a cache encoded on one path and not on the other."""
    model, prompts = bundled
    params = SETTINGS["sampled"]
    expected = []
    for prompt in prompts:
        sequence = Sequence(prompt, params, model.config)
        slabs = StaticCache(model.config, 1, sequence.max_len, torch.int8)
        expected.append([token.id for token in generate(model, sequence, slabs)])
    assert run_engine(model, prompts, params, kv_dtype=torch.int8) == expected
    twin = copy.deepcopy(model)
    assert run_engine(twin, prompts, params, kv_dtype=torch.int8, compile=True) == expected
    sequence = Sequence(prompts[2], params, model.config)
    slabs = StaticCache(model.config, 1, sequence.max_len, torch.int8)
    assert [t.id for t in generate(compiled_twin(model), sequence, slabs)] == expected[2]


BLOCK = 4
PATHS = {
    "compiled": run_compiled,
    "static cache": run_alone,
    "prompt in chunks of 1": lambda *a: run_alone(*a, chunk=1),
    "prompt in chunks of 7": lambda *a: run_alone(*a, chunk=7),
    "paged, alone": run_one_by_one,
    "paged, batched": run_engine,
    "paged, batched, small budget": lambda *a: run_engine(*a, max_num_seqs=3,
                                                          max_num_batched_tokens=5),
    "paged, compiled": run_compiled_engine,
    **{
        f"paged, chunks of {size}": lambda *a, size=size: run_in_chunks(*a, size)
        for size in (1, 7, BLOCK - 1, BLOCK, BLOCK + 1)
    },
    "prefix cached": run_prefix_cached,
    "preempted": run_preempted,
    "n = 3": run_forked,
    "beside aborted neighbours": run_beside_aborted,
}  # fmt: skip


@pytest.fixture(scope="module")
def bundled():
    """The trained model: its confident predictions make ties of rounding unlikely."""
    tokenizer = Tokenizer(SHAKESPEARE)
    return load_model(SHAKESPEARE, dtype=torch.float32), [tokenizer.encode(p) for p in PROMPTS]


@pytest.fixture(scope="module")
def sliding():
    """Random weights with what the bundled model has not: windows, q/k norm, biases, untied."""
    torch.manual_seed(0)
    config = Config(
        vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=1, head_dim=32, windows=(5, None, 5),
        qkv_bias=True, qk_norm=True,
    )  # fmt: skip
    model = Transformer(config).eval().requires_grad_(False)
    return model, [torch.randint(128, (n,)).tolist() for n in (1, 9, 70)]


@pytest.fixture(scope="module", params=["bundled", "sliding"])
def case(request):
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="module")
def expected(case):
    """Tokens of the slow twin, per setting."""
    return {name: run_alone(*case, params, cached=False) for name, params in SETTINGS.items()}


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("path", PATHS)
def test_same_tokens(case, expected, path, setting):
    """A cache read at the wrong place, a mask off by one, a seed that depends on the path."""
    assert PATHS[path](*case, SETTINGS[setting]) == expected[setting]


@pytest.fixture(scope="module", params=["int8", "int4"])
def quantised(request, bundled):
    """A quantised model; and what its plain twin, whose weights are dequantised once, generates."""
    model = quantize_model(copy.deepcopy(bundled[0]), request.param, group_size=64)
    twin = copy.deepcopy(model)
    for parent in [*twin.modules()]:
        for name, child in [*parent.named_children()]:
            if isinstance(child, QuantLinear):
                linear = nn.Linear(child.in_features, child.out_features, bias=False)
                linear.weight = nn.Parameter(child.dequantize(), requires_grad=False)
                setattr(parent, name, linear)
    params = [replace(SETTINGS[name], max_tokens=24) for name in ("greedy", "sampled")]
    return model, bundled[1], [(p, run_alone(twin, bundled[1], p)) for p in params]


@pytest.mark.parametrize("path", ["paged, batched", "compiled", "paged, compiled"])
def test_same_tokens_quantised(quantised, path):
    """The stored and the packed forms of quantised weights, for one sequence and for many: nibbles
    in the wrong order, a scale of another group, a digit lost."""
    model, prompts, expected = quantised
    for params, tokens in expected:
        assert PATHS[path](model, prompts, params) == tokens


# --- Speculation ----------------------------------------------------------------------------------


@cache
def shallow_draft(model):
    """The first two layers of a random model: right now and then."""
    config = replace(model.config, num_hidden_layers=2, windows=model.config.windows[:2])
    draft = Transformer(config).eval().requires_grad_(False)
    draft.load_state_dict(model.state_dict(), strict=False)
    return draft


@cache
def trained_draft():
    return load_model(DRAFT, dtype=torch.float32)


@cache
def quantised_twin(model):
    return quantize_model(copy.deepcopy(model), "int8")


@cache
def guesses(model, name):
    """Options of Engine and of run_alone."""
    if name == "draft":
        draft = shallow_draft(model) if model.config.windows else trained_draft()
        return {"draft": draft, "speculate": 4}
    if name == "itself, quantised":
        return {"draft": quantised_twin(model), "speculate": 3}
    return {"speculate": 4}


SPECULATING = {
    "alone": run_alone,
    "alone, prompt in chunks of 7": lambda *a, **g: run_alone(*a, chunk=7, **g),
    "alone, compiled": run_compiled,
    "paged, batched": run_engine,
    "paged, small budget": lambda *a, **g: run_engine(*a, max_num_seqs=2,
                                                      max_num_batched_tokens=11, **g),
    "paged, chunks of 5": lambda *a, **g: run_in_chunks(*a, 5, **g),
    "paged, compiled": run_compiled_engine,
    "prefix cached": run_prefix_cached,
    "preempted": run_preempted,
    "n = 3": run_forked,
    "beside aborted neighbours": run_beside_aborted,
}  # fmt: skip
SPECULATED = {
    "greedy": replace(SETTINGS["greedy"], max_tokens=24),
    "greedy, penalties, bias": replace(SETTINGS["everything"], temperature=0, max_tokens=24),
    "sampled": replace(SETTINGS["sampled"], max_tokens=24),
}
SOME = ("alone", "paged, small budget", "preempted")
GUESSES = [
    *((path, guess, "greedy") for path in SPECULATING for guess in ("draft", "n-gram")),
    *((path, "draft", "sampled") for path in SPECULATING),
    *((path, "draft", "greedy, penalties, bias") for path in SOME),
    *((path, "n-gram", "sampled") for path in SOME),
    *((path, "itself, quantised", "greedy") for path in ("alone", "paged, batched")),
]


@cache
def alone_for(model, prompts, setting, guess):
    """Greedily what comes without guesses; sampled, what one sequence alone gets with them."""
    options = {} if "greedy" in setting else guesses(model, guess)
    return run_alone(model, prompts, SPECULATED[setting], **options)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(("path", "guess", "setting"), GUESSES)
def test_same_tokens_speculating(case, path, guess, setting):
    """A guess kept that the model does not make; keys and values of a refused one read again; the
    draft's cache out of step with the model's; guesses that depend on who else is in the batch."""
    model, prompts = case
    tokens = SPECULATING[path](*case, SPECULATED[setting], **guesses(model, guess))
    assert tokens == alone_for(model, tuple(map(tuple, prompts)), setting, guess)
