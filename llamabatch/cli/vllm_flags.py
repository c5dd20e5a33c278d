"""The flags of `vllm serve` and their meaning in `llamabatch serve`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

import click

from llamabatch.cli.flag_rows import ANY, MANY, NO_MEDIA, NO_TOOLS, VLLM, Args, Row, as_option
from llamabatch.utils.checks import show


def _json_list(option: str) -> Callable[[str], Args]:
    def args(value: str) -> Args:
        try:
            found = json.loads(value)
        except ValueError:
            found = value.split(",")
        return option, ",".join(str(each) for each in (found if isinstance(found, list) else [found]))

    return args


def _speculative(value: str) -> Args:
    """vLLM's JSON: {"method": "ngram", "num_speculative_tokens": 5}, or with "model"."""
    try:
        given = json.loads(value)
        method, n_draft = given.get("method"), given.get("num_speculative_tokens")
    except (ValueError, AttributeError):
        raise click.UsageError(f"{show(value)} is no JSON object") from None
    tail: Args = () if n_draft is None else ("--n-draft", str(n_draft))
    if method == "ngram":
        return "--speculate", "lookup", *tail
    if given.get("model") and method in (None, "draft_model"):
        return "--speculate", "draft", "--draft-model", str(given["model"]), *tail
    raise click.UsageError(f"the method {show(method)} cannot be honoured; give ngram, or draft_model with a model")


def _generation(value: str) -> Args:
    """vLLM's JSON of sampling defaults."""
    try:
        given = json.loads(value)
        return tuple(arg for name, each in given.items() for arg in ("-P", f"{name}={json.dumps(each)}"))
    except (ValueError, AttributeError):
        raise click.UsageError(f"{show(value)} is no JSON object") from None


_KV_TYPES = {"auto": None, "fp16": "f16", "float16": "f16", "bfloat16": "bf16", "bf16": "bf16"}


def _kv_dtype(value: str) -> Args:
    kind = _KV_TYPES.get(value, "")
    if kind == "":
        raise click.UsageError(f"{show(value)} is no type that llama.cpp has; give --type-k and --type-v, as q8_0")
    return () if kind is None else ("--type-k", kind, "--type-v", kind)


def _v(names: str, args: Callable[[str], Args] | None = None, **more: object) -> Row:
    return Row(VLLM, tuple(names.split()), **{"takes": 1, "args": args, **more})  # type: ignore[arg-type]


def _vs(names: str, **more: object) -> tuple[Row, ...]:
    """A row for each name, all with the same words."""
    return tuple(_v(name, **more) for name in names.split())  # type: ignore[arg-type]


def _vf(names: str, no: str = "", **more: object) -> Row:
    return Row(VLLM, tuple(names.split()), tuple(no.split()), **more)  # type: ignore[arg-type]


def _vfs(names: str, **more: object) -> tuple[Row, ...]:
    """A row for each switch, with its --no- form."""
    return tuple(_vf(name, f"--no-{name[2:]}", **more) for name in names.split())


_GGUF = "the GGUF file says it"
_HUB = "give the model as hf:owner/repo@revision:quant"
_KERNELS = "llama.cpp has kernels of its own"
_NO_GRAPHS = "there are no graphs to capture"
_ONE_HOST = "one machine computes; --strategy multi-instance runs several engines on it"
_OFFLOAD = "give --n-gpu-layers, or --override-tensor"
_TENSORS = "the file is mapped"
_NO_PLUGINS = "the server runs no code of others"
_NO_TRACES = "/metrics has the figures"
_ALWAYS = "it needs no flag"
_FAMILY = "the family is found from the chat template"
_LORA_ANY = "adapters of any rank and number need no flag"


def _counted(value: str) -> str:
    """vLLM's short forms of numbers: 8k is 8000, 8K is 8192."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmMgG])", value)
    if not match:
        return value
    base = 1000 if match[2].islower() else 1024
    return str(int(float(match[1]) * base ** ("kmg".index(match[2].lower()) + 1)))


def _methods(args: Args) -> Args:
    """CORS methods, with "*" as all that there are."""
    return args if args[1] != "*" else (args[0], "GET,POST,DELETE,OPTIONS")


def _modules(value: str) -> Args:
    """An adapter that requests name: name=path, or vLLM's JSON."""
    if not value.lstrip().startswith("{"):
        return "--lora-module", value
    try:
        given = json.loads(value)
        return "--lora-module", f"{given['name']}={given['path']}"
    except (ValueError, KeyError, TypeError):
        raise click.UsageError(f"{show(value)} is no JSON object with name and path") from None


VLLM_ROWS: tuple[Row, ...] = (
    # server
    _v("--uds", as_option("--uds")),
    _v("--uvicorn-log-level", lambda value: ("--log-level", {"critical": "error", "trace": "debug"}.get(value, value))),
    _vf(
        "--disable-uvicorn-access-log",
        "--no-disable-uvicorn-access-log",
    ),
    _v("--disable-access-log-for-endpoints", note="there is no access log unless --access-log is given", fine=ANY),
    _vf("--allow-credentials", "--no-allow-credentials", on=("--cors-credentials",), off=("--no-cors-credentials",)),
    _v("--allowed-origins", _json_list("--cors-origins")),
    _v("--allowed-methods", lambda v: _methods(_json_list("--cors-methods")(v))),
    _v("--allowed-headers", _json_list("--cors-headers")),
    _v("--api-key", as_option("--api-key"), takes=MANY),
    _v("--ssl-keyfile", as_option("--ssl-keyfile")),
    _v("--ssl-certfile", as_option("--ssl-certfile")),
    _v("--ssl-ca-certs", as_option("--ssl-ca-certs")),
    _v(
        "--ssl-cert-reqs",
        fine=("0", "2"),
        cure="--ssl-ca-certs asks clients for certificates; without it none is asked",
    ),
    _vf(
        "--enable-ssl-refresh",
        "--no-enable-ssl-refresh",
        cure="a new certificate is read at a restart; or let a proxy do TLS",
    ),
    _v("--ssl-ciphers", cure="the ciphers are those of Python's ssl; let a proxy do TLS where others are needed"),
    _v("--root-path", as_option("--root-path")),
    _v("--middleware", cure="mount llamabatch.server.app(...) in a program of your own"),
    _v("--served-model-name", as_option("--served-model-name"), takes=MANY),
    _v("--lora-modules", lambda value: _modules(value), takes=MANY),
    _v("--chat-template", as_option("--chat-template")),
    _vf("--trust-request-chat-template", on=("--trust-request-chat-template",)),
    _v("--default-chat-template-kwargs", as_option("--chat-template-kwargs")),
    _v("--chat-template-content-format", note="templates get what they can read: text or parts", fine=ANY),
    _v("--response-role", fine=("assistant",), cure="the role of an answer is assistant"),
    _v("--h11-max-incomplete-event-size", as_option("--max-header-bytes")),
    _v("--h11-max-header-count", as_option("--max-headers")),
    _v("--shutdown-timeout", as_option("--drain-s")),
    _v("--max-log-len", note="the log has no prompts", fine=ANY),
    _v("--log-config-file", cure="give --log-level, --log-file and --access-log"),
    _v("--tool-call-parser", note=_FAMILY, fine=ANY),
    _v("--reasoning-parser", note=_FAMILY, fine=ANY),
    _v("--tool-server", fine=("None",), cure=NO_TOOLS),
    _v("--config", cure="give the flags, or write them into the file that `llamabatch config --path` names"),
    _v("--api-server-count -asc", fine=("1",), cure="one process serves; several share a port with --reuse-port"),
    _v("--fingerprint-mode", fine=("full", "hash"), cure="system_fingerprint always stands for what a text depends on"),
    _v("--fingerprint-value", cure="system_fingerprint always stands for what a text depends on"),
    _vf("--enable-log-requests", "--no-enable-log-requests", on=("--access-log",)),
    _vf("--disable-log-requests", "--no-disable-log-requests"),
    _vf("--enable-log-outputs", "--no-enable-log-outputs", cure="the server never writes answers down"),
    _vf("--grpc", cure="the server speaks HTTP"),
    _vf("--headless", cure=_ONE_HOST),
    *_vfs(
        "--enable-auto-tool-choice --enable-prompt-tokens-details --enable-server-load-tracking "
        "--enable-tokenizer-info-endpoint --enable-request-id-headers --enable-offline-docs --enable-log-deltas "
        "--disable-fastapi-docs --log-error-stack --enable-flash-late-interaction --cohere-is-reasoning-model",
    ),
    *_vfs("--enable-per-request-metrics", note="timings stand in the answers of /completion"),
    *_vfs("--enable-force-include-usage", cure="clients ask with stream_options"),
    *_vfs("--return-tokens-as-token-ids", cure="clients ask with return_token_ids"),
    *_vfs("--exclude-tools-when-tool-choice-none", note="tool_choice none leaves the tools in the prompt"),
    *_vfs("--tokens-only", cure="all endpoints are served"),
    *_vs("--tool-parser-plugin --reasoning-parser-plugin --io-processor-plugin", cure=_NO_PLUGINS),
    *_vs("--logits-processors --logits-processor-pattern --worker-cls --worker-extension-cls", cure=_NO_PLUGINS),
    *_vs("--scheduler-cls --middleware-plugin", cure=_NO_PLUGINS),
    *_vs("--cohere-format", note=_FAMILY, fine=ANY),
    # model
    _v(
        "--tokenizer --hf-config-path --tokenizer-revision",
        fine=("None",),
        cure="the file has its tokenizer and its config",
    ),
    _v("--tokenizer-mode", fine=("auto", "hf", "slow"), cure="the file has its tokenizer"),
    _v("--revision --code-revision", fine=("None", "main"), cure=_HUB),
    _v(
        "--dtype",
        note="the file has its types",
        fine=("auto", "half", "float16", "bfloat16"),
        cure="choose another file, as hf:owner/repo:F32",
    ),
    _v("--quantization -q", fine=("None", "gguf"), cure="choose another file, as hf:owner/repo:Q4_K_M"),
    _v("--load-format", fine=("auto", "gguf"), cure="models are GGUF files"),
    _v("--download-dir", cure="set HF_HOME, or LLAMABATCH_CACHE"),
    _v("--max-model-len", lambda value: () if value in ("auto", "-1") else ("--n-ctx", _counted(value))),
    _v("--max-logprobs", note="any request may ask for 1024", fine=ANY),
    _v("--logprobs-mode", fine=("raw_logprobs",), cure="logprobs are those before temperature and cuts"),
    _v("--hf-overrides", cure="give --kv-overrides, or the rope options"),
    _v("--pooler-config", cure="give --pooling"),
    _v("--generation-config", note="defaults are those of the file, general.sampling", fine=ANY),
    _v("--override-generation-config", _generation),
    _v("--runner", fine=("auto", "generate", "pooling"), cure="any engine generates, and embeds"),
    _v("--convert", fine=("auto", "none", "embed"), cure="give --pooling"),
    _v("--task", fine=("auto", "generate", "embed"), cure="any engine generates, and embeds"),
    _v("--hf-token", lambda value: () if value in ("None", "True") else ("--hf-token", value)),
    _v("--rope-theta", as_option("--rope-freq-base")),
    _vf("--trust-remote-code", "--no-trust-remote-code", note="a GGUF file holds no code"),
    _vf("--enforce-eager", "--no-enforce-eager", note=_NO_GRAPHS),
    *_vs("--config-format --model-impl --override-attention-dtype --model-loader-extra-config", note=_GGUF, fine=ANY),
    *_vs("--ignore-patterns --pt-load-map-location --safetensors-load-strategy", note=_TENSORS, fine=ANY),
    *_vs("--safetensors-prefetch-num-threads --safetensors-prefetch-block-size", note=_TENSORS, fine=ANY),
    *_vs("--quantization-config --model-weights", cure=_GGUF),
    *_vs("--renderer-num-workers", args=as_option("--threads-http")),
    *_vfs("--skip-tokenizer-init", cure="the file has its tokenizer"),
    *_vfs("--enable-prompt-embeds", cure="a prompt is text or token ids"),
    *_vfs("--enable-sleep-mode --enable-cumem-allocator", note="the model stays loaded"),
    *_vfs("--use-tqdm-on-load --allow-deprecated-quantization --use-fp64-gumbel", note=_GGUF),
    *_vfs("--disable-sliding-window --disable-cascade-attn", note=_KERNELS),
    *_vfs("--enable-return-routed-experts", cure="answers do not name experts"),
    # scheduler and cache
    _v("--max-num-seqs", as_option("--n-slots")),
    _v("--max-num-batched-tokens", lambda value: ("--n-batch", _counted(value))),
    _v("--long-prefill-token-threshold", as_option("--prefill-budget", ("0",))),
    _v("--kv-cache-dtype", _kv_dtype),
    _v(
        "--gpu-memory-utilization",
        note="half of the free memory is used; --n-slots and --n-ctx say how much",
        fine=ANY,
    ),
    _v("--kv-cache-memory-bytes", cure="give --n-slots and --n-ctx, or --kv unified and --kv-cells"),
    _v(
        "--swap-space --block-size --num-gpu-blocks-override",
        note="the KV cache has no blocks and is never swapped",
        fine=ANY,
    ),
    _v(
        "--scheduling-policy",
        note="priorities of requests need no flag",
        fine=("fcfs", "priority"),
        cure="give fcfs or priority",
    ),
    _v("--stream-interval", note="pieces go out as they come, several at once to a slow reader", fine=ANY),
    _v("--prefix-caching-hash-algo", note="equal beginnings are compared, not hashed", fine=ANY),
    _vf("--enable-prefix-caching", "--no-enable-prefix-caching", on=("--cache-prefix",), off=("--no-cache-prefix",)),
    _vf("--enable-chunked-prefill", "--no-enable-chunked-prefill"),
    *_vs("--max-num-partial-prefills --max-long-partial-prefills --max-seq-len-to-capture", note=_ALWAYS, fine=ANY),
    *_vs("--cudagraph-capture-sizes --max-cudagraph-capture-size --compilation-config", note=_NO_GRAPHS, fine=ANY),
    *_vs("-cc -O --optimization-level --performance-mode", note=_NO_GRAPHS, fine=ANY),
    *_vs(
        "--kv-cache-dtype-skip-layers --mamba-cache-dtype --mamba-ssm-cache-dtype --mamba-block-size",
        note=_KERNELS,
        fine=ANY,
    ),
    *_vs("--mamba-cache-mode --mamba-backend --mamba-cache-philox-rounds --attention-backend", note=_KERNELS, fine=ANY),
    *_vs(
        "--moe-backend --linear-backend --all2all-backend --gdn-prefill-backend --kda-prefill-backend",
        note=_KERNELS,
        fine=ANY,
    ),
    *_vs(
        "--attention-config --mamba-config --kernel-config --ir-op-priority --additional-config",
        note=_KERNELS,
        fine=ANY,
    ),
    *_vfs("--calculate-kv-scales --kv-sharing-fast-prefill --async-scheduling", note=_KERNELS),
    *_vfs("--enable-flashinfer-autotune --enable-mamba-cache-stochastic-rounding", note=_KERNELS),
    *_vfs("--disable-hybrid-kv-cache-manager --disable-chunked-mm-input --scheduler-reserve-full-isl", note=_ALWAYS),
    *_vs(
        "--kv-offloading-size --kv-offloading-backend --kv-transfer-config --kv-events-config",
        cure="cells stay in their slots",
    ),
    *_vs("--ec-transfer-config --weight-transfer-config", cure=_ONE_HOST),
    *_vs("--cpu-offload-gb", fine=("0",), cure=_OFFLOAD),
    *_vs("--offload-backend --cpu-offload-params --offload-group-size --offload-num-in-group", cure=_OFFLOAD),
    *_vs("--offload-prefetch-step --offload-params", cure=_OFFLOAD),
    # parallelism
    _v(
        "--tensor-parallel-size -tp",
        fine=("1",),
        cure="give --tensor-split 1,1 for layers over GPUs, or --strategy multi-instance",
    ),
    _v(
        "--pipeline-parallel-size -pp",
        fine=("1",),
        cure="give --tensor-split 1,1, which gives each GPU a part of the layers",
    ),
    _v("--data-parallel-size -dp", lambda n: () if n == "1" else ("--strategy", "multi-instance", "--instances", n)),
    _v("--distributed-executor-backend", fine=("None", "mp", "uni"), cure="see docs/ray.md for Ray"),
    *_vs(
        "--prefill-context-parallel-size -pcp --decode-context-parallel-size -dcp --nnodes", fine=("1",), cure=_ONE_HOST
    ),
    *_vs("--node-rank --data-parallel-rank -dpn --data-parallel-start-rank -dpr", fine=("0",), cure=_ONE_HOST),
    *_vs("--master-addr --master-port --data-parallel-size-local -dpl --data-parallel-address -dpa", cure=_ONE_HOST),
    *_vs("--data-parallel-rpc-port -dpp --data-parallel-backend -dpb", cure=_ONE_HOST),
    *_vs("--data-parallel-supervisor-port --dp-supervisor-probe-interval-s", cure=_ONE_HOST),
    *_vs("--dp-supervisor-probe-timeout-s --dp-supervisor-probe-failure-threshold", cure=_ONE_HOST),
    *(_vf(n, cure=_ONE_HOST) for n in ("--data-parallel-hybrid-lb", "-dph", "--data-parallel-external-lb", "-dpe")),
    *(_vf(n, cure=_ONE_HOST) for n in ("--data-parallel-multi-port-external-lb", "-dpm", "--enable-elastic-ep")),
    *_vs("--dcp-comm-backend --dcp-kv-cache-interleave-size --cp-kv-cache-interleave-size", note=_ONE_HOST, fine=ANY),
    *_vs("--distributed-timeout-seconds --cpu-distributed-timeout-seconds", note=_ONE_HOST, fine=ANY),
    *_vs("--max-parallel-loading-workers --eplb-config --expert-placement-strategy", note=_ONE_HOST, fine=ANY),
    *_vs("--dbo-decode-token-threshold --dbo-prefill-token-threshold", note=_ONE_HOST, fine=ANY),
    *_vfs("--enable-expert-parallel --enable-ep-weight-filter --enable-dbo --enable-eplb", note=_ONE_HOST),
    *_vfs("--disable-nccl-for-dp-synchronization --disable-custom-all-reduce --ray-workers-use-nsight", note=_ONE_HOST),
    _vf("--numa-bind", on=("--numa", "distribute")),
    *_vs("--numa-bind-nodes --numa-bind-cpus", cure="start under numactl, with --numa numactl"),
    # adapters, structured outputs, drafts
    _vf("--enable-lora", "--no-enable-lora"),
    *_vs("--max-loras --max-lora-rank --max-cpu-loras --lora-dtype --lora-extra-vocab-size", note=_LORA_ANY, fine=ANY),
    *_vs("--lora-target-modules --default-mm-loras", cure="the adapter's file says what it changes"),
    *_vfs("--fully-sharded-loras --enable-lora-bias --enable-tower-connector-lora", note=_LORA_ANY),
    *_vfs("--specialize-active-lora --enable-mixed-moe-lora-format", note=_LORA_ANY),
    _v("--structured-outputs-config --guided-decoding-backend", note="llguidance is the only backend", fine=ANY),
    _v("--speculative-config -sc", _speculative),
    _v("--spec-method", lambda value: _speculative(json.dumps({"method": value}))),
    _v("--spec-model", lambda value: ("--speculate", "draft", "--draft-model", value)),
    _v("--spec-tokens", as_option("--n-draft")),
    _v("--reasoning-config", cure="a request gives thinking_token_budget"),
    # media
    *_vs("--allowed-local-media-path --allowed-media-domains --media-io-kwargs --mm-processor-kwargs", cure=NO_MEDIA),
    *_vs("--limit-mm-per-prompt --mm-processor-cache-gb --mm-processor-cache-type", note=NO_MEDIA, fine=ANY),
    *_vs("--mm-shm-cache-max-object-size-mb --mm-encoder-tp-mode --mm-encoder-attn-backend", note=NO_MEDIA, fine=ANY),
    *_vs(
        "--mm-encoder-attn-dtype --mm-encoder-fp8-scale-path --mm-encoder-fp8-scale-save-path",
        note=NO_MEDIA,
        fine=ANY,
    ),
    *_vs("--mm-encoder-fp8-scale-save-margin --video-pruning-rate --mm-tensor-ipc", note=NO_MEDIA, fine=ANY),
    *_vfs("--language-model-only --interleave-mm-strings --skip-mm-profiling", note=NO_MEDIA),
    *_vfs("--enable-mm-embeds --mm-encoder-only", cure=NO_MEDIA),
    # figures
    _vf("--disable-log-stats", "--no-disable-log-stats"),
    *_vs("--otlp-traces-endpoint --collect-detailed-traces --profiler-config", cure=_NO_TRACES),
    *_vs("--show-hidden-metrics-for-version --kv-cache-metrics-sample", note=_NO_TRACES, fine=ANY),
    *_vfs("--aggregate-engine-logging --kv-cache-metrics --cudagraph-metrics --enable-mfu-metrics", note=_NO_TRACES),
    *_vfs("--enable-layerwise-nvtx-tracing --enable-logging-iteration-details", note=_NO_TRACES),
    *_vfs("--enable-mm-processor-stats --fail-on-environ-validation", note=_NO_TRACES),
)
