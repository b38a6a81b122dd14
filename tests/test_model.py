"""The oracle: every family against `transformers` on tiny random models, then the oddities.

transformers initialises biases to 0, norms to 1 and matrices to almost nothing, which would hide a
missing bias, a missing norm and any mistake in attention: `randomise` draws all of them anew.
"""

import json
import math
import shutil
import types
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from test_gptq import packed_across, packed_down
from tiny import edit_config

from around.fast.attending import attend_fast
from around.folder import Tokenizer, load_config, load_model, named_tensors
from around.folder.families import FAMILIES
from around.settings import SamplingParams
from generate import generate
from kv_cache import StaticCache
from model import View
from quantize import quantize_model, round_to_nearest
from sampling import Sequence
from tools.convert import main as convert

T = 80  # tokens compared: a wrong rope layout shows only past about 32, a cache's buckets past 64
ATOL = 1e-4  # fp32, logits of standard deviation above 1
WINDOW = 8  # far shorter than T

SIZES = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
    "rms_norm_eps": 1e-3, "tie_word_embeddings": False, "pad_token_id": 0,
}  # fmt: skip
# With head_dim 16 and theta 100, rope's 8 pairs make 2.5 to 0.05 turns within 16 tokens: some are
# kept, some blended, some divided. T is five times that context.
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 0.25, "high_freq_factor": 1.5,
    "original_max_position_embeddings": 16,
}  # fmt: skip
LINEAR = {"rope_type": "linear", "factor": 3.0}
# YaRN's pairs 0 to 2 of 8 turn as before, the last ones at a quarter of the speed.
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16,
        "beta_fast": 1.0, "beta_slow": 0.1}  # fmt: skip
GRANITE = {"embedding_multiplier": 12.0, "attention_multiplier": 0.2, "residual_multiplier": 0.22,
           "logits_scaling": 3.0}  # fmt: skip
GEMMA3 = {"head_dim": 16, "num_hidden_layers": 7, "sliding_window": WINDOW,
          "query_pre_attn_scalar": 24, "tie_word_embeddings": True}  # fmt: skip
# Caps that change much.
GEMMA2 = GEMMA3 | {"num_hidden_layers": 6, "attn_logit_softcapping": 1.5,
                   "final_logit_softcapping": 2.0}  # fmt: skip
NEAR = {"rope_theta": 100.0}
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
SLIDING = {"use_sliding_window": True, "sliding_window": WINDOW, "num_hidden_layers": 3}
TIED = {"tie_word_embeddings": True}
QWEN3MOE = {
    "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "head_dim": 16,
}  # fmt: skip

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama2-mha": ("Llama", {"num_key_value_heads": 4}),
    "llama-gqa8": ("Llama", {"num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 4}),
    "llama-mqa": ("Llama", {"num_key_value_heads": 1}),
    "llama-head_dim": ("Llama", {"head_dim": 24}),
    "llama-tied": ("Llama", TIED),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-attention_bias": ("Llama", {"attention_bias": True}),
    "llama3.1": ("Llama", {"head_dim": 16, "rope_parameters": LLAMA3 | NEAR}),
    "mistral-window": ("Mistral", {"sliding_window": WINDOW}),
    "mistral-null": ("Mistral", {"sliding_window": None}),
    "ministral3": ("Ministral3", {"head_dim": 20, "max_position_embeddings": 400,
        "rope_parameters": YARN | NEAR | {"original_max_position_embeddings": T,
            "llama_4_scaling_beta": 0.5}}),
    "ministral3-window": ("Ministral3", {"sliding_window": WINDOW}),
    "ministral": ("Ministral", {"head_dim": 8, "sliding_window": WINDOW, "layer_types": MIXED,
        "num_hidden_layers": 3}),
    "ministral3-defaults": ("Ministral3", {"rope_parameters": None, "head_dim": 20}),
    "mistral-head_dim": ("Mistral", {"sliding_window": None, "head_dim": 20}),
    "qwen2": ("Qwen2", {}),
    "qwen2-tied": ("Qwen2", TIED),
    "qwen2-window-off": ("Qwen2", {"use_sliding_window": False, "sliding_window": WINDOW}),
    "qwen2-max_window_layers": ("Qwen2", {**SLIDING, "max_window_layers": 1}),
    "qwen2-layer_types": ("Qwen2", {**SLIDING, "layer_types": MIXED}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen3-tied-mqa": ("Qwen3", {"head_dim": 16, "num_key_value_heads": 1, **TIED}),
    "qwen3-bias": ("Qwen3", {"head_dim": 16, "attention_bias": True}),
    "qwen3-max_window_layers": ("Qwen3", {**SLIDING, "head_dim": 16, "max_window_layers": 2}),
    "qwen3-layer_types": ("Qwen3", {**SLIDING, "head_dim": 16, "layer_types": MIXED}),
    "llama-linear-factor": ("Llama", {"rope_parameters": LINEAR | {"attention_factor": 2.0}}),
    "llama-yarn": ("Llama", {"head_dim": 16, "rope_parameters": YARN | NEAR}),
    "qwen2-yarn": ("Qwen2", {"rope_parameters": YARN | NEAR | {"truncate": False, "mscale": 2.0}}),
    "qwen3-yarn-mscale": ("Qwen3", {"head_dim": 16, "rope_parameters": YARN | NEAR | {
        "mscale": 2.0, "mscale_all_dim": 0.5, "beta_fast": 3.0, "beta_slow": 0.1}}),
    "smollm3": ("SmolLM3", {"num_hidden_layers": 5, "num_key_value_heads": 4}),
    "smollm3-window-yarn": ("SmolLM3", {"num_hidden_layers": 3, "no_rope_layers": [0, 1, 0],
        "use_sliding_window": True, "sliding_window": WINDOW,
        "rope_parameters": YARN | {"attention_factor": 1.3} | NEAR, **TIED}),
    "phi3": ("Phi3", {"num_key_value_heads": 4}),
    "phi3-window": ("Phi3", {"sliding_window": WINDOW}),
    "phi4-mini": ("Phi3", {"num_hidden_layers": 3, "num_attention_heads": 2, **TIED,
        "num_key_value_heads": 1, "partial_rotary_factor": 0.75}),
    "phi4-mini-longrope": ("Phi3", {"num_attention_heads": 2, "num_key_value_heads": 1,
        "original_max_position_embeddings": 100, "max_position_embeddings": 400,
        "rope_parameters": {"rope_type": "longrope", "short_factor": [1.0, 1.5, 2.0, 2.5, 3.0, 3.5],
        "long_factor": [9.0] * 6, "partial_rotary_factor": 0.75, **NEAR}}),
    "granite": ("Granite", {**GRANITE}),
    "granite-tied-biases": ("Granite", {**GRANITE, **TIED, "attention_bias": True,
        "mlp_bias": True}),
    "gemma2": ("Gemma2", {**GEMMA2}),
    "gemma2-uncapped": ("Gemma2", {**GEMMA2, "attn_logit_softcapping": None,
        "final_logit_softcapping": None, "layer_types": MIXED, "num_hidden_layers": 3}),
    "gemma3": ("Gemma3", {**GEMMA3}),
    "gemma3-capped": ("Gemma3", {**GEMMA3, "final_logit_softcapping": 2.0}),
    "gemma3-linear": ("Gemma3", {**GEMMA3, "layer_types": MIXED, "num_hidden_layers": 3,
        "rope_parameters": {"full_attention": {**LINEAR, "rope_theta": 1e6},
                            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0}}}),
    "olmo2": ("Olmo2", {}),
    "olmo2-gqa-bias": ("Olmo2", {"num_key_value_heads": 1, "attention_bias": True}),
    "mixtral": ("Mixtral", {"num_local_experts": 4}),
    "mixtral-window-tied": ("Mixtral", {"num_local_experts": 5, "sliding_window": WINDOW, **TIED}),
    "qwen3moe": ("Qwen3Moe", QWEN3MOE),
    "qwen3moe-norm": ("Qwen3Moe", QWEN3MOE | {"norm_topk_prob": True, "attention_bias": True}),
    "qwen3moe-one-expert-a-token": ("Qwen3Moe", QWEN3MOE | {"num_experts_per_tok": 1}),
}  # fmt: skip


class Built(NamedTuple):
    """A checkpoint folder, the transformers model that wrote it, and what that model computes."""

    folder: Path
    hf: Any
    tokens: torch.Tensor  # (2, T)
    logits: torch.Tensor  # (2, T, V)


@torch.no_grad()
def randomise(hf):
    """Draw every parameter so that leaving it out, or using it wrongly, changes the logits."""
    for name, p in hf.named_parameters():
        if name.endswith("bias"):
            p.normal_(0, 0.5)
        elif p.ndim == 1:  # a norm's weight
            p.uniform_(0.5, 1.5)
        else:  # 1.5: attention is far from uniform
            p.normal_(0, 1 if "embed_tokens" in name else 1.5 * p.shape[1] ** -0.5)


def build(case, folder, **more):
    family, changes = CASES[case]
    torch.manual_seed(sum(map(ord, case)))
    kind = f"{family}TextConfig" if family == "Gemma3" else f"{family}Config"
    config = getattr(transformers, kind)(**{**SIZES, **changes, **more})
    config._attn_implementation = "eager"  # the plainest form there is
    hf = getattr(transformers, f"{family}ForCausalLM")(config).float().eval()
    randomise(hf)
    hf.save_pretrained(folder)
    tokens = torch.randint(SIZES["vocab_size"], (2, T))
    return Built(folder, hf, tokens, hf_logits(hf, tokens))


@torch.no_grad()
def hf_logits(hf, tokens):
    return hf(tokens, use_cache=False).logits


@torch.no_grad()
def our_logits(model, tokens, start=0):
    return model(tokens, torch.arange(start, start + tokens.shape[1]).expand_as(tokens))


def same(model, built, of_what=""):
    ours, say = our_logits(model, built.tokens), lambda text: f"{of_what} {text}"
    torch.testing.assert_close(ours, built.logits, atol=ATOL, rtol=0, msg=say)


def copy_with(built, folder, **changes):
    """Copy a checkpoint, and change keys of its config.json."""
    shutil.copytree(built.folder, folder, dirs_exist_ok=True)
    edit_config(folder, **changes)
    return folder


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return build("llama3.1", tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_a_family_equals_transformers(case, tmp_path):
    """Compare a family's logits with those of transformers: in one forward, in the loop, and in a
    cache filled in pieces. Catches: a slip in rope's layout and stretching, biases, q/k norm,
    window, head counts, head_dim or tying, each of which gives fluent nonsense and no error; an
    input overwritten (nano-vllm#170)."""
    built = build(case, tmp_path)
    model = load_model(tmp_path)
    assert built.logits.std() > 0.5  # or the tolerance would mean nothing

    # 1) One forward, in which nobody writes into what a module reads: an RMSNorm that does corrupts
    # the residual stream in float32, where its cast makes no copy (nano-vllm#170).
    def unwritten(module, args, _):
        assert not any(arg._version for arg in args if isinstance(arg, torch.Tensor)), module

    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    hooks = [each.register_forward_hook(unwritten) for each in model.layers.modules()]
    same(model, built)
    assert all(torch.equal(weights[name], each) for name, each in model.state_dict().items())
    for hook in hooks:
        hook.remove()
    # 2) The loop and the cache: an off-by-one in positions. Each token is the argmax after ours
    # before it, so all are those of transformers.
    ids = built.tokens[0, : T - 40].tolist()
    sequence = Sequence(ids, SamplingParams(0, max_tokens=40, ignore_eos=True), model.config)
    cache = StaticCache(model, 1, sequence.max_len)
    ours = [token.id for token in generate(model, sequence, cache)]
    theirs = hf_logits(built.hf, torch.tensor([sequence.ids])).argmax(-1)[0, T - 41 : -1]
    assert ours == theirs.tolist()
    # 3) A cache filled in pieces, over another text: one that loses, shifts or shows too many
    # positions; a window that is wrong when queries and keys are not the same tokens.
    cache = StaticCache(model, 2, T)
    model(built.tokens.flip(1), *cache.plan(0, T))
    parts, ends = [], [*range(7, 64, 7), *range(64, T - 7), T - 2, T]
    for start, end in zip([0, *ends], ends):
        parts.append(model(built.tokens[:, start:end], *cache.plan(start, end)))
    torch.testing.assert_close(torch.cat(parts, 1), built.logits, atol=ATOL, rtol=0)
    # 4) A window that is read, but never applied.
    if any(model.config.windows):
        model.config = replace(model.config, windows=(None,) * len(model.layers))
        assert (our_logits(model, built.tokens) - built.logits).abs().max() > 0.1


FOLDING = ("gemma3", "granite", "llama-yarn", "qwen3-yarn-mscale", "ministral3")


@pytest.mark.parametrize("case", FOLDING)
def test_folded_numbers_are_rounded_once(case, tmp_path):
    """Load a bfloat16 folder in float32, and compare the logits with those of transformers.
    Catches: norms of 8 bits where 1 is added to them."""
    build(case, tmp_path).hf.bfloat16().save_pretrained(tmp_path)
    load = transformers.AutoModelForCausalLM.from_pretrained
    hf = load(tmp_path, dtype=torch.float32, attn_implementation="eager")
    tokens = torch.randint(SIZES["vocab_size"], (2, T))
    built = Built(tmp_path, hf, tokens, hf_logits(hf, tokens))
    same(load_model(tmp_path, dtype=torch.float32), built)


def spellings_of_rope():
    """Yield how files give the base of rope and its scaling, newer ones and older ones. Following
    an older model card, a user also adds `rope_scaling` to a newer file."""
    plain = {"rope_type": "default"}
    for rope in ({}, LINEAR, LLAMA3):
        newer = {"rope_parameters": plain | rope | NEAR}
        typed = {"type" if key == "rope_type" else key: value for key, value in rope.items()}
        older = ({"rope_parameters": None, "rope_scaling": each or None} for each in (rope, typed))
        yield from (newer, newer | {"rope_scaling": None}, {"rope_parameters": plain | rope} | NEAR)
        yield from (each | NEAR for each in older)
    yield {"rope_parameters": plain | NEAR, "rope_scaling": LINEAR} | NEAR


ON = {"use_sliding_window": True, "sliding_window": WINDOW}
KINDS = {"layer_types": ["full_attention", "sliding_attention"]}
# Files older than layer_types carry a window that use_sliding_window turns off.
OLD_QWEN = [{"layer_types": ...}, {"layer_types": ..., "max_window_layers": ...},
            {"layer_types": ..., "use_sliding_window": ...},
            {"layer_types": ..., "use_sliding_window": False}]  # fmt: skip
SPELLINGS = {  # a case -> what its config.json says besides, or leaves out
    "llama-head_dim": [*spellings_of_rope()],
    "llama2-mha": [
        {"head_dim": None, "num_key_value_heads": None},
        dict.fromkeys(("head_dim", "num_key_value_heads", "attention_bias", "mlp_bias", "dtype",
            "rope_parameters", "tie_word_embeddings", "layer_types"), ...),
        *({"architectures": names} for names in (..., ["LLaMAForCausalLM"], ["Olmo2ForCausalLM"])),
        dict(gelu=True, qk_norm=True, pre_norm=False, post_norm=True, wide_qk_norm=True,
             norm_offset=1.0, root_of_width=True, partial_rope=True, partial_rotary_factor=None,
             qkv_bias=True, o_bias=True)],
    "qwen2-max_window_layers": OLD_QWEN, "qwen3-max_window_layers": OLD_QWEN,
    "mistral-window": [{"use_sliding_window": None}, {"max_window_layers": None}, KINDS,
        {"use_sliding_window": False}],
    "mixtral-window-tied": [KINDS],
    "gemma3": [{"layer_types": ...}, {"layer_types": ..., "sliding_window_pattern": 3}],
    "llama-mqa": [ON | {"max_window_layers": 0}, KINDS | {"sliding_window": WINDOW}],
    "qwen3moe": [ON, ON | {"layer_types": ["full_attention"] * 2},
        {"num_local_experts": ..., "num_experts": 8}],
}  # fmt: skip


@pytest.mark.parametrize("case", SPELLINGS)
def test_spellings(case, tmp_path):
    """Load each spelling of config.json in SPELLINGS, and compare the logits with those of
    transformers. Catches: a spelling of rope not read, so that theta is 10000 without scaling, and
    nothing is said; a null that switches Mistral's window off; a setting that a family does not
    have; Qwen3-MoE's first 28 layers without their window; a family by `architectures`, which some
    tools leave out or write in their own way."""
    built = build(case, tmp_path / "as it was")
    for changes in SPELLINGS[case]:
        folder = copy_with(built, tmp_path / "x", **changes)
        hf = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
        theirs = built._replace(logits=hf_logits(hf.float().eval(), built.tokens))
        same(load_model(folder), theirs, changes)


def config_of(folder, **changes):
    """Return what load_config makes of a file with little in it, and what transformers does."""
    raw = {key: SIZES[key] for key in list(SIZES)[:5]} | changes
    (folder / "config.json").write_text(json.dumps(raw))
    return load_config(folder), transformers.AutoConfig.from_pretrained(folder)


def test_defaults_are_those_of_transformers(tmp_path):
    """Load a short config.json for each family, and compare its defaults with those of
    transformers. Catches: Llama's defaults in another family: its epsilon, base of rope, context or
    EOS. (Granite's file must have its multipliers, and SmolLM3's its list of layers with rope.)"""
    for name in sorted(FAMILIES.keys() - {"granite"}):
        ours, theirs = config_of(tmp_path, model_type=name, hidden_size=256, num_hidden_layers=12,
                                 num_attention_heads=32, no_rope_layers=[1] * 12)  # fmt: skip
        for field in ("num_key_value_heads", "rms_norm_eps", "tie_word_embeddings"):
            assert getattr(ours, field) == getattr(theirs, field), (name, field)
        assert ours.head_dim == (getattr(theirs, "head_dim", None) or 8), name
        rope = theirs.rope_parameters
        rope = rope.get("full_attention", rope)
        assert ours.rope_theta == rope["rope_theta"], name
        # Less than the file's for Ministral 3; see families.extended.
        beyond = "llama_4_scaling_beta" in rope and rope["original_max_position_embeddings"]
        assert ours.max_position_embeddings == (beyond or theirs.max_position_embeddings), name
        experts = ("num_experts", "num_experts_per_tok", "norm_topk_prob")
        for field in experts if ours.num_experts > 1 else ():
            assert getattr(ours, field) == getattr(theirs, field, True), (name, field)
        window = None if name == "qwen2" else getattr(theirs, "sliding_window", None)
        assert {*ours.windows} <= {None, window}, name
        assert (None in ours.windows) == (not window or "gemma" in name), name
        if "gemma" in name:  # which layers have one
            assert [w is None for w in ours.windows] == ["full" in k for k in theirs.layer_types]
        caps = ("attn_logit_softcapping", "final_logit_softcapping")
        expected = tuple(getattr(theirs, cap, None) for cap in caps)
        assert (ours.score_cap, ours.logits_cap) == expected, name


def test_smollm3_without_layer_types(tmp_path):
    """Load a SmolLM3 that has windows but no layer_types, and compare which layers get one with
    transformers. Catches: windows on the last layers, and not on those without rope."""
    more = dict(
        no_rope_layers=[0, 1], use_sliding_window=True, sliding_window=5, max_window_layers=1
    )
    ours, theirs = config_of(tmp_path, model_type="smollm3", **more, num_hidden_layers=2)
    kinds = ["sliding_attention" if window else "full_attention" for window in ours.windows]
    assert kinds == theirs.layer_types == ["sliding_attention", "full_attention"]


def test_phi3(tmp_path):
    """Load Phi-3's config with several windows and kinds of rope. Catches: the original context
    taken from the dict of rope, where it does not count (4,096 is its default); a window that hides
    nothing and costs a mask."""
    phi3 = {"model_type": "phi3"}
    for size, windows in ((4095, (4095, 4095)), (4096, (None, None)), (262144, (None, None))):
        assert config_of(tmp_path, sliding_window=size, **phi3)[0].windows == windows
    phi3 |= {"max_position_embeddings": 131072, "num_key_value_heads": 2}
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [9.0] * 4}
    for more in ({}, {"original_max_position_embeddings": 32768}):
        ours, theirs = config_of(tmp_path, rope_scaling=rope | more, **phi3)
        original = theirs.rope_parameters["original_max_position_embeddings"]
        assert ours.max_position_embeddings == original == 4096
        assert ours.folds["rotated_factor"] == pytest.approx(1 + math.log(32) / math.log(4096))
        for old in ("su", "yarn"):  # names of longrope in older files
            edit_config(tmp_path, rope_scaling=rope | more | {"rope_type": old})
            assert load_config(tmp_path) == ours


def test_what_rope_adds_to_the_context(llama, tmp_path):
    """Load configs with many kinds of rope, and check the context and the window. Catches: YaRN, as
    Qwen's cards tell people to write it, that did not lengthen the context, or lost a window of the
    shorter one. The values are vLLM's, but a context never shrinks; files of Gemma 3 give the
    extended one."""
    yarn = {"rope_type": "yarn", "factor": 4.0}
    for rope, context in (
        (None, 64), ({"rope_type": "default", "factor": 4.0}, 64), (LLAMA3, 64), (LINEAR, 192),
        ({"type": "linear", "factor": 1.5}, 96), (yarn, 256), ({"type": "yarn", "factor": 4}, 256),
        (yarn | {"original_max_position_embeddings": 64}, 256),
        (yarn | {"original_max_position_embeddings": 48}, 192),
        (yarn | {"original_max_position_embeddings": 8}, 64),
        ({"type": "yarn", "original_max_position_embeddings": 32}, 64),
    ):  # fmt: skip
        for family in ("mistral", "gemma3_text"):
            copy_with(llama, tmp_path, model_type=family, rope_scaling=rope, rope_parameters=...,
                      max_position_embeddings=64, sliding_window=64,
                      query_pre_attn_scalar=8)  # fmt: skip
            config, end = load_config(tmp_path), context if family == "mistral" else 64
            assert config.max_position_embeddings == end, (family, rope)
            assert {*config.windows} == {64 if end > 64 else None}, (family, rope)


def test_eos_ids(llama, tmp_path):
    """Load many pairs of EOS ids in generation_config.json and config.json, and check which end a
    text. Catches: only the first id honoured, or config.json's where generation_config.json says
    more, so that the model runs past the end of its turn."""
    ids = types.SimpleNamespace(eos_id=0), types.SimpleNamespace(eos_ids=(5,))
    assert Tokenizer.eos_ids(*ids) == {0, 5}
    for generation, config, expected in [
        ([7, 8, 9], 7, (7, 8, 9)),  # Llama 3.1 Instruct: end of text, of turn, of message
        (-1, 1, (1,)), ("no file", -1, ()), ([-1, 3], None, (3,)),
        (7, 1, (1, 7)), (0, 5, (5, 0)),  # id 0 is an id, not a missing one
        (None, 1, (1,)), (None, [1, 2], (1, 2)), ("absent", 1, (1,)), ("no file", [1, 2], (1, 2)),
        ([7, 8], "absent", (7, 8)),
        ("no file", 0, (0,)), ([5], None, (5,)), (None, None, ()), ("no file", None, ()),
    ]:  # fmt: skip
        given = ... if config == "absent" else config
        file = copy_with(llama, tmp_path, eos_token_id=given) / "generation_config.json"
        file.unlink(missing_ok=True)
        if generation != "no file":
            content = {} if generation == "absent" else {"eos_token_id": generation}
            file.write_text(json.dumps(content))
        assert load_config(tmp_path).eos_ids == expected, (generation, config)


def test_bfloat16_is_kept_unless_another_dtype_is_asked_for(tmp_path):
    """Load a bfloat16 folder in three dtypes, and check the dtype of each tensor. Catches: a
    bfloat16 checkpoint in float32, which takes twice the memory; rope's frequencies in bfloat16,
    where positions past 256 collide; weights that want gradients, which keep every activation
    alive."""
    built = build("qwen3", tmp_path / "fp32")
    built.hf.bfloat16().save_pretrained(tmp_path / "bf16")
    stored = load_file(tmp_path / "bf16" / "model.safetensors")
    stored = {name.removeprefix("model."): tensor for name, tensor in stored.items()}
    for asked, dtype in [(None, torch.bfloat16), (torch.float32,) * 2, (torch.float16,) * 2]:
        model = load_model(str(tmp_path / "bf16"), dtype=asked)  # a str is a path too
        ours = dict(named_tensors(model))
        assert ours.keys() == stored.keys()
        assert all(torch.equal(ours[name], stored[name].to(dtype)) for name in stored)
        assert {t.dtype for t in model.parameters()} == {dtype} == {model.dtype}
        assert not any(t.requires_grad for t in model.parameters())
        assert {t.device.type for t in (*model.parameters(), *model.buffers())} == {"cpu"}
        assert model.inv_freq.dtype is torch.float32 and not model.training
    assert our_logits(load_model(tmp_path / "bf16"), built.tokens).dtype is torch.bfloat16
    for other, key in (("dtype", "torch_dtype"), ("torch_dtype", "dtype")):
        for name in ("float32", "bfloat16", "float16"):
            edit_config(tmp_path / "bf16", **{other: ..., key: name})
            assert load_config(tmp_path / "bf16").dtype is getattr(torch, name)
    for found in ("auto", None, ...):  # then it is that of the weights
        edit_config(tmp_path / "bf16", dtype=found)
        assert load_model(tmp_path / "bf16").dtype is torch.bfloat16


FOLDED = ("smollm3-window-yarn", "phi4-mini", "granite-tied-biases", "gemma3-linear", "olmo2")


@pytest.mark.parametrize("case", ["gemma3", "mistral-window", "ministral3"])
def test_text_models_of_models_with_images(case, tmp_path):
    """Load the text model out of a folder with images, under both prefixes, and one saved from the
    base model, and compare the logits. Catches: a text model refused, or the other's tensors read;
    names without `model.`; the rotary_emb.inv_freq of Llama 1 and 2 files refused as unexpected,
    or, worse, used."""
    built = build(case, tmp_path / "plain")
    weights = load_file(built.folder / "model.safetensors")
    tensors = {name.removeprefix("model."): tensor for name, tensor in weights.items()}
    tensors["layers.0.self_attn.rotary_emb.inv_freq"] = torch.full((8,), 9.0)
    save_file(tensors, built.folder / "model.safetensors")
    same(load_model(built.folder), built)
    raw = json.loads((built.folder / "config.json").read_text())
    whole = {"model_type": "gemma3" if case == "gemma3" else "mistral3", "text_config": raw,
             "vision_config": {"hidden_size": 8}}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(whole))
    for prefixes in (("language_model.model.", "language_model."), ("model.language_model.", "")):
        names = ("vision_tower.a.weight", "multi_modal_projector.b", "model.vision_tower.a.weight")
        tensors = {name: torch.ones(3) for name in names}
        for name, tensor in weights.items():
            inner = name.removeprefix("model.")
            tensors[prefixes[inner == "lm_head.weight"] + inner] = tensor
        save_file(tensors, tmp_path / "model.safetensors")
        model = load_model(tmp_path)
        same(model, built)
    # Beyond that, Ministral 3 scales its queries.
    assert (model.config.max_position_embeddings == T) == (case == "ministral3")


@pytest.mark.parametrize("case", FOLDED)
def test_quantised_folders_are_folded_once(case, tmp_path):
    """Convert models that fold numbers into their weights, to our format and to GPTQ's, and compare
    the logits. Catches: numbers folded twice in a folder of ours, or norms that take each other's
    names; in GPTQ's, rows of integers that stayed where they were, or scales that were not
    multiplied."""
    built = build(case, tmp_path / "plain")
    assert convert(["--checkpoint", str(built.folder), "--mode", "int8", "--out",
                    str(tmp_path / "int8")]) == 0  # fmt: skip
    expected = our_logits(quantize_model(load_model(built.folder), "int8"), built.tokens)
    torch.testing.assert_close(our_logits(load_model(tmp_path / "int8"), built.tokens), expected)
    tensors = {}
    for name, tensor in load_file(built.folder / "model.safetensors").items():
        path = name.removesuffix(".weight")
        if not path.endswith("_proj"):
            tensors[name] = tensor
            continue
        q, scales, zeros = round_to_nearest(tensor, 8, tensor.shape[1])
        tensors[f"{path}.qweight"] = packed_down(q.t(), 8)
        tensors[f"{path}.qzeros"] = packed_across(zeros.t() - 1, 8)
        tensors[f"{path}.scales"] = scales.t().contiguous()
        built.hf.get_parameter(name).data.copy_(scales * (q - zeros))
    kind = dict(quant_method="gptq", bits=8, group_size=-1, desc_act=False)
    folder = copy_with(built, tmp_path / "gptq", quantization_config=kind)
    save_file(tensors, folder / "model.safetensors")
    same(load_model(folder), built._replace(logits=hf_logits(built.hf, built.tokens)))


@torch.no_grad()
def test_the_parts(llama):
    """Run positions from 1,000 on, pass arguments by name and plan steps of several lengths.
    Catches: angles in low precision, so that neighbours far from 0 get the same one; a hook that
    misses an argument; a step that pays for the cache's whole capacity; an overrun that is not
    seen."""
    model = load_model(llama.folder)
    far = our_logits(model, llama.tokens, 1000)
    torch.testing.assert_close(far, llama.logits, atol=5e-3, rtol=0)
    # An argument that a hook does not see, as it is named, or that it takes for a cache.
    attend_fast(model)
    args, last = (llama.tokens, torch.arange(T).expand_as(llama.tokens)), torch.tensor([3])
    near = {"atol": 1e-5, "rtol": 1e-5}
    torch.testing.assert_close(model(*args, None, last)[0], model(*args)[0, 3], **near)
    with pytest.raises(TypeError, match="cache"):
        model(*args, cache=None)
    cache = StaticCache(load_model(llama.folder), 1, 1000)
    for length in (1, 63, 64, 65, 300, 1000):
        positions, caches = cache.plan(length - 1, length)
        assert positions.tolist() == [[length - 1]]
        assert length <= caches[0].masks[View()].shape[3] < length + 64
    with pytest.raises(ValueError, match=r"\b1000\b.*\b1001\b"):
        cache.plan(0, 1001)
    with pytest.raises(ValueError, match="no memory for a cache"):  # nor for its slots
        StaticCache(model, 1, 2**40)
    # Gemma's factor, the root of 640, is rounded before it is multiplied.
    model.config, ids = replace(model.config, embedding_multiplier=640**0.5), torch.arange(90)
    assert torch.equal(model.bfloat16().embed(ids), model.embed_tokens(ids) * 25.25)
