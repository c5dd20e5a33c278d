"""FakeLLM and FakeAsyncLLM: LLM and AsyncLLM without a model, for tests of programs. This package imports `entrypoints`
and the packages below it.

::

    llm = FakeLLM(answers={"What is 2 + 2?": "4"})
    assert llm.generate("What is 2 + 2?")[0].text == "4"
    assert [request.prompt for request in llm.requests] == ["What is 2 + 2?"]
"""

from llamabatch.testing.answers import FakeRequest as FakeRequest
from llamabatch.testing.fake_llm import FakeAsyncLLM as FakeAsyncLLM
from llamabatch.testing.fake_llm import FakeLLM as FakeLLM
