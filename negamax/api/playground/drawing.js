// When to draw an answer that grows: at most once per frame, and less often where drawing is slow.

const SHARE = 4; // at most one part in four of the time goes into drawing

export class Drawing {
  constructor(draw) {
    this.draw = draw;
    this.earliest = 0;
    this.timer = setInterval(() => this.request(), 100); // seconds of thinking go on between events
    this.isAsked = false;
  }

  request() {
    if (this.isAsked) return;
    this.isAsked = true;
    const wait = this.earliest - performance.now();
    if (document.hidden)
      setTimeout(() => this.now(), 250); // no frames there
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
