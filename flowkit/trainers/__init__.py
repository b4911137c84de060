"""One self-contained file per algorithm; each trainer is a generator of metric rows."""
