"""Exercise 07: weights in 8-bit floating point. See 07-fp8.md."""

import json
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from common import SHAKESPEARE, bundled, logits_of, tiny_model, write
from safetensors import safe_open
from torch import Tensor, nn

import quantize
from around.folder import load_model
from around.settings import EngineArgs
from model import Transformer
from quantize import quantize_model
from tools import convert

IDS = [10, 200, 30, 400, 50, 600, 70, 800]


def fp8(model: Transformer) -> Transformer:
    if "fp8" not in quantize.MODES:
        pytest.fail("quantize.py has no mode fp8 yet: see MODES", pytrace=False)
    return quantize_model(model, "fp8")


def weight_of(linear: nn.Module, inputs: int) -> Tensor:
    """Return the weight (N, K) of a layer without a bias, however it is stored."""
    return linear(torch.eye(inputs)).T


def rounded(weight: Tensor, mode: str = "fp8") -> Tensor:
    """Put a weight (16, 32) into a tiny model, quantise the model, and return the weight."""
    model = tiny_model(intermediate_size=32).float()
    model.layers[0].mlp.down_proj.weight.copy_(weight)
    model = fp8(model) if mode == "fp8" else quantize_model(model, mode)
    return weight_of(model.layers[0].mlp.down_proj, 32)


def test_every_linear_takes_a_byte_a_weight() -> None:
    plain = tiny_model().float()
    sizes = [m.weight.numel() for m in plain.modules() if isinstance(m, nn.Linear)]
    model = fp8(plain)
    left = [name for name, m in model.named_modules() if type(m) is nn.Linear]
    assert not left, f"{left} are still plain"
    stored = [b.nbytes for m in model.modules() for b in m.buffers(recurse=False) if b.dim() == 2]
    wrong = "store one byte for each weight, and one scale for each output channel"
    assert sum(sizes) <= sum(stored) < 2 * sum(sizes), wrong
    assert not [n for n, p in model.named_parameters() if p.dim() == 2 and "embed" not in n]


def test_the_error_is_that_of_three_bits_of_mantissa() -> None:
    weight = torch.randn(16, 32) * torch.logspace(-3, 2, 16)[:, None]  # rows of every size
    got = rounded(weight)
    scale = weight.abs().amax(1, keepdim=True) / 448  # the largest value of float8_e4m3fn
    allowed = weight.abs() / 16 + scale * 2**-10  # half a step for normal and subnormal numbers
    worst = ((got - weight).abs() / allowed).max().item()
    assert worst <= 1.001, f"the error is {worst:.2f} times that of e4m3 with a scale per row"
    assert (got - weight).abs().max() > 0, "nothing was rounded"


def test_the_largest_of_a_row_is_exact() -> None:
    weight = torch.randn(16, 32)
    weight[:, 7] = torch.linspace(-50, 50, 16)
    assert torch.allclose(rounded(weight)[:, 7], weight[:, 7], rtol=1e-6), (
        "scale each output channel so that its largest value becomes 448"
    )


def test_an_outlier_costs_its_neighbours_nothing() -> None:
    """This is the reason for floats: int8 has one step for a row, and an outlier makes it large."""
    weight = torch.rand(16, 32) + 0.5
    weight[:, 3] = 300.0
    others = [i for i in range(32) if i != 3]
    error = (rounded(weight) - weight)[:, others].abs() / weight[:, others]
    coarse = (rounded(weight, "int8") - weight)[:, others].abs() / weight[:, others]
    assert error.max() < 0.07 < 0.3 < coarse.mean()


def test_zeros_stay_zero() -> None:
    weight = torch.randn(16, 32)
    weight[5] = 0.0
    got = rounded(weight)
    assert torch.equal(got[5], weight[5]), "the scale of a row of zeros must not be 0 / 448"
    assert not got.isnan().any()


def test_the_model_stays_nearly_the_same() -> None:
    logits = logits_of(bundled(), IDS).log_softmax(-1)
    less = logits_of(fp8(deepcopy(bundled())), IDS).log_softmax(-1)
    divergence = (logits.exp() * (logits - less)).sum(-1).mean().item()
    assert 0 < divergence < 0.02, f"KL divergence {divergence:.4f} nats"


def test_it_generates_in_bfloat16() -> None:
    model = fp8(load_model(SHAKESPEARE, dtype=torch.bfloat16))
    assert logits_of(model, IDS).dtype == torch.bfloat16
    assert len(write(model, IDS, 8).token_ids) == 8


def test_a_folder_comes_back_as_it_was(tmp_path: Path) -> None:
    model = fp8(load_model(SHAKESPEARE))
    out = tmp_path / "fp8"
    words = ["--checkpoint", str(SHAKESPEARE), "--mode", "fp8", "--out", str(out)]
    assert convert.main(words) == 0
    assert json.loads((out / "config.json").read_text())["quantization_config"]["bits"] == 8
    with safe_open(out / "model.safetensors", "pt") as file:
        bytes_a_weight = file.get_tensor("model.layers.0.mlp.down_proj.qweight").itemsize
    assert bytes_a_weight == 1
    again = logits_of(load_model(out), IDS)
    wrong = "the folder loads as another model: does its config say that the bytes are floats?"
    assert torch.equal(again, logits_of(model, IDS)), wrong


def test_the_command_lines_take_it() -> None:
    fp8(tiny_model().float())
    assert EngineArgs(quantize="fp8").quantize == "fp8"


def test_integers_are_as_before() -> None:
    fp8(tiny_model())
    q, scales, zeros = quantize.round_to_nearest(torch.tensor([[-1.0, 0.0, 2.0, 0.0]]), 4, 4)
    assert (q.tolist(), zeros.tolist()) == ([[0, 5, 15, 5]], [[5]])
    assert scales.item() == pytest.approx(0.2)
    model, again = tiny_model().float(), tiny_model().float()
    weight = model.layers[0].mlp.down_proj.weight
    got = weight_of(quantize_model(again, "int8").layers[0].mlp.down_proj, 16)
    step = weight.abs().amax(1, keepdim=True) / 127
    assert ((got - weight).abs() <= step * 0.501).all()


def test_gptq_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Bug: GPTQ rounds to integers, so its folder says fp8 but holds integers."""
    if "fp8" not in quantize.MODES:
        pytest.fail("quantize.py has no mode fp8 yet: see MODES", pytrace=False)
    text = tmp_path / "text.txt"
    text.write_text("To be, or not to be: that is the question. " * 40)
    words = ["--checkpoint", str(SHAKESPEARE), "--mode", "fp8", "--method", "gptq"]
    words += ["--calibrate", str(text), "--out", str(tmp_path / "out")]
    assert convert.main(words) == 2, "--method gptq --mode fp8 must be refused"
    assert "fp8" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
