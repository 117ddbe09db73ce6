"""A Kubernetes control plane without a node: etcd and kube-apiserver, on request the controller manager and scheduler.

Any user can run it, it needs no privileges and no containers, and it is ready in about three seconds. Tests of
controllers use it (as with Go's envtest), and the local node runs the same one inside its namespaces::

    with ControlPlane(tmp_path) as plane:
        client = connect(plane.kubeconfig)
"""

from __future__ import annotations

import http.client
import json
import shutil
import ssl
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from e2e.cluster import pki
from e2e.cluster.audit import audit_options
from e2e.cluster.component import Component
from e2e.cluster.ports import free_port
from e2e.cluster.processes import kill_recorded, recorded_pid, wait_until
from e2e.cluster.progress import ClusterError
from e2e.cluster.settings import Network, Paths, kubebuilder_assets

READY_TIMEOUT_S = 120.0
MEMORY_FOLDER = Path("/dev/shm")
ALL_PARTS = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler")

START_AGAIN = 'while :; do setpriv --pdeathsig KILL "$@"; echo "ended with exit code $?; starting again"; sleep 1; done'
"""Runs a program whenever it has ended, as a kubelet does; both end together."""


class ControlPlane:
    """One control plane, with all its state in one folder (and etcd's data in memory where the system has /dev/shm).

    A second object on the same folder controls the same processes, so that another command can stop them.

    Args:
        directory: state, logs and credentials; made when missing.
        controller_manager: also run kube-controller-manager (namespaces, garbage collection, Deployments, …).
        scheduler: also run kube-scheduler.
        address: where the API server listens.
        port: its port; 0 takes a free one.
        node_name: also make credentials for a kubelet and a kube-proxy of this name.
        command_prefix: put before every program, to run it in other namespaces.
        binaries: folder of the programs; by default ``KUBEBUILDER_ASSETS``, else ``.local/bin``.
        etcd_data: etcd's data folder; by default a fresh one in memory.
        audit: keep a log of writes by service accounts, which :mod:`e2e.cluster.audit` reads.
        paths: the project's folders.
    """

    def __init__(
        self,
        directory: Path,
        *,
        controller_manager: bool = False,
        scheduler: bool = False,
        address: str = "127.0.0.1",
        port: int = 0,
        node_name: str | None = None,
        command_prefix: Sequence[str] = (),
        binaries: Path | None = None,
        etcd_data: Path | None = None,
        audit: bool = False,
        paths: Paths | None = None,
        network: Network | None = None,
    ) -> None:
        self._directory = directory
        self._audit = audit
        self._controller_manager = controller_manager
        self._scheduler = scheduler
        self._address = address
        self._port = port
        self._node_name = node_name
        self._command_prefix = list(command_prefix)
        self._paths = paths or Paths()
        self._binaries = binaries or kubebuilder_assets() or self._paths.bin
        self._etcd_data = etcd_data
        self._network = network or Network()
        self.pki = pki.Pki(directory / "pki")

    @property
    def kubeconfig(self) -> Path:
        """The administrator's kubeconfig."""
        return self.pki.kubeconfig("admin")

    @property
    def kubectl(self) -> Path:
        """The kubectl that belongs to this control plane."""
        return self._binaries / "kubectl"

    def __enter__(self) -> ControlPlane:
        self.start()
        return self

    def __exit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Start everything and return when it serves.

        Raises:
            ClusterError: a program is missing, died, or was not ready within a minute. Nothing is left running then.
        """
        if self.is_running():
            raise ClusterError(
                f"a control plane already runs in {self._directory}", advice="stop it first: `control-plane stop`"
            )
        self.stop()
        try:
            self._start()
        except BaseException:
            self.stop()
            raise

    def is_running(self) -> bool:
        """True while the API server's process runs."""
        return recorded_pid(self._pid_file("kube-apiserver")) is not None

    def stop(self) -> None:
        """Kill everything at once and remove data and credentials; only the logs stay."""
        self._kill_all()
        marker = self._directory / "etcd-data"
        if marker.exists():
            shutil.rmtree(Path(marker.read_text()), ignore_errors=True)
            marker.unlink()
        shutil.rmtree(self._directory / "pki", ignore_errors=True)
        shutil.rmtree(self._directory / "pid", ignore_errors=True)

    def get(self, path: str) -> Any:
        """GET a path of the API as administrator.

        Returns:
            The decoded JSON answer, or the text where it is none.

        Raises:
            OSError: no connection, or a status other than 200.
        """
        context = ssl.create_default_context(cafile=str(self.pki.crt("ca")))
        context.load_cert_chain(self.pki.crt("admin"), self.pki.key("admin"))
        connection = http.client.HTTPSConnection(self._address, self._port, context=context, timeout=5)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            body = answer.read().decode()
        except http.client.HTTPException as error:
            raise OSError(f"GET {path}: {error}") from error
        finally:
            connection.close()
        if answer.status != 200:
            raise OSError(f"GET {path}: {answer.status} {body[:500]}")
        return json.loads(body) if body.startswith("{") else body

    def _start(self) -> None:
        for name in ("etcd", "kube-apiserver"):
            if not (self._binaries / name).exists():
                raise ClusterError(
                    f"{self._binaries / name} is not there",
                    advice="run `python3 -m e2e.cluster build`, or set KUBEBUILDER_ASSETS to a folder that has it",
                )
        self._directory.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(self._directory / "log", ignore_errors=True)
        self._port = self._port or free_port()
        pki.create(
            self.pki.folder, self._paths, address=self._address, port=self._port,
            service_ip=self._network.kubernetes_service_ip, node_name=self._node_name,
        )  # fmt: skip
        etcd_port, etcd_peer_port = free_port(), free_port()
        self._spawn("etcd", self._etcd_options(self._make_etcd_data(), etcd_port, etcd_peer_port))
        self._spawn("kube-apiserver", self._apiserver_options(etcd_port))
        self._wait("/readyz", "the API server to be ready", lambda answer: answer == "ok")
        # Only now: before the bootstrap roles exist, which readiness includes, these two are refused, and exit.
        if self._controller_manager:
            self._spawn("kube-controller-manager", self._controller_manager_options(), start_again=True)
        if self._scheduler:
            # It ends itself when it has missed a pod's events, as it may without the API server.
            self._spawn("kube-scheduler", self._scheduler_options(), start_again=True)
        if self._controller_manager:
            # Pods cannot be made before their namespace has this account.
            account = "/api/v1/namespaces/default/serviceaccounts/default"
            self._wait(account, "the controller manager to work", lambda answer: "metadata" in answer)

    def _make_etcd_data(self) -> Path:
        if self._etcd_data is not None:
            return self._etcd_data
        in_memory = MEMORY_FOLDER.is_dir()
        data = Path(tempfile.mkdtemp(prefix="kvstrata-etcd-", dir=MEMORY_FOLDER if in_memory else self._directory))
        (self._directory / "etcd-data").write_text(str(data))
        return data

    def _spawn(self, name: str, options: Sequence[str], *, start_again: bool = False) -> subprocess.Popen[bytes]:
        program = [str(self._binaries / name), *options]
        supervisor = ["sh", "-c", START_AGAIN, name] if start_again else []
        command = [*self._command_prefix, *supervisor, *program]
        return Component(self._directory, name).start(command)

    def _wait(self, path: str, what: str, accept: Any) -> None:
        last_error = ""

        def accepted() -> bool:
            nonlocal last_error
            for name in ALL_PARTS:
                if self._pid_file(name).exists() and recorded_pid(self._pid_file(name)) is None:
                    raise ClusterError(f"{name} died while waiting for {what}", log=self._log(name))
            try:
                return bool(accept(self.get(path)))
            except OSError as error:
                last_error = str(error)
                return False

        if not wait_until(accepted, timeout_s=READY_TIMEOUT_S):
            message = f"waited {READY_TIMEOUT_S:.0f} s for {what}, without success; last answer: {last_error}"
            raise ClusterError(message, log=self._log("kube-apiserver"))

    def _kill_all(self) -> None:
        for name in reversed(ALL_PARTS):
            kill_recorded(self._pid_file(name))
        shutil.rmtree(self._directory / "command", ignore_errors=True)

    def _pid_file(self, name: str) -> Path:
        return self._directory / "pid" / name

    def _log(self, name: str) -> Path:
        return self._directory / "log" / f"{name}.log"

    def _etcd_options(self, data: Path, port: int, peer_port: int) -> list[str]:
        client_url, peer_url = f"https://127.0.0.1:{port}", f"http://127.0.0.1:{peer_port}"
        return [
            "--name=local",
            f"--data-dir={data}",
            "--unsafe-no-fsync",  # the data is worth nothing after a crash
            f"--listen-client-urls={client_url}",
            f"--advertise-client-urls={client_url}",
            f"--listen-peer-urls={peer_url}",
            f"--initial-advertise-peer-urls={peer_url}",
            f"--initial-cluster=local={peer_url}",
            f"--cert-file={self.pki.crt('etcd')}",
            f"--key-file={self.pki.key('etcd')}",
            "--client-cert-auth",
            f"--trusted-ca-file={self.pki.crt('ca')}",
            "--log-level=warn",
        ]

    def _apiserver_options(self, etcd_port: int) -> list[str]:
        crt, key = self.pki.crt, self.pki.key
        return [
            f"--etcd-servers=https://127.0.0.1:{etcd_port}",
            f"--etcd-cafile={crt('ca')}",
            f"--etcd-certfile={crt('etcd')}",
            f"--etcd-keyfile={key('etcd')}",
            f"--bind-address={self._address}",
            f"--advertise-address={self._address}",
            f"--secure-port={self._port}",
            f"--service-cluster-ip-range={self._network.service_cidr}",
            f"--tls-cert-file={crt('apiserver')}",
            f"--tls-private-key-file={key('apiserver')}",
            f"--client-ca-file={crt('ca')}",
            f"--kubelet-client-certificate={crt('apiserver-kubelet-client')}",
            f"--kubelet-client-key={key('apiserver-kubelet-client')}",
            f"--kubelet-certificate-authority={crt('ca')}",
            "--kubelet-preferred-address-types=InternalIP,Hostname",
            "--service-account-issuer=https://kubernetes.default.svc.cluster.local",
            f"--service-account-key-file={self.pki.folder / 'sa.pub'}",
            f"--service-account-signing-key-file={key('sa')}",
            f"--requestheader-client-ca-file={crt('front-proxy-ca')}",
            "--requestheader-allowed-names=front-proxy-client",
            "--requestheader-username-headers=X-Remote-User",
            "--requestheader-group-headers=X-Remote-Group",
            "--requestheader-extra-headers-prefix=X-Remote-Extra-",
            f"--proxy-client-cert-file={crt('front-proxy-client')}",
            f"--proxy-client-key-file={key('front-proxy-client')}",
            "--authorization-mode=Node,RBAC",
            "--enable-admission-plugins=NodeRestriction",
            "--allow-privileged=true",
            "--profiling=false",
            *(audit_options(self._directory) if self._audit else ()),
        ]

    def _controller_manager_options(self) -> list[str]:
        return [
            *self._client_options("controller-manager"),
            "--use-service-account-credentials",
            f"--service-account-private-key-file={self.pki.key('sa')}",
            f"--root-ca-file={self.pki.crt('ca')}",
            f"--cluster-signing-cert-file={self.pki.crt('ca')}",
            f"--cluster-signing-key-file={self.pki.key('ca')}",
            "--allocate-node-cidrs=true",
            f"--cluster-cidr={self._network.pod_cidr}",
            f"--service-cluster-ip-range={self._network.service_cidr}",
            "--profiling=false",
        ]

    def _scheduler_options(self) -> list[str]:
        return self._client_options("scheduler")

    def _client_options(self, user: str) -> list[str]:
        kubeconfig = self.pki.kubeconfig(user)
        return [
            f"--kubeconfig={kubeconfig}",
            f"--authentication-kubeconfig={kubeconfig}",
            f"--authorization-kubeconfig={kubeconfig}",
            "--bind-address=127.0.0.1",
            f"--secure-port={free_port()}",
            "--leader-elect=false",
            # The defaults of 20 and 50 requests a second make tests with hundreds of objects wait.
            "--kube-api-qps=1000",
            "--kube-api-burst=2000",
        ]
