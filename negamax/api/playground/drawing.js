// Draws an answer that grows at most once per frame, and less often if drawing is slow.

const SHARE = 4; // drawing takes at most one fourth of the time

export class Drawing {
  constructor(draw) {
    this.draw = draw;
    this.earliest = 0;
    this.timer = setInterval(() => this.request(), 100); // for the seconds of thinking
    this.isAsked = false;
  }

  request() {
    if (this.isAsked) return;
    this.isAsked = true;
    const wait = this.earliest - performance.now();
    if (document.hidden)
      setTimeout(() => this.now(), 250); // a hidden page gets no frames
    else setTimeout(() => requestAnimationFrame(() => this.now()), Math.max(0, wait));
  }

  now() {
    this.isAsked = false;
    if (this.timer === null) return;
    const start = performance.now();
    this.draw();
    const end = performance.now();
    this.earliest = end + (SHARE - 1) * (end - start);
  }

  finish() {
    clearInterval(this.timer);
    this.timer = null;
    this.draw();
  }
}
