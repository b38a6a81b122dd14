"""Damaged checkpoints: each must end in one CheckpointError that names what is wrong.

Never another exception, never a hang or a machine out of memory, never a quiet load of something
else, and never a line of code run from a file. Each test starts from one valid checkpoint and
spoils it in one way.
"""

import contextlib
import json
import math
import os
import pickle
import re
import shutil
import signal
import struct
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from model import CheckpointError, Transformer, load_model

RAW = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 64,
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "hidden_act": "silu",
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "rope_scaling": None, "eos_token_id": 2,
    "tie_word_embeddings": False, "torch_dtype": "float32",
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
NORM = "model.norm.weight"
UP = "model.layers.1.mlp.up_proj.weight"
MISSING = object()
BIG = 10**400  # JSON can hold it, a float cannot
SECONDS = 30  # no test here needs one
MEMORY = 4 * 2**30  # bytes beyond what the process has: far more than any test here needs

Corrupt = Callable[[Path], Any]


@pytest.fixture(scope="module", autouse=True)
def _bounded():
    """Turn filling the memory into a MemoryError, in this process and at once."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    if sys.platform != "linux":
        yield
    else:
        import resource

        pages = int(Path("/proc/self/statm").read_text().split()[0])
        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        limit = pages * resource.getpagesize() + MEMORY
        if soft != resource.RLIM_INFINITY:
            limit = min(limit, soft)
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
        yield
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _timed():
    """Turn a hang into a failure."""
    if not hasattr(signal, "SIGALRM"):
        yield
        return

    def fail(*_: Any) -> None:
        pytest.fail(f"still loading after {SECONDS} s")

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(SECONDS)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def stored_shapes() -> dict[str, tuple[int, ...]]:
    """What a checkpoint of RAW's sizes holds; spelt out, so as not to ask the code under test."""
    D, V, F = RAW["hidden_size"], RAW["vocab_size"], RAW["intermediate_size"]
    H, N, K = RAW["head_dim"], RAW["num_attention_heads"], RAW["num_key_value_heads"]
    shapes = {
        "self_attn.q_proj": (N * H, D), "self_attn.k_proj": (K * H, D),
        "self_attn.v_proj": (K * H, D), "self_attn.o_proj": (D, N * H),
        "mlp.gate_proj": (F, D), "mlp.up_proj": (F, D), "mlp.down_proj": (D, F),
        "input_layernorm": (D,), "post_attention_layernorm": (D,),
    }  # fmt: skip
    layers = {
        f"model.layers.{layer}.{name}.weight": shape
        for layer in range(RAW["num_hidden_layers"])
        for name, shape in shapes.items()
    }
    top = {"model.embed_tokens.weight": (V, D), NORM: (D,), "lm_head.weight": (V, D)}
    return top | layers


@pytest.fixture(scope="module")
def valid(tmp_path_factory) -> Path:
    """The valid checkpoint; not to be changed."""
    folder = tmp_path_factory.mktemp("valid")
    (folder / "config.json").write_text(json.dumps(RAW))
    tensors = {name: torch.randn(shape) * 0.1 for name, shape in stored_shapes().items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture
def folder(valid, tmp_path) -> Path:
    """A copy of the valid checkpoint, to spoil."""
    shutil.copytree(valid, tmp_path / "c")
    return tmp_path / "c"


def refused(folder: Path, *patterns: str) -> str:
    """Load, expecting a CheckpointError whose message, less the folder's path, has all patterns."""
    with pytest.raises(CheckpointError) as caught:
        load_model(folder)
    message = str(caught.value).replace(str(folder), "")  # pytest puts the test's name in the path
    for pattern in patterns:
        assert re.search(pattern, message), f"{pattern!r} is not in: {message}"
    return message


def runs(model: Transformer) -> None:
    """What was loaded must also run, or it was only refused too late."""
    with torch.no_grad():
        model(torch.tensor([[0, 1, 2]]), torch.arange(3)[None])


def params(cases: dict[str, tuple[Any, ...]]) -> list[Any]:
    return [pytest.param(*values, id=name) for name, values in cases.items()]


def test_the_valid_checkpoint_loads(folder):
    """Were it refused, every test below would pass for nothing."""
    runs(load_model(folder))
    shard(folder)
    runs(load_model(folder))


# --- config.json ----------------------------------------------------------------------------------


def edit(**changes: Any) -> Corrupt:
    """Change keys of config.json, or delete those that are MISSING."""

    def corrupt(folder: Path) -> None:
        raw = json.loads((folder / "config.json").read_text()) | changes
        raw = {key: value for key, value in raw.items() if value is not MISSING}
        (folder / "config.json").write_text(json.dumps(raw))

    return corrupt


def rewrite(name: str, content: bytes | str) -> Corrupt:
    data = content.encode() if isinstance(content, str) else content
    return lambda folder: (folder / name).write_bytes(data)


def unlink(*names: str) -> Corrupt:
    return lambda folder: [(folder / name).unlink() for name in names]


def to_directory(name: str) -> Corrupt:
    def corrupt(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).mkdir()

    return corrupt


JSON = {
    "broken": ('{"hidden_size": 32,',),
    "empty": ("",),
    "list": ("[1, 2]",),
    "string": ('"LlamaForCausalLM"',),
    "null": ("null",),
    "deep": ("[" * 200_000,),  # RecursionError
    "deep-object": ('{"a":' * 200_000,),
    "not-utf-8": (b'{"architectures": ["\xff\xfe"]}',),
    "utf-16": ("{}".encode("utf-16"),),
    "bom": (b"\xef\xbb\xbf{}",),
    "5000-digits": ('{"vocab_size": ' + "9" * 5000 + "}",),
    "binary": (bytes(range(256)),),
}


@pytest.mark.parametrize("content", params(JSON))
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_unreadable_json(folder, name, content):
    """json.loads raises four kinds of error, and returns things that are no object."""
    rewrite(name, content)(folder)
    refused(folder, rf"/{name}: (not readable as JSON|holds a \w+, not an object)")


@pytest.mark.parametrize("corrupt", [unlink("config.json"), to_directory("config.json")])
def test_no_config(folder, corrupt):
    """An OSError of the file, not of ours."""
    corrupt(folder)
    refused(folder, "/config.json")


def test_no_folder(folder):
    """A mistyped --checkpoint, or the weights' own path given for the folder's."""
    refused(folder / "typo", "/config.json")
    refused(folder / "model.safetensors", "/config.json")


ARCHITECTURES = {
    "missing": (MISSING, "none named"),
    "null": (None, "none named"),
    "empty": ([], "none named"),
    "unsupported": (["GPT2LMHeadModel"], "GPT2LMHeadModel is not supported.*LlamaForCausalLM"),
    "string": ("LlamaForCausalLM", "architectures"),
    "number": (5, "architectures"),
    "object": ({"a": 1}, "architectures"),
    "nested": ([["LlamaForCausalLM"]], "architectures"),
    "number-inside": ([5], r"\b5\b"),
}


@pytest.mark.parametrize(("value", "pattern"), params(ARCHITECTURES))
def test_architectures(folder, value, pattern):
    """A family that runs under another's rules, or an unhashable value in a dict lookup."""
    edit(architectures=value)(folder)
    refused(folder, pattern)


REQUIRED = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
)  # fmt: skip
OPTIONAL = ("num_key_value_heads", "head_dim", "max_position_embeddings")
SENSELESS = {
    "negative": -1, "zero": 0, "string": "8", "float": 8.0, "true": True, "false": False,
    "nan": math.nan, "huge": 10**12, "beyond-int64": 2**70, "beyond-float": BIG, "list": [],
    "object": {"a": 1},
}  # fmt: skip


@pytest.mark.parametrize("value", SENSELESS.values(), ids=SENSELESS)
@pytest.mark.parametrize("name", REQUIRED + OPTIONAL)
def test_senseless_size(folder, name, value):
    """`raw.get(name) or default` takes 0 and [] for "not given"; True is an int in Python; a size
    of 10**12 fills the memory before any tensor is looked at."""
    edit(**{name: value})(folder)
    refused(folder, name)


@pytest.mark.parametrize("value", [MISSING, None], ids=["missing", "null"])
@pytest.mark.parametrize("name", REQUIRED)
def test_missing_size(folder, name, value):
    """A bare KeyError."""
    edit(**{name: value})(folder)
    refused(folder, name)


@pytest.mark.parametrize("value", [0, -4, "32", None, 32.5], ids=repr)
@pytest.mark.parametrize("name", ["hidden_size", "num_attention_heads"])
def test_senseless_size_where_head_dim_is_derived(folder, name, value):
    """Llama 2's config.json has no head_dim: D // N divides by zero, or a string, before either is
    checked, and the message is Python's own."""
    edit(head_dim=MISSING, **{name: value})(folder)
    refused(folder, name)


FAMILIES = {
    "llama": {},
    "mistral": {"architectures": ["MistralForCausalLM"]},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True,
              "sliding_window": 8},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "use_sliding_window": True,
              "sliding_window": 8, "max_window_layers": 10**9},
}  # fmt: skip


@pytest.mark.parametrize("layers", [1025, 10**9, 10**12, 2**62, 2**70])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_billion_layers(folder, family, layers):
    """A list with an entry per layer, made before the count is checked: 8 GB, then MemoryError."""
    edit(**FAMILIES[family], num_hidden_layers=layers)(folder)
    refused(folder, "num_hidden_layers")


def test_sizes_whose_product_overflows(folder):
    """Each size is within its bound, but a matrix of them has more bytes than int64 can count."""
    edit(hidden_size=2**24, num_attention_heads=2**24, head_dim=2**24)(folder)
    refused(folder, "head|size|large")


CONFIG = {
    "heads-not-divisible": (edit(num_key_value_heads=3), "4 attention heads.* 3 key-value heads"),
    "more-kv-heads-than-heads": (edit(num_key_value_heads=8), "4 attention.* 8 key-value heads"),
    "odd-head_dim": (edit(head_dim=7), "head_dim must be even.*7"),
    "hidden_act-gelu": (edit(hidden_act="gelu"), "hidden_act 'gelu'"),
    "hidden_act-null": (edit(hidden_act=None), "hidden_act"),
    "hidden_act-list": (edit(hidden_act=["silu"]), "hidden_act"),
    "partial_rotary_factor": (edit(partial_rotary_factor=0.5), "partial_rotary_factor 0.5"),
    "partial_rotary_factor-inside": (
        edit(rope_parameters={"rope_type": "default", "partial_rotary_factor": 0.25}),
        "partial_rotary_factor 0.25",
    ),
    "torch_dtype-float64": (edit(torch_dtype="float64"), "dtype 'float64'.*bfloat16"),
    "dtype-float8": (edit(dtype="float8_e4m3fn"), "dtype 'float8_e4m3fn'"),
    "dtype-number": (edit(dtype=16), "dtype 16"),
    "mlp_bias-string": (edit(mlp_bias="yes"), "mlp_bias.*'yes'"),
    "mlp_bias-number": (edit(mlp_bias=1), "mlp_bias.*1"),
    "attention_bias-string": (edit(attention_bias="no"), "bias.*'no'"),
    "tie-string": (edit(tie_word_embeddings="false"), "tie_word_embeddings.*'false'"),
    "quantization": (edit(quantization_config={"quant_method": "gptq"}), "quantization_config"),
}


@pytest.mark.parametrize(("corrupt", "pattern"), params(CONFIG))
def test_contradictions_and_what_we_do_not_run(folder, corrupt, pattern):
    """An activation, a partial rope or a quantisation that is ignored gives fluent nonsense; the
    string "false" is true."""
    corrupt(folder)
    refused(folder, pattern)


NUMBERS = {
    "nan": math.nan, "infinity": math.inf, "minus-infinity": -math.inf, "negative": -1e-5,
    "zero": 0, "string": "1e-5", "true": True, "null": None, "list": [1e-5], "huge": BIG,
}  # fmt: skip


@pytest.mark.parametrize("value", NUMBERS.values(), ids=NUMBERS)
@pytest.mark.parametrize("name", ["rms_norm_eps", "rope_theta"])
def test_senseless_number(folder, name, value):
    """Python's json reads NaN and Infinity, and integers that no float can hold."""
    edit(**{name: value})(folder)
    refused(folder, name)


@pytest.mark.parametrize("value", NUMBERS.values(), ids=NUMBERS)
def test_senseless_theta_in_rope_parameters(folder, value):
    """The newer spelling takes another path."""
    edit(rope_parameters={"rope_type": "default", "rope_theta": value})(folder)
    refused(folder, "rope_theta")


@pytest.mark.parametrize("value", NUMBERS.values(), ids=NUMBERS)
@pytest.mark.parametrize("name", list(LLAMA3)[1:])
def test_senseless_llama3_rope(folder, name, value):
    """A factor of 0 divides by it; of Infinity, stops every slow pair; a missing one is None."""
    edit(rope_scaling={**LLAMA3, name: value})(folder)
    refused(folder, f"rope.*{name}")
    edit(rope_scaling={key: LLAMA3[key] for key in LLAMA3 if key != name})(folder)
    refused(folder, f"rope.*{name}")


@pytest.mark.parametrize("value", NUMBERS.values(), ids=NUMBERS)
def test_senseless_linear_rope(folder, value):
    """As above."""
    edit(rope_scaling={"type": "linear", "factor": value})(folder)
    refused(folder, "rope.*factor")


ROPE = {
    "yarn": ({"rope_type": "yarn", "factor": 4.0}, "'yarn' is not supported.*llama3"),
    "dynamic": ({"type": "dynamic", "factor": 2.0}, "'dynamic' is not supported"),
    "longrope": ({"rope_type": "longrope"}, "'longrope' is not supported"),
    "type-null": ({"rope_type": None}, "rope_type"),
    "type-number": ({"rope_type": 5}, "rope_type 5"),
    "type-list": ({"rope_type": ["linear"], "factor": 2.0}, "rope_type"),
    "linear-without-factor": ({"type": "linear"}, "rope factor"),
    "low-above-high": (
        {**LLAMA3, "low_freq_factor": 8.0},
        r"low_freq_factor 8.0 .*high_freq_factor 4.0",
    ),
    "low-equals-high": (
        {**LLAMA3, "low_freq_factor": 4.0},
        r"low_freq_factor 4.0 .*high_freq_factor 4.0",
    ),
    "string": ("linear", "rope"),
    "list": (["linear"], "rope"),
    "empty-list": ([], "rope"),
    "number": (5, "rope"),
    "true": (True, "rope"),
    "false": (False, "rope"),
}


@pytest.mark.parametrize(("value", "pattern"), params(ROPE))
@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_rope(folder, key, value, pattern):
    """A stretched rope run as a plain one is right for short texts only."""
    edit(**{key: value})(folder)
    refused(folder, pattern)


UNDERFLOW = {
    "theta": {"rope_theta": 1e-300},
    "linear": {"rope_scaling": {"type": "linear", "factor": 1e-300}},
    "llama3": {"rope_scaling": {**LLAMA3, "factor": 1e-300}},
}


@pytest.mark.parametrize("changes", params({key: (value,) for key, value in UNDERFLOW.items()}))
def test_rope_that_leaves_float32(folder, changes):
    """Positive and finite, but the frequencies are not: every logit is NaN, and nothing is said."""
    edit(**changes)(folder)
    refused(folder, "rope|theta|factor")


WINDOWS = {
    "negative": -8, "zero": 0, "string": "8", "fraction": 8.5, "below-one": 0.5, "true": True,
    "nan": math.nan, "infinity": math.inf, "list": [8], "beyond-int64": 2**70, "huge": BIG,
}  # fmt: skip


@pytest.mark.parametrize("value", WINDOWS.values(), ids=WINDOWS)
def test_senseless_window(folder, value):
    """A window cut down to 0 shows a query nothing, not even itself; one beyond int64 fails only
    in the first forward."""
    edit(architectures=["MistralForCausalLM"], sliding_window=value)(folder)
    refused(folder, "window")


LAYER_TYPES = {
    "too-short": (["full_attention"], "layer_types.* 1 layers of 2"),
    "too-long": (["sliding_attention"] * 3, "layer_types.* 3 layers of 2"),
    "unknown": (["full_attention", "chunked_attention"], "chunked_attention"),
    "number": ([1, 2], "layer_types|missing or malformed: KeyError"),
}


@pytest.mark.parametrize(("value", "pattern"), params(LAYER_TYPES))
@pytest.mark.parametrize("family", ["Qwen2ForCausalLM", "Qwen3ForCausalLM"])
def test_layer_types(folder, family, value, pattern):
    """A window on the wrong layers, or a kind of layer that is run as another."""
    window = {"use_sliding_window": True, "sliding_window": 8, "layer_types": value}
    edit(architectures=[family], **window)(folder)
    refused(folder, pattern)


EOS = {
    "string": "2", "strings": ["2"], "true": True, "float": 2.0, "mixed": [2, "</s>"],
    "null-inside": [None], "object": {"id": 2}, "nested": [[2]],
}  # fmt: skip


@pytest.mark.parametrize("value", EOS.values(), ids=EOS)
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_eos_ids_that_are_no_ids(folder, name, value):
    """An EOS that equals no token id never ends a sequence."""
    raw = json.loads((folder / "config.json").read_text()) if name == "config.json" else {}
    (folder / name).write_text(json.dumps(raw | {"eos_token_id": value}))
    refused(folder, "eos_token_id")


# --- model.safetensors ----------------------------------------------------------------------------


def read_header(file: Path) -> tuple[dict[str, Any], bytes]:
    """Split a safetensors file: 8 bytes of length, that much JSON, then the data."""
    content = file.read_bytes()
    (n,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + n]), content[8 + n :]


def write_header(file: Path, header: Any, data: bytes) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data)


def weights(change: Callable[[bytes], bytes]) -> Corrupt:
    """Change the bytes of model.safetensors."""

    def corrupt(folder: Path) -> None:
        file = folder / "model.safetensors"
        file.write_bytes(change(file.read_bytes()))

    return corrupt


def header(change: Callable[[dict[str, Any]], Any]) -> Corrupt:
    """Change the header of model.safetensors (in place, or by what is returned), not its data."""

    def corrupt(folder: Path) -> None:
        content, data = read_header(folder / "model.safetensors")
        write_header(folder / "model.safetensors", change(content) or content, data)

    return corrupt


def norm(**changes: Any) -> Corrupt:
    """Change what the header says of one tensor."""
    return header(lambda content: content[NORM].update(changes))


def overlap(content: dict[str, Any]) -> None:
    content[NORM]["data_offsets"] = content["model.layers.0.input_layernorm.weight"]["data_offsets"]


DAMAGED = {
    "empty": weights(lambda _: b""),
    "only-a-length": weights(lambda content: content[:8]),
    "truncated-in-header": weights(lambda content: content[:100]),
    "truncated-in-data": weights(lambda content: content[:-4]),
    "half": weights(lambda content: content[: len(content) // 2]),
    "trailing-garbage": weights(lambda content: content + b"garbage"),
    "zeros": weights(lambda content: bytes(len(content))),
    "header-length-0": weights(lambda content: bytes(8) + content[8:]),
    "header-length-2**40": weights(lambda content: struct.pack("<Q", 2**40) + content[8:]),
    "header-length-2**64": weights(lambda content: b"\xff" * 8 + content[8:]),
    "header-not-json": header(lambda content: b"x" * 64),
    "header-list": header(lambda content: [content]),
    "header-deep": header(lambda content: b'{"a":' * 100_000),
    "header-not-utf-8": header(lambda content: b'{"\xff": 1}'),
    "overlapping-offsets": header(overlap),
    "offsets-backwards": norm(data_offsets=[128, 0]),
    "offsets-beyond": norm(data_offsets=[2**40, 2**40 + 128]),
    "offsets-string": norm(data_offsets="0-128"),
    "shape-negative": norm(shape=[-32]),
    "shape-overflow": norm(shape=[2**40, 2**40]),
    "shape-disagrees-with-offsets": norm(shape=[31]),
    "shape-missing": header(lambda content: content[NORM].pop("shape") and None),
    "unknown-dtype": norm(dtype="F37"),
    "dtype-disagrees-with-offsets": norm(dtype="BF16"),
    "text": weights(lambda _: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n"),
}


@pytest.mark.parametrize("corrupt", params({key: (value,) for key, value in DAMAGED.items()}))
def test_damaged_weights(folder, corrupt):
    """A download that broke off, a git-lfs pointer, or a header made to read out of bounds."""
    corrupt(folder)
    refused(folder, r"/model\.safetensors: damaged or truncated: \S")


class Evil:
    """Makes a folder when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.safetensors"])
def test_a_pickle_is_never_run(folder, name):
    """Unpickling a checkpoint runs whatever its author wrote."""
    marker = folder.parent / "marker"
    evil = pickle.dumps(Evil(marker))
    pickle.loads(evil)
    marker.rmdir()  # so it would have been made
    unlink("model.safetensors")(folder)
    rewrite(name, evil)(folder)
    if name == "model.safetensors":  # a pickle under another name
        refused(folder, r"/model\.safetensors: damaged")
    else:
        refused(folder, r"model\.safetensors", "Pickled .*never read.* convert")
    assert not marker.exists()


@pytest.mark.parametrize(
    "corrupt", [unlink("model.safetensors"), to_directory("model.safetensors")]
)
def test_no_weights(folder, corrupt):
    """The name of what is looked for, and the way out."""
    corrupt(folder)
    refused(folder, r"neither model\.safetensors nor model\.safetensors\.index\.json")


def tensors(change: Callable[[dict[str, torch.Tensor]], Any]) -> Corrupt:
    """Rewrite the tensors, in a valid file."""

    def corrupt(folder: Path) -> None:
        content = load_file(folder / "model.safetensors")
        change(content)
        save_file(content, folder / "model.safetensors")

    return corrupt


def cast(name: str, dtype: torch.dtype) -> Corrupt:
    return tensors(lambda t: t.update({name: t[name].to(dtype)}))


TENSORS = {
    "missing": (tensors(lambda t: t.pop(NORM)), r"missing: norm\.weight"),
    "lm_head-missing": (tensors(lambda t: t.pop("lm_head.weight")), r"missing: lm_head\.weight"),
    "all-missing": (tensors(lambda t: t.clear()), r"missing: embed_tokens\.weight"),
    "unexpected": (
        tensors(lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(32)})),
        r"unexpected: layers\.0\.self_attn\.q_proj\.bias",
    ),
    "a-layer-too-many": (edit(num_hidden_layers=1), r"unexpected: layers\.1\.mlp"),
    "a-layer-too-few": (edit(num_hidden_layers=3), r"missing: layers\.2\.mlp"),
    "mis-shaped": (
        tensors(lambda t: t.update({NORM: torch.zeros(33)})),
        r"norm\.weight is \(33,\), config\.json asks for \(32,\)",
    ),
    "empty": (tensors(lambda t: t.update({NORM: torch.zeros(0)})), r"norm\.weight is \(0,\)"),
    "scalar": (tensors(lambda t: t.update({NORM: torch.tensor(1.0)})), r"norm\.weight is \(\)"),
    "transposed": (
        tensors(lambda t: t.update({UP: t[UP].T.contiguous()})),
        r"up_proj\.weight is \(32, 48\), config\.json asks for \(48, 32\)",
    ),
    "int32": (cast(NORM, torch.int32), r"norm\.weight holds I32"),
    "int8": (cast(UP, torch.int8), r"up_proj\.weight holds I8"),
    "bool": (cast(NORM, torch.bool), r"norm\.weight holds BOOL"),
    "float64": (cast(NORM, torch.float64), r"norm\.weight holds F64"),
    "float8": (cast(UP, torch.float8_e4m3fn), r"up_proj\.weight holds F8_E4M3"),
    "complex": (cast(NORM, torch.complex64), r"norm\.weight holds C64"),
    "stored-twice": (
        tensors(lambda t: t.update({"norm.weight": torch.ones(32)})),
        r"norm\.weight is stored twice",
    ),
}


@pytest.mark.parametrize(("corrupt", "pattern"), params(TENSORS))
def test_tensors_that_do_not_fit(folder, corrupt, pattern):
    """A parameter left at its random start, or on the meta device, or filled with rounded integers,
    is not seen until the text is read."""
    corrupt(folder)
    refused(folder, pattern)


def test_all_that_does_not_fit_is_listed_at_once(folder):
    """One problem a run makes a long evening."""

    def spoil(t: dict[str, torch.Tensor]) -> None:
        del t[NORM], t["model.layers.0.mlp.gate_proj.weight"]
        t["model.layers.7.mlp.gate_proj.weight"] = torch.zeros(48, 32)
        t["score.weight"] = torch.zeros(2, 32)
        t["model.layers.1.self_attn.k_proj.weight"] = torch.zeros(24, 32)
        t[UP] = t[UP].T.contiguous()
        t["lm_head.weight"] = t["lm_head.weight"].to(torch.int32)

    tensors(spoil)(folder)
    refused(
        folder,
        r"\n  missing: norm\.weight",
        r"\n  missing: layers\.0\.mlp\.gate_proj\.weight",
        r"\n  unexpected: layers\.7\.mlp\.gate_proj\.weight",
        r"\n  unexpected: score\.weight",
        r"k_proj\.weight is \(24, 32\), config\.json asks for \(16, 32\)",
        r"up_proj\.weight is \(32, 48\), config\.json asks for \(48, 32\)",
        r"lm_head\.weight holds I32",
    )


def test_a_long_list_is_cut_and_counted(folder):
    """An 80-layer model with a wrong prefix would fill the screen 40 times over."""
    edit(num_hidden_layers=5)(folder)  # 9 tensors in each of 3 layers that are not there
    message = refused(folder, r"\n  and 7 more$")
    assert message.count("missing: ") == 20


# --- Sharded checkpoints --------------------------------------------------------------------------

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
INDEX = "model.safetensors.index.json"


def shard(folder: Path) -> None:
    """Split model.safetensors into two shards and an index."""
    content = load_file(folder / "model.safetensors")
    names = sorted(content)
    halves = names[: len(names) // 2], names[len(names) // 2 :]
    for file, half in zip(SHARDS, halves, strict=True):
        save_file({name: content[name] for name in half}, folder / file)
    where = {name: file for file, half in zip(SHARDS, halves, strict=True) for name in half}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": where}))
    (folder / "model.safetensors").unlink()


def point(value: Any) -> Corrupt:
    """Let the index name `value` for one tensor."""

    def corrupt(folder: Path) -> None:
        index = json.loads((folder / INDEX).read_text())
        index["weight_map"][NORM] = value
        (folder / INDEX).write_text(json.dumps(index))

    return corrupt


def outside(name: str) -> Corrupt:
    """Let the index name a shard, there and valid, that is not in the folder itself."""

    def corrupt(folder: Path) -> None:
        place = folder / name.format(folder=folder.parent)
        place.parent.mkdir(exist_ok=True)
        shutil.copy(folder / SHARDS[0], place)
        unlink(SHARDS[0])(folder)
        text = (folder / INDEX).read_text()
        (folder / INDEX).write_text(text.replace(SHARDS[0], name.format(folder=folder.parent)))

    return corrupt


def copy_into_both(folder: Path) -> None:
    both = load_file(folder / SHARDS[0]) | load_file(folder / SHARDS[1])
    save_file(both, folder / SHARDS[1])


def forget_a_shard(folder: Path) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": {NORM: SHARDS[1]}}))


def cut_shard(folder: Path) -> None:
    file = folder / SHARDS[1]
    file.write_bytes(file.read_bytes()[:-10])


INDEXES = {
    "broken": (rewrite(INDEX, '{"weight_map": '), r"index\.json: not readable as JSON"),
    "list": (rewrite(INDEX, "[]"), r"index\.json: holds a list"),
    "deep": (rewrite(INDEX, "[" * 200_000), r"index\.json: not readable as JSON"),
    "not-utf-8": (rewrite(INDEX, b'{"\xff": 1}'), r"index\.json: not readable as JSON"),
    "no-weight_map": (rewrite(INDEX, '{"metadata": {}}'), r"index\.json: no weight_map"),
    "weight_map-list": (rewrite(INDEX, '{"weight_map": [1]}'), r"index\.json: no weight_map"),
    "weight_map-string": (rewrite(INDEX, '{"weight_map": "x"}'), r"index\.json: no weight_map"),
    "weight_map-empty": (rewrite(INDEX, '{"weight_map": {}}'), r"index\.json: no weight_map"),
    "directory": (to_directory(INDEX), r"neither model\.safetensors nor"),
    "missing-shard": (unlink(SHARDS[1]), f"missing shards: {SHARDS[1]}"),
    "missing-shards": (unlink(*SHARDS), f"missing shards: {SHARDS[0]}, {SHARDS[1]}"),
    "shard-directory": (to_directory(SHARDS[0]), f"missing shards: {SHARDS[0]}"),
    "shard-null": (point(None), "missing shards"),
    "shard-number": (point(7), "missing shards: 7"),
    "shard-list": (point([SHARDS[0]]), "missing shards"),
    "shard-empty": (point(""), "missing shards"),
    "shard-dot": (point(".."), r"missing shards: \.\."),
    "shard-nul": (point("x\0.safetensors"), "missing shards: x"),
    "shard-surrogate": (point("\ud800.safetensors"), "missing shards"),
    "shard-long-name": (point("x" * 300 + ".safetensors"), "xxx"),
    "shard-not-safetensors": (point("config.json"), r"/config\.json: damaged"),
    "shard-above": (outside("../x.safetensors"), r"\.\./x\.safetensors"),
    "shard-absolute": (outside("{folder}/x.safetensors"), r"/x\.safetensors"),
    "shard-below": (outside("sub/x.safetensors"), r"sub/x\.safetensors"),
    "in-two-shards": (copy_into_both, r"lm_head\.weight is stored twice"),
    "shard-forgotten": (forget_a_shard, r"missing: embed_tokens\.weight"),
    "shard-truncated": (cut_shard, f"/{SHARDS[1]}: damaged or truncated"),
    "shard-empty-file": (rewrite(SHARDS[0], b""), f"/{SHARDS[0]}: damaged or truncated"),
}


@pytest.mark.parametrize(("corrupt", "pattern"), params(INDEXES))
def test_sharded(folder, corrupt, pattern):
    """An index is written by others: it must not lead out of the folder, or past what is there."""
    shard(folder)
    corrupt(folder)
    refused(folder, pattern)


# --- What is no error -----------------------------------------------------------------------------

HARMLESS = {
    "unknown-keys": edit(pretraining_tp=1, initializer_range=0.02, auto_map={"a": "b.C"}),
    "plain-rope-spelt-out": edit(rope_scaling={"rope_type": "default"}),
    "integers-for-floats": edit(rope_theta=10000, rope_scaling={"type": "linear", "factor": 2}),
    "window-switched-off": edit(sliding_window=8, use_sliding_window=False),
    "empty-generation_config": rewrite("generation_config.json", "{}"),
    "pickle-beside-it": rewrite("pytorch_model.bin", b"not even a pickle"),
    "header-without-metadata": header(lambda content: content.pop("__metadata__") and None),
    "mixed-floats": cast(NORM, torch.float16),
    "nan-in-a-weight": tensors(lambda t: t[NORM].fill_(math.nan)),
}


@pytest.mark.parametrize("change", params({key: (value,) for key, value in HARMLESS.items()}))
def test_harmless(folder, change):
    """Checks so eager that they refuse what every real checkpoint has."""
    change(folder)
    runs(load_model(folder))


# --- At random ------------------------------------------------------------------------------------


@contextlib.contextmanager
def copied(valid: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        yield Path(shutil.copytree(valid, Path(folder) / "c"))


def refused_or_runs(folder: Path) -> None:
    try:
        model = load_model(folder)
    except CheckpointError:
        return
    runs(model)


# Half of the bytes are such that the JSON often stays JSON, and says something else.
BYTES = st.integers(0, 255) | st.sampled_from(b'0123456789-.eE"[]{},: FBI')
EDITS = st.lists(st.tuples(st.integers(0, 2**20), BYTES), min_size=1, max_size=4)
CUT = st.none() | st.integers(0, 2**20)
AT_RANDOM = settings(max_examples=60, deadline=None, derandomize=True, database=None)


def spoil(content: bytes, edits: list[tuple[int, int]], cut: int | None) -> bytes:
    """Overwrite bytes at places modulo the length, then cut the tail off."""
    changed = bytearray(content)
    for place, value in edits:
        changed[place % len(changed)] = value
    return bytes(changed if cut is None else changed[: cut % len(changed)])


@AT_RANDOM
@given(edits=EDITS, cut=CUT)
def test_config_with_random_bytes(valid, edits, cut):
    """A damage that nobody thought of, and an exception that no caller catches."""
    with copied(valid) as folder:
        file = folder / "config.json"
        file.write_bytes(spoil(file.read_bytes(), edits, cut))
        refused_or_runs(folder)


@AT_RANDOM
@given(edits=EDITS, cut=CUT, whole=st.booleans())
def test_header_with_random_bytes(valid, edits, cut, whole):
    """As above, for the header: with its length as it was, or corrected, so that the damage gets
    past the first check."""
    with copied(valid) as folder:
        file = folder / "model.safetensors"
        content = file.read_bytes()
        end = 8 + struct.unpack("<Q", content[:8])[0]
        if whole:
            write_header(file, spoil(content[8:end], edits, cut), content[end:])
        else:
            damaged = spoil(content[:end], edits, cut)
            file.write_bytes(damaged + (content[end:] if cut is None else b""))
        refused_or_runs(folder)


ODD = st.sampled_from([
    None, True, False, 0, -1, 1, 2, 3, 0.5, 2.0, 1e300, 1e-300, math.nan, math.inf, 10**9, 2**62,
    2**64, BIG, "", "x", "2", "float32", [], [1], [None], ["full_attention"], {}, {"a": 1},
    {"rope_type": "linear", "factor": BIG}, {"rope_type": "linear", "factor": 2},
    {"rope_type": "default", "rope_theta": BIG}, {"rope_type": []}, {**LLAMA3, "factor": BIG},
])  # fmt: skip
KEYS = st.sampled_from([
    *RAW, "rope_parameters", "dtype", "sliding_window", "use_sliding_window", "max_window_layers",
    "layer_types", "attention_bias", "mlp_bias", "quantization_config", "partial_rotary_factor",
])  # fmt: skip
FAMILY = st.sampled_from(["Llama", "Mistral", "Qwen2", "Qwen3"])


@AT_RANDOM
@given(family=FAMILY, changes=st.dictionaries(KEYS, ODD, min_size=1, max_size=4))
@example(family="Mistral", changes={"num_hidden_layers": 2**62})
@example(family="Mistral", changes={"sliding_window": 10**9})
@example(family="Llama", changes={"rms_norm_eps": BIG})
@example(family="Llama", changes={"rope_theta": BIG})
def test_config_with_odd_values(valid, family, changes):
    """Valid JSON with senseless values, several at once: the checks must not trip over another's
    value before it is checked itself."""
    with copied(valid) as folder:
        edit(architectures=[f"{family}ForCausalLM"])(folder)
        edit(**changes)(folder)
        refused_or_runs(folder)
