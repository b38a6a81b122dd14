"""config.json and generation_config.json, checked, as a model.Config. Read: load_config."""

from pathlib import Path

from around.folder.families import (
    extended,
    fold_settings,
    layer_settings,
    rope_settings,
    rope_with_defaults,
    with_defaults,
)
from around.settings import (
    DTYPES,
    JSON,
    SHAPING,
    InputError,
    SamplingParams,
    blame,
    check,
    check_fields,
    check_items,
    choose,
    read_json,
    read_optional,
)
from model import Config


def load_config(path: Path | str) -> Config:
    """Read `config.json` of a checkpoint folder, and the EOS ids in `generation_config.json`.

    Raises:
        InputError: the file is missing or not valid JSON, or it names a family or a setting that
            does not run here.
    """
    file = Path(path) / "config.json"
    adapter = file.with_name("adapter_config.json")
    if adapter.exists():
        raise InputError(
            f"{adapter}: adapters do not run here: merge a LoRA into its model (peft's "
            "merge_and_unload, then save_pretrained), or delete this file beside a whole model"
        )
    if not file.is_file():
        raise InputError(
            f"{path}: no model folder, as it has no config.json; `hf download OWNER/NAME "
            "--local-dir FOLDER` makes one, and a GGUF file is made into one by transformers "
            "(from_pretrained with gguf_file=NAME, then save_pretrained)"
        )
    raw = read_json(file)
    generation = read_optional(file.with_name("generation_config.json"))
    with blame(file):
        # 1) What the file says, and its family's defaults. A family has none for EOS: if no file
        # names it, the tokenizer's counts.
        raw = with_defaults(raw)
        # 2) Defaults that follow from other settings.
        heads = check("num_attention_heads", raw["num_attention_heads"], int)
        raw = (
            dict(
                num_key_value_heads=heads,
                head_dim=check("hidden_size", raw["hidden_size"], int) // heads,
                qkv_bias=raw["attention_bias"],
                o_bias=raw["attention_bias"],
            )
            | raw
        )
        check("head_dim", raw["head_dim"], int)
        # 3) Settings that Config has under another name or in another form.
        raw |= dict(
            dtype=choose("dtype", raw.get("dtype", raw["torch_dtype"]), DTYPES),
            eos_ids=eos_ids(raw, generation),
            score_cap=raw.get("attn_logit_softcapping"),
            logits_cap=raw.get("final_logit_softcapping"),
            num_experts=raw.get("num_local_experts", raw["num_experts"]),
            quantization=check("quantization_config", raw["quantization_config"], dict),
        )
        # 4) The context, what differs from layer to layer, and numbers that are folded into the
        # weights. A window that hides nothing of the file's own context may hide a part of the
        # extended one.
        rope = rope_with_defaults(raw)
        raw["max_position_embeddings"] = extended(raw, rope)
        raw |= layer_settings(raw)
        raw |= rope_settings(raw, rope) | fold_settings(raw, rope)
        config = Config(**{name: raw[name] for name in raw.keys() & Config.__annotations__})
        # 5) All of them, alone and together.
        check_fields(config)
        check("num_experts_per_tok", config.num_experts_per_tok, int, 1, config.num_experts)
        if heads % config.num_key_value_heads:
            raise ValueError(
                f"{heads} heads must be a multiple of the {config.num_key_value_heads} kv heads"
            )
    return config


def eos_ids(*sources: JSON) -> tuple[int, ...]:
    """Return the ids that end a text. Chat checkpoints add their end of turn in
    generation_config.json. An id of -1, as some tools write, means none."""
    found = []
    for source in sources:
        ids = source.get("eos_token_id", [])
        found += ids if isinstance(ids, list) else [ids]
    return tuple(
        i
        for i in dict.fromkeys(
            check_items("eos_token_id, also of generation_config.json,", found, list, int, -1)
        )
        if i >= 0
    )


def suggested_sampling(path: Path | str) -> JSON:
    """Return the sampling settings that a checkpoint's generation_config.json suggests, and
    max_tokens, if it has `max_new_tokens`.

    Raises:
        InputError: one of them has a wrong value.
    """
    file = Path(path) / "generation_config.json"
    stored = read_optional(file)
    found = {name: stored[name] for name in SHAPING if name in stored}
    if "max_new_tokens" in stored:
        found["max_tokens"] = stored["max_new_tokens"]
    with blame(file):
        SamplingParams(**found)  # this checks them
    return found


def first_sampling(path: Path | str) -> JSON:
    """Return the sampling settings with which a person's chat starts: the folder's, and if it
    suggests no temperature, a calm one. The API and LLM leave such a folder at vLLM's temperature,
    1, at which a small model talks nonsense."""
    found = suggested_sampling(path)
    return found if "temperature" in found else dict(temperature=0.2, top_p=0.9) | found
