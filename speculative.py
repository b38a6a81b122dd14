"""Speculative decoding: guess the next tokens cheaply, check all guesses in one forward.

Decoding reads every weight to make one token. A forward that checks five tokens also reads each
weight only once. So something cheap guesses k tokens, and the model runs over all of them at once.
It keeps the guesses up to the first that it disagrees with, and adds one token of its own.
Rejection sampling decides which guesses to keep, in such a way that the output has exactly the
distribution that it has without guesses. At temperature 0 the tokens themselves are the same, but
for rounding.

    ids        the  cat                     known; "cat" has not been run yet
    guesses              sat  on   a        drawn from a draft's distribution q, or looked up: q = 1
    forward         cat  sat  on   a        logits after each: four distributions p
    accept              yes  yes  no        each guess x with probability min(1, p(x) / q(x))
    output               sat  on  the       after a refusal, draw from what p has beyond q

Nothing has to be undone when a guess is refused. Its keys and values lie past the sequence's
length, where the mask hides them, and are overwritten later. This file knows the scheduler's
sequences. The scheduler does not know this file, and calls the Proposer that it is given. Papers:
Leviathan et al. 2022 (arXiv:2211.17192), Chen et al. 2023 (arXiv:2302.01318), prompt lookup:
Saxena 2023 (github.com/apoorvumang/prompt-lookup-decoding). Read: accept,
SpeculativeProposer.verify, verify_drawn, NGram, DraftModel.
"""

import math
from array import array
from collections.abc import Iterable
from operator import ne

import torch
import torch.nn.functional as F
from torch import Tensor

from around.settings import check
from model import Transformer
from paged import Row
from sampling import Token, distribution, draw, scored
from scheduler import EngineSequence, Guess, Proposer, run_order

# Each seed has one stream of random numbers. Number i draws token i of the output, number GUESS + i
# draws a guess of that token, and number ACCEPT + i decides whether the guess is accepted. A text
# has at most 2**31 tokens.
GUESS = 2**32
ACCEPT = 2**33


def accept(p: Tensor, chances: Tensor, guess: Guess, u: Tensor) -> tuple[int, Tensor]:
    """Decide how many guesses of one sequence are accepted, and what comes after them.

    A guess x was drawn with probability q(x). It is accepted with probability min(1, p(x) / q(x)).
    Where it is refused, the token is drawn from max(0, p - q), divided by its sum, instead. This
    sum is also the probability of a refusal, so the two cancel, and x comes out with probability
    q(x) * min(1, p(x) / q(x)) + max(0, p(x) - q(x)) = p(x).

    Args:
        p: (k + 1, V), the model's distribution after the last known token and after each guess.
        chances: (k + 1,), p of each guess, on the CPU, because to read them one by one from p would
            make the host wait for a GPU each time. The last is not read.
        guess: the k guesses: their ids, and how they were drawn.
        u: (k + 1,) on the CPU, uniform in [0, 1). The last is not read.

    Returns:
        The number of guesses that are accepted, from the first; and (V,), not normalised, the
        distribution from which one more token is to be drawn.

    Example: p = [0.5, 0.5, 0], q = [0.8, 0, 0.2]. A guess of 0 is accepted with probability
        0.5 / 0.8, and a guess of 2 never. Otherwise the token is drawn from [0, 0.5, 0]. So 0 comes
        out with probability 0.8 * 0.625 = 0.5.
    """
    for n, x in enumerate(guess.ids):
        if not u[n] * guess.q[n] < chances[n]:  # x is refused, also where p is NaN
            # A guess without probs was certain: q is 1 at x, and 0 elsewhere. So nothing is
            # subtracted from p, and the entry of x is set to 0 afterwards. With probs that entry is
            # 0 already, because x is refused only if p(x) < q(x).
            q = guess.probs[n] if guess.probs else 0
            rest = (p[n] - q).clamp(min=0)
            rest[x] = 0
            # Rounding can leave nothing of p - q.
            return n, torch.where(rest.any(), rest, p[n])
    return len(guess.ids), p[-1]


class SpeculativeProposer(Proposer):
    """What the proposers below share: how many guesses a sequence gets, and their verification."""

    def __init__(self, k: int) -> None:
        """Raises SettingError if k is out of range."""
        super().__init__()
        self.k = check("speculate", k, int, 0, 64)

    def count(self, seq: EngineSequence) -> int:
        """How many tokens to guess; see scheduler.Proposer.count."""
        room = seq.max_len - len(seq.ids) - 1  # one token comes after the guesses
        return min(self.k, room) if seq.tokens else 0  # 0 until it has its first token

    def verify(self, logits: Tensor, seqs: list[EngineSequence]) -> list[list[Token]]:
        """Accept guesses and add one token to each sequence; see scheduler.Proposer.verify."""
        split_logits = logits.split([len(seq.guess.ids) + 1 for seq in seqs])
        # 1) Accept some guesses of each sequence, and choose the token after them.
        verify = verify_greedy if all(seq.takes_argmax for seq in seqs) else verify_drawn
        results = []
        for seq, own_logits, (count, last_id) in zip(seqs, split_logits, verify(logits, seqs)):
            self.offered.update(range(len(seq.guess.ids)))
            self.accepted.update(range(count))
            # 2) Score the tokens that are kept.
            kept = [*seq.guess.ids[:count], last_id]
            counts = [seq.params.logprobs] * len(kept)
            results.append(scored(own_logits[: count + 1], kept, counts))
        return results


def verify_drawn(logits: Tensor, seqs: list[EngineSequence]) -> Iterable[tuple]:
    """Verify guesses by rejection sampling; see SpeculativeProposer.verify.

    Returns:
        For each sequence, how many guesses are kept, and the token after them.
    """
    # 1) Compute the model's distribution at each guess, as if all guesses before it were accepted,
    # and once more after the last guess. For each of these R rows, `extended` has the sequence up
    # to there, and `ids` the guess; after the last guess it has a 0, never used.
    guesses = [seq.guess for seq in seqs]
    sizes = [len(guess.ids) + 1 for guess in guesses]
    extended = []
    ids = []
    for seq, size in zip(seqs, sizes):
        extended += [seq.with_guesses(seq.guess.ids[:i]) for i in range(size)]
        ids += [*seq.guess.ids, 0]
    p = distribution(logits, extended)  # (R, V)
    chances = p.gather(1, torch.tensor(ids, device=p.device)[:, None])  # (R, 1)
    chances = chances.flatten().cpu()  # one read by the host for all sequences
    u = torch.tensor([each.uniform(ACCEPT) for each in extended], dtype=torch.float64)
    # 2) Accept some guesses of each sequence, and find what the token after them is drawn from.
    of_seqs = zip(p.split(sizes), chances.split(sizes), guesses, u.split(sizes))
    counts, rests = zip(*[accept(*each) for each in of_seqs])
    # 3) Draw one more token for each, by the random number that plain decoding would use.
    u_last = torch.tensor([seq.uniform(count) for seq, count in zip(seqs, counts)])
    return zip(counts, draw(torch.stack(rests), u_last).tolist())


def verify_greedy(logits: Tensor, seqs: list[EngineSequence]) -> Iterable[tuple]:
    """Do the same where each token is to be the likeliest one: a guess is kept if it is. With 40
    rows and a vocabulary of 150,000 it takes a twentieth of the time.

    Example: guesses [5, 9, 2], and the likeliest tokens [5, 9, 7, 3] -> 2 are kept, then comes 7
    """
    ids = iter(logits.max(-1).indices.tolist())
    for seq in seqs:
        best = [next(ids) for _ in range(len(seq.guess.ids) + 1)]
        count = [*map(ne, seq.guess.ids, best), True].index(True)
        yield count, best[count]


class NGram(SpeculativeProposer):
    """Prompt lookup: guess what followed the last few tokens when they occurred before. It is right
    where a text repeats itself: in code, summaries and corrections."""

    def propose(self, seqs: list[EngineSequence]) -> None:
        for seq in seqs:
            # Each id becomes the character of that number, of which Python has 1,114,112. Without
            # "-le", for little endian, the id 65279 would be taken for a mark, and dropped.
            text = array("I", seq.ids).tobytes().decode("utf-32-le", "surrogatepass")
            ids = [ord(character) for character in lookup(text, seq.num_guesses)]
            seq.guess = Guess(ids, [1.0] * len(ids))


def lookup(text: str, count: int, longest: int = 3) -> str:
    """Return what followed the latest earlier occurrence of the last n characters.

    n is the largest for which there is one. A text is searched, and not a list of ids, because
    Python searches 50,000 characters in microseconds.

    Args:
        text: one character for each token.
        count: the largest number of characters to return.
        longest: the largest n to try. A match of more than 3 seldom gives a different guess.

    Example: "abcxbc", count 2: "xbc" does not occur earlier, but "bc" does, and is followed by "xb"
    """
    for n in range(longest, 0, -1):
        at = text.rfind(text[-n:], 0, -1)  # it must end before the text does
        if at >= 0:
            return text[at + n : at + n + count]
    return ""


class DraftModel(SpeculativeProposer):
    """A small model with the same tokens, whose cache follows the large model's.

    Many vocabularies are padded to a round size, which may be another one for each model. The draft
    never guesses an id that it lacks, and reads such an id as its last one. If an id meant
    different things to the two models, the text would still be right, and the guesses refused.

    Both caches use the same block tables, so a block holds the same tokens in both. Sharing,
    copying and preempting blocks then need no bookkeeping for the draft.
    """

    def __init__(self, draft: Transformer, k: int, vocab_size: int) -> None:
        """Set the draft model.

        Args:
            draft: a model on the large model's device.
            k: how many tokens to guess in a step.
            vocab_size: the large model's.

        Raises:
            SettingError: k is out of range.
        """
        super().__init__(k)
        self.models = (draft,)
        self.vocab_size = vocab_size

    def propose(self, seqs: list[EngineSequence]) -> None:
        if not self.k:
            return
        # Suppose that the guesses a and b were accepted. The model's cache then holds both, but the
        # draft's holds only a: the draft ran a to draw b, and never ran b. So the first row of a
        # sequence here begins one token before the model's row, at b. In all other cases the
        # draft's cache has that token already. It is written again, the same but for rounding.
        rows = {}
        size = self.models[0].config.vocab_size
        for seq in sorted(seqs, key=run_order):  # as the engine sorts the model's rows
            start = max(seq.table.length - 1, 0)
            known = seq.ids[start : seq.table.length + seq.num_scheduled]
            rows[seq] = Row(seq.table.blocks, start, [min(i, size - 1) for i in known])
        while rows:
            # 1) Run the draft. The engine has made its Runner; see scheduler.Proposer.
            logits = self.runners[0].forward([*rows.values()])  # (rows, size)
            logits = F.pad(logits, (0, self.vocab_size - size), value=-math.inf)  # (rows, V)
            # 2) Draw one guess for each sequence that may have another, by its own settings.
            # `guessing`: sequence -> its row in the logits.
            guessing = {seq: i for i, seq in enumerate(rows) if seq.num_guesses}
            if not guessing:  # for example, while all sequences run their prompts
                return
            extended = [seq.with_guesses(seq.guess.ids) for seq in guessing]
            q = distribution(logits[[*guessing.values()]], extended)  # (rows that guess, V)
            u = torch.tensor([each.uniform(GUESS) for each in extended])
            ids = draw(q, u)[:, None]  # (rows that guess, 1)
            # All numbers are read at once, as each read makes the host wait for a GPU. float32
            # holds ids up to 2**24 exactly.
            drawn = torch.cat((ids.float(), q.gather(1, ids)), 1).tolist()
            # 3) Keep the guesses. If a sequence may have one more, this guess is its next row.
            rows = {}
            for seq, (token_id, chance), probs in zip(guessing, drawn, q):
                if chance > 0:  # else the draft's logits are NaN, and the sequence guesses no more
                    guess = seq.guess
                    guess.ids.append(int(token_id))
                    guess.q.append(chance)
                    guess.probs.append(probs)
                    if len(guess.ids) < seq.num_guesses:
                        start = len(seq.ids) + len(guess.ids) - 1
                        rows[seq] = Row(seq.table.blocks, start, guess.ids[-1:])
