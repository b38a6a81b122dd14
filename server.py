"""An HTTP server in front of the scheduler that OpenAI's clients can talk to.

    python server.py                            the bundled model, on http://127.0.0.1:8000
    python server.py --checkpoint DIR --compile --api-key SECRET

Holds only HTTP. The main thread drives the engine; an event loop in another reads requests, checks
every field before anything is allocated, hands them over, and is told after each step who got a
token. A handler that is slow, or whose client has gone, holds nobody up: it reads its sequences'
state when it comes to it, so tokens wait there and not in a queue.

    client --> Connection --> Api.prepare --> inbox --> Driver.run: submit, step, step, ...
    client <-- answer / stream <-- event <--------------------+

Everything binds to loopback unless told otherwise, and nothing but the standard library is used.
What it costs: with 64 streams 6 to 9 % of the time is spent outside the engine's steps (what is
missing from kilolm:engine_step_seconds_total in /metrics, during `bench.py serve`).
References: platform.openai.com/docs/api-reference; the names in /metrics are vLLM's, but for
engine_step_seconds_total.
Read: Driver, Api.prepare, Api.complete, Connection, serve.
"""

import argparse
import asyncio
import contextlib
import hmac
import itertools
import json
import os
import queue
import secrets
import signal
import ssl
import sys
import time
import traceback
from bisect import bisect_left
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any

import torch

import tp
from generate import load_models, model_arguments, pick_device, sampling_params
from sampling import SamplingParams, Sequence, Token
from scheduler import Engine, Request, memory_size
from tokenizer import Tokenizer

MAX_HEADERS, MAX_HEADER_BYTES, MAX_CHOICES = 100, 2**16, 256
IDLE_S, BODY_S = 75, 60  # seconds that a connection may be silent, and a body may take
PAGE = Path(__file__).resolve().parent / "page.html"


class Problem(Exception):
    """An answer other than success, in OpenAI's shape."""

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
        kind = "server_error" if status >= 500 else kinds.get(status, "invalid_request_error")
        self.status = status
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


# --- The engine's thread --------------------------------------------------------------------------


class Driver:
    """Runs the engine's steps; all that touches the engine's state happens in run().

    Attributes:
        inbox: what to do before the next step, as (method of the engine, request); None: end.
        progressed: called after each step, with the requests that moved on.
        dead: why the engine will never run again.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.progressed: Callable[[list[Request]], None] = lambda requests: None
        self.inbox: queue.SimpleQueue[tuple[Callable[[Request], None], Request] | None]
        self.inbox = queue.SimpleQueue()
        self.dead: str | None = None
        self.watched_at = 0.0  # when somebody last asked for a snapshot
        self.snapshot: dict[str, Any] = {}

    def run(self) -> None:
        """Work until the inbox says to end, or the engine dies."""
        try:
            while True:
                while self.inbox.qsize() or not self.engine.has_work:
                    if not self.inbox.qsize():  # about to wait: this stays true until then
                        self.snapshot = take_snapshot(self.engine)
                    if (command := self.inbox.get()) is None:
                        return
                    act, request = command
                    act(request)
                    self.progressed([request])
                self.progressed(self.step())
                if time.monotonic() - self.watched_at < 1:
                    self.snapshot = take_snapshot(self.engine)
        except BaseException as error:
            self.dead = f"the engine has stopped: {type(error).__name__}"
            traceback.print_exc()
            self.progressed([])

    def step(self) -> list[Request]:
        """One step; where it fails, all requests end, and the next ones start anew."""
        try:
            return self.engine.step()
        except Exception as error:
            tasks = self.engine.running + self.engine.waiting
            self.engine.reset()
            if tp.is_lost(error):
                raise
            traceback.print_exc()
            return [*dict.fromkeys(task.request for task in tasks)]


def take_snapshot(engine: Engine) -> dict[str, Any]:
    """What the page shows: each block's owners, who runs and who waits. Some microseconds a row."""

    def row(task: Any) -> dict[str, Any]:
        sequence, request = task.sequence, task.request
        return {
            "request": request.id, "index": request.outputs.index(sequence),
            "prompt": sequence.prompt_len,
            "tokens": len(sequence.ids), "length": task.table.length, "max": sequence.max_len,
            "ran": engine.batch.get(task, 0), "phase": "decode" if sequence.tokens else "prefill",
            "blocks": task.table.blocks[:], "text": sequence.text[-40:],
        }  # fmt: skip

    pool, stats, proposer = engine.pool, engine.stats, engine.proposer
    return {
        "blocks": pool.num_blocks, "block_size": pool.block_size, "cached": pool.cached,
        "running": [row(task) for task in engine.running],
        "waiting": [row(task) for task in engine.waiting[:100]], "queue": len(engine.waiting),
        "steps": stats.steps, "output_tokens": stats.output_tokens,
        "computed_tokens": stats.computed_tokens, "cached_tokens": stats.cached_tokens,
        "preemptions": stats.preemptions, "offered": sum(proposer.offered),
        "accepted": sum(proposer.accepted), "model_ms": 1e3 * stats.model_s / max(1, stats.steps),
    }  # fmt: skip


# --- Metrics --------------------------------------------------------------------------------------


class Histogram:
    """Counts of values up to each bound, as Prometheus wants them."""

    BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)

    def __init__(self) -> None:
        self.counts, self.sum = [0] * (len(self.BOUNDS) + 1), 0.0

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.BOUNDS, value)] += 1
        self.sum += value

    def lines(self, name: str) -> Iterator[str]:
        yield f"# TYPE {name} histogram"
        for bound, count in zip((*self.BOUNDS, "+Inf"), itertools.accumulate(self.counts)):
            yield f'{name}_bucket{{le="{bound}"}} {count}'
        yield f"{name}_sum {self.sum}\n{name}_count {sum(self.counts)}"


class Metrics:
    """What has been served. Fed and read by the event loop alone."""

    def __init__(self) -> None:
        names = ("time_to_first_token", "inter_token_latency", "e2e_request_latency")
        self.histograms = {f"{name}_seconds": Histogram() for name in names}
        self.finished = {"stop": 0, "length": 0, "abort": 0}
        self.prompt_tokens = 0

    def add(self, sequence: Sequence) -> None:
        """Count a sequence that has ended, or whose client has gone."""
        first, between, whole = self.histograms.values()
        times = sequence.times[:]
        for i, (before, after) in enumerate(itertools.pairwise(times)):
            (between if i else first).add(after - before)
        self.finished[sequence.finish_reason or "abort"] += 1
        whole.add(times[-1] - times[0])

    def text(self, engine: Engine) -> str:
        """All of it, in Prometheus' format."""
        pool, stats, proposer = engine.pool, engine.stats, engine.proposer
        values = {
            "num_requests_running": len(engine.running),
            "num_requests_waiting": len(engine.waiting),
            "kv_cache_usage_perc": 1 - pool.num_available / pool.num_blocks,
            "num_preemptions_total": stats.preemptions,
            "prompt_tokens_total": self.prompt_tokens,
            "generation_tokens_total": stats.output_tokens,
            "engine_step_seconds_total": stats.total_s,
            "prefix_cache_queries_total": stats.queried_tokens,
            "prefix_cache_hits_total": stats.cached_tokens,
            "spec_decode_num_drafts_total": proposer.steps,
            "spec_decode_num_draft_tokens_total": sum(proposer.offered),
            "spec_decode_num_accepted_tokens_total": sum(proposer.accepted),
        }
        for reason, count in self.finished.items():
            values[f'request_success_total{{finished_reason="{reason}"}}'] = count
        for i, count in enumerate(proposer.accepted):
            values[f'spec_decode_num_accepted_tokens_per_pos_total{{position="{i}"}}'] = count
        lines, typed = [], set()
        for name, value in values.items():
            family = name.partition("{")[0]
            if family not in typed:
                kind = "counter" if family.endswith("_total") else "gauge"
                lines.append(f"# TYPE kilolm:{family} {kind}")
                typed.add(family)
            lines.append(f"kilolm:{name} {value}")
        for name, histogram in self.histograms.items():
            lines += histogram.lines(f"kilolm:{name}")
        return "\n".join(lines) + "\n"


# --- The API --------------------------------------------------------------------------------------


class Api:
    """What the paths do. One for each server; lives on the event loop."""

    def __init__(self, driver: Driver, args: argparse.Namespace) -> None:
        self.driver, self.engine, self.args = driver, driver.engine, args
        self.tokenizer = self.engine.tokenizer
        self.name = args.served_model_name or Path(args.checkpoint).resolve().name
        self.defaults = sampling_params(args.checkpoint)
        self.loop, self.metrics = asyncio.get_running_loop(), Metrics()
        self.events: dict[Request, asyncio.Event] = {}  # of the requests in flight
        self.answering = 0  # completions, from their first byte to their last
        self.stopping = False
        self.started = int(time.time())
        driver.progressed = partial(self.loop.call_soon_threadsafe, self._wake)

    def _wake(self, requests: list[Request]) -> None:
        for request in requests:
            if request in self.events:
                self.events[request].set()
        if self.driver.dead:
            for event in self.events.values():
                event.set()

    # --- Requests in ------------------------------------------------------------------------------

    def prepare(self, body: dict[str, Any], chat: bool, request_id: str) -> list[Request]:
        """Check a body, and make the engine's requests of it: request_id-0, -1, ...

        Raises:
            Problem: 400 and what is wrong with which field; 404 for another model.
        """
        model = body.get("model")
        if model is not None and model != self.name:
            raise Problem(
                404, f"model {model!r} is not served here, {self.name!r} is",
                "model", "model_not_found",
            )  # fmt: skip
        given = {
            f.name: body[f.name] for f in fields(SamplingParams) if body.get(f.name) is not None
        }
        given.pop("prompt_logprobs", None)  # echo with logprobs asks for them here
        for name in ("stream", "echo") + ("logprobs",) * chat:
            if not isinstance(body.get(name), bool | None):
                raise Problem(400, f"{name} must be true or false, is {body[name]!r}", name)
        if not isinstance(body.get("stream_options"), dict | None):
            raise Problem(400, "stream_options must be an object", "stream_options")
        if chat:
            top = body.get("top_logprobs")
            if top is not None and not given.get("logprobs"):
                raise Problem(400, "top_logprobs needs logprobs to be true", "top_logprobs")
            if given.pop("logprobs", False):
                given["logprobs"] = 0 if top is None else top
        elif body.get("echo") and "logprobs" in given:
            given["prompt_logprobs"] = given["logprobs"]
        if body.get("max_completion_tokens") is not None:
            given["max_tokens"] = body["max_completion_tokens"]
        best_of = body.get("best_of")
        if best_of is not None and (type(best_of) is not int or best_of != given.get("n", 1)):
            raise Problem(400, f"best_of must equal n here, is {best_of!r}", "best_of")
        asked = given.get("max_tokens")
        try:
            if isinstance(bias := given.get("logit_bias"), dict):
                V = self.engine.config.vocab_size
                if unknown := [i for i in bias if not (i.isdecimal() and int(i[:9]) < V)]:
                    raise ValueError(
                        f"logit_bias has {unknown[0][:20]!r}, which is no id below {V}"
                    )
                given["logit_bias"] = {int(i): value for i, value in bias.items()}
            params = replace(self.defaults, **given)
        except ValueError as error:
            field = str(error).split()[0]
            if field == "max_tokens" and "max_completion_tokens" in body:
                field = "max_completion_tokens"
            if field == "logprobs" and chat:
                field = "top_logprobs"
            raise Problem(400, str(error), field) from None
        if chat:
            stop = (*params.stop, *self.tokenizer.chat_stop)[:16]  # the user's own come first
            params = replace(params, stop=stop)
            prompts, param = [self._chat(body)], "messages"
        else:
            prompts, param = self._prompts(body), "prompt"
        if len(prompts) * params.n > MAX_CHOICES:
            raise Problem(
                400, f"{len(prompts)} prompts of n = {params.n} are more than {MAX_CHOICES}", "n"
            )
        pool = self.engine.pool
        context = min(self.engine.max_seq_len, pool.num_blocks * pool.block_size + 1)
        requests = []
        for ids in prompts:
            room = context - len(ids)
            new = asked or (max(1, room) if chat else 16)  # OpenAI's defaults
            if room < new:
                raise Problem(
                    400, f"the context is {context} tokens, but {len(ids) + new} were asked for: "
                    f"{len(ids)} in the prompt and {new} to generate", param,
                    "context_length_exceeded",
                )  # fmt: skip
            try:
                each = replace(params, max_tokens=new)
                name, salt = f"{request_id}-{len(requests)}", body.get("cache_salt")
                requests.append(self.engine.prepare(ids, each, name, cache_salt=salt))
            except ValueError as error:
                salted = str(error).startswith("cache_salt")
                raise Problem(400, str(error), "cache_salt" if salted else param) from None
        return requests

    def _prompts(self, body: dict[str, Any]) -> list[list[int]]:
        """A text, texts, ids, or lists of ids -> lists of ids."""
        prompt = body.get("prompt", "")
        if isinstance(prompt, str) or (prompt and _are(prompt, int)):
            prompt = [prompt]
        good = isinstance(prompt, list) and 0 < len(prompt) <= MAX_CHOICES
        if not good or not all(isinstance(each, str) or _are(each, int) for each in prompt):
            raise Problem(
                400, f"prompt must be a text, token ids, or a list of up to {MAX_CHOICES} of them",
                "prompt",
            )  # fmt: skip
        return [self.tokenizer.encode(p) if isinstance(p, str) else p for p in prompt]

    def _chat(self, body: dict[str, Any]) -> list[int]:
        messages = body.get("messages")
        if not messages or not _are(messages, dict):
            raise Problem(400, "messages must be a list of objects, at least one", "messages")
        plain = []
        for i, message in enumerate(messages):
            content, role = message.get("content"), message.get("role")
            if isinstance(content, list) and _are(content, dict):
                texts = [part.get("text") for part in content if part.get("type") == "text"]
                content = "".join(texts) if len(texts) == len(content) and _are(texts, str) else 0
            if not isinstance(content, str) or not isinstance(role, str):
                raise Problem(
                    400, f"messages[{i}] needs a role, and a content of text or text parts",
                    f"messages[{i}]",
                )  # fmt: skip
            plain.append({**message, "content": content})
        try:
            return self.tokenizer.encode_chat(plain)
        except ValueError as error:
            raise Problem(400, str(error), "messages") from None

    async def complete(self, connection: "Connection", body: dict[str, Any], chat: bool) -> None:
        """Answer a completion, whole or streamed; abort it if the client goes away."""
        if self.stopping or self.driver.dead:
            raise Problem(503, self.driver.dead or "the server is stopping")
        name = ("chatcmpl-" if chat else "cmpl-") + secrets.token_hex(12)
        # In another thread: a long text takes a while to encode, and others are being served.
        requests = await asyncio.to_thread(self.prepare, body, chat, name)
        waiting = len(self.engine.waiting) + self.driver.inbox.qsize()
        if waiting + len(requests) > self.args.max_queue:
            raise Problem(
                429, f"{waiting} requests are waiting, --max-queue is {self.args.max_queue}: retry"
            )
        reply, streams = Reply(self, name, body, requests), bool(body.get("stream"))
        try:
            async with connection.watching() as event:
                for request in requests:
                    self.events[request] = event
                    self.metrics.prompt_tokens += request.outputs[0].prompt_len
                    self.driver.inbox.put((self.engine.submit, request))
                finished = False
                while not finished and not connection.gone:
                    finished = all(request.finished for request in requests)
                    if self.driver.dead or any(s.finish_reason == "abort" for s in reply.sequences):
                        why = "is stopping" if self.stopping else "met an error"
                        raise Problem(503 if self.stopping else 500, f"aborted: the engine {why}")
                    if streams:
                        await connection.stream(reply.news())
                    if not finished:
                        await event.wait()
                        event.clear()
            if connection.gone:
                return
            if streams:
                await connection.stream([*reply.usage_chunk(), "[DONE]"], last=True)
            else:
                await connection.answer(200, reply.whole())
        finally:
            for request in requests:
                if self.events.pop(request, None):
                    for sequence in request.outputs:
                        self.metrics.add(sequence)
                if not request.finished:
                    self.driver.inbox.put((self.engine.abort, request))

    # --- Everything else --------------------------------------------------------------------------

    async def handle(self, connection: "Connection", method: str, path: str, head: dict) -> None:
        """Answer one request.

        Raises:
            Problem: any answer that is not a success.
        """
        paths = {
            "/": "GET", "/health": "GET", "/metrics": "GET", "/version": "GET", "/engine": "GET",
            "/v1/models": "GET", "/v1/completions": "POST", "/v1/chat/completions": "POST",
        }  # fmt: skip
        if path not in paths:
            raise Problem(404, f"there is no {path}")
        if method == "OPTIONS" and self.args.cors:
            await connection.answer(204, b"", "text/plain")
            return
        if method not in (paths[path], "HEAD" if paths[path] == "GET" else ""):
            raise Problem(405, f"{path} takes {paths[path]}, not {method}")
        key = head.get("authorization", "").removeprefix("Bearer ").encode()
        wanted = (self.args.api_key or "").encode()
        if wanted and path not in ("/", "/health") and not hmac.compare_digest(key, wanted):
            raise Problem(401, "the API key is missing or wrong", code="invalid_api_key")
        if path == "/":
            await connection.answer(200, PAGE.read_bytes(), "text/html; charset=utf-8")
        elif path == "/health":
            if self.driver.dead:
                raise Problem(503, self.driver.dead)
            await connection.answer(200, {"status": "stopping" if self.stopping else "ok"})
        elif path == "/metrics":
            text = self.metrics.text(self.engine).encode()
            await connection.answer(200, text, "text/plain; version=0.0.4")
        elif path == "/version":
            await connection.answer(200, {"version": "0.1.0"})
        elif path == "/engine":
            await self.watch_engine(connection)
        elif path == "/v1/models":
            model = {"id": self.name, "object": "model", "created": self.started,
                     "owned_by": "kilolm", "max_model_len": self.engine.max_seq_len}  # fmt: skip
            await connection.answer(200, {"object": "list", "data": [model]})
        else:
            body = await connection.json(head)
            self.answering += 1
            try:
                await self.complete(connection, body, chat=path == "/v1/chat/completions")
            finally:
                self.answering -= 1

    async def watch_engine(self, connection: "Connection") -> None:
        """Stream a snapshot of the engine ten times a second, for the page."""
        last = None
        async with connection.watching():
            while connection.method == "GET" and not (
                connection.gone or self.stopping or self.driver.dead
            ):
                self.driver.watched_at = time.monotonic()
                if self.driver.snapshot is not last:
                    last = self.driver.snapshot
                    await connection.stream([last])
                await asyncio.sleep(0.1)
        await connection.stream([], last=True)


class Reply:
    """Turns the state of requests into OpenAI's objects, whole or by what is new."""

    def __init__(self, api: Api, name: str, body: dict[str, Any], requests: list[Request]) -> None:
        self.api, self.requests, self.chat = api, requests, name.startswith("chat")
        self.params = requests[0].outputs[0].params
        self.echo = bool(body.get("echo")) and not self.chat
        options = body.get("stream_options") or {}
        self.usage_wanted = bool(options.get("include_usage"))
        self.usage_always = bool(options.get("continuous_usage_stats"))  # vLLM's: in each chunk
        self.sequences = [s for request in requests for s in request.outputs]
        self.shown = [(0, 0, False)] * len(self.sequences)  # characters, tokens, ended
        self.offsets = [0] * len(self.sequences)  # of the next token's text, for logprobs
        self.greeted: set[int] = set()  # choices whose role has been sent
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        self.base = {"id": name, "object": kind, "created": int(time.time()), "model": api.name}

    def whole(self) -> dict[str, Any]:
        kind = self.base["object"].removesuffix(".chunk")
        choices = [self._choice(i, delta=False) for i in range(len(self.sequences))]
        return self.base | {"object": kind, "choices": choices, "usage": self.usage()}

    def news(self) -> Iterator[dict[str, Any]]:
        """A chunk for each sequence that has moved on."""
        for i, sequence in enumerate(self.sequences):
            usage = {"usage": None} if self.usage_wanted else {}
            if self.usage_always:
                usage = {"usage": usage_of(sequence.prompt_len, len(sequence.tokens))}
            chars, tokens, ended = self.shown[i]
            if self.chat and i not in self.greeted and sequence.tokens:
                self.greeted.add(i)
                first = {"index": i, "delta": {"role": "assistant", "content": ""},
                         "logprobs": None, "finish_reason": None}  # fmt: skip
                yield self.base | {"choices": [first]} | usage
            moved = len(sequence.text) > chars or sequence.finish_reason or (
                self.params.logprobs is not None and len(sequence.tokens) > tokens
            )  # fmt: skip
            if moved and not ended:
                yield self.base | {"choices": [self._choice(i)]} | usage

    def _choice(self, i: int, delta: bool = True) -> dict[str, Any]:
        """What a sequence has that has not been shown."""
        sequence, (chars, count, _) = self.sequences[i], self.shown[i]
        reason = sequence.finish_reason  # read first: once it is there, nothing else changes
        tokens, text = sequence.tokens[count:], sequence.text[chars:]
        self.shown[i] = chars + len(text), count + len(tokens), bool(reason)
        if self.echo and not count and not chars:
            text = self.api.tokenizer.decode(sequence.prompt_ids) + text
            tokens = sequence.prompt_tokens + tokens
        choice: dict[str, Any] = {"index": i, "finish_reason": reason, "logprobs": None}
        if self.params.logprobs is not None:
            choice["logprobs"] = (
                self._chat_logprobs(tokens) if self.chat else self._logprobs(i, tokens)
            )
        if not self.chat:
            return choice | {"text": text}
        message = {"content": text}
        if delta:
            return choice | {"delta": message if text else {}}
        return choice | {"message": {"role": "assistant", **message, "refusal": None}}

    def _chat_logprobs(self, tokens: list[Token]) -> dict[str, Any]:
        def entry(token_id: int, logprob: float) -> dict[str, Any]:
            text = self._text(token_id)
            return {"token": text, "logprob": logprob, "bytes": [*text.encode()]}

        content = [
            entry(t.id, t.logprob) | {"top_logprobs": [entry(*each) for each in t.top]}
            for t in tokens
        ]
        return {"content": content, "refusal": None}

    def _logprobs(self, i: int, tokens: list[Token]) -> dict[str, Any]:
        texts = [self._text(token.id) for token in tokens]
        ends = [*itertools.accumulate(map(len, texts), initial=self.offsets[i])]
        self.offsets[i] = ends[-1]
        top = [{self._text(j): p for j, p in t.top} if t.logprob is not None else None
               for t in tokens]  # fmt: skip
        return {"tokens": texts, "token_logprobs": [token.logprob for token in tokens],
                "top_logprobs": top, "text_offset": ends[:-1]}  # fmt: skip

    def _text(self, token_id: int) -> str:
        return self.api.tokenizer.decode([token_id])

    def usage(self) -> dict[str, int]:
        prompt = sum(request.outputs[0].prompt_len for request in self.requests)
        return usage_of(prompt, sum(len(sequence.tokens) for sequence in self.sequences))

    def usage_chunk(self) -> list[dict[str, Any]]:
        chunk = self.base | {"choices": [], "usage": self.usage()}
        return [chunk] if self.usage_wanted else []


def usage_of(prompt: int, output: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}


def _are(items: Any, kind: type) -> bool:
    return isinstance(items, list) and all(type(item) is kind for item in items)


# --- HTTP -----------------------------------------------------------------------------------------


class Connection:
    """One client: reads HTTP/1.1 requests, writes answers, until either side has had enough."""

    def __init__(
        self, api: Api, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.api, self.reader, self.writer = api, reader, writer
        self.gone = False  # the client has closed
        self.keep, self.streaming, self.method = True, False, ""
        self.chunked, self.unread = True, False
        self.buffer = bytearray()  # read, and not used yet

    async def serve(self) -> None:
        try:
            while self.keep and not self.gone and not self.api.stopping:
                await self.one()
        except (TimeoutError, OSError, asyncio.CancelledError):
            pass  # it has gone, or fell silent, or the server has ended
        finally:
            self.writer.close()

    async def _read(self, enough: Callable[[], bool]) -> None:
        """Read until the buffer is enough."""
        while not enough():
            if not (data := await self.reader.read(2**16)):
                raise ConnectionResetError
            self.buffer += data

    async def one(self) -> None:
        """Read a request and answer it."""
        start, status, line = time.perf_counter(), 200, "?"
        self.streaming, self.method, self.unread = False, "", True
        try:
            end, most = b"\r\n\r\n", MAX_HEADER_BYTES
            await asyncio.wait_for(
                self._read(lambda: end in self.buffer or len(self.buffer) > most), IDLE_S
            )
            start = time.perf_counter()
            text, found, rest = bytes(self.buffer).partition(end)
            if len(text) > most or not found:
                raise Problem(431, f"headers are over {most} bytes")
            self.buffer = bytearray(rest)
            line, *rest = text.decode("latin-1").split("\r\n")
            words = line.split(" ")
            if len(words) != 3 or words[2] not in ("HTTP/1.1", "HTTP/1.0"):
                raise Problem(400, "this is not an HTTP/1.1 request")
            if len(rest) > MAX_HEADERS:
                raise Problem(431, f"{len(rest)} headers are more than {MAX_HEADERS}")
            pairs = [each.partition(":") for each in rest]
            if not all(colon and name == name.strip() and name for name, colon, _ in pairs):
                raise Problem(400, "a header is malformed")
            head = {name.lower(): value.strip() for name, _, value in pairs}
            self.method, path = words[0], words[1].partition("?")[0]
            names = [name.lower() for name, _, _ in pairs]
            if names.count("content-length") > 1:
                raise Problem(400, "the body has two lengths")
            self.chunked = words[2] == "HTTP/1.1"
            self.keep = self.chunked and head.get("connection", "").lower() != "close"
            self.unread = head.get("content-length", "0") != "0" or "transfer-encoding" in head
            if self.method != "POST" and self.unread:
                self.keep = False  # nobody will read its body
            await self.api.handle(self, self.method, path, head)
        except Problem as problem:
            status = problem.status
            await self.fail(problem)
        except (TimeoutError, OSError):
            self.gone = True
            raise
        except Exception:  # ours: the client is told no more than that
            status = 500
            traceback.print_exc()
            await self.fail(Problem(500, "internal error"))
        finally:
            if line != "?" and not self.api.args.disable_access_log:
                took = time.perf_counter() - start
                code = "gone" if self.gone else status
                print(f"{line.split(' HTTP')[0]!r} {code} {took:.3f} s", file=sys.stderr)

    async def fail(self, problem: Problem) -> None:
        if self.streaming:
            await self.stream([problem.body], last=True)
            return
        if self.unread:
            self.keep = False  # what follows is a body, or who knows what
        await self.answer(problem.status, problem.body)

    async def json(self, head: dict[str, str]) -> dict[str, Any]:
        """Read the body, a JSON object."""
        self.unread = True  # or of unknown length
        if head.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise Problem(415, "the body must be JSON: send Content-Type: application/json")
        length, most = head.get("content-length", ""), self.api.args.max_body
        if not (length.isascii() and length.isdigit()) or "transfer-encoding" in head:
            raise Problem(411, "send the body with a Content-Length")
        if len(length) > 18 or int(length) > most:
            raise Problem(413, f"the body has {length[:18]} bytes, --max-body is {most}")
        if head.get("expect", "").lower() == "100-continue":
            self.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        size = int(length)
        await asyncio.wait_for(self._read(lambda: len(self.buffer) >= size), BODY_S)
        data, self.buffer, self.unread = bytes(self.buffer[:size]), self.buffer[size:], False

        def refuse(word: str) -> None:
            raise ValueError(f"{word} is not a number that JSON has")

        try:
            body = json.loads(data, parse_constant=refuse)
        except (ValueError, RecursionError) as error:
            raise Problem(400, f"the body is not JSON: {error}") from None
        if not isinstance(body, dict):
            raise Problem(400, "the body must be a JSON object")
        return body

    async def answer(self, status: int, body: Any, kind: str = "application/json") -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self._head(status, kind, f"Content-Length: {len(data)}")
        self.writer.write(b"" if self.method == "HEAD" else data)
        await self.writer.drain()

    async def stream(self, items: Any, last: bool = False) -> None:
        """Send server-sent events, as chunks of one answer."""
        if not self.streaming:
            self.keep = self.keep and self.chunked
            self._head(200, "text/event-stream", "Transfer-Encoding: chunked" * self.chunked)
            self.streaming = True
        text = "".join(
            f"data: {item if isinstance(item, str) else json.dumps(item)}\n\n" for item in items
        )
        if text and self.method != "HEAD":
            data = text.encode()
            self.writer.write(b"%x\r\n%s\r\n" % (len(data), data) if self.chunked else data)
        if last and self.chunked and self.method != "HEAD":
            self.writer.write(b"0\r\n\r\n")
        await self.writer.drain()

    def _head(self, status: int, kind: str, length: str) -> None:
        if self.api.stopping:
            self.keep = False
        lines = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}", f"Content-Type: {kind}", length,
                 "Connection: " + ("keep-alive" if self.keep else "close"),
                 "Cache-Control: no-store", "X-Content-Type-Options: nosniff"]  # fmt: skip
        if "html" in kind:  # the page needs itself and this server, nothing else
            lines.append("Content-Security-Policy: default-src 'none'; connect-src 'self'; "
                         "style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:; "
                         "frame-ancestors 'none'")  # fmt: skip
        if status == 429:
            lines.append("Retry-After: 1")
        if status == 405:
            lines.append("Allow: GET, HEAD, POST")
        if self.api.args.cors:
            lines += [f"Access-Control-Allow-Origin: {self.api.args.cors}",
                      "Access-Control-Allow-Headers: authorization, content-type"]  # fmt: skip
        self.writer.write("\r\n".join([*filter(None, lines), "", ""]).encode())

    @contextlib.asynccontextmanager
    async def watching(self) -> AsyncIterator[asyncio.Event]:
        """Notice if the client closes meanwhile: then `gone` and the event are set."""
        event = asyncio.Event()

        async def watch() -> None:
            with contextlib.suppress(OSError):
                while len(self.buffer) < MAX_HEADER_BYTES:
                    if not (data := await self.reader.read(2**16)):
                        break
                    self.buffer += data  # of the next request
                else:
                    return
            self.gone = True
            event.set()

        task = asyncio.create_task(watch())
        try:
            yield event
        finally:
            task.cancel()
            await asyncio.wait([task])


# --- The command line -----------------------------------------------------------------------------


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="server.py", description="Serve a model over HTTP.")
    model_arguments(parser)
    add = parser.add_argument
    add("--host", default="127.0.0.1", help="0.0.0.0 is every network (default: this machine only)")
    add("--port", type=int, default=8000, help="0: any that is free (8000)")
    add("--served-model-name", help="in the API (default: the folder's name)")
    add("--max-num-seqs", type=int, default=64, help="sequences running at once (64)")
    add("--max-num-batched-tokens", type=int, help="tokens in a step (README: Serving)")
    add("--kv-memory", type=memory_size, default=0.5, help="bytes, 2GiB, or a share of the free")
    add("--block-size", type=int, default=16, help="tokens in a block (16)")
    add("--max-queue", type=int, default=1024, help="waiting requests before a 429 (1024)")
    add("--max-body", type=int, default=2**22, help="bytes of a request (4 MiB)")
    add("--shutdown-timeout", type=float, default=30, help="seconds to finish what runs (30)")
    add("--api-key", default=os.environ.get("KILOLM_API_KEY"), help="or $KILOLM_API_KEY")
    add("--cors", metavar="ORIGIN", help="let pages of this origin use the API")
    add("--ssl-certfile", type=Path)
    add("--ssl-keyfile", type=Path)
    add("--disable-access-log", action="store_true")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Run until a signal comes; return the exit status."""
    tp.silence()
    args = parse_args(argv)
    try:
        with tp.join(pick_device(args.device)) as ranks:
            tokenizer = Tokenizer(args.checkpoint)
            model, draft, guesses = load_models(args, ranks)
            if ranks.rank:
                tp.follow(model)
                return 0
            # The more of a prompt a step takes, the longer all others wait for their next token: on
            # a CPU the 99th percentile was 1.7 to 2.8 times the median with 32 tokens of prompts, 4
            # times with steps of 512. 2,048 for GPUs is vLLM's figure; not measured here.
            budget = args.max_num_batched_tokens or (
                args.max_num_seqs * (1 + guesses) + (32 if ranks.device.type == "cpu" else 2048)
            )
            engine = Engine(
                model, tokenizer, args.max_num_seqs, budget, args.max_seq_len, args.kv_memory,
                block_size=args.block_size, compile=args.compile, draft=draft, speculate=guesses,
                kv_dtype=torch.int8 if args.kv_dtype == "int8" else None, runner=ranks.runner,
            )  # fmt: skip
            return serve(engine, args)
    except (ValueError, OSError, OverflowError) as error:  # the last: a port over 65535
        return tp.report("server.py", error)
    except KeyboardInterrupt:
        return 130


def serve(engine: Engine, args: argparse.Namespace) -> int:
    """Serve until SIGTERM or SIGINT; then finish what runs, within --shutdown-timeout.

    PyTorch's threads belong to the thread that first used them, which is this one, where the model
    was loaded: a model that runs in another gets a second pool of them, and OpenMP, seeing more
    threads than processors, puts them to sleep between any two operations. On two cores the bundled
    model was slower by half.
    """
    driver, loop, stop = Driver(engine), asyncio.new_event_loop(), asyncio.Event()

    def signalled(*_: Any) -> None:
        if stop.is_set():
            os._exit(1)  # the second time: at once
        loop.call_soon_threadsafe(stop.set)

    def http() -> None:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(listen(driver, args, stop))

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signalled)
    with ThreadPoolExecutor(1) as pool:
        listening = pool.submit(http)
        listening.add_done_callback(lambda _: driver.inbox.put(None))
        driver.run()
        listening.result()
    return 0


async def listen(driver: Driver, args: argparse.Namespace, stop: asyncio.Event) -> None:
    """Answer requests until `stop` is set, and then those that are still running."""
    api, context = Api(driver, args), None
    if args.ssl_certfile:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(args.ssl_certfile, args.ssl_keyfile)
    listener = await asyncio.start_server(
        lambda reader, writer: Connection(api, reader, writer).serve(),
        args.host, args.port, limit=MAX_HEADER_BYTES, ssl=context, backlog=1024,
    )  # fmt: skip
    host, port = listener.sockets[0].getsockname()[:2]
    where = f"http{'s' if context else ''}://{f'[{host}]' if ':' in host else host}:{port}"
    print(f"serving {api.name} on {where}", file=sys.stderr, flush=True)
    await stop.wait()
    api.stopping = True
    listener.close()
    deadline = time.monotonic() + args.shutdown_timeout
    while api.answering and time.monotonic() < deadline:
        await asyncio.sleep(0.05)
    for request in [*api.events]:
        driver.inbox.put((driver.engine.abort, request))
    for _ in range(20):
        await asyncio.sleep(0.05 if api.answering else 0)


if __name__ == "__main__":
    sys.exit(main())
