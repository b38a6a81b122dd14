"""The server: what OpenAI's client gets, what a rude one cannot do, and how it all ends.

The slow twin is generate(), alone.
"""

import contextlib
import gc
import importlib.metadata
import itertools
import json
import math
import os
import re
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import weakref
from bisect import bisect
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import openai
import pytest
import torch
from conftest import ROOT, SHAKESPEARE
from serving import (
    ABORTED,
    CHAT,
    COMPLETIONS,
    HI,
    LONG,
    PROMPT,
    SHORT,
    TOKENIZER,
    Answer,
    Broken,
    Process,
    alone,
    call,
    make_args,
    model,
    parse,
    read,
    receive,
    think_by,
    until,
)

import sampling
import server as server_module
from around.api import Metrics, front, http1, listen_at, metrics, serve, server_args
from around.api.answers import Choice, demand
from around.api.front import Handler
from around.api.function_calls import NO_TOOLS, Reader
from around.machine import Ranks
from around.settings import VERSION, SamplingParams
from scheduler import Engine
from server import Server, parse_args

pytest_plugins = ["serving"]
pytestmark = pytest.mark.usefixtures("one_thread")

# --- OpenAI's client ------------------------------------------------------------------------------

MARKS = {str(i): 60 for i in TOKENIZER.encode("∑😀é", add_special=False)[:-1]}  # bytes
TEXTS = [PROMPT, "", "JULIET:\n"]
IDS = [TOKENIZER.encode(text) for text in TEXTS]
SCORED = [TOKENIZER.encode(text) for text in (PROMPT * 9, "é😀 你好,  two", "")]
SCORED.append(SCORED[1][:4])  # ends within a character
TALK = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Speak,\nspeak."}]
PARTS = [{"type": "text", "text": "Speak,"}, {"type": "text", "text": "speak."}]
COLD = {"temperature": 0, "max_tokens": 40}
ASKED = {  # bodies, all of whose answers generate() gives too
    "greedy": {"temperature": 0}, "defaults": {"seed": 2**63 - 1},
    "all": {"temperature": 0.9, "top_p": 0.95, "top_k": 40, "min_p": 0.02, "seed": -5,
            "repetition_penalty": 1.1, "presence_penalty": 1.5, "frequency_penalty": 0.5,
            "logit_bias": {"20": 5, "981": -100}, "logprobs": 3, "ignore_eos": True},
    "half characters": {"logit_bias": MARKS, "seed": 1, "temperature": 1.5, "logprobs": 0},
    "stop": {"temperature": 0, "stop": ["\n\nROMEO", " it"]},
    "held back": {"temperature": 0, "stop": "it not?\n\nNever", "logprobs": 0, "max_tokens": 12},
    "a token stops": {"temperature": 0, "stop_token_ids": [13]},
    "not yet": {"temperature": 0, "stop_token_ids": [13], "min_tokens": 15},
    "ids": {"prompt": IDS, "max_tokens": 8, "seed": 4},
    "one prompt's ids": {"prompt": IDS[2], "max_tokens": 8, "seed": 4},
    "both, n times": {"prompt": [TEXTS[0], IDS[1]], "n": 3, "seed": 5, "logprobs": 1},
    "more than run at once": {"n": 9, "max_tokens": 4, "seed": 1},
    "echo": {"prompt": ["é∑😀", IDS[0]], "echo": True, "n": 2, "seed": 1, "max_tokens": 8},
    "nothing new": {"prompt": ["a", "b"], "echo": True, "logit_bias": {"13": 100}, "stop": "\n"},
    "marks of turns": {"prompt": "the</s> cat<s>", "echo": True, "temperature": 0, "logprobs": 1},
    "scores": {"prompt": SCORED, "echo": True, "temperature": 0, "logprobs": 2, "max_tokens": 6},
    "scores, n times": {"echo": True, "n": 2, "seed": 1, "logprobs": 0, "max_tokens": 2},
    "chat": {"messages": TALK, "n": 2, "seed": 9, "max_tokens": 40},
    "parts": {"messages": [TALK[0], TALK[1] | {"content": PARTS}], "seed": 9, "logprobs": True,
              "max_tokens": 8},
    "stop, chat": {"messages": HI, "stop": "be", "logprobs": True, "top_logprobs": 2} | COLD,
    "stop, 16": {"messages": HI, "stop": ["be", *(f"{i}never" for i in range(15))]} | COLD,
}  # fmt: skip


def compare(local, **body):
    """Ask whole and streamed, and compare all that comes with generate(), alone."""
    chat = "messages" in body
    wish = {"max_tokens": 16} | body
    wish["logit_bias"] = {int(i): bias for i, bias in body.get("logit_bias", {}).items()}
    echo, prompt = wish.pop("echo", False), wish.pop("prompt", PROMPT)
    if chat:
        prompt = TOKENIZER.encode_chat(HI if wish.pop("messages") is HI else TALK)
        stop = wish.get("stop", [])
        wish["stop"] = [*([stop] if isinstance(stop, str) else stop), "\n\n"][:16]
        wish["logprobs"] = wish.pop("top_logprobs", 0) if wish.pop("logprobs", False) else None
    prompts = prompt if isinstance(prompt, list) and type(prompt[0]) is not int else [prompt]
    twins = [(each, twin) for each in prompts for twin in alone(each, **wish)]
    for streamed in (False, True):
        reply = call(local, streamed, chat, **body)
        ids = [TOKENIZER.encode(each) if isinstance(each, str) else each for each in prompts]
        assert reply.usage["prompt_tokens"] == sum(map(len, ids))
        assert reply.usage["completion_tokens"] == sum(len(twin.tokens) for _, twin in twins)
        for choice, (asked, twin) in zip(reply.choices, twins, strict=True):
            shown = asked if isinstance(asked, str) else TOKENIZER.decode(asked)
            shown = shown if echo else ""
            assert choice[:2] == (shown + twin.text, twin.finish_reason)
            if wish.get("logprobs") is None:
                assert choice.logprobs is None
            elif chat:
                check_content(choice.logprobs["content"], twin)
            else:
                check_scores(choice.logprobs, twin, shown, echo)
                assert "stop" in body or "".join(choice.logprobs["tokens"]) == choice.text
    return reply


def near(value):
    return pytest.approx(value, abs=1e-4)


def check_scores(found, twin, shown, echo):
    """Check the four lists of a completion. An echoed prompt's tokens stand in front, and the first
    of them has no value."""
    prompt = twin.ids[: twin.prompt_len] if echo else []
    n, texts = len(prompt), found["tokens"]
    assert "".join(texts[:n]) == shown and texts[n:] == [token.text for token in twin.tokens]
    assert found["text_offset"] == [*itertools.accumulate(map(len, texts), initial=0)][:-1]
    values = [token.logprob for token in twin.tokens]
    if prompt:
        lines = model()(torch.tensor([prompt]), torch.arange(n)[None])[0].log_softmax(-1)
        values = [None, *(line[i].item() for line, i in zip(lines, prompt[1:])), *values]
        assert found["top_logprobs"][0] is None and all(found["top_logprobs"][1:n])
    assert found["token_logprobs"] == [value and near(value) for value in values]
    for top, token in zip(found["top_logprobs"][n:], twin.tokens, strict=True):
        words = [(TOKENIZER.bytes_of(i).decode(), value) for i, value in token.top]
        assert top == near(dict(words) | {token.text: token.logprob})


def check_content(found, twin):
    """Check the list of a chat."""
    for entry, token in zip(found, twin.tokens, strict=True):
        assert entry["token"] == bytes(entry["bytes"]).decode() == token.text
        assert entry["logprob"] == near(token.logprob)
        top = [(each["token"], each["logprob"]) for each in entry["top_logprobs"]]
        assert top == [(TOKENIZER.bytes_of(i).decode(), near(p)) for i, p in token.top]


@pytest.mark.parametrize("name", ASKED)
def test_answers_are_those_of_generate(local, name):
    """Ask each of ASKED whole and streamed, and compare text, ends, usage and log-probabilities
    with generate(). Catches: a setting that got lost; a stream without a piece; choices in another
    order; a prompt that came twice; the log-probability of another token; a template's stop string
    in place of the user's."""
    reply = compare(local, **ASKED[name])
    texts = [choice.text for choice in reply.choices]
    if name == "half characters":  # or this row compares nothing
        assert "\ufffd" in texts[0] or "😀" in texts[0]
    if name == "scores":  # now some of it is in the prefix cache
        compare(local, **ASKED[name])
    assert name != "nothing new" or texts == ["a", "b"]
    assert "stop" not in name or reply.choices[0].reason == "stop"


def test_what_generate_does_not_tell(local):
    """Ask for n outputs without a seed, and for BOS and special tokens as text or as a stop string.
    Catches: n outputs with the same seed; BOS shown; a stop string such as <|im_end|> that never
    matched."""
    assert len({choice.text for choice in call(local, True, n=4, max_tokens=12).choices}) > 1
    body = {"logit_bias": {str(TOKENIZER.bos_id): 100}, "max_tokens": 5}
    for stop, end in (("<s>", ("", "stop")), ("x", ("", "length"))):
        assert call(local, True, stop=[stop], **body).choices[0][:2] == end
    text = "the</s> cat<s>"
    ids = TOKENIZER.encode(text, add_special=False)  # there is no BOS to leave out
    assert call(local, True, prompt=ids, echo=True, **body).choices[0].text.strip() == text


def test_lengths(local, monkeypatch):
    """Ask with many lengths of prompt and of max_tokens, in a context of 64. Catches:
    max_completion_tokens ignored; defaults that are not OpenAI's; a prompt cut without an error; an
    error without the length that is allowed."""
    monkeypatch.setattr(local.engine, "max_seq_len", 64)
    both = {"max_tokens": 9, "max_completion_tokens": 3}
    long = [{"role": "user", "content": "no " * 70}]
    for body, num_new, *length in (  # or the prompt's length, where it is too long
        ({"prompt": "a"}, 16), ({"prompt": [5] * 60}, 4), ({"prompt": "a"} | both, 3),
        ({"messages": HI}, 64 - 17), ({"messages": HI, "max_tokens": 3}, 3),
        ({"messages": HI} | both, 3), ({"prompt": [5] * 64}, 0, 64),
        ({"prompt": [5] * 49, "max_tokens": 16}, 0, 49), ({"prompt": [[5], [5] * 64]}, 0, 64),
        ({"messages": long}, 0, ""), ({"messages": HI, "max_completion_tokens": 64}, 0, 17),
    ):  # fmt: skip
        if num_new:
            body |= {"ignore_eos": True, "logit_bias": {"20": 100}}
            reply = call(local, num_new > 3, "messages" in body, **body)
            found = reply.choices[0].reason, reply.usage["completion_tokens"]
            assert found == ("length", num_new), body
        else:
            path, field = (CHAT, "messages") if "messages" in body else (COMPLETIONS, "prompt")
            message = local.post(path, body).fails(400, field, "context_length_exceeded")
            assert message.startswith("This model's maximum context length is 64 tokens.")
            assert f"{length[0]} of them" in message, body


def test_what_else_a_client_sees(local, capfd, monkeypatch):
    """List the models, run the examples of docs/serving.md, and stream to 64 clients at once.
    Catches: a model that cannot be found; a header missing from docs/serving.md; streams of several
    clients that got each other's text, as the sixty-fifth file descriptor was one too many."""
    (listed,) = local.client.models.list().data
    for name in ("shakespeare", "an org/モデル"):
        monkeypatch.setattr(local.server.api, "name", name)
        assert local.client.models.retrieve(name) == listed
    monkeypatch.undo()
    local.get("/v1/models/other").fails(404)
    assert (listed.id, listed.object, listed.owned_by) == ("shakespeare", "model", "kilolm")
    assert abs(listed.created - time.time()) < 600 and listed.max_model_len == 1024
    text = (ROOT / "docs" / "serving.md").read_text().replace(":8000", f":{local.port}")
    (curl,) = re.findall(r"^curl .*", text, re.MULTILINE)
    answer = subprocess.run(curl, shell=True, capture_output=True, text=True, timeout=120)
    assert json.loads(answer.stdout)["choices"][0]["message"]["content"]
    capfd.readouterr()
    exec(re.search(r"```python\n(.*?)```", text, re.DOTALL)[1], {})
    assert capfd.readouterr().out
    with ThreadPoolExecutor(64) as pool:
        one = lambda seed: call(local, True, seed=seed, max_tokens=8).choices[0].text  # noqa: E731
        texts = [*pool.map(one, range(64))]
    assert [texts[i] for i in (0, 63)] == [alone(seed=i, max_tokens=8)[0].text for i in (0, 63)]


def test_openais_errors(local, monkeypatch):
    """Make each error of OpenAI's API happen, through its client. Catches: a general error raised
    instead of the one that a program can catch."""
    for error, status, patch, fields in (
        (openai.BadRequestError, 400, {}, {"temperature": -1}),
        (openai.NotFoundError, 404, {}, {"model": "gpt-4"}),
        # Not a broken connection: the answer comes before the whole body has been sent.
        (openai.APIStatusError, 413, {}, {"prompt": "a" * 5_000_000}),
        (openai.RateLimitError, 429, {"max_queue": 0}, {}),
        (openai.AuthenticationError, 401, {"api_key": "secret"}, {}),
    ):
        monkeypatch.setattr(local.server, "args", make_args("--max-body", "200000", **patch))
        others = range(8 if status == 429 else 0)  # as many as may run at once
        local.server.busy.update(others)
        with pytest.raises(error) as caught:
            local.client.completions.create(**{"model": "shakespeare", "prompt": ""} | fields)
        local.server.busy.difference_update(others)
        assert caught.value.status_code == status
    assert local.openai(key="secret").models.list().data


def test_chunks(local):
    """Read the chunks of streams, also while tokens come, and of tokens that are bytes. Catches: a
    usage that nobody asked for; a token that came between the reading of the others and the count
    of them, and was never sent; a thought that came in between, and was sent behind its answer;
    bytes that are no characters, all under one entry."""
    for options in ({}, {"include_usage": None, "continuous_usage_stats": None}, {"new": 1}):
        body = SHORT | {"stream": True, "stream_options": options}
        *chunks, done = local.post(COMPLETIONS, body).events
        assert done == "[DONE]" and not any("usage" in chunk for chunk in chunks)

    class Growing(list):
        """A list in which one more comes whenever it is read, as from the engine's thread."""

        def __getitem__(self, at):
            part = super().__getitem__(at)
            if len(self) < 9:
                self.append(sampling.Token(len(self), -1.0, (), f"{len(self)} "))
            return part

    class Thinking:
        """A sequence whose thought, and then its text, have come when either has been read."""

        params, finish_reason = SamplingParams(logprobs=0), None
        tokens = Growing([sampling.Token(0, -1.0, (), "0 ")])
        reads = itertools.count()
        stream = property(lambda self: SimpleNamespace(thought="Hm" * (next(self.reads) > 0)))
        text = property(lambda self: "Yes" * (next(self.reads) > 0))

    choice = Choice(0, Thinking(), "delta", TOKENIZER, False, Reader(NO_TOOLS))
    parts = [part for part in (choice.take_new() for _ in range(12)) if part]
    found = [each["token"] for part in parts for each in part["logprobs"]["content"]]
    assert found == [f"{i} " for i in range(9)]
    deltas = [part["delta"] for part in parts]
    assert [delta.get("reasoning_content", "") for delta in deltas[:2]] == ["Hm", ""]
    assert [delta["content"] for delta in deltas[:2]] == ["", "Yes"]
    choice.key = "text"
    # The ids from 3 on are bytes. Those that are no characters were one entry, \ufffd.
    token = sampling.Token(
        3 + 0xE3, -1.0, ((3 + 0xE3, -1.0), (3 + 0x81, -2.0), (3 + 0x82, -3.0)), ""
    )
    (found,) = choice.logprobs([token])["top_logprobs"]
    assert found == {"": -1.0, r"\x81": -2.0, r"\x82": -3.0}


def test_structures(local, monkeypatch):
    """Ask for each form of structured output, whole and streamed, by chat and completion, and match
    the text. Catches: a chat's form ignored; its stop string that cuts the answer off; vLLM's field
    on one path alone."""
    schema = {"type": "object", "properties": {"age": {"enum": [12, 34]}}, "required": ["age"]}
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": schema}}
    json_object = {"type": "json_object", "schema": {"enum": ["yes"]}}  # llama.cpp's
    for chat, reason, text, more in (
        (True, "stop", r'{\s*"age"\s*:\s*(12|34)\s*}', {"response_format": form, "n": 2}),
        (True, "length", r"{\s.*", {"response_format": form, "max_tokens": 2}),
        (True, "stop", r"\s*{.*}", {"response_format": {"type": "json_object"}}),
        (True, "stop", '"yes"', {"response_format": json_object}),
        (True, "stop", "a\n\nb", {"structured_outputs": {"choice": ["a\n\nb"]}}),
        (False, "stop", "yes|no", {"structured_outputs": {"choice": ["yes", "no"]}}),
    ):
        for streamed in (False, True):
            reply = call(local, streamed, chat, **{"max_tokens": 60, "seed": 1} | more)
            for choice in reply.choices:
                assert choice.reason == reason, more
                assert re.fullmatch(text, choice.text, re.DOTALL), (text, choice)
    monkeypatch.setitem(sys.modules, "llguidance", None)
    body = {"messages": HI, "response_format": {"type": "json_object"}}
    assert "llguidance" in local.post(CHAT, body).fails(400, "structured_outputs")


# --- Chats ----------------------------------------------------------------------------------------


def test_options_of_the_template(local, monkeypatch):
    """Send options and messages to a template that prints what it is given, and check the prompt.
    Catches: Qwen3's enable_thinking that did not reach the template; an answer that the user had
    begun, begun again; a call's arguments, a string as OpenAI has it, encoded again."""
    template = "{% for m in messages %}{{ m.role }}:{{ m.content }}{{ m.tool_calls }};{% endfor %}"
    template += "{% if add_generation_prompt %}{{ enable_thinking or 'say' }}{% endif %}"
    monkeypatch.setattr(local.engine.tokenizer, "template", template)
    prepare, seen = local.engine.prepare, []
    watch = lambda ids, *args, **more: seen.append(ids) or prepare(ids, *args, **more)  # noqa: E731
    monkeypatch.setattr(local.engine, "prepare", watch)
    begun, on = {"role": "assistant", "content": "Well "}, {"continue_final_message": True}
    rows = [
        ([], {}, "say"), ([], {"chat_template_kwargs": {"enable_thinking": "think"}}, "think"),
        ([], {"add_generation_prompt": False}, ""), ([begun], on, "assistant:Well "),
        ([begun], on | {"add_generation_prompt": False}, "assistant:Well "),
        ([], {"chat_template_kwargs": {"messages": [], "goes_on": 1, "self": 0}}, "say"),
    ]  # fmt: skip
    parts = [{"type": "text", "text": each} for each in ("a", "b")]
    rows.append(([{"role": "user", "content": parts}], {}, "user:a\nb;say"))
    for arguments, shown in (('{"a": "b"}', "{'a': 'b'}"), ({"a": 1}, "{'a': 1}"), ("", "{}")):
        called = {"role": "assistant", "tool_calls": [{"function": {"arguments": arguments}}]}
        rows.append(([called], {}, f"assistant:[{{'function': {{'arguments': {shown}}}}}];say"))
    for more, options, text in rows:
        body = {"messages": [*HI, *more], "max_tokens": 1, **options}
        assert local.post(CHAT, body).status == 200
        assert TOKENIZER.decode(seen.pop()) == "user:hi;" + text


THOUGHTS = [  # before the reply, the reply, what of it was thought, what is said
    ("", "<think>\nHm, so.\n</think>\n\nYes. <b>", "\nHm, so.\n", "\n\nYes. <b>"),
    ("<think>\n", "Hm < 5</think>Yes.", "Hm < 5", "Yes."), ("<think>\n", "Hm ...", "Hm ...", ""),
    ("<think>\n\n</think>\n\n", "Yes.", "", "Yes."),
    ("", "  Yes <think>no</think>", "", "  Yes <think>no</think>"),
    ("", "\n<think>Hm</think>Yes", "Hm", "Yes"), ("", " ", "", " "),
    # What follows are stop strings. White space behind a thought is none, nor is a mark or its end.
    ("<think>", "\nHm.\n</think>\n\nYes.\nNo.", "\nHm.\n", "\n\nYes.", "\n", "\n\n"),
    ("", "<think></think>\nYes.\nNo.", "", "\nYes.", "\n"),
    ("<think>\n", "</think>\n\nYes.\n\nNo.", "", "\n\nYes.", "\n\n"),
    ("", "<think>No.</think>Yes. No.", "No.", "Yes. ", "No", "think", ">Y"),
    ("", "Yes <think>no</think>No.", "", "Yes <think>no", "</think>"),
    ("", "\n\nYes.\nNo.", "", "\n\nYes.", "\n"),
]  # fmt: skip


def test_thoughts(local, monkeypatch):
    """Chat with models that think, and check what is thought and what is said. Catches: an answer
    that contained its thought; structured output taken for a thought, because the template had
    begun one; a plain model's answer with "<think>" in it taken for one; a stop string lost behind
    a thought, or found within one."""
    tokenizer, fields = local.engine.tokenizer, {"messages": HI, "ignore_eos": True, "n": 2}
    encode = tokenizer.encode
    for ids in (encode("<think></think>"), [0], [35, 0]):  # unknown characters may be one token
        monkeypatch.setattr(
            tokenizer,
            "encode",
            lambda text, *_, ids=ids, **more: ids if "THINK" in text else encode(text, *_, **more),
        )
        plain = local.server.api.prepare(fields, True)
        assert not any(choice.seq.stream.marks for choice in plain.choices)
    monkeypatch.undo()
    ids_of = think_by(monkeypatch, tokenizer, "<think>", "</think>")
    think_by(monkeypatch, tokenizer, "[THINK]", "[/THINK]", 7)  # the first pair counts
    monkeypatch.setattr(tokenizer, "chat_stop", ())

    def messages(key="message", **more):
        """Return the parts of the second output."""
        answer = local.post(CHAT, fields | more)
        parts = [json.loads(event) for event in answer.events[:-1]] or [answer.json]
        choices = [choice for part in parts for choice in part["choices"]]
        return [choice[key] for choice in choices if choice["index"] == 1]

    # A message that goes on within a thought, or in its text, where white space can be a stop
    # string again; and a mark that the user has written.
    part = {"type": "text", "text": "<think>Hm"}
    begins = ("<think>\nI first", True), ([part], True), ("<think>a</think>b", False), ("a", False)
    for text, thinks in begins:
        chat = [{"role": "user", "content": "<think>"}, {"role": "assistant", "content": text}]
        body = {"messages": chat, "continue_final_message": True}
        completion = local.server.api.prepare(body, True)
        assert all(c.seq.stream.marks == [6, -1] * thinks for c in completion.choices), text
    for before, made, thought, said, *more in THOUGHTS:
        more = {"stop": more}
        # What follows keeps the line break at its end.
        template = "{{ messages[0].content }}" + before + "{{ '' }}"
        monkeypatch.setattr(tokenizer, "template", template)
        ids = ids_of(made)
        fields["max_tokens"] = len(ids)
        reply = lambda _, seqs, ids=ids: [[sampling.Token(ids[len(seq.tokens)])] for seq in seqs]  # noqa: E731
        with monkeypatch.context() as patch:
            patch.setattr(local.engine.proposer, "verify", reply)
            for parts in (messages(**more), messages("delta", stream=True, **more)):
                found = ["".join(part.get(name, "") for part in parts)
                         for name in ("reasoning_content", "content", "role")]  # fmt: skip
                assert found == [thought, said, "assistant"]
    monkeypatch.setattr(tokenizer, "template", "{{ messages[0].content }}<think>")
    assert messages()[0]["reasoning_content"]
    monkeypatch.setattr(tokenizer, "template", "{{ messages[0].content }}")
    mentioned = [{"role": "user", "content": "<think>Hm, "}]
    assert "reasoning_content" not in messages(messages=mentioned, max_tokens=9)[0]
    monkeypatch.setattr(tokenizer, "template", "{{ messages[0].content }}<think>")
    (chosen,) = messages(structured_outputs={"choice": ["yes", "no"]}, ignore_eos=False)
    assert chosen["content"] in ("yes", "no") and "reasoning_content" not in chosen


# --- Bodies that are wrong ------------------------------------------------------------------------

TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
DEEP = {"a": 1}
for _ in range(900):  # it can just be parsed, but not printed
    DEEP = {"a": DEEP}
OUT = "not supported; leave it out"
# A field, and values for which the error must name it, some with what it must say. The ranges of
# the values are the subject of test_sampling.py and test_structured.py.
WRONG = {
    "temperature": ("x" * 100_000, True, 10**400), "n": (1.0, 129), "max_tokens": (0, False),
    "stop": ((5, "must be str | list | tuple"), "x" * 257, DEEP), "stop_token_ids": ([1024],),
    "priority": ("1",), "cache_salt": (1,),
    "logit_bias": (
        [], ({"20": 1, "7": 101}, r"^logit_bias\[7\] must be "), {"1": DEEP},
        # 01024 was called 1024.
        *(({"7": 1, key: 1}, key[:9]) for key in ("x1", "01024", "-1", "07", "\u0663", "1" * 5000)),
        ({str(2000 + i): 1 for i in range(500)}, "2003"),
    ),
    "stream": (1,), "stream_options": (1,), "reasoning_format": (("none", "supported: auto"),),
    "chat_template_kwargs": (5,), "add_generation_prompt": (1,),
    "continue_final_message": (1,), "parallel_tool_calls": (1,),
    "response_format": ({"type": "xml"}, {"type": "json_schema"}, "json", {}),
    "structured_outputs": ({"regex": "(["}, "a"),
    **dict.fromkeys(("audio", "grammar", "json_schema", "n_predict", "prompt_logprobs", "documents",
                     "chat_template", "allowed_token_ids", "guided_json", "guided_regex",
                     "guided_choice", "guided_grammar"), (("x", OUT),)),
    "functions": ([TOOL["function"]],), "suffix": (("x", OUT),), "bad_words": (["x"],),
    "modalities": ((["audio"], r"supported: \['text'\]"),), "best_of": ((2, "supported: 1"),),
    "use_beam_search": ((True, "supported: False"),), "return_token_ids": (True,),
    "skip_special_tokens": ((False, "supported: True"),), "include_stop_str_in_output": (True,),
}  # fmt: skip
WRONG_PROMPT = WRONG | {
    "prompt": ((5, "must be str | list, is 5"), {}, [], [[]], [None], [1, "a"], [True], [["a"]],
               [[1], 2], [[1], [1024]]),
    "echo": (1,), "logprobs": (21, True), "add_special_tokens": (1,), "tool_choice": ("required",),
}  # fmt: skip
USER, CALLS = {"role": "user", "content": 5}, ({"function": {"arguments": "{"}}, "f", {})
IMAGE = [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "x"}}]
WRONG_CHAT = WRONG | {
    "messages": ("hi", {}, ([], "at least one message"), (None, "at least one message")),
    "messages[0]": ([5], [[]], [{}], [{"content": "a"}], [USER], [{"role": 5, "content": "a"}],
                    *([USER | {"content": each}] for each in ({}, ["a"], [{"type": "text"}]))),
    "messages[1]": ([*HI, USER], ([*HI, USER | {"content": IMAGE}], "'image_url' is not supp"),
                    *([*HI, {"role": "assistant", "tool_calls": [each]}] for each in CALLS)),
    "logprobs": (1,), "top_logprobs": ((3, "logprobs: true"),), "echo": (True,),
    "add_special_tokens": (1,), "tools": ([TOOL],), "tool_choice": ("required",),
}  # fmt: skip
TOGETHER = [  # bodies, and the field that excludes another one
    ({"prompt": ["a"] * 17, "n": 128}, "n", "2048"), ({"prompt": ["a"] * 2049}, "n", "2048"),
    # Behind another name, an error has the engine's.
    ({"messages": HI, "logprobs": True, "top_logprobs": 21}, "logprobs", "20"),
    ({"prompt": "a", "max_completion_tokens": 0}, "max_tokens", "max_tokens must be int"),
    ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
     "structured_outputs", "structured_outputs excludes response_format"),
    ({"stream": True, "stream_options": {"include_usage": 5}}, "stream_options", "bool"),
    ({"stream_options": {"continuous_usage_stats": True}}, "continuous_usage_stats", "False"),
]  # fmt: skip


def test_wrong_fields(local):
    """Send each wrong value of each field, and check the error. Catches: a 500, or a silent
    default; an error that names another field, says "supported: None", or repeats a value of
    100,000 characters."""
    rows = [
        ({**start, "max_tokens": 2, field.partition("[")[0]: value}, field, words)
        for start, table in (({"prompt": "a"}, WRONG_PROMPT), ({"messages": HI}, WRONG_CHAT))
        for field, values in table.items()
        for value, words in (each if isinstance(each, tuple) else (each, "") for each in values)
    ]
    for body, field, words in rows + TOGETHER:
        message = local.post(CHAT if "messages" in body else COMPLETIONS, body).fails(400, field)
        assert re.search(words, message) and len(message) < 300, (field, message)


NOTHING = [
    {"tools": [TOOL], "tool_choice": "none"}, {"tools": []}, {"skip_special_tokens": True},
    {"functions": []}, {"suffix": ""}, {"stream_options": {"include_usage": True}},
    {"modalities": ["text"]}, {"best_of": 1}, {"user": "x", "metadata": {}, "store": True},
    {"service_tier": "auto", "use_beam_search": False, "new": {"bar": [1, None]}},
    dict.fromkeys((*WRONG, "model", "echo", "logprobs", "tools", "top_logprobs")),
]  # fmt: skip


def test_what_changes_nothing(local):
    """Send fields that must change nothing, and compare the answers with the plain one. Catches:
    errors for clients that send all fields, with null for those that are not set, a new one, or one
    whose value is what this server does anyway."""
    for path, body in ((COMPLETIONS, {"prompt": PROMPT}), (CHAT, {"messages": HI})):
        body |= {"max_tokens": 2, "temperature": 0}
        plain = local.post(path, body).json["choices"]
        for more in NOTHING:
            assert local.post(path, {**more, **body}).json["choices"] == plain, more
    assert local.post(CHAT, body | {"add_special_tokens": False, "top_logprobs": 0}).status == 200
    for path, body in ((COMPLETIONS, {"prompt": PROMPT}), (CHAT, {"messages": HI})):
        body["max_tokens"] = 1
        first, bare = (
            local.post(path, body | {"add_special_tokens": each}).json["usage"]["prompt_tokens"]
            for each in (True, False)
        )
        assert first == bare + 1
    assert local.post(COMPLETIONS, {"prompt": ["a"] * 2, "n": 128, "max_tokens": 1}).status == 200


def test_not_json(local):
    """Send bodies that are no JSON, or hold NaN, infinities, deep nesting or odd characters.
    Catches: a parser's exception that became a 500; NaN or 1e999 taken for a temperature; a 500 for
    a lone surrogate, a NUL or a special token in the text."""
    many = 30_000
    for data in (
        b"", b'{"n": 1', b"[]", b"null", b'{"temperature": NaN}', b'{"prompt": "\xff"}', b"{}{}",
        b'{"logit_bias": {"1": -Infinity}}', b"{'prompt': 'a'}", b"[" * many, b'{"a":' * many,
        b'{"n": ' + b"1" * 5000 + b"}", b'{"n": ' + b"[" * many + b"]" * many + b"}",
    ):  # fmt: skip
        local.post(COMPLETIONS, data).fails(400)
    local.post(COMPLETIONS, b'{"temperature": -1e999}').fails(400, "temperature")
    for text in ("\ud800", "\0", "\u202e", "</s>", "😀" * 50, "\r\n\r\n"):
        for path, body in (
            (COMPLETIONS, {"prompt": text, "stop": text, "max_tokens": 2, "echo": True}),
            (CHAT, {"messages": [{"role": text, "content": text}], "max_tokens": 2}),
        ):
            assert local.post(path, body).status == 200
        local.post(COMPLETIONS, {"model": text}).fails(404, "model", "model_not_found")


# --- HTTP -----------------------------------------------------------------------------------------

CHUNKED = "Transfer-Encoding: chunked\r\n"
GET = b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n"
JSON, PLAIN = b"application/json", b"text/plain"


def post(body=SHORT, head="", path=COMPLETIONS):
    """Return a request's bytes."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    if "gth:" not in head and "ing:" not in head:
        head += f"Content-Length: {len(data)}\r\n"
    start = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{start}{head}\r\n".encode() + data


def old(data):
    return data.replace(b"HTTP/1.1", b"HTTP/1.0")


STREAM, EXPECT = SHORT | {"stream": True}, "Expect: 100-continue\r\n"
DATA = json.dumps(SHORT).encode()
CHUNKS = b"".join(b"%X\r\n%s\r\n" % (len(each), each) for each in (DATA[:1], DATA[1:], b""))
EXTENDED = re.sub(rb"(?m)^([0-9A-F]+)\r", rb'\1 ;name="a b"\r', CHUNKS)  # each chunk
ROOM = 200_000 - len(json.dumps({"user": ""} | SHORT))  # --max-body
RAW = {  # the status of the only answer -> what is sent; 0: any status below 500
    200: (
        GET.replace(b"Host", b"a: b\r\n" * 90 + b"Host"), GET.replace(b"version", b"version?a=b"),
        GET.replace(b"Host", b"a: " + b"b" * 60_000 + b"\r\nHost"),
        GET.replace(b"/version", b"http://a.test:80/version"),  # as to a proxy
        GET.replace(b"Host: localhost\r\n", b""), post().replace(b"Content-", b"cONTENT-"),
        *(post().replace(JSON, kind) for kind in (JSON + b"; charset=utf-8", JSON.upper())),
        *(post(CHUNKS, head)
          for head in (CHUNKED, CHUNKED.lower(), CHUNKED.replace("\r", " \r"))),
        post(EXTENDED, CHUNKED),
        old(post()), old(post(STREAM)), post(STREAM), post({"user": "a" * ROOM} | SHORT),
        post(head=EXPECT), old(post(head=EXPECT)),
        # Any web page can post a text to this server, and the text was executed as a request.
        post(GET, path="/version").replace(b"POST", b"GET").replace(JSON, PLAIN),
        GET[:-2] + f"{CHUNKED}\r\n23\r\n".encode() + GET + b"\r\n0\r\n\r\n",
    ),
    400: (
        b"\x00\xff\x16\x03\x01\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS
        b"\r\n", b"PRI * HTTP/2\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 200 + b"\r\n",
        *(post(data, EXPECT + CHUNKED) for data in (
            b"\r\n\r\n", b"-1\r\n{}\r\n0\r\n\r\n", b"0\r\n\r\n", b"1\r\n{}\r\n0\r\n\r\n")),
    ),
    404: tuple(post(GET, path=path).replace(JSON, PLAIN) for path in ("/nothing", "/version")),
    411: tuple(post(b"", f"{head}\r\n") for head in (
        "Transfer-Encoding: gzip, chunked", "Content-Length:", "Content-Length: -5",
        "Content-Length: \xb2", f"Content-Length: {'9' * 5000}")),
    413: (
        post({"user": "a" * (ROOM + 1)} | SHORT), post(b"%x\r\n" % 2**31, CHUNKED),
        post(b"", f"{EXPECT}Content-Length: 999999999\r\n"),
        post(b"1ffff\r\n" + b" " * 0x1ffff + b"\r\n1ffff\r\n", CHUNKED),
    ),
    415: (post().replace(b"Content-Type: application/json\r\n", b""), post().replace(JSON, PLAIN)),
    431: (
        b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n",
        # By http.server's own limits, 6 MB of such headers kept it busy for seven seconds.
        b"GET / HTTP/1.1\r\n" + (b"a: " + b"\rb:" * 5000 + b"\r\n") * 90,
    ),
    0: (  # what HTTP forbids, and http.server reads in one way or another
        *(b"GET /version" + rest + b"\r\n\r\n" for rest in (
            b"", b" HTTP/1.2", b"\0 HTTP/1.1", b"?\xff HTTP/1.1", b" HTTP/1.1\r\na: b\n\nb: c",
            b" HTTP/1.1\r\nHost: a\r\nHost: b", b" HTTP/1.1\r\nX-A: a\r\n b: c\rd: \0")),
        *(post(b"0\r\n\r\n", head) for head in (
            "Content-Length: 5\r\nContent-Length: 2\r\n", f"Content-Length: 5\r\n{CHUNKED}")),
    ),
}  # fmt: skip


def num_served():
    """Return how many clients have a thread."""
    return sum("(Handler)" in thread.name for thread in threading.enumerate())


def logged(capfd, count):
    """Wait for so many new lines of the log, and return them. A line comes after its answer, from
    the client's thread, so the threads' end is waited for, too."""
    lines = []

    def is_all():
        lines.extend(capfd.readouterr().err.splitlines())
        return len(lines) >= count and not num_served()

    until(is_all)
    lines.extend(capfd.readouterr().err.splitlines())
    return lines


def connect(local, data, buffer=None):
    """Send a request's bytes, or some of them. buffer: how much of an answer waits to be read."""
    connection = socket.socket()
    connection.settimeout(60)
    if buffer:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    connection.connect(("127.0.0.1", local.port))
    connection.sendall(data)
    return connection


def said(answer):
    """Return the text of a completion, whole or streamed."""
    assert not answer.events or answer.events[-1] == "[DONE]"
    parts = [json.loads(event) for event in answer.events[:-1]] or [answer.json]
    return "".join(part["choices"][0]["text"] for part in parts)


@pytest.mark.parametrize("status", RAW)
def test_raw_requests(local, capfd, status):
    """Send raw bytes, well-formed or not, with a request behind them, and check the one answer.
    Catches: a server that hangs, prints a traceback, reads what follows as another request, or
    refuses what real clients send; a 400, chunks or an interim answer for nginx, which speaks
    HTTP/1.0."""
    logged(capfd, 0)
    for i, data in enumerate(RAW[status]):
        *interim, answer = local.raw(data + GET)  # and it closes, though the client would not
        has_interim = b"Expect" in data and b"HTTP/1.1\r\nHost" in data
        assert [each.status for each in interim] == [100] * has_interim
        assert answer.status == status or (answer.status < 500 and not status), (i, answer)
        assert answer.headers["Connection"] == "close" and answer.headers["X-Accel-Buffering"]
        assert "Transfer-Encoding" not in answer.headers
        assert len(logged(capfd, 1)) == 1
        if status > 200:
            answer.fails(status)
        elif status and COMPLETIONS.encode() in data:
            assert said(answer) == alone(**SHORT)[0].text, i


def test_paths(local, monkeypatch, tmp_path):
    """Ask for right and wrong paths by each method, and check status, headers and the page.
    Catches: a 500 for a wrong path or method; a page with a model's text that could load another
    host's script, or be shown in another's frame."""
    for path in ("/v1", "/v1/completions/", "/../etc/passwd", "/page.html", "/v1/responses"):
        local.get(path).fails(404)
    message = local.post("/chat/completions", {"messages": HI}).fails(404)
    assert "/v1/chat/completions" in message  # a base URL without /v1
    for method in ("GET", "PUT", "DELETE", "OPTIONS", "TRACE"):
        assert "POST" in local.send(method, CHAT).fails(404)
    for path in ("/", "/health", "/metrics", "/engine", "/v1/models", "/nothing", COMPLETIONS):
        head = local.get(path)
        assert local.send("HEAD", path).status == 404
        assert head.status == (404 if path in ("/nothing", COMPLETIONS) else 200)
        assert head.headers["X-Content-Type-Options"] == "nosniff"
        found = head.headers["X-Frame-Options"], head.headers["Cache-Control"]
        assert found == ("DENY", "no-store")
    page = local.get("/")
    text = page.data.decode()
    assert text == (ROOT / "around/api/page.html").read_text()
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)[1]
    assert {"default-src 'none'", "connect-src 'self'"} <= {*policy.split("; ")}
    assert page.headers["Content-Type"].startswith("text/html")
    monkeypatch.setattr(front, "PAGE", tmp_path / "page.html")
    local.get("/").fails(500)  # the connection broke without a word


def test_what_it_says_of_itself(local):
    """Ask twice, and check the cached tokens and the version in the answers. Catches: cached tokens
    that are not told; a version that pip knows by another name."""
    for _ in range(2):
        usage = local.post(COMPLETIONS, {"prompt": PROMPT * 9, "max_tokens": 1}).json["usage"]
    assert 0 < usage["prompt_tokens_details"]["cached_tokens"] < usage["prompt_tokens"]
    reply = local.post(CHAT, {"messages": HI, "max_tokens": 1}).json
    versions = reply["system_fingerprint"], local.get("/version").json["version"]
    assert {*versions, importlib.metadata.version("kilolm")} == {VERSION}


def test_log(local, capfd, monkeypatch):
    """Send requests, good and bad, and check the lines of the log. Catches: a log without the
    requests, or with a prompt; `server.py 2>&1 | head`, after which every answer was empty."""
    logged(capfd, 0)
    send, lines = local.post, []
    two = {"messages": HI, "max_tokens": 2, "stream": True}
    for ask in (
        lambda: send(COMPLETIONS, SHORT | {"user": "ann", "prompt": ["a", "b"]}),
        lambda: send(CHAT, two, **{"X-Forwarded-For": "::7"}),
        lambda: send(COMPLETIONS + "?key=x", {"n": 0}),
        lambda: send(CHAT, {"messages": "MY SECRET"}),
        lambda: send(COMPLETIONS, {"suffix": "MY SECRET"}),
        lambda: send(COMPLETIONS, {"prompt": [["MY SECRET"]]}),
        lambda: send(COMPLETIONS, {"structured_outputs": {"regex": "(SECRET"}}),
        lambda: local.get("/" + "a" * 9000),
        lambda: local.raw(b"\r\n\r\n"),
        lambda: local.raw(b"\x16\x03\x01"),
        lambda: local.get("/engine"),  # which a page asks for ten times a second
        lambda: local.get("/engine", Host="a.test"),
    ):
        ask()  # the next one when this client's thread has ended
        lines += map(json.loads, logged(capfd, 0))
    assert "SECRET" not in str(lines)
    found = [(line["request"], line["status"], line["client"]) for line in lines]
    here = "127.0.0.1"
    assert found == [
        (f"POST {COMPLETIONS}", 200, here), (f"POST {CHAT}", 200, "::7"),
        (f"POST {COMPLETIONS}", 400, here), (f"POST {CHAT}", 400, here),
        *[(f"POST {COMPLETIONS}", 400, here)] * 3, ("GET /" + "a" * 195, 404, here),
        ("", 400, here), ("", 400, here),
        ("GET /engine", 403, here),
    ]  # fmt: skip
    whole, streamed, wrong, *_ = lines
    assert whole["user"] == "ann" and whole["completion_tokens"] == 2 * SHORT["max_tokens"]
    assert 0 < whole["first_token"] < whole["seconds"] < 60 and whole["error"] == ""
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", whole["time"])
    assert streamed["id"].startswith("chatcmpl-") and streamed["completion_tokens"] == 2
    assert "n must be" in wrong["error"] and "id" not in wrong
    for error in (BrokenPipeError, ValueError):  # nobody reads it; it is closed
        closed = MagicMock()
        closed.write.side_effect = error
        monkeypatch.setattr(sys, "stderr", closed)
        local.works()
        until(lambda closed=closed: closed.write.called and not local.server.busy)


# --- Who is let in --------------------------------------------------------------------------------


def test_names_of_this_host(local, monkeypatch):
    """Ask under many Host headers, and check which are let in. Catches: another site's page that
    uses the model, by a name that points here (DNS rebinding)."""
    mine = ("localhost", "LOCALHOST:8000", "localhost ", "127.0.0.1:1", "127.1.2.3", "[::1]:8000",
            "[::1]", "LOCALHOST.", "localhost.:80", "x.localhost", "a.B-1.localhost.", "localhost:",
            "0.0.0.0:8000", "[::]")  # fmt: skip
    others = ("evil.test", "127.0.0.1.evil.test", "localhost.evil.test:80", "", "1.2.3.4", "::2",
              "evil-localhost", ".localhost", "x..localhost", "localhost..", ".")  # fmt: skip
    for name in mine + others:
        assert local.get("/health", Host=name).status == (200 if name in mine else 403), name
    message = local.get("/health", Host="chat.test").fails(403)  # as from a proxy
    assert all(word in message for word in ("'chat.test'", "Host: localhost", "--host"))
    monkeypatch.setitem(vars(local.args), "host", "0.0.0.0")  # who opens it may give it any name
    assert local.get("/health", Host="a.test").status == 200


def test_keys(local, monkeypatch):
    """Ask for each path without a key, with wrong ones and with the right one. Catches: a path that
    does not need the key; the beginning of the key accepted; answers that any web page can read."""
    assert not [name for name in local.get("/health").headers if "Access" in name]
    monkeypatch.setitem(vars(local.args), "api_key", "secrét")
    right, wrong = "Bearer secrét".encode().decode("latin-1"), "Bearer \xff"
    for path in ("/metrics", "/engine", "/v1/models", COMPLETIONS, CHAT):
        method = "POST" if path in (COMPLETIONS, CHAT) else "GET"
        local.send(method, path).fails(401, code="invalid_api_key")
        for key in ("", "Bearer", right[:-1], right + "s", "Basic secrét", wrong):
            local.send(method, path, Authorization=key).fails(401, code="invalid_api_key")
    key = {"Authorization": right.replace("B", "b")}
    opened = [local.get(path, **key) for path in ("/metrics", "/engine", "/v1/models")]
    opened += [local.get("/"), local.get("/health"), local.post(COMPLETIONS, STREAM, **key)]
    assert all(each.status == 200 for each in opened)


def test_more_clients_than_threads(local, monkeypatch, capfd):
    """Open more connections than there may be threads, and let the system refuse a thread and a
    descriptor. Catches: a thread for each client, however many there are; a server that ends, says
    nothing, or does nothing but try again."""
    until(lambda: not num_served())
    with monkeypatch.context() as patch, contextlib.ExitStack() as stack:
        patch.setattr(front, "MAX_THREADS", threading.active_count() + 2)
        one, _, *more = (stack.enter_context(connect(local, b"")) for _ in "abcde")
        until(lambda: num_served() == 2)
        for each in more:  # these wait
            each.sendall(GET)
        assert not select.select(more, [], [], 0.3)[0] and num_served() == 2
        one.close()
        for each in more:
            assert parse(receive(each))[0].status == 200
            each.close()
    until(lambda: not num_served())
    capfd.readouterr()
    for error in (RuntimeError("can't start new thread"), OSError("Too many open files")):
        pauses = []
        with monkeypatch.context() as patch:
            patch.setattr(front.Thread, "start", MagicMock(side_effect=error))
            patch.setattr(front, "time", SimpleNamespace(sleep=pauses.append))
            with pytest.raises(ConnectionError):
                local.get("/health")
            until(lambda pauses=pauses: pauses == [1])
        assert capfd.readouterr().err == f"{error}\n"
    local.works()


def test_queue(local, monkeypatch):
    """Fill the queue, and check which requests get a 429 and what the metrics say. Catches: a queue
    without a bound; a full one that stays full; a refused client that counts until it leaves; a
    body checked before it is refused; a request counted only once its body has been read, or the
    engine has it; no connection left for /health."""
    until(lambda: not local.server.busy)
    monkeypatch.setitem(vars(local.args), "max_queue", 3)
    go_on = threading.Event()
    local.server.inbox.put(go_on.wait)  # so the engine gets nothing yet
    fields = {"prompt": "a", "max_tokens": 250, "ignore_eos": True}
    try:
        clients = [local.begin(fields) for _ in range(9)]
        clients.append(connect(local, post()[:-1]))  # still in its body
        clients.append(local.begin({**fields, "prompt": ["a", "b"]}))
        until(lambda: len(local.server.busy) == 11)  # 8 may run at once, and 3 wait
        for _ in range(3):
            clients.append(connect(local, post({"temperature": "hot"})))  # and stays
            (answer,) = parse(receive(clients[-1]))
            assert re.search(r"\b12\b.*\b11\b", answer.fails(429))
            assert answer.headers["Retry-After"] == "1"
        clients.pop(0).close()
        until(lambda: len(local.server.busy) == 10)
        clients.append(local.begin(fields))
        until(lambda: len(local.server.busy) == 11)
        local.post(CHAT, {"messages": HI}).fails(429)
        monkeypatch.setitem(vars(local.args), "max_queue", 2000)
        monkeypatch.setattr(front, "MAX_BUSY", 11)  # the other threads are for /health
        local.post(CHAT, {"messages": HI}).fails(429)
    finally:
        go_on.set()
    gauges = until(lambda: (m := local.metrics())["num_requests_waiting"] == 3 and m)
    assert gauges["num_requests_running"] == 8 and 0 < gauges["kv_cache_usage_perc"] <= 1
    for client in clients:
        client.close()


def test_two_arrive_at_a_full_queue(local, monkeypatch):
    """Let two clients arrive together where one place is left, and hold each where it joins those
    that are answered. Catches: clients that are counted before they are checked, so that both are
    refused."""
    until(lambda: not local.server.busy)
    monkeypatch.setitem(vars(local.args), "max_queue", 0)
    both = threading.Barrier(2)

    class Busy(set):
        def add(self, connection):
            super().add(connection)
            with contextlib.suppress(threading.BrokenBarrierError):
                both.wait(0.3)  # the other one may be refused, and never come

    monkeypatch.setattr(local.server, "busy", Busy(range(7)))
    with ThreadPoolExecutor(2) as pool:
        answers = [*pool.map(lambda _: local.post(COMPLETIONS, SHORT).status, range(2))]
    assert 200 in answers
    until(lambda: local.server.busy == {*range(7)})


@pytest.mark.skipif(not socket.has_ipv6, reason="needs IPv6")
def test_addresses(make_local, monkeypatch):
    """Listen at ::1, localhost and ::, and check the printed address. Catches: an address that a
    browser does not take; at ::, nobody over IPv4."""
    lines = []
    monkeypatch.setattr(front, "say", lines.append)
    for host, shown in (("::1", "[::1]"), ("localhost", "127.0.0.1"), ("::", "[::]")):
        local = make_local("--host", host)
        until(lambda: f"serving shakespeare on http://{shown}:{local.port}" in lines)  # noqa: B023
    for address in ("127.0.0.1", "::1"):
        socket.create_connection((address, local.port), 5).close()


def test_settings_of_the_server(make_local, capfd):
    """Serve with sampling settings, a system prompt and the other name of --checkpoint. Catches:
    flags that hold for no request, or for those that say otherwise; a second system prompt."""
    local = make_local("--model", str(SHAKESPEARE), "--system", "Be brief.")
    asked = [local.server.api.sampling_params({}, chat=each).max_tokens for each in (True, False)]
    assert asked == [local.engine.max_seq_len, 16]
    flags = parse_args(["--temperature", "0", "--max-tokens", "3", "--port", "0"])
    sampling = server_args(flags, Ranks(torch.device("cpu"))).sampling
    assert sampling == {"temperature": 0.0, "max_tokens": 3}
    local.server.api.defaults |= sampling
    seen = []
    for messages in (HI, [{"role": "system", "content": "No."}, *HI]):
        answer = local.post(CHAT, {"messages": messages}).json
        seen.append(answer["usage"]["prompt_tokens"])
        assert answer["usage"]["completion_tokens"] <= 3
    brief = [{"role": "system", "content": "Be brief."}, *HI]
    own = [{"role": "system", "content": "No."}, *HI]
    assert seen == [len(TOKENIZER.encode_chat(chat)) for chat in (brief, own)]
    first, second = (local.post(COMPLETIONS, {"prompt": PROMPT}).json for _ in range(2))
    assert first["choices"] == second["choices"] and first["usage"]["completion_tokens"] == 16
    hot = {"prompt": PROMPT, "temperature": 2, "seed": 1}
    assert local.post(COMPLETIONS, hot).json["choices"] != first["choices"]


def test_errors_at_the_start(capfd, tmp_path, monkeypatch):
    """Start with wrong options, a port in use and a missing file. Catches: a traceback; a large
    model loaded before the port is tried; an empty key, as from a variable that is not set, which
    lets everybody in."""
    main = lambda *words: server_module.main(["--device", "cpu", *map(str, words)])  # noqa: E731

    def fails(option, value, says):
        assert main(option, value) == 2
        error = capfd.readouterr().err
        assert error.count("server.py: error: ") == 1 and says in error and "Traceback" not in error

    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setitem(os.environ, "KILOLM_API_KEY", "a")
        fails("--checkpoint", tmp_path, "config.json")
        fails("--kv-memory", 9, "--kv-memory")
        served = MagicMock(side_effect=AssertionError("it was loaded"))
        monkeypatch.setattr(server_module, "open_engine", served)
        for option, value, says in (
            ("--port", taken.getsockname()[1], "in use"), ("--port", 99999, "port"),
            ("--api-key", "", "--api-key"), ("--host", "", "--host"),
            ("--max-queue", -1, "max_queue"),
            ("--max-body", -1, "max_body"), ("--temperature", -1, "temperature"),
        ):  # fmt: skip
            fails(option, value, says)
    with pytest.raises(SystemExit, match="2"):
        server_module.parse_args(["--kv-memory", "much"])
    served.side_effect = None
    monkeypatch.setattr(server_module, "cache_size", str)
    monkeypatch.setattr(server_module, "Server", served)
    monkeypatch.setattr(server_module, "serve", lambda server: None)
    for options, key in ((("--port", 0), "a"), (("--port", 0, "--api-key", "b"), "b")):
        assert main(*options) == 0
        _, args, listener = served.call_args.args
        listener.close()
        assert (args.api_key, args.host) == (key, "localhost")  # nobody else, unless told so
    monkeypatch.setenv("KILOLM_API_KEY", "")
    assert main("--port", 0) == 2


# --- Clients that are slow, or go -----------------------------------------------------------------


def test_slow_clients(make_local, monkeypatch, capfd):
    """Send a request byte by byte, read a stream late, and send or read nothing more. Catches: a
    slow client that holds up the others, or loses its text; a body that has no more time than a
    head; clients that send nothing more, or read nothing of their streams, kept for ever."""
    local, head = make_local(), post(head=EXPECT).removesuffix(DATA)
    local.server.listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    with connect(local, b"") as slow:
        for i in range(len(head)):
            slow.sendall(head[i : i + 1])
        local.works()
        assert slow.recv(25) == b"HTTP/1.1 100 Continue\r\n\r\n"  # curl waits for it, for a second
        slow.sendall(DATA)
        assert said(*parse(receive(slow))) == alone(**SHORT)[0].text
    fields = {"prompt": PROMPT, "max_tokens": 60, "seed": 1, "ignore_eos": True}
    with connect(local, post({**fields, "logprobs": 20, "stream": True}), 4096) as late:
        until(lambda: local.engine.queue)
        local.works()
        until(lambda: not local.engine.queue)
        assert said(*parse(receive(late))) == alone(**fields)[0].text
    for data in (post(), post(CHUNKS, CHUNKED)):
        with monkeypatch.context() as patch:
            patch.setattr(http1, "HEAD_SECONDS", 0.5)
            patch.setattr(http1, "BODY_RATE", 10)  # so a body has several seconds more
            with connect(local, data[:-1]) as slow:
                time.sleep(1)
                slow.sendall(data[-1:])
                assert parse(receive(slow))[0].status == 200
    local.settle()
    capfd.readouterr()
    monkeypatch.setattr(front.Handler, "timeout", 0.5)
    monkeypatch.setattr(http1, "HEAD_SECONDS", 0.5)
    monkeypatch.setitem(vars(local.args), "max_body", 2**30)  # which small bodies do not wait for
    stream = post(LONG | {"logprobs": 20, "n": 8, "stream": True})
    never = [connect(local, each) for each in (b"", b"GET / HTTP/1.1\r\n", post()[:-1])]
    never += [connect(local, stream, 4096) for _ in range(2)]
    ended = local.server.metrics.ended["request_success_total"]
    until(lambda: ended['{finished_reason="abort"}'] == 16)
    assert [receive(each) for each in never[:3]] == [b""] * 3
    monkeypatch.setattr(front, "HEAD_SECONDS", 0.5)
    chunks = post(b"1\r\n \r\n" * 5000, CHUNKED)  # each may not lengthen the time for all
    for begun, more in ((b"GET /", b"a"), (chunks, b"1\r\na\r\n"), (GET, b"a")):
        with pytest.raises(OSError), connect(local, begun) as dripping:
            for _ in range(50):  # five seconds
                time.sleep(0.1)
                dripping.sendall(more)
    lines = Counter(tuple(json.loads(line)[k] for k in ("request", "status", "error"))
                    for line in logged(capfd, 5))  # fmt: skip
    asked = f"POST {COMPLETIONS}"  # two streams, and two within a body
    assert lines == {(asked, 200, "timed out"): 2, (asked, 0, "timed out"): 2,
                     ("GET /version", 200, ""): 1}  # fmt: skip
    for each in never:
        each.close()


def test_clients_that_say_no_more(local, capfd, monkeypatch):
    """Close connections at many points of a request. Catches: an error printed for a client that
    has left; a request that runs on where a client closes its sending half, as `nc -N` does; a
    connection left without a timeout, or read beyond it as long as bytes come; a server that stops
    and does not wait for a client between its check and its entry."""
    near, far = socket.socketpair()
    with near, far:
        Handler.check_client(SimpleNamespace(connection=near, timeout=9))
        assert near.gettimeout() == 9
        timed = http1.Timed(near, "r")
        timed.deadline = time.monotonic()
        far.sendall(b"a")  # in time for a read, and too late for all of them
        with pytest.raises(TimeoutError):
            timed.read(1)
    waits = []
    until(lambda: not num_served())
    capfd.readouterr()
    with monkeypatch.context() as patch:
        watch = lambda check: waits.append((check[1], len(local.server.busy)))  # noqa: E731
        patch.setattr(front, "demand", lambda *check: watch(check) or demand(*check))
        assert local.post(COMPLETIONS, SHORT).status == 200
    assert next(busy for status, busy in waits if status == 503) == 1
    assert len(logged(capfd, 1)) == 1
    for data in (b"", b"GET / HTTP", *(post()[:end] for end in (30, 60)), b"\xff" * 99):
        connect(local, data).close()
    local.get("/health")  # which proxies ask for all the time: it is not logged
    local.get("/version")
    (line,) = logged(capfd, 1)
    assert "GET /version" in line
    for data in (post(), post(CHUNKS, CHUNKED)):
        connect(local, data[:-5]).close()  # within the body
        (line,) = logged(capfd, 1)
        assert f"POST {COMPLETIONS}" in line
    before = local.metrics()[ABORTED]
    with connect(local, post(LONG)) as connection:
        connection.shutdown(socket.SHUT_WR)
        assert receive(connection) == b""
    local.settle()
    assert local.metrics()[ABORTED] == before + 1


SAID = {"type": "object", "properties": {"s": {"type": "string", "minLength": 3000}},
        "required": ["s"]}  # fmt: skip
CALL = {"messages": HI, "tool_choice": "required", "stream": True,
        "tools": [{"type": "function", "function": {"name": "f", "parameters": SAID}}]}  # fmt: skip


def test_clients_leave(make_local, monkeypatch, capfd):
    """Let 25 clients ask and 24 leave, while they wait, stream or write a call. Catches: sequences
    that run on, as nothing is sent, or bytes came after the request; requests of others aborted;
    what had ended, kept until Python looks for cycles: four requests took 4 GB."""
    local = make_local("--tool-format", "hermes", num_blocks=800, max_num_seqs=11)
    alive, prepare = [], local.engine.prepare

    def watch(*args, **options):
        request = prepare(*args, **options)
        alive.extend(weakref.ref(each) for each in (request, *request.outputs))
        return request

    def leave(connections):
        for i, connection in enumerate(connections):
            connection.sendall((b"", b"G", GET)[i % 3])
            reset = struct.pack("ii", i % 2, 0)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
            connection.close()

    monkeypatch.setattr(local.engine, "prepare", watch)
    gc.collect()
    gc.disable()
    try:
        for body in (SHORT, STREAM | {"n": 3}, SHORT | {"echo": True, "logprobs": 1}):
            assert local.post(COMPLETIONS, body).status == 200
        fields = {"prompt": PROMPT, "seed": 3, "max_tokens": 100, "ignore_eos": True}
        data = [post(LONG), post(LONG | {"stream": True}), post(CALL, path=CHAT)] * 8
        clients = [connect(local, each) for each in data[:11]]
        until(lambda: len(local.engine.running) == 11)  # every place is taken
        clients += [connect(local, each) for each in data[11:]]
        stays = local.begin(fields)
        until(lambda: len(local.engine.waiting) == 14)
        leave(clients[11:])  # those that wait leave first, or they would begin in others' places
        until(lambda: len(local.engine.waiting) == 1)
        leave(clients[:11])
        assert said(read(stays)) == alone(**fields)[0].text
        stays.close()
        local.settle()
        assert len(alive) == 3 + 5 + 2 * 25
        local.engine.last_step.clear()  # it holds the last step's sequences until the next step
        until(lambda: not any(each() for each in alive) and not local.server.busy)
    finally:
        gc.enable()
    after = local.metrics()
    assert after[ABORTED] == 24 and "the client has left" in capfd.readouterr().err
    # A request that ended before its first token has no latency. It counted as one of 0 s.
    names = "e2e_request_latency_seconds_count", "time_to_first_token_seconds_count"
    assert after[names[0]] == after[names[1]] <= 5 + 11 + 1
    assert not any(after[f"num_requests_{state}"] for state in ("running", "waiting"))
    assert after["kv_cache_usage_perc"] == 0
    params = SamplingParams(n=9, stop_token_ids=[*range(1000)])  # each output had a set of its own
    assert len({id(seq.end_ids) for seq in prepare([5], params).outputs}) == 1


# --- An engine that breaks ------------------------------------------------------------------------


@pytest.fixture
def printed(monkeypatch):
    """Collect the exceptions whose tracebacks were printed. Python 3.11 may not print two at a
    time."""
    kinds = []
    print_exc = lambda: kinds.append(sys.exc_info()[0].__name__)  # noqa: E731
    monkeypatch.setattr(server_module.traceback, "print_exc", print_exc)
    return kinds


@pytest.mark.parametrize("error", [RuntimeError, ConnectionError])
def test_a_step_fails(make_local, printed, monkeypatch, error):
    """Let a step of the engine fail under three requests. Catches: one failure that ends the engine
    for good, or leaves a client waiting; a stream that comes as one piece, at the end; requests
    that wait for an engine that will never run, after the loss of a rank."""
    local, died = make_local(), []
    monkeypatch.setattr(threading, "excepthook", lambda args: died.append(args.exc_type))
    local.engine.runner = Broken(local.engine.runner, 12, error)
    stream, *others = local.stream(LONG), local.begin(LONG), local.begin(LONG | {"n": 3})
    answer = Answer(200, {}, stream.read())
    assert answer.fails(500) == "a step of the engine failed"
    assert sum('"error"' in event for event in answer.events) == 1  # and no [DONE] after it
    for connection in others:
        read(connection).fails(500)
        connection.close()
    if error is ConnectionError:  # main() has one line for it
        until(lambda: not (local.listening.is_alive() or local.running.is_alive()))
        assert died == [ConnectionError] and not printed
        return
    local.settle()
    local.works()
    counts = local.server.metrics.ended["request_success_total"]
    assert {sample[18:-2]: n for sample, n in counts.items()} == {"length": 1, "abort": 5}
    assert printed == ["RuntimeError"]


def test_faults_of_one(local, monkeypatch, printed):
    """Ask for a token whose logits become NaN, beside a sound request; then let the code raise a
    KeyError. Catches: a request of NaN that ends all others, or is answered as if it had ended
    well; a client that is told of a bug what only the log should say."""
    bad = TOKENIZER.encode("K")[-1]
    breaks = lambda module, args, y: y.masked_fill((args[0] == bad)[..., None], math.nan)  # noqa: E731
    with model().embed_tokens.register_forward_hook(breaks):
        fields = {"prompt": "the ", "temperature": 0, "logit_bias": {str(bad): -100}}
        other = local.begin({**fields, "max_tokens": 100})
        draws_it = {**fields, "logit_bias": {str(bad): 100}, "stream": True, "n": 3}
        for body in ({"prompt": "K"}, draws_it):
            assert local.post(COMPLETIONS, body).fails(500) == sampling.BROKEN
        assert read(other).json["usage"]["completion_tokens"] == 100
        other.close()
        local.settle()
        assert local.metrics()['request_success_total{finished_reason="error"}'] == 4
    boom = MagicMock(side_effect=KeyError("/root/secret.py at 0x7f00deadbeef"))
    with monkeypatch.context() as patch:
        patch.setattr(local.server.api, "prepare", boom)
        assert local.post(COMPLETIONS, SHORT).fails(500) == "internal error"
    assert printed == ["KeyError"]
    local.works()


# --- The end --------------------------------------------------------------------------------------


def test_the_command_line_and_a_signal(tmp_path):
    """Run server.py with many options, and stop it by a signal under load. Catches: an option
    without effect; a text broken off; clients that never end their bodies and hold the server until
    --shutdown-timeout; the stack of the grammars' compiler, which overflows along references and
    ends the server."""
    names = [f"d{i}" for i in range(3500)]
    chain = {a: {"items": {"$ref": f"#/$defs/{b}"}} for a, b in itertools.pairwise(names)}
    schema = {"$defs": chain | {names[-1]: {"type": "null"}}, "$ref": "#/$defs/d0"}
    rules = "\n".join(f"a{i}: {'(' * 20}a{i + 1}{')' * 20}" for i in range(300))
    options = ("--served-model-name", "mine", "--max-seq-len", 256,
               "--max-num-seqs", 2, "--max-queue", 1, "--max-body", 250_000, "--kv-memory", "16e6",
               "--shutdown-timeout", 1000)  # fmt: skip
    with Process(tmp_path, *options, KILOLM_API_KEY="secret") as server:
        key, head = {"Authorization": "Bearer secret"}, "Authorization: Bearer secret\r\n"
        (listed,) = server.get("/v1/models", **key).json["data"]
        assert (listed["id"], listed["max_model_len"]) == ("mine", 256)
        server.get("/v1/models").fails(401, code="invalid_api_key")
        for wish in ({"json": schema}, {"grammar": f'start: a0\n{rules}\na300: "b"'}):
            server.post(COMPLETIONS, SHORT | {"structured_outputs": wish}, **key)  # or a refusal
            assert said(server.post(COMPLETIONS, SHORT, **key)) == alone(**SHORT)[0].text
        server.post(COMPLETIONS, {"prompt": "a" * 250_000}, **key).fails(413)
        with ThreadPoolExecutor(16) as pool:  # of which 2 run, and 1 waits
            one = lambda _: server.post(COMPLETIONS, LONG | {"max_tokens": 200}, **key)  # noqa: E731
            assert {answer.status for answer in pool.map(one, range(16))} == {200, 429}
        idle = server.open()
        idle.connect()
        half_sent = [connect(server, data[:-1]) for data in (post(head=head), GET)]
        busy = connect(server, post({**LONG, "max_tokens": 200, "n": 4, "stream": True}, head))
        begun = busy.recv(2**16)
        server.process.send_signal(signal.SIGTERM)
        until(lambda: not server.accepts())
        health = server.send("GET", "/health", on=idle)
        # It was 200, so that a proxy would have had to read the body to take the replica out.
        assert "stopping" in health.fails(503)
        (answer,) = parse(begun + receive(busy))
        assert answer.events[-1] == "[DONE]" and '"length"' in answer.events[-2]
        assert server.process.wait(120) == 0 and "Traceback" not in server.log.read_text()
        assert [receive(each) for each in half_sent] == [b"", b""]


def test_a_signal_while_the_model_loads(tmp_path):
    """Send SIGTERM while the model loads. Catches: a first process of a container on which the
    signal has no effect without a handler, so that Kubernetes waits, and kills it; clients that are
    let in, and wait, before the model is there."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    code = f"""import sys, time; sys.path.insert(0, {str(ROOT)!r}); import server
server.open_engine = lambda *_: server.say("loading") or time.sleep(120)
server.main([*sys.argv[2:], "--port", "{port}"])"""
    server = Process(tmp_path, program=(sys.executable, "-c", code))
    until(lambda: "loading" in server.log.read_text())
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(60) == 143


def stopped(data, *options, signals=1, reached=bool):
    """Serve in the main thread, as main() does. Send bytes; then signals, once the engine has the
    request, or it was answered, or `reached` says so. Return what comes."""
    engine, args = Engine(model(), TOKENIZER, num_blocks=80), make_args(*options)
    server = Server(engine, args, listen_at(args.host, args.port))
    address = server.listener.getsockname()
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]

    def client():
        until(lambda: signal.getsignal(signal.SIGINT) != before[1])  # set after SIGTERM's
        with socket.create_connection(address, 60) as s:
            s.sendall(data)
            until(lambda: not data or engine.queue or reached() or select.select([s], [], [], 0)[0])
            for _ in range(signals):
                os.kill(os.getpid(), signal.SIGTERM)
                until(lambda: server.stopping)
            return parse(receive(s))

    try:
        with ThreadPoolExecutor(1) as pool:
            answers = pool.submit(client)
            serve(server)
            return answers.result()
    finally:
        signal.set_wakeup_fd(-1)  # else the next test's Ctrl-C is the second one for this server
        for number, handler in zip((signal.SIGTERM, signal.SIGINT), before, strict=True):
            signal.signal(number, handler)


def test_an_engine_that_dies(monkeypatch):
    """Let the engine's thread end by a BaseException, as of a Rust library's panic. Catches: a
    server that takes clients and never answers them."""
    ended = []

    def listen(server):
        until(lambda: server.stopping)
        ended.append(server.listener.close())

    monkeypatch.setattr(Server, "drive", MagicMock(side_effect=BaseException("panic")))
    monkeypatch.setattr(front, "listen", listen)
    with pytest.raises(BaseException, match="panic"):
        stopped(b"", signals=0)
    assert ended == [None]


def test_signals(monkeypatch, capsys):
    """Send a signal while requests run, wait to enter, or come late; and a second signal. Catches:
    a server that does not end, or without an error to clients that still wait; a request cut off
    that was not in the engine yet, or that came later; a second Ctrl-C that does nothing."""
    for stream in (False, True):
        (answer,) = stopped(post(LONG | {"stream": stream}), "--shutdown-timeout", "0.3")
        assert "stopping" in answer.fails(503) and (stream or answer.headers["Retry-After"])
    assert "stopping: 1 still running" in capsys.readouterr().err
    encode, begun, complete = TOKENIZER.encode, threading.Event(), Handler.complete
    slow = lambda *text: begun.set() or time.sleep(0.3) or encode(*text)  # noqa: E731
    with monkeypatch.context() as patch:
        patch.setattr(TOKENIZER, "encode", slow)
        assert stopped(post(), reached=begun.is_set)[0].status == 200

    def late(self, chat):
        self.server.stopping = True
        complete(self, chat)

    with monkeypatch.context() as patch:
        patch.setattr(Handler, "complete", late)
        assert "stopping" in stopped(post(), signals=0)[0].fails(503)
    capsys.readouterr()
    assert stopped(GET)[0].status == 200
    assert "Traceback" not in capsys.readouterr().err  # a browser's open connection
    codes = []
    monkeypatch.setattr(front.os, "_exit", codes.append)
    stopped(post({**LONG, "max_tokens": 100}), signals=2)
    until(lambda: codes == [1])


@pytest.mark.slow
def test_torchrun(tmp_path):
    """Serve on two ranks by torchrun, ask, and stop it during a stream. Catches: another text than
    one process has; two servers; a rank that outlives the first."""
    program = (Path(sys.executable).with_name("torchrun"), "--standalone", "--nproc-per-node", 2)
    with Process(tmp_path, program=program) as server:
        children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children")
        if not children.exists():
            pytest.skip("needs Linux's /proc")
        ranks = children.read_text().split()
        assert said(server.post(COMPLETIONS, SHORT)) == alone(**SHORT)[0].text
        stream = server.stream({**SHORT, "max_tokens": 16})
        server.process.send_signal(signal.SIGTERM)  # which it passes on to all
        assert Answer(200, {}, stream.read()).events[-1] == "[DONE]"
        server.process.wait(60)
        assert not any(Path(f"/proc/{pid}").exists() for pid in ranks)
        assert server.log.read_text().count("serving") == 1


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_rank_is_stopped(tmp_path, number):
    """Stop the second rank by SIGSTOP during a stream, and signal the first until it ends. Catches:
    a first rank that waits for the stopped one and hears no signal, not even the second."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    env |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    with contextlib.ExitStack() as stack:
        ranks = []
        for rank in "01":
            (tmp_path / rank).mkdir()
            ranks.append(Process(tmp_path / rank, RANK=rank, LOCAL_RANK=rank, **env))
            stack.push(ranks[-1].__exit__)
        server, other = ranks
        stream = server.__enter__().stream(LONG)
        other.process.send_signal(signal.SIGSTOP)
        time.sleep(0.5)
        sent = 0
        while server.process.poll() is None:  # two become one if it does not run between
            server.process.send_signal(number)
            sent += 1
            time.sleep(0.5)
            assert sent < 20
        assert server.process.returncode == 1 and sent > 1
        stream.close()


# --- What it shows --------------------------------------------------------------------------------

METRICS = """num_requests_running num_requests_waiting kv_cache_usage_perc num_preemptions_total
    prompt_tokens_total generation_tokens_total prefix_cache_queries_total prefix_cache_hits_total
    request_success_total time_to_first_token_seconds inter_token_latency_seconds
    e2e_request_latency_seconds spec_decode_num_draft_tokens_total
    spec_decode_num_accepted_tokens_total"""


def test_metrics(local, monkeypatch):
    """Send requests, and compare the metrics before and after with their usage; check each line's
    form. Catches: names that Prometheus refuses; a token counted twice or not at all; a prompt
    counted once for each of its n outputs; a histogram that is read when half of it is counted."""
    before, long = local.metrics(), {"prompt": [7] * 40, "max_tokens": 1, "ignore_eos": True}
    bodies = [{"prompt": [PROMPT, "a"], "n": 2, "seed": 1, "max_tokens": 9}, long, long,
              {"stop_token_ids": [13], "logit_bias": {"13": 100}}]  # fmt: skip
    replies = [local.post(COMPLETIONS, body).json for body in bodies]
    local.post(COMPLETIONS, STREAM)
    local.post(COMPLETIONS, {"n": 0}).fails(400, "n")  # counts for nothing
    local.settle()
    after = local.metrics()
    prompts = sum(reply["usage"]["prompt_tokens"] for reply in replies) + len(IDS[0])
    outputs = sum(reply["usage"]["completion_tokens"] for reply in replies) + 6
    reasons = Counter(choice["finish_reason"] for reply in replies for choice in reply["choices"])
    assert reasons["stop"] >= 1 and sum(reasons.values()) == 7
    for name, change in {
        "prompt_tokens_total": prompts, "prefix_cache_queries_total": prompts,
        "prefix_cache_hits_total": 32,  # two blocks of the 40
        "generation_tokens_total": outputs, "inter_token_latency_seconds_count": outputs - 8,
        "time_to_first_token_seconds_count": 8, "e2e_request_latency_seconds_count": 8, ABORTED: 0,
        'request_success_total{finished_reason="stop"}': reasons["stop"],
        'request_success_total{finished_reason="length"}': reasons["length"] + 1,
    }.items():  # fmt: skip
        assert after[name] - before[name] == change, name
    kinds = ("time_to_first_token", "inter_token_latency", "e2e_request_latency")
    first, rest, whole = (after[f"{kind}_seconds_sum"] for kind in kinds)
    assert first + rest == pytest.approx(whole)
    for kind in kinds:
        buckets = [(name, after[name]) for name in after if name.startswith(f"{kind}_seconds_buck")]
        ends = [float(re.search('le="(.*)"', name)[1]) for name, _ in buckets]
        counts = [count for _, count in buckets]
        assert ends == sorted(ends) and counts == sorted(counts) and ends[-1] == math.inf
        assert counts[-1] == after[f"{kind}_seconds_count"]
    made = Metrics(local.engine, "m", {})
    ended = SimpleNamespace(prompt_len=1, finish_reason="stop", times=[0, 0.004, 0.024, 5])
    made.count(SimpleNamespace(outputs=[ended]))
    gaps = made.ended["inter_token_latency_seconds"]  # 0.02 and 4.976
    ends = ("0.01", "0.025", "2.5", "5", "+Inf")
    assert [gaps[f'_bucket{{le="{end}"}}'] for end in ends] == [0, 1, 1, 2, 2]
    texts = []  # what another thread reads meanwhile
    watch = lambda *given: texts.append(made.text()) or bisect(*given)  # noqa: E731
    monkeypatch.setattr(metrics, "bisect", watch)
    made.count(SimpleNamespace(outputs=[ended]))
    for text in texts:
        counts = re.findall(r'(\w+)_(?:bucket\{model_name="m",le="\+Inf"|count.*)\} (\d+)', text)
        assert len(counts) == 6 and len({*counts}) == 3, text
    answer = local.get("/metrics")
    assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    names, samples = [], []
    for line in answer.data.decode().split("\n")[:-1]:
        if line.startswith("# TYPE "):
            of, kind = line.split(" ")[2:]
            assert kind in ("counter", "gauge", "histogram")
            assert (kind == "counter") == of.endswith("_total")
            names.append(of)
        else:
            pattern = r'([a-z_:][a-z0-9_:]*)\{model_name="shakespeare",([a-z_]+="[^"\\]*"|)\} (\S+)'
            name, labels, value = re.fullmatch(pattern, line).groups()
            parts = (f"{of}_bucket", f"{of}_sum", f"{of}_count")
            assert name in (parts if kind == "histogram" else (of,))
            assert math.isfinite(float(value))
            samples.append((name, labels))
    assert all(len(each) == len({*each}) for each in (names, samples))
    assert {f"vllm:{name}" for name in METRICS.split()} <= {*names}


def watched(client):
    """Return the JSON that the page reads, and check it: every block is in range, and no block is
    both nobody's and somebody's."""
    now = client.get("/engine").json
    used = {block for row in now["running"] for block in row["blocks"]}
    assert all(0 <= block < now["blocks"] for block in used | {*now["cached"]})
    assert not used & {*now["cached"]}
    assert now["num_requests_running"] == len({row["name"] for row in now["running"]}) <= 8
    for row in now["running"]:
        assert row["length"] <= len(row["blocks"]) * now["block_size"]
        assert row["prompt"] < row["max"] and row["length"] < row["max"]
        assert len(row["text"]) <= 40 and 0 <= row["ran"] <= 32
    return now


def test_snapshots(local, capfd):
    """Read snapshots of the engine before, during and after a crowd of requests. Catches: blocks of
    another sequence; an ended sequence; falling counters; a line of the log for each look."""
    seen = [watched(local)]
    assert seen[0]["running"] == [] and seen[0]["num_requests_waiting"] == 0
    assert (seen[0]["blocks"], seen[0]["block_size"]) == (128, 16)
    doomed = local.begin(LONG | {"prompt": ["a" * 60, PROMPT * 8], "n": 5, "max_tokens": 150})
    until(lambda: seen.append(watched(local)) or len(seen[-1]["running"]) == 8)
    now = seen[-1]
    for name in (name for name in now if name.endswith("_total")):
        assert [each[name] for each in seen] == sorted(each[name] for each in seen)
    assert now["num_requests_waiting"]
    assert now["computed_tokens_total"] > seen[0]["computed_tokens_total"]
    names = [row["name"].rpartition(".") for row in now["running"]]
    requests = {name for name, _, _ in names}
    assert len(requests) == 2
    assert {index for _, _, index in names} == {*"01234"}
    assert len({row["blocks"][0] for row in now["running"]}) == 2  # n outputs share the prompt's
    doomed.close()
    local.settle()
    until(lambda: (now := watched(local))["running"] == [] and not now["num_requests_waiting"])
    with ThreadPoolExecutor(30) as pages:
        assert all(now["blocks"] == 128 for now in pages.map(watched, [local] * 150))
    assert "/engine" not in capfd.readouterr().err
