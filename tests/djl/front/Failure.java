import ai.djl.engine.EngineException;
import ai.djl.translate.TranslateException;
import java.nio.charset.StandardCharsets;

/** An error in the form that DJL Serving's front end gives it. */
final class Failure extends RuntimeException {
    private static final long serialVersionUID = 1L;

    final int status;
    final String type;

    Failure(int status, String type, String message) {
        super(message);
        this.status = status;
        this.type = type;
    }

    /** DJL's status for what a prediction throws; a dead worker is a WlmException there. */
    static Failure of(Throwable error) {
        if (error instanceof Failure) {
            return (Failure) error;
        }
        String message = String.valueOf(innermost(error).getMessage());
        if (error instanceof TranslateException) {
            return new Failure(400, "TranslateException", message);
        }
        if (error instanceof EngineException) {
            return new Failure(503, "WlmException", message);
        }
        return new Failure(500, error.getClass().getSimpleName(), message);
    }

    static Throwable innermost(Throwable error) {
        return error.getCause() == null ? error : innermost(error.getCause());
    }

    byte[] body() {
        String text = "{\n  \"code\": " + status + ",\n  \"type\": \"" + type + "\",\n  \"message\": \""
                + escape(getMessage()) + "\"\n}\n";
        return text.getBytes(StandardCharsets.UTF_8);
    }

    static String escape(String text) {
        StringBuilder out = new StringBuilder();
        for (char c : text.toCharArray()) {
            if (c == '"' || c == '\\') {
                out.append('\\').append(c);
            } else if (c < ' ') {
                out.append(String.format("\\u%04x", (int) c));
            } else {
                out.append(c);
            }
        }
        return out.toString();
    }
}
