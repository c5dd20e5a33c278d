"""FakeModel: a vocabulary of words and a chat template, in place of a GGUF file."""

from __future__ import annotations

import re
import threading
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path

from llamabatch.errors import PromptError
from llamabatch.gguf.reader import TEXT, Items, Value
from llamabatch.llama.tokenizer import PairMarks
from llamabatch.media.sources import NOWHERE
from llamabatch.request.detokenizer import Vocabulary
from llamabatch.request.structured_outputs import Structure

N_VOCAB = 2**17
N_EMBD = 16
MOST_EMBD = 2**24
LABELS = ("LABEL_0", "LABEL_1")
BOS, EOS, START, END = range(4)
_NAMES = {"<|bos|>": BOS, "<|eos|>": EOS, "<|im_start|>": START, "<|im_end|>": END}
_FIRST_BYTE = len(_NAMES)
_FIRST_WORD = _FIRST_BYTE + 256
_TRIES = 64  # a word tries this many ids, because another word may have the same hash

_WORDS = re.compile(r" ?\w+| ?[^\w\s]|\s")
_SPECIALS = re.compile("|".join(map(re.escape, _NAMES)))
_MESSAGES = re.compile(r"<\|im_start\|>(.*?)\n(.*?)(<\|im_end\|>\n|\Z)", re.DOTALL)

# Chat templates of real model families read these variables.
TEMPLATE_KWARGS = (
    *("builtin_tools", "custom_tools", "date_string", "documents", "enable_thinking", "keep_past_thinking"),
    *("model_identity", "preserve_thinking", "reasoning_effort", "thinking", "thinking_budget"),
    *("tools_in_user_message", "xml_tools"),
)

# A ChatML template. Its first statement reads every variable of TEMPLATE_KWARGS, so that none is refused as unknown.
_TEMPLATE = f"{{% set known = [{', '.join(TEMPLATE_KWARGS)}] %}}" + (
    "{% if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content or '' }}"
    "{% if message.tool_calls %}{{ message.tool_calls | tojson }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def messages_of(prompt: str) -> tuple[dict[str, str], ...] | None:
    """Returns the messages of a prompt that the chat template has made, or None for any other prompt. If the prompt
    ends with an unfinished answer, this answer is the last message."""
    found = [(role, content) for role, content, end in _MESSAGES.findall(prompt) if content or end]
    return tuple({"role": role, "content": content} for role, content in found) or None


class _AnyGrammar:
    """A grammar check that accepts everything."""

    def check(self, structure: Structure) -> Future[str]:
        """Accepts any structured output, with the signature of Grammars.check."""
        passed: Future[str] = Future()
        passed.set_result("")
        return passed


class FakeModel:
    """A replacement for llama.model.Model. It has those members of Model that need no weights.

    A token is a word or a punctuation mark, with the space before it; any other white space is a token of its own. The
    id of a token is a hash of its text, so equal texts usually have equal ids in every FakeModel.

    Args:
        path: the name of the model, for messages and titles; the file need not exist.
        pooling: as EngineConfig.pooling. Any FakeModel can rank, classify and embed.
        labels: names of the classes.
    """

    cannot_generate: str | None = None
    cannot_embed: str | None = None
    cannot_classify: str | None = None
    chat_template: str | None = _TEMPLATE
    relevance_index = 0
    rerank_template: str | None = None
    n_vocab = N_VOCAB
    eog_ids = (EOS, END)
    longest_token = 1024  # large, because words may have any length
    n_embd_out = MOST_EMBD  # a test may give vectors of any length
    metadata: Mapping[str, str] = {}
    grammars = _AnyGrammar()
    projector = None
    media_sources = NOWHERE
    pair_marks = PairMarks((BOS,), (EOS,), (EOS,))

    def __init__(self, path: Path, pooling: str = "mean", labels: Sequence[str] = LABELS) -> None:
        self.path = path
        self.pooling = pooling
        self.labels = tuple(labels)
        self.vocabulary = Vocabulary(N_VOCAB, self.is_eog, self.token_bytes, self.all_bytes, BOS)
        self.special_ids: Mapping[str, int] = {"bos": BOS, "eos": EOS, "eot": END}
        self.header: dict[str, Value] = {
            "general.architecture": "fake",
            "general.name": path.name,
            "fake.embedding_length": N_EMBD,
            "tokenizer.ggml.tokens": Items(TEXT, N_VOCAB, 0, 0),
            "tokenizer.chat_template": _TEMPLATE,
        }
        self._words: dict[int, bytes] = {}
        self._lock = threading.Lock()

    def is_eog(self, token_id: int) -> bool:
        """Returns True for <|eos|> and <|im_end|>."""
        return token_id in (EOS, END)

    def can_shift(self, type_k: str) -> bool:
        """Returns True, because overflow="shift" is allowed."""
        return True

    def token_text(self, token_id: int) -> str:
        """Returns a token as text, or "" for an unused id."""
        return self.all_bytes(token_id).decode("utf-8", errors="replace")

    def piece(self, token_id: int, *, special: bool = True) -> bytes:
        """Returns the bytes of a token. special=False: b"" for special tokens."""
        return self.all_bytes(token_id) if special else self.token_bytes(token_id)

    def special_token(self, name: str) -> str:
        """Returns the text of the "bos" or "eos" token."""
        return f"<|{name}|>"

    def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Converts text to token ids, with the arguments of LLM.tokenize."""
        ids = [BOS] if add_special else []
        at = 0
        for special in _SPECIALS.finditer(text) if parse_special else ():
            ids += self._plain(text[at : special.start()])
            ids.append(_NAMES[special[0]])
            at = special.end()
        return ids + self._plain(text[at:])

    def detokenize(self, token_ids: list[int], *, skip_special: bool = True) -> str:
        """Converts token ids to text, as LLM.detokenize. Raises PromptError for an id outside the vocabulary."""
        for token_id in token_ids:
            if not 0 <= token_id < N_VOCAB:
                raise PromptError(f"token id {token_id} is outside the vocabulary; allowed are 0 to {N_VOCAB - 1}")
        read = self.token_bytes if skip_special else self.all_bytes
        return b"".join(map(read, token_ids)).decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """Returns the bytes of a token's text, or b"" for a special token and for an unused id."""
        if _FIRST_BYTE <= token_id < _FIRST_WORD:
            return bytes([token_id - _FIRST_BYTE])
        return self._words.get(token_id, b"")

    def all_bytes(self, token_id: int) -> bytes:
        """Returns the bytes of a token's text. The text of a special token is its name."""
        special = next((name for name, special_id in _NAMES.items() if special_id == token_id), None)
        return self.token_bytes(token_id) if special is None else special.encode()

    def _plain(self, text: str) -> list[int]:
        words = (word.encode("utf-8", errors="replace") for word in _WORDS.findall(text))
        return [token_id for word in words for token_id in self._ids_of(word)]

    def _ids_of(self, word: bytes) -> list[int]:
        """Returns the id of a word. If other words have taken all _TRIES ids for this word, returns the ids of the
        word's bytes."""
        n_words = N_VOCAB - _FIRST_WORD
        first = zlib.crc32(word)
        with self._lock:
            for shift in range(_TRIES):
                token_id = _FIRST_WORD + (first + shift) % n_words
                if self._words.setdefault(token_id, word) == word:
                    return [token_id]
        return [_FIRST_BYTE + byte for byte in word]
