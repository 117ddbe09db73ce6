"""Which stories are run: all, or those that show claims."""

from __future__ import annotations

from e2e.claims import leave_out_others as pytest_collection_modifyitems

__all__ = ["pytest_collection_modifyitems"]
