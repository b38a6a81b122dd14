"""Paged decoding as CUDA graphs: a step of one token for each row is recorded once, and replayed.

A GPU often finishes a step's kernels faster than Python launches them. A CUDA graph records the
launches, and then the whole step is one call, on the same memory each time. vLLM and nano-vllm
decode so. torch.compile already replays the static cache's decoding (see packed.compile_model);
this is for the paged cache, whose plan differs at each step: the plan is made as always, and copied
to where the graph reads it. It waits for a GPU: so far it has only been simulated on a CPU
(docs/gpu.md), so it is not among the engine's files:

    python tools/bench.py throughput --device cuda --cuda-graphs

Read: GraphRunner, then Replayed.
"""

from typing import Any

import torch
from torch import Tensor

from flex import FlexRunner
from model import Transformer
from paged import Row, Runner
from settings import supported


class Replayed:
    """A model whose forwards are recorded once for each size, and then replayed.

    Attributes:
        size: (rows, blocks that each attends to); None: run without a graph.
        graphs: size -> the graph, the plan that it reads, and the logits that it writes.
    """

    def __init__(self, model: Transformer) -> None:
        self.model = model
        self.size: tuple[int, int] | None = None
        self.graphs = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def __call__(self, *plan: Any) -> Tensor:
        """Do what Transformer.forward does with the result of Runner.plan."""
        if self.size is None:
            return self.model(*plan)
        if self.size not in self.graphs:
            self.model(*plan)  # what only the first run does is not recorded
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                logits = self.model(*plan)
            self.graphs[self.size] = graph, plan, logits
        graph, recorded, logits = self.graphs[self.size]
        for old, new in zip(tensors_of(*recorded), tensors_of(*plan), strict=True):
            old.copy_(new)
        graph.replay()
        return logits


def tensors_of(tokens: Tensor, positions: Tensor, layers: list, select: Tensor) -> list[Tensor]:
    """Return the tensors of a plan that a forward reads. Layers share most of them."""
    slots, groups = layers[0].slots, layers[0].groups
    masks = [mask for group in groups for mask in group.masks.values()]
    tables = [group.flat_table for group in groups]
    return [tokens, positions, select, slots, *tables, *masks]


class GraphRunner(Runner):
    """A Runner that replays steps of one token for each row.

    To need few graphs, the rows are filled up to a power of two by repeating the first row, which
    writes the same values to the same slot; the blocks of the longest row are filled up as well.
    """

    def __init__(self, model: Transformer, *shape: Any) -> None:
        """Allocate the pools; see Runner.

        Raises:
            SettingError: there is no CUDA, or there are experts, whose sizes the host reads in the
                middle of a step.
        """
        supported("--cuda-graphs on", model.device.type, "cuda")
        supported("--cuda-graphs with num_experts", model.config.num_experts, 1)
        super().__init__(Replayed(model), *shape)

    def forward(self, rows: list[Row]) -> Tensor:
        self.model.size = None
        if max(len(row.ids) for row in rows) > 1:
            return super().forward(rows)
        longest = max(row.num_blocks(self.block_size) for row in rows)
        count = 1 << (len(rows) - 1).bit_length()
        self.model.size = count, max(2, 1 << (longest - 1).bit_length())
        return super().forward(rows + rows[:1] * (count - len(rows)))[: len(rows)]

    def plan(self, rows: list[Row]) -> tuple:
        if self.model.size is None:
            self.min_width = Runner.min_width
            return super().plan(rows)
        self.min_width = self.model.size[1]
        plan = super().plan(rows)
        for group in plan[2][0].groups:  # all layers have these
            group.span = None  # a graph reads by the table
        return plan


class FlexGraphRunner(GraphRunner, FlexRunner):
    """The same for FlexRunner, which reads blocks where they are."""


def runner_for(attention: str, cuda_graphs: bool) -> type[Runner]:
    """Choose a Runner by attention, "copy" or "flex", and by whether steps are replayed."""
    kinds = {"copy": (Runner, GraphRunner), "flex": (FlexRunner, FlexGraphRunner)}
    return kinds[attention][cuda_graphs]
