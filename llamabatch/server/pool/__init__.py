"""Several models behind one server: which of them are loaded, and the way of a request to the one that it names."""
