"""An HTTP server in front of the scheduler that OpenAI's clients can talk to.

    python server.py                            the bundled model, on http://127.0.0.1:8000
    python server.py --checkpoint DIR --compile --api-key SECRET

This file holds HTTP, the engine's thread and the signals; what the bodies mean is in
openai_api.py. The main thread runs the engine. Each connection has a thread of its own, which reads
a request, puts it into the inbox of the engine's thread, and waits for news. After each step the
engine's thread tells those that have something to send. A slow client delays nobody: its thread
reads the state of its sequences only when the client has taken the previous part, so there is no
queue of tokens.

    client --> Connection.complete --> API.prepare --> inbox --> Server.drive: submit, step, step
    client <-- Connection.send <-- Completion.chunks <-- news <--- Server.wake <----+

The server listens on loopback by default. Its HTTP needs only the standard library. The names in
/metrics are vLLM's, except engine_steps_total and computed_tokens_total. Read: Server.drive,
Connection.complete, Connection.route, serve.
"""

import json
import math
import os
import queue
import re
import secrets
import signal
import socket
import sys
import time
import traceback
from argparse import ArgumentParser, Namespace
from bisect import bisect_right
from collections import Counter, defaultdict, deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from socketserver import TCPServer
from threading import Event, Thread
from typing import Any, BinaryIO
from urllib.parse import unquote

if __name__ == "__main__":  # before PyTorch: Ctrl-C may come while it is imported
    import program

import settings
from checkpoint import suggested
from llm import cache_size, join, load_models, make_engine
from machine import Ranks, launch, say
from openai_api import API, Problem, demand
from scheduler import Engine, Request
from settings import JSON, EngineArgs, SamplingParams, check, setting

IDLE_S = 75  # seconds to wait for a head, for a body, or for a client to read its answer
CLIENTS = 1024  # connections at a time: each one has a thread
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


# --- The server -----------------------------------------------------------------------------------


class Server:
    """The engine, and the connections that wait for it. Only drive() changes the engine's state.

    Attributes:
        inbox: functions that drive() calls in turn, self.step among them; None ends drive().
        waiters: each request in the engine -> the connection that answers it. Only drive() changes
            this and `served`.
        served: statistics of the requests that have ended; see count().
        connections: all open connections.
        busy: connections that are answering a completion. They may finish after a signal.
        stopping: a signal arrived.
        over: the grace period has expired.
        snapshot: the engine's state for the page, as JSON.
        snapshot_time: when a page last caused a snapshot, on time.monotonic's clock.
    """

    def __init__(self, engine: Engine, args: ServerArgs) -> None:
        self.engine = engine
        self.args = args
        name = args.served_model_name or args.checkpoint.resolve().name
        self.api = API(engine, name, SamplingParams(**suggested(args.checkpoint)))
        self.inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.waiters: dict[Request, Connection] = {}
        self.served: dict[str, Counter] = defaultdict(Counter)
        self.connections: set[Connection] = set()
        self.busy: set[Connection] = set()
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
        """End the requests of clients that have left (all, once the grace period is over), then run
        a step."""
        lost = [request for request, c in self.waiters.items() if c.gone or self.over]
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
        woken = {
            self.waiters[each] for each in requests if each.finished or self.waiters[each].stream
        }
        for request in requests:
            if request.finished:
                del self.waiters[request]
                count(self.served, request)
                # A request and its outputs refer to each other. Unless this cycle is broken, they
                # stay in memory until Python collects cycles. The connection has its own list.
                while request.outputs:
                    self.engine.ran.pop(request.outputs.pop(), None)
        for connection in woken:
            connection.news.set()

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

    # --- The listening thread ---------------------------------------------------------------------

    def listen(self) -> None:
        """Accept connections until a signal arrives, then let the running completions finish."""
        port = self.args.port
        listeners = []
        # A name such as localhost has an address in each version of IP. All get the same port.
        kind = 0, socket.SOCK_STREAM, 0, socket.AI_PASSIVE
        for family, *_, address in socket.getaddrinfo(self.args.host, port, *kind):
            listeners.append(Listener(self, family, (address[0], port, *address[2:])))
            host = str(listeners[-1].server_address[0])
            port = listeners[-1].server_address[1]
            Thread(target=listeners[-1].serve_forever, args=[0.1], daemon=True).start()
        host = f"[{host}]" if ":" in host else host
        say(f"serving {self.api.name} on http://{host}:{port}")
        self.port = port
        while not self.stopping:
            time.sleep(0.1)
            self.drop(time.monotonic())
        for listener in listeners:
            listener.shutdown()
            listener.server_close()
        end = time.monotonic() + self.args.shutdown_timeout
        while self.busy and time.monotonic() < end + 1:  # one more second, to send the errors
            self.over = time.monotonic() > end
            time.sleep(0.05)
            self.drop(time.monotonic())
        self.drop(math.inf)

    def drop(self, now: float) -> None:
        """End the connections that are due by now. Where one waits in a read or a write, that call
        fails."""
        for connection in [*self.connections]:
            if connection.due <= now:
                with suppress(OSError):  # it has ended
                    connection.connection.shutdown(socket.SHUT_RDWR)


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
        observed: dict[str, list] = dict(
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
    model = json.dumps(server.api.name, ensure_ascii=False)
    text = ""
    for name, samples in (families | server.served).items():
        text += f"# TYPE vllm:{name} {kinds.get(name.rpartition('_')[2], 'gauge')}\n"
        for key, value in dict(samples).items():
            suffix, _, label = key.partition(",")  # such as "_bucket", 'le="0.5"'
            text += f"vllm:{name}{suffix}{{model_name={model},{label}}} {value}\n"
    return text


# --- HTTP -----------------------------------------------------------------------------------------

# The first line of a request: method and path, a query, the version.
REQUEST = rb"([A-Z]+ [!->@-~]+)(?:\?[!-~]*)? HTTP/1\.[01]\r\n"
# A header, or the end of the headers.
HEADER = rb"([!-9;-~]+:[^\r\n\0]*)?\r\n"
# X-Accel-Buffering keeps nginx from collecting the events of a stream before it sends them on. The
# Content-Security-Policy, with which the page loads nothing from elsewhere, is in page.html itself.
HEADERS = {
    "Connection": "close",
    "Cache-Control": "no-store",
    "Allow": "GET, HEAD, POST",
    "X-Accel-Buffering": "no",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
JSON_TYPE = "application/json"
EVENTS = "text/event-stream"
# All names that end in .localhost mean this host (RFC 6761), with or without a final dot.
LOOPBACK = r"(?i)(([\w-]+\.)*localhost\.?|127[.0-9]+|::1|\[::1\])(:[0-9]+)?"
BUSY = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 0\r\n\r\n"


class Listener(ThreadingHTTPServer):
    """Accepts connections at one address, and starts a thread for each."""

    request_queue_size = 128
    server_bind = TCPServer.server_bind  # HTTPServer's asks a name server for this host's name

    def __init__(self, owner: Server, family: int, address: tuple) -> None:
        self.owner = owner
        self.address_family = family
        self.refused: deque[socket.socket] = deque(maxlen=64)
        super().__init__(address, Connection)

    def get_request(self) -> tuple:
        """Accept a connection. If that fails, no file descriptor is left: wait for one."""
        try:
            return super().get_request()
        except OSError as error:
            say(str(error))
            time.sleep(1)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        """Start a thread, if there are not too many. A refused connection is closed when many
        others have been: to close it before its request has come would lose the answer."""
        if len(self.owner.connections) < CLIENTS:
            super().process_request(request, client_address)
        else:
            self.refused.append(request)
            with suppress(OSError):  # the client has left already
                request.sendall(BUSY)
                request.shutdown(socket.SHUT_WR)


class Head:
    """The headers of a request, for http.server to read, without what a proxy could read
    differently: bare line feeds, folded headers, a space before the colon."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.size = 0

    def readline(self, limit: int) -> bytes:
        line = self.file.readline(limit)
        self.size += len(line)
        demand(self.size <= 2**16, 431, "the headers are over 64 KiB")
        if not line.endswith(b"\n"):
            raise EOFError
        demand(re.fullmatch(HEADER, line), 400, "a header is not `name: value`, CRLF")
        return line


class Connection(BaseHTTPRequestHandler):
    """A connection to one client, in a thread of its own: reads a request and answers it.

    It serves only one request, so a client connects again for the next one, which takes a tenth of
    a millisecond on one machine. In return it is never in doubt where a request, an answer or a
    refused body ends, and HTTP/1.0, which proxies may speak, works as 1.1 does.

    Attributes:
        line: the request's method and path, such as "GET /health".
        content_type: of the answer; "" until its head has been sent.
        due: until when the client is waited for; see Server.drop.
        news: set when the sequences of this connection have made progress.
        stream: whether it wants to know of each step, and not only of the end.
        gone: whether it has stopped waiting for them.
    """

    server: Listener
    rfile: Any
    raw_requestline: bytes
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # or an answer's body could wait for the head's acknowledgement
    line = content_type = command = request_version = ""
    headers = Message()
    stream = gone = False

    def setup(self) -> None:
        super().setup()
        self.owner = self.server.owner
        self.news = Event()
        self.wait_until(IDLE_S)
        self.owner.connections.add(self)

    def finish(self) -> None:
        self.owner.connections.discard(self)
        super().finish()

    def wait_until(self, seconds: float) -> None:
        """Let the client be waited for that long from now on."""
        self.due = time.monotonic() + seconds

    def handle(self) -> None:
        """Read the request and answer it, with an error if need be. Then wait until the client
        closes: if this side closed first while the client still sends, the answer would be lost."""
        with suppress(OSError, EOFError):  # the client has left, or was silent for too long
            try:
                if self.rfile.peek(1).startswith(b"\x16"):  # a TLS hello, which ends no line
                    self.line = "TLS"
                    raise Problem(400, "this server speaks HTTP without TLS: use http://")
                self.handle_one_request()  # calls parse_request and then route
            except Problem as problem:
                self.send(problem.json, problem.status)
            except (OSError, EOFError):
                raise
            except Exception:  # a bug in the server, whose details are not for the client
                traceback.print_exc()
                self.send(Problem(500, "internal error").json, 500)
            finally:
                self.owner.busy.discard(self)
            self.connection.shutdown(socket.SHUT_WR)
            self.wait_until(IDLE_S)
            while self.connection.recv(2**16):
                pass

    def parse_request(self) -> bool:
        """Read the headers, after the first line has been read."""
        if not self.raw_requestline.endswith(b"\n"):
            raise EOFError
        found = re.fullmatch(REQUEST, self.raw_requestline)
        if not found:
            raise Problem(400, "this is not an HTTP/1 request")
        self.line = unquote(found[1].decode())
        file = self.rfile
        self.rfile = Head(file)
        try:
            return super().parse_request()
        finally:
            self.rfile = file

    def send_error(self, code: int, message: str | None = None, explain: Any = None) -> None:
        """Called by http.server where it refuses a request."""
        raise Problem(code, message or self.responses[code][0])

    def handle_expect_100(self) -> bool:
        return True  # read_body sends it, once it is certain that the body is wanted

    def route(self) -> None:
        """Check the head of a request and call the function that answers it.

        Raises:
            Problem: the request is refused.
        """
        headers = self.headers
        method, _, path = self.line.partition(" ")
        args = self.owner.args
        # 1) Host. A page of another site may reach this address by that site's own name (DNS
        # rebinding), so a server on loopback answers only to names of this host.
        hosts = headers.get_all("Host", ["localhost"])
        demand(len(hosts) == 1, 400, "there is more than one Host")
        host = hosts[0].strip()
        demand(
            not re.fullmatch(LOOPBACK, args.host) or re.fullmatch(LOOPBACK, host),
            403,
            f"the Host is {host!r:.100}, and this server answers to localhost: let the proxy in "
            "front send `Host: localhost`, or start the server with --host 0.0.0.0",
        )
        # 2) Path and method.
        routes = ROUTES | {f"/v1/models/{self.owner.api.name}": lambda c: c.send(c.owner.api.model)}
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
        routes[path](self)

    do_GET = do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = do_TRACE = route

    # --- What is answered -------------------------------------------------------------------------

    def complete(self, chat: bool) -> None:
        """Answer a completion, whole or streamed."""
        # 1) Check what is asked for, and whether there is room for it.
        owner = self.owner
        body = self.read_json()
        owner.busy.add(self)
        demand(not owner.stopping, 503, "the server is stopping")
        completion = owner.api.prepare(body, chat)
        requests = completion.requests
        waiting = len(owner.engine.waiting) + owner.inbox.qsize()
        most = owner.args.max_queue
        demand(waiting + len(requests) <= most, 429, f"{waiting} wait, --max-queue is {most}")
        # 2) Send what is new after each step.
        self.stream = completion.stream
        owner.inbox.put(lambda: owner.submit(requests, self))
        try:
            finished = False
            while not finished:
                self.wait_for_news()
                finished = completion.finished
                for chunk in completion.chunks() if self.stream else ():
                    self.send(chunk, content_type=EVENTS)
        finally:
            self.gone = True
        # 3) Send the whole answer, or the end of the stream.
        if completion.fields["include_usage"] or not self.stream:
            self.send(completion.whole())
        if self.stream:
            self.send("[DONE]")

    def wait_for_news(self) -> None:
        """Wait until the engine has made progress. What the client sends meanwhile is discarded.

        Raises:
            ConnectionError: the client has left.
            Problem: the server has been told to end.
        """
        while not self.news.wait(0.3):
            with suppress(BlockingIOError):  # the client waits
                if not self.connection.recv(2**16, socket.MSG_DONTWAIT):
                    self.log("gone")
                    raise ConnectionError
        self.news.clear()
        demand(not self.owner.over, 503, "the server is stopping")

    def send_snapshot(self) -> None:
        """Answer with the engine's state. Pages ask for it again and again; all that ask within a
        tenth of a second share one snapshot."""
        owner = self.owner
        if time.monotonic() > owner.snapshot_time + 0.09:
            owner.snapshot_time = time.monotonic()
            owner.inbox.put(owner.take_snapshot)
        time.sleep(0.1)
        self.send(owner.snapshot)

    def send_page(self) -> None:
        demand(PAGE.is_file(), 404, "page.html is missing")
        self.send(PAGE.read_text("utf-8"), content_type="text/html")

    # --- On the wire ------------------------------------------------------------------------------

    def read_json(self) -> JSON:
        """Read the body, which must be a JSON object."""
        demand(self.headers.get_content_type() == JSON_TYPE, 415, f"the body must be {JSON_TYPE}")
        self.wait_until(IDLE_S)
        data = self.read_body()
        self.wait_until(math.inf)
        try:  # json.loads would accept NaN and Infinity, which are not JSON; int() raises for both
            return check("body", json.loads(data, parse_constant=int), dict)
        except (ValueError, RecursionError) as error:
            raise Problem(400, f"the body must be a JSON object: {str(error)[:200]}") from None

    def read_body(self) -> bytes | bytearray:
        """Read as many bytes as Content-Length says, or a body in chunks. A chunk is its size in
        hex, CRLF, that many bytes, CRLF; the last one has size 0."""
        framing = ",".join(
            value.strip()
            for name in ("Content-Length", "Transfer-Encoding")
            for value in self.headers.get_all(name, [])
        )
        found = re.fullmatch("([0-9]{1,18})|(?i:chunked)", framing)
        if not found:
            raise Problem(411, "send the body with one Content-Length, or in chunks")
        if found[1]:
            self.check_size(int(framing))
        if "Expect" in self.headers and self.request_version != "HTTP/1.0":
            self.wfile.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if found[1]:
            return self.read(int(framing))
        data = bytearray()  # with bytes, each += would copy everything read so far
        size = 1
        while size:
            line = self.rfile.readline(11)
            demand(re.fullmatch(b"[0-9A-Fa-f]{1,8}\r\n", line), 400, "a chunk has no size")
            size = int(line, 16)
            self.check_size(len(data) + size)
            data += self.read(size)
            demand(self.read(2) == b"\r\n", 400, "a chunk has another size than it says")
        return data

    def read(self, size: int) -> bytes:
        """Read exactly so many bytes. Raises EOFError."""
        data = self.rfile.read(size)
        if len(data) < size:
            raise EOFError
        return data

    def check_size(self, size: int) -> None:
        """Raise a Problem if a body is longer than --max-body."""
        most = self.owner.args.max_body
        demand(size <= most, 413, f"the body has {size} bytes, --max-body is {most}")

    def send(self, item: JSON | str, status: int = 200, content_type: str = JSON_TYPE) -> None:
        """Send an answer, or one event of a stream (content_type EVENTS).

        The first call sends the head, which alone has a status. Hence an error within a stream is
        one more event.
        """
        text = item if isinstance(item, str) else json.dumps(item)
        if (self.content_type or content_type) == EVENTS:
            text = f"data: {text}\n\n"
        data = text.encode()
        self.wait_until(IDLE_S)  # a client that does not read loses its connection
        if not self.content_type:
            self.content_type = content_type
            self.send_response_only(status)
            headers: JSON = HEADERS | {
                "Content-Type": content_type,
                "X-Request-Id": self.headers.get("X-Request-Id") or secrets.token_hex(12),
            }
            if content_type != EVENTS:
                headers["Content-Length"] = len(data)
            if status in (429, 503):
                headers["Retry-After"] = 1
            if self.owner.args.cors:
                headers["Access-Control-Allow-Origin"] = self.owner.args.cors
                headers["Access-Control-Allow-Headers"] = "Authorization, *"
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.log(status)
        if self.command != "HEAD":
            self.wfile.write(data)
        self.wait_until(math.inf)

    def log(self, status: int | str) -> None:
        with suppress(OSError):  # if the log cannot be written, the answer is still sent
            if self.line != "GET /engine" or status != 200:  # a page asks ten times a second
                # In one piece, as other threads write here too.
                print(f"{self.line!r:.200} {status}\n", end="", file=sys.stderr)


ROUTES = {"/": Connection.send_page,
          "/version": lambda c: c.send({"version": settings.VERSION}),
          # The health checks of proxies read only the status.
          "/health": lambda c: c.send({"status": "stopping"}, 503) if c.owner.stopping
                               else c.send({"status": "ok"}),
          "/metrics": lambda c: c.send(metrics(c.owner), 200, "text/plain; version=0.0.4"),
          "/engine": Connection.send_snapshot,
          "/v1/models": lambda c: c.send(dict(object="list", data=[c.owner.api.model])),
          "/v1/completions": lambda c: c.complete(chat=False),
          "/v1/chat/completions": lambda c: c.complete(chat=True)}  # fmt: skip


# --- The command line -----------------------------------------------------------------------------


def main(argv: list[str] | None = None) -> int:
    """Run until a signal arrives, and return the exit status."""
    return launch("server.py", argv, parse_args, command, join)


def parse_args(argv: list[str] | None) -> Namespace:
    parser = ArgumentParser(prog="server.py", description="Serve a model over HTTP.")
    settings.add_flags(parser, ServerArgs, speculate="--speculate-ngram")
    return parser.parse_args(argv)


def command(flags: Namespace, ranks: Ranks) -> int:
    """Load the model and serve it."""
    # On a CPU, few prompt tokens in a step let others wait less for their next token: the 99th
    # percentile is half as long with 32 as with 512.
    defaults: JSON = dict(
        api_key=os.getenv("KILOLM_API_KEY"), small_chunk=32 if ranks.device.type == "cpu" else None
    )
    args = ServerArgs(**defaults | settings.given(ServerArgs, flags))
    if "" in (args.host, args.api_key):
        raise ValueError("--host and --api-key (or $KILOLM_API_KEY) must not be empty")
    if not re.fullmatch(r"\*|https?://[\w.:\[\]-]+", args.cors or "*"):
        raise ValueError(f"--cors {args.cors}: must be like http://localhost:3000, or *")
    model, proposer = load_models(args, ranks)
    if ranks.rank:
        from tp import follow

        return follow(model)
    engine = make_engine(args, ranks, model, proposer)
    return serve(engine, args)


def serve(engine: Engine, args: ServerArgs) -> int:
    """Serve until SIGTERM or SIGINT, then finish running requests within --shutdown-timeout.

    The model runs in this thread, where it was loaded, and the connections in others. PyTorch's
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
        listening = pool.submit(server.listen)
        listening.add_done_callback(lambda _: server.inbox.put(None))
        server.drive()
        listening.result()
    return 0


if __name__ == "__main__":
    program.run(main)
