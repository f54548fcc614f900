import ai.djl.metric.Metric;
import java.io.BufferedReader;
import java.io.IOException;
import java.io.InputStreamReader;
import java.nio.charset.StandardCharsets;
import java.util.Arrays;
import java.util.stream.Collectors;

/**
 * Reads metrics, a line each, as DJL Serving's Prometheus appender does, and writes them as it would.
 *
 * <p>Where it knows no unit of a metric, it fails: the appender loses that metric and logs a stack.
 */
final class Metrics {
    private Metrics() {}

    public static void main(String[] arguments) throws IOException {
        try (BufferedReader lines = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8))) {
            for (String line = lines.readLine(); line != null; line = lines.readLine()) {
                Metric metric = Metric.parse(line);
                metric.getUnit();
                System.out.println(metric.getMetricName() + labels(metric) + " " + metric.getValue());
            }
        }
    }

    private static String labels(Metric metric) {
        return Arrays.stream(metric.getDimensions())
                .map(label -> label.getName() + "=\"" + label.getValue() + "\"")
                .collect(Collectors.joining(",", "{", "}"));
    }
}
