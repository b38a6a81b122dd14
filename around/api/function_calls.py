"""Function calls: the tools that a chat may use, and the calls in what a model writes.

A chat template tells the model which functions there are, and the model was trained to answer with
calls in the form that its template shows. A call is text like any other. So this file reads the
whole reply so far, and splits it into text and calls; whatever is no valid call stays text. Where a
call is required, a grammar allows nothing else (structured.py). This file knows neither the engine
nor HTTP. Papers: Schick et al. 2023 (Toolformer, arXiv:2302.04761), Patil et al. 2023 (Gorilla,
arXiv:2305.15334). Read: FORMS, split_calls, restrict.

    hermes   I look. <tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>
    llama3   {"name": "weather", "parameters": {"city": "Rome"}}
"""

import json
import re
from typing import NamedTuple

from around.settings import JSON, SettingError, check, choose, supported
from around.structured import closed, structure


class Form(NamedTuple):
    """How a model writes its calls.

    Attributes:
        arguments: the key under which a call has its arguments.
        begin, end: what it writes around a call.
        between: what it writes between two calls.
        tag: matches what stands before a call. At the end of the text it also matches an incomplete
            tag, because the rest may follow.
        close: matches what stands after a call.
    """

    arguments: str
    begin: str
    end: str
    between: str
    tag: re.Pattern
    close: re.Pattern


# A run of white space, or nothing. The lookbehind lets the run begin only at its first space. If
# the search tried each of 4,000 spaces, it would take 0.3 s.
RUN = r"(?:(?<!\s)\s+)?"
OPEN = "<tool_call>"
# The beginnings of OPEN, the longest first: the text so far can end within it.
CUT = "|".join(OPEN[:length] for length in range(len(OPEN) - 1, 0, -1))
FORMS = dict(
    # Qwen, Hermes and SmolLM3.
    hermes=Form(
        arguments="arguments",
        begin=f"{OPEN}\n",
        end="\n</tool_call>",
        between="\n",
        # White space, if any, then OPEN before a brace; or, at the end of the text, white space, if
        # any, then OPEN, a beginning of OPEN, or nothing. So there is always a match.
        tag=re.compile(rf"{RUN}(?:{OPEN}\s*(?=\{{|\Z)|(?:{CUT})?\Z)"),
        close=re.compile(r"\s*</tool_call>"),
    ),
    # Llama 3. A call is an object with no mark around it, so its tag is only the white space and
    # semicolons before it, if any. The reply is nothing but calls: the first stands at the
    # beginning of the text, and each other one follows the brace of the one before.
    llama3=Form(
        arguments="parameters",
        begin="",
        end="",
        between="; ",
        tag=re.compile(r"(?:\A|(?<=\}))[\s;]*(?=\{|\Z)"),
        close=re.compile(""),
    ),
)
END = re.compile(r"\s*\Z")  # matches where nothing but white space is left
DECODER = json.JSONDecoder(parse_constant=int)  # int() refuses NaN and Infinity
# How a required call is written. Without limits, a weak model writes white space for ever. Keywords
# that llguidance lacks have no effect.
WRITTEN = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": ",
           "lenient": True}  # fmt: skip


def form_of(template: str) -> str:
    """Return the name of the form that a chat template shows its model; "" if it knows no tools, or
    has another form, such as Qwen3-Coder's <tool_call><function=f>."""
    if OPEN in template:
        return "" if "<function=" in template else "hermes"
    return "llama3" if "tools" in template and "parameters" in template else ""


# --- What a request may call ----------------------------------------------------------------------


class Tools(NamedTuple):
    """What a reply may call. Without schemas, it may call nothing, and its form is not used.

    Attributes:
        form: how the calls are written.
        schemas: each function's name -> the JSON schema of its arguments.
        is_parallel: whether there may be several calls in a reply. If not, the first one counts.
    """

    form: Form
    schemas: dict[str, JSON]
    is_parallel: bool


NO_TOOLS = Tools(FORMS["hermes"], {}, True)


def tools_of(fields: JSON, form: Form | None) -> Tools:
    """Return what a reply may call, by a chat's `tools`, `tool_choice` and `parallel_tool_calls`.

    Raises:
        SettingError: `tools` has another form than OpenAI's, or the model has no form for calls.
    """
    schemas = {}
    for i, tool in enumerate(fields["tools"]):
        check(f"tools[{i}]", tool, dict)
        at = f"tools[{i}].function"
        function = check(at, tool.get("function"), dict)
        name = check(f"{at}.name", function.get("name"), str)
        schemas[name] = check(f"{at}.parameters", function.get("parameters") or {}, dict)
    if not schemas or fields.get("tool_choice") == "none":
        return NO_TOOLS
    if not form:
        raise SettingError("tools", "need a template whose calls can be read: see --tool-format")
    return Tools(form, schemas, fields["parallel_tool_calls"])


def restrict(fields: JSON, tools: Tools) -> None:
    """Set `structured_outputs` in `fields` to a grammar where there must be one: if `tool_choice`
    requires a call, it allows nothing but calls, whatever structure is asked for; if a reply may be
    calls or an answer in `response_format`, it allows these two. For a required call vLLM does the
    same; in the other case it forbids calls, and OpenAI allows them.

    Raises:
        SettingError: the choice is unknown, or names a function that is not in `tools`.
    """
    schemas = tools.schemas
    choice = fields.get("tool_choice", "auto")
    if isinstance(choice, dict):  # one function by name
        name = check("tool_choice", choice.get("function"), dict).get("name")
        schemas = {name: choose("tool_choice", name, schemas)}
        choice = "required"
        tools = tools._replace(is_parallel=False)
    known = ("auto", "none", "required") if schemas else ("auto", "none")
    supported("tool_choice", choice, *known)
    answer = None if choice == "required" else structure(fields["response_format"]).get("json")
    if choice == "required" or (schemas and answer):
        grammar = grammar_of(tools._replace(schemas=schemas), answer)
        fields["structured_outputs"] = {"grammar": grammar}


def grammar_of(tools: Tools, answer: JSON | None) -> str:
    """Return a grammar that allows nothing but calls; or, if `answer` is a schema, JSON of it."""
    form = tools.form
    calls = []
    for i, (name, schema) in enumerate(tools.schemas.items()):
        # With an $id of its own, "#/$defs" in a function's schema means the $defs of that schema,
        # and not those of the whole schema.
        arguments = {"$id": f"call:{i}"} | closed(schema) | {"type": "object"}
        calls.append(
            dict(
                type="object",
                properties={"name": {"const": name}, form.arguments: arguments},
                required=["name", form.arguments],
                additionalProperties=False,
            )
        )
    begin, end, between = map(json.dumps, (form.begin, form.end, form.between))
    more = f"({between} call)*" if tools.is_parallel else ""
    any_of = json.dumps({"anyOf": calls, "x-guidance": WRITTEN})
    rules = f"calls: call {more}\ncall: {begin} object {end}\nobject: %json {any_of}\n"
    if answer is None:
        return rules + "start: calls"
    return rules + f"start: calls | answer\nanswer: %json {json.dumps(closed(answer))}"


# --- What a reply calls ---------------------------------------------------------------------------


def split_calls(text: str, tools: Tools, ended: bool) -> tuple[str, list[JSON]]:
    """Split a reply into its text and its calls.

    Until the reply has ended, this leaves out text that may still become a call, and white space
    that may stand before a call. If text begins like a call but cannot be read as one, it may be
    incomplete or wrong, and only the end of the reply tells which. Until then, this text and all
    that follows it are left out. So what this returns only grows with the reply.

    Args:
        text: the reply so far.
        tools: the functions that it may call. A call of another one is text.
        ended: whether the reply is complete.

    Returns:
        The text, less the white space directly before a call and, if there are calls, at the end;
        and each call's name and arguments (as JSON).

    Example:
        'Look: <tool_call>{"name": "f", "arguments": {}}</tool_call>' -> "Look:" and a call
        'Look: <tool_call>{"name": "f",' -> "Look:" and no call; if it has ended, the whole text
    """
    # In llama3, whose calls have no mark, a reply that does not begin with a brace has no calls.
    is_text = not tools.form.begin and text.lstrip(" \t\r\n;")[:1] not in ("", "{")
    if is_text or not tools.schemas:
        return text, []
    # The search finds a tag before a brace or, at the end of the text, a tag that may be incomplete
    # or even empty. In hermes it always finds one of the two. In llama3 it may find none.
    find = tools.form.tag.search
    shown = ""
    calls: list[JSON] = []
    start = 0  # all before it has been split
    tag = find(text)
    while tag and tag.end() < len(text):
        call, end = read_call(text, tag.end(), tools, ended)
        if call:
            shown += text[start : tag.start()]
            calls.append(call)
        elif ended:
            shown += text[start:end]  # this is no call, so the tag is text
        else:
            break  # no call yet, or never one: only the end of the reply will tell
        start = end
        # llama3's tag can be empty. A search from its own place would find it again, for ever.
        tag = find(text, max(end, tag.start() + 1))
    if ended or not tag:
        shown += text[start:]
    else:  # hold back what may become a call: it is not complete, or its tag is at the end
        shown += text[start : tag.start()]
    if calls:
        shown = shown.rstrip()
    return shown, calls if tools.is_parallel else calls[:1]


def read_call(text: str, start: int, tools: Tools, ended: bool) -> tuple[JSON | None, int]:
    """Read the call that begins at `start`. At the end of a reply its closing tag may be missing:
    small models leave it out, and a stop string cuts it off.

    Returns:
        Its name and arguments, and where it ends; None and `start` if there is no valid call.
    """
    try:
        call, end = DECODER.raw_decode(text, start)
        close = tools.form.close.match(text, end) or (ended and END.match(text, end))
        arguments = call[tools.form.arguments]
        if close and call["name"] in tools.schemas and isinstance(arguments, dict):
            # A number that is too large has become Infinity, which is no JSON.
            arguments = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
            return dict(name=call["name"], arguments=arguments), close.end()
    except (ValueError, TypeError, KeyError, RecursionError):
        pass
    return None, start
