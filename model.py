"""The transformer, and how a Hugging Face folder becomes one.

One config-driven decoder covers Llama 2/3.x, Mistral, Qwen2/2.5 and Qwen3: they differ only in
biases, a norm on q and k, a sliding window and how rope is stretched. This file knows nothing of
text, batching or how a cache lays out memory: attention hands q, k, v to a `KVCache` and gets
attended values back, so every cache (static, paged, none) runs under the same forward.

Papers: Vaswani et al. 2017 (arXiv:1706.03762), Touvron et al. 2023 (Llama, arXiv:2302.13971),
Su et al. 2021 (rope, arXiv:2104.09864), Ainslie et al. 2023 (grouped-query, arXiv:2305.13245).
Read: Config, Transformer.forward, Attention, attention(), load_model. Next: kv_cache.py.

The alphabet of shape comments, where a file does not say otherwise:
    B sequences   T new tokens   S cached + new tokens   V vocabulary
    N query heads   K kv heads   H head dim   D model dim   F feed-forward dim
"""

import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

# Weights on 2 MB pages: a decode step streams all of them, and with 4 kB pages the page-table walks
# cost a noticeable share of the bandwidth (7 to 25 % on a busy Zen 5). PyTorch reads this when it
# first allocates.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

# --- Config ---------------------------------------------------------------------------------------


class CheckpointError(ValueError):
    """A checkpoint folder that we cannot, or should not, load. The message is for the user."""


# Each family we run, with the values its config.json may leave out. An entry here means that the
# family has been compared with `transformers`, logit by logit (tests/test_model.py).
FAMILIES: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {},
    "MistralForCausalLM": {"num_key_value_heads": 8, "sliding_window": 4096},
    "Qwen2ForCausalLM": {"num_key_value_heads": 32},
    "Qwen3ForCausalLM": {"num_key_value_heads": 32, "head_dim": 128},
}
# No model is near these bounds; a garbled size must not fill memory or run for ever.
MAX_LAYERS, MAX_SIZE = 1024, 2**24
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Config:
    """What `config.json` says of the architecture. Field names are the file's own.

    Raises:
        CheckpointError: a value of the wrong type or size, or values that contradict each other.
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
    windows: tuple[int | None, ...] = ()  # per layer: tokens a query sees; () or None: all of them
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # Qwen3: RMSNorm over H on q and k, before rope
    tie_word_embeddings: bool = False
    eos_ids: tuple[int, ...] = ()  # any of them ends a sequence
    quantization: dict[str, Any] = field(default_factory=dict)  # quantize.py understands it
    dtype: torch.dtype = torch.float32  # of the weights as stored

    def __post_init__(self) -> None:
        for f in fields(self):
            value, kind = getattr(self, f.name), f.type
            if kind in (int, float):
                number(f.name, value, kind)
            if kind is bool and type(value) is not bool:
                raise CheckpointError(f"{f.name} must be true or false, is {value!r}")
        N, K = self.num_attention_heads, self.num_key_value_heads
        if N % K:
            raise CheckpointError(f"{N} attention heads are not a multiple of {K} key-value heads")
        if N * self.head_dim > MAX_SIZE:  # or a matrix has more bytes than int64 can count
            raise CheckpointError(f"{N} heads of head_dim {self.head_dim} are too large")
        if self.head_dim % 2:
            raise CheckpointError(f"head_dim must be even for rope, is {self.head_dim}")
        if self.windows and len(self.windows) != self.num_hidden_layers:
            raise CheckpointError(
                f"layer_types names {len(self.windows)} layers of {self.num_hidden_layers}"
            )
        rope_frequencies(self)  # raises where the rope settings are wrong


def load_config(path: Path | str) -> Config:
    """Read `config.json` and, for the EOS ids, `generation_config.json` from a checkpoint folder.

    Raises:
        CheckpointError: no such file, broken JSON, or an architecture or setting we do not run.
    """
    path = Path(path)
    raw = read_json(path / "config.json")
    generation = path / "generation_config.json"
    try:
        return _config(raw, read_json(generation) if generation.is_file() else {})
    except CheckpointError as error:
        raise CheckpointError(f"{path}/config.json: {error}") from None
    except (LookupError, TypeError, AttributeError, ArithmeticError) as error:
        raise CheckpointError(f"{path}/config.json: missing or malformed: {error!r}") from None


def _config(raw: dict[str, Any], generation: dict[str, Any]) -> Config:
    names = raw.get("architectures") or ["(none named)"]
    if not isinstance(names, list) or not isinstance(family := names[0], str):
        raise CheckpointError(f"architectures must be a list of names, is {names!r}")
    if family not in FAMILIES:
        raise CheckpointError(f"{family} is not supported; supported: {', '.join(FAMILIES)}")
    raw = FAMILIES[family] | raw
    # Rope: newer files hold one dict `rope_parameters`; older ones `rope_theta` + `rope_scaling`.
    # Where a file has both, `rope_scaling` wins, as in transformers.
    ropes = [raw[key] for key in ("rope_scaling", "rope_parameters") if raw.get(key) is not None]
    if not all(isinstance(rope, dict) for rope in ropes):
        raise CheckpointError(f"rope_scaling and rope_parameters must be objects, are {ropes!r}")
    rope = next(filter(None, ropes), {})
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    for name, only in (("hidden_act", "silu"), ("partial_rotary_factor", 1.0)):
        if (value := raw.get(name, rope.get(name, only))) != only:
            raise CheckpointError(f"{name} {value!r} is not supported; supported: {only}")
    if (dtype := raw.get("dtype") or raw.get("torch_dtype") or "float32") not in DTYPES:
        raise CheckpointError(f"dtype {dtype!r} is not supported; supported: {', '.join(DTYPES)}")
    if not isinstance(quantization := raw.get("quantization_config") or {}, dict):
        raise CheckpointError(f"quantization_config must be an object, is {quantization!r}")
    # Checked before they are computed with: Config would see only what came of it.
    layers = number("num_hidden_layers", raw["num_hidden_layers"], most=MAX_LAYERS)
    hidden, heads = (number(name, raw[name]) for name in ("hidden_size", "num_attention_heads"))
    kv_heads, head_dim = raw.get("num_key_value_heads"), raw.get("head_dim")
    # Every layer of Mistral slides; Qwen files carry a `sliding_window` that is switched off.
    always = family == "MistralForCausalLM"
    window = raw.get("sliding_window") if always or raw.get("use_sliding_window") else None
    windows: tuple[int | None, ...] = ()
    if window is not None:
        full = 0 if always else min(raw.get("max_window_layers", 28), layers)
        kinds = raw.get("layer_types") or (
            ["full_attention"] * full + ["sliding_attention"] * (layers - full)
        )
        window_of = {"full_attention": None, "sliding_attention": number("sliding_window", window)}
        windows = tuple(window_of[kind] for kind in kinds)
    # The EOS ids of generation_config.json win: chat checkpoints list their end-of-turn id there.
    eos = [c.get("eos_token_id") for c in (generation, raw)]
    eos = next((e for e in eos if e is not None), [])
    eos_ids = tuple(eos) if isinstance(eos, list) else (eos,)
    if any(type(i) is not int for i in eos_ids):
        raise CheckpointError(f"eos_token_id must be token ids, is {eos!r}")
    bias = raw.get("attention_bias") or False
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
    optional = ("max_position_embeddings", "rms_norm_eps", "mlp_bias", "tie_word_embeddings")
    return Config(
        **{name: raw[name] for name in sizes},
        **{name: raw[name] for name in optional if name in raw},
        num_attention_heads=heads,
        num_key_value_heads=heads if kv_heads is None else kv_heads,
        head_dim=hidden // heads if head_dim is None else head_dim,
        rope_theta=rope.get("rope_theta", raw.get("rope_theta", 10000.0)),
        rope_scaling={} if rope_type == "default" else {**rope, "rope_type": rope_type},
        windows=windows,
        qkv_bias=bias or family == "Qwen2ForCausalLM",
        o_bias=bias and family in ("LlamaForCausalLM", "Qwen3ForCausalLM"),
        qk_norm=family == "Qwen3ForCausalLM",
        eos_ids=eos_ids,
        quantization=quantization,
        dtype=DTYPES[dtype],
    )


# --- The transformer ------------------------------------------------------------------------------


class LayerCache:
    """One layer's share of a cache, and all that attention asks of it.

    This one keeps nothing: attention over the tokens of one call, for scoring a text, and as the
    oracle of the tests. kv_cache.Slab and kv_cache.Blocks override `attend`.
    """

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, window: int | None
    ) -> Tensor:
        """Store k and v at `positions`, then let each query attend to what it may see.

        Args:
            q: (B, N, T, H) queries, rope applied.
            k: (B, K, T, H) new keys, rope applied.
            v: (B, K, T, H) new values.
            positions: (B, T) int64, place of each new token in its sequence.
            window: a query at p sees positions p - window < s <= p; None: all s <= p.

        Returns:
            (B, N, T, H) attended values.
        """
        return attention(q, k, v, positions, positions, window)


class KVCache:
    """What a forward runs against: one LayerCache for each layer. This one keeps nothing."""

    def __init__(self, config: Config) -> None:
        self.layers = [LayerCache() for _ in range(config.num_hidden_layers)]

    def step(self, rows: list[Any]) -> tuple["KVCache", Tensor]:
        """See kv_cache.PagedCache.step. Here: one row, from the beginning."""
        ((_, start, end),) = rows
        assert start == 0, "what came before is not kept"
        return self, torch.arange(end)[None]


class Transformer(nn.Module):
    """A decoder-only language model. Parameter names are the checkpoint's, less `model.`."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        windows = config.windows or (None,) * config.num_hidden_layers
        self.layers = nn.ModuleList(Block(config, window) for window in windows)
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight
        # fp32 on purpose, and not a parameter: in bfloat16 positions past 256 would collide.
        self.register_buffer("inv_freq", rope_frequencies(config), persistent=False)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        cache: KVCache | None = None,
        select: Tensor | None = None,
    ) -> Tensor:
        """Run the new tokens through every layer.

        Args:
            tokens: (B, T) int64 token ids.
            positions: (B, T) int64, place of each token in its sequence, from 0.
            cache: where earlier keys and values are; None: there are none.
            select: int64 indices into the B * T tokens, in row-major order, whose logits are
                wanted. A prompt needs only its last one, and V is large. None: all.

        Returns:
            Logits: (B, T, V), or (len(select), V).
        """
        cache = cache or KVCache(self.config)
        x = self.embed_tokens(tokens)  # (B, T, D)
        cos, sin = self.rope(positions)  # (B, 1, T, H/2) each
        for block, layer_cache in zip(self.layers, cache.layers, strict=True):
            x = block(x, cos, sin, positions, layer_cache)
        if select is not None:
            x = x.flatten(0, 1)[select]  # (len(select), D)
        return self.lm_head(self.norm(x))

    def rope(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine of each position's angles: (B, T) -> (B, 1, T, H/2) twice."""
        angles, dtype = positions[:, None, :, None] * self.inv_freq, self.embed_tokens.weight.dtype
        return angles.cos().to(dtype), angles.sin().to(dtype)


class Block(nn.Module):
    """Attention, then the feed-forward, each on a normed copy and added to the stream."""

    def __init__(self, config: Config, window: int | None) -> None:
        super().__init__()
        self.self_attn = Attention(config, window)
        self.mlp = MLP(config)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, cache: LayerCache
    ) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, positions, cache)
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

    def __init__(self, config: Config, window: int | None) -> None:
        super().__init__()
        D, H = config.hidden_size, config.head_dim
        N, K = config.num_attention_heads, config.num_key_value_heads
        self.heads, self.head_dim, self.window = (N, K, K), H, window
        parts = {"q_proj": N * H, "k_proj": K * H, "v_proj": K * H}
        self.qkv_proj = FusedLinear(D, parts, config.qkv_bias)
        self.o_proj = nn.Linear(N * H, D, config.o_bias)
        norm = nn.RMSNorm if config.qk_norm else nn.Identity
        self.q_norm, self.k_norm = norm(H, config.rms_norm_eps), norm(H, config.rms_norm_eps)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, cache: LayerCache
    ) -> Tensor:
        qkv = self.qkv_proj(x).unflatten(2, (-1, self.head_dim))  # (B, T, N + 2K, H)
        q, k, v = qkv.transpose(1, 2).split(self.heads, dim=1)  # (B, N, T, H), (B, K, T, H) twice
        q, k = apply_rope(self.q_norm(q), cos, sin), apply_rope(self.k_norm(k), cos, sin)
        y = cache.attend(q, k, v, positions, self.window)  # (B, N, T, H)
        return self.o_proj(y.transpose(1, 2).flatten(2))  # (B, T, D)


class MLP(nn.Module):
    """SwiGLU feed-forward (Shazeer 2020, arXiv:2002.05202): down(silu(gate(x)) * up(x))."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        D, width = config.hidden_size, config.intermediate_size
        parts = {"gate_proj": width, "up_proj": width}
        self.gate_up_proj = FusedLinear(D, parts, config.mlp_bias)
        self.down_proj = nn.Linear(width, D, config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)  # (B, T, F) each
        return self.down_proj(F.silu(gate) * up)


def attention(
    q: Tensor, k: Tensor, v: Tensor, q_pos: Tensor, k_pos: Tensor, window: int | None
) -> Tensor:
    """Masked softmax attention, in which every cache ends.

    Args:
        q: (B, N, T, H).
        k, v: (B, K, S, H), K dividing N.
        q_pos: (B, T) and k_pos: (B or 1, S), int64 positions in the sequence.
        window: see LayerCache.attend.

    Returns:
        (B, N, T, H).

    Example: k_pos = 0..4, window = 3: the query at position 4 sees keys 2, 3 and 4.
    """
    B, N, T, H = q.shape
    K = k.shape[1]
    q_pos, k_pos = q_pos[:, None, None, :, None], k_pos[:, None, None, None, :]
    mask = k_pos <= q_pos  # (B, 1, 1, T, S)
    if window is not None:
        mask &= k_pos > q_pos - window
    # The N / K query heads that share a kv head become more queries of that head, so that each
    # key is read once; `enable_gqa` reads it N / K times, 2 to 3 times slower at T = 1 on a CPU.
    q = q.reshape(B, K, N // K * T, H)
    mask = mask.expand(B, 1, N // K, T, -1).reshape(B, 1, N // K * T, -1)
    return F.scaled_dot_product_attention(q, k, v, mask).view(B, N, T, H)


def rope_frequencies(config: Config) -> Tensor:
    """Rotation speed of each pair of channels, in radians per position.

    Plain rope: theta ** (-2i / H). `linear` divides all of them by `factor` (Chen et al. 2023,
    arXiv:2306.15595). `llama3` keeps the fast ones, divides the slow ones, and blends between,
    by how many turns a pair makes within the original context (Llama 3.1 release).

    Returns:
        (H/2,) float32, on the CPU even while the model is built on the meta device.

    Raises:
        CheckpointError: an unknown rope_type, or a missing or senseless number.
    """
    H = config.head_dim
    exponent = torch.arange(0, H, 2, dtype=torch.float32, device="cpu") / H
    inv_freq = config.rope_theta**-exponent  # (H/2,)
    rope = config.rope_scaling
    kind = rope.get("rope_type", "default")
    if kind == "linear":
        return inv_freq / number("rope factor", rope.get("factor"), float)
    if kind == "llama3":
        names = ("factor", "low_freq_factor", "high_freq_factor",
                 "original_max_position_embeddings")  # fmt: skip
        factor, low, high, original = (number(f"rope {n}", rope.get(n), float) for n in names)
        if not low < high:
            raise CheckpointError(
                f"rope low_freq_factor {low} is not below high_freq_factor {high}"
            )
        turns = original * inv_freq / (2 * math.pi)  # within the original context
        keep = ((turns - low) / (high - low)).clamp(0, 1)
        return keep * inv_freq + (1 - keep) * inv_freq / factor
    if kind != "default":
        raise CheckpointError(
            f"rope_type {kind!r} is not supported; supported: default, linear, llama3"
        )
    return inv_freq


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


# --- From a folder to a model ---------------------------------------------------------------------


class StoredTensor(NamedTuple):
    """Where a checkpoint keeps a tensor, and what its header says of it."""

    file: Path
    name: str  # in the file
    shape: tuple[int, ...]
    dtype: str  # safetensors' word, such as "BF16"

    def read(self) -> Tensor:
        # Opened anew for each tensor: closing drops the mapping, and with it the pages that were
        # read through it, which would otherwise double the resident size by the end.
        with safe_open(self.file, "pt") as reader:
            return reader.get_tensor(self.name)


Files = dict[str, StoredTensor]  # by our parameter names


def load_model(
    path: Path | str,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
    prepare: Callable[[Transformer, Files], tuple[Transformer, Files]] | None = None,
) -> Transformer:
    """Build the model that a Hugging Face folder describes and fill it from its safetensors files.

    The model is built on the meta device (no memory), every name, shape and dtype is checked
    against the files' headers, and only then is one tensor after another copied out of the mapped
    file: the peak is the weights plus one tensor. Nothing is unpickled.

    Args:
        path: folder with config.json and model.safetensors, or a sharded index.
        device: where the weights go.
        dtype: cast them; None: what config.json says, float32 where it says nothing.
        prepare: changes the empty model and the list of files, for a quantised checkpoint or for
            one rank's share; see quantize.load, which passes it.

    Returns:
        The model in eval mode, without gradients.

    Raises:
        CheckpointError: see load_config; or files that are missing, damaged, or hold other tensors
            than the config asks for (the first 20 are listed, the rest counted).
    """
    path = Path(path)
    config = load_config(path)
    if config.quantization and not prepare:
        raise CheckpointError(f"{path} has a quantization_config: load it with quantize.load")
    with torch.device("meta"):
        model = Transformer(config).requires_grad_(False).to(dtype or config.dtype)
    files = locate_tensors(path)
    if config.tie_word_embeddings:
        files.pop("lm_head.weight", None)  # some files store the tied matrix twice
    if prepare:
        model, files = prepare(model, files)
    check_tensors(files, dict(named_tensors(model)))
    tied = getattr(model.lm_head, "weight", None) is model.embed_tokens.weight
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
    tied = getattr(model.lm_head, "weight", None) is model.embed_tokens.weight
    for name, tensor in model.state_dict().items():
        prefix, _, last = name.rpartition(".")  # "layers.0.mlp.gate_up_proj", "weight"
        parts = getattr(model.get_submodule(prefix), "parts", None)
        if parts:  # a FusedLinear, or its quantised form
            for part, view in zip(parts, tensor.split(list(parts.values())), strict=True):
                yield f"{prefix.rpartition('.')[0]}.{part}.{last}", view
        elif not (tied and name == "lm_head.weight"):
            yield name, tensor


def locate_tensors(path: Path) -> Files:
    """List a checkpoint's tensors, by our parameter names, from the headers of its files.

    Raises:
        CheckpointError: no safetensors files, a missing shard, a damaged header or index.
    """
    single, index = path / "model.safetensors", path / "model.safetensors.index.json"
    names = {single.name}
    if not single.is_file():
        if not index.is_file():
            raise CheckpointError(
                f"{path}: neither {single.name} nor {index.name}. Pickled .bin and .pth files are "
                "never read: convert them to safetensors first"
            )
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{index}: no weight_map")
        names = {str(name) for name in weight_map.values()}
    if lost := [n for n in sorted(names) if Path(n).name != n or not os.path.isfile(path / n)]:
        raise CheckpointError(f"{path}: missing shards: {', '.join(lost)}")
    found: Files = {}
    for file in (path / name for name in sorted(names)):
        try:
            with safe_open(file, "pt") as reader:
                for stored in reader.keys():  # noqa: SIM118 (not a dict: it has no iterator)
                    part, name = reader.get_slice(stored), stored.removeprefix("model.")
                    if name in found:
                        raise CheckpointError(f"{path}: {stored} is stored twice")
                    shape, dtype = tuple(part.get_shape()), part.get_dtype()
                    found[name] = StoredTensor(file, stored, shape, dtype)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file}: damaged or truncated: {error}") from None
    # Llama 1 and 2 files carry rope's frequencies, which the config already gives.
    return {name: at for name, at in found.items() if not name.endswith("rotary_emb.inv_freq")}


def check_tensors(files: Files, wanted: dict[str, Tensor]) -> None:
    """Raise one CheckpointError that lists the tensors missing, unexpected or mis-shaped.

    Args:
        files: what is stored.
        wanted: named_tensors of a model on the meta device.
    """
    problems = [f"missing: {name}" for name in wanted if name not in files]
    for name, at in files.items():
        if name not in wanted:
            problems.append(f"unexpected: {name}")
        elif at.shape != wanted[name].shape:
            problems.append(f"{name} is {at.shape}, config.json asks for {(*wanted[name].shape,)}")
        elif at.dtype not in (
            kinds := ["F32", "F16", "BF16"] if wanted[name].is_floating_point() else ["U8"]
        ):
            problems.append(f"{name} holds {at.dtype}, not one of {', '.join(kinds)}")
    if problems:
        more = [f"and {len(problems) - 20} more"] if len(problems) > 20 else []
        lines = "\n  ".join(problems[:20] + more)
        raise CheckpointError(f"the weights do not fit config.json:\n  {lines}")


# --- Helpers --------------------------------------------------------------------------------------


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object. Raises CheckpointError for anything else, deep nesting included."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise CheckpointError(f"{path}: not readable as JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: holds a {type(value).__name__}, not an object")
    return value


def progress(items: Iterable[Any], label: str, total: int | None = None) -> Iterator[Any]:
    """Yield from `items`, with a bar on stderr once more than a second has passed.

    Args:
        items: what to go through; needs a len() unless `total` is given.
        label: what is going on, in a word or two.
    """
    total = len(items) if total is None else total
    start, width = time.monotonic(), 24
    for done, item in enumerate(items, 1):
        yield item
        elapsed = time.monotonic() - start
        if elapsed > 1:
            bar, left = "#" * (width * done // total), elapsed / done * (total - done)
            text = f"\r{label} [{bar:<{width}}] {done}/{total}  {left:.0f} s left "
            print(text, end="\n" if done == total else "", file=sys.stderr, flush=True)


def number(name: str, value: Any, kind: type = int, most: float = MAX_SIZE) -> Any:
    """Return `value` if it is an integer in 1..most, or for kind=float a number above zero.

    Raises:
        CheckpointError: it is not; the message names it. NaN fails any comparison, and far outside
            1e-15..1e15 float32 overflows and every logit becomes NaN.
    """
    good = type(value) is int and 0 < value <= most
    if kind is float:
        good = type(value) in (int, float) and 1e-15 <= value <= 1e15
    if not good:
        wanted = "a positive number" if kind is float else f"an integer in 1..{most}"
        raise CheckpointError(f"{name} must be {wanted}, is {value!r}")
    return value
