"""What a package index shows of the project: its metadata, and README.md outside of the repository."""

import re
from pathlib import Path

import pytest

from llamabatch.utils.version import __version__
from native_patches.packaging.hatch_metadata import page, urls

REPOSITORY = Path(__file__).parents[3]
README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
PATTERNS = ("{address}/blob/v{version}/{path}", "{address}/raw/v{version}/{path}")
ADDRESS = "https://example.org/owner/llamabatch"


def links(text):
    """Returns the targets of all links and pictures outside of code."""
    return re.findall(r"\]\(([^()\s]+)\)", re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL))


def code(text):
    return re.findall(r"^```.*?^```$", text, flags=re.MULTILINE | re.DOTALL)


def test_without_an_address_no_link_leads_nowhere():
    text = page(README, "", __version__, *PATTERNS)
    assert [target for target in links(text) if not target.startswith("https://")] == []
    assert code(text) == code(README)
    assert "install: `docs/install.md`" in text
    assert "![" not in text
    assert len(text) > 0.9 * len(README)


def test_with_an_address_links_lead_to_the_files_of_this_version():
    text = page(README, ADDRESS, "1.2", *PATTERNS)
    files = [target for target in links(text) if target.startswith(ADDRESS)]
    assert len(files) == len([target for target in links(README) if not target.startswith("https://")])
    for target in files:
        path = re.sub(rf"^{ADDRESS}/(blob|raw)/v1\.2/", "", target).split("#")[0]
        assert (REPOSITORY / path).exists(), target
    assert (
        f"![64 prompts through each strategy: throughput against latency, and each request over time]({ADDRESS}/raw"
        in text
    )
    assert f"git clone {ADDRESS} llamabatch" in text


@pytest.mark.parametrize(
    ("text", "plain", "linked"),
    [
        ("[SECURITY.md](SECURITY.md)", "SECURITY.md", "[SECURITY.md](A/f/SECURITY.md)"),
        ("[x](a.md#b)", "x: `a.md`", "[x](A/f/a.md#b)"),
        ("[x](https://b)", "[x](https://b)", "[x](https://b)"),
        ("[x](#here)", "[x](#here)", "[x](#here)"),
        ("![x](a.png)", "*x*", "![x](A/p/a.png)"),
        ("```\n[x](a.md)\n```", "```\n[x](a.md)\n```", "```\n[x](a.md)\n```"),
    ],
)
def test_links(text, plain, linked):
    patterns = ("{address}/f/{path}", "{address}/p/{path}")
    assert page(text, "", "1", *patterns) == plain
    assert page(text, "A", "1", *patterns) == linked


def test_addresses_of_the_project_lead_to_files_that_exist():
    assert urls("", "1", PATTERNS[0]) == {}
    named = urls(ADDRESS, "1", PATTERNS[0])
    assert named.pop("Repository") == ADDRESS
    for address in named.values():
        assert (REPOSITORY / address.removeprefix(f"{ADDRESS}/blob/v1/")).is_file()


def test_the_metadata_is_whole_and_an_index_knows_its_classifiers():
    core = pytest.importorskip("hatchling.metadata.core")
    manager = pytest.importorskip("hatchling.plugin.manager").PluginManager()
    known = pytest.importorskip("trove_classifiers").classifiers
    project = core.ProjectMetadata(str(REPOSITORY), manager)
    text = project.core.readme
    assert text.startswith("# llamabatch")
    assert project.core.readme_content_type == "text/markdown"
    assert set(project.core.classifiers) <= known
    minors = {int(name.rpartition(".")[2]) for name in project.core.classifiers if re.search(r":: 3\.\d+$", name)}
    assert minors == set(range(10, 15))
    assert project.core.keywords
    assert project.version == __version__


def test_the_version_has_its_changes_and_its_date():
    releases = (REPOSITORY / "CHANGELOG.md").read_text(encoding="utf-8").split("\n## ")[1:]
    assert re.fullmatch(rf"{re.escape(__version__)} \(20\d\d-\d\d-\d\d\)", releases[0].split("\n")[0])
    assert releases[-1].count("\n- ") <= 20, "the first release has one short list of what there is"
