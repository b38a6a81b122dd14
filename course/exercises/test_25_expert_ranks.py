"""Exercise 25: each process holds some of the experts. See 25-expert-ranks.md."""

import contextlib
import io
import re
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from common import close, logits_of, needs, run_ranks, serve, tiny_model, write
from torch import Tensor

from around.folder import build, named_tensors
from around.settings import SamplingParams
from around.start.ranks import join
from experts import SparseMLP
from model import MLP, Config, Transformer
from scheduler import Engine

TODO = "make the file in the root, with spread and finish"
# For three ranks: rank 0 has two of them, and the most to do; the others end early.
TEXTS = [[*range(1, 20)], [7, 3, 9, 3, 9], [30, 2], [5, 6, 7, 8] * 6]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=5, seed=3, n=2, ignore_eos=True)
COUNTS = [20, 3, 9, 6]  # tokens that generate() writes after each of TEXTS


def sizes(experts: int, each: int) -> dict[str, Any]:
    return {"num_experts": experts, "num_experts_per_tok": each, "num_hidden_layers": 2}


def model(case: str) -> Transformer:
    """Five experts, two for each token. Skewed: eight, and all tokens go to the first four."""
    if case == "even":
        return tiny_model(**sizes(5, 2))
    skewed = tiny_model(**sizes(8, 2))
    for block in skewed.layers:
        gate = block.mlp.gate.weight
        gate[4:] = 0  # scores 0, where two of those below score more
        gate[:4] = torch.tensor([[1.0], [0.9], [-1.0], [-0.9]]) * gate[0]
    return skewed


# --- Without processes ----------------------------------------------------------------------------


def shares(config: Config, ranks: int) -> list[tuple[Transformer, dict[str, str]]]:
    """Each rank's share of an empty model, and of its files, which are the names here."""
    spread = needs("expert_ranks", "spread", TODO)
    found = []
    for rank in range(ranks):
        with torch.device("meta"):
            whole = build(config)
        names = {name: name for name, _ in named_tensors(whole)}
        found.append(spread(whole, names, rank, ranks))
    return found


@pytest.mark.parametrize(("experts", "ranks"), [(4, 1), (4, 2), (5, 2), (7, 3), (8, 8)])
def test_each_expert_is_on_one_rank(experts: int, ranks: int) -> None:
    config = tiny_model(**sizes(experts, 2)).config
    with torch.device("meta"):
        whole = {name for name, _ in named_tensors(build(config))}
    seen: list[str] = []
    for share, files in shares(config, ranks):
        assert files.keys() == {name for name, _ in named_tensors(share)}, (
            "the files must be those of the rank's own tensors: the rest is never read"
        )
        own = [name for name in files if ".experts." in name]
        assert all(files[name] == name for name in own), "an expert is filled from another's file"
        wrong = f"{len(own)} tensors of experts, as evenly as it goes: {experts} on {ranks} ranks"
        assert 6 * (experts // ranks) <= len(own) <= 6 * -(-experts // ranks), wrong
        assert all(p.is_meta for p in share.parameters()), "nothing is read or allocated yet"
        assert {name for name in whole if ".experts." not in name} <= files.keys(), (
            "all ranks have the embedding, the attention, the routers and the plain MLPs"
        )
        seen += own
    assert sorted(seen) == sorted(name for name in whole if ".experts." in name), (
        "every expert on exactly one rank"
    )


# --- Several processes ----------------------------------------------------------------------------


def refuse(name: str) -> None:
    """Let a collective of torch.distributed take integers alone."""
    collective = getattr(dist, name)

    def checked(*args: Any, **options: Any) -> Any:
        for each in [*args, *options.values()]:
            for tensor in each if isinstance(each, list) else [each]:
                if isinstance(tensor, Tensor) and tensor.is_floating_point():
                    raise AssertionError(
                        f"{name} takes rows to every rank: send each to its experts' ranks alone"
                    )
        return collective(*args, **options)

    setattr(dist, name, checked)


@contextlib.contextmanager
def counted(model: Transformer) -> Iterator[list[int]]:
    """Note how many rows the experts here run, call by call."""
    rows: list[int] = []
    mlps = [m for name, m in model.named_modules() if isinstance(m, MLP) and ".experts." in name]
    hooks = [
        m.register_forward_pre_hook(lambda _, x: rows.append(x[0][..., 0].numel())) for m in mlps
    ]
    yield rows
    for hook in hooks:
        hook.remove()


def texts_of(model: Transformer, rank: int, ranks: int) -> list[list[int]]:
    """One sequence after another, then all of this rank's in the engine, forked and in chunks."""
    share = range(rank, len(TEXTS), ranks)
    ids = [write(model, TEXTS[i], COUNTS[i]).ids for i in share]
    engine = Engine(model, num_blocks=12, max_num_seqs=3, max_num_batched_tokens=12)
    asked = [(TEXTS[i], params) for i in share for params in (GREEDY, SAMPLED)]
    return ids + [each.ids for request in serve(engine, *asked) for each in request.outputs]


def process(case: str) -> Any:
    """Return what torchrun would start."""

    def start(rank: int, ranks: int, out: Path) -> None:
        report: dict[str, Any] = {}
        try:
            with join(torch.device("cpu")):
                from expert_ranks import finish, spread

                for name in ("all_gather", "all_gather_into_tensor", "all_gather_object",
                             "all_reduce", "broadcast"):  # fmt: skip
                    refuse(name)
                share, _ = spread(model(case), {}, rank, ranks)
                own, printed = TEXTS[rank:2:ranks], io.StringIO()  # two texts: rank 2 has none
                with counted(share) as rows, contextlib.redirect_stderr(printed):
                    report["logits"] = [logits_of(share, text) for text in own]
                    report["loads"] = finish(share)
                report |= {"rows": sum(rows), "printed": printed.getvalue()}
                forwards: list[None] = []
                share.register_forward_hook(lambda *_: forwards.append(None))
                report["texts"] = texts_of(share, rank, ranks)
                report |= {"more": finish(share), "forwards": len(forwards)}
        except BaseException as error:
            report["error"] = f"{error!r}\n{traceback.format_exc()}"
        torch.save(report, out / f"{rank}.pt")

    return start


def reports_of(case: str, ranks: int, folder: Path) -> list[dict[str, Any]]:
    """Run the processes, or fail with the error that came first."""
    for name in ("spread", "finish"):
        needs("expert_ranks", name, TODO)
    duty = "a rank without tokens must take part in every exchange until no rank has any"
    try:
        run_ranks(process(case), ranks, folder, 10)
    except pytest.fail.Exception:
        pytest.fail(f"a rank waits for ever: {duty}", pytrace=False)
    files = [folder / f"{rank}.pt" for rank in range(ranks)]
    if not all(file.is_file() for file in files):
        pytest.fail(
            f"a rank was killed: do the sizes sent and received agree? And {duty}", pytrace=False
        )
    reports = [torch.load(file) for file in files]
    errors = [f"rank {rank}: {r['error']}" for rank, r in enumerate(reports) if "error" in r]
    own = [error for error in errors if "gloo" not in error.partition("\n")[0]]
    if own:
        pytest.fail(own[0], pytrace=False)
    if errors:
        pytest.fail(
            f"a rank left while others need its experts: {duty}\n{errors[0]}", pytrace=False
        )
    return reports


def owners_of(config: Config, ranks: int) -> dict[str, int]:
    """The rank that has each expert, by its path."""
    return {
        name.partition(".gate_proj")[0]: rank
        for rank, (_, files) in enumerate(shares(config, ranks))
        for name in files
        if ".experts." in name and ".gate_proj" in name
    }


def routed(whole: Transformer, text: list[int], owners: dict[str, int]) -> Tensor:
    """Count the rows of each rank's experts in one forward, in one process: (layers, ranks)."""
    rows = torch.zeros(len(whole.layers), max(owners.values()) + 1, dtype=torch.int64)
    hooks = []
    for name, module in whole.named_modules():
        if name in owners:

            def note(_: Any, x: Any, at: tuple[int, int] = (int(name[7]), owners[name])) -> None:
                rows[at] += x[0].shape[-2]

            hooks.append(module.register_forward_pre_hook(note))
    logits_of(whole, text)
    for hook in hooks:
        hook.remove()
    return rows[[isinstance(block.mlp, SparseMLP) for block in whole.layers]]


def expected_loads(whole: Transformer, ranks: int) -> Tensor:
    """Each rank's k-th text runs in the k-th forward: (forwards * layers, ranks)."""
    owners, forwards = owners_of(whole.config, ranks), []
    for first in range(0, 2, ranks):
        together = [routed(whole, text, owners) for text in TEXTS[:2][first : first + ranks]]
        forwards.append(torch.stack(together).sum(0))
    return torch.cat(forwards)


@pytest.mark.parametrize(("case", "ranks"), [("even", 1), ("even", 2), ("even", 3), ("skewed", 2)])
def test_the_ranks_say_what_one_says(case: str, ranks: int, tmp_path: Path) -> None:
    """Bug: a result that returns to another token; a rank that waits for one that has ended."""
    reports = reports_of(case, ranks, tmp_path)
    whole = model(case)
    want = expected_loads(whole, ranks)
    for rank, report in enumerate(reports):
        texts = TEXTS[rank:2:ranks]
        assert len(report["logits"]) == len(texts)
        for text, got in zip(texts, report["logits"]):
            wrong = f"rank {rank} of {ranks}: not the logits of one process"
            close(got, logits_of(whole, text), wrong)
        assert report["texts"] == texts_of(whole, rank, ranks), (
            f"rank {rank} of {ranks}: the logits are right, but not the texts of several forwards"
        )
        loads = report["loads"]
        assert loads.shape == want.shape, (
            f"finish() returned loads of shape {(*loads.shape,)}: a row for each forward and layer "
            f"of experts since the last call, a column for each rank, so {(*want.shape,)}"
        )
        assert torch.equal(loads, want), (
            f"rank {rank}: loads of {loads.tolist()}, while the router says {want.tolist()}"
        )
        ran, should = report["rows"], int(want[:, rank].sum())
        assert ran == should, f"rank {rank}'s experts ran {ran} rows, and not those {should} sent"
        assert torch.equal(report["more"], reports[0]["more"]), "all ranks know all loads"
    forwards = max(report["forwards"] for report in reports)
    rows = len(reports[0]["more"])
    assert rows == 2 * forwards, (
        f"finish() returned {rows} rows of loads: since its last call the busiest rank had "
        f"{forwards} forwards, with two layers of experts each"
    )
    waited = int(want.amax(1).sum())
    numbers = [int(number) for number in re.findall(r"\d+", reports[0]["printed"])]
    assert {*want.sum(0).tolist(), waited} <= {*numbers}, (
        f"rank 0 prints on stderr the rows of each rank, {want.sum(0).tolist()}, and the rows "
        f"waited for, {waited}: those of the fullest rank, layer by layer. It printed {numbers}"
    )
    assert not any(report["printed"] for report in reports[1:]), "rank 0 alone prints"


def test_what_a_skewed_router_costs(tmp_path: Path) -> None:
    """Bug: imbalance measured over the whole run, where a layer's excess makes up for another's."""
    costs = {}
    for case in ("even", "skewed"):
        (tmp_path / case).mkdir()
        loads = reports_of(case, 2, tmp_path / case)[0]["more"]
        costs[case] = float(loads.amax(1).sum() / (loads.sum() / 2))
        rows = 2 * 2 * sum(len(text) for text in TEXTS)  # of the prompts alone
        assert loads.sum() > rows, f"{loads.sum()} rows: of each token two, in each of two layers"
    assert costs["skewed"] == 2, "all rows go to rank 0, and rank 1 waits: twice an even share"
    assert 1 <= costs["even"] < 1.7, f"waits for {costs['even']} times an even share"
