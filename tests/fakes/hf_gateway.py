"""The hub's S3 gateway for storage buckets, as its page describes it; objects are kept in memory.

Buckets lie below their namespace; access keys begin with HFAK; listings are of version 2 and by
"/"; user metadata and chunked uploads are refused; a download is a redirect to another host, which
wants no credentials; conditions hold for PutObject and not for GetObject.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import secrets
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.etree import ElementTree
from xml.sax.saxutils import escape

ACCESS_KEY, SECRET_KEY = "HFAKtest", "gateway-secret"
PAGE = 1000


@dataclass
class Gateway:
    """A running gateway with one bucket.

    Attributes:
        endpoint: without a namespace.
        downloads: the other host.
        objects: by key, the bytes and when they were written.
        redirects: how many downloads were sent to the other host.
        refused: what the gateway does not do, and was asked for.
    """

    namespace: str
    bucket: str
    endpoint: str = ""
    downloads: str = ""
    objects: dict[str, tuple[bytes, float]] = field(default_factory=dict)
    tickets: dict[str, bytes] = field(default_factory=dict)
    redirects: int = 0
    refused: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def env(self) -> dict[str, str]:
        """What a store needs in its environment."""
        return {
            "DILOCO_HF_S3_ENDPOINT": self.endpoint,
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
        }

    def uri(self, prefix: str) -> str:
        return f"hf://buckets/{self.namespace}/{self.bucket}/{prefix}"


@contextlib.contextmanager
def fake_gateway(namespace: str = "our-team", bucket: str = "runs") -> Iterator[Gateway]:
    """Run a gateway, and the host it redirects to, until the block ends."""
    gateway = Gateway(namespace, bucket)
    handlers = [type(f"_{one.__name__}", (one,), {"gateway": gateway}) for one in (_Front, _Cdn)]
    servers = [ThreadingHTTPServer(("127.0.0.1", 0), handler) for handler in handlers]
    gateway.endpoint, gateway.downloads = (
        f"http://127.0.0.1:{server.server_address[1]}" for server in servers
    )
    threads = [threading.Thread(target=server.serve_forever, args=(0.05,)) for server in servers]
    for server, thread in zip(servers, threads, strict=True):
        server.daemon_threads = True
        thread.start()
    try:
        yield gateway
    finally:
        for server, thread in zip(servers, threads, strict=True):
            server.shutdown()
            thread.join(10)
            server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    gateway: Gateway

    def log_message(self, *_: object) -> None:
        pass

    def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        if "Content_Length" not in headers:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def error(self, status: int, code: str) -> None:
        text = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{code}</Message></Error>"
        self.answer(status, text.encode(), Content_Type="application/xml")


class _Cdn(_Handler):
    """The other host: serves what a ticket names, to whoever shows no credentials."""

    def do_GET(self) -> None:
        data = self.gateway.tickets.get(self.path.strip("/"))
        if data is None or "Authorization" in self.headers:
            self.error(403, "AccessDenied")
            return
        ranged = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        tag = f'"{hashlib.md5(data).hexdigest()}"'
        common = {"ETag": tag, "Last_Modified": formatdate(usegmt=True)}
        if ranged is None:
            self.answer(200, data, **common)
            return
        start, end = int(ranged[1]), min(int(ranged[2]), len(data) - 1)
        if start >= len(data):
            self.answer(416, Content_Range=f"bytes */{len(data)}")
            return
        part = data[start : end + 1]
        self.answer(206, part, Content_Range=f"bytes {start}-{end}/{len(data)}", **common)


class _Front(_Handler):
    """The gateway itself."""

    def do_GET(self) -> None:
        self._serve()

    do_HEAD = do_PUT = do_POST = do_DELETE = do_GET

    def _serve(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length)
        url = urlsplit(self.path)
        root = f"/{self.gateway.namespace}/{self.gateway.bucket}"
        path, query = unquote(url.path), parse_qs(url.query, keep_blank_values=True)
        key = path[len(root) + 1 :] if path.startswith(f"{root}/") else ""
        if f"Credential={ACCESS_KEY}/" not in self.headers.get("Authorization", ""):
            self.error(403, "InvalidAccessKeyId")
        elif path != root and not path.startswith(f"{root}/"):
            self.error(404, "NoSuchBucket")
        elif code := self._trouble(key, query):
            self.gateway.refused.append(f"{self.command} {self.path}: {code}")
            self.error(501, code)
        else:
            self._act(key, query, body)

    def _trouble(self, key: str, query: dict[str, list[str]]) -> str | None:
        """What the request asks for that the gateway does not do."""
        if any(name.lower().startswith("x-amz-meta-") for name in self.headers):
            return "UserMetadata"
        if "aws-chunked" in self.headers.get("Content-Encoding", ""):
            return "AwsChunked"
        odd = key.startswith("./") or key.endswith(("..", "/")) or "//" in key or "\\" in key
        if odd or "../" in key:
            return "InvalidKey"
        if self.command == "GET" and not key:
            if query.get("list-type") != ["2"]:
                return "ListObjectsV1"
            if query.get("delimiter", ["/"]) != ["/"]:
                return "Delimiter"
        return None

    def _act(self, key: str, query: dict[str, list[str]], body: bytes) -> None:
        match self.command:
            case "PUT":
                self._put(key, body)
            case "HEAD" | "GET" if key:
                self._get(key)
            case "GET":
                self._list(query)
            case "DELETE":
                with self.gateway.lock:
                    self.gateway.objects.pop(key, None)
                self.answer(204)
            case _ if "delete" in query:
                self._delete(body)
            case _:
                self.error(501, "NotImplemented")

    def _put(self, key: str, body: bytes) -> None:
        with self.gateway.lock:
            if self.headers.get("If-None-Match") == "*" and key in self.gateway.objects:
                self.error(412, "PreconditionFailed")
                return
            self.gateway.objects[key] = (body, time.time())
        self.answer(200, ETag=f'"{hashlib.md5(body).hexdigest()}"')

    def _get(self, key: str) -> None:
        found = self.gateway.objects.get(key)
        if found is None:
            self.error(404, "NoSuchKey")
            return
        data, at = found
        if self.command == "HEAD":
            self.answer(
                200,
                Content_Length=str(len(data)),
                ETag=f'"{hashlib.md5(data).hexdigest()}"',
                Last_Modified=formatdate(at, usegmt=True),
            )
            return
        ticket = secrets.token_hex(8)
        with self.gateway.lock:
            self.gateway.tickets[ticket] = data
            self.gateway.redirects += 1
        self.answer(302, Location=f"{self.gateway.downloads}/{ticket}")

    def _list(self, query: dict[str, list[str]]) -> None:
        prefix = query.get("prefix", [""])[0]
        after = query.get("continuation-token", query.get("start-after", [""]))[0]
        with self.gateway.lock:
            objects = dict(self.gateway.objects)
        entries: dict[str, str] = {}
        for key in sorted(objects):
            if not key.startswith(prefix) or key <= after:
                continue
            folder, slash, _ = key[len(prefix) :].partition("/")
            if "delimiter" in query and slash:
                name = f"{prefix}{folder}/"
                if name > after:
                    entries[name] = (
                        f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>"
                    )
                continue
            data, at = objects[key]
            entries[key] = _contents(key, data, at)
        names = sorted(entries)[:PAGE]
        more = len(entries) > PAGE
        last = escape(names[-1]) if more else ""
        token = f"<NextContinuationToken>{last}</NextContinuationToken>"
        text = (
            '<?xml version="1.0"?><ListBucketResult>'
            f"<KeyCount>{len(names)}</KeyCount><IsTruncated>{str(more).lower()}</IsTruncated>"
            f"{token if more else ''}{''.join(entries[name] for name in names)}</ListBucketResult>"
        )
        self.answer(200, text.encode(), Content_Type="application/xml")

    def _delete(self, body: bytes) -> None:
        root: Any = ElementTree.fromstring(body)
        keys = [element.text or "" for element in root.iter() if element.tag.endswith("Key")]
        with self.gateway.lock:
            for key in keys:
                self.gateway.objects.pop(key, None)
        deleted = "".join(f"<Deleted><Key>{escape(key)}</Key></Deleted>" for key in keys)
        text = f'<?xml version="1.0"?><DeleteResult>{deleted}</DeleteResult>'
        self.answer(200, text.encode(), Content_Type="application/xml")


def _contents(key: str, data: bytes, at: float) -> str:
    when = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(at))
    return (
        f"<Contents><Key>{escape(key)}</Key><LastModified>{when}</LastModified>"
        f'<ETag>"{hashlib.md5(data).hexdigest()}"</ETag><Size>{len(data)}</Size>'
        "<StorageClass>STANDARD</StorageClass></Contents>"
    )
