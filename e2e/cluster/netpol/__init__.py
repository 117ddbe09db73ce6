"""NetworkPolicy for the local cluster, whose network plugins do not enforce it.

:mod:`e2e.cluster.netpol.rules` turns pods, namespaces and policies into one nftables table; it is pure.
:mod:`e2e.cluster.netpol.enforcer` watches the API server and applies that table. It runs inside the node.

Covered: ingress and egress, pod and namespace selectors, ipBlock with exceptions, ports by number, range and name.
Not filtered: traffic of the node itself (probes, port-forward) and of pods in the host's network. IPv4 only.
"""
