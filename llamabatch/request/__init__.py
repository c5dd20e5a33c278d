"""The data of a request: SamplingParams, Request, Sequence, outputs, logprobs, detokenizer. This package
imports only `errors` and `utils`."""
