"""The oracle: every family against `transformers` on tiny random models, then the oddities.

transformers initialises biases to 0, norms to 1 and matrices to almost nothing, which would hide a
missing bias, a missing norm and any mistake in attention: `randomise` draws all of them anew.
"""

import json
import subprocess
import sys
import types
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from conftest import ROOT
from safetensors.torch import load_file, save_file

import kv_cache
import model as model_module
from generate import generate
from kv_cache import StaticCache
from model import (
    Config,
    LayerCache,
    Transformer,
    apply_rope,
    attention,
    load_config,
    load_model,
    named_tensors,
    progress,
)  # fmt: skip
from sampling import SamplingParams, Sequence

T = 80  # tokens compared: a wrong rope layout shows only past about 32, a cache's buckets past 64
ATOL = 1e-4  # fp32, logits of standard deviation above 1
WINDOW = 8  # far shorter than T

SIZES = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
    "rms_norm_eps": 1e-3, "tie_word_embeddings": False,
}  # fmt: skip
# With head_dim 16 and theta 100, rope's 8 pairs make 2.5 to 0.05 turns within 16 tokens: some are
# kept, some blended, some divided. T is five times that context.
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 0.25, "high_freq_factor": 1.5,
    "original_max_position_embeddings": 16,
}  # fmt: skip
LINEAR = {"rope_type": "linear", "factor": 3.0}
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
SLIDING = {"use_sliding_window": True, "sliding_window": WINDOW, "num_hidden_layers": 3}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama2-mha": ("Llama", {"num_key_value_heads": 4}),
    "llama-gqa8": ("Llama", {"num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 4}),
    "llama-mqa": ("Llama", {"num_key_value_heads": 1}),
    "llama-head_dim": ("Llama", {"head_dim": 24}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-attention_bias": ("Llama", {"attention_bias": True}),
    "llama-theta": ("Llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 37.0}}),
    "llama3.1": ("Llama", {"head_dim": 16, "rope_parameters": {**LLAMA3, "rope_theta": 100.0}}),
    "llama3.2-tied": (
        "Llama",
        {
            "head_dim": 16,
            "rope_parameters": {**LLAMA3, "rope_theta": 100.0},
            "tie_word_embeddings": True,
        },
    ),
    "llama-linear": ("Llama", {"rope_parameters": {**LINEAR, "rope_theta": 100.0}}),
    "mistral-window": ("Mistral", {"sliding_window": WINDOW}),
    "mistral-null": ("Mistral", {"sliding_window": None}),
    "mistral-head_dim": ("Mistral", {"sliding_window": None, "head_dim": 20}),
    "qwen2": ("Qwen2", {}),
    "qwen2-tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-window-off": ("Qwen2", {"use_sliding_window": False, "sliding_window": WINDOW}),
    "qwen2-max_window_layers": ("Qwen2", {**SLIDING, "max_window_layers": 1}),
    "qwen2-layer_types": ("Qwen2", {**SLIDING, "layer_types": MIXED}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen3-tied-mqa": (
        "Qwen3",
        {"head_dim": 16, "num_key_value_heads": 1, "tie_word_embeddings": True},
    ),
    "qwen3-bias": ("Qwen3", {"head_dim": 16, "attention_bias": True}),
    "qwen3-max_window_layers": ("Qwen3", {**SLIDING, "head_dim": 16, "max_window_layers": 2}),
    "qwen3-layer_types": ("Qwen3", {**SLIDING, "head_dim": 16, "layer_types": MIXED}),
}


class Built(NamedTuple):
    """A checkpoint folder, the transformers model that wrote it, and what that model computes."""

    folder: Path
    hf: Any
    tokens: torch.Tensor  # (2, T)
    logits: torch.Tensor  # (2, T, V)


@torch.no_grad()
def randomise(hf) -> None:
    """Draw every parameter so that leaving it out, or using it wrongly, changes the logits."""
    for name, p in hf.named_parameters():
        if name.endswith("bias"):
            p.normal_(0, 0.5)
        elif p.ndim == 1:  # a norm's weight
            p.uniform_(0.5, 1.5)
        elif "embed_tokens" in name:
            p.normal_(0, 1)
        else:
            p.normal_(0, 1.5 * p.shape[1] ** -0.5)  # 1.5: attention is far from uniform


def build(case: str, folder: Path, **more: Any) -> Built:
    family, changes = CASES[case]
    torch.manual_seed(sum(map(ord, case)))
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **changes, **more})
    config._attn_implementation = "eager"  # the plainest form there is
    hf = getattr(transformers, f"{family}ForCausalLM")(config).float().eval()
    randomise(hf)
    hf.save_pretrained(folder)
    tokens = torch.randint(SIZES["vocab_size"], (2, T))
    return Built(folder, hf, tokens, hf_logits(hf, tokens))


@torch.no_grad()
def hf_logits(hf, tokens: torch.Tensor) -> torch.Tensor:
    return hf(tokens, use_cache=False).logits


@torch.no_grad()
def our_logits(model: Transformer, tokens: torch.Tensor) -> torch.Tensor:
    return model(tokens, torch.arange(tokens.shape[1]).expand_as(tokens))


def copy_with(built: Built, folder: Path, drop: tuple[str, ...] = (), **changes: Any) -> Path:
    """Copy a checkpoint, changing keys of config.json and dropping others."""
    for file in built.folder.glob("*.safetensors"):
        (folder / file.name).write_bytes(file.read_bytes())
    raw = json.loads((built.folder / "config.json").read_text()) | changes
    raw = {key: value for key, value in raw.items() if key not in drop}
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    """A second thread only slows tensors this small down, by far on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module", params=CASES)
def built(request, tmp_path_factory) -> Built:
    return build(request.param, tmp_path_factory.mktemp("case"))


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Built:
    return build("llama3.1", tmp_path_factory.mktemp("llama"))


# --- The oracle -----------------------------------------------------------------------------------


def test_logits_equal_transformers(built):
    """Rope layout and stretching, biases, q/k norm, window, head counts, head_dim, tying: a slip in
    any of them gives fluent nonsense and no error."""
    assert built.logits.std() > 0.5  # or the tolerance would mean nothing
    ours = our_logits(load_model(built.folder), built.tokens)
    torch.testing.assert_close(ours, built.logits, atol=ATOL, rtol=0)


def test_greedy_tokens_equal_transformers(built):
    """The loop and the cache, not only one forward: an off-by-one in positions shows here."""
    ids = built.tokens[0, : T - 32].tolist()
    model = load_model(built.folder)
    params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
    sequence = Sequence(ids, params, model.config)
    cache = StaticCache(model.config, 1, sequence.max_len, torch.float32)
    ours = [token.id for token in generate(model, sequence, cache)]
    theirs = list(ids)
    for _ in range(32):
        theirs.append(int(hf_logits(built.hf, torch.tensor([theirs]))[0, -1].argmax()))
    assert ours == theirs[T - 32 :]


@pytest.mark.parametrize("step", [1, 7])
@torch.no_grad()
def test_prefill_in_one_go_equals_step_by_step(built, step):
    """A cache that loses, shifts or shows too many positions; a window that is wrong when queries
    and keys are not the same tokens."""
    model = load_model(built.folder)
    cache = StaticCache(model.config, 2, T, torch.float32)
    parts = []
    for start in range(0, T, step):
        end = min(start + step, T)
        positions = torch.arange(start, end).expand(2, -1)
        parts.append(model(built.tokens[:, start:end], positions, cache.upto(end)))
    whole = our_logits(model, built.tokens)
    torch.testing.assert_close(torch.cat(parts, 1), whole, atol=ATOL, rtol=0)


@pytest.mark.parametrize("case", ["mistral-window", "qwen2-max_window_layers", "qwen3-layer_types"])
def test_window_is_per_layer_and_matters(case, tmp_path):
    """A window that is read but never applied, or applied to the wrong layers."""
    built = build(case, tmp_path)
    config = load_config(tmp_path)
    sliding = {
        "mistral-window": (WINDOW, WINDOW),
        "qwen2-max_window_layers": (None, WINDOW, WINDOW),
        "qwen3-layer_types": (WINDOW, None, WINDOW),
    }
    assert config.windows == sliding[case]
    model = load_model(tmp_path)
    for layer in model.layers:
        layer.self_attn.window = None
    assert (our_logits(model, built.tokens) - built.logits).abs().max() > 0.1


# --- Spellings of config.json ---------------------------------------------------------------------


def _older(theta: float, rope: dict[str, Any], key: str = "rope_type") -> dict[str, Any]:
    scaling = {key if name == "rope_type" else name: value for name, value in rope.items()}
    return {"rope_theta": theta, "rope_scaling": scaling or None}


def _newer(theta: float, rope: dict[str, Any]) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", **rope, "rope_theta": theta}}


SPELLINGS = {
    "newer": _newer,
    "newer-null-beside-it": lambda theta, rope: {**_newer(theta, rope), "rope_scaling": None},
    "newer-theta-outside": lambda theta, rope: {
        "rope_theta": theta,
        "rope_parameters": {"rope_type": "default", **rope},
    },
    "older": _older,
    "older-type": lambda theta, rope: _older(theta, rope, "type"),
    "older-null-beside-it": lambda theta, rope: {**_older(theta, rope), "rope_parameters": None},
}


@pytest.mark.parametrize("rope", [{}, LINEAR, LLAMA3], ids=["plain", "linear", "llama3"])
def test_spellings_of_rope_agree(rope, tmp_path):
    """A spelling that is not read falls back to theta 10000 without scaling, and says nothing."""
    theta = 100.0
    built = build(
        "llama-head_dim", tmp_path, rope_parameters=_newer(theta, rope)["rope_parameters"]
    )
    for name, spell in SPELLINGS.items():
        folder = tmp_path / name
        folder.mkdir()
        copy_with(built, folder, drop=(), **{"rope_parameters": None, **spell(theta, rope)})
        ours = our_logits(load_model(folder), built.tokens)
        torch.testing.assert_close(ours, built.logits, atol=ATOL, rtol=0, msg=name)
    copy_with(built, tmp_path / "older", drop=("rope_parameters",))
    plain = our_logits(load_model(tmp_path / "older"), built.tokens)
    assert (plain - built.logits).abs().max() > 0.1  # the settings above did matter


def test_rope_scaling_beside_rope_parameters_is_read_as_transformers_does(llama, tmp_path):
    """Following an older model card, a user adds `rope_scaling` to a newer file that already says
    `rope_parameters`: transformers obeys it, so ignoring it would differ silently."""
    plain = {"rope_type": "default", "rope_theta": 100.0}
    folder = copy_with(llama, tmp_path, rope_parameters=plain, rope_scaling=LINEAR, rope_theta=100)
    hf = transformers.LlamaForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    ours = our_logits(load_model(folder), llama.tokens)
    torch.testing.assert_close(ours, hf_logits(hf, llama.tokens), atol=ATOL, rtol=0)


def test_keys_that_old_files_leave_out(tmp_path):
    """Llama 2's config.json has no head_dim, no biases and, in MHA, may have no kv heads."""
    built = build("llama2-mha", tmp_path)
    folder = tmp_path / "old"
    folder.mkdir()
    drop = ("head_dim", "num_key_value_heads", "attention_bias", "mlp_bias", "dtype",
            "rope_parameters", "tie_word_embeddings", "layer_types")  # fmt: skip
    model = load_model(copy_with(built, folder, drop))
    torch.testing.assert_close(our_logits(model, built.tokens), built.logits, atol=ATOL, rtol=0)
    copy_with(built, folder, head_dim=None, num_key_value_heads=None)  # null means the same
    assert load_config(folder) == load_config(built.folder)


@pytest.mark.parametrize("case", ["qwen2-max_window_layers", "qwen3-max_window_layers"])
def test_qwen_files_older_than_layer_types(case, tmp_path):
    """They say max_window_layers only, and carry a sliding_window that use_sliding_window turns
    off: read for what they seem to say, each gives a model that forgets."""
    built = build(case, tmp_path)
    folder = tmp_path / "old"
    folder.mkdir()
    model = load_model(copy_with(built, folder, drop=("layer_types",)))
    torch.testing.assert_close(our_logits(model, built.tokens), built.logits, atol=ATOL, rtol=0)
    copy_with(built, folder, drop=("layer_types", "max_window_layers"))  # 28, of 3
    assert set(load_config(folder).windows) <= {None}
    copy_with(built, folder, drop=("layer_types",), use_sliding_window=False)
    assert set(load_config(folder).windows) <= {None}
    copy_with(built, folder, drop=("layer_types", "use_sliding_window"))  # off, too
    assert set(load_config(folder).windows) <= {None}


def test_what_a_family_leaves_out(tmp_path):
    """Each family has its own default for a missing key, and Llama's is wrong for the others."""

    def config(**changes: Any) -> Config:
        raw = {key: SIZES[key] for key in list(SIZES)[:5]} | changes
        (tmp_path / "config.json").write_text(json.dumps(raw))
        return load_config(tmp_path)

    mistral = config(architectures=["MistralForCausalLM"], num_attention_heads=16)
    assert (mistral.num_key_value_heads, mistral.windows) == (8, (4096, 4096))
    qwen3 = config(architectures=["Qwen3ForCausalLM"], num_key_value_heads=2)
    assert qwen3.head_dim == 128


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16"])
def test_dtype_is_read_under_both_keys(llama, tmp_path, key, name):
    """transformers 5 renamed `torch_dtype` to `dtype`; unread, a bf16 model doubles in memory."""
    folder = copy_with(llama, tmp_path, drop=("dtype", "torch_dtype"))
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {key: name}))
    assert load_config(folder).dtype is getattr(torch, name)


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ([7, 8, 9], 1, (7, 8, 9)),  # Llama 3.1 Instruct: end of text, of turn, of message
        (7, 1, (7,)),
        (0, 5, (0,)),  # id 0 is an id, not a missing one
        (None, 1, (1,)),
        (None, [1, 2], (1, 2)),
        ("absent", 1, (1,)),
        ("no file", [1, 2], (1, 2)),
        ("no file", 0, (0,)),
        ([5], None, (5,)),
        (None, None, ()),
        ("no file", None, ()),
    ],
)
def test_eos_ids(llama, tmp_path, generation, config, expected):
    """Only the first EOS id honoured, or config.json's where generation_config.json says more: the
    model then runs past the end of its turn."""
    folder = copy_with(llama, tmp_path, eos_token_id=config)
    if generation != "no file":
        content = {} if generation == "absent" else {"eos_token_id": generation}
        (folder / "generation_config.json").write_text(json.dumps(content))
    assert load_config(folder).eos_ids == expected


# --- Files ----------------------------------------------------------------------------------------


def test_sharded_checkpoint(llama, tmp_path):
    """Only the first shard read, or a shard's tensors under another's name."""
    llama.hf.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    assert not (tmp_path / "model.safetensors").exists()
    ours = our_logits(load_model(tmp_path), llama.tokens)
    torch.testing.assert_close(ours, llama.logits, atol=ATOL, rtol=0)


def test_names_without_the_model_prefix(llama, tmp_path):
    """A checkpoint saved from the base model names `layers.0...`, not `model.layers.0...`."""
    folder = copy_with(llama, tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors")
    assert torch.equal(our_logits(load_model(folder), llama.tokens),
                       our_logits(load_model(llama.folder), llama.tokens))  # fmt: skip


def test_stored_rope_frequencies_are_ignored(llama, tmp_path):
    """Llama 1 and 2 files carry rotary_emb.inv_freq: refused as unexpected, or, worse, used."""
    folder = copy_with(llama, tmp_path)
    tensors = load_file(folder / "model.safetensors")
    for layer in range(SIZES["num_hidden_layers"]):
        tensors[f"model.layers.{layer}.self_attn.rotary_emb.inv_freq"] = torch.full((8,), 9.0)
    save_file(tensors, folder / "model.safetensors")
    ours = our_logits(load_model(folder), llama.tokens)
    torch.testing.assert_close(ours, llama.logits, atol=ATOL, rtol=0)


def test_tied_checkpoint_that_stores_lm_head_too(tmp_path):
    """Some tied files hold the matrix twice. As in transformers the embedding wins, and the two are
    one parameter: loaded apart they would cost V * D more."""
    built = build("llama-tied", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert "lm_head.weight" not in tensors
    tensors["lm_head.weight"] = torch.zeros_like(tensors["model.embed_tokens.weight"])
    save_file(tensors, tmp_path / "model.safetensors")
    model = load_model(tmp_path)
    assert model.lm_head.weight is model.embed_tokens.weight
    torch.testing.assert_close(our_logits(model, built.tokens), built.logits, atol=ATOL, rtol=0)


def test_untied_matrices_stay_apart(llama):
    """An untied model whose output matrix is replaced by its embedding."""
    model = load_model(llama.folder)
    assert not torch.equal(model.lm_head.weight, model.embed_tokens.weight)


def test_bfloat16_is_kept_unless_another_dtype_is_asked_for(tmp_path):
    """A bf16 checkpoint loaded as fp32 takes twice the memory; rope's frequencies in bf16 let
    positions past 256 collide."""
    built = build("qwen3", tmp_path / "fp32")
    built.hf.bfloat16().save_pretrained(tmp_path / "bf16")
    stored = load_file(tmp_path / "bf16" / "model.safetensors")
    for asked, dtype in [(None, torch.bfloat16), (torch.float32, torch.float32),
                         (torch.float16, torch.float16)]:  # fmt: skip
        model = load_model(tmp_path / "bf16", dtype=asked)
        assert model.inv_freq.dtype is torch.float32
        ours = dict(named_tensors(model))
        assert sorted(ours) == sorted(name.removeprefix("model.") for name in stored)
        for name, tensor in stored.items():
            assert torch.equal(ours[name.removeprefix("model.")], tensor.to(dtype)), name
        assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    logits = our_logits(load_model(tmp_path / "bf16"), built.tokens)
    assert logits.dtype is torch.bfloat16
    error = (logits.float() - built.logits).abs().mean() / built.logits.std()
    assert error < 0.1, error  # measured 0.02; a mistake costs 1


def test_loaded_model_is_ready_to_run(llama):
    """Weights that want gradients keep every activation alive; some left on the meta device fail
    only at the first forward."""
    model = load_model(str(llama.folder))  # a str is a path too
    assert not model.training
    for tensor in (*model.parameters(), *model.buffers()):
        assert not tensor.requires_grad
        assert tensor.device.type == "cpu"


MEASURE = """
import json, sys, model

def status(key):  # bytes
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key + ":"))

model.load_model(sys.argv[1])
before = status("VmRSS")
big = model.load_model(sys.argv[2])
weights = sum(p.nbytes for p in big.parameters())
print(json.dumps({"growth": status("VmHWM") - before, "weights": weights}))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_peak_memory_of_loading_is_the_weights(llama, tmp_path):
    """State dict plus model, or a mapped file plus its copy: twice the weights, so that a model
    that would fit does not load.

    Read as VmHWM, the same number as ru_maxrss but of this process alone: a child starts with its
    parent's ru_maxrss, and pytest with torch in it is larger than what is measured.
    """
    config = transformers.LlamaConfig(**SIZES | {
        "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 13, "head_dim": 128,
        "num_key_value_heads": 4, "architectures": ["LlamaForCausalLM"], "dtype": "bfloat16",
    })  # fmt: skip
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        stored = transformers.LlamaForCausalLM(config).state_dict()
    noise = torch.randn(2**20).bfloat16()  # the largest tensor has 2**20 elements
    tensors = {n: noise[: t.numel()].view(t.shape).clone() for n, t in stored.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    del tensors
    command = [sys.executable, "-c", MEASURE, str(llama.folder), str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen["weights"] > 100e6
    assert 0.9 * seen["weights"] < seen["growth"] <= 1.2 * seen["weights"], seen


# --- The parts ------------------------------------------------------------------------------------


@torch.no_grad()
def test_nothing_is_written_in_place(built):
    """RMSNorm that writes into its input corrupts the residual stream in fp32, where its cast makes
    no copy (nano-vllm#170)."""
    model = load_model(built.folder)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    inputs: list[list[torch.Tensor]] = []  # of the modules being run, outermost first
    seen = set()

    def before(_: torch.nn.Module, args: tuple[Any, ...]) -> None:
        inputs.append([arg.clone() for arg in args if isinstance(arg, torch.Tensor)])

    def after(module: torch.nn.Module, args: tuple[Any, ...], _: torch.Tensor) -> None:
        now = [arg for arg in args if isinstance(arg, torch.Tensor)]
        assert all(torch.equal(a, b) for a, b in zip(inputs.pop(), now, strict=True)), module
        seen.add(type(module).__name__)

    for module in model.modules():
        module.register_forward_pre_hook(before)
        module.register_forward_hook(after)
    assert torch.equal(our_logits(model, built.tokens), our_logits(model, built.tokens))
    assert {"Transformer", "Block", "Attention", "MLP", "RMSNorm"} <= seen
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, weights[name]), name


@pytest.mark.parametrize("window", [None, 3])
def test_attention_and_rope_write_into_nothing(window):
    """As above, for the parts that are no modules: a mask or a scale applied in place."""
    q, k, v = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 8)
    positions = torch.arange(5).expand(2, -1).clone()
    cos, sin = torch.randn(2, 1, 5, 4), torch.randn(2, 1, 5, 4)
    given = q, k, v, positions, cos, sin
    copies = [tensor.clone() for tensor in given]
    LayerCache().attend(q, k, v, positions, window)
    apply_rope(q, cos, sin)
    assert all(torch.equal(a, b) for a, b in zip(copies, given, strict=True))


def test_rope_is_half_split():
    """The interleaved layout of Llama's own release (llama2.c#286). The docstring's example."""
    cos, sin = torch.tensor([0.0, 1.0]), torch.tensor([1.0, 0.0])  # a quarter turn; none
    x = torch.tensor([1.0, 2.0, 3.0, 4.0])
    assert apply_rope(x, cos, sin).tolist() == [-3, 2, 1, 4]


@torch.no_grad()
def test_only_relative_positions_matter(llama):
    """Frequencies or angles in low precision: far from 0 neighbours get the same angle."""
    model = load_model(llama.folder)
    positions = torch.arange(T).expand(2, -1)
    far = model(llama.tokens, positions + 1000)
    torch.testing.assert_close(far, llama.logits, atol=5e-3, rtol=0)


@torch.no_grad()
def test_select_gives_those_rows_only(llama):
    """`select` counts over B * T in row-major order: (0, T - 1), (1, 0) and (1, 3) here."""
    model = load_model(llama.folder)
    positions = torch.arange(T).expand(2, -1)
    some = model(llama.tokens, positions, select=torch.tensor([T - 1, T, T + 3]))
    rows = torch.stack([llama.logits[0, T - 1], llama.logits[1, 0], llama.logits[1, 3]])
    torch.testing.assert_close(some, rows, atol=ATOL, rtol=0)


CACHED = Config(
    vocab_size=16, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, head_dim=8,
)  # fmt: skip


@pytest.mark.parametrize("window", [None, 3])
def test_rows_at_different_positions_are_as_alone(window):
    """A batch whose rows are at different lengths: one row's position used for all, or keys of a
    longer neighbour, or what is left of an earlier sequence, seen through the mask."""
    starts, capacity = [1, 5, 62], 70  # the last one gets past 64, where views grow
    together = StaticCache(CACHED, len(starts), capacity, torch.float32)
    alone = [StaticCache(CACHED, 1, capacity, torch.float32) for _ in starts]

    def draw(heads: int, n: int) -> torch.Tensor:
        return torch.randn(1, heads, n, CACHED.head_dim)

    for layer in range(CACHED.num_hidden_layers):  # prefill: each row alone, and all together
        k, v = (50 * torch.randn(len(starts), 2, capacity, CACHED.head_dim) for _ in "kv")
        for b, start in enumerate(starts):  # past its own start a row holds large rubbish
            k[b, :, :start], v[b, :, :start] = draw(2, start)[0], draw(2, start)[0]
            row = (k[b : b + 1, :, :start], v[b : b + 1, :, :start], torch.arange(start)[None])
            alone[b].upto(start).layers[layer].attend(draw(4, start), *row, window)
        positions = torch.arange(capacity).expand(len(starts), -1)
        q = torch.cat([draw(4, capacity) for _ in starts])
        together.upto(capacity).layers[layer].attend(q, k, v, positions, window)
    for n in (1, 2, 2):  # then decode together, a token or two at a time
        rows = [(draw(4, n), draw(2, n), draw(2, n), torch.arange(s, s + n)[None]) for s in starts]
        batch = [torch.cat(parts) for parts in zip(*rows, strict=True)]
        view = together.upto(max(starts) + n)
        for layer in range(CACHED.num_hidden_layers):
            got = view.layers[layer].attend(*batch, window)
            for b, row in enumerate(rows):
                expected = alone[b].upto(starts[b] + n).layers[layer].attend(*row, window)
                torch.testing.assert_close(got[b : b + 1], expected)
        starts = [start + n for start in starts]


def test_rolling_back_needs_no_clearing(llama):
    """Speculation rejects tokens by going on from an earlier position: stale keys must not show."""
    model = load_model(llama.folder)
    cache = StaticCache(model.config, 1, T, torch.float32)
    with torch.no_grad():
        model(llama.tokens[1:], torch.arange(T)[None], cache)  # another text, to the full length
        parts = [
            model(llama.tokens[:1, s : s + 16], torch.arange(s, s + 16)[None], cache)
            for s in range(0, T, 16)
        ]
    torch.testing.assert_close(torch.cat(parts, 1), llama.logits[:1], atol=ATOL, rtol=0)


@pytest.mark.parametrize("length", [1, 63, 64, 65, 300, 1000])
def test_upto_reads_little_more_than_there_is(monkeypatch, length):
    """A step of a short sequence that pays for the cache's whole capacity, hidden by the mask."""
    seen = []

    def spy(q, k, v, q_pos, k_pos, window):
        seen.append(k.shape[2])
        return attention(q, k, v, q_pos, k_pos, window)

    monkeypatch.setattr(kv_cache, "attention", spy)
    slab = StaticCache(CACHED, 1, 1000, torch.float32).upto(length).layers[0]
    q, k, v = torch.randn(1, 4, 1, 8), torch.randn(1, 2, 1, 8), torch.randn(1, 2, 1, 8)
    slab.attend(q, k, v, torch.tensor([[length - 1]]), None)
    assert length <= seen[0] < length + 128


def test_upto_says_both_numbers():
    """An overrun that shows as an index error deep inside, or is not seen at all."""
    cache = StaticCache(CACHED, 1, 8, torch.float32)
    cache.upto(8)
    with pytest.raises(ValueError, match=r"\b9\b.*\b8\b.*--max-seq-len"):
        cache.upto(9)


# --- Progress -------------------------------------------------------------------------------------


def clock(monkeypatch, step: float) -> None:
    """Let each look at model.py's clock find `step` seconds more gone."""
    now = iter(range(10**6))
    fake = types.SimpleNamespace(monotonic=lambda: next(now) * step)
    monkeypatch.setattr(model_module, "time", fake)


def test_progress_shows_after_a_second(monkeypatch, capsys):
    """A bar on stdout would end in the generated text; one from the start would flicker."""
    clock(monkeypatch, 0.6)
    assert list(progress("abcd", "loading x")) == list("abcd")
    out, err = capsys.readouterr()
    shown = err.removesuffix("\n").split("\r")
    assert out == shown[0] == ""
    assert [part.split()[-4] for part in shown[1:]] == ["2/4", "3/4", "4/4"]  # 1/4 came after 0.6 s
    assert shown[1].startswith(f"loading x [{'#' * 12}{' ' * 12}] 2/4")
    assert "1 s left" in shown[1]  # 1.2 s for two, two to go
    assert "0 s left" in shown[3]
    assert f"[{'#' * 24}]" in shown[3]
    assert err.endswith("\n")  # or the next line would be written over the bar
    assert err.count("\n") == 1


def test_progress_takes_a_total(monkeypatch, capsys):
    """Something without a length."""
    clock(monkeypatch, 2)
    assert list(progress(iter("ab"), "working", total=2)) == ["a", "b"]
    assert "2/2" in capsys.readouterr().err


def test_progress_of_something_quick_is_silent(monkeypatch, capsys):
    """Noise on every start of a small model; nothing to do must not divide by zero."""
    clock(monkeypatch, 0.01)
    assert list(progress(list(range(50)), "loading x")) == list(range(50))
    assert list(progress([], "loading x")) == []
    assert capsys.readouterr() == ("", "")


def test_loading_shows_progress(llama, monkeypatch, capsys):
    """A long silence while a large checkpoint loads."""
    clock(monkeypatch, 0.5)
    load_model(llama.folder)
    out, err = capsys.readouterr()
    assert out == ""
    assert f"loading {llama.folder.name} [" in err
