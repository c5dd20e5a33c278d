"""Settings of llama-server and vLLM that a flag and a field of a body name: one policy for both.

What only allows a server to do something is ignored by name. What would change an answer is refused."""

from __future__ import annotations

from typing import Any, NamedTuple


class Setting(NamedTuple):
    """A setting without a meaning here.

    Attributes:
        advice: why it has none, or what to give instead.
        usual: values that ask for what happens anyway.
        optional: another value is ignored by name; else it is refused.
    """

    advice: str
    usual: tuple[Any, ...] = ()
    optional: bool = False


SETTINGS = {
    "n_cache_reuse": Setting("equal beginnings are used, parts behind them are not", (0,), True),
    "backend_sampling": Setting(
        "sampling runs on the CPU, all rows at once, and draws the same tokens", (False,), True
    ),
    "mm_processor_kwargs": Setting("messages are text alone", ({},), True),
    "media_io_kwargs": Setting("messages are text alone", ({},), True),
    "adaptive_target": Setting("there is no adaptive-p sampler; give min_p or mirostat=2", (-1, -1.0)),
    "reasoning_budget_message": Setting("thinking is closed with the text that the model's family writes there", ("",)),
    "parse_tool_calls": Setting('calls are told from the text; give tool_choice="none" for text that is not', (True,)),
    "kv_transfer_params": Setting("there is no transfer of KV cells between servers", ({},)),
}
