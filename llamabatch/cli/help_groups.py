"""Options in groups in `--help`: a command's own first, then those that commands share."""

from __future__ import annotations

import click

# Groups of shared options by the names of their parameters. What is in none belongs to the command itself.
GROUPS: dict[str, tuple[str, ...]] = {
    "Sampling": (
        *("max_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty"),
        *("frequency_penalty", "logit_bias", "seed", "stop", "ignore_eos", "others"),
    ),
    "Strategy and slots": (
        *("strategy", "n_slots", "start_slots", "n_ctx", "instances", "instance_strategy", "max_queue", "max_wait_ms"),
        *("preempt", "isolate", "profile"),
    ),
    "Batches and KV cache": (
        *("n_batch", "n_ubatch", "prefill_share", "prefill_budget"),
        *(
            "kv",
            "kv_cells",
            "type_k",
            "type_v",
            "swa_full",
            "cache_prefix",
            "flash_attn",
            "batch_invariant",
        ),
        "pooling",
    ),
    "Processors and memory": (
        *("n_threads", "n_threads_batch", "n_gpu_layers", "devices", "split_mode", "main_gpu", "tensor_split"),
        *(
            "offload_kqv",
            "op_offload",
            "device_sampling",
            "row_ladder",
            "override_tensor",
            "n_cpu_moe",
            "cpu_moe",
            "use_mmap",
            "use_mlock",
            "numa",
            "extra_bufts",
        ),
    ),
    "Speculation": ("speculate", "draft_model", "n_draft", "speculate_always"),
    "Thinking": ("reasoning_format", "reasoning_tags"),
    "Model file": (
        *("trial", "sha256", "kv_overrides", "rope_scaling", "rope_freq_base", "rope_freq_scale", "yarn_ext_factor"),
        *("yarn_attn_factor", "yarn_beta_fast", "yarn_beta_slow", "yarn_orig_ctx"),
    ),
}
# Groups of `llamabatch serve` alone, behind its own options.
SERVER_GROUPS: dict[str, tuple[str, ...]] = {
    "Address": ("host", "port", "uds", "reuse_port", "root_path", "ssl_keyfile", "ssl_certfile", "ssl_ca_certs"),
    "Callers": (
        *("api_keys", "api_key_file", "no_key", "metrics_without_key", "allowed_hosts", "cors_origins"),
        *("cors_methods", "cors_headers", "cors_credentials"),
    ),
    "Bounds": (
        *("max_body_bytes", "max_bodies_bytes", "max_header_bytes", "max_headers", "max_connections"),
        *("header_timeout_s", "body_timeout_s", "keep_alive_s", "write_timeout_s", "drain_s", "sse_ping_s", "threads"),
    ),
    "Batches": ("batches", "data_dir", "max_disk_bytes", "max_file_bytes"),
    "Log": ("log_level", "log_file", "access_log"),
}


class GroupedCommand(click.Command):
    """A command whose help shows its options by groups."""

    groups = GROUPS

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes its own options, then a section for each group."""
        group_of = {name: group for group, names in self.groups.items() for name in names}
        rows: dict[str, list[tuple[str, str]]] = {"Options": [], **{group: [] for group in self.groups}}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None and not isinstance(param, click.Argument):
                rows[group_of.get(str(param.name), "Options")].append(record)
        for group, found in rows.items():
            if found:
                with formatter.section(group):
                    formatter.write_dl(found)
