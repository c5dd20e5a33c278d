"""The pooling that a file asks for, and its classification head."""

import pytest

from llamabatch.gguf.pooling import declared_pooling, default_pooling, head_width, lacks_dense_layer
from llamabatch.gguf.reader import TensorInfo

HEAD = TensorInfo("cls.output.weight", (64, 3), 0, 0, 768)
ONE = TensorInfo("cls.output.weight", (64,), 0, 0, 256)
DENSE = TensorInfo("cls.weight", (64, 64), 0, 0, 16384)
DENSE_ONE = TensorInfo("cls.weight", (64, 1), 0, 0, 256)
ENCODER = {"general.architecture": "bert", "bert.attention.causal": "false"}


@pytest.mark.parametrize(
    ("metadata", "tensors", "pooling"),
    [
        ({}, [], "mean"),
        ({"general.architecture": "llama"}, [], "mean"),
        ({"general.architecture": "llama", "llama.pooling_type": "3"}, [], "last"),
        ({"general.architecture": "llama", "other.pooling_type": "3"}, [], "mean"),
        (ENCODER, [], "mean"),
        (ENCODER, [DENSE], "mean"),
        (ENCODER, [DENSE, HEAD], "rank"),
        (ENCODER, [DENSE_ONE], "rank"),
        (ENCODER | {"bert.attention.causal": "true"}, [HEAD], "mean"),
        (ENCODER | {"bert.pooling_type": "0"}, [], "mean"),  # 0 is "none": the program decides
        (ENCODER | {"bert.pooling_type": "0"}, [HEAD], "rank"),
        (ENCODER | {"bert.pooling_type": "1"}, [HEAD], "mean"),
        (ENCODER | {"bert.pooling_type": "2"}, [], "cls"),
        (ENCODER | {"bert.pooling_type": "4"}, [], "rank"),
        (ENCODER | {"bert.pooling_type": "77"}, [], "mean"),
    ],
)
def test_the_default_of_a_file(metadata, tensors, pooling):
    assert default_pooling(metadata, tensors) == pooling
    declared = declared_pooling(metadata)
    assert declared is None or declared == pooling


def test_tensors_are_read_for_encoders_alone():
    def unread():
        raise AssertionError("read")
        yield

    assert default_pooling({"general.architecture": "llama"}, unread()) == "mean"
    with pytest.raises(AssertionError, match="read"):
        default_pooling(ENCODER, unread())


def test_outputs_of_a_head():
    assert [head_width(given) for given in ([], [DENSE], [DENSE_ONE], [ONE], [DENSE, HEAD])] == [0, 0, 1, 1, 3]


def test_a_head_without_its_dense_layer():
    assert lacks_dense_layer(ENCODER, [HEAD])
    assert not lacks_dense_layer(ENCODER, [HEAD, DENSE])
    assert not lacks_dense_layer(ENCODER, [DENSE_ONE])
    assert not lacks_dense_layer({"general.architecture": "qwen3"}, [HEAD])
