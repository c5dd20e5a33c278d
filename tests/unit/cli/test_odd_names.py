"""Names of files that a terminal would obey, or that no file can have, in the messages of all commands."""

import itertools
import sys

import pytest

from llamabatch import cli
from llamabatch.errors import ConfigError, LlamaBatchError, MemoryPlanError, visible
from llamabatch.utils import interrupts, paths

NAMES = {
    "escape": ("\x1b[31mred\x07.gguf", r"\x1b[31mred\x07.gguf"),
    "title": ("\x9d0;x\x9c.gguf", r"\x9d0;x\x9c.gguf"),
    "turned": ("\u202egnp.gguf", r"\u202egnp.gguf"),
    "NUL": ("a\0b.gguf", r"a\x00b.gguf"),
    "half": ("\ud800x.gguf", r"\ud800x.gguf"),
}
COMMANDS = {
    "generate": ("generate", "hi", "-m", "NAME"),
    "draft": ("generate", "hi", "-m", "tiny", "--speculate", "draft", "--draft-model", "NAME"),
    "adapter": ("generate", "hi", "-m", "tiny", "--lora", "NAME"),
    "template": ("chat", "-m", "tiny", "--chat-template", "NAME"),
    "run, input": ("run", "NAME", "out.jsonl", "-m", "tiny"),
    "run, model": ("run", "in.jsonl", "out.jsonl", "-m", "NAME"),
    "run, output": ("run", "in.jsonl", "NAME/out.jsonl", "-m", "tiny"),
    "run, metrics": ("run", "in.jsonl", "out.jsonl", "-m", "tiny", "--metrics-file", "NAME/x"),
    "serve": ("serve", "-m", "NAME"),
    "serve, folder": ("serve", "-m", "tiny", "--api-key-file", "NAME"),
    "plan": ("plan", "-m", "NAME"),
    "compare": ("compare", "-m", "tiny", "--prompts", "NAME"),
    "tune": ("tune", "-m", "NAME"),
    "top": ("top", "NAME"),
    "rm": ("rm", "NAME"),
    "pull": ("pull", "NAME"),
    "synth": ("synth", "NAME", "NAME/x.gguf"),
    "a command": ("NAME",),
    "an option": ("generate", "--NAME"),
    "one too many": ("plan", "a", "b", "NAME"),
}


@pytest.mark.parametrize(
    ("command", "kind"),
    [*itertools.product(COMMANDS, ("escape", "turned", "NUL", "half")), ("generate", "title")],
)
def test_a_command_refuses_the_name_and_shows_it_escaped(command, kind, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in.jsonl").write_text('{"prompt": "a"}\n')
    name, shown = NAMES[kind]
    monkeypatch.setattr(sys, "argv", ["llamabatch", *(part.replace("NAME", name) for part in COMMANDS[command])])
    monkeypatch.setattr(interrupts, "guard", lambda: None)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    out, told = capsys.readouterr()
    assert ended.value.code == 2, told
    assert all(each.isprintable() or each == "\n" for each in out + told), ascii(told)
    last = "\\" + shown.rpartition("\\")[2]  # a message leaves out the middle of a long name
    assert last in told.replace("\\\\", "\\") or "..." in told, told
    assert "Traceback" not in told


def test_errors_are_visible_and_tables_keep_their_lines():
    assert str(MemoryPlanError("a\n\tb\x1b[2J")) == "a\n\tb\\x1b[2J"
    assert visible("ä€😀\u200d\u3000\xa0") == "ä€😀\u200d\u3000\xa0"  # characters of ordinary texts
    assert visible(visible("\x1b")) == r"\x1b"
    assert paths.shown("/x/\x1b[2J") == r"/x/\x1b[2J"
    with pytest.raises(ConfigError, match=r"'a.x00b' is no path: it has a NUL"):
        paths.absolute("a\0b")
    assert isinstance(ConfigError("x"), LlamaBatchError)
