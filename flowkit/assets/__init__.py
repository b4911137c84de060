"""The embedded bundles and the commands that made them."""
