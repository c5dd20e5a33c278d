"""Files and batches without HTTP: OpenAI's batches as jobs on the engine of the server, which survive its death.

| file | one idea |
|---|---|
| `records.py` | a file and a batch as values, in OpenAI's words and as JSON on the disk |
| `store.py` | the folder that holds them: locked, bounded, each record whole at any time |
| `check.py` | the lines of an uploaded file, checked before a batch of it begins |
| `window.py` | the completion window: when a batch leaves the background, and when it expires |
| `lines.py` | a line of a batch as the endpoint reads and answers it |
| `results.py` | the journal of a batch becomes its files of results and errors |
| `runner.py` | threads that run batches, and go on with them after a restart |
| `upload.py` | a file that is uploaded, streamed to the disk |
"""
