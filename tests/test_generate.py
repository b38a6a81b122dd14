"""The command line: what goes to stdout and stderr, every error of use, Ctrl-C and closed pipes.

Most tests call main() in this process; a subprocess costs seconds and is kept for what needs one.
No test depends on what the bundled model says, only on its vocabulary and its tokenizer.
"""

import io
import itertools
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
from functools import cache
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from conftest import DRAFT, ROOT, SHAKESPEARE
from safetensors.torch import load_file, save_file
from serving import COMPLETIONS, shared  # noqa: F401 (a fixture)
from ways import plain

import generate
import kv_cache
import scheduler
from around.folder.config import suggested
from around.folder.tokenizer import Tokenizer
from around.folder.weights import load_model
from around.settings import DTYPES, SamplingParams
from around.start import begin as llm
from around.start import command
from llm import LLM
from sampling import Sequence

CONFIG = json.loads((SHAKESPEARE / "config.json").read_text())
TRAINED, EOS = CONFIG["max_position_embeddings"], CONFIG["eos_token_id"]
TEXT = "ROMEO:\nWhat"
SHORT = ("--prompt", TEXT, "--max-tokens", 12, "--ignore-eos", "--dtype", "float32")
SEEDED, GREEDY = (*SHORT, "--seed", 3), (*SHORT, "--temperature", 0)
STATISTICS = r"\d+ new tokens after \d+ of the prompt, the first in .* s, then .* tokens/s\n"
# The plain loop, and what goes through the engine: the same tokens, greedily.
PATHS = {
    "plain": (), "speculate": ("--speculate", 3), "draft": ("--draft-checkpoint", DRAFT),
    "both": ("--draft-checkpoint", DRAFT, "--speculate", 2), "samples": ("--n", 2),
}  # fmt: skip

pytestmark = pytest.mark.usefixtures("one_thread")


class Result(NamedTuple):
    code: int
    out: str
    err: str
    sequences: tuple[Sequence, ...] = ()  # that were generated
    sampling: str = ""  # the line that says how tokens are drawn; not in err


@cache
def load_once(path, device, dtype=None, shard=None):
    return load_model(path, device, dtype)


@pytest.fixture
def cli(capsys, monkeypatch):
    """Run main() and return what it did. Each kind of model is loaded once."""
    sequences, stream = [], generate.stream

    def streaming(sequence, steps):
        sequences.append(sequence)
        return stream(sequence, steps)

    def run(*argv, stdin=""):
        sequences.clear()
        stdin = io.StringIO(stdin) if isinstance(stdin, str) else stdin
        monkeypatch.setattr(sys, "stdin", stdin)
        capsys.readouterr()
        try:
            code = generate.main([str(arg) for arg in argv])
        except SystemExit as stop:  # argparse
            code = stop.code
        except KeyboardInterrupt:  # would end pytest itself
            pytest.fail("Ctrl-C came out of main()")
        out, err = capsys.readouterr()
        line = re.search("sampling: .*\n|$", err)[0]
        return Result(code, out, err.replace(line, "", 1), (*sequences,), line)

    monkeypatch.setattr(llm, "load_model", load_once)
    monkeypatch.setattr(generate, "stream", streaming)
    monkeypatch.setattr(command, "stream", streaming)
    return run


@pytest.fixture
def folder(tmp_path):
    """A copy of the bundled model to change."""
    load_once.cache_clear()
    return shutil.copytree(SHAKESPEARE, tmp_path / "model")


def ids_of(result):
    assert result.code == 0, result.err
    return result.sequences[0].output_ids


def fails(result, pattern="", usage=False):
    """An error of use: one line that says what is wrong, exit status 2, and nothing on stdout."""
    assert (result.code, result.out) == (2, ""), result
    last = result.err.splitlines()[-1]
    assert re.match(r"generate\.py: error: \S", last), result.err
    assert re.search(pattern, last), last
    assert usage or result.err.count("\n") == 1  # argparse puts the usage in front
    assert "Traceback" not in result.err


# --- Text and statistics --------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
def test_text_and_statistics(path, cli):
    """Bug: the statistics end up in a file that the text is redirected to; a path through the
    engine gives another text."""
    result = cli(*GREEDY, *PATHS[path])
    n = 1 + (path == "samples")
    slow = recompute(temperature=0, max_tokens=12, ignore_eos=True)
    guessed = r"\d+ times guessed.*\n" if path in ("speculate", "draft", "both") else ""
    assert (result.code, result.out) == (0, "---\n".join([slow.text + "\n"] * n))
    assert re.fullmatch(f"({STATISTICS}){{{n}}}{guessed}", result.err)
    for got in result.sequences:
        assert (got.ids, got.finish_reason) == (slow.ids, "length")
        assert TEXT + got.text == Tokenizer(SHAKESPEARE).decode(got.ids)


def recompute(**params):
    """The slow twin: no cache, no command line."""
    model, tokenizer = load_model(SHAKESPEARE, "cpu", torch.float32), Tokenizer(SHAKESPEARE)
    params = SamplingParams(**suggested(SHAKESPEARE) | params)
    sequence = Sequence(tokenizer.encode(TEXT), params, model.config, tokenizer)
    return plain(model, sequence)


@pytest.mark.parametrize("module", [generate, scheduler])
def test_text_is_streamed(module, cli, monkeypatch):
    """Bug: the text comes at the end in one piece, or stays in a buffer."""
    seen, sample = [], module.sample

    class Out(io.StringIO):
        flushed = 0

        def flush(self):
            self.flushed = len(self.getvalue())

    out = Out()
    monkeypatch.setattr(module, "sample", lambda *args: seen.append(out.flushed) or sample(*args))
    monkeypatch.setattr(sys, "stdout", out)
    assert cli(*SEEDED, *(() if module is generate else PATHS["speculate"])).code == 0
    assert len(seen) > 6
    assert seen == sorted(seen)
    assert len(set(seen)) > 3  # grew while tokens were still to come
    assert out.flushed == len(out.getvalue())


def test_num_samples(cli):
    """Bug: every sample is the same one, or depends on the ones before it; a seed means another
    thing alone, or in the loop. Without a seed two are equal by chance: less than 1e-6."""
    result = cli(*SEEDED, "--num-samples", 3)
    three = [each.output_ids for each in result.sequences]
    assert three == [ids_of(cli(*SEEDED, "--seed", seed)) for seed in (3, 4, 5)]
    assert result.out == "---\n".join(each.text + "\n" for each in result.sequences)
    assert three[0] == recompute(seed=3, max_tokens=12, ignore_eos=True).output_ids
    assert three[0] != three[1] != three[2]
    assert result.err.count("\n") == 3
    a, b = cli(*SHORT, "--n", 2, "--temperature", 3).sequences
    assert a.output_ids != b.output_ids
    assert cli("--max-tokens", 1, "--n", 2, "--seed", 2**63 - 1).code == 0  # seeds wrap around


def test_where_the_prompt_comes_from(cli, tmp_path):
    """Bug: a file's prompt differs from the same text on the command line; - is not stdin; without
    a prompt the BOS is missing, and there is nothing to start from; bytes that are not UTF-8 end in
    a traceback."""
    text, rest = "ROMEO:\nWhat caf\u00e9\n", GREEDY[2:]
    file = tmp_path / "prompt.txt"
    file.write_text(text, encoding="utf-8")
    want, encode = cli("--prompt", text, *rest), Tokenizer(SHAKESPEARE).encode
    for result in (cli("--prompt-file", file, *rest), cli("--prompt-file", "-", *rest, stdin=text)):
        assert (ids_of(result), result.out) == (ids_of(want), want.out)
    for (sequence,), prompt in ((want.sequences, text), (cli("--max-tokens", 2).sequences, "")):
        assert sequence.ids[: sequence.prompt_len] == encode(prompt)
    assert cli("--prompt", "caf\udce9", "--max-tokens", 1).code == 0


# --- Settings -------------------------------------------------------------------------------------


@pytest.fixture
def draw(monkeypatch):
    """Let only one id be drawn."""

    def only(token_id):
        bias = {"logit_bias": {token_id: 100}}
        monkeypatch.setattr(command, "suggested", lambda path: suggested(path) | bias)

    return only


def test_eos_ends_the_text(cli, draw, folder):
    """Bug: EOS is not honoured, or shown as text; of several EOS ids (a chat model's end of turn)
    only the first ends the text."""
    draw(EOS)
    for more, ids, reason in (((), [EOS], "stop"), (["--ignore-eos"], [EOS] * 4, "length")):
        result = cli("--max-tokens", 4, *more)
        assert (ids_of(result), result.out) == (ids, "\n")
        assert result.sequences[0].finish_reason == reason
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [EOS, 7]}))
    draw(7)
    assert ids_of(cli("--max-tokens", 4)) == [7] * 4
    assert ids_of(cli("--max-tokens", 4, "--checkpoint", folder)) == [7]


def test_stops(cli):
    """Bug: --stop is not passed on, only the last one counts, or it shows in the text;
    --stop-token-ids takes only one; Hugging Face's name for --max-tokens is not understood."""
    whole, never = cli(*GREEDY), "\x00 never"
    text, ids = whole.out.removesuffix("\n"), ids_of(whole)
    want = text[: text.index(text[4:7])]
    for stops in ((text[4:7], never), (never, text[4:7])):
        got = cli(*GREEDY, "--stop", stops[0], "--stop", stops[1])
        assert (got.out, got.sequences[0].finish_reason) == (want + "\n", "stop")
    assert cli(*GREEDY, "--stop", never).out == text + "\n"
    end = next(i for i in ids if i != ids[0])
    got = cli(*GREEDY, "--stop-token-ids", 0, end)
    assert ids_of(got) == ids[: ids.index(end) + 1]
    assert got.sequences[0].finish_reason == "stop"
    assert ids_of(cli(*GREEDY, "--max-new-tokens", 5)) == ids[:5]


@pytest.mark.parametrize("path", ["plain", "speculate"])
def test_max_seq_len(path, cli):
    """Bug: the limit leaves out the prompt, or is off by one; one beyond what the model was trained
    on is refused."""
    n = len(Tokenizer(SHAKESPEARE).encode(TEXT))
    for room in (1, 5):
        result = cli(*GREEDY, *PATHS[path], "--max-seq-len", n + room)
        assert len(ids_of(result)) == room
        assert result.sequences[0].finish_reason == "length"
        assert result.err.startswith("the context is full\n")
    assert cli(*PATHS[path], "--max-tokens", 2, "--max-seq-len", TRAINED).code == 0
    result = cli(*PATHS[path], "--max-tokens", 2, "--max-seq-len", TRAINED + 1)
    assert result.code == 0 and f"beyond this model's context of {TRAINED} tokens" in result.err


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "auto"])
@pytest.mark.parametrize("path", ["plain", "speculate"])
def test_dtype(dtype, path, cli):
    """Bug: --dtype is ignored, or the cache keeps another dtype than the model and fails; an int8
    cache is not asked for."""
    for kv_dtype in ("auto", "int8"):
        more = ("--dtype", dtype, "--kv-dtype", kv_dtype, "--max-tokens", 3)
        assert len(ids_of(cli(*GREEDY, *PATHS[path], *more))) == 3
    loaded = load_once(SHAKESPEARE, torch.device("cpu"), DTYPES.get(dtype), None)
    want = {"auto": CONFIG["torch_dtype"]}.get(dtype, dtype)
    assert {str(p.dtype) for p in loaded.parameters()} == {f"torch.{want}"}


def test_generation_config(cli, folder):
    """Bug: the checkpoint's own settings are ignored, win over the user's flags, or, where they are
    damaged, end in a traceback or reach the sampler."""
    file, ours = folder / "generation_config.json", (*SEEDED, "--checkpoint", folder)
    file.write_text(json.dumps({"temperature": 5.0, "top_k": 1, "do_sample": True}))
    assert ids_of(cli(*ours)) == ids_of(cli(*GREEDY))
    neutral = ("--top-k", 0, "--top-p", 1, "--min-p", 0, "--repetition-penalty", 1)
    hot = ids_of(cli(*SEEDED, "--temperature", 5, *neutral))
    assert ids_of(cli(*ours, "--top-k", 0)) == hot  # greedy by chance: never
    for damaged in ("{", "[]", '{"top_k": "many"}', '{"temperature": NaN}', '{"top_p": 7}'):
        file.write_text(damaged)
        fails(cli(*ours))


# --- Chat -----------------------------------------------------------------------------------------


@pytest.fixture
def heard(monkeypatch):
    """The conversations that the chat template was given."""
    chats, encode_chat = [], Tokenizer.encode_chat

    def listening(self, messages):
        chats.append([dict(message) for message in messages])
        return encode_chat(self, messages)

    monkeypatch.setattr(Tokenizer, "encode_chat", listening)
    return chats


@pytest.mark.parametrize("path", ["plain", "speculate"])
def test_chat(path, cli, heard):
    """Bug: the second turn forgets the first, or the reply in it; the end of input is an error."""
    asked = ("--chat", "--max-tokens", 6, "--seed", 1, *PATHS[path])
    result = cli(*asked, stdin="Hello there\nAnd you?\n")
    assert result.code == 0
    assert result.err.count("> ") == 3
    assert result.err.count("the reply was cut after 6 tokens\n") == 2
    assert [m["role"] for m in heard[1]] == ["user", "assistant", "user"]
    assert [m["content"] for m in heard[1][::2]] == ["Hello there", "And you?"]
    assert heard[1][1]["content"] == result.sequences[0].text
    assert result.out == "".join(each.text + "\n" for each in result.sequences)
    assert "tokens\n> \n" in result.err
    assert cli(*asked)[:2] == (0, "")  # nothing said: statistics of nothing divide by zero


def test_chat_at_a_full_context(cli, heard):
    """Bug: the conversation ends with an error once its turns have filled the context; or what is
    too long by itself takes the others with it."""
    turns = ["Hello there"] * 12 + ["what " * 200, "And you?"]
    asked = ("--chat", "--max-tokens", 20, "--ignore-eos", "--seed", 1, "--max-seq-len", 150)
    result = cli(*asked, stdin="\n".join(turns) + "\n")
    assert result.code == 0 and len(result.sequences) == 13  # all but the long one
    room = [len(each.tokens) == 20 or each.finish_reason == "stop" for each in result.sequences]
    assert all(room)
    assert "> the context is full: the oldest turns are forgotten\n" in result.err
    (error,) = re.findall(r"> error: .*\n", result.err)
    assert re.search(r"has \d+ tokens, context is 150", error)
    last = [message["content"] for message in heard[-1]]
    assert last[-1] == "And you?" and "Hello there" in last  # what was said before is there
    assert [m["role"] for m in heard[-1]] == ["user", "assistant"] * (len(last) // 2) + ["user"]
    assert result.err.count("> ") == 15


def test_only_the_context_ends_a_reply(cli, heard):
    """A default of 256 tokens refused --min-tokens 300, or cut the reply."""
    result = cli("--chat", "--min-tokens", 300, "--max-seq-len", 60, "--seed", 1, stdin="Hello\n")
    (reply,) = result.sequences
    assert result.code == 0 and len(reply.ids) == 60 and reply.finish_reason == "length"


def test_chat_template(cli, draw, folder):
    """Bug: a base model goes on and writes the user's next turn as well; the plain template's stop
    string cuts the replies of models that have their own."""
    draw(Tokenizer(SHAKESPEARE).encode("a\n", add_special=False)[-1])
    chat = ("--chat", "--max-tokens", 5, "--checkpoint", folder)
    result = cli(*chat, stdin="Hello\n")
    assert result.out == "\n"
    assert "> 2 new tokens" in result.err
    (folder / "chat_template.jinja").write_text("{{ messages[-1].content }}")
    assert cli(*chat, stdin="Hello\n").out == "\n" * 6
    (folder / "chat_template.jinja").write_text("{{ raise_exception('no, thanks') }}")
    result = cli(*chat, stdin="Hello\n")
    told = "cache: 1,024 tokens in up to .* GB .*\nCtrl-D ends the chat, and Ctrl-C a reply.\n> "
    assert re.match(told, result.err)
    fails(result._replace(err=result.err.partition("> ")[2]), "chat template: no, thanks")


def test_chat_with_a_system_prompt(cli, heard):
    """An empty line was a turn; what the model is told first was forgotten with the oldest turns;
    a reply ended at 256 tokens, which is the default of a completion."""
    asked = ("--chat", "--max-tokens", 20, "--ignore-eos", "--seed", 1, "--max-seq-len", 150)
    lines = "\n   \n" + "Hello there\n" * 12
    result = cli(*asked, "--system", "Be kind", stdin=lines)
    assert (result.code, len(result.sequences)) == (0, 12)
    assert all(chat[0] == {"role": "system", "content": "Be kind"} for chat in heard)
    assert "the oldest turns are forgotten" in result.err and len(heard[-1]) < 24
    result = cli("--chat", "--ignore-eos", "--max-seq-len", 150, stdin="Hello\n")
    assert len(result.sequences[0].ids) == 150 or result.sequences[0].finish_reason == "stop"


def test_the_sampling_is_told(cli, folder):
    """A model that writes nonsense at temperature 1, of which no line says a word."""
    told = "sampling: temperature 0.8 (the folder), top_p 0.95 (the folder)\n"
    assert cli(*SHORT).sampling == told
    told = "sampling: temperature 0.8 (the folder), top_p 0.5 (a flag)\n"
    assert cli(*SHORT, "--top-p", 0.5).sampling == told
    (folder / "generation_config.json").unlink()
    told = "sampling: temperature 1 (the default)\n"
    assert cli(*SHORT, "--checkpoint", folder).sampling == told


def test_wrong_suggestions(cli, folder):
    """A server that does not start, with an error that names no file."""
    for wrong in ({"top_p": 0}, {"top_k": 50.0}, {"temperature": "hot"}):
        (folder / "generation_config.json").write_text(json.dumps(wrong))
        (name,) = wrong
        fails(cli(*SHORT, "--checkpoint", folder), f"generation_config.json: {name} must be")


# --- Errors of use --------------------------------------------------------------------------------


def test_prompts_of_llm(monkeypatch):
    """Ids were taken for three prompts, and a dict's keys for texts; under torchrun each process
    loaded the whole model."""
    made = LLM(SHAKESPEARE, device="cpu", num_blocks=32)
    ids = Tokenizer(SHAKESPEARE).encode(TEXT)
    texts = set()
    for prompts in (TEXT, [TEXT], ids, [ids], {"prompt": TEXT}, [{"prompt_token_ids": ids}]):
        (request,) = made.generate(prompts, temperature=0, max_tokens=8)
        texts.add(request.outputs[0].text)
    assert len(texts) == 1
    assert len(made.generate([TEXT, {"prompt": TEXT}, ids], max_tokens=1)) == 3
    turns = [{"role": "user", "content": TEXT}]
    tokenizer = made.engine.tokenizer
    for chats in (turns, [turns, turns]):
        for request in made.chat(chats, stop="e", seed=1, max_tokens=99):
            (output,) = request.outputs
            assert output.ids[: output.prompt_len] == tokenizer.encode_chat(turns)
            assert output.params.stop == ("e", *tokenizer.chat_stop)
    for wrong in (5, None, {"x": 1}, [5.5], [None]):
        with pytest.raises(ValueError, match=r"^prompt must be str"):
            made.generate(wrong)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="under torchrun"):
        LLM(SHAKESPEARE)


@pytest.mark.parametrize(
    ("encoding", "shown"), [("ascii", b"??"), ("latin-1", b"\xe9?"), ("utf-8", "é你".encode())]
)
def test_line_ends_and_other_alphabets(encoding, shown, cli, monkeypatch):
    """CRLF became LF; a terminal that is not UTF-8 ended the run."""
    prompts, encode, raw = [], Tokenizer.encode, io.BytesIO()
    monkeypatch.setattr(Tokenizer, "decode", lambda self, ids, *_, **__: "é你\r\n" * len(ids))
    monkeypatch.setattr(Tokenizer, "encode", lambda *args: prompts.append(args[1]) or encode(*args))
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding))
    stdin = io.TextIOWrapper(io.BytesIO(b"a\r\nb\xff\n"), "ascii")
    assert cli("--prompt-file", "-", "--max-tokens", 2, "--ignore-eos", stdin=stdin).code == 0
    assert prompts == ["a\r\nb\ufffd\n"]
    assert raw.getvalue() == (shown + b"\r\n") * 2 + b"\n"


def test_the_same_settings_give_the_same_text(cli, shared):  # noqa: F811
    """Python sampled by SamplingParams' defaults, the others as the checkpoint suggests."""
    made = LLM(SHAKESPEARE, device="cpu", dtype="float32", num_blocks=32)
    (request,) = made.generate("ROMEO:\n", seed=3, max_tokens=24)
    text = request.outputs[0].text
    words = ("--prompt", "ROMEO:\n", "--seed", 3, "--max-tokens", 24, "--dtype", "float32")
    assert cli(*words, "--device", "cpu").out == text + "\n"
    body = {"prompt": "ROMEO:\n", "seed": 3, "max_tokens": 24}
    assert shared.post(COMPLETIONS, body).json["choices"][0]["text"] == text
    (plain,) = made.generate("ROMEO:\n", SamplingParams(seed=3, max_tokens=24))
    assert plain.outputs[0].text != text  # just these


def test_the_first_typo_gets_a_true_answer(cli, folder, tmp_path, monkeypatch):
    """All of these said "pip install tokenizers", installed or not; and a file that is no text was
    not named."""
    empty, other, latin = tmp_path / "empty", tmp_path / "other", tmp_path / "latin"
    empty.mkdir()
    other.mkdir()
    (other / "config.json").write_text('{"architectures": ["BertModel"]}')
    latin.write_bytes(b"caf\xe9")
    (folder / "tokenizer.model").rename(tmp_path / "tokenizer.model")
    llm.load_model = load_model  # not what was loaded before
    fails(cli("--checkpoint", tmp_path / "typo"), r"typo: there is no such folder")
    fails(cli("--checkpoint", empty), r"empty/config\.json: No such file or directory$")
    fails(cli("--checkpoint", other), r"BertModel.*supported: .*Llama")
    fails(cli("--checkpoint", folder), r"tokenizer\.json is missing, .*no tokenizer\.model")
    (folder / "tokenizer.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    fails(cli("--checkpoint", folder), r"needs: pip install tokenizers")
    fails(cli("--prompt-file", latin), r"latin: .*utf-8")
    fails(cli("--kv-memory", "nan"), r"kv_memory must be float.*nan")


def test_bad_checkpoints(cli, folder, tmp_path):
    """Bug: a wrong path, or a folder that lacks a file, ends in a traceback. (Only one may.)"""
    for path in (tmp_path / "nowhere", folder / "config.json", tmp_path):
        fails(cli("--checkpoint", path), re.escape(str(path)))
    fails(cli("--draft-checkpoint", tmp_path), re.escape(str(tmp_path)))
    for name in ("tokenizer_config.json", "tokenizer.model", "model.safetensors", "config.json"):
        content = (folder / name).read_bytes()
        (folder / name).unlink()
        llm.load_model = load_model  # not what was loaded before
        result = cli("--checkpoint", folder, "--prompt", "a", "--max-tokens", 1)
        if name == "tokenizer_config.json":
            assert result.code == 0
        else:
            fails(result, re.escape(name))
        (folder / name).write_bytes(content)


def test_weights_that_give_nan(cli, folder):
    """Bug: a text of the first word of the vocabulary, over and over; or a traceback."""
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"].fill_(math.nan)
    save_file(weights, folder / "model.safetensors")
    llm.load_model = load_model  # not what was loaded before
    for path in PATHS.values():
        fails(cli("--checkpoint", folder, "--prompt", "a", *path), "NaN")


OUT_OF_RANGE = [
    ("--temperature", "nan"), ("--temperature", "inf"), ("--temperature", "-0.1"),
    ("--top-k", "-2"), ("--top-p", "0"), ("--top-p", "1.1"), ("--min-p", "nan"),
    ("--repetition-penalty", "0"), ("--presence-penalty", "3"), ("--frequency-penalty", "-3"),
    ("--max-tokens", "0"), ("--min-tokens", "-1"), ("--seed", str(2**63)), ("--n", "0"),
    ("--n", "-1"), ("--n", "129"), ("--max-seq-len", "0"), ("--max-seq-len", "-5"), ("--stop", ""),
    ("--stop-token-ids", "-1"), ("--speculate", "65"), ("--speculate", "-1"),
    ("--max-num-seqs", "0"), ("--max-num-batched-tokens", "0"), ("--kv-memory", "0"),
    ("--block-size", "0"), ("--num-blocks", "0"), ("--group-size", "-2"),
]  # fmt: skip
UNREADABLE = [
    ("--prompt", "a", "--chat"), ("--prompt", "a", "--prompt-file", "-"), ("--top-k", "1.5"),
    ("--max-tokens", "many"), ("--dtype", "int8"), ("--device", "tpu"), ("--nonsense",), ("stray",),
    ("--quantize", "int3"),
]  # fmt: skip


def out_of_memory(*_, **__):
    raise RuntimeError("DefaultCPUAllocator: not enough memory")


def test_wrong_values(cli, tmp_path, monkeypatch):
    """Bug: a senseless number reaches the kernels, or the message does not name the setting; what
    cannot be parsed ends in a traceback, or is taken for something else."""
    for flag, value in OUT_OF_RANGE:
        name = flag.strip("-").replace("-", "_")
        fails(cli("--prompt", "a", "--max-tokens", "1", flag, value), rf"\b{name}\b")
    for argv in UNREADABLE:
        fails(cli(*argv), usage=True)
    (tmp_path / "latin-1.txt").write_bytes("caf\u00e9 au lait".encode("latin-1"))
    fails(cli("--prompt-file", tmp_path / "latin-1.txt"), "utf-8")
    for words in (("--prompt-file", "/nowhere.txt"), ("--prompt-file", "/")):
        fails(cli(*words), words[1])
    for words in (("--prompt-file", "-"), ("--chat",)):
        fails(cli(*words, stdin=None), "stdin is closed")
    fails(cli("--quantize", "int4", "--group-size", 24), "group_size 24 .* try")
    with monkeypatch.context() as patch:
        patch.setattr(kv_cache, "torch", SimpleNamespace(**vars(torch) | {"empty": out_of_memory}))
        for path in PATHS.values():
            fails(cli("--prompt", "a", "--max-seq-len", 500, *path), "no memory for a cache")
    prompt = "what " * TRAINED  # is not cut without a word
    n = len(Tokenizer(SHAKESPEARE).encode(prompt))
    for path in PATHS.values():
        fails(cli("--prompt", prompt, *path), rf"\b{n}\b.*\b{TRAINED}\b")
        fails(cli("--prompt", "a b c d e", "--max-seq-len", 4, *path), r"\b4\b.*--max-seq-len")


@pytest.mark.parametrize("device", ["cuda", "mps"])
def test_device_that_is_not_there(device, cli):
    """Bug: torch's own assertion and its traceback in place of what to do."""
    if {"cuda": torch.cuda, "mps": torch.backends.mps}[device].is_available():
        pytest.skip(f"this machine has {device}")
    fails(cli("--device", device), rf"{device}.*--device cpu")


# --- Ctrl-C and closed pipes ----------------------------------------------------------------------


@pytest.fixture(params=["plain", "samples"])
def interrupt(request, monkeypatch):
    """Press Ctrl-C when the n-th token is about to be sampled; return what to add to a command."""

    def at(n):
        for module in (generate, scheduler):
            count, sample = itertools.count(1), module.sample

            def sampling(*args, count=count, sample=sample):
                if next(count) == n:
                    signal.raise_signal(signal.SIGINT)
                return sample(*args)

            monkeypatch.setattr(module, "sample", sampling)
        return PATHS[request.param]

    return at


def test_interrupt(cli, interrupt, monkeypatch):
    """Bug: Ctrl-C loses the text, its statistics, or the shell's exit status 130; or a further
    sample is begun."""
    want = cli(*SEEDED, "--max-tokens", 5)
    first, second = cli(*SEEDED, "--n", 2, "--max-tokens", 20).out.split("\n---\n")
    stop = next(letter for letter in first if letter not in second)
    result = cli(*SEEDED, "--max-tokens", 20, "--stop", stop, *interrupt(18), "--n", 2)
    assert result.sequences[0].finish_reason == "stop", "the first sample has ended before"
    assert (result.code, "---" in result.out) == (130, False)
    result = cli(*SEEDED, *interrupt(6))
    assert (result.code, result.out) == (130, want.out)
    assert re.fullmatch(STATISTICS, result.err)
    (got,) = result.sequences
    assert (got.finish_reason, got.output_ids) == ("interrupted", ids_of(want))
    assert cli(*SEEDED, *interrupt(1))[:3] == (130, "\n", "")  # statistics of no tokens
    monkeypatch.setattr(llm, "load_model", lambda *_: signal.raise_signal(signal.SIGINT))
    assert cli(*SEEDED)[:3] == (130, "", "")


def test_no_flag_is_ignored(cli):
    """Bug: --system without a chat; a limit of the paged cache, which a single prompt does not
    need."""
    fails(cli("--system", "Be kind"), "--system needs --chat")

    short = cli(*GREEDY, "--num-blocks", 1, "--max-tokens", 100)
    assert short.code == 0 and "the context is full" in short.err


def test_interrupt_in_chat(cli, interrupt, heard):
    """Bug: Ctrl-C during a reply ends the conversation, or leaves that reply in the engine, or the
    earlier turns are computed again."""
    chat = ("--chat", "--max-tokens", 5, "--ignore-eos", "--seed", 1, *interrupt(4))
    result = cli(*chat, stdin="Hello, my good and gentle cousin\nAgain\n")
    assert result.code == 0
    assert len(heard) == 2
    assert result.out.startswith(heard[1][1]["content"] + "\n")
    assert "4 new tokens" in result.err and "5 new tokens" in result.err
    assert result.sequences[1].cached >= 16, "the first turn was computed again"


def start(*argv):
    """Start the program itself, with a Ctrl-C that works even where the test runs in background."""
    return subprocess.Popen(
        [sys.executable, ROOT / "generate.py", *map(str, argv)],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONUTF8": "1", "OMP_NUM_THREADS": "1"},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip


def test_program():
    """Bug: works in a test and not as a program: the exit status; a decorator imports
    torch.compile's machinery, 2 s before every first word; a technique's file cannot be left out
    where it is not asked for."""
    code = (
        "import sys, generate; code = generate.main(['--checkpoint', '/nowhere']); "
        "optional = 'torch._dynamo experts flex quantize packed compiling speculative'; "
        "optional += ' structured tp server'; "
        "assert not {*optional.split()} & {*sys.modules}; sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    fails(Result(done.returncode, done.stdout, done.stderr), "/nowhere")


def test_stderr_is_closed():
    """The line of statistics, in the text."""
    line = f'"{sys.executable}" generate.py --max-tokens 3 --temperature 0 --device cpu'
    texts = [
        subprocess.run(line + more, shell=True, cwd=ROOT, stdout=subprocess.PIPE, text=True).stdout
        for more in (" 2>/dev/null", " 2>&-")
    ]
    assert texts[0] == texts[1] and len(texts[0]) > 3


@pytest.mark.slow
@pytest.mark.parametrize("path", ["plain", "speculate"])
def test_real_ctrl_c_and_pipes(path):
    """Bug: Ctrl-C prints a traceback or loses the text; `| head` ends in BrokenPipeError's, or in
    Python's complaint at exit."""
    run = (*PATHS[path], "--ignore-eos", "--seed", 1, "--max-tokens")
    out, err = start(*run, 4).communicate(timeout=120)
    assert out.endswith(b"\n")
    assert re.match(f"sampling: .*\n{STATISTICS}", err.decode())
    process = start(*run, 20_000, "--max-seq-len", 21_000)
    assert process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130
    assert out.endswith(b"\n")
    assert b"Traceback" not in err
    assert b"new tokens" in err
    process = start(*run, 600)
    assert len(process.stdout.read(10)) == 10
    process.stdout.close()
    err = process.stderr.read()
    assert process.wait(timeout=120) == 0
    assert not re.search(rb"Traceback|Exception|BrokenPipe", err)
