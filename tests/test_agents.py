"""The agent loop of LangChain, whole and streamed: it runs what the model calls, and sends the
results back. Without the package the tests skip; in CI they fail."""

import importlib.util
import json
import os
from typing import Any

import pytest
from serving import Local
from test_function_calls import tagged

from around.api import requests

pytestmark = pytest.mark.nightly

ROME, TWO = {"city": "Rome", "days": 1}, {"city": "Verona", "days": 2}
SCRIPT = [  # what the model writes: a text and a call, two calls, the answer
    f"Let me see. {tagged('weather', ROME)}",
    f"{tagged('weather', TWO)}\n{tagged('weather', ROME)}",
    "It is sunny in both.",
]


def langchain(url: str, stream: bool) -> dict:
    if not importlib.util.find_spec("langchain_openai"):
        assert "KILOLM_NEEDS_ALL" not in os.environ, "KILOLM_NEEDS_ALL is set, without langchain"
        pytest.skip("needs: pip install -e '.[agents]'")
    from langchain.agents import create_agent
    from langchain_openai import ChatOpenAI

    asked = []

    def weather(city: str, days: int) -> str:
        """The weather."""
        asked.append({"city": city, "days": days})
        return f"sunny in {city}"

    chat: Any = ChatOpenAI
    model = chat(model="shakespeare", base_url=url, api_key="none", streaming=stream, max_retries=0)
    agent = create_agent(model, tools=[weather])
    question: Any = {"messages": [("user", "What is the weather?")]}
    if stream:  # the pieces of the model's messages, as they come
        by_id: dict = {}
        pieces = [piece for piece, _ in agent.stream(question, stream_mode="messages")]
        for piece in (said := [each for each in pieces if each.type == "AIMessageChunk"]):
            by_id[piece.id] = by_id[piece.id] + piece if piece.id in by_id else piece
        assert len(said) > 2 * len(SCRIPT), "the messages came whole"
        replies = [*by_id.values()]
    else:
        replies = [each for each in agent.invoke(question)["messages"] if each.type == "ai"]
    reasons = [each.response_metadata["finish_reason"] for each in replies]
    first, *_, last = replies
    return {"asked": asked, "first": first.content, "text": last.content, "reasons": reasons}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_the_loop(monkeypatch: Any, stream: bool) -> None:
    """Let LangChain's agent answer a question in three turns with function calls, and check what it
    asked and each message that it sent. Catches: a turn that is missing; a call, or its result,
    that is not under its id in the whole conversation."""
    bodies: list[dict] = []
    translate = requests.translate

    def direct(body: dict, chat: bool) -> dict:
        """Make the model write the script, one text a request: a grammar allows nothing else."""
        bodies.append(body)
        text = SCRIPT[len(bodies) - 1]
        return translate(body | {"structured_outputs": {"choice": [text]}}, chat)

    monkeypatch.setattr(requests, "translate", direct)
    local = Local("--tool-format", "hermes", num_blocks=400, max_num_batched_tokens=64)
    try:
        seen = langchain(f"http://127.0.0.1:{local.port}/v1", stream)
        local.settle()
    finally:
        local.close()
    # LangChain runs the two calls of a turn in threads, so either may come first.
    assert seen["asked"] in ([ROME, TWO, ROME], [ROME, ROME, TWO])
    assert (seen["first"].strip(), seen["text"]) == ("Let me see.", SCRIPT[-1])
    assert seen["reasons"] == ["tool_calls", "tool_calls", "stop"]
    assert [bool(body.get("stream")) for body in bodies] == [stream] * len(SCRIPT)
    messages = bodies[-1]["messages"]
    roles = [message["role"] for message in messages]
    assert roles == ["user", "assistant", "tool", "assistant", "tool", "tool"]
    assert messages[1]["content"] == "Let me see."
    calls = [call for each in messages for call in each.get("tool_calls") or []]
    assert [json.loads(call["function"]["arguments"]) for call in calls] == [ROME, TWO, ROME]
    for call, each in zip(calls, (messages[2], *messages[4:]), strict=True):
        city = json.loads(call["function"]["arguments"])["city"]
        assert (each["tool_call_id"], each["content"]) == (call["id"], f"sunny in {city}")
