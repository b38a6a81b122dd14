"""Steps that are replayed, on a CPU: a stand-in for CUDA graphs calls each operator again, on the
same memory. That finds what a graph does not see: a tensor made anew by the host, a size that
differs, a value that Python read. What a GPU makes of it is for on_device.py."""

import contextlib
import gc
import weakref
from dataclasses import replace
from functools import partial

import pytest
import torch
import ways
from torch.utils._python_dispatch import TorchDispatchMode

from around.fast import compiling
from around.folder.weights import build
from around.fast.flex import FlexBlocks, FlexRunner
from kv_cache import StaticCache
from model import Config, Transformer, attention
from paged import Row, Runner
from around.settings import SettingError
from tools import cuda_graphs
from tools.cuda_graphs import FlexGraphRunner, GraphRunner, runner_for

pytestmark = pytest.mark.usefixtures("one_thread")


class Recorded(TorchDispatchMode):
    """A graph. While it records, operators run as usual; their arguments and results are kept."""

    made = 0

    def __init__(self):
        super().__init__()
        self.calls = []
        Recorded.made += 1

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, result))
        return result

    def replay(self):
        for func, args, kwargs, kept in self.calls:
            result = func(*args, **kwargs)
            if isinstance(kept, torch.Tensor) and kept.data_ptr() != result.data_ptr():
                kept.copy_(result)
            elif isinstance(kept, tuple | list):
                for old, new in zip(kept, result, strict=True):
                    if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                        old.copy_(new)


@contextlib.contextmanager
def recording(graph):
    with graph:
        yield


@pytest.fixture
def graphs(monkeypatch):
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Recorded)
    monkeypatch.setattr(torch.cuda, "graph", recording)
    monkeypatch.setattr(cuda_graphs, "supported", lambda *_: None)
    Recorded.made = 0


def faults(run, case, kind):
    """Return the faults in the tokens of replayed steps."""
    model, options = ways.kind_of(case, kind)
    jobs = [ways.jobs_of(case)[job] for job in ways.FEW]
    if run is not ways.run_replayed:
        run = partial(run, runner=GraphRunner)
    return ways.compare(case, kind, ways.FEW, run(model, jobs, **options))[1]


@pytest.mark.parametrize("run", [ways.run_engine, ways.run_preempted, ways.run_replayed])
@pytest.mark.parametrize(("case", "kind"), [("trained", "plain"), ("sliding", "plain"),
    ("trained", "int8 cache"), ("sliding", "int8 cache")])  # fmt: skip
def test_same_tokens(graphs, case, kind, run):
    """A step reads the plan of the step before; a row that only fills up the batch shows."""
    assert not faults(run, case, kind)
    assert 0 < Recorded.made < 20  # few sizes


@pytest.mark.parametrize(("run", "count", "constant"), [
    (ways.run_engine, 6, 2),  # tokens, positions, wanted, slots, tables, masks
    (ways.run_replayed, 4, 1),  # tokens, wanted, slots, mask
])  # fmt: skip
def test_the_stand_in_can_fail(graphs, monkeypatch, run, count, constant):
    """A tensor that is not copied into the graph's memory keeps its value of the recorded step.
    Which logits are wanted is the same in each step."""
    kind = compiling.Replayed if run is ways.run_replayed else cuda_graphs.Steps
    whole = kind.reads
    for left_out in range(count):

        def some(self, *plan, left_out=left_out):
            found = whole(self, *plan)
            assert len(found) == count
            return found[:left_out] + found[left_out + 1 :]

        monkeypatch.setattr(kind, "reads", some)
        same = not faults(run, "trained", "plain")
        assert same == (left_out == constant)


def test_graphs_of_a_static_cache(graphs):
    """A graph writes over the caller's tokens, over the logits that it has returned, or over the
    cache's own numbers of its slots; a new cache is read by another's graphs; a cache has a graph
    for each 64 positions, each with its own memory; graphs keep a cache's memory for ever."""
    model = Transformer(Config(32, 16, 16, 1, 2, 1, 8)).eval()
    steps = compiling.Replayed(model.forward)
    for _ in range(2):
        cache, twin = StaticCache(model, 2, 128), StaticCache(model, 2, 128)
        tokens = torch.randint(32, (128, 2, 1))
        kept = tokens.clone()
        got = []
        for i in range(128):
            row = torch.tensor([i % 2])
            got.append((steps(tokens[i], *cache.plan(i, i + 1), row), row))
        for i, (logits, row) in enumerate(got):
            assert row == i % 2
            torch.testing.assert_close(logits, model(tokens[i], *twin.plan(i, i + 1), row).detach())
        assert tokens.equal(kept) and cache.slots.equal(torch.arange(129))
        ((graph, _, _),) = steps.graphs[cache.slabs[0]].values()  # the last, for all others' memory
        graph.calls.clear()  # a real graph holds no tensors
        weak = weakref.ref(cache.slabs[0])
        del cache
        gc.collect()
        assert weak() is None and not steps.graphs
    assert Recorded.made == 4  # one for each 64 positions
    mixed = build(replace(model.config, num_experts=2, num_experts_per_tok=1))
    compiling.replay_steps(mixed)
    assert "forward" not in vars(mixed)


@pytest.mark.parametrize("kind", [GraphRunner, FlexGraphRunner])
def test_blocks_that_follow_each_other(graphs, kind, monkeypatch):
    """A graph that was recorded while the blocks were one piece of the pool, or with other tables,
    read those for ever."""

    def by_table(self, q, group):  # the stand-in cannot replay FlexAttention's own
        kv = self.kv[:, group.table].transpose(0, 1).flatten(2, 3)
        return attention(q, *kv.chunk(2, 1), group.masks[self.window])

    monkeypatch.setattr(FlexBlocks, "attend_group", by_table)
    model = Transformer(Config(32, 16, 16, 1, 2, 1, 8)).eval()
    at, twin = kind(model, 8, 4), Runner(model, 8, 4)
    for start in (0, 4, 2):  # where the pieces begin: each of these has the size of the first
        tables = [start, start + 1], [start + 2, start + 3]
        for rows in ([Row(each, 0, [*range(start, start + 5)]) for each in tables],
                     [Row(each, 5, [start + 7]) for each in tables]):  # fmt: skip
            torch.testing.assert_close(at.forward(rows), twin.forward(rows))
    assert Recorded.made == 1


def test_each_setting_has_its_runner():
    """A setting has no effect; graphs are made without CUDA."""
    kinds = [runner_for(way, graphs) for way in ("copy", "flex") for graphs in (False, True)]
    assert kinds == [Runner, GraphRunner, FlexRunner, FlexGraphRunner]
    assert FlexGraphRunner.layer_class is FlexRunner.layer_class is not Runner.layer_class
    model = Transformer(Config(32, 16, 16, 1, 2, 1, 8))
    with pytest.raises(SettingError, match="--cuda-graphs on 'cpu' is not supported"):
        GraphRunner(model, 8, 4)
