"""Chapter 7: guessing ahead. Checking five tokens reads the weights once, as making one does.

python course/07_guessing.py
"""

from collections.abc import Callable

from lesson import Count, Lesson, forward_ms, oracle, random_ids, run, timed

import torch

from kv_cache import StaticCache
from model import Transformer
from speculative import lookup

K = 4  # guesses in a forward
BEGINNINGS = "KING RICHARD:", "ROMEO:"  # of the two texts in the last picture
Guess = Callable[[list[int]], list[int]]  # ids so far -> guesses of the next ids


def speculate(model: Transformer, ids: list[int], count: int, guess: Guess) -> list[int]:
    """Write greedily: run guesses along with the last token, and keep those that are right."""
    ids, end = [*ids], len(ids) + count
    done = 0  # tokens in the cache
    cache = StaticCache(model, 1, end)
    while len(ids) < end:
        ahead = guess(ids)[: end - len(ids) - 1]
        positions, caches = cache.plan(done, len(ids) + len(ahead))
        logits = model(torch.tensor([ids[done:] + ahead]), positions, caches)[0]  # (T, V)
        says = logits.argmax(-1).tolist()[-1 - len(ahead) :]  # after the last id, and each guess
        right = 0
        while right < len(ahead) and ahead[right] == says[right]:
            right += 1
        done = len(ids) + right  # later positions are wrong, but masked, and overwritten
        ids += [*ahead[:right], says[right]]
    return ids


def no_guess(ids: list[int]) -> list[int]:
    return []


def chapter(lesson: Lesson) -> dict[str, int]:
    # 1) what checking costs: one forward of several tokens, after 64 others
    model = lesson.random_model()
    widths = [1, 2, 3, 5, 9, 17, 33]
    costs = [forward_ms(model, width, 64, repeat=15) for width in widths]
    lines = {"forward": costs, "ideal": costs[:1] * len(widths)}
    lesson.curves("milliseconds of a forward", widths, lines, "tokens checked at once")
    # 2) when it pays: an oracle knows the text, and errs as often as we want
    prompt, new = random_ids(model, 16), lesson.pick(32, 12)
    truth = speculate(model, prompt, new, no_guess)
    shares = [0.0, 0.25, 0.5, 0.75, 1.0]
    oracles = {f"{share:.0%} right": oracle(truth, share, K) for share in shares}
    count, same = Count(model), True
    forwards, took = {}, {}  # by proposer; seconds
    for name, guess in [*({"no guesses": no_guess} | oracles).items()] * 3:  # the best of three
        text, seconds = timed(speculate, model, prompt, new, guess)
        forwards[name] = count.take().forwards
        took[name] = min(seconds, took.get(name, seconds))
        same = same and text == truth
    speed = {name: took["no guesses"] / took[name] for name in oracles}
    ideal = [new / forwards[name] for name in oracles]
    lines = {"measured": [*speed.values()], "ideal": ideal, "without": [1.0] * len(shares)}
    lesson.curves("times as fast as without", shares, lines, "share of guesses that are right")
    pays = ", ".join(name for name, times in speed.items() if times > 1.05) or "nowhere"
    lesson.say(f"With free guesses it pays at: {pays}.")
    # 3) how often real guesses are right: tokens per forward, from 1 without guesses to 5
    model, tokenizer = lesson.bundled()
    draft, _ = lesson.bundled("shakespeare-draft")
    guesses: dict[str, Guess] = {
        # `lookup` searches a string, where each character is an id.
        "looked up": lambda ids: [*map(ord, lookup("".join(map(chr, ids)), K))],
        "draft": lambda ids: speculate(draft, ids, K, no_guess)[-K:],  # what the draft writes
    }
    count, new = Count(model), lesson.pick(96, 16)
    rates = {}
    for beginning in BEGINNINGS:
        for name, guess in guesses.items():
            speculate(model, tokenizer.encode(f"{beginning}\n"), new, guess)
            rates[f"{beginning} {name}"] = new / count.take().forwards
    lesson.bars("tokens per forward", rates, K + 1.0)
    return {**forwards, "same": same, "rates": rates}


if __name__ == "__main__":
    run(chapter)
