"""Paged decoding as CUDA graphs: a step of one token for each row is recorded once, and replayed.

vLLM and nano-vllm decode so. compiling.Replayed does it for a static cache. This is for the paged
cache, whose plan differs at each step: the plan is made as always, with rows and blocks filled up
so that few sizes occur. Only the bench uses it, so it is not among the engine's files:

    python tools/bench.py throughput --device cuda --cuda-graphs

Read: compiling.Replayed, then GraphRunner.
"""

from typing import Any

from torch import Tensor

from around.fast.compiling import Replayed
from model import Transformer
from paged import Row, Runner
from around.settings import supported


class Steps(Replayed):
    """Replayed for a paged cache, for steps of one number of rows and one of blocks."""

    def reads(self, tokens: Tensor, positions: Tensor, layers: list, *select: Tensor) -> list:
        groups = layers[0].groups  # all layers have these
        windows = {layer.window for layer in layers}
        masks = [group.masks[window] for group in groups for window in windows]
        tables = [group.table for group in groups]
        return [tokens, positions, *select, layers[0].slots, *tables, *masks]


class GraphRunner(Runner):
    """A Runner that replays steps of one token for each row."""

    def __init__(self, model: Transformer, *shape: Any) -> None:
        supported("--cuda-graphs on", model.device.type, "cuda")
        supported("--cuda-graphs with num_experts", model.config.num_experts, 1)
        super().__init__(model, *shape)
        self.steps: dict[tuple[int, int], Steps] = {}

    def forward(self, rows: list[Row]) -> Tensor:
        return super().forward(rows)


class FlexGraphRunner(GraphRunner):
    pass


def runner_for(attention: str, cuda_graphs: bool) -> type[Runner]:
    return GraphRunner if cuda_graphs else Runner
