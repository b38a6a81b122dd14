"""Damaged checkpoints: each must end in one InputError that names the file and the cause.

Never another exception, never a hang or a machine out of memory, never a quiet load of something
else, and never a line of code run from a file.
"""

import json
import math
import os
import pickle
import random
import resource
import shutil
import signal
import struct
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_model import GRANITE
from tiny import tiny_folder

from around.folder import families, load_config, load_model, weights
from around.settings import InputError

RAW = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 64,
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "hidden_act": "silu",
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "rope_scaling": None, "eos_token_id": 2,
    "tie_word_embeddings": False, "torch_dtype": "float32",
}  # fmt: skip
CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
NORM, UP = "model.norm.weight", "model.layers.1.mlp.up_proj.weight"
BIG = 10**400  # JSON can hold it, a float cannot
MEMORY = 4 * 2**30  # bytes beyond what the process has: far more than any test here needs


@pytest.fixture(autouse=True)
def _bounded():
    """Turn a hang into a failure, and filling the memory into a MemoryError, at once."""
    signal.signal(signal.SIGALRM, lambda *_: pytest.fail("still loading"))
    signal.alarm(120)  # no test here needs so long
    before = resource.getrlimit(resource.RLIMIT_AS)
    if Path("/proc/self/statm").exists():
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (limit, before[1]))
    yield
    signal.alarm(0)
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.fixture(scope="module")
def valid(tmp_path_factory):
    return tiny_folder(tmp_path_factory.mktemp("valid"), **RAW)


@pytest.fixture
def folder(valid, tmp_path):
    """Copy the valid checkpoint, to spoil it."""
    return shutil.copytree(valid, tmp_path / "c")


def edit(folder, **changes):
    """Give config.json these keys beside RAW's; `...` drops one."""
    raw = {key: value for key, value in (RAW | changes).items() if value is not ...}
    (folder / CONFIG).write_text(json.dumps(raw))


def refused(folder, *words, **changes):
    """Load, with these changes of config.json, expecting an InputError with all the words, in
    one line unless it lists tensors, and with one way out. Less the folder's path, in which pytest
    puts test names."""
    if changes:
        edit(folder, **changes)
    with pytest.raises(InputError) as caught:
        load_model(folder)
        pytest.fail(f"it loads: {words} {changes}")
    message = str(caught.value).replace(str(folder), "")
    assert all(word in message for word in words), (words, changes, message)
    assert len(message.splitlines()) == 1 or "tensors do not fit" in message
    assert message.count("git lfs") < 2, message
    return message


def runs(model):
    """Run what was loaded; what cannot run was refused too late."""
    with torch.no_grad():
        model(torch.tensor([[0, 1, 2]]), torch.arange(3)[None])


def test_files(folder):
    """Load folders whose files are missing, are directories or hold no JSON object, mistyped paths
    and a LoRA, and check that each error names the file and the way out. Catches: one of the four
    kinds of error that json.loads raises, or what it returns that is no object; a LoRA that ran as
    if it had not been trained."""
    for content in (
        b'{"hidden_size": 32,', b"", b"[1, 2]", b"null", b'"LlamaForCausalLM"', b"[" * 200_000,
        b'{"a":' * 200_000, b'{"model_type": "\xff\xfe"}', "{}".encode("utf-16"),
        b"\xef\xbb\xbf{}", b'{"vocab_size": ' + b"9" * 5000 + b"}", bytes(range(256)),
    ):  # fmt: skip
        for file in ("generation_config.json", CONFIG):
            (folder / file).write_bytes(content)
            error = refused(folder, "json")
            assert error.startswith(
                f"/{file} (if it is damaged, download it again, or git lfs pull): "
            )
            edit(folder)
        (folder / "generation_config.json").unlink()
    (folder / "generation_config.json").symlink_to("lost")
    refused(folder, "/generation_config.json", "No such file")
    (folder / "generation_config.json").unlink()
    for path in (folder / "typo", folder / WEIGHTS):
        refused(path, "no model folder", "hf download", "GGUF", "transformers")
    adapter = folder / "adapter_config.json"
    adapter.write_text('{"peft_type": "LORA"}')
    refused(folder, "adapter_config.json", "adapters do not run here", "merge")
    adapter.unlink()
    for file, *words in ((WEIGHTS, "shards", "convert"), (CONFIG,)):
        (folder / file).unlink()
        refused(folder, file, *words)
        (folder / file).mkdir()
        refused(folder, file)
    (folder / CONFIG).rmdir()
    adapter.write_text('{"peft_type": "LORA"}')
    refused(folder, "adapter_config.json", "adapters do not run here", "merge")


SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "max_position_embeddings",
)  # fmt: skip
EOS = ("2", ["2"], True, 2.0, -2, [2, "</s>"], [None], {"id": 2}, [[2]])
# `raw.get(name) or default` takes 0 and [] for "not given"; True is an int in Python; a size of
# 10**12 fills the memory before any tensor is looked at; json reads NaN and huge integers.
SENSELESS = (-1, 0, "8", 8.0, True, False, math.nan, 10**12, 2**70, BIG, [], {"a": 1})
NUMBERS = (math.nan, math.inf, -math.inf, -1e-5, 0, "1e-5", True, [1e-5], BIG)
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
FIELDS: dict[str, dict[str, Any]] = {  # a family -> its settings -> values that are refused
    "llama": dict.fromkeys(SIZES, SENSELESS) | {
        "head_dim": (*SENSELESS, 7), "rms_norm_eps": NUMBERS, "rope_theta": NUMBERS,
        "eos_token_id": EOS,  # one that equals no token id never ends a sequence
        # What is ignored gives fluent nonsense; "false" is true; gte-Qwen2 is not causal.
        "hidden_act": (["silu"], "gelu"), "dtype": ("float8", 16), "torch_dtype": ("float64",),
        "mlp_bias": ("yes", 1), "attention_bias": ("no",), "tie_word_embeddings": ("false",),
        "partial_rotary_factor": (0.5,), "is_causal": (False,), "quantization_config": ("gptq",)},
    # A window of 0 shows a query nothing; one beyond int64 fails only in the first forward.
    "mistral": {"sliding_window": SENSELESS},
    # Modules are built for each expert before the weights are read; and other kinds of router.
    "mixtral": {
        "num_local_experts": SENSELESS, "num_experts_per_tok": (*SENSELESS, 9),
        "moe_intermediate_size": SENSELESS, "decoder_sparse_step": (0, 2), "n_group": (8,),
        "mlp_only_layers": ([0], 0, {}), "norm_topk_prob": ("no",), "scoring_func": ("sigmoid",)},
    # A number that a family folds is missing or is none; a list has another length than the layers.
    "granite": dict.fromkeys(GRANITE, (..., None, 0, "1", math.nan)),
    "gemma3_text": {
        "query_pre_attn_scalar": (0, -8, "8"), "sliding_window_pattern": (0,),
        "rope_local_base_freq": (0,), "hidden_activation": ("gelu",),
        "use_bidirectional_attention": (True,), "attn_logit_softcapping": (0, -5, "50", math.nan),
        "final_logit_softcapping": (0, True)},
    "smollm3": {"no_rope_layers": (4, [1], ...)},
    "phi3": {"partial_rotary_factor": (0, -0.5, 1.5, "1", math.nan)},
}  # fmt: skip
BESIDE = {"mixtral": {"num_local_experts": 8}, "granite": GRANITE}
# What the error says in place of the setting.
SAYS = {"attention_bias": "bias", "num_local_experts": "num_experts", "torch_dtype": "dtype"}


def of(name, **changes):
    """Return the changes that make the file one of another family."""
    return {"model_type": name, **changes}


WINDOWED = [of(name, use_sliding_window=True, sliding_window=8) for name in ("qwen2", "qwen3")]
CASES = [  # what the error names, and the changes of config.json
    *((SAYS.get(name, name), of(family, **BESIDE.get(family, {}) | {name: value}))
      for family, fields in FIELDS.items() for name, values in fields.items() for value in values),
    # Without head_dim, as in Llama 2's file, D // N divides by zero, or a string.
    *((name, {"head_dim": ..., name: value}) for name in SIZES[:5]
      for value in (*SENSELESS, None, ...)),
    # A list with an entry per layer, made before the count is checked: 8 GB, then MemoryError.
    *(("num_hidden_layers", family | {"num_hidden_layers": n, "max_window_layers": most})
      for family in (*WINDOWED, of("mistral")) for n in (1025, 2**30, 2**70) for most in (0, n)),
    # 1e-300 leaves float32. A stretched rope run as a plain one is right for short texts only.
    *(("rope_theta", {"rope_parameters": {"rope_theta": value}}) for value in NUMBERS),
    *(("rope factor", {"rope_scaling": {"type": "linear", "factor": value}})
      for value in (*NUMBERS, None, 1e-300)),
    *((f"rope {name}", {"rope_scaling": LLAMA3 | {name: value}})
      for name in list(LLAMA3)[1:] for value in NUMBERS),
    *((word, {key: rope}) for key in ("rope_scaling", "rope_parameters") for word, rope in (
        ("'ntk' is not supported", {"rope_type": "ntk", "factor": 4.0}),
        ("'dynamic' is not supported", {"type": "dynamic", "factor": 2.0}),
        ("rope factor", {"rope_type": "yarn", "factor": 0}), ("rope factor", {"type": "linear"}),
        ("rope beta_fast", {"rope_type": "yarn", "factor": 4.0, "beta_fast": "32"}),
        ("rope short_factor", {"rope_type": "longrope"}),
        ("the length of rope short_factor 1", {"rope_type": "longrope", "short_factor": [1.0]}),
        ("rope short_factor", {"rope_type": "longrope", "short_factor": [0.0] * 8}),
        *(("rope_type", {"rope_type": kind, "factor": 2}) for kind in (None, 5, ["linear"])),
        *(("rope", value) for value in ("linear", ["linear"], [], 5, True, False)))),
    ("partial_rotary_factor 0.2", {"rope_parameters": {"partial_rotary_factor": 0.2}}),
    ("rope_type of sliding_attention 'linear'", of("gemma3_text", rope_parameters={
        "full_attention": {}, "sliding_attention": {"rope_type": "linear", "factor": 4.0}})),
    # A family that runs under another's rules, such as shared experts or sigmoid scores.
    *((f"model_type {value!r} is not supported; supported: ", of(value))
      for value in (None, 5, ["llama"], {"a": 1}, "", "Llama", "LlamaForCausalLM", "gpt2", "gemma3",
          "gemma3n", "qwen2_moe", "deepseek_v3", "qwen3_next")),
    ("model_type None is not supported", of(...)),  # RAW has a supported name in architectures
    *((word, of("mistral3", text_config=text)) for word, text in (
        ("text_config", 5), ("model_type 'mistral3'", {"vocab_size": 64}),
        ("model_type 'm'", {"model_type": "m"}), ("model_type None", {"model_type": None}))),
    # A window on the wrong layers, or a kind of layer that is run as another.
    *(("layer_types", family | {"layer_types": kinds}) for family in WINDOWED
      for kinds in (["full_attention"], ["sliding_attention"] * 3, ["x", "x"], [1, 2], "x")),
    *((f"4 heads must be a multiple of the {n} kv heads", {"num_key_value_heads": n})
      for n in (3, 8)),
]  # fmt: skip


def test_config(folder):
    """Load each config.json of CASES, with one setting that is wrong, and check that the error
    names it. Catches: a traceback, or a model that rambles, where one line can say what is
    wrong."""
    for word, changes in CASES:
        refused(folder, f"/{CONFIG}: ", word, **changes)
    # Each is within its bound, but a matrix of them has more bytes than int64 can count.
    huge = {"hidden_size": 2**24, "num_attention_heads": 2**24, "head_dim": 2**24}
    refused(folder, "overflow", **huge)
    for method, word in (("gptq", "bits"), ("fp8", "quant_method 'fp8'")):
        refused(folder, word, quantization_config={"quant_method": method, "group_size": 128})
    edit(folder)
    for value in EOS:
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
        refused(folder, "eos_token_id")


def join(header, data):
    """Return a safetensors file: 8 bytes of length, that much JSON, then the data."""
    return struct.pack("<Q", len(header)) + header + data


def test_damaged_weights(folder):
    """Load files of weights that are cut off, damaged or pickled, and check that each is refused.
    Catches: a download that broke off; a header made to read out of bounds; a pickle, which runs
    whatever its author wrote, under whatever name it stands."""
    whole = (folder / WEIGHTS).read_bytes()
    end = 8 + struct.unpack("<Q", whole[:8])[0]
    header, data = json.loads(whole[8:end]), whole[end:]

    def norm(**changes):
        return join(json.dumps(header | {NORM: header[NORM] | changes}).encode(), data)

    for content in (
        b"", whole[:8], whole[:100], whole[:-4], bytes(len(whole)), whole + b"garbage",
        struct.pack("<Q", 2**40) + whole[8:], b"\xff" * 8 + whole[8:], join(b"", data),
        join(b"[]", data), join(b"x" * 64, data), join(b'{"\xff":1}', data),
        join(b'{"a":' * 100_000, data), norm(data_offsets=[0, 128]), norm(data_offsets="0-128"),
        norm(data_offsets=[2**40, 2**40 + 128]), norm(shape=[-32]), norm(shape=[2**40, 2**40]),
        norm(shape=[31]), norm(shape=None), norm(dtype="F37"), norm(dtype="BF16"),
    ):  # fmt: skip
        (folder / WEIGHTS).write_bytes(content)
        refused(folder, f"/{WEIGHTS}: ")
    marker = folder.parent / "marker"

    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(marker),)

    (folder / WEIGHTS).unlink()
    for name in ("pytorch_model.bin", "consolidated.00.pth", WEIGHTS):
        (folder / name).write_bytes(pickle.dumps(Evil()))
        refused(folder, WEIGHTS, *([] if name == WEIGHTS else ["convert"]))
    assert not marker.exists()


def change_tensors(folder, changes):
    """Put tensors into the file, or take out those that are None."""
    tensors = load_file(folder / WEIGHTS) | changes
    save_file({n: each for n, each in tensors.items() if each is not None}, folder / WEIGHTS)


DTYPES = (torch.int32, torch.int8, torch.uint8, torch.bool, torch.float64, torch.float8_e4m3fn)
TENSORS = [
    ({NORM: None}, "1 tensors", "norm.weight: missing"),
    ({"lm_head.weight": None}, "1 tensors", "lm_head.weight: missing"),
    ({"model.layers.0.self_attn.q_proj.bias": torch.zeros(32)}, "1 tensors",
     "layers.0.self_attn.q_proj.bias", "wanted: none"),
    ({NORM: torch.zeros(33)}, "norm.weight", "(33,)", "wanted: float (32,)"),
    ({NORM: torch.zeros(0)}, "norm.weight", "(0,)"), ({NORM: torch.ones(())}, "norm.weight", "()"),
    ({UP: torch.zeros(32, 48)}, "(32, 48)", "float (48, 32)"),
    *(({UP: torch.zeros(48, 32).to(kind)}, f"up_proj.weight: {kind} (48, 32)") for kind in DTYPES),
    ({NORM: None, "model.layers.0.mlp.gate_proj.weight": None, "score.weight": torch.zeros(2, 32),
      "lm_head.weight": torch.zeros(64, 32).int()}, "4 tensors",
     *(f"\n  {name}.weight: " for name in ("norm", "layers.0.mlp.gate_proj", "score", "lm_head"))),
]  # fmt: skip


def test_weights_larger_than_the_memory(folder, monkeypatch):
    """Load where less memory is free than the weights need. Catches: weights read until the system
    ends the process, without a word."""
    monkeypatch.setattr(weights, "free_memory", lambda device: 2**10)
    with pytest.raises(InputError, match=r": its weights need 0 MB: 0 MB are free: take a smaller"):
        load_model(folder)


def test_tensors_that_do_not_fit(folder, valid):
    """Load weights with missing, extra or misshapen tensors, and check that one error lists them.
    Catches: a parameter left at its random start or on the meta device, or filled with rounded
    integers, which only the text shows; one problem a run; 80 layers with a wrong prefix that fill
    the screen 40 times over."""
    for changes, *words in TENSORS:
        shutil.copy(valid / WEIGHTS, folder)
        change_tensors(folder, changes)
        refused(folder, *words)
    refused(folder, "13 tensors", "layers.1.mlp", num_hidden_layers=1)  # 9 in a layer
    assert refused(folder, "31 tensors", num_hidden_layers=5).count("\n") == 20
    save_file({}, folder / WEIGHTS)
    edit(folder)
    refused(folder, "21 tensors", "embed_tokens.weight: missing", "norm.weight: miss")


def test_files_are_opened_a_few_times(valid, monkeypatch):
    """Load a folder, and count how often its file is opened, and whether that ends. Catches: a
    header that is parsed again for each of 10,000 tensors, which took minutes; weights that stay
    mapped beside the model's own, or of which a piece is read that another one has replaced."""
    opened = []
    opening = weights.safe_open
    monkeypatch.setattr(weights, "safe_open", lambda *a: opened.append(a) or opening(*a))
    size = (valid / WEIGHTS).stat().st_size
    # For the header, and for each piece: the 16 MB in which all tensors stand, or a third.
    for piece, counts in ((weights.PIECE, (2,)), (size // 3, (4, 5))):
        monkeypatch.setattr(weights, "PIECE", piece)
        opened.clear()
        model = load_model(valid)
        assert len(opened) in counts
        assert str(valid) not in Path("/proc/self/maps").read_text()
        runs(model)


def test_shards(folder):
    """Load a model in two shards: whole, with each kind of damaged index, and with a shard that is
    cut off or missing. Catches: a model loaded without all of its shards; an index that names a
    file outside the folder."""
    shards = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    content = sorted(load_file(folder / WEIGHTS).items())
    save_file(dict(content[:10]), folder / shards[0])
    save_file(dict(content[10:]), folder / shards[1])
    (folder / WEIGHTS).unlink()
    refused(folder, INDEX, "shards")
    places = {name: shards[i >= 10] for i, (name, _) in enumerate(content)}
    for wrong, *words in (
        ("", "lfs"), ("{", "lfs"), ("[]", "lfs"), ("{}", "lfs"), ({},), ([], "lfs"),
        ({NORM: 5},), ({NORM: None},),
        (places | {NORM: ".."},), (places | {NORM: "../../etc"}, "/etc: "),
        (places | {NORM: f"/{folder}/{shards[0]}"}, "No such file"),
    ):  # fmt: skip
        text = wrong if isinstance(wrong, str) else json.dumps({"weight_map": wrong})
        (folder / INDEX).write_text(text)
        refused(folder, *words)
    (folder / INDEX).write_text(json.dumps({"weight_map": places}))
    runs(load_model(folder))
    second = folder / "below" / shards[1]
    second.parent.mkdir()
    (folder / shards[1]).rename(second)
    below = {name: each.replace(shards[1], f"below/{shards[1]}") for name, each in places.items()}
    (folder / INDEX).write_text(json.dumps({"weight_map": below}))
    runs(load_model(folder))
    second.write_bytes(second.read_bytes()[:-10])
    refused(folder, f"/{shards[1]}: ")
    second.unlink()
    refused(folder, f"/{shards[1]}: ", "No such file")


def test_harmless(folder):
    """Load folders with settings and files that real checkpoints have, and run them. Catches:
    checks so eager that they refuse what every real checkpoint has; a Llama that Granite's
    multipliers in its file turn into another model."""
    runs(load_model(folder))  # were the valid one refused, all of the above would pass for nothing
    for changes in (
        {"pretraining_tp": 1, "auto_map": {"a": "b.C"}}, {"rope_scaling": {"rope_type": "default"}},
        {"rope_theta": 10000, "rope_scaling": {"type": "linear", "factor": 2}},
        {"sliding_window": 8, "use_sliding_window": False},
    ):  # fmt: skip
        edit(folder, **changes)
        runs(load_model(folder))
    (folder / "generation_config.json").write_text("{}")
    (folder / "pytorch_model.bin").write_bytes(b"not even a pickle")
    change_tensors(folder, {NORM: torch.full((32,), math.nan).half()})
    runs(load_model(folder))
    edit(folder)
    plain = load_config(folder)
    edit(folder, **dict.fromkeys(families.PARTICULAR, 2))
    assert load_config(folder) == plain


def refused_or_runs(folder):
    """Load a folder and run it. A InputError may refuse it; any other is one that no caller
    catches."""
    with suppress(InputError):
        runs(load_model(folder))


def test_at_random(folder):
    """Load 150 folders with a few bytes changed in config.json or in the weights' header, and 100
    with three odd settings. Catches: a damage that nobody thought of, also where the header's
    length is corrected, so that it passes the first check; a check that trips over another value
    before that is checked itself."""
    config, weights = (folder / CONFIG).read_bytes(), (folder / WEIGHTS).read_bytes()
    end = 8 + struct.unpack("<Q", weights[:8])[0]
    for seed in range(150):
        chance = random.Random(seed)
        kind = chance.choice(["config", "header", "corrected"])
        whole = {"config": config, "header": weights[:end], "corrected": weights[8:end]}
        damaged = bytearray(whole[kind])
        for _ in range(chance.randint(1, 4)):
            # Half of the bytes are such that the JSON often stays JSON, and says something else.
            byte = chance.choice((chance.randrange(256), chance.choice(b'0159-.eE"[]{},: FBI')))
            damaged[chance.randrange(len(damaged))] = byte
        if chance.random() < 0.5:
            del damaged[chance.randrange(len(damaged)) :]
        content = {"config": damaged, "header": damaged + weights[end:],
                   "corrected": join(bytes(damaged), weights[end:])}[kind]  # fmt: skip
        (folder / (CONFIG if kind == "config" else WEIGHTS)).write_bytes(content)
        refused_or_runs(folder)
        (folder / CONFIG).write_bytes(config)
        (folder / WEIGHTS).write_bytes(weights)
    for seed in range(100):
        changes = {}
        for _, each in random.Random(seed).sample(CASES, 3):
            changes |= each
        edit(folder, **changes)
        refused_or_runs(folder)
