"""GPTQ: rounding that makes up for its own errors, and the folders of other tools.

The packers here follow the formats as AutoGPTQ and AutoAWQ publish them, and share nothing with
formats.py; what is loaded must be scale * (q - zero), to the bit.
"""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_quantize import QWEN2, TIED, logits_of, standing_for
from tiny import edit_config, tiny_folder
from torch import nn

from around.folder import is_tied, load_model, named_tensors
from around.settings import InputError
from quantize import QuantLinear, linears, quantize_model, round_to_nearest
from tools import convert
from tools.convert import calibrate, gptq


def correlated(rows, K, rank):
    """Return inputs most of whose variance lies in a few directions, as those of a trained
    model."""
    return torch.randn(rows, rank) @ torch.randn(rank, K) + 0.1 * torch.randn(rows, K)


def output_error(weight, H, bits, quantised):
    """Return (w - wq) H (w - wq)^T summed over the outputs: the squared change of the output."""
    error = (weight - standing_for(*quantised, bits).dequantize()).double()
    return ((error @ H.double()) * error).sum().item()


def rounded(weight, scales, zeros, bits):
    """Round each value for itself."""
    w = weight.unflatten(1, (scales.shape[1], -1))
    return (w / scales[..., None] + zeros[..., None]).round().clamp(0, 2**bits - 1).flatten(1)


@pytest.mark.parametrize(("bits", "group_size"), [(4, 32), (4, 320), (8, 320)])
def test_errors_are_made_up_for(bits, group_size):
    """Quantise by gptq(), and compare with rounding: the same values where inputs do not correlate,
    a tenth of its error where they do (measured, a 19th or less). Catches: errors moved to channels
    that cannot make up for them, with the wrong sign, or within a block alone; channels stored in
    the order of their treatment."""
    weight, diagonal = torch.randn(64, 320), torch.rand(320) + 0.1
    q, scales, zeros = gptq(weight, diagonal.diag(), bits, group_size)
    assert scales.shape == zeros.shape == (64, 320 // group_size)
    assert torch.equal(q, rounded(weight, scales, zeros, bits))
    x = correlated(2000, 320, 40)
    H = x.t() @ x
    ours = output_error(weight, H, bits, gptq(weight, H, bits, group_size))
    nearest = output_error(weight, H, bits, round_to_nearest(weight, bits, group_size))
    assert nearest > 10 * ours > 0


def tiny_text(n):
    return torch.randint(40, (n,), generator=torch.Generator().manual_seed(n)).tolist()


@pytest.mark.parametrize("changes", [TIED, QWEN2])
def test_calibrated_folder(tmp_path, changes, monkeypatch):
    """Calibrate models on a text, convert them by convert.py, and compare the logits. Catches: a
    text that is read and not used; a name in `skip` quantised all the same; the parts of a fused
    Linear or a bias lost; hooks left behind; a tied embedding quantised along."""

    class Letters:
        def __init__(self, checkpoint):
            assert checkpoint == source

        def encode(self, text):
            return [int(digits) for digits in text.split()]

    monkeypatch.setattr(convert, "Tokenizer", Letters)
    source, text = tiny_folder(tmp_path / "plain", **changes), tmp_path / "text.txt"
    text.write_text(" ".join(map(str, tiny_text(640))))
    for mode, *keep in [("int8",), ("int4",), ("int4", "--keep-lm-head")]:
        model, out = load_model(source), tmp_path / f"{mode}{len(keep)}"
        embedding = model.embed_tokens.weight.clone()
        calibrate(model, tiny_text(640), mode, 32, ("lm_head",) if keep else ())
        assert torch.equal(model.embed_tokens.weight, embedding)
        assert [*linears(model)] == ["lm_head"] * len(keep)
        nearest = quantize_model(load_model(source), mode, 32, ("lm_head",) if keep else ())
        assert not torch.equal(logits_of(model), logits_of(nearest))
        for module in model.modules():
            assert not module._forward_pre_hooks
            if isinstance(module, QuantLinear):
                groups = 1 if mode == "int8" else module.in_features // 32
                assert module.scales.shape == (module.out_features, groups)
        words = ["--checkpoint", source, "--mode", mode, "--group-size", 32, "--out", out, *keep]
        words += ["--method", "gptq", "--calibrate", text]
        assert convert.main([*map(str, words)]) == 0
        assert torch.equal(logits_of(load_model(out)), logits_of(model))


AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


def packed_down(q, bits):
    """Pack as GPTQ's qweight: (K, N) -> (K * bits / 32, N), channel k of a word at bit k * bits."""
    shifts = torch.arange(0, 32, bits)
    return (q.long().unflatten(0, (-1, len(shifts))) << shifts[:, None]).sum(1).int()


def packed_across(q, bits, order=None):
    """Pack as GPTQ's qzeros and AWQ's tensors: (R, N) -> (R, N * bits / 32). In AWQ the value at
    place i of a word is that of output order[i]."""
    shifts = torch.arange(0, 32, bits)
    values = q.long().unflatten(1, (-1, len(shifts)))[..., order or range(len(shifts))]
    return (values << shifts).sum(2).int()


def other_folder(
    folder, method="gptq", bits=4, group_size=32, desc_act=False, sym=False, v2=False,
    lm_head=False, g_idx=True, config=None, **changes,
):  # fmt: skip
    """Write a tiny folder as another tool does; return it, the weights that it stands for by name,
    and a plain folder of them."""
    source = tiny_folder(folder / "plain", **changes)
    tensors, weights = {}, {}
    for name, tensor in load_file(source / "model.safetensors").items():
        path, _, last = name.rpartition(".")
        if last != "weight" or not (path.endswith("_proj") or (lm_head and path == "lm_head")):
            tensors[name] = tensor
            continue
        N, K = tensor.shape
        size = K if group_size == -1 else group_size
        groups = torch.arange(K) // size  # which one each channel belongs to
        groups = groups[torch.randperm(K)] if desc_act else groups
        q, zeros = torch.randint(2**bits, (K, N)), torch.randint(2**bits, (K // size, N))
        zeros[0, 0] = 0  # which, less one, is all ones
        if sym:
            zeros.fill_(2 ** (bits - 1))
        scales = ((torch.rand(K // size, N) + 0.5) * 3 * K**-0.5 / 2**bits).half()
        weights[name] = (scales.float()[groups] * (q - zeros[groups]).float()).t().contiguous()
        tensors[f"{path}.scales"] = scales
        if method == "gptq":
            tensors[f"{path}.qweight"] = packed_down(q, bits)
            tensors[f"{path}.qzeros"] = packed_across(zeros if v2 else (zeros - 1) % 2**bits, bits)
            if g_idx:
                tensors[f"{path}.g_idx"] = groups.int()
        else:
            tensors[f"{path}.qweight"] = packed_across(q, bits, AWQ_ORDER)
            tensors[f"{path}.qzeros"] = packed_across(zeros, bits, AWQ_ORDER)
    more = {"desc_act": desc_act, "sym": sym} | ({"checkpoint_format": "gptq_v2"} if v2 else {})
    if method == "awq":
        more = {"version": "gemm", "zero_point": True, "modules_to_not_convert": None}
    usual = {"quant_method": method, "bits": bits, "group_size": group_size} | more
    out = shutil.copytree(source, folder / "other")
    edit_config(out, quantization_config=config or usual)
    save_file(tensors, out / "model.safetensors")
    plain = load_file(source / "model.safetensors") | weights
    save_file(plain, source / "model.safetensors")
    return out, weights, source


def weights_of(model):
    """Return the weights that the Linears of a model stand for, by their names in a checkpoint."""
    for path, module in [*model.named_modules()]:
        if isinstance(module, QuantLinear):
            plain = nn.Linear(module.in_features, module.out_features, device="meta")
            plain.weight = nn.Parameter(module.dequantize(), requires_grad=False)
            plain.bias, plain.parts = module.bias, module.parts
            model.set_submodule(path, plain)
    return {
        f"{'' if 'lm_head' in n else 'model.'}{n}": tensor for n, tensor in named_tensors(model)
    }


def under(**config):
    """Return a quantization_config of fewer or other words."""
    return {"config": config}


FOLDERS = {
    "gptq": {}, "gptq without g_idx": {"g_idx": False}, "gptq sym": {"sym": True},
    "gptq v2": {"v2": True}, "gptq v2 sym": {"v2": True, "sym": True},
    "gptq v2 under transformers' name": {
        "v2": True, **under(quant_method="gptq", bits=4, group_size=32, format="gptq_v2")},
    "gptq desc_act of one group": {
        "group_size": -1, **under(quant_method="gptq", bits=4, group_size=-1, desc_act=True)},
    "gptq whole channels": {"group_size": -1}, "gptq groups of 16": {"v2": True, "group_size": 16},
    "gptq 8 bits": {"bits": 8}, "gptq 8 bits lm_head": {"bits": 8, "lm_head": True},
    "gptq 8 bits v2": {"bits": 8, "v2": True},
    "gptq 8 bits sym whole channels": {"bits": 8, "group_size": -1, "sym": True},
    "gptq lm_head": {"lm_head": True}, "gptq bfloat16": {"torch_dtype": "bfloat16", "sym": True},
    "gptq tied": TIED, "gptq qwen2": QWEN2,
    "awq": {"method": "awq"}, "awq groups of 16": {"method": "awq", "group_size": 16},
    "awq whole channels": {"method": "awq", "group_size": -1},
    "awq lm_head": {"method": "awq", "lm_head": True}, "awq qwen2": {"method": "awq", **QWEN2},
    "awq GEMM": {
        "method": "awq", **under(quant_method="awq", bits=4, group_size=32, version="GEMM")},
}  # fmt: skip


@pytest.mark.parametrize("name", FOLDERS)
def test_folders_of_other_tools(tmp_path, name):
    """Load folders as AutoGPTQ and AutoAWQ write them, and compare the weights to the bit, and the
    logits, with a plain folder's. Catches: bits in another order; zero points less one or not;
    outputs interleaved or not; channels in the wrong group: all of it loads without an error, and
    then rambles."""
    folder, weights, source = other_folder(tmp_path, **FOLDERS[name])
    model = load_model(folder, dtype=torch.float32)
    plain = load_model(source, dtype=torch.float32)
    kept = 0 if FOLDERS[name].get("lm_head") else 1
    assert len(weights) == 7 * 2 + 1 - kept
    assert len(linears(model)) == kept
    theirs = logits_of(plain)
    assert theirs.std() > 0.3
    torch.testing.assert_close(logits_of(model), theirs, atol=1e-4, rtol=1e-4)
    assert is_tied(model) == ("tie_word_embeddings" in FOLDERS[name])
    names = {name for name, _ in named_tensors(model)}  # those of a folder of our own
    assert {"layers.0.self_attn.v_proj.zeros", "layers.1.mlp.up_proj.qweight"} <= names
    found = weights_of(model)
    for path, weight in weights.items():
        assert torch.equal(found[path], weight), path


Q, DOWN = "model.layers.1.self_attn.q_proj", "model.layers.0.mlp.down_proj"


def put(name, change):
    """Return a change of one tensor."""
    return lambda tensors: tensors.update({name: change(tensors[name]).contiguous()})


def drop(name):
    return lambda tensors: tensors.pop(name)


DAMAGED = [
    (drop(f"{Q}.qzeros"), r"q_proj\.zeros: missing"),
    (drop(f"{DOWN}.scales"), r"down_proj\.scales: missing"),
    (drop(f"{DOWN}.qweight"), r"down_proj\.(weight|qweight): missing"),
    (drop(f"{Q.replace('q_proj', 'v_proj')}.qweight"), r"v_proj\.qweight"),  # one of q, k and v
    (put(f"{Q}.qweight", lambda t: t[:-1]), r"q_proj\.qweight: .* \(64, 32\)"),
    (put(f"{Q}.qweight", lambda t: t[..., None]), r"q_proj\.qweight"),
    (put(f"{Q}.qweight", lambda t: t.flatten()), r"q_proj\.qweight"),
    (put(f"{DOWN}.scales", lambda t: t.t()), r"down_proj\.scales: .* \(64, 3\)"),
    (put(f"{Q}.qzeros", lambda t: t[:, 1:]), r"q_proj\.zeros: .* \(64, 2\)"),
    (put(f"{Q}.qweight", lambda t: t.float()), r"q_proj\.qweight: float"),
    (lambda t: t.update({f"{Q}.extra": torch.ones(2)}), r"q_proj\.extra"),
    (lambda t: t.update({f"{Q}.bias": torch.ones(64)}), r"q_proj\.bias"),
]


def test_damaged_folders(tmp_path):
    """Load a packed folder with each damage of DAMAGED, and check that the error names it; then
    check the packers above against words written by hand, as formats.py draws them. Catches: a
    traceback from deep inside, or a model that rambles."""
    folder, _, _ = other_folder(tmp_path)
    whole = load_file(folder / "model.safetensors")
    for damage, message in DAMAGED:
        tensors = dict(whole)
        damage(tensors)
        save_file(tensors, folder / "model.safetensors")
        with pytest.raises(InputError, match=message):
            load_model(folder)
            pytest.fail(f"it loads, without {message}")
    assert packed_down(torch.arange(1, 9)[:, None], 4).tolist() == [[0x87654321 - 2**32]]
    assert packed_across(torch.arange(8)[None], 4, AWQ_ORDER).tolist() == [[0x75316420]]


def test_what_some_tools_write(tmp_path):
    """Load folders with biases of zeros, which vLLM skips too, and without a trivial g_idx; then
    some that must be refused. Catches: a harmless folder refused; channels grouped by importance
    (desc_act) read as neighbours, so that the model rambles. g_idx tells, not what the file says of
    it (exllama#44)."""
    folder, weights, _ = other_folder(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    for name in weights:
        tensors[name.replace(".weight", ".bias")] = torch.zeros(len(weights[name]))
    del tensors[f"{Q}.g_idx"]
    save_file(tensors, folder / "model.safetensors")
    found = weights_of(load_model(folder))
    assert all(torch.equal(found[name], weight) for name, weight in weights.items())
    for i, options in enumerate(({}, {"v2": True, "group_size": 16}, {"bits": 8})):
        folder, _, _ = other_folder(tmp_path / str(i), desc_act=True, **options)
        config = json.loads((folder / "config.json").read_text())["quantization_config"]
        del config["desc_act"]
        for said in ({"desc_act": True}, {"desc_act": False}, {}):
            edit_config(folder, quantization_config=config | said)
            with pytest.raises(InputError, match=r"g_idx: the inputs are not in their groups"):
                load_model(folder)
    # GPTQModel's bits or groups of some Linears, by `dynamic`
    folder, _, _ = other_folder(tmp_path / "rules")
    whole = load_file(folder / "model.safetensors")
    for i, (options, says) in enumerate(
        (({"bits": 8}, "do not fit"), ({"group_size": 16}, "g_idx"))
    ):
        other, _, _ = other_folder(tmp_path / f"other{i}", **options)
        others = load_file(other / "model.safetensors")
        mixed = {n: others[n] if "down_proj" in n else each for n, each in whole.items()}
        save_file(mixed, folder / "model.safetensors")
        with pytest.raises(InputError, match=says):
            load_model(folder)
