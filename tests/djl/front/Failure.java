import ai.djl.engine.EngineException;
import ai.djl.translate.TranslateException;
import java.util.LinkedHashMap;
import java.util.Map;

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
        Map<String, Object> value = new LinkedHashMap<>();
        value.put("code", status);
        value.put("type", type);
        value.put("message", getMessage());
        return Http.json(value);
    }
}
