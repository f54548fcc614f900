import ai.djl.util.JsonUtils;
import com.google.gson.JsonArray;
import com.google.gson.JsonElement;
import com.google.gson.JsonObject;
import java.io.IOException;
import java.io.Reader;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.Map;
import java.util.Set;
import java.util.stream.Stream;
import java.util.stream.StreamSupport;

/**
 * Options that DJL Serving sets itself for a model directory with a config.json: LmiConfigRecommender of 0.28 to 0.36,
 * and its conversion for TensorRT-LLM.
 *
 * <p>`FRONT_RECOMMENDER` names another version than the engine's, and `FRONT_GPUS` the GPUs that it counts. What it asks
 * of AWS's Neuron devices is left out. 0.28 and 0.29 have a list of model types for lmi-dist; here it has them all.
 */
final class Recommender {
    private static final Path SAGEMAKER = Path.of("/opt/ml/.sagemaker_infra/endpoint-metadata.json");

    private static final Path CONVERSION = Path.of("/opt/djl/partition/trt_llm_partition.py");

    private final Map<String, String> settings;
    private final String version;
    private final JsonObject config;
    private final String features = environment("SERVING_FEATURES", "");

    private Recommender(Map<String, String> settings, String version, JsonObject config) {
        this.settings = settings;
        this.version = version;
        this.config = config;
    }

    static void configure(Path directory, Map<String, String> settings, String engine) throws IOException {
        String version = environment("FRONT_RECOMMENDER", engine);
        if (version.compareTo("0.28") < 0) {
            return; // 0.25 has none
        }
        Path file = modelConfig(directory, settings, version);
        if (file == null) {
            if (environment("SERVING_FEATURES", "").contains("trtllm")) {
                settings.put("option.mpi_mode", "true");
            }
            return;
        }
        try (Reader reader = Files.newBufferedReader(file)) {
            new Recommender(settings, version, JsonUtils.GSON.fromJson(reader, JsonObject.class)).configure();
        }
    }

    private static Path modelConfig(Path directory, Map<String, String> settings, String version) {
        Set<String> before = Set.of("adapter_config.json"); // which 0.30 reads too
        Path model = Path.of(settings.getOrDefault("option.model_id", directory.toString()));
        return Stream.of(directory, model)
                .flatMap(place -> Stream.of("config.json", "adapter_config.json", "model_index.json", "params.json")
                        .filter(name -> version.compareTo("0.30") >= 0 || !before.contains(name))
                        .map(place::resolve))
                .filter(Files::isRegularFile)
                .findFirst()
                .orElse(null);
    }

    private void configure() {
        if (before("0.29")) {
            setT5();
        }
        setRollingBatch();
        String rollingBatch = settings.get("option.rolling_batch");
        boolean trtllm = rollingBatch.equals("trtllm");
        boolean lmiDist = rollingBatch.equals("lmi-dist");
        if (trtllm || (lmiDist && before("0.33"))) {
            settings.put("option.mpi_mode", "true");
        }
        if (!before("0.29")) {
            settings.putIfAbsent("option.pipeline_parallel_degree", environment("PIPELINE_PARALLEL_DEGREE", "1"));
        }
        setTensorParallelDegree();
        if (trtllm && !settings.containsKey("option.max_rolling_batch_size")) {
            settings.putIfAbsent("option.max_num_tokens", "16384");
        }
        boolean many = trtllm || rollingBatch.equals("vllm") || (lmiDist && before("0.33"));
        settings.putIfAbsent("option.max_rolling_batch_size", many ? "256" : "32");
        if (!before("0.30") && config.has("peft_type")) {
            settings.put("option.is_peft_model", "true");
        }
        if ((!before("0.31") && isTrue("option.enable_lora"))
                || (!before("0.34") && isTrue("option.enable_stateful_sessions"))) {
            settings.put("load_on_devices", "0");
            settings.put("maxWorkers", "1");
        }
        if (version.startsWith("0.32")) {
            setPython(rollingBatch);
        }
        if (isConverted()) {
            convert();
        }
    }

    /** 0.33 and 0.35 on: wherever the image has TensorRT-LLM, whatever the mode. */
    private boolean isConverted() {
        if (version.startsWith("0.33") || !before("0.35")) {
            return features.contains("trtllm") && !"pytorch".equals(settings.get("option.backend"));
        }
        return settings.get("option.rolling_batch").equals("trtllm");
    }

    /** The script's work is left out: there is none in the tests. */
    private void convert() {
        if (!Files.exists(CONVERSION)) {
            throw new IllegalStateException("Failed to execute: [python " + CONVERSION + "]");
        }
        settings.put("option.rolling_batch", "trtllm");
    }

    private void setRollingBatch() {
        String rollingBatch = settings.getOrDefault("option.rolling_batch", "auto");
        if (Integer.parseInt(settings.getOrDefault("batch_size", "1")) > 1) {
            rollingBatch = "disable";
        } else if (rollingBatch.equals("lmi-dist") && !before("0.33")) {
            rollingBatch = "vllm";
            settings.put("option.mpi_mode", "false");
        } else if (rollingBatch.equals("auto")) {
            rollingBatch = generatesText() ? ofImage() : "disable";
        }
        settings.put("option.rolling_batch", rollingBatch);
    }

    /** What the image's engines suggest. */
    private String ofImage() {
        boolean vllm = features.contains("vllm");
        boolean trtllm = features.contains("trtllm");
        if (!before("0.35")) {
            if (vllm || trtllm) {
                settings.put("option.async_mode", "true");
            }
            return "disable";
        }
        if (features.contains("tnx")) {
            int size = Integer.parseInt(settings.getOrDefault("option.max_rolling_batch_size", "1"));
            return !before("0.30") && size >= 12 ? "vllm" : "tnx";
        }
        if (features.contains("lmi-dist") && before("0.33")) {
            return "lmi-dist";
        }
        if (vllm && !before("0.30")) {
            return "vllm";
        }
        if (trtllm && !version.startsWith("0.33")) {
            return "trtllm";
        }
        return before("0.33") && Files.exists(SAGEMAKER) ? "scheduler" : "disable";
    }

    private void setTensorParallelDegree() {
        String degree = environment("TENSOR_PARALLEL_DEGREE", "max");
        int gpus = Integer.parseInt(environment("FRONT_GPUS", "0"));
        if (degree.equals("max") && gpus == 0 && !before("0.29")) {
            return;
        }
        int stages = before("0.30") ? 1 : Integer.parseInt(settings.get("option.pipeline_parallel_degree"));
        String counted = String.valueOf(gpus / stages);
        settings.putIfAbsent("option.tensor_parallel_degree", degree.equals("max") ? counted : degree);
    }

    private void setT5() {
        JsonElement type = config.get("model_type");
        if (features.contains("trtllm") && type != null && type.getAsString().equals("t5")) {
            settings.put("trtllm_python_backend", "true");
            settings.put("option.rolling_batch", "disable");
            settings.put("option.mpi_mode", "true");
            settings.putIfAbsent("batch_size", "32");
        }
    }

    private void setPython(String rollingBatch) {
        if (rollingBatch.equals("vllm") && !features.contains("tnx")) {
            settings.putIfAbsent("option.pythonExecutable", "/opt/djl/vllm_venv/bin/python");
        } else if (rollingBatch.equals("lmi-dist")) {
            settings.putIfAbsent("option.pythonExecutable", "/opt/djl/lmi_dist_venv/bin/python");
        }
    }

    private boolean generatesText() {
        JsonArray names = config.getAsJsonArray("architectures");
        Stream<JsonElement> all = names == null ? Stream.empty() : StreamSupport.stream(names.spliterator(), false);
        return all.map(JsonElement::getAsString)
                .anyMatch(name -> name.matches(".*(ForCausalLM|LMHeadModel|ForConditionalGeneration)"));
    }

    private boolean before(String other) {
        return version.compareTo(other) < 0;
    }

    private boolean isTrue(String key) {
        return Boolean.parseBoolean(settings.get(key));
    }

    private static String environment(String name, String otherwise) {
        return System.getenv().getOrDefault(name, otherwise);
    }
}
