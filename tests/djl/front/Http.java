import ai.djl.util.JsonUtils;
import java.io.BufferedInputStream;
import java.io.ByteArrayOutputStream;
import java.io.EOFException;
import java.io.IOException;
import java.io.InputStream;
import java.io.OutputStream;
import java.net.Socket;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;

/**
 * One connection: HTTP/1.1 as far as DJL Serving's front end shows it.
 *
 * <p>The JDK's server is not used because it spells header names its own way (they become a handler's properties), picks
 * the reason phrase itself (DJL puts the handler's error there) and costs more for each small piece of a stream.
 */
final class Http {
    interface Handler {
        void answer(Http http) throws IOException;
    }

    static int maxBody;

    private static final int MAX_LINE = 8192;
    private static final byte[] CRLF = bytes("\r\n");
    private static final byte[] LAST_CHUNK = bytes("0\r\n\r\n");

    private final Socket socket;
    private final InputStream in;
    private final OutputStream out;
    private final ByteArrayOutputStream pending = new ByteArrayOutputStream();

    private String method;
    private String path;
    private String query;
    private List<Map.Entry<String, String>> headers;
    private byte[] body;
    private boolean keepAlive;
    private boolean headSent;

    private Http(Socket socket) throws IOException {
        this.socket = socket;
        in = new BufferedInputStream(socket.getInputStream());
        out = socket.getOutputStream();
    }

    /** Serves a connection's requests one after another until either side ends it. */
    static void serve(Socket socket, Handler handler) {
        try (socket) {
            socket.setTcpNoDelay(true);
            Http http = new Http(socket);
            while (http.read()) {
                handler.answer(http);
                if (!http.keepAlive) {
                    break;
                }
            }
        } catch (IOException gone) {
            // The client went away, or the stream broke off: there is nobody to tell.
        }
    }

    static byte[] bytes(String text) {
        return text.getBytes(StandardCharsets.UTF_8);
    }

    /** A value as DJL's own Gson writes it: indented, and with \\u0027 for an apostrophe. */
    static byte[] json(Object value) {
        return bytes(JsonUtils.GSON_PRETTY.toJson(value) + "\n");
    }

    String method() {
        return method;
    }

    String path() {
        return path;
    }

    String query() {
        return query;
    }

    List<Map.Entry<String, String>> headers() {
        return headers;
    }

    String header(String name, String otherwise) {
        for (Map.Entry<String, String> header : headers) {
            if (header.getKey().equalsIgnoreCase(name)) {
                return header.getValue();
            }
        }
        return otherwise;
    }

    byte[] body() {
        return body;
    }

    boolean headSent() {
        return headSent;
    }

    // What comes in.

    /** The next request; false at the end of the connection, or after one that is answered here. */
    private boolean read() throws IOException {
        headSent = false;
        String first = line();
        if (first == null) {
            return false;
        }
        String[] parts = first.split(" ");
        headers = new ArrayList<>();
        for (String line = line(); line != null && !line.isEmpty(); line = line()) {
            String[] halves = line.split(":", 2);
            headers.add(Map.entry(halves[0], halves.length == 2 ? halves[1].trim() : ""));
        }
        if (parts.length != 3 || !parts[2].startsWith("HTTP/1.")) {
            return refuse(400, new Failure(400, "BadRequestException", "Invalid HTTP message.").body());
        }
        method = parts[0];
        String[] target = parts[1].split("\\?", 2);
        path = target[0];
        query = target.length == 2 ? target[1] : "";
        keepAlive = parts[2].equals("HTTP/1.1") && !header("connection", "").equalsIgnoreCase("close");
        return header("transfer-encoding", "").equalsIgnoreCase("chunked") ? readChunked() : readSized();
    }

    private boolean readSized() throws IOException {
        long size = Long.parseLong(header("content-length", "0"));
        if (size > maxBody) {
            in.skipNBytes(size); // else the close resets the connection before the client has read the answer
            return refuse(413, new byte[0]);
        }
        allowBody();
        body = in.readNBytes((int) size);
        return body.length == size;
    }

    private boolean readChunked() throws IOException {
        allowBody();
        ByteArrayOutputStream whole = new ByteArrayOutputStream();
        long total = 0;
        for (int size = chunkSize(); size > 0; size = chunkSize()) {
            byte[] chunk = in.readNBytes(size);
            total += size;
            if (total <= maxBody) {
                whole.write(chunk);
            }
            line();
        }
        line();
        body = whole.toByteArray();
        return total <= maxBody || refuse(413, new byte[0]);
    }

    private int chunkSize() throws IOException {
        String line = line();
        if (line == null) {
            throw new EOFException();
        }
        return Integer.parseInt(line.split(";")[0].trim(), 16);
    }

    private void allowBody() throws IOException {
        if (header("expect", "").equalsIgnoreCase("100-continue")) {
            out.write(bytes("HTTP/1.1 100 Continue\r\n\r\n"));
        }
    }

    private boolean refuse(int status, byte[] content) throws IOException {
        whole(status, null, Map.of("Content-Type", "application/json"), content);
        return false;
    }

    private String line() throws IOException {
        StringBuilder line = new StringBuilder();
        for (int c = in.read(); c != '\n'; c = in.read()) {
            if (c < 0) {
                return null;
            }
            if (line.length() > MAX_LINE) {
                throw new IOException("a line of the head is too long");
            }
            line.append((char) c);
        }
        int end = line.length();
        return line.substring(0, end > 0 && line.charAt(end - 1) == '\r' ? end - 1 : end);
    }

    // What goes out.

    /** As DJL's: the connection is closed after an error. */
    void whole(int status, String reason, Map<String, String> fields, byte[] content) throws IOException {
        keepAlive &= status < 400;
        head(status, reason, fields, "content-length: " + content.length);
        pending.write(content);
        flush();
    }

    void beginChunked(int status, String reason, Map<String, String> fields) {
        head(status, reason, fields, "transfer-encoding: chunked");
    }

    void chunk(byte[] piece) throws IOException {
        if (piece.length > 0) { // an empty one would end the body
            pending.write(bytes(Integer.toHexString(piece.length)));
            pending.write(CRLF);
            pending.write(piece);
            pending.write(CRLF);
        }
    }

    void endChunked() throws IOException {
        pending.write(LAST_CHUNK);
        flush();
    }

    /** Resets the connection, as Netty's disconnect is seen by the client. */
    void reset(String reason) throws IOException {
        socket.setSoLinger(true, 0);
        throw new IOException(reason);
    }

    void flush() throws IOException {
        pending.writeTo(out);
        pending.reset();
    }

    /** As Netty: a reason or a header with a line break in it is an error, and others are ASCII. */
    private void head(int status, String reason, Map<String, String> fields, String framing) {
        StringBuilder head = new StringBuilder("HTTP/1.1 ").append(status).append(' ');
        head.append(checked(reason == null ? String.valueOf(status) : reason)).append("\r\n");
        fields.forEach((name, value) -> head.append(name).append(": ").append(checked(value)).append("\r\n"));
        head.append(framing).append("\r\nconnection: ").append(keepAlive ? "keep-alive" : "close").append("\r\n\r\n");
        headSent = true;
        pending.writeBytes(head.toString().getBytes(StandardCharsets.US_ASCII));
    }

    private static String checked(String text) {
        if (text.indexOf('\r') >= 0 || text.indexOf('\n') >= 0) {
            throw new IllegalArgumentException("a line break in the status line or a header: " + text);
        }
        return text;
    }
}
