"""Fixtures and builders shared by the tests: tiny random checkpoints of every family."""

import os
import shutil
import signal

os.environ["HF_HUB_OFFLINE"] = "1"  # nothing may be downloaded
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Threads do not help so small models, and where several processes test they wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from pathlib import Path

import pytest
import torch

import kv_cache
import paged

# A shell starts what runs in the background with SIGINT ignored, and the tests press Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)
pytest.register_assert_rewrite("serving")  # it is imported before pytest loads it as a plugin
ROOT = Path(__file__).resolve().parent.parent
SHAKESPEARE = ROOT / "checkpoints" / "shakespeare"
DRAFT = ROOT / "checkpoints" / "shakespeare-draft"


def program(name: str) -> str:
    """Return where a program is. Without it the tests skip; with KILOLM_NEEDS_ALL, as in CI, they
    fail."""
    found = shutil.which(name, path=os.environ["PATH"] + ":/usr/sbin")
    if not found:
        if os.environ.get("KILOLM_NEEDS_ALL"):
            raise RuntimeError(f"KILOLM_NEEDS_ALL is set, and there is no {name}")
        pytest.skip(f"needs {name}", allow_module_level=True)
    return found


@pytest.fixture(autouse=True)
def _seeded():
    """Seed PyTorch before each test."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _caches_begin_as_nan(monkeypatch):
    """Fill each new cache with NaN. Catches: a slot that is read before it is written, which the
    zeros of new memory would hide."""
    empty_layers = kv_cache.empty_layers

    def filled(*args):
        layers = empty_layers(*args)
        for kv in layers:
            # All bits set, in any dtype: NaN as a number, and as the scale of int8 keys.
            kv.view(torch.uint8).fill_(255)
        return layers

    monkeypatch.setattr(kv_cache, "empty_layers", filled)
    monkeypatch.setattr(paged, "empty_layers", filled)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Compute with one thread. Threads do not help so small a model, and on a busy machine they
    wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
