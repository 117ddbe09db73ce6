"""Engine arguments and variables that belong to the operator.

They decide which clients reach the engine, which cache it uses and under which identity its blocks are stored. With
them a user could bypass the gate or the isolation of tenants, so they are refused at admission.
"""

from __future__ import annotations

_OWNED = (
    ("--host --port --uds --grpc --grpc-port", "the engine listens only for the gate"),
    ("--headless", "the engine listens for the gate"),
    ("--root-path", "the gate chooses the paths that it forwards"),
    ("--middleware", "the operator's is the only middleware"),
    (
        "--ssl-keyfile --ssl-certfile --ssl-ca-certs --ssl-cert-reqs --ssl-ciphers --enable-ssl-refresh",
        "TLS ends at the gate: set gate.tls",
    ),
    ("--api-key", "the gate authenticates: set gate.authentication"),
    ("--hf-token", "secrets do not belong into arguments: set model.source.hub.tokenSecretRef"),
    ("--config", "a file could set any other flag of this list"),
    ("--model", "set model.source"),
    ("--served-model-name", "set model.name"),
    ("--revision --code-revision", "set model.revision"),
    ("--tokenizer", "set model.tokenizer"),
    ("--tokenizer-revision", "set model.revision"),
    ("--dtype", "set model.dtype"),
    ("--max-model-len", "set model.maxModelLen"),
    ("--enable-lora --lora-modules --default-mm-loras", "LoRA adapters are not served"),
    ("--weight-transfer-config", "weights that change while the engine runs would keep their cache identity"),
    ("--tensor-parallel-size -tp", "set engine.tensorParallelSize"),
    ("--gpu-memory-utilization --device-memory-utilization", "set engine.gpuMemoryUtilizationPercent"),
    ("--kv-cache-dtype", "set engine.kvCacheDtype"),
    (
        "--kv-transfer-config --kv-events-config --ec-transfer-config",
        "the operator connects the engine to its cache server",
    ),
    ("--kv-offloading-size --kv-offloading-backend", "list a CacheTier of medium CPU instead"),
    ("--enable-prefix-caching --no-enable-prefix-caching", "set reuse.mode"),
    ("--prefix-caching-hash-algo", "the operator chooses the hash that isolation depends on"),
)
OWNED_FLAGS: dict[str, str] = {flag: remedy for flags, remedy in _OWNED for flag in flags.split()}
"""Each flag that engine.args may not contain, and the remedy. Written with dashes; underscores mean the same."""

OWNED_ENV = frozenset({
    "HF_TOKEN", "HF_TOKEN_PATH", "HOME", "HUGGING_FACE_HUB_TOKEN", "LMCACHE_TRACK_USAGE", "PYTHONHASHSEED",
    "PYTHONPATH", "VLLM_ALLOW_RUNTIME_LORA_UPDATING", "VLLM_API_KEY", "VLLM_HOST_IP", "VLLM_SERVER_DEV_MODE",
    "VLLM_USE_RUST_FRONTEND",
})  # fmt: skip
"""Variables that engine.env may not contain."""


def owned_flag(argument: str) -> str | None:
    """The owned flag that an engine argument sets, or None.

    ``--served_model_name=x`` and ``--kv-transfer-config.kv_role`` set ``--served-model-name`` and
    ``--kv-transfer-config``: the engine takes underscores for dashes and splits at the first equals sign or dot.
    Beginnings of an owned flag count too, because vLLM's parser accepts unambiguous abbreviations.
    """
    if not argument.startswith("-"):
        return None
    flag = argument.split("=")[0].split(".")[0].replace("_", "-")
    return next((owned for owned in OWNED_FLAGS if owned.startswith(flag)), None)
