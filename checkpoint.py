"""From a Hugging Face folder to a model: config.json, safetensors, and what may be wrong in them.

This file checks what comes from outside: values of the wrong type or size, missing or damaged
files, tensors that do not fit. Each failure raises one error that names the file. A family of
models is a row in a table: what its config.json may leave out. Folders written by GPTQ and AWQ
tools are converted to this engine's own format while they are read. This file does not know what
runs the model. Papers: Frantar et al. 2022 (GPTQ, arXiv:2210.17323), Lin et al. 2023 (AWQ,
arXiv:2306.00978). Read: load_config, load_model.
"""

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
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

from families import FAMILIES, FIXED, NESTED, ONLY, OWN, USUAL, folded, layer_kinds, rope_and_folds
from model import Config, FusedLinear, Transformer, rope_frequencies
from settings import (
    DTYPES,
    JSON,
    SamplingParams,
    check,
    check_fields,
    check_items,
    progress,
    supported,
)

# --- Values from outside --------------------------------------------------------------------------


class CheckpointError(ValueError):
    """A checkpoint cannot be loaded. The message is for the user."""


@contextlib.contextmanager
def blame(what: Path | str) -> Iterator[None]:
    """Turn any exception raised inside into a CheckpointError that begins with `what`.

    For a damaged file, parsers raise exceptions of many kinds.

    Args:
        what: a file or a folder that is read, or a word for what is done.
    """
    try:
        yield
    except Exception as error:
        reason = error if isinstance(error, ValueError | OSError) else repr(error)
        if isinstance(what, Path) and (names := pointers(what)):
            reason = f"{names} are pointers of Git LFS and not the files: run git lfs pull"
        raise CheckpointError(f"{what}: {reason}") from error


def pointers(path: Path) -> list[str]:
    """Return the names of files, in a folder or this one, that Git LFS has left as pointers."""
    files = path.iterdir() if path.is_dir() else [path]
    mark = b"version https://git-lfs"
    return [f.name for f in files if f.is_file() and f.open("rb").read(len(mark)) == mark]


def read_json(path: Path) -> JSON:
    """Read a JSON object."""
    with blame(path):
        content = json.loads(path.read_text(encoding="utf-8"))
        return check("its content", content, dict)


def read_optional(path: Path) -> JSON:
    """Read a JSON object without its nulls; return {} if the file does not exist."""
    return without_nulls(read_json(path)) if path.is_file() else {}


def without_nulls(raw: JSON) -> JSON:
    """Drop the names whose value is null. In a request, null means that a field is left out. In
    load_config, where the file's values come after the family's, a null also removes the family's
    default (in Mistral, the sliding window)."""
    return {name: value for name, value in raw.items() if value is not None}


def choose(name: str, value: Any, table: dict) -> Any:
    """Return the entry of `table` under `value`; raise SettingError if there is none."""
    return table[supported(name, value, *table)]


# --- config.json ----------------------------------------------------------------------------------


def load_config(path: Path | str) -> Config:
    """Read `config.json` of a checkpoint folder, the EOS ids in `generation_config.json`, and what
    GPTQ tools write into `quantize_config.json`.

    Raises:
        CheckpointError: the file is missing or not valid JSON, or it names an architecture or a
            setting that does not run here.
    """
    file = Path(path) / "config.json"
    if not file.parent.is_dir():
        raise CheckpointError(
            f"{path}: there is no such folder; `hf download OWNER/NAME --local-dir FOLDER` makes "
            "one, and of a GGUF file, transformers makes one (from_pretrained with gguf_file=NAME, "
            "then save_pretrained)"
        )
    raw = read_json(file)
    with blame(file):
        names = check("architectures", raw.get("architectures") or None, list)
        name = supported("architectures", names[0], *FAMILIES, *NESTED)
        if name in NESTED:  # its text model runs, and an image in a chat is refused
            raw = raw | check("text_config", raw.get("text_config"), dict)
            name = NESTED[name]
        family = FAMILIES[name]
        raw = {key: raw[key] for key in raw if key in family or key not in OWN}
        required = dict.fromkeys(key for key in family if family[key] is None)
        raw = USUAL | required | without_nulls(family | raw) | FIXED.get(name, {})
        quantization = check("quantization_config", raw["quantization_config"], dict)
        if stored := read_optional(file.with_name("quantize_config.json")):
            quantization = {"quant_method": "gptq", **stored, **quantization}
        for name, only in ONLY.items():
            supported(name, raw[name], only)
        # 1) Defaults that follow from other settings.
        heads = check("num_attention_heads", raw["num_attention_heads"], int)
        raw = {
            "num_key_value_heads": heads,
            "head_dim": check("hidden_size", raw["hidden_size"], int) // heads,
            "qkv_bias": raw["attention_bias"],
            "o_bias": raw["attention_bias"],
            **raw,
        }
        # 2) Settings that Config has under another name or in another form.
        # Chat checkpoints add their end-of-turn id in generation_config.json.
        eos = []
        for each in (raw, read_optional(file.with_name("generation_config.json"))):
            ids = each.get("eos_token_id", [])
            eos += ids if isinstance(ids, list) else [ids]
        raw |= dict(
            dtype=choose("dtype", raw.get("dtype", raw["torch_dtype"]), DTYPES),
            eos_ids=tuple(dict.fromkeys(check_items("eos_token_id", eos, list, int, 0))),
            num_experts=raw.get("num_local_experts", raw["num_experts"]),
            quantization=quantization,
        )
        if check("head_dim", raw["head_dim"], int) % 2:
            raise ValueError(f"head_dim {raw['head_dim']} must be even")
        if raw.get("root_of_width"):
            raw["embedding_multiplier"] = raw["hidden_size"] ** 0.5
        raw |= layer_kinds(raw)
        raw |= rope_and_folds(raw)
        # 3) Checks of all settings, alone and together.
        config = Config(**{name: raw[name] for name in raw.keys() & Config.__annotations__})
        check_fields(config)
        check("num_experts", config.num_experts, int, 1, 1024)  # more take half a minute to build
        check("num_experts_per_tok", config.num_experts_per_tok, int, 1, config.num_experts)
        # Without this bound, a matrix could have more bytes than int64 can count.
        check("heads * head_dim", heads * config.head_dim, int)
        if heads % config.num_key_value_heads:
            raise ValueError(
                f"{heads} heads must be a multiple of the {config.num_key_value_heads} kv heads"
            )
    return config


def suggested(path: Path | str) -> JSON:
    """Return the sampling settings that a checkpoint's generation_config.json suggests.

    Raises:
        CheckpointError: one of them has a wrong value.
    """
    file = Path(path) / "generation_config.json"
    stored = read_optional(file)
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    found = {name: stored[name] for name in names if name in stored}
    with blame(file):
        SamplingParams(**found)
    return found


# --- The weights ----------------------------------------------------------------------------------


class Stored(NamedTuple):
    """A tensor that is still in a file.

    Attributes:
        empty: a tensor of its shape and dtype on the meta device, from the file's header.
        read: reads the tensor itself.
    """

    empty: Tensor
    read: Callable[[], Tensor]

    def changed(self, change: Callable[[Tensor], Tensor]) -> "Stored":
        """Return what `change` will make of this tensor when it is read."""
        return Stored(change(self.empty), self.then(change))

    def then(self, change: Callable[[Tensor], Tensor]) -> Callable[[], Tensor]:
        """Return a function that reads this tensor and changes its values."""
        return lambda: change(self.read())


Files = dict[str, Stored]  # the keys are this engine's names of the parameters

# RENAMED: a word in the names of Mixtral or GPTQ -> our word. OUTPUT_NORMS: the same for models
# with norms after attention and the feed-forward. STACKED: a tensor that stacks all experts -> the
# matrices that it holds for each expert.
RENAMED = dict(block_sparse_moe="mlp", w1="gate_proj", w2="down_proj", w3="up_proj", qzeros="zeros")
OUTPUT_NORMS = dict(post_attention_layernorm="attention_output_norm",
    pre_feedforward_layernorm="post_attention_layernorm",
    post_feedforward_layernorm="mlp_output_norm")  # fmt: skip
STACKED = dict(gate_up_proj=("gate_proj", "up_proj"), down_proj=("down_proj",))
# Parts of models with images, which are not read.
IMAGES = ("vision_tower", "multi_modal_projector")


def build(config: Config) -> Transformer:
    """Make a model with random weights, in eval mode and without gradients."""
    model = Transformer(config)
    if config.num_experts > 1:
        from experts import add_experts  # only where a model has experts

        add_experts(model)
    return model.requires_grad_(False).eval()


def load_model(
    path: Path | str,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
    shard: Callable | None = None,
) -> Transformer:
    """Build the model that a Hugging Face folder describes and fill it from its safetensors files.

    The model is first built on the meta device, which takes no memory, and the name, shape and
    dtype of each tensor are checked against the headers of the files. Then one tensor after another
    is copied out of the mapped files, so the peak memory is the weights plus one tensor. Nothing is
    unpickled.

    The integers, scales and zero points of quantised folders are kept exactly. Folders of this
    engine, of GPTQ (4 and 8 bits) and of AWQ can be read.

    Args:
        path: a folder with config.json and model.safetensors, or shards and their index.
        device: where the weights go.
        dtype: what the weights are cast to; None means the dtype in config.json, else float32.
        shard: cuts the empty model and the files down to one rank's share; see tp.shard.

    Returns:
        The model in eval mode, without gradients.

    Raises:
        CheckpointError: see load_config; or files are missing or damaged; or their tensors are not
            those of the config (the error counts all of them and lists the first 20); or the
            quantization_config is unknown or contradicts the files.
    """
    config = load_config(path)
    # A folder that this engine has written has its own names, and all numbers are folded in.
    is_own = config.quantization.get("quant_method") == "kilolm"
    words = RENAMED | (OUTPUT_NORMS if config.post_norm and not is_own else {})
    files = locate_tensors(Path(path), words)
    if config.tie_word_embeddings and {"lm_head.weight", "embed_tokens.weight"} <= files.keys():
        # Some files store the shared matrix twice. If the two differ, they are not shared.
        if are_equal(files["lm_head.weight"], files["embed_tokens.weight"]):
            del files["lm_head.weight"]
        else:
            config = replace(config, tie_word_embeddings=False)
    with torch.device("meta"):
        model = build(config).to(dtype or config.dtype)
    with blame(Path(path)):
        convert(files, model)
        split_fused(files, model)
        insert_quantised(model, files)
        check_tensors(files, model)
        if config.folds and not is_own:
            for name, stored in files.items():
                files[name] = Stored(stored.empty, stored.then(partial(folded, config, name)))
        if shard:
            model, files = shard(model, files)
            insert_quantised(model, files)
    tied = is_tied(model)
    model.to_empty(device=device)
    if tied:
        model.lm_head.weight = model.embed_tokens.weight  # to_empty has separated them
    for name, tensor in progress([*named_tensors(model)], f"loading {Path(path).name}"):
        tensor.copy_(files[name].read())
    model.inv_freq = rope_frequencies(config).to(device)  # to_empty has erased it
    return model


def are_equal(a: Stored, b: Stored) -> bool:
    """Whether two stored tensors have the same shape and values. This reads both, and keeps neither
    in memory."""
    return torch.equal(a.read().to(b.empty.dtype), b.read())


def insert_quantised(model: Transformer, files: Files) -> None:
    """Replace Linears of an empty model by QuantLinears where the files hold quantised weights.

    Raises:
        ValueError: the quantization_config is not supported, or does not fit the model.
    """
    config = model.config.quantization
    if config:
        from quantize import QuantLinear, linears  # only where a model is quantised

        for path in linears(model):
            linear: Any = model.get_submodule(path)
            name = path.rpartition(".")[2]
            part, *_ = getattr(linear, "parts", [name])  # a FusedLinear's first part
            stored = files.get(path.replace(name, part) + ".qweight")
            if stored:  # most folders keep lm_head plain
                form = config["bits"], config["group_size"]
                if path == "lm_head" and stored.empty.shape[1:] == (linear.in_features,):
                    form = (8, -1)  # see quantize_model
                model.set_submodule(path, QuantLinear(linear, *form))


def is_tied(model: Transformer) -> bool:
    """Whether lm_head shares the embedding's weight. A quantised lm_head does not."""
    return getattr(model.lm_head, "weight", None) is model.embed_tokens.weight


def named_tensors(model: Transformer) -> Iterator[tuple[str, Tensor]]:
    """Yield each weight with its name in a checkpoint (less `model.`), as a view to read or fill.

    The weight of a tied lm_head comes once, as the embedding's.
    """
    for name, tensor in model.state_dict().items():
        path = name.rpartition(".")[0]  # "layers.0.mlp.gate_up_proj"
        own = path.rpartition(".")[2]
        # A FusedLinear, plain or quantised, has several parts. Any other module counts as one part.
        parts = getattr(model.get_submodule(path), "parts", None) or {own: len(tensor)}
        for part, view in zip(parts, tensor.split([*parts.values()])):
            if not (is_tied(model) and part == "lm_head"):
                yield name.replace(own, part), view


def locate_tensors(path: Path, words: JSON = RENAMED) -> Files:
    """List a checkpoint's tensors from the headers of its files; no data is read.

    Args:
        words: see RENAMED.

    Raises:
        CheckpointError: a header or the index is damaged; or a file is missing that the index
            names, or, without an index, model.safetensors.
    """
    found: Files = {}
    for file, names in weight_files(path).items():
        with blame(file), safe_open(file, "pt") as reader:
            for name in names or reader.keys():
                empty = reader.get_tensor(name).to("meta")  # maps the file, and reads none of it
                found |= renamed(name, Stored(empty, partial(read_tensor, file, name)), words)
    return found


def weight_files(path: Path) -> dict[Path, list[str]]:
    """Return the files that hold a checkpoint's weights, each with the names of the tensors to read
    from it; no names mean all of its tensors.

    A folder can hold shards that are not in use, and old copies of a tensor. So the index decides.
    As in transformers, a whole model.safetensors goes before the index.
    """
    whole = path / "model.safetensors"
    index = path / "model.safetensors.index.json"
    if whole.exists():
        return {whole: []}
    if not index.exists():
        raise CheckpointError(
            f"{path}: there is no {whole.name}, and no {index.name} that says which shards to "
            "read; convert .bin and .pth files"
        )
    files: dict[Path, list[str]] = {}
    with blame(index):
        for name, file in read_json(index)["weight_map"].items():
            files.setdefault(path / Path(file).name, []).append(name)
    return files


def read_tensor(file: Path, name: str) -> Tensor:
    """Map a tensor. The file is opened for each tensor and closed again, which frees the pages that
    were read through its mapping; otherwise the resident memory would double."""
    with safe_open(file, "pt") as reader:
        return reader.get_tensor(name)


def renamed(name: str, stored: Stored, words: JSON) -> Files:
    """Return a stored tensor under this engine's name; a stack of experts is cut into matrices.

    Args:
        words: see RENAMED.

    Example: "model.layers.0.mlp.experts.down_proj", (2, 32, 24), becomes
        "layers.0.mlp.experts.0.down_proj.weight", (32, 24), and the same for expert 1
    """
    path = name.split(".")
    while path[0] in ("model", "language_model"):
        del path[0]
    if path[0] in IMAGES or path[-1] == "inv_freq":  # the latter follows from the config
        return {}
    name = ".".join(words.get(word, word) for word in path)
    above, _, last = name.rpartition(".")
    if last not in STACKED:
        return {name: stored}
    experts = range(check("experts", stored.empty.shape[0], int, 1, 1024))
    matrices = [f"{above}.{e}.{part}.weight" for e in experts for part in STACKED[last]]
    cut = stored.changed(lambda stack: stack.flatten(0, 1).unflatten(0, (len(matrices), -1)))
    return {matrix: cut.changed(itemgetter(i)) for i, matrix in enumerate(matrices)}


def split_fused(files: Files, model: Transformer) -> None:
    """Cut tensors that are stored fused, as the model has them (Phi-3), into their parts, in place.

    Example: "layers.0.mlp.gate_up_proj.weight" becomes that of gate_proj and that of up_proj
    """
    for path, module in model.named_modules():
        if isinstance(module, FusedLinear):
            own = path.rpartition(".")[2]
            for kind in ("weight", "bias", "qweight", "scales", "zeros"):
                fused = files.pop(f"{path}.{kind}", None)
                start = 0
                for part, size in module.parts.items() if fused else ():
                    rows = slice(start, start + size)
                    files[f"{path}.{kind}".replace(own, part)] = fused.changed(itemgetter(rows))
                    start += size


def check_tensors(files: Files, model: Transformer) -> None:
    """Raise one CheckpointError if tensors differ between the files and the model on the meta
    device. It counts all of them and lists the first 20."""
    have = {name: describe(stored.empty) for name, stored in files.items()}
    want = {name: describe(tensor) for name, tensor in named_tensors(model)}
    wrong = sorted(dict(have.items() ^ want.items()))  # what only one of them contains
    lines = [f"{n}: {have.get(n, 'missing')}, wanted: {want.get(n, 'none')}" for n in wrong[:20]]
    if lines:
        raise CheckpointError("\n  ".join([f"{len(wrong)} tensors do not fit config.json", *lines]))


def describe(tensor: Tensor) -> str:
    """Return a tensor's dtype and shape. Each of DTYPES is "float", as any of them can be cast."""
    kind = "float" if tensor.dtype in DTYPES.values() else tensor.dtype
    return f"{kind} {tuple(tensor.shape)}"


# --- Folders of other tools -----------------------------------------------------------------------
# GPTQ and AWQ tools store integers q with scales and zero points, as quantize.py does. But they
# pack them into 32-bit words and transpose them: (K, N) where quantize.py has (N, K). N is the
# number of output channels, K of input channels, G of groups.
# GPTQ packs q along the inputs, lowest bits first (and zero points along the outputs), and stores
# each zero point less one (gptq_v2 does not). AWQ packs both along the outputs, in the order
# 0 2 4 6 1 3 5 7. The conversion rounds nothing.
#
#     GPTQ, 4 bits    qweight[0, n] = 0x87654321      output n; inputs 0..7 are 1, 2, ... 8
#     AWQ             qweight[k, 0] = 0x75316420      input k; outputs 0..7 are 0, 1, ... 7

FORMS = dict(gptq=("gptq", "gptq_v2"), awq=("awq", "gemm", "GEMM"))
# For each tool and number of bits: where each value stands in a word, counted from the lowest bits.
PLACES: JSON = dict(gptq={4: range(8), 8: range(4)}, awq={4: (0, 4, 1, 5, 2, 6, 3, 7)})


def convert(files: Files, model: Transformer) -> None:
    """Convert the files of a GPTQ or AWQ folder to this engine's format, in place.

    The files of other folders stay as they are. Each tensor is converted by itself. One that is
    missing, or has the wrong shape or dtype, is missing or wrong in the result too, and
    check_tensors reports it.

    Args:
        files: see locate_tensors. Their qweight, scales and zeros become those of
            quantize.QuantLinear.
        model: the empty model that they are for. `quantization` of its config gets `bits` and
            `group_size` where the folder has other names for them.

    Raises:
        ValueError: the tool, its version or the number of bits is not supported; or the inputs were
            sorted before they were grouped (desc_act), so that a group's inputs are not neighbours.
    """
    config = model.config.quantization
    if config.get("quant_method") == "kilolm" or not config:
        return
    method = supported("quant_method", config.get("quant_method"), *FORMS)
    bits = check("bits", config.setdefault("bits", config.get("w_bit")), int)
    check("group_size", config.setdefault("group_size", config.get("q_group_size")), int, -1)
    form = config.get("checkpoint_format") or config.get("version", method)
    supported("checkpoint_format or version", form, *FORMS[method])
    places = choose("bits", bits, PLACES[method])
    supported("desc_act", config.get("desc_act", method == "gptq"), False)
    mask = 2**bits - 1
    from quantize import pack_bits  # only where a model is quantised

    def unpacked(words: Tensor) -> Tensor:
        """(K or G, N * bits / 32) words -> (N, K or G) values."""
        values = [words.t() >> bits * place & mask for place in places]
        return torch.stack(values, 1).flatten(0, 1)

    def qweight(words: Tensor) -> Tensor:
        if method == "gptq":  # the bytes of its words, output by output, are in our order
            return words.t().contiguous().view(torch.uint8)
        return pack_bits(unpacked(words), bits)

    def zeros(words: Tensor) -> Tensor:
        # A zero point of 0 is stored as 0 - 1, all ones. Adding 1 and masking give 0 again.
        return (unpacked(words) + (form == "gptq") & mask).byte()

    changes = dict(qweight=qweight, zeros=zeros, scales=Tensor.t)
    wanted = dict(named_tensors(model))
    for name, stored in [*files.items()]:
        kind = name.rpartition(".")[2]
        with blame(name):
            if kind == "g_idx":  # each input's group
                groups = files.pop(name).read()
                size = config["group_size"] if config["group_size"] > 0 else len(groups)
                if (groups != torch.arange(len(groups)) // size).any():
                    raise ValueError("the inputs are not grouped in order (desc_act)")
            elif kind == "scales" or (kind in changes and stored.empty.dtype == torch.int32):
                files[name] = stored.changed(changes[kind])
            elif name not in wanted and not stored.read().any():
                del files[name]  # some tools store biases that are all zero
