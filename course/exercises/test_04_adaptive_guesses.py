"""Exercise 04: guess more tokens while the guesses are right. See 04-adaptive-guesses.md."""

from dataclasses import replace

import torch
from common import serve, tiny_model

from around.settings import SamplingParams
from sampling import Token
from scheduler import Engine, EngineSequence, Guess, Request
from speculative import NGram, SpeculativeProposer

MODEL = tiny_model()
V = MODEL.config.vocab_size


def adaptive(k: int = 8) -> SpeculativeProposer:
    proposer = NGram(k)
    assert hasattr(proposer, "adaptive"), (
        "give SpeculativeProposer the attribute adaptive, False by default"
    )
    assert proposer.adaptive is False
    proposer.adaptive = True
    return proposer


def running(**settings: int | float) -> EngineSequence:
    """Make a sequence that has its first token, and room for many more."""
    params = SamplingParams(**{"temperature": 0, "max_tokens": 100} | settings)
    seq = EngineSequence(Request(), [1, 2, 3], params, MODEL.config)
    seq.append(Token(4))
    return seq


def outcome(proposer: SpeculativeProposer, *each: tuple[EngineSequence, int, int]) -> None:
    """Run one verification, where each item is (sequence, guesses, right guesses)."""
    logits = []
    for seq, made, right in each:
        seq.guess = Guess([5] * made, [1.0] * made)
        logits += [torch.eye(V)[5 if i < right else 6] for i in range(made + 1)]
    results = proposer.verify(torch.stack(logits), [seq for seq, _, _ in each])
    assert [len(tokens) - 1 for tokens in results] == [right for _, _, right in each]


def counts(proposer: SpeculativeProposer, seq: EngineSequence, *rights: int | None) -> list[int]:
    """Return the number of guesses before and after each verification.

    Args:
        rights: how many guesses are right in each verification; None: all of them.
    """
    seen = [proposer.count(seq)]
    for right in rights:
        made = seen[-1]
        outcome(proposer, (seq, made, made if right is None else right))
        seen.append(proposer.count(seq))
    return seen


def test_it_begins_with_one_and_grows_by_two() -> None:
    proposer = adaptive(8)
    wrong = "start with 1; make 2 more after a step in which all were right; at most k"
    assert counts(proposer, running(), None, None, None, None, None) == [1, 3, 5, 7, 8, 8], wrong


def test_it_shrinks_by_one() -> None:
    proposer = adaptive(8)
    wrong = "make 1 fewer after a step in which a guess was refused; at least 1"
    assert counts(proposer, running(), None, None, 4, 0, 2, 0, 0, 0) == [
        1, 3, 5, 4, 3, 2, 1, 1, 1
    ], wrong  # fmt: skip


def test_the_number_itself_stays_within_its_bounds() -> None:
    """Bug: only the result of count() is limited, so the number takes many steps to come back."""
    wrong = "the stored number, too, is at most k and at least 1"
    assert counts(adaptive(4), running(), *[None] * 5, 2) == [1, 3, 4, 4, 4, 4, 3], wrong
    assert counts(adaptive(4), running(), 0, 0, 0, None) == [1, 1, 1, 1, 3], wrong


def test_a_step_without_guesses_teaches_nothing() -> None:
    """Prompt lookup often finds nothing, which is neither right nor wrong."""
    proposer, seq = adaptive(), running()
    assert counts(proposer, seq, None) == [1, 3]
    outcome(proposer, (seq, 0, 0))
    assert proposer.count(seq) == 3


def test_fewer_guesses_than_asked_for_may_all_be_right() -> None:
    proposer, seq = adaptive(), running()
    assert counts(proposer, seq, None, None) == [1, 3, 5]
    outcome(proposer, (seq, 2, 2))
    assert proposer.count(seq) == 7


def test_each_sequence_has_its_own_number() -> None:
    """Bug: a sequence's tokens depend on its neighbours; see SpeculativeProposer.count."""
    proposer, good, bad, other = adaptive(), running(), running(), running()
    outcome(proposer, (bad, 1, 0), (good, 1, 1), (other, 0, 0))
    outcome(proposer, (good, 3, 3), (bad, 1, 0))
    assert [proposer.count(each) for each in (good, bad, other)] == [5, 1, 1]


def test_other_limits_stay() -> None:
    proposer = adaptive()
    seq = running(max_tokens=5)  # it has one token: 4 are left, 3 guesses and one after them
    assert counts(proposer, seq, None, None) == [1, 3, 3]
    fresh = EngineSequence(Request(), [1, 2], SamplingParams(), MODEL.config)
    assert proposer.count(fresh) == 0, "make no guesses before the first token"
    assert adaptive(2).count(running()) == 1
    assert counts(adaptive(2), running(), None, None) == [1, 2, 2]
    assert adaptive(0).count(running()) == 0, "k = 0 is plain decoding"


def test_fixed_is_the_default() -> None:
    adaptive()
    assert counts(NGram(4), running(), None, 0, 0, None) == [4, 4, 4, 4, 4]


def speak(
    proposer: SpeculativeProposer, *asked: tuple[list[int], SamplingParams], num_blocks: int = 60
) -> tuple[Engine, list[Request]]:
    """Serve requests that arrive at once, with these guesses."""
    small = {"block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 4 * (1 + proposer.k)}
    engine = Engine(MODEL, proposer=proposer, num_blocks=num_blocks, **small)
    return engine, serve(engine, *asked)


def test_in_the_engine_each_gets_what_it_gets_alone() -> None:
    """The number of guesses survives preemption, and does not depend on other sequences."""
    texts = [[5, 6, 7] * 4, [9, 3] * 3, [*range(2, 16)], [8] * 9]
    settings = [
        SamplingParams(max_tokens=20, seed=i, temperature=i * 0.4, n=2, ignore_eos=True)
        for i in range(4)
    ]
    asked = [*zip(texts, settings)]
    engine, requests = speak(adaptive(5), *asked, num_blocks=14)
    assert engine.stats["num_preemptions"]
    assert engine.proposer.offered[1], "no sequence ever made more than one guess"
    for (ids, params), request in zip(asked, requests):
        for i, got in enumerate(request.outputs):
            _, (alone,) = speak(adaptive(5), (ids, replace(params, n=1, seed=params.seed + i)))
            assert got.token_ids == alone.outputs[0].token_ids


def test_it_wastes_less() -> None:
    """On a text that does not repeat itself, an adaptive proposer makes fewer wrong guesses."""
    results = []
    for proposer in (NGram(8), adaptive(8)):
        params = SamplingParams(temperature=2.0, seed=2, max_tokens=100, ignore_eos=True)
        speak(proposer, ([10, 20, 30, 4], params))
        results.append((proposer.offered.total(), proposer.accepted.total()))
    fixed, moving = results
    print(f"offered, accepted: fixed {fixed}, adaptive {moving}")
    assert moving[0] < fixed[0] / 2, "after refusals there should be fewer guesses"
