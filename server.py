"""An HTTP server in front of the scheduler that OpenAI's clients can talk to.

    python server.py                            the bundled model, on http://127.0.0.1:8000
    python server.py --checkpoint DIR --compile --api-key SECRET

Holds only HTTP. The main thread drives the engine; an event loop in another reads requests, checks
every field before anything is allocated, hands them over, and is told after each step who got a
token. A handler that is slow, or whose client has gone, holds nobody up: it reads its sequences'
state when it comes to it, so tokens wait there and not in a queue.

    client --> Connection.complete --> Server.prepare --> inbox --> Server.drive: submit, step, step
    client <-- Connection.stream <---- Choice.new <------ event <--- Server.wake <------+

Everything binds to loopback unless told otherwise, and nothing but the standard library is used.
References: platform.openai.com/docs/api-reference; the names in /metrics are vLLM's, but for
engine_steps_total. Read: Server.drive, Server.prepare, Choice, Connection.complete, serve.
"""

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
from argparse import ArgumentParser, Namespace
from asyncio import StreamReader, StreamWriter
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import settings
from checkpoint import suggested
from generate import join, load_models, make_engine
from sampling import BROKEN, Token
from scheduler import Engine, Job, Request
from settings import JSON, EngineArgs, Ranks, SamplingParams, SettingError, check, setting
from structured import pieces, structure
from tokenizer import Detokenizer, Tokenizer

MAX_CHOICES, MAX_HEAD = 256, 2**16
IDLE_S, BODY_S = 75, 60  # seconds that a connection may be silent, and a body may take
PAGE = Path(__file__).resolve().parent / "page.html"


@dataclass(frozen=True)
class ServerArgs(EngineArgs):
    """What to serve, to whom."""

    host: str = setting("127.0.0.1", "0.0.0.0 is every network (default: this machine only)")
    port: int = setting(8000, "0: any that is free", 0, 65535)
    served_model_name: str | None = setting(None, "in the API (default: the folder's name)")
    max_queue: int = setting(1024, "waiting requests before a 429", 0)
    max_body: int = setting(2**22, "bytes of a request", 1)
    shutdown_timeout: float = setting(30.0, "seconds to finish what runs", 0, 1e6)
    api_key: str | None = setting(None, "or $KILOLM_API_KEY")
    cors: str | None = setting(None, "an origin: let its pages use the API")


class Problem(Exception):
    """An answer other than success, in OpenAI's shape."""

    def __init__(self, status: int, message: str, param: str = "", code: str = "") -> None:
        kind = "server_error" if status >= 500 else "invalid_request_error"
        kind = ERRORS.get(status, kind)
        self.status = status
        self.body = {
            "error": dict(message=message, type=kind, param=param or None, code=code or None)
        }


ERRORS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}

# --- The server -----------------------------------------------------------------------------------


class Server:
    """The engine, and who waits for it. Whatever touches the engine's state happens in drive().

    Attributes:
        inbox: what to do before the next step; None: end.
        waiters: the connection that is to answer each request in the engine.
        served: what has been counted; see count(). It and `waiters` are the engine's thread's.
        busy: connections that are being answered.
        stopping: a signal has come; over: and what runs has had its time to end.
    """

    def __init__(self, engine: Engine, args: ServerArgs) -> None:
        self.engine = engine
        self.args = args
        self.tokenizer = engine.tokenizer
        self.name = args.served_model_name or Path(args.checkpoint).resolve().name
        self.model = dict(id=self.name, object="model", owned_by="kilolm", created=int(time.time()))
        self.model["max_model_len"] = engine.max_seq_len
        self.defaults = SamplingParams(**suggested(args.checkpoint))
        # A sequence's last token is never run, and needs no slot in the cache.
        slots = engine.pool.num_blocks * engine.pool.block_size
        self.context = min(engine.max_seq_len, slots + 1)
        self.inbox = queue.SimpleQueue()
        self.waiters: dict[Request, Connection] = {}
        self.served = defaultdict(Counter)
        self.busy: set[Connection] = set()
        self.stopping = self.over = False
        self.snapshot = {}

    # --- The engine's thread ----------------------------------------------------------------------

    def drive(self) -> None:
        """Do what comes in and run steps, until told to end. Where a step fails all requests end,
        and the next ones start anew; not so where another rank is lost."""
        while True:
            try:
                while not (self.engine.queue and self.inbox.empty()):
                    act = self.inbox.get()
                    if not act:
                        return
                    act()
                lost = [request for request, c in self.waiters.items() if c.gone or self.over]
                for request in lost:
                    self.engine.abort(request)
                self.wake(lost + self.engine.step())
            except Exception as error:
                self.engine.reset()
                self.wake([*self.waiters])
                if isinstance(error, ConnectionError):
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
        running = [
            dict(
                name=f"{job.request.id}.{job.request.outputs.index(job)}", text=job.text[-40:],
                prompt=job.prompt_len, length=job.table.length, max=job.max_len,
                blocks=job.table.blocks[:], ran=engine.ran.get(job, 0),
            )
            for job in engine.running
        ]  # fmt: skip
        self.snapshot = counters(engine) | dict(
            blocks=pool.num_blocks, block_size=pool.block_size, cached=list(pool.cached),
            waiting=[job.prompt_len for job in engine.waiting[:100]], running=running,
        )  # fmt: skip

    # --- The event loop's thread ------------------------------------------------------------------

    async def listen(self) -> None:
        """Answer until a signal comes, and then those that are being answered."""
        self.loop = asyncio.get_running_loop()
        host, port = self.args.host, self.args.port
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

    def prepare(self, body: JSON, chat: bool, name: str) -> list[Request]:
        """Check a body, and make the engine's requests of it: name-0, name-1, ...

        Raises:
            Problem: 400 and what is wrong with which field; 404 for another model.
        """
        body = {field: value for field, value in body.items() if value is not None}
        if body.get("model", self.name) != self.name:
            raise Problem(404, f"the model here is {self.name!r}", "model", "model_not_found")
        source = "messages" if chat else "prompt"
        try:
            refuse(body)
            params = self.params_of(body, chat)
            prompts = [self.chat_ids(body)] if chat else body.get("prompt", "")
            if not isinstance(prompts, list) or all(type(i) is int for i in prompts):
                prompts = [prompts]
            if len(prompts) * params.n > MAX_CHOICES:
                raise SettingError(
                    "n", f"= {params.n} of {len(prompts)} prompts: over {MAX_CHOICES}"
                )
            requests = []
            for i, prompt in enumerate(prompts):
                ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
                room = self.context - len(check("prompt", ids, list))
                # In a chat, where nothing is said, all that there is room for.
                new = 1 if chat and not most_tokens(body) else params.max_tokens
                if new > room:
                    text = TOO_LONG.format(self.context, len(ids) + new, len(ids), new)
                    raise Problem(400, text, source, "context_length_exceeded")
                each = replace(params, max_tokens=min(params.max_tokens, room))
                salt = body.get("cache_salt")
                requests.append(self.engine.prepare(ids, each, id=f"{name}-{i}", cache_salt=salt))
            return requests
        except (ValueError, RecursionError) as error:
            field = getattr(error, "field", source)
            names = (ALIASES.get(field, field), field)
            param = next((each for each in names if each in body), source)
            raise Problem(400, str(error)[:500], param) from None

    def params_of(self, body: JSON, chat: bool) -> SamplingParams:
        """The settings of a request, of which some have other names or forms here."""
        given = {f.name: body[f.name] for f in fields(SamplingParams) if f.name in body}
        given["max_tokens"] = most_tokens(body) or (self.context if chat else 16)
        given["prompt_logprobs"] = body.get("echo", False) and not chat  # if there are any
        wish = structure(body.get("response_format", {"type": "text"}))
        if wish:
            given["structured_outputs"] = wish
        if chat:
            scored = check("logprobs", body.get("logprobs", False), bool)
            given["logprobs"] = body.get("top_logprobs", 0 if scored else None)
        bias = check("logit_bias", body.get("logit_bias", {}), dict)
        ids = [int(i) if i.isdecimal() and len(i) < 10 else -1 for i in bias]
        given["logit_bias"] = dict(zip(ids, bias.values()))
        params = replace(self.defaults, **given)
        if chat and not params.structured_outputs:  # the user's own stop strings come first
            params = replace(params, stop=(*params.stop, *self.tokenizer.chat_stop)[:16])
        return params

    def chat_ids(self, body: JSON) -> list[int]:
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
                text = f"messages[{i}] needs a role, and text or text parts"
                raise Problem(400, text, "messages") from None
        goes_on = check("continue_final_message", body.get("continue_final_message", False), bool)
        wanted = check("add_generation_prompt", body.get("add_generation_prompt", True), bool)
        options = {"add_generation_prompt": wanted and not goes_on}
        options |= check("chat_template_kwargs", body.get("chat_template_kwargs", {}), dict)
        return self.tokenizer.encode_chat(plain, goes_on, **options)


# OpenAI's words, for which clients look.
TOO_LONG = (
    "This model's maximum context length is {} tokens. However, you requested {} tokens "
    "({} in the prompt, {} to come). Ask for less."
)
ALIASES = {"max_tokens": "max_completion_tokens", "logprobs": "top_logprobs",
           "structured_outputs": "response_format"}  # fmt: skip  # as OpenAI has it
# What would change the answer, and is not done: with other values than these it is refused. What
# would not change it, such as `user` or `store`, is ignored, as are unknown names.
UNSUPPORTED = dict(
    tools=[], functions=[], suffix="", modalities=["text"], use_beam_search=False, min_tokens=0,
    bad_words=[], skip_special_tokens=True, include_stop_str_in_output=False,
)  # fmt: skip
NEVER = (
    "audio prompt_logprobs chat_template guided_json guided_regex guided_choice guided_grammar "
    "allowed_token_ids truncate_prompt_tokens documents"
)


def refuse(body: JSON) -> None:
    """Raise SettingError where a body asks for what is not done, or in the wrong form."""
    for field, kind in (("stream", bool), ("stream_options", dict), ("echo", bool)):
        check(field, body.get(field, kind()), kind)
    if "none" in (body.get("tool_choice"), body.get("function_call")):
        body |= dict(tools=[], functions=[])
    fine = UNSUPPORTED | dict(best_of=body.get("n", 1))
    for field, value in body.items():
        if field in NEVER.split() or value != fine.get(field, value):
            raise SettingError(field, "is not supported: leave it out")
    if "stream_options" in body and not body.get("stream"):
        raise SettingError("stream_options", "needs stream")


def most_tokens(body: JSON) -> Any:
    """How many tokens a body asks for, if it says so."""
    return body.get("max_completion_tokens", body.get("max_tokens"))


# --- Answers out ----------------------------------------------------------------------------------

KINDS = {"text": "text_completion", "message": "chat.completion", "delta": "chat.completion.chunk"}


@dataclass
class Choice:
    """A sequence's state as OpenAI's choice.

    form: "text"; or of a chat "message", or "delta" where it is streamed.
    """

    index: int
    job: Job
    form: str
    words: Tokenizer
    # What has been shown: characters and tokens of the output, and characters in all.
    chars: int = 0
    tokens: int = 0
    offset: int = 0
    began: bool = False
    ended: bool = False

    def new(self) -> JSON | None:
        """What has not been shown yet; None: nothing is new."""
        job, is_text = self.job, self.form == "text"
        is_scored = job.params.logprobs is not None
        reason = job.finish_reason  # read first: once it is there, nothing else changes
        tokens, text = job.tokens[self.tokens :], job.text[self.chars :]
        if self.ended or not (reason or text or (tokens and is_scored)):
            return None
        self.tokens += len(tokens)
        self.chars += len(text)
        if job.params.prompt_logprobs and not self.began:  # echo
            prompt = job.request.prompt or [Token(i) for i in job.ids[: job.prompt_len]]
            prompt = list(spelt(prompt, self.words))
            text = "".join(token.text for token in prompt) + text
            tokens = prompt + tokens
        choice = dict(index=self.index, finish_reason=reason, logprobs=None)
        if is_scored:
            choice["logprobs"] = logprobs(tokens, self.offset if is_text else None, self.words)
            self.offset += sum(len(token.text) for token in tokens)
        opening = {} if self.began else dict(role="assistant", refusal=None)
        choice[self.form] = text if is_text else opening | {"content": text}
        self.began, self.ended = True, bool(reason)
        return choice


def spelt(tokens: list[Token], words: Tokenizer) -> Iterator[Token]:
    """Yield the tokens of a text with what each adds to it, the last one also the marks of a
    character that never ends."""
    reader = Detokenizer(words, [])
    for left, token in zip(range(len(tokens))[::-1], tokens):
        text = reader.push(token.id)
        yield token._replace(text=text if left else text + reader.flush())


def logprobs(tokens: list[Token], offset: int | None, words: Tokenizer) -> JSON:
    """Log-probabilities as a completion has them, its first token standing at `offset` in the text;
    None: as a chat has them. The tokens' texts join to the text of the choice, but for a stop
    string; what else was likely is shown as it stands in the vocabulary."""
    vocabulary = pieces(words)

    def entry(token: Token, i: int, value: float) -> JSON:
        word = b"".join(vocabulary[i : i + 1])  # some models' V is padded
        text = token.text if i == token.id else word.decode(errors="replace")
        return dict(token=text, logprob=value, bytes=list(word))

    own = [entry(token, token.id, token.logprob) for token in tokens]
    tops = [[entry(token, *each) for each in token.top] for token in tokens]
    if offset is None:
        content = [one | {"top_logprobs": top} for one, top in zip(own, tops)]
        return dict(content=content, refusal=None)
    # With the chosen one, wherever it stands, as in vLLM; of a prompt's first there is none.
    likely = [
        {each["token"]: each["logprob"] for each in (*top, one)} for one, top in zip(own, tops)
    ]
    texts = [token.text for token in tokens]
    values = [token.logprob for token in tokens]
    return dict(
        tokens=texts,
        token_logprobs=values,
        text_offset=[*accumulate(map(len, texts), initial=offset)][:-1],
        top_logprobs=[None if value is None else top for value, top in zip(values, likely)],
    )


def usage(requests: list[Request]) -> JSON:
    """The tokens of a request's prompts and of all its outputs."""
    firsts = [request.outputs[0] for request in requests]
    old = sum(job.prompt_len for job in firsts)
    new = sum(len(job.tokens) for request in requests for job in request.outputs)
    cached = dict(cached_tokens=sum(job.cached for job in firsts))
    return dict(
        prompt_tokens=old, completion_tokens=new, total_tokens=old + new,
        prompt_tokens_details=cached,
    )  # fmt: skip


# --- What it says of itself -----------------------------------------------------------------------

HISTOGRAMS = ("time_to_first_token", "inter_token_latency", "e2e_request_latency")
BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


def counters(engine: Engine) -> dict[str, float]:
    """What the engine counts, for /metrics and for the page."""
    pool, proposer = engine.pool, engine.proposer
    found = {f"{name}_total": value for name, value in vars(engine.stats).items()}
    return found | dict(
        num_requests_running=len(engine.running),
        num_requests_waiting=len(engine.waiting),
        kv_cache_usage_perc=1 - pool.num_available / pool.num_blocks,
        spec_decode_num_drafts_total=proposer.steps,
        spec_decode_num_draft_tokens_total=sum(proposer.offered),
        spec_decode_num_accepted_tokens_total=sum(proposer.accepted),
    )


def count(served: dict[str, Counter], request: Request) -> None:
    """Count a request that has ended: by metric, and by what a sample has after that name."""
    served["prompt_tokens_total"][""] += request.outputs[0].prompt_len
    for job in request.outputs:
        served["request_success_total"][f'{{finished_reason="{job.finish_reason}"}}'] += 1
        gaps = [after - before for before, after in zip(job.times, job.times[1:])]
        for name, values in zip(HISTOGRAMS, (gaps[:1], sorted(gaps[1:]), [sum(gaps)])):
            samples = {f'_bucket{{le="{b}"}}': bisect_right(values, b) for b in BOUNDS}
            samples |= {'_bucket{le="+Inf"}': len(values), "_count": len(values)}
            served[f"{name}_seconds"].update(samples | {"_sum": sum(values)})


def metrics(server: Server) -> str:
    """All of it, as Prometheus reads it."""
    families = {name: {"": value} for name, value in counters(server.engine).items()}
    lines = []
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
JSON_TYPE, EVENTS = "application/json", "text/event-stream"


class Connection:
    """One client: reads HTTP/1.1 requests and answers them, until either side has had enough."""

    def __init__(self, server: Server, reader: StreamReader, writer: StreamWriter) -> None:
        self.server = server
        self.reader = reader
        self.writer = writer
        self.event = asyncio.Event()
        self.close = False

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
        self.line = ""
        self.sent = False
        self.unread = True
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
        found = HEAD.fullmatch(head)
        if not found:
            raise Problem(400, "this is not an HTTP/1.1 request")
        method, path = found[1].decode(), found[2].decode()
        self.line = f"{method} {path}"
        self.headers = http.client.parse_headers(io.BytesIO(found[3]))
        # What follows may be a body, and is no request: until it has been read, this is the last.
        body = "Content-Length" in self.headers or "Transfer-Encoding" in self.headers
        self.unread = body or method == "POST"
        one_model = f"/v1/models/{self.server.name}"
        paths = PATHS | {one_model: ("GET", lambda c: c.answer(c.server.model))}
        path = one_model if unquote(path) == one_model else path
        if path not in paths or (path == "/" and not PAGE.is_file()):
            raise Problem(404, f"there is no {path[:100]}")
        allowed, act = paths[path]
        if method == "OPTIONS" and self.server.args.cors:
            await self.answer({})
        elif method != allowed:
            raise Problem(405, f"{path} takes {allowed}, not {method}")
        elif path not in ("/", "/health") and not self.may_enter():
            raise Problem(401, "the API key is missing or wrong", code="invalid_api_key")
        else:
            await act(self)

    def may_enter(self) -> bool:
        scheme, _, key = self.headers.get("Authorization", "").partition(" ")
        wanted = self.server.args.api_key
        right = secrets.compare_digest(key.encode("latin-1"), (wanted or "").encode())
        return not wanted or (right and scheme.lower() == "bearer")

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
        stream = body.get("stream")
        form = ("delta" if stream else "message") if chat else "text"
        base = dict(id=uid, object=KINDS[form], created=int(time.time()), model=server.name)
        jobs = [job for request in requests for job in request.outputs]
        choices = [Choice(i, job, form, server.tokenizer) for i, job in enumerate(jobs)]
        reasons = [None]
        while not all(reasons):
            await self.event.wait()
            self.event.clear()
            reasons = [job.finish_reason for job in jobs]
            for job in jobs:
                self.check_end(job)
            if stream:
                new = [choice for choice in (each.new() for each in choices) if choice]
                await self.stream(*(base | {"choices": [choice]} for choice in new))
        # 3) all of it; or, of a stream, what is left: the usage, if it was asked for
        whole = base | dict(choices=[], usage=usage(requests))
        if not stream:  # in another thread: it may be much
            whole["choices"] = [await asyncio.to_thread(each.new) for each in choices]
            await self.answer(whole)
            return
        if (body.get("stream_options") or {}).get("include_usage"):
            await self.stream(whole)
        await self.answer("[DONE]")

    def check_end(self, job: Job) -> None:
        """Raise Problem where a sequence came to a bad end."""
        if job.finish_reason == "error":
            self.unread = self.close = True  # which ends the others
            raise Problem(500, (job.matcher and job.matcher.get_error()[:100]) or BROKEN)
        if job.finish_reason == "abort":
            stops = self.server.over
            why = "is stopping" if stops else "met an error"
            raise Problem(503 if stops else 500, f"aborted: the server {why}")

    async def watch(self) -> None:
        """Stream the engine's state to the page, ten times a second where it changes."""
        server, last = self.server, {}
        while not (self.gone or server.stopping):
            server.inbox.put(server.look)
            await asyncio.sleep(0.1)
            if server.snapshot != last:
                last = server.snapshot
                await self.stream(last)
        await self.send()

    # --- On the wire ------------------------------------------------------------------------------

    async def read_json(self) -> JSON:
        """Read the body, a JSON object."""
        length = ",".join(self.headers.get_all("Content-Length", []))
        most = self.server.args.max_body
        if self.headers.get_content_type() != JSON_TYPE:
            raise Problem(415, "the body must be JSON: send Content-Type: application/json")
        if not re.fullmatch("[0-9]{1,18}", length) or "Transfer-Encoding" in self.headers:
            raise Problem(411, "send the body with a Content-Length")
        if int(length) > most:
            raise Problem(413, f"the body has {length} bytes, --max-body is {most}")
        async with asyncio.timeout(BODY_S):
            data = await self.reader.readexactly(int(length))
        self.unread = False
        try:  # int() refuses NaN and Infinity, which Python would take for numbers
            return check("body", json.loads(data, parse_constant=int), dict)
        except (ValueError, RecursionError) as error:
            raise Problem(400, f"the body must be a JSON object: {str(error)[:200]}") from None

    async def stream(self, *items: JSON) -> None:
        """Send server-sent events, if there are any."""
        if items:
            await self.send("".join(f"data: {json.dumps(item)}\n\n" for item in items).encode())

    async def answer(self, body: JSON | str, status: int = 200, kind: str = JSON_TYPE) -> None:
        """Send the only part of an answer; or, where a stream has begun, its last event."""
        text = body if isinstance(body, str) else json.dumps(body)
        text = f"data: {text}\n\n" if self.sent else text
        await self.send(text.encode(), status, kind)
        await self.send()

    async def send(self, data: bytes = b"", status: int = 200, kind: str = EVENTS) -> None:
        """Send a chunk of an answer, the first after its head; an empty one ends it."""
        if not self.sent:
            self.sent = True
            last = self.unread or self.headers.get("Connection", "").lower() == "close"
            self.close = last or self.server.stopping
            lines = [f"HTTP/1.1 {status} {http.client.responses[status]}", f"Content-Type: {kind}"]
            lines += ["Transfer-Encoding: chunked", *HEADERS, *MORE_HEADERS.get(status, [])]
            lines.append(f"Connection: {'close' if self.close else 'keep-alive'}")
            if self.server.args.cors:
                lines.append(f"Access-Control-Allow-Origin: {self.server.args.cors}")
                lines.append("Access-Control-Allow-Headers: Authorization, Content-Type")
            self.writer.write("\r\n".join([*lines, "", ""]).encode("latin-1"))
            print(f"{self.line!r:.200} {'gone' if self.gone else status}", file=sys.stderr)
        self.writer.write(b"%x\r\n%s\r\n" % (len(data), data))
        await self.writer.drain()


PATHS = {
    "/": ("GET", lambda c: c.answer(PAGE.read_text("utf-8"), kind="text/html")),
    "/health": ("GET", lambda c: c.answer({"status": "stopping" if c.server.stopping else "ok"})),
    "/metrics": ("GET", lambda c: c.answer(metrics(c.server), kind="text/plain; version=0.0.4")),
    "/engine": ("GET", Connection.watch),
    "/v1/models": ("GET", lambda c: c.answer(dict(object="list", data=[c.server.model]))),
    "/v1/completions": ("POST", lambda c: c.complete(chat=False)),
    "/v1/chat/completions": ("POST", lambda c: c.complete(chat=True)),
}


# --- The command line -----------------------------------------------------------------------------


def main(argv: list[str] | None = None) -> int:
    """Run until a signal comes; return the exit status."""
    return settings.launch("server.py", argv, parse_args, command, join)


def parse_args(argv: list[str] | None) -> Namespace:
    parser = ArgumentParser(prog="server.py", description="Serve a model over HTTP.")
    settings.add_flags(parser, ServerArgs, speculate="--speculate-ngram")
    return parser.parse_args(argv)


def command(args: Namespace, ranks: Ranks) -> int:
    """Load, and serve."""
    key = os.environ.get("KILOLM_API_KEY")
    args = ServerArgs(**{"api_key": key} | settings.given(ServerArgs, args))
    if "" in (args.host, args.api_key):
        raise ValueError("--host and --api-key (or $KILOLM_API_KEY) must not be empty")
    model, proposer = load_models(args, ranks)
    if ranks.rank:
        import tp

        return tp.follow(model)
    if args.max_num_batched_tokens is None and ranks.device.type == "cpu":
        # The more of a prompt a step takes, the longer all others wait for their next token: with
        # 32 tokens of prompts the 99th percentile is half of what it is with 512.
        guesses = proposer.k if proposer else 0
        budget = args.max_num_seqs * (1 + guesses) + 32
        args = replace(args, max_num_batched_tokens=budget)
    return serve(make_engine(args, ranks, model, proposer), args)


def serve(engine: Engine, args: ServerArgs) -> int:
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
        server.drive()
        listening.result()
    return 0


if __name__ == "__main__":
    sys.exit(main())
