"""Exercise 22: a head of one layer guesses from the model's features. See 22-eagle.md."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from common import ROOT, SHAKESPEARE, bundled, logits_of, needs, serve, tiny_model, write
from safetensors.torch import load_file
from torch import Tensor

from around.folder import Tokenizer
from around.settings import SamplingParams
from model import Layer, Masks, NoCache, Transformer, View
from sampling import distribution, draw
from scheduler import Engine, EngineSequence, Request
from speculative import GUESS, DraftModel, NGram

HEAD = ROOT / "course" / "exercises" / "data" / "eagle.safetensors"
IDS = [5, 6, 7, 8, 9, 10, 11]
K = 4

# --- The slow twin: a whole text at once, without any cache ---------------------------------------


@torch.no_grad()
def features(model: Transformer, ids: list[int]) -> Tensor:
    """The stream behind the model's last layer, (T, D)."""
    seen = []
    hook = model.layers[-1].register_forward_hook(lambda block, args, x: seen.append(x[0]))
    logits_of(model, ids)
    hook.remove()
    return seen[0]


@torch.no_grad()
def head(model: Transformer, weights: dict[str, Tensor], ids: list[int], before: Tensor) -> Tensor:
    """What the head foretells of a text's features, (T, D).

    Args:
        before: (T, D), the feature of the token before each.
    """
    config = replace(model.config, windows=())  # it sees all
    block = Layer(config).to(model.dtype)
    block.load_state_dict({name: weights[f"layers.0.{name}"] for name in block.state_dict()})
    positions = torch.arange(len(ids))[None]
    x = torch.cat((model.embed(torch.tensor(ids)), before), 1)[None]  # (1, T, 2 D)
    x = F.linear(x, weights["fc.weight"].to(x.dtype))
    masks = Masks(config, positions, positions, model.dtype)
    return block(x, *model.rope(positions)[0], NoCache(masks, View()))[0]


@torch.no_grad()
def twin(
    model: Transformer, weights: dict[str, Tensor], ids: list[int], guesses: list[int]
) -> Tensor:
    """The logits that each of the guesses after a text is drawn from, (guesses, V)."""
    before = F.pad(features(model, ids[:-1]), (0, 0, 1, 0))  # zeros before the first token
    logits = []
    for i in range(len(guesses)):
        own = head(model, weights, ids + guesses[:i], before)
        logits.append(model.lm_head(model.norm(own[-1])))
        before = torch.cat((before, own[-1:]))  # the model has run no guess yet
    return torch.stack(logits)


# --- What is tested -------------------------------------------------------------------------------


def random_head(model: Transformer) -> dict[str, Tensor]:
    """A head whose guesses depend strongly on all that it reads."""
    generator = torch.Generator().manual_seed(2)
    D, block = model.config.hidden_size, Layer(model.config).state_dict()
    shapes = {"fc.weight": (D, 2 * D)} | {f"layers.0.{name}": x.shape for name, x in block.items()}
    weights = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator) * 0.6
        weights[name] = noise if len(shape) == 2 else torch.ones(shape)
    return weights


def make_engine(
    model: Transformer, weights: dict[str, Tensor], k: int = K, **limits: Any
) -> Engine:
    todo = "write the class Eagle(model, weights, k), with what an engine needs as its `runner`"
    proposer = needs("eagle", "Eagle", todo)(model, weights, k)
    assert isinstance(proposer, DraftModel), "DraftModel knows how to guess: let Eagle be one"
    assert hasattr(proposer, "runner"), "Eagle needs `runner`, which makes the engine's Runner"
    small = {"num_blocks": 60, "block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 32}
    return Engine(model, proposer=proposer, runner=proposer.runner, **small | limits)


def check(model: Transformer, weights: dict[str, Tensor], seq: EngineSequence, wrong: str) -> None:
    """Assert that a sequence's guesses were drawn from what the twin says, by its own numbers."""
    guess = seq.guess
    wanted = seq.num_guesses
    assert len(guess.ids) == wanted, f"{len(guess.ids)} guesses where {wanted} may be run"
    assert len(guess.probs) == len(guess.q) == wanted, (
        "a Guess needs the probs that each id was drawn from, and q: without these `accept` takes "
        "it for certain, and the distribution is no longer the model's"
    )
    if not wanted:
        return
    extended = [seq.with_guesses(guess.ids[:i]) for i in range(wanted)]
    want = distribution(twin(model, weights, seq.ids, guess.ids), extended)
    for i, (x, q, probs) in enumerate(zip(guess.ids, guess.q, guess.probs)):
        apart = (probs - want[i]).abs().max().item()
        place = f"guess {i + 1} after {len(seq.tokens)} tokens, probabilities {apart:.2g} apart"
        assert apart < 1e-4, f"{wrong} ({place})"
        assert abs(q - probs[x].item()) < 1e-6, "q is the probability of the id that was drawn"
        u = torch.tensor([extended[i].uniform(GUESS)])
        assert x == draw(probs[None], u).item(), (
            "draw guess by guess, by seq.with_guesses(...).uniform"
        )


def watch(engine: Engine, weights: dict[str, Tensor], wrong: str) -> Engine:
    """Let each step of an engine be checked."""
    propose = engine.proposer.propose

    def checked(seqs: list[EngineSequence]) -> None:
        propose(seqs)
        for seq in seqs:
            check(engine.model, weights, seq, wrong)

    engine.proposer.propose = checked
    return engine


def speak(
    model: Transformer, ids: list[int], wrong: str, k: int = K, **options: Any
) -> tuple[EngineSequence, Engine]:
    """One sequence, alone."""
    weights = random_head(model)
    engine = watch(make_engine(model, weights, k), weights, wrong)
    params = SamplingParams(**{"ignore_eos": True, "seed": 5} | options)
    (request,) = serve(engine, (ids, params))
    return request.outputs[0], engine


def test_the_first_guess() -> None:
    """One guess, and the end of the text."""
    wrong = (
        "the first guess: the head reads each token, and the model's feature of the token before "
        "it; zeros before the first"
    )
    for ids in (IDS, [3]):
        _, engine = speak(tiny_model(), ids, wrong, max_tokens=3)
        assert engine.proposer.offered == {0: 1}, "one guess, and the token after it"


def test_further_guesses() -> None:
    wrong = (
        "a further guess: the head reads the guess before it, and its own feature of the token "
        "before that, as the model has not run these; the first is right"
    )
    _, engine = speak(tiny_model(), IDS, wrong, max_tokens=K + 2)
    assert engine.proposer.offered[K - 1], f"{K} guesses fit, and the token after them"


@pytest.mark.parametrize("temperature", [0, 1, 3])
def test_guesses_after_a_verification(temperature: float) -> None:
    """The hotter, the more guesses are accepted. Where these are two or more, the head's keys of
    the first are older than its feature."""
    wrong = (
        "after a verification: the model has features of the accepted guesses now, from which the "
        "head has to make its keys and values anew; refused guesses are forgotten"
    )
    model = tiny_model()
    sequence, engine = speak(model, IDS, wrong, temperature=temperature, max_tokens=40)
    offered, accepted = engine.proposer.offered, engine.proposer.accepted
    assert accepted.total() < offered.total(), "no guess was refused: is each one tested?"
    assert accepted[2] or temperature < 3, "so hot, guesses are often right, and few were accepted"
    if not temperature:
        assert sequence.token_ids == write(model, IDS, 40).token_ids, "greedy text has changed"


@pytest.mark.parametrize("changes", [{"windows": (5, None)}, {"qk_norm": True, "qkv_bias": True}])
def test_other_models(changes: dict[str, Any]) -> None:
    """The head's layer is one of the model's kind, but sees the whole text."""
    wrong = "a model with " + " and ".join(changes)
    model = tiny_model(**changes)
    sequence, _ = speak(model, IDS * 2, wrong, temperature=0, max_tokens=12)
    assert sequence.token_ids == write(model, IDS * 2, 12).token_ids, f"{wrong}: greedy text"


# --- In the engine --------------------------------------------------------------------------------

LONG = [*range(2, 25)]
SCENES = {
    "a long prompt in chunks": (
        [LONG, IDS], {"max_num_batched_tokens": 20}, 1,
        "a chunk of a prompt begins with the feature of the token before it, from an earlier step",
    ),
    "several sequences": (
        [IDS, LONG[:9], [4], [9, 3] * 4], {}, 1,
        "each row of a batch has features of its own",
    ),
    "forks": (
        [LONG[:10], IDS], {"max_num_seqs": 6}, 3,
        "the outputs of one prompt share blocks: where a block is copied, so are its features",
    ),
    "preemption": (
        [IDS, LONG[:9], [9, 3] * 4, [4]], {"num_blocks": 11}, 1,
        "after preemption the features are computed again; until then nothing can be guessed, and "
        "the last token has to wait, see SpeculativeProposer.count and Engine._num_to_run",
    ),
}  # fmt: skip


@pytest.mark.parametrize("scene", SCENES)
def test_in_the_engine_each_gets_what_it_gets_alone(scene: str) -> None:
    texts, limits, n, wrong = SCENES[scene]
    model = tiny_model()
    weights = random_head(model)
    engine = watch(make_engine(model, weights, **limits), weights, wrong)
    hot = {"temperature": 3, "max_tokens": 14}  # so that many guesses are accepted
    params = SamplingParams(seed=5, n=n, ignore_eos=True, **hot)
    requests = serve(engine, *((ids, params) for ids in texts))
    assert engine.proposer.accepted[2], "so hot, guesses are often right, and few were accepted"
    assert bool(engine.stats["num_preemptions"]) == (scene == "preemption")
    for ids, request in zip(texts, requests):
        for i, got in enumerate(request.outputs):
            alone, _ = speak(model, ids, "alone", seed=5 + i, **hot)
            assert got.token_ids == alone.token_ids, f"other tokens than alone: {wrong}"


def test_a_prefix_that_is_found() -> None:
    """The first request ends with its first token, before anything was guessed for it; the others
    begin as it does, and go on otherwise at the end of a block, or within one."""
    wrong = (
        "a prefix that another request has left: the head's keys must be there, too, and at no "
        "position depend on a later token, as the next request may have another one there"
    )
    model = tiny_model()
    weights = random_head(model)
    engine = watch(make_engine(model, weights), weights, wrong)
    one, more = (SamplingParams(max_tokens=n, seed=5, ignore_eos=True) for n in (1, 10))
    serve(engine, (LONG[:12], one))
    texts = [[*LONG[:8], *IDS], [*LONG[:6], *IDS], LONG[:12]]
    requests = serve(engine, *((ids, more) for ids in texts))
    assert engine.stats["prefix_cache_hits"] >= 8 + 4 + 8
    for ids, request in zip(texts, requests):
        alone, _ = speak(model, ids, "alone", max_tokens=10, seed=5)
        assert request.outputs[0].token_ids == alone.token_ids, wrong


def test_two_engines_over_one_model() -> None:
    """A model that remembers whose features it left would mix them up, and slow down whoever else
    runs it."""
    wrong = "another engine over the same model has run in between: leave nothing on the model"
    model = tiny_model()
    weights, params = random_head(model), SamplingParams(max_tokens=10, seed=5, ignore_eos=True)
    engines = [watch(make_engine(model, weights, num_blocks=n), weights, wrong) for n in (20, 40)]
    for engine, ids in zip(engines, (LONG[:9], IDS)):
        engine.add_request(ids, params)
    while any(engine.queue for engine in engines):
        for engine in engines:
            engine.step()
    assert not any(module._forward_hooks for module in model.modules()), wrong


def test_the_distribution_is_the_models() -> None:
    """Many sequences; their second and third token, of which each may be a guess."""
    model = tiny_model(vocab_size=6, num_hidden_layers=1)
    engine = make_engine(
        model, random_head(model), 2, max_num_seqs=64, num_blocks=128, max_num_batched_tokens=192
    )
    count, ids = 1920, [3, 1, 4]
    params = SamplingParams(max_tokens=4, n=64, ignore_eos=True)
    requests: list[Request] = []
    for seed in range(0, count, 64):
        requests += serve(engine, (ids, replace(params, seed=seed)))
    texts = Counter(tuple(seq.token_ids[:3]) for each in requests for seq in each.outputs)
    assert sum(texts.values()) == count and 0.1 < engine.proposer.accepted[0] / count < 0.95
    # Of each first token, how often a second follows, and of each second one, a third.
    for length in (2, 3):
        seen = Counter()
        for text, n in texts.items():
            seen[text[:length]] += n
        chi2, free = 0.0, 0
        for start in {text[:-1] for text in seen}:
            total = sum(n for text, n in seen.items() if text[:-1] == start)
            p = logits_of(model, [*ids, *start])[-1].softmax(-1)
            expected = p * total
            for x in (expected > 5).nonzero().flatten().tolist():
                chi2 += (seen[(*start, x)] - expected[x].item()) ** 2 / expected[x].item()
                free += 1
        wrong = (
            f"token {length} is not distributed as the model says: chi2 {chi2:.0f}, {free} cells"
        )
        assert chi2 < free + 4 * (2 * free) ** 0.5, wrong


# --- The head that ships --------------------------------------------------------------------------

# Speeches from the part of the corpus that neither the model nor the head was trained on.
PROMPTS = [
    "KATHARINA:\nWell have you heard, but something hard of hearing:\n",
    "TRANIO:\n'Tis some odd humour pricks him to this fashion;\n",
    "Pedant:\nAlas! sir, it is worse for me than so;\n",
    "VINCENTIO:\nBut is it true? or else is it your pleasure,\n",
    "MIRANDA:\nO the heavens!\nWhat foul play had we, that we came from thence?\n",
    "PROSPERO:\nMy brave spirit!\nWho was so firm, so constant, that this coil\n",
    "ARIEL:\nThat's my noble master!\n",
    "SEBASTIAN:\n'Twas a sweet marriage, and we prosper well in our return.\n",
]


@pytest.mark.parametrize("temperature", [0, 1])
def test_the_trained_head_guesses_better_than_prompt_lookup(temperature: float) -> None:
    """Greedily both write the same texts, and sampled, texts of the same distribution."""
    model, tokenizer = bundled(), Tokenizer(SHAKESPEARE)
    texts = [tokenizer.encode(prompt) for prompt in PROMPTS]
    same = [write(model, ids, 64).token_ids for ids in texts] if temperature == 0 else []
    limits = {"num_blocks": 80, "block_size": 16, "max_num_seqs": 8, "max_num_batched_tokens": 300}
    params = SamplingParams(temperature=temperature, seed=1, max_tokens=64, ignore_eos=True)
    found = {}
    for name, engine in (
        ("the head", make_engine(model, load_file(HEAD), **limits)),
        ("prompt lookup", Engine(model, proposer=NGram(K), **limits)),
    ):
        requests = serve(engine, *((ids, params) for ids in texts))
        offered, accepted = engine.proposer.offered.total(), engine.proposer.accepted.total()
        found[name] = accepted / offered, accepted / engine.proposer.offered[0]
        print(f"{name}: {accepted} of {offered} guesses")
        for ids, request in zip(same, requests):
            assert request.outputs[0].token_ids == ids, f"{name} has changed greedy text"
    head, lookup = found["the head"], found["prompt lookup"]
    wrong = "the trained head guesses worse than it can: does it read the stream before `norm`?"
    assert head[0] > 0.4 and head[1] > 1.5, f"{wrong} ({head[0]:.0%}, {head[1]:.2f} a forward)"
    assert head[0] > lookup[0] and head[1] > lookup[1], f"{wrong} ({head} against {lookup})"
