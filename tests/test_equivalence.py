"""The equivalence matrix: the same prompts and seeds give the same tokens, whatever the path.

Each path below is one way to run the model. All are compared, in fp32, with the slowest and most
obvious one: no cache, everything recomputed at each step. A new fast path adds one entry to PATHS.
"""

import copy
from functools import cache

import pytest
import torch
from conftest import SHAKESPEARE

from generate import SamplingParams, Sequence, compile_model, generate
from kv_cache import StaticCache
from model import Config, Transformer, load_model
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


def run_alone(model, prompts, params, chunk=512, cached=True):
    results = []
    for prompt in prompts:
        sequence = Sequence(prompt, params, model.config)
        slabs = StaticCache(model.config, 1, sequence.max_len, torch.float32) if cached else None
        for _ in generate(model, sequence, slabs, chunk):
            pass
        results.append(sequence.output_ids)
    return results


def run_compiled(model, prompts, params):
    return run_alone(compiled_twin(model), prompts, params)


@cache
def compiled_twin(model):
    """A compiled copy: compile_model changes a model in place."""
    return compile_model(copy.deepcopy(model), chunk=16)


PATHS = {
    "compiled": run_compiled,
    "static cache": run_alone,
    "prompt in chunks of 1": lambda *a: run_alone(*a, chunk=1),
    "prompt in chunks of 7": lambda *a: run_alone(*a, chunk=7),
}


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
