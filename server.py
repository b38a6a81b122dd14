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
    client <-- Connection.send <-- Completion.parts <-- news <--- Server.wake <----+

The server listens on loopback by default. Its HTTP needs only the standard library. Read:
Server.drive, Connection.complete, Connection.route, serve.
"""

import errno
import io
import json
import os
import queue
import re
import secrets
import select
import signal
import socket
import time
import traceback
from argparse import ArgumentParser, Namespace
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from email.message import Message
from http.client import parse_headers
from http.server import BaseHTTPRequestHandler
from threading import Event, Thread
from typing import Any
from urllib.parse import unquote

if __name__ == "__main__":  # before PyTorch: Ctrl-C may come while it is imported
    import program

import settings
from checkpoint import suggested
from function_calls import FORMS
from llm import cache_size, join, load_models, make_engine
from machine import Ranks, launch, say
from metrics import Metrics
from openai_api import API, Problem, demand
from scheduler import Engine, Request
from settings import JSON, EngineArgs, SamplingParams, check, setting

IDLE_S = 75  # seconds that a client may be silent, or take to read a part of an answer
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
    tool_format: str = setting(
        "auto",
        "how the model writes function calls; auto: as its chat template does",
        choices=("auto", *FORMS),
    )


# --- The server -----------------------------------------------------------------------------------


class Server:
    """The engine, and the connections that wait for it. Only drive() changes the engine's state.

    Attributes:
        inbox: functions that drive() calls in turn, self.step among them; None ends drive().
        waiters: each request in the engine -> the connection that answers it. Only drive() changes
            this and `metrics`.
        listeners: the sockets at which clients arrive.
        connections: all open connections.
        refused: the sockets of the last clients that were too many.
        busy: connections that are answering a completion. They may finish after a signal.
        stopping: a signal arrived.
        over: the grace period has expired.
        snapshot: the engine's state for the page, as JSON.
        snapshot_time: when a page last caused a snapshot, on time.monotonic's clock.
    """

    def __init__(self, engine: Engine, args: ServerArgs) -> None:
        """Listen; clients wait until listen() is called. Raises OSError if the port is taken."""
        self.engine = engine
        self.args = args
        name = args.served_model_name or args.checkpoint.resolve().name
        defaults = SamplingParams(**suggested(args.checkpoint))
        self.api = API(engine, name, defaults, args.tool_format)
        self.metrics = Metrics(engine, name)
        self.inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.waiters: dict[Request, Connection] = {}
        self.listeners = listen_at(args.host, args.port)
        self.connections: set[Connection] = set()
        self.refused: deque[socket.socket] = deque(maxlen=64)
        self.busy: set[Connection] = set()
        self.stopping = False
        self.over = False
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
        unwanted = [
            request
            for request, connection in self.waiters.items()
            if connection not in self.busy or self.over
        ]
        for request in unwanted:
            self.engine.abort(request)
        self.wake(unwanted + self.engine.step())

    def submit(self, requests: list[Request], connection: "Connection") -> None:
        """Put the requests of one connection into the engine's queue."""
        for request in requests:
            self.waiters[request] = connection
            self.engine.submit(request)

    def wake(self, requests: list[Request]) -> None:
        """Wake the connections whose requests have made progress, and count finished requests."""
        for request in requests:
            connection = self.waiters[request]
            if request.finished:
                del self.waiters[request]
                self.metrics.count(request)
                # A request and its outputs refer to each other. Unless this cycle is broken, they
                # stay in memory until Python collects cycles. The connection has its own list.
                while request.outputs:
                    self.engine.ran.pop(request.outputs.pop(), None)
            if request.finished or connection.stream:
                connection.news.set()

    def take_snapshot(self) -> None:
        self.snapshot = self.metrics.snapshot()

    # --- The listening thread ---------------------------------------------------------------------

    def listen(self) -> None:
        """Accept connections until a signal arrives, then let the running completions finish."""
        host, port = self.listeners[-1].getsockname()[:2]
        host = f"[{host}]" if ":" in host else host
        say(f"serving {self.api.name} on http://{host}:{port}")
        self.port = port
        while not self.stopping:
            for listener in select.select(self.listeners, [], [], 0.1)[0]:
                try:
                    self.accept(listener)
                except (OSError, RuntimeError) as error:  # no descriptor or no thread is left
                    say(str(error))
                    time.sleep(1)
        for listener in self.listeners:
            listener.close()
        end = time.monotonic() + self.args.shutdown_timeout
        while self.busy and time.monotonic() < end + 1:  # one more second, to send the errors
            self.over = time.monotonic() > end
            time.sleep(0.05)
        for connection in [*self.connections]:
            with suppress(OSError):  # it has ended
                connection.connection.shutdown(socket.SHUT_RDWR)
        self.inbox.put(None)

    def accept(self, listener: socket.socket) -> None:
        """Start a thread for the next client, if there are not too many. A refused connection is
        closed when many others have been: to close it before its request has come would lose the
        answer."""
        client, address = listener.accept()
        if len(self.connections) < CLIENTS:
            Thread(target=Connection, args=[client, address, self], daemon=True).start()
        else:
            self.refused.append(client)
            with suppress(OSError):  # the client has left already
                client.sendall(BUSY)
                client.shutdown(socket.SHUT_WR)


def listen_at(host: str, port: int) -> list[socket.socket]:
    """Listen at each address of a host: a name such as localhost has one in each version of IP. All
    get the same port; 0 means any free one. Raises OSError if the port is taken."""
    listeners = []
    absent = OSError(f"{host} has no address")
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    for family, *_, address in dict.fromkeys(found):  # some hosts name an address twice
        try:
            listener = socket.create_server(
                (address[0], port, *address[2:]),
                family=family,
                backlog=128,
                dualstack_ipv6=family == socket.AF_INET6,  # with --host ::, IPv4 too
            )
        except OSError as error:
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                raise
            absent = error  # a name can have an IPv6 address where IPv6 is switched off
            continue
        listeners.append(listener)
        port = listener.getsockname()[1]
    if not listeners:
        raise absent
    return listeners


# --- HTTP -----------------------------------------------------------------------------------------

# The first line of a request: method and path, a query, the version.
REQUEST = rb"([A-Z]+ [!->@-~]+)(?:\?[!-~]*)? (HTTP/1\.[01])\r\n"
# A header. http.client would also take what a proxy could read differently: bare line feeds, folded
# headers, a space before the colon.
HEADER = rb"[!-9;-~]+:[^\r\n\0]*\r\n"
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
METRICS_TYPE = "text/plain; version=0.0.4"
# All names that end in .localhost mean this host (RFC 6761), with or without a final dot.
LOOPBACK = r"(?i)(([\w-]+\.)*localhost\.?|127[.0-9]+|::1|\[::1\])(:[0-9]+)?"
BUSY = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 0\r\n\r\n"


class Connection(BaseHTTPRequestHandler):
    """A connection to one client, in a thread of its own: reads a request and answers it.

    It serves only one request, so a client connects again for the next one, which takes a tenth of
    a millisecond on one machine. In return it is never in doubt where a request, an answer or a
    refused body ends, and HTTP/1.0, which proxies may speak, works as 1.1 does.

    Attributes:
        line: the request's method and path, such as "GET /health".
        content_type: of the answer; "" until its head has been sent.
        news: set when the sequences of this connection have made progress.
        stream: whether it wants to know of each step, and not only of the end.
    """

    server: Server  # type: ignore[assignment]  # socketserver passes on what accept() gives
    rfile: Any
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # or an answer's body could wait for the head's acknowledgement
    line = content_type = request_version = ""
    headers = Message()
    stream = False

    def handle(self) -> None:
        """Answer, then wait until the client closes: if this side closed first while the client
        still sends, the answer would be lost."""
        self.news = Event()
        self.connection.settimeout(IDLE_S)  # of each read and write
        self.server.connections.add(self)
        try:
            with self.connection, suppress(OSError):  # the client left, or was silent for too long
                self.answer()
                self.connection.shutdown(socket.SHUT_WR)
                while self.connection.recv(2**16):
                    pass
        finally:
            self.server.connections.discard(self)

    def answer(self) -> None:
        """Read the request and answer it, with an error if need be."""
        try:
            self.read_head()
            self.route()
        except Problem as problem:
            self.send(problem.json, problem.status)
        except (ConnectionError, TimeoutError):  # the client's end
            raise
        except Exception:  # a bug in the server, whose details are not for the client
            traceback.print_exc()
            self.send(Problem(500, "internal error").json, 500)
        finally:
            self.server.busy.discard(self)

    def route(self) -> None:
        """Check the head of a request and call the function that answers it.

        Raises:
            Problem: the request is refused.
        """
        args = self.server.args
        # 1) Host. A page of another site may reach this address by that site's own name (DNS
        # rebinding), so a server on loopback answers only to names of this host.
        hosts = self.headers.get_all("Host", ["localhost"])
        demand(len(hosts) == 1, 400, "there is more than one Host")
        host = hosts[0].strip()
        demand(
            re.fullmatch(LOOPBACK, host) or not re.fullmatch(LOOPBACK, args.host),
            403,
            f"the Host is {host!r:.100}, and this server answers to localhost: let the proxy in "
            "front send `Host: localhost`, or start the server with --host 0.0.0.0",
        )
        # 2) Path and method.
        method, _, path = self.line.partition(" ")
        routes = ROUTES | {
            f"/v1/models/{self.server.api.name}": lambda c: c.send(c.server.api.model)
        }
        demand(
            path in routes, 404, f"there is no {path[:100]}: try /v1/chat/completions, /v1/models"
        )
        if method == "OPTIONS" and args.cors:  # a CORS preflight: no key, any success will do
            self.send({})
            return
        takes = "POST" if path.endswith("/completions") else "GET"
        demand(method.replace("HEAD", "GET") == takes, 405, f"{path} takes {takes}, not {method}")
        # 3) Key.
        if args.api_key and path not in ("/", "/health"):
            key = self.headers.get("Authorization", "")[len("Bearer ") :].encode("latin-1")
            is_right = secrets.compare_digest(key, args.api_key.encode())
            demand(is_right, 401, "the API key is missing or wrong", None, "invalid_api_key")
        routes[path](self)

    # --- What is answered -------------------------------------------------------------------------

    def complete(self, chat: bool) -> None:
        """Answer a completion, whole or streamed."""
        server = self.server
        body = self.read_json()
        server.busy.add(self)
        demand(not server.stopping, 503, "the server is stopping")
        completion = server.api.prepare(body, chat)
        engine = server.engine
        waiting = len(engine.waiting) + server.inbox.qsize()
        free = engine.max_num_seqs - len(engine.running)
        limit = server.args.max_queue
        demand(
            waiting + len(completion.requests) - free <= limit,
            429,
            f"{waiting} wait, --max-queue is {limit}",
        )
        self.stream = completion.stream
        server.inbox.put(lambda: server.submit(completion.requests, self))
        for part in completion.parts(self.wait_for_news):
            self.send(part, content_type=EVENTS if self.stream else JSON_TYPE)
        if self.stream:
            self.send("[DONE]")

    def wait_for_news(self) -> None:
        """Wait until the engine has made progress. What the client sends meanwhile is discarded.

        Raises:
            ConnectionError: the client has left.
            Problem: the server is stopping, and the grace period is over.
        """
        while not self.news.wait(0.3):
            self.connection.settimeout(0)
            with suppress(BlockingIOError):  # the client waits
                if not self.connection.recv(2**16):
                    self.log("gone")
                    raise ConnectionError
            self.connection.settimeout(IDLE_S)
        self.news.clear()
        demand(not self.server.over, 503, "the server is stopping")

    def send_snapshot(self) -> None:
        """Answer with the engine's state. Pages ask for it again and again; all that ask within a
        tenth of a second share one snapshot."""
        server = self.server
        if time.monotonic() > server.snapshot_time + 0.09:
            server.snapshot_time = time.monotonic()
            server.inbox.put(server.take_snapshot)
        time.sleep(0.1)
        self.send(server.snapshot)

    def send_page(self) -> None:
        demand(PAGE.is_file(), 404, "page.html is missing")
        self.send(PAGE.read_text("utf-8"), content_type="text/html")

    def send_health(self) -> None:
        """The health checks of proxies read only the status."""
        if self.server.stopping:
            self.send({"status": "stopping"}, 503)
        else:
            self.send({"status": "ok"})

    # --- On the wire ------------------------------------------------------------------------------

    def read_head(self) -> None:
        """Read the first line and the headers."""
        if self.rfile.peek(1).startswith(b"\x16"):  # a TLS hello, which ends no line
            self.line = "TLS"
            raise Problem(400, "this server speaks HTTP without TLS: use http://")
        found = re.fullmatch(REQUEST, self.read_line())
        if not found:
            raise Problem(400, "this is not an HTTP/1 request")
        self.line = unquote(found[1].decode())
        self.request_version = found[2].decode()
        head = b""
        for line in iter(self.read_line, b"\r\n"):
            demand(re.fullmatch(HEADER, line), 400, "a header is not `name: value`, CRLF")
            head += line
            fits = len(head) < 2**16 and head.count(b"\n") < 100
            demand(fits, 431, "the headers are over 64 KiB, or 100 in number")
        self.headers = parse_headers(io.BytesIO(head))

    def read_json(self) -> JSON:
        """Read the body, which must be a JSON object."""
        demand(self.headers.get_content_type() == JSON_TYPE, 415, f"the body must be {JSON_TYPE}")
        data = self.read_body()
        try:  # json.loads would accept NaN and Infinity, which are not JSON; int() raises for both
            return check("body", json.loads(data, parse_constant=int), dict)
        except (ValueError, RecursionError) as error:
            raise Problem(400, f"the body must be a JSON object: {str(error)[:200]}") from None

    def read_body(self) -> bytes | bytearray:
        """Read as many bytes as Content-Length says, or a body in chunks."""
        headers = self.headers
        lengths = headers.get_all("Content-Length", [])
        framing = ",".join(lengths + headers.get_all("Transfer-Encoding", [])).strip()
        is_chunked = framing.lower() == "chunked"
        demand(
            is_chunked or re.fullmatch("[0-9]{1,18}", framing),
            411,
            "send the body with one Content-Length, or in chunks",
        )
        size = 0 if is_chunked else int(framing)
        self.check_size(size)
        if "Expect" in headers and self.request_version != "HTTP/1.0":
            self.wfile.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        return self.read_chunks() if is_chunked else self.read(size)

    def read_chunks(self) -> bytearray:
        """Read a body in chunks. A chunk is its size in hex, CRLF, that many bytes, CRLF; the last
        one has size 0."""
        data = bytearray()  # with bytes, each += would copy everything read so far
        size = 1
        while size:
            line = self.read_line()
            demand(re.fullmatch(b"[0-9A-Fa-f]{1,8}\r\n", line), 400, "a chunk has no size")
            size = int(line, 16)
            self.check_size(len(data) + size)
            data += self.read(size)
            demand(self.read(2) == b"\r\n", 400, "a chunk has another size than it says")
        return data

    def read_line(self) -> bytes:
        """Read a line. Raises ConnectionError if the client leaves before its end."""
        line = self.rfile.readline(2**16)
        demand(len(line) < 2**16, 431, "a line has over 64 KiB")
        if not line.endswith(b"\n"):
            raise ConnectionError
        return line

    def read(self, size: int) -> bytes:
        """Read exactly so many bytes. Raises ConnectionError if the client leaves before."""
        data = self.rfile.read(size)
        if len(data) < size:
            raise ConnectionError
        return data

    def check_size(self, size: int) -> None:
        """Raise a Problem if a body is longer than --max-body."""
        most = self.server.args.max_body
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
        if not self.content_type:
            self.content_type = content_type
            self.send_head(status, len(data))
        if not self.line.startswith("HEAD "):
            self.wfile.write(data)

    def send_head(self, status: int, size: int) -> None:
        """Send the status and the headers of an answer, whose body has so many bytes unless it is a
        stream."""
        headers: JSON = HEADERS | {
            "Content-Type": self.content_type,
            "X-Request-Id": self.headers.get("X-Request-Id") or secrets.token_hex(12),
        }
        if self.content_type != EVENTS:
            headers["Content-Length"] = size
        if status in (429, 503):
            headers["Retry-After"] = 1
        if self.server.args.cors:
            headers["Access-Control-Allow-Origin"] = self.server.args.cors
            headers["Access-Control-Allow-Headers"] = "Authorization, *"
        self.send_response_only(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.log(status)

    def log(self, status: int | str) -> None:
        if self.line != "GET /engine" or status != 200:  # a page asks ten times a second
            with suppress(OSError):  # if the log cannot be written, the answer is still sent
                say(f"{self.line!r:.200} {status}\n", end="")  # whole: other threads write too


ROUTES = {
    "/": Connection.send_page,
    "/version": lambda c: c.send({"version": settings.VERSION}),
    "/health": Connection.send_health,
    "/metrics": lambda c: c.send(c.server.metrics.text(), content_type=METRICS_TYPE),
    "/engine": Connection.send_snapshot,
    "/v1/models": lambda c: c.send({"object": "list", "data": [c.server.api.model]}),
    "/v1/completions": lambda c: c.complete(chat=False),
    "/v1/chat/completions": lambda c: c.complete(chat=True),
}


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
    listening = Thread(target=server.listen)
    listening.start()
    try:
        server.drive()
    finally:
        server.stopping = True  # also after an error: clients would wait for ever
        listening.join()
    return 0


if __name__ == "__main__":
    program.run(main)
