"""Reasons on a CacheTier."""

from __future__ import annotations

from kvstrata.contract import Meaningful


class TierReason(Meaningful):
    """Reasons on a CacheTier."""

    PROGRESSING = "Progressing", "The operator is still working towards the spec."
    SECRET_UNREADABLE = "SecretUnreadable", "The password in a named Secret is not UTF-8 text."
    READY = "TierReady", "The tier can be used."
    IN_POD = "InPod", "The tier lives inside the pods of the models that list it."
    KEYS_HELD = "KeysHeld", "Every serving pod encrypts, and has the keys of all keyspaces of its policy."
    PLAINTEXT_LEFT = (
        "PlaintextLeft",
        "A folder of a node may hold unencrypted files of a deleted tier; pods scan the folder and delete them.",
    )
    ENCRYPTION_DISABLED = "EncryptionDisabled", "The spec sets encryption: Disabled."
    PREDECESSOR_REMAINS = (
        "PredecessorRemains",
        "Objects of a deleted CacheTier of the same name still exist; this tier's are created once Kubernetes has "
        "removed them.",
    )
    GUARANTEES_FIT = (
        "GuaranteesFit",
        "All declared guarantees together fit into the part of the capacity that blocks may take.",
    )
    GUARANTEES_WAITING = (
        "GuaranteesWaiting",
        "Guarantees that do not fit any more wait for room; the admitted ones fit.",
    )
    EVICTS_OWN_BLOCKS = "EvictsOwnBlocks", "A scope that needs room evicts its own blocks."
    ADDRESS_NOT_ALLOWED = (
        "AddressNotAllowed",
        "The installation does not allow an address of the server, by externalRedis of the chart: loopback, link-local "
        "and the API server are not allowed by default.",
    )
    PASSWORD_IN_PLAIN_TEXT = (
        "PasswordInPlainText",
        "The server has a password and no TLS, and the installation does not allow that.",
    )
    FOLDER_NOT_ALLOWED = (
        "FolderNotAllowed",
        "The installation does not allow the folder of nodes to the namespace, by hostPaths of the chart.",
    )
    SERVER_TOO_SMALL = (
        "ServerTooSmall",
        "The server's memory limit is below the part of the tier's capacity that blocks may take.",
    )
    REMOVED_IN_TIME = "RemovedInTime", "Pods remove blocks that have reached the tier's maxRetention."
    ROOM_LEFT = "RoomLeft", "The server has memory for new blocks, or evicts blocks for them."
    OUT_OF_MEMORY = "OutOfMemory", "The server's memory limit is reached, and it refuses new blocks."
    DISK_FULL = "DiskFull", "The disk of a pod's files has no room for new blocks."
    DISK_READ_ONLY = "DiskReadOnly", "The file system of a pod's files is read-only."
    FLOOR_REACHED = (
        "FloorReached",
        "Files take less than the capacity, because the file system has little free space left.",
    )
    FASTER_THAN_PREFILL = "FasterThanPrefill", "Pods load blocks of the tier in less time than prefill takes."
    SLOWER_THAN_PREFILL = (
        "SlowerThanPrefill",
        "Pods compute most of the blocks that the tier holds, because loading them takes longer.",
    )
    SERVERS_DO_NOT_START = (
        "ServersDoNotStart",
        "A server's pod does not start: it cannot be scheduled, its image cannot be pulled, or its container exits; "
        "the message quotes Kubernetes and the container.",
    )
    POD_STUCK = (
        "PodStuckTerminating",
        "A deleted pod of a server exists long after its grace period, as on a lost node; the message has the remedy.",
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
    NO_PERMISSION = "NoPermission", "The user may not read the server's state."
    LOADING = "Loading", "The server is loading its data."
    NOT_REDIS = "NotRedis", "The service at the tier's address is not a Redis server."
    NOT_A_CLUSTER = "NotACluster", "The server does not run in cluster mode."
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
    TOO_OLD = "TooOld", "A server is older than Redis 7.0, and lacks required commands and script rules."
    MISSING_PERMISSIONS = (
        "MissingPermissions",
        "The user may not run a command that pods need, or not on the domain's keys; the message names the command.",
    )
    SLOTS_COVERED = "SlotsCovered", "All slots of the cluster have a server that answers."
    REPLICAS_IN_STEP = "ReplicasInStep", "Every primary has all its replicas in step."
    REPLICAS_MISSING = "ReplicasMissing", "Servers of the cluster are missing, do not answer, or are not in step."
    COMMAND_FAILED = "CommandFailed", "A server of the cluster refused a command; the operator repeats it."
    SLOTS_UNCOVERED = "SlotsUncovered", "Slots of the cluster belong to no server."
    EVERYTHING_LOST = (
        "EverythingLost",
        "All servers of the cluster lost their blocks, so it is formed again, empty: lookups miss until blocks are "
        "stored again.",
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
        "Clients use new passwords; servers still admit the previous ones, because pods read mounted Secrets late.",
    )
    PASSWORDS_OVERDUE = "PasswordsOverdue", "A rotation is due and waits for a server that does not answer."
    ROTATING_PASSWORDS = "RotatingPasswords", "Servers are being set to admit new passwords, which no client uses yet."
    SETTING_USERS = "SettingUsers", "A server's users or passwords differ from the Secret; the operator sets them."
    PASSWORDS_LOST = (
        "PasswordsLost",
        "A server was started with passwords that no Secret holds any more; its pod is being replaced.",
    )
    CERTIFICATE_SHOWN = "CertificateShown", "Every server or serving pod presents the certificate of the Secret."
    LOADING_CERTIFICATE = (
        "LoadingCertificate",
        "A server does not present the certificate of the Secret yet; the operator has it load the certificate.",
    )
    CHANGING_AUTHORITY = "ChangingAuthority", "Clients trust two authorities while one replaces the other."
    CERTIFICATE_EXPIRED = "CertificateExpired", "The certificate in the Secret is not valid any more."
    INVALID_TLS_SECRET = (
        "InvalidTlsSecret",
        "The Secret with the servers' certificate lacks a key, or its parts do not match.",
    )
