"""Chapter 7: guessing ahead. To check five tokens reads the weights once, as to make one does.

python course/07_guessing.py
"""

import time
from collections.abc import Callable
from functools import partial

import torch

from generate import BUNDLED
from kv_cache import StaticCache
from lesson import Count, Lesson, run, seconds
from model import Transformer
from sampling import uniform
from speculative import lookup

K = 4  # guesses in a step
REPEATS = BUNDLED.parents[1] / "benchmarks" / "repeats.txt"  # a text that says things twice
Guess = Callable[[list[int]], list[int]]  # ids so far -> the next ones, perhaps


def speculate(model: Transformer, ids: list[int], count: int, guess: Guess) -> list[int]:
    """Greedy text: run the guesses along with the last token, and keep those that come true."""
    ids, end, done = [*ids], len(ids) + count, 0
    cache = StaticCache(model, 1, end)
    while len(ids) < end:
        ahead = guess(ids)[: end - len(ids) - 1]
        positions, layers = cache.step(done, len(ids) + len(ahead))
        logits = model(torch.tensor([ids[done:] + ahead]), positions, layers)[0]  # (T, V)
        says = logits.argmax(-1).tolist()[-1 - len(ahead) :]  # after the last id, and each guess
        right = 0
        while right < len(ahead) and ahead[right] == says[right]:
            right += 1
        done = len(ids) + right  # what lies behind is wrong, unseen, and written over
        ids += [*ahead[:right], says[right]]
    return ids


def draft_guess(draft: Transformer, ids: list[int]) -> list[int]:
    """What a small model would write: chapter 1's loop, as it is so small."""
    ids = [*ids]
    for _ in range(K):
        positions = torch.arange(len(ids))[None]
        ids.append(int(draft(torch.tensor([ids]), positions, None)[0, -1].argmax()))
    return ids[-K:]


def chapter(lesson: Lesson) -> dict[str, int]:
    # 1) what it costs to check: tokens in one forward, behind 64 others
    model = lesson.random_model()
    cache, widths = StaticCache(model, 1, 128), [1, 2, 3, 5, 9, 17, 33]
    costs = []
    for T in widths:
        positions, layers = cache.step(64, 64 + T)
        costs.append(1e3 * seconds(partial(model, torch.zeros_like(positions), positions, layers)))
    lines = {"forward": costs, "ideal": costs[:1] * len(widths)}
    lesson.curves("milliseconds of a forward", widths, lines, "tokens checked at once")
    # 2) when it pays: an oracle that knows the text, and errs as often as we want
    prompt, new = torch.randint(model.config.vocab_size, (16,)).tolist(), lesson.pick(32, 12)
    count, start = Count(model), time.perf_counter()
    truth = speculate(model, prompt, new, lambda ids: [])
    plain, forwards, same = time.perf_counter() - start, {"no guesses": count.take().forwards}, True
    shares, speed, ideal = [0.0, 0.25, 0.5, 0.75, 1.0], [], []
    for share in shares:

        def oracle(ids: list[int], share: float = share) -> list[int]:
            known = [*enumerate(truth)][len(ids) : len(ids) + K]
            return [(t + (uniform(1, i) >= share)) % model.config.vocab_size for i, t in known]

        start = time.perf_counter()
        same &= speculate(model, prompt, new, oracle) == truth
        speed.append(plain / (time.perf_counter() - start))
        forwards[f"{share:.0%} right"] = count.take().forwards
        ideal.append(new / forwards[f"{share:.0%} right"])
    lines = {"measured": speed, "ideal": ideal, "without": [1.0] * len(shares)}
    lesson.curves("times as fast as without", shares, lines, "share of guesses that are right")
    pays = [f"{share:.0%}" for share, times in zip(shares, speed) if times > 1.05]
    lesson.say(f"With free guesses it pays where these are right: {', '.join(pays) or 'nowhere'}.")
    # 3) how often real guesses are right: tokens a forward, of 1 without and 5 at most
    model, tokenizer = lesson.bundled()
    draft, _ = lesson.bundled("shakespeare-draft")
    guesses = {"looked up": lambda ids: lookup(ids, {}, K), "draft": partial(draft_guess, draft)}
    count, new, rates = Count(model), lesson.pick(96, 16), {}
    texts = {"a fresh text": "KING RICHARD:\n", "a repetitive one": REPEATS.read_text("utf-8")}
    for what, text in texts.items():
        ids = tokenizer.encode(text)[:200]
        for name, guess in guesses.items():
            speculate(model, ids, new, guess)
            rates[f"{what}, {name}"] = new / count.take().forwards
    lesson.bars("tokens a forward", rates, K + 1.0)
    return forwards | {"same": same, "rates": rates}


if __name__ == "__main__":
    run(chapter)
