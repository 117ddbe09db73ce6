"""Rendering of prefixes: which tokens no continuation changes, and which change by themselves.

Pure, except `render`, which calls an engine.
"""
