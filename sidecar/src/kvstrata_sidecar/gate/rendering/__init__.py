"""Rendering and warming of prefix pools: which tokens of a prefix no continuation changes, and what changes by itself.

Pure, but for `render` and `warmer`, which ask an engine that they are given.
"""
