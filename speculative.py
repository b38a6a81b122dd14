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
repeats itself, 3 times with a draft of 2 layers out of 22 that is always right (`bench.py latency`
with `--speculate-ngram`, `--speculate`). Knows sequences and rows, not who schedules them. Papers:
Leviathan et al. 2022 (arXiv:2211.17192), Chen et al. 2023 (arXiv:2302.01318), prompt lookup: Saxena
2023 (github.com/apoorvumang/prompt-lookup-decoding). Read: verify, Proposer, NGram, DraftModel.
Next: tp.py.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from kv_cache import Row
from runner import Runner
from sampling import Sequence, Token, distribution, draw, sample, uniforms, with_logprobs

# Where in a seed's stream of random numbers the guesses and their tests begin; the tokens have the
# places from 0, one each, and there are at most 2**31 of them.
GUESS, ACCEPT = 2**32, 2**33


@dataclass
class Guess:
    """Tokens that may follow a sequence, and how they were drawn."""

    ids: list[int] = field(default_factory=list)
    q: list[float] = field(default_factory=list)  # the probability that each was drawn with
    probs: list[Tensor] = field(default_factory=list)  # (V,) each; empty: each was certain


def verify(logits: Tensor, sequences: list[Sequence], guesses: list[Guess]) -> list[list[Token]]:
    """Choose the next tokens of each sequence: the guesses that are accepted, and one more.

    A guess x is accepted with probability min(1, p(x) / q(x)), and where it is refused the token
    comes from max(0, p - q), normalised. So x comes out with probability
    q(x) min(1, p(x) / q(x)) + P(refused) * max(0, p(x) - q(x)) / P(refused) = p(x).

    Args:
        logits: (R, V), for each sequence at its last known token and at each guess.
        sequences: B of them; read, not changed.
        guesses: one for each, possibly empty.

    Returns:
        For each sequence at least one token, with log-probabilities where it asks for them.

    Example: p = [0.5, 0.5, 0], q = [0.8, 0, 0.2]. A guess of 0 stays with probability 0.5 / 0.8, of
        2 never; the token instead comes from [0, 0.5, 0]. So 0 comes out in 0.8 * 0.625 = 0.5.
    """
    if not any(guess.ids for guess in guesses):
        return [[token] for token in sample(logits, sequences)]
    pairs = [*zip(sequences, guesses, strict=True)]
    # 1) p after each guess, as if those before it had been accepted
    rows = [s.ahead(guess.ids[:i]) for s, guess in pairs for i in range(len(guess.ids) + 1)]
    p = distribution(logits, rows)  # (R, V)
    # 0: after the last guess there is none to test
    ids = torch.tensor([[i] for guess in guesses for i in (*guess.ids, 0)])
    p_x, u = p.gather(1, ids.to(p.device))[:, 0].tolist(), uniforms(rows, ACCEPT).tolist()
    # 2) accept, up to the first that is refused
    lines: list[range] = []  # of the logits that give each sequence's tokens
    at = 0
    for guess in guesses:
        end = at
        while end - at < len(guess.ids) and u[end] * guess.q[end - at] < p_x[end]:
            end += 1
        lines.append(range(at, end + 1))
        at += len(guess.ids) + 1
    # 3) one more: from p after the last guess, or from what p has over q
    last = [line[-1] for line in lines]
    rest = p[last]  # (B, V)
    for scores, line, guess in zip(rest, lines, guesses, strict=True):
        if (n := len(line) - 1) < len(guess.ids):
            over = scores.clone()
            over[guess.ids[n]] = 0  # here p < q, or the guess would have been accepted
            if guess.probs:
                over = (over - guess.probs[n]).clamp(min=0)
            scores.copy_(torch.where(over.sum() > 0, over, scores))  # rounding can leave nothing
    more = draw(rest, uniforms([rows[i] for i in last])).tolist()
    tokens = []
    for (sequence, guess), line, one in zip(pairs, lines, more, strict=True):
        chosen = [*guess.ids[: len(line) - 1], one]
        counts = [sequence.params.logprobs] * len(chosen)
        tokens.append(with_logprobs(logits[line.start : line.stop], chosen, counts))
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
        if not 0 <= k <= 64:
            raise ValueError(f"tokens to guess must be an integer in 0..64, is {k!r}")
        self.k, self.steps = k, 0
        self.offered, self.accepted = [0] * k, [0] * k

    def count(self, sequence: Sequence) -> int:
        """How many tokens to guess. A function of the sequence alone, so that the random numbers it
        uses, and with them its tokens, do not depend on its neighbours."""
        room = sequence.max_len - len(sequence.ids) - 1  # one token comes after the guesses
        return min(self.k, room) if sequence.tokens else 0

    def propose(self, sequences: list[Sequence], rows: list[Row], counts: list[int]) -> list[Guess]:
        """Guess what follows.

        Args:
            sequences: B of them; read, not changed.
            rows: their known tokens that the coming forward runs: start .. end - 1.
            counts: tokens to guess for each, at most; 0 where the row does not reach its end.
        """
        return [Guess() for _ in rows]

    def verify(
        self, logits: Tensor, sequences: list[Sequence], guesses: list[Guess]
    ) -> list[list[Token]]:
        """See verify(). Keeps count."""
        results = verify(logits, sequences, guesses)
        for guess, tokens in zip(guesses, results, strict=True):
            self.steps += bool(guess.ids)
            for i in range(len(guess.ids)):
                self.offered[i] += 1
                self.accepted[i] += i < len(tokens) - 1
        return results

    def compile(self) -> None:
        """Compile what it guesses with."""

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        """See PagedCache.copy_blocks."""

    def summary(self) -> str:
        """What became of the guesses, in a line."""
        if not self.steps:
            return "nothing was guessed"
        made = sum(n > 0 for n in self.offered)
        rates = [f"{a / n:.0%}" for a, n in zip(self.accepted[:made], self.offered)]
        mean = sum(self.accepted) / self.steps
        return f"{self.steps} times guessed, {mean:.2f} accepted on average ({' '.join(rates)})"


class NGram(Proposer):
    """Prompt lookup: what followed the last few tokens when they last occurred. Costs nothing, and
    is right where a text repeats itself: code, summaries, corrections."""

    def propose(self, sequences: list[Sequence], rows: list[Row], counts: list[int]) -> list[Guess]:
        found = [lookup(s.ids, n) for s, n in zip(sequences, counts, strict=True)]
        return [Guess(ids, [1.0] * len(ids)) for ids in found]


def lookup(ids: list[int], count: int, longest: int = 3, window: int = 4096) -> list[int]:
    """What followed the latest earlier occurrence of the last n ids, for the largest n found.

    Args:
        count: ids to return, at most.
        longest: n to begin with; longer ones only repeat what these find.
        window: how far back to look, in ids, so that a step's cost does not grow with the text.

    Example: ids = 1 2 3 9 2 3, count 2: the last two, 2 3, occurred before 9 2, which is returned
    """
    ids = ids[-window:]
    for n in range(min(longest, len(ids) - 1) if count else 0, 0, -1):
        for at in range(len(ids) - n - 1, -1, -1):
            if ids[at : at + n] == ids[-n:]:
                return ids[at + n : at + n + count]
    return []


class DraftModel(Proposer):
    """A small model with the same vocabulary, whose cache follows the large one's row by row.

    Both caches are filled by the same rows: in the scheduler, a block of the one pool holds the
    same tokens as that block of the other, so that sharing, copying and preempting need no second
    account.
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
        if (ours := runner.model.config.vocab_size) != vocab_size:
            raise ValueError(
                f"the draft's vocabulary has {ours} tokens, the model's {vocab_size}: "
                "a draft must come from the same family"
            )
        self.runner = runner

    def propose(self, sequences: list[Sequence], rows: list[Row], counts: list[int]) -> list[Guess]:
        guesses = [Guess() for _ in rows]
        # 1) keep up. From one token before: where all guesses were accepted, the last one has not
        # been run here; else that token's keys and values are written a second time, unchanged.
        behind = [row._replace(start=max(row.start - 1, 0)) for row in rows]
        tokens = [i for s, row in zip(sequences, behind, strict=True) for i in row.of(s.ids)]
        ends = torch.tensor([row.end - row.start for row in behind]).cumsum(0) - 1
        logits = self.runner(behind, tokens, ends.tolist())  # (rows, V)
        live = [b for b, count in enumerate(counts) if count]
        logits = logits[live]
        while live:
            # 2) draw by the sequence's own settings
            ahead = [sequences[b].ahead(guesses[b].ids) for b in live]
            q = distribution(logits, ahead)
            ids = draw(q, uniforms(ahead, GUESS))
            drawn = zip(live, ids.tolist(), q.gather(1, ids[:, None])[:, 0].tolist(), q)
            for b, i, chance, probs in drawn:
                guesses[b].ids.append(i)
                guesses[b].q.append(chance)
                guesses[b].probs.append(probs)
            # 3) run what was drawn
            live = [b for b in live if len(guesses[b].ids) < counts[b]]
            if live:
                ends = [rows[b].end + len(guesses[b].ids) for b in live]
                step = [Row(rows[b].blocks, end - 1, end) for b, end in zip(live, ends)]
                logits = self.runner(step, [guesses[b].ids[-1] for b in live], [*range(len(live))])
        return guesses

    def compile(self) -> None:
        self.runner.compile()

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        self.runner.copy_blocks(pairs)
