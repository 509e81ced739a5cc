"""Benchmarks: evidence for the README's figures."""
