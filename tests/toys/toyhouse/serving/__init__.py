"""Toy methods that exercise the harness."""
