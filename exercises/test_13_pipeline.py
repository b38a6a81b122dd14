"""Exercise 13: the layers of a model, spread over several processes. See 13-pipeline.md."""

import json
import os
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
from common import SHAKESPEARE, bundled, needs, run_ranks, serve, tiny_model

import tp
from checkpoint import CheckpointError, build, load_model, locate_tensors, named_tensors
from model import Config, Transformer
from paged import Runner
from scheduler import Engine
from settings import SamplingParams

TODO = "make the file, with stage(model, files, rank, ranks), to be used as tp.shard is"
PROMPTS = [[10, 20, 30], [*range(100, 140)], [7] * 9]


def cut(config: Config, rank: int, ranks: int) -> tuple[Transformer, dict[str, Any]]:
    """One rank's stage of an empty model, and its files, which are the names here."""
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
        assert layers // ranks <= len(own) <= -(-layers // ranks), "as evenly as it goes"
        assert len(share.layers) == share.config.num_hidden_layers == len(own), (
            "the stage has its own layers alone, and a config that says so: caches read it"
        )
        order += own
        names = {name for name, _ in named_tensors(share)}
        assert files.keys() == names, "the files must be listed under the stage's own names"
        assert all(p.is_meta for p in share.parameters()), "nothing is read or allocated yet"
    assert order == [*range(layers)], "every layer once, in order"


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
    for rank in range(3):  # all of them notice: one that went on would wait for ever
        with pytest.raises(CheckpointError):
            cut(tiny_model().config, rank, 3)


# --- Several processes ----------------------------------------------------------------------------


def talk(model: Transformer, runner: type[Runner]) -> dict[str, Any]:
    """Several in the engine, greedily and sampled, in chunks, forked and preempted."""
    engine = Engine(model, num_blocks=12, max_num_seqs=4, max_num_batched_tokens=32, runner=runner)
    greedy = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, logprobs=0)
    sampled = SamplingParams(max_tokens=10, seed=4, n=2, ignore_eos=True)
    asked = [(PROMPTS[1], greedy), *((ids, sampled) for ids in PROMPTS)]
    outputs = [sequence for request in serve(engine, *asked) for sequence in request.outputs]
    return {
        "ids": [sequence.output_ids for sequence in outputs],
        "logprobs": [round(token.logprob, 3) for token in outputs[0].tokens],
    }


def process(rank: int, ranks: int, port: int, out: Path) -> None:
    """What torchrun would start: rank 0 generates, the others follow."""
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    os.environ |= {name: str(value) for name, value in names.items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    report: dict[str, Any] = {}
    try:
        from pp import stage

        with tp.join(torch.device("cpu")):
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
def test_the_processes_say_what_one_says(ranks: int, tmp_path: Path) -> None:
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
    """Of the layers of others, a rank must not even read the files."""
    stage = needs("pp", "stage", TODO)
    files = locate_tensors(SHAKESPEARE)
    with torch.device("meta"):
        model = build(bundled().config)
    _, parts = stage(model, files, 1, 2)
    read = {id(at) for name, at in parts.items() if name.startswith("layers.")}
    ours = [name for name in files if name.startswith("layers.") and int(name.split(".")[1]) >= 3]
    assert read == {id(files[name]) for name in ours}
