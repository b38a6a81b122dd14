"""Exercise 15: one more family of models, Command R. See 15-family.md."""

import copy
import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from common import serve, write
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import layer_norm

from around.folder import load_config, load_model, named_tensors
from around.settings import InputError, SamplingParams
from kv_cache import StaticCache
from model import LayerCache, NoCache, Transformer, View, apply_rope
from quantize import quantize_model
from scheduler import Engine
from tools import convert

T = 80  # tokens; an error in the positions may show only after 30 or so
FAMILY = "cohere"
D, H, GROUP = 48, 12, 8
SIZES: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": D, "intermediate_size": 56, "num_hidden_layers": 2,
    "num_attention_heads": 4,
}  # fmt: skip
SCALE = 0.3
SETTINGS: dict[str, Any] = SIZES | {
    "num_key_value_heads": 2, "max_position_embeddings": 128, "eos_token_id": 3,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
}  # fmt: skip
OWN: dict[str, Any] = {"layer_norm_eps": 1e-2, "logit_scale": SCALE}


class Saved(NamedTuple):
    """A folder, the transformers model that wrote it, and what that model computes."""

    folder: Path
    hf: Any
    tokens: Tensor  # (2, T)
    logits: Tensor  # (2, T, V)


@torch.no_grad()
def save(folder: Path, kind: str, settings: dict[str, Any]) -> Saved:
    """Let transformers make a random model and save it. All weights are redrawn, because by default
    norms are 1, biases 0 and matrices almost 0, which would hide mistakes."""
    torch.manual_seed(1)
    # A copy, because transformers writes into dicts that it is given.
    config = getattr(transformers, f"{kind}Config")(**copy.deepcopy(settings))
    config._attn_implementation = "eager"  # the plainest form there is
    hf = getattr(transformers, f"{kind}ForCausalLM")(config).float().eval()
    for name, p in hf.named_parameters():
        if name.endswith("bias"):
            p.normal_(0, 0.5)
        elif p.dim() == 1:  # a norm's
            p.uniform_(0.5, 1.5)
        elif "embed" in name:
            p.normal_(0.3, 0.5)  # with a mean, which LayerNorm subtracts
        else:
            p.normal_(0, 1.5 * p.shape[1] ** -0.5)
    hf.save_pretrained(folder)
    tokens = torch.randint(SIZES["vocab_size"], (2, T))
    return Saved(folder, hf, tokens, hf(tokens).logits)


@pytest.fixture(scope="module")
def cohere(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return save(tmp_path_factory.mktemp("cohere"), "Cohere", SETTINGS | OWN)


def load(folder: Path, dtype: torch.dtype | None = None) -> Transformer:
    try:
        return load_model(folder, dtype=dtype)
    except InputError as error:
        problem = str(error)
    text = f"Cohere's folder cannot be read yet; see FAMILIES in families.py: {problem}"
    return pytest.fail(text, pytrace=False)


@torch.no_grad()
def logits_of(model: Transformer, tokens: Tensor) -> Tensor:
    return model(tokens, torch.arange(tokens.shape[1]).expand_as(tokens))


def is_close(got: Tensor, want: Tensor) -> bool:
    return (got - want).abs().max().item() < 1e-4


def same(got: Tensor, want: Tensor, wrong: str) -> None:
    apart = (got - want).abs().max().item()
    assert is_close(got, want), f"{wrong} ({apart:.2g} apart)"


# --- The parts ------------------------------------------------------------------------------------


def test_the_weights_have_the_names_of_the_folder(cohere: Saved) -> None:
    """Bug: the logits' scale is folded into lm_head, which is the embedding too. Only rows of q and
    k may move, and the last norm may be scaled."""
    ours = dict(named_tensors(load(cohere.folder)))
    stored = load_file(cohere.folder / "model.safetensors")
    stored = {name.removeprefix("model."): tensor for name, tensor in stored.items()}
    assert ours.keys() == stored.keys(), f"other names: {sorted(ours.keys() ^ stored.keys())}"
    may = ("q_proj.weight", "k_proj.weight")
    kept = [name for name in stored if name != "norm.weight" and not name.endswith(may)]
    changed = [name for name in kept if not torch.equal(ours[name], stored[name])]
    assert not changed, f"{changed} are not as stored"


@torch.no_grad()
def test_the_norm_subtracts_the_mean(cohere: Saved) -> None:
    x = torch.randn(3, D) + 2
    ours, theirs = (each.layers[1] for each in (load(cohere.folder), cohere.hf.model))
    for size, wrong in (
        (100, "input_layernorm must subtract the mean, and divide by the standard deviation"),
        (0.01, "the norm's eps is layer_norm_eps"),
    ):
        same(ours.input_layernorm(x * size), theirs.input_layernorm(x * size), wrong)


@torch.no_grad()
def test_the_norm_rounds_once(cohere: Saved) -> None:
    """Bug: in bfloat16, the mean is rounded, or the result before it is multiplied by the weight.
    A bfloat16 has 8 bits, so a single rounding changes a value by at most one part in 256."""
    norm, x = load(cohere.folder, torch.bfloat16).layers[1].input_layernorm, torch.randn(100, D)
    got = norm(x.bfloat16() + 2)
    want = layer_norm((x.bfloat16() + 2).float(), (D,), norm.weight.float(), eps=1e-2)
    assert got.dtype == torch.bfloat16, f"the norm gives {got.dtype}"
    wrong = "the norm rounds more than once: compute all of it in float32"
    most = ((got.float() - want).abs() - 1e-5).div(want.abs()).max().item()
    assert most < 1 / 250, f"{wrong} (one part in {1 / most:.0f})"


@torch.no_grad()
def test_the_block_is_parallel(cohere: Saved) -> None:
    """With a single token at position 0, rope does nothing, and attention returns its value."""
    model, x = load(cohere.folder), torch.randn(1, 1, D) + 0.3
    (rope,), at = model.rope(torch.zeros(1, 1)), torch.zeros(1, 1, dtype=torch.int64)
    theirs = cohere.hf.model.layers[1]
    angles = cohere.hf.model.rotary_emb(x, at)
    got = model.layers[1](x, *rope, NoCache({View(): torch.zeros(1, 1, 2, 1)}, View()))
    attended = theirs.self_attn(theirs.input_layernorm(x), angles, None)[0]
    in_turn = x + attended + theirs.mlp(theirs.input_layernorm(x + attended))
    wrong = "the feed-forward must read what attention reads, and not what attention has made of it"
    assert not is_close(got, in_turn), wrong
    want = theirs(x, position_embeddings=angles)
    same(got, want, "a block is x + attention(norm(x)) + mlp(norm(x)), with one norm")


class Seen(Exception):
    """The queries and keys that the first layer hands to its cache."""


class Spy(LayerCache):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        raise Seen(q, k)


def scores_of(q: Tensor, k: Tensor) -> Tensor:
    """The products of queries and keys, as (B, N, T, T)."""
    return q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).transpose(2, 3)


def rotated_in_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rope as Cohere's: channel 2i turns with 2i + 1."""
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)


@torch.no_grad()
def test_rope_rotates_neighbours(cohere: Saved) -> None:
    """Only products of queries and keys count, and they do not depend on the channels' order."""
    model, attention = load(cohere.folder), cohere.hf.model.layers[0].self_attn
    positions = torch.arange(T).expand(2, T)
    with pytest.raises(Seen) as caught:
        model(cohere.tokens, positions, [Spy()] * 2)
    got = scores_of(*caught.value.args)
    x = cohere.hf.model.layers[0].input_layernorm(cohere.hf.model.embed_tokens(cohere.tokens))
    q, k = (
        proj(x).unflatten(2, (-1, H)).transpose(1, 2)
        for proj in (attention.q_proj, attention.k_proj)
    )
    angles = positions[:, None, :, None] * 100.0 ** -(torch.arange(0, H, 2) / H)
    rope = angles.cos(), angles.sin()
    halves, pairs = (
        [turn(each, *rope) for each in (q, k)] for turn in (apply_rope, rotated_in_pairs)
    )
    wrong = "rope rotates channel 2i with 2i + 1, and not i with i + H / 2"
    assert not is_close(got, scores_of(*halves)), wrong
    moved = [i for i in (0, 1) if torch.allclose(caught.value.args[i], halves[i], atol=1e-4)]
    assert not moved, f"the channels of {'qk'[moved[0]]} must move as those of the other do"
    same(got, scores_of(*pairs), "the products of queries and keys are not Cohere's")


# --- The whole ------------------------------------------------------------------------------------

LINEAR = {"rope_type": "linear", "rope_theta": 100.0, "factor": 3.0}
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "not tied": {"tie_word_embeddings": False},
    "biases": {"attention_bias": True},
    "one kv head": {"num_key_value_heads": 1},
    "linear": {"rope_parameters": LINEAR},
}


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_those_of_transformers(case: str, tmp_path: Path) -> None:
    cohere = save(tmp_path, "Cohere", SETTINGS | OWN | CASES[case])
    got, scale = logits_of(load(tmp_path), cohere.tokens), cohere.hf.logit_scale
    assert not is_close(got, cohere.logits / scale), "the logits are not multiplied by logit_scale"
    wrong = "the logits are divided by logit_scale, and not multiplied"
    assert not is_close(got, cohere.logits / scale**2), wrong
    same(got, cohere.logits, "not what transformers computes")


@torch.no_grad()
def test_through_the_static_cache(cohere: Saved) -> None:
    model = load(cohere.folder)
    cache, parts, ends = StaticCache(model, 2, T), [], [5, 33, 64, 65, T]
    for start, end in zip([0, *ends], ends):
        parts.append(model(cohere.tokens[:, start:end], *cache.plan(start, end)))
    same(torch.cat(parts, 1), cohere.logits, "a text in chunks gives other logits")
    ids = write(model, cohere.tokens[0, :40].tolist(), 30).ids
    best = cohere.hf(torch.tensor([ids])).logits.argmax(-1)[0, 39:-1].tolist()
    assert ids[40:] == best, "transformers finds other tokens the likeliest"


@torch.no_grad()
def test_through_the_paged_engine(cohere: Saved) -> None:
    """Chunks of prompts and sequences with a shared prefix run in one forward. A scale that is left
    out moves no token to another place, and shows only in the log-probabilities."""
    engine = Engine(load(cohere.folder), num_blocks=40, max_num_seqs=4, max_num_batched_tokens=24)
    params = SamplingParams(max_tokens=20, seed=3, n=2, logprobs=0, ignore_eos=True)
    for request in serve(engine, *((row.tolist()[:40], params) for row in cohere.tokens)):
        for sequence in request.outputs:
            scores = cohere.hf(torch.tensor([sequence.ids])).logits[0].log_softmax(-1)
            want = [scores[39 + i, token.id] for i, token in enumerate(sequence.tokens)]
            got = torch.tensor([token.logprob for token in sequence.tokens])
            same(got, torch.stack(want), "the engine has other log-probabilities")


# --- Folders --------------------------------------------------------------------------------------


def test_what_a_file_leaves_out(tmp_path: Path) -> None:
    """A file that has only sizes means transformers' defaults for all the rest."""
    defaults = save(tmp_path, "Cohere", SIZES)
    raw = {"model_type": FAMILY} | SIZES
    (tmp_path / "config.json").write_text(json.dumps(raw))
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    model, theirs = load(tmp_path), defaults.hf.config
    ours = model.config
    theta = theirs.rope_parameters["rope_theta"]
    for name, want in {
        "num_key_value_heads": theirs.num_key_value_heads, "tie_word_embeddings": True,
        "max_position_embeddings": theirs.max_position_embeddings, "rope_theta": theta,
    }.items():  # fmt: skip
        got = getattr(ours, name)
        assert got == want, f"if config.json leaves it out, {name} is {want}, not {got}"
    wrong = "if config.json leaves them out, logit_scale is 0.0625 and layer_norm_eps 1e-5"
    same(logits_of(model, defaults.tokens), defaults.logits, wrong)


def test_a_folder_written_from_it_is_the_same_model(cohere: Saved, tmp_path: Path) -> None:
    """Bug: the rows of q and k move, or the scale is applied, again when what convert.py has
    written is read."""
    model = quantize_model(load(cohere.folder), "int8")
    out = tmp_path / "int8"
    words = ["--checkpoint", str(cohere.folder), "--mode", "int8", "--out", str(out)]
    assert convert.main(words) == 0
    again = logits_of(load(out), cohere.tokens)
    wrong = "the folder that convert.py wrote is another model"
    assert torch.equal(again, logits_of(model, cohere.tokens)), wrong


def packed(q: Tensor) -> Tensor:
    """(rows, columns) bytes -> (rows / 4, columns) words, four rows in one, the lowest first."""
    four = q.unflatten(0, (-1, 4)).transpose(1, 2).contiguous()  # (rows / 4, columns, 4)
    return four.view(torch.int32)[..., 0]


@torch.no_grad()
def test_a_gptq_folder(tmp_path: Path) -> None:
    """Bug: of a quantised matrix only some of the integers, scales and zero points move."""
    cohere = save(tmp_path, "Cohere", SETTINGS | OWN)
    files = load_file(tmp_path / "model.safetensors")
    for name, weight in [*files.items()]:
        if name.endswith("proj.weight"):
            groups = weight.unflatten(1, (-1, GROUP))  # (outputs, groups, GROUP)
            scales = (groups.abs().amax(2) / 100).half()  # (outputs, groups)
            zeros = torch.randint(110, 140, scales.shape)
            q = (groups / scales.float()[..., None]).round() + zeros[..., None]
            cohere.hf.get_parameter(name).copy_(
                ((q - zeros[..., None]) * scales.float()[..., None]).flatten(1)
            )
            path = name.removesuffix("weight")
            files[f"{path}qweight"] = packed(q.flatten(1).t().to(torch.uint8))
            files[f"{path}qzeros"] = packed((zeros - 1).to(torch.uint8)).t().contiguous()
            files[f"{path}scales"] = scales.t().contiguous()
            del files[name]
    save_file(files, tmp_path / "model.safetensors", {"format": "pt"})
    raw = json.loads((tmp_path / "config.json").read_text())
    raw["quantization_config"] = {"quant_method": "gptq", "bits": 8, "group_size": GROUP}
    raw["quantization_config"]["desc_act"] = False
    (tmp_path / "config.json").write_text(json.dumps(raw))
    want = cohere.hf(cohere.tokens).logits
    wrong = "a GPTQ folder gives other logits: qweight, scales and zeros move alike"
    same(logits_of(load(tmp_path), cohere.tokens), want, wrong)


def config_of(folder: Path, **changes: Any) -> Any:
    """Write the shortest config.json of a family and read it."""
    raw = {"model_type": FAMILY} | SIZES | changes
    (folder / "config.json").write_text(json.dumps(raw))
    return load_config(folder)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"use_qk_norm": True}, "use_qk_norm"),
        ({"logit_scale": 0}, "logit_scale"),
        ({"logit_scale": "1/16"}, "logit_scale"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"model_type": "cohere2"}, "cohere2"),
    ],
)
def test_what_is_not_supported_is_refused(
    cohere: Saved, tmp_path: Path, wrong: dict[str, Any], named: str
) -> None:
    """Bug: a setting that the engine does not compute is accepted, and the text is wrong."""
    load(cohere.folder)
    with pytest.raises(InputError, match=f"{named}.* (is not supported|must be)"):
        config_of(tmp_path, **wrong)
        pytest.fail(f"{wrong} must be refused, because it is not supported", pytrace=False)


# --- The other families ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("Llama", {}),
        ("Llama", {"tie_word_embeddings": True}),
        ("Phi3", {"partial_rotary_factor": 0.5, "pad_token_id": 0}),
        ("Olmo2", {}),
    ],
)
def test_other_families_are_as_before(
    cohere: Saved, tmp_path: Path, kind: str, changes: dict[str, Any]
) -> None:
    load(cohere.folder)
    other = save(tmp_path, kind, SETTINGS | changes)
    same(logits_of(load_model(tmp_path), other.tokens), other.logits, f"{kind}'s logits differ")


@pytest.mark.parametrize("kind", ["Llama", "Qwen2", "Granite"])
def test_other_families_do_not_read_its_settings(cohere: Saved, tmp_path: Path, kind: str) -> None:
    """As in transformers, a name that means nothing to a family is passed over."""
    load(cohere.folder)
    names = ("embedding_multiplier", "attention_multiplier", "residual_multiplier")
    own = dict.fromkeys((*names, "logits_scaling"), 0.5) if kind == "Granite" else {}
    own |= {"model_type": kind.lower(), "rms_norm_eps": 1e-3}
    own |= {"num_key_value_heads": 2}
    plain = config_of(tmp_path, **own)
    named = config_of(tmp_path, **own, **OWN, use_qk_norm=True)
    assert named == plain, f"{kind} does not read {', '.join(OWN)} or use_qk_norm"
