"""The files of the page: headers, addresses, and rules for their sources."""

import re

import pytest
from starlette.testclient import TestClient

from llamabatch.server.page.files import page_files
from tests.unit.server.serving_clients import fake_app

SOURCES = {name: file.content.decode() for name, file in page_files().items()}
SCRIPTS = {name: text for name, text in SOURCES.items() if name.endswith(".js")}


@pytest.fixture(scope="module")
def client():
    with TestClient(fake_app()) as client:
        yield client


@pytest.mark.parametrize("path", ["/", *(f"/page/{name}" for name in SOURCES)])
def test_a_file_comes_with_a_strict_policy_and_once(client, path):
    response = client.get(path)
    assert response.status_code == 200
    policy = response.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "*" not in policy
    assert response.headers["x-content-type-options"] == "nosniff"
    again = client.get(path, headers={"if-none-match": f'"other", W/{response.headers["etag"]}'})
    assert (again.status_code, again.content) == (304, b"")
    assert again.headers["content-security-policy"] == policy
    assert client.get(path, headers={"if-none-match": '"other"'}).content == response.content


def test_types_are_those_that_browsers_insist_on(client):
    kinds = {"/": "text/html", "/page/main.js": "text/javascript", "/page/style.css": "text/css"}
    for path, kind in {**kinds, "/page/icon.svg": "image/svg+xml"}.items():
        assert client.get(path).headers["content-type"].startswith(kind)


@pytest.mark.parametrize("path", ["/page/other.js", "/page/../options.py", "/page/%2e%2e/files.py", "/page/", "/page"])
def test_there_are_no_other_files(client, path):
    assert client.get(path).status_code == 404


def test_no_page_is_none():
    with TestClient(fake_app(server={"page": False})) as client:
        assert client.get("/").text == "llamabatch is running"  # programs read this text to learn whether a server runs
        assert client.get("/page/main.js").status_code == 404


def test_the_page_needs_no_key_and_is_there_while_the_model_loads():
    with TestClient(fake_app(server={"api_keys": ["secret"]})) as client:
        assert client.get("/").status_code == 200
        assert client.get("/page/main.js").status_code == 200
        assert client.get("/v1/models").status_code == 401


@pytest.mark.parametrize("path", ["/llm", "/llm/"])
def test_below_a_root_path_its_addresses_lead_there(path):
    with TestClient(fake_app(server={"root_path": "/llm"})) as client:
        response = client.get(path)
        assert response.status_code == 200
        found = response.url.join(re.findall(r'src="(page/main\.js)"', response.text)[0])
        assert found.path == "/llm/page/main.js"
        assert client.get(str(found)).status_code == 200


def test_it_is_no_endpoint(client):
    paths = client.get("/openapi.json").json()["paths"]
    assert "/" not in paths
    assert not any(path.startswith("/page") for path in paths)


@pytest.mark.parametrize("name", SOURCES)
def test_nothing_comes_from_elsewhere(name):
    addresses = re.findall(r"https?://[^\s\"'`)]+|[\"'`(]//[a-z]", SOURCES[name])
    assert set(addresses) <= {"http://www.w3.org/2000/svg"}  # an XML name space, which nothing fetches


@pytest.mark.parametrize("name", SCRIPTS)
def test_no_text_becomes_markup_or_a_program(name):
    markup = r"(?:inner|outer)HTML|insertAdjacentHTML|document\.write|DOMParser|createContextualFragment|srcdoc"
    forbidden = markup + r"|\beval\(|Function\("
    assert re.findall(forbidden, SCRIPTS[name]) == []


def test_the_document_has_no_inline_style_or_script():
    text = SOURCES["index.html"]
    assert re.findall(r"<script(?![^>]*\ssrc=)|<style|\sstyle=|\son[a-z]+=|javascript:", text) == []


@pytest.mark.parametrize("name", SCRIPTS)
def test_imports_lead_to_files_and_to_names_in_them(name):
    for names, path in re.findall(r'import \{([^}]*)\} from "\./([\w.]+)"', SCRIPTS[name]):
        for imported in filter(None, (each.strip() for each in names.split(","))):
            assert re.search(rf"export (async )?(function\*?|class|const) {imported}\b", SCRIPTS[path]), imported


def test_every_variable_of_a_colour_is_given_for_light_and_dark():
    style = SOURCES["style.css"]
    light, dark = (
        set(re.findall(r"(--[\w-]+): #", part)) for part in style.split("@media (prefers-color-scheme: dark)")
    )
    assert light == dark
    assert set(re.findall(r"var\((--[\w-]+)\)", style)) <= light | {"--mono", "--lane"}
