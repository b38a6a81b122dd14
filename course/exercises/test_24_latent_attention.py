"""Exercise 24: multi-head latent attention. See 24-latent-attention.md."""

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from common import close, logits_of, needs, serve, tiny_model, write
from torch import Tensor
from torch.nn.functional import rms_norm, silu
from torch.utils.flop_counter import FlopCounterMode

from around.settings import SamplingParams
from generate import generate
from kv_cache import StaticCache
from model import Config, Transformer
from paged import Row, Runner
from sampling import Sequence
from scheduler import Engine

TODO = "make the file in the root, with latent_model, LatentCache and LatentRunner"
N, H, R, P = 4, 8, 12, 4  # heads, head dim, width of the latent, width of the rope key
CONFIG = Config(
    vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=3,
    num_attention_heads=N, num_key_value_heads=N, head_dim=H, max_position_embeddings=128,
    rms_norm_eps=1e-3, rope_theta=100.0, eos_ids=(0,),
)  # fmt: skip
SLIDING = replace(CONFIG, windows=(5, None, 20))
CONFIGS = pytest.mark.parametrize("config", [CONFIG, SLIDING], ids=["plain", "sliding"])
SHAPES = {
    "q_proj.weight": (N * (H + P), 16), "kv_a_proj_with_mqa.weight": (R + P, 16),
    "kv_a_layernorm.weight": (R,), "kv_b_proj.weight": (N * 2 * H, R), "o_proj.weight": (16, N * H),
}  # fmt: skip
TEXT = random.Random(2).choices(range(1, 32), k=60)


def latent_model(config: Config = CONFIG, rank: int = R, rope_dim: int = P) -> Transformer:
    """A model whose every weight is drawn anew, and matters."""
    model = needs("latent", "latent_model", TODO)(config, rank, rope_dim).double()
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.6, generator=generator)
        else:
            torch.nn.init.uniform_(parameter, 0.5, 1.5, generator=generator)
    return model


def latent_cache(model: Transformer, size: int, kv_dtype: str = "auto") -> Any:
    return needs("latent", "LatentCache", TODO)(model, 1, size, kv_dtype)


def latent_runner(model: Transformer, blocks: int, size: int, kv_dtype: str = "auto") -> Any:
    return needs("latent", "LatentRunner", TODO)(model, blocks, size, kv_dtype)


# --- The slow twin --------------------------------------------------------------------------------

MISTAKES = {
    "scale": "scores are divided by the root of H + P, of what the model's keys have, and not by "
    "that of R + P, of what is cached",
    "norm": "the latent goes through kv_a_layernorm before it is cached; the rope key does not",
    "normed rope": "kv_a_layernorm is of the latent alone: the rope key stands behind it",
    "key": "the rope key is rotated before it is cached",
    "query": "the last P channels of each query head are rotated",
    "order": "each query head has H channels that are not rotated, then P that are",
    "value": "in kv_b_proj each head has H rows for its keys, then H for its values",
    "heads": "kv_b_proj goes head by head: the keys' rows and the values' rows of one, then of the "
    "next",
}


def rotated(x: Tensor) -> Tensor:
    """Rope over all P channels of x, (T, heads, P), at the positions 0, 1, ..."""
    speed = CONFIG.rope_theta ** -(torch.arange(0, P, 2, dtype=torch.float32) / P)
    angles = torch.arange(len(x))[:, None, None] * speed.double()
    a, b = x.chunk(2, -1)
    return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1)


def uncompressed(x: Tensor, block: Any, eps: float, window: int | None, mistake: str) -> Tensor:
    """Attention over a whole text, x: (T, D), with keys and values for each head, written out."""
    T = len(x)
    q_proj, kv_a, norm, kv_b, o_proj = (block.self_attn.get_parameter(name) for name in SHAPES)
    q = (x @ q_proj.T).view(T, N, H + P)
    latent, rope_key = (x @ kv_a.T).split((R, P), -1)
    if mistake == "normed rope":
        both = torch.cat((norm, norm.new_ones(P)))
        latent, rope_key = rms_norm(x @ kv_a.T, (R + P,), both, eps).split((R, P), -1)
    elif mistake != "norm":
        latent = rms_norm(latent, (R,), norm, eps)
    heads = (latent @ kv_b.T).view(T, N, 2 * H)
    if mistake == "heads":
        heads = (latent @ kv_b.T).view(T, 2, N, H).transpose(1, 2).flatten(2)
    k, v = heads.split(H, -1)
    if mistake == "value":
        k, v = v, k
    q, q_rope = q.split((H, P), -1) if mistake != "order" else q.split((P, H), -1)[::-1]
    q_rope = q_rope if mistake == "query" else rotated(q_rope)
    k_rope = rope_key[:, None] if mistake == "key" else rotated(rope_key[:, None])
    q, k = torch.cat((q, q_rope), -1), torch.cat((k, k_rope.expand(T, N, P)), -1)
    scores = torch.einsum("tnh,snh->nts", q, k) / ((R if mistake == "scale" else H) + P) ** 0.5
    at = torch.arange(T)
    hidden = at > at[:, None]
    if window is not None:
        hidden |= at <= at[:, None] - window
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return torch.einsum("nts,snh->tnh", weights, v).flatten(1) @ o_proj.T


@torch.no_grad()
def twin(model: Transformer, ids: list[int], config: Config = CONFIG, mistake: str = "") -> Tensor:
    """The (T, V) logits of a text, with keys and values that are not compressed."""
    eps = config.rms_norm_eps
    norm = lambda x, of: rms_norm(x, x.shape[-1:], of.weight, eps)  # noqa: E731
    x = model.embed_tokens.weight[ids]
    for block, view in zip(model.layers, config.views):
        y = norm(x, block.input_layernorm)
        x = x + uncompressed(y, block, eps, view.window, mistake)
        y = norm(x, block.post_attention_layernorm)
        gate, up = (y @ block.mlp.gate_up_proj.weight.T).chunk(2, -1)
        x = x + (silu(gate) * up) @ block.mlp.down_proj.weight.T
    return norm(x, model.norm) @ model.lm_head.weight.T


def same(
    got: Tensor, model: Transformer, ids: list[int], where: str, config: Config = CONFIG
) -> None:
    """Compare with the twin, and where they differ, find the mistake that would explain it."""
    want = twin(model, ids, config)
    if got.shape == want.shape and not torch.allclose(got, want, rtol=1e-5, atol=1e-6):
        for mistake, rule in MISTAKES.items():
            wrong = twin(model, ids, config, mistake)
            assert not torch.allclose(got, wrong, rtol=1e-5, atol=1e-6), f"{where}: {rule}"
    close(got, want, f"{where}: not the logits of keys and values that are not compressed")


# --- The model ------------------------------------------------------------------------------------


def test_the_parameters_are_those_of_the_page() -> None:
    model = latent_model()
    for block in model.layers:
        got = {name: (*each.shape,) for name, each in block.self_attn.named_parameters()}
        assert got == SHAPES, f"the parameters of attention are {got}, not {SHAPES}"
    assert model.inv_freq.shape == (1, P // 2), "rope rotates the P channels of the rope key"
    assert not any(each.requires_grad for each in model.parameters()), "no gradients: see build"


@CONFIGS
@pytest.mark.parametrize("length", [1, 60])
def test_without_a_cache(config: Config, length: int) -> None:
    model = latent_model(config)
    same(logits_of(model, TEXT[:length]), model, TEXT[:length], "without a cache", config)


class Spy(Exception):
    """What attention hands to its layer of a cache."""


class SpyLayer:
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        raise Spy(q, k, v)


def test_one_key_for_all_heads() -> None:
    model = latent_model()
    with pytest.raises(Spy) as caught:
        model(torch.tensor([TEXT]), torch.arange(60)[None], [SpyLayer()] * 3)
    q, k, _ = caught.value.args
    assert q.shape[:3] == (1, N, 60), f"queries of shape {(*q.shape,)}: there are {N} heads"
    assert k.shape == (1, 1, 60, R + P), (
        f"keys of shape {(*k.shape,)}: one of R + P channels for all heads, (B, 1, T, R + P)"
    )


# --- The caches -----------------------------------------------------------------------------------


@CONFIGS
@pytest.mark.parametrize("kind", ["LatentCache", "StaticCache"])
@pytest.mark.parametrize(
    "sizes",
    [[60], [7] * 9, [1] * 60, [2, 30, 1, 1, 1, 20, 5]],
    ids=["at once", "in chunks", "token by token", "in any"],
)
@torch.no_grad()
def test_the_static_cache(config: Config, sizes: list[int], kind: str) -> None:
    """In a plain StaticCache it runs, too, which holds all of it twice."""
    model = latent_model(config)
    cache = latent_cache(model, 70) if kind == "LatentCache" else StaticCache(model, 1, 70)
    logits, at = [], 0
    for size in sizes:
        chunk = TEXT[at : at + size]
        logits.append(model(torch.tensor([chunk]), *cache.plan(at, at + len(chunk)))[0])
        at += size
    same(torch.cat(logits), model, TEXT, f"in a {kind}", config)


@torch.no_grad()
def test_a_batch_in_the_static_cache() -> None:
    model = latent_model()
    cache = needs("latent", "LatentCache", TODO)(model, 2, 70)
    texts = [TEXT[:40], TEXT[20:]]
    logits = []
    for at in range(0, 40, 10):
        tokens = torch.tensor([text[at : at + 10] for text in texts])
        logits.append(model(tokens, *cache.plan(at, at + 10)))
    for text, got in zip(texts, torch.cat(logits, 1)):
        same(got, model, text, "two texts in a LatentCache")


@CONFIGS
@pytest.mark.parametrize("kind", ["LatentRunner", "Runner"])
@torch.no_grad()
def test_the_paged_cache(kind: str, config: Config) -> None:
    """Two texts, in rows of equal and of different lengths. The blocks of one follow each other,
    those of the other do not."""
    model = latent_model(config)
    runner = (latent_runner if kind == "LatentRunner" else Runner)(model, 24, 8)
    tables = [[*range(3, 11)], [22, 1, 12, 0, 17, 23, 11, 2]]
    texts, parts, at = [TEXT, TEXT[::-1]], ([], []), [0, 0]
    for ends in [(20, 13), (21, 21), (40, 22), (41, 41), (42, 42), (60, 43), (60, 60)]:
        rows = [
            Row(tables[i], at[i], texts[i][at[i] : ends[i]], ends[i] - at[i])
            for i in (0, 1)
            if ends[i] > at[i]
        ]
        logits = runner.forward(rows).split([row.num_logits for row in rows])
        for row, part in zip(rows, logits):
            parts[tables.index(row.blocks)].append(part)
        at = ends
    for i in (0, 1):
        same(torch.cat(parts[i]), model, texts[i], f"text {i} in a {kind}", config)


def stored(cache: Any) -> int:
    """The bytes of all that a cache holds, but for small tables of integers."""
    seen: dict[int, int] = {}

    def look(at: Any) -> None:
        if isinstance(at, Tensor) and at.numel() > 1000:
            storage = at.untyped_storage()
            seen[storage.data_ptr()] = storage.nbytes()
        elif isinstance(at, list | tuple):
            for each in at:
                look(each)

    for each in vars(cache).values():
        look(each)
    return sum(seen.values())


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_bytes_of_a_token(kv_dtype: str) -> None:
    """The page's sum, where a float64 has 8 bytes, or an int8 one and a scale 4."""
    model = latent_model()
    want = 3 * (R + P) * 8 if kv_dtype == "auto" else 3 * (R + P + 4)
    rule = f"a token takes layers * (R + P) * itemsize bytes, {want} here"
    cache = latent_cache(model, 200, kv_dtype)
    got = stored(cache) / cache.slabs[0].shape[2]
    assert got == want, f"{rule}, and not {got:.0f} as in this LatentCache"
    runner = latent_runner(model, 30, 8, kv_dtype)
    got = stored(runner) / (30 * 8)
    assert got == want, f"{rule}, and not {got:.0f} as in this LatentRunner"


def test_bytes_of_deepseek_v2() -> None:
    """The page's figure, of one layer. The number of heads does not matter."""
    sizes = {"num_hidden_layers": 1, "head_dim": 128, "num_attention_heads": 2}
    model = needs("latent", "latent_model", TODO)(replace(CONFIG, windows=(), **sizes), 512, 64)
    cache = latent_cache(model.bfloat16(), 128)
    got = stored(cache) / cache.slabs[0].shape[2]
    assert got == 1152, f"a token of DeepSeek-V2 takes 1,152 bytes in each layer, not {got:.0f}"


@pytest.mark.parametrize("kind", ["LatentCache", "LatentRunner"])
@torch.no_grad()
def test_attention_reads_the_latent_itself(kind: str) -> None:
    """Bug: keys and values of all heads are made again, of all that is cached, at each token."""
    model, flops = latent_model(), []
    cache, runner = latent_cache(model, 600), latent_runner(model, 80, 8)
    for end in (64, 512):
        with FlopCounterMode(display=False) as counter:
            if kind == "LatentCache":
                model(torch.tensor([[1]]), *cache.plan(end - 1, end))
            else:
                runner.forward([Row([*range(end // 8)], end - 1, [1])])
        flops.append(counter.get_total_flops())
    a_key = (flops[1] - flops[0]) / (512 - 64) / 3
    most = 2 * 2 * N * (R + P)
    assert a_key <= most, (
        f"each cached token costs {a_key:.0f} operations in a layer, and its attention only "
        f"{most}: multiply the queries and the result by kv_b_proj, and not what is cached"
    )


# --- Whole texts ----------------------------------------------------------------------------------


def plainly(model: Transformer, ids: list[int], count: int) -> list[int]:
    """The greedy text of the twin."""
    ids = [*ids]
    for _ in range(count):
        ids.append(twin(model, ids)[-1].argmax().item())
    return ids


def test_generate_takes_it() -> None:
    model = latent_model()
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    sequence = Sequence(TEXT[:9], params, model.config)
    for _ in generate(model, sequence, latent_cache(model, sequence.max_len), chunk=4):
        pass
    assert sequence.ids == plainly(model, TEXT[:9], 40), "not the text of the twin"


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_the_engine_takes_it(kv_dtype: str) -> None:
    """With forks, preemption and shared prefixes, each gets what it gets alone."""
    model = latent_model()
    runner = needs("latent", "LatentRunner", TODO)
    limits = {"num_blocks": 12, "block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 24}
    engine = Engine(model, runner=runner, kv_dtype=kv_dtype, **limits)
    params = SamplingParams(max_tokens=14, seed=5, n=2, ignore_eos=True)
    texts = [TEXT[:14], TEXT[:3], TEXT[:11] + TEXT[20:24]]
    requests = serve(engine, *((ids, params) for ids in texts))
    assert engine.stats["num_preemptions"]
    assert engine.stats["prefix_cache_hits"]
    for ids, request in zip(texts, requests):
        for i, got in enumerate(request.outputs):
            asked = replace(params, n=1, seed=params.seed + i)
            alone = Sequence(ids, asked, model.config)
            for _ in generate(model, alone, latent_cache(model, alone.max_len, kv_dtype)):
                pass
            assert got.token_ids == alone.token_ids, "not what it gets alone, in a LatentCache"


def test_other_models_are_as_before() -> None:
    needs("latent", "latent_model", TODO)
    model = tiny_model(num_attention_heads=4, num_key_value_heads=2)
    ids = write(model, TEXT[:9], 20).ids
    (request,) = serve(
        Engine(model, num_blocks=8, max_num_seqs=1),
        (TEXT[:9], SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)),
    )
    assert request.outputs[0].ids == ids
    assert logits_of(model, ids)[8:-1].argmax(-1).tolist() == ids[9:]
