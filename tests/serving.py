"""Servers and clients for the tests: the server in threads of this process, and server.py as it is
started; a client that can be rude, and what it gets."""

import contextlib
import http.client
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple

import openai
import pytest
import torch
from conftest import ROOT, SHAKESPEARE
from ways import split

from around.api import listen_at
from around.api.front import listen
from around.folder.config import suggested_sampling
from around.folder.tokenizer import Tokenizer
from around.folder.weights import load_model
from around.machine import Ranks
from around.settings import SamplingParams, given
from around.start import make_engine
from generate import generate
from kv_cache import StaticCache
from sampling import Sequence
from server import Server, ServerArgs, parse_args
from tools.books import audit

os.environ["NO_PROXY"] = "127.0.0.1"  # openai's client would ask a proxy of the environment
TOKENIZER = Tokenizer(SHAKESPEARE)


def think_by(monkeypatch: Any, tokenizer: Tokenizer, begin: str, end: str, first: int = 5) -> Any:
    """Let two tokens of the bundled tokenizer be the marks of a thought. Return a function from a
    text to its ids: one for each mark, and one for each other byte."""
    marks = {first: begin.encode(), first + 1: end.encode()}
    encode, bytes_of = tokenizer.encode, tokenizer.bytes_of

    def encode_marks(text: str, *args: Any, **options: Any) -> list[int]:
        return [*marks] if text == begin + end else encode(text, *args, **options)

    monkeypatch.setattr(tokenizer, "encode", encode_marks)
    monkeypatch.setattr(tokenizer, "bytes_of", lambda i: marks.get(i) or bytes_of(i))
    # The token 3 + b is the byte b.
    return lambda text: [3 + b for b in text.replace(begin, "\2").replace(end, "\3").encode()]


COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPT, HI = "ROMEO:\nWhat", [{"role": "user", "content": "hi"}]
LONG = {"prompt": PROMPT, "max_tokens": 900, "ignore_eos": True}  # seconds of work
SHORT = {"prompt": PROMPT, "max_tokens": 6, "temperature": 0, "ignore_eos": True}
ABORTED = 'request_success_total{finished_reason="abort"}'  # of metrics()
LEAK = r"0x[0-9a-f]{5,}|Traceback|site-packages|\.py\b|/root|/home|/tmp"


def until(condition, seconds=120.0):
    """Wait for a condition, and return what it gave. The limit ends what hangs, and measures
    nothing: a busy machine may not run a process for a second."""
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

    @property
    def events(self) -> list[str]:
        return [event.removeprefix("data: ") for event in self.data.decode().split("\n\n")[:-1]]

    def fails(self, status: int, param: str | None = None, code: str | None = None) -> str:
        """Check an error's shape, also that of a stream's last event; return its message."""
        error = json.loads(self.events[-1] if self.events else self.data)["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert (error["param"], error["code"]) == (param, code), error
        assert self.events or self.status == status
        assert error["type"] == ("server_error" if status >= 500 else "invalid_request_error")
        assert error["message"] and not re.search(LEAK, error["message"]), error
        return error["message"]


def receive(connection: socket.socket) -> bytes:
    """Return all that comes until the other side closes."""
    return b"".join(iter(lambda: connection.recv(2**16), b""))


def read(connection: http.client.HTTPConnection) -> Answer:
    response = connection.getresponse()
    data = response.read()
    return Answer(response.status, dict(response.headers), data)


class Client:
    """Talk to a port of this machine."""

    port: int

    def open(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)

    def send(self, method: str, path: str, body: Any = None, on=None, **headers: str) -> Answer:
        """Send a request, and return the answer. Args: body: JSON, or bytes as they are. on: a
        connection, which opens anew each time."""
        if body is not None:
            headers = {"Content-Type": "application/json"} | headers
            body = body if isinstance(body, bytes) else json.dumps(body)
        with contextlib.nullcontext(on) if on else contextlib.closing(self.open()) as connection:
            connection.request(method, path, body, headers)
            return read(connection)

    def accepts(self) -> bool:
        with socket.socket() as attempt:
            return not attempt.connect_ex(("127.0.0.1", self.port))

    def get(self, path: str, **headers: str) -> Answer:
        return self.send("GET", path, **headers)

    def post(self, path: str, body: Any, on=None, **headers: str) -> Answer:
        return self.send("POST", path, body, on, **headers)

    def begin(self, body: dict, path: str = COMPLETIONS) -> http.client.HTTPConnection:
        """Send a request, and leave it."""
        connection = self.open()
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        return connection

    def stream(self, body: dict) -> http.client.HTTPResponse:
        """Start a stream, and wait for its first event."""
        connection = self.begin({**body, "stream": True})
        response = connection.getresponse()
        response.connection = connection  # keeps it open
        assert response.status == 200 and response.readline().startswith(b"data: ")
        response.readline()
        return response

    def raw(self, data: bytes, timeout: float = 20) -> list[Answer]:
        """Send bytes; return the answers that come until the server closes."""
        with socket.create_connection(("127.0.0.1", self.port), timeout) as connection:
            with contextlib.suppress(ConnectionError):
                connection.sendall(data)
            return parse(receive(connection))

    def metrics(self) -> Counter[str]:
        lines = self.get("/metrics").data.decode().splitlines()
        samples = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        names = r'vllm:|\{model_name="\w+",\}|(?<=\{)model_name="\w+",'
        return Counter({re.sub(names, "", name): float(value) for name, value in samples})

    def openai(self, kind=openai.OpenAI, key="none") -> openai.OpenAI:
        url = f"http://127.0.0.1:{self.port}/v1"
        return kind(base_url=url, api_key=key, max_retries=0, timeout=60)

    @cached_property
    def client(self):  # made once: it reads all certificates of the machine
        return self.openai()

    def works(self) -> None:
        assert self.post(COMPLETIONS, SHORT).json["choices"][0]["finish_reason"] == "length"


def parse(data: bytes) -> list[Answer]:
    """Take apart the answers that came one after the other."""
    answers = []
    while data:
        head, _, data = data.partition(b"\r\n\r\n")
        line, *rest = head.decode().split("\r\n")
        headers = dict(each.split(": ", 1) for each in rest)
        status = int(line.split(" ")[1])
        # Of a stream, all that comes belongs to it.
        size = 0 if status == 100 else int(headers.get("Content-Length", len(data)))
        answers.append(Answer(status, headers, data[:size]))
        data = data[size:]
    return answers


class Process(Client):
    """server.py, or another program that serves, in a process of its own."""

    def __init__(self, folder: Path, *options: object, program=(sys.executable,), **env) -> None:
        self.log = folder / "log"
        quick = ("--port", 0, "--device", "cpu", "--dtype", "float32")
        command = [str(word) for word in (*program, ROOT / "server.py", *quick, *options)]
        env = {**os.environ, "OMP_NUM_THREADS": "1", **env}
        with self.log.open("w") as log:
            self.process = subprocess.Popen(command, cwd=folder, stderr=log, env=env)

    def __enter__(self) -> "Process":
        def serving() -> re.Match | None:
            assert self.process.poll() is None, self.log.read_text()
            return re.search(r"serving \S+ on http://127.0.0.1:(\d+)\n", self.log.read_text())

        self.port = int(until(serving)[1])
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()


@cache
def model():
    return load_model(SHAKESPEARE, dtype=torch.float32)


def make_args(*options: str, **more: Any) -> ServerArgs:
    return ServerArgs(**given(ServerArgs, parse_args(["--port", "0", *options])) | more)


class Local(Client):
    """The server in two threads of this process."""

    def __init__(self, *options: str, model: Any = model, **limits: Any) -> None:
        small = {"num_blocks": 128, "max_num_seqs": 8, "max_num_batched_tokens": 32}
        self.args = make_args("--max-body", "200000", *options, **small | limits)
        self.engine = make_engine(self.args, Ranks(torch.device("cpu")), model(), None)
        listener = listen_at(self.args.host, self.args.port)
        self.server = Server(self.engine, self.args, listener)
        self.listening = threading.Thread(target=listen, args=(self.server,))
        self.running = threading.Thread(target=self.drive)
        self.listening.start()
        self.port = self.server.listener.getsockname()[1]
        self.running.start()

    def drive(self) -> None:
        """Run the engine as serve() does."""
        try:
            self.server.drive()
        finally:
            self.server.stopping = True

    def settle(self) -> None:
        """Wait until nothing is left of any request, and all memory is free."""
        server, engine = self.server, self.engine
        until(lambda: not (server.owners or engine.queue or server.inbox.qsize()))
        audit(self.engine)
        assert len(self.engine.pool.available) == self.engine.pool.num_blocks

    def close(self) -> None:
        self.server.stopping = True
        vars(self.args)["shutdown_timeout"] = 0
        self.listening.join(10)
        self.server.inbox.put(None)
        self.running.join(10)


@pytest.fixture(scope="module")
def shared():
    started = Local()
    yield started
    started.close()


@pytest.fixture
def local(shared):
    yield shared
    shared.settle()


@pytest.fixture
def make_local():
    """Start servers for this test alone, for engines that break or are large."""
    made: list[Local] = []

    def make(*options: str, **limits: Any) -> Local:
        made.append(Local(*options, **limits))
        return made[-1]

    yield make
    for each in made:
        each.close()


class Broken:
    """A runner that fails once, after some steps."""

    def __init__(self, runner: Any, after: int, error: type = RuntimeError) -> None:
        self.runner, self.left, self.error = runner, after, error

    def __getattr__(self, name: str) -> Any:
        return getattr(self.runner, name)

    def forward(self, *args: Any) -> Any:
        self.left -= 1
        if self.left == 0:
            raise self.error("no memory at 0x7f00deadbeef in /root/secret.py")
        return self.runner.forward(*args)


# --- OpenAI's client, and the slow twin -----------------------------------------------------------


class Choice(NamedTuple):
    text: str
    reason: str | None
    logprobs: dict | None


class Reply(NamedTuple):
    choices: list[Choice]
    usage: dict[str, int]


def call(local: Local, streamed: bool, chat: bool = False, **body: Any) -> Reply:
    """Ask through openai's client; check the form and put together what came in pieces."""
    at = local.client.chat.completions if chat else local.client.completions
    needed = {"messages": HI} if chat else {"prompt": PROMPT}
    needed = {name: body.pop(name, value) for name, value in needed.items()}
    if streamed:
        needed |= {"stream": True, "stream_options": {"include_usage": True}}
    answer = at.create(model="shakespeare", **needed, extra_body=body)
    parts = [*answer] if streamed else [answer]
    kind = "chat.completion" if chat else "text_completion"
    assert {part.object for part in parts} == {kind + ".chunk" * (streamed and chat)}
    assert len({(part.id, part.created, part.model) for part in parts}) == 1
    assert abs(parts[0].created - time.time()) < 60
    usage = {k: v for k, v in parts[-1].usage.model_dump().items() if v is not None}
    assert usage["prompt_tokens"] + usage["completion_tokens"] == usage["total_tokens"]
    if streamed:
        assert not any(part.usage for part in parts[:-1])
        assert parts.pop().choices == [] and all(len(part.choices) == 1 for part in parts)
    return Reply(merge([choice for part in parts for choice in part.choices], chat), usage)


def merge(news: list, chat: bool) -> list[Choice]:
    """Join the pieces of each choice. Each piece has what is new; the role comes once, and so does
    the end."""
    found: dict[int, Choice] = {}
    for new in news:
        old, first = found.get(new.index, Choice("", None, None)), new.index not in found
        text, logprobs = "" if chat else new.text, new.logprobs and new.logprobs.model_dump()
        if chat:
            message = getattr(new, "message", None) or new.delta
            assert message.role == ("assistant" if first else None)
            text = message.content
        assert old.reason is None, "something came after the end"
        assert text or new.finish_reason or logprobs, "an empty chunk"
        if old.logprobs:
            logprobs = {k: v and [*old.logprobs[k], *v] for k, v in logprobs.items()}
        found[new.index] = Choice(old.text + text, new.finish_reason, logprobs)
    assert all(choice.reason for choice in found.values())
    return [found[i] for i in range(len(found))]


TWINS: dict[str, list[Sequence]] = {}


def alone(prompt=PROMPT, **fields) -> list[Sequence]:
    """Return what the slow twin, generate(), makes of a prompt."""
    if (key := repr((prompt, fields))) not in TWINS:
        params = SamplingParams(**suggested_sampling(SHAKESPEARE) | fields)
        ids = TOKENIZER.encode(prompt) if isinstance(prompt, str) else prompt
        TWINS[key] = [Sequence(ids, each, model().config, TOKENIZER) for each in split(params)]
        for sequence in TWINS[key]:
            slabs = StaticCache(model(), 1, sequence.max_len)
            for _ in generate(model(), sequence, slabs):
                pass
    return TWINS[key]
