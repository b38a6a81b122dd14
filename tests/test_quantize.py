"""Fewer bits, and packed weights: what is stored, what is computed from it, and what is refused.

The oracle of every packed form is the plain product in float64 with QuantLinear's own weight.
"""

import copy
import itertools
import json
import pickle
import shutil
import subprocess
import sys
import weakref

import pytest
import torch
from conftest import ROOT, SHAKESPEARE
from safetensors.torch import load_file
from tiny import edit_config, tiny_folder
from torch import nn

import quantize
from around.fast import packed
from around.fast.packed import Int4Linear, Int8Linear, LoopedLinear, PackedLinear, form_of
from around.folder import is_tied, load_model, named_tensors
from around.settings import InputError
from llm import LLM
from model import FusedLinear
from quantize import MODES, QuantLinear, linears, quantize_model, round_to_nearest
from tools import convert

QWEN2 = {"model_type": "qwen2"}
EXPERTS = {"model_type": "mixtral", "num_local_experts": 3}
TIED = {"tie_word_embeddings": True}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
F32, BF16, F16 = DTYPES


@torch.no_grad()
def logits_of(model, length=20):
    tokens = torch.randint(40, (2, length), generator=torch.Generator().manual_seed(length))
    return model(tokens, torch.arange(length).expand_as(tokens))


def linear_of(N=70, K=128, bias=False, dtype=F32):
    linear = nn.Linear(K, N, bias).to(dtype).requires_grad_(False)
    linear.weight *= torch.rand(N, 1) + 0.1  # each output with a scale of its own
    return linear


def quant_linear(bits, group_size, **options):
    linear = linear_of(**options)
    quantised = QuantLinear(linear, bits, group_size)
    quantised.store(*round_to_nearest(linear.weight, bits, quantised.group_size))
    return quantised


def standing_for(q, scales, zeros, bits):
    """Return the QuantLinear of these numbers."""
    q, scales, zeros = (torch.as_tensor(each) for each in (q, scales, zeros))
    linear = QuantLinear(nn.Linear(q.shape[1], len(q), False), bits, q.shape[1] // scales.shape[1])
    linear.store(q, scales, zeros)
    return linear


def test_docstring_examples():
    """Compute the examples of the docstrings, and try to copy packed forms. Catches: halves of a
    byte swapped; a zero point added, or no integer; 16 steps for 15; one digit for -0.3 in
    Int8Linear (-38 / 127), and not two (-38 and -13); a copy in int4 that multiplied by the
    original's matrix, until that was gone."""
    linear = standing_for([[7, 10]], [[0.5]], [[8]], 4)
    assert linear.qweight.tolist() == [[0xA7]] and linear.dequantize().tolist() == [[-0.5, 1.0]]
    assert linear(torch.tensor([[10.0, 1.0]])).tolist() == [[-4.0]]
    q, scales, zeros = round_to_nearest(torch.tensor([[-1.0, 0.0, 2.0]]), 4, 3)
    torch.testing.assert_close(scales, torch.tensor([[0.2]]))
    assert zeros.tolist() == [[5]] and q.tolist() == [[0, 5, 15]]
    y = ByOneDNN(standing_for([[128, 129]], [[1.0]], [[128]], 8))(torch.tensor([[1.0, -0.3]]))
    torch.testing.assert_close(y, torch.tensor([[-4877 / 16256]]))
    for name, act in itertools.product(FORMS, (copy.deepcopy, copy.copy, pickle.dumps)):
        with pytest.raises(TypeError, match="copied: copy it before it is packed"):
            act(both_of(name)[1])


@pytest.mark.parametrize(("bits", "group_size"), [(8, 96), (8, 32), (4, 96), (4, 32), (4, 2)])
def test_round_to_nearest_errs_by_half_a_step(bits, group_size):
    """Round weights with outliers, zeros and one sign, and check that each errs by half a step at
    most and that no scale is too wide. Catches: a value cut off at the end of its range; a group
    that takes the scale of another; zeros that come back as something else, or as NaN."""
    for dtype, shift in itertools.product((F32, BF16), (-3, 0, 3)):  # at 3 a group has one sign
        weight = (torch.randn(50, 96) + shift).to(dtype)
        weight[:, ::7], weight[7] = 0, 0  # row 7 is a pruned channel
        weight[3, 5] = 40  # an outlier is the end of its group's range
        q, scales, zeros = round_to_nearest(weight, bits, group_size)
        assert scales.shape == zeros.shape == (50, 96 // group_size)
        for values in (q, zeros):
            assert torch.equal(values, values.round())
            assert values.min() >= 0 and values.max() < 2**bits
        found = standing_for(q, scales, zeros, bits).dequantize()
        error = (found - weight.float()).abs()
        assert (error <= scales.repeat_interleave(group_size, 1) * 0.50001).all()
        assert (found[weight == 0] == 0).all()
        groups = weight.float().unflatten(1, (-1, group_size))  # no scale is wider than it must be
        span = groups.amax(2).clamp(min=0) - groups.amin(2).clamp(max=0)
        narrow = span / 15 if bits == 4 else groups.abs().amax(2) / 127
        torch.testing.assert_close(scales, narrow.where(narrow > 0, 1))


@pytest.mark.parametrize("changes", [{}, TIED, QWEN2])
def test_quantize_model(tmp_path, changes):
    """Quantise tiny models in each mode, with and without names to skip, and check each Linear and
    the logits. Catches: a Linear left plain, or quantised though it is in `skip`; a bias lost; a
    tied embedding quantised along with lm_head; a model quantised twice."""
    folder = tiny_folder(tmp_path, **changes)
    for mode, skip in itertools.product(MODES, [(), ("lm_head", "layers.1.mlp.down_proj")]):
        model = load_model(folder)
        before, plain, paths = model.embed_tokens.weight.clone(), logits_of(model), linears(model)
        assert len(paths) == 4 * 2 + 1
        assert quantize_model(model, mode, 32, skip) is model
        assert {*linears(model)} == {*skip}
        assert is_tied(model) == (changes is TIED and bool(skip))
        for linear in (model.get_submodule(path) for path in paths if path not in skip):
            in_8_bits = mode == "int8" or (changes is TIED and linear is model.lm_head)
            assert type(linear) is QuantLinear and linear.bits == (8 if in_8_bits else 4)
            groups = 1 if in_8_bits else linear.in_features // 32
            assert linear.scales.shape == (linear.out_features, groups)
        assert (model.layers[0].self_attn.qkv_proj.bias is not None) == (changes is QWEN2)
        assert torch.equal(model.embed_tokens.weight, before)
        error = (logits_of(model) - plain).std() / plain.std()
        assert 0 < error < {"int8": 0.06, "int4": 0.6}[mode]  # 1.4 where nothing is left
        with pytest.raises(ValueError, match="quantised already"):
            quantize_model(model, "int8")


def test_group_sizes(tmp_path):
    """Quantise by sizes of groups that do not fit, which is refused, and by the default. Catches:
    half a model quantised before the Linear that does not fit; an odd size, of which two channels
    cannot share a byte; a default of 128 that failed for 576 channels."""
    for size, channels in [(64, 96), (7, 64), (0, 64), (-2, 64), (1, 64), (3, 96)]:
        width = 96 if size == 3 else 64
        model = load_model(tiny_folder(tmp_path / str(size), hidden_size=width))
        plain = logits_of(model)
        with pytest.raises(ValueError, match=rf"{size} does not divide {channels} input"):
            quantize_model(model, "int4", size)
        assert len(linears(model)) == 9 and torch.equal(logits_of(model), plain)
        quantize_model(model, "int8", size)  # has no groups
    model = load_model(tiny_folder(tmp_path / "x", hidden_size=96, intermediate_size=192))
    assert quantize_model(model, "int4").layers[0].mlp.down_proj.group_size == 32


def test_plain_weights_are_freed_one_by_one(tmp_path, monkeypatch):
    """Count the plain weights that are left as each Linear is quantised, or packed. Catches: a list
    of the Linears that keeps every plain weight until the last is done."""
    plain, alive = [], []

    def counting(real):
        return lambda *args: alive.append(sum(ref() is not None for ref in plain)) or real(*args)

    monkeypatch.setattr(quantize, "round_to_nearest", counting(round_to_nearest))
    monkeypatch.setattr(PackedLinear, "pack", counting(PackedLinear.pack))
    model = load_model(tiny_folder(tmp_path))
    plain += [weakref.ref(model.get_submodule(path).weight) for path in linears(model)]
    quantize_model(model, "int4", 32)
    model = nn.Sequential(linear_of(), nn.Sequential(linear_of()))
    plain += [weakref.ref(model.get_submodule(path).weight) for path in linears(model)]
    packed.pack_linears(model)
    assert alive == [9, 8, 7, 6, 5, 4, 3, 2, 1, 2, 1] and not any(ref() for ref in plain)


class ByOneDNN(Int8Linear):
    """Multiply as where the processor has VNNI; elsewhere oneDNN's product is played, in floats."""

    def pack(self, linear):
        super().pack(linear)
        self.signed = linear.qweight.double() - 128

    def compute(self, rows):
        if packed.CAN("avx512_vnni"):
            return super().compute(rows)
        return ((rows.double() - 128) @ self.signed.t() * self.scales).float()


WITHOUT_VNNI = packed.Int8WithoutVNNI
INT8 = Int8Linear if packed.CAN("avx512_vnni") else WITHOUT_VNNI  # what form_of chooses


@pytest.fixture(autouse=True)
def lanes(monkeypatch):
    """Set Int4Linear's order, that of AVX-512's operator; AVX2's is the same, with half the
    lanes."""
    if torch.backends.cpu.get_cpu_capability() == "AVX2":
        monkeypatch.setattr(packed.dequantize, "__defaults__", (16,))


FORMS = {  # form, how its Linear is made
    "plain": (PackedLinear, linear_of), "looped": (LoopedLinear, linear_of),
    "half": (packed.HalfLinear, linear_of), "widened": (packed.WidenedLinear, linear_of),
    "int8 by FBGEMM": (WITHOUT_VNNI, lambda **options: quant_linear(8, -1, **options)),
    "int8 by oneDNN": (ByOneDNN, lambda **options: quant_linear(8, -1, **options)),
    "int8 of groups": (INT8, lambda **options: quant_linear(8, 64, **options)),
    "int8 of int4": (INT8, lambda **options: quant_linear(4, 32, **options)),
    "int4": (Int4Linear, lambda **options: quant_linear(4, 128, **options)),
    "int4 in groups": (Int4Linear, lambda **options: quant_linear(4, 32, **options)),
}  # fmt: skip


def both_of(name, dtype=F32, **options):
    """Return a Linear and its packed form."""
    form, make = FORMS[name]
    linear = make(dtype=dtype, **options | ({"N": 64} if form is Int4Linear else {}))
    if form in (PackedLinear, LoopedLinear) and form_of(linear) is not PackedLinear:
        pytest.skip("this processor has no kernel for it")
    return linear, form(linear)


def assert_close(linear, form, x, y):
    """Compare with the product in float64, by what the form may lose: bits of each product, of the
    widest weight of a group where scales are rounded or of a channel that is held as float16; and,
    of bytes that are multiplied, of the row's largest value."""
    exact = (linear.weight if isinstance(linear, nn.Linear) else linear.dequantize()).double()
    dtype, x, half = x.dtype, x.double(), isinstance(form, packed.HalfLinear)
    bits = {F32: 2**-17, BF16: 2**-7, F16: 2**-9}[dtype]
    bias = 0 if linear.bias is None else linear.bias.double()
    right = x @ exact.t() + bias
    widest = exact.abs().amax(1).expand_as(right) * x.abs().sum(-1, keepdim=True)
    allowed = (2 * widest + abs(bias)) * max(bits, 2**-12 * half)
    if isinstance(form, Int8Linear):
        width = exact.abs().sum(1) * x.abs().amax(-1, keepdim=True)
        allowed = width * 2**-14 * 1.02 + (right.abs() + abs(bias)) * bits
        if linear.scales.shape[1] > 1 or (linear.zeros != 128).any():  # rounded once more
            allowed += widest / 254 * 1.01
    assert y.dtype == dtype and y.shape == right.shape
    assert ((y - right).abs() <= allowed + 1e-30).all(), ((y - right).abs() / allowed).max()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FORMS)
def test_packed_equals_plain(name, dtype, monkeypatch):
    """Multiply batches of many sizes by each packed form, and compare with the product in float64.
    Catches: a weight packed for one number of rows and misread at another; the padding of the last
    outputs; wrong zero points; a row that is not contiguous; 0 / 0; overflow and underflow; one
    scale for a batch, so that a loud row coarsens a quiet one."""
    sizes = (1, 1e4, 1e-3, 0) if dtype == F16 else (1, 1e8, 1e-25, 0)
    rows = [size * torch.randn(1, 128) for size in sizes]
    batches = [torch.cat([*rows, *rows]), *(torch.randn(*shape, 128) for shape in (
        (5,), (1, 1), (1, 3), (2, 1), (2, 33)))]  # fmt: skip
    ways = (1000, 0) if "int4" in name else (0,)  # of int4's two, a processor takes one
    monkeypatch.setattr(packed, "MANY_ROWS", 6)
    for options, few_rows in itertools.product(({"N": 64}, {"bias": True}, {"N": 33}), ways):
        linear, form = both_of(name, dtype, **options)
        if "int4" in name:
            linear.zeros.random_(0, 16)  # other tools' are anywhere
            form = type(form)(linear)
        monkeypatch.setattr(packed, "FEW_ROWS", few_rows)
        for x in (*rows, *batches, torch.randn(1, 256)[:, ::2]):
            with torch.compiler.set_stance("force_eager"):
                assert_close(linear, form, x.to(dtype), form(x.to(dtype)))


def test_int8_linear_at_the_ends_of_its_range():
    """Multiply int8 weights and inputs at the ends of their ranges, and compare with the sums.
    Catches: a sum of products of bytes that is kept in 16 bits and saturates; weights of -128,
    which other tools store."""
    q = torch.tensor([255, 1, 0])[:, None].expand(3, 256)
    weights = torch.tensor([[127.0, -127.0, -128.0]])
    for form in (WITHOUT_VNNI, ByOneDNN):
        linear = standing_for(q, torch.ones(3, 1), torch.full((3, 1), 128), 8)
        y = form(linear)(torch.ones(2, 256))
        torch.testing.assert_close(y, weights.expand(2, 3) * 256)
        x = torch.full((2, 256), 64 / (128 * form.most))  # `low` is 64, and for the other row -64
        x[:, 0], x[1] = 1, -x[1]
        y = form(linear)(x)
        torch.testing.assert_close(y, x.sum(1, keepdim=True) * weights, rtol=1e-5, atol=1e-4)
    linear.zeros.fill_(10)  # as GPTQ without `sym` has it: q - zero needs nine bits
    y = WITHOUT_VNNI(linear)(torch.ones(2, 256))
    torch.testing.assert_close(y, (256.0 * (q[:, 0] - 10)).expand(2, 3), rtol=1e-4, atol=0)


class Aten:
    """CUDA's int4 operator, which exists on GPUs only, by what its documentation says."""

    @staticmethod
    def _convert_weight_to_int4pack(q, tiles):  # two values in a byte, the first the high half
        return torch.stack((q >> 4, q & 15), -1).flatten(1)

    @staticmethod
    def _weight_int4pack_mm(x, q, group_size, scales):
        scale, zero = scales.transpose(0, 1).repeat_interleave(group_size, 1).unbind(-1)
        return x @ ((q.to(x.dtype) - 8) * scale + zero).T


def test_int4_linear_on_cuda_stands_for_the_same_weight(monkeypatch):
    """Multiply by Int4Linear as on a GPU, with a stand-in for CUDA's operator. Catches: the CPU's
    order of nibbles, or its meaning of zero points, where CUDA's operator has others."""
    linear, x = quant_linear(4, 64, N=72, bias=True, dtype=BF16), torch.randn(6, 128, dtype=BF16)
    linear.zeros.random_(0, 16)
    with monkeypatch.context() as patch:
        patch.setattr(torch.ops, "aten", Aten)
        patch.setattr(torch.Tensor, "is_cuda", True, raising=False)
        patch.setattr(torch.Tensor, "is_cpu", False, raising=False)
        assert form_of(linear) is Int4Linear and form_of(quant_linear(4, 64, N=70)) is None
        assert form_of(quant_linear(8, -1)) is form_of(linear_of(dtype=BF16)) is None
        form = Int4Linear(linear)
        y = form(x)
    assert_close(linear, form, x, y)


def test_which_form():
    """Pack a model of many Linears; check the form of each, for many rows and for one sequence, and
    that plain weights are freed. Catches: a form that does not fit its bits or groups; one that
    could be packed and is left slow; a form that keeps the weight it replaced, or is kept alive by
    the operator's table."""
    int4 = INT8 if torch.backends.cpu.get_cpu_capability() == "AVX2" else Int4Linear
    plain = [linear_of(), quant_linear(8, -1), quant_linear(8, 64), quant_linear(4, 128, N=64)]
    model = nn.Sequential(*plain, nn.Sequential(quant_linear(4, 32), quant_linear(4, 2, N=64)))
    stored = weakref.ref(plain.pop().qweight)
    plain.clear()
    packed.pack_linears(model)
    kinds = [type(module) for module in model.modules() if not [*module.children()]]
    assert kinds == [PackedLinear, INT8, INT8, int4, INT8, INT8]
    form = weakref.ref(model[0])
    del model
    assert stored() is form() is None
    assert (form_of(linear_of()), form_of(linear_of(), True)) == (PackedLinear, LoopedLinear)
    for linear in (linear_of(dtype=BF16), quant_linear(8, -1), quant_linear(4, 32)):
        many = form_of(linear)
        assert form_of(linear, True) is {PackedLinear: LoopedLinear}.get(many, many) is not None


def test_the_number_of_rows(monkeypatch):
    """Note which numbers of rows int4 dequantises for, and compare packed.dot with the plain
    product. Catches: a choice by timing, or a border that is off by one; pieces of a long sum that
    do not divide K and leave channels out."""
    sizes = []
    form = both_of("int4", BF16)[1]
    monkeypatch.setattr(packed, "FEW_ROWS", 3)
    monkeypatch.setattr(Int4Linear, "many_rows", lambda _, x: sizes.append(len(x)) or x[:, :64])
    for R in (1, 3, 4, 2, 300, 3):
        form(torch.randn(R, 128, dtype=BF16))
    assert sizes == [4, 300]
    for K in (4096, 5632, 4099, 9000):
        linear, x = linear_of(K=K, N=8), torch.randn(1, K)
        torch.testing.assert_close(packed.dot(linear.weight, x), linear(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("native", [False, True])
def test_bfloat16_that_the_processor_emulates(monkeypatch, native):
    """Load and multiply as on processors with and without bfloat16. Catches: a prompt of 512 tokens
    that took 7 s instead of 1.2 without --compile; seconds of packing before a chat; pieces in
    another order; few rows, which are fast, widened; bfloat16's large numbers as infinity with
    --compile."""
    monkeypatch.setattr(packed, "CAN", {"avx512_bf16": native}.get)
    monkeypatch.setattr(packed, "FAST_BFLOAT16", native)
    for dtype, form in (("float32", FusedLinear), ("bfloat16", packed.WidenedLinear)):
        llm = LLM(SHAKESPEARE, device="cpu", dtype=dtype, num_blocks=8)
        kind = type(llm.engine.model.layers[0].self_attn.qkv_proj)
        assert kind is (FusedLinear if native else form)
    linear = linear_of(N=1030, dtype=BF16)
    assert form_of(linear, compiled=False) is (None if native else packed.WidenedLinear)
    assert form_of(linear) is (PackedLinear if native else packed.HalfLinear)
    x, wide = torch.randn(9, 128).bfloat16(), packed.WidenedLinear(linear)
    exact = x.double() @ linear.weight.double().mT
    for rows in (1, 7, 8, 9):
        torch.testing.assert_close(wide(x[:rows]).double(), exact[:rows], rtol=4e-3, atol=4e-3)
    linear.weight[:3] *= torch.tensor([2.0**8, 2.0**-30, 0])[:, None]
    x = torch.eye(128, dtype=BF16)
    off = packed.HalfLinear(linear)(x) - linear.weight.t()
    assert off.abs().max() <= 2.0**-25  # of the smallest weights alone
    assert not off[linear.weight.t().abs() > 2.0**-14].any()
    half = linear_of(dtype=F16)
    assert torch.equal(packed.HalfLinear(half)(x.half()), half.weight.t())
    monkeypatch.setattr(torch.Tensor, "float", None)  # few rows are not widened
    wide(x[:7])
    with pytest.raises(TypeError):
        wide(x[:8])


def test_quantised_weights_are_packed_without_compiling(monkeypatch):
    """Load a model in each mode without --compile, check its forms and logits, and load one as on a
    Mac, whose PyTorch lacks oneDNN. Catches: --quantize alone that made a model 6 to 9 times as
    slow, as it was dequantised at each step; a model in bfloat16 that did not load."""
    for mode, forms in (("int8", {INT8}), ("int4", {Int4Linear, INT8}), (None, set())):
        llm = LLM(SHAKESPEARE, device="cpu", num_blocks=16, dtype="bfloat16", quantize=mode)
        model = llm.engine.runner.model
        found = {type(module) for module in model.modules() if isinstance(module, PackedLinear)}
        found.discard(packed.WidenedLinear)  # what stays plain, without AVX-512
        assert found <= forms and bool(found) == bool(forms)
        assert not any(isinstance(module, QuantLinear) for module in model.modules())
        plain = load_model(SHAKESPEARE, dtype=BF16)
        logits = logits_of(quantize_model(plain, mode) if mode else plain)
        assert (logits_of(model) - logits).float().std() < 0.03 * logits.float().std()
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    monkeypatch.setattr(torch.ops, "mkldnn", None)
    monkeypatch.setattr(packed, "HAS_FBGEMM", False)
    llm = LLM(SHAKESPEARE, device="cpu", dtype="bfloat16", num_blocks=8)
    assert type(llm.engine.model.lm_head) is nn.Linear


def test_memory_of_many_lengths():
    """Multiply 200 numbers of rows, in a process of its own, and measure how much memory stays
    taken. Catches: oneDNN's code for each number of rows, which PyTorch keeps once more: 200
    prompts of different lengths took 460 MB that were never given back."""
    script = """if True:
        import torch
        from around.fast.packed import PackedLinear
        def resident():
            return int(open("/proc/self/statm").read().split()[1]) * 4096
        forms = [PackedLinear(torch.nn.Linear(256, n).requires_grad_(False)) for n in (256, 512)]
        for rows in (300, *range(1, 201)):
            for form in forms:
                form(torch.ones(rows, 256))
            before = resident() if rows == 300 else before
        print(resident() - before)"""
    if sys.platform == "linux" and form_of(linear_of()):
        options = dict(cwd=ROOT, capture_output=True, text=True, check=True)
        grown = int(subprocess.run([sys.executable, "-c", script], **options).stdout)
        assert grown < 120e6  # 77e6 to 81e6; without limits 240e6


@pytest.mark.slow
def test_packed_forms_compile():
    """Compile all forms in one graph, since a graph costs seconds, and int4's dequantisation for
    several K. Catches: a packed tensor, a key or a number of rows baked into the graph; an operator
    without a shape for the compiler; an int4 weight without columns, the first time that K is
    another."""
    both = [both_of(name, bias=True) for name in FORMS]
    run = torch.compile(lambda x: [form(x) for _, form in both], fullgraph=True)
    for rows in (1, 3, 40):
        x = torch.randn(1, rows, 128)
        for y, (_, form) in zip(run(x), both, strict=True):  # which equals its Linear: see above
            torch.testing.assert_close(y, form(x), atol=3e-3, rtol=1e-3)
    for dtype, K in itertools.product((F32, BF16), (2048, 5632, 2048, 768)):
        linear = quant_linear(4, 128, N=512, K=K, dtype=dtype)
        x, form = torch.randn(3, K).to(dtype), Int4Linear(linear)
        form.unpack = packed.compile_once(packed.dequantize, dynamic=False)  # as compile_model does
        assert_close(linear, form, x, form.many_rows(x))


def cli(*argv):
    return convert.main([str(arg) for arg in argv])


@pytest.fixture(scope="module")
def quantised(tmp_path_factory):
    """Write a folder of ours, to copy and to damage."""
    folder = tmp_path_factory.mktemp("quantised")
    options = ("--mode", "int4", "--group-size", 32, "--out", folder / "out")
    assert cli("--checkpoint", tiny_folder(folder / "plain"), *options) == 0
    return folder / "out"


@pytest.mark.parametrize(
    "changes", [{}, TIED, QWEN2, TIED | QWEN2 | {"torch_dtype": "bfloat16"}, EXPERTS]
)
def test_written_and_loaded_again(tmp_path, changes, monkeypatch):
    """Write quantised folders in shards, load them, and compare logits to the bit, names and
    config.json. Catches: parts of a fused Linear mixed up; a bias, or a tied or kept lm_head, lost;
    scales rounded to bfloat16; a shard lost, or a last one that is empty."""
    source = tiny_folder(tmp_path / "plain", **changes)
    for mode, keep in itertools.product(MODES, [(), ("--keep-lm-head",)]):
        out, size = tmp_path / f"{mode}{len(keep)}", 32 if mode == "int4" else -1
        model = quantize_model(load_model(source), mode, 32, ("lm_head",) if keep else ())
        count = len([*named_tensors(model)])
        shard = {"int4": count // 2, "int8": count}[mode]
        monkeypatch.setattr(convert, "SHARD", shard)
        options = ("--mode", mode, "--group-size", "32", *keep)
        assert cli("--checkpoint", source, *options, "--out", out) == 0
        loaded = load_model(out)
        assert torch.equal(logits_of(loaded), logits_of(model))
        assert isinstance(loaded.lm_head, nn.Linear) == bool(keep)
        assert is_tied(loaded) == (bool(keep) and "tie_word_embeddings" in changes)
        shards = [load_file(file) for file in out.glob("*.safetensors")]
        assert len(shards) == -(-count // shard)
        names = {name for each in shards for name in each}
        assert "model.layers.1.self_attn.k_proj.qweight" in names
        assert not [name for name in names if "qkv" in name or "gate_up" in name]
        assert ("lm_head.weight" in names) == (bool(keep) and not is_tied(loaded))
        kind = {"quant_method": "kilolm", "bits": MODES[mode], "group_size": size}
        config = json.loads((source / "config.json").read_text()) | {"quantization_config": kind}
        assert json.loads((out / "config.json").read_text()) == config
        # `dtype` casts everything but the scales and the integers.
        exact = dict(named_tensors(loaded))
        for name, tensor in named_tensors(load_model(out, dtype=F16)):
            is_kept = name.endswith(("qweight", "scales", "zeros"))
            assert tensor.dtype == (exact[name].dtype if is_kept else F16), name
            assert torch.equal(tensor, exact[name].to(tensor.dtype)), name


GPTQ = {"quant_method": "gptq", "desc_act": False}
AWQ = {"quant_method": "awq"}
BAD = [  # changes of the quantization_config, and what the error says
    ({"quant_method": None}, "quant_method"), ({"quant_method": ["gptq"]}, "quant_method"),
    ({"quant_method": "bitsandbytes"}, "bitsandbytes.*gptq"), (None, "quantization_config must be"),
    ({"bits": 3}, "bits 3"), ({"bits": None}, "bits None"), ({"bits": "4"}, "bits '4'"),
    ({"bits": 4.0}, None), ({"group_size": None}, None), ({"group_size": 32.0}, None),
    ({"group_size": True}, "group_size"), ({"group_size": 0}, "group_size 0"),
    ({"group_size": -2}, "group_size -2"), ({"group_size": 24}, "24 does not divide 64"),
    ({"group_size": 16}, "scales"), ({"bits": 8}, "qweight"),  # other than stored
    (GPTQ | {"bits": 4.0}, None), (GPTQ | {"bits": 3}, "bits 3"),
    (GPTQ | {"group_size": None}, "group_size"),
    (GPTQ | {"group_size": 48}, "48 does not divide 64"),
    (GPTQ | {"checkpoint_format": "marlin"}, "marlin"),
    (GPTQ | {"checkpoint_format": "gemm"}, "'gemm' is not supported"),
    (AWQ | {"checkpoint_format": "gptq"}, "'gptq' is not supported"),
    (AWQ | {"bits": 8}, "bits 8"), (AWQ | {"version": "gemv"}, "gemv"),
    (AWQ | {"version": None}, "version"), (AWQ | {"version": 1}, "version"),
]  # fmt: skip


def test_bad_quantization_config(quantised, tmp_path):
    """Load a quantised folder with each config of BAD, and check the error. Catches: a traceback,
    or a model of garbage, where one line can say what is wrong."""
    folder = shutil.copytree(quantised, tmp_path / "x")
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    for change, message in BAD:
        edit_config(folder, quantization_config="int4" if change is None else config | change)
        with pytest.raises(InputError, match=message):
            load_model(folder)
            pytest.fail(f"it loads: {change}")
