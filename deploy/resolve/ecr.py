"""Addresses of images in ECR, in all partitions of AWS."""

from __future__ import annotations

import re

_SUFFIXES = {
    "cn-": "amazonaws.com.cn",
    "us-iso-": "c2s.ic.gov",
    "us-isob-": "sc2s.sgov.gov",
    "us-isof-": "csp.hci.ic.gov",
    "eu-isoe-": "cloud.adc-e.uk",
    "eusc-": "amazonaws.eu",
}
ECR_URI = re.compile(
    r"(?P<account>\d{12})\.dkr\.ecr\.(?P<region>[a-z0-9-]+)\.(?P<suffix>[a-z0-9.-]+)/(?P<repository>[^:@]+)"
    r"(?::(?P<tag>[^@]+))?(?:@(?P<digest>sha256:[0-9a-f]{64}))?"
)
"""An image in ECR, in any partition."""


def registry_suffix(region: str) -> str:
    """Return the domain of a region's registries."""
    return next((suffix for start, suffix in _SUFFIXES.items() if region.startswith(start)), "amazonaws.com")
