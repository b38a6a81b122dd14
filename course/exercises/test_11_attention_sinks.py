"""Exercise 11: endless text in a cache of fixed size. See 11-attention-sinks.md."""

import random
from typing import Any

import pytest
import torch
from common import close, logits_of, needs, tiny_model
from torch import Tensor

from around.settings import SamplingParams
from generate import generate
from kv_cache import StaticCache
from model import LayerCache, Transformer
from sampling import Sequence

MODEL = tiny_model(num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2)
TEXT = random.Random(2).choices(range(1, 32), k=60)


def sink_cache(sinks: int, window: int, model: Transformer = MODEL) -> Any:
    kind = needs("kv_cache", "SinkCache", "write the class, with SinkCache(model, sinks, window)")
    return kind(model, sinks, window)


@torch.no_grad()
def run(cache: Any, sizes: list[int], model: Transformer = MODEL, text: list[int] = TEXT) -> Tensor:
    """Run the text in chunks of these sizes. Returns the logits after each token, (T, V)."""
    logits, at = [], 0
    for size in sizes:
        chunk = text[at : at + size]
        positions, caches = cache.plan(at, at + len(chunk))
        logits.append(model(torch.tensor([chunk]), positions, caches)[0])
        at += size
    assert at >= len(text)
    return torch.cat(logits)


class Masked(LayerCache):
    """The slow twin runs the whole text at once, with the mask written out pair by pair."""

    def __init__(self, sinks: int, window: int) -> None:
        self.sinks, self.window = sinks, window

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        T, group = q.shape[2], q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = q @ k.transpose(2, 3) / q.shape[3] ** 0.5
        hidden = [
            [j > i or not (j < self.sinks or j > i - self.window) for j in range(T)]
            for i in range(T)
        ]
        return scores.masked_fill(torch.tensor(hidden), -torch.inf).softmax(-1) @ v


@torch.no_grad()
def twin(sinks: int, window: int, text: list[int] = TEXT) -> Tensor:
    layers = [Masked(sinks, window) for _ in MODEL.layers]
    return MODEL(torch.tensor([text]), torch.arange(len(text))[None], layers)[0]


CASES = [(4, 8), (1, 1), (0, 5), (4, 100), (3, 2)]
ONE_BY_ONE = [1] * len(TEXT)


@pytest.mark.parametrize(("sinks", "window"), CASES)
def test_token_by_token(sinks: int, window: int) -> None:
    got, want = run(sink_cache(sinks, window), ONE_BY_ONE), twin(sinks, window)
    wrong = "a query at p must see the positions s <= p with s < sinks or s > p - window"
    close(got, want, wrong)


@pytest.mark.parametrize(("sinks", "window"), CASES)
@pytest.mark.parametrize("sizes", [[60], [7] * 9, [2, 30, 1, 1, 1, 20, 5]])
def test_in_chunks(sizes: list[int], sinks: int, window: int) -> None:
    """Bug: the cache evicts before a chunk, whose first queries still need the keys."""
    got, want = run(sink_cache(sinks, window), sizes), twin(sinks, window)
    wrong = "the first tokens of a chunk need the keys that its last ones push out"
    close(got, want, wrong)


def tensors(of: Any) -> list[Tensor]:
    """Return all float tensors that an object keeps, at any depth."""
    if isinstance(of, Tensor):
        return [of] * of.is_floating_point()
    inside = of.values() if isinstance(of, dict) else of if isinstance(of, list | tuple) else ()
    if type(of).__module__ == "kv_cache":
        inside = vars(of).values()
    return [tensor for each in inside for tensor in tensors(each)]


def kept(cache: Any) -> float:
    """Return how many positions the cache keeps, from the bytes of its keys and values."""
    stores = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors(cache)}
    c, one = MODEL.config, MODEL.dtype.itemsize
    a_position = 2 * c.num_hidden_layers * c.num_key_value_heads * c.head_dim * one
    return sum(store.nbytes() for store in stores.values()) / a_position


def test_it_does_not_grow() -> None:
    text = [1 + p % 31 for p in range(300)]
    for sizes, when in ([1] * 300, "token by token"), ([150, 150], "after a long chunk"):
        cache = sink_cache(4, 8)
        run(cache, sizes, text=text)
        most = kept(cache)
        assert most > 0, "the test finds no keys in the attributes of the cache"
        assert most <= 4 + 8 + 2, (
            f"{when}, {most:.0f} positions are kept for 4 sinks and a window of 8: is a slice "
            "still a view of a larger tensor?"
        )


def test_a_short_text_is_not_affected() -> None:
    """Until a position is evicted, the cache behaves like the static one."""
    plain = run(StaticCache(MODEL, 1, 60), [20, 40])
    close(run(sink_cache(2, 58), [20, 40]), plain, "every position must still be visible")


def test_the_sinks_are_seen() -> None:
    """Far beyond the window, a change of a sink changes the logits, and a change of a token after
    the sinks does not."""
    model = tiny_model(num_hidden_layers=1)  # with more layers, tokens see further indirectly
    last = run(sink_cache(2, 4, model), ONE_BY_ONE, model)[-1]
    for at, seen in ((0, True), (1, True), (2, False), (30, False), (56, True)):
        text = [*TEXT[:at], 1 + TEXT[at] % 31, *TEXT[at + 1 :]]
        changed = run(sink_cache(2, 4, model), ONE_BY_ONE, model, text)[-1]
        wrong = f"the token at {at} must {'' if seen else 'not '}be visible"
        assert seen != torch.allclose(last, changed), wrong


def test_generate_takes_it() -> None:
    """generate() takes the cache, also beyond the model's trained context."""
    params = SamplingParams(max_tokens=200, temperature=0, ignore_eos=True)
    sequence = Sequence(TEXT, params, MODEL.config, max_seq_len=1000)
    for _ in generate(MODEL, sequence, sink_cache(4, 8), chunk=16):
        pass
    assert len(sequence.token_ids) == 200
    ids = sequence.ids
    want = twin(4, 8, ids[:150])[len(TEXT) - 1 :].argmax(-1).tolist()
    assert ids[len(TEXT) : 151] == want


def test_the_static_cache_is_as_before() -> None:
    sink_cache(4, 8)
    sliding = tiny_model(windows=(5, None))
    got = run(StaticCache(sliding, 1, 60), [7] * 9, sliding)
    close(got, logits_of(sliding, TEXT), "the static cache has changed")
