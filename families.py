"""What differs between families of models: what config.json may leave out, and what is folded.

A difference that is only a number is folded when a folder is read. Rope turns each pair of channels
at a speed, so each method of extending rope is a list of speeds, and a layer without rope has
speeds of 0. A factor on queries, residuals or logits is a factor on the weights that make these. So
model.py has none of them. This file knows config.json's names for these numbers, and the names of
the weights; it does not read files. Every family has been compared with `transformers`, logit by
logit (tests/test_model.py). Read: FAMILIES, layer_kinds, complete_rope, speeds, folded.
"""

import math

import torch
from torch import Tensor

from model import Config
from settings import JSON, check, check_items, choose, supported

# --- What config.json may leave out ---------------------------------------------------------------

# The families that run here, each with the settings that its config.json may leave out or never
# contains.
MISTRAL = dict(num_key_value_heads=8, eos_token_id=2, max_position_embeddings=131072)
QWEN = dict(num_key_value_heads=32, max_position_embeddings=32768)
FAMILIES: dict[str, JSON] = dict(
    LlamaForCausalLM=dict(eos_token_id=2),
    MistralForCausalLM=dict(MISTRAL, sliding_window=4096),
    MixtralForCausalLM=dict(MISTRAL,  # without a window unless the file names one
        num_experts=8, num_experts_per_tok=2, rms_norm_eps=1e-5, rope_theta=1e6),
    Qwen2ForCausalLM=QWEN,
    Qwen3ForCausalLM=dict(QWEN, head_dim=128),
    Qwen3MoeForCausalLM=dict(QWEN | dict(num_key_value_heads=4),
        num_experts_per_tok=8, norm_topk_prob=False),
    SmolLM3ForCausalLM=dict(num_key_value_heads=4, eos_token_id=128001, rope_theta=2e6,
        tie_word_embeddings=True, no_rope_layer_interval=4, max_position_embeddings=32768),
    Phi3ForCausalLM=dict(eos_token_id=32000, rms_norm_eps=1e-5, max_position_embeddings=4096),
    # None: the file must have it, although transformers takes a missing multiplier as 1.
    GraniteForCausalLM=dict(eos_token_id=2, embedding_multiplier=None, attention_multiplier=None,
        residual_multiplier=None, logits_scaling=None),
    Gemma3ForCausalLM=dict(num_attention_heads=8, num_key_value_heads=4, head_dim=256,
        vocab_size=262208, max_position_embeddings=131072, sliding_window=4096, eos_token_id=1,
        tie_word_embeddings=True, rope_theta=1e6, rope_local_base_freq=1e4,
        sliding_window_pattern=6, query_pre_attn_scalar=256),
    Olmo2ForCausalLM=dict(eos_token_id=50279, rms_norm_eps=1e-5))  # fmt: skip
# Folders with images: the family of their text model, whose settings are in `text_config`.
NESTED = dict(Mistral3ForConditionalGeneration="MistralForCausalLM",
    Gemma3ForConditionalGeneration="Gemma3ForCausalLM")  # fmt: skip
# What a family does whatever its file says. First of all, which layers have a window, in families
# that do not read all of these settings: none in Llama, all in Mistral (unless layer_types says
# otherwise), and all or none in Qwen3-MoE.
NO_LAYERS = dict(use_sliding_window=False, layer_types=None)
ALL_LAYERS = dict(use_sliding_window=True, max_window_layers=0)
FIXED: dict[str, JSON] = dict(
    LlamaForCausalLM=NO_LAYERS, GraniteForCausalLM=NO_LAYERS,
    MistralForCausalLM=ALL_LAYERS, MixtralForCausalLM=ALL_LAYERS | dict(layer_types=None),
    Phi3ForCausalLM=ALL_LAYERS | dict(layer_types=None, partial_rope=True),
    Qwen2ForCausalLM=dict(qkv_bias=True, o_bias=False),
    Qwen3ForCausalLM=dict(qk_norm=True),
    Qwen3MoeForCausalLM=dict(qk_norm=True, max_window_layers=0, layer_types=None),
    Gemma3ForCausalLM=ALL_LAYERS | dict(qk_norm=True, post_norm=True, gelu=True, norm_offset=1.0,
        root_of_width=True),
    Olmo2ForCausalLM=NO_LAYERS | dict(wide_qk_norm=True, pre_norm=False, post_norm=True),
)  # fmt: skip
# Settings that must have this value. Shared experts need no check here, because models that have
# them have other architecture names.
ONLY: JSON = dict(hidden_act="silu", hidden_activation="gelu_pytorch_tanh", scoring_func="softmax",
    n_group=1, is_causal=True, use_bidirectional_attention=False, attn_logit_softcapping=None,
    final_logit_softcapping=None)  # fmt: skip
# Settings that only some families read, those that have them in FAMILIES; and at the end this
# engine's names, which no family reads from a file.
OWN = {"embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling",
    "query_pre_attn_scalar", "rope_local_base_freq", "sliding_window_pattern",
    "no_rope_layer_interval",
    "qkv_bias", "o_bias", "qk_norm", "wide_qk_norm", "pre_norm", "post_norm", "gelu", "norm_offset",
    "root_of_width", "partial_rope"}  # fmt: skip
# Defaults for files of all families. None: the file must have it, and a later check refuses None.
USUAL: JSON = dict(ONLY, num_hidden_layers=None, num_attention_heads=None, hidden_size=None,
    intermediate_size=None, vocab_size=None, eos_token_id=[], torch_dtype="float32",
    attention_bias=False, num_experts=1, use_sliding_window=False, max_window_layers=28,
    max_position_embeddings=2048, rope_theta=1e4, partial_rotary_factor=1.0, rope_parameters={},
    embedding_multiplier=1.0, residual_multiplier=1.0, logits_scaling=1.0,
    quantization_config={})  # fmt: skip
# The numbers that each method of extending rope needs.
ROPES: dict[str, tuple] = dict(default=(), linear=("factor",), longrope=(), yarn=("factor",
    "beta_fast", "beta_slow", "original_max_position_embeddings"), llama3=("factor",
    "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"))  # fmt: skip


def layer_kinds(raw: JSON) -> JSON:
    """Return Config's `windows` and `ropes`, which say for each layer how many tokens a query sees
    (None: all of them), and which rope it has (0, or 1 for the second one).

    Qwen2's files name a window even where it is switched off. Where it is on, the first
    `max_window_layers` layers still see everything. Gemma 3 has one layer of every
    `sliding_window_pattern` that sees everything, and another rope in those with a window. Newer
    files of any family list the kind of each layer in `layer_types`. SmolLM3 has layers without
    rope, listed in `no_rope_layers` as 0; only these may have a window.

    Example: 3 layers, sliding_window 5, max_window_layers 1: windows (None, 5, 5), ropes (0, 0, 0)
    """
    layers = check("num_hidden_layers", raw["num_hidden_layers"], int, 1, 1024)
    every = 0
    if "no_rope_layer_interval" in raw:  # SmolLM3's
        every = check("no_rope_layer_interval", raw["no_rope_layer_interval"], int)
    has_rope = raw.get("no_rope_layers") if every else None
    if has_rope is None:
        has_rope = [not every or (i + 1) % every for i in range(layers)]
    check("no_rope_layers", has_rope, list)
    supported("the length of no_rope_layers", len(has_rope), layers)
    full = {*range(raw["max_window_layers"])}
    if "rope_local_base_freq" in raw:  # Gemma 3's
        pattern = check("sliding_window_pattern", raw["sliding_window_pattern"], int)
        full = {*range(pattern - 1, layers, pattern)}
    if every:
        full = {i for i in range(layers) if has_rope[i]}
    usual = ["full_attention" if i in full else "sliding_attention" for i in range(layers)]
    kinds = raw.get("layer_types") or usual
    window = raw.get("sliding_window") if raw["use_sliding_window"] else None
    check("sliding_window", window, int | None)
    if window and window >= check("context", raw["max_position_embeddings"], int):
        window = None  # as in Phi-4-mini; without a mask, long prompts are faster
    sizes = dict(full_attention=None, sliding_attention=window)
    windows = tuple(choose("layer_types", kind, sizes) for kind in kinds)
    supported("the length of layer_types", len(windows), layers)
    is_second = [not has for has in has_rope]
    if "rope_local_base_freq" in raw:
        is_second = [kind == "sliding_attention" for kind in kinds]
    return dict(windows=windows, ropes=tuple(map(int, is_second)) if any(is_second) else ())


def rope_and_folds(raw: JSON) -> JSON:
    """Return Config's `rope_theta`, `rope_speeds`, `folds` and `embedding_multiplier`, and the
    context: max_position_embeddings.

    longrope changes its speeds, also of what is in the cache already, when a text grows beyond the
    original context. So the context ends there.
    """
    H = raw["head_dim"]
    rope = complete_rope(raw)
    context = raw["max_position_embeddings"]
    if rope["rope_type"] == "longrope":
        context = min(context, rope["original_max_position_embeddings"])
    dim = rotated_channels(rope, H)
    found = [speeds(rope, dim)]
    if "rope_local_base_freq" in raw:  # Gemma 3's layers with a window have another rope
        parameters = raw["rope_parameters"].get("sliding_attention") or {}
        theta = parameters.get("rope_theta", raw["rope_local_base_freq"])
        check("rope_local_base_freq", theta, float)
        found.append(speeds(dict(rope_type="default", rope_theta=theta), dim))
    elif raw["ropes"]:  # SmolLM3's layers without rope
        found.append(torch.zeros(dim // 2, device="cpu"))
    rest = [0.0] * (H // 2 - dim // 2)
    embedding = raw["embedding_multiplier"]
    if raw.get("root_of_width"):
        embedding = raw["hidden_size"] ** 0.5
    return dict(
        rope_theta=rope["rope_theta"],
        max_position_embeddings=context,
        rope_speeds=tuple((*each.tolist(), *rest) for each in found),
        folds=folds_of(raw, dim, attention_factor(rope) ** 2),
        embedding_multiplier=embedding,
    )


def complete_rope(raw: JSON) -> JSON:
    """Collect the settings of rope, with the defaults of its type, and check them.

    Newer files have one dict `rope_parameters`, and Gemma 3's in it one for each kind of layer;
    older files have `rope_theta` and a dict `rope_scaling`. If a file has both dicts,
    `rope_scaling` wins, as in transformers.
    """
    given = check("rope", raw.get("rope_scaling", raw["rope_parameters"]), dict)
    given = given.get("full_attention") or given
    rope = dict(
        rope_type=given.get("type", "default"),
        rope_theta=raw["rope_theta"],
        partial_rotary_factor=raw["partial_rotary_factor"],
    )
    rope |= given
    context = raw["max_position_embeddings"]
    original = "original_max_position_embeddings"
    if original in raw:  # Phi-3's goes before the dict's, as there
        rope[original] = raw[original]
    kind = supported("rope_type", rope["rope_type"], *ROPES)
    if kind in ("yarn", "longrope"):
        rope = {original: context, "beta_fast": 32, "beta_slow": 1, "truncate": True} | rope
        check(original, rope[original], int, 2)
    if kind == "longrope":
        rope = dict(factor=context / rope[original]) | rope
    check("rope_theta", rope["rope_theta"], float)
    for name in ROPES[kind]:
        check(f"rope {name}", rope.get(name), float)
    if kind == "llama3":
        check("high_freq_factor - low", rope["high_freq_factor"] - rope["low_freq_factor"], float)
    check("partial_rotary_factor", rope["partial_rotary_factor"], float, 0, 1)
    if not raw.get("partial_rope"):
        supported("partial_rotary_factor", rope["partial_rotary_factor"], 1.0)
    return rope


def rotated_channels(rope: JSON, head_dim: int) -> int:
    """Return how many channels of a head rope rotates, the first ones."""
    dim = int(head_dim * rope["partial_rotary_factor"])
    check("partial_rotary_factor * head_dim", dim, int, 2)
    if dim % 2:
        raise ValueError(f"rope rotates {dim} of {head_dim} channels: the number must be even")
    if rope["rope_type"] == "longrope":
        factors = check_items("rope short_factor", rope.get("short_factor"), list, float)
        supported("the length of rope short_factor", len(factors), dim // 2)
    return dim


def folds_of(raw: JSON, rope_dim: int, rotated: float) -> JSON:
    """Return the numbers that `folded` folds into the weights; {} if none of them changes any.

    Args:
        rope_dim: how many channels of a head rope rotates.
        rotated: a factor on the products of rotated queries and keys.
    """
    H = raw["head_dim"]
    queries = 1.0  # attention divides their products by the root of H
    if "attention_multiplier" in raw:  # in place of that
        queries = check("attention_multiplier", raw["attention_multiplier"], float) * H**0.5
    if "query_pre_attn_scalar" in raw:  # it divides by the root of this
        queries = (H / check("query_pre_attn_scalar", raw["query_pre_attn_scalar"], float)) ** 0.5
    for name in ("embedding_multiplier", "residual_multiplier", "logits_scaling"):
        check(name, raw[name], float)
    folds = dict(
        rope_dim=rope_dim,
        queries=queries,
        rotated=rotated,
        residual=raw["residual_multiplier"],
        logits=raw["logits_scaling"],
        norm_offset=raw.get("norm_offset", 0.0),
    )
    neutral = dict.fromkeys(folds, 1.0) | dict(rope_dim=H, norm_offset=0.0)
    return {} if folds == neutral else folds


# --- Rope -----------------------------------------------------------------------------------------


def speeds(rope: JSON, dim: int) -> Tensor:
    """Rotation speed of each pair of channels, in radians per position.

    In plain rope, pair i turns by theta ** (-2i / dim). `linear` divides every speed by `factor`
    (Chen et al. 2023, arXiv:2306.15595). `llama3` (Llama 3.1 release) counts how many turns a pair
    makes within the original context. Pairs with many turns keep their speed, pairs with few have
    it divided by `factor`, and those between get a blend. `yarn` blends along the index of the
    pair, between those that make beta_fast and beta_slow turns (Peng et al. 2023,
    arXiv:2309.00071). `longrope` divides each speed by a factor of its own (Ding et al. 2024,
    arXiv:2402.13753).

    Args:
        rope: the settings of rope, under the names of config.json, complete.
        dim: the number of channels that are rotated.

    Returns:
        (dim / 2,) float32.
    """
    plain = rope["rope_theta"] ** -(
        torch.arange(0, dim, 2, dtype=torch.float32, device="cpu") / dim
    )
    kind = rope["rope_type"]
    if kind == "default":
        return plain
    if kind == "longrope":
        return plain / torch.tensor(rope["short_factor"], device="cpu")
    slow = plain / rope["factor"]
    if kind == "linear":
        return slow
    turns = rope["original_max_position_embeddings"] * plain / (2 * math.pi)
    if kind == "llama3":
        low = rope["low_freq_factor"]
        high = rope["high_freq_factor"]
        return slow.lerp(plain, ((turns - low) / (high - low)).clamp(0, 1))
    # yarn: ln(turns) falls by the same step from each pair to the next
    step = 2 * math.log(rope["rope_theta"]) / dim
    first = max(0, math.log(turns[0] / rope["beta_fast"]) / step)
    last = min(dim - 1, math.log(turns[0] / rope["beta_slow"]) / step)
    if rope["truncate"]:
        first = math.floor(first)
        last = math.ceil(last)
    share = (torch.arange(dim // 2, device="cpu") - first) / max(last - first, 0.001)
    return plain.lerp(slow, share.clamp(0, 1))


def attention_factor(rope: JSON) -> float:
    """The factor by which yarn and longrope multiply the rotated queries and keys. The other types
    have none, and ignore a given one, as in transformers."""
    if rope["rope_type"] not in ("yarn", "longrope"):
        return 1.0
    if rope.get("attention_factor") is not None:
        return check("rope attention_factor", rope["attention_factor"], float)
    growth = math.log(max(rope["factor"], 1))
    if rope["rope_type"] == "longrope":
        return math.sqrt(1 + growth / math.log(rope["original_max_position_embeddings"]))
    above = 1.0
    below = 0.0
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        above = check("rope mscale", rope["mscale"], float)
        below = check("rope mscale_all_dim", rope["mscale_all_dim"], float)
    return (1 + 0.1 * above * growth) / (1 + 0.1 * below * growth)


# --- Weights --------------------------------------------------------------------------------------


def rotated_first(head_dim: int, dim: int) -> Tensor:
    """The order of a head's channels for a family that rotates only the first `dim`.

    Rope rotates channel i with i + dim/2, and model.apply_rope with i + H/2. So the second half of
    the rotated channels moves to the second half of the head. Queries and keys change alike, so
    their products stay the same.

    Example: head_dim 8, dim 4: 0 1 4 5 2 3 6 7; the pairs 0, 2 and 1, 3 turn, the others do not
    """
    rotated, others = torch.arange(head_dim).split((dim, head_dim - dim))
    halves = zip(rotated.chunk(2), others.chunk(2))
    return torch.cat([torch.cat(pair) for pair in halves])


FOLDED = ("q_proj", "k_proj", "o_proj", "down_proj")  # and all norms


def folded(config: Config, name: str, tensor: Tensor) -> Tensor:
    """Return a stored tensor with the numbers of config.folds in it, of the same shape and dtype.

    Args:
        name: this engine's name of the tensor. Of a quantised weight the rows are reordered, and
            only the scales are multiplied.
        tensor: its first dimension counts output channels. It may be on the meta device.

    Example: with a residual_multiplier of 0.5, o_proj and down_proj are halved
    """
    folds = config.folds
    *path, module, kind = name.split(".")  # "layers.0.self_attn.q_proj.weight"
    if not (module in FOLDED or module.endswith("norm")):
        return tensor
    H = config.head_dim
    dim = folds["rope_dim"]
    if module in ("q_proj", "k_proj") and dim < H:
        tensor = tensor.unflatten(0, (-1, H))[:, rotated_first(H, dim)].flatten(0, 1)
    if kind in ("qweight", "zeros"):
        return tensor
    x = tensor.float()
    if module.endswith("norm"):
        x = x + folds["norm_offset"]
    # A norm of the queries would undo a factor on what it reads.
    if module == ("q_norm" if config.qk_norm or config.wide_qk_norm else "q_proj"):
        has_first_rope = not (config.ropes and config.ropes[int(path[1])])
        rotated = folds["rotated"] if has_first_rope else 1.0
        is_rotated = torch.arange(H, device=x.device) % (H // 2) < dim // 2
        factors = torch.where(is_rotated, rotated, 1.0) * folds["queries"]
        heads = x.unflatten(0, (-1, H)).movedim(1, -1)
        x = (heads * factors).movedim(-1, 1).flatten(0, 1)
    if module in ("o_proj", "down_proj"):
        x = x * folds["residual"]
    if module == "norm":  # the last one, before lm_head
        x = x / folds["logits"]
    return x.to(tensor.dtype)
