"""Regular expressions for the formats of strings in JSON schemas, from the RFCs that JSON Schema refers to.

xgrammar's own expressions allow strings that are wrong, such as 01.2.3.4, 2026-02-30 or minute 60. The expressions here
may allow less than the RFC: no leap second, no address as an email's domain, no IPv4 address inside an IPv6 address.
Where possible, no two branches begin with the same character (see `characters.one_of`).
"""

from __future__ import annotations

from collections.abc import Mapping

# RFC 3339
_LEAP = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
_DAYS = (
    "(?:0(?:[13578]-(?:0[1-9]|[12][0-9]|3[01])|[469]-(?:0[1-9]|[12][0-9]|30)|2-(?:0[1-9]|1[0-9]|2[0-8]))"
    "|1(?:[02]-(?:0[1-9]|[12][0-9]|3[01])|1-(?:0[1-9]|[12][0-9]|30)))"
)
_DATE = f"(?:[0-9]{{4}}-{_DAYS}|{_LEAP}-02-29)"
_HOUR, _MINUTE = "(?:[01][0-9]|2[0-3])", "[0-5][0-9]"
_TIME = f"{_HOUR}:{_MINUTE}:{_MINUTE}(?:\\.[0-9]{{1,9}})?(?:Z|[+-]{_HOUR}:{_MINUTE})"
_DURATION_TIME = "T[0-9]+(?:S|M(?:[0-9]+S)?|H(?:[0-9]+M(?:[0-9]+S)?)?)"
_DURATION = f"P(?:[0-9]+(?:W|(?:D|M(?:[0-9]+D)?|Y(?:[0-9]+M(?:[0-9]+D)?)?)(?:{_DURATION_TIME})?)|{_DURATION_TIME})"

# RFC 1123 and RFC 5321. Their limits of the length are left out, because they make each step three times as slow.
_LABEL = "[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?"
_HOSTNAME = f"{_LABEL}(?:\\.{_LABEL})*"
_ATOM = "[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+"
_EMAIL = f"{_ATOM}(?:\\.{_ATOM})*@{_HOSTNAME}"

# RFC 2673 and RFC 4291
_BYTE = "(?:0|1(?:[0-9][0-9]?)?|2(?:[0-4][0-9]?|5[0-5]?|[6-9])?|[3-9][0-9]?)"
_IPV4 = f"{_BYTE}(?:\\.{_BYTE}){{3}}"
_GROUP = "[0-9A-Fa-f]{1,4}"


def _groups_after(count: int) -> str:
    """Return the expression for the rest of an IPv6 address after `count` groups without a double colon."""
    if count == 8:
        return ""
    return f":(?::{_groups_up_to(7 - count)}|{_GROUP}{_groups_after(count + 1)})"


def _groups_up_to(count: int) -> str:
    """Return the expression for the groups after a double colon."""
    return f"(?:{_GROUP}(?::{_GROUP}){{0,{count - 1}}})?" if count else ""


_IPV6 = f"(?:::{_groups_up_to(7)}|{_GROUP}{_groups_after(1)})"

# RFC 3986, without IP literals; RFC 6570
_ENCODED = "%[0-9A-Fa-f]{2}"
_USER = f"(?:[A-Za-z0-9._~!$&'()*+,;=:-]|{_ENCODED})"
_HOST = f"(?:[A-Za-z0-9._~!$&'()*+,;=-]|{_ENCODED})"
_CHARACTER = f"(?:[A-Za-z0-9._~!$&'()*+,;=:@-]|{_ENCODED})"
_PLAIN = f"(?:[A-Za-z0-9._~!$&'()*+,;=@-]|{_ENCODED})"
_QUERY = f"(?:[A-Za-z0-9._~!$&'()*+,;=:@/?-]|{_ENCODED})*"
_PATH = f"(?:/{_CHARACTER}*)*"
_AUTHORITY = f"//(?:{_USER}*@)?{_HOST}*(?::[0-9]*)?{_PATH}"
_ABSOLUTE = f"/(?:{_CHARACTER}+{_PATH})?"
_END = f"(?:\\?{_QUERY})?(?:#{_QUERY})?"
_URI = f"[A-Za-z][A-Za-z0-9+.-]*:(?:{_AUTHORITY}|{_ABSOLUTE}|{_CHARACTER}+{_PATH})?{_END}"
_REFERENCE = f"(?:{_AUTHORITY}|{_ABSOLUTE}|{_PLAIN}+{_PATH})?{_END}"
_NAME = f"(?:[A-Za-z0-9_]|{_ENCODED})"
_VARIABLE = f"{_NAME}(?:\\.?{_NAME})*(?::[1-9][0-9]{{0,3}}|\\*)?"
_LITERAL = "[A-Za-z0-9!#$&()*+,./:;=?@\\[\\]_~-]"
_TEMPLATE = f"(?:{_LITERAL}|{_ENCODED}|\\{{[+#./;?&]?{_VARIABLE}(?:,{_VARIABLE})*\\}})*"

# RFC 6901
_POINTER = "(?:/(?:[^~/]|~[01])*)*"

FORMATS: Mapping[str, str] = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": _DURATION,
    "email": _EMAIL,
    "hostname": _HOSTNAME,
    "ipv4": _IPV4,
    "ipv6": _IPV6,
    "uri": _URI,
    "uri-reference": f"(?:{_URI}|{_REFERENCE})",
    "uri-template": _TEMPLATE,
    "uuid": "[0-9A-Fa-f]{8}-(?:[0-9A-Fa-f]{4}-){3}[0-9A-Fa-f]{12}",
    "json-pointer": _POINTER,
    "relative-json-pointer": f"(?:0|[1-9][0-9]*)(?:#|{_POINTER})",
}
"""Maps a format to its regular expression, which matches the whole string."""
