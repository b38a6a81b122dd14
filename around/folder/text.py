"""Ids to text, one at a time: never half a character, and never past a stop string.

Of a tokenizer, this file knows what bytes each id stands for, and whether they are shown. Read:
Detokenizer, TextStream.
"""

from codecs import getincrementaldecoder
from typing import Any

Ids = list[int]  # token ids


class Detokenizer:
    """Decode ids one at a time, and return each character once, when it is complete.

    It would be wrong to decode each id alone, for two reasons: a character can span several tokens,
    and a text loses the space in front of its first word. So the bytes of an incomplete character
    are held back, and the space is dropped only where no text has come before.
    """

    def __init__(self, tokenizer: Any, prompt_ids: Ids, show_special: bool = False) -> None:
        """Begin behind a prompt.

        Args:
            tokenizer: None: all text is empty.
            show_special: whether special tokens are text.
        """
        self._tokenizer = tokenizer
        self._show_special = show_special
        self._utf8 = getincrementaldecoder("utf-8")("replace")
        is_start = tokenizer and not any(map(tokenizer.is_text, prompt_ids))
        self._dropped = tokenizer.dropped if is_start else ""

    def push(self, token_id: int | None, last: bool = False) -> str:
        """Add one id, or none, and return the text that is now complete, which may be "".

        Args:
            last: also return what has been held back, an incomplete character as "\ufffd".

        Example: ids of "a", 0xC3, 0xA9 (two bytes of one character) -> "a", "", "\u00e9"
        """
        is_shown = (
            self._tokenizer
            and token_id is not None
            and (self._show_special or self._tokenizer.is_text(token_id))
        )
        new = self._tokenizer.bytes_of(token_id) if is_shown else b""
        text = self._utf8.decode(new, last)
        shown = text.removeprefix(self._dropped)
        if text:
            self._dropped = ""
        return shown


class TextStream:
    """The text of a sequence as it grows, up to the first of its stop strings; and before it, for a
    model that thinks, the thought.

    Attributes:
        text: what may be shown, so it never shrinks. The end of what is decoded is held back while
            it may be part of a stop string or half a character.
        thought: what stands between the marks. Stop strings do not count there.
        marks: the ids that begin and end the thought, and -1 for the text behind it, as far as they
            are still to come. The server sets them. Within the text, a mark is a part of it.
    """

    def __init__(self, tokenizer: Any, prompt_ids: Ids, stops: tuple) -> None:
        self.text = ""
        self._held = ""  # decoded text that may be the beginning of a stop string
        self.thought = ""
        self.marks: Ids = []
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
        # 1) The thought. Its marks are not shown, nor is white space before the first one.
        if token_id in self.marks[:1]:
            del self.marks[0]
            self._held = ""
            return new, False
        if len(self.marks) == 2:
            self.thought += new
            return new, False
        # 2) The text. In a model that thinks, the white space before it is no stop string.
        pending = self._held + new
        # A stop string counts if it ends after this many characters. One that ended in what was
        # held came too early (see can_stop), and was held only because a longer one may contain it.
        early = len(self._held) if can_stop else len(pending)
        if self.marks:
            if not (last or pending.strip()):
                self._held = pending
                return new, False
            early = max(early, len(pending) - len(pending.lstrip()))
            self.marks = []
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
