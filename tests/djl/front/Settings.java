import java.io.IOException;
import java.io.InputStream;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.Locale;
import java.util.Map;
import java.util.Properties;
import java.util.TreeMap;

/** What DJL Serving reads from serving.properties and from the environment. */
final class Settings {
    private Settings() {}

    /** serving.properties, then what `OPTION_*` adds: the file wins. Then Java changes some of them itself. */
    static Map<String, String> ofModel(Path directory, String version) throws IOException {
        Properties file = new Properties();
        Path path = directory.resolve("serving.properties");
        if (Files.isRegularFile(path)) {
            try (InputStream stream = Files.newInputStream(path)) {
                file.load(stream); // as ISO 8859-1, like ModelInfo
            }
        }
        Map<String, String> found = new TreeMap<>();
        file.forEach((key, value) -> found.put(((String) key).trim(), ((String) value).trim()));
        System.getenv().forEach((key, value) -> {
            if (key.startsWith("OPTION_")) {
                found.putIfAbsent(optionName(key.substring("OPTION_".length())), value);
            }
        });
        Recommender.configure(directory, found, version);
        return found;
    }

    /** OPTION_MODEL_ID is option.model_id; mixed case is kept; two have names of their own. */
    private static String optionName(String name) {
        if (name.equals("ENTRYPOINT")) {
            return "option.entryPoint";
        }
        if (name.equals("ENGINE")) {
            return "engine";
        }
        return "option." + (name.matches("[A-Z0-9_]+") ? name.toLowerCase(Locale.ROOT) : name);
    }

    /** A server setting: `SERVING_<KEY>` in the environment, else the system property. */
    static int number(String key, int otherwise) {
        String found = System.getenv("SERVING_" + key.toUpperCase(Locale.ROOT));
        return found != null ? Integer.parseInt(found) : Integer.getInteger(key, otherwise);
    }

    /** One that a model's own file may set, and the server for all models. */
    static int number(Map<String, String> model, String key, int otherwise) {
        return model.containsKey(key) ? Integer.parseInt(model.get(key)) : number(key, otherwise);
    }

    static boolean flag(String name) {
        return Boolean.parseBoolean(System.getenv().getOrDefault(name, System.getProperty(name)));
    }
}
