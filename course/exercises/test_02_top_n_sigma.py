"""Exercise 02: keep the tokens that stand out from the noise. See 02-top-n-sigma.md."""

import math

import pytest
import torch
from common import call, needs, serve, tiny_model, write

from around.settings import SamplingParams
from sampling import Sequence, distribution
from scheduler import Engine
from speculative import NGram

MODEL = tiny_model()
TODO = "give SamplingParams the setting top_n_sigma"
LOGITS = [4.0, 3.0, 1.0, 0.0, 0.0, -1.0, -1.0, -2.0, 8.0, -12.0]  # mean 0, sigma 4.899


def row(**settings: float | dict[int, float]) -> Sequence:
    return Sequence([1], call(SamplingParams, todo=TODO, **settings), MODEL.config)


def kept(logits: list[float], **settings: float | dict[int, float]) -> list[int]:
    (probs,) = distribution(torch.tensor([logits]), [row(**settings)])
    assert probs.sum().item() == pytest.approx(1, abs=1e-5), "the probabilities must sum to 1"
    return [i for i, p in enumerate(probs.tolist()) if p > 0]


def test_it_is_a_setting_with_a_range() -> None:
    """A field made with setting() is checked, and becomes an option of generate.py and the
    server."""
    assert call(SamplingParams, todo=TODO, top_n_sigma=1.5).top_n_sigma == 1.5
    assert SamplingParams().top_n_sigma == 0, "the default is 0, which is off"
    for wrong in (-1.0, math.nan, math.inf, "1"):
        with pytest.raises(ValueError, match="top_n_sigma"):
            SamplingParams(top_n_sigma=wrong)
    parse_args = needs("generate", "parse_args", "it was there")
    assert parse_args(["--top-n-sigma", "2"]).top_n_sigma == 2


@pytest.mark.parametrize(
    ("n", "expected"), [(0.1, [8]), (1.0, [0, 8]), (1.1, [0, 1, 8]), (1.5, [0, 1, 2, 8])]
)
def test_logits_below_the_largest_less_n_sigma_are_dropped(n: float, expected: list[int]) -> None:
    assert sum(LOGITS) == 0
    sigma = math.sqrt(sum(x * x for x in LOGITS) / len(LOGITS))
    assert expected == [i for i, x in enumerate(LOGITS) if x >= 8 - n * sigma]
    wrong = "keep logits of at least max - n * sigma, where sigma is std(correction=0)"
    assert kept(LOGITS, top_n_sigma=n) == expected, wrong


def test_the_temperature_does_not_change_what_is_kept() -> None:
    """This is the point of the setting: with min_p, a hot sampler keeps more of the noise."""
    for temperature in (0.3, 1.0, 3.0, 30.0):
        chosen = kept(LOGITS, top_n_sigma=1.1, temperature=temperature)
        wrong = f"sigma must be computed before the temperature, which is {temperature}"
        assert chosen == [0, 1, 8], wrong
    assert kept(LOGITS, min_p=0.1, temperature=30.0) != kept(LOGITS, min_p=0.1)


def test_it_comes_after_the_bias_and_the_penalties() -> None:
    wrong = "compute the largest logit and sigma after logit_bias and the penalties"
    assert kept(LOGITS, top_n_sigma=0.5, logit_bias={9: 30.0}) == [9], wrong


def test_tokens_that_are_ruled_out_do_not_count() -> None:
    """Bug: min_tokens gives EOS a logit of -inf, so sigma over all V is NaN, and no logit is below
    that."""
    wrong = "compute sigma and the largest logit over the finite logits: -inf does not count"
    ruled_out = [0, 8]  # EOS, and the likeliest as a stop token; the largest of the others is 3
    rest = [x for i, x in enumerate(LOGITS) if i not in ruled_out]
    mean = sum(rest) / len(rest)
    sigma = math.sqrt(sum((x - mean) ** 2 for x in rest) / len(rest))  # 4.444
    settings = {"min_tokens": 1, "stop_token_ids": (8,)}
    for n, expected in ((0.3, [1]), (0.5, [1, 2]), (1.0, [1, 2, 3, 4, 5, 6])):
        left = {i for i, x in enumerate(LOGITS) if x >= 3 - n * sigma} - {*ruled_out}
        assert left == {*expected}
        assert kept(LOGITS, top_n_sigma=n, **settings) == expected, wrong


def test_it_combines_with_the_other_settings() -> None:
    assert kept(LOGITS, top_n_sigma=1.5, top_k=2) == [0, 8]
    assert kept(LOGITS, top_n_sigma=0.1, temperature=0.0) == [8]


def test_others_in_the_batch_are_left_alone() -> None:
    """Bug: a row gets other bits in a batch than alone."""
    logits = torch.randn(5, 32)
    rows = [row(), row(top_n_sigma=0.5), row(top_n_sigma=1.0, temperature=2.0), row(top_p=0.5)]
    rows.append(row(top_n_sigma=2.0, min_p=0.01))
    together = distribution(logits, rows)
    for i, each in enumerate(rows):
        assert torch.equal(together[i], distribution(logits[i : i + 1], [each])[0])
    assert (together[0] > 0).all(), "a row with top_n_sigma 0 keeps every token"


def test_generation_and_speculation_have_it() -> None:
    """Both draw from distribution(), so they need no change."""
    call(SamplingParams, todo=TODO, top_n_sigma=1.0)
    ids = [5, 6, 7, 5, 6, 7, 5]
    greedy = write(MODEL, ids, 12).token_ids
    hot = SamplingParams(temperature=50.0, seed=1, top_n_sigma=1e-4, max_tokens=12, ignore_eos=True)
    for proposer in (None, NGram(3)):
        engine = Engine(MODEL, proposer=proposer, num_blocks=8, max_num_seqs=2)
        (request,) = serve(engine, (ids, hot))
        got = request.outputs[0].token_ids
        assert got == greedy, "with so small an n, only the likeliest token stays"
