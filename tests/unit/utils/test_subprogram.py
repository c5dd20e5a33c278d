"""Child programs of a process that is no Python interpreter itself."""

import sys

import pytest

from llamabatch.client import spawn
from llamabatch.config import EngineConfig
from llamabatch.errors import EngineError, SetupError
from llamabatch.sampling import grammar_compiler
from llamabatch.utils import subprogram


@pytest.fixture(params=["frozen", "embedded"])
def no_interpreter(request, monkeypatch):
    if request.param == "frozen":
        monkeypatch.setattr(sys, "frozen", True, raising=False)
    else:
        monkeypatch.setattr(sys, "executable", "")

    def started(*arguments, **options):
        raise AssertionError(f"started {arguments}")

    monkeypatch.setattr(subprogram.subprocess, "Popen", started)


def test_a_frozen_program_is_never_started_again_as_its_own_child(no_interpreter):
    with pytest.raises(OSError, match="a child process needs a Python interpreter"):
        subprogram.run_program("llamabatch.llama.probe", timeout_s=5)


def test_isolate_says_so(no_interpreter):
    with pytest.raises(SetupError, match=r"isolate=True and several engines .* needs a Python interpreter"):
        spawn.Child(EngineConfig(model="tiny"), {}, spawn.WORKER, None)


def test_a_grammar_that_cannot_be_tried_out_is_an_error_of_its_request(no_interpreter):
    with pytest.raises(EngineError, match=r"structured_outputs: .* needs a Python interpreter"):
        grammar_compiler.Trial([])._start()
