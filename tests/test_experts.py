"""Mixture of experts: the router, who multiplies what, and the spellings of the files.

Whole models are rows of the other tables: tests/test_model.py compares them with `transformers`,
test_equivalence.py runs them on every path, test_tp.py on ranks.
"""

import copy
import itertools
from collections import Counter

import pytest
import torch
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from around.fast.compiling import compile_model
from around.fast.packed import Int4Linear, Int8Linear, PackedLinear, pack_linears
from around.folder import weights as checkpoint
from experts import SparseMLP
from model import Config
from paged import Row, Runner
from quantize import QuantLinear, quantize_model

D, E, K = 32, 6, 3


def config_of(**changes):
    sizes = {"num_experts": E, "num_experts_per_tok": K, "moe_intermediate_size": 24}
    return Config(40, D, 48, 2, 4, 2, 8, **sizes | changes)


def sparse(**changes):
    mlp = SparseMLP(config_of(**changes)).requires_grad_(False)
    mlp.gate.weight.normal_()
    return mlp


def routed(mlp, x):
    """Return the weights and the experts that a SparseMLP gives each of its rows."""
    mlp, seen = copy.copy(mlp), []
    mlp.mix = lambda x, *routes: seen.extend(routes)
    mlp(x[None])
    return [each[0] for each in seen]


def test_router_equals_transformers():
    """Compare the experts that the router chooses, and their weights, with those of Mixtral and
    Qwen3-MoE in transformers. Catches: a softmax in bfloat16, where eight bits make ties of what
    are none; weights that add up to 1 where they should not; among equally good experts, others
    than transformers takes."""
    for theirs, norm, dtype, ties in itertools.product(
        (MixtralTopKRouter, Qwen3MoeTopKRouter), (True, False), (torch.float32, torch.bfloat16),
        (False, True),
    ):  # fmt: skip
        if theirs is MixtralTopKRouter and not norm:
            continue
        mlp, x = sparse(norm_topk_prob=norm).to(dtype), torch.randn(200, D).to(dtype)
        if ties:
            mlp.gate.weight[::2] = mlp.gate.weight[0]
            x[::3] = 0
        config = config_of(norm_topk_prob=norm)
        vars(config).update(num_local_experts=E)  # where transformers looks
        router = theirs(config).to(dtype)
        router.load_state_dict(mlp.gate.state_dict())
        _, want_weights, want = router(x)
        weights, chosen = routed(mlp, x)
        assert torch.equal(chosen, want) and weights.dtype == torch.float32
        assert torch.equal(weights.to(want_weights.dtype), want_weights)
        assert norm == (weights.sum(-1) > 0.999).all()


def one_by_one(mlp, x, weights, chosen):
    """Compute the slow twin: token after token, expert after expert."""
    return torch.stack([
        sum(w * mlp.experts[e](row[None])[0] for w, e in zip(ws, es.tolist(), strict=True))
        for row, ws, es in zip(x, weights, chosen, strict=True)
    ])  # fmt: skip


CHOICES = [
    None,  # as the router says
    torch.tensor([4, 0, 2]).expand(20, 3),  # all rows on the same experts
    torch.tensor([[0, 1, 2]] * 19 + [[1, 5, 0]]),  # only one row on the last one
    torch.tensor([[5, 0, 3]]),  # one row
    torch.tensor([[i % 5] for i in range(20)]),  # one expert a row
]


@pytest.mark.parametrize("packed", [False, True])
def test_experts_equal_their_slow_twin(packed):
    """Mix the experts' outputs for several choices, and compare with one_by_one; then run the
    docstring's example. Catches: results that return to another row or with another weight; an
    expert that nobody chose and that shifts those after it; a batch flattened in another order;
    pairs sorted by token, so that an expert runs once for each."""
    for chosen in CHOICES:
        x = torch.randn(20, D)
        mlp = sparse(num_experts_per_tok=K if chosen is None else chosen.shape[1])
        if chosen is None:
            weights, chosen = routed(mlp, x)
        else:
            x, weights = x[: len(chosen)], torch.rand(chosen.shape)
        want = one_by_one(mlp, x, weights, chosen)
        if packed:
            pack_linears(mlp)
            assert type(mlp.experts[0].down_proj) is PackedLinear
        shape = (2, -1) if len(x) > 1 else (1, 1)
        found = mlp.mix(*(t.view(*shape, t.shape[-1]) for t in (x, weights, chosen)))
        torch.testing.assert_close(found.flatten(0, 1), want)
    mlp, rows = sparse(num_experts=3, num_experts_per_tok=2), {}
    for e, each in enumerate(mlp.experts):
        each.register_forward_pre_hook(lambda _, x, e=e: rows.update({e: x[0][:, 0].tolist()}))
    x = torch.tensor([[[0.0], [1.0]]]).expand(1, 2, D)  # a row says which token it is
    mlp.mix(x, torch.ones(1, 2, 2), torch.tensor([[[2, 0], [2, 1]]]))
    assert rows == {0: [0], 1: [1], 2: [0, 1]}


@pytest.mark.parametrize("form", ["plain", pytest.param("compiled", marks=pytest.mark.slow)])
def test_a_step_reads_each_chosen_expert_once_and_no_other(form, monkeypatch):
    """Note in each step which experts run and for how many rows, and compare with the choice.
    Catches: every expert multiplied and most of it thrown away; an expert read once for each of its
    rows; a graph with the experts of the warm-up, or their number of rows, baked in."""
    model = checkpoint.build(config_of())
    for block in model.layers:
        block.mlp.gate.weight.normal_()
    mix, steps = SparseMLP.mix, []  # of each layer: what is chosen, and what runs

    def noting(self, x, weights, experts):
        steps.append((Counter(experts.flatten().tolist()), []))
        return mix(self, x, weights, experts)

    monkeypatch.setattr(SparseMLP, "mix", noting)
    if form == "compiled":
        compile_model(model, None)
    for block in model.layers:
        for e, mlp in enumerate(block.mlp.experts):
            mlp.register_forward_pre_hook(lambda _, x, e=e: steps[-1][1].append((e, len(x[0]))))
    runner, few = Runner(model, 4, 16), 0
    with torch.compiler.set_stance("fail_on_recompile" if form == "compiled" else "default"):
        for lengths in ([1], [1, 1, 1], [12], [5, 1]):
            steps.clear()
            runner.forward([Row([i], 0, [*range(i, i + n)]) for i, n in enumerate(lengths)])
            assert len(steps) == 2  # layers
            for chosen, ran in steps:
                few += len(ran) < E
                assert len(dict(ran)) == len(ran) and dict(ran) == chosen
                assert sum(chosen.values()) == K * sum(lengths)
    assert few


def test_experts_are_quantised_and_packed_and_the_router_is_not_quantised():
    """Quantise and pack models with experts, and check the class of each Linear. Catches: experts
    left as they were; a quantised router, which errs eight times as much."""
    model = quantize_model(checkpoint.build(config_of(moe_intermediate_size=32)), "int4", 32)
    kinds = [type(m) for m in model.layers[0].mlp.modules() if not [*m.children()]]
    assert kinds == [torch.nn.Linear] + 2 * E * [QuantLinear]
    for mlp, forms in ((model.layers[1].mlp, (Int4Linear, Int8Linear)), (sparse(), PackedLinear)):
        pack_linears(mlp)
        kinds = [m for m in mlp.experts.modules() if not [*m.children()]]
        assert all(isinstance(m, forms) for m in kinds)
