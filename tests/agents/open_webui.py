"""Sends one text to Open WebUI through its page, as a person would: open_webui.py BROWSER COMMAND... TEXT.

Starts COMMAND, opens its page in the browser, sends the text, and writes the answer as the page shows it. SIGINT clicks
the page's button that stops an answer. Runs in the environment of Open WebUI, which has Playwright.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

URL = "http://127.0.0.1:3000"
WAIT_S = 300
IN_SESSION = "LLAMABATCH_OPEN_WEBUI_SESSION"
TOOLS = '''
class Tools:
    async def read(self, path: str) -> str:
        """
        Returns the text of a file.
        :param path: the path of the file
        """
        with open(path) as file:
            return file.read()

    async def write(self, path: str, text: str) -> str:
        """
        Writes a file.
        :param path: the path of the file
        :param text: the new text
        """
        with open(path, "w") as file:
            file.write(text)
        return "written"
'''


def main() -> int:
    if IN_SESSION in os.environ:
        return _session()
    # A signal to the process group must reach neither the server nor the browser, so they get a session of their own.
    child = subprocess.Popen([sys.executable, *sys.argv], env=os.environ | {IN_SESSION: "1"}, start_new_session=True)
    signal.signal(signal.SIGINT, lambda *_: child.send_signal(signal.SIGUSR1))
    signal.signal(signal.SIGTERM, lambda *_: child.terminate())
    return child.wait()


def _end_with_parent() -> None:
    """Kills this session when its parent is gone, because a killed test kills the parent only."""
    parent = os.getppid()
    while os.getppid() == parent:
        time.sleep(1.0)
    os.killpg(0, signal.SIGKILL)


def _session() -> int:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # Otherwise the server would outlive this process, and the next test would find it at its port.
    signal.signal(signal.SIGTERM, lambda *_: os.killpg(0, signal.SIGKILL))
    browser, *command, text = sys.argv[1:]
    log = Path.home() / "open-webui.log"
    # By default Open WebUI keeps its data in its package, and the key of its tokens in the working directory.
    environ = os.environ | {"DATA_DIR": str(Path.home() / "open-webui"), "WEBUI_SECRET_KEY": "of this test"}
    with log.open("ab") as file:
        server = subprocess.Popen(command, env=environ, stdout=file, stderr=subprocess.STDOUT)
    try:
        _until(lambda: _get("/health", None) is not None or server.poll() is not None)
        assert server.poll() is None, log.read_text()[-3000:]
        token = _post("/api/v1/auths/signin", {"email": "", "password": ""}, None)["token"]
        models = _get("/api/models", token)["data"]
        assert models, log.read_text()[-3000:]
        model = models[0]["id"]
        _give_tools(model, token)
        _talk(browser, model, text, token)
    finally:
        server.terminate()
        server.wait()
    return 0


def _give_tools(model: str, token: str) -> None:
    """Gives the model the tools and a count of tokens, as an administrator does in the workspace.

    Does nothing if an earlier run in the same home directory has done so.
    """
    meta: dict[str, Any] = {"description": "files"}
    try:
        _post("/api/v1/tools/create", {"id": "files", "name": "files", "content": TOOLS, "meta": meta}, token)
    except urllib.error.HTTPError:  # an earlier run has made the tools and the model
        return
    meta = {"toolIds": ["files"], "capabilities": {"usage": True}}
    _post("/api/v1/models/create", {"id": model, "name": model, "meta": meta, "params": {}}, token)


def _talk(browser: str, model: str, text: str, token: str) -> None:
    from playwright.sync_api import sync_playwright

    stops: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, _: stops.append(number))
    with sync_playwright() as playwright:
        sandbox = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        with playwright.chromium.launch(executable_path=browser, args=sandbox) as chromium:
            page = chromium.new_page(viewport={"width": 1280, "height": 800})
            page.set_default_timeout(60_000)
            page.goto(f"{URL}/?models={model}")
            field = page.locator("#chat-input")
            field.wait_for()
            news = page.get_by_role("dialog")  # at the first visit, a dialog shows the news of this version
            page.wait_for_timeout(2_000)
            if news.count():
                news.get_by_role("button", name="Okay").click()
                news.wait_for(state="detached")
            field.click()
            page.keyboard.insert_text(text)
            page.keyboard.press("Enter")
            page.wait_for_url("**/c/*")
            chat = page.url.rpartition("/")[2].partition("?")[0]
            until = time.monotonic() + WAIT_S
            while not _is_done(chat, token):
                assert time.monotonic() < until, page.locator("body").inner_text()
                page.wait_for_timeout(200)
                if stops:
                    stops.clear()
                    page.get_by_role("button", name="Stop").click()
            page.wait_for_timeout(500)
            shown = page.locator("#messages-container").inner_text()
            os.set_blocking(sys.stdout.fileno(), True)  # Playwright's driver shares the pipe, and made it non-blocking
            print(shown, flush=True)


def _is_done(chat: str, token: str) -> bool:
    """Returns True if the last answer of a chat is complete, was stopped or has failed."""
    history = _get(f"/api/v1/chats/{chat}", token)["chat"]["history"]
    message = history["messages"][history["currentId"]]
    return message["role"] == "assistant" and bool(message.get("done") or message.get("error"))


def _get(path: str, token: str | None) -> Any:
    """Returns a JSON document of the server; None if the server does not answer."""
    try:
        return _call(path, None, token)
    except (urllib.error.URLError, OSError):
        return None


def _post(path: str, body: Any, token: str | None) -> Any:
    return _call(path, json.dumps(body).encode(), token)


def _call(path: str, body: bytes | None, token: str | None) -> Any:
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})
    request = urllib.request.Request(URL + path, body, headers)
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)


def _until(found: Callable[[], bool]) -> None:
    until = time.monotonic() + WAIT_S
    while not found():
        assert time.monotonic() < until
        time.sleep(0.5)


if __name__ == "__main__":
    sys.exit(main())
