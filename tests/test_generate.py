"""The command line: what goes to stdout and stderr, every error of use, Ctrl-C and closed pipes.

Most tests call main() in this process; a subprocess costs seconds and is kept for what needs one.
No test depends on what the bundled model says, only on its vocabulary and its tokenizer.
"""

import io
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from conftest import ROOT, SHAKESPEARE
from safetensors.torch import load_file, save_file

import generate
import speculative
from model import load_model
from sampling import SamplingParams, Sequence, Token
from tokenizer import Tokenizer

CONFIG = json.loads((SHAKESPEARE / "config.json").read_text())
TRAINED, EOS = CONFIG["max_position_embeddings"], CONFIG["eos_token_id"]
WEIGHTS, SMALL = "model.safetensors", ("config.json", "tokenizer.model", "tokenizer_config.json")
SEEDED = ("--prompt", "ROMEO:\nWhat", "--max-tokens", "12", "--seed", "3", "--ignore-eos")
GREEDY = ("--prompt", "ROMEO:\nWhat", "--max-tokens", "12", "--temperature", "0", "--ignore-eos")
STATISTICS = r"\d+ prompt \+ \d+ new tokens.*\n"


class Result(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def json(self) -> list[dict]:
        return [json.loads(line) for line in self.out.splitlines()]


pytestmark = pytest.mark.usefixtures("one_thread")


def without_bars(err: str) -> str:
    """Leave out the progress bars, which a slow machine shows while it loads."""
    return re.sub(r"\r[^\r\n]*\n?", "", err)


@pytest.fixture(scope="module")
def models():
    return {}


@pytest.fixture
def cli(capsys, monkeypatch, models):
    """Run main() and return what it did. Each kind of model is loaded once."""

    def load(path, device, dtype=None, shard=None):
        key = (str(path), dtype)
        models[key] = models[key] if key in models else load_model(path, device, dtype)
        return models[key]

    def run(*argv: object, stdin: str = "") -> Result:
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        capsys.readouterr()
        try:
            code = generate.main([str(arg) for arg in argv])
        except SystemExit as stop:  # argparse
            code = stop.code
        except KeyboardInterrupt:  # would end pytest itself
            pytest.fail("Ctrl-C came out of main()")
        out, err = capsys.readouterr()
        return Result(code, out, without_bars(err))

    monkeypatch.setattr(generate, "load", load)
    monkeypatch.setattr(generate, "read_bandwidth", lambda device: 30.0)  # measuring takes seconds
    return run


@pytest.fixture
def folder(tmp_path) -> Path:
    """A copy of the bundled model to add files to."""
    copy = tmp_path / "model"
    copy.mkdir()
    (copy / WEIGHTS).symlink_to(SHAKESPEARE / WEIGHTS)
    for name in SMALL:
        shutil.copy(SHAKESPEARE / name, copy)
    return copy


def fails(result: Result, pattern: str = "", lines: int | None = 1) -> None:
    """An error of use: one line that says what is wrong, exit status 2, and nothing on stdout."""
    assert result.code == 2, result.err
    assert result.out == ""
    last = result.err.splitlines()[-1]
    assert re.match(r"generate\.py: error: \S", last), result.err
    assert re.search(pattern, last), last
    assert lines is None or result.err.count("\n") == lines
    assert "Traceback" not in result.err


# --- Text and statistics --------------------------------------------------------------------------


def test_text_and_statistics(cli):
    """Bug: the statistics end up in a file that the text is redirected to."""
    result = cli(*SEEDED)
    assert result.code == 0
    assert re.fullmatch(STATISTICS, result.err)
    assert "new tokens" not in result.out
    assert result.out == cli(*SEEDED, "--json").json[0]["text"] + "\n"


def test_text_is_streamed(cli, monkeypatch):
    """Bug: the text comes at the end in one piece, or stays in a buffer."""
    calls, seen, sample = [0], [], speculative.sample

    class Out(io.StringIO):
        flushed = 0

        def flush(self):
            self.flushed = len(self.getvalue())

    out = Out()

    def counting(*args):
        calls[0] += 1
        seen.append(out.flushed)
        return sample(*args)

    monkeypatch.setattr(speculative, "sample", counting)
    monkeypatch.setattr(sys, "stdout", out)
    assert cli(*SEEDED).code == 0
    assert len(seen) == 12
    assert seen == sorted(seen)
    assert len(set(seen)) > 3  # grew while tokens were still to come
    assert out.flushed == len(out.getvalue())


def test_json(cli):
    """Bug: a field is missing, renamed or inconsistent with another; text is printed besides."""
    result = cli(*SEEDED, "--json")
    assert result.code == 0
    assert re.fullmatch(STATISTICS, result.err)
    (got,) = result.json
    assert got.keys() == {"prompt", "text", "token_ids", "finish_reason", "timing"}
    assert got["prompt"] == SEEDED[1]
    assert got["finish_reason"] == "length"
    assert len(got["token_ids"]) == 12
    assert all(0 <= i < CONFIG["vocab_size"] for i in got["token_ids"])
    times = got["timing"]["token_s"]
    assert len(times) == 12
    assert times[0] > 0
    assert times == sorted(times)
    tokenizer = Tokenizer(SHAKESPEARE)
    whole = tokenizer.decode(tokenizer.encode(SEEDED[1]) + got["token_ids"])
    assert SEEDED[1] + got["text"] == whole


@pytest.mark.parametrize("n", [0, 3])
def test_json_logprobs(n, cli):
    """Bug: log-probabilities are not written, or not those of the tokens; NaN is not JSON."""
    (got,) = cli(*SEEDED, "--json", "--logprobs", n).json
    assert [entry["id"] for entry in got["logprobs"]] == got["token_ids"]
    for entry in got["logprobs"]:
        assert entry["logprob"] <= 0
        assert len(entry["top"]) == n
        values = [value for _, value in entry["top"]]
        assert values == sorted(values, reverse=True)
        assert all(entry["logprob"] <= value for value in values[:1])
    assert cli(*SEEDED, "--json").json[0]["token_ids"] == got["token_ids"]


def test_num_samples(cli):
    """Bug: every sample is the same one, or depends on the ones before it."""
    three = cli(*SEEDED, "--json", "--num-samples", 3).json
    singles = [cli(*SEEDED, "--json", "--seed", seed).json[0] for seed in (3, 4, 5)]
    assert [s["token_ids"] for s in three] == [s["token_ids"] for s in singles]
    assert len({tuple(s["token_ids"]) for s in three}) == 3
    again = cli(*SEEDED, "--num-samples", 3)
    assert again.out == "".join(s["text"] + "\n" for s in three)
    assert again.err.count("\n") == 1


def test_num_samples_without_a_seed(cli):
    """Bug: without --seed all samples share one. Equal by chance: less than 1e-6."""
    hot = ("--json", "--num-samples", 2, "--max-tokens", 12, "--temperature", 3, "--ignore-eos")
    a, b = cli(*hot).json
    assert a["token_ids"] != b["token_ids"]


def test_no_prompt(cli):
    """Bug: without a prompt the BOS is missing, and there is nothing to start from."""
    result = cli("--max-tokens", 2, "--json")
    assert result.code == 0
    assert result.json[0]["prompt"] == ""


def test_prompt_file(cli, tmp_path):
    """Bug: a file's prompt differs from the same text on the command line; - is not stdin."""
    text = "ROMEO:\nWhat caf\u00e9\n"
    file = tmp_path / "prompt.txt"
    file.write_text(text, encoding="utf-8")
    rest = (*GREEDY[2:], "--json")
    want = cli("--prompt", text, *rest).json[0]
    for result in (cli("--prompt-file", file, *rest), cli("--prompt-file", "-", *rest, stdin=text)):
        assert result.json[0]["token_ids"] == want["token_ids"]
        assert result.json[0]["prompt"] == text


def test_help(cli):
    """Bug: a % in a help text breaks --help."""
    result = cli("--help")
    assert result.code == 0
    for flag in ("--temperature", "--max-new-tokens", "--logit-bias", "--stop", "--chat"):
        assert flag in result.out


# --- Sampling flags -------------------------------------------------------------------------------


def recompute(prompt: str, dtype=torch.float32, **params) -> Sequence:
    """The slow twin: no cache, no command line."""
    model, tokenizer = load_model(SHAKESPEARE, "cpu", dtype), Tokenizer(SHAKESPEARE)
    settings = generate.sampling_params(SHAKESPEARE, **params)
    sequence = Sequence(tokenizer.encode(prompt), settings, model.config, tokenizer)
    list(generate.generate(model, sequence, cache=None))
    return sequence


def test_greedy_is_deterministic_and_equals_recompute(cli):
    """Bug: temperature 0 is taken for "not given"; the cache changes the tokens."""
    a, b = (cli(*GREEDY, "--json", "--dtype", "float32").json[0] for _ in range(2))
    assert a["token_ids"] == b["token_ids"]
    slow = recompute(GREEDY[1], temperature=0, max_tokens=12, ignore_eos=True)
    assert slow.output_ids == a["token_ids"]
    assert slow.text == a["text"]


def test_sampled_equals_recompute(cli):
    """Bug: a seed means another thing on the command line than in the loop."""
    got = cli(*SEEDED, "--json", "--dtype", "float32", "--top-p", 0.9).json[0]
    slow = recompute(SEEDED[1], seed=3, max_tokens=12, ignore_eos=True, top_p=0.9)
    assert slow.output_ids == got["token_ids"]


def test_eos_ends_the_text(cli):
    """Bug: EOS is not honoured, or shown as text."""
    bias = ("--logit-bias", json.dumps({EOS: 100}))
    result = cli("--prompt", "ROMEO:", "--json", "--max-tokens", 9, *bias)
    assert result.json[0]["token_ids"] == [EOS]
    assert result.json[0]["finish_reason"] == "stop"
    assert result.json[0]["text"] == ""
    result = cli("--prompt", "ROMEO:", "--json", "--max-tokens", 9, *bias, "--ignore-eos")
    assert result.json[0]["token_ids"] == [EOS] * 9
    assert result.json[0]["finish_reason"] == "length"
    assert result.json[0]["text"] == ""


def test_stop_strings(cli):
    """Bug: --stop is not passed on, only the last one counts, or it shows in the text."""
    text = cli(*GREEDY, "--json").json[0]["text"]
    stop = text[4:7]
    want = text[: text.index(stop)]
    got = cli(*GREEDY, "--json", "--stop", stop, "--stop", "\x00 never").json[0]
    assert (got["text"], got["finish_reason"]) == (want, "stop")
    assert cli(*GREEDY, "--stop", "\x00 never", "--stop", stop).out == want + "\n"
    assert cli(*GREEDY, "--stop", "\x00 never").out == text + "\n"


def test_stop_token_ids(cli):
    """Bug: --stop-token-ids takes only one id."""
    ids = cli(*GREEDY, "--json").json[0]["token_ids"]
    end = next(i for i in ids if i != ids[0])
    got = cli(*GREEDY, "--json", "--stop-token-ids", 0, end).json[0]
    assert got["token_ids"] == ids[: ids.index(end) + 1]
    assert got["finish_reason"] == "stop"


def test_max_new_tokens_is_another_name(cli):
    """Bug: Hugging Face's name for --max-tokens is not understood."""
    assert len(cli(*GREEDY, "--json", "--max-new-tokens", 5).json[0]["token_ids"]) == 5


def test_max_seq_len(cli):
    """Bug: the limit leaves out the prompt, or is off by one."""
    n = len(Tokenizer(SHAKESPEARE).encode(GREEDY[1]))
    for room in (1, 5):
        result = cli(*GREEDY, "--json", "--max-seq-len", n + room)
        assert len(result.json[0]["token_ids"]) == room
        assert result.json[0]["finish_reason"] == "length"
        assert "warning" not in result.err


def test_warning_above_the_trained_length(cli):
    """Bug: a longer context is refused, or gives nonsense without a word."""
    result = cli("--max-tokens", 2, "--max-seq-len", TRAINED)
    assert "warning" not in result.err
    result = cli("--max-tokens", 2, "--max-seq-len", TRAINED + 1)
    assert result.code == 0
    assert re.match(rf"warning: .*\b{TRAINED}\b", result.err)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "auto"])
def test_dtype(dtype, cli, models):
    """Bug: --dtype is ignored, or the cache keeps another dtype than the model and fails."""
    result = cli(*GREEDY, "--json", "--dtype", dtype, "--max-tokens", 3)
    assert len(result.json[0]["token_ids"]) == 3
    want = {"auto": CONFIG["torch_dtype"]}.get(dtype, dtype)
    loaded = models.get((str(SHAKESPEARE), generate.DTYPES.get(dtype)))
    assert loaded, "not loaded in this dtype"
    assert {str(p.dtype) for p in loaded.parameters()} == {f"torch.{want}"}


def test_profile(cli, tmp_path):
    """Bug: the trace is empty or no JSON, or profiling swallows the text."""
    file = tmp_path / "trace.json"
    result = cli(*GREEDY, "--max-tokens", 2, "--profile", file)
    assert result.code == 0
    assert result.out == cli(*GREEDY, "--max-tokens", 2).out
    events = json.loads(file.read_text())["traceEvents"]
    assert any("mm" in event.get("name", "") for event in events)


# --- generation_config.json -----------------------------------------------------------------------


def test_generation_config_gives_the_defaults(cli, folder):
    """Bug: the checkpoint's own settings are ignored, or win over the user's flags."""
    stored = {"temperature": 5.0, "top_k": 1, "top_p": None, "do_sample": True, "max_length": 3}
    (folder / "generation_config.json").write_text(json.dumps(stored))
    params = generate.sampling_params(folder)
    assert (params.temperature, params.top_k, params.top_p) == (5.0, 1, 1.0)
    assert params.max_tokens == SamplingParams().max_tokens
    rest = (*SEEDED, "--json", "--checkpoint", folder)
    greedy = cli(*GREEDY, "--json").json[0]["token_ids"]
    assert cli(*rest).json[0]["token_ids"] == greedy
    assert cli(*rest, "--top-k", 0).json[0]["token_ids"] != greedy  # equal by chance: never
    neutral = ("--top-k", 0, "--top-p", 1, "--min-p", 0, "--repetition-penalty", 1)
    hot = cli(*SEEDED, "--json", "--temperature", 5, *neutral).json[0]["token_ids"]
    assert cli(*rest, "--top-k", 0).json[0]["token_ids"] == hot


def test_flags_win_even_where_they_are_zero():
    """Bug: `given or stored` takes --temperature 0 or --top-k 0 for "not given"."""
    given = {"temperature": 0.0, "top_k": 0, "min_p": 0.0, "seed": 0, "ignore_eos": None}
    params = generate.sampling_params(SHAKESPEARE, **given)
    assert (params.temperature, params.top_k, params.seed) == (0.0, 0, 0)
    assert params.ignore_eos is False


def test_generation_config_eos(cli, folder):
    """Bug: of several EOS ids (a chat model's end of turn) only the first ends the text."""
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [EOS, 7]}))
    bias = ("--logit-bias", '{"7": 100}', "--max-tokens", 4)
    assert cli("--checkpoint", folder, "--json", *bias).json[0]["token_ids"] == [7]
    assert cli("--json", *bias).json[0]["token_ids"] == [7] * 4


@pytest.mark.parametrize(
    "content", ["{", "[]", '{"top_k": "many"}', '{"temperature": NaN}', '{"top_p": 7}']
)
def test_damaged_generation_config(content, cli, folder):
    """Bug: a checkpoint's bad setting ends in a traceback, or reaches the sampler."""
    (folder / "generation_config.json").write_text(content)
    fails(cli(*SEEDED, "--checkpoint", folder))


# --- Chat -----------------------------------------------------------------------------------------


@pytest.fixture
def heard(monkeypatch) -> list:
    """The conversations that the chat template was given."""
    chats, encode_chat = [], Tokenizer.encode_chat

    def listening(self, messages):
        chats.append([dict(message) for message in messages])
        return encode_chat(self, messages)

    monkeypatch.setattr(Tokenizer, "encode_chat", listening)
    return chats


def test_chat(cli, heard):
    """Bug: the second turn forgets the first, or the reply in it; the end of input is an error."""
    result = cli("--chat", "--max-tokens", 6, "--seed", 1, stdin="Hello there\nAnd you?\n")
    assert result.code == 0
    assert "Traceback" not in result.err
    assert result.err.count("> ") == 3
    assert [[m["role"] for m in chat] for chat in heard] == [
        ["user"],
        ["user", "assistant", "user"],
    ]
    assert heard[1][0]["content"] == "Hello there"
    assert heard[1][2]["content"] == "And you?"
    assert result.out.startswith(heard[1][1]["content"] + "\n")
    assert result.out.count("\n") >= 2
    assert "> " not in result.out


def test_chat_reply_ends_at_a_blank_line(cli, heard):
    """Bug: a base model goes on and writes the user's next turn as well."""
    newline = Tokenizer(SHAKESPEARE).encode("a\n", add_special=False)[-1]
    bias = ("--logit-bias", json.dumps({newline: 100}), "--max-tokens", 9)
    result = cli("--chat", *bias, stdin="Hello\n")
    assert result.code == 0
    assert result.out == "\n"
    assert re.search(r" 2 new tokens", result.err)


def test_chat_uses_the_checkpoints_template(cli, folder, heard):
    """Bug: the plain template's stop string cuts the replies of models that have their own."""
    (folder / "chat_template.jinja").write_text("{{ messages[-1].content }}")
    newline = Tokenizer(SHAKESPEARE).encode("a\n", add_special=False)[-1]
    bias = ("--logit-bias", json.dumps({newline: 100}), "--max-tokens", 5)
    assert cli("--chat", "--checkpoint", folder, *bias, stdin="Hello\n").out == "\n" * 6
    (folder / "chat_template.jinja").write_text("{{ raise_exception('no, thanks') }}")
    result = cli("--chat", "--checkpoint", folder, stdin="Hello\n")
    assert result.code == 2
    assert "error: chat template: no, thanks" in result.err


def test_chat_without_input(cli):
    """Bug: statistics of nothing divide by zero."""
    result = cli("--chat")
    assert (result.code, result.out) == (0, "")
    assert "Traceback" not in result.err


def test_chat_in_json_is_not_silent(cli):
    """Bug: --chat --json prints nothing at all: neither text nor JSON, nor an error."""
    result = cli("--chat", "--json", "--max-tokens", 4, "--ignore-eos", stdin="Hello\n")
    assert result.code == 2 or result.out.strip()


# --- Errors of use --------------------------------------------------------------------------------


def test_bad_checkpoints(cli, tmp_path):
    """Bug: a wrong path ends in a traceback."""
    file = tmp_path / "file"
    file.write_text("text")
    empty = tmp_path / "empty"
    empty.mkdir()
    for path in (tmp_path / "nowhere", file, empty):
        fails(cli("--checkpoint", path), re.escape(str(path)))


@pytest.mark.parametrize("missing", [WEIGHTS, *SMALL])
def test_missing_file(missing, cli, folder):
    """Bug: a folder that lacks a file ends in a traceback. (Only one may.)"""
    (folder / missing).unlink()
    if missing == "tokenizer_config.json":
        assert cli("--checkpoint", folder, "--prompt", "a", "--max-tokens", 1).code == 0
    else:
        fails(cli("--checkpoint", folder), re.escape(missing.partition(".")[0]))


def test_over_long_prompt(cli):
    """Bug: a prompt beyond the context is cut without a word; the message lacks a number."""
    prompt = "what " * TRAINED
    n = len(Tokenizer(SHAKESPEARE).encode(prompt))
    fails(cli("--prompt", prompt), rf"\b{n}\b.*\b{TRAINED}\b")
    fails(cli("--prompt", "a b c d e f g h", "--max-seq-len", 4), r"\b4\b.*--max-seq-len")


@pytest.mark.parametrize(
    ("flag", "value", "name"),
    [
        ("--temperature", "nan", "temperature"),
        ("--temperature", "inf", "temperature"),
        ("--temperature", "-0.1", "temperature"),
        ("--top-k", "-2", "top_k"),
        ("--top-p", "0", "top_p"),
        ("--top-p", "1.1", "top_p"),
        ("--min-p", "nan", "min_p"),
        ("--repetition-penalty", "0", "repetition_penalty"),
        ("--presence-penalty", "3", "presence_penalty"),
        ("--frequency-penalty", "-3", "frequency_penalty"),
        ("--max-tokens", "0", "max_tokens"),
        ("--logprobs", "21", "logprobs"),
        ("--seed", str(2**63), "seed"),
        ("--num-samples", "0", "n must"),
        ("--n", "-1", "n must"),
        ("--max-seq-len", "0", "max_seq_len"),
        ("--max-seq-len", "-5", "max_seq_len"),
        ("--stop", "", "stop"),
        ("--stop-token-ids", "-1", "stop_token_ids"),
        ("--logit-bias", '{"5": 101}', "logit_bias"),
        ("--logit-bias", '{"5": NaN}', "logit_bias"),
        ("--logit-bias", '{"5": "high"}', "logit_bias"),
        ("--logit-bias", '{"-5": 1}', "logit_bias"),
        ("--logit-bias", '{"5000": 1}', "5000"),
    ],
)
def test_out_of_range(flag, value, name, cli):
    """Bug: a senseless number reaches the kernels, or the message does not name the setting."""
    fails(cli("--prompt", "a", "--max-tokens", "1", flag, value), name)


@pytest.mark.parametrize(
    "argv",
    [
        ("--logit-bias", "[1, 2]"),
        ("--logit-bias", '{"five": 1}'),
        ("--logit-bias", '{"1.5": 1}'),
        ("--logit-bias", "{"),
        ("--logit-bias", "5"),
        ("--logit-bias", "null"),
        ("--prompt", "a", "--chat"),
        ("--prompt", "a", "--prompt-file", "-"),
        ("--top-k", "1.5"),
        ("--max-tokens", "many"),
        ("--dtype", "int8"),
        ("--device", "tpu"),
        ("--nonsense",),
        ("stray",),
    ],
    ids=" ".join,
)
def test_wrong_arguments(argv, cli):
    """Bug: what cannot be parsed ends in a traceback, or is taken for something else."""
    fails(cli(*argv), lines=None)  # argparse puts the usage in front


@pytest.mark.parametrize("device", ["cuda", "mps"])
def test_device_that_is_not_there(device, cli):
    """Bug: torch's own assertion and its traceback in place of what to do."""
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if there[device]:
        pytest.skip(f"this machine has {device}")
    fails(cli("--device", device), rf"{device}.*--device cpu")


def test_bad_prompt_files(cli, tmp_path):
    """Bug: a missing or binary file ends in a traceback."""
    fails(cli("--prompt-file", tmp_path / "nowhere.txt"), "nowhere", lines=None)
    fails(cli("--prompt-file", tmp_path), lines=None)
    file = tmp_path / "latin-1.txt"
    file.write_bytes("caf\u00e9 au lait".encode("latin-1"))
    fails(cli("--prompt-file", file), "utf-8")


def test_prompt_that_is_not_utf_8(cli):
    """Bug: such bytes of a command line become lone surrogates, on which sentencepiece raises a
    RuntimeError."""
    result = cli("--prompt", "caf\udce9", "--max-tokens", 1)
    assert "Traceback" not in result.err
    if result.code != 0:  # replacing them would be as good
        fails(result)


def test_profile_that_cannot_be_written(cli, tmp_path):
    """Bug: the trace's bad path shows up after a long run, and as a traceback."""
    result = cli("--max-tokens", 1, "--profile", tmp_path / "nowhere" / "trace.json")
    assert result.code == 2
    assert "generate.py: error: " in result.err


def test_seeds_that_count_past_the_last_one(cli):
    """Bug: the second sample's seed is out of range, which shows only after the first."""
    argv = ("--max-tokens", 1, "--num-samples", 2, "--seed", 2**63 - 1)
    result = cli(*argv)
    if result.code != 0:
        fails(result, "seed")


# --- Ctrl-C and closed pipes ----------------------------------------------------------------------


@pytest.fixture
def interrupt(monkeypatch):
    """Press Ctrl-C when the n-th token is about to be sampled."""

    def at(n: int) -> None:
        count, sample = itertools.count(1), speculative.sample

        def sampling(*args):
            if next(count) == n:
                raise KeyboardInterrupt
            return sample(*args)

        monkeypatch.setattr(speculative, "sample", sampling)

    return at


def test_interrupt_keeps_the_text_so_far(cli, interrupt):
    """Bug: Ctrl-C loses the text, its statistics, or the shell's exit status 130."""
    want = cli(*SEEDED, "--max-tokens", 5).out
    interrupt(6)
    result = cli(*SEEDED, "--num-samples", 3)  # and no further sample is begun
    assert result.code == 130
    assert result.out == want
    assert re.fullmatch(STATISTICS, result.err)


def test_interrupt_in_json(cli, interrupt):
    """Bug: Ctrl-C leaves no JSON, or half an object."""
    interrupt(6)
    result = cli(*SEEDED, "--json", "--num-samples", 3)
    assert result.code == 130
    (got,) = result.json
    assert got["finish_reason"] == "interrupted"
    assert len(got["token_ids"]) == 5


def test_interrupt_before_the_first_token(cli, interrupt):
    """Bug: statistics of a sequence without tokens."""
    interrupt(1)
    result = cli(*SEEDED)
    assert (result.code, result.out, result.err) == (130, "\n", "")


def test_interrupt_while_loading(cli, monkeypatch):
    """Bug: Ctrl-C before there is any text ends in a traceback."""

    def load(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(generate, "load", load)
    result = cli(*SEEDED)
    assert (result.code, result.out, result.err) == (130, "", "")


def test_interrupt_in_chat(cli, interrupt, heard):
    """Bug: Ctrl-C during a reply ends the conversation."""
    interrupt(4)
    result = cli("--chat", "--max-tokens", 5, "--ignore-eos", "--seed", 1, stdin="Hello\nAgain\n")
    assert result.code == 0
    assert len(heard) == 2
    assert result.out.startswith(heard[1][1]["content"] + "\n")


def test_interrupt_at_the_last_word(cli, monkeypatch):
    """Bug: Ctrl-C while the last text is written ends the sequence twice, and what had been held
    back as the start of a stop string is shown twice."""
    text = cli(*GREEDY, "--json").json[0]["text"]
    ended, append = [], Sequence.append

    def watching(self, token: Token) -> None:
        append(self, token)
        if self.finish_reason:
            ended.append(self)

    class Out(io.StringIO):
        pressed = False

        def write(self, text):
            if ended and not self.pressed:
                self.pressed = True
                raise KeyboardInterrupt
            return super().write(text)

    monkeypatch.setattr(Sequence, "append", watching)
    out = Out()
    monkeypatch.setattr(sys, "stdout", out)
    cli(*GREEDY, "--stop", text[-1] + "\x00 never")
    assert out.pressed
    assert out.getvalue() == text + "\n"


def start(*argv: object) -> subprocess.Popen:
    """Start the program itself, with a Ctrl-C that works even where the test runs in background."""
    return subprocess.Popen(
        [sys.executable, ROOT / "generate.py", *map(str, argv)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONUTF8": "1", "OMP_NUM_THREADS": "1"},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


posix = pytest.mark.skipif(os.name != "posix", reason="signals and pipes of POSIX")


@posix
def test_program():
    """Bug: works in a test and not as a program: the exit status, stdout, the real statistics."""
    process = start("--max-tokens", 4, "--seed", 1, "--ignore-eos")
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0
    assert out.endswith(b"\n")
    assert re.fullmatch(STATISTICS, without_bars(err.decode()))
    assert b"tokens/s" in err
    process = start("--checkpoint", "/nowhere")
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out) == (2, b"")
    assert re.fullmatch(r"generate\.py: error: .*/nowhere.*\n", err.decode())


@posix
def test_ctrl_c():
    """Bug: Ctrl-C prints a traceback or loses the text."""
    process = start("--max-tokens", 90_000, "--max-seq-len", 99_000, "--ignore-eos", "--seed", 1)
    first = process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130
    assert first
    assert out.endswith(b"\n")
    assert b"Traceback" not in err
    assert b"new tokens" in err


@posix
def test_closed_pipe():
    """Bug: `| head` ends in BrokenPipeError's traceback, or in Python's complaint at exit."""
    process = start("--max-tokens", 600, "--ignore-eos", "--seed", 1)
    assert len(process.stdout.read(10)) == 10
    process.stdout.close()
    err = process.stderr.read()
    assert process.wait(timeout=120) == 0
    assert not re.search(rb"Traceback|Exception|BrokenPipe", err)


# --- Models whose vocabulary is padded ------------------------------------------------------------


def test_padding_ids_decode_to_nothing(cli, folder):
    """Bug: a model padded to a round vocabulary draws an id that the tokenizer does not know."""
    weights = load_file(SHAKESPEARE / "model.safetensors")
    V = CONFIG["vocab_size"]
    for name, tensor in weights.items():
        if tensor.shape[0] == V:
            weights[name] = torch.cat([tensor, tensor.new_zeros(64, tensor.shape[1])])
    for name in ("config.json", "model.safetensors"):
        (folder / name).unlink()
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG | {"vocab_size": V + 64}))
    padded = ("--checkpoint", folder, "--logit-bias", json.dumps({V + 20: 100}))
    result = cli("--prompt", "What", "--max-tokens", 4, "--json", *padded)
    assert result.json[0]["token_ids"] == [V + 20] * 4
    assert result.json[0]["text"] == ""
    assert cli("--prompt", "What", "--max-tokens", 4, *padded).out == "\n"


def test_starting_does_not_import_the_compiler():
    """A decorator imported torch.compile's machinery: 2 s before every first word."""
    code = "import sys, generate; assert 'torch._dynamo' not in sys.modules"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
