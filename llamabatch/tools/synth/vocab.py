"""Makes up vocabularies of the right kind and size: byte-level BPE, or SentencePiece for Gemma 3."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from llamabatch.tools.synth.shapes import Shape


def _turns(before: str, after_role: str, after: str, role: str = "m['role']", assistant: str = "assistant") -> str:
    """Returns a chat template.

    Args:
        before: the text of a turn before the role.
        after_role: the text between role and content.
        after: the text after the content.
        role: jinja2 expression that writes the role of the message `m`.
        assistant: the model's own role, for the start of an answer.
    """
    turn = f"{{{{ '{before}' + {role} + '{after_role}' + m['content'] + '{after}' }}}}"
    return (
        f"{{% for m in messages %}}{turn}{{% endfor %}}"
        f"{{% if add_generation_prompt %}}{{{{ '{before}{assistant}{after_role}' }}}}{{% endif %}}"
    )


_BOS = "{{ bos_token }}"
_CHATML = _turns("<|im_start|>", "\\n", "<|im_end|>\\n")


@dataclass(frozen=True)
class _Tokenizer:
    """A byte-level BPE vocabulary with its special tokens after all other tokens.

    Attributes:
        pre: llama.cpp's name for the rule that splits text into words.
        n_behind: number of ids in the real vocabulary from the first special token to the end.
        n_special: number of special tokens. Special tokens without a name in `names` are reserved.
        names: names of special tokens, by their index among the special tokens.
        bos, eos, pad: indexes of these tokens among the special tokens.
    """

    pre: str
    n_behind: int
    n_special: int
    names: Mapping[int, str]
    bos: int
    eos: int
    pad: int
    add_bos: bool
    template: str

    def special(self, n_vocab: int) -> list[str]:
        count = min(self.n_special, self.n_behind, n_vocab // 8)
        return [self.names.get(i, f"<|reserved_special_token_{i}|>") for i in range(count)]


_QWEN = {0: "<|endoftext|>", 1: "<|im_start|>", 2: "<|im_end|>"}
_TOKENIZERS = {
    "qwen2": _Tokenizer("qwen2", 293, 3, _QWEN, bos=0, eos=2, pad=0, add_bos=False, template=_CHATML),
    "qwen35": _Tokenizer("qwen35", 276, 3, _QWEN, bos=0, eos=2, pad=0, add_bos=False, template=_CHATML),
    "llama": _Tokenizer(
        "llama-bpe", 256, 256,
        {0: "<|begin_of_text|>", 1: "<|end_of_text|>", 6: "<|start_header_id|>", 7: "<|end_header_id|>"}
        | {8: "<|eom_id|>", 9: "<|eot_id|>"},
        bos=0, eos=9, pad=1, add_bos=True,
        template=_BOS + _turns("<|start_header_id|>", "<|end_header_id|>\\n\\n", "<|eot_id|>"),
    ),
    "lfm2": _Tokenizer(
        "lfm2", 256, 8,
        {0: "<|pad|>", 1: "<|startoftext|>", 2: "<|endoftext|>", 6: "<|im_start|>", 7: "<|im_end|>"},
        bos=1, eos=7, pad=0, add_bos=True, template=_BOS + _CHATML,
    ),
    "granitehybrid": _Tokenizer(
        "dbrx", 96, 10,
        {0: "<|pad|>", 1: "<|end_of_text|>", 8: "<|start_of_role|>", 9: "<|end_of_role|>"},
        bos=1, eos=1, pad=0, add_bos=False,
        template=_turns("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>\\n"),
    ),
    "nemotron_h": _Tokenizer(
        "pixtral", 256, 13, {0: "<unk>", 1: "<s>", 2: "</s>", 11: "<SPECIAL_11>", 12: "<SPECIAL_12>"},
        bos=1, eos=12, pad=0, add_bos=True,
        template=_BOS + _turns("<SPECIAL_11>", "\\n", "\\n", "m['role'] | capitalize", "Assistant"),
    ),
    "gpt-oss": _Tokenizer(
        "gpt-4o", 1090, 15,
        {0: "<|startoftext|>", 1: "<|endoftext|>", 4: "<|return|>", 5: "<|constrain|>", 7: "<|channel|>"}
        | {8: "<|start|>", 9: "<|end|>", 10: "<|message|>", 14: "<|call|>"},
        bos=0, eos=4, pad=1, add_bos=False, template=_turns("<|start|>", "<|message|>", "<|end|>"),
    ),
}  # fmt: skip
_GEMMA = _BOS + _turns(
    "<start_of_turn>", "\\n", "<end_of_turn>\\n", "('model' if m['role'] == 'assistant' else m['role'])", "model"
)


def add_vocab(writer: Any, shape: Shape) -> None:
    """Writes the vocabulary and the chat template of a shape's architecture."""
    if shape.arch == "gemma3":
        _add_sentencepiece(writer, shape.n_vocab)
        return
    tokenizer = _TOKENIZERS[shape.arch]
    start = shape.n_vocab - min(tokenizer.n_behind, shape.n_vocab // 8)
    vocab = make_vocab(shape.n_vocab, tokenizer.special(shape.n_vocab), start)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(tokenizer.pre)
    writer.add_token_list(vocab.tokens)
    writer.add_token_types(vocab.types)
    writer.add_token_merges(vocab.merges)
    writer.add_bos_token_id(start + tokenizer.bos)
    writer.add_eos_token_id(start + tokenizer.eos)
    writer.add_pad_token_id(start + tokenizer.pad)
    writer.add_add_bos_token(tokenizer.add_bos)
    writer.add_chat_template(tokenizer.template)


def _add_sentencepiece(writer: Any, n_vocab: int) -> None:
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"]
    pieces = [token.replace(_SPACE, _SENTENCEPIECE_SPACE) for token in [*_pairs(), _SPACE, *_LETTERS]]
    tokens = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    words = _words(n_vocab - len(tokens))
    tokens += [word.replace(_SPACE, _SENTENCEPIECE_SPACE) for word in words]
    types = [CONTROL] * len(special) + [BYTE] * 256
    types[3] = UNKNOWN
    types += [NORMAL] * (n_vocab - len(types))
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0 if kind != NORMAL else -float(i) for i, kind in enumerate(types)])
    writer.add_token_types(types)
    writer.add_pad_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_bos_token_id(2)
    writer.add_unk_token_id(3)
    writer.add_add_bos_token(True)
    writer.add_add_space_prefix(False)
    writer.add_chat_template(_GEMMA)


NORMAL, UNKNOWN, CONTROL, UNUSED, BYTE = 1, 2, 3, 5, 6  # llama.cpp's token types
_LETTERS = "etaoinshrdlucm"
_SPACE, _SENTENCEPIECE_SPACE = "Ġ", "▁"  # the space in byte-level BPE tokens and in SentencePiece tokens


@dataclass(frozen=True)
class Vocab:
    """The tokens by id, their types, and the merges that build some tokens from bytes."""

    tokens: list[str]
    types: list[int]
    merges: list[str]


def make_vocab(size: int, special: Sequence[str], special_start: int) -> Vocab:
    """Returns `size` tokens: the 256 bytes, pairs of frequent letters, made-up words, `special`, and padding.

    `special` starts at id `special_start`. The padding has the type UNUSED, as in real files.
    """
    tokens = [*_byte_tokens(), *_pairs()][:special_start]
    tokens += _words(special_start - len(tokens))
    tokens += special
    types = [NORMAL] * special_start + [CONTROL] * len(special)
    padding = size - len(tokens)
    tokens += [f"[PAD{len(tokens) + i}]" for i in range(padding)]
    types += [UNUSED] * padding
    known = set(tokens[:special_start])
    merges = [f"{pair[0]} {pair[1]}" for pair in _pairs() if pair in known]
    return Vocab(tokens, types, merges)


def _byte_tokens() -> list[str]:
    """Returns GPT-2's characters for the 256 bytes: printable bytes stand for themselves, the rest begin at U+0100."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    stand_ins = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(stand_ins)) for byte in range(256)]


def _pairs() -> list[str]:
    return [a + b for a, b in product(_SPACE + _LETTERS, _LETTERS)]


def _words(count: int) -> list[str]:
    """Returns different words: a space and three syllables, about as long as the tokens of a real vocabulary."""
    syllables = [c + v for c, v in product("bdfghjklmnprstvwyz", "aeiou")]
    words = (_SPACE + a + b + c for a, b, c in product(syllables, repeat=3))
    return [word for word, _ in zip(words, range(count), strict=False)]
