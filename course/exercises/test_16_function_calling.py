"""Exercise 16: Mistral's function calls, by OpenAI's own client. See 16-function-calling.md."""

import json
import os
import re
import shutil
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import openai
import pytest
import torch
from common import SHAKESPEARE, bundled

from around.api import ServerArgs, listen_at
from around.api.front import listen
from around.api.function_calls import FORMS, Form, Reader, Tools, form_in
from around.api.requests import API
from around.folder import Detokenizer, Tokenizer
from around.machine import Ranks
from around.start import make_engine
from scheduler import Proposer
from server import Server, parse_args
from tools.books import audit

os.environ["NO_PROXY"] = "127.0.0.1"  # openai's client would use the environment's proxy
WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Verona"]}, "days": {"enum": [1, 2, 3]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
# As pydantic writes schemas: a shared part is under $defs, and "#" is the schema itself.
PLACE = {"$ref": "#/$defs/Place"}
TRAVEL = {
    "$defs": {"Place": {"enum": ["Mantua", "Padua"]}},
    "type": "object",
    "properties": {"start": PLACE, "goal": PLACE},
    "required": ["start", "goal"],
    "additionalProperties": False,
}
# Another $defs under the same name.
FIGHT = {
    "$defs": {"Place": {"enum": ["here", "there"]}},
    "type": "object",
    "properties": {"where": PLACE},
    "required": ["where"],
    "additionalProperties": False,
}
# Whether a function accepts its arguments.
RIGHT = {
    "weather": lambda city, days: city in ("Rome", "Verona") and days in (1, 2, 3),
    "travel": lambda start, goal: {start, goal} <= {"Mantua", "Padua"},
    "fight": lambda where: where in ("here", "there"),
}
HI = [{"role": "user", "content": "How is the weather?"}]
ONE: dict[str, Any] = {"tool_choice": "required", "parallel_tool_calls": False}
BOTH = ("mistral", "mistral_args")


def tool(name: str, parameters: dict) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [tool("weather", WEATHER), tool("travel", TRAVEL), tool("fight", FIGHT)]


def form(name: str) -> Form:
    """Return a form of calls, or fail with a message that says what to do."""
    if name not in FORMS:
        pytest.fail(f"function_calls.FORMS has no {name!r} yet: add this form", pytrace=False)
    return FORMS[name]


# --- Text and calls -------------------------------------------------------------------------------


def split_calls(text: str, tools: Tools, ended: bool) -> tuple[str, list]:
    """Split a reply, as far as it has come, into its text and its calls."""
    reader = Reader(tools)
    return reader.read(text, ended), reader.calls


def written(form: str, *calls: tuple[str, Any], space: str = "") -> str:
    """Write calls as a model of Mistral's does."""
    if form == "mistral_args":
        return space.join(f"[TOOL_CALLS]{name}[ARGS]{json.dumps(args)}" for name, args in calls)
    made = [json.dumps({"name": name, "arguments": args}) for name, args in calls]
    return f"[TOOL_CALLS]{space}[{', '.join(made)}]"


ROME = {"city": "Rome", "days": 1}
ODD = {"city": 'a ] [TOOL_CALLS][{"name"}, [ARGS]{', "days": [{"é": None}]}


@cache
def replies(form: str) -> dict[str, tuple]:
    """What the model writes, and the text (...: all of it) and the calls in it."""
    weather, travel, fight = ("weather", ROME), ("travel", {}), ("fight", ODD)
    rome = written(form, weather)
    one_wrong = written(form, weather, ("murder", {}))
    same = {
        "text": ("Good morrow, cousin.", ..., []),
        "a call": (rome, None, [weather]),
        "several calls": (written(form, weather, travel, fight), None, [weather, travel, fight]),
        "the same call twice": (written(form, travel, travel), None, [travel, travel]),
        "white space": (written(form, weather, fight, space=" "), None, [weather, fight]),
        "text before it": (f"Let me see. {rome}", "Let me see.", [weather]),
        "marks in a string": (written(form, fight), None, [fight]),
        "an unknown function": (written(form, ("murder", ROME)), ..., []),
        "arguments that are none": (written(form, ("weather", "Rome")), ..., []),
        "never closed": (rome[:-1], ..., []),
        "half a mark": ("a [b] [TOOL [TOOL_CA", ..., []),
        "only the mark": ("[TOOL_CALLS]", ..., []),
        "the mark twice": (f"[TOOL_CALLS]{rome}", "[TOOL_CALLS]", [weather]),
        "the mark in text": (f"[TOOL_CALLS] O! {rome}", "[TOOL_CALLS] O!", [weather]),
    }  # fmt: skip
    if form == "mistral_args":
        return same | {
            "NaN": ('[TOOL_CALLS]weather[ARGS]{"days": NaN}', ..., []),
            "no arguments": ("[TOOL_CALLS]weather[ARGS]", ..., []),
            "no second mark": ('[TOOL_CALLS]weather{"city": "Rome"}', ..., []),
            "no first mark": ('weather[ARGS]{"city": "Rome"}', ..., []),
            "one of two is unknown": (
                one_wrong, one_wrong.removeprefix(written(form, weather)), [weather]),
        }  # fmt: skip
    return same | {
        "one of two is unknown": (one_wrong, ..., []),
        "two lists": (f"{rome} {written(form, travel)}", None, [weather, travel]),
        "other keys beside": (
            '[TOOL_CALLS][{"arguments": {}, "name": "travel", "id": "a"}]', None, [travel]),
        "not JSON": ("[TOOL_CALLS][{weather: Rome}]", ..., []),
        "NaN": ('[TOOL_CALLS][{"name": "weather", "arguments": {"days": NaN}}]', ..., []),
        "an empty list": ("[TOOL_CALLS][]", ..., []),
        "no list": ('[TOOL_CALLS]{"name": "weather", "arguments": {}}', ..., []),
        "no mark": ('[{"name": "weather", "arguments": {}}]', ..., []),
        "no name": ('[TOOL_CALLS][{"arguments": {}}]', ..., []),
        "no objects": ('[TOOL_CALLS][1, "weather", null]', ..., []),
    }  # fmt: skip


CASES = [(form, name) for form in BOTH for name in replies(form)]


@pytest.mark.parametrize(("name", "case"), CASES)
def test_what_is_returned_only_grows(name: str, case: str) -> None:
    """A client has already read what was sent, so no later letter may change it."""
    text, content, calls = replies(name)[case]
    content = text if content is ... else content or ""
    tools = Tools(form(name), RIGHT, True)
    before: tuple[str, list] = ("", [])
    for i in range(len(text) + 1):
        now = split_calls(text[:i], tools, False)
        grows = now[0].startswith(before[0]) and now[1][: len(before[1])] == before[1]
        assert grows, f"after {text[:i]!r}, {before} has become {now}"
        before = now
    now = split_calls(text, tools, True)
    grows = now[0].startswith(before[0]) and now[1][: len(before[1])] == before[1]
    assert grows, f"at the end of {text!r}, {before} has become {now}"
    got = [(each["name"], json.loads(each["arguments"])) for each in now[1]]
    assert got == calls, f"the calls in {text!r} are wrong"
    assert now[0] == content, f"the text around the calls in {text!r} is wrong"
    assert split_calls(text, tools._replace(is_parallel=False), True) == (content, now[1][:1])


@pytest.mark.parametrize("name", BOTH)
def test_calls_come_when_they_are_complete(name: str) -> None:
    tools = Tools(form(name), RIGHT, True)
    text = f"Look: {written(name, ('weather', ROME), ('travel', {}))}"
    assert len(split_calls(text, tools, False)[1]) == 2, f"{text!r} is complete"
    for i in range(len("Look:"), len(text)):
        shown, calls = split_calls(text[:i], tools, False)
        assert shown == "Look:", f"after {text[:i]!r}, only the text before the mark can be shown"
        assert not calls or name == "mistral_args", "a list that is not complete may turn out wrong"
    assert split_calls("I [", tools, False)[0] == "I", "the mark may begin here"
    assert split_calls("I [T]", tools, False)[0] == "I [T]", "this is no mark, so it can be shown"


TEMPLATES = {
    "hermes": '{{ tools }} <tool_call>{"name": name, "arguments": {}}</tool_call> parameters',
    "llama3": '{%- if tools %}{"name": function name, "parameters": ...}',
    "": "{{ messages }}",
    "mistral": '{{ tools }} parameters {{ "[TOOL_CALLS] [" }}',
    "mistral_args": '{{ tools }} parameters {{ "[TOOL_CALLS]" + name + "[ARGS]" + arguments }}',
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_form_follows_from_the_template(name: str) -> None:
    got = form_in(TEMPLATES[name])
    names = [each for each, form in FORMS.items() if form is got]
    assert names == [name] * bool(name), f"{TEMPLATES[name]!r} shows the form {name!r}, not {names}"


# --- The mark is a special token ------------------------------------------------------------------


def make_folder(folder: Path, template: str) -> Path:
    """Copy the bundled tokenizer, and make two of its tokens marks. They are special tokens, as in
    Mistral's tokenizers."""
    folder.mkdir()
    for name in ("tokenizer.model", "config.json", "generation_config.json"):
        shutil.copy(SHAKESPEARE / name, folder)
    config = json.loads((SHAKESPEARE / "tokenizer_config.json").read_text())
    config["added_tokens_decoder"] = {
        str(i): {"content": mark, "special": True} for mark, i in MARKS.items()
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(template)
    return folder


MARKS = {"[TOOL_CALLS]": 3, "[ARGS]": 4}  # two bytes that no text here has


@pytest.mark.parametrize("name", BOTH)
def test_the_tokenizer_shows_the_marks(name: str, tmp_path: Path) -> None:
    tokenizer = Tokenizer(make_folder(tmp_path / "words", ""))
    text = written(name, ("weather", ROME))
    ids = tokenizer.encode(text, add_special=False)
    assert MARKS["[TOOL_CALLS]"] in ids
    todo = "Tokenizer._hidden still has the marks of Mistral's calls, so decoding leaves them out"
    shown = tokenizer.decode(ids).replace(" ", "")  # sentencepiece adds spaces after a mark
    assert shown == text.replace(" ", ""), todo
    stream = Detokenizer(tokenizer, [])
    assert "[TOOL_CALLS]" in "".join(stream.push(i) for i in ids)
    rest = tokenizer.decode([tokenizer.bos_id, *tokenizer.encode("Nay."), tokenizer.eos_id])
    assert rest.strip() == "Nay.", "other special tokens stay hidden"


# --- Through OpenAI's client ----------------------------------------------------------------------

# In short, what Mistral's templates do, also with an id that has another form.
TEMPLATE = """
{%- if tools %}[AVAILABLE_TOOLS]{% for t in tools %}{{ t.function.name }} {% endfor %}{% endif %}
{%- for m in messages %}
{%- if m.tool_calls %}CALLS
{%- for call in m.tool_calls %}
{%- if call.id | length != 9 %}
{{- raise_exception("Tool call IDs should be alphanumeric strings with length 9!") }}
{%- endif %}{{ call.function.name }}{{ call.function.arguments | tojson }}{{ call.id }}
{%- endfor %}</s>
{%- elif m.role == "user" %}[INST]{{ m.content }}[/INST]
{%- elif m.role == "tool" %}[TOOL_RESULTS]{{ m.content }}{{ m.tool_call_id }}[/TOOL_RESULTS]
{%- else %}{{ m.content }}</s>{% endif %}
{%- endfor %}"""
CALLS = {"mistral": "[TOOL_CALLS][", "mistral_args": "[TOOL_CALLS][ARGS]"}


class Local:
    """A server in two threads of this process. The bundled model has never seen a call, so a
    grammar makes it write what a test needs."""

    def __init__(self, form: str, folder: Path) -> None:
        self.form = form
        folder = make_folder(folder / form, TEMPLATE.replace("CALLS", CALLS[form]))
        args = ServerArgs(
            checkpoint=folder, served_model_name="shakespeare", port=0, num_blocks=400,
            max_num_seqs=16, device="cpu", dtype="float32",
        )  # fmt: skip
        self.engine = make_engine(args, Ranks(torch.device("cpu")), bundled(), Proposer())
        self.server = Server(self.engine, args, listen_at(args.host, args.port))
        self.threads = [
            threading.Thread(target=listen, args=(self.server,), daemon=True),
            threading.Thread(target=self.server.drive, daemon=True),
        ]
        for thread in self.threads:
            thread.start()
        port = self.server.listener.getsockname()[1]
        url = f"http://127.0.0.1:{port}/v1"
        self.client = openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60)

    def close(self) -> None:
        self.client.close()
        self.server.stopping = True
        self.threads[0].join(10)
        self.server.inbox.put(None)
        self.threads[1].join(10)


@pytest.fixture(scope="module", params=BOTH)
def local(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator:
    started = Local(request.param, tmp_path_factory.mktemp("served"))
    yield started
    started.close()


class Call(NamedTuple):
    name: str
    arguments: str
    id: str = ""


class Reply(NamedTuple):
    text: str | None
    calls: list[Call]
    reason: str


def ask(local: Local, stream: bool = False, messages: Any = HI, **body: Any) -> list[Reply]:
    """Send a chat by openai's client. Returns the choices, joined from their pieces."""
    # Where the grammar allows a mark, the bias makes the model write it as one token.
    bias = {str(i): 100 for i in MARKS.values()} if "structured_outputs" in body else {}
    body = {"tools": TOOLS, "max_tokens": 700, "seed": 1, "logit_bias": bias} | body
    ours = {name: body.pop(name) for name in ("structured_outputs",) if name in body}
    try:
        answer = local.client.chat.completions.create(
            model="shakespeare", messages=messages, stream=stream, extra_body=ours, **body
        )
        return streamed(answer) if stream else [whole(choice) for choice in answer.choices]
    except openai.BadRequestError as error:
        problem = f"refused for {error.param}: {error.body['message']}"
        if error.param == "tools":
            problem += f" (form_in should find the form {local.form!r} in the template)"
        return pytest.fail(problem, pytrace=False)


def whole(choice: Any) -> Reply:
    message, calls = choice.message, choice.message.tool_calls or []
    made = [Call(each.function.name, each.function.arguments, each.id) for each in calls]
    return Reply(message.content, made, choice.finish_reason)


def streamed(chunks: Any) -> list[Reply]:
    """Join the chunks of a stream, as a client would."""
    texts: dict[int, str] = {}
    calls: dict[int, list[Call]] = {}
    reasons: dict[int, str] = {}
    for choice in (choice for chunk in chunks for choice in chunk.choices):
        i, delta = choice.index, choice.delta
        assert i not in reasons, "something came after the finish_reason"
        texts[i] = texts.get(i, "") + (delta.content or "")
        mine = calls.setdefault(i, [])
        for each in delta.tool_calls or []:
            if each.id:
                assert each.index == len(mine), f"call {len(mine)} has the index {each.index}"
                mine.append(Call(each.function.name, "", each.id))
            old = mine[each.index]
            mine[each.index] = old._replace(arguments=old.arguments + each.function.arguments)
        if choice.finish_reason:
            reasons[i] = choice.finish_reason
    assert reasons.keys() == texts.keys(), "a choice has no finish_reason"
    return [Reply(texts[i] or None, calls[i], reasons[i]) for i in sorted(reasons)]


def check_calls(reply: Reply) -> list[Call]:
    """Check that a reply is one or more valid calls, and return them."""
    assert reply.text is None, f"without text, the content is null, not {reply.text!r}"
    assert reply.calls and reply.reason == "tool_calls", f"there should be a call: {reply}"
    for name, arguments, _ in reply.calls:
        wrong = f"{arguments} do not match the parameters of {name}"
        try:
            assert RIGHT[name](**json.loads(arguments)), wrong
        except TypeError:
            pytest.fail(wrong, pytrace=False)
    return reply.calls


@pytest.mark.parametrize("stream", [False, True])
def test_required(local: Local, stream: bool) -> None:
    """The grammar forces this form, and the reply is read in it."""
    made = [check_calls(reply) for reply in ask(local, stream, **ONE, n=8, temperature=100)]
    assert {len(calls) for calls in made} == {1}, "without parallel_tool_calls, there is one call"
    assert len({calls[0].name for calls in made}) > 1, "the grammar must allow every function"


@pytest.mark.parametrize("name", RIGHT)
def test_by_name(local: Local, name: str) -> None:
    choice = {"type": "function", "function": {"name": name}}
    for stream in (False, True):
        (reply,) = ask(local, stream, tool_choice=choice, parallel_tool_calls=False)
        assert [call.name for call in check_calls(reply)] == [name]


@pytest.mark.parametrize("stream", [False, True])
def test_several_calls(local: Local, stream: bool) -> None:
    """By default a required reply may have several calls, in Mistral's old form all in one list."""
    more = {"max_tokens": 300, "temperature": 100}
    replies = ask(local, stream, tool_choice="required", n=8, **more)
    ended = [check_calls(reply) for reply in replies if reply.reason != "length"]
    assert max(map(len, ended)) > 1, "the grammar must allow several calls"


def test_the_grammar_is_this_form(local: Local, monkeypatch: pytest.MonkeyPatch) -> None:
    """Look at what the model has written, before it is split into text and calls."""
    ask(local, max_tokens=1)
    monkeypatch.setattr(Reader, "read", lambda self, text, *_: text)
    (reply,) = ask(local, **ONE)
    begins = r"\[TOOL_CALLS\] ?" + ("[a-z]+" if local.form == "mistral_args" else r"\[ ?\{")
    assert re.match(begins, reply.text or ""), f"this is not the form {local.form!r}: {reply.text}"


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_is_cut_off_is_text(local: Local, stream: bool) -> None:
    (reply,) = ask(local, stream, **ONE, max_tokens=12)
    assert reply.reason == "length" and not reply.calls, f"this call is incomplete: {reply}"
    assert "TOOL_CALLS" in (reply.text or ""), f"an incomplete call is text, with its mark: {reply}"


@pytest.mark.parametrize("stream", [False, True])
def test_calls_are_found_in_the_text(local: Local, stream: bool) -> None:
    """A grammar with only one choice makes the model write the text, with the marks as tokens."""

    def one(text: str) -> Reply:
        (reply,) = ask(local, stream, structured_outputs={"choice": [text]}, temperature=0)
        return reply

    cases = replies(local.form)
    with ThreadPoolExecutor(len(cases)) as pool:
        sent = [(case, pool.submit(one, case[0])) for case in cases.values()]
    for (text, content, calls), future in sent:
        reply = future.result()
        got = [(name, json.loads(arguments)) for name, arguments, _ in reply.calls]
        assert got == calls, f"the calls in {text!r} are wrong"
        content = text if content is ... else content
        assert reply.text == content, f"the content is the text outside calls, in {text!r}"
        assert reply.reason == ("tool_calls" if calls else "stop")


def test_the_loop(local: Local) -> None:
    """Do what every agent does. Mistral's templates refuse ids that have not nine letters or
    digits, and a client sends back those that it got."""
    messages: list[Any] = [*HI]
    text = written(local.form, ("weather", ROME), ("weather", ROME))
    ask(local, max_tokens=1)  # fails with a message that says what to do
    for turn in ({"structured_outputs": {"choice": [text]}}, {"max_tokens": 4}):
        more = {"temperature": 0, "max_tokens": 300} | turn
        try:
            message = local.client.post(
                "/chat/completions", body={"messages": messages, "tools": TOOLS, **more},
                cast_to=object,
            )["choices"][0]["message"]  # fmt: skip
        except openai.BadRequestError as error:
            pytest.fail(f"the ids of the calls are wrong: {error.body['message']}", pytrace=False)
        messages.append(message)
        for call in message.get("tool_calls") or []:
            wrong = f"the id of a call must be nine letters or digits, and not {call['id']!r}"
            assert re.fullmatch("[0-9A-Za-z]{9}", call["id"]), wrong
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": "sunny"})
    assert [each["role"] for each in messages] == [
        "user", "assistant", "tool", "tool", "assistant"
    ]  # fmt: skip
    assert messages[2]["tool_call_id"] != messages[3]["tool_call_id"], "each call has its own id"


@pytest.mark.parametrize("name", BOTH)
def test_the_command_line(local: Local, name: str) -> None:
    """--tool-format names a form, whatever the template shows."""
    wanted = form(name)
    flags = parse_args(["--tool-format", name])
    args = ServerArgs(tool_format=flags.tool_format)
    assert API(local.engine, args).form is wanted


OTHERS = {
    "hermes": '<tool_call>\n{"name": "weather", "arguments": {"days": 1}}\n</tool_call>',
    "llama3": '{"name": "weather", "parameters": {"days": 1}}',
}


@pytest.mark.parametrize("name", OTHERS)
def test_the_other_forms_stay(local: Local, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are read and forced as before, and do not read Mistral's calls."""
    monkeypatch.setattr(local.server.api, "form", FORMS[name])
    for stream in (False, True):
        for reply in ask(local, stream, **ONE, n=2):
            assert len(check_calls(reply)) == 1
    tools = Tools(FORMS[name], RIGHT, True)
    call = {"name": "weather", "arguments": '{"days": 1}'}
    assert split_calls(OTHERS[name], tools, True) == ("", [call])
    for text in (written(each, ("weather", ROME)) for each in BOTH):
        assert split_calls(text, tools, True) == (text, [])


def test_nothing_is_left_behind(local: Local) -> None:
    ask(local, **ONE)
    deadline = time.monotonic() + 60
    while local.server.owners or local.engine.queue or local.server.inbox.qsize():
        assert time.monotonic() < deadline, "requests are left"
        time.sleep(0.01)
    audit(local.engine)
