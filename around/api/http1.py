"""HTTP for one request: what http.server lacks for bodies of JSON and for streams of events.

    class Answering(Exchange):
        def handle(self):
            self.read_head()            self.asked is now "POST /v1/completions"
            body = self.read_json()
            self.send({"answer": 42})   or self.stream = True, and one such call for each event

http.server reads the head, and is less strict than HTTP. That is safe, because a connection serves
one request: whatever follows, nobody reads it as another. This file knows neither the engine nor
what is answered; its errors are those of answers.py. Read: Exchange.read_head, Exchange.read_body,
Exchange.send.
"""

import json
import re
import socket
import time
from contextlib import suppress
from email.message import Message
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from io import BufferedReader, BytesIO
from typing import Any

from around.api.answers import Problem, demand
from around.settings import JSON, blame, check

# The headers of each answer. X-Accel-Buffering keeps nginx from collecting the events of a stream
# before it sends them on. Retry-After counts for a 429 and a 503. The Content-Security-Policy, with
# which the page loads nothing from elsewhere, is in page.html itself.
HEADERS = """\
Connection: close
Cache-Control: no-store
Retry-After: 1
X-Accel-Buffering: no
X-Content-Type-Options: nosniff
X-Frame-Options: DENY
"""
JSON_TYPE = "application/json"
EVENTS = "text/event-stream"
HEAD_SECONDS = 10  # in which a client must send the head
BODY_RATE = 2**17  # for so many bytes of its body, it has one second more


class Timed(socket.SocketIO):
    """What a client sends until `deadline`, on time.monotonic's clock. The socket's own timeout
    holds for each read: a client that sends byte after byte would keep its thread."""

    deadline: float

    def readinto(self, buffer: Any) -> int | None:
        seconds = self.deadline - time.monotonic()
        if seconds <= 0:
            raise TimeoutError("timed out")
        self._sock.settimeout(seconds)  # type: ignore
        return super().readinto(buffer)


class Exchange(BaseHTTPRequestHandler):
    """A connection to one client, which serves only one request.

    So a client connects again for the next one, which takes a tenth of a millisecond on one
    machine. In return it is never in doubt where a request, an answer or a refused body ends, and
    HTTP/1.0, which proxies may speak, works as 1.1 does.

    Attributes:
        server: what accepted the client; `server.args` has max_body.
        asked: method and path, such as "GET /health"; "" until they have been read.
        stream: whether the answer is a stream of events.
        status: of the answer; 0 until its head is sent.
        timed: reads the socket until a deadline.
    """

    server: Any
    protocol_version = "HTTP/1.1"  # so parse_request answers `Expect: 100-continue`
    timeout = 75  # seconds that a client may take to read a part of an answer
    disable_nagle_algorithm = True  # or a small event would wait until the last one is acknowledged
    asked = ""
    stream = False
    status = 0
    headers = Message()

    # --- The request ------------------------------------------------------------------------------

    def read_head(self) -> None:
        """Read the first line and the headers. Raises ConnectionError if the client leaves before
        their end, and TimeoutError if it takes too long."""
        self.timed = Timed(self.connection, "r")
        self.timed.deadline = time.monotonic() + HEAD_SECONDS
        # An attribute, as a reader that is dropped closes what it reads.
        reader = self.reader = BufferedReader(self.timed)
        if reader.peek()[:1] == b"\x16":  # a TLS hello, which has no lines
            raise Problem(400, "this server speaks HTTP without TLS: use http://")
        head = line = b""
        while line not in (b"\r\n", b"\n"):
            line = reader.readline(2**16)
            if not line:
                raise ConnectionError
            head += line
            demand(len(head) < 2**16, 431, "the headers are over 64 KiB")
        # By itself, parse_request takes up to 6 MB, with which it can be busy for seconds.
        self.rfile = BytesIO(head)
        self.raw_requestline = self.rfile.readline()
        demand(self.parse_request(), 400, "this is no HTTP/1 request, or has over 100 headers")
        self.rfile = reader
        # Proxies may ask for a whole URL.
        path = re.sub("^https?://[^/]*", "", self.path).partition("?")[0]
        self.asked = f"{self.command} {path}"

    def send_error(self, *args: Any) -> None:
        """parse_request calls this before it returns False. The answer is read_head's."""

    def read_json(self) -> JSON:
        """Read the body, which must be a JSON object."""
        demand(self.headers.get_content_type() == JSON_TYPE, 415, f"send Content-Type: {JSON_TYPE}")
        try:
            # NaN and Infinity are not JSON: int raises ValueError for them.
            return check("body", json.loads(self.read_body(), parse_constant=int), dict)
        except (ValueError, RecursionError) as error:
            raise Problem(400, f"the body must be a JSON object: {error!s:.200}") from None

    def read_body(self) -> bytes | bytearray:
        """Read as many bytes as Content-Length says, or a body in chunks. If the client leaves
        earlier, what has come is no whole JSON object."""
        length = self.headers.get("Content-Length", "")
        framing = self.headers.get("Transfer-Encoding", length).strip().lower()
        if framing == "chunked":
            return self.read_chunks()
        demand(re.fullmatch("[0-9]{1,18}", framing), 411, "send a Content-Length, or chunks")
        self.check_size(int(framing))
        self.timed.deadline += int(framing) / BODY_RATE
        return self.rfile.read(int(framing))

    def read_chunks(self) -> bytearray:
        """Read a body in chunks. A chunk is its size in hex, CRLF, that many bytes, CRLF; the last
        one has size 0."""
        data = bytearray()  # with bytes, each += would copy everything read so far
        size = 1
        while size:
            line = self.rfile.readline(2**12)  # a semicolon begins an extension, which is ignored
            demand(re.match(rb"[0-9A-Fa-f]{1,8}\s*(;.*)?\r\n", line), 400, "a chunk has no size")
            size = int(line.partition(b";")[0], 16)
            self.check_size(len(data) + size)
            self.timed.deadline += size / BODY_RATE
            data += self.rfile.read(size + 2)[:-2]
        return data

    def check_size(self, size: int) -> None:
        """Raise a Problem if a body is longer than --max-body."""
        most = self.server.args.max_body
        demand(size <= most, 413, f"the body has {size} bytes, --max-body is {most}")

    def check_client(self) -> None:
        """Raise ConnectionError if the client has left. Then what it sends ends. As in uvicorn, one
        that closes its sending half alone counts as one that has left. What it has sent meanwhile
        is discarded."""
        self.connection.settimeout(0)  # or recv would wait, even with MSG_DONTWAIT
        with suppress(BlockingIOError):  # nothing has come: the client waits
            if not self.connection.recv(2**16):
                raise ConnectionError("the client has left")
        self.connection.settimeout(self.timeout)

    # --- The answer -------------------------------------------------------------------------------

    def send(self, item: JSON | str, status: int = 200, content_type: str = JSON_TYPE) -> None:
        """Send an answer, or one event of a stream.

        The first call also sends the head, which alone has a status and a type. So an error after
        the first event of a stream can only be sent as one more event.
        """
        text = item if isinstance(item, str) else json.dumps(item)
        # An error before the first event is no event, but an answer with a status of its own.
        if self.stream and 200 in (self.status, status):
            text = f"data: {text}\n\n"
            content_type = EVENTS
        data = text.encode()
        if not self.status:
            self.status = status
            self.connection.settimeout(self.timeout)
            head = (
                f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\n{HEADERS}"
                f"Content-Type: {content_type}\n"
            )
            if content_type != EVENTS:
                head += f"Content-Length: {len(data)}\n"
            data = f"{head}\n".replace("\n", "\r\n").encode() + data
        self.wfile.write(data)


def listen_at(host: str, port: int) -> socket.socket:
    """Listen at a host; port 0 means any free one. Raises InputError if the port is taken.

    A name, such as localhost, is looked up in IPv4, as in vLLM. A host with colons is of IPv6; at
    :: both versions reach it.
    """
    is_v6 = ":" in host
    with blame(f"take another --host or --port than {host}:{port}"):
        return socket.create_server(
            (host, port), family=socket.AF_INET6 if is_v6 else socket.AF_INET, dualstack_ipv6=is_v6
        )
