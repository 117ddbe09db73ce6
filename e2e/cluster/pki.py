"""Certificates, kubeconfigs and the service-account key of a throw-away control plane.

Everything is EC P-256, made afresh for each cluster by openssl: the host's own, or that of the root file system.
Kubeconfigs are written as JSON, which is YAML too, so that the standard library suffices to read and write them.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from e2e.cluster import rootfs
from e2e.cluster.processes import output_of
from e2e.cluster.progress import ClusterError
from e2e.cluster.settings import Paths, inherited_environment

VALID_DAYS = 3650
LOCAL_NAMES = ("DNS:localhost", "IP:127.0.0.1")
SERVICE_NAMES = tuple(
    f"DNS:{name}" for name in ("kubernetes", "kubernetes.default", "kubernetes.default.svc",
                               "kubernetes.default.svc.cluster.local")
)  # fmt: skip
EC_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")


@dataclass(frozen=True, slots=True)
class Pki:
    """The folder of a control plane's credentials. Private keys are readable by their owner only."""

    folder: Path

    def crt(self, name: str) -> Path:
        """The certificate called ``name``."""
        return self.folder / f"{name}.crt"

    def key(self, name: str) -> Path:
        """The private key called ``name``."""
        return self.folder / f"{name}.key"

    def kubeconfig(self, name: str) -> Path:
        """The kubeconfig of the user called ``name``."""
        return self.folder / f"{name}.kubeconfig"


@dataclass(frozen=True, slots=True)
class Identity:
    """A certificate to issue.

    Attributes:
        name: of the files.
        subject: as openssl writes it, ``/O=group/CN=user``.
        server: usable by a server as well as by a client.
        names: subject alternative names, as ``DNS:…`` and ``IP:…``.
        issuer: name of the certificate authority.
        kubeconfig: also write a kubeconfig with it.
    """

    name: str
    subject: str
    server: bool = False
    names: tuple[str, ...] = ()
    issuer: str = "ca"
    kubeconfig: bool = False


def identities(address: str, service_ip: str, node_name: str | None) -> list[Identity]:
    """Every certificate that a control plane at ``address`` needs; with ``node_name`` also those of that node."""
    serving = tuple(dict.fromkeys((*LOCAL_NAMES, *SERVICE_NAMES, f"IP:{service_ip}", f"IP:{address}")))
    wanted = [
        Identity("apiserver", "/CN=kube-apiserver", server=True, names=serving),
        Identity("apiserver-kubelet-client", "/O=system:masters/CN=kube-apiserver-kubelet-client"),
        Identity("etcd", "/CN=etcd", server=True, names=LOCAL_NAMES),
        Identity("front-proxy-client", "/CN=front-proxy-client", issuer="front-proxy-ca"),
        Identity("admin", "/O=system:masters/CN=admin", kubeconfig=True),
        Identity("controller-manager", "/CN=system:kube-controller-manager", True, LOCAL_NAMES, kubeconfig=True),
        Identity("scheduler", "/CN=system:kube-scheduler", True, LOCAL_NAMES, kubeconfig=True),
    ]
    if node_name is not None:
        node_names = (f"DNS:{node_name}", f"IP:{address}", "IP:127.0.0.1")
        subject = f"/O=system:nodes/CN=system:node:{node_name}"
        wanted += [
            Identity("kubelet", subject, server=True, names=node_names, kubeconfig=True),
            Identity("kube-proxy", "/CN=system:kube-proxy", kubeconfig=True),
        ]
    return wanted


def create(
    folder: Path, paths: Paths, *, address: str, port: int, service_ip: str, node_name: str | None = None
) -> Pki:
    """Make all credentials of a control plane in ``folder``.

    Raises:
        ClusterError: there is no openssl, or it failed.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    pki = Pki(folder)
    openssl = OpenSsl(paths)
    for name, common_name in (("ca", "kubernetes-ca"), ("front-proxy-ca", "front-proxy-ca")):
        openssl.authority(pki, name, common_name)
    server = f"https://{address}:{port}"
    for identity in identities(address, service_ip, node_name):
        openssl.issue(pki, identity)
        if identity.kubeconfig:
            write_kubeconfig(pki, identity.name, server)
    openssl.key_pair(pki, "sa")
    return pki


def write_kubeconfig(pki: Pki, user: str, server: str) -> None:
    """Write the kubeconfig of one user, with the credentials inside."""
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [
            {"name": "local", "cluster": {"server": server, "certificate-authority-data": _base64(pki.crt("ca"))}}
        ],
        "users": [
            {
                "name": user,
                "user": {
                    "client-certificate-data": _base64(pki.crt(user)),
                    "client-key-data": _base64(pki.key(user)),
                },
            }
        ],
        "contexts": [{"name": "local", "context": {"cluster": "local", "user": user}}],
        "current-context": "local",
    }
    write_private(pki.kubeconfig(user), json.dumps(document, indent=1) + "\n")


def write_private(path: Path, text: str) -> None:
    """Write a file that only its owner can read, without a moment at which others could."""
    partial = path.with_name(path.name + ".partial")
    partial.unlink(missing_ok=True)
    with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as stream:
        stream.write(text)
    partial.replace(path)


class OpenSsl:
    """The three openssl calls that a throw-away PKI takes."""

    def __init__(self, paths: Paths) -> None:
        installed = shutil.which("openssl")
        self._environment = inherited_environment()
        if installed is not None:
            self._program = [installed]
            return
        try:
            self._program = rootfs.host_command(paths.rootfs, "usr/bin/openssl")
        except ClusterError as error:
            raise ClusterError(
                "there is no openssl to make certificates with",
                advice="install openssl, or run `python3 -m e2e.cluster build` as root, which brings one",
            ) from error
        self._environment["OPENSSL_CONF"] = str(paths.rootfs / "etc/ssl/openssl.cnf")

    def authority(self, pki: Pki, name: str, common_name: str) -> None:
        """Make a self-signed certificate authority."""
        self._run(
            "req", "-x509", *EC_KEY, "-days", str(VALID_DAYS), "-subj", f"/CN={common_name}",
            "-keyout", str(pki.key(name)), "-out", str(pki.crt(name)),
            "-addext", "basicConstraints=critical,CA:TRUE",
            "-addext", "keyUsage=critical,keyCertSign,cRLSign,digitalSignature",
        )  # fmt: skip

    def issue(self, pki: Pki, identity: Identity) -> None:
        """Make a key and a certificate signed by the identity's issuer."""
        usages = "serverAuth,clientAuth" if identity.server else "clientAuth"
        extensions = ["basicConstraints=CA:FALSE", "keyUsage=critical,digitalSignature", f"extendedKeyUsage={usages}"]
        if identity.names:
            extensions.append(f"subjectAltName={','.join(identity.names)}")
        request = pki.folder / f"{identity.name}.csr"
        extension_file = pki.folder / f"{identity.name}.ext"
        extension_file.write_text("\n".join(extensions) + "\n")
        self._run(
            "req", "-new", *EC_KEY, "-subj", identity.subject,
            "-keyout", str(pki.key(identity.name)), "-out", str(request),
        )  # fmt: skip
        self._run(
            "x509", "-req", "-in", str(request), "-out", str(pki.crt(identity.name)), "-days", str(VALID_DAYS),
            "-CA", str(pki.crt(identity.issuer)), "-CAkey", str(pki.key(identity.issuer)),
            "-extfile", str(extension_file), "-set_serial", f"0x{os.urandom(8).hex()}",
        )  # fmt: skip
        request.unlink()
        extension_file.unlink()

    def key_pair(self, pki: Pki, name: str) -> None:
        """Make ``name.key`` and ``name.pub`` without a certificate (service-account tokens are signed by it)."""
        self._run("genpkey", "-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256", "-out", str(pki.key(name)))
        self._run("pkey", "-in", str(pki.key(name)), "-pubout", "-out", str(pki.folder / f"{name}.pub"))

    def _run(self, *arguments: str) -> None:
        output_of([*self._program, *arguments], env=self._environment)


def _base64(path: Path) -> str:
    return base64.b64encode(path.read_bytes()).decode()
