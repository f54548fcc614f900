import ai.djl.inference.streaming.ChunkedBytesSupplier;
import ai.djl.modality.Input;
import ai.djl.modality.Output;
import ai.djl.ndarray.BytesSupplier;
import java.net.URLDecoder;
import java.nio.charset.StandardCharsets;
import java.util.LinkedHashMap;
import java.util.Map;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.TimeUnit;

/**
 * DJL Serving's calls about adapters, as far as a handler can see them: the same Input, put to the worker by the same
 * thread as requests are.
 *
 * <p>In async mode the worker's answer is a stream; this waits for its end, so that a test sees what the handler said.
 */
final class Adapters {
    private final Worker worker;
    private final Map<String, Map<String, String>> registered = new ConcurrentHashMap<>(); // their options, by name

    Adapters(Worker worker) {
        this.worker = worker;
    }

    static boolean isAbout(String path) {
        return path.equals("/adapters") || path.startsWith("/adapters/");
    }

    /** What becomes the status of DJL's JSON. */
    String answer(Http http) throws Exception {
        String[] parts = http.path().split("/");
        Map<String, String> options = query(http.query());
        String alias = http.header("X-Amzn-SageMaker-Adapter-Alias", null);
        if (parts.length == 2 && http.method().equals("POST")) {
            String name = required(options, "name");
            required(options, "src");
            if (registered.containsKey(name)) {
                throw new Failure(409, "IllegalArgumentException", "The adapter " + name + " already exists.");
            }
            String said = call("register_adapter", name, alias, options);
            registered.put(name, options);
            return said;
        }
        String name = parts[2];
        if (!registered.containsKey(name)) {
            throw new Failure(404, "BadRequestException", "The adapter " + name + " was not found");
        }
        if (parts.length == 4 && http.method().equals("POST") && parts[3].equals("update")) {
            Map<String, String> all = new LinkedHashMap<>(registered.get(name));
            all.putAll(options);
            String said = call("update_adapter", name, alias, all);
            registered.put(name, all);
            return said;
        } else if (http.method().equals("DELETE")) {
            String said = call("unregister_adapter", name, alias, Map.of());
            registered.remove(name);
            return said;
        }
        throw new Failure(405, "MethodNotAllowedException", "Request method is not allowed");
    }

    private String call(String function, String name, String alias, Map<String, String> options) throws Exception {
        Input input = new Input();
        input.addProperty("handler", function);
        input.addProperty("name", name);
        if (alias != null) {
            input.addProperty("alias", alias);
        }
        if (options.containsKey("src")) {
            input.addProperty("src", options.get("src"));
            input.addProperty("pin", options.getOrDefault("pin", "false"));
        }
        options.forEach((key, value) -> input.add(key, value));
        Output output = worker.predict(input);
        BytesSupplier data = output.getContent().isEmpty() ? null : output.getData();
        if (data instanceof ChunkedBytesSupplier) {
            ChunkedBytesSupplier pieces = (ChunkedBytesSupplier) data;
            StringBuilder said = new StringBuilder();
            while (pieces.hasNext()) {
                said.append(new String(pieces.nextChunk(60, TimeUnit.SECONDS), StandardCharsets.UTF_8));
            }
            return checked(output, said.toString());
        }
        return checked(output, output.getMessage());
    }

    private static String checked(Output output, String said) {
        if (output.getCode() >= 300) {
            throw new Failure(output.getCode(), "BadRequestException", output.getMessage());
        }
        return said;
    }

    private static String required(Map<String, String> options, String name) {
        String found = options.get(name);
        if (found == null) {
            throw new Failure(400, "BadRequestException", "Parameter " + name + " is required.");
        }
        return found;
    }

    private static Map<String, String> query(String encoded) {
        Map<String, String> found = new LinkedHashMap<>();
        for (String pair : encoded.isEmpty() ? new String[0] : encoded.split("&")) {
            String[] halves = pair.split("=", 2);
            String value = halves.length == 2 ? URLDecoder.decode(halves[1], StandardCharsets.UTF_8) : "";
            found.put(URLDecoder.decode(halves[0], StandardCharsets.UTF_8), value);
        }
        return found;
    }
}
