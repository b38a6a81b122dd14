"""Steps that are replayed, on a CPU: a stand-in for CUDA graphs calls each operator again, on the
same memory. That finds what a graph does not see: a tensor made anew by the host, a size that
differs, a value that Python read. What a GPU makes of it is for on_device.py."""

import contextlib

import pytest
import torch
import ways
from torch.utils._python_dispatch import TorchDispatchMode

from flex import FlexBlocks, FlexRunner
from model import Config, Transformer, attention
from paged import Row, Runner
from settings import SettingError
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
    found = run(model, jobs, runner=GraphRunner, **options)
    return ways.compare(case, kind, ways.FEW, found)[1]


@pytest.mark.parametrize("run", [ways.run_engine, ways.run_preempted])
@pytest.mark.parametrize(("case", "kind"), [("trained", "plain"), ("sliding", "plain"),
    ("trained", "int8 cache"), ("sliding", "int8 cache")])  # fmt: skip
def test_same_tokens(graphs, case, kind, run):
    """A step reads the plan of the step before; a row that only fills up the batch shows."""
    assert not faults(run, case, kind)
    assert 0 < Recorded.made < 20  # few sizes


def test_the_stand_in_can_fail(graphs, monkeypatch):
    """A tensor that is not copied into the graph's memory keeps its value of the recorded step."""
    whole = cuda_graphs.tensors_of
    for left_out in range(6):  # tokens, positions, wanted, slots, places, masks

        def some(*plan, left_out=left_out):
            found = whole(*plan)
            return found[:left_out] + found[left_out + 1 :]

        monkeypatch.setattr(cuda_graphs, "tensors_of", some)
        same = not faults(ways.run_engine, "trained", "plain")
        assert same == (left_out == 2)  # always the same


@pytest.mark.parametrize("kind", [GraphRunner, FlexGraphRunner])
def test_blocks_that_follow_each_other(graphs, kind, monkeypatch):
    """A graph that was recorded while the blocks were one piece of the pool, or with other tables,
    read those for ever."""

    def by_table(self, q, group):  # the stand-in cannot replay FlexAttention's own
        kv = self.kv[:, group.table].transpose(0, 1).flatten(2, 3)
        return attention(q, *kv.chunk(2, 1), group.masks[self.window])

    monkeypatch.setattr(FlexBlocks, "read", by_table)
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
