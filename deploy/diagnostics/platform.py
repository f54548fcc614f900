"""Causes that AWS reports: image, model data, capacity, health checks, requests."""

from __future__ import annotations

from deploy.diagnostics.cause import Cause

PLATFORM = (
    Cause(
        "stuck without logs",
        (r"no log stream after \d+ (s|min)",),
        "The container has written nothing: the host does not go with the image (set image.cuda, or instance.ami), or "
        "the image cannot be pulled (image.uri, its region, the role's ECR permissions, with network.subnets also the "
        "endpoints ecr.api, ecr.dkr and s3).",
    ),
    Cause(
        "prefix",
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
        (
            r"(download|access|read|find) model (data|artifact)",
            r"S3.*(access denied|forbidden|403)|(access denied|forbidden).*s3:",
            r"not authorized to perform: s3:",
            r"NoSuchBucket|bucket .+ (does not exist|is in (another|a different) region)|PermanentRedirect",
        ),
        "SageMaker cannot read the model data: see that model.s3 (or model.upload) exists, is in the endpoint's "
        "region, and that the role may s3:GetObject and s3:ListBucket there (kms:Decrypt if the bucket has a key: "
        "encryption.model_key). `lmi deploy iam` prints the policy.",
    ),
    Cause(
        "image of another processor",
        (
            r"exec format error",
            r"image.*(architecture|platform).*(not match|not supported|mismatch|unsupported)",
            r"no matching manifest for linux/",
        ),
        "The image is for another processor: build it with `docker build --platform linux/amd64`, push it, and set "
        "image.uri to its new digest.",
    ),
    Cause(
        "image index",
        (r"Unsupported manifest media type", r"image\.(index|manifest)\.v1"),
        "The image is an index of several platforms, or a manifest in OCI's format, which SageMaker does not take: "
        "build it with `docker buildx build --platform linux/amd64 --provenance=false --output type=docker`, push it, "
        "and set image.uri to its new digest.",
    ),
    Cause(
        "serve not found",
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
        (
            r"(requested )?image .*(not found|does not exist|could ?n.t be found)",
            r"manifest unknown|ImageNotFound|RepositoryNotFound|CannotPullContainer|ImagePullFailure",
            r"(permission|authorized|grant|access).*ecr:|ecr:(BatchGetImage|GetDownloadUrlForLayer)"
            r"|BatchGetImage permission",
            r"image .*(in|from) (a different|another|the same) region|non-ECR image",
        ),
        "The image cannot be pulled: image.uri (or image.repository and image.tag) must name one that exists in ECR in "
        "the endpoint's region, and the role must be allowed to pull it (`lmi deploy iam`).",
    ),
    Cause(
        "quota",
        (r"ResourceLimitExceeded", r"account-level service limit", r"quota.*(is 0|exceeded|below)", r"Service Quotas"),
        "The account's quota is too small: ask for more in Service Quotas, service `Amazon SageMaker`, quota "
        "`{type} for endpoint usage`, or take another instance.type or a smaller instance.count.",
    ),
    Cause(
        "no capacity at AWS",
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
        (r"has no capacity", r"NoCapacityInvocation"),
        "No copy is up: it was scaled to zero, or there is no room for it. Ask again in some minutes (the client does "
        "so by itself), or set scaling.min: 1; see that instance.managed.max gives room for components.copies.",
    ),
    Cause(
        "component not named",
        (r"Inference Component Name header is required|InferenceComponentName.*required",),
        "The endpoint holds components, and the request must name one: `lmi deploy invoke --component NAME` "
        "(components.name); the client takes the only one by itself.",
    ),
    Cause(
        "answer too slow",
        (r"invocation timed out while waiting for a response", r"ModelInvocationTimeExceeded|allotted time"),
        "An answer may take 60 seconds, a stream 8 minutes: stream, ask for fewer tokens, or use async.output for long "
        "ones. If short answers take so long too, the engine is overloaded: raise instance.count or scaling.max.",
    ),
    Cause(
        "health check fails later",
        (
            r"health check.*(after|while|no longer|stopped).*(service|serving|pass)",
            r"ping.*(no longer|stopped) (pass|answer)",
            r"engine (died|is dead|has died|hangs)|EngineDeadError",
        ),
        "It served and then became unhealthy: `lmi deploy logs {name} --filter ERROR` shows the engine's reason. "
        "Most often memory: a shorter model.context, a smaller options.max_rolling_batch_size, or a larger "
        "instance.type.",
    ),
    Cause(
        "health-check timeout",
        (
            r"(startup|health[- ]check)\b.*(timed? ?out|timeout)",
            r"(timed? ?out|not ready).*(/ping|health|model_loading_timeout)",
            r"model_loading_timeout|did not load within",
            r"Timed out waiting for (new )?engine core",
        ),
        "The model took longer to load than it was given: raise timeouts.startup (seconds, up to 3600) and "
        "options.model_loading_timeout with it (for vLLM also VLLM_ENGINE_READY_TIMEOUT_S in environment); for "
        "downloads from S3 timeouts.download.",
    ),
    Cause(
        "ping",
        (r"did not pass the ping health check", r"ping health check"),
        "The container did not get ready. Its log says why (`lmi deploy logs {name}`); if it was still loading, raise "
        "timeouts.startup (seconds, up to 3600) and options.model_loading_timeout; if there is no log, check "
        "instance.ami and image.cuda.",
        symptom=True,
    ),
)
