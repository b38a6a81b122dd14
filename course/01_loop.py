"""Chapter 1: the loop. Everything is computed again for each token, so tokens get slower.

python course/01_loop.py
"""

from collections.abc import Iterator

from lesson import Count, Lesson, durations, run

import torch

from model import Transformer
from tools.measure import bytes_per_step


def write(model: Transformer, ids: list[int], count: int) -> Iterator[int]:
    """Generate: run the text, take the likeliest next token, append it, and repeat."""
    for _ in range(count):
        tokens = torch.tensor([ids])  # (1, T)
        positions = torch.arange(len(ids))[None]  # (1, T)
        last = torch.tensor([len(ids) - 1])  # the next token needs only the last one's logits
        logits = model(tokens, positions, None, last)  # (1, V)
        ids.append(int(logits.argmax()))
        yield ids[-1]


def chapter(lesson: Lesson) -> dict[str, int]:
    # 1) the loop works: the bundled model continues a name
    model, tokenizer = lesson.bundled()
    ids = tokenizer.encode("ROMEO:\n")
    for _ in write(model, ids, lesson.pick(40, 4)):
        pass
    lesson.say(tokenizer.decode(ids))
    # 2) what one more token costs, for texts of several lengths
    model = lesson.random_model()
    lengths = lesson.pick([16, 64, 128, 256, 512], [2, 8, 16])
    words = torch.randint(model.config.vocab_size, (lengths[-1],)).tolist()
    for _ in write(model, words[:1], 2):  # the first forward allocates
        pass
    alone = 1e3 * min(durations(write(model, words[:1], 3)))
    times = [1e3 * min(durations(write(model, words[:n], 3))) for n in lengths]
    lines = {"recompute": times, "ideal": [alone] * len(lengths)}
    lesson.curves("milliseconds for one more token", lengths, lines, "tokens of text")
    if times[-1] < 2 * alone:
        lesson.say("No effect: the model is so small that starting each operation takes the time.")
    # 3) what a whole text costs; in the ideal case, each token costs as much as one alone
    whole = 0.0  # seconds: the area under the curve, by trapezoids
    for start, end, first, last in zip(lengths, lengths[1:], times, times[1:]):
        whole += (end - start) * (first + last) / 2 / 1e3
    least = (lengths[-1] - lengths[0]) * alone / 1e3
    lesson.bars(
        f"seconds to write {lengths[0]} .. {lengths[-1]} tokens, added up from the curve",
        {"recompute": whole, "each as if alone": least},
    )
    if not lesson.small:
        read, speed = bytes_per_step(model, 0), lesson.bandwidth / 1e9
        lesson.say(
            f"\nOne token alone takes {alone:.0f} ms. It reads {read / 1e6:.0f} MB of weights."
        )
        lesson.say(
            f"Reading them takes {read / speed / 1e6:.0f} ms at this machine's {speed:.0f} GB/s."
        )
    # 4) the same as counts: how many tokens run through the model for 8 new ones after 8
    count = Count(model)
    made = len([*write(model, words[:8], 8)])
    lesson.say(
        f"\n{made} new tokens after 8: {count.forwards} forwards, {count.tokens} tokens run."
    )
    return {"made": made, "forwards": count.forwards, "tokens": count.tokens}


if __name__ == "__main__":
    run(chapter)
