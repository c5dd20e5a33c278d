"""Progress of a call: a function, a bar on a terminal, a bar in a notebook.

`make test-notebook` also runs a real notebook where Jupyter is installed.
"""

import io
import re
import sys
import types

import pytest

from llamabatch import InputError, PromptWarning
from llamabatch.testing import FakeLLM
from llamabatch.utils.progress import DownloadBar

CELLS = (
    "from llamabatch.testing import FakeLLM\nllm = FakeLLM()",
    "outputs = llm.generate(['a', 'b', 'c'])",
    "outputs = llm.generate('a')",
    "outputs = llm.generate('a', progress=True)",
    "outputs = llm.generate(['a', 'b'], progress=False)",
    "vectors = llm.embed(['a', 'b', 'c', 'd'])",
)


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def llm():
    with FakeLLM() as llm:
        yield llm


@pytest.fixture
def shown(monkeypatch):
    """Returns all pictures that a Jupyter kernel was asked to show: the first of each display, and the updates."""
    pictures = []

    class Handle:
        update = pictures.append

    def display(picture, display_id):
        assert display_id is True
        pictures.append(picture)
        return Handle

    ipython = types.SimpleNamespace(
        get_ipython=lambda: types.SimpleNamespace(kernel=object()), display=types.SimpleNamespace(display=display)
    )
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    return pictures


def text_of(picture):
    from rich.console import Console

    console = Console(file=io.StringIO(), width=100)
    console.print(picture)
    return console.file.getvalue()


def test_a_function_gets_the_steps_of_every_verb(llm):
    for call in (
        lambda progress: llm.generate(["a", "b"], progress=progress),
        lambda progress: llm.chat([[{"role": "user", "content": "a"}]] * 2, progress=progress),
        lambda progress: llm.embed(["a", "b"], progress=progress),
        lambda progress: llm.score("a", [" b", " c"], progress=progress),
        lambda progress: llm.rerank("a", ["b", "c"], progress=progress),
        lambda progress: llm.classify(["a", "b"], progress=progress),
    ):
        calls = []
        call(lambda done, total, calls=calls: calls.append((done, total)))
        assert calls == [(0, 2), (1, 2), (2, 2)]


def test_a_refused_prompt_counts_as_done(llm):
    calls = []
    with pytest.warns(PromptWarning):
        llm.generate(["a", None], progress=lambda done, total: calls.append(done))
    assert calls == [0, 1, 2]


def test_an_error_of_the_function_ends_the_call_and_no_other(llm):
    def fails(done, total):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        llm.generate(["a", "b"], progress=fails)
    assert [output.text for output in llm.generate(["a", "b"])] == ["a", "b"]


@pytest.mark.parametrize("given", [1, "yes"])
def test_another_value_is_refused(llm, given):
    with pytest.raises(InputError, match=r"progress is .*; give True, False, None or a function"):
        llm.generate(["a"], progress=given)


@pytest.mark.parametrize(("progress", "is_shown"), [(True, True), (None, False), (False, False)])
def test_a_terminal_shows_a_bar_that_is_asked_for(llm, monkeypatch, progress, is_shown):
    monkeypatch.setattr(sys, "stderr", Terminal())
    llm.generate(["a", "b"], progress=progress)
    assert ("2/2" in sys.stderr.getvalue()) is is_shown


def test_a_pipe_shows_none(llm, capsys):
    llm.generate(["a", "b"], progress=True)
    assert capsys.readouterr() == ("", "")


def test_a_notebook_shows_a_bar_for_a_list(llm, shown, capsys):
    llm.generate(["a", "b", "c"])
    assert "0/3" in text_of(shown[0])
    assert "3/3" in text_of(shown[-1])
    assert "tokens/s" in text_of(shown[-1])
    assert capsys.readouterr() == ("", "")


def test_a_notebook_shows_none_for_a_single_prompt_unless_it_is_asked_for(llm, shown):
    llm.generate("a")
    llm.generate(["a", "b"], progress=False)
    assert shown == []
    llm.generate("a", progress=True)
    assert "1/1" in text_of(shown[-1])


def test_ipython_on_a_terminal_is_no_notebook(llm, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: types.SimpleNamespace()))
    llm.generate(["a", "b"])
    assert capsys.readouterr() == ("", "")


def test_an_executed_notebook_has_the_bars():
    pytest.importorskip("ipykernel", reason="no Jupyter here: `make test-notebook` installs it and runs this")
    client = pytest.importorskip("nbclient", reason="no nbclient here: `make test-notebook` installs it and runs this")
    import nbformat

    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS])
    client.NotebookClient(notebook, timeout=60, kernel_name="python3").execute()
    outputs = [cell.outputs for cell in notebook.cells]
    assert [len(each) for each in outputs] == [0, 1, 0, 1, 0, 1]
    for index, total in ((1, 3), (3, 1), (5, 4)):
        [output] = outputs[index]
        assert output.output_type == "display_data"
        assert f"{total}/{total}" in output.data["text/html"]
        assert f"{total}/{total}" in output.data["text/plain"]


@pytest.mark.parametrize("total", [3_000_000_000, None])
def test_a_download_has_a_bar_on_a_terminal_of_80_columns_and_none_elsewhere(monkeypatch, total):
    monkeypatch.setenv("COLUMNS", "80")
    for kind in (Terminal, io.StringIO):
        monkeypatch.setattr(sys, "stderr", kind())
        with DownloadBar("a-very-long-name-of-a-model-[Q4]-Q4_K_M.gguf", 1_000_000_000, total) as bar:
            bar.advance(500_000_000)
        shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", sys.stderr.getvalue())
        if kind is io.StringIO:
            assert shown == ""
            continue
        last = [line for line in re.split(r"[\r\n]", shown) if line.strip()][-1]
        assert "…" in last
        assert "-Q4_K_M.gguf" in last
        assert "1.5" in last
        assert len(last.rstrip()) <= 80


class Gone(Terminal):
    """A terminal that has gone away."""

    def write(self, text):
        raise OSError(5, "Input/output error")


@pytest.mark.parametrize("stderr", [None, object(), Gone()])
def test_no_answer_is_lost_with_a_terminal_that_is_not_there(llm, monkeypatch, stderr):
    monkeypatch.setattr(sys, "stderr", stderr)
    assert len(llm.generate(["a", "b"], progress=True)) == 2
    DownloadBar("a", 0, 10).advance(10)
