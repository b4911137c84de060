"""Typed, frozen configuration: strict YAML, overrides, where every value came from. Imports no torch."""
