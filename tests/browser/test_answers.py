"""The page shows answers correctly. The tests write the answers; no model is asked."""

from __future__ import annotations

import json

import pytest

from tests.browser.conftest import shot, until

CHATS = "**/v1/chat/completions"
ATTACKS = [
    "```html\n<iframe srcdoc='<script>parent.hacked = 1</script>'></iframe>\n```",
    '# <a href="javascript:window.hacked=1">title</a>',
    "- [link](javascript:window.hacked=1)\n- ![picture](https://elsewhere.example/x.png)",
    "</div></main><style>body { display: none }</style>",
]


def stream(*deltas, reason="stop", usage=9, end=True, error=None):
    events = [{"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    if error:
        events.append({"error": {"message": error, "code": 500}})
    elif end:
        events.append({"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]})
        events.append({"choices": [], "usage": {"completion_tokens": usage}})
    lines = [f"data: {json.dumps(event)}\n\n" for event in events] + (["data: [DONE]\n\n"] if end and not error else [])
    return {"status": 200, "content_type": "text/event-stream", "body": "".join(lines)}


@pytest.fixture
def page(open_page, url):
    return open_page(url)


def answered(page, text="Hello", **response):
    """Sends a text, and answers it with this response. Returns the last message of the first conversation."""
    page.route(CHATS, lambda route: route.fulfill(**response))
    page.get_by_label("Message of Conversation 1", exact=True).fill(text)
    page.keyboard.press("Enter")
    column = page.get_by_role("article", name="Conversation 1")
    until(lambda: column.locator(".facts").count() and column.get_by_role("button", name="Stop").is_disabled())
    return column.locator(".message").last


@pytest.mark.parametrize("attack", ATTACKS)
def test_no_answer_is_markup_or_a_program(page, attack):
    asked = []
    page.on("request", lambda request: asked.append(request.url))
    message = answered(page, attack, **stream({"content": attack}))
    names = message.locator("*").evaluate_all("found => found.map(each => each.localName)")
    usual = ("div", "p", "code", "pre", "strong", "em", "h4", "h5", "h6", "ul", "ol", "li", "span", "button")
    assert set(names) <= set(usual)
    attributes = message.locator("*").evaluate_all("found => found.flatMap(each => each.getAttributeNames())")
    assert not {each for each in attributes if each.startswith("on")} | ({"href", "src", "style"} & set(attributes))
    assert page.evaluate("window.hacked") is None
    assert page.locator("main").is_visible()
    assert not [each for each in asked if "elsewhere" in each]
    assert page.locator(".message.user").last.text_content().endswith(attack)


# Texts that would run a program if the page used them as markup: elements, handlers, addresses, styles, broken markup.
PROGRAMS = [
    "<script>{}</script>", "<ScRiPt >{}</sCrIpT>", "<<script>{}//<</script>", "<script src=//elsewhere.example/x.js>",
    "<img src=x onerror={}>", "<img src='x' onerror=\"{}\">", "<img/src=x/onerror={}>", "<img src=x:x onerror={}//",
    "<svg onload={}>", "<svg/onload={}>", "<svg><script>{}</script></svg>", "<svg><animate onbegin={} attributeName=x>",
    "<body onload={}>", "<body onpageshow={}>", "<input autofocus onfocus={}>", "<select autofocus onfocus={}>",
    "<textarea autofocus onfocus={}>", "<details open ontoggle={}>", "<video><source onerror={}></video>",
    "<audio src=x onerror={}>", "<marquee onstart={}>", "<iframe srcdoc='<script>parent.{}</script>'>",
    "<iframe src=javascript:parent.{}>", "<object data=javascript:{}>", "<embed src=javascript:{}>",
    "<a href=javascript:{}>x</a>", "<a href='java\tscript:{}'>x</a>",
    "<form action=javascript:{}><button>x</button></form>",
    "<button formaction=javascript:{}>x</button>", "<math href=javascript:{}>x</math>", "<base href=javascript:{}//>",
    "<meta http-equiv=refresh content='0;url=javascript:{}'>", "<link rel=stylesheet href=//elsewhere.example/x.css>",
    "<style>@import '//elsewhere.example/x.css'</style>", "<div style=\"background:url(javascript:{})\">x</div>",
    "<template><script>{}</script></template>", "<noscript><p title='</noscript><img src=x onerror={}>'>",
    "[x](javascript:{})", "![x](javascript:{})", "<javascript:{}>",
]  # fmt: skip
AROUND = ["{}", "`{}`", "**{}**", "# {}", "- {}"]


def test_two_hundred_attacks_stay_text(page):
    asked = []
    page.on("request", lambda request: asked.append(request.url))
    attacks = [around.replace("{}", each.replace("{}", "window.hacked=1")) for each in PROGRAMS for around in AROUND]
    assert len(set(attacks)) == 200
    message = answered(page, **stream(*({"content": f"{attack}\n\n"} for attack in attacks)))
    names = message.locator("*").evaluate_all("found => found.map(each => each.localName)")
    assert set(names) <= {"div", "p", "code", "strong", "em", "h4", "ul", "li", "span", "button"}
    attributes = message.locator("*").evaluate_all("found => found.flatMap(each => each.getAttributeNames())")
    assert set(attributes) <= {"class", "type", "aria-label"}
    text = message.locator(".text").text_content()
    assert all(text.count(each.replace("{}", "window.hacked=1")) >= len(AROUND) for each in PROGRAMS)
    assert page.evaluate("window.hacked") is None
    assert [each for each in asked if not each.startswith(page.url.split("#")[0])] == []


def test_code_is_copied_and_a_conversation_is_exported(page):
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    message = answered(page, **stream({"content": "So:\n```python\na = 1\nb = 2\n```\nDone."}))
    message.get_by_role("button", name="Copy the code").click()
    until(lambda: page.evaluate("navigator.clipboard.readText()") == "a = 1\nb = 2")
    column = page.get_by_role("article", name="Conversation 1")
    with page.expect_download() as waited:
        column.get_by_role("button", name="Export").click()
    text = waited.value.path().read_text()
    assert text == "## user\n\nHello\n\n## assistant\n\nSo:\n```python\na = 1\nb = 2\n```\nDone.\n"


def test_a_little_of_markdown(page):
    text = "# Title\n\nOne **two** *three* `four`\n\n1. a\n2. b\n\n- c\n\n```py\nx = 1 < 2\n```\nend 2*3*4 snake_case"
    message = answered(page, **stream({"content": text}))
    assert message.locator("h4").text_content() == "Title"
    assert message.locator("strong").text_content() == "two"
    assert message.locator("em").all_text_contents() == ["three"]
    assert message.locator("p code").text_content() == "four"
    assert message.locator("ol li").all_text_contents() == ["a", "b"]
    assert message.locator("ul li").all_text_contents() == ["c"]
    assert message.locator("pre code").text_content() == "x = 1 < 2"
    assert message.locator(".text p").last.text_content() == "end 2*3*4 snake_case"


def test_thinking_is_folded_and_calls_are_shown(page):
    message = answered(
        page,
        **stream(
            {"reasoning_content": "Let me "},
            {"reasoning_content": "think."},
            {"content": "I ask."},
            {"tool_calls": [{"index": 0, "id": "call_1", "function": {"name": "weather", "arguments": '{"ci'}}]},
            {"tool_calls": [{"index": 0, "function": {"arguments": 'ty": "Rome"}'}}]},
            reason="tool_calls",
        ),
    )
    assert not message.get_by_text("Let me think.").is_visible()
    message.get_by_text("Thinking").click()
    assert message.get_by_text("Let me think.").is_visible()
    assert message.locator(".call").text_content() == 'calls weather({"city": "Rome"})'
    assert "9 tokens" in message.locator(".facts").text_content()
    shot(page, "thinking")


def test_an_error_stands_at_its_message(page):
    refused = {"status": 400, "content_type": "application/json", "body": '{"error": {"message": "too <b>long</b>"}}'}
    assert answered(page, **refused).locator("[role=alert]").text_content() == "too <b>long</b>"
    shot(page, "error")


def test_an_error_in_a_stream_keeps_the_text_before_it(page):
    message = answered(page, **stream({"content": "Half"}, error="the engine is gone"))
    assert message.locator(".text").text_content() == "Half"
    assert message.locator("[role=alert]").text_content() == "the engine is gone"


def test_a_stream_that_is_cut_is_told(page):
    message = answered(page, **stream({"content": "Half"}, end=False))
    assert "cut" in message.locator("[role=alert]").text_content()


def test_a_server_that_is_gone_is_told(page):
    page.route(CHATS, lambda route: route.abort())
    page.get_by_label("Message of Conversation 1", exact=True).fill("Hello")
    page.keyboard.press("Enter")
    until(lambda: "does not answer" in page.locator(".message [role=alert]").all_text_contents()[:1].__str__())


def test_tools_that_are_no_json_are_told_and_nothing_is_sent(page):
    column = page.get_by_role("article", name="Conversation 1")
    column.get_by_text("Options").click()
    column.get_by_label("Tools (JSON)").fill("[{")
    message = answered(page, **stream({"content": "never"}))
    assert "no JSON" in message.locator("[role=alert]").text_content()


def test_options_and_history_are_sent(page):
    bodies = []
    page.on("request", lambda request: bodies.append(request.post_data_json) if request.method == "POST" else None)
    column = page.get_by_role("article", name="Conversation 1")
    column.get_by_text("Options").click()
    for label, value in {"System prompt": "Be short.", "Temperature": "0.5", "Most tokens": "7"}.items():
        column.get_by_label(label).fill(value)
    answered(page, "One", **stream({"content": "1"}))
    answered(page, "Two", **stream({"content": "2"}))
    roles = [(each["role"], each["content"]) for each in bodies[-1]["messages"]]
    assert roles == [("system", "Be short."), ("user", "One"), ("assistant", "1"), ("user", "Two")]
    assert (bodies[-1]["temperature"], bodies[-1]["max_tokens"]) == (0.5, 7)
    assert "top_p" not in bodies[-1]
    column.get_by_role("button", name="Regenerate").click()
    until(lambda: len(bodies) == 3)
    assert bodies[2]["messages"] == bodies[1]["messages"]


def test_conversations_are_kept_only_if_the_user_asks(page):
    answered(page, "One", **stream({"content": "Kept?"}))
    assert page.evaluate("localStorage.length") == 0
    page.reload()
    assert page.locator(".message").count() == 0
    answered(page, "One", **stream({"content": "Kept."}))
    page.get_by_label("Keep them in this browser").check()
    page.reload()
    assert page.locator(".text").all_text_contents() == ["Kept."]
    page.get_by_label("Keep them in this browser").uncheck()
    assert page.evaluate("localStorage.length") == 0
