"""Exercise 13: the layers of a model, divided among several processes. See 13-pipeline.md."""

import json
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
from common import SHAKESPEARE, bundled, needs, run_ranks, serve, tiny_model

import tp
from around.folder import build, load_model, named_tensors
from around.folder.weights import locate_tensors
from around.settings import InputError, SamplingParams
from around.start.ranks import join
from model import Config, Transformer
from paged import Runner
from scheduler import Engine

TODO = (
    "make the file in the root, with stage(model, files, rank, ranks), which is used like tp.shard"
)
PROMPTS = [[10, 20, 30], [*range(100, 140)], [7] * 9]


def cut(config: Config, rank: int, ranks: int) -> tuple[Transformer, dict[str, Any]]:
    """Make one rank's stage of an empty model. Here the files are just the stored names."""
    stage = needs("pp", "stage", TODO)
    with torch.device("meta"):
        model = build(config)
    return stage(model, {name: name for name, _ in named_tensors(model)}, rank, ranks)


@pytest.mark.parametrize(("layers", "ranks"), [(4, 2), (6, 3), (5, 2), (7, 4), (3, 1)])
def test_each_layer_is_on_one_rank(layers: int, ranks: int) -> None:
    config = tiny_model(num_hidden_layers=layers).config
    order: list[int] = []
    for rank in range(ranks):
        share, files = cut(config, rank, ranks)
        own = sorted({int(str(at).split(".")[1]) for at in files.values() if "layers." in str(at)})
        assert layers // ranks <= len(own) <= -(-layers // ranks), "divide the layers evenly"
        assert len(share.layers) == share.config.num_hidden_layers == len(own), (
            "a stage has only its own layers, and its config must say so, because caches read it"
        )
        order += own
        names = {name for name, _ in named_tensors(share)}
        assert files.keys() == names, "list the files under the stage's own names"
        assert all(p.is_meta for p in share.parameters()), "stage() must not allocate anything"
    assert order == [*range(layers)], "every layer must be on one rank, in order"


def test_a_layer_takes_its_window_along() -> None:
    windows = (None, 5, None, 3)
    config = tiny_model(num_hidden_layers=4, windows=windows).config
    for rank in range(2):
        share, _ = cut(config, rank, 2)
        assert share.config.windows == windows[2 * rank : 2 * rank + 2]


def test_a_layer_keeps_its_weights() -> None:
    """Rank 1's layers.0 is the model's layers.3."""
    share, files = cut(tiny_model(num_hidden_layers=6).config, 1, 2)
    assert files["layers.0.mlp.down_proj.weight"] == "layers.3.mlp.down_proj.weight"
    assert files["layers.2.input_layernorm.weight"] == "layers.5.input_layernorm.weight"
    assert share.embed_tokens.weight.dtype == torch.float32


def test_too_many_ranks_are_refused() -> None:
    cut(tiny_model().config, 0, 2)
    for rank in range(3):  # every rank must notice: one that continued would wait for ever
        with pytest.raises(InputError):
            cut(tiny_model().config, rank, 3)


# --- Several processes ----------------------------------------------------------------------------


def talk(model: Transformer, runner: type[Runner]) -> dict[str, Any]:
    """Run several requests: greedy and sampled, in chunks, forked and preempted."""
    engine = Engine(model, num_blocks=12, max_num_seqs=4, max_num_batched_tokens=32, runner=runner)
    greedy = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, logprobs=0)
    sampled = SamplingParams(max_tokens=10, seed=4, n=2, ignore_eos=True)
    asked = [(PROMPTS[1], greedy), *((ids, sampled) for ids in PROMPTS)]
    outputs = [sequence for request in serve(engine, *asked) for sequence in request.outputs]
    return {
        "ids": [sequence.token_ids for sequence in outputs],
        "logprobs": [round(token.logprob, 3) for token in outputs[0].tokens],
    }


def process(rank: int, ranks: int, out: Path) -> None:
    """Run one rank, as torchrun would start it: rank 0 generates, and the others follow."""
    report: dict[str, Any] = {}
    try:
        from pp import stage

        with join(torch.device("cpu")):
            model = load_model(
                SHAKESPEARE, "cpu", torch.float32, lambda m, files: stage(m, files, rank, ranks)
            )
            report["layers"] = len(model.layers)
            if rank:
                tp.follow(model)
            else:
                report |= talk(model, tp.Leader)
    except BaseException:
        report["error"] = traceback.format_exc()
    (out / f"{rank}.json").write_text(json.dumps(report))


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_processes_agree_with_one(ranks: int, tmp_path: Path) -> None:
    needs("pp", "stage", TODO)
    want = talk(bundled(), Runner)
    run_ranks(process, ranks, tmp_path, 60)
    reports = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(ranks)]
    for rank, report in enumerate(reports):
        assert "error" not in report, f"rank {rank}: {report['error']}"
    assert sum(report["layers"] for report in reports) == 6
    got = {name: reports[0][name] for name in want}
    assert got == want, "the tokens are not those of one process"


def test_the_files_are_those_of_the_checkpoint() -> None:
    """Bug: a rank reads the files of layers that other ranks have."""
    stage = needs("pp", "stage", TODO)
    files = locate_tensors(SHAKESPEARE)
    with torch.device("meta"):
        model = build(bundled().config)
    _, parts = stage(model, files, 1, 2)
    read = {id(at) for name, at in parts.items() if name.startswith("layers.")}
    ours = [name for name in files if name.startswith("layers.") and int(name.split(".")[1]) >= 3]
    assert read == {id(files[name]) for name in ours}
