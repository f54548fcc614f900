"""Random identifiers of requests, answers and shared memory, drawn without a system call but for secrets."""

from __future__ import annotations

import random
import secrets


def new_uuid() -> str:
    """Draw a random UUID (version 4) without a system call, for which a thread may have to wait its turn again."""
    digits = new_digits()
    return f"{digits[:8]}-{digits[8:12]}-4{digits[13:16]}-a{digits[17:20]}-{digits[20:]}"


def new_digits() -> str:
    """Draw 128 random bits as 32 hexadecimal digits."""
    return f"{random.getrandbits(128):032x}"


def new_secret() -> str:
    """Draw 128 bits, as digits, that nobody can guess from others: for ids by which something is read."""
    return secrets.token_hex(16)
