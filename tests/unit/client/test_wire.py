import math
import socket
import threading
from array import array
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamabatch.client.wire import (
    Wire,
    pack_config,
    pack_output,
    pack_request,
    pack_state,
    unpack_config,
    unpack_output,
    unpack_request,
    unpack_state,
)
from llamabatch.config import EngineConfig
from llamabatch.engine.engine_state import EngineState
from llamabatch.errors import EngineError
from llamabatch.request.logprobs import FlatLogprobs, Logprob
from llamabatch.request.outputs import CompletionOutput, FinishReason, RequestOutput, SequenceOutput, Timings
from llamabatch.request.request import Request
from llamabatch.request.sampling_params import SamplingParams
from llamabatch.scheduler.slot_state import SlotState, WaitingState


def across(*message):
    left, right = socket.socketpair()
    sender, receiver = Wire(left), Wire(right)
    thread = threading.Thread(target=sender.send, args=message)
    thread.start()
    received = receiver.receive()
    thread.join()
    sender.close()
    assert receiver.receive() is None
    receiver.close()
    return received


@pytest.mark.parametrize(
    "given",
    [
        {},  # the random seed is sent, so that a retry draws the same tokens
        {"params": SamplingParams(repetition_penalty=1.1, presence_penalty=-1.0, frequency_penalty=0.5)},
        {"params": SamplingParams(logit_bias={7: -1.5, 3: 2.0}, allowed_token_ids=[5, 1])},
        {"params": SamplingParams(stop="\ud800")},
        {"params": SamplingParams(structured_outputs={"json": {"type": "integer"}})},
        {"params": SamplingParams(structured_outputs={"choice": ["a", "\u00e9"]})},
        {"params": SamplingParams(structured_outputs={"regex": "a+"})},
        {"params": SamplingParams(logprobs=-1, prompt_logprobs=0, logprob_token_ids=[9, 3])},
        {"adapters": (("a", 0.5), ("b", -1.0))},
        {"score_from": 2},
        {"embed": True},
        {"classify": True},
    ],
)
def test_a_request_crosses_whole(given):
    request = Request("r", (1, 2, 3), **given)
    crossed = unpack_request(across(pack_request(request))[0])
    assert (crossed, crossed.seed) == (request, request.seed)


@given(st.lists(st.integers(0, 2**31 - 1), max_size=50), st.characters(), st.integers(0, 2**64 - 1))
def test_requests_cross_unchanged_but_for_the_text_of_the_prompt(ids, stop, seed):
    request = Request("r", tuple(ids), SamplingParams(seed=seed, stop=[stop], temperature=0.5), "\ud800")
    assert unpack_request(across(pack_request(request))[0]) == replace(request, prompt=None)


def test_the_state_of_an_engine_crosses():
    slot = SlotState(3, "r", 1, 7, True, -2, 40, 20, 10, 2, 9, 42, 5, 1, ("poet",), 0.5, 0.25)
    state = EngineState((SlotState(0), slot), (WaitingState("w", 0, False, 0, 5, 0, 1.5, "slot"),), 3, 1, 512, 99)
    assert unpack_state(across(pack_state(state))[0]) == state


def test_embeddings_and_scores_cross_to_the_last_bit():
    done = CompletionOutput(0, "", (), FinishReason.STOP)
    whole = RequestOutput("r", None, (1, 2), (done,), embedding=array("f", [1.0, -0.0, 1e-45, 3.1]))
    output = SequenceOutput("r", (), "", whole)
    assert unpack_output(across(pack_output(output))[0], Request("r", (1, 2))) == output


def test_outputs_and_logprobs_cross_unchanged():
    params = SamplingParams(logprobs=-1, prompt_logprobs=0, logprob_token_ids=[9, 3])
    request = Request("r", (1, 2), params, prompt="é")
    assert request.params.logprob_ids == (3, 9)
    told = ({3: Logprob(-0.1, 1, "é"), 5: Logprob(-math.inf, 7, "\ufffd")}, {4: Logprob(-2.5, 2, "")})
    completion = CompletionOutput(0, "text€", (3, 4), FinishReason.STOP, "end", FlatLogprobs(told), -2.6)
    of_prompt = FlatLogprobs([None, {2: Logprob(-1.0, 1, "b")}])
    timings = Timings(0.1, 0.2, 0.3, (0.2, 0.3))
    whole = RequestOutput("r", "é", (1, 2), (completion,), None, timings, prompt_logprobs=of_prompt)
    for output in (
        SequenceOutput("r", (3,), "t"),
        SequenceOutput("r", (3,), "t", logprobs=FlatLogprobs(told[:1])),
        SequenceOutput("r", (4,), "", whole, 1, logprobs=FlatLogprobs(told[1:])),
    ):
        assert unpack_output(across(pack_output(output))[0], request) == output


def test_many_logprobs_cross_as_few_values():
    """The reader makes all objects of a message in one call, during which no other thread runs."""
    place = {i: Logprob(-0.5 * i, i, f"t{i}") for i in range(1, 1025)}
    completion = CompletionOutput(0, "", (1,) * 50, FinishReason.LENGTH, logprobs=FlatLogprobs([place] * 50))
    output = SequenceOutput("r", (), "", RequestOutput("r", None, (1,), (completion,)))

    def count(value):
        return 1 + sum(map(count, value)) if isinstance(value, tuple) else 1

    assert count(across(pack_output(output))) < 200


def test_configs_cross_unchanged_and_overrides_keep_the_types_of_their_values():
    values = (("a", True), ("b", 1), ("c", 1.0), ("d", "1"))
    config = EngineConfig(
        "tiny", n_slots=3, tensor_split=(1.0, 2.0), adapters=(("a", "a.gguf"),), kv_overrides=values,
        override_tensor={"ffn": "CPU"}, rope_freq_scale=0.5,
    )  # fmt: skip
    crossed = unpack_config(across(pack_config(config))[0])
    assert crossed == config
    assert [type(value) for _, value in crossed.kv_overrides] == [bool, int, float, str]


def test_large_messages_cross():
    assert across("x" * 5_000_000) == ("x" * 5_000_000,)


def test_a_damaged_length_is_refused():
    left, right = socket.socketpair()
    left.sendall(b"\xff\xff\xff\xff")
    with pytest.raises(EngineError, match="announced 4294967295 bytes"):
        Wire(right).receive()
    left.close()
    right.close()


def test_messages_that_come_in_one_piece_or_byte_by_byte_are_those_that_were_sent():
    messages = [("a", 1), ("b", "x" * 100_000), ("c",), ("d", (1, 2))]
    stream = b"".join(Wire.pack(*message) for message in messages)
    for size in (len(stream), 7, 3):
        left, right = socket.socketpair()
        receiver = Wire(right)

        def send(left=left, size=size):
            for start in range(0, len(stream), size):
                left.sendall(stream[start : start + size])
            left.close()

        thread = threading.Thread(target=send)
        thread.start()
        assert [tuple(receiver.receive()) for _ in messages] == messages
        assert receiver.receive() is None
        thread.join()
        receiver.close()


def test_a_stream_that_ends_within_a_message_has_ended():
    for cut in (2, 5):
        left, right = socket.socketpair()
        left.sendall(Wire.pack("a", 1) + Wire.pack("b", 2)[:cut])
        left.close()
        receiver = Wire(right)
        assert tuple(receiver.receive()) == ("a", 1)
        assert receiver.receive() is None
        receiver.close()


def test_a_large_message_is_received_in_calls_of_a_bounded_size():
    class Counted:
        def __init__(self, data):
            self.data, self.sizes = data, []

        def recv(self, size):
            self.sizes.append(size)
            part, self.data = self.data[: min(size, 200_000)], self.data[min(size, 200_000) :]
            return part

    counted = Counted(Wire.pack("a", "x" * 5_000_000))
    assert tuple(Wire(counted).receive()) == ("a", "x" * 5_000_000)
    assert max(counted.sizes) == 2**20
    assert min(counted.sizes) == 2**16
