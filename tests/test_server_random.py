"""The server, asked at random: bodies that nobody had thought of."""

import json
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from serving import CHAT, COMPLETIONS, read

from around.api.answers import Problem

pytest_plugins = ["serving"]
pytestmark = pytest.mark.usefixtures("one_thread")


def mostly(plausible, absurd):
    """Draw one absurd value in ten, or no body would be a good one."""
    return st.integers(0, 9).flatmap(lambda i: absurd if i == 9 else plausible)


def listed(*values, most=3):
    return st.lists(st.one_of(*values), max_size=most)


def fixed(optional=None, **parts):
    return st.fixed_dictionaries(parts, optional=optional)


numbers = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
numbers |= st.sampled_from([0, -1, 2**31, 2**63, -(2**63), 10**30, -0.0, 1e-300, 1e308, 0.5])
absurd = st.recursive(
    st.one_of(st.none(), st.booleans(), numbers, st.text(max_size=5)),
    lambda inner: listed(inner) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=4,
)
ids = listed(mostly(st.integers(0, 1023), numbers), most=70)
text = st.text(max_size=30) | st.sampled_from(["ROMEO:\n", "", "a " * 90])
part = fixed(type=mostly(st.just("text"), absurd), text=mostly(text, absurd))
arguments = mostly(st.sampled_from(['{"a": 1}', "{", "[" * 9999, "NaN"]) | st.just({}), absurd)
calls = mostly(listed(mostly(fixed(function=fixed(arguments=arguments)), absurd), most=2), absurd)
message = fixed(
    {"tool_calls": calls},
    role=mostly(st.sampled_from(["user", "system", "assistant"]), absurd),
    content=mostly(text | listed(part, most=2), absurd),
)
biases = st.dictionaries(
    mostly(st.integers(0, 1023).map(str), st.text(max_size=3)), st.floats(-100, 100), max_size=3
)
fields = {
    "temperature": st.floats(0, 2), "top_p": st.floats(0.01, 1), "top_k": st.integers(-1, 2000),
    "min_p": st.floats(0, 1), "presence_penalty": st.floats(-2, 2), "seed": st.integers(-9, 9),
    "frequency_penalty": st.floats(-2, 2), "repetition_penalty": st.floats(0.1, 3),
    "n": st.integers(1, 3), "logit_bias": biases, "stop_token_ids": listed(st.integers(0, 1023)),
    "stop": text.filter(bool) | listed(st.text(min_size=1, max_size=3)),
    "ignore_eos": st.booleans(), "stream": st.booleans(), "max_tokens": st.integers(0, 4),
    "min_tokens": st.integers(0, 5), "model": st.just("shakespeare"), "user": absurd,
    "reasoning_format": st.sampled_from(["auto", "none"]), "echo": st.booleans(),
    "stream_options": fixed(include_usage=mostly(st.booleans(), absurd)),
    "best_of": st.integers(1, 2), "priority": st.integers(-3, 3), "cache_salt": st.text(max_size=3),
}  # fmt: skip
completion = {"prompt": text | ids | listed(text, ids), "logprobs": st.integers(0, 20)}
chat = {"messages": listed(message), "max_completion_tokens": st.integers(1, 4),
        "logprobs": st.booleans(), "top_logprobs": st.integers(0, 20)}  # fmt: skip


def bodies(own):
    everything = {name: mostly(value, absurd) for name, value in (fields | own).items()}
    needed = next(iter(own))
    optional = sorted(everything.keys() - {needed})
    # All the fields at once would be wrong in one of them nearly always.
    return st.sets(st.sampled_from(optional), max_size=6).flatmap(
        lambda names: fixed(**{n: everything[n] for n in (needed, *sorted(names))})
    )


@pytest.mark.slow
def test_random_bodies(shared):
    """Send random bodies, eight at a time, and check each answer. Catches: a body that nobody had
    thought of, and that makes a 500, leaves a block behind or stops the engine."""
    connections, seen = [shared.open() for _ in range(8)], Counter()
    each = st.tuples(st.just(COMPLETIONS), bodies(completion))
    each |= st.tuples(st.just(CHAT), bodies(chat))

    @settings(max_examples=150, deadline=None, derandomize=True, database=None)
    @given(st.lists(each, min_size=8, max_size=8))
    def run(batch):
        for connection, (path, body) in zip(connections, batch, strict=True):
            data = json.dumps({"max_tokens": 3} | body)
            connection.request("POST", path, data, {"Content-Type": "application/json"})
        for connection, (path, body) in zip(connections, batch, strict=True):
            answer = read(connection)
            seen[answer.status] += 1
            assert answer.status in (200, 400, 404), (path, body)
            if answer.status == 200 and body.get("stream"):
                assert answer.events[-1] == "[DONE]" and b'"error"' not in answer.data
            elif answer.status == 200:
                assert all(choice["finish_reason"] for choice in answer.json["choices"])
            else:
                assert answer.json["error"]["message"]

    run()
    shared.settle()
    shared.works()
    assert seen[200] > 250 and seen[400] > 250, seen


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(st.booleans(), st.data())
def test_random_bodies_are_refused_or_prepared(shared, chatting, data):
    """Prepare random bodies without HTTP, and check what is made of them. Catches: an exception
    that is no Problem; a request that is queued already."""
    body = data.draw(bodies(chat if chatting else completion))
    try:
        made = shared.server.api.prepare(body, chatting).requests
    except Problem as problem:
        assert problem.args[0] in (400, 404) and problem.args[1]
        return
    assert 1 <= sum(len(request.outputs) for request in made) <= 256
    assert all(sequence.max_len <= 1024 for request in made for sequence in request.outputs)
    assert not shared.engine.queue
