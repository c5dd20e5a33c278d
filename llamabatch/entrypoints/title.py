"""Makes the repr of an LLM or AsyncLLM, and the error for pickling one."""

from __future__ import annotations

from llamabatch.planning.plan import Plan
from llamabatch.utils.paths import shown


def described(kind: str, plan: Plan | None, model: str = "", *, state: str = "") -> str:
    """Returns the repr of an LLM or AsyncLLM, with model, strategy and sizes.

    Args:
        kind: the class name.
        plan: None before the load.
        state: "closed" or "asleep", shown in place of the sizes.
    """
    if state and (plan is not None or model):
        return f"{kind}({shown(model if plan is None else plan.config.model)!r}, {state})"
    if plan is None:
        return f"{kind}({shown(model)!r}, not loaded)" if model else f"{kind}(not loaded)"
    config = plan.config
    shown_options = {"strategy": config.strategy, "n_ctx": config.n_ctx, "n_slots": config.n_slots}
    if config.instances > 1:
        shown_options["instances"] = config.instances
    if config.isolate:
        shown_options["isolate"] = True
    return f"{kind}({shown(config.model)!r}, {', '.join(f'{name}={value!r}' for name, value in shown_options.items())})"


def unpicklable(kind: str) -> TypeError:
    """Returns the error for pickle, copy and multiprocessing."""
    return TypeError(
        f"{kind} cannot be pickled or copied: it holds a loaded model; make one in each process, or share one over "
        "threads, or over `llamabatch serve`"
    )
