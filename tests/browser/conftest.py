"""Fixtures: a server of the bundled model, and a browser that opens its page."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.browser.__main__ import BROWSER
from tests.server.conftest import running

collect_ignore_glob = [] if BROWSER in os.environ else ["test_*.py"]

WAIT_S = 20


@pytest.fixture(scope="session")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("server")
    with running(folder, model="tiny", n_slots=3, instances=1, data_dir=str(folder / "data")) as found:
        yield found


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []
        made = playwright.chromium.launch(
            executable_path=os.environ[BROWSER], args=[*sandbox, "--disable-gpu", "--disable-dev-shm-usage"]
        )
        yield made
        made.close()


@pytest.fixture
def open_page(browser: Any) -> Iterator[Callable[..., Any]]:
    """Returns a function that opens a page in a context of its own.

    An exception in a page, or a violation of its content security policy, fails the test.
    """
    contexts, faults = [], []

    def opened(url: str, **options: Any) -> Any:
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 800}} | options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(WAIT_S * 1000)
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("console", lambda said: faults.append(said.text) if "Content Security Policy" in said.text else None)
        page.goto(url)
        return page

    yield opened
    for context in contexts:
        context.close()
    assert faults == []


def until(found: Callable[[], Any]) -> Any:
    """Calls a function again and again, and returns its first true value."""
    end = time.monotonic() + WAIT_S
    while not (value := found()):
        assert time.monotonic() < end
        time.sleep(0.05)
    return value


def shot(page: Any, name: str) -> None:
    """Saves a screenshot of the page if LLAMABATCH_SHOTS names a folder."""
    folder = os.environ.get("LLAMABATCH_SHOTS")
    if folder:
        page.screenshot(path=str(Path(folder) / f"{name}.png"), full_page=True)
