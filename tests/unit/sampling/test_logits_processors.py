"""Logits processors: their arguments, their results, and their errors."""

import re

import numpy as np
import pytest

from llamabatch.client.wire import pack_request
from llamabatch.errors import SamplingError
from llamabatch.request.request import Request
from llamabatch.request.sampling_params import SamplingParams
from llamabatch.sampling.sampler import NO_TOKEN, SamplerState, sample_rows

pytestmark = pytest.mark.usefixtures("implementation")


def draw_with(*processors, **params):
    draw = SamplerState(SamplingParams(**{"temperature": 0} | params, logits_processors=processors), 1, index=2)
    draw.token_ids = [9, 9, 9, 4, 5]
    return draw


def test_they_get_the_output_and_a_row_of_their_own():
    seen = []

    def first(token_ids, logits):
        seen.append((token_ids, logits.dtype, logits.shape))
        token_ids.clear()
        logits[:] = 0
        logits[3] = 1
        return logits

    def second(token_ids, logits):
        seen.append((list(token_ids), logits[3]))
        return np.roll(logits.astype(np.float64), 1)

    rows = np.random.default_rng(0).normal(0, 1, (2, 20)).astype(np.float32)
    rows.flags.writeable = False
    assert sample_rows(rows, [draw_with(first, second), SamplerState(SamplingParams(temperature=0), 1)]) == [
        4,
        rows[1].argmax(),
    ]
    assert seen == [([], np.float32, (20,)), ([4, 5], 1.0)]  # the first processor cleared only its own list
    assert draw_with(first).token_ids == [9, 9, 9, 4, 5]


def test_they_come_before_all_else():
    row = np.zeros((1, 8), np.float32)
    assert sample_rows(row, [draw_with(lambda _, x: x + np.arange(8), logit_bias={2: 100})]) == [2]
    assert sample_rows(row, [draw_with(lambda _, x: x + np.arange(8), allowed_token_ids=[1, 5])]) == [5]
    assert sample_rows(row, [draw_with(lambda _, x: list(range(8)))]) == [7]


def fails(_, logits):
    raise KeyError("no such thing")


def leaves(_, logits):
    raise SystemExit


@pytest.mark.parametrize(
    ("process", "message"),
    [
        (fails, "fails raised KeyError: .*no such thing"),
        (leaves, "leaves raised SystemExit"),
        (lambda _, x: None, "gave None; give numbers of shape"),
        (lambda _, x: x[:3], r"gave an array of shape \(3,\), float32; give numbers of shape \(8,\)"),
        (lambda _, x: x[None], r"an array of shape \(1, 8\)"),
        (lambda _, x: ["a"] * 8, "an array of shape"),
        (lambda _, x: x * np.nan, "gave NaN"),
        (lambda _, x: x.astype(np.float64) + 1e300, "gave NaN or .inf"),
        (lambda x: x, "raised TypeError"),
    ],
)
def test_what_one_does_wrong_is_the_error_of_its_own_row(process, message):
    rows = np.zeros((4, 8), np.float32)
    rows[:, 6] = 50
    plain = [SamplerState(SamplingParams(temperature=temperature), 1) for temperature in (0, 1.0)]
    bad = [draw_with(process, temperature=temperature) for temperature in (0, 1.0)]
    assert sample_rows(rows, [plain[0], *bad, plain[1]]) == [6, NO_TOKEN, NO_TOKEN, 6]
    assert all(re.search("logits_processors: .*" + message, each.error) for each in bad)


def test_they_do_not_cross_to_a_child():
    with pytest.raises(SamplingError, match="logits_processors are Python functions and cannot go to a child"):
        pack_request(Request("r", (1,), SamplingParams(logits_processors=[fails])))
