"""Operators with rules of their own; each has a naive twin that is the measure of all others."""
