"""Pure builders: one typed object of the API in, one Kubernetes object out.

Each builder returns a whole object with every field that the operator owns, in the form in which the apiserver stores
it (canonical quantities, no nulls, no empty values that the server drops), so that "does the live object hold what is
wanted?" is a plain comparison. None means that the object must not exist.
"""
