"""What requests generate becomes OpenAI's JSON, whole or in chunks. Read: Completion, Choice."""

import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from around.api.function_calls import Reader, Tools
from around.folder import Detokenizer, Tokenizer, plain_turn
from around.settings import JSON, VERSION
from sampling import BROKEN, Token
from scheduler import EngineSequence, Request


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


# What models write around a thought.
MARKS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))
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
        self, api: Any, fields: JSON, requests: list[Request], tools: Tools, chat: bool
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
        self.firsts = [request.outputs[0] for request in requests]
        seqs = [seq for request in requests for seq in request.outputs]
        if chat:
            mark_thoughts(api.tokenizer, seqs, fields)
        self.choices = [
            Choice(i, seq, key, api.tokenizer, fields["echo"], Reader(tools))
            for i, seq in enumerate(seqs)
        ]

    def parts(self, wait: Callable) -> Iterator[JSON]:
        """Yield the whole answer, or the chunks of a stream as they come; and {} after each `wait`
        in which nothing has come that can be sent.

        Args:
            wait: returns when the engine has made progress, or some time has passed.

        Raises:
            Problem: a sequence ended with an error.
        """
        finished = False
        while not finished:
            wait()
            # Read this before the choices. In the other order, the last part of an output could
            # come in between, and would never be sent.
            finished = all(request.finished for request in self.requests)
            news = [choice.take_new() for choice in self.choices] if self.stream else []
            yield from [self.base | dict(choices=[new]) for new in news if new] or [{}]
        rest = [] if self.stream else [choice.take_new() for choice in self.choices]
        if self.fields["include_usage"]:
            yield self.base | dict(choices=rest, usage=self.usage())

    def usage(self) -> JSON:
        """Count the tokens so far."""
        num_prompt = sum(seq.prompt_len for seq in self.firsts)
        num_new = sum(len(each.seq.tokens) for each in self.choices)
        return dict(
            prompt_tokens=num_prompt,
            completion_tokens=num_new,
            total_tokens=num_prompt + num_new,
            prompt_tokens_details=dict(
                cached_tokens=sum(max(0, seq.cached) for seq in self.firsts)
            ),
        )

    def summary(self, **line: Any) -> JSON:
        """Add to a line of the log what it says of a completion: no word of a prompt or answer."""
        made, *later = self.firsts[0].times
        return (
            line
            | self.usage()
            | dict(
                first_token=round(later[0] - made, 3) if later else None,
                id=self.base["id"],
                user=str(self.fields.get("user", ""))[:100],
            )
        )


@dataclass
class Choice:
    """One sequence of the answer, as a `choice` object of OpenAI's API, and how much of it has been
    sent.

    Attributes:
        key: where the text goes: "text" for a completion, "message" for a chat, "delta" for a chat
            that is streamed.
        shows_prompt: whether the text begins with the prompt's.
        reader: splits the answer into text and calls.
        num_thought, num_tokens: how many characters of the thought, and tokens with
            log-probabilities, have been taken.
        offset: characters in the texts of the tokens that have been taken.
        ended: whether the last part has been taken; None: nothing has been taken yet.
    """

    index: int
    seq: EngineSequence
    key: str
    tokenizer: Tokenizer
    shows_prompt: bool
    reader: Reader
    num_thought: int = 0
    num_tokens: int = 0
    offset: int = 0
    ended: bool | None = None

    def take_new(self) -> JSON:
        """Return what has been generated since the last call, or {} if that is nothing.

        Raises:
            Problem: the sequence ended with an error.
        """
        seq = self.seq
        reason = seq.finish_reason  # read first, because nothing changes after it is set
        demand(reason != "abort", 500, "a step of the engine failed")
        if reason == "error":  # its grammar became too complex, or the model produced NaN logits
            complaint = seq.matcher and seq.matcher.get_error()
            raise Problem(400 if complaint else 500, (complaint or BROKEN)[:100])
        # 1) read what is new. Slices are copies, as the engine's thread may append meanwhile; and
        # the text is read before the thought, which is complete when the text begins
        is_scored = seq.params.logprobs is not None
        tokens = seq.tokens[self.num_tokens :] if is_scored else []
        num_calls = len(self.reader.calls)
        text = self.reader.read(seq.text, bool(reason))
        thought = seq.stream.thought[self.num_thought :]
        calls = self.reader.calls[num_calls:]
        if self.ended or not (reason or thought or text or tokens or calls):
            return {}
        # 2) count it as taken
        is_first = self.ended is None
        self.ended = bool(reason)
        self.num_thought += len(thought)
        self.num_tokens += len(tokens)
        if is_first and self.shows_prompt:
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
            message["tool_calls"] = [
                dict(index=i, id=f"call_{secrets.token_hex(12)}", type="function", function=call)
                for i, call in enumerate(calls, num_calls)
            ]
        return {
            "index": self.index,
            self.key: text if self.key == "text" else message,
            "logprobs": self.logprobs(tokens) if is_scored else None,
            "finish_reason": "tool_calls" if self.reader.calls and reason == "stop" else reason,
        }

    def echo(self) -> tuple[str, list[Token]]:
        """Return the prompt's text and, if it is scored, its tokens with their texts."""
        seq = self.seq
        ids = seq.ids[: seq.prompt_len]
        # The ids that the tokenizer puts in front, such as BOS, show no text. A prompt that was
        # given as ids may lack them.
        prefix = self.tokenizer.encode("")
        start = len(prefix) if ids[: len(prefix)] == prefix else 0
        detokenizer = Detokenizer(self.tokenizer, [], show_special=True)
        texts = [""] * start + [detokenizer.push(i) for i in ids[start:]]
        texts[-1] += detokenizer.push(None, last=True)  # an incomplete character, as U+FFFD
        return "".join(texts), [
            token._replace(text=text) for token, text in zip(seq.request.prompt_tokens, texts)
        ]

    def logprobs(self, tokens: list[Token]) -> JSON:
        """Return log-probabilities in the form of a completion or of a chat.

        The texts of the sampled tokens, joined, are the whole output as it was written: also the
        marks around the thought, the calls, and a stop string, which the choice's text leaves out.
        The other likely tokens have the text that they have in the vocabulary.
        """

        # The entry of id i, in the place where `token` was sampled. The entry of the sampled token
        # itself has the text that it added to the output, which can differ from the vocabulary's.
        def entry(token: Token, i: int, value: float | None) -> JSON:
            word = self.tokenizer.bytes_of(i)
            text = token.text if i == token.id else word.decode(errors="backslashreplace")
            return dict(token=text, logprob=value, bytes=list(word))

        # The sampled token, and the likeliest ones in its place.
        content = [
            entry(token, token.id, token.logprob)
            | {"top_logprobs": [entry(token, *each) for each in token.top]}
            for token in tokens
        ]
        if self.key != "text":
            return {"content": content}
        # The sampled token is in here even if it is unlikely, as in vLLM. The first token of a
        # prompt has no log-probability.
        likely = [
            None
            if sampled["logprob"] is None
            else {each["token"]: each["logprob"] for each in (*sampled["top_logprobs"], sampled)}
            for sampled in content
        ]
        texts = [token.text for token in tokens]
        offsets = [*accumulate(map(len, texts), initial=self.offset)]
        self.offset = offsets[-1]
        return dict(
            tokens=texts,
            text_offset=offsets[:-1],
            token_logprobs=[token.logprob for token in tokens],
            top_logprobs=likely,
        )


def mark_thoughts(tokenizer: Tokenizer, seqs: list[EngineSequence], fields: JSON) -> None:
    """Tell a chat's sequences how they think.

    Some templates begin the thought, or a last message that is continued does, so that the output
    lacks the first mark. Another message that is continued is text already. Structured outputs, and
    models without a token for each mark, have no thoughts.
    """
    if "structured_outputs" in fields:
        return
    for begin, end in MARKS:
        marks = tokenizer.encode(begin + end, add_special=False)
        if [*map(tokenizer.bytes_of, marks)] != [begin.encode(), end.encode()]:
            continue
        if fields["continue_final_message"]:
            tail = str(plain_turn(fields["messages"][-1])["content"])
        else:
            tail = tokenizer.decode(seqs[0].ids[-16:], show_special=True).rstrip()[-len(begin) :]
        is_open = tail.lstrip().startswith(begin) and end not in tail
        if is_open or not fields["continue_final_message"]:
            for seq in seqs:
                seq.stream.marks = [*marks[is_open:], -1]
        return
