"""From a Hugging Face folder to a model: config.json, safetensors, and what may be wrong in them.

What comes from outside is checked here: values of the wrong type or size, files that are missing or
damaged, tensors that do not fit. Whatever fails gives one error that says where. Families are data:
a table of what each config.json leaves out. Folders that GPTQ and AWQ tools wrote are presented as
ours while they are read. Does not know what runs the model. Papers: Frantar et al. 2022 (GPTQ,
arXiv:2210.17323), Lin et al. 2023 (AWQ, arXiv:2306.00978). Read: load_config, load_model.
"""

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

# Weights on 2 MB pages: a decode step streams all of them, and with 4 kB pages the page-table walks
# cost a noticeable share of the bandwidth. PyTorch reads this when it first allocates.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

import torch
from safetensors import safe_open
from torch import Tensor

from model import Config, Transformer, rope_frequencies
from settings import DTYPES, JSON, check, check_fields, check_items, progress, supported

# --- Values from outside --------------------------------------------------------------------------


class CheckpointError(ValueError):
    """A file that we cannot, or should not, load. The message is for the user."""


@contextlib.contextmanager
def blame(what: Path | str) -> Iterator[None]:
    """Turn whatever goes wrong inside into one CheckpointError that says where: parsers raise
    anything for a damaged file."""
    try:
        yield
    except Exception as error:
        reason = error if isinstance(error, ValueError | OSError) else repr(error)
        raise CheckpointError(f"{what}: {reason}") from error


def read_json(path: Path) -> JSON:
    """Read a JSON object."""
    with blame(path):
        return check("its content", json.loads(path.read_text(encoding="utf-8")), dict)


def read_optional(path: Path) -> JSON:
    """Read a JSON object without its nulls; {} where the file is not there."""
    return without_nulls(read_json(path)) if path.is_file() else {}


def without_nulls(raw: JSON) -> JSON:
    """What a file says: null means the same as nothing."""
    return {name: value for name, value in raw.items() if value is not None}


# --- config.json ----------------------------------------------------------------------------------

# Each family we run: what its config.json may leave out, and what it does not say. An entry here
# means that the family has been compared with `transformers`, logit by logit (tests/test_model.py).
# Of Mistral's layers every one slides, if any does.
MISTRAL = dict(num_key_value_heads=8, use_sliding_window=True, max_window_layers=0)
FAMILIES = dict(
    LlamaForCausalLM={},
    MistralForCausalLM=MISTRAL | dict(sliding_window=4096),
    MixtralForCausalLM=MISTRAL | dict(  # without a window unless the file names one
        num_experts=8, num_experts_per_tok=2, rms_norm_eps=1e-5, rope_theta=1e6),
    Qwen2ForCausalLM=dict(num_key_value_heads=32, qkv_bias=True, o_bias=False),
    Qwen3ForCausalLM=dict(num_key_value_heads=32, head_dim=128, qk_norm=True),
    Qwen3MoeForCausalLM=dict(num_key_value_heads=4, qk_norm=True, num_experts_per_tok=8,
        norm_topk_prob=False))  # fmt: skip
# Settings of which we run one value. Routers with shared experts are other architectures.
ONLY = dict(hidden_act="silu", partial_rotary_factor=1.0, scoring_func="softmax", n_group=1)
# What a file of any family may leave out. None: it may not, and a later check says so.
USUAL = ONLY | dict(vocab_size=None, intermediate_size=None, attention_bias=False, num_experts=1,
    use_sliding_window=False, eos_token_id=[], torch_dtype="float32")  # fmt: skip
# The numbers that each way of stretching rope needs.
ROPES = dict(default=(), linear=("factor",), llama3=("factor", "low_freq_factor",
    "high_freq_factor", "original_max_position_embeddings"))  # fmt: skip


def load_config(path: Path | str) -> Config:
    """Read `config.json` and, for the EOS ids, `generation_config.json` from a checkpoint folder.

    Raises:
        CheckpointError: no such file, broken JSON, or an architecture or setting we do not run.
    """
    file = Path(path) / "config.json"
    if not file.parent.is_dir():
        raise CheckpointError(f"{path}: there is no such folder")
    raw = read_json(file)
    with blame(file):
        names = check("architectures", raw.get("architectures") or None, list)
        family = FAMILIES[supported("architectures", names[0], *FAMILIES)]
        # Chat checkpoints list their end-of-turn id in generation_config.json: that one wins.
        raw = USUAL | without_nulls(family | raw)
        raw |= read_optional(file.with_name("generation_config.json"))
        raw |= rope_settings(raw)
        for name, only in ONLY.items():
            supported(name, raw[name], only)
        # What follows from other settings where the file does not say it.
        heads = check("num_attention_heads", raw.get("num_attention_heads"), int)
        size = check("hidden_size", raw.get("hidden_size"), int) // heads
        bias = raw["attention_bias"]
        raw = dict(num_key_value_heads=heads, head_dim=size, qkv_bias=bias, o_bias=bias) | raw
        # What it says in another form.
        eos = raw["eos_token_id"]
        eos = eos if isinstance(eos, list) else [eos]
        raw |= dict(
            windows=layer_windows(raw), eos_ids=check_items("eos_token_id", eos, list, int, 0),
            quantization=check("quantization_config", raw.get("quantization_config", {}), dict),
            dtype=DTYPES[supported("dtype", raw.get("dtype", raw["torch_dtype"]), *DTYPES)],
            num_experts=raw.get("num_local_experts", raw["num_experts"]))  # fmt: skip
        config = Config(**{name: raw[name] for name in raw.keys() & Config.__annotations__})
        check_fields(config)
        check("num_experts", config.num_experts, int, 1, 1024)  # more take half a minute to build
        check("num_experts_per_tok", config.num_experts_per_tok, int, 1, config.num_experts)
        K, H = config.num_key_value_heads, config.head_dim
        check("heads * head_dim", heads * H, int)  # or a matrix has more bytes than int64 can count
        if heads % K or H % 2 or len(config.windows) != config.num_hidden_layers:
            raise ValueError(f"{heads}, {K} heads, head_dim {H}, number of layer_types do not fit")
    return config


def rope_settings(raw: JSON) -> JSON:
    """The settings of rope, one by one, and all together as `rope_scaling`. Newer files have one
    dict `rope_parameters`, older ones `rope_theta` and `rope_scaling`. Where a file has both dicts,
    `rope_scaling` wins, as in transformers."""
    rope = check("rope", raw.get("rope_scaling", raw.get("rope_parameters", {})), dict)
    rope = dict(rope_type=rope.get("type", "default")) | rope
    for name in ROPES[supported("rope_type", rope["rope_type"], *ROPES)]:
        check(f"rope {name}", rope.get(name), float)
    if rope["rope_type"] == "llama3":
        check("high_freq_factor - low", rope["high_freq_factor"] - rope["low_freq_factor"], float)
    return rope | dict(rope_scaling=rope)


def layer_windows(raw: JSON) -> tuple:
    """How many tokens a query of each layer sees, None for all of them.

    Qwen2's files name a window that is switched off; where it is on, the first `max_window_layers`
    see everything. Newer files of any family list each layer's kind in `layer_types`.

    Example: 3 layers, sliding_window 5, max_window_layers 1: (None, 5, 5)
    """
    layers = check("num_hidden_layers", raw.get("num_hidden_layers"), int, 1, 1024)
    window = raw.get("sliding_window") if raw["use_sliding_window"] else None
    full = raw.get("max_window_layers", 28)
    auto = ["full_attention" if i < full else "sliding_attention" for i in range(layers)]
    far = dict(full_attention=None, sliding_attention=check("sliding_window", window, int | None))
    return tuple(far[supported("layer_types", kind, *far)] for kind in raw.get("layer_types", auto))


def suggested(path: Path | str) -> JSON:
    """The sampling settings that a checkpoint's generation_config.json suggests, by name."""
    stored = read_optional(Path(path) / "generation_config.json")
    return {
        name: stored[name]
        for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
        if name in stored
    }


# --- The weights ----------------------------------------------------------------------------------


class Stored(NamedTuple):
    """A tensor that is still in a file: what its header says of it, and how to get it."""

    shape: tuple[int, ...]
    kind: str  # safetensors' word, such as "BF16" or "U8"
    read: Callable[[], Tensor]

    def changed(self, change: Callable) -> "Stored":
        """What `change` will make of it once it is read; of its shape, at once."""
        shape = change(torch.empty(self.shape, dtype=torch.int32, device="meta")).shape
        return self._replace(shape=tuple(shape), read=lambda: change(self.read()))


Files = dict[str, Stored]  # by our parameter names


def build(config: Config) -> Transformer:
    """Make a model of random weights, in eval mode and without gradients."""
    model = Transformer(config)
    if config.num_experts > 1:
        from experts import add_experts  # here: a dense model needs none

        add_experts(model)
    return model.requires_grad_(False).eval()


def load_model(
    path: Path | str, device: str | torch.device = "cpu", dtype: torch.dtype | None = None,
    shard: Callable | None = None,
) -> Transformer:  # fmt: skip
    """Build the model that a Hugging Face folder describes and fill it from its safetensors files.

    The model is built on the meta device (no memory), every name, shape and dtype is checked
    against the files' headers, and only then is one tensor after another copied out of the mapped
    file: the peak is the weights plus one tensor. Nothing is unpickled.

    Quantised folders, ours, GPTQ's (4 and 8 bits) and AWQ's, keep their integers, scales and zero
    points, exactly.

    Args:
        path: folder with config.json and model.safetensors, or shards of it.
        device: where the weights go.
        dtype: cast them; None: what config.json says, float32 where it says nothing.
        shard: cuts the empty model and the files down to one rank's share; see tp.shard.

    Returns:
        The model in eval mode, without gradients.

    Raises:
        CheckpointError: see load_config; files that are missing, damaged, or hold other tensors
            than the config asks for (the first 20 are listed, all of them counted); or a
            quantization_config that is unknown or contradicts the files.
    """
    config = load_config(path)
    with torch.device("meta"):
        model = build(config).to(dtype or config.dtype)
    files = locate_tensors(Path(path))
    if config.tie_word_embeddings:
        files.pop("lm_head.weight", None)  # some files store the tied matrix twice
    with blame(path):
        files = converted(files, model)
        insert_quantised(model, files)
        check_tensors(files, model)
        if shard:
            model, files = shard(model, files)
            insert_quantised(model, files)
    tied = is_tied(model)
    model.to_empty(device=device)
    if tied:
        model.lm_head.weight = model.embed_tokens.weight  # to_empty gave them a memory each
    for name, tensor in progress([*named_tensors(model)], f"loading {Path(path).name}"):
        tensor.copy_(files[name].read())
    model.inv_freq = rope_frequencies(config).to(device)  # to_empty and .to(dtype) spoilt it
    return model


def insert_quantised(model: Transformer, files: Files) -> None:
    """Put QuantLinears into an empty model where the files hold quantised weights.

    Raises:
        ValueError: a quantization_config that we do not run or that does not fit the model.
    """
    config = model.config.quantization
    if config:
        from quantize import QuantLinear, linears  # here: a plain model needs none

        for path in linears(model):
            linear, name = model.get_submodule(path), path.split(".")[-1]
            part = next(iter(getattr(linear, "parts", [name])))  # of what is stacked, the first
            if path.replace(name, part) + ".qweight" in files:  # unlike the lm_head of most
                model.set_submodule(path, QuantLinear(linear, config["bits"], config["group_size"]))


def is_tied(model: Transformer) -> bool:
    """Whether lm_head is the embedding; once it is quantised, it is not."""
    return getattr(model.lm_head, "weight", None) is model.embed_tokens.weight


def named_tensors(model: Transformer) -> Iterator[tuple[str, Tensor]]:
    """Yield each weight under its name in a checkpoint (less `model.`), as a view to read or fill.

    A tied lm_head is not yielded: it is the embedding.
    """
    for name, tensor in model.state_dict().items():
        path = name.rpartition(".")[0]  # "layers.0.mlp.gate_up_proj"
        own = path.split(".")[-1]
        # Those of a FusedLinear, or its quantised form; any other has one.
        parts = getattr(model.get_submodule(path), "parts", None) or {own: len(tensor)}
        for part, view in zip(parts, tensor.split([*parts.values()])):
            if not (is_tied(model) and part == "lm_head"):
                yield name.replace(own, part), view


def locate_tensors(path: Path) -> Files:
    """List a checkpoint's tensors, by our parameter names, from the headers of its files.

    Raises:
        CheckpointError: no safetensors files, or a damaged header.
    """
    single = path / "model.safetensors"
    # By their names, not by the index, which says nothing that the files do not.
    shards = [single] if single.is_file() else sorted(path.glob("model-*-of-*.safetensors"))
    if not shards:
        raise CheckpointError(f"{path}: no {single.name}, nor shards; convert .bin and .pth to it")
    found = {}
    for file in shards:
        with blame(file), safe_open(file, "pt") as reader:
            for name in reader.keys():  # noqa: SIM118 (not a dict: it has no iterator)
                head = reader.get_slice(name)
                read = partial(read_tensor, file, name)
                found |= spelt_out(name, Stored(tuple(head.get_shape()), head.get_dtype(), read))
    return found


def read_tensor(file: Path, name: str) -> Tensor:
    """Map a tensor. The file is opened anew: closing it drops the mapping, and with it the pages
    that were read through it, which would double the resident size by the end."""
    with safe_open(file, "pt") as reader:
        return reader.get_tensor(name)


# Mixtral's and GPTQ's names; and tensors that stack one or two matrices of every expert.
RENAMED = dict(block_sparse_moe="mlp", w1="gate_proj", w2="down_proj", w3="up_proj", qzeros="zeros")
STACKED = dict(gate_up_proj=("gate_proj", "up_proj"), down_proj=("down_proj",))


def spelt_out(name: str, stored: Stored) -> Files:
    """What a stored tensor holds: itself, under our name, or matrices of each expert.

    Example: "model.layers.0.mlp.experts.down_proj", (2, 32, 24): of expert 0
        "layers.0.mlp.experts.0.down_proj.weight", (32, 24); and the same of expert 1
    """
    # The config says what these do: rope's speeds (Llama 1 and 2), an input's group (GPTQ).
    if name.endswith(("rotary_emb.inv_freq", ".g_idx")):
        return {}
    name = ".".join(RENAMED.get(word, word) for word in name.removeprefix("model.").split("."))
    above, _, last = name.rpartition(".")
    if last not in STACKED:
        return {name: stored}
    experts = range(check("experts", stored.shape[0], int, 1, 1024))
    ours = [f"{above}.{e}.{part}.weight" for e in experts for part in STACKED[last]]
    cut = stored.changed(lambda stack: stack.flatten(0, 1).unflatten(0, (len(ours), -1)))
    return {each: cut.changed(itemgetter(i)) for i, each in enumerate(ours)}


# Files' and torch's names. Any float is cast; anything else must be stored exactly as wanted.
KINDS = {"F32": "float", "F16": "float", "BF16": "float", torch.uint8: "U8"}


def check_tensors(files: Files, model: Transformer) -> None:
    """Raise one CheckpointError that lists the tensors which are not stored as the model, on the
    meta device, wants them."""
    have = {name: f"{KINDS.get(at.kind, at.kind)} {at.shape}" for name, at in files.items()}
    want = {n: f"{KINDS.get(t.dtype, 'float')} {tuple(t.shape)}" for n, t in named_tensors(model)}
    wrong = sorted(dict(have.items() ^ want.items()))  # what is in one of them only
    lines = [f"{n}: {have.get(n, 'missing')}, wanted: {want.get(n, 'none')}" for n in wrong[:20]]
    if lines:
        raise CheckpointError("\n  ".join([f"{len(wrong)} tensors do not fit config.json", *lines]))


# --- Folders of other tools -----------------------------------------------------------------------
# GPTQ and AWQ tools store integers q with scales and zero points, as quantize.py does, but packed
# into 32-bit words and turned around: inputs down, outputs across, (K, N) where ours is (N, K).
# GPTQ packs along the inputs, the lowest bits first, and (but in gptq_v2) its zero points less one.
# AWQ packs along the outputs, in the order 0 2 4 6 1 3 5 7. The same numbers come out, unrounded.
# N is output channels, K input channels, G groups.
#
#     GPTQ, 4 bits    qweight[0, n] = 0x87654321      output n; inputs 0..7 are 1, 2, ... 8
#     AWQ             qweight[k, 0] = 0x75316420      input k; outputs 0..7 are 0, 1, ... 7

FORMS = dict(gptq=("gptq", "gptq_v2"), awq=("awq", "gemm", "GEMM"))
# For each number of bits, at which place of a word each of its values stands.
PLACES = dict(gptq={4: range(8), 8: range(4)}, awq={4: (0, 4, 1, 5, 2, 6, 3, 7)})


def converted(files: Files, model: Transformer) -> Files:
    """Present the files of a GPTQ or AWQ folder as those of one of our own; others as they are.

    Each tensor is converted for itself; what is missing, or of a wrong shape or dtype, is so in the
    result too, and check_tensors will say it.

    Args:
        files: see locate_tensors.
        model: what they are for, on the meta device. Its config's `quantization` gets our names,
            bits and group_size, for whatever it has.

    Returns:
        The files, with qweight, scales and zeros as quantize.QuantLinear has them.

    Raises:
        ValueError: another tool, version or number of bits; or desc_act, which sorts the inputs
            before they are grouped, so that the groups are not of neighbours.
    """
    config = model.config.quantization
    if config.get("quant_method") == "kilolm" or not config:
        return files
    method = supported("quant_method", config.get("quant_method"), *FORMS)
    bits = check("bits", config.setdefault("bits", config.get("w_bit")), int)
    check("group_size", config.setdefault("group_size", config.get("q_group_size")), int, -1)
    form = config.get("checkpoint_format") or config.get("version", method)
    supported("checkpoint_format or version", form, *FORMS[method])
    places = PLACES[method][supported("bits", bits, *PLACES[method])]
    supported("desc_act", config.get("desc_act", method == "gptq"), False)
    mask = 2**bits - 1
    from quantize import pack_bits  # here: a plain model needs none

    def change(kind: str, stored: Tensor) -> Tensor:
        if kind == "scales":
            return stored
        if kind == "qweight" and method == "gptq":  # the words of an output are, as bytes, ours
            return stored.contiguous().view(torch.uint8)
        # Words (N * bits / 32, G or K) -> values (N, G or K).
        values = torch.stack([stored >> bits * place & mask for place in places], 1).flatten(0, 1)
        if kind == "qweight":
            return pack_bits(values, bits)
        # A zero point of 0, less one, is all ones: it wraps around within its bits.
        return values + (form == "gptq") & mask

    wanted = dict(named_tensors(model))
    ours = {}
    for name, stored in files.items():
        kind = name.split(".")[-1]
        with blame(name):
            if kind in ("qweight", "zeros", "scales"):
                stored = stored._replace(kind=stored.kind.replace("I32", "U8"))
                ours[name] = stored.changed(Tensor.t).changed(partial(change, kind))
            elif name in wanted or stored.read().any():  # some tools write biases of zero
                ours[name] = stored
    return ours
