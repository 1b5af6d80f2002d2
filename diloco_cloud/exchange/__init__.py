"""Turning N contributions in a bucket into one agreed update."""
