"""Function calls: what is text and what is a call, by OpenAI's own client, whole and streamed."""

import itertools
import json
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jsonschema
import pytest
from conftest import SHAKESPEARE
from serving import CHAT, HI, Local, local, shared, think_by  # noqa: F401 (fixtures)

from around.api.answers import Choice, mark_thoughts
from around.api.function_calls import FORMS, Reader, Tools, form_in, restrict, tools_of
from around.folder.config import load_config
from around.folder.tokenizer import Tokenizer
from around.settings import SamplingParams
from around.structured import make_matcher, structure
from sampling import Sequence, Token

TOKENIZER = Tokenizer(SHAKESPEARE)
CONFIG = load_config(SHAKESPEARE)


def takes(names: str, schema: Any, **more: Any) -> dict[str, Any]:
    """Return a schema of an object with these properties, all alike."""
    properties = dict.fromkeys(names.split(), schema)
    return {"type": "object", "properties": properties, "required": [*properties],
            "additionalProperties": False} | more  # fmt: skip


# A schema as people write it, and two as pydantic writes them: a shared part is under $defs, and
# "#" is the schema itself. The two have another $defs under the same name.
PLACE = {"$ref": "#/$defs/Place"}
SCHEMAS = {
    "weather": takes("city days", {"enum": ["Rome", 1]}),
    "travel": takes("start goal", PLACE, **{"$defs": {"Place": {"enum": ["Mantua", "Padua"]}}}),
    "fight": takes("where", PLACE, **{"$defs": {"Place": {"enum": ["here", "there"]}}}),
}
ONE: dict[str, Any] = {"tool_choice": "required", "parallel_tool_calls": False}


def tool(name: Any, parameters: Any = None) -> dict[str, Any]:
    more = {} if parameters is None else {"parameters": parameters}
    return {"type": "function", "function": {"name": name, "description": f"for {name}"} | more}


TOOLS = [tool(*each) for each in SCHEMAS.items()]


# --- Text and calls -------------------------------------------------------------------------------


def tagged(name: str, arguments: Any, space: str = "") -> str:
    call = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>{space}{call}{space}</tool_call>"


def bare(name: str, arguments: Any) -> str:
    return json.dumps({"name": name, "parameters": arguments})


ROME = {"city": "Rome", "days": 1}
ODD = {"city": 'a </tool_call> <tool_call>{"}', "days": [{"é": None}]}
A_CALL, BARE = tagged("weather", ROME), bare("weather", ROME)
OPENED = A_CALL.removesuffix("</tool_call>")
ROMES = [("weather", ROME)]
TEXTS = {  # what the model writes, and all of it is text
    "hermes": [
        "Good morrow, cousin.", "<tool_call>{weather: Rome}</tool_call>", tagged("murder", ROME),
        '<tool_call>{"name": "weather", "arguments": {"days": NaN}}</tool_call>',
        tagged("weather", {"days": 5}).replace("5", "1e999"), tagged("weather", "Rome"),
        '<tool_call>{"arguments": {}}</tool_call>', "<tool_call>[1]</tool_call>", f"{OPENED} so",
        A_CALL.replace("</", "x</"), "a <b> <tool <tool_ca"],
    "llama3": [
        "Good morrow, cousin.", '{"a": 1}', BARE[:-1], f"Use {{x}}{BARE}",
        "if (a) {\n b }\n else {}\n{x}"],
}  # fmt: skip
REPLIES = {  # what the model writes, and the text and the calls in it
    "hermes": [
        (A_CALL, "", ROMES), (tagged("travel", {}, "\n"), "", [("travel", {})]),
        (f"Let me see. {A_CALL}", "Let me see.", ROMES), (OPENED, "", ROMES),
        (f"{A_CALL}\n{tagged('weather', {})}", "", [*ROMES, ("weather", {})]),
        (tagged("fight", ODD), "", [("fight", ODD)]),  # tags in a string
        (f"{OPENED}\n{A_CALL}", "", ROMES * 2), (f"<tool_call>{A_CALL}", "<tool_call>", ROMES),
        (f"<tool_call>O</tool_call>{A_CALL}", "<tool_call>O</tool_call>", ROMES),
        (f"a  <tool_call> {A_CALL}", "a  <tool_call>", ROMES)],
    "llama3": [
        (BARE, "", ROMES), (f"\n {BARE}\n", "", ROMES),
        (f"{BARE}; {bare('fight', ODD)}", "", [*ROMES, ("fight", ODD)]),
        (f"{BARE}, \n{BARE}{BARE} {{x}}", " {x}", ROMES * 3),
        (f"{bare('murder', ROME)}; {BARE}", bare("murder", ROME), ROMES)],
}  # fmt: skip
for form, texts in TEXTS.items():
    REPLIES[form] += [(text, text, []) for text in texts]
# What may stand for the arguments of a call, under the key of either form, and what it means.
ODDLY = [(', "KEY": "Rome"', ...), (', "KEY": 5', ...), (', "KEY": [["a", 1]]', ...),
         (', "KEY": "{\\"a\\": NaN}"', ...), ("", {}), (', "KEY": null', {}), (', "KEY": ""', {}),
         (', "KEY": " "', {}), (', "KEY": "null"', {}), (', "KEY": {"a": "\n\t"}', {"a": "\n\t"}),
         (f', "KEY": {json.dumps(json.dumps(ROME))}', ROME),
         (f', "KEY": {json.dumps(json.dumps(json.dumps(ROME)))}', ROME)]  # fmt: skip


def oddly(form: str) -> list:
    """Return replies with calls in odd forms, or cut within the last tag."""
    begin, end = ("<tool_call>", "</tool_call>") if form == "hermes" else ("", "")
    found = [(A_CALL[:length], "", ROMES) for length in range(-len(end), 0)]
    for (odd, means), key in itertools.product(ODDLY, ("arguments", "parameters")):
        text = f'{begin}{{"name": "weather"{odd.replace("KEY", key)}}}{end}'
        found.append((text, text, []) if means is ... else (text, "", [("weather", means)]))
    return found


def read(form: str, *texts: str, ended: bool = True, **more: Any) -> tuple[str, list]:
    """Read a reply, part by part."""
    reader = Reader(Tools(FORMS[form], SCHEMAS, True)._replace(**more))
    so_far = list(itertools.accumulate(texts))
    shown = [reader.read(text, ended and text is so_far[-1]) for text in so_far]
    return "".join(shown), [(each["name"], json.loads(each["arguments"])) for each in reader.calls]


@pytest.mark.parametrize("form", REPLIES)
def test_what_is_returned_only_grows(form):
    """Read replies whole and letter by letter, and compare the text and the calls found. Catches: a
    part of a tag sent as text; a call that turned out to be none, and was lost; calls written a
    little otherwise, or cut in the last tag, that came as text; a reply read again at each token,
    or searched for seconds; a stream that was silent."""
    for text, content, calls in REPLIES[form] + oddly(form):
        assert read(form, text) == read(form, *text) == (content, calls), text
        assert read(form, *text, schemas={}, ended=False) == (text, [])
        assert read(form, *text, is_parallel=False) == (content, calls[:1])
    # In 20,000 spaces before a word the search took seconds, and the server answered nobody.
    start, spaces = time.process_time(), " " * 20_000 + "a"
    assert read(form, spaces, ended=False) == (spaces, [])
    # At each token all of a reply was read again.
    reader, text = Reader(Tools(FORMS[form], SCHEMAS, True)), "a" * 300_000
    assert all(reader.read(text[:end], False) for end in range(200_000, 300_000, 50))
    assert time.process_time() - start < 0.5
    # A stream was silent from here on, until the reply had ended.
    text = {"llama3": r"\frac{1}{2} is a half", "hermes": "Write <tool_call> first"}[form]
    assert read(form, text, ended=False) == (text, [])


THINKS = [  # before the reply, the reply, its thought, its text, whether there is a call
    ("", f"<think>Shall I {A_CALL}?</think>Nay.", f"Shall I {A_CALL}?", "Nay.", False),
    ("", f"\n[THINK]Ay.[/THINK]{A_CALL}", "Ay.", "", True),
    ("", f"  No. <think>{A_CALL}", "", "  No. <think>", True),
    ("Hm. <think>", f"{A_CALL}</think>No. {A_CALL}", A_CALL, "No.", True),
    ("[THINK]a[/THINK]<think>Hm</think>No", f", no.<think> {A_CALL}", "", ", no.<think>", True),
    ("Hm. [THINK]\n", A_CALL, A_CALL, "", False),
]  # fmt: skip


def test_a_thought_is_no_call(monkeypatch):
    """Read replies that think first, whole and in pieces, and check what is thought, said and
    called. Catches: a call that was only considered and was made; a thought that the template had
    begun, or one in Mistral's marks, taken for the answer."""
    for before, made, thought, text, calls in THINKS:
        marks = "<think> </think>" if "<think>" in before + made else "[THINK] [/THINK]"
        with monkeypatch.context() as patch:
            ids = think_by(patch, TOKENIZER, *marks.split())(made)
            for at_once in (True, False):
                params = SamplingParams(max_tokens=len(ids))
                seq: Any = Sequence(TOKENIZER.encode("Hi" + before), params, CONFIG, TOKENIZER)
                mark_thoughts(TOKENIZER, [seq], {"continue_final_message": False})
                reader = Reader(Tools(FORMS["hermes"], SCHEMAS, True))
                choice = Choice(0, seq, "message", TOKENIZER, False, reader)
                got = {"reasoning_content": "", "content": ""}
                for i in ids:
                    seq.append(Token(i))
                    if seq.finish_reason or not at_once:
                        message = (choice.take_new() or {"message": {}})["message"]
                        got = {key: old + (message.get(key) or "") for key, old in got.items()}
                assert [*got.values()] == [thought, text] and len(reader.calls) == calls, made


def test_the_form_follows_from_the_template():
    """Look for the form of calls in pieces of templates of many models. Catches: calls looked for
    in another form than the model's; a form found in a template that shows something else."""
    for form, *templates in (
        ("hermes", r'<tool_call>\n{\"name\": <function-name>, \"arguments\": <args>}\n</tool_call>',
         """'<tool_call>' }}{{- '{"arguments": <args-dict>, "name": <function-name>}'"""),
        ("llama3", """tools }}{{ 'the format {"name": function name, "parameters": dictionary'"""),
        ("", "{{ messages }}", "tools <tool_call>\n<function=f>\n<parameter=x>",  # Qwen3-Coder
         "{{ tools }} <tool_call>{function-name}\n<arg_key>{{ tc.arguments }} parameters",  # GLM
         "tools }}{{ '<|tool_call>call:' + f['name'] }},parameters:{ }}<tool_call|>",  # Gemma
         "{% if tools %}<function=f>{parameters}</function>{{ tool | tojson }}",  # functionary
         "{% if tool.parameters %}to=functions {% for tool in tools %}",  # gpt-oss
         """{{ tools }}{"tool_name": "f", "parameters": {}}""",
         """{{ tools }}<function>{"name": f, "parameters": {}}[{"name": f, "parameters": {}}]""",
         """{{ tools }}{"name": "f", "about": "f", "parameters": {}}"""),
    ):  # fmt: skip
        assert all(form_in(template) is FORMS.get(form) for template in templates), form


# --- What a grammar allows ------------------------------------------------------------------------


def fields_of(choice: Any, schema: Any = None, *function: Any, **more: Any) -> dict[str, Any]:
    """Return what restrict makes of a body with a tool and, if there is a schema, a
    response_format."""
    fields = {"tools": [tool(*function) if function else TOOLS[0]], "tool_choice": choice}
    fields |= {"parallel_tool_calls": True, "response_format": {"type": "text"}} | more
    if schema:
        holder = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        fields |= {"response_format": holder, "structured_outputs": structure(holder)}
    restrict(fields, tools_of(fields, FORMS["hermes"]))
    return fields


def allows(structure: Any, text: str) -> bool:
    """Return whether a structure allows a text to its end."""
    matcher = make_matcher(TOKENIZER, CONFIG, structure)
    ids = TOKENIZER.encode(text, add_special=False)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def test_a_reply_is_calls_or_the_answer():
    """Check which texts the grammar of each tool_choice allows, with a response_format and without.
    Catches: a required call refused because of a response_format; one call again and again."""
    answer, call = '{"sunny": true}', tagged("weather", ROME, "\n")
    sunny = {"type": "object", "properties": {"sunny": {"type": "boolean"}}, "required": ["sunny"]}
    for choice, texts in (("auto", [answer]), ("required", [call]), ("none", [answer])):
        only = fields_of(choice, sunny)["structured_outputs"]
        allowed = [text for text in (answer, call, "Sure") if allows(only, text)]
        assert allowed == texts, choice
    for most in (8, 1):
        only = fields_of("required", parallel_tool_calls=most > 1)["structured_outputs"]
        assert allows(only, "\n".join([call] * most))
        assert not allows(only, "\n".join([call] * (most + 1)))
    fields = fields_of("auto")
    assert "structured_outputs" not in fields
    fields |= {"tool_choice": "required", "structured_outputs": {"regex": "a"}}
    restrict(fields, tools_of(fields, FORMS["hermes"]))
    assert allows(fields["structured_outputs"], call)


def test_what_a_schema_leaves_out():
    """Check which arguments the grammar allows where the schema of a function is incomplete.
    Catches: a call with invented arguments until max_tokens, as of a function without parameters; a
    tool refused for a keyword that llguidance lacks; a quote in a name."""
    days = {"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True}
    name, none = 'say "hi"', {"type": "object", "properties": {}, "additionalProperties": False}
    for parameters, arguments, is_allowed in (
        ({"properties": {"days": days}}, {"days": [1]}, True),
        ({"properties": {"days": days}}, {"days": [1], "x": 5}, False),
        *(row for nothing in (None, {}, {"type": "object"}, {"$defs": {}}, none)
          for row in ((nothing, {}, True), (nothing, {"x": 5}, False), (nothing, [], False))),
        ({"additionalProperties": {"type": "integer"}}, {"x": 5}, True),
        ({"anyOf": [{"properties": {"days": days}}]}, {"x": 5}, False),
    ):  # fmt: skip
        only = fields_of("required", None, name, parameters)["structured_outputs"]
        call = tagged(name, arguments, "\n")
        assert allows(only, call) == is_allowed, (parameters, arguments)
        if is_allowed:
            assert read("hermes", call, schemas={name: {}}) == ("", [(name, arguments)])


# --- Through OpenAI's client ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def server():
    """Start a server. The bundled model has never seen a call: a grammar makes it write what a test
    needs."""
    started = Local("--tool-format", "hermes", num_blocks=400, max_num_seqs=16,
                    max_num_batched_tokens=64)  # fmt: skip
    with started.openai() as client:
        started.client = client
        yield started
    started.settle()
    started.close()


class Reply(NamedTuple):
    text: str | None
    calls: list[list[str]]  # of each its name, arguments and id
    reason: str | None
    parts: list[str]  # pieces of the text that came one after the other, if it was streamed


def ask(server: Local, stream: bool = False, messages: Any = HI, **body: Any) -> list[Reply]:
    """Send a chat by openai's client. Returns the choices, joined from their pieces as a client
    would. A call comes whole, in a stream under its index."""
    answer = server.client.chat.completions.create(
        model="shakespeare", messages=messages, stream=stream,
        extra_body={"tools": TOOLS, "max_tokens": 700, "seed": 1} | body,
    )  # fmt: skip
    found: dict[int, Reply] = {}
    for choice in (choice for part in (answer if stream else [answer]) for choice in part.choices):
        new, old = choice.delta if stream else choice.message, found.get(choice.index)
        assert (new.role is None) == bool(old), "only the first delta has the role"
        assert not (old and old.reason), "something came after the finish_reason"
        text, calls, _, parts = old or Reply(None, [], None, [])
        if new.content:
            text = (text or "") + new.content
            parts.append(new.content)
        for each in new.tool_calls or []:
            assert each.type == "function" and each.id and (not stream or each.index == len(calls))
            calls.append([each.function.name, each.function.arguments, each.id])
        found[choice.index] = Reply(text, calls, choice.finish_reason, parts)
    assert all(reply.reason for reply in found.values()), "a choice has no finish_reason"
    return [found[i] for i in sorted(found)]


def says(text: str) -> dict[str, Any]:
    """Return the field that makes the model write this text."""
    return {"structured_outputs": {"choice": [text]}}


def check_calls(reply: Reply, *names: str, most: int = 1) -> list[str]:
    """Check that a reply is nothing but valid calls of these functions. Returns their names."""
    assert reply.text is None and reply.reason == "tool_calls", reply
    assert 1 <= len({made for *_, made in reply.calls}) == len(reply.calls) <= most, reply
    for name, arguments, _ in reply.calls:
        assert name in names, reply
        jsonschema.validate(json.loads(arguments), SCHEMAS[name])
    return [name for name, *_ in reply.calls]


@pytest.mark.parametrize("stream", [False, True])
def test_required(server: Local, monkeypatch: pytest.MonkeyPatch, stream: bool) -> None:
    """Ask for required calls, for one function by name and for a mix of calls and text, and check
    the calls. Catches: a reply without a call, as the bundled model has never seen JSON and would
    write none without a grammar; half of a call's JSON sent as a call, on which the client breaks;
    one form forced and the other read."""
    replies = ask(server, stream, **ONE, n=8, temperature=100)
    assert len({check_calls(reply, *SCHEMAS)[0] for reply in replies}) > 1, "the grammar has one"
    assert len({reply.calls[0][2] for reply in replies}) == 8
    several = ask(server, stream, tool_choice="required", n=8, temperature=100)
    assert max(len(check_calls(reply, *SCHEMAS, most=99)) for reply in several) > 1
    for name in SCHEMAS:  # a choice by name is one call, whatever is said
        choice = {"type": "function", "function": {"name": name}}
        check_calls(*ask(server, stream, tool_choice=choice), name)
    both = {"structured_outputs": {"choice": [A_CALL, "Nay."]}}
    mixed = ask(server, stream, n=8, **both, temperature=100)
    assert {bool(reply.calls) for reply in mixed} == {True, False}, "all choices are alike"
    for reply in mixed:
        assert (reply.text is None) == bool(reply.calls) == (reply.reason == "tool_calls")
    # The client gets half of a call's JSON, and breaks when it parses it.
    (cut,) = ask(server, stream, **ONE, max_tokens=12)
    assert cut.reason == "length" and cut.text and not cut.calls
    # The grammar forces the other form too, and the reply is read in it.
    monkeypatch.setattr(server.server.api, "form", FORMS["llama3"])
    check_calls(*ask(server, stream, **ONE), *SCHEMAS)
    (reply,) = ask(server, stream, **says(f"{BARE}; {BARE}"))
    assert check_calls(reply, "weather", most=2) == ["weather"] * 2


@pytest.mark.parametrize("stream", [False, True])
def test_calls_are_found_in_the_text(server: Local, stream: bool) -> None:
    """Make the model write each of REPLIES, by a grammar with only one choice, and compare the text
    and the calls that the client gets. (All at once is faster.) Catches: a call that is not found,
    or a text taken for one; more of a stream held back than what may become a tag."""
    with ThreadPoolExecutor(len(REPLIES["hermes"])) as pool:
        jobs = [
            pool.submit(ask, server, stream, **says(text), max_tokens=400)
            for text, *_ in REPLIES["hermes"]
        ]
    for (text, content, calls), job in zip(REPLIES["hermes"], jobs):
        (reply,) = job.result()
        got = [(name, json.loads(arguments)) for name, arguments, _ in reply.calls]
        assert (got, reply.text or "") == (calls, content), text
        assert reply.reason == ("tool_calls" if calls else "stop"), text
    # Each token's text comes at once; only what may become a tag is held back.
    text = "Good morrow, cousin. Is the day so young? 1 < 2, and <b> is no tag, nor <tools>."
    (reply,) = ask(server, stream, **says(text))
    assert reply.text == text and (len(reply.parts) > 12) == stream


# --- The conversation -----------------------------------------------------------------------------

TEMPLATE = """{% for m in messages %}{{ m.role }}:{{ m.content or '' }};
{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments | tojson }};
{% endfor %}{% endfor %}
{% if tools %}TOOLS{{ tools | tojson }}{% endif %}{{ tools is none }}"""

ARGUMENTS = {
    "null": {},
    "": {},
    " ": {},
    "{}": {},
    '{"a": 1}': {"a": 1},
    '"{\\"a\\": 1}"': {"a": 1},
}
HISTORIES = [  # an assistant's turn, and what the template above writes
    *((more, ";\n") for more in (
        {}, {"content": None}, {"content": None, "tool_calls": []}, {"tool_calls": None},
        {"reasoning_content": "Hm."}, {"content": []}, {"content": ""})),
    ({"content": None, "refusal": "Nay."}, "Nay.;\n"),
    *(({"tool_calls": [{"id": "1", "function": {"name": "f", "arguments": text}}]},
       f";\nf{json.dumps(means)};\n") for text, means in ARGUMENTS.items()),
]  # fmt: skip


def test_the_template_is_given_tools_and_calls(server: Local, monkeypatch) -> None:
    """Hold conversations with calls, and check each prompt by a template that prints what it is
    given. Catches: tools that were changed, or shown where there are none to call; arguments as
    OpenAI's JSON string, where a template expects an object and writes the JSON itself; a 400 for
    turns without text."""
    rendered, tokenizer = [], server.engine.tokenizer
    encode = tokenizer.encode

    def spy(text: str, *args: Any, **options: Any) -> list[int]:
        if text.startswith(("user:", "assistant:")):  # grammars are encoded too
            rendered.append(text)
        return encode(text, *args, **options)

    monkeypatch.setattr(tokenizer, "template", TEMPLATE)
    monkeypatch.setattr(tokenizer, "tool_template", TEMPLATE)
    monkeypatch.setattr(tokenizer, "encode", spy)
    create = server.client.chat.completions.create
    answer = create(model="shakespeare", messages=HI, tools=TOOLS, extra_body=says(A_CALL))
    message = answer.choices[0].message  # the client's own object, with a null content
    assert f"TOOLS{json.dumps(TOOLS)}" in rendered[0]
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sunny"}
    (reply,) = ask(server, messages=[*HI, message, result], max_tokens=300, **says("It is sunny."))
    assert (reply.text, reply.calls, reply.reason) == ("It is sunny.", [], "stop")
    assert f"weather{json.dumps(ROME)};" in rendered[1] and "tool:sunny;" in rendered[1]
    # Turns without text, as clients and models write them, got a 400.
    for more, shown in HISTORIES:
        turn, result["content"] = {"role": "assistant"} | more, None
        ask(server, messages=[turn, result, *HI], max_tokens=1, tools=[])
        assert rendered[-1].startswith(f"assistant:{shown}tool:;\nuser:hi;\n"), more
    wrong = message.model_dump(exclude_none=True)
    wrong["tool_calls"][0]["function"]["arguments"] = "{weather"
    server.post(CHAT, {"messages": [*HI, wrong]}).fails(400, "messages[1]")
    # Without tools, a tag is plain text.
    for more in ({"tool_choice": "none"}, {"tools": None}):
        for stream in (False, True):
            (reply,) = ask(server, stream, **says(A_CALL), **more)
            assert rendered[-1].endswith("True"), more
            assert (reply.text, reply.calls, reply.reason) == (A_CALL, [], "stop"), more
    ask(server, max_tokens=1, tools=[])
    assert rendered[-1].endswith("True")


# --- Errors ---------------------------------------------------------------------------------------

WRONG = [
    ({"tool_choice": {"type": "function", "function": {"name": "murder"}}}, "tool_choice"),
    ({"tool_choice": "sometimes"}, "tool_choice"),
    ({"tool_choice": {"type": "function"}}, "tool_choice"),
    *(({"tool_choice": choice, "tools": tools}, "tool_choice", "needs tools")
      for choice in ("required", {"type": "function", "function": {"name": "weather"}})
      for tools in ([], None)),
    ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": TOOLS}}},
     "tool_choice", "tool_choice[function]"),
    ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
     "structured_outputs"),
    ({"tools": TOOLS[0]}, "tools"), ({"tools": ["weather"]}, "tools"),
    ({"tools": [{"type": "function"}]}, "tools"), ({"tools": [tool(5)]}, "tools"),
    ({"tools": [tool("f", [1])]}, "tools"),
]  # fmt: skip


def test_a_wrong_request_is_refused(server: Local, local: Local) -> None:  # noqa: F811
    """Send each body of WRONG, and tools to a server that has no form for calls, and check the
    error. Catches: a traceback, or another field named; a model asked to call functions that its
    template had never told it of."""
    for fields, param, *words in WRONG:
        body = {"messages": HI, "tools": TOOLS, "max_tokens": 2} | fields
        message = server.post(CHAT, body).fails(400, param)
        assert all(word in message for word in words), message
    answer = local.post(CHAT, {"messages": HI, "tools": TOOLS})
    assert "--tool-format" in answer.fails(400, "tools")
