"""Causes in the container, which show in its log."""

from __future__ import annotations

from deploy.diagnostics.cause import Cause

CONTAINER = (
    Cause(
        "driver",
        (
            r"CUDA driver version is insufficient",
            r"driver (on your system )?is too old",
            r"unsatisfied condition: cuda",
            r"forward compatibility was attempted on non supported HW",
            r"CUDA_ERROR_(SYSTEM_DRIVER_MISMATCH|COMPAT_NOT_SUPPORTED|UNSUPPORTED_PTX_VERSION)",
            r"provided PTX was compiled with an unsupported toolchain",
            r"no kernel image is available for execution",
        ),
        "The image's CUDA and the host's driver do not match. Set image.cuda to the image's CUDA (e.g. 13.0) and "
        "leave instance.ami: auto, or set instance.ami yourself: al2023-ami-sagemaker-inference-gpu-4-1 for CUDA 13, "
        "al2-ami-sagemaker-inference-gpu-3-1 for CUDA 12.",
    ),
    Cause(
        "gated model",
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
        (
            r"CUDA out of memory",
            r"torch\.(cuda\.)?OutOfMemoryError",
            r"No available memory for the cache blocks",
            r"larger than the maximum number of tokens that can be stored in KV cache",
            r"CUDA error: out of memory|cudaErrorMemoryAllocation|CUDA_ERROR_OUT_OF_MEMORY",
            r"worker.+507|out of memory.+507",
        ),
        "The GPUs' memory is too small: take a type with more in instance.type (`lmi deploy plan` shows what fits), "
        "more GPUs by options.tensor_parallel_degree, a shorter model.context, or weights with fewer bits "
        "(options.quantize, model.dtype).",
    ),
    Cause(
        "out of host memory",
        (
            r"exit(ed)?( with)?( status| code)? (137|-9)\b",
            r"OOMKilled|oom-kill|Killed process",
            r"Cannot allocate memory",
        ),
        "The host's memory is too small while the model loads: take the next size of the same family in "
        "instance.type; with components, raise components.memory_mb.",
    ),
    Cause(
        "disk full",
        (r"No space left on device", r"ENOSPC"),
        "The disk does not hold the model: set instance.volume_gb, or take an instance.type with NVMe; deploy by "
        "model.path and model.upload, so that nothing is fetched at the start.",
    ),
    Cause(
        "code of the model is missing",
        (
            r"trust_remote_code=True",
            r"contains custom code which must be executed",
            r"requires you to execute the (configuration|modeling) file",
        ),
        "The model comes with its own code: set options.trust_remote_code: true if you trust it, and put its .py "
        "files beside config.json in model.path or model.s3.",
    ),
    Cause(
        "tokenizer missing",
        (
            r"Can't load tokenizer",
            r"Couldn't instantiate the backend tokenizer",
            r"does not appear to have a file named (tokenizer|config)",
            r"no (tokenizer|config)\.json",
            r"there is no model:|holds no model",
        ),
        "The model data lacks its tokenizer or config.json: add tokenizer.json, tokenizer_config.json and config.json "
        "to the directory in model.path (`lmi deploy plan` checks it), and run `lmi deploy up` again.",
    ),
    Cause(
        "no internet",
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
        (
            r"(tar\.gz|archive|untar|unpack|extract).*(symlink|symbolic|hard ?link|not a gzip|corrupt|invalid|fail)",
            r"(symlink|symbolic link).*(tar\.gz|archive)",
        ),
        "Packed model data does not load: deploy the uncompressed directory by model.path and model.upload (or "
        "model.s3, ending in a slash); lmi never packs it.",
    ),
    Cause(
        "unknown option",
        (r"unknown option|no such option|did you mean|unrecognized arguments: --", r"option\.\S+ (must|is not|cannot)"),
        "The container refuses an option: correct it in options (`lmi options` lists them; without `option.`); "
        "variables of other servers' entry points in environment do nothing here.",
    ),
    Cause(
        "timeout in the environment",
        (
            r"(ContainerStartupHealthCheckTimeout|container_startup_health_check_timeout|ModelDataDownloadTimeout)\w*.*env",
        ),
        "Timeouts are not variables of the container: take them out of environment and set timeouts.startup and "
        "timeouts.download (seconds, 60 to 3600).",
    ),
    Cause(
        "sagemaker's SDK",
        (r"No module named '?sagemaker\.(model|predictor|serializers|djl_inference)|cannot import name .* 'sagemaker",),
        "That script is for version 2 of the sagemaker package: nothing here needs it. Take it out of model.py; use "
        "`lmi deploy up` and deploy.client's Predictor instead.",
    ),
    Cause(
        "no GPU",
        (r"no NVIDIA driver (?:is visible|in sight)", r"Found no NVIDIA driver", r"No CUDA GPUs are available"),
        "The container sees no GPU: take an instance.type with one, give a component some (components.accelerators),"
        " or take a CPU engine in the CPU image (options.llm_engine: openvino).",
    ),
    Cause(
        "secret",
        (r"the secret \S+ (cannot be read|is binary|holds no|is a JSON|begins like)", r"SECRET_ARN.*(is no|is set)"),
        "The container cannot read the hub's token: model.token_secret must be the ARN of a secret with it, in the"
        " endpoint's region, and the role needs secretsmanager:GetSecretValue on it, and kms:Decrypt if it "
        "has a key of your own (encryption.secret_key; `lmi deploy iam` prints both); with "
        "network.subnets also the endpoint secretsmanager.",
    ),
)
