"""Tiny checkpoints in the form of Qwen3's and Llama 3's, with random weights, for chapter 10.

Except for their sizes, the files are like those that people download: they have the same names of
settings and tensors, special tokens, and layout of tokenizer.json. Read: FAMILIES, write.
"""

import contextlib
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from around.folder import build, load_config, named_tensors

SHAPE = {
    "vocab_size": 384, "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024,
    "hidden_act": "silu", "tie_word_embeddings": True, "torch_dtype": "bfloat16",
}  # fmt: skip

# The turns of a chat, with special tokens. Only Llama's template writes the first token of a text.
QWEN_TURN = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
QWEN_REPLY = (
    "<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
)
LLAMA_TURN = "<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content }}<|eot_id|>"
LLAMA_REPLY = "<|start_header_id|>assistant<|end_header_id|>\n\n"
TEMPLATE = (
    "{{% for m in messages %}}{}{{% endfor %}}{{% if add_generation_prompt %}}{}{{% endif %}}"
)

FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen3": {
        "special": ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        "config": {
            "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 32,
            "rope_theta": 1000000, "rms_norm_eps": 1e-6, "sliding_window": None,
        },
        "generation": {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95},
        "ends": ["<|im_end|>", "<|endoftext|>"],  # config.json has the first, generation_config all
        "tokenizer": {"bos_token": None, "eos_token": "<|im_end|>", "add_bos_token": False},
        "template": TEMPLATE.format(QWEN_TURN, QWEN_REPLY),
    },
    "Llama 3": {
        "special": [
            "<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>",
            "<|eot_id|>",
        ],
        "config": {
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "head_dim": 16,
            "rope_theta": 500000, "rms_norm_eps": 1e-5,
            "rope_scaling": {  # here for contexts beyond 64 tokens; in Llama 3.1 beyond 8,192
                "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
            },
        },
        "generation": {"do_sample": True, "temperature": 0.6, "top_p": 0.9},
        "ends": ["<|end_of_text|>", "<|eot_id|>"],
        "tokenizer": {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"},
        "template": "{{ bos_token }}" + TEMPLATE.format(LLAMA_TURN, LLAMA_REPLY),
    },
}  # fmt: skip


@contextlib.contextmanager
def written() -> Iterator[dict[str, Path]]:
    """Write a folder for each family, and remove them afterwards. Yields their paths by name."""
    if not find_spec("tokenizers"):
        print("10_checkpoints.py: error: run: pip install tokenizers", file=sys.stderr)
        raise SystemExit(2)
    with tempfile.TemporaryDirectory() as root:
        yield {name: write(Path(root, name), each) for name, each in FAMILIES.items()}


def write(folder: Path, family: dict[str, Any]) -> Path:
    """Write the folder of a family: its JSON files, and random weights. Returns the folder."""
    text = Path(__file__).with_name("hamlet.txt").read_text(encoding="utf-8")
    vocab, merges = learn(text, 100)
    ids = {token: len(vocab) + i for i, token in enumerate(family["special"])}
    ends = [ids[token] for token in family["ends"]]
    template = {"chat_template": family["template"]}
    files = {
        "config.json": SHAPE | family["config"] | {"eos_token_id": ends[0]},
        "generation_config.json": family["generation"] | {"eos_token_id": ends},
        "tokenizer_config.json": family["tokenizer"] | template,
        "tokenizer.json": byte_level(vocab, merges, ids, family["tokenizer"]["bos_token"]),
    }
    folder.mkdir()
    for file, content in files.items():
        (folder / file).write_text(json.dumps(content, indent=1), encoding="utf-8")
    model, tensors = build(load_config(folder)), {}
    for name, tensor in named_tensors(model):
        if tensor.dim() > 1:
            tensor.normal_(0, 1.5 * tensor.shape[-1] ** -0.5)
        else:  # a norm's weight
            tensor.uniform_(0.5, 1.5)
        stored = name if name.startswith("lm_head") else f"model.{name}"
        tensors[stored] = tensor.to(torch.bfloat16).clone()
    save_file(tensors, folder / "model.safetensors")
    return folder


# --- Byte-level BPE -------------------------------------------------------------------------------


def byte_letters() -> list[str]:
    """Return a printable letter for each of the 256 bytes: the byte's own character where that can
    be printed, else one from 256 on. So a space is \u0120, and a newline \u010a."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte if byte in printable else 256 + others.index(byte)) for byte in range(256)]


def learn(text: str, count: int) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Learn byte-pair encoding: `count` times, merge the most frequent pair of neighbours within
    words. Returns the vocabulary, where the letters of the 256 bytes come first, and the merged
    pairs in order."""
    letters = byte_letters()
    words = [[letters[byte] for byte in f" {word}".encode()] for word in text.split()]
    vocab, merges = {letter: i for i, letter in enumerate(sorted(letters))}, []
    for _ in range(count):
        pairs = Counter(pair for word in words for pair in pairwise(word))
        merges.append(max(pairs, key=lambda pair: (pairs[pair], pair)))
        vocab["".join(merges[-1])] = len(vocab)
        words = [merged(word, merges[-1]) for word in words]
    return vocab, merges


def merged(word: list[str], pair: tuple[str, str]) -> list[str]:
    """Return a word with each occurrence of a pair joined into one piece.

    Example: [t, h, e, t, h], (t, h) -> [th, e, th]
    """
    found = []
    for piece in word:
        if found and (found[-1], piece) == pair:
            found[-1] += piece
        else:
            found.append(piece)
    return found


def byte_level(
    vocab: dict[str, int], merges: list[tuple[str, str]], special: dict[str, int], bos: str | None
) -> dict[str, Any]:
    """Return the content of a tokenizer.json. If there is a `bos`, its post-processor adds it."""
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
    first = {"SpecialToken": {"id": bos, "type_id": 0}}
    put_first = {
        "type": "TemplateProcessing",
        "single": [first, {"Sequence": {"id": "A", "type_id": 0}}], "pair": [],
        "special_tokens": {bos: {"id": bos, "ids": [special.get(bos)], "tokens": [bos]}},
    }  # fmt: skip
    return {
        "version": "1.0",
        "added_tokens": [
            {"id": i, "content": token, "special": True} | flags for token, i in special.items()
        ],
        "pre_tokenizer": level | {"use_regex": True},
        "post_processor": put_first if bos else None,
        "decoder": level | {"use_regex": True},
        "model": {"type": "BPE", "vocab": vocab, "merges": merges},
    }  # fmt: skip
