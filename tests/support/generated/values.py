"""Values that the generator takes: for each pattern of the schemas some that match, from plain to strange."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

UNICODE = ("ключ", "租户-七", "naïve café", "a𐍈b", "עברית", "emoji 🧠 inside", "Ünï/cödé:x", "e\u0301 composed")

QUANTITY = r"^[0-9]{1,18}(\.[0-9]{1,9})?(k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei)?$"
NAME = "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"
DOTTED_NAME = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$"
TENANT = r"^[^\p{Z}\p{C}]([^\p{C}\p{Zl}\p{Zp}]*[^\p{Z}\p{C}])?$"
DURATION = r"^([0-9]{1,4}(\.[0-9]{1,2})?d|([0-9]{1,6}(\.[0-9]{1,2})?h)?([0-9]{1,6}(\.[0-9][05]?)?m)?([0-9]{1,6}s)?)$"
ANY_QUANTITY = r"^([0-9]{1,18}(\.[0-9]{0,9})?|\.[0-9]{1,9})([numkMGTPE]|[KMGTPE]i|[eE][+-]?[0-9]{1,2})?$"

BY_PATTERN: Mapping[str, tuple[str, ...]] = {
    QUANTITY: ("1", "1Gi", "64Mi", "512k", "1.5Gi", "0.1", "999999999999999999", "8Ei", "999999999999999999Ei", "0"),
    ANY_QUANTITY: ("100m", "1", "2Gi", ".5", "1e3", "0", "500m", "999999999999999999Ei", "1u", "1.", "3E2"),
    NAME: ("a", "x-1", "0", "nobody", "a" * 40, "kvs-m-0", "default"),
    DOTTED_NAME: ("a", "keys", "a.b", "nobody.example", "kvstrata-domain", "kvs-m-0-bundle", "x" * 63),
    TENANT: ("acme", "a", "t" * 64, "with space inside", "a@b/c:d", "Über", *UNICODE),
    DURATION: ("10s", "1m", "1h", "24h", "90m", "1h30m5s", "30s", "999999h", "0s", "5m", "10m", "7d", "1.5h", "0.01d"),
    r"^/[^\p{C}]*$": ("/", "/opt/model", "/a b/ü", "/" + "d" * 100),
    r"^[^\p{C}]+$": ("x", "a b", *UNICODE),
    r"^[^\s\p{C}]+$": ("x", "user-1", "Ünï"),
    "^[a-zA-Z0-9][-a-zA-Z0-9._/:@]*$": ("engine:1", "r.example:5000/a/b@sha256:" + "0" * 64, "a", "A_b:latest"),
    "^[A-Za-z_][A-Za-z0-9_]*$": ("A", "_", "HF_HUB_OFFLINE", "OMP_NUM_THREADS", "HF_TOKEN"),
    "^[-._a-zA-Z0-9]+$": ("a", "-", "..", "keys.json", "ca.crt", "A" * 60),
    "^([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?$": ("", "a", "v1.2_x", "Z" * 63),
    r"^https://[^\p{Z}\p{C}]+$": ("https://a", "https://issuer.example/x?y#z", "https://[::1]:8443"),
    "^[A-Za-z0-9]([-A-Za-z0-9._/]*[A-Za-z0-9])?$": ("main", "a/b", "0123abc", "v1.0"),
    "^[A-Za-z0-9][-A-Za-z0-9_.:/]*$": ("a", "org/model", "tiny", "m:1", "M_x"),
    "^[A-Za-z0-9][-A-Za-z0-9]*$": ("X-Tenant", "a", "Authorization", "Host"),
    "^[A-Za-z0-9][-A-Za-z0-9._/]*$": ("a", "org/model", "x.y", "A-1"),
    "^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$": ("a", "example.com/x", "A.b"),
    r"^([A-Za-z0-9]([-A-Za-z0-9.]*[A-Za-z0-9])?|\[[0-9A-Fa-f:.]+\]):[0-9]{1,5}$": (
        "127.0.0.1:1", "[::1]:1", "localhost:1", "127.0.0.1:99999", "127.0.0.1:0",
    ),
    r"^https://([A-Za-z0-9]([-A-Za-z0-9.]*[A-Za-z0-9])?|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?$": (
        "https://127.0.0.1:1", "https://[::1]:1", "https://localhost", "https://127.0.0.1:99999",
    ),
    r"^[a-z][-+.a-z0-9]*://([-.a-z0-9]+|\[[:.0-9a-f]+\])(:[0-9]{1,5})?$": (
        "https://chat.example.com", "http://localhost:3000", "http://[::1]:8080", "app://-",
    ),
    r"^(0|[1-9][0-9]{0,4}|(0|[1-9][0-9]?|100)%)$": ("0", "1", "25%", "100%", "99999"),
    "^[-A-Za-z0-9_.]+$": ("kvstrata", "-", "a.b_C"),
    "^[A-Za-z0-9_][-A-Za-z0-9_.]*(/[A-Za-z0-9_][-A-Za-z0-9_.]*)*$": ("transit", "keys/transit", "_", "a../b-"),
}  # fmt: skip
"""Text by the pattern that it matches. All of it passes the pattern; rules beyond it may refuse some."""

LIKELY: Mapping[str, tuple[str, ...]] = {
    QUANTITY: ("1Gi", "64Mi", "1", "2G", "1500k"),
    ANY_QUANTITY: ("100m", "1", "2Gi"),
    DURATION: ("10s", "30s", "1m", "10m", "30m", "1h"),
}
"""Values that a thoughtful user would write, where unusual ones would mostly be refused."""

LABEL_KEYS = ("a", "example.com/x", "team", "A.b")
ARGUMENTS = (
    "--enforce-eager",
    "--block-size",
    "32",
    "--max-num-seqs=8",
    "--seed",
    "ü",
    "--port",
    "x y",
    "--dtype=half",
)
FREE_TEXT = ("", "x", "You are a helpful assistant.", *UNICODE, "line\nbreak\tand tab", '{"json": [1]}', "w" * 2000)
AFFINITY: tuple[Mapping[str, Any], ...] = (
    {},
    {"nodeAffinity": {}},
    {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}},
    {"nonsense": 1},
)
SPREAD: tuple[Mapping[str, Any], ...] = (
    {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway"},
    {},
    {"maxSkew": 0, "topologyKey": "", "whenUnsatisfiable": "Never"},
)
ANYTHING: tuple[Mapping[str, Any], ...] = (
    {},
    {"a": None},
    {"deep": {"er": [1, {"x": "ü"}]}},
    {"type": "function", "function": {"name": "f"}},
)
