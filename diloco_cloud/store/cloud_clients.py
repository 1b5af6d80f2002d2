"""From a bucket's name and the environment to obstore clients."""

from __future__ import annotations

import importlib.util
import logging
import os
import threading
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias, Union

from diloco_cloud.errors import ConfigError, DeniedError, DilocoError, MissingDependencyError
from diloco_cloud.store.cloud_errors import credentials_fix
from diloco_cloud.store.redaction import redacted

if TYPE_CHECKING:
    from obstore.auth.boto3 import Boto3CredentialProvider
    from obstore.store import AzureStore, GCSStore, S3Store

    from diloco_cloud.store.cloud import CloudStore

logger = logging.getLogger(__name__)

Client: TypeAlias = Union["S3Store", "GCSStore", "AzureStore"]

#: Extra of this package that brings the client, by scheme.
EXTRAS: Final = {"s3": "s3", "gs": "gcs", "az": "azure", "hf": "s3"}
#: The hub's S3 gateway; another one, such as a test's, is named by ``DILOCO_HF_S3_ENDPOINT``.
HF_ENDPOINT: Final = "https://s3.hf.co"

#: The client's own 30 s would cut a large transfer off; ``read_timeout`` bounds silence instead.
#: While a request's body is sent, though, the reply is silent by nature, so large writes have only
#: the overall limit (and TCP's own: 30 s without an acknowledgement).
_LONGEST: Final = timedelta(hours=1)
_SILENCE: Final = timedelta(seconds=60)
#: RetryingStore retries, and it alone.
_NO_RETRIES: Final[Any] = {"max_retries": 0}
_COMMON: Final[Mapping[str, Any]] = {
    "connect_timeout": timedelta(seconds=10),
    "timeout": _LONGEST,
    # Below the idle time after which servers close connections (S3: about 20 s).
    "pool_idle_timeout": timedelta(seconds=15),
}
#: How long obstore may take a profile's credentials for good; it asks again 5 minutes earlier.
#: botocore hands out none that end within 10 minutes, if it can help it.
_PROFILE_TTL: Final = timedelta(minutes=10)


class Clients(NamedTuple):
    """Two clients of one bucket.

    Attributes:
        small: for everything but large writes.
        bulk: for large writes; with a longer timeout.
    """

    small: Client
    bulk: Client


class Connection:
    """The clients of one bucket, made anew when the store calls their credentials expired.

    A client asks for credentials when those it has are due by this machine's clock, and reads the
    environment only once. A new one asks everywhere again.

    Args:
        connect: makes clients out of what the environment says now.
    """

    def __init__(self, connect: Callable[[], Clients]) -> None:
        self._connect = connect
        self._lock = threading.Lock()
        self._clients = connect()

    @property
    def clients(self) -> Clients:
        return self._clients

    def renew(self, expired: Clients) -> None:
        """Replace the clients, unless another thread has replaced ``expired`` already."""
        with self._lock:
            if self._clients is not expired:
                return
            try:
                self._clients = self._connect()
            except DilocoError as error:  # the old ones say best what is wrong
                logger.warning("no new credentials: %s", error.message)


def open_cloud_store(scheme: str, bucket: str, prefix: str) -> CloudStore:
    """The store at ``scheme://bucket/prefix``; sends nothing yet.

    Args:
        scheme: a key of :data:`EXTRAS`; for "hf", ``bucket`` is "namespace/name".
        bucket: an S3 or Google bucket, or an Azure container.
        prefix: "" or a key.

    Raises:
        MissingDependencyError: obstore is not installed.
        ConfigError: the environment does not describe a client.
        DeniedError: a profile is configured but holds no credentials.
    """
    try:
        from diloco_cloud.store.cloud import CloudStore
    except ImportError as error:
        raise MissingDependencyError(
            f"{scheme}:// needs the package obstore",
            fix=f"pip install 'diloco-cloud[{EXTRAS[scheme]}]'",
        ) from error
    uri = f"hf://buckets/{bucket}" if scheme == "hf" else f"{scheme}://{bucket}"
    store = CloudStore(Connection(lambda: _clients(scheme, bucket, uri)), uri)
    return store.child(prefix) if prefix else store


def _clients(scheme: str, bucket: str, uri: str) -> Clients:
    try:
        return Clients(
            small=_client(scheme, bucket, {"read_timeout": _SILENCE}),
            bulk=_client(scheme, bucket, {}),
        )
    except (ConfigError, DeniedError):
        raise
    except Exception as error:  # obstore has no one type for a bad configuration
        line = redacted(str(error).split("\n", 1)[0])
        raise ConfigError(
            f"{uri} cannot be opened: {line}",
            fix=f"{credentials_fix(uri)} Check the other variables of the store, too.",
        ) from None


def _client(scheme: str, bucket: str, options: Mapping[str, Any]) -> Client:
    from obstore.store import AzureStore, GCSStore, S3Store

    common = {"retry_config": _NO_RETRIES, "client_options": {**_COMMON, **options}}
    if scheme == "gs":
        return GCSStore(bucket, **common)
    if scheme == "az":
        return AzureStore(bucket, **common)
    namespace, _, name = bucket.rpartition("/")
    gateway = os.environ.get("DILOCO_HF_S3_ENDPOINT") or HF_ENDPOINT
    endpoint = f"{gateway}/{namespace}" if scheme == "hf" else _s3_endpoint()
    config: dict[str, Any] = {}
    if endpoint:
        # Path style, obstore's default, is what servers other than Amazon's understand.
        config["aws_endpoint_url_s3"] = endpoint
        common["client_options"]["allow_http"] = endpoint.startswith("http://")
    if scheme == "hf":
        config["region"] = "us-east-1"
    if "AWS_UNSIGNED_PAYLOAD" not in os.environ:
        # Hashing every body halves the rate; TLS and the chunks' checksums guard the bytes.
        config["unsigned_payload"] = True
    return S3Store(name, credential_provider=_profile(), **config, **common)


def _s3_endpoint() -> str | None:
    return os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or None


def _profile() -> Boto3CredentialProvider | None:
    """Credentials from ``~/.aws`` (profiles, SSO), which obstore cannot read and boto3 can.

    None where the environment or the machine itself gives them, which obstore does read.
    """
    environment = ("AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_SKIP_SIGNATURE")
    container = ("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "AWS_CONTAINER_CREDENTIALS_FULL_URI")
    if any(os.environ.get(name) for name in environment + container):
        return None
    files = (
        os.environ.get("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials"),
        os.environ.get("AWS_CONFIG_FILE", "~/.aws/config"),
    )
    if not any(Path(file).expanduser().is_file() for file in files):
        return None
    if importlib.util.find_spec("boto3") is None:
        return None
    from obstore.auth.boto3 import Boto3CredentialProvider

    try:
        return Boto3CredentialProvider(ttl=_PROFILE_TTL)
    except Exception as error:  # botocore has a class per way to be misconfigured
        raise DeniedError(
            f"the AWS profile gives no credentials ({type(error).__name__})",
            fix="Check AWS_PROFILE and ~/.aws, or set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY.",
        ) from None
