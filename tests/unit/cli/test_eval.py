"""llamabatch eval: what it changes in lm_eval while a task runs."""

from types import SimpleNamespace

from llamabatch.cli.eval import _replaced


def test_what_another_version_of_lm_eval_does_not_have_is_left_out():
    module = SimpleNamespace(bar=1)
    with _replaced((module, "bar", 2), (module, "gone", 3)):
        assert vars(module) == {"bar": 2}
    assert vars(module) == {"bar": 1}
