"""What OpenAI's clients send and get: a body becomes requests, and their outputs become JSON.

    completion = API(engine, "shakespeare", SamplingParams()).prepare(body, chat=False)
    for request in completion.requests:
        engine.submit(request)
    for part in completion.parts(engine.step):
        print(part)

This file does no input or output, so that it can stand behind any server; server.py is one. Every
field is checked before the engine gets anything. References:
platform.openai.com/docs/api-reference, and docs.vllm.ai for the fields that OpenAI does not have.
Read: API.prepare, translate, Completion, Choice.
"""

import re
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from around.api.function_calls import FORMS, NO_TOOLS, Tools, form_of, restrict, split_calls, tools_of
from sampling import BROKEN, Token
from scheduler import Engine, Job, Request
from around.settings import (
    JSON,
    VERSION,
    SamplingParams,
    SettingError,
    check,
    check_ids,
    supported,
    without_nulls,
)
from around.structured import structure, token_bytes
from around.folder.tokenizer import Detokenizer, Ids, Tokenizer, plain_turn


class Problem(Exception):
    """An error for the client: its HTTP status and message, the field that is wrong, and a code."""

    def __init__(self, status: int, message: str, param: Any = None, code: Any = None) -> None:
        self.status = status
        self.json = {
            "error": dict(
                message=message,
                type="server_error" if status >= 500 else "invalid_request_error",
                param=param,
                code=code,
            )
        }


def demand(condition: object, *problem: Any) -> None:
    """Raise a Problem unless the condition holds."""
    if not condition:
        raise Problem(*problem)


# --- Requests in ----------------------------------------------------------------------------------


class API:
    """What is served, and how a body becomes requests for it.

    Attributes:
        model: as /v1/models lists it.
        defaults: the sampling settings that a body may leave out.
        form: how the model writes function calls; None: its chat template shows none that is read.
    """

    def __init__(
        self, engine: Engine, name: str, defaults: SamplingParams, tool_format: str = "auto"
    ) -> None:
        """Args: tool_format: a name out of function_calls.FORMS; auto: see form_of."""
        assert engine.tokenizer
        self.engine = engine
        self.tokenizer = engine.tokenizer
        self.name = name
        self.model = dict(
            id=name,
            object="model",
            owned_by="kilolm",
            created=int(time.time()),
            max_model_len=engine.max_seq_len,
        )
        self.defaults = defaults
        if tool_format == "auto":
            tool_format = form_of(self.tokenizer.tool_template)
        self.form = FORMS.get(tool_format)

    def prepare(self, body: JSON, chat: bool) -> "Completion":
        """Check a body, and make a Request for each prompt. They are not submitted.

        Raises:
            Problem: 400 with the field that is wrong, or 404 for another model.
        """
        given = without_nulls(body)
        if given.get("model", self.name) != self.name:
            raise Problem(404, f"the model here is {self.name!r}", "model", "model_not_found")
        source = "messages" if chat else "prompt"
        try:
            fields = translate(given, chat)
            tools = tools_of(fields, self.form) if chat else NO_TOOLS
            restrict(fields, tools)  # may set structured_outputs
            params = self.sampling_params(fields, chat)
            prompts = [self.chat_ids(fields, tools)] if chat else split_prompts(fields)
            check("n", len(prompts) * params.n, int, 1, 256)  # for all prompts together
            requests = [self.request(prompt, params, fields, source) for prompt in prompts]
            return Completion(self, fields, requests, tools, chat)
        except (ValueError, RecursionError) as error:
            # The error has the engine's name of a field. A client gets the body's name for it, or
            # `source` if the body has no such field.
            field = getattr(error, "field", "")
            alias = ALIASES.get(field, "")
            if alias in given:
                field = alias
            raise Problem(400, str(error)[:500], field if field in given else source) from None

    def request(self, prompt: Any, params: SamplingParams, fields: JSON, source: str) -> Request:
        """Make a request for one prompt, a text or ids, if it and the output fit."""
        check("prompt", prompt, str | list)
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        longest = self.engine.max_seq_len
        asked = len(ids) + fields.get("max_tokens", 1)  # at least one token has to fit
        demand(
            asked <= longest,
            400,
            # Clients search for this wording, which is OpenAI's.
            f"This model's maximum context length is {longest} tokens. However, you requested "
            f"{asked} tokens, {len(ids)} of them in the prompt: ask for less.",
            source,
            "context_length_exceeded",
        )
        return self.engine.prepare(
            ids, params, priority=fields.get("priority", 0), cache_salt=fields.get("cache_salt")
        )

    def sampling_params(self, fields: JSON, chat: bool) -> SamplingParams:
        """Return the sampling settings of a request. Omitted ones come from the checkpoint, except
        max_tokens: it is 16 in a completion, and in a chat only the context limits it."""
        # Checked here, because this error shows up to nine keys that are no ids; SamplingParams
        # would name only one.
        check_ids("logit_bias", fields["logit_bias"], self.engine.config.vocab_size)
        defaults = vars(self.defaults) | dict(max_tokens=self.engine.max_seq_len if chat else 16)
        params = SamplingParams(**{name: fields.get(name, defaults[name]) for name in defaults})
        # A structure ends by itself, and may contain the template's stop strings.
        if chat and not params.structured_outputs:
            params = params.with_stop(self.tokenizer.chat_stop)
        return params

    def chat_ids(self, fields: JSON, tools: Tools) -> Ids:
        """Render the messages of a chat and encode them."""
        messages = fields["messages"]
        demand(messages, 400, "messages must have at least one message", "messages")
        for i, message in enumerate(messages):
            check_message(message, f"messages[{i}]")
        goes_on = fields["continue_final_message"]
        options = dict(
            add_generation_prompt=fields["add_generation_prompt"] and not goes_on,
            tools=fields["tools"] if tools.schemas else None,
        )
        options |= fields["chat_template_kwargs"]
        return self.tokenizer.encode_chat(messages, goes_on, **options)


# The engine's name of a setting -> the body's name for it, where they differ.
ALIASES = dict(max_tokens="max_completion_tokens", logprobs="top_logprobs",
               structured_outputs="response_format")  # fmt: skip
# The fields' defaults. A value of another type is refused.
DEFAULTS: JSON = dict(
    messages=[], n=1, stream=False, stream_options={}, echo=False, logit_bias={},
    response_format={"type": "text"}, reasoning_format="auto", chat_template_kwargs={},
    continue_final_message=False, add_generation_prompt=True, tools=[],
    parallel_tool_calls=True)  # fmt: skip
# Fields that would change the answer, but are not supported. Those of REFUSED must be left out, and
# the others may have only the value that is given here. Fields that this file does not mention,
# such as `user` or `store`, are ignored, even if they would change the answer.
REFUSED = """audio grammar json_schema n_predict prompt_logprobs chat_template documents
    allowed_token_ids guided_json guided_regex guided_choice guided_grammar"""
UNSUPPORTED = dict.fromkeys(REFUSED.split()) | dict(
    functions=[], suffix="", bad_words=[], modalities=["text"],
    use_beam_search=False, skip_special_tokens=True, include_stop_str_in_output=False,
    add_special_tokens=True, return_token_ids=False)  # fmt: skip


def translate(given: JSON, chat: bool) -> JSON:
    """Return the fields of a body with their defaults, and add what the rest of this file reads:

        max_tokens, logprobs, structured_outputs   from fields that have other names in OpenAI's API
        include_usage, continuous_usage_stats      out of stream_options
        prompt_logprobs                            equals `echo`, and Choice shows the prompt by it.
                                                   If logprobs are asked for, the prompt gets them
                                                   too. A body that has this field is refused
        hidden                                     true with echo if max_tokens is 0: nothing is to
                                                   be generated. The engine has to generate one
                                                   token, which is not shown

    Raises:
        SettingError: a field has the wrong type, or asks for what is not supported.
    """
    fields = DEFAULTS | given
    for name, default in DEFAULTS.items():
        check(name, fields[name], type(default))
    for name in ("include_usage", "continuous_usage_stats"):
        value = fields["stream_options"].get(name)
        fields[name] = value is not None and check(f"stream_options[{name}]", value, bool)
    if fields.get("function_call") == "none":  # OpenAI's older tool_choice
        fields.setdefault("tool_choice", "none")
    check_supported(fields, chat)
    if "max_completion_tokens" in fields:
        fields["max_tokens"] = fields["max_completion_tokens"]
    if fields["echo"]:
        # Checked here, because max_tokens: false would count as 0 below.
        check("max_tokens", fields.get("max_tokens"), int | None, 0)
    fields["prompt_logprobs"] = fields["echo"]
    fields["hidden"] = fields["echo"] and fields.get("max_tokens") == 0
    if fields["hidden"]:
        fields["max_tokens"] = 1
    if chat:  # here `logprobs` is a bool, and `top_logprobs` the number
        num_top = fields.get("top_logprobs", 0)
        is_scored = check("logprobs", fields.pop("logprobs", False), bool)
        if is_scored:
            fields["logprobs"] = num_top
        elif num_top:
            raise SettingError("top_logprobs", "needs logprobs: true")
        if fields["continue_final_message"] and given.get("add_generation_prompt"):
            raise SettingError("add_generation_prompt", "excludes continue_final_message: true")
    # What is no id stays a text, which check_ids refuses.
    fields["logit_bias"] = {
        int(i) if re.fullmatch("0|[1-9][0-9]{,8}", i) else i: bias
        for i, bias in fields["logit_bias"].items()
    }
    schema = structure(fields["response_format"])
    if schema:
        if "structured_outputs" in fields:
            raise SettingError("structured_outputs", "excludes response_format")
        fields["structured_outputs"] = schema
    return fields


def check_supported(fields: JSON, chat: bool) -> None:
    """Raise SettingError if a field asks for what is not supported."""
    allowed = UNSUPPORTED | dict(best_of=fields["n"])
    if not fields["stream"]:
        allowed["stream_options"] = {}
    if chat:
        # The chat template writes the special tokens.
        allowed |= dict(echo=False, add_special_tokens=False)
    else:
        allowed |= dict(tools=[], tool_choice="auto")
    # With the choice "none", tools count as left out.
    if fields.get("tool_choice") == "none":
        fields = fields | dict(tools=[], functions=[], tool_choice="auto")
    for name, value in fields.items():
        if name in allowed:
            supported(name, value, allowed[name])
    supported("reasoning_format", fields["reasoning_format"], "auto", "deepseek", "none")


def split_prompts(fields: JSON) -> list:
    """Return the prompts of a completion: its field `prompt` is a single prompt (a text or a list
    of ids) or a list of prompts."""
    prompt = fields.get("prompt", "")
    if isinstance(prompt, list) and not all(type(i) is int for i in prompt):
        return prompt
    return [prompt]


def check_message(message: JSON, name: str) -> None:
    """Check a chat's message. If its content is a list of parts, replace it by their joined texts.

    Raises:
        Problem: the message has another form than OpenAI's.
    """
    try:
        check("role", message.get("role"), str)
        text = message.get("content")
        if isinstance(text, list):
            for part in text:
                supported("content of type", part.get("type", "text"), "text")
            text = "\n".join(part["text"] for part in text)
        check("content", text, str | None if message.get("tool_calls") else str)
        message["content"] = text
        plain_turn(message)  # encode_chat does it too; here the error names the message
    except Exception as error:  # of any kind, as values have any type
        raise Problem(400, f"role, content or tool_calls are wrong: {error}", name) from None


# --- Answers out ----------------------------------------------------------------------------------

THINK = "<think>"
THINK_END = "</think>"
NO_THOUGHT = THINK + THINK_END  # put in front of an output, it makes all of it the answer
# Where a choice has its text -> the `object` of the answer.
OBJECTS = dict(text="text_completion", message="chat.completion", delta="chat.completion.chunk")


class Completion:
    """The answer to one body: what its requests generate, as OpenAI's objects.

    Attributes:
        requests: one for each prompt.
        firsts: the first output of each request.
        choices: the outputs of all requests.
        stream: whether the answer is sent in chunks.
        base: what all chunks have in common.
    """

    def __init__(
        self, api: API, fields: JSON, requests: list[Request], tools: Tools, chat: bool
    ) -> None:
        self.requests = requests
        self.fields = fields
        self.stream = fields["stream"]
        key = ("delta" if self.stream else "message") if chat else "text"
        uid = ("chatcmpl-" if chat else "cmpl-") + secrets.token_hex(12)
        self.base = dict(
            id=uid,
            object=OBJECTS[key],
            created=int(time.time()),
            model=api.name,
            system_fingerprint=VERSION,
        )
        for i, request in enumerate(requests):
            request.id = f"{uid}-{i}"
        self.firsts = [request.outputs[0] for request in requests]
        prefix = NO_THOUGHT
        if chat and fields["reasoning_format"] != "none":
            prefix = thought_prefix(api.tokenizer, self.firsts[0])
        jobs = [job for request in requests for job in request.outputs]
        self.choices = [
            Choice(i, job, key, api.tokenizer, prefix, tools, fields["hidden"])
            for i, job in enumerate(jobs)
        ]

    def parts(self, wait: Callable) -> Iterator[JSON]:
        """Yield the whole answer, or the chunks of a stream as they come.

        Args:
            wait: returns when the engine has made progress.

        Raises:
            Problem: a sequence ended with an error.
        """
        finished = False
        while not finished:
            wait()
            # Read this before the choices. In the other order, the last part of an output could
            # come in between, and would never be sent.
            finished = all(request.finished for request in self.requests)
            if self.stream:
                for choice in self.choices:
                    new = choice.take_new()
                    if new:
                        for part in events_of(new):
                            yield self.json([part], self.fields["continuous_usage_stats"])
        if not self.stream:
            yield self.json([choice.take_new() for choice in self.choices], True)
        elif self.fields["include_usage"]:
            yield self.json([], True)

    def json(self, choices: list, with_usage: bool) -> JSON:
        usage = {"usage": self.usage()} if with_usage else {}
        return self.base | {"choices": choices} | usage

    def usage(self) -> JSON:
        """Count the tokens so far."""
        num_prompt = sum(job.prompt_len for job in self.firsts)
        num_new = 0 if self.fields["hidden"] else sum(len(each.job.tokens) for each in self.choices)
        return dict(
            prompt_tokens=num_prompt,
            completion_tokens=num_new,
            total_tokens=num_prompt + num_new,
            prompt_tokens_details=dict(cached_tokens=sum(job.cached for job in self.firsts)),
        )


@dataclass
class Choice:
    """One sequence of the answer, as a `choice` object of OpenAI's API, and how much of it has been
    sent.

    Attributes:
        key: where the text goes: "text" for a completion, "message" for a chat, "delta" for a chat
            that is streamed.
        prefix: what split_thought needs in front of the output; see thought_prefix.
        tools: what the reply may call.
        hidden: whether only the prompt is shown.
        taken: how many characters of the thought, characters of the answer, tokens with
            log-probabilities, and calls have been taken; None: nothing has been taken yet.
        offset: characters in the texts of the tokens that have been taken.
        ended: whether the last part has been taken.
    """

    index: int
    job: Job
    key: str
    tokenizer: Tokenizer
    prefix: str
    tools: Tools
    hidden: bool
    taken: tuple[int, int, int, int] | None = None
    offset: int = 0
    ended: bool = False

    def take_new(self) -> JSON | None:
        """Return what has been generated since the last call, or None if that is nothing.

        Raises:
            Problem: the sequence ended with an error.
        """
        job = self.job
        reason = job.finish_reason  # read first, because nothing changes after it is set
        self.check_reason(reason)
        # 1) read the whole output
        is_scored = job.params.logprobs is not None
        # The tokens are copied, because meanwhile the engine's thread may append to them.
        tokens = job.tokens[:] if is_scored else []
        output = job.text
        if self.hidden:  # only the prompt is shown
            tokens = []
            output = ""
            reason = reason and "length"  # even if the token that is not shown is EOS
        thought, text = split_thought(self.prefix + output)
        text, calls = split_calls(text, self.tools, bool(reason))
        has_called = calls and reason == "stop"
        # 2) leave out what has been taken
        is_first = self.taken is None
        thought_start, start, token_start, call_start = self.taken or (0, 0, 0, 0)
        taken = len(thought), len(text), len(tokens), len(calls)
        thought = thought[thought_start:]
        text = text[start:]
        tokens = tokens[token_start:]
        calls = calls[call_start:]
        if self.ended or not (reason or thought or text or tokens or calls):
            return None
        self.taken = taken
        self.ended = bool(reason)
        if is_first and job.params.prompt_logprobs:  # the body has `echo`; see translate
            prompt, prompt_tokens = self.echo()
            text = prompt + text
            tokens = prompt_tokens + tokens
        # 3) write it in OpenAI's form
        message: JSON = dict(role="assistant", refusal=None) if is_first else {}
        if thought:
            message["reasoning_content"] = thought
        message["content"] = text
        if calls:
            message["content"] = text or None
            message["tool_calls"] = self.tool_calls(calls, call_start)
        return {
            "index": self.index,
            self.key: text if self.key == "text" else message,
            "logprobs": self.logprobs(tokens) if is_scored else None,
            "finish_reason": "tool_calls" if has_called else reason,
        }

    def tool_calls(self, calls: list[JSON], start: int) -> list[JSON]:
        """Return new calls in OpenAI's form; in a stream, with their indices, from `start` on."""
        made = []
        for i, call in enumerate(calls, start):
            index = {"index": i} if self.key == "delta" else {}
            uid = f"call_{secrets.token_hex(12)}"
            made.append(index | dict(id=uid, type="function", function=call))
        return made

    def check_reason(self, reason: str | None) -> None:
        """Raise a Problem if the sequence ended with an error."""
        demand(reason != "abort", 500, "a step of the engine failed")
        if reason == "error":  # its grammar became too complex, or the model produced NaN logits
            complaint = self.job.matcher and self.job.matcher.get_error()
            raise Problem(400 if complaint else 500, (complaint or BROKEN)[:100])

    def echo(self) -> tuple[str, list[Token]]:
        """Return the prompt's text and, if it is scored, its tokens with their texts."""
        job = self.job
        ids = job.ids[: job.prompt_len]
        # The ids that the tokenizer puts in front, such as BOS, show no text. A prompt that was
        # given as ids may lack them.
        start = len(self.tokenizer.prefix)
        if ids[:start] != self.tokenizer.prefix:
            start = 0
        detokenizer = Detokenizer(self.tokenizer, [], show_special=True)
        texts = [""] * start + [detokenizer.push(i) for i in ids[start:]]
        texts[-1] += detokenizer.push(None, last=True)  # an incomplete character, as U+FFFD
        scored = zip(job.request.prompt_tokens, texts)
        return "".join(texts), [token._replace(text=text) for token, text in scored]

    def logprobs(self, tokens: list[Token]) -> JSON:
        """Return log-probabilities in the form of a completion or of a chat.

        The texts of the sampled tokens, joined, are the whole output as it was written: also the
        marks around the thought, the calls, and a stop string, which the choice's text leaves out.
        The other likely tokens have the text that they have in the vocabulary.
        """

        # The entry of id i, in the place where `token` was sampled. The entry of the sampled token
        # itself has the text that it added to the output, which can differ from the vocabulary's.
        def entry(token: Token, i: int, value: float | None) -> JSON:
            words = token_bytes(self.tokenizer)
            word = words[i] if i < len(words) else b""  # V may be padded
            text = token.text if i == token.id else word.decode(errors="replace")
            return dict(token=text, logprob=value, bytes=list(word))

        rows = []  # the sampled token, and the likeliest ones in its place
        for token in tokens:
            top = [entry(token, i, value) for i, value in token.top]
            rows.append((entry(token, token.id, token.logprob), top))
        if self.key != "text":
            return {"content": [sampled | {"top_logprobs": top} for sampled, top in rows]}
        likely: list[JSON | None] = []
        for sampled, top in rows:
            # The sampled token is in here even if it is unlikely, as in vLLM.
            values = {each["token"]: each["logprob"] for each in (*top, sampled)}
            is_scored = sampled["logprob"] is not None  # all but the first token of a prompt
            likely.append(values if is_scored else None)
        texts = [token.text for token in tokens]
        offsets = [*accumulate(map(len, texts), initial=self.offset)]
        self.offset = offsets[-1]
        return dict(
            tokens=texts,
            text_offset=offsets[:-1],
            token_logprobs=[token.logprob for token in tokens],
            top_logprobs=likely,
        )


def events_of(part: JSON) -> list[JSON]:
    """Return a new part of a choice as the events of a stream. A part without calls is one event.
    One with calls becomes two, as clients expect: the calls' names, then their arguments.

    Example: {"name": "f", "arguments": "{}"} is sent as {"name": "f", "arguments": ""}, and then as
        {"arguments": "{}"}
    """
    calls = part.get("delta", {}).get("tool_calls")
    if not calls:
        return [part]
    names = [call | {"function": call["function"] | {"arguments": ""}} for call in calls]
    arguments = [
        {"index": call["index"], "function": {"arguments": call["function"]["arguments"]}}
        for call in calls
    ]
    return [
        part | {"delta": part["delta"] | {"tool_calls": names}, "finish_reason": None},
        part | {"delta": {"tool_calls": arguments}, "logprobs": None},
    ]


def thought_prefix(tokenizer: Tokenizer, job: Job) -> str:
    """Return what to put in front of a sequence's output for split_thought.

    Some templates begin the thought, so that the output lacks the mark "<think>". Structured output
    and models without a token for that mark have no thoughts.
    """
    has_mark = len(tokenizer.encode(THINK, add_special=False)) == 1
    if job.params.structured_outputs or not has_mark:
        return NO_THOUGHT
    return THINK if tokenizer.decode(job.ids[-16:]).rstrip().endswith(THINK) else ""


def split_thought(text: str) -> tuple[str, str]:
    """Split a reply into the thought and the answer.

    In models that think, each mark is one token, so it arrives whole. One case is different: if a
    stop string begins with ">", the last character of a mark is held back at first. Then a stream
    sends "<think" as part of the answer, or "</think" as part of the thought.

    Example: "<think>Hm, </think>Yes" -> "Hm, ", "Yes"; and "Yes" -> "", "Yes"
    """
    before, _, rest = text.partition(THINK)  # without the mark, `before` is all of the text
    if before.strip():
        return "", text
    thought, _, answer = rest.partition(THINK_END)
    return thought, before + answer  # white space, which may have been sent already, stays
