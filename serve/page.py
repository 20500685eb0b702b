"""The page at `/`: a few files, read once, served as they are.

Owns which files exist and their headers. Knows nothing of what they do. Invariants: only these
paths are ever read, none is made of what a client sent; the page may load and ask nothing from
another host, which its policy enforces.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files

from starlette.responses import Response

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'"
    " data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
FILES: Mapping[str, tuple[str, str]] = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page/api.js": ("api.js", "text/javascript; charset=utf-8"),
    "/page/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/page/run.js": ("run.js", "text/javascript; charset=utf-8"),
    "/page/page.css": ("page.css", "text/css; charset=utf-8"),
}


class Page:
    """The files in memory."""

    def __init__(self) -> None:
        folder = files("serve") / "page"
        self._contents = {
            path: ((folder / name).read_bytes(), kind) for path, (name, kind) in FILES.items()
        }

    def response(self, path: str) -> Response:
        """Give one file."""
        content, kind = self._contents[path]
        headers = {
            "content-type": kind,
            "content-security-policy": POLICY,
            "cache-control": "no-cache",
            "referrer-policy": "no-referrer",
        }
        return Response(content, headers=headers)
