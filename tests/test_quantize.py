"""Fewer bits, and packed weights: what is stored, what is computed from it, and what is refused.

The oracle of every packed form is the plain product in float64 with QuantLinear's own weight.
"""

import json
import math
import shutil
import subprocess
import sys
import weakref

import pytest
import torch
from conftest import ROOT, SHAKESPEARE
from safetensors.torch import load_file, save_file
from torch import nn

import generate
import quantize
from model import CheckpointError, FusedLinear, Transformer, load_config, load_model, named_tensors
from quantize import (
    BlockedLinear,
    Int8Linear,
    PackedLinear,
    QuantLinear,
    linears,
    pack_bits,
    pack_linears,
    quantize_model,
    round_to_nearest,
    unpack_bits,
)  # fmt: skip

TINY = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 40, "hidden_size": 64,
    "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "tie_word_embeddings": False,
}  # fmt: skip
QWEN2 = {"architectures": ["Qwen2ForCausalLM"]}
TIED = {"tie_word_embeddings": True}
BF16 = {"torch_dtype": "bfloat16"}

needs_vnni = pytest.mark.skipif(
    not (torch.backends.mkldnn.is_available() and torch.cpu._is_vnni_supported()),
    reason="this processor does not multiply bytes",
)


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    """A second thread only slows tensors this small down, by far on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def tiny_folder(folder, **changes):
    """A checkpoint of random weights, norms and biases included."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(TINY | changes))
    config = load_config(folder)
    model = Transformer(config).requires_grad_(False)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.uniform_(0.5, 1.5)
        else:
            parameter.normal_(0, 1.5 * parameter.shape[1] ** -0.5)
    tensors = {
        ("" if name.startswith("lm_head") else "model.") + name: tensor.to(config.dtype).clone()
        for name, tensor in named_tensors(model)
    }
    save_file(tensors, folder / "model.safetensors")
    return folder


@torch.no_grad()
def logits_of(model, length=20):
    tokens = torch.randint(
        40, (2, length), generator=torch.Generator().manual_seed(length), dtype=torch.int64
    )
    return model(tokens, torch.arange(length).expand_as(tokens))


def quant_linear(bits, group_size, K=128, N=70, bias=False, order=False, dtype=torch.float32):
    weight = torch.randn(N, K) * torch.rand(N, 1)  # each output with a scale of its own
    linear = QuantLinear(K, N, bits, group_size, torch.randn(N).to(dtype) if bias else None)
    linear.store(*round_to_nearest(weight, bits, group_size))
    linear.order = torch.randperm(K) if order else None
    return linear


def exact(linear, x):
    """What a Linear means, in float64, and for each output what rounding errors are measured by:
    the sum of |x| |w|."""
    w, order = linear.dequantize().double(), linear.order
    x = (x if order is None else x[..., order]).double()
    bias = 0 if linear.bias is None else linear.bias.double()
    return x @ w.t() + bias, x.abs() @ w.abs().t() + abs(bias)


# --- The stored form ------------------------------------------------------------------------------


def test_docstring_example_of_quant_linear():
    """The halves of a byte swapped, or the zero point added."""
    linear = QuantLinear(2, 1, 4, 2, None)
    linear.qweight[:], linear.scales[:], linear.zeros[:] = 0xA7, 0.5, 8
    assert linear.dequantize().tolist() == [[-0.5, 1.0]]
    assert linear(torch.tensor([[10.0, 1.0]])).tolist() == [[-4.0]]


def test_pack_bits():
    """The first of two values in the high half; a byte read back as a signed number."""
    assert pack_bits(torch.tensor([[7, 10, 15, 0]]), 4).tolist() == [[0xA7, 0x0F]]
    assert pack_bits(torch.tensor([[7, 255]]), 8).tolist() == [[7, 255]]
    for bits in (4, 8):
        q = torch.arange(2**bits).flip(0).repeat(3, 1)
        packed = pack_bits(q, bits)
        assert packed.dtype == torch.uint8 and packed.shape == (3, 2**bits * bits // 8)
        assert torch.equal(unpack_bits(packed, bits), q)


def test_docstring_example_of_round_to_nearest():
    """A zero point that is not an integer, or a scale of 16 steps in place of 15."""
    q, scales, zeros = round_to_nearest(torch.tensor([[-1.0, 0.0, 2.0]]), 4, 3)
    torch.testing.assert_close(scales, torch.tensor([[0.2]]))
    assert zeros.tolist() == [[5]] and q.tolist() == [[0, 5, 15]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("bits", "group_size"), [(8, 96), (8, 32), (4, 96), (4, 32), (4, 2)])
@pytest.mark.parametrize("shift", [-3.0, -1.0, 0.0, 3.0])  # at 3 a group has one sign only
def test_round_to_nearest_errs_by_half_a_step(bits, group_size, shift, dtype):
    """A value that is cut off at the end of its range, a group that takes the scale of another, and
    zeros that come back as something else."""
    weight = (torch.randn(50, 96) + shift).to(dtype)
    weight[:, ::7] = 0
    weight[3, 5] = 40  # an outlier is the end of its group's range
    linear = QuantLinear(96, 50, bits, group_size, None)
    q, scales, zeros = round_to_nearest(weight, bits, group_size)
    assert scales.shape == zeros.shape == (50, 96 // group_size)
    for values in (q, zeros):
        assert torch.equal(values, values.round())
        assert values.min() >= 0 and values.max() < 2**bits
    linear.store(q, scales, zeros)
    error = (linear.dequantize() - weight.float()).abs()
    assert (error <= scales.repeat_interleave(group_size, 1) * 0.50001).all()
    assert (linear.dequantize()[weight == 0] == 0).all()
    # and no scale is wider than it needs to be
    groups = weight.float().unflatten(1, (-1, group_size))
    span = groups.amax(2).clamp(min=0) - groups.amin(2).clamp(max=0)
    torch.testing.assert_close(scales, span / 15 if bits == 4 else groups.abs().amax(2) / 127)


@pytest.mark.parametrize("bits", [4, 8])
def test_groups_of_zeros(bits):
    """0 / 0: a pruned channel turned the whole output into NaN."""
    weight = torch.randn(4, 64)
    weight[1], weight[2, :32] = 0, 0
    linear = QuantLinear(64, 4, bits, 32, None)
    quantised = round_to_nearest(weight, bits, 32)
    assert all(values.isfinite().all() for values in quantised)
    linear.store(*quantised)
    assert linear.dequantize().isfinite().all()
    assert (linear.dequantize()[weight == 0] == 0).all()


def test_nbytes_is_what_is_stored():
    """Speed is reported in bytes read: int4 with groups of 32 takes 0.5 + 5 / 32 bytes a weight."""
    assert quant_linear(4, 32, K=64, N=10).nbytes == 10 * (32 + 2 * 4 + 2)
    assert quant_linear(8, 64, K=64, N=10, bias=True).nbytes == 10 * (64 + 4 + 1 + 4)


# --- quantize_model -------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["int8", "int4"])
@pytest.mark.parametrize("changes", [{}, TIED, QWEN2])
def test_quantize_model_replaces_every_linear(tmp_path, changes, mode):
    """lm_head left in full precision; a bias lost; a tied embedding quantised along with it."""
    model = load_model(tiny_folder(tmp_path, **changes))
    before, plain = model.embed_tokens.weight.clone(), logits_of(model)
    paths = [path for *_, path in linears(model)]
    assert len(paths) == 4 * 2 + 1
    assert quantize_model(model, mode, 32) is model
    assert [*linears(model)] == []
    for path in paths:
        linear = model.get_submodule(path)
        assert type(linear) is QuantLinear and linear.bits == {"int8": 8, "int4": 4}[mode]
        groups = 1 if mode == "int8" else linear.in_features // 32
        assert linear.scales.shape == (linear.out_features, groups)
    assert (model.layers[0].self_attn.qkv_proj.bias is not None) == (changes is QWEN2)
    assert torch.equal(model.embed_tokens.weight, before)
    assert type(model.embed_tokens) is nn.Embedding
    error = (logits_of(model) - plain).std() / plain.std()
    assert 0 < error < {"int8": 0.06, "int4": 0.6}[mode]  # 1.4 where nothing is left


@pytest.mark.parametrize("changes", [{}, TIED])
def test_quantize_model_skips(tmp_path, changes):
    """A name in `skip` that is quantised all the same, or that stops those after it."""
    model = load_model(tiny_folder(tmp_path, **changes))
    quantize_model(model, "int4", 32, ("lm_head", "layers.1.mlp.down_proj"))
    assert {path for *_, path in linears(model)} == {"lm_head", "layers.1.mlp.down_proj"}
    assert (model.lm_head.weight is model.embed_tokens.weight) == (changes is TIED)


@pytest.mark.parametrize(
    ("group_size", "channels"), [(64, 96), (128, 64), (7, 64), (0, 64), (-1, 64), (1, 64)]
)
def test_quantize_model_refuses_a_group_size(tmp_path, group_size, channels):
    """Half a model quantised before the Linear that does not fit; a message without the numbers."""
    model = load_model(tiny_folder(tmp_path))
    plain = logits_of(model)
    message = rf"group size {group_size} does not divide {channels} input channels"
    with pytest.raises(ValueError, match=message):
        quantize_model(model, "int4", group_size)
    assert len([*linears(model)]) == 9
    assert torch.equal(logits_of(model), plain)
    quantize_model(model, "int8", group_size)  # has no groups


def test_quantize_model_refuses_an_odd_group_size(tmp_path):
    """Two channels share a byte: the packed forms cannot cut a group in halves."""
    model = load_model(tiny_folder(tmp_path, hidden_size=96))
    with pytest.raises(ValueError, match="group size 3 does not divide 96 input channels"):
        quantize_model(model, "int4", 3)


def test_quantize_model_frees_the_plain_weights_one_by_one(tmp_path, monkeypatch):
    """A list of the Linears kept every plain weight until the last was quantised."""
    model, alive = load_model(tiny_folder(tmp_path)), []

    def counting(*args):
        alive.append(sum(ref() is not None for ref in plain))
        return round_to_nearest(*args)

    monkeypatch.setattr(quantize, "round_to_nearest", counting)
    plain = [weakref.ref(getattr(parent, name).weight) for parent, name, _ in linears(model)]
    quantize_model(model, "int4", 32)
    assert alive == [9, 8, 7, 6, 5, 4, 3, 2, 1]
    assert not any(ref() for ref in plain)


# --- Packed forms ---------------------------------------------------------------------------------

SHAPES = [(1,), (2,), (5,), (1, 1), (1, 3), (2, 1), (2, 3)]


@pytest.mark.parametrize("rows", [1, 2, 33])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_packed_equals_plain(dtype, bias, rows):
    """A weight packed for one number of rows and read wrongly at another."""
    linear = nn.Linear(70, 90, bias).to(dtype).requires_grad_(False)
    x = torch.randn(2, rows, 70, dtype=dtype)
    plain = linear(x)
    (packed,) = pack_linears(nn.Sequential(linear))  # stays plain where there is no kernel for it
    assert isinstance(packed, PackedLinear) or dtype != torch.float32
    torch.testing.assert_close(packed(x), plain)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_linear_takes_any_shape(dtype, bias):
    """One row in two or three dimensions that comes back as one, or with the rows of padding."""
    linear = nn.Linear(64, 70, bias).to(dtype).requires_grad_(False)
    packed = PackedLinear(linear)
    for shape in SHAPES:
        x = torch.randn(*shape, 64).to(dtype)
        y = packed(x)
        assert y.dtype == dtype and y.shape == (*shape, 70)
        torch.testing.assert_close(y, linear(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("N", "bias", "order"), [(64, False, False), (70, True, False), (33, False, True), (5, 1, 1)]
)
@pytest.mark.parametrize("group_size", [128, 32, 64, 2])
def test_blocked_linear(group_size, N, bias, order, dtype):
    """The order of channels within a group, of outputs within a block, the padding of the last
    block, or the zero points: each wrong for one row or for many only."""
    linear = quant_linear(4, group_size, N=N, bias=bias, order=order, dtype=dtype)
    linear.zeros.random_(0, 16)  # other tools' are anywhere
    packed = BlockedLinear(linear)
    for shape in SHAPES:
        x = torch.randn(*shape, 128).to(dtype)
        with torch.compiler.set_stance("force_eager"):
            y = packed(x)
        assert y.dtype == dtype and y.shape == (*shape, N)
        right, size = exact(linear, x)
        assert ((y - right).abs() <= size * (1e-5 if dtype == torch.float32 else 2**-7)).all()


@needs_vnni
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("N", "bias", "order"), [(64, False, False), (70, True, True)])
@pytest.mark.parametrize("size", [1.0, 1e-6, 1e8])
def test_int8_linear_keeps_15_bits_of_the_activations(size, N, bias, order, dtype):
    """The second digit lost, its sign or its weight: then x has 8 bits, and the error is 100 times
    this bound, which is half a digit for each channel."""
    linear = quant_linear(8, 128, N=N, bias=bias, order=order, dtype=dtype)
    packed = Int8Linear(linear)
    for shape in SHAPES:
        x = (size * torch.randn(*shape, 128)).to(dtype)
        y = packed(x)
        assert y.dtype == dtype and y.shape == (*shape, N)
        right, _ = exact(linear, x)
        width = linear.dequantize().abs().sum(1).double()
        bound = x.double().abs().amax(-1, keepdim=True) * width * (2**-15 * 1.02)
        # y is rounded before and after the bias is added
        rounded = right.abs() + (linear.bias.double().abs() if bias else 0)
        bound += rounded * (1e-6 if dtype == torch.float32 else 2**-7)
        assert ((y - right).abs() <= bound).all()


@needs_vnni
def test_int8_linear_docstring_example():
    """The digits of -0.3 are -38 and -13; rounding x to one digit would give -38 / 127."""
    linear = QuantLinear(2, 1, 8, 2, None)
    linear.store(torch.tensor([[128, 129]]), torch.ones(1, 1), torch.full((1, 1), 128))
    y = Int8Linear(linear)(torch.tensor([[1.0, -0.3]]))
    torch.testing.assert_close(y, torch.tensor([[-4877 / 16256]]))


@needs_vnni
def test_int8_linear_at_the_ends_of_its_range():
    """All digits and weights at their largest, where a sum of products of bytes saturates on
    processors that add them up in 16 bits; and weights of -128, which other tools store."""
    linear = QuantLinear(256, 3, 8, 256, None)
    q = torch.tensor([255, 1, 0])[:, None].expand(3, 256)
    linear.store(q, torch.ones(3, 1), torch.full((3, 1), 128))
    y = Int8Linear(linear)(torch.ones(2, 256))
    torch.testing.assert_close(y, torch.tensor([[127.0, -127.0, -128.0]]).expand(2, 3) * 256)


@needs_vnni
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int8_linear_rows_do_not_see_each_other(dtype):
    """One scale for the whole batch: a loud neighbour would coarsen, or zero, a quiet row."""
    packed = Int8Linear(quant_linear(8, 128, bias=True, dtype=dtype))
    x = (torch.randn(7, 128) * torch.tensor([1, 1e-4, 1e4, 0, 1e9, 3, 1e-9])[:, None]).to(dtype)
    together = packed(x)
    for row in range(7):
        assert torch.equal(packed(x[row : row + 1])[0], together[row])
    assert torch.equal(packed(x.flip(0)), together.flip(0))


@pytest.mark.parametrize("form", [Int8Linear, BlockedLinear])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_zero_huge_and_tiny_rows(dtype, rows, form):
    """0 / 0 in a row of zeros, overflow of a row's scale near the largest float, underflow near the
    least: the rest of the batch must not notice either."""
    if form is Int8Linear and not torch.cpu._is_vnni_supported():
        pytest.skip("this processor does not multiply bytes")
    linear = quant_linear(8 if form is Int8Linear else 4, 128, bias=True, dtype=dtype)
    packed = form(linear)
    with torch.compiler.set_stance("force_eager"):
        y = packed(torch.zeros(rows, 128, dtype=dtype))
        assert torch.equal(y, linear.bias.expand(rows, -1))
        for size in (1e34, 1e-25, 1e-37):
            x = (torch.randn(rows, 128) * size).to(dtype)
            right, scale = exact(linear, x)
            error = (packed(x) - right).abs()
            width = linear.dequantize().abs().sum() * x.abs().max()
            assert (error <= width * 2**-14 + scale * 2**-7 + 1e-30).all()


def test_zero_points_of_8_bits_are_kept():
    """A whole channel with one scale and zero point other than 128, as GPTQ without `sym` stores
    it: q - zero needs nine bits, and wrapped around in a signed byte."""
    linear = quant_linear(8, 128)
    linear.zeros.fill_(10)
    x = torch.randn(2, 128)
    right, size = exact(linear, x)
    with torch.compiler.set_stance("force_eager"):
        (packed,) = pack_linears(nn.Sequential(linear))
        assert ((packed(x) - right).abs() <= size * 1e-4).all()


@pytest.mark.parametrize("form", [PackedLinear, BlockedLinear])
def test_one_row_that_is_not_contiguous(form):
    """A view with steps between its values was read as if it had none: neighbours' values."""
    x = torch.randn(1, 256)[:, ::2]
    plain = nn.Linear(128, 70).requires_grad_(False)
    twin = plain if form is PackedLinear else quant_linear(4, 32)
    torch.testing.assert_close(form(twin)(x), twin(x.contiguous()), atol=1e-4, rtol=1e-4)


def test_packed_forms_compile():
    """A packed tensor, a key or a number of rows baked into the graph; an operator without a shape
    for the compiler. One graph for all forms, since a graph costs seconds."""
    plain = nn.Linear(128, 70).requires_grad_(False)
    twins = [plain, quant_linear(4, 32, order=True)]
    forms = [PackedLinear(plain), BlockedLinear(twins[1])]
    if torch.cpu._is_vnni_supported():
        twins.append(quant_linear(8, 128, bias=True))
        forms.append(Int8Linear(twins[2]))
    run = torch.compile(lambda x: [form(x) for form in forms], fullgraph=True)
    for rows in (1, 3):
        x = torch.randn(1, rows, 128)
        for y, twin in zip(run(x), twins, strict=True):
            torch.testing.assert_close(y, twin(x), atol=3e-3, rtol=1e-3)


def test_tinygemm_stands_for_the_same_weight(monkeypatch):
    """CUDA's int4 operator has other nibbles, and a zero point of another meaning. It exists on
    GPUs only, so it is played here by what its documentation says that it computes."""

    def pack(q, tiles):  # two values in a byte, the first in the high half
        return torch.stack((q >> 4, q & 15), -1).flatten(1)

    def multiply(x, q, group_size, scales):
        scale, zero = scales.transpose(0, 1).repeat_interleave(group_size, 1).unbind(-1)
        return x @ ((q.to(x.dtype) - 8) * scale + zero).T

    class Aten:
        _convert_weight_to_int4pack, _weight_int4pack_mm = (
            staticmethod(pack),
            staticmethod(multiply),
        )

    linear = quant_linear(4, 64, N=72, bias=True, order=True, dtype=torch.bfloat16)
    linear.zeros.random_(0, 16)
    x = torch.randn(2, 3, 128, dtype=torch.bfloat16)
    right, size = exact(linear, x)
    with monkeypatch.context() as patch:
        patch.setattr(torch.ops, "aten", Aten)
        y = quantize.TinyGemmLinear(linear)(x)
    assert ((y - right).abs() <= size * 2**-6).all()
    assert not quantize.TinyGemmLinear.can_pack(linear)  # it is on the CPU


def test_pack_linears_picks_the_form():
    """A form that does not fit its bits or groups; one that could be packed and is left slow."""
    bytes_form = Int8Linear if torch.cpu._is_vnni_supported() else QuantLinear
    model = nn.Sequential(
        nn.Linear(64, 64).requires_grad_(False),
        quant_linear(8, 128),
        quant_linear(8, 64),
        nn.Sequential(quant_linear(4, 128), quant_linear(4, 32)),
    )
    assert pack_linears(model) is model
    kinds = [type(module) for module in model.modules() if not [*module.children()]]
    assert kinds == [PackedLinear, bytes_form, QuantLinear, BlockedLinear, BlockedLinear]


def test_pack_linears_frees_the_plain_weights_one_by_one(monkeypatch):
    """A list of all modules kept every plain weight until the last was packed: twice the memory."""
    alive = []

    def counting(linear):
        alive.append(sum(ref() is not None for ref in plain))
        return PackedLinear(linear)

    monkeypatch.setattr(quantize, "PackedLinear", counting)
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(FusedLinear(8, {"a": 8, "b": 8}, False)))
    model.requires_grad_(False)
    plain = [weakref.ref(parameter) for parameter in model.parameters() if parameter.dim() == 2]
    pack_linears(model)
    assert [type(m) for m in model.modules() if not list(m.children())] == [PackedLinear] * 2
    assert all(ref() is None for ref in plain)
    assert alive == [2, 1]


@pytest.mark.parametrize("bits", [4, 8])
def test_pack_linears_frees_the_quantised_weights(bits):
    """A packed form that kept its QuantLinear would take twice the memory."""
    if bits == 8 and not torch.cpu._is_vnni_supported():
        pytest.skip("this processor does not multiply bytes")
    model = nn.Sequential(quant_linear(bits, 128))
    stored = weakref.ref(model[0].qweight)
    pack_linears(model)
    assert stored() is None


@pytest.mark.parametrize("form", [PackedLinear, Int8Linear])
def test_packed_weights_can_be_freed(form):
    """The operator's table must not keep a model alive."""
    if form is Int8Linear and not torch.cpu._is_vnni_supported():
        pytest.skip("this processor does not multiply bytes")
    plain = nn.Linear(8, 8).requires_grad_(False)
    packed = form(plain if form is PackedLinear else quant_linear(8, 8, K=8))
    weak = weakref.ref(packed)
    del packed
    assert weak() is None


# --- Folders --------------------------------------------------------------------------------------


def quantised_folder(folder, mode="int4", group_size=32, skip=(), **changes):
    """A folder of ours, and the model in memory that it was saved from."""
    source = tiny_folder(folder / "plain", **changes)
    model = quantize_model(load_model(source), mode, group_size, skip)
    size = group_size if mode == "int4" else -1
    config = {"quant_method": "kilolm", "bits": quantize.MODES[mode], "group_size": size}
    quantize.save(model, source, folder / "quantised", config)
    return folder / "quantised", model


@pytest.mark.parametrize("changes", [{}, TIED, QWEN2, BF16, TIED | QWEN2 | BF16])
@pytest.mark.parametrize("skip", [(), ("lm_head",)])
@pytest.mark.parametrize("mode", ["int8", "int4"])
def test_saved_and_loaded_again(tmp_path, mode, skip, changes):
    """Parts of a fused Linear mixed up, a bias, a tied or a kept lm_head lost, scales rounded to
    bfloat16: bit-equal logits leave no room for any of them."""
    folder, model = quantised_folder(tmp_path, mode, 32, skip, **changes)
    loaded = quantize.load(folder)
    assert torch.equal(logits_of(loaded), logits_of(model))
    assert isinstance(loaded.lm_head, nn.Linear) == bool(skip)
    tied = getattr(loaded.lm_head, "weight", None) is loaded.embed_tokens.weight
    assert tied == (bool(skip) and "tie_word_embeddings" in changes)
    assert not loaded.training and not any(p.requires_grad for p in loaded.parameters())
    names = load_file(folder / "model.safetensors")
    assert "model.layers.1.self_attn.k_proj.qweight" in names
    assert not [name for name in names if "qkv" in name or "gate_up" in name]
    assert ("lm_head.weight" in names) == (bool(skip) and not tied)


def test_load_casts_everything_but_the_scales(tmp_path):
    """`dtype` applied to the scales too, which then have 8 bits."""
    folder, model = quantised_folder(tmp_path, **QWEN2)
    loaded = quantize.load(folder, dtype=torch.bfloat16)
    ours, theirs = model.layers[1].self_attn.qkv_proj, loaded.layers[1].self_attn.qkv_proj
    assert theirs.scales.dtype == torch.float32 and torch.equal(ours.scales, theirs.scales)
    assert theirs.bias.dtype == loaded.norm.weight.dtype == torch.bfloat16
    assert theirs.qweight.dtype == theirs.zeros.dtype == torch.uint8
    assert logits_of(loaded).dtype == torch.bfloat16


def test_load_takes_plain_folders(tmp_path):
    """generate.py loads everything through it."""
    folder = tiny_folder(tmp_path)
    assert torch.equal(logits_of(quantize.load(folder)), logits_of(load_model(folder)))


def test_load_model_says_what_to_call(tmp_path):
    """Thirty missing and unexpected names, when the folder is fine and the function is not."""
    folder, _ = quantised_folder(tmp_path)
    with pytest.raises(CheckpointError, match=r"load it with quantize\.load"):
        load_model(folder)


GOOD = {"quant_method": "kilolm", "bits": 4, "group_size": 32}
BAD = {
    "no method": {"quant_method": None},
    "unknown method": {"quant_method": "bitsandbytes"},
    "a list": {"quant_method": ["gptq"]},
    "3 bits": {"bits": 3},
    "no bits": {"bits": None},
    "bits as text": {"bits": "4"},
    "bits as a float": {"bits": 4.0},
    "no group_size": {"group_size": None},
    "true": {"group_size": True},
    "a float": {"group_size": 32.0},
    "0": {"group_size": 0},
    "negative": {"group_size": -2},
    "not dividing": {"group_size": 64},
    "other than stored": {"group_size": 16},
    "other bits than stored": {"bits": 8},
    "awq 8 bits": {"quant_method": "awq", "bits": 8},
    "awq gemv": {"quant_method": "awq", "version": "gemv"},
    "awq version null": {"quant_method": "awq", "version": None},
    "awq version 1": {"quant_method": "awq", "version": 1},
}


@pytest.mark.parametrize("name", BAD)
def test_bad_quantization_config(tmp_path, name):
    """A traceback, or a model of garbage, where one line can say what is wrong."""
    folder, _ = quantised_folder(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= BAD[name]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError):
        quantize.load(folder)


@pytest.mark.parametrize("value", ["int4", 4, [GOOD]])
def test_quantization_config_must_be_an_object(tmp_path, value):
    """`.get` of a string."""
    folder, _ = quantised_folder(tmp_path)
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": value}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="quantization_config must be an object"):
        quantize.load(folder)


def test_mixed_up_tensors_are_listed(tmp_path):
    """One of q, k and v left plain, scales of the wrong shape, bytes stored as floats."""
    folder, _ = quantised_folder(tmp_path)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    prefix = "model.layers.0.self_attn"
    for name in ("qweight", "scales", "zeros"):
        del tensors[f"{prefix}.k_proj.{name}"]
    tensors[f"{prefix}.k_proj.weight"] = torch.zeros(32, 64)
    tensors[f"{prefix}.o_proj.scales"] = torch.zeros(64, 1)
    tensors[f"{prefix}.o_proj.zeros"] = torch.zeros(64, 2)
    save_file(tensors, file)
    with pytest.raises(CheckpointError) as error:
        quantize.load(folder)
    for text in (
        "missing: layers.0.self_attn.k_proj.qweight",
        "unexpected: layers.0.self_attn.k_proj.weight",
        "layers.0.self_attn.o_proj.scales is (64, 1), config.json asks for (64, 2)",
        "layers.0.self_attn.o_proj.zeros holds F32, not one of U8",
    ):
        assert text in str(error.value)


# --- The command line -----------------------------------------------------------------------------


def cli(*argv):
    return quantize.main([str(arg) for arg in argv])


@pytest.fixture
def greedy(capsys, monkeypatch):
    """Run generate.py and return the ids that it chose."""
    monkeypatch.setattr(generate, "read_bandwidth", lambda device: 30.0)  # measuring takes seconds

    def run(*argv):
        capsys.readouterr()
        argv = [*map(str, argv), "--prompt", "ROMEO:\n", "--temperature", "0", "--json"]
        assert generate.main([*argv, "--max-tokens", "12", "--ignore-eos"]) == 0
        return json.loads(capsys.readouterr().out)["token_ids"]

    return run


@pytest.mark.parametrize("mode", ["int8", "int4"])
def test_a_folder_gives_what_quantising_on_the_fly_gives(tmp_path, greedy, mode):
    """A folder without its tokenizer; a model quantised twice or in another way when on the fly."""
    out = tmp_path / "out"
    assert cli("--checkpoint", SHAKESPEARE, "--mode", mode, "--out", out) == 0
    ids = greedy("--checkpoint", out)
    assert len(ids) == 12 and ids == greedy("--quantize", mode)
    assert {f.name for f in out.iterdir()} == {f.name for f in SHAKESPEARE.iterdir()}
    config = json.loads((out / "config.json").read_text())
    size = 128 if mode == "int4" else -1
    assert config.pop("quantization_config") == {
        "quant_method": "kilolm", "bits": quantize.MODES[mode], "group_size": size
    }  # fmt: skip
    assert config == json.loads((SHAKESPEARE / "config.json").read_text())
    assert [f.name for f in tmp_path.iterdir()] == ["out"]
    assert out.stat().st_mode & 0o777 == 0o755  # readable by others than who wrote it


def test_options_of_the_command_line(tmp_path):
    """An option that is read and then forgotten."""
    out = tmp_path / "out"
    options = ("--mode", "int4", "--group-size", "64", "--keep-lm-head")
    assert cli("--checkpoint", SHAKESPEARE, *options, "--out", out) == 0
    model = quantize.load(out)
    assert model.layers[0].mlp.down_proj.scales.shape == (256, 512 // 64)
    assert model.lm_head.weight is model.embed_tokens.weight


@pytest.mark.parametrize("method", ["rtn", "gptq"])
def test_as_a_script(tmp_path, method):
    """gptq.py imports quantize.py, which runs as __main__: a second copy of it registered the
    operators a second time, and died of it."""
    text = tmp_path / "text"
    text.write_text("To be, or not to be, that is the question:\n" * 60)
    script = [sys.executable, ROOT / "quantize.py", "--checkpoint", SHAKESPEARE, "--mode", "int4"]
    script += ["--method", method, "--calibrate", text, "--out", tmp_path / "out"]
    done = subprocess.run(script, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert [*linears(quantize.load(tmp_path / "out"))] == []


def fails(capsys, *argv, status=2):
    capsys.readouterr()
    assert cli(*argv) == status
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith("quantize.py: error: ")
    return err


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_out_that_exists_is_left_alone(tmp_path, capsys, kind):
    """A checkpoint written over another one, or minutes of work before the complaint."""
    out = tmp_path / "out"
    out.mkdir() if kind == "folder" else out.write_text("mine")
    # no such checkpoint: it must not even be looked at
    err = fails(capsys, "--checkpoint", tmp_path / "none", "--mode", "int4", "--out", out)
    assert str(out) in err and "exists" in err
    assert [*tmp_path.iterdir()] == [out]
    assert not [*out.iterdir()] if kind == "folder" else out.read_text() == "mine"
    with pytest.raises(ValueError, match="exists"):
        quantize.save(load_model(SHAKESPEARE), SHAKESPEARE, out, GOOD)


@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()])
def test_failing_midway_leaves_nothing_behind(tmp_path, capsys, monkeypatch, error):
    """Half a folder that looks like a checkpoint, or a hidden one of gigabytes."""

    def failing(tensors, file, metadata):
        file.write_bytes(b"half")
        raise error

    monkeypatch.setattr(quantize, "save_file", failing)
    argv = ("--checkpoint", SHAKESPEARE, "--mode", "int8", "--out", tmp_path / "out")
    if isinstance(error, OSError):
        assert "disk full" in fails(capsys, *argv)
    else:
        assert cli(*argv) == 130
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--method", "gptq"], "needs --calibrate"),
        (["--group-size", "48"], "group size 48 does not divide 256 input channels"),
        (["--method", "gptq", "--calibrate", "{tmp}/none.txt"], "none.txt"),
        (["--method", "gptq", "--calibrate", "{tmp}/short.txt"], "tokens, too short"),
        (["--method", "gptq", "--calibrate", "{tmp}/latin.txt"], "utf-8"),
    ],
)
def test_errors_of_use(tmp_path, capsys, options, message):
    """A traceback in place of a line that says what to change."""
    (tmp_path / "short.txt").write_text("To be.")
    (tmp_path / "latin.txt").write_bytes(b"\xe9t\xe9")
    options = [option.format(tmp=tmp_path) for option in options]
    out = tmp_path / "out"
    argv = ("--checkpoint", SHAKESPEARE, "--mode", "int4", *options, "--out", out)
    assert message in fails(capsys, *argv)
    assert not out.exists() and len([*tmp_path.iterdir()]) == 2


def test_a_quantised_folder_is_not_quantised_again(tmp_path, capsys):
    """It would be read as plain, and fail with forty names."""
    folder, _ = quantised_folder(tmp_path)
    err = fails(capsys, "--checkpoint", folder, "--mode", "int4", "--out", tmp_path / "out")
    assert "quantised already" in err and not (tmp_path / "out").exists()


def test_shards_become_one_file(tmp_path):
    """An index copied along, whose shards are not there."""
    source = tiny_folder(tmp_path / "plain")
    shutil.move(source / "model.safetensors", source / "model-00001-of-00001.safetensors")
    shard = "model-00001-of-00001.safetensors"
    index = {"weight_map": dict.fromkeys(load_file(source / shard), shard)}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    assert cli("--checkpoint", source, "--mode", "int8", "--out", tmp_path / "out") == 0
    names = {file.name for file in (tmp_path / "out").iterdir()}
    assert names == {"config.json", "model.safetensors"}
    assert math.isfinite(logits_of(quantize.load(tmp_path / "out")).sum())


def test_what_is_quantised_already_is_refused():
    """--quantize on a quantised folder did nothing, and said nothing."""
    model = nn.Sequential(nn.Linear(64, 64, bias=False)).requires_grad_(False)
    quantize_model(model, "int8")
    with pytest.raises(ValueError, match="quantised already"):
        quantize_model(model, "int4", 32)
