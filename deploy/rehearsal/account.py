"""A rehearsal's account: empty but for quotas, and for images that would have been pushed with Docker."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from typing import Any

import moto.secretsmanager.utils

from deploy.local.serving import Front, Log, Plan, cannot_listen
from deploy.rehearsal import identities
from deploy.rehearsal.cloud import OWN, Call, Cloud
from deploy.rehearsal.identity_policy import Need
from deploy.rehearsal.logs import ContainerLog
from deploy.rehearsal.quotas import Quotas
from deploy.rehearsal.runtime import Emulators
from deploy.rehearsal.sagemaker import ACCOUNT
from deploy.rehearsal.starts import Starts

OWNER = "owner"
"""The access key of the account's owner, who may do everything."""
_OWNER_ARN = f"arn:aws:sts::{ACCOUNT}:user/moto"  # as moto's STS names whom it does not know
_UNPLAYED = {
    "CreateTrainingJob": "nothing is trained here",
    "CreateProcessingJob": "nothing is processed here",
    "CreateInferenceRecommendationsJob": "nothing is measured here",
}
"""Operations that moto would take without doing anything."""
_DOCKER = "application/vnd.docker"
_MANIFEST = {
    "schemaVersion": 2,
    "mediaType": f"{_DOCKER}.distribution.manifest.v2+json",
    # Without the digest of a configuration: moto serves no layers, so nobody can read the processor there.
    "config": {"size": 1},
    "layers": [{"mediaType": f"{_DOCKER}.image.rootfs.diff.tar.gzip", "size": 1, "digest": f"sha256:{'1' * 64}"}],
}


class Account(Cloud):
    """AWS in which IAM's users may do what their policies allow, and endpoints answer.

    Raises:
        OSError: the port is in use.
    """

    def __init__(self, port: int, emulators: Emulators, log: ContainerLog, report: Callable[[str], None]) -> None:
        self._emulators, self._log, self._report = emulators, log, report
        super().__init__(port)
        self.trusted.add(OWNER)
        self.sagemaker.polls = 0  # nothing takes time: `lmi deploy up` looks every 15 s
        self.sagemaker.may_take = identities.trusts_sagemaker
        self.sagemaker.fate_of = Starts(self)
        identities.install(_OWNER_ARN)
        Quotas().install()
        # The ending of secrets' ARNs, which AWS draws: the one that the documents have.
        moto.secretsmanager.utils.generate_str_id = lambda *args, **more: "AbCdEf"

    def push(self, image: str, region: str) -> None:
        """Put an image into ECR, in place of `docker push`."""
        repository, _, tag = image.rpartition(":")
        ecr = self.client("ecr", region)
        with contextlib.suppress(ecr.exceptions.RepositoryAlreadyExistsException):
            ecr.create_repository(repositoryName=repository)
        ecr.put_image(repositoryName=repository, imageTag=tag, imageManifest=json.dumps(_MANIFEST))

    def policies_of(self, caller: str) -> Iterable[Mapping[str, Any]]:
        return identities.policies_of(caller)

    def arn_of(self, caller: str) -> str | None:
        return identities.arn_of(caller)

    def on_denial(self, need: Need) -> None:
        self._report(f"aws       | denied: {need}")

    def on_call(self, call: Call) -> None:
        if call.caller != OWN:
            self._log.on_call(self, call)

    def refusal(self, call: Call) -> tuple[str, str] | None:
        if call.service == "sagemaker" and (why := _UNPLAYED.get(call.operation)):
            return "ValidationException", f"{call.operation} is not rehearsed: {why}."
        return None

    def invoked(self, call: Call, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        return self._emulators.invoked(self, call, environ, start_response)

    def transform(self, line: bytes) -> bytes:
        return self._emulators.transform(line)


def account(log: ContainerLog, images: Sequence[str], region: str) -> Front:
    """Return what is before the container: AWS with this account.

    Args:
        images: REPOSITORY:TAG of each that is in ECR, in `region`.
    """

    @contextlib.asynccontextmanager
    async def front(plan: Plan, report: Callable[[str], None], say: Log) -> AsyncIterator[str]:
        state = plan.endpoint
        loop = asyncio.get_running_loop()
        emulators = Emulators(state.container, loop, lambda: state.healthy, state.limits, state.part_bytes)
        try:
            cloud = Account(plan.port, emulators, log, report)
        except OSError as error:
            raise cannot_listen("127.0.0.1", plan.port, error) from None
        try:
            for image in images:
                await asyncio.to_thread(cloud.push, image, region)
            yield cloud.url
        finally:
            await emulators.close()
            await asyncio.to_thread(cloud.stop)

    return front


def variables(url: str, region: str) -> dict[str, str]:
    """Return the environment variables with which a client takes this for AWS."""
    return {
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": OWNER,
        "AWS_SECRET_ACCESS_KEY": OWNER,
        "AWS_REGION": region,
        "AWS_DEFAULT_REGION": region,
    }
