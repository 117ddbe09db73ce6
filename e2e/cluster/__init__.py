"""A real Kubernetes on this machine, without Docker and without installing a single service.

The cluster is one node in private namespaces: the Kubernetes components are built from their published Go modules
into one binary, and containerd, runc and the CNI plugins come from a Debian root file system that only the node
sees. Everything lives under ``.local/`` of the repository; nothing else on the machine changes, and ``down`` leaves
nothing behind.

Run ``python3 -m e2e.cluster --help`` from the root of the repository. The package needs only the standard library
of Python 3.11. Tests import :class:`e2e.cluster.control_plane.ControlPlane` (an apiserver and etcd, no privileges)
and :func:`e2e.cluster.rootfs.server_command` (a real Redis that is not installed).
"""
