"""What S3, Google Cloud Storage and Azure answer, in this package's errors.

obstore tells a missing object, a missing permission and a failed precondition apart on most
requests, but not on listings, and everything else is one ``GenericError``. Its text, however,
always quotes the HTTP status and the body, so both are read from there.
"""

from __future__ import annotations

import re
from typing import Final

from diloco_cloud.errors import (
    AlreadyExistsError,
    CorruptError,
    DeniedError,
    ExpiredCredentialsError,
    NotFoundError,
    StoreError,
    ThrottledError,
    UnreachableError,
)
from diloco_cloud.store.redaction import redacted

_STATUS: Final = re.compile(r"status code: (\d{3})")
_CODE: Final = re.compile(r"<Code>([^<]{1,80})</Code>")
#: DeleteObjects answers 200 and names the errors of single keys; obstore quotes their codes.
_BULK_CODE: Final = re.compile(r"\b(AccessDenied|SlowDown|InternalError|ServiceUnavailable)\b")
#: Where each cloud hands out the credentials of the machine itself.
_METADATA_SERVICE: Final = re.compile(r"//(169\.254\.\d+\.\d+|metadata\.google\.internal)[/:]")

_BUCKET: Final = re.compile(r"hf://buckets/[^/]+/[^/]+|\w+://[^/]+")

_THROTTLED: Final = frozenset(
    # The last two are S3's answers to writes that race on one key: nothing was written.
    {"SlowDown", "ServerBusy", "TooManyRequests", "RequestLimitExceeded"}
    | {"ConditionalRequestConflict", "OperationAborted"}
)
_UNREACHABLE: Final = frozenset({"RequestTimeout", "InternalError", "ServiceUnavailable"})
_NO_BUCKET: Final = frozenset({"NoSuchBucket", "ContainerNotFound"})
_FIX_REGION: Final = "Set AWS_REGION to the bucket's region."
_EXPIRED: Final = frozenset(
    {"ExpiredToken", "ExpiredTokenException", "RequestExpired", "TokenRefreshRequired"}
)
_DENIED: Final = {
    "InvalidToken": "The session token does not belong to these credentials; renew them.",
    "InvalidAccessKeyId": "The store does not know this access key; check the credentials.",
    "SignatureDoesNotMatch": "The secret key does not belong to the access key.",
    "RequestTimeTooSkewed": "This machine's clock is wrong; synchronise it.",
    "AuthorizationHeaderMalformed": _FIX_REGION,
    "PermanentRedirect": _FIX_REGION,
    "IllegalLocationConstraintException": _FIX_REGION,
}
_FIX_BUCKET: Final = "Create the bucket first, or correct its name in the store's URI."
#: By scheme, where credentials come from.
_CREDENTIALS: Final = {
    "s3": "Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or log in (`aws configure`, "
    "`aws sso login`) and set AWS_PROFILE.",
    "gs": "Set GOOGLE_APPLICATION_CREDENTIALS to a key file, or run "
    "`gcloud auth application-default login`.",
    "az": "Set AZURE_STORAGE_ACCOUNT_NAME, and AZURE_STORAGE_ACCOUNT_KEY or "
    "AZURE_STORAGE_SAS_TOKEN; or run `az login` and set AZURE_USE_AZURE_CLI=true.",
    "hf": "Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY to S3 keys of the hub, which has no use "
    "for HF_TOKEN here: https://huggingface.co/docs/hub/storage-buckets-s3",
}


def store_error(error: Exception, subject: str) -> StoreError:
    """The ``StoreError`` that says what obstore's ``error`` means for ``subject`` (a URI)."""
    from obstore import exceptions

    text = str(error).split("\n\nDebug source:", 1)[0]
    code = _code(text)
    status = int(found.group(1)) if (found := _STATUS.search(text)) else 0
    if "redirect without LOCATION" in text:  # how Amazon sends one away from the wrong region
        status = 301
    if _METADATA_SERVICE.search(text) and status != 429 and status < 500:
        return DeniedError(f"no credentials for {subject}", fix=credentials_fix(subject))
    if status or code:
        return from_response(status, code, subject)
    if isinstance(error, FileNotFoundError):
        return NotFoundError(f"{subject} does not exist")
    if isinstance(error, (exceptions.AlreadyExistsError, exceptions.PreconditionError)):
        return AlreadyExistsError(f"{subject} already exists")
    if isinstance(error, (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError)):
        return DeniedError(f"no access to {subject}", fix=_access_fix(subject))
    if "HTTP error" in text or isinstance(error, exceptions.JoinError):
        return UnreachableError(
            f"{subject} cannot be reached ({_transport(str(error))})",
            fix="Check the network and the endpoint (AWS_ENDPOINT_URL, if set).",
        )
    return StoreError(f"{subject}: {redacted(text.split(chr(10), 1)[0])[:300]}")


def is_missing_bucket(error: Exception) -> bool:
    """Whether ``error``, from obstore, is about the bucket rather than an object in it."""
    return _code(str(error)) in _NO_BUCKET


def _code(text: str) -> str:
    """The cloud's own word for an error, or ""."""
    found = _CODE.search(text) or _BULK_CODE.search(text)
    return found.group(1) if found else ""


def from_response(status: int, code: str, subject: str) -> StoreError:
    """The ``StoreError`` for an HTTP status (0 if unknown) and the cloud's own code, or ""."""
    said = f"HTTP {status} {code}".strip() if status else code
    if code in _THROTTLED or status == 429 or (status == 503 and code not in _UNREACHABLE):
        return ThrottledError(f"{subject}: the store asks to slow down ({said})")
    if code in _UNREACHABLE or status >= 500 or status == 408:
        return UnreachableError(f"{subject} cannot be reached ({said})")
    if code in _EXPIRED:
        return ExpiredCredentialsError(
            f"the credentials for {subject} have expired ({said})",
            fix=f"Renew them. {credentials_fix(subject)}",
        )
    if code in _DENIED or code == "AccessDenied" or status in (301, 307, 401, 403):
        otherwise = _FIX_REGION if status in (301, 307) else _access_fix(subject)
        return DeniedError(f"no access to {subject} ({said})", fix=_DENIED.get(code, otherwise))
    if code in _NO_BUCKET:
        bucket = found.group() if (found := _BUCKET.match(subject)) else subject
        return NotFoundError(f"the bucket {bucket} does not exist", fix=_FIX_BUCKET)
    if status == 404:
        return NotFoundError(f"{subject} does not exist")
    if status in (409, 412):
        return AlreadyExistsError(f"{subject} already exists")
    if status == 416:
        return CorruptError(f"{subject} ends before the range asked for")
    return StoreError(f"{subject}: the store refused the request ({said})")


def credentials_fix(subject: str) -> str:
    """Where credentials for ``subject`` (a URI) come from, as an instruction."""
    scheme = subject.partition("://")[0]
    return _CREDENTIALS.get(scheme, "Set the credentials in the environment.")


def _access_fix(subject: str) -> str:
    may = "Whoever has these credentials must read, write, list and delete below this prefix."
    return f"{may} {credentials_fix(subject)}"


def _transport(debug: str) -> str:
    """Why a connection failed, from the debug text of reqwest and hyper."""
    for sign, reason in (
        ("ConnectionRefused", "connection refused"),
        ("dns error", "the name does not resolve"),
        ("kind: Timeout", "timeout"),
        ("TimedOut", "timeout"),
        ("ConnectionReset", "connection reset"),
        ("ertificate", "the certificate is not trusted"),
    ):
        if sign in debug:
            return reason
    return "connection failed"
