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
            r"unsupported display driver / cuda driver combination",
        ),
        "The image's CUDA and the host's driver do not match. Set image.cuda to the image's CUDA (e.g. 13.0) and "
        "leave instance.ami: auto, or set instance.ami yourself: al2023-ami-sagemaker-inference-gpu-4-1 for CUDA 13, "
        "al2-ami-sagemaker-inference-gpu-3-1 for CUDA 12.",
    ),
    Cause(
        "generation of the GPU",
        (
            r"no kernel image is available for execution",
            r"only supported on GPUs with compute capability",
            r"not supported for the current GPU",
        ),
        "The GPU's generation cannot compute this: options.dtype: fp16 in place of bf16 on a GPU before the A10G; for "
        "fp8 and other options.quantize, and for an image built for newer GPUs, another instance.type.",
    ),
    Cause(
        "broken GPU",
        (r"uncorrectable (NVLink|ECC) error", r"GPU has fallen off the bus", r"system not yet initialized"),
        "The host's GPUs do not work: delete the endpoint (`lmi deploy down`) and run `lmi deploy up` again, which "
        "takes another host; if it happens again, another instance.type.",
    ),
    Cause(
        "number of GPUs",
        (
            r"attention heads \(.+\) must be divisible by tensor",
            r"is larger than the number of available GPUs",
            r"invalid device ordinal",
        ),
        "options.tensor_parallel_degree does not fit: it must divide the model's attention heads, and be no more than "
        "the GPUs of instance.type (of a component, components.accelerators).",
    ),
    Cause(
        "taken GPU memory",
        (r"on startup is less than (desired GPU memory utilization|the engine's budget)",),
        "Something else holds the GPU's memory: lower options.gpu_memory_utilization, a share of the whole GPU, or "
        "leave the GPU to one model.",
    ),
    Cause(
        "context of the model",
        (r"is greater than the derived max_model_len", r"max_num_batched_tokens \(.+\) is smaller than max_model_len"),
        "The context is longer than the model, or a step, takes: a shorter model.context (options.max_model_len), at "
        "most the model's own and options.max_num_batched_tokens.",
    ),
    Cause(
        "batch in a step",
        (r"must be greater than or equal to max_num_seqs",),
        "A step has fewer tokens than requests: raise options.max_num_batched_tokens, or lower "
        "options.max_rolling_batch_size.",
    ),
    Cause(
        "family unknown to the engine",
        (
            r"Model architectures .+ are not supported",
            r"does not recognize this architecture",
            r"was supported in vLLM until",
            r"is not supported in-tree anymore",
            r"The Transformers implementation of .+ is not compatible",
            r"Unknown architecture for AutoModel",
            r"Tokenizer class .+ (was not found|is not currently imported)",
        ),
        "This release of the engine does not know the model's family: take an image with a newer one (image.tag or "
        "image.uri), or another options.llm_engine.",
    ),
    Cause(
        "quantization",
        (
            r"does not match the quantization method specified",
            r"Unknown quantization method|Invalid quantization method",
            r"is not supported for quantization method",
            r"Cannot find the config file for",
        ),
        "options.quantize and the checkpoint do not go together: leave it out for a checkpoint that is quantized "
        "already, and for one that is not name a method that needs no files of its own (fp8); options.dtype must be "
        "one that the method takes.",
    ),
    Cause(
        "precision of the KV cache",
        (r"Invalid kv_cache_dtype",),
        "The engine has no such precision: options.kv_cache_dtype: auto, or fp8.",
    ),
    Cause(
        "attention kernel",
        (r"No valid attention backend",),
        "No attention kernel computes this model so, and the message gives each kernel's reason: leave "
        "options.kv_cache_dtype and options.block_size out, set options.dtype: bf16 or fp16, or take another "
        "instance.type.",
    ),
    Cause(
        "not a number",
        (r"NaNs detected in logits",),
        "The numbers overflow in this precision, or the weights are damaged: options.dtype: bf16 in place of fp16, "
        "options.kv_cache_dtype: auto, no options.quantize; else download the model again.",
    ),
    Cause(
        "precision",
        (r"does not support float16",),
        "The model computes no numbers in fp16: options.dtype: bf16, on a GPU that has it (A10G and later).",
    ),
    Cause(
        "task",
        (r"do(es)? not support .--runner", r"does not support any pooling tasks"),
        "The model's family computes something else than options.task says: leave it out, and config.json decides.",
    ),
    Cause(
        "not for this family",
        (r"Supported models implement the .Supports", r"does not support LoRA yet"),
        "The engine does not do this with the model's family: take options.enable_lora, or the pipeline's degree, out.",
    ),
    Cause(
        "adapter's rank",
        (r"is greater than max_lora_rank",),
        "The adapter's rank is too large for the engine: raise options.max_lora_rank to the largest `r` of the "
        "adapter_config.json files.",
    ),
    Cause(
        "adapters in memory",
        (r"max_cpu_loras .+ must be >= max_loras",),
        "The host's memory must hold at least the GPU's adapters: raise options.max_cpu_loras to options.max_loras, or "
        "leave it out.",
    ),
    Cause(
        "draft model",
        (r"draft model should have the same vocabulary", r"num_speculative_tokens.* (was not|must be) provided"),
        "options.speculative_draft_model does not go with the model: it needs the same vocabulary, and the number of "
        "tokens that it proposes.",
    ),
    Cause(
        "shared memory",
        (r"/dev/shm", r"shared memory ?(\(shm\)|segment)"),
        "/dev/shm is too small for the engine's processes: with Docker add `--shm-size 8g`; on SageMaker set "
        "NCCL_SHM_DISABLE: '1' in environment, or take an instance.type with one GPU that is large enough.",
    ),
    Cause(
        "no such model on the hub",
        (
            r"is not a valid model identifier",
            r"Repository Not Found for url",
            r"Invalid repository ID or local directory",
        ),
        "The hub has no such model, or hides it: correct model.id (OWNER/MODEL), or the path; for a private one put "
        "a token that may read it into model.token_secret.",
    ),
    Cause(
        "revision",
        (r"is not a valid git identifier", r"Revision Not Found for url"),
        "The hub's model has no such branch, tag or commit: correct options.revision.",
    ),
    Cause(
        "too many requests to the hub",
        (r"429 Client Error|HTTP 429|429 Too Many Requests",),
        "The hub answers no more requests for now: give a token by model.token_secret, or deploy by model.path and "
        "model.upload, so that nothing is fetched at the start.",
    ),
    Cause(
        "weights incomplete",
        (
            r"Cannot find any model weights",
            r"referenced in index but missing",
            r"weights were not initialized from checkpoint",
            r"SafetensorError|while deserializing header",
        ),
        "The model data lack weights, or hold them in part: download the model again (`git lfs pull` in a clone), and "
        "run `lmi deploy up` again; `lmi deploy plan` checks the directory in model.path.",
    ),
    Cause(
        "package missing",
        (
            r"packages that were not found in your environment",
            r"library but it was not found in your environment",
            r"Missing requirements in your local environment",
            r"No module named '(?!sagemaker)",
        ),
        "The model's code needs a Python package that the image lacks: name it in a requirements.txt beside the "
        "model's files in model.path, with its wheel in requirements/ where the container is isolated.",
    ),
    Cause(
        "gated model",
        (
            r"access (a )?gated repo|is a gated repo",
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
            r"larger than the available KV cache memory",
            r"not enough GPU memory",
            r"insufficient GPU memory",
            r"CUBLAS_STATUS_ALLOC_FAILED",
            r"Cuda failure 2 'out of memory'",
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
            r"exit(ed)?( with)?( status| code)?:? (137|-9)\b",
            r"exited on signal 9\b",
            r"OOMKilled|oom-kill|Killed process",
            r"(Cannot|can't) allocate memory",
            r"Available memory on node .+ is less than requested",
        ),
        "The host's memory is too small while the model loads: take the next size of the same family in "
        "instance.type; with components, raise components.memory_mb.",
    ),
    Cause(
        "disk full",
        (r"(?m)^(?!.*(/dev/shm|shared memory)).*No space left on device", r"ENOSPC"),
        "The disk does not hold the model: set instance.volume_gb, or take an instance.type with NVMe; deploy by "
        "model.path and model.upload, so that nothing is fetched at the start.",
    ),
    Cause(
        "libraries of two versions",
        (
            r"undefined symbol: ",
            r"(?<!libcuda)\.so[.\d]*: cannot open shared object file",
            r"version .GLIBCXX_.+ not found",
        ),
        "A library of the image meets one of another version: take torch, nvidia-* and the engine's packages out of "
        "the model's requirements.txt, and LD_LIBRARY_PATH and VLLM_NCCL_SO_PATH out of environment; packages "
        "compiled for another torch need one made for this image.",
    ),
    Cause(
        "scratch memory",
        (r"Workspace is locked",),
        "A kernel needs more memory than the engine has set aside at its start, a defect of its release: take another "
        "one (image.tag or image.uri). Until then a larger options.max_num_batched_tokens may help; a smaller one "
        "makes it worse.",
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
            r"Unrecognized model in .+ Should have a `model_type` key",
            r"no config file found",
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
            r"cannot find the requested files|couldn't find them in the cached files",
            r"OfflineModeIsEnabled|offline mode is enabled",
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
        (
            r"unknown option|no such option|did you mean|unrecognized arguments: --",
            r"option\.\S+ (must|is not|cannot)",
            r"Extra inputs are not permitted",
        ),
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
        (
            r"no NVIDIA driver (?:is visible|in sight)|Found no NVIDIA driver",
            r"No CUDA GPUs are available|no CUDA-capable device is detected",
            r"Torch not compiled with CUDA|Failed to infer device type|libcuda\.so[.\d]*: cannot open",
        ),
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
    Cause(
        "compiler missing",
        (r"Failed to find C compiler", r"Could not find nvcc", r"CUDA_HOME environment variable is not set"),
        "The engine compiles at the start, and the image has no compiler: take an image with gcc and CUDA's nvcc "
        "(image.uri), as the engine's own has them.",
    ),
    Cause(
        "GPUs do not reach one another",
        (r"ncclUnhandledCudaError|ncclSystemError|ncclInternalError|ncclRemoteError|NCCL error", r"Watchdog caught"),
        "NCCL, which joins the GPUs, has failed: set NCCL_DEBUG: INFO in environment, and the log says why. Where it "
        "names peer access, NCCL_P2P_DISABLE: '1' avoids it.",
        symptom=True,
    ),
    Cause(
        "kernel fault",
        (r"illegal memory access|device-side assert|unspecified launch failure|misaligned address",),
        "A kernel has failed on the GPU, and the line that reports it is often not the one at fault: set "
        "CUDA_LAUNCH_BLOCKING: '1' in environment, and the log names it. options.enforce_eager: true or another "
        "release of the engine (image.tag) may avoid it.",
        symptom=True,
    ),
    Cause(
        "engine hangs",
        (r"RPC call to \S+ timed out",),
        "A worker has not answered in time. If one died, its reason stands further up in the log; if a step is only "
        "slow, set VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS (300 by default) in environment.",
        symptom=True,
    ),
    Cause(
        "engine did not start",
        (
            r"Engine core initialization failed|EngineCore failed to start|WorkerProc (initialization )?failed",
            r"Worker proc .+ died unexpectedly|One or more workers failed|Worker failed with|Executor failed\.",
            r"failed to be inspected",
            r"Executor worker returned error|Failed to initialize executor",
        ),
        "The engine did not start, and its own reason stands further up in the log: `lmi deploy logs {name} --filter "
        "Error` shows it.",
        symptom=True,
    ),
)
