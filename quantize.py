"""Turn a finished model's Linears, from outside, into the form its device reads fastest.

Decoding reads every weight once per token, so its speed is the speed of reading them. On a CPU
that is a question of layout: oneDNN's blocked order lets one weight serve a single token and a
512-token prompt alike. Does not know what the Linears are for. Read: pack_linears, PackedLinear.
"""

import weakref

import torch
from torch import Tensor, nn

# --- oneDNN's layout, for CPUs --------------------------------------------------------------------


def pack_linears(model: nn.Module) -> nn.Module:
    """Replace each Linear by a PackedLinear, in place, freeing the plain weight as it goes.

    Leaves alone what oneDNN has no kernel for on this processor, such as float16 on many.

    Memory peaks at one extra weight: the packed copy takes the plain one's place and serves every
    batch size. (Inductor's freezing packs too, but keeps a copy for each compiled graph.)

    Returns:
        The same model.
    """
    packable = {
        torch.float32: True,
        torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported(),
        torch.float16: torch.ops.mkldnn._is_mkldnn_fp16_supported(),
    }
    # The list holds parents only: a reference to a Linear would keep its plain weight alive.
    for module in [m for m in model.modules() if not isinstance(m, nn.Linear)]:
        for name, child in module.named_children():
            if isinstance(child, nn.Linear) and packable.get(child.weight.dtype):
                setattr(module, name, PackedLinear(child))
                del child
    return model


class PackedLinear(nn.Module):
    """A Linear with its weight in oneDNN's blocked order; x (..., in) -> (..., out), same dtype.

    A packed tensor has no strides, so torch.compile cannot take it as an input: the compiled code
    calls a custom operator with a number, `key`, under which the operator finds this module. The
    number is a tensor, so that all blocks of a model compile to one and the same graph.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.out_features, self.in_features = linear.weight.shape
        self.nbytes, self.bias = linear.weight.nbytes, linear.bias
        # 1 is a hint for the number of rows of x; the layout chosen is good for any.
        self.packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), 1)
        self.register_buffer("key", torch.tensor(len(_packed)), persistent=False)
        _packed.append(weakref.ref(self))

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.kilolm.packed_linear(x, self.key, self.out_features)


_packed: list[weakref.ref] = []  # key -> PackedLinear; weak, so that a model can be freed


def _packed_linear(x: Tensor, key: Tensor, out_features: int) -> Tensor:
    module = _packed[int(key)]()
    return torch.ops.mkldnn._linear_pointwise(x, module.packed, module.bias, "none", [], "")


# A plain Library: the wrapper of torch.library.custom_op costs 8 us a call, this one 3 to 5, and a
# step makes four calls a layer.
_library = torch.library.Library("kilolm", "FRAGMENT")
_library.define("packed_linear(Tensor x, Tensor key, int out_features) -> Tensor")
_library.impl("packed_linear", _packed_linear, "CPU")
torch.library.register_fake(
    "kilolm::packed_linear",
    lambda x, key, out_features: x.new_empty((*x.shape[:-1], out_features)),
    lib=_library,
)
