"""The repr of an LLM or AsyncLLM: its model, and the sizes of its engine."""

from __future__ import annotations

from llamabatch.planning.capacity import Plan
from llamabatch.utils.paths import shown


def described(kind: str, plan: Plan | None, model: str = "") -> str:
    """The kind with its model, strategy and sizes; without a plan, the model is not loaded."""
    if plan is None:
        return f"{kind}({shown(model)!r}, not loaded)" if model else f"{kind}(not loaded)"
    config = plan.config
    told = {"strategy": config.strategy, "n_ctx": config.n_ctx, "n_slots": config.n_slots}
    if config.instances > 1:
        told["instances"] = config.instances
    if config.isolate:
        told["isolate"] = True
    return f"{kind}({shown(config.model)!r}, {', '.join(f'{name}={value!r}' for name, value in told.items())})"
