"""Tiny models and folders with random weights: what most tests run on."""

import copy
import json
import random
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from around.folder import build, load_config, named_tensors
from model import Config, Transformer


def random_model(**changes: Any) -> Transformer:
    """Build a model whose next token depends strongly on all that it sees."""
    sizes = {
        "vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "eos_ids": (0,),
        "max_position_embeddings": 64,
    }  # fmt: skip
    generator = torch.Generator().manual_seed(1)
    model = build(Config(**sizes | changes)).double()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.6, generator=generator)
    return model


WORDS = random.Random(7).choices(range(1, 32), k=64)  # a text to cut prompts from
MODEL = random_model()
SLIDING = random_model(
    num_hidden_layers=3, num_attention_heads=4, windows=(5, None, 3), qkv_bias=True, qk_norm=True
)


def noisy(model, amount: float):
    """Return a draft that is right now and then."""
    draft, generator = copy.deepcopy(model), torch.Generator().manual_seed(3)
    for parameter in draft.parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter += amount * parameter.std() * noise if parameter.numel() > 1 else 0
    return draft


DRAFTS = {
    "n-gram": None,
    "itself": MODEL,
    "near": noisy(MODEL, 0.1),
    "small": random_model(num_hidden_layers=1, num_attention_heads=1, head_dim=4),
}
TINY = {
    "model_type": "llama", "vocab_size": 40, "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 64, "tie_word_embeddings": False,
}  # fmt: skip


def tiny_folder(folder: Path, **changes: Any) -> Path:
    """Write a checkpoint of random weights, norms and biases included."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(TINY | changes))
    config = load_config(folder)
    model = build(config)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.uniform_(0.5, 1.5)
        else:
            parameter.normal_(0, 1.5 * parameter.shape[1] ** -0.5)
    tensors = {
        ("" if name.startswith("lm_head") else "model.") + name: tensor.clone()
        for name, tensor in named_tensors(model.to(config.dtype or torch.float32))
    }
    save_file(tensors, folder / "model.safetensors")
    return folder


def edit_config(folder: Path, **changes: Any) -> None:
    """Change keys of a folder's config.json; `...` drops one."""
    file = folder / "config.json"
    raw = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in raw.items() if value is not ...}))
