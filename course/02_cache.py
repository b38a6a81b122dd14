"""Chapter 2: the KV cache. Keys and values of past tokens never change: keep them.

python course/02_cache.py
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from generate import generate
from kv_cache import StaticCache
from lesson import Count, Lesson, durations, run
from model import Config, LayerCache, Transformer, attention
from sampling import SamplingParams, Sequence
from tools.bench import SHAPES
from tools.measure import bytes_per_step, read_bandwidth


class Growing(LayerCache):
    """One layer's keys and values so far, one behind the other."""

    k = v = torch.empty(0)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if len(self.k):
            k, v = torch.cat((self.k, k), 2), torch.cat((self.v, v), 2)  # (B, K, S, H) each
        self.k, self.v = k, v
        T, S = q.shape[2], k.shape[2]
        mask = torch.ones(T, S, dtype=torch.bool).tril(S - T)  # each sees up to itself
        return attention(q, k, v, mask.repeat(q.shape[1] // k.shape[1], 1))


def write(model: Transformer, ids: list[int], count: int, cached: bool) -> Iterator[int]:
    """Chapter 1's loop; with a cache it runs what the cache lacks, and that alone."""
    layers, done = [Growing() for _ in model.layers] if cached else None, 0
    for _ in range(count):
        tokens, positions = torch.tensor([ids[done:]]), torch.arange(done, len(ids))[None]
        last = torch.tensor([len(ids) - done - 1])
        logits = model(tokens, positions, layers, last)
        done = len(ids) if cached else 0
        ids.append(int(logits.argmax()))
        yield ids[-1]


def kv_bytes(config: Config, tokens: int, size: float) -> float:
    """Keys and values of so many tokens, of `size` bytes a number."""
    heads = config.num_hidden_layers * config.num_key_value_heads
    return 2 * heads * config.head_dim * size * tokens


def chapter(lesson: Lesson) -> dict[str, int]:
    # 1) a token's time, as the text grows
    model = lesson.random_model()
    lengths = lesson.pick([16, 64, 128, 256, 512], [2, 8, 16])
    words = torch.randint(model.config.vocab_size, (lengths[-1],)).tolist()
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    lines: dict[str, list[float]] = {"recompute": [], "cache": [], "slab": []}
    for n in lengths:
        lines["recompute"].append(1e3 * min(durations(write(model, words[:n], 2, False))))
        ours = durations(write(model, words[:n], 8, True))
        sequence = Sequence(words[:n], params, model.config, None, n + 8)
        theirs = durations(generate(model, sequence, StaticCache(model, 1, n + 8)))
        for name, times in (("cache", ours), ("slab", theirs)):
            lines[name].append(1e3 * min(times[1:]))  # the first runs the prompt
    if not lesson.small:
        speed = 1e6 * read_bandwidth(model.device)
        lines["ideal"] = [bytes_per_step(model, n) / speed for n in lengths]
    lesson.curves("milliseconds for one more token", lengths, lines, "tokens of text")
    # 2) what it takes instead: memory
    shapes = SHAPES["1b"], replace(SHAPES["1b"], num_key_value_heads=32), SHAPES["7b"]
    names = "1b, 32 heads share 4", "1b, were they not", "7b, 32 heads"
    rows = {name: kv_bytes(c, 2048, 2) / 1e6 for name, c in zip(names, shapes)}
    rows["7b, in int8"] = kv_bytes(SHAPES["7b"], 2048, 1 + 4 / 128) / 1e6  # and a scale each
    lesson.bars("MB of keys and values for 2,048 tokens of one sequence, in bfloat16", rows)
    # 3) as counts: the same 8 tokens after 8
    count, texts, tokens = Count(model), [], []
    for cached in (False, True):
        texts.append([*write(model, words[:8], 8, cached)])
        tokens.append(count.take().tokens)
    same = texts[0] == texts[1]
    lesson.say(
        f"\n8 new tokens after 8: {tokens[0]} tokens run without a cache, {tokens[1]} with it,"
    )
    lesson.say(f"and {'the same' if same else 'ANOTHER'} text.")
    return {"recompute": tokens[0], "cache": tokens[1], "same": same}


if __name__ == "__main__":
    run(chapter)
