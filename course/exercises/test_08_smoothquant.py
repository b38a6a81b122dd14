"""Exercise 08: weights and activations in int8. See 08-smoothquant.md."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from common import SHAKESPEARE, bundled, close, logits_of, needs, tiny_model, write
from torch import Tensor, nn

from around.folder import Tokenizer, load_model
from model import Transformer

TEXT = "ROMEO:\nBut, soft! what light through yonder window breaks?\nIt is the east, and Juliet"
OTHER = "KING RICHARD II:\nWhat must the king do now? must he submit?\nThe king shall do it: must"
LINEARS = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")


def ours(name: str) -> Any:
    return needs("smoothquant", name, "see the page for what it does")


def encode(text: str) -> list[int]:
    return Tokenizer(SHAKESPEARE).encode(text)


def linears(model: Transformer) -> list[nn.Module]:
    return [block.get_submodule(name) for block in model.layers for name in LINEARS]


@torch.no_grad()
def plant(model: Transformer, factor: float = 100.0, channels: tuple[int, ...] = (7, 100)) -> None:
    """Give a model the outliers that large models have. A few input channels of its Linears become
    much larger, and the weights that multiply them smaller, so it computes the same function."""
    at = [*channels]
    for block in model.layers:
        for norm, linear in (
            (block.input_layernorm, block.self_attn.qkv_proj),
            (block.post_attention_layernorm, block.mlp.gate_up_proj),
        ):
            norm.weight[at] *= factor
            linear.weight[:, at] /= factor
        block.mlp.gate_up_proj.weight.chunk(2)[1][at] *= factor
        block.mlp.down_proj.weight[:, at] /= factor


def smoothed(model: Transformer, tokens: Tensor, *alpha: float) -> Transformer:
    smooth, calibrate = ours("smooth"), ours("calibrate")
    model = deepcopy(model)
    smooth(model, calibrate(model, tokens), *alpha)
    return model


def layer(weight: Tensor) -> nn.Module:
    """Return what w8a8 makes of a Linear without a bias and with this weight, (16, 32)."""
    model = tiny_model(intermediate_size=32).float()
    model.layers[0].mlp.down_proj.weight.copy_(weight)
    return ours("w8a8")(model).layers[0].mlp.down_proj


# --- Integers -------------------------------------------------------------------------------------


def test_the_product_is_exact() -> None:
    """Bug: the sum is in float32, which has 24 bits; a sum of 5001 products takes 27."""
    x = torch.full((3, 5001), 127, dtype=torch.int8)
    x[:, 0] = torch.tensor([126, -127, 1])
    got = ours("int_product")(x, x[:2])
    assert got.dtype == torch.int32, "products of int8 must be added up in int32"
    assert got.tolist() == (x.long() @ x[:2].long().T).tolist(), "every integer must be exact"


def test_every_weight_is_a_byte() -> None:
    model = deepcopy(bundled())
    sizes = [linear.weight.shape for linear in linears(model)]
    ours("w8a8")(model)
    for linear, size in zip(linears(model), sizes, strict=True):
        kept = [*linear.buffers(), *linear.parameters()]
        ints = [t for t in kept if t.dtype == torch.int8]
        wrong = "each Linear stores one int8 weight"
        assert len(ints) == 1 and ints[0].numel() == size.numel(), wrong
        others = sum(t.numel() for t in kept) - ints[0].numel()
        wrong = "beside the weight, store only a scale (and a bias) for each output channel"
        assert others <= 2 * size[0], wrong
    assert isinstance(model.lm_head, nn.Linear), "lm_head stays as it is"


def test_every_product_is_of_integers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: the integers are turned back into floats before they are multiplied."""
    product, model = ours("int_product"), deepcopy(bundled())
    shapes = [(linear.out_features, linear.in_features) for linear in linears(model)]
    ours("w8a8")(model)
    seen = []

    def watched(x: Tensor, weight: Tensor) -> Tensor:
        assert x.dtype == weight.dtype == torch.int8, f"a product of {x.dtype} and {weight.dtype}"
        seen.append((*weight.shape,))
        return product(x, weight)

    monkeypatch.setattr("smoothquant.int_product", watched)
    logits_of(model, range(9))
    assert seen == shapes, "each Linear calls int_product(x, weight) once in a forward"
    monkeypatch.setattr("smoothquant.int_product", lambda *a: 0 * product(*a))
    wrong = "the result of int_product is not used"
    assert not model.layers[0].mlp.down_proj(torch.randn(3, 512)).any(), wrong


def test_the_error_is_half_a_step_of_each_side() -> None:
    """Tokens and output channels have all sizes, so each needs a scale of its own."""
    weight = torch.randn(16, 32) * torch.logspace(-3, 2, 16)[:, None]
    x = torch.randn(10, 32) * torch.logspace(-4, 3, 10)[:, None]
    got, want = layer(weight)(x), x.double() @ weight.double().T
    step, steps = (t.abs().amax(1, keepdim=True) / 127 for t in (weight, x))  # of each row
    ones = torch.ones_like
    allowed = x.abs() @ (step / 2 * ones(weight)).T + (steps / 2 * ones(x)) @ weight.abs().T
    allowed += 32 * steps / 2 @ step.T / 2
    worst = ((got - want).abs() / allowed).max().item()
    wrong = f"{worst:.1f} times the error with a scale for each token and each output channel"
    assert worst <= 1.001, wrong
    assert (got - want).abs().max() > 0, "nothing was rounded"


def test_a_token_gets_the_same_alone() -> None:
    """Bug: the batch has one scale, so that a neighbour's outliers make a token coarse."""
    linear, x = layer(torch.randn(16, 32)), torch.randn(2, 3, 32)
    x[0, 0] *= 1000
    got = linear(x)
    assert got.shape == (2, 3, 16)
    for b in range(2):
        for t in range(3):
            assert torch.equal(got[b, t], linear(x[b, t][None, None])[0, 0])


def test_zeros_stay_zero() -> None:
    weight = torch.randn(16, 32)
    weight[3] = 0
    got = layer(weight)(torch.cat((torch.zeros(1, 32), torch.randn(1, 32))))
    assert not got.isnan().any(), "the scale of a row of zeros must not be 0"
    assert not got[0].any() and not got[1, 3]


# --- Smoothing ------------------------------------------------------------------------------------


def test_calibration_finds_the_largest_of_each_channel() -> None:
    calibrate, model = ours("calibrate"), tiny_model()
    tokens = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])
    peaks = calibrate(model, tokens)
    paths = {f"layers.{i}.{name}" for i in range(2) for name in LINEARS}
    assert paths <= peaks.keys(), "calibrate returns a dict with the path of each Linear"
    normed = model.layers[0].input_layernorm(model.embed_tokens(tokens))
    got = peaks["layers.0.self_attn.qkv_proj"]
    close(got, normed.abs().amax((0, 1)), "take the largest |x| over all tokens of all texts")
    hooks = [{**m._forward_pre_hooks, **m._forward_hooks} for m in model.modules()]
    assert not any(hooks), "a hook stays on the model: remove() it"


@pytest.mark.parametrize("alpha", [0.0, 0.5, 0.8, 1.0])
def test_the_factors_are_those_of_the_paper(alpha: float) -> None:
    tokens = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
    model = tiny_model()
    peaks = ours("calibrate")(model, tokens)
    done = smoothed(model, tokens, alpha)
    after = ours("calibrate")(done, tokens)
    for name in ("self_attn.qkv_proj", "mlp.down_proj"):
        path = f"layers.1.{name}"
        weight, new = (m.get_submodule(path).weight for m in (model, done))
        s = peaks[path] ** alpha / weight.abs().amax(0) ** (1 - alpha)
        close(new, weight * s, f"{path}: multiply column j of the weight by s_j")
        close(after[path], peaks[path] / s, f"{path}: divide the input channel j by s_j")


@pytest.mark.parametrize("bias", [False, True])
def test_smoothing_alone_changes_nothing(bias: bool) -> None:
    """Bug: the bias of up_proj is not divided."""
    ids = [5, 3, 8, 1, 30, 2, 9]
    model = tiny_model(qkv_bias=bias, o_bias=bias, mlp_bias=bias)
    done = smoothed(model, torch.tensor([[7, 9, 3, 2, 28, 4]]))
    for path in ("self_attn.qkv_proj", "mlp.gate_up_proj", "mlp.down_proj"):
        weight, new = (m.layers[1].get_submodule(path).weight for m in (model, done))
        assert not torch.allclose(weight, new), f"the weight of {path} has not changed"
    close(logits_of(done, ids), logits_of(model, ids), "the smoothed model computes something else")
    done = smoothed(bundled(), torch.tensor([encode(TEXT)]))
    ids = encode(OTHER)
    assert (logits_of(done, ids) - logits_of(bundled(), ids)).abs().max() < 1e-3


def test_an_unused_channel_is_left_alone() -> None:
    """Bug: a factor is 0 / 0, because a norm's weight or a column of weights is 0."""
    model, ids = tiny_model(), [5, 3, 8, 1]
    model.layers[0].input_layernorm.weight[3] = 0
    model.layers[1].mlp.down_proj.weight[:, 5] = 0
    done = smoothed(model, torch.tensor([ids]))
    close(logits_of(done, ids), logits_of(model, ids), "a factor must not be 0, inf or NaN")


# --- Both -----------------------------------------------------------------------------------------


def divergence(model: Transformer) -> float:
    """Compute the KL divergence from the float model, in nats per token."""
    ids = encode(OTHER)
    want, got = (logits_of(m, ids).log_softmax(-1) for m in (bundled(), model))
    return (want.exp() * (want - got)).sum(-1).mean().item()


def test_outliers_cost_a_hundred_times_less() -> None:
    w8a8 = ours("w8a8")
    planted = deepcopy(bundled())
    plant(planted)
    assert divergence(planted) < 1e-6, "planting outliers must change nothing"
    plain = divergence(w8a8(deepcopy(planted)))
    soft = divergence(w8a8(smoothed(planted, torch.tensor([encode(TEXT)]))))
    assert plain > 0.03, f"{plain:.4f} nats without smoothing: is anything rounded?"
    assert soft < 0.003, f"{soft:.4f} nats with smoothing: are all three kinds of Linears smoothed?"


@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_half_way_is_better_than_either_end(alpha: float) -> None:
    """alpha 0 leaves all outliers in the activations, and alpha 1 moves all into the weights."""
    w8a8, tokens = ours("w8a8"), torch.tensor([encode(TEXT)])
    planted = deepcopy(bundled())
    plant(planted)
    assert divergence(w8a8(smoothed(planted, tokens))) * 1.5 < divergence(
        w8a8(smoothed(planted, tokens, alpha))
    )


def test_it_generates_in_bfloat16() -> None:
    ids = encode(TEXT)
    model = ours("w8a8")(
        smoothed(load_model(SHAKESPEARE, dtype=torch.bfloat16), torch.tensor([ids]))
    )
    assert logits_of(model, ids).dtype == torch.bfloat16
    assert len(write(model, ids, 8).token_ids) == 8
