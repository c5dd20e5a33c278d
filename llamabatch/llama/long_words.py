"""Finds how much stack llama.cpp needs to tokenize a long word, and gives it a thread with such a stack.

Without our patch (native_patches/0008) llama.cpp splits text with std::regex for some pre-tokenizers. std::regex
recurses for each character of a match, so a long word overflows the stack and crashes the process.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping

from llamabatch.errors import PromptError
from llamabatch.llama import library
from llamabatch.utils.cures import patched_build

_STACK_PER_CHARACTER = 1024  # bytes; libstdc++ uses 325 with -O3, other compilers may use more
_MAX_RUN = 260_000  # maximum number of characters without a place to split; needs a stack of 255 MiB
_SHORT_RUN = 1_000  # a run of up to this many characters fits on the stack of any thread
# With these pre-tokenizers, the time to split a run grows with the square of its length. A run with this number of
# characters takes about a second.
_MAX_RUN_OF = {"deepseek-llm": 100_000, "jais-2": 60_000, "superbpe": 4_000}
_SPACES = r"\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
_RUNS = re.compile(rf"([{_SPACES}]+)|[^{_SPACES}]+")
# A match of these pre-tokenizers may contain several words with single spaces between them.
_SENTENCES = {"exaone-moe": re.compile(r"[^0-9!-/:-@\[-`{-~]+")}
# For these pre-tokenizers, llama.cpp either does without std::regex, or matches one character at a time.
_NAMES = """
a.x-4.0 chatglm-bpe codeshell command-r dbrx deepseek-r1-qwen exaone exaone4 f2llmv2 falcon-h1 falcon3 gemma4
gigachat glm4 glm5 gpt-2 granite-docling granite-embed-multi-311m grok-2 hunyuan jais jina-de jina-es jina-v1-en
jina-v2-code jina-v2-de jina-v2-es jina-v5-nano kimi-k2 kormo laguna lfm2 llama-bpe llama-v3 llama3 megrez mellum
mellum2 midm-2.0 minerva-7b modern-bert mpt olmo phi-2 pixtral qwen2 qwen35 refact roberta-bpe sarvam-moe smaug-bpe
smollm solar-open stablelm2 starcoder trillion
"""
_SPLIT_IN_PLACE = frozenset(_NAMES.split())
_stack_size_lock = threading.Lock()  # threading.stack_size applies to the whole process


def recursive_pre_tokenizer(metadata: Mapping[str, str]) -> str | None:
    """Returns the model's pre-tokenizer if this build splits with std::regex, or None if a long word is safe."""
    pre = metadata.get("tokenizer.ggml.pre", "default")
    byte_pairs = metadata.get("tokenizer.ggml.model") in ("gpt2", "hybriddna", "whitespace")
    return None if not byte_pairs or pre in _SPLIT_IN_PLACE or library.splits_without_recursion() else pre


def needed_stack(data: bytes, pre: str) -> int:
    """Returns the MiB of stack that tokenizing UTF-8 text needs; 0 if the stack of any thread suffices.

    Raises:
        PromptError: the text has too many characters in a row without a place to split.
    """
    if len(data) <= _SHORT_RUN:
        return 0
    run = _longest_match(data.decode("utf-8", errors="replace"), pre)
    if run <= _SHORT_RUN:
        return 0
    most = _MAX_RUN_OF.get(pre, _MAX_RUN)
    if run > most:
        raise PromptError(
            f"the text has about {run:,} characters in a row without a place to split; allowed are up to {most:,} "
            f"with the pre-tokenizer {pre!r} and a stock build of llama-cpp-python ({patched_build()}: "
            "the patched build has no such limit)"
        )
    return run * _STACK_PER_CHARACTER // 2**20 + 2


def _longest_match(text: str, pre: str) -> int:
    """Returns the maximum number of characters that a pre-tokenizer can match at once. This is the length of the
    longest white space plus that of the longest word."""
    spaces = words = 0
    for found in _RUNS.finditer(text):
        size = found.end() - found.start()
        if found[1]:
            spaces = max(spaces, size)
        else:
            words = max(words, size)
    longest = spaces + words
    if pre in _SENTENCES:
        longest = max(longest, *(found.end() - found.start() for found in _SENTENCES[pre].finditer(text)), 0)
    return longest


def on_larger_stack(call: Callable[[], list[int]], mebibytes: int) -> list[int]:
    """Runs the call in a new thread with a stack of this size, because the stack of a running thread cannot grow."""
    results: list[list[int]] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            results.append(call())
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="llamabatch-tokenize")
    try:
        with _stack_size_lock:
            before = threading.stack_size(mebibytes * 2**20)
            try:
                thread.start()
            finally:
                threading.stack_size(before)
    except (RuntimeError, ValueError) as error:
        raise PromptError(f"the text needs a stack of {mebibytes} MiB, which is not available: {error}") from None
    try:
        thread.join()
    except BaseException:  # after Ctrl-C, the thread still uses the vocabulary, so this call must not return yet
        thread.join()
        raise
    if errors:
        raise errors[0]
    return results[0]
