"""Exercise 26: a layer with a state in place of keys. See 26-gated-delta.md."""

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from common import close, logits_of, needs, tiny_model, write
from torch import Tensor
from torch.nn.functional import rms_norm, silu, softplus
from torch.utils.flop_counter import FlopCounterMode
from transformers import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

from around.settings import SamplingParams
from generate import generate
from kv_cache import StaticCache
from model import Config, NoCache, Transformer, View
from sampling import Sequence
from scheduler import Engine

TODO = "make the file in the root, with delta_model and DeltaCache"
D, K, N, HK, HV, W = 16, 2, 4, 6, 5, 4  # K key heads and N value heads, their widths, the kernel
C = 2 * K * HK + N * HV
SIZES = {"k_heads": K, "v_heads": N, "k_dim": HK, "v_dim": HV, "kernel": W}
CONFIG = Config(
    vocab_size=32, hidden_size=D, intermediate_size=16, num_hidden_layers=3,
    num_attention_heads=2, num_key_value_heads=1, head_dim=8, max_position_embeddings=2048,
    rms_norm_eps=1e-3, eos_ids=(0,),
)  # fmt: skip
SHAPES = {
    "in_proj_qkv.weight": (C, D), "in_proj_z.weight": (N * HV, D), "in_proj_a.weight": (N, D),
    "in_proj_b.weight": (N, D), "conv1d.weight": (C, 1, W), "A_log": (N,), "dt_bias": (N,),
    "norm.weight": (HV,), "out_proj.weight": (D, N * HV),
}  # fmt: skip
TEXT = random.Random(2).choices(range(1, 32), k=60)


def delta_model(dtype: torch.dtype = torch.float64, config: Config = CONFIG) -> Transformer:
    """A model whose every weight is drawn anew, and matters."""
    model = needs("delta", "delta_model", TODO)(config, **SIZES).double()
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.6, generator=generator)
        else:  # decays of 0.5 to 0.98, say, where a is 0
            low, high = {"A_log": (-1, 0), "dt_bias": (-3, 1)}.get(name.split(".")[-1], (0.5, 1.5))
            torch.nn.init.uniform_(parameter, low, high, generator=generator)
    return model.to(dtype)


def delta_cache(model: Transformer, batch_size: int = 1) -> Any:
    return needs("delta", "DeltaCache", TODO)(model, batch_size)


# --- The slow twin --------------------------------------------------------------------------------

MISTAKES = {
    "decay late": "S decays before what it has under the key is read: the decay stands before both "
    "S and S k k^T",
    "no delta": "what S already has under the key is not taken away: beta k k^T is missing",
    "read first": "a token reads S after it has written",
    "scale": "queries are divided by the root of their width, after they have got length 1",
    "length": "each query and each key has length 1",
    "conv": "what comes out of the convolution goes through silu",
    "taps": "the last weight of the convolution is the new token's",
    "heads": "N / K value heads in a row share a key head",
    "bias": "dt_bias is added to a before softplus",
    "gate": "the result is normalised first, and then multiplied by silu(z)",
    "one norm": "each value head is normalised by itself",
}


def written_out(x: Tensor, net: Any, eps: float, mistake: str) -> Tensor:
    """The layer over a whole text, x: (T, D), with a matrix I - beta k k^T for each token."""
    qkv_proj, z_proj, a_proj, b_proj, taps, A_log, dt_bias, norm, out_proj = (
        net.get_parameter(name) for name in SHAPES
    )
    T = len(x)
    if mistake == "taps":
        taps = taps.flip(2)
    inputs = torch.cat((x.new_zeros(W - 1, C), x @ qkv_proj.T))
    qkv = torch.stack([(inputs[t : t + W] * taps[:, 0].T).sum(0) for t in range(T)])
    q, k, v = (qkv if mistake == "conv" else silu(qkv)).split((K * HK, K * HK, N * HV), 1)
    q, k, v = q.view(T, K, HK), k.view(T, K, HK), v.view(T, N, HV)
    if mistake != "length":
        q, k = (each / (each.square().sum(2, keepdim=True) + 1e-6).sqrt() for each in (q, k))
    if mistake != "scale":
        q = q / HK**0.5
    order = torch.arange(N) % K if mistake == "heads" else torch.arange(N) // (N // K)
    q, k = q[:, order], k[:, order]  # (T, N, HK)
    rate = (
        softplus(x @ a_proj.T) + dt_bias if mistake == "bias" else softplus(x @ a_proj.T + dt_bias)
    )
    alpha = torch.exp(-A_log.exp() * rate)[..., None, None]  # (T, N, 1, 1)
    beta = torch.sigmoid(x @ b_proj.T)[..., None, None]
    S, read = x.new_zeros(N, HV, HK), []
    for t in range(T):
        key, value = k[t, :, None], v[t, :, :, None]  # (N, 1, HK), (N, HV, 1)
        forget = beta[t] * key.transpose(1, 2) * key  # (N, HK, HK)
        before = S
        if mistake == "decay late":
            S = alpha[t] * S - S @ forget
        elif mistake == "no delta":
            S = alpha[t] * S
        else:
            S = alpha[t] * (S - S @ forget)
        S = S + beta[t] * value * key
        read.append(((before if mistake == "read first" else S) @ q[t, :, :, None])[..., 0])
    y, z = torch.stack(read), silu(x @ z_proj.T).view(T, N, HV)
    if mistake == "gate":
        y = rms_norm(y * z, (HV,), norm, eps)
    elif mistake == "one norm":
        y = rms_norm(y, (N, HV), None, eps) * norm * z
    else:
        y = rms_norm(y, (HV,), norm, eps) * z
    return y.flatten(1) @ out_proj.T


@torch.no_grad()
def twin(model: Transformer, ids: list[int], mistake: str = "") -> Tensor:
    """The (T, V) logits of a text, with the recurrence written out."""
    eps = model.config.rms_norm_eps
    norm = lambda x, of: rms_norm(x, x.shape[-1:], of.weight, eps)  # noqa: E731
    x = model.embed_tokens.weight[ids]
    for block in model.layers:
        x = x + written_out(norm(x, block.input_layernorm), block.self_attn, eps, mistake)
        y = norm(x, block.post_attention_layernorm)
        gate, up = (y @ block.mlp.gate_up_proj.weight.T).chunk(2, -1)
        x = x + (silu(gate) * up) @ block.mlp.down_proj.weight.T
    return norm(x, model.norm) @ model.lm_head.weight.T


def same(got: Tensor, model: Transformer, ids: list[int], where: str) -> None:
    """Compare with the twin, and where they differ, find the mistake that would explain it."""
    want = twin(model, ids)
    if got.shape == want.shape and not torch.allclose(got, want, rtol=1e-5, atol=1e-6):
        for mistake, rule in MISTAKES.items():
            wrong = twin(model, ids, mistake)
            assert not torch.allclose(got, wrong, rtol=1e-5, atol=1e-6), f"{where}: {rule}"
    close(got, want, f"{where}: not the logits of the recurrence written out")


# --- The layer ------------------------------------------------------------------------------------


def test_the_parameters_are_those_of_the_page() -> None:
    model = delta_model()
    for block in model.layers:
        got = {name: (*each.shape,) for name, each in block.self_attn.named_parameters()}
        assert got == SHAPES, f"the parameters of a layer are {got}, not {SHAPES}"
    assert not any(each.requires_grad for each in model.parameters()), "no gradients: see build"


@pytest.mark.parametrize("length", [1, 2, 60])
def test_without_a_cache(length: int) -> None:
    model = delta_model()
    same(logits_of(model, TEXT[:length]), model, TEXT[:length], "without a cache")


@torch.no_grad()
def test_the_layer_of_transformers() -> None:
    """Theirs runs 64 tokens at once, in the chunkwise form, so 150 tokens are three chunks."""
    net = delta_model(torch.float32).layers[1].self_attn
    config = Qwen3_5TextConfig(
        hidden_size=D, num_hidden_layers=1, layer_types=["linear_attention"], rms_norm_eps=1e-3,
        linear_num_key_heads=K, linear_num_value_heads=N, linear_key_head_dim=HK,
        linear_value_head_dim=HV, linear_conv_kernel_dim=W,
    )  # fmt: skip
    theirs = Qwen3_5GatedDeltaNet(config, 0)
    theirs.load_state_dict(net.state_dict())
    x, nothing = torch.randn(2, 150, D), torch.empty(0)
    got, want = net(x, nothing, nothing, NoCache({View(): nothing}, View())), theirs(x)
    apart = (got - want).abs().max().item()
    assert apart < 1e-4, f"not what Qwen 3.5's layer in transformers computes ({apart:.2g} apart)"


# --- The cache ------------------------------------------------------------------------------------


@torch.no_grad()
def run(cache: Any, model: Transformer, sizes: list[int], *texts: list[int]) -> Tensor:
    """Run texts of one length together, in chunks of these sizes. Returns their logits."""
    logits, at = [], 0
    for size in sizes:
        tokens = torch.tensor([text[at : at + size] for text in texts])
        logits.append(model(tokens, *cache.plan(at, at + tokens.shape[1])))
        at += size
    assert at >= len(texts[0])
    return torch.cat(logits, 1)


ONE_BY_ONE = [1] * 60


@pytest.mark.parametrize(
    "sizes",
    [[60], ONE_BY_ONE, [7] * 9, [2] * 30, [2, 30, 1, 1, 1, 20, 5]],
    ids=["at once", "token by token", "in sevens", "in twos", "in any"],
)
def test_in_chunks(sizes: list[int]) -> None:
    """Bugs: a chunk begins with an empty state, or the convolution with zeros; or the cache keeps
    only the inputs of the last chunk, which may be shorter than the convolution."""
    model = delta_model()
    (got,) = run(delta_cache(model), model, sizes, TEXT)
    whole = logits_of(model, TEXT)
    first = sizes[0]
    close(got[:first], whole[:first], "already the first chunk has other logits")
    wrong = "a chunk must go on with S, and with the last inputs of the convolution"
    close(got, whole, wrong)
    same(got, model, TEXT, "in a DeltaCache")


def test_texts_of_a_batch_do_not_mix() -> None:
    model = delta_model()
    texts = [TEXT[:40], TEXT[20:], TEXT[39::-1]]
    together = run(delta_cache(model, 3), model, [9] * 5, *texts)
    for text, got in zip(texts, together):
        (alone,) = run(delta_cache(model), model, [9] * 5, text)
        close(got, alone, "a text has other logits beside others than alone")


def test_a_text_begins_with_an_empty_state() -> None:
    """Bug: as in a StaticCache, nothing is cleared. There, later texts overwrite earlier ones."""
    model = delta_model()
    cache = delta_cache(model)
    run(cache, model, [60], TEXT[::-1])
    (got,) = run(cache, model, [10, 50], TEXT)
    close(got, logits_of(model, TEXT), "plan(0, ...) begins a new text, and the last one shows")


@pytest.mark.parametrize("start", [4, 9, 11])
def test_it_goes_on_only_where_it_is(start: int) -> None:
    """Bug: a guess is refused, say, and the text goes on without it, but S has it."""
    model = delta_model()
    cache = delta_cache(model)
    run(cache, model, [10], TEXT[:10])
    with pytest.raises(ValueError, match=r"\d"):
        cache.plan(start, 20)
        pytest.fail(f"after 10 tokens, plan({start}, 20) must raise a ValueError", pytrace=False)


def test_other_caches_are_refused() -> None:
    """Bug: the layer finds no state, takes an empty one, and the text is wrong."""
    model = delta_model()
    errors = ValueError, TypeError, AttributeError
    with pytest.raises(errors):
        run(StaticCache(model, 1, 60), model, [60], TEXT)
        pytest.fail("a StaticCache has no states: refuse it", pytrace=False)
    engine = Engine(model, num_blocks=20, max_num_seqs=1)
    engine.add_request(TEXT, SamplingParams(max_tokens=2))
    with pytest.raises(errors):
        while engine.queue:
            engine.step()
        pytest.fail("a Runner has no states: refuse it", pytrace=False)


# --- Memory and time ------------------------------------------------------------------------------


def tensors(of: Any) -> Iterator[Tensor]:
    """Find all float tensors that a cache keeps, at any depth, but none of the model's."""
    if isinstance(of, Tensor):
        if of.is_floating_point():
            yield of
    elif not isinstance(of, torch.nn.Module):
        mine = type(of).__module__ in ("delta", "kv_cache")
        inside = vars(of).values() if mine else of.values() if isinstance(of, dict) else of
        for each in inside if mine or isinstance(of, dict | list | tuple) else ():
            yield from tensors(each)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", [[1] * 20, [300] * 4], ids=["token by token", "long chunks"])
def test_the_state_does_not_grow(dtype: torch.dtype, sizes: list[int]) -> None:
    """Bug: what is kept is a slice, and a slice keeps the whole tensor alive. In bfloat16, S is
    float32: it is a sum of all tokens, and small terms would be lost."""
    model = delta_model(dtype)
    cache = delta_cache(model, 2)
    text = (TEXT * 20)[: sum(sizes)]
    run(cache, model, sizes, text, text)
    kept = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors(cache)}
    assert kept, "the test finds no tensors in the attributes of the cache"
    S, inputs = 2 * N * HK * HV * max(dtype.itemsize, 4), 2 * C * (W - 1) * dtype.itemsize
    most, got = 3 * (S + inputs), sum(kept.values())
    wrong = f"after {sum(sizes)} tokens of two texts, the cache has {got} bytes"
    assert got == most, f"{wrong}, not {most}: for each layer S, and kernel - 1 inputs"


@torch.no_grad()
def test_a_token_costs_the_same_at_any_length() -> None:
    """Bug: the text is kept, and run again."""
    model, flops = delta_model(), []
    cache = delta_cache(model)
    at = 0
    for length in (5, 1000):
        model(torch.ones(1, length - at, dtype=torch.int64), *cache.plan(at, length))
        with FlopCounterMode(display=False) as counter:
            model(torch.tensor([[1]]), *cache.plan(length, length + 1))
        flops.append(counter.get_total_flops())
        at = length + 1
    assert flops[0] == flops[1], f"a token costs {flops[0]} operations at first, {flops[1]} later"


def test_in_bfloat16() -> None:
    """Against the same weights in float64, also after 600 tokens."""
    model, text = delta_model(torch.bfloat16), TEXT * 10
    (got,) = run(delta_cache(model), model, [64] * 10, text)
    want = logits_of(delta_model(torch.bfloat16).double(), text)
    errors = (got.double() - want).square().mean(1).sqrt() / want.square().mean(1).sqrt()
    early, late = errors[:60].median().item(), errors[-60:].median().item()
    assert max(early, late) < 0.08, f"errors of {early:.0%}, later {late:.0%}: update S in float32"


# --- Whole texts ----------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [3, 100])
def test_generate_takes_it(chunk: int) -> None:
    """Also beyond the model's trained context, as no position is stored anywhere."""
    model = delta_model(config=replace(CONFIG, max_position_embeddings=16))
    params = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)
    sequence = Sequence(TEXT[:9], params, model.config, max_seq_len=100)
    for _ in generate(model, sequence, delta_cache(model), chunk=chunk):
        pass
    best = twin(model, sequence.ids)[8:-1].argmax(-1).tolist()
    assert len(best) == 50 and sequence.ids[9:] == best, "not the text of the twin"


def test_other_models_are_as_before() -> None:
    needs("delta", "delta_model", TODO)
    model = tiny_model()
    ids = write(model, TEXT[:9], 20).ids
    assert logits_of(model, ids)[8:-1].argmax(-1).tolist() == ids[9:]
