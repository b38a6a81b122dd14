"""Exercise 10: the model's own first layers guess for it. See 10-early-exit.md."""

from typing import Any

import pytest
import torch
from common import bundled, needs, serve, tiny_model, write

from around.settings import SamplingParams
from model import Transformer
from paged import Row, Runner
from quantize import quantize_model
from scheduler import Engine, EngineSequence
from speculative import DraftModel

IDS = [5, 6, 7, 8, 9, 10, 11]


def self_draft(runner: Runner, layers: int, k: int = 4) -> DraftModel:
    make = needs("speculative", "self_draft", "write self_draft(runner, layers, k) -> DraftModel")
    draft = make(runner, layers, k)
    assert isinstance(draft, DraftModel), "DraftModel knows how to guess: give it a Runner"
    assert draft.k == k
    return draft


def speak(
    model: Transformer, ids: list[int], layers: int, count: int = 16, **settings: Any
) -> tuple[EngineSequence, DraftModel]:
    """Write one sequence, with the first layers as the draft."""
    engine = Engine(model, num_blocks=8, max_num_seqs=1)
    engine.proposer = self_draft(engine.runner, layers)
    settings = {"temperature": 0, "max_tokens": count, "ignore_eos": True} | settings
    (request,) = serve(engine, (ids, SamplingParams(**settings)))
    return request.outputs[0], engine.proposer


def test_the_draft_has_no_weights_of_its_own() -> None:
    model = tiny_model(num_hidden_layers=4, windows=(None, 5, None, 3), qk_norm=True)
    draft = self_draft(Runner(model, 4, 8), 2).runners[0].model
    assert len(draft.layers) == draft.config.num_hidden_layers == 2
    assert draft.config.windows == (None, 5)
    assert len(model.layers) == 4, "the model itself stays whole"
    ours = {p.data_ptr() for p in model.parameters()}
    own = [name for name, p in draft.named_parameters() if p.data_ptr() not in ours]
    assert not own, f"{own} are copies: let the draft use the model's own modules"


def test_the_draft_has_no_cache_of_its_own() -> None:
    """Its layers are the model's, so their keys and values are in the model's own memory."""
    model = tiny_model(num_hidden_layers=3)
    runner = Runner(model, 4, 8)
    (draft,) = self_draft(runner, 2).runners
    assert len(draft.kv) == 2, "the draft needs the pools of its own layers only"
    assert len(runner.kv) == 3, "the model's Runner must keep all of its pools"
    for mine, theirs in zip(draft.kv, runner.kv):
        assert mine.data_ptr() == theirs.data_ptr(), (
            "the draft has a second cache for the same keys"
        )
    assert runner.model is model
    assert draft.forward([Row([2], 0, IDS)]).shape == (1, 32)


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_the_text_is_that_of_the_model(layers: int) -> None:
    model = tiny_model(num_hidden_layers=4)
    sequence, draft = speak(model, IDS, layers)
    assert draft.offered[0], "nothing was guessed"
    assert sequence.token_ids == write(model, IDS, 16).token_ids


def test_layers_that_add_nothing_are_not_missed() -> None:
    """If the later layers add nothing to the stream, every guess must be right."""
    model = tiny_model(num_hidden_layers=4)
    for block in model.layers[2:]:
        block.self_attn.o_proj.weight.zero_()
        block.mlp.down_proj.weight.zero_()
    for temperature in (0, 1):
        _, draft = speak(model, IDS, 2, temperature=temperature, seed=3)
        found = f"{draft.accepted.total()} of {draft.offered.total()}"
        wrong = f"{found}: does the draft use the model's own norm?"
        assert draft.accepted == draft.offered, wrong


def test_in_the_engine_each_gets_what_it_gets_alone() -> None:
    """Several sequences run at once, forked (n = 2), in a pool so small that some are preempted."""
    model = tiny_model(num_hidden_layers=3)
    engine = Engine(model, num_blocks=10, block_size=4, max_num_seqs=4, max_num_batched_tokens=24)
    engine.proposer = self_draft(engine.runner, 1)
    texts = [[*range(2, 2 + n)] for n in (3, 10, 6)]
    params = SamplingParams(max_tokens=12, seed=5, n=2, ignore_eos=True)
    requests = serve(engine, *((ids, params) for ids in texts))
    assert engine.proposer.offered[0]
    assert engine.stats["num_preemptions"]
    for ids, request in zip(texts, requests):
        for i, got in enumerate(request.outputs):
            alone, _ = speak(model, ids, 1, 12, temperature=1.0, seed=params.seed + i)
            assert got.token_ids == alone.token_ids


def test_of_a_trained_model() -> None:
    """The bundled model was not trained to exit early, yet five of its six layers guess well."""
    model = bundled()
    ids = [10, 20, 30, 40]
    sequence, draft = speak(model, ids, 5, 24)
    assert sequence.token_ids == write(model, ids, 24).token_ids
    print(f"{draft.accepted.total()} of {draft.offered.total()} guesses were accepted")
    assert draft.accepted[0] > 0


def test_of_a_quantised_model() -> None:
    model = quantize_model(tiny_model(num_hidden_layers=3), "int8")
    sequence, _ = speak(model, IDS, 2)
    assert sequence.token_ids == write(model, IDS, 16).token_ids


@pytest.mark.parametrize("layers", [-1, 0, 2, 3])
def test_some_layers_must_be_left(layers: int) -> None:
    runner = Runner(tiny_model(num_hidden_layers=2), 4, 8)
    self_draft(runner, 1)
    with pytest.raises(ValueError, match=str(layers)):
        self_draft(runner, layers)


def test_no_gradients_and_in_eval_mode() -> None:
    draft = self_draft(Runner(tiny_model(), 4, 8), 1).runners[0].model
    assert not draft.training
    logits = draft(torch.tensor([IDS]), torch.arange(len(IDS))[None])
    assert not logits.requires_grad
