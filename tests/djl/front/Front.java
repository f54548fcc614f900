import ai.djl.inference.streaming.ChunkedBytesSupplier;
import ai.djl.modality.Input;
import ai.djl.modality.Output;
import ai.djl.ndarray.BytesSupplier;
import java.io.IOException;
import java.net.InetAddress;
import java.net.ServerSocket;
import java.net.Socket;
import java.net.URLDecoder;
import java.nio.charset.StandardCharsets;
import java.nio.file.Path;
import java.util.LinkedHashMap;
import java.util.Map;
import java.util.Set;
import java.util.UUID;
import java.util.concurrent.TimeUnit;

/**
 * DJL Serving's front end, as far as a handler can see it, over DJL's real Python engine.
 *
 * <p>`java Front PORT MODEL_DIRECTORY`; port 0 takes a free one. It serves one model, named "model", on loopback. A line
 * "front: ready on URL" says that the model has loaded and the port is open; a model that cannot load ends the process
 * with status 1 and the reason as its last line.
 */
public final class Front {
    private static final Set<String> MODEL_IN_BODY = Set.of("/invocations", "/v1/chat/completions");

    private final Worker worker;
    private final Adapters adapters;
    private final boolean old; // as DJL Serving before 0.29: every streamed reply is chunked, no requestId property
    private final int readTimeout;

    private Front(Path model) throws Exception {
        this.worker = new Worker(model);
        this.old = Worker.version().compareTo("0.29") < 0;
        this.adapters = new Adapters(worker, old);
        worker.start(adapters.besideModel(model));
        this.readTimeout = Settings.number("chunked_read_timeout", old ? 60 : 120);
    }

    public static void main(String[] arguments) {
        try {
            Front front = new Front(Path.of(arguments[1]).toAbsolutePath());
            Http.maxBody = Settings.number("max_request_size", 64 << 20);
            ServerSocket listener =
                    new ServerSocket(Integer.parseInt(arguments[0]), 1024, InetAddress.getLoopbackAddress());
            System.err.println("front: ready on http://127.0.0.1:" + listener.getLocalPort());
            while (true) {
                Socket socket = listener.accept();
                new Thread(() -> Http.serve(socket, front::answer), "http").start();
            }
        } catch (Throwable error) {
            Throwable cause = Failure.innermost(error);
            System.err.println("front: cannot start: " + cause.getClass().getSimpleName() + ": " + cause.getMessage());
            System.exit(1);
        }
    }

    /** Answers one request; what it throws before the head is sent becomes DJL's error body. */
    private void answer(Http http) throws IOException {
        try {
            route(http);
        } catch (Exception error) {
            if (http.headSent() || error instanceof IOException) {
                throw error instanceof IOException ? (IOException) error : new IOException(error);
            }
            Failure failure = Failure.of(error);
            http.whole(failure.status, null, common("application/json"), failure.body());
        }
    }

    private void route(Http http) throws Exception {
        String path = http.path();
        if (http.method().equals("OPTIONS")) {
            http.whole(200, null, common("application/json"), Http.bytes("{}\n"));
        } else if (path.equals("/ping")) {
            boolean failed = worker.hasFailed();
            Object status = Map.of(Worker.MODEL, Map.of("status", failed ? "FAILED" : "Healthy"));
            http.whole(failed ? 500 : 200, null, common("application/json"), Http.json(status));
        } else if (Adapters.isAbout(path)) {
            http.whole(200, null, common("application/json"), Http.json(adapters.answer(http)));
        } else {
            predict(http, modelInPath(path));
        }
    }

    /** The model that a path names, null where the body or a header may name it. */
    private static String modelInPath(String path) {
        String[] parts = path.split("/");
        if (MODEL_IN_BODY.contains(path)) {
            return null;
        } else if (parts.length >= 3 && parts.length <= 4 && parts[1].equals("predictions")) {
            return parts[2];
        } else if (parts.length == 4 && parts[1].equals("models") && parts[3].equals("invoke")) {
            return parts[2];
        }
        throw new Failure(
                404,
                "ResourceNotFoundException",
                "Requested resource is not found, please refer to API document.");
    }

    private void predict(Http http, String model) throws Exception {
        Input input = input(http);
        if (model == null) {
            model = input.getProperty("model_name", Worker.MODEL);
        }
        if (!model.equals(Worker.MODEL)) {
            throw new Failure(404, "ModelNotFoundException", "Model or workflow not found: " + model);
        }
        String id = UUID.randomUUID().toString();
        if (!old) {
            input.addProperty("requestId", id);
        }
        Output output = worker.predict(input);
        BytesSupplier data = output.getContent().isEmpty() ? BytesSupplier.wrap(new byte[0]) : output.getData();
        if (data instanceof ChunkedBytesSupplier) {
            stream(http, id, output, (ChunkedBytesSupplier) data);
        } else {
            http.whole(output.getCode(), output.getMessage(), headers(id, output), data.getAsBytes());
        }
    }

    /** The handler may set the status and the headers until its first piece, so that is awaited before either is read. */
    private void stream(Http http, String id, Output output, ChunkedBytesSupplier pieces) throws Exception {
        byte[] piece;
        try {
            piece = pieces.nextChunk(readTimeout, TimeUnit.SECONDS);
            Map<String, String> headers = headers(id, output);
            if (!pieces.hasNext() && !old) {
                http.whole(output.getCode(), output.getMessage(), headers, piece);
                return;
            }
            http.beginChunked(output.getCode(), output.getMessage(), headers);
            http.chunk(piece);
            while (pieces.hasNext()) {
                // What is there already goes out in one write, still a chunk each.
                piece = pieces.pollChunk();
                if (piece == null) {
                    http.flush();
                    piece = pieces.nextChunk(readTimeout, TimeUnit.SECONDS);
                }
                http.chunk(piece);
            }
            http.endChunked();
        } catch (IllegalStateException timeout) {
            http.reset("no piece in " + readTimeout + " s");
        }
    }

    /** DJL's Input: headers are properties, the body is the content `data`, query and form fields are contents. */
    private static Input input(Http http) {
        Input input = new Input();
        for (Map.Entry<String, String> header : http.headers()) {
            if (header.getKey().equalsIgnoreCase("X-Amzn-SageMaker-Custom-Attributes")) {
                customAttributes(input, header.getValue());
            } else {
                input.addProperty(header.getKey(), header.getValue());
            }
        }
        fields(input, http.query());
        if (http.header("content-type", "").startsWith("application/x-www-form-urlencoded")) {
            fields(input, new String(http.body(), StandardCharsets.UTF_8));
        } else {
            input.add("data", http.body());
        }
        if (input.getProperties().containsKey("handler") && !Settings.flag("ALLOW_REQUEST_HANDLER_OVERRIDE")) {
            throw new Failure(400, "BadRequestException", "The handler can't be overridden in a request");
        }
        return input;
    }

    private static void customAttributes(Input input, String value) {
        for (String pair : value.split(";")) {
            String[] halves = pair.split("=", 2);
            if (halves.length == 2) {
                input.addProperty(halves[0].trim(), halves[1].trim());
            }
        }
    }

    private static void fields(Input input, String encoded) {
        for (String pair : encoded.isEmpty() ? new String[0] : encoded.split("&")) {
            String[] halves = pair.split("=", 2);
            String value = halves.length == 2 ? URLDecoder.decode(halves[1], StandardCharsets.UTF_8) : "";
            input.add(URLDecoder.decode(halves[0], StandardCharsets.UTF_8), value);
        }
    }

    private static Map<String, String> headers(String id, Output output) {
        Map<String, String> headers = common(null);
        headers.put("x-request-id", id);
        headers.putAll(output.getProperties());
        return headers;
    }

    private static Map<String, String> common(String contentType) {
        Map<String, String> headers = new LinkedHashMap<>();
        headers.put("Pragma", "no-cache");
        headers.put("Cache-Control", "no-cache; no-store, must-revalidate, private");
        headers.put("Expires", "Thu, 01 Jan 1970 00:00:00 UTC");
        if (contentType != null) {
            headers.put("Content-Type", contentType);
        }
        return headers;
    }
}
