"""The connector guard: what keeps an engine alive and answering when its cache server is not."""
