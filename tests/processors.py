"""Other processors than this machine's: a plugin for a pytest in a process of its own.

    KILOLM_PROCESSOR=AMX PYTHONPATH=tests python -m pytest -p processors tests/test_quantize.py

The libraries use no more than that processor has, and what the code asks of PyTorch is answered as
there. What this machine cannot run is played, with the same arithmetic. See test_processors.py.
"""

import os
from typing import Any, NamedTuple


class Processor(NamedTuple):
    onednn: str  # ONEDNN_MAX_CPU_ISA
    aten: str  # ATEN_CPU_CAPABILITY
    can: str = ""  # of torch.cpu.get_capabilities
    is_x86: bool = True


PROCESSORS = {
    "AVX2": Processor("AVX2", "avx2"),
    "AVX-512": Processor("AVX512_CORE", "avx512"),  # where oneDNN emulates bfloat16
    "AMD's AVX-512": Processor("AVX512_CORE_BF16", "avx512", "avx512_bf16 avx512_vnni sse4a"),
    "Intel's, without AMX": Processor("AVX512_CORE_BF16", "avx512", "avx512_bf16 avx512_vnni"),
    "AMX": Processor("AVX512_CORE_AMX", "avx512", "avx512_bf16 avx512_vnni avx512_fp16 amx_tile"),
    "a Mac": Processor("DEFAULT", "default", is_x86=False),  # without oneDNN
}
NAME = os.environ.get("KILOLM_PROCESSOR")


def pretend(processor: Processor) -> None:
    """Answer PyTorch's questions as on this processor."""
    import torch  # after the variables: its libraries read them

    has_avx512 = "AVX512" in torch.backends.cpu.get_cpu_capability()
    has_bfloat16 = torch.cpu._is_avx512_bf16_supported() and torch.cpu._is_vnni_supported()
    can = dict.fromkeys(processor.can.split(), True)
    if has_bfloat16 and not torch.cpu.get_capabilities().get("avx512_fp16"):
        can.pop("avx512_fp16", None)  # AMD lacks it, and play() is for those that lack more
    torch.cpu.get_capabilities = lambda: can
    torch.backends.cpu.get_cpu_capability = processor.aten.upper
    from around.fast import packed  # it asks when it is imported

    needed = {torch.bfloat16: "avx512_bf16", torch.float16: "avx512_fp16", torch.float32: None}
    packed.HAS_FBGEMM = processor.is_x86
    packed.onednn_multiplies = lambda dtype: (
        processor.is_x86
        and torch.backends.mkldnn.is_available()
        and can.get(needed[dtype], not needed[dtype])
    )
    if not has_avx512:
        packed.dequantize.__defaults__ = (16,)  # half of the lanes
    if not has_bfloat16:
        play(packed)


def play(packed: Any) -> None:
    """Let plain operators compute what this machine has no instructions for."""
    from torch.nn.functional import linear

    packed.PackedLinear.pack = lambda self, plain: setattr(self, "packed", plain.weight.detach())
    packed.PackedLinear.compute = lambda self, rows: linear(rows, self.packed)

    def compute(self: Any, rows: Any) -> Any:
        return ((rows.double() - 128) @ self.packed.double().t() * self.scales).float()

    packed.Int8Linear.prepack = lambda self, signed: signed
    packed.Int8Linear.compute = compute


if NAME:
    os.environ["ONEDNN_MAX_CPU_ISA"] = PROCESSORS[NAME].onednn
    flags = os.popen("grep -m 1 flags /proc/cpuinfo").read()
    if PROCESSORS[NAME].aten != "avx512" or "avx512f" in flags:  # or it would end by a signal
        os.environ["ATEN_CPU_CAPABILITY"] = PROCESSORS[NAME].aten
    pretend(PROCESSORS[NAME])
