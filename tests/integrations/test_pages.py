"""The pages and examples of other people's frameworks run where these are installed."""

from pathlib import Path

import pytest

from tests.model import test_docs, test_examples

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("page", sorted(test_docs.NEEDS))
def test_page(page, tmp_path, monkeypatch):
    _offline(monkeypatch)
    test_docs.test_page(ROOT / "docs" / page, tmp_path)


@pytest.mark.parametrize("example", sorted(test_examples.NEEDS))
def test_example(example, monkeypatch):
    _offline(monkeypatch)
    test_examples.test_example(ROOT / "examples" / f"{example}.py")


def _offline(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
