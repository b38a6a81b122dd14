"""A GPU that is not there: its tensors say they are on it, and hold their values on the CPU.

What fails on a GPU alone fails here: tensors of two devices in one operator, and views that hang on
a kernel's layout. Reads by the host are noted with their line. Two modes see each call while a Gpu
is entered: of functions, where devices are still "cuda", and of the operators below them. To
PyTorch the tensors are of the meta device, so that no kernel of its own runs by mistake.
"""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
ROOT = Path(__file__).resolve().parent.parent
INDEXING = (aten.index.Tensor, aten.index_put.default, aten.index_put_.default)
NAMING = (torch.device, torch._C._nn._parse_to)  # a device is all that they make
COPYING = (aten._to_copy.default, aten.copy_.default)


class Pretended(Tensor):
    """A tensor of the GPU; `inner` is what it holds, with the same strides."""

    device, is_cuda, is_meta = CUDA, True, False

    @staticmethod
    def __new__(cls, inner):
        options = dict(strides=inner.stride(), storage_offset=inner.storage_offset())
        make = torch.Tensor._make_wrapper_subclass
        return make(cls, inner.shape, dtype=inner.dtype, device="meta", **options)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise RuntimeError(f"{func} outside of the Gpu")


class Gpu:
    """The device while it is entered.

    Attributes:
        reads: the line of the project that asked for each read by the host.
        dtypes: those of the tensors that were made on it.
    """

    def __init__(self):
        self.reads, self.dtypes = [], set()
        self.pretending = False  # whether the function that runs now was given a Pretended

    def __enter__(self):
        self.mem_get_info = torch.cuda.mem_get_info
        torch.cuda.mem_get_info = lambda *_: (2**30, 2**31)  # free, and in all
        self.modes = Operators(self), Functions(self)
        for mode in self.modes:
            mode.__enter__()
        return self

    def __exit__(self, *error):
        for mode in reversed(self.modes):
            mode.__exit__(*error)
        torch.cuda.mem_get_info = self.mem_get_info

    def taken(self):
        reads, self.reads = self.reads, []
        return reads

    def read(self):
        frame = sys._getframe(1)
        while ROOT not in Path(frame.f_code.co_filename).parents or frame.f_globals is globals():
            frame = frame.f_back
        self.reads.append(f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}")

    def attention(self, q, k, v, mask=None):
        """Compute the CPU's values, and lay them out as the memory-efficient kernel does by its
        meta function. FlashAttention's and cuDNN's layout is that of the queries, as on a CPU."""
        together(F.scaled_dot_product_attention, [q, k, v, mask])
        y = F.scaled_dot_product_attention(q.inner, k.inner, v.inner, mask.inner)
        as_half = dict(dtype=torch.float16, device="meta")
        like = [torch.empty_strided(t.shape, t.stride(), **as_half) for t in (q, k, v)]
        laid_out = aten._scaled_dot_product_efficient_attention(*like, None, False)[0]
        return Pretended(torch.empty_strided(y.shape, laid_out.stride(), dtype=y.dtype).copy_(y))


class Functions(TorchFunctionMode):
    """Calls as Python writes them: here "cuda" is taken out of the arguments."""

    def __init__(self, gpu):
        super().__init__()
        self.gpu = gpu

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        gpu, before = self.gpu, self.gpu.pretending
        ours = bool(args) and isinstance(args[0], Pretended)
        if ours and func is Tensor.tolist:
            gpu.read()
            return args[0].inner.tolist()
        if ours and func is F.scaled_dot_product_attention:
            return gpu.attention(*args, **kwargs)
        if ours and func in (Tensor.__getitem__, Tensor.__setitem__):
            at = args[1]
            at = tuple(map(indices, at)) if isinstance(at, tuple) else indices(at)
            args = (args[0], at, *args[2:])
        to_gpu = func not in NAMING and any(map(on_gpu, (*args, *kwargs.values())))
        if to_gpu:
            here = None if ours else CPU
            args = [here if on_gpu(each) else each for each in args]
            kwargs = {name: here if on_gpu(each) else each for name, each in kwargs.items()}
        gpu.pretending = any(isinstance(each, Pretended) for each in leaves((args, kwargs)))
        try:
            made = func(*args, **kwargs)
        finally:
            gpu.pretending = before
        if to_gpu and not isinstance(made, Pretended):
            return Pretended(made.clone() if args and made is args[0] else made)
        return made


class Operators(TorchDispatchMode):
    """What the calls come down to, with Pretended tensors among the arguments."""

    def __init__(self, gpu):
        super().__init__()
        self.gpu = gpu

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        tensors = [each for each in leaves((args, kwargs)) if isinstance(each, Tensor)]
        ours = {id(each.inner): each for each in tensors if isinstance(each, Pretended)}
        device = kwargs.get("device")
        # What PyTorch makes by itself for a tensor of ours, it makes where it believes that to be.
        is_made_there = device is not None and device.type == "meta" and self.gpu.pretending
        if is_made_there:
            kwargs = kwargs | dict(device=CPU)
        there = is_made_there or (device is None and bool(ours))
        if ours and func not in COPYING:
            kept = func in INDEXING and isinstance(args[0], Pretended)
            together(func, [args[0], *args[2:]] if kept else tensors)
        if ours and is_read(func, args, there):
            self.gpu.read()
        inner = {id(each): each.inner for each in ours.values()}
        args, kwargs = changed(lambda each: inner.get(id(each), each), (args, kwargs))
        if func is aten.copy_.default:
            there = id(args[0]) in ours

        def wrapped(made):
            if not isinstance(made, Tensor) or not there:
                return made
            self.gpu.dtypes.add(made.dtype)
            return ours[id(made)] if id(made) in ours else Pretended(made)

        return changed(wrapped, func(*args, **kwargs))


def leaves(value):
    """Return what is in lists, tuples and dicts."""
    found = []
    changed(found.append, value)
    return found


def changed(change, value):
    """Return the same with each leaf changed. PyTorch's own function for it takes half of the
    time."""
    if isinstance(value, dict):
        return {name: changed(change, part) for name, part in value.items()}
    if isinstance(value, list | tuple) and not isinstance(value, torch.Size):
        return type(value)([changed(change, part) for part in value])
    return change(value)


def together(func, tensors):
    """Raise RuntimeError where not all are on the GPU; numbers on the CPU may be there too."""
    for each in tensors:
        elsewhere = isinstance(each, Tensor) and not isinstance(each, Pretended)
        if elsewhere and (each.dim() or each.is_meta):
            raise RuntimeError(f"{func}: {tuple(each.shape)} is on the {each.device}")


def is_read(func, args, there):
    """Return whether the host waits for values, or for a shape that depends on values."""
    if func in COPYING:
        return not there if func is COPYING[0] else not isinstance(args[0], Pretended)
    if func in INDEXING:
        masks = [each for each in args[1] if each is not None and each.dtype == torch.bool]
        masks = [each for each in masks if isinstance(each, Pretended)]
        return bool(masks) and not (len(args) > 2 and args[2].numel() == 1)  # that is masked_fill
    tags = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
    return any(tag in func.tags for tag in tags)


def indices(at):
    """Put a list within an index onto the GPU, as PyTorch does, also where it is a mask."""
    if not isinstance(at, list):
        return at
    return Pretended(torch.tensor(at, dtype=None if at else torch.int64))


def on_gpu(value):
    """Return whether an argument is the device, or its name."""
    if not isinstance(value, torch.device | str):
        return False
    return getattr(value, "type", value) == "cuda"
