import ai.djl.util.JsonUtils;
import com.google.gson.JsonArray;
import com.google.gson.JsonElement;
import com.google.gson.JsonObject;
import java.io.IOException;
import java.io.Reader;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.Map;
import java.util.stream.Stream;
import java.util.stream.StreamSupport;

/**
 * Options that DJL Serving sets itself for a model directory with a config.json: LmiConfigRecommender of 0.33 and later.
 *
 * <p>What counts GPUs is left out: the front runs on machines without.
 */
final class Recommender {
    private Recommender() {}

    static void configure(Path directory, Map<String, String> settings) throws IOException {
        Path config = Path.of(settings.getOrDefault("option.model_id", directory.toString())).resolve("config.json");
        if (!Files.isRegularFile(config)) {
            return;
        }
        String rollingBatch = settings.getOrDefault("option.rolling_batch", "auto");
        if (Integer.parseInt(settings.getOrDefault("batch_size", "1")) > 1) {
            rollingBatch = "disable";
        } else if (rollingBatch.equals("lmi-dist")) {
            rollingBatch = "vllm";
            settings.put("option.mpi_mode", "false");
        } else if (rollingBatch.equals("auto")) {
            rollingBatch = "disable";
            String features = System.getenv().getOrDefault("SERVING_FEATURES", "");
            if (generatesText(config) && (features.contains("vllm") || features.contains("trtllm"))) {
                settings.put("option.async_mode", "true");
            }
        }
        settings.put("option.rolling_batch", rollingBatch);
        boolean trtllm = rollingBatch.equals("trtllm");
        if (trtllm) {
            settings.put("option.mpi_mode", "true");
            settings.putIfAbsent("option.max_num_tokens", "16384");
        }
        settings.putIfAbsent("option.pipeline_parallel_degree", "1");
        String size = trtllm || rollingBatch.equals("vllm") ? "256" : "32";
        settings.putIfAbsent("option.max_rolling_batch_size", size);
    }

    private static boolean generatesText(Path config) throws IOException {
        try (Reader reader = Files.newBufferedReader(config)) {
            JsonArray names = JsonUtils.GSON.fromJson(reader, JsonObject.class).getAsJsonArray("architectures");
            Stream<JsonElement> all =
                    names == null ? Stream.empty() : StreamSupport.stream(names.spliterator(), false);
            return all.map(JsonElement::getAsString)
                    .anyMatch(name -> name.matches(".*(ForCausalLM|LMHeadModel|ForConditionalGeneration)"));
        }
    }
}
