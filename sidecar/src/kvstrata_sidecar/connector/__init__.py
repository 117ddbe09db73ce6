"""The connector guard: keeps an engine serving when its cache server fails."""
