"""Exercise 21: a prompt divided among several processes. See 21-ring-attention.md."""

import random
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from common import close, logits_of, needs, run_ranks, tiny_model
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from around.start.ranks import join
from model import Transformer, attention

TODO = "make the file in the root, with prefill, partial and merge"
TEXT = random.Random(5).choices(range(1, 32), k=120)
LENGTHS = [len(TEXT), 40, 17, 5, 3]


def model() -> Transformer:
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return tiny_model(num_hidden_layers=3, windows=(None, 7, None), **sizes)


# --- Softmax in pieces ----------------------------------------------------------------------------


def pieces(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, cuts: list[int]) -> tuple[Tensor, Tensor]:
    """Attend to the keys piece by piece, the last piece first."""
    partial, merge = (needs("ring", name, TODO) for name in ("partial", "merge"))
    found = None
    for start, end in reversed([*zip([0, *cuts], [*cuts, k.shape[2]])]):
        part = partial(q, k[:, :, start:end], v[:, :, start:end], mask[..., start:end])
        found = part if found is None else merge(found, part)
    assert found is not None
    return found


@pytest.mark.parametrize("cuts", [[], [9], [1, 2], [4, 8, 12]], ids=str)
@pytest.mark.parametrize("scale", [1, 30])
def test_pieces_make_the_whole(cuts: list[int], scale: float) -> None:
    """Bug: a softmax's sum overflows, or a query that sees no key of a piece gives NaN."""
    T, S, group = 13, 16, 2  # query t sees keys up to t, so early queries see no late pieces
    q = scale * torch.randn(1, 4, T, 8, dtype=torch.float64)
    k, v = (scale * torch.randn(1, 2, S, 8, dtype=torch.float64) for _ in range(2))
    unseen = torch.full((T, S), -torch.inf, dtype=torch.float64).triu(1)
    mask = unseen.repeat(group, 1)[None, None]
    y, total = pieces(q, k, v, mask, cuts)
    close(y / scale, attention(q, k, v, mask) / scale, "weigh each part by the sum of its softmax")
    scores = q @ k.repeat_interleave(group, 1).transpose(2, 3) / 8**0.5
    want = (scores + unseen).logsumexp(-1, keepdim=True)
    close(total / scale**2, want / scale**2, "return the logarithm of the softmax's sum")


def test_the_order_does_not_matter() -> None:
    partial, merge = (needs("ring", name, TODO) for name in ("partial", "merge"))
    q, k, v = (torch.randn(1, 2, 6, 8, dtype=torch.float64) for _ in range(3))
    mask = torch.zeros(1, 1, 6, 2, dtype=torch.float64)
    a, b, c = (partial(q, k[:, :, i : i + 2], v[:, :, i : i + 2], mask) for i in (0, 2, 4))
    for got in (merge(merge(a, b), c), merge(c, merge(b, a))):
        close(got[0], attention(q, k, v, mask.repeat(1, 1, 1, 3)), "merge() depends on the order")


# --- Several processes ----------------------------------------------------------------------------


class Largest(TorchDispatchMode):
    """Records the size of the largest float tensor that is made in this context."""

    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for each in result if isinstance(result, tuple | list) else [result]:
            if isinstance(each, Tensor) and each.is_floating_point():
                self.numbers = max(self.numbers, each.numel())
        return result


def forbidden(*args: Any, **options: Any) -> None:
    raise AssertionError("keys and values travel from neighbour to neighbour: send and receive")


def process(rank: int, ranks: int, out: Path) -> None:
    """Run one rank, as torchrun would start it."""
    report: dict[str, Any] = {}
    try:
        with join(torch.device("cpu")):
            for name in ("all_gather", "all_gather_into_tensor", "all_gather_object"):
                setattr(dist, name, forbidden)
            from ring import prefill

            whole = model()
            with Largest() as watch:
                report["logits"] = [prefill(whole, TEXT[:n], rank, ranks) for n in LENGTHS]
            report["largest"] = watch.numbers
            try:
                prefill(whole, TEXT[: ranks - 1], rank, ranks)
                report["refused"] = "nothing"
            except ValueError as error:
                report["refused"] = str(error)
    except BaseException:
        report["error"] = traceback.format_exc()
    torch.save(report, out / f"{rank}.pt")


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_ranks_compute_what_one_computes(ranks: int, tmp_path: Path) -> None:
    needs("ring", "prefill", TODO)
    run_ranks(process, ranks, tmp_path, 40)
    whole = model()
    share = -(-len(TEXT) // ranks)
    for rank in range(ranks):
        if not (tmp_path / f"{rank}.pt").is_file():
            text = f"rank {rank} crashed: does each recv expect the size of what is sent?"
            pytest.fail(text, pytrace=False)
        report = torch.load(tmp_path / f"{rank}.pt")
        if "error" in report:
            pytest.fail(f"rank {rank}: {report['error']}", pytrace=False)
        for n, got in zip(LENGTHS, report["logits"]):
            want = logits_of(whole, TEXT[:n])[rank::ranks]
            close(
                got, want, f"rank {rank} of {ranks} has other logits than one process, {n} tokens"
            )
        assert report["largest"] <= 1.1 * 4 * share**2, (
            f"a tensor has {report['largest']} numbers, but the scores of 4 heads for {share} "
            f"queries and {share} keys have {4 * share**2}: hold only one share of the keys"
        )
        wrong = f"{ranks - 1} tokens are too few: raise a ValueError with both numbers"
        assert str(ranks - 1) in report["refused"] and str(ranks) in report["refused"], wrong
