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

import numpy as np
import pytest
import torch
from conftest import DRAFT, ROOT, SHAKESPEARE
from safetensors.torch import load_file, save_file
from ways import plain

import around.fast
import generate
import kv_cache
import scheduler
from around.folder import Tokenizer, load_model, suggested_sampling
from around.settings import DTYPES, EngineArgs, SamplingParams
from around.start import begin, command
from llm import LLM
from sampling import Sequence
from tools.books import audit

CONFIG = json.loads((SHAKESPEARE / "config.json").read_text())
TRAINED = CONFIG["max_position_embeddings"]
TOKENIZER = Tokenizer(SHAKESPEARE)
TEXT = "ROMEO:\nWhat light through yonder window breaks?\nIt is"
IDS = TOKENIZER.encode(TEXT)
SHORT = ("--prompt", TEXT, "--max-tokens", 12, "--ignore-eos", "--dtype", "float32")
SEEDED, GREEDY = (*SHORT, "--seed", 3), (*SHORT, "--temperature", 0)
STATISTICS = r"\d+ new tokens after \d+ of the prompt, the first in .* s, then .* tokens/s\n"
# The plain loop, and what goes through the engine: the same tokens, greedily.
PATHS = {
    "plain": (), "speculate": ("--speculate", 3), "draft": ("--draft-checkpoint", DRAFT),
    "both": ("--draft-checkpoint", DRAFT, "--speculate", 2), "samples": ("--n", 2),
}  # fmt: skip


class Result(NamedTuple):
    code: int
    out: str
    err: str
    sequences: tuple[Sequence, ...] = ()  # that were generated
    sampling: str = ""  # the line that says which settings are no defaults; not in err


@pytest.fixture
def cli(capsys, monkeypatch):
    """Run main() and return what it did."""
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
        line = re.search("sampling settings .*\n|$", err)[0]
        return Result(code, out, err.replace(line, "", 1), (*sequences,), line)

    monkeypatch.setattr(generate, "stream", streaming)
    monkeypatch.setattr(command, "stream", streaming)
    return run


@pytest.fixture
def folder(tmp_path):
    """Copy the bundled model, to change it."""
    return shutil.copytree(SHAKESPEARE, tmp_path / "model")


def ids_of(result):
    assert result.code == 0, result.err
    return result.sequences[0].token_ids


def fails(result, pattern="", usage=False):
    """Check an error of use: one line that says what is wrong, exit status 2, and nothing on
    stdout."""
    assert (result.code, result.out) == (2, ""), result
    last = result.err.splitlines()[-1]
    assert re.match(r"generate\.py: error: \S", last) and re.search(pattern, last), result.err
    assert usage or result.err.count("\n") == 1  # argparse puts the usage in front


@cache
def recompute(**params):
    """Return the slow twin's result: no cache, no command line."""
    model = load_model(SHAKESPEARE, "cpu", torch.float32)
    params = SamplingParams(
        **suggested_sampling(SHAKESPEARE) | params, max_tokens=12, ignore_eos=True
    )
    return plain(model, Sequence(IDS, params, model.config, TOKENIZER))


@pytest.mark.parametrize("path", PATHS)
def test_text_and_statistics(path, cli, monkeypatch):
    """Run each path of the command line greedily, with and without --plain, and compare stdout,
    stderr and tokens with the slow twin's. Catches: statistics in a file that the text is
    redirected to; text that stays in a buffer; a path through the engine, or --plain, that gives
    another text or runs the other's code."""
    made, make_fast = [], around.fast.make_fast
    monkeypatch.setattr(around.fast, "make_fast", lambda *a: made.append(a) or make_fast(*a))
    flushed, shows = [], print
    monkeypatch.setattr(
        command, "print", lambda *a, **k: flushed.append("flush" in k) or shows(*a, **k), False
    )
    n = 1 + (path == "samples")
    slow = recompute(temperature=0)
    guessed = (
        r"\d+ of \d+ guesses were accepted\n" if path in ("speculate", "draft", "both") else ""
    )
    for words in ((), ("--plain",)):
        made.clear()
        flushed.clear()
        result = cli(*GREEDY, *PATHS[path], *words)
        assert (result.code, result.out) == (0, "---\n".join([slow.text + "\n"] * n))
        assert re.fullmatch(f"({STATISTICS}){{{n}}}{guessed}", result.err)
        for got in result.sequences:
            assert (got.ids, got.finish_reason) == (slow.ids, "length")
            assert TEXT + got.text == TOKENIZER.decode(got.ids)
        assert bool(made) != bool(words) and sum(flushed) > 3


def test_seeds_and_python(cli, monkeypatch):
    """Generate by seeds on the command line and by LLM in Python, from prompts of every form, and
    compare. Catches: samples that are all the same one, or depend on those before; a seed that
    means another thing alone; Python that samples by defaults where the command line samples as the
    folder suggests; ids taken for three prompts."""
    result = cli(*SEEDED, "--num-samples", 3)
    three = [each.token_ids for each in result.sequences]
    assert three == [ids_of(cli(*SEEDED, "--seed", seed)) for seed in (3, 4, 5)]
    assert result.out == "---\n".join(each.text + "\n" for each in result.sequences)
    assert three[0] == recompute(seed=3).token_ids
    assert three[0] != three[1] != three[2] and result.err.count("\n") == 3
    a, b = cli(*SHORT, "--n", 2, "--temperature", 3).sequences
    assert a.token_ids != b.token_ids
    assert cli("--max-tokens", 1, "--n", 2, "--seed", 2**63 - 1).code == 0  # seeds wrap around
    made = LLM(checkpoint=str(SHAKESPEARE), device="cpu", dtype="float32", num_blocks=32)
    same = {"seed": 3, "max_tokens": 12, "ignore_eos": True}
    for prompts in (TEXT, [TEXT], IDS, [IDS], {"prompt": TEXT}, [{"prompt_token_ids": IDS}]):
        (request,) = made.generate(prompts, **same)
        assert request.outputs[0].text + "\n" == cli(*SEEDED, "--device", "cpu").out
    (other,) = made.generate(TEXT, SamplingParams(**same))
    assert other.outputs[0].text != request.outputs[0].text  # just these
    assert len(made.generate([TEXT, {"prompt": TEXT}, IDS], max_tokens=1)) == 3
    turns = [{"role": "user", "content": TEXT}]
    for chats in (turns, [turns, turns]):
        for request in made.chat(chats, stop="e", seed=1, max_tokens=99):
            (output,) = request.outputs
            assert request.prompt_token_ids == TOKENIZER.encode_chat(turns)
            assert output.params.stop == ("e", *TOKENIZER.chat_stop)
    for wrong in (5, None, {"x": 1}, [5.5], [None], np.array(IDS), [np.array(IDS)]):
        with pytest.raises(ValueError, match=r"^prompts\[0\]: prompt must be"):
            made.generate(wrong)


COMPLETE = """
from vllm import LLM, SamplingParams

texts = ["ROMEO:", "JULIET:", "The king is"]
params = SamplingParams(temperature=0.8, top_p=0.95, seed=1, logprobs=2, prompt_logprobs=0)
outputs = LLM(model=MODEL).generate(texts, params)
for output in outputs:
    print(f"{output.prompt!r} -> {output.outputs[0].text!r}")
"""
CHAT = """
from vllm import LLM, SamplingParams

llm = LLM(model=MODEL, dtype="float32", max_num_seqs=4)
talk = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who is there?"}]
outputs = llm.chat(talk, SamplingParams(temperature=0, max_tokens=9), use_tqdm=False)
outputs += llm.chat([talk] * 3, sampling_params=llm.get_default_sampling_params(), use_tqdm=True)
for output in outputs:
    print(f"{output.prompt!r} -> {output.outputs[0].text!r}")
"""


@pytest.mark.parametrize("script", [COMPLETE, CHAT])
def test_scripts_for_vllm(script, capsys):
    """Run two scripts for vLLM with another import and no other change, and check what they print.
    Catches: a script that fails, or prints what no person can read."""
    names = {"MODEL": str(SHAKESPEARE)}
    exec(script.replace("from vllm import", "from llm import"), names)
    prompts = names.get("texts") or [TOKENIZER.render_chat(names["talk"])] * 4
    shown = capsys.readouterr().out.splitlines()
    for line, prompt, output in zip(shown, prompts, names["outputs"], strict=True):
        (made,) = output.outputs
        assert line == f"{prompt!r} -> {made.text!r}" and made.text
        assert output.prompt_token_ids + made.token_ids == made.ids
        assert repr(prompt) in repr(output) and repr(made.text) in repr(output)
    if script is COMPLETE:
        first, *others = output.prompt_logprobs
        assert first is None and [[*each] for each in others] == [
            [i] for i in made.ids[1 : made.prompt_len]
        ]
        for i, found in zip(made.token_ids, made.logprobs, strict=True):
            assert next(iter(found)) == i and found[i].logprob < 0 and len(found) in (2, 3)


def test_line_ends_and_alphabets(cli, monkeypatch, tmp_path):
    """Give prompts by a flag, a file and stdin, and print on terminals of several encodings; check
    the ids and the bytes. Catches: a file's prompt that differs from the same text as a flag; "-"
    that is not stdin; a missing BOS where there is no prompt; CRLF that became LF; a traceback for
    bytes or terminals that are not UTF-8."""
    (tmp_path / "prompt.txt").write_bytes("caf\u00e9\r\n".encode())
    asked, encode = [], Tokenizer.encode
    monkeypatch.setattr(Tokenizer, "bytes_of", lambda self, token_id: "é你\r\n".encode())
    monkeypatch.setattr(Tokenizer, "encode", lambda *args: asked.append(args[1]) or encode(*args))
    for words, prompt, encoding, shown in (
        ((), "", "utf-8", "é你".encode()),
        (("--prompt", "caf\udce9\r\n"), "caf\udce9\r\n", "latin-1", b"\xe9?"),
        (("--prompt-file", tmp_path / "prompt.txt"), "caf\u00e9\r\n", "ascii", b"??"),
        (("--prompt-file", "-"), "a\r\nb\ufffd\n", "utf-8", "é你".encode()),
    ):
        stdin, raw = io.TextIOWrapper(io.BytesIO(b"a\r\nb\xff\n"), "ascii"), io.BytesIO()
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding))
        (sequence,) = cli(*words, *GREEDY[2:], "--max-tokens", 2, stdin=stdin).sequences
        assert asked.pop() == prompt and raw.getvalue() == (shown + b"\r\n") * 2 + b"\n"
        assert sequence.ids[: sequence.prompt_len] == encode(TOKENIZER, prompt)


def test_closed_streams(cli, monkeypatch):
    """Run with a standard stream closed or broken. Catches: the line of statistics in the text; a
    traceback after `| head`."""

    def broken(text):
        raise BrokenPipeError

    assert cli("--chat", stdin=None).code == 0
    want = cli(*GREEDY).out
    for name, stream in (("err", None), ("out", None), ("out", SimpleNamespace(write=broken))):
        with monkeypatch.context() as patch:
            patch.setattr(sys, f"std{name}", stream)
            result = cli(*GREEDY)
            assert result.code == 0 and "error" not in result.err
            assert name == "out" or result.out == want
            assert name == "err" or sys.stdout is None  # or Python would print an error at exit


@pytest.mark.parametrize("path", ["plain", "speculate"])
def test_flags(path, cli, monkeypatch):
    """Run with each flag for ends, lengths and dtypes, and check the tokens. Catches: only the last
    --stop, or one of --stop-token-ids, that counts; Hugging Face's name for --max-tokens unknown; a
    limit without the prompt, off by one, or refused beyond the trained length; a --dtype or int8
    cache that is ignored."""
    greedy = (*GREEDY, *PATHS[path])
    whole, never = cli(*greedy), "\x00 never"
    text, ids = whole.out, ids_of(whole)
    for stops in ((text[4:7], never), (never, text[4:7])):
        cut = text[: text.index(text[4:7])]
        assert cli(*greedy, "--stop", stops[0], "--stop", stops[1]).out == cut + "\n"
    end = next(i for i in ids if i != ids[0])
    assert ids_of(cli(*greedy, "--stop-token-ids", 0, end)) == ids[: ids.index(end) + 1]
    assert ids_of(cli(*greedy, "--max-new-tokens", 5)) == ids[:5]
    result = cli(*greedy, "--max-seq-len", len(IDS) + 5)
    assert ids_of(result) == ids[:5] and result.err.startswith("the context is full\n")
    for length in (TRAINED, TRAINED + 1):
        result = cli(*PATHS[path], "--max-tokens", 2, "--max-seq-len", length)
        told = f"beyond this model's context of {TRAINED} tokens" in result.err
        assert result.code == 0 and told == (length > TRAINED)
    made = []
    monkeypatch.setattr(begin, "load_model", lambda *a: made.append(load_model(*a)) or made[-1])
    for dtype, kv_dtype in itertools.product((*DTYPES, "auto"), ("auto", "int8")):
        words = ("--dtype", dtype, "--kv-dtype", kv_dtype, "--max-tokens", 3)
        assert len(ids_of(cli(*greedy, *words))) == 3
        want = CONFIG["torch_dtype"] if dtype == "auto" else dtype
        assert {str(each.dtype) for each in made[-1].parameters()} == {f"torch.{want}"}


def test_generation_config(cli, folder, monkeypatch):
    """Check which sampling settings hold: the folder's, a flag's, a chat's or defaults. Catches:
    a checkpoint's own settings ignored, or stronger than the user's flags, or, where they are
    damaged, a traceback or a number that reaches the sampler; nonsense in a small model's chat."""
    file, ours = folder / "generation_config.json", (*SEEDED, "--checkpoint", folder)
    told = "sampling settings in place of the defaults: {'temperature': 0.8, 'top_p': "
    flags = "'seed': 3, 'max_tokens': 12, 'ignore_eos': True}\n"
    assert cli(*ours).sampling == f"{told}0.95, {flags}"
    assert cli(*ours, "--top-p", 0.5).sampling == f"{told}0.5, {flags}"
    file.unlink()
    calm = {"temperature": 0.2, "top_p": 0.9}
    assert cli("--chat", *ours[-2:]).sampling.endswith(f" defaults: {calm}\n")
    assert cli(*ours).sampling.endswith(" defaults: {" + flags)
    file.write_text(json.dumps({"temperature": 5.0, "top_k": 1, "do_sample": True}))
    assert ids_of(cli(*ours)) == ids_of(cli(*GREEDY))
    assert ids_of(cli(*ours, "--top-k", 0)) != ids_of(cli(*GREEDY))
    for damaged in ("{", "[]", '{"top_k": 50.5}', '{"temperature": NaN}', '{"top_p": 0}'):
        file.write_text(damaged)
        name = "".join(re.findall(r"\w+_\w", damaged))
        fails(cli(*ours), rf"generation_config\.json\b.*: .*{name}")


CHAT = ("--chat", "--ignore-eos", "--seed", 1)


@pytest.fixture
def heard(monkeypatch):
    """Record the conversations that the chat template is given."""
    chats, encode_chat = [], Tokenizer.encode_chat

    def listening(self, messages):
        chats.append([dict(message) for message in messages])
        return encode_chat(self, messages)

    monkeypatch.setattr(Tokenizer, "encode_chat", listening)
    return chats


@pytest.mark.parametrize("path", ["plain", "speculate"])
def test_chat(path, cli, heard):
    """Chat over stdin, with empty lines and commands between, and check what the template is given.
    Catches: a second turn that forgets the first, or the reply in it; an empty line, or a command,
    taken for a turn."""
    asked = (*CHAT, "--max-tokens", 6, *PATHS[path])
    result = cli(*asked, stdin="Hello there\n   \n/what\nAnd you?\n/new\nA\n /exit\nB\n")
    assert result.code == 0 and result.err.count("> ") == 7 and result.err.count(command.HELP) == 2
    assert result.err.count("6 new tokens after ") == 3
    first, second, third = (each.text for each in result.sequences)
    said = [(m["role"], m["content"]) for m in heard[1]]
    assert said == [("user", "Hello there"), ("assistant", first), ("user", "And you?")]
    assert heard[2] == [{"role": "user", "content": "A"}]
    assert result.out == f"{first}\n{second}\n{third}\n" and "tokens/s\n> " in result.err
    assert cli(*asked)[:2] == (0, "")  # nothing said: statistics of nothing divide by zero


def test_chat_at_a_full_context(cli, heard):
    """Chat until the context is full, say something too long, and begin anew. Catches: a chat that
    ends with an error; a message too long that takes the others with it; the system's message lost
    in a new chat; a default of 256 tokens that refused --min-tokens 300."""
    turns = "Hello there\n" * 8 + "/new\n" + "what " * 120 + "\nAnd you?\n"
    more = ("--max-tokens", 12, "--max-seq-len", 100, "--system", "Be kind")
    result = cli(*CHAT, *more, stdin=turns)
    errors = re.findall(r"> error: .*\n", result.err)
    assert result.code == 0 and len(errors) + len(result.sequences) == 10 and len(errors) > 2
    assert all(len(s.tokens) == 12 or s.finish_reason == "stop" for s in result.sequences[:-2])
    assert all(re.search(r"has \d+ tokens, context is 100.*/new", error) for error in errors)
    system = {"role": "system", "content": "Be kind"}
    assert all(chat[0] == system for chat in heard)
    assert heard[-1] == [system, {"role": "user", "content": "And you?"}]
    small = ("--checkpoint", DRAFT, "--max-seq-len", 280, "--min-tokens", 300)
    (reply,) = cli(*CHAT, *small, stdin="Hello\n").sequences
    assert len(reply.ids) == 280 and reply.finish_reason == "length"


def test_chat_template(cli, folder, monkeypatch):
    """Chat by the plain template, by a folder's own and by one that raises. Catches: a base model
    that goes on and writes the user's next turn as well; the plain template's stop string, which
    cuts the replies of models that have their own."""
    newline = TOKENIZER.encode("a\n", add_special=False)[-1]
    bias = {"logit_bias": {newline: 100}}  # nothing else is drawn
    monkeypatch.setattr(command, "first_sampling", lambda *_: {**bias})
    chat = ("--chat", "--max-tokens", 5, "--checkpoint", folder)
    result = cli(*chat, stdin="Hello\n")
    assert result.out == "\n" and "> 2 new tokens" in result.err
    (folder / "chat_template.jinja").write_text("{{ messages[-1].content }}")
    assert cli(*chat, stdin="Hello\n").out == "\n" * 6
    (folder / "chat_template.jinja").write_text("{{ raise_exception('no, thanks') }}")
    result = cli(*chat, stdin="Hello\n")
    told = f"{folder.name}, torch.* on cpu\ncache: room for 1,024 tokens; .*\n{command.HELP}\n> "
    assert re.match(told, result.err)
    fails(result._replace(err=result.err.partition("> ")[2]), "chat template: no, thanks")


def test_bad_checkpoints(cli, folder, tmp_path, monkeypatch):
    """Run with a wrong path, an unknown family, missing files and weights of NaN, and check the
    error. Catches: a traceback; "pip install tokenizers" whether it is installed or not; NaN shown
    as a text of the vocabulary's first word. (Only the tokenizer's config may be missing.)"""
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    fails(cli("--checkpoint", tmp_path / "typo"), r"typo: no model folder")
    for flag in ("--checkpoint", "--draft-checkpoint"):
        fails(cli(flag, tmp_path), r"bert.*supported: .*llama")
    (folder / "tokenizer.model").rename(tmp_path / "away")
    fails(cli("--checkpoint", folder), r"tokenizer\.model")
    (tmp_path / "away").rename(folder / "tokenizer.model")
    (folder / "tokenizer_config.json").unlink()
    assert cli("--checkpoint", folder, "--max-tokens", 1).code == 0
    # A text of the first word of the vocabulary, over and over; or a traceback.
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"].fill_(math.nan)
    save_file(weights, folder / "model.safetensors")
    for path in PATHS.values():
        fails(cli("--checkpoint", folder, "--prompt", "a", *path), "NaN")
    (folder / "tokenizer.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    fails(cli("--checkpoint", folder), r"needs: pip install tokenizers")


WRONG = {  # a command line -> what its error names
    "--temperature nan": "temperature", "--top-k -2": "top_k", "--n 129": r"\bn must",
    "--stop-token-ids -1": "stop_token_ids", "--max-seq-len 0": "max_seq_len",
    "--speculate 65": "speculate", "--kv-memory nan": r"kv_memory must be float.*nan",
    "--system kind": "--system needs --chat", "--prompt-file /nowhere.txt": r"/nowhere\.txt",
    "--prompt-file /": "/: .*Is a directory",
}  # fmt: skip
UNREADABLE = ("--prompt a --chat", "--top-k 1.5", "--dtype int8", "--nonsense", "stray")


def out_of_memory(*_, **__):
    raise RuntimeError("DefaultCPUAllocator: not enough memory")


def test_wrong_values(cli, tmp_path, monkeypatch):
    """Run with senseless numbers, unreadable files, missing devices, long prompts and no memory,
    and check that the error names what is wrong. Catches: a number that reaches the kernels; what
    cannot be parsed and ends in a traceback, or is taken for something else, or ignored; a prompt
    cut without a word."""
    for words, message in WRONG.items():
        fails(cli(*words.split()), message)
    for words in UNREADABLE:
        fails(cli(*words.split()), usage=True)
    (tmp_path / "latin-1.txt").write_bytes("caf\u00e9 au lait".encode("latin-1"))
    fails(cli("--prompt-file", tmp_path / "latin-1.txt"), "latin-1.txt: .*utf-8")
    for device, backend in (("cuda", torch.cuda), ("mps", torch.backends.mps)):
        if not backend.is_available():  # torch's own assertion, in place of what to do
            fails(cli("--device", device), rf"{device}.*--device cpu")
    prompt = "what " * TRAINED  # is not cut without a word
    n = len(TOKENIZER.encode(prompt))
    for path in PATHS.values():
        fails(cli("--prompt", prompt, *path), rf"\b{n}\b.*\b{TRAINED}\b")
        fails(cli("--prompt", "a b c d e", "--max-seq-len", 4, *path), r"\b4\b.*--max-seq-len")
        with monkeypatch.context() as patch:
            torch_ = SimpleNamespace(**vars(torch) | {"empty": out_of_memory})
            patch.setattr(kv_cache, "torch", torch_)
            fails(cli("--prompt", "a", "--max-seq-len", 500, *path), "no memory for a cache")
    fails(cli("--kv-memory", 1), "0 blocks fit into --kv-memory")  # which the plain loop ignored
    # A limit of the paged cache, which a single prompt does not need.
    short = cli(*GREEDY, "--num-blocks", 2, "--max-tokens", 100)
    assert short.code == 0 and "the context is full" in short.err


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
    """Press Ctrl-C within a sample, before its first token and while the model loads; check the
    output and the exit status. Catches: Ctrl-C that loses the text, its statistics or status 130; a
    further sample that is begun."""
    want = cli(*SEEDED, "--max-tokens", 5)
    first, second = cli(*SEEDED, "--n", 2, "--max-tokens", 20).out.split("\n---\n")
    stop = next(letter for letter in first if letter not in second)
    result = cli(*SEEDED, "--max-tokens", 20, "--stop", stop, *interrupt(18), "--n", 2)
    assert result.sequences[0].finish_reason == "stop", "the first sample has ended before"
    assert (result.code, "---" in result.out) == (130, False)
    result = cli(*SEEDED, *interrupt(6))
    assert (result.code, result.out) == (130, want.out) and re.fullmatch(STATISTICS, result.err)
    (got,) = result.sequences
    assert (got.finish_reason, got.token_ids) == ("interrupted", ids_of(want))
    assert cli(*SEEDED, *interrupt(1))[:3] == (130, "\n", "")  # statistics of no tokens
    monkeypatch.setattr(begin, "load_model", lambda *_: signal.raise_signal(signal.SIGINT))
    assert cli(*SEEDED)[:3] == (130, "", "")


@pytest.mark.parametrize("path", ["plain", "speculate"])
def test_interrupt_in_chat(path, cli, folder, monkeypatch):
    """Press Ctrl-C while a reply gets a block, and say more. Catches: a chat that ends; a block
    that is lost with each Ctrl-C, or a reply that goes on; turns that are computed again more than
    once."""
    made, engine_of = [], command.open_engine
    taken, take = itertools.count(1), scheduler.BlockPool._take

    def taking(self):
        block = take(self)
        if next(taken) == 3:  # the prompt has one
            signal.raise_signal(signal.SIGINT)
        return block

    monkeypatch.setattr(command, "open_engine", lambda *a: made.append(engine_of(*a)) or made[0])
    monkeypatch.setattr(scheduler.BlockPool, "_take", taking)
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    (folder / "chat_template.jinja").write_text(template)
    words = (*CHAT, "--max-tokens", 40, "--checkpoint", folder, *PATHS[path])
    said = "Hello, my good and gentle cousin"
    result = cli(*words, stdin=f"{said}\nAgain\nAgain\n")
    first, second, third = result.sequences
    assert result.code == 0 and result.out == f"{first.text}\n{second.text}\n{third.text}\n"
    turns = TOKENIZER.encode(f"{said}{first.text}Again", add_special=False)
    assert second.ids[: second.prompt_len] == turns
    assert [each.finish_reason for each in result.sequences] == ["interrupted", "length", "length"]
    assert first.tokens and second.cached == 0 and third.cached > first.prompt_len
    audit(made[0])
    assert len(made[0].pool.available) == made[0].pool.num_blocks


def test_program():
    """Run the program in a process of its own, and check its exit status and what it has imported.
    Catches: a wrong status; torch.compile's machinery imported by a decorator or by initialising
    weights, a second before every first word, which also needs a temporary folder; a technique's
    file imported unasked."""
    code = (
        "import sys, generate; code = generate.main(['--checkpoint', '/nowhere']); "
        "optional = 'torch._dynamo experts quantize around.fast around.structured speculative'; "
        "assert not {*optional.split(), 'tp', 'server'} & {*sys.modules}; sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    fails(Result(done.returncode, done.stdout, done.stderr), "/nowhere")
    code = (
        "import sys, tempfile; tempfile._get_default_tempdir = None; import generate; "
        "code = generate.main(['--max-tokens', '2']); assert 'torch._dynamo' not in sys.modules; "
        "sys.exit(code)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=True)


@pytest.mark.slow
@pytest.mark.parametrize("path", ["plain", "speculate"])
def test_real_ctrl_c_and_pipes(path):
    """Send a real Ctrl-C to the program while it writes, and close its stdout. Catches: Ctrl-C that
    prints a traceback or loses the text; `| head` that ends in a BrokenPipeError."""
    words = (*PATHS[path], "--ignore-eos", "--seed", 1, "--max-tokens", 20_000)
    for ends_it in ("Ctrl-C", "head"):
        process = subprocess.Popen(
            [sys.executable, ROOT / "generate.py", *map(str, words), "--max-seq-len", "21000"],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env=os.environ | {"PYTHONUTF8": "1", "OMP_NUM_THREADS": "1"},
            # A Ctrl-C that works even where the test runs in background.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )  # fmt: skip
        assert process.stdout.read(1)
        if ends_it == "Ctrl-C":
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=120)
            assert process.returncode == 130 and out.endswith(b"\n") and b"new tokens" in err
        else:
            process.stdout.close()
            err = process.stderr.read()
            assert process.wait(timeout=120) == 0
        assert not re.search(rb"Traceback|Exception|BrokenPipe", err)


def test_the_loop():
    """Run generate() with a cache that just fits, and with one a position too short. Catches: a
    write beyond the cache's end; tokens without text; a draft's 0 guesses taken for a default."""
    model = load_model(DRAFT, dtype=torch.float32)
    args = EngineArgs(draft_checkpoint=DRAFT, speculate=0)
    assert begin.load_proposer(args, model.device, model).k == 0  # 0 is no default
    for room in (8, 7):
        cache = kv_cache.StaticCache(model, 1, room)
        sequence = Sequence(
            IDS[:6], SamplingParams(max_tokens=3, ignore_eos=True), model.config, TOKENIZER
        )
        steps = generate.generate(model, sequence, cache)
        tokens = [next(steps), next(steps)]
        assert [token.text for token in tokens] == [t.text for t in sequence.tokens] != ["", ""]
        if room == 8:
            next(steps)
        else:
            with pytest.raises(ValueError, match="has 7 positions, 8 are needed"):
                next(steps)
    for asked in ({"n": 2}, {"prompt_logprobs": 0}, {"structured_outputs": {"regex": "a"}}):
        sequence = Sequence(IDS[:6], SamplingParams(**asked), model.config, TOKENIZER)
        with pytest.raises(ValueError, match="need scheduler"):
            next(generate.generate(model, sequence, cache))
