"""Function calls: what is text and what is a call, by OpenAI's own client, whole and streamed."""

import json
import time
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import Any, NamedTuple

import openai
import pytest
from conftest import SHAKESPEARE
from serving import CHAT, HI, Local, local, make_local, shared  # noqa: F401 (fixtures)

from around.api.function_calls import FORMS, OPEN, Tools, form_of, restrict, split_calls, tools_of
from around.folder.config import load_config
from around.folder.tokenizer import Tokenizer
from around.structured import make_matcher, structure

TOKENIZER = Tokenizer(SHAKESPEARE)
CONFIG = load_config(SHAKESPEARE)

# A schema as people write it, and two as pydantic writes them: a shared part is under $defs, and
# "#" is the schema itself. The two have another $defs under the same name.
WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Verona"]}, "days": {"enum": [1, 2, 3]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
PLACE = {"$ref": "#/$defs/Place"}
TRAVEL = {
    "$defs": {"Place": {"enum": ["Mantua", "Padua"]}},
    "type": "object",
    "properties": {"start": PLACE, "goal": PLACE},
    "required": ["start", "goal"],
    "additionalProperties": False,
}
FIGHT = {
    "$defs": {"Place": {"enum": ["here", "there"]}},
    "type": "object",
    "properties": {"where": PLACE},
    "required": ["where"],
    "additionalProperties": False,
}
ONE: dict[str, Any] = {"tool_choice": "required", "parallel_tool_calls": False}
RIGHT = {  # whether a function accepts its arguments
    "weather": lambda city, days: city in ("Rome", "Verona") and days in (1, 2, 3),
    "travel": lambda start, goal: {start, goal} <= {"Mantua", "Padua"},
    "fight": lambda where: where in ("here", "there"),
}


def tool(name: Any, parameters: Any = None) -> dict[str, Any]:
    more = {} if parameters is None else {"parameters": parameters}
    return {"type": "function", "function": {"name": name, "description": f"for {name}"} | more}


TOOLS = [tool("weather", WEATHER), tool("travel", TRAVEL), tool("fight", FIGHT)]


# --- Text and calls -------------------------------------------------------------------------------


def tagged(name: str, arguments: Any, space: str = "") -> str:
    call = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>{space}{call}{space}</tool_call>"


def bare(name: str, arguments: Any) -> str:
    return json.dumps({"name": name, "parameters": arguments})


ROME = {"city": "Rome", "days": 1}
ODD = {"city": 'a </tool_call> <tool_call>{"}', "days": [{"é": None}]}
A_CALL = tagged("weather", ROME)
REPLIES = {  # what the model writes, and the text (...: all of it) and the calls in it
    "text": ("Good morrow, cousin.", "Good morrow, cousin.", []),
    "a call": (A_CALL, None, [("weather", ROME)]),
    "on lines of its own": (tagged("travel", {}, "\n"), None, [("travel", {})]),
    "text before it": (f"Let me see. {A_CALL}", "Let me see.", [("weather", ROME)]),
    "two": (f"{A_CALL}\n{tagged('weather', {})}", None, [("weather", ROME), ("weather", {})]),
    "tags in a string": (tagged("fight", ODD), None, [("fight", ODD)]),
    "not JSON": ("<tool_call>{weather: Rome}</tool_call>", ..., []),
    "NaN": ('<tool_call>{"name": "weather", "arguments": {"days": NaN}}</tool_call>', ..., []),
    "a number that is none": (tagged("weather", {"days": 5}).replace("5", "1e999"), ..., []),
    "an unknown function": (tagged("murder", ROME), ..., []),
    "no name": ('<tool_call>{"arguments": {}}</tool_call>', ..., []),
    "no object": ("<tool_call>[1]</tool_call>", ..., []),
    "arguments that are none": (tagged("weather", "Rome"), ..., []),
    "never closed": (A_CALL.removesuffix("</tool_call>"), None, [("weather", ROME)]),
    "never closed, and text": (f"{A_CALL.removesuffix('</tool_call>')} so", ..., []),
    "more before the end": (A_CALL.replace("</", "x</"), ..., []),
    "half a tag": ("a <b> <tool <tool_ca", ..., []),
    "both": (f"<tool_call>O</tool_call>{A_CALL}", "<tool_call>O</tool_call>", [("weather", ROME)]),
    "a tag twice": (f"<tool_call>{A_CALL}", "<tool_call>", [("weather", ROME)]),
}  # fmt: skip
BARE = {
    "text": ("Good morrow, cousin.", ..., []),
    "a call": (bare("weather", ROME), None, [("weather", ROME)]),
    "white space": (f"\n {bare('weather', ROME)}\n", None, [("weather", ROME)]),
    "two": (f"{bare('weather', ROME)}; {bare('fight', ODD)}", None,
            [("weather", ROME), ("fight", ODD)]),
    "another object": ('{"a": 1}', ..., []),
    "cut off": (bare("weather", ROME)[:-1], ..., []),
    "an object after text": (f"Use {{x}}{bare('weather', ROME)}", ..., []),
    "code": ("if (a) {\n b }\n else {}\n{x}", ..., []),
}  # fmt: skip


@pytest.mark.parametrize(
    ("form", "name"),
    [*(("hermes", name) for name in REPLIES), *(("llama3", name) for name in BARE)],
)
def test_what_is_returned_only_grows(form, name):
    """A part of a tag was sent as text, and a call that turned out to be none was lost: each
    beginning of the reply, letter by letter."""
    text, content, calls = (REPLIES if form == "hermes" else BARE)[name]
    content = text if content is ... else content or ""
    tools = Tools(FORMS[form], RIGHT, True)
    before: tuple[str, list] = ("", [])
    for i in range(len(text) + 1):
        for ended in [False] * (i < len(text)) + [False, True] * (i == len(text)):
            now = split_calls(text[:i], tools, ended)
            assert now[0].startswith(before[0]) and now[1][: len(before[1])] == before[1]
            before = now
    assert [(each["name"], json.loads(each["arguments"])) for each in before[1]] == calls
    assert before[0] == content
    assert split_calls(text, Tools(FORMS[form], {}, True), False) == (text, [])
    assert split_calls(text, tools._replace(is_parallel=False), True) == (content, before[1][:1])


@pytest.mark.parametrize(
    ("form", "text"), [("llama3", r"\frac{1}{2} is a half"), ("hermes", f"Write {OPEN} first")]
)
def test_text_that_is_no_call_is_not_held_back(form, text):
    """A stream was silent from there on, until the reply had ended."""
    assert split_calls(text, Tools(FORMS[form], RIGHT, True), False) == (text, [])


def test_the_form_follows_from_the_template():
    """Calls in one form were looked for in another."""
    assert form_of("{{ tools }} <tool_call> parameters") == "hermes"
    assert form_of('{%- if tools %}{"name": function name, "parameters": ...}') == "llama3"
    assert form_of("{{ messages }}") == ""
    assert form_of("{{ tools }} <tool_call>\n<function=f>\n<parameter=x>") == ""  # Qwen3-Coder


# --- Through OpenAI's client ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def server():
    """The bundled model has never seen a call. A grammar makes it write what a test needs."""
    started = Local("--tool-format", "hermes", num_blocks=400, max_num_seqs=16,
                    max_num_batched_tokens=64)  # fmt: skip
    with started.openai() as client:
        started.client = client
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
    parts: list[str]  # pieces of the text that came one after the other, if it was streamed


def ask(server: Local, stream: bool = False, messages: Any = HI, **body: Any) -> list[Reply]:
    """Send a chat by openai's client. Returns the choices, joined from their pieces."""
    body = {"tools": TOOLS, "max_tokens": 700, "seed": 1} | body
    body = {name: value for name, value in body.items() if value is not None}
    ours = {name: body.pop(name) for name in ("structured_outputs",) if name in body}
    try:
        answer = server.client.chat.completions.create(
            model="shakespeare", messages=messages, stream=stream, extra_body=ours, **body
        )
        return streamed(answer) if stream else [whole(choice) for choice in answer.choices]
    except openai.BadRequestError as error:
        return pytest.fail(f"refused for {error.param}: {error.body['message']}", pytrace=False)


def whole(choice: Any) -> Reply:
    message, calls = choice.message, choice.message.tool_calls or []
    assert message.role == "assistant"
    assert all(each.type == "function" for each in calls)
    made = [Call(each.function.name, text_of(each), each.id) for each in calls]
    return Reply(message.content, made, choice.finish_reason, [])


def text_of(call: Any) -> str:
    arguments = call.function.arguments
    assert isinstance(arguments, str), f"the arguments must be a JSON string, not {arguments!r}"
    return arguments


def streamed(chunks: Any) -> list[Reply]:
    """Join the chunks of a stream, as a client would. A call's id and name come once, and its
    arguments may come in pieces."""
    parts: dict[int, list[str]] = {}
    calls: dict[int, list[Call]] = {}
    reasons: dict[int, str] = {}
    for choice in (choice for chunk in chunks for choice in chunk.choices):
        i, delta = choice.index, choice.delta
        assert i not in reasons, "something came after the finish_reason"
        assert (delta.role is not None) == (i not in parts), "only the first delta has the role"
        mine = calls.setdefault(i, [])
        parts.setdefault(i, []).extend([delta.content] if delta.content else [])
        for each in delta.tool_calls or []:
            assert each.index is not None, "a call in a delta must have an index"
            if each.id:
                assert each.index == len(mine), f"call {len(mine)} has the index {each.index}"
                assert each.type == "function"
                mine.append(Call(each.function.name, "", each.id))
            old = mine[each.index]
            mine[each.index] = old._replace(arguments=old.arguments + text_of(each))
        if choice.finish_reason:
            reasons[i] = choice.finish_reason
    assert reasons.keys() == parts.keys(), "a choice has no finish_reason"
    return [
        Reply("".join(parts[i]) or None, calls[i], reasons[i], parts[i]) for i in sorted(reasons)
    ]


def refused(server: Local, **body: Any) -> str | None:
    """Return the field that the refusal of a request names."""
    body = {"messages": HI, "tools": TOOLS, "max_tokens": 2} | body
    try:
        server.client.post("/chat/completions", body=body, cast_to=object)
    except openai.BadRequestError as error:
        return error.param
    return pytest.fail(f"this should have been refused: {body}", pytrace=False)


def check_call(reply: Reply, *names: str) -> Call:
    """Check that a reply is one valid call of one of these functions. Returns the call."""
    assert reply.text is None, f"without text, the content is null, not {reply.text!r}"
    assert len(reply.calls) == 1, f"there should be one call: {reply}"
    (call,) = reply.calls
    assert call.name in names, f"{call.name} is called, which is not one of {names}"
    arguments = json.loads(call.arguments)
    wrong = f"{call.arguments} do not match the parameters of {call.name}"
    try:
        assert RIGHT[call.name](**arguments), wrong
    except TypeError:
        pytest.fail(wrong, pytrace=False)
    assert reply.reason == "tool_calls", f"the finish_reason is {reply.reason!r}, not 'tool_calls'"
    return call


# --- A required call ------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_required(server: Local, stream: bool) -> None:
    """The bundled model has never seen JSON, and would not write any without a grammar."""
    replies = ask(server, stream, **ONE, n=8, temperature=100)
    calls = [check_call(reply, *RIGHT) for reply in replies]
    assert len({call.name for call in calls}) > 1, "the grammar must allow every function"
    assert len({call.id for call in calls}) == 8, "each call must have an id of its own"


@pytest.mark.parametrize("name", RIGHT)
def test_by_name(server: Local, name: str) -> None:
    choice = {"type": "function", "function": {"name": name}}
    one = {"tool_choice": choice}  # a choice by name is one call, whatever is said
    for reply in ask(server, n=2, **one) + ask(server, True, **one):
        check_call(reply, name)


@pytest.mark.parametrize("stream", [False, True])
def test_several_calls(server: Local, stream: bool) -> None:
    """By default a reply may have several calls, each of which is valid."""
    replies = ask(server, stream, tool_choice="required", n=8, temperature=100)
    assert max(len(reply.calls) for reply in replies) > 1
    for reply in replies:
        for call in reply.calls:
            assert RIGHT[call.name](**json.loads(call.arguments))
        assert len({call.id for call in reply.calls}) == len(reply.calls)


def test_the_form_of_llama_3(server: Local, monkeypatch: pytest.MonkeyPatch) -> None:
    """The grammar forces the other form too, and the reply is read in it."""
    monkeypatch.setattr(server.server.api, "form", FORMS["llama3"])
    for stream in (False, True):
        for reply in ask(server, stream, **ONE, n=2):
            check_call(reply, *RIGHT)
        two = f"{bare('weather', ROME)}; {bare('weather', ROME)}"
        (reply,) = ask(server, stream, structured_outputs={"choice": [two]})
        assert [call.name for call in reply.calls] == ["weather"] * 2 and reply.text is None


def test_the_name_of_a_call_comes_first(server: Local) -> None:
    """Clients that merge chunks take what comes in one as different calls."""
    choice = {"structured_outputs": {"choice": [f"Look: {A_CALL}"]}}
    body = {"messages": HI, "tools": TOOLS, "stream": True, "max_tokens": 400} | choice
    events = [json.loads(event) for event in server.post(CHAT, body).events[:-1]]
    choices = [event["choices"][0] for event in events]
    name, arguments = (each for each in choices if each["delta"].get("tool_calls"))
    (first,), (second,) = name["delta"]["tool_calls"], arguments["delta"]["tool_calls"]
    assert first["function"] == {"name": "weather", "arguments": ""} and first["id"]
    assert second == {"index": 0, "function": {"arguments": json.dumps(ROME)}}
    assert (name["finish_reason"], choices[-1]["finish_reason"]) == (None, "tool_calls")


def test_marks_that_are_special_tokens(tmp_path) -> None:
    """Special tokens have no text in the output, so no call was found in it."""
    for file in ("config.json", "tokenizer.model"):
        (tmp_path / file).write_bytes((SHAKESPEARE / file).read_bytes())
    size = Tokenizer(SHAKESPEARE).vocab_size
    words = "<tool_call>", "</tool_call>", "<other>"
    added = {str(size + i): {"content": word, "special": True} for i, word in enumerate(words)}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}))
    tokenizer = Tokenizer(tmp_path)
    ids = tokenizer.encode("<tool_call>{}</tool_call><other>", add_special=False)
    assert {size, size + 1, size + 2} <= {*ids}
    assert tokenizer.decode(ids) == "<tool_call>{}</tool_call>"


def test_a_template_that_knows_no_tools(local) -> None:  # noqa: F811
    """The model was asked to call functions that it was never told of."""
    answer = local.post(CHAT, {"messages": HI, "tools": TOOLS})
    assert "--tool-format" in answer.fails(400, "tools")


def test_a_function_without_parameters(server: Local) -> None:
    """A function without parameters takes any object as its arguments."""
    for name in ("f", 'say "hi"'):
        body = {"tools": [tool(name)], "tool_choice": "required", "parallel_tool_calls": False}
        for reply in ask(server, max_tokens=30, n=2, **body):
            if reply.reason == "tool_calls":  # the arguments may also reach max_tokens
                assert [call.name for call in reply.calls] == [name], reply
                assert isinstance(json.loads(reply.calls[0].arguments), dict)
        none = {"type": "object", "properties": {}, "additionalProperties": False}
        (reply,) = ask(server, tools=[tool(name, none)], **ONE)
        assert [call[:2] for call in reply.calls] == [(name, "{}")], reply


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_is_cut_off_is_text(server: Local, stream: bool) -> None:
    """Bug: the client gets half of a call's JSON, and breaks when it parses it."""
    (reply,) = ask(server, stream, **ONE, max_tokens=12)
    assert reply.reason == "length", (
        "the finish_reason of a reply that reaches max_tokens is length"
    )
    assert not reply.calls, "an incomplete call must not be returned as a call"
    assert reply.text, "an incomplete call must be returned as text at the end"


@cache
def replies_to_all(server: Local, stream: bool) -> dict[str, Future]:
    """Send all of them at once, which is faster."""

    def one(text: str) -> Reply:
        (reply,) = ask(server, stream, structured_outputs={"choice": [text]}, max_tokens=400)
        return reply

    with ThreadPoolExecutor(len(REPLIES)) as pool:
        return {name: pool.submit(one, text) for name, (text, *_) in REPLIES.items()}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", REPLIES)
def test_calls_are_found_in_the_text(server: Local, name: str, stream: bool) -> None:
    """A grammar with only one choice makes the model write the text."""
    text, content, calls = REPLIES[name]
    content = text if content is ... else content
    reply = replies_to_all(server, stream)[name].result()
    got = [(name, json.loads(arguments)) for name, arguments, _ in reply.calls]
    assert got == calls, f"the calls in {text!r} are wrong"
    assert reply.text == content, f"the content is the text outside calls, in {text!r}"
    assert reply.reason == ("tool_calls" if calls else "stop")


def test_text_does_not_wait(server: Local) -> None:
    """Each token's text comes at once; only what may become a tag is held back."""
    text = "Good morrow, cousin. Is the day so young? 1 < 2, and <b> is no tag, nor <tools>."
    (reply,) = ask(server, True, structured_outputs={"choice": [text]})
    assert reply.text == text
    assert len(reply.parts) > 12, f"the text came in only {len(reply.parts)} parts"


@pytest.mark.parametrize("stream", [False, True])
def test_none(server: Local, stream: bool) -> None:
    """Without tools, a tag is plain text, and the model is not told of any tool."""
    only = {"structured_outputs": {"choice": [A_CALL]}}
    (reply,) = ask(server, stream, **only)
    assert reply.calls, f"by default, {A_CALL!r} is a call"
    for more in ({"tool_choice": "none"}, {"function_call": "none"}, {"tools": None}):
        (reply,) = ask(server, stream, **only, **more)
        got = reply.text, reply.calls, reply.reason
        assert got == (A_CALL, [], "stop"), f"with {more}, a tag is plain text"


def test_each_choice_has_its_own(server: Local) -> None:
    texts = [A_CALL, "Nay."]
    replies = ask(server, True, n=8, structured_outputs={"choice": texts}, temperature=100)
    calls = [reply.calls for reply in replies]
    assert {*map(bool, calls)} == {True, False}, "the test is useless: all choices are alike"
    for reply in replies:
        assert (reply.text is None) == bool(reply.calls) == (reply.reason == "tool_calls")


def fields_of(choice: Any, schema: Any = None, parameters: Any = WEATHER) -> dict[str, Any]:
    """What restrict makes of a body with a tool and, if there is a schema, a response_format."""
    fields = {"tools": [tool("weather", parameters)], "tool_choice": choice}
    fields |= {"parallel_tool_calls": True, "response_format": {"type": "text"}}
    if schema:
        holder = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        fields |= {"response_format": holder, "structured_outputs": structure(holder)}
    restrict(fields, tools_of(fields, FORMS["hermes"]))
    return fields


def allows(structure: Any, text: str) -> bool:
    """Whether a structure allows a text as the whole reply."""
    matcher = make_matcher(TOKENIZER, CONFIG, structure)
    ids = TOKENIZER.encode(text, add_special=False)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def test_a_reply_is_calls_or_the_answer() -> None:
    """With a response_format, as agents send it beside their tools, no call was possible; and with
    a required call it was refused."""
    answer, call = '{"sunny": true}', tagged("weather", ROME, "\n")
    sunny = {"type": "object", "properties": {"sunny": {"type": "boolean"}}, "required": ["sunny"]}
    for choice, texts in (("auto", [answer, call]), ("required", [call]), ("none", [answer])):
        only = fields_of(choice, sunny)["structured_outputs"]
        allowed = [text for text in (answer, call, "Sure") if allows(only, text)]
        assert allowed == texts, choice
    fields = fields_of("auto")
    assert "structured_outputs" not in fields
    fields |= {"tool_choice": "required", "structured_outputs": {"regex": "a"}}
    restrict(fields, tools_of(fields, FORMS["hermes"]))
    assert allows(fields["structured_outputs"], call)


def test_what_a_schema_leaves_out() -> None:
    """A call with invented arguments; a keyword that llguidance lacks refused the tool."""
    days = {"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True}
    only = fields_of("required", None, {"properties": {"days": days}})["structured_outputs"]
    for arguments, is_allowed in (({"days": [1]}, True), ({"days": [1], "x": 5}, False)):
        call = json.dumps({"name": "weather", "arguments": arguments})
        assert allows(only, f"{OPEN}\n{call}\n</tool_call>") == is_allowed


# --- The conversation -----------------------------------------------------------------------------

TEMPLATE = """{% for m in messages %}{{ m.role }}:{{ m.content or '' }};
{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments | tojson }};
{% endfor %}{% endfor %}
{% if tools %}TOOLS{{ tools | tojson }}{% endif %}{{ tools is none }}"""


@pytest.fixture
def rendered(server: Local, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Collect the texts that the chat template makes; the last is that of the last request."""
    texts, tokenizer = [], server.engine.tokenizer
    encode = tokenizer.encode

    def spy(text: str, *args: Any, **options: Any) -> list[int]:
        if text != "<think>":  # the server only looks for this token
            texts.append(text)
        return encode(text, *args, **options)

    monkeypatch.setattr(tokenizer, "template", TEMPLATE)
    monkeypatch.setattr(tokenizer, "tool_template", TEMPLATE)
    monkeypatch.setattr(tokenizer, "encode", spy)
    return texts


def test_the_template_is_given_the_tools(server: Local, rendered: list[str]) -> None:
    ask(server, max_tokens=1)
    assert f"TOOLS{json.dumps(TOOLS)}" in rendered[0], "pass the tools to the template unchanged"
    rendered.clear()
    without = ({"tool_choice": "none"}, {"function_call": "none"}, {"tools": None}, {"tools": []})
    for more in without:
        ask(server, max_tokens=1, **more)
    assert len(rendered) == len(without)
    wrong = "without tools, the template's tools must be None"
    assert all(text.endswith("True") for text in rendered), wrong


def test_the_template_is_given_the_calls(server: Local, rendered: list[str]) -> None:
    """The template gets the arguments as objects, because it writes the JSON itself."""
    call = {"name": "weather", "arguments": json.dumps(ROME)}
    messages = [
        *HI,
        {"role": "assistant", "tool_calls": [{"id": "x", "type": "function", "function": call}]},
        {"role": "tool", "tool_call_id": "x", "content": "sunny"},
    ]
    ask(server, messages=messages, max_tokens=1)
    wrong = "turn the arguments from OpenAI's JSON string into an object for the template"
    assert f"weather{json.dumps(ROME)};" in rendered[0], wrong
    assert "tool:sunny;" in rendered[0]
    call["arguments"] = "{weather"
    assert refused(server, messages=messages) == "messages[1]", "the arguments are invalid JSON"


def test_the_loop(server: Local) -> None:
    """Do what every agent does: ask, run the call, send its result, until there is a text."""
    messages: list[Any] = [*HI]
    texts = ({"structured_outputs": {"choice": [text]}} for text in (A_CALL, "It is sunny."))
    seen = []
    ask(server, max_tokens=1)  # fails with a message that says what to do
    for turn in (ONE, *texts):
        answer = server.client.chat.completions.create(
            model="shakespeare", messages=messages, tools=TOOLS, max_tokens=700, extra_body=turn
        )
        message = answer.choices[0].message
        messages.append(message)  # the client's own object
        for call in message.tool_calls or []:
            arguments = json.loads(call.function.arguments)
            seen.append((call.function.name, arguments))
            result = json.dumps({"done": arguments})
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    assert len(seen) == 2 and seen[1] == ("weather", ROME), f"the calls were {seen}"
    assert message.content == "It is sunny." and not message.tool_calls, message
    assert answer.choices[0].finish_reason == "stop"
    assert [each.role if hasattr(each, "role") else each["role"] for each in messages] == [
        "user", "assistant", "tool", "assistant", "tool", "assistant"
    ]  # fmt: skip


# --- Errors ---------------------------------------------------------------------------------------

NAMED = {"type": "function", "function": {"name": "murder"}}
WRONG = {
    "a function that is not there": ({"tool_choice": NAMED}, "tool_choice"),
    "another choice": ({"tool_choice": "sometimes"}, "tool_choice"),
    "no function": ({"tool_choice": {"type": "function"}}, "tool_choice"),
    "no tool": ({"tool_choice": "required", "tools": []}, "tool_choice"),
    "two structures": (
        {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
        "response_format"),
    "not a list": ({"tools": TOOLS[0]}, "tools"),
    "not a tool": ({"tools": ["weather"]}, "tools"),
    "not a function": ({"tools": [{"type": "function"}]}, "tools"),
    "not a name": ({"tools": [tool(5)]}, "tools"),
    "no schema": ({"tools": [tool("f", [1])]}, "tools"),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_request_is_refused(server: Local, what: str) -> None:
    ask(server, max_tokens=1)
    body, param = WRONG[what]
    assert refused(server, **body) == param, f"the error must name the field {param}"


def test_a_completion_has_no_tools(server: Local) -> None:
    ask(server, max_tokens=1)
    with pytest.raises(openai.BadRequestError, match="tools"):
        server.client.completions.create(
            model="shakespeare", prompt="a", extra_body={"tools": TOOLS}
        )


def test_nothing_is_left_behind(server: Local) -> None:
    ask(server, **ONE)
    server.settle()


def test_white_space_is_searched_once() -> None:
    """20,000 spaces before a word took seconds, in which the server answered nobody."""
    tools = Tools(FORMS["hermes"], {"f": {}}, True)
    start = time.process_time()
    assert split_calls(" " * 20_000 + "a", tools, False) == (" " * 20_000 + "a", [])
    assert time.process_time() - start < 0.5
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    assert split_calls(f"a  <tool_call> {call}", tools, True)[1] == [
        {"name": "f", "arguments": "{}"}
    ]
