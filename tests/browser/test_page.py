"""Tests the page with a server of the bundled model."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import wave
import zlib

import pytest

from tests.browser.conftest import shot, until
from tests.server.conftest import running

UNNAMED = """() => [...document.querySelectorAll("button, input, select, textarea, [role=group], [role=img]")]
    .filter((each) => !each.textContent.trim() && !each.labels?.length && !each.getAttribute("aria-label"))
    .map((each) => each.outerHTML)"""
LONG = "List all the numbers. "
VIEWS = ["chat", "live", "compare", "batches"]
SIZES = [(1280, 1), (390, 2), (640, 2)]  # width, scale


def ask_all(page, text):
    page.get_by_label("Ask all conversations at once").fill(text)
    page.keyboard.press("Enter")


def test_conversations_answer_at_the_same_time(open_page, url):
    page = open_page(url)
    until(lambda: page.locator("#server-model").text_content() == "tiny")
    assert page.locator(".column").count() == 1
    assert not page.get_by_label("Model", exact=True).is_visible()
    assert not page.get_by_label("Ask all conversations at once").is_visible()
    for _ in range(2):
        page.get_by_role("button", name="New conversation").click()
    ask_all(page, "What is the capital of France?")
    until(lambda: page.locator(".column .facts").count() == 3)
    assert all("Paris" in text for text in page.locator(".column .text").all_text_contents())
    until(lambda: "Paris" in page.locator("#announcer").text_content())
    shot(page, "chat")


def test_one_of_several_models_is_chosen(open_page, tmp_path):
    with running(tmp_path, ["-m", "first=tiny", "-m", "second=tiny", "--n-slots", "2"]) as url:
        page = open_page(url)
        chosen, facts = page.get_by_label("Model", exact=True), page.locator(".column .facts")
        until(lambda: chosen.is_visible())
        assert chosen.locator("option").all_text_contents() == ["first", "second"]

        def answered_by():
            count = facts.count()
            page.locator(".column textarea[placeholder^=Message]").fill("What is the capital of France?")
            page.keyboard.press("Enter")
            until(lambda: facts.count() > count)
            return facts.last.text_content().split(" · ")[0]

        assert answered_by() == "first"
        page.locator("#tab-live").click()
        until(lambda: page.locator("#view-live .slots tbody tr").count() == 2)
        chosen.select_option("second")
        until(lambda: "The model is not loaded: the first request" in page.locator("#view-live").text_content())
        shot(page, "several-live")
        page.locator("#tab-chat").click()
        assert answered_by() == "second"
        shot(page, "several-chat")
        page.reload()
        until(lambda: chosen.input_value() == "second")
        assert page.title() == "second · llamabatch"
        page.set_viewport_size({"width": 390, "height": 800})
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        assert page.evaluate(UNNAMED) == []
        shot(page, "several-390")
        page.set_viewport_size({"width": 1280, "height": 800})
        page.locator("#tab-compare").click()
        start = page.get_by_role("button", name="Compare", exact=True)
        start.click()
        until(lambda: start.is_enabled() and "texts are equal" in page.locator("#compare-state").text_content())
        assert "second" in page.locator("#view-compare .figure").text_content()


DATA = """async ([name, type, bytes]) => {
    const data = new DataTransfer();
    data.items.add(new File([new Uint8Array(bytes)], name, { type }));
    return data;
}"""


PASTE = "(area, data) => area.dispatchEvent(new ClipboardEvent('paste', { clipboardData: data, bubbles: true }))"
DURATION = """async () => {
    const sound = document.querySelector("audio");
    if (!sound.duration) await new Promise((heard) => (sound.onloadedmetadata = heard));
    return sound.duration;
}"""
PROJECTOR = """from llamabatch.tools.synth.projectors import ProjectorShape, write_projector
write_projector("mm.gguf", ProjectorShape({!r}), 192, seed=1)"""


def write_projector(kind, folder):
    """Writes an mmproj file for the bundled model."""
    python = os.environ["LLAMABATCH_SERVER_PYTHON"]
    subprocess.run([python, "-c", PROJECTOR.format(kind)], cwd=folder, check=True)
    return str(folder / "mm.gguf")


def png(width, height):
    """Returns a PNG with stripes. It is made by hand, because this environment has no package for pictures."""
    rows = b"".join(b"\0" + bytes((y * 3 % 256, 90, 160)) * width for y in range(height))

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def given(page, name, kind, data):
    return page.evaluate_handle(DATA, [name, kind, list(data)])


def attaching(open_page, url):
    """Opens a page and presses Attach. Returns the page, its composer, and a list that gets the bodies of its chats."""
    page, bodies = open_page(url), []
    page.on("request", lambda asked: bodies.append(asked.post_data_json) if "completions" in asked.url else None)
    composer = page.get_by_role("article", name="Conversation 1").locator(".composer")
    composer.get_by_role("button", name="Attach").click()
    return page, composer, bodies


def test_pictures_are_chosen_pasted_and_dropped(open_page, tmp_path):
    shown = tmp_path / "my cat.png"
    shown.write_bytes(png(96, 64))
    with running(tmp_path, model="tiny", mmproj=write_projector("mlp", tmp_path), n_slots=2, n_ctx=512) as url:
        page, composer, bodies = attaching(open_page, url)
        composer.locator("input[type=file]").set_input_files(shown)
        area = composer.locator("textarea")
        area.evaluate(PASTE, given(page, "pasted.png", "image/png", shown.read_bytes()))
        page.locator(".column").dispatch_event(
            "drop", {"dataTransfer": given(page, "dropped.png", "image/png", shown.read_bytes())}
        )
        until(lambda: composer.locator(".attached img").count() == 3)
        composer.get_by_role("button", name="Leave out pasted.png").click()
        shot(page, "pictures_to_send")
        area.fill("What is this?")
        page.keyboard.press("Enter")
        until(lambda: page.locator(".column .facts").count() == 1)
        images = page.locator(".message img").all()
        assert [each.get_attribute("alt") for each in images] == ["my cat.png", "dropped.png"]
        assert page.locator(".column .error:visible").count() == 0
        [message] = bodies[0]["messages"]
        assert [part["type"] for part in message["content"]] == ["image_url", "image_url", "text"]
        assert message["content"][0]["image_url"]["url"].startswith("data:image/png;base64,")
        shot(page, "pictures")
        area.evaluate(PASTE, given(page, "a.pdf", "application/pdf", b"pdf"))
        until(lambda: "a.pdf is no PNG" in (composer.locator(".error").text_content() or ""))


def test_sounds_are_chosen_and_dropped(open_page, tmp_path):
    spoken = tmp_path / "my question.wav"
    with wave.open(str(spoken), "wb") as file:
        file.setparams((1, 2, 16_000, 16_000, "NONE", ""))
        file.writeframes(bytes(32_000))
    with running(tmp_path, model="tiny", mmproj=write_projector("ultravox", tmp_path), n_slots=2, n_ctx=2048) as url:
        page, composer, bodies = attaching(open_page, url)
        assert "audio/mpeg" in composer.locator("input[type=file]").get_attribute("accept")
        assert "image" not in composer.locator("input[type=file]").get_attribute("accept")
        composer.locator("input[type=file]").set_input_files(spoken)
        until(lambda: composer.locator(".attached audio").count() == 1)
        assert page.evaluate(DURATION) == 1
        shot(page, "sounds_to_send")
        composer.locator("textarea").fill("What is said?")
        page.keyboard.press("Enter")
        until(lambda: page.locator(".column .facts").count() == 1)
        assert page.locator(".column .error:visible").count() == 0
        assert page.locator(".message audio").get_attribute("aria-label") == "my question.wav"
        [message] = bodies[0]["messages"]
        assert [part["type"] for part in message["content"]] == ["input_audio", "text"]
        assert message["content"][0]["input_audio"]["format"] == "wav"
        shot(page, "sounds")
        page.locator(".column").dispatch_event("drop", {"dataTransfer": given(page, "a.png", "image/png", png(4, 4))})
        until(lambda: "a.png is no WAV, MP3 or FLAC file" in (composer.locator(".error").text_content() or ""))


def test_a_model_that_reads_text_alone_says_so_where_a_picture_is_dropped(open_page, url):
    page = open_page(url)
    until(lambda: page.locator("#server-model").text_content() == "tiny")
    assert not page.get_by_role("button", name="Attach").is_visible()
    page.locator(".column").dispatch_event("drop", {"dataTransfer": given(page, "a.png", "image/png", b"a")})
    until(lambda: "--mmproj" in (page.locator(".column .error:visible").text_content() or ""))


def endless(page):
    """Changes the page's requests so that their answers go on until they are stopped."""

    def longer(route):
        body = {**route.request.post_data_json, "ignore_eos": True, "max_tokens": 1900}
        route.continue_(post_data=json.dumps(body))

    page.route("**/v1/chat/completions", longer)


def running_slots(page):
    found = page.request.get(page.url.split("#")[0] + "slots").json()
    return sum(slot["is_processing"] for slot in found)


def test_escape_stops_the_conversation_with_the_focus_then_all(open_page, url):
    page = open_page(url)
    endless(page)
    page.get_by_role("button", name="New conversation").click()
    ask_all(page, LONG)
    first = page.get_by_role("article", name="Conversation 1")
    second = page.get_by_role("article", name="Conversation 2")
    until(lambda: first.locator(".text").count() and second.locator(".text").count())
    shot(page, "answering")
    first.locator("textarea").last.focus()
    page.keyboard.press("Escape")
    until(lambda: "stopped" in "".join(first.locator(".facts").all_text_contents()))
    assert second.get_by_role("button", name="Stop").is_enabled()
    page.get_by_role("tab", name="Chat").focus()
    page.keyboard.press("Escape")
    until(lambda: "stopped" in "".join(second.locator(".facts").all_text_contents()))
    until(lambda: running_slots(page) == 0)


def test_the_live_batch_shows_slots_and_queue(open_page, url):
    page = open_page(url)
    endless(page)
    for _ in range(4):
        page.get_by_role("button", name="New conversation").click()
    page.get_by_role("tab", name="Live batch").click()
    rows = page.locator(".slots tbody tr")
    until(lambda: rows.count() == 3)
    assert all(text.startswith("free") for text in page.locator(".slots .tokens").all_text_contents())
    page.get_by_role("tab", name="Chat").click()
    ask_all(page, LONG)
    until(lambda: "waits for one of the browser's" in "".join(page.locator(".under .state").all_text_contents()))
    page.get_by_role("tab", name="Live batch").click()
    until(lambda: page.locator(".slots tbody tr.output").count() == 3)
    until(lambda: page.locator(".tile.queue dd").text_content() == "1")
    assert "all slots are taken" in page.locator(".queue li").text_content()
    until(lambda: float(page.locator(".tile.rows dd").text_content()) > 0)
    widths = rows.locator("rect.output").evaluate_all("found => found.map(each => Number(each.getAttribute('width')))")
    assert min(widths) > 0
    shot(page, "live")
    page.get_by_role("tab", name="Chat").click()
    page.get_by_role("tab", name="Chat").press("Escape")
    until(lambda: running_slots(page) == 0)


def test_alone_and_in_company(open_page, url):
    page = open_page(f"{url}/#compare")
    until(lambda: len(page.locator("#compare-prompts").input_value().split("\n")) == 3)
    start = page.get_by_role("button", name="Compare", exact=True)
    for _ in range(2):
        start.click()
        until(lambda: start.is_enabled())
        state = page.locator("#compare-state").text_content()
        assert "3 of 3 texts are equal" in state
        assert page.locator("#view-compare .figure").get_attribute("aria-label") == state
    assert "Together went first." in page.locator(".notes").text_content()  # in the second comparison
    assert "No token of a prompt came from the prefix cache." in page.locator(".notes").text_content()
    assert page.locator(".texts .equal").count() == 3
    shot(page, "compare")
    for kind, head in (("PNG", b"\x89PNG"), ("SVG", b"<svg")):
        with page.expect_download() as waited:
            page.get_by_role("button", name=f"Download {kind}").click()
        assert waited.value.suggested_filename.endswith(kind.lower())
        assert waited.value.path().read_bytes().startswith(head)


def test_texts_that_differ_are_shown_where_they_do(open_page, url):
    page = open_page(f"{url}/#compare")
    until(lambda: page.locator("#compare-prompts").input_value())

    def altered(route):
        response = route.fetch()
        body = response.text()
        if isinstance(route.request.post_data_json["prompt"], list) and len(route.request.post_data_json["prompt"]) > 1:
            body = body.replace('"index":1,"text":"', '"index":1,"text":"~', 1)
        route.fulfill(response=response, body=body)

    page.route("**/v1/completions", altered)
    page.get_by_role("button", name="Compare", exact=True).click()
    until(lambda: "2 of 3 texts are equal" in page.locator("#compare-state").text_content())
    assert "They differ from character" in page.locator(".texts tr").nth(2).text_content()
    assert page.locator(".texts mark").count() == 2
    shot(page, "differs")


def test_too_few_prompts_are_refused(open_page, url):
    page = open_page(f"{url}/#compare")
    until(lambda: page.locator("#compare-prompts").input_value())
    page.locator("#view-compare summary", has_text="Prompts").click()
    page.locator("#compare-prompts").fill("One")
    page.get_by_role("button", name="Compare", exact=True).click()
    assert "give 2 to 64" in page.locator("#view-compare [role=alert]").text_content()


def test_a_file_becomes_a_batch_and_its_results(open_page, url, tmp_path):
    lines = [
        {"custom_id": f"r{n}", "method": "POST", "url": "/v1/chat/completions",
         "body": {"model": "tiny", "messages": [{"role": "user", "content": f"What is {n} plus 5?"}], "max_tokens": 8}}
        for n in range(6)
    ]  # fmt: skip
    path = tmp_path / "sums.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = open_page(url)
    until(lambda: page.get_by_role("tab", name="Batches").is_visible())
    page.get_by_role("tab", name="Batches").click()
    page.locator("#batch-file").set_input_files(str(path))
    batch = page.get_by_role("article", name="sums.jsonl")
    until(lambda: batch.get_by_role("button", name="Download results").count())
    assert "6 of 6 done" in batch.text_content()
    shot(page, "batches")
    with page.expect_download() as waited:
        batch.get_by_role("button", name="Download results").click()
    results = [json.loads(line) for line in waited.value.path().read_text().splitlines()]
    assert {each["custom_id"] for each in results} == {f"r{n}" for n in range(6)}
    path.write_text("no json\n")
    page.locator("#batch-file").set_input_files(str(path))
    until(lambda: "no JSON" in "".join(page.locator("#view-batches [role=alert]").all_text_contents()))


def test_a_sample_can_be_tried(open_page, url):
    page = open_page(f"{url}/#batches")
    page.get_by_role("button", name="Try a sample").click()
    batch = page.get_by_role("article", name="sample.jsonl")
    until(lambda: batch.get_by_role("button", name="Download results").count())
    assert "4 of 4 done" in batch.text_content()


def test_the_key_is_asked_for_once_and_gone_with_the_tab(open_page, tmp_path):
    with running(tmp_path, model="tiny", n_slots=2, api_keys=["secret"]) as url:
        page = open_page(url)
        dialog = page.get_by_role("dialog")
        until(dialog.is_visible)
        shot(page, "key")
        page.keyboard.type("wrong")
        page.keyboard.press("Enter")
        until(lambda: dialog.is_visible() and "refused" in dialog.text_content())
        page.keyboard.type("secret")
        page.keyboard.press("Enter")
        until(lambda: page.locator("#server-model").text_content() == "tiny")
        page.get_by_role("button", name="New conversation").click()
        ask_all(page, "What is the capital of France?")
        until(lambda: page.locator(".column .facts").count() == 2)
        assert not dialog.is_visible()
        assert page.evaluate("[localStorage.length, sessionStorage['llamabatch.key']]") == [0, "secret"]


def test_a_server_that_is_gone_is_told_in_each_view(open_page, tmp_path):
    with running(tmp_path, model="tiny", n_slots=2) as url:
        page = open_page(f"{url}/#live")
        until(lambda: page.locator(".slots tbody tr").count() == 2)
        assert page.locator("#view-live.stale").count() == 0
        until(lambda: page.get_by_role("tab", name="Batches").is_visible())
    until(lambda: page.locator("#view-live.stale .notice").is_visible())
    shot(page, "gone-live")
    page.get_by_role("tab", name="Batches").click()
    until(lambda: page.locator("#view-batches [role=alert]").is_visible())
    assert page.locator("#server-state").get_attribute("data-state") == "gone"
    until(lambda: page.locator("#server-state").text_content() == "no answer")
    shot(page, "gone-batches")
    page.route("**/v1/batches?*", lambda route: route.fulfill(json={"data": []}))
    until(lambda: not page.locator("#view-batches [role=alert]").is_visible())
    page.get_by_role("tab", name="Alone or in company").click()
    page.locator("#view-compare summary", has_text="Prompts").click()
    page.locator("#compare-prompts").fill("One\nTwo")
    page.get_by_role("button", name="Compare", exact=True).click()
    until(lambda: page.locator("#view-compare [role=alert]").is_visible())
    shot(page, "gone-compare")


def test_tabs_by_the_keyboard(open_page, url):
    page = open_page(url)
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the content"
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "tab-chat"
    page.keyboard.press("ArrowRight")
    assert page.evaluate("document.activeElement.id") == "tab-live"
    assert page.locator("#view-live").is_visible()
    outline = page.locator("#tab-live").evaluate("each => getComputedStyle(each).outlineStyle")
    assert outline == "solid"
    page.keyboard.press("Home")
    assert page.locator("#view-chat").is_visible()


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize(("width", "scale"), SIZES, ids=["desk", "phone", "zoom"])
def test_nothing_is_cut_off_and_all_controls_have_names(open_page, url, name, width, scale):
    scheme = ("light", "dark")[(VIEWS.index(name) + SIZES.index((width, scale))) % 2]  # each view and size has both
    options = {"viewport": {"width": width, "height": 800}, "color_scheme": scheme, "device_scale_factor": scale}
    page = open_page(f"{url}/#{name}", **options, reduced_motion="reduce")
    until(lambda: page.locator(f"#view-{name}").is_visible())
    if name == "live":
        until(lambda: page.locator(".slots tbody tr").count() == 3)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    if width == 1280:
        assert page.evaluate("document.documentElement.scrollHeight") <= 800
    if width == 390:  # all tabs fit into one line
        assert page.locator(".tabs").evaluate("each => each.offsetHeight") < 60
    assert page.evaluate(UNNAMED) == []
    shot(page, f"{name}-{scheme}-{width}")
