"""Exercise 01: the model's answer if it stopped after each layer. See 01-logit-lens.md."""

from dataclasses import replace

import pytest
import torch
from common import close, logits_of, needs, tiny_model
from torch import Tensor

from model import Transformer
from quantize import quantize_model

IDS = [3, 14, 15, 9, 2, 6, 5]


def lens(model: Transformer, ids: list[int] = IDS) -> Tensor:
    logit_lens = needs(
        "lens", "logit_lens", "make the file in the root, with logit_lens(model, tokens)"
    )
    return logit_lens(model, torch.tensor([ids]))


def test_there_is_one_answer_for_each_layer_and_one_before_the_first() -> None:
    model = tiny_model(num_hidden_layers=3)
    seen = lens(model)
    assert isinstance(seen, torch.Tensor), "logit_lens returns one tensor, see torch.stack"
    assert tuple(seen.shape) == (4, 1, len(IDS), 32), "the shape is (layers + 1, B, T, V)"
    assert not seen.requires_grad


def test_the_last_entry_is_the_model_s_answer() -> None:
    model = tiny_model(num_hidden_layers=3)
    last = lens(model)[-1, 0]
    close(last, logits_of(model, IDS), "the last entry is model(tokens, positions)")


def test_each_is_what_a_shorter_model_says() -> None:
    """The slow twin is a model that has only the first layers, with the same weights."""
    model = tiny_model(num_hidden_layers=3)
    seen = lens(model)[:, 0]
    bare = model.lm_head(model.norm(model.embed_tokens(torch.tensor(IDS))))
    close(seen[0], bare, "entry 0 is the embedding alone, passed through the norm and lm_head")
    for layers in (1, 2):
        config = replace(model.config, num_hidden_layers=layers, windows=())
        short = Transformer(config).double()
        short.load_state_dict(model.state_dict(), strict=False)
        wrong = f"entry {layers} is the stream after {layers} layers, through norm and lm_head"
        close(seen[layers], logits_of(short, IDS), wrong)


def test_texts_of_a_batch_are_apart_and_have_no_gradients() -> None:
    model, texts = tiny_model().requires_grad_(True), (IDS, IDS[::-1])
    logit_lens = needs(
        "lens", "logit_lens", "make the file in the root, with logit_lens(model, tokens)"
    )
    both = logit_lens(model, torch.tensor(texts))
    assert both.shape[1] == 2, "the result has a row for each of the B texts"
    assert not both.requires_grad, "nothing is trained here: see torch.no_grad"
    for i, ids in enumerate(texts):
        close(both[:, i], lens(model, ids)[:, 0], f"text {i} differs in a batch and alone")


def test_nothing_is_left_in_the_model() -> None:
    """Bug: a hook that stays slows down every later step, and keeps its tensors alive."""
    model = tiny_model()
    lens(model)
    with pytest.raises(IndexError):
        lens(model, [5, 99])  # outside the vocabulary
    left = [n for n, m in model.named_modules() if m._forward_hooks or m._forward_pre_hooks]
    assert not left, f"hooks are left on {left}: remove() them, after an exception too (finally)"


def test_it_works_on_quantised_weights() -> None:
    """Bug: the lens reads a weight, where a hook would do for any kind of Linear."""
    model = quantize_model(tiny_model(), "int8")
    wrong = "the last entry is model(tokens, positions), also for a quantised model"
    close(lens(model)[-1, 0], logits_of(model, IDS), wrong)
