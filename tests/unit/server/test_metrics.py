"""The text of /metrics: three families of names, valid for Prometheus, with the engine's figures."""

import pytest
from prometheus_client.parser import text_string_to_metric_families

from llamabatch.engine.engine_state import EngineState
from llamabatch.engine.stats import EngineStats
from llamabatch.monitor.host import MachineSample
from llamabatch.scheduler.slot_state import SlotState
from llamabatch.server.monitor.metrics import Metrics
from tests.unit.fakes import times

STATS = EngineStats(
    running=3,
    waiting=2,
    free_slots=1,
    kv_cells=100,
    kv_cells_used=25,
    submitted=20,
    finished_stop=6,
    finished_length=4,
    prompt_tokens=70,
    computed_tokens=50,
    prefix_tokens=7,
    shared_tokens=3,
    embed_tokens=11,
    generated_tokens=400,
    decode_calls=10,
    decode_rows=30,
    prefill_calls=4,
    embed_passes=1,
    longest=321,
    ttft_s=times(0.0004, 0.03, 0.03),
    inter_token_s=times(0.012, 0.012, 700),
    queue_s=times(0.3),
    e2e_s=times(2.0, 9000),
    prefill_s=times(0.5, 1.5),
    decode_s=times(4.0, 4.0),
    prompt_lengths=times(30, 40),
    output_lengths=times(100, 102),
)

# Names that test_metrics.py of llama.cpp's server looks for.
LLAMA_COUNTERS = (
    *("prompt_tokens_total", "prompt_tokens_cached_total", "prompt_seconds_total", "tokens_predicted_total"),
    *("tokens_predicted_seconds_total", "n_decode_total", "n_tokens_max", "spec_decode_num_draft_tokens_total"),
    *("spec_decode_num_accepted_tokens_total", "spec_decode_num_drafts_total"),
)
LLAMA_GAUGES = (
    *("prompt_tokens_seconds", "predicted_tokens_seconds", "requests_processing", "requests_deferred"),
    "n_busy_slots_per_decode",
)
# Names that vLLM's dashboards show (its docs, "Production Metrics").
VLLM = (
    *("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "prefix_cache_queries_total"),
    *("prefix_cache_hits_total", "num_preemptions_total", "prompt_tokens_total", "generation_tokens_total"),
    *("request_success_total", "time_to_first_token_seconds_bucket", "inter_token_latency_seconds_bucket"),
    *("time_per_output_token_seconds_bucket", "e2e_request_latency_seconds_bucket"),
    *("request_queue_time_seconds_bucket", "request_prefill_time_seconds_bucket"),
    *("request_decode_time_seconds_bucket", "request_prompt_tokens_bucket", "request_generation_tokens_bucket"),
    "lora_requests_info",
)


def families(**options):
    text = Metrics("m").text(STATS, **options).decode()
    found = list(text_string_to_metric_families(text))
    names = [family.name for family in found]
    assert len(set(names)) == len(names), "a family stands twice"
    return text, {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value for f in found for sample in f.samples
    }


def value(samples, name, **labels):
    return samples[(name, tuple(sorted(labels.items())))]


def test_the_three_families_of_names_are_there():
    text, samples = families()
    names = {name for name, _ in samples}
    lines = {line.split()[0] for line in text.splitlines() if not line.startswith("#")}
    assert {f"llamacpp:{name}" for name in (*LLAMA_COUNTERS, *LLAMA_GAUGES)} <= lines
    assert {f"vllm:{name}" for name in VLLM} <= names
    assert {name.replace("vllm:", "llamabatch:") for name in names if name.startswith("vllm:num_requests")} <= names
    for name in LLAMA_COUNTERS:
        assert f"# TYPE llamacpp:{name} counter\n" in text
        assert f"# HELP llamacpp:{name} " in text
    for name in LLAMA_GAUGES:
        assert f"# TYPE llamacpp:{name} gauge\n" in text
    assert text.endswith("\n")


def test_figures_are_those_of_the_engine():
    text, samples = families(n_open=5, ready=False)
    own, vllm = {"model_name": "m"}, {"model_name": "m", "engine": "0"}
    assert value(samples, "vllm:num_requests_running", **vllm) == 3
    assert value(samples, "vllm:num_requests_waiting", **vllm) == 2
    assert value(samples, "vllm:request_success_total", finished_reason="stop", **vllm) == 6
    assert value(samples, "vllm:time_to_first_token_seconds_bucket", le="0.04", **vllm) == 3
    assert value(samples, "vllm:request_prefill_time_seconds_sum", **vllm) == 2.0
    assert value(samples, "vllm:request_generation_tokens_bucket", le="100.0", **vllm) == 1
    assert value(samples, "vllm:request_generation_tokens_sum", **vllm) == 202
    assert value(samples, "llamabatch:num_open_requests", **own) == 5
    assert value(samples, "llamabatch:ready", **own) == 0
    assert value(samples, "llamacpp:prompt_tokens_total") == 61
    assert value(samples, "llamacpp:prompt_tokens_cached_total") == 10
    assert value(samples, "llamacpp:prompt_seconds_total") == 2.0
    assert value(samples, "llamacpp:tokens_predicted_seconds_total") == 8.0
    assert value(samples, "llamacpp:prompt_tokens_seconds") == 25.0
    assert value(samples, "llamacpp:predicted_tokens_seconds") == 25.0
    assert value(samples, "llamacpp:n_decode_total") == 15
    assert value(samples, "llamacpp:n_busy_slots_per_decode") == 3.0
    assert "\nllamacpp:n_tokens_max 321.0\n" in text


def test_adapters_and_the_machine():
    slots = (SlotState(0, "a", adapters=("poet",)), SlotState(1, "b", adapters=("cook", "poet")), SlotState(2))
    _, samples = families(states=[EngineState(slots)], machine=MachineSample(cpu_percent=150.0, memory_bytes=7))
    [labels] = [dict(labels) for name, labels in samples if name == "vllm:lora_requests_info"]
    assert labels["running_lora_adapters"] == "cook,poet"
    assert value(samples, "llamabatch:process_cpu_usage_cores", model_name="m") == 1.5


@pytest.mark.parametrize("model", ['quo"ted', "back\\slash", "two\nlines"])
def test_any_name_of_a_model_keeps_the_text_valid(model):
    found = text_string_to_metric_families(Metrics(model).text(EngineStats()).decode())
    assert {sample.labels.get("model_name", model) for family in found for sample in family.samples} == {model}


def test_an_engine_that_has_done_nothing_has_figures():
    text = Metrics("m").text(EngineStats()).decode()
    assert "nan" not in text.lower().replace("+inf", "")
    assert "llamacpp:predicted_tokens_seconds 0.0" in text
