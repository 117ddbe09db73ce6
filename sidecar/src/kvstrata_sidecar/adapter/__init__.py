"""Policy adapter: LMCache's second cache level, under the bundle's rule.

It runs inside the upstream LMCache server as a plugin L2 adapter, one instance for each shared tier. `upstream` holds
LMCache's names and imports; the rest needs the standard library, and `cryptography` for files and encrypted
tiers: versions of other packages in that image are not ours to choose.

Two rules hold everywhere. Any doubt about a reply's framing closes the connection. And LMCache receives no answer while
I/O can still touch one of its buffers, because LMCache hands the buffer to another tenant next.
"""
