import ai.djl.modality.Input;
import ai.djl.modality.Output;
import java.io.IOException;
import java.net.URI;
import java.net.URISyntaxException;
import java.net.URLDecoder;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.regex.Pattern;
import java.util.stream.Collectors;
import java.util.stream.Stream;

/**
 * DJL Serving's routes about adapters, and its own list of them.
 *
 * <p>0.36 asks the worker, answers with the code and the message of its Output, and looks up the name only then. In async
 * mode that Output is 200 "OK" before the worker has read the call. 0.28 answers by itself: the worker gets the call
 * before its next request, and Java drops what it says.
 */
final class Adapters {
    private static final Pattern ROUTE = Pattern.compile("(/models/[^/]+)?/adapters(/.*)?");

    private static final class Known {
        final String src;
        final Map<String, String> options;

        Known(String src, Map<String, String> options) {
            this.src = src;
            this.options = options;
        }
    }

    private final Worker worker;
    private final boolean old;
    private final Map<String, Known> known = new LinkedHashMap<>();

    Adapters(Worker worker, boolean old) {
        this.worker = worker;
        this.old = old;
    }

    static boolean isAbout(String path) {
        return ROUTE.matcher(path).matches();
    }

    /** Lists what lies beside the model; returns the calls that the worker gets before any request. */
    List<Input> besideModel(Path model) throws IOException {
        List<Input> calls = new ArrayList<>();
        Path directory = model.resolve("adapters");
        if (Files.isDirectory(directory)) {
            try (Stream<Path> entries = Files.list(directory)) {
                for (Path entry : entries.collect(Collectors.toList())) {
                    String name = entry.getFileName().toString();
                    Known adapter = new Known(entry.toAbsolutePath().toString(), Map.of());
                    known.put(name, adapter);
                    calls.add(call("register_adapter", name, null, adapter));
                }
            }
        }
        return calls;
    }

    /** The value of the answer's JSON. */
    synchronized Object answer(Http http) throws Exception {
        List<String> parts = new ArrayList<>(List.of(http.path().substring(1).split("/")));
        if (parts.get(0).equals("models")) {
            checkModel(parts.get(1));
            parts.subList(0, 2).clear();
        }
        String name = parts.size() > 1 ? parts.get(1) : null;
        Map<String, String> query = query(http.query());
        String alias = http.header("X-Amzn-SageMaker-Adapter-Alias", null);
        boolean update = parts.size() == 3 && parts.get(2).equalsIgnoreCase("update");
        if (http.method().equals("GET")) {
            checkEnabled();
            return name == null ? list() : List.of(shown(name, get(name, alias, 400)));
        } else if (http.method().equals("POST") && name == null) {
            checkEnabled();
            return Map.of("status", register(query, alias));
        } else if (http.method().equals("POST") && update && old) { // 0.28 takes the name for a model's
            required(query, "name");
            required(query, "src");
            checkModel(name);
        } else if (http.method().equals("POST") && update) {
            checkEnabled();
            return Map.of("status", update(name, query, alias));
        } else if (http.method().equals("DELETE") && name != null) {
            checkEnabled();
            return Map.of("status", unregister(name, alias));
        }
        throw new Failure(405, "MethodNotAllowedException", "Request method is not allowed");
    }

    private String register(Map<String, String> query, String alias) throws Exception {
        String name = required(query, "name");
        String src = required(query, "src");
        refuseUrl(src);
        Known adapter = new Known(src, query);
        if (old) {
            add(name, adapter);
            worker.configure(call("register_adapter", name, null, adapter));
            return "Adapter " + name + " registered";
        }
        String message = ask(call("register_adapter", name, alias, adapter));
        add(name, adapter);
        return message;
    }

    private String update(String name, Map<String, String> query, String alias) throws Exception {
        Known earlier = get(name, alias, 404);
        Map<String, String> options = new LinkedHashMap<>(earlier.options);
        options.putAll(query);
        Known adapter = new Known(options.getOrDefault("src", earlier.src), options);
        String message = ask(call("update_adapter", name, alias, adapter));
        known.put(name, adapter);
        return message;
    }

    private String unregister(String name, String alias) throws Exception {
        if (old) {
            if (known.remove(name) == null) {
                String message = "The adapter " + name + " was not found and therefore can't be unregistered";
                throw new Failure(500, "IllegalArgumentException", message);
            }
            worker.configure(call("unregister_adapter", name, null, null));
            return "Adapter " + name + " registered"; // sic
        }
        get(name, alias, 404);
        String message = ask(call("unregister_adapter", name, alias, null));
        known.remove(name);
        return message;
    }

    private Map<String, Object> list() {
        List<Object> adapters = new ArrayList<>();
        known.forEach((name, adapter) -> adapters.add(shown(name, adapter)));
        return Map.of("adapters", adapters);
    }

    private Object shown(String name, Known adapter) {
        return old ? Map.of("name", name, "src", adapter.src) : Map.of("name", name, "src", adapter.src, "pin", false);
    }

    private String ask(Input call) throws Exception {
        Output output = worker.predict(call);
        if (worker.isAsync()) { // Java has looked at it long before the worker's answer is in it
            return "OK";
        }
        if (output.getCode() >= 300) {
            throw new Failure(output.getCode(), "BadRequestException", output.getMessage());
        }
        return output.getMessage();
    }

    private void add(String name, Known adapter) {
        if (known.putIfAbsent(name, adapter) != null) {
            String message = "The adapter " + name + " already exists.";
            throw new Failure(old ? 500 : 409, "IllegalArgumentException", message);
        }
    }

    private Known get(String name, String alias, int status) {
        Known adapter = known.get(name);
        if (adapter == null) {
            String called = alias == null || old ? name : alias;
            throw new Failure(old ? 400 : status, "BadRequestException", "The adapter " + called + " was not found");
        }
        return adapter;
    }

    private void checkEnabled() {
        if (!old && !worker.enablesLora()) {
            throw new Failure(400, "BadRequestException", "LoRA is not enabled.");
        }
    }

    private void checkModel(String name) {
        if (!name.equals(Worker.MODEL)) {
            throw new Failure(old ? 400 : 404, "BadRequestException", "The model " + name + " was not found");
        }
    }

    private void refuseUrl(String src) {
        try {
            String scheme = new URI(src).getScheme();
            if (scheme != null && !scheme.equals("file")) {
                String message = "URL adapters are not currently supported";
                throw new Failure(old ? 500 : 409, "IllegalArgumentException", message);
            }
        } catch (URISyntaxException path) {
            // Java takes it for a path.
        }
    }

    private static Input call(String function, String name, String alias, Known adapter) {
        Input input = new Input();
        input.addProperty("handler", function);
        input.addProperty("name", name);
        if (alias != null) {
            input.addProperty("alias", alias);
        }
        if (adapter != null) {
            input.addProperty("src", adapter.src);
            input.addProperty("pin", adapter.options.getOrDefault("pin", "false"));
            adapter.options.forEach((key, value) -> input.add(key, value));
        }
        return input;
    }

    private static String required(Map<String, String> query, String name) {
        String value = query.get(name);
        if (value == null) {
            throw new Failure(400, "BadRequestException", "The parameter " + name + " is required");
        }
        return value;
    }

    private static Map<String, String> query(String encoded) {
        Map<String, String> values = new LinkedHashMap<>();
        for (String pair : encoded.isEmpty() ? new String[0] : encoded.split("&")) {
            String[] halves = pair.split("=", 2);
            String value = halves.length == 2 ? URLDecoder.decode(halves[1], StandardCharsets.UTF_8) : "";
            values.put(URLDecoder.decode(halves[0], StandardCharsets.UTF_8), value);
        }
        return values;
    }
}
