"""Chapter 2: the KV cache. Keys and values of past tokens never change, so keep them.

python course/02_cache.py
"""

from collections.abc import Iterator
from dataclasses import replace

from lesson import Count, Lesson, durations, random_ids, run

import torch
from torch import Tensor

from model import Config, LayerCache, Transformer, attention
from tools.bench import SHAPES
from tools.measure import bytes_per_step


class Growing(LayerCache):
    """One layer's keys and values so far, concatenated."""

    k = v = torch.empty(0)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if len(self.k):
            k, v = torch.cat((self.k, k), 2), torch.cat((self.v, v), 2)  # (B, K, S, H) each
        self.k, self.v = k, v
        T, S = q.shape[2], k.shape[2]
        mask = torch.full((T, S), -torch.inf).triu(S - T + 1)  # hides the keys after each query
        return attention(q, k, v, mask.repeat(q.shape[1] // k.shape[1], 1))


def write(model: Transformer, ids: list[int], count: int, cached: bool) -> Iterator[int]:
    """Run chapter 1's loop; with a cache, run only the tokens that the cache lacks."""
    caches = [Growing() for _ in model.layers] if cached else None
    done = 0  # tokens in the cache
    for _ in range(count):
        tokens = torch.tensor([ids[done:]])  # (1, T)
        positions = torch.arange(done, len(ids))[None]  # (1, T)
        last = torch.tensor([len(ids) - done - 1])
        logits = model(tokens, positions, caches, last)
        if cached:
            done = len(ids)
        ids.append(int(logits.argmax()))
        yield ids[-1]


def kv_mb(config: Config, bytes_each: float = 2) -> float:
    """Return the MB of keys and values for 2,048 tokens. A bfloat16 number takes 2 bytes."""
    heads = config.num_hidden_layers * config.num_key_value_heads
    return 2 * heads * config.head_dim * bytes_each * 2048 / 1e6


def chapter(lesson: Lesson) -> dict[str, int]:
    # 1) the time of one more token, as the text grows
    model = lesson.random_model()
    lengths = lesson.pick([16, 64, 128, 256, 512], [2, 8, 16])
    words = random_ids(model, lengths[-1])
    lines: dict[str, list[float]] = {"recompute": [], "cache": [], "ideal": []}
    for n in lengths:
        without = durations(write(model, words[:n], 2, cached=False))
        within = durations(write(model, words[:n], 8, cached=True))
        lines["recompute"].append(1e3 * min(without))
        lines["cache"].append(1e3 * min(within[1:]))  # the first forward runs the prompt
        lines["ideal"].append(1e3 * bytes_per_step(model, n) / lesson.bandwidth)
    lesson.curves("milliseconds for one more token", lengths, lines, "tokens of text")
    # 2) what the cache costs: memory
    rows = {
        "1b, 32 heads share 4": kv_mb(SHAPES["1b"]),
        "1b, without sharing": kv_mb(replace(SHAPES["1b"], num_key_value_heads=32)),
        "7b, 32 heads": kv_mb(SHAPES["7b"]),
        "7b, in int8": kv_mb(SHAPES["7b"], 1 + 4 / 128),  # a float32 scale for 128 numbers
    }
    lesson.bars("MB of keys and values for 2,048 tokens of one sequence, in bfloat16", rows)
    # 3) as counts: 8 tokens after 8. A trained model's text would show an error in the mask
    model, tokenizer = lesson.bundled()
    words = tokenizer.encode("ROMEO:\nBut soft")  # 8 tokens
    count = Count(model)
    plain = [*write(model, words[:], 8, cached=False)]
    recomputed = count.take().tokens
    fast = [*write(model, words[:], 8, cached=True)]
    ran = count.take().tokens
    same = plain == fast
    lesson.say(f"\n8 new tokens after 8: {recomputed} run without a cache, {ran} with it,")
    lesson.say(f"and {'the same' if same else 'ANOTHER'} text.")
    return {"recompute": recomputed, "cache": ran, "same": same}


if __name__ == "__main__":
    run(chapter)
