"""Mixture of experts: a router sends each token through k of E feed-forwards.

Mixtral and Qwen3-MoE have E MLPs where a dense model has one, and each token passes through only k
of them. So the model has many times the weights that one token needs, and of all experts a step
reads only the chosen ones. A SparseMLP takes the place of each layer's MLP when a model is built
(around/folder/weights.py). The layers in model.py, the caches and the scheduler do not know of
experts. Config has their settings, and the files that load, quantise, split and compile a model
have a few lines for them. Papers: Shazeer et al. 2017
(arXiv:1701.06538), Jiang et al. 2024 (Mixtral, arXiv:2401.04088). Read: SparseMLP.

Two more letters for shapes here: E experts, k experts for each token.
"""

import torch
from torch import Tensor, nn

from model import MLP, Config


class SparseMLP(nn.Module):
    """A router and its experts.

    The router scores all experts by a softmax in float32 and keeps the k best. Among experts with
    equal scores torch.topk decides, as in transformers. Some families scale the k scores so that
    they add up to 1, others use them as they are.
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
        """Run each token through its experts and add up the results, times their weights.

        The B * T * k pairs of a token and an expert are sorted by expert. Then each chosen expert
        runs once, over the rows of all tokens that chose it. Finally the results are put back into
        the order of the tokens.

        Args:
            x: (B, T, D).
            weights: (B, T, k) float32.
            chosen: (B, T, k) int64, the experts' numbers from 0 to E - 1.

        Returns:
            (B, T, D). A token's k results are added in float32, in the order of `chosen`, so that
            the sum does not depend on the other tokens of the batch.

        Example: two tokens choose experts [2, 0] and [2, 1]. Pairs 0 and 1 belong to token 0, pairs
            2 and 3 to token 1. Sorted by expert they are 1 | 3 | 0, 2: expert 0 runs on token 0,
            expert 1 on token 1, and expert 2 on both
        """
        # 1) Sort the pairs by expert.
        pairs = chosen.flatten()  # (B * T * k,), the expert of each pair
        order = pairs.argsort(stable=True)
        tokens = order // chosen.shape[-1]  # the token of each sorted pair: pair // k
        rows = x.flatten(0, 1).index_select(0, tokens)  # (B * T * k, D)
        # 2) Run each chosen expert. The host waits for a GPU once, in tolist. To count the rows by
        # bincount would make it wait a second time.
        counts = pairs.new_zeros(len(self.experts)).scatter_(0, pairs, 1, reduce="add")  # (E,)
        parts = rows.split(counts.tolist())
        results = [expert(part) for expert, part in zip(self.experts, parts) if len(part)]
        # 3) Add up each token's results.
        place = order.argsort()  # where each pair has gone
        y = torch.cat(results).index_select(0, place).unflatten(0, chosen.shape)  # (B, T, k, D)
        return (weights[..., None] * y).sum(-2).to(x.dtype)
