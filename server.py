"""An HTTP server in front of the scheduler that OpenAI's clients can talk to.

    python server.py                            the bundled model, on http://127.0.0.1:8000
    python server.py --checkpoint DIR --compile --api-key SECRET

Holds only HTTP. The main thread drives the engine; an event loop in another reads requests, checks
every field before anything is allocated, hands them over, and is told after each step who got a
token. A handler that is slow, or whose client has gone, holds nobody up: it reads its sequences'
state when it comes to it, so tokens wait there and not in a queue.

    client --> Connection.complete --> Server.prepare --> inbox --> Server.run: submit, step, step
    client <-- Connection.stream <---- choices <-------- event <--- Server.wake <-----+

Everything binds to loopback unless told otherwise, and nothing but the standard library is used.
References: platform.openai.com/docs/api-reference; the names in /metrics are vLLM's, but for
engine_steps_total.
Read: Server.run, Server.prepare, choices, Connection.complete, serve.
"""

import argparse
import asyncio
import http.client
import io
import json
import os
import queue
import re
import secrets
import signal
import sys
import time
import traceback
from asyncio import StreamReader, StreamWriter
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import fields, replace
from itertools import accumulate
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import tp
from generate import load_models, model_arguments
from model import check
from sampling import BROKEN, SamplingParams, Sequence, Token, sampling_params
from scheduler import Engine, Request
from structured import pieces, structure
from tokenizer import Detokenizer, Tokenizer

MAX_CHOICES, MAX_HEAD = 256, 2**16
IDLE_S, BODY_S = 75, 60  # seconds that a connection may be silent, and a body may take
PAGE = Path(__file__).resolve().parent / "page.html"
ERRORS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
ALIASES = {"max_tokens": "max_completion_tokens", "logprobs": "top_logprobs",
           "structured_outputs": "response_format"}  # fmt: skip  # as OpenAI has it
# What would change the answer, and is not done: with other values than these it is refused. What
# would not change it, such as `user` or `store`, is ignored, as are unknown names.
UNSUPPORTED: dict[str, tuple] = {
    "tools": ([],), "functions": ([],), "suffix": ("",), "modalities": (["text"],), "audio": (),
    "use_beam_search": (False,), "prompt_logprobs": (), "min_tokens": (0,), "bad_words": ([],),
    "skip_special_tokens": (True,), "include_stop_str_in_output": (False,), "chat_template": (),
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar"), ()),
    **dict.fromkeys(("allowed_token_ids", "truncate_prompt_tokens", "documents"), ()),
}  # fmt: skip
# OpenAI's words, for which clients look.
TOO_LONG = "This model's maximum context length is {} tokens. However, you requested {} tokens"


class Problem(Exception):
    """An answer other than success, in OpenAI's shape."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str = "") -> None:
        super().__init__(message)
        kind = ERRORS.get(status, "server_error" if status >= 500 else "invalid_request_error")
        error = {"message": message, "type": kind, "param": param, "code": code or None}
        self.status, self.body = status, {"error": error}


# --- The server -----------------------------------------------------------------------------------


class Server:
    """The engine, and who waits for it. Whatever touches the engine's state happens in run().

    Attributes:
        inbox: what to do before the next step; None: end.
        waiters: the connection that is to answer each request in the engine.
        served: what has been counted; see count(). It and `waiters` are the engine's thread's.
        busy: connections that are being answered.
        stopping: a signal has come; over: and what runs has had its time to end.
    """

    def __init__(self, engine: Engine, args: argparse.Namespace) -> None:
        self.engine, self.args, self.tokenizer = engine, args, engine.tokenizer
        self.name = args.served_model_name or Path(args.checkpoint).resolve().name
        self.model = {"id": self.name, "object": "model", "owned_by": "kilolm"}
        self.model |= {"created": int(time.time()), "max_model_len": engine.max_seq_len}
        self.defaults, pool = sampling_params(args.checkpoint), engine.pool
        # A sequence's last token is never run, and needs no slot in the cache.
        self.context = min(engine.max_seq_len, pool.num_blocks * pool.block_size + 1)
        self.inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.waiters: dict[Request, Connection] = {}
        self.served: dict[str, Counter] = defaultdict(Counter)
        self.busy: set[Connection] = set()
        self.stopping, self.over, self.snapshot = False, False, {}

    # --- The engine's thread ----------------------------------------------------------------------

    def run(self) -> None:
        """Do what comes in and run steps, until told to end. Where a step fails all requests end,
        and the next ones start anew; not so where another rank is lost."""
        while True:
            try:
                while not (self.engine.queue and self.inbox.empty()):
                    if not (act := self.inbox.get()):
                        return
                    act()
                lost = [request for request, c in self.waiters.items() if c.gone or self.over]
                for request in lost:
                    self.engine.abort(request)
                self.wake(lost + self.engine.step())
            except Exception as error:
                self.engine.reset()
                self.wake([*self.waiters])
                if tp.is_lost(error):
                    self.stopping = True
                    raise
                traceback.print_exc()

    def submit(self, request: Request, connection: "Connection") -> None:
        self.waiters[request] = connection
        self.engine.submit(request)

    def wake(self, requests: list[Request]) -> None:
        """Tell the event loop whose requests have moved on, and count those that have ended."""
        events = [self.waiters[request].event for request in requests]
        for request in requests:
            if request.finished:
                del self.waiters[request]
                count(self.served, request)
        with suppress(RuntimeError):  # it has ended: nobody waits
            self.loop.call_soon_threadsafe(lambda: [event.set() for event in events])

    def look(self) -> None:
        """Take a snapshot for the page: each block's owners, who runs and who waits. Some
        microseconds a row."""

        engine, pool = self.engine, self.engine.pool
        self.snapshot = counters(engine) | {
            "blocks": pool.num_blocks, "block_size": pool.block_size, "cached": [*pool.cached],
            "waiting": [sequence.prompt_len for sequence in engine.waiting[:100]],
            "running": [{
                "name": f"{s.request.id}.{s.request.outputs.index(s)}", "prompt": s.prompt_len,
                "length": s.table.length, "max": s.max_len, "blocks": s.table.blocks[:],
                "ran": engine.ran.get(s, 0), "text": s.text[-40:],
            } for s in engine.running],
        }  # fmt: skip

    # --- The event loop's thread ------------------------------------------------------------------

    async def listen(self) -> None:
        """Answer until a signal comes, and then those that are being answered."""
        self.loop, host, port = asyncio.get_running_loop(), self.args.host, self.args.port
        listener = await asyncio.start_server(
            lambda *ends: Connection(self, *ends).serve(), host, port, limit=MAX_HEAD, backlog=1024
        )
        self.port = listener.sockets[0].getsockname()[1]
        print(f"serving {self.name} on http://{host}:{self.port}", file=sys.stderr, flush=True)
        while not self.stopping:
            await asyncio.sleep(0.1)
        listener.close()
        for seconds in (self.args.shutdown_timeout, 1):  # to end; then, aborted, to say so
            deadline = time.monotonic() + seconds
            while self.busy and time.monotonic() < deadline:
                await asyncio.sleep(0.05)
            self.over = True

    # --- Requests in ------------------------------------------------------------------------------

    def prepare(self, body: dict[str, Any], chat: bool, name: str) -> list[Request]:
        """Check a body, and make the engine's requests of it: name-0, name-1, ...

        Raises:
            Problem: 400 and what is wrong with which field; 404 for another model.
        """
        body = {field: value for field, value in body.items() if value is not None}
        if body.get("model", self.name) != self.name:
            raise Problem(404, f"the model here is {self.name!r}", "model", "model_not_found")
        source, salt = "messages" if chat else "prompt", body.get("cache_salt")
        try:  # whoever finds a field wrong begins the message with its name
            # 1) the settings, of which some have other names or forms here
            for field, kind in (("stream", bool), ("stream_options", dict), ("echo", bool)):
                check(field, body.get(field, kind()), kind)
            if body.get("tool_choice", body.get("function_call")) == "none":
                body |= {"tools": [], "functions": []}
            for field, fine in (UNSUPPORTED | {"best_of": (body.get("n", 1),)}).items():
                if field in body and body[field] not in fine:
                    raise ValueError(f"{field} is not supported: leave it out")
            if "stream_options" in body and not body.get("stream"):
                raise ValueError("stream_options needs stream")
            given = {f.name: body[f.name] for f in fields(SamplingParams) if f.name in body}
            given["prompt_logprobs"] = body.get("echo", False) and not chat  # if there are any
            if wish := structure(body.get("response_format", {"type": "text"})):
                given["structured_outputs"] = wish
            if chat:
                scored = check("logprobs", body.get("logprobs", False), bool)
                given["logprobs"] = body.get("top_logprobs", 0 if scored else None)
            # Where nothing is said: 16 tokens, or in a chat all that there is room for.
            most = body.get("max_completion_tokens", given.get("max_tokens"))
            given["max_tokens"] = (self.context if chat else 16) if most is None else most
            bias = check("logit_bias", body.get("logit_bias", {}), dict)
            bias = {int(i) if i.isdecimal() and len(i) < 10 else -1: b for i, b in bias.items()}
            params = replace(self.defaults, **given | {"logit_bias": bias})
            if chat and not params.structured_outputs:  # the user's own stop strings come first
                params = replace(params, stop=(*params.stop, *self.tokenizer.chat_stop)[:16])
            # 2) the prompts
            prompts = [self.chat_ids(body)] if chat else body.get("prompt", "")
            if not isinstance(prompts, list) or all(type(i) is int for i in prompts):
                prompts = [prompts]
            if len(prompts) * params.n > MAX_CHOICES:
                raise ValueError(f"n = {params.n} of {len(prompts)} prompts: over {MAX_CHOICES}")
            # 3) the requests
            requests = []
            for i, prompt in enumerate(prompts):
                ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
                if len(check("prompt", ids, list)) + (most or 1) > self.context:
                    message = TOO_LONG.format(self.context, len(ids) + (most or 1))
                    message += f" ({len(ids)} in the prompt, {most or 1} to come). Ask for less."
                    raise Problem(400, message, source, "context_length_exceeded")
                each = replace(params, max_tokens=min(params.max_tokens, self.context - len(ids)))
                requests.append(self.engine.prepare(ids, each, id=f"{name}-{i}", cache_salt=salt))
            return requests
        except (ValueError, RecursionError) as error:
            word = re.split("[: ]", str(error))[0]
            names = (ALIASES.get(word, word), word)
            param = next((each for each in names if each.partition("[")[0] in body), source)
            raise Problem(400, str(error)[:500], param) from None

    def chat_ids(self, body: dict[str, Any]) -> list[int]:
        """The ids of a chat, whose contents may come in parts."""
        plain = []
        for i, message in enumerate(check("messages", body.get("messages") or None, list)):
            try:
                role, content = check("role", message["role"], str), message.get("content")
                if content is not None or not message["tool_calls"]:
                    parts = content if type(content) is list else [{"text": content}]
                    content = "\n".join(part["text"] for part in parts)
                plain.append({**message, "role": role, "content": content})
            except (ValueError, TypeError, KeyError, AttributeError):
                raise ValueError(f"messages[{i}] needs a role, and text or text parts") from None
        options = check("chat_template_kwargs", body.get("chat_template_kwargs", {}), dict)
        goes_on = check("continue_final_message", body.get("continue_final_message", False), bool)
        wanted = check("add_generation_prompt", body.get("add_generation_prompt", True), bool)
        options = {"add_generation_prompt": wanted and not goes_on} | options
        return self.tokenizer.encode_chat(plain, goes_on, **options)


# --- Answers out ----------------------------------------------------------------------------------

KINDS = {"text": "text_completion", "message": "chat.completion", "delta": "chat.completion.chunk"}


def choices(index: int, sequence: Sequence, form: str, words: Tokenizer) -> Iterator:
    """A sequence's state as OpenAI's choice: each time what has not been shown yet, or None.

    Args:
        form: "text"; or of a chat "message", or "delta" where it is streamed.
    """
    chars, count, offset, reason, echo = 0, 0, 0, None, sequence.params.prompt_logprobs
    opening, scored = {"role": "assistant", "refusal": None}, sequence.params.logprobs is not None
    while not reason:
        reason = sequence.finish_reason  # read first: once it is there, nothing else changes
        tokens, text = sequence.tokens[count:], sequence.text[chars:]
        if not (reason or text or (tokens and scored)):
            yield None
            continue
        count, chars = count + len(tokens), chars + len(text)
        if echo:
            prompt = [*spelt(sequence.request.prompt, words)]
            text, tokens = "".join(token.text for token in prompt) + text, prompt + tokens
        choice = {"index": index, "finish_reason": reason, "logprobs": None}
        if scored:
            choice["logprobs"] = logprobs(tokens, offset if form == "text" else None, pieces(words))
            offset += sum(len(token.text) for token in tokens)
        yield choice | ({"text": text} if form == "text" else {form: opening | {"content": text}})
        opening, echo = {}, False


def spelt(tokens: list[Token], words: Tokenizer) -> Iterator[Token]:
    """Yield the tokens of a text with what each adds to it, the last one also the marks of a
    character that never ends."""
    reader = Detokenizer(words, [])
    for left, token in zip(range(len(tokens))[::-1], tokens):
        text = reader.push(token.id)
        yield token._replace(text=text if left else text + reader.flush())


def logprobs(tokens: list[Token], offset: int | None, vocabulary: list[bytes]) -> dict[str, Any]:
    """Log-probabilities as a completion has them, its first token standing at `offset` in the text;
    None: as a chat has them. The tokens' texts join to the text of the choice; what else was likely
    is shown as it stands in the vocabulary."""

    def entry(token: Token, i: int, value: float) -> dict[str, Any]:
        word = b"".join(vocabulary[i : i + 1])  # some models' V is padded
        text = token.text if i == token.id else word.decode(errors="replace")
        return {"token": text, "logprob": value, "bytes": [*word]}

    found = [entry(token, token.id, token.logprob) for token in tokens]
    tops = [[entry(token, *each) for each in token.top] for token in tokens]
    if offset is None:
        content = [one | {"top_logprobs": top} for one, top in zip(found, tops)]
        return {"content": content, "refusal": None}
    texts = [token.text for token in tokens]
    return {
        "tokens": texts,
        "token_logprobs": [token.logprob for token in tokens],
        "text_offset": [*accumulate(map(len, texts), initial=offset)][:-1],
        # With the chosen one, wherever it stands, as in vLLM.
        "top_logprobs": [
            {each["token"]: each["logprob"] for each in (*top, one) if each["logprob"] is not None}
            or None  # of a prompt's first, which nothing comes before
            for one, top in zip(found, tops)
        ],
    }


def usage(requests: list[Request]) -> dict[str, Any]:
    """The tokens of a request's prompts and of all its outputs."""
    old = sum(request.outputs[0].prompt_len for request in requests)
    new = sum(len(sequence.tokens) for request in requests for sequence in request.outputs)
    details = {"cached_tokens": sum(request.outputs[0].cached for request in requests)}
    found = {"prompt_tokens": old, "completion_tokens": new, "total_tokens": old + new}
    return found | {"prompt_tokens_details": details}


# --- What it says of itself -----------------------------------------------------------------------

HISTOGRAMS = ("time_to_first_token", "inter_token_latency", "e2e_request_latency")
BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


def counters(engine: Engine) -> dict[str, float]:
    """What the engine counts, for /metrics and for the page."""
    pool, proposer = engine.pool, engine.proposer
    return {f"{name}_total": value for name, value in vars(engine.stats).items()} | {
        "num_requests_running": len(engine.running),
        "num_requests_waiting": len(engine.waiting),
        "kv_cache_usage_perc": 1 - pool.num_available / pool.num_blocks,
        "spec_decode_num_drafts_total": proposer.steps,
        "spec_decode_num_draft_tokens_total": sum(proposer.offered),
        "spec_decode_num_accepted_tokens_total": sum(proposer.accepted),
    }


def count(served: dict[str, Counter], request: Request) -> None:
    """Count a request that has ended: by metric, and by what a sample has after that name."""
    served["prompt_tokens_total"][""] += request.outputs[0].prompt_len
    for sequence in request.outputs:
        served["request_success_total"][f'{{finished_reason="{sequence.finish_reason}"}}'] += 1
        gaps = [after - before for before, after in zip(sequence.times, sequence.times[1:])]
        for name, values in zip(HISTOGRAMS, (gaps[:1], sorted(gaps[1:]), [sum(gaps)])):
            samples = {f'_bucket{{le="{b}"}}': bisect_right(values, b) for b in BOUNDS}
            samples |= {'_bucket{le="+Inf"}': len(values), "_count": len(values)}
            served[f"{name}_seconds"].update(samples | {"_sum": sum(values)})


def metrics(server: Server) -> str:
    """All of it, as Prometheus reads it."""
    families, lines = {name: {"": n} for name, n in counters(server.engine).items()}, []
    for name, samples in (families | server.served).items():
        kind = {"total": "counter", "seconds": "histogram"}.get(name.rpartition("_")[2], "gauge")
        lines.append(f"# TYPE kilolm:{name} {kind}")
        lines += [f"kilolm:{name}{suffix} {value}" for suffix, value in dict(samples).items()]
    return "\n".join([*lines, ""])


# --- HTTP -----------------------------------------------------------------------------------------

# What a proxy in front could read in another way is refused: bare line feeds, folded headers, space
# before a colon.
HEAD = re.compile(
    rb"([A-Z]+) ([!->@-~]+)(?:\?[!-~]*)? HTTP/1\.1\r\n(([!-9;-~]+:[^\r\n\0]*\r\n)*\r\n)"
)
# The page itself says that it may load nothing from elsewhere.
HEADERS = ["Cache-Control: no-store", "X-Content-Type-Options: nosniff", "X-Frame-Options: DENY"]
MORE_HEADERS = {405: ["Allow: GET, POST"], 429: ["Retry-After: 1"]}
JSON, EVENTS = "application/json", "text/event-stream"


class Connection:
    """One client: reads HTTP/1.1 requests and answers them, until either side has had enough."""

    def __init__(self, server: Server, reader: StreamReader, writer: StreamWriter) -> None:
        self.server, self.reader, self.writer = server, reader, writer
        self.event, self.close = asyncio.Event(), False

    @property
    def gone(self) -> bool:
        return self.reader.at_eof() or self.writer.is_closing()

    async def serve(self) -> None:
        # It may go, or fall silent, or the server end.
        with suppress(OSError, EOFError, asyncio.CancelledError), closing(self.writer):
            while not self.close:
                await self.respond()

    async def respond(self) -> None:
        """Read a request and answer it, or say why not."""
        self.line, self.sent, self.unread = "", False, True
        self.headers = http.client.HTTPMessage()
        try:
            async with asyncio.timeout(IDLE_S):
                head = await self.reader.readuntil(b"\r\n\r\n")
            self.server.busy.add(self)
            await self.route(head)
        except (OSError, EOFError):
            raise
        except Exception as error:
            if isinstance(error, asyncio.LimitOverrunError | http.client.HTTPException):
                error = Problem(431, f"the headers are too many, or over {MAX_HEAD} bytes")
            elif not isinstance(error, Problem):  # ours: the client is told no more than that
                traceback.print_exc()
                error = Problem(500, "internal error")
            await self.answer(error.body, error.status)
        finally:
            self.server.busy.discard(self)

    async def route(self, head: bytes) -> None:
        """Find out what is asked for, and whether it may be.

        Raises:
            Problem: any answer that is not a success.
        """
        if not (found := HEAD.fullmatch(head)):
            raise Problem(400, "this is not an HTTP/1.1 request")
        method, path = found[1].decode(), found[2].decode()
        self.line = f"{method} {path}"
        self.headers = http.client.parse_headers(io.BytesIO(found[3]))
        # What follows may be a body, and is no request: until it has been read, this is the last.
        body = "Content-Length" in self.headers or "Transfer-Encoding" in self.headers
        self.unread = body or method == "POST"
        if unquote(path) == f"/v1/models/{self.server.name}":
            path = "/v1/models/ id"  # no request can spell that
        if path not in PATHS or (path == "/" and not PAGE.is_file()):
            raise Problem(404, f"there is no {path[:100]}")
        (allowed, act), args = PATHS[path], self.server.args
        scheme, _, key = self.headers.get("Authorization", "").partition(" ")
        right = secrets.compare_digest(key.encode("latin-1"), (args.api_key or "").encode())
        right = not args.api_key or (right and scheme.lower() == "bearer")
        if method == "OPTIONS" and args.cors:
            await self.answer({})
        elif method != allowed:
            raise Problem(405, f"{path} takes {allowed}, not {method}")
        elif not (right or path in ("/", "/health")):
            raise Problem(401, "the API key is missing or wrong", code="invalid_api_key")
        else:
            await act(self)

    async def complete(self, chat: bool) -> None:
        """Answer a completion, whole or streamed."""
        # 1) what is asked for, and whether there is room for it
        server, body = self.server, await self.read_json()
        if server.stopping:
            raise Problem(503, "the server is stopping")
        uid = ("chatcmpl-" if chat else "cmpl-") + secrets.token_hex(12)
        # In another thread: a long text takes a while to encode, and others are being served.
        requests = await asyncio.to_thread(server.prepare, body, chat, uid)
        waiting, most = len(server.engine.waiting) + server.inbox.qsize(), server.args.max_queue
        if waiting + len(requests) > most:
            raise Problem(429, f"{waiting} requests are waiting, --max-queue is {most}: retry")
        for request in requests:
            server.inbox.put(lambda request=request: server.submit(request, self))
        # 2) what is new, as it comes
        stream, options = body.get("stream"), body.get("stream_options") or {}
        form = ("delta" if stream else "message") if chat else "text"
        base = {"id": uid, "object": KINDS[form], "created": int(time.time()), "model": server.name}
        sequences = [sequence for request in requests for sequence in request.outputs]
        news = [choices(i, each, form, server.tokenizer) for i, each in enumerate(sequences)]
        reasons = [None]
        while not all(reasons):
            await self.event.wait()
            self.event.clear()
            reasons = [sequence.finish_reason for sequence in sequences]
            if "error" in reasons:
                self.unread = self.close = True  # which ends the others
                failed = sequences[reasons.index("error")].matcher
                raise Problem(500, (failed and failed.get_error()[:100]) or BROKEN)
            if "abort" in reasons:
                why = (503, "is stopping") if server.over else (500, "met an error")
                raise Problem(why[0], f"aborted: the server {why[1]}")
            if new := [choice for each in news if stream and (choice := next(each, None))]:
                await self.stream(*(base | {"choices": [choice]} for choice in new))
        # 3) all of it; or, of a stream, what is left: the usage, if it was asked for
        found = [await asyncio.to_thread(next, c) for c in news if not stream]  # may be much
        whole = base | {"choices": found, "usage": usage(requests)}
        if stream and options.get("include_usage"):
            await self.stream(whole)
        await self.answer("[DONE]" if stream else whole)

    async def watch(self) -> None:
        """Stream the engine's state to the page, ten times a second where it changes."""
        server, last = self.server, {}
        while not (self.gone or server.stopping):
            server.inbox.put(server.look)
            await asyncio.sleep(0.1)
            if server.snapshot != last:
                await self.stream(last := server.snapshot)
        await self.send()

    # --- On the wire ------------------------------------------------------------------------------

    async def read_json(self) -> dict[str, Any]:
        """Read the body, a JSON object."""
        length = ",".join(self.headers.get_all("Content-Length", []))
        if self.headers.get_content_type() != JSON:
            raise Problem(415, "the body must be JSON: send Content-Type: application/json")
        if not re.fullmatch("[0-9]{1,18}", length) or "Transfer-Encoding" in self.headers:
            raise Problem(411, "send the body with a Content-Length")
        if int(length) > (most := self.server.args.max_body):
            raise Problem(413, f"the body has {length} bytes, --max-body is {most}")
        async with asyncio.timeout(BODY_S):
            data = await self.reader.readexactly(int(length))
        self.unread = False
        try:  # int() refuses NaN and Infinity, which Python would take for numbers
            return check("body", json.loads(data, parse_constant=int), dict)
        except (ValueError, RecursionError) as error:
            raise Problem(400, f"the body must be a JSON object: {str(error)[:200]}") from None

    async def stream(self, *items: dict[str, Any]) -> None:
        """Send server-sent events."""
        await self.send("".join(f"data: {json.dumps(item)}\n\n" for item in items).encode())

    async def answer(self, body: dict[str, Any] | str, status: int = 200, kind: str = JSON) -> None:
        """Send the only part of an answer; or, where a stream has begun, its last event."""
        text = body if isinstance(body, str) else json.dumps(body)
        await self.send((f"data: {text}\n\n" if self.sent else text).encode(), status, kind)
        await self.send()

    async def send(self, data: bytes = b"", status: int = 200, kind: str = EVENTS) -> None:
        """Send a chunk of an answer, the first after its head; an empty one ends it."""
        if not self.sent:
            last = self.unread or self.headers.get("Connection", "").lower() == "close"
            self.sent, self.close = True, last or self.server.stopping
            lines = [f"HTTP/1.1 {status} {http.client.responses[status]}", f"Content-Type: {kind}"]
            lines += ["Transfer-Encoding: chunked", *HEADERS, *MORE_HEADERS.get(status, [])]
            lines.append(f"Connection: {'close' if self.close else 'keep-alive'}")
            if origin := self.server.args.cors:
                lines.append(f"Access-Control-Allow-Origin: {origin}")
                asked = self.headers.get("Access-Control-Request-Headers", "")
                lines.append(f"Access-Control-Allow-Headers: {asked}")
            self.writer.write("\r\n".join([*lines, "", ""]).encode("latin-1"))
            print(f"{self.line!r:.200} {'gone' if self.gone else status}", file=sys.stderr)
        self.writer.write(b"%x\r\n%s\r\n" % (len(data), data))
        await self.writer.drain()


PATHS = {
    "/": ("GET", lambda c: c.answer(PAGE.read_text("utf-8"), kind="text/html")),
    "/health": ("GET", lambda c: c.answer({"status": "stopping" if c.server.stopping else "ok"})),
    "/metrics": ("GET", lambda c: c.answer(metrics(c.server), kind="text/plain; version=0.0.4")),
    "/engine": ("GET", Connection.watch),
    "/v1/models/ id": ("GET", lambda c: c.answer(c.server.model)),
    "/v1/models": ("GET", lambda c: c.answer({"object": "list", "data": [c.server.model]})),
    "/v1/completions": ("POST", lambda c: c.complete(chat=False)),
    "/v1/chat/completions": ("POST", lambda c: c.complete(chat=True)),
}


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
    add("--kv-memory", type=float, default=0.5, help="bytes (4e9), or a share of the free (0.5)")
    add("--max-queue", type=int, default=1024, help="waiting requests before a 429 (1024)")
    add("--max-body", type=int, default=2**22, help="bytes of a request (4 MiB)")
    add("--shutdown-timeout", type=float, default=30, help="seconds to finish what runs (30)")
    add("--api-key", default=os.environ.get("KILOLM_API_KEY"), help="or $KILOLM_API_KEY")
    add("--cors", metavar="ORIGIN", help="let pages of this origin use the API")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Run until a signal comes; return the exit status."""
    return tp.launch("server.py", argv, parse_args, run)


def run(args: argparse.Namespace, ranks: tp.Ranks) -> int:
    """Load, and serve."""
    if "" in (args.host, args.api_key):
        raise ValueError("--host and --api-key (or $KILOLM_API_KEY) must not be empty")
    tokenizer = Tokenizer(args.checkpoint)
    model, draft, guesses = load_models(args, ranks)
    if ranks.rank:
        return tp.follow(model)
    # The more of a prompt a step takes, the longer all others wait for their next token: on a CPU
    # the 99th percentile was 1.7 to 2.8 times the median with 32 tokens of prompts, 4 times with
    # steps of 512. 2,048 for GPUs is vLLM's figure; not measured here.
    prompts = 32 if ranks.device.type == "cpu" else 2048
    budget = args.max_num_batched_tokens or args.max_num_seqs * (1 + guesses) + prompts
    engine = Engine(
        model, tokenizer, args.max_num_seqs, budget, args.max_seq_len, args.kv_memory,
        kv_dtype=args.kv_dtype, draft=draft, speculate=guesses, runner=ranks.runner,
    )  # fmt: skip
    return serve(engine, args)


def serve(engine: Engine, args: argparse.Namespace) -> int:
    """Serve until SIGTERM or SIGINT; then finish what runs, within --shutdown-timeout.

    PyTorch's threads belong to the thread that first used them, which is this one, where the model
    was loaded: a model that runs in another gets a second pool of them, and OpenMP, seeing more
    threads than processors, puts them to sleep between any two operations. On two cores the bundled
    model was slower by half.
    """
    server = Server(engine, args)

    def signalled(*_: Any) -> None:
        if server.stopping:
            os._exit(1)  # the second time: at once
        server.stopping = True

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signalled)
    with ThreadPoolExecutor(1) as pool:
        listening = pool.submit(asyncio.run, server.listen())
        listening.add_done_callback(lambda _: server.inbox.put(None))
        server.run()
        listening.result()
    return 0


if __name__ == "__main__":
    sys.exit(main())
