"""A rehearsal of a GPU: on the device of pretend.py all that runs eagerly gives the CPU's tokens,
the host reads as rarely as it can, since a GPU stands still at each read. CUDA graphs are rehearsed
by a stand-in. What a real GPU computes, how fast, and what torch.compile makes of it, only
tools/gpu_check.py can tell."""

import gc
import weakref
from argparse import Namespace
from dataclasses import replace
from functools import cache, partial

import pytest
import torch
import ways
from conftest import DRAFT, SHAKESPEARE
from pretend import CUDA, Gpu, leaves
from test_equivalence import test_same_tokens as compare_with_twin
from test_gptq import other_folder
from tiny import tiny_folder
from torch.utils._python_dispatch import TorchDispatchMode

import generate
from around.fast import compiling
from around.fast.attending import attend_fast
from around.folder import Tokenizer, build, load_model
from around.settings import SamplingParams, SettingError
from around.structured import make_matcher
from kv_cache import StaticCache
from model import Config
from quantize import quantize_model
from scheduler import Engine
from speculative import DraftModel, NGram
from tools import gpu_check

V = 300  # more than sampling.keep_likeliest sorts at first
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
# often the host reads in a step, at most: the tokens, and whether all logits are finite; whether
# more than the likeliest are to be looked at; log-probabilities, also once for each prompt; with
# guesses, their chances, and what each forward of a draft gives; in each layer with experts, how
# many tokens each of them gets.
WAYS = {
    "greedy": ("plain", {}, {}, 2),
    "windows": ("windows", {}, {}, 2),
    "every setting": ("plain", FILTERS | PENALTIES, {}, 3),
    "a sort of all": ("plain", LOUD | dict(top_k=290), {}, 3),
    "greedy and sampled": ("plain", [{}, LOUD, PENALTIES] * 2, {}, 2),
    "log-probabilities": ("plain", LOUD | dict(logprobs=3), {}, 3),
    "of prompts": ("plain", dict(logprobs=0, prompt_logprobs=0), {}, 3 + 5),
    "several outputs": ("plain", LOUD | dict(n=3), {}, 2),
    "preempted": ("plain", LOUD, dict(num_blocks=5), 2),
    "int8 keys": ("plain", {}, dict(kv_dtype="int8"), 2),
    "a step in parts": ("plain", {}, dict(max_num_batched_tokens=11), 2),
    "structure": ("trained", WORDS | LOUD, {}, 2),
    "n-grams, every setting": ("plain", FILTERS | PENALTIES, dict(guess="n-grams"), 4),
    "n-grams, log-probabilities": ("plain", dict(logprobs=2), dict(guess="n-grams"), 2 + 6),
    "draft": ("plain", {}, dict(guess="draft"), 2 + GUESSES),
    "draft, every setting": ("plain", FILTERS, dict(guess="draft"), 4 + 2 * GUESSES),
    "experts": ("experts", {}, {}, 2 + 2),
    "int8": ("plain", {}, dict(quantize="int8"), 2),
    "int4": ("plain", {}, dict(quantize="int4"), 2),
    "gptq": ("gptq", {}, {}, 2),
    "not finite": ("plain", {}, dict(prompts=[[1, NAN], *PROMPTS[1:]]), 2),
    "draft not finite": ("plain", {}, dict(guess="draft", broken=8), 2 + GUESSES),
}  # fmt: skip
# On a GPU, attention is that of around/fast; in these ways that of the root is rehearsed too.
ALONE = ("greedy", "windows", "preempted", "int8 keys", "a step in parts")


MOE = dict(model_type="qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
SMALL = Config(32, 16, 16, 1, 2, 1, 8)
FORMS = {"plain": {}, "windows": dict(sliding_window=5), "experts": MOE}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a function from the form that WAYS names to a folder, made once."""

    @cache
    def make(form):
        torch.manual_seed(0)
        if form == "trained":
            return SHAKESPEARE
        if form in FORMS:
            return tiny_folder(tmp_path_factory.mktemp("gpu"), vocab_size=V, **FORMS[form])
        return other_folder(tmp_path_factory.mktemp("gpu"), form, vocab_size=V)[0]

    return make


def loaded(path, gpu, fast, mode=None, broken=NAN):
    """Load a model; the embeddings of the tokens NAN and `broken` are NaN."""
    made = load_model(path, CUDA if gpu else "cpu", torch.float32)
    if path not in (SHAKESPEARE, DRAFT):
        made.embed_tokens.weight[[NAN, broken]] = torch.nan
    if fast:
        attend_fast(made)
    return quantize_model(made, mode, 32) if mode else made


def engine_run(path, wish, gpu=None, fast=False, prompts=PROMPTS, guess=None, quantize=None,
               broken=NAN, **limits):  # fmt: skip
    """Run prompts through an engine. Returns each output's tokens and why it ended, and the reads
    of the step that has the most."""
    made, trained, most = loaded(path, gpu, fast, quantize), path == SHAKESPEARE, []
    tokenizer = Tokenizer(path) if trained else None
    proposer = NGram(GUESSES) if guess == "n-grams" else None
    if guess == "draft":  # in 4 bits, so it errs now and then
        draft = loaded(DRAFT if trained else path, gpu, fast, "int4", broken)
        proposer = DraftModel(draft, GUESSES, made.config.vocab_size)
    limits = dict(num_blocks=60, max_num_seqs=8, block_size=8) | limits
    at = Engine(made, tokenizer, proposer, partial(make_matcher, tokenizer, made.config), **limits)
    common = dict(max_tokens=7, seed=1, ignore_eos=True, temperature=0)
    wishes = wish if isinstance(wish, list) else [wish] * len(prompts)
    wishes = [SamplingParams(**common | each) for each in wishes]
    requests = [at.add_request(*each) for each in zip(prompts, wishes, strict=True)]
    while at.queue:
        at.step()
        most = max(most, gpu.taken() if gpu else [], key=len)
    assert (at.pool.num_blocks < 60) == (at.stats["num_preemptions"] > 0)
    assert not guess or at.proposer.offered.total() > 0
    outputs = [seq for request in requests for seq in request.outputs]
    results = [request.prompt_tokens for request in requests] + [seq.tokens for seq in outputs]
    return results, [seq.finish_reason for seq in outputs], most


ON_CPU = {}  # what ran there, by the name of the way


def rehearse(folder, name, fast=True):
    """Run a way here and on the CPU; compare the tokens (log-probabilities but for rounding), why
    they end, and the reads."""
    form, wish, options, most = WAYS[name]
    if name not in ON_CPU:
        ON_CPU[name] = engine_run(folder(form), wish, **options)
    theirs, reasons, _ = ON_CPU[name]
    with Gpu() as gpu:
        ours, ends, reads = engine_run(folder(form), wish, gpu, fast, **options)
    for us, them in zip(ours, theirs, strict=True):
        for token, other in zip(us, them, strict=True):
            assert token.id == other.id and dict(token.top).keys() == dict(other.top).keys()
            assert token.logprob == pytest.approx(other.logprob, abs=1e-4)
    assert ends == reasons and ("error" in ends) == name.startswith("not finite")
    assert len(reads) == most, reads
    assert torch.float64 not in gpu.dtypes, "MPS has no float64"


@pytest.mark.parametrize("name", WAYS)
def test_ways(folder, name):
    """Run each of WAYS on the pretended GPU, compare the tokens with the CPU's, and count the
    host's reads. Catches: a tensor that stays on the CPU; a read by the host for each sequence, or
    for each guess; a view that fits the result of the CPU's attention alone."""
    if "structure" in name:
        pytest.importorskip("llguidance")
    rehearse(folder, name)
    if name in ALONE:
        rehearse(folder, name, fast=False)


def test_static_cache():
    """Run the plain loop on the pretended GPU, compare with the slow twin, and count the host's
    reads. Catches: what test_ways catches; tensors of two devices mixed by tools/gpu_check.py."""
    with Gpu() as gpu:
        compare_with_twin("trained", "static cache", "plain", "float32", "cuda")
    # For each of 65 tokens: finite or not, the token, its log-probability; for 52, whether to sort.
    assert len(gpu.reads) == 3 * 65 + 52
    assert torch.float64 not in gpu.dtypes, "MPS has no float64"


def test_command_line(monkeypatch, capsys):
    """Run generate.py on the CPU and on the pretended GPU, and compare the texts. Catches: a device
    that is found and then not used; a count of free memory that knows CPUs alone; on MPS, an error
    of the compiler ten seconds later."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: CUDA)
    monkeypatch.setattr(compiling, "replay_steps", lambda _: None)  # no graphs; see below
    words = "--prompt ROMEO: --max-new-tokens 8 --temperature 0 --kv-dtype int8 --device"
    texts = []
    for flags in ("cpu", "cuda", "cuda --speculate-ngram 2"):
        with Gpu() as gpu:
            assert generate.main(f"{words} {flags}".split()) == 0
        texts.append(capsys.readouterr().out)
        assert bool(gpu.reads) == ("cuda" in flags)
    assert texts == texts[:1] * 3 and len(texts[0]) > 8
    with pytest.raises(SettingError, match=r"--compile on 'mps' .*cpu, cuda"):
        compiling.compile_model(Namespace(device=torch.device("mps")))


class Recorded(TorchDispatchMode):
    """A stand-in for a CUDA graph, which calls each operator again, on the same memory. As a graph,
    it does not see a tensor that the host makes anew, another size, or a value that Python read."""

    made = 0

    def __init__(self):
        super().__init__()
        self.calls = []
        Recorded.made += 1

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        call = partial(func, *args, **(kwargs or {}))
        self.calls.append((call, call()))
        return self.calls[-1][1]

    def replay(self):
        for call, kept in self.calls:
            for old, new in zip(leaves(kept), leaves(call()), strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


@pytest.fixture
def graphs(monkeypatch):
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Recorded)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph: graph)
    Recorded.made = 0


def test_replayed_tokens(graphs):
    """Run the equivalence test through graphs that are replayed. Catches: a step that reads the
    plan of the step before."""
    for case, kind in (("trained", "int8 cache"), ("sliding", "plain")):
        compare_with_twin(case, "replayed", kind, "float32", "cpu")
    assert 0 < Recorded.made < 60  # few sizes


def test_graphs_of_a_static_cache(graphs):
    """Replay the steps of two caches, one after the other, and compare the logits with a twin's.
    Catches: a graph that writes over the caller's tokens, over logits returned before or over the
    cache's slots; a new cache read by another's graphs; graphs with memory of their own, or that
    keep a cache's memory for ever."""
    model = build(SMALL)
    steps = compiling.Replayed(model.forward)
    for _ in range(2):
        slabs, twin = StaticCache(model, 2, 128), StaticCache(model, 2, 128)
        given = torch.randint(32, (128, 2, 1)), torch.arange(128)[:, None] % 2  # tokens, and rows
        kept = [each.clone() for each in given]
        got = [steps(t, *slabs.plan(i, i + 1), row) for i, (t, row) in enumerate(zip(*given))]
        for i, (logits, t, row) in enumerate(zip(got, *kept)):
            torch.testing.assert_close(logits, model(t, *twin.plan(i, i + 1), row).detach())
        assert all(map(torch.equal, given, kept)) and slabs.slots.equal(torch.arange(192))
        ((graph, _, _),) = steps.graphs[slabs.slabs[0]].values()  # the last, for all others' memory
        graph.calls.clear()  # a real graph holds no tensors
        weak = weakref.ref(slabs.slabs[0])
        del slabs
        gc.collect()
        assert weak() is None and not steps.graphs
    assert Recorded.made == 4  # one for each 64 positions
    mixed = build(replace(SMALL, num_experts=2))
    compiling.replay_steps(mixed)
    assert "forward" not in vars(mixed)


@pytest.mark.nightly
def test_the_check(capfd):
    """Run tools/gpu_check.py on the CPU with a tiny model. Catches: a part of it that does not
    run."""
    assert ("replayed", "plain") in ways.rows_of("trained", "cuda")
    assert gpu_check.main(["--device", "cpu", "--tiny"]) == 0
    assert capfd.readouterr().out.endswith("\neager: passed\nspeed: passed\ncompiled: passed\n")
