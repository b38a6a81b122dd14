"""GPTQ: rounding that makes up for its own errors, and the folders of other tools.

The packers here follow the formats as AutoGPTQ and AutoAWQ publish them, one integer at a time, and
share nothing with formats.py; what is loaded must be scale * (q - zero), to the bit.
"""

import copy
import json

import pytest
import torch
import ways
from conftest import SHAKESPEARE
from safetensors.torch import load_file, save_file
from test_quantize import TIED, logits_of, standing_for
from tiny import tiny_folder
from torch import nn
from torch.nn.functional import kl_div, log_softmax

from around.fast.compiling import compile_model
from around.folder.weights import is_tied, load_model, named_tensors
from around.settings import CheckpointError, SamplingParams
from generate import generate
from kv_cache import StaticCache
from quantize import MODES, QuantLinear, group_scales, linears, quantize_model, round_to_nearest
from sampling import Sequence
from tools import convert
from tools.convert import best_scales, calibrate, gptq

pytestmark = pytest.mark.usefixtures("one_thread")

# --- The algorithm --------------------------------------------------------------------------------


def correlated(rows, K, rank):
    """Inputs most of whose variance lies in a few directions, as those of a trained model."""
    return torch.randn(rows, rank) @ torch.randn(rank, K) + 0.1 * torch.randn(rows, K)


def output_error(weight, H, bits, quantised):
    """(w - wq) H (w - wq)^T summed over the outputs: the squared change of the output."""
    error = (weight - standing_for(*quantised, bits).dequantize()).double()
    return ((error @ H.double()) * error).sum().item()


def rounded(weight, scales, zeros, bits):
    """Each value for itself."""
    w = weight.unflatten(1, (scales.shape[1], -1))
    return (w / scales[..., None] + zeros[..., None]).round().clamp(0, 2**bits - 1).flatten(1)


@pytest.mark.parametrize(("bits", "group_size"), [(4, 32), (4, 192), (8, 192)])
def test_uncorrelated_inputs_are_rounded_to_nearest(bits, group_size):
    """Errors moved to channels that cannot make up for them, or channels stored in the order in
    which they were treated."""
    weight, diagonal = torch.randn(20, 192), torch.rand(192) + 0.1
    q, scales, zeros = gptq(weight, diagonal.diag(), bits, group_size)
    assert scales.shape == zeros.shape == (20, 192 // group_size)
    assert torch.equal(q, rounded(weight, scales, zeros, bits))


@pytest.mark.parametrize("bits", [4, 8])
def test_best_scales(bits):
    """A group that is worse off than with the plain scale; the importance of another channel; a
    group of zeros."""
    weight, importance = torch.randn(20, 192), torch.rand(192) + 0.1
    weight[3, 32:64] = 0

    def error(scales, zeros):
        q = rounded(weight, scales, zeros, bits).unflatten(1, (-1, 32))
        w = scales[..., None] * (q - zeros[..., None])
        return ((w.flatten(1) - weight).square() * importance).unflatten(1, (-1, 32)).sum(-1)

    plain = error(*group_scales(weight.unflatten(1, (-1, 32)), bits))
    best = error(*best_scales(weight, importance, bits, 32))
    assert (best <= plain).all()
    if bits == 8:  # whose steps are so fine that cutting anything off costs more than it gains
        assert torch.equal(best, plain)
        return
    assert (best < plain).float().mean() > 0.5
    weight[:, 64] = 4.0  # an outlier that matters, or does not
    importance[64] = 1e6
    wide, _ = best_scales(weight, importance, bits, 32)
    importance[64] = 1e-6
    narrow, _ = best_scales(weight, importance, bits, 32)
    assert narrow[:, 2].mean() < 0.95 * wide[:, 2].mean()
    assert torch.equal(narrow[:, [0, 1, 3, 4, 5]], wide[:, [0, 1, 3, 4, 5]])


@pytest.mark.parametrize(("bits", "group_size"), [(4, 32), (4, 320), (8, 320)])
def test_correlated_inputs_err_less(bits, group_size):
    """Errors spread with the wrong sign, along the wrong factor of the inverse, or only within a
    block of channels: measured, rounding to nearest errs 19 to 23 times as much. 320 channels are
    two blocks and a half."""
    weight, x = torch.randn(64, 320), correlated(2000, 320, 40)
    H = x.t() @ x
    ours = output_error(weight, H, bits, gptq(weight, H, bits, group_size))
    nearest = output_error(weight, H, bits, round_to_nearest(weight, bits, group_size))
    assert nearest > 10 * ours > 0


def test_channels_go_by_importance():
    """In the order in which they are stored, loud channels at the end would find nobody left to
    make up for them: the result must not depend on how channels are numbered."""
    weight, x = torch.randn(32, 192), correlated(1000, 192, 30) * torch.linspace(0.1, 2, 192)
    H, shuffled = x.t() @ x, torch.randperm(192)
    q, scales, zeros = gptq(weight, H, 4, 192)
    ours = gptq(weight[:, shuffled], H[shuffled][:, shuffled], 4, 192)
    assert torch.equal(ours[1], scales) and torch.equal(ours[2], zeros)
    assert (ours[0] == q[:, shuffled]).float().mean() > 0.99  # the rest hangs on a last bit


@pytest.mark.parametrize("dead", [[], [0, 1, 2], [5, 77, 130, 159], [*range(160)]])
@pytest.mark.parametrize("rows", [10, 400])
def test_dead_channels_and_few_rows(rows, dead):
    """A channel that no calibration text switches on has a row of zeros in H, and fewer samples
    than channels make it singular: a Cholesky fails, or fills the weight with NaN. And the weight
    of a tied embedding, or H, changed while it is quantised."""
    weight, x = torch.randn(16, 160), correlated(rows, 160, 20)
    x[:, dead] = 0
    H = x.t() @ x
    before = weight.clone(), H.clone()
    q, scales, zeros = gptq(weight, H, 4, 32)
    assert torch.equal(weight, before[0]) and torch.equal(H, before[1])
    assert q.isfinite().all() and q.min() >= 0 and q.max() <= 15
    alone = rounded(weight, scales, zeros, 4)
    assert torch.equal(q[:, dead], alone[:, dead])  # nothing moves there
    nearest = output_error(weight, H, 4, round_to_nearest(weight, 4, 32))
    gain = 1 if len(dead) == 160 else 4
    assert output_error(weight, H, 4, (q, scales, zeros)) * gain <= nearest


# --- Calibration ----------------------------------------------------------------------------------


@pytest.mark.slow
@torch.no_grad()
def test_calibration_beats_rounding():
    """H of the wrong Linear's inputs, of the plain model's rather than the quantised one's, or a
    calibration that is thrown away: then there is little gain or none. On what the bundled model
    itself writes: 5 samples are calibrated on, 3 compared; measured, rounding is 1.7 times as far
    from the plain model."""
    model = load_model(SHAKESPEARE, dtype=torch.float32)
    generator, cache = torch.Generator().manual_seed(0), StaticCache(model, 8, 512)
    text = torch.ones(8, 1, dtype=torch.int64)
    for at in range(511):
        positions, layers = cache.plan(at, at + 1)
        logits = model(text[:, -1:], positions, layers)[:, -1]
        text = torch.cat((text, logits.softmax(-1).multinomial(1, generator=generator)), 1)

    def log_probabilities(model):
        positions = torch.arange(512).expand(3, 512)
        return log_softmax(model(text[5:], positions), -1)

    plain, distance = log_probabilities(model), {}
    for name in ("rtn", "gptq"):
        model = load_model(SHAKESPEARE, dtype=torch.float32)
        if name == "gptq":
            calibrate(model, text[:5].flatten().tolist(), "int4", 128, ("lm_head",))
        else:
            quantize_model(model, "int4", 128, ("lm_head",))
        ours = log_probabilities(model)
        distance[name] = kl_div(ours, plain, log_target=True, reduction="none").sum(-1).mean()
    assert 0 < distance["gptq"] < 0.75 * distance["rtn"]


def tiny_text(n):
    return torch.randint(40, (n,), generator=torch.Generator().manual_seed(n)).tolist()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("skip", [(), ("lm_head", "layers.1.mlp.gate_up_proj")])
@pytest.mark.parametrize("changes", [TIED, {"architectures": ["Qwen2ForCausalLM"]}])
def test_calibrated_model(tmp_path, changes, skip, mode):
    """A name in `skip` quantised all the same; the parts of a fused Linear or a bias lost, so that
    the folder cannot be read again; hooks left behind; a tied embedding quantised along."""
    source, out = tiny_folder(tmp_path / "plain", **changes), tmp_path / "out"
    model = load_model(source)
    embedding = model.embed_tokens.weight.clone()
    calibrate(model, tiny_text(640), mode, 32, skip)
    assert torch.equal(model.embed_tokens.weight, embedding)
    assert {*linears(model)} == {*skip}
    for module in model.modules():
        assert not module._forward_pre_hooks
        if isinstance(module, QuantLinear):
            groups = 1 if mode == "int8" else module.in_features // 32
            assert module.scales.shape == (module.out_features, groups)
    out.mkdir()
    size = 32 if mode == "int4" else -1
    settings = {"quant_method": "kilolm", "bits": MODES[mode], "group_size": size}
    convert.write(model, source, out, settings)
    assert torch.equal(logits_of(load_model(out)), logits_of(model))


@pytest.mark.parametrize("window", [None, 5, "and other norms and ropes"])
def test_each_linear_is_calibrated_on_what_the_quantised_ones_before_it_give(
    tmp_path, monkeypatch, window
):
    """Inputs of the plain model, H of a neighbour, positions that do not start at 0, a window that
    is not the layer's own, text left out: H is compared with one from a plain forward of the model
    as it stands at that moment."""
    changes = {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": window}
    changes |= {"architectures": ["Qwen2ForCausalLM"]}
    if isinstance(window, str):
        model = copy.deepcopy(ways.case_of("sandwich")[0])
        monkeypatch.setattr(convert, "LENGTH", 64)
    else:
        model = load_model(tiny_folder(tmp_path, **changes))
        assert model.config.windows == (None, window)
    seen: list[str] = []
    ids = tiny_text(64 * 3)

    def checking(weight, H, bits, group_size):
        places = {path: model.get_submodule(path) for path in linears(model)}
        ((path, linear),) = [item for item in places.items() if item[1].weight is weight]
        inputs = []
        handle = linear.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
        tokens = torch.tensor(ids).view(3, 64)
        model(tokens, torch.arange(64).expand(3, 64))
        handle.remove()
        x = inputs[0].flatten(0, 1)
        torch.testing.assert_close(H, x.t() @ x, atol=1e-3, rtol=1e-4)
        seen.append(path)
        return round_to_nearest(weight, bits, group_size)

    monkeypatch.setattr(convert, "gptq", checking)
    calibrate(model, ids, "int4", 32)
    block = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
    layers = range(len(model.layers))
    assert seen == [f"layers.{i}.{name}" for i in layers for name in block] + ["lm_head"]


@pytest.mark.parametrize(("most", "n", "count"), [(128, 200, 3), (2, 640, 2), (4, 640, 4)])
def test_samples_are_spread_over_the_text(tmp_path, monkeypatch, most, n, count):
    """Only the beginning of a long text, or windows past its end."""
    model, windows = load_model(tiny_folder(tmp_path)), []
    monkeypatch.setattr(convert, "SAMPLES", most)
    model.embed_tokens.register_forward_pre_hook(
        lambda _, args: windows.extend(args[0].reshape(-1, 64).tolist())
    )
    ids = tiny_text(n)
    calibrate(model, ids, "int4", 32)
    assert len(windows) == count
    assert windows[0] == ids[:64] and windows[-1] == ids[-64:]
    assert all(any(ids[i : i + 64] == window for i in range(n)) for window in windows)


@pytest.mark.parametrize(
    ("n", "group_size", "message"),
    [(n, 32, f"{n} tokens, too short: 96 input .* at least 128") for n in (0, 10, 127)]
    + [(640, 64, "64 does not divide 96 input channels")],
)
def test_calibrate_refuses(tmp_path, n, group_size, message):
    """A singular H and weights fitted to a few words, without a word of warning; minutes of work
    before the Linear that does not fit the group size."""
    model = load_model(tiny_folder(tmp_path))  # 96 channels at most, windows of 64
    plain = logits_of(model)
    with pytest.raises(ValueError, match=message):
        calibrate(model, tiny_text(n), "int4", group_size)
    assert torch.equal(logits_of(model), plain) and len(linears(model)) == 9
    calibrate(model, tiny_text(128), "int4", 32)
    with pytest.raises(ValueError, match="quantised already"):
        calibrate(model, tiny_text(128), "int4", 32)


def test_the_command_line_calibrates(tmp_path, monkeypatch):
    """A text that is read, and not used."""

    class Letters:
        def __init__(self, checkpoint):
            assert checkpoint == source

        def encode(self, text):
            return [ord(letter) % 40 for letter in text]

    monkeypatch.setattr(convert, "Tokenizer", Letters)
    source, text = tiny_folder(tmp_path / "plain"), tmp_path / "text.txt"
    text.write_text("To be, or not to be, that is the question:\n" * 10)
    written = {}
    for method, more in {"rtn": [], "gptq": ["--method", "gptq", "--calibrate", text]}.items():
        words = ["--checkpoint", source, "--mode", "int4", "--group-size", 32, *more]
        assert convert.main([*map(str, words), "--out", str(tmp_path / method)]) == 0
        written[method] = load_file(tmp_path / method / "model.safetensors")
    assert written["gptq"].keys() == written["rtn"].keys()
    for name in (n for n in written["rtn"] if n.endswith("qweight")):
        assert not torch.equal(written["gptq"][name], written["rtn"][name])


# --- Folders of other tools -----------------------------------------------------------------------


def words(columns):
    """Lists of unsigned 32-bit integers -> (len, ...) int32, as two's complement."""
    return torch.tensor([[v - 2**32 if v >= 2**31 else v for v in row] for row in columns]).int()


def packed_down(q, bits):
    """GPTQ's qweight: (K, N) -> (K * bits / 32, N), channel k of a word at bit k * bits."""
    per, rows = 32 // bits, []
    for top in range(0, len(q), per):
        rows.append(
            [sum(q[top + i][n] << (bits * i) for i in range(per)) for n in range(len(q[0]))]
        )
    return words(rows)


def packed_across(q, bits, order=None):
    """GPTQ's qzeros and AWQ's tensors: (R, N) -> (R, N * bits / 32). In AWQ the value at place i of
    a word is that of output order[i]."""
    per = 32 // bits
    order = order or range(per)
    return words(
        [
            [
                sum(row[left + n] << (bits * i) for i, n in enumerate(order))
                for left in range(0, len(row), per)
            ]
            for row in q
        ]
    )


AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


def other_folder(
    folder, method="gptq", bits=4, group_size=32, desc_act=False, sym=False, v2=False,
    lm_head=False, g_idx=True, config=None, **changes,
):  # fmt: skip
    """A tiny folder of another tool, and the weights it stands for, by name."""
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
        if method == "gptq":
            tensors[f"{path}.qweight"] = packed_down(q.tolist(), bits)
            stored = zeros if v2 else (zeros - 1) % 2**bits
            tensors[f"{path}.qzeros"] = packed_across(stored.tolist(), bits)
            if g_idx:
                tensors[f"{path}.g_idx"] = groups.int()
        else:
            tensors[f"{path}.qweight"] = packed_across(q.tolist(), bits, AWQ_ORDER)
            tensors[f"{path}.qzeros"] = packed_across(zeros.tolist(), bits, AWQ_ORDER)
        tensors[f"{path}.scales"] = scales
    raw = json.loads((source / "config.json").read_text())
    raw["quantization_config"] = config or {
        "gptq": {
            "quant_method": "gptq", "bits": bits, "group_size": group_size, "sym": sym,
            "desc_act": desc_act, "damp_percent": 0.01,
            **({"checkpoint_format": "gptq_v2"} if v2 else {}),
        },
        "awq": {
            "quant_method": "awq", "bits": bits, "group_size": group_size, "version": "gemm",
            "zero_point": True, "modules_to_not_convert": None,
        },
    }[method]  # fmt: skip
    out = folder / "other"
    out.mkdir()
    (out / "config.json").write_text(json.dumps(raw))
    save_file(tensors, out / "model.safetensors")
    plain = load_file(source / "model.safetensors") | weights
    save_file(plain, source / "model.safetensors")
    return out, weights, source


def weight_of(linear):
    """What a Linear of any form multiplies by: its answer to each unit vector, without its bias."""
    bias, linear.bias = linear.bias, None
    weight = linear(torch.eye(linear.in_features)).t()
    linear.bias = bias
    return weight


def weights_of(model):
    """The weight of each Linear under its name in a checkpoint."""
    for path, module in model.named_modules():
        if not isinstance(module, QuantLinear | nn.Linear):
            continue
        weight, parts = weight_of(module), getattr(module, "parts", {})
        prefix = path.rpartition(".")[0]
        if parts:
            for part, rows in zip(parts, weight.split([*parts.values()]), strict=True):
                yield f"model.{prefix}.{part}.weight", rows
        else:
            yield f"{'' if path == 'lm_head' else 'model.'}{path}.weight", weight


FOLDERS = {
    "gptq": {},
    "gptq without g_idx": {"g_idx": False},
    "gptq sym": {"sym": True},
    "gptq v2": {"v2": True},
    "gptq v2 sym": {"v2": True, "sym": True},
    "gptq whole channels": {"group_size": -1},
    "gptq 8 bits": {"bits": 8},
    "gptq 8 bits lm_head": {"bits": 8, "lm_head": True},
    "gptq v2 under transformers' name": {
        "v2": True,
        "config": {"quant_method": "gptq", "bits": 4, "group_size": 32, "format": "gptq_v2"},
    },
    "gptq desc_act of one group": {
        "group_size": -1,
        "config": {"quant_method": "gptq", "bits": 4, "group_size": -1, "desc_act": True},
    },
    "gptq 8 bits v2": {"bits": 8, "v2": True},
    "gptq 8 bits whole channels": {"bits": 8, "group_size": -1},
    "gptq 8 bits sym whole channels": {"bits": 8, "group_size": -1, "sym": True},
    "gptq groups of 16": {"v2": True, "group_size": 16},
    "gptq lm_head": {"lm_head": True},
    "gptq bfloat16": {"torch_dtype": "bfloat16", "sym": True},
    "gptq tied": {"tie_word_embeddings": True},
    "gptq qwen2": {"architectures": ["Qwen2ForCausalLM"]},
    "awq": {"method": "awq"},
    "awq groups of 16": {"method": "awq", "group_size": 16},
    "awq whole channels": {"method": "awq", "group_size": -1},
    "awq lm_head": {"method": "awq", "lm_head": True},
    "awq qwen2": {"method": "awq", "architectures": ["Qwen2ForCausalLM"]},
    "awq, old names": {
        "method": "awq",
        "config": {"quant_method": "awq", "w_bit": 4, "q_group_size": 32, "version": "GEMM"},
    },
}


@pytest.mark.parametrize("name", FOLDERS)
def test_folders_of_other_tools(tmp_path, name):
    """Bits in another order, zero points less one or not, outputs interleaved or not, channels in
    the wrong group: all of it loads without an error, and then rambles."""
    folder, weights, source = other_folder(tmp_path, **FOLDERS[name])
    model = load_model(folder, dtype=torch.float32)
    plain = load_model(source, dtype=torch.float32)
    kept = 0 if FOLDERS[name].get("lm_head") else 1
    assert len(weights) == 7 * 2 + 1 - kept
    assert len(linears(model)) == kept
    found = dict(weights_of(model))
    assert len(found) == 15
    for path, weight in weights.items():
        assert torch.equal(found[path], weight), path
    theirs = logits_of(plain)
    assert theirs.std() > 0.3
    torch.testing.assert_close(logits_of(model), theirs, atol=1e-4, rtol=1e-4)
    assert is_tied(model) == ("tie_word_embeddings" in FOLDERS[name])
    names = {name for name, _ in named_tensors(model)}  # those of a folder of our own
    assert {"layers.0.self_attn.v_proj.zeros", "layers.1.mlp.up_proj.qweight"} <= names


def test_examples_of_packing():
    """The packers of this file, against the words that formats.py draws."""
    assert packed_down([[i] for i in range(1, 9)], 4).tolist() == [[0x87654321 - 2**32]]
    across = packed_across([[0, 1, 2, 3, 4, 5, 6, 7]], 4, AWQ_ORDER)
    assert across.tolist() == [[0x75316420]]


Q, DOWN = "model.layers.1.self_attn.q_proj", "model.layers.0.mlp.down_proj"


def put(name, change):
    """A change of one tensor."""
    return lambda tensors: tensors.update({name: change(tensors[name]).contiguous()})


def drop(name):
    return lambda tensors: tensors.pop(name)


DAMAGED = {
    "no qzeros": (drop(f"{Q}.qzeros"), r"q_proj\.zeros: missing"),
    "no scales": (drop(f"{DOWN}.scales"), r"down_proj\.scales: missing"),
    "no qweight": (drop(f"{DOWN}.qweight"), r"down_proj\.(weight|qweight): missing"),
    "half of q, k and v": (drop(f"{Q.replace('q_proj', 'v_proj')}.qweight"), r"v_proj\.qweight"),
    "short qweight": (put(f"{Q}.qweight", lambda t: t[:-1]), r"q_proj\.qweight: .* \(64, 32\)"),
    "deep qweight": (put(f"{Q}.qweight", lambda t: t[..., None]), r"q_proj\.qweight"),
    "flat qweight": (put(f"{Q}.qweight", lambda t: t.flatten()), r"q_proj\.qweight"),
    "turned scales": (put(f"{DOWN}.scales", lambda t: t.t()), r"down_proj\.scales: .* \(64, 3\)"),
    "narrow qzeros": (put(f"{Q}.qzeros", lambda t: t[:, 1:]), r"q_proj\.zeros: .* \(64, 2\)"),
    "floats": (put(f"{Q}.qweight", lambda t: t.float()), r"q_proj\.qweight: float"),
    "something else": (lambda t: t.update({f"{Q}.extra": torch.ones(2)}), r"q_proj\.extra"),
    "a bias": (lambda t: t.update({f"{Q}.bias": torch.ones(64)}), r"q_proj\.bias"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_folders(tmp_path, name):
    """A traceback from deep inside, or a model that rambles: what is wrong must be named."""
    damage, message = DAMAGED[name]
    folder, _, _ = other_folder(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    damage(tensors)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        load_model(folder)


@pytest.mark.parametrize("options", [{}, {"v2": True, "group_size": 16}, {"bits": 8}])
@pytest.mark.parametrize("said", [True, False])
def test_groups_of_other_than_neighbours_are_refused(tmp_path, options, said):
    """desc_act, which sorts channels by importance before it groups them: read as if its groups
    were of neighbours, the model rambles. What the file says of it does not matter, g_idx does."""
    folder, _, _ = other_folder(tmp_path, desc_act=True, **options)
    file = folder / "config.json"
    raw = json.loads(file.read_text())
    if not said:
        del raw["quantization_config"]["desc_act"]
    file.write_text(json.dumps(raw))
    with pytest.raises(CheckpointError, match=r"g_idx: the inputs are not grouped in order"):
        load_model(folder)


def test_an_order_that_nothing_tells(tmp_path):
    """desc_act, and no g_idx that says in which order."""
    folder, _, _ = other_folder(tmp_path, desc_act=True, g_idx=False)
    with pytest.raises(CheckpointError, match="desc_act True is not supported; supported: False"):
        load_model(folder)


def test_what_some_tools_write(tmp_path):
    """A bias of zeros for each Linear that has none, which vLLM skips too; a trivial g_idx for some
    of q, k and v, and none for the others: they are alike."""
    folder, weights, _ = other_folder(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    for name in weights:
        tensors[name.replace(".weight", ".bias")] = torch.zeros(len(weights[name]))
    del tensors[f"{Q}.g_idx"]
    save_file(tensors, folder / "model.safetensors")
    found = dict(weights_of(load_model(folder)))
    assert all(torch.equal(found[name], weight) for name, weight in weights.items())


@pytest.mark.slow
def test_a_loaded_folder_compiles(tmp_path):
    """A zero point that only the packed form mishandles."""
    folder, _, _ = other_folder(tmp_path, lm_head=True)
    chosen = []
    for compiled in (False, True):
        model = load_model(folder)
        if compiled:
            compile_model(model)
        params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
        sequence = Sequence([1, 2, 3, 4, 5, 6, 7], params, model.config)
        cache = StaticCache(model, 1, sequence.max_len)
        chosen.append([token.id for token in generate(model, sequence, cache)])
    assert chosen[0] == chosen[1] and len(set(chosen[0])) > 2


def test_shuffled_groups_that_no_setting_admits(tmp_path):
    """desc_act: false beside a shuffled g_idx (exllama#44): the weights were read as if their
    groups were neighbours. With one group of all channels there is nothing to shuffle."""
    folder, _, _ = other_folder(tmp_path, desc_act=True)
    raw = json.loads((folder / "config.json").read_text())
    raw["quantization_config"]["desc_act"] = False
    (folder / "config.json").write_text(json.dumps(raw))
    with pytest.raises(CheckpointError, match=r"g_idx: the inputs are not grouped in order"):
        load_model(folder)


AUTO_AWQ = {"zero_point": True, "q_group_size": 32, "w_bit": 4, "version": "GEMM"}


@pytest.mark.parametrize(
    ("method", "file", "stored"),
    [("gptq", "quantize_config.json", {"bits": 4, "group_size": 32, "desc_act": False}),
     ("awq", "quant_config.json", AUTO_AWQ)],
)  # fmt: skip
def test_settings_in_a_file_of_their_own(method, file, stored, tmp_path):
    """AutoGPTQ's or AutoAWQ's own file, which names no tool, was not read, and the model was one of
    missing tensors."""
    folder, _, _ = other_folder(tmp_path, method)
    want = logits_of(load_model(folder))
    raw = json.loads((folder / "config.json").read_text())
    del raw["quantization_config"]
    (folder / "config.json").write_text(json.dumps(raw))
    (folder / file).write_text(json.dumps(stored))
    assert torch.equal(logits_of(load_model(folder)), want)
    raw["quantization_config"] = {"quant_method": method, "bits": 4}
    (folder / "config.json").write_text(json.dumps(raw))  # the rest from the other file
    assert torch.equal(logits_of(load_model(folder)), want)
