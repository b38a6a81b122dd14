"""Speculative decoding: guess the next tokens cheaply, check all guesses in one forward.

Decoding reads every weight to make one token, and to check five costs little more than to make one.
So something cheap guesses K tokens, the model runs over all of them at once, and keeps the longest
run of guesses that it agrees with, plus one token of its own. Rejection sampling decides, in such a
way that the output is distributed exactly as without guessing; greedily, it is the same tokens.

    ids        the  cat                     known; "cat" has not been run yet
    guesses              sat  on   a        from a draft model, or from what the text repeats
    forward         cat  sat  on   a        logits after each: four distributions p
    accept              yes  yes  no        each guess x with probability min(1, p(x) / q(x))
    output               sat  on  the       where one is refused, draw from what p has over q

Nothing is undone when a guess is refused: its keys and values lie past the sequence's length, where
nothing looks, and are overwritten. What it buys: twice the speed with prompt lookup on a text that
repeats itself, 3 times with a draft of 2 layers out of 22 that is always right (`tools/bench.py
latency` with `--speculate`). Knows sequences, not who schedules them. Papers: Leviathan et al. 2022
(arXiv:2211.17192), Chen et al. 2023 (arXiv:2302.01318), prompt lookup: Saxena 2023
(github.com/apoorvumang/prompt-lookup-decoding). Read: verify, Proposer, NGram, DraftModel. Next:
structured.py.
"""

import torch
from torch import Tensor

from model import check, supported
from paged import Row, Runner
from sampling import Guess, Sequence, Token, distribution, draw, finite, sample, scored, uniforms

# Where in a seed's stream of random numbers the guesses and their tests begin; the tokens have the
# places from 0, one each, and there are at most 2**31 of them.
GUESS, ACCEPT = 2**32, 2**33


def verify(logits: Tensor, sequences: list[Sequence]) -> list[list[Token]]:
    """Choose the next tokens of each sequence: its guesses that are accepted, and one more.

    A guess x is accepted with probability min(1, p(x) / q(x)), and where it is refused the token
    comes from max(0, p - q), normalised. So x comes out with probability
    q(x) min(1, p(x) / q(x)) + P(refused) * max(0, p(x) - q(x)) / P(refused) = p(x).

    Args:
        logits: (R, V), for each sequence at its last known token and at each guess.
        sequences: B of them, with guesses or without; read, not changed.

    Returns:
        For each sequence at least one token, with log-probabilities where it asks for them.

    Example: p = [0.5, 0.5, 0], q = [0.8, 0, 0.2]. A guess of 0 stays with probability 0.5 / 0.8, of
        2 never; the token instead comes from [0, 0.5, 0]. So 0 comes out in 0.8 * 0.625 = 0.5.
    """
    if not any(s.guess.ids for s in sequences):
        return [[token] for token in sample(logits, sequences)]
    # 1) p after each guess, as if those before it had been accepted
    ahead = [s.ahead(s.guess.ids[:i]) for s in sequences for i in range(len(s.guess.ids) + 1)]
    p = distribution(logits, ahead)  # (R, V)
    # 0: after the last guess there is none to test
    ids = torch.tensor([[i] for s in sequences for i in (*s.guess.ids, 0)])
    p_x, u = p.gather(1, ids.to(p.device))[:, 0].tolist(), uniforms(ahead, ACCEPT).tolist()
    # 2) accept, up to the first that is refused; there one more is drawn: from p after the last
    # guess, or from what p has over q
    spans: list[tuple[int, int]] = []  # of the logits that give each sequence's tokens
    at = 0
    for guess in (s.guess for s in sequences):
        n = 0
        while n < len(guess.ids) and u[at + n] * guess.q[n] < p_x[at + n]:
            n += 1
        if n < len(guess.ids):
            over = p[at + n].clone()
            over[guess.ids[n]] = 0  # here p < q, or the guess would have been accepted
            if guess.probs:
                over = (over - guess.probs[n]).clamp(min=0)
            p[at + n] = torch.where(over.sum() > 0, over, p[at + n])  # rounding can leave nothing
        spans.append((at, at + n))
        at += len(guess.ids) + 1
    last = [end for _, end in spans]
    more = draw(p[last], uniforms([ahead[i] for i in last])).tolist()
    tokens = []
    for s, (start, end), one in zip(sequences, spans, more, strict=True):
        chosen = [*s.guess.ids[: end - start], one]
        counts = [s.params.logprobs] * len(chosen)
        tokens.append(scored(logits[start : end + 1], chosen, counts))
    return tokens


class Proposer:
    """Guesses nothing, which is plain decoding; what guesses overrides `propose`.

    Attributes:
        k: guesses for each sequence in a step, at most.
        offered, accepted: by position, how many guesses were made, and how many came out.
        steps: verifications that had a guess to verify.
    """

    def __init__(self, k: int = 0) -> None:
        """Raises ValueError where k is out of range."""
        self.k, self.steps = check("tokens to guess", k, int, 0, 64), 0
        self.offered, self.accepted = [0] * k, [0] * k

    def count(self, sequence: Sequence) -> int:
        """How many tokens to guess. A function of the sequence alone, so that the random numbers it
        uses, and with them its tokens, do not depend on its neighbours."""
        room = sequence.max_len - len(sequence.ids) - 1  # one token comes after the guesses
        return min(self.k, room) if sequence.tokens else 0

    def propose(self, sequences: list[Sequence]) -> None:
        """Note in each sequence's `guess` what may follow, up to its `end`. The coming step runs
        all of them, from what their tables hold."""

    def verify(self, logits: Tensor, sequences: list[Sequence]) -> list[list[Token]]:
        """See verify(). Keeps count."""
        results = verify(logits, sequences)
        for sequence, tokens in zip(sequences, results, strict=True):
            self.steps += bool(sequence.guess.ids)
            for i in range(len(sequence.guess.ids)):
                self.offered[i] += 1
                self.accepted[i] += i < len(tokens) - 1
        return results

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        """See Runner.copy_blocks."""

    def summary(self) -> str:
        """What became of the guesses, in a line."""
        rates = " ".join(f"{a / n:.0%}" for a, n in zip(self.accepted, self.offered) if n)
        mean = sum(self.accepted) / max(1, self.steps)
        return f"{self.steps} times guessed, {mean:.2f} accepted on average ({rates})"


class NGram(Proposer):
    """Prompt lookup: what followed the last few tokens when they last occurred. Costs next to
    nothing, and is right where a text repeats itself: code, summaries, corrections."""

    def propose(self, sequences: list[Sequence]) -> None:
        for s in sequences:
            ids = lookup(s.ids, s.followed, max(0, s.end - len(s.ids)))
            s.guess = Guess(ids, [1.0] * len(ids))


def lookup(ids: list[int], followed: dict, count: int, longest: int = 3) -> list[int]:
    """What followed the latest earlier occurrence of the last n ids, for the largest n found.

    Args:
        followed: where each n ids, as a tuple, were last followed by others; brought up to date
            here, so that a step's cost does not grow with the text. Begins as {}.
        count: ids to return, at most.
        longest: n to begin with; longer ones only repeat what these find.

    Example: ids = 1 2 3 9 2 3, count 2: the last two, 2 3, occurred before 9 2, which is returned
    """
    if not count:
        return []
    for end in range(followed.get((), 0) + 1, len(ids)):  # (), before all, tells how far it goes
        for n in range(min(longest, end) + 1):
            followed[tuple(ids[end - n : end])] = end
    lasts = (tuple(ids[-n:]) for n in range(longest, 0, -1))
    at = next((followed[last] for last in lasts if last in followed), len(ids))
    return ids[at : at + count]


class DraftModel(Proposer):
    """A small model with the same vocabulary, whose cache follows the large one's row by row.

    Both caches are filled by the same rows: a block of the one pool holds the same tokens as that
    block of the other, so that sharing, copying and preempting need no second account.
    """

    def __init__(self, runner: Runner, k: int, vocab_size: int) -> None:
        """Take the draft, in its runner.

        Args:
            k: tokens to guess in a step.
            vocab_size: the large model's.

        Raises:
            ValueError: the draft's vocabulary is another.
        """
        super().__init__(k)
        supported("the draft's vocab_size", runner.model.config.vocab_size, vocab_size)
        self.runner, self.copy_blocks = runner, runner.copy_blocks

    def propose(self, sequences: list[Sequence]) -> None:
        # 1) keep up. From one token before: where all guesses were accepted, the last one has not
        # been run here; else that token's keys and values are written a second time, unchanged.
        live, rows = sequences, []
        for s in live:
            s.guess, start = Guess(), max(s.table.length - 1, 0)
            rows.append(Row(s.table.blocks, start, s.ids[start : s.end]))
        while live:
            logits = self.runner.run(rows)  # (rows, V)
            for s, sound in zip(live, finite(logits).tolist()):
                s.table.spoilt |= not sound  # and guesses no more
            more = [s.end > len(s.ids) + len(s.guess.ids) and not s.table.spoilt for s in live]
            live, logits = [s for s, go_on in zip(live, more) if go_on], logits[more]
            if not live:
                break
            # 2) draw by the sequence's own settings
            ahead = [s.ahead(s.guess.ids) for s in live]
            q = distribution(logits, ahead)
            ids = draw(q, uniforms(ahead, GUESS))
            chances = q.gather(1, ids[:, None])[:, 0]
            for s, i, chance, probs in zip(live, ids.tolist(), chances.tolist(), q, strict=True):
                s.guess.ids.append(i)
                s.guess.q.append(chance)
                s.guess.probs.append(probs)
            # 3) run what was drawn, but the last
            live = [s for s in live if len(s.ids) + len(s.guess.ids) < s.end]
            at = [len(s.ids) + len(s.guess.ids) - 1 for s in live]
            rows = [Row(s.table.blocks, p, s.guess.ids[-1:]) for s, p in zip(live, at)]
