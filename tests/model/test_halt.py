"""A running llama_decode stops when its engine must end. Its requests end as all others do."""

import pytest

from llamabatch import LLM, SamplingParams
from llamabatch.config import EngineConfig
from llamabatch.engine.engine import Engine
from llamabatch.errors import EngineClosedError
from llamabatch.request.request import Request
from tests.clients import innermost

LONG = SamplingParams(max_tokens=900, ignore_eos=True)


@pytest.mark.parametrize("options", [{}, {"speculate": "lookup"}, {"speculate": "draft", "draft_model": "tiny"}])
def test_a_step_ends_with_an_error_that_reaches_no_request(options):
    with Engine(EngineConfig("tiny", n_slots=2, **options)) as engine:
        for name in "ab":
            engine.add(Request(name, tuple(range(20, 60)), LONG))
        engine.step()
        assert len(engine.step()) == 2
        engine.model.halt.now()
        for _ in range(2):
            with pytest.raises(EngineClosedError, match="while it computed"):
                engine.step()
        ended = engine.abort("a")
        assert (ended.finished.finish_reason, ended.finished.error) == ("abort", None)
        assert ended.finished.token_ids


@pytest.mark.parametrize("instances", [1, 2])
def test_requests_end_with_what_they_have_and_nothing_is_logged(instances, caplog):
    with LLM("tiny", n_slots=2, strategy="batched", instances=instances) as llm:
        pieces = llm.stream(["a"] * 9, LONG)
        seen = [next(pieces) for _ in range(4)]
        innermost(llm).model.halt.now()
        seen += pieces
        ended = [piece.finished for piece in seen if piece.finished is not None]
        assert [(output.finish_reason, output.error) for output in ended] == [("abort", None)] * 9
        assert {len(output.token_ids) > 0 for output in ended} == {True, False}
        with pytest.raises(EngineClosedError):
            llm.generate("a")
    assert not caplog.records


def test_texts_to_embed_end_too(caplog):
    with LLM("tiny", n_slots=2, strategy="batched", instances=1) as llm:
        llm.embed("x")
        innermost(llm).model.halt.now()
        failed = llm.embed(["x", "y"], return_errors=True)
        assert {str(error) for error in failed} <= {"the engine is closed", "it was aborted"}
    assert not caplog.records
