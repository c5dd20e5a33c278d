"""Programs for vLLM's offline API run with compat.vllm: generate, chat, embed, score, structured outputs, LoRA."""

import dataclasses
import json

import numpy as np
import pytest

from llamabatch.compat import options
from llamabatch.compat.vllm import LLM, EngineArgs, LLMEngine, PoolingParams, SamplingParams
from llamabatch.compat.vllm.lora.request import LoRARequest
from llamabatch.compat.vllm.sampling_params import GuidedDecodingParams, RequestOutputKind, StructuredOutputsParams
from llamabatch.errors import EngineError
from tests.model.adapter_files import write_lora
from tests.model.encoder_files import write_encoder

PROMPTS = ["Once upon a time", "The capital of France is"]
OF_VLLM = {
    **{"tensor_parallel_size": 1, "dtype": "auto", "enforce_eager": True, "trust_remote_code": True},
    **{"gpu_memory_utilization": 0.9, "max_model_len": 512, "max_num_seqs": 8, "seed": 0},
}


@pytest.fixture(scope="module")
def llm():
    options._warned.clear()  # an earlier test of this process may have caused the same warning
    with pytest.warns(UserWarning, match="without effect here") as caught:
        made = LLM(model="tiny", **OF_VLLM)
    assert len(caught) == 1
    yield made
    made.close()


def test_generate(llm):
    outputs = llm.generate(PROMPTS, SamplingParams(temperature=0.8, top_p=0.95))
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert output.prompt == prompt
        assert output.finished
        assert output.outputs[0].text
        assert 1 <= len(output.outputs[0].token_ids) <= 16
    again = llm.generate(PROMPTS, SamplingParams(temperature=0.0, logprobs=2, prompt_logprobs=0, n=1))
    completion = again[1].outputs[0]
    assert "Paris" in completion.text
    for token_id, of_token in zip(completion.token_ids, completion.logprobs, strict=True):
        assert of_token[token_id].rank == 1
        assert of_token[token_id].logprob <= 0
    total = sum(each[i].logprob for i, each in zip(completion.token_ids, completion.logprobs, strict=True))
    assert completion.cumulative_logprob == pytest.approx(total)
    assert again[1].prompt_logprobs[0] is None
    assert (completion.finish_reason, completion.stop_reason) == ("stop", None)


def test_chat(llm):
    conversation = [{"role": "user", "content": "What is the capital of France?"}]
    params = llm.get_default_sampling_params()
    params.temperature, params.max_tokens = 0.0, 8
    [output] = llm.chat(conversation, params, use_tqdm=False)
    assert output.outputs[0].text == "Paris"
    assert [each.outputs[0].text for each in llm.chat([conversation] * 10, params, use_tqdm=True)] == ["Paris"] * 10
    tokenizer = llm.get_tokenizer()
    text = tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
    [by_text] = llm.generate(text, params)
    [by_ids] = llm.generate(
        {"prompt_token_ids": tokenizer.apply_chat_template(conversation, add_generation_prompt=True)}
    )
    assert by_text.prompt_token_ids == by_ids.prompt_token_ids == output.prompt_token_ids
    assert by_text.outputs[0].text == "Paris"
    assert tokenizer.decode(output.outputs[0].token_ids, skip_special_tokens=True) == "Paris"
    assert tokenizer.decode(output.outputs[0].token_ids).startswith("Paris<|")


def test_structured_outputs(llm):
    def answer(params):
        sampling = SamplingParams(structured_outputs=params, max_tokens=64, temperature=0.0)
        return llm.generate("The capital of France is ", sampling)[0].outputs[0].text

    assert answer(StructuredOutputsParams(choice=["Paris", "Rome"])) in ("Paris", "Rome")
    assert answer(StructuredOutputsParams(regex=r"[a-z]{1,8}@[a-z]{1,8}\.com")).endswith(".com")
    schema = {"type": "object", "properties": {"year": {"type": "integer", "maximum": 99}}, "required": ["year"]}
    assert json.loads(answer(StructuredOutputsParams(json=schema, disable_additional_properties=True))).keys() == {
        "year"
    }
    grammar = 'root ::= "SELECT " column\ncolumn ::= "col_1" | "col_2"'
    assert answer(StructuredOutputsParams(grammar=grammar)).startswith("SELECT col_")
    guided = SamplingParams(guided_decoding=GuidedDecodingParams(choice=["no", "yes"]), temperature=0.0)
    assert llm.generate("Is it?", guided)[0].outputs[0].text in ("no", "yes")


def test_the_loop_of_an_engine(tmp_path):
    """Requests are added while others run, as in vLLM's LoRA example."""
    red = LoRARequest("red", 1, str(write_lora(tmp_path / "red.gguf", seed=1)))
    args = EngineArgs(model="tiny", enable_lora=True, n_slots=4, seed=0)
    assert dataclasses.asdict(args) == {"model": "tiny", "enable_lora": True, "n_slots": 4, "seed": 0}
    prompt, short = PROMPTS[0], {"temperature": 0.0, "max_tokens": 12}
    waiting = [
        ("plain", SamplingParams(**short), None),
        ("red", SamplingParams(**short, n=2), red),
        ("delta", SamplingParams(**short, output_kind=RequestOutputKind.DELTA), None),
        ("last", SamplingParams(**short, output_kind=RequestOutputKind.FINAL_ONLY), None),
    ]
    seen = {}
    with LLMEngine.from_engine_args(args) as engine:
        engine.add_request("aborted", prompt, SamplingParams(max_tokens=400, ignore_eos=True))
        with pytest.raises(ValueError, match="is the id of a running request"):
            engine.add_request("aborted", prompt, SamplingParams())
        engine.abort_request(["aborted", "unknown"])
        assert (engine.get_num_unfinished_requests(), engine.has_unfinished_requests()) == (0, False)
        while waiting or engine.has_unfinished_requests():
            if waiting:
                request_id, params, lora = waiting.pop(0)
                assert engine.add_request(request_id, prompt, params, lora_request=lora) == request_id
            for output in engine.step():
                seen.setdefault(output.request_id, []).append(output)
        assert engine.step() == []
        whole = engine.llm.generate([prompt] * 2, SamplingParams(**short), lora_request=[None, red])
        with pytest.raises(AttributeError, match="collective_rpc is not there"):
            engine.collective_rpc("x")
    plain, with_red = (each.outputs[0].text for each in whole)
    last = {name: outputs[-1] for name, outputs in seen.items()}
    texts = [output.outputs[0].text for output in seen["plain"]]
    assert last["plain"].finished
    assert texts[-1] == plain
    assert all(plain.startswith(text) for text in texts)
    assert [each.text for each in last["red"].outputs] == [with_red] * 2
    assert last["red"].lora_request == red
    assert "".join(output.outputs[0].text for output in seen["delta"]) == plain
    assert last["delta"].outputs[0].finish_reason == "length"
    assert [output.finished for output in seen["last"]] == [True]
    assert "aborted" not in seen


def test_an_error_of_one_request_in_the_loop():
    def broken(token_ids, logits):
        raise RuntimeError("broken processor")

    with LLMEngine(LLM("tiny", max_num_seqs=4)) as engine:
        last = SamplingParams(max_tokens=4, ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY)
        for name, processors in (("good", None), ("bad", [broken]), ("worse", [broken]), ("fine", None)):
            engine.add_request(name, PROMPTS[0], dataclasses.replace(last, logits_processors=processors))
        finished, errors = [], []
        while engine.has_unfinished_requests():
            try:
                finished += [output.request_id for output in engine.step()]
            except EngineError as error:
                errors.append(str(error))
        assert sorted(finished) == ["fine", "good"]
        assert len(errors) == 2
        assert all("broken processor" in error for error in errors)
        assert engine.step() == []


def test_lora(llm, tmp_path):
    path = write_lora(tmp_path / "red.gguf", seed=1)
    request = LoRARequest("red", 1, str(path))
    params = SamplingParams(temperature=0.0, max_tokens=12)
    plain, red = llm.generate([PROMPTS[0]] * 2, params, lora_request=[None, request])
    assert plain.outputs[0].token_ids != red.outputs[0].token_ids
    assert (plain.lora_request, red.lora_request) == (None, request)
    [again] = llm.generate(PROMPTS[0], params, lora_request=request)
    assert again.outputs[0].token_ids == red.outputs[0].token_ids
    assert llm.llm.adapters == ["red"]


def test_embed(tmp_path):
    with LLM(model=str(write_encoder("bert", tmp_path / "bert.gguf")), runner="pooling", seed=None) as llm:
        outputs = llm.embed(["the cat sat", "the dog runs"])
        vectors = np.array([each.outputs.embedding for each in outputs])
        assert np.linalg.norm(vectors, axis=1) == pytest.approx(1, abs=1e-5)
        [raw] = llm.embed("the cat sat", pooling_params=PoolingParams(normalize=False))
        raw = np.array(raw.outputs.embedding)
        assert raw / np.linalg.norm(raw) == pytest.approx(vectors[0], abs=1e-5)
        scores = [each.outputs.score for each in llm.score("the cat sat", ["the cat sat", "the dog runs"])]
        assert scores == pytest.approx([1, float(vectors[0] @ vectors[1])], abs=1e-5)
