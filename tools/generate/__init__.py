"""Writes CRDs, the copies in the chart, and the API reference from the code."""
