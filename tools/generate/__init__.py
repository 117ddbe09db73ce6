"""Writes CRDs, their copies in the chart and the API reference from the code, and cited figures from results."""
