"""Packed weights: the same numbers in another order, and the plain ones gone."""

import weakref

import pytest
import torch
from torch import nn

import quantize
from model import FusedLinear
from quantize import PackedLinear, pack_linears


@pytest.mark.parametrize("rows", [1, 2, 33])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_packed_equals_plain(dtype, bias, rows):
    """A weight packed for one number of rows and read wrongly at another."""
    linear = nn.Linear(70, 90, bias).to(dtype).requires_grad_(False)
    x = torch.randn(2, rows, 70, dtype=dtype)
    plain = linear(x)
    (packed,) = pack_linears(nn.Sequential(linear))  # stays plain where there is no kernel for it
    assert isinstance(packed, PackedLinear) or dtype != torch.float32
    torch.testing.assert_close(packed(x), plain)


def test_pack_linears_frees_the_plain_weights_one_by_one(monkeypatch):
    """A list of all modules kept every plain weight until the last was packed: twice the memory."""
    alive = []

    def counting(linear):
        alive.append(sum(ref() is not None for ref in plain))
        return PackedLinear(linear)

    monkeypatch.setattr(quantize, "PackedLinear", counting)
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(FusedLinear(8, {"a": 8, "b": 8}, False)))
    model.requires_grad_(False)
    plain = [weakref.ref(parameter) for parameter in model.parameters() if parameter.dim() == 2]
    pack_linears(model)
    assert [type(m) for m in model.modules() if not list(m.children())] == [PackedLinear] * 2
    assert all(ref() is None for ref in plain)
    assert alive == [2, 1]


def test_packed_weights_can_be_freed():
    """The operator's table must not keep a model alive."""
    packed = PackedLinear(nn.Linear(8, 8).requires_grad_(False))
    weak = weakref.ref(packed)
    del packed
    assert weak() is None
