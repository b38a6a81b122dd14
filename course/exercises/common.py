"""Helpers that the tests of the exercises share. There is nothing to solve here.

Every test uses the bundled model or a tiny random one, so that a run takes a second or two.
"""

import importlib
import multiprocessing
import os
import socket
import sys
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from around.folder import build, load_config, named_tensors
from around.folder.weights import locate_tensors
from around.settings import SamplingParams
from generate import generate
from kv_cache import StaticCache
from model import Config, Transformer
from sampling import Sequence
from scheduler import Engine, Request
from tools.books import audit

ROOT = Path(__file__).resolve().parents[2]
SHAKESPEARE = ROOT / "checkpoints" / "shakespeare"


def needs(module: str, name: str, todo: str) -> Any:
    """Return module.name, or fail with a message that says what to do."""
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        found = None
    if found is None:
        pytest.fail(f"there is no {module}.py yet: {todo}", pytrace=False)
    if not hasattr(found, name):
        pytest.fail(f"{module}.py has no `{name}` yet: {todo}", pytrace=False)
    return getattr(found, name)


def call(function: Any, *args: Any, todo: str, **options: Any) -> Any:
    """Call a function with options that it must learn, or fail with a message that says so."""
    try:
        return function(*args, **options)
    except TypeError as error:
        if "unexpected keyword argument" not in (problem := str(error)):
            raise
    return pytest.fail(f"{problem}: {todo}", pytrace=False)


def as_rank(process: Callable, rank: int, ranks: int, port: int, out: Path) -> None:
    """Run process(rank, ranks, out) with one thread and the variables that torchrun would set."""
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    os.environ |= {name: str(value) for name, value in names.items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    process(rank, ranks, out)


def run_ranks(process: Callable, ranks: int, out: Path, seconds: float) -> None:
    """Run process(rank, ranks, out) in one process for each rank. Fail if one hangs."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # A fork starts with everything imported.
    start = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn").Process
    started = [start(target=as_rank, args=(process, r, ranks, port, out)) for r in range(ranks)]
    for each in started:
        each.start()
    for each in started:
        each.join(seconds)
    if hung := [each for each in started if each.is_alive()]:
        for each in hung:
            each.kill()
        pytest.fail("a rank waits for ever: does every send have its recv?", pytrace=False)


def close(got: Tensor, want: Tensor, wrong: str) -> None:
    """Assert that two tensors are equal up to rounding; otherwise fail with the text `wrong`."""
    assert got.shape == want.shape, f"{wrong} (shape {(*got.shape,)}, not {(*want.shape,)})"
    difference = (got - want).abs().max().item()
    assert torch.allclose(got, want, rtol=1e-5, atol=1e-6), f"{wrong} ({difference:.3g} apart)"


def tiny_model(**changes: Any) -> Transformer:
    """Build a random model whose next token depends strongly on every token that it sees.

    It computes in float64, where the order of a sum cannot change which token is the likeliest.
    """
    sizes = {
        "vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "eos_ids": (0,),
        "max_position_embeddings": 128,
    }  # fmt: skip
    generator = torch.Generator().manual_seed(1)
    model = build(Config(**sizes | changes)).double()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.6, generator=generator)
    return model


@cache
def bundled() -> Transformer:
    """Return the trained model in float32. The tests of a file share it, so do not change it."""
    # load_model would use PyTorch's meta device, which takes two seconds to import.
    model, files = build(load_config(SHAKESPEARE)), locate_tensors(SHAKESPEARE)
    for name, tensor in named_tensors(model):
        tensor.copy_(files[name].read())
    return model


def write(model: Transformer, ids: Iterable[int], count: int, **settings: Any) -> Sequence:
    """Write `count` tokens by generate(), greedily unless `settings` has a temperature."""
    settings = {"temperature": 0, "max_tokens": count, "ignore_eos": True} | settings
    params = SamplingParams(**settings)
    sequence = Sequence([*ids], params, model.config)
    for _ in generate(model, sequence, StaticCache(model, 1, sequence.max_len)):
        pass
    return sequence


def serve(engine: Engine, *asked: tuple[list[int] | str, SamplingParams]) -> list[Request]:
    """Serve requests that arrive at once, and audit the engine's books at every step."""
    requests = [engine.add_request(*each) for each in asked]
    while engine.queue:
        engine.step()
        audit(engine)
    return requests


@torch.no_grad()
def logits_of(model: Transformer, ids: Iterable[int]) -> Tensor:
    """Compute the logits of a whole text without a cache: T ids -> (T, V)."""
    tokens = torch.tensor([[*ids]])
    return model(tokens, torch.arange(tokens.shape[1])[None])[0]
