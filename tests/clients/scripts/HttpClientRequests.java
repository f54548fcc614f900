import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpRequest.BodyPublishers;
import java.net.http.HttpResponse;
import java.net.http.HttpResponse.BodyHandlers;
import java.time.Duration;
import java.util.Arrays;
import java.util.stream.Collectors;
import java.util.stream.Stream;

/** Ten requests in a row with the JDK's HttpClient as it is by default, which offers HTTP/2. */
class HttpClientRequests {
    static final HttpClient CLIENT = HttpClient.newHttpClient();

    public static void main(String[] arguments) throws Exception {
        String url = arguments[0];
        String parameters = "\"parameters\":{\"max_new_tokens\":3}";
        for (int round = 0; round < 2; round++) {
            System.out.println(whole(post(url, "application/json", "{\"inputs\":\"a b\"," + parameters + "}")));
            HttpRequest stream = post(url, "application/json", "{\"inputs\":\"a b\",\"stream\":true," + parameters + "}");
            HttpResponse<Stream<String>> lines = CLIENT.send(stream, BodyHandlers.ofLines());
            System.out.println(lines.statusCode() + " " + lines.body().count() + " lines");
            System.out.println(whole(request(url, "/ping").GET().build()));
            HttpResponse<String> plain = CLIENT.send(post(url, "text/plain", "a\r\nUpgrade: x\r\nb"), BodyHandlers.ofString());
            System.out.println(plain.statusCode() + " " + words(plain.body()));
            System.out.println(whole(post(url, "application/json", "{\"inputs\":\"a b\"," + parameters + "}")));
        }
    }

    static HttpRequest.Builder request(String url, String path) {
        return HttpRequest.newBuilder(URI.create(url + path)).timeout(Duration.ofSeconds(100));
    }

    static HttpRequest post(String url, String type, String body) {
        return request(url, "/invocations").header("Content-Type", type).POST(BodyPublishers.ofString(body)).build();
    }

    static String whole(HttpRequest request) throws Exception {
        HttpResponse<String> found = CLIENT.send(request, BodyHandlers.ofString());
        return found.statusCode() + " " + found.body();
    }

    /** The first words of an answer by the echo engine, which repeats the prompt's. */
    static String words(String answer) {
        String text = answer.replaceAll("^.*\"generated_text\":\"|\"}$", "").replace("\\r\\n", " ");
        return Arrays.stream(text.trim().split("\\s+")).limit(4).collect(Collectors.toList()).toString();
    }
}
