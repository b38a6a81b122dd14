"""Exercise 03: short prompts overtake long ones, but not for ever. See 03-shortest-first.md."""

from typing import Any

import pytest
from common import call, tiny_model

from around.settings import SamplingParams
from scheduler import Engine, Request
from tools.books import audit

MODEL = tiny_model()
TODO = "give Engine the options policy and ageing"


def engine(**options: Any) -> Engine:
    """Make an engine that runs one sequence at a time, which shows the order of service."""
    small = {"num_blocks": 64, "block_size": 4, "max_num_seqs": 1, "max_num_batched_tokens": 8}
    return call(Engine, MODEL, todo=TODO, **small | options)


def ask(at: Engine, length: int, priority: int = 0, max_tokens: int = 3) -> Request:
    """Queue a prompt of `length` tokens."""
    ids = [1 + (7 * i + length) % 31 for i in range(length)]
    params = SamplingParams(max_tokens=max_tokens, seed=1, ignore_eos=True)
    return at.add_request(ids, params, priority=priority)


def serve(at: Engine, requests: list[Request]) -> tuple[list[int], list[int]]:
    """Run to the end. Returns the indices of the requests in the order in which they finish, and
    for each request the step of its first token."""
    order: list[int] = []
    first = [0] * len(requests)
    step = 0
    while at.queue:
        step += 1
        for request in at.step():
            i = requests.index(request)
            first[i] = first[i] or step
            if request.finished:
                order.append(i)
        audit(at)
    return order, first


LENGTHS = [40, 9, 25, 3, 16]


def test_the_shortest_prompt_is_served_first() -> None:
    at = engine(policy="shortest", ageing=0)
    order, _ = serve(at, [ask(at, n) for n in LENGTHS])
    assert order == [3, 1, 4, 2, 0], "with ageing=0, the shortest prompt is served first"


def test_the_default_is_as_before() -> None:
    at = engine(policy="fcfs")
    order, _ = serve(at, [ask(at, n) for n in LENGTHS])
    assert order == [0, 1, 2, 3, 4], "fcfs means first come, first served"
    at = engine()
    assert serve(at, [ask(at, n) for n in LENGTHS])[0] == order, "the default policy is fcfs"


def test_equals_are_served_as_they_come() -> None:
    at = engine(policy="shortest", ageing=0)
    assert serve(at, [ask(at, n) for n in (6, 4, 6, 4)])[0] == [1, 3, 0, 2]


def test_people_wait_less_on_average_for_the_same_tokens() -> None:
    """Nobody's text changes, only the time at which it comes."""
    results = {}
    for policy in ("fcfs", "shortest"):
        at = engine(policy=policy, ageing=0)
        requests = [ask(at, n) for n in LENGTHS]
        _, first = serve(at, requests)
        results[policy] = sum(first), [r.outputs[0].token_ids for r in requests]
    assert results["shortest"][0] < results["fcfs"][0]
    assert results["shortest"][1] == results["fcfs"][1]


def test_priority_comes_before_length() -> None:
    at = engine(policy="shortest", ageing=0)
    requests = [ask(at, 3), ask(at, 30, priority=-1), ask(at, 20), ask(at, 5, priority=1)]
    assert serve(at, requests)[0] == [1, 0, 2, 3], "a lower priority number comes first"


@pytest.mark.parametrize(("ageing", "overtakers"), [(0, 19), (4, 7), (9, 3), (100, 0)])
def test_ageing_bounds_how_many_may_overtake(ageing: int, overtakers: int) -> None:
    """Short prompts keep coming. With ageing=0, the long one would wait for the last of them.

    The long prompt's key is 32 + ageing * 1, that of the j-th arrival 3 + ageing * j.
    """
    at = engine(policy="shortest", ageing=ageing)
    busy = ask(at, 2)
    at.step()  # it runs, so the others queue
    requests = [busy, ask(at, 32), *(ask(at, 3) for _ in range(19))]
    order, _ = serve(at, requests)
    before = order.index(1) - 1
    assert before == overtakers, (
        f"{before} short prompts overtook the long one, not {overtakers}: sort by "
        "(prompt tokens + ageing * arrival), where arrival counts 1, 2, 3, ..."
    )


def arrivals(at: Engine) -> list[int]:
    return [seq.request.arrival for seq in at.queue]


def test_a_running_sequence_is_not_overtaken() -> None:
    """The last to arrive is preempted first, however short it is; audit() checks that."""
    at = engine(policy="shortest", ageing=0, num_blocks=11, max_num_seqs=2)
    requests = [ask(at, 37, max_tokens=8)]
    at.step()
    requests += [ask(at, n, max_tokens=8) for n in (6, 3)]
    assert arrivals(at) == [1, 2, 3], (
        "both lines stay in the order of arrival: let schedule() choose among the waiting"
    )
    order, _ = serve(at, requests)
    assert order == [0, 2, 1], "the long one continues, and then the shortest waiting one starts"
    assert at.stats["num_preemptions"] == 1, "the short one gives its blocks to the long one"
    assert len(at.pool.available) == at.pool.num_blocks


def test_the_output_of_a_preempted_sequence_counts() -> None:
    """A sequence that is preempted after some output must run that again too."""
    at = engine(policy="shortest", ageing=0, num_blocks=11, max_num_seqs=2)
    requests = [ask(at, 20, max_tokens=20), ask(at, 4, max_tokens=20)]
    while at.queue and not at.stats["num_preemptions"]:
        at.step()
    assert at.waiting == requests[1].outputs, "the last to arrive is preempted first"
    (grown,) = at.waiting
    short = ask(at, 6).outputs[0]  # longer than the prompt, shorter than prompt and output
    assert len(grown.ids) > 8, "the test is useless: one step runs eight tokens"
    while at.waiting == [grown, short]:
        at.step()
        audit(at)
    assert short in at.running, (
        "six tokens are fewer than the prompt and the output of the preempted sequence"
    )


def test_other_policies_are_refused() -> None:
    for wrong in ({"policy": "longest"}, {"policy": "shortest", "ageing": -1}):
        with pytest.raises(ValueError, match=r"policy|ageing"):
            engine(**wrong)
