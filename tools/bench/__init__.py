"""Benchmarks: evidence for the figures in docs/speed.md."""
