"""Ids to text, one at a time: never half a character, and never past a stop string.

Of a tokenizer, this file knows only `decode`. Read: Detokenizer, TextStream.
"""

from functools import partial
from typing import Any

Ids = list[int]  # token ids


class Detokenizer:
    """Decode a growing list of ids, and return each character once, when it is complete.

    It would be wrong to decode each id alone, for two reasons: a character can span several tokens,
    and decoders drop the space in front of the first word. So new ids are decoded together with
    some ids before them (the context), and the text that they add is returned when it cannot end in
    half a character.
    """

    def __init__(self, tokenizer: Any, prompt_ids: Ids, show_special: bool = False) -> None:
        """Take the end of the prompt as the first context.

        Args:
            tokenizer: None: all text is empty.
            show_special: whether special tokens are text.
        """
        decode = tokenizer.decode if tokenizer else lambda ids, show_special: ""
        self._decode = partial(decode, show_special=show_special)
        self._new: Ids = []
        # A context should begin with a whole character, and have text. A character spans at most
        # four tokens, so of four contexts that begin one token apart, one mostly begins with a
        # whole character. If none of them will do, 128 ids may.
        for length in (8, 7, 6, 5, 128):
            self._context = prompt_ids[-length:]
            text = self._decode(self._context)
            if text.strip() and not text.startswith("\ufffd"):
                break

    def push(self, token_id: int | None, last: bool = False) -> str:
        """Add one id, or none, and return the text that is now complete, which may be "".

        Args:
            last: also return what has been held back, an incomplete character as "\ufffd".

        Example: ids of "a", 0xC3, 0xA9 (two bytes of one character) -> "a", "", "\u00e9"
        """
        if token_id is not None:
            self._new.append(token_id)
        before = self._decode(self._context)
        text = self._decode(self._context + self._new)[len(before) :]
        # An incomplete character decodes to U+FFFD, and may turn complete ones beside it into
        # U+FFFD: wait for more. Bytes that are really invalid are returned once other text follows,
        # or after 32 ids.
        if text.endswith("\ufffd") and len(self._new) < 32 and not last:
            return ""
        # The new ids become the context. If they add no text, or only spaces, which a decoder may
        # drop at the beginning, the old context stays. If it has fewer than 8 ids, they join it.
        if text.strip():
            self._context = self._new
        elif len(self._context) < 8:
            self._context += self._new
        self._new = []
        return text


class TextStream:
    """The text of a sequence as it grows, up to the first of its stop strings.

    Attributes:
        text: what may be shown, so it never shrinks. The end of what is decoded is held back while
            it may be part of a stop string or half a character.
    """

    def __init__(self, tokenizer: Any, prompt_ids: Ids, stops: tuple) -> None:
        self.text = ""
        self._held = ""  # decoded text that may be the beginning of a stop string
        self._stops = stops
        self._detokenizer = Detokenizer(tokenizer, prompt_ids)

    def push(
        self, token_id: int | None, last: bool = False, can_stop: bool = True
    ) -> tuple[str, bool]:
        """Add one id, or none.

        Args:
            last: show also what has been held back, but nothing from a stop string on.
            can_stop: whether a stop string may end here; see SamplingParams.min_tokens.

        Returns:
            The text that this id completes, uncut, and whether a stop string was found.

        Example: the stop string is "ab". After "xa" the text is "x", and "a" is held back. If "c"
            follows, the text is "xac"; if "ab" follows, it ends with "xa", before the stop string.
        """
        new = self._detokenizer.push(token_id, last)
        pending = self._held + new
        # A stop string counts if it ends after this many characters. One that ended in what was
        # held came too early (see can_stop), and was held only because a longer one may contain it.
        early = len(self._held) if can_stop else len(pending)
        found = []  # where a stop string stands
        begun = []  # where one may have begun
        for stop in self._stops:
            for i in range(len(pending)):
                if pending.startswith(stop, i):
                    if i + len(stop) > early:
                        found.append(i)
                elif stop.startswith(pending[i:]) and not last:
                    begun.append(i)
        cut = min(found or begun, default=len(pending))
        self.text += pending[:cut]
        self._held = pending[cut:]
        return new, bool(found)
