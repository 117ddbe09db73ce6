"""Key custody: where a domain's data keys are kept, how pods get them, and how they end.

`secret_custody` takes keys out of Secrets that `reconcile.secrets` wrote. With a KMS, `kms_worker` has keys drawn,
unwrapped and ended by `kms_custody`; `key_ring` holds them in the clear and `delivery` brings them to pods;
`kms_domains` ends what deleted domains leave.

A custody reports its own knowledge of a key's end only; what a receipt may claim is derived elsewhere
(`contract.receipt.claims`). Every call can be repeated: an operator that died in between asks for the same again and
comes to the same end. Epochs are secrets as far as these modules go: no message, log or name of a key holds one.
"""


class CustodyError(Exception):
    """The custody cannot do it now: what is named was not done, or is not known. The message holds no secret."""
