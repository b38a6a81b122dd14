"""The page, in a real browser: what a user types, presses and sees.

The server runs in this process (see serving.py), so that a test can slow its engine down enough to
watch it. Without chromium the tests skip; where KILOLM_NEEDS_ALL is set, as in CI, they fail.
"""

import itertools
import os
import re
import time

import pytest
from conftest import program
from selenium.webdriver import Chrome, ChromeOptions, ChromeService, Keys
from selenium.webdriver.common.by import By
from serving import ABORTED, CHAT, COMPLETIONS, Broken, Local, until

from around.api.answers import Problem
from around.api.front import Handler
from around.folder import TextStream
from sampling import Sequence

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]
os.environ["SE_OFFLINE"] = "true"  # nothing may be downloaded


@pytest.fixture(scope="module")
def local():
    started = Local(num_blocks=100)
    yield started
    started.close()


@pytest.fixture(scope="module")
def chrome(tmp_path_factory):
    options = ChromeOptions()
    options.binary_location = program("chromium")
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
                 "--disable-background-networking", "--disable-component-update", "--disable-sync",
                 "--no-first-run", "--no-proxy-server", "--window-size=1280,1000",
                 f"--user-data-dir={tmp_path_factory.mktemp('chrome')}"):  # fmt: skip
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = Chrome(options=options, service=ChromeService(program("chromedriver")))
    yield driver
    driver.quit()


class Page:
    """Do what a user can do, and return what a user sees."""

    def __init__(self, chrome, local):
        self.chrome, self.local = chrome, local
        self.js, self.expected = chrome.execute_script, ""  # what stands in the console
        chrome.get_log("browser")  # of the page before
        self.open()

    def open(self):
        self.chrome.get(f"http://127.0.0.1:{self.local.port}/")
        name = self.local.server.api.model["id"]
        until(lambda: self.text("#model") == name or self.text("#state"))

    def all(self, selector):
        return self.chrome.find_elements(By.CSS_SELECTOR, selector)

    def texts(self, selector):
        script = "return [...document.querySelectorAll(arguments[0])].map(x => x.textContent)"
        return self.js(script, selector)

    def text(self, selector):
        return next(iter(self.texts(selector)), "")

    def set(self, **settings):
        """Type into these boxes; `textarea` is the last one that was added."""
        for name, text in settings.items():
            box = self.all("#prompts textarea" if name == "textarea" else f"#{name}")[-1]
            box.clear()
            box.send_keys(str(text))

    def click(self, selector):
        self.all(selector)[0].click()

    def press(self, keys):
        """Type, whatever has the focus."""
        self.chrome.switch_to.active_element.send_keys(keys)

    def replies(self):
        """Return what the model said: completions newest first, a conversation as it went."""
        return self.texts(".reply .text")

    def notes(self):
        return self.texts(".reply .note")

    def numbers(self):
        texts = self.texts("#numbers dt, #numbers dd")  # at once, for they change
        return dict(zip(texts[::2], texts[1::2], strict=True))

    def ended(self):
        return self.js("return running.size === 0")

    def run(self):
        """Press the button, and wait for the ends of all replies."""
        self.click("#run")
        until(lambda: self.replies() and self.ended())

    def clean(self):
        """Check that nothing is in the console. A request for another host would be: the page
        forbids it."""
        log = self.chrome.get_log("browser")
        messages = [entry["message"] for entry in log if entry["level"] in ("WARNING", "SEVERE")]
        assert not [message for message in messages if (self.expected or "?") not in message]
        assert bool(messages) == bool(self.expected)


@pytest.fixture
def page(chrome, local):
    opened = Page(chrome, local)
    yield opened
    opened.clean()
    chrome.get("about:blank")  # leaves: whatever runs is aborted
    local.settle()


@pytest.fixture
def slow(local, monkeypatch):
    """Slow the engine down, so that it can be watched."""
    step = local.engine.step
    monkeypatch.setattr(local.engine, "step", lambda: time.sleep(0.02) or step())


# What is sent while the fields are empty, and what stands in them.
SENT = "return ['temperature', 'top_p', 'top_k'].map(x => [settings()[x], $(x).placeholder])"
SETTINGS = {"temperature": 0.9, "top_p": 0.95, "top_k": 50, "seed": 3}
BOLD = "<b>Hm.</b><img src=x onerror=document.title=1>"


def test_completions(page, local, slow):
    """Type two prompts and their settings into the page, run them, and compare what it shows with
    the server's reply. Catches: text that came in one piece, or under another prompt; a setting or
    a space that was lost; a prompt read as HTML."""
    assert page.all("#prompts textarea")[-1].get_attribute("value") == "ROMEO:"
    # The folder's own settings hold, and are shown. They were called "model's".
    until(lambda: page.text("#sampling") == "sampling: temperature 0.8, top_p 0.95")
    assert page.js(SENT) == [[0.8, "0.8"], [0.95, "0.95"], [0, "0"]]
    assert len({each.location["y"] for each in page.all("button") if each.is_displayed()}) == 1
    page.set(textarea=BOLD)
    page.click("#add")
    page.press("K")  # the new box has the focus
    page.set(**SETTINGS, textarea="KING:", max_tokens=120, n=2)
    page.press(Keys.CONTROL + Keys.ENTER)
    until(lambda: len(page.replies()) == 4)
    first = until(lambda: page.replies()[0])
    until(lambda: len(page.all("#running tr")) == 4 and "decode" in page.text("#running"))
    until(page.ended)
    assert page.replies()[0].startswith(first) and page.replies()[0] != first
    body = {**SETTINGS, "prompt": [BOLD, "KING:"], "max_tokens": 120, "n": 2}
    reply = local.post(COMPLETIONS, body).json
    assert page.replies() == [choice["text"] for choice in reply["choices"]]
    assert page.texts(".asked") == [BOLD, BOLD, "KING:", "KING:"]
    assert not page.all(".reply b, .reply img") and page.chrome.title == "kilolm"
    ending = r"first token after \d+\.\d\d s, (cut off.*, )?(\d+) tokens at .* together, in 4 texts"
    tokens = re.fullmatch(ending, page.notes()[0])[2]
    assert int(tokens) == reply["usage"]["completion_tokens"]


TEMPLATE = "{% for turn in messages %}{{ turn.role }}: {{ turn.content }}\n{% endfor %}ASSISTANT:\n"


def turns(*contents, system=()):
    """Return a conversation that the user begins."""
    talk = [{"role": "system", "content": each} for each in system]
    roles = itertools.cycle(["user", "assistant"])
    return talk + [{"role": role, "content": text} for role, text in zip(roles, contents)]


def test_conversation(page, local, slow, monkeypatch):
    """Hold conversations on the page, with a failure, a stop and a cut reply. Catches: a message
    that was completed, or sent without its past; a thought in the answer, or sent back; what had
    failed sent as the model's words, or to be typed again; a cut reply like a whole one; a small
    model at a temperature of 1, which talks nonsense."""
    asked, prepare = [], local.server.api.prepare
    record = lambda body, chat: asked.append(body["messages"]) or prepare(body, chat)  # noqa: E731
    monkeypatch.setitem(local.server.api.model, "id", "x")
    monkeypatch.setattr(local.engine.tokenizer, "template", TEMPLATE)
    monkeypatch.setattr(local.server.metrics, "sampling", {"temperature": 0.2, "max_tokens": 9})
    page.open()
    assert page.text("#sampling") == "sampling: temperature 0.2"
    assert page.js(SENT) == [[0.2, "0.2"], [1, "1"], [0, "0"]]
    assert page.js("return document.activeElement.ariaLabel") == "Message"
    assert page.all("#max_tokens")[0].get_attribute("value") == "512"  # half of what fits
    shown = [each.get_attribute("id") for each in page.all("button") if each.is_displayed()]
    assert shown == ["run", "stop", "new", "crowd"]
    page.click("#more summary")
    assert page.all("#system")[0].is_displayed()
    page.set(**SETTINGS, max_tokens=30, system="Be brief.")

    def say(*keys, event=""):
        page.all("#message")[0].send_keys(*keys, Keys.ENTER)
        if event:
            until(lambda: page.replies() and page.replies()[-1])
            assert page.js("return document.getElementById('run').disabled")  # one at a time
            page.click(event)
        until(page.ended)
        return page.replies()[-1] if page.replies() else ""

    with monkeypatch.context() as m:
        m.setattr(local.server.api, "prepare", record)
        first = say("Who goes", Keys.SHIFT + Keys.ENTER + Keys.NULL, "there?")
        second = say("What?")
        m.setattr(local.engine, "runner", Broken(local.engine.runner, 5))
        say("Why?")
        assert "engine failed, not kept in the conversation" in page.notes()[-1]
        assert page.all("#message")[0].get_attribute("value") == "Why?"
        page.set(max_tokens=600)
        before = local.metrics()[ABORTED]
        third = say(event="#stop")  # the message is still there
        assert page.notes()[-1].endswith(", stopped")
        until(lambda: local.metrics()[ABORTED] > before)
        page.set(max_tokens=5)
        say("And?")
        assert "cut off at the token limit" in page.notes()[-1]
        said = ["Who goes\nthere?", first, "What?", second, "Why?", third, "And?"]
        talks = [turns(*said[:n], system=["Be brief."]) for n in (1, 3, 5, 5, 7)]
        assert asked == talks
        page.set(max_tokens=300)  # fits beside the 600
        say("More.", event="#new")
        assert not page.all(".reply")
        bold = property(lambda _: BOLD, lambda *_: None)
        m.setattr(TextStream, "thought", bold, raising=False)
        m.setattr(Sequence, "text", property(lambda seq: BOLD + seq.stream.text))
        page.set(max_tokens=5, system="")
        first = say("Why?")
        say("And?")
        assert first.startswith(BOLD) and len(first) > len(BOLD)
        assert asked[-1] == turns("Why?", first, "And?")
    assert page.texts("#turns details div") == [BOLD] * 2
    assert not any(each.is_displayed() for each in page.all("#turns details div"))
    page.click("#turns summary")
    assert page.all("#turns details div")[0].is_displayed()
    assert not page.all("#turns b, #turns img") and page.chrome.title == "kilolm"
    said = page.replies()
    page.open()  # a reload keeps the conversation; a new chat drops it
    assert page.replies() == said and page.texts("#turns .asked") == ["Why?", "And?"]
    until(page.all("[value=chat]")[0].is_selected)
    page.click("#new")
    page.open()
    assert not page.all(".reply")
    body = {**SETTINGS, "max_tokens": 30, "messages": talks[1]}
    assert local.post(CHAT, body).json["choices"][0]["message"]["content"] == second


# Two sequences that share block 1 of a large cache: whether blocks 0 and 1 have one colour each.
DRAWN = """draw({blocks: 5000, block_size: 16, cached: [70],
               running: [{name: "a", blocks: [0, 1]}, {name: "b", blocks: [1]}]});
const {data} = $("blocks").getContext("2d").getImageData(0, 20, 50, 1), red = x => data[4 * x];
return [red(2) === red(20), red(28) === red(46), $("shown").textContent]"""


def test_crowd(page, local, slow):
    """Send the crowd of sixteen prompts, watch the tables and the drawing, and stop it. Catches:
    one prompt that ran, or six, for want of connections; all sent at once, with nothing to share;
    blocks that never change, rows that stay; 0 tokens/s while twelve ran; Stop for the text alone;
    strangers drawn as sharing; headings of nothing."""
    canvas = "return document.getElementById('blocks').toDataURL()"
    until(lambda: page.numbers().get("running") == "0")
    empty = page.js(canvas)
    plain, split, note = page.js(DRAWN)
    assert plain and not split and re.fullmatch(r"\d\d of 5,000 blocks .* others are free", note)
    stop, idle, busy = (page.all(each)[0] for each in ("#stop", "#idle", "#busy"))
    assert not stop.is_enabled() and idle.is_displayed() and not busy.is_displayed()
    page.click("#crowd")
    until(lambda: len(page.all("#running tr")) == 8 and page.numbers()["waiting"] != "0")
    assert len(local.server.busy) == 2 and stop.is_enabled() and busy.is_displayed()
    asked = {text.partition("\n")[0] for text in page.texts(".asked")}
    assert asked == {"…", "First Citizen:"}  # a long prompt is cut at a line
    assert len(page.all(".reply")) == 16 and re.match(r"Waiting: [1-8],", page.text("#waiting"))
    until(lambda: page.numbers()["preemptions"] != "0")
    until(lambda: page.numbers()["tokens/s"] != "0")
    assert min(int(page.numbers()["tokens/s"]) for _ in range(20)) > 0
    numbers = page.numbers()
    assert numbers["cache in use"] not in ("0 %", "–") and numbers["guesses accepted"] == "off"
    assert page.js(canvas) != empty
    page.press(Keys.ESCAPE)
    until(lambda: not page.all("#running tr"))
    assert page.numbers()["running"] == "0" and page.numbers()["cache in use"] == "0 %"
    assert not stop.is_enabled() and idle.is_displayed() and not busy.is_displayed()
    assert all("stopped" in note or "first token" in note for note in page.notes())


def test_errors(page, local, monkeypatch):
    """Run with wrong settings, a stream that is cut and a server that goes away and comes back.
    Catches: a failure that is not shown; a stream whose server had died, and that looked like one
    that had ended; a page that had to be loaded again after a restart."""
    page.expected = "0"  # 400, then 503
    send, count = Handler.send, itertools.count()

    def cut(connection, *args, **options):
        if connection.stream and next(count) == 9:
            raise ConnectionError
        send(connection, *args, **options)

    for settings, message in (
        ({"temperature": -1}, "temperature must be"), ({"max_tokens": 5000}, "length is 1024"),
        ({"max_tokens": 200}, "closed the connection"),
    ):  # fmt: skip
        if settings == {"max_tokens": 200}:
            monkeypatch.setattr(Handler, "send", cut)
        page.set(**{"temperature": 1} | settings)
        page.run()
        note = page.all(".reply .note.error")[0]
        assert message in note.text and note.is_displayed()
    assert page.replies()[0]

    def away(*_: object) -> None:
        raise Problem(503, "away")

    monkeypatch.setattr(Handler, "route", away)
    until(lambda: "away" in page.text("#state"))
    monkeypatch.undo()
    until(lambda: not page.text("#state"))
    page.set(max_tokens=5)
    page.run()
    assert page.replies()[0] and len(page.all(".error")) == 3


def test_api_key(chrome, local, monkeypatch):
    """Open the page of a server with a key, first without the key and then with it. Catches: a page
    that asks for no key, or sends it with one request and not with the next."""
    monkeypatch.setitem(vars(local.args), "api_key", "secret")
    page = Page(chrome, local)
    page.expected = "401"
    assert "key" in page.text("#state") and page.text("#state") in page.text("#away")
    assert page.all("#key")[0].get_attribute("type") == "password"
    page.set(max_tokens=5)
    page.run()
    assert "key" in page.all(".reply .note.error")[0].text
    page.set(key="secret")
    until(lambda: page.text("#model") == "shakespeare" and not page.text("#state"))
    until(lambda: page.numbers().get("running") == "0")
    assert not page.all("#away")[0].is_displayed()
    page.run()
    assert len(page.replies()) == 2 and page.replies()[0]
    page.clean()
