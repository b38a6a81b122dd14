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
from around.fast.flex import FlexRunner
from model import Transformer
from paged import Row, Runner
from around.settings import supported


class Steps(Replayed):
    """Replayed for a paged cache, for steps of one number of rows and one of blocks."""

    def reads(self, tokens: Tensor, positions: Tensor, layers: list, *select: Tensor) -> list:
        groups = layers[0].groups  # all layers have these
        masks = [mask for group in groups for mask in group.masks.values()]
        tables = [group.flat_table for group in groups]
        return [tokens, positions, *select, layers[0].slots, *tables, *masks]


class GraphRunner(Runner):
    """A Runner that replays steps of one token for each row.

    To need few graphs, the rows are filled up to a power of two by repeating the first row, which
    writes the same values to the same slot; the blocks of the longest row are filled up as well.

    Attributes:
        steps: the steps of each number of rows and width.
        width: the blocks that each row of this step attends to; None: the step is not replayed.
    """

    def __init__(self, model: Transformer, *shape: Any) -> None:
        """Allocate the pools; see Runner.

        Raises:
            SettingError: there is no CUDA, or there are experts, whose sizes the host reads in the
                middle of a step.
        """
        supported("--cuda-graphs on", model.device.type, "cuda")
        supported("--cuda-graphs with num_experts", model.config.num_experts, 1)
        super().__init__(model, *shape)
        self.steps: dict[tuple[int, int], Steps] = {}
        self.width: int | None = None

    def forward(self, rows: list[Row]) -> Tensor:
        self.width = None
        if max(len(row.ids) for row in rows) > 1:
            return super().forward(rows)
        longest = max(row.num_blocks(self.block_size) for row in rows)
        self.width = max(2, 1 << (longest - 1).bit_length())
        count = 1 << (len(rows) - 1).bit_length()
        self.wipe_new_blocks(rows)
        plan = self.plan(rows + rows[:1] * (count - len(rows)))
        steps = self.steps.setdefault((count, self.width), Steps(self.model))
        return steps.replay(*plan)[: len(rows)]

    def plan(self, rows: list[Row]) -> tuple:
        self.min_width = self.width or Runner.min_width
        plan = super().plan(rows)
        if self.width is None:
            return plan
        for group in plan[2][0].groups:  # all layers have these
            group.span = None  # a graph reads by the table
        return plan


class FlexGraphRunner(GraphRunner, FlexRunner):
    """The same for FlexRunner, which reads blocks where they are."""


def runner_for(attention: str, cuda_graphs: bool) -> type[Runner]:
    """Choose a Runner by attention, "copy" or "flex", and by whether steps are replayed."""
    kinds = {"copy": (Runner, GraphRunner), "flex": (FlexRunner, FlexGraphRunner)}
    return kinds[attention][cuda_graphs]
