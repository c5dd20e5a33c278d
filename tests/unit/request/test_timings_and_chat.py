import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamabatch.engine.stats import EngineStats, percentile
from llamabatch.errors import ConfigError, PromptError
from llamabatch.request.chat import render
from llamabatch.request.outputs import Timings

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1), st.floats(0, 100))
def test_percentiles_are_numpys(values, percent):
    assert percentile(values, percent) == pytest.approx(float(np.percentile(values, percent)), abs=1e-6)


def test_percentile_of_nothing():
    assert percentile([], 50) is None


def test_derived_figures():
    stats = EngineStats(decode_calls=4, decode_rows=10, decode_passes=6) + EngineStats(decode_calls=1, decode_rows=5)
    assert stats.rows_per_step == 3
    assert stats.passes_per_step == pytest.approx(6 / 5)
    assert EngineStats().rows_per_step == 0
    timings = Timings(token_times_s=(1.0, 1.5, 2.5))
    assert timings.inter_token_s == (0.5, 1.0)
    assert timings.generation_tps == pytest.approx(2 / 1.5)
    assert Timings(token_times_s=(1.0,)).generation_tps is None


def test_chatml():
    text = render(CHATML, [{"role": "user", "content": "hi"}], "", "")
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    "conversation", [[], "hi", [{"role": "user"}], [{"content": "x"}], ["x"], {"role": "user", "content": "x"}, None, 5]
)
def test_what_is_no_conversation_is_refused(conversation):
    with pytest.raises(PromptError):
        render(CHATML, conversation, "", "")


def test_templates_are_sandboxed_and_may_refuse():
    message = [{"role": "user", "content": "x"}]
    with pytest.raises(PromptError, match="refuses"):
        render("{{ ''.__class__.__mro__[1].__subclasses__() }}", message, "", "")
    with pytest.raises(PromptError, match="only users"):
        render("{{ raise_exception('only users') }}", message, "", "")
    with pytest.raises(ConfigError, match="cannot be compiled"):
        render("{% if %}", message, "", "")
    with pytest.raises(ConfigError, match="no chat template"):
        render(None, message, "", "")
