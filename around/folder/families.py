"""What differs between families of models: what config.json may leave out, and what is folded.

Most differences that are only numbers are folded into speeds of rope or into weights when a folder
is read, so model.py need not know them. (The factor on embeddings is not, as lm_head may share
their weight.) Rope turns each pair of channels at a speed, so each method of extending rope is a
list of speeds, and a layer without rope has speeds of 0. A factor on queries, residuals or logits
is a factor on the weights that make these. This file knows config.json's names for these numbers,
and the names of the weights; it does not read files. Every family has been compared with
`transformers`, logit by logit (tests/test_model.py). Read: FAMILIES, with_defaults; then
layer_settings, rope_settings, folded.
"""

import math
from collections.abc import Collection

import torch
from torch import Tensor

from around.settings import JSON, check, check_items, choose, supported, without_nulls
from model import Config, plain_speeds

# --- What config.json may leave out ---------------------------------------------------------------

# The families that run here, by their model_type, and for each the defaults of settings that its
# config.json may leave out. None: the file must have it. As in transformers, `architectures` is not
# read: some tools leave it out, and some write it in their own way, such as LLaMAForCausalLM.
MISTRAL = dict(num_key_value_heads=8, max_position_embeddings=131072)
QWEN = dict(num_key_value_heads=32, max_position_embeddings=32768)
GEMMA = dict(num_attention_heads=8, num_key_value_heads=4, head_dim=256, sliding_window=4096,
    tie_word_embeddings=True, query_pre_attn_scalar=256)  # fmt: skip
FAMILIES: dict[str, JSON] = dict(
    llama={},
    mistral=dict(MISTRAL, sliding_window=4096),
    ministral=dict(MISTRAL, sliding_window=4096),
    ministral3=dict(MISTRAL, head_dim=128, max_position_embeddings=262144, rms_norm_eps=1e-5,
        rope_parameters=dict(rope_type="yarn", rope_theta=1e6, factor=16.0, mscale=1.0,
            mscale_all_dim=1.0, original_max_position_embeddings=16384, llama_4_scaling_beta=0.1)),
    mixtral=dict(MISTRAL,  # without a window unless the file names one
        num_experts=8, num_experts_per_tok=2, rms_norm_eps=1e-5, rope_theta=1e6),
    qwen2=QWEN,
    qwen3=dict(QWEN, head_dim=128),
    qwen3_moe=dict(QWEN, num_key_value_heads=4, num_experts=128, num_experts_per_tok=8,
        moe_intermediate_size=768, norm_topk_prob=False),
    # Without SmolLM3's list, or one of Granite's multipliers, a file is refused. transformers makes
    # the list by a rule, and takes a multiplier as 1.
    smollm3=dict(num_key_value_heads=4, rope_theta=2e6, tie_word_embeddings=True,
        no_rope_layers=None, max_position_embeddings=32768),
    phi3=dict(rms_norm_eps=1e-5, max_position_embeddings=4096,
        original_max_position_embeddings=4096),
    granite=dict(embedding_multiplier=None, attention_multiplier=None,
        residual_multiplier=None, logits_scaling=None),
    gemma2=dict(GEMMA, vocab_size=256000, max_position_embeddings=8192,
        attn_logit_softcapping=50.0, final_logit_softcapping=30.0),
    gemma3_text=dict(GEMMA, vocab_size=262208, max_position_embeddings=131072, rope_theta=1e6,
        rope_local_base_freq=1e4, sliding_window_pattern=6,
        attn_logit_softcapping=None, final_logit_softcapping=None),
    olmo2=dict(rms_norm_eps=1e-5))  # fmt: skip
# What a family does whatever its file says: it sets fields of model.Config, replaces settings of
# config.json, and sets these:
#   norm_offset    is added to the weights of norms
#   root_of_width  whether embeddings are multiplied by the root of D
#   partial_rope   whether rope may rotate a part of each head only
# PLAIN is what a family does where FIXED does not say otherwise.
PLAIN = dict(gelu=False, qk_norm=False, wide_qk_norm=False, pre_norm=True, post_norm=False,
    norm_offset=0.0, root_of_width=False, partial_rope=False)  # fmt: skip
# Most families do not read use_sliding_window and max_window_layers, so NO_WINDOWS or ALL_WINDOWS
# sets them. With layer_types=None, the file's list is not read either.
NO_WINDOWS = dict(use_sliding_window=False, layer_types=None)
ALL_WINDOWS = dict(use_sliding_window=True, max_window_layers=0)
EACH_LAYER = dict(ALL_WINDOWS, layer_types=None)
BOTH_GEMMAS = dict(ALL_WINDOWS, post_norm=True, gelu=True, norm_offset=1.0, root_of_width=True,
    hidden_act="silu")  # stands for the file's, which is not read, and passes ONLY  # fmt: skip
FIXED: dict[str, JSON] = dict(
    llama=NO_WINDOWS, granite=NO_WINDOWS,
    mistral=ALL_WINDOWS, ministral=ALL_WINDOWS,
    mixtral=EACH_LAYER, ministral3=EACH_LAYER, phi3=dict(EACH_LAYER, partial_rope=True),
    qwen2=dict(qkv_bias=True, o_bias=False), qwen3=dict(qk_norm=True),
    qwen3_moe=dict(qk_norm=True, max_window_layers=0, layer_types=None),
    gemma2=dict(BOTH_GEMMAS, sliding_window_pattern=2),
    gemma3_text=dict(BOTH_GEMMAS, qk_norm=True),
    olmo2=dict(NO_WINDOWS, wide_qk_norm=True, pre_norm=False, post_norm=True),
)  # fmt: skip
# Settings, with their types, that a family reads only if its entry in FAMILIES has them.
# No family has the last two: attention_bias sets these fields of Config, or FIXED does.
PARTICULAR = dict(embedding_multiplier=float, attention_multiplier=float, residual_multiplier=float,
    logits_scaling=float, query_pre_attn_scalar=float, rope_local_base_freq=float,
    sliding_window_pattern=int, no_rope_layers=list, attn_logit_softcapping=float | None,
    final_logit_softcapping=float | None, qkv_bias=bool, o_bias=bool)  # fmt: skip
# Settings that must have this value, or be left out. Shared experts need no check here, because
# models that have them have other model types.
ONLY: JSON = dict(hidden_act="silu", hidden_activation="gelu_pytorch_tanh", scoring_func="softmax",
    decoder_sparse_step=1, mlp_only_layers=[],  # experts in each layer
    n_group=1, is_causal=True, use_bidirectional_attention=False)  # fmt: skip
# Defaults for all families. None: the file, or the family, must have it.
DEFAULTS: JSON = dict(num_hidden_layers=None, num_attention_heads=None, hidden_size=None,
    intermediate_size=None, vocab_size=None, eos_token_id=[], torch_dtype="auto",
    attention_bias=False, num_experts=1, use_sliding_window=False, max_window_layers=28,
    max_position_embeddings=2048, rope_theta=1e4, partial_rotary_factor=1.0, rope_parameters={},
    embedding_multiplier=1.0, residual_multiplier=1.0, logits_scaling=1.0,
    quantization_config={})  # fmt: skip


def with_defaults(raw: JSON) -> JSON:
    """Return the settings of a config.json, with the defaults for those that it leaves out, and
    without those that its family does not read."""
    # Of a model with images, the text model runs, and its model_type counts. An image in a chat is
    # refused.
    raw = raw | check("text_config", raw.get("text_config") or {}, dict)
    family = choose("model_type", raw.get("model_type"), FAMILIES)
    read = {key: raw[key] for key in raw.keys() - (PARTICULAR.keys() - family.keys())}
    # A null in the file removes the family's default (in Mistral, the window). Then the one of
    # DEFAULTS counts, if there is one.
    merged = without_nulls(family | read)
    for setting in PARTICULAR.keys() & family.keys():
        check(setting, merged.get(setting), PARTICULAR[setting])
    settings = ONLY | DEFAULTS | merged | PLAIN | FIXED.get(raw["model_type"], {})
    for setting, only in ONLY.items():
        supported(setting, settings[setting], only)
    return settings


# --- Layers: windows and ropes --------------------------------------------------------------------


def layer_settings(settings: JSON) -> JSON:
    """Return Config's `windows` and `ropes`, which say for each layer how many tokens a query sees
    (None: all of them), and which rope it has (0, or 1 for the second one).

    Newer files list the kind of each layer in `layer_types`; for others see full_layers.

    Example: 3 layers, sliding_window 5, max_window_layers 1: windows (None, 5, 5), ropes (0, 0, 0)
    """
    layers = check("num_hidden_layers", settings["num_hidden_layers"], int, 1, 1024)
    full = full_layers(settings)
    usual = ["full_attention" if i in full else "sliding_attention" for i in range(layers)]
    kinds = settings.get("layer_types") or usual
    supported("the length of layer_types", len(kinds), layers)
    sizes = dict(full_attention=None, sliding_attention=window(settings))
    windows = tuple(choose("layer_types", kind, sizes) for kind in kinds)
    ropes = (0,) * layers
    # Gemma 3: the second rope is that of layers with a window.
    if "rope_local_base_freq" in settings:
        ropes = tuple(int(kind == "sliding_attention") for kind in kinds)
    # SmolLM3: the second rope does not rotate. In spite of the name, 1 marks the layers with rope.
    if "no_rope_layers" in settings:
        ropes = tuple(int(not has_rope) for has_rope in settings["no_rope_layers"])
        supported("the length of no_rope_layers", len(ropes), layers)
    return dict(windows=windows, ropes=ropes)


def full_layers(settings: JSON) -> Collection[int]:
    """Return the layers that see everything, if the file has no layer_types: in most families the
    first `max_window_layers`."""
    if "sliding_window_pattern" in settings:  # Gemma: the last layer of each group
        every = settings["sliding_window_pattern"]
        return range(every - 1, settings["num_hidden_layers"], every)
    if "no_rope_layers" in settings:  # SmolLM3: all that have rope
        return [i for i, has_rope in enumerate(settings["no_rope_layers"]) if has_rope]
    return range(settings["max_window_layers"])


def window(settings: JSON) -> int | None:
    """Return how many tokens a query sees in the layers that have a window; None: all of them."""
    if not settings["use_sliding_window"]:  # Qwen2's files name a window all the same
        return None
    size = check("sliding_window", settings.get("sliding_window"), int | None)
    if size and size >= settings["max_position_embeddings"]:
        return None  # it hides nothing, as in Phi-4-mini, and without a mask prompts are faster
    return size


# --- Rope -----------------------------------------------------------------------------------------

ORIGINAL = "original_max_position_embeddings"  # the context before it was extended
# The numbers that each method of extending rope needs.
ROPES: dict[str, tuple] = dict(default=(), linear=("factor",), longrope=(),
    yarn=("factor", "beta_fast", "beta_slow", ORIGINAL),
    llama3=("factor", "low_freq_factor", "high_freq_factor", ORIGINAL))  # fmt: skip


def rope_with_defaults(settings: JSON) -> JSON:
    """Collect the settings of rope, with the defaults of its type, and check the numbers that it
    needs.

    Newer files have a dict `rope_parameters`, which in Gemma 3's holds a dict for each kind of
    layer; older files have `rope_theta` and a dict `rope_scaling`. If a file has both dicts,
    `rope_scaling` wins, as in transformers.
    """
    # 1) What the file says, over the defaults.
    given = check("rope", settings.get("rope_scaling", settings["rope_parameters"]), dict)
    given = given.get("full_attention") or given
    context = settings["max_position_embeddings"]
    rope = dict(
        rope_theta=settings["rope_theta"],
        partial_rotary_factor=settings["partial_rotary_factor"],
        original_max_position_embeddings=context,
        beta_fast=32,
        beta_slow=1,
        truncate=True,
    ) | without_nulls(given)
    if ORIGINAL in settings:  # Phi-3's; it wins over the dict's, as in transformers
        rope[ORIGINAL] = settings[ORIGINAL]
    # 2) Its type.
    kind = given.get("rope_type", given.get("type", "default"))  # older files have `type`
    if settings["partial_rope"] and kind in ("su", "yarn"):  # Phi-3's older names
        kind = "longrope"
    rope["rope_type"] = supported("rope_type", kind, *ROPES)
    if kind in ("yarn", "longrope"):
        check(ORIGINAL, rope[ORIGINAL], int, 2)
        rope.setdefault("factor", context / rope[ORIGINAL])
    # 3) Check them. Without other bounds, a float must be above 0; see settings.RANGES.
    check("rope_theta", rope["rope_theta"], float)
    for name in ROPES[kind]:
        check(f"rope {name}", rope.get(name), float)
    share = check("partial_rotary_factor", rope["partial_rotary_factor"], float, 0, 1)
    if not settings["partial_rope"]:
        supported("partial_rotary_factor", share, 1.0)
    return rope


def rope_settings(settings: JSON, rope: JSON) -> JSON:
    """Return Config's `rope_theta` and `rope_speeds`.

    Args:
        settings: with those of layer_settings.
        rope: see rope_with_defaults.
    """
    H = settings["head_dim"]
    dim = rotated_channels(rope, H)
    found = [speeds(rope, dim)]
    # Gemma 3: the rope of layers with a window is a plain one.
    if "rope_local_base_freq" in settings:
        parameters = settings["rope_parameters"].get("sliding_attention") or {}
        supported("rope_type of sliding_attention", parameters.get("rope_type"), "default", None)
        theta = parameters.get("rope_theta", settings["rope_local_base_freq"])
        check("rope_local_base_freq", theta, float)
        found.append(speeds(dict(rope_type="default", rope_theta=theta), dim))
    elif any(settings["ropes"]):  # SmolLM3: the second rope does not rotate
        found.append(0 * found[0])
    others = [0.0] * (H // 2 - dim // 2)  # the pairs that rope leaves as they are
    return dict(
        rope_theta=rope["rope_theta"],
        rope_speeds=tuple((*each.tolist(), *others) for each in found),
    )


def extended(settings: JSON, rope: JSON) -> int:
    """Return the context with what rope's type adds to max_position_embeddings, as vLLM does.

    Files with llama3's factors, and Gemma 3's, give the context that is already extended.

    Args:
        rope: see rope_with_defaults.

    Example: yarn with a factor of 4 and an original context of 32,768: 131,072
    """
    context = check("max_position_embeddings", settings["max_position_embeddings"], int)
    kind = rope["rope_type"]
    # Two methods end at the original context here. Beyond it, longrope would need other speeds for
    # all tokens, also for keys in the cache, and Ministral 3's llama_4_scaling_beta would need a
    # factor for each query.
    if kind == "longrope" or rope.get("llama_4_scaling_beta"):
        return min(context, rope[ORIGINAL])
    if kind in ("linear", "yarn") and "rope_local_base_freq" not in settings:
        return max(context, int(rope[ORIGINAL] * rope["factor"]))
    return context


def rotated_channels(rope: JSON, head_dim: int) -> int:
    """Return how many channels rope rotates in each head. They are the first ones."""
    dim = int(head_dim * rope["partial_rotary_factor"])
    check("partial_rotary_factor * head_dim", dim, int, 2)
    if dim % 2:
        raise ValueError(f"rope rotates {dim} channels of head_dim {head_dim}: it must be even")
    return dim


def speeds(rope: JSON, dim: int) -> Tensor:
    """Rotation speed of each pair of channels, in radians per position.

    Args:
        rope: see rope_with_defaults.
        dim: the number of channels that are rotated.

    Returns:
        (dim / 2,) float32.
    """
    plain = plain_speeds(rope["rope_theta"], dim)
    kind = rope["rope_type"]
    if kind == "default":
        return plain
    if kind == "longrope":  # a factor for each pair (Ding et al. 2024, arXiv:2402.13753)
        factors = check_items("rope short_factor", rope.get("short_factor"), list, float)
        supported("the length of rope short_factor", len(factors), dim // 2)
        return plain / torch.tensor(factors, device="cpu")
    slow = plain / rope["factor"]
    if kind == "linear":  # the same factor for all (Chen et al. 2023, arXiv:2306.15595)
        return slow
    turns = rope[ORIGINAL] * plain / (2 * math.pi)
    if kind == "llama3":
        # Pairs that make many turns within the original context keep their speed, those that make
        # few get the slow one, and those between a blend (Llama 3.1's release).
        low = rope["low_freq_factor"]
        high = rope["high_freq_factor"]
        return slow.lerp(plain, ((turns - low) / (high - low)).clamp(0, 1))
    # yarn blends evenly from pair `first`, which makes beta_fast turns, to pair `last`, which makes
    # beta_slow (Peng et al. 2023, arXiv:2309.00071). ln(turns) falls by the same step from pair to
    # pair, so both can be computed; they need not be whole.
    step = 2 * math.log(rope["rope_theta"]) / dim
    first = max(0, math.log(turns[0] / rope["beta_fast"]) / step)
    # The last pair is dim/2 - 1, but the bound here is transformers'.
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
    if "attention_factor" in rope:
        return check("rope attention_factor", rope["attention_factor"], float)
    growth = math.log(max(rope["factor"], 1))
    if rope["rope_type"] == "longrope":
        return math.sqrt(1 + growth / math.log(rope[ORIGINAL]))
    # mscale and mscale_all_dim count only if the file has both, as in transformers.
    mscale = 1.0
    mscale_all_dim = 0.0
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        mscale = check("rope mscale", rope["mscale"], float)
        mscale_all_dim = check("rope mscale_all_dim", rope["mscale_all_dim"], float)
    return (1 + 0.1 * mscale * growth) / (1 + 0.1 * mscale_all_dim * growth)


# --- Numbers that are folded into the weights -----------------------------------------------------


def fold_settings(settings: JSON, rope: JSON) -> JSON:
    """Return Config's `embedding_multiplier` and `folds`. The latter is what folded() needs: how
    many channels rope rotates, factors, and the offset of norms; or {} if nothing changes a weight.

    Args:
        rope: see rope_with_defaults.
    """
    H = settings["head_dim"]
    query_factor = 1.0  # attention divides the products of queries and keys by the root of H
    if "attention_multiplier" in settings:  # Granite multiplies by this instead
        query_factor = settings["attention_multiplier"] * H**0.5
    if "query_pre_attn_scalar" in settings:  # Gemma divides by the root of this instead
        query_factor = (H / settings["query_pre_attn_scalar"]) ** 0.5
    folds = dict(
        rope_dim=rotated_channels(rope, H),
        query_factor=query_factor,
        rotated_factor=attention_factor(rope) ** 2,  # the square, as keys are left as they are
        residual_factor=settings["residual_multiplier"],
        logits_divisor=settings["logits_scaling"],
        norm_offset=settings["norm_offset"],
    )
    neutral = dict.fromkeys(folds, 1.0) | dict(rope_dim=H, norm_offset=0.0)
    embedding_multiplier = settings["embedding_multiplier"]
    if settings["root_of_width"]:
        embedding_multiplier = settings["hidden_size"] ** 0.5
    return dict(embedding_multiplier=embedding_multiplier, folds={} if folds == neutral else folds)


FOLDED = ("q_proj", "k_proj", "o_proj", "down_proj")  # and all norms


def folded(config: Config, name: str, tensor: Tensor) -> Tensor:
    """Return a stored tensor with the numbers of `folds` in it, of the same shape, in float32 where
    a number changes it: it is rounded once, when it is copied into the model.

    Args:
        name: this engine's name of the tensor.
        tensor: its first dimension counts output channels. It may be on the meta device.

    Example: with a residual_multiplier of 0.5, o_proj and down_proj are halved
    """
    folds = config.folds
    *path, module, kind = name.split(".")  # "layers.0.self_attn.q_proj.weight"
    is_norm = module.endswith("norm")
    if not (module in FOLDED or is_norm):
        return tensor
    H = config.head_dim
    if module in ("q_proj", "k_proj") and folds["rope_dim"] < H:
        heads = tensor.unflatten(0, (-1, H))
        tensor = heads[:, rope_order(H, folds["rope_dim"])].flatten(0, 1)
    if kind in ("qweight", "zeros"):  # of a quantised weight, only the scales are multiplied
        return tensor
    x = tensor.float()
    if is_norm:
        x = x + folds["norm_offset"]
    # A norm of the queries would undo factors in q_proj, so in models with such a norm its weight
    # gets the factors.
    is_normed = config.qk_norm or config.wide_qk_norm
    if module == ("q_norm" if is_normed else "q_proj"):
        factors = query_factors(config, int(path[1])).to(x.device)
        x = (x.t() * factors.repeat(len(x) // H)).t()  # scales rows; t() leaves a bias as it is
    if module in ("o_proj", "down_proj"):
        x = x * folds["residual_factor"]
    if module == "norm":  # the last one, as lm_head's weight may be that of the embeddings
        x = x / folds["logits_divisor"]
    return x


def rope_order(head_dim: int, dim: int) -> Tensor:
    """The order of a head's channels for a family that rotates only the first `dim`.

    Such a family rotates channel i with i + dim/2, and model.apply_rope with i + H/2. So the second
    half of the rotated channels moves to the second half of the head. Queries and keys change
    alike, so their products stay the same.

    Example: head_dim 8, dim 4: 0 1 4 5 2 3 6 7; the pairs 0, 2 and 1, 3 turn, the others do not
    """
    parts = torch.arange(head_dim).split((dim, head_dim - dim))  # the rotated ones, the others
    return torch.cat([part.view(2, len(part) // 2) for part in parts], 1).flatten()


def query_factors(config: Config, layer: int) -> Tensor:
    """The factors on the channels of each head of queries: (H,). `rotated_factor` concerns only the
    channels that are rotated, in layers that have the first rope."""
    folds = config.folds
    factors = torch.full((2, config.head_dim // 2), folds["query_factor"])  # a column for a pair
    if config.ropes[layer] == 0:  # the first rope
        factors[:, : folds["rope_dim"] // 2] *= folds["rotated_factor"]
    return factors.flatten()
