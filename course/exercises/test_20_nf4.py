"""Exercise 20: four bits that index quantiles of a normal distribution. See 20-nf4.md."""

import json
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from common import SHAKESPEARE, bundled, close, logits_of, tiny_model, write
from safetensors import safe_open
from torch import Tensor, nn

import quantize
from around.fast import packed
from around.folder import load_model
from around.settings import EngineArgs, InputError
from kv_cache import StaticCache
from model import Transformer
from quantize import quantize_model
from tools import convert

IDS = [10, 200, 30, 400, 50, 600, 70, 800]
# The paper's list (appendix E), to the digits that matter.
PAPER = [
    -1.0, -0.69619, -0.52507, -0.39492, -0.28444, -0.18477, -0.09105, 0.0,
    0.07958, 0.16093, 0.24611, 0.33792, 0.44071, 0.56262, 0.72296, 1.0,
]  # fmt: skip


def nf4(model: nn.Module, group_size: int) -> Any:
    if "nf4" not in quantize.MODES:
        pytest.fail("quantize.py has no mode nf4 yet: see MODES and quantize_model", pytrace=False)
    return quantize_model(model, "nf4", group_size)


def rounded(weight: Tensor, group_size: int, mode: str = "nf4") -> Tensor:
    """Put a weight (N, K) into a Linear, quantise it, and return the weight that it multiplies
    by."""
    model = nn.Sequential(nn.Linear(weight.shape[1], weight.shape[0], bias=False))
    model.requires_grad_(False)[0].weight.copy_(weight)
    nf4(model, group_size) if mode == "nf4" else quantize_model(model, mode, group_size)
    return model(torch.eye(weight.shape[1])).T


# --- The code book --------------------------------------------------------------------------------


def test_the_code_book_is_that_of_the_paper() -> None:
    """Rows that run from -1 to 1 use each value of the code book."""
    row = torch.linspace(-1, 1, 512)
    got = rounded(row.repeat(64, 1), 512).unique()
    assert len(got) == 16, f"{len(got)} different values come out of -1 .. 1, not 16"
    assert got.abs().min() == 0, "one of the 16 values must be exactly 0"
    apart = (got - torch.tensor(PAPER)).abs().max().item()
    assert apart < 1e-4, f"the values are up to {apart:.2g} from the paper's: {got.tolist()}"


@pytest.mark.parametrize("group_size", [64, 16, -1])
def test_each_weight_goes_to_the_nearest(group_size: int) -> None:
    """The slow twin finds the largest magnitude of each group, and the nearest value for each
    weight."""
    weight = torch.randn(32, 64) * torch.logspace(-3, 2, 32)[:, None]  # rows of every size
    weight[0, :16] = weight[0, :16].abs()
    want = torch.empty_like(weight)
    step = 64 if group_size == -1 else group_size
    for i, row in enumerate(weight.tolist()):
        for start in range(0, 64, step):
            group = row[start : start + step]
            scale = max(map(abs, group))
            nearest = [min(PAPER, key=lambda value: abs(value - w / scale)) for w in group]
            want[i, start : start + step] = torch.tensor(nearest) * scale
    got = rounded(weight, group_size)
    scale = weight.unflatten(1, (-1, step)).abs().amax(-1).repeat_interleave(step, 1)
    # Compare the distances from the weights, because two values may be equally near to a weight.
    apart = (((got - weight).abs() - (want - weight).abs()) / scale).abs().max().item()
    wrong = "scale each group so that its largest magnitude is 1, and take the nearest of the 16"
    assert apart < 1e-4, f"{wrong} (off by {apart:.2g} of that magnitude)"


def test_zeros_stay_zero() -> None:
    weight = torch.randn(32, 64)
    weight[5], weight[6, :32] = 0.0, 0.0
    got = rounded(weight, 32)
    assert not got.isnan().any(), "a group of zeros must not be divided by its scale, 0"
    assert (got[weight == 0] == 0).all(), "a group of zeros must stay zero"


def test_it_fits_what_it_was_made_for() -> None:
    """Normal weights are close to the quantiles, so an even grid with as many values and its own
    zero point does worse. For uniform weights the even grid is better."""

    def error(weight: Tensor, mode: str) -> float:
        return (rounded(weight, 256, mode) - weight).square().mean().item()

    normal, even = torch.randn(64, 512), torch.rand(64, 512) * 2 - 1
    share = error(normal, "nf4") / error(normal, "int4")
    assert 0.7 < share < 0.9, f"on normal weights it has {share:.2f} of int4's squared error"
    share = error(even, "nf4") / error(even, "int4")
    assert 1.2 < share < 2, f"on uniform weights it has {share:.2f} of int4's squared error"


# --- A model --------------------------------------------------------------------------------------


def test_what_it_stores() -> None:
    plain = bundled()
    sizes = [m.weight.numel() for m in plain.layers.modules() if isinstance(m, nn.Linear)]
    model = nf4(deepcopy(plain), 64)
    left = [name for name, m in model.named_modules() if type(m) is nn.Linear]
    assert not left, f"{left} are still plain"
    linears = [m for m in model.layers.modules() if hasattr(m, "qweight")]
    stored = sum(b.nbytes for m in linears for b in m.state_dict().values())
    bits = 8 * stored / sum(sizes)
    assert bits == 4.5, f"a weight takes {bits} bits, not 4 and a share of its scale (32 / 64)"


@cache
def own_text() -> Tensor:
    """Sample texts from the bundled model, (24, 96). On its own text, the expected rise of the loss
    is the KL divergence, which takes far less text to measure than the loss."""
    model, generator = bundled(), torch.Generator().manual_seed(1)
    cache, ids = StaticCache(model, 24, 96), torch.ones(24, 1, dtype=torch.int64)  # 1: BOS
    with torch.no_grad():
        for end in range(1, 96):
            logits = model(ids[:, -1:], *cache.plan(end - 1, end))[:, -1]
            new = torch.multinomial(logits.softmax(-1), 1, generator=generator)
            ids = torch.cat((ids, new), 1)
    return ids


@torch.no_grad()
def logprobs(model: Transformer) -> Tensor:
    ids = own_text()
    return model(ids, torch.arange(ids.shape[1]).expand_as(ids)).log_softmax(-1)


def test_the_model_loses_less_than_by_an_even_grid() -> None:
    """nf4 is better with 256 weights per scale. With 64 the two are about equal, because the grid's
    zero point adapts to a small group."""
    nf4(tiny_model().float(), 16)
    plain, found = logprobs(bundled()), {}
    for mode, size in (("int8", -1), ("nf4", 256), ("int4", 256), ("nf4", 64), ("int4", 64)):
        less = logprobs(quantize_model(deepcopy(bundled()), mode, size))
        found[mode, size] = (plain.exp() * (plain - less)).sum(-1).mean().item()
    losses = "KL divergence in nats per token: " + ", ".join(
        f"{mode} {size}: {value:.4f}" for (mode, size), value in found.items()
    )
    assert found["int8", -1] < found["nf4", 64] < found["nf4", 256], losses
    wrong = f"nf4 must lose at least 5 % less than int4: {losses}"
    assert found["nf4", 256] < 0.95 * found["int4", 256], wrong
    wrong = f"nf4 must lose at most 15 % more than int4: {losses}"
    assert found["nf4", 64] < 1.15 * found["int4", 64], wrong


def test_it_generates_in_bfloat16() -> None:
    model = nf4(load_model(SHAKESPEARE, dtype=torch.bfloat16), 64)
    assert logits_of(model, IDS).dtype == torch.bfloat16, "results must have the dtype of x"
    assert len(write(model, IDS, 8).token_ids) == 8


def test_no_fast_form_takes_the_indices_for_integers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: packed.py multiplies the indices as if they were integers. It would do so only on
    processors with such a product, so the test pretends that this one has it."""
    model = nf4(deepcopy(bundled()), 64)
    want = logits_of(model, IDS)
    monkeypatch.setattr(packed, "has_int4", lambda q: True)
    wrong = "packed.form_of treats the indices as integers"
    forms = {packed.form_of(m) for m in model.modules() if hasattr(m, "qweight")}
    assert packed.Int4Linear not in forms, wrong
    packed.pack_linears(model)
    apart = (logits_of(model, IDS) - want).abs().max().item()
    assert apart < 0.05, f"the packed model's logits are {apart:.2g} apart: {wrong}"


# --- Folders and command lines --------------------------------------------------------------------


def converted(out: Path, *more: str) -> int:
    words = ["--checkpoint", str(SHAKESPEARE), "--mode", "nf4", "--group-size", "64"]
    return convert.main([*words, "--out", str(out), *more])


def test_a_folder_comes_back_as_it_was(tmp_path: Path) -> None:
    model = nf4(load_model(SHAKESPEARE), 64)
    out = tmp_path / "nf4"
    assert converted(out) == 0
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    assert (config["bits"], config["group_size"]) == (4, 64), f"config.json says {config}"
    with safe_open(out / "model.safetensors", "pt") as file:
        name = "model.layers.0.mlp.down_proj"
        kinds = {key.rpartition(".")[2] for key in file.keys() if key.startswith(name)}  # noqa: SIM118
        shape = file.get_slice(f"{name}.qweight").get_shape()
    assert kinds == {"qweight", "scales"}, f"a weight is stored as {sorted(kinds)}"
    assert shape == [256, 256], "two 4-bit indices in a byte"
    wrong = "the folder loads as another model: does its config say what the 4 bits are?"
    try:
        again = load_model(out)
    except InputError as error:
        pytest.fail(f"{wrong} {error}", pytrace=False)
    assert torch.equal(logits_of(again, IDS), logits_of(model, IDS)), wrong


def test_gptq_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Bug: GPTQ rounds to integers, so its folder says nf4 but holds integers."""
    nf4(tiny_model().float(), 16)
    text = tmp_path / "text.txt"
    text.write_text("To be, or not to be: that is the question. " * 40)
    status = converted(tmp_path / "out", "--method", "gptq", "--calibrate", str(text))
    assert status == 2, "--method gptq --mode nf4 must be refused"
    assert "nf4" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_command_lines_take_it() -> None:
    nf4(tiny_model().float(), 16)
    assert EngineArgs(quantize="nf4").quantize == "nf4"


def test_integers_are_as_before() -> None:
    nf4(tiny_model().float(), 16)
    q, _, zeros = quantize.round_to_nearest(torch.tensor([[-1.0, 0.0, 2.0, 0.0]]), 4, 4)
    assert (q.tolist(), zeros.tolist()) == ([[0, 5, 15, 5]], [[5]])
    weight = torch.randn(32, 64)
    q, scales, zeros = quantize.round_to_nearest(weight, 4, 32)
    want = scales[..., None] * (q.unflatten(1, (-1, 32)) - zeros[..., None])
    close(rounded(weight, 32, "int4"), want.flatten(1), "int4 rounds differently than before")
