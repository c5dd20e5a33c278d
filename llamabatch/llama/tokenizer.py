"""The tokenizer of a loaded model: text to token ids and back, and the special tokens of the vocabulary."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Mapping
from typing import Any, NamedTuple

from llamabatch.errors import EngineClosedError, PromptError
from llamabatch.llama.long_words import needed_stack, on_larger_stack, recursive_pre_tokenizer
from llamabatch.request.detokenizer import Vocabulary
from llamabatch.utils.lifetime import ForkGuard

ANY_TOKEN = 1024  # assumed number of bytes of the longest token if a tokenizer has no known limit
_WHOLE_TEXT = ("llama", "gpt2")  # tokenizers that keep every character of the text in their tokens
_MAX_TEXT_BYTES = 64 * 2**20  # limit of a text: 20 MB take 8 s, and a length must fit in an int32
_SLICE = 2**15  # token ids that are converted to Python objects at once
_FAILED = -(2**31)  # result of llama_tokenize for a text that it cannot tokenize

# For each of these names, llama_vocab_NAME returns the id of a special token, or a negative number if there is none.
_SPECIAL = (
    *("bos", "eos", "eot", "sep", "nl", "pad", "mask"),
    *("fim_pre", "fim_suf", "fim_mid", "fim_pad", "fim_rep", "fim_sep"),
)


class PairMarks(NamedTuple):
    """The special tokens before, between and after the two texts of a pair.

    The tokenizers of the transformers library build pairs in this way. llama-server builds them without the last [SEP]
    of BERT.
    """

    before: tuple[int, ...]
    between: tuple[int, ...]
    behind: tuple[int, ...]


class NativeTokenizer:
    """Tokenizes with the vocabulary of a llama_model. A subclass loads and frees the model. Safe from any thread."""

    _lib: Any  # the binding
    handle: Any  # the llama_model; None once it is freed
    vocab_handle: Any
    metadata: Mapping[str, str]

    def __init__(self) -> None:
        # `_lock` guards only short calls, because event loops wait for it. `_text_lock` guards the calls whose time
        # grows with the text. close() takes both locks, `_text_lock` first.
        self._lock = threading.Lock()
        self._text_lock = threading.Lock()
        self._fork_guard = ForkGuard()
        self._closed_because = "the model is closed"
        self._longest_token: int | None = None
        self._pieces: dict[int, bytes] = {}
        self._named: dict[int, bytes] = {}
        self._eog: dict[int, bool] = {}
        self._all_eog: tuple[int, ...] | None = None

    def _read_vocabulary(self) -> None:
        """Stores facts about the vocabulary, so that later uses need no calls of llama.cpp."""
        self.n_vocab = int(self._lib.llama_vocab_n_tokens(self.vocab_handle))
        ids = {name: int(getattr(self._lib, f"llama_vocab_{name}")(self.vocab_handle)) for name in _SPECIAL}
        self.special_ids: Mapping[str, int] = {name: i for name, i in ids.items() if 0 <= i < self.n_vocab}
        self._special = {name: self._special_text(name) for name in ("bos", "eos")}
        self._recursive_pre = recursive_pre_tokenizer(self.metadata)
        self.pair_marks = self._pair_marks()
        self._first_token = self._bos()

    def _bos(self) -> int | None:
        token = int(self._lib.llama_vocab_bos(self.vocab_handle))
        return token if token >= 0 and self._lib.llama_vocab_get_add_bos(self.vocab_handle) else None

    def _pair_marks(self) -> PairMarks:
        lib, vocab = self._lib, self.vocab_handle
        bos, eos, sep = (int(getattr(lib, f"llama_vocab_{name}")(vocab)) for name in ("bos", "eos", "sep"))
        ends = [eos if eos >= 0 else sep] if lib.llama_vocab_get_add_eos(vocab) else []
        always_sep = [sep] if int(lib.llama_vocab_type(vocab)) == lib.LLAMA_VOCAB_TYPE_WPM else []
        marks = (
            [bos] if lib.llama_vocab_get_add_bos(vocab) else [],
            [*ends, sep] if lib.llama_vocab_get_add_sep(vocab) else ends,
            ends or always_sep,
        )
        return PairMarks(*(tuple(token for token in tokens if token >= 0) for tokens in marks))

    @property
    def vocabulary(self) -> Vocabulary:
        """The vocabulary for code that does not know llama.cpp. Each access makes a new object. A stored object would
        form a reference cycle with the model, and both would live until a garbage collection."""
        return Vocabulary(self.n_vocab, self.is_eog, self.token_bytes, self.all_bytes, self._first_token)

    def special_token(self, name: str) -> str:
        """Returns the text of the "bos" or "eos" token, or "" if the vocabulary has none."""
        return self._special[name]

    def _special_text(self, name: str) -> str:
        token = self.special_ids.get(name)
        return "" if token is None else self.token_text(token)

    def is_eog(self, token_id: int) -> bool:
        """Returns True if the token ends a generation."""
        known = self._eog.get(token_id)  # looked up for each sampled token; a dict is faster than a ctypes call
        if known is None:
            self._check_open()
            known = self._eog[token_id] = bool(self._lib.llama_vocab_is_eog(self.vocab_handle, token_id))
        return known

    @property
    def eog_ids(self) -> tuple[int, ...]:
        """All tokens that end a generation. The first access asks llama.cpp about every token."""
        if self._all_eog is None:
            with self._lock:
                self._check_open()
                is_eog, vocab = self._lib.llama_vocab_is_eog, self.vocab_handle
                self._all_eog = tuple(token_id for token_id in range(self.n_vocab) if is_eog(vocab, token_id))
        return self._all_eog

    def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Converts text to token ids.

        Args:
            add_special: add BOS and EOS if the vocabulary requires them.
            parse_special: read names such as `<|im_end|>` as the special tokens. For templates, never for untrusted
                text.

        Raises:
            PromptError: the text is larger than 64 MiB, has a word that would crash this build of llama.cpp, or needs
                more memory than there is.
            EngineClosedError: the model was closed.
        """
        data = text.encode("utf-8", errors="replace")
        if len(data) > _MAX_TEXT_BYTES:
            raise PromptError(f"the text has {len(data)} bytes; allowed are up to {_MAX_TEXT_BYTES}")
        self._fork_guard.check()
        with self._text_lock:  # else close() in another thread could free the vocabulary
            self._check_open()
            return self._tokenize(data, add_special, parse_special)

    def tokenize_bytes(self, data: bytes) -> list[int]:
        """Converts UTF-8 bytes to token ids, without special tokens. The bytes may begin within a character."""
        with self._text_lock:
            self._check_open()
            return self._tokenize(data, False, False)

    def _tokenize(self, data: bytes, add_special: bool, parse_special: bool) -> list[int]:
        mebibytes = 0 if self._recursive_pre is None else needed_stack(data, self._recursive_pre)
        if mebibytes == 0:
            return self._tokenize_here(data, add_special, parse_special)
        return on_larger_stack(lambda: self._tokenize_here(data, add_special, parse_special), mebibytes)

    def _tokenize_here(self, data: bytes, add_special: bool, parse_special: bool) -> list[int]:
        room = len(data) + 8  # a token has at least one byte, except BOS and a leading space
        for _ in range(2):
            tokens = (ctypes.c_int32 * room)()
            n = self._lib.llama_tokenize(self.vocab_handle, data, len(data), tokens, room, add_special, parse_special)
            if n >= 0:
                return _in_slices(tokens, n)
            if n == _FAILED:
                break
            room = -n
        raise PromptError(f"llama.cpp cannot tokenize this text of {len(data)} bytes")

    def detokenize(self, token_ids: list[int], *, skip_special: bool = True) -> str:
        """Converts token ids to text as llama.cpp writes it. Bytes that are not UTF-8 become U+FFFD.

        Args:
            skip_special: leave special tokens out; False writes their names.

        Raises:
            PromptError: an id is outside the vocabulary.
            EngineClosedError: the model was closed.
        """
        for token_id in token_ids:
            self._check_id(token_id)
        tokens = (ctypes.c_int32 * len(token_ids))(*token_ids)
        room = 8 * len(token_ids) + 64
        with self._text_lock:
            self._check_open()
            for _ in range(2):
                buffer = ctypes.create_string_buffer(room)
                n = self._lib.llama_detokenize(
                    self.vocab_handle, tokens, len(token_ids), buffer, room, False, not skip_special
                )
                if n >= 0:
                    return buffer.raw[:n].decode("utf-8", errors="replace")
                room = -n
        raise PromptError(f"llama.cpp cannot write these {len(token_ids)} tokens as text")

    @property
    def longest_token(self) -> int:
        """The maximum number of text bytes for one token, according to the texts of the vocabulary.

        Some tokenizers (mostly of encoders) drop or rewrite parts of a text, so that the maximum is unknown. The value
        is then ANY_TOKEN, because the text of a prompt needs an upper limit with any vocabulary.
        """
        if self._longest_token is None:
            with self._text_lock:
                self._check_open()
                self._longest_token = self._find_longest_token()
        return self._longest_token

    def _find_longest_token(self) -> int:
        lib, vocab = self._lib, self.vocab_handle
        if self.metadata.get("tokenizer.ggml.model") not in _WHOLE_TEXT:
            return ANY_TOKEN
        strips = lib.LLAMA_TOKEN_ATTR_LSTRIP | lib.LLAMA_TOKEN_ATTR_RSTRIP  # such tokens swallow white space
        longest = 1
        for token_id in range(self.n_vocab):
            if lib.llama_vocab_get_attr(vocab, token_id) & strips:
                return ANY_TOKEN
            longest = max(longest, len(lib.llama_vocab_get_text(vocab, token_id)))
        return longest

    def token_text(self, token_id: int) -> str:
        """Returns a token as the vocabulary writes it. Safe from any thread. Raises the same errors as token_bytes."""
        with self._lock:
            self._check_open()
            self._check_id(token_id)
            text: bytes = self._lib.llama_vocab_get_text(self.vocab_handle, token_id)
        return text.decode(errors="replace")

    def piece(self, token_id: int, *, special: bool = True) -> bytes:
        """Returns the result of all_bytes, or of token_bytes if `special` is False. Safe while another thread closes
        the model."""
        known = (self._named if special else self._pieces).get(token_id)
        if known is not None:
            return known
        with self._lock:
            self._check_open()
            return self.all_bytes(token_id) if special else self.token_bytes(token_id)

    def token_bytes(self, token_id: int) -> bytes:
        """Returns the bytes of a token's text, or b"" for special tokens. The id must be inside the vocabulary."""
        piece = self._pieces.get(token_id)
        if piece is None:
            piece = self._pieces[token_id] = self._piece(token_id, False)
        return piece

    def all_bytes(self, token_id: int) -> bytes:
        """Returns the bytes of a token's text, or of its name for special tokens."""
        piece = self._named.get(token_id)
        if piece is None:
            piece = self._named[token_id] = self._piece(token_id, True)
        return piece

    def _piece(self, token_id: int, special: bool) -> bytes:
        self._check_open()
        self._check_id(token_id)
        room = 64
        for _ in range(2):
            buffer = ctypes.create_string_buffer(room)
            n = self._lib.llama_token_to_piece(self.vocab_handle, token_id, buffer, room, 0, special)
            if n >= 0:
                return buffer.raw[:n]
            room = -n
        raise AssertionError(f"llama_token_to_piece gave token {token_id} two lengths")

    def _check_id(self, token_id: int) -> None:
        if not 0 <= token_id < self.n_vocab:
            raise PromptError(f"token id {token_id} is outside the vocabulary; allowed are 0 to {self.n_vocab - 1}")

    def _check_open(self) -> None:
        if not self.handle:
            raise EngineClosedError(self._closed_because)


def _in_slices(values: Any, n: int) -> list[int]:
    """Returns the first n values of a ctypes array. Reads them in slices, because other threads cannot run during a
    read. A slice takes half a millisecond. A whole prompt of 5 MB would take 30 ms."""
    found: list[int] = []
    for start in range(0, n, _SLICE):
        found += values[start : min(start + _SLICE, n)]
    return found
