"""Train the embedded bundles from nothing: `python -m flowkit.assets.build tiny-flux --out DIR`."""
