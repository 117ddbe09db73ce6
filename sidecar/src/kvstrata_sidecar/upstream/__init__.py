"""Everything that relies on LMCache's and vLLM's private names. No other package imports LMCache or vLLM.

`versions` chooses the modules for the installed version at start, after `names` has compared the names that they need
with it. `v0_5_6` holds one version's imports and names: `server` for the cache server, `connector` for
the engine. The modules beside it serve all versions and receive LMCache's classes from these.
"""
