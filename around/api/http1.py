"""HTTP/1 over sockets: listen, read one request, send its answer.

    listeners = listen_at("localhost", 8000)
    client, _ = listeners[0].accept()
    exchange = Exchange(client, max_body=2**22, cors=None)
    exchange.read_head()            exchange.request is now "POST /v1/completions"
    body = exchange.read_json()
    exchange.send({"answer": 42})   or, as often as there is news: send(event, content_type=EVENTS)

It is strict: what a proxy in front of the server could read differently is refused. Python's own
http.server accepts such requests. This file knows neither the engine nor what is answered; its
errors are openai_api's. Read: Exchange.read_head, Exchange.read_body, Exchange.send.
"""

import errno
import json
import re
import secrets
import socket
import time
from contextlib import suppress
from email.message import Message
from http import HTTPStatus
from urllib.parse import unquote

from around.api.answers import Problem, demand
from around.machine import say
from around.settings import JSON, check

# The first line of a request: method and path, a query (which is ignored), the version. Below,
# [!->@-~] is any visible character but "?", and [!-9;-~] any but ":".
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


class Exchange:
    """A connection to one client, which serves only one request.

    So a client connects again for the next one, which takes a tenth of a millisecond on one
    machine. In return it is never in doubt where a request, an answer or a refused body ends, and
    HTTP/1.0, which proxies may speak, works as 1.1 does.

    Attributes:
        reader: what the client sends, as a file.
        request: its method and path, such as "GET /health"; "" until they have been read.
        content_type: the answer's; "" until the answer has begun.
        sent_at: when something was last sent, on time.monotonic's clock.
    """

    request = ""
    content_type = ""
    sent_at = 0.0

    def __init__(self, client: socket.socket, max_body: int, cors: str | None) -> None:
        """
        Args:
            max_body: the most bytes of a body.
            cors: an origin whose pages may read the answer; None: only the server's own pages may.
        """
        self.socket = client
        self.max_body = max_body
        self.cors = cors
        self.reader = client.makefile("rb")
        self.headers = Message()  # finds a name in any case, and can hold it several times

    # --- The request ------------------------------------------------------------------------------

    def read_head(self) -> None:
        """Read the first line and the headers."""
        if self.reader.peek(1).startswith(b"\x16"):  # a TLS hello, in which no line would end
            self.request = "TLS"
            raise Problem(400, "this server speaks HTTP without TLS: use http://")
        found = re.fullmatch(REQUEST, self.read_line())
        if not found:
            raise Problem(400, "this is not an HTTP/1 request")
        request, version = found.groups()
        self.request = unquote(request)
        size = 0
        for line in iter(self.read_line, "\r\n"):
            found = re.fullmatch(HEADER, line)
            if not found:
                raise Problem(400, "a header is not `name: value`, CRLF")
            self.headers[found[1]] = found[2].strip(" \t")  # keeps an earlier one of the same name
            size += len(line)
            fits = size < 2**16 and len(self.headers) < 100
            demand(fits, 431, "the headers are over 64 KiB, or 100 in number")
        if version == "HTTP/1.0":
            del self.headers["Expect"]  # in 1.0 nothing can be said before the answer

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
        # There may be only one of these headers, so that no proxy can go by another one than this
        # file. Two of them, even two equal ones, are joined by a comma, and that is refused below.
        lengths = self.headers.get_all("Content-Length", [])
        framing = ",".join(lengths + self.headers.get_all("Transfer-Encoding", [])).lower()
        if framing != "chunked":
            is_length = re.fullmatch("[0-9]{1,18}", framing)
            demand(is_length, 411, "send the body with one Content-Length, or in chunks")
            self.check_size(int(framing))
        if "Expect" in self.headers:  # the client waits for this before it sends the body
            self.socket.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        return self.read_chunks() if framing == "chunked" else self.read(int(framing))

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

    def check_size(self, size: int) -> None:
        """Raise a Problem if a body is longer than --max-body."""
        most = self.max_body
        demand(size <= most, 413, f"the body has {size} bytes, --max-body is {most}")

    def check_client(self) -> None:
        """Raise ConnectionError if the client has left. One that has closed only its sending half
        looks the same. What a client has sent meanwhile is discarded."""
        seconds = self.socket.gettimeout()
        self.socket.settimeout(0)
        with suppress(BlockingIOError):  # nothing has come: the client waits
            if not self.socket.recv(2**16):
                self.log("gone")
                raise ConnectionError
        self.socket.settimeout(seconds)

    # --- The answer -------------------------------------------------------------------------------

    def send(self, item: JSON | str, status: int = 200, content_type: str = JSON_TYPE) -> None:
        """Send an answer, or one event of a stream (content_type EVENTS); "" is sent as a comment,
        which clients skip.

        The first call also sends the head, which alone has a status and a type. So an error after
        the first event of a stream can only be sent as one more event.
        """
        is_first = not self.content_type
        if is_first:
            self.content_type = content_type
        text = item if isinstance(item, str) else json.dumps(item)
        if self.content_type == EVENTS:
            text = f"data: {text}\n\n" if text else ":\n\n"
        body = text.encode()
        head = self.head(status, len(body)) if is_first else b""
        self.socket.sendall(head if self.request.startswith("HEAD ") else head + body)
        self.sent_at = time.monotonic()

    def head(self, status: int, size: int) -> bytes:
        """Log the status, and make the status line and the headers of an answer.

        Args:
            size: bytes of the body; a stream's answer does not name it.
        """
        self.log(status)
        uid = self.headers.get("X-Request-Id") or secrets.token_hex(12)
        head = (
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\n{HEADERS}"
            f"Content-Type: {self.content_type}\nX-Request-Id: {uid}\n"
        )
        if self.content_type != EVENTS:
            head += f"Content-Length: {size}\n"
        if status in (429, 503):
            head += "Retry-After: 1\n"
        if self.cors:
            head += (
                f"Access-Control-Allow-Origin: {self.cors}\n"
                "Access-Control-Allow-Headers: Authorization, *\n"
            )
        return f"{head}\n".replace("\n", "\r\n").encode("latin-1")

    def log(self, status: int | str) -> None:
        with suppress(OSError):  # if the log cannot be written, the answer is still sent
            say(f"{self.request!r:.200} {status}")


# --- Addresses ------------------------------------------------------------------------------------


def listen_at(host: str, port: int) -> list[socket.socket]:
    """Listen at each address of a host: a name such as localhost has one in each version of IP. All
    get the same port; 0 means any free one. Raises OSError if the port is taken."""
    listeners = []
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    for family, *_, address in dict.fromkeys(found):  # some hosts name an address twice
        ip, _, *more = address  # in IPv6, two numbers follow the port
        try:
            listener = socket.create_server(
                (ip, port, *more),
                family=family,
                # With --host :: this listens on IPv4 too. True raises ValueError without IPv6.
                dualstack_ipv6=family == socket.AF_INET6 and socket.has_dualstack_ipv6(),
            )
        except OSError as error:
            # A name can have an IPv6 address where IPv6 is switched off.
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                raise
            unavailable = error
        else:
            listeners.append(listener)
            port = listener.getsockname()[1]
    if not listeners:
        raise unavailable
    return listeners
