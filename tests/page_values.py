"""Reads the values of a page that `asyncrl report` wrote."""

from __future__ import annotations

import base64
import gzip
import json
import re
from typing import Any


def values_of(page: str) -> dict[str, Any]:
    (packed,) = re.findall(r'id="values">([^<]*)</script>', page)
    found: dict[str, Any] = json.loads(gzip.decompress(base64.b64decode(packed)))
    return found
