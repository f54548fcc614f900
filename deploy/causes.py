"""Why deployments fail: how it shows in texts, and what to change in the specification.

A table, by contract sagemaker.md, section 8 (`row`), the most telling first. Names in the advice are the
specification's (`lmi deploy schema`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Cause:
    """One reason why deployments fail.

    Attributes:
        name: for people and tests.
        row: of the contract's table of what users hit.
        texts: any of them in FailureReason, an error's message or the log gives it away; letters' case is the same.
        says: what to change.
        symptom: only what a failure looks like: said where nothing more telling was found.
    """

    name: str
    row: int
    texts: tuple[str, ...]
    says: str
    symptom: bool = False

    def shown_by(self, text: str) -> bool:
        return any(re.search(pattern, text, re.IGNORECASE) for pattern in self.texts)


CAUSES = (
    Cause(
        "driver",
        10,
        (
            r"CUDA driver version is insufficient",
            r"NVIDIA driver on your system is too old",
            r"unsatisfied condition: cuda",
            r"forward compatibility was attempted on non supported HW",
            r"CUDA_ERROR_(SYSTEM_DRIVER_MISMATCH|COMPAT_NOT_SUPPORTED|UNSUPPORTED_PTX_VERSION)",
            r"provided PTX was compiled with an unsupported toolchain",
            r"no kernel image is available for execution",
        ),
        "The image's CUDA and the host's driver do not go together. Set image.cuda to the image's CUDA (e.g. 13.0) and "
        "leave instance.ami: auto, or set instance.ami yourself: al2023-ami-sagemaker-inference-gpu-4-1 for CUDA 13, "
        "al2-ami-sagemaker-inference-gpu-3-1 for CUDA 12.",
    ),
    Cause(
        "stuck without logs",
        10,
        (r"no log stream after \d+ (s|min)",),
        "The container has written nothing: the host does not go with the image (set image.cuda, or instance.ami), or "
        "the image cannot be pulled (image.uri, its region, the role's ECR permissions, with network.subnets also the "
        "endpoints ecr.api, ecr.dkr and s3).",
    ),
    Cause(
        "gated model",
        12,
        (
            r"gated repo",
            r"GatedRepoError",
            r"Access to model .+ is restricted",
            r"401 Client Error.*hugging",
            r"403 Client Error.*hugging",
            r"hugging\S* (answered|said) 40[13]",
            r"Invalid user token|Invalid username or password",
        ),
        "The hub does not give the model out: accept its licence on its page with the account of the token, put the "
        "token into Secrets Manager and its ARN into model.token_secret (the role needs secretsmanager:GetSecretValue)."
        " Or download the model once and deploy it by model.path and model.upload.",
    ),
    Cause(
        "out of GPU memory",
        5,
        (
            r"CUDA out of memory",
            r"torch\.(cuda\.)?OutOfMemoryError",
            r"No available memory for the cache blocks",
            r"larger than the maximum number of tokens that can be stored in KV cache",
            r"CUDA error: out of memory|cudaErrorMemoryAllocation|CUDA_ERROR_OUT_OF_MEMORY",
            r"worker.+507|out of memory.+507",
        ),
        "The GPUs' memory does not do: give a type with more in instance.type (`lmi deploy plan` shows what fits), "
        "more GPUs by options.tensor_parallel_degree, a shorter model.context, or weights with fewer bits "
        "(options.quantize, model.dtype).",
    ),
    Cause(
        "out of host memory",
        5,
        (
            r"exit(ed)?( with)?( status| code)? (137|-9)\b",
            r"OOMKilled|oom-kill|Killed process",
            r"Cannot allocate memory",
        ),
        "The host's memory does not do while the model is loaded: take the next size of the same family in "
        "instance.type; with components, raise components.memory_mb.",
    ),
    Cause(
        "disk full",
        5,
        (r"No space left on device", r"ENOSPC"),
        "The disk does not hold the model: set instance.volume_gb, or take an instance.type with NVMe; deploy by "
        "model.path and model.upload, so that nothing is fetched at the start.",
    ),
    Cause(
        "code of the model is missing",
        15,
        (
            r"trust_remote_code=True",
            r"contains custom code which must be executed",
            r"requires you to execute the (configuration|modeling) file",
        ),
        "The model comes with code of its own: set options.trust_remote_code: true if you trust it, and have its .py "
        "files lie beside config.json in model.path or model.s3.",
    ),
    Cause(
        "tokenizer missing",
        15,
        (
            r"Can't load tokenizer",
            r"Couldn't instantiate the backend tokenizer",
            r"does not appear to have a file named (tokenizer|config)",
            r"no (tokenizer|config)\.json",
        ),
        "The model data lacks its tokenizer or config.json: add tokenizer.json, tokenizer_config.json and config.json "
        "to the directory in model.path (`lmi deploy plan` checks it), and run `lmi deploy up` again.",
    ),
    Cause(
        "no internet",
        15,
        (
            r"(resolve|couldn't connect to|connect to|reach)\W+(https?://)?\S*(huggingface\.co|hf\.co)",
            r"LocalEntryNotFoundError",
            r"OfflineModeIsEnabled|HF_HUB_OFFLINE",
            r"Temporary failure in name resolution|Name or service not known|Network is unreachable",
        ),
        "The container cannot reach the hub: it is isolated (network.isolated) or its network.subnets have no way out. "
        "Deploy by model.path and model.upload instead of model.id, with tokenizer and code in the directory, or give "
        "the subnets a NAT gateway.",
    ),
    Cause(
        "archive",
        14,
        (
            r"(tar\.gz|archive|untar|unpack|extract).*(symlink|symbolic|hard ?link|not a gzip|corrupt|invalid|fail)",
            r"(symlink|symbolic link).*(tar\.gz|archive)",
        ),
        "Packed model data does not load: deploy the uncompressed directory by model.path and model.upload (or "
        "model.s3, ending in a slash); lmi never packs it.",
    ),
    Cause(
        "prefix",
        14,
        (
            r"(0|zero)[- ]byte",
            r"both (a )?file and (a )?directory|key .+ is (also )?a (prefix|directory)",
            r"(object|file) ?name.*(longer|exceed).*255|File name too long",
        ),
        "The prefix in model.s3 holds what SageMaker cannot lay out: a 0-byte object that ends in a slash (the console "
        "makes them), a key that is a file and a directory, or a name above 255 bytes. `lmi deploy plan` names the "
        "objects; delete them.",
    ),
    Cause(
        "model data not readable",
        14,
        (
            r"(download|access|read|find) model (data|artifact)",
            r"S3.*(access denied|forbidden|403)|(access denied|forbidden).*s3:",
            r"not authorized to perform: s3:",
            r"NoSuchBucket|bucket .+ (does not exist|is in (another|a different) region)|PermanentRedirect",
        ),
        "SageMaker cannot read the model data: see that model.s3 (or model.upload) exists, is in the endpoint's "
        "region, and that the role may s3:GetObject and s3:ListBucket there (kms:Decrypt if the bucket has a key). "
        "`lmi deploy iam` prints the policy.",
    ),
    Cause(
        "image of another processor",
        9,
        (r"exec format error", r"(architecture|platform).*(not match|not supported|mismatch|unsupported)"),
        "The image is for another processor: build it with `docker build --platform linux/amd64`, push it, and set "
        "image.uri to its new digest.",
    ),
    Cause(
        "serve not found",
        9,
        (
            r"CannotStartContainer",
            r"exec(utable)?:? ?.?serve.?:? .*not found|serve: (command )?not found",
            r"can't open file '\S*serve'|No such file or directory: '?serve",
            r"unrecognized arguments: serve|invalid choice: '?serve",
            r"docker run <image> serve",
        ),
        "The image does not start by `serve`: SageMaker runs `docker run IMAGE serve`. Use the project's image, or "
        "give yours an ENTRYPOINT in exec form that takes `serve`, and set image.uri to it.",
    ),
    Cause(
        "image not found",
        10,
        (
            r"(requested )?image .*(not found|does not exist|could ?n.t be found)",
            r"manifest unknown|ImageNotFound|RepositoryNotFound|CannotPullContainer|ImagePullFailure",
            r"(permission|authorized|grant|access).*ecr:|ecr:(BatchGetImage|GetDownloadUrlForLayer)"
            r"|BatchGetImage permission",
            r"image .*(in|from) (a different|another|the same) region|non-ECR image",
        ),
        "The image cannot be had: image.uri (or image.repository and image.tag) must name one that exists in ECR in "
        "the endpoint's region, and the role must be allowed to pull it (`lmi deploy iam`).",
    ),
    Cause(
        "quota",
        16,
        (r"ResourceLimitExceeded", r"account-level service limit", r"quota.*(is 0|exceeded|below)", r"Service Quotas"),
        "The account's quota does not do: ask for more in Service Quotas, service `Amazon SageMaker`, quota "
        "`{type} for endpoint usage`, or take another instance.type or a smaller instance.count.",
    ),
    Cause(
        "no capacity at AWS",
        16,
        (
            r"Insufficient ?(Instance)? ?Capacity",
            r"Unable to (provision|provide) requested (ML compute )?capacity",
            r"capacity.*(not available|unavailable|insufficient)",
            r"VariantInstanceProvisionTimeout",
        ),
        "AWS has no such instance free now: try again later, raise timeouts.provision (up to 3600), or take another "
        "instance.type, or other zones (network.subnets). update.policy: rolling takes less than blue_green.",
    ),
    Cause(
        "no copy is up",
        16,
        (r"has no capacity", r"NoCapacityInvocation"),
        "No copy is up: it was scaled to zero, or there is no room for it. Ask again in some minutes (the client does "
        "so by itself), or set scaling.min: 1; see that instance.managed.max gives room for components.copies.",
    ),
    Cause(
        "unknown option",
        13,
        (
            r"unknown option|no such option|did you mean|unrecognized arguments: --",
            r"option\.\S+ (must|is not|cannot)",
        ),
        "The container refuses an option: correct it in options (names of docs/options.md, without `option.`); "
        "variables of other servers' entry points in environment do nothing here.",
    ),
    Cause(
        "timeout in the environment",
        6,
        (
            r"(ContainerStartupHealthCheckTimeout|container_startup_health_check_timeout|ModelDataDownloadTimeout)\w*.*env",
        ),
        "Timeouts are no variables of the container: take them out of environment and set timeouts.startup and "
        "timeouts.download (seconds, 60 to 3600).",
    ),
    Cause(
        "sagemaker's SDK",
        11,
        (r"No module named '?sagemaker\.(model|predictor|serializers|djl_inference)|cannot import name .* 'sagemaker",),
        "That script is for version 2 of the sagemaker package: nothing here needs it. Take it out of model.py; use "
        "`lmi deploy up` and deploy.client's Predictor instead.",
    ),
    Cause(
        "component not named",
        17,
        (r"Inference Component Name header is required|InferenceComponentName.*required",),
        "The endpoint holds components, and the request must name one: `lmi deploy invoke --component NAME` "
        "(components.name); the client takes the only one by itself.",
    ),
    Cause(
        "answer too slow",
        4,
        (
            r"invocation timed out while waiting for a response",
            r"ModelInvocationTimeExceeded|allotted time",
        ),
        "An answer may take 60 seconds, a stream 8 minutes: stream, ask for fewer tokens, or use async.output for long "
        "ones. If short answers take so long too, the engine is overloaded: raise instance.count or scaling.max.",
    ),
    Cause(
        "health check fails later",
        8,
        (
            r"health check.*(after|while|no longer|stopped).*(service|serving|pass)",
            r"ping.*(no longer|stopped) (pass|answer)",
            r"engine (died|is dead|has died|hangs)|EngineDeadError",
        ),
        "It served and then became unhealthy: `lmi deploy logs --filter ERROR` shows the engine's reason. Most often "
        "memory: a shorter model.context, a smaller options.max_rolling_batch_size, or a larger instance.type.",
    ),
    Cause(
        "health-check timeout",
        5,
        (
            r"(startup|health[- ]check)\b.*(timed? ?out|timeout)",
            r"(timed? ?out|not ready).*(/ping|health|model_loading_timeout)",
            r"model_loading_timeout|did not load within",
        ),
        "The model took longer to load than it was given: raise timeouts.startup (seconds, up to 3600) and "
        "options.model_loading_timeout with it; for downloads from S3 timeouts.download.",
    ),
    Cause(
        "ping",
        7,
        (r"did not pass the ping health check", r"ping health check"),
        "The container did not get ready. Its log says why (`lmi deploy logs`); if it was still loading, raise "
        "timeouts.startup (seconds, up to 3600) and options.model_loading_timeout; if there is no log, check "
        "instance.ami and image.cuda.",
        symptom=True,
    ),
)
