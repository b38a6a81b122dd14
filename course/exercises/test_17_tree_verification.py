"""Exercise 17: a tree of guesses, checked in one forward. See 17-tree-verification.md."""

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from common import close, logits_of, needs, tiny_model
from torch import Tensor

from around.folder import build
from around.settings import SamplingParams
from generate import generate
from kv_cache import StaticCache, from_stored
from model import Transformer
from sampling import Sequence, Token, distribution, draw, uniform
from speculative import ACCEPT

TODO = "make the file in the root, with Tree, plan, accept, verify and write"
MODEL = tiny_model(num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2)
SLIDING = tiny_model(num_hidden_layers=3, windows=(5, None, 3), qk_norm=True)
TEXT = random.Random(2).choices(range(1, 32), k=60)
# Trees, by the parents of their nodes: a small one, a chain, the root alone, a bush.
SHAPES = [[-1, 0, 0, 1, 0, 4, 4], [-1, 0, 1, 2, 3], [-1], [-1, 0, 0, 1, 1, 2, 2, 3, 3, 6, 6, 6]]


def tree(ids: list[int], parents: list[int], probs: list[Tensor] | None = None) -> Any:
    return needs("tree", "Tree", TODO)(ids, parents, probs)


def path_to(parents: list[int], node: int) -> list[int]:
    """The nodes from the root to this one."""
    return [*path_to(parents, parents[node]), node] if node else [0]


def run(model: Transformer, slabs: StaticCache, ids: list[int]) -> None:
    """Run a whole text, which fills the cache."""
    positions, caches = slabs.plan(0, len(ids))
    model(torch.tensor([ids]), positions, caches)


# --- One forward ----------------------------------------------------------------------------------


def test_positions_and_mask_by_hand() -> None:
    """This is the page's example: "the" is the root, in slot 2, after two tokens of text."""
    plan = needs("tree", "plan", TODO)
    model = tiny_model(num_attention_heads=2, num_key_value_heads=1, windows=(None, 2))
    slabs = StaticCache(model, 1, 40)
    guesses = tree([3, 4, 5, 6, 7], [-1, 0, 0, 1, 2])  # the, cat, dog, sat, ran
    positions, caches = plan(slabs, 2, guesses)
    assert positions.tolist() == [[2, 3, 3, 4, 4]], "a node's position is its parent's plus one"
    whole = ["11 1....", "11 11...", "11 1.1..", "11 11.1.", "11 1.1.1"]
    near = [".1 1....", ".. 11...", ".. 1.1..", ".. .1.1.", ".. ..1.1"]
    for cache, wanted in zip(caches, (whole, near)):
        seen = (cache.masks[cache.view] == 0).int()[0, 0].tolist()
        lines = ["".join(".1"[bit] for bit in line) for line in seen]
        wrong = "the mask has the rows of one query head, then those of the next: see Masks"
        assert len(lines) == 10, wrong
        assert all("1" not in line[7:] for line in lines), "a slot after the tree is visible"
        got = [f"{line[:2]} {line[2:7]}" for line in lines]
        assert got[:5] == wanted, "a node must see the text, its ancestors and itself"
        assert got[5:] == wanted, "the second query head must see the same as the first"


@pytest.mark.parametrize("parents", SHAPES, ids=str)
@pytest.mark.parametrize("model", [MODEL, SLIDING], ids=["plain", "sliding"])
@torch.no_grad()
def test_each_node_has_the_logits_of_its_own_text(model: Transformer, parents: list[int]) -> None:
    """The slow twin runs each path as a text of its own, without a cache."""
    plan = needs("tree", "plan", TODO)
    slabs, start = StaticCache(model, 1, 60), 11
    run(model, slabs, TEXT[:start])
    ids = TEXT[start : start + len(parents)]
    positions, caches = plan(slabs, start, tree(ids, parents))
    got = model(torch.tensor([ids]), positions, caches)[0]
    for node in range(len(parents)):
        text = TEXT[:start] + [ids[i] for i in path_to(parents, node)]
        wrong = f"node {node} of {parents} sees the wrong tokens"
        close(got[node], logits_of(model, text)[-1], wrong)


# --- Which nodes are accepted ---------------------------------------------------------------------


def accept(p: Tensor, guesses: Any, u: list[float]) -> tuple[list[int], Tensor]:
    path, rest = needs("tree", "accept", TODO)(p, guesses, u)
    return path, rest / rest.sum()


def test_accept_by_hand() -> None:
    """The next sibling is tried against what a refused one's q leaves of p."""
    p, q = torch.tensor([0.5, 0.4, 0.1]), torch.tensor([0.8, 0.1, 0.1])
    after = torch.tensor([0.0, 0.0, 1.0])
    guesses = tree([9, 0, 1, 2], [-1, 0, 0, 2], [q, q, q, q])
    rows = torch.stack((p, after, after, after))
    wrong = "p(0) / q(0) is 0.625, so u = 0.62 accepts token 0"
    assert accept(rows, guesses, [0, 0.62, 0, 0])[0] == [0, 1], wrong
    path, rest = accept(rows, guesses, [0, 0.63, 0.9, 0.9])
    wrong = "after the refusal only token 1 is left, so it is certain, and so is token 2 after it"
    assert path == [0, 2, 3], wrong
    assert torch.equal(rest, after)
    path, rest = accept(rows, tree([9, 0, 2], [-1, 0, 0], [q, q, q]), [0, 0.63, 0.0])
    assert path == [0], "a token whose remaining probability is 0 must never be accepted"
    close(
        rest, torch.tensor([0.0, 1.0, 0.0]), "after a refusal p becomes max(0, p - q), normalised"
    )
    path, rest = accept(rows, tree([9, 0, 2], [-1, 0, 0]), [0, 0.5, 0.2])
    assert path == [0], "without probs, q(x) is 1: accept x only if u is below what is left of p(x)"
    close(rest, torch.tensor([0.0, 1.0, 0.0]), "a certain guess that is refused gets probability 0")
    assert accept(rows, tree([9, 0, 2], [-1, 0, 0]), [0, 0.5, 0.19])[0] == [0, 2], (
        "in [0.5, 0.4, 0.1] without token 0, token 2 has 0.2: normalise after each refusal"
    )


P = torch.tensor(
    [[0.45, 0.45, 0.1], [0.1, 0.2, 0.7], [0.6, 0.1, 0.3], [0.25, 0.25, 0.5]], dtype=torch.float64
)
Q = torch.tensor([[0.3, 0.1, 0.6], [0.3, 0.6, 0.1], [0.45, 0.1, 0.45]], dtype=torch.float64)
# name: (the parents, the row of Q from which each node is drawn)
FORESTS = {
    "a chain": ([-1, 0, 1], [0, 0, 1]),
    "two siblings": ([-1, 0, 0], [0, 0, 0]),
    "siblings of different drafts": ([-1, 0, 0, 0], [0, 0, 1, 2]),
    "siblings, none of them twice": ([-1, 0, 0, 0], [0, 0, 0, 0]),
    "a tree": ([-1, 0, 0, 1, 2], [0, 0, 0, 1, 1]),
}


def without(q: Tensor, token: int) -> Tensor:
    """Return the distribution of the next sibling if it must be another token."""
    q = q.clone()
    q[token] = 0
    return q / q.sum().clamp(min=1e-30)


@pytest.mark.parametrize("forest", FORESTS)
def test_the_chances_are_those_of_the_model(forest: str) -> None:
    """Sum over all draws of the guesses, weighted by their probability, and over u in its whole
    range: the next tokens must have the distribution p.

    Two tokens are counted, because the second one's distribution, P[1 + token], depends on the
    first.
    """
    parents, drafts = FORESTS[forest]
    T, found = len(parents), torch.zeros(3, 3, dtype=torch.float64)
    points = torch.quasirandom.SobolEngine(T - 1).draw(257, dtype=torch.float64)[1:]
    for ids in itertools.product(range(3), repeat=T - 1):
        probs, chance = [Q[draft] for draft in drafts], 1.0
        for i, token in enumerate(ids, 1):
            chance *= probs[i][token].item()
            if forest == "siblings, none of them twice" and i + 1 < T:
                probs[i + 1] = without(probs[i], token)
        if not chance:
            continue
        rows = torch.stack([P[0], *(P[1 + token] for token in ids)])
        guesses = tree([2, *ids], parents, probs)
        for u in points.tolist():
            path, rest = accept(rows, guesses, [0.0, *u])
            before = [guesses.ids[i] for i in path[1:]]
            part = chance / len(points)
            if not before:
                found += part * rest[:, None] * P[1:]  # the next forward's
            elif len(before) == 1:
                found[before[0]] += part * rest
            else:
                found[before[0], before[1]] += part
    wrong = (found - P[0][:, None] * P[1:]).abs().max().item()
    problem = f"the probabilities of two tokens are off by {wrong:.3f}: guesses must not change p"
    assert wrong < 0.006, problem


# --- Whole texts ----------------------------------------------------------------------------------


def grow(draft: Transformer, widths: list[int], sampled: bool) -> Callable[[Sequence], Any]:
    """Make a proposer. Each node of level i gets widths[i] children: the draft's likeliest tokens
    or, if `sampled`, different tokens drawn from the draft."""

    def guess(sequence: Sequence) -> Any:
        ids, parents, level = [sequence.ids[-1]], [-1], [0]
        probs = [torch.zeros(draft.config.vocab_size)]
        room = sequence.max_len - len(sequence.ids) - 1
        for width in widths[:room]:
            leaves, level = level, []
            texts = [[ids[i] for i in path_to(parents, leaf)][1:] for leaf in leaves]
            rows = torch.tensor([sequence.ids + text for text in texts])
            places = torch.arange(rows.shape[1]).expand(len(rows), -1)
            logits = draft(rows, places)[:, -1]
            chances = distribution(logits, [sequence.with_guesses(text) for text in texts])
            for leaf, scores, q in zip(leaves, logits, chances):
                likeliest = scores.topk(width).indices.tolist()
                for i in range(width):
                    token = likeliest[i]
                    if sampled and not q.any():
                        break  # every possible token has been guessed
                    if sampled:
                        u = uniform(77, 1000 * len(sequence.ids) + len(ids))
                        token = draw(q[None], torch.tensor([u])).item()
                    level.append(len(ids))
                    ids.append(token)
                    parents.append(leaf)
                    probs.append(q)
                    q = without(q, token)
        return tree(ids, parents, probs if sampled else None)

    return guess


@torch.no_grad()
def speak(
    model: Transformer, ids: list[int], guess: Callable[[Sequence], Any], **settings: Any
) -> tuple[Sequence, int]:
    """Write a text with trees. Returns it, and the number of forwards that checked a tree."""
    write = needs("tree", "write", TODO)
    params = SamplingParams(**{"max_tokens": 24, "ignore_eos": True, "seed": 1} | settings)
    sequence, forwards = Sequence([*ids], params, model.config), 0

    def counted(sequence: Sequence) -> Any:
        nonlocal forwards
        forwards += 1
        return guess(sequence)

    yielded = list(write(model, sequence, StaticCache(model, 1, sequence.max_len + 40), counted))
    assert [token.id for token in yielded] == sequence.token_ids, "write() yields what it appends"
    return sequence, forwards


def plain(model: Transformer, ids: list[int], **settings: Any) -> Sequence:
    params = SamplingParams(**{"max_tokens": 24, "ignore_eos": True, "seed": 1} | settings)
    sequence = Sequence([*ids], params, model.config)
    list(generate(model, sequence, StaticCache(model, 1, sequence.max_len)))
    return sequence


def noisy(model: Transformer, amount: float) -> Transformer:
    """Make a draft that is right sometimes: the model with noise on its weights."""
    draft, generator = build(model.config).to(model.dtype), torch.Generator().manual_seed(3)
    draft.load_state_dict(model.state_dict())
    for parameter in draft.parameters():
        if parameter.dim() > 1:
            noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            parameter += amount * parameter.std() * noise
    return draft


SETTINGS = {
    "greedy": {"temperature": 0},
    "penalties": {"temperature": 0, "repetition_penalty": 1.5, "frequency_penalty": 0.5},
    "log-probabilities": {"temperature": 0, "logprobs": 2, "max_tokens": 9},
    "EOS": {"temperature": 0, "ignore_eos": False, "stop_token_ids": (3, 11), "max_tokens": 60},
    "a short text": {"temperature": 0, "max_tokens": 2},
}


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("model", [MODEL, SLIDING], ids=["plain", "sliding"])
def test_greedy_text_is_that_of_generate(model: Transformer, setting: str) -> None:
    """Bug: keys of a refused node stay in the place of the next token's keys."""
    want = plain(model, TEXT[:7], **SETTINGS[setting])
    for amount, widths in ((0.0, [3, 2, 1]), (0.15, [2, 2, 2]), (0.5, [3, 2, 1])):
        guess = grow(noisy(model, amount), widths, sampled=False)
        got, forwards = speak(model, TEXT[:7], guess, **SETTINGS[setting])
        assert got.token_ids == want.token_ids, "generate() writes other tokens"
        assert got.finish_reason == want.finish_reason
        for a, b in zip(got.tokens, want.tokens):
            assert a.logprob == (None if b.logprob is None else pytest.approx(b.logprob, abs=1e-4))
        if not amount and setting == "greedy":
            assert forwards == 6, "with a draft that is always right, a forward makes 4 tokens"


def twin(model: Transformer, sequence: Sequence, guesses: Any) -> list[int]:
    """The slow twin of verify runs each node's text by itself, and tries siblings one by one."""
    output, at = [], 0
    while True:
        here = sequence.with_guesses(output)
        (p,) = distribution(logits_of(model, sequence.ids + output)[-1:], [here]).tolist()
        for node in [i for i, parent in enumerate(guesses.parents) if parent == at]:
            x, q = guesses.ids[node], guesses.probs[node].tolist()
            if (
                uniform(sequence.seed, ACCEPT + (node << 32) + len(sequence.token_ids)) * q[x]
                < p[x]
            ):
                output, at = [*output, x], node
                break
            over = [max(0.0, a - b) for a, b in zip(p, q)]
            p = [each / sum(over) for each in over]
        else:
            last = draw(torch.tensor([p]), torch.tensor([here.uniform()])).tolist()
            return output + last


@pytest.mark.parametrize("setting", [{}, {"top_k": 8, "min_p": 0.05}, {"presence_penalty": 1.0}])
@torch.no_grad()
def test_sampled_text_is_that_of_the_slow_twin(setting: dict[str, Any]) -> None:
    """A seed gives one text, because the page says which random numbers to use."""
    guess, lengths = grow(noisy(MODEL, 0.15), [3, 2], sampled=True), set()
    for seed in range(4):
        got, _ = speak(MODEL, TEXT[:7], guess, seed=seed, **setting)
        params = SamplingParams(max_tokens=24, seed=seed, ignore_eos=True, **setting)
        want = Sequence(TEXT[:7], params, MODEL.config)
        want.append(Token(got.token_ids[0]))  # the prompt's, from generate()
        while not want.finish_reason:
            tokens = twin(MODEL, want, guess(want))
            lengths.add(len(tokens))
            for token in tokens:
                if not want.finish_reason:
                    want.append(Token(token))
        assert got.token_ids == want.token_ids, "the page says which random numbers to use"
    assert lengths == {1, 2, 3}, "the test is useless"


def test_without_guesses_it_is_generate() -> None:
    """Without guesses, each token is drawn with the number that generate() uses."""
    root = lambda sequence: tree([sequence.ids[-1]], [-1])  # noqa: E731
    got, forwards = speak(MODEL, TEXT[:7], root, seed=5)
    assert got.token_ids == plain(MODEL, TEXT[:7], seed=5).token_ids
    assert forwards == 23


@torch.no_grad()
def test_the_accepted_path_is_in_place() -> None:
    """After a tree, the cache holds the text as if it had been run token by token, also in int8."""
    verify = needs("tree", "verify", TODO)
    best = plain(MODEL, TEXT[:9], temperature=0, max_tokens=4).ids
    one, two = best[9:11]
    for kv_dtype in ("auto", "int8"):
        slabs, params = StaticCache(MODEL, 1, 60, kv_dtype), SamplingParams(temperature=0)
        run(MODEL, slabs, TEXT[:8])
        sequence = Sequence(TEXT[:9], params, MODEL.config)
        wrong = (one + 1) % 32
        guesses = tree([TEXT[8], wrong, two, one, wrong, two], [-1, 0, 1, 0, 3, 3])
        tokens = [token.id for token in verify(MODEL, sequence, slabs, guesses)]
        assert tokens == best[9:12], "the third node and its second child must be accepted"
        assert sequence.ids == TEXT[:9], "verify() must not append tokens; write() does"
        fresh = StaticCache(MODEL, 1, 60, kv_dtype)
        run(MODEL, fresh, best[:11])
        for pair in zip(slabs.slabs, fresh.slabs):
            a, b = (from_stored(slab[:, :, :11], MODEL.dtype) for slab in pair)
            text = "the keys and values of the accepted path must be contiguous"
            assert torch.allclose(a, b, atol=1e-5 if kv_dtype == "auto" else 0.1), text


@pytest.mark.parametrize("temperature", [0, 1])
def test_a_tree_beats_a_chain_of_as_many_nodes(temperature: float) -> None:
    """With a mediocre draft, a tree needs fewer forwards for texts of the same length."""
    draft, rates = noisy(MODEL, 0.4), {}
    for name, widths in (("chain", [1] * 8), ("tree", [4, 1])):
        guess, tokens, steps = grow(draft, widths, sampled=bool(temperature)), 0, 0
        for seed in range(8):
            settings = {"temperature": temperature, "seed": seed, "max_tokens": 30}
            sequence, forwards = speak(MODEL, TEXT[5 * seed :][:7], guess, **settings)
            tokens, steps = tokens + len(sequence.tokens) - 1, steps + forwards
        rates[name] = tokens / steps
    print(rates)
    assert rates["tree"] > 1.1 * rates["chain"], f"the tokens per forward are {rates}"
