"""What a run's requests and traffic cost, at the providers' list prices.

US dollars, standard storage class, a region in the United States, first tier, no free allowance
and no discount: enough to compare plans and to see an order of magnitude, not an invoice. A store
that nobody publishes prices for (a directory, MinIO, an S3-compatible service not listed here) has
none, and no number is made up for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from diloco_cloud.store.metered import Usage
from diloco_cloud.store.uris import plain_uri

#: What S3, Cloud Storage and Azure call a GB on a bill.
GB: Final = 2**30
_MONTH_S: Final = 30 * 24 * 3600.0

#: The price class of each call of the store protocol. Refused creates and absent objects are billed
#: as the request that they answer (S3 and R2 say so); deleting is free everywhere listed here.
_CLASSES: Final[Mapping[str, str]] = {
    "create": "write",
    "put": "write",
    "list": "list",
    "list_dirs": "list",
    "get": "read",
    "get_range": "read",
    "head": "read",
}


@dataclass(frozen=True, kw_only=True)
class Prices:
    """One provider's list prices, in dollars.

    Attributes:
        provider: its name.
        write, list_, read: of one request that writes an object, lists up to 1000, or reads one
            (or a part of it, or its metadata).
        egress_gb: of a GB read from outside the provider's network; reading from the bucket's own
            region is free with all of them, and so is writing from anywhere.
        storage_gb_month: of keeping a GB for 30 days.
        source, seen: where the figures stand, and when they were looked up.
    """

    provider: str
    write: float
    list_: float
    read: float
    egress_gb: float
    storage_gb_month: float
    source: str
    seen: str

    def requests(self, counts: Mapping[str, int]) -> float:
        """Dollars for calls of the store protocol.

        Args:
            counts: calls by method name, as :attr:`Usage.requests` has them.
        """
        price = {"write": self.write, "list": self.list_, "read": self.read}
        return sum(counts.get(method, 0) * price[kind] for method, kind in sorted(_CLASSES.items()))

    def egress(self, nbytes: float) -> float:
        """Dollars for bytes read from outside the provider's network."""
        return nbytes / GB * self.egress_gb

    def storage(self, nbytes: float, seconds: float) -> float:
        """Dollars for keeping bytes for some time."""
        return nbytes / GB * seconds / _MONTH_S * self.storage_gb_month


#: By scheme of the store's URI; "r2" stands for ``s3://`` at Cloudflare's endpoint.
LISTED: Final[Mapping[str, Prices]] = {
    "s3": Prices(
        provider="Amazon S3 (us-east-1)",
        write=0.005 / 1000,
        list_=0.005 / 1000,
        read=0.0004 / 1000,
        egress_gb=0.09,
        storage_gb_month=0.023,
        # The page fills its tables in by script; AWS's price list API, as quoted by infracost's
        # test data (s3_bucket_test, data_transfer_test), has the same figures.
        source="https://aws.amazon.com/s3/pricing/",
        seen="2026-11-20",
    ),
    "gs": Prices(
        provider="Google Cloud Storage (us-central1)",
        write=0.005 / 1000,
        list_=0.005 / 1000,
        read=0.0004 / 1000,
        egress_gb=0.12,
        storage_gb_month=0.020,
        source="https://cloud.google.com/storage/pricing-examples",
        seen="2026-11-20",
    ),
    "az": Prices(
        provider="Azure Blob Storage (East US, hot, LRS)",
        write=0.055 / 10_000,
        list_=0.055 / 10_000,
        read=0.0044 / 10_000,
        egress_gb=0.087,
        storage_gb_month=0.0208,
        # Of the Retail Prices API, as quoted by infracost's test data (storage_account_test).
        source="https://azure.microsoft.com/pricing/details/storage/blobs/",
        seen="2026-11-20",
    ),
    "r2": Prices(
        provider="Cloudflare R2",
        write=4.50 / 1e6,
        list_=4.50 / 1e6,
        read=0.36 / 1e6,
        egress_gb=0.0,
        storage_gb_month=0.015,
        source="https://developers.cloudflare.com/r2/pricing/",
        seen="2026-11-20",
    ),
    "hf": Prices(
        provider="Hugging Face (private storage)",
        # Storage is all that its billing page has a price for; requests are limited in rate.
        write=0.0,
        list_=0.0,
        read=0.0,
        egress_gb=0.0,
        storage_gb_month=0.025,
        source="https://huggingface.co/docs/hub/billing",
        seen="2026-11-20",
    ),
}
_ALIASES: Final = {"s3a": "s3", "gcs": "gs"}


def list_prices(uri: str, endpoint: str | None = None) -> Prices | None:
    """The list prices of the store at ``uri``; None where none are known.

    Args:
        uri: of the store; ``faults+`` makes no difference.
        endpoint: where ``s3://`` is served from, if not by Amazon (``AWS_ENDPOINT_URL_S3``).
    """
    scheme, found, _ = plain_uri(uri).partition("://")
    scheme = _ALIASES.get(scheme.lower(), scheme.lower()) if found else ""
    if scheme == "s3" and endpoint:
        scheme = _behind(endpoint)
    return LISTED.get(scheme) if scheme != "r2" or endpoint else None


def cost(
    usage: Usage, uri: str, *, endpoint: str | None = None, same_region: bool = False
) -> float | None:
    """Dollars for what passed through a store; None where no prices are known.

    Args:
        usage: as a :class:`~diloco_cloud.store.metered.MeteredStore` counted it.
        uri: of the store that is to be paid, which may be another than the one that counted.
        endpoint: as in :func:`list_prices`.
        same_region: whether whoever read was in the bucket's own region.
    """
    prices = list_prices(uri, endpoint)
    if prices is None:
        return None
    traffic = 0.0 if same_region else prices.egress(usage.bytes_received)
    return prices.requests(usage.requests) + traffic


def _behind(endpoint: str) -> str:
    """The key in :data:`LISTED` of who serves S3's protocol at ``endpoint``, or ""."""
    try:
        host = urlsplit(endpoint).hostname or ""
    except ValueError:
        return ""
    if host.endswith(".r2.cloudflarestorage.com"):
        return "r2"
    # Not amazonaws.com.cn, which has prices of its own.
    return "s3" if host.endswith(".amazonaws.com") else ""
