"""The pages and examples of other people's frameworks run where these are installed."""

from pathlib import Path

import pytest

from tests.model import test_docs, test_examples

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("page", sorted(test_docs.NEEDS))
def test_page(page, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    test_docs.test_page(ROOT / "docs" / page, tmp_path)


@pytest.mark.parametrize("example", sorted(test_examples.NEEDS))
def test_example(example, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    test_examples.test_example(ROOT / "examples" / f"{example}.py")
