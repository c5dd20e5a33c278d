"""Fixtures: trained models."""

from __future__ import annotations

import os

import pytest

from benchmarks import trained
from llamabatch import LLM
from tests.real.__main__ import NAMED

collect_ignore_glob = [] if NAMED in os.environ else ["test_*.py"]


@pytest.fixture(scope="session")
def smollm2():
    """SmolLM2-135M-Instruct, which has a chat template and no sliding window."""
    return trained.model("smollm2")


@pytest.fixture(scope="session")
def gemma3():
    """Gemma 3 270M, which has no chat template, windows of 512 tokens, and a vocabulary of 262k tokens."""
    return trained.model("gemma3")


@pytest.fixture(scope="module")
def chatting(smollm2):
    with LLM(smollm2, n_slots=8, n_ctx=2048) as llm:
        yield llm


@pytest.fixture(scope="module")
def windowed(gemma3):
    with LLM(gemma3, n_slots=4, n_ctx=2048) as llm:
        yield llm
