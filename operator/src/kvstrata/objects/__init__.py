"""Pure builders: one typed object of the API in, one Kubernetes object out; None means that it must not exist.

Objects are in the form in which the apiserver stores them (canonical quantities, no nulls, no empty values), so that
live and desired objects compare directly.
"""
