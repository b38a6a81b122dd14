"""A rehearsal of a GPU: on the device of pretend.py all that runs eagerly gives the CPU's tokens,
and the host reads as rarely as it can, since a GPU stands still at each read.

What a real GPU computes, how fast, and what torch.compile makes of it, is not rehearsed.
"""

import inspect
import json
import math
import sys
import textwrap
from functools import cache
from pathlib import Path

import pytest
import torch
import torchgen
import yaml
from conftest import DRAFT, SHAKESPEARE
from pretend import CUDA, KERNELS, MPS, Gpu
from test_gptq import other_folder
from tiny import tiny_folder

import experts
import generate
import llm
import model
import paged
import quantize
import sampling
import scheduler
import speculative
from around.fast import compiling
from around.fast.compiling import compile_model
from around.folder.weights import load_model
from around.settings import SamplingParams, SettingError
from kv_cache import StaticCache
from sampling import Sequence
from scheduler import Engine
from speculative import DraftModel, NGram
from tools import bench

pytestmark = pytest.mark.usefixtures("one_thread")

V = 300  # more than sampling.NUM_SELECTED
NAN = 299  # a token that makes logits NaN
REPEATS = [3, 1, 4, 1, 5] * 4
PROMPTS = [REPEATS, REPEATS[:7], [9, 2, 6], [5], REPEATS[1:], [8] * 17]
LOUD = dict(temperature=0.8)
FILTERS = LOUD | dict(top_k=40, top_p=0.95, min_p=0.001)
PENALTIES = dict(repetition_penalty=1.2, presence_penalty=0.3, frequency_penalty=0.2,
    logit_bias={7: 2.0, 9: -3.0})  # fmt: skip
WORDS = dict(structured_outputs=dict(regex="[a-z ]{9,}"))
GUESSES = 3  # of a draft, in a step

# For each way to run: the folder's form, what is wished for, what the engine is given, and how
# often the host reads in a step, at most. Two are the tokens, and whether all logits are finite.
# One more: where only the likeliest are kept, whether more of them are to be looked at; where
# log-probabilities are wanted, these, and once for each prompt of several tokens; with guesses,
# their chances, and what each forward of a draft gives; in each layer with experts, how many tokens
# each of them gets. So does a step in which logits are not finite.
WAYS = {
    "greedy": ({}, {}, {}, 2),
    "windows": (dict(sliding_window=5), {}, {}, 2),
    "every setting": ({}, FILTERS | PENALTIES, {}, 3),
    "a sort of all": ({}, LOUD | dict(top_k=290), {}, 3),
    "greedy and sampled": ({}, [{}, LOUD, PENALTIES] * 2, {}, 2),
    "log-probabilities": ({}, LOUD | dict(logprobs=3), {}, 3),
    "of prompts": ({}, dict(logprobs=0, prompt_logprobs=True), {}, 3 + 5),
    "several outputs": ({}, LOUD | dict(n=3), {}, 2),
    "preempted": ({}, LOUD, dict(num_blocks=5), 2),
    "int8 keys": ({}, {}, dict(kv_dtype="int8"), 2),
    "a step in parts": ({}, {}, dict(max_num_batched_tokens=11), 2),
    "structure": (SHAKESPEARE, WORDS | LOUD, {}, 2),
    "n-grams": ({}, {}, dict(guess="n-grams"), 3),
    "n-grams, every setting": ({}, FILTERS | PENALTIES, dict(guess="n-grams"), 4),
    "n-grams, log-probabilities": ({}, dict(logprobs=2), dict(guess="n-grams"), 3 + 6),
    "draft": ({}, {}, dict(guess="draft"), 3 + GUESSES),
    "draft, sampled": ({}, LOUD, dict(guess="draft"), 3 + GUESSES),
    "draft, every setting": ({}, FILTERS, dict(guess="draft"), 4 + 2 * GUESSES),
    "draft, structure": (SHAKESPEARE, WORDS | LOUD, dict(guess="draft"), 3 + GUESSES),
    "experts": ("experts", {}, {}, 2 + 2),
    "int8": ({}, {}, dict(quantize="int8"), 2),
    "int4": ({}, {}, dict(quantize="int4"), 2),
    "gptq": ("gptq", {}, {}, 2),
    "awq": ("awq", {}, {}, 2),
    "not finite": ({}, {}, dict(prompts=[[1, NAN], *PROMPTS[1:]]), 2),
    "draft not finite": ({}, {}, dict(guess="draft", broken=8), 3 + GUESSES),
}  # fmt: skip
MOE = dict(architectures=["Qwen3MoeForCausalLM"], num_experts=4, num_experts_per_tok=2,
    moe_intermediate_size=32)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A function: from the form that WAYS names to a folder, made once."""
    made = {}

    def make(form):
        if form is SHAKESPEARE or str(form) in made:
            return made.get(str(form), form)
        torch.manual_seed(0)
        into, sizes = tmp_path_factory.mktemp("gpu"), dict(vocab_size=V)
        if form in ("gptq", "awq"):
            out = other_folder(into, form, **sizes)[0]
        else:
            out = tiny_folder(into, **sizes, **(MOE if form == "experts" else form))
        return made.setdefault(str(form), out)

    return make


def loaded(path, device, mode=None, broken=None):
    """A model; the embeddings of the tokens NAN and `broken` are NaN."""
    made = load_model(path, device, torch.float32)
    if path != SHAKESPEARE and path != DRAFT:
        made.embed_tokens.weight[[NAN, broken or NAN]] = torch.nan
    return quantize.quantize_model(made, mode, 32) if mode else made


def engine_run(path, device, wish, prompts=PROMPTS, guess=None, quantize=None, broken=None,
               gpu=None, **limits):  # fmt: skip
    """Each output's tokens and why it ended; and the reads of the step that has the most."""
    made = loaded(path, device, quantize)
    tokenizer = generate.Tokenizer(SHAKESPEARE) if path == SHAKESPEARE else None
    proposer = NGram(GUESSES) if guess == "n-grams" else None
    if guess == "draft":
        draft = DRAFT if path == SHAKESPEARE else path
        draft = loaded(draft, device, "int4", broken)  # which errs now and then
        proposer = DraftModel(draft, GUESSES, made.config.vocab_size)

    def matcher(wish):
        from around.structured import make_matcher

        return make_matcher(tokenizer, made.config, wish)

    limits = dict(num_blocks=60, max_num_seqs=8, block_size=8) | limits
    at = Engine(made, tokenizer, proposer, matcher, **limits)
    wishes = wish if isinstance(wish, list) else [wish] * len(prompts)
    common = dict(max_tokens=7, seed=1, ignore_eos=True, temperature=0)
    requests = [
        at.add_request(prompt, SamplingParams(**common | each))
        for prompt, each in zip(prompts, wishes, strict=True)
    ]
    most = []
    while at.queue:
        at.step()
        reads = gpu.taken() if gpu else []
        most = max(most, reads, key=len)
    assert (at.pool.num_blocks < 60) == (at.stats["num_preemptions"] > 0)
    assert not guess or sum(at.proposer.offered) > 0
    results = [request.prompt_tokens for request in requests]
    results += [job.tokens for request in requests for job in request.outputs]
    return results, [job.finish_reason for r in requests for job in r.outputs], most


def assert_same(ours, theirs):
    """The same tokens; log-probabilities but for rounding."""
    assert [[t.id for t in each] for each in ours] == [[t.id for t in each] for each in theirs]
    for token, other in ((t, o) for us, them in zip(ours, theirs) for t, o in zip(us, them)):
        assert (token.logprob is None) == (other.logprob is None)
        assert math.isclose(token.logprob or 0, other.logprob or 0, abs_tol=1e-4)
        assert [i for i, _ in token.top] == [i for i, _ in other.top]


ON_CPU = {}  # what ran there, by its name in WAYS


def rehearse(folder, name, kernel="efficient", device=CUDA):
    form, wish, options, most = WAYS[name]
    if name not in ON_CPU:
        ON_CPU[name] = engine_run(folder(form), "cpu", wish, **options)
    theirs, reasons, _ = ON_CPU[name]
    with Gpu(kernel, device) as gpu:
        ours, ends, reads = engine_run(folder(form), device, wish, gpu=gpu, **options)
    assert_same(ours, theirs)
    assert ends == reasons and ("error" in ends) == name.startswith("not finite")
    assert len(reads) == most, reads
    return gpu.used


@pytest.mark.parametrize("name", WAYS)
def test_engine(folder, name):
    """A tensor that stays on the CPU; a read by the host for each sequence, or for each guess."""
    if "structure" in name:
        pytest.importorskip("llguidance")
    rehearse(folder, name)


def plain_run(path, device, wish, kv_dtype="auto", gpu=None):
    """The plain loop: the tokens, and the reads of the token that has the most."""
    made, most = loaded(path, device), []
    wish = SamplingParams(**dict(max_tokens=9, seed=1, ignore_eos=True, temperature=0) | wish)
    sequence = Sequence(PROMPTS[0], wish, made.config)
    cache = StaticCache(made, 1, 40, kv_dtype)
    for _ in generate.generate(made, sequence, cache, chunk=11):
        most = max(most, gpu.taken() if gpu else [], key=len)
    ids = torch.tensor([sequence.ids], device=device)
    places = torch.arange(len(sequence.ids), device=device)[None]
    scores = made(ids, places).tolist()  # without a cache
    return [sequence.tokens], torch.tensor(scores), most


PLAIN = {
    "greedy": ({}, "auto", 2 + 1),  # a prompt of two chunks is looked at twice
    "int8 keys": ({}, "int8", 2 + 1),
    "every setting": (FILTERS | PENALTIES, "auto", 3 + 1),
    "log-probabilities": (LOUD | dict(logprobs=2), "auto", 3 + 1),
}


def rehearse_plain(folder, name, kernel="efficient", device=CUDA):
    wish, kv_dtype, most = PLAIN[name]
    theirs, scores, _ = plain_run(folder({}), "cpu", wish, kv_dtype)
    with Gpu(kernel, device) as gpu:
        ours, found, reads = plain_run(folder({}), device, wish, kv_dtype, gpu)
    assert_same(ours, theirs)
    torch.testing.assert_close(found, scores, atol=1e-4, rtol=1e-4)
    assert len(reads) == most, reads
    return gpu.used


@pytest.mark.parametrize("name", PLAIN)
def test_plain_loop(folder, name):
    """As test_engine, of the static cache and of no cache at all."""
    rehearse_plain(folder, name)


@pytest.mark.parametrize("kernel", KERNELS)
def test_layouts_of_attention(folder, kernel):
    """A view that fits the result of the CPU's attention, and no other kernel's."""
    rehearse_plain(folder, "greedy", kernel)
    rehearse(folder, "greedy", kernel)


@cache
def runs_on_mps(operator):
    """Whether PyTorch's own table has it for MPS, or makes it of others."""
    function = declared()[operator]
    kernels = {key for keys in function.get("dispatch", {}) for key in keys.split(", ")}
    below = function.get("structured_delegate", f"{operator}_out")  # what it is made of
    if "MPS" in kernels or below not in declared():
        return "MPS" in kernels or not kernels or any("Composite" in key for key in kernels)
    return runs_on_mps(below)


@cache
def declared():
    """PyTorch's operators, as it declares them: name -> what it says of them."""
    path = Path(torchgen.__file__).parent / "packaged/ATen/native/native_functions.yaml"
    functions = yaml.load(path.read_text(), yaml.CSafeLoader)
    return {function["func"].partition("(")[0]: function for function in functions}


@pytest.mark.parametrize("name", [*WAYS, *(f"plain: {name}" for name in PLAIN)])
def test_mps(folder, name):
    """float64, which MPS does not have; an operator that it lacks."""
    if "structure" in name:
        pytest.importorskip("llguidance")
    rehearsal = rehearse if name in WAYS else rehearse_plain
    used = rehearsal(folder, name.removeprefix("plain: "), device=MPS)
    assert len(used) > 20 and [operator for operator in used if not runs_on_mps(operator)] == []
    assert not runs_on_mps("segment_reduce")


def test_mps_is_not_compiled_for(folder):
    """An error of the compiler, ten seconds later."""
    with Gpu(device=MPS):
        made = loaded(folder({}), MPS)
        with pytest.raises(SettingError, match=r"--compile on 'mps' .*cpu, cuda"):
            compile_model(made)


@pytest.fixture
def cuda(monkeypatch):
    """PyTorch finds the device."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: CUDA)
    # There are no graphs here; see test_cuda_graphs.
    monkeypatch.setattr(compiling.Replayed, "replay", lambda self, *plan: self.forward(*plan))
    for name, value in (("mem_get_info", (2**30, 2**31)), ("get_device_name", "Pretended"),
                        ("max_memory_allocated", 2**30)):  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)


@pytest.mark.parametrize("flags", [[], ["--speculate-ngram", "2", "--kv-dtype", "int8"]])
def test_command_line(cuda, capsys, flags):
    """A device that is found and then not used; a count of free memory that knows CPUs alone."""
    texts = {}
    for device in ("cpu", "cuda"):
        with Gpu() as gpu:
            argv = ["--checkpoint", str(SHAKESPEARE), "--device", device, "--prompt", "ROMEO:",
                    "--max-new-tokens", "8", "--temperature", "0", *flags]  # fmt: skip
            assert generate.main(argv) == 0
        texts[device] = capsys.readouterr().out
        assert bool(gpu.reads) == (device == "cuda")
    assert texts["cpu"] == texts["cuda"] and len(texts["cpu"]) > 8


@pytest.mark.parametrize("command", [
    ["latency", "--prompt-tokens", "5", "--batch", "1", "2", "--quantize", "none", "int8"],
    ["throughput", "--requests", "3", "--prompt-tokens", "4", "--max-num-seqs", "2",
     "--sampling", "greedy", "llama"],
])  # fmt: skip
def test_bench(cuda, folder, monkeypatch, capsys, command):
    """Measurements that run on a CPU alone, as where a buffer of theirs stays there."""
    change(monkeypatch, bench, "read_bandwidth", "2**26", "2**20")  # of memory
    argv = [*command, "--checkpoint", str(folder({})), "--new-tokens", "3", "--repeat", "1",
            "--device", "cuda", "--json"]  # fmt: skip
    with Gpu() as gpu:
        monkeypatch.setattr(sys, "argv", ["bench.py", *argv])
        assert bench.main() == 0
    found = json.loads(capsys.readouterr().out)
    assert found["hardware"].startswith("Pretended") and found["runs"] and gpu.reads


# --- The rehearsal itself -------------------------------------------------------------------------

# What must fail: a line of the engine, another in its place, the way that finds it, and how.
MIXED = RuntimeError, "is on the (cpu|meta)"
VIEW = RuntimeError, "view size is not compatible"
LAYOUT = (paged, "attention", "return y", "y.transpose(1, 2).view(-1)\n    return y", "greedy")
READS = AssertionError, "assert .* =="
FAULTS = [
    # tensors that stay on the CPU
    (llm, "load_model", "rope_frequencies(config).to(device)", "rope_frequencies(config)",
     "greedy", MIXED),
    (paged.Runner, "wipe_new_blocks", "(new, device=self.model.device)", "(new)", "greedy", MIXED),
    (paged.Runner, "group", "for row in rows], device=device", "for row in rows]", "greedy",
     MIXED),
    (paged.Runner, "group", "key_positions.flatten(1).to(device)", "key_positions.flatten(1)",
     "greedy", MIXED),
    (paged.Runner, "group", "+ first_of_head).to(device)", "+ first_of_head)", "greedy", MIXED),
    (paged.Runner, "plan", "tensor, device=self.model.device)", "tensor)", "greedy", MIXED),
    (paged.Blocks, "attend", "torch.cat(attended, 1)", "torch.cat(attended, 1).cpu()", "greedy",
     MIXED),
    (paged, "decode", "scale).to(dtype)", "torch.ones(scale.shape)).to(dtype)", "int8 keys", MIXED),
    (sampling, "filter_ranked", "params], device=ranked.device)", "params])", "every setting",
     MIXED),
    (sampling, "filter_ranked", "(ranked.shape[1], device=ranked.device)", "(ranked.shape[1])",
     "every setting", MIXED),
    (sampling, "distribution", "(temperature, device=logits.device)", "(temperature)",
     "greedy and sampled", MIXED),
    (sampling, "penalize_", "int64).to(scores.device)", "int64)", "every setting", MIXED),
    (sampling, "scored", "[ids], device=logits.device", "[ids]", "log-probabilities", MIXED),
    (sampling, "draw", "u[:, None].to(mass)", "u[:, None]", "several outputs", MIXED),
    (speculative.Guesser, "verify", "torch.tensor(ids, device=p.device)", "torch.tensor(ids)",
     "n-grams", MIXED),
    (quantize.QuantLinear, "dequantize", "self.zeros[..., None]", "self.zeros[..., None].cpu()",
     "int4", MIXED),
    # a number that MPS does not have
    (sampling, "draw", "u[:, None].to(mass)", "u[:, None].double().to(mass.device)",
     "several outputs", (RuntimeError, "no float64", "efficient", MPS)),
    # views that hang on a layout
    (paged, "attention", "y.reshape(q.shape)", "y.view(q.shape)", "greedy", VIEW),
    (model.Attention, "forward", "y.transpose(1, 2).flatten(2)",
     "y.transpose(1, 2).view(*x.shape[:2], -1)", "greedy", VIEW),
    (*LAYOUT, (*VIEW, "flash")),
    (*LAYOUT, (*VIEW, "cudnn")),
    # more reads
    (scheduler.Engine, "step", "finite(logits).cpu()", "finite(logits)", "greedy", READS),
    (sampling, "sample", "logits.float().argmax(-1).tolist()",
     "[int(i) for i in logits.float().argmax(-1)]", "greedy", READS),
    (sampling, "sample", "logits.float().argmax(-1).tolist()",
     "(ids := logits.float().argmax(-1))[ids >= 0].tolist()", "greedy", READS),
    (sampling, "sample", "logits.float().argmax(-1).tolist()",
     "(ids := logits.float().argmax(-1)).cpu()[ids.cpu() >= 0].tolist()", "greedy", READS),
    (sampling, "keep_likeliest_fast", ".any(-1).tolist()",
     ".any(-1).tolist() + [probs[0, 0].item()]", "every setting", READS),
    (sampling, "distribution", "argmax(-1)", "argmax(-1) * logits.isnan().any().item()",
     "greedy and sampled", READS),
    (speculative.DraftModel, "propose", "logits[[*guessing.values()]]",
     "logits[[job in guessing for job in rows]]", "draft", READS),
    (speculative, "accept", "torch.where(rest.any(), rest, p[n])", "rest if rest.any() else p[n]",
     "n-grams", READS),
    (speculative.DraftModel, "propose", "if chance > 0:", "if chance > 0 and ids.max() >= 0:",
     "draft", READS),
    (experts.SparseMLP, "mix", "if len(part)", "if len(part) and order.max() > 0", "experts",
     READS),
]  # fmt: skip


def change(monkeypatch, owner, name, old, new):
    """Change the source of a function, or of a method."""
    before = getattr(owner, name)
    function = inspect.unwrap(before)
    home = sys.modules[function.__module__]
    source, made = textwrap.dedent(inspect.getsource(function)), {}
    assert source.count(old) == 1
    # Within a function that has what `super()` asks for, and in the file whose lines are noted.
    source = textwrap.indent(source.replace(old, new), " ")
    source = f"def make(__class__):\n{source}\n return {name}"
    exec(compile(source, inspect.getsourcefile(function), "exec"), vars(home), made)
    made = made["make"](owner)
    for each in (owner, *sys.modules.values()):  # all that have imported it
        if vars(each).get(name) is before:
            monkeypatch.setattr(each, name, made)


@pytest.mark.parametrize(("owner", "name", "old", "new", "way", "failure"), FAULTS)
def test_faults_are_found(folder, monkeypatch, owner, name, old, new, way, failure):
    """A rehearsal at which everything passes."""
    change(monkeypatch, owner, name, old, new)
    error, text, *kernel = failure
    with pytest.raises(error, match=text):
        rehearse(folder, way, *kernel)


def test_operators_as_on_a_gpu():
    """What the other tests rest on: numbers of the CPU may stand beside tensors of the GPU, and
    index tensors too, but no others; and what counts as a read."""
    with Gpu() as gpu:
        x, at = torch.arange(6.0, device="cuda").view(2, 3), torch.tensor([1, 0])
        x[at] += torch.tensor(1.0)
        assert x.tolist() == [[1, 2, 3], [4, 5, 6]] and (x + 1).device == x.device == CUDA
        for wrong in (lambda: x + torch.ones(3), lambda: x.index_select(0, at),
                      lambda: torch.ones(2)[x[0].long()], lambda: x.copy_(x + torch.ones(2, 3)),
                      lambda: torch.cat((x, torch.ones(2, 3))),
                      lambda: x.new_ones(3) + torch.ones(3, device="meta")):  # fmt: skip
            with pytest.raises(RuntimeError, match="is on the"):
                wrong()
        with torch.device("cuda"):
            assert torch.empty(2).device == CUDA
        assert torch.empty(2).device.type == "cpu"
    with pytest.raises(RuntimeError, match="outside"):
        x + 1
    assert gpu.taken() == []  # a test may read
