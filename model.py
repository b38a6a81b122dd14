"""The transformer: tokens and positions in, logits out.

One decoder covers Llama, Mistral, Ministral 3, Mixtral, Qwen2, Qwen3, Qwen3-MoE, SmolLM3, Phi-3,
Phi-4, Granite 3, Gemma 2, Gemma 3 and OLMo 2. They differ only in what Config holds: sizes, tied
embeddings, biases, where norms stand, what a layer's queries see, which layers have which rope, and
experts in place of the feed-forward (experts.py puts those in). Constant factors on weights, such
as Granite 3's, are folded into them when a folder is read. This file knows nothing about files,
text, scheduling, or how a cache lays out its memory. Attention hands q, k and v to one layer of a
cache and gets the attended values back, so one forward serves every cache.

Papers: Vaswani et al. 2017 (arXiv:1706.03762), Touvron et al. 2023 (Llama, arXiv:2302.13971),
Su et al. 2021 (rope, arXiv:2104.09864), Ainslie et al. 2023 (grouped-query, arXiv:2305.13245).
Read: Transformer.forward, Layer, Attention, LayerCache, attention(), View, Masks. Next:
kv_cache.py.

The letters in shape comments, unless a file says otherwise:
    B sequences   T new tokens   S keys read: cached, new, padding   V vocabulary
    N query heads   K kv heads   H head dim   D model dim   F feed-forward dim
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Config:
    """The architecture, mostly under the names of Hugging Face's config.json."""

    vocab_size: int  # V
    hidden_size: int  # D
    intermediate_size: int  # F
    num_hidden_layers: int
    num_attention_heads: int  # N
    num_key_value_heads: int  # K, which divides N
    head_dim: int  # H, which is not always D / N
    max_position_embeddings: int = 2048  # tokens: the longest context the model was trained for
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_speeds: tuple = ()  # for each rope, its H/2 speeds; (): a single plain rope
    ropes: tuple[int, ...] = ()  # for each layer, the index of its rope; (): 0
    windows: tuple[int | None, ...] = ()  # per layer, see View; (): none has one
    score_cap: float | None = None  # Gemma 2 caps attention's scores, see View,
    logits_cap: float | None = None  # and the logits
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # Qwen3 applies RMSNorm over H to q and k, before rope
    wide_qk_norm: bool = False  # OLMo 2: RMSNorm over the channels of all heads together
    pre_norm: bool = True  # norms before attention and before the feed-forward
    post_norm: bool = False  # norms after them; Gemma 3 has both, OLMo 2 only these
    gelu: bool = False  # gelu in place of silu
    embedding_multiplier: float = 1.0
    tie_word_embeddings: bool = False
    eos_ids: tuple[int, ...] = ()  # each of them ends a sequence
    # This file does not read the rest. around/folder reads these:
    dtype: torch.dtype | None = None  # of the stored weights; None: config.json does not say
    folds: dict[str, Any] = field(default_factory=dict)  # numbers that change weights
    quantization: dict[str, Any] = field(default_factory=dict)  # how weights are quantised
    # and experts.py these:
    num_experts: int = 1  # 1: a plain MLP
    num_experts_per_tok: int = 1
    moe_intermediate_size: int | None = None  # F of an expert; None: intermediate_size
    norm_topk_prob: bool = True  # whether the weights of a token's experts sum to 1

    @property
    def views(self) -> "list[View]":
        """How each layer's queries see keys."""
        windows = self.windows or (None,) * self.num_hidden_layers
        return [View(window, self.score_cap) for window in windows]


class Transformer(nn.Module):
    """A decoder-only language model. Its parameters have Llama's names without `model.`, except
    FusedLinears and the two *_output_norms."""

    inv_freq: Tensor  # (ropes, H/2), the speeds that rope_frequencies returns

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers: Any = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.ropes = config.ropes or (0,) * config.num_hidden_layers
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight
        # inv_freq is float32 on purpose: a product with bfloat16 would round the positions too, and
        # those past 256 would collide. `.to(dtype)` casts buffers, so load_model computes this one
        # again.
        self.register_buffer("inv_freq", rope_frequencies(config), persistent=False)

    @property
    def dtype(self) -> torch.dtype:
        """The activations' dtype; quantised weights have another."""
        return self.embed_tokens.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.embed_tokens.weight.device

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        caches: "list[LayerCache] | None" = None,
        select: Tensor | None = None,
        /,  # hooks see the arguments by their places
    ) -> Tensor:
        """Run the new tokens through every layer.

        Args:
            tokens: (B, T) int64 token ids.
            positions: (B, T) int64, each token's place in its sequence, from 0.
            caches: a LayerCache for each layer, planned for these tokens; None: no tokens came
                before.
            select: int64 indices of the tokens whose logits are wanted, counted row by row over the
                B * T tokens. A prompt needs only its last one, and V is large. None: all.

        Returns:
            Logits: (B, T, V), or (len(select), V).
        """
        if caches is None:
            masks = Masks(self.config, positions, positions, self.dtype)
            caches = [NoCache(masks, view) for view in self.config.views]
        x = self.embed(tokens)  # (B, T, D)
        rotations = self.rope(positions)
        for layer, rope, cache in zip(self.layers, self.ropes, caches, strict=True):
            x = layer(x, *rotations[rope], cache)
        if select is not None:
            x = x.flatten(0, 1)[select]  # (len(select), D)
        return softcap(self.lm_head(self.norm(x)), self.config.logits_cap)

    def embed(self, tokens: Tensor) -> Tensor:
        """Look up the tokens' vectors: (B, T) -> (B, T, D)."""
        x = self.embed_tokens(tokens)
        if self.config.embedding_multiplier != 1:
            # Rounded to the dtype first, as in training. Gemma's factor is the root of D: for
            # D = 640 it is 25.25 in bfloat16.
            x = x * torch.tensor(self.config.embedding_multiplier, dtype=x.dtype)
        return x

    def rope(self, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
        """For each rope, cosine and sine of each position's angles: (B, T) -> (B, 1, T, H/2)
        twice."""
        angles = [positions[:, None, :, None] * speeds for speeds in self.inv_freq]
        return [(angle.cos().to(self.dtype), angle.sin().to(self.dtype)) for angle in angles]


class Layer(nn.Module):
    """Attention, then the feed-forward. Each adds its output to x. A norm stands before each, after
    each, or both; see Config."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = MLP(config, config.intermediate_size)
        norm = partial(nn.RMSNorm, config.hidden_size, config.rms_norm_eps)
        before = norm if config.pre_norm else nn.Identity
        after = norm if config.post_norm else nn.Identity
        # Llama's names: post_attention_layernorm stands before the feed-forward.
        self.input_layernorm = before()
        self.post_attention_layernorm = before()
        self.attention_output_norm = after()
        self.mlp_output_norm = after()

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: "LayerCache") -> Tensor:
        y = self.self_attn(self.input_layernorm(x), cos, sin, cache)
        x = x + self.attention_output_norm(y)
        return x + self.mlp_output_norm(self.mlp(self.post_attention_layernorm(x)))


class FusedLinear(nn.Linear):
    """Several linears that read the same input, stacked into one, so that the weights are read in
    fewer and larger pieces.

    Most files store the parts one by one; around/folder gives them their names back.
    """

    def __init__(self, in_features: int, parts: dict[str, int], bias: bool) -> None:
        super().__init__(in_features, sum(parts.values()), bias)
        self.parts = parts  # the name in the checkpoint -> the number of output features


class Attention(nn.Module):
    """Grouped-query attention with rope."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        D = config.hidden_size
        H = config.head_dim
        N = config.num_attention_heads
        K = config.num_key_value_heads
        self.heads = (N, K, K)
        self.head_dim = H
        parts = {"q_proj": N * H, "k_proj": K * H, "v_proj": K * H}
        self.qkv_proj = FusedLinear(D, parts, config.qkv_bias)
        self.o_proj = nn.Linear(N * H, D, config.o_bias)
        norm: Any = nn.RMSNorm if config.qk_norm else nn.Identity  # which takes any arguments
        self.q_norm = norm(H, config.rms_norm_eps)
        self.k_norm = norm(H, config.rms_norm_eps)
        if config.wide_qk_norm:
            self.q_norm = WideNorm(N * H, config.rms_norm_eps)
            self.k_norm = WideNorm(K * H, config.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: "LayerCache") -> Tensor:
        qkv = self.qkv_proj(x).unflatten(2, (-1, self.head_dim))  # (B, T, N + 2K, H)
        q, k, v = qkv.transpose(1, 2).split(self.heads, dim=1)  # (B, N, T, H), (B, K, T, H) twice
        q = apply_rope(self.q_norm(q), cos, sin)
        k = apply_rope(self.k_norm(k), cos, sin)
        y = cache.attend(q, k, v)  # (B, N, T, H)
        return self.o_proj(y.transpose(1, 2).flatten(2))  # (B, T, D)


class WideNorm(nn.RMSNorm):
    """RMSNorm over the channels of all heads together: (B, heads, T, H) -> the same."""

    def forward(self, x: Tensor) -> Tensor:
        together = x.transpose(1, 2)  # (B, T, heads, H)
        return super().forward(together.flatten(2)).view_as(together).transpose(1, 2)


class LayerCache:
    """One layer of a cache, planned for one forward. Attention calls only its `attend`."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store the new keys and values, then let each query attend to the keys that it sees.

        Args:
            q: (B, N, T, H), the queries after rope.
            k: (B, K, T, H), the new keys after rope.
            v: (B, K, T, H), the new values.

        Returns:
            (B, N, T, H) attended values.
        """
        raise NotImplementedError


class MLP(nn.Module):
    """Gated feed-forward (Shazeer 2020, arXiv:2002.05202): down(silu(gate(x)) * up(x)), or gelu."""

    def __init__(self, config: Config, width: int) -> None:
        super().__init__()
        parts = {"gate_proj": width, "up_proj": width}
        self.gate_up_proj = FusedLinear(config.hidden_size, parts, config.mlp_bias)
        self.down_proj = nn.Linear(width, config.hidden_size, config.mlp_bias)
        self.activation = partial(F.gelu, approximate="tanh") if config.gelu else F.silu

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)  # (B, T, F) each
        return self.down_proj(self.activation(gate) * up)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate channel i together with channel i + H/2.

    This is the half-split layout of Hugging Face files. Llama's own release rotates channel 2i with
    2i + 1 (interleaved). Confusing the two gives text that is fluent for a few words and then falls
    apart.

    Args:
        x: (B, heads, T, H).
        cos, sin: (B, 1, T, H/2).

    Example: H = 4, a quarter turn on pair 0, none on pair 1: [1, 2, 3, 4] -> [-3, 2, 1, 4]
    """
    a, b = x.chunk(2, dim=-1)  # (B, heads, T, H/2) each
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def rope_frequencies(config: Config) -> Tensor:
    """Rotation speed of each pair of channels, in radians per position.

    Returns:
        (ropes, H/2) float32, on the CPU even while the model is built on the meta device.
    """
    if config.rope_speeds:
        return torch.tensor(config.rope_speeds, device="cpu")
    return plain_speeds(config.rope_theta, config.head_dim)[None]


def plain_speeds(theta: float, dim: int) -> Tensor:
    """The speeds of plain rope, in which pair i turns by theta ** (-2i / dim): (dim / 2,)."""
    exponents = torch.arange(0, dim, 2, dtype=torch.float32, device="cpu") / dim
    return theta**-exponents


class View(NamedTuple):
    """How the queries of one layer see keys. A cache hands it to Masks, and its kernel to
    attention()."""

    window: int | None = None  # tokens that a query sees; None: all of them
    cap: float | None = None  # scores stay between -cap and cap; see softcap()

    def first_seen(self, position: int) -> int:
        """The first position that a query at this position sees."""
        return max(0, position + 1 - self.window) if self.window else 0

    @property
    def kernel(self) -> Callable:
        """What computes attention."""
        return partial(products, cap=self.cap) if self.cap else F.scaled_dot_product_attention


def attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, kernel: Callable = F.scaled_dot_product_attention
) -> Tensor:
    """Masked softmax attention. Every cache calls it, plain or fast. To change or record the scores
    of all of them, compute the scores here in place of calling `kernel`.

    The N / K query heads that share a kv head become further queries of that head, so that each key
    is read once. SDPA's `enable_gqa` reads it N / K times, which is 2 to 3 times slower at T = 1 on
    a CPU.

    Args:
        q: (B, N, T, H).
        k, v: (B, K, S, H), where K divides N.
        mask: (B or 1, 1, N / K * T, S), which is added to the scores; see Masks and products().
        kernel: what computes it, such as a view's; around/fast has others.

    Returns:
        (B, N, T, H).
    """
    queries = q.unflatten(1, (k.shape[1], -1)).flatten(2, 3)  # (B, K, N / K * T, H)
    y = kernel(queries, k, v, mask)  # (B, K, N / K * T, H)
    return y.reshape(q.shape)  # not view: a GPU's kernels lay y out in an order of their own


def products(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, cap: float | None = None) -> Tensor:
    """Do what scaled_dot_product_attention does, by two products with a softmax between them, and
    cap the scores.

    The scores are rounded to the dtype before the softmax. In bfloat16 that costs nothing that
    shows: over 1,536 tokens of Shakespeare, SmolLM2-135M's KL divergence to float32 is 0.00096 with
    this, and 0.00097 with PyTorch's kernel.

    Args:
        q: (B, K, N / K * T, H).
        k, v: (B, K, S, H).
        mask: (..., N / K * T, S or fewer), added to the scores of the last keys; around/fast leaves
            out keys that all queries see. It comes after the cap: tanh(-inf) is -1, so what is
            hidden would be seen again.

    Returns:
        (B, K, N / K * T, H).
    """
    scores = softcap((q * q.shape[3] ** -0.5) @ k.mT, cap)  # (B, K, N / K * T, S)
    scores[..., -mask.shape[-1] :] += mask  # of all keys, but for some masks of around/fast
    return scores.softmax(-1) @ v


def softcap(x: Tensor, cap: float | None) -> Tensor:
    """Keep x between -cap and cap; small values hardly change. None: x itself."""
    return x if cap is None else cap * (x / cap).tanh()


class Masks(dict):
    """The masks of queries that attend together: view -> mask, made when a layer first asks for it.
    A query at position p sees the positions s <= p; under a window, only those with s > p - window.

    A mask is (B or 1, 1, N / K * T, S): 0 where a query sees a key, else -inf. Its third dimension
    holds the T queries of one query head, then those of the next head that shares its kv head.

    Example: k_pos = 0..4, window = 3: the query at position 4 has [-inf, -inf, 0, 0, 0].
    """

    def __init__(self, config: Config, q_pos: Tensor, k_pos: Tensor, dtype: torch.dtype) -> None:
        """
        Args:
            q_pos: (B or 1, T) int64, the queries' positions in their sequences.
            k_pos: (B or 1, S) int64, the keys' positions.
            dtype: the masks', which is that of the queries.
        """
        self.dtype = dtype
        group = config.num_attention_heads // config.num_key_value_heads
        self.q_pos = q_pos.repeat(1, group)[:, None, :, None]  # (B or 1, 1, N / K * T, 1)
        self.k_pos = k_pos[:, None, None, :]  # (B or 1, 1, 1, S)

    def __missing__(self, view: View) -> Tensor:
        is_seen = self.k_pos <= self.q_pos
        if view.window is not None:
            is_seen &= self.k_pos > self.q_pos - view.window
        mask = self[view] = torch.where(is_seen, 0.0, -torch.inf).to(self.dtype)
        return mask


@dataclass
class NoCache(LayerCache):
    """Keeps nothing. Attention runs over the tokens of one call: for training, for scoring a text,
    and as the tests' oracle."""

    masks: Masks
    view: View

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, self.masks[self.view], self.view.kernel)
