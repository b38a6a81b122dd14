"""An HTTP server in front of the scheduler that OpenAI's clients can talk to.

    python server.py                            the bundled model, on http://127.0.0.1:8000
    python server.py --checkpoint DIR --compile --api-key SECRET

Holds only HTTP. The main thread drives the engine; an event loop in another reads requests, checks
every field before anything is allocated, hands them over, and is told after each step who got a
token. A handler that is slow, or whose client has gone, holds nobody up: it reads its sequences'
state when it comes to it, so tokens wait there and not in a queue.

    client --> Connection.complete --> Server.prepare --> inbox --> Server.drive: submit, step, step
    client <-- Connection.send <------ Choice.new <------ event <--- Server.wake <------+

Everything binds to loopback unless told otherwise, and nothing but the standard library is used.
References: platform.openai.com/docs/api-reference; the names in /metrics are vLLM's, but for
engine_steps_total and computed_tokens_total. Read: Server.drive, Server.prepare, Choice,
Connection.complete, serve.
"""

import asyncio
import email
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
from bisect import bisect_right
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from threading import Thread
from typing import Any
from urllib.parse import unquote

if __name__ == "__main__":  # Ctrl-C may come while PyTorch is imported
    import program

import settings
from checkpoint import suggested
from generate import join, load_models, make_engine
from sampling import BROKEN, Token
from scheduler import Engine, Job, Request
from settings import (
    CHUNK,
    JSON,
    EngineArgs,
    Ranks,
    SamplingParams,
    SettingError,
    check,
    check_ids,
    setting,
    supported,
)
from structured import pieces, structure
from tokenizer import Ids, TextStream, Tokenizer

IDLE_S = 75  # seconds that a head, a body, or a client that does not read on may take
PAGE = settings.BUNDLED.parents[1] / "page.html"


@dataclass(frozen=True)
class ServerArgs(EngineArgs):
    """What to serve, to whom."""

    host: str = setting("127.0.0.1", "0.0.0.0: all networks, any Host (default: this machine)")
    port: int = setting(8000, "0: any that is free", 0, 65535)
    served_model_name: str | None = setting(None, "in the API (default: the folder's name)")
    max_queue: int = setting(1024, "waiting requests before a 429", 0)
    max_body: int = setting(2**22, "bytes of a request", 1)
    shutdown_timeout: float = setting(30.0, "seconds to finish what runs", 0, 1e6)
    api_key: str | None = setting(None, "or $KILOLM_API_KEY")
    cors: str | None = setting(None, "an origin: let its pages use the API")


class Problem(Exception):
    """An answer other than success: see Connection.refuse."""


def demand(condition: object, *problem: int | str) -> None:
    """Raise a Problem unless this holds."""
    if not condition:
        raise Problem(*problem)


# --- The server -----------------------------------------------------------------------------------


class Server:
    """The engine, and who waits for it. Whatever changes the engine's state happens in drive().

    Attributes:
        inbox: what to do before the next step; None: end.
        waiters: the connection that is to answer each request in the engine.
        served: what has been counted; see count(). As `waiters`, changed by drive() alone.
        busy: connections whose completion has begun: after a signal these may end.
        stopping: a signal has come; over: and what runs has had its time to end.
        snapshot: what the page shows, as JSON; looked: when it was last asked for.
    """

    def __init__(self, engine: Engine, args: ServerArgs) -> None:
        self.engine, self.args, self.tokenizer = engine, args, engine.tokenizer
        self.name = args.served_model_name or args.checkpoint.resolve().name
        self.model = dict(id=self.name, object="model", owned_by="kilolm",
                          created=int(time.time()), max_model_len=engine.max_seq_len)  # fmt: skip
        self.defaults = SamplingParams(**suggested(args.checkpoint))
        self.inbox = queue.SimpleQueue()
        self.waiters, self.busy = {}, set()
        self.served = defaultdict(Counter)
        self.stopping = self.over = False
        self.looked = 0.0
        self.look()

    # --- The engine's thread ----------------------------------------------------------------------

    def drive(self) -> None:
        """Do what comes in, and in between run steps, until told to end. Where a step fails all
        requests end, and the next ones start anew; not so where another rank is lost."""
        for act in iter(self.inbox.get, None):
            try:
                act()
                if self.engine.queue and self.inbox.empty():
                    self.inbox.put(self.step)
            except Exception as error:
                self.engine.reset()
                self.wake([*self.waiters])
                if isinstance(error, ConnectionError):
                    self.stopping = True
                    raise
                traceback.print_exc()

    def step(self) -> None:
        """Run a step, without those whose clients have gone."""
        lost = [each for each, c in self.waiters.items() if c.writer.is_closing() or self.over]
        for request in lost:
            self.engine.abort(request)
        self.wake(lost + self.engine.step())

    def submit(self, requests: list[Request], connection: "Connection") -> None:
        for request in requests:
            self.waiters[request] = connection
            self.engine.submit(request)

    def wake(self, requests: list[Request]) -> None:
        """Tell the event loop whose requests have moved on, and count those that have ended."""
        events = [self.waiters[request].event for request in requests]
        for request in requests:
            if request.finished:
                del self.waiters[request]
                count(self.served, request)
                # A request and its outputs refer to each other: unless this is undone, they stay in
                # memory until Python looks for cycles. The connection has its own list of them.
                while request.outputs:
                    self.engine.ran.pop(request.outputs.pop(), None)
        with suppress(RuntimeError):  # it has ended: nobody waits
            self.loop.call_soon_threadsafe(lambda: [event.set() for event in events])

    def look(self) -> None:
        """Take a snapshot for the page: each block's owners, who runs and who waits. Some
        microseconds a row."""
        engine, pool = self.engine, self.engine.pool
        running = [dict(
            name=f"{job.request.id}.{job.request.outputs.index(job)}", text=job.text[-40:],
            prompt=job.prompt_len, blocks=job.table.blocks[:], length=job.table.length,
            max=job.max_len, ran=engine.ran.get(job, 0)) for job in engine.running]  # fmt: skip
        self.snapshot = json.dumps(counters(engine) | dict(
            blocks=pool.num_blocks, block_size=pool.block_size, cached=pool.cached,
            running=running, waiting=[job.prompt_len for job in engine.waiting[:100]]))  # fmt: skip

    # --- The event loop's thread ------------------------------------------------------------------

    async def listen(self) -> None:
        """Answer until a signal comes; then let the answers that have begun end."""
        self.loop = asyncio.get_running_loop()
        # Errors that asyncio itself meets take one line each, such as a lack of descriptors, which
        # it meets once a second.
        self.loop.set_exception_handler(lambda _, what: print(*what.values(), file=sys.stderr))
        # asyncio's `backlog` is both how many clients may wait and how many it accepts at a time.
        # When descriptors run out, it schedules a new attempt for each one that fails, so attempts
        # multiply (python/cpython#151615). So it accepts one at a time, and 128 may wait.
        listener = await asyncio.start_server(lambda *ends: Connection(self, *ends).serve(),
            self.args.host, self.args.port, backlog=1)  # fmt: skip
        for each in listener.sockets:
            with each.dup() as same:
                same.listen(128)
        host, self.port = listener.sockets[0].getsockname()[:2]
        host = f"[{host}]" if ":" in host else host
        print(f"serving {self.name} on http://{host}:{self.port}", file=sys.stderr)
        while not self.stopping:
            await asyncio.sleep(0.1)
        listener.close()
        end = time.monotonic() + self.args.shutdown_timeout
        while self.busy and time.monotonic() < end + 1:  # that second: to say that they are aborted
            self.over = time.monotonic() > end
            await asyncio.sleep(0.05)

    # --- Requests in ------------------------------------------------------------------------------

    def prepare(self, body: JSON, chat: bool, name: str) -> list[Request]:
        """Check a body, and make the engine's requests of it: name-0, name-1, ...

        Raises:
            Problem: 400 and what is wrong with which field; 404 for another model.
        """
        source = "messages" if chat else "prompt"
        context = self.engine.max_seq_len
        given = {field: value for field, value in body.items() if value is not None}
        if given.get("model", self.name) != self.name:
            raise Problem(404, f"the model here is {self.name!r}", "model", "model_not_found")
        try:
            body = checked(given, chat)
            check_ids("logit_bias", body["logit_bias"], self.engine.config.vocab_size)
            wish = vars(self.defaults) | dict(max_tokens=context if chat else 16) | body
            params = SamplingParams(**{field: wish[field] for field in vars(self.defaults)})
            if chat and not params.structured_outputs:  # the user's own stop strings come first
                params = replace(params, stop=(*params.stop, *self.tokenizer.chat_stop)[:16])
            prompts = self.chat_ids(body) if chat else body.get("prompt", "")
            if not isinstance(prompts, list) or all(type(i) is int for i in prompts):
                prompts = [prompts]
            check("n", len(prompts) * params.n, int, 1, 256)  # for all prompts together
            options = dict(priority=body.get("priority", 0), cache_salt=body.get("cache_salt"))
            requests = []
            for i, prompt in enumerate(prompts):
                ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
                fits = len(check("prompt", ids, list)) + body.get("max_tokens", 1) <= context
                demand(
                    fits, 400,
                    # OpenAI's words, for which clients look.
                    f"This model's maximum context length is {context} tokens. {len(ids)} are in "
                    "the prompt: ask for less.",
                    source, "context_length_exceeded",
                )  # fmt: skip
                requests.append(self.engine.prepare(ids, params, id=f"{name}-{i}", **options))
            return requests
        except (ValueError, RecursionError) as error:
            field = getattr(error, "field", source)
            param = next((each for each in (ALIASES.get(field), field) if each in given), source)
            raise Problem(400, str(error)[:500], param) from None

    def chat_ids(self, body: JSON) -> Ids:
        """The ids of a chat, whose contents may come in parts."""
        plain = []
        messages = check("messages", body.get("messages", []), list)
        demand(messages, 400, "messages must have at least one message", "messages")
        for i, message in enumerate(messages):
            try:
                check("role", message["role"], str)
                text = message.get("content")
                if isinstance(text, list):
                    for part in text:
                        supported("content of type", part.get("type", "text"), "text")
                    text = "\n".join(part["text"] for part in text)
                calls = message.get("tool_calls") or []
                check("content", text, str | None if calls else str)
                for function in (call["function"] for call in calls):
                    if isinstance(function["arguments"], str):  # most templates make it JSON again
                        function["arguments"] = json.loads(function["arguments"] or "{}")
                plain.append(message | {"content": text})
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                raise Problem(
                    400, f"role, text or calls are wrong: {error}", f"messages[{i}]"
                ) from None
        goes_on = body["continue_final_message"]
        options = dict(add_generation_prompt=body["add_generation_prompt"] and not goes_on)
        return self.tokenizer.encode_chat(plain, goes_on, **options | body["chat_template_kwargs"])


# Of our names, those that OpenAI has another one for.
ALIASES = dict(max_tokens="max_completion_tokens", logprobs="top_logprobs",
               structured_outputs="response_format")  # fmt: skip
# Where a body says nothing. With other types than these it is refused.
DEFAULTS = dict(n=1, stream=False, stream_options={}, echo=False, logit_bias={},
                reasoning_format="auto", response_format={"type": "text"}, chat_template_kwargs={},
                continue_final_message=False, add_generation_prompt=True)  # fmt: skip
# What would change the answer, and is not done: with other values than these it is refused, and
# with any where it is None. What would not change it, such as `user` or `store`, is ignored, as are
# unknown names.
UNSUPPORTED = dict(tools=[], functions=[], suffix="", modalities=["text"], use_beam_search=False,
    bad_words=[], skip_special_tokens=True, include_stop_str_in_output=False,
    tool_choice="auto", add_special_tokens=True, audio=None,
    return_token_ids=False, grammar=None, json_schema=None, n_predict=None, prompt_logprobs=None,
    chat_template=None, documents=None, allowed_token_ids=None, guided_json=None, guided_regex=None,
    guided_choice=None, guided_grammar=None)  # fmt: skip


def checked(given: JSON, chat: bool) -> JSON:
    """A body with its defaults, and with our names and forms of settings. Raises SettingError where
    it asks for what is not done, or in the wrong form."""
    body = DEFAULTS | given
    for field, default in DEFAULTS.items():
        check(field, body[field], type(default))
    if body.get("tool_choice", body.get("function_call")) == "none":
        body |= dict(tools=[], functions=[], tool_choice="auto")
    options = body["stream_options"] if body["stream"] else {}
    for name in ("include_usage", "continuous_usage_stats"):
        check(f"stream_options[{name}]", options.get(name) or False, bool)
    echo = body["echo"] and not chat
    fine = UNSUPPORTED | dict(best_of=body["n"], stream_options=options, echo=echo)
    for field, value in body.items():
        supported(field, value, fine.get(field, value))
    supported("reasoning_format", body["reasoning_format"], "auto", "deepseek", "none")
    if echo and body.get("max_tokens") == 0:
        body["max_tokens"] = 1  # which is not shown
    if "max_completion_tokens" in body:
        body["max_tokens"] = body["max_completion_tokens"]
    if chat:
        scored = check("logprobs", body.get("logprobs", False), bool)
        top = body.get("top_logprobs", 0)
        body["logprobs"] = top if scored else None
        if top and not scored:
            raise SettingError("top_logprobs", "needs logprobs: true")
        if body["continue_final_message"] and given.get("add_generation_prompt"):
            raise SettingError("add_generation_prompt", "excludes continue_final_message: true")
    bias = body["logit_bias"].items()
    body["logit_bias"] = {int(i) if re.fullmatch("0|[1-9][0-9]{,8}", i) else i: b for i, b in bias}
    form = structure(body["response_format"])
    if form:
        supported("structured_outputs", body.get("structured_outputs"), None)
        body["structured_outputs"] = form
    # Of the prompt only, where log-probabilities are asked for at all.
    return body | dict(prompt_logprobs=echo)


# --- Answers out ----------------------------------------------------------------------------------

THINK, THOUGHT = "<think>", "</think>"
KINDS = {"text": "text_completion", "message": "chat.completion", "delta": "chat.completion.chunk"}


@dataclass
class Choice:
    """A sequence's state as OpenAI's choice.

    Attributes:
        form: "text"; or of a chat "message", or "delta" where it is streamed.
        begun: the marks before the reply, for parted(): "<think>" where the prompt has begun a
            thought, "<think></think>" where nothing counts as one, or "".
        chars, tokens, thought: how much of the output has been shown: of what is said, in
            characters and in tokens, and of what is thought.
        offset: characters shown in all.
        reason: the last finish_reason; "" before there was any.
    """

    index: int
    job: Job
    form: str
    server: Server
    begun: str
    chars: int
    tokens: int
    thought: int = 0
    offset: int = 0
    reason: str | None = ""

    def new(self) -> JSON | None:
        """What has not been shown yet; None: nothing is new. Raises Problem at a bad end."""
        job, is_first = self.job, self.reason == ""
        is_scored = job.params.logprobs is not None
        reason = job.finish_reason  # read first: once it is there, nothing else changes
        if reason == "error":  # of its structure, which became too complex, or of the model
            complaint = job.matcher and job.matcher.get_error()
            raise Problem(400 if complaint else 500, (complaint or BROKEN)[:100])
        status = 503 if self.server.over else 500
        demand(reason != "abort", status, "aborted: the server is stopping, or met an error")
        tokens = job.tokens[self.tokens :] if is_scored else []
        thought, text = parted(self.begun + job.text)
        thought, text = thought[self.thought :], text[self.chars :]
        if self.reason or not (reason or thought or text or tokens):
            return None
        self.reason = reason
        self.tokens += len(tokens)
        self.thought += len(thought)
        self.chars += len(text)
        if is_first and job.params.prompt_logprobs:  # echo
            spelt, prompt = TextStream(self.server.tokenizer, [], ()), job.request.prompt
            # The last also adds the marks of half a character.
            added = [spelt.push(token.id, token is prompt[-1])[0] for token in prompt]
            tokens = [token._replace(text=each) for token, each in zip(prompt, added)] + tokens
            text = self.server.tokenizer.decode(job.ids[: job.prompt_len]) + text
        logprobs = self.logprobs(tokens) if is_scored else None
        delta = dict(role="assistant", refusal=None) if is_first else {}
        delta |= {"reasoning_content": thought} if thought else {}
        said = text if self.form == "text" else delta | {"content": text}
        return {"index": self.index, self.form: said, "logprobs": logprobs, "finish_reason": reason}

    def logprobs(self, tokens: list[Token]) -> JSON:
        """Log-probabilities as a completion has them, or a chat. The tokens' texts join to the text
        of the choice, with its thoughts and their marks, but without a stop string; what else was
        likely is shown as it stands in the vocabulary."""

        def entry(token: Token, i: int, value: float) -> JSON:
            word = b"".join(pieces(self.server.tokenizer)[i : i + 1])  # some models' V is padded
            text = token.text if i == token.id else word.decode(errors="replace")
            return dict(token=text, logprob=value, bytes=list(word))

        # Of each token those that were likely, and at the end the one that was chosen.
        rows = [[entry(token, *each) for each in (*token.top, token[:2])] for token in tokens]
        if self.form != "text":
            return {"content": [chosen | {"top_logprobs": top} for *top, chosen in rows]}
        texts = [token.text for token in tokens]
        *offsets, self.offset = accumulate(map(len, texts), initial=self.offset)
        # With the chosen one, wherever it stands, as in vLLM; of a prompt's first there is none.
        likely = [{one["token"]: one["logprob"] for one in row} for row in rows]
        return dict(
            tokens=texts, text_offset=offsets, token_logprobs=[token.logprob for token in tokens],
            top_logprobs=[None if None in each.values() else each for each in likely])  # fmt: skip


def opening(tokenizer: Tokenizer, job: Job) -> str:
    """The marks to put before a chat's reply, for parted(). Some templates begin the thought."""
    if job.params.structured_outputs or len(tokenizer.encode(THINK, add_special=False)) > 1:
        return THINK + THOUGHT  # none: all of it is said
    return THINK if tokenizer.decode(job.ids[-16:]).rstrip().endswith(THINK) else ""


def parted(text: str) -> tuple[str, str]:
    """What of a reply is thought, and what is said. In models that think each mark is one token: it
    is there as a whole or not at all, unless a stop string begins with its end.

    Example: "<think>Hm, </think>Yes" -> "Hm, ", "Yes"; and "Yes" -> "", "Yes"
    """
    before, mark, rest = text.partition(THINK)
    if not mark or before.strip():
        return "", text
    thought, _, said = rest.partition(THOUGHT)
    return thought, before + said  # what a stream has shown already must stay in front


# --- What it says of itself -----------------------------------------------------------------------

BOUNDS = "0.001 0.0025 0.005 0.01 0.025 0.05 0.1 0.25 0.5 1 2.5 5 10 30 60 300 1000 3000 10000 +Inf"


def counters(engine: Engine) -> dict[str, float]:
    """What the engine counts, for /metrics and for the page."""
    return {f"{name}_total": value for name, value in engine.stats.items()} | dict(
        num_requests_running=len(engine.running), num_requests_waiting=len(engine.waiting),
        kv_cache_usage_perc=1 - len(engine.pool.available) / engine.pool.num_blocks,
        spec_decode_num_draft_tokens_total=sum(engine.proposer.offered),
        spec_decode_num_accepted_tokens_total=sum(engine.proposer.accepted))  # fmt: skip


def count(served: dict[str, Counter], request: Request) -> None:
    """Count a request that has ended: served[metric][suffix and label, such as ',le="5"']."""
    served["prompt_tokens_total"][""] += request.outputs[0].prompt_len
    for job in request.outputs:
        served["request_success_total"][f',finished_reason="{job.finish_reason}"'] += 1
        gaps = [after - before for before, after in pairwise(job.times)]
        times = dict(time_to_first_token_seconds=gaps[:1], e2e_request_latency_seconds=[sum(gaps)],
                     inter_token_latency_seconds=sorted(gaps[1:]),
                     request_prompt_tokens=[job.prompt_len],
                     request_generation_tokens=[len(job.tokens)])  # fmt: skip
        for name, values in times.items():
            le = {f'_bucket,le="{b}"': bisect_right(values, float(b)) for b in BOUNDS.split()}
            served[name].update(le, _sum=sum(values), _count=len(values))


def metrics(server: Server) -> str:
    """All of it, as Prometheus reads it."""
    kinds = dict(total="counter", seconds="histogram", tokens="histogram")
    families = {name: {"": value} for name, value in counters(server.engine).items()}
    model = json.dumps(server.name, ensure_ascii=False)
    text = ""
    for name, samples in (families | server.served).items():
        text += f"# TYPE vllm:{name} {kinds.get(name.rpartition('_')[2], 'gauge')}\n"
        for key, value in dict(samples).items():
            part, _, label = key.partition(",")  # such as "_bucket", 'le="0.5"'
            text += f"vllm:{name}{part}{{model_name={model},{label}}} {value}\n"
    return text


# --- HTTP -----------------------------------------------------------------------------------------

# What a proxy in front could read in another way is refused: bare line feeds, folded headers, space
# before a colon.
REQUEST = (r"([A-Z]+ [!->@-~]+)(?:\?[!-~]*)? HTTP/1\.([01])\r\n"
           r"((?:[!-9;-~]+:[^\r\n\0]*\r\n){,100}\r\n)")  # fmt: skip
# The page itself says that it may load nothing from elsewhere. X-Accel-Buffering is for nginx,
# which would collect the events of a stream and pass them on in lumps.
HEADERS = ("Connection: close\r\nCache-Control: no-store\r\nAllow: GET, HEAD, POST\r\n"
           "X-Accel-Buffering: no\r\n"
           "X-Content-Type-Options: nosniff\r\nX-Frame-Options: DENY\r\n")  # fmt: skip
CORS = "Access-Control-Allow-Headers: Authorization, *\r\nAccess-Control-Allow-Origin: {}\r\n"
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
JSON_TYPE, EVENTS = "application/json", "text/event-stream"
# Every name that ends in .localhost is this host (RFC 6761), with or without a dot at its end.
LOOPBACK = r"(?i)(([\w-]+\.)*localhost\.?|127[.0-9]+|::1|\[::1\])(:[0-9]+)?"


class Connection:
    """One client: reads its request and answers it.

    It serves one request. For the next one a client has to connect again, which takes a tenth of a
    millisecond on one machine. In return nobody can be in doubt where a request, an answer or a
    refused body ends, and HTTP/1.0, which proxies speak, is like 1.1.

    Attributes:
        line: of the request, such as "GET /health".
        kind: the answer's type, once it has begun.
        start: what every answer begins with, as far as it has not been sent.
        event: its sequences have moved on.
        rest: what reads on behind the request; see forget.
    """

    def __init__(self, server: Server, *ends: Any) -> None:
        """Take the two ends of a connection: an asyncio.StreamReader and a StreamWriter."""
        self.server = server
        self.reader, self.writer = ends
        self.line = self.kind = ""
        self.headers = {}
        self.start = b"HTTP/1.1 "
        self.event = asyncio.Event()
        self.rest = None
        self.writer.transport.set_write_buffer_limits(0)  # what is drained has been sent

    async def serve(self) -> None:
        """Read the request, and answer it or say why not, unless the client goes or falls silent.
        Then wait until it closes: to close while it sends would take the answer from it."""
        try:
            try:
                head = await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), IDLE_S)
                await self.route(head.decode("latin-1"))
            except (OSError, EOFError):
                raise
            except asyncio.LimitOverrunError:
                await self.refuse(431, "the headers are over 64 KiB")
            except Problem as problem:
                await self.refuse(*problem.args)
            except Exception:  # ours: the client is told no more than that
                traceback.print_exc()
                await self.refuse(500, "internal error")
            finally:
                self.server.busy.discard(self)
            self.writer.write_eof()
            await asyncio.wait_for(self.rest or self.forget(), IDLE_S)
        except (OSError, EOFError, asyncio.CancelledError) as error:
            # The reader keeps its error, and the error's frames would keep the whole request.
            error.__traceback__ = error.__context__ = None
        self.writer.transport.abort()

    async def refuse(self, status: int, message: str, param: str = "", code: str = "") -> None:
        """Answer anything but a success, in OpenAI's shape."""
        await self.send({"error": dict(
            message=message, param=param or None, code=code or None,
            type="server_error" if status >= 500 else "invalid_request_error",
        )}, status)  # fmt: skip

    async def route(self, head: str) -> None:
        """Find out what is asked for, and whether it may be.

        Raises:
            Problem: any answer that is not a success.
        """
        found = re.fullmatch(REQUEST, head)
        demand(found, 400, "this is not an HTTP/1 request with 100 headers at most")
        self.line = unquote(found[1])
        self.headers = headers = email.message_from_string(found[3])
        if found[2] == "0":
            del headers["Expect"]  # HTTP/1.0 knows no interim answers
        method, _, path = self.line.partition(" ")
        # Another site's page may reach this address by that site's own name (DNS rebinding).
        host = headers.get("Host", "localhost").strip()
        is_local = re.fullmatch(LOOPBACK, self.server.args.host)
        demand(
            not is_local or re.fullmatch(LOOPBACK, host),
            403,
            f"the Host is {host!r:.100}, and this server answers to localhost: let the proxy in "
            "front send `Host: localhost`, or start the server with --host 0.0.0.0",
        )
        acts = ACTS | {f"/v1/models/{self.server.name}": lambda c: c.send(c.server.model)}
        is_there = path in acts and (path != "/" or PAGE.is_file())
        demand(is_there, 404, f"there is no {path[:100]}: try /v1/chat/completions, /v1/models")
        if method == "OPTIONS" and self.server.args.cors:
            method, path = "GET", "/health"  # a browser asks without a key: any success will do
        right = ("POST",) if "/completions" in path else ("GET", "HEAD")
        demand(method in right, 405, f"there is {right[0]} {path}, and no {method}")
        key = (self.server.args.api_key or "").encode()
        given = headers.get("Authorization", "")[len("Bearer ") :].encode("latin-1")
        may_enter = path in ("/", "/health") or not key or secrets.compare_digest(given, key)
        demand(may_enter, 401, "the API key is missing or wrong", "", "invalid_api_key")
        await acts[path](self)

    async def complete(self, chat: bool) -> None:
        """Answer a completion, whole or streamed."""
        # 1) what is asked for, and whether there is room for it
        server, body = self.server, await self.read_json()
        server.busy.add(self)
        self.rest = asyncio.create_task(self.forget())
        demand(not server.stopping, 503, "the server is stopping")
        uid = ("chatcmpl-" if chat else "cmpl-") + secrets.token_hex(12)
        # In another thread: a long text takes a while to encode, and others are being served.
        requests = await asyncio.to_thread(server.prepare, body, chat, uid)
        waiting, most = len(server.engine.waiting) + server.inbox.qsize(), server.args.max_queue
        demand(waiting + len(requests) <= most, 429, f"{waiting} wait, --max-queue is {most}")
        may_think = chat and body.get("reasoning_format") != "none"
        begun = opening(server.tokenizer, requests[0].outputs[0]) if may_think else THINK + THOUGHT
        # 2) what is new, as it comes
        stream, options = body.get("stream"), body.get("stream_options") or {}
        form = ("delta" if stream else "message") if chat else "text"
        base = dict(id=uid, object=KINDS[form], created=int(time.time()), model=server.name,
                    system_fingerprint=settings.VERSION)  # fmt: skip
        jobs = [job for request in requests for job in request.outputs]
        # Of max_tokens 0 nothing is shown but the prompt.
        skip = 2**31 if (body.get("max_completion_tokens") or body.get("max_tokens")) == 0 else 0
        choices = [Choice(i, job, form, server, begun, skip, skip) for i, job in enumerate(jobs)]
        ended = False
        firsts = [request.outputs[0] for request in requests]
        old = sum(job.prompt_len for job in firsts)
        server.inbox.put(lambda: server.submit(requests, self))
        while not ended:
            await self.event.wait()
            self.event.clear()
            ended = all(request.finished for request in requests)
            news = [each.new() for each in choices if stream]
            new = sum(len(job.tokens) for job in jobs if not skip)
            usage = dict(prompt_tokens=old, completion_tokens=new, total_tokens=old + new,
                prompt_tokens_details=dict(cached_tokens=sum(job.cached for job in firsts)),
            )  # fmt: skip
            if options.get("continuous_usage_stats"):
                base["usage"] = usage
            for new in filter(None, news):
                await self.send(base | {"choices": [new]}, kind=EVENTS)
        # 3) all of it; or, of a stream, what is left: the usage, if it was asked for
        whole = base | dict(choices=[], usage=usage)
        if not stream:  # in another thread: it may be much
            whole["choices"] = [await asyncio.to_thread(each.new) for each in choices]
        elif options.get("include_usage"):
            await self.send(whole, kind=EVENTS)
        await self.send("[DONE]" if stream else whole)

    async def show(self) -> None:
        """Answer with the engine's state; the page asks for it again and again. One look serves all
        who ask within a tenth of a second."""
        if time.monotonic() > self.server.looked + 0.09:
            self.server.looked = time.monotonic()
            self.server.inbox.put(self.server.look)
        await asyncio.sleep(0.1)
        await self.send(self.server.snapshot)

    # --- On the wire ------------------------------------------------------------------------------

    async def read_json(self) -> JSON:
        """Read the body, a JSON object."""
        demand(self.headers.get_content_type() == JSON_TYPE, 415, f"the body must be {JSON_TYPE}")
        async with asyncio.timeout(IDLE_S):
            data = await self.read_body()
        try:  # int() refuses NaN and Infinity, which Python would take for numbers
            return check("body", json.loads(data, parse_constant=int), dict)
        except (ValueError, RecursionError) as error:
            raise Problem(400, f"the body must be a JSON object: {str(error)[:200]}") from None

    async def read_body(self) -> bytes:
        """Read as many bytes as Content-Length says; or chunks: each is its size in hex, CRLF, that
        many bytes, CRLF. The last has size 0."""
        form = ",".join(
            value.strip()
            for name in ("Content-Length", "Transfer-Encoding")
            for value in self.headers.get_all(name, [])
        )
        known = re.fullmatch("([0-9]{1,18})|(?i:chunked)", form)
        demand(known, 411, "send the body with one Content-Length, or in chunks")
        if known[1]:
            self.check_size(int(form))
        self.writer.write(CONTINUE if "Expect" in self.headers else b"")
        if known[1]:
            return await self.reader.readexactly(int(form))
        data, size = bytearray(), 1  # to bytes each += would copy all of it
        while size:
            line = await self.reader.readuntil(b"\r\n")
            demand(re.fullmatch(b"[0-9A-Fa-f]{1,8}\r\n", line), 400, "a chunk without its size")
            size = int(line, 16)
            self.check_size(len(data) + size)
            data += await self.reader.readexactly(size)
            await self.reader.readexactly(2)
        return data

    def check_size(self, size: int) -> None:
        """Raise a Problem if a body is longer than --max-body."""
        most = self.server.args.max_body
        demand(size <= most, 413, f"the body has {size} bytes, --max-body is {most}")

    async def forget(self) -> None:
        """Read what follows the request, and forget it.

        When that ends, the client has closed its sending half to wait for the answer, or it has
        left: TCP does not say which until something is sent. So the bytes that every answer begins
        with go out one by one. A client that has left refuses the first, so the second fails.
        """
        with suppress(OSError):
            while await self.reader.read(2**16):
                pass
        while not (self.kind or self.writer.is_closing()):
            self.writer.write(self.start[:1])
            self.start = self.start[1:]
            await asyncio.sleep(0.3)

    async def send(self, item: JSON | str, status: int = 200, kind: str = JSON_TYPE) -> None:
        """Send an answer, or an event of a stream, whose kind is EVENTS. Before the first goes the
        head, which alone has a status; so an error in a stream is one more event."""
        text = item if isinstance(item, str) else json.dumps(item)
        data = (f"data: {text}\n\n" if (self.kind or kind) == EVENTS else text).encode()
        if not self.kind:
            self.kind = kind
            head = (
                f"{status} \r\n{HEADERS}Content-Type: {kind}\r\n"
                f"X-Request-Id: {self.headers.get('X-Request-Id') or secrets.token_hex(12)}\r\n"
            )
            if kind != EVENTS:
                head += f"Content-Length: {len(data)}\r\n"
            if status == 429:
                head += "Retry-After: 1\r\n"
            if self.server.args.cors:
                head += CORS.format(self.server.args.cors)
            self.writer.write(self.start + f"{head}\r\n".encode("latin-1"))
            with suppress(OSError):  # where nobody reads the log, no answer is lost with it
                if self.line != "GET /engine" or status != 200:  # or the page would fill it
                    seen = "gone" if self.writer.is_closing() else status
                    print(f"{self.line!r:.200} {seen}", file=sys.stderr)
        if not self.line.startswith("HEAD "):
            self.writer.write(data)
        async with asyncio.timeout(IDLE_S):  # who does not read on does not keep a seat
            await self.writer.drain()


ACTS = {"/": lambda c: c.send(PAGE.read_text("utf-8"), kind="text/html"),
        "/version": lambda c: c.send({"version": settings.VERSION}),
        # A proxy's check looks at the status alone.
        "/health": lambda c: c.send({"status": "stopping"}, 503) if c.server.stopping
                             else c.send({"status": "ok"}),
        "/metrics": lambda c: c.send(metrics(c.server), kind="text/plain; version=0.0.4"),
        "/engine": Connection.show,
        "/v1/models": lambda c: c.send(dict(object="list", data=[c.server.model])),
        "/v1/completions": lambda c: c.complete(chat=False),
        "/v1/chat/completions": lambda c: c.complete(chat=True)}  # fmt: skip


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
    args = ServerArgs(**{"api_key": os.getenv("KILOLM_API_KEY")} | settings.given(ServerArgs, args))
    if "" in (args.host, args.api_key):
        raise ValueError("--host and --api-key (or $KILOLM_API_KEY) must not be empty")
    if not re.fullmatch(r"\*|https?://[\w.:\[\]-]+", args.cors or "*"):
        raise ValueError(f"--cors {args.cors}: must be like http://localhost:3000, or *")
    model, proposer = load_models(args, ranks)
    if ranks.rank:
        return ranks.follow(model)
    engine = make_engine(args, ranks, model, proposer)
    if args.max_num_batched_tokens is None and ranks.device.type == "cpu":
        # The more of a prompt a step takes, the longer all others wait for their next token: with
        # 32 tokens of prompts the 99th percentile is half of what it is with 512.
        engine.max_num_batched_tokens += 32 - CHUNK
    return serve(engine, args)


def serve(engine: Engine, args: ServerArgs) -> int:
    """Serve until SIGTERM or SIGINT; then finish what runs, within --shutdown-timeout.

    PyTorch's threads belong to the thread that first used them, which is this one, where the model
    was loaded: a model that runs in another gets a second pool of them, and OpenMP, seeing more
    threads than processors, puts them to sleep between any two operations. On two cores the bundled
    model was slower by half.
    """
    server = Server(engine, args)
    reading, writing = os.pipe()

    def watch() -> None:
        """Wait for signals: each arrives as one byte."""
        while os.read(reading, 1):
            if server.stopping:
                os._exit(1)  # the second time: at once
            server.stopping = True

    # Python runs signal handlers in the main thread, between two of its instructions: not while it
    # waits in a collective for a rank that is stopped. But it writes each signal's number into a
    # file at once, which another thread can read. For that there must be a handler.
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    Thread(target=watch, daemon=True).start()
    with ThreadPoolExecutor(1) as pool:
        listening = pool.submit(asyncio.run, server.listen())
        listening.add_done_callback(lambda _: server.inbox.put(None))
        server.drive()
        listening.result()
    return 0


if __name__ == "__main__":
    program.run(main)
