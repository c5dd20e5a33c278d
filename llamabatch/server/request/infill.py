"""Builds prompts that fill a gap in a text ("fill in the middle"), with the special tokens of the vocabulary."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass

from llamabatch.entrypoints.input_processor import InputProcessor
from llamabatch.errors import PromptError

_FIM = ("fim_pre", "fim_suf", "fim_mid")
_SNIPPET = "\n\n--- snippet ---\n\n"  # separates files if the vocabulary has no separator token
_OUTPUT = 128  # tokens of the context that are left free if the output has no limit


@dataclass(frozen=True)
class Gap:
    """A gap in a text.

    Attributes:
        prefix, suffix: the texts before and after the gap.
        begun: the beginning of the text in the gap.
        extra: names and texts of other files.
    """

    prefix: str = ""
    suffix: str = ""
    begun: str = ""
    extra: tuple[tuple[str, str], ...] = ()


def missing_marks(special_ids: Container[str]) -> list[str]:
    """Returns the names of the fill-in-the-middle tokens that are not in the vocabulary."""
    return [name for name in _FIM if name not in special_ids]


def infill_ids(gap: Gap, processor: InputProcessor, max_tokens: int | None, before: Sequence[int] = ()) -> list[int]:
    """Returns the token ids of a prompt that asks for the text of a gap, as llama-server's format_prompt_infill does.

    The prompt has three parts with special tokens between them: the other files; the prefix, followed by the text in
    the gap so far; and the suffix. If the context is too small, the prompt omits the beginning of the other files, the
    beginning of the prefix and the end of the suffix.

    Args:
        max_tokens: limit of the output; None: no limit, and 128 tokens of the context stay free.
        before: token ids in front of the prompt. If there are such ids, the prompt adds no BOS.

    Raises:
        PromptError: `before` and the beginning of the text in the gap leave no room.
    """
    marks = processor.special_ids
    prefix, suffix, begun = (_plain(text, processor) for text in (gap.prefix, gap.suffix, gap.begun))
    extra = _extra_ids(gap.extra, marks, processor)
    bos = [] if before else processor.tokenize("", True, False)
    room = processor.n_ctx - min(max_tokens or _OUTPUT, processor.n_ctx // 2)
    fixed = len(before) + len(begun)
    room -= fixed + len(bos) + len(_FIM)
    if room < 0:
        raise PromptError(f"prompt has {fixed} tokens, which leaves no room in a context of {processor.n_ctx}")
    for_suffix = min(len(suffix), max(room // 4, room - len(prefix)))
    for_prefix = min(len(prefix), room - for_suffix)
    for_extra = min(len(extra), room - for_suffix - for_prefix)
    return [
        *before,
        *extra[len(extra) - for_extra :],
        *bos,
        marks["fim_pre"],
        *prefix[len(prefix) - for_prefix :],
        *begun,
        marks["fim_suf"],
        *suffix[:for_suffix],
        marks["fim_mid"],
    ]


def _extra_ids(files: Sequence[tuple[str, str]], marks: Mapping[str, int], processor: InputProcessor) -> list[int]:
    found: list[int] = []
    if "fim_rep" in marks:
        found += [marks["fim_rep"], *_plain("myproject\n", processor)]
    for name, text in files:
        if "fim_sep" in marks:
            found += [marks["fim_sep"], *_plain(f"{name}\n", processor)]
        else:
            found += _plain(_SNIPPET, processor)
        found += _plain(text, processor)
    if "fim_sep" in marks:
        found += [marks["fim_sep"], *_plain("filename\n", processor)]
    return found


def _plain(text: str, processor: InputProcessor) -> list[int]:
    found: list[int] = processor.tokenize(text, False, False) if text else []
    return found
