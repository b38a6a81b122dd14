"""The equivalence matrix: the same prompts and seeds give the same tokens, whatever the path.

Each path of ways.py is one way to run the model. All are compared, in fp32, with the slowest and
most obvious one: no cache, everything recomputed at each step. KILOLM_DEVICE=cuda runs the paths on
a GPU, also in bfloat16, and the slow twin on the CPU; tools/gpu_check.py does it.
"""

import os

import pytest
import torch
import ways
from ways import CASES, KINDS, PATHS, REPLAYED

from around.settings import DTYPES

DEVICE = os.environ.get("KILOLM_DEVICE", "cpu")
# These run all jobs, the others those of ways.FEW.
WHOLE = ("paged, plain", "paged, fast", "paged, plain, small budget", "prefix cached")


@pytest.mark.parametrize("dtype", ["float32", *["bfloat16"] * (DEVICE != "cpu")])
@pytest.mark.parametrize(
    ("case", "path", "kind"),
    [pytest.param(case, *row, marks=[pytest.mark.slow] * ("compiled" in row[0])) for case in CASES
     for row in ways.rows_of(case, DEVICE)],
)  # fmt: skip
def test_same_tokens(case, path, kind, dtype, device=DEVICE):
    """Run the model in one way, and compare tokens and log-probabilities with the slow twin's.
    Catches: a cache read at the wrong place; a mask off by one; a seed that depends on the path; a
    guess kept that the model does not make, or a refused one's keys read again; a draft's cache out
    of step; a scale of another token, head or group."""
    if kind == "structure":
        pytest.importorskip("llguidance")
    if dtype == "bfloat16" and "speculate" in KINDS.get(kind, {}):
        pytest.skip("a wrong guess shows in the tokens, which are compared in float32 alone")
    some = range(15) if kind == "plain" and path in WHOLE else ways.FEW
    model, options = ways.placed(case, kind, device, DTYPES[dtype])
    run = (PATHS | REPLAYED)[path]
    found = run(model, [ways.jobs_of(case, kind)[job] for job in some], **options)
    # Packed int4 weights are rounded once more: to int8 without AVX-512, to bfloat16 on a GPU.
    has_int4 = device == "cpu" and "AVX512" in torch.backends.cpu.get_cpu_capability()
    exact = has_int4 or not (kind == "int4 weights" and "compiled" in path)
    error, faults = ways.compare(case, kind, some, found, exact and dtype == "float32")
    assert not faults
    # int8 keys are rounded by position, and int8 weights multiplied by activations of 15 bits.
    rounds = kind == "int8 cache" or ("weights" in kind and "compiled" in path)
    assert error < ways.NEAR["bfloat16" if rounds else dtype]


@pytest.mark.parametrize("path", ["static cache, fast", "paged, plain", "paged, fast"])
@pytest.mark.parametrize("case", ["trained", "sliding"])
def test_bfloat16(case, path):
    """Run three ways in bfloat16, and compare their log-probabilities with the slow twin's.
    Catches: a key hidden from prompts, or shown too early. test_processors.py runs both kernels."""
    model, options = ways.placed(case, "plain", "cpu", torch.bfloat16)
    jobs = [ways.jobs_of(case)[job] for job in ways.FEW]
    error, _ = ways.compare(case, "plain", ways.FEW, PATHS[path](model, jobs, **options), False)
    assert error < ways.NEAR["bfloat16"]
