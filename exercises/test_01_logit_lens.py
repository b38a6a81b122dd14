"""Exercise 01: what the model would say if it stopped after each layer. See 01-logit-lens.md."""

from dataclasses import replace

import pytest
import torch
from common import close, logits_of, needs, tiny_model
from torch import Tensor

from model import Transformer
from quantize import quantize_model

IDS = [3, 14, 15, 9, 2, 6, 5]


def lens(model: Transformer, ids: list[int] = IDS) -> Tensor:
    logit_lens = needs("lens", "logit_lens", "make the file, with logit_lens(model, tokens)")
    return logit_lens(model, torch.tensor([ids]))


def test_there_is_one_answer_for_each_layer_and_one_before_the_first() -> None:
    model = tiny_model(num_hidden_layers=3)
    seen = lens(model)
    assert isinstance(seen, torch.Tensor), "logit_lens returns one tensor, see torch.stack"
    assert tuple(seen.shape) == (4, 1, len(IDS), 32), "the shape is (layers + 1, B, T, V)"
    assert not seen.requires_grad


def test_the_last_is_what_the_model_says() -> None:
    model = tiny_model(num_hidden_layers=3)
    last = lens(model)[-1, 0]
    close(last, logits_of(model, IDS), "the last entry is model(tokens, positions)")


def test_each_is_what_a_shorter_model_says() -> None:
    """The slow twin: a model that has only the first layers, with the same weights."""
    model = tiny_model(num_hidden_layers=3)
    seen = lens(model)[:, 0]
    bare = model.lm_head(model.norm(model.embed_tokens(torch.tensor(IDS))))
    close(seen[0], bare, "entry 0: the embedding alone, through the norm and lm_head")
    for layers in (1, 2):
        config = replace(model.config, num_hidden_layers=layers, windows=())
        short = Transformer(config).double()
        short.load_state_dict(model.state_dict(), strict=False)
        wrong = f"entry {layers}: the stream after {layers} layers, through the norm and lm_head"
        close(seen[layers], logits_of(short, IDS), wrong)


def test_texts_of_a_batch_are_apart_and_have_no_gradients() -> None:
    model, texts = tiny_model().requires_grad_(True), (IDS, IDS[::-1])
    logit_lens = needs("lens", "logit_lens", "make the file, with logit_lens(model, tokens)")
    both = logit_lens(model, torch.tensor(texts))
    assert both.shape[1] == 2, "B texts in, B texts out"
    assert not both.requires_grad, "nothing is trained here: see torch.no_grad"
    for i, ids in enumerate(texts):
        close(both[:, i], lens(model, ids)[:, 0], f"text {i} of a batch is what it is alone")


def test_nothing_is_left_in_the_model() -> None:
    """A hook that stays slows every later step down, and keeps its tensors alive."""
    model = tiny_model()
    lens(model)
    with pytest.raises(IndexError):
        lens(model, [5, 99])  # outside the vocabulary
    left = [n for n, m in model.named_modules() if m._forward_hooks or m._forward_pre_hooks]
    assert not left, f"hooks are left on {left}: remove() them, after an exception too (finally)"


def test_it_asks_nothing_of_the_weights() -> None:
    """From outside: so it works for quantised models as well."""
    model = quantize_model(tiny_model(), "int8")
    close(lens(model)[-1, 0], logits_of(model, IDS), "a quantised model's last entry")
