"""A real model, as a user has it: its tokens are those of transformers on every path, it chats,
keeps to a schema, and survives fewer bits. See real_model.py."""

import json
import re
import subprocess
import sys

import jsonschema
import pytest
import torch
from conftest import ROOT
from real_model import real_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from around.folder.tokenizer import Tokenizer
from around.folder.weights import load_model
from around.settings import SamplingParams
from generate import generate
from kv_cache import StaticCache
from llm import LLM
from quantize import quantize_model
from sampling import Sequence

pytestmark = pytest.mark.slow
LENGTHS = (5, 17, 40, 64, 100, 200, 333, 600, 1000, 1500)  # tokens of a prompt
GREEDY = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
# English prose: this project's own pages, without their code.
PAGES = ["README.md", "course/README.md", *sorted(
    str(page.relative_to(ROOT)) for page in ROOT.glob("course/[01]*.md"))]  # fmt: skip
PROSE = re.sub(
    r"```.*?```|<!--.*?-->|\|.*?\n", "", "\n".join((ROOT / page).read_text() for page in PAGES),
    flags=re.DOTALL,
)  # fmt: skip


@pytest.fixture(scope="module")
def folder():
    return real_model()


@pytest.fixture(scope="module")
def words(folder):
    return Tokenizer(folder)


@pytest.fixture(scope="module")
def prompts(words):
    ids = words.encode(PROSE)
    return [ids[1000 * i : 1000 * i + n] for i, n in enumerate(LENGTHS)]


@pytest.fixture(scope="module")
def expected(folder, prompts):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    options = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}
    rows = []
    for ids in prompts:
        given = torch.tensor([ids])
        rows.append(
            model.generate(given, attention_mask=torch.ones_like(given), **options)[0, len(ids) :]
        )
    return [row.tolist() for row in rows]


def plain(folder, prompts):
    model, params = load_model(folder, dtype=torch.float32), SamplingParams(**GREEDY)
    for ids in prompts:
        sequence = Sequence(ids, params, model.config)
        list(generate(model, sequence, StaticCache(model, 1, sequence.max_len), 512))
        yield sequence.output_ids


WAYS = {
    "alone": None,
    "batch": {},
    "chunked": {"max_num_batched_tokens": 100, "max_num_seqs": 4},
    "guesses": {"speculate": 4, "max_num_seqs": 4},
    "compiled": {"compile": True},
}


@pytest.mark.parametrize("way", WAYS)
def test_tokens_are_those_of_transformers(way, folder, prompts, expected):
    """What tiny random models do not show: real widths, long prompts, sharp distributions."""
    if way == "alone":
        assert [*plain(folder, prompts)] == expected
        return
    llm = LLM(folder, dtype="float32", max_seq_len=2048, **WAYS[way])
    got = llm.generate(prompts, SamplingParams(**GREEDY))
    assert [request.outputs[0].output_ids for request in got] == expected


def torchrun(ranks, folder, *more):
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    words += [str(ranks), "generate.py", "--checkpoint", str(folder), "--dtype", "float32", *more]
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=120)


def test_ranks(folder, words, prompts, expected):
    """Nine heads: two ranks cannot share them, and the error says which numbers can. (Nine cannot
    share the 1,536 channels of the MLP.)"""
    refused = torchrun(2, folder)
    assert refused.returncode and "by 2 ranks, but by 1 or 3\n" in refused.stderr
    options = ("--prompt", words.decode(prompts[1]), "--temperature", "0", "--ignore-eos")
    shared = torchrun(3, folder, *options, "--max-tokens", "12")
    assert shared.stdout.rstrip("\n") == words.decode(expected[1]).rstrip("\n"), shared.stderr


def test_the_chat_template(folder, words):
    theirs = AutoTokenizer.from_pretrained(folder)
    hi, answer = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}
    for chat in ([hi], [{"role": "system", "content": "Be brief."}, hi], [hi, answer, hi]):
        want = theirs.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        assert words.encode_chat(chat) == want


def test_a_chat(folder):
    """Three turns, in which the model knows what was said before."""
    asked = "What is the capital of France?\n\nWhich country did I ask about?\nThank you!\n"
    # In bfloat16 the first two words nearly tie, and on some processors the other one wins.
    quiet = ["--temperature", "0", "--dtype", "float32"]
    command = ["generate.py", "--chat", "--max-tokens", "40", *quiet]
    done = subprocess.run(
        [sys.executable, *command, "--checkpoint", str(folder)],
        cwd=ROOT, input=asked, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout and "France" in done.stdout
    assert done.stderr.count("new tokens after") == 3


def test_a_schema(folder):
    schema = {
        "type": "object", "required": ["city", "inhabitants"], "additionalProperties": False,
        "properties": {
            "city": {"type": "string", "maxLength": 20}, "inhabitants": {"type": "integer"}},
    }  # fmt: skip
    llm = LLM(folder, max_num_seqs=4)
    params = SamplingParams(
        structured_outputs={"json": schema}, max_tokens=80, n=4, seed=1, temperature=0.5
    )
    (request,) = llm.generate("A large city of France, as JSON:\n", params)
    for sequence in request.outputs:
        assert sequence.finish_reason == "stop"
        jsonschema.validate(json.loads(sequence.text), schema)


@torch.no_grad()
def test_fewer_bits(folder, words):
    """The perplexity of a page of English: int8 keeps it, and int4 loses less than it would with 4
    bits for the tied lm_head."""
    ids = torch.tensor([words.encode(PROSE)[:768]])
    found = {}
    for mode in ("plain", "int8", "int4"):
        model = load_model(folder, dtype=torch.float32)
        if mode != "plain":
            quantize_model(model, mode)
        logits = model(ids, torch.arange(768)[None])[0, :-1]
        found[mode] = torch.nn.functional.cross_entropy(logits, ids[0, 1:]).exp().item()
    assert found["plain"] < 60, found
    assert found["int8"] < 1.01 * found["plain"], found
    assert 1.01 * found["plain"] < found["int4"] < 1.5 * found["plain"], found
