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
            "cache_prefix",
            "flash_attn",
        ),
        "pooling",
    ),
    "Processors and memory": (
        *("n_threads", "n_threads_batch", "n_gpu_layers", "main_gpu", "tensor_split", "override_tensor", "n_cpu_moe"),
        *("cpu_moe", "use_mmap", "use_mlock", "numa", "extra_bufts"),
    ),
    "Speculation": ("speculate", "draft_model", "n_draft", "speculate_always"),
    "Thinking": ("reasoning_format", "reasoning_tags"),
    "Model file": (
        *("trial", "sha256", "kv_overrides", "rope_scaling", "rope_freq_base", "rope_freq_scale", "yarn_ext_factor"),
        *("yarn_attn_factor", "yarn_beta_fast", "yarn_beta_slow", "yarn_orig_ctx"),
    ),
}
_GROUP_OF = {name: group for group, names in GROUPS.items() for name in names}


class GroupedCommand(click.Command):
    """A command whose help shows its options by groups."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes its own options, then a section for each group."""
        rows: dict[str, list[tuple[str, str]]] = {"Options": [], **{group: [] for group in GROUPS}}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None and not isinstance(param, click.Argument):
                rows[_GROUP_OF.get(str(param.name), "Options")].append(record)
        for group, found in rows.items():
            if found:
                with formatter.section(group):
                    formatter.write_dl(found)
