"""Files and batches without HTTP: OpenAI's batches as jobs on the engine of the server. The batches survive a crash of
the server.

| file | one idea |
|---|---|
| `records.py` | the records of files and batches, in OpenAI's format and as JSON on the disk |
| `store.py` | the folder of files and batches: locked, limited, each record complete at any time |
| `check.py` | the check of an uploaded file before its batch begins |
| `window.py` | the completion window: when a batch leaves the background, and when it expires |
| `results.py` | the journal of a batch becomes its files of results and errors |
| `runner.py` | threads that run batches, and continue them after a restart |
| `service.py` | the files and batches of one server: where they are stored, and when they run |
| `upload.py` | an upload, streamed to the disk |
"""
