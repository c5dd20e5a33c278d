"""The step loop by hand: requests enter and leave at any step."""

from llamabatch import Engine, EngineConfig, Request, SamplingParams

with Engine(EngineConfig("tiny", n_slots=4)) as engine:
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    for number in range(6):  # more than there are slots: two of them wait
        prompt = engine.model.tokenize(f"Chapter {number}.")
        engine.add(Request(f"request-{number}", tuple(prompt), greedy))
    step = 0
    while engine.has_work:
        step += 1
        for output in engine.step():
            if output.finished is not None:
                print(f"step {step:3}: {output.request_id} finished, {output.finished.finish_reason}")
        if step == 5:
            engine.abort("request-3")
    stats = engine.stats()
    print(f"{stats.rows_per_step:.1f} rows a step, {stats.passes_per_step:.2f} passes over the weights a step")
