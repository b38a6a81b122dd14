"""Lets the tests of the exercises find the engine, however they are started."""

import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import pytest
import torch


@pytest.fixture(autouse=True)
def _steady() -> Iterator[None]:
    """Use the same random numbers at each run, and one thread; more do not help a small model."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)
