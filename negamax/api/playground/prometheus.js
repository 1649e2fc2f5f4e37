// Reads Prometheus text, and computes quantiles of histograms between two readings.

const LINE = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)/;

// Returns the metrics in `text`: `values` are sums over labels, and `buckets` maps the name of a
// histogram to [[upper bound, count]].
export function parseMetrics(text) {
  const values = new Map();
  const buckets = new Map();
  for (const line of text.split("\n")) {
    const [, name, labels, written] = LINE.exec(line) ?? [];
    if (!name) continue;
    const value = Number(written.replace("Inf", "Infinity"));
    const [, bound] = /(?:^|,)le="([^"]+)"/.exec(labels ?? "") ?? [];
    if (bound === undefined) {
      values.set(name, (values.get(name) ?? 0) + value);
      continue;
    }
    const base = name.replace(/_bucket$/, "");
    const counts = buckets.get(base) ?? new Map();
    const upper = Number(bound.replace("Inf", "Infinity"));
    buckets.set(base, counts.set(upper, (counts.get(upper) ?? 0) + value));
  }
  return {
    values,
    buckets: new Map(
      [...buckets].map(([name, counts]) => [name, [...counts].sort((a, b) => a[0] - b[0])]),
    ),
  };
}

// Returns the quantile `share` (0 to 1) of the values that a histogram counted from `before` to
// `after`, interpolated within the bucket, or null without new values.
export function quantile(before, after, share) {
  const gained = after.map(([bound, count], index) => [bound, count - (before?.[index]?.[1] ?? 0)]);
  const total = gained.at(-1)?.[1] ?? 0;
  if (!(total > 0)) return null;
  const rank = share * total;
  const index = gained.findIndex(([, count]) => count >= rank);
  const [lower, below] = index > 0 ? gained[index - 1] : [0, 0];
  const [upper, count] = gained[index];
  if (upper === Infinity) return lower;
  return count === below ? upper : lower + ((upper - lower) * (rank - below)) / (count - below);
}
