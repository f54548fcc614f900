"""Arguments of the commands that are about an endpoint that exists."""

from __future__ import annotations

import argparse


def add_endpoint(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="the endpoint's name")
    parser.add_argument("--region", help="AWS region (default: what boto3 is set to)")
