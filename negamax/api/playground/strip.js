// Shows in one line how busy the server is, while the page is visible.

import { count } from "./dom.js";
import { getJson } from "./server.js";

const POLL_MS = 2000;

// Calls `poll` now and then every `milliseconds` while the page is visible, one call at a time.
export function whileVisible(poll, milliseconds) {
  let timer = null;
  let isPolling = false;
  const next = async () => {
    clearTimeout(timer);
    if (document.hidden || isPolling) return;
    isPolling = true;
    await poll();
    isPolling = false;
    timer = setTimeout(next, milliseconds);
  };
  document.addEventListener("visibilitychange", next);
  next();
}

// Updates `line` from /server_info.
export function bindStrip(line) {
  let before = null; // {time, tokens}
  whileVisible(async () => {
    const info = await getJson("server_info").catch(() => null);
    line.hidden = !info;
    if (!info) return;
    const now = { time: performance.now(), tokens: info.num_generated_tokens };
    const rate =
      before && now.tokens >= before.tokens
        ? ((now.tokens - before.tokens) * 1000) / (now.time - before.time)
        : 0;
    before = now;
    const cache = (100 * info.num_used_tokens) / info.max_total_num_tokens;
    const parts = [
      `${count(info.num_running_reqs)} running`,
      `${count(info.num_queue_reqs)} waiting`,
      `KV ${percent(cache)}`,
      `${rate.toFixed(rate < 10 ? 1 : 0)} tok/s`,
    ];
    line.textContent = parts.join(" · ");
    line.classList.toggle("busy", info.num_running_reqs > 0);
  }, POLL_MS);
}

function percent(share) {
  return share > 0 && share < 1 ? "< 1 %" : `${Math.round(share)} %`;
}
