import ai.djl.engine.Engine;
import ai.djl.inference.Predictor;
import ai.djl.modality.Input;
import ai.djl.modality.Output;
import ai.djl.repository.zoo.Criteria;
import ai.djl.repository.zoo.ZooModel;
import ai.djl.translate.NoopServingTranslatorFactory;
import ai.djl.translate.TranslateException;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.Queue;
import java.util.concurrent.BlockingQueue;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.CompletionException;
import java.util.concurrent.ConcurrentLinkedQueue;
import java.util.concurrent.LinkedBlockingQueue;
import java.util.concurrent.TimeUnit;

/** The loaded model and the one thread that hands it jobs, in batches where `batch_size` asks for them. */
final class Worker {
    static final String MODEL = "model";

    private static final class Job {
        final Input input;
        final CompletableFuture<Output> output = new CompletableFuture<>();

        Job(Input input) {
            this.input = input;
        }
    }

    private final ZooModel<Input, Output> model;
    private final Predictor<Input, Output> predictor;
    private final Queue<Input> configJobs = new ConcurrentLinkedQueue<>();
    private final BlockingQueue<Job> queue;
    private final boolean enablesLora;
    private final boolean async;
    private final boolean takesCalls;
    private final int retryThreshold;
    private final int batchSize;
    private final long maxBatchDelay;

    /** Starts Python and returns when the handler has loaded its model. */
    Worker(Path directory) throws Exception {
        Map<String, String> settings = Settings.ofModel(directory, version());
        checkDevices(settings);
        boolean stepwise = !settings.getOrDefault("option.rolling_batch", "disable").equals("disable");
        async = Boolean.parseBoolean(settings.get("option.async_mode"));
        batchSize = stepwise || async ? 1 : Settings.number(settings, "batch_size", 1);
        maxBatchDelay = Settings.number(settings, "max_batch_delay", 100);
        queue = new LinkedBlockingQueue<>(Settings.number(settings, "job_queue_size", 1000));
        Runtime.getRuntime().addShutdownHook(new Thread(this::close));
        enablesLora = Boolean.parseBoolean(settings.get("option.enable_lora"));
        takesCalls = !stepwise || version().compareTo("0.28") >= 0;
        retryThreshold = Settings.number(settings, "retry_threshold", version().compareTo("0.30") < 0 ? 10 : 0);
        model = load(directory, settings);
        predictor = model.newPredictor();
    }

    /**
     * Hands jobs to the worker from now on; `first` are calls that it gets before any.
     *
     * <p>Not 0.25's: its rolling batch takes a call for a request, and breaks on one that has no content.
     */
    void start(List<Input> first) {
        if (takesCalls) {
            configJobs.addAll(first);
        }
        Thread thread = new Thread(this::run, "worker");
        thread.setDaemon(true);
        thread.start();
    }

    private static ZooModel<Input, Output> load(Path directory, Map<String, String> settings) throws Exception {
        Criteria.Builder<Input, Output> criteria =
                Criteria.builder()
                        .setTypes(Input.class, Output.class)
                        .optModelPath(directory)
                        .optModelName(MODEL)
                        .optEngine(settings.getOrDefault("engine", "Python"))
                        .optTranslatorFactory(new NoopServingTranslatorFactory());
        settings.forEach((key, value) -> {
            if (key.startsWith("option.")) {
                criteria.optOption(key.substring("option.".length()), value);
            } else {
                criteria.optArgument(key, value);
            }
        });
        return criteria.build().loadModel();
    }

    /** A device in DJL Serving's command, here `FRONT_DEVICE`, goes before `load_on_devices`. */
    private static void checkDevices(Map<String, String> settings) {
        String device = System.getenv().getOrDefault("FRONT_DEVICE", settings.getOrDefault("load_on_devices", "*"));
        if (device.equals("0") && System.getenv().getOrDefault("FRONT_GPUS", "0").equals("0")) {
            throw new IllegalStateException("No GPU device detected.");
        }
    }

    static String version() {
        return Engine.getEngine("Python").getVersion();
    }

    boolean isAsync() {
        return async;
    }

    boolean enablesLora() {
        return enablesLora;
    }

    /** Whether the worker has died more often than `retry_threshold` allows: DJL Serving never serves the model again. */
    boolean hasFailed() {
        String deaths = model.getProperty("failed");
        return deaths != null && Integer.parseInt(deaths) > retryThreshold;
    }

    /** A call that the worker gets before its next job; nobody hears what it says. */
    void configure(Input call) {
        configJobs.add(call);
    }

    /** Waits for the output; its body may still be to come. */
    Output predict(Input input) throws Exception {
        if (hasFailed()) {
            throw new Failure(503, "WlmException", "Model is not ready: FAILED");
        }
        Job job = new Job(input);
        if (!queue.offer(job)) {
            throw new Failure(
                    503, "WlmCapacityException", "Worker queue capacity exceeded for model: " + MODEL);
        }
        try {
            return job.output.join();
        } catch (CompletionException error) {
            throw error.getCause() instanceof Exception ? (Exception) error.getCause() : error;
        }
    }

    /**
     * While the model loads there is no predictor yet, and Python would go on loading. 0.25 does not always come to the
     * end of its close after a worker has died.
     */
    private void close() {
        if (predictor != null) {
            Thread closing = new Thread(predictor::close, "close");
            closing.setDaemon(true);
            closing.start();
            try {
                closing.join(5000);
            } catch (InterruptedException end) {
                Thread.currentThread().interrupt();
            }
        }
        ProcessHandle.current().children().forEach(ProcessHandle::destroyForcibly);
    }

    private void run() {
        try {
            runConfigJobs();
            while (true) {
                List<Job> jobs = gather();
                runConfigJobs();
                predict(jobs);
            }
        } catch (InterruptedException end) {
            return;
        }
    }

    /** The first job, and what comes after it until the batch is full or `max_batch_delay` is over. */
    private List<Job> gather() throws InterruptedException {
        List<Job> jobs = new ArrayList<>();
        jobs.add(queue.take());
        long deadline = System.nanoTime() + TimeUnit.MILLISECONDS.toNanos(maxBatchDelay);
        while (jobs.size() < batchSize) {
            Job next = queue.poll(deadline - System.nanoTime(), TimeUnit.NANOSECONDS);
            if (next == null) {
                break;
            }
            jobs.add(next);
        }
        return jobs;
    }

    private void runConfigJobs() {
        for (Input call = configJobs.poll(); call != null; call = configJobs.poll()) {
            try {
                predictor.predict(call);
            } catch (TranslateException | RuntimeException error) {
                System.err.println("front: a call about an adapter failed: " + error);
            }
        }
    }

    private void predict(List<Job> jobs) {
        List<Input> inputs = new ArrayList<>();
        jobs.forEach(job -> inputs.add(job.input));
        try {
            List<Output> outputs = predictor.batchPredict(inputs);
            for (int i = 0; i < jobs.size(); i++) {
                jobs.get(i).output.complete(outputs.get(i));
            }
        } catch (Throwable error) { // an Error too: without this thread every later request would wait for ever
            jobs.forEach(job -> job.output.completeExceptionally(error));
        }
    }
}
