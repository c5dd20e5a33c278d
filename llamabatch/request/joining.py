"""Joins several outputs of a continuation into one if this makes no difference to the caller."""

from __future__ import annotations

from llamabatch.request.outputs import SequenceOutput


def joined(outputs: list[SequenceOutput]) -> list[SequenceOutput]:
    """Joins successive outputs of a continuation if this makes no difference to the caller. Outputs with tool calls
    or logprobs are not joined. The last of the joined outputs may end the continuation."""
    last: dict[tuple[str, int], int] = {}  # continuation -> the index in `result` of its latest piece
    result: list[SequenceOutput | list[SequenceOutput]] = []
    for output in outputs:
        key = output.request_id, output.index
        place = last.get(key)
        before = None if place is None else result[place]
        if before is not None and place is not None and _goes_on(before, output):
            if isinstance(before, list):
                before.append(output)
            else:
                result[place] = [before, output]
        else:
            last[key] = len(result)
            result.append(output)
    return [each if isinstance(each, SequenceOutput) else _join(each) for each in result]


def _goes_on(before: SequenceOutput | list[SequenceOutput], output: SequenceOutput) -> bool:
    """Returns True if `output` may be joined to the pieces before it. Thinking cannot be joined to earlier text."""
    pieces = before if isinstance(before, list) else [before]
    if output.logprobs is not None or output.tool_calls:
        return False
    if pieces[-1].tool_calls or pieces[-1].finish_reason is not None:
        return False
    return not output.reasoning or not any(piece.text for piece in pieces)


def _join(pieces: list[SequenceOutput]) -> SequenceOutput:
    last = pieces[-1]
    token_ids = tuple(token_id for piece in pieces for token_id in piece.token_ids)
    return SequenceOutput(
        last.request_id,
        token_ids,
        "".join([piece.text for piece in pieces]),
        last.finished,
        last.index,
        last.prompt_index,
        None,
        "".join([piece.reasoning for piece in pieces]),
        last.ended,
        (),
        last.called_tools,
    )
