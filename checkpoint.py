"""From a Hugging Face folder to a model: config.json, safetensors, and what may be wrong in them.

Values of the wrong type or size, missing or damaged files, tensors that do not fit: each failure
raises one error that names the file. A family of models is a row in a table: what its config.json
may leave out. Folders of GPTQ and AWQ tools are converted while they are read; see formats.py. This
file does not know what runs the model. Read: load_config, load_model.
"""

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

# Put the weights on pages of 2 MB. A decode step reads all of them, and with pages of 4 kB the
# page-table walks cost a noticeable share of the bandwidth. PyTorch reads this variable when it
# first allocates memory.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

import torch
from safetensors import safe_open
from torch import Tensor

from machine import progress
from model import Config, Transformer, rope_frequencies
from settings import (
    DTYPES,
    JSON,
    CheckpointError,
    SamplingParams,
    blame,
    check,
    check_fields,
    check_items,
    choose,
    read_json,
    read_optional,
    supported,
    without_nulls,
)

# --- config.json ----------------------------------------------------------------------------------

# The families that run here, each with the settings that its config.json may leave out or never
# contains. Every family in this table has been compared with `transformers`, logit by logit
# (tests/test_model.py).
MISTRAL = dict(num_key_value_heads=8, eos_token_id=2)
FAMILIES = dict(
    LlamaForCausalLM=dict(eos_token_id=2),
    MistralForCausalLM=dict(MISTRAL, sliding_window=4096),
    MixtralForCausalLM=dict(MISTRAL,  # without a window unless the file names one
        num_experts=8, num_experts_per_tok=2, rms_norm_eps=1e-5, rope_theta=1e6),
    Qwen2ForCausalLM=dict(num_key_value_heads=32, qkv_bias=True, o_bias=False),
    Qwen3ForCausalLM=dict(num_key_value_heads=32, head_dim=128, qk_norm=True),
    Qwen3MoeForCausalLM=dict(num_key_value_heads=4, qk_norm=True, num_experts_per_tok=8,
        norm_topk_prob=False))  # fmt: skip
# Which layers have a window, in families that do not read all of these settings: none in Llama, all
# in Mistral (unless layer_types says otherwise), and all or none in Qwen3-MoE. These values replace
# what a file says.
ALL_LAYERS = dict(use_sliding_window=True, max_window_layers=0)
FIXED: JSON = dict(
    LlamaForCausalLM=dict(use_sliding_window=False, layer_types=None),
    MistralForCausalLM=ALL_LAYERS, MixtralForCausalLM=ALL_LAYERS | dict(layer_types=None),
    Qwen3MoeForCausalLM=dict(max_window_layers=0, layer_types=None))  # fmt: skip
# Settings that must have this value. Shared experts need no check here, because models that have
# them have other architecture names.
ONLY = dict(hidden_act="silu", partial_rotary_factor=1.0, scoring_func="softmax", n_group=1,
    is_causal=True)  # fmt: skip
# Defaults for files of all families. None: the file must have it, and a later check refuses None.
USUAL: JSON = dict(ONLY, num_hidden_layers=None, num_attention_heads=None, hidden_size=None,
    intermediate_size=None, vocab_size=None, eos_token_id=[], torch_dtype="float32",
    attention_bias=False, num_experts=1, use_sliding_window=False, max_window_layers=28,
    rope_parameters={}, quantization_config={})  # fmt: skip
# The numbers that each method of extending rope needs.
ROPES = dict(default=(), linear=("factor",), llama3=("factor", "low_freq_factor",
    "high_freq_factor", "original_max_position_embeddings"))  # fmt: skip


def load_config(path: Path | str) -> Config:
    """Read `config.json` of a checkpoint folder, the EOS ids in `generation_config.json`, and the
    settings of GPTQ and AWQ tools.

    Raises:
        CheckpointError: the file is missing or not valid JSON, or it names an architecture or a
            setting that does not run here.
    """
    file = Path(path) / "config.json"
    if not file.parent.is_dir():
        raise CheckpointError(
            f"{path}: there is no such folder; `hf download OWNER/NAME --local-dir FOLDER` makes "
            "one, and of a GGUF file, transformers makes one (from_pretrained with gguf_file=NAME, "
            "then save_pretrained)"
        )
    raw = read_json(file)
    with blame(file):
        # 1) What the file says, what its family adds, and what holds for all families.
        names = check("architectures", raw.get("architectures") or None, list)
        family = choose("architectures", names[0], FAMILIES)
        raw = USUAL | without_nulls(family | raw) | FIXED.get(names[0], {})
        raw |= rope_settings(raw)
        for name, only in ONLY.items():
            supported(name, raw[name], only)
        # 2) Defaults that follow from other settings.
        heads = check("num_attention_heads", raw["num_attention_heads"], int)
        raw = {
            "num_key_value_heads": heads,
            "head_dim": check("hidden_size", raw["hidden_size"], int) // heads,
            "qkv_bias": raw["attention_bias"],
            "o_bias": raw["attention_bias"],
            **raw,
        }
        # 3) Settings that Config has under another name or in another form.
        raw |= dict(
            dtype=choose("dtype", raw.get("dtype", raw["torch_dtype"]), DTYPES),
            eos_ids=eos_ids(file.parent, raw),
            windows=layer_windows(raw),
            num_experts=raw.get("num_local_experts", raw["num_experts"]),
            quantization=quantization(file.parent, raw),
        )
        config = Config(**{name: raw[name] for name in raw.keys() & Config.__annotations__})
        check_config(config)
    return config


def check_config(config: Config) -> None:
    """Check all settings, alone and together.

    Raises:
        ValueError: one of them is wrong, or two do not fit.
    """
    check_fields(config)
    heads = config.num_attention_heads
    check("num_experts", config.num_experts, int, 1, 1024)  # more take half a minute to build
    check("num_experts_per_tok", config.num_experts_per_tok, int, 1, config.num_experts)
    # Without this bound, a matrix could have more bytes than int64 can count.
    check("heads * head_dim", heads * config.head_dim, int)
    supported("the length of layer_types", len(config.windows), config.num_hidden_layers)
    if heads % config.num_key_value_heads or config.head_dim % 2:
        raise ValueError(
            f"{heads} heads must be a multiple of the {config.num_key_value_heads} kv heads; "
            f"head_dim {config.head_dim} must be even"
        )


def eos_ids(folder: Path, raw: JSON) -> tuple[int, ...]:
    """Return the ids that end a text. Chat checkpoints add their end of turn in
    generation_config.json."""
    found = []
    for source in (raw, read_optional(folder / "generation_config.json")):
        ids = source.get("eos_token_id", [])
        found += ids if isinstance(ids, list) else [ids]
    return tuple(dict.fromkeys(check_items("eos_token_id", found, list, int, 0)))


def quantization(folder: Path, raw: JSON) -> JSON:
    """Collect the settings of quantised weights. GPTQ and AWQ tools have written them to files of
    their own; where config.json has them too, it wins."""
    found = check("quantization_config", raw["quantization_config"], dict)
    for method, name in dict(gptq="quantize_config.json", awq="quant_config.json").items():
        stored = read_optional(folder / name)
        if stored:
            found = {"quant_method": method, **stored, **found}
    return found


def rope_settings(raw: JSON) -> JSON:
    """Collect the settings of rope: each under its own name, and all of them as `rope_scaling`.

    Newer files have one dict `rope_parameters`; older ones have `rope_theta` and a dict
    `rope_scaling`. If a file has both dicts, `rope_scaling` wins, as in transformers.
    """
    rope = check("rope", raw.get("rope_scaling", raw["rope_parameters"]), dict)
    rope = {"rope_type": rope.get("type", "default"), **rope}
    for name in choose("rope_type", rope["rope_type"], ROPES):
        check(f"rope {name}", rope.get(name), float)
    if rope["rope_type"] == "llama3":
        check("high_freq_factor - low", rope["high_freq_factor"] - rope["low_freq_factor"], float)
    return dict(rope, rope_scaling=rope)


def layer_windows(raw: JSON) -> tuple:
    """Return how many tokens a query of each layer sees; None means all of them.

    Qwen2's files name a window even where it is switched off. Where it is on, the first
    `max_window_layers` layers still see everything. Newer files of any family list the kind of each
    layer in `layer_types`.

    Example: 3 layers, sliding_window 5, max_window_layers 1: (None, 5, 5)
    """
    layers = check("num_hidden_layers", raw["num_hidden_layers"], int, 1, 1024)
    window = raw.get("sliding_window") if raw["use_sliding_window"] else None
    full = raw["max_window_layers"]
    usual = ["full_attention" if i < full else "sliding_attention" for i in range(layers)]
    sizes = dict(full_attention=None, sliding_attention=check("sliding_window", window, int | None))
    return tuple(choose("layer_types", kind, sizes) for kind in raw.get("layer_types") or usual)


def suggested(path: Path | str) -> JSON:
    """Return the sampling settings that a checkpoint's generation_config.json suggests.

    Raises:
        CheckpointError: one of them has a wrong value.
    """
    file = Path(path) / "generation_config.json"
    stored = read_optional(file)
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    found = {name: stored[name] for name in names if name in stored}
    with blame(file):
        SamplingParams(**found)
    return found


# --- The weights ----------------------------------------------------------------------------------


class Stored(NamedTuple):
    """A tensor that is still in a file.

    Attributes:
        empty: a tensor of its shape and dtype on the meta device, from the file's header.
        read: reads the tensor itself.
    """

    empty: Tensor
    read: Callable[[], Tensor]

    def changed(self, change: Callable[[Tensor], Tensor]) -> "Stored":
        """Return what `change` will make of this tensor when it is read."""
        return Stored(change(self.empty), lambda: change(self.read()))


Files = dict[str, Stored]  # the keys are this engine's names of the parameters


def build(config: Config) -> Transformer:
    """Make a model with random weights, in eval mode and without gradients."""
    model = Transformer(config)
    if config.num_experts > 1:
        from experts import add_experts  # only where a model has experts

        add_experts(model)
    return model.requires_grad_(False).eval()


def load_model(
    path: Path | str,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
    shard: Callable | None = None,
) -> Transformer:
    """Build the model that a Hugging Face folder describes and fill it from its safetensors files.

    The model is first built on the meta device, which takes no memory, and the name, shape and
    dtype of each tensor are checked against the headers of the files. Then one tensor after another
    is copied out of the mapped files, so the peak memory is the weights plus one tensor. Nothing is
    unpickled.

    The integers, scales and zero points of quantised folders are kept exactly. Folders of this
    engine, of GPTQ (4 and 8 bits) and of AWQ can be read.

    Args:
        path: a folder with config.json and model.safetensors, or shards and their index.
        device: where the weights go.
        dtype: what the weights are cast to; None means the dtype in config.json, else float32.
        shard: cuts the empty model and the files down to one rank's share; see tp.shard.

    Returns:
        The model in eval mode, without gradients.

    Raises:
        CheckpointError: see load_config; or files are missing or damaged; or their tensors are not
            those of the config (the error counts all of them and lists the first 20); or the
            quantization_config is unknown or contradicts the files.
    """
    config = load_config(path)
    files = locate_tensors(Path(path))
    config = without_second_copy(config, files)
    with torch.device("meta"):
        model = build(config).to(dtype or config.dtype)
    with blame(Path(path)):
        if config.quantization and config.quantization.get("quant_method") != "kilolm":
            from formats import convert  # only where another tool has quantised

            convert(files, config.quantization, dict(named_tensors(model)))
        insert_quantised(model, files)
        check_tensors(files, model)
        if shard:
            model, files = shard(model, files)
            insert_quantised(model, files)
    tied = is_tied(model)
    model.to_empty(device=device)
    if tied:
        model.lm_head.weight = model.embed_tokens.weight  # to_empty has separated them
    for name, tensor in progress([*named_tensors(model)], f"loading {Path(path).name}"):
        tensor.copy_(files[name].read())
    model.inv_freq = rope_frequencies(config).to(device)  # to_empty has erased it
    return model


def without_second_copy(config: Config, files: Files) -> Config:
    """Return the config of a model of these files, where lm_head may share the embedding's weight.

    Some files store the shared matrix twice. An equal copy is dropped from them; if the two differ,
    they are not shared. Both are read, and neither is kept in memory.
    """
    head = files.get("lm_head.weight")
    embedding = files.get("embed_tokens.weight")
    if not (config.tie_word_embeddings and head and embedding):
        return config
    if torch.equal(head.read().to(embedding.empty.dtype), embedding.read()):
        del files["lm_head.weight"]
        return config
    return replace(config, tie_word_embeddings=False)


def insert_quantised(model: Transformer, files: Files) -> None:
    """Replace Linears of an empty model by QuantLinears where the files hold quantised weights.

    Raises:
        ValueError: the quantization_config is not supported, or does not fit the model.
    """
    config = model.config.quantization
    if not config:
        return
    from quantize import QuantLinear, linears  # only where a model is quantised

    for path in linears(model):
        linear: Any = model.get_submodule(path)
        name = path.rpartition(".")[2]
        part, *_ = getattr(linear, "parts", [name])  # a FusedLinear's first part
        stored = files.get(path.replace(name, part) + ".qweight")
        if stored:  # most folders keep lm_head plain
            form = config["bits"], config["group_size"]
            if path == "lm_head" and stored.empty.shape[1:] == (linear.in_features,):
                form = (8, -1)  # see quantize_model
            model.set_submodule(path, QuantLinear(linear, *form))


def is_tied(model: Transformer) -> bool:
    """Whether lm_head shares the embedding's weight. A quantised lm_head does not."""
    return getattr(model.lm_head, "weight", None) is model.embed_tokens.weight


def named_tensors(model: Transformer) -> Iterator[tuple[str, Tensor]]:
    """Yield each weight with its name in a checkpoint (less `model.`), as a view to read or fill.

    The weight of a tied lm_head comes once, as the embedding's.
    """
    tensors = model.state_dict()
    if is_tied(model):
        del tensors["lm_head.weight"]
    for name, tensor in tensors.items():
        path = name.rpartition(".")[0]  # "layers.0.mlp.gate_up_proj"
        own = path.rpartition(".")[2]
        # A FusedLinear, plain or quantised, has several parts. Any other module counts as one part.
        parts = getattr(model.get_submodule(path), "parts", None) or {own: len(tensor)}
        for part, view in zip(parts, tensor.split([*parts.values()])):
            yield name.replace(own, part), view


def locate_tensors(path: Path) -> Files:
    """List a checkpoint's tensors from the headers of its files; no data is read.

    A folder can hold shards that are not in use, and old copies of a tensor. So the index decides.
    As in transformers, a whole model.safetensors goes before the index.

    Raises:
        CheckpointError: a header or the index is damaged; or a file is missing that the index
            names, or, without an index, model.safetensors.
    """
    whole = path / "model.safetensors"
    index = path / "model.safetensors.index.json"
    files = {whole}
    places = None  # in the index: the name of a tensor -> the name of its file
    if not whole.exists():
        if not index.exists():
            raise CheckpointError(
                f"{path}: there is no {whole.name}, and no {index.name} that says which shards to "
                "read; convert .bin and .pth files"
            )
        with blame(index):
            places = read_json(index)["weight_map"]
            files = {path / Path(file).name for file in places.values()}
    found: Files = {}
    for file in sorted(files):
        with blame(file), safe_open(file, "pt") as reader:
            for name in reader.keys():  # noqa: SIM118 (it is no dict)
                if places is None or places.get(name) == file.name:
                    empty = reader.get_tensor(name).to("meta")  # maps the file, reads none of it
                    found |= renamed(name, Stored(empty, partial(read_tensor, file, name)))
    return found


def read_tensor(file: Path, name: str) -> Tensor:
    """Map a tensor. The file is opened for each tensor and closed again, which frees the pages that
    were read through its mapping; otherwise the resident memory would double."""
    with safe_open(file, "pt") as reader:
        return reader.get_tensor(name)


# RENAMED: a word in the names of Mixtral or GPTQ -> our word. STACKED: a tensor that stacks all
# experts -> the matrices that it holds for each expert.
RENAMED = dict(block_sparse_moe="mlp", w1="gate_proj", w2="down_proj", w3="up_proj", qzeros="zeros")
STACKED = dict(gate_up_proj=("gate_proj", "up_proj"), down_proj=("down_proj",))


def renamed(name: str, stored: Stored) -> Files:
    """Return a stored tensor under this engine's name; a stack of experts is cut into matrices.

    Example: "model.layers.0.mlp.experts.down_proj", (2, 32, 24), becomes
        "layers.0.mlp.experts.0.down_proj.weight", (32, 24), and the same for expert 1
    """
    if name.endswith("rotary_emb.inv_freq"):  # in Llama 1 and 2; they follow from the config
        return {}
    name = ".".join(RENAMED.get(word, word) for word in name.removeprefix("model.").split("."))
    above, _, last = name.rpartition(".")
    if last not in STACKED:
        return {name: stored}
    experts = range(check("experts", stored.empty.shape[0], int, 1, 1024))
    matrices = [f"{above}.{e}.{part}.weight" for e in experts for part in STACKED[last]]
    cut = stored.changed(lambda stack: stack.flatten(0, 1).unflatten(0, (len(matrices), -1)))
    return {matrix: cut.changed(itemgetter(i)) for i, matrix in enumerate(matrices)}


def check_tensors(files: Files, model: Transformer) -> None:
    """Raise one CheckpointError if tensors differ between the files and the model on the meta
    device. It counts all of them and lists the first 20."""
    have = {name: describe(stored.empty) for name, stored in files.items()}
    want = {name: describe(tensor) for name, tensor in named_tensors(model)}
    wrong = sorted(dict(have.items() ^ want.items()))  # what only one of them contains
    lines = [f"{n}: {have.get(n, 'missing')}, wanted: {want.get(n, 'none')}" for n in wrong[:20]]
    if lines:
        raise CheckpointError("\n  ".join([f"{len(wrong)} tensors do not fit config.json", *lines]))


def describe(tensor: Tensor) -> str:
    """Return a tensor's dtype and shape. Each of DTYPES is "float", as any of them can be cast."""
    kind = "float" if tensor.dtype in DTYPES.values() else tensor.dtype
    return f"{kind} {tuple(tensor.shape)}"
