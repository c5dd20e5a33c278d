"""Several models behind one server: which of them are loaded, and how a request reaches the model that it names."""
