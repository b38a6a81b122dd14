"""docs/production.md is run: its lines, and the files under deploy/ that it names, in the real
programs."""

import json
import os
import re
import shlex
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from http.client import HTTPException, HTTPSConnection
from itertools import count
from pathlib import Path

import pytest
import yaml
from conftest import ROOT, SHAKESPEARE, program
from serving import COMPLETIONS, LONG, SHORT, Client, Process, until
from test_many_machines import CONFIGS, NGINX, Proxy, beginning
from test_readme import shell_lines, succeeds

from server import parse_args

DEPLOY = ROOT / "deploy"
LINES = shell_lines((ROOT / "docs" / "production.md").read_text())
KEY, BEARER = {"KILOLM_API_KEY": "secret"}, {"Authorization": "Bearer secret"}


def line_with(text):
    (line,) = [line for line in LINES if text in line]
    return line


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


@contextmanager
def running(folder, *words):
    """Run a program that serves."""
    with (folder / "other.log").open("w") as log:
        process = subprocess.Popen([*map(str, words)], cwd=folder, stdout=log, stderr=log)
    try:
        yield process
    finally:
        process.terminate()  # nginx ends its workers
        process.wait(60)


def test_lines_are_understood():
    """Parse each shell line of the page, and look for the files that it names. Catches: a quote
    that does not close; a file that has moved."""
    for line in LINES:
        subprocess.run(["bash", "-nc", line], check=True)
        for file in re.findall(r"\bdeploy/\w[\w.]+", line):
            assert (ROOT / file).is_file(), line


def seconds(text):
    return int(re.fullmatch(r"(\d+)s?", text)[1])


def test_files_fit_the_server():
    """Compare the unit, the compose file and the Dockerfile with the server and each other.
    Catches: an option that is gone; a manager that kills a server whose streams may still run; a
    key in an image; a first process that ignores SIGTERM."""
    unit = dict(re.findall(r"^(\w+)=(.*)$", (DEPLOY / "kilolm.service").read_text(), re.MULTILINE))
    service = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["kilolm"]
    words = unit["ExecStart"].split()
    assert words[:2] == ["/opt/kilolm/.venv/bin/python", "server.py"]
    for options, patience in (
        (words[2:], unit["TimeoutStopSec"]),
        (shlex.split(service["command"]), service["stop_grace_period"]),
    ):
        assert parse_args(options).shutdown_timeout < seconds(patience)
    for name in (".gitignore", "deploy/Dockerfile.dockerignore"):
        assert "deploy/.env" in (ROOT / name).read_text().splitlines()
    first = re.search("^ENTRYPOINT (.*)", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)[1]
    assert json.loads(first)[:4] == ["tini", "--", "python", "server.py"]
    assert (DEPLOY / service["build"]["context"]).resolve() == ROOT
    assert (ROOT / service["build"]["dockerfile"]).is_file()


@pytest.mark.nightly
def test_health_check_and_unit(tmp_path):
    """Run the compose file's health check beside a server and beside none, and let systemd read the
    unit. Catches: a container that never becomes healthy; a setting that systemd does not know."""
    check = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["kilolm"]
    check = check["healthcheck"]["test"].replace("python ", f"{sys.executable} ", 1)
    with Process(tmp_path) as server:
        subprocess.run(check.replace("8000", str(server.port)), shell=True, check=True)
    assert subprocess.run(check.replace("8000", str(server.port)), shell=True).returncode
    unit = (DEPLOY / "kilolm.service").read_text()  # it reports programs that are not there
    here = unit.replace("/opt/kilolm/.venv/bin/python", sys.executable).replace("/opt/kilolm", "/")
    (tmp_path / "kilolm.service").write_text(here)
    run = subprocess.run([program("systemd-analyze"), "verify", tmp_path / "kilolm.service"],
                         capture_output=True, text=True)  # fmt: skip
    assert (run.returncode, run.stderr) == (0, "")


@pytest.mark.nightly
def test_container_ends_early(tmp_path):
    """Start the server under tini as a container does, as process 1, and stop it while Python
    imports. Catches: a container that waits for its time to run out, and is killed."""
    words = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", program("tini"), "--"]
    if subprocess.run([*words, "true"], capture_output=True).returncode:
        pytest.skip("needs the right to make namespaces")
    code = "import time; print('ready', flush=True); time.sleep(60); import server"
    words += [sys.executable, "-c", code]
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
        os.kill(int(children), signal.SIGTERM)
        assert process.wait(30) == 143


class OverTLS(Client):
    """A client whose address is 127.0.0.2."""

    def __init__(self, port, trusted):
        self.port = port
        self.context = ssl.create_default_context(cafile=trusted)

    def open(self):
        return HTTPSConnection("localhost", self.port, timeout=60, context=self.context,
                               source_address=("127.0.0.2", 0))  # fmt: skip


@pytest.mark.nightly
def test_tls(tmp_path):
    """Stream through nginx with TLS, from a server with a key. Catches: a stream that arrives as a
    whole; a Host that the server refuses; a log that names the proxy, or what a client claims to
    be, in place of the client."""
    make = "req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -keyout key -out cert"
    names = ["-addext", "subjectAltName=DNS:localhost"]
    succeeds([program("openssl"), *make.split(), *names], cwd=tmp_path)
    port, config = free_port(), (DEPLOY / "nginx-tls.conf").read_text()
    with Process(tmp_path, **KEY) as server:
        for old, new in (
            ("listen 443 ", f"listen 127.0.0.1:{port} "),
            ("127.0.0.1:8000", f"127.0.0.1:{server.port}"),
            ("/etc/ssl/certs/llm.example.com.pem", tmp_path / "cert"),
            ("/etc/ssl/private/llm.example.com.key", tmp_path / "key"),
        ):
            assert config.count(old) == 1
            config = config.replace(old, str(new))
        (tmp_path / "config").write_text(config)
        (tmp_path / "nginx.conf").write_text(NGINX.format(tmp_path))
        with running(tmp_path, program("nginx"), "-p", tmp_path, "-c", "nginx.conf"):
            client = OverTLS(port, tmp_path / "cert")
            until(client.accepts)
            client.get("/v1/models").fails(401, code="invalid_api_key")
            body = json.dumps({**LONG, "stream": True})
            connection = client.open()
            claims = {"Host": "llm.example.com", "X-Forwarded-For": "1.2.3.4"}
            headers = {"Content-Type": "application/json", **claims, **BEARER}
            connection.request("POST", COMPLETIONS, body, headers)
            response = connection.getresponse()
            assert response.readline().startswith(b"data: ")
            assert '"status": 200' not in server.log.read_text()  # it is not over
            assert response.read().endswith(b"data: [DONE]\n\n")
            line = until(lambda: re.search('{.*"status": 200.*}', server.log.read_text()))[0]
    assert (
        json.loads(line)["client"] == "127.0.0.2" and json.loads(line)["completion_tokens"] == 900
    )


@pytest.mark.nightly
def test_prometheus(tmp_path):
    """Let Prometheus read its files, scrape a server with a key, and compute a rule's latency.
    Catches: a key that is not sent; metrics that Prometheus refuses; a rule about none of them."""
    (tmp_path / "key").write_text("secret\n")
    port, config = free_port(), (DEPLOY / "prometheus.yml").read_text()
    with Process(tmp_path, **KEY) as server:
        assert server.post(COMPLETIONS, SHORT, **BEARER).status == 200
        for old, new in (("/etc/prometheus/kilolm.key", tmp_path / "key"),
                         ("8000", server.port), ("15s", "1s")):  # fmt: skip
            assert config.count(old) == 1
            config = config.replace(old, str(new))
        (tmp_path / "prometheus.yml").write_text(config)
        rules = (DEPLOY / "alerts.yml").read_text()
        (tmp_path / "alerts.yml").write_text(rules)
        succeeds([program("promtool"), "check", "config", "prometheus.yml"], cwd=tmp_path)
        words = [program("prometheus"), "--config.file=prometheus.yml",
                 f"--web.listen-address=127.0.0.1:{port}", "--storage.tsdb.path=data"]  # fmt: skip
        with running(tmp_path, *words):
            page = Client()
            page.port = port
            until(page.accepts)

            def scraped():
                answer = page.get("/api/v1/query?query=vllm:generation_tokens_total")
                return answer.status == 200 and answer.json["data"]["result"]

            (sample,) = until(scraped)
            assert sample["value"][1] == "6" and sample["metric"]["model_name"] == "shakespeare"
            for name in re.findall(r"vllm:\w+|up(?=\{)", rules):
                assert page.get(f"/api/v1/query?query={name}").json["data"]["result"], name


@pytest.mark.nightly
def test_the_log(tmp_path, monkeypatch):
    """Ask as two users, wrongly, and as one who leaves; then run the page's lines over the log, and
    its request for scores. Catches: a line that adds up nothing, or breaks at a line of another
    kind; an error that is not found."""
    with Process(tmp_path, **KEY) as server:
        for user, more in (("ann", {}), ("ann", {}), ("bob", {"stream": True}), ("eve", {"n": 0})):
            server.post(COMPLETIONS, {**SHORT, "user": user, **more}, **BEARER)
        server.get("/metrics").fails(401, code="invalid_api_key")
        (tmp_path / "scores.sh").write_text(line_with("curl").replace("8000", str(server.port)))
        monkeypatch.setenv("KILOLM_API_KEY", "secret")
        scores = json.loads(succeeds(["bash", "scores.sh"], cwd=tmp_path))["choices"][0]["logprobs"]
        assert scores["token_logprobs"][0] is None and all(scores["token_logprobs"][1:])
    program("jq")
    used = json.loads(succeeds(["bash", "-c", line_with("jq")], cwd=tmp_path))
    assert {*used} == {"", "ann", "bob"} and used["ann"] == 2 * used["bob"]
    wrong = succeeds(["bash", "-c", line_with("grep")], cwd=tmp_path).splitlines()
    assert [json.loads(line)["status"] for line in wrong] == [400, 401]


@pytest.mark.slow
def test_batch_goes_on(tmp_path):
    """Kill deploy/batch.py in the middle of 100 prompts, cut its last line in two, and start it
    again. Catches: an answer that is lost, or is there twice; half a line that no reader takes; a
    line end of Unicode in a prompt that shifts the numbers; a wrong line that stops all others."""
    prompts = [{"prompt": f"{i}\u2028ROMEO:\n"} for i in range(99)]
    prompts.append({"messages": [{"role": "user", "content": "Who goes there?"}]})
    too_long = {"prompt": "what " * 5000}
    file, answers = tmp_path / "prompts.jsonl", tmp_path / "results.jsonl"
    lines = [json.dumps(each, ensure_ascii=False) for each in [*prompts, too_long]]
    file.write_text("\n".join([*lines, "", "{"]))
    line = line_with("batch.py").replace("checkpoints/shakespeare", str(SHAKESPEARE))
    line = line.replace("python deploy", f"{sys.executable} {DEPLOY}")
    process = subprocess.Popen(shlex.split(line), cwd=tmp_path)
    until(lambda: answers.is_file() and answers.read_bytes().count(b"\n") > 2)
    process.kill()
    process.wait()
    before = answers.read_bytes()
    kept = before.splitlines(keepends=True)[:-1]
    assert len(kept) < 99
    answers.write_bytes(before[:-9])
    succeeds(shlex.split(line), cwd=tmp_path)
    after = answers.read_bytes()
    assert after.startswith(b"".join(kept))
    found = [json.loads(line) for line in after.splitlines()]
    assert sorted(each["index"] for each in found) == [*range(101), 102]
    assert {each["index"] for each in found if "error" in each} == {100, 102}
    assert {each.get("finish_reason") for each in found} <= {"stop", "length", None}


@pytest.mark.slow
@pytest.mark.parametrize("kind", CONFIGS)
def test_upgrade(kind, tmp_path):
    """Restart two servers behind a proxy, one after the other as the page says, while six clients
    ask and stream. Catches: a request that is lost in an upgrade."""
    numbers, asked, lost, over = count(), [], [], threading.Event()

    def start(name, *options):
        (tmp_path / name).mkdir()
        return Process(tmp_path / name, "--shutdown-timeout", 120, *options)

    def client(proxy, streams):
        while not over.is_set():
            number = next(numbers)
            body = {**SHORT, **beginning(number), "max_tokens": 60, "stream": streams}
            asked.append(number)
            try:
                answer = proxy.post(COMPLETIONS, body)
                whole = answer.data.endswith(b"data: [DONE]\n\n") if streams else answer.json["id"]
                if answer.status != 200 or not whole:
                    lost.append(answer)
            except (OSError, HTTPException, ValueError, KeyError) as error:
                lost.append(error)

    servers = [start("a"), start("b")]
    try:
        for server in servers:
            server.__enter__()
        with Proxy(kind, tmp_path, servers) as proxy:
            clients = [threading.Thread(target=client, args=(proxy, i % 2 == 0)) for i in range(6)]
            for each in clients:
                each.start()
            for i, old in enumerate([*servers]):
                old.process.send_signal(signal.SIGTERM)
                assert old.process.wait(120) == 0
                servers[i] = start(f"new-{i}", "--port", old.port).__enter__()
                time.sleep(5)  # as the page says
            over.set()
            for each in clients:
                each.join()
            made = [server.metrics()["generation_tokens_total"] for server in servers]
    finally:
        over.set()
        for server in servers:
            server.__exit__()
    print(f"{kind}: {len(asked)} requests, {len(lost)} lost")
    assert len(asked) > 20 and all(made) and not lost, lost[:3]
