"""OutputParser: splits generated text, as it comes, into thinking, answer and tool calls."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from typing import Protocol

from llamabatch.chat.formats import ChatFormat
from llamabatch.request.delta import Delta, TextParser
from llamabatch.request.reasoning import (
    CALL,
    CHANNEL,
    CHANNEL_MARKS,
    CONSTRAIN,
    END,
    GAP,
    MESSAGE,
    RETURN,
    START,
    ReasoningTags,
    Thinking,
)
from llamabatch.request.tool_calls import ToolCall, ToolCallDelta

MakeToolParser = Callable[[], TextParser]


class OutputParser:
    """The parser of one continuation: a TextParser.

    The thinking goes to `Delta.reasoning`, without the white space around the thinking. Other text goes to the tool
    parser, or to `Delta.text` if there is no tool parser. Up to len(GAP) line breaks between the thinking and the other
    text are dropped.

    Args:
        chat_format: the format of the model.
        thinking: the state of the thinking where the prompt ends.
        special: Tags that are special tokens of the vocabulary. Ordinary text cannot contain special tokens, so these
            tags count anywhere. Other tags count only at the beginning of the answer.
        ends_thinking: marks that begin a call and thereby end the thinking.
        make_tool_parser: makes the parser of the text after the thinking; None: all of this text is the answer.

    Attributes:
        has_reasoned: the continuation has a thinking part, even an empty one.
    """

    def __init__(
        self,
        chat_format: ChatFormat,
        *,
        thinking: Thinking = Thinking.POSSIBLE,
        special: Collection[str] = (),
        make_tool_parser: MakeToolParser | None = None,
        ends_thinking: Collection[str] = (),
    ) -> None:
        out = _Parts(None if make_tool_parser is None else make_tool_parser())
        tags = chat_format.reasoning
        self._parts = out
        self._splitter: _Splitter
        if tags is None:
            self._splitter = _Plain(out)
        elif tags.channels:
            self._splitter = _Channels(out, thinking)
        else:
            anywhere = tags.start in special and tags.end in special
            self._splitter = _Tags(out, tags, thinking, anywhere=anywhere, stops=tuple(ends_thinking))

    @property
    def has_reasoned(self) -> bool:
        return self._parts.has_reasoned

    @property
    def has_called(self) -> bool:
        return self._parts.has_called

    def feed(self, text: str) -> Delta:
        """Parses the next piece of text. Returns the parts that are complete."""
        self._splitter.feed(text)
        return self._parts.take()

    def finish(self, text: str = "") -> Delta:
        """Parses the last piece of text. Returns all parts that were held back."""
        self._splitter.feed(text)
        self._splitter.finish()
        self._parts.finish()
        return self._parts.take()


def joined_calls(deltas: Iterable[ToolCallDelta]) -> tuple[ToolCall, ...]:
    """Joins the pieces of calls into whole calls, sorted by the index of the call."""
    calls: dict[int, ToolCall] = {}
    for delta in deltas:
        before = calls.get(delta.index)
        if before is None:
            calls[delta.index] = ToolCall(delta.id or "", delta.name or "", delta.arguments, delta.text_offset)
        else:
            calls[delta.index] = replace(before, arguments=before.arguments + delta.arguments)
    return tuple(calls[index] for index in sorted(calls))


class _Parts:
    """A collector of the parts of a delta: thinking without white space around it, text, and tool calls."""

    def __init__(self, tool_parser: TextParser | None) -> None:
        self.has_reasoned = False
        self.has_called = False
        self.tool_parser = tool_parser
        self._reasoning, self._text = "", ""
        self._calls: list[ToolCallDelta] = []
        self._space = ""  # white space after the thinking; added only if more thinking follows
        self._has_thought = False  # True: the thinking so far has more than white space

    def begin_reasoning(self) -> None:
        """Begins a thinking part. A second part starts on a new line."""
        self.has_reasoned = True
        self._space = "\n" if self._has_thought else ""

    def add_reasoning(self, text: str) -> None:
        text = self._space + text
        kept = text.rstrip()
        self._space = text[len(kept) :] if kept or self._has_thought else ""
        self._reasoning += kept if self._has_thought else kept.lstrip()
        self._has_thought = self._has_thought or bool(kept)

    def add_text(self, text: str) -> None:
        if self.tool_parser is None:
            self._text += text
        elif text:
            self._take_in(self.tool_parser.feed(text))

    def finish(self) -> None:
        if self.tool_parser is not None:
            self._take_in(self.tool_parser.finish())

    def take(self) -> Delta:
        """Returns the parts collected since the last take()."""
        delta = Delta(self._reasoning, self._text, tuple(self._calls))
        self._reasoning, self._text, self._calls = "", "", []
        return delta

    def _take_in(self, delta: Delta) -> None:
        self.has_called = self.has_called or bool(delta.tool_calls)
        self._reasoning += delta.reasoning
        self._text += delta.text
        self._calls += delta.tool_calls


class _Splitter(Protocol):
    """The interface of a splitter. A splitter separates thinking from other text, and adds both to a _Parts."""

    def feed(self, text: str) -> None: ...

    def finish(self) -> None: ...


class _Plain:
    """The splitter for a format without thinking."""

    def __init__(self, parts: _Parts) -> None:
        self._parts = parts

    def feed(self, text: str) -> None:
        self._parts.add_text(text)

    def finish(self) -> None:
        pass


class _Tags:
    """The splitter for thinking between two tags.

    Args:
        anywhere: the tags count at any place, not only before the answer.
        stops: other texts that end the thinking. Such a text is part of the answer.
    """

    def __init__(
        self, parts: _Parts, tags: ReasoningTags, thinking: Thinking, *, anywhere: bool, stops: tuple[str, ...]
    ) -> None:
        self._parts = parts
        self._start, self._end = tags.start, tags.end
        self._stops = stops
        self._anywhere = anywhere
        self._held = ""
        self._gap = 0  # number of line breaks that may still be dropped
        steps = {Thinking.INSIDE: self._opened, Thinking.POSSIBLE: self._before, Thinking.OVER: self._after}
        self._step: Callable[[], bool] = steps[thinking]
        if thinking is Thinking.INSIDE:
            parts.begin_reasoning()
        elif thinking is Thinking.OVER:
            self._gap = len(GAP)

    def feed(self, text: str) -> None:
        self._held += text
        while self._held and self._step():
            pass

    def finish(self) -> None:
        held, self._held = self._held, ""
        if self._step in (self._opened, self._inside):
            self._parts.add_reasoning(held)
        else:
            self._parts.add_text(held)

    def _before(self) -> bool:
        """Looks for a tag at the start of the text. Like every step, this method returns False if more text is
        needed."""
        begun = self._held.lstrip()
        for tag in (self._start, self._end):
            if begun.startswith(tag):
                self._parts.begin_reasoning()
                self._held = begun[len(tag) :]
                self._enter(self._inside if tag == self._start else self._after)
                return True
        if not begun or self._start.startswith(begun) or self._end.startswith(begun):
            return False
        self._step = self._answer
        return True

    def _enter(self, step: Callable[[], bool]) -> None:
        self._step = step
        self._gap = len(GAP)

    def _opened(self) -> bool:
        """Skips a second start tag. The prompt has the start tag already, but some models write the tag again."""
        begun = self._held.lstrip()
        if begun.startswith(self._start):
            self._held = begun[len(self._start) :]
        elif self._start.startswith(begun):
            return False
        self._step = self._inside
        return True

    def _inside(self) -> bool:
        ends = (self._end, *self._stops)
        places = [(at, tag) for tag in ends if (at := self._held.find(tag)) >= 0]
        if places:
            at, tag = min(places)
            self._parts.add_reasoning(self._held[:at])
            self._held = self._held[at + (len(tag) if tag == self._end else 0) :]
            self._enter(self._after)
            return True
        cut = len(self._held) - held_length(self._held, ends)
        self._parts.add_reasoning(self._held[:cut])
        self._held = self._held[cut:]
        return False

    def _after(self) -> bool:
        """Drops line breaks between the thinking and the answer."""
        while self._gap and self._held.startswith("\n"):
            self._held, self._gap = self._held[1:], self._gap - 1
        if self._held or not self._gap:
            self._step = self._answer
        return bool(self._held)

    def _answer(self) -> bool:
        if not self._anywhere:
            text, self._held = self._held, ""
            self._parts.add_text(text)
            return False
        places = [(at, tag) for tag in (self._start, self._end) if (at := self._held.find(tag)) >= 0]
        if not places:
            cut = len(self._held) - held_length(self._held, (self._start, self._end))
            text, self._held = self._held[:cut], self._held[cut:]
            self._parts.add_text(text)
            return False
        at, tag = min(places)
        self._parts.add_text(self._held[:at])
        self._held = self._held[at + len(tag) :]
        if tag == self._start:
            self._parts.begin_reasoning()
            self._enter(self._inside)
        return True


_MARK = re.compile("|".join(map(re.escape, CHANNEL_MARKS)))
_HEADER_BEGINS = (START, CHANNEL, CONSTRAIN, "to=", END)
_MOST_HEADER = 512  # maximum number of characters before the next mark of a header; a longer text is not a header
_MOST_HELD = _MOST_HEADER + max(map(len, CHANNEL_MARKS))


class _Channels:
    """The splitter for messages in channels.

    The channel "analysis" is thinking. The channels "final" and "commentary" are the answer. A message with a recipient
    is a call. The tool parser receives a call as the model wrote it, with its header and marks. Without a tool parser,
    the body of the call is part of the answer.
    """

    def __init__(self, parts: _Parts, thinking: Thinking) -> None:
        self._parts = parts
        self._held = ""
        self._header: str | None = ""  # the next message's header as received so far; None: inside a message
        self._add: Callable[[str], None] = parts.add_text
        self._is_call = False
        self._n_texts = 0  # number of messages of the answer so far
        if thinking is Thinking.INSIDE:
            self._begin(f"{CHANNEL}analysis")
        elif thinking is Thinking.OVER:
            self._begin(f"{CHANNEL}final")

    def feed(self, text: str) -> None:
        self._held += text
        while self._held and self._step():
            pass

    def finish(self) -> None:
        held, self._held = self._held, ""
        if self._header is None:
            self._add(held)
        elif self._header == "" and not held.lstrip().startswith(("<|", "to=")):  # held text such as "to" is no header
            self._parts.add_text(held)

    def _step(self) -> bool:
        found = _MARK.search(self._held)
        if self._header is None:
            return self._in_message(found)
        may_be_header = bool(self._header) or _may_be_header(self._held)
        if may_be_header and found is None and len(self._held) < _MOST_HELD:
            return False
        if not may_be_header or found is None or found.start() > _MOST_HEADER:
            self._begin(f"{CHANNEL}final")  # text without a header belongs to the answer
            return True
        before, mark = self._held[: found.start()], found[0]
        self._held = self._held[found.end() :]
        if mark == MESSAGE:
            self._begin(self._header + before)
        elif mark == START:
            self._header = START
        elif mark in (END, RETURN, CALL):  # the header has no message
            self._header = ""
        else:
            self._header += before + mark
        return True

    def _in_message(self, found: re.Match[str] | None) -> bool:
        if found is None:
            cut = len(self._held) - held_length(self._held, CHANNEL_MARKS)
            text, self._held = self._held[:cut], self._held[cut:]
            self._add(text)
            return False
        self._add(self._held[: found.start()])
        mark = found[0]
        self._held = self._held[found.end() :]
        if mark in (END, RETURN, CALL):
            if self._is_call and self._parts.tool_parser is not None:
                self._add(mark)
            self._header = ""
        elif mark in (START, CHANNEL):  # the message has no end
            self._header = mark
        return True

    def _begin(self, header: str) -> None:
        self._header = None
        self._is_call = "to=" in header
        if self._is_call:
            self._add = self._parts.add_text
            if self._parts.tool_parser is not None:
                self._add(header + MESSAGE)
        elif f"{CHANNEL}analysis" in header:
            self._add = self._parts.add_reasoning
            self._parts.begin_reasoning()
        else:
            self._add = self._parts.add_text
            if self._n_texts:
                self._add("\n")
            self._n_texts += 1


def _may_be_header(text: str) -> bool:
    """Returns True if the text begins with a mark or recipient of a header, or may do so with more text."""
    begun = text.lstrip(" ")
    return any(begun.startswith(mark) or mark.startswith(begun) for mark in _HEADER_BEGINS)


def held_length(text: str, marks: Iterable[str]) -> int:
    """Returns the number of characters at the end of the text that may be the beginning of a mark."""
    longest = 0
    for mark in marks:
        for length in range(min(len(mark) - 1, len(text)), longest, -1):
            if text.endswith(mark[:length]):
                longest = length
                break
    return longest
