"""Exercise 19: several engines, and which one gets a request. See 19-replicas.md."""

import random
from collections.abc import Iterable
from itertools import cycle
from typing import Any

import pytest
from common import needs, serve, tiny_model, write

from around.settings import SamplingParams
from scheduler import Engine, Request
from tools.books import audit

MODEL = tiny_model()
SIZE = 4  # tokens in a block
TODO = (
    "make the file in the root, with Router(engines, bound=4): add_request, abort, queue, step, run"
)


def make(count: int = 2, **changes: int) -> list[Engine]:
    sizes = {"num_blocks": 60, "block_size": SIZE, "max_num_seqs": 8}
    return [Engine(MODEL, **sizes | changes) for _ in range(count)]


def route(engines: list[Engine], **options: int) -> Any:
    router = needs("replicas", "Router", TODO)(engines, **options)
    for name in ("engines", "add_request", "abort", "queue", "step", "run"):
        assert hasattr(router, name), f"a Router is used like an Engine, but it has no {name} yet"
    return router


def tokens(count: int, seed: int) -> list[int]:
    """Make a random prompt. Different seeds give different first blocks."""
    return [seed % 30 + 1, *random.Random(seed).choices(range(1, 32), k=count - 1)]


def greedy(count: int = 3) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)


def drain(router: Any) -> None:
    """Step until nothing is left, auditing the engines' books."""
    for _ in range(1000):
        if not router.queue:
            return
        router.step()
        for engine in router.engines:
            audit(engine)
    pytest.fail("after 1000 steps, the queue is not empty", pytrace=False)


def place(router: Any, prompt: list[int], **options: Any) -> int:
    """Add a request. Returns the index of the engine that gets it."""
    return found(router, router.add_request(prompt, greedy(), **options))


def found(router: Any, request: Request) -> int:
    places = [i for i, e in enumerate(router.engines) if request.outputs[0] in e.queue]
    assert len(places) == 1, f"a request must be in one engine's queue, but is in {len(places)}"
    return places[0]


def warm(engine: Engine, *prompts: list[int]) -> None:
    """Fill an engine's cache with these prompts."""
    serve(engine, *((prompt, greedy(1)) for prompt in prompts))


def busy(engine: Engine, count: int) -> None:
    """Give an engine `count` other requests."""
    for i in range(count):
        engine.add_request(tokens(6, 1000 + i), greedy())


# --- As one engine --------------------------------------------------------------------------------


@pytest.mark.parametrize("num_blocks", [60, 14])
def test_the_tokens_are_those_of_one_engine(num_blocks: int) -> None:
    """The tokens stay the same also with so few blocks that some sequences are preempted."""
    router, (one,) = route(make(num_blocks=num_blocks)), make(1)
    settings = [greedy(12), SamplingParams(seed=5, n=2, max_tokens=9, ignore_eos=True)]
    asked = [(tokens(20, i % 3) + tokens(i, 50 + i), settings[i % 2]) for i in range(1, 9)]
    want = [sequence.ids for request in serve(one, *asked) for sequence in request.outputs]
    requests = [router.add_request(*each) for each in asked[:5]]
    router.step()
    requests += [router.add_request(*each) for each in asked[5:]]
    drain(router)
    got = [sequence.ids for request in requests for sequence in request.outputs]
    assert got == want, "the tokens are not those of one engine"
    made = [engine.stats["generation_tokens"] for engine in router.engines]
    assert all(made), f"the engines made {made} tokens"
    if num_blocks < 60:
        preemptions = sum(engine.stats["num_preemptions"] for engine in router.engines)
        assert preemptions, "the test is useless: nothing was preempted"


def test_a_step_is_one_step_of_each() -> None:
    router = route(make())
    requests = [router.add_request(tokens(9, i), greedy(4)) for i in range(4)]
    got = router.step()
    steps = [engine.stats["engine_steps"] for engine in router.engines]
    assert steps == [1, 1], f"step() must run one step of each engine, not {steps}"
    wrong = "step() must return the requests that got a token, from all engines"
    assert {*map(id, got)} == {*map(id, requests)}, wrong
    rest = [id(request) for request in router.run()]
    assert sorted(rest) == sorted([*map(id, requests)] * 3), "run() yields what each step returns"
    assert not router.queue and all(request.finished for request in requests)
    assert router.step() == []


def test_requests_have_different_ids() -> None:
    """Bug: each engine counts its requests from 1, so two requests have the same id."""
    router = route(make())
    requests = [router.add_request(tokens(9, i), greedy()) for i in range(6)]
    ids = [request.request_id for request in requests]
    assert len({*ids}) == 6, f"six requests have these ids: {ids}"
    mine = router.add_request(
        tokens(9, 7), greedy(), request_id="mine", priority=3, cache_salt="me"
    )
    assert (mine.request_id, mine.priority, mine.cache_salt) == ("mine", 3, "me"), (
        "pass the options on"
    )


def test_an_impossible_request_is_refused() -> None:
    router = route(make())
    for wrong in ([], [99], tokens(500, 1)):
        with pytest.raises(ValueError, match=r"^prompt "):
            router.add_request(wrong, greedy())
    assert not router.queue
    with pytest.raises(ValueError):
        route([])


def test_abort() -> None:
    """The router aborts a request that runs or waits in any engine, and no other request."""
    router = route(make(max_num_seqs=2))
    requests = [router.add_request(tokens(9, i), greedy(9)) for i in range(8)]
    for _ in range(3):
        router.step()
    for request in (requests[0], requests[1], requests[6], requests[7]):
        router.abort(request)
        assert [each.finish_reason for each in request.outputs] == ["abort"]
        assert request.outputs[0] not in router.queue, "it is still in its engine's queue"
    drain(router)
    for i, request in enumerate(requests[2:6], 2):
        assert request.outputs[0].ids == write(MODEL, tokens(9, i), 9).ids
        router.abort(request)
        assert request.outputs[0].finish_reason == "length", "a finished request must not change"
    for engine in router.engines:
        assert len(engine.pool.available) == engine.pool.num_blocks, "blocks were not freed"


# --- Which engine gets a request ------------------------------------------------------------------


def test_a_request_goes_to_its_prefix() -> None:
    router, known = route(make()), [tokens(16, seed) for seed in (1, 2)]
    for engine, prompt in zip(router.engines, known):
        warm(engine, prompt)
    for i, engine in enumerate((0, 1, 1, 0, 1, 0, 0, 1)):
        place_of = place(router, known[engine] + tokens(5, 20 + i))
        assert place_of == engine, "another engine must compute a prompt that this one has cached"
        drain(router)


def test_the_longest_prefix_counts() -> None:
    router, text = route(make()), tokens(40, 1)
    warm(router.engines[0], text[:12])
    warm(router.engines[1], text)
    wrong = "both have the prefix cached, and the first has computed less"
    assert place(router, text[:12] + tokens(9, 2)) == 0, wrong
    assert place(router, text[:28] + tokens(9, 3)) == 1, "the second has a longer prefix cached"


def test_only_whole_blocks_count() -> None:
    router, text = route(make()), tokens(16, 1)
    warm(router.engines[0], text)
    assert place(router, text[: SIZE - 1] + tokens(9, 2)) == 1, (
        "three tokens of a block of four cannot be reused: the second has computed less so far"
    )
    router = route(make())
    router.engines[0].add_request(text, greedy())
    assert place(router, text[: SIZE - 1] + tokens(9, 2)) == 1, (
        "queued tokens cannot be reused in parts of blocks either: the second has nothing to do"
    )


def test_queued_prompts_count_too() -> None:
    """Bug: two questions about one document arrive together, and it is computed twice."""
    router, text = route(make()), tokens(16, 1)
    first = place(router, [*text, 5])
    wrong = "compare with the requests in the engines' queues, too"
    assert place(router, [*text, 6, 7]) == first, wrong
    router.step()
    assert place(router, [*text, 8]) == first
    assert place(router, tokens(16, 2)) == 1 - first, "this is another document"


def test_salts_keep_apart() -> None:
    """A prefix cached under another salt cannot be reused; see BlockPool.reuse."""
    router, text = route(make()), tokens(16, 1)
    warm(router.engines[0], text)
    assert place(router, [*text, 5], cache_salt="a") == 1, "the prefix is cached without a salt"
    assert place(router, [*text, 5], cache_salt="b") == 0, "the prefix is queued with another salt"
    assert place(router, [*text, 6], cache_salt="a") == 1
    assert place(router, [*text, 6], cache_salt="b") == 0


def test_the_least_loaded_gets_the_rest() -> None:
    router = route(make(3))
    places = [place(router, tokens(9, i)) for i in range(9)]
    assert sorted(places) == [0, 0, 0, 1, 1, 1, 2, 2, 2], f"unknown prompts went to {places}"
    router = route(make())
    busy(router.engines[0], 3)
    places = [place(router, tokens(9, i)) for i in range(3)]
    assert places == [1, 1, 1], f"the first engine has three requests; these went to {places}"


def test_idle_engines_take_turns() -> None:
    """Bug: while all engines idle, every request goes to the first, whose cache is soon full."""
    router, places = route(make()), []
    for i in range(8):
        places.append(place(router, tokens(12, i)))
        drain(router)
    wrong = "among equally loaded engines, choose the one that has computed the fewest tokens"
    assert sorted(places) == [0] * 4 + [1] * 4, f"{wrong}; the requests went to {places}"


@pytest.mark.parametrize("bound", [0, 2, 5])
def test_nobody_is_more_than_the_bound_ahead(bound: int) -> None:
    router, text = route(make(), bound=bound), tokens(16, 1)
    warm(router.engines[0], text)
    busy(router.engines[1], 2)
    places = [place(router, text + tokens(3, i)) for i in range(bound + 5)]
    assert places[: bound + 3] == [0] * (bound + 3), "within the bound, the prefix decides"
    assert places[bound + 3] == 1, f"the first has {bound + 1} more requests than the second"


def test_beyond_the_bound_the_second_best_is_next() -> None:
    router, text = route(make(3), bound=1), tokens(40, 1)
    for engine, length in zip(router.engines, (0, 40, 20)):
        if length:
            warm(engine, text[:length])
    busy(router.engines[1], 2)
    assert place(router, text) == 2, "the third has half of it cached, and nothing to do"


def test_asking_changes_nothing() -> None:
    """Bug: the router asks by reuse() and free(), which count as a use of the blocks. Then blocks
    stay that were only asked about, and blocks in use are evicted."""
    router, known = route(make()), [tokens(16, seed) for seed in (1, 2, 3)]

    def state() -> list[Any]:
        pools = [engine.pool for engine in router.engines]
        return [([*pool.available], [*pool.refs], pool.cached) for pool in pools]

    for engine in router.engines:
        warm(engine, *known)
    before = state()
    for prompt in known:
        router.add_request([*prompt[:8], 3, 4], greedy())
        assert state() == before, "only engine.step() may change the pools"


def test_evicted_blocks_do_not_count() -> None:
    """Bug: the router keeps a record of what went where, which does not know of evictions."""
    router, text = route(make(num_blocks=16)), tokens(16, 1)
    warm(router.engines[0], text)
    warm(router.engines[1], tokens(30, 2))
    assert place(router, text) == 0, "the first has it cached"
    drain(router)
    warm(router.engines[0], *(tokens(30, i) for i in range(3, 7)))
    assert place(router, text) == 1, "the first has evicted it, and has computed more tokens"


# --- What it is good for --------------------------------------------------------------------------


class RoundRobin:
    """The slow twin sends requests to the engines in turn."""

    def __init__(self, engines: list[Engine]) -> None:
        self.engines, self.turns = engines, cycle(engines)

    @property
    def queue(self) -> list[Any]:
        return [seq for engine in self.engines for seq in engine.queue]

    def add_request(self, *args: Any) -> Request:
        return next(self.turns).add_request(*args)

    def step(self) -> None:
        for engine in self.engines:
            engine.step()


def play(router: Any, trace: Iterable[list[int]]) -> float:
    """Serve a trace, six at a time. Returns the share of prompt tokens that were cached."""
    for prompt in trace:
        router.add_request(prompt, greedy(4))
        while len(router.queue) >= 6:
            router.step()
    drain(router)
    queries, hits = (
        sum(engine.stats[f"prefix_cache_{name}"] for engine in router.engines)
        for name in ("queries", "hits")
    )
    return hits / queries


def test_more_is_found_than_by_turns() -> None:
    """There are six documents, and each cache has room for four, so an engine should keep some."""
    rng = random.Random(1)
    trace = [tokens(40, rng.randrange(6)) + tokens(6, 100 + i) for i in range(60)]
    by_turns = play(RoundRobin(make(num_blocks=48)), trace)
    router = route(make(num_blocks=48))
    routed = play(router, trace)
    best = (60 - 6) * 40 / (60 * 46)  # each document is computed once
    assert routed > by_turns + 0.1, f"{routed:.0%} were cached, and {by_turns:.0%} in turn"
    assert routed > best - 0.05, f"{routed:.0%} were cached, where {best:.0%} is possible"
    shares = [engine.stats["generation_tokens"] / 240 for engine in router.engines]
    assert min(shares) > 0.25, f"the engines made {shares} of the tokens"
