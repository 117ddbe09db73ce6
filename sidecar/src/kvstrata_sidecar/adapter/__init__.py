"""The policy adapter: LMCache's second cache level, under the bundle's rule.

It runs inside the upstream LMCache server as a plugin L2 adapter, one instance for each shared tier. It sees every
block with its keyspace, refuses what the current cache view does not allow, and carries the bytes itself. Only
`plugin` imports LMCache; everything else needs the standard library alone and can be tested without it.

Two rules stand above all others. Any doubt about a reply's framing closes the connection. And no answer is given to
LMCache while I/O can still touch one of its buffers, because LMCache hands the buffer to another tenant next.
"""
