"""Runs llamabatch through its public names, as a child program. `make bench-ab` also runs it with other revisions."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Any

from countdown import Countdown  # type: ignore[import-not-found]  # beside this file
from lines import Handler, serve  # type: ignore[import-not-found]


def start(options: dict[str, Any]) -> tuple[dict[str, Any], Handler]:
    began = time.perf_counter()
    import llamabatch
    from llamabatch import LLM, SamplingParams

    imported = time.perf_counter()
    llm = LLM(options["model"], **options["engine"])
    loaded = time.perf_counter()

    def params(job: dict[str, Any]) -> SamplingParams:
        return SamplingParams(max_tokens=job["generate"], ignore_eos=True, **options["sampling"])

    def together(jobs: list[dict[str, Any]]) -> dict[str, Any]:
        begin = time.perf_counter()
        outputs = llm.generate([job["prompt"] for job in jobs], [params(job) for job in jobs])
        wall_s = time.perf_counter() - begin
        failed = [output.error for output in outputs if output.error]
        if failed:
            raise RuntimeError(failed[0])
        return {"wall_s": wall_s, "tokens": [len(output.token_ids) for output in outputs]}

    def streamed(jobs: list[dict[str, Any]]) -> dict[str, Any]:
        times: list[list[float]] = [[] for _ in jobs]
        errors: list[str] = []
        began = [0.0 for _ in jobs]
        endless = [bool(job.get("endless")) for job in jobs]
        ended, talking = Countdown(endless.count(False)), Countdown(endless.count(True))
        begin = time.perf_counter()

        def one(at: int, job: dict[str, Any], seen: list[float]) -> None:
            if any(endless) and not endless[at]:
                talking.done.wait()
                time.sleep(job["arrival_s"])
            time.sleep(max(0.0, begin + job["arrival_s"] - time.perf_counter()))
            began[at] = time.perf_counter() - begin
            try:
                stream: Any = llm.stream(job["prompt"], params(job))
                with contextlib.closing(stream) as events:
                    for event in events:
                        first = not seen and bool(event.token_ids)
                        seen += [time.perf_counter() - begin] * len(event.token_ids)
                        if event.finished is not None and event.finished.error:
                            errors.append(event.finished.error)
                        if endless[at] and first:
                            talking.less()
                        if endless[at] and ended.done.is_set():
                            break
            except Exception as error:
                errors.append(f"{type(error).__name__}: {error}")
            finally:
                if not endless[at]:
                    ended.less()
                elif not seen:
                    talking.less()

        threads = [
            threading.Thread(target=one, args=(at, *pair))
            for at, pair in enumerate(zip(jobs, times))  # noqa: B905
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        wall_s = time.perf_counter() - begin
        if errors:
            raise RuntimeError(errors[0])
        return {"wall_s": wall_s, "tokens": [len(seen) for seen in times], "times": times, "began": began}

    def handle(message: dict[str, Any]) -> dict[str, Any]:
        jobs, before = message["jobs"], vars(llm.stats()).copy()
        answer = streamed(jobs) if message["streamed"] else together(jobs)
        after = vars(llm.stats()).items()  # `vars` works with older revisions
        return {**answer, "counts": {name: n - before[name] for name, n in after if isinstance(n, int)}}

    resolved = llm.plan.config  # an older revision has neither method below
    form = next((name for name in ("requested", "asked") if hasattr(resolved, name)), None)
    requested = resolved if form is None else getattr(resolved, form)()
    config = {name: value for name, value in vars(requested).items() if name != "model"}
    facts = {"import_s": imported - began, "load_s": loaded - imported, "options": config}
    return {**facts, "folder": llamabatch.__path__[0]}, handle


if __name__ == "__main__":
    serve(start)
