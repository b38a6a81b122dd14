"""Mixture of experts: a router sends each token through k of E feed-forwards.

Mixtral and Qwen3-MoE have E MLPs where a dense model has one. A token passes through few of them,
so the model has many times the weights that one token needs, and a step reads only those of the
chosen experts. Changes a model from outside; the model, its caches and the scheduler do not know.
Papers: Shazeer et al. 2017 (arXiv:1701.06538), Jiang et al. 2024 (Mixtral, arXiv:2401.04088).
Read: SparseMLP. Here E is the number of experts, and k that of experts for each token.
"""

import torch
from torch import Tensor, nn

from model import MLP, Config, Transformer


def add_experts(model: Transformer) -> None:
    """Put experts into the layers that have them by the model's config, in place of their MLPs."""
    config = model.config
    for i, block in enumerate(model.layers):
        if i not in config.mlp_only_layers and (i + 1) % config.decoder_sparse_step == 0:
            block.mlp = SparseMLP(config)


class SparseMLP(nn.Module):
    """The router scores all experts with a softmax in float32 and keeps the k best; of equal ones
    those that torch.topk takes, as transformers does. Whether the k weights then add up to 1 is the
    family's choice.
    """

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.gate = nn.Linear(config.hidden_size, config.num_experts, bias=False)  # the router
        width = config.moe_intermediate_size or config.intermediate_size
        self.experts = nn.ModuleList(MLP(config, width) for _ in range(config.num_experts))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.gate(x).softmax(-1, torch.float32)  # (B, T, E)
        weights, chosen = scores.topk(self.config.num_experts_per_tok)  # (B, T, k) each
        if self.config.norm_topk_prob:
            weights = weights / weights.sum(-1, keepdim=True)
        return self.mix(x, weights, chosen)

    def mix(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Sum each token's experts, by their weights.

        The B * T * k pairs of a token and an expert are sorted by expert. Each expert that is
        chosen at all then runs once, on a slice: the rows that chose it. The results go back to
        their places.

        Args:
            x: (B, T, D).
            weights: (B, T, k) float32.
            chosen: (B, T, k) int64, of 0..E - 1.

        Returns:
            (B, T, D), summed in float32 in the order of `chosen`, whoever else is in the batch.

        Example: two tokens choose experts [2, 0] and [2, 1]: pairs 1 | 3 | 0, 2, so that expert 0
            runs on token 0, expert 1 on token 1, and expert 2 on both
        """
        order = chosen.flatten().argsort(stable=True)  # (B * T * k,) pairs, by expert
        counts = order.new_zeros(len(self.experts)).scatter_(0, chosen.flatten(), 1, reduce="add")
        rows = x.flatten(0, 1).index_select(0, order // chosen.shape[-1])  # (B * T * k, D)
        parts = zip(self.experts, rows.split(counts.tolist()))
        y = torch.cat([mlp(part) for mlp, part in parts if len(part)])
        y = y.index_select(0, order.argsort()).view(*chosen.shape, -1)  # (B, T, k, D), in place
        return (weights[..., None] * y).sum(-2).to(x.dtype)
