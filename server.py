"""An HTTP server in front of the scheduler that OpenAI's clients can talk to.

    python server.py                            the bundled model, on http://127.0.0.1:8000
    python server.py --checkpoint DIR --compile --api-key SECRET

This file holds HTTP, the engine's thread and the signals; what the bodies mean is in
openai_api.py. There are three kinds of threads:

    - The engine's, the main one, runs the engine, and after each step wakes the connections that
      have something to send.
    - The listening one accepts clients.
    - Each connection's reads a request, puts it into the inbox of the engine's thread, and waits
      for news. It reads the state of its sequences only when the client has taken the previous
      part. So there is no queue of tokens, and a slow client delays nobody.

    client --> Connection.complete --> API.prepare --> inbox --> Server.drive: submit, step, step
    client <-- Connection.send <-- Completion.parts <-- news <--- Server.wake <----+

The server listens on loopback by default. Its HTTP needs only the standard library. Read:
Server.drive, Connection.complete, Connection.route, serve.
"""

import errno
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
from http import HTTPStatus
from threading import Event, Thread, active_count
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
MAX_THREADS = 1028  # one for each of 1,024 connections, and four that serve them all
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
        inbox: what drive() calls next, functions without arguments; None ends it.
        incoming: requests on their way to the engine.
        owners: each request in the engine -> the connection that answers it. Only drive() changes
            this and `metrics`.
        busy: the connections that are answering a completion. After a signal they may finish it. A
            connection leaves this set when it has answered, and when its client has left.
        refused: the sockets of the last clients that were too many; see refuse.
        stopping: a signal has arrived, or the engine has died.
        over: running completions have had the time that they get after a signal.
        snapshot: the engine's state for the page, as JSON.
        snapshot_time: when a page last caused a snapshot, on time.monotonic's clock.
    """

    def __init__(self, engine: Engine, args: ServerArgs, listeners: list[socket.socket]) -> None:
        """Args: listeners: where clients arrive; see listen_at. They wait for listen()."""
        self.engine = engine
        self.args = args
        name = args.served_model_name or args.checkpoint.resolve().name
        defaults = SamplingParams(**suggested(args.checkpoint))
        self.api = API(engine, name, defaults, args.tool_format)
        self.metrics = Metrics(engine, name)
        self.listeners = listeners
        self.inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.incoming: set[Request] = set()
        self.owners: dict[Request, Connection] = {}
        self.busy: set[Connection] = set()
        self.refused: deque[socket.socket] = deque(maxlen=64)
        self.stopping = False
        self.over = False
        self.snapshot_time = 0.0
        self.take_snapshot()

    # --- The engine's thread ----------------------------------------------------------------------

    def drive(self) -> None:
        """Call what is in the inbox, until None comes. A step is put there whenever the inbox is
        empty and requests are left in the engine."""
        for task in iter(self.inbox.get, None):
            try:
                task()
                if self.engine.queue and self.inbox.empty():
                    self.inbox.put(self.step)
            except Exception as error:
                self.recover(error)

    def step(self) -> None:
        """End the requests of connections that no longer wait for them, then run a step."""
        unwanted = [request for request, owner in self.owners.items() if owner not in self.busy]
        for request in unwanted:
            self.engine.abort(request)
        self.wake(unwanted + self.engine.step())

    def submit(self, requests: list[Request], connection: "Connection") -> None:
        """Put the requests of a connection into the engine's queue."""
        self.incoming.difference_update(requests)
        for request in requests:
            self.owners[request] = connection
            self.engine.submit(request)

    def wake(self, requests: list[Request]) -> None:
        """Wake the connections whose requests have made progress. One that streams is woken for
        each step, another one only when a request has finished."""
        for request in requests:
            connection = self.owners[request]
            if request.finished:
                self.forget(request)
            if request.finished or connection.stream:
                connection.news.set()

    def forget(self, request: Request) -> None:
        """Count a request that has finished, and drop it.

        It and its outputs refer to each other. Unless this cycle is broken, they stay in memory
        until Python collects cycles. The connection has a list of the outputs of its own.
        """
        self.metrics.count(request)
        for job in request.outputs:
            self.engine.ran.pop(job, None)
        request.outputs.clear()
        del self.owners[request]

    def take_snapshot(self) -> None:
        self.snapshot = self.metrics.snapshot()

    def recover(self, error: Exception) -> None:
        """End all requests after an error, so that the engine can go on with the next ones. Without
        another rank it cannot go on: then raise the error again."""
        self.engine.reset()
        self.wake([*self.owners])
        if isinstance(error, ConnectionError):  # a rank is lost
            raise error
        traceback.print_exc()

    # --- The listening thread ---------------------------------------------------------------------

    def listen(self) -> None:
        """Accept connections until a signal arrives, then let the running completions finish within
        --shutdown-timeout, and end drive()."""
        host, port = self.listeners[-1].getsockname()[:2]
        host = f"[{host}]" if ":" in host else host  # IPv6
        say(f"serving {self.api.name} on http://{host}:{port}")
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
        self.inbox.put(None)

    def accept(self, listener: socket.socket) -> None:
        """Start a thread for the next client, if there are not too many."""
        client, _ = listener.accept()
        if active_count() < MAX_THREADS:
            Thread(target=Connection(client, self).handle, daemon=True).start()
        else:
            self.refuse(client)

    def refuse(self, client: socket.socket) -> None:
        """Answer a client that is one too many. If its socket were closed before its request has
        come, it would lose the answer. So the last sockets are kept, and the oldest is closed."""
        self.refused.append(client)
        with suppress(OSError):  # the client has left already
            client.sendall(BUSY)
            client.shutdown(socket.SHUT_WR)


def listen_at(host: str, port: int) -> list[socket.socket]:
    """Listen at each address of a host: a name such as localhost has one in each version of IP. All
    get the same port; 0 means any free one. Raises OSError if the port is taken."""
    listeners = []
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    for family, *_, address in dict.fromkeys(found):  # some hosts name an address twice
        try:
            listener = socket.create_server(
                (address[0], port, *address[2:]),  # in IPv6, two numbers follow the port
                family=family,
                dualstack_ipv6=family == socket.AF_INET6,  # with --host ::, IPv4 too
            )
            listeners.append(listener)
            port = listener.getsockname()[1]
        except OSError as error:
            # A name can have an IPv6 address where IPv6 is switched off.
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                raise
            unavailable = error
    if not listeners:
        raise unavailable
    return listeners


# --- HTTP -----------------------------------------------------------------------------------------

# The first line of a request: method and path, a query (which is ignored), the version.
REQUEST = r"([A-Z]+ [!->@-~]+)(?:\?[!-~]*)? (HTTP/1\.[01])\r\n"
# A header. What a proxy could read differently is refused: bare line feeds, folded headers, a space
# before the colon.
HEADER = r"([!-9;-~]+):([^\r\n\0]*)\r\n"
# The headers of each answer. X-Accel-Buffering keeps nginx from collecting the events of a stream
# before it sends them on. The Content-Security-Policy, with which the page loads nothing from
# elsewhere, is in page.html itself.
HEADERS = """\
Connection: close
Cache-Control: no-store
Allow: GET, HEAD, POST
X-Accel-Buffering: no
X-Content-Type-Options: nosniff
X-Frame-Options: DENY
"""
JSON_TYPE = "application/json"
EVENTS = "text/event-stream"
METRICS_TYPE = "text/plain; version=0.0.4"
# All names that end in .localhost mean this host (RFC 6761), with or without a final dot.
LOOPBACK = r"(?i)(([\w-]+\.)*localhost\.?|127[.0-9]+|::1|\[::1\])(:[0-9]+)?"
BUSY = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 0\r\n\r\n"


class Connection:
    """A connection to one client, in a thread of its own: reads a request and answers it.

    It serves only one request, so a client connects again for the next one, which takes a tenth of
    a millisecond on one machine. In return it is never in doubt where a request, an answer or a
    refused body ends, and HTTP/1.0, which proxies may speak, works as 1.1 does.

    Attributes:
        reader: what the client sends, as a file.
        request: its method and path, such as "GET /health"; "" until they have been read.
        version: that of HTTP, as the request says.
        content_type: of the answer, which has begun once this is not "".
        stream: whether it wants to know of each step, and not only of the end.
        news: set when the sequences of this connection have made progress.
    """

    request = ""
    version = ""
    content_type = ""
    stream = False

    def __init__(self, client: socket.socket, server: Server) -> None:
        self.socket = client
        self.server = server
        self.reader = client.makefile("rb")
        self.headers = Message()
        self.news = Event()

    def handle(self) -> None:
        """Answer, then wait until the client closes: if this side closed first while the client
        still sends, the answer would be lost."""
        # An OSError means that the client has left, or was silent for too long.
        with self.socket, self.reader, suppress(OSError):
            self.socket.settimeout(IDLE_S)  # of each read and write
            # Do not hold a small event back until the one before is acknowledged.
            self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.answer()
            self.socket.shutdown(socket.SHUT_WR)
            while self.socket.recv(2**16):
                pass

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

    def read_head(self) -> None:
        """Read the first line and the headers."""
        if self.reader.peek(1).startswith(b"\x16"):  # a TLS hello, which ends no line
            self.request = "TLS"
            raise Problem(400, "this server speaks HTTP without TLS: use http://")
        found = re.fullmatch(REQUEST, self.read_line())
        if not found:
            raise Problem(400, "this is not an HTTP/1 request")
        self.request = unquote(found[1])
        self.version = found[2]
        size = 0
        for line in iter(self.read_line, "\r\n"):
            found = re.fullmatch(HEADER, line)
            if not found:
                raise Problem(400, "a header is not `name: value`, CRLF")
            self.headers[found[1]] = found[2].strip()  # keeps an earlier one of the same name
            size += len(line)
            fits = size < 2**16 and len(self.headers) < 100
            demand(fits, 431, "the headers are over 64 KiB, or 100 in number")

    def route(self) -> None:
        """Check the head of the request, and call the function that answers it."""
        self.check_host()
        method, _, path = self.request.partition(" ")
        name = self.server.api.name
        routes = ROUTES | {f"/v1/models/{name}": lambda c: c.send(c.server.api.model)}
        demand(path in routes, 404, f"there is no {path:.100}: there are {', '.join(routes)}")
        if method == "OPTIONS" and self.server.args.cors:
            self.send({})  # to a browser that asks whether it may: it needs no key, only a success
            return
        methods = ["POST"] if path.endswith("/completions") else ["GET", "HEAD"]
        demand(method in methods, 405, f"{path} takes {methods[0]}, not {method}")
        key = self.server.args.api_key
        if key and path not in ("/", "/health"):
            # Header values are bytes, one for each character.
            sent = self.headers.get("Authorization", "")[len("Bearer ") :].encode("latin-1")
            is_right = secrets.compare_digest(sent, key.encode())
            demand(is_right, 401, "the API key is missing or wrong", None, "invalid_api_key")
        routes[path](self)

    # --- What is answered -------------------------------------------------------------------------

    def complete(self, chat: bool) -> None:
        """Answer a completion, whole or streamed."""
        server = self.server
        body = self.read_json()
        # In this order: a server that stops waits for the busy ones, so none can slip through.
        server.busy.add(self)
        demand(not server.stopping, 503, "the server is stopping")
        completion = server.api.prepare(body, chat)
        engine = server.engine
        num_requests = len(engine.queue) + len(server.incoming) + len(completion.requests)
        limit = server.args.max_queue
        demand(
            num_requests <= engine.max_num_seqs + limit,
            429,
            f"{len(engine.waiting)} wait, --max-queue is {limit}",
        )
        self.stream = completion.stream
        server.incoming.update(completion.requests)
        server.inbox.put(lambda: server.submit(completion.requests, self))
        for part in completion.parts(self.wait_for_news):
            self.send(part, content_type=EVENTS if self.stream else JSON_TYPE)
        if self.stream:
            self.send("[DONE]")

    def wait_for_news(self) -> None:
        """Wait until the engine has made progress.

        Raises:
            ConnectionError: the client has left.
            Problem: the server is stopping, and the grace period is over.
        """
        while not (self.news.wait(0.3) or self.server.over):
            self.check_client()
        self.news.clear()
        demand(not self.server.over, 503, "the server is stopping")

    def send_snapshot(self) -> None:
        """Answer with the engine's state. Pages ask for it again and again; all that ask within a
        tenth of a second share one snapshot."""
        server = self.server
        if time.monotonic() > server.snapshot_time + 0.1:
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

    # --- The answer on the wire -------------------------------------------------------------------

    def send(self, item: JSON | str, status: int = 200, content_type: str = JSON_TYPE) -> None:
        """Send an answer, or one event of a stream (content_type EVENTS).

        The first call sends the head, which alone has a status and a type. Hence an error within a
        stream is one more event.
        """
        is_first = not self.content_type
        if is_first:
            self.content_type = content_type
        text = item if isinstance(item, str) else json.dumps(item)
        if self.content_type == EVENTS:
            text = f"data: {text}\n\n"
        body = text.encode()
        head = self.head(status, len(body)) if is_first else b""
        self.socket.sendall(head if self.request.startswith("HEAD ") else head + body)

    def head(self, status: int, size: int) -> bytes:
        """Make the status line and the headers of an answer.

        Args:
            size: bytes of the body; a stream's answer does not name it.
        """
        self.log(status)
        cors = self.server.args.cors
        uid = self.headers.get("X-Request-Id") or secrets.token_hex(12)
        head = (
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\n{HEADERS}"
            f"Content-Type: {self.content_type}\nX-Request-Id: {uid}\n"
        )
        if self.content_type != EVENTS:
            head += f"Content-Length: {size}\n"
        if status in (429, 503):
            head += "Retry-After: 1\n"
        if cors:
            head += (
                f"Access-Control-Allow-Origin: {cors}\n"
                "Access-Control-Allow-Headers: Authorization, *\n"
            )
        return f"{head}\n".replace("\n", "\r\n").encode("latin-1")

    def log(self, status: int | str) -> None:
        if self.request != "GET /engine" or status != 200:  # a page asks ten times a second
            with suppress(OSError):  # if the log cannot be written, the answer is still sent
                say(f"{self.request!r:.200} {status}\n", end="")  # whole: other threads write too

    # --- The body of a request --------------------------------------------------------------------

    def read_json(self) -> JSON:
        """Read the body, which must be a JSON object."""
        is_json = self.headers.get_content_type() == JSON_TYPE
        demand(is_json, 415, f"send the header Content-Type: {JSON_TYPE}")
        data = self.read_body()
        try:
            # NaN and Infinity are not JSON: int raises ValueError for them.
            return check("body", json.loads(data, parse_constant=int), dict)
        except (ValueError, RecursionError) as error:
            raise Problem(400, f"the body must be a JSON object: {str(error)[:200]}") from None

    def read_body(self) -> bytes | bytearray:
        """Read as many bytes as Content-Length says, or a body in chunks."""
        # There must be one of these two headers, and only once. Otherwise a proxy could find the
        # end of the body elsewhere.
        lengths = self.headers.get_all("Content-Length", [])
        framing = ",".join(lengths + self.headers.get_all("Transfer-Encoding", []))
        if framing.lower() == "chunked":
            self.send_continue()
            return self.read_chunks()
        is_length = re.fullmatch("[0-9]{1,18}", framing)
        demand(is_length, 411, "send the body with one Content-Length, or in chunks")
        self.check_size(int(framing))
        self.send_continue()
        return self.read(int(framing))

    def read_chunks(self) -> bytearray:
        """Read a body in chunks. A chunk is its size in hex, CRLF, that many bytes, CRLF; the last
        one has size 0."""
        data = bytearray()  # with bytes, each += would copy everything read so far
        size = 1
        while size:
            line = self.read_line()
            demand(re.fullmatch("[0-9A-Fa-f]{1,8}\r\n", line), 400, "a chunk has no size")
            size = int(line, 16)
            self.check_size(len(data) + size)
            data += self.read(size)
            demand(self.read(2) == b"\r\n", 400, "a chunk has another size than it says")
        return data

    def read_line(self) -> str:
        """Read a line. Raises ConnectionError if the client leaves before its end."""
        line = self.reader.readline(2**16)
        demand(len(line) < 2**16, 431, "a line has over 64 KiB")
        if not line.endswith(b"\n"):
            raise ConnectionError
        return line.decode("latin-1")

    def read(self, size: int) -> bytes:
        """Read exactly `size` bytes. Raises ConnectionError if the client leaves before."""
        data = self.reader.read(size)
        if len(data) < size:
            raise ConnectionError
        return data

    def send_continue(self) -> None:
        """Tell a client that waits for it to send its body. HTTP/1.0 has no such message."""
        if "Expect" in self.headers and self.version != "HTTP/1.0":
            self.socket.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")

    # --- Checks -----------------------------------------------------------------------------------

    def check_host(self) -> None:
        """Refuse a page of another site, which may reach this address by that site's own name (DNS
        rebinding): a server on loopback answers only to names of this host."""
        host, *others = self.headers.get_all("Host", ["localhost"])
        demand(not others, 400, "there is more than one Host")
        demand(
            re.fullmatch(LOOPBACK, host) or not re.fullmatch(LOOPBACK, self.server.args.host),
            403,
            f"the Host is {host!r:.100}, and this server answers to localhost: let the proxy in "
            "front send `Host: localhost`, or start the server with --host 0.0.0.0",
        )

    def check_size(self, size: int) -> None:
        """Raise a Problem if a body is longer than --max-body."""
        most = self.server.args.max_body
        demand(size <= most, 413, f"the body has {size} bytes, --max-body is {most}")

    def check_client(self) -> None:
        """Raise ConnectionError if the client has left. What it has sent meanwhile is discarded."""
        self.socket.settimeout(0)
        with suppress(BlockingIOError):  # nothing has come: the client waits
            if not self.socket.recv(2**16):
                self.log("gone")
                raise ConnectionError
        self.socket.settimeout(IDLE_S)


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
    if args.cors and not re.fullmatch(r"\*|https?://[\w.:\[\]-]+", args.cors):
        raise ValueError(f"--cors {args.cors}: must be like http://localhost:3000, or *")
    # First, as loading takes long, and the port may be taken. One rank serves.
    listeners = [] if ranks.rank else listen_at(args.host, args.port)
    model, proposer = load_models(args, ranks)
    if ranks.rank:
        from tp import follow

        return follow(model)
    engine = make_engine(args, ranks, model, proposer)
    return serve(engine, args, listeners)


def serve(engine: Engine, args: ServerArgs, listeners: list[socket.socket]) -> int:
    """Serve until SIGTERM or SIGINT, then finish running requests within --shutdown-timeout.

    The model runs in this thread, where it was loaded, and the connections in others. PyTorch's
    pool of threads belongs to the thread that first used it. In another thread the model would get
    a second pool, and OpenMP, which would see more threads than cores, would put them to sleep
    after each operation: on two cores the bundled model was slower by half.
    """
    say(cache_size(engine))
    server = Server(engine, args, listeners)
    watch_signals(server)
    listening = Thread(target=server.listen)
    listening.start()
    try:
        server.drive()
    finally:
        server.stopping = True  # also after an error: clients would wait for ever
        listening.join()
    return 0


def watch_signals(server: Server) -> None:
    """Stop the server at the first signal, and end it at once at the second.

    Python runs signal handlers in the main thread, between two instructions, so not while that
    thread waits in a collective for a rank that is stopped. But it writes each signal's number into
    a pipe at once, and another thread can read it. Python does so only for a signal that has a
    handler, even an empty one.
    """
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)

    def watch() -> None:
        while os.read(reading, 1):
            if server.stopping:
                os._exit(1)
            server.stopping = True

    Thread(target=watch, daemon=True).start()


if __name__ == "__main__":
    program.run(main)
