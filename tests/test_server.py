"""The server: what OpenAI's client gets, what a rude one cannot do, and how it all ends.

The slow twin is generate(), alone.
"""

import asyncio
import contextlib
import errno
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
import tomllib
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import openai
import pytest
import torch
from conftest import ROOT, program
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
    Client,
    Process,
    accepts,
    alone,
    assert_same,
    call,
    make_args,
    model,
    parse,
    read,
    receive,
    until,
)

import generate
import sampling
import server as server_module
from around.api import front, listen_at, serve
from around.api.answers import Choice
from around.api.function_calls import FORMS, NO_TOOLS, Reader
from around.machine import Ranks
from around.settings import VERSION, SamplingParams
from around.structured import token_bytes
from scheduler import Engine
from server import parse_args

pytest_plugins = ["serving"]
pytestmark = pytest.mark.usefixtures("one_thread")


# --- OpenAI's client ------------------------------------------------------------------------------


@pytest.fixture(params=["whole", "streamed"])
def ask(request, local):
    return lambda chat=False, **body: call(local, request.param == "streamed", chat, **body)


MARKS = {str(i): 60 for i in TOKENIZER.encode("∑😀é", add_special=False)[:-1]}  # bytes
SETTINGS = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 0.9, "top_p": 0.95, "seed": 7},
    "penalties": {"presence_penalty": 1.5, "frequency_penalty": 0.5, "seed": -5},
    "defaults": {"seed": 2**63 - 1},
    "logit_bias": {"temperature": 0, "logit_bias": {"20": 50, "981": -100}},
    "half characters": {"logit_bias": MARKS, "seed": 1, "temperature": 1.5},
    "stop": {"temperature": 0, "stop": ["\n\nROMEO", "never"]},
    "one stop": {"temperature": 0, "stop": " it"},
    "a token stops": {"temperature": 0, "stop_token_ids": [13]},
    "not yet": {"temperature": 0, "stop_token_ids": [13], "min_tokens": 19},
    "vLLM's": {"top_k": 40, "min_p": 0.02, "repetition_penalty": 1.1, "seed": 3,
               "ignore_eos": True},
}  # fmt: skip


@pytest.mark.parametrize("setting", SETTINGS)
def test_text_is_that_of_generate(ask, setting):
    """A setting got lost on the way; a stream lost a piece, or showed half a character."""
    fields = {"max_tokens": 20, **SETTINGS[setting]}
    bias = {int(i): b for i, b in fields.get("logit_bias", {}).items()}
    expected = alone(**fields | {"logit_bias": bias})
    assert_same(ask(**fields), expected)
    if setting == "half characters":  # or this row compares nothing
        assert "\ufffd" in expected[0].text or "😀" in expected[0].text


def test_text_is_that_of_the_command_line(local, capsys):
    """The server's defaults were not those of generate.py."""
    options = ["--prompt", PROMPT, "--seed", "5", "--max-tokens", "24", "--dtype", "float32"]
    capsys.readouterr()
    assert generate.main([*options, "--device", "cpu"]) == 0
    printed = capsys.readouterr()
    reply = call(local, False, seed=5, max_tokens=24)
    assert printed.out == reply.choices[0].text + "\n"
    assert f"{reply.usage['completion_tokens']} new tokens" in printed.err


def test_forms_of_a_prompt(ask):
    """Ids were taken for a list of prompts, or a list's choices came in another order."""
    texts = [PROMPT, "", "JULIET:\n"]
    ids = [TOKENIZER.encode(text) for text in texts]
    fields = {"max_tokens": 8, "seed": 4}
    expected = [alone(text, **fields)[0] for text in texts]
    for prompt in (ids, [texts[0], ids[1], texts[2]]):
        reply = ask(prompt=prompt, **fields)
        assert_same(reply, expected)
        assert reply.usage["prompt_tokens"] == sum(map(len, ids))
    assert_same(ask(prompt=texts[1], **fields), [expected[1]])
    assert_same(ask(prompt=ids[2], **fields), [expected[2]])


def test_n(ask):
    """The n outputs of one prompt were mixed up with those of the next, or shared a seed; or n was
    larger than the number of sequences that run at once."""
    texts = [PROMPT, "JULIET:\n"]
    reply = ask(prompt=texts, n=3, seed=5, max_tokens=8)
    assert_same(reply, [s for text in texts for s in alone(text, n=3, seed=5, max_tokens=8)])
    assert_same(reply, [alone(t, seed=5 + i, max_tokens=8)[0] for t in texts for i in range(3)])
    assert reply.usage["prompt_tokens"] == sum(len(TOKENIZER.encode(text)) for text in texts)
    greedy = ask(n=128, temperature=0, max_tokens=2)
    assert len(set(greedy.choices)) == 1 and len(greedy.choices) == 128
    assert len({choice.text for choice in ask(n=4, max_tokens=12).choices}) > 1


def test_echo(ask):
    """The prompt came twice in a stream, or only for the first choice."""
    for prompt, text in (("é∑😀", "é∑😀"), (TOKENIZER.encode(PROMPT), PROMPT)):
        sequences = alone(prompt, n=2, seed=1, max_tokens=8)
        reply = ask(prompt=prompt, echo=True, n=2, seed=1, max_tokens=8)
        assert [choice.text for choice in reply.choices] == [text + s.text for s in sequences]
        assert reply.usage["completion_tokens"] == 16
    reply = ask(prompt=["a", "b"], echo=True, max_tokens=1, logit_bias={"13": 100}, stop="\n")
    assert [choice.text for choice in reply.choices] == ["a", "b"]  # nothing new to show
    more = {"max_tokens": 1, "max_completion_tokens": 5, "ignore_eos": True}  # the latter counts
    reply = ask(prompt="a", echo=True, **more)
    assert reply.usage["completion_tokens"] == 5 and len(reply.choices[0].text) > 1
    reply = ask(prompt=["a", "b"], echo=True, max_tokens=1, logprobs=0)  # to score a text
    for choice, prompt in zip(reply.choices, "ab"):
        assert len(choice.logprobs["tokens"]) == len(TOKENIZER.encode(prompt)) + 1


def test_logprobs(ask):
    """A token had the values of another one, or one list was shorter than the others."""
    fields = {"max_tokens": 10, "seed": 2, "logprobs": 3}
    prompts = [PROMPT, "JULIET:\nI"]
    reply = ask(prompt=prompts, **fields)
    for choice, prompt in zip(reply.choices, prompts, strict=True):
        tokens, found = alone(prompt, **fields)[0].tokens, choice.logprobs
        texts = [token.text for token in tokens]
        assert found["tokens"] == texts and "".join(texts) == choice.text
        assert found["text_offset"] == [len("".join(texts[:i])) for i in range(len(texts))]
        assert len(found["token_logprobs"]) == len(found["top_logprobs"]) == len(tokens)
        for i, token in enumerate(tokens):
            assert found["token_logprobs"][i] == pytest.approx(token.logprob, abs=1e-4)
            top = {token_bytes(TOKENIZER)[j].decode(): p for j, p in token.top}
            top |= {token.text: token.logprob}
            assert found["top_logprobs"][i] == pytest.approx(top, abs=1e-4)


def test_echo_shows_special_tokens(ask):
    """What marks the turns vanished from the prompt; or BOS, which the tokenizer adds, appears."""
    prompt = "the</s> cat<s>"
    wish = {"echo": True, "max_tokens": 1, "logit_bias": {"5": 100}, "stop_token_ids": [5]}
    for more in ({}, {"logprobs": 1}):
        (choice,) = ask(prompt=prompt, **wish, **more).choices
        assert choice.text == prompt
    assert "".join(choice.logprobs["tokens"]) == prompt
    ids = TOKENIZER.encode(prompt, add_special=False)  # as ids, there is no BOS to leave out
    assert ask(prompt=ids, **wish).choices[0].text.strip() == prompt


def test_stop_at_a_special_token(ask):
    """A stop string such as <|im_end|> was accepted, and never matched."""
    body = {"prompt": "a", "logit_bias": {str(TOKENIZER.bos_id): 100}, "max_tokens": 5}
    (choice,) = ask(**body, stop=["<s>"]).choices
    assert (choice.text, choice.reason) == ("", "stop")
    assert ask(**body, stop=["x"]).choices[0].reason == "length"


def test_echo_with_logprobs(ask, local):
    """Evaluation harnesses score texts by the log-probabilities of the prompt, which come before
    those of the answer. The first token has none. The last of these prompts ends within a
    character."""
    prompts = [TOKENIZER.encode(text) for text in (PROMPT * 9, "é😀 你好,  two", "")]
    prompts.append(prompts[1][:4])
    fields = {"max_tokens": 6, "temperature": 0, "logprobs": 2}
    for _ in range(2):  # the second time some of it is in the prefix cache
        reply = ask(prompt=prompts, echo=True, **fields)
        for choice, prompt in zip(reply.choices, prompts, strict=True):
            (answer,) = alone(prompt, **fields)
            found, n = choice.logprobs, len(prompt)
            assert choice.text == TOKENIZER.decode(prompt) + answer.text == "".join(found["tokens"])
            ends = [*itertools.accumulate(map(len, found["tokens"]), initial=0)]
            assert found["text_offset"] == ends[:-1] and len(ends) == n + len(answer.tokens) + 1
            lines = local.engine.runner.model(torch.tensor([prompt]), torch.arange(n)[None])[0]
            right = [line[i].item() for line, i in zip(lines.log_softmax(-1), prompt[1:])]
            right += [token.logprob for token in answer.tokens]
            assert found["token_logprobs"] == [None, *(pytest.approx(p, abs=1e-4) for p in right)]
            assert found["top_logprobs"][0] is None and all(found["top_logprobs"][1:])
    choices = ask(prompt=PROMPT, echo=True, n=2, seed=1, max_tokens=2, logprobs=0).choices
    n = len(TOKENIZER.encode(PROMPT))
    first, second = (choice.logprobs["token_logprobs"] for choice in choices)
    assert first[:n] == second[:n] and len(second) == n + 2


def test_logprobs_of_held_text(ask):
    """Tokens whose text a stop string holds back were left out, or came with an empty top."""
    fields = {"max_tokens": 12, "temperature": 0, "logprobs": 0, "stop": "it not?\n\nNever"}
    found = ask(**fields).choices[0].logprobs
    tokens = alone(**fields)[0].tokens
    assert found["tokens"] == [token.text for token in tokens]
    assert [[*top] for top in found["top_logprobs"]] == [[token.text] for token in tokens]
    assert ask(max_tokens=2).choices[0].logprobs is None


class Growing(list):
    """Tokens of which one more comes whenever they are read, as from the engine's thread."""

    def __getitem__(self, at):
        part = super().__getitem__(at)
        if len(self) < 9:
            self.append(sampling.Token(len(self), -1.0, (), f"{len(self)} "))
        return part


def test_tokens_that_come_meanwhile(local):
    """A token that came between the reading of the others and the count of them was never sent."""
    tokens = Growing([sampling.Token(0, -1.0, (), "0 ")])
    job = SimpleNamespace(
        params=SamplingParams(logprobs=0), tokens=tokens, text="", finish_reason=None
    )
    marks = ("", "<think>", "</think>")
    choice = Choice(0, job, "text", TOKENIZER, marks, False, Reader(NO_TOOLS))
    parts = [choice.take_new() for _ in range(12)]
    found = [text for part in parts if part for text in part["logprobs"]["tokens"]]
    assert found == [f"{i} " for i in range(9)]


def chat_ids(*messages: tuple[str, str]) -> list[int]:
    return TOKENIZER.encode_chat([{"role": role, "content": text} for role, text in messages])


def test_chat(ask):
    """The template or its stop string was left out; text parts were not joined."""
    ids = chat_ids(("system", "Be brief."), ("user", "Speak,\nspeak."))
    fields = {"seed": 9, "max_tokens": 40}
    parts = [{"type": "text", "text": "Speak,"}, {"type": "text", "text": "speak."}]
    for content in (parts, "Speak,\nspeak."):
        messages = [{"role": "system", "content": "Be brief."},
                    {"role": "user", "content": content}]  # fmt: skip
        reply = ask(chat=True, messages=messages, n=2, **fields)
        assert_same(reply, alone(ids, **fields, n=2, stop=("\n\n",)))
        assert reply.usage["prompt_tokens"] == len(ids) and not reply.choices[0].logprobs


def test_stop_strings_of_a_chat(ask):
    """The template's stop string took the place of the user's, or pushed one of sixteen out."""
    ids, fields = chat_ids(("user", "hi")), {"temperature": 0, "max_tokens": 40}
    word = alone(ids, **fields, stop=("\n\n",))[0].text.split()[3]
    for stops in ([word], [word] + [f"{i}never" for i in range(15)]):
        reply = ask(chat=True, stop=stops, **fields)
        assert_same(reply, alone(ids, **fields, stop=("\n\n", word)))
        assert word not in reply.choices[0].text and reply.choices[0].reason == "stop"


@pytest.mark.parametrize("top", [None, 2])
def test_chat_logprobs(ask, top):
    """The chat's form of log-probabilities was never run."""
    fields = {"max_tokens": 8, "seed": 2}
    (sequence,) = alone(chat_ids(("user", "hi")), **fields, stop=("\n\n",), logprobs=top or 0)
    options = {} if top is None else {"top_logprobs": top}
    content = ask(chat=True, logprobs=True, **fields, **options).choices[0].logprobs["content"]
    for entry, token in zip(content, sequence.tokens, strict=True):
        assert entry["token"] == bytes(entry["bytes"]).decode() == token.text
        assert entry["logprob"] == pytest.approx(token.logprob, abs=1e-4)
        found = [(each["token"], each["logprob"]) for each in entry["top_logprobs"]]
        best = [
            (token_bytes(TOKENIZER)[i].decode(), pytest.approx(p, abs=1e-4)) for i, p in token.top
        ]
        assert found == best


def test_limits_of_length(ask):
    """max_completion_tokens was ignored, or the defaults were not OpenAI's."""
    fields = {"temperature": 0, "ignore_eos": True}
    assert ask(**fields).usage["completion_tokens"] == 16
    for limit in ({"max_tokens": 3}, {"max_completion_tokens": 3},
                  {"max_tokens": 9, "max_completion_tokens": 3}):  # fmt: skip
        reply = ask(chat=True, **limit, **fields)
        assert reply.choices[0].reason == "length" and reply.usage["completion_tokens"] == 3
    reply = ask(prompt=[5] * 1020, **fields)  # a context of 1,024
    assert (reply.choices[0].reason, reply.usage["total_tokens"]) == ("length", 1024)
    messages = [{"role": "user", "content": "no " * 960}]
    reply = ask(chat=True, messages=messages, logit_bias={"20": 100}, **fields)  # no limit given
    assert (reply.choices[0].reason, reply.usage["total_tokens"]) == ("length", 1024)


def test_what_else_a_client_sees(local):
    """A chunk had no choices although no usage was asked for; the model's name could not be found;
    a stream came as one piece at the end."""
    with local.openai() as client:
        fields = {"model": "shakespeare", "prompt": PROMPT, "max_tokens": 300, "stream": True}
        early = False
        for chunk in client.completions.create(**fields, extra_body={"ignore_eos": True}):
            early |= bool(local.engine.running)
            assert len(chunk.choices) == 1 and not getattr(chunk, "usage", None)
        assert early
        (listed,) = client.models.list().data
        assert (listed.id, listed.object, listed.owned_by) == ("shakespeare", "model", "kilolm")
        assert abs(listed.created - time.time()) < 600 and listed.max_model_len == 1024


def test_64_streams_at_once(local):
    """Streams got each other's text, or the sixty-fifth file descriptor was one too many."""

    async def one(client, seed):
        stream = await client.completions.create(
            model="shakespeare", prompt=PROMPT, max_tokens=12, seed=seed, stream=True
        )
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def run():
        async with local.openai(openai.AsyncOpenAI) as client:
            return await asyncio.gather(*(one(client, seed) for seed in range(64)))

    texts = asyncio.run(run())
    for seed in (0, 31, 63):
        assert texts[seed] == alone(seed=seed, max_tokens=12)[0].text
    assert len(set(texts)) > 60


def test_the_examples_of_the_page(local, capfd):
    """docs/serving.md: a header was missing, or the client had moved a name."""
    text = (ROOT / "docs" / "serving.md").read_text().replace(":8000", f":{local.port}")
    (curl,) = re.findall(r"^curl .*", text, re.MULTILINE)
    answer = subprocess.run(curl, shell=True, capture_output=True, text=True, timeout=120)
    assert json.loads(answer.stdout)["choices"][0]["text"]
    exec(re.search(r"```python\n(.*?)```", text, re.DOTALL)[1], {})
    assert capfd.readouterr().out


def test_openais_errors(local, monkeypatch):
    """openai's client raised a general error instead of the one that a program can catch."""
    create = local.openai().completions.create
    with pytest.raises(openai.BadRequestError, match="temperature") as caught:
        create(model="shakespeare", prompt="", temperature=-1)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as caught:
        create(model="shakespeare", prompt="a " * 3000)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError) as caught:
        create(model="gpt-4", prompt="")
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.APIStatusError) as caught:  # not a broken connection
        create(model="shakespeare", prompt="a" * 5_000_000)
    assert caught.value.status_code == 413
    create(model="shakespeare", prompt="", max_tokens=1)
    monkeypatch.setitem(vars(local.args), "max_queue", 0)
    create(model="shakespeare", prompt="", max_tokens=1)  # it need not wait
    monkeypatch.setattr(local.engine, "max_num_seqs", 0)
    with pytest.raises(openai.RateLimitError):
        create(model="shakespeare", prompt="")
    monkeypatch.setitem(vars(local.args), "api_key", "secret")
    with pytest.raises(openai.AuthenticationError):
        create(model="shakespeare", prompt="")
    assert local.openai(key="secret").models.list().data


# --- Structured output ----------------------------------------------------------------------------

SCHEMA = {
    "type": "object", "required": ["name", "age"], "additionalProperties": False,
    "properties": {"name": {"enum": ["Romeo", "Juliet"]}, "age": {"type": "integer", "maximum": 99,
                                                                 "minimum": 0}},
}  # fmt: skip


def test_response_format(ask):
    """The form of a chat was ignored, or its stop string cut the answer off."""
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
    for temperature in (0, 1, 2):
        reply = ask(chat=True, response_format=form, temperature=temperature, n=2, seed=1)
        for choice in reply.choices:
            found = json.loads(choice.text)
            assert choice.reason == "stop" and found["name"] in ("Romeo", "Juliet")
            assert 0 <= found["age"] <= 99
    assert ask(chat=True, response_format=form, max_tokens=2).choices[0].reason == "length"
    reply = ask(chat=True, response_format={"type": "json_object"}, max_tokens=9)
    assert reply.choices[0].text.lstrip().startswith("{")
    form = {"type": "json_object", "schema": {"enum": ["yes"]}}  # llama.cpp's
    assert ask(chat=True, response_format=form).choices[0].text == '"yes"'


def test_structured_outputs(local, monkeypatch):
    """vLLM's field works on both paths, and a wrong value of it is a 400 that says why."""
    for path, body in ((COMPLETIONS, {"prompt": PROMPT}), (CHAT, {"messages": HI})):
        fields = {**body, "structured_outputs": {"choice": ["yes", "no"]}, "logprobs": 1}
        choice = local.post(path, fields | ({"logprobs": True} if path == CHAT else {})).json
        choice = choice["choices"][0]
        text = choice["text"] if path == COMPLETIONS else choice["message"]["content"]
        assert text in ("yes", "no")
        for wrong in ({"regex": "(["}, {"regex": "a", "choice": []}, {"json": {"type": "x"}}, "a"):
            local.post(path, {**body, "structured_outputs": wrong}).fails(400, "structured_outputs")
    for wrong in ({"type": "xml"}, {"type": "json_schema"}, "json", {}):
        local.post(CHAT, {"messages": HI, "response_format": wrong}).fails(400, "response_format")
    monkeypatch.setitem(sys.modules, "llguidance", None)
    body = {"messages": HI, "response_format": {"type": "json_object"}}
    assert "llguidance" in local.post(CHAT, body).fails(400, "response_format")


# --- What is not supported ------------------------------------------------------------------------

TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
UNSUPPORTED = {
    "tools": [TOOL], "functions": [TOOL["function"]], "suffix": "x", "modalities": ["audio"],
    "audio": {"voice": "x"}, "best_of": 2, "prompt_logprobs": 1, "use_beam_search": True,
    "guided_json": {}, "guided_regex": "a", "chat_template": "x",
    "stream_options": {"include_usage": True}, "tool_choice": "required", "n_predict": 5,
    "grammar": "root ::= x", "json_schema": {}, "return_token_ids": True,
}  # fmt: skip
NOTHING = [
    {"tools": [TOOL], "tool_choice": "none"}, {"tools": []}, {"skip_special_tokens": True},
    {"functions": [TOOL], "function_call": "none"}, {"functions": []}, {"suffix": ""},
    {"modalities": ["text"]}, {"best_of": 1}, {"user": "x", "metadata": {}, "store": True},
    {"service_tier": "auto", "parallel_tool_calls": True, "use_beam_search": False, "new": [1]},
]  # fmt: skip


def test_others_go_on_while_a_structure_is_compiled(local):
    """The event loop compiled the structure, and all streams stood still meanwhile."""
    words = [f"word {i * 7919} of many" for i in range(7_000)]
    body = SHORT | {"structured_outputs": {"choice": words}}
    pings, connection = [], local.open()
    local.send("GET", "/health", on=connection)
    with ThreadPoolExecutor(1) as pool:
        start = time.process_time()  # of all threads
        answer = pool.submit(local.post, COMPLETIONS, body)
        while not answer.done():
            before = time.process_time()
            local.send("GET", "/health", on=connection)
            pings.append(time.process_time() - before)
    assert answer.result().status == 200
    assert max(pings) < (time.process_time() - start) / 2


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_what_is_not_supported_says_so(local, path):
    """A field that would have changed the answer was ignored, or one that would not change it was
    an error."""
    body = {"messages": HI} if path == CHAT else {"prompt": PROMPT}
    body |= {"max_tokens": 2, "temperature": 0}
    for field, value in UNSUPPORTED.items():
        assert field in local.post(path, {**body, field: value}).fails(400, field)
    more = {"response_format": {"type": "json_object"}, "structured_outputs": {"choice": ["a"]}}
    assert "structured_outputs" in local.post(path, body | more).fails(400, "response_format")
    if path == CHAT:
        local.post(path, body | {"echo": True}).fails(400, "echo")
        local.post(path, body | {"add_special_tokens": True}).fails(400, "add_special_tokens")
        assert local.post(path, body | {"add_special_tokens": False}).status == 200
    else:
        local.post(path, body | {"echo": True, "max_tokens": False}).fails(400, "max_tokens")
    plain = local.post(path, body).json["choices"]
    for more in NOTHING:
        assert local.post(path, body | more).json["choices"] == plain


def test_options_of_the_template(local, monkeypatch):
    """Qwen3's enable_thinking did not reach the template; an answer that the user had begun was
    begun again."""
    template = "{% for m in messages %}{{ m.role }}:{{ m.content }}{{ m.tool_calls }};{% endfor %}"
    template += (
        "{% if add_generation_prompt %}{{ 'think' if enable_thinking else 'say' }}{% endif %}"
    )
    monkeypatch.setattr(local.engine.tokenizer, "template", template)

    def text(*more, **options):
        body = {"messages": [*HI, *more], "max_tokens": 1, **options}
        ids = []
        with monkeypatch.context() as patch:
            prepare = local.engine.prepare
            patch.setattr(
                local.engine, "prepare", lambda x, *a, **k: ids.append(x) or prepare(x, *a, **k)
            )
            assert local.post(CHAT, body).status == 200
        return TOKENIZER.decode(ids[0])

    assert text() == "user:hi;say"
    assert text(chat_template_kwargs={"enable_thinking": True}) == "user:hi;think"
    assert text(add_generation_prompt=False) == "user:hi;"
    begun = {"role": "assistant", "content": "Well "}
    assert text(begun, continue_final_message=True) == "user:hi;assistant:Well "
    for arguments in (
        '{"a": "b"}',
        {"a": "b"},
        "",
    ):  # a string, as OpenAI has it, was encoded again
        calls = [{"id": "1", "type": "function", "function": {"arguments": arguments}}]
        shown = text({"role": "assistant", "content": None, "tool_calls": calls})
        assert ("{'arguments': {'a': 'b'}}" if arguments else "{'arguments': {}}") in shown
    assert text(chat_template_kwargs={"messages": [], "goes_on": 1, "self": 0}) == "user:hi;say"
    one = {"continue_final_message": True, "add_generation_prompt": False}
    assert text(begun, **one) == "user:hi;assistant:Well "
    for wrong in ({"chat_template_kwargs": 5}, {"continue_final_message": 1},
                  {"continue_final_message": True, "add_generation_prompt": True}):  # fmt: skip
        local.post(CHAT, {"messages": HI, **wrong}).fails(400, [*wrong][-1])


def test_texts_of_tokens(ask):
    """Leading spaces were lost, so that every offset was wrong; or half characters came as
    marks."""
    text = "é😀 你好,  two"
    bias = {"max_tokens": 60, "temperature": 0, "logprobs": 0}
    for i, token in enumerate(TOKENIZER.encode("a" + text)[2:]):
        reply = ask(prompt="a" + text, max_tokens=1, logit_bias={str(token): 100}, logprobs=1)
        (offset,), (word,) = (reply.choices[0].logprobs[k] for k in ("text_offset", "tokens"))
        assert (offset, word) == (0, reply.choices[0].text), i
    choice = ask(**bias).choices[0]
    found = choice.logprobs
    assert "".join(found["tokens"]) == choice.text and " " in found["tokens"][0] + choice.text
    for offset, token in zip(found["text_offset"], found["tokens"], strict=True):
        assert choice.text[offset:].startswith(token)


THOUGHTS = [  # before the reply, the reply, what of it was thought, what is said
    ("", "<think>\nHm, so.\n</think>\n\nYes. <b>", "\nHm, so.\n", "\n\nYes. <b>"),
    ("<think>\n", "Hm < 5</think>Yes.", "Hm < 5", "Yes."),
    ("<think>\n", "Hm ...", "Hm ...", ""),
    ("<think>\n\n</think>\n\n", "Yes.", "", "Yes."),
    ("", "  Yes <think>no</think>", "", "  Yes <think>no</think>"),
    ("", "\n<think>Hm</think>Yes", "Hm", "Yes"),
]  # fmt: skip


@pytest.fixture
def thinker(local, monkeypatch):
    """A server whose tokenizer has a token for "<think>", as models that think have."""
    tokenizer = local.engine.tokenizer
    encode = tokenizer.encode
    one = lambda text, add_special=True: [5] if text == "<think>" else encode(text, add_special)  # noqa: E731
    monkeypatch.setattr(tokenizer, "encode", one)
    monkeypatch.setattr(tokenizer, "chat_stop", ())
    return local


@pytest.mark.parametrize(("before", "made", "thought", "said"), THOUGHTS)
def test_thoughts(thinker, monkeypatch, before, made, thought, said):
    """The answer of a model that thinks contained its thought."""
    # What follows keeps the line break at its end.
    template = "{{ messages[0].content }}" + before + "{{ '' }}"
    monkeypatch.setattr(thinker.engine.tokenizer, "template", template)
    words = re.findall("</?think>|.", made, re.DOTALL)
    text = property(lambda self: "".join(words[: len(self.tokens)]))
    monkeypatch.setattr(sampling.Sequence, "text", text)
    fields = {"messages": HI, "max_tokens": len(words), "ignore_eos": True, "n": 2}
    for choice in thinker.post(CHAT, fields).json["choices"]:
        message = choice["message"]
        assert (message.get("reasoning_content", ""), message["content"]) == (thought, said)
    events = thinker.post(CHAT, fields | {"stream": True}).events[:-1]
    news = [json.loads(event)["choices"][0] for event in events]
    for i in range(2):
        deltas = [new["delta"] for new in news if new["index"] == i]
        assert "".join(delta.get("reasoning_content", "") for delta in deltas) == thought
        assert "".join(delta["content"] for delta in deltas) == said
        assert [delta.get("role") for delta in deltas].count("assistant") == 1
    plain = thinker.post(CHAT, fields | {"reasoning_format": "none"}).json["choices"][0]["message"]
    assert plain["content"] == made and "reasoning_content" not in plain


def test_what_is_no_thought(thinker, monkeypatch):
    """Structured output was taken for a thought, because the template had begun one; so was the
    answer of a plain model that contains "<think>"."""
    template = "{{ messages[0].content }}<think>"
    monkeypatch.setattr(thinker.engine.tokenizer, "template", template)
    fields = {"messages": HI, "structured_outputs": {"choice": ["yes", "no"]}}
    message = thinker.post(CHAT, fields).json["choices"][0]["message"]
    assert message["content"] in ("yes", "no") and "reasoning_content" not in message
    fields = {"messages": HI, "max_tokens": 9}
    assert thinker.post(CHAT, fields).json["choices"][0]["message"]["reasoning_content"]
    begun = {"messages": [{"role": "assistant", "content": "<think>Hm, "}], "max_tokens": 9}
    monkeypatch.setattr(thinker.engine.tokenizer, "template", "{{ messages[0].content }}")
    for goes_on in (True, False):  # a thought that is continued; one that is only mentioned
        reply = thinker.post(CHAT, begun | {"continue_final_message": goes_on})
        assert ("reasoning_content" in reply.json["choices"][0]["message"]) == goes_on
    monkeypatch.undo()  # the mark is several tokens
    monkeypatch.setattr(thinker.engine.tokenizer, "template", template)
    message = thinker.post(CHAT, fields).json["choices"][0]["message"]
    assert message["content"] and "reasoning_content" not in message


def test_more_of_openais_http(local, monkeypatch):
    """Smaller parts of OpenAI's API: a model by its name, a key after `bearer`, cached tokens,
    short errors."""
    assert local.get("/v1/models/shakespeare").json == local.get("/v1/models").json["data"][0]
    for name in ("other", "{id}", "%20id"):
        assert local.get(f"/v1/models/{name}").status == 404
    for _ in range(2):
        usage = local.post(COMPLETIONS, {"prompt": PROMPT * 9, "max_tokens": 1}).json["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert 0 < cached < usage["prompt_tokens"]
    for keys in (["x1"], ["01024"], ["1024"], ["x1", "7000", "-1", "07"]):  # 01024 was called 1024
        body = {"logit_bias": dict.fromkeys([*keys, "7"], 1)}
        message = local.post(COMPLETIONS, body).fails(400, "logit_bias")
        found = re.findall(r"'([x\d-]+)'|(\d+)", message.partition("[")[2])
        assert [a or b for a, b in found] == keys and f", {len(keys)} in all: [" in message
    body = {"logit_bias": {str(2000 + i): 1 for i in range(500)}}
    message = local.post(COMPLETIONS, body).fails(400, "logit_bias")
    assert "2003" in message and "500" in message and len(message) < 250
    monkeypatch.setattr(server_module, "open_engine", None)  # or it would begin to serve
    for origin in ("example.com", "https://\u4f8b.jp"):  # headers have no such letters
        with pytest.raises(ValueError, match=rf"--cors {origin}: must be like http://"):
            server_module.command(parse_args(["--cors", origin]), Ranks(torch.device("cpu")))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {
        "attr": "around.settings.VERSION"
    }
    version = VERSION
    assert importlib.metadata.version("kilolm") == version
    assert local.get("/version").json == {"version": version}
    reply = local.post(CHAT, {"messages": HI, "max_tokens": 1})
    assert reply.json["system_fingerprint"] == version
    message = local.post("/chat/completions", {"messages": HI}).fails(404)
    assert "/v1/chat/completions" in message  # a base URL without /v1
    message = local.post(COMPLETIONS, {"logit_bias": {"20": 1, "7": 101}}).fails(400, "logit_bias")
    assert message.startswith("logit_bias[7] must be ")  # which of them was not said
    assert local.get("/health", **{"X-Request-ID": "mine"}).headers["X-Request-Id"] == "mine"
    assert len({local.get("/health").headers["X-Request-Id"] for _ in range(9)}) == 9
    message = local.post(COMPLETIONS, {"temperature": "x" * 100_000}).fails(400, "temperature")
    assert len(message) < 250
    message = local.post(COMPLETIONS, {"max_tokens": 5000}).fails(
        400, "prompt", "context_length_exceeded"
    )
    assert message.startswith("This model's maximum context length is 1024 tokens.")
    monkeypatch.setitem(vars(local.args), "api_key", "secret")
    assert local.get("/v1/models", Authorization="bearer secret").status == 200
    assert local.get("/v1/models", Authorization="Basic secret").status == 401


# --- Bodies that are wrong ------------------------------------------------------------------------

FLOATS = ("1", True, [], {}, 1e308, -1e5, 10**400)
INTS = ("1", 1.5, 1.0, True, [], {}, -5, 10**30)
WRONG = {
    "temperature": (*FLOATS, -0.1),
    "top_p": (*FLOATS, 0, 1.1),
    "min_p": (*FLOATS, -0.1, 1.1),
    "repetition_penalty": (*FLOATS, 0),
    "presence_penalty": (*FLOATS, 2.1, -2.1),
    "frequency_penalty": (*FLOATS, 2.1, -2.1),
    "top_k": INTS,
    "seed": ("1", 1.5, 1e3, True, [], 2**63, -(2**63) - 1, 10**30),
    "n": (*INTS, 0, 129, 10**9),
    "max_tokens": (*INTS, 0),
    "min_tokens": INTS,
    "logprobs": (*INTS, 21),
    "stop": (["a"] * 17, [""], "", 5, [5], [None], {"a": 1}, True),
    "stop_token_ids": ([-1], ["a"], 5, [1.5], [True], {"a": 1}, "a", [1024], [5] * 1025),
    "logit_bias": ([], "", 5, {"1": 101}, {"1": "x"}, {"1": None}, {"1": True}, {"-1": 1}, [1],
                   {"abc": 1}, {"1" * 5000: 1}, {"1024": 1}, {"\u0663": 1}),
    "ignore_eos": (1, "true", []),
    "stream": (1, 0, "true", []),
    "echo": (1, 0, "true", []),
    "stream_options": (1, "x", [], True, {"include_usage": True}, {"include_usage": 5},
                       {"include_usage": False}, {"continuous_usage_stats": "yes"},
                       {"include_usage": True}, {"include_usage": 0}),
    "cache_salt": (1, True, [], {}),
    "priority": ("1", 1.5, True, 2**40),
    "prompt": (5, {}, [], [[]], [None], [1, "a"], [1.5], [True], [[True]], [["a"]], [[1], 2], [-1],
               [1024], [[1], [1024]], [10**30], ["a"] * 257, True),
}  # fmt: skip
WRONG_CHAT = {
    "messages": (None, [], {}, "hi", 5),
    "messages[0]": (
        [5], ["hi"], [[]], [None], [{}], [{"role": "user"}], [{"content": "a"}],
        [{"role": 5, "content": "a"}], [{"role": None, "content": "a"}],
        [{"role": "user", "content": 5}], [{"role": "user", "content": ["a"]}],
        [{"role": "user", "content": {}}], [{"role": "user", "content": [{"type": "text"}]}],
        [{"role": "user", "content": [{"type": "text", "text": 5}]}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
    ),
    "messages[1]": (
        [*HI, {"role": "user", "content": 5}],
        *([*HI, {"role": "assistant", "tool_calls": calls}]
          for calls in (5, ["f"], [{}], [{"function": {"arguments": "{"}}])),
    ),
    "logprobs": (1, 0, "true", []),
    "top_logprobs": (21, False, "1"),
    "add_generation_prompt": (1, "true"),
    "max_completion_tokens": (0, -1, "1"),
    "temperature": WRONG["temperature"],
    "n": WRONG["n"],
}  # fmt: skip


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_wrong_fields(local, path):
    """A 500, a silent default, or an error that names another field."""
    start = {"messages": HI, "logprobs": True} if path == CHAT else {"prompt": "a"}
    table = WRONG_CHAT if path == CHAT else WRONG
    with contextlib.closing(local.open()) as connection:
        for field, values in table.items():
            for i, value in enumerate(values):
                body = {**start, "max_tokens": 2, "stream": i % 2 > 0}
                body[field.partition("[")[0]] = value
                local.post(path, body, connection).fails(400, field)


def test_null_is_the_default_and_unknown_is_ignored(local):
    """Clients got errors that send all fields, with null for those that are not set, or a new
    one."""
    nothing = dict.fromkeys((*WRONG, "top_logprobs", "model", "prompt"))
    unknown = {"user": "me", "foo": {"bar": [1, None]}, "best_of": 1, "store": True, "tools": []}
    plain = local.post(COMPLETIONS, SHORT).json["choices"]
    assert local.post(COMPLETIONS, nothing | SHORT | unknown).json["choices"] == plain
    body = {**nothing, "messages": HI, **unknown, "max_tokens": 2}
    assert local.post(CHAT, body).json["choices"][0]["logprobs"] is None


def test_errors_of_a_chat_say_what_is_wrong(local):
    """The error did not mention the image, or spoke of None where there was no message;
    log-probabilities came although `logprobs` was not true."""
    image = [{"type": "text", "text": "What is this?"}, {"type": "image_url", "image_url": "x"}]
    messages = [*HI, {"role": "user", "content": image}]
    message = local.post(CHAT, {"messages": messages}).fails(400, "messages[1]")
    assert "'image_url' is not supported" in message
    for nothing in ({"messages": []}, {}):
        message = local.post(CHAT, nothing).fails(400, "messages")
        assert "at least one message" in message and "None" not in message
    for more in ({}, {"logprobs": None}, {"logprobs": False}):
        message = local.post(CHAT, {"messages": HI, "top_logprobs": 3} | more)
        assert "logprobs: true" in message.fails(400, "top_logprobs")
    nothing = {"messages": HI, "top_logprobs": 0, "max_tokens": 1}
    assert local.post(CHAT, nothing).json["choices"][0]["logprobs"] is None


WAYS_OUT = {  # field -> a value that is refused, and what the error says of others
    "grammar": ("root ::= x", "not supported; leave it out"),
    "suffix": ("x", "not supported; leave it out"),
    "tools": ([TOOL], "not supported; leave it out"),
    "stream_options": ({"include_usage": True}, "not supported; leave it out"),
    "best_of": (2, "supported: 1"), "skip_special_tokens": (False, "supported: True"),
    "modalities": (["audio"], "supported: ['text']"), "tool_choice": ("required", "auto"),
    "add_special_tokens": (False, "supported: True"), "use_beam_search": (True, "supported: False"),
    "stop": (5, "must be str | list | tuple"), "prompt": (5, "must be str | list, is 5"),
    "structured_outputs": ({"regex": "a"}, "excludes response_format"),
}  # fmt: skip


@pytest.mark.parametrize("field", WAYS_OUT)
def test_errors_say_what_to_do(local, field):
    """The error said "supported: None" for a field that can only be left out, or it named only one
    of the types that a field may have."""
    value, words = WAYS_OUT[field]
    body = {"prompt": "a", field: value}
    if field == "structured_outputs":
        body["response_format"] = {"type": "json_object"}
        field = "response_format"
    assert words in local.post(COMPLETIONS, body).fails(400, field)


def test_usage_so_far(local):
    """vLLM's clients ask for the usage in each chunk, and got a 400."""
    fields = SHORT | {"n": 2, "max_tokens": 20, "stream": True}
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last, done = local.post(COMPLETIONS, fields | {"stream_options": options}).events
    usages = [json.loads(chunk)["usage"] for chunk in chunks]
    counts = [usage["completion_tokens"] for usage in usages]
    assert counts == sorted(counts) and counts[0] < 10 and len({*counts}) > 5
    assert usages[-1] == json.loads(last)["usage"] and counts[-1] == 40
    assert json.loads(last)["choices"] == [] and done == "[DONE]"
    for usage in usages:
        assert usage["prompt_tokens"] == len(TOKENIZER.encode(PROMPT))
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    for options in ({"continuous_usage_stats": False}, {"include_usage": None}, {"new": 1}):
        events = local.post(COMPLETIONS, fields | {"stream_options": options}).events
        assert not any("usage" in event for event in events)


def test_too_many_choices(local):
    """One request made 258 sequences."""
    message = local.post(COMPLETIONS, {"prompt": ["a"] * 3, "n": 86}).fails(400, "n")
    assert "256" in message
    assert local.post(COMPLETIONS, {"prompt": ["a"] * 2, "n": 128, "max_tokens": 1}).status == 200


@pytest.mark.parametrize(
    ("path", "body", "length"),
    [
        (COMPLETIONS, {"prompt": [5] * 2000}, 2000),
        (COMPLETIONS, {"prompt": [5] * 1009, "max_tokens": 16}, 1009),
        (COMPLETIONS, {"prompt": [[5], [5] * 1024], "max_tokens": 1}, 1024),
        (COMPLETIONS, {"prompt": [5, 5], "max_tokens": 2000}, 2),
        (CHAT, {"messages": [{"role": "user", "content": "no " * 3000}]}, None),
        (CHAT, {"messages": HI, "max_completion_tokens": 1024}, 17),
    ],
)
def test_context_length(local, path, body, length):
    """The error did not say which length is allowed, or the prompt was cut without an error."""
    param = "messages" if path == CHAT else "prompt"
    message = local.post(path, body).fails(400, param, "context_length_exceeded")
    assert {"1024", str(length or 1024)} <= {*re.findall(r"\d+", message)}


def test_context_of_a_small_pool(make_local):
    """A request that could never fit waited for ever."""
    local = make_local(num_blocks=4)  # 64 slots, and the last token needs none
    fields = {"prompt": [5] * 60, "temperature": 0, "ignore_eos": True}
    assert local.post(COMPLETIONS, {**fields, "max_tokens": 5}).status == 200
    answer = local.post(COMPLETIONS, {**fields, "max_tokens": 6})
    assert "65" in answer.fails(400, "prompt", "context_length_exceeded")
    assert local.post(CHAT, {"messages": HI}).status == 200


DEEP = 30_000
NOT_JSON = [
    b"", b'{"n": 1', b"[]", b"null", b'"a"', b"5", b'{"temperature": NaN}', b'{"prompt": "\xff"}',
    b'{"temperature": Infinity}', b'{"logit_bias": {"1": -Infinity}}', b"{'prompt': 'a'}", b"{}{}",
    b"[" * DEEP, b"[" * DEEP + b"]" * DEEP, b'{"a":' * DEEP, b'{"n": ' + b"1" * 5000 + b"}",
    b'{"n": ' + b"[" * DEEP + b"]" * DEEP + b"}",
]  # fmt: skip


def test_not_json(local):
    """A parser's exception became a 500, or NaN a temperature; 1e999 is JSON, and infinite."""
    for path in (COMPLETIONS, CHAT):
        for body in NOT_JSON:
            local.post(path, body).fails(400)
    for field in (b"temperature", b"n", b"seed", b"top_p"):
        for value in (b"1e999", b"-1e999"):
            answer = local.post(COMPLETIONS, b'{"prompt": "a", "%s": %s}' % (field, value))
            answer.fails(400, field.decode())


def test_strange_text(local):
    """A lone surrogate, a NUL or a special token in the text made a 500."""
    for text in ("\ud800", "\0", "\u202e", "</s>", "😀" * 50, "\r\n\r\n"):
        bodies = [
            (COMPLETIONS, {"prompt": text, "stop": text, "max_tokens": 2, "echo": True}),
            (CHAT, {"messages": [{"role": "user", "content": text}], "max_tokens": 2}),
            (CHAT, {"messages": [{"role": text, "content": "a"}], "max_tokens": 2}),
        ]
        assert [local.post(*each).status for each in bodies] == [200] * 3
        local.post(COMPLETIONS, {"model": text}).fails(404, "model", "model_not_found")


def test_nested_as_deep_as_the_parser_allows(local):
    """A value so deeply nested that it could just be parsed could not be printed in the error."""
    statuses: Counter[int] = Counter()
    with contextlib.closing(local.open()) as connection:
        for depth in range(900, 1000, 3):
            nested = b'{"a": ' * depth + b"1" + b"}" * depth
            for body in (b'{"stop": [%s]}', b'{"logit_bias": {"1": %s}}', b'{"model": %s}'):
                statuses[local.post(COMPLETIONS, body % nested, connection).status] += 1
    assert set(statuses) <= {400, 404}


def test_stop_strings_cost_little(local):
    """One request with a stop string of 4 MB took all memory, one of 20 kB stalled everyone."""
    local.post(COMPLETIONS, {**SHORT, "stop": "x" * 257}).fails(400, "stop")
    seconds, text = [], alone(**{**SHORT, "max_tokens": 200})[0].text
    for stop in (None, [text[:255] + chr(65 + i) for i in range(16)]):
        started = time.process_time()
        assert local.post(COMPLETIONS, {**SHORT, "max_tokens": 200, "stop": stop}).status == 200
        seconds.append(time.process_time() - started)
    assert seconds[1] < 0.3 + 2 * seconds[0]


# --- HTTP -----------------------------------------------------------------------------------------


def request_bytes(body: Any = SHORT, head: str = "") -> bytes:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    length = "" if "gth:" in head or "ing:" in head else f"Content-Length: {len(data)}\r\n"
    start = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{start}{length}{head}\r\n".encode() + data


FIRST = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
LAST = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
CHUNKED = "Transfer-Encoding: chunked\r\n"
MALFORMED = {
    "garbage": (b"\x00\xff\x16\x03\x01\r\n\r\n", 400),
    "TLS": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
    "no words": (b"\r\n", 400),
    "one word": (b"GET\r\n\r\n", 400),
    "four words": (b"GET / HTTP/1.1 x\r\n\r\n", 400),
    "HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
    "200 headers": (b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 200 + b"\r\n", 400),
    "one huge line": (b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n", 431),
    "one huge header": (b"GET / HTTP/1.1\r\na: " + b"b" * 70_000 + b"\r\n\r\n", 431),
    # By http.server's own limits, 6 MB of such headers kept it busy for seven seconds.
    "huge together": (b"GET / HTTP/1.1\r\n" + (b"a: " + b"\rb:" * 5000 + b"\r\n") * 90, 431),
    "length missing": (request_bytes(b"").replace(b"Content-Length: 0\r\n", b""), 411),
    "length negative": (request_bytes(head="Content-Length: -5\r\n"), 411),
    "length in letters": (request_bytes(head="Content-Length: five\r\n"), 411),
    "length in Arabic": (request_bytes(head="Content-Length: \xb2\r\n"), 411),
    "length huge": (request_bytes(head="Content-Length: 99999999999\r\n"), 413),
    "length astronomic": (request_bytes(head=f"Content-Length: {'9' * 5000}\r\n"), 411),
    "coded": (request_bytes(b"", "Transfer-Encoding: gzip, chunked\r\n"), 411),
    **{f"chunks, {name}": (request_bytes(data, CHUNKED), status) for name, data, status in (
        ("no size", b"\r\n\r\n", 400), ("a sign", b"-1\r\n{}\r\n0\r\n\r\n", 400),
        ("of another size", b"1\r\n{}\r\n0\r\n\r\n", 400),
        ("nothing", b"0\r\n\r\n", 400),
        ("too large", b"%x\r\n" % 2**31, 413),
        ("too large together", b"1ffff\r\n" + b" " * 0x1ffff + b"\r\n1ffff\r\n", 413),
    )},
    "no type": (request_bytes().replace(b"Content-Type: application/json\r\n", b""), 415),
    "a form": (request_bytes().replace(b"application/json", b"text/plain"), 415),
}  # fmt: skip


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_request(local, case):
    """The server crashed or hung, or left the connection open and read a body as a request."""
    data, status = MALFORMED[case]
    (answer,) = local.raw(data)  # and it closes, though the client would not
    answer.fails(status)
    assert answer.headers["Connection"] == "close"


ODD = [  # what HTTP forbids, and http.server reads in one way or another
    *(b"GET /health" + rest for rest in (
        b"\r\n\r\n", b" HTTP/1.2\r\n\r\n", b"\0 HTTP/1.1\r\n\r\n", b"?\xff HTTP/1.1\r\n\r\n")),
    *(b"GET /health HTTP/1.1\r\n" + head + b"\r\n\r\n" for head in (
        b"Host: localhost\r\nHost: a", b"Host", b": x", b"Content-Length : 5", b"a: b\r\n c",
        b"a: b\n\nContent-Length: 5", b"a: b\rc", b"a: b\0", b"X-Request-Id: a\r\n b: c")),
    *(request_bytes(b"0\r\n\r\n", head) for head in (
        "Content-Length: 5\r\nContent-Length: 2\r\n", "Content-Length: 5, 5\r\n",
        "Content-Length: +5\r\n", f"Content-Length: 5\r\n{CHUNKED}", CHUNKED * 2,
        CHUNKED.replace(" ", "\x0b"))),
]  # fmt: skip


@pytest.mark.parametrize("data", ODD)
def test_odd_request(local, data, capfd):
    """An odd head made a traceback or a second answer."""
    (answer,) = local.raw(data + FIRST)
    assert answer.status < 500 and answer.headers["Connection"] == "close"
    assert capfd.readouterr().err.count("\n") == 1  # the log's line


@pytest.mark.parametrize("line", ["POST /nothing", "POST /health", "401", "GET /health"])
def test_a_body_is_never_a_request(local, line, monkeypatch):
    """Any web page can post a text to this server, and the text was executed as a request."""
    if line == "401":
        line = f"POST {COMPLETIONS}"
        monkeypatch.setitem(vars(local.args), "api_key", "secret")
    data = f"{line} HTTP/1.1\r\nContent-Type: text/plain\r\nContent-Length: {len(FIRST)}\r\n\r\n"
    (answer,) = local.raw(data.encode() + FIRST + LAST)
    assert answer.status in (200, 404, 405, 401) and answer.headers["Connection"] == "close"
    chunked = FIRST[:-2] + b"Transfer-Encoding: chunked\r\n\r\n23\r\n" + FIRST + b"\r\n0\r\n\r\n"
    assert len(local.raw(chunked)) == 1


def test_clients_that_are_not_usual(local):
    """The limits were off by one, or refused what real clients send: header names in another case,
    a charset beside the type, `Expect` before a long body."""
    for head in (b"a: b\r\n" * 90, b"a: " + b"b" * 60_000 + b"\r\n"):
        assert local.raw(LAST[:-2] + head + b"\r\n")[0].status == 200
    room = 200_000 - len(json.dumps({"user": "", "max_tokens": 1}))  # --max-body
    for size, status in ((room, 200), (room + 1, 413)):
        assert local.post(COMPLETIONS, {"user": "a" * size, "max_tokens": 1}).status == status
    data = request_bytes(head="CONNECTION: CLOSE\r\n").replace(b"Content-", b"cONTENT-")
    for kind in (b"application/json; charset=utf-8", b"Application/JSON", b" application/json "):
        assert local.raw(data.replace(b"application/json", kind))[0].status == 200
    assert local.get("/health?a=b").status == 200
    too_long = request_bytes(b"", "Expect: 100-continue\r\nContent-Length: 999999999\r\n")
    message = local.raw(too_long)[0].fails(413)
    assert message == "the body has 999999999 bytes, --max-body is 200000"


def test_http_1_0(local):
    """nginx, which speaks HTTP/1.0 by default, got a 400, or chunks that it cannot read."""
    old = request_bytes().replace(b"HTTP/1.1", b"HTTP/1.0")
    stream = request_bytes(SHORT | {"stream": True}).replace(b"HTTP/1.1", b"HTTP/1.0")
    text = alone(**SHORT)[0].text
    whole, streamed = (local.raw(data + FIRST)[0] for data in (old, stream))
    for each in (whole, streamed):
        assert each.headers["Connection"] == "close" and "Transfer-Encoding" not in each.headers
    assert whole.json["choices"][0]["text"] == text
    *events, last = (json.loads(each) for each in streamed.events[:-1])
    assert "".join(each["choices"][0]["text"] for each in (*events, last)) == text
    assert streamed.events[-1] == "[DONE]"


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
def test_interim_answers(local, version):
    """A client that had closed its sending half was sent 100 Continue ten times a second, even over
    HTTP/1.0, which has no interim answers; and so was a client whose body is refused."""
    expect = "Expect: 100-continue\r\n"
    too_long = request_bytes(b"", f"{expect}Content-Length: 999999999\r\n")
    chunks = request_bytes(b"0\r\n\r\n", expect + CHUNKED)
    plain, expecting = request_bytes(SHORT), request_bytes(SHORT, expect)
    cases = ((plain, 200, 0), (expecting, 200, 1), (too_long, 413, 0), (chunks, 400, 1))
    for data, status, most in cases:
        with socket.create_connection(("127.0.0.1", local.port), 20) as connection:
            connection.sendall(data.replace(b"HTTP/1.1", b"HTTP/" + version))
            connection.shutdown(socket.SHUT_WR)
            found = receive(connection)
        assert found.count(b"100 Continue") == (most if version == b"1.1" else 0)
        (answer,) = parse(found)
        assert answer.status == status
        assert found.count(b"HTTP/1.1 ") == 1 + found.count(b"100 Continue")


def test_head(local):
    """The answer to HEAD had a body, or did not end."""
    for path in ("/health", "/", "/metrics", "/v1/models", "/engine", "/nothing", COMPLETIONS):
        head = local.raw(FIRST.replace(b"GET /health", f"HEAD {path}".encode()))[0]
        assert head.status == {"/nothing": 404, COMPLETIONS: 405}.get(path, 200)
        assert not head.data


def test_an_answer_before_the_body_has_come(local):
    """The connection was reset, and the 413 in it was lost."""
    head = request_bytes(b"", "Content-Length: 50000000\r\n")
    with socket.create_connection(("127.0.0.1", local.port), 10) as connection:
        connection.sendall(head)
        for _ in range(40):
            connection.sendall(b" " * 2**18)
        time.sleep(0.2)
        connection.shutdown(socket.SHUT_WR)
        parse(receive(connection))[0].fails(413)


def test_bodies_in_chunks(local):
    """A client that does not know a body's length beforehand got a 411."""
    data = json.dumps(SHORT).encode()
    pieces = [data[:1], data[1:20], data[20:]]
    body = b"".join(b"%X\r\n%s\r\n" % (len(each), each) for each in (*pieces, b""))
    for head in (CHUNKED, CHUNKED.lower(), CHUNKED.replace("\r", " \r")):
        (answer,) = local.raw(request_bytes(body, head))
        assert answer.json["choices"][0]["text"] == alone(**SHORT)[0].text
    with contextlib.closing(local.open()) as connection:
        headers = {"Content-Type": "application/json"}
        connection.request("POST", COMPLETIONS, iter(pieces), headers)
        assert read(connection).status == 200


def test_a_client_that_leaves_while_nothing_is_sent(make_local):
    """While a call is written, nothing is sent, so nothing told that the client had left."""
    long = {
        "type": "object",
        "properties": {"s": {"type": "string", "minLength": 3000}},
        "required": ["s"],
    }
    call = {"type": "function", "function": {"name": "f", "parameters": long}}
    body = {"messages": HI, "tools": [call], "tool_choice": "required", "stream": True, "n": 8}
    local = make_local("--tool-format", "hermes", num_blocks=600)
    connection = local.begin(body, CHAT)
    job, *_ = until(lambda: [*local.engine.running])
    connection.close()
    until(lambda: job.finish_reason)
    assert job.finish_reason == "abort"


def test_a_stream_that_has_nothing_to_say(local, monkeypatch):
    """While a call is written, a proxy saw nothing for a minute, and answered with a 504."""
    monkeypatch.setattr(server_module, "KEEP_ALIVE_S", 0)
    some = {"type": "object", "properties": {"s": {"type": "string", "minLength": 50}}}
    call = {"type": "function", "function": {"name": "f", "parameters": some | {"required": ["s"]}}}
    more = {"tools": [call], "tool_choice": "required", "max_tokens": 20}
    monkeypatch.setattr(local.server.api, "form", FORMS["hermes"])
    response = local.begin({"messages": HI, "stream": True, **more}, CHAT).getresponse()
    comments, _, events = response.read().partition(b"data: ")
    assert response.status == 200 and b"[DONE]" in events
    assert comments and not comments.strip(b":\n")
    with local.openai() as client:
        parts = client.chat.completions.create(
            model="shakespeare", messages=HI, stream=True, max_tokens=20, extra_body=more
        )
        assert [part.choices[0].finish_reason for part in parts][-1] == "length"


def test_a_client_that_says_no_more(local):
    """A client that closes its sending half, as `nc -N` does, looks like one that has left. In a
    stream it is sent all the same, and what is sent tells. Who waits in silence has left."""
    for body, statuses in ((SHORT | {"stream": True}, [200]), (LONG, [])):
        before = local.metrics()
        with socket.create_connection(("127.0.0.1", local.port), 20) as connection:
            connection.sendall(request_bytes(body))
            connection.shutdown(socket.SHUT_WR)
            assert [answer.status for answer in parse(receive(connection))] == statuses
        local.settle()
        assert local.metrics()[ABORTED] - before[ABORTED] == (not statuses)


@pytest.mark.parametrize("more", [b"", b"G", LAST])
@pytest.mark.parametrize("fields", [LONG, LONG | {"stream": True}])
def test_a_client_leaves_with_bytes_unread(local, fields, more):
    """Bytes that a client had sent after its request hid that it had left, so the engine went
    on."""
    with socket.create_connection(("127.0.0.1", local.port), 20) as connection:
        connection.sendall(request_bytes(fields))
        job, *_ = until(lambda: [*local.engine.running])
        connection.sendall(more)
    assert until(lambda: job.finish_reason) == "abort"


def test_who_waits_to_be_told_to_go_on(local):
    """curl waits a second before it sends a long body."""
    data = request_bytes(head="Expect: 100-continue\r\n")
    head, _, body = data.partition(b"\r\n\r\n")
    with socket.create_connection(("127.0.0.1", local.port), 10) as connection:
        connection.sendall(head + b"\r\n\r\n")
        assert connection.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(body)
        assert parse(receive(connection))[0].status == 200


def test_nobody_reads_for_ever(make_local, monkeypatch):
    """64 clients that asked for streams and read nothing kept all others out."""
    monkeypatch.setattr(front.Front, "timeout", 0.5)
    local, lazy = make_local(), []
    fields = {**LONG, "prompt": "a", "logprobs": 20, "n": 8, "stream": True}
    for _ in range(2):
        lazy.append(socket.socket())
        lazy[-1].setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        lazy[-1].connect(("127.0.0.1", local.port))
        lazy[-1].sendall(request_bytes(fields))
    until(lambda: local.engine.running)
    until(lambda: not local.server.busy, 60)
    local.settle()
    # Each has 8 sequences, of which some can end before the buffers are full on a busy machine.
    assert local.server.metrics.ended["request_success_total"]['{finished_reason="abort"}'] > 8
    for each in lazy:
        each.close()


@pytest.mark.parametrize(
    "data", [b"", b"GET / HTTP", *(request_bytes()[:end] for end in (30, 60, -5)), b"\xff" * 99]
)
def test_client_closes_too_early(local, data, capfd):
    """The server waited for the rest of a body, or printed an error when the client had left."""
    with socket.create_connection(("127.0.0.1", local.port)) as connection:
        connection.sendall(data)
    local.get("/health")
    assert capfd.readouterr().err == "'GET /health' 200\n"


def test_slow_clients(local, monkeypatch, capfd):
    """A request that came byte by byte was not answered, or delayed others; a client that sent
    nothing more was kept for ever."""
    data = request_bytes(head="Connection: close\r\n")
    with socket.create_connection(("127.0.0.1", local.port), 20) as slow:
        for i in range(len(data) - 1):
            slow.sendall(data[i : i + 1])
        local.works()
        slow.sendall(data[-1:])
        assert parse(receive(slow))[0].status == 200
    capfd.readouterr()
    monkeypatch.setattr(front.Front, "timeout", 0.5)
    assert local.raw(b"") == local.raw(b"GET / HTTP/1.1\r\n") == []
    assert local.raw(request_bytes()[:-1]) == []
    assert len(local.raw(FIRST)) == 1
    assert capfd.readouterr().err == "'GET /health' 200\n"


def test_client_that_does_not_read(local):
    """A stream that nobody reads held up the others, or lost its text."""
    fields = {"prompt": PROMPT, "max_tokens": 120, "logprobs": 20, "seed": 1, "ignore_eos": True}
    with socket.socket() as lazy:
        lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        lazy.settimeout(20)
        lazy.connect(("127.0.0.1", local.port))
        lazy.sendall(request_bytes({**fields, "stream": True}, "Connection: close\r\n"))
        until(lambda: local.engine.queue)
        local.works()
        until(lambda: not local.engine.queue, 30)
        (answer,) = parse(receive(lazy))
    *chunks, last = answer.events
    found = "".join(json.loads(chunk)["choices"][0]["text"] for chunk in chunks)
    assert last == "[DONE]" and found == alone(**fields)[0].text


def test_a_long_prompt_holds_nobody_up(make_local):
    """While a text of megabytes was encoded, no stream moved."""
    local, waits = make_local("--max-body", str(2**22)), []
    began = time.process_time()  # of all threads
    long = local.begin({"prompt": "hello there " * 100_000, "max_tokens": 5})
    with contextlib.closing(local.open()) as connection:
        while not select.select([long.sock], [], [], 0.005)[0]:
            started = time.process_time()
            assert local.send("GET", "/health", on=connection).status == 200
            waits.append(time.process_time() - started)
    read(long).fails(400, "prompt", "context_length_exceeded")
    long.close()
    assert len(waits) > 5 and max(waits) < (time.process_time() - began) / 2


def test_paths_and_methods(local):
    """A wrong path or method was a 500, or a 404 in another form."""
    for path in ("/v1", "/v1/completions/", "/../etc/passwd", "/page.html", "/v1/embeddings"):
        local.get(path).fails(404)
        local.post(path, {}).fails(404)
    for method in ("GET", "PUT", "DELETE", "OPTIONS", "TRACE"):
        assert "POST" in local.send(method, CHAT).fails(405)
    for path in ("/", "/health", "/metrics", "/engine", "/v1/models"):
        answer = local.post(path, {})
        answer.fails(405)
        assert answer.headers["Allow"]


def test_the_page_may_load_nothing_else(local, monkeypatch, tmp_path):
    """A page that shows a model's text could be made to load a script of another host, or be shown
    in another's frame; where it could not be read, the connection broke without a word."""
    answer = local.get("/")
    text = answer.data.decode()
    assert text == (ROOT / "around/api/page.html").read_text()
    assert answer.headers["Content-Type"].startswith("text/html")
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)[1]
    assert {"default-src 'none'", "connect-src 'self'"} <= {*policy.split("; ")}
    for path in ("/", "/health", "/nothing"):
        headers = local.get(path).headers
        assert (headers["X-Frame-Options"], headers["Cache-Control"]) == ("DENY", "no-store")
        assert headers["X-Content-Type-Options"] == "nosniff"
    monkeypatch.setattr(front, "PAGE", tmp_path / "page.html")
    local.get("/").fails(500)


# --- Keys, queues, origins ------------------------------------------------------------------------


def test_names_of_this_host(local, monkeypatch):
    """Another site's page could use the model, by a name that points here (DNS rebinding)."""
    mine = ("localhost", "LOCALHOST:8000", "localhost ", "127.0.0.1:1", "127.1.2.3", "[::1]:8000",
            "[::1]", "LOCALHOST.", "localhost.:80", "x.localhost", "a.B-1.localhost.")  # fmt: skip
    others = ("evil.test", "127.0.0.1.evil.test", "localhost.evil.test:80", "", "1.2.3.4", "::2",
              "evil-localhost", ".localhost", "x..localhost", "localhost..", ".")  # fmt: skip
    for names, status in ((mine, 200), (others, 403)):
        for name in names:
            assert local.get("/health", Host=name).status == status, name
    assert local.raw(LAST.replace(b"Host: localhost\r\n", b""))[0].status == 200
    message = local.get("/health", Host="chat.test").fails(403)  # as from a proxy
    assert all(word in message for word in ("'chat.test'", "Host: localhost", "--host"))
    monkeypatch.setitem(vars(local.args), "host", "0.0.0.0")  # who opens it may give it any name
    assert local.get("/health", Host="a.test").status == 200


def test_api_key(local, monkeypatch):
    """A path did not need the key, or the beginning of the key was accepted."""
    monkeypatch.setitem(vars(local.args), "api_key", "secrét")
    for path in ("/", "/health"):
        assert local.get(path).status == 200
    right, wrong = "Bearer secrét".encode().decode("latin-1"), "Bearer \xff"
    for path in ("/metrics", "/engine", "/v1/models", COMPLETIONS, CHAT):
        method = "POST" if path in (COMPLETIONS, CHAT) else "GET"
        local.send(method, path).fails(401, code="invalid_api_key")
        for key in ("", "Bearer", right[:-1], right + "s", "Basic secrét", wrong):
            local.send(method, path, Authorization=key).fails(401, code="invalid_api_key")
    for path in ("/metrics", "/v1/models"):
        assert local.get(path, Authorization=right).status == 200
    assert local.post(COMPLETIONS, SHORT, Authorization=right).status == 200


def test_more_clients_than_threads(local, monkeypatch):
    """Each client had a thread, however many there were."""

    def num_served() -> int:
        return sum("(Connection)" in thread.name for thread in threading.enumerate())

    until(lambda: not num_served())
    monkeypatch.setattr(front, "MAX_THREADS", threading.active_count() + 2)
    one, other, *more = (local.open() for _ in range(9))
    for each in (one, other):
        each.connect()
    until(lambda: num_served() == 2)
    for each in more:  # these wait
        each.request("GET", "/health")
    assert not select.select([each.sock for each in more], [], [], 0.5)[0]
    assert num_served() == 2
    one.close()
    assert [read(each).status for each in more] == [200] * 7
    for each in (other, *more):
        each.close()
    until(lambda: not num_served())


def test_no_thread_is_left(local, monkeypatch, capfd):
    """The server ended where the system starts no more threads, or said nothing of it."""

    def start(thread):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(front.Thread, "start", start)
        with pytest.raises(ConnectionError):
            local.get("/health")
    assert capfd.readouterr().err == "can't start new thread\n"
    local.works()


@pytest.mark.slow
def test_more_clients_than_descriptors(tmp_path):
    """Each of hundreds of failures to accept one was tried again, on its own, a second later: they
    multiplied, to 700,000 tracebacks and a server that did nothing else."""
    few = ("bash", "-c", 'ulimit -n 64; exec "$@"', "bash", sys.executable)
    with Process(tmp_path, program=few) as server, contextlib.ExitStack() as clients:
        for _ in range(100):
            clients.enter_context(socket.create_connection(("127.0.0.1", server.port)))

        def failures() -> list[str]:
            return server.log.read_text().splitlines()[2:]  # after the cache's size and the address

        began = time.monotonic()
        until(lambda: len(failures()) > 3)
        time.sleep(1)
        assert len(failures()) < 4 + 2 * (time.monotonic() - began)
        assert all("Too many open files" in line for line in failures())
        clients.close()
        server.works()


@pytest.mark.slow
def test_through_nginx(local, tmp_path, monkeypatch):
    """With its defaults, nginx passed on a stream of 60 tokens in 4 pieces; and as it speaks
    HTTP/1.0, the server did not notice that the client had left."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    places = "".join(f"{kind}_temp_path {tmp_path}/{kind};" for kind in kinds)
    (tmp_path / "nginx.conf").write_text(f"""
        daemon off; master_process off; pid {tmp_path}/pid; error_log stderr; events {{}}
        http {{ access_log off; {places} server {{ listen 127.0.0.1:{port};
            location / {{ proxy_pass http://127.0.0.1:{local.port}; }} }} }}""")
    command = [program("nginx"), "-p", tmp_path, "-c", tmp_path / "nginx.conf"]
    nginx, proxy, step = subprocess.Popen(command), Client(), local.engine.step
    proxy.port = port
    try:
        until(lambda: accepts(port))
        monkeypatch.setattr(local.engine, "step", lambda: time.sleep(0.02) or step())
        stream, times = proxy.stream(SHORT | {"max_tokens": 60}), []
        while stream.read1():
            times.append(time.monotonic())
        assert sum(after - before > 0.01 for before, after in itertools.pairwise(times)) > 15
        connection = proxy.begin(LONG)
        job, *_ = until(lambda: [*local.engine.running])
        connection.close()
        assert until(lambda: job.finish_reason) == "abort"
        proxy.works()
    finally:
        nginx.terminate()
        nginx.wait()


def test_queue_full(local, monkeypatch):
    """The queue grew without bound; a full one stayed full."""
    fields = {"prompt": "a", "max_tokens": 250, "ignore_eos": True}
    running = [local.begin(fields) for _ in range(8)]  # all that run at once
    until(lambda: len(local.engine.running) == 8)
    monkeypatch.setitem(vars(local.args), "max_queue", 3)
    waiting = [local.begin({**fields, "prompt": ["a", "b"]})]
    gauges = until(lambda: (m := local.metrics())["num_requests_waiting"] == 2 and m)
    assert gauges["num_requests_running"] == 8 and 0 < gauges["kv_cache_usage_perc"] <= 1
    answer = local.post(COMPLETIONS, {**fields, "prompt": ["a", "b"]})  # one too many
    assert re.search(r"\b4\b.*\b3\b", answer.fails(429))
    assert answer.headers["Retry-After"] == "1"
    waiting.append(local.begin(fields))
    until(lambda: len(local.engine.waiting) == 3)
    local.post(CHAT, {"messages": HI}).fails(429)
    assert "Retry-After" not in local.get("/health").headers
    for connection in running + waiting:
        connection.close()
    local.settle()
    local.works()


def test_only_requests_fill_the_queue(local, monkeypatch):
    """While the engine was busy, snapshots for the page that waited in the inbox were counted as
    requests, and a body of many prompts as one."""
    monkeypatch.setitem(vars(local.args), "max_queue", 0)
    go_on = threading.Event()
    for _ in range(9):
        local.server.inbox.put(go_on.wait)
    try:
        connection = local.begin({**SHORT, "prompt": ["a"] * 8})
        until(lambda: len(local.server.incoming) == 8)  # as many as may run at once
        local.post(COMPLETIONS, SHORT).fails(429)
    finally:
        go_on.set()
    assert read(connection).status == 200
    assert not local.server.incoming


def test_localhost_without_ipv6(monkeypatch):
    """In a container, localhost has ::1 though IPv6 is off: the server did not start."""
    create = socket.create_server

    def without(address, **options):
        if options["family"] == socket.AF_INET6:
            raise OSError(errno.EADDRNOTAVAIL, "Cannot assign requested address")
        return create(address, **options)

    monkeypatch.setattr(socket, "create_server", without)
    (listener,) = listen_at("localhost", 0)
    listener.close()
    with pytest.raises(OSError, match="assign"):
        listen_at("::1", 0)


def test_cors(local, monkeypatch):
    """Any web page could read the answers, or the permitted one could not."""
    assert not [name for name in local.get("/health").headers if "Access" in name]
    local.send("OPTIONS", COMPLETIONS).fails(405)
    monkeypatch.setitem(vars(local.args), "cors", "http://a.test")
    monkeypatch.setitem(vars(local.args), "api_key", "secret")
    answer = local.send("OPTIONS", COMPLETIONS)  # a browser sends no key with it
    assert answer.status == 200
    assert answer.headers["Access-Control-Allow-Headers"] == "Authorization, *"
    key = {"Authorization": "Bearer secret"}
    stream = local.post(COMPLETIONS, SHORT | {"stream": True}, **key)
    for each in (answer, local.get("/health"), local.get("/v1/models"), stream):
        assert each.headers["Access-Control-Allow-Origin"] == "http://a.test"


def test_addresses(make_local, monkeypatch):
    """The printed address was not one that a browser takes; or of the two addresses of a name only
    one was served."""
    if not socket.has_ipv6:
        pytest.skip("needs IPv6")
    said: list[str] = []
    monkeypatch.setattr(front, "say", said.append)
    for host, shown in (("::1", r"\[::1\]"), ("localhost", r"(127.0.0.1|\[::1\])")):
        local = make_local("--host", host)
        want = rf"serving shakespeare on http://{shown}:{local.port}"
        until(lambda want=want: any(re.fullmatch(want, line) for line in said))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    local = make_local("--host", "localhost", "--port", str(port))
    known = {info[4][0] for info in socket.getaddrinfo("localhost", port, type=socket.SOCK_STREAM)}
    for address in known:
        socket.create_connection((address, port), 5).close()


def test_errors_at_the_start(capfd, tmp_path, monkeypatch):
    """A port in use or a missing file made a traceback; an empty key, as from a variable that is
    not set, let everybody in."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        for options in (["--port", port], ["--checkpoint", str(tmp_path)], ["--kv-memory", "9"],
                        ["--port", "99999"], ["--api-key", ""], ["--host", ""],
                        ["--max-queue", "-1"], ["--max-body", "-1"]):  # fmt: skip
            assert server_module.main(["--device", "cpu", "--kv-memory", "16e6", *options]) == 2
            error = capfd.readouterr().err
            assert error.count("server.py: error: ") == 1 and "Traceback" not in error
        with monkeypatch.context() as patch:  # a large model was loaded before the port was tried
            patch.setattr(server_module, "open_engine", lambda *_: pytest.fail("it was loaded"))
            assert server_module.main(["--device", "cpu", "--port", port]) == 2
    with pytest.raises(SystemExit) as stop:
        parse_args(["--kv-memory", "much"])
    assert stop.value.code == 2
    served: list[server_module.ServerArgs] = []

    def serving(engine, args, listeners):
        for listener in listeners:
            listener.close()
        served.append(args)

    for name, fake in (("open_engine", MagicMock()), ("cache_size", str), ("Server", serving),
                       ("serve", lambda server: 0)):  # fmt: skip
        monkeypatch.setattr(server_module, name, fake)
    for key, options, status in (("a", [], 0), ("a", ["--api-key", "b"], 0), ("", [], 2)):
        monkeypatch.setenv("KILOLM_API_KEY", key)
        assert server_module.main(["--port", "0", *options]) == status
    assert [args.api_key for args in served] == ["a", "b"]
    assert served[0].host == "127.0.0.1"  # nobody else, unless told so


# --- Clients that go ------------------------------------------------------------------------------


LATENCIES = ("e2e_request_latency", "time_to_first_token")


def test_clients_vanish(make_local):
    """Sequences of clients that had left ran on, and kept their blocks."""
    local, doomed = make_local(num_blocks=4096, max_num_seqs=64, max_num_batched_tokens=512), []

    def send(number: int) -> None:
        for _ in range(number):
            i = len(doomed)
            data = request_bytes({**LONG, "stream": i % 3 > 0, "n": 1 + (i % 50 == 0)})
            doomed.append(socket.create_connection(("127.0.0.1", local.port), 10))
            doomed[-1].sendall(data)

    def vanish(connections: list[socket.socket]) -> None:
        for i, connection in enumerate(connections):
            if i % 2:  # with a reset
                reset = struct.pack("ii", 1, 0)
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
            connection.close()

    send(62)  # the first and the 51st run two sequences: every place is taken
    until(lambda: len(local.engine.running) == 64)
    send(38)
    until(lambda: len(local.engine.waiting) == 38)
    vanish(doomed[62:])  # those that wait leave first, or they would begin in the others' places
    until(lambda: not local.engine.waiting)
    vanish(doomed[:62])
    local.settle()
    after = local.metrics()
    assert after[ABORTED] == 102
    # A request that ended before its first token has no latency. It counted as one of 0 s.
    counts = [after[f"{name}_seconds_count"] for name in LATENCIES]
    assert counts[0] == counts[1] <= 64
    for gauge in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert after[gauge] == 0
    until(lambda: not local.server.busy)
    local.works()


def test_what_has_ended_is_freed(local, monkeypatch):
    """Requests and their sequences stayed until Python looked for cycles: four of them, each with
    590,000 stop_token_ids for 64 sequences, took 4 GB."""
    alive, prepare = [], local.engine.prepare

    def watch(*args: Any, **options: Any) -> Any:
        request = prepare(*args, **options)
        alive.extend(weakref.ref(each) for each in (request, *request.outputs))
        return request

    monkeypatch.setattr(local.engine, "prepare", watch)
    gc.collect()
    gc.disable()
    try:
        for body in (
            SHORT,
            SHORT | {"n": 3, "stream": True},
            SHORT | {"echo": True, "logprobs": 1},
        ):
            assert local.post(COMPLETIONS, body).status == 200
        for body in (LONG, LONG | {"stream": True}):
            for linger in (0, 1):  # with a reset
                with socket.create_connection(("127.0.0.1", local.port), 20) as connection:
                    reset = struct.pack("ii", linger, 0)
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
                    connection.sendall(request_bytes(body))
                    until(lambda: local.engine.running)
                until(lambda: not local.engine.queue)
        assert len(alive) == 16
        local.engine.ran.clear()  # it holds the last step's sequences until the next step
        until(lambda: not any(each() for each in alive))
    finally:
        gc.enable()


def test_outputs_share_the_ids_that_end_them(local):
    """Each of the n outputs had its own set of all ids that end it."""
    params = SamplingParams(n=9, stop_token_ids=[*range(1000)])
    assert len({id(job.end_ids) for job in local.engine.prepare([5], params).outputs}) == 1


def test_one_goes_and_the_others_stay(local):
    """When a client left, the requests of others were aborted."""
    fields = {"prompt": PROMPT, "seed": 3, "max_tokens": 600, "ignore_eos": True}
    stays = local.begin(fields)
    until(lambda: local.engine.running)
    for body in ({**fields, "stream": True}, fields, {**fields, "prompt": ["a", "b"], "n": 2}):
        goes = local.begin(body)
        until(lambda: len(local.server.owners) > 1)
        goes.close()
        until(lambda: len(local.server.owners) == 1)
    assert read(stays).json["choices"][0]["text"] == alone(**fields)[0].text
    stays.close()


def test_log(local, capfd):
    """The log did not show the requests, or it contained a prompt."""
    local.works()
    local.post(COMPLETIONS + "?key=x", {"n": 0})
    local.raw(b"\r\n\r\n")
    local.raw(b"\x16\x03\x01")
    local.get("/engine")  # which a page asks for ten times a second
    local.get("/engine", Host="a.test")
    expected = [f"'POST {COMPLETIONS}' 200", f"'POST {COMPLETIONS}' 400", "'' 400", "'TLS' 400"]
    assert capfd.readouterr().err.splitlines() == [*expected, "'GET /engine' 403"]


def test_a_log_that_nobody_reads(local, monkeypatch):
    """`server.py 2>&1 | head`: every answer was empty."""

    class Closed:
        def write(self, text):
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stderr", Closed())
    local.works()
    assert local.get("/health").json == {"status": "ok"}


# --- An engine that breaks ------------------------------------------------------------------------


@pytest.fixture
def printed(monkeypatch):
    """The exceptions whose tracebacks were printed. Python 3.11 may not print two at a time."""
    kinds: list[str] = []
    print_exc = lambda: kinds.append(sys.exc_info()[0].__name__)  # noqa: E731
    monkeypatch.setattr(server_module.traceback, "print_exc", print_exc)
    return kinds


def test_step_fails(make_local, printed):
    """One failure ended the engine for good, or left a client waiting."""
    local = make_local()
    local.engine.runner = Broken(local.engine.runner, 12)
    stream, *others = local.stream(LONG), local.begin(LONG), local.begin(LONG | {"n": 3})
    answer = Answer(200, {}, stream.read())
    assert answer.fails(500) == "a step of the engine failed"
    assert sum('"error"' in event for event in answer.events) == 1  # and no [DONE] after it
    for connection in others:
        read(connection).fails(500)
        connection.close()
    local.settle()
    local.works()
    counts = local.server.metrics.ended["request_success_total"]
    assert {sample[18:-2]: n for sample, n in counts.items()} == {"length": 1, "abort": 5}
    assert printed == ["RuntimeError"]


def test_nan_is_the_fault_of_one(make_local):
    """A request whose logits were NaN ended all others, or was answered as if it had ended well."""
    local, bad = make_local(), TOKENIZER.encode("K")[-1]
    breaks = lambda module, args, y: y.masked_fill((args[0] == bad)[..., None], math.nan)  # noqa: E731
    with model().embed_tokens.register_forward_hook(breaks):
        fields = {"prompt": "the ", "temperature": 0, "logit_bias": {str(bad): -100}}
        other = local.begin({**fields, "max_tokens": 100})
        draws_it = {**fields, "logit_bias": {str(bad): 100}, "stream": True, "n": 3}
        for body in ({"prompt": "K"}, draws_it):
            message = local.post(COMPLETIONS, body).fails(500)
            assert message == sampling.BROKEN
        assert read(other).json["usage"]["completion_tokens"] == 100
        other.close()
        local.settle()
        counts = local.server.metrics.ended["request_success_total"]
        assert counts['{finished_reason="error"}'] == 4
        assert local.post(COMPLETIONS, fields).status == 200


def test_a_rank_is_lost(make_local, printed, monkeypatch):
    """Requests waited for an engine that would never run again."""
    local, died = make_local(), []
    monkeypatch.setattr(threading, "excepthook", lambda args: died.append(args.exc_type))
    local.engine.runner = Broken(local.engine.runner, 12, ConnectionError)
    stream, other = local.stream(LONG), local.begin(LONG)
    Answer(200, {}, stream.read()).fails(500)
    read(other).fails(500)
    local.listening.join(5)
    assert not local.listening.is_alive() and not local.running.is_alive()
    assert died == [ConnectionError] and not printed  # main() has one line for it


def test_a_bug_of_ours(local, monkeypatch, printed):
    """The client was told what only the log should say."""

    def boom(*_: Any) -> None:
        raise KeyError("/root/secret.py at 0x7f00deadbeef")

    with monkeypatch.context() as patch:
        patch.setattr(local.server.api, "prepare", boom)
        assert local.post(COMPLETIONS, SHORT).fails(500) == "internal error"
    assert printed == ["KeyError"]
    local.works()


# --- The end --------------------------------------------------------------------------------------


def test_the_command_line_and_a_signal(tmp_path):
    """An option of the command line had no effect; or a text broke off when the server was told to
    stop."""
    options = ("--cors", "http://a", "--served-model-name", "mine", "--max-seq-len", 256,
               "--max-num-seqs", 2, "--max-queue", 1, "--max-body", 1000,
               "--kv-memory", "16e6")  # fmt: skip
    with Process(tmp_path, *options, KILOLM_API_KEY="secret") as server:
        key = {"Authorization": "Bearer secret"}
        (listed,) = server.get("/v1/models", **key).json["data"]
        assert (listed["id"], listed["max_model_len"]) == ("mine", 256)
        server.get("/v1/models").fails(401, code="invalid_api_key")
        reply = server.post(COMPLETIONS, {**SHORT, "model": "mine"}, **key).json
        assert reply["choices"][0]["text"] == alone(**SHORT)[0].text
        server.post(COMPLETIONS, {"prompt": "a" * 1000}, **key).fails(413)
        server.post(COMPLETIONS, {"prompt": ["a"] * 4}, **key).fails(429)
        idle, busy = server.open(), server.open()
        assert server.get("/health").json == {"status": "ok"}
        idle.connect()
        body = json.dumps({**LONG, "max_tokens": 200, "n": 4, "stream": True})
        busy.request("POST", COMPLETIONS, body, key | {"Content-Type": "application/json"})
        response = busy.getresponse()
        assert response.headers["Access-Control-Allow-Origin"] == "http://a"
        server.process.send_signal(signal.SIGTERM)
        until(lambda: not accepts(server.port))
        health = server.send("GET", "/health", on=idle)
        # It was 200, so that a proxy would have had to read the body to take the replica out.
        assert (health.status, health.json) == (503, {"status": "stopping"})
        assert health.headers["Connection"] == "close"
        events = Answer(200, {}, response.read()).events
        assert events[-1] == "[DONE]" and '"length"' in events[-2]
        assert server.process.wait(60) == 0
        assert "Traceback" not in server.log.read_text()


def test_requests_while_stopping(make_local, monkeypatch):
    """A request that came after the signal was started, and then cut off."""
    local, complete = make_local(), server_module.Connection.complete

    def late(self, chat):
        local.server.stopping = True
        complete(self, chat)

    monkeypatch.setattr(server_module.Connection, "complete", late)
    assert "stopping" in local.post(COMPLETIONS, SHORT).fails(503)
    assert not local.engine.queue


def stopped(
    data: bytes, *options: str, signals: int = 1, reached: Callable[[], bool] = bool
) -> list[Answer]:
    """Serve in the main thread, as main() does. Send bytes; then signals, once the engine has the
    request, or it was answered, or `reached` says so. Return what comes."""
    engine = Engine(model(), TOKENIZER, num_blocks=80)
    args = make_args(*options)
    listeners = listen_at(args.host, args.port)
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]

    def client() -> list[Answer]:
        until(lambda: signal.getsignal(signal.SIGINT) != before[1])  # set after SIGTERM's
        with socket.create_connection(listeners[0].getsockname(), 10) as s:
            s.sendall(data)
            until(lambda: not data or engine.queue or reached() or select.select([s], [], [], 0)[0])
            for _ in range(signals):
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(0.2)
            return parse(receive(s))

    try:
        with ThreadPoolExecutor(1) as pool:
            answers = pool.submit(client)
            assert serve(server_module.Server(engine, args, listeners)) == 0
            return answers.result()
    finally:
        signal.set_wakeup_fd(-1)  # else the next test's Ctrl-C is the second one for this server
        for number, handler in zip((signal.SIGTERM, signal.SIGINT), before, strict=True):
            signal.signal(number, handler)


def test_an_engine_that_dies(monkeypatch):
    """A Rust library's panic is no Exception: the server took clients and never answered them."""
    ended = []

    def drive(self):
        raise BaseException("panic")

    def listen(self):
        ended.append(any(self.stopping or time.sleep(0.01) for _ in range(500)))
        for listener in self.listeners:
            listener.close()

    monkeypatch.setattr(server_module.Server, "drive", drive)
    monkeypatch.setattr(server_module.Server, "listen", listen)
    with pytest.raises(BaseException, match="panic"):
        stopped(b"", signals=0)
    assert ended == [True]


def test_long_chains_of_references(tmp_path):
    """The compiler of grammars recurses along them: its thread's stack overflowed, and the server
    was gone."""
    names = [f"d{i}" for i in range(3500)]
    chain = {a: {"items": {"$ref": f"#/$defs/{b}"}} for a, b in itertools.pairwise(names)}
    schema = {"$defs": chain | {names[-1]: {"type": "null"}}, "$ref": "#/$defs/d0"}
    rules = "\n".join(f"a{i}: {'(' * 20}a{i + 1}{')' * 20}" for i in range(300))
    with Process(tmp_path) as server:
        for wish in ({"json": schema}, {"grammar": f'start: a0\n{rules}\na300: "b"'}):
            # It may be refused.
            server.post(COMPLETIONS, {**SHORT, "structured_outputs": wish})
            assert server.post(COMPLETIONS, SHORT).status == 200


def test_signal_while_requests_are_half_sent(tmp_path):
    """A client that never ended its body held the server until --shutdown-timeout."""
    with Process(tmp_path) as server, contextlib.ExitStack() as clients:
        for data in (request_bytes()[:-1], FIRST[:-1]):
            client = socket.create_connection(("127.0.0.1", server.port), 20)
            clients.enter_context(client).sendall(data)
        time.sleep(0.3)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(20) == 0  # --shutdown-timeout is 30
        assert receive(client) == b"" and "Traceback" not in server.log.read_text()


@pytest.mark.parametrize("stream", [False, True])
def test_signal_and_too_long(stream):
    """The server did not end, or it ended without an error to the clients that still waited."""
    data = request_bytes({**LONG, "stream": stream})
    (answer,) = stopped(data, "--shutdown-timeout", "0.3")
    assert "stopping" in answer.fails(503)


def test_second_signal(monkeypatch):
    """A second Ctrl-C did not end the server at once."""
    codes: list[int] = []
    monkeypatch.setattr(front.os, "_exit", codes.append)
    stopped(request_bytes({**LONG, "max_tokens": 100}), signals=2)
    assert codes == [1]


def test_an_idle_connection_is_no_error(capsys, caplog):
    """A browser's open connection filled the log with tracebacks at the end."""
    assert stopped(FIRST)[0].status == 200
    assert "Traceback" not in caplog.text + capsys.readouterr().err


def test_signal_while_a_prompt_is_encoded(monkeypatch):
    """The connection was cut because the request had not reached the engine yet."""
    encode, begun = TOKENIZER.encode, threading.Event()
    monkeypatch.setattr(
        TOKENIZER, "encode", lambda text: begun.set() or time.sleep(0.6) or encode(text)
    )
    assert stopped(request_bytes(), reached=begun.is_set)[0].status == 200


@pytest.mark.slow
@pytest.mark.parametrize("whom", ["the first rank", "torchrun"])  # which passes SIGTERM on to all
def test_two_ranks(tmp_path, whom):
    """Under torchrun the text differed, there were two servers, or a rank outlived the first
    one."""
    program = (Path(sys.executable).with_name("torchrun"), "--standalone", "--nproc-per-node", 2)
    with Process(tmp_path, program=program) as server:
        children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children")
        if not children.exists():
            pytest.skip("needs Linux's /proc")
        ranks = [int(pid) for pid in children.read_text().split()]
        ranks.sort(key=lambda pid: b"RANK=1" in Path(f"/proc/{pid}/environ").read_bytes())
        answer = server.post(COMPLETIONS, SHORT).json
        assert answer["choices"][0]["text"] == alone(**SHORT)[0].text
        stream = server.stream({**SHORT, "max_tokens": 16})
        os.kill(ranks[0] if whom != "torchrun" else server.process.pid, signal.SIGTERM)
        assert Answer(200, {}, stream.read()).events[-1] == "[DONE]"
        status = server.process.wait(60)
        assert whom == "torchrun" or status == 0
        assert not any(Path(f"/proc/{pid}").exists() for pid in ranks)
        assert server.log.read_text().count("serving") == 1


@contextlib.contextmanager
def two_ranks(folder: Path) -> Iterator[tuple[Process, Process]]:
    """Both ranks of a server, without torchrun, which would end one when the other ends."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    env |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    made = []
    for rank in "01":
        (folder / rank).mkdir()
        made.append(Process(folder / rank, RANK=rank, LOCAL_RANK=rank, **env))
    try:
        made[0].__enter__().works()
        yield tuple(made)
    finally:
        for each in made:
            each.__exit__()


@pytest.mark.slow
def test_a_rank_dies(tmp_path):
    """The server lived on without it, and answered every request with an error."""
    with two_ranks(tmp_path) as (server, other):
        other.process.kill()
        server.post(COMPLETIONS, SHORT).fails(500)
        assert server.process.wait(60) == 2
        log = server.log.read_text()
        assert "rank 0 cannot go on" in log and "Traceback" not in log


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_rank_is_stopped(tmp_path, number):
    """While the first rank waited for a stopped one it heard no signal, not even the second."""
    with two_ranks(tmp_path) as (server, other):
        stream = server.stream(LONG)
        other.process.send_signal(signal.SIGSTOP)
        time.sleep(0.5)
        sent = 0
        while server.process.poll() is None:  # two signals become one if it does not run between
            server.process.send_signal(number)
            sent += 1
            time.sleep(0.5)
            assert sent < 20
        assert server.process.returncode == 1 and sent > 1
        stream.close()


@pytest.mark.slow
def test_one_signal_is_one_signal(tmp_path):
    """tp.lead held SIGINT back and raised it again, which counted as the second."""
    with two_ranks(tmp_path) as (server, _):
        stream = server.stream({**LONG, "max_tokens": 100})
        server.process.send_signal(signal.SIGINT)
        assert Answer(200, {}, stream.read()).events[-1] == "[DONE]"
        assert server.process.wait(60) == 0


# --- What it says of itself -----------------------------------------------------------------------


def test_metrics_are_prometheus_text(local):
    """Names that Prometheus refuses."""
    local.works()
    answer = local.get("/metrics")
    assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    text = answer.data.decode()
    assert text.endswith("\n") and "\r" not in text
    kinds, samples = {}, {}
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            name, kind = line.split(" ")[2:]
            assert name not in kinds and kind in ("counter", "gauge", "summary")
            kinds[name] = kind
        else:
            pattern = r'([a-z_:][a-z0-9_:]*)\{model_name="shakespeare",([a-z_]+="[^"\\]*"|)\} (\S+)'
            name, labels, value = re.fullmatch(pattern, line).groups()
            of = re.sub("_(sum|count)$", "", name)
            of = of if kinds.get(of) == "summary" else name
            assert of in kinds and list(kinds)[-1] == of, "samples stand under their own TYPE"
            assert kinds[of] != "counter" or name.endswith("_total")
            assert (name, labels) not in samples and math.isfinite(float(value))
            samples[name, labels] = float(value)
    names = """num_requests_running num_requests_waiting kv_cache_usage_perc num_preemptions_total
        prompt_tokens_total generation_tokens_total prefix_cache_queries_total
        prefix_cache_hits_total request_success_total time_to_first_token_seconds
        inter_token_latency_seconds e2e_request_latency_seconds
        spec_decode_num_draft_tokens_total spec_decode_num_accepted_tokens_total"""
    assert {f"vllm:{name}" for name in names.split()} <= {*kinds}


def test_metrics_after_a_known_load(local):
    """A token was counted twice or not at all, or a prompt once for each of its n outputs."""
    before = local.metrics()
    replies = [
        local.post(COMPLETIONS, {"prompt": [PROMPT, "a"], "n": 2, "seed": 1, "max_tokens": 9}),
        local.post(COMPLETIONS, {"prompt": [7] * 40, "max_tokens": 1, "ignore_eos": True}),
        local.post(COMPLETIONS, {"prompt": [7] * 40, "max_tokens": 1, "ignore_eos": True}),
        local.post(COMPLETIONS, {"stop_token_ids": [13], "logit_bias": {"13": 100}}),
    ]
    local.post(COMPLETIONS, {**SHORT, "stream": True})
    local.post(COMPLETIONS, {"n": 0}).fails(400, "n")  # counts for nothing
    usage = [reply.json["usage"] for reply in replies]
    prompts = sum(each["prompt_tokens"] for each in usage) + len(TOKENIZER.encode(PROMPT))
    outputs = sum(each["completion_tokens"] for each in usage) + 6
    reasons = Counter(c["finish_reason"] for r in replies for c in r.json["choices"])
    local.settle()
    after = local.metrics()
    change = Counter({name: after[name] - before[name] for name in after})
    assert change["prompt_tokens_total"] == change["prefix_cache_queries_total"] == prompts
    assert change["generation_tokens_total"] == outputs
    for reason, more in (("stop", 0), ("length", 1), ("abort", 0)):
        name = f'request_success_total{{finished_reason="{reason}"}}'
        assert change[name] == reasons[reason] + more
    assert reasons["stop"] >= 1 and sum(reasons.values()) == 7
    assert change["time_to_first_token_seconds_count"] == 8
    assert change["inter_token_latency_seconds_count"] == outputs - 8
    assert change["e2e_request_latency_seconds_count"] == 8
    assert change["prefix_cache_hits_total"] == 32  # two blocks of the 40
    first = after["time_to_first_token_seconds_sum"]
    rest = after["inter_token_latency_seconds_sum"]
    assert first + rest == pytest.approx(after["e2e_request_latency_seconds_sum"])


def watched(client: Client) -> dict:
    """The JSON that the page reads."""
    return client.get("/engine").json


def test_all_watchers_share_a_snapshot(local, monkeypatch, capfd):
    """A hundred pages that were left open cost a hundred snapshots, ten times a second; and as many
    lines of the log."""
    taken, take_snapshot = [], local.server.take_snapshot
    monkeypatch.setattr(local.server, "take_snapshot", lambda: taken.append(take_snapshot()))
    with ThreadPoolExecutor(30) as pages:
        began = time.monotonic()
        assert all(now["blocks"] == 128 for now in pages.map(watched, [local] * 150))
        assert 0 < len(taken) < 2 + 12 * (time.monotonic() - began)
    assert "/engine" not in capfd.readouterr().err


def test_snapshots(local):
    """The page showed blocks of another sequence, an ended sequence, or falling counters."""
    first = watched(local)
    assert first["running"] == first["waiting"] == []
    assert (first["blocks"], first["block_size"]) == (128, 16)
    fields = {"prompt": [PROMPT * 8] * 2 + ["a"] * 8, "max_tokens": 150, "ignore_eos": True}
    doomed = local.begin(fields)
    before, most, shared = first, 0, False
    for _ in range(60):
        now = watched(local)
        consistent(now)
        for name in (name for name in now if name.endswith("_total")):
            assert now[name] >= before[name]
        before, most = now, max(most, len(now["running"]))
        blocks = [block for row in now["running"] for block in row["blocks"]]
        shared |= len(blocks) > len(set(blocks))
        if most == 8 and now["generation_tokens_total"] > 100 + first["generation_tokens_total"]:
            break
    assert most == 8 and shared and now["waiting"]
    ids = {row["name"].rpartition("-")[0] for row in now["running"]}
    assert len(ids) == 1 and ids.pop().startswith("cmpl-")
    doomed.close()
    local.settle()
    until(lambda: (now := watched(local))["running"] == [] and now["waiting"] == [])
    doomed = local.begin({"prompt": "a" * 60, "n": 3, "max_tokens": 150, "ignore_eos": True})
    now = until(lambda: len((now := watched(local))["running"]) == 3 and now)
    names = {row["name"].rpartition(".") for row in now["running"]}
    assert {index for _, _, index in names} == {"0", "1", "2"}
    assert len({name for name, _, _ in names}) == 1
    assert len({row["blocks"][0] for row in now["running"]}) == 1
    doomed.close()


def test_priority(local):
    """Urgent requests waited for others."""
    doomed = [local.begin({**LONG, "priority": -1}) for _ in range(8)]
    until(lambda: len(local.engine.running) == 8)
    later = [local.begin({**SHORT, "priority": p}) for p in (5, -5)]
    until(lambda: len(local.engine.waiting) == 2)
    assert [job.request.priority for job in local.engine.waiting] == [-5, 5]
    for each in doomed + later:
        each.close()


def consistent(now: dict) -> None:
    """One snapshot: every block in range, and nobody's and somebody's at once."""
    used = {block for row in now["running"] for block in row["blocks"]}
    assert all(0 <= block < now["blocks"] for block in used | {*now["cached"]})
    assert not used & {*now["cached"]}
    assert all(prompt > 0 for prompt in now["waiting"])
    assert now["num_requests_waiting"] == len(now["waiting"])
    assert now["num_requests_running"] == len(now["running"]) <= 8
    for row in now["running"]:
        assert row["length"] <= len(row["blocks"]) * now["block_size"]
        assert row["prompt"] < row["max"] and row["length"] < row["max"]
        assert len(row["text"]) <= 40 and 0 <= row["ran"] <= 32
    names = [row["name"] for row in now["running"]]
    assert len(names) == len({*names})


def test_cache_salt(local):
    """One user's prefix found, by its speed, by another, who can so guess what it was."""
    found = []
    body = SHORT | {"prompt": [*range(700, 740)]}
    for salt in ("a", "a", "b", None, "b"):
        before = local.engine.stats["prefix_cache_hits"]
        assert local.post(COMPLETIONS, body | {"cache_salt": salt}).status == 200
        found.append(local.engine.stats["prefix_cache_hits"] - before > 0)
    assert found == [False, True, False, False, True]
