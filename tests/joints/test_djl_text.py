"""Text outside ASCII, by the embedded server, and by DJL Serving's worker behind a Java that reads ISO 8859-1."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import javaproperties
import pytest

from handler.config.config import Config
from handler.config.loader import read_server_config
from handler.config.sources import decode_properties, encode_properties
from handler.container import djl
from handler.container.arguments import ContainerArguments, ModelSource
from handler.djl.startup import read_properties

TEXTS = [
    "gr\u00fc\u00df",
    "\u65e5\u672c \U0001f600 \u05e2\u05d1",
    "\u00e0 la carte \u00e0",  # its last byte is a no-break space in ISO 8859-1
    "a\u2028b\u0085c\u00a0",
    "\\\u00fc \\\\\u00fc \\\\\\\u00fc",  # one backslash means nothing, two mean one
    "\\u00fc and \u00fc",
    "\u00fc\\\n  \u00df",  # continues on a second line
]


def properties(text: str, *, mark: str = "") -> bytes:
    lines = ["option.llm_engine=echo", "option.rolling_batch=scheduler"]
    lines += [f"option.model_name={text}", f"option.served_model_name=x,{text}"]
    lines += [f'option.default_chat_template_kwargs={{"text": "{text if chr(92) not in text else ""}"}}']
    return f"{mark}# comment\n{chr(10).join(lines)}\n".encode()


def values(config: Config) -> tuple[Any, ...]:
    return config.name, config.served_model_name, config.default_chat_template_kwargs, config.warnings


def of_worker(file: Path) -> tuple[Any, ...]:
    """What the worker reads if Java has read the file as ISO 8859-1."""
    java = javaproperties.loads(file.read_bytes().decode("latin-1"))
    passed = {key.removeprefix("option."): value for key, value in java.items() if key.startswith("option.")}
    return values(read_properties({**passed, "model_dir": str(file.parent)}, asynchronous=False).checked())


def of_server(file: Path) -> tuple[Any, ...]:
    return values(read_server_config(properties=file).checked())


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_both_servers_read_the_same(tmp_path: Path, text: str, mark: str) -> None:
    file = tmp_path / "serving.properties"
    file.write_bytes(properties(text, mark=mark))
    assert of_worker(file) == of_server(file)


@pytest.mark.parametrize("text", TEXTS)
def test_the_container_s_java_reads_the_same(tmp_path: Path, text: str) -> None:
    """The container writes the file anew, in ASCII, so that Java reads it as it is."""
    own = tmp_path / "model"
    own.mkdir()
    for data in (properties(text), properties(text, mark="\ufeff")):
        (own / "serving.properties").write_bytes(data)
        source = ModelSource(own, None, {})
        djl.make_model(ContainerArguments(8080, ()), source, {}, tmp_path / "made", (0, 36, 0))
        made = tmp_path / "made" / "serving.properties"
        assert made.read_bytes().isascii()
        assert of_worker(made) == of_server(own / "serving.properties")


@pytest.mark.parametrize("text", TEXTS)
def test_a_file_in_ascii_says_the_same(text: str) -> None:
    data = properties(text)
    ascii_text = encode_properties(decode_properties(data))
    assert javaproperties.loads(ascii_text) == javaproperties.loads(decode_properties(data))
