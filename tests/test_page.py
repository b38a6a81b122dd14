"""The page, in a real browser: what a user types, presses and sees.

The server runs in this process (see test_server), so that a test can slow its engine down enough to
watch it. Without chromium the tests skip; where KILOLM_NEEDS_ALL is set, as in CI, they fail.
"""

import itertools
import json
import os
import re
import threading
import time

import pytest
from conftest import program
from selenium.webdriver import ActionChains, Chrome, ChromeOptions, ChromeService, Keys
from selenium.webdriver.common.by import By
from serving import ABORTED, CHAT, COMPLETIONS, Broken, Local, until

import server as server_module
from around.api import answers
from around.api.answers import Problem

BROWSER, DRIVER = program("chromium"), program("chromedriver")
os.environ["SE_OFFLINE"] = "true"  # nothing may be downloaded

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def local():
    started = Local(num_blocks=100)
    yield started
    started.close()


@pytest.fixture(scope="module")
def chrome(tmp_path_factory):
    options = ChromeOptions()
    options.binary_location = BROWSER
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
                 "--disable-background-networking", "--disable-component-update", "--disable-sync",
                 "--no-first-run", "--no-proxy-server", "--window-size=1400,1000",
                 f"--user-data-dir={tmp_path_factory.mktemp('chrome')}"):  # fmt: skip
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = Chrome(options=options, service=ChromeService(DRIVER))
    yield driver
    driver.quit()


class Page:
    """What a user can do and see."""

    def __init__(self, chrome: Chrome, local: Local) -> None:
        self.chrome, self.url = chrome, f"http://127.0.0.1:{local.port}/"
        self.expected = ""  # in the console
        for kind in ("browser", "performance"):
            chrome.get_log(kind)  # of the page before
        local.server.snapshot_time = 0.0  # the last one may be older than what a test has changed
        chrome.get(self.url)
        name = local.server.api.model["id"]
        until(lambda: self.text("#model") == name or self.text("#state"))

    def all(self, selector: str) -> list:
        return self.chrome.find_elements(By.CSS_SELECTOR, selector)

    def text(self, selector: str) -> str:
        return self.js("return document.querySelector(arguments[0])?.textContent ?? ''", selector)

    def texts(self, selector: str) -> list[str]:
        script = "return [...document.querySelectorAll(arguments[0])].map(x => x.textContent)"
        return self.js(script, selector)

    def styles(self, selector: str, name: str) -> list[str]:
        """Of what is on the page now; elements would be stale where it is drawn anew."""
        script = """return [...document.querySelectorAll(arguments[0])].map(
            x => getComputedStyle(x).getPropertyValue(arguments[1]))"""
        return self.js(script, selector, name)

    def js(self, script: str, *args: object):
        return self.chrome.execute_script(script, *args)

    def type(self, selector: str, text: str) -> None:
        box = self.all(selector)[-1]
        box.clear()
        box.send_keys(text)

    def set(self, **settings: object) -> None:
        for name, value in settings.items():
            self.type(f"#{name}", str(value))

    def click(self, selector: str) -> None:
        self.all(selector)[0].click()

    def press(self, *keys: str) -> None:
        """Keys held together, whatever has the focus."""
        chain = ActionChains(self.chrome)
        for key in keys[:-1]:
            chain.key_down(key)
        chain.send_keys(keys[-1])
        for key in keys[:-1]:
            chain.key_up(key)
        chain.perform()

    def resize(self, width: int) -> None:
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
        self.chrome.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)

    def replies(self) -> list[str]:
        """What the model said: completions newest first, a conversation as it went."""
        return self.texts(".reply .text")

    def notes(self) -> list[str]:
        return self.texts(".reply .note")

    def numbers(self) -> dict[str, str]:
        texts = self.texts("#numbers dt, #numbers dd")  # at once, for they change
        return dict(zip(texts[::2], texts[1::2], strict=True))

    def canvas(self) -> str:
        return self.js("return document.getElementById('blocks').toDataURL()")

    def ended(self) -> bool:
        return self.js("return running.size === 0")

    def clean(self) -> None:
        """No request for another host, and nothing in the console."""
        urls = []
        for entry in self.chrome.get_log("performance"):
            event = json.loads(entry["message"])["message"]
            if event["method"] == "Network.requestWillBeSent":
                urls.append(event["params"]["request"]["url"])
        assert urls, "the log of requests is empty"
        sent = [url for url in urls if url.startswith(("http", "ws"))]
        ours = [url for url in sent if not url.startswith("chrome-untrusted:")]  # its own first tab
        assert not [url for url in ours if not url.startswith(self.url)]
        log = self.chrome.get_log("browser")
        messages = [entry["message"] for entry in log if entry["level"] in ("WARNING", "SEVERE")]
        assert not [message for message in messages if (self.expected or "?") not in message]
        assert bool(messages) == bool(self.expected)


@pytest.fixture
def page(chrome, local):
    opened = Page(chrome, local)
    yield opened
    opened.clean()
    chrome.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    chrome.get("about:blank")  # leaves: whatever runs is aborted
    local.settle()


@pytest.fixture
def slow(local, monkeypatch):
    """An engine that can be watched."""
    step = local.engine.step
    monkeypatch.setattr(local.engine, "step", lambda: time.sleep(0.02) or step())


@pytest.fixture
def steps(local, monkeypatch):
    """An engine that makes a step each time it is released, and all others after the test."""
    released, step = threading.Semaphore(0), local.engine.step
    monkeypatch.setattr(local.engine, "step", lambda: released.acquire() and step())
    yield released
    released.release(10**6)


SETTINGS = {"temperature": 0.9, "top_p": 0.95, "top_k": 50, "seed": 3}


@pytest.mark.parametrize("how", ["button", pytest.param("keys", marks=pytest.mark.slow)])
def test_run(page, local, steps, how):
    """The text came in one piece; a setting did not reach the server; a space was lost."""
    page.type("textarea", "JULIET:\nO")
    page.set(**SETTINGS, max_tokens=40)
    if how == "button":
        page.click("#run")
    else:
        page.press(Keys.CONTROL, Keys.ENTER)
    shown = [""]
    until(lambda: page.replies() == shown)
    for _ in range(6):
        steps.release()
        shown.append(until(lambda: (text := page.replies()[0]) != shown[-1] and text))
        assert shown[-1].startswith(shown[-2])
    steps.release(10**6)
    until(page.ended)
    assert page.texts(".asked") == ["JULIET:\nO"]
    body = {**SETTINGS, "prompt": "JULIET:\nO", "max_tokens": 40}
    reply = local.post(COMPLETIONS, body).json
    assert page.replies() == [reply["choices"][0]["text"]]
    tokens = reply["usage"]["completion_tokens"]
    first = r"first token after \d+\.\d\d s"
    assert re.fullmatch(rf"{first}, (cut off.*, )?{tokens} tokens at [\d.]+/s", page.notes()[0])


@pytest.mark.slow
def test_several_prompts(page, local):
    """One prompt's text under another; the n of a prompt all in one."""
    page.type("textarea", "ROMEO:")
    page.click("#add")
    page.press("K")  # the new box has the focus
    page.type("textarea", "KING:")
    page.set(**SETTINGS, max_tokens=20, n=2)
    page.click("#run")
    until(lambda: all(page.replies()) and page.ended())
    body = {**SETTINGS, "prompt": ["ROMEO:", "KING:"], "max_tokens": 20, "n": 2}
    choices = local.post(COMPLETIONS, body).json["choices"]
    assert page.replies() == [choice["text"] for choice in choices]
    assert page.texts(".asked") == ["ROMEO:", "ROMEO:", "KING:", "KING:"]
    assert len({*page.styles(".reply", "border-left-color")}) == 4


TEMPLATE = "{% for turn in messages %}{{ turn.role }}: {{ turn.content }}\n{% endfor %}ASSISTANT:\n"


@pytest.mark.parametrize(
    ("template", "name", "kind", "box", "text", "max_tokens"),
    [
        (None, "shakespeare", "completion", "Prompt 1", "ROMEO:", "128"),
        (None, "another", "completion", "Prompt 1", "", "128"),
        (TEMPLATE, "another", "chat", "Message", "", "512"),  # half of what fits
    ],
)
def test_it_opens_as_the_model_is(
    chrome, local, monkeypatch, template, name, kind, box, text, max_tokens
):
    """A chat model was greeted with ROMEO, and its messages were completed."""
    monkeypatch.setitem(local.server.api.model, "id", name)
    if template:
        monkeypatch.setattr(local.engine.tokenizer, "template", template)
    page = Page(chrome, local)
    assert page.js("return document.querySelector('[name=kind]:checked').value") == kind
    assert page.js("return [document.activeElement.ariaLabel, document.activeElement.value]") == [
        box,
        text,
    ]
    assert page.all("#max_tokens")[0].get_attribute("value") == max_tokens
    # The folder's own temperature holds. It was always 0.8, and a real model wrote nonsense.
    assert page.js("return Object.keys(settings()).sort()") == [
        "max_tokens", "n", "stream", "stream_options"
    ]  # fmt: skip
    shown = [each.get_attribute("id") for each in page.all("button") if each.is_displayed()]
    assert shown == ["run", "stop", "new" if kind == "chat" else "add", "crowd"]
    assert page.all("#system")[0].is_displayed() == (kind == "chat")
    page.clean()


@pytest.fixture
def asked(local, monkeypatch):
    """The messages of each chat that the server was asked for."""
    bodies, prepare = [], local.server.api.prepare

    def record(body: dict, chat: bool):
        bodies.append(body.get("messages"))
        return prepare(body, chat)

    monkeypatch.setattr(local.server.api, "prepare", record)
    return bodies


def turn(role: str, content: str) -> dict:
    return {"role": role, "content": content}


def test_conversation(page, local, asked):
    """The model did not know what it had just been asked; a new chat went on with the old one."""
    page.click("[value=chat]")
    page.set(**SETTINGS, max_tokens=30, system="Be brief.")
    system = turn("system", "Be brief.")

    def say(*keys: str) -> dict:
        page.all("#message")[0].send_keys(*keys, Keys.ENTER)
        until(lambda: all(page.replies()) and page.ended())
        return turn("assistant", page.replies()[-1])

    first, second = turn("user", "Who goes\nthere?"), turn("user", "What?")
    reply = say("Who goes", Keys.SHIFT + Keys.ENTER + Keys.NULL, "there?")
    later = say("What?")
    say("Why?")
    assert asked == [
        [system, first],
        [system, first, reply, second],
        [system, first, reply, second, later, turn("user", "Why?")],
    ]
    assert page.texts("#turns .asked") == ["Who goes\nthere?", "What?", "Why?"]
    body = {**SETTINGS, "max_tokens": 30, "messages": asked[1]}
    assert local.post(CHAT, body).json["choices"][0]["message"] == later | {"refusal": None}
    page.click("#new")
    assert not page.all(".reply")
    page.set(system="")
    say("Why?")
    assert asked[-1] == [turn("user", "Why?")] and page.texts("#turns .asked") == ["Why?"]


CUT = "cut off at the token limit"
LOST = "not kept in the conversation"


@pytest.mark.parametrize(
    ("kind", "settings", "event", "says", "kept"),
    [
        ("completion", {"max_tokens": 5, "n": 2}, None, CUT, 0),
        ("chat", {"max_tokens": 5}, None, CUT, 2),
        ("chat", {"max_tokens": 400}, None, " tokens at ", 2),  # it ended by itself
        ("chat", {"max_tokens": 900}, "#stop", ", stopped", 2),
        ("chat", {"max_tokens": 900}, "broken", f"failed, {LOST}", 0),
        ("chat", {"temperature": -1}, "refused", LOST, 0),
        ("chat", {"max_tokens": 900}, "#new", None, 0),
    ],
)
def test_how_a_reply_ends(page, local, slow, monkeypatch, kind, settings, event, says, kept):
    """A reply that was cut looked like a whole one. What had failed was sent again as what the
    model had said, and the message had to be typed again."""
    if event == "broken":
        monkeypatch.setattr(local.engine, "runner", Broken(local.engine.runner, 20))
    if event == "refused":
        page.expected = "400"
    if event in ("#stop", "#new"):  # or the reply may end before the click
        step = local.engine.step
        monkeypatch.setattr(local.engine, "step", lambda: time.sleep(0.2) or step())
    page.click(f"[value={kind}]")
    page.set(seed=3, **settings)
    page.type("#message" if kind == "chat" else "#prompts textarea", "Who goes there?")
    page.click("#run")
    until(lambda: any(page.replies()) or page.ended())
    is_grey = "document.getElementById('run').disabled"
    grey_meanwhile = f"return running.size === 0 || {is_grey} === arguments[0]"
    assert page.js(grey_meanwhile, kind == "chat")  # no message is sent meanwhile
    if event in ("#stop", "#new"):
        before = local.metrics()[ABORTED]
        page.click(event)
        until(lambda: local.metrics()[ABORTED] > before)
    until(page.ended)
    until(lambda: not page.js(f"return {is_grey}"))
    notes = page.notes()
    assert len(notes) == (0 if says is None else settings.get("n", 1))
    assert all(says in note and (CUT in note) == (says == CUT) for note in notes), notes
    assert bool(page.all(".error")) == (event in ("broken", "refused"))
    turns, left = page.js("return [turns, document.getElementById('message').value]")
    assert [each["content"] for each in turns] == ["Who goes there?", *page.replies()][:kept]
    assert left == ("Who goes there?" if page.all(".error") else "")


def test_thoughts_are_folded(page, asked, monkeypatch):
    """A thought was not shown, or stood in the answer and was sent back with the next message."""
    thought = "<b>Hm.</b><img src=x onerror=document.title=1>"
    monkeypatch.setattr(answers, "split_thought", lambda text: (thought, thought + text[15:]))
    page.click("[value=chat]")
    page.set(max_tokens=5, seed=1)
    for message in (thought, "And?"):
        page.type("#message", message)
        page.click("#run")
        until(lambda: all(page.replies()) and page.ended())
    assert page.texts("details div") == [thought] * 2
    assert not any(each.is_displayed() for each in page.all("details div"))
    page.click("summary")
    assert page.all("details div")[0].is_displayed()
    first = page.replies()[0]
    assert first.startswith(thought) and len(first) > len(thought)
    user, assistant = turn("user", thought), turn("assistant", first)
    assert asked[-1] == [user, assistant, turn("user", "And?")]
    assert not page.all("#turns b, #turns img") and page.chrome.title == "kilolm"


@pytest.mark.parametrize(
    ("width", "blocks", "each"),
    [(1400, 64, 1), (1400, 1500, 1), (1400, 28_000, 16), (420, 28_000, 32), (420, 10**6, 2048)],
)
def test_the_cache_scales(page, width, blocks, each):
    """Squares of a pixel, a picture of many thousand pixels' height, blocks that were not drawn."""
    script = """const [blocks, cached, owners] = arguments;
        const running = owners.map((blocks, name) => ({name, blocks}));
        draw({blocks, block_size: 16, cached, running});
        const canvas = document.getElementById("blocks"), {width, height} = canvas;
        const copy = Object.assign(document.createElement("canvas"), {width, height});
        const pen = copy.getContext("2d", {willReadFrequently: true}), seen = {};
        pen.drawImage(canvas, 0, 0);
        const {data} = pen.getImageData(0, 0, width, height);
        for (let i = 0; i < data.length; i += 4) {
            const pixel = data.slice(i, i + 4).join();
            seen[pixel] = (seen[pixel] || 0) + 1;
        }
        const grey = getComputedStyle(document.documentElement).getPropertyValue("--cached");
        const pixels = [grey, ...owners.map((_, name) => colour(name))].map(name => {
            pen.fillStyle = name;
            pen.fillRect(0, 0, 1, 1);
            return seen[pen.getImageData(0, 0, 1, 1).data.join()] || 0;
        });
        return [document.getElementById("square").textContent, canvas.clientHeight, pixels]"""
    page.resize(width)
    owners = [[*range(each)], [each - 1], [blocks - 1]]  # the last block is alone in its square
    text, height, pixels = page.js(script, blocks, [each], owners)
    assert text == (f"{each} blocks of 16 tokens" if each > 1 else "a block of 16 tokens")
    assert 20 <= height <= 210
    assert min(pixels) >= 14, pixels


def test_the_engine_is_shown(page, local, slow):
    """Blocks that never change, rows that never come or never go."""
    until(lambda: page.numbers().get("running") == "0")
    free, steps = page.canvas(), int(page.numbers()["steps"])
    page.type("textarea", "ROMEO:\n" * 6)
    page.set(max_tokens=900, seed=1, n=2)
    page.click("#run")
    until(lambda: len(page.all("#running tr")) == 2 and "decode" in page.text("#running"))
    used = page.canvas()
    assert used != free
    until(lambda: page.canvas() != used)  # it grows
    row = page.texts("#running tr:first-child td")
    length, longest = map(int, row[3].split(" / "))
    assert 0 < length < longest <= 1024 and row[1] == "decode 1"
    numbers = page.numbers()
    assert numbers["running"] == "2" and numbers["waiting"] == "0"
    assert int(numbers["steps"]) > steps and numbers["cache used"] not in ("0 %", "–")
    until(lambda: int(page.numbers()["tokens/s"]) > 0)
    assert page.numbers()["guesses accepted"] == "off"
    colours = {*page.styles("#running .swatch", "background-color")}
    borders = {*page.styles(".reply", "border-left-color")}
    assert colours == borders and len(colours) == 2  # a reply and its row have one colour
    page.click("#stop")
    until(lambda: not page.all("#running tr"))
    assert page.numbers()["running"] == "0" and page.numbers()["cache used"] == "0 %"
    assert page.canvas() not in (free, used)  # what is cached is drawn in another way


def test_a_preempted_sequence_runs_its_tokens_again(page):
    """It was said to decode."""
    script = """const row = {name: "a", blocks: [], prompt: 5, tokens: 9, max: 20, ran: 4};
        render({...last, running: [{...row, text: "", length: arguments[0]}]});
        return document.getElementById("running").textContent"""
    until(lambda: page.numbers())
    for length, phase in ((4, "prefill 4"), (5, "prefill 4"), (7, "prefill 4"), (8, "decode 4")):
        assert phase in page.js(script, length)


def test_the_rate_is_never_0_while_tokens_come(page, local, monkeypatch):
    """0 tokens/s while twelve ran: no step had ended since the last snapshot, a tenth of a second
    before."""
    step = local.engine.step
    monkeypatch.setattr(local.engine, "step", lambda: time.sleep(0.3) or step())
    page.set(max_tokens=900, seed=1, n=8)
    page.click("#run")
    until(lambda: page.numbers().get("tokens/s", "0") != "0")
    rates = []
    end = time.monotonic() + 0.7
    while time.monotonic() < end or len(rates) < 6:
        rates.append(int(page.numbers()["tokens/s"]))
    assert min(rates) > 0, rates
    page.click("#stop")
    until(lambda: page.numbers()["running"] == page.numbers()["tokens/s"] == "0")


def test_the_rate_forgets(page):
    """A rate that averages over a pause, or over all that was before; a new server, which counts
    from 0 again, had a rate below 0."""
    script = """const rates = []; samples = [];
        for (const [at, tokens, busy] of arguments[0]) rates.push(rate(at, tokens, busy));
        samples = []; return rates.map(Math.round)"""
    samples = [[0, 0, False], [90_000, 0, False], [90_100, 10, True], [90_200, 10, True],
               [93_300, 330, True], [93_400, 330, False], [99_000, 330, False],
               [99_100, 340, True], [99_200, 5, True], [99_300, 15, True], [109_300, 15, True],
               [109_400, 1015, True], [113_000, 1195, True], [116_100, 1350, True]]  # fmt: skip
    rates = page.js(script, samples)
    assert rates[:4] == [0, 0, 100, 50] and rates[4] == 103, rates  # 320 in 3.1 s
    assert rates[6:10] == [0, 100, 0, 100], rates
    assert rates[-1] == 50, rates  # 155 in 3.1 s: what was before is forgotten


@pytest.mark.parametrize("how", [pytest.param("button", marks=pytest.mark.slow), "Escape"])
def test_stop(page, local, slow, how):
    """The text stood still, and the server went on."""
    page.type("textarea", "ROMEO:")
    page.set(max_tokens=900, seed=2)
    page.click("#run")
    until(lambda: page.replies() and page.replies()[0])
    assert local.engine.running
    if how == "button":
        page.click("#stop")
    else:
        page.press(Keys.ESCAPE)
    until(lambda: page.notes() and page.notes()[0].endswith(", stopped"))
    local.settle()
    before = page.replies()
    assert before[0]
    page.set(max_tokens=5)
    page.click("#run")  # and again
    until(lambda: len(page.replies()) == 2 and page.ended())
    assert page.replies()[1:] == before
    assert not page.all(".error")


@pytest.mark.slow
def test_crowd(page, local):
    """Sixteen prompts, of which one ran; or each opened a connection, and six ran. It ended before
    one had looked, and nothing was preempted."""
    page.set(max_tokens=6, seed=1)  # the crowd has its own
    page.click("#crowd")
    until(lambda: len(page.all("#running tr")) == 8 and page.text("#queue") != "0")  # 8 at once
    assert len(page.all(".reply")) == 16 and int(page.text("#queue")) <= 8
    until(lambda: page.text("#waiting").count("tokens") == int(page.text("#queue")))
    until(lambda: page.numbers()["prefix hits"] not in ("0 %", "–"))
    until(lambda: page.numbers()["preemptions"] != "0")
    assert not page.ended()
    until(lambda: sum(map(bool, page.replies())) >= 8)
    until(lambda: all(page.replies()) and page.ended(), 90)
    assert sum("cut off" in note for note in page.notes()) > 8
    assert all(" tokens at " in note for note in page.notes())


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"temperature": -1}, "temperature must be"), ({"max_tokens": 5000}, "length is 1024")],
)  # fmt: skip
def test_bad_settings(page, settings, message):
    """Nothing happened, and nobody said why."""
    page.expected = "400"
    page.type("textarea", "ROMEO:")
    page.set(**settings)
    page.click("#run")
    note = until(lambda: page.all(".reply .note.error"))[0]
    assert message in note.text and note.is_displayed()


@pytest.mark.slow
def test_error_in_the_middle(page, local, slow, monkeypatch):
    """A stream that broke looked like one that had ended."""
    monkeypatch.setattr(local.engine, "runner", Broken(local.engine.runner, 20))
    page.set(max_tokens=200, seed=1)
    page.click("#run")
    until(lambda: page.all(".reply .note.error"))
    assert "engine failed" in page.notes()[0] and page.replies()[0]
    page.set(max_tokens=5)
    page.click("#run")
    until(lambda: len(page.replies()) == 2 and page.replies()[0] and page.ended())
    assert len(page.all(".error")) == 1


@pytest.mark.slow
def test_a_stream_that_is_cut(page, local, monkeypatch):
    """Half a reply was kept as a whole one: the server had died, and its stream had just ended."""
    send, count = server_module.Connection.send, itertools.count()

    def cut(connection, *args, **options):
        if connection.stream and next(count) == 9:
            raise ConnectionError
        send(connection, *args, **options)

    monkeypatch.setattr(server_module.Connection, "send", cut)
    page.set(max_tokens=200, seed=1)
    page.click("#run")
    until(lambda: page.all(".reply .note.error"))
    assert "closed the connection" in page.notes()[0] and page.replies()[0]


def test_api_key(chrome, local, monkeypatch):
    """The page asked for no key, or sent it with one request and not with the next."""
    monkeypatch.setitem(vars(local.args), "api_key", "secret")
    page = Page(chrome, local)
    page.expected = "401"
    assert "key" in page.text("#state") and page.all("#key")[0].get_attribute("type") == "password"
    page.set(max_tokens=5)
    page.click("#run")
    assert "key" in until(lambda: page.all(".reply .note.error"))[0].text
    page.set(key="secret")
    until(lambda: page.text("#model") == "shakespeare" and not page.text("#state"))
    until(lambda: page.numbers().get("running") == "0")
    page.click("#run")
    until(lambda: len(page.replies()) == 2 and page.replies()[0] and page.ended())
    page.clean()


def test_text_is_text(page):
    """A prompt, or what a model says, was read as HTML."""
    prompt = "<b>bold</b><img src=x onerror=document.title=1>"
    page.type("textarea", prompt)
    page.set(max_tokens=5, seed=1)
    page.click("#run")
    until(lambda: page.replies() and page.ended())
    assert page.texts(".asked") == [prompt]
    assert not page.all(".reply b, .reply img, #running b b, #running img")
    assert page.chrome.title == "kilolm"


@pytest.mark.slow
def test_keyboard(page):
    """Run could be reached by mouse alone, or did not show that it has the focus."""
    script = "const a = document.activeElement; return a.id || a.name || a.ariaLabel || a.tagName"
    assert page.js(script) == "Prompt 1"  # to type at once
    seen = []
    while len(seen) < 20 and "key" not in seen:
        page.press(Keys.TAB)
        seen.append(page.js(script))
    boxes = ["temperature", "top_p", "top_k", "max_tokens", "n", "seed", "key"]
    assert seen == ["run", "stop", "add", "crowd", *boxes]
    width = page.js("return getComputedStyle(document.activeElement).outlineWidth")
    assert float(width.removesuffix("px")) >= 2
    page.set(max_tokens=5)
    page.js("document.getElementById('run').focus()")
    page.press(Keys.ENTER)
    until(lambda: page.replies() and page.replies()[0] and page.ended())
    for kind in ("completion", "chat"):
        page.click(f"[value={kind}]")
        for control in page.all("textarea, input, button"):
            assert control.accessible_name or not control.is_displayed(), control.id


@pytest.mark.slow
@pytest.mark.parametrize("width", [320, 420, 700, 1000, 1400])
@pytest.mark.parametrize("kind", ["completion", "chat"])
def test_no_horizontal_scroll(page, local, slow, width, kind):
    """A phone had to scroll sideways, by the width of a table or of a long word."""
    page.resize(width)
    page.click(f"[value={kind}]")
    page.type("#message" if kind == "chat" else "#prompts textarea", "M" * 300)
    page.set(max_tokens=200, seed=1)
    page.click("#run")
    until(lambda: page.all("#running tr") and any(page.replies()))
    page.click("#crowd")
    until(lambda: len(page.all("#running tr")) == 8)
    script = """return ["html", "#replies", ".pinned"].map(x => document.querySelector(x)).map(
        x => x.scrollWidth - x.clientWidth)"""
    assert max(page.js(script)) <= 0
    assert page.all("#blocks")[0].size["width"] > width / 3
    boxes = [each for each in page.all("textarea, button") if each.is_displayed()]
    assert all(box.rect["x"] + box.rect["width"] <= width for box in boxes)


@pytest.mark.slow
def test_the_server_goes_and_comes(page, local, monkeypatch):
    """After a restart of the server the page had to be loaded again."""
    until(lambda: page.numbers().get("running") == "0")
    page.expected = "503"

    def away(*_: object) -> None:
        raise Problem(503, "away")

    monkeypatch.setattr(server_module.Connection, "route", away)
    until(lambda: "away" in page.text("#state"))
    monkeypatch.undo()
    until(lambda: not page.text("#state"))
    page.set(max_tokens=5)
    page.click("#run")
    until(lambda: page.replies() and page.replies()[0] and page.ended())
