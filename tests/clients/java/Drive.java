import java.io.BufferedReader;
import java.io.ByteArrayOutputStream;
import java.io.InputStreamReader;
import java.net.URI;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.List;
import java.util.concurrent.CompletionException;
import software.amazon.awssdk.auth.credentials.AwsBasicCredentials;
import software.amazon.awssdk.auth.credentials.StaticCredentialsProvider;
import software.amazon.awssdk.core.SdkBytes;
import software.amazon.awssdk.protocols.jsoncore.JsonNode;
import software.amazon.awssdk.regions.Region;
import software.amazon.awssdk.retries.DefaultRetryStrategy;
import software.amazon.awssdk.services.sagemakerruntime.SageMakerRuntimeAsyncClient;
import software.amazon.awssdk.services.sagemakerruntime.SageMakerRuntimeClient;
import software.amazon.awssdk.services.sagemakerruntime.model.InvokeEndpointRequest;
import software.amazon.awssdk.services.sagemakerruntime.model.InvokeEndpointWithResponseStreamRequest;
import software.amazon.awssdk.services.sagemakerruntime.model.InvokeEndpointWithResponseStreamResponseHandler;

/** Calls with AWS's SDK for Java, a line of JSON each; writes a line of JSON with what came of it. A stream, which only
 * the asynchronous client has, is told as the texts of its parts. */
public final class Drive {
    private static final StaticCredentialsProvider KEYS =
            StaticCredentialsProvider.create(AwsBasicCredentials.create("x", "x"));

    public static void main(String[] arguments) throws Exception {
        BufferedReader lines = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        for (String line = lines.readLine(); line != null; line = lines.readLine()) {
            JsonNode job = JsonNode.parser().parse(line);
            List<String> events = new ArrayList<>();
            String answer = null;
            Throwable failure = null;
            try {
                answer = called(job, events);
            } catch (Exception error) { // which one it is, is what the test wants to know
                failure = error instanceof CompletionException ? error.getCause() : error;
            }
            String found = "{\"answer\":" + quoted(answer) + ",\"events\":[" + String.join(",", events) + "],\"error\":"
                    + quoted(failure == null ? null : failure.getClass().getName()) + ",\"message\":"
                    + quoted(failure == null ? "" : String.valueOf(failure.getMessage())) + "}\n";
            System.out.write(found.getBytes(StandardCharsets.UTF_8));
            System.out.flush();
        }
    }

    /** The prompt is the body; the one option is the endpoint's name. */
    private static String called(JsonNode job, List<String> events) {
        URI url = URI.create(job.field("url").orElseThrow().asString());
        SdkBytes body = SdkBytes.fromUtf8String(job.field("prompt").orElseThrow().asString());
        String name = job.field("options").orElseThrow().field("endpoint").map(JsonNode::asString).orElse("local");
        boolean asynchronous = job.field("asynchronous").orElseThrow().asBoolean();
        InvokeEndpointRequest whole =
                InvokeEndpointRequest.builder().endpointName(name).contentType("application/json").body(body).build();
        if (!asynchronous) {
            try (SageMakerRuntimeClient client = SageMakerRuntimeClient.builder().region(Region.US_EAST_1)
                    .endpointOverride(url).credentialsProvider(KEYS)
                    .overrideConfiguration(one -> one.retryStrategy(DefaultRetryStrategy.doNotRetry())).build()) {
                return client.invokeEndpoint(whole).body().asUtf8String();
            }
        }
        try (SageMakerRuntimeAsyncClient client = SageMakerRuntimeAsyncClient.builder().region(Region.US_EAST_1)
                .endpointOverride(url).credentialsProvider(KEYS)
                .overrideConfiguration(one -> one.retryStrategy(DefaultRetryStrategy.doNotRetry())).build()) {
            if (job.field("how").orElseThrow().asString().equals("generate")) {
                return client.invokeEndpoint(whole).join().body().asUtf8String();
            }
            streamed(client, name, body, events);
            return null;
        }
    }

    /** A part may end within a character: the bytes are put together before they are read. */
    private static void streamed(SageMakerRuntimeAsyncClient client, String name, SdkBytes body, List<String> events) {
        ByteArrayOutputStream rest = new ByteArrayOutputStream();
        var visitor = InvokeEndpointWithResponseStreamResponseHandler.Visitor.builder()
                .onPayloadPart(part -> read(part.bytes().asByteArray(), rest, events)).build();
        client.invokeEndpointWithResponseStream(
                InvokeEndpointWithResponseStreamRequest.builder().endpointName(name).contentType("application/json")
                        .body(body).build(),
                InvokeEndpointWithResponseStreamResponseHandler.builder().subscriber(visitor).build()).join();
    }

    private static void read(byte[] part, ByteArrayOutputStream rest, List<String> events) {
        for (byte one : part) {
            if (one == '\n') {
                events.add(rest.toString(StandardCharsets.UTF_8)); // JSON already
                rest.reset();
            } else {
                rest.write(one);
            }
        }
    }

    private static String quoted(String text) {
        if (text == null) {
            return "null";
        }
        StringBuilder found = new StringBuilder("\"");
        for (char one : text.toCharArray()) {
            if (one == '"' || one == '\\') {
                found.append('\\').append(one);
            } else if (one < ' ') {
                found.append(String.format("\\u%04x", (int) one));
            } else {
                found.append(one);
            }
        }
        return found.append('"').toString();
    }
}
