"""The transformer, and how a Hugging Face folder becomes one.

One config-driven decoder covers Llama 2/3.x, Mistral, Mixtral, Qwen2/2.5, Qwen3 and Qwen3-MoE:
they differ only in biases, a norm on q and k, a sliding window, how rope is stretched, and experts
in the place of one feed-forward. This file knows nothing of text, batching or how a cache lays out
memory: attention hands q, k, v to its layer of a cache and gets attended values back, so every
cache (static, paged, none) runs under the same forward.

Papers: Vaswani et al. 2017 (arXiv:1706.03762), Touvron et al. 2023 (Llama, arXiv:2302.13971),
Su et al. 2021 (rope, arXiv:2104.09864), Ainslie et al. 2023 (grouped-query, arXiv:2305.13245),
Jiang et al. 2024 (Mixtral, arXiv:2401.04088).
Read: Transformer.forward, Attention, attention(), NoCache, Config, load_model. Next: kv_cache.py.

The alphabet of shape comments, where a file does not say otherwise:
    B sequences   T new tokens   S cached + new tokens   V vocabulary
    N query heads   K kv heads   H head dim   D model dim   F feed-forward dim
    E experts   k experts that a token passes through
"""

import contextlib
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

# Weights on 2 MB pages: a decode step streams all of them, and with 4 kB pages the page-table walks
# cost a noticeable share of the bandwidth (7 to 25 % on a busy Zen 5). PyTorch reads this when it
# first allocates.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor, nn

# --- The transformer ------------------------------------------------------------------------------


class Transformer(nn.Module):
    """A decoder-only language model. Parameter names are the checkpoint's, less `model.`."""

    def __init__(self, config: "Config") -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config, i) for i in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight
        # fp32 on purpose, and not a parameter: in bfloat16 positions past 256 would collide.
        self.register_buffer("inv_freq", rope_frequencies(config), persistent=False)

    @property
    def tied(self) -> bool:
        """Whether lm_head is the embedding; once it is quantised, it is not."""
        return getattr(self.lm_head, "weight", None) is self.embed_tokens.weight

    @property
    def dtype(self) -> torch.dtype:
        """Of the activations; quantised weights have others."""
        return self.embed_tokens.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.embed_tokens.weight.device

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        cache: "list[LayerCache] | None" = None,
        select: Tensor | None = None,
    ) -> Tensor:
        """Run the new tokens through every layer.

        Args:
            tokens: (B, T) int64 token ids.
            positions: (B, T) int64, place of each token in its sequence, from 0.
            cache: for each layer, where earlier keys and values are, prepared for these tokens;
                None: there are none.
            select: int64 indices into the B * T tokens, in row-major order, whose logits are
                wanted. A prompt needs only its last one, and V is large. None: all.

        Returns:
            Logits: (B, T, V), or (len(select), V).
        """
        if cache is None:
            masks = visible(self.config, positions, positions)
            cache = [NoCache(masks[window]) for window in self.config.windows]
        x = self.embed_tokens(tokens)  # (B, T, D)
        cos, sin = self.rope(positions)  # (B, 1, T, H/2) each
        for block, layer in zip(self.layers, cache, strict=True):
            x = block(x, cos, sin, layer)
        if select is not None:
            x = x.flatten(0, 1)[select]  # (len(select), D)
        return self.lm_head(self.norm(x))

    def rope(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine of each position's angles: (B, T) -> (B, 1, T, H/2) twice."""
        angles = positions[:, None, :, None] * self.inv_freq
        return angles.cos().to(self.dtype), angles.sin().to(self.dtype)


class Block(nn.Module):
    """Attention, then the feed-forward, each on a normed copy and added to the stream."""

    def __init__(self, config: "Config", layer: int) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        sparse = config.num_experts > 1 and layer not in config.mlp_only_layers
        sparse = sparse and (layer + 1) % config.decoder_sparse_step == 0
        self.mlp = SparseMLP(config) if sparse else MLP(config, config.intermediate_size)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: "LayerCache") -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, cache)
        return x + self.mlp(self.post_attention_layernorm(x))


class FusedLinear(nn.Linear):
    """Linears that read the same input, stacked into one: fewer, larger reads of the weights.

    Files store the parts one by one; `named_tensors` gives them back their names.
    """

    def __init__(self, in_features: int, parts: dict[str, int], bias: bool) -> None:
        super().__init__(in_features, sum(parts.values()), bias)
        self.parts = parts  # name in the checkpoint -> output features


class Attention(nn.Module):
    """Grouped-query attention with rope."""

    def __init__(self, config: "Config") -> None:
        super().__init__()
        D, H = config.hidden_size, config.head_dim
        N, K = config.num_attention_heads, config.num_key_value_heads
        self.heads, self.head_dim = (N, K, K), H
        parts = {"q_proj": N * H, "k_proj": K * H, "v_proj": K * H}
        self.qkv_proj = FusedLinear(D, parts, config.qkv_bias)
        self.o_proj = nn.Linear(N * H, D, config.o_bias)
        norm = nn.RMSNorm if config.qk_norm else nn.Identity
        self.q_norm, self.k_norm = norm(H, config.rms_norm_eps), norm(H, config.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: "LayerCache") -> Tensor:
        qkv = self.qkv_proj(x).unflatten(2, (-1, self.head_dim))  # (B, T, N + 2K, H)
        q, k, v = qkv.transpose(1, 2).split(self.heads, dim=1)  # (B, N, T, H), (B, K, T, H) twice
        q, k = apply_rope(self.q_norm(q), cos, sin), apply_rope(self.k_norm(k), cos, sin)
        y = cache.attend(q, k, v)  # (B, N, T, H)
        return self.o_proj(y.transpose(1, 2).flatten(2))  # (B, T, D)


class MLP(nn.Module):
    """SwiGLU feed-forward (Shazeer 2020, arXiv:2002.05202): down(silu(gate(x)) * up(x))."""

    def __init__(self, config: "Config", width: int) -> None:
        super().__init__()
        parts = {"gate_proj": width, "up_proj": width}
        self.gate_up_proj = FusedLinear(config.hidden_size, parts, config.mlp_bias)
        self.down_proj = nn.Linear(width, config.hidden_size, config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)  # (B, T, F) each
        return self.down_proj(F.silu(gate) * up)


class SparseMLP(nn.Module):
    """Mixture of experts: a router sends each token through k of E MLPs, and sums what they say.

    The router scores all experts, softmax in float32, and keeps the k best; of equal ones those
    that torch.topk takes, as transformers does. Whether the k weights then add up to 1 is the
    family's choice. A model has many times the weights that one token needs, and a step reads only
    those of the chosen experts: for one sequence at 0.61 of the speed at which memory is read; 32
    sequences, which choose nearly all, run 2.2 times as fast as in a dense model of as many bytes,
    whose every row meets every weight (`tools/bench.py latency --shape moe --dtype float32
    --compile --batch 1 32`, and --shape 1b; 8 of 64 experts, two Zen 3 cores without AVX-512).
    """

    def __init__(self, config: "Config") -> None:
        super().__init__()
        E, self.k, self.norm = config.num_experts, config.num_experts_per_tok, config.norm_topk_prob
        self.gate = nn.Linear(config.hidden_size, E, bias=False)  # the router
        width = config.moe_intermediate_size or config.intermediate_size
        self.experts = nn.ModuleList(MLP(config, width) for _ in range(E))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).softmax(-1, torch.float32).topk(self.k)  # (B, T, k) each
        weights = weights / weights.sum(-1, keepdim=True) if self.norm else weights
        return self.mix(x, weights, chosen)

    def mix(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Sum each token's experts, by their weights.

        Each expert that is chosen at all runs once, on the rows that chose it and no others: the B
        * T * k pairs of a token and an expert are sorted by expert; a loop over the experts then
        multiplies slices, and the results go back to their places.

        Args:
            x: (B, T, D).
            weights: (B, T, k) float32.
            chosen: (B, T, k) int64, of 0..E - 1.

        Returns:
            (B, T, D), summed in float32, in the order of `chosen`: whoever is in the batch.

        Example: two tokens choose experts [2, 0] and [2, 1]: pairs 1 | 3 | 0, 2, so that expert 0
            runs on token 0, expert 1 on token 1, and expert 2 on both
        """
        order = chosen.flatten().argsort(stable=True)  # (B * T * k,) pairs, by expert
        counts = chosen.flatten().bincount(minlength=len(self.experts)).tolist()
        rows = x.flatten(0, 1).index_select(0, order // chosen.shape[-1])  # (B * T * k, D)
        parts = zip(self.experts, rows.split(counts))
        y = torch.cat([mlp(part) for mlp, part in parts if len(part)])
        y = y.index_select(0, order.argsort()).view(*chosen.shape, -1)  # (B, T, k, D)
        return (weights[..., None] * y).sum(-2).to(x.dtype)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate channel i together with channel i + H/2.

    This is the half-split layout of Hugging Face files. Llama's own release rotates 2i with 2i + 1
    (interleaved); mixing the two up gives text that is fluent for a few words and then falls apart.

    Args:
        x: (B, heads, T, H).
        cos, sin: (B, 1, T, H/2).

    Example: H = 4, a quarter turn on pair 0, none on pair 1: [1, 2, 3, 4] -> [-3, 2, 1, 4]
    """
    a, b = x.chunk(2, dim=-1)  # (B, heads, T, H/2) each
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Masked softmax attention, in which every cache ends.

    The N / K query heads that share a kv head become more queries of that head, so that each key is
    read once; `enable_gqa` reads it N / K times, 2 to 3 times slower at T = 1 on a CPU.

    Args:
        q: (B, N, T, H).
        k, v: (B, K, S, H), K dividing N.
        mask: (B or 1, 1, N / K * T, S) bool, what each query sees; see visible.

    Returns:
        (B, N, T, H).
    """
    B, K = k.shape[:2]
    return F.scaled_dot_product_attention(q.reshape(B, K, -1, q.shape[3]), k, v, mask).view(q.shape)


def visible(config: "Config", q_pos: Tensor, k_pos: Tensor) -> dict[int | None, Tensor]:
    """What each query sees: at position p, positions s <= p; under a window, only s > p - window.

    Made once for a step, and not in each layer.

    Args:
        q_pos: (B, T) and k_pos: (B or 1, S), int64 positions in the sequence.

    Returns:
        For each window that a layer of the model has, (B, 1, N / K * T, S) bool: the T queries of
        one query head, then those of the next one that shares a kv head with it.

    Example: k_pos = 0..4, window = 3: the query at position 4 sees keys 2, 3 and 4.
    """
    group = config.num_attention_heads // config.num_key_value_heads
    q_pos, k_pos = q_pos.repeat(1, group)[:, None, :, None], k_pos[:, None, None, :]
    seen = k_pos <= q_pos
    return {w: seen if w is None else seen & (k_pos > q_pos - w) for w in {*config.windows}}


class LayerCache:
    """One layer's share of a cache, prepared for one step, and all that attention asks of it."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store the new keys and values, then let each query attend to what it may see.

        Args:
            q: (B, N, T, H) queries, rope applied.
            k: (B, K, T, H) new keys, rope applied.
            v: (B, K, T, H) new values.

        Returns:
            (B, N, T, H) attended values.
        """
        raise NotImplementedError


class NoCache(LayerCache):
    """Keeps nothing: attention over the tokens of one call, for training, for scoring a text, and
    as the oracle of the tests."""

    def __init__(self, mask: Tensor) -> None:
        self.mask = mask

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, self.mask)


def rope_frequencies(config: "Config") -> Tensor:
    """Rotation speed of each pair of channels, in radians per position.

    Plain rope: theta ** (-2i / H). `linear` divides all of them by `factor` (Chen et al. 2023,
    arXiv:2306.15595). `llama3` keeps the fast ones, divides the slow ones, and blends between,
    by how many turns a pair makes within the original context (Llama 3.1 release).

    Returns:
        (H/2,) float32, on the CPU even while the model is built on the meta device.

    Raises:
        ValueError: an unknown rope_type, or a missing or senseless number.
    """
    rope, H = config.rope_scaling, config.head_dim
    exponent = torch.arange(0, H, 2, dtype=torch.float32, device="cpu") / H
    inv_freq = config.rope_theta**-exponent  # (H/2,)

    def number(name: str, *bounds: float) -> float:
        return check(f"rope {name}", rope.get(name), float, *bounds)

    kind = supported("rope_type", rope.get("rope_type", "default"), "default", "linear", "llama3")
    if kind == "llama3":
        low = number("low_freq_factor")
        high = number("high_freq_factor", low * (1 + 1e-6), 1e15)
        turns = number("original_max_position_embeddings") * inv_freq / (2 * math.pi)
        keep = ((turns - low) / (high - low)).clamp(0, 1)
        return keep * inv_freq + (1 - keep) * inv_freq / number("factor")
    return inv_freq / number("factor") if kind == "linear" else inv_freq


# --- Values from outside --------------------------------------------------------------------------


class CheckpointError(ValueError):
    """A file that we cannot, or should not, load. The message is for the user."""


@contextlib.contextmanager
def blame(what: Path | str) -> Iterator[None]:
    """Turn whatever goes wrong inside into one CheckpointError that says where: parsers raise
    anything for a damaged file."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        reason = error if isinstance(error, ValueError | OSError) else repr(error)
        raise CheckpointError(f"{what}: {reason}") from error


# No model is near these bounds; a garbled number must not fill the memory, run for ever, or make
# float32 overflow.
RANGES = {int: (1, 2**24), int | None: (1, 2**24), float: (1e-15, 1e15), bool: (False, True)}


def check(name: str, value: Any, kind: Any, *bounds: float) -> Any:
    """Return `value` if it is of this type, and within the bounds (of which the upper one is 2**31
    if it is not given), or else its type's RANGES.

    An int will do for a float, True is not a number, NaN is in no range, None is in any.

    Raises:
        ValueError: it is not. The message begins with the name.
    """
    low, high = (*bounds, 2**31)[:2] if bounds else RANGES.get(kind, (None, None))
    right = isinstance(value, int | float if kind is float else kind)
    right &= isinstance(value, bool) == (kind is bool)
    if not right or not (value is None or low is None or low <= value <= high):
        within = "" if low is None else f" in {low}..{high}"
        kind = getattr(kind, "__name__", kind)
        raise ValueError(f"{name} must be {kind}{within}, is {value!r:.100}")
    return value


def supported(name: str, value: Any, *known: Any) -> Any:
    """Return `value` if it is one of those that we run; else raise ValueError with all of them."""
    if value not in known:
        names = ", ".join(map(str, known))
        raise ValueError(f"{name} {value!r:.100} is not supported; supported: {names}")
    return value


class Checked:
    """A dataclass whose numbers, flags and lists are checked: by their type and, where the field
    has one, by its own range."""

    def __post_init__(self) -> None:
        for f in fields(self):
            if f.type in (*RANGES, list):
                check(f.name, getattr(self, f.name), f.type, *f.metadata.get("range", ()))


def read_json(path: Path, optional: bool = False) -> dict[str, Any]:
    """Read a JSON object; {} where an optional file is not there."""
    if optional and not path.is_file():
        return {}
    with blame(path):
        return check("its content", json.loads(path.read_text(encoding="utf-8")), dict)


# --- Config ---------------------------------------------------------------------------------------

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Each family we run: what its config.json may leave out, and what it does not say. An entry here
# means that the family has been compared with `transformers`, logit by logit (tests/test_model.py).
FAMILIES: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {},
    "MistralForCausalLM": {  # every layer slides, if any does
        "num_key_value_heads": 8, "sliding_window": 4096, "use_sliding_window": True,
        "max_window_layers": 0, "o_bias": False,
    },
    "Qwen2ForCausalLM": {"num_key_value_heads": 32, "qkv_bias": True, "o_bias": False},
    "Qwen3ForCausalLM": {"num_key_value_heads": 32, "head_dim": 128, "qk_norm": True},
    "MixtralForCausalLM": {  # as Mistral, but without a window unless the file names one
        "num_key_value_heads": 8, "use_sliding_window": True, "max_window_layers": 0,
        "rms_norm_eps": 1e-5, "rope_theta": 1e6, "num_experts": 8, "num_experts_per_tok": 2,
    },
    "Qwen3MoeForCausalLM": {
        "num_key_value_heads": 4, "qk_norm": True, "num_experts_per_tok": 8, "norm_topk_prob": False
    },
}  # fmt: skip
# Settings of which we run one value. Routers with shared experts are other architectures.
ONLY = {"hidden_act": "silu", "partial_rotary_factor": 1.0, "scoring_func": "softmax", "n_group": 1}


@dataclass(frozen=True)
class Config(Checked):
    """What `config.json` says of the architecture. Field names are the file's own.

    Raises:
        ValueError: a value of the wrong type or size, or heads that do not fit each other.
    """

    vocab_size: int  # V
    hidden_size: int  # D
    intermediate_size: int  # F
    num_hidden_layers: int
    num_attention_heads: int  # N
    num_key_value_heads: int  # K: N is a multiple of it; K = 1 is multi-query attention
    head_dim: int  # H: not always D / N (Qwen3, Mistral Nemo)
    max_position_embeddings: int = 2048  # tokens: the longest context it was trained for
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: dict[str, Any] = field(default_factory=dict)  # {} is plain rope
    windows: tuple[int | None, ...] = ()  # per layer: tokens a query sees; (): all see everything
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # Qwen3: RMSNorm over H on q and k, before rope
    # E; 1 is a plain MLP. The most is for garbled numbers: building so many takes half a minute.
    num_experts: int = field(default=1, metadata={"range": (1, 1024)})
    num_experts_per_tok: int = 1  # k
    moe_intermediate_size: int | None = None  # an expert's F; None: intermediate_size
    norm_topk_prob: bool = True  # a token's k weights add up to 1
    decoder_sparse_step: int = 1  # every so many layers have experts, the others a plain MLP,
    mlp_only_layers: list = field(default_factory=list)  # and so have these, counted from 0
    tie_word_embeddings: bool = False
    eos_ids: tuple[int, ...] = ()  # any of them ends a sequence
    quantization: dict[str, Any] = field(default_factory=dict)  # quantize.py understands it
    dtype: torch.dtype = torch.float32  # of the weights as stored

    def __post_init__(self) -> None:
        super().__post_init__()
        N, K, H = self.num_attention_heads, self.num_key_value_heads, self.head_dim
        check("heads * head_dim", N * H, int)  # or a matrix has more bytes than int64 can count
        windows, layers = self.windows or (None,) * self.num_hidden_layers, self.num_hidden_layers
        object.__setattr__(self, "windows", windows)  # frozen: only the constructor may
        if N % K or H % 2 or len(windows) != layers:
            raise ValueError(f"{N}, {K} heads, head_dim {H}, {len(windows)} layer_types do not fit")
        check("num_experts_per_tok", self.num_experts_per_tok, int, 1, self.num_experts)
        rope_frequencies(self)  # raises where the rope settings are wrong


def load_config(path: Path | str) -> Config:
    """Read `config.json` and, for the EOS ids, `generation_config.json` from a checkpoint folder.

    Raises:
        CheckpointError: no such file, broken JSON, or an architecture or setting we do not run.
    """
    file = Path(path) / "config.json"
    raw, generation = read_json(file), read_json(file.with_name("generation_config.json"), True)
    with blame(file):
        names = check("architectures", raw.get("architectures") or ["(none named)"], list)
        family = FAMILIES[supported("architectures", names[0], *FAMILIES)]
        # null means the same as nothing: for Mistral's window, nothing rather than 4096
        raw = {key: value for key, value in (family | raw).items() if value is not None}
        # Rope: newer files hold one dict `rope_parameters`; older ones `rope_theta` +
        # `rope_scaling`. Where a file has both, `rope_scaling` wins, as in transformers.
        ropes = [check(n, raw.get(n, {}), dict) for n in ("rope_scaling", "rope_parameters")]
        rope = next(filter(None, ropes), {})
        rope = {"rope_type": rope.get("type", "default")} | rope
        for name, only in ONLY.items():
            supported(name, raw.get(name, rope.get(name, only)), only)
        dtype = supported("dtype", raw.get("dtype", raw.get("torch_dtype", "float32")), *DTYPES)
        layers = check("num_hidden_layers", raw.get("num_hidden_layers"), int, 1, 1024)
        D, N = (check(name, raw.get(name), int) for name in ("hidden_size", "num_attention_heads"))
        # Qwen files carry a `sliding_window` that is switched off; older ones no `layer_types`.
        window = raw.get("sliding_window") if raw.get("use_sliding_window") else None
        window_of = {"full_attention": None, "sliding_attention": window}
        check("sliding_window", window, int | None)
        full = min(check("max_window_layers", raw.get("max_window_layers", 28), int, 0), layers)
        kinds = ["full_attention"] * full + ["sliding_attention"] * (layers - full)
        kinds = check("layer_types", raw.get("layer_types", kinds), list) if window else []
        # Those of generation_config.json win: chat checkpoints list their end-of-turn id there.
        eos = generation.get("eos_token_id")
        eos = raw.get("eos_token_id", []) if eos is None else eos
        eos = eos if isinstance(eos, list) else [eos]
        bias = raw.get("attention_bias", False)
        values = {
            "num_key_value_heads": N, "head_dim": D // N, "qkv_bias": bias, "o_bias": bias,
            **raw,  # over what follows from other values
            "rope_theta": rope.get("rope_theta", raw.get("rope_theta", 10000.0)),
            "rope_scaling": rope,
            "num_experts": raw.get("num_local_experts", raw.get("num_experts", 1)),  # newer, older
            "windows": tuple(window_of[supported("layer_types", k, *window_of)] for k in kinds),
            "eos_ids": tuple(check("eos_token_id", i, int, 0) for i in eos),
            "quantization": check("quantization_config", raw.get("quantization_config", {}), dict),
            "dtype": DTYPES[dtype],
        }  # fmt: skip
        return Config(**{f.name: values[f.name] for f in fields(Config) if f.name in values})


# --- From a folder to a model ---------------------------------------------------------------------


class Stored(NamedTuple):
    """A tensor that is still in a file: what its header says of it, and how to get it."""

    shape: tuple[int, ...]
    kind: str  # "float" for those of 16 and 32 bits, else safetensors' word, such as "U8"
    read: Callable[[], Tensor]


Files = dict[str, Stored]  # by our parameter names
Prepare = Callable[[Transformer, Files], tuple[Transformer, Files]]


def load_model(
    path: Path | str,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
    prepare: Prepare | None = None,
) -> Transformer:
    """Build the model that a Hugging Face folder describes and fill it from its safetensors files.

    The model is built on the meta device (no memory), every name, shape and dtype is checked
    against the files' headers, and only then is one tensor after another copied out of the mapped
    file: the peak is the weights plus one tensor. Nothing is unpickled.

    Args:
        path: folder with config.json and model.safetensors, or shards of it.
        device: where the weights go.
        dtype: cast them; None: what config.json says, float32 where it says nothing.
        prepare: changes the empty model and the list of files, for a quantised checkpoint or for
            one rank's share; see quantize.load, which passes it.

    Returns:
        The model in eval mode, without gradients.

    Raises:
        CheckpointError: see load_config; or files that are missing, damaged, or hold other tensors
            than the config asks for (the first 20 are listed, all of them counted).
    """
    path, config = Path(path), load_config(path)
    with torch.device("meta"):
        model = Transformer(config).requires_grad_(False).to(dtype or config.dtype)
    files = locate_tensors(path)
    if config.tie_word_embeddings:
        files.pop("lm_head.weight", None)  # some files store the tied matrix twice
    model, files = prepare(model, files) if prepare else (model, files)
    check_tensors(files, dict(named_tensors(model)))
    tied = model.tied
    model = model.to_empty(device=device)
    if tied:
        model.lm_head.weight = model.embed_tokens.weight  # to_empty gave them a memory each
    for name, tensor in progress([*named_tensors(model)], f"loading {path.name}"):
        tensor.copy_(files[name].read())
    model.inv_freq = rope_frequencies(config).to(device)  # to_empty and .to(dtype) spoilt it
    return model.eval()


def named_tensors(model: Transformer) -> Iterator[tuple[str, Tensor]]:
    """Yield each weight under its name in a checkpoint (less `model.`), as a view to read or fill.

    A tied lm_head is not yielded: it is the embedding.
    """
    for name, tensor in model.state_dict().items():
        prefix, _, last = name.rpartition(".")  # "layers.0.mlp.gate_up_proj", "weight"
        parts = getattr(model.get_submodule(prefix), "parts", None)
        if parts:  # a FusedLinear, or its quantised form
            for part, view in zip(parts, tensor.split(list(parts.values())), strict=True):
                yield f"{prefix.rpartition('.')[0]}.{part}.{last}", view
        elif not (model.tied and name == "lm_head.weight"):
            yield name, tensor


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

    def read(file: Path, name: str, *place: int | slice) -> Tensor:
        # Opened anew for each tensor: closing drops the mapping, and with it the pages that were
        # read through it, which would otherwise double the resident size by the end.
        with safe_open(file, "pt") as reader:
            return reader.get_tensor(name)[place]

    found: Files = {}
    for file in shards:
        with blame(file), safe_open(file, "pt") as reader:
            for name in reader.keys():  # noqa: SIM118 (not a dict: it has no iterator)
                header = reader.get_slice(name)
                kind = header.get_dtype()
                kind = "float" if kind in ("F32", "F16", "BF16") else kind
                for ours, shape, place in spelt_out(name, header.get_shape()):
                    found[ours] = Stored(shape, kind, partial(read, file, name, *place))
    # Llama 1 and 2 files carry rope's frequencies, which the config already gives.
    return {name: at for name, at in found.items() if not name.endswith("rotary_emb.inv_freq")}


# Mixtral's own names; and tensors (E, rows, columns) that hold a matrix of every expert, or two.
RENAMED = {"block_sparse_moe": "mlp", "w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
STACKED = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


def spelt_out(name: str, shape: list[int]) -> Iterator[tuple[str, tuple[int, ...], tuple]]:
    """Yield what a stored tensor holds: our name for it, its shape, and its place in the tensor.

    Example: "model.layers.0.mlp.experts.down_proj", [2, 32, 24]:
        "layers.0.mlp.experts.0.down_proj.weight", (32, 24), (0, 0..31); and the same of expert 1
    """
    *above, last = (RENAMED.get(part, part) for part in name.removeprefix("model.").split("."))
    for e in range(check("experts", shape[0], int, 1, 1024) if last in STACKED else 0):
        for i, part in enumerate(STACKED[last]):
            ours, rows = ".".join((*above, str(e), part, "weight")), shape[1] // len(STACKED[last])
            yield ours, (rows, *shape[2:]), (e, slice(i * rows, (i + 1) * rows))
    if last not in STACKED:
        yield ".".join((*above, last)), (*shape,), ()


def check_tensors(files: Files, wanted: dict[str, Tensor]) -> None:
    """Raise one CheckpointError that lists the tensors which are not stored as they are wanted.

    Args:
        files: what is stored.
        wanted: named_tensors of a model on the meta device.
    """
    have = {name: f"{at.kind} {at.shape}" for name, at in files.items()}
    kinds = {name: "float" if t.is_floating_point() else "U8" for name, t in wanted.items()}
    want = {name: f"{kinds[name]} {(*t.shape,)}" for name, t in wanted.items()}
    if wrong := sorted(dict(have.items() ^ want.items())):
        lines = [f"{n}: {have.get(n, 'missing')}, wanted: {want.get(n, 'none')}" for n in wrong]
        lines = [f"{len(wrong)} tensors do not fit config.json:", *lines[:20]]
        raise CheckpointError("\n  ".join(lines))


def pick_device(name: str) -> torch.device:
    """Turn --device into a device. Raises ValueError where this machine does not have it."""
    have = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    name = next((n for n in have if have[n]), "cpu") if name == "auto" else name
    if not have.get(name, True):
        raise ValueError(f"--device {name}: there is none here: use --device cpu or auto")
    return torch.device(name)


def progress(items: Iterable[Any], label: str, total: int | None = None) -> Iterator[Any]:
    """Yield from `items`, with a bar on stderr, where that is a terminal, once more than a second
    has passed.

    Args:
        items: what to go through; needs a len() unless `total` is given.
        label: what is going on, in a word or two.
    """
    total, start = len(items) if total is None else total, time.monotonic()
    for done, item in enumerate(items, 1):
        yield item
        if (elapsed := time.monotonic() - start) > 1 and sys.stderr.isatty():
            bar, left = "#" * (24 * done // total), elapsed / done * (total - done)
            text = f"\r{label} [{bar:<24}] {done}/{total}  {left:.0f} s left "
            print(text, end="\n" * (done == total), file=sys.stderr, flush=True)
