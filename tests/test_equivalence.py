"""The equivalence matrix: the same prompts and seeds give the same tokens, whatever the path.

Each path of ways.py is one way to run the model. All are compared, in fp32, with the slowest
and most obvious one: no cache, everything recomputed at each step. A new fast path adds one entry
to PATHS there. Every path runs every prompt with every setting, where it can all of them at once.
Where guesses are sampled they use other random numbers; there the slow twin guesses too, see plain.
"""

from functools import partial

import pytest
import torch
import ways
from ways import CASES, PATHS

from around.fast import attending

pytestmark = pytest.mark.usefixtures("one_thread")

# These run all jobs, the others those of ways.FEW.
WHOLE = ("paged, plain", "paged, fast", "paged, plain, small budget", "prefix cached")


@pytest.mark.parametrize(
    ("case", "path", "kind"),
    [pytest.param(case, *row, marks=[pytest.mark.slow] * ("compiled" in row[0])) for case in CASES
     for row in ways.rows_of(case) if row[0] != "no cache"],  # which is the twin itself
)  # fmt: skip
def test_same_tokens(case, path, kind):
    """A cache read at the wrong place, a mask off by one, a seed that depends on the path. A guess
    kept that the model does not make; keys and values of a refused one read again; the draft's
    cache out of step. A scale of another token, head or group; nibbles in the wrong order."""
    if kind == "structure":
        pytest.importorskip("llguidance")
    some = range(15) if kind == "plain" and path in WHOLE else ways.FEW
    model, options = ways.kind_of(case, kind)
    found = PATHS[path](model, [ways.jobs_of(case, kind)[job] for job in some], **options)
    # Without AVX-512, packed int4 weights are held as int8, which rounds them once more.
    has_int4 = "AVX512" in torch.backends.cpu.get_cpu_capability()
    exact = has_int4 or not (kind == "int4 weights" and "compiled" in path)
    error, faults = ways.compare(case, kind, some, found, exact)
    assert not faults
    # int8 keys are rounded by position, and int8 weights multiplied by activations of 15 bits.
    rounds = kind == "int8 cache" or ("weights" in kind and "compiled" in path)
    assert error < ways.NEAR["bfloat16" if rounds else "float32"]


@pytest.mark.parametrize("path", ["static cache, fast", "paged, plain", "paged, fast"])
@pytest.mark.parametrize("case", ["trained", "sliding"])
def test_bfloat16(case, path, monkeypatch):
    """A key hidden from prompts, or shown too early, where they attend by two products."""
    products = lambda q, num_seen=0: partial(attending.products, num_seen=num_seen)  # noqa: E731
    monkeypatch.setattr(attending, "kernel_for", products)  # on every processor
    model, options = ways.placed(case, "plain", "cpu", torch.bfloat16)
    jobs = [ways.jobs_of(case)[job] for job in ways.FEW]
    error, _ = ways.compare(case, "plain", ways.FEW, PATHS[path](model, jobs, **options), False)
    assert error < ways.NEAR["bfloat16"]
