"""What AWS and its client raise, in our words and with what to do about it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from diloco_cloud.errors import ConfigError, DilocoError, LaunchError
from diloco_cloud.secrets import Secret, redacted

_LOGIN: Final = "Log in: `aws sso login`, `aws configure`, or AWS_PROFILE of one that is valid."


@dataclass(frozen=True)
class _Rule:
    """What to make of an error.

    Attributes:
        codes: AWS's names of it, or the names of botocore's classes.
        text: must be in its message.
        kind: ConfigError where trying again would not help; else LaunchError.
    """

    codes: tuple[str, ...]
    kind: type[DilocoError]
    fix: str
    text: str = ""


_DENIED: Final = ("AccessDenied", "AccessDeniedException", "UnauthorizedOperation")
_RULES: Final = (
    _Rule(
        _DENIED,
        ConfigError,
        "Whoever launches needs iam:PassRole on the execution role, for sagemaker.amazonaws.com.",
        text="PassRole",
    ),
    _Rule(_DENIED, ConfigError, "Allow it to whoever launches: docs/backends/sagemaker.md."),
    _Rule(
        ("ExpiredToken", "ExpiredTokenException", "RequestExpired"),
        LaunchError,
        _LOGIN,
    ),
    _Rule(
        (
            *("UnrecognizedClientException", "InvalidClientTokenId", "InvalidSignatureException"),
            *("SignatureDoesNotMatch", "IncompleteSignature", "MissingAuthenticationToken"),
            *("NoCredentialsError", "PartialCredentialsError", "ProfileNotFound"),
            *("CredentialRetrievalError", "SSOTokenLoadError", "UnauthorizedSSOTokenError"),
            *("TokenRetrievalError",),
        ),
        ConfigError,
        _LOGIN,
    ),
    _Rule(
        ("ResourceLimitExceeded",),
        LaunchError,
        "Ask for a higher quota in AWS Service Quotas (SageMaker, “… for training job usage”), "
        "launch fewer replicas, or choose another instance type.",
    ),
    _Rule(
        ("ResourceInUse",),
        ConfigError,
        "Names of training jobs are unique for ever: launch under another run id.",
    ),
    _Rule(
        ("ValidationException",),
        ConfigError,
        "The role must exist and let sagemaker.amazonaws.com assume it.",
        text="assume role",
    ),
    _Rule(("ValidationException", "ParamValidationError"), ConfigError, "Correct what it names."),
    _Rule(("NoRegionError",), ConfigError, "Set AWS_REGION, or add --backend-arg region=…"),
)
_AGAIN: Final = _Rule((), LaunchError, "Try again; what had been started was cancelled.")


def code_of(error: BaseException) -> str:
    """AWS's name of an error, or the name of botocore's class."""
    response: Any = getattr(error, "response", None)
    if isinstance(response, dict):
        return str(response.get("Error", {}).get("Code", ""))
    return type(error).__name__


def message_of(error: BaseException, secrets: Iterable[Secret] = ()) -> str:
    """One line, of at most 300 characters, without the values of ``secrets``."""
    response: Any = getattr(error, "response", None)
    said = response.get("Error", {}).get("Message") if isinstance(response, dict) else None
    text = " ".join(redacted(str(said or error), secrets).split()) or type(error).__name__
    return text if len(text) <= 300 else text[:299] + "…"


def is_unknown_job(error: BaseException) -> bool:
    """Whether AWS says that there is no such training job.

    Its model has a ResourceNotFound for that, and its service a ValidationException.
    """
    code = code_of(error)
    return code == "ResourceNotFound" or (
        code == "ValidationException" and "not found" in message_of(error).lower()
    )


def is_denied(error: BaseException) -> bool:
    """Whether these credentials may not do that."""
    return code_of(error) in _DENIED


def was_retried(error: BaseException) -> bool:
    """Whether the request had been sent before, so that the first may have been heard."""
    response: Any = getattr(error, "response", None)
    metadata = response.get("ResponseMetadata", {}) if isinstance(response, dict) else {}
    return int(metadata.get("RetryAttempts", 0)) > 0


def translated(error: BaseException, doing: str, secrets: Iterable[Secret] = ()) -> DilocoError:
    """The error a user is told.

    Args:
        error: of boto3.
        doing: what failed: "start replica 3".
        secrets: that were in the request; botocore and AWS quote what they do not like.
    """
    code, message = code_of(error), message_of(error, secrets)
    rule = next((r for r in _RULES if code in r.codes and r.text in message), _AGAIN)
    return rule.kind(f"could not {doing}: {message} ({code})", fix=rule.fix)
