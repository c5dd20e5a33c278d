"""Several models behind one server: which models are loaded, and how a request reaches its model."""
