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
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import pytest
import torch
from conftest import DRAFT, ROOT, SHAKESPEARE
from safetensors.torch import load_file, save_file

import generate
import speculative
from model import load_model
from sampling import Sequence, sampling_params
from tokenizer import Tokenizer

CONFIG = json.loads((SHAKESPEARE / "config.json").read_text())
TRAINED, EOS = CONFIG["max_position_embeddings"], CONFIG["eos_token_id"]
TEXT = "ROMEO:\nWhat"
SHORT = ("--prompt", TEXT, "--max-tokens", 12, "--ignore-eos", "--dtype", "float32")
SEEDED, GREEDY = (*SHORT, "--seed", 3), (*SHORT, "--temperature", 0)
STATISTICS = r"\d+ prompt \+ \d+ new tokens, first one after .* s, then .* tokens/s\n"
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

    @property
    def json(self):
        return [json.loads(line) for line in self.out.splitlines()]


@cache
def load_once(path, device, dtype=None, shard=None):
    return load_model(path, device, dtype)


@pytest.fixture
def cli(capsys, monkeypatch):
    """Run main() and return what it did. Each kind of model is loaded once."""

    def run(*argv, stdin=""):
        monkeypatch.setattr(sys, "stdin", stdin if stdin is None else io.StringIO(stdin))
        capsys.readouterr()
        try:
            code = generate.main([str(arg) for arg in argv])
        except SystemExit as stop:  # argparse
            code = stop.code
        except KeyboardInterrupt:  # would end pytest itself
            pytest.fail("Ctrl-C came out of main()")
        return Result(code, *capsys.readouterr())

    monkeypatch.setattr(generate, "load", load_once)
    return run


@pytest.fixture
def folder(tmp_path):
    """A copy of the bundled model to change."""
    load_once.cache_clear()
    return shutil.copytree(SHAKESPEARE, tmp_path / "model")


def ids_of(result):
    assert result.code == 0, result.err
    return result.json[0]["token_ids"]


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
def test_text_json_and_statistics(path, cli):
    """Bug: the statistics end up in a file that the text is redirected to; a field of the JSON is
    missing or inconsistent with another; a path through the engine gives another text."""
    result, n = cli(*GREEDY, *PATHS[path], "--json"), 1 + (path == "samples")
    assert result.code == 0
    assert len(result.json) == n
    guessed = r"\d+ times guessed.*\n" if path in ("speculate", "draft", "both") else ""
    assert re.fullmatch(f"({STATISTICS}){{{n}}}{guessed}", result.err)
    for got in result.json:
        assert got.keys() == {"prompt", "text", "token_ids", "finish_reason", "logprobs"}
        assert (got["prompt"], got["finish_reason"]) == (TEXT, "length")
        tokenizer = Tokenizer(SHAKESPEARE)
        assert TEXT + got["text"] == tokenizer.decode(tokenizer.encode(TEXT) + got["token_ids"])
        slow = recompute(temperature=0, max_tokens=12, ignore_eos=True)
        assert slow.output_ids == got["token_ids"]
    plain = cli(*GREEDY, *PATHS[path])
    assert plain.out == (slow.text + "\n") * n
    assert re.fullmatch(f"({STATISTICS}){{{n}}}{guessed}", plain.err)


def recompute(**params):
    """The slow twin: no cache, no command line."""
    model, tokenizer = load_model(SHAKESPEARE, "cpu", torch.float32), Tokenizer(SHAKESPEARE)
    params = sampling_params(SHAKESPEARE, **params)
    sequence = Sequence(tokenizer.encode(TEXT), params, model.config, tokenizer)
    list(generate.generate(model, sequence))
    return sequence


@pytest.mark.parametrize("module", [generate, speculative])
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


@pytest.mark.parametrize("n", [0, 3])
def test_json_logprobs(n, cli):
    """Bug: log-probabilities are not written, or not those of the tokens; NaN is not JSON."""
    (got,) = cli(*SEEDED, "--json", "--logprobs", n).json
    assert [entry["id"] for entry in got["logprobs"]] == got["token_ids"]
    for entry in got["logprobs"]:
        values = [value for _, value in entry["top"]]
        assert len(values) == n
        assert values == sorted(values, reverse=True)
        assert entry["logprob"] <= (values[0] if n else 0)
    assert ids_of(cli(*SEEDED, "--json")) == got["token_ids"]


def test_num_samples(cli):
    """Bug: every sample is the same one, or depends on the ones before it; a seed means another
    thing alone, or in the loop. Without a seed two are equal by chance: less than 1e-6."""
    three = [each["token_ids"] for each in cli(*SEEDED, "--json", "--num-samples", 3).json]
    assert three == [ids_of(cli(*SEEDED, "--json", "--seed", seed)) for seed in (3, 4, 5)]
    assert three[0] == recompute(seed=3, max_tokens=12, ignore_eos=True).output_ids
    assert three[0] != three[1] != three[2]
    assert cli(*SEEDED, "--num-samples", 3).err.count("\n") == 3
    a, b = cli(*SHORT, "--json", "--n", 2, "--temperature", 3).json
    assert a["token_ids"] != b["token_ids"]
    assert cli("--max-tokens", 1, "--n", 2, "--seed", 2**63 - 1).code == 0  # seeds wrap around


def test_where_the_prompt_comes_from(cli, tmp_path):
    """Bug: a file's prompt differs from the same text on the command line; - is not stdin; without
    a prompt the BOS is missing, and there is nothing to start from; bytes that are not UTF-8 end in
    a traceback."""
    text, rest = "ROMEO:\nWhat caf\u00e9\n", (*GREEDY[2:], "--json")
    file = tmp_path / "prompt.txt"
    file.write_text(text, encoding="utf-8")
    want = cli("--prompt", text, *rest).json[0]
    for result in (cli("--prompt-file", file, *rest), cli("--prompt-file", "-", *rest, stdin=text)):
        assert result.json[0] == want
    assert cli("--max-tokens", 2, "--json").json[0]["prompt"] == ""
    assert cli("--prompt", "caf\udce9", "--max-tokens", 1).code == 0


# --- Settings -------------------------------------------------------------------------------------


@pytest.fixture
def draw(monkeypatch):
    """Let only one id be drawn."""

    def only(token_id):
        def biased(path, **given):
            return replace(sampling_params(path, **given), logit_bias={token_id: 100})

        monkeypatch.setattr(generate, "sampling_params", biased)

    return only


def test_eos_ends_the_text(cli, draw, folder):
    """Bug: EOS is not honoured, or shown as text; of several EOS ids (a chat model's end of turn)
    only the first ends the text."""
    draw(EOS)
    for more, ids, reason in (((), [EOS], "stop"), (["--ignore-eos"], [EOS] * 4, "length")):
        (got,) = cli("--json", "--max-tokens", 4, *more).json
        assert (got["token_ids"], got["finish_reason"], got["text"]) == (ids, reason, "")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [EOS, 7]}))
    draw(7)
    assert ids_of(cli("--json", "--max-tokens", 4)) == [7] * 4
    assert ids_of(cli("--json", "--max-tokens", 4, "--checkpoint", folder)) == [7]


def test_stops(cli):
    """Bug: --stop is not passed on, only the last one counts, or it shows in the text;
    --stop-token-ids takes only one; Hugging Face's name for --max-tokens is not understood."""
    (whole,) = cli(*GREEDY, "--json").json
    text, ids, never = whole["text"], whole["token_ids"], "\x00 never"
    want = text[: text.index(text[4:7])]
    (got,) = cli(*GREEDY, "--json", "--stop", text[4:7], "--stop", never).json
    assert (got["text"], got["finish_reason"]) == (want, "stop")
    assert cli(*GREEDY, "--stop", never, "--stop", text[4:7]).out == want + "\n"
    assert cli(*GREEDY, "--stop", never).out == text + "\n"
    end = next(i for i in ids if i != ids[0])
    (got,) = cli(*GREEDY, "--json", "--stop-token-ids", 0, end).json
    assert got["token_ids"] == ids[: ids.index(end) + 1]
    assert got["finish_reason"] == "stop"
    assert ids_of(cli(*GREEDY, "--json", "--max-new-tokens", 5)) == ids[:5]


@pytest.mark.parametrize("path", ["plain", "speculate"])
def test_max_seq_len(path, cli):
    """Bug: the limit leaves out the prompt, or is off by one; one beyond what the model was trained
    on is refused."""
    n = len(Tokenizer(SHAKESPEARE).encode(TEXT))
    for room in (1, 5):
        result = cli(*GREEDY, *PATHS[path], "--json", "--max-seq-len", n + room)
        assert len(ids_of(result)) == room
        assert result.json[0]["finish_reason"] == "length"
    assert cli(*PATHS[path], "--max-tokens", 2, "--max-seq-len", TRAINED + 1).code == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "auto"])
@pytest.mark.parametrize("path", ["plain", "speculate"])
def test_dtype(dtype, path, cli):
    """Bug: --dtype is ignored, or the cache keeps another dtype than the model and fails; an int8
    cache is not asked for."""
    for kv_dtype in ("auto", "int8"):
        more = ("--dtype", dtype, "--kv-dtype", kv_dtype, "--max-tokens", 3, "--json")
        assert len(ids_of(cli(*GREEDY, *PATHS[path], *more))) == 3
    loaded = load_once(SHAKESPEARE, torch.device("cpu"), generate.DTYPES.get(dtype), None)
    want = {"auto": CONFIG["torch_dtype"]}.get(dtype, dtype)
    assert {str(p.dtype) for p in loaded.parameters()} == {f"torch.{want}"}


def test_generation_config(cli, folder):
    """Bug: the checkpoint's own settings are ignored, win over the user's flags, or, where they are
    damaged, end in a traceback or reach the sampler."""
    file, ours = folder / "generation_config.json", (*SEEDED, "--json", "--checkpoint", folder)
    file.write_text(json.dumps({"temperature": 5.0, "top_k": 1, "do_sample": True}))
    assert ids_of(cli(*ours)) == ids_of(cli(*GREEDY, "--json"))
    neutral = ("--top-k", 0, "--top-p", 1, "--min-p", 0, "--repetition-penalty", 1)
    hot = ids_of(cli(*SEEDED, "--json", "--temperature", 5, *neutral))
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
    """Bug: the second turn forgets the first, or the reply in it; the end of input is an error;
    --chat --json prints nothing at all."""
    asked = ("--chat", "--max-tokens", 6, "--seed", 1, *PATHS[path])
    for more in ((), ("--json",)):
        heard.clear()
        result = cli(*asked, *more, stdin="Hello there\nAnd you?\n")
        assert result.code == 0
        assert result.err.count("> ") == 3
        assert [m["role"] for m in heard[1]] == ["user", "assistant", "user"]
        assert [m["content"] for m in heard[1][::2]] == ["Hello there", "And you?"]
        reply = heard[1][1]["content"]
        assert result.json[0]["text"] == reply if more else result.out.startswith(reply + "\n")
        assert "> " not in result.out
    assert cli(*asked)[:2] == (0, "")  # nothing said: statistics of nothing divide by zero


def test_chat_template(cli, draw, folder):
    """Bug: a base model goes on and writes the user's next turn as well; the plain template's stop
    string cuts the replies of models that have their own."""
    draw(Tokenizer(SHAKESPEARE).encode("a\n", add_special=False)[-1])
    chat = ("--chat", "--max-tokens", 5, "--checkpoint", folder)
    result = cli(*chat, stdin="Hello\n")
    assert result.out == "\n"
    assert " 2 new tokens" in result.err
    (folder / "chat_template.jinja").write_text("{{ messages[-1].content }}")
    assert cli(*chat, stdin="Hello\n").out == "\n" * 6
    (folder / "chat_template.jinja").write_text("{{ raise_exception('no, thanks') }}")
    result = cli(*chat, stdin="Hello\n")
    fails(result._replace(err=result.err.removeprefix("> ")), "chat template: no, thanks")


# --- Errors of use --------------------------------------------------------------------------------


def test_bad_checkpoints(cli, folder, tmp_path):
    """Bug: a wrong path, or a folder that lacks a file, ends in a traceback. (Only one may.)"""
    for path in (tmp_path / "nowhere", folder / "config.json", tmp_path):
        fails(cli("--checkpoint", path), re.escape(str(path)))
    fails(cli("--draft-checkpoint", tmp_path), re.escape(str(tmp_path)))
    for name in ("tokenizer_config.json", "tokenizer.model", "model.safetensors", "config.json"):
        content = (folder / name).read_bytes()
        (folder / name).unlink()
        generate.load = load_model  # not what was loaded before
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
    generate.load = load_model  # not what was loaded before
    for path in PATHS.values():
        fails(cli("--checkpoint", folder, "--prompt", "a", *path), "NaN")


OUT_OF_RANGE = [
    ("--temperature", "nan"), ("--temperature", "inf"), ("--temperature", "-0.1"),
    ("--top-k", "-2"), ("--top-p", "0"), ("--top-p", "1.1"), ("--min-p", "nan"),
    ("--repetition-penalty", "0"), ("--presence-penalty", "3"), ("--frequency-penalty", "-3"),
    ("--max-tokens", "0"), ("--logprobs", "21"), ("--seed", str(2**63)), ("--n", "0"),
    ("--n", "-1"), ("--n", "129"), ("--max-seq-len", "0"), ("--max-seq-len", "-5"), ("--stop", ""),
    ("--stop-token-ids", "-1"), ("--speculate", "65"), ("--speculate", "-1"),
]  # fmt: skip
UNREADABLE = [
    ("--prompt", "a", "--chat"), ("--prompt", "a", "--prompt-file", "-"), ("--top-k", "1.5"),
    ("--max-tokens", "many"), ("--dtype", "int8"), ("--device", "tpu"), ("--nonsense",), ("stray",),
    ("--quantize", "int3"),
]  # fmt: skip


def test_wrong_values(cli, tmp_path, monkeypatch):
    """Bug: a senseless number reaches the kernels, or the message does not name the setting; what
    cannot be parsed ends in a traceback, or is taken for something else."""
    names = {"--speculate": "guess", "--max-seq-len": "max.seq.len"}
    for flag, value in OUT_OF_RANGE:
        name = names.get(flag, flag.strip("-").replace("-", "_"))
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
        patch.setattr(torch, "zeros", lambda *_, **__: 1 / 0)  # as where memory is short
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
        for module in (generate, speculative):
            count, sample = itertools.count(1), module.sample

            def sampling(*args, count=count, sample=sample):
                if next(count) == n:
                    raise KeyboardInterrupt
                return sample(*args)

            monkeypatch.setattr(module, "sample", sampling)
        return PATHS[request.param]

    return at


def test_interrupt(cli, interrupt, monkeypatch):
    """Bug: Ctrl-C loses the text, its statistics, half an object, or the shell's exit status 130;
    or a further sample is begun."""
    (want,) = cli(*SEEDED, "--max-tokens", 5, "--json").json
    result = cli(*SEEDED, *interrupt(6))
    assert (result.code, result.out) == (130, want["text"] + "\n")
    assert re.fullmatch(STATISTICS, result.err)
    result = cli(*SEEDED, *interrupt(6), "--json")
    assert result.code == 130
    (got,) = result.json
    assert (got["finish_reason"], got["token_ids"]) == ("interrupted", want["token_ids"])
    assert cli(*SEEDED, *interrupt(1)) == (130, "\n", "")  # statistics of a text without tokens
    monkeypatch.setattr(generate, "load", lambda *_: signal.raise_signal(signal.SIGINT))
    assert cli(*SEEDED) == (130, "", "")


def test_interrupt_in_chat(cli, interrupt, heard):
    """Bug: Ctrl-C during a reply ends the conversation, or leaves that reply in the engine."""
    chat = ("--chat", "--max-tokens", 5, "--ignore-eos", "--seed", 1, *interrupt(4))
    result = cli(*chat, stdin="Hello\nAgain\n")
    assert result.code == 0
    assert len(heard) == 2
    assert result.out.startswith(heard[1][1]["content"] + "\n")
    assert "3 new tokens" in result.err and "5 new tokens" in result.err


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
    torch.compile's machinery, 2 s before every first word."""
    code = (
        "import sys, generate; code = generate.main(['--checkpoint', '/nowhere']); "
        "assert 'torch._dynamo' not in sys.modules; sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    fails(Result(done.returncode, done.stdout, done.stderr), "/nowhere")


@pytest.mark.slow
@pytest.mark.parametrize("path", ["plain", "speculate"])
def test_real_ctrl_c_and_pipes(path):
    """Bug: Ctrl-C prints a traceback or loses the text; `| head` ends in BrokenPipeError's, or in
    Python's complaint at exit."""
    run = (*PATHS[path], "--ignore-eos", "--seed", 1, "--max-tokens")
    out, err = start(*run, 4).communicate(timeout=120)
    assert out.endswith(b"\n")
    assert re.match(STATISTICS, err.decode())
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
