"""Every way to run a model, and the slow twin, whose tokens all of them must make.

test_equivalence.py compares them, on a CPU or a GPU. A way takes a model and jobs, each a prompt's
ids and its SamplingParams, and returns each job's tokens. A new fast path adds one entry to PATHS,
or to ENGINES where the scheduler runs it. Sampled guesses use other random numbers; for these the
slow twin guesses too, see plain. Read: plain, PATHS, ENGINES, ROWS, kind_of.
"""

import copy
import itertools
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from around.fast import make_fast
from around.fast.attending import attend_fast
from around.fast.compiling import replay_steps
from around.folder import Tokenizer, build, load_model
from generate import generate
from kv_cache import StaticCache
from model import Config, Transformer
from quantize import QuantLinear, quantize_model
from sampling import SamplingParams, Sequence, Token, distribution, draw
from scheduler import Engine, Guess, Request
from speculative import GUESS, DraftModel, NGram, SpeculativeProposer, lookup
from tools.books import audit

DRAFT = Path(__file__).resolve().parent.parent / "checkpoints" / "shakespeare-draft"
PROMPTS = ("", "ROMEO:\n", "To be, or not to be, that is the question:\n" * 2)
EVERYTHING = SamplingParams(
    temperature=1.2, top_k=40, top_p=0.9, min_p=0.02, repetition_penalty=1.1, presence_penalty=0.3,
    frequency_penalty=0.2, logit_bias={20: 2.0}, seed=-5, max_tokens=13, ignore_eos=True,
    logprobs=0,
)  # fmt: skip
PLAIN = SamplingParams(temperature=0, max_tokens=13, logprobs=0)
SETTINGS = [
    PLAIN,
    # A negative penalty makes the text repeat itself, so that some n-gram guesses are right.
    replace(PLAIN, temperature=0.9, top_p=0.95, frequency_penalty=-1.0, seed=7),
    EVERYTHING,
    replace(EVERYTHING, temperature=0, frequency_penalty=-2.0),
    # What Qwen suggests: filters without penalties.
    replace(PLAIN, temperature=0.6, top_k=20, top_p=0.95, seed=3),
]
STRUCTURE = {"regex": "[A-Za-z ,]{9,}"}
BLOCK = 4
Job = tuple[list[int], SamplingParams]
Tokens = list[list[Token]]  # of each job


def split(params: SamplingParams) -> list[SamplingParams]:
    """Return the params of each of n outputs by itself. Seeds count up, and wrap around."""
    if params.seed is None:
        return [replace(params, n=1)] * params.n
    seeds = [(params.seed + i + 2**63) % 2**64 - 2**63 for i in range(params.n)]
    return [replace(params, n=1, seed=seed) for seed in seeds]


def logits_of(model: Transformer, ids: list[int]) -> Tensor:
    """Run a text without a cache; return (T, V)."""
    tokens = torch.tensor([ids], device=model.device)
    return model(tokens, torch.arange(len(ids), device=model.device)[None])[0]


@torch.no_grad()
def plain(
    model: Transformer, sequence: Sequence, draft: Transformer | None = None, speculate: int = 0
) -> Sequence:
    """Complete one sequence without a cache: guess, run the whole text, verify. Without guesses
    that is forward, sample, append. Returns the sequence."""
    proposer = SpeculativeProposer(speculate)
    while not sequence.finish_reason:
        count = proposer.count(sequence)
        text = "".join(map(chr, sequence.ids))
        ids = [] if draft else [*map(ord, lookup(text, count))]
        guess = sequence.guess = Guess(ids, [1.0] * len(ids))
        for _ in range(count if draft else 0):
            ahead = sequence.with_guesses(guess.ids)
            q = distribution(logits_of(draft, sequence.ids + guess.ids)[-1:], [ahead])
            i = draw(q, torch.tensor([ahead.uniform(GUESS)], dtype=torch.float64)).item()
            guess.ids.append(i)
            guess.q.append(q[0, i].item())
            guess.probs.append(q[0])
        logits = logits_of(model, sequence.ids + guess.ids)[-1 - len(guess.ids) :]
        tokens = proposer.verify(logits, [sequence])[0]
        for token in tokens:
            if not sequence.finish_reason:
                sequence.append(token)
    return sequence


def run_plain(model: Transformer, jobs: list[Job]) -> Tokens:
    """Run the slow twin itself; it is a way of its own on another device than the twin's."""
    return [plain(model, Sequence(*job, model.config)).tokens for job in jobs]


def run_alone(model: Transformer, jobs: list[Job], chunk: int = 512, kv_dtype: str = "auto"):
    results = []
    for ids, params in jobs:
        sequence = Sequence(ids, params, model.config)
        slabs = StaticCache(model, 1, sequence.max_len, kv_dtype)
        results.append(list(generate(model, sequence, slabs, chunk)))
    return results


def run_replayed(model: Transformer, jobs: list[Job], **options: Any) -> Tokens:
    model = copy.deepcopy(model)
    replay_steps(model)
    return run_alone(model, jobs, **options)


@cache
def changed(model: Transformer, change: Callable, *args: Any) -> Transformer:
    """Make a faster copy: `change` makes a model faster in place."""
    model = copy.deepcopy(model)
    change(model, *args)
    return model


def run_changed(
    model: Transformer, jobs: list[Job], run: Callable, change: tuple, **options: Any
) -> Tokens:
    if "draft" in options:
        options["draft"] = changed(options["draft"], *change)
    return run(changed(model, *change), jobs, **options)


def run_fast(model: Transformer, jobs: list[Job], run: Callable, **options: Any) -> Tokens:
    return run_changed(model, jobs, run, (attend_fast,), **options)


def run_compiled(
    model: Transformer, jobs: list[Job], run: Callable, batch_size: int | None, **options: Any
) -> Tokens:
    kind = (make_fast, True, batch_size, options.get("kv_dtype", "auto"))
    return run_changed(model, jobs, run, kind, **options)


def make(
    model: Transformer, draft: Transformer | None = None, speculate: int = 0, **limits: Any
) -> Engine:
    proposer = NGram(speculate) if speculate else None
    if draft:
        proposer = DraftModel(draft, speculate, model.config.vocab_size)
    return Engine(model, proposer=proposer, **{"block_size": BLOCK, "num_blocks": 640} | limits)


def finish(engine: Engine, requests: list[Request]) -> Tokens:
    while engine.queue:
        engine.step()
        audit(engine)
    assert len(engine.pool.available) == engine.pool.num_blocks
    assert engine.proposer.offered.total() or not engine.proposer.k
    return [request.outputs[0].tokens for request in requests]


def run_engine(model: Transformer, jobs: list[Job], **options: Any) -> Tokens:
    """Run all prompts at once through the scheduler."""
    engine = make(model, **options)
    return finish(engine, [engine.add_request(*job) for job in jobs])


def run_small(
    model: Transformer, jobs: list[Job], seqs: int = 3, size: int = 2, speculate: int = 0,
    **options: Any,
) -> Tokens:  # fmt: skip
    """Give prompts a budget of `size` tokens a step: with one sequence, the size of its chunks."""
    budget = max(seqs * (1 + speculate) + size * (seqs > 1), size)
    options |= {"max_num_seqs": seqs, "max_num_batched_tokens": budget, "speculate": speculate}
    return run_engine(model, jobs, **options)


def run_prefix_cached(model: Transformer, jobs: list[Job], **options: Any) -> Tokens:
    """Run twice: the second time, all but the ends of the prompts is found in the cache."""
    engine = make(model, **options)
    for _ in range(2):
        cached = engine.stats["prefix_cache_hits"]
        results = finish(engine, [engine.add_request(*job) for job in jobs])
    whole = sum((len(ids) - 1) // BLOCK for ids, _ in jobs)
    assert engine.stats["prefix_cache_hits"] - cached == whole * BLOCK > 0
    return results


def run_preempted(model: Transformer, jobs: list[Job], **options: Any) -> Tokens:
    """Use a pool that holds the longest sequence and little more."""
    longest = max(len(ids) + params.max_tokens for ids, params in jobs)
    engine = make(model, num_blocks=-(-longest // BLOCK) + 1, **options)
    results = finish(engine, [engine.add_request(*job) for job in jobs])
    assert engine.stats["num_preemptions"] > 0
    return results


def run_forked(model: Transformer, jobs: list[Job], **options: Any) -> Tokens:
    """Use n > 1: the continuations share the prompt's blocks, the last of which is partly filled.
    Continuation i of the seed - i has the job's own seed."""
    engine, requests = make(model, **options), []
    for i, (ids, params) in enumerate(jobs):
        seed = None if params.seed is None else params.seed - i % 3
        requests.append(engine.add_request(ids, replace(params, n=3, seed=seed)))
    finish(engine, requests)
    return [request.outputs[i % 3].tokens for i, request in enumerate(requests)]


def run_scored(model: Transformer, jobs: list[Job], **options: Any) -> Tokens:
    """Ask for the log-probabilities of the prompts, whose tokens come first."""
    engine = make(model, **options)
    jobs = [(ids, replace(params, prompt_logprobs=params.logprobs)) for ids, params in jobs]
    requests = [engine.add_request(*job) for job in jobs]
    outputs = finish(engine, requests)
    return [request.prompt_tokens + tokens for request, tokens in zip(requests, outputs)]


def run_beside_aborted(model: Transformer, jobs: list[Job], **options: Any) -> Tokens:
    """Add neighbours that begin alike, and are aborted at different points."""
    engine = make(model, max_num_seqs=8, max_num_batched_tokens=64, **options)
    doomed = [engine.add_request([*ids, 5], params) for ids, params in jobs]
    requests = [engine.add_request(*job) for job in jobs]
    doomed += [engine.add_request(ids[:-1] or [7], params) for ids, params in jobs]
    for request in doomed:
        engine.step()
        engine.abort(request)
        audit(engine)
    return finish(engine, requests)


Way = Callable[..., Tokens]
PATHS: dict[str, Way] = {
    "no cache": run_plain,
    "static cache": run_alone,
    "static cache, fast": partial(run_fast, run=run_alone),
    "prompt in chunks of 1": partial(run_alone, chunk=1),
    "prompt in chunks of 7": partial(run_alone, chunk=7),
    "prompt in chunks of 17, fast": partial(run_fast, run=run_alone, chunk=17),
    "compiled": partial(run_compiled, run=run_alone, batch_size=1),
    **{f"paged, chunks of {n}": partial(run_small, seqs=1, size=n) for n in (1, 3, BLOCK, 7)},
}
ENGINES: dict[str, Way] = {
    "paged, alone": partial(run_small, seqs=1, size=512),
    "paged, plain": run_engine,
    "paged, fast": partial(run_fast, run=run_engine),
    "paged, plain, small budget": run_small,
    "paged, fast, small budget": partial(run_fast, run=run_small, size=20),
    "paged, chunks of 5": partial(run_small, seqs=1, size=BLOCK + 1),
    "prefix cached": run_prefix_cached,
    "preempted": run_preempted,
    "n = 3": run_forked,
    "beside aborted neighbours": run_beside_aborted,
    "prompts scored": run_scored,
    "paged, compiled": partial(run_compiled, run=run_engine, batch_size=None),
}
PATHS |= ENGINES
REPLAYED: dict[str, Way] = {"replayed": run_replayed}  # needs CUDA


Case = tuple[Transformer, list[list[int]]]  # a model, and prompts


# 128 words, hidden and intermediate sizes, 3 layers, 4 heads of which 2 are kv heads, head_dim.
SMALL = Config(128, 64, 96, 3, 4, 2, 16)
CONFIGS = {
    # Windows, norms of q and k, biases and an lm_head, which the bundled model does not have.
    "sliding": replace(SMALL, num_key_value_heads=1, head_dim=32, windows=(5, None, 5),
                       qkv_bias=True, qk_norm=True),
    # Six experts, two of which run for each token.
    "experts": replace(SMALL, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=64),
    # Norms before and after each part, norms of q and k over all heads, gelu, a multiplier of the
    # embedding, a layer without rope, and caps.
    "sandwich": replace(
        SMALL, windows=(None, 5, None), ropes=(0, 1, 0), wide_qk_norm=True, post_norm=True,
        score_cap=1.5, logits_cap=8.0,
        rope_speeds=(tuple(0.3**i for i in range(8)), (0.0,) * 8), gelu=True,
        embedding_multiplier=3.0,
    ),
}  # fmt: skip
CASES = ("trained", *CONFIGS)


@cache
def case_of(name: str) -> Case:
    """Return the smaller bundled model, whose confident predictions make near ties unlikely, or one
    of random weights; and its prompts."""
    if name == "trained":
        tokenizer = Tokenizer(DRAFT)
        return load_model(DRAFT, dtype=torch.float32), [tokenizer.encode(p) for p in PROMPTS]
    torch.manual_seed([*CONFIGS].index(name))
    model = build(CONFIGS[name]).requires_grad_(False)
    for parameter in model.parameters():  # bfloat16 holds them, so that one twin serves both dtypes
        parameter.copy_(parameter.bfloat16())
    return model, [torch.randint(128, (n,)).tolist() for n in (1, 9, 40)]


@cache
def draft_of(model: Transformer) -> Transformer:
    """Make a draft of all layers but the last; it is sometimes right."""
    layers = model.config.num_hidden_layers - 1
    windows, ropes = model.config.windows[:layers], model.config.ropes[:layers]
    config = replace(model.config, num_hidden_layers=layers, windows=windows, ropes=ropes)
    draft = build(config)
    draft.load_state_dict(model.state_dict(), strict=False)
    return draft


@cache
def quantised(model: Transformer, mode: str) -> Transformer:
    return quantize_model(copy.deepcopy(model), mode, group_size=32)


@cache
def dequantised(model: Transformer) -> Transformer:
    """Make the plain twin of a quantised model."""
    twin = copy.deepcopy(model)
    for module in twin.modules():
        if isinstance(module, QuantLinear):
            module.forward = partial(F.linear, weight=module.dequantize(), bias=module.bias)
    return twin


KINDS: dict[str, dict[str, Any]] = {
    "n-gram": {"speculate": 4}, "draft": {"speculate": 4}, "itself, quantised": {"speculate": 3},
    "int8 cache": {"kv_dtype": "int8"},
}  # fmt: skip
WAYS = ("static cache", "static cache, fast", "paged, plain", "paged, fast")
ROWS = [  # the way, and what it is combined with
    *((path, "plain") for path in PATHS),
    *((path, guess) for path in ENGINES for guess in ("draft", "n-gram")),
    *((path, "itself, quantised") for path in ("paged, alone", "paged, plain")),
    *((path, "int8 cache") for path in (*WAYS, "preempted", "n = 3")),
    *((path, f"{bits} weights") for path in WAYS[::2] for bits in ("int8", "int4")),
    *((path, "structure") for path in ("paged, plain", "preempted", "n = 3")),
]
# Compiling takes long, so each kind of code is compiled once, for one of the cases.
COMPILED = [
    ("trained", "compiled", "plain"), ("sliding", "compiled", "int8 cache"),
    ("trained", "paged, compiled", "draft"), ("trained", "paged, compiled", "int4 weights"),
    ("experts", "paged, compiled", "plain"), ("sliding", "paged, compiled", "int8 cache"),
    ("sandwich", "paged, compiled", "int8 weights"),
]  # fmt: skip
FEW = (0, 4, 8, 11, 12)  # jobs that cover each prompt and each setting; all of them take long


def rows_of(case: str, device: str = "cpu") -> list[tuple[str, str]]:
    """Return the rows of a case on a device. Structures need a tokenizer, so these run with the
    trained model only. On a CPU, "no cache" is the slow twin itself."""
    rows = [row for row in ROWS if "compiled" not in row[0]]
    rows = [row for row in rows if row[0] != "no cache" or device != "cpu"]
    rows += [(path, "plain") for path in REPLAYED] * (device == "cuda")
    rows += [row for each, *row in COMPILED if each == case]
    return [(path, kind) for path, kind in rows if kind != "structure" or case == "trained"]


@cache
def kind_of(case: str, kind: str) -> tuple[Transformer, dict[str, Any]]:
    """Return the model, and the options of its ways, on the CPU in float32."""
    model, _ = case_of(case)
    options = dict(KINDS.get(kind, {}))
    if kind == "draft":
        options["draft"] = draft_of(model)
    if kind == "itself, quantised":
        options["draft"] = quantised(model, "int8")
    if kind == "structure":
        from around.structured import make_matcher

        options["make_matcher"] = partial(make_matcher, Tokenizer(DRAFT), model.config)
    return quantised(model, kind.split()[0]) if "weights" in kind else model, options


@cache
def placed(case: str, kind: str, device: str, dtype: torch.dtype) -> tuple[Transformer, dict]:
    """Return the same on another device, and in another dtype."""

    def move(model: Transformer) -> Transformer:
        model = copy.deepcopy(model).to(device)
        for parameter in model.parameters():  # not buffers: scales stay float32
            parameter.data = parameter.data.to(dtype)
        return model

    model, options = kind_of(case, kind)
    draft = {"draft": move(options["draft"])} if "draft" in options else {}
    return move(model), options | draft


@cache
def jobs_of(case: str, kind: str = "plain") -> list[Job]:
    """Combine every prompt with every setting."""
    more = {"structured_outputs": STRUCTURE} if kind == "structure" else {}
    return [(ids, replace(params, **more)) for params in SETTINGS for ids in case_of(case)[1]]


@cache
def expected(case: str, kind: str, job: int) -> Sequence:
    """Return what the slow twin makes of a job. Greedily it needs no guesses."""
    (model, options), (ids, params) = kind_of(case, kind), jobs_of(case, kind)[job]
    options = dict(options)
    sequence = Sequence(ids, params, model.config)
    if kind == "int8 cache":
        cache = StaticCache(model, 1, sequence.max_len, "int8")
        list(generate(model, sequence, cache))
        return sequence
    if kind == "structure":
        sequence.matcher = options.pop("make_matcher")(STRUCTURE)
    return plain(twin_of(case, kind), sequence, **options if params.temperature > 0 else {})


# How far log-probabilities may be off, see compare. On a CPU they are off by 1e-6 and 0.015 at
# most; a key that is hidden and should be visible makes it 0.14.
NEAR = {"float32": 1e-4, "bfloat16": 0.05}


def compare(
    case: str, kind: str, chosen: Iterable[int], found: Tokens, exact: bool = True
) -> tuple[float, list[str]]:
    """Compare the tokens of chosen jobs with the slow twin's, and their log-probabilities with what
    the twin gives to the same text. In bfloat16 the tokens need not be the twin's: not `exact`.

    Returns:
        How far the log-probabilities are off (the root mean square of the differences, as a share
        of the standard deviation of the twin's), and a line for each job with other tokens.
    """
    ours, theirs, faults = [], [], []
    for job, tokens in zip(chosen, found, strict=True):
        want = expected(case, kind, job)
        text = [token.id for token in tokens]
        if tokens[0].logprob is not None:  # else it begins with the prompt
            text = want.ids[: want.prompt_len] + text
        if exact and text != want.ids:
            same = [*itertools.takewhile(lambda pair: pair[0] == pair[1], zip(want.ids, text))]
            where = f"token {len(same)} of {len(text)}"
            faults.append(f"job {job}: {where} is not that of {len(want.ids)}")
        logprobs = [token.logprob for token in tokens if token.logprob is not None]
        ours += logprobs
        theirs += score(case, kind, tuple(text))[-len(logprobs) :]
    ours, theirs = torch.tensor(ours), torch.tensor(theirs)
    return ((ours - theirs).square().mean().sqrt() / theirs.std()).item(), faults


def twin_of(case: str, kind: str) -> Transformer:
    """Return the slow twin's model."""
    model, _ = kind_of(case, kind)
    return dequantised(model) if "weights" in kind else model


@cache
@torch.no_grad()
def score(case: str, kind: str, ids: tuple[int, ...]) -> list[float]:
    """Return the slow twin's log-probability of each token but the first."""
    logprobs = logits_of(twin_of(case, kind), [*ids]).log_softmax(-1)
    return logprobs[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()
