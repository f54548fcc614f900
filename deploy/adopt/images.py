"""The containers whose settings are understood, by the names of their images."""

from __future__ import annotations

import re
from typing import NamedTuple

from deploy.errors import Refused
from handler.config.lmi_version import release_of


class Container(NamedTuple):
    """A kind of container.

    Attributes:
        kind: lmi, tgi, vllm or ours.
        engine: the one that its variables are read for.
        release: LMI's, e.g. `0.36`; "" for others, and where the tag tells none.
    """

    kind: str
    engine: str
    release: str = ""


KINDS = {"lmi": "LMI (DJL Serving)", "tgi": "Text Generation Inference", "vllm": "vLLM", "ours": "this project's own"}

_REPOSITORIES = (
    ("lmi", re.compile(r"(^|[/-])(djl-inference|djl-serving|lmi)$")),
    ("tgi", re.compile(r"(^|[/-])(huggingface-pytorch-tgi-inference|text-generation-inference|tgi)$")),
    ("vllm", re.compile(r"(^|[/-])(vllm|vllm-openai|huggingface-vllm)$")),
    ("ours", re.compile(r"(^|[/-])lmi-handler(-[a-z0-9]+)?$")),
)
_NEURON = re.compile(r"neuron|inf2|trn1|optimum", re.IGNORECASE)

_ADVICE = (
    "If it is one of these under another name, say which: --container {lmi,tgi,vllm,ours}. The image itself does not "
    "come along."
)


def container_kind(image: str, said: str | None) -> Container:
    """Return what kind of container an image is.

    Args:
        said: the kind by the user's word; None: by the image's name.

    Raises:
        Refused: it is no container that is understood.
    """
    repository, _, tag = image.partition("@")[0].partition(":")
    if _NEURON.search(image):
        raise Refused(f"the image {image} is for AWS Neuron, which this project's images do not serve", "")
    kind = said or next((kind for kind, name in _REPOSITORIES if name.search(repository)), None)
    if kind is None:
        known = ", ".join(KINDS.values())
        raise Refused(
            f"the image {image or '(none)'} is not one that lmi deploy can replace: those are {known}", _ADVICE
        )
    engine = "trtllm" if kind == "lmi" and "tensorrtllm" in tag else "vllm"
    release = str(release_of(tag) or "") if kind == "lmi" else ""
    return Container(kind, engine, release)
