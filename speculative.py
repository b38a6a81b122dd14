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
nothing looks, and are overwritten. Knows the scheduler's jobs; the scheduler does not know this
file, and calls what it is handed. Papers: Leviathan et al. 2022 (arXiv:2211.17192), Chen et al.
2023 (arXiv:2302.01318), prompt lookup: Saxena 2023 (github.com/apoorvumang/prompt-lookup-decoding).
Read: accept, Guesser.verify, NGram, DraftModel.
"""

from itertools import islice
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from model import Transformer
from paged import Row, Runner
from sampling import Token, distribution, draw, scored
from scheduler import Guess, Job, Proposer
from settings import supported

# Where in a seed's stream of random numbers the guesses and their tests begin; the tokens have the
# places from 0, one each, and there are at most 2**31 of them.
GUESS, ACCEPT = 2**32, 2**33


def accept(p: Tensor, chances: Tensor, guess: Guess, u: Tensor) -> tuple[int, Tensor]:
    """Decide how many guesses of one sequence stand, and what comes after them.

    A guess x is accepted with probability min(1, p(x) / q(x)), and where it is refused the token
    comes from max(0, p - q), normalised. So x comes out with probability
    q(x) min(1, p(x) / q(x)) + P(refused) * max(0, p(x) - q(x)) / P(refused) = p(x).

    Args:
        p: (k + 1, V), what the model would draw from at the last known token and at each guess.
        chances: (k + 1,) on the CPU, p of each guess; the last is not read.
        guess: k ids, and how they were drawn.
        u: (k + 1,) on the CPU, uniform in [0, 1), likewise.

    Returns:
        How many of the guesses stand, from the first; and (V,), not yet normalised, what one more
        token is to be drawn from.

    Example: p = [0.5, 0.5, 0], q = [0.8, 0, 0.2]. A guess of 0 stays with probability 0.5 / 0.8, of
        2 never; the token instead comes from [0, 0.5, 0]. So 0 comes out in 0.8 * 0.625 = 0.5.
    """
    for n, x in enumerate(guess.ids):
        if u[n] * guess.q[n] >= chances[n]:
            over = (p[n] - (guess.probs[n] if guess.probs else 0)).clamp(min=0)
            over[x] = 0  # here p < q; where the guess was certain, that is all there is to do
            return n, torch.where(over.any(), over, p[n])  # rounding can leave nothing
    return len(guess.ids), p[-1]


class Guesser(Proposer):
    """What all guessers share: how guesses are verified, and what became of them."""

    def verify(self, logits: Tensor, jobs: list[Job]) -> list[list[Token]]:
        """See scheduler.Proposer.verify, and accept."""
        guesses = [job.guess for job in jobs]
        if not any(guess.ids for guess in guesses):
            return super().verify(logits, jobs)
        # 1) p at each guess, as if those before it had been accepted
        sizes = [len(guess.ids) + 1 for guess in guesses]
        ahead = [job.ahead(job.guess.ids[:i]) for job, n in zip(jobs, sizes) for i in range(n)]
        p = distribution(logits, ahead)  # (R, V)
        # 2) accept
        ids = torch.tensor([[x] for guess in guesses for x in (*guess.ids, 0)], device=p.device)
        chances = p.gather(1, ids).flatten().cpu().split(sizes)  # after the last: unread
        u = torch.tensor([row.uniform(ACCEPT) for row in ahead], dtype=torch.float64).split(sizes)
        stand, rest = zip(*map(accept, p.split(sizes), chances, guesses, u))
        # 3) draw one more token of each, by the number that plain decoding would use at its place
        u = torch.tensor([job.uniform(n) for job, n in zip(jobs, stand)])
        more = draw(torch.stack(rest), u).tolist()
        ids = []
        for guess, n, one in zip(guesses, stand, more):
            for i in range(len(guess.ids)):
                self.offered[i] += 1
                self.accepted[i] += i < n
            ids += [*guess.ids[:n], one, *guess.ids[n:]]  # one for each row; the last are refused
        tokens = iter(scored(logits, ids, ahead))
        return [[*islice(tokens, size)][: n + 1] for size, n in zip(sizes, stand)]

    def take_back(self, job: Job, runner: Runner) -> Tensor:
        """See scheduler.Proposer.take_back. A guess whose keys or values are NaN spoils also what
        stands before it, as attention multiplies what is masked by 0, and 0 * NaN is NaN. So the
        job's last token takes the guesses' places in the cache."""
        job.guess.ids[:] = job.ids[-1:] * len(job.guess.ids)
        logits = runner.forward([job.row])
        job.guess = Guess()
        return logits[:1]

    def summary(self) -> str:
        """What became of the guesses, in a line."""
        times = self.offered[0]
        if not times:
            return "0 times guessed"
        rates = " ".join(f"{a / n:.0%}" for a, n in zip(self.accepted, self.offered) if n)
        return (
            f"{times} times guessed, {sum(self.accepted) / times:.2f} accepted on average "
            f"(by position: {rates})"
        )


class NGram(Guesser):
    """Prompt lookup: what followed the last few tokens when they last occurred. Costs next to
    nothing, and is right where a text repeats itself: code, summaries, corrections.

    Attributes:
        texts: of each job its ids, each as a character. Gone with the job.
    """

    texts = WeakKeyDictionary()  # noqa: RUF012 (meant for all)

    def propose(self, jobs: list[Job]) -> None:
        for job in jobs:
            text = self.texts.get(job, "")
            # Python has no larger characters; a larger id would only make a bad guess.
            text += "".join(chr(i % 2**20) for i in job.ids[len(text) :])
            self.texts[job] = text
            found = lookup(text, max(0, job.end - len(job.ids)))
            job.guess = Guess([*map(ord, found)], [1.0] * len(found))


def lookup(text: str, count: int, longest: int = 3) -> str:
    """What followed the latest earlier occurrence of the last n characters, for the largest n
    found. Python searches 50,000 of them in microseconds, which a list of ids would not allow.

    Args:
        text: a character for each token.
        count: characters to return, at most.
        longest: n to begin with; longer ones only repeat what these find.

    Example: "abcxbc", count 2: the last two, "bc", occurred before "xb", which is returned
    """
    for n in range(longest, 0, -1):
        at = text.rfind(text[-n:], 0, -1)
        if at >= 0:
            return text[at + n : at + n + count]
    return ""


class DraftModel(Guesser):
    """A small model with the same vocabulary, whose cache follows the large one's row by row.

    Both caches are filled by the same rows: a block of the one pool holds the same tokens as that
    block of the other, so that sharing, copying and preempting need no second account.
    """

    def __init__(self, draft: Transformer, k: int, vocab_size: int) -> None:
        """Take the draft.

        Args:
            draft: on the large model's device.
            k: tokens to guess in a step.
            vocab_size: the large model's.

        Raises:
            ValueError: the draft's vocabulary is another.
        """
        super().__init__(k)
        supported("the draft's vocab_size", draft.config.vocab_size, vocab_size)
        self.models = (draft,)

    def propose(self, jobs: list[Job]) -> None:
        # 1) keep up. From one token before: where all guesses were accepted, the last one has not
        # been run here; else that token's keys and values are written a second time, unchanged.
        live = {job: max(job.table.length - 1, 0) for job in jobs}  # job -> where its row begins
        while live and self.k:
            rows = [
                Row(job.table.blocks, start, job.ids[start : job.end] + job.guess.ids[-1:])
                for job, start in live.items()
            ]
            logits = self.runners[0].forward(rows)  # (rows, V)
            # 2) draw one more where it is wanted, by the job's own settings: that is its next row
            wanted = {job: i for i, job in enumerate(live) if wants_more(job)}
            if not wanted:
                return
            ahead = [job.ahead(job.guess.ids) for job in wanted]
            q = distribution(logits[[*wanted.values()]], ahead)
            ids = draw(q, torch.tensor([row.uniform(GUESS) for row in ahead]))
            # One read for all, as a GPU waits for each; float32 holds ids up to 2**24.
            drawn = torch.stack((ids.float(), q.gather(1, ids[:, None]).flatten()), 1).tolist()
            live = {}
            for job, (token_id, chance), probs in zip(wanted, drawn, q):
                if chance > 0:  # else its logits are no numbers, and it guesses no more
                    job.guess.ids.append(int(token_id))
                    job.guess.q.append(chance)
                    job.guess.probs.append(probs)
                    if wants_more(job):
                        live[job] = len(job.ids) + len(job.guess.ids) - 1


def wants_more(job: Job) -> bool:
    """Whether a job may have another guess in this step."""
    return job.end > len(job.ids) + len(job.guess.ids)
