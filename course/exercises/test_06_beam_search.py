"""Exercise 06: find the likeliest texts, on forked block tables. See 06-beam-search.md."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from common import logits_of, needs, serve, tiny_model, write
from torch import Tensor

from around.settings import SamplingParams
from model import Transformer
from paged import Row
from scheduler import Engine
from tools.books import audit_pool

MODEL = tiny_model(num_hidden_layers=3)
PROMPT = [3, 14, 15, 9, 2, 6, 5, 3, 5, 8]


def engine(num_blocks: int = 64, model: Transformer = MODEL) -> Engine:
    return Engine(model, num_blocks=num_blocks, block_size=4, max_num_seqs=8)


def search(at: Engine, ids: list[int], width: int, max_tokens: int) -> list[Any]:
    make = needs(
        "beam", "beam_search", "make the file in the root, with beam_search(engine, ids, width, n)"
    )
    beams = make(at, ids, width, max_tokens)
    for beam in beams:
        for name in ("ids", "logprob"):
            assert hasattr(beam, name), f"each beam has ids (prompt and output) and {name}"
        assert beam.ids[: len(ids)] == ids
    assert all(a.logprob >= b.logprob for a, b in pairwise(beams)), "the likeliest comes first"
    audit_pool(at.pool, [])
    assert len(at.pool.available) == at.pool.num_blocks, "blocks were not freed at the end"
    return beams


def twin(ids: list[int], width: int, max_tokens: int, model: Transformer = MODEL) -> list[tuple]:
    """The slow twin runs every text from its beginning, without a cache."""
    beams = [(0.0, ids)]
    for _ in range(max_tokens):
        options = []
        for logprob, text in beams:
            if len(text) > len(ids) and text[-1] in model.config.eos_ids:
                options.append((logprob, text))
                continue
            after = logits_of(model, text)[-1].log_softmax(-1).tolist()
            options += [(logprob + more, [*text, i]) for i, more in enumerate(after)]
        beams = sorted(options, reverse=True)[:width]
    return beams


def assert_same(beams: list[Any], want: list[tuple]) -> None:
    assert [beam.ids for beam in beams] == [text for _, text in want]
    assert [beam.logprob for beam in beams] == pytest.approx([p for p, _ in want], abs=1e-4)


def test_one_beam_is_greedy() -> None:
    (beam,) = search(engine(), PROMPT, 1, 12)
    greedy = write(MODEL, PROMPT, 12).ids
    end = next((i for i in range(len(PROMPT), len(greedy)) if greedy[i] == 0), len(greedy))
    assert beam.ids == greedy[: end + 1]


@pytest.mark.parametrize(("width", "max_tokens"), [(2, 10), (4, 9), (7, 5), (3, 1), (40, 2)])
def test_the_beams_are_those_without_a_cache(width: int, max_tokens: int) -> None:
    """Bug: two beams write into a block that they share, in place of copying it first."""
    assert_same(search(engine(), PROMPT, width, max_tokens), twin(PROMPT, width, max_tokens))


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8])
def test_wherever_the_prompt_ends(length: int) -> None:
    """The prompt may end within a block, at its end, or just after it."""
    ids = PROMPT[:length]
    assert_same(search(engine(), ids, 3, 6), twin(ids, 3, 6))


def test_ended_beams_stay_in_the_race() -> None:
    """EOS is frequent here. An ended beam keeps its place until better ones push it out."""
    model = tiny_model(eos_ids=(3, 7, 11, 19, 23))
    beams, want = search(engine(model=model), PROMPT, 6, 8), twin(PROMPT, 6, 8, model)
    assert len({len(text) for _, text in want}) > 1, "the test is useless: no beam ended early"
    assert_same(beams, want)


class Watched:
    """Records what each forward of an engine runs, and how many blocks are in use meanwhile."""

    def __init__(self, at: Engine) -> None:
        self.pool, self.forward, at.runner.forward = at.pool, at.runner.forward, self.watch
        self.rows, self.tokens, self.used = [], [], []

    def watch(self, rows: list[Row]) -> Tensor:
        self.rows.append(len(rows))
        self.tokens.append(sum(len(row.ids) for row in rows))
        self.used.append(self.pool.num_blocks - len(self.pool.available))
        return self.forward(rows)


def test_all_beams_run_in_one_forward() -> None:
    at = engine()
    watched = Watched(at)
    search(at, PROMPT, 4, 8)
    assert len(watched.rows) == 8, "run one forward for each new token"
    assert watched.tokens[0] == len(PROMPT), "the prompt must run once"
    assert max(watched.tokens[1:]) <= 4, "after the prompt, each beam runs its one new token"


def test_beams_share_what_they_have_in_common() -> None:
    at = engine()
    watched = Watched(at)
    prompt = PROMPT * 4  # ten blocks
    search(at, prompt, 4, 8)
    assert max(watched.used) <= 10 + 4 * 3, (
        f"{max(watched.used)} blocks of 4 are in use for 4 beams: {10 + 4 * 3} are enough if the "
        "prompt's 10 are shared (pool.fork) and dropped beams are freed at once"
    )


def test_it_needs_no_more_than_the_pool_has() -> None:
    """Bug: with too few blocks, the search fails in the middle and leaves tables behind."""
    search(engine(8), PROMPT, 2, 4)
    for blocks in (2, 4):
        small = engine(blocks)
        with pytest.raises(ValueError, match="block"):
            search(small, PROMPT, 4, 12)
        audit_pool(small.pool, [])
        assert len(small.pool.available) == blocks, "free every table after an error, too"


def test_the_engine_goes_on_afterwards() -> None:
    """The next request finds the prompt's blocks in the prefix cache, because commit() ran."""
    at = engine()
    search(at, PROMPT, 3, 5)
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    (request,) = serve(at, (PROMPT, params))
    assert request.outputs[0].ids == write(MODEL, PROMPT, 5).ids
    assert at.stats["prefix_cache_hits"] == 8, "the prompt's two full blocks were not found"


def test_wider_finds_likelier_texts() -> None:
    """A wider search need not find a likelier text, but here it does."""
    (greedy,) = search(engine(), PROMPT, 1, 8)
    best = search(engine(), PROMPT, 8, 8)[0]
    assert best.logprob > greedy.logprob
    assert torch.isfinite(torch.tensor(best.logprob))
