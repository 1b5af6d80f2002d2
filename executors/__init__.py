"""Backends, one folder each; found by entry point, never imported by the core."""
