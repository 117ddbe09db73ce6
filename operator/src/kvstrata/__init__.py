"""kvstrata: the KV cache of LLM serving as Kubernetes cluster state."""

__version__ = "0.1.0"
