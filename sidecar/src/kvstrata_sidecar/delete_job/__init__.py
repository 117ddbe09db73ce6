"""Deletes blocks from a shared tier, as the program of a deletion Job: whole keyspaces for an eager CacheInvalidation
(`delete`), chunks of a pool (`chunks`), and blocks of a replaced cache identity (`reclaim`)."""
