"""Exercise 09: a LoRA adapter, hooked onto a model from outside. See 09-lora.md."""

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from common import close, logits_of, needs, tiny_model, write
from safetensors.torch import save_file
from torch import nn

from around.folder import build, load_config, load_model, named_tensors
from around.settings import InputError
from model import Transformer
from quantize import QuantLinear, quantize_model

IDS = [3, 14, 15, 9, 2, 6, 5]
TARGETS = ("self_attn.q_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.up_proj")
SIZES: dict[str, Any] = {"num_key_value_heads": 1, "intermediate_size": 24, "qkv_bias": True}


def apply_lora(model: Transformer, path: Path) -> list:
    make = needs(
        "lora", "apply_lora", "make the file in the root, with apply_lora(model, path) -> handles"
    )
    return make(model, path)


def weights_of(model: Transformer) -> dict[str, torch.Tensor]:
    """Each weight, and each part of a fused one, under its name."""
    return model.state_dict() | dict(named_tensors(model))


def make_adapter(
    path: Path, model: Transformer, targets: tuple[str, ...] = TARGETS, seed: int = 1, **config: Any
) -> dict[str, torch.Tensor]:
    """Write an adapter as the peft package does. Returns what it adds to each weight, by name."""
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 6} | config
    scale = config["lora_alpha"] / config["r"]
    generator = torch.Generator().manual_seed(seed)
    tensors, deltas = {}, {}
    for name, weight in weights_of(model).items():
        module = name.removesuffix(".weight")
        if name.endswith(".weight") and module.partition(".")[2].partition(".")[2] in targets:
            out, inputs = weight.shape
            a = torch.randn(config["r"], inputs, generator=generator) * 0.2
            b = torch.randn(out, config["r"], generator=generator) * 0.2
            tensors[f"base_model.model.model.{module}.lora_A.weight"] = a
            tensors[f"base_model.model.model.{module}.lora_B.weight"] = b
            deltas[name] = scale * b @ a
    path.mkdir(exist_ok=True)
    (path / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, path / "adapter_model.safetensors")
    return deltas


def merged(model: Transformer, *adapters: dict[str, torch.Tensor]) -> Transformer:
    """The slow twin is a copy of the model with the adapters added to its weights."""
    model = deepcopy(model)
    weights = weights_of(model)
    for deltas in adapters:
        for name, delta in deltas.items():
            weights[name] += delta
    return model


def test_it_adds_what_merging_would(tmp_path: Path) -> None:
    model = tiny_model(**SIZES)
    twin = merged(model, make_adapter(tmp_path, model))
    plain = logits_of(model, IDS)
    apply_lora(model, tmp_path)
    got = logits_of(model, IDS)
    assert not torch.allclose(got, plain), "the adapter changes nothing"
    wrong = "add lora_alpha / r * (x A^T) B^T to y, in the part's own rows of a FusedLinear"
    close(got, logits_of(twin, IDS), wrong)


@pytest.mark.parametrize("part", ["q_proj", "k_proj", "v_proj", "o_proj"])
def test_each_part_has_its_own_place(part: str, tmp_path: Path) -> None:
    """Here q, k and v are one Linear, and so are gate and up; see FusedLinear.parts."""
    model = tiny_model(**SIZES)
    twin = merged(model, make_adapter(tmp_path, model, (f"self_attn.{part}",)))
    apply_lora(model, tmp_path)
    close(logits_of(model, IDS), logits_of(twin, IDS), f"merging into {part} gives other logits")


def test_the_weights_are_not_touched(tmp_path: Path) -> None:
    model = tiny_model(**SIZES)
    before = {name: tensor.clone() for name, tensor in named_tensors(model)}
    make_adapter(tmp_path, model)
    apply_lora(model, tmp_path)
    after = dict(named_tensors(model))
    assert after.keys() == before.keys(), "the names of a checkpoint must stay"
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_it_can_be_taken_off(tmp_path: Path) -> None:
    model = tiny_model(**SIZES)
    make_adapter(tmp_path, model)
    plain = logits_of(model, IDS)
    handles = apply_lora(model, tmp_path)
    assert handles, "return the handles that register_forward_hook has returned"
    for handle in handles:
        handle.remove()
    assert torch.equal(logits_of(model, IDS), plain)


def test_two_add_up(tmp_path: Path) -> None:
    model = tiny_model(**SIZES)
    first = make_adapter(tmp_path / "a", model)
    second = make_adapter(tmp_path / "b", model, ("self_attn.k_proj", "mlp.down_proj"), 2, r=3)
    twin = merged(model, first, second)
    apply_lora(model, tmp_path / "a")
    apply_lora(model, tmp_path / "b")
    close(logits_of(model, IDS), logits_of(twin, IDS), "two adapters must add up")


def test_a_quantised_model_stays_quantised(tmp_path: Path) -> None:
    """Merging cannot do this: the sum of an int8 weight and an adapter is not an int8 weight."""
    model = tiny_model(**SIZES)
    deltas = make_adapter(tmp_path, model)
    quantize_model(model, "int8")
    twin = deepcopy(model)
    for path, module in [*twin.named_modules()]:
        if isinstance(module, QuantLinear):
            plain = nn.Linear(module.in_features, module.out_features, module.bias is not None)
            plain.requires_grad_(False).double().weight.copy_(module.dequantize())
            if module.bias is not None:
                plain.bias.copy_(module.bias)
            plain.parts = module.parts
            parent, _, name = path.rpartition(".")
            setattr(twin.get_submodule(parent), name, plain)
    twin = merged(twin, deltas)
    apply_lora(model, tmp_path)
    assert any(isinstance(module, QuantLinear) for module in model.modules())
    wrong = "the adapter gives other logits on a quantised model"
    close(logits_of(model, IDS), logits_of(twin, IDS), wrong)


def test_in_the_dtype_of_the_model(tmp_path: Path) -> None:
    model = tiny_model(**SIZES).bfloat16()
    make_adapter(tmp_path, model)
    apply_lora(model, tmp_path)
    assert logits_of(model, IDS).dtype == torch.bfloat16
    assert len(write(model, IDS, 5).token_ids) == 5


def test_rank_stabilised_adapters_scale_by_the_root(tmp_path: Path) -> None:
    """peft's use_rslora scales by lora_alpha / sqrt(r) (Kalajdzievski 2023, arXiv:2312.03732)."""
    model = tiny_model(**SIZES)
    plain = make_adapter(tmp_path, model, use_rslora=True, r=4)
    twin = merged(model, {name: delta * 4 / 4**0.5 for name, delta in plain.items()})
    apply_lora(model, tmp_path)
    wrong = "with use_rslora the scale is lora_alpha / sqrt(r)"
    close(logits_of(model, IDS), logits_of(twin, IDS), wrong)


# Settings that are folded into the weights when a folder is read: factors on the rows of q, o and
# down, and another order of the rows of q and k.
FOLDING: dict[str, dict[str, Any]] = {
    "granite": {"embedding_multiplier": 3.0, "attention_multiplier": 0.5,
        "residual_multiplier": 0.3, "logits_scaling": 2.0},
    "llama": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
    "phi3": {"partial_rotary_factor": 0.5},
}  # fmt: skip


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("family", FOLDING)
def test_it_is_folded_as_its_weight_is(family: str, fused: bool, tmp_path: Path) -> None:
    """Bug: the rows of the weight are multiplied, or in another order, and those of B are not. And
    an adapter of Phi-3 names whole FusedLinears, as its files do."""
    raw = {
        "model_type": family, "vocab_size": 32, "hidden_size": 16,
        "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 8,
        "num_key_value_heads": 1, "tie_word_embeddings": True, "dtype": "float32",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(raw | FOLDING[family]))
    stored = build(load_config(tmp_path))  # its weights are those in the file
    for parameter in stored.parameters():
        parameter.normal_(std=0.5)
    targets = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.o_proj", "mlp.down_proj")
    if fused:
        targets = ("self_attn.qkv_proj", "mlp.gate_up_proj")
    twin = merged(stored, make_adapter(tmp_path / "adapter", stored, targets))
    models = []
    for each in (stored, twin):
        tensors = {f"model.{name}": tensor.clone() for name, tensor in named_tensors(each)}
        save_file(tensors, tmp_path / "model.safetensors")
        models.append(load_model(tmp_path).double())
    apply_lora(models[0], tmp_path / "adapter")
    wrong = "fold the rows of B as those of its weight: see `folded` in around/folder/families.py"
    close(*(logits_of(model, IDS).float() for model in models), wrong)


def test_an_adapter_of_another_model_is_refused(tmp_path: Path) -> None:
    """Bug: half of an adapter is hooked on before the error, which is worse than none."""
    model = tiny_model(**SIZES)
    make_adapter(tmp_path / "deeper", tiny_model(**SIZES | {"num_hidden_layers": 3}))
    make_adapter(tmp_path / "wider", tiny_model(**SIZES | {"intermediate_size": 32}))
    plain = logits_of(model, IDS)
    for folder, name in (("deeper", r"layers\.2\."), ("wider", "up_proj")):
        apply = needs(
            "lora", "apply_lora", "make the file in the root, with apply_lora(model, path)"
        )
        with pytest.raises(InputError, match=name):
            apply(model, tmp_path / folder)
        assert torch.equal(logits_of(model, IDS), plain)
