// The status page shows /metrics as numbers and as charts of the last ten minutes.

import { count, duration, h } from "./dom.js";
import { element } from "./page.js";
import { parseMetrics, quantile } from "./prometheus.js";
import { getJson, getText, setKey } from "./server.js";
import { Sparkline } from "./sparkline.js";
import { whileVisible } from "./strip.js";
import { bindTheme } from "./theme_button.js";

const POLL_MS = 2000;
const NUM_SAMPLES = 300; // ten minutes
const LEAST_SHOWN = 60; // least width of the charts, in samples
const WINDOW = 15; // samples from which quantiles and the hit rate are computed

const rate = (value) => (value > 0 && value < 10 ? value.toFixed(1) : count(Math.round(value)));
const share = (value) => `${(100 * value).toFixed(value > 0 && value < 0.1 ? 1 : 0)} %`;

// The charts. `lines` maps the name of a sample's value to a label, `format` formats a value, and
// `least` is the least value of the upper edge.
const CHARTS = [
  { title: "Running", lines: { running: "now" }, unit: "requests", format: count, least: 4 },
  { title: "Waiting", lines: { waiting: "now" }, unit: "requests", format: count, least: 4 },
  { title: "KV cache in use", lines: { cache: "now" }, unit: "", format: share, least: 1 },
  { title: "Decode", lines: { decode: "now" }, unit: "tokens/s", format: rate, least: 10 },
  {
    title: "Prefill",
    lines: { prefill: "now" },
    unit: "tokens/s, without cached ones",
    format: rate,
    least: 10,
  },
  {
    title: "Prefix cache hits",
    lines: { hits: "of the last 30 s" },
    unit: "of prompt tokens",
    format: share,
    least: 1,
  },
  {
    title: "Time to first token",
    lines: { ttft50: "median", ttft95: "p95" },
    unit: "",
    format: duration,
    least: 0.01,
  },
  {
    title: "Time between tokens",
    lines: { itl50: "median", itl95: "p95" },
    unit: "",
    format: duration,
    least: 0.001,
  },
  { title: "Finished", lines: { finished: "now" }, unit: "requests/s", format: rate, least: 1 },
];

const HISTORY = "negamax-status"; // key in the tab's storage, so that charts survive a reload

const readings = []; // {time, values, buckets}, the latest last
const samples = restored();
let pointed = null; // index of the sample under the pointer

// Returns the samples from before a reload, and empty samples for the time since the reload.
function restored() {
  try {
    const { saved, kept } = JSON.parse(sessionStorage.getItem(HISTORY));
    const missed = Math.min(NUM_SAMPLES, Math.floor((Date.now() - saved) / POLL_MS));
    const empty = Object.fromEntries(Object.keys(kept[0] ?? {}).map((name) => [name, null]));
    return [...kept, ...Array(missed).fill(empty)].slice(-NUM_SAMPLES);
  } catch {
    return [];
  }
}

function save() {
  try {
    sessionStorage.setItem(HISTORY, JSON.stringify({ saved: Date.now(), kept: samples }));
  } catch {
    // without storage the charts start empty
  }
}

// Computes a sample from a reading and the earlier readings.
function sampleOf(reading, earlier) {
  const value = (name) => reading.values.get(name) ?? 0;
  const last = earlier.at(-1);
  const gained = (name, since) => value(name) - (since?.values.get(name) ?? 0);
  const perSecond = (...names) => {
    // a server that was restarted in between counts from 0 again
    const isNew = !last || gained("vllm:generation_tokens_total", last) < 0;
    if (isNew) return null;
    const total = names.reduce((sum, [name, sign]) => sum + sign * gained(name, last), 0);
    return Math.max(0, (1000 * total) / (reading.time - last.time));
  };
  const since = earlier[Math.max(0, earlier.length - WINDOW)];
  const within = (name, part) =>
    since ? quantile(since.buckets.get(name), reading.buckets.get(name) ?? [], part) : null;
  const queries = since ? gained("vllm:prefix_cache_queries_total", since) : 0;
  return {
    running: value("vllm:num_requests_running"),
    waiting: value("vllm:num_requests_waiting"),
    cache: value("sglang:token_usage"),
    decode: perSecond(["vllm:generation_tokens_total", 1]),
    prefill: perSecond(["vllm:prompt_tokens_total", 1], ["vllm:prompt_tokens_cached_total", -1]),
    hits: queries > 0 ? gained("vllm:prefix_cache_hits_total", since) / queries : null,
    ttft50: within("vllm:time_to_first_token_seconds", 0.5),
    ttft95: within("vllm:time_to_first_token_seconds", 0.95),
    itl50: within("vllm:inter_token_latency_seconds", 0.5),
    itl95: within("vllm:inter_token_latency_seconds", 0.95),
    finished: perSecond(["vllm:request_success_total", 1]),
  };
}

// A chart with its numbers.
class Tile {
  constructor(chart) {
    this.chart = chart;
    this.sparkline = new Sparkline(Object.keys(chart.lines).length, (index) => {
      pointed = index;
      show();
    });
    this.figures = h("div", { class: "figures" });
    this.top = h("span", {});
    this.start = h("span", {});
    const foot = h("div", { class: "scale" }, this.start, this.top);
    this.element = h(
      "section",
      { class: "tile" },
      h("h2", {}, chart.title),
      this.figures,
      this.sparkline.element,
      foot,
    );
  }

  show() {
    const { lines, unit, format, least } = this.chart;
    const names = Object.keys(lines);
    const series = names.map((name) => samples.map((sample) => sample[name]));
    const top = Math.max(least, ...series.flat().filter((value) => value !== null));
    const length = Math.max(LEAST_SHOWN, samples.length);
    const at = pointed === null ? samples.length - 1 : pointed - (length - samples.length);
    const shown = names.map((name) => [lines[name], samples[at]?.[name] ?? null]);
    const parts = shown.map(([label, value], index) => {
      const name = names.length > 1 ? label : unit;
      return h(
        "span",
        { class: `figure line-${index + 1}` },
        h("strong", {}, value === null ? "–" : format(value)),
        ` ${name}`,
      );
    });
    this.figures.replaceChildren(...parts);
    this.top.textContent = `up to ${format(top)}`;
    this.start.textContent = `${duration((length * POLL_MS) / 1000)} ago`;
    const said = shown
      .map(([label, value]) => `${label} ${value === null ? "no value" : format(value)}`)
      .join(", ");
    this.sparkline.show(series, length, top, `${this.chart.title}: ${said}`);
    this.sparkline.point(pointed);
  }
}

const tiles = CHARTS.map((chart) => new Tile(chart));

function show() {
  for (const tile of tiles) tile.show();
}

async function poll() {
  let text;
  try {
    text = await getText("metrics");
  } catch (error) {
    element("problem").textContent = error.message;
    element("problem").hidden = false;
    element("state").textContent = "no answer";
    element("state").className = "state-label bad";
    element("key-form").hidden = error.status !== 401;
    return;
  }
  element("problem").hidden = element("key-form").hidden = true;
  const reading = { time: performance.now(), ...parseMetrics(text) };
  samples.push(sampleOf(reading, readings));
  readings.push(reading);
  if (readings.length > WINDOW) readings.shift();
  if (samples.length > NUM_SAMPLES) samples.shift();
  save();
  showState(reading.values);
  show();
}

// Describes the server in words.
function showState(values) {
  const isUp = values.get("negamax:engine_up") !== 0;
  const isDraining = values.get("negamax:draining") === 1;
  element("state").textContent = isDraining
    ? "stopping"
    : isUp
      ? "running"
      : "the engine does not run";
  element("state").className = `state-label ${isUp && !isDraining ? "good" : "bad"}`;
  element("refused").textContent = count(values.get("vllm:admission_rejections_total") ?? 0);
  element("requests").textContent = count(values.get("vllm:request_success_total") ?? 0);
  if (!element("model").textContent) showModel();
}

async function showModel() {
  const info = await getJson("server_info").catch(() => null);
  if (!info) return;
  document.title = `Status of ${info.served_model_name} · Negamax`;
  element("model").textContent = info.served_model_name;
  const ranks = info.tp_size > 1 ? `${info.tp_size} × ` : "";
  element("machine").textContent =
    `${ranks}${info.device}, ${info.dtype}, window of ${count(info.context_length)} tokens`;
}

element("tiles").append(...tiles.map((tile) => tile.element));
bindTheme(element("theme"));
element("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  setKey(element("key").value.trim());
  poll();
});
whileVisible(poll, POLL_MS);
