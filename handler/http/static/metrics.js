// Converts the response of /metrics to the few values that the page shows.

/** Parse Prometheus's text format to a map from names with labels to values. */
export function parse(text) {
  const lines = text.split("\n").filter((line) => line && !line.startsWith("#"));
  return new Map(lines.map((line) => [line.slice(0, line.lastIndexOf(" ")), Number(line.slice(line.lastIndexOf(" ")))]));
}

const whole = (count) => count.toLocaleString("en");
const mean = (found, name) => found.get(`${name}_sum`) / found.get(`${name}_count`);
const milliseconds = (seconds) => (Number.isFinite(seconds) ? `${(seconds * 1000).toFixed(seconds < 0.1 ? 1 : 0)} ms` : "–");

/** Return the values to show by element id. `before` are the metrics of `seconds` earlier, if any. */
export function figures(found, before, seconds) {
  const tokens = (map) => map.get("lmi_generated_tokens_total");
  const speed = before ? Math.max(0, tokens(found) - tokens(before)) / seconds : NaN;
  return {
    "m-speed": Number.isFinite(speed) ? `${speed.toFixed(speed < 10 ? 1 : 0)} /s` : "–",
    "m-tokens": whole(tokens(found)),
    "m-active": String(found.get("lmi_active_sequences")),
    "m-queued": String(found.get("lmi_queued_requests")),
    "m-ok": whole(found.get('lmi_requests_total{outcome="ok"}')),
    "m-first": milliseconds(mean(found, "lmi_time_to_first_token_seconds")),
    "m-each": milliseconds(mean(found, "lmi_time_per_output_token_seconds")),
  };
}
