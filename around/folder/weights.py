"""From a Hugging Face folder to a model: safetensors, and what may be wrong in them.

Values of the wrong type or size, missing or damaged files, tensors that do not fit: each failure
raises one error that names the file or folder. What differs between families of models stands in
families.py. Folders of GPTQ and AWQ tools are converted while they are read; see formats.py. This
file does not know what runs the model. Read: load_model, locate_tensors.
"""

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache, partial
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

# Put the weights on pages of 2 MB. A decode step reads all of them, and with pages of 4 kB the
# page-table walks cost a noticeable share of the bandwidth. PyTorch reads this variable when it
# first allocates memory.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

import torch
from safetensors import safe_open
from torch import Tensor
from torch.utils._device import DeviceContext

from around.folder.config import load_config
from around.folder.families import folded
from around.machine import free_memory, progress
from around.settings import AGAIN, DTYPES, JSON, InputError, blame, read_json
from model import Config, FusedLinear, Transformer, rope_frequencies


class Stored(NamedTuple):
    """A tensor that is still in a file.

    Attributes:
        empty: a tensor of its shape and dtype on the meta device, from the file's header.
        read: reads the tensor itself.
    """

    empty: Tensor
    read: Callable[[], Tensor]

    def changed(self, change: Callable[[Tensor], Tensor]) -> "Stored":
        """Return what `change` will make of this tensor when it is read. The empty one is changed
        at once, which gives the new shape."""
        return Stored(change(self.empty), lambda: change(self.read()))


# What the files of a folder hold: this engine's name of a parameter -> the stored tensor.
Files = dict[str, Stored]
PIECE = 2**24  # bytes of a file that are read through one mapping; see locate_tensors


def load_model(
    path: Path | str,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
    shard: Callable | None = None,
) -> Transformer:
    """Build the model that a Hugging Face folder describes and fill it from its safetensors files.

    The model is first built on the meta device, which takes no memory, and the name, shape and
    dtype of each tensor are checked against the headers of the files. Then one tensor after another
    is copied out of the mapped files, so the peak memory is the weights plus one tensor, or a PIECE
    of small ones. Nothing is unpickled.

    The integers and zero points of quantised folders are kept exactly. So are the scales, unless a
    number is folded into them. Folders of this engine, of GPTQ (4 and 8 bits) and of AWQ can be
    read.

    Args:
        path: a folder with config.json and model.safetensors, or shards and their index.
        device: where the weights go.
        dtype: what the weights are cast to; None means the dtype in config.json, else that of the
            embedding.
        shard: cuts the empty model and the files down to one rank's share; see tp.shard.

    Returns:
        The model in eval mode, without gradients.

    Raises:
        InputError: see load_config; or files are missing or damaged; or their tensors are not
            those of the config (the error counts all of them and lists the first 20); or the
            quantization_config is unknown or contradicts the files; or the weights need more bytes
            than machine.free_memory.
    """
    path = Path(path)
    config = load_config(path)
    # 1) What the files hold, and an empty model for it.
    files = locate_tensors(path)
    if "lm_head.weight" in files:  # it counts, also where the config ties it
        config = replace(config, tie_word_embeddings=False)
    with blame(path):
        dtype = dtype or config.dtype or files["embed_tokens.weight"].empty.dtype
        with Empty("meta"):
            model = build(config).to(dtype)
        # 2) Give the tensors the model's names, check them, then fold numbers into them. A folder
        # that this engine has quantised has the names and the numbers already.
        is_ours = config.quantization.get("quant_method") == "kilolm"
        if not is_ours:
            files = adapt(files, model)
        split_fused(files, model)
        insert_quantised(model, files)  # now, as check_tensors and shard need their shapes
        check_tensors(files, model)
        if config.folds and not is_ours:
            for name, stored in files.items():
                files[name] = stored.changed(partial(folded, config, name))
        # 3) One rank's share. It is a new model, so QuantLinears are inserted once more.
        if shard:
            model, files = shard(model, files)
            insert_quantised(model, files)
    # 4) Read the weights, if there is memory for them. to_empty erases inv_freq, and separates a
    # tied lm_head's weight.
    tied = is_tied(model)
    need = sum(tensor.nbytes for _, tensor in named_tensors(model))
    free = free_memory(torch.device(device))
    with blame(f"{path}: its weights need {need >> 20} MB"):
        if need > free:
            raise ValueError(f"{free >> 20} MB are free: take a smaller model")
        model.to_empty(device=device)
        model.inv_freq = rope_frequencies(config).to(device)
        if tied:
            model.lm_head.weight = model.embed_tokens.weight
        tensors = dict(named_tensors(model))
        # In the order of `files`, see locate_tensors.
        for name, stored in progress(files.items(), f"loading {path.name}"):
            tensors[name].copy_(stored.read())
    return model


class Empty(DeviceContext):
    """Empty("meta") is torch.device("meta"), where tensors take no memory; and it initialises no
    module: that would import the compiler, which takes a second and a temporary folder."""

    def __torch_function__(self, func: Any, *args: Any) -> Any:
        is_init = getattr(func, "__module__", "") == "torch.nn.init"
        return None if is_init else super().__torch_function__(func, *args)


def build(config: Config) -> Transformer:
    """Make a model with random weights, in eval mode and without gradients."""
    model = Transformer(config)
    if config.num_experts > 1:
        from experts import SparseMLP  # only where a model has experts

        for layer in model.layers:
            layer.mlp = SparseMLP(config)
    return model.requires_grad_(False).eval()


def is_tied(model: Transformer) -> bool:
    """Whether lm_head shares the embedding's weight. A quantised lm_head does not."""
    return getattr(model.lm_head, "weight", None) is model.embed_tokens.weight


def named_tensors(model: Transformer) -> Iterator[tuple[str, Tensor]]:
    """Yield each weight with its name in a checkpoint (less `model.`), as a view to read or fill.

    The weight of a tied lm_head comes once, as the embedding's.

    Example: the weight of layers.0.mlp.gate_up_proj, (2 * F, D), comes as that of gate_proj and
        that of up_proj, (F, D) each
    """
    tensors = model.state_dict()
    if is_tied(model):
        del tensors["lm_head.weight"]
    for name, tensor in tensors.items():
        path, _, kind = name.rpartition(".")
        for part, rows in parts_of(model, path).items():
            yield f"{part}.{kind}", tensor[rows]


def parts_of(model: Transformer, path: str) -> dict[str, slice]:
    """Return the path in a checkpoint of each part of a FusedLinear, plain or quantised, and its
    rows. Any other module is one part.

    Example: if F is 8, layers.0.mlp.gate_up_proj has two parts: layers.0.mlp.gate_proj, rows 0..7,
        and layers.0.mlp.up_proj, rows 8..15
    """
    above = path.rpartition(".")[0]
    parts = {}
    start = 0
    for part, size in getattr(model.get_submodule(path), "parts", {}).items():
        parts[f"{above}.{part}"] = slice(start, start + size)
        start += size
    return parts or {path: slice(None)}


def check_tensors(files: Files, model: Transformer) -> None:
    """Raise one InputError if tensors differ between the files and the model on the meta
    device. It counts all of them and lists the first 20."""
    have = {name: describe(stored.empty) for name, stored in files.items()}
    want = {name: describe(tensor) for name, tensor in named_tensors(model)}
    wrong = sorted({name for name, _ in have.items() ^ want.items()})
    lines = [f"{n}: {have.get(n, 'missing')}, wanted: {want.get(n, 'none')}" for n in wrong[:20]]
    if lines:
        raise InputError("\n  ".join([f"{len(wrong)} tensors do not fit config.json", *lines]))


def describe(tensor: Tensor) -> str:
    """Return a tensor's dtype and shape. Each of DTYPES is "float", as any of them can be cast."""
    kind = "float" if tensor.dtype in DTYPES.values() else tensor.dtype
    return f"{kind} {tuple(tensor.shape)}"


# --- The files ------------------------------------------------------------------------------------


def locate_tensors(path: Path) -> Files:
    """List a checkpoint's tensors from the headers of its files; no data is read.

    A folder can hold shards that are not in use, and old copies of a tensor. So the index decides.
    As in transformers, a whole model.safetensors goes before the index.

    Raises:
        InputError: a header or the index is damaged; or a file is missing that the index
            names, or, without an index, model.safetensors.
    """
    whole = "model.safetensors"
    # The shard of each tensor; {}: all are in one file.
    places = {} if (path / whole).exists() else read_index(path)
    files: Files = {}
    # A file is mapped anew for each PIECE, as the pages that were read are free when a mapping is
    # dropped: one for all tensors would double the resident memory. One for each tensor would take
    # minutes, as the whole header is parsed each time: files of experts hold 10,000.
    opened = lru_cache(1)(lambda file, piece: safe_open(file, "pt"))

    def read(file: Path, piece: int, name: str) -> Tensor:
        return opened(file, piece).get_tensor(name)

    for shard in sorted({*places.values()}) or [whole]:
        file = path / shard
        with (
            blame(
                f"{file}: damaged, or larger than the memory; download it again, or git lfs pull"
            ),
            safe_open(file, "pt") as reader,
        ):
            size = 0
            for name in reader.keys():  # noqa: SIM118 (it is no dict)
                # An index decides which shard is read, and a tensor that it leaves out is not
                # read. Without an index, `places` is {} and all are read.
                if places.get(name, whole) == shard:
                    empty = reader.get_tensor(name).to("meta")  # maps the file, reads none of it
                    ours = engine_name(name)
                    if ours:
                        files[ours] = Stored(empty, partial(read, file, size // PIECE, name))
                        size += empty.nbytes
    return files


def read_index(path: Path) -> dict[str, str]:
    """Return the shard of each tensor, as a folder's index names it."""
    file = path / "model.safetensors.index.json"
    if not file.exists():
        raise InputError(
            f"{path}: there is no model.safetensors, and no {file.name} that says which shards to "
            "read; convert .bin and .pth files"
        )
    index = read_json(file)
    with blame(f"{file}{AGAIN}"):
        # A shard may be in a folder below. No path leads out of the folder: "///../a" becomes "/a",
        # and so does "////a". (Of two slashes at the beginning, normpath would keep both.)
        places = index["weight_map"]
        return {name: os.path.normpath(f"///{shard}")[1:] for name, shard in places.items()}


# Words in the names of Mixtral, GPTQ or AWQ -> this engine's words.
WORDS = dict(block_sparse_moe="mlp", w1="gate_proj", w2="down_proj", w3="up_proj", qzeros="zeros")
# The parts of a model with images that are not read.
IMAGES = ("vision_tower", "multi_modal_projector")


def engine_name(name: str) -> str:
    """Return this engine's name of a stored tensor; "" if it is not read."""
    path = renamed(name, WORDS).split(".")
    while path[0] in ("model", "language_model"):
        del path[0]
    if path[0] in IMAGES or path[-1] == "inv_freq":  # the latter follows from the config
        return ""
    return ".".join(path)


def renamed(name: str, words: JSON) -> str:
    """Translate those words of a name that `words` has."""
    return ".".join(words.get(word, word) for word in name.split("."))


# --- What only some folders need ------------------------------------------------------------------


# For models with post_norm: Hugging Face's names of norms -> ours. A norm that Llama has too gets
# Llama's name, so the norm before the MLP becomes post_attention_layernorm. `renamed` replaces each
# word once, so it does not go on to replace this one.
OUTPUT_NORMS = dict(post_attention_layernorm="attention_output_norm",
    pre_feedforward_layernorm="post_attention_layernorm",
    post_feedforward_layernorm="mlp_output_norm")  # fmt: skip


def adapt(files: Files, model: Transformer) -> Files:
    """Convert what differs in a folder that this engine has not written: the names of norms in
    models with post_norm, and the format of quantised weights. The result may be `files` itself."""
    config = model.config
    if config.post_norm:
        files = {renamed(name, OUTPUT_NORMS): stored for name, stored in files.items()}
    if config.quantization:
        from around.folder.formats import convert  # only where another tool has quantised

        convert(files, config.quantization, dict(named_tensors(model)))
    return files


def split_fused(files: Files, model: Transformer) -> None:
    """Cut the stored tensors of whole FusedLinears, which Phi-3's files hold, into their parts, in
    place.

    Example: "layers.0.mlp.gate_up_proj.weight" becomes that of gate_proj and that of up_proj
    """
    fused = {path for path, each in model.named_modules() if isinstance(each, FusedLinear)}
    for name, stored in [*files.items()]:
        path, _, kind = name.rpartition(".")
        if path in fused:
            del files[name]
            for part, rows in parts_of(model, path).items():
                files[f"{part}.{kind}"] = stored.changed(itemgetter(rows))


def insert_quantised(model: Transformer, files: Files) -> None:
    """Replace Linears of an empty model by QuantLinears where the files hold quantised weights.

    Raises:
        ValueError: the quantization_config is not supported, or does not fit the model.
    """
    config = model.config.quantization
    if not config:
        return
    from quantize import QuantLinear, linears  # only where a model is quantised

    for path in linears(model):
        linear: Any = model.get_submodule(path)
        first = next(iter(parts_of(model, path)))  # one part will do: all are quantised, or none
        stored = files.get(f"{first}.qweight")
        if stored:  # else the Linear stays plain, as lm_head does in most folders
            form = config["bits"], config["group_size"]
            # In a folder of 4 bits, a tied lm_head may have 8, a byte for each input; see
            # quantize_model.
            has_8_bits = stored.empty.shape[1:] == (linear.in_features,)
            if path == "lm_head" and has_8_bits and config["bits"] == 4:
                form = (8, -1)
            model.set_submodule(path, QuantLinear(linear, *form))
