"""Reasons on a CacheTier."""

from __future__ import annotations

from kvstrata.api.reasons import texts
from kvstrata.api.reasons.texts import Reason


class TierReason(Reason):
    """Reasons on a CacheTier."""

    PROGRESSING = texts.PROGRESSING
    INVALID_SPEC = texts.INVALID_SPEC
    SECRET_NOT_FOUND = texts.SECRET_NOT_FOUND
    SECRET_UNREADABLE = "SecretUnreadable", "The password in a Secret that is named is not UTF-8 text."
    READY = "TierReady", "The tier can be used."
    IN_POD = "InPod", "The tier lives inside the pods of the models that list it."
    KEYS_HELD = "KeysHeld", "Every serving pod encrypts, and has the keys of all keyspaces of its policy."
    AWAITING_KEYS = texts.AWAITING_KEYS
    PLAINTEXT_LEFT = (
        "PlaintextLeft",
        "A folder of a node may hold plain files of a tier that was deleted; pods read it and delete them.",
    )
    ENCRYPTION_DISABLED = "EncryptionDisabled", "The spec says encryption: Disabled."
    TIERS_CONFLICT = texts.TIERS_CONFLICT
    NAME_CONFLICT = texts.NAME_CONFLICT
    PREDECESSOR_REMAINS = (
        "PredecessorRemains",
        "Something is left of a deleted CacheTier of the same name, which Kubernetes removes; then this one's is made.",
    )
    CHILD_REFUSED = texts.CHILD_REFUSED
    BUDGETS_NOT_ENFORCED = texts.BUDGETS_NOT_ENFORCED
    GUARANTEES_FIT = "GuaranteesFit", "All declared guarantees together fit into what blocks may take of the capacity."
    GUARANTEES_EXCEED_CAPACITY = texts.GUARANTEES_EXCEED_CAPACITY
    GUARANTEES_WAITING = (
        "GuaranteesWaiting",
        "Guarantees that do not fit any more wait for room; those that are admitted fit.",
    )
    EVICTS_OWN_BLOCKS = "EvictsOwnBlocks", "A scope that finds no room makes it among its own blocks."
    SERVER_TOO_SMALL = "ServerTooSmall", "The server may hold less than blocks may take of the tier's capacity."
    REMOVED_IN_TIME = "RemovedInTime", "Pods remove blocks that have reached the tier's maxRetention."
    ROOM_LEFT = "RoomLeft", "The server has memory for new blocks, or makes room itself."
    OUT_OF_MEMORY = "OutOfMemory", "The server holds all that it may and refuses new blocks for now."
    DISK_FULL = "DiskFull", "The disk of a pod's files has no room for new blocks for now."
    DISK_READ_ONLY = "DiskReadOnly", "The file system of a pod's files takes no writing."
    FLOOR_REACHED = "FloorReached", "Files may take less than the capacity, because the file system has little left."
    SERVERS_DO_NOT_START = (
        "ServersDoNotStart",
        "A server's pod does not come up: it cannot be scheduled or pulled, or its container ends; the message is what "
        "Kubernetes and the container say.",
    )
    POD_STUCK = (
        "PodStuckTerminating",
        "A server's pod that is being deleted is still there long after its grace period, as on a node that is lost; "
        "the message says what to do.",
    )
    REACHABLE = "Reachable", "The tier's servers answer, or pods use its files."
    PODS_DISCONNECTED = "PodsDisconnected", "Pods do not reach the tier's server, or do not use its files."
    UNREACHABLE = "Unreachable", "There is no route to the tier's server."
    CONNECTION_REFUSED = "ConnectionRefused", "Nothing listens at the tier's address."
    TIMEOUT = "Timeout", "The tier's server did not answer in time."
    NO_SUCH_HOST = "NoSuchHost", "The host of the tier's address cannot be resolved."
    TLS_FAILED = "TLSFailed", "The server does not speak TLS as expected."
    CERTIFICATE_REFUSED = "CertificateRefused", "The server's certificate is not trusted or names another host."
    WRONG_PASSWORD = "WrongPassword", "The server refuses the password."
    PASSWORD_REQUIRED = "PasswordRequired", "The server asks for a password and none is configured."
    PASSWORD_UNEXPECTED = "PasswordUnexpected", "A password is configured and the server has none."
    NO_PERMISSION = "NoPermission", "The user may not ask the server for its state."
    LOADING = "Loading", "The server is loading its data."
    NOT_REDIS = "NotRedis", "What answers at the tier's address is no Redis server."
    DISCONNECTED = "Disconnected", "The server closed the connection; it may expect TLS."
    INVALID_ENDPOINT = "InvalidEndpoint", "The tier's address is not of the form host:port."
    INVALID_CERTIFICATE_AUTHORITY = "InvalidCertificateAuthority", "The certificate authority is not PEM."
    ERROR = "Error", "The server answered with an error."
    SUITABLE = "Suitable", "The external servers passed every check."
    CLUSTER_MODE_MISMATCH = (
        "ClusterModeMismatch",
        "A server is in cluster mode and spec.redis.external.cluster is not true, or the other way round.",
    )
    READ_ONLY_REPLICA = "ReadOnlyReplica", "The server at the tier's address is a replica, which takes no blocks."
    TOO_OLD = "TooOld", "A server is older than Redis 7.0, whose commands and script rules are needed."
    MISSING_PERMISSIONS = (
        "MissingPermissions",
        "The user may not run a command that pods need, or not on the domain's keys; the message names which.",
    )
    SLOTS_COVERED = "SlotsCovered", "All slots of the cluster have a server that answers."
    REPLICAS_IN_STEP = "ReplicasInStep", "Every primary has all its replicas in step."
    REPLICAS_MISSING = "ReplicasMissing", "Servers of the cluster are missing, do not answer, or are not in step."
    COMMAND_FAILED = "CommandFailed", "A server of the cluster refused a command; it is tried again."
    SLOTS_UNCOVERED = "SlotsUncovered", "Slots of the cluster belong to no server."
    EVERYTHING_LOST = (
        "EverythingLost",
        "All servers of the cluster lost what they held, so that it is formed anew, empty: blocks are misses until "
        "they are stored again.",
    )
    SERVERS_AWAY = "ServersAway", "Servers that have slots of the cluster do not answer the operator."
    NOT_NOEVICTION = (
        "NotNoeviction",
        "A server's maxmemory-policy is not noeviction, so it may delete any tenant's blocks, guaranteed or not. A "
        "warning: the tier is used.",
    )
    MEMORY_UNBOUNDED = (
        "MemoryUnbounded",
        "A server has no maxmemory, so nothing but the node's memory bounds it. A warning: the tier is used.",
    )
    PASSWORDS_SET = "PasswordsSet", "Every server admits the passwords of the Secret and no others."
    PASSWORDS_OVERLAP = (
        "PasswordsOverlap",
        "New passwords are used, and the previous ones still admitted, because pods read files of Secrets late.",
    )
    PASSWORDS_OVERDUE = "PasswordsOverdue", "A rotation is due and waits for a server that does not answer."
    ROTATING_PASSWORDS = "RotatingPasswords", "Servers come to admit new passwords, which nobody uses yet."
    SETTING_USERS = "SettingUsers", "A server has other users or passwords than the Secret says, and is told."
    PASSWORDS_LOST = (
        "PasswordsLost",
        "A server was started with passwords that no Secret holds any more, so that its pod is replaced.",
    )
    CERTIFICATE_SHOWN = "CertificateShown", "Every server shows the certificate of the Secret."
    LOADING_CERTIFICATE = "LoadingCertificate", "A server does not show the certificate of the Secret yet, and is told."
    CHANGING_AUTHORITY = "ChangingAuthority", "Clients trust two authorities while one takes the other's place."
    CERTIFICATE_EXPIRED = "CertificateExpired", "The certificate in the Secret is not valid any more."
    INVALID_TLS_SECRET = (
        "InvalidTlsSecret",
        "The Secret with the servers' certificate lacks a key, or what is in it does not fit together.",
    )
