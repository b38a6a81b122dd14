"""The server: what OpenAI's client gets, what a rude one cannot do, and how it all ends.

`server` is server.py in a process of its own. `local` is the same Api and Connection in a thread of
this process, where the engine can be looked at and broken. The slow twin is generate(), alone.
"""

import asyncio
import contextlib
import http.client
import json
import math
import os
import re
import select
import shutil
import signal
import socket
import ssl
import struct
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

import openai
import pytest
import torch
from conftest import ROOT, SHAKESPEARE
from hypothesis import given, settings
from hypothesis import strategies as st

import bench
import generate
import load
import server as server_module
from generate import sampling_params
from kv_cache import StaticCache
from model import load_model
from sampling import Sequence
from scheduler import Engine
from server import Api, Connection, Driver, Histogram, parse_args, serve
from tokenizer import Tokenizer

os.environ["NO_PROXY"] = "127.0.0.1"  # openai's client would ask a proxy of the environment
TOKENIZER = Tokenizer(SHAKESPEARE)
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPT, HI = "ROMEO:\nWhat", [{"role": "user", "content": "hi"}]
LONG = {"prompt": PROMPT, "max_tokens": 900, "ignore_eos": True}  # seconds of work
SHORT = {"prompt": PROMPT, "max_tokens": 6, "temperature": 0, "ignore_eos": True}
LEAK = r"0x[0-9a-f]{5,}|Traceback|site-packages|\.py\b|/root|/work|/home|/tmp"

pytestmark = pytest.mark.usefixtures("one_thread")


# --- Servers and clients --------------------------------------------------------------------------


def until(condition, seconds=10.0):
    """Wait for a condition, and return what it gave."""
    deadline = time.monotonic() + seconds
    while not (result := condition()):
        assert time.monotonic() < deadline, "this did not happen"
        time.sleep(0.01)
    return result


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    data: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.data)

    def fails(self, status: int, param: str | None = None, code: str | None = None) -> str:
        """Check an error's shape; return its message."""
        error = self.json["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert (self.status, error["param"], error["code"]) == (status, param, code), error
        kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
        kind = "server_error" if status >= 500 else kinds.get(status, "invalid_request_error")
        assert error["type"] == kind
        assert error["message"] and not re.search(LEAK, error["message"]), error
        return error["message"]


def receive(connection: socket.socket) -> bytes:
    """All that comes until the other side closes."""
    return b"".join(iter(lambda: connection.recv(2**16), b""))


class Client:
    """Talks to a port of this machine."""

    port: int
    context: ssl.SSLContext | None = None

    def open(self) -> http.client.HTTPConnection:
        if self.context:
            return http.client.HTTPSConnection(
                "127.0.0.1", self.port, timeout=60, context=self.context
            )
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)

    def send(self, method: str, path: str, body: Any = None, on=None, **headers: str) -> Answer:
        """Args: body: JSON, or bytes as they are. on: a connection that is open already."""
        connection = on or self.open()
        if body is not None:
            headers = {"Content-Type": "application/json"} | headers
            body = body if isinstance(body, bytes) else json.dumps(body)
        connection.request(method, path, body, headers)
        response = connection.getresponse()
        data = response.read()
        if not on:
            connection.close()
        return Answer(response.status, dict(response.headers), data)

    def get(self, path: str, **headers: str) -> Answer:
        return self.send("GET", path, **headers)

    def post(self, path: str, body: Any, on=None, **headers: str) -> Answer:
        return self.send("POST", path, body, on, **headers)

    def begin(self, body: dict, path: str = COMPLETIONS) -> http.client.HTTPConnection:
        """Send a request, and leave it."""
        connection = self.open()
        headers = {"Content-Type": "application/json"}
        connection.request("POST", path, json.dumps(body), headers)
        return connection

    def stream(self, body: dict, path: str = COMPLETIONS) -> http.client.HTTPResponse:
        """Start a stream, and wait for its first event."""
        connection = self.begin({**body, "stream": True}, path)
        response = connection.getresponse()
        response.connection = connection  # keeps it open
        assert response.status == 200 and response.readline().startswith(b"data: ")
        return response

    def raw(self, data: bytes, timeout: float = 20) -> bytes:
        """Send bytes; return all that comes until the server closes."""
        with socket.create_connection(("127.0.0.1", self.port), timeout) as connection:
            with contextlib.suppress(ConnectionError):
                connection.sendall(data)
            return receive(connection)

    def metrics(self) -> dict[str, float]:
        lines = self.get("/metrics").data.decode().splitlines()
        samples = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        return {name.removeprefix("kilolm:"): float(value) for name, value in samples}

    def works(self) -> None:
        assert self.post(COMPLETIONS, SHORT).json["choices"][0]["finish_reason"] == "length"


class Server(Client):
    """server.py, or another program that serves, in a process of its own."""

    def __init__(self, folder: Path, *options: object, program=(sys.executable,), **env) -> None:
        self.log = folder / "log"
        quick = ("--port", 0, "--device", "cpu", "--dtype", "float32")
        command = [*program, ROOT / "server.py", *quick, *options]
        env = {**os.environ, "OMP_NUM_THREADS": "1", **env}
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [str(word) for word in command], cwd=folder, stderr=log, env=env
            )

    @cached_property
    def url(self) -> str:
        def serving() -> re.Match | None:
            assert self.process.poll() is None, self.log.read_text()
            return re.search(r"serving \S+ on (\S+)\n", self.log.read_text())

        return until(serving, 60)[1]

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def end(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(30)

    def __enter__(self) -> "Server":
        assert self.url
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with Server(tmp_path_factory.mktemp("server"), "--max-body", 200_000) as started:
        yield started
        assert started.end() == 0
        assert "Traceback" not in started.log.read_text()


@cache
def model():
    return load_model(SHAKESPEARE, dtype=torch.float32)


class Local(Client):
    """The server in two threads of this process."""

    def __init__(self, *options: str, **engine: Any) -> None:
        small = {"num_blocks": 128, "max_num_seqs": 8, "max_num_batched_tokens": 32}
        self.engine = Engine(model(), TOKENIZER, **small | engine)
        self.args = parse_args(["--disable-access-log", *options])
        self.driver, ready = Driver(self.engine), threading.Event()
        self.driving = threading.Thread(target=self.driver.run)
        self.thread = threading.Thread(target=lambda: asyncio.run(self._serve(ready)))
        self.thread.start()
        assert ready.wait(10)
        self.driving.start()

    async def _serve(self, ready: threading.Event) -> None:
        self.api, self.stop = Api(self.driver, self.args), asyncio.Event()
        listener = await asyncio.start_server(
            lambda reader, writer: Connection(self.api, reader, writer).serve(),
            "127.0.0.1", 0, limit=server_module.MAX_HEADER_BYTES, backlog=1024,
        )  # fmt: skip
        self.port = listener.sockets[0].getsockname()[1]
        ready.set()
        await self.stop.wait()
        listener.close()

    def settle(self, seconds: float = 10) -> None:
        """Wait until nothing is left of any request, and all memory is free."""
        api, engine = self.api, self.engine
        until(lambda: not (api.events or engine.has_work or self.driver.inbox.qsize()), seconds)
        self.engine.check()
        assert self.engine.pool.num_available == self.engine.pool.num_blocks

    def close(self) -> None:
        self.driver.inbox.put(None)
        self.driving.join(10)
        self.api.loop.call_soon_threadsafe(self.stop.set)
        self.thread.join(10)


@pytest.fixture(scope="module")
def shared():
    started = Local(max_seq_len=256)
    yield started
    started.close()


@pytest.fixture
def local(shared):
    yield shared
    shared.settle()


@pytest.fixture
def make_local():
    """For engines that break or are large."""
    made: list[Local] = []

    def make(*options: str, **engine: Any) -> Local:
        made.append(Local(*options, **engine))
        return made[-1]

    yield make
    for each in made:
        each.close()


# --- OpenAI's client ------------------------------------------------------------------------------


class Choice(NamedTuple):
    text: str
    reason: str
    logprobs: dict | None


class Reply(NamedTuple):
    choices: list[Choice]
    usage: dict[str, int]

    @property
    def text(self) -> str:
        (choice,) = self.choices
        return choice.text


EXTRA = ("ignore_eos", "min_p", "top_k", "repetition_penalty", "stop_token_ids")  # vLLM's


def call(url: str, way: str, chat: bool = False, **body: Any) -> Reply:
    """Ask through openai's client; check and put together what came in pieces."""
    streamed = "streamed" in way
    extra = {name: body.pop(name) for name in EXTRA if name in body}
    body = {"model": "shakespeare", **({"messages": HI} if chat else {"prompt": PROMPT}), **body}
    if streamed:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    options = {"base_url": f"{url}/v1", "api_key": "none", "max_retries": 0, "timeout": 60}

    async def ask() -> list:
        async with openai.AsyncOpenAI(**options) as client:
            at = client.chat.completions if chat else client.completions
            answer = await at.create(**body, extra_body=extra)
            return [chunk async for chunk in answer] if streamed else [answer]

    if "async" in way:
        parts = asyncio.run(ask())
    else:
        with openai.OpenAI(**options) as client:
            at = client.chat.completions if chat else client.completions
            answer = at.create(**body, extra_body=extra)
            parts = [*answer] if streamed else [answer]
    kind = "chat.completion" if chat else "text_completion"
    assert {part.object for part in parts} == {kind + ".chunk" * (streamed and chat)}
    assert len({(part.id, part.created, part.model) for part in parts}) == 1
    assert abs(parts[0].created - time.time()) < 60
    return merge(parts, chat) if streamed else whole(parts[0], chat)


def whole(answer: Any, chat: bool) -> Reply:
    assert [choice.index for choice in answer.choices] == [*range(len(answer.choices))]
    if chat:
        assert {choice.message.role for choice in answer.choices} == {"assistant"}
    return Reply(
        [
            Choice(c.message.content if chat else c.text, c.finish_reason, c.logprobs and
                   c.logprobs.model_dump())
            for c in answer.choices
        ],
        counts(answer.usage),
    )  # fmt: skip


def merge(chunks: list, chat: bool) -> Reply:
    """Each chunk has what is new; the role comes once, and so does the end; the usage is last."""
    *chunks, last = chunks
    assert last.choices == [] and last.usage
    found: dict[int, Choice] = {}
    for chunk in chunks:
        assert chunk.usage is None and len(chunk.choices) == 1
        (new,) = chunk.choices
        if chat:
            first = new.index not in found
            assert new.delta.role == ("assistant" if first else None)
        old = found.get(new.index, Choice("", None, None))
        assert old.reason is None, "something came after the end"
        logprobs = old.logprobs
        if new.logprobs:
            added = new.logprobs.model_dump()
            logprobs = {
                key: (logprobs[key] if logprobs else []) + value if value is not None else None
                for key, value in added.items()
            }
        text = (new.delta.content or "") if chat else new.text
        assert text or new.finish_reason or new.logprobs or (chat and first), "an empty chunk"
        found[new.index] = Choice(old.text + text, new.finish_reason, logprobs)
    assert all(choice.reason for choice in found.values())
    return Reply([found[i] for i in range(len(found))], counts(last.usage))


def counts(usage: Any) -> dict[str, int]:
    found = {key: value for key, value in usage.model_dump().items() if value is not None}
    assert found["prompt_tokens"] + found["completion_tokens"] == found["total_tokens"]
    return found


@pytest.fixture(params=["whole", "streamed", "async", "async streamed"])
def ask(request, server):
    return lambda chat=False, **body: call(server.url, request.param, chat, **body)


@pytest.fixture(params=["whole", "streamed"])
def either(request, server):
    return lambda chat=False, **body: call(server.url, request.param, chat, **body)


TWINS: dict[str, list[Sequence]] = {}


def alone(prompt=PROMPT, **given) -> list[Sequence]:
    """The slow twin."""
    if (key := repr((prompt, given))) not in TWINS:
        params = sampling_params(SHAKESPEARE, **given)
        ids = TOKENIZER.encode(prompt) if isinstance(prompt, str) else prompt
        TWINS[key] = [Sequence(ids, each, model().config, TOKENIZER) for each in params.split()]
        for sequence in TWINS[key]:
            slabs = StaticCache(model().config, 1, sequence.max_len, torch.float32)
            for _ in generate.generate(model(), sequence, slabs):
                pass
    return TWINS[key]


def assert_same(reply: Reply, expected: list[Sequence]) -> None:
    assert [c[:2] for c in reply.choices] == [(s.text, s.finish_reason) for s in expected]
    assert reply.usage["completion_tokens"] == sum(len(s.tokens) for s in expected)


MARKS = {str(i): 60 for i in TOKENIZER.encode("∑😀é", add_special=False)[:-1]}  # bytes
SETTINGS = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 0.9, "top_p": 0.95, "seed": 7},
    "penalties": {"temperature": 1.1, "presence_penalty": 1.5, "frequency_penalty": 0.5,
                  "seed": -5},
    "defaults": {"seed": 2**63 - 1},
    "logit_bias": {"temperature": 0, "logit_bias": {"20": 50, "981": -100}},
    "half characters": {"logit_bias": MARKS, "seed": 1, "temperature": 1.5},
    "stop": {"temperature": 0, "stop": ["\n\nROMEO", "never"]},
    "one stop": {"temperature": 0, "stop": " it"},
    "a token stops": {"temperature": 0, "stop_token_ids": [13]},
    "vLLM's": {
        "temperature": 1.2, "top_k": 40, "min_p": 0.02, "repetition_penalty": 1.1, "seed": 3,
        "ignore_eos": True,
    },
}  # fmt: skip


@pytest.mark.parametrize("setting", SETTINGS)
def test_text_is_that_of_generate(ask, setting):
    """A setting got lost on the way; a stream lost a piece, or showed half a character."""
    wish = {"max_tokens": 20, **SETTINGS[setting]}
    bias = {int(i): b for i, b in wish.get("logit_bias", {}).items()}
    assert_same(ask(**wish), alone(**wish | {"logit_bias": bias}))


def test_settings_do_something():
    """The table above compares nothing where a setting changes nothing."""
    for a, b in (("greedy", "logit_bias"), ("greedy", "stop"), ("greedy", "one stop")):
        bias = {int(i): x for i, x in SETTINGS[b].get("logit_bias", {}).items()}
        second = alone(**{"max_tokens": 20, **SETTINGS[b], "logit_bias": bias})[0]
        first = alone(max_tokens=20, **SETTINGS[a])[0]
        assert first.text != second.text
    (marks,) = alone(max_tokens=20, seed=1, temperature=1.5,
                     logit_bias={int(i): x for i, x in MARKS.items()})  # fmt: skip
    assert "\ufffd" in marks.text or "😀" in marks.text


def test_text_is_that_of_the_command_line(either, capsys):
    """The server's defaults were not those of generate.py."""
    options = ["--prompt", PROMPT, "--seed", "5", "--max-tokens", "24", "--dtype", "float32"]
    capsys.readouterr()
    assert generate.main([*options, "--device", "cpu", "--json", "--logprobs", "2"]) == 0
    printed = json.loads(capsys.readouterr().out)
    (choice,) = either(seed=5, max_tokens=24, logprobs=2).choices
    assert (choice.text, choice.reason) == (printed["text"], printed["finish_reason"])
    logprobs = [token["logprob"] for token in printed["logprobs"]]
    assert choice.logprobs["token_logprobs"] == pytest.approx(logprobs, abs=1e-4)


def test_forms_of_a_prompt(ask):
    """Ids were taken for a list of prompts, or a list's choices came in another order."""
    texts = [PROMPT, "", "JULIET:\n"]
    ids = [TOKENIZER.encode(text) for text in texts]
    wish = {"max_tokens": 8, "seed": 4}
    expected = [alone(text, **wish)[0] for text in texts]
    for prompt in (texts, ids, [texts[0], ids[1], texts[2]]):
        reply = ask(prompt=prompt, **wish)
        assert_same(reply, expected)
        assert reply.usage["prompt_tokens"] == sum(map(len, ids))
    for text, one, sequence in zip(texts, ids, expected, strict=True):
        assert_same(ask(prompt=text, **wish), [sequence])
        assert_same(ask(prompt=one, **wish), [sequence])


def test_n(ask):
    """The n of one prompt were mixed up with those of the next; or shared a seed."""
    texts = [PROMPT, "JULIET:\n"]
    reply = ask(prompt=texts, n=3, seed=5, max_tokens=8)
    assert_same(reply, [s for text in texts for s in alone(text, n=3, seed=5, max_tokens=8)])
    assert_same(reply, [alone(t, seed=5 + i, max_tokens=8)[0] for t in texts for i in range(3)])
    assert reply.usage["prompt_tokens"] == sum(len(TOKENIZER.encode(text)) for text in texts)
    greedy = ask(n=4, temperature=0, max_tokens=8)
    assert len(set(greedy.choices)) == 1 and len(greedy.choices) == 4
    assert len({choice.text for choice in ask(n=4, max_tokens=12).choices}) > 1


def test_128_at_once(either):
    """More than run at once."""
    reply = either(n=128, temperature=0, max_tokens=2)
    assert len(reply.choices) == 128 and len({choice.text for choice in reply.choices}) == 1
    assert reply.usage["completion_tokens"] == 256


def test_echo(ask):
    """The prompt came twice in a stream, or for the first choice alone."""
    for prompt in (PROMPT, "é∑😀", TOKENIZER.encode(PROMPT)):
        sequences = alone(prompt, n=2, seed=1, max_tokens=8)
        reply = ask(prompt=prompt, echo=True, n=2, seed=1, max_tokens=8)
        text = prompt if isinstance(prompt, str) else PROMPT
        assert [choice.text for choice in reply.choices] == [text + s.text for s in sequences]
        assert reply.usage["completion_tokens"] == 16
    reply = ask(prompt=["a", "b"], echo=True, max_tokens=1, logit_bias={"13": 100}, stop="\n")
    assert [choice.text for choice in reply.choices] == ["a", "b"]  # nothing new to show


@pytest.mark.parametrize("echo", [False, True])
def test_logprobs(ask, echo):
    """Values of another token; one list shorter than the next; the prompt's left out of an echo."""
    wish = {"max_tokens": 10, "seed": 2, "logprobs": 3}
    prompts = [PROMPT, "JULIET:\nI"]
    expected = [alone(p, **wish, prompt_logprobs=3 if echo else None)[0] for p in prompts]
    reply = ask(prompt=prompts, echo=echo, **wish)
    for choice, sequence in zip(reply.choices, expected, strict=True):
        tokens, found = sequence.prompt_tokens + sequence.tokens, choice.logprobs
        texts = [TOKENIZER.decode([token.id]) for token in tokens]
        assert found["tokens"] == texts and "".join(texts) == choice.text
        assert found["text_offset"] == [len("".join(texts[:i])) for i in range(len(texts))]
        assert len(found["token_logprobs"]) == len(found["top_logprobs"]) == len(tokens)
        for i, token in enumerate(tokens):
            if echo and i == 0:  # nothing predicts it
                assert found["token_logprobs"][0] is found["top_logprobs"][0] is None
                continue
            assert found["token_logprobs"][i] == pytest.approx(token.logprob, abs=1e-4)
            top = {TOKENIZER.decode([j]): p for j, p in token.top}
            assert found["top_logprobs"][i] == pytest.approx(top, abs=1e-4)


def test_logprobs_of_held_text(either):
    """Tokens whose text a stop string holds back were left out, or came with an empty top."""
    reply = either(max_tokens=12, temperature=0, logprobs=0, stop="it not?\n\nNever")
    (sequence,) = alone(max_tokens=12, temperature=0, logprobs=0, stop="it not?\n\nNever")
    found = reply.choices[0].logprobs
    assert found["tokens"] == [TOKENIZER.decode([i]) for i in sequence.output_ids]
    assert found["top_logprobs"] == [{}] * 12
    assert either(max_tokens=2).choices[0].logprobs is None


def chat_ids(*messages: tuple[str, str]) -> list[int]:
    return TOKENIZER.encode_chat([{"role": role, "content": text} for role, text in messages])


def test_chat(ask):
    """The template or its stop string was left out; text parts were not joined."""
    ids = chat_ids(("system", "Be brief."), ("user", "Speak, speak."))
    wish = {"seed": 9, "max_tokens": 40}
    expected = alone(ids, **wish, stop=("\n\n",))
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Speak, "},
                                     {"type": "text", "text": "speak."}]},
    ]  # fmt: skip
    reply = ask(chat=True, messages=messages, **wish)
    assert_same(reply, expected)
    assert reply.usage["prompt_tokens"] == len(ids)
    assert reply.choices[0].logprobs is None
    messages[1]["content"] = "Speak, speak."
    assert ask(chat=True, messages=messages, **wish) == reply
    three = ask(chat=True, messages=messages, n=3, **wish)
    assert_same(three, alone(ids, **wish, n=3, stop=("\n\n",)))


def test_chat_stops_at_the_users_strings_too(either):
    """The template's stop string took the place of the user's."""
    ids = chat_ids(("user", "hi"))
    wish = {"temperature": 0, "max_tokens": 40}
    (sequence,) = alone(ids, **wish, stop=("\n\n",))
    word = sequence.text.split()[3]
    reply = either(chat=True, stop=[word], **wish)
    assert_same(reply, alone(ids, **wish, stop=("\n\n", word)))
    assert word not in reply.text and reply.choices[0].reason == "stop"


def test_sixteen_stop_strings_of_a_chat(either):
    """The template's stop string pushed out one of the user's."""
    (sequence,) = alone(chat_ids(("user", "hi")), temperature=0, max_tokens=40, stop=("\n\n",))
    stops = [sequence.text.split()[3]] + [f"{i}never" for i in range(15)]
    assert stops[0] not in either(chat=True, stop=stops, temperature=0, max_tokens=40).text


@pytest.mark.parametrize("top", [None, 0, 2])
def test_chat_logprobs(ask, top):
    """The chat's form of log-probabilities was never run."""
    wish = {"max_tokens": 8, "seed": 2}
    (sequence,) = alone(chat_ids(("user", "hi")), **wish, stop=("\n\n",), logprobs=top or 0)
    options = {} if top is None else {"top_logprobs": top}
    content = ask(chat=True, logprobs=True, **wish, **options).choices[0].logprobs["content"]
    texts = [TOKENIZER.decode([token.id]) for token in sequence.tokens]
    assert [entry["token"] for entry in content] == texts
    assert [bytes(entry["bytes"]).decode() for entry in content] == texts
    for entry, token in zip(content, sequence.tokens, strict=True):
        assert entry["logprob"] == pytest.approx(token.logprob, abs=1e-4)
        found = [(each["token"], each["logprob"]) for each in entry["top_logprobs"]]
        best = [(TOKENIZER.decode([i]), pytest.approx(p, abs=1e-4)) for i, p in token.top]
        assert found == best


def test_limits_of_length(either):
    """max_completion_tokens was ignored; OpenAI's defaults were not ours."""
    wish = {"temperature": 0, "ignore_eos": True}
    assert either(**wish).usage["completion_tokens"] == 16
    assert either(max_tokens=3, **wish).usage["completion_tokens"] == 3
    for limit in ({"max_tokens": 3}, {"max_completion_tokens": 3},
                  {"max_tokens": 9, "max_completion_tokens": 3}):  # fmt: skip
        reply = either(chat=True, **limit, **wish)
        assert reply.choices[0].reason == "length" and reply.usage["completion_tokens"] == 3
    ids = [5] * 1020  # a context of 1,024
    reply = either(prompt=ids, max_tokens=4, **wish)
    assert (reply.choices[0].reason, reply.usage["total_tokens"]) == ("length", 1024)
    messages = [{"role": "user", "content": "no " * 960}]
    reply = either(chat=True, messages=messages, logit_bias={"20": 100}, **wish)  # no limit given
    assert (reply.choices[0].reason, reply.usage["total_tokens"]) == ("length", 1024)


def test_usage_where_it_was_not_asked_for(server):
    """Clients that do not expect a chunk without choices fall over it."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        wish = {"model": "shakespeare", "prompt": PROMPT, "max_tokens": 4, "stream": True}
        chunks = [*client.completions.create(**wish)]
        assert all(len(chunk.choices) == 1 for chunk in chunks)
        assert not any(getattr(chunk, "usage", None) for chunk in chunks)
        wish["stream_options"] = {"continuous_usage_stats": True}
        seen = [chunk.usage.completion_tokens for chunk in client.completions.create(**wish)]
        assert seen == sorted(seen) and seen[-1] == 4 and seen[0] < 4


def test_models(server):
    """The name that the client has to give was nowhere to be found."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        (listed,) = client.models.list().data
        assert (listed.id, listed.object, listed.owned_by) == ("shakespeare", "model", "kilolm")
        assert abs(listed.created - time.time()) < 600 and listed.max_model_len == 1024
    assert server.post(COMPLETIONS, {"max_tokens": 1}).json["model"] == "shakespeare"


def test_64_streams_at_once(server):
    """Streams got each other's text, or the sixty-fifth file descriptor was one too many."""
    seeds = range(64)

    async def one(client, seed):
        stream = await client.completions.create(
            model="shakespeare", prompt=PROMPT, max_tokens=24, seed=seed, stream=True
        )
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def run():
        options = {"base_url": f"{server.url}/v1", "api_key": "none", "max_retries": 0}
        async with openai.AsyncOpenAI(**options, timeout=60) as client:
            return await asyncio.gather(*(one(client, seed) for seed in seeds))

    texts = asyncio.run(run())
    for seed in (0, 1, 31, 63):
        assert texts[seed] == alone(seed=seed, max_tokens=24)[0].text
    assert len(set(texts)) > 60


def test_text_comes_as_it_is_made(server):
    """The whole text came at the end, in pieces."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        started = time.monotonic()
        stream = client.completions.create(
            model="shakespeare", prompt=PROMPT, max_tokens=100, stream=True,
            extra_body={"ignore_eos": True},
        )  # fmt: skip
        first, *_, last = (time.monotonic() - started for _ in stream)
    assert first < last / 2


def test_openais_errors(server, local, monkeypatch):
    """The client raised a bare error, in place of the one that a program can catch."""
    options = {"api_key": "none", "max_retries": 0}
    with openai.OpenAI(base_url=f"{server.url}/v1", **options) as client:
        with pytest.raises(openai.BadRequestError, match="temperature") as caught:
            client.completions.create(model="shakespeare", prompt="", temperature=-1)
        assert caught.value.param == "temperature"
        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(model="shakespeare", prompt="a " * 3000)
        assert caught.value.code == "context_length_exceeded"
        with pytest.raises(openai.NotFoundError) as caught:
            client.completions.create(model="gpt-4", prompt="")
        assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
        with pytest.raises(openai.APIStatusError) as caught:  # not a broken connection
            client.completions.create(model="shakespeare", prompt="a" * 5_000_000)
        assert caught.value.status_code == 413
    with openai.OpenAI(base_url=f"http://127.0.0.1:{local.port}/v1", **options) as client:
        monkeypatch.setattr(local.args, "api_key", "secret")
        with pytest.raises(openai.AuthenticationError):
            client.models.list()
        monkeypatch.setattr(local.args, "api_key", "none")
        assert client.models.list().data
        monkeypatch.setattr(local.args, "max_queue", 0)
        with pytest.raises(openai.RateLimitError):
            client.completions.create(model="shakespeare", prompt="")


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
    "logprobs": (*INTS, 21),
    "stop": (["a"] * 17, [""], "", 5, [5], [None], {"a": 1}, True),
    "stop_token_ids": ([-1], ["a"], 5, [1.5], [True], {"a": 1}, "a"),
    "logit_bias": ([], "", 5, {"1": 101}, {"1": "x"}, {"1": None}, {"1": True}, {"-1": 1}, [1]),
    "ignore_eos": (1, "true", []),
    "stream": (1, 0, "true", []),
    "echo": (1, 0, "true", []),
    "stream_options": (1, "x", [], True),
    "cache_salt": (1, True, [], {}),
    "best_of": (2, 0, "1", True, 1.0, []),
    "prompt": (
        None, 5, {}, [], [[]], [None], [1, "a"], [1.5], [True], [[True]], [["a"]], [[1], 2], [-1],
        [1024], [[1], [1024]], [10**30], ["a"] * 257, True,
    ),
}  # fmt: skip
WRONG_CHAT = {
    "messages": (None, [], {}, "hi", 5, [5], ["hi"], [[]], [None]),
    "messages[0]": (
        [{}], [{"role": "user"}], [{"content": "a"}], [{"role": 5, "content": "a"}],
        [{"role": None, "content": "a"}], [{"role": "user", "content": 5}],
        [{"role": "user", "content": ["a"]}], [{"role": "user", "content": {}}],
        [{"role": "user", "content": [{"type": "text"}]}],
        [{"role": "user", "content": [{"type": "text", "text": 5}]}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        [{"role": "user", "content": [{"text": "a"}]}],
    ),
    "logprobs": (1, 0, "true", []),
    "temperature": WRONG["temperature"],
    "n": WRONG["n"],
}  # fmt: skip


@pytest.mark.parametrize("field", WRONG)
def test_wrong_field(server, field):
    """A 500, a silent default, or an error that names another field."""
    with contextlib.closing(server.open()) as connection:
        for value in WRONG[field]:
            for stream in (False, True):
                body = {"prompt": "a", "max_tokens": 2, "stream": stream, field: value}
                server.post(COMPLETIONS, body, connection).fails(400, field)


@pytest.mark.parametrize("field", WRONG_CHAT)
def test_wrong_field_of_a_chat(server, field):
    """A 500, a silent default, or an error that names another field."""
    with contextlib.closing(server.open()) as connection:
        for value in WRONG_CHAT[field]:
            body = {"messages": HI, "max_tokens": 2, field.partition("[")[0]: value}
            server.post(CHAT, body, connection).fails(400, field)
    two = [*HI, {"role": "user", "content": 5}]
    assert "messages[1]" in server.post(CHAT, {"messages": two}).fails(400, "messages[1]")


def test_null_is_the_default(server):
    """Clients that send every field, with null for what the user left open, got errors."""
    nothing = {name: None for name in WRONG if name != "prompt"}
    assert server.post(COMPLETIONS, {"prompt": "a", **nothing}).status == 200
    assert server.post(CHAT, {"messages": HI, **nothing, "top_logprobs": None}).status == 200


def test_unknown_fields_are_ignored(server):
    """A client's newer field made every request fail."""
    unknown = {"user": "me", "suffix": None, "tools": [], "foo": {"bar": [1, None]}, "best_of": 1,
               "store": True, "prompt_logprobs": "x", "service_tier": "auto"}  # fmt: skip
    plain = server.post(COMPLETIONS, SHORT).json
    assert server.post(COMPLETIONS, SHORT | unknown).json["choices"] == plain["choices"]
    plain = server.post(CHAT, {"messages": HI, "max_tokens": 2, **unknown})
    assert plain.status == 200


@pytest.mark.parametrize(
    ("path", "field", "given"),
    [
        (CHAT, "top_logprobs", {"logprobs": True, "top_logprobs": 21}),
        (CHAT, "top_logprobs", {"logprobs": True, "top_logprobs": False}),
        (CHAT, "max_completion_tokens", {"max_completion_tokens": 0}),
        (COMPLETIONS, "logit_bias", {"logit_bias": {"abc": 1}}),
        (COMPLETIONS, "logit_bias", {"logit_bias": {"1" * 5000: 1}}),
        (COMPLETIONS, "logit_bias", {"logit_bias": {"1024": 1}}),
    ],
)
def test_param_is_the_field_that_was_sent(make_local, path, field, given):
    """An error that names a field which the user did not send."""
    body = {"messages": HI} if path == CHAT else {"prompt": "a"}
    local = make_local()
    local.post(path, {"max_tokens": 2, **body, **given}).fails(400, field)


def test_top_logprobs_needs_logprobs(server):
    """It was ignored, and the user wondered."""
    server.post(CHAT, {"messages": HI, "top_logprobs": 2}).fails(400, "top_logprobs")


def test_too_many_choices(server):
    """257 sequences from one request."""
    message = server.post(COMPLETIONS, {"prompt": ["a"] * 3, "n": 86}).fails(400, "n")
    assert "256" in message
    assert server.post(COMPLETIONS, {"prompt": ["a"] * 2, "n": 128, "max_tokens": 1}).status == 200


@pytest.mark.parametrize(
    ("path", "body", "asked"),
    [
        (COMPLETIONS, {"prompt": [5] * 2000}, "2016"),
        (COMPLETIONS, {"prompt": [5] * 1009}, "1025"),
        (COMPLETIONS, {"prompt": [5] * 1024, "max_tokens": 1}, "1025"),
        (COMPLETIONS, {"prompt": [[5], [5] * 1024], "max_tokens": 1}, "1025"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": 2000}, "2002"),
        (CHAT, {"messages": [{"role": "user", "content": "no " * 3000}]}, ""),
        (CHAT, {"messages": HI, "max_completion_tokens": 1024}, "1041"),
    ],
)
def test_context_length(server, path, body, asked):
    """The error did not say how long is too long; or the prompt was cut in silence."""
    param = "messages" if path == CHAT else "prompt"
    message = server.post(path, body).fails(400, param, "context_length_exceeded")
    numbers = re.findall(r"\d+", message)
    assert "1024" in numbers and (not asked or asked in numbers)
    assert server.post(COMPLETIONS, {"prompt": [5] * 1008}).status == 200  # one less


def test_context_of_a_small_pool(make_local):
    """A request that could never fit waited for ever."""
    local = make_local(num_blocks=4)  # 64 slots, and the last token needs none
    wish = {"prompt": [5] * 60, "temperature": 0, "ignore_eos": True}
    assert local.post(COMPLETIONS, {**wish, "max_tokens": 5}).status == 200
    answer = local.post(COMPLETIONS, {**wish, "max_tokens": 6})
    assert "65" in answer.fails(400, "prompt", "context_length_exceeded")


DEEP = 30_000
NOT_JSON = {
    "nothing": b"", "half an object": b'{"n": 1', "a list": b"[]", "null": b"null", "text": b'"a"',
    "a number": b"5", "NaN": b'{"temperature": NaN}', "Infinity": b'{"temperature": Infinity}',
    "-Infinity": b'{"logit_bias": {"1": -Infinity}}', "no UTF-8": b'{"prompt": "\xff\xfe"}',
    "single quotes": b"{'prompt': 'a'}", "two objects": b"{}{}",
    "deep lists": b"[" * DEEP, "deep and closed": b"[" * DEEP + b"]" * DEEP,
    "deep objects": b'{"a":' * DEEP, "a deep field": b'{"n": ' + b"[" * DEEP + b"]" * DEEP + b"}",
    "digits": b'{"n": ' + b"1" * 5000 + b"}",
}  # fmt: skip


@pytest.mark.parametrize("case", NOT_JSON)
def test_not_json(server, case):
    """A parser's exception became a 500, or NaN a temperature."""
    for path in (COMPLETIONS, CHAT):
        server.post(path, NOT_JSON[case]).fails(400)
    server.works()


def test_numbers_that_overflow(server):
    """1e999 is JSON, and infinite."""
    for value in (b"1e999", b"-1e999"):
        for field in (b"temperature", b"n", b"seed", b"top_p"):
            answer = server.post(COMPLETIONS, b'{"prompt": "a", "%s": %s}' % (field, value))
            answer.fails(400, field.decode())


def test_strange_text(server):
    """A lone surrogate, a NUL or a special token in the text made a 500."""
    for text in ("\ud800", "\0", "\u202e", "</s>", "😀" * 50, "\r\n\r\n"):
        for body in (
            {"prompt": text},
            {"prompt": "a", "stop": text, "max_tokens": 3, "echo": True},
        ):
            assert server.post(COMPLETIONS, body).status == 200
        for role, content in (("user", text), (text, "a")):
            messages = [{"role": role, "content": content}]
            assert server.post(CHAT, {"messages": messages, "max_tokens": 2}).status == 200
        server.post(COMPLETIONS, {"model": text}).fails(404, "model", "model_not_found")


def test_nested_as_deep_as_the_parser_allows(server):
    """What could just be parsed could not be printed into the error's text."""
    statuses: Counter[int] = Counter()
    with contextlib.closing(server.open()) as connection:
        for depth in range(900, 1000):
            nested = b'{"a": ' * depth + b"1" + b"}" * depth
            for body in (b'{"stop": [%s]}', b'{"logit_bias": {"1": %s}}', b'{"model": %s}'):
                statuses[server.post(COMPLETIONS, body % nested, connection).status] += 1
    assert set(statuses) <= {400, 404}


def test_a_long_stop_string_costs_little(server):
    """One request with a stop string of 4 MB takes all memory; one of 20 kB stalls everyone."""
    started = time.monotonic()
    assert server.post(COMPLETIONS, SHORT).status == 200
    usual = time.monotonic() - started
    started = time.monotonic()
    assert server.post(COMPLETIONS, {**SHORT, "stop": "x" * 20_000}).status in (200, 400)
    assert time.monotonic() - started < 0.3 + 2 * usual


def test_errors_do_not_end_the_connection(server):
    """After an error the next request on the same connection was lost."""
    with contextlib.closing(server.open()) as connection:
        for _ in range(2):
            server.post(COMPLETIONS, {"n": 0}, connection).fails(400, "n")
            before = connection.sock
            assert server.post(COMPLETIONS, SHORT, connection).status == 200
            server.post(COMPLETIONS, b"{", connection).fails(400)
            answer = server.post(COMPLETIONS, {"model": "x"}, connection)
            answer.fails(404, "model", "model_not_found")
            server.send("GET", "/nothing", on=connection).fails(404)
            server.send("GET", COMPLETIONS, on=connection).fails(405)
            assert server.send("GET", "/version", on=connection).status == 200
            assert connection.sock is before


# --- Bodies at random -----------------------------------------------------------------------------


def mostly(plausible, absurd):
    """One absurd value in ten, or no body would be a good one."""
    return st.integers(0, 9).flatmap(lambda i: absurd if i == 9 else plausible)


numbers = st.one_of(
    st.sampled_from([0, -1, 1, 2**31, 2**63, -(2**63), 10**30, -0.0, 1e-300, 1e308, 0.5]),
    st.integers(), st.floats(allow_nan=False, allow_infinity=False),
)  # fmt: skip
absurd = st.recursive(
    st.one_of(st.none(), st.booleans(), numbers, st.text(max_size=5)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner,
                                                                max_size=3),
    max_leaves=4,
)  # fmt: skip
ids = st.lists(mostly(st.integers(0, 1023), numbers), max_size=70)
text = st.text(max_size=30) | st.sampled_from(["ROMEO:\n", "", "a " * 90])
part = st.fixed_dictionaries(
    {"type": mostly(st.just("text"), absurd), "text": mostly(text, absurd)}
)
message = st.fixed_dictionaries(
    {
        "role": mostly(st.sampled_from(["user", "system", "assistant"]), absurd),
        "content": mostly(text | st.lists(part, max_size=2), absurd),
    }
)
fields = {
    "temperature": st.floats(0, 2), "top_p": st.floats(0.01, 1), "top_k": st.integers(-1, 2000),
    "min_p": st.floats(0, 1), "presence_penalty": st.floats(-2, 2), "seed": st.integers(-9, 9),
    "frequency_penalty": st.floats(-2, 2), "repetition_penalty": st.floats(0.1, 3),
    "n": st.integers(1, 3), "logit_bias": st.dictionaries(
        mostly(st.integers(0, 1023).map(str), st.text(max_size=3)), st.floats(-100, 100), max_size=3
    ),
    "stop": text.filter(bool) | st.lists(st.text(min_size=1, max_size=3), max_size=4),
    "stop_token_ids": st.lists(st.integers(0, 1023), max_size=3), "ignore_eos": st.booleans(),
    "stream": st.booleans(), "max_tokens": st.integers(1, 4), "model": st.just("shakespeare"),
    "stream_options": st.fixed_dictionaries({"include_usage": mostly(st.booleans(), absurd)}),
    "user": absurd, "best_of": st.integers(1, 2), "echo": st.booleans(),
}  # fmt: skip
completion = {"prompt": text | ids | st.lists(text | ids, max_size=3),
              "logprobs": st.integers(0, 20)}  # fmt: skip
chat = {"messages": st.lists(message, max_size=3), "max_completion_tokens": st.integers(1, 4),
        "logprobs": st.booleans(), "top_logprobs": st.integers(0, 20)}  # fmt: skip


def bodies(own: dict) -> st.SearchStrategy:
    everything = {name: mostly(value, absurd) for name, value in (fields | own).items()}
    needed = next(iter(own))
    optional = {name: value for name, value in everything.items() if name != needed}
    # All the fields at once would be wrong in one of them nearly always.
    return st.sets(st.sampled_from(sorted(optional)), max_size=6).flatmap(
        lambda names: st.fixed_dictionaries(
            {needed: everything[needed]} | {name: optional[name] for name in sorted(names)}
        )
    )


requests = st.one_of(
    st.tuples(st.just(COMPLETIONS), bodies(completion)), st.tuples(st.just(CHAT), bodies(chat))
)
SEEN: Counter[int] = Counter()


def test_random_bodies(shared):
    """A body that nobody had thought of made a 500, left a block behind, or stopped the engine."""
    connections = [shared.open() for _ in range(8)]

    @settings(max_examples=150, deadline=None, derandomize=True, database=None)
    @given(st.lists(requests, min_size=8, max_size=8))
    def run(batch):
        for connection, (path, body) in zip(connections, batch, strict=True):
            limit = {"max_tokens": body.get("max_tokens", 3)}
            data = json.dumps({**body, **limit})
            connection.request("POST", path, data, {"Content-Type": "application/json"})
        for connection, (path, body) in zip(connections, batch, strict=True):
            response = connection.getresponse()
            data = response.read()
            SEEN[response.status] += 1
            assert response.status in (200, 400, 404), (path, body)
            if response.status == 200 and body.get("stream"):
                assert data.endswith(b"data: [DONE]\n\n") and b'"error"' not in data
            elif response.status == 200:
                assert all(choice["finish_reason"] for choice in json.loads(data)["choices"])
            else:
                Answer(response.status, {}, data).json["error"]["message"]

    run()
    for connection in connections:
        connection.close()
    shared.settle()
    shared.works()
    assert SEEN[200] > 250 and SEEN[400] > 250, SEEN


@settings(max_examples=1000, deadline=None, derandomize=True, database=None)
@given(st.booleans(), st.data())
def test_random_bodies_are_refused_or_prepared(shared, chatting, data):
    """The same without HTTP: an exception that is no Problem, a request that is queued already."""
    body = data.draw(bodies(chat if chatting else completion))
    try:
        made = shared.api.prepare(body, chatting, "id")
    except server_module.Problem as problem:
        assert problem.status in (400, 404) and problem.body["error"]["message"]
        return
    assert 1 <= sum(len(request.outputs) for request in made) <= 256
    assert all(sequence.max_len <= 256 for request in made for sequence in request.outputs)
    assert len({request.id for request in made}) == len(made)
    assert not shared.engine.has_work


# --- HTTP -----------------------------------------------------------------------------------------


def request_bytes(body: Any = SHORT, head: str = "", version="1.1", path=COMPLETIONS) -> bytes:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    length = "" if "Content-Length" in head else f"Content-Length: {len(data)}\r\n"
    return (
        f"POST {path} HTTP/{version}\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"{length}{head}\r\n"
    ).encode() + data


VERSION = b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n"
LAST = b"GET /version HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
MALFORMED = {
    "garbage": (b"\x00\xff\x16\x03\x01\r\n\r\n", 400),
    "TLS": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\r\n\r\n", 400),
    "one word": (b"GET\r\n\r\n", 400),
    "two words": (b"GET /\r\n\r\n", 400),
    "four words": (b"GET / HTTP/1.1 x\r\n\r\n", 400),
    "HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
    "HTTP/0.9": (b"GET / HTTP/0.9\r\n\r\n", 400),
    "no colon": (b"GET / HTTP/1.1\r\nHost\r\n\r\n", 400),
    "no name": (b"GET / HTTP/1.1\r\n: x\r\n\r\n", 400),
    "space before the colon": (b"GET / HTTP/1.1\r\nContent-Length : 5\r\n\r\n", 400),
    "folded": (b"GET / HTTP/1.1\r\na: b\r\n c\r\n\r\n", 400),
    "101 headers": (b"GET /version HTTP/1.1\r\n" + b"a: b\r\n" * 101 + b"\r\n", 431),
    "one huge header": (b"GET /version HTTP/1.1\r\na: " + b"b" * 70_000 + b"\r\n\r\n", 431),
    "length missing": (b"POST /v1/completions HTTP/1.1\r\nContent-Type: application/json\r\n\r\n",
                       411),
    "length negative": (request_bytes(head="Content-Length: -5\r\n"), 411),
    "length in letters": (request_bytes(head="Content-Length: five\r\n"), 411),
    "length with a sign": (request_bytes(head="Content-Length: +5\r\n"), 411),
    "length twice": (request_bytes(head="Content-Length: 5, 5\r\n"), 411),
    "length in Arabic": (request_bytes(head="Content-Length: \xb2\r\n"), 411),
    "length huge": (request_bytes(head="Content-Length: 99999999999\r\n"), 413),
    "length astronomic": (request_bytes(head=f"Content-Length: {'9' * 5000}\r\n"), 413),
    "chunked": (request_bytes(b"5\r\nhello\r\n0\r\n\r\n", "Transfer-Encoding: chunked\r\n"), 411),
    "chunked, no length": (
        b"POST /v1/completions HTTP/1.1\r\nContent-Type: application/json\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n", 411),
    "no type": (request_bytes().replace(b"Content-Type: application/json\r\n", b""), 415),
    "a form": (request_bytes().replace(b"application/json", b"text/plain"), 415),
}  # fmt: skip


def parse(data: bytes) -> list[Answer]:
    """Take apart the answers that came one after the other."""
    answers = []
    while data:
        head, _, data = data.partition(b"\r\n\r\n")
        line, *rest = head.decode().split("\r\n")
        headers = dict(each.split(": ", 1) for each in rest)
        status, length = int(line.split(" ")[1]), int(headers.get("Content-Length", 0))
        if headers.get("Transfer-Encoding") == "chunked":
            body = b""
            while size := int(data[: data.index(b"\r\n")], 16):
                start = data.index(b"\r\n") + 2
                body, data = body + data[start : start + size], data[start + size + 2 :]
            data = data[5:]
        else:
            body, data = data[:length], data[length:]
        answers.append(Answer(status, headers, body))
    return answers


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_request(server, case):
    """A crash, a hang, or a connection left open, with a body that is read as a request."""
    data, status = MALFORMED[case]
    (answer,) = parse(server.raw(data))  # and it closes, though the client would not
    answer.fails(status)
    assert answer.headers["Connection"] == "close"
    server.works()


@pytest.mark.parametrize(
    "data", [b"", b"GET / HTTP", b"\r\n", request_bytes()[:-5], request_bytes()[:30], b"\xff" * 99]
)
def test_client_closes_too_early(local, data, capfd):
    """A body shorter than stated was waited for, or its end printed as an error."""
    with socket.create_connection(("127.0.0.1", local.port)) as connection:
        connection.sendall(data)
    local.works()
    local.settle()
    assert capfd.readouterr().err == ""


def test_exactly_as_many_headers(server):
    """The limits were off by one, or hit what real clients send."""
    head = b"GET /version HTTP/1.1\r\nConnection: close\r\n" + b"a: b\r\n" * 99
    (answer,) = parse(server.raw(head + b"\r\n"))
    assert answer.status == 200
    big = b"GET /version HTTP/1.1\r\nConnection: close\r\na: " + b"b" * 60_000
    assert parse(server.raw(big + b"\r\n\r\n"))[0].status == 200
    room = 200_000 - len(json.dumps({"user": "", "max_tokens": 1}))  # --max-body
    for size, status in ((room, 200), (room + 1, 413)):
        body = {"user": "a" * size, "max_tokens": 1}
        assert server.post(COMPLETIONS, body).status == status


def test_header_names_and_types_in_any_case(server):
    """Header names were taken to have one case; a charset made the type unknown."""
    data = request_bytes(head="CONNECTION: CLOSE\r\n").replace(b"Content-Type", b"cONTENT-tYPE")
    for kind in (b"application/json; charset=utf-8", b"Application/JSON", b" application/json "):
        (answer,) = parse(server.raw(data.replace(b"application/json", kind)))
        assert answer.status == 200
    data = request_bytes(head="Connection: close\r\n").replace(b"Content-Length", b"CONTENT-LENGTH")
    assert parse(server.raw(data))[0].status == 200


def test_many_requests_at_once_on_one_connection(server):
    """A byte of the next request was lost to the watch for the client's end."""
    stream = request_bytes({**SHORT, "stream": True})
    answers = parse(server.raw(request_bytes() + stream + VERSION + request_bytes() + LAST))
    assert [answer.status for answer in answers] == [200] * 5
    texts = [answer.json["choices"][0]["text"] for answer in (answers[0], answers[3])]
    assert texts[0] == texts[1] == alone(**SHORT)[0].text
    assert answers[1].data.endswith(b"data: [DONE]\n\n")
    assert answers[2].json == answers[4].json


def test_slow_client(server):
    """Bytes that come one by one: the request is answered, and nobody else waits for it."""
    data = request_bytes(head="Connection: close\r\n")
    with socket.create_connection(("127.0.0.1", server.port), 20) as slow:
        for i in range(len(data) - 1):
            slow.sendall(data[i : i + 1])
            time.sleep(0.002)
        started = time.monotonic()
        server.works()
        assert time.monotonic() - started < 5
        slow.sendall(data[-1:])
        (answer,) = parse(receive(slow))
    assert answer.status == 200


def test_client_that_does_not_read(local):
    """A stream that nobody reads held up the others, or lost its text."""
    wish = {"prompt": PROMPT, "max_tokens": 200, "logprobs": 20, "seed": 1, "ignore_eos": True}
    with socket.socket() as lazy:
        lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        lazy.settimeout(20)
        lazy.connect(("127.0.0.1", local.port))
        lazy.sendall(request_bytes({**wish, "stream": True}, "Connection: close\r\n"))
        until(lambda: local.engine.has_work)
        local.works()
        until(lambda: not local.engine.has_work, 30)
        (answer,) = parse(receive(lazy))
    events = answer.data.decode().removesuffix("\n\n").split("\n\n")
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-1]]
    text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
    assert events[-1] == "data: [DONE]" and text == alone(**wish)[0].text


def test_a_long_prompt_holds_nobody_up(make_local):
    """While a text of megabytes was encoded, no stream moved."""
    local, waits, began = make_local(), [], time.monotonic()
    long = local.begin({"prompt": "hello there " * 150_000, "max_tokens": 5})
    with contextlib.closing(local.open()) as connection:
        while not select.select([long.sock], [], [], 0.005)[0]:
            started = time.monotonic()
            assert local.send("GET", "/health", on=connection).status == 200
            waits.append(time.monotonic() - started)
    response = long.getresponse()
    Answer(response.status, {}, response.read()).fails(400, "prompt", "context_length_exceeded")
    long.close()
    assert len(waits) > 5 and max(waits) < (time.monotonic() - began) / 2


def test_silent_clients_are_dropped(local, monkeypatch, capfd):
    """Connections that say nothing, or never end their body, were kept for ever."""
    monkeypatch.setattr(server_module, "IDLE_S", 0.2)
    monkeypatch.setattr(server_module, "BODY_S", 0.2)
    assert local.raw(b"", 5) == local.raw(b"GET / HTTP/1.1\r\n", 5) == b""
    assert local.raw(request_bytes()[:-1], 5) == b""
    assert len(parse(local.raw(VERSION, 5))) == 1
    assert capfd.readouterr().err == ""


def test_http_1_0(server):
    """The connection stayed open, and an old client waited for its end."""
    old = LAST.replace(b"1.1", b"1.0").replace(b"Connection: close\r\n", b"")
    (answer,) = parse(server.raw(old))
    assert answer.json["version"] and answer.headers["Connection"] == "close"
    (answer,) = parse(server.raw(request_bytes(version="1.0")))
    assert answer.json["choices"][0]["finish_reason"] == "length"


def test_http_1_0_stream(server):
    """The sizes of the chunks stood in the text."""
    data = server.raw(request_bytes({**SHORT, "stream": True}, version="1.0"))
    assert b"Transfer-Encoding" not in data
    assert data.partition(b"\r\n\r\n")[2].startswith(b"data: ") and data.endswith(b"[DONE]\n\n")


def test_head(server):
    """A HEAD got a body, which was read as the next answer."""
    for path in ("/", "/health", "/metrics", "/version", "/v1/models"):
        head, get = server.send("HEAD", path), server.get(path)
        assert (head.status, head.data) == (200, b"")
        if path != "/metrics":
            assert head.headers["Content-Length"] == get.headers["Content-Length"]
    assert server.send("HEAD", COMPLETIONS).status == 405
    assert server.send("HEAD", "/nothing").status == 404
    with contextlib.closing(server.open()) as connection:
        server.send("HEAD", "/version", on=connection)
        assert server.send("GET", "/version", on=connection).json


def test_head_of_the_engine(local, monkeypatch):
    """A HEAD for the endless stream of snapshots had no end."""
    with socket.create_connection(("127.0.0.1", local.port), 2) as connection:
        connection.sendall(VERSION.replace(b"GET /version", b"HEAD /engine") + LAST)
        data = receive(connection)
    assert data.count(b"HTTP/1.1 200 OK") == 2 and b'"version"' in data


def test_expect_100_continue(server):
    """curl waits a second before it sends a long body."""
    head, _, body = request_bytes(head="Expect: 100-continue\r\nConnection: close\r\n").partition(
        b"\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", server.port), 10) as connection:
        connection.sendall(head + b"\r\n\r\n")
        assert connection.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(body)
        (answer,) = parse(receive(connection))
    assert answer.status == 200
    too_long = request_bytes(head="Expect: 100-continue\r\nContent-Length: 999999999\r\n")
    assert parse(server.raw(too_long.partition(b"\r\n\r\n")[0] + b"\r\n\r\n"))[0].status == 413


def test_paths_and_methods(server):
    """A wrong path or method was a 500, or a 404 of another shape."""
    for path in ("/v1", "/v1/completions/", "/../etc/passwd", "//", "/page.html", "/v1/embeddings"):
        server.get(path).fails(404)
        server.post(path, {}).fails(404)
    for method in ("GET", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"):
        for path in (COMPLETIONS, CHAT):
            assert "POST" in server.send(method, path).fails(405)
    for path in ("/", "/health", "/metrics", "/version", "/engine", "/v1/models"):
        answer = server.post(path, {})
        answer.fails(405)
        assert answer.headers["Allow"]
    assert server.get("/version?a=b").status == 200


@pytest.mark.parametrize("line", ["POST /nothing", "POST /health", "401"])
def test_a_body_is_never_a_request(local, line, monkeypatch):
    """Any page can post a text to this server; its text was carried out as a request."""
    if line == "401":
        line = "POST /v1/completions"
        monkeypatch.setattr(local.args, "api_key", "secret")
    hidden = VERSION.replace(b"/version", b"/health")
    data = f"{line} HTTP/1.1\r\nHost: x\r\nContent-Type: text/plain\r\n".encode()
    data += b"Content-Length: %d\r\n\r\n" % len(hidden)
    with socket.create_connection(("127.0.0.1", local.port), 10) as connection:
        connection.sendall(data + hidden + LAST.replace(b"/version", b"/health"))
        answers = parse(receive(connection))
    assert [answer.status for answer in answers] in ([404], [405], [401], [answers[0].status, 200])
    if len(answers) == 2:
        assert answers[1].headers["Connection"] == "close"  # that of the last, not the hidden one


@pytest.mark.parametrize(
    "data",
    [
        LAST.replace(b"Connection: close", b"Transfer-Encoding: chunked")
        + b"23\r\n" + VERSION + b"\r\n0\r\n\r\n",
        request_bytes(head="Content-Length: 2\r\nContent-Length: 5\r\n")[: -len(json.dumps(SHORT))]
        + b"{}   ",
    ],
)  # fmt: skip
def test_ambiguous_lengths(server, data):
    """A proxy in front that reads the other length lets one client speak for another."""
    (answer,) = parse(server.raw(data, 3))
    assert answer.status in (200, 400, 411) and answer.headers["Connection"] == "close"


def test_client_that_closes_its_sending_side(local):
    """`nc -N` and the like got a success with an empty text."""
    with socket.create_connection(("127.0.0.1", local.port), 10) as connection:
        connection.sendall(request_bytes(head="Connection: close\r\n"))
        connection.shutdown(socket.SHUT_WR)
        answers = parse(receive(connection))
    assert not answers or answers[0].json["choices"][0]["finish_reason"]


# --- Keys, queues, origins ------------------------------------------------------------------------


def test_api_key(local, monkeypatch):
    """A path that was forgotten; a key that is the start of the right one."""
    monkeypatch.setattr(local.args, "api_key", "secret")
    for path in ("/", "/health"):
        assert local.get(path).status == 200
    for path in ("/metrics", "/version", "/engine", "/v1/models", COMPLETIONS, CHAT):
        method = "POST" if path in (COMPLETIONS, CHAT) else "GET"
        for key in ({}, {"Authorization": ""}, {"Authorization": "Bearer"},
                    {"Authorization": "Bearer secre"}, {"Authorization": "Bearer secrets"},
                    {"Authorization": "Basic secret"},
                    {"Authorization": "Bearer \xff"}):  # fmt: skip
            local.send(method, path, **key).fails(401, code="invalid_api_key")
    right = {"Authorization": "Bearer secret"}
    for path in ("/metrics", "/version", "/v1/models"):
        assert local.get(path, **right).status == 200
    assert local.post(COMPLETIONS, SHORT, **right).status == 200
    local.post(COMPLETIONS, {"n": 0}, **right).fails(400, "n")


def test_queue_full(local, monkeypatch):
    """The queue grew without bound; a full one stayed full."""
    wish = {"prompt": "a", "max_tokens": 250, "ignore_eos": True}
    running = [local.begin(wish) for _ in range(8)]  # all that run at once
    until(lambda: len(local.engine.running) == 8)
    monkeypatch.setattr(local.args, "max_queue", 3)
    waiting = [local.begin({**wish, "prompt": ["a", "b"]})]
    until(lambda: len(local.engine.waiting) == 2)
    answer = local.post(COMPLETIONS, {**wish, "prompt": ["a", "b"]})  # one too many
    assert re.search(r"\b2\b.*\b3\b", answer.fails(429))
    assert answer.headers["Retry-After"] == "1"
    waiting.append(local.begin(wish))
    until(lambda: len(local.engine.waiting) == 3)
    local.post(CHAT, {"messages": HI}).fails(429)
    assert "Retry-After" not in local.get("/health").headers
    for connection in running + waiting:
        connection.close()
    local.settle()
    local.works()


def test_cors(local, monkeypatch):
    """Any page could read the answers; or the one that may could not."""
    origin = {"Origin": "http://a.test"}
    assert not [name for name in local.get("/health", **origin).headers if "Access" in name]
    local.send("OPTIONS", COMPLETIONS, **origin).fails(405)
    monkeypatch.setattr(local.args, "cors", "http://a.test")
    monkeypatch.setattr(local.args, "api_key", "secret")
    asked = {**origin, "Access-Control-Request-Method": "POST",
             "Access-Control-Request-Headers": "authorization,content-type"}  # fmt: skip
    answer = local.send("OPTIONS", COMPLETIONS, **asked)  # a browser sends no key with it
    assert (answer.status, answer.data) == (204, b"")
    allowed = answer.headers["Access-Control-Allow-Headers"].replace(",", " ").split()
    assert {"authorization", "content-type"} <= {*allowed}
    for each in (answer, local.get("/health"), local.get("/v1/models")):
        assert each.headers["Access-Control-Allow-Origin"] == "http://a.test"
    monkeypatch.setattr(local.args, "api_key", None)
    stream = local.stream(SHORT)
    assert stream.headers["Access-Control-Allow-Origin"] == "http://a.test"
    stream.read()


def test_the_page_may_load_nothing_else(server):
    """A page that shows a model's text could be made to load a script of another host."""
    answer = server.get("/")
    assert answer.data == (ROOT / "page.html").read_bytes()
    assert answer.headers["Content-Type"] == "text/html; charset=utf-8"
    policy = answer.headers["Content-Security-Policy"].split("; ")
    assert {"default-src 'none'", "connect-src 'self'", "frame-ancestors 'none'"} <= {*policy}
    assert not re.search(r"https?:", answer.headers["Content-Security-Policy"])
    for path in ("/", "/health", "/nothing"):
        assert server.get(path).headers["X-Content-Type-Options"] == "nosniff"
        assert server.get(path).headers["Cache-Control"] == "no-store"


def certificate(folder: Path) -> Path:
    if not shutil.which("openssl"):
        pytest.skip("needs openssl, to make a certificate")
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1",
         "-nodes", "-keyout", "key.pem", "-out", "cert.pem", "-days", "2", "-subj", "/CN=x",
         "-addext", "subjectAltName=IP:127.0.0.1"],
        cwd=folder, check=True, capture_output=True,
    )  # fmt: skip
    return folder / "cert.pem"


def test_the_command_lines_options(tmp_path):
    """An option of the command line that reached nobody; TLS, and who does not speak it."""
    cert = certificate(tmp_path)
    options = ("--ssl-certfile", cert, "--ssl-keyfile", tmp_path / "key.pem", "--cors", "http://a",
               "--served-model-name", "mine", "--max-seq-len", 64, "--max-num-seqs", 2,
               "--max-queue", 1, "--max-body", 1000, "--kv-memory", "16MiB",
               "--disable-access-log")  # fmt: skip
    with Server(tmp_path, *options, KILOLM_API_KEY="secret") as secure:
        assert secure.url.startswith("https://127.0.0.1:")
        secure.context = ssl.create_default_context(cafile=cert)
        key = {"Authorization": "Bearer secret"}
        (listed,) = secure.get("/v1/models", **key).json["data"]
        assert (listed["id"], listed["max_model_len"]) == ("mine", 64)
        secure.get("/v1/models").fails(401, code="invalid_api_key")
        assert secure.get("/health").headers["Access-Control-Allow-Origin"] == "http://a"
        reply = secure.post(COMPLETIONS, {**SHORT, "model": "mine"}, **key).json
        assert reply["choices"][0]["text"] == alone(**SHORT)[0].text
        stream = {"prompt": "a", "max_tokens": 60, "ignore_eos": True, "n": 2, "stream": True}
        assert secure.post(COMPLETIONS, stream, **key).data.endswith(b"data: [DONE]\n\n")
        secure.post(COMPLETIONS, {"prompt": "a" * 1000}, **key).fails(413)
        secure.post(COMPLETIONS, {"prompt": ["a"] * 2}, **key).fails(429)
        with contextlib.suppress(ConnectionError):
            assert not secure.raw(VERSION).startswith(b"HTTP")  # not in the clear
        assert secure.get("/health").status == 200
        assert secure.end() == 0
        assert "GET" not in secure.log.read_text()


def test_errors_at_the_start(capfd, tmp_path, monkeypatch):
    """A traceback for a port that is taken, or a file that is not there."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        for options in (["--port", port], ["--port", "0", "--checkpoint", str(tmp_path)],
                        ["--port", "0", "--ssl-certfile", str(tmp_path / "no.pem")],
                        ["--port", "0", "--kv-memory", "9"]):  # fmt: skip
            assert server_module.main(["--device", "cpu", "--kv-memory", "16MiB", *options]) == 2
            error = capfd.readouterr().err
            assert error.count("server.py: error: ") == 1 and "Traceback" not in error
    with pytest.raises(SystemExit) as stop:
        parse_args(["--kv-memory", "much"])
    assert stop.value.code == 2
    monkeypatch.setenv("KILOLM_API_KEY", "a")
    assert parse_args([]).api_key == "a" and parse_args(["--api-key", "b"]).api_key == "b"
    assert parse_args([]).host == "127.0.0.1"  # nobody else, unless told so


def test_port_out_of_range(capfd):
    """A traceback for a port that does not exist."""
    try:
        status = server_module.main(["--device", "cpu", "--kv-memory", "16MiB", "--port", "99999"])
    except SystemExit as stop:
        status = stop.code
    assert status == 2 and "error: " in capfd.readouterr().err


# --- Clients that go ------------------------------------------------------------------------------


def test_200_clients_vanish(make_local):
    """Sequences of clients that had gone ran on; their blocks, and the books, were kept."""
    local = make_local(num_blocks=4096, max_num_seqs=64, max_num_batched_tokens=512)
    before = local.metrics()
    doomed = []
    for i in range(200):
        data = request_bytes({**LONG, "stream": i % 3 > 0, "n": 1 + (i % 50 == 0)})
        doomed.append(socket.create_connection(("127.0.0.1", local.port), 10))
        doomed[-1].sendall(data)
    until(lambda: len(local.engine.running) == 64)
    until(lambda: len(local.api.events) == 200)
    for i, connection in enumerate(doomed):
        if i % 2:  # with a reset
            reset = struct.pack("ii", 1, 0)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
        connection.close()
    local.settle(5)  # to run to their ends would take a minute
    after = until(lambda: (m := local.metrics())['request_success_total{finished_reason="abort"}']
                  >= 204 and m)  # fmt: skip
    assert after['request_success_total{finished_reason="abort"}'] == 204
    assert after["e2e_request_latency_seconds_count"] == 204
    assert before["num_requests_running"] == after["num_requests_running"] == 0
    assert after["num_requests_waiting"] == after["kv_cache_usage_perc"] == 0
    local.works()


def test_one_goes_and_the_others_stay(local):
    """A client's end aborted its neighbours."""
    wish = {"prompt": PROMPT, "seed": 3, "max_tokens": 120, "ignore_eos": True}
    stays = local.begin(wish)
    until(lambda: local.engine.running)
    for body in ({**wish, "stream": True}, wish, {**wish, "prompt": ["a", "b"], "n": 2}):
        goes = local.begin(body)
        until(lambda: len(local.api.events) > 1)
        goes.close()
        until(lambda: len(local.api.events) == 1)
    reply = json.loads(stays.getresponse().read())
    stays.close()
    assert reply["choices"][0]["text"] == alone(**wish)[0].text


def test_client_goes_after_the_next_request(local):
    """A client that had sent more was not seen to go."""
    with socket.create_connection(("127.0.0.1", local.port)) as connection:
        body = {"prompt": PROMPT, "max_tokens": 240, "ignore_eos": True, "n": 2}
        connection.sendall(request_bytes(body) + VERSION)
        until(lambda: local.engine.running)
        aborted = local.api.metrics.finished["abort"]
    local.settle()
    assert local.api.metrics.finished["abort"] == aborted + 2


def test_access_log(make_local, capsys):
    """Who asked for what was nowhere to be seen; or a prompt was."""
    local = make_local()
    local.args.disable_access_log = False
    local.works()
    local.post(COMPLETIONS, {"n": 0})
    local.raw(b"\r\n\r\n")
    stream = local.stream(LONG)
    stream.connection.close()
    stream.close()
    local.settle()
    lines = until(lambda: (e := capsys.readouterr().err) and e.splitlines())
    patterns = [rf"'POST {COMPLETIONS}' 200 \d\.\d+ s", rf"'POST {COMPLETIONS}' 400 \d\.\d+ s",
                r"'' 400 \d\.\d+ s", rf"'POST {COMPLETIONS}' gone \d\.\d+ s"]  # fmt: skip
    assert len(lines) == 4, lines
    for line, pattern in zip(lines, patterns, strict=True):
        assert re.fullmatch(pattern, line)


# --- An engine that breaks ------------------------------------------------------------------------


class Broken:
    """A runner that fails once, after some steps."""

    def __init__(self, runner: Any, after: int) -> None:
        self.runner, self.left = runner, after

    def __getattr__(self, name: str) -> Any:
        return getattr(self.runner, name)

    def __call__(self, *args: Any) -> Any:
        self.left -= 1
        if self.left == 0:
            raise RuntimeError("no memory at 0x7f00deadbeef in /root/secret.py")
        return self.runner(*args)


@pytest.fixture
def printed(monkeypatch):
    """The exceptions whose tracebacks were printed. Python 3.11 may not print two at a time."""
    kinds: list[str] = []
    monkeypatch.setattr(
        server_module.traceback, "print_exc", lambda: kinds.append(sys.exc_info()[0].__name__)
    )
    return kinds


def test_step_fails(make_local, printed):
    """One failure ended the engine for good, or left somebody waiting."""
    local = make_local()
    local.engine.runner = Broken(local.engine.runner, 12)
    stream, other, chat = local.stream(LONG), local.begin(LONG), local.begin(LONG | {"n": 3})
    events = stream.read().decode().split("\n\n")
    assert events[-1] == ""  # whole, and no [DONE] after an error
    error = json.loads(events[-2].removeprefix("data: "))
    Answer(500, {}, json.dumps(error).encode()).fails(500)
    assert sum('"error"' in event for event in events) == 1
    for connection in (other, chat):
        response = connection.getresponse()
        Answer(response.status, {}, response.read()).fails(500)
        connection.close()
    local.settle()
    assert local.get("/health").status == 200
    local.works()
    assert local.api.metrics.finished == {"stop": 0, "length": 1, "abort": 5}
    assert printed == ["RuntimeError"]


def test_engine_dies(make_local, monkeypatch, printed):
    """Requests waited for a thread that was no more."""
    local = make_local()
    step, calls = local.engine.step, iter(range(10))

    def dying() -> list:
        if next(calls) == 9:
            raise SystemExit("at 0x7f00deadbeef in /root/secret.py")
        return step()

    monkeypatch.setattr(local.engine, "step", dying)
    engine = local.open()
    engine.request("GET", "/engine")
    snapshots = engine.getresponse()
    stream, other = local.stream(LONG), local.begin(LONG)
    events = stream.read().decode().split("\n\n")
    assert "error" in json.loads(events[-2].removeprefix("data: "))
    response = other.getresponse()
    Answer(response.status, {}, response.read()).fails(500)
    assert snapshots.read().endswith(b"\n\n")  # has an end
    until(lambda: not local.driving.is_alive())
    for path, body in ((COMPLETIONS, SHORT), (COMPLETIONS, SHORT | {"stream": True}),
                       (CHAT, {"messages": HI})):  # fmt: skip
        local.post(path, body).fails(503)
    local.get("/health").fails(503)
    assert local.get("/metrics").status == local.get("/").status == 200
    assert not local.api.events and printed == ["SystemExit"]
    for connection in (engine, other):
        connection.close()


def test_a_bug_of_ours(local, monkeypatch, printed):
    """The client was told what only the log should say."""

    def boom(*_: Any) -> None:
        raise KeyError("/root/secret.py at 0x7f00deadbeef")

    with monkeypatch.context() as patch:
        patch.setattr(local.api, "prepare", boom)
        assert local.post(COMPLETIONS, SHORT).fails(500) == "internal error"
    assert printed == ["KeyError"]
    local.works()


# --- The end --------------------------------------------------------------------------------------


def finish(stream: http.client.HTTPResponse) -> list[str]:
    events = stream.read().decode().split("\n\n")
    stream.connection.close()
    return [event.removeprefix("data: ") for event in events if event.strip()]


def test_signal_drains(tmp_path):
    """A text broke off in the middle where the server was told to stop."""
    with Server(tmp_path) as server:
        idle = server.open()
        server.send("GET", "/version", on=idle)
        stream = server.stream({**LONG, "max_tokens": 200})
        server.process.send_signal(signal.SIGTERM)
        health = until(lambda: (h := server.send("GET", "/health", on=idle)).json["status"] !=
                       "ok" and h)  # fmt: skip
        assert (health.status, health.json) == (200, {"status": "stopping"})
        assert health.headers["Connection"] == "close"
        with pytest.raises(ConnectionError):
            server.get("/health")
        events = finish(stream)
        assert events[-1] == "[DONE]" and '"length"' in events[-2]
        assert server.process.wait(20) == 0
        assert "Traceback" not in server.log.read_text()


def test_signal_and_too_long(tmp_path):
    """The server would not end; or ended without a word to those that it left."""
    with Server(tmp_path, "--shutdown-timeout", 0.3) as server:
        stream, other = server.stream(LONG), server.begin(LONG)
        time.sleep(0.2)  # until it has been accepted
        started = time.monotonic()
        server.process.send_signal(signal.SIGINT)  # Ctrl-C does the same
        events = finish(stream)
        error = json.loads(events[-1])
        assert "stopping" in Answer(503, {}, json.dumps(error).encode()).fails(503)
        response = other.getresponse()
        Answer(response.status, {}, response.read()).fails(503)
        assert server.process.wait(20) == 0
        assert 0.3 <= time.monotonic() - started < 6


def test_second_signal(tmp_path):
    """Who presses Ctrl-C twice means it."""
    with Server(tmp_path) as server:
        stream = server.stream(LONG)
        server.process.send_signal(signal.SIGINT)
        time.sleep(0.2)
        assert server.process.poll() is None
        started = time.monotonic()
        assert server.end(signal.SIGINT) == 1
        assert time.monotonic() - started < 2
        with contextlib.suppress(http.client.IncompleteRead, ConnectionError):
            stream.read()
        stream.connection.close()


def test_requests_while_stopping(local, monkeypatch):
    """A request that came after the signal was begun, and then cut off."""
    with contextlib.closing(local.open()) as connection:
        local.send("GET", "/health", on=connection)
        time.sleep(0.2)  # it waits for the next request
        monkeypatch.setattr(local.api, "stopping", True)
        answer = local.post(COMPLETIONS, SHORT, connection)
        assert "stopping" in answer.fails(503)
        assert answer.headers["Connection"] == "close"
    assert not local.engine.has_work


def stopped(engine: Engine, data: bytes, capsys) -> bytes:
    """Serve in the main thread, as main() does; send bytes, then a signal; return what comes."""

    def client() -> bytes:
        while "serving" not in (line := capsys.readouterr().err):
            time.sleep(0.01)
        with socket.create_connection(("127.0.0.1", int(line.strip().rpartition(":")[2]))) as s:
            s.sendall(data)
            time.sleep(0.2)
            os.kill(os.getpid(), signal.SIGTERM)
            s.settimeout(10)
            return s.recv(2**16)

    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    try:
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(client)
            assert serve(engine, parse_args(["--port", "0", "--disable-access-log"])) == 0
            return answer.result()
    finally:
        for number, handler in zip((signal.SIGTERM, signal.SIGINT), before, strict=True):
            signal.signal(number, handler)


def test_an_idle_connection_is_no_error(capsys, caplog):
    """A browser's open connection filled the log with tracebacks at the end."""
    engine = Engine(model(), TOKENIZER, num_blocks=8)
    assert b"version" in stopped(engine, VERSION, capsys)
    assert "Traceback" not in caplog.text + capsys.readouterr().err


def test_signal_while_a_prompt_is_encoded(capsys, monkeypatch):
    """The connection was cut where the request had not reached the engine yet."""
    engine = Engine(model(), TOKENIZER, num_blocks=8)
    encode = TOKENIZER.encode
    monkeypatch.setattr(TOKENIZER, "encode", lambda text: time.sleep(0.5) or encode(text))
    assert stopped(engine, request_bytes(), capsys).startswith(b"HTTP/1.1 ")


def torchrun(folder: Path) -> Server:
    program = (Path(sys.executable).with_name("torchrun"), "--standalone", "--nproc-per-node", 2)
    return Server(folder, program=program)


def ranks(server: Server) -> list[int]:
    """The processes that torchrun has started, by rank."""
    children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children")
    if not children.exists():
        pytest.skip("needs Linux's /proc")
    of = {}
    for pid in map(int, children.read_text().split()):
        env = Path(f"/proc/{pid}/environ").read_text().split("\0")
        of |= {int(line[5:]): pid for line in env if line.startswith("RANK=")}
    return [of[rank] for rank in sorted(of)]


def test_two_ranks(tmp_path):
    """Under torchrun: another text, two servers, or a rank that outlives the first."""
    with torchrun(tmp_path) as server:
        first, second = ranks(server)
        answer = server.post(COMPLETIONS, SHORT).json
        assert answer["choices"][0]["text"] == alone(**SHORT)[0].text
        stream = server.stream({**SHORT, "max_tokens": 16})
        os.kill(first, signal.SIGTERM)
        assert finish(stream)[-1] == "[DONE]"
        assert server.process.wait(30) == 0
        assert not any(Path(f"/proc/{pid}").exists() for pid in (first, second))
        assert server.log.read_text().count("serving") == 1
        assert "Traceback" not in server.log.read_text()


def test_torchrun_is_told_to_stop(tmp_path):
    """torchrun passes SIGTERM on to all of its ranks."""
    with torchrun(tmp_path) as server:
        stream = server.stream({**SHORT, "max_tokens": 16})
        pids = ranks(server)
        server.process.send_signal(signal.SIGTERM)
        events = finish(stream)
        server.process.wait(60)
        assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
        assert events[-1] == "[DONE]"


# --- What it says of itself -----------------------------------------------------------------------


def test_metrics_are_prometheus_text(server):
    """Names that Prometheus refuses, or a histogram that does not add up."""
    server.works()
    answer = server.get("/metrics")
    assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    text = answer.data.decode()
    assert text.endswith("\n") and "\r" not in text
    kinds, samples = {}, {}
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            name, kind = line.split(" ")[2:]
            assert name not in kinds and kind in ("counter", "gauge", "histogram")
            kinds[name] = kind
        else:
            pattern = r'([a-z_:][a-z0-9_:]*)((?:\{[a-z_]+="[^"\\]*"\})?) (\S+)'
            name, labels, value = re.fullmatch(pattern, line).groups()
            of = re.sub("_(bucket|sum|count)$", "", name)
            of = of if kinds.get(of) == "histogram" else name
            assert of in kinds and list(kinds)[-1] == of, "samples stand under their own TYPE"
            assert kinds[of] != "counter" or name.endswith("_total")
            assert (name, labels) not in samples and math.isfinite(float(value))
            samples[name, labels] = float(value)
    assert {
        "kilolm:engine_step_seconds_total",
        "kilolm:num_requests_running", "kilolm:num_requests_waiting", "kilolm:kv_cache_usage_perc",
        "kilolm:num_preemptions_total", "kilolm:prompt_tokens_total",
        "kilolm:generation_tokens_total", "kilolm:prefix_cache_queries_total",
        "kilolm:prefix_cache_hits_total", "kilolm:request_success_total",
        "kilolm:time_to_first_token_seconds", "kilolm:inter_token_latency_seconds",
        "kilolm:e2e_request_latency_seconds", "kilolm:spec_decode_num_drafts_total",
        "kilolm:spec_decode_num_draft_tokens_total",
        "kilolm:spec_decode_num_accepted_tokens_total",
    } <= {*kinds}  # fmt: skip
    for name in (name for name, kind in kinds.items() if kind == "histogram"):
        buckets = [(labels, v) for (n, labels), v in samples.items() if n == f"{name}_bucket"]
        bounds = [float(re.search('le="(.*)"', labels)[1]) for labels, _ in buckets]
        assert bounds == sorted(bounds) and bounds[-1] == math.inf
        assert [v for _, v in buckets] == sorted(v for _, v in buckets)
        assert buckets[-1][1] == samples[f"{name}_count", ""]


def test_metrics_after_a_known_load(local):
    """A token counted twice, or not at all; a prompt counted once for each of its n."""
    before = local.metrics()
    replies = [
        local.post(COMPLETIONS, {"prompt": [PROMPT, "a"], "n": 2, "seed": 1, "max_tokens": 9}),
        local.post(COMPLETIONS, {**SHORT, "stream": True}),
        local.post(COMPLETIONS, {"prompt": [7] * 40, "max_tokens": 1, "ignore_eos": True}),
        local.post(COMPLETIONS, {"prompt": [7] * 40, "max_tokens": 1, "ignore_eos": True}),
        local.post(COMPLETIONS, {"stop_token_ids": [13], "logit_bias": {"13": 100}}),
    ]
    local.post(COMPLETIONS, {"n": 0}).fails(400, "n")  # counts for nothing
    usage = [reply.json["usage"] for reply in (replies[0], *replies[2:])]
    prompts = sum(each["prompt_tokens"] for each in usage) + len(TOKENIZER.encode(PROMPT))
    outputs = sum(each["completion_tokens"] for each in usage) + 6
    reasons = Counter(c["finish_reason"] for r in (replies[0], *replies[2:])
                      for c in r.json["choices"]) + Counter(["length"])  # fmt: skip
    local.settle()
    after = local.metrics()
    change = {name: after[name] - before[name] for name in after}
    assert change["prompt_tokens_total"] == prompts
    assert change["generation_tokens_total"] == outputs
    for reason in ("stop", "length", "abort"):
        name = f'request_success_total{{finished_reason="{reason}"}}'
        assert change[name] == reasons[reason]
    assert reasons["stop"] >= 1 and sum(reasons.values()) == 8
    assert change["time_to_first_token_seconds_count"] == 8
    assert change["inter_token_latency_seconds_count"] == outputs - 8
    assert change["e2e_request_latency_seconds_count"] == 8
    assert change["prefix_cache_queries_total"] == prompts  # of prompts alone, or no share is 1
    assert change["prefix_cache_hits_total"] == 32  # two blocks of the 40
    assert after["num_requests_running"] == after["kv_cache_usage_perc"] == 0
    first = after["time_to_first_token_seconds_sum"]
    rest = after["inter_token_latency_seconds_sum"]
    assert first + rest == pytest.approx(after["e2e_request_latency_seconds_sum"])


def test_gauges_while_it_runs(local):
    """Gauges that are always zero."""
    wish = {"prompt": "a", "max_tokens": 250, "ignore_eos": True}
    connections = [local.begin(wish) for _ in range(10)]
    found = until(lambda: (m := local.metrics())["num_requests_waiting"] == 2 and m)
    assert found["num_requests_running"] == 8 and 0 < found["kv_cache_usage_perc"] <= 1
    for connection in connections:
        connection.close()


def test_histogram():
    """A value on a bound belongs under it; one above all bounds was lost."""
    histogram = Histogram()
    for value in (0, 0.001, 0.0011, 300, 301):
        histogram.add(value)
    lines = [*histogram.lines("x")]
    assert lines[1:3] == ['x_bucket{le="0.001"} 2', 'x_bucket{le="0.0025"} 3']
    assert lines[-3:-1] == ['x_bucket{le="300"} 4', 'x_bucket{le="+Inf"} 5']
    assert lines[-1].endswith("x_count 5") and "x_sum 601.00" in lines[-1]


def test_version_and_health(server):
    assert server.get("/health").json == {"status": "ok"}
    version = re.search('^version = "(.*)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert server.get("/version").json == {"version": version[1]}


class Snapshots:
    """Reads what the page reads."""

    def __init__(self, client: Client) -> None:
        self.connection = client.open()
        self.connection.request("GET", "/engine")
        self.response = self.connection.getresponse()
        assert self.response.headers["Content-Type"] == "text/event-stream"

    def __next__(self) -> dict:
        line = self.response.readline()
        assert self.response.readline() == b"\n"
        return json.loads(line.removeprefix(b"data: "))

    def close(self) -> None:
        self.connection.close()
        self.response.close()


def test_snapshots(local):
    """Blocks of one sequence shown as another's; a row of what had ended; numbers that fall."""
    with contextlib.closing(Snapshots(local)) as snapshots:
        first = next(snapshots)
        assert (first["running"], first["waiting"], first["queue"]) == ([], [], 0)
        assert (first["blocks"], first["block_size"]) == (128, 16)
        wish = {"prompt": [PROMPT * 8] * 2 + ["a"] * 8, "max_tokens": 150, "ignore_eos": True}
        doomed = local.begin(wish)
        before, most, shared = first, 0, False
        for _ in range(60):
            now = next(snapshots)
            consistent(now)
            for name in ("steps", "output_tokens", "computed_tokens", "cached_tokens",
                         "preemptions"):  # fmt: skip
                assert now[name] >= before[name]
            before, most = now, max(most, len(now["running"]))
            blocks = [block for row in now["running"] for block in row["blocks"]]
            shared |= len(blocks) > len(set(blocks))
            if most == 8 and now["output_tokens"] > first["output_tokens"] + 100:
                break
        assert most == 8 and shared and now["waiting"]
        ids = {row["request"].rpartition("-")[0] for row in now["running"] + now["waiting"]}
        assert len(ids) == 1 and ids.pop().startswith("cmpl-")
        doomed.close()
        local.settle()
        until(lambda: (now := next(snapshots))["running"] == [] and now["waiting"] == [])


def consistent(now: dict) -> None:
    """One snapshot: every block in range, and nobody's and somebody's at once."""
    used = {block for row in now["running"] for block in row["blocks"]}
    assert all(0 <= block < now["blocks"] for block in used | {*now["cached"]})
    assert not used & {*now["cached"]}
    assert not any(row["blocks"] for row in now["waiting"])
    assert now["queue"] == len(now["waiting"]) and len(now["running"]) <= 8
    for row in now["running"]:
        assert row["length"] <= len(row["blocks"]) * now["block_size"]
        assert row["prompt"] <= row["tokens"] <= row["max"] and row["length"] < row["tokens"]
        assert row["phase"] == ("decode" if row["tokens"] > row["prompt"] else "prefill")
        assert len(row["text"]) <= 40 and row["index"] == 0 <= row["ran"] <= 32
    names = [(row["request"], row["index"]) for row in now["running"] + now["waiting"]]
    assert len(names) == len({*names})


def test_snapshots_of_n(local):
    """All n sequences had the same name, or the prompt's blocks were shown once."""
    with contextlib.closing(Snapshots(local)) as snapshots:
        doomed = local.begin({"prompt": "a" * 60, "n": 3, "max_tokens": 150, "ignore_eos": True})
        now = until(lambda: len((now := next(snapshots))["running"]) == 3 and now)
        assert sorted(row["index"] for row in now["running"]) == [0, 1, 2]
        assert len({row["request"] for row in now["running"]}) == 1
        assert len({row["blocks"][0] for row in now["running"]}) == 1
        doomed.close()


def test_cache_salt(local):
    """One user's prefix found, by its speed, by another, who can so guess what it was."""
    found = []
    body = SHORT | {"prompt": [*range(700, 740)]}
    for salt in ("a", "a", "b", None, "b"):
        before = local.engine.stats.cached_tokens
        assert local.post(COMPLETIONS, body | {"cache_salt": salt}).status == 200
        found.append(local.engine.stats.cached_tokens - before > 0)
    assert found == [False, True, False, False, True]


# --- The load generator ---------------------------------------------------------------------------


def bench_serve(monkeypatch, capsys, *arguments):
    """bench.py's rows and what it complains of."""
    monkeypatch.setattr(sys, "argv", ["bench.py", "serve", "--json", *map(str, arguments)])
    assert bench.main() == 0
    out, err = capsys.readouterr()
    return json.loads(out)["runs"], err


def test_bench_serve(local, tmp_path, monkeypatch, capsys):
    """Figures of another number of tokens than were streamed; a picture that no browser reads."""
    plot = tmp_path / "plot.svg"
    runs, _ = bench_serve(
        monkeypatch, capsys, "--url", f"http://127.0.0.1:{local.port}", "--rate", 100, "inf",
        "--requests", 6, "--prompt-tokens", 4, 16, "--new-tokens", 3, 3, "--prefixes", 2,
        "--prefix-tokens", 4, "--plot", plot,
    )  # fmt: skip
    assert [*runs] == ["100 requests/s", "all at once"]
    for figures in runs.values():
        assert figures["errors"][0] == 0 and figures["requests"][0] == 6
        assert figures["output_tok_s"][0] == pytest.approx(3 * figures["request_s"][0])
        assert 0 < figures["ttft_p50_ms"][0] <= figures["ttft_p99_ms"][0]
    assert len(ElementTree.parse(plot).findall("{*}polyline")) == 4


def test_bench_serve_says_what_failed(local, monkeypatch, capsys):
    """A server that refuses everything looked like a fast one; a port where nobody is, a crash."""
    few = ("--rate", 100, "--requests", 3, "--new-tokens", 5000)
    url = f"http://127.0.0.1:{local.port}"
    runs, err = bench_serve(monkeypatch, capsys, "--url", url, *few)
    assert runs["100 requests/s"]["errors"][0] == 3 and "400" in err and "context" in err
    runs, _ = bench_serve(monkeypatch, capsys, "--url", "http://127.0.0.1:1", *few)
    assert runs["100 requests/s"]["errors"][0] == 3


def test_summary_of_a_load():
    """Percentiles of one request's gaps instead of all; a request that failed counted as good."""
    quick = load.Outcome(0.0, [0.1, 0.2, 0.3], 3)
    slow = load.Outcome(1.0, [3.0, 3.5], 2)
    lost = load.Outcome(1.0, error="RuntimeError: 500")
    figures = load.summary([quick, slow, lost], load.Limits(ttft_s=1, tpot_s=0.2))
    assert (figures["errors"], figures["requests"]) == (1, 3)
    assert figures["output_tok_s"] == pytest.approx(5 / 3.5)
    assert figures["goodput_s"] == pytest.approx(1 / 3.5)
    assert figures["within_limits"] == pytest.approx(1 / 3)
    assert figures["itl_p50_ms"] == pytest.approx(100) and figures["ttft_p50_ms"] == 1050
    assert figures["tpot_p99_ms"] == pytest.approx(100 + 0.99 * 400)
