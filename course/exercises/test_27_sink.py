"""Exercise 27: a sink beside attention's scores, on every path. See 27-sink.md."""

import itertools
import math
import random
from collections.abc import Callable
from functools import cache

import pytest
import torch
from common import close, logits_of, needs, tiny_model
from pytest import MonkeyPatch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from around.fast import attending
from around.fast.compiling import compile_model
from kv_cache import StaticCache
from model import LayerCache, Transformer, attention, products
from paged import Row, Runner

SINK = 2.0  # it takes a large share of most sums
TEXTS = [random.Random(n).choices(range(1, 32), k=n) for n in (1505, 605, 30)]
STEPS = 5  # the last tokens of each text come one by one, as if they had been sampled
HEADS = 2, 4  # kv heads, for 4 query heads
KERNELS = scaled_dot_product_attention, products
TODO = "add the constant, None, and let attention() obey it"
PLACE = "add the sink in model.attention, whatever the kernel and the sizes: all paths call it"


def set_sink(patch: MonkeyPatch) -> None:
    """Set the module's constant, which attention() must read at each call."""
    needs("model", "SINK", TODO)
    patch.setattr("model.SINK", SINK)


def model_of(kv_heads: int) -> Transformer:
    sizes = {"num_attention_heads": 4, "num_key_value_heads": kv_heads, "windows": (400, None)}
    return tiny_model(**sizes, max_position_embeddings=2048)


class Written(LayerCache):
    """The slow twin runs the whole text at once, with each step of attention written out."""

    def __init__(self, window: int | None) -> None:
        self.window = window

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (each.repeat_interleave(q.shape[1] // k.shape[1], 1) for each in (k, v))
        at = torch.arange(k.shape[2])
        age = at[-q.shape[2] :, None] - at  # of each key, for each query
        hidden = (age < 0) | (age >= (self.window or len(at)))
        scores = torch.einsum("bnth,bnsh->bnts", q, k) / q.shape[3] ** 0.5
        weights = scores.masked_fill(hidden, -torch.inf).exp()
        weights = weights / (weights.sum(-1, True) + math.exp(SINK))
        return torch.einsum("bnts,bnsh->bnth", weights, v)


@cache
@torch.no_grad()
def twin(kv_heads: int, text: int) -> Tensor:
    """Return the logits after each token of a text, (T, V)."""
    model, ids = model_of(kv_heads), torch.tensor([TEXTS[text]])
    caches = [Written(view.window) for view in model.config.views]
    return model(ids, torch.arange(ids.shape[1])[None], caches)[0]


def chunks(ids: list[int]) -> list[tuple[int, list[int]]]:
    """Cut a text into what each forward runs: chunks of up to 512 tokens, then single tokens."""
    prompt = len(ids) - STEPS
    cuts = [*range(0, prompt, 512), *range(prompt, len(ids) + 1)]
    return [(start, ids[start:end]) for start, end in itertools.pairwise(cuts)]


def whole(model: Transformer) -> list[Tensor]:
    """Run each text at once, without a cache. Returns the logits of each, (T, V)."""
    return [logits_of(model, ids) for ids in TEXTS]


@torch.no_grad()
def static(model: Transformer) -> list[Tensor]:
    """Do the same in chunks, with slabs for each text."""
    found = []
    for ids in TEXTS:
        kv, logits = StaticCache(model, 1, len(ids)), []
        for start, new in chunks(ids):
            logits.append(model(torch.tensor([new]), *kv.plan(start, start + len(new)))[0])
        found.append(torch.cat(logits))
    return found


def paged(model: Transformer) -> list[Tensor]:
    """Do the same with the chunks of all texts beside each other, in blocks."""
    runner, found = Runner(model, 100 * len(TEXTS), 16), [[] for _ in TEXTS]
    for step in itertools.zip_longest(*map(chunks, TEXTS)):
        running = [i for i, chunk in enumerate(step) if chunk]
        rows = [Row([*range(100 * i, 100 * i + 100)], *step[i], len(step[i][1])) for i in running]
        logits = runner.forward(rows).split([row.num_logits for row in rows])
        for i, each in zip(running, logits):
            found[i].append(each)
    return [*map(torch.cat, found)]


@pytest.mark.parametrize("kernel", KERNELS)
def test_one_call(kernel: Callable, monkeypatch: MonkeyPatch) -> None:
    """Bug: the sink is scaled, or counted once for each key, or a short mask misses its keys."""
    set_sink(monkeypatch)
    for T in (9, 4):
        q, k, v = (3 * torch.randn(1, n, t, 8).double() for n, t in ((4, T), (2, 9), (2, 9)))
        mask = torch.full((T, 9), -torch.inf).double().triu(10 - T).repeat(2, 1)
        want = Written(None).attend(q, k, v)
        trap = "each query has one sink, which is neither scaled nor masked"
        close(attention(q, k, v, mask, kernel=kernel), want, trap)
        trap = "a mask may cover the last keys only: all queries see those before"
        close(attention(q, k, v, mask[:, -T:], kernel=kernel), want, trap)


def test_without_a_sink() -> None:
    assert needs("model", "SINK", TODO) is None, "there is no sink by default"
    q, k, v = (torch.randn(1, 2, 9, 8) for _ in range(3))
    kernel = lambda *given: given[2] + sum(map(torch.sum, given))  # noqa: E731
    got = attention(q, k, v, q[..., :1], kernel=kernel)
    assert torch.equal(got, kernel(q, k, v, q[..., :1])), "without a sink, call the kernel alone"


@pytest.mark.parametrize("kv_heads", HEADS)
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("run", [whole, static, paged])
def test_paths(run: Callable, kernel: Callable, kv_heads: int, monkeypatch: MonkeyPatch) -> None:
    """Bug: a path that computes its scores elsewhere, which a short text would not show."""
    set_sink(monkeypatch)
    monkeypatch.setattr(attending, "in_two", kernel)
    model = model_of(kv_heads)
    for change in ("plain", "fast"):
        for text, got in enumerate(run(model)):
            close(got, twin(kv_heads, text), f"{change}, {len(got)} tokens: {PLACE}")
        attending.attend_fast(model)


@pytest.mark.slow
@pytest.mark.parametrize("kv_heads", HEADS)
@pytest.mark.parametrize("run", [static, paged])
def test_compiled(run: Callable, kv_heads: int, monkeypatch: MonkeyPatch) -> None:
    """Bug: a step whose loops the compiler writes has no sink."""
    set_sink(monkeypatch)
    torch._dynamo.reset()
    model = model_of(kv_heads).float()  # oneDNN packs no float64
    compile_model(model, 1 if run is static else None)
    for text, got in enumerate(run(model)):
        error = (got - twin(kv_heads, text)).abs().max()
        assert error < 1e-3, f"compiled, {len(got)} tokens: {PLACE} ({error:.3g} apart)"
