"""An HTTP server in front of the scheduler that OpenAI's clients can talk to.

    python server.py                            the bundled model, on http://127.0.0.1:8000
    python server.py --checkpoint DIR --compile --api-key SECRET

This file holds only HTTP. The main thread runs the engine. An event loop in another thread reads
requests, checks every field before anything is allocated, and hands them to the engine. After each
step the engine's thread tells the loop which requests have new tokens. A slow client delays nobody:
the handler reads the state of its sequences only when the client has taken the previous part, so
there is no queue of tokens.

    client --> Connection.complete --> Server.prepare --> inbox --> Server.drive: submit, step, step
    client <-- Connection.send <-- Choice.take_new <---- event <--- Server.wake <------+

The server listens on loopback by default. Its HTTP needs only the standard library. References:
platform.openai.com/docs/api-reference. The names in /metrics are vLLM's, except engine_steps_total
and computed_tokens_total. Read: Server.drive, Server.prepare, Choice, Connection.complete, serve.
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
from io import BytesIO
from itertools import accumulate, pairwise
from threading import Thread
from typing import Any
from urllib.parse import unquote

if __name__ == "__main__":  # before PyTorch: Ctrl-C may come while it is imported
    import program

import settings
from checkpoint import suggested, without_nulls
from generate import cache_size, join, load_models, make_engine
from sampling import BROKEN, Token
from scheduler import Engine, Job, Request
from settings import (
    JSON,
    EngineArgs,
    Ranks,
    SamplingParams,
    SettingError,
    check,
    check_ids,
    say,
    setting,
    supported,
)
from structured import pieces, structure
from tokenizer import Detokenizer, Ids, Tokenizer, plain_turn

IDLE_S = 75  # seconds to wait for a head, for a body, or for a client to read its answer
PAGE = settings.BUNDLED.parents[1] / "page.html"


@dataclass(frozen=True)
class ServerArgs(EngineArgs):
    """What to serve, and to whom."""

    host: str = setting("127.0.0.1", "0.0.0.0: listen on all networks, accept any Host header")
    port: int = setting(8000, "0: any free port", 0, 65535)
    served_model_name: str | None = setting(None, "in the API (default: the folder's name)")
    max_queue: int = setting(1024, "waiting requests before a 429", 0)
    max_body: int = setting(2**22, "bytes of a request", 1)
    shutdown_timeout: float = setting(30.0, "seconds for running requests to finish", 0, 1e6)
    api_key: str | None = setting(None, "clients must send it (default: $KILOLM_API_KEY)")
    cors: str | None = setting(None, "an origin whose pages may use the API")


class Problem(Exception):
    """An error that is sent to the client. The arguments are those of Connection.refuse."""


def demand(condition: object, *problem: Any) -> None:
    """Raise a Problem unless the condition holds."""
    if not condition:
        raise Problem(*problem)


# --- The server -----------------------------------------------------------------------------------


class Server:
    """The engine, and the connections that wait for it. Only drive() changes the engine's state.

    Attributes:
        inbox: functions that drive() calls in turn, self.step among them; None ends drive().
        waiters: each request in the engine -> the connection that answers it. Only drive() changes
            this and `served`.
        served: statistics of the requests that have ended; see count().
        busy: connections that are answering a completion. They may finish after a signal.
        stopping: a signal arrived.
        over: the grace period has expired.
        snapshot: the engine's state for the page, as JSON.
        snapshot_time: when a page last caused a snapshot, on time.monotonic's clock.
    """

    def __init__(self, engine: Engine, args: ServerArgs) -> None:
        self.engine = engine
        self.args = args
        self.tokenizer = engine.tokenizer
        self.name = args.served_model_name or args.checkpoint.resolve().name
        self.model = dict(
            id=self.name,
            object="model",
            owned_by="kilolm",
            created=int(time.time()),
            max_model_len=engine.max_seq_len,
        )
        self.defaults = SamplingParams(**suggested(args.checkpoint))
        self.inbox = queue.SimpleQueue()
        self.waiters = {}
        self.busy = set()
        self.served = defaultdict(Counter)
        self.stopping = self.over = False
        self.snapshot_time = 0.0
        self.take_snapshot()

    # --- The engine's thread ----------------------------------------------------------------------

    def drive(self) -> None:
        """Call what is in the inbox, until told to end. Whenever the inbox is empty and requests
        are left, a step is put there.

        After an error all requests end, and the engine goes on with the next ones. It cannot go on
        after another rank is lost.
        """
        for task in iter(self.inbox.get, None):
            try:
                task()
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
        """Abort the requests of clients that have left (all, once the grace period is over), then
        run a step."""
        lost = [each for each, c in self.waiters.items() if c.writer.is_closing() or self.over]
        for request in lost:
            self.engine.abort(request)
        self.wake(lost + self.engine.step())

    def submit(self, requests: list[Request], connection: "Connection") -> None:
        """Put the requests of one connection into the engine's queue."""
        for request in requests:
            self.waiters[request] = connection
            self.engine.submit(request)

    def wake(self, requests: list[Request]) -> None:
        """Wake the connections whose requests have made progress, and count finished requests."""
        events = [self.waiters[request].event for request in requests]
        for request in requests:
            if request.finished:
                del self.waiters[request]
                count(self.served, request)
                # A request and its outputs refer to each other. Unless this cycle is broken, they
                # stay in memory until Python collects cycles. The connection has its own list.
                while request.outputs:
                    self.engine.ran.pop(request.outputs.pop(), None)
        with suppress(RuntimeError):  # the event loop has ended, so no connection waits
            self.loop.call_soon_threadsafe(lambda: [event.set() for event in events])

    def take_snapshot(self) -> None:
        """Store what the page shows: which sequences run or wait, and which blocks they have. This
        takes some microseconds for each sequence."""
        engine = self.engine
        state = dict(
            blocks=engine.pool.num_blocks,
            block_size=engine.pool.block_size,
            cached=engine.pool.cached,
            running=[
                dict(
                    name=f"{job.request.id}.{job.request.outputs.index(job)}",
                    text=job.text[-40:],
                    prompt=job.prompt_len,
                    blocks=job.table.blocks,
                    length=job.table.length,
                    max=job.max_len,
                    ran=engine.ran.get(job, 0),
                )
                for job in engine.running
            ],
            waiting=[job.prompt_len for job in engine.waiting[:100]],
        )
        self.snapshot = json.dumps(counters(engine) | state)

    # --- The event loop's thread ------------------------------------------------------------------

    async def listen(self) -> None:
        """Answer requests until a signal arrives, then let the running completions finish."""
        self.loop = asyncio.get_running_loop()
        # Print each of asyncio's own errors in one line: when no file descriptor is left, it
        # reports an error every second.
        self.loop.set_exception_handler(lambda _, what: print(*what.values(), file=sys.stderr))
        # asyncio's `backlog` is both the length of the queue and the number of clients accepted at
        # a time. Each accept that fails for lack of file descriptors is tried again later, so with
        # a large backlog the attempts multiply (python/cpython#151615). Hence one is accepted at a
        # time, and the socket's own listen(128), below, sets the length of the queue.
        listener = await asyncio.start_server(
            lambda *ends: Connection(self, *ends).serve(), self.args.host, self.args.port, backlog=1
        )
        for each in listener.sockets:
            with each.dup() as same:
                same.listen(128)
        host, self.port = listener.sockets[0].getsockname()[:2]
        host = f"[{host}]" if ":" in host else host
        say(f"serving {self.name} on http://{host}:{self.port}")
        while not self.stopping:
            await asyncio.sleep(0.1)
        listener.close()
        end = time.monotonic() + self.args.shutdown_timeout
        while self.busy and time.monotonic() < end + 1:  # one more second, to send the errors
            self.over = time.monotonic() > end
            await asyncio.sleep(0.05)

    # --- Requests in ------------------------------------------------------------------------------

    def prepare(self, body: JSON, chat: bool, uid: str) -> tuple[JSON, list[Request]]:
        """Check a request body, and make one engine request for each prompt.

        Args:
            body: the JSON object.
            chat: whether it is a chat.
            uid: the requests get the ids uid-0, uid-1, ...

        Returns:
            The fields of the body, see translate; and the requests.

        Raises:
            Problem: 400 with the field that is wrong, or 404 for another model.
        """
        source = "messages" if chat else "prompt"
        context = self.engine.max_seq_len
        given = without_nulls(body)
        if given.get("model", self.name) != self.name:
            raise Problem(404, f"the model here is {self.name!r}", "model", "model_not_found")
        try:
            fields = translate(given, chat)
            params = self.sampling_params(fields, chat)
            prompts = self.chat_ids(fields) if chat else fields.get("prompt", "")
            if not isinstance(prompts, list) or all(type(i) is int for i in prompts):
                prompts = [prompts]
            check("n", len(prompts) * params.n, int, 1, 256)  # for all prompts together
            requests = []
            for i, prompt in enumerate(prompts):
                check("prompt", prompt, str | list)
                ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
                asked = len(ids) + fields.get("max_tokens", 1)
                demand(
                    asked <= context,
                    400,
                    # Clients search for this wording, which is OpenAI's.
                    f"This model's maximum context length is {context} tokens. However, you "
                    f"requested {asked} tokens, {len(ids)} of them in the prompt: ask for less.",
                    source,
                    "context_length_exceeded",
                )
                requests.append(
                    self.engine.prepare(
                        ids,
                        params,
                        id=f"{uid}-{i}",
                        priority=fields.get("priority", 0),
                        cache_salt=fields.get("cache_salt"),
                    )
                )
            return fields, requests
        except (ValueError, RecursionError) as error:
            field = getattr(error, "field", source)
            param = next((each for each in (ALIASES.get(field), field) if each in given), source)
            raise Problem(400, str(error)[:500], param) from None

    def sampling_params(self, fields: JSON, chat: bool) -> SamplingParams:
        """Return the sampling settings of a request. Omitted ones come from the checkpoint, except
        max_tokens: it is 16 in a completion, and in a chat only the context limits it."""
        check_ids("logit_bias", fields["logit_bias"], self.engine.config.vocab_size)
        defaults = vars(self.defaults) | dict(max_tokens=self.engine.max_seq_len if chat else 16)
        params = SamplingParams(**{name: fields.get(name, defaults[name]) for name in defaults})
        if chat and not params.structured_outputs:
            # The user's stop strings come first, so that none of sixteen is dropped.
            params = replace(params, stop=(params.stop + self.tokenizer.chat_stop)[:16])
        return params

    def chat_ids(self, fields: JSON) -> Ids:
        """Render the messages of a chat and encode them. The content of a message can be a list of
        parts, which are joined."""
        messages = fields["messages"]
        demand(messages, 400, "messages must have at least one message", "messages")
        for i, message in enumerate(messages):
            try:
                check("role", message.get("role"), str)
                text = message.get("content")
                if isinstance(text, list):
                    for part in text:
                        supported("content of type", part.get("type", "text"), "text")
                    text = "\n".join(part["text"] for part in text)
                check("content", text, str | None if message.get("tool_calls") else str)
                message["content"] = text
                plain_turn(message)  # encode_chat does it; here an error names the message
            except Exception as error:  # a value of any other form than these lines expect
                raise Problem(
                    400, f"role, content or tool_calls are wrong: {error}", f"messages[{i}]"
                ) from None
        goes_on = fields["continue_final_message"]
        options = dict(add_generation_prompt=fields["add_generation_prompt"] and not goes_on)
        return self.tokenizer.encode_chat(
            messages, goes_on, **options | fields["chat_template_kwargs"]
        )


# This engine's name of a setting -> OpenAI's name, where they differ.
ALIASES = dict(max_tokens="max_completion_tokens", logprobs="top_logprobs",
               structured_outputs="response_format")  # fmt: skip
# The fields' defaults. A value of another type is refused.
DEFAULTS = dict(
    messages=[], n=1, stream=False, stream_options={}, echo=False, logit_bias={},
    response_format={"type": "text"}, reasoning_format="auto", chat_template_kwargs={},
    continue_final_message=False, add_generation_prompt=True)  # fmt: skip
# Fields that would change the answer, but are not supported. Those of REFUSED must be left out, and
# the others must have the value that is given here. Fields that this file does not mention, such as
# `user` or `store`, are ignored, even if they would change the answer.
REFUSED = """audio grammar json_schema n_predict prompt_logprobs chat_template documents
    allowed_token_ids guided_json guided_regex guided_choice guided_grammar"""
UNSUPPORTED = dict.fromkeys(REFUSED.split()) | dict(
    tools=[], functions=[], tool_choice="auto", suffix="", bad_words=[], modalities=["text"],
    use_beam_search=False, skip_special_tokens=True, include_stop_str_in_output=False,
    add_special_tokens=True, return_token_ids=False)  # fmt: skip


def translate(given: JSON, chat: bool) -> JSON:
    """Return the fields of a body with their defaults. Settings that have another name in OpenAI's
    API are added under the engine's name.

    Raises:
        SettingError: a field has the wrong type, or asks for what is not supported.
    """
    fields = DEFAULTS | given
    for name, default in DEFAULTS.items():
        check(name, fields[name], type(default))
    for name in ("include_usage", "continuous_usage_stats"):
        fields[name] = check(
            f"stream_options[{name}]", fields["stream_options"].get(name) or False, bool
        )
    check_supported(fields, chat)
    if "max_completion_tokens" in fields:
        fields["max_tokens"] = fields["max_completion_tokens"]
    # With echo, log-probabilities come for the prompt too, and max_tokens may be 0. The engine has
    # to generate one token, so it is hidden.
    hidden = fields["echo"] and fields.get("max_tokens") == 0
    fields |= dict(prompt_logprobs=fields["echo"], hidden=hidden)
    if hidden:
        fields["max_tokens"] = 1
    if chat:
        top = fields.get("top_logprobs", 0)
        if check("logprobs", fields.pop("logprobs", False), bool):
            fields["logprobs"] = top
        elif top:
            raise SettingError("top_logprobs", "needs logprobs: true")
        if fields["continue_final_message"] and given.get("add_generation_prompt"):
            raise SettingError("add_generation_prompt", "excludes continue_final_message: true")
    fields["logit_bias"] = {
        int(i) if re.fullmatch("0|[1-9][0-9]{,8}", i) else i: bias
        for i, bias in fields["logit_bias"].items()
    }
    schema = structure(fields["response_format"])
    if schema:
        if "structured_outputs" in fields:
            raise SettingError("structured_outputs", "excludes response_format")
        fields["structured_outputs"] = schema
    return fields


def check_supported(fields: JSON, chat: bool) -> None:
    """Raise SettingError if a field asks for what is not supported."""
    allowed = UNSUPPORTED | dict(
        best_of=fields["n"],
        stream_options=fields["stream_options"] if fields["stream"] else {},
        echo=fields["echo"] and not chat,
    )
    if fields.get("tool_choice", fields.get("function_call")) == "none":
        fields = fields | dict(tools=[], functions=[], tool_choice="auto")  # they have no effect
    for name, value in fields.items():
        supported(name, value, allowed.get(name, value))
    supported("reasoning_format", fields["reasoning_format"], "auto", "deepseek", "none")


# --- Answers out ----------------------------------------------------------------------------------

THINK = "<think>"
THOUGHT = "</think>"
# A choice's key for its text -> the type of the object that holds the choice.
OBJECTS = dict(text="text_completion", message="chat.completion", delta="chat.completion.chunk")


@dataclass
class Choice:
    """One sequence, and how much of it has been sent, as a `choice` object of OpenAI's API.

    Attributes:
        key: where the text goes: "text" for a completion, "message" for a chat, "delta" for a chat
            that is streamed.
        prefix: what split_thought needs in front of the output; see thought_prefix.
        taken: how many characters of the thought, characters of the answer, and tokens with
            log-probabilities have been taken.
        offset: characters in the texts of these tokens.
        reason: the last finish_reason; "" before the first part has been taken.
    """

    index: int
    job: Job
    key: str
    server: Server
    prefix: str
    taken: list[int]
    offset: int = 0
    reason: str | None = ""

    def take_new(self) -> JSON | None:
        """Return what has been generated since the last call, or None if that is nothing.

        Raises:
            Problem: the sequence ended with an error.
        """
        job = self.job
        is_first = self.reason == ""
        is_scored = job.params.logprobs is not None
        reason = job.finish_reason  # read first, because nothing changes after it is set
        if reason == "error":  # its grammar became too complex, or the model produced NaN logits
            complaint = job.matcher and job.matcher.get_error()
            raise Problem(400 if complaint else 500, (complaint or BROKEN)[:100])
        if reason == "abort":
            demand(not self.server.over, 503, "the server is stopping")
            raise Problem(500, "a step of the engine failed")
        # The tokens are copied, because meanwhile the engine's thread may append to them.
        whole = [*split_thought(self.prefix + job.text), job.tokens[:] if is_scored else []]
        thought, text, tokens = (each[start:] for each, start in zip(whole, self.taken))
        if self.reason or not (reason or thought or text or tokens):
            return None
        self.reason = reason
        self.taken = [len(each) for each in whole]
        if is_first and job.params.prompt_logprobs:
            # The answer begins with the prompt ("echo").
            tokenizer = self.server.tokenizer
            start = len(tokenizer.prefix)
            if job.ids[:start] != tokenizer.prefix:
                start = 0  # the prompt was given as ids
            detokenizer = Detokenizer(tokenizer, [], show_special=True)
            # What the tokenizer put in front of the text has no text. If the prompt ends in an
            # incomplete character, the last token shows it as U+FFFD.
            prompt = job.request.prompt_tokens
            tokens = (
                prompt[:start]
                + [
                    token._replace(text=detokenizer.push(token.id, token is prompt[-1]))
                    for token in prompt[start:]
                ]
                + tokens
            )
            text = tokenizer.decode(job.ids[start : job.prompt_len], show_special=True) + text
        message = dict(role="assistant", refusal=None) if is_first else {}
        if thought:
            message["reasoning_content"] = thought
        message["content"] = text
        return {
            "index": self.index,
            self.key: text if self.key == "text" else message,
            "logprobs": self.logprobs(tokens) if is_scored else None,
            "finish_reason": reason,
        }

    def logprobs(self, tokens: list[Token]) -> JSON:
        """Return log-probabilities in the form of a completion or of a chat.

        The texts of the sampled tokens, joined, are the whole output: the thought with the marks
        around it, the choice's text, and a stop string, which the choice's text leaves out. The
        other likely tokens have the text that they have in the vocabulary.
        """

        def entry(token: Token, i: int, value: float) -> JSON:
            word = b"".join(pieces(self.server.tokenizer)[i : i + 1])  # V may be padded
            text = token.text if i == token.id else word.decode(errors="replace")
            return dict(token=text, logprob=value, bytes=list(word))

        # In each row: the likeliest tokens, then the one that was sampled.
        rows = [[entry(token, *each) for each in (*token.top, token[:2])] for token in tokens]
        if self.key != "text":
            return {"content": [sampled | {"top_logprobs": top} for *top, sampled in rows]}
        texts = [token.text for token in tokens]
        *offsets, self.offset = accumulate(map(len, texts), initial=self.offset)
        # The sampled token is in here even if it is unlikely, as in vLLM.
        likely = [{each["token"]: each["logprob"] for each in row} for row in rows]
        return dict(
            tokens=texts,
            text_offset=offsets,
            token_logprobs=[token.logprob for token in tokens],
            # The first token of a prompt has no log-probabilities.
            top_logprobs=[None if None in each.values() else each for each in likely],
        )


def thought_prefix(tokenizer: Tokenizer, job: Job, wanted: bool) -> str:
    """Return what to put in front of a sequence's output for split_thought.

    Some templates begin the thought, so that the output lacks the mark "<think>". Structured output
    and models without a token for that mark have no thoughts. There, and where thoughts are not to
    be split off, an empty thought is put in front, so that all of the output is the answer.

    Args:
        wanted: whether thoughts are to be split off.
    """
    if (
        not wanted
        or job.params.structured_outputs
        or len(tokenizer.encode(THINK, add_special=False)) > 1
    ):
        return THINK + THOUGHT
    return THINK if tokenizer.decode(job.ids[-16:]).rstrip().endswith(THINK) else ""


def split_thought(text: str) -> tuple[str, str]:
    """Split a reply into the thought and the answer.

    In models that think, each mark is one token, so it arrives whole. The exception is a stop
    string that begins like the end of a mark, such as ">": then that end is held back at first.

    Example: "<think>Hm, </think>Yes" -> "Hm, ", "Yes"; and "Yes" -> "", "Yes"
    """
    before, _, rest = text.partition(THINK)  # without the mark, `before` is all of the text
    if before.strip():
        return "", text
    thought, _, answer = rest.partition(THOUGHT)
    return thought, before + answer  # `before` may have been sent already, so it stays


# --- Statistics -----------------------------------------------------------------------------------

BOUNDS = "0.001 0.0025 0.005 0.01 0.025 0.05 0.1 0.25 0.5 1 2.5 5 10 30 60 300 1000 3000 10000 +Inf"


def counters(engine: Engine) -> dict[str, float]:
    """Return the engine's counters and gauges, for /metrics and for the page."""
    return {f"{name}_total": value for name, value in engine.stats.items()} | dict(
        num_requests_running=len(engine.running),
        num_requests_waiting=len(engine.waiting),
        kv_cache_usage_perc=1 - len(engine.pool.available) / engine.pool.num_blocks,
        spec_decode_num_draft_tokens_total=sum(engine.proposer.offered),
        spec_decode_num_accepted_tokens_total=sum(engine.proposer.accepted),
    )


def count(served: dict[str, Counter], request: Request) -> None:
    """Count a finished request. The keys are served[metric][suffix and label]; a bucket's is
    '_bucket,le="5"'."""
    served["prompt_tokens_total"][""] += request.outputs[0].prompt_len
    for job in request.outputs:
        served["request_success_total"][f',finished_reason="{job.finish_reason}"'] += 1
        gaps = [after - before for before, after in pairwise(job.times)]
        observed = dict(
            time_to_first_token_seconds=gaps[:1],
            inter_token_latency_seconds=sorted(gaps[1:]),
            e2e_request_latency_seconds=[sum(gaps)] if gaps else [],
            request_prompt_tokens=[job.prompt_len],
            request_generation_tokens=[len(job.tokens)],
        )
        for name, values in observed.items():
            le = {f'_bucket,le="{b}"': bisect_right(values, float(b)) for b in BOUNDS.split()}
            served[name].update(le, _sum=sum(values), _count=len(values))


def metrics(server: Server) -> str:
    """Return all statistics in Prometheus' text format."""
    kinds = dict(total="counter", seconds="histogram", tokens="histogram")
    families = {name: {"": value} for name, value in counters(server.engine).items()}
    model = json.dumps(server.name, ensure_ascii=False)
    text = ""
    for name, samples in (families | server.served).items():
        text += f"# TYPE vllm:{name} {kinds.get(name.rpartition('_')[2], 'gauge')}\n"
        for key, value in dict(samples).items():
            suffix, _, label = key.partition(",")  # such as "_bucket", 'le="0.5"'
            text += f"vllm:{name}{suffix}{{model_name={model},{label}}} {value}\n"
    return text


# --- HTTP -----------------------------------------------------------------------------------------

# A request's head. The groups are method and path, the minor version, and the headers. It excludes
# what a proxy could read differently: bare line feeds, folded headers, a space before the colon.
REQUEST = (
    r"([A-Z]+ [!->@-~]+)(?:\?[!-~]*)? HTTP/1\.([01])\r\n"
    r"((?:[!-9;-~]+:[^\r\n\0]*\r\n){,100}\r\n)"
)
# X-Accel-Buffering keeps nginx from collecting the events of a stream before it sends them on. The
# Content-Security-Policy, with which the page loads nothing from elsewhere, is in page.html itself.
HEADERS = (
    "Connection: close\r\nCache-Control: no-store\r\nAllow: GET, HEAD, POST\r\n"
    "X-Accel-Buffering: no\r\n"
    "X-Content-Type-Options: nosniff\r\nX-Frame-Options: DENY\r\n"
)
JSON_TYPE = "application/json"
EVENTS = "text/event-stream"
# All names that end in .localhost mean this host (RFC 6761), with or without a final dot.
LOOPBACK = r"(?i)(([\w-]+\.)*localhost\.?|127[.0-9]+|::1|\[::1\])(:[0-9]+)?"


class Connection:
    """A connection to one client: reads a request and answers it.

    It serves only one request, so a client connects again for the next one, which takes a tenth of
    a millisecond on one machine. In return it is never in doubt where a request, an answer or a
    refused body ends, and HTTP/1.0, which proxies may speak, works as 1.1 does.

    Attributes:
        line: the request's method and path, such as "GET /health".
        content_type: of the answer; "" until its head has been sent.
        start: the beginning of all answers. What has been read of it has been sent; see
            discard_rest.
        event: set when the sequences of this connection have made progress.
        rest: the task that reads what follows the request; see discard_rest.
    """

    def __init__(self, server: Server, *ends: Any) -> None:
        """Take the two ends of a connection: an asyncio.StreamReader and a StreamWriter."""
        self.server = server
        self.reader, self.writer = ends
        self.line = self.content_type = ""
        self.headers = {}
        self.start = BytesIO(b"HTTP/1.1 ")
        self.event = asyncio.Event()
        self.rest = None
        self.writer.transport.set_write_buffer_limits(0)  # drain() waits until all is sent

    async def serve(self) -> None:
        """Read the request and answer it, with an error if need be. Then wait until the client
        closes: if this side closed first while the client still sends, the answer would be lost."""
        try:
            try:
                head = await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), IDLE_S)
                await self.route(head.decode("latin-1"))
            except FileNotFoundError:
                await self.refuse(404, "page.html is missing")
            except (OSError, EOFError):
                raise
            except asyncio.LimitOverrunError:
                await self.refuse(431, "the headers are over 64 KiB")
            except Problem as problem:
                await self.refuse(*problem.args)
            except Exception:  # a bug in the server, whose details are not for the client
                traceback.print_exc()
                await self.refuse(500, "internal error")
            finally:
                self.server.busy.discard(self)
            self.writer.write_eof()
            await asyncio.wait_for(self.rest or self.discard_rest(), IDLE_S)
        except (OSError, EOFError, asyncio.CancelledError) as error:
            # The client has left or was silent for too long. The reader keeps this error, whose
            # traceback would keep the whole request in memory.
            error.__traceback__ = error.__context__ = None
        self.writer.transport.abort()

    async def refuse(self, status: int, message: str, param: Any = None, code: Any = None) -> None:
        """Answer with an error in OpenAI's form. `param` is the field that is wrong, if any."""
        error = dict(
            message=message,
            type="server_error" if status >= 500 else "invalid_request_error",
            param=param,
            code=code,
        )
        await self.send({"error": error}, status)

    async def route(self, head: str) -> None:
        """Check the head of a request and call the function that answers it.

        Raises:
            Problem: the request is refused.
        """
        found = re.fullmatch(REQUEST, head)
        demand(found, 400, "this is not an HTTP/1 request with 100 headers at most")
        self.line = unquote(found[1])
        self.headers = headers = email.message_from_string(found[3])
        if found[2] == "0":
            del headers["Expect"]  # HTTP/1.0 has no interim answers
        method, _, path = self.line.partition(" ")
        args = self.server.args
        # 1) Host. A page of another site may reach this address by that site's own name (DNS
        # rebinding), so a server on loopback answers only to names of this host.
        host = headers.get("Host", "localhost").strip()
        demand(
            not re.fullmatch(LOOPBACK, args.host) or re.fullmatch(LOOPBACK, host),
            403,
            f"the Host is {host!r:.100}, and this server answers to localhost: let the proxy in "
            "front send `Host: localhost`, or start the server with --host 0.0.0.0",
        )
        # 2) Path and method.
        routes = ROUTES | {f"/v1/models/{self.server.name}": lambda c: c.send(c.server.model)}
        demand(
            path in routes, 404, f"there is no {path[:100]}: try /v1/chat/completions, /v1/models"
        )
        if method == "OPTIONS" and args.cors:  # a CORS preflight: no key, any success will do
            method = "GET"
            path = "/health"
        methods = ("POST",) if "/completions" in path else ("GET", "HEAD")
        demand(method in methods, 405, f"{path} takes {methods[0]}, not {method}")
        # 3) Key.
        given = headers.get("Authorization", "")[len("Bearer ") :].encode("latin-1")
        demand(
            path in ("/", "/health")
            or not args.api_key
            or secrets.compare_digest(given, args.api_key.encode()),
            401,
            "the API key is missing or wrong",
            None,
            "invalid_api_key",
        )
        await routes[path](self)

    async def complete(self, chat: bool) -> None:
        """Answer a completion, whole or streamed."""
        # 1) Check what is asked for, and whether there is room for it.
        server = self.server
        body = await self.read_json()
        server.busy.add(self)
        self.rest = asyncio.create_task(self.discard_rest())
        demand(not server.stopping, 503, "the server is stopping")
        uid = ("chatcmpl-" if chat else "cmpl-") + secrets.token_hex(12)
        # In a thread of its own, because a long text takes a while to encode.
        fields, requests = await asyncio.to_thread(server.prepare, body, chat, uid)
        waiting = len(server.engine.waiting) + server.inbox.qsize()
        most = server.args.max_queue
        demand(waiting + len(requests) <= most, 429, f"{waiting} wait, --max-queue is {most}")
        # 2) Send what is new after each step.
        stream = fields["stream"]
        key = ("delta" if stream else "message") if chat else "text"
        base = dict(
            id=uid,
            object=OBJECTS[key],
            created=int(time.time()),
            model=server.name,
            system_fingerprint=settings.VERSION,
        )
        jobs = [job for request in requests for job in request.outputs]
        firsts = jobs[:: fields["n"]]  # one for each prompt
        prefix = thought_prefix(
            server.tokenizer, jobs[0], chat and fields["reasoning_format"] != "none"
        )
        skip = 2**31 if fields["hidden"] else 0  # more than there will ever be
        choices = [
            Choice(i, job, key, server, prefix, [0, skip, skip]) for i, job in enumerate(jobs)
        ]
        num_prompt = sum(job.prompt_len for job in firsts)
        server.inbox.put(lambda: server.submit(requests, self))
        ended = False
        while not ended:
            await self.event.wait()
            self.event.clear()
            ended = all(request.finished for request in requests)
            parts = [choice.take_new() for choice in choices if stream]
            num_new = sum(len(job.tokens) for job in jobs if not skip)
            usage = dict(
                prompt_tokens=num_prompt,
                completion_tokens=num_new,
                total_tokens=num_prompt + num_new,
                prompt_tokens_details=dict(cached_tokens=sum(job.cached for job in firsts)),
            )
            if fields["continuous_usage_stats"]:
                base["usage"] = usage
            for part in filter(None, parts):
                await self.send(base | {"choices": [part]}, content_type=EVENTS)
        # 3) Send the whole answer, or the end of the stream with the usage if it was asked for.
        whole = base | dict(choices=[], usage=usage)
        if not stream:  # in a thread, because it may be long
            whole["choices"] = [await asyncio.to_thread(choice.take_new) for choice in choices]
        elif fields["include_usage"]:
            await self.send(whole)
        await self.send("[DONE]" if stream else whole)

    async def send_snapshot(self) -> None:
        """Answer with the engine's state. Pages ask for it again and again; all that ask within a
        tenth of a second share one snapshot."""
        server = self.server
        if time.monotonic() > server.snapshot_time + 0.09:
            server.snapshot_time = time.monotonic()
            server.inbox.put(server.take_snapshot)
        await asyncio.sleep(0.1)
        await self.send(server.snapshot)

    # --- On the wire ------------------------------------------------------------------------------

    async def read_json(self) -> JSON:
        """Read the body, which must be a JSON object."""
        demand(self.headers.get_content_type() == JSON_TYPE, 415, f"the body must be {JSON_TYPE}")
        data = await asyncio.wait_for(self.read_body(), IDLE_S)
        try:  # json.loads would accept NaN and Infinity, which are not JSON; int() raises for both
            return check("body", json.loads(data, parse_constant=int), dict)
        except (ValueError, RecursionError) as error:
            raise Problem(400, f"the body must be a JSON object: {str(error)[:200]}") from None

    async def read_body(self) -> bytes:
        """Read as many bytes as Content-Length says, or a body in chunks. A chunk is its size in
        hex, CRLF, that many bytes, CRLF; the last one has size 0."""
        framing = ",".join(
            value.strip()
            for name in ("Content-Length", "Transfer-Encoding")
            for value in self.headers.get_all(name, [])
        )
        found = re.fullmatch("([0-9]{1,18})|(?i:chunked)", framing)
        demand(found, 411, "send the body with one Content-Length, or in chunks")
        if found[1]:
            self.check_size(int(framing))
        if "Expect" in self.headers:
            self.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if found[1]:
            return await self.reader.readexactly(int(framing))
        data = bytearray()  # with bytes, each += would copy everything read so far
        size = 1
        while size:
            line = await self.reader.readuntil(b"\r\n")
            demand(re.fullmatch(b"[0-9A-Fa-f]{1,8}\r\n", line), 400, "a chunk has no size")
            size = int(line, 16)
            self.check_size(len(data) + size)
            data += await self.reader.readexactly(size)
            await self.reader.readexactly(2)
        return data

    def check_size(self, size: int) -> None:
        """Raise a Problem if a body is longer than --max-body."""
        most = self.server.args.max_body
        demand(size <= most, 413, f"the body has {size} bytes, --max-body is {most}")

    async def discard_rest(self) -> None:
        """Read what follows the request, and discard it, until the client closes its sending half.

        Then the client waits for the answer, or it has left. TCP tells which only when something is
        sent. So the bytes that begin all answers are sent one by one: if the client has left, its
        machine refuses the first one, and sending the second one fails.
        """
        with suppress(OSError):
            while await self.reader.read(2**16):
                pass
        while not (self.content_type or self.writer.is_closing()):
            self.writer.write(self.start.read(1))
            await asyncio.sleep(0.3)

    async def send(
        self, item: JSON | str, status: int = 200, content_type: str = JSON_TYPE
    ) -> None:
        """Send an answer, or one event of a stream (content_type EVENTS).

        The first call sends the head, which alone has a status. Hence an error within a stream is
        one more event.
        """
        text = item if isinstance(item, str) else json.dumps(item)
        if (self.content_type or content_type) == EVENTS:
            text = f"data: {text}\n\n"
        data = text.encode()
        if not self.content_type:
            self.content_type = content_type
            head = (
                f"{status} \r\n{HEADERS}Content-Type: {content_type}\r\n"
                f"X-Request-Id: {self.headers.get('X-Request-Id') or secrets.token_hex(12)}\r\n"
            )
            if content_type != EVENTS:
                head += f"Content-Length: {len(data)}\r\n"
            if status == 429:
                head += "Retry-After: 1\r\n"
            if self.server.args.cors:
                head += (
                    f"Access-Control-Allow-Origin: {self.server.args.cors}\r\n"
                    "Access-Control-Allow-Headers: Authorization, *\r\n"
                )
            self.writer.write(self.start.read() + f"{head}\r\n".encode("latin-1"))
            with suppress(OSError):  # if the log cannot be written, the answer is still sent
                if self.line != "GET /engine" or status != 200:  # a page asks ten times a second
                    print(
                        f"{self.line!r:.200}",
                        "gone" if self.writer.is_closing() else status,
                        file=sys.stderr,
                    )
        if not self.line.startswith("HEAD "):
            self.writer.write(data)
        async with asyncio.timeout(IDLE_S):  # a client that does not read loses its connection
            await self.writer.drain()


ROUTES = {"/": lambda c: c.send(PAGE.read_text("utf-8"), content_type="text/html"),
          "/version": lambda c: c.send({"version": settings.VERSION}),
          # The health checks of proxies read only the status.
          "/health": lambda c: c.send({"status": "stopping"}, 503) if c.server.stopping
                               else c.send({"status": "ok"}),
          "/metrics": lambda c: c.send(metrics(c.server), 200, "text/plain; version=0.0.4"),
          "/engine": Connection.send_snapshot,
          "/v1/models": lambda c: c.send(dict(object="list", data=[c.server.model])),
          "/v1/completions": lambda c: c.complete(chat=False),
          "/v1/chat/completions": lambda c: c.complete(chat=True)}  # fmt: skip


# --- The command line -----------------------------------------------------------------------------


def main(argv: list[str] | None = None) -> int:
    """Run until a signal arrives, and return the exit status."""
    return settings.launch("server.py", argv, parse_args, command, join)


def parse_args(argv: list[str] | None) -> Namespace:
    parser = ArgumentParser(prog="server.py", description="Serve a model over HTTP.")
    settings.add_flags(parser, ServerArgs, speculate="--speculate-ngram")
    return parser.parse_args(argv)


def command(args: Namespace, ranks: Ranks) -> int:
    """Load the model and serve it."""
    # On a CPU, few prompt tokens in a step let others wait less for their next token: the 99th
    # percentile is half as long with 32 as with 512.
    defaults = dict(
        api_key=os.getenv("KILOLM_API_KEY"), small_chunk=32 if ranks.device.type == "cpu" else None
    )
    args = ServerArgs(**defaults | settings.given(ServerArgs, args))
    if "" in (args.host, args.api_key):
        raise ValueError("--host and --api-key (or $KILOLM_API_KEY) must not be empty")
    if not re.fullmatch(r"\*|https?://[\w.:\[\]-]+", args.cors or "*"):
        raise ValueError(f"--cors {args.cors}: must be like http://localhost:3000, or *")
    model, proposer = load_models(args, ranks)
    if ranks.rank:
        return ranks.follow(model)
    engine = make_engine(args, ranks, model, proposer)
    return serve(engine, args)


def serve(engine: Engine, args: ServerArgs) -> int:
    """Serve until SIGTERM or SIGINT, then finish running requests within --shutdown-timeout.

    The model runs in this thread, where it was loaded, and the event loop in another. PyTorch's
    pool of threads belongs to the thread that first used it. In another thread the model would get
    a second pool, and OpenMP, which would see more threads than cores, would put them to sleep
    after each operation: on two cores the bundled model was slower by half.
    """
    say(cache_size(engine))
    server = Server(engine, args)
    reading, writing = os.pipe()

    def watch() -> None:
        """Wait for signals, each of which arrives as one byte."""
        while os.read(reading, 1):
            if server.stopping:
                os._exit(1)  # the second signal ends the server at once
            server.stopping = True

    # Python runs signal handlers in the main thread, between two instructions, so not while that
    # thread waits in a collective for a rank that is stopped. But it writes each signal's number
    # into this pipe at once, and another thread can read it. Python does so only for a signal that
    # has a handler, even an empty one.
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
