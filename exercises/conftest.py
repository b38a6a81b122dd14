"""Lets the exercises' tests find the engine, however they are started."""

import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import pytest
import torch


@pytest.fixture(autouse=True)
def _steady() -> Iterator[None]:
    """The same random numbers at each run; and one thread, as more do not help so small a model."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)
