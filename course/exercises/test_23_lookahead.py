"""Exercise 23: lookahead decoding. See 23-lookahead.md."""

import random
import time
from typing import Any

import pytest
import torch
from common import bundled, close, logits_of, needs, tiny_model

from around.settings import SamplingParams
from generate import generate
from kv_cache import StaticCache, from_stored
from model import Transformer
from sampling import Sequence

TODO = "make the file in the root, with Window, plan, verify and write"
MODEL = tiny_model(num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2)
SLIDING = tiny_model(num_hidden_layers=3, windows=(5, None, 3), qk_norm=True)
MODELS = pytest.mark.parametrize("model", [MODEL, SLIDING], ids=["plain", "sliding"])
TEXT = random.Random(2).choices(range(1, 32), k=60)
SIZES = (4, 3, 3)  # width, n, most: of the window and of the pool


def window_of(ids: list[int], width: int, n: int, most: int) -> Any:
    return needs("lookahead", "Window", TODO)([*ids], width, n, most)


def ngrams(window: Any, last: int) -> list[tuple[int, ...]]:
    """What the next forward checks after the token `last`, in any order."""
    ids, parents = window.tokens(last)
    size = sum(map(len, window.levels))
    found: list[tuple[int, ...]] = []
    for token, parent in zip(ids[size:], parents[size:], strict=True):
        if parent == 0:
            found.append(())
        found[-1] += (token,)
    return sorted(found)


# --- Integers: the window and the pool ------------------------------------------------------------


def test_the_window_by_hand() -> None:
    """The page's example: "the cat sat on", three columns, 3-grams."""
    the, cat, sat, on, a, mat = 1, 2, 3, 4, 5, 6
    window = window_of([the, cat, sat, on], 3, 3, 2)
    assert [*map(list, window.levels)] == [[the, cat, sat], [on, the, cat]], (
        "at first the window holds the text's ids, level by level, over and over"
    )
    ids, parents = window.tokens(on)
    assert ids == [on, cat, sat, on, the, cat], "the first level begins with the last known token"
    assert parents == [-1, 0, 1, 0, 1, 2], (
        "in the first level a token's parent stands before it, in a later one above it"
    )
    window.learn([a, mat, the])
    assert [*map(list, window.levels)] == [[on, the, cat], [a, mat, the]], (
        "learn() drops the first level, and the new tokens are the last one"
    )
    ids, parents = window.tokens(cat)
    assert ids == [cat, the, cat, a, mat, the, the, mat], (
        "behind the window stand the n-grams of the last token, which is left out: cat the mat"
    )
    assert parents == [-1, 0, 1, 0, 1, 2, 0, 6], "an n-gram is a chain from the last known token"


def test_the_pool_by_hand() -> None:
    """Of each first token it keeps the newest, and none twice."""
    window = window_of([7], 1, 3, 3)

    def add(*ngram: int) -> None:
        window.levels = [[ngram[0]], [ngram[1]]]
        window.learn([ngram[2]])

    for ngram in ((7, 1, 2), (7, 3, 4), (8, 3, 4), (7, 1, 2)):
        add(*ngram)
    assert ngrams(window, 7) == [(1, 2), (3, 4)], "an n-gram that comes again is not kept twice"
    add(7, 5, 6)
    add(7, 9, 9)
    assert ngrams(window, 7) == [(1, 2), (5, 6), (9, 9)], (
        "the three newest are kept for each first token, and one that comes again is new again"
    )
    assert ngrams(window, 8) == [(3, 4)], "each first token has n-grams of its own"
    assert ngrams(window, 9) == []


# --- One forward ----------------------------------------------------------------------------------

# The window and two n-grams of the page's picture.
PARENTS = [-1, 0, 1, 0, 1, 2, 0, 6, 0, 8]


def test_positions_and_mask_by_hand() -> None:
    plan = needs("lookahead", "plan", TODO)
    model = tiny_model(num_attention_heads=2, num_key_value_heads=1, windows=(None, 2))
    positions, caches = plan(StaticCache(model, 1, 40), 2, PARENTS)
    assert positions.tolist() == [[2, 3, 4, 3, 4, 5, 3, 4, 3, 4]], (
        "a token's position is its parent's, plus one: only then is its n-gram one piece of text"
    )
    whole = """
        11 1.........   11 11........   11 111.......   11 1..1......   11 11..1.....
        11 111..1....   11 1.....1...   11 1.....11..   11 1.......1.   11 1.......11"""
    near = """
        .1 1.........   .. 11........   .. .11.......   .. 1..1......   .. .1..1.....
        .. ..1..1....   .. 1.....1...   .. ......11..   .. 1.......1.   .. ........11"""
    for cache, picture in zip(caches, (whole, near)):
        wanted = ["".join(pair) for pair in zip(picture.split()[::2], picture.split()[1::2])]
        seen = (cache.masks[cache.view] == 0).int()[0, 0].tolist()
        lines = ["".join(".1"[bit] for bit in line) for line in seen]
        assert len(lines) == 20, "the rows of one query head, then those of the next: see Masks"
        assert all("1" not in line[12:] for line in lines), "a slot after the last token is seen"
        for i, line in enumerate(wanted):
            assert lines[i][:12] == line, (
                f"token {i} sees {lines[i][:12]}, not {line}: it should see the text, its "
                "ancestors and itself, and under a window of 2 only the positions p and p - 1"
            )
        assert lines[10:] == lines[:10], "the second query head sees something else"


def path_to(parents: list[int], node: int) -> list[int]:
    return [*path_to(parents, parents[node]), node] if node else [0]


@MODELS
@torch.no_grad()
def test_each_token_has_the_logits_of_its_own_text(model: Transformer) -> None:
    """The twin runs the path to each token as a text of its own, without any cache."""
    plan = needs("lookahead", "plan", TODO)
    cache, start = StaticCache(model, 1, 60), 11
    model(torch.tensor([TEXT[:start]]), *cache.plan(0, start))
    ids = TEXT[start : start + len(PARENTS)]
    got = model(torch.tensor([ids]), *plan(cache, start, PARENTS))[0]
    for node in range(len(PARENTS)):
        text = TEXT[:start] + [ids[i] for i in path_to(PARENTS, node)]
        want = logits_of(model, text)[-1]
        close(got[node], want, f"token {node} of {PARENTS} sees a wrong text")


class Twin:
    """The slow twin: the page's rules, in which each guess is run as a text of its own."""

    def __init__(self, model: Transformer, ids: list[int], width: int, n: int, most: int) -> None:
        self.model, self.most = model, most
        start = [ids[i % len(ids)] for i in range(width * (n - 1))]
        self.levels = [start[i * width : (i + 1) * width] for i in range(n - 1)]
        self.pool: list[tuple[int, ...]] = []

    def next(self, ids: list[int]) -> int:
        return logits_of(self.model, ids)[-1].argmax().item()

    def step(self, ids: list[int]) -> list[int]:
        """The next tokens after a text, by one forward."""
        self.levels[0][0] = ids[-1]
        first, *later = self.levels
        new = [
            self.next(ids[:-1] + first[: j + 1] + [level[j] for level in later])
            for j in range(len(first))
        ]
        output, alive = [], [ngram[1:] for ngram in self.pool if ngram[0] == ids[-1]]
        while not output or alive:
            output.append(self.next(ids + output))
            at = len(output)
            alive = [rest for rest in alive if rest[:at] == (*output,)]
        for ngram in zip(*self.levels, new):
            same = [each for each in self.pool if each[0] == ngram[0] and each != ngram]
            rest = [each for each in self.pool if each[0] != ngram[0]]
            self.pool = rest + [*same, ngram][-self.most :]
        self.levels = [*later, new]
        return output


@MODELS
@pytest.mark.parametrize("sizes", [SIZES, (1, 2, 1), (3, 4, 2), (6, 2, 3)], ids=str)
@torch.no_grad()
def test_each_forward_does_what_the_slow_twin_does(
    model: Transformer, sizes: tuple[int, int, int]
) -> None:
    verify = needs("lookahead", "verify", TODO)
    cache, start, lengths = StaticCache(model, 1, 120), 7, set()
    model(torch.tensor([TEXT[:start]]), *cache.plan(0, start))
    first = logits_of(model, TEXT[:start])[-1].argmax().item()
    params = SamplingParams(temperature=0, max_tokens=100)
    sequence = Sequence([*TEXT[:start], first], params, model.config)
    window, twin = window_of(TEXT[:start], *sizes), Twin(model, TEXT[:start], *sizes)
    for step in range(20):
        known = [*sequence.ids]
        got = verify(model, sequence, cache, window)
        assert sequence.ids == known, "verify() appends nothing: write() does"
        want, ids = twin.step(known), [token.id for token in got]
        where = f"in forward {step + 1} after the prompt's"
        assert ids[: len(want)] == want[: len(ids)], (
            f"{where} the tokens are not the model's: do the keys of the accepted ones stand in "
            "their places?"
        )
        assert len(ids) >= len(want), (
            f"{where} {len(ids)} tokens come out, not {len(want)}: each n-gram of the last token "
            "is followed as long as it is right, also where two begin alike"
        )
        assert len(ids) == len(want), (
            f"{where} {len(ids)} tokens come out, not {len(want)}: only n-grams are checked, and "
            "the window's tokens are not"
        )
        assert [*map(list, window.levels)] == twin.levels, (
            f"{where} the window is wrong: its new level is the likeliest token after each of the "
            "last level, and each forward moves it on by one level, whatever is accepted"
        )
        lengths.add(len(ids))
        for token in got:
            sequence.append(token)
    assert len(lengths) > 1 or sizes[0] == 1, "the test is of no use"


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
@torch.no_grad()
def test_two_ngrams_that_begin_alike(kv_dtype: str) -> None:
    """Bug: the first one that fits is followed, and what the other one knows is lost. Afterwards
    the cache holds the text as if it had been run token by token."""
    verify = needs("lookahead", "verify", TODO)
    best = write_plainly(MODEL, TEXT[:9], max_tokens=5).ids
    a, b, c = best[9:12]
    other = (b + 1) % 32
    fresh = StaticCache(MODEL, 1, 60, kv_dtype)
    MODEL(torch.tensor([best[:12]]), *fresh.plan(0, 12))
    for rests in ([(a, other, other), (a, b, c)], [(a, b, c), (a, other, other)]):
        cache, window = StaticCache(MODEL, 1, 60, kv_dtype), window_of(TEXT[:9], 1, 4, 2)
        for rest in rests:
            window.levels = [[each] for each in (TEXT[8], *rest[:2])]
            window.learn([rest[2]])
        MODEL(torch.tensor([TEXT[:8]]), *cache.plan(0, 8))
        sequence = Sequence(TEXT[:9], SamplingParams(temperature=0), MODEL.config)
        tokens = [token.id for token in verify(MODEL, sequence, cache, window)]
        assert tokens == best[9:13], (
            f"the text goes on by {best[9:13]} and the n-grams are {rests}, but {tokens} come out"
        )
        for pair in zip(cache.slabs, fresh.slabs):
            have, want = (from_stored(slab[:, :, :12], MODEL.dtype) for slab in pair)
            text = "the keys and values of accepted tokens must stand behind those of the text"
            assert torch.allclose(have, want, atol=1e-5 if kv_dtype == "auto" else 0.1), text


# --- Whole texts ----------------------------------------------------------------------------------


def sequence_of(model: Transformer, ids: list[int], **wishes: Any) -> Sequence:
    asked = {"max_tokens": 40, "ignore_eos": True, "temperature": 0, "seed": 1} | wishes
    return Sequence([*ids], SamplingParams(**asked), model.config)


def write_plainly(model: Transformer, ids: list[int], **wishes: Any) -> Sequence:
    sequence = sequence_of(model, ids, **wishes)
    list(generate(model, sequence, StaticCache(model, 1, sequence.max_len)))
    return sequence


def write_ahead(
    model: Transformer, ids: list[int], sizes: tuple[int, int, int],
    kv_dtype: str = "auto", **wishes: Any,
) -> tuple[Sequence, int]:  # fmt: skip
    """Write a text with lookahead: it, and how many forwards came after the prompt's."""
    write = needs("lookahead", "write", TODO)
    width, n, most = sizes
    sequence, window = sequence_of(model, ids, **wishes), window_of(ids, *sizes)
    room = (n - 1) * (width + most)
    cache = StaticCache(model, 1, sequence.max_len + room, kv_dtype)
    ran: list[int] = []
    hook = model.register_forward_hook(lambda _, args, __: ran.append(args[0].numel()))
    try:
        yielded = list(write(model, sequence, cache, window))
    finally:
        hook.remove()
    assert [token.id for token in yielded] == sequence.token_ids, "it yields what it appends"
    assert ran[0] == len(ids), "the prompt is run first, by itself"
    assert all((n - 1) * width <= size <= room for size in ran[1:]), (
        f"forwards over {sorted({*ran[1:]})} tokens: each runs the window and its n-grams at once"
    )
    return sequence, len(ran) - 1


def same(got: Sequence, want: Sequence) -> None:
    pairs = zip(got.token_ids, want.token_ids)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    assert at is None, (
        f"output token {at} is {got.token_ids[at]}, and generate() writes {want.token_ids[at]}: "
        "choose each token by sample(), for the sequence as it stands ahead of it, from the "
        "logits of a token whose path is the text"
    )
    assert got.token_ids == want.token_ids, "write() stops too early or too late"
    assert got.finish_reason == want.finish_reason


WISHES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "penalties": {"repetition_penalty": 1.5, "frequency_penalty": 0.5},
    "log-probabilities": {"logprobs": 2, "max_tokens": 9},
    "EOS": {"ignore_eos": False, "stop_token_ids": (3, 11), "max_tokens": 60},
    "one token": {"max_tokens": 1},
    "sampled": {"temperature": 0.4, "top_k": 8},
    "sampled, with a penalty": {"temperature": 0.5, "presence_penalty": 1.0, "seed": 3},
}


@pytest.mark.parametrize("wish", WISHES)
@MODELS
def test_the_text_is_that_of_generate(model: Transformer, wish: str) -> None:
    """Bug: keys of a refused n-gram stay where the next token's belong. Sampled too: a guess
    stands where it is what generate() would have drawn."""
    want = write_plainly(model, TEXT[:7], **WISHES[wish])
    for sizes in (SIZES, (1, 2, 1), (5, 4, 5)):
        got, forwards = write_ahead(model, TEXT[:7], sizes, **WISHES[wish])
        same(got, want)
        for a, b in zip(got.tokens, want.tokens):
            assert a.logprob == (None if b.logprob is None else pytest.approx(b.logprob, abs=1e-4))
        assert forwards < len(got.tokens) or len(got.tokens) == 1


def test_in_a_cache_of_int8() -> None:
    want = sequence_of(MODEL, TEXT[:7])
    list(generate(MODEL, want, StaticCache(MODEL, 1, want.max_len, "int8")))
    got, _ = write_ahead(MODEL, TEXT[:7], SIZES, "int8")
    same(got, want)


def test_fewer_forwards_than_tokens_on_texts_that_repeat() -> None:
    """The bundled model, greedily, soon says the same again and again. With -s it shows the rates
    of the page."""
    model, rates = bundled(), {}
    texts = [
        [1, 812, 983, 13],  # "ROMEO:", and "First Citizen: Before we proceed any further, ..."
        [1, 642, 418, 891, 983, 13, 768, 556, 333, 581, 309, 318, 805, 274, 362, 700, 975, 676],
    ]
    start = time.perf_counter()
    wanted = [write_plainly(model, ids, max_tokens=120) for ids in texts]
    print(f"\ngenerate(): {240 / (time.perf_counter() - start):.0f} tokens/s")
    for sizes in ((2, 2, 1), (5, 3, 5), (7, 5, 7)):
        start, forwards = time.perf_counter(), 0
        for ids, want in zip(texts, wanted):
            got, count = write_ahead(model, ids, sizes, max_tokens=120)
            same(got, want)
            forwards += count
        rates[sizes] = 2 * 119 / forwards
        speed = 240 / (time.perf_counter() - start)
        print(f"{sizes}: {rates[sizes]:.2f} tokens a forward, {speed:.0f} tokens/s")
    assert rates[7, 5, 7] > rates[5, 3, 5] > rates[2, 2, 1] > 1, f"tokens a forward: {rates}"
    assert rates[7, 5, 7] > 2, f"tokens a forward: {rates}"
