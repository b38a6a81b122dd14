"""Exercise 18: short outputs overtake long ones, without a forecast. See 18-feedback-queue.md."""

from functools import cache
from itertools import pairwise
from typing import Any

import pytest
from common import needs, tiny_model, write

from around.settings import SamplingParams
from scheduler import Engine, EngineSequence, Request, place_in_line
from speculative import NGram
from tools.books import audit

MODEL = tiny_model()
TODO = "make the file in the root, with the class FeedbackEngine(Engine)"
LONGEST = 60  # every request's max_tokens, so that nobody can know which ends sooner
MIX = [60, 5, 4, 60, 3, 7, 5, 60, 4, 6, 3, 5, 60, 4, 8, 5, 3, 60, 4, 5, 6, 4, 3, 5]


def engine(**options: Any) -> Engine:
    """Make an engine with one slot, which shows the order of service."""
    kind = needs("feedback", "FeedbackEngine", TODO)
    small = {"num_blocks": 200, "block_size": 4, "max_num_seqs": 1, "max_num_batched_tokens": 16}
    return kind(MODEL, **small | {"quantum": 4, "patience": 256} | options)


@cache
def answer_of(length: int, i: int) -> tuple[list[int], SamplingParams, list[int]]:
    """Find a request whose answer has `length` tokens. Returns its prompt, its settings, and the
    answer, by generate().

    The answer ends at a stop token that happens to come at this position, and not before.
    """
    ids, params = [1 + i % 31, 6, 7], {"max_tokens": LONGEST, "ignore_eos": True}
    for seed in range(1000 * i, 1000 * i + 1000):
        text = write(MODEL, ids, LONGEST, temperature=1, seed=seed).token_ids
        stop = () if length == LONGEST else (text[length - 1],)
        if not stop or text.index(*stop) == length - 1:
            break
    return ids, SamplingParams(seed=seed, stop_token_ids=stop, **params), text[:length]


def ask(at: Engine, length: int, i: int = 0, **options: Any) -> Request:
    return at.add_request(*answer_of(length, i)[:2], **options)


def step(at: Engine) -> None:
    at.step()
    for line in (at.running, at.waiting):
        assert line == sorted(line, key=place_in_line), (
            "both lines must stay sorted by scheduler.place_in_line: make the level part of it"
        )
    audit(at)


def finish(at: Engine, most: int = 2000) -> None:
    while at.queue:
        step(at)
        most -= 1
        assert most, "the engine does not finish"
    assert len(at.pool.available) == at.pool.num_blocks


def made(request: Request) -> int:
    return len(request.outputs[0].tokens)


def play(at: Engine, lengths: list[int], gap: int) -> tuple[list[int], int]:
    """Let a request arrive every `gap` steps. Each must get the tokens that it gets alone. Returns
    the steps that each took from its arrival to its end, and the number of tokens run."""
    requests: list[Request] = []
    left: dict[Request, tuple[int, int]] = {}
    took, now = [0] * len(lengths), 0
    while left or len(requests) < len(lengths):
        if now % gap == 0 and len(requests) < len(lengths):
            i = len(requests)
            requests.append(ask(at, lengths[i], i))
            left[requests[-1]] = i, now
        step(at)
        now += 1
        assert now < 5000, "the engine does not finish"
        for request in [each for each in left if each.finished]:
            i, came = left.pop(request)
            took[i] = now - came
            assert request.outputs[0].token_ids == answer_of(lengths[i], i)[2], "its tokens differ"
    return took, at.stats["computed_tokens"]


# --- The queues -----------------------------------------------------------------------------------


@pytest.mark.parametrize("quantum", [1, 3, 4])
def test_a_sequence_sinks_as_it_grows(quantum: int) -> None:
    """A sequence sinks after `quantum` tokens, then after twice as many, and so on. Its level is
    set when a step begins."""
    at = engine(quantum=quantum)
    seq = ask(at, LONGEST).outputs[0]
    level, left = 0, quantum
    while at.queue:
        if not left:
            level += 1
            left = quantum * 2**level
        step(at)
        assert hasattr(seq, "level"), (
            "give each EngineSequence the attribute `level`, where 0 is the highest"
        )
        assert seq.level == level, (
            f"with {len(seq.tokens) - 1} tokens, the level is {level}, not {seq.level}"
        )
        left -= 1


def test_the_new_one_is_served_at_once() -> None:
    """A new request runs between two tokens of a long text, which continues afterwards."""
    at = engine()
    long = ask(at, LONGEST)
    for _ in range(6):
        step(at)
    short = ask(at, 3, 1)
    for count in (1, 2, 3):
        step(at)
        assert (made(short), made(long)) == (count, 6), (
            "a sequence in a higher queue takes the slot of one in a lower queue, at the next step"
        )
    step(at)
    assert made(long) == 7, "the long one must continue afterwards"
    finish(at)
    assert long.outputs[0].token_ids == answer_of(LONGEST, 0)[2]


def test_equals_are_served_as_they_come() -> None:
    """Within a queue nobody is preempted: changing places costs time, and gains nothing."""
    at = engine()
    requests = [ask(at, 3, i) for i in range(4)]
    ended = [requests.index(request) for request in at.run() if request.finished]
    assert ended == [0, 1, 2, 3]
    assert at.stats["num_preemptions"] == 0, "within a queue, serve in the order of arrival"
    at = engine(quantum=2)
    first, second = ask(at, LONGEST), ask(at, LONGEST, 1)
    for _ in range(12):
        step(at)
    # 2 tokens in queue 0 each; then 4 in queue 1 each.
    assert (made(first), made(second)) == (6, 6)
    assert at.stats["num_preemptions"] == 2, "a sequence keeps its slot until it sinks"


def test_nobody_is_preempted_while_there_is_room() -> None:
    """Bug: a sequence is preempted although there is room for both."""
    at = engine(max_num_seqs=3)
    requests = [ask(at, LONGEST)]
    for i in (1, 2):
        for _ in range(9):
            step(at)
        requests.append(ask(at, LONGEST, i))
    finish(at)
    assert at.stats["num_preemptions"] == 0, "there were slots and blocks for all"
    assert at.stats["engine_steps"] == LONGEST + 18


def test_memory_is_room_too() -> None:
    """There are enough slots, but long texts have all the blocks."""
    at = engine(max_num_seqs=8, num_blocks=20)
    old = [ask(at, LONGEST, i) for i in range(2)]
    while len(at.pool.available) > 0:
        step(at)
    new = ask(at, 5, 2)
    step(at)
    assert made(new) == 1, "without free blocks, the last in the lowest queue must give way"
    assert old[0].outputs[0] in at.running, "no more sequences than needed must give way"
    finish(at)
    assert [r.outputs[0].token_ids for r in old] == [answer_of(LONGEST, i)[2] for i in range(2)]


def test_priority_comes_before_the_queue() -> None:
    at = engine()
    plain = ask(at, 5, 1)
    for _ in range(2):
        step(at)
    urgent = ask(at, LONGEST, 0, priority=-1)
    step(at)
    assert (made(plain), made(urgent)) == (2, 1), "a better priority takes the slot, too"
    for _ in range(9):
        step(at)
    least = ask(at, 3, 2, priority=1)
    order = [request for request in at.run() if request.finished]
    assert order == [urgent, plain, least], "a lower priority number still comes first"
    assert at.stats["num_preemptions"] == 1, "a better priority keeps the slot at any level"


# --- Nobody starves -------------------------------------------------------------------------------


def crowd(patience: int) -> tuple[int, list[int]]:
    """Add a new short request at each step, for one slot. Returns how many tokens the long request
    made, and the steps at which they came."""
    at = engine(patience=patience)
    long, came = ask(at, 24), []
    for now in range(400):
        ask(at, 3, 1 + now % 6)
        before = made(long)
        step(at)
        came += [now] * (made(long) - before)
    for seq in at.queue:
        at.abort(seq.request)
    audit(at)
    return made(long), came


def test_nobody_starves() -> None:
    tokens, _ = crowd(patience=10**6)
    assert tokens == 4, "without patience, the long one must wait for as long as others come"
    tokens, came = crowd(patience=30)
    assert tokens == 24, (
        f"it has {tokens} tokens of 24: after `patience` steps without one, it must begin again "
        "in the highest queue, where it is the oldest"
    )
    gaps = [b - a for a, b in pairwise(came)]
    assert max(gaps) <= 30 + 3 + 1, f"it waited {max(gaps)} steps for a token, with patience=30"
    assert sum(gap > 1 for gap in gaps) == 5, "each time it is back, it may make quantum tokens"


def test_patience_counts_steps_without_a_token() -> None:
    """Bug: a running sequence is promoted because it takes long."""
    at = engine(patience=5, max_num_seqs=2)
    seqs = [ask(at, LONGEST, i).outputs[0] for i in range(2)]
    for _ in range(30):
        step(at)
    assert [seq.level for seq in seqs] == [3, 3], "30 tokens are 4, 8, 16, and 2 at level 3"


# --- What it is for -------------------------------------------------------------------------------


@pytest.mark.parametrize(("gap", "slots", "most"), [(3, 2, 0.5), (1, 4, 0.7)])
def test_the_mean_request_is_done_sooner(gap: int, slots: int, most: float) -> None:
    """There are six long texts and 18 short ones, which all ask for 60 tokens. Time is counted in
    steps."""
    size = {"num_blocks": 200, "block_size": 4, "max_num_batched_tokens": 16}
    took, ran = play(Engine(MODEL, max_num_seqs=slots, **size), MIX, gap)
    at = engine(max_num_seqs=slots)
    sooner, again = play(at, MIX, gap)
    means = sum(sooner) / len(MIX), sum(took) / len(MIX)
    print(f"{means[1]:.1f} steps, first come, first served; {means[0]:.1f} with queues")
    assert means[0] <= most * means[1], f"{means[0]:.1f} steps on average, {means[1]:.1f} without"
    assert max(sooner) <= 1.3 * max(took), "the longest wait is too long"
    blocks = (again - ran) / at.stats["num_preemptions"]
    assert blocks <= 4, "free() the table, so that the blocks stay in the prefix cache"


class Repeat(NGram):
    """Guesses in some steps, also in random text."""

    def count(self, seq: EngineSequence) -> int:
        return super().count(seq) if len(seq.ids) % 3 else 0


@pytest.mark.parametrize("guesses", [0, 2])
@pytest.mark.parametrize("blocks", [18, 40])
def test_the_books_balance(blocks: int, guesses: int) -> None:
    """With forks, guesses, little memory and little patience, the tokens stay the same."""
    at = engine(
        num_blocks=blocks, max_num_seqs=3, quantum=2, patience=9,
        proposer=Repeat(guesses) if guesses else None,
    )  # fmt: skip
    requests = []
    for i in range(9):
        params = SamplingParams(
            max_tokens=5 + 7 * (i % 4), temperature=0, ignore_eos=True, n=1 + i % 2
        )
        requests.append(at.add_request([*range(1 + i, 4 + 2 * i)], params))
        for _ in range(3):
            step(at)
    finish(at)
    assert at.stats["num_preemptions"] > 5, "the test is useless"
    for i, request in enumerate(requests):
        want = write(MODEL, [*range(1 + i, 4 + 2 * i)], 5 + 7 * (i % 4)).token_ids
        assert [seq.token_ids for seq in request.outputs] == [want] * (1 + i % 2)


@pytest.mark.parametrize("wrong", [{"quantum": 0}, {"patience": 0}, {"max_num_seqs": 0}])
def test_what_makes_no_sense_is_refused(wrong: dict[str, int]) -> None:
    engine()
    with pytest.raises(ValueError, match=next(iter(wrong))):
        engine(**wrong)
