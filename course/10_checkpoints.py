"""Chapter 10: real checkpoints. From a folder to a text, and which mistakes in it go unnoticed.

python course/10_checkpoints.py
"""

import json
from pathlib import Path

from lesson import LETTERS, Lesson, parts_strip, run

import torch
from safetensors.torch import load_file

import folders
from around.folder import Tokenizer, build, load_config, load_model, suggested_sampling
from around.settings import BUNDLED, InputError, SamplingParams
from model import Transformer
from sampling import Sequence, distribution

STACKED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
IDS = torch.arange(256)[None]  # a text of 256 tokens, and also their positions
# The changes to Llama 3's config.json, made one at a time. None: the line becomes null.
CHANGES = dict.fromkeys(("rms_norm_eps", "rope_scaling", "rope_theta", "tie_word_embeddings"))
CHANGES |= {"head_dim": 8, "model_type": "qwen3", "hidden_act": "gelu"}


def fill(model: Transformer, stored: dict[str, torch.Tensor]) -> set[str]:
    """Copy stored tensors into a model. Returns the names for which the model has no place."""
    left = {*stored}
    for name, parameter in model.named_parameters():  # "layers.0.mlp.gate_up_proj.weight"
        own = name.split(".")[-2]
        parts = [name.replace(own, part) for part in STACKED.get(own, [own])]
        names = [part if own == "lm_head" else f"model.{part}" for part in parts]
        parameter.copy_(torch.cat([stored[each] for each in names]))
        left -= {*names}
    return left


def logits_of(path: Path) -> torch.Tensor:
    """Load a folder by the engine's loader. Returns the logits for IDS, (1, 256, V), in float32."""
    return load_model(path, dtype=torch.float32)(IDS, IDS)


def chapter(lesson: Lesson) -> dict[str, object]:
    same, strips, differ = 0, {}, {}
    trained, words = lesson.bundled()
    prompt = words.encode("JULIET:\nO, my")
    logits = trained(torch.tensor([prompt]), torch.arange(len(prompt))[None])[0, -1:]  # (1, V)
    likeliest = logits[0].topk(8).indices.tolist()
    with folders.written() as paths:
        # 1) weights: fill a model by the ten lines, and compare it with the engine's loader
        for name, path in paths.items():
            stored, model = load_file(path / "model.safetensors"), build(load_config(path))
            lesson.say(f"{name}: {len(stored)} tensors, {len(fill(model, stored))} without a place")
            same += torch.equal(model(IDS, IDS), logits_of(path))
        # 2) text: its tokens, a chat, the tokens that end a reply, the default sampling settings
        for name, path in ({"bundled": BUNDLED} | paths).items():
            tokenizer, setting = Tokenizer(path), suggested_sampling(path)
            lesson.say(f"\n{name}: {setting}")
            chat = tokenizer.encode_chat([{"role": "user", "content": "The king"}])
            for each in (tokenizer.encode("The king,\ncafé"), chat, load_config(path).eos_ids):
                lesson.say("  " + " ".join(map(tokenizer.piece, each)))
            row = Sequence(prompt, SamplingParams(**setting), trained.config)
            strips[name] = parts_strip(distribution(logits, [row])[0, likeliest].tolist(), 60)
        legend = {a: words.piece(i) for a, i in zip(LETTERS, likeliest)} | {".": "others"}
        lesson.rows("what follows 'JULIET: O, my', as each folder suggests", strips, legend)
        # 3) a config.json with one mistake
        file = paths["Llama 3"] / "config.json"
        raw, right = json.loads(file.read_text()), logits_of(file.parent).argmax(-1)
        lesson.say()
        for key, value in CHANGES.items():
            file.write_text(json.dumps(raw | {key: value}))
            try:
                differ[key] = int((logits_of(file.parent).argmax(-1) != right).sum())
            except InputError as error:
                # The message begins with the path of a temporary folder.
                lesson.say(f"{key}, refused: {str(error).partition(': ')[2].splitlines()[0]}")
        lesson.bars("loaded without an error: next tokens that differ, of 256", differ)
    return {"same": same, "refused": [*CHANGES.keys() - differ], "differ": differ}


if __name__ == "__main__":
    run(chapter)
