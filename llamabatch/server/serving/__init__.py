"""One loaded model behind a server: its states, and the path of a request to the engine and back."""
